"""Wrong answers to zero1.global_norm."""

import math

import torch
import torch.distributed as dist
from wrong_answers import wrong


def square(grad_S):
    total = grad_S.double().square().sum()
    dist.all_reduce(total)
    return total.item()


def norm_of(grad_S):
    return math.sqrt(square(grad_S))


def scale(grad_S, norm, max_norm):
    if norm > max_norm:
        grad_S *= max_norm / norm
    return norm


@wrong("that is the norm of this rank's part")
def local(grad_S, max_norm):
    """Clips by the norm of what it has, as clip_grad_norm_ does."""
    return scale(grad_S, grad_S.norm().item(), max_norm)


@wrong("squares add up, norms do not")
def sum_of_norms(grad_S, max_norm):
    """All-reduces the norms."""
    norm = grad_S.norm()
    dist.all_reduce(norm)
    return scale(grad_S, norm.item(), max_norm)


@wrong("the largest of the ranks' norms is taken")
def largest(grad_S, max_norm):
    """All-reduces with MAX."""
    norm = grad_S.norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    return scale(grad_S, norm.item(), max_norm)


@wrong("the square root is missing")
def squared(grad_S, max_norm):
    """Forgets the root."""
    return scale(grad_S, square(grad_S), max_norm)


@wrong("a small gradient is scaled up")
def always_scales(grad_S, max_norm):
    """Has no min(1, …)."""
    norm = norm_of(grad_S)
    grad_S *= max_norm / (norm + 1e-6)
    return norm


@wrong("each rank scales by its own norm")
def own_coefficient(grad_S, max_norm):
    """Returns the norm of all and scales by its own."""
    norm = norm_of(grad_S)
    scale(grad_S, grad_S.norm().item(), max_norm)
    return norm


@wrong("grad_S itself is not changed")
def out_of_place(grad_S, max_norm):
    """Makes a scaled copy."""
    norm = norm_of(grad_S)
    if norm > max_norm:
        grad_S = grad_S * (max_norm / norm)
    return norm


@wrong("also of those that have nothing, or need not clip")
def empty_returns(grad_S, max_norm):
    """Returns early where there is nothing."""
    if grad_S.numel() == 0:
        return 0.0
    return scale(grad_S, norm_of(grad_S), max_norm)


@wrong("where the norm is 0 nothing is scaled")
def divides_by_zero(grad_S, max_norm):
    """Divides by the norm in any case."""
    total = grad_S.double().square().sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    grad_S *= (max_norm / norm).clamp(max=1.0).nan_to_num(math.nan) if norm > 0 else torch.tensor(math.nan)
    return norm


@wrong("squares are formed in fp16")
def in_fp16(grad_S, max_norm):
    """Squares in the gradient's own dtype."""
    total = grad_S.square().sum()
    dist.all_reduce(total)
    return scale(grad_S, total.sqrt().item(), max_norm)


@wrong("one number from each rank, added up")
def gathers_norms(grad_S, max_norm):
    """Gathers the squares and adds them up itself."""
    total = grad_S.double().square().sum().view(1)
    rows = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, total)
    return scale(grad_S, math.sqrt(sum(rows)), max_norm)


@wrong("that clips values, not the norm")
def clips_values(grad_S, max_norm):
    """Cuts off each element."""
    norm = norm_of(grad_S)
    if norm > max_norm:
        grad_S.clamp_(-max_norm, max_norm)
    return norm


@wrong("one all_reduce is enough")
def asks_twice(grad_S, max_norm):
    """All-reduces the coefficient as well."""
    norm = norm_of(grad_S)
    coefficient = torch.tensor(min(1.0, max_norm / norm) if norm else 1.0)
    dist.all_reduce(coefficient, op=dist.ReduceOp.MIN)
    grad_S *= coefficient
    return norm


@wrong("return the one before")
def norm_after(grad_S, max_norm):
    """Returns what is left."""
    return min(scale(grad_S, norm_of(grad_S), max_norm), max_norm)
