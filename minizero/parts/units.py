"""Units: parts of a model whose weights come and go together, and the four moments at which they do.

    enter_forward     before the unit's module runs            leave_forward     when it has run, or raised
    enter_backward    before autograd comes to its operations  leave_backward    when autograd has come past them

The forward's moments are module hooks. The backward has none of its own, and is found like this: every operation that
autograd records gets the next sequence number, and backward goes through them from the highest to the lowest. So a call of
a unit is entered when a gradient of one of its outputs is ready, or one of its weights is asked for; and it is over when
autograd has come to a number below the one at which the call began. No matter what the call returned, or what else
happens in between: a second use of the unit, another unit inside it, a second forward by activation checkpointing.

What autograd saves for backward must not keep the weights alive. Of a gathered weight it gets a note instead (which
weight, which view of it), and when it asks for it, the unit is entered.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minizero.parts import comm, spans
from minizero.parts.bucket import Bucket
from minizero.parts.flat import UnitShard

ROOT = "root"


# --- which ------------------------------------------------------------------------------------------


class Unit:
    """A module, the parameters that come and go with it, and their shards."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.params: list[nn.Parameter] = []
        self.shards: list[UnitShard] = []
        self.buckets: list[Bucket] = []  # of those shards that are trained
        self.pinned = 0  # contexts in which it is to be read
        self.coming: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose backward is still to come, if their graph lives

    def __repr__(self) -> str:
        return f"Unit({self.name})"

    @property
    def resident(self) -> bool:
        """Its full weights have memory."""
        return any(shard.resident for shard in self.shards)

    def kinds(self) -> list[list[nn.Parameter]]:
        """Its parameters, divided into those that can share a flat buffer."""
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for param in self.params:
            kinds.setdefault((param.requires_grad, param.dtype, param.device), []).append(param)
        return list(kinds.values())

    def show(self) -> None:
        """Its parameters are the full weights, which may still be on their way."""
        for shard in self.shards:
            shard.show()
            _gathered[shard.full_P.untyped_storage()._cdata] = shard

    def arrived(self) -> None:
        """The full weights are there."""
        for shard in self.shards:
            shard.arrived = True

    def adopt(self) -> None:
        """Take over what was written to its full weights."""
        for shard in self.shards:
            shard.adopt()

    def free(self) -> None:
        """Give its full weights back."""
        for shard in self.shards:
            if shard.resident:
                _gathered.pop(shard.full_P.untyped_storage()._cdata, None)
                shard.free()
                spans.moment("free", self.name)


_gathered: weakref.WeakValueDictionary[int, UnitShard] = weakref.WeakValueDictionary()  # by storage


