"""One rank: a process that waits for functions and runs each of them from the same clean state."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import random
import shutil
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minizero.parts import calls, comm
from minizero.ranks.journal import Journal, started_threads
from minizero.ranks.shipping import pack, unpack

SEED = 0
INLINE = 1 << 15  # bytes that fit into a pipe without a reader at the other end; what is larger travels as a file


@dataclass
class Order:
    """Run this."""

    folder: Path
    payload: bytes | None  # None: it is in folder / "payload"
    rendezvous: Path | None  # join a new process group first, and meet the others here
    path: list[str]
    cwd: str
    environ: dict[str, str]


@dataclass
class Answer:
    """What became of it."""

    rank: int
    ok: bool
    payload: bytes | None = None  # the packed result; None: it is in folder / f"result-{rank}"
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    connection_lost: bool = False  # the exception only says that another rank went away
    time: float = field(default_factory=time.monotonic)  # the same clock in all processes
    group_intact: bool = False  # the process group is the one that the rank has joined, and the only one
    threads: bool = False  # threads that it has started go on
    imported: dict[str, int] = field(default_factory=dict)  # the reader's own files -> ns of their last change


def main(
    rank: int, world_size: int, backend: str, device: str, pipe: Any, control: Any, folder: str, parent: int
) -> None:
    """The life of a rank, until the parent ends it or ends itself."""
    multiprocessing.set_start_method(None, force=True)  # what the function starts is started as anywhere, not as we were
    os.setpgid(0, 0)  # an interrupt in the notebook is the parent's to deal with; and we end with all that we start
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # outside a run nobody needs to know where we are
    _keep_freed_memory()
    try:
        _send_output_to(Path(folder), rank)
        threading.Thread(target=_obey, args=(parent, control, folder), daemon=True).start()
        _serve(rank, world_size, backend, torch.device(device), pipe)
    except (EOFError, ConnectionError, FileNotFoundError):  # the parent has gone, perhaps with the folder
        _end(folder)


def _keep_freed_memory() -> None:
    """A training step frees the same blocks each time and asks for them again. glibc would give large ones back to the system
    meanwhile, and a step spend several per cent of its time on page faults."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 2**28)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def _serve(rank: int, world_size: int, backend: str, device: torch.device, pipe: Any) -> None:
    gc.freeze()  # the modules need not be looked at by each collection: it takes 1 ms, not 100
    pipe.send("ready")
    known = set(sys.modules)
    while True:
        order = pipe.recv()
        answer = _run(rank, world_size, backend, device, order, known)
        failed = not answer.ok
        pipe.send(answer)
        del order, answer
        gc.collect()  # what the function left in cycles must not be alive in the next run
        if failed:
            comm.leave()  # whoever waits for this rank is told so by its connection, and need not be killed
        if not any(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()):  # the meter must find those
            gc.freeze()  # nor what lives on: more modules


def _run(rank: int, world_size: int, backend: str, device: torch.device, order: Order, known: set[str]) -> Answer:
    global _at_work
    with _between_runs:
        _at_work = order.folder
    started, pid = time.time_ns(), os.getpid()
    _send_output_to(order.folder, rank)
    stack = open(order.folder / f"stack-{rank}", "w")  # noqa: SIM115 — open as long as the function runs
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # the parent may ask where we are …
    faulthandler.enable(stack)  # … or want to know where we crashed
    journal = Journal(order.folder / f"journal-{rank}")
    threads = set(threading.enumerate())
    try:
        _reset(order)
        if order.rendezvous is not None:
            comm.leave()
            with _connections.being_made():
                comm.join(backend, rank, world_size, comm.file_store(str(order.rendezvous), world_size), device)
        calls.listeners[:] = [journal, _connections]
        with warnings.catch_warnings():
            fn, args = unpack(order.payload or (order.folder / "payload").read_bytes())
            result = fn(rank, *args)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            payload: bytes | None = _packed(result, rank)
        _end_a_fork(pid)
        if len(payload) > INLINE:
            (order.folder / f"result-{rank}").write_bytes(payload)
            payload = None
        answer = Answer(rank, ok=True, payload=payload)
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        _end_a_fork(pid, error)
        answer = _failure(rank, error)
    finally:
        calls.listeners.clear()
        journal.close()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        stack.close()
    answer.group_intact = comm.intact()
    answer.threads = bool(started_threads(threads))
    answer.imported = _imported(known, started)
    return answer


