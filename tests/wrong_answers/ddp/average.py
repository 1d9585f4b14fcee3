"""Wrong answers to ddp.average."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


@wrong("the sum over the ranks is not divided")
def summed(model):
    """Forgets the division."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)


@wrong("it is divided twice by world_size")
def divided_twice(model):
    """Divides before and after."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad /= dist.get_world_size()
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@wrong("the parameter itself is averaged")
def weights_averaged(model):
    """Averages .data, which is the weight, not the gradient."""
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


@wrong("one without a gradient sends zeros, in the same place")
def skips_none(model):
    """A rank without a gradient does not take part, and the others wait."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@wrong("every parameter is given a gradient, also where requires_grad is False")
def frozen_too(model):
    """Gives frozen parameters a gradient of zeros."""
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


@wrong("the mean is not written back")
def not_written_back(model):
    """Averages a copy."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            dist.all_reduce(grad)
            grad /= dist.get_world_size()


@wrong("it is divided by 2, whatever world_size is")
def always_2(model):
    """Divides by 2, as in the examples."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= 2


@wrong("put into .grad where there was none")
def none_stays_none(model):
    """Takes part with zeros, but leaves .grad None."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()


@wrong("param.grad is None where the parameter is frozen")
def no_care(model):
    """The loop of the lesson: it knows neither frozen nor unused parameters."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


@wrong("wait() is missing")
def not_waited_for(model):
    """Starts all of them at once, and never waits."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad, async_op=True)
            param.grad /= dist.get_world_size()


@wrong("one without a gradient sends zeros, in the same place")
def none_last(model):
    """Sends zeros for missing gradients when all others have been sent: another order on each rank."""
    params = [param for param in model.parameters() if param.requires_grad]
    for param in sorted(params, key=lambda param: param.grad is None):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


@wrong("torch.empty")
def empty_for_none(model):
    """Sends whatever was in memory."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.empty_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@wrong("before its wait(): until then it belongs to the collective")
def divided_too_early(model):
    """Divides what has not arrived."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            work = dist.all_reduce(grad, async_op=True)
            param.grad = grad / dist.get_world_size()
            work.wait()


@wrong("twice the bytes")
def by_way_of_fp32(model):
    """Sends fp32, whatever the gradient is."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            wide = grad.float()
            dist.all_reduce(wide)
            param.grad = (wide / dist.get_world_size()).to(grad.dtype)


@wrong("as torch.zeros_like(param) makes them")
def zeros_in_fp32(model):
    """Makes fp32 zeros for a missing gradient, whatever the parameter is."""
    for param in model.parameters():
        if param.requires_grad:
            if param.grad is None:
                param.grad = torch.zeros(param.shape)
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


@wrong("as torch.zeros_like(param) makes them")
def sends_zeros_in_fp32(model):
    """The same, beside .grad: rank 1 sends another dtype than rank 0."""
    for param in model.parameters():
        if param.requires_grad:
            grad = torch.zeros(param.shape) if param.grad is None else param.grad
            dist.all_reduce(grad)
            param.grad = (grad / dist.get_world_size()).to(param.dtype)


@wrong("a set has no order")
def through_a_set(model):
    """Goes through a set: each rank in an order of its own."""
    for param in set(model.parameters()):
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
