"""Bytes that one rank holds for each parameter after backward, and at the peak of a step, beside theory.

    python benchmarks/memory.py                   # 2 ranks, GPT of 4.8 M parameters, fp32, AdamW
    python benchmarks/memory.py --ranks 4

States are weights, gradients and the optimizer's. The peak counts activations and communication buffers, too. Compared with
theory is what a rank holds after the backward of its third step.
"""

import argparse

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from step_time import CONTESTANTS
from torch.optim.optimizer import register_optimizer_step_pre_hook

import minizero as mz
from minizero import data
from minizero.model import GPT

STAGE = {  # of the ZeRO paper; fp32 throughout, so 4 + 4 + 8 bytes a parameter
    "torch DDP": 0,
    "minizero DDP": 0,
    "torch DDP + ZeroRedundancyOptimizer": 1,
    "minizero Zero1": 1,
    "minizero Zero2": 2,
    "torch FSDP2": 3,
    "minizero Zero3": 3,
}


def measure(rank: int, name: str) -> tuple[float, float, float]:
    """Bytes a parameter: after backward, at the peak, and by theory."""
    torch.manual_seed(0)
    held = []
    with mz.record_memory() as m:
        at_entry = m.total
        model = GPT.preset("small").to(mz.device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        psi = sum(param.numel() for param in model.parameters())
        step = CONTESTANTS[name](model, optimizer)
        del optimizer  # some contestants build another
        hold = register_optimizer_step_pre_hook(lambda *_: held.append(m.total - at_entry))
        start = m.curve()[0][-1]
        for x, y in data.batches("train", 4 * dist.get_world_size(), 128, 3, rank=rank, world_size=dist.get_world_size()):
            step(x.to(mz.device()), y.to(mz.device()))
        hold.remove()
    times, by_kind = m.curve()
    peak = sum(by_kind.values())[times > start].max() - at_entry
    theory = sum(mz.theory.memory(STAGE[name], psi, dist.get_world_size(), precision=None).values())
    return held[-1] / psi, peak / psi, theory / psi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    table = Table(title=f"{options.ranks} ranks, GPT of 4.8 M parameters, fp32, AdamW: bytes a parameter")
    for column in ("engine", "after backward", "theory", "over theory", "peak"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name in STAGE:
        held, peak, theory = mz.launch(measure, options.ranks, name, timeout=600, device=options.device)[0]
        table.add_row(name, f"{held:.2f}", f"{theory:.2f}", f"{held / theory:.3f}", f"{peak:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
