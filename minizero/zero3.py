"""ZeRO-3: a unit's weights exist while the unit works; between, every rank keeps 1/N of them.

               weights   gradients   Adam + master    bytes per rank    a rank sends
    ZeRO-2     full      1/N         1/N              2Ψ + 14Ψ/N        2Ψ (N−1)/N
    ZeRO-3     1/N       1/N         1/N              16Ψ/N             3Ψ (N−1)/N

A unit (a block, say) is gathered before its forward and freed after it; gathered before its backward and freed after it;
then its gradients are reduce-scattered and freed. Nothing about the model is split: every rank computes
every layer, on its own batch. What it costs: weights are gathered twice where ZeRO-2 gathers them once, in each
micro-step, 3GΨ for G of them. Rajbhandari et al. 2020, sections 5.3 and 7.2.
"""

# P = elements of a unit's flat buffer, padded; S = P // N = a rank's shard of it

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch
from torch import nn

from minizero.parts import comm
from minizero.parts.bucket import TransientBucket
from minizero.parts.engine import Engine, Gradients
from minizero.parts.flat import UnitShard
from minizero.parts.precision import LossScaler
from minizero.parts.units import Order, Unit, Watch, not_equal, units_of


class Zero3(Engine):
    """Data parallel training of `module` on all ranks of `group`, with weights, gradients and the optimizer's state sharded.

    module: the model, equal in shape on all ranks; rank 0's weights and buffers win
    optimizer: an ordinary element-wise torch optimizer over its parameters; its param_groups hold this rank's pieces then
    units: modules, or classes of modules, that are gathered one at a time; by default the children of the outermost
        ModuleLists and Sequentials. The rest is the root unit, which encloses them
    precision: "bf16" or "fp16" computes in 16 bits and updates an fp32 master of the shard
    clip_norm: clip gradients to this global norm; math.inf only measures it (engine.grad_norm)
    bucket_mb: without effect, since a unit's gradients travel together; here so that engines can be exchanged

    Outside its unit's forward and backward, to use a weight is an error: see gathered().
    """

    optimizer_sees_shards = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *,
                 units: Iterable[type[nn.Module] | nn.Module] | None = None,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: LossScaler | None = None):  # fmt: skip
        super().__init__(module, optimizer, precision=precision, clip_norm=clip_norm, group=group, loss_scaler=loss_scaler)
        self.units = units_of(module, units)
        self._follow_rank_0()
        for unit, params in self._params_by_unit(bucket_mb):
            weights = self._unit_shard(unit, params)
            if params[0].requires_grad:
                unit.buckets.append(self._bucket(unit.name, params, weights))
                self.buckets.append(unit.buckets[-1])
        self._ready: Unit | None = None  # its backward is over, and its gradients have not left yet
        self._reduced: set[TransientBucket] = set()  # in this backward
        self._under_way: dict[TransientBucket, comm.Pending] = {}  # the last reduction
        self._order = Order(self.group)
        self._take_over()
        self._watch = Watch(self.units, self)

    def _bucket(self, name: str, params: list[nn.Parameter], weights: UnitShard) -> TransientBucket:
        return TransientBucket(name, params, weights, self.rank, self.world_size, self._names)

    # --- a unit's forward and backward ----------------------------------------------------------------

    def _enter_forward(self, unit: Unit) -> None:
        self._arrive(unit, self._gather(unit))

    def _leave_forward(self, unit: Unit) -> None:
        unit.adopt()  # what a forward has written to its own weights
        unit.free()

    def _enter_backward(self, unit: Unit) -> None:
        """The gradients of the unit before leave now: behind the request for these weights, which alone is waited for."""
        gathers = self._gather(unit)
        self._reduce_ready()
        self._arrive(unit, gathers)

    def _leave_backward(self, unit: Unit) -> None:
        self._reduce_ready()
        if self._gradients_come:
            self._begin_backward()
            self._ready = unit
        if not self._watch.needs(unit):
            unit.free()

    def _at_rest(self) -> None:
        """Backward is over, for all units."""

    def _complete(self, unit: Unit) -> bool:
        """Each of its parameters has its gradient of this backward."""
        return all(bucket.complete for bucket in unit.buckets)

    # --- the all-gather of a unit's weights -----------------------------------------------------------

    def _gather(self, unit: Unit) -> list[comm.Pending]:
        """Ask all ranks for its weights."""
        if unit.resident:
            return []
        self._order.note("gathered", unit.name)
        return [comm.all_gather(shard.allocate(), shard.give(), self.group, unit.name) for shard in unit.shards]

    def _arrive(self, unit: Unit, gathers: list[comm.Pending]) -> None:
        """Wait for them."""
        if gathers:
            unit.show()
        for gather in gathers:
            gather.wait()
        unit.arrived()

    # --- the reduce-scatter of a unit's gradients -------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Its gradients leave: this rank gets the mean of its shard."""
        for bucket in unit.buckets:
            if bucket not in self._reduced:
                self._launch(bucket)
                self._reduced.add(bucket)
                self._order.note("reduced", unit.name)

    def _reduce_ready(self) -> None:
        if self._ready is not None:
            self._reduce(self._ready)
            self._ready = None

    def _reduce_the_rest(self) -> None:
        """Backward has ended. Units to which it did not come give zeros."""
        self._watch.end()
        self._reduce_ready()
        for unit in reversed(self.units):
            self._reduce(unit)
        self._land()
        self._reduced.clear()
        self._gradients = Gradients.REDUCED

    def _launch(self, bucket: TransientBucket) -> None:
        """The bucket before has arrived by now, and is freed: one is under way while another fills."""
        self._land()
        grad_P = bucket.close()
        self._under_way[bucket] = comm.reduce_scatter_mean(bucket.grad_S, grad_P, self.group, bucket.name)

    def _land(self) -> None:
        """Wait for what was launched: this rank has the mean of its shard, and the bucket's memory is free."""
        for bucket, pending in self._under_way.items():
            pending.wait()
            bucket.land()
        self._under_way.clear()

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Autograd has finished one gradient. It waits for the others of its unit."""

    def no_sync(self) -> NoReturn:
        """RuntimeError: to accumulate locally, a rank would have to keep the gradients that ZeRO-3 gives back."""
        raise RuntimeError(
            "ZeRO-3 has no no_sync(): gradients that wait on this rank for the next backward would be whole, and Zero3 keeps only "
            "1/N of them. Leave it out: each backward is reduced and its shard accumulates; or take Zero1"
        )

    # --- step ---------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Each rank updates its shard of the weights. Nothing is gathered: the next forward does that."""
        self.optimizer.step()
        for shard in self.weights:
            shard.publish()
        self._show_readers()

    def _show_readers(self) -> None:
        """Who is inside gathered() reads the new weights."""
        for unit in self.units:
            if unit.pinned:
                self._gather_again(unit)

    def _gather_again(self, unit: Unit) -> None:
        for shard in unit.shards:
            comm.all_gather(shard.full_P, shard.give(), self.group, unit.name).wait()
        unit.show()

    @contextlib.contextmanager
    def gathered(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, the full weights of these modules (of all, without arguments) can be read. What is written to them counts, if
        it is the same on every rank; else RuntimeError, and they are what they were. A call of all ranks."""
        wanted = {param for part in modules or [self.module] for param in part.parameters()}
        units = [unit for unit in self.units if wanted.intersection(unit.params)]
        for unit in units:
            unit.pinned += 1
            self._arrive(unit, self._gather(unit))
        try:
            with self._watch.saving():
                yield
            if (differing := not_equal(units, self.group)) is not None:
                for unit in units:
                    self._gather_again(unit)
                raise RuntimeError(
                    f"the ranks have written different weights inside gathered(), in unit {differing.name!r}; nothing of it was taken "
                    "over. Write the same on every rank, or call load_state_dict(), where rank 0 wins"
                )
        finally:
            for unit in units:
                unit.pinned -= 1
                unit.adopt()
                if not self._watch.needs(unit):
                    unit.free()
