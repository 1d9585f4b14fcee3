"""Wrong answers to zero1.master_weights: a right one, and what people change in it."""

import torch.distributed as dist
from wrong_answers import wrong

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, weights_P, optimizer_class, lr):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.weights_P = weights_P
        self.weights_S = weights_P.chunk(self.n)[self.rank]
        self.master_S = self.master()
        self.optimizer = optimizer_class([self.master_S], lr=lr)

    def master(self):
        return self.weights_S.float()

    def step(self, grad_S):
        self.master_S.grad = grad_S.float()
        self.optimizer.step()
        self.write_back()
        all_gather(self.weights_P, self.weights_S)

    def write_back(self):
        self.weights_S.copy_(self.master_S)


@wrong("the optimizer updates the 16-bit weights themselves")
class NoMaster(Right):
    """Steps in bf16."""

    def master(self):
        return self.weights_S

    def step(self, grad_S):
        self.weights_S.grad = grad_S
        self.optimizer.step()
        all_gather(self.weights_P, self.weights_S)


@wrong("the master is made from the weights again")
class MasterFromWeights(Right):
    """Refreshes the master from the weights in each step."""

    def step(self, grad_S):
        self.master_S.copy_(self.weights_S)
        super().step(grad_S)


@wrong("its rounding is not written back")
class NotWrittenBack(Right):
    """Updates the master only."""

    def write_back(self):
        pass


@wrong("the rounding stays on its own rank")
class NotGathered(Right):
    """Writes its own slice, and tells nobody."""

    def step(self, grad_S):
        self.master_S.grad = grad_S.float()
        self.optimizer.step()
        self.write_back()


@wrong("the masters travel")
class GathersFp32(Right):
    """Gathers the masters, and rounds afterwards."""

    def step(self, grad_S):
        self.master_S.grad = grad_S.float()
        self.optimizer.step()
        whole_P = self.weights_P.float()
        all_gather(whole_P, self.master_S)
        self.weights_P.copy_(whole_P)


@wrong("the optimizer is given all weights")
class WholeMaster(Right):
    """Keeps and updates a master of everything; outside its shard gradients are zero."""

    def master(self):
        return self.weights_P.float()

    def step(self, grad_S):
        self.master_S.grad = self.master_S.new_zeros(self.master_S.shape)
        self.master_S.grad.chunk(self.n)[self.rank].copy_(grad_S)
        self.optimizer.step()
        self.weights_S.copy_(self.master_S.chunk(self.n)[self.rank])
        all_gather(self.weights_P, self.weights_S)


@wrong("a slice of that is the master")
class SliceOfWholeMaster(Right):
    """Casts all weights up, and cuts then: the view keeps all of it alive."""

    def master(self):
        return self.weights_P.float().chunk(self.n)[self.rank]


@wrong("the master has rank 0's shard")
class FirstShard(Right):
    """Takes the first shard's values on every rank."""

    def master(self):
        return self.weights_P.chunk(self.n)[0].float()


@wrong("cast the gradient up")
class GradientIn16Bits(Right):
    """Hands the bf16 gradient to the fp32 master."""

    def step(self, grad_S):
        self.master_S.grad = grad_S
        self.optimizer.step()


@wrong("grad_S is the mean already")
class DividesAgain(Right):
    """Divides the mean by the number of ranks."""

    def step(self, grad_S):
        super().step(grad_S / self.n)


@wrong("grad_S is the mean already")
class ReducesAgain(Right):
    """All-reduces what is a shard, each rank's another one, and takes its own back."""

    def step(self, grad_S):
        own = grad_S.clone()
        dist.all_reduce(grad_S)
        super().step(own)
