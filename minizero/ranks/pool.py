"""The processes behind `Ranks`, from their start to their end."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path

import torch.multiprocessing as mp

import minizero.ranks.worker as worker
from minizero.ranks.run import RankError, RanksTimeout, Run, ending, tail

START_TIMEOUT = 120.0  # s, until all ranks have imported torch; apart from the deadline of a run


class Pool:
    """Processes that wait for functions to run. `broken`: one of them is lost, and the pool can only be ended."""

    def __init__(self, world_size: int, backend: str, devices: list[str]):
        self.broken = False
        self.ready = False
        self._clean = False  # the process group can serve the next run
        self._runs = 0
        self._imported: dict[str, int] = {}  # files that the ranks have read -> time of their last change
        self._folder = Path(tempfile.mkdtemp(prefix="minizero-"))
        self._pipes: list[connection.Connection] = []  # orders and answers
        self._controls: list[connection.Connection] = []  # to a rank that may not come back to its pipe
        self._processes: list[mp.Process] = []
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._processes, (self._pipes, self._controls), self._folder
        )
        self._finalizer.atexit = False
        # At exit multiprocessing waits for its children, who do not end by themselves. This runs before it.
        atexit.register(self._finalizer)
        try:
            with _no_main():
                for rank in range(world_size):
                    self._spawn(rank, world_size, backend, devices[rank])
        except BaseException:
            self.end()
            raise

    def _spawn(self, rank: int, world_size: int, backend: str, device: str) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        obeyed, control = context.Pipe(duplex=False)
        arguments = (rank, world_size, backend, device, theirs, obeyed, str(self._folder), os.getpid())
        process = context.Process(target=worker.main, args=arguments, name=f"minizero rank {rank}")
        self._pipes.append(ours)
        self._controls.append(control)
        self._processes.append(process)
        with theirs, obeyed:  # ours are closed once the rank has its own
            process.start()

    def usable(self) -> bool:
        """All ranks are alive, and none has imported a file that was edited since: it would run the old code."""
        alive = self._finalizer.alive and all(process.is_alive() for process in self._processes) and self._folder.exists()
        return alive and not self.broken and all(_changed(file) == time for file, time in self._imported.items())

    def end(self) -> None:
        with _uninterrupted():
            self._finalizer()
        atexit.unregister(self._finalizer)

    def wait_until_ready(self) -> None:
        if self.ready:
            return
        self.broken = True
        deadline = time.monotonic() + START_TIMEOUT
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            try:
                if not pipe.poll(max(0, deadline - time.monotonic())):
                    raise RanksTimeout(f"rank {rank} did not start within {START_TIMEOUT:.0f} s", rank)
                pipe.recv()
            except (EOFError, OSError):
                process.join(5)
                code, said = ending(process.exitcode), tail(self._folder / f"err-{rank}")
                raise RankError(f"rank {rank} could not start: {code}{said}", rank, "ProcessDied", code) from None
        self.broken, self.ready = False, True

    def run(self, payload: bytes, timeout: float) -> list:
        folder = self._folder / f"run-{self._runs}"
        rendezvous = None if self._clean else self._folder / f"rendezvous-{self._runs}"  # subgroups need it later, too
        folder.mkdir()
        self._runs += 1
        run = Run(self._processes, self._pipes, self._controls, folder, timeout)
        self.broken, self._clean = True, False  # until we know better, also if this is interrupted
        try:
            run.start(payload, rendezvous)
            run.wait()
            self.broken = False
            self._clean = run.left_clean()
            return run.results()
        except RankError:
            self.broken = not run.released()
            raise
        except KeyboardInterrupt:
            run.tell_where()
            raise
        finally:
            run.print_output()
            self._imported.update(run.imported())
            shutil.rmtree(folder, ignore_errors=True)


_hiding = threading.Lock()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """While a process is spawned, hide `__main__`: the child would import it again, and a script without a
    `if __name__ == "__main__"` guard would start its ranks again. Functions of `__main__` travel by value."""
    with _hiding:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Who interrupts a run often does so twice, and the second time must not keep us from cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)


def _changed(file: str) -> int:
    """When the file was last changed, in ns; 0 if it is gone."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def _end(owner: int, processes: list, pipes: tuple[list, ...], folder: Path) -> None:
    """End a pool's processes and what they started. Also called at exit, and when a pool is forgotten."""
    if os.getpid() != owner:  # a fork of the parent must not end its ranks
        return
    for pipe in itertools.chain(*pipes):
        pipe.close()
    started = [process for process in processes if process.pid is not None]
    for process in started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
        process.kill()
    for process in started:
        process.join(5)
        with contextlib.suppress(ValueError):
            process.close()
    shutil.rmtree(folder, ignore_errors=True)
