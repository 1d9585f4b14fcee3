"""Prefetch: ZeRO-3 that asks for a unit's weights before it needs them, so that they travel while the unit before computes.

               weights in flight     a rank sends      waits for
    ZeRO-3     0                     3Ψ (N−1)/N        every gather
    prefetch   `depth` units         3Ψ (N−1)/N        what takes longer than the computing of the units before

What is sent is sent earlier, and is the same as long as the model does what it did before. Which unit comes next is known
from the last time: then it gathers its units in the order in which it gathered them then, in forward and, another order, in
backward. (Where it does not, up to `depth` units have come in vain.) Rajbhandari et al. 2021 (ZeRO-Infinity), section 6.2;
Zhao et al. 2023 (FSDP), section 3.3.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from minizero.parts import comm
from minizero.parts.engine import inside_backward
from minizero.parts.precision import LossScaler
from minizero.parts.units import Unit
from minizero.zero3 import Zero3


class Phase(Enum):
    """Each has an order of its own."""

    TRAINING = auto()
    EVALUATION = auto()
    BACKWARD = auto()


class Zero3Prefetch(Zero3):
    """Zero3, with the weights of `depth` units on their way while one computes.

    depth: how many units ahead; 0 is Zero3
    max_live: at most so many parameters ahead, if it is given, padding included; a unit that does not fit is gathered on demand

    All else is Zero3's.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, depth: int = 1, max_live: int | None = None,
                 units: Iterable[type[nn.Module] | nn.Module] | None = None,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: LossScaler | None = None):  # fmt: skip
        _check_count("depth", depth)
        if max_live is not None:
            _check_count("max_live", max_live)
        super().__init__(module, optimizer, units=units, precision=precision, clip_norm=clip_norm, bucket_mb=bucket_mb, group=group,
                         loss_scaler=loss_scaler)  # fmt: skip
        self.depth, self.max_live = depth, max_live
        self._phase: Phase | None = None
        self._plans: dict[Phase, list[Unit]] = {}  # the orders in which all ranks have gathered the last time
        self._gathered: list[Unit] = []  # in this phase, by now
        self._ahead: dict[Unit, list[comm.Pending]] = {}  # asked for, and not needed yet

    # --- a forward or a backward, and the order of its gathers ------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self._phase is not None or inside_backward():
            return super().forward(*args, **kwargs)
        self._phase = Phase.TRAINING if torch.is_grad_enabled() else Phase.EVALUATION
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._at_rest()

    def _enter_backward(self, unit: Unit) -> None:
        if self._phase is None:
            self._phase = Phase.BACKWARD
        super()._enter_backward(unit)

    def _at_rest(self) -> None:
        """It is over. What was asked for in vain is given back."""
        if self._gathered:
            self._order.of_phase[self._phase] = self._gathered
        self._phase, self._gathered = None, []
        self._give_back()

    def _give_back(self) -> None:
        for unit, gathers in self._ahead.items():
            for gather in gathers:
                gather.wait()
            unit.free()
        self._ahead.clear()

    def _in_full_precision(self, changed: bool = False) -> contextlib.AbstractContextManager:
        """What is ahead must not arrive after other weights were loaded."""
        self._give_back()
        return super()._in_full_precision(changed)

    def _agree(self) -> Any:
        """All ranks have gathered in one order: the next time it is the plan."""
        answers = super()._agree()
        if self._order.agreed:
            self._plans |= self._order.of_phase
        return answers

    # --- the all-gather of a unit's weights -----------------------------------------------------------

    def _gather(self, unit: Unit) -> list[comm.Pending]:
        """They are on their way, or asked for now; and then those of the units that come next."""
        gathers = self._ahead.pop(unit, None) or super()._gather(unit)
        if gathers and self._phase is not None:
            self._gathered.append(unit)
            for following in self._following():
                if following not in self._ahead:
                    self._ahead[following] = super()._gather(following)
        return gathers

    def _following(self) -> list[Unit]:
        """The units that come next if this time is like the last, as many as may be ahead; none if it is not."""
        plan, done = self._plan(), len(self._gathered)
        if plan[:done] != self._gathered:
            return []
        units, live = [], 0
        for unit in plan[done : done + self.depth]:
            if unit in self._ahead or not unit.resident:
                live += sum(shard.layout.P for shard in unit.shards)
                if self.max_live is not None and live > self.max_live:
                    break
                units.append(unit)
        return units

    def _plan(self) -> list[Unit]:
        """The order of the last time; an evaluation's is that of training until it has shown its own."""
        if self._phase is Phase.EVALUATION and self._phase not in self._plans:
            return self._plans.get(Phase.TRAINING, [])
        return self._plans.get(self._phase, [])


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number, 0 or more; got {value!r}")
