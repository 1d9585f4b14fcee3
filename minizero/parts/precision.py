"""Mixed precision: 16 bits to compute with, fp32 to add up in, and a scale that keeps small fp16 gradients alive.

            range           digits      needs
    fp32    1e-38 … 3e38    24 bits
    bf16    1e-38 … 3e38     8 bits     an fp32 master: an update below 1/256 of the weight vanishes
    fp16    6e-8 … 65504    11 bits     a master, and a loss scale: gradients below 6e-8 vanish

Micikevicius et al. 2018, sections 3.1 (masters) and 3.2 (loss scaling).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str | None) -> torch.dtype | None:
    """ValueError if there is no such precision."""
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}: choose one of {', '.join(map(repr, DTYPES))}")
    return DTYPES[precision]


def lower(module: nn.Module, dtype: torch.dtype | None) -> dict[nn.Parameter, Tensor]:
    """Make the module's floating-point parameters compute in `dtype`. Returns their values before that.

    Buffers keep their dtype, and so do the few weights of BatchNorm and its like: their statistics need all digits, and
    PyTorch wants weights and statistics in one dtype.
    """
    if dtype is None:
        return {}
    before = {param: param.data for param in _computing(module)}
    for param in before:
        param.data = param.data.to(dtype)
    return before


def _computing(module: nn.Module) -> Iterator[nn.Parameter]:
    keep = {p for part in module.modules() if isinstance(part, _NormBase) for p in part.parameters(recurse=False)}
    return (param for param in module.parameters() if param.is_floating_point() and param not in keep)


def cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in nested lists, tuples and dicts, in `dtype`; everything else as it is."""
    if dtype is None:
        return inputs
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


class LossScaler:
    """The factor by which an fp16 loss is multiplied, as large as the gradients allow.

    init_scale: the first factor
    growth_interval: after so many good steps in a row the scale doubles
    hysteresis: at the how manieth overflow since the scale last grew it is halved, and at each one from then on
    min_scale: it never falls below; an overflow there is an error
    """

    def __init__(self, init_scale: float = 2.0**16, growth_interval: int = 2000, hysteresis: int = 1, min_scale: float = 1.0):
        for name, value in {"init_scale": init_scale, "min_scale": min_scale}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number; got {value!r}")
        for name, value in {"growth_interval": growth_interval, "hysteresis": hysteresis}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of steps, at least 1; got {value!r}")
        if init_scale < min_scale:
            raise ValueError(f"init_scale={init_scale} is below min_scale={min_scale}")
        self.scale = float(init_scale)
        self.growth_interval, self.hysteresis, self.min_scale = growth_interval, hysteresis, float(min_scale)
        self._good_steps = 0
        self._overflows_left = hysteresis

    def update(self, overflow: bool) -> None:
        """A step has ended. RuntimeError if it overflowed at the smallest scale."""
        if not overflow:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                self.scale *= 2
                self._good_steps, self._overflows_left = 0, self.hysteresis
            return
        self._good_steps = 0
        if self._overflows_left > 1:
            self._overflows_left -= 1
            return
        if self.scale <= self.min_scale:
            raise RuntimeError(
                f"gradients overflow at the smallest loss scale, {self.min_scale:g}: the loss or the model has left the range of "
                "fp16 (65504). Lower the learning rate, clip_norm, or train in bf16"
            )
        self.scale = max(self.scale / 2, self.min_scale)

    def state_dict(self) -> dict[str, float]:
        """All that it remembers."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where another one was."""
        self.scale = float(state["scale"])
        self._good_steps, self._overflows_left = int(state["good_steps"]), int(state["overflows_left"])
