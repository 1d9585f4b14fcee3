"""Step time of each engine over torch DDP's: the same GPT, the same ranks, interleaved rounds in one run, medians.

    python benchmarks/step_time.py                   # 2 ranks, GPT of 4.8 M parameters
    python benchmarks/step_time.py --ranks 4 --rounds 9
"""

import argparse
import gc
import importlib.util
import logging
import operator
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import minizero as mz
from minizero import data
from minizero.model import GPT


def no_communication(model, optimizer):
    """Each rank on its own: what the others are slower by is the price of training one model together."""

    def step(x, y):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_ddp(model, optimizer):
    wrapped = DistributedDataParallel(model)

    def step(x, y):
        wrapped(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_zero1(model, optimizer):
    """torch DDP with a ZeroRedundancyOptimizer, which gives whole parameters to ranks and broadcasts them after the step."""
    settings = {key: value for key, value in optimizer.defaults.items() if key in ("lr", "weight_decay")}
    return torch_ddp(model, ZeroRedundancyOptimizer(model.parameters(), type(optimizer), **settings))


def torch_fsdp2(model, optimizer):
    """FSDP2, each block a unit, as Zero3 has it."""
    mesh = init_device_mesh(mz.device().type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = {key: value for key, value in optimizer.defaults.items() if key in ("lr", "weight_decay")}
    optimizer = type(optimizer)(model.parameters(), **settings)

    def step(x, y):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_3(model, optimizer, **settings):
    """DeepSpeed's stage 3. Without `gradient_clipping: 0.0` it clips at 1.0, and trains another model."""
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)  # it calls torch.distributed's collectives by their old names
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, **settings},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(x, y):
        engine.backward(engine(x, y))
        engine.step()

    return step


def deepspeed_3_freeing(model, optimizer):
    """By default it keeps the weights of a model this small from forward to backward, and small tensors for ever. This one frees."""
    return deepspeed_3(model, optimizer, stage3_max_reuse_distance=0, stage3_max_live_parameters=0, stage3_param_persistence_threshold=0)


def has_deepspeed() -> bool:
    """It is no requirement: pip install deepspeed, and it takes part."""
    return importlib.util.find_spec("deepspeed") is not None


def ours(engine_class, **keywords):
    def build(model, optimizer):
        engine = engine_class(model, optimizer, **keywords)

        def step(x, y):
            engine.backward(engine(x, y))
            engine.step()

        return step

    return build


CONTESTANTS = {
    "torch DDP": torch_ddp,
    "no communication": no_communication,
    "minizero DDP": ours(mz.DDP),
    "torch DDP + ZeroRedundancyOptimizer": torch_zero1,
    "minizero Zero1": ours(mz.Zero1),
    "minizero Zero2": ours(mz.Zero2),
    "torch FSDP2": torch_fsdp2,
    "minizero Zero3": ours(mz.Zero3),
    "minizero Zero3Prefetch": ours(mz.Zero3Prefetch),
    "minizero Zero3Offload": ours(mz.Zero3Offload),
}
if has_deepspeed():
    CONTESTANTS |= {"DeepSpeed 3": deepspeed_3, "DeepSpeed 3, freeing": deepspeed_3_freeing}


def measure(rank: int, rounds: int, steps: int, batch: int) -> dict[str, list[float]]:
    """Seconds a step, one figure a round, for each contestant; the slowest rank's."""
    world_size = dist.get_world_size()
    if has_deepspeed():  # which asks its launcher's variables, and tells of everything
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": mz.device().type}
        logging.disable(logging.WARNING)
    contestants = {}
    for name, build in CONTESTANTS.items():
        torch.manual_seed(0)
        model = GPT.preset("small").to(mz.device())
        contestants[name] = build(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = [
        (x.to(mz.device()), y.to(mz.device()))
        for x, y in data.batches("train", batch * world_size, 128, steps, rank=rank, world_size=world_size)
    ]
    gc.collect()
    gc.freeze()  # or each one's garbage collections look through the models of all
    times = {name: [] for name in contestants}
    for round_number in range(rounds + 1):  # the first warms up
        for name, step in contestants.items():
            dist.barrier()
            begin = time.perf_counter()
            for x, y in batches:
                step(x, y)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = torch.tensor([(time.perf_counter() - begin) / steps])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if round_number:
                times[name].append(seconds.item())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps in a round; in the first the allocator finds its way back")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2], help="texts of 128 tokens, for each rank; a table for each")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    for batch in options.batch:
        times = mz.launch(measure, options.ranks, options.rounds, options.steps, batch, timeout=1800, device=options.device)[0]
        table = Table(title=f"{options.ranks} ranks, GPT of 4.8 M parameters, fp32, AdamW, batch {batch}", caption="medians of rounds")
        others = [name for name in ("torch DDP", "torch FSDP2", "DeepSpeed 3") if name in times]
        for column in ("engine", "ms a step", *(f"over {name.removeprefix('torch ')}" for name in others)):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for name, rounds in times.items():
            ratios = [statistics.median(map(operator.truediv, rounds, times[other])) for other in others]
            table.add_row(name, f"{1e3 * statistics.median(rounds):.0f}", *(f"{ratio:.2f}" for ratio in ratios))
        Console().print(table)


if __name__ == "__main__":
    main()
