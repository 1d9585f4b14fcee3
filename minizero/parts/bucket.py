"""Buckets: gradients that travel together. One collective for each tensor would drown in latency; one for all of them
could start only when backward has ended.

Backward produces gradients roughly in the reverse order of registration, so buckets are filled in that order and the
first is full while most of backward is still to come. Li et al. 2020 (PyTorch DDP), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from minizero.parts import flat, kinds


class State(Enum):
    HERE = auto()  # each parameter's .grad, where there is one, is its view of the bucket
    IN_FLIGHT = auto()  # the bucket belongs to the collective, and no .grad points at it


class Bucket:
    """The gradients of some parameters in one flat buffer of P elements."""

    def __init__(self, name: str, params: Sequence[nn.Parameter], world_size: int):
        self.name = name
        self.params = list(params)
        self.layout = flat.layout(params, world_size)
        self.grad_P = kinds.tag(torch.zeros(self.layout.P, dtype=params[0].dtype, device=params[0].device), "grads")
        self.views = dict(zip(self.params, flat.views(self.grad_P, self.layout), strict=True))
        self.state = State.HERE
        self.used: set[nn.Parameter] = set()  # had a gradient on this rank since it was last cleared
        self.arrived: set[nn.Parameter] = set()  # had one since the bucket last landed
        self._mean = -1  # the buffer's version counter when the mean was in it

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.params)

    def take(self, param: nn.Parameter) -> None:
        """Make the parameter's gradient its view of the bucket. If that is in flight, the gradient waits: see land()."""
        if self.state is State.IN_FLIGHT:
            return
        self.used.add(param)
        if param.grad is not self.views[param]:
            self.views[param].copy_(param.grad)
            param.grad = self.views[param]

    def close(self) -> Tensor:
        """Ready to leave: a parameter without a gradient gives zeros, and no .grad points at the buffer any more."""
        for param, view in self.views.items():
            if param.grad is None:
                view.zero_()
                self.used.discard(param)
            elif param.grad is not view:  # set by hand
                self.take(param)
            param.grad = None
        self.state = State.IN_FLIGHT
        return self.grad_P

    def land(self) -> None:
        """The mean has arrived. What came after the bucket had left (a parameter may get two gradients) is added to it."""
        self._mean = self.grad_P._version
        for param, view in self.views.items():
            if param.grad is not None:
                view.add_(param.grad)
                self.used.add(param)
            param.grad = view
        self.arrived.clear()
        self.state = State.HERE

    def gradients(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient: cleared since the reduction, it has none; set by hand, it has."""
        for param, view in self.views.items():
            if param.grad is not None and param.grad is not view:
                self.take(param)
        return [param in self.used and param.grad is not None for param in self.params]

    @property
    def late(self) -> bool:
        """Something was added or changed on this rank since the mean arrived: the bucket must be reduced once more."""
        return self.grad_P._version != self._mean

    @property
    def as_handed_out(self) -> bool:
        """Nobody has changed, cleared or replaced a gradient since hand_out()."""
        return not self.late and all(p.grad is (view if p in self.used else None) for p, view in self.views.items())

    def hand_out(self, used_somewhere: set[nn.Parameter]) -> None:
        """Every parameter's .grad is its view of the mean, or None if no rank had a gradient for it."""
        self.used = used_somewhere & self.views.keys()
        for param, view in self.views.items():
            param.grad = view if param in self.used else None


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
