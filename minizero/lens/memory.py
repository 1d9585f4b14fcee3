"""The memory meter: which bytes are alive, since when, and what for.

    with record_memory() as m:
        model(x).sum().backward()
        m.now["grads"]                   # bytes of gradients at this moment
    m.peak, m.peak_total                 # by kind and in all, at the moment of the largest total
    times, by_kind = m.curve()           # every change, for a plot

A storage counts once, however many tensors are views of it, from the moment it is noticed until it dies. All that
happens to storages goes into one log of (time, storage, bytes more or less); every answer is that log, added up.

    born       the results of every torch operation, seen by a TorchDispatchMode; at entry, and whenever an answer is
               asked for, all tensors that Python's garbage collector or an autograd graph holds
    resized    by an operation; or by untyped_storage().resize_, which is none: that method is wrapped meanwhile
    dead       told at once by a weak reference

A storage has one kind for its whole life, settled when the answer is read: a gradient is `grads` from the matrix
product that made it, although it became a parameter's .grad only later, and is none any more. What `tag` said
(parts/kinds.py) comes first. Then, the strongest first:

    params       an nn.Parameter
    grads        the .grad of a tensor, now or before
    optimizer    in a torch Optimizer's state; or optimized without being an nn.Parameter, as fp32 masters are
    other        a module's buffer; alive at entry; made from no tensor, as by torch.empty; a temporary of a step()
    activations  made from tensors by an operation: what forward computes, and what backward passes on

On a GPU, backward runs in autograd's own threads. They are seen as well: a dispatch mode belongs to one thread, but
the engine lends its threads the state of the one that called backward (`GraphTask::thread_locals_`, an
`at::ThreadLocalState`, which includes the modes). A thread that the program itself starts is not seen; its tensors
count once the recording thread uses them or an answer is asked for. Never seen: scratch memory inside one kernel or
one gloo call, and what an allocator keeps for later.

Watching has a price in memory: under any dispatch mode autograd sums gradients that meet at a fork out of place, so
one more activation is alive for that moment. It is there, and it is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from minizero.parts import kinds

STRONGEST_FIRST = ("params", "grads", "optimizer", "other", "activations")

# How autograd makes a first .grad: it takes the gradient, detached, or copies it where something else holds it too.
FIRST_GRAD = (torch.ops.aten.detach.default, torch.ops.aten.new_empty_strided.default)


@contextmanager
def record_memory() -> Iterator[Memory]:
    """Record the bytes of all tensors of this process, by kind. Recordings may be nested, and each sees everything.

    Keeps no tensor alive, and costs nothing outside the `with`. Inside, an operation takes some 10 µs longer, and the
    log grows by about 150 bytes for each storage that comes, goes or changes size.
    """
    memory = Memory()
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        memory._see(storage)
        return result

    with ExitStack() as stack:
        UntypedStorage.resize_ = resize_
        stack.callback(setattr, UntypedStorage, "resize_", resize)
        stack.callback(register_optimizer_step_pre_hook(memory._step_begins).remove)
        stack.callback(register_optimizer_step_post_hook(memory._step_ends).remove)
        stack.callback(memory._close)
        stack.enter_context(_Operations(memory))
        yield memory


def resident_set() -> int:
    """Bytes of this process that are in memory, whatever they are for: what the operating system counts. What was freed, and the
    allocator keeps for later, is given back first. Linux only: RuntimeError elsewhere."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"the resident set is read from /proc, which {sys.platform} does not have: run this on Linux")
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library has nothing to give back
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """What was recorded, in bytes: inside the `with` as of this moment, afterwards as of the exit.

    An answer inside the `with` looks at all objects of the process, which takes tens of milliseconds. `entry` is the moment, by
    `time.perf_counter()`, from which the times of `curve()` count: with it, moments noted by others stand on the same axis.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Life] = {}  # by id of the storage
        self._log: list[tuple[float, _Life, int]] = []
        self._stepping: set[int] = set()  # ids of the optimizers whose step() is running
        self._recording = True
        self._look_around()
        self.entry = time.perf_counter()

    # --- the answers: the log, added up ------------------------------------------------------------

    @property
    def now(self) -> dict[str, int]:
        """Bytes of each kind."""
        return {kind: int(curve[-1]) for kind, curve in self.curve()[1].items()}

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.now.values())

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each kind at the moment of the largest total, the first one if there are several."""
        curves = self.curve()[1]
        moment = sum(curves.values()).argmax()
        return {kind: int(curve[moment]) for kind, curve in curves.items()}

    @property
    def peak_total(self) -> int:
        """The largest total."""
        return sum(self.peak.values())

    def curve(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Times of all changes, in seconds since entry, and for each kind the bytes from each of them on."""
        if self._recording:
            self._look_around()
        log = list(self._log)
        times = np.array([self.entry, *(when for when, _, _ in log)]) - self.entry
        changes = np.array([0, *(change for _, _, change in log)])
        which = np.array(["other", *(life.label.kind or life.kind for _, life, _ in log)])
        times = times.clip(min=0)  # what was there at entry came at time 0 …
        last = np.append(times[1:] != times[:-1], True)  # … and is one moment
        return times[last], {kind: np.where(which == kind, changes, 0).cumsum()[last] for kind in kinds.KINDS}

    # --- the log -----------------------------------------------------------------------------------

    def _see(self, storage: UntypedStorage, kind: str = "other") -> _Life:
        """A storage is there: note it if it is new, of this kind, and note its size if that has changed."""
        life = self._live.get(id(storage))
        if life is None:
            life = self._live[id(storage)] = _Life(storage, self._dies)
            life.key, life.label, life.kind, life.nbytes = id(storage), kinds.label(storage), kind, 0
        self._write(life, storage.nbytes())
        return life

    def _see_as(self, tensor: Tensor, kind: str) -> None:
        """A tensor shows what it is. Of all that its storage is ever seen as, the strongest counts."""
        for storage in kinds.storages(tensor):
            life = self._see(storage)
            life.kind = min(life.kind, kind, key=STRONGEST_FIRST.index)

    def _dies(self, life: _Life) -> None:
        if self._live.pop(life.key, None):
            self._write(life, 0)

    def _write(self, life: _Life, nbytes: int) -> None:
        if nbytes != life.nbytes:
            self._log.append((time.perf_counter(), life, nbytes - life.nbytes))
            life.nbytes = nbytes

    def _close(self) -> None:
        self._look_around()
        self._recording = False
        self._live.clear()  # deaths are no longer noted

    # --- what there is to see ----------------------------------------------------------------------

    def _see_tensor(self, tensor: Tensor) -> None:
        for storage in kinds.storages(tensor):
            self._see(storage)
        if isinstance(tensor, nn.Parameter):
            self._see_as(tensor, "params")
        if tensor.is_leaf and tensor.grad is not None:
            self._see_as(tensor.grad, "grads")

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        # vars(), here and for modules: an object whose __init__ has failed is still around, without these attributes.
        for group in vars(optimizer).get("param_groups", ()):
            for tensor in group["params"]:
                self._see_tensor(tensor)
                self._see_as(tensor, "optimizer")  # weaker than "params", so this is for masters
        for tensor in _tensors(vars(optimizer).get("state", {})):
            self._see_as(tensor, "optimizer")

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping.add(id(optimizer))
        self._see_optimizer(optimizer)

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping.discard(id(optimizer))
        self._see_optimizer(optimizer)

    def _see_operation(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for tensor in inputs:  # they come first: what is new among them was made elsewhere
            self._see_tensor(tensor)
        node = torch._C._current_autograd_node()
        # A step() that raised seems to run still; a real one works outside backward and without grad mode.
        in_step = self._stepping and node is None and not torch.is_grad_enabled()
        for tensor in outputs:
            for storage in kinds.storages(tensor):
                self._see(storage, "activations" if inputs and not in_step else "other")
        if isinstance(node, torch._C._functions.AccumulateGrad):
            # Its hooks' operations come here as well, so an output is a gradient only where .grad is still missing.
            grads = [node.variable.grad] if node.variable.grad is not None else outputs if func in FIRST_GRAD else []
            for grad in grads:
                self._see_as(grad, "grads")

    def _look_around(self) -> None:
        """See what no operation shows: all that the garbage collector knows, and what only autograd graphs hold."""
        found = [x for x in gc.get_objects() if issubclass(type(x), (Tensor, Optimizer, nn.Module))]
        with torch._C.DisableTorchFunctionSubclass():
            for thing in found:
                if isinstance(thing, Tensor):
                    self._see_tensor(thing)
                elif isinstance(thing, Optimizer):
                    self._see_optimizer(thing)
                else:
                    for buffer in _tensors(vars(thing).get("_buffers", {})):
                        self._see_as(buffer, "other")
            for tensor in _held_by_graphs(_tensors(found)):
                self._see_tensor(tensor)


class _Life(weakref.ref):
    """One storage from birth to death, weakly held."""

    __slots__ = ("key", "kind", "label", "nbytes")


class _Operations(TorchDispatchMode):
    """Shows a Memory the tensors of every torch operation."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # an operation on a DTensor comes back as operations on what it holds
        # __torch_function__ has had its turn, above autograd. Asked again, a tensor that refuses to be used would.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            self.memory._see_operation(func, _tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _held_by_graphs(results: Iterable[Tensor]) -> Iterator[Tensor]:
    """Leaves, and what forward saved for backward: often only the autograd graph holds them, unknown to Python."""
    nodes, visited = [tensor.grad_fn for tensor in results], {None}
    while nodes:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes += [function for function, _ in node.next_functions]
        yield from _tensors(getattr(node, "variable", None))
        for name in dir(node):
            # Not _saved_…: that unpacks, and where the graph is checkpointed, unpacking runs the forward again.
            if name.startswith("_raw_saved_"):
                try:
                    saved = getattr(node, name)
                except RuntimeError:  # backward has been there and let go
                    continue
                yield from _tensors([x.data for x in (saved if isinstance(saved, tuple) else [saved]) if x])
