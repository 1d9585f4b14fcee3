"""The checks of exercises/01_ddp.ipynb.

Gradients that a check makes up are 10^rank times (1, 2, 3, …), so that the digits of a sum say whose values are in it. Those of
a real backward are compared with the ranks' own local gradients, taken before the answer's hooks are there.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, show
from minizero.parts import bucket, calls

# --- what an answer sends, and when it waits ----------------------------------------------------------


class _Watch:
    """The collectives that an answer issues, and how many of them were issued when a gradient arrived.

    Its hooks are registered first, so a gradient is noted before the answer's own hook sees it.
    """

    def __init__(self, model: nn.Module | None = None):
        self.begin()
        for name, param in model.named_parameters() if model else ():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.seen.append((name, len(self.calls))))

    def begin(self) -> None:
        self.calls: list[calls.Call] = []
        self.seen: list[tuple[str, int]] = []
        self._otherwise: set[int] = set()  # calls that are waited for in another way than by work.wait()
        self.in_hooks = 0  # calls issued while autograd runs

    def backward_ended(self) -> None:
        self._in_backward, self._ended = len(self.calls), time.perf_counter()

    def sent(self) -> dict:
        return {
            "sent": [call.numel for call in self.calls],
            "kinds": sorted({call.op for call in self.calls}),
            "dtypes": sorted({call.dtype for call in self.calls}),
            "engine": any(call.unit for call in self.calls),
            "open": sum(call.end is None and id(call) not in self._otherwise for call in self.calls),
        }

    def report(self) -> dict:
        return self.sent() | {
            "seen": self.seen,
            "issued": self._in_backward,
            "waited in backward": sum(call.end is not None and call.end <= self._ended for call in self.calls),
            "synchronous": any(call.sync for call in self.calls),
        }

    def __enter__(self) -> _Watch:
        def get_future(work: calls.WatchedWork):
            self._otherwise.add(id(work._call))
            return work._work.get_future()

        def is_completed(work: calls.WatchedWork) -> bool:
            if done := work._work.is_completed():
                self._otherwise.add(id(work._call))
            return done

        calls.listeners.append(self)
        calls.WatchedWork.get_future, calls.WatchedWork.is_completed = get_future, is_completed
        return self

    def __exit__(self, *_: object) -> None:
        calls.listeners.remove(self)
        del calls.WatchedWork.get_future, calls.WatchedWork.is_completed

    def issued(self, call: calls.Call) -> None:  # what calls.listeners are told
        self.calls.append(call)
        self.in_hooks += torch._C._current_graph_task_id() != -1


def _check_sent(rank: int, this: dict, rule: str, want: list[int], pieces: list[int]) -> None:
    """All-reduces of `want` elements, in this order. `pieces`: the numels of single gradients."""
    sent = this["sent"]
    if sent == want and this["kinds"] == ["all_reduce"]:
        return
    others, cause = [kind for kind in this["kinds"] if kind != "all_reduce"], ""
    if this["engine"]:
        cause = "mz.DDP is at work: it may be read, but not used"
    elif others:
        cause = {
            "barrier": "a barrier is a collective too, and not needed: an all_reduce waits for the others anyway",
            "reduce": "a reduce leaves the sum on one rank only",
        }.get(others[0], f"one all_reduce leaves the sum on every rank: no {others[0]} is needed")
    elif sent == pieces and pieces != want:
        cause = "each gradient is sent by itself: a bucket leaves as one message"
    elif sent == [sum(want)] and len(want) > 1:
        one = "gradients travel as one message: that is a good idea, and exercise 4"
        cause = f"all {one}" if pieces == want else "all buckets are sent as one message"
    elif sent == want[::-1]:
        cause = "the buckets leave in reverse: the list has the right order already"
    elif len(sent) == len(want) and all(numel >= least for numel, least in zip(sent, want, strict=True)):
        cause = "a message is longer than the gradients in it: nothing has to be padded"
    raise Finding(rule, f"all_reduces of {want} elements", _told(this, rank), cause=cause)


def _told(this: dict, rank: int) -> str:
    if not this["sent"]:
        return f"none on rank {rank}"
    return f"{', '.join(this['kinds'])} of {this['sent']} elements on rank {rank}"


def _check_dtype(expect: Expect, rank: int, this: dict, dtype: torch.dtype, cause: str) -> None:
    name = str(dtype).removeprefix("torch.")
    expect.that(
        this["dtypes"] == [name], "a gradient travels in its own dtype", name, f"{', '.join(this['dtypes'])} on rank {rank}",
        cause=cause if this["dtypes"] == ["float32"] else "",
    )  # fmt: skip


def _check_complete(expect: Expect, rank: int, this: dict, when: str = "the answer") -> None:
    expect.that(
        not this["open"], "every collective is waited for", "all waited for",
        f"{this['open']} of {len(this['sent'])} still open when {when} returns on rank {rank}",
        "what is read meanwhile may be half old, half new", "async_op=True returns a work, and its wait() is missing",
    )  # fmt: skip


def _completed_at_once(rank: int, program: Callable, *args: object) -> object:
    """`program`, with all_reduces that are complete when they return, whatever async_op says."""
    original = dist.all_reduce

    def all_reduce(*args: object, **kwargs: object):
        work = original(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    dist.all_reduce = all_reduce
    try:
        return program(rank, *args)
    finally:
        dist.all_reduce = original


@contextmanager
def _or_too_early(expect: Expect, check: Callable[[list[Outcome]], None], world_size: int, program: Callable, *args):
    """Where a value is wrong, see whether it is right if collectives complete at once. Then that is the cause."""
    try:
        yield
    except Finding as finding:
        with suppress(Finding):
            check(expect.run(_completed_at_once, world_size, program, *args))
            finding.cause = "a tensor is read or changed before its wait(): until then it belongs to the collective"
        raise


@contextmanager
def _sets_in_another_order(tensors: Sequence[Tensor]):
    """In a set these stand in the order of the list on rank 0, and in reverse on all others. Their addresses would have it
    so some day."""
    in_order = tensors if dist.get_rank() == 0 else tensors[::-1]
    place = {id(tensor): i for i, tensor in enumerate(in_order)}
    original = Tensor.__hash__
    Tensor.__hash__ = lambda tensor: place.get(id(tensor), id(tensor))
    try:
        yield
    finally:
        Tensor.__hash__ = original


_NO_ORDER = "a set has no order, or another one on each rank"


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
            self.register_buffer("batches", torch.tensor(2**24 + 1))  # a whole number that float32 does not have
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
    """parameters, frozen ones too, and buffers on 2 and 3 ranks; written in place; at most one broadcast for each, in one order"""
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
        "different collectives": f"the ranks broadcast in different orders: go through the model as it is; {_NO_ORDER}",
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
                so="rank 0 goes on with a value that it did not have" if rank == 0 else "the ranks train different models, and no gradient will show it",
                mistakes=_other_starts(name, rank, want, others) | _swapped(name, first),
            )  # fmt: skip
        expect.that(
            not value["moved"], "values are overwritten in place: the model keeps its memory",
            "the same memory as before", f"{', '.join(value['moved'])} lies elsewhere on rank {rank}",
            "whoever holds a view of the old memory no longer sees the weights",
            "param.data = … puts another tensor in its place: copy_() into the one that is there",
        )  # fmt: skip
    for outcome in outcomes:
        value, tensors = outcome.value, len(first)
        others = sorted(set(value["kinds"]) - {"broadcast"})
        cause = "ranks that only listen need not send: an all_reduce or all_gather costs more and changes nothing"
        if others == ["barrier"]:
            cause = "a rank that receives waits for rank 0 anyway"
        expect.that(not others, "broadcasts are enough", "nothing but broadcasts", ", ".join(others), cause=cause)
        _check_complete(expect, outcome.rank, value)
        count = len(value["sent"])
        cause = "a tied weight is sent under both of its names" if "tied" in parts else "a tensor is sent more than once"
        if "uint8" in value["dtypes"]:
            cause = "an object is pickled and sent: broadcast the tensors themselves"
        expect.that(
            0 < count <= tensors, "one dist.broadcast for each tensor is enough",
            "one broadcast" if tensors == 1 else f"at most {tensors} broadcasts", f"{count} on rank {outcome.rank}",
            cause=cause if count else "something else has sent the values: build it from dist.broadcast",
        )  # fmt: skip
        expect.that(not value["engine"], "you build it from dist.broadcast", got="mz.DDP at work", cause="it may be read, but not used")


def _other_starts(name: str, rank: int, want: Tensor, starts: list[Tensor]) -> dict[str, Tensor]:
    last = len(starts) - 1
    total = torch.stack(starts).sum(0)
    mistakes = {
        f"rank {last} is the source: it has to be rank 0": starts[last],
        "the ranks' values are averaged: rank 0's are to be taken as they are": (total / len(starts)).to(want.dtype),
        "the ranks' values are summed: rank 0's are to be taken as they are": total,
    }
    if not want.is_floating_point():
        through = "it travels as float32, which has 24 bits for a whole number: send it in its own dtype"
        mistakes[through] = want.float().to(want.dtype)
    return {_FORGOTTEN[name]: starts[rank], **mistakes} if rank else mistakes


def _swapped(name: str, first: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two tensors of one size may change places without an error."""
    here = first[name]
    alike = {other: t for other, t in first.items() if other != name and t.shape == here.shape and t.dtype == here.dtype}
    return {f"this is rank 0's {other}: go through the model in one order; {_NO_ORDER}": t for other, t in alike.items()}


