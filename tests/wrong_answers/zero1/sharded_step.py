"""Wrong answers to zero1.sharded_step: a right one, and what people change in it."""

import torch
import torch.distributed as dist
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, weights_P, optimizer_class, lr):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.weights_P = weights_P
        self.weights_S = weights_P.chunk(self.n)[self.rank]
        self.optimizer = optimizer_class([self.weights_S], lr=lr)

    def mean(self, grad_P):
        grad_S = torch.empty_like(self.weights_S)
        reduce_scatter(grad_S, grad_P)
        return grad_S / self.n

    def gather(self):
        all_gather(self.weights_P, self.weights_S)

    def step(self, grad_P):
        self.weights_S.grad = self.mean(grad_P)
        self.optimizer.step()
        self.gather()


@wrong("summed, not averaged")
class Summed(Right):
    """Forgets that a reduce-scatter sums."""

    def mean(self, grad_P):
        return super().mean(grad_P) * self.n


@wrong("divided twice")
class DividedTwice(Right):
    """Divides before and after."""

    def mean(self, grad_P):
        return super().mean(grad_P) / self.n


@wrong("the all_gather is missing")
class NotGathered(Right):
    """Each rank updates its shard, and nobody hears of it."""

    def gather(self):
        pass


@wrong("each rank steps with its own gradient")
class NotReduced(Right):
    """Takes its own gradient's slice."""

    def mean(self, grad_P):
        return grad_P.chunk(self.n)[self.rank]


@wrong("right numbers, twice the bytes")
class AllReduced(Right):
    """All-reduces the whole gradient and reads a slice of it."""

    def mean(self, grad_P):
        dist.all_reduce(grad_P)
        return grad_P.chunk(self.n)[self.rank] / self.n


@wrong("right numbers, twice the bytes")
class DDP:
    """Updates all weights on every rank: DDP. Nothing is sharded."""

    def __init__(self, weights_P, optimizer_class, lr):
        self.weights_P = weights_P
        self.optimizer = optimizer_class([weights_P], lr=lr)

    def step(self, grad_P):
        dist.all_reduce(grad_P)
        self.weights_P.grad = grad_P / dist.get_world_size()
        self.optimizer.step()


@wrong("the optimizer is given all weights")
class WholeState(Right):
    """Reduces and gathers as it should, and gives the optimizer everything: state for all weights."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P, optimizer_class, lr)
        self.optimizer = optimizer_class([weights_P], lr=lr)

    def step(self, grad_P):
        self.weights_P.grad = torch.zeros_like(self.weights_P)
        self.weights_P.grad.chunk(self.n)[self.rank].copy_(self.mean(grad_P))
        self.optimizer.step()
        self.gather()


@wrong("the update goes to a copy of it")
class UpdatesACopy(Right):
    """Clones the shard, and gathers the original."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P, optimizer_class, lr)
        self.copy_S = self.weights_S.clone()
        self.optimizer = optimizer_class([self.copy_S], lr=lr)

    def step(self, grad_P):
        self.copy_S.grad = self.mean(grad_P)
        self.optimizer.step()
        self.gather()


@wrong("the update goes to a copy of it")
class GathersElsewhere(Right):
    """Puts the gathered weights under its own name: the caller's tensor stays as it was."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P.clone(), optimizer_class, lr)


@wrong("a new optimizer is built in each step")
class AnewEachStep(Right):
    """Forgets the moments."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P, optimizer_class, lr)
        self.make = lambda: optimizer_class([self.weights_S], lr=lr)

    def step(self, grad_P):
        self.optimizer = self.make()
        super().step(grad_P)


@wrong("still in .grad")
class NeverCleared(Right):
    """Adds to .grad, and nobody clears it."""

    def step(self, grad_P):
        mean = self.mean(grad_P)
        self.weights_S.grad = mean if self.weights_S.grad is None else self.weights_S.grad + mean
        self.optimizer.step()
        self.gather()


@wrong("every rank updates the first shard")
class FirstShard(Right):
    """Takes the first S elements on every rank."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P, optimizer_class, lr)
        self.weights_S = weights_P.chunk(self.n)[0]
        self.optimizer = optimizer_class([self.weights_S], lr=lr)


@wrong("gathering gradients as well")
class GathersGradientsToo(Right):
    """Makes an all-reduce of two halves, and a third one for the weights."""

    def mean(self, grad_P):
        grad_S = super().mean(grad_P)
        all_gather(grad_P, grad_S)
        return grad_P.chunk(self.n)[self.rank]


@wrong("the weights are broadcast")
class BroadcastFirst(Right):
    """Begins as DDP does."""

    def __init__(self, weights_P, optimizer_class, lr):
        dist.broadcast(weights_P, src=0)
        super().__init__(weights_P, optimizer_class, lr)


@wrong("a broadcast from each owner in turn")
class BroadcastEach(Right):
    """Each owner broadcasts its shard, as ZeroRedundancyOptimizer does."""

    def gather(self):
        for owner, shard in enumerate(self.weights_P.chunk(self.n)):
            dist.broadcast(shard, src=owner)


@wrong("stays alive after step()")
class KeepsTheGradient(Right):
    """Keeps a full mean gradient for later."""

    def mean(self, grad_P):
        self.full_P = torch.zeros_like(grad_P)
        mine = self.full_P.chunk(self.n)[self.rank]
        mine.copy_(super().mean(grad_P))
        return mine


@wrong("build optimizer_class([shard], lr=lr)")
class ByHand(Right):
    """Writes SGD, whatever the class."""

    def __init__(self, weights_P, optimizer_class, lr):
        super().__init__(weights_P, optimizer_class, lr)
        self.lr = lr

    def step(self, grad_P):
        self.weights_S -= self.lr * self.mean(grad_P)
        self.gather()


@wrong("its wait() is missing")
class NeverWaits(Right):
    """Starts the all-gather, and goes on."""

    def gather(self):
        self.work = all_gather(self.weights_P, self.weights_S, async_op=True)
