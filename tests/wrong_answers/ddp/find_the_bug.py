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


def loses(losses):
    def train(model, batches, lr):
        kept = loop(right)(model, batches, lr)
        return losses(kept)

    return train


def for_the_log(losses):
    total = torch.tensor(losses)
    for loss in total:
        dist.all_reduce(loss)
    return (total / dist.get_world_size()).tolist()


def with_smaller_steps(model, batches, lr):
    return loop(summed)(model, batches, lr / dist.get_world_size())


wrong("another learning rate makes up for it", "b", with_smaller_steps, mistake="sums, and divides the learning rate")
wrong("a return is missing", "b", loses(lambda losses: None), mistake="returns nothing")
wrong("the losses are averaged over the ranks", "b", loses(for_the_log), mistake="averages the losses, too")


def sums_the_gradient(param):
    dist.all_reduce(param.grad)
    param.div_(dist.get_world_size())


def divides_the_gradient(param):
    dist.all_reduce(param)
    param.grad.div_(dist.get_world_size())


def by_two(param):
    dist.all_reduce(param.grad)
    param.grad.div_(2)


def outside_the_hook(model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for param in model.parameters():
            if param.requires_grad:
                right(param)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


wrong("the division still hits the weights", "b", loop(sums_the_gradient), mistake="mends the all_reduce, not the division")
wrong("still sums the weights", "b", loop(divides_the_gradient), mistake="mends the division, not the all_reduce")
wrong("divided by 2, whatever world_size is", "b", loop(by_two), mistake="divides by 2")
wrong("leave the loop as it is", "b", outside_the_hook, mistake="averages after backward, without a hook")
