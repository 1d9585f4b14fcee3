"""Wrong answers to zero2.accumulate_shards: a right one, and what people change in it."""

import torch
import torch.distributed as dist
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, weights_P, lr):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.weights_P, self.lr = weights_P, lr
        self.weights_S = weights_P.chunk(self.n)[self.rank]
        self.sum_S = None

    def mean(self, grad_P):
        mean_S = grad_P.new_empty(len(grad_P) // self.n)
        reduce_scatter(mean_S, grad_P)
        return mean_S / self.n

    def backward(self, grad_P):
        mean_S = self.mean(grad_P)
        self.sum_S = mean_S.float() if self.sum_S is None else self.sum_S + mean_S

    def gather(self):
        all_gather(self.weights_P, self.weights_S)

    def step(self):
        self.weights_S -= self.lr * self.sum_S
        self.gather()
        self.sum_S = None


@wrong("the last micro-batch is added as this rank has it")
class LastIsLocal(Right):
    """Adds the last micro-batch after the reduction of the others (DeepSpeed issue 7985)."""

    def __init__(self, weights_P, lr):
        super().__init__(weights_P, lr)
        self.waiting = None

    def backward(self, grad_P):
        if self.waiting is not None:
            super().backward(self.waiting)
        self.waiting = grad_P

    def step(self):
        mine = self.waiting.chunk(self.n)[self.rank].float()
        self.sum_S = mine if self.sum_S is None else self.sum_S + mine
        self.waiting = None
        super().step()


@wrong("only the first micro-batch is reduced")
class FirstIsReduced(Right):
    """Reduces the first, and adds its own slices of the others to it."""

    def mean(self, grad_P):
        mean_S = super().mean(grad_P)
        return mean_S if self.sum_S is None else grad_P.chunk(self.n)[self.rank]


@wrong("That is ZeRO-1 with no_sync()")
class ReducesInStep(Right):
    """Adds up whole gradients, and reduces once."""

    def backward(self, grad_P):
        self.grad_P = grad_P.float() if self.sum_S is None else self.grad_P + grad_P
        self.sum_S = 1

    def step(self):
        self.sum_S = self.mean(self.grad_P)
        super().step()


@wrong("the sum is bf16, where 256 + 1 is 256")
class SumsIn16Bits(Right):
    """Sums as it arrives."""

    def backward(self, grad_P):
        mean_S = self.mean(grad_P)
        self.sum_S = mean_S if self.sum_S is None else self.sum_S + mean_S


@wrong("only the last micro-batch is in it")
class Overwrites(Right):
    """Reduces into the sum."""

    def backward(self, grad_P):
        self.sum_S = self.mean(grad_P).float()


@wrong("the sum of the step before is still in it")
class NeverForgets(Right):
    """Does not begin a new sum."""

    def step(self):
        sum_S = self.sum_S
        super().step()
        self.sum_S = sum_S


@wrong("divided by the number of micro-batches")
class DividesByG(Right):
    """Counts the micro-batches and divides by them."""

    def __init__(self, weights_P, lr):
        super().__init__(weights_P, lr)
        self.count = 0

    def backward(self, grad_P):
        super().backward(grad_P)
        self.count += 1

    def step(self):
        self.sum_S /= self.count
        self.count = 0
        super().step()


@wrong("the sum over the ranks is not divided")
class Summed(Right):
    """Forgets that a reduce-scatter sums."""

    def mean(self, grad_P):
        return super().mean(grad_P) * self.n


@wrong("where it keeps one: twice the bytes")
class AllReduces(Right):
    """All-reduces each micro-batch and adds its slice."""

    def mean(self, grad_P):
        dist.all_reduce(grad_P)
        return grad_P.chunk(self.n)[self.rank] / self.n


@wrong("a whole gradient is kept, or a whole sum")
class KeepsAll(Right):
    """Keeps the last gradient, for no reason."""

    def backward(self, grad_P):
        super().backward(grad_P)
        self.last = grad_P.float()


@wrong("gradients travel in bf16")
class TravelsInFp32(Right):
    """Casts up before it reduces."""

    def mean(self, grad_P):
        return super().mean(grad_P.float())


@wrong("keeps it to itself")
class NotGathered(Right):
    """Updates its shard, and tells nobody."""

    def gather(self):
        pass


@wrong("the weights are gathered once")
class GathersGradients(Right):
    """Gathers the mean gradient, and updates all weights on every rank."""

    def step(self):
        whole_P = torch.empty(len(self.weights_P))
        all_gather(whole_P, self.sum_S)
        self.weights_P -= self.lr * whole_P
        self.gather()
        self.sum_S = None


@wrong("the gradient is added to the weights")
class Ascends(Right):
    """Has the sign wrong."""

    def step(self):
        self.sum_S = -self.sum_S
        super().step()


@wrong("a step begins a new sum")
class NoFirst(Right):
    """Adds to a sum that is not there yet."""

    def backward(self, grad_P):
        self.sum_S += self.mean(grad_P)


@wrong("the update is made in backward()")
class UpdatesInBackward(Right):
    """Takes each micro-batch off the weights at once."""

    def backward(self, grad_P):
        self.weights_S -= self.lr * self.mean(grad_P).float()

    def step(self):
        self.gather()


@wrong("the weights are gathered in bf16")
class GathersIn16Bits(Right):
    """Casts the weights down before they travel."""

    def gather(self):
        gathered_P = torch.empty(len(self.weights_P), dtype=torch.bfloat16)
        all_gather(gathered_P, self.weights_S.bfloat16())
        self.weights_P.copy_(gathered_P)


@wrong("a whole gradient is kept, or a whole sum")
class KeepsAllIn16Bits(Right):
    """Keeps a copy of the last gradient as it was."""

    def backward(self, grad_P):
        super().backward(grad_P)
        self.last = grad_P.clone()


@wrong("more shards are kept than that")
class KeepsShards(Right):
    """Keeps every micro-batch's shard until the step."""

    def backward(self, grad_P):
        mean_S = self.mean(grad_P).float()
        self.kept = [*getattr(self, "kept", []), mean_S.clone(), mean_S.clone()]
        self.sum_S = mean_S if self.sum_S is None else self.sum_S + mean_S


@wrong("a whole gradient is kept, or a copy of all weights")
class KeepsTheWeights(Right):
    """Gathers into a tensor of its own, and keeps it."""

    def gather(self):
        self.gathered_P = torch.empty_like(self.weights_P)
        all_gather(self.gathered_P, self.weights_S)
        self.weights_P.copy_(self.gathered_P)
