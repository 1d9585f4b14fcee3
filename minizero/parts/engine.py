"""What every engine does around its step: look after the wrapped module, its buffers, its optimizer and its state dicts.

A step (ddp.py, zero1.py, …) says who holds which bytes and when they move. What a training loop needs besides, and the
lesson does not, is here.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from minizero.parts import comm, flat

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those whose hooks are in place


class Engine(nn.Module):
    """A module that trains on all ranks of a process group. The steps of the course derive from it."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, *, precision: str | None,
                 clip_norm: float | None, group: comm.Group | None, loss_scaler: Any):  # fmt: skip
        super().__init__()
        if precision is not None or loss_scaler is not None:
            raise NotImplementedError("mixed precision is built in the next step of the course: leave precision=None")
        _check_arguments(module, optimizer, clip_norm)
        self.module = module
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.group = comm.default_group() if group is None else group
        self.rank, self.world_size = comm.rank_in(self.group), comm.size_of(self.group)
        if self.rank < 0:
            raise ValueError(f"rank {comm.global_rank()} is no member of the given group: only its members wrap the model")
        self.device = next((param.device for param in module.parameters()), comm.device())
        self.grad_norm: float | None = None
        self.skipped = 0
        self._sync = True
        self._known = {name: (param, _form(param)) for name, param in module.named_parameters()}
        self._trainable = [param for param in module.parameters() if param.requires_grad]
        _check_same_model(module, self.group)

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. In training, buffers (BatchNorm's statistics, say) are rank 0's first."""
        if torch.is_grad_enabled() and not _inside_backward():
            self._check_unchanged()
            self._before_forward()
            if self.module.training:
                comm.broadcast(list(self.module.buffers()), self.group, "buffers")
        return self.module(*args, **kwargs)

    def _before_forward(self) -> None:
        """For a step: a forward with gradients begins."""

    def _check_unchanged(self) -> None:
        """A parameter that was replaced, added or unfrozen since would train on this rank alone."""
        for name, param in self.module.named_parameters():
            known, form = self._known.get(name, (None, None))
            cure = f"make the change first and wrap the model in {type(self).__name__} afterwards"
            if known is None:
                raise RuntimeError(f"parameter {name!r} was added after the model was wrapped (rank {self.rank}): {cure}")
            if known is not param:
                raise RuntimeError(f"parameter {name!r} was replaced after the model was wrapped (rank {self.rank}): {cure}")
            if form == (now := _form(param)):
                continue
            if now[1:] != form[1:]:
                raise RuntimeError(
                    f"parameter {name!r} was {_tell(form)} when the model was wrapped and is {_tell(now)} now "
                    f"(rank {self.rank}): {cure}"
                )
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now "
                    f"(rank {self.rank}): {cure}"
                )
        if self.optimizer is not None:
            _check_groups([param for param, _ in self._known.values()], self.optimizer)

    # --- hooks --------------------------------------------------------------------------------------

    def _on_gradient(self, ready: Callable[[Engine, nn.Parameter], None]) -> None:
        """Call `ready(self, param)` each time autograd has accumulated into a parameter's .grad. Keeps nothing alive."""
        me = weakref.ref(self)

        def hook(param: nn.Parameter) -> None:
            engine = me()
            if engine is not None:
                engine._check_gradient(param)
                ready(engine, param)

        for param in self._trainable:
            handle = param.register_post_accumulate_grad_hook(hook)
            weakref.finalize(self, handle.remove)
        _engines.add(self)

    def _check_gradient(self, param: nn.Parameter) -> None:
        if param.grad is None:
            raise RuntimeError(
                f"a hook has taken the gradient of parameter {self._name(param)!r} away before it could be averaged: "
                "use it after sync_gradients()"
            )
        grad, param.grad = param.grad, None  # what is refused is not there, and the other ranks get zeros
        if grad.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) reached parameter {self._name(param)!r}: its gradient is averaged over the ranks, "
                "which is not differentiable. For a penalty on gradients take torch.autograd.grad(…, create_graph=True), "
                "then engine.backward() of the whole loss"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self._name(param)!r} has a sparse gradient, which does not fit into a bucket: "
                "build its module with sparse=False"
            )
        param.grad = grad

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() needs the loss, a tensor with a graph; got a {type(loss).__name__}")

    def _after_backward(self, finish: Callable[[Engine], None]) -> None:
        """Call `finish(self)` when the backward that is running has ended. The backward that reentrant checkpointing starts
        inside another is one of its own."""
        me = weakref.ref(self)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: me() is not None and finish(me()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the next one outside reduces what has come together."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # --- the norm -----------------------------------------------------------------------------------

    def _gradients_are_sound(self) -> bool:
        """With `clip_norm`: measure the global norm and clip by it. False if it is not finite: then nothing may move."""
        if self.clip_norm is None:
            return True
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = self._norm(grads)
        if not math.isfinite(self.grad_norm):
            return False
        if self.clip_norm < math.inf:
            coefficient = min(1.0, self.clip_norm / (self.grad_norm + 1e-6))
            if coefficient < 1:
                torch._foreach_mul_(grads, coefficient)
        return True

    def _norm(self, grads: list[Tensor]) -> float:
        """Squares summed in float64, rounded once: the fp32 norm of a vector depends on how it is cut."""
        real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in real]
        return torch.stack(squares).sum().sqrt().item() if squares else 0.0

    def _optimizer_or_error(self, closure: Any) -> torch.optim.Optimizer:
        if closure is not None:
            raise TypeError(
                "step() takes no closure: an optimizer that evaluates the loss several times (LBFGS) would do so differently "
                "on each rank. Call backward() yourself, then step()"
            )
        if self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} was built without an optimizer: give it one, {type(self).__name__}(model, optimizer), "
                "or call sync_gradients() and then your own optimizer's step()"
            )
        _check_groups([param for param, _ in self._known.values()], self.optimizer)
        return self.optimizer

    # --- state --------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return 1.0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dict, under its own names: as if it had never been wrapped."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict. Call it on every rank; rank 0's values win.

        ValueError with assign=True, which would replace the parameters that the engine holds.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the wrapped parameters: leave assign=False")
        result = self.module.load_state_dict(state_dict, strict=strict)
        self._follow_rank_0()
        return result

    def _follow_rank_0(self) -> None:
        """Weights and buffers become rank 0's, in portions of at most 25 MiB."""
        portion: list[Tensor] = []
        size = 0
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if size + tensor.nbytes > 25 * 2**20 and portion:
                comm.broadcast(portion, self.group, "start")
                portion, size = [], 0
            portion.append(tensor)
            size += tensor.nbytes
        comm.broadcast(portion, self.group, "start")

    def optimizer_state_dict(self) -> dict[str, Any]:
        """{"state": {name: {…}}, "param_groups": [{…, "params": [names]}]}: the optimizer's state dict, with the
        parameters' names where PyTorch counts them; the form of torch.distributed.checkpoint.state_dict."""
        optimizer = self._optimizer_or_error(None)
        plain = optimizer.state_dict()
        names = dict(enumerate(self._optimizer_names()))
        return {
            "state": {names[index]: dict(state) for index, state in plain["state"].items()},
            "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in plain["param_groups"]],
        }

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what optimizer_state_dict() gave, on every rank. ValueError if the parameters or their groups differ."""
        optimizer = self._optimizer_or_error(None)
        index = {name: i for i, name in enumerate(self._optimizer_names())}
        if any(not isinstance(name, str) for group in state_dict["param_groups"] for name in group["params"]):
            raise ValueError(
                "the optimizer state counts its parameters, as optimizer.state_dict() does; this takes their names, as "
                "engine.optimizer_state_dict() and torch.distributed.checkpoint.state_dict give them"
            )
        saved = [set(group["params"]) for group in state_dict["param_groups"]]
        here = [{self._name(p) for p in group["params"]} for group in optimizer.param_groups]
        if saved != here:
            differing = sorted(set().union(*saved) ^ set().union(*here)) or "the division into groups"
            raise ValueError(f"the optimizer state is for other parameters than this optimizer's: {differing}")
        optimizer.load_state_dict(
            {
                "state": {index[name]: copy.deepcopy(state) for name, state in state_dict["state"].items()},
                "param_groups": [
                    {**group, "params": [index[self._name(p)] for p in own["params"]]}
                    for group, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
                ],
            }
        )

    def _optimizer_names(self) -> list[str]:
        return [self._name(param) for group in self.optimizer.param_groups for param in group["params"]]

    def _name(self, param: Tensor) -> str:
        return next(name for name, (known, _) in self._known.items() if known is param)

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


def _inside_backward() -> bool:
    """Whether autograd is running: then a forward is checkpointing's second one, and no new batch begins."""
    return torch._C._current_graph_task_id() != -1


