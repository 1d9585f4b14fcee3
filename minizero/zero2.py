"""ZeRO-2: a bucket's gradients live until they are reduced; then this rank keeps 1/N of them.

               weights   gradients   Adam + master    bytes per rank    a rank sends
    ZeRO-1     full      full        1/N              4Ψ + 12Ψ/N        2Ψ (N−1)/N
    ZeRO-2     full      1/N         1/N              2Ψ + 14Ψ/N        2Ψ (N−1)/N

After the reduce-scatter a rank updates with its shard of the mean and needs nothing else, so the bucket's memory is given
back while backward goes on. What it costs: gradients cannot be accumulated locally, for they are gone. Each micro-step
reduces its own and adds to the shard: (G + 1)Ψ for G of them. Rajbhandari et al. 2020, section 5.2.
"""

# P = elements of a bucket, padded; S = P // N = a rank's shard of it

from __future__ import annotations

import contextlib
from typing import NoReturn

import torch
from torch import nn

from minizero.parts import comm
from minizero.parts.bucket import TransientBucket
from minizero.parts.engine import Engine, Gradients
from minizero.parts.precision import LossScaler
from minizero.zero1 import ShardedUpdate


class Zero2(Engine):
    """Data parallel training of `module` on all ranks of `group`, with gradients and the optimizer's state sharded.

    module: the model, equal in shape on all ranks; rank 0's weights and buffers win
    optimizer: an ordinary element-wise torch optimizer over its parameters; its param_groups hold this rank's pieces then
    precision: "bf16" or "fp16" computes in 16 bits and updates an fp32 master of the shard
    clip_norm: clip gradients to this global norm; math.inf only measures it (engine.grad_norm)
    bucket_mb: size of a bucket in MiB
    """

    optimizer_sees_shards = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: LossScaler | None = None):  # fmt: skip
        super().__init__(module, optimizer, precision=precision, clip_norm=clip_norm, group=group, loss_scaler=loss_scaler)
        self._follow_rank_0()
        for name, params in self._params_by_bucket(bucket_mb):
            weights = self._flat_shard(name, params, self.rank, self.world_size)
            self.buckets.append(TransientBucket(name, params, weights, self.rank, self.world_size, self._names))
        self._launched = 0  # buckets, in this backward
        self._under_way: dict[TransientBucket, comm.Pending] = {}  # the last of them
        self._take_over()
        self.sharded = ShardedUpdate(optimizer, self.weights, self.group)

    # --- backward -----------------------------------------------------------------------------------

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Autograd has finished one gradient."""
        bucket = self._bucket_of[param]
        bucket.arrived.add(param)
        while self._next is not None and self._next.full:
            self._launch(self._next)
            self._launched += 1

    def _reduce_the_rest(self) -> None:
        """Launch what was not full (a parameter that was not used gives zeros), and wait for all."""
        while self._next is not None:
            self._launch(self._next)
            self._launched += 1
        self._land()
        self._launched = 0
        for bucket in self.buckets:
            bucket.arrived.clear()
        self._gradients = Gradients.REDUCED

    @property
    def _next(self) -> TransientBucket | None:
        """Buckets leave in one order on every rank, whatever the order in which gradients arrive."""
        return self.buckets[self._launched] if self._launched < len(self.buckets) else None

    def no_sync(self) -> NoReturn:
        """RuntimeError: to accumulate locally, a rank would have to keep the gradients that ZeRO-2 gives back."""
        raise RuntimeError(
            "ZeRO-2 has no no_sync(): gradients that wait on this rank for the next backward would be whole, and Zero2 keeps only "
            "1/N of them. Leave it out: each backward is reduced and its shard accumulates; or take Zero1"
        )

    # --- the reduce-scatter of a bucket ---------------------------------------------------------------

    def _launch(self, bucket: TransientBucket) -> None:
        """The reduce-scatter of a bucket: this rank gets the mean of its shard. The bucket before has arrived by now, and is
        freed: one is under way while another fills."""
        self._land()
        grad_P = bucket.close()
        self._under_way[bucket] = comm.reduce_scatter_mean(bucket.grad_S, grad_P, self.group, bucket.name)

    def _land(self) -> None:
        """Wait for what was launched: this rank has the mean of its shard, and the bucket's memory is free."""
        for bucket, pending in self._under_way.items():
            pending.wait()
            bucket.land()
        self._under_way.clear()

    # --- step ---------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Each rank updates its shard of the weights, and all gather them."""
        self.sharded.step()

    def gathered(self, *modules: nn.Module) -> contextlib.AbstractContextManager:
        """Weights are always full here: there is nothing to do."""
        return contextlib.nullcontext()
