"""The checks of exercises/02_zero1.ipynb.

Gradients that a check makes up are 10^rank times (1, 2, 3, …), so that the digits of a sum say whose values are in it. What an
answer should end with is computed here by one process on the whole vector; what known mistakes end with, in the same way.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import minizero as mz
from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, shorten, show

_SLACK = 64  # bytes: step counts and the like

# --- what an answer sends, keeps and steps with ---------------------------------------------------------


def _sent(traffic) -> list[tuple]:
    """(op, numel, dtype, by minizero's own engine, complete) of each collective."""
    return [(op.op, op.numel, op.dtype, bool(op.unit), op.end is not None) for op in traffic.ops]


def _check_complete(expect: Expect, rank: int, sent: list[tuple]) -> None:
    engine = any(by_engine for *_, by_engine, _ in sent)
    expect.that(not engine, "you build it from torch.distributed", got="minizero's own step at work", cause="it may be read, but not used")
    still_open = sum(not complete for *_, complete in sent)
    expect.that(
        not still_open, "every collective is waited for", "all waited for", f"{still_open} of {len(sent)} still open on rank {rank}",
        "what is read meanwhile may be half old, half new", "async_op=True returns a work, and its wait() is missing",
    )  # fmt: skip


def _check_sent(
    rank: int, sent: list[tuple], want: list[tuple[str, int]], dtype: str, rule: str, causes: Mapping[str, str]
) -> None:
    """The collectives (op, elements) that `want` names, in this order, of this dtype; any for dtype "".

    causes: an op that is not wanted, or is issued too often -> the mistake
    """
    # An all-to-all of the chunks and a sum is a reduce-scatter made by hand: it sends as much.
    got = [("reduce_scatter" if op == "all_to_all" else op, numel) for op, numel, *_ in sent]
    dtypes = {each for _, _, each, *_ in sent}
    if got == want and (not dtype or dtypes <= {dtype}):
        return
    extra = Counter(op for op, _ in got) - Counter(op for op, _ in want)
    missing = Counter(op for op, _ in want) - Counter(op for op, _ in got)
    cause = next((text for op, text in causes.items() if op in extra), "")
    if not cause and "barrier" in extra:
        cause = "a barrier is a collective too, and not needed: these wait for the others anyway"
    elif not cause and "send" in extra:
        cause = "single sends may add up to it, but here the collectives are to be called"
    elif not extra and not missing and got == want:
        cause = causes.get("dtype", "")
    elif not extra and not missing and sorted(got) == sorted(want):
        cause = causes.get("order", "")
    elif not cause and not extra and not missing:
        cause = causes.get("numel", "")
    elif not cause and not extra:
        cause = causes.get(f"no {next(iter(missing))}", "")
    raise Finding(rule, _told(want, dtype), f"{_told(got, *dtypes) if got else 'nothing'} on rank {rank}", cause=cause)


def _told(ops: Sequence[tuple[str, int]], *dtypes: str) -> str:
    kinds = f" in {' and '.join(sorted(dtypes))}" if any(dtypes) else ""
    counted = [f"{count} × {op} of {show(numel)}" if count > 1 else f"{op} of {show(numel)}" for (op, numel), count in Counter(ops).items()]
    return ", ".join(counted) + kinds


@contextmanager
def _watched_steps() -> Iterator[list[Optimizer]]:
    """The optimizers whose step() is called, each once."""
    stepped: list[Optimizer] = []

    def note(optimizer: Optimizer, *_: object) -> None:
        if not any(optimizer is each for each in stepped):
            stepped.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield stepped
    finally:
        handle.remove()


def _held(stepped: list[Optimizer]) -> dict:
    """What the last of the optimizers updates and remembers."""
    params = [param for group in stepped[-1].param_groups for param in group["params"]] if stepped else []
    states = [stepped[-1].state.get(param, {}).values() for param in params]
    moments = [value for state in states for value in state if isinstance(value, Tensor) and value.dim()]
    return {
        "optimizers": len(stepped),
        "updates": sum(param.numel() for param in params),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in params}),
        "state": sum(value.numel() for value in moments),
        "values": torch.cat([param.detach().flatten().float() for param in params]) if params else None,
    }


def _check_held(expect: Expect, rank: int, held: dict, P: int, world_size: int, moments: int) -> None:
    """One optimizer, over the shard alone, with `moments` tensors of state."""
    S = P // world_size
    expect.that(
        held["optimizers"], "the shard is updated by a torch optimizer", f"one optimizer over {S:,} elements", f"none on rank {rank}",
        cause="the update is computed by hand, or nothing is updated: build optimizer_class([shard], lr=lr), and call its step()",
    )  # fmt: skip
    whole = "the optimizer is given all weights: it keeps state for all of them, also for those that it never moves"
    expect.that(
        held["updates"] == S, "a rank's optimizer holds its shard and nothing else", f"{S:,} elements", f"{held['updates']:,} on rank {rank}",
        f"there is as much optimizer state as without ZeRO: N = {world_size} times what is needed" if held["updates"] == P else "",
        whole if held["updates"] == P else "",
    )  # fmt: skip
    expect.that(
        held["state"] == moments * S, "a rank keeps optimizer state for its shard alone", f"{moments * S:,} elements of moments",
        f"{held['state']:,} on rank {rank}",
    )  # fmt: skip


def _check_one_optimizer(expect: Expect, rank: int, held: dict) -> None:
    expect.that(
        held["optimizers"] == 1, "one optimizer lives as long as the training", "1 optimizer", f"{held['optimizers']} on rank {rank}",
        "momentum and Adam's moments begin at zero in every step", "a new optimizer is built in each step",
    )  # fmt: skip


def _total(memory) -> int:
    gc.collect()
    return memory.total


# --- training that one process can repeat ----------------------------------------------------------------


def _mean(rank: int, grads: Sequence[Tensor]) -> Tensor:
    return sum(grads) / len(grads)


def _sum(rank: int, grads: Sequence[Tensor]) -> Tensor:
    return sum(grads)


def _own(rank: int, grads: Sequence[Tensor]) -> Tensor:
    return grads[rank]


def _twice(rank: int, grads: Sequence[Tensor]) -> Tensor:
    return sum(grads) / len(grads) ** 2


