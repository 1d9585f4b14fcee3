"""Wrong answers to zero1.all_gather_in_place: a right one, and what people change in it."""

import torch
import torch.distributed as dist
from torch import nn
from wrong_answers import wrong

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Right:
    def __init__(self, model):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.model, self.params = model, self.choose(model)
        numel = sum(param.numel() for param in self.params)
        self.flat_P = self.buffer(-(-numel // self.n) * self.n)
        start = 0
        for param in self.params:
            view = self.flat_P[start : start + param.numel()].view_as(param)
            view.copy_(param.data)
            self.place(param, view)
            start += param.numel()

    def choose(self, model):
        return [param for param in model.parameters() if param.requires_grad]

    def buffer(self, P):
        return torch.zeros(P)

    def place(self, param, view):
        param.data = view

    def gather(self):
        all_gather(self.flat_P, self.flat_P.chunk(self.n)[self.rank])


@wrong(".data is never pointed there")
class CopiesOnly(Right):
    """Copies the weights into the buffer and leaves the parameters where they are; gather() deals out."""

    def place(self, param, view):
        pass

    def gather(self):
        super().gather()
        start = 0
        for param in self.params:
            param.data.copy_(self.flat_P[start : start + param.numel()].view_as(param))
            start += param.numel()


@wrong("gather into the buffer")
class NewBufferEachTime(Right):
    """Gathers into a new tensor and points .data there."""

    def gather(self):
        whole_P = torch.empty_like(self.flat_P)
        all_gather(whole_P, self.flat_P.chunk(self.n)[self.rank])
        self.flat_P = whole_P
        start = 0
        for param in self.params:
            param.data = whole_P[start : start + param.numel()].view_as(param)
            start += param.numel()


@wrong("the buffer itself can be the target")
class ThroughASecondBuffer(Right):
    """Gathers into a second buffer, and copies it over."""

    def gather(self):
        whole_P = torch.empty_like(self.flat_P)
        all_gather(whole_P, self.flat_P.chunk(self.n)[self.rank])
        self.flat_P.copy_(whole_P)


@wrong("a new nn.Parameter is put in its place")
class NewParameters(Right):
    """Replaces the parameters."""

    def place(self, param, view):
        name = next(name for name, each in self.model.named_parameters() if each is param)
        setattr(self.model, name, nn.Parameter(view))


@wrong("a frozen parameter is in the buffer")
class FrozenToo(Right):
    """Takes all parameters."""

    def choose(self, model):
        return list(model.parameters())


@wrong("the padding is missing")
class NotPadded(Right):
    """Makes a buffer of numel elements."""

    def buffer(self, P):
        return torch.zeros(sum(param.numel() for param in self.params))

    def gather(self):
        raise AssertionError("never called")


@wrong("the padding was never written")
class NotZeroed(Right):
    """Makes the buffer with torch.empty, so the padding is what lies there."""

    def buffer(self, P):
        return torch.empty(P)


@wrong("the parameters stand in reverse")
class Reversed(Right):
    """Fills the buffer as DDP fills its buckets."""

    def choose(self, model):
        return super().choose(model)[::-1]


@wrong("the old weights were gathered")
class ShardFromTheStart(Right):
    """Clones its shard at the start, and gathers that for ever."""

    def __init__(self, model):
        super().__init__(model)
        self.shard_S = self.flat_P.chunk(self.n)[self.rank].clone()

    def gather(self):
        all_gather(self.flat_P, self.shard_S)


@wrong("every rank has given its first S elements")
class FirstShard(Right):
    """Gives the first shard, whatever the rank."""

    def gather(self):
        all_gather(self.flat_P, self.flat_P.chunk(self.n)[0].clone())


@wrong("sends twice as much")
class AllReduced(Right):
    """Sets the others' shards to zero and sums."""

    def gather(self):
        for r, shard in enumerate(self.flat_P.chunk(self.n)):
            if r != self.rank:
                shard.zero_()
        dist.all_reduce(self.flat_P)


@wrong("one all_gather of the whole buffer is enough")
class PieceByPiece(Right):
    """One collective for each half of the shard, where it has two."""

    def gather(self):
        shards = [shard.clone() for shard in self.flat_P.chunk(self.n)]
        for pieces in zip(*(shard.split(1 if len(shard) < 9 else 500) for shard in shards), strict=True):
            whole = torch.empty(self.n * len(pieces[0]))
            all_gather(whole, pieces[self.rank].clone())
            for piece, arrived in zip(pieces, whole.chunk(self.n), strict=True):
                piece.copy_(arrived)
        self.flat_P.copy_(torch.cat(shards))


@wrong("somebody still holds the old weights")
class KeepsTheOld(Right):
    """Remembers where each weight was."""

    def place(self, param, view):
        self.old = [*getattr(self, "old", []), param.data]
        param.data = view
