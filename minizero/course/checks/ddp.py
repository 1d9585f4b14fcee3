"""The checks of exercises/01_ddp.ipynb.

Gradients that a check makes up are 10^rank times (1, 2, 3, …), so that the digits of a sum say whose values are in it. Those of
a real backward are compared with the ranks' own local gradients, taken before the answer's hooks are there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, show
from minizero.parts import calls

# --- 1. everyone starts as rank 0 -------------------------------------------------------------------


class _Start(nn.Module):
    """A model of whatever a broadcast may forget. `parts` says what it has."""

    def __init__(self, parts: Sequence[str], rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        if "frozen" in parts:
            self.frozen = nn.Parameter(torch.tensor([[3.0], [4.0], [5.0]]), requires_grad=False)
        if "buffers" in parts:
            self.register_buffer("running_mean", torch.tensor([6.0, 7.0]))
            self.register_buffer("batches", torch.tensor(8))
        if "unsaved" in parts:
            self.register_buffer("mask", torch.tensor([9.0]), persistent=False)
        if "tied" in parts:
            self.head = nn.Module()
            self.head.weight = self.weight
        for tensor in self.tensors().values():
            tensor.data *= 10**rank

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


_FORGOTTEN = {
    "weight": "nothing arrives on this rank: is a copy broadcast, not written back, or not waited for?",
    "frozen": "only trainable parameters are broadcast: a frozen one has no gradient either, and differs for ever",
    "running_mean": "model.parameters() has no buffers in it: model.buffers() has",
    "batches": "a buffer may hold whole numbers: broadcast it as it is",
    "mask": "state_dict() leaves this buffer out (persistent=False): model.buffers() has it",
}


@exercise(
    "ddp.broadcast",
    call="broadcast(model)",
    hints=[
        "Which tensors of a model influence what it computes? Which of them would no gradient ever bring together?",
        "model.parameters() has the frozen ones in it, and a tied one once. model.buffers() has what BatchNorm counts. "
        "dist.broadcast(tensor, src=0) overwrites the tensor on every rank but 0.",
        "For each tensor in the parameters and then in the buffers: broadcast its .data from rank 0. Every rank does the same, without an if.",
    ],
)
def broadcast(answer, expect):
    """parameters, frozen ones too, and buffers on 2 and 3 ranks; the same tensors as before; at most one broadcast for each"""
    kinds = {
        "": "one parameter",
        "frozen": "a frozen parameter",
        "buffers": "buffers",
        "unsaved": "a buffer that is not saved",
    }
    parts: list[str] = []
    for part, text in (kinds | {"tied": "a tied weight"}).items():
        parts.append(part)
        _everyone_starts_as_rank_0(answer, expect, 2, parts, text)
    _everyone_starts_as_rank_0(answer, expect, 3, parts, "all of these")


def _everyone_starts_as_rank_0(answer, expect: Expect, world_size: int, parts: list[str], text: str) -> None:
    expect.case(text, world_size=world_size)
    causes = {
        "src=1": "the source is rank 0, and every rank has to say so",
        "deadlock": "a broadcast is a call of all ranks, in the same order, and not of rank 0 alone: is it inside an `if`?",
        "leaf variable": "autograd watches parameters: write to param.data, or under torch.no_grad()",
    }
    outcomes = expect.run(_started, world_size, answer, parts, causes=causes)
    first = outcomes[0].value["before"]
    starts = [outcome.value["before"] for outcome in outcomes]
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        expect.that(
            not value["replaced"], "the model keeps its tensors: only their values change",
            "the same objects as before", f"another object as {', '.join(value['replaced'])} on rank {rank}",
            "an optimizer that was built before still holds the old one", "a tensor is replaced: overwrite its values instead",
        )  # fmt: skip
        expect.that(
            not value["refrozen"], "what was frozen stays frozen, and nothing else is",
            got=f"requires_grad of {', '.join(value['refrozen'])} has changed on rank {rank}",
        )  # fmt: skip
        for name, want in first.items():
            others = [start[name] for start in starts]
            expect.equal(
                value["after"][name], want, of=f"rank {rank}'s {name}",
                rule="rank 0 keeps its values" if rank == 0 else "every rank starts with rank 0's values",
                so="rank 0 is the one that the others follow" if rank == 0 else "the ranks train different models, and no gradient will show it",
                mistakes=_other_starts(name, rank, want, others),
            )  # fmt: skip
    for outcome in outcomes:
        others = sorted(set(outcome.count) - {"broadcast"})
        cause = "ranks that only listen need not send: an all_reduce or all_gather costs more and changes nothing"
        if others == ["barrier"]:
            cause = "a rank that receives waits for rank 0 anyway"
        expect.that(not others, "broadcasts are enough", "nothing but broadcasts", ", ".join(others), cause=cause)
        _check_complete(expect, outcome)
        count, tensors = outcome.count.get("broadcast", 0), len(first)
        cause = (
            "a tied weight is sent under both of its names" if "tied" in parts else "a tensor is sent more than once"
        )
        if any(op.dtype == "uint8" for op in outcome.ops):
            cause = "an object is pickled and sent: broadcast the tensors themselves"
        expect.that(
            count <= tensors,
            "one broadcast for each tensor is enough",
            f"at most {tensors}",
            f"{count} on rank {outcome.rank}",
            cause=cause,
        )


def _other_starts(name: str, rank: int, want: Tensor, starts: list[Tensor]) -> dict[str, Tensor]:
    last = len(starts) - 1
    total = torch.stack(starts).sum(0)
    mistakes = {
        f"rank {last} is the source: it has to be rank 0": starts[last],
        "the ranks' values are averaged: rank 0's are to be taken as they are": (total / len(starts)).to(want.dtype),
        "the ranks' values are summed: rank 0's are to be taken as they are": total,
    }
    return {_FORGOTTEN[name]: starts[rank], **mistakes} if rank else mistakes


def _started(rank, answer, parts):
    model = _Start(parts, rank)
    tensors = model.tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trainable = {name: tensor.requires_grad for name, tensor in tensors.items()}
    answer(model)
    now = model.tensors()
    replaced = [name for name in tensors if now.get(name) is not tensors[name]]
    refrozen = [name for name in tensors if tensors[name].requires_grad != trainable[name]]
    return {"before": before, "after": now, "replaced": replaced, "refrozen": refrozen}


# --- gradients that are made up, and what may have become of them ------------------------------------


def _numbers(shapes: Sequence[tuple], rank: int) -> list[Tensor]:
    """Tensors of these shapes, filled with 10^rank times 1, 2, 3, …"""
    start, tensors = 1, []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + numel).float().view(shape) * 10**rank)
        start += numel
    return tensors


def _parameters(shapes: Sequence[tuple], frozen: Sequence[int] = ()) -> list[nn.Parameter]:
    """Parameters of these shapes. Their values differ from rank to rank: so it shows if they are averaged themselves."""
    value = 0.5 + torch.distributed.get_rank()
    return [nn.Parameter(torch.full(shape, value), requires_grad=i not in frozen) for i, shape in enumerate(shapes)]


def _check_complete(expect: Expect, outcome: Outcome) -> None:
    pending = sum(op.end is None for op in outcome.ops)
    expect.that(
        not pending, "every collective is waited for", "all complete", f"{pending} of {len(outcome.ops)} not waited for on rank {outcome.rank}",
        "what is read meanwhile may be half old, half new", "async_op=True returns a work, and its wait() is missing",
    )  # fmt: skip


def _check_means(
    expect: Expect, outcome: Outcome, got: list, local: list[list], names: Sequence[str], extra: Sequence[dict] = ()
) -> None:
    """Each of this rank's gradients is the mean over the ranks. `local`: what each rank had, None for nothing."""
    world_size, rank = len(local), outcome.rank
    for i, name in enumerate(names):
        own = [grads[i] for grads in local]
        have = [grad for grad in own if grad is not None]
        if not have:
            continue
        total = torch.stack(have).sum(0)
        nothing = torch.zeros_like(total)
        mine = nothing if own[rank] is None else own[rank]
        if got[i] is None:
            raise Finding(
                "a rank without a gradient gets the mean too", f"rank {rank}'s gradient of {name} is {show(total / world_size)}",
                "None", "the optimizer skips this parameter on this rank alone, and the ranks drift apart",
                "the mean is not put into .grad where there was none before",
            )  # fmt: skip
        mistakes = dict(extra[i]) if extra else {}
        mistakes |= {
            "the sum over the ranks is not divided by world_size": total,
            "it is divided twice by world_size": total / world_size**2,
            "it is divided by 2, whatever world_size is": total / 2,
            "the gradient is what this rank had before: the mean is not written back, or this one was not reduced": mine,
            "this rank's own gradient is divided, and nothing of the others arrives": mine / world_size,
            "it is divided by the number of ranks that had a gradient: one without counts as zeros": total / len(have),
        }
        expect.equal(
            got[i], total / world_size, of=f"rank {rank}'s gradient of {name}",
            rule="after it, every rank holds the mean of the ranks' gradients",
            so="the step is not the one that a single process would take", mistakes=mistakes,
        )  # fmt: skip


