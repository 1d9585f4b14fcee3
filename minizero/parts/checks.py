"""What can be wrong with a model, an optimizer or a setting, found before anything trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minizero.parts import comm, flat, freed


def form(param: Tensor) -> tuple:
    """What may not change about a parameter after the model was wrapped."""
    return param.requires_grad, param.shape, param.dtype, param.device


def tell(form: tuple) -> str:
    """A form in words."""
    return f"{str(form[2]).removeprefix('torch.')} {list(form[1])} on {form[3]}"


def check_arguments(module: Any, optimizer: Any, clip_norm: Any, engine_type: type, engines: Iterable) -> None:
    """TypeError or ValueError for what no engine can train. `engines`: those that have hooks on their parameters."""
    if isinstance(module, engine_type):
        raise TypeError(f"the model is already wrapped by {type(module).__name__}: wrap its .module once")
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module; got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, engine_type):
            raise TypeError(f"{name!r} inside the model is already wrapped by {type(part).__name__}: wrap the whole model, once")
    for engine in engines:
        hooked = set(engine._bucket_of)
        for name, param in module.named_parameters():
            if param in hooked:
                raise ValueError(
                    f"parameter {name!r} is already wrapped by a {type(engine).__name__} that is still alive: both would reduce "
                    "its gradient. Delete that engine first, or build a new model"
                )
    for name, param in module.named_parameters():
        if freed.is_freed(param):
            raise ValueError(
                f"parameter {name!r} is sharded by another engine, or was by one that is gone, and its weights with it: build the model "
                "anew, and load the state_dict() that the engine has given"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy module): run one forward before wrapping")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{name!r} is sparse, quantised, expanded or a conjugate view, and cannot be sent to the other ranks as it lies: "
                "make it a tensor with memory of its own, by to_dense(), dequantize() or clone()"
            )
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
    check_groups(set(module.parameters()), optimizer)


def check_memory(module: nn.Module) -> None:
    """ValueError if a parameter shares elements with another one or with a buffer, without being the same object."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.storage_offset() * tensor.element_size()
            end = start + extent * tensor.element_size()
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, name))
    parameters = dict(module.named_parameters())
    for places in spans.values():
        places.sort()
        for (_, end, first), (start, _, second) in zip(places, places[1:], strict=False):
            if start < end and (first in parameters or second in parameters):
                raise ValueError(
                    f"{first!r} and {second!r} share memory, and would not any more once the weights are sharded. To tie two "
                    "parameters make them one object (b.weight = a.weight); a buffer needs memory of its own: clone() it"
                )


def check_groups(own: set[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """ValueError if the optimizer updates a tensor that is not the engine's."""
    for number, param_group in enumerate(optimizer.param_groups):
        strange = [param for param in param_group["params"] if param not in own]
        if strange:
            raise ValueError(
                f"the optimizer's group {number} holds {len(strange)} tensor(s) that are no parameters of this model, "
                f"first of shape {list(strange[0].shape)}: they would train on this rank alone. Build the optimizer over "
                "model.parameters(), after the last change"
            )


def check_same_model(module: nn.Module, group: comm.Group) -> None:
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
