"""Wrong answers to ddp.buckets."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def fill(bucket):
    for param in bucket:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


@wrong("the sum over the ranks is not divided")
def summed(buckets):
    """Forgets the division."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad.copy_(piece.view_as(param))


@wrong("cut from the start of the flat tensor")
def never_moves_on(buckets):
    """Takes every gradient from the beginning of the message."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param in bucket:
            param.grad.copy_(flat[: param.numel()].view_as(param))


@wrong("taken out in another order than they were put in")
def other_order(buckets):
    """Packs in the bucket's order and unpacks in reverse."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        start = 0
        for param in reversed(bucket):
            param.grad.copy_(flat[start : start + param.numel()].view_as(param))
            start += param.numel()


@wrong("the mean is not written back")
def not_written_back(buckets):
    """Forgets that cat makes a copy."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


@wrong("leaves it out of its message")
def leaves_out_none(buckets):
    """A rank without a gradient sends a shorter message."""
    for bucket in buckets:
        present = [param for param in bucket if param.grad is not None]
        flat = torch.cat([param.grad.flatten() for param in present])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, piece in zip(present, flat.split([param.numel() for param in present]), strict=True):
            param.grad.copy_(piece.view_as(param))


@wrong("each gradient is sent by itself")
def one_by_one(buckets):
    """As many messages as before."""
    for bucket in buckets:
        fill(bucket)
        for param in bucket:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@wrong("all buckets are sent as one message")
def all_at_once(buckets):
    """One message for everything."""
    params = [param for bucket in buckets for param in bucket]
    fill(params)
    flat = torch.cat([param.grad.flatten() for param in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad.copy_(piece.view_as(param))


@wrong("flatten() or reshape(-1)")
def view_of_anything(buckets):
    """view(-1), which refuses a gradient that is not contiguous."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.view(-1) for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad = piece.view_as(param)


@wrong("the flat tensor is float32, whatever the gradients are")
def always_fp32(buckets):
    """Makes the flat tensor with torch.zeros."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.zeros(sum(param.numel() for param in bucket))
        pieces = flat.split([param.numel() for param in bucket])
        for param, piece in zip(bucket, pieces, strict=True):
            piece.copy_(param.grad.flatten())
        dist.all_reduce(flat)
        for param, piece in zip(bucket, pieces, strict=True):
            param.grad.copy_(piece.view_as(param) / dist.get_world_size())


@wrong("no all_gather is needed")
def gathered(buckets):
    """Gathers all ranks' gradients and adds them up itself."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, flat)
        mean = sum(rows) / len(rows)
        for param, piece in zip(bucket, mean.split([param.numel() for param in bucket]), strict=True):
            param.grad.copy_(piece.view_as(param))


@wrong("nothing has to be padded")
def padded(buckets):
    """Makes every message even."""
    for bucket in buckets:
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        flat = torch.cat([flat, flat.new_zeros(1)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        numels = [param.numel() for param in bucket]
        for param, piece in zip(bucket, flat[:-1].split(numels), strict=True):
            param.grad.copy_(piece.view_as(param))


@wrong("as torch.zeros_like(param) makes them")
def zeros_in_fp32(buckets):
    """Makes fp32 zeros for a missing gradient: cat then makes the whole message fp32, on this rank alone."""
    for bucket in buckets:
        flat = torch.cat([(torch.zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad = piece.view_as(param).to(param.dtype)


@wrong("change the caller's list")
def uses_up_the_list(buckets):
    """Takes the buckets out of the caller's list."""
    while buckets:
        bucket = buckets.pop(0)
        fill(bucket)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad.copy_(piece.view_as(param))


@wrong("a set has no order")
def packs_a_set(buckets):
    """Packs each bucket in the order of a set, which is another one on each rank."""
    for bucket in buckets:
        fill(bucket)
        params = list(set(bucket))
        flat = torch.cat([param.grad.flatten() for param in params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.grad.copy_(piece.view_as(param))
