"""Flatten, pad, shard, view: many tensors as one flat buffer that N ranks can cut into equal shards.

    three tensors          | w: 40 elements     | b: 5   | s: 1   |
    flat buffer, P = 128   | w . . . . . . . . . pad | b . pad | s . pad ... |
    shards, N = 2          |<------- S = 64 -------->|<------- S = 64 ------>|

Every tensor starts at a multiple of ALIGN elements. A matrix product over a weight that starts elsewhere may take
another kernel and give other last bits; so a step that keeps weights in a flat buffer would differ from one that does not.
"""

# P = elements of the flat buffer, padding included; N = world_size; S = P // N = elements of one shard

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import increment_version

from minizero.parts import freed, kinds

ALIGN = 32  # elements: 64 bytes in 16 bits, so that offsets agree between a 16-bit buffer and its fp32 masters


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the flat buffer."""

    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]  # the tensors' own where they are dense: channels-last stays channels-last
    offsets: tuple[int, ...]
    P: int
    world_size: int

    @property
    def S(self) -> int:
        return self.P // self.world_size


def layout(tensors: Sequence[Tensor], world_size: int) -> Layout:
    """Place `tensors` one after the other, aligned, and pad the end so that P is a multiple of N * ALIGN."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += _round_up(tensor.numel(), ALIGN)
    P = _round_up(end, ALIGN * world_size)
    return Layout(tuple(t.shape for t in tensors), tuple(map(strides, tensors)), tuple(offsets), P, world_size)


def strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor that lies in memory as this one does."""
    return torch.empty_like(tensor, device="meta").stride()


def views(flat_P: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors, as views of the flat buffer."""
    start = flat_P.storage_offset()
    places = zip(layout.shapes, layout.strides, layout.offsets, strict=True)
    return [flat_P.as_strided(shape, strides, start + at) for shape, strides, at in places]


def shard(flat_P: Tensor, rank: int, world_size: int) -> Tensor:
    """Rank's slice of the flat buffer, S elements; a view."""
    S = flat_P.numel() // world_size
    return flat_P[rank * S : (rank + 1) * S]


def free(flat_P: Tensor) -> None:
    """Give the buffer's memory back. Its views stay, and may not be used until allocate()."""
    flat_P.untyped_storage().resize_(0)


def allocate(flat_P: Tensor) -> None:
    """Give a freed buffer memory again; what is in it is left to chance."""
    flat_P.untyped_storage().resize_(flat_P.numel() * flat_P.element_size())


@dataclass(frozen=True)
class Cut:
    """What of one tensor lies in a rank's shard."""

    tensor: int  # which one
    of_shard: slice
    of_tensor: slice  # of its elements, flattened


def cuts(layout: Layout, rank: int) -> list[Cut]:
    """Where the rank's shard meets the tensors. Over all ranks every element of every tensor is in exactly one of them."""
    first, last = rank * layout.S, (rank + 1) * layout.S
    found = []
    for i, (at, shape) in enumerate(zip(layout.offsets, layout.shapes, strict=True)):
        start, stop = max(at, first), min(at + shape.numel(), last)
        if start < stop:
            found.append(Cut(i, slice(start - first, stop - first), slice(start - at, stop - at)))
    return found


