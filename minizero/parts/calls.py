"""Every collective of this rank, noticed before it starts: minizero's own, and plain `torch.distributed` calls.

    watch()                 wraps torch.distributed's collectives, once in a process
    listeners               objects that are told: issued(call), waiting(call) if it is asynchronous, arrived(call) when the
                            rank has waited for its data, done(call) when these are put to use; or failed(call) if torch
                            refuses it. They have the methods that they need. With an attribute `exact`, an asynchronous
                            call notes the moment at which its data came
    logical("all_gather")   several calls on the wire that are one collective to the reader, as parts/comm.py issues it

Who listens: the journal that `Ranks` reads when a rank hangs, and the instruments in lens/.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import site
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# The reader's own code is what lies elsewhere.
INSTALLED = tuple(
    {
        folder + os.sep
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            site.getusersitepackages(),
            os.path.dirname(torch.__file__),
        )
    }
)
PARTS = os.path.dirname(__file__) + os.sep
LIBRARIES = (*INSTALLED, os.path.dirname(os.path.dirname(__file__)) + os.sep)

listeners: list[Any] = []
_inside = threading.local()  # a logical call is open in this thread: what it issues belongs to it


@dataclass
class Call:
    """One collective, as this rank issued it."""

    op: str
    numel: int  # elements of the full tensor, over all chunks
    dtype: str  # "float32"; empty where nothing is sent
    shape: tuple[int, ...]
    group: str  # the process group's name, equal on all its ranks; empty for the default group
    ranks: tuple[int, ...]  # the group's global ranks
    detail: str = ""  # what must agree besides: the source of a broadcast, the kind of a reduction
    peer: int | None = None  # the other side of a send or recv; None in recv: whoever comes
    source: int | None = None  # the global rank that a broadcast or scatter comes from, or a reduce or gather goes to
    uneven: bool = False  # ranks may rightly have other sizes
    unit: str = ""  # the bucket or unit, "control" or "buffers"; empty for plain calls
    sync: bool = True
    patient: bool = True  # it waits as long as it takes; not, if its group or its caller sets a time limit
    itemsize: int = 0  # bytes an element
    where: tuple[str, int] = ("", 0)  # the file and line of the caller outside torch and minizero
    start: float = field(default_factory=time.perf_counter)
    waited: float | None = None  # when this rank had waited for its data
    arrived: float | None = None  # when they had come: to the point with an `exact` listener, else the same
    event: torch.cuda.Event | None = None  # the same on a GPU, with an `exact` listener
    end: float | None = None  # when this rank knew that it was complete
    sent: int | None = None  # elements that this rank sends, where that is no matter of numel and op

    def arrive(self) -> None:
        """This rank has waited for its data."""
        if self.waited is None:
            self.waited = time.perf_counter()
            self.arrived = self.arrived or self.waited
            self.tell("arrived")

    def tell(self, event: str) -> None:
        if event == "done":
            self.arrive()
            self.end = time.perf_counter()
        for listener in tuple(listeners):
            if (hear := getattr(listener, event, None)) is not None:
                hear(self)

    def refuse(self, error: BaseException) -> None:
        """The call raised. A lost connection is no refusal: then the others may have issued it, too."""
        if not connection_lost(error):
            self.tell("failed")


# What gloo and NCCL say when the other side went away.
_LOST = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "socket closed", "peer closed",
    "caused pair closure", "remote process exited", "nccl communicator was aborted",
)  # fmt: skip


def connection_lost(error: BaseException | None) -> bool:
    """Does it only say, itself or the error behind it, that another rank went away? A consequence, never the cause."""
    seen: list[BaseException] = []  # a cause may be the error itself
    while error is not None and error not in seen:
        said = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _LOST)
        if said and _raised_by_library(error):  # a database that is gone says the same
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _raised_by_library(error: BaseException) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is None or place.tb_frame.f_code.co_filename.startswith((*INSTALLED, PARTS))


class _HandedOn(dist.Work):
    """A Work that does what another one does. (It must be a Work itself: FSDP2 looks, and torch's C++ insists.)"""

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work = work


def _handed_on(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self._work, name)(*args, **kwargs)


for _name in dir(dist.Work):
    if not _name.startswith("__"):
        setattr(_HandedOn, _name, _handed_on(_name))


def timed(works: Sequence[Any], call: Call, group: Any) -> Sequence[Any]:
    """The works of an asynchronous call, made to note in `call.arrived` when the last of them is complete, if some listener
    wants to know it to the point."""
    if not works or not any(getattr(listener, "exact", False) for listener in listeners):
        return works
    if dist.get_backend(group) == "nccl":  # its future is there at once, with an event behind it on the GPU
        call.event = torch.cuda.Event(enable_timing=True)
        works[-1].get_future().then(lambda _: call.event.record())
        return works

    def note(_: Any) -> None:
        call.arrived = time.perf_counter()

    for work in works:
        work.get_future().add_done_callback(note)
    return works


class WatchedWork(_HandedOn):
    """A Work that tells when it is waited for and when it is done."""

    def __init__(self, work: dist.Work, call: Call, group: Any):
        super().__init__(work)
        self._call = call
        if call.op not in ("send", "recv"):  # whose wait() may have a time limit
            timed([work], call, group)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self._call.end is not None:
            return self._work.wait(*args, **kwargs)
        if args or kwargs:
            self._call.patient = False
        self._call.tell("waiting")
        try:
            result = self._work.wait(*args, **kwargs)
        except BaseException as error:
            if not connection_lost(error):  # its time was up, and the rank goes on
                self._call.tell("gave_up")
            raise
        self._call.tell("done")
        return result


def location() -> tuple[str, int]:
    """File and line of the innermost frame outside the libraries: the reader's own line.

    Where there is none (a hook on a thread of autograd's, a function of the course) it is the line in minizero.
    """
    ours, frame = None, sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name) and (frame.f_back is not None or name != "<string>"):  # which starts a rank
            return name, frame.f_lineno
        if ours is None and not _is_below(name):
            ours = name, frame.f_lineno
        frame = frame.f_back
    return ours or ("", 0)


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES)