def _started(rank, answer, parts):
    model = _Start(parts, rank)
    tensors = model.tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trainable = {name: tensor.requires_grad for name, tensor in tensors.items()}
    memory = {name: tensor.detach() for name, tensor in tensors.items()}
    with _Watch() as watch, _sets_in_another_order(list(tensors.values())):
        answer(model)
    now = model.tensors()
    replaced = [name for name in tensors if now.get(name) is not tensors[name]]
    refrozen = [name for name in tensors if tensors[name].requires_grad != trainable[name]]
    moved = [name for name in tensors if tensors[name].data_ptr() != memory[name].data_ptr()]
    return {"before": before, "after": now, "replaced": replaced, "refrozen": refrozen, "moved": moved} | watch.sent()


# --- gradients that are made up, and what may have become of them ------------------------------------


def _numbers(shapes: Sequence[tuple], rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes, filled with 10^rank times 1, 2, 3, …"""
    start, tensors = 1, []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        tensors.append((torch.arange(start, start + numel).view(shape) * 10**rank).to(dtype))
        start += numel
    return tensors


def _parameters(shapes: Sequence[tuple], dtype: torch.dtype, frozen: Sequence[int] = ()) -> list[nn.Parameter]:
    """Parameters of these shapes. Their values differ from rank to rank: so it shows if they are averaged themselves."""
    value = 0.5 + dist.get_rank()
    return [
        nn.Parameter(torch.full(shape, value, dtype=dtype), requires_grad=i not in frozen) for i, shape in enumerate(shapes)
    ]


def _check_means(
    expect: Expect, rank: int, got: list, local: list[list], names: Sequence[str], extra: Sequence[dict] = ()
) -> None:
    """Each of this rank's gradients is the mean over the ranks. `local`: what each rank had, None for nothing."""
    world_size = len(local)
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

_UNLIKE = f"all ranks issue the same all_reduces in the same order: that of model.parameters(); {_NO_ORDER}"
_UNLIKE_FOR_NONE = (
    "which all_reduces a rank issues, and in which order, depends on its gradients: one without a gradient sends zeros, in the same place"
)
_NO_GRADIENT = {"NoneType": "param.grad is None where the parameter is frozen, or was not used on this rank"}
_ZEROS_IN_FP32 = "torch.zeros makes float32: zeros for a missing gradient have the parameter's dtype, as torch.zeros_like(param) makes them"
_OTHER_DTYPE = {"not the same dtype": _ZEROS_IN_FP32, "a gradient with dtype": _ZEROS_IN_FP32}


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
    """the mean on 2 and 3 ranks, in bfloat16 too, frozen and unused parameters; one all_reduce each; 3 SGD steps against one process"""
    for world_size in (2, 3):
        _averaged(answer, expect, "one parameter", world_size, [(2,)])
    _averaged(answer, expect, "two parameters", 2, [(2,), (3,)])
    _averaged(answer, expect, "parameter 0 is frozen", 2, [(1,), (2,)], frozen=(0,))
    _averaged(answer, expect, "rank 1 has no gradient for parameter 1", 2, [(2,), (3,), ()], missing={1: (1,)})
    _averaged(answer, expect, "16-bit gradients", 2, [(3,)], dtype=torch.bfloat16)
    text = "16-bit gradients, rank 1 has none for parameter 1"
    _averaged(answer, expect, text, 2, [(2,), (3,)], missing={1: (1,)}, dtype=torch.bfloat16)
    for world_size in (2, 3):
        _check_three_steps(expect, world_size, lambda model: partial(answer, model), _NO_GRADIENT | {"deadlock": _UNLIKE})


def _averaged(
    answer, expect: Expect, text: str, world_size: int, shapes: list[tuple], frozen=(), missing=None, dtype=torch.float32
) -> None:
    expect.case(text, world_size=world_size)
    unlike = _UNLIKE_FOR_NONE if missing else _UNLIKE
    other_dtype = _OTHER_DTYPE if missing else {}
    causes = other_dtype | {"different collectives": unlike, "deadlock": unlike, "died": unlike} | _NO_GRADIENT
    args = (answer, shapes, frozen, missing or {}, dtype)
    outcomes = expect.run(_with_gradients, world_size, *args, causes=causes)
    numels = [torch.Size(shape).numel() for i, shape in enumerate(shapes) if i not in frozen]
    names = [f"parameter {i}" for i in range(len(shapes))]

    def check_means(outcomes: list[Outcome]) -> None:
        local = [outcome.value["local"] for outcome in outcomes]
        for outcome in outcomes:
            _check_means(expect, outcome.rank, outcome.value["grads"], local, names)

    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        expect.that(
            not value["moved"], "only gradients are averaged: the weights stay as they are",
            got=f"on rank {rank} parameter {', '.join(value['moved'])} has other values than before",
            cause="the parameter itself is averaged (or stepped): only its .grad is to change",
        )  # fmt: skip
        _check_complete(expect, rank, value)
    with _or_too_early(expect, check_means, world_size, _with_gradients, *args):
        check_means(outcomes)
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        expect.that(
            all(value["grads"][i] is None for i in frozen), "a frozen parameter has no gradient",
            ".grad is None", f"a gradient on rank {rank}", "a frozen weight costs memory and bytes, and weight decay may move it",
            "every parameter is given a gradient, also where requires_grad is False",
        )  # fmt: skip
        rule = "one all_reduce for each trainable parameter, of its gradient's elements"
        in_order = value | {"sent": sorted(value["sent"])}  # any order is right, if it is the same on all ranks
        _check_sent(rank, in_order, rule, sorted(numels), sorted(numels))
        _check_dtype(expect, rank, value, dtype, "the gradient is turned into float32 for the way: twice the bytes")


class _Row(nn.Module):
    """A model of parameters in a row, named "0", "1", …"""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        for i, param in enumerate(params):
            self.register_parameter(str(i), param)


def _with_gradients(rank, answer, shapes, frozen, missing, dtype):
    params = _parameters(shapes, dtype, frozen)
    start = [param.detach().clone() for param in params]
    for i, (param, grad) in enumerate(zip(params, _numbers(shapes, rank, dtype), strict=True)):
        if i not in frozen and i not in missing.get(rank, ()):
            param.grad = grad
    local = [None if param.grad is None else param.grad.clone() for param in params]
    with _Watch() as watch, _sets_in_another_order(params):
        answer(_Row(params))
    moved = [str(i) for i, (param, before) in enumerate(zip(params, start, strict=True)) if not torch.equal(param, before)]
    return {"local": local, "grads": [param.grad for param in params], "moved": moved} | watch.sent()


# --- a training run that one process can repeat --------------------------------------------------------

_STEPS, _ROWS, _LR = 3, 2, 0.25  # rows: of each rank


def _awkward_model() -> nn.Module:
    """39 parameters in pieces of 15, 5 (frozen), 15, 3 and 1: nothing divides evenly."""
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
    return _train(_batches(dist.get_world_size(), rank), averaging)


def _check_three_steps(expect: Expect, world_size: int, averaging: Callable, causes: dict[str, str]) -> None:
    expect.case(f"{_STEPS} steps of SGD", world_size=world_size)

    def check(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            _check_weights(expect, outcome.rank, outcome.value, world_size, {})

    outcomes = expect.run(_three_steps, world_size, averaging, causes=causes)
    with _or_too_early(expect, check, world_size, _three_steps, averaging):
        check(outcomes)


def _check_weights(expect: Expect, rank: int, weights: Tensor, world_size: int, mistakes: dict[str, Tensor]) -> None:
    expect.equal(
        weights, _train(_batches(world_size)), of=f"rank {rank}'s weights (in a row)",
        rule=f"after {_STEPS} steps the weights are those of one process on the whole batch", so="this is another training run",
        mistakes=mistakes | _trained_otherwise(world_size, rank),
    )  # fmt: skip


def _trained_otherwise(world_size: int, rank: int) -> dict[str, Tensor]:
    halves = "the gradients are divided by 2, whatever world_size is"
    return {
        **({halves: _train(_batches(world_size), lr=_LR * world_size / 2)} if world_size != 2 else {}),
        "the ranks' gradients are summed, not averaged": _train(_batches(world_size), lr=_LR * world_size),
        "the gradients are divided twice": _train(_batches(world_size), lr=_LR / world_size),
        "each rank trains on its own rows: nothing is reduced": _train(_batches(world_size, rank)),
        "the weights are those of the start": _weights(_awkward_model()),
    }


# --- 3. which parameters share a bucket ---------------------------------------------------------------


class _Case:
    """A list of parameters, by their places in it, and what common mistakes make of it.

    sizes       elements of each parameter
    order       the list that is handed over: a tied parameter stands in it twice
    """

    def __init__(self, text: str, sizes: list[int], limit: int, *, frozen=(), order=None, dtype=torch.float32):
        self.text, self.sizes, self.limit, self.frozen, self.dtype = text, sizes, limit, frozen, dtype
        self.order = order or list(range(len(sizes)))
        self.once = [i for i in dict.fromkeys(self.order) if i not in frozen]  # trainable, a tied one at its first place
        self.itemsize = torch.empty((), dtype=dtype).element_size()
        self.kind = bool(frozen), self.order != sorted(self.order)

    def cut(self, order: Sequence[int] | None = None, itemsize: int = 0, limit: int = 0, ghosts: Sequence[int] = ()) -> list:
        """The right way, and its variations. `ghosts` take up room, and are in no bucket."""
        buckets: list[list[int]] = []
        size = 0
        for i in self.once[::-1] if order is None else order:
            nbytes = self.sizes[i] * (itemsize or self.itemsize)
            if not buckets or size + nbytes > (limit or self.limit):
                buckets.append([])
                size = 0
            size += nbytes
            buckets[-1].append(i)
        return [kept for each in buckets if (kept := [i for i in each if i not in ghosts])]

    def looped(self, late: bool = False, grows: bool = True, resets: bool = True, alone: bool = False) -> list:
        """Other loops: they close a bucket after it overflows, never count, never reset the count, or forget a large one."""
        buckets: list[list[int]] = []
        size = 0
        for i in self.once[::-1]:
            nbytes = self.sizes[i] * self.itemsize
            if not buckets or (size >= self.limit if late else size + nbytes > self.limit):
                buckets.append([])
                size = 0 if resets else size
            buckets[-1].append(i)
            size += nbytes * grows * (not alone or nbytes <= self.limit)
        return buckets

    def first_fit(self) -> list:
        buckets: list[list[int]] = []
        for i in self.once[::-1]:
            room = (b for b in buckets if sum(self.sizes[j] for j in [*b, i]) * self.itemsize <= self.limit)
            bucket_with_room = next(room, None)
            if bucket_with_room is None:
                buckets.append(bucket_with_room := [])
            bucket_with_room.append(i)
        return buckets

    def empty_in_front(self) -> list:
        found = self.cut()
        return [[], *found] if found and self.sizes[found[0][0]] * self.itemsize > self.limit else found


_PARTITIONS: dict[str, Callable[[_Case], list]] = {
    "the parameters are taken in the order of registration: backward ends with the first of them": lambda c: c.cut(c.once),
    "the buckets are right, the parameters inside them are in the order of registration": lambda c: [b[::-1] for b in c.cut()],
    "buckets are cut in the order of registration and then reversed: cut them in reverse": lambda c: [
        b[::-1] for b in c.cut(c.once)[::-1]
    ],
    "buckets are cut in the order of registration and only their list is reversed: cut them in reverse": lambda c: c.cut(
        c.once
    )[::-1],
    "all is in one bucket: does the size grow with each parameter?": lambda c: c.looped(grows=False),
    "after the first full bucket each parameter has one to itself: is the size set back to 0?": lambda c: c.looped(
        resets=False
    ),
    "elements are counted, not bytes": lambda c: c.cut(itemsize=1),
    "4 bytes an element are taken for granted: ask element_size()": lambda c: c.cut(itemsize=4),
    "a frozen parameter is in a bucket: it has no gradient, so the bucket is never full": lambda c: c.cut(
        list(dict.fromkeys(c.order))[::-1]
    ),
    "frozen parameters take up room in a bucket: they have no gradient that would travel": lambda c: c.cut(
        list(dict.fromkeys(c.order))[::-1], ghosts=c.frozen
    ),
    "a tied parameter is put where it stands last: its gradient is complete when backward has reached its first place": lambda c: (
        c.cut([i for i in dict.fromkeys(c.order[::-1]) if i not in c.frozen])
    ),
    "a tied parameter is in the buckets twice: its gradient travels once": lambda c: c.cut(
        [i for i in c.order[::-1] if i not in c.frozen]
    ),
    "a bucket that is filled to the last byte is not over the limit yet": lambda c: c.cut(limit=c.limit - 1),
    "a bucket closes before the parameter that would overflow it, not after": lambda c: c.looped(late=True),
    "a parameter goes back into an earlier bucket that has room: once closed, a bucket stays closed": _Case.first_fit,
    "the bucket of a parameter that is too large takes in the next one as well: it is over the limit": lambda c: c.looped(
        alone=True
    ),
    "the last bucket is lost: it is still open when the loop ends": lambda c: c.cut()[:-1],
    "there is an empty bucket in front of a parameter that is too large: close a bucket only if something is in it": (
        _Case.empty_in_front
    ),
    "the first bucket is empty: the loop closes it before it has put something in": lambda c: [[], *c.cut()],
    "an empty bucket is left at the end": lambda c: [*c.cut(), []],
    "where nothing is trainable there is an empty bucket: begin one when there is something to put in": lambda c: c.cut() or [[]],
}

_CASES = [
    _Case("", [2, 1, 2, 1, 1], 12),
    _Case("a parameter larger than a bucket", [2, 10, 2], 16),
    _Case("only a parameter larger than a bucket", [10], 16),
    _Case("2 bytes an element", [2, 4, 4, 6], 16, dtype=torch.bfloat16),
    _Case("twelve parameters", [5, 1, 4, 2, 2, 12, 3, 1, 4, 2, 6, 11], 40),
    _Case("parameters 1 and 3 are frozen", [1, 2, 3, 4, 5], 20, frozen=(1, 3)),
    _Case("all parameters are frozen", [2, 3], 16, frozen=(0, 1)),
    _Case("parameter 0 is tied", [3, 1, 1, 2], 16, order=[0, 1, 2, 3, 0]),
    _Case("parameter 1 is tied and frozen", [2, 3, 1, 1, 2], 16, frozen=(1,), order=[0, 1, 2, 3, 4, 1]),
]


@exercise(
    "ddp.partition",
    call="partition(params, bucket_bytes)",
    hints=[
        "Which parameter's gradient does backward finish first? So which one should the first bucket begin with? And when is the gradient of a tied one complete?",
        "param.numel() * param.element_size() is a parameter's bytes (param.nbytes as well). dict.fromkeys(params) has each object once, at its first place. A bucket closes before "
        "the parameter that would take it over the limit; a parameter that is larger than the limit still needs a bucket.",
        "Go in reverse through the trainable parameters, each once, at its first place. Begin a new bucket if there is none yet, or if the bytes in the last one plus this parameter's are more than "
        "bucket_bytes. Then put the parameter into the last bucket.",
    ],
)
def partition(answer, expect):
    """reverse order; bytes, not elements; exact fits, oversized, frozen and tied parameters; nothing lost, no bucket empty"""
    failed: tuple[_Case, object] | None = None
    told: list[tuple[_Case, object]] = []
    for case in _CASES:
        listed = {"list": case.order} if len(case.order) > len(case.sizes) else {}
        expect.case(case.text, elements=case.sizes, **listed, bucket_bytes=case.limit)
        try:
            args = (answer, case.sizes, case.order, case.dtype, case.frozen, case.limit)
            got, of_package, same_list = expect.call(_indices, *args, causes=_COMPARED)
        except Finding:
            if failed is None:
                raise
            break  # it is wrong before it fails: say that
        expect.that(not of_package, "you write it yourself", got="a call of minizero's own partition()")
        expect.that(
            same_list, "the caller's list stays as it is", "the list as it was handed over", "another order, or other members",
            "the caller builds its optimizer from it", "reverse(), pop() and remove() change the caller's list: reversed(params) and params[::-1] do not",
        )  # fmt: skip
        told.append((case, got))
        if failed is None and got != case.cut():
            failed = told[-1]
            what = expect.what
    if failed is not None:
        expect.what = what
        _explain(*failed, told)


_SAME_OBJECT = "`in` a list compares tensors by their values: whether it is the same object, ask a set or a dict, as dict.fromkeys does"
_COMPARED = {"Boolean value of Tensor": _SAME_OBJECT, "must match the size of tensor": _SAME_OBJECT}


def _explain(case: _Case, got: object, told: list[tuple[_Case, object]]) -> None:
    """A mistake is named if it gives what the answer gave, in all cases so far and the others of this kind."""
    want = case.cut()
    if not isinstance(got, list):
        rule = "the answer is a list of buckets, and a bucket a list of parameters"
        raise Finding(rule, f"{want}, by the parameters' numbers", f"{got}")
    told = [(each, have) for each, have in told if each.kind == case.kind or have == each.cut()]
    cause = next((text for text, make in _PARTITIONS.items() if all(make(each) == have for each, have in told)), "")
    members = [i for each in got for i in each]
    missing = sorted({i for each in want for i in each} - set(members))
    twice = sorted({i for i in members if members.count(i) > 1} - {_UNKNOWN})
    if cause:
        pass
    elif _UNKNOWN in members:
        cause = f"what stands at {_UNKNOWN} is none of the parameters: a bucket holds them themselves, not copies or numbers"
    elif [] in got:
        cause = "there is an empty bucket"
    elif missing or twice:
        cause = f"in no bucket: {missing}" if missing else f"in the buckets twice: {twice}"
    raise Finding(
        "reverse order, and a bucket closes before the parameter that would overflow it",
        f"{want}, by the parameters' numbers", f"{got}".replace("'", ""), cause=cause,
    )  # fmt: skip


_UNKNOWN = "?"


def _indices(answer, sizes, order, dtype, frozen, bucket_bytes):
    params = [nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=i not in frozen) for i, size in enumerate(sizes)]
    place = {id(param): i for i, param in enumerate(params)}
    of_package: list[bool] = []

    def called(frame, event, _):
        if event == "call" and frame.f_code is bucket.partition.__code__:
            of_package.append(True)

    given = [params[i] for i in order]
    handed_over = list(given)
    sys.setprofile(called)
    try:
        buckets = answer(handed_over, bucket_bytes)
    finally:
        sys.setprofile(None)
    return _places(buckets, place), bool(of_package), _same_objects(handed_over, given)


def _same_objects(these: Sequence, those: Sequence) -> bool:
    return [*map(id, these)] == [*map(id, those)]


def _places(buckets: object, place: dict[int, int]) -> object:
    if buckets is None:
        return "None: a return is missing"
    if not isinstance(buckets, (list, tuple)):
        return f"a {type(buckets).__name__}"
    if not all(isinstance(each, (list, tuple)) for each in buckets):
        return f"a list of {', '.join(sorted({type(each).__name__ for each in buckets}))}"
    return [[place.get(id(param), _UNKNOWN) for param in each] for each in buckets]


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
    """the mean on 2 and 3 ranks, awkward shapes, 16 bits, gradients missing on a rank or not contiguous; one all_reduce a bucket, in order"""
    _reduced(answer, expect, "one bucket", 2, [(2,), (3,)], [[1, 0]])
    _reduced(answer, expect, "two buckets", 3, [(2, 2), (1,), (), (3, 1)], [[3, 2], [1, 0]])
    _reduced(answer, expect, "rank 1 has no gradient for parameter 1", 2, [(2,), (3,)], [[1, 0]], missing={1: (1,)})
    _reduced(answer, expect, "a gradient that is not contiguous", 2, [(2, 3), (2,)], [[1, 0]], transposed=(0,))
    _reduced(answer, expect, "16-bit gradients", 2, [(2,), (1,)], [[1, 0]], dtype=torch.bfloat16)
    text = "16-bit gradients, rank 1 has none for parameter 1"
    _reduced(answer, expect, text, 2, [(2,), (1,)], [[1, 0]], missing={1: (1,)}, dtype=torch.bfloat16)


def _reduced(
    answer, expect: Expect, text: str, world_size: int, shapes, buckets, missing=None, transposed=(), dtype=torch.float32
) -> None:
    expect.case(text, shapes=[list(shape) for shape in shapes], world_size=world_size)
    unequal = "the ranks send different messages"
    if missing:
        unequal = "a rank without a gradient leaves it out of its message, which is then shorter than the others': it counts as zeros"
    causes = {
        "view size is not compatible": "a gradient need not be contiguous: flatten() or reshape(-1) copies where it must, view(-1) refuses",
        "stack expects": "gradients have different shapes: flatten them, then concatenate",
        "attempting to assign a gradient of size": "a piece of the flat tensor has one dimension: view it in the parameter's shape",
        **(_OTHER_DTYPE if missing else {}),
        "a gradient with dtype": "the flat tensor has another dtype than the gradients: torch.cat keeps theirs",
        "NoneType": "param.grad is None where the parameter was not used on this rank: it counts as zeros",
        "deadlock": unequal,
        "different collectives": unequal,
        "died": unequal,
    }
    args = (answer, shapes, buckets, missing or {}, transposed, dtype)
    outcomes = expect.run(_with_buckets, world_size, *args, causes=causes)
    numels = [torch.Size(shape).numel() for shape in shapes]
    want = [sum(numels[i] for i in each) for each in buckets]
    pieces = [numels[i] for each in buckets for i in each]
    names = [f"parameter {i}" for i in range(len(shapes))]

    def check_means(outcomes: list[Outcome]) -> None:
        local = [outcome.value["local"] for outcome in outcomes]
        misplaced = _misplaced(local, shapes, buckets, dtype)
        for outcome in outcomes:
            got = outcome.value["grads"]
            cause = next((cause for cause, wrong in misplaced.items() if differ(got, wrong, "", 1e-6) is None), None)
            extra = [{cause: wrong} for wrong in misplaced[cause]] if cause else ()
            _check_means(expect, outcome.rank, got, local, names, extra)

    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        expect.that(
            not value["moved"], "only gradients are averaged: the weights stay as they are",
            got=f"rank {rank}'s weights have other values than before", cause="the parameters themselves are averaged, not their .grad",
        )  # fmt: skip
        expect.that(
            value["same buckets"], "the caller's lists stay as they are", "the buckets as they were handed over",
            f"another order, or other members, on rank {rank}", "the next step gets other buckets",
            "reverse(), pop() and remove() change the caller's list: go through it, or through a copy",
        )  # fmt: skip
        _check_sent(rank, value, "one all_reduce for each bucket, in the order of the list", want, pieces)
        _check_dtype(expect, rank, value, dtype, "the flat tensor is float32, whatever the gradients are: torch.cat keeps theirs")
        _check_complete(expect, rank, value)
    with _or_too_early(expect, check_means, world_size, _with_buckets, *args):
        check_means(outcomes)


def _misplaced(local: list[list], shapes, buckets, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """What all gradients become if the flat tensor is cut wrongly."""
    zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    from_start, other_order, of_sets = list(zeros), list(zeros), list(zeros)

    def mean_of(*orders: list[int]) -> Tensor:
        """Each rank packs its gradients in an order of its own."""
        flats = [
            torch.cat([(zeros[i] if grads[i] is None else grads[i]).flatten() for i in order])
            for grads, order in zip(local, orders, strict=True)
        ]
        return torch.stack(flats).mean(0)

    for each in buckets:
        mean, start = mean_of(*[each] * len(local)), 0
        from_sets = mean_of(sorted(each), *[sorted(each)[::-1]] * (len(local) - 1))
        for i, piece in zip(sorted(each), from_sets.split([zeros[i].numel() for i in sorted(each)]), strict=True):
            of_sets[i] = piece.view(shapes[i])
        for i in reversed(each):
            from_start[i] = mean[: zeros[i].numel()].view(shapes[i])
            other_order[i] = mean[start : start + zeros[i].numel()].view(shapes[i])
            start += zeros[i].numel()
    return {
        "every gradient is cut from the start of the flat tensor: move on by numel each time": from_start,
        "the gradients are taken out in another order than they were put in": other_order,
        f"the ranks pack a bucket in different orders: keep that of the list; {_NO_ORDER}": of_sets,
    }


def _with_buckets(rank, answer, shapes, buckets, missing, transposed, dtype):
    params = _parameters(shapes, dtype)
    for i, (param, grad) in enumerate(zip(params, _numbers(shapes, rank, dtype), strict=True)):
        if i not in missing.get(rank, ()):
            param.grad = grad.t().contiguous().t() if i in transposed else grad
    start = [param.detach().clone() for param in params]
    local = [None if param.grad is None else param.grad.clone() for param in params]
    given = [[params[i] for i in each] for each in buckets]
    handed_over = [list(each) for each in given]
    with _Watch() as watch, _sets_in_another_order(params):
        answer(handed_over)
    moved = any(not torch.equal(param, before) for param, before in zip(params, start, strict=True))
    same = len(handed_over) == len(given) and all(map(_same_objects, handed_over, given))
    grads = [param.grad for param in params]
    return {"local": local, "grads": grads, "moved": moved, "same buckets": same} | watch.sent()


# --- 5. reductions that leave while backward runs ------------------------------------------------------


class _Branches(nn.Module):
    """A layer `last` on top of branches `a` and `b`. Backward reaches the branch first that forward used last."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            self.a, self.b, self.last = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 1)
        self.to(dtype)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return self.last(sum({"a": 1, "b": 2}[name] * self.get_submodule(name)(x) for name in use))

    def buckets(self, listed: int = -1) -> list[list[nn.Parameter]]:
        """A bucket for each layer; `listed` -1: its parameters in the order in which their gradients arrive, 1: the other way round."""
        return [[*layer.parameters()][::listed] for layer in (self.last, self.b, self.a)]


_NAMES = [name for name, _ in _Branches().named_parameters()]
_BUCKETS = ("last", "b", "a")
_NUMELS, _PIECES = [3, 8, 8], [1, 2, 2, 6, 2, 6]  # of the buckets, and of the gradients in them


def _loss(model: _Branches, rank: int, batch: int, use: str) -> Tensor:
    generator = torch.Generator().manual_seed(10 * batch + rank)
    return model(torch.randn(2, 3, generator=generator).to(model.last.weight.dtype), use).square().mean()


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.detach().clone() for param in model.parameters()]


def _local_gradients(
    rank: int, losses: Sequence[tuple[int, str, float]], dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """What this rank alone would have in .grad after these losses (batch, branches, factor)."""
    model = _Branches(dtype)
    for batch, use, factor in losses:
        (_loss(model, rank, batch, use) * factor).backward()
    return _gradients(model)


class _Gates:
    """Rank 0 goes first, and the others hold back until its backward is over: none of its reductions can complete before.

    A wait in backward then shows: rank 0 never gets to the end of it, and the others give up. So does a finish() that returns
    while they still hold back. Without a folder nobody holds back.
    """

    def __init__(self, rank: int, folder: str):
        self.rank, self.folder = rank, folder
        self.report = {"blocked": False, "early": False}

    def hold_back(self, step: int) -> None:
        if self.folder and self.rank and not self.report["blocked"]:
            over = self._opens(f"backward {step}", seconds=1.5)
            early = over and step == 0 and self._opens(f"finish {step}", seconds=0.15)
            self.report = {"blocked": not over, "early": early}

    def open(self, what: str) -> None:
        if self.folder and self.rank == 0:
            Path(self.folder, what).touch()

    def _opens(self, what: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not Path(self.folder, what).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def _backwards(rank, answer, uses, rounds, listed, dtype, folder=""):
    """`rounds` times one backward and finish(). `uses`: the branches that each rank uses, in forward's order."""
    model, gates = _Branches(dtype), _Gates(rank, folder)
    start = copy.deepcopy(model.state_dict())
    results = []
    with _Watch(model) as watch, _sets_in_another_order(list(model.parameters())):
        engine = answer(model, model.buckets(listed))
        hooks = _hooks(model)
        for batch in range(rounds):
            model.zero_grad()
            watch.begin()
            loss = _loss(model, rank, batch, uses[rank])
            gates.hold_back(batch)
            loss.backward()
            watch.backward_ended()
            gates.open(f"backward {batch}")
            engine.finish()
            gates.open(f"finish {batch}")
            moved = any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
            local = _local_gradients(rank, [(batch, uses[rank], 1.0)], dtype)
            told = {"grads": _gradients(model), "moved": moved, "other hooks": _hooks(model) != hooks}
            results.append({"local": local} | told | watch.report() | gates.report)
    return results


def _hooks(model: nn.Module) -> list[int]:
    """The numbers of the hooks on its parameters; each that is registered gets a new one."""
    kinds = [each for param in model.parameters() for each in (param._backward_hooks, param._post_accumulate_grad_hooks)]
    return sorted(number for hooks in kinds for number in hooks or ())


_OVERLAP_CAUSES = {
    "'NoneType' object has no attribute 'finish'": "the call returns None: a class, or a function that returns an object with finish()",
    "has no attribute 'finish'": "the class needs a method finish()",
}
_RULE = "one all_reduce for each bucket, in the order of the list"


@exercise(
    "ddp.overlap",
    call="Overlapped(model, buckets)",
    points=3,
    hints=[
        "A bucket may leave when its last gradient is there and every bucket ahead of it has left. Who notices that moment, and what has to be left undone until backward is over?",
        "param.register_post_accumulate_grad_hook(fn) calls fn(param). dist.all_reduce(flat, async_op=True) returns a work; until work.wait() the flat tensor belongs to it. "
        "Invariant: all ranks issue bucket 0, 1, 2, … in this order, each exactly once a step.",
        "Hook: note that the parameter has arrived; while the next bucket exists and all its parameters have arrived, launch it. Launch: concatenate the gradients (zeros for None), "
        "all_reduce with async_op=True, keep the work and the flat tensor. finish: launch what is left, in order; wait for each, divide, copy the pieces into .grad; clear what has arrived and what was launched.",
    ],
)
def overlap(answer, expect):
    """each bucket leaves in the hook that fills it, in order, and backward waits for none; unused and reordered layers; 16 bits; 3 SGD steps"""
    before = "a bucket is launched before its gradients are there: count what has arrived"
    finish = "finish() meets parameters without a gradient: they count as zeros"
    order = "the ranks launch their buckets in different orders: that of the list has to hold, whichever is full first"
    unused = "on a rank that did not use b its bucket never fills, and the other rank waits for it: finish() has to launch it"
    plain = "the ranks issue different collectives"
    _overlapped(answer, expect, "two backwards", 2, ("ab", "ab"), plain, before, hold_back=True)
    listed = "the bucket leaves before this gradient is in .grad: the last parameter of the list need not be the last to arrive"
    text = "each bucket lists its parameters the other way round"
    _overlapped(answer, expect, text, 2, ("ab", "ab"), plain, listed, early=listed, listed=1)
    text = "rank 1's gradients of a and b arrive in the other order"
    of_others = "a bucket leaves without its own gradient, since gradients of other buckets are counted: count each bucket by itself"
    _overlapped(answer, expect, text, 2, ("ab", "ba"), order, of_others)
    _overlapped(answer, expect, "rank 1 does not use b", 2, ("ab", "a"), unused, finish)
    _overlapped(answer, expect, "rank 1 does not use b, in 16 bits", 2, ("ab", "a"), unused, finish, dtype=torch.bfloat16)
    _overlapped(answer, expect, "two backwards", 3, ("ab", "ab", "ab"), plain, before)
    for world_size in (2, 3):
        _check_three_steps(expect, world_size, partial(_overlapping, answer), _OVERLAP_CAUSES)


def _overlapping(answer, model):
    backwards = [param for param in reversed(list(model.parameters())) if param.requires_grad]
    return answer(model, [backwards[:2], backwards[2:]]).finish


def _overlapped(
    answer,
    expect: Expect,
    text: str,
    world_size: int,
    uses: Sequence[str],
    unequal: str,
    none: str,
    early: str = "the bucket leaves before this gradient is in .grad (a register_hook runs before that)",
    hold_back: bool = False,
    listed: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`unequal`: why the ranks' collectives may not pair up here; `none`: where a missing gradient is met; `early`: why one
    may be missing in what is sent, in the first backward."""
    expect.case(text, world_size=world_size)
    causes = _OVERLAP_CAUSES | _OTHER_DTYPE | {"NoneType": none}
    causes |= {"deadlock": unequal, "different collectives": unequal, "died": unequal}
    args = (answer, uses, 2, listed, dtype)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = expect.run(_backwards, world_size, *args, folder * hold_back, causes=causes)

    def check_means(outcomes: list[Outcome], i: int) -> None:
        rounds = [outcome.value[i] for outcome in outcomes]
        local = [each["local"] for each in rounds]
        for outcome, this in zip(outcomes, rounds, strict=True):
            extra = _crossed(local, outcome.rank, none) if set(uses) == {"ab", "ba"} else [{} for _ in _NAMES]
            if i:
                extra = [wrong | _sent_again(outcomes, i, n) for n, wrong in enumerate(extra)]
            too_early = "the bucket leaves before this gradient is in .grad: clear in finish() what has arrived" if i else early
            extra = [wrong | {too_early: torch.zeros_like(grad)} for wrong, grad in zip(extra, local[0], strict=True)]
            _check_means(expect, outcome.rank, this["grads"], local, _NAMES, extra)

    for i in range(2):
        expect.case(f"{text}, backward {i + 1}", world_size=world_size)
        rounds = [outcome.value[i] for outcome in outcomes]
        for outcome, this in zip(outcomes, rounds, strict=True):
            _sent_in_buckets(outcome, this, first=i == 0)
        for outcome, this in zip(outcomes, rounds, strict=True):
            _check_complete(expect, outcome.rank, this, "finish()")
            expect.that(
                not this["moved"], "only gradients are averaged: the weights stay as they are",
                got=f"rank {outcome.rank}'s weights have other values after backward and finish()",
                cause="the hook receives the parameter: what is to be averaged is its .grad",
            )  # fmt: skip
            _check_dtype(expect, outcome.rank, this, dtype, _ZEROS_IN_FP32 if set(uses) == {"ab", "a"} else "")
        with _or_too_early(expect, partial(check_means, i=i), world_size, _backwards, *args):
            check_means(outcomes, i)
        for outcome, this in zip(outcomes, rounds, strict=True):
            _left_in_time(outcome.rank, this, first=i == 0)
        _check_no_wait(expect, rounds)
        for outcome, this in zip(outcomes, rounds, strict=True):
            _check_hooks(expect, outcome.rank, this)


def _check_hooks(expect: Expect, rank: int, this: dict) -> None:
    expect.that(
        not this["other hooks"], "hooks are registered once, when the object is made", "the same hooks after finish()",
        f"others on rank {rank}", "where old ones stay, each step calls one more for every gradient",
        "hooks stay on a parameter until they are removed: finish() need not register them again",
    )  # fmt: skip


def _check_no_wait(expect: Expect, rounds: list[dict]) -> None:
    """No rank's backward stands still, and finish() does until all have joined. `rounds`: what each rank reports."""
    blocked = any(this["blocked"] for this in rounds)
    for rank, this in enumerate(rounds):
        waited = this["waited in backward"]
        cause = "the hook asks again and again whether a collective is complete, or waits for its future"
        if waited:
            cause = "there is a wait() in the hook"
        if this["synchronous"]:
            cause = "all_reduce returns when it is complete, unless it is given async_op=True"
        got = f"{waited} of {len(this['sent'])} are complete when rank {rank}'s backward ends"
        if blocked:
            got = "rank 0's backward stands still until the other ranks have joined"
        expect.that(
            not waited and not (blocked and rank == 0), "no wait before backward is over", "backward goes on meanwhile", got,
            "backward stands still while the bytes travel: nothing overlaps", cause,
        )  # fmt: skip
    expect.that(
        not any(this["early"] for this in rounds), "finish() waits for every collective", "it returns when all ranks have joined",
        "rank 0's finish() returns while the others have sent nothing", "what is in .grad is this rank's own", "wait() is missing",
    )  # fmt: skip


def _sent_in_buckets(outcome: Outcome, this: dict, first: bool) -> None:
    sent, plain = this["sent"], not this["engine"] and this["kinds"] in ([], ["all_reduce"])
    cause = ""
    if not sent:
        cause = "nothing is reduced by dist.all_reduce"
        cause += "" if first else " from the second backward on: clear in finish() what has arrived and what was launched"
    elif plain and sent[: len(_NUMELS)] == _NUMELS and set(sent) <= set(_NUMELS):
        cause = "a bucket is launched twice: launch in finish() only what has not left, and clear there what was launched"
    elif plain and not first and sent != _NUMELS and sent != _PIECES and set(sent) <= set(_NUMELS):
        cause = "the second backward goes on counting where the first one ended: clear in finish() what has arrived and what was launched"
    elif plain and sent != _NUMELS[::-1] and sorted(sent) == sorted(_NUMELS):
        cause = "a bucket is launched before its own gradients are there: does each hook know which bucket is its own? "
        cause += "(All lambdas of a loop see its last value)"
    if cause and sent != _NUMELS:
        raise Finding(_RULE, f"all_reduces of {_NUMELS} elements", _told(this, outcome.rank), cause=cause)
    _check_sent(outcome.rank, this, _RULE, _NUMELS, _PIECES)


def _crossed(local: list[list], rank: int, of_others: str) -> list[dict[str, Tensor]]:
    """What two ranks get if each sends first what is full first: rank 0's b is added to rank 1's a, and the other way round.
    Or if one rank's bucket leaves without its own gradients."""
    cause = "the bucket that is full first is sent first, and rank 0's b is added to rank 1's a: keep the order of the list"
    partner = {"a": "b", "b": "a"}
    crossed: list[dict[str, Tensor]] = []
    for i, name in enumerate(_NAMES):
        layer, _, kind = name.partition(".")
        other = _NAMES.index(f"{partner.get(layer, layer)}.{kind}")
        wrong = {cause: (local[rank][i] + local[1 - rank][other]) / 2} if layer in partner else {}
        wrong |= {f"rank {r}'s is missing in it: {of_others}": local[1 - r][i] / 2 for r in range(2)}
        crossed.append(wrong)
    return crossed


def _sent_again(outcomes: list[Outcome], step: int, i: int) -> dict[str, Tensor]:
    """What a gradient becomes if a rank that has none sends what the step before left in its flat tensor."""
    now = [outcome.value[step]["local"][i] for outcome in outcomes]
    before = [outcome.value[step - 1]["local"][i] for outcome in outcomes]
    if all(grad is not None for grad in now) or all(grad is None for grad in before):
        return {}
    mean = torch.stack([grad for grad in before if grad is not None]).sum(0) / len(before)
    total = torch.stack([grad for grad in now if grad is not None]).sum(0)
    old = "the flat tensor still holds what the step before left in it: a missing gradient counts as zeros"
    missing = sum(grad is None for grad in now)
    left = {old: mean, f"{old}, and here it was sent undivided": mean * len(before)}
    return {cause: (total + missing * value) / len(now) for cause, value in left.items()}


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
            if this["issued"] == 0 and first:
                cause = "no hook launches anything: has each parameter one, and does it learn whose gradient has arrived? (All lambdas of a loop see its last value)"
            elif this["issued"] == 0:
                cause = "everything is launched in finish(). In the first backward it was not: let finish() begin the count anew"
            elif issued > full:
                cause = "a bucket leaves before it is full, or before those ahead of it have left"
                cause += "" if first else ": clear in finish() what has arrived"
            elif this["issued"] == len(_BUCKETS) and all(count == 0 for _, count in this["seen"]):
                cause = "the buckets wait for the last gradient of all: launch a bucket as soon as its own are there"
            else:
                cause = "a bucket is full, and stays: after each gradient launch all that may leave, not one"
            raise Finding(
                "a bucket leaves in the hook of its last gradient, if all ahead of it have left",
                f"{when}, {full} of {len(_BUCKETS)} buckets are on their way", f"{issued} on rank {rank}",
                "bytes that could travel during backward travel after it" if issued < full else "", cause,
            )  # fmt: skip
        arrived.add(name)


# --- 6. accumulation ---------------------------------------------------------------------------------


def _accumulations(rank, answer, uses, steps, raising, folder=""):
    """`steps` steps, each of len(uses) micro-batches, all but the last inside no_sync(). `uses`: the branches in each."""
    model, gates = _Branches(), _Gates(rank, folder)
    results = []
    with _Watch(model) as watch:
        engine = answer(model, model.buckets())
        for step in range(steps):
            model.zero_grad()
            came_out = not raising
            if raising:
                try:
                    with engine.no_sync():
                        raise ZeroDivisionError
                except ZeroDivisionError:
                    came_out = True
            losses = [(10 * step + i, use, 1 / len(uses)) for i, use in enumerate(uses)]
            watch.begin()
            in_hooks = 0
            for batch, use, factor in losses[:-1]:
                with engine.no_sync():
                    before = len(watch.calls)
                    (_loss(model, rank, batch, use) * factor).backward()
                    in_hooks += len(watch.calls) - before
            inside = len(watch.calls)
            batch, use, factor = losses[-1]
            loss = _loss(model, rank, batch, use) * factor
            gates.hold_back(step)
            loss.backward()
            watch.backward_ended()
            gates.open(f"backward {step}")
            engine.finish()
            gates.open(f"finish {step}")
            local = {"local": losses, "last": losses[-1:], "before": losses[:-1]}
            local = {name: _local_gradients(rank, some) for name, some in local.items()}
            told = {"inside": inside, "in hooks": in_hooks, "came out": came_out, "grads": _gradients(model)}
            results.append(told | local | watch.report() | gates.report)
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
    _accumulated(answer, expect, "1 micro-batch", 2, ["ab"], hold_back=True)
    _accumulated(answer, expect, "3 micro-batches", 2, ["ab", "ab", "ab"])
    _accumulated(answer, expect, "2 micro-batches, b is used in the first only", 2, ["ab", "a"])
    _accumulated(answer, expect, "an exception has left a no_sync() block before", 2, ["ab"], raising=True)
    _accumulated(answer, expect, "2 micro-batches", 3, ["ab", "ab"])


def _accumulated(
    answer, expect: Expect, text: str, world_size: int, uses: list[str], raising: bool = False, hold_back: bool = False
) -> None:
    expect.case(text, world_size=world_size)
    causes = {
        "has no attribute 'no_sync'": "the class needs a method no_sync()",
        "context manager": "no_sync() is called in a with statement: keep @contextmanager above it, and a yield in it",
        "didn't yield": "no_sync() needs one yield, where the block runs: without an `if` around it",
        "didn't stop": "no_sync() yields more than once: the block runs at one place",
        "NoneType": "finish() meets parameters without a gradient: they count as zeros",
    } | _OVERLAP_CAUSES
    with tempfile.TemporaryDirectory() as folder:
        outcomes = expect.run(_accumulations, world_size, answer, uses, 2, raising, folder * hold_back, causes=causes)

    def check_means(outcomes: list[Outcome], step: int) -> None:
        values = [each.value[step] for each in outcomes]
        local = [value["local"] for value in values]
        for outcome in outcomes:
            extra = [_accumulated_otherwise(values, outcome.rank, i, len(uses)) for i in range(len(_NAMES))]
            _check_means(expect, outcome.rank, values[outcome.rank]["grads"], local, _NAMES, extra)

    for step in range(2):
        expect.case(f"{text}, step {step + 1}", world_size=world_size)
        rounds = [outcome.value[step] for outcome in outcomes]
        for outcome, this in zip(outcomes, rounds, strict=True):
            cause = "the hook does not look at the switch, so every micro-batch is reduced"
            if not this["in hooks"]:
                cause = "no_sync() itself sends when the block ends: all that it does there is to turn the switch back"
            expect.that(
                this["inside"] == 0, "inside no_sync() nothing is sent", "0 collectives",
                f"{this['inside']} after {len(uses) - 1} backwards inside no_sync() on rank {outcome.rank}",
                "a step of G micro-batches sends up to G times as much as it has to", cause,
            )  # fmt: skip
            expect.that(
                this["came out"], "an exception in the block reaches the caller", "a ZeroDivisionError", f"none on rank {outcome.rank}",
                "whoever trains never hears of the error", "no_sync() swallows it: finally instead of except",
            )  # fmt: skip
            _accumulated_in_buckets(outcome, this, raising)
            _check_complete(expect, outcome.rank, this, "finish()")
        with _or_too_early(expect, partial(check_means, step=step), world_size, _accumulations, answer, uses, 2, raising):
            check_means(outcomes, step)
        for outcome, this in zip(outcomes, rounds, strict=True):
            if all(use == "ab" for use in uses):
                cause = "the hooks stay quiet, and finish() launches everything: is the switch turned on again?"
                if raising:
                    cause = "the hooks stay quiet after the exception: turn the switch on again in a finally"
                expect.that(
                    this["issued"] == len(_NUMELS), "the last backward, outside no_sync(), reduces from its hooks",
                    f"{len(_NUMELS)} all_reduces issued when it ends", f"{this['issued']} on rank {outcome.rank}",
                    "nothing overlaps", cause if this["issued"] == 0 else "",
                )  # fmt: skip
        _check_no_wait(expect, rounds)


def _accumulated_in_buckets(outcome: Outcome, this: dict, raising: bool) -> None:
    rule, cause = "then one all_reduce for each bucket", ""
    plain = not this["engine"] and this["kinds"] == ["all_reduce"]
    if not this["sent"]:
        cause = "reduction stays off: is the switch turned on again when the with block ends"
        cause += ", also after an exception (try … finally)?" if raising else "?"
    elif plain and len(this["sent"]) > len(_NUMELS) and set(this["sent"]) <= set(_NUMELS):
        cause = "a bucket is sent more than once in a step"
    if cause:
        raise Finding(rule, f"all_reduces of {_NUMELS} elements", _told(this, outcome.rank), cause=cause)
    _check_sent(outcome.rank, this, rule, _NUMELS, _PIECES)


def _accumulated_otherwise(values: list[dict], rank: int, i: int, micro_steps: int) -> dict[str, Tensor]:
    nothing = torch.zeros_like(values[0]["local"][i])
    last = sum((nothing if value["last"][i] is None else value["last"][i]) for value in values) / len(values)
    before = [value["before"][i] for value in values]
    if all(grad is None for grad in before):
        return {}
    wrong = {"only the last micro-batch is in it: what the earlier ones left in .grad is lost": last}
    if all(grad is not None for grad in before):
        total = sum(value["local"][i] for value in values) / len(values)
        wrong["it is divided by the number of micro-batches: the losses come divided already"] = total / micro_steps
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
    """what one would measure; gradients, weights and losses of the mended loop on 2 and 3 ranks against one process; one all_reduce a gradient, in its hook"""
    for world_size in (2, 3):
        expect.case(f"{_STEPS} steps of SGD", world_size=world_size)
        causes = {"NoneType": "a frozen parameter has no gradient", "deadlock": _UNLIKE}
        outcomes = expect.run(_mended_run, world_size, mended, causes=causes)
        check = partial(_check_mended, expect)
        with _or_too_early(expect, check, world_size, _mended_run, mended):
            check(outcomes)


def _check_mended(expect: Expect, outcomes: list[Outcome]) -> None:
    world_size = len(outcomes)
    numels = [param.numel() for param in _awkward_model().parameters() if param.requires_grad]
    half_mended = {cause: _half_mended(world_size, *change) for cause, change in _HALF_MENDED.items()}
    means, local_losses = _single_process(world_size)
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        _check_complete(expect, rank, value, "train()")
        mistakes = {cause: weights[rank] for cause, weights in half_mended.items()}
        _check_weights(expect, rank, value["weights"], world_size, mistakes)
        expect.that(
            len(value["grads"]) == _STEPS, "the loop stays as it is: only the hook changes", f"{_STEPS} times optimizer.step()",
            f"{len(value['grads'])} on rank {rank}",
        )  # fmt: skip
        for step, (got, want) in enumerate(zip(value["grads"], means, strict=True), start=1):
            alike = all(differ(each.value["grads"][step - 1], got, "", 1e-6) is None for each in outcomes)
            expect.equal(
                got, want, of=f"rank {rank}'s gradients in step {step} (in a row)", rule="when step() runs, a gradient is the mean over the ranks",
                so="" if alike else "with Adam the ranks' moments differ for ever: only plain SGD forgives it",
                mistakes={"the ranks' gradients are summed, and another learning rate makes up for it: Adam would not": want * world_size}
                if alike else {"the weights are averaged after the step: that hides the symptom": got},
            )  # fmt: skip
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        mean_losses = [sum(losses) / world_size for losses in zip(*local_losses, strict=True)]
        expect.equal(
            value["losses"], local_losses[rank], of=f"what train() returns on rank {rank}",
            rule="train() returns this rank's own losses, one a step, as it did before", tol=1e-5,
            mistakes={"the losses are averaged over the ranks: here they stay this rank's own": mean_losses},
        )  # fmt: skip
        want, sent = numels * _STEPS, value["sent"]
        more = Counter(sent) - Counter(want)
        cause = ""
        if sum(sent) == 2 * sum(want):
            cause = "the weights are still sent beside the gradients"
        elif set(more) == {1} and set(value["kinds"]) == {"all_reduce"}:
            cause = "the loss is reduced as well: here only gradients travel"
        elif value["engine"]:
            cause = "mz.DDP is at work: it may be read, but not used"
        expect.that(
            value["kinds"] == ["all_reduce"] and sorted(sent) == sorted(want), "one all_reduce for each trainable parameter and step",
            f"{len(want)} all_reduces, {sum(want)} elements", f"{show(outcome.count)}, {sum(sent)} elements on rank {rank}", cause=cause,
        )  # fmt: skip
        late = len(sent) - value["in hooks"]
        expect.that(
            not late, "the hook averages a gradient when it arrives, and the rest of the loop stays", "every all_reduce inside backward()",
            f"{late} of {len(sent)} before or after it on rank {rank}", "what a hook sends can travel while backward goes on",
            "the gradients are averaged outside the hook: mend the hook, and leave the loop as it is",
        )  # fmt: skip


def _mended_run(rank, train):
    model = _awkward_model()
    grads: list[Tensor] = []

    def look(*_: object) -> None:
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]))

    handle = register_optimizer_step_pre_hook(look)
    try:
        with _Watch() as watch:
            losses = train(model, _batches(dist.get_world_size(), rank), _LR)
    finally:
        handle.remove()
    return {"weights": _weights(model), "grads": grads, "losses": losses, "in hooks": watch.in_hooks} | watch.sent()