class FlatShard:
    """The weights of some parameters in one flat buffer, and the shard of it that this rank updates.

    full_P     the weights, as they compute; each parameter's .data becomes its view
    shard_S    what the optimizer updates: this rank's slice of full_P itself; or, with `master`, an fp32 copy of the
               slice, of which full_P holds the rounding
    pieces     for each parameter that meets the shard, its part of shard_S: what the optimizer holds in its place

    weights: the values to begin with, where they are more precise than the parameters'
    On a single rank the shard is everything, and a piece has its parameter's shape; elsewhere pieces are flat.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], rank: int, world_size: int,
                 weights: Sequence[Tensor] | None = None, master: bool = False):  # fmt: skip
        self.name, self.params, self.rank = name, list(params), rank
        self.device = params[0].device  # where the parameters compute
        self.layout = layout(self.params, world_size)
        self._cuts = {self.params[cut.tensor]: cut for cut in cuts(self.layout, rank)}
        self.slice_S = self.shard_S = self._slice()
        if master:
            self.shard_S = self._master()
        self.fill([param.data for param in params] if weights is None else weights)
        self._settle()
        trainable = params[0].requires_grad
        self.pieces = {param: piece.requires_grad_() for param, piece in self.cut(self.shard_S).items()} if trainable else {}

    def _slice(self) -> Tensor:
        """Memory for the weights, of which this is the rank's slice."""
        self.full_P = self.empty(self.params[0].dtype).zero_()
        return shard(self.full_P, self.rank, self.layout.world_size)

    def _master(self) -> Tensor:
        """Memory for the same in fp32."""
        return kinds.tag(torch.zeros_like(self.slice_S, dtype=torch.float32), "optimizer")

    def empty(self, dtype: torch.dtype) -> Tensor:
        """P elements for the full weights."""
        return kinds.tag(torch.empty(self.layout.P, dtype=dtype, device=self.device), "params")

    def _settle(self) -> None:
        """Each parameter becomes its view of the buffer."""
        for param, view in zip(self.params, views(self.full_P, self.layout), strict=True):
            param.data = view

    @property
    def has_master(self) -> bool:
        return self.shard_S is not self.slice_S

    def cut(self, buffer_S: Tensor) -> dict[nn.Parameter, Tensor]:
        """A shard's buffer (weights, gradients, a moment), cut into views as the pieces are."""
        if self.layout.world_size == 1:
            return {p: v for p, v in zip(self.params, views(buffer_S, self.layout), strict=True) if p.numel()}
        return {param: buffer_S[cut.of_shard] for param, cut in self._cuts.items()}

    def own(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Of a tensor of a parameter's shape, what belongs to this rank's piece of the parameter."""
        if self.layout.world_size == 1:
            return full
        cut = self._cuts[param]
        return self._flat(cut, full)[cut.of_tensor]

    def _flat(self, cut: Cut, full: Tensor) -> Tensor:
        """A tensor's elements in the order in which they lie in the buffer; a view where the tensor lies like that itself."""
        if full.stride() == self.layout.strides[cut.tensor]:
            return full.as_strided((full.numel(),), (1,))
        lies_so = torch.empty_strided(full.shape, self.layout.strides[cut.tensor], dtype=full.dtype, device=full.device)
        return lies_so.copy_(full).as_strided((full.numel(),), (1,))

    @torch.no_grad()
    def fill(self, weights: Sequence[Tensor]) -> None:
        """Take these weights, one for each parameter."""
        for view, weight in zip(views(self.full_P, self.layout), weights, strict=True):
            view.copy_(weight)
        if self.has_master:
            self._fill_shard(self.shard_S, weights)

    def _fill_shard(self, shard_S: Tensor, weights: Sequence[Tensor]) -> None:
        for cut in self._cuts.values():
            shard_S[cut.of_shard] = self._flat(cut, weights[cut.tensor])[cut.of_tensor]

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written to the parameters past the optimizer: loaded weights, or another tensor as .data.

        RuntimeError for one of another shape, dtype or device.
        """
        self._adopt_replaced()
        self._adopt_slice()

    def _adopt_replaced(self) -> None:
        start, size = self.full_P.data_ptr(), self.full_P.element_size()
        for i, (param, at) in enumerate(zip(self.params, self.layout.offsets, strict=True)):
            if param.data_ptr() == start + size * at or not param.numel() or freed.pretends(param):
                continue
            view = views(self.full_P, self.layout)[i]
            if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"a parameter was {view.dtype} {list(view.shape)} on {view.device} when the optimizer took it over and is "
                    f"{param.dtype} {list(param.shape)} on {param.device} now: make the change first"
                )
            param.data = view.copy_(param.data)

    def _adopt_slice(self) -> None:
        """Where the slice is not the rounding of its master, somebody has written to it."""
        if self.has_master and not freed.pretends(self.slice_S):
            written = self.shard_S.to(self.slice_S.dtype) != self.slice_S
            self.shard_S[written] = self.slice_S[written].float()

    @torch.no_grad()
    def publish(self) -> None:
        """After an update: this rank's slice of the weights is the rounding of its master. And autograd hears that the
        weights have changed: a graph from before must not be used any more."""
        if self.has_master:
            self.slice_S.copy_(self.shard_S)
        increment_version(self.params)


class UnitShard(FlatShard):
    """The same, but of the weights this rank has only its slice; the whole is there from gather to free.

    slice_S    this rank's slice, as it computes, with memory of its own
    full_P     the gathered weights, or None
    labels     for each parameter, how an error names it
    """

    full_P: Tensor | None = None
    arrived = False  # what was to be gathered is there
    _last: weakref.ref[UntypedStorage] | None = None  # the memory of the last gathering
    ask: Callable[[], bool] | None = None  # called when a freed weight is used: True if it's there then

    def __init__(self, name: str, params: Sequence[nn.Parameter], rank: int, world_size: int,
                 weights: Sequence[Tensor] | None = None, master: bool = False, labels: Sequence[str] = ()):  # fmt: skip
        self.labels = labels
        self._nothing = [freed.stand_in(param) for param in params]
        me = weakref.ref(self)
        self._ask = lambda: (shard := me()) is not None and shard.ask is not None and shard.ask()
        super().__init__(name, params, rank, world_size, weights, master)

    def _slice(self) -> Tensor:
        like = self.params[0]
        return kinds.tag(torch.zeros(self.layout.S, dtype=like.dtype, device=like.device), "params")

    @property
    def resident(self) -> bool:
        """The full weights have memory."""
        return self.full_P is not None

    def allocate(self) -> Tensor:
        """Memory for the full weights, which are to be gathered into it. It is new, but for a view of the last one that somebody
        has kept: then the view sees the weights again, as it does where they are never freed."""
        last = self._last and self._last()
        if last is None:
            self.full_P = self.empty(self.slice_S.dtype)
            self._last = weakref.ref(self.full_P.untyped_storage())
        else:
            self.full_P = self.slice_S.new_empty(0).set_(last, 0, (self.layout.P,))
        self.arrived = False
        return self.full_P

    @property
    def mine_S(self) -> Tensor:
        """This rank's slice of the gathered weights."""
        return shard(self.full_P, self.rank, self.layout.world_size)

    def give(self) -> Tensor:
        """What this rank gives to the others, once there is memory for the full weights."""
        return self.slice_S

    def show(self) -> None:
        """Each parameter becomes its view of the buffer."""
        for param, view in zip(self.params, views(self.full_P, self.layout), strict=True):
            freed.restore(param, view)

    def free(self) -> None:
        """Give the full weights back."""
        self.full_P, self.arrived = None, False
        self._settle()

    def _settle(self) -> None:
        """Each parameter is freed."""
        for param, label, nothing in zip(self.params, self.labels, self._nothing, strict=True):
            freed.free(param, label, nothing, self._ask)

    def fill(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._fill_shard(self.slice_S, weights)
            if self.has_master:
                self._fill_shard(self.shard_S, weights)
            if self.full_P is not None:
                for view, weight in zip(views(self.full_P, self.layout), weights, strict=True):
                    view.copy_(weight)

    def checksum(self) -> float:
        """Of the gathered weights, of their bits: a whole number."""
        if freed.pretends(self.slice_S):
            return 0.0
        with torch.no_grad():
            self._adopt_replaced()
            return float(self.full_P.view(torch.int32).sum(dtype=torch.int64).item() % 2**53)

    def adopt(self) -> None:
        """Take over what was written to the gathered weights, as by a layer that keeps its weights small."""
        if self.arrived and not freed.pretends(self.slice_S):
            with torch.no_grad():
                self._adopt_replaced()
                mine_S, known_S = self.mine_S, self._as_gathered()
                if not torch.equal(mine_S.view(torch.int64), known_S.view(torch.int64)):  # twice as fast as their own dtype
                    self._write(mine_S, mine_S != known_S)

    def _as_gathered(self) -> Tensor:
        """What this rank has given to the gathered weights."""
        return self.slice_S

    def _write(self, mine_S: Tensor, written_S: Tensor) -> None:
        self.slice_S.copy_(mine_S)
        if self.has_master:
            written_S = written_S.to(self.shard_S.device)
            self.shard_S[written_S] = mine_S.to(self.shard_S)[written_S]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