@functools.cache
def _is_below(file: str) -> bool:
    return file.startswith((*INSTALLED, PARTS))


def describe(op: str, tensors: Any, group: Any = None, **more: Any) -> Call:
    """A Call for `tensors` (one tensor, or the list of a tensor's chunks) over `group`."""
    group = group or dist.group.WORLD
    chunks = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
    name, ranks, patient = _facts(group)
    more.setdefault("patient", patient)
    return Call(
        op=op,
        numel=sum(chunk.numel() for chunk in chunks),
        dtype=str(chunks[0].dtype).removeprefix("torch.") if chunks else "",
        itemsize=chunks[0].element_size() if chunks else 0,
        shape=tuple(chunks[0].shape) if len(chunks) == 1 else (len(chunks), *chunks[0].shape) if chunks else (),
        group=name,
        ranks=ranks,
        where=location(),
        **more,
    )


def _facts(group: Any) -> tuple[str, tuple[int, ...], bool]:
    """Its name (empty for the default group), its global ranks, and whether it waits for ever, or for longer than a reader does."""
    if group not in _known:
        patient = True
        with contextlib.suppress(Exception):  # a fake group has no options, and waits for nobody
            backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
            patient = backend.options._timeout >= timedelta(minutes=10)
        name = "" if group is dist.group.WORLD else group.group_name
        _known[group] = name, tuple(dist.get_process_group_ranks(group)), patient
    return _known[group]