def _trained(
    start: Tensor, grads: Sequence, make: Callable, use: Callable = _mean,
    gathered: bool = True, sharded: bool = True, anew: bool = False, world_size: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """Every rank's whole weights after each step: [step][rank].

    grads     [step][rank], each of all P elements; or for each step what makes the ranks' gradients of the ranks' weights
    use       (rank, the ranks' gradients) -> what this rank's optimizer sees
    sharded   a rank keeps the update of its shard alone; gathered: and then has those of all others
    anew      each step has an optimizer of its own
    """
    world_size = world_size or len(grads[0])
    weights = [start.clone() for _ in range(world_size)]
    optimizers = [make([each]) for each in weights]
    history = []
    for step in grads:
        of_ranks = step(weights) if callable(step) else step
        before = [each.clone() for each in weights]
        if anew:
            optimizers = [make([each]) for each in weights]
        for rank, (each, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            each.grad = use(rank, of_ranks).clone()
            optimizer.step()
        shards = [each.chunk(world_size)[rank].clone() for rank, each in enumerate(weights)]
        for rank, each in enumerate(weights):
            if sharded:
                rows = shards if gathered else [*before[rank].chunk(world_size)]
                rows = [shards[rank] if r == rank else row for r, row in enumerate(rows)]
                each.copy_(torch.cat(rows))
        history.append([each.clone() for each in weights])
    return history


def _gradients(world_size: int, numel: int, steps: int) -> list[list[Tensor]]:
    """[step][rank]: 10^rank · (1, 2, 3, …), in later steps times −2 and 3; in long vectors the digits begin again after 6."""
    digits = torch.arange(numel) % 6 + 1.0 if numel > 12 else torch.arange(1.0, numel + 1)
    return [[digits * 10**rank * factor for rank in range(world_size)] for factor in (1, -2, 3)[:steps]]


# --- 1. who owns which elements ------------------------------------------------------------------------------


def _up(numel: int, n: int) -> int:
    return -(-numel // n)


def _spread(numel: int, n: int, r: int) -> tuple[int, int]:
    short, longer = divmod(numel, n)
    start = r * short + min(r, longer)
    return start, start + short + (r < longer)


# What a mistake makes of (start, stop), in every case.
_RANGES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "numel // world_size drops the remainder: round up, so that the padding comes at the end": lambda numel, n, r: (
        r * (numel // n),
        (r + 1) * (numel // n),
    ),
    "the last rank takes the remainder as well: a collective wants shards of one length": lambda numel, n, r: (
        r * (numel // n),
        numel if r == n - 1 else (r + 1) * (numel // n),
    ),
    "the remainder is spread over the first ranks: a collective wants shards of one length, with the padding at the end": _spread,
    "the padding is counted as elements: neither start nor stop is larger than numel": lambda numel, n, r: (
        r * _up(numel, n),
        (r + 1) * _up(numel, n),
    ),
    "stop is cut off at numel, and start is not: a shard may begin behind the last element": lambda numel, n, r: (
        r * _up(numel, n),
        min((r + 1) * _up(numel, n), numel),
    ),
    "where numel is a multiple of world_size, nothing has to be padded": lambda numel, n, r: (
        min(r * (numel // n + 1), numel),
        min((r + 1) * (numel // n + 1), numel),
    ),
    "stop is the element behind the last one": lambda numel, n, r: (
        min(r * _up(numel, n), numel),
        min((r + 1) * _up(numel, n), numel) - 1,
    ),
    "that is (start, length): the third number is where the rank's elements stop": lambda numel, n, r: (
        min(r * _up(numel, n), numel),
        min((r + 1) * _up(numel, n), numel) - min(r * _up(numel, n), numel),
    ),
}
_PADDED: dict[str, Callable[[int, int], int]] = {
    "P is the size with the padding": lambda numel, n: numel,
    "that is S, the size of one shard: P is all of them": _up,
    "where numel is a multiple of world_size, nothing has to be padded": lambda numel, n: numel + n - numel % n,
    "numel is rounded down to a multiple of world_size: round up": lambda numel, n: numel // n * n,
}
# The telling ones first: the finding shows the first that goes wrong.
_SIZES = [(4, 2), (5, 2), (10, 3), (9, 3), (5, 1), (1, 2), (1, 3), (5, 4), (0, 2)]
_SIZES += [(numel, n) for n in range(1, 9) for numel in range(14) if (numel, n) not in _SIZES]


@exercise(
    "zero1.partition",
    call="partition(numel, world_size, rank)",
    hints=[
        "If N shards of S elements are to hold all `numel`, what is the smallest S? Which rank then has too much room, and what does that mean for start and stop?",
        "Divide and round up: -(-a // b), or (a + b - 1) // b. Rank r's shard is [r·S, (r+1)·S) of the padded vector; its elements are "
        "what lies below numel. Together the ranks own each element once.",
        "S is numel / world_size, rounded up. Return S times world_size, then the smaller of rank·S and numel, then the smaller of (rank+1)·S and numel.",
    ],
)
def partition(answer, expect):
    """0 to 13 elements on 1 to 8 ranks: every element has one owner, all shards are equally long, the padding is at the end"""
    cases = [(numel, n, r) for numel, n in _SIZES for r in range(n)]
    causes = {
        "ZeroDivisionError": "it is called as partition(numel, world_size, rank), in this order",
        "IndexError": "torch.chunk gives fewer pieces than asked for where there are few elements: compute the numbers",
    }
    answers = dict(zip(cases, expect.call(_each, answer, cases, causes=causes), strict=True))
    for (numel, n, r), got in answers.items():
        expect.case(world_size=n, numel=numel)
        form = isinstance(got, (tuple, list)) and len(got) == 3 and all(type(each) is int for each in got)
        cause = "a division with / gives a float: // is the one for whole numbers" if "." in repr(got) else ""
        cause = "nothing is returned: a return is missing" if got is None else cause
        expect.that(form, "the answer is three ints", "(P, start, stop)", f"{shorten(repr(got))} for rank {r}", cause=cause)
    ranges = {case: tuple(got[1:]) for case, got in answers.items()}
    range_cause = next((text for text, wrong in _RANGES.items() if all(ranges[c] == wrong(*c) for c in cases)), "")
    padded_cause = next((text for text, wrong in _PADDED.items() if all(answers[c][0] == wrong(*c[:2]) for c in cases)), "")
    for numel, n in _SIZES:
        expect.case(world_size=n, numel=numel)
        _check_ranges(numel, n, [ranges[numel, n, r] for r in range(n)], range_cause)
    for numel, n in _SIZES:
        expect.case(world_size=n, numel=numel)
        for r in range(n):
            expect.equal(
                answers[numel, n, r][0], _up(numel, n) * n, of=f"P on rank {r}", rule="P is the smallest multiple of world_size that holds numel",
                so="the ranks' shards have to add up to it", mistakes={padded_cause: answers[numel, n, r][0]} if padded_cause else {},
            )  # fmt: skip


def _check_ranges(numel: int, n: int, got: list[tuple[int, int]], cause: str) -> None:
    S = _up(numel, n)
    owners = {i: [r for r, (start, stop) in enumerate(got) if start <= i < stop] for i in range(numel)}
    for r, (start, stop) in enumerate(got):
        want = min(r * S, numel), min((r + 1) * S, numel)
        if (start, stop) == want or (start == stop and want[0] == want[1] and 0 <= start <= numel):
            continue
        nobodys = [i for i, who in owners.items() if not who]
        shared = [i for i, who in owners.items() if len(who) > 1]
        so = ""
        if nobodys:
            so = f"element {nobodys[0]} belongs to nobody: its weight is never updated"
        elif shared:
            so = f"element {shared[0]} belongs to ranks {' and '.join(map(str, owners[shared[0]]))}"
        elif stop > numel or start > numel:
            so = f"there is no element {stop - 1 if stop > numel else start}"
        elif len({b - a for a, b in got}) > 1 or stop - start > S:
            so = f"rank 0 has {got[0][1] - got[0][0]} elements, rank {n - 1} has {got[-1][1] - got[-1][0]}; S is {S}, and the last ones have the padding"
        rule = "every element belongs to exactly one rank" if nobodys or shared else "rank r owns what the r-th shard has besides padding"
        raise Finding(rule, f"rank {r} owns [{want[0]}, {want[1]})", f"[{start}, {stop})", so, cause)


def _each(answer, cases):
    return [answer(*case) for case in cases]


# --- 2. where 16 bytes a parameter come from -----------------------------------------------------------------

_KINDS = ("weights", "gradients", "master", "momentum", "variance")


@exercise(
    "zero1.bytes",
    call="model_states(numel, world_size)",
    hints=[
        "Which of the five does a rank need for all elements, because it computes with them? Which does it need only for the elements that it updates?",
        "16 bits are 2 bytes, fp32 is 4. Forward and backward run on every rank over the whole model. P and S come from partition().",
        "weights and gradients: 2 bytes times P. master, momentum, variance: 4 bytes times S, S being numel / world_size rounded up, and P its product with world_size.",
    ],
)
def model_states(answer, expect):
    """each kind for 6 sizes on 1 to 64 ranks, padding included; 7.5 B parameters on 64 ranks take 31.4 GB each, not 120"""
    cases = [(8, 1), (8, 2), (10, 3), (1, 3), (13, 4), (7_500_000_000, 64)]
    for (numel, n), got in zip(cases, expect.call(_each, answer, cases), strict=True):
        expect.case(numel=numel, world_size=n)
        cause = "nothing is returned: a return is missing" if got is None else ""
        told = ", ".join(map(str, got)) if isinstance(got, dict) else show(got)
        expect.that(
            isinstance(got, dict) and set(got) == set(_KINDS), "the answer is a dict with these five keys", ", ".join(_KINDS), told, cause=cause,
        )  # fmt: skip
        S = _up(numel, n)
        P = S * n
        for kind in _KINDS[:2]:
            mistakes = {
                "padding has bytes too: the buffers have P elements": 2 * numel,
                f"{kind} have 16 bits, which are 2 bytes": 4 * P,
                f"ZeRO-1 shards what belongs to the optimizer: each rank holds all {kind}": 2 * S,
                f"ZeRO-1 shards what belongs to the optimizer, and not {kind}, padding included": 2 * numel / n,
                "that is the number of elements: each has 2 bytes": P,
            }
            why = "computes with all weights" if kind == "weights" else "computes a gradient for every weight"
            expect.equal(got[kind], 2 * P, of=f"bytes of {kind}", rule=f"a rank {why}", mistakes=mistakes)
        for kind in _KINDS[2:]:
            mistakes = {
                f"every rank would hold the whole {kind}: that is DDP": 4 * P,
                f"that is the whole {kind}, as in DDP, and without padding": 4 * numel,
                f"{kind} is fp32, 4 bytes an element": 2 * S,
                "the shards are padded to one length: round up": 4 * (numel // n),
                "there are no halves of an element: a shard has S elements, rounded up": 4 * numel / n,
                "that is the number of elements: each has 4 bytes": S,
                "Adam's step count is not counted": 4 * S + 4,
                "that is master and moments together: each of the three has a key of its own": 12 * S,
                "that is what this rank's elements take: the padding in its shard has bytes too": 4 * max(0, min(S, numel - (n - 1) * S)),
            }
            expect.equal(got[kind], 4 * S, of=f"bytes of {kind}", rule="a rank holds optimizer state for its shard", mistakes=mistakes)




# --- 3. the sharded step -----------------------------------------------------------------------------------

_LIKE_3 = {
    "deadlock": "all ranks issue the same collectives in the same order",
    "has no attribute 'step'": "the class needs a method step(grad_P)",
    "optimize a non-leaf": "autograd has a hand in the shard: take the slice from a tensor that needs no gradient, or detach it",
    "a view of a leaf": "autograd watches the weights: write to a tensor that needs no gradient, or under torch.no_grad()",
    "assign a gradient": "a .grad has its tensor's shape and dtype: give the shard the shard's gradient",
    "check failed": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second",
    "invalid tensor size": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second",
    "output tensor size": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second",
}


@exercise(
    "zero1.sharded_step",
    call="ShardedStep(weights_P, optimizer_class, lr), then .step(grad_P)",
    points=2,
    hints=[
        "An all-reduce is two collectives, one after the other. What does a rank have between the two, and is it enough to update a part of the weights?",
        "reduce_scatter(out_S, grad_P) leaves the sum of this rank's shard; all_gather(weights_P, weights_S) brings all shards to all. weights_P.chunk(N)[rank] "
        "is a view: an optimizer that is built over it writes into weights_P.",
        "In __init__: keep weights_P, take this rank's slice, build optimizer_class([slice], lr=lr). In step: reduce_scatter into the slice's .grad, divide "
        "it by the world size, optimizer.step(), all_gather the slice into weights_P.",
    ],
)
def sharded_step(answer, expect):
    """SGD and Adam on 2 and 3 ranks against one process; one reduce_scatter, one all_gather; S elements updated, 2 S of Adam's state, no more kept"""
    _sharded(answer, expect, "one step of SGD", 2, SGD, 1.0, 4, 1)
    _sharded(answer, expect, "2 steps of SGD", 3, SGD, 1.0, 6, 2)
    _sharded(answer, expect, "3 steps of Adam, shards of one element", 2, Adam, 0.5, 2, 3)
    _sharded(answer, expect, "3 steps of Adam", 3, Adam, 0.5, 3000, 3)


def _sharded(answer, expect: Expect, text: str, world_size: int, kind: type[Optimizer], lr: float, P: int, steps: int) -> None:
    expect.case(text, world_size=world_size, P=P)
    start = torch.arange(1.0, P + 1) * 100 if P < 10 else torch.arange(float(P)) % 7
    grads = _gradients(world_size, P, steps)
    outcomes = expect.run(_sharded_program, world_size, answer, start, grads, kind, lr, causes=_LIKE_3)
    make = partial(kind, lr=lr)
    want, mistakes = _trained(start, grads, make), _trained_wrongly(start, grads, make)
    S = P // world_size
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        for step, each in enumerate(value["steps"]):
            _check_complete(expect, rank, each["sent"])
            wrong = {text: history[step][rank] for text, history in mistakes.items()}
            if step == 0:
                shards = torch.cat([start[:S]] * world_size)
                wrong["every rank updates the first shard: rank r's is the r-th"] = _trained(shards, grads[:1], make)[0][0]
            expect.equal(
                each["weights"], want[step][rank], of=f"weights_P on rank {rank} after step {step + 1}",
                rule="the weights are those of one process with the mean gradient, on every rank", so="this is another training run",
                mistakes=wrong, tol=1e-5,
            )  # fmt: skip
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        _check_sent(
            rank, value["at the start"], [], "", "weights_P is equal on all ranks already: at the start nothing is sent",
            {"broadcast": "the weights are broadcast: they are equal on all ranks"},
        )  # fmt: skip
        for each in value["steps"]:
            _check_sharded_traffic(rank, each["sent"], P)
        _check_held(expect, rank, value["held"], P, world_size, 2 if kind is Adam else 0)
        _check_one_optimizer(expect, rank, value["held"])
        limit = (4 if kind is Adam else 2) * S * 4 + _SLACK
        expect.that(
            value["kept"] <= limit or P < 100, "between two steps a rank keeps its optimizer's state, and at most two shards besides", f"at most {limit:,} bytes more than before",
            f"{value['kept']:,} on rank {rank}", f"{P:,} fp32 elements are {4 * P:,} bytes", "a whole gradient, or a copy of all weights, stays alive after step()",
        )  # fmt: skip


def _trained_wrongly(start: Tensor, grads: list[list[Tensor]], make: Callable) -> dict[str, list[list[Tensor]]]:
    """Mistakes, and where they lead: [step][rank]. In the first step some lead to the same weights; then the first is named."""
    piled = [[sum(each[rank] for each in grads[: i + 1]) for rank in range(len(grads[0]))] for i in range(len(grads))]
    still = [[start] * len(grads[0])] * len(grads)
    return {
        "the ranks' gradients are summed, not averaged: divide the shard by world_size": _trained(start, grads, make, _sum),
        "the gradient is divided twice by world_size": _trained(start, grads, make, _twice),
        "each rank updates its shard and keeps it to itself: the all_gather is missing, comes before the update, or gathers into another tensor": _trained(start, grads, make, gathered=False),
        "nothing is reduced: each rank steps with its own gradient": _trained(start, grads, make, _own),
        "nothing is reduced, and nothing gathered: each rank steps with its own gradient": _trained(start, grads, make, _own, sharded=False),
        "the optimizer is built anew in each step: it forgets its moments": _trained(start, grads, make, anew=True),
        "the gradients of earlier steps are still in .grad": _trained(start, piled, make),
        "weights_P stays as it was: the update goes to a copy of it, or the shard has no .grad": still,
    }  # fmt: skip


def _check_sharded_traffic(rank: int, sent: list[tuple], P: int) -> None:
    causes = {
        "all_reduce": "an all_reduce brings every rank the mean of all shards, where it needs one: right numbers, twice the bytes. A reduce_scatter would do",
        "broadcast": "a broadcast from each owner in turn sends P from one rank at a time: one all_gather does it at once",
        "reduce": "a reduce to each owner in turn is a reduce_scatter in N calls: one call does it at once",
        "all_gather": "weights only have to be gathered once: gathering gradients as well sends what nobody needs",
        "reduce_scatter": "one reduce_scatter a step is enough",
        "numel": "both move the whole flat vector, P elements, at once",
        "order": "gathered before the update, the weights are those of the step before",
    }
    want = [("reduce_scatter", P), ("all_gather", P)]
    _check_sent(rank, sent, want, "float32", "a step sends one reduce_scatter and one all_gather, of P elements", causes)


def _sharded_program(rank, answer, start, grads, kind, lr):
    weights_P = start.clone()
    mine = [of_ranks[rank].clone() for of_ranks in grads]
    steps, kept = [], 0
    metered = len(start) > 100
    with _watched_steps() as stepped, mz.record_memory() if metered else nullcontext() as memory:
        before = _total(memory) if metered else 0
        with mz.record_traffic() as traffic:
            engine = answer(weights_P, kind, lr)
        at_start = _sent(traffic)
        for grad in mine:
            with mz.record_traffic() as traffic:
                engine.step(grad)
            if metered and not steps:
                kept = _total(memory) - before
            steps.append({"weights": weights_P.clone(), "sent": _sent(traffic)})
    return {"steps": steps, "at the start": at_start, "held": _held(stepped), "kept": kept}



# --- 4. the all-gather in place ---------------------------------------------------------------------------------


class _Row(nn.Module):
    """Parameters in a row, named "0", "1", …, with the values 1, 2, 3, … in that order."""

    def __init__(self, shapes: Sequence[tuple], frozen: Sequence[int]):
        super().__init__()
        start = 1
        for i, shape in enumerate(shapes):
            stop = start + math.prod(shape)
            param = nn.Parameter(torch.arange(float(start), stop).view(shape).clone(), requires_grad=i not in frozen)
            self.register_parameter(str(i), param)
            start = stop


@exercise(
    "zero1.all_gather_in_place",
    call="FlatWeights(model), then .gather()",
    points=2,
    hints=[
        "If a parameter's memory is a piece of the flat buffer, what has to be done with the parameter after the buffer was gathered into?",
        "A slice of a flat tensor, viewed in another shape, is still the same memory. param.data = view changes where a parameter lies and keeps the parameter. all_gather may "
        "gather into the buffer of which its input is a slice.",
        "Make zeros of P elements. For each trainable parameter: slice, view_as(param), copy_ the weights into it, param.data = the view. gather() is one call: all_gather of the "
        "buffer from this rank's chunk of it.",
    ],
)
def all_gather_in_place(answer, expect):
    """on 2 and 3 ranks parameters stay the same objects, lie in flat_P for good, and show what was gathered; one all_gather; no second buffer"""
    _in_place(answer, expect, "two parameters", 2, [(1, 2), (1,)])
    _in_place(answer, expect, "parameter 1 is frozen", 2, [(2, 2), (3,), (3, 1), ()], frozen=(1,))
    _in_place(answer, expect, "fewer elements than ranks", 3, [(1,)])
    _in_place(answer, expect, "5 parameters", 3, [(40, 30), (30,), (30, 50), (50,), (2,)])


def _in_place(answer, expect: Expect, text: str, world_size: int, shapes: list[tuple], frozen: Sequence[int] = ()) -> None:
    model = _Row(shapes, frozen)
    trainable = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    numel = sum(param.numel() for param in trainable.values())
    P = _up(numel, world_size) * world_size
    expect.case(text, world_size=world_size, P=P)
    causes = {
        "has no attribute 'flat_P'": "the flat buffer has to be kept as self.flat_P",
        "has no attribute 'gather'": "the class needs a method gather()",
        "a view of a leaf": "autograd watches parameters: work on param.data, or param.detach()",
        "leaf variable": "autograd watches parameters: work on param.data, or param.detach()",
        "deadlock": "gather() is a call of all ranks: it issues one all_gather on each",
        "size for tensor": "sizes differ: is the buffer padded to P elements, and is each place as long as its parameter?",
        "output tensor size": "an all_gather takes S elements and gives P: out first, in second, and the buffer has to be padded",
        "check failed": "an all_gather takes S elements and gives P: out first, in second, and the buffer has to be padded",
        "invalid tensor size": "an all_gather takes S elements and gives P: out first, in second",
    }
    new = torch.zeros(P)
    new[:numel] = torch.arange(1.0, numel + 1) * 10
    outcomes = expect.run(_in_place_program, world_size, answer, shapes, frozen, new, causes=causes)
    old = F.pad(torch.cat([param.flatten() for param in trainable.values()]), (0, P - numel))
    places, at = {}, 0
    for name, param in trainable.items():
        places[name], at = at, at + param.numel()
    for outcome in outcomes:
        _check_moved(expect, outcome, old, trainable, places, numel)
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        for when in ("at the start", "sent"):
            _check_complete(expect, rank, value[when])
        _check_gathered(expect, rank, world_size, value, old, new, places, trainable)
        equal_already = dict.fromkeys(("all_gather", "broadcast"), "the weights are equal on all ranks")
        _check_sent(rank, value["at the start"], [], "", "moving weights needs no other rank", equal_already)
        causes = {
            "all_reduce": "an all_reduce of shards padded with zeros gives the same sum, and sends twice as much",
            "broadcast": "a broadcast from each owner in turn sends P from one rank at a time: one all_gather does it at once",
            "all_gather": "one all_gather of the whole buffer is enough, whatever the number of parameters",
            "numel": "the whole buffer is gathered at once, padding included",
        }
        _check_sent(rank, value["sent"], [("all_gather", P)], "float32", "gather() is one all_gather of P elements", causes)
        if P > 100:
            expect.that(
                value["grown"] <= 4 * (P - numel) + _SLACK, "the weights exist once: the buffer takes the place of their old memory",
                f"at most {4 * (P - numel) + _SLACK} bytes more than before", f"{value['grown']:,} on rank {rank}",
                f"the weights are {4 * numel:,} bytes", "somebody still holds the old weights, or the buffer exists twice",
            )  # fmt: skip
            expect.that(
                value["used"] < 4 * P, "gather() needs no second buffer", f"less than {4 * P:,} bytes besides the buffer", f"{value['used']:,} on rank {rank}",
                "for a moment the weights exist twice", "it gathers into a new tensor: the buffer itself can be the target",
            )  # fmt: skip


def _check_moved(expect: Expect, outcome: Outcome, old: Tensor, trainable: dict, places: dict, numel: int) -> None:
    rank, value, P = outcome.rank, outcome.value, len(old)
    flat = value["flat"]
    expect.that(isinstance(flat, Tensor), "flat_P is the flat buffer", f"a float32 tensor of shape ({P},)", f"{show(flat)} on rank {rank}")
    cause = ""
    if flat.shape == (numel,) and P > numel:
        cause = "the padding is missing: P is the next multiple of the world size"
    elif flat.numel() > P and flat.dim() == 1 and value["trainable"] < value["registered"]:
        cause = "a frozen parameter is in the buffer: nobody will ever update it"
    elif flat.shape == (P + value["world_size"],) and P == numel:
        cause = "where the size is a multiple of N already, nothing has to be padded"
    elif flat.numel() == P // value["world_size"]:
        cause = "that is a shard: every rank has all weights"
    expect.that(
        flat.shape == old.shape and flat.dtype == old.dtype, "flat_P has all trainable weights, and padding up to a multiple of N",
        f"a float32 tensor of shape ({P},)", f"a {str(flat.dtype).removeprefix('torch.')} tensor of shape {tuple(flat.shape)} on rank {rank}", cause=cause,
    )  # fmt: skip
    lost = value["replaced"]
    expect.that(
        not lost, "the model keeps its parameters: only their memory changes", "the same objects as before",
        f"another object as parameter {', '.join(lost)} on rank {rank}", "an optimizer that was built before still holds the old one",
        "a new nn.Parameter is put in its place: set its .data instead",
    )  # fmt: skip
    expect.that(
        not value["refrozen"], "what was frozen stays frozen, and nothing else is",
        got=f"requires_grad of {', '.join(value['refrozen'])} has changed on rank {rank}",
    )  # fmt: skip
    backwards = torch.cat([*[param.flatten() for param in reversed(trainable.values())], old[numel:]])
    unwritten = torch.cat([old[:numel], torch.full((P - numel,), math.nan)])
    expect.equal(
        flat, old, of=f"flat_P on rank {rank}", rule="flat_P is the parameters in order, then zeros", tol=0,
        mistakes={
            "the parameters stand in reverse: the first of model.parameters() comes first": backwards,
            "the buffer has only zeros in it: the weights are not copied": torch.zeros(P),
            "the padding was never written: torch.empty has in it what it finds": unwritten,
        },
    )  # fmt: skip
    for name, want in trainable.items():
        expect.equal(value["values"][name], want, of=f"parameter {name} on rank {rank}", rule="the weights keep their values and their shapes")
        place = value["places"][name]
        expect.that(
            place == places[name], "each parameter is a view of its place in flat_P", f"parameter {name} begins at element {places[name]} of flat_P",
            f"it lies {'elsewhere' if place is None else f'at element {place}'} on rank {rank}", "what is gathered into flat_P does not reach the model",
            "its weights are copied into the buffer, and .data is never pointed there; or the buffer that is kept is a copy" if place is None else "",
        )  # fmt: skip
    for name in value["frozen moved"]:
        raise Finding("a frozen parameter stays where it is", got=f"parameter {name} lies in flat_P on rank {rank}")
    expect.that(
        not value["watched"], "flat_P is plain memory", "requires_grad is False", f"it is True on rank {rank}", "autograd would record the all-gather, or refuse it",
        "it is made of parameters, and so autograd has a hand in it: take their .data",
    )  # fmt: skip


def _check_gathered(expect: Expect, rank: int, n: int, value: dict, old: Tensor, new: Tensor, places: dict, trainable: dict) -> None:
    owns = [torch.cat([new.chunk(n)[r] if r == each else old.chunk(n)[r] for r in range(n)]) for each in range(n)]
    own = owns[rank]
    first = torch.cat([new.chunk(n)[0]] * n)
    expect.that(
        value["same buffer"], "flat_P stays the same memory", "the buffer of before", f"another one on rank {rank}",
        "the parameters are views of the old one", "the result of the gather is put in the buffer's place: gather into the buffer",
    )  # fmt: skip
    expect.equal(
        value["flat after"], new, of=f"flat_P on rank {rank} after gather()", rule="after gather() every rank has all ranks' shards", tol=0,
        so="the ranks compute with different weights",
        mistakes={
            "nothing has arrived: nothing is gathered, or it goes to another tensor": own,
            "every rank has got rank 0's shard": first,
            "every rank has given its first S elements: its shard is the rank-th": torch.cat([own.chunk(n)[0]] + [old.chunk(n)[0]] * (n - 1)),
            "the old weights were gathered: the shard that is given is a copy from the start": old,
            "the ranks' buffers are added up, with the old values of the shards that are not theirs": sum(owns),
            "the ranks' buffers are averaged, with the old values of the shards that are not theirs": sum(owns) / n,
        },
    )  # fmt: skip
    for name, param in trainable.items():
        at = places[name]
        expect.equal(
            value["values after"][name], new[at : at + param.numel()].view_as(param), of=f"parameter {name} on rank {rank} after gather()",
            rule="after gather() the model computes with all the new weights", mistakes={"the parameter still shows the weights of before": param},
        )  # fmt: skip
        expect.that(
            value["places after"][name] == at, "gather() touches no parameter: each is a view of flat_P for good", f"parameter {name} at element {at} of flat_P",
            f"{'elsewhere' if value['places after'][name] is None else value['places after'][name]} on rank {rank}",
        )  # fmt: skip


def _place(param: Tensor, flat: Tensor) -> int | None:
    """At which element of the flat buffer it begins; None if it lies elsewhere."""
    if param.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        return None
    at, rest = divmod(param.data_ptr() - flat.data_ptr(), flat.element_size())
    return None if rest or not 0 <= at < max(1, flat.numel()) else at


def _in_place_program(rank, answer, shapes, frozen, new):
    model = _Row(shapes, frozen)
    params = dict(model.named_parameters())
    needs = {name: param.requires_grad for name, param in params.items()}
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    world_size = dist.get_world_size()
    found: dict = {"world_size": world_size, "registered": len(params), "trainable": len(trainable)}
    with mz.record_memory() as memory:
        before = _total(memory)
        with mz.record_traffic() as traffic:
            engine = answer(model)
        found |= {"grown": _total(memory) - before, "at the start": _sent(traffic)}
    flat = engine.flat_P
    now = dict(model.named_parameters())
    found |= {
        "flat": flat.clone() if isinstance(flat, Tensor) else show(flat),
        "replaced": [name for name in params if now.get(name) is not params[name]],
        "refrozen": [name for name in params if params[name].requires_grad != needs[name]],
    }
    if not isinstance(flat, Tensor) or flat.shape != new.shape:
        return found
    found |= {
        "values": {name: param.clone() for name, param in trainable.items()},
        "places": {name: _place(param, flat) for name, param in trainable.items()},
        "frozen moved": [name for name in params if name not in trainable and _place(params[name], flat) is not None],
        "watched": flat.requires_grad,
    }
    plain, where = flat.detach(), flat.data_ptr()
    plain.chunk(world_size)[rank].copy_(new.chunk(world_size)[rank])
    with mz.record_memory() as memory:
        before = _total(memory)
        with mz.record_traffic() as traffic:
            engine.gather()
        used = memory.peak_total - before
    return found | {
        "sent": _sent(traffic),
        "used": used,
        "same buffer": engine.flat_P.data_ptr() == where,
        "flat after": plain.clone(),
        "values after": {name: param.clone() for name, param in trainable.items()},
        "places after": {name: _place(param, plain) for name, param in trainable.items()},
    }


# --- 5. master weights ----------------------------------------------------------------------------------------


@exercise(
    "zero1.master_weights",
    call="MasterStep(weights_P, optimizer_class, lr), then .step(grad_S)",
    points=2,
    hints=[
        "Where can 1 − 0.0001 be kept from one step to the next, if not in the weights? And for how many elements must this rank keep it?",
        "slice.float() is a new fp32 tensor, made once. A .grad has its tensor's dtype, so the gradient is cast up. copy_ rounds when it writes fp32 into bf16.",
        "In __init__: master = this rank's slice of weights_P, in fp32; an optimizer over [master]. In step: master.grad = grad_S.float(); optimizer.step(); copy_ "
        "the master into the slice; all_gather the slice into weights_P.",
    ],
)
def master_weights(answer, expect):
    """100 small steps that bf16 alone would lose; SGD and Adam on 2 and 3 ranks; an fp32 master of S elements; a 16-bit all_gather; memory"""
    ones = [[torch.ones(2, dtype=torch.bfloat16)]] * 100
    _mastered(answer, expect, "100 steps of SGD, weights 1, gradients 1, lr=0.0001", 2, SGD, 1e-4, torch.ones(2), ones)
    for P, kind, lr in ((6, SGD, 1.0), (3000, Adam, 0.5)):
        start = torch.arange(1.0, P + 1) * 16 if P < 10 else torch.arange(float(P)) % 7
        grads = [[sum(of_ranks) / 128] for of_ranks in _gradients(3, P, 3)]
        _mastered(answer, expect, f"3 steps of {kind.__name__}", 3, kind, lr, start, grads)


def _mastered(
    answer, expect: Expect, text: str, world_size: int, kind: type[Optimizer], lr: float, start: Tensor, grads: list[list[Tensor]]
) -> None:
    P = len(start)
    S = P // world_size
    expect.case(text, world_size=world_size, P=P)
    start = start.bfloat16()
    grads = [[grad.bfloat16() for grad in each] for each in grads]
    causes = _LIKE_3 | {
        "has no attribute 'step'": "the class needs a method step(grad_S)",
        "assign a gradient": "a .grad has its tensor's dtype and shape: the master is fp32 and a shard, so cast the gradient up",
        "dtype": "an all_gather takes and gives one dtype: round the master first",
        "type": "an all_gather takes and gives one dtype: round the master first",
    }
    outcomes = expect.run(_mastered_program, world_size, answer, start, [grad for (grad,) in grads], kind, lr, causes=causes)
    make = partial(kind, lr=lr)
    wide = [[grad.float()] for (grad,) in grads]
    masters = [each[0] for each in _trained(start.float(), wide, make)]
    rounded = masters[-1].bfloat16()
    again = _trained_from_roundings(start, wide, make)
    piled = [[sum(grad for (grad,) in wide[: i + 1])] for i in range(len(wide))]
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        _check_complete(expect, rank, value["sent"])
        held, got = value["held"], value["weights"]
        expect.that(
            held["optimizers"], "the master is updated by a torch optimizer", f"one optimizer over {S:,} elements", f"none on rank {rank}",
            cause="the update is computed by hand, or nothing is updated: build optimizer_class([master], lr=lr), and call its step()",
        )  # fmt: skip
        expect.that(
            got.dtype == torch.bfloat16, "weights_P stays bf16", "bfloat16", f"{str(got.dtype).removeprefix('torch.')} on rank {rank}",
            "forward would compute in it", "weights_P is turned into fp32: only the shard has an fp32 copy",
        )  # fmt: skip
        expect.that(
            held["dtypes"] == ["float32"], "the optimizer updates an fp32 master", "float32", f"{', '.join(held['dtypes'])} on rank {rank}",
            f"after {len(grads)} steps weights_P is {show(got)}, and should be {show(rounded)}" if differ(got, rounded, "", 0) and P < 10 else "",
            "the optimizer updates the 16-bit weights themselves: what is too small for 8 digits is rounded away in each step"
            if held["dtypes"] == ["bfloat16"] else "",
        )  # fmt: skip
    divided = _trained(start.float(), [[grad / world_size] for (grad,) in wide], make)[-1][0]
    for outcome in outcomes:
        rank, held = outcome.rank, outcome.value["held"]
        shards = masters[-1].chunk(world_size)
        if held["updates"] == S:
            expect.equal(
                held["values"], shards[rank], of=f"rank {rank}'s master after {len(grads)} steps", rule="the master is what fp32 training would give", tol=1e-5,
                mistakes={
                    "the master is made from the weights again: it starts each step from a rounding": again.chunk(world_size)[rank],
                    "the master has rank 0's shard": _trained(torch.cat([start.float()[:S]] * world_size), wide, make)[-1][0].chunk(world_size)[rank],
                    "what the optimizer holds never gets a .grad: is it still the master?": start.float().chunk(world_size)[rank],
                    "the mean gradient is divided by world_size once more: grad_S is the mean already": divided.chunk(world_size)[rank],
                    "the gradients of earlier steps are still in .grad": _trained(start.float(), piled, make)[-1][0].chunk(world_size)[rank],
                },
            )  # fmt: skip
    for outcome in outcomes:
        rank, got = outcome.rank, outcome.value["weights"]
        kept_apart = torch.cat([rounded.chunk(world_size)[r] if r == rank else start.chunk(world_size)[r] for r in range(world_size)])
        expect.equal(
            got, rounded, of=f"weights_P on rank {rank} after {len(grads)} steps", rule="the weights are the rounding of the master, on every rank", tol=1e-3,
            mistakes={
                "the master has moved, and its rounding is not written back": start,
                "the rounding stays on its own rank: it has to be gathered into weights_P": kept_apart,
                "the master is made from the weights again: it starts each step from a rounding": again.bfloat16(),
            },
        )  # fmt: skip
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        _check_sent(rank, value["at the start"], [], "", "at the start nothing is sent", {"broadcast": "the weights are equal on all ranks"})
        causes = {
            "dtype": "the masters travel: their roundings are half the bytes, and all that the others need",
            "all_gather": "one all_gather a step is enough",
            "all_reduce": "grad_S is the mean already: nothing has to be reduced",
            "reduce_scatter": "grad_S is the mean already: nothing has to be reduced",
            "numel": "the whole vector is gathered at once",
        }
        want = [("all_gather", P)]
        _check_sent(rank, value["sent"], want, "bfloat16", "a step sends one all_gather, of P elements in bf16", causes)
        _check_held(expect, rank, value["held"], P, world_size, 2 if kind is Adam else 0)
        if P > 100:
            limit = 18 * S + _SLACK  # master, two moments, an fp32 gradient, and a 16-bit copy of the shard
            expect.that(
                value["kept"] <= limit, "fp32 exists for the shard alone", f"at most {limit:,} bytes more than before", f"{value['kept']:,} on rank {rank}",
                f"an fp32 copy of all weights is {4 * P:,} bytes", "all weights are kept in fp32, and a slice of that is the master",
            )  # fmt: skip


def _trained_from_roundings(start: Tensor, grads: list[list[Tensor]], make: Callable) -> Tensor:
    """The master, if each step begins with the weights' roundings."""
    master = start.float()
    optimizer = make([master])
    for (grad,) in grads:
        master.copy_(master.bfloat16())
        master.grad = grad
        optimizer.step()
    return master


def _mastered_program(rank, answer, start, grads, kind, lr):
    weights_P = start.clone()
    mine = [grad.chunk(dist.get_world_size())[rank].clone() for grad in grads]
    metered, kept = len(start) > 100, 0
    with _watched_steps() as stepped, mz.record_memory() if metered else nullcontext() as memory:
        before = _total(memory) if metered else 0
        with mz.record_traffic() as traffic:
            engine = answer(weights_P, kind, lr)
        at_start = _sent(traffic)
        for grad in mine:
            with mz.record_traffic() as traffic:
                engine.step(grad)
        kept = _total(memory) - before if metered else 0
    return {"weights": weights_P, "sent": _sent(traffic), "at the start": at_start, "held": _held(stepped), "kept": kept}


# --- 6. the norm of a gradient that nobody has -----------------------------------------------------------------


@exercise(
    "zero1.global_norm",
    call="clip(grad_S, max_norm)",
    hints=[
        "Rank 0's part has the norm 3, rank 1's the norm 4. Why is the whole 5, and which numbers add up?",
        "Squares add up: sum them in fp32 or fp64, all_reduce that one number on every rank, take the root. The coefficient is max_norm / norm, never above 1, and equal on all ranks.",
        "square = the sum of grad_S squared, after a cast up; dist.all_reduce(square); norm = its root; if norm is above max_norm, multiply grad_S in place by max_norm / norm; return norm.",
    ],
)
def global_norm(answer, expect):
    """norm and gradients on 2 and 3 ranks: below the limit, empty parts, zeros, a rank with most of it, fp16; one all_reduce of one number"""
    _normed(answer, expect, "max_norm=1", [[1.0, 2.0, 2.0], [4.0]], 1.0)
    _normed(answer, expect, "max_norm=10", [[1.0, 2.0, 2.0], [4.0]], 10.0)
    _normed(answer, expect, "max_norm=1, ranks 1 and 2 have 0 elements", [[-5.0], [], []], 1.0)
    _normed(answer, expect, "max_norm=1, all zero", [[0.0, 0.0], [0.0, 0.0]], 1.0)
    _normed(answer, expect, "max_norm=7", [[1.0, -2.0, 2.0], [4.0, 4.0], [12.0, 12.0, -20.0, 4.0]], 7.0)
    _normed(answer, expect, "max_norm=1, fp16", [[300.0], [400.0]], 1.0, torch.float16)


def _normed(answer, expect: Expect, text: str, parts: list[list[float]], max_norm: float, dtype: torch.dtype = torch.float32) -> None:
    n = len(parts)
    expect.case(text, world_size=n, gradients=parts)
    grads = [torch.tensor(part, dtype=dtype) for part in parts]
    causes = {
        "deadlock": "the all_reduce is a call of all ranks: also of those that have nothing, or need not clip",
        "different collectives": "all ranks issue the same all_reduce, whatever they have",
        "what one rank issues": "all ranks issue the same all_reduce, of one number",
        "division by zero": "the norm may be 0: there is nothing to scale then",
    }
    outcomes = expect.run(_normed_program, n, answer, grads, max_norm, causes=causes)
    norms = [grad.double().norm().item() for grad in grads]
    norm = math.sqrt(sum(each**2 for each in norms))
    means = math.sqrt(sum(each**2 / max(1, len(part)) for each, part in zip(norms, parts, strict=True)))
    for outcome in outcomes:
        _check_complete(expect, outcome.rank, outcome.value["sent"])
    for outcome in outcomes:
        got, rank = outcome.value["norm"], outcome.rank
        infinite = {"squares are formed in fp16, and 300² is beyond its range: cast up first": math.inf} if dtype == torch.float16 else {}
        expect.equal(
            got, norm, of=f"the norm on rank {rank}", rule="all ranks get the norm of the whole gradient", so="each rank would scale by a number of its own", tol=1e-3 if infinite else 1e-5,
            mistakes={
                "the square root is missing": norm**2,
                "that is the norm of this rank's part": norms[rank],
                "the ranks' norms are added: squares add up, norms do not": sum(norms),
                "the largest of the ranks' norms is taken: their squares add up": max(norms),
                "the sum of squares is divided by the number of ranks": norm / math.sqrt(n),
                "the squares of a part are averaged, not added up": means,
                "that is the norm after clipping: return the one before": min(norm, max_norm),
                "that is the coefficient: return the norm": min(1.0, max_norm / norm) if norm else 1.0,
                "the elements are added up, not their squares": sum(sum(part) for part in parts),
                "the absolute values are added up, not the squares": sum(sum(map(abs, part)) for part in parts),
                **infinite,
            },
        )  # fmt: skip
    coefficient = min(1.0, max_norm / norm) if norm else 1.0
    for outcome in outcomes:
        got, rank = outcome.value["grad"], outcome.rank
        mistakes = {
            "grad_S itself is not changed: scale it in place": grads[rank],
            "each rank scales by its own norm: the direction of the whole changes": grads[rank] * (min(1.0, max_norm / norms[rank]) if norms[rank] else 1.0),
            "a small gradient is scaled up: the coefficient is never above 1": grads[rank] * (max_norm / norm if norm else 1.0),
            "it is divided by the norm, whatever max_norm is": grads[rank] / norm if norm else grads[rank],
            "each element is cut off by itself: that clips values, not the norm": grads[rank].clamp(-max_norm, max_norm),
            "0 / 0 is NaN: where the norm is 0 nothing is scaled": torch.full_like(grads[rank], math.nan),
            "it is divided by the square of the norm": grads[rank] * (max_norm / norm**2 if norm else 1.0),
        }  # fmt: skip
        expect.equal(
            got, grads[rank] * coefficient, of=f"rank {rank}'s part", rule=f"the whole gradient has at most the norm {max_norm:g}, and its direction",
            mistakes={text: wrong for text, wrong in mistakes.items() if differ(wrong, grads[rank] * coefficient, "", 1e-4)}, tol=1e-3,
        )  # fmt: skip
    for outcome in outcomes:
        causes = {
            "all_gather": "one number from each rank, added up, is all that is needed",
            "all_reduce": "one all_reduce is enough, of the sum of squares: from it every rank computes the same norm and coefficient",
            "reduce_scatter": "that happened before: here one number travels",
            "numel": "one number travels, this rank's sum of squares; the gradient itself stays",
            "broadcast": "an all_reduce leaves the same number on all ranks: nobody has to tell the others",
        }
        _check_sent(outcome.rank, outcome.value["sent"], [("all_reduce", 1)], "", "clipping sends one all_reduce of one number", causes)


def _normed_program(rank, answer, grads, max_norm):
    grad_S = grads[rank].clone()
    with mz.record_traffic() as traffic:
        norm = answer(grad_S, max_norm)
    return {"norm": norm, "grad": grad_S, "sent": _sent(traffic)}


# --- 7. skip together --------------------------------------------------------------------------------------------

_SCALE = 1024.0
_LARGE = 3e38  # two of them have no fp32 sum


@exercise(
    "zero1.skip_together",
    call="step_or_skip(optimizer, scale)",
    points=2,
    hints=[
        "Rank 2 sees an inf, rank 0 sees nothing unusual. What must rank 0 learn before it may step, and when does rank 2 have to tell it?",
        "torch.isfinite sees inf, −inf and NaN, element by element. A flag as a float can be summed by an all_reduce, which all ranks issue, whatever they have found. "
        "Look at .grad in all param_groups; it may be None.",
        "flag = 1.0 if any element of any .grad is not finite, else 0.0; all_reduce it; if the sum is above 0 return False and half the scale; else divide "
        "each .grad by scale, optimizer.step(), and return True and the scale.",
    ],
)
def skip_together(answer, expect):
    """good steps, then inf, −inf or NaN on one rank of 2 and 3: nothing moves on any; large finite gradients; one all_reduce of one number"""
    good = _skipped(answer, expect, "a good step of SGD", 2, SGD, [None])
    skipped = _skipped(answer, expect, "rank 1's last element is inf", 2, SGD, [math.inf])
    _skipped(answer, expect, "rank 1's last element is NaN", 2, SGD, [math.nan])
    _skipped(answer, expect, "rank 1's last element is −inf", 2, SGD, [-math.inf])
    _skipped(answer, expect, "two elements of 3e38", 2, SGD, [_LARGE])
    _skipped(answer, expect, "rank 1 has no gradient, rank 0 an inf", 2, SGD, [math.inf], where=0, without=1)
    _skipped(answer, expect, "a good step, one with an inf, a good step of Adam", 3, Adam, [None, math.inf, None])
    _skipped(answer, expect, "all ranks have an inf", 3, SGD, [math.inf], where=None)
    causes = {
        "all_gather": "one flag from each rank, added up, is all that is needed",
        "all_reduce": "one flag for all gradients is enough: one all_reduce",
        "numel": "one number travels, whether this rank has seen an overflow; the gradients stay",
        "broadcast": "an all_reduce leaves the same number on all ranks: nobody has to tell the others",
    }
    for text, outcomes in {"a good step": good, "rank 1's last element is inf": skipped}.items():
        expect.case(text, world_size=2)
        for outcome in outcomes:
            sent = outcome.value[0]["sent"]
            _check_sent(outcome.rank, sent, [("all_reduce", 1)], "", "to agree takes one all_reduce of one number", causes)


def _skipped(
    answer, expect: Expect, text: str, n: int, kind: type[Optimizer], steps: list, where: int | None = -1, without: int | None = None
) -> list[Outcome]:
    """steps: for each, what the last element on rank `where` (None: on all) is, or None for a good step. without: this rank has no gradient."""
    expect.case(text, world_size=n)
    grads = [[_scaled(r, without, special if where is None or r == where % n else None) for r in range(n)] for special in steps]
    causes = {
        "deadlock": "the all_reduce is a call of all ranks, in every step: a rank that returns early, or sees nothing wrong, has to issue it too",
        "NoneType": ".grad may be None: then there is nothing to look at, and the collective is issued all the same",
        "numel": "the flag is one number",
        "Boolean value of Tensor": "any(), or all(), makes one answer of many",
    }
    outcomes = expect.run(_skipped_program, n, answer, kind, grads, causes=causes)
    for outcome in outcomes:
        for each in outcome.value:
            _check_complete(expect, outcome.rank, each["sent"])
    scale = _SCALE
    for step, special in enumerate(steps):
        good = special is None or math.isfinite(special)
        rounds = [outcome.value[step] for outcome in outcomes]
        expect.case(text + (f", step {step + 1}" if len(steps) > 1 else ""), world_size=n)
        for rank, each in enumerate(rounds):
            _check_verdict(expect, rank, each["returned"], good, scale, special, [own[-1] for own in grads[step]], rounds)
        for rank, each in enumerate(rounds):
            _check_moved_by(expect, rank, each, good, grads[step][rank], kind, scale)
        scale = scale if good else scale / 2
    return outcomes


def _scaled(rank: int, without: int | None, special: float | None) -> list[list[float] | None]:
    """A rank's gradients of its two tensors, not yet multiplied by the scale, and the last element, as it is found."""
    if rank == without:
        return [None, None, None]
    values = [[1.0 * 10**rank, 2.0 * 10**rank], [3.0 * 10**rank, 4.0 * 10**rank]]
    return [*values, special]


def _found(values: list, scale: float) -> list[Tensor | None]:
    """The gradients as backward left them."""
    first, second, special = values
    if first is None:
        return [None, None]
    first, second = torch.tensor(first) * scale, torch.tensor(second) * scale
    if special is not None:
        second[-1] = special
        if math.isfinite(special):
            second[-2] = special
    return [first, second]


def _check_verdict(
    expect: Expect, rank: int, got, good: bool, scale: float, special: float | None, specials: list, rounds: list[dict]
) -> None:
    rule = "a good step updates, and the scale stays" if good else "an overflow on any rank skips the step on all, and halves the scale"
    form = isinstance(got, (tuple, list)) and len(got) == 2
    cause = "nothing is returned: a return is missing" if got is None else ""
    expect.that(form, "a step returns (updated, scale)", "a pair", f"{show(got)} on rank {rank}", cause=cause)
    updated, after = (each.item() if isinstance(each, Tensor) and each.numel() == 1 else each for each in got)
    want = (True, scale) if good else (False, scale / 2)
    said = [bool(each["returned"][0]) for each in rounds if isinstance(each["returned"], (tuple, list)) and each["returned"]]
    cause = ""
    if not good and bool(updated):
        if any(not each for each in said):
            cause = "each rank decides for itself: the others have to hear of it, from an all_reduce"
        elif math.isnan(special):
            cause = "NaN is no infinity, is unequal to everything, and gets lost in a maximum: ask torch.isfinite"
        elif special < 0:
            cause = "minus infinity is an overflow as well: ask torch.isfinite"
        else:
            cause = "no rank has noticed it: are all param_groups looked at, and each element, and is one rank's flag enough?"
            if sum(each is not None and not math.isfinite(each) for each in specials) > 1:
                cause = "the flags of several ranks add up: any sum above 0 is an overflow"
    elif good and not bool(updated):
        cause = "large finite numbers have an infinite sum, or square: ask torch.isfinite of each element" if special else "a finite gradient is taken for an overflow"
    elif good:
        cause = "while nothing overflows the scale stays: when it may grow again is not asked here"
    elif len({show(each["returned"]) for each in rounds}) > 1:
        cause = "only a rank that overflows itself halves its scale: the next losses would be scaled differently"
    elif isinstance(after, (int, float)):
        cause = {
            scale: "the scale is returned as it was: halve it, or the next step overflows too",
            scale * 2: "the scale is doubled: an overflow asks for a smaller one",
            scale / 2 ** len(rounds): "the scale is halved once for each rank that overflows, not once",
            scale / 4: "the scale is halved twice",
        }.get(after, "")
    expect.that(
        type(updated) is bool and (updated, after) == want, rule, show(want), f"{show((updated, after))} on rank {rank}",
        "the shards are updated on some ranks and not on others: they belong to different models" if len(set(said)) > 1 else "", cause,
    )  # fmt: skip


def _check_moved_by(expect: Expect, rank: int, each: dict, good: bool, values: list, kind: type[Optimizer], scale: float) -> None:
    """Weights and state have moved as a step with the unscaled gradients moves them, or not at all."""
    before = each["before"]
    want = _stepped(before, _found(values, scale), kind, scale) if good else before
    scaled = _stepped(before, _found(values, scale), kind, 1.0)
    halved = _stepped(before, _found(values, scale), kind, scale / 2)
    squared = _stepped(before, _found(values, scale), kind, scale**2)
    zeros = _stepped(before, [torch.zeros(2), torch.zeros(2)], kind, 1.0)
    first_only = _stepped(before, [_found(values, scale)[0], _times(_found(values, scale)[1], scale)], kind, scale)
    known = {
        "the gradients are not divided by the scale": scaled,
        "the gradients are divided by another scale: the one that the loss was multiplied with counts": halved,
        "the gradients are divided twice by the scale": squared,
        "only the first param_group is unscaled": first_only,
        "nothing has moved: optimizer.step() is not called": before,
        "a step with zero gradients is a step: momentum moves the weights, and the step count goes on": zeros,
        "the step is taken, overflow or not": scaled,
        "the step is taken, overflow or not, after unscaling": _stepped(before, _found(values, scale), kind, scale),
    }  # fmt: skip
    for what in ("weights", "state"):
        mistakes = {text: wrong[what] for text, wrong in known.items() if differ(wrong[what], want[what], "", 1e-5)}
        if what == "state" and not good:
            mistakes = {"the step is taken, and the weights put back: the moments and the step count remember it": each["after"][what]}
        expect.equal(
            each["after"][what], want[what], of=f"rank {rank}'s {what}", tol=1e-5 if good else 0, mistakes=mistakes,
            rule="a good step is the optimizer's, with gradients divided by the scale" if good else "in a skipped step nothing moves: no weight, no state, no step count",
            so="" if good else "with the next good step this rank's shard belongs to another model than the others'" if what == "weights" else "Adam's bias correction counts steps that were never taken",
        )  # fmt: skip


def _times(grad: Tensor | None, factor: float) -> Tensor | None:
    return None if grad is None else grad * factor


def _make(kind: type[Optimizer], tensors: list[Tensor]) -> Optimizer:
    """Two groups, so that who looks at one has looked at half."""
    return kind([{"params": [each]} for each in tensors], lr=1.0 if kind is SGD else 0.5)


def _snapshot(optimizer: Optimizer) -> dict:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [{key: value for key, value in optimizer.state.get(param, {}).items() if isinstance(value, Tensor)} for param in params]
    return {
        "weights": [param.detach().clone() for param in params],
        "state": [{key: value.clone() for key, value in each.items()} for each in state],
    }


def _stepped(before: dict, grads: list[Tensor | None], kind: type[Optimizer], scale: float) -> dict:
    """A step from `before`, with the gradients divided by the scale."""
    tensors = [each.clone() for each in before["weights"]]
    optimizer = _make(kind, tensors)
    for tensor, state, grad in zip(tensors, before["state"], grads, strict=True):
        if state:
            optimizer.state[tensor] = {key: value.clone() for key, value in state.items()}
        tensor.grad = None if grad is None else grad / scale
    optimizer.step()
    return _snapshot(optimizer)


def _skipped_program(rank, answer, kind, grads):
    optimizer = _make(kind, [torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0])])
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    scale, rounds = _SCALE, []
    for of_ranks in grads:
        for tensor, grad in zip(tensors, _found(of_ranks[rank], scale), strict=True):
            tensor.grad = grad
        before = _snapshot(optimizer)
        with mz.record_traffic() as traffic:
            returned = answer(optimizer, scale)
        rounds.append({"before": before, "after": _snapshot(optimizer), "returned": returned, "sent": _sent(traffic)})
        overflow = any(special is not None and not math.isfinite(special) for *_, special in of_ranks)
        scale = scale / 2 if overflow else scale
    return rounds


# --- 8. say the number ---------------------------------------------------------------------------------------------


@number(
    "zero1.number",
    hints=[
        "Which bytes does every rank hold for each parameter, and which only for the parameters that it updates? What does a step send, and how often?",
        "2 bytes of weight and 2 of gradient on every rank; 12 of master and moments on the owner. A reduce-scatter or an all-gather makes a rank send (N−1)/N of Ψ "
        "elements; the weights are gathered once a step, the gradients are reduced at each backward that is not inside no_sync().",
        "Held: 4Ψ + 12Ψ/N. Saved: 12Ψ(1 − 1/N), of 16Ψ. Sent: (reductions in a step + 1) × Ψ(N−1)/N × 2 bytes.",
    ],
)
def zero1_number(rng):
    """what ZeRO-1 holds, saves or sends: the 12 bytes of the optimizer divided by N and no others; one gather a step"""
    kind = rng.choice(["sent", "saved", "percent", "held"])
    psi, n = rng.choice([3, 7, 13, 30]), rng.choice([4, 8, 16, 64])
    return {"held": _held_question, "saved": _saved_question, "percent": _percent_question, "sent": _sent_question}[kind](psi, n, rng)


def _held_question(psi: int, n: int, rng) -> Question:
    return Question(
        text=f"{psi} B parameters, {n} ranks, ZeRO-1, mixed-precision Adam: how many GB of model states on one rank?",
        answer=4 * psi + 12 * psi / n,
        unit="GB",
        working=[
            f"weights           2 bytes × {psi} B = {2 * psi} GB       (every rank, all of them)",
            f"gradients         2 bytes × {psi} B = {2 * psi} GB       (every rank, all of them)",
            f"master, moments   (4 + 4 + 4) bytes × {psi} B / {n} = {12 * psi / n:g} GB",
        ],
        mistakes={
            "that is DDP: ZeRO-1 divides the optimizer's 12 bytes by N": 16 * psi,
            "all 16 bytes are divided by N: ZeRO-1 divides the optimizer's 12 only": 16 * psi / n,
            "the gradients are divided by N too: that is ZeRO-2": 2 * psi + 14 * psi / n,
            "the fp32 master is missing: Adam's part is 12 bytes, not 8": 4 * psi + 8 * psi / n,
            "fp32 training: in mixed precision weights and gradients have 2 bytes, and there is a master": 8 * psi + 8 * psi / n,
            "that is the optimizer's part: weights and gradients are model states too": 12 * psi / n,
            "that is what it saves": 12 * psi * (1 - 1 / n),
        },
    )


def _saved_question(psi: int, n: int, rng) -> Question:
    n = max(n, 8)  # on 4 ranks two mistakes lead to one number
    return Question(
        text=f"{psi} B parameters, {n} ranks, mixed-precision Adam: how many GB of model states does ZeRO-1 save on each rank, against DDP?",
        answer=12 * psi * (1 - 1 / n),
        unit="GB",
        working=[
            f"DDP      16 bytes × {psi} B = {16 * psi} GB",
            f"ZeRO-1   4 bytes × {psi} B + 12 bytes × {psi} B / {n} = {4 * psi + 12 * psi / n:g} GB",
            f"saved    12 bytes × {psi} B × (1 − 1/{n}) = {12 * psi * (1 - 1 / n):g} GB",
        ],
        mistakes={
            "that is what is left": 4 * psi + 12 * psi / n,
            "a rank keeps 1/N of the optimizer's state: not all 12 bytes are saved": 12 * psi,
            "all 16 bytes are divided by N: ZeRO-1 divides the optimizer's 12 only": 16 * psi * (1 - 1 / n),
            "the gradients are divided by N too: that is ZeRO-2": 14 * psi * (1 - 1 / n),
            "the fp32 master is missing: Adam's part is 12 bytes, not 8": 8 * psi * (1 - 1 / n),
            "that is what a rank keeps of the optimizer's state": 12 * psi / n,
            "that is what all ranks save together": 12 * psi * (n - 1),
        },
    )


def _percent_question(psi: int, n: int, rng) -> Question:
    n = max(n, 8)  # as above
    answer = 75 * (1 - 1 / n)
    return Question(
        text=f"{psi} B parameters, {n} ranks, mixed-precision Adam: how many percent of DDP's model states does ZeRO-1 save on each rank?",
        answer=answer,
        unit="%",
        working=[
            "DDP      16 bytes a parameter, 12 of them the optimizer's",
            f"saved    12 × (1 − 1/{n}) = {12 * (1 - 1 / n):g} bytes a parameter, whatever their number",
            f"of 16    {12 * (1 - 1 / n):g} / 16 = {answer:g} %",
        ],
        mistakes={
            "that is what is left": 100 - answer,
            "that is the limit for many ranks: a rank keeps 1/N of the 12 bytes": 75,
            "all 16 bytes are divided by N: ZeRO-1 divides the optimizer's 12 only": 100 * (1 - 1 / n),
            "a third is often claimed, and true for no N": 33,
            "percent are asked for": answer / 100,
            "the gradients are divided by N too: that is ZeRO-2": 87.5 * (1 - 1 / n),
        },
    )


def _sent_question(psi: int, n: int, rng) -> Question:
    g, quiet = rng.choice([5, 6]), rng.choice([True, False])
    reductions = 1 if quiet else g
    one = 2 * psi * (n - 1) / n
    answer = (reductions + 1) * one
    how = "all but the last inside no_sync()" if quiet else "without no_sync()"
    return Question(
        text=f"{psi} B parameters, ZeRO-1 on {n} ranks, weights and gradients in 16 bits, {g} micro-batches a step, {how}: how many GB does one rank send in a step?",
        answer=answer,
        unit="GB",
        working=[
            f"reduce-scatters in a step   {reductions}   ({'only the last backward reduces' if quiet else 'every backward reduces'})",
            "all-gathers in a step       1   (the weights, after the update)",
            f"each                        (N−1)/N × Ψ × 2 bytes = {n - 1}/{n} × {psi} B × 2 bytes = {one:g} GB",
            f"together                    {reductions + 1} × {one:g} GB = {answer:g} GB",
        ],
        mistakes={
            "(N−1)/N is missing: what a rank owns it does not send to itself": answer * n / (n - 1),
            "the weights are gathered once a step, not once a micro-batch: that would be DDP's all-reduces": 2 * g * one,
            "the all-gather of the weights is missing": reductions * one,
            **(
                {"inside no_sync() nothing is sent: a step has one reduce-scatter": (g + 1) * one}
                if quiet
                else {"without no_sync() every micro-batch is reduced": 2 * one}
            ),
            "that is what all ranks send together": answer * n,
            "16 bits are 2 bytes, not 4": answer * 2,
        },
    )


# --- 9. find the bug -------------------------------------------------------------------------------------------------

_BUG_STEPS, _ROWS, _LR = 3, 2, 0.125  # rows: of each rank


@bug(
    "zero1.find_the_bug",
    call="train(model, batches, lr)",
    points=2,
    hints=[
        "How much does a rank send in one pass of the loop, in units of P (N−1)/N? How much would DDP send?",
        "An all-reduce is a reduce-scatter and an all-gather. Look at what is read of grad_P after it has been reduced.",
        "Three collectives' worth is sent where two would do, 3/2 of DDP's traffic. Instead of the all_reduce: weights_S.grad = an empty tensor of S elements; reduce_scatter "
        "grad_P into it; divide it by world_size.",
    ],
    options={
        "a": "each rank holds the momentum of all weights",
        "b": "after a step the ranks' weights differ",
        "c": "each rank sends 1.5 times as much as under DDP",
        "d": "the weights after a step are those of a learning rate N times too large",
        "e": "each rank sends twice as much as under DDP",
    },
    observed="c",
    why={
        "a": "the optimizer is given weights_S, and its state has that shape: S elements",
        "b": "after the all_gather every rank has the same N shards, each of them from its owner",
        "d": "the sum is divided by world_size before the optimizer sees it",
        "e": "count in units of P (N−1)/N: an all_reduce is two of them, an all_gather one. How many are there, and how many would DDP have?",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; weights and losses on 2 and 3 ranks against one process; one reduce_scatter and one all_gather a step; S of momentum"""
    for n in (2, 3):
        expect.case(f"{_BUG_STEPS} steps", world_size=n)
        outcomes = expect.run(_mended_program, n, mended, causes=_LIKE_3)
        _check_mended(expect, outcomes)


def _check_mended(expect: Expect, outcomes: list[Outcome]) -> None:
    n = len(outcomes)
    numel = sum(param.numel() for param in _awkward_model().parameters())
    P = _up(numel, n) * n
    weights, losses = _one_process(n)
    start, grads = F.pad(weights[0], (0, P - numel)), [partial(_model_gradients, n, step) for step in range(_BUG_STEPS)]
    trained = partial(_trained, start, grads, partial(SGD, lr=_LR, momentum=0.9), world_size=n)
    wrong = {
        "the ranks' gradients are summed, and no longer averaged: divide the shard by world_size": trained(use=_sum),
        "the division by world_size is done twice": trained(use=_twice),
        "nothing is reduced: each rank updates its shard with its own gradient": trained(use=_own),
        "nothing is reduced, and nothing gathered: each rank trains on its own rows": trained(use=_own, sharded=False),
        "nothing is gathered: each rank updates its shard and keeps it to itself": trained(gathered=False),
        "a new optimizer is built in each step: it forgets its momentum": trained(anew=True),
        "the weights are those of the start": [[start] * n],
    }
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        _check_complete(expect, rank, value["sent"])
        expect.equal(
            value["weights"], weights[-1], of=f"rank {rank}'s weights, in a row,", tol=1e-5,
            rule=f"after {_BUG_STEPS} steps the weights are those of one process on the whole batch",
            mistakes={text: history[-1][rank][:numel] for text, history in wrong.items()},
        )  # fmt: skip
        sums = [sum(each) for each in zip(*losses, strict=True)]
        expect.equal(
            value["losses"], losses[rank], of=f"what train() returns on rank {rank}", tol=1e-5,
            rule="train() returns this rank's own losses, one a step, as it did before",
            mistakes={"the losses are reduced over the ranks: here they stay this rank's own": sums}
            | {"the losses are averaged over the ranks: here they stay this rank's own": [each / n for each in sums]},
        )  # fmt: skip
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        causes = {
            "all_reduce": "the all_reduce is still there: it brings every rank the mean of all shards, and a rank reads one",
            "all_gather": "the gradients are gathered as well: an all-reduce in two parts sends what an all-reduce sends",
            "broadcast": "what the all_gather did in one call is right as it was",
            "reduce": "a reduce to each owner in turn is a reduce_scatter in N calls: one call does it at once",
            "numel": "both move the whole flat vector, P elements, padding included",
            "no reduce_scatter": "one reduce_scatter a step takes the place of the all_reduce",
        }
        want_sent = [("reduce_scatter", P), ("all_gather", P)] * _BUG_STEPS
        _check_sent(rank, value["sent"], want_sent, "float32", "a step sends one reduce_scatter and one all_gather: as much as DDP", causes)
        _check_held(expect, rank, value["held"], P, n, 1)
        _check_one_optimizer(expect, rank, value["held"])


def _awkward_model() -> nn.Module:
    """39 parameters in pieces of 15, 5, 15, 3 and 1."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))


def _rows(world_size: int, rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Pairs (x, y): the rows of one rank, or of all of them."""
    generator = torch.Generator().manual_seed(world_size)
    rows = world_size * _ROWS
    whole = [(torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(_BUG_STEPS)]
    return whole if rank is None else [(x[rank * _ROWS :][:_ROWS], y[rank * _ROWS :][:_ROWS]) for x, y in whole]


def _one_process(world_size: int) -> tuple[list[Tensor], list[list[float]]]:
    """One process on whole batches: its weights at the start and after each step, and the losses on each rank's rows."""
    model = _awkward_model()
    optimizer = SGD(model.parameters(), lr=_LR, momentum=0.9)
    weights, losses = [_weights(model)], [[] for _ in range(world_size)]
    for step, (x, y) in enumerate(_rows(world_size)):
        for rank in range(world_size):
            own_x, own_y = _rows(world_size, rank)[step]
            losses[rank].append(F.mse_loss(model(own_x), own_y).item())
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(_weights(model))
    return weights, losses


def _model_gradients(world_size: int, step: int, weights: list[Tensor]) -> list[Tensor]:
    """Each rank's gradient of its rows at its own weights, both flat and padded."""
    grads = []
    for rank, flat_P in enumerate(weights):
        model, (x, y) = _awkward_model(), _rows(world_size, rank)[step]
        nn.utils.vector_to_parameters(flat_P.clone()[: len(_weights(model))], model.parameters())
        F.mse_loss(model(x), y).backward()
        grad = torch.cat([param.grad.flatten() for param in model.parameters()])
        grads.append(F.pad(grad, (0, len(flat_P) - len(grad))))
    return grads


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _mended_program(rank, train):
    model = _awkward_model()
    with _watched_steps() as stepped, mz.record_traffic() as traffic:
        losses = train(model, _rows(dist.get_world_size(), rank), _LR)
    return {"weights": _weights(model), "losses": losses, "sent": _sent(traffic), "held": _held(stepped)}
