"""Run a function on N ranks: real processes that form a process group, from a notebook, a script or torchrun.

    results = launch(fn, 4)              # start four ranks, run fn(rank) on each, end them
    ranks = Ranks(4); ranks.run(fn)      # the same, with processes that stay warm between calls

A rank that raises, dies, hangs or deadlocks is an error here, with its own source line and where the others stand.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from minizero.parts import calls, comm
from minizero.ranks import shipping, worker
from minizero.ranks.journal import State, Story, cell_name, deadlock, explain, line, mismatch, standing

START_TIMEOUT = 120.0  # s, until all ranks have imported torch; apart from the deadline of a run
GRACE = 0.3  # s that the others get to answer after one rank failed
CAUSE_GRACE = 1.5  # s to find the rank that went away, when all we know is that a connection broke
LOOK = 0.25  # s between two looks at the journals
FAULT_SIGNAL = signal.SIGUSR1

device = comm.device


class RankError(RuntimeError):
    """A rank failed.

    `rank` is the first that did; `exception_type` and `message` are its exception's; the text holds its traceback and
    says where each other rank stood.
    """

    def __init__(self, text: str, rank: int | None = None, exception_type: str = "", message: str = ""):
        super().__init__(text)
        self.rank, self.exception_type, self.message = rank, exception_type, message


class RanksTimeout(RankError, TimeoutError):
    """The deadline of a run passed, or the ranks' journals prove that they wait for each other for ever."""

    def __init__(self, text: str, rank: int | None = None, exception_type: str = "RanksTimeout", message: str = ""):
        super().__init__(text, rank, exception_type, message)


def launch(fn: Callable, world_size: int, *args: Any, timeout: float = 60, device: str = "auto") -> list:
    """Start `world_size` ranks, run `fn(rank, *args)` on each, end them, and return the results in rank order.

    Parameters and errors are those of `Ranks` and `Ranks.run`.
    """
    with Ranks(world_size, timeout=timeout, device=device) as ranks:
        return ranks.run(fn, *args)


def init() -> None:
    """Under torchrun: join the process group that the environment describes. Inside `Ranks` there is nothing to do.

    Takes NCCL, one GPU a rank, where this machine has a GPU for each of its ranks, and gloo on the CPU elsewhere.
    """
    if torch.distributed.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"mz.init() finds no {', '.join(missing)} in the environment: start this script with "
            "`torchrun --nproc-per-node N script.py`, or use mz.launch(fn, world_size) without torchrun"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    gpus = torch.cuda.device_count()
    if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        comm.join("nccl", rank, world_size, None, torch.device("cuda", local_rank))
    else:
        comm.join("gloo", rank, world_size, None, torch.device("cpu"))


