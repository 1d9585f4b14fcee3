"""Wrong answers to collectives.all_reduce. The two halves are right in all of them."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def exchange(send, receive):
    """Sends to the left, receives from the right, waits for both."""
    rank, n = dist.get_rank(), dist.get_world_size()
    works = dist.isend(send, (rank - 1) % n), dist.irecv(receive, (rank + 1) % n)
    for work in works:
        work.wait()


def reduce_scatter(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank + step + 1) % n], arriving)
        chunks[(rank + step + 2) % n].add_(arriving)
    return chunks[rank]


def all_gather(shard):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_empty(n * shard.numel())
    chunks = whole.chunk(n)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        exchange(chunks[(rank + step) % n], chunks[(rank + step + 1) % n])
    return whole


@wrong("pad x first")
def drops_the_remainder(x):
    """numel // world_size drops the remainder: the last elements stay as they were."""
    n = dist.get_world_size()
    even = x.numel() // n * n
    flat = x.flatten()
    if even:
        flat[:even] = all_gather(reduce_scatter(flat[:even].clone()))
    x.copy_(flat.view(x.shape))


@wrong("pad x first")
def does_not_pad(x):
    """Hands x to the halves as it is; its chunks have different sizes, or there are too few."""
    flat = x.flatten().clone()
    x.copy_(all_gather(reduce_scatter(flat)).view(x.shape))


@wrong("only renames")
def only_renames(x):
    """Assigns the sum to the local name x: the caller's tensor is untouched."""
    n = dist.get_world_size()
    numel, shape = x.numel(), x.shape
    padded = torch.cat([x.flatten(), x.new_zeros(-numel % n)])
    x = all_gather(reduce_scatter(padded))[:numel].view(shape)


@wrong("x.new_zeros takes the dtype of x")
def pads_in_float32(x):
    """torch.zeros is float32: a float64 tensor loses digits on the way."""
    n = dist.get_world_size()
    padded = torch.zeros(-(-x.numel() // n) * n)
    padded[: x.numel()] = x.flatten()
    x.copy_(all_gather(reduce_scatter(padded))[: x.numel()].view(x.shape))


@wrong("x.new_zeros takes the dtype of x")
def detours_through_float32(x):
    """Sums in float32 and casts back: 16-bit values cost twice the bytes."""
    n = dist.get_world_size()
    wide = x.flatten().to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.cat([wide, wide.new_zeros(-x.numel() % n)])
    x.copy_(all_gather(reduce_scatter(padded))[: x.numel()].view(x.shape))


@wrong("x.data = …")
def rebinds_the_data(x):
    """Gives x another memory: whoever holds a view of it keeps the old values."""
    n = dist.get_world_size()
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % n)])
    x.data = all_gather(reduce_scatter(padded))[: x.numel()].view(x.shape)


@wrong("cut it to x.numel()")
def keeps_the_padding(x):
    """Copies the padded sum back."""
    n = dist.get_world_size()
    padded = torch.cat([x.flatten(), x.new_zeros(-x.numel() % n)])
    x.copy_(all_gather(reduce_scatter(padded)))


@wrong("whole tensors of 4 elements travel")
def gathers_everything(x):
    """Gathers everybody's whole tensor and adds: right numbers, N times the traffic of a reduce-scatter."""
    n = dist.get_world_size()
    x.copy_(all_gather(x.flatten()).view(n, *x.shape).sum(0))
