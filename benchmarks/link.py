"""Step time and hidden communication on a simulated link, measured beside what the cost model predicts, over bandwidths.

    python benchmarks/link.py                     # 2 ranks, 12 blocks
    python benchmarks/link.py --ranks 4 --rows 4

The computing is real: in each round it is measured without the link, beside the steps on it, and the model (lens/theory.py) plays
the step with it. A share of 1 is the link on which a block's gather takes as long as its forward; link/real is the time that the
link lets all collectives of a step take, over what they really take. The model knows the link alone: it holds where that is large.
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

DEPTHS = {"Zero3": 0, "prefetch, depth 1": 1, "prefetch, depth 2": 2}


def build(depth: int) -> mz.Zero3:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=70, context=128, layers=12, heads=4, width=128)).to(mz.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return mz.Zero3Prefetch(model, optimizer, depth=depth) if depth else mz.Zero3(model, optimizer)


def step(engine, batch):
    """Its timeline; all ranks begin together."""
    x, y = (tensor.to(mz.device()) for tensor in batch)
    dist.barrier()
    with mz.record_timeline() as timeline:
        engine.backward(engine(x, y))
        engine.step()
    return timeline


def computed(timelines, what):
    """The segments of a typical step, the slowest rank's."""
    runs = [timeline.segments(what) for timeline in timelines]
    seconds = torch.tensor([statistics.median(run[i][1] for run in runs) for i in range(len(runs[0]))], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return [(unit, value) for (unit, _), value in zip(runs[0], seconds.tolist(), strict=True)]


def median_of(timelines, *whats):
    return statistics.median(sum(event.seconds for event in timeline.of(*whats)) for timeline in timelines)


def measure(rank, rows, shares, rounds):
    """For each share: the link's bandwidth, its seconds of communication over the real ones, and a row for each engine."""
    n = dist.get_world_size()
    batches = list(data.batches("train", rows * n, 128, 4, rank=rank, world_size=n))
    engines = {name: build(depth) for name, depth in DEPTHS.items()}
    for engine in engines.values():
        warm = [step(engine, batch) for batch in batches[:3]]
        if engine is engines["Zero3"]:
            nbytes = {event.unit: event.nbytes for event in warm[-1].of("gather") if event.unit != "buffers"}
            control = next(event.nbytes for event in warm[-1].of("reduce") if event.unit == "control")
    results = []
    for share in shares:
        forward = computed([step(engines["Zero3"], batch) for batch in batches], "forward")
        block = statistics.median(seconds for unit, seconds in forward if unit != "root")
        bandwidth = theory.seconds("all_gather", nbytes["blocks.0"], n, 1.0) / (share * block)
        plain, linked = [], {name: [] for name in engines}
        for i in range(rounds):  # side by side, since a machine's speed changes from one second to the next
            plain.append(step(engines["Zero3"], batches[i % 4]))
            with mz.link(bandwidth):
                for name, engine in engines.items():
                    linked[name].append(step(engine, batches[i % 4]))
        forward, backward, rest = computed(plain, "forward"), computed(plain, "backward"), median_of(plain, "step")
        row = []
        for name, timelines in linked.items():
            seconds = statistics.median(max(e.end for e in t.events) - t.events[0].start for t in timelines)
            predicted = theory.schedule(forward, backward, nbytes, n, bandwidth, depth=DEPTHS[name], rest=rest, control=control)
            row.append((name, seconds, predicted.seconds, 1 - median_of(timelines, "wait") / predicted.communication, predicted.hidden))
        results.append((share, bandwidth, predicted.communication / median_of(plain, "gather", "reduce"), row))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="texts of 128 tokens, for each rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1, 2, 4], help="seconds of a gather over those of a forward")
    options = parser.parse_args()
    table = Table(
        title=f"{options.ranks} ranks, 12 blocks, simulated link",
        caption="medians; link/real: communication as modelled over as it is; predicted by minizero.lens.theory.schedule",
    )
    for column in ("gather/forward", "MB/s", "link/real", "engine", "ms a step", "predicted", "measured/predicted", "hidden", "predicted"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    results = mz.launch(measure, options.ranks, options.rows, options.shares, options.rounds, timeout=1800, device="cpu")[0]
    for share, bandwidth, over_real, row in results:
        for name, seconds, predicted, hidden, hidden_predicted in row:
            table.add_row(f"{share:g}", f"{bandwidth / 1e6:.0f}", f"{over_real:.1f}", name, f"{1e3 * seconds:.0f}", f"{1e3 * predicted:.0f}",
                          f"{seconds / predicted:.2f}", f"{hidden:.0%}", f"{hidden_predicted:.0%}")  # fmt: skip
    Console(width=124).print(table)


if __name__ == "__main__":
    main()
