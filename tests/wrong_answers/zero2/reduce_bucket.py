"""Wrong answers to zero2.reduce_bucket: a right one in pieces, and what people change in it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def bucket(grads):
    flat = torch.cat([grad.flatten() for grad in grads])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def scattered(flat_P):
    grad_S = flat_P.new_empty(len(flat_P) // dist.get_world_size())
    reduce_scatter(grad_S, flat_P)
    return grad_S


@wrong("right numbers, twice the bytes")
def all_reduced(grads):
    """All-reduces the bucket and takes a slice."""
    flat_P = bucket(grads)
    dist.all_reduce(flat_P)
    return (flat_P / dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()].clone()


@wrong("the whole bucket stays alive with it")
def in_place(grads):
    """Reduces into the bucket's own slice and returns that: a view."""
    flat_P, n = bucket(grads), dist.get_world_size()
    grad_S = flat_P.chunk(n)[dist.get_rank()]
    reduce_scatter(grad_S, flat_P)
    grad_S /= n
    return grad_S


@wrong("the sum over the ranks is not divided")
def summed(grads):
    """Forgets that a reduce-scatter sums."""
    return scattered(bucket(grads))


@wrong("divided twice")
def divided_twice(grads):
    """Divides before and after."""
    return scattered(bucket(grads) / dist.get_world_size()) / dist.get_world_size()


@wrong("the bucket has to be padded")
def not_padded(grads):
    """Hands over what does not divide by N."""
    return scattered(torch.cat([grad.flatten() for grad in grads])) / dist.get_world_size()


@wrong("the padding stands in front")
def padded_in_front(grads):
    """Pads at the wrong end."""
    flat = torch.cat([grad.flatten() for grad in grads])
    return scattered(F.pad(flat, (-len(flat) % dist.get_world_size(), 0))) / dist.get_world_size()


@wrong("what is a multiple already gets no padding")
def always_padded(grads):
    """Adds a whole N of zeros where nothing is missing."""
    flat, n = torch.cat([grad.flatten() for grad in grads]), dist.get_world_size()
    return scattered(F.pad(flat, (0, n - len(flat) % n))) / n


@wrong("the padding is cut off")
def cut_off(grads):
    """Returns the elements without the padding."""
    flat, n = torch.cat([grad.flatten() for grad in grads]), dist.get_world_size()
    grad_S = scattered(bucket(grads)) / n
    return grad_S[: max(0, len(flat) - dist.get_rank() * len(grad_S))].clone()


@wrong("that is what it is there for")
def one_by_one(grads):
    """Sends one message for each shard's owner."""
    flat_P, n = bucket(grads), dist.get_world_size()
    pieces = [scattered(torch.stack([chunk[i] for chunk in flat_P.chunk(n)])) for i in range(len(flat_P) // n)]
    return torch.cat(pieces) / n


@wrong("a reduce to each owner")
def reduced_to_owners(grads):
    """N reduces."""
    n = dist.get_world_size()
    chunks = [chunk.clone() for chunk in bucket(grads).chunk(n)]
    for owner, chunk in enumerate(chunks):
        dist.reduce(chunk, dst=owner)
    return chunks[dist.get_rank()] / n


@wrong("in fp32 a 16-bit gradient takes twice the bytes")
def in_fp32(grads):
    """Casts up before it sends."""
    return (scattered(bucket(grads).float()) / dist.get_world_size()).to(grads[0].dtype)


@wrong("the shard has that of the gradients")
def fp32_shard(grads):
    """Makes the shard with torch.empty's default dtype."""
    flat_P = bucket(grads)
    grad_S = torch.empty(len(flat_P) // dist.get_world_size())
    reduce_scatter(grad_S, flat_P)
    return grad_S / dist.get_world_size()


@wrong("nothing is sent")
def not_reduced(grads):
    """Takes its own slice."""
    return bucket(grads).chunk(dist.get_world_size())[dist.get_rank()].clone()


@wrong("its wait() is missing")
def not_waited_for(grads):
    """Starts the reduce-scatter, and divides what it finds."""
    flat_P = bucket(grads)
    grad_S = flat_P.new_empty(len(flat_P) // dist.get_world_size())
    reduce_scatter(grad_S, flat_P, async_op=True)
    return grad_S / dist.get_world_size()


@wrong("a reduce_scatter takes P elements and gives S = P / N")
def the_wrong_way_round(grads):
    """Swaps out and in."""
    flat_P = bucket(grads)
    grad_S = flat_P.new_empty(len(flat_P) // dist.get_world_size())
    reduce_scatter(flat_P, grad_S)
    return grad_S / dist.get_world_size()


@wrong("nothing is returned")
def nothing(grads):
    """Forgets to return the shard."""
    scattered(bucket(grads)).div_(dist.get_world_size())


@wrong("something writes into a gradient, or into a view of one")
def divides_the_gradient(grads):
    """Of a single gradient that needs no padding it makes no copy, and divides it in place."""
    n = dist.get_world_size()
    flat = grads[0].reshape(-1) if len(grads) == 1 else torch.cat([grad.reshape(-1) for grad in grads])
    if len(flat) % n:
        flat = F.pad(flat, (0, -len(flat) % n))
    flat /= n
    return scattered(flat)