def units_of(module: nn.Module, choice: Iterable[type[nn.Module] | nn.Module] | None) -> list[Unit]:
    """The module's units that have parameters, the root first.

    choice: the modules, or classes of modules, that are units. By default the children of the outermost ModuleLists and
    Sequentials; of a child that is only a container, its children.

    A parameter belongs to the lowest unit that contains all its uses. TypeError or ValueError for what can be no unit.
    """
    chosen = _by_default(module) if choice is None else _chosen(module, choice)
    paths: dict[nn.Module, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(path)
    units = [Unit(paths[part][0] or ROOT, part) for part in paths if part is module or part in chosen]
    uses: dict[nn.Parameter, list[str]] = {}
    for part, places in paths.items():
        for param in part.parameters(recurse=False):
            uses.setdefault(param, []).extend(places)
    for param, places in uses.items():
        _lowest(units, paths, places).params.append(param)
    return [unit for unit in units if unit.params]


def not_equal(units: Sequence[Unit], group: comm.Group) -> Unit | None:
    """The first of the gathered units whose full weights are not the same on all ranks of the group, to which all belong.

    RuntimeError if the ranks have not gathered the same ones.
    """
    shards = [(unit, shard) for unit in units for shard in unit.shards]
    if not shards:
        return None
    names = float(zlib.crc32(repr(units).encode()))
    _, (names, *by_rank) = comm.agree([], [names, *(shard.checksum() for _, shard in shards)], group, shards[0][1].device)
    if len(set(names)) > 1:
        raise RuntimeError(
            "the ranks have called gathered() for different modules, and read mixtures of them: nothing of what they wrote was taken over. "
            "It is a call of all ranks, for the same modules in the same order"
        )
    return next((unit for (unit, _), numbers in zip(shards, by_rank, strict=True) if len(set(numbers)) > 1), None)


def _by_default(module: nn.Module) -> set[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return {unit for child in module.children() for unit in _callable(child)}
    return {unit for child in module.children() for unit in _by_default(child)}


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """The module, if it can be called; of a container that cannot, its children."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _callable(child)


def _chosen(module: nn.Module, choice: Any) -> set[nn.Module]:
    if isinstance(choice, (nn.Module, type, str)) or not isinstance(choice, Iterable):
        raise TypeError(f"units must be a list of modules or of module classes; got {choice!r:.80}")
    parts = {part: name for name, part in module.named_modules()}
    chosen = set()
    for each in choice:
        if isinstance(each, type) and issubclass(each, nn.Module):
            found = {part for part in parts if isinstance(part, each)}
            if not found:
                raise ValueError(f"units: the model has no module of class {each.__name__}")
        elif isinstance(each, nn.Module):
            if each not in parts:
                raise ValueError(f"units: a {type(each).__name__} that is given is no part of the model")
            found = {each}
        else:
            raise TypeError(f"units must be a list of modules or of module classes; among them is {each!r:.80}")
        for part in found:
            if type(part).forward is nn.Module.forward and part is not module:
                raise ValueError(
                    f"units: {parts[part]!r} is a {type(part).__name__}, which is never called itself, so there is no moment to "
                    "gather it: choose the modules in it"
                )
        chosen |= found
    return chosen


def _lowest(units: Sequence[Unit], paths: dict[nn.Module, list[str]], places: Sequence[str]) -> Unit:
    """The lowest unit that contains all the places."""

    def depth(unit: Unit) -> int:
        """Of the unit's own path to the first place; -1 if it does not contain them all."""
        around = [[path for path in paths[unit.module] if f"{place}.".startswith(f"{path}." if path else "")] for place in places]
        return max(map(len, around[0])) if all(around) else -1

    return max(units, key=depth)  # the first of equals: a root that has no path, before a unit that has none of them


class Order:
    """The gathers and reductions that this rank has issued since the last step. All ranks must issue them in one order: a rank
    that runs another unit gets its weights.

    of_phase    the units that the last forward has gathered, and the last backward, where somebody wants to know
    agreed      whether all ranks had the same of_phase when they compared
    parted      they had not even the same order: no step before all is cleared
    """

    def __init__(self, group: comm.Group):
        self._group = group
        self.agreed = False
        self.clear()

    def clear(self) -> None:
        self._issued: deque[str] = deque(maxlen=10_000)  # the last ones
        self._count = self._fingerprint = 0  # of all
        self.of_phase: dict[Any, list[Unit]] = {}
        self.parted = False

    def note(self, what: str, unit: str) -> None:
        """what: "gathered" or "reduced" """
        self._issued.append(f"{what} {unit}")
        self._count += 1
        self._fingerprint = zlib.crc32(self._issued[-1].encode(), self._fingerprint)

    def fingerprints(self) -> list[float]:
        """Of the order, and of the orders of its phases: numbers that are others for other orders."""
        return [float(self._fingerprint), float(zlib.crc32(repr(self.of_phase).encode()))]

    def compare(self, orders: Sequence[float], phases: Sequence[float]) -> None:
        """RuntimeError, on every rank, unless all ranks have the same order: it says where their orders part."""
        self.agreed = len(set(phases)) == 1
        if len(set(orders)) == 1:
            return
        self.parted = True
        issued = comm.gather_objects((self._count, list(self._issued)), self._group)
        rank = next((r for r, theirs in enumerate(issued) if theirs != issued[0]), 0)
        (count, first), (_, other) = issued[0], issued[rank]
        places = enumerate(zip_longest(first, other, fillvalue="nothing more"), count - len(first))
        where = next((f"at place {i} rank 0 has {a}, rank {rank} {b}" for i, (a, b) in places if a != b), "long ago")
        raise RuntimeError(
            f"the ranks have run their units in different orders since the last step: {where}. They have computed with each other's "
            "weights or gradients, and nothing was updated. Clear the gradients, and let every rank run the same units, each with a "
            "result of its own that the loss depends on; or take Zero2"
        )


# --- when -------------------------------------------------------------------------------------------


class Listener(Protocol):
    def _enter_forward(self, unit: Unit) -> None: ...
    def _leave_forward(self, unit: Unit) -> None: ...
    def _enter_backward(self, unit: Unit) -> None: ...
    def _leave_backward(self, unit: Unit) -> None: ...
    def _at_rest(self) -> None: ...
    def _complete(self, unit: Unit) -> bool: ...


class Call:
    """One run of a unit's module, inside the `outer` one and in the model's n-th `forward`. Operations recorded in it have sequence
    numbers from `start` on."""

    __slots__ = ("__weakref__", "depth", "forward", "hooks", "outer", "span", "start", "task", "unit")

    def __init__(self, unit: Unit, start: int, forward: int, outer: Call | None = None):
        self.unit, self.start, self.forward, self.outer = unit, start, forward, outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.task = -1  # the backward in which autograd has come to it
        self.hooks: saved_tensors_hooks | None = None
        self.span: spans.Span | None = None  # of its forward, then of its backward


def _begun(call: Call) -> tuple[int, int]:
    """When: calls in the order in which they began."""
    return call.start, call.depth


class Watch:
    """Tells a listener when units are entered and left. Keeps neither it nor the model alive by its hooks."""

    def __init__(self, units: Sequence[Unit], listener: Listener):
        self._units = units
        self._listener = weakref.ref(listener)
        self._running: list[Call] = []  # forwards, the innermost last
        self._entered: list[Call] = []  # calls whose backward has begun
        self._forward = 0
        for unit in units:
            for shard in unit.shards:
                shard.ask = functools.partial(_asked, weakref.ref(self), weakref.ref(unit))
            for handle in (
                unit.module.register_forward_pre_hook(_Hook(self, unit, "_before"), with_kwargs=True),
                unit.module.register_forward_hook(_Hook(self, unit, "_after"), with_kwargs=True, always_call=True),
            ):
                weakref.finalize(listener, handle.remove)

    def needs(self, unit: Unit) -> bool:
        """Whether the unit's weights are in use."""
        return unit.pinned > 0 or any(call.unit is unit for call in (*self._running, *self._entered))

    # --- forward ----------------------------------------------------------------------------------

    def _before(self, unit: Unit, *_: Any) -> None:
        call = Call(unit, torch._C._autograd._get_sequence_nr(), self._forward, self._running[-1] if self._running else None)
        recomputing = torch.is_grad_enabled() and _task() != -1
        self._running.append(call)
        if recomputing:  # by checkpointing, for a backward that is about to need it: over when autograd comes past this point
            call.start = _position()
            self._enter(call)
        else:
            if torch.is_grad_enabled() and len(self._running) == 1:
                call.hooks = self.saving()
                call.hooks.__enter__()
            self._listener()._enter_forward(unit)
            call.span = spans.begin("forward", unit.name)

    def _after(self, unit: Unit, args: tuple, kwargs: dict, output: Any) -> None:
        """Also if the forward raised, or the hook before it: then there is no output."""
        if not self._running or self._running[-1].unit is not unit:
            return
        call = self._running.pop()
        spans.end(call.span)
        if call.hooks is not None:
            call.hooks.__exit__()
        if torch.is_grad_enabled():
            self._await(call, output)
        if not self.needs(unit):
            self._listener()._leave_forward(unit)

    def _await(self, call: Call, output: Any) -> None:
        """Hear of the gradient of each tensor in the output."""
        me = weakref.ref(self)

        def hear(_: Tensor) -> None:
            if (watch := me()) is not None:
                watch._enter(call)

        for tensor in _tensors(output, set()):
            if tensor.grad_fn is not None:
                tensor.register_hook(hear)
                call.unit.coming.add(call)

    # --- backward ---------------------------------------------------------------------------------

    def _enter(self, call: Call, here: int | None = None) -> None:
        """Autograd has come to the call, being at operation `here`."""
        here, task = _position() if here is None else here, _task()
        self._leave([other for other in self._entered if task in (-1, other.task) and other.start > here and other is not call])
        call.unit.coming.discard(call)
        if call in self._entered:
            return
        if call.outer is not None:
            self._enter(call.outer, here)
        if task != -1 and all(other.task != task for other in self._entered):
            me = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: me() is not None and me().end(task))
        call.task = task
        self._entered.append(call)
        self._listener()._enter_backward(call.unit)
        call.span = spans.begin("backward", call.unit.name)

    def recompute(self, unit: Unit) -> bool:
        """A freed weight is used. Checkpointing runs a part of a forward again when backward needs it, and if the part isn't a
        module nobody tells us that it begins: so its unit is entered now."""
        if not torch.is_grad_enabled() or _task() == -1:
            return False
        here = _position()
        calls = [call for call in unit.coming if call.start <= here]
        self._enter(max(calls, key=_begun) if calls else Call(unit, here, self._forward))
        return all(shard.arrived for shard in unit.shards)

    def go_on(self) -> None:
        """The backward has raised. Go through what is left without autograd, for the other ranks wait for this one's part."""
        for call in sorted({call for unit in self._units for call in unit.coming}, key=_begun, reverse=True):
            self._enter(call, here=call.start)

    def _leave(self, calls: Sequence[Call]) -> None:
        """These calls are over. The one that began last is the first."""
        self._entered = [call for call in self._entered if call not in calls]
        calls = sorted(calls, key=_begun, reverse=True)
        for call in calls:
            spans.end(call.span)
        units = dict.fromkeys(call.unit for call in calls)
        for unit in units:
            if any(call.unit is unit for call in self._entered):
                continue
            if not self._comes_again(unit, {call.forward for call in (*calls, *self._entered)}):
                self._listener()._leave_backward(unit)
            elif not self.needs(unit):
                self._listener()._leave_forward(unit)

    def _comes_again(self, unit: Unit, forwards: set[int]) -> bool:
        """An earlier use of the unit is to come in this backward, of one of these forwards or of another one with it: its gradients are
        not complete. A graph that somebody has only kept is not meant, for another rank may have none."""
        coming = {call.forward for call in unit.coming}
        return bool(coming & forwards or (coming and not self._listener()._complete(unit)))

    def end(self, task: int | None = None) -> None:
        """A backward has ended; without `task`, whatever there is."""
        if self._entered:
            self._leave([call for call in self._entered if task in (None, call.task)])
            if not self._entered:
                self._listener()._at_rest()

    def reset(self) -> None:
        """A new forward begins, or a step. Forget what an interrupt may have left behind: nothing is in use."""
        self._forward += 1
        while self._running:
            call = self._running.pop()
            spans.end(call.span)
            if call.hooks is not None:
                call.hooks.__exit__()
            self._listener()._leave_forward(call.unit)
        self.end()

    # --- what autograd saves ------------------------------------------------------------------------

    def saving(self) -> saved_tensors_hooks:
        """A context in which autograd saves notes instead of gathered weights."""
        me = weakref.ref(self)

        def pack(tensor: Tensor) -> Any:
            shard = _gathered.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
            if shard is None or tensor.dtype is not shard.full_P.dtype or tensor.is_conj() or tensor.is_neg():
                return tensor.detach(), tensor._version
            watch = me()
            call = next((call for call in reversed(watch._running) if shard in call.unit.shards), None)
            return _Note(shard, call, tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, _Note):
                return saved.read(me())
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"{list(tensor.shape)} of {tensor.dtype}, saved at version {version}, is at version {tensor._version} now"
                )
            return tensor

        return saved_tensors_hooks(pack, unpack)


