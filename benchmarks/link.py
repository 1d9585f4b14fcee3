"""Step time and hidden communication on a simulated link, measured beside what the cost model predicts, over bandwidths.

    python benchmarks/link.py                     # 2 ranks, 12 blocks
    python benchmarks/link.py --ranks 4 --rows 4

The computing is real, and is measured first, without the link; the model (lens/theory.py) plays the step with it. A share of 1 is
the link on which a block's gather takes as long as its forward.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import minizero as mz
from minizero import data
from minizero.lens import theory
from minizero.model import GPT, GPTConfig

DEPTHS = {"Zero3": 0, "Zero3Prefetch, depth 1": 1, "Zero3Prefetch, depth 2": 2}


def build(depth: int) -> mz.Zero3:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=70, context=128, layers=12, heads=4, width=128)).to(mz.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return mz.Zero3Prefetch(model, optimizer, depth=depth) if depth else mz.Zero3(model, optimizer)


def step(engine, batch):
    x, y = (tensor.to(mz.device()) for tensor in batch)
    engine.backward(engine(x, y))
    engine.step()


def typical(timelines, what):
    """The segments of a typical step, the slowest rank's."""
    runs = [timeline.segments(what) for timeline in timelines]
    seconds = torch.tensor([statistics.median(run[i][1] for run in runs) for i in range(len(runs[0]))], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return [(unit, value) for (unit, _), value in zip(runs[0], seconds.tolist(), strict=True)]


def measure(rank, rows, shares, rounds):
    """For each share and engine: seconds a step and exposed, measured and predicted; and the link's bandwidth."""
    n = dist.get_world_size()
    batches = list(data.batches("train", rows * n, 128, 4, rank=rank, world_size=n))
    engines = {name: build(depth) for name, depth in DEPTHS.items()}
    for engine in engines.values():
        for batch in batches[:3]:
            step(engine, batch)
    results = []
    for share in shares:
        timelines = []
        for i in range(rounds):
            with mz.record_timeline() as timeline:
                step(engines["Zero3"], batches[i % 4])
            timelines.append(timeline)
        forward, backward = typical(timelines, "forward"), typical(timelines, "backward")
        rest = statistics.median(sum(event.seconds for event in timeline.of("step")) for timeline in timelines)
        nbytes = {event.unit: event.nbytes for event in timelines[-1].of("gather") if event.unit != "buffers"}
        control = next(event.nbytes for event in timelines[-1].of("reduce") if event.unit == "control")
        block = statistics.median(seconds for unit, seconds in forward if unit != "root")
        bandwidth = theory.seconds("all_gather", nbytes["blocks.0"], n, 1.0) / (share * block)
        row = []
        with mz.link(bandwidth):
            for name, engine in engines.items():
                timelines = []
                for i in range(rounds + 1):
                    dist.barrier()
                    with mz.record_timeline() as timeline:
                        step(engine, batches[i % 4])
                    timelines.append(timeline)
                seconds = statistics.median(max(e.end for e in t.events) - t.events[0].start for t in timelines[1:])
                waited = statistics.median(sum(event.seconds for event in t.of("wait")) for t in timelines[1:])
                predicted = theory.schedule(forward, backward, nbytes, n, bandwidth, depth=DEPTHS[name], rest=rest, control=control)
                row.append((name, seconds, predicted.seconds, 1 - waited / predicted.communication, predicted.hidden))
        results.append((share, bandwidth, row))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="texts of 128 tokens, for each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1, 2, 4], help="seconds of a gather over those of a forward")
    options = parser.parse_args()
    table = Table(title=f"{options.ranks} ranks, 12 blocks, simulated link", caption="medians; predicted by minizero.lens.theory.schedule")
    for column in ("gather/forward", "MB/s", "engine", "ms a step", "predicted", "measured/predicted", "hidden", "predicted"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for share, bandwidth, row in mz.launch(measure, options.ranks, options.rows, options.shares, options.rounds, timeout=1800, device="cpu")[0]:
        for name, seconds, predicted, hidden, hidden_predicted in row:
            table.add_row(f"{share:g}", f"{bandwidth / 1e6:.0f}", name, f"{1e3 * seconds:.0f}", f"{1e3 * predicted:.0f}", f"{seconds / predicted:.2f}",
                          f"{hidden:.0%}", f"{hidden_predicted:.0%}")  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
