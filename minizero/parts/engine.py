"""What every engine does around its step: look after the wrapped module, its precision, its optimizer and its state dicts.

A step (ddp.py, zero1.py, …) says who holds which bytes and when they move. What a training loop needs besides, and the
lesson does not, is here. A step has `buckets`, and three methods: `_gradient_ready` launches the buckets that are full,
`_reduce_the_rest` the others, and waits; `_update` makes the optimizer's step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, increment_version

from minizero.parts import checks, comm, flat, freed, optim, spans
from minizero.parts.bucket import Bucket, partition
from minizero.parts.flat import FlatShard, UnitShard
from minizero.parts.freed import FreedGradient
from minizero.parts.precision import LossScaler, cast, compute_dtype, lower
from minizero.parts.units import Order, Unit, Watch

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those whose hooks are in place


class Gradients(Enum):
    LOCAL = auto()  # this rank's own
    ARRIVING = auto()  # backward runs, buckets leave as they fill
    REDUCED = auto()  # the mean over the ranks
    SYNCED = auto()  # and the ranks have agreed for which parameters there is one


class Engine(nn.Module):
    """A module that trains on all ranks of a process group. The steps of the course derive from it."""

    optimizer_sees_shards = False  # whether what the optimizer sees of the gradients differs between ranks

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, *, precision: str | None,
                 clip_norm: float | None, group: comm.Group | None, loss_scaler: LossScaler | None):  # fmt: skip
        super().__init__()
        checks.check_arguments(module, optimizer, clip_norm, Engine, _engines)
        if self.optimizer_sees_shards:
            if optimizer is None:
                raise TypeError(f"{type(self).__name__} shards the optimizer's state: give it one, {type(self).__name__}(model, optimizer)")
            optim.check_elementwise(type(optimizer), optimizer.defaults)
            checks.check_memory(module)
        self.compute_dtype = compute_dtype(precision)
        if precision == "fp16" and optimizer is None:
            raise ValueError('precision="fp16" needs the optimizer: a step whose gradients overflow must not be made')
        self.loss_scaler = _scaler(precision, loss_scaler)
        self.module = module
        self._names = {param: name for name, param in module.named_parameters()}
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.group = comm.default_group() if group is None else group
        self.rank, self.world_size = comm.rank_in(self.group), comm.size_of(self.group)
        if self.rank < 0:
            raise ValueError(f"rank {comm.global_rank()} is no member of the given group: only its members wrap the model")
        self.device = next((param.device for param in module.parameters()), comm.device())
        self.grad_norm: float | None = None
        self.skipped = 0
        self.buckets: list[Bucket] = []
        self.weights: list[FlatShard] = []  # what the optimizer updates, where it is not the parameters themselves
        self.units: list[Unit] = []  # whose weights come and go
        self._order: Order | None = None  # in which they came, where ranks must agree on it
        self._watch: Watch | None = None  # which tells when they come and go
        self._sync = True
        self._gradients = Gradients.LOCAL
        self._squares: list[float] | None = None  # of the gradients' norm, from each rank
        self._scaled_backward = self._unscaled = self._updating = False
        checks.check_same_model(module, self.group)

    # --- taking over --------------------------------------------------------------------------------

    def _follow_rank_0(self) -> None:
        """Weights and buffers become rank 0's."""
        comm.broadcast_in_portions([*self.module.parameters(), *self.module.buffers()], self.group, "start")

    def _params_by_bucket(self, bucket_mb: float) -> list[tuple[str, list[nn.Parameter]]]:
        """The trainable parameters, in the precision in which they compute, as buckets with their names."""
        partition([], bucket_mb)  # first of all its ValueError
        self._lower()
        trainable = [param for param in self.module.parameters() if param.requires_grad]
        return [(f"bucket {i}", params) for i, params in enumerate(partition(trainable, bucket_mb))]

    def _lower(self) -> None:
        """Parameters get the precision in which they compute."""
        self._exact = lower(self.module, self.compute_dtype)
        self._frozen = {p: exact.dtype for p, exact in self._exact.items() if not p.requires_grad}

    def _flat_shard(self, name: str, params: list[nn.Parameter], rank: int, world_size: int) -> FlatShard:
        """Make the parameters views of a flat buffer, of which `rank` of `world_size` updates its shard."""
        exact = [self._exact.get(param, param.data) for param in params]
        self.weights.append(FlatShard(name, params, rank, world_size, exact, master=params[0] in self._exact))
        return self.weights[-1]

    def _params_by_unit(self, bucket_mb: float) -> list[tuple[Unit, list[nn.Parameter]]]:
        """The parameters of each unit, in the precision in which they compute; of a unit with several kinds, kind by kind."""
        partition([], bucket_mb)  # first of all its ValueError
        self._lower()
        return [(unit, params) for unit in self.units for params in unit.kinds()]

    def _unit_shard(self, unit: Unit, params: list[nn.Parameter]) -> UnitShard:
        """Free the parameters, and keep `rank`'s shard of them."""
        exact = [self._exact.get(param, param.data) for param in params]
        master = params[0].requires_grad and params[0] in self._exact
        shard = self._shard(unit.name, params, self.rank, self.world_size, exact, master, [repr(self._names[p]) for p in params])
        unit.shards.append(shard)
        if params[0].requires_grad:
            self.weights.append(shard)
        return shard

    def _shard(self, *args: Any) -> UnitShard:
        return UnitShard(*args)

    def _take_over(self) -> None:
        """Point the optimizer at what it shall update, and the parameters' hooks at this engine."""
        del self._exact  # the masters have it now
        self._known = {name: (param, checks.form(param)) for name, param in self.module.named_parameters()}
        self._parts = list(self.module.modules())
        self._as_wrapped = self._outline()
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self._updated: set[Tensor] = {param for param, _ in self._known.values()}
        if self.weights:
            self._updated = {piece for shard in self.weights for piece in shard.pieces.values()}
            self._repointed = optim.repoint(self.optimizer, self.weights)
        if self.optimizer is not None:
            self._stand_in_for(self.optimizer)
        self._hook_gradients()

    def _stand_in_for(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.zero_grad() clears pieces only; whoever calls it means all gradients. optimizer.step() updates pieces only,
        and the weights of the other ranks would never hear of it."""
        me = weakref.ref(self)
        alone = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            engine = me()
            if engine is not None:
                engine._end_broken_backward()
            (engine.zero_grad if engine is not None and engine.weights else alone)(set_to_none)

        def inside_engine_step(*_: Any) -> None:
            engine = me()
            if engine is None or not engine._updating:
                raise RuntimeError(
                    "this optimizer updates the shards of an engine: call engine.step(). If the engine is gone, build a new "
                    "optimizer over model.parameters()"
                )

        optimizer.zero_grad = zero_grad
        if self.weights:
            optimizer.register_step_pre_hook(inside_engine_step)

    def _hook_gradients(self) -> None:
        """Hear of each gradient, before and after autograd adds it to a parameter's .grad. Keeps nothing alive."""
        me = weakref.ref(self)
        self._accumulators: list[Node] = []
        self._undefined: set[nn.Parameter] = set()

        def before(param: nn.Parameter, grads: tuple[Tensor | None, ...]) -> None:
            engine = me()
            if engine is None:
                return
            if grads[0] is None:  # autograd has come to it, and brings nothing
                engine._undefined.add(param)
            else:
                engine._bucket_of[param].before_accumulation(param)

        def after(param: nn.Parameter, _: Tensor) -> None:
            engine = me()
            if engine is not None:
                engine._gradient_arrived(param)

        for param in self._bucket_of:
            with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be there for this
                accumulator = get_gradient_edge(param).node
            self._accumulators.append(accumulator)  # the parameter itself does not keep it
            handles = [param.register_post_accumulate_grad_hook(functools.partial(after, param)),
                       accumulator.register_prehook(functools.partial(before, param))]  # fmt: skip
            for handle in handles:
                weakref.finalize(self, handle.remove)
        weakref.finalize(self, _let_go, list(self._bucket_of))
        _engines.add(self)

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. In training, buffers (BatchNorm's statistics, say) are rank 0's first."""
        if torch.is_grad_enabled() and not inside_backward():
            self._check_unchanged()
            self._begin_batch()
            if self.module.training:
                comm.broadcast(list(self.module.buffers()), self.group, "buffers")
        args, kwargs = cast((args, kwargs), self.compute_dtype)
        with self._span("forward"):
            return self.module(*args, **kwargs)

    def _span(self, what: str) -> contextlib.AbstractContextManager:
        """Of units each tells its own."""
        return contextlib.nullcontext() if self.units else spans.span(what, "model")

    def _begin_batch(self) -> None:
        self._end_broken_backward()
        if self._watch is not None:
            self._watch.reset()
        if self._gradients is Gradients.SYNCED and self.module.training:
            self._gradients = Gradients.LOCAL

    def _end_broken_backward(self) -> None:
        """loss.backward(), called directly, has raised: end what the other ranks may wait for."""
        if self._gradients is Gradients.ARRIVING and not inside_backward():
            if self._watch is not None:
                self._watch.go_on()
            self._reduce_the_rest()

    def _outline(self) -> list:
        """What each module consists of, and the form of each parameter."""
        with freed.unguarded():
            outline: list = [checks.form(param) for param, _ in self._known.values()]
        for part in self._parts:
            for owned in (part._parameters, part._modules):
                outline += owned
                outline += map(id, owned.values())
        return outline

    def _check_unchanged(self) -> None:
        """A parameter that was replaced, added or unfrozen since would train on this rank alone."""
        if self._outline() != self._as_wrapped:
            self._look_for_changes()
        if self.optimizer is not None:
            checks.check_groups(self._updated, self.optimizer)

    def _look_for_changes(self) -> None:
        for name, param in self.module.named_parameters():
            known, form = self._known.get(name, (None, None))
            cure = f"make the change first and wrap the model in {type(self).__name__} afterwards"
            if known is None:
                raise RuntimeError(f"parameter {name!r} was added after the model was wrapped (rank {self.rank}): {cure}")
            if known is not param:
                raise RuntimeError(f"parameter {name!r} was replaced after the model was wrapped (rank {self.rank}): {cure}")
            if form == (now := checks.form(param)):
                continue
            if now[1:] != form[1:]:
                raise RuntimeError(
                    f"parameter {name!r} was {checks.tell(form)} when the model was wrapped and is {checks.tell(now)} now "
                    f"(rank {self.rank}): {cure}"
                )
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now "
                    f"(rank {self.rank}): {cure}"
                )

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), every bucket reduced meanwhile; inside no_sync() gradients only accumulate on this rank."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() needs the loss, a tensor with a graph; got a {type(loss).__name__}")
        if self._sync:
            self._gradients = Gradients.ARRIVING
        self._scaled_backward = True
        try:
            with self._span("backward"):
                (loss if self.loss_scaler is None else loss.float() * self.loss_scale).backward()
        except BaseException:
            if self._watch is not None:
                self._watch.go_on()
            raise
        finally:  # also if it raises: the other ranks wait for this one's buckets
            self._scaled_backward = False
            if self._sync:
                self._reduce_the_rest()

    def _gradient_arrived(self, param: nn.Parameter) -> None:
        if param in self._undefined:
            self._undefined.discard(param)
        else:
            self._check_gradient(param)
            self._bucket_of[param].take(param)
        if self.loss_scaler is not None and not self._scaled_backward:
            self._unscaled = True
        if not self._sync:
            if self._gradients is Gradients.SYNCED:
                self._gradients = Gradients.REDUCED  # and the bucket is late
            return
        self._begin_backward()
        self._gradient_ready(param)

    def _begin_backward(self) -> None:
        """Gradients of this backward will come."""
        if self._gradients is not Gradients.ARRIVING:  # loss.backward() was called directly
            self._gradients = Gradients.ARRIVING
            # When the backward that runs has ended. One that reentrant checkpointing starts inside another is its own.
            me = weakref.ref(self)
            end = torch.autograd.Variable._execution_engine.queue_callback
            end(lambda: me() is not None and me()._reduce_the_rest())

    @property
    def _gradients_come(self) -> bool:
        """Autograd is running, and will come to a parameter: so this is no torch.autograd.grad()."""
        if self._gradients is Gradients.ARRIVING:
            return True
        try:
            return inside_backward() and any(map(torch._C._will_engine_execute_node, self._accumulators))
        except RuntimeError:  # inside torch.autograd.grad() torch does not tell of leaves
            return False

    def _check_gradient(self, param: nn.Parameter) -> None:
        if param.grad is None:
            raise RuntimeError(
                f"a hook has taken the gradient of parameter {self._name(param)!r} away before it could be averaged: "
                "use it after sync_gradients()"
            )
        grad = param.grad
        if not grad.requires_grad and grad.layout is torch.strided:
            return
        param.grad = None  # what is refused is not there, and the other ranks get zeros
        if grad.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) reached parameter {self._name(param)!r}: its gradient is averaged over the ranks, "
                "which is not differentiable. For a penalty on gradients take torch.autograd.grad(…, create_graph=True), "
                "then engine.backward() of the whole loss"
            )
        raise RuntimeError(
            f"parameter {self._name(param)!r} has a sparse gradient, which does not fit into a bucket: "
            "build its module with sparse=False"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the next one outside reduces what has come together."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # --- step ---------------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """After it, each tensor in optimizer.param_groups has in .grad the mean over the ranks, or None if no rank had a
        gradient for its parameter. What is edited there counts."""
        self._synchronize()
        self._squares = None  # they may be edited from here on

    def _synchronize(self) -> None:
        if self._gradients is Gradients.SYNCED and all(bucket.as_handed_out for bucket in self.buckets):
            return
        if self._gradients is not Gradients.REDUCED:
            self._reduce_the_rest()
        used, late = self._agree()
        if late:
            for bucket in late:
                self._launch(bucket)
                self._land()
            used, _ = self._agree()
        for bucket in self.buckets:
            bucket.hand_out(used, self.loss_scale)
        self._gradients = Gradients.SYNCED

    def _agree(self) -> tuple[set[nn.Parameter], list[Bucket]]:
        """What some rank had a gradient for, and which buckets have changed on some rank since they were reduced; and, since
        only one message a step is wanted, each rank's part of the norm."""
        self._check_edits()
        flags = [flag for bucket in self.buckets for flag in bucket.gradients()]
        flags += [bucket.late for bucket in self.buckets]
        for bucket in self.buckets:
            if not bucket.late:
                bucket.prepare(self.loss_scale)
        numbers = [self._own_squares()] + ([] if self._order is None else self._order.fingerprints())
        somewhere, (self._squares, *orders) = comm.agree(flags, numbers, self.group, self.device)
        if self._order is not None:
            self._order.compare(*orders)
        answers = iter(somewhere)
        params = [param for bucket in self.buckets for param in bucket.params]
        return {p for p in params if next(answers)}, [b for b in self.buckets if next(answers)]

    def _check_edits(self) -> None:
        with freed.unguarded():
            spoilt = next((param for bucket in self.buckets for param in bucket.params if bucket.spoilt(param)), None)
        if spoilt is not None:
            raise RuntimeError(
                f"the gradient of parameter {self._name(spoilt)!r} was changed after backward (rank {self.rank}), and what "
                f"counts in {type(self).__name__} are the shards that the optimizer sees. To clip, give {type(self).__name__} "
                "a clip_norm; else change .grad of the tensors in optimizer.param_groups, after sync_gradients()"
            )

    def step(self, closure: None = None) -> bool:
        """Update the weights with the averaged gradients and clear them. True if it did, False if the step was skipped."""
        self._check_step(closure)
        if self._watch is not None:
            self._watch.reset()
        if self._gradients is not Gradients.SYNCED:  # what was edited since then counts as it is
            self._synchronize()
        self._check_edits()
        with freed.unguarded():
            for shard in self.weights:
                for param, piece in shard.pieces.items():
                    if param.grad is None:  # cleared since then
                        piece.grad = None
                    elif piece.grad is not None and self._bucket_of[param].zeroed(param):
                        piece.grad.zero_()
        sound = self._gradients_are_sound()
        if sound:
            for shard in self.weights:
                shard.adopt()
            self._updating = True
            try:
                with spans.span("step", "model"):
                    self._update()
            finally:
                self._updating = False
        else:
            self.skipped += 1
        self.zero_grad()
        for bucket in self.buckets:
            bucket.clear()
        self._gradients, self._squares = Gradients.LOCAL, None
        if self._order is not None:
            self._order.clear()
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=not sound)
        return sound

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that the optimizer sees."""
        self._end_broken_backward()
        if set_to_none:
            with freed.unguarded():
                for param in self._names:
                    param.grad = None
        else:  # a freed gradient has to hear of it
            super().zero_grad(set_to_none)
        for shard in self.weights:
            for piece in shard.pieces.values():
                if piece.grad is not None:
                    piece.grad = None if set_to_none else piece.grad.zero_()
        self._unscaled = False
        if self._order is not None and self._order.parted:
            self._order.clear()

    def _gradients_are_sound(self) -> bool:
        """With `clip_norm`, and in fp16: measure the global norm. False if it is not finite: then nothing may move."""
        if not self._wants_norm:
            return True
        squares = self._squares
        if not self.optimizer_sees_shards:
            squares = [self._own_squares()]
        elif squares is None:
            squares = comm.agree([], [self._own_squares()], self.group, self.device)[1][0]
        self.grad_norm = math.sqrt(sum(squares))
        if not math.isfinite(self.grad_norm):
            return False
        if self.clip_norm is not None and self.clip_norm < math.inf:
            coefficient = min(1.0, self.clip_norm / (self.grad_norm + 1e-6))
            if coefficient < 1 and (grads := self._grads()):  # a rank may have none
                torch._foreach_mul_(grads, coefficient)
        return True

    @property
    def _wants_norm(self) -> bool:
        return self.clip_norm is not None or self.loss_scaler is not None

    def _grads(self) -> list[Tensor]:
        """What the optimizer sees."""
        groups = self.optimizer.param_groups if self.optimizer else [{"params": self._bucket_of}]
        return [tensor.grad for group in groups for tensor in group["params"] if tensor.grad is not None]

    def _own_squares(self) -> float:
        """Squares summed in float64: the fp32 norm of a vector depends on how it is cut."""
        if not self._wants_norm:
            return 0.0
        real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in self._grads()]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in real]
        return torch.stack(squares).sum().item() if squares else 0.0

    def _check_step(self, closure: Any) -> None:
        if closure is not None:
            raise TypeError(
                "step() takes no closure: an optimizer that evaluates the loss several times (LBFGS) would do so differently "
                "on each rank. Call backward() yourself, then step()"
            )
        self._check_optimizer()
        if self._unscaled and any(param.grad is not None for param in self._bucket_of):
            raise RuntimeError(
                'precision="fp16" scales the loss, and loss.backward() was called directly: call engine.backward(loss). '
                "Clear these gradients with engine.zero_grad() first"
            )

    def _check_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} was built without an optimizer: give it one, {type(self).__name__}(model, optimizer), "
                "or call sync_gradients() and then your own optimizer's step()"
            )
        checks.check_groups(self._updated, self.optimizer)
        return self.optimizer

    # --- state --------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor that engine.backward() puts on the loss: 1.0 unless precision="fp16"."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dict, under its own names and in full precision: as if it had never been wrapped. A call of all
        ranks."""
        with self._in_full_precision():
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict. Call it on every rank; rank 0's values win.

        ValueError with assign=True, which would replace the parameters that the engine holds.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the wrapped parameters: leave assign=False")
        with self._in_full_precision(changed=True):
            result = self.module.load_state_dict(state_dict, strict=strict)
            self._follow_rank_0()
        return result

    @contextlib.contextmanager
    def _in_full_precision(self, changed: bool = False) -> Iterator[None]:
        """In the module stand, in place of its parameters, their exact weights, whole. `changed`: afterwards the masters are what
        these are then. (Another dtype as a parameter's own .data would cost it its hooks.)"""
        shards = self._shards_apart()
        exact: dict[nn.Parameter, Tensor] = {}
        for shard in shards:
            shard.adopt()
            exact_P = shard.empty(shard.shard_S.dtype)
            if shard.layout.world_size == 1:
                exact_P.copy_(shard.shard_S)
            else:
                comm.all_gather(exact_P, shard.shard_S.to(exact_P.device), self.group, "state").wait()
            exact |= zip(shard.params, flat.views(exact_P, shard.layout), strict=True)
        for param, dtype in self._frozen.items():
            whole = exact.get(param)
            exact[param] = (param.data if whole is None else whole).to(dtype)
        stands = {param: nn.Parameter(weight, param.requires_grad) for param, weight in exact.items()}
        places = [(part._parameters, name, param) for part in self.module.modules() for name, param in part._parameters.items()
                  if param in stands]  # fmt: skip
        for parameters, name, param in places:
            parameters[name] = stands[param]
        try:
            yield
            if changed:
                for shard in shards:
                    shard.fill([stands[param].data for param in shard.params])
                for param in self._frozen.keys() - {param for shard in shards for param in shard.params}:
                    param.data.copy_(stands[param].data)
                increment_version(list(stands))  # a graph from before must not be used any more
        finally:
            for parameters, name, param in places:
                parameters[name] = param

    def _shards_apart(self) -> list[FlatShard]:
        """Those whose parameters are not the weights themselves, whole and exact."""
        if self.units:
            return [shard for unit in self.units for shard in unit.shards]
        return [shard for shard in self.weights if shard.has_master]

    def optimizer_state_dict(self) -> dict[str, Any]:
        """{"state": {name: {…}}, "param_groups": [{…, "params": [names]}]}: the optimizer's state dict, with whole tensors
        and the parameters' names where PyTorch counts them; the form of torch.distributed.checkpoint.state_dict. A call of
        all ranks."""
        optimizer = self._check_optimizer()
        groups = [{**{k: v for k, v in group.items() if k != "params"}, "params": [self._name(p) for p in params]}
                  for group, params in zip(optimizer.state_dict()["param_groups"], self._groups, strict=True)]  # fmt: skip
        state = optim.gather_state(optimizer, self.weights, self.group) if self.weights else dict(optimizer.state)
        in_order = [param for params in self._groups for param in params if param in state]
        return {"state": {self._name(param): dict(state[param]) for param in in_order}, "param_groups": groups}

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what optimizer_state_dict() gave, on every rank. ValueError if the parameters or their groups differ."""
        optimizer = self._check_optimizer()
        saved, here = state_dict["param_groups"], [[self._name(p) for p in params] for params in self._groups]
        if any(not isinstance(name, str) for group in saved for name in group["params"]):
            raise ValueError(
                "the optimizer state counts its parameters, as optimizer.state_dict() does; this takes their names, as "
                "engine.optimizer_state_dict() and torch.distributed.checkpoint.state_dict give them"
            )
        if [set(group["params"]) for group in saved] != [set(names) for names in here]:
            theirs, ours = ({name for names in groups for name in names} for groups in ([g["params"] for g in saved], here))
            differing = sorted(theirs ^ ours) or "the division into groups"
            raise ValueError(f"the optimizer state is for other parameters than this optimizer's: {differing}")
        shard_of = {param: shard for shard in self.weights for param in shard.pieces}
        index = {tensor: i for i, tensor in enumerate(t for group in optimizer.param_groups for t in group["params"])}
        state = {}
        for name, values in state_dict["state"].items():
            param = self._known[name][0]
            if not self.weights:
                state[index[param]] = copy.deepcopy(values)
            elif param in shard_of:
                state[index[shard_of[param].pieces[param]]] = optim.cut_state(shard_of[param], param, values)
        groups = [{**group, "params": [index[tensor] for tensor in own["params"]]}
                  for group, own in zip(saved, optimizer.param_groups, strict=True)]  # fmt: skip
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    @property
    def _groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each of the optimizer's groups."""
        return self._repointed if self.weights else [list(group["params"]) for group in self.optimizer.param_groups]

    def _name(self, param: Tensor) -> str:
        return self._names[param]

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied: its hooks belong to this model. Copy the weights, "
            "copy.deepcopy(engine.state_dict()), and load them into a second model"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it belongs to this rank's process group. "
            "Send engine.state_dict() and engine.optimizer_state_dict()"
        )


def _let_go(params: list[nn.Parameter]) -> None:
    """Their engine is gone, and with it the gradients that it had sharded."""
    for param in params:
        if isinstance(param.grad, FreedGradient):
            param.grad = None


def _scaler(precision: str | None, loss_scaler: LossScaler | None) -> LossScaler | None:
    if loss_scaler is not None and not isinstance(loss_scaler, LossScaler):
        raise TypeError(f"loss_scaler must be a minizero.LossScaler; got {loss_scaler!r:.80}")
    return (loss_scaler or LossScaler()) if precision == "fp16" else None  # the range of bf16 needs none


def inside_backward() -> bool:
    """Whether autograd is running: then a forward is checkpointing's second one, and no new batch begins."""
    return torch._C._current_graph_task_id() != -1
