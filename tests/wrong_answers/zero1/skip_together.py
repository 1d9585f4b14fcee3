"""Wrong answers to zero1.skip_together: a right one in pieces, and what people change in it."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def gradients(optimizer):
    return [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def finite(grads):
    return all(bool(grad.isfinite().all()) for grad in grads)


def overflows(flag):
    votes = torch.tensor(float(flag))
    dist.all_reduce(votes)
    return votes.item()


def update(optimizer, scale, by=None):
    for grad in gradients(optimizer):
        grad /= scale if by is None else by
    optimizer.step()
    return True, scale


@wrong("each rank decides for itself")
def alone(optimizer, scale):
    """Asks nobody."""
    if not finite(gradients(optimizer)):
        return False, scale / 2
    return update(optimizer, scale)


@wrong("a rank that returns early")
def returns_early(optimizer, scale):
    """Skips before the collective."""
    if not finite(gradients(optimizer)):
        return False, scale / 2
    if overflows(False):
        return False, scale / 2
    return update(optimizer, scale)


@wrong("a rank that returns early")
def tells_only_of_overflows(optimizer, scale):
    """Issues the collective only where there is something to tell."""
    if not finite(gradients(optimizer)):
        overflows(True)
        return False, scale / 2
    return update(optimizer, scale)


@wrong("NaN is no infinity")
def only_inf(optimizer, scale):
    """Asks isinf."""
    if overflows(any(bool(grad.isinf().any()) for grad in gradients(optimizer))):
        return False, scale / 2
    return update(optimizer, scale)


@wrong("NaN is no infinity")
def maximum(optimizer, scale):
    """All-reduces the largest absolute value with MAX: gloo's maximum drops a NaN."""
    largest = torch.tensor(0.0)
    for grad in gradients(optimizer):
        largest = torch.maximum(largest, grad.abs().max())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if not largest.isfinite():
        return False, scale / 2
    return update(optimizer, scale)


@wrong("minus infinity is an overflow as well")
def only_plus(optimizer, scale):
    """Compares with inf."""
    grads = gradients(optimizer)
    if overflows(any(bool((grad.isnan() | (grad == float("inf"))).any()) for grad in grads)):
        return False, scale / 2
    return update(optimizer, scale)


@wrong("large finite numbers have an infinite sum")
def by_the_sum(optimizer, scale):
    """Adds up all gradients and looks at the sum."""
    total = sum((grad.sum() for grad in gradients(optimizer)), torch.tensor(0.0))
    dist.all_reduce(total)
    if not total.isfinite():
        return False, scale / 2
    return update(optimizer, scale)


@wrong("are all param_groups looked at")
def first_group(optimizer, scale):
    """Looks at the first group's gradients."""
    grads = [param.grad for param in optimizer.param_groups[0]["params"] if param.grad is not None]
    if overflows(not finite(grads)):
        return False, scale / 2
    return update(optimizer, scale)


@wrong(".grad may be None")
def none(optimizer, scale):
    """Takes a gradient for granted."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    if overflows(not finite(grads)):
        return False, scale / 2
    return update(optimizer, scale)


@wrong("a step with zero gradients is a step")
def zero_gradients(optimizer, scale):
    """Skips by a step with zeros."""
    if overflows(not finite(gradients(optimizer))):
        for grad in gradients(optimizer):
            grad.zero_()
        optimizer.step()
        return False, scale / 2
    return update(optimizer, scale)


@wrong("the gradients are not divided by the scale")
def not_unscaled(optimizer, scale):
    """Forgets to unscale."""
    if overflows(not finite(gradients(optimizer))):
        return False, scale / 2
    return update(optimizer, scale, by=1.0)


@wrong("halve it, or the next step overflows too")
def scale_stays(optimizer, scale):
    """Skips and keeps the scale."""
    if overflows(not finite(gradients(optimizer))):
        return False, scale
    return update(optimizer, scale)


@wrong("halved once for each rank that overflows")
def halved_by_votes(optimizer, scale):
    """Halves the scale once for each vote."""
    votes = overflows(not finite(gradients(optimizer)))
    if votes:
        return False, scale / 2**votes
    return update(optimizer, scale)


@wrong("the gradients stay")
def reduces_all(optimizer, scale):
    """Sends copies of all gradients to learn one bit."""
    sums = torch.cat([torch.zeros(1), *(grad.isfinite().logical_not().float() for grad in gradients(optimizer))])
    sums = torch.cat([sums, torch.zeros(5 - len(sums))])
    dist.all_reduce(sums)
    if sums.sum() > 0:
        return False, scale / 2
    return update(optimizer, scale)


@wrong("nothing is returned")
def returns_nothing(optimizer, scale):
    """Does the right thing and says nothing."""
    if not overflows(not finite(gradients(optimizer))):
        update(optimizer, scale)