def _single_process(world_size: int) -> tuple[list[Tensor], list[list[float]]]:
    """One process on whole batches: its gradients in each step, and the losses on each rank's rows."""
    model = _awkward_model()
    optimizer = torch.optim.SGD(model.parameters(), _LR)
    means, losses = [], [[] for _ in range(world_size)]
    for step, (x, y) in enumerate(_batches(world_size)):
        for rank in range(world_size):
            own_x, own_y = _batches(world_size, rank)[step]
            losses[rank].append(F.mse_loss(model(own_x), own_y).item())
        F.mse_loss(model(x), y).backward()
        means.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return means, losses


# What becomes of the ranks' weights during backward, and with which gradients they step: stacks, a row for each rank.
_HALF_MENDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "the weights are still averaged during backward, not the gradients": (lambda w: w.mean(0).expand_as(w), lambda g: g),
    "the gradients are summed, and the division still hits the weights: divide param.grad": (
        lambda w: w / len(w),
        lambda g: g.sum(0).expand_as(g),
    ),
    "the gradients are divided, and the all_reduce still sums the weights: all_reduce param.grad": (
        lambda w: w.sum(0).expand_as(w),
        lambda g: g / len(g),
    ),
    "the gradients are averaged, and the weights are still divided": (lambda w: w / len(w), lambda g: g.mean(0).expand_as(g)),
}


def _half_mended(
    world_size: int, of_weights: Callable[[Tensor], Tensor], of_gradients: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Each rank's weights, if every backward changes weights and gradients in this way."""
    models = [_awkward_model() for _ in range(world_size)]
    trainable = [[param for param in model.parameters() if param.requires_grad] for model in models]
    for step in range(_STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            x, y = _batches(world_size, rank)[step]
            F.mse_loss(model(x), y).backward()
        for params in zip(*trainable, strict=True):
            weights = of_weights(torch.stack([param.detach() for param in params]))
            gradients = of_gradients(torch.stack([param.grad for param in params]))
            for param, weight, gradient in zip(params, weights, gradients, strict=True):
                param.data.copy_(weight - _LR * gradient)
    return [_weights(model) for model in models]
