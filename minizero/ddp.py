"""DDP: every rank keeps the whole model, computes on its own batch, and the gradients are averaged while backward runs.

               weights   gradients   Adam + master    bytes per rank    a rank sends
    DDP        full      full        full             16Ψ               2Ψ (N−1)/N

When a bucket of gradients is full it is all-reduced: a reduce-scatter, after which each rank has the mean of 1/N of
the bucket, and an all-gather, after which each has all of it. Li et al. 2020, section 3.
"""

# P = elements of a bucket, padded; S = P // N = a rank's shard of it

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from minizero.parts import comm, flat
from minizero.parts.bucket import Bucket
from minizero.parts.engine import Engine, Gradients
from minizero.parts.precision import LossScaler


class DDP(Engine):
    """Data parallel training of `module` on all ranks of `group`.

    module: the model, equal in shape on all ranks; rank 0's weights and buffers win
    optimizer: an ordinary torch optimizer over its parameters; without one, call sync_gradients() and step yourself
    precision: "bf16" or "fp16" computes in 16 bits and updates fp32 masters
    clip_norm: clip gradients to this global norm; math.inf only measures it (engine.grad_norm)
    bucket_mb: size of a bucket in MiB
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: LossScaler | None = None):  # fmt: skip
        super().__init__(module, optimizer, precision=precision, clip_norm=clip_norm, group=group, loss_scaler=loss_scaler)
        self._follow_rank_0()
        for name, params in self._params_by_bucket(bucket_mb):
            masters = self._flat_shard(name, params, rank=0, world_size=1) if precision and optimizer else None
            self.buckets.append(Bucket(name, params, self.world_size, masters))
        self._under_way: dict[Bucket, comm.Pending] = {}  # in the order of launch
        self._take_over()

    # --- backward -----------------------------------------------------------------------------------

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Autograd has finished one gradient."""
        bucket = self._bucket_of[param]
        bucket.arrived.add(param)
        while self._next is not None and self._next.full:
            self._launch(self._next)

    def _reduce_the_rest(self) -> None:
        """Launch what was not full (a parameter that was not used gives zeros), and wait for all."""
        while self._next is not None:
            self._launch(self._next)
        self._land()
        self._gradients = Gradients.REDUCED

    @property
    def _next(self) -> Bucket | None:
        """Buckets leave in one order on every rank, whatever the order in which gradients arrive."""
        return self.buckets[len(self._under_way)] if len(self._under_way) < len(self.buckets) else None

    # --- the all-reduce of a bucket -----------------------------------------------------------------

    def _launch(self, bucket: Bucket) -> None:
        """The reduce-scatter of a bucket, and with it the all-gather of the one before."""
        grad_P = bucket.close()
        reduction = comm.reduce_scatter_mean(self._shard(bucket), grad_P, self.group, bucket.name)
        self._gather_launched()
        self._under_way[bucket] = reduction

    def _gather_launched(self) -> None:
        """The second half of the last bucket's all-reduce. It is issued here and not when the first half has arrived:
        asynchronous collectives end in another order on every rank, and must not be issued in another order."""
        if self._under_way:
            bucket, reduction = next(reversed(self._under_way.items()))
            reduction.wait()
            self._under_way[bucket] = comm.all_gather(bucket.grad_P, self._shard(bucket), self.group, bucket.name)

    def _land(self) -> None:
        """Wait for what was launched: every gradient is the mean over the ranks."""
        self._gather_launched()
        for bucket, pending in self._under_way.items():
            pending.wait()
            bucket.land()
        self._under_way.clear()

    def _shard(self, bucket: Bucket) -> Tensor:
        return flat.shard(bucket.grad_P, self.rank, self.world_size)

    # --- step ---------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Every rank makes the same step with the same mean."""
        self.optimizer.step()
        for masters in self.weights:
            masters.publish()

    def gathered(self, *modules: nn.Module) -> contextlib.AbstractContextManager:
        """Weights are always full here: there is nothing to do."""
        return contextlib.nullcontext()
