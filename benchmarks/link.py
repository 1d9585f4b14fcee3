"""Step time and hidden communication on a simulated link, measured beside what the cost model predicts, over bandwidths.

    python benchmarks/link.py                     # 2 ranks, 12 blocks
    python benchmarks/link.py --ranks 4 --rows 4

The computing is real: in each round it is measured without the link, beside the steps on it, and the model (lens/theory.py) plays
the step with it. A share of 1 is the link on which a block's gather takes as long as its forward; link/real is the time that the
link lets the collectives of a step take, over what those of Zero3 take without it, from request to completion. The model knows the
link alone: it holds where that is large.
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
    """Seconds of these events in a typical step."""
    return statistics.median(sum(event.seconds for event in timeline.of(*whats)) for timeline in timelines)


def measure(rank, rows, shares, rounds):
    """For each share and engine: seconds of communication over the real ones, seconds a step and the hidden share, measured and
    predicted; and the link's bandwidth."""
    n = dist.get_world_size()
    batches = list(data.batches("train", rows * n, 128, 4, rank=rank, world_size=n))
    engines = {name: build(depth) for name, depth in DEPTHS.items()}
    for engine in engines.values():
        for batch in batches[:3]:
            step(engine, batch)
    results = []
    for share in shares:
        trial = [step(engines["Zero3"], batch) for batch in batches]
        nbytes = {event.unit: event.nbytes for event in trial[-1].of("gather") if event.unit != "buffers"}
        control = next(event.nbytes for event in trial[-1].of("reduce") if event.unit == "control")
        block = statistics.median(seconds for unit, seconds in computed(trial, "forward") if unit != "root")
        bandwidth = theory.seconds("all_gather", nbytes["blocks.0"], n, 1.0) / (share * block)
        plain, linked = [], {name: [] for name in engines}
        for i in range(rounds):  # side by side, since a machine's speed changes from one second to the next
            batch = batches[i % len(batches)]
            plain.append(step(engines["Zero3"], batch))
            with mz.link(bandwidth):
                for name, engine in engines.items():
                    linked[name].append(step(engine, batch))
        forward, backward, rest = computed(plain, "forward"), computed(plain, "backward"), median_of(plain, "step")
        communication, row = median_of(plain, "gather", "reduce"), []
        for name, timelines in linked.items():
            seconds = statistics.median(max(e.end for e in t.events) - t.events[0].start for t in timelines)
            predicted = theory.schedule(forward, backward, nbytes, n, bandwidth, depth=DEPTHS[name], rest=rest, control=control)
            hidden = 1 - median_of(timelines, "wait") / predicted.communication
            row.append((name, predicted.communication / communication, seconds, predicted.seconds, hidden, predicted.hidden))
        results.append((share, bandwidth, row))
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
    for column in ("gather/forward", "MB/s", "engine", "link/real", "ms a step", "predicted", "measured/predicted", "hidden", "predicted"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    results = mz.launch(measure, options.ranks, options.rows, options.shares, options.rounds, timeout=1800, device="cpu")[0]
    for share, bandwidth, row in results:
        for name, over_real, seconds, predicted, hidden, hidden_predicted in row:
            table.add_row(f"{share:g}", f"{bandwidth / 1e6:.0f}", name, f"{over_real:.1f}", f"{1e3 * seconds:.0f}", f"{1e3 * predicted:.0f}",
                          f"{seconds / predicted:.2f}", f"{hidden:.0%}", f"{hidden_predicted:.0%}")  # fmt: skip
    Console(width=124).print(table)


if __name__ == "__main__":
    main()