class Ranks:
    """`world_size` processes that form a process group and stay warm between runs.

    world_size: number of ranks, at least 1
    timeout: seconds that one run may take; starting the processes has a deadline of its own
    device: "auto" takes NCCL and one GPU a rank where there are enough, else gloo on the CPU, and says so once;
        "cpu"; "cuda" (an error with fewer GPUs than ranks); "cuda:0" puts all ranks on that GPU, with gloo

    Each run starts from the same state: seed 0, float32, gradients on, one thread, the parent's path and folder, and a
    process group without unfinished calls. After a failure the processes are started anew at the next run.
    """

    def __init__(self, world_size: int, timeout: float = 60, device: str = "auto"):
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size is the number of ranks, an int; got {world_size!r}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {world_size}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout is a number of seconds; got {timeout!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive (seconds for one run); got {timeout}")
        self.world_size = world_size
        self.timeout = timeout
        self._backend, self._devices = _choose(str(device), world_size)
        self._lock = threading.RLock()
        self._pool: _Pool | None = None
        self._closed = False
        self._start()

    def run(self, fn: Callable, *args: Any) -> list:
        """Run `fn(rank, *args)` on every rank and return `[fn(0, *args), fn(1, *args), …]`.

        `fn` may be any function, lambda or closure, also one of a notebook cell; `args` and results travel by pickle.
        What ranks print appears here in rank order, each line marked `[rank r] `.

        Errors: TypeError if `fn` or `args` cannot be sent; RankError if a rank raises or dies; RanksTimeout at the
        deadline, or as soon as the ranks' journals prove a deadlock.
        """
        __tracebackhide__ = True
        if not callable(fn):
            raise TypeError(f"run(fn, *args) needs a function of the rank; got a {type(fn).__name__}: {fn!r}")
        try:
            shipping.by_value_if_not_importable(fn)
            payload = shipping.pack((fn, args))
        except Exception as error:
            raise TypeError(
                f"{getattr(fn, '__name__', fn)!s} and its arguments cannot be sent to the ranks: {error}. "
                "What cannot be pickled (locks, open files, generators, process groups) must be made inside the function"
            ) from error
        with self._lock:
            if self._closed:
                raise RuntimeError("these ranks are closed: make new ones with mz.Ranks(world_size)")
            self._start()
            pool = self._pool
            try:
                pool.wait_until_ready()
                return pool.run(payload, self.timeout)
            finally:
                if pool.broken:
                    pool.end()
                    self._pool = None

    def close(self) -> None:
        """End the processes. Closing twice is fine."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._backend} on {', '.join(dict.fromkeys(self._devices))}"
        return f"Ranks({self.world_size}, {state})"

    def _start(self) -> None:
        if self._pool is None or not self._pool.alive():
            if self._pool is not None:
                self._pool.end()
            self._pool = _Pool(self.world_size, self._backend, self._devices)


_said: set[str] = set()


def _choose(device: str, world_size: int) -> tuple[str, list[str]]:
    """The backend, and a device for each rank."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        enough = gpus >= world_size
        chosen = _choose("cuda" if enough else "cpu", world_size)
        why = f"{gpus} GPU{'s' * (gpus != 1)} found" if gpus else "no GPU found"
        text = "minizero: NCCL, one GPU a rank" if enough else f"minizero: ranks are processes on the CPU, with gloo ({why})"
        if text not in _said:
            _said.add(text)
            print(text)
        return chosen
    if device == "cpu":
        return "gloo", ["cpu"] * world_size
    if device == "cuda":
        if gpus < world_size:
            raise ValueError(
                f'device="cuda" needs a GPU for each of the {world_size} ranks, and there are {gpus} '
                '(NCCL refuses two ranks on one): take device="cpu", or "cuda:0" for all ranks on one GPU with gloo'
            )
        return "nccl", [f"cuda:{rank}" for rank in range(world_size)]
    if match := re.fullmatch(r"cuda:(\d+)", device):
        if int(match[1]) >= gpus:
            raise ValueError(f'device="{device}": there is no such GPU, {gpus} found')
        return "gloo", [device] * world_size
    raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:<index>"; got "{device}"')


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """While a process is spawned, hide `__main__`: the child would import it again, and a script without a
    `if __name__ == "__main__"` guard would start its ranks again. Functions of `__main__` travel by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Pool:
    """The processes behind `Ranks`, from their start to their end."""

    def __init__(self, world_size: int, backend: str, devices: list[str]):
        self.world_size = world_size
        self.broken = False
        self._fresh = True  # the next run joins a new process group
        self._ready = False
        self._runs = 0
        self._folder = Path(tempfile.mkdtemp(prefix="minizero-"))
        self._pipes: list[connection.Connection] = []
        self._processes: list[mp.Process] = []
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._processes, self._pipes, self._folder)
        context = mp.get_context("spawn")
        with _no_main():
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker.main, args=(rank, world_size, backend, devices[rank], theirs, str(self._folder)),
                    name=f"minizero rank {rank}",
                )  # fmt: skip
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def alive(self) -> bool:
        return self._finalizer.alive and all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        self._finalizer()

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        deadline = time.monotonic() + START_TIMEOUT
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            self.broken = True
            try:
                if not pipe.poll(max(0, deadline - time.monotonic())):
                    raise RanksTimeout(f"rank {rank} did not start within {START_TIMEOUT:.0f} s", rank)
                pipe.recv()
            except (EOFError, OSError):
                process.join(5)
                said = _tail(self._folder / f"err-{rank}")
                raise RankError(f"rank {rank} could not start ({_ending(process.exitcode)}){said}", rank) from None
        self.broken, self._ready = False, True

    def run(self, payload: bytes, timeout: float) -> list:
        __tracebackhide__ = True
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        self._runs += 1
        self.broken = True  # until we know better, also if this is interrupted
        run = _Run(self._processes, self._pipes, folder, timeout)
        try:
            run.start(payload, self._fresh)
            run.wait()
            run.print_output()
            run.check()
            self._fresh = not run.left_clean()
            self.broken = False
            return [run.result(rank) for rank in range(self.world_size)]
        except RankError:
            run.print_output()
            self._fresh = True
            self.broken = not run.all_answered() or not self.alive()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _end(owner: int, processes: list, pipes: list, folder: Path) -> None:
    """End a pool's processes and what they started. Also called at exit, and when a pool is forgotten."""
    if os.getpid() != owner:  # a fork of the parent must not end its ranks
        return
    for pipe in pipes:
        pipe.close()
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
        process.kill()
    for process in processes:
        process.join(5)
        with contextlib.suppress(ValueError):
            process.close()
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Run:
    """One run on all ranks: what came back, and if it did not, why."""

    processes: list
    pipes: list
    folder: Path
    timeout: float
    answers: dict[int, worker.Answer] = field(default_factory=dict)
    deaths: dict[int, float] = field(default_factory=dict)  # rank -> when it was noticed

    def __post_init__(self) -> None:
        self.size = len(self.processes)
        self.stories = [Story(rank, self.folder / f"journal-{rank}") for rank in range(self.size)]
        self.output = [_Output(self.folder, rank) for rank in range(self.size)]

    # --- to the ranks and back ----------------------------------------------------------------------

    def start(self, payload: bytes, fresh: bool) -> None:
        if len(payload) > worker.INLINE:
            (self.folder / "payload").write_bytes(payload)
        inline = payload if len(payload) <= worker.INLINE else None
        order = worker.Order(self.folder, inline, fresh, list(sys.path), os.getcwd())
        self.deadline = time.monotonic() + self.timeout
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has died: noticed in wait()
                pipe.send(order)

    def wait(self) -> None:
        """Until all ranks have answered. Raises as soon as one has failed, or it is proven that they never will."""
        __tracebackhide__ = True
        next_look = time.monotonic() + LOOK
        suspicion: tuple | None = None
        while not self.all_answered():
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timeout()
            if self.failed():
                self._collect(GRACE)
                raise self._failure()
            self._receive(min(next_look, self.deadline) - now)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK
                self.output[0].print_new()
                suspicion = self._look(suspicion)
        if self.failed():
            raise self._failure()

    def all_answered(self) -> bool:
        return len(self.answers) == self.size

    def failed(self) -> bool:
        return bool(self.deaths) or any(not answer.ok for answer in self.answers.values())

    def _receive(self, timeout: float) -> None:
        """Take what arrives within `timeout` seconds, an answer or a death."""
        open_ranks = [rank for rank in range(self.size) if rank not in self.answers and rank not in self.deaths]
        sources = {self.pipes[rank]: rank for rank in open_ranks} | {self.processes[rank].sentinel: rank for rank in open_ranks}
        for source in connection.wait(list(sources), max(0, timeout)):
            rank = sources[source]
            if rank in self.answers or rank in self.deaths:
                continue
            try:  # the pipe first: a rank may answer and then die
                if self.pipes[rank].poll():
                    self.answers[rank] = self.pipes[rank].recv()
                    continue
            except (EOFError, OSError):
                pass
            self.processes[rank].join(1)
            self.deaths[rank] = time.monotonic()

    def _collect(self, grace: float) -> None:
        """Give the others `grace` seconds to answer too; longer while only consequences of a failure are known."""
        begin = time.monotonic()
        while len(self.answers) + len(self.deaths) < self.size:
            known = bool(self.deaths) or any(not a.ok and not a.communication for a in self.answers.values())
            left = begin + (grace if known else CAUSE_GRACE) - time.monotonic()
            if left <= 0:
                return
            self._receive(left)

    def result(self, rank: int) -> Any:
        answer = self.answers[rank]
        packed = answer.payload
        return shipping.unpack((self.folder / f"result-{rank}").read_bytes() if packed is None else packed)

    # --- what the journals say ----------------------------------------------------------------------

    def _states(self) -> list[State]:
        return [self._state(rank) for rank in range(self.size)]

    def _state(self, rank: int) -> State:
        if rank in self.deaths:
            return State.DEAD
        if rank in self.answers:
            return State.FINISHED if self.answers[rank].ok else State.FAILED
        return State.BLOCKED if self.stories[rank].blocked_in is not None else State.RUNNING

    def _look(self, suspicion: tuple | None) -> tuple | None:
        """Read the journals. A deadlock that two looks in a row find, with nothing new between them, is proven."""
        new = [story.read() for story in self.stories]
        states = self._states()
        stuck = deadlock(self.stories, states)
        if State.BLOCKED not in states:
            return None
        differs = mismatch(self.stories)
        if not stuck and not differs:
            return None
        if suspicion == (stuck, differs) and not any(new):
            raise self._deadlock(stuck, differs, states)
        return stuck, differs

    def check(self) -> None:
        """All ranks came back. Have they issued the same collectives? With equal sizes a mix-up stays silent."""
        __tracebackhide__ = True
        for story in self.stories:
            story.read()
        if differs := mismatch(self.stories):
            raise RankError(f"{differs}.\nThe results would be wrong without an error.", 0, "RankError", differs)

    def left_clean(self) -> bool:
        """Nothing of this run can be met by the next: no unfinished call, no group besides the default one."""
        balanced = all(entry.done for story in self.stories for entry in story.entries)
        lengths = {len([e for e in story.entries if len(e.ranks) == self.size and not e.point_to_point]) for story in self.stories}
        sends = sum(entry.op == "send" for story in self.stories for entry in story.entries)
        recvs = sum(entry.op == "recv" for story in self.stories for entry in story.entries)
        return balanced and len(lengths) == 1 and sends == recvs and all(a.groups == 1 for a in self.answers.values())

    # --- the errors ---------------------------------------------------------------------------------

    def _failure(self) -> RankError:
        for story in self.stories:
            story.read()
        candidates = [(answer.communication, answer.time, rank) for rank, answer in self.answers.items() if not answer.ok]
        candidates += [(False, when, rank) for rank, when in self.deaths.items()]
        _, _, rank = min(candidates)
        differs = mismatch(self.stories)
        prefix = f"{differs}.\n\n" if differs else ""
        others = self._others(except_rank=rank)
        if rank in self.deaths:
            ending = _ending(self.processes[rank].exitcode)
            stands = standing(self.stories[rank], State.BLOCKED if self.stories[rank].blocked_in else State.RUNNING)
            said = _tail(self.folder / f"err-{rank}")
            head = f"rank {rank} died: {ending}"
            return RankError(f"{prefix}{head}\n  it was {stands}{said}\n{others}", rank, "ProcessDied", ending)
        answer = self.answers[rank]
        head = f"rank {rank} raised {answer.exception_type}: {answer.message}"
        text = f"{prefix}{head}\n\n{_indent(_with_cells(answer.traceback))}\n{others}"
        return RankError(text, rank, answer.exception_type, answer.message)

    def _deadlock(self, stuck: set[int], differs: str | None, states: list[State]) -> RanksTimeout:
        why = differs or explain(stuck, self.stories, states)
        rank = min(stuck) if stuck else states.index(State.BLOCKED)
        return RanksTimeout(f"deadlock: {why}.\n{self._others()}", rank, message=why)

    def _timeout(self) -> RanksTimeout:
        for story in self.stories:
            story.read()
        states = self._states()
        open_ranks = [rank for rank in range(self.size) if rank not in self.answers]
        differs = mismatch(self.stories)
        why = f"the run took longer than its {self.timeout:g} s"
        text = f"{why}{f'; {differs}' if differs else ''}.\n{self._others()}"
        rank = next((r for r in open_ranks if states[r] is State.RUNNING), open_ranks[0] if open_ranks else 0)
        return RanksTimeout(text, rank, message=why)

    def _others(self, except_rank: int | None = None) -> str:
        """One line for each rank: where it stands."""
        rows = ["Where each rank stands:" if except_rank is None else "The other ranks:"]
        for rank, state in enumerate(self._states()):
            if rank == except_rank:
                continue
            row = standing(self.stories[rank], state, self._stack(rank) if state is State.RUNNING else "")
            if state is State.FAILED:
                answer = self.answers[rank]
                first_line = answer.message.partition("\n")[0][:160]
                row = f"lost its connection, {row}" if answer.communication else f"raised {answer.exception_type}: {first_line}"
            if state is State.DEAD:
                row = f"died: {_ending(self.processes[rank].exitcode)}; was {row}"
            rows.append(f"  rank {rank}  {row}")
        return "\n".join(rows) if len(rows) > 1 else ""

    def _stack(self, rank: int) -> str:
        """At which line a rank computes, asked of the rank itself."""
        file = self.folder / f"stack-{rank}"
        with contextlib.suppress(OSError):
            os.kill(self.processes[rank].pid, FAULT_SIGNAL)
            for _ in range(20):
                time.sleep(0.01)
                frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', file.read_text())
                theirs = [f for f in frames if not f[0].startswith(calls.LIBRARIES)]
                if frames:
                    filename, number, _ = (theirs or frames)[0]
                    return f", at {line((filename, int(number)))}"
        return ""

    def print_output(self) -> None:
        for output in self.output:
            output.print_rest()


class _Output:
    """What one rank has printed: read from its files, printed here line by line with the rank in front."""

    def __init__(self, folder: Path, rank: int):
        self._mark = f"[rank {rank}] "
        self._files = [(folder / f"out-{rank}", "stdout"), (folder / f"err-{rank}", "stderr")]
        self._read = {"stdout": 0, "stderr": 0}

    def print_new(self, rest: bool = False) -> None:
        for path, name in self._files:
            if name == "stderr" and not rest:
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(self._read[name])
                    new = file.read()
            except FileNotFoundError:
                continue
            if not rest:
                new = new[: new.rfind(b"\n") + 1]
            self._read[name] += len(new)
            stream = getattr(sys, name)
            for text in new.decode(errors="replace").splitlines():
                stream.write(f"{self._mark}{text}\n")
            if new:
                stream.flush()

    def print_rest(self) -> None:
        self.print_new(rest=True)


def _ending(code: int | None) -> str:
    """What an exit code means."""
    if code is None:
        return "it does not answer"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = " (killed from outside; when memory ran out, by the system)" if name == "SIGKILL" else ""
    return f"{name}{hint}"


def _tail(path: Path, lines: int = 15) -> str:
    """The last lines of a file of messages, indented; empty if there are none."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return ""
    return "\n  its last words:\n" + _indent("\n".join(text.splitlines()[-lines:]), 4) if text else ""


def _indent(text: str, by: int = 2) -> str:
    return "".join(" " * by + row for row in text.splitlines(keepends=True))


def _with_cells(text: str) -> str:
    return re.sub(r'File "([^"]+)"', lambda m: m[0] if (name := cell_name(m[1])) == m[1] else name, text)
