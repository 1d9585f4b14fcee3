"""Run a function on N ranks: real processes that form a process group, from a notebook, a script or torchrun.

    results = launch(fn, 4)              # start four ranks, run fn(rank) on each, end them
    ranks = Ranks(4); ranks.run(fn)      # the same, with processes that stay warm between calls

A rank that raises, dies, hangs or deadlocks is an error here, with its own source line and where the others stand.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from minizero.parts import comm
from minizero.ranks.pool import Pool
from minizero.ranks.run import RankError, RanksTimeout
from minizero.ranks.shipping import pack

__all__ = ["RankError", "Ranks", "RanksTimeout", "device", "init", "launch"]

device = comm.device


def launch(fn: Callable, world_size: int, *args: Any, timeout: float = 60, device: str = "auto") -> list:
    """Start `world_size` ranks, run `fn(rank, *args)` on each, end them, and return the results in rank order.

    Parameters and errors are those of `Ranks` and `Ranks.run`. RuntimeError under torchrun.
    """
    __tracebackhide__ = True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "torchrun has started this script as one of its ranks, and each of them would start ranks of its own: call mz.init() in "
            "place of mz.launch(), or run the script without torchrun"
        )
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
        atexit.register(_leave)


def _leave() -> None:
    """At the end of the process. gloo's threads abort one that ends while they run, and only a collected group ends them."""
    comm.leave()
    gc.collect()


class Ranks:
    """`world_size` processes that form a process group and stay warm between runs.

    world_size: number of ranks, at least 1
    timeout: seconds that one run may take; starting the processes has a deadline of its own
    device: "auto" takes NCCL and one GPU a rank where there are enough, else gloo on the CPU, and says so once;
        "cpu"; "cuda" (an error with fewer GPUs than ranks); "cuda:0" puts all ranks on that GPU, with gloo

    Each run starts from the same state: seed 0, float32, gradients on, one thread, the parent's path, folder and
    environment, and a process group without unfinished calls. The processes are started anew after a failure that some
    of them did not survive, and when a file that they have imported was edited.
    """

    def __init__(self, world_size: int, timeout: float = 60, device: str = "auto"):
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size is the number of ranks, an int; got {world_size!r}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {world_size}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout is a number of seconds; got {timeout!r}")
        if not 0 < timeout <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout must be positive (seconds for one run), and not endless; got {timeout!r:.40}")
        self.world_size = world_size
        self.timeout = timeout
        self._backend, self._devices = _choose(str(device), world_size)
        self._lock = threading.RLock()
        self._pool: Pool | None = None
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
            raise TypeError(f"run(fn, *args) needs a function of the rank; got a {type(fn).__name__}: {fn!r:.80}")
        try:
            payload = pack((fn, args))
        except Exception as error:
            raise TypeError(
                f"{getattr(fn, '__name__', fn)!s} and its arguments cannot be sent to the ranks: {error}. "
                "Make what cannot be pickled (locks, open files, generators, process groups) inside the function"
            ) from error
        with self._lock:
            if self._closed:
                raise RuntimeError("these ranks are closed: make new ones with mz.Ranks(world_size)")
            pool = self._start()
            try:
                pool.wait_until_ready()
                return pool.run(payload, self.timeout)
            except BaseException as error:
                if self._closed:
                    raise RuntimeError("these ranks were closed during a run") from error
                if pool.broken:
                    pool.end()
                if isinstance(error, RankError) and pool.ready:
                    self._start()  # warm again by the time that the message has been read
                if isinstance(error, (RankError, KeyboardInterrupt)):
                    # Its traceback tells how it was noticed, not how it happened.
                    raise error.with_traceback(None) from error.__cause__
                raise

    def close(self) -> None:
        """End the processes, also in the middle of a run. Closing twice is fine."""
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

    def _start(self) -> Pool:
        if self._pool is not None and not self._pool.usable():
            self._pool.end()
            self._pool = None
        if self._pool is None:
            self._pool = Pool(self.world_size, self._backend, self._devices)
        return self._pool


_said: set[str] = set()


def _choose(device: str, world_size: int) -> tuple[str, list[str]]:
    """The backend, and a device for each rank."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        enough = gpus >= world_size
        chosen = _choose("cuda" if enough else "cpu", world_size)
        why = f"{gpus} GPU{'s' * (gpus != 1)} found" if gpus else "no GPU found"
        how = "on one GPU each, with NCCL" if enough else "on the CPU, with gloo"
        text = f"minizero: ranks are processes {how} ({why})"
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