# --- 2. naive averaging ------------------------------------------------------------------------------

_SKIPPED = "a rank without a gradient sends nothing, and the others wait for it: let it send zeros"
_AVERAGE_CAUSES = {
    "different collectives": _SKIPPED,
    "deadlock": _SKIPPED,
    "NoneType": "param.grad is None where the parameter is frozen, or was not used on this rank",
}


@exercise(
    "ddp.average",
    call="average_gradients(model)",
    hints=[
        "What would one process have in .grad, if it had seen all ranks' rows? And what does a rank contribute that did not use a parameter at all?",
        "dist.all_reduce(tensor) leaves the sum in the tensor, on all ranks, and is a call that every rank has to make. Frozen parameters "
        "(requires_grad False) have no gradient on any rank; others may have .grad None on some.",
        "For each parameter with requires_grad: if .grad is None, make it zeros; all_reduce .grad; divide .grad by the world size.",
    ],
)
def average(answer, expect):
    """the mean on 2 and 3 ranks, parameters that are frozen or unused on a rank; one all_reduce each; 3 SGD steps against one process"""
    for world_size in (2, 3):
        expect.case("one parameter", world_size=world_size)
        _averaged(answer, expect, world_size, [(2,)])
    expect.case("parameter 0 is frozen", world_size=2)
    _averaged(answer, expect, 2, [(1,), (2,)], frozen=(0,))
    expect.case("rank 1 has no gradient for parameter 1", world_size=2)
    _averaged(answer, expect, 2, [(2,), (3,), ()], missing={1: (1,)})
    for world_size in (2, 3):
        _check_three_steps(expect, world_size, lambda model: partial(answer, model), _AVERAGE_CAUSES)


def _averaged(answer, expect: Expect, world_size: int, shapes: list[tuple], frozen=(), missing=None) -> None:
    outcomes = expect.run(_with_gradients, world_size, answer, shapes, frozen, missing or {}, causes=_AVERAGE_CAUSES)
    local = [outcome.value["local"] for outcome in outcomes]
    trainable = [i for i in range(len(shapes)) if i not in frozen]
    for outcome in outcomes:
        expect.that(
            not outcome.value["moved"], "only gradients are averaged: the weights stay as they are",
            got=f"on rank {outcome.rank} parameter {', '.join(outcome.value['moved'])} has other values than before",
            cause="the parameter itself is averaged (or stepped): only its .grad is to change",
        )  # fmt: skip
        _check_complete(expect, outcome)
        _check_means(expect, outcome, outcome.value["grads"], local, [f"parameter {i}" for i in range(len(shapes))])
        expect.that(
            all(outcome.value["grads"][i] is None for i in frozen), "a frozen parameter has no gradient",
            ".grad is None", "zeros or a mean", "a frozen weight costs memory and bytes, and weight decay may move it",
            "every parameter is given a gradient, also where requires_grad is False",
        )  # fmt: skip
        sent, want = [op.numel for op in outcome.ops], [torch.Size(shapes[i]).numel() for i in trainable]
        cause = ""
        if "reduce" in outcome.count:
            cause = "a reduce leaves the sum on one rank only"
        elif len(sent) > len(want):
            cause = "frozen parameters are reduced too" if frozen else "more is sent than the gradients"
        elif sent == [sum(want)]:
            cause = "all gradients travel as one message: that is a good idea, and exercise 4"
        expect.that(
            set(outcome.count) == {"all_reduce"} and sorted(sent) == sorted(want),
            "one all_reduce for each trainable parameter, of its gradient's elements",
            f"all_reduces of {want} elements", f"{show(outcome.count)}, of {sent} elements", cause=cause,
        )  # fmt: skip


