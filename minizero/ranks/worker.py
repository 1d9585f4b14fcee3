"""One rank: a process that waits for functions and runs each of them from the same clean state."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minizero.parts import calls, comm
from minizero.ranks import shipping
from minizero.ranks.journal import Journal

SEED = 0
INLINE = 1 << 15  # bytes that fit into a pipe without a reader at the other end; what is larger travels as a file


@dataclass
class Order:
    """Run this. `fresh`: join a new process group first."""

    folder: Path
    payload: bytes | None  # None: it is in folder / "payload"
    fresh: bool
    path: list[str]
    cwd: str


@dataclass
class Answer:
    """What became of it."""

    rank: int
    ok: bool
    payload: bytes | None = None  # the packed result; None: it is in folder / f"result-{rank}"
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    communication: bool = False  # the exception only says that another rank went away
    time: float = 0.0  # on the clock that all processes share
    groups: int = 1


def main(rank: int, world_size: int, backend: str, device: str, pipe: Any, folder: str) -> None:
    """The life of a rank, until the parent closes the pipe or ends itself."""
    os.setpgid(0, 0)  # an interrupt in the notebook is the parent's to deal with; and we end with all that we start
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    _send_output_to(Path(folder), rank)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # outside a run nobody needs to know where we are
    torch.set_num_threads(1)  # N ranks share the cores; and sums come out the same on every machine
    clean = _State()
    pipe.send("ready")
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_run(rank, world_size, backend, torch.device(device), order, clean))
        gc.collect()  # what the function left in cycles must not be alive in the next run
        gc.freeze()  # what lives on (modules) need not be looked at again: the next collection takes 1 ms, not 50


def _run(rank: int, world_size: int, backend: str, device: torch.device, order: Order, clean: _State) -> Answer:
    _send_output_to(order.folder, rank)
    clean.restore(order)
    stack = open(order.folder / f"stack-{rank}", "w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # the parent may ask where we are
    journal = Journal(order.folder / f"journal-{rank}")
    try:
        if order.fresh:
            comm.leave()
            comm.join(backend, rank, world_size, comm.file_store(str(order.folder / "rendezvous"), world_size), device)
        calls.listeners[:] = [journal]
        fn, args = shipping.unpack(order.payload or (order.folder / "payload").read_bytes())
        result = fn(rank, *args)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        answer = Answer(rank, ok=True, payload=_packed(result, rank))
        if len(answer.payload) > INLINE:
            (order.folder / f"result-{rank}").write_bytes(answer.payload)
            answer.payload = None
    except BaseException as error:  # SystemExit too: a rank that leaves early has failed
        answer = _failure(rank, error)
    finally:
        calls.listeners.clear()
        journal.close()
        faulthandler.unregister(signal.SIGUSR1)
        stack.close()
    sys.stdout.flush()
    sys.stderr.flush()
    answer.groups = comm.groups()
    answer.time = time.monotonic()
    return answer


def _packed(result: Any, rank: int) -> bytes:
    try:
        return shipping.pack(result)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(result).__name__} that cannot be sent to the parent process ({error}): "
            "return tensors, numbers, strings, or lists and dicts of them"
        ) from error


# What gloo and NCCL say when the other side went away: a consequence, never the cause.
_GONE = ("connection closed", "connection reset", "connection refused", "broken pipe", "socket closed", "peer closed",
         "timed out waiting", "caused pair closure", "remote process exited", "nccl communicator was aborted")  # fmt: skip


def _failure(rank: int, error: BaseException) -> Answer:
    frames = error.__traceback__
    ours = (os.path.dirname(__file__) + os.sep,)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours) and frames.tb_next is not None:
        frames = frames.tb_next
    message = str(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit({'' if error.code is None else repr(error.code)}) was called in a rank"
    return Answer(
        rank,
        ok=False,
        exception_type=type(error).__name__,
        message=message,
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        communication=isinstance(error, RuntimeError) and any(text in message.lower() for text in _GONE),
    )


class _State:
    """The interpreter-wide settings that a function may change, as they were when the rank started."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.filters = list(warnings.filters)

    def restore(self, order: Order) -> None:
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        os.environ.update(self.environ)
        os.chdir(order.cwd)
        sys.path[:] = order.path
        warnings.filters[:] = self.filters
        warnings._filters_mutated() if hasattr(warnings, "_filters_mutated") else None
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)
        random.seed(SEED)
        torch.manual_seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)


def _send_output_to(folder: Path, rank: int) -> None:
    """Both streams go to files, at the level of the operating system: also what C++ prints, also if the process dies."""
    for stream, descriptor, name in ((sys.stdout, 1, "out"), (sys.stderr, 2, "err")):
        stream.flush()
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
        stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True, write_through=True)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
