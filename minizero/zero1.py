"""ZeRO-1: every rank keeps all weights and gradients, and 1/N of Adam's state.

               weights   gradients   Adam + master    bytes per rank    a rank sends
    DDP        full      full        full             16Ψ               2Ψ (N−1)/N
    ZeRO-1     full      full        1/N              4Ψ + 12Ψ/N        2Ψ (N−1)/N

An all-reduce is a reduce-scatter and an all-gather. Between the two, each rank has the mean gradient of 1/N of the
elements: enough to update 1/N of the weights. So the optimizer's step moves between the halves, and what is gathered is
the updated weights. Rajbhandari et al. 2020, section 5.1.
"""

# P = elements of a bucket, padded; S = P // N = a rank's shard of it

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from minizero.parts import comm, optim
from minizero.parts.bucket import Bucket, ShardBucket, partition
from minizero.parts.engine import Engine, Gradients
from minizero.parts.flat import FlatShard
from minizero.parts.precision import LossScaler


class ShardedUpdate:
    """An optimizer's step, of which each rank makes 1/N."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[FlatShard], group: comm.Group):
        self.optimizer, self.weights, self.group = optimizer, weights, group

    def step(self) -> None:
        """Update this rank's shard, and give it to the others."""
        self.optimizer.step()
        for shard in self.weights:
            shard.publish()
        gathers = [comm.all_gather(shard.full_P, shard.slice_S, self.group, shard.name) for shard in self.weights]
        for gather in gathers:
            gather.wait()


class Zero1(Engine):
    """Data parallel training of `module` on all ranks of `group`, with the optimizer's state sharded.

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
            self.buckets.append(ShardBucket(name, params, weights, self.rank, self.world_size))
        self._under_way: dict[Bucket, comm.Pending] = {}  # in the order of launch
        self._take_over()
        self.sharded = ShardedUpdate(optimizer, self.weights, self.group)

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

    # --- the reduce-scatter of a bucket ---------------------------------------------------------------

    def _launch(self, bucket: ShardBucket) -> None:
        """The reduce-scatter of a bucket: this rank gets the mean of its shard, in place. The bucket before must have arrived
        by now, so that no more than two receive buffers exist at a time."""
        grad_P = bucket.close()
        reduction = comm.reduce_scatter_mean(bucket.grad_S, grad_P, self.group, bucket.name)
        for earlier in self._under_way.values():
            earlier.wait()
        self._under_way[bucket] = reduction

    def _land(self) -> None:
        """Wait for what was launched: this rank has the mean of its shards."""
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


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1's update alone, as a torch optimizer: around any training loop whose gradients are averaged already.

    params: parameters or groups of them, as for any optimizer; rank 0's values win
    optimizer_class: an element-wise optimizer, built over this rank's pieces with **defaults
    process_group: the ranks that share the work; all of them by default

    The signature is that of torch.distributed.optim.ZeroRedundancyOptimizer, which gives whole parameters to ranks; here
    each rank has 1/N of the elements. `param_groups` holds the parameters themselves, and each step uses the lr and the
    other settings that stand there.
    """

    def __init__(self, params: Iterable, optimizer_class: type[torch.optim.Optimizer], process_group: comm.Group | None = None,
                 parameters_as_bucket_view: bool = False, overlap_with_ddp: bool = False, **defaults: Any):  # fmt: skip
        if overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True is not supported: the update of a bucket cannot start inside backward here")
        optim.check_elementwise(optimizer_class, defaults)
        super().__init__(params, defaults)
        self.group = comm.default_group() if process_group is None else process_group
        rank, size = comm.rank_in(self.group), comm.size_of(self.group)
        every = [param for group in self.param_groups for param in group["params"]]
        comm.broadcast_in_portions(every, self.group, "start")
        self.weights = [FlatShard(f"bucket {i}", part, rank, size) for i, part in enumerate(partition(every, 25))]
        self._pieces = {param: piece for shard in self.weights for param, piece in shard.pieces.items()}
        self.optim = optimizer_class([self._of_pieces(group) for group in self.param_groups], **defaults)
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key not in group})  # lr and its like
        self._sharded = ShardedUpdate(self.optim, self.weights, self.group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's shard with the gradients in .grad, which are averaged already, and gather the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})  # a scheduler may have changed them
        for shard in self.weights:
            shard.adopt()
            for param, piece in shard.pieces.items():
                piece.grad = None if param.grad is None else shard.own(param, param.grad)
        self._sharded.step()
        for piece in self._pieces.values():
            piece.grad = None
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group more. After the start, build a new optimizer instead: ValueError."""
        if hasattr(self, "optim"):
            raise ValueError("a ShardedOptimizer takes no group after its start: build a new one over all parameters, and load its state")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """What the unsharded optimizer's state_dict() would be, with whole tensors. A call of all ranks."""
        number = self._numbers()
        state = optim.gather_state(self.optim, self.weights, self.group)
        groups = [{**group, "params": [number[param] for param in group["params"]]} for group in self.param_groups]
        return {"state": {number[param]: state[param] for param in number if param in state}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() gave, here or of the unsharded optimizer. Call it on every rank."""
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the optimizer state is for other groups of parameters than this optimizer's")
        param_of = {number: param for theirs, ours in zip(saved, self.param_groups, strict=True)
                    for number, param in zip(theirs["params"], ours["params"], strict=True)}  # fmt: skip
        shard_of = {param: shard for shard in self.weights for param in shard.pieces}
        number = {piece: i for i, piece in enumerate(self._pieces.values())}
        state = {}
        for index, values in state_dict["state"].items():
            param = param_of[index]
            if param in shard_of:
                state[number[self._pieces[param]]] = optim.cut_state(shard_of[param], param, values)
        groups = [{**theirs, "params": [number[piece] for piece in inner["params"]]}
                  for theirs, inner in zip(saved, self.optim.param_groups, strict=True)]  # fmt: skip
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        for group, theirs in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})

    def _of_pieces(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._pieces[param] for param in group["params"] if param in self._pieces]}

    def _numbers(self) -> dict[nn.Parameter, int]:
        """PyTorch counts an optimizer's parameters over its groups."""
        return {param: i for i, param in enumerate(param for group in self.param_groups for param in group["params"])}