class _Row(nn.Module):
    """A model of parameters in a row, named "0", "1", …"""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        for i, param in enumerate(params):
            self.register_parameter(str(i), param)


def _with_gradients(rank, answer, shapes, frozen, missing):
    params = _parameters(shapes, frozen)
    start = [param.detach().clone() for param in params]
    for i, (param, grad) in enumerate(zip(params, _numbers(shapes, rank), strict=True)):
        if i not in frozen and i not in missing.get(rank, ()):
            param.grad = grad
    local = [None if param.grad is None else param.grad.clone() for param in params]
    answer(_Row(params))
    moved = [
        str(i) for i, (param, before) in enumerate(zip(params, start, strict=True)) if not torch.equal(param, before)
    ]
    return {"local": local, "grads": [param.grad for param in params], "moved": moved}


# --- a training run that one process can repeat --------------------------------------------------------

_STEPS, _ROWS, _LR = 3, 2, 0.25  # rows: of each rank


def _awkward_model() -> nn.Module:
    """39 parameters in pieces of 15, 5 (frozen), 7 and so on: nothing divides evenly."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    return model


def _batches(world_size: int, rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Pairs (x, y): the rows of one rank, or of all of them."""
    generator = torch.Generator().manual_seed(world_size)
    rows = world_size * _ROWS
    whole = [
        (torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(_STEPS)
    ]
    return whole if rank is None else [(x[rank * _ROWS :][:_ROWS], y[rank * _ROWS :][:_ROWS]) for x, y in whole]


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _train(batches: list[tuple[Tensor, Tensor]], averaging: Callable | None = None, lr: float = _LR) -> Tensor:
    """Weights after SGD over the batches. `averaging(model)` returns what is called after each backward."""
    model = _awkward_model()
    average = averaging(model) if averaging else lambda: None
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _three_steps(rank, averaging):
    return _train(_batches(torch.distributed.get_world_size(), rank), averaging)


def _check_three_steps(expect: Expect, world_size: int, averaging: Callable, causes: dict[str, str]) -> None:
    expect.case(f"{_STEPS} steps of SGD", world_size=world_size)
    for outcome in expect.run(_three_steps, world_size, averaging, causes=causes):
        _check_weights(expect, outcome.rank, outcome.value, world_size, {})


def _check_weights(expect: Expect, rank: int, weights: Tensor, world_size: int, mistakes: dict[str, Tensor]) -> None:
    expect.equal(
        weights, _reference(world_size), of=f"rank {rank}'s weights, in a row",
        rule=f"after {_STEPS} steps the weights are those of one process on the whole batch", so="this is another training run",
        mistakes=mistakes | _trained_otherwise(world_size, rank),
    )  # fmt: skip


def _reference(world_size: int) -> Tensor:
    return _train(_batches(world_size))


def _trained_otherwise(world_size: int, rank: int) -> dict[str, Tensor]:
    return {
        "the ranks' gradients are summed, not averaged": _train(_batches(world_size), lr=_LR * world_size),
        "the gradients are divided twice": _train(_batches(world_size), lr=_LR / world_size),
        "each rank trains on its own rows: nothing is reduced": _train(_batches(world_size, rank)),
        "the weights are those of the start": _weights(_awkward_model()),
    }


# --- 3. which parameters share a bucket ---------------------------------------------------------------


@exercise(
    "ddp.partition",
    call="partition(params, bucket_bytes)",
    hints=[
        "Which parameter's gradient does backward finish first? So which one should the first bucket begin with?",
        "param.numel() * param.element_size() is a parameter's bytes (param.nbytes as well). A bucket closes before the parameter that would take it over the "
        "limit; a parameter that is larger than the limit still needs a bucket.",
        "Go through the trainable parameters in reverse. Begin a new bucket if there is none yet, or if the bytes in the last one plus this parameter's are more than "
        "bucket_bytes. Then put the parameter into the last bucket.",
    ],
)
def partition(answer, expect):
    """reverse order; bytes, not elements; exact fits, oversized and frozen parameters; nothing lost, no bucket empty"""
    fp32 = torch.float32
    cases = [
        ("", [2, 1, 2, 1, 1], fp32, (), 12),
        ("a parameter larger than a bucket", [2, 10, 2], fp32, (), 16),
        ("only a parameter larger than a bucket", [10], fp32, (), 16),
        ("2 bytes an element", [2, 4, 4, 6], torch.bfloat16, (), 16),
        ("parameters 1 and 3 are frozen", [1, 2, 3, 4, 5], fp32, (1, 3), 20),
        ("all parameters are frozen", [2, 3], fp32, (0, 1), 16),
    ]
    for text, sizes, dtype, frozen, bucket_bytes in cases:
        expect.case(text, elements=sizes, bucket_bytes=bucket_bytes)
        trainable = [i for i in range(len(sizes)) if i not in frozen]
        itemsize = torch.empty((), dtype=dtype).element_size()
        got = expect.call(_indices, answer, sizes, dtype, frozen, bucket_bytes)
        want = _cut(trainable[::-1], sizes, bucket_bytes, itemsize)
        forward = _cut(trainable, sizes, bucket_bytes, itemsize)
        mistakes = {
            "the parameters are taken in the order of registration: backward ends with the first of them": forward,
            "the buckets are reversed, the parameters inside them are not": [bucket[::-1] for bucket in want],
            "buckets are cut in the order of registration and then reversed: cut them in reverse": [
                b[::-1] for b in forward[::-1]
            ],
            "all is in one bucket: is bucket_bytes compared with bytes, or with elements?": [trainable[::-1]],
            "elements are counted, not bytes": _cut(trainable[::-1], sizes, bucket_bytes, 1),
            "4 bytes an element are taken for granted: ask element_size()": _cut(
                trainable[::-1], sizes, bucket_bytes, 4
            ),
            "a frozen parameter is in a bucket: it has no gradient, so the bucket is never full": _cut(
                list(range(len(sizes)))[::-1], sizes, bucket_bytes, itemsize
            ),
            "a bucket that is filled to the last byte is not over the limit yet": _cut(
                trainable[::-1], sizes, bucket_bytes - 1, itemsize
            ),
            "a bucket closes before the parameter that would overflow it, not after": _cut_late(
                trainable[::-1], sizes, bucket_bytes, itemsize
            ),
            "the last bucket is lost: it is still open when the loop ends": want[:-1],
            "there is an empty bucket in front: close a bucket only if something is in it": [[], *want],
            "an empty bucket is left at the end": [*want, []],
            "each parameter has a bucket to itself": [[i] for i in trainable[::-1]],
        }
        _same_buckets(got, want, {cause: wrong for cause, wrong in mistakes.items() if wrong != want})


def _same_buckets(got: object, want: list[list[int]], mistakes: dict[str, list[list[int]]]) -> None:
    if got == want:
        return
    if not isinstance(got, list):
        raise Finding(
            "the answer is a list of buckets, and a bucket a list of parameters",
            f"{want}, by the parameters' places",
            f"{got}",
        )
    cause = next((text for text, wrong in mistakes.items() if got == wrong), "")
    members = [i for bucket in got for i in bucket]
    missing = sorted({i for bucket in want for i in bucket} - set(members))
    twice = sorted({i for i in members if members.count(i) > 1} - {_UNKNOWN})
    if not cause and _UNKNOWN in members:
        cause = f"what stands at {_UNKNOWN} is none of the parameters: a bucket holds them themselves, not copies or numbers"
    elif not cause and [] in got:
        cause = "a bucket is empty: a parameter larger than the limit gets a bucket, but not an empty one before it"
    elif not cause and (missing or twice):
        cause = f"in no bucket: {missing}" if missing else f"in more than one bucket: {twice}"
    raise Finding(
        "reverse order, and a bucket closes before the parameter that would overflow it",
        f"{want}, by the parameters' places", f"{got}".replace("'", ""), cause=cause,
    )  # fmt: skip


_UNKNOWN = "?"


def _cut(order: list[int], sizes: list[int], bucket_bytes: int, itemsize: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for i in order:
        if not buckets or (sum(sizes[j] for j in buckets[-1]) + sizes[i]) * itemsize > bucket_bytes:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def _cut_late(order: list[int], sizes: list[int], bucket_bytes: int, itemsize: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for i in order:
        if not buckets or sum(sizes[j] for j in buckets[-1]) * itemsize >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def _indices(answer, sizes, dtype, frozen, bucket_bytes):
    params = [
        nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=i not in frozen) for i, size in enumerate(sizes)
    ]
    buckets = answer(params, bucket_bytes)
    place = {id(param): i for i, param in enumerate(params)}
    if not isinstance(buckets, (list, tuple)):
        return buckets if buckets is None else f"a {type(buckets).__name__}"
    if not all(isinstance(bucket, (list, tuple)) for bucket in buckets):
        return f"a list of {', '.join(sorted({type(bucket).__name__ for bucket in buckets}))}"
    return [[place.get(id(param), _UNKNOWN) for param in bucket] for bucket in buckets]


# --- 4. one collective for each bucket ----------------------------------------------------------------


@exercise(
    "ddp.buckets",
    call="average_in_buckets(buckets)",
    points=2,
    hints=[
        "An all_reduce takes one tensor. How do gradients of different shapes become one, and how do they find their way back?",
        "torch.cat of flattened tensors; Tensor.split with a list of numels; view_as and copy_. flatten() also takes a gradient that is not contiguous, "
        "view(-1) does not. Every rank has to send the same number of elements.",
        "For each bucket: give every parameter without a gradient zeros; concatenate the flattened gradients; all_reduce; divide by the world size; split by the "
        "parameters' numels and copy each piece, viewed in its shape, into its gradient.",
    ],
)
def buckets(answer, expect):
    """the mean on 2 and 3 ranks, awkward shapes, gradients missing on a rank or not contiguous; one all_reduce a bucket, in order"""
    _reduced(answer, expect, "one bucket", 2, [(2,), (3,)], [[1, 0]])
    _reduced(answer, expect, "two buckets", 3, [(2, 2), (1,), (), (3, 1)], [[3, 2], [1, 0]])
    _reduced(answer, expect, "rank 1 has no gradient for parameter 1", 2, [(2,), (3,)], [[1, 0]], missing={1: (1,)})
    _reduced(answer, expect, "a gradient that is not contiguous", 2, [(2, 3), (2,)], [[1, 0]], transposed=(0,))


def _reduced(answer, expect: Expect, text: str, world_size: int, shapes, buckets, missing=None, transposed=()) -> None:
    expect.case(text, shapes=[list(shape) for shape in shapes], world_size=world_size)
    unequal = "the ranks send different messages"
    if missing:
        unequal = "a rank without a gradient leaves it out of its message, which is then shorter than the others': it counts as zeros"
    causes = {
        "view size is not compatible": "a gradient need not be contiguous: flatten() or reshape(-1) copies where it must, view(-1) refuses",
        "stack expects": "gradients have different shapes: flatten them, then concatenate",
        "attempting to assign a gradient of size": "a piece of the flat tensor has one dimension: view it in the parameter's shape",
        "NoneType": "param.grad is None where the parameter was not used on this rank: it counts as zeros",
        "deadlock": unequal,
        "different collectives": unequal,
        "died": unequal,
    }
    outcomes = expect.run(_with_buckets, world_size, answer, shapes, buckets, missing or {}, transposed, causes=causes)
    local = [outcome.value["local"] for outcome in outcomes]
    numels = [torch.Size(shape).numel() for shape in shapes]
    want = [sum(numels[i] for i in bucket) for bucket in buckets]
    for outcome in outcomes:
        sent, got = [op.numel for op in outcome.ops], outcome.value["grads"]
        expect.that(
            not outcome.value["moved"], "only gradients are averaged: the weights stay as they are",
            got=f"rank {outcome.rank}'s weights have other values than before", cause="the parameters themselves are averaged, not their .grad",
        )  # fmt: skip
        if sent != want or set(outcome.count) != {"all_reduce"}:
            cause = {
                len(shapes): "each gradient is sent by itself: put a bucket's gradients into one tensor first",
                1: "all buckets are sent as one message",
            }.get(len(sent), "")
            if sent == want[::-1]:
                cause = "the buckets are sent in reverse: they are in the right order already"
            raise Finding(
                "one all_reduce for each bucket, in the order of the list",
                f"all_reduces of {want} elements", f"{show(outcome.count)}, of {sent} elements", cause=cause,
            )  # fmt: skip
        _check_complete(expect, outcome)
        misplaced = _misplaced(local, shapes, buckets)
        cause = next((cause for cause, wrong in misplaced.items() if differ(got, wrong, "", 1e-6) is None), None)
        extra = [{cause: wrong} for wrong in misplaced[cause]] if cause else ()
        _check_means(expect, outcome, got, local, [f"parameter {i}" for i in range(len(shapes))], extra)


def _misplaced(local: list[list], shapes, buckets) -> dict[str, list[Tensor]]:
    """What all gradients become if the flat tensor is cut wrongly."""
    zeros = [torch.zeros(shape) for shape in shapes]
    from_start, other_order = list(zeros), list(zeros)
    for bucket in buckets:
        flats = [torch.cat([(zeros[i] if grads[i] is None else grads[i]).flatten() for i in bucket]) for grads in local]
        mean, start = torch.stack(flats).mean(0), 0
        for i in reversed(bucket):
            from_start[i] = mean[: zeros[i].numel()].view(shapes[i])
            other_order[i] = mean[start : start + zeros[i].numel()].view(shapes[i])
            start += zeros[i].numel()
    return {
        "every gradient is cut from the start of the flat tensor: move on by numel each time": from_start,
        "the gradients are taken out in another order than they were put in": other_order,
    }


def _with_buckets(rank, answer, shapes, buckets, missing, transposed):
    params = _parameters(shapes)
    for i, (param, grad) in enumerate(zip(params, _numbers(shapes, rank), strict=True)):
        if i not in missing.get(rank, ()):
            param.grad = grad.t().contiguous().t() if i in transposed else grad
    start = [param.detach().clone() for param in params]
    local = [None if param.grad is None else param.grad.clone() for param in params]
    answer([[params[i] for i in bucket] for bucket in buckets])
    moved = any(not torch.equal(param, before) for param, before in zip(params, start, strict=True))
    return {"local": local, "grads": [param.grad for param in params], "moved": moved}


# --- 5. reductions that leave while backward runs ------------------------------------------------------


class _Branches(nn.Module):
    """A layer `last` on top of branches `a` and `b`. Backward reaches the branch first that forward used last."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            self.a, self.b, self.last = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return self.last(sum({"a": 1, "b": 2}[name] * self.get_submodule(name)(x) for name in use))

    def buckets(self) -> list[list[nn.Parameter]]:
        return [[*layer.parameters()][::-1] for layer in (self.last, self.b, self.a)]


_NAMES = [name for name, _ in _Branches().named_parameters()]
_BUCKETS = ("last", "b", "a")
_NUMELS, _PIECES = [3, 8, 8], [1, 2, 2, 6, 2, 6]  # of the buckets, and of the gradients in them


def _loss(model: _Branches, rank: int, batch: int, use: str) -> Tensor:
    generator = torch.Generator().manual_seed(10 * batch + rank)
    return model(torch.randn(2, 3, generator=generator), use).square().mean()


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.detach().clone() for param in model.parameters()]


def _local_gradients(rank: int, losses: Sequence[tuple[int, str, float]]) -> list[Tensor | None]:
    """What this rank alone would have in .grad after these losses (batch, branches, factor)."""
    model = _Branches()
    for batch, use, factor in losses:
        (_loss(model, rank, batch, use) * factor).backward()
    return _gradients(model)


class _Watch:
    """One step of this rank: its collectives, and how many of them were issued when a gradient arrived.

    Its hooks are registered first, so a gradient is noted before the answer's own hook sees it.
    """

    def __init__(self, model: nn.Module):
        self.begin()
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.seen.append((name, len(self.calls))))

    def begin(self) -> None:
        self.calls: list[calls.Call] = []
        self.seen: list[tuple[str, int]] = []

    def backward_ended(self) -> None:
        self._in_backward, self._ended = len(self.calls), time.perf_counter()

    def report(self) -> dict:
        return {
            "seen": self.seen,
            "issued": self._in_backward,
            "sent": [call.numel for call in self.calls],
            "kinds": sorted({call.op for call in self.calls}),
            "waited in backward": sum(call.end is not None and call.end <= self._ended for call in self.calls),
            "synchronous": any(call.sync for call in self.calls),
            "not waited for": sum(call.end is None for call in self.calls),
        }

    def __enter__(self) -> _Watch:
        calls.listeners.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        calls.listeners.remove(self)

    # What calls.listeners are told.

    def issued(self, call: calls.Call) -> None:
        self.calls.append(call)

    def waiting(self, call: calls.Call) -> None:
        pass

    def done(self, call: calls.Call) -> None:
        pass


def _backwards(rank, answer, uses, rounds):
    """`rounds` times one backward and finish(). `uses`: the branches that each rank uses, in forward's order."""
    model = _Branches()
    start = copy.deepcopy(model.state_dict())
    results = []
    with _Watch(model) as watch:
        engine = answer(model, model.buckets())
        for batch in range(rounds):
            model.zero_grad()
            watch.begin()
            _loss(model, rank, batch, uses[rank]).backward()
            watch.backward_ended()
            engine.finish()
            moved = any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
            local = _local_gradients(rank, [(batch, uses[rank], 1.0)])
            results.append({"local": local, "grads": _gradients(model), "moved": moved} | watch.report())
    return results


_OVERLAP_CAUSES = {
    "'NoneType' object has no attribute 'finish'": "the call returns None: a class, or a function that returns an object with finish()",
    "NoneType": "finish() meets parameters without a gradient: they count as zeros",
    "has no attribute 'finish'": "the class needs a method finish()",
}


@exercise(
    "ddp.overlap",
    call="Overlapped(model, buckets)",
    points=3,
    hints=[
        "A bucket may leave when its last gradient is there and every bucket ahead of it has left. Who notices that moment, and what has to be left undone until backward is over?",
        "param.register_post_accumulate_grad_hook(fn) calls fn(param). dist.all_reduce(flat, async_op=True) returns a work; until work.wait() the flat tensor belongs to it. "
        "Invariant: all ranks issue bucket 0, 1, 2, … in this order, each exactly once a step.",
        "Hook: note that the parameter has arrived; while the next bucket exists and all its parameters have arrived, launch it. Launch: concatenate the gradients (zeros for None), "
        "all_reduce with async_op=True, keep the work and the flat tensor. finish: launch what is left, in order; wait for each, divide, copy the pieces into .grad; forget what has arrived.",
    ],
)
def overlap(answer, expect):
    """each bucket leaves in the hook that fills it, in order, not waited for in backward; unused and reordered layers; 3 SGD steps against one process"""
    order = "the ranks launch their buckets in different orders: that of the list has to hold, whichever is full first"
    unused = "on a rank that did not use b its bucket never fills, and the other rank waits for it: finish() has to launch it"
    _overlapped(answer, expect, "two backwards", 2, ("ab", "ab"), "the ranks issue different collectives")
    _overlapped(answer, expect, "rank 1's gradients of a and b arrive in the other order", 2, ("ab", "ba"), order)
    _overlapped(answer, expect, "rank 1 does not use b", 2, ("ab", "a"), unused)
    _overlapped(answer, expect, "two backwards", 3, ("ab", "ab", "ab"), order)
    for world_size in (2, 3):
        _check_three_steps(expect, world_size, partial(_overlapping, answer), _OVERLAP_CAUSES)


def _overlapping(answer, model):
    backwards = [param for param in reversed(list(model.parameters())) if param.requires_grad]
    return answer(model, [backwards[:2], backwards[2:]]).finish


def _overlapped(answer, expect: Expect, text: str, world_size: int, uses: Sequence[str], unequal: str) -> None:
    """`unequal`: why the ranks' collectives may not pair up here."""
    expect.case(text, world_size=world_size)
    causes = _OVERLAP_CAUSES | {"deadlock": unequal, "different collectives": unequal, "died": unequal}
    outcomes = expect.run(_backwards, world_size, answer, uses, 2, causes=causes)
    for i in range(2):
        expect.case(f"{text}, backward {i + 1}", world_size=world_size)
        rounds = [outcome.value[i] for outcome in outcomes]
        local = [each["local"] for each in rounds]
        for outcome, this in zip(outcomes, rounds, strict=True):
            _sent_in_buckets(outcome.rank, this, first=i == 0)
        for outcome, this in zip(outcomes, rounds, strict=True):
            expect.that(
                not this["not waited for"], "finish() waits for every collective", "all waited for",
                f"{this['not waited for']} still under way when rank {outcome.rank}'s finish() returns",
                "the optimizer may read a gradient before it has arrived", "wait() is missing for some of the works",
            )  # fmt: skip
            expect.that(
                not this["moved"], "only gradients are averaged: the weights stay as they are",
                got=f"rank {outcome.rank}'s weights have other values after backward and finish()",
                cause="the hook receives the parameter: what is to be averaged is its .grad",
            )  # fmt: skip
            extra = _crossed(local, outcome.rank) if set(uses) == {"ab", "ba"} else [{} for _ in _NAMES]
            early = "the bucket leaves before this gradient is in .grad"
            early += ": forget in finish() what has arrived" if i else " (a register_hook runs before that)"
            extra = [wrong | {early: torch.zeros_like(grad)} for wrong, grad in zip(extra, local[0], strict=True)]
            _check_means(expect, outcome, this["grads"], local, _NAMES, extra)
        for outcome, this in zip(outcomes, rounds, strict=True):
            _left_in_time(outcome.rank, this, first=i == 0)
            expect.that(
                not this["waited in backward"], "no wait before backward is over",
                "all works still open", f"{this['waited in backward']} of {len(this['sent'])} are complete when rank {outcome.rank}'s backward ends",
                "backward stands still while the bytes travel: nothing overlaps",
                "all_reduce returns when it is complete, unless it is given async_op=True" if this["synchronous"] else "there is a wait() in the hook",
            )  # fmt: skip


def _sent_in_buckets(rank: int, this: dict, first: bool) -> None:
    if this["sent"] == _NUMELS and this["kinds"] == ["all_reduce"]:
        return
    sent, cause = this["sent"], ""
    if not sent:
        cause = (
            "nothing is reduced"
            if first
            else "nothing is reduced from the second backward on: forget in finish() what has arrived"
        )
    elif sent == _PIECES:
        cause = "each gradient is sent by itself: a bucket leaves as one message"
    elif sent == _NUMELS[::-1]:
        cause = "the buckets leave in reverse"
    elif len(sent) > len(_NUMELS):
        cause = (
            "a bucket is launched twice: forget in finish() what was launched, and launch there only what has not left"
        )
    elif sent == [sum(_NUMELS)]:
        cause = "all buckets are sent as one message"
    elif not first:
        cause = "the second backward goes on counting where the first one ended: forget in finish() what has arrived and what was launched"
    raise Finding(
        "one all_reduce for each bucket, in the order of the list", f"all_reduces of {_NUMELS} elements",
        _told(this, rank), cause=cause,
    )  # fmt: skip


def _told(this: dict, rank: int) -> str:
    return (
        f"{', '.join(this['kinds'])} of {this['sent']} elements on rank {rank}"
        if this["sent"]
        else f"none on rank {rank}"
    )


def _crossed(local: list[list], rank: int) -> list[dict[str, Tensor]]:
    """What two ranks get if each sends first what is full first: rank 0's b is added to rank 1's a, and the other way round."""
    cause = (
        "the bucket that is full first is sent first, and rank 0's b is added to rank 1's a: keep the order of the list"
    )
    partner = {"a": "b", "b": "a"}
    crossed: list[dict[str, Tensor]] = []
    for i, name in enumerate(_NAMES):
        layer, _, kind = name.partition(".")
        other = _NAMES.index(f"{partner.get(layer, layer)}.{kind}")
        crossed.append({cause: (local[rank][i] + local[1 - rank][other]) / 2} if layer in partner else {})
    return crossed


def _left_in_time(rank: int, this: dict, first: bool) -> None:
    """At each gradient, exactly those buckets have left that are full and have only such in front of them."""
    arrived: set[str] = set()
    moments = [*this["seen"], ("", this["issued"])]
    for place, (name, issued) in enumerate(moments):
        full = 0
        while full < len(_BUCKETS) and {f"{_BUCKETS[full]}.weight", f"{_BUCKETS[full]}.bias"} <= arrived:
            full += 1
        when = f"when gradient {place + 1} of {len(moments) - 1} arrives" if name else "when backward ends"
        if issued != full:
            if this["issued"] == 0:
                cause = "everything is launched in finish(): nothing overlaps"
                cause += "" if first else ". In the first backward it did: let finish() begin the count anew"
            elif issued > full:
                cause = "a bucket leaves before it is full, or before those ahead of it have left"
            elif this["issued"] == len(_BUCKETS):
                cause = "the buckets wait for the last gradient of all: launch a bucket as soon as its own are there"
            else:
                cause = "a later bucket is full as well, and stays: after a launch, look at the next one"
            raise Finding(
                "a bucket leaves in the hook of its last gradient, if all ahead of it have left",
                f"{when}, {full} of {len(_BUCKETS)} buckets are on their way", f"{issued} on rank {rank}",
                "bytes that could travel during backward travel after it" if issued < full else "", cause,
            )  # fmt: skip
        arrived.add(name)


# --- 6. accumulation ---------------------------------------------------------------------------------


def _accumulations(rank, answer, uses, steps, raising):
    """`steps` steps, each of len(uses) micro-batches, all but the last inside no_sync(). `uses`: the branches in each."""
    model = _Branches()
    results = []
    with _Watch(model) as watch:
        engine = answer(model, model.buckets())
        for step in range(steps):
            model.zero_grad()
            if raising:
                with suppress(ZeroDivisionError), engine.no_sync():
                    raise ZeroDivisionError
            losses = [(10 * step + i, use, 1 / len(uses)) for i, use in enumerate(uses)]
            watch.begin()
            for batch, use, factor in losses[:-1]:
                with engine.no_sync():
                    (_loss(model, rank, batch, use) * factor).backward()
            inside = len(watch.calls)
            batch, use, factor = losses[-1]
            (_loss(model, rank, batch, use) * factor).backward()
            watch.backward_ended()
            engine.finish()
            local = {"local": losses, "last": losses[-1:], "before": losses[:-1]}
            local = {name: _local_gradients(rank, some) for name, some in local.items()}
            results.append({"inside": inside, "grads": _gradients(model)} | local | watch.report())
    return results


@exercise(
    "ddp.accumulate",
    call="Accumulating(model, buckets)",
    points=2,
    hints=[
        "The hooks fire in every backward. What do they have to know in order to keep still, and who tells them?",
        "A @contextmanager runs what stands before `yield` at the start of the with block, and what stands in `finally` after it, exceptions included. A parameter that was used only in an "
        "earlier micro-batch has a gradient, though its hook does not fire in the last backward.",
        "Keep a switch on the object, on by default. The hook does nothing while it is off; no_sync() turns it off and, in a finally, back to what it was. finish() stays as it is: it launches "
        "what is left with whatever is in .grad.",
    ],
)
def accumulate(answer, expect):
    """no collective inside no_sync(), then one for each bucket, while the last backward runs; exceptions; layers used in one micro-batch only"""
    _accumulated(answer, expect, "1 micro-batch", 2, ["ab"])
    _accumulated(answer, expect, "3 micro-batches", 2, ["ab", "ab", "ab"])
    _accumulated(answer, expect, "2 micro-batches, b is used in the first only", 2, ["ab", "a"])
    _accumulated(answer, expect, "an exception has left a no_sync() block before", 2, ["ab"], raising=True)
    _accumulated(answer, expect, "2 micro-batches", 3, ["ab", "ab"])


def _accumulated(answer, expect: Expect, text: str, world_size: int, uses: list[str], raising: bool = False) -> None:
    expect.case(text, world_size=world_size)
    causes = {
        "has no attribute 'no_sync'": "the class needs a method no_sync()",
        "context manager": "no_sync() is called in a with statement: keep @contextmanager above it, and a yield in it",
    } | _OVERLAP_CAUSES
    outcomes = expect.run(_accumulations, world_size, answer, uses, 2, raising, causes=causes)
    for step in range(2):
        expect.case(f"{text}, step {step + 1}", world_size=world_size)
        for outcome in outcomes:
            this = outcome.value[step]
            expect.that(
                this["inside"] == 0, "inside no_sync() nothing is sent", "0 collectives",
                f"{this['inside']} after {len(uses) - 1} backwards inside no_sync() on rank {outcome.rank}",
                "a step of G micro-batches sends up to G times as much as it has to",
                "the hook does not look at the switch, so every micro-batch is reduced",
            )  # fmt: skip
            cause = "a bucket is sent more than once in a step" if len(this["sent"]) > len(_NUMELS) else ""
            if not this["sent"]:
                cause = "reduction stays off: is the switch turned on again when the with block ends"
                cause += ", also after an exception (try … finally)?" if raising else "?"
            expect.that(
                this["sent"] == _NUMELS and this["kinds"] == ["all_reduce"], "then one all_reduce for each bucket",
                f"all_reduces of {_NUMELS} elements", _told(this, outcome.rank),
                cause=cause,
            )  # fmt: skip
        for outcome in outcomes:
            values = [each.value[step] for each in outcomes]
            extra = [_accumulated_otherwise(values, outcome.rank, i) for i in range(len(_NAMES))]
            _check_means(
                expect, outcome, values[outcome.rank]["grads"], [value["local"] for value in values], _NAMES, extra
            )
        for outcome in outcomes:
            this = outcome.value[step]
            if all(use == "ab" for use in uses):
                cause = "the hooks stay quiet, and finish() launches everything: is the switch turned on again?"
                if raising:
                    cause = "the hooks stay quiet after the exception: turn the switch on again in a finally"
                expect.that(
                    this["issued"] == len(_NUMELS), "the last backward, outside no_sync(), reduces from its hooks",
                    f"{len(_NUMELS)} all_reduces issued when it ends", f"{this['issued']} on rank {outcome.rank}",
                    "nothing overlaps", cause,
                )  # fmt: skip


def _accumulated_otherwise(values: list[dict], rank: int, i: int) -> dict[str, Tensor]:
    nothing = torch.zeros_like(values[0]["local"][i])
    last = sum((nothing if value["last"][i] is None else value["last"][i]) for value in values) / len(values)
    before = [value["before"][i] for value in values]
    wrong = {"only the last micro-batch is in it: what the earlier ones left in .grad is lost": last}
    if all(grad is not None for grad in before):
        late = "this rank's earlier micro-batches are added to the mean of the last one: reduce what has come together in .grad"
        early = "the bucket leaves before the last micro-batch's gradient is in it: what arrives inside no_sync() does not fill a bucket"
        wrong |= {late: last + before[rank], early: sum(before) / len(before)}
    return wrong


# --- 7. say the number -------------------------------------------------------------------------------


@number(
    "ddp.number",
    hints=[
        "How many times does one step reduce the gradients? What does one all-reduce of Ψ elements make a rank send? How many bytes has an element?",
        "An all-reduce is a reduce-scatter and an all-gather, each Ψ(N−1)/N elements. A 16-bit gradient has 2 bytes. Inside no_sync() nothing is sent.",
        "Reductions in a step (1 with no_sync, else one for each micro-batch) × 2 × (N−1)/N × Ψ × 2 bytes.",
    ],
)
def traffic(rng):
    """GB that one rank sends in a step: both halves of the all-reduce, (N−1)/N, the bytes of an element, micro-batches"""
    psi, n, g = rng.choice([3, 7, 13]), rng.choice([4, 8, 16]), rng.choice([3, 5, 6])
    quiet = rng.choice([True, False])
    reductions = 1 if quiet else g
    answer = reductions * 2 * 2 * psi * (n - 1) / n
    how = "all but the last inside no_sync()" if quiet else "without no_sync()"
    return Question(
        text=f"{psi} B parameters, DDP on {n} GPUs, gradients in 16 bits, {g} micro-batches a step, {how}: how many GB does one GPU send in a step?",
        answer=answer,
        unit="GB",
        working=[
            f"reductions in a step         {reductions}"
            + ("   (only the last backward reduces)" if quiet else "   (every backward reduces)"),
            f"an all-reduce                2 × (N−1)/N = 2 × {n - 1}/{n} elements for each parameter",
            "an element                   2 bytes",
            f"together                     {reductions} × 2 × {n - 1}/{n} × {psi} B × 2 bytes = {answer:g} GB",
        ],
        mistakes={
            "that is half of it: an all-reduce has two halves, and an element has 2 bytes": answer / 2,
            "twice too much: 16 bits are 2 bytes, not 4": answer * 2,
            "(N−1)/N is missing: a rank keeps 1/N of the work to itself in each half": answer * n / (n - 1),
            **(
                {"inside no_sync() nothing is sent: a step has one reduction": answer * g}
                if quiet
                else {"without no_sync() every micro-batch is reduced": answer / g}
            ),
            "that is what all GPUs send together": answer * n,
            "that would be the model states, 16 bytes a parameter: it is not what travels": 16.0 * psi,
        },
    )


# --- 8. find the bug ---------------------------------------------------------------------------------


@bug(
    "ddp.find_the_bug",
    call="train(model, batches, lr)",
    points=2,
    hints=[
        "What does autograd hand to a post-accumulate-grad hook? Which tensor is equal on all ranks after backward, and which is not?",
        "The hook's argument is the parameter. Its gradient is param.grad. A parameter and its gradient have the same number of elements, so the traffic looks right.",
        "Weights are averaged during backward, then every rank steps with its own gradient: so they differ after step(). In the hook, all_reduce and divide param.grad.",
    ],
    options={
        "a": "the gradients are equal on all ranks, but N times too large",
        "b": "after every step() the ranks' weights differ, and when the next backward ends they are equal again",
        "c": "each rank sends twice as many elements as it should",
        "d": "the ranks' weights are equal after every step, and the loss does not fall",
    },
    observed="b",
    why={
        "a": "a factor of N would come from a missing division, and there is one. Look at which tensor is divided",
        "c": "there is one all_reduce for each parameter, and a parameter has as many elements as its gradient: the traffic is right",
        "d": "the last thing that moves the weights is step(). With which gradients does each rank take it?",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; the mended loop on 2 and 3 ranks against one process; one all_reduce for each gradient"""
    trainable = [param.numel() for param in _awkward_model().parameters() if param.requires_grad]
    for world_size in (2, 3):
        expect.case(f"{_STEPS} steps of SGD", world_size=world_size)
        outcomes = expect.run(
            _mended_run, world_size, mended, causes={"NoneType": "a frozen parameter has no gradient"}
        )
        early = _averaged_in_backward(world_size)
        for outcome in outcomes:
            rank, (weights, grads) = outcome.rank, outcome.value
            _check_complete(expect, outcome)
            mistake = {"the weights are still averaged during backward, not the gradients": early[rank]}
            _check_weights(expect, rank, weights, world_size, mistake)
            for step, (own, first) in enumerate(zip(grads, outcomes[0].value[1], strict=True), start=1):
                expect.that(
                    differ(own, first, "", 1e-6) is None,
                    "when step() runs, the ranks hold the same gradients", got=f"rank {rank}'s differ from rank 0's in step {step}",
                    so="with Adam the ranks' moments differ for ever: only plain SGD forgives it",
                    cause="the weights are averaged after the step: that hides the symptom",
                )  # fmt: skip
            sent = [op.numel for op in outcome.ops]
            expect.that(
                set(outcome.count) == {"all_reduce"} and sorted(sent) == sorted(trainable * _STEPS),
                "one all_reduce for each trainable parameter and step",
                f"{len(trainable) * _STEPS} all_reduces, {sum(trainable) * _STEPS} elements", f"{show(outcome.count)}, {sum(sent)} elements",
                cause="the weights are still sent beside the gradients" if sum(sent) == 2 * sum(trainable) * _STEPS else "",
            )  # fmt: skip


def _mended_run(rank, train):
    model = _awkward_model()
    grads: list[list[Tensor]] = []

    def look(*_: object) -> None:
        grads.append([param.grad.clone() for param in model.parameters() if param.grad is not None])

    handle = register_optimizer_step_pre_hook(look)
    try:
        train(model, _batches(torch.distributed.get_world_size(), rank), _LR)
    finally:
        handle.remove()
    return _weights(model), grads


def _averaged_in_backward(world_size: int) -> list[Tensor]:
    """Each rank's weights if the weights are averaged in each backward, and every rank steps with its own gradients."""
    models = [_awkward_model() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), _LR) for model in models]
    for step in range(_STEPS):
        for rank, model in enumerate(models):
            x, y = _batches(world_size, rank)[step]
            F.mse_loss(model(x), y).backward()
        mean = torch.stack([_weights(model) for model in models]).mean(0)
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return [_weights(model) for model in models]
