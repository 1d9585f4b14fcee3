"""Wrong answers to zero3.shard_unit."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong


def flatten(params):
    flat = torch.cat([param.data.flatten() for param in params])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


def move(params, flat_P):
    start = 0
    for param in params:
        param.data = flat_P[start : start + param.numel()].view_as(param)
        start += param.numel()


def own(flat_P):
    return flat_P.chunk(dist.get_world_size())[dist.get_rank()].clone()


@wrong("it is a slice of flat_P")
def slices(params):
    """Keeps a view of the buffer for a shard: the buffer can never go."""
    flat_P = flatten(params)
    move(params, flat_P)
    return flat_P, flat_P.chunk(dist.get_world_size())[dist.get_rank()]


@wrong("a frozen parameter is left out")
def only_trained(params):
    """Shards what the optimizer updates, as ZeRO-1 does."""
    params = [param for param in params if param.requires_grad]
    flat_P = flatten(params)
    move(params, flat_P)
    return flat_P, own(flat_P)


@wrong("a frozen parameter is not moved")
def frozen_stay(params):
    """Copies all into the buffer, and moves only the trainable ones there."""
    flat_P = flatten(params)
    start = 0
    for param in params:
        if param.requires_grad:
            param.data = flat_P[start : start + param.numel()].view_as(param)
        start += param.numel()
    return flat_P, own(flat_P)


@wrong(".data is never pointed there")
def copies(params):
    """Makes the buffer, and leaves the parameters where they were."""
    flat_P = flatten(params)
    return flat_P, own(flat_P)


@wrong("numel is rounded down")
def rounds_down(params):
    """Drops the remainder."""
    n = dist.get_world_size()
    flat = torch.cat([param.data.flatten() for param in params])
    flat_P = flat[: len(flat) // n * n].clone()
    return flat_P, own(flat_P) if len(flat_P) else flat_P


@wrong("the padding is missing")
def unpadded(params):
    """Cuts the buffer into pieces of different lengths."""
    flat = torch.cat([param.data.flatten() for param in params])
    move(params, flat)
    shards = flat.chunk(dist.get_world_size())
    return flat, shards[dist.get_rank()].clone() if dist.get_rank() < len(shards) else flat[:0].clone()


@wrong("nothing has to be padded")
def always_pads(params):
    """Pads where nothing has to be padded."""
    flat, n = torch.cat([param.data.flatten() for param in params]), dist.get_world_size()
    flat_P = F.pad(flat, (0, n - len(flat) % n))
    move(params, flat_P)
    return flat_P, own(flat_P)


@wrong("rank 0's shard")
def first_shard(params):
    """Takes the first S elements on every rank."""
    flat_P = flatten(params)
    move(params, flat_P)
    return flat_P, flat_P[: len(flat_P) // dist.get_world_size()].clone()


@wrong("the padding is cut off")
def cuts_the_padding(params):
    """Returns the last shard without its padding."""
    flat_P = flatten(params)
    move(params, flat_P)
    S, numel = len(flat_P) // dist.get_world_size(), sum(map(torch.numel, params))
    return flat_P, flat_P[:numel][dist.get_rank() * S : (dist.get_rank() + 1) * S].clone()


@wrong("take param.data")
def with_autograd(params):
    """Concatenates the parameters themselves, so autograd takes part."""
    flat = torch.cat([param.flatten() for param in params])
    flat_P = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
    start = 0
    for param in params:
        param.data = flat_P.data[start : start + param.numel()].view_as(param)
        start += param.numel()
    return flat_P, own(flat_P)


@wrong("a rank cuts its shard out of its own")
def broadcasts(params):
    """Begins with a broadcast, as DDP does."""
    flat_P = flatten(params)
    dist.broadcast(flat_P, src=0)
    move(params, flat_P)
    return flat_P, own(flat_P)


@wrong("the two are exchanged")
def exchanged(params):
    """Returns shard and buffer in the other order."""
    flat_P = flatten(params)
    move(params, flat_P)
    return own(flat_P), flat_P


@wrong("that is rank 1's shard")
def reversed_shards(params):
    """Hands out the shards from the last to the first."""
    flat_P = flatten(params)
    move(params, flat_P)
    return flat_P, flat_P.chunk(dist.get_world_size())[-1 - dist.get_rank()].clone()


@wrong("the whole is padded, once")
def pads_each(params):
    """Pads each parameter by itself."""
    flat_P = torch.cat([flatten([param]) for param in params])
    start = 0
    for param in params:
        param.data = flat_P[start : start + param.numel()].view_as(param)
        start += len(flatten([param]))
    return flat_P, own(flat_P)


@wrong("a gradient is required of shard_S, if at all")
def requires_a_gradient(params):
    """Lets the buffer require a gradient."""
    flat_P = flatten(params)
    move(params, flat_P)
    return flat_P.requires_grad_(), own(flat_P.data).requires_grad_()
