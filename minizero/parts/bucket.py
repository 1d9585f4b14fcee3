"""Buckets: gradients that travel together. One collective for each tensor would drown in latency; one for all of them
could start only when backward has ended.

Backward produces gradients roughly in the reverse order of registration, so buckets are filled in that order and the
first is full while most of backward is still to come. Li et al. 2020 (PyTorch DDP), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from minizero.parts import flat, kinds, spans
from minizero.parts.flat import FlatShard
from minizero.parts.freed import FreedGradient, unguarded


class State(Enum):
    LOCAL = auto()  # this rank's own gradients; each parameter's .grad, where there is one, is its view of the buffer
    IN_FLIGHT = auto()  # the buffer belongs to the collective, and no .grad points at it
    MEAN = auto()  # what came back is in it: the mean over the ranks, of the whole buffer or of this rank's shard


class Bucket:
    """The gradients of some parameters in one flat buffer of P elements, which is averaged as a whole.

    masters: the fp32 weights that these gradients update, where the parameters themselves are of 16 bits
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], world_size: int, masters: FlatShard | None = None,
                 layout: flat.Layout | None = None):  # fmt: skip
        self.name = name
        self.params = list(params)
        self.masters = masters
        self.layout = flat.layout(params, world_size) if layout is None else layout
        self.grad_P = kinds.tag(torch.zeros(self.layout.P, dtype=params[0].dtype, device=params[0].device), "grads")
        # .data: a version counter for each view, on which only what is written through a parameter's .grad counts
        self.views = {p: view.data for p, view in zip(self.params, flat.views(self.grad_P, self.layout), strict=True)}
        self.held: Mapping[nn.Parameter, Tensor] = self.views  # what a parameter's .grad is, unless somebody has replaced it
        self.state = State.LOCAL
        self.used: set[nn.Parameter] = set()  # had a gradient on this rank since it was last cleared
        self.arrived: set[nn.Parameter] = set()  # had one in this backward
        self._landed: dict[nn.Parameter, int] = {}  # the views' version counters when the mean had arrived

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.params)

    # --- to the other ranks and back ----------------------------------------------------------------

    def before_accumulation(self, param: nn.Parameter) -> None:
        """Autograd is about to add a gradient to the parameter's .grad."""

    def make_room(self) -> None:
        """This rank's gradients are about to be added to the buffer. To a mean they may be: both have the right mean together."""

    def take(self, param: nn.Parameter) -> None:
        """Make the parameter's gradient its view of the bucket. If that is in flight, the gradient waits: see land()."""
        if self.state is State.IN_FLIGHT:
            return
        if param.grad is not self.views[param]:
            self.make_room()
            self.views[param].copy_(param.grad)
            param.grad = self.views[param]
        self.used.add(param)

    def take_by_hand(self, param: nn.Parameter) -> None:
        """Somebody has set the parameter's .grad: that is all its gradient now."""
        self.take(param)

    def close(self) -> Tensor:
        """Ready to leave: a parameter without a gradient gives zeros, and no .grad points at the buffer any more."""
        self.make_room()
        for param in self._cleared():
            self.views[param].zero_()
            self._forget(param)
        for param in self._replaced():
            self.take_by_hand(param)
        for param in self.params:
            param.grad = None
        self.state = State.IN_FLIGHT
        return self.grad_P

    def land(self) -> None:
        """The mean has arrived. What came after the bucket had left (a parameter may get two gradients) is added to it."""
        self._landed = {param: view._version for param, view in self.views.items()}
        self.state = State.MEAN
        late = {param: param.grad for param in self.params if param.grad is not None}
        for param, view in self.views.items():
            param.grad = view
        if late:
            self.make_room()
        for param, grad in late.items():
            self.views[param].add_(grad)
            self.used.add(param)
        self.arrived.clear()

    # --- what the ranks agree on --------------------------------------------------------------------

    def gradients(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient: cleared since the reduction, it has none; set by hand, it has."""
        for param in self._replaced():
            self.take_by_hand(param)
        cleared = self._cleared()
        return [param in self.used and param not in cleared for param in self.params]

    @property
    def late(self) -> bool:
        """Something was added or changed on this rank since the mean arrived: the bucket must be reduced once more."""
        return any(map(self.written, self.params))

    def written(self, param: nn.Parameter) -> bool:
        """Something was written into the parameter's .grad since the mean arrived."""
        return self.views[param]._version != self._landed.get(param)

    def zeroed(self, param: nn.Parameter) -> bool:
        """It was zeros, as zero_grad(set_to_none=False) does."""
        return self.written(param) and not self.views[param].any()

    def spoilt(self, param: nn.Parameter) -> bool:
        """Its .grad was changed in a way that only the ranks' own shards of it would show."""
        return False

    # --- to the optimizer ---------------------------------------------------------------------------

    def prepare(self, scale: float) -> None:
        """The mean is whole on every rank: nothing to do."""

    def hand_out(self, used_somewhere: set[nn.Parameter], scale: float) -> None:
        """Every parameter's .grad is its view of the mean, or None if no rank had a gradient for it. What updates a master is
        the same in fp32, without the loss scale."""
        self.used = used_somewhere & self.views.keys()
        for param, view in self.views.items():
            param.grad = view if param in self.used else None
        for param, piece in self.masters.pieces.items() if self.masters else ():
            piece.grad = None if param.grad is None else kinds.tag(param.grad.to(piece.dtype, copy=True).div_(scale), "grads")

    @property
    def as_handed_out(self) -> bool:
        """Nobody has changed, cleared or replaced a gradient since hand_out()."""
        return not self.late and all(p.grad is (self.held[p] if p in self.used else None) for p in self.params)

    def clear(self) -> None:
        """The step is over, and no parameter has a gradient."""
        self.state = State.LOCAL
        self.used.clear()

    def _forget(self, param: nn.Parameter) -> None:
        """Its gradient was cleared, or there was none."""
        self.used.discard(param)

    def _cleared(self) -> set[nn.Parameter]:
        """Those whose .grad is None."""
        with unguarded():
            return {param for param in self.params if param.grad is None}

    def _replaced(self) -> list[nn.Parameter]:
        """Those whose .grad somebody has set."""
        with unguarded():
            return [param for param in self.params if param.grad is not None and param.grad is not self.held[param]]


class ShardBucket(Bucket):
    """The gradients of some parameters, of whose mean this rank keeps only its shard: S = P // N elements of the buffer.

    weights: what the shard updates

    The rest of the buffer is NaN then, so that whoever takes it for a gradient finds out. The next backward needs the
    buffer for this rank's own gradients again; meanwhile the shard is kept apart, in fp32, where sums lose nothing.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], weights: FlatShard, rank: int, world_size: int):
        super().__init__(name, params, world_size, layout=weights.layout)
        self.weights = weights
        self.grad_S = flat.shard(self.grad_P, rank, world_size)
        self.sum_S: Tensor | None = None  # means of earlier backwards, and that of the last one if it is no longer in the buffer
        self._divisor = 1.0  # the loss scale by which sum_S is divided already
        self._in_buffer = False
        self._handed: dict[nn.Parameter, Tensor] = {}  # what the pieces have as .grad, unless somebody has replaced it
        self._mean_S: Tensor | None = None  # of which that is made

    def take_by_hand(self, param: nn.Parameter) -> None:
        """Somebody has set the parameter's .grad: that is all its gradient now, without the means of earlier backwards."""
        self.make_room()
        self._zero(param)
        self.take(param)

    def before_accumulation(self, param: nn.Parameter) -> None:
        """It must find zeros in .grad, not a mean. What somebody has put there counts, and nothing that was there before."""
        self.make_room()
        self._note_clearing(param)

    def take(self, param: nn.Parameter) -> None:
        super().take(param)
        self._landed[param] = self.views[param]._version

    def close(self) -> Tensor:
        self.make_room()
        for param in self.params:
            self._note_clearing(param)
        return super().close()

    def make_room(self) -> None:
        """This rank's gradients are about to be added to the buffer, and not to a mean: that is kept apart."""
        if self.state is State.MEAN:
            self._set_aside()
            self.grad_P.zero_()
            self.state = State.LOCAL

    def land(self) -> None:
        """The mean of this rank's shard has arrived."""
        self._in_buffer = True
        super().land()
        if self.state is State.MEAN:
            start = self.grad_S.storage_offset()
            self.grad_P[:start] = torch.nan
            self.grad_P[start + self.grad_S.numel() :] = torch.nan
        self._landed = {param: view._version for param, view in self.views.items()}

    @property
    def late(self) -> bool:
        """The buffer holds gradients of this rank that have not been reduced."""
        return self.state is State.LOCAL

    def spoilt(self, param: nn.Parameter) -> bool:
        """Its .grad was changed, and not cleared: of the mean only a shard is there, and with masters it's a copy that counts."""
        if self.state is not State.MEAN or param.grad is None:
            return False
        if param.grad is not self.views[param] and self._handed:  # replaced when the optimizer had the mean already
            return True
        if self.layout.world_size == 1 and not self.weights.has_master:  # nothing is missing
            return False
        if param.grad is not self.views[param]:
            return bool(param.grad.isnan().any())  # made from what is NaN here
        return self.written(param) and not self.zeroed(param)

    def prepare(self, scale: float) -> None:
        """Each piece's .grad is its part of the mean, in its own dtype and without the loss scale."""
        mean_S = self.grad_S
        if self.weights.has_master or self.sum_S is not None or scale != 1:
            self._set_aside()
            if self.sum_S is not None:
                self.sum_S /= scale
                self._divisor = scale
                mean_S = self.sum_S.to(self.weights.shard_S.dtype)
        self._handed, self._mean_S = {} if mean_S is None else self.weights.cut(mean_S), mean_S
        for param, grad in self._handed.items():
            self.weights.pieces[param].grad = None if param.grad is None else grad

    def hand_out(self, used_somewhere: set[nn.Parameter], scale: float) -> None:
        """What no rank had a gradient for has none."""
        self.used = used_somewhere & self.views.keys()
        for param in self.views.keys() - self.used:
            param.grad = None
            if param in self.weights.pieces:
                self.weights.pieces[param].grad = None

    def clear(self) -> None:
        """The step is over, and no parameter has a gradient."""
        super().clear()
        self.sum_S, self._divisor, self._handed, self._mean_S = None, 1.0, {}, None

    def _set_aside(self) -> None:
        """Move the mean from the buffer to the sum, with all that was done to it: edited, replaced, cleared."""
        if all(param.grad is None for param in self.params):
            self.clear()
            return
        for param, grad in self._handed.items():
            seen = self.weights.pieces[param].grad
            if seen is None:
                grad.zero_()
            elif seen is not grad:
                grad.copy_(seen)
        if self._handed and self.sum_S is not None and self._mean_S is not self.sum_S:  # what was handed out is its rounding
            edited_S = self._mean_S != self.sum_S.to(self._mean_S.dtype)
            self.sum_S[edited_S] = self._mean_S[edited_S].to(self.sum_S.dtype)
        self._handed, self._mean_S = {}, None
        if self.sum_S is None:
            self.sum_S = self._zeros(torch.promote_types(self.grad_P.dtype, torch.float32))
        self.sum_S *= self._divisor
        self._divisor = 1.0
        if self._in_buffer:
            self.sum_S += self._mean()
        for param in self.params:
            if param.grad is None:
                self._forget(param)
            elif self.zeroed(param):
                self._zero(param)
        self._spend()
        self._landed = {param: view._version for param, view in self.views.items()}  # what was written is in the sum

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        """Memory for the sum."""
        return kinds.tag(torch.zeros(self.layout.S, dtype=dtype, device=self.grad_P.device), "grads")

    def _mean(self) -> Tensor:
        """The mean that has arrived last, where the sum is."""
        return self.grad_S

    def _spend(self) -> None:
        """The mean is in the sum, and no longer here."""
        self.grad_S.fill_(torch.nan)
        self._in_buffer = False

    def _note_clearing(self, param: nn.Parameter) -> None:
        """While this rank's own gradients come together, somebody has cleared or replaced the parameter's: so the sum as well."""
        if self.state is State.LOCAL and (param.grad is not self.held[param] or self.zeroed(param)):
            self._zero(param)

    def _forget(self, param: nn.Parameter) -> None:
        super()._forget(param)
        self._zero(param)

    def _zero(self, param: nn.Parameter) -> None:
        if self.sum_S is not None and param in self.weights.pieces:
            self.weights.cut(self.sum_S)[param].zero_()


class TransientBucket(ShardBucket):
    """The same, but the buffer has memory only from the first gradient of a backward until it has been reduced. The shard has
    memory of its own, from then until the step.

    No .grad is a view of the buffer: what autograd leaves there is moved, and a FreedGradient put in its place.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], weights: FlatShard, rank: int, world_size: int,
                 names: Mapping[nn.Parameter, str]):  # fmt: skip
        super().__init__(name, params, weights, rank, world_size)
        self._spend()
        flat.free(self.grad_P)
        self.held = {param: FreedGradient(param, repr(names[param])) for param in self.params}
        self._filled: set[nn.Parameter] = set()  # whose part of the buffer has this rank's gradient
        self._awaited: set[nn.Parameter] = set()  # whose .grad is empty for autograd to put a gradient there

    @property
    def complete(self) -> bool:
        """Each parameter's gradient of this backward is in the buffer."""
        return len(self._filled) == len(self.params)

    @property
    def resident(self) -> bool:
        """The whole gradients have memory."""
        return self.grad_P.untyped_storage().nbytes() > 0

    def before_accumulation(self, param: nn.Parameter) -> None:
        if self.state is State.IN_FLIGHT and param.grad is not self.held[param]:
            return  # it comes a third time, and is added to the second
        if param.grad is self.held[param]:
            self._note_zeros([param])
            param.grad = None
            self._awaited.add(param)
        elif param not in self._awaited:  # cleared, or set by hand
            self._zero(param)

    def take(self, param: nn.Parameter) -> None:
        """Move the parameter's gradient to the buffer. If that is in flight, the gradient waits: see land()."""
        self._awaited.discard(param)
        if self.state is State.IN_FLIGHT:
            return
        grad, param.grad = param.grad, self.held[param]
        self.make_room()
        if param in self._filled:
            self.views[param].add_(grad)
        else:
            self.views[param].copy_(grad)
            self._filled.add(param)
        self.used.add(param)

    def make_room(self) -> None:
        if self.state is State.MEAN:
            self._settle()
            self._set_aside()
            self.state = State.LOCAL
        if not self.resident:
            flat.allocate(self.grad_P)

    def close(self) -> Tensor:
        """Ready to leave: a parameter without a gradient gives zeros."""
        self.make_room()
        self._settle()
        self._note_zeros(self.params)
        for param in self._cleared():
            self._forget(param)
        for param in self._replaced():
            self.take_by_hand(param)
        for param, view in self.views.items():
            if param not in self._filled:
                view.zero_()
        self._filled.clear()
        self.state = State.IN_FLIGHT
        self.grad_S = kinds.tag(torch.empty(self.layout.S, dtype=self.grad_P.dtype, device=self.grad_P.device), "grads")
        return self.grad_P

    def land(self) -> None:
        """The mean of this rank's shard has arrived, and the buffer is done with. What came meanwhile goes into it anew."""
        flat.free(self.grad_P)
        spans.moment("free", self.name)
        with unguarded():
            self._settle()
            late = {param: param.grad for param in self._replaced()}
            for param, gradient in self.held.items():
                param.grad = gradient
        self._in_buffer = True
        self.state = State.MEAN
        self._keep_mean()
        for param, param.grad in late.items():
            self.take(param)

    def _keep_mean(self) -> None:
        """From the second backward on the mean is added to the sum at once: a shard less."""
        if self.sum_S is not None:
            self._set_aside()

    def gradients(self) -> list[bool]:
        self._settle()
        return super().gradients()

    def zeroed(self, param: nn.Parameter) -> bool:
        return self.held[param].zeroed

    def spoilt(self, param: nn.Parameter) -> bool:
        """It was replaced when the optimizer had the mean already. (To change a FreedGradient is refused by itself.)"""
        return bool(self._handed) and param.grad is not None and param.grad is not self.held[param]

    def prepare(self, scale: float) -> None:
        self._note_zeros(self.params)
        with unguarded():
            super().prepare(scale)

    def clear(self) -> None:
        super().clear()
        self._spend()
        self._note_zeros(self.params)

    def _set_aside(self) -> None:
        super()._set_aside()
        self._note_zeros(self.params)

    def _note_zeros(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if self.held[param].zeroed:
                self._zero(param)
                self.held[param].zeroed = False

    def _zero(self, param: nn.Parameter) -> None:
        super()._zero(param)
        self._filled.discard(param)
        if self.grad_S is not None and param in self.weights.pieces:
            self.weights.cut(self.grad_S)[param].zero_()

    def _settle(self) -> None:
        """Autograd came for a gradient and left none, as torch.autograd.grad() does: .grad is what it was."""
        for param in self._awaited:
            if param.grad is None:
                param.grad = self.held[param]
        self._awaited.clear()

    def _spend(self) -> None:
        self.grad_S = None
        self._in_buffer = False


def partition(params: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Trainable parameters in reverse order, cut into buckets of one dtype and device each.

    A bucket closes before the parameter that would overflow its `bucket_mb` MiB; a larger parameter has its own.
    ValueError unless bucket_mb is positive.
    """
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be a positive number of MiB (fractions are fine); got {bucket_mb!r}")
    buckets: list[list[nn.Parameter]] = []
    last: dict[tuple, tuple[list[nn.Parameter], int]] = {}  # of each kind, the bucket that is still open, and its bytes
    for param in reversed(params):
        kind = (param.dtype, param.device)
        bucket, size = last.get(kind, (None, 0))
        if bucket is None or size + param.nbytes > bucket_mb * 2**20:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(param)
        last[kind] = bucket, size + param.nbytes
    return buckets
