"""Wrong answers to collectives.ring_reduce_scatter."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def exchange(send, receive):
    """Sends to the left, receives from the right, waits for both."""
    rank, n = dist.get_rank(), dist.get_world_size()
    works = dist.isend(send, (rank - 1) % n), dist.irecv(receive, (rank + 1) % n)
    for work in works:
        work.wait()


@wrong("all_reduce does for you")
def the_whole_sum(x):
    """Right numbers, from the call that is to be built, and twice the traffic."""
    dist.all_reduce(x)
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


@wrong("whole tensors of 9 elements travel")
def whole_tensors(x):
    """Gathers everybody's tensor on every rank and adds: right numbers, N times the traffic."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        exchange(passing, arriving)
        total += arriving
        passing = arriving
    return total.chunk(n)[rank]


@wrong("must pass on its sum so far")
def sends_originals(x):
    """Adds in a copy and goes on sending the original chunks: right on two ranks, where a chunk makes one hop."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks, sums = x.chunk(n), x.clone().chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank + step + 1) % n], arriving)
        sums[(rank + step + 2) % n].add_(arriving)
    return sums[rank]


@wrong("has replaced the rank's own values")
def receives_in_place(x):
    """Receives straight into the chunk: its own values are gone."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    for step in range(n - 1):
        exchange(chunks[(rank + step + 1) % n], chunks[(rank + step + 2) % n])
    return chunks[rank]


@wrong("keep the work that isend returns")
def drops_the_works(x):
    """Sends and forgets: on gloo nothing may ever leave."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        dist.isend(chunks[(rank + step + 1) % n], (rank - 1) % n)
        dist.recv(arriving, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


@wrong("a buffer is used before its wait()")
def adds_before_it_waits(x):
    """Waits, but only after it has added."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + step + 1) % n], (rank - 1) % n)
        receiving = dist.irecv(arriving, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(arriving)
        receiving.wait()
        sending.wait()
    return chunks[rank]


@wrong("a buffer is used before its wait()")
def adds_out_of_place_before_it_waits(x):
    """The same with a new tensor for each sum: nothing that is under way is written, and it is read all the same."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().chunk(n))
    for step in range(n - 1):
        send, receive = (rank + step + 1) % n, (rank + step + 2) % n
        arriving = torch.zeros_like(chunks[0])
        receiving = dist.irecv(arriving, (rank + 1) % n)
        sending = dist.isend(chunks[send], (rank - 1) % n)
        chunks[receive] = chunks[receive] + arriving
        receiving.wait()
        sending.wait()
    return chunks[rank]


@wrong("overwritten while it is being sent")
def clears_what_it_sends(x):
    """Tidies up a chunk that is still on its way out."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        sending = dist.isend(chunks[(rank + step + 1) % n], (rank - 1) % n)
        chunks[(rank + step + 1) % n].zero_()
        dist.recv(arriving, (rank + 1) % n)
        sending.wait()
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


@wrong("overwritten while it is being sent")
def one_buffer_both_ways(x):
    """Keeps the sum in one buffer, and adds to it while the step before still sends it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    passing = chunks[(rank + 1) % n].clone()
    works = []
    for step in range(n - 1):
        works.append(dist.isend(passing, (rank - 1) % n))
        arriving = torch.empty_like(passing)
        dist.recv(arriving, (rank + 1) % n)
        passing.copy_(arriving + chunks[(rank + step + 2) % n])
    for work in works:
        work.wait()
    return passing


@wrong("the tensor that receives is as large as what is sent")
def buffer_of_two(x):
    """A buffer of 2 elements, as many as a chunk has on two ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty(2)
    for step in range(n - 1):
        exchange(chunks[(rank + step + 1) % n], arriving)
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


@wrong("added to the chunk that is sent")
def adds_to_the_wrong_chunk(x):
    """Adds what arrives to the chunk that it has sent: on two ranks no ring can tell this from other mistakes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank + step + 1) % n], arriving)
        chunks[(rank + step + 1) % n].add_(arriving)
    return chunks[rank]


@wrong("begins one chunk too early")
def begins_at_home(x):
    """Sends its own chunk first: all sums come out right, one rank away."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], arriving)
        chunks[(rank + step + 1) % n].add_(arriving)
    return chunks[rank]


@wrong("went to another chunk")
def begins_at_home_in_a_copy(x):
    """The same in a copy of x, where nobody can look."""
    return begins_at_home(x.clone())


@wrong("nothing goes out through dist.isend")
def goes_round_the_library(x):
    """Calls the process group itself, whose calls are not counted."""
    dist.group.WORLD.allreduce([x]).wait()
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


@wrong("call its wait()")
def never_waits(x):
    """Takes isend and irecv for send and recv."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    for step in range(n - 1):
        arriving = torch.zeros_like(chunks[0])
        dist.isend(chunks[(rank + step + 1) % n], (rank - 1) % n)
        dist.irecv(arriving, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


@wrong("start both with isend and irecv")
def all_receive_first(x):
    """Every rank listens before it speaks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        dist.recv(arriving, (rank + 1) % n)
        dist.send(chunks[(rank + step + 1) % n], (rank - 1) % n)
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


@wrong("it is no ring")
def direct(x):
    """Sends each chunk straight to its owner: as many bytes, but each rank talks to all others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    total = chunks[rank].clone()
    for distance in range(1, n):
        works = (
            dist.isend(chunks[(rank + distance) % n], (rank + distance) % n),
            dist.irecv(arriving, (rank - distance) % n),
        )
        for work in works:
            work.wait()
        total += arriving
    return total