_known: weakref.WeakKeyDictionary[Any, tuple[str, tuple[int, ...], bool]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def logical(op: str, tensors: Any, group: Any = None, **more: Any) -> Iterator[Call]:
    """What is issued inside is one collective `op`. The caller tells when it waits and when it is done."""
    call = describe(op, tensors, group, **more)
    call.tell("issued")
    outer, _inside.call = getattr(_inside, "call", None), call
    try:
        yield call
    except BaseException as error:
        call.refuse(error)
        raise
    finally:
        _inside.call = outer


# --- torch.distributed's own functions -------------------------------------------------------------


def _reduction(a: dict) -> str:
    op = a.get("op")
    op = getattr(op, "op", op)  # ReduceOp(SUM) holds SUM
    return str(getattr(op, "name", None) or op or "").rpartition(".")[2]


def _root(a: dict, name: str) -> int | None:
    """The global rank of `src` or `dst`, given as such or as a rank within the group."""
    within = a.get(f"group_{name}")
    return a.get(name) if within is None else dist.get_global_rank(a.get("group") or dist.group.WORLD, within)


def _rooted(op: str, tensors: str, name: str) -> Callable[[dict], dict]:
    def describe_call(a: dict) -> dict:
        root = _root(a, name)
        root = 0 if root is None else root
        reduction = f" {_reduction(a)}" if op == "reduce" else ""
        return {"tensors": a[tensors], "source": root, "detail": f"{name}={root}{reduction}"}

    return describe_call


def _peer(name: str) -> Callable[[dict], dict]:
    def describe_call(a: dict) -> dict:
        return {"tensors": a["tensor"], "peer": _root(a, name), "detail": f"tag={a['tag']}" if a["tag"] else ""}

    return describe_call


def _scatter(a: dict) -> dict:
    root = _root(a, "src")
    root = 0 if root is None else root
    chunks = a.get("scatter_list") or [a["tensor"]] * dist.get_world_size(a.get("group"))
    return {"tensors": chunks, "source": root, "detail": f"src={root}"}


def _has_splits(a: dict) -> bool:
    return bool(a.get("input_split_sizes") or a.get("output_split_sizes"))


def _sent(a: dict) -> int | None:
    """What an all-to-all with splits sends: all but this rank's own part."""
    splits = a.get("input_split_sizes")
    if not splits:
        return None
    row = a["input"][:1].numel()
    return (sum(splits) - splits[dist.get_rank(a.get("group"))]) * row


def _members(a: dict) -> list[int]:
    return sorted(a.get("ranks") or range(dist.get_world_size()))


_COLLECTIVES: dict[str, tuple[str, Callable[[dict], dict]]] = {
    "all_reduce": ("all_reduce", lambda a: {"tensors": a["tensor"], "detail": _reduction(a)}),
    "broadcast": ("broadcast", _rooted("broadcast", "tensor", "src")),
    "reduce": ("reduce", _rooted("reduce", "tensor", "dst")),
    "gather": ("gather", _rooted("gather", "tensor", "dst")),
    "scatter": ("scatter", _scatter),
    "all_gather": ("all_gather", lambda a: {"tensors": a["tensor_list"]}),
    "all_gather_into_tensor": ("all_gather", lambda a: {"tensors": a["output_tensor"]}),
    "all_gather_single": ("all_gather", lambda a: {"tensors": a["output_tensor"]}),
    "reduce_scatter": ("reduce_scatter", lambda a: {"tensors": a["input_list"], "detail": _reduction(a)}),
    "reduce_scatter_tensor": ("reduce_scatter", lambda a: {"tensors": a["input"], "detail": _reduction(a)}),
    "reduce_scatter_single": ("reduce_scatter", lambda a: {"tensors": a["input"], "detail": _reduction(a)}),
    "all_to_all": ("all_to_all", lambda a: {"tensors": a["input_tensor_list"], "uneven": True}),
    "all_to_all_single": ("all_to_all", lambda a: {"tensors": a["input"], "uneven": _has_splits(a), "sent": _sent(a)}),
    "barrier": ("barrier", lambda a: {"tensors": ()}),
    "monitored_barrier": ("barrier", lambda a: {"tensors": (), "detail": "monitored", "patient": a.get("timeout") is None}),
    "new_group": ("new_group", lambda a: {"tensors": (), "detail": f"ranks={_members(a)}"}),
    "send": ("send", _peer("dst")),
    "isend": ("send", _peer("dst")),
    "recv": ("recv", _peer("src")),
    "irecv": ("recv", _peer("src")),
}
_ASYNCHRONOUS = ("isend", "irecv")


def watch() -> None:
    """Wrap torch.distributed's collectives, once a process, so that `listeners` hear of them. They may be none."""
    for name, (op, fields) in _COLLECTIVES.items():
        function = getattr(c10d, name, None)
        if function is None or hasattr(function, "_minizero"):
            continue
        asynchronous = name in _ASYNCHRONOUS
        if function.__code__.co_freevars == ("func",):
            # torch has wrapped it already, to log errors. Change what its wrapper calls, and the function stays the same
            # object: names that were imported before now are watched, and torch.compile still knows it.
            (inner,) = function.__closure__
            inner.cell_contents = _watched(inner.cell_contents, op, fields, asynchronous)
            function._minizero = True
            continue
        wrapped = _watched(function, op, fields, asynchronous)
        wrapped._minizero = True
        for module in (c10d, dist):
            if hasattr(module, name):
                setattr(module, name, wrapped)


def _watched(original: Callable, op: str, fields: Callable[[dict], dict], asynchronous: bool) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not listeners or getattr(_inside, "call", None) is not None or not dist.is_initialized():
            return original(*args, **kwargs)
        call = None
        with contextlib.suppress(Exception):  # a wrong call: torch has the better message
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()  # to leave SUM out is to say SUM
            given = bound.arguments
            sync = not (asynchronous or given.get("async_op"))
            if not given.get("use_local_synchronization"):  # a new_group to which only its members are called
                call = describe(op, group=given.get("group"), sync=sync, **fields(given))
        if call is None:
            return original(*args, **kwargs)
        call.tell("issued")
        _inside.call = call
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            call.refuse(error)
            raise
        finally:
            _inside.call = None
        if sync:
            call.tell("done")
            return result
        return WatchedWork(result, call, given.get("group")) if result is not None else None

    return collective
