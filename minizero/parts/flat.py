"""Flatten, pad, shard, view: many tensors as one flat buffer that N ranks can cut into equal shards.

    three tensors          | w: 40 elements     | b: 5   | s: 1   |
    flat buffer, P = 128   | w . . . . . . . . . pad | b . pad | s . pad ... |
    shards, N = 2          |<------- S = 64 -------->|<------- S = 64 ------>|

Every tensor starts at a multiple of ALIGN elements. A matrix product over a weight that starts elsewhere may take
another kernel and give other last bits; so a step that keeps weights in a flat buffer would differ from one that does not.
"""

# P = elements of the flat buffer, padding included; N = world_size; S = P // N = elements of one shard

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    places = zip(layout.shapes, layout.strides, layout.offsets, strict=True)
    return [flat_P[at : at + shape.numel()].as_strided(shape, strides) for shape, strides, at in places]


def shard(flat_P: Tensor, rank: int, world_size: int) -> Tensor:
    """Rank's slice of the flat buffer, S elements; a view."""
    S = flat_P.numel() // world_size
    return flat_P[rank * S : (rank + 1) * S]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