def _end_a_fork(pid: int, error: BaseException | None = None) -> None:
    """The function has called os.fork, and this is the child: it must not answer for the rank."""
    if os.getpid() != pid:
        code = error.code if isinstance(error, SystemExit) else error
        os._exit(code if isinstance(code, int) else int(code is not None))


def _packed(result: Any, rank: int) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(result).__name__} that cannot be sent to the parent process ({error}): "
            "return tensors, numbers, strings, or lists and dicts of them"
        ) from None


_OURS = (os.path.dirname(__file__) + os.sep, calls.__file__)


def _failure(rank: int, error: BaseException) -> Answer:
    answer = Answer(rank, ok=False, exception_type=type(error).__name__, connection_lost=calls.connection_lost(error))
    try:
        answer.message = str(error)
    except Exception as second:
        answer.message = f"(its text cannot be had: str() of it raises {type(second).__name__})"
    if isinstance(error, SystemExit):
        answer.message = f"sys.exit({'' if error.code is None else repr(error.code)}) was called in a rank"
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
    if frames:
        told.stack = traceback.StackSummary.from_list(frames)
        answer.traceback = "".join(told.format())
    return answer


def _reset(order: Order) -> None:
    """The interpreter-wide settings that a function may have changed, as they are at the start of every run."""
    kept = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME",) if name in os.environ}  # subgroups need it, too
    os.environ.clear()
    os.environ.update(kept | order.environ)
    os.chdir(order.cwd)
    sys.path[:] = order.path
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_num_threads(1)  # N ranks share the cores; and sums come out the same on every machine
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _imported(known: set[str], started: int) -> dict[str, int]:
    """The reader's own files that this run was the first to import. The parent looks whether they change."""
    new = set(sys.modules) - known
    known |= new
    files = {getattr(sys.modules.get(name), "__file__", None) for name in new}
    imported = {}
    for file in files:
        if isinstance(file, str) and not file.startswith(calls.INSTALLED):
            with contextlib.suppress(OSError):
                changed = os.stat(file).st_mtime_ns
                imported[file] = changed if not started < changed <= time.time_ns() else -1  # edited as we ran
    return imported


def _send_output_to(folder: Path, rank: int) -> None:
    """Both streams go to files, at the level of the operating system: what C++ prints, too, and if the process dies."""
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    # New streams each time, for a function may have replaced or closed them. Nothing waits in a buffer.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", "replace", write_through=True)
        for descriptor in (1, 2)
    )


_at_work: Path | None = None  # the folder of the run that this rank is in
_between_runs = threading.Lock()


def _obey(parent: int, control: Any, folder: str) -> None:
    """In a thread of its own, for the main one may wait for ever: let go when the parent says so, end when it ends."""
    while os.getppid() == parent:
        if control.poll(0.5):
            try:
                run = control.recv()
            except EOFError:
                break
            with _between_runs:
                if run == _at_work:  # not, if it was about to answer and has begun another one
                    _connections.hang_up()
    _end(folder)


class _Connections:
    """Which sockets lead to the other ranks: those that appear while a process group is made."""

    def __init__(self) -> None:
        self.inodes: set[int] = set()

    @contextlib.contextmanager
    def being_made(self) -> Iterator[None]:
        before = set(_sockets())
        yield
        self.inodes = set(_sockets()) - before

    def issued(self, call: calls.Call) -> None:  # what calls.listeners are told
        if call.op == "new_group":
            self._before = set(_sockets())

    def done(self, call: calls.Call) -> None:
        if call.op == "new_group":
            self.inodes |= set(_sockets()) - self._before

    def hang_up(self) -> None:
        """Break them. A call that waits for another rank fails, and nobody has to be killed."""
        for inode, descriptor in _sockets().items():
            if inode in self.inodes:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # or it only listens
                    connection.shutdown(socket.SHUT_RDWR)


_connections = _Connections()


def _sockets() -> dict[int, int]:
    """The open sockets of this process: inode -> descriptor."""
    found = {}
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            about = os.fstat(descriptor)
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = descriptor
    return found


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # with all that this rank has started
