"""Wrong answers to collectives.ring_all_gather."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def exchange(send, receive):
    """Sends to the left, receives from the right, waits for both."""
    rank, n = dist.get_rank(), dist.get_world_size()
    works = dist.isend(send, (rank - 1) % n), dist.irecv(receive, (rank + 1) % n)
    for work in works:
        work.wait()


@wrong("in the order of their arrival")
def in_order_of_arrival(shard):
    """Concatenates what it has and what arrives: rank 0 has it right, the others begin elsewhere."""
    pieces = [shard]
    for _ in range(dist.get_world_size() - 1):
        arriving = torch.empty_like(shard)
        exchange(pieces[-1], arriving)
        pieces.append(arriving)
    return torch.cat(pieces)


@wrong("its own chunk in every step")
def sends_its_own_again(shard):
    """Sends its own chunk in every step: right on two ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(shard.new_zeros(n * shard.numel()).chunk(n))
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        exchange(shard, chunks[(rank + step + 1) % n])
    return torch.cat(chunks)


@wrong("own chunk is missing")
def forgets_its_own(shard):
    """Never puts its own chunk into the result."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_zeros(n * shard.numel())
    chunks, passing = whole.chunk(n), shard
    for step in range(n - 1):
        exchange(passing, chunks[(rank + step + 1) % n])
        passing = chunks[(rank + step + 1) % n]
    return whole


@wrong("wait inside the loop")
def waits_at_the_end(shard):
    """Starts all steps and waits for all of them afterwards: step 1 sends what has not arrived."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_zeros(n * shard.numel())
    chunks = whole.chunk(n)
    chunks[rank].copy_(shard)
    works = []
    for step in range(n - 1):
        works.append(dist.isend(chunks[(rank + step) % n], (rank - 1) % n))
        works.append(dist.irecv(chunks[(rank + step + 1) % n], (rank + 1) % n))
    for work in works:
        work.wait()
    return whole


@wrong("own chunk is missing")
def forgets_its_own_in_empty_memory(shard):
    """The same, and torch.empty would hide or show it by chance."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_empty(n * shard.numel())
    chunks, passing = whole.chunk(n), shard
    for step in range(n - 1):
        exchange(passing, chunks[(rank + step + 1) % n])
        passing = chunks[(rank + step + 1) % n]
    return whole


@wrong("keep the work that isend returns")
def drops_the_works(shard):
    """Sends and forgets: on gloo nothing may ever leave."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_empty(n * shard.numel())
    chunks = whole.chunk(n)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        dist.isend(chunks[(rank + step) % n], (rank - 1) % n)
        dist.recv(chunks[(rank + step + 1) % n], (rank + 1) % n)
    return whole


@wrong("whole tensors of 6 elements travel")
def sums_of_zeros(shard):
    """Passes whole tensors round, zero outside the chunks that are known, and adds them: N times the traffic."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_zeros(n * shard.numel())
    whole.chunk(n)[rank].copy_(shard)
    passing = whole.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(whole)
        exchange(passing, arriving)
        whole += arriving
        passing = arriving
    return whole


@wrong("all_gather does for you")
def the_library_call(shard):
    """Calls what is to be built."""
    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard)
    return torch.cat(pieces)


@wrong("what arrived was received into it")
def passes_on_in_the_shard(shard):
    """Takes the shard itself for its buffer: all chunks are right, and the caller's shard is another rank's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_empty(n * shard.numel())
    chunks = whole.chunk(n)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], shard)
        chunks[(rank + step + 1) % n].copy_(shard)
    return whole


@wrong("a buffer is used before its wait()")
def stores_before_it_waits(shard):
    """Copies what arrives to its place, and waits afterwards."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_zeros(n * shard.numel())
    chunks, arriving = whole.chunk(n), torch.zeros_like(shard)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + step) % n], (rank - 1) % n)
        receiving = dist.irecv(arriving, (rank + 1) % n)
        chunks[(rank + step + 1) % n].copy_(arriving)
        receiving.wait()
        sending.wait()
    return whole
