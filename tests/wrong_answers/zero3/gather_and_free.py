"""Wrong answers to zero3.gather_and_free: a right one, and what people change in it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, params):
        self.params, (self.rank, self.n) = params, (dist.get_rank(), dist.get_world_size())
        flat = torch.cat([param.data.flatten() for param in params])
        self.flat_P = F.pad(flat, (0, -len(flat) % self.n))
        self.shapes = [param.shape for param in params]
        self.shard_S = self.own()
        self.show()
        self.free()

    def show(self):
        start = 0
        for param, shape in zip(self.params, self.shapes, strict=True):
            param.data = self.flat_P[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def own(self):
        return self.flat_P.chunk(self.n)[self.rank].clone()

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        all_gather(self.flat_P, self.shard_S)

    def free(self):
        self.flat_P.untyped_storage().resize_(0)


@wrong("autograd has saved views of the weights, and they keep the storage")
class Rebinds(Right):
    """Gives the parameters an empty .data and drops the buffer: autograd's views keep it."""

    def gather(self):
        self.flat_P = torch.empty(len(self.shard_S) * self.n)
        all_gather(self.flat_P, self.shard_S)
        self.show()

    def free(self):
        self.flat_P = None
        for param in self.params:
            param.data = torch.empty(0)


@wrong("gather() makes a new buffer")
class NewBuffer(Right):
    """Shrinks the storage, and gathers into another one: autograd's views stay empty."""

    def gather(self):
        self.flat_P = torch.empty(len(self.shard_S) * self.n)
        all_gather(self.flat_P, self.shard_S)
        self.show()


@wrong("something else still holds them")
class KeepsTheBuffer(Right):
    """Gives the parameters an empty .data, and keeps the buffer for next time."""

    def gather(self):
        all_gather(self.flat_P, self.shard_S)
        self.show()

    def free(self):
        for param in self.params:
            param.data = torch.empty(0)


@wrong("shard_S is a slice of the buffer")
class Slice(Right):
    """Takes a view for the shard: it loses its memory with the buffer."""

    def __init__(self, params):
        super().__init__(params)
        super().gather()
        self.shard_S = self.flat_P.chunk(self.n)[self.rank]
        self.free()


@wrong("the buffer keeps its memory from the start")
class FullAtFirst(Right):
    """Frees only after the first gather()."""

    def __init__(self, params):
        super().__init__(params)
        super().gather()


@wrong("the all_gather is missing")
class NotGathered(Right):
    """Gives the memory back, and asks nobody for the weights."""

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        self.flat_P.chunk(self.n)[self.rank].copy_(self.shard_S)


@wrong("the parameters do not look into it")
class GathersElsewhere(Right):
    """Gathers into a tensor that no parameter is a view of."""

    def gather(self):
        self.full_P = torch.empty(len(self.shard_S) * self.n)
        all_gather(self.full_P, self.shard_S)


@wrong("the shards arrive in another tensor and are copied from there")
class CopiesIntoTheBuffer(Right):
    """Gathers elsewhere and copies into the buffer: for a moment the weights are there twice."""

    def gather(self):
        full_P = torch.empty(len(self.shard_S) * self.n)
        all_gather(full_P, self.shard_S)
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        self.flat_P.copy_(full_P)


@wrong("the parameters still have their memory")
class FreesNothing(Right):
    """Fills the buffer with zeros, and calls it freed."""

    def free(self):
        if hasattr(self, "gathered"):
            self.flat_P.zero_()
        else:
            super().free()

    def gather(self):
        super().gather()
        self.gathered = True


@wrong("these are the weights of before")
class GathersOnce(Right):
    """Keeps a copy of the first shard, and gathers that."""

    def __init__(self, params):
        super().__init__(params)
        self.first_S = self.shard_S
        self.shard_S = self.shard_S.clone()

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        all_gather(self.flat_P, self.first_S)


@wrong("resize_ first")
class GathersTooEarly(Right):
    """Gathers before the buffer has memory."""

    def gather(self):
        all_gather(self.flat_P, self.shard_S)
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)


@wrong("touch no parameter")
class CopiesIntoParameters(Right):
    """Gathers elsewhere and copies into each parameter, which autograd takes for a change."""

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        full_P, start = torch.empty_like(self.flat_P), 0
        all_gather(full_P, self.shard_S)
        with torch.no_grad():
            for param in self.params:
                param.copy_(full_P[start : start + param.numel()].view_as(param))
                start += param.numel()


@wrong("a broadcast from each owner in turn")
class Broadcasts(Right):
    """Each owner broadcasts its shard."""

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        for owner, shard in enumerate(self.flat_P.chunk(self.n)):
            if owner == self.rank:
                shard.copy_(self.shard_S)
            dist.broadcast(shard, src=owner)


@wrong("whose memory is gone")
class ReadsFreed(Right):
    """Adds up the weights after they have been freed: the process ends."""

    def free(self):
        super().free()
        self.checksum = self.flat_P + 1


@wrong("A tensor's own resize_")
class ResizesTheTensor(Right):
    """Resizes the tensor, not its storage."""

    def free(self):
        self.flat_P.resize_(0)


@wrong("or another .data")
class EmptiesTheTensor(Right):
    """Gives the buffer an empty .data."""

    def free(self):
        self.flat_P.data = torch.empty(0)


@wrong("the buffer is dropped")
class DropsTheBuffer(Right):
    """Sets the buffer's name to None."""

    def free(self):
        self.flat_P = None


@wrong("free() changes shard_S back")
class WritesTheShard(Right):
    """Takes this rank's shard out of the buffer before it is freed: an update of shard_S is undone."""

    def free(self):
        storage = self.flat_P.untyped_storage()
        if storage.nbytes():
            self.shard_S.copy_(self.flat_P.chunk(self.n)[self.rank])
        storage.resize_(0)


@wrong("shard_S is a slice of the buffer")
class SliceOnceGathered(Right):
    """Makes the shard a view of the buffer when it is gathered."""

    def gather(self):
        super().gather()
        self.shard_S = self.flat_P.chunk(self.n)[self.rank]


@wrong("that is rank 1's shard")
class NextShard(Right):
    """Keeps the next rank's shard."""

    def own(self):
        return self.flat_P.chunk(self.n)[(self.rank + 1) % self.n].clone()


@wrong("gather from shard_S.detach()")
class SendsWithAutograd(Right):
    """Gathers from a shard that requires a gradient: autograd takes part."""

    def own(self):
        return super().own().requires_grad_()
