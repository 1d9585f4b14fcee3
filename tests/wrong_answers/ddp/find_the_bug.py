"""Wrong answers to ddp.find_the_bug: what one would measure, and the mended loop."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong


def loop(average, after_step=lambda model: None):
    def train(model, batches, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(average)
        losses = []
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(model)
            losses.append(loss.item())
        return losses

    return train


def right(param):
    dist.all_reduce(param.grad)
    param.grad.div_(dist.get_world_size())


def as_it_was(grad):
    dist.all_reduce(grad)
    grad.div_(dist.get_world_size())


def summed(param):
    dist.all_reduce(param.grad)


def of_a_copy(param):
    grad = param.grad.clone()
    dist.all_reduce(grad)
    grad.div_(dist.get_world_size())


def both(param):
    right(param)
    as_it_was(param.data)


def average_weights(model):
    for param in model.parameters():
        if param.requires_grad:
            as_it_was(param.data)


wrong(
    "there is one. Look at which tensor is divided", "a", loop(right), mistake="says that the gradients are too large"
)
wrong("the traffic is right", "c", loop(right), mistake="says that too much is sent")
wrong("With which gradients does each rank take it?", "d", loop(right), mistake="says that the ranks agree")
wrong("the weights are still averaged during backward", "b", loop(as_it_was), mistake="mends nothing")
wrong("summed, not averaged", "b", loop(summed), mistake="averages the gradient and loses the division")
wrong("nothing is reduced", "b", loop(of_a_copy), mistake="averages a copy of the gradient")
wrong(
    "that hides the symptom",
    "b",
    loop(lambda param: None, average_weights),
    mistake="averages the weights after the step",
)
wrong("the weights are still sent", "b", loop(both), mistake="averages gradients and weights")