def _form(param: Tensor) -> tuple:
    return param.requires_grad, param.shape, param.dtype, param.device


def _tell(form: tuple) -> str:
    return f"{str(form[2]).removeprefix('torch.')} {list(form[1])} on {form[3]}"


def _check_arguments(module: Any, optimizer: Any, clip_norm: Any) -> None:
    if isinstance(module, Engine):
        raise TypeError(f"the model is already wrapped by {type(module).__name__}: wrap its .module once")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module; got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, Engine):
            raise TypeError(f"{name!r} inside the model is already wrapped by {type(part).__name__}: wrap the whole model, once")
    for engine in _engines:
        hooked = set(engine._trainable)
        for name, param in module.named_parameters():
            if param in hooked:
                raise ValueError(
                    f"parameter {name!r} is already wrapped by a {type(engine).__name__} that is still alive: both would reduce "
                    "its gradient. Delete that engine first, or build a new model"
                )
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy module): run one forward before wrapping")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name!r} is sparse or quantised, and cannot be sent to the other ranks: make it a dense tensor")
    if clip_norm is not None and (isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0):
        raise ValueError(f"clip_norm must be a positive number (math.inf measures without clipping); got {clip_norm!r}")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the optimizer must be a torch.optim.Optimizer built over model.parameters(); got {optimizer!r:.80}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that evaluates the loss several times, which ranks would do differently: "
            "take an optimizer that makes its step from the gradients alone"
        )
    _check_groups(module.parameters(), optimizer)


