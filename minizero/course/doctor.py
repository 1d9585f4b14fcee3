"""Can this machine run the course? One line for each thing it needs, with the cure where it is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

GIGABYTE = 1e9


@dataclass
class Line:
    """One finding of the doctor. `essential`: the course cannot run without it."""

    ok: bool
    text: str
    cure: str = ""
    essential: bool = True


def examine() -> Iterator[Line]:
    """All lines, one by one as they are found."""
    yield Line(sys.version_info >= (3, 10), f"Python {sys.version.split()[0]}", "take Python 3.10 or newer")
    try:
        import torch
    except Exception as error:
        yield Line(False, f"PyTorch cannot be imported: {error}", "pip install torch")
        return
    yield Line(
        torch.distributed.is_available(),
        f"PyTorch {torch.__version__}",
        "this build has no torch.distributed: take PyPI's",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Line(cores > 1, f"{cores} core{'s' * (cores != 1)}", "it works, with ranks that take turns", essential=False)
    gpus = torch.cuda.device_count()
    yield Line(
        True,
        f"{gpus} GPU{'s' * (gpus != 1)}" + ("" if gpus else ": ranks run on the CPU, which is all the course needs"),
    )
    free = _free_memory()
    if free is not None:
        yield Line(
            free > 2 * GIGABYTE,
            f"{free / GIGABYTE:.1f} GB of memory free",
            "close something: four ranks take 2 GB",
            essential=False,
        )
    missing = [name for name in ("jupyterlab", "ipykernel", "nbclient") if importlib.util.find_spec(name) is None]
    yield Line(
        not missing, f"without {', '.join(missing)}" if missing else "JupyterLab", f"pip install {' '.join(missing)}"
    )
    yield _two_ranks()


def _two_ranks() -> Line:
    import minizero as mz

    began = time.monotonic()
    try:
        with mz.Ranks(2, timeout=30, device="cpu") as ranks:
            sums = ranks.run(_sum_of_ranks)
    except Exception as error:
        return Line(
            False,
            f"two ranks cannot talk to each other: {error}",
            "a firewall or sandbox that forbids connections to itself?",
        )
    took = time.monotonic() - began
    return Line(
        sums == [3.0, 3.0],
        f"two ranks all-reduced 1 + 2 = {sums[0]:g} with gloo, {took:.1f} s from start to end",
        "reinstall PyTorch",
    )


def _sum_of_ranks(rank: int) -> float:
    import torch

    number = torch.tensor(rank + 1.0)
    torch.distributed.all_reduce(number)
    return number.item()


def _free_memory() -> float | None:
    """Bytes that new processes can take; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
