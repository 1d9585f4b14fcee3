"""An ordinary optimizer that updates pieces of parameters: who may be cut, and how its state is cut and put together again."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minizero.parts import comm, flat, kinds
from minizero.parts.flat import FlatShard

# Each element of a weight is updated from that element's gradient and state alone, so a vector may be cut anywhere.
ELEMENTWISE = {getattr(torch.optim, name) for name in (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)}  # fmt: skip

# State of one number for the whole parameter, which looks like an element where the parameter has no dimension.
_SCALARS = ("step", "eta", "mu", "mu_product")


def check_elementwise(optimizer_class: type[Optimizer], settings: dict[str, Any]) -> None:
    """ValueError unless an optimizer of this class does the same to a tensor that is cut in two as to the whole."""
    if optimizer_class in ELEMENTWISE:
        return
    known = inspect.signature(optimizer_class).parameters
    settings = {name: value for name, value in settings.items() if name in known}
    if "lr" in settings:
        settings["lr"] = 0.1  # large enough to see what it does
    start, half = torch.linspace(-1, 1, 24), 10
    whole, first, second = start.view(4, 6).clone(), start[:half].clone(), start[half:].clone()
    try:
        optimizers = [optimizer_class([tensor.requires_grad_()], **settings) for tensor in (whole, first, second)]
        for step in range(3):
            grad = torch.sin(torch.arange(24.0) + step)
            whole.grad, first.grad, second.grad = grad.view(4, 6).clone(), grad[:half].clone(), grad[half:].clone()
            for optimizer in optimizers:
                optimizer.step()
    except Exception as error:
        raise ValueError(
            f"{optimizer_class.__name__} cannot be sharded: tried on a tensor that is cut in two, it raised "
            f"{type(error).__name__}: {error}. Take an optimizer that treats each element by itself, such as Adam or SGD, or DDP"
        ) from error
    if not torch.allclose(whole.flatten(), torch.cat([first, second]), rtol=1e-5, atol=1e-7):
        raise ValueError(
            f"{optimizer_class.__name__} cannot be sharded: what it does to an element depends on others, and a rank sees only "
            "its shard. Take an optimizer that treats each element by itself, such as Adam or SGD, or DDP"
        )


def repoint(optimizer: Optimizer, weights: Sequence[FlatShard]) -> list[list[nn.Parameter]]:
    """Make the optimizer update this rank's pieces in place of the parameters. Groups keep their number and order, and state
    that is there is cut as well. Returns the parameters of each group."""
    shard_of = {param: shard for shard in weights for param in shard.pieces}
    before = [list(group["params"]) for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [shard_of[param].pieces[param] for param in params if param in shard_of]
        for param in params:
            state = optimizer.state.pop(param, None)
            if state and param in shard_of:
                optimizer.state[shard_of[param].pieces[param]] = cut_state(shard_of[param], param, state)
    return before


def cut_state(shard: FlatShard, param: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state, of which its piece on this rank needs a part."""
    return {
        key: shard.own(param, value).clone() if one_for_each_element(key, value, param) else copy.deepcopy(value)
        for key, value in state.items()
    }


def step_by(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """A step of the optimizer, with all that belongs to it (hooks, what a scheduler counts), in which `update` does the work: it is
    called behind all other hooks, and then no gradient is left to be applied."""

    def instead(*_: Any) -> None:
        update()
        for group in optimizer.param_groups:
            for piece in group["params"]:
                piece.grad = None

    handle = optimizer.register_step_pre_hook(instead)
    try:
        optimizer.step()
    finally:
        handle.remove()


def update(part: Optimizer) -> None:
    """What a step of it computes, without its hooks."""
    step = type(part).step
    getattr(step, "__wrapped__", step)(part)


def part_of(optimizer: Optimizer, shard: FlatShard, keep: bool = False) -> Optimizer:
    """An optimizer like this one for the shard's pieces alone: with the gradients and the settings that they have now, and the same
    state. With `keep`, what is set, cleared or written to elsewhere later does not reach it."""
    part = copy.copy(optimizer)
    part.state, part.param_groups = defaultdict(dict), []
    own = {id(piece) for piece in shard.pieces.values()}
    for group in optimizer.param_groups:
        stands = []
        for piece in group["params"]:
            if id(piece) in own and piece.grad is not None:
                stands.append(piece.detach().requires_grad_())
                ours = not keep or kinds.kind_of(piece.grad) == "host"  # and nobody else writes to it
                stands[-1].grad = piece.grad if ours else piece.grad.clone()
                part.state[stands[-1]] = optimizer.state[piece]
        settings = {key: value.clone() if keep and isinstance(value, Tensor) else value for key, value in group.items()}
        part.param_groups.append({**settings, "params": stands})
    return part


def gather_state(optimizer: Optimizer, weights: Sequence[FlatShard], group: comm.Group) -> dict[nn.Parameter, dict[str, Any]]:
    """Each parameter's whole state, on every rank. A call of all ranks."""
    return {param: state for shard in weights for param, state in _gather(optimizer, shard, group).items()}


def _gather(optimizer: Optimizer, shard: FlatShard, group: comm.Group) -> dict[nn.Parameter, dict[str, Any]]:
    """Whole values come from the first rank that has them; what was cut travels as one flat buffer for each kind of state."""
    own = {param: optimizer.state.get(piece, {}) for param, piece in shard.pieces.items()}
    if shard.layout.world_size == 1:
        return {param: copy.deepcopy(state) for param, state in own.items() if state}
    told: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(shard.params):
        for key, value in own.get(param, {}).items():
            is_cut = one_for_each_element(key, value, shard.pieces[param])
            told.setdefault(index, {})[key] = _Cut(value.dtype) if is_cut else value
    merged: dict[int, dict[str, Any]] = {}
    for theirs in comm.gather_objects(told, group):
        for index, state in theirs.items():
            merged[index] = {**state, **merged.get(index, {})}
    for key, kind in dict.fromkeys((key, value) for s in merged.values() for key, value in s.items() if isinstance(value, _Cut)):
        shard_S = torch.zeros(shard.layout.S, dtype=kind.dtype, device=shard.device)
        for param, view in shard.cut(shard_S).items():
            if key in own[param]:
                view.copy_(own[param][key])
        full_P = torch.empty(shard.layout.P, dtype=kind.dtype, device=shard.device)
        comm.all_gather(full_P, shard_S, group, "state").wait()
        for index, view in enumerate(flat.views(full_P, shard.layout)):
            if index in merged and merged[index].get(key) == kind:
                merged[index][key] = view.clone(memory_format=torch.contiguous_format)
    return {shard.params[index]: copy.deepcopy(state) for index, state in merged.items()}


@dataclass(frozen=True)
class _Cut:
    """In place of a state's values: they are cut, and of this dtype."""

    dtype: torch.dtype


def one_for_each_element(key: str, value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and key not in _SCALARS
