"""Tensors whose memory has been given back. They keep their shape, dtype and device, and hold nothing.

    gradient = FreedGradient(param, "'head.weight'")      # stands in a parameter's .grad when the bucket is reduced
    free(param, "'head.weight'", stand_in(param), ask)    # the parameter itself: the same object
    restore(param, data)

To use one is an error that says where the elements are. Without that, the sum of a tensor whose storage is gone ends the
process, and that of a stand-in is a number that means nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from minizero.parts import kinds

# What may be asked of a freed tensor: all that is not about its elements.
_ALLOWED = {
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "nbytes", "element_size", "itemsize", "stride", "__len__",
    "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_complex", "is_floating_point",
    "is_conj", "is_neg", "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "retains_grad", "_version", "output_nr",
    "register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks", "__hash__",
    "untyped_storage", "storage_offset", "names", "has_names", "__dir__",
}
_IN_WORDS = ("__repr__", "__str__", "__format__")  # fmt: skip


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element: NaN, so that a way round the refusal still shows."""
    filler = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return kinds.tag(torch.full((), filler, dtype=dtype, device=device), "other")


_for_all = functools.cache(_nothing)  # one for all freed tensors of a kind; but a fake tensor belongs to its mode


def stand_in(like: Tensor) -> Tensor:
    """A tensor of this shape, dtype and device that is one element in memory, whatever the shape."""
    return (_nothing if isinstance(like, FakeTensor) else _for_all)(like.dtype, like.device).expand(like.shape)


def pretends(tensor: Tensor) -> bool:
    """Whether it has a shape and no elements at all."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def unguarded() -> AbstractContextManager:
    """Inside, a freed tensor refuses nothing: for code that asks often and not for elements, which is then ten times as fast."""
    return torch._C.DisableTorchFunctionSubclass()


def _name(function: Callable) -> str:
    """Of a property torch gives its getter or setter, whose owner has the name."""
    return getattr(getattr(function, "__self__", None), "__name__", None) or getattr(function, "__name__", str(function))


def _answer(function: Callable, args: tuple, kwargs: dict | None) -> Any:
    """What does not need the elements."""
    if _name(function) == "untyped_storage":
        return torch.UntypedStorage(0, device=_answer(Tensor.device.__get__, args, None))
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


# --- gradients ------------------------------------------------------------------------------------


class FreedGradient(Tensor):
    """A parameter's .grad when this rank keeps only its shard of it.

    It may be replaced or cleared, as any .grad may; set to zeros, it says so in `zeroed`.
    """

    label: str
    zeroed: bool

    @staticmethod
    def __new__(cls, param: Tensor, label: str) -> FreedGradient:
        gradient = stand_in(param)
        if not isinstance(gradient, FakeTensor):  # which holds nothing anyway
            gradient = Tensor._make_subclass(cls, gradient)
        gradient.label, gradient.zeroed = label, False
        return gradient

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = _name(func)
        if name == "zero_" and isinstance(args[0], FreedGradient):
            args[0].zeroed = True
            return args[0]
        if name in _ALLOWED or name == "detach_":
            return _answer(func, args, kwargs)
        freed = _first(cls, args, kwargs)
        if name in _IN_WORDS:
            return f"<gradient of parameter {freed.label}, {list(freed.shape)}: reduced, and freed but for this rank's shard>"
        raise RuntimeError(
            f"the gradient of parameter {freed.label} has been reduced and freed: this rank keeps only its shard of the mean. "
            "See .grad of the tensors in optimizer.param_groups, after sync_gradients(); to clip, give the engine a clip_norm"
        )


# --- parameters -----------------------------------------------------------------------------------


def free(param: nn.Parameter, label: str, nothing: Tensor, ask: Callable[[], bool] = lambda: False) -> None:
    """Let go of the parameter's elements, for a stand-in. It's the same object, so ties, hooks and optimizer groups stay.

    ask: called before a use is refused. If it restores the parameter and says so, the use goes on.
    """
    if not is_freed(param):
        param.data = nothing
        param.__class__ = _freed_class(type(param))
    param._freed_label, param._freed_ask = label, ask


def restore(param: nn.Parameter, data: Tensor) -> None:
    """Give the parameter elements again. Autograd takes it for the value that it was."""
    if is_freed(param):
        param.__class__ = type(param).__bases__[1]
        del param._freed_label, param._freed_ask
    param.data = data


def is_freed(param: Tensor) -> bool:
    return issubclass(type(param), _FreedParameter)


class _FreedParameter:
    """What a parameter's class is mixed with while it is freed."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = _name(func)
        if name in _ALLOWED:
            return _answer(func, args, kwargs)
        freed = _first(_FreedParameter, args, kwargs)
        if name in _IN_WORDS:
            return f"<parameter {freed._freed_label}, {list(freed.shape)}: freed>"
        if freed._freed_ask():
            return func(*args, **(kwargs or {}))
        _refuse(freed)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)


def _refuse(param: Any) -> NoReturn:
    raise RuntimeError(
        f"parameter {param._freed_label} is freed: outside its unit's forward and backward each rank holds only its shard. "
        "Read it inside `with engine.gathered():`, a call of all ranks; call modules, not their weights; and for a copy or a "
        "file take engine.state_dict()"
    )


@functools.cache
def _freed_class(original: type) -> type:
    return type(f"Freed{original.__name__}", (_FreedParameter, original), {})


def _first(kind: type, args: Any, kwargs: dict | None) -> Any:
    """The freed tensor among the arguments."""
    waiting = [*args, *(kwargs or {}).values()]
    while waiting:
        value = waiting.pop(0)
        if issubclass(type(value), kind):
            return value
        if isinstance(value, (list, tuple)):
            waiting[:0] = value
        elif isinstance(value, dict):
            waiting[:0] = value.values()
    raise AssertionError("torch asked for no reason")
