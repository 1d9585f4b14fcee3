"""Offload: a rank's shard of the optimizer lives on the host, and is updated there.

                                   device, bytes per rank          host                        copied, bytes a step
    ZeRO-3                         16Ψ/N                           -                           -
    offload, optimizer             4Ψ/N   weights, gradients       12Ψ/N   Adam, master        (2 down + 2 up) Ψ/N
    offload, optimizer, params     2Ψ/N   gradients                14Ψ/N   and weights         (2 down + 4 up) Ψ/N

in 16 bits, after backward; 2Ψ/N more on the host are gradients that have come down for the step. Gradients go down, since Adam
needs them, and weights come up: 2 bytes each. Nothing less would do: of all that a step reads and writes, these are the
smallest. With G micro-steps gradients go down G times, and offloaded weights come up twice in each. Ren et al. 2021
(ZeRO-Offload), sections 3 and 5.2 (delayed update); Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from minizero.parts import comm, host, optim, spans
from minizero.parts.bucket import TransientBucket
from minizero.parts.flat import UnitShard
from minizero.parts.precision import LossScaler
from minizero.prefetch import Zero3Prefetch


class Zero3Offload(Zero3Prefetch):
    """Zero3Prefetch, with a rank's shard of the optimizer on the host.

    to: "cpu" for its memory; "disk" for files, mapped into memory while they are used
    what: ("optimizer",), or ("optimizer", "params") for the shard of the weights as well
    delayed: update on the host while the next forward and backward compute. They use weights that miss the last gradients

    All else is Zero3Prefetch's. ValueError for another `to` or `what`, and for a delayed update by an optimizer that is not
    torch's own.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, to: str = "cpu",
                 what: Iterable[str] = ("optimizer",), delayed: bool = False, depth: int = 1, max_live: int | None = None,
                 units: Iterable[type[nn.Module] | nn.Module] | None = None,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: LossScaler | None = None):  # fmt: skip
        self.what = _check(to, what)
        self.to, self.delayed = to, delayed
        self._by_parts = type(optimizer) in optim.ELEMENTWISE
        if delayed and not self._by_parts:
            raise ValueError(f"delayed=True needs one of torch's element-wise optimizers; {type(optimizer).__name__} is not: leave it out")
        super().__init__(module, optimizer, depth=depth, max_live=max_live, units=units, precision=precision, clip_norm=clip_norm,
                         bucket_mb=bucket_mb, group=group, loss_scaler=loss_scaler)  # fmt: skip
        self._thread: ThreadPoolExecutor | None = None
        self._beside: Future | None = None
        self._unpublished = False  # an update of which the device does not know
        join = weakref.WeakMethod(self._join)  # what autograd has saved keeps the shards, and would keep the engine
        for shard in self.weights:
            shard.join = lambda: (method := join()) and method()
            shard.keep_state(self.optimizer.state)

    # --- where a shard rests ----------------------------------------------------------------------------

    def _shard(self, *args: Any) -> UnitShard:
        memory = host.MEMORIES[self.to](self.device)
        return host.HostShard(*args, memory=memory, offload_params="params" in self.what, updated_beside=self.delayed)

    def _bucket(self, name: str, params: list[nn.Parameter], weights: UnitShard) -> TransientBucket:
        return host.HostBucket(name, params, weights, self.rank, self.world_size, self._names)

    # --- step -------------------------------------------------------------------------------------------

    def step(self, closure: None = None) -> bool:
        """Update the weights with the averaged gradients, with `delayed` those of the step before; and clear them. True if it did,
        False if the step was skipped."""
        sound = super().step(closure)
        if not sound:
            self._publish()
        return sound

    def _update(self) -> None:
        """Each rank updates its shard on the host, unit by unit: the weights of one leave for the device while the next is updated."""
        if self.delayed:
            self._publish()
            optim.step_by(self.optimizer, self._update_beside)
            return
        if self._by_parts:
            optim.step_by(self.optimizer, self._update_here)
        else:
            self.optimizer.step()
            for shard in self.weights:
                shard.keep_state(self.optimizer.state)
                shard.publish()
        self._show_readers()

    def _update_here(self) -> None:
        for shard in self.weights:
            optim.update(optim.part_of(self.optimizer, shard))
            shard.keep_state(self.optimizer.state)
            shard.publish()

    def _update_beside(self) -> None:
        parts = [(optim.part_of(self.optimizer, shard, keep=True), shard) for shard in self.weights]
        self._thread = self._thread or ThreadPoolExecutor(1, "minizero-update")
        self._beside = self._thread.submit(self._update_all, parts, self.optimizer)
        self._unpublished = True

    @staticmethod  # the thread keeps no engine
    def _update_all(parts: list[tuple[torch.optim.Optimizer, host.HostShard]], optimizer: torch.optim.Optimizer) -> None:
        """What the thread does."""
        for part, shard in parts:
            with spans.span("step", shard.name):
                optim.update(part)
                shard.keep_state(optimizer.state)

    def _join(self) -> None:
        """The update that runs beside is over."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            try:
                beside.result()
            except Exception as error:
                raise RuntimeError(
                    f"the update of the step before this one, which ran beside it, has failed ({type(error).__name__}: {error}). Some of "
                    "the weights may have moved, and others not: load a saved state before you go on"
                ) from error

    def _publish(self) -> None:
        """What it has updated leaves for the device."""
        self._join()
        if self._unpublished:
            self._unpublished = False
            for shard in self.weights:
                shard.publish()
            self._show_readers()

    def _drop(self) -> None:
        """What was read of the shards need not stay in memory."""
        for unit in self.units:
            for shard in unit.shards:
                shard.memory.drop()

    # --- state: what the update that runs beside has done is in it ----------------------------------------

    @contextlib.contextmanager
    def _in_full_precision(self, changed: bool = False) -> Iterator[None]:
        self._join()
        with super()._in_full_precision(changed):
            yield
        if changed:
            self._unpublished = False
        self._drop()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """As every engine's."""
        self._join()
        try:
            return super().optimizer_state_dict()
        finally:
            self._drop()

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every engine's."""
        self._join()
        super().load_optimizer_state_dict(state_dict)
        for shard in self.weights:
            shard.keep_state(self.optimizer.state)


def _check(to: str, what: Iterable[str]) -> tuple[str, ...]:
    if to not in host.MEMORIES:
        raise ValueError(f"to={to!r}: choose one of {', '.join(map(repr, host.MEMORIES))}")
    what = (what,) if isinstance(what, str) else tuple(what)
    if set(what) not in ({"optimizer"}, {"optimizer", "params"}):
        raise ValueError(f"what={what!r}: choose ('optimizer',) or ('optimizer', 'params')")
    return what