class _Note:
    """In place of a gathered weight, or a view of it: where it lies."""

    def __init__(self, shard: UnitShard, call: Call | None, tensor: Tensor):
        self.shard, self.call = shard, call
        self.place = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.index = max(bisect_right(shard.layout.offsets, tensor.storage_offset()) - 1, 0)
        self.version = shard.params[self.index]._version

    def read(self, watch: Watch | None) -> Tensor:
        """The weight, gathered if need be."""
        if watch is None:
            raise RuntimeError(f"parameter {self.shard.labels[self.index]} is freed, and its engine is gone")
        if self.shard.params[self.index]._version != self.version:
            raise RuntimeError(
                f"parameter {self.shard.labels[self.index]} has changed since the forward that this backward belongs to, by a step "
                "or in place: its gradient would be wrong. Run the forward again"
            )
        if not self.shard.arrived:
            if _task() == -1:
                raise RuntimeError(f"parameter {self.shard.labels[self.index]} is freed: it's gathered in backward only")
            watch._enter(self.call or Call(next(unit for unit in watch._units if self.shard in unit.shards), -1, watch._forward))
        return self.shard.full_P.as_strided(*self.place)


def _asked(watch: weakref.ref[Watch], unit: weakref.ref[Unit]) -> bool:
    """By a freed weight that is used."""
    there = watch(), unit()
    return None not in there and there[0]._listener() is not None and there[0].recompute(there[1])


class _Hook:
    """A module's hook. A copy of the module, deep or from a file, gets one that does nothing."""

    def __init__(self, watch: Watch, unit: Unit, method: str):
        self._watch, self._unit, self._method = weakref.ref(watch), weakref.ref(unit), method

    def __call__(self, module: nn.Module, *args: Any) -> None:
        watch, unit = self._watch(), self._unit()
        if watch is not None and watch._listener() is not None:
            getattr(watch, self._method)(unit, *args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Any:
    return _nothing


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _task() -> int:
    """Which backward is running; -1 for none."""
    return torch._C._current_graph_task_id()


def _position() -> int:
    """The sequence number of the operation at which autograd is."""
    node = torch._C._current_autograd_node()
    return sys.maxsize if node is None else node._sequence_nr()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a module's output, in whatever holds them."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner: Iterable = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        inner = getattr(value, "__dict__", {}).values()
    for each in list(inner):
        yield from _tensors(each, seen)
