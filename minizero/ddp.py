"""DDP: every rank keeps the whole model, computes on its own batch, and the gradients are averaged while backward runs.

               weights   gradients   Adam + master    bytes per rank    a rank sends
    DDP        full      full        full             16Ψ               2Ψ (N−1)/N

When a bucket of gradients is full it is all-reduced: a reduce-scatter, after which each rank has the mean of 1/N of
the bucket, and an all-gather, after which each has all of it. Li et al. 2020, section 3.
"""

# P = elements of a bucket, padded; S = P // N = a rank's shard of it

from __future__ import annotations

import contextlib
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from minizero.parts import comm, flat
from minizero.parts.bucket import Bucket, partition
from minizero.parts.engine import Engine


class Gradients(Enum):
    LOCAL = auto()  # this rank's own
    ARRIVING = auto()  # backward runs, buckets leave as they fill
    REDUCED = auto()  # the mean over the ranks
    SYNCED = auto()  # and the ranks have agreed for which parameters there is one


class DDP(Engine):
    """Data parallel training of `module` on all ranks of `group`.

    module: the model, equal in shape on all ranks; rank 0's weights and buffers win
    optimizer: an ordinary torch optimizer over its parameters; without one, call sync_gradients() and step yourself
    clip_norm: clip gradients to this global norm; math.inf only measures it (engine.grad_norm)
    bucket_mb: size of a bucket in MiB
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
                 precision: str | None = None, clip_norm: float | None = None, bucket_mb: float = 25,
                 group: comm.Group | None = None, loss_scaler: Any = None):  # fmt: skip
        super().__init__(module, optimizer, precision=precision, clip_norm=clip_norm, group=group, loss_scaler=loss_scaler)
        self._follow_rank_0()
        self.buckets = [Bucket(f"bucket {i}", params, self.world_size)
                        for i, params in enumerate(partition(self._trainable, bucket_mb))]  # fmt: skip
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._under_way: dict[Bucket, comm.Pending] = {}  # in the order of launch
        self._gradients = Gradients.LOCAL
        self._on_gradient(DDP._gradient_ready)

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), every bucket all-reduced meanwhile; inside no_sync() it only accumulates."""
        self._check_loss(loss)
        if self._sync:
            self._gradients = Gradients.ARRIVING
        try:
            loss.backward()
        finally:  # also if it raises: the other ranks wait for this one's buckets
            if self._sync:
                self._reduce_the_rest()

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Autograd has finished one gradient."""
        bucket = self._bucket_of[param]
        bucket.take(param)
        if not self._sync:
            if self._gradients is Gradients.SYNCED:
                self._gradients = Gradients.REDUCED  # and the bucket is late
            return
        if self._gradients is not Gradients.ARRIVING:  # loss.backward() was called directly
            self._gradients = Gradients.ARRIVING
            self._after_backward(DDP._reduce_the_rest)
        bucket.arrived.add(param)
        while self._next is not None and self._next.full:
            self._launch(self._next)

    def _reduce_the_rest(self) -> None:
        """Launch what was not full (a parameter that was not used gives zeros), and wait for all."""
        while self._next is not None:
            self._launch(self._next)
        self._gather_launched()
        for bucket, pending in self._under_way.items():
            pending.wait()
            bucket.land()
        self._under_way.clear()
        self._gradients = Gradients.REDUCED

    # --- the all-reduce of a bucket -----------------------------------------------------------------

    @property
    def _next(self) -> Bucket | None:
        """Buckets leave in one order on every rank, whatever the order in which gradients arrive."""
        return self.buckets[len(self._under_way)] if len(self._under_way) < len(self.buckets) else None

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

    def _shard(self, bucket: Bucket) -> Tensor:
        return flat.shard(bucket.grad_P, self.rank, self.world_size)

    # --- step ---------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """After it, each parameter's .grad is the mean over the ranks, or None if no rank had a gradient for it."""
        if self._gradients is Gradients.SYNCED and all(bucket.as_handed_out for bucket in self.buckets):
            return
        if self._gradients is not Gradients.REDUCED:
            self._reduce_the_rest()
        used, late = self._agree()
        for bucket in late:
            self._launch(bucket)
            self._gather_launched()
            self._under_way.pop(bucket).wait()
            bucket.land()
        for bucket in self.buckets:
            bucket.hand_out(used)
        self._gradients = Gradients.SYNCED

    def _agree(self) -> tuple[set[nn.Parameter], list[Bucket]]:
        """What some rank had a gradient for, and which buckets have changed on some rank since they were reduced."""
        flags = [flag for bucket in self.buckets for flag in bucket.gradients()]
        flags += [bucket.late for bucket in self.buckets]
        somewhere = iter(comm.any_rank(flags, self.group, self.device))
        return {p for p in self._bucket_of if next(somewhere)}, [b for b in self.buckets if next(somewhere)]

    def step(self, closure: None = None) -> bool:
        """Update the weights with the averaged gradients and clear them. True if it did, False if the step was skipped."""
        optimizer = self._optimizer_or_error(closure)
        if self._gradients is not Gradients.SYNCED:  # what was edited since then counts as it is
            self.sync_gradients()
        sound = self._gradients_are_sound()
        if sound:
            optimizer.step()
        else:
            self.skipped += 1
        self.zero_grad()
        self._gradients = Gradients.LOCAL
        return sound

    def _before_forward(self) -> None:
        if self._gradients is Gradients.ARRIVING:  # the last backward raised: end what the other ranks may wait for
            self._reduce_the_rest()
            self.zero_grad()
        if self._gradients is Gradients.SYNCED and self.module.training:
            self._gradients = Gradients.LOCAL

    def gathered(self, *modules: nn.Module) -> contextlib.AbstractContextManager:
        """Weights are always full here: there is nothing to do."""
        return contextlib.nullcontext()
