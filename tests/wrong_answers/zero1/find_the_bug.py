"""Wrong answers to zero1.find_the_bug: what one would measure, and the mended loop."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def loop(mean, whole=False, gather=True):
    def train(model, batches, lr):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        numel = sum(param.numel() for param in model.parameters())
        S = -(-numel // world_size)
        weights_P, grad_P = torch.zeros(S * world_size), torch.zeros(S * world_size)
        start = 0
        for param in model.parameters():
            place = slice(start, start + param.numel())
            weights_P[place] = param.data.flatten()
            param.data = weights_P[place].view_as(param)
            param.grad = grad_P[place].view_as(param)
            start += param.numel()
        weights_S = weights_P[rank * S : (rank + 1) * S]
        optimizer = torch.optim.SGD([weights_P if whole else weights_S], lr=lr, momentum=0.9)
        losses = []
        for x, y in batches:
            grad_P.zero_()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if whole:
                dist.all_reduce(grad_P)
                weights_P.grad = grad_P / world_size
            else:
                weights_S.grad = mean(grad_P, S, rank, world_size)
            optimizer.step()
            if gather:
                all_gather(weights_P, weights_S)
            losses.append(loss.item())
        return losses

    return train


def right(grad_P, S, rank, world_size):
    grad_S = torch.empty(S)
    reduce_scatter(grad_S, grad_P)
    return grad_S / world_size


def as_it_was(grad_P, S, rank, world_size):
    dist.all_reduce(grad_P)
    grad_P /= world_size
    return grad_P[rank * S : (rank + 1) * S]


def summed(grad_P, S, rank, world_size):
    return right(grad_P, S, rank, world_size) * world_size


def twice(grad_P, S, rank, world_size):
    return right(grad_P, S, rank, world_size) / world_size


def own(grad_P, S, rank, world_size):
    return grad_P[rank * S : (rank + 1) * S].clone()


def in_two_halves(grad_P, S, rank, world_size):
    grad_S = right(grad_P, S, rank, world_size)
    all_gather(grad_P, grad_S)
    return grad_P[rank * S : (rank + 1) * S]


wrong("its state has that shape: S elements", "a", loop(right), mistake="says that the momentum is whole")
wrong("every rank has the same N shards", "b", loop(right), mistake="says that the ranks differ")
wrong("the sum is divided by world_size", "d", loop(right), mistake="says that the step is too large")
wrong("an all_reduce is two of them", "e", loop(right), mistake="counts twice DDP's traffic")
wrong("the all_reduce is still there", "c", loop(as_it_was), mistake="mends nothing")
wrong("no longer averaged", "c", loop(summed), mistake="loses the division")
wrong("each rank updates its shard with its own gradient", "c", loop(own), mistake="reduces nothing")
wrong("keeps it to itself", "c", loop(right, gather=False), mistake="drops the all_gather")
wrong("the division by world_size is done twice", "c", loop(twice), mistake="divides twice")
wrong("an all-reduce in two parts", "c", loop(in_two_halves), mistake="replaces the all-reduce by its two halves")
wrong(
    "the all_reduce is still there",
    "c",
    loop(right, whole=True, gather=False),
    mistake="goes back to DDP, and drops the all_gather",
)
