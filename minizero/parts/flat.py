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
    return Layout(tuple(t.shape for t in tensors), tuple(offsets), _round_up(end, ALIGN * world_size), world_size)


def views(flat_P: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors, as views of the flat buffer."""
    return [flat_P[at : at + shape.numel()].view(shape) for shape, at in zip(layout.shapes, layout.offsets, strict=True)]


def shard(flat_P: Tensor, rank: int, world_size: int) -> Tensor:
    """Rank's slice of the flat buffer, S elements; a view."""
    S = flat_P.numel() // world_size
    return flat_P[rank * S : (rank + 1) * S]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