def _check_groups(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    own = set(params)
    for number, param_group in enumerate(optimizer.param_groups):
        strange = [param for param in param_group["params"] if param not in own]
        if strange:
            raise ValueError(
                f"the optimizer's group {number} holds {len(strange)} tensor(s) that are no parameters of this model, "
                f"first of shape {list(strange[0].shape)}: they would train on this rank alone. Build the optimizer over "
                "model.parameters(), after the last change"
            )


def _check_same_model(module: nn.Module, group: comm.Group) -> None:
    """ValueError, on every rank, if the ranks hold different models."""
    forms = {f"parameter {name!r}": _description(tensor) for name, tensor in module.named_parameters()}
    forms |= {f"buffer {name!r}": _description(tensor) for name, tensor in module.named_buffers()}
    all_forms = comm.gather_objects(forms, group)
    for rank, theirs in enumerate(all_forms):
        names = [*all_forms[0], *(name for name in theirs if name not in all_forms[0])]
        for name in names:
            first, other = all_forms[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise ValueError(f"the ranks hold different models: {name} is {first} on rank 0, {other} on rank {rank}")
        if list(theirs) != list(all_forms[0]):
            raise ValueError(f"the ranks hold different models: rank {rank} registers its parameters in another order")


def _description(tensor: Tensor) -> str:
    strided = "" if tensor.is_contiguous() else f" strided {list(flat.strides(tensor))}"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " (frozen)"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strided}{frozen}"
