"""The checks of exercises/04_zero3.ipynb.

Whether a weight is there is read from its storage, never from its elements: to use one whose storage is gone ends the process.
So the models below look before they compute, forward and backward, and say whose weights are missing (`_Log`). A storage that
grows is NaN at first (`_nan_filled`), so that a forgotten all-gather shows.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.modules.module as everywhere
from torch import Tensor, UntypedStorage, nn

import minizero as mz
from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, shorten, show
from minizero.parts import calls

_SLACK = 16  # bytes: a loss, a count
_FLOAT = 4  # bytes

# --- what an answer sends and what there is ---------------------------------------------------------------------


def _sent(traffic, since: int = 0) -> list[tuple]:
    """(op, numel, dtype, by minizero's own engine, complete) of each collective."""
    return [(op.op, op.numel, op.dtype, bool(op.unit), op.end is not None) for op in traffic.ops[since:]]


def _check_own(expect: Expect, rank: int, sent: list[tuple]) -> None:
    engine = any(by_engine for *_, by_engine, _ in sent)
    expect.that(not engine, "you build it from torch.distributed", got="minizero's own step at work", cause="it may be read, but not used")
    still_open = sum(not complete for *_, complete in sent)
    expect.that(
        not still_open, "every collective is waited for", "all waited for", f"{still_open} of {len(sent)} still open on rank {rank}",
        "what is read meanwhile may be half old, half new", "async_op=True returns a work, and its wait() is missing",
    )  # fmt: skip


def _check_sent(rank: int, sent: list[tuple], want: list[tuple[str, int]], rule: str, causes: Mapping[str, str]) -> None:
    """The collectives (op, elements) that `want` names, in this order.

    causes: an op that is not wanted, or is issued too often, "no …" for one that is missing, or "numel" -> the mistake
    """
    got = [(op, numel) for op, numel, *_ in sent]
    if got == want:
        return
    extra = Counter(op for op, _ in got) - Counter(op for op, _ in want)
    missing = Counter(op for op, _ in want) - Counter(op for op, _ in got)
    cause = next((text for op, text in causes.items() if op in extra), "")
    if not cause and "barrier" in extra:
        cause = "a barrier is a collective too, and not needed: these wait for the others anyway"
    elif not cause and not extra:
        cause = causes.get(f"no {next(iter(missing))}" if missing else "numel", "")
    raise Finding(rule, _told(want), f"{_told(got)} on rank {rank}", cause=cause)


def _told(ops: Sequence[tuple[str, int]]) -> str:
    counted = [f"{count} × {op} of {show(numel)}" if count > 1 else f"{op} of {show(numel)}" for (op, numel), count in Counter(ops).items()]
    return shorten(", ".join(counted)) or "nothing"


def _total(memory, expected: float = math.inf) -> int:
    """Bytes that are there. Where more are there than expected it looks again: a thread of gloo's own lets go of a
    collective's tensors a moment after it is over."""
    gc.collect()
    for pause in (0.01, 0.02, 0.04, 0.08, 0.16):
        if memory.total <= expected:
            break
        time.sleep(pause)
    return memory.total


def _up(numel: int, n: int) -> int:
    """The next multiple."""
    return -(-numel // n) * n


def _there(param: Tensor, numel: int) -> bool:
    """Its elements have memory."""
    return param.numel() == numel and param.untyped_storage().nbytes() >= numel * _FLOAT


@contextmanager
def _nan_filled() -> Iterator[None]:
    """Inside, what a storage gets by resize_ is NaN. Else the old weights might still lie there."""
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, nbytes: int) -> object:
        before, result = storage.nbytes(), resize(storage, nbytes)
        if nbytes > before:
            torch.empty(0, dtype=torch.uint8).set_(storage, before, (nbytes - before,)).fill_(255)
        return result

    UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize


_CAUSES = {  # what torch says -> what is wrong
    "got (0))": "the buffer has no elements any more. A tensor's own resize_, or another .data, changes its shape, and frees nothing that others look into: the tensor stays, and its storage is resized",
    "'NoneType' object has no attribute 'untyped_storage'": "the buffer is dropped, and who has a view of it keeps its memory: the tensor stays, and its storage is resized",
    "died": "a weight was used whose memory is gone: who has freed it too early, or not gathered it?",
    "storage of size 0": "a tensor is used whose memory is gone: resize_ first, and who reads it before?",
    "out of bounds for storage": "a storage is resized to a number of bytes, not of elements",
    "unallocated storage": "a tensor is used whose memory is gone: resize_ first, and who reads it before?",
    "check failed": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second, and the unit has to be padded",
    "invalid tensor size": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second",
    "output tensor size": "a reduce_scatter takes P elements and gives S, an all_gather takes S and gives P: out first, in second, and the unit has to be padded",
    "is being modified inplace": "autograd takes part in the gather, since shard_S (or what is gathered into) requires a gradient: gather from shard_S.detach() into the flat buffer",
    "a view of a leaf": "autograd watches parameters: work on param.data",
    "leaf variable": "autograd watches parameters: work on param.data",
    "modified by an inplace operation": "something was written to a parameter, and autograd has noticed: gather into the flat buffer, and touch no parameter",
    "storage that is not resizable": "only a storage that torch has allocated itself can be resized",
    "Trying to resize storage": "only a storage that torch has allocated itself can be resized",
}


# --- 1. shard a unit --------------------------------------------------------------------------------------------


def _params(shapes: Sequence[tuple], frozen: Sequence[int] = ()) -> list[nn.Parameter]:
    """With the values 1, 2, 3, … in a row; in long ones the digits begin again after 9."""
    params, start = [], 1
    for i, shape in enumerate(shapes):
        values = torch.arange(start, start + math.prod(shape))
        values = values % 9 + 1 if sum(map(math.prod, shapes)) > 100 else values
        params.append(nn.Parameter(values.float().view(shape).clone(), requires_grad=i not in frozen))
        start += math.prod(shape)
    return params


def _flat(tensors: Sequence[Tensor], n: int) -> Tensor:
    flat = torch.cat([each.detach().flatten() for each in tensors])
    return F.pad(flat, (0, _up(len(flat), n) - len(flat)))


def _other_shards(flat_P: Tensor, n: int, rank: int) -> dict[str, Tensor]:
    """The mistake of taking another rank's shard, for each of the others."""
    return {f"that is rank {r}'s shard: rank r has the r-th": shard for r, shard in enumerate(flat_P.chunk(n)) if r != rank}


def _as_called(answer: object) -> dict[str, str]:
    """Nothing more is to say where the answer itself takes other arguments than those that it is called with. Goes before what a
    "positional argument" means elsewhere."""
    name = getattr(answer, "__qualname__", "") + ".__init__" * isinstance(answer, type)
    return {f"{name}() {what}": "" for what in ("takes", "missing") if "<lambda>" not in name}


def _place(tensor: Tensor, flat: Tensor) -> int | None:
    """At which element of the flat buffer it begins; None if it lies elsewhere."""
    if tensor.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        return None
    return (tensor.data_ptr() - flat.data_ptr()) // _FLOAT


@exercise(
    "zero3.shard_unit",
    call="shard_unit(params)",
    hints=[
        "If the parameters' memory is pieces of one buffer, what is this rank's shard? And what must be true of it, if the buffer is to go and the shard to stay?",
        "torch.cat of param.data.flatten(), F.pad(flat, (0, missing)) up to a multiple of N, slices with view_as(param) as new .data. A slice is a view of the buffer; clone() has memory of its own.",
        "Flatten and concatenate all; pad with -len(flat) % N zeros; for each parameter: param.data = the slice of numel() elements at its place, view_as(param). Return the buffer, and a "
        "clone of the slice [rank·S, (rank+1)·S).",
    ],
)
def shard_unit(answer, expect):
    """each element owned once on 2 and 3 ranks, frozen ones and padding too; parameters are views of one buffer, the shard is not; nothing is sent"""
    _sharded(answer, expect, "two parameters", 2, [(2, 2), (1,)])
    _sharded(answer, expect, "nothing to pad", 2, [(3,), (1,)])
    _sharded(answer, expect, "parameter 1 is frozen", 3, [(2, 2), (3,), ()], frozen=(1,))
    _sharded(answer, expect, "fewer elements than ranks", 3, [(1,)])
    _sharded(answer, expect, "3 parameters", 3, [(40, 30), (30,), (2, 1)])


def _sharded(answer, expect: Expect, text: str, n: int, shapes: list[tuple], frozen: Sequence[int] = ()) -> None:
    params = _params(shapes, frozen)
    flat_P = _flat(params, n)
    P = len(flat_P)
    expect.case(text, world_size=n, P=P)
    causes = _CAUSES | {
        "deadlock": "nothing has to be sent: the parameters are equal on all ranks",
        "size of tensor": "sizes differ: is the buffer padded to P elements, and is each place as long as its parameter?",
        "zero-dimensional tensor": "a parameter of shape [] is a number: flatten() makes it one element long",
        "detached from": "autograd has a hand in the buffer: take param.data",
        "requires grad": "autograd has a hand in the buffer: take param.data",
    }
    outcomes = expect.run(_shard_program, n, answer, shapes, frozen, causes=causes)
    for outcome in outcomes:
        _check_flat(expect, outcome, flat_P, params, frozen, n)
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        mistakes = {
            **_other_shards(flat_P, n, rank),
            "that is the whole buffer: a rank keeps its shard": flat_P,
            "the padding is cut off: every rank's shard has S elements": flat_P.chunk(n)[rank][: max(0, sum(map(torch.numel, params)) - rank * P // n)],
            "nothing was written into the shard": torch.zeros(P // n),
            "a shard is flat: one dimension": flat_P.chunk(n)[rank].view(1, -1),
            "each parameter is cut by itself: it is the flat buffer that is cut, wherever parameters begin": torch.cat(
                [_flat([param], n).chunk(n)[rank] for param in params]
            ),
            "every N-th element is taken: a shard is a piece, since an all_gather puts the shards one after the other": flat_P[rank::n],
        }
        want = flat_P.chunk(n)[rank]
        expect.equal(
            value["shard"], want, of=f"rank {rank}'s shard", rule="every element belongs to exactly one rank", tol=0,
            mistakes={text: wrong for text, wrong in mistakes.items() if differ(wrong, want, "", 0)},
        )  # fmt: skip
    for outcome in outcomes:
        _check_apart(expect, outcome, P, n, sum(map(torch.numel, params)))
        rank, sent = outcome.rank, outcome.value["sent"]
        _check_own(expect, rank, sent)
        equal_already = dict.fromkeys(("all_gather", "broadcast", "scatter"), "the parameters are equal on all ranks already: a rank cuts its shard out of its own")
        _check_sent(rank, sent, [], "to shard a unit, nothing has to be sent", equal_already)


_EACH_PADDED = "each parameter is padded by itself: the whole is padded, once, at its end"


def _check_flat(expect: Expect, outcome: Outcome, flat_P: Tensor, params: list[nn.Parameter], frozen: Sequence[int], n: int) -> None:
    rank, value, P = outcome.rank, outcome.value, len(flat_P)
    cause = "nothing is returned: a return is missing" if value["told"] == "None" else ""
    expect.that(value["told"] == "a pair", "the answer is a pair of tensors", "(flat_P, shard_S)", f"{value['told']} on rank {rank}", cause=cause)
    expect.that(
        not value["gone"], "flat_P has the weights, and its memory: to free it is the next exercise", "a buffer with memory", f"one without, or parameters without, on rank {rank}"
    )  # fmt: skip
    got, numel = value["flat"], sum(map(torch.numel, params))
    trainable = sum(param.numel() for i, param in enumerate(params) if i not in frozen)
    each_padded = torch.cat([_flat([param], n) for param in params])
    cause = ""
    if got.shape != flat_P.shape:
        cause = {
            numel: "the padding is missing: P is the next multiple of the world size",
            numel // n * n: "numel is rounded down to a multiple of the world size, and elements are lost: round up",
            P // n: "that is a shard, or the two are exchanged: flat_P comes first, and has all weights",
            numel + n - numel % n: "where the size is a multiple of N already, nothing has to be padded",
        }.get(got.numel(), "")
        if not differ(got, each_padded, "", 0):
            cause = _EACH_PADDED
        if frozen and got.numel() in (trainable, _up(trainable, n)):
            cause = "a frozen parameter is left out: its weight takes as much memory as any other, so it is sharded too"
    expect.that(
        got.shape == flat_P.shape and got.dtype == flat_P.dtype, "flat_P has all weights of the unit, and padding up to a multiple of N",
        f"a float32 tensor of shape ({P},)", f"a {str(got.dtype).removeprefix('torch.')} tensor of shape {tuple(got.shape)} on rank {rank}", cause=cause,
    )  # fmt: skip
    expect.equal(
        got, flat_P, of=f"flat_P on rank {rank}", rule="flat_P is the parameters in order, then zeros", tol=0,
        mistakes={
            text: wrong
            for text, wrong in {
                "the parameters stand in reverse: the first of the list comes first": _flat(params[::-1], n),
                "the padding stands in front: it comes at the end": flat_P.roll(P - numel),
                "the padding was never written: torch.empty has in it what it finds": torch.cat([flat_P[:numel], torch.full((P - numel,), math.nan)]),
                "the buffer has only zeros in it: the weights are not copied": torch.zeros(P),
                _EACH_PADDED: each_padded,
            }.items()
            if differ(wrong, flat_P, "", 0)
        },
    )  # fmt: skip
    expect.that(
        value["needs"] == [i not in frozen for i in range(len(params))], "what was frozen stays frozen, and nothing else is",
        got=f"requires_grad has changed on rank {rank}",
    )  # fmt: skip
    expect.that(
        not value["computed"], "neither flat_P nor shard_S is computed from parameters, as autograd sees it", f"{value['computed']} has no grad_fn", f"it has one on rank {rank}",
        "autograd holds on to what it is made of", "it is made of the parameters themselves: take param.data",
    )  # fmt: skip
    expect.that(
        not value["needs a gradient"], "flat_P takes no part in autograd", "flat_P.requires_grad is False", f"it is True on rank {rank}",
        "it is written to, again and again", "a gradient is required of shard_S, if at all: that is what an optimizer gets",
    )  # fmt: skip
    start = 0
    for i, param in enumerate(params):
        at = value["places"][i]
        expect.equal(
            value["values"][i], param, of=f"parameter {i} on rank {rank}", rule="the parameters keep their values and their shapes",
            mistakes={"it is emptied: from here on it is a view of flat_P, and has its shape for good": torch.empty(0)},
        )  # fmt: skip
        expect.that(
            at == start, "each parameter is a view of its place in flat_P", f"parameter {i} begins at element {start} of flat_P",
            f"it lies {'elsewhere' if at is None else f'at element {at}'} on rank {rank}", "what is gathered into flat_P would not reach the model",
            (
                "a frozen parameter is not moved: its weight is gathered and freed with the others"
                if i in frozen
                else "its weights are copied into the buffer, and .data is never pointed there; or the buffer that is returned is a copy"
            )
            if at is None
            else "",
        )  # fmt: skip
        start += param.numel()


def _check_apart(expect: Expect, outcome: Outcome, P: int, n: int, numel: int) -> None:
    rank, value, S = outcome.rank, outcome.value, P // n
    owned = value["storage"] // _FLOAT
    shared = "it is a slice of flat_P: one view keeps the whole buffer alive, or loses its memory with it. clone() it"
    expect.that(
        owned == S, "the shard has memory of its own", f"{S} elements", f"the memory behind it has {owned} on rank {rank}",
        "the weights would stay in full, or the shard would go with them", shared if owned == P else "",
    )  # fmt: skip
    limit = _FLOAT * (P - numel + S) + _SLACK
    expect.that(
        value["grown"] <= limit, "the weights exist once, and a shard of them", f"at most {limit:,} bytes more than before",
        f"{value['grown']:,} on rank {rank}", f"the weights are {_FLOAT * numel:,} bytes", "somebody still holds the old weights, or the buffer exists twice",
    )  # fmt: skip


def _shard_program(rank, answer, shapes, frozen):
    params = _params(shapes, frozen)
    metered = sum(map(torch.numel, params)) > 100
    with mz.record_traffic() as traffic, mz.record_memory() if metered else nullcontext() as memory:
        before = _total(memory) if metered else 0
        pair = answer(list(params))
        grown = _total(memory) - before if metered else 0
    found = {"told": "a pair", "gone": False, "sent": _sent(traffic), "grown": grown}
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(each, Tensor) for each in pair)):
        return found | {"told": f"a {type(pair).__name__}" if pair is not None else "None"}
    flat, shard = pair
    if not all(_there(each, each.numel()) for each in (flat, shard, *params)):
        return found | {"gone": True}
    return found | {
        "flat": flat.clone(),
        "shard": shard.clone(),
        "storage": shard.untyped_storage().nbytes(),
        "needs": [param.requires_grad for param in params],
        "computed": " and ".join(name for name, each in (("flat_P", flat), ("shard_S", shard)) if each.grad_fn is not None),
        "needs a gradient": flat.requires_grad,
        "values": [param.clone() for param in params],
        "places": [_place(param, flat) for param in params],
    }


# --- 2. gather and free -----------------------------------------------------------------------------------------


@exercise(
    "zero3.gather_and_free",
    call="Unit(params), then .gather() and .free()",
    points=2,
    hints=[
        "After a forward autograd holds views of your buffer, and you cannot reach them. What do all views have in common, and can that lose its memory while they stay?",
        "storage = flat_P.untyped_storage(); storage.resize_(0) gives the memory back, storage.resize_(flat_P.nbytes) allocates it again, and every view has it again. nbytes is shape times "
        "item size, so it does not change. all_gather(flat_P, shard_S) fills it.",
        "__init__: self.flat_P, self.shard_S = shard_unit(params), then free. gather: resize the storage of flat_P to flat_P.nbytes, then all_gather into flat_P from shard_S. free: resize the "
        "storage to 0. Touch no parameter.",
    ],
)
def gather_and_free(answer, expect):
    """on 2 and 3 ranks: bytes held when made, while gather() runs, gathered, freed, and freed while autograd has views; weights old and new; updates of shard_S; gradients; one all_gather of P"""
    _gathered(answer, expect, "5 elements", 2, (1, 3))
    _gathered(answer, expect, "fewer elements than ranks", 3, ())
    _gathered(answer, expect, "1,320 elements", 3, (40, 31))


def _gathered(answer, expect: Expect, text: str, n: int, shape: tuple) -> None:
    shapes = [shape, shape[:1], shape[:1]] if shape else [()]
    weights = [param.detach() for param in _params(shapes)]
    P = _up(sum(map(torch.numel, weights)), n)
    expect.case(text, world_size=n, P=P)
    causes = _CAUSES | {
        "has no attribute 'shard_S'": "the shard has to be kept as self.shard_S",
        "has no attribute 'gather'": "the class needs a method gather()",
        "has no attribute 'free'": "the class needs a method free()",
        "deadlock": "gather() is a call of all ranks: it issues one all_gather on each",
    }
    outcomes = expect.run(_gathered_program, n, answer, shapes, causes=causes)
    for check in (_check_made, _check_round, _check_between, _check_anew):
        for outcome in outcomes:
            check(expect, outcome, weights, n, P)


_HELD = "the parameters have let go of the full weights, and something else still holds them: a name, an attribute or a view"


def _check_made(expect: Expect, outcome: Outcome, weights: list[Tensor], n: int, P: int) -> None:
    rank, value, S = outcome.rank, outcome.value, P // n
    expect.that(
        not value["sliced"], "the shard has memory of its own", "a shard that stays when the buffer goes", f"shard_S looks into the parameters' memory on rank {rank}",
        cause="shard_S is a slice of the buffer: it loses its memory with it, or keeps all of it alive. clone() it",
    )  # fmt: skip
    expect.that(
        isinstance(value["shard"], Tensor), "self.shard_S is this rank's shard", f"a tensor of {S} elements", f"{show(value['shard'])} on rank {rank}"
    )  # fmt: skip
    flat_P = _flat(weights, n)
    mistakes = _other_shards(flat_P, n, rank) | {"that is the whole buffer: a rank keeps its shard": flat_P}
    expect.equal(value["shard"], flat_P.chunk(n)[rank], of=f"shard_S on rank {rank}", rule="shard_S has this rank's elements", tol=0, mistakes=mistakes)
    held, want = value["made"]["held"], _FLOAT * S
    cause = _HELD
    if value["made"]["there"]:
        cause = "the buffer keeps its memory from the start: until the first gather() nobody needs it. (A tensor's own resize_ changes its shape, and frees nothing.)"
        if value["made"]["storages"] > 1:
            cause = "the parameters have memory of their own: each .data is to be a view of the buffer, and no copy"
    expect.that(
        held <= want + _SLACK, "a unit that is not gathered holds its shard, and nothing else", f"{want:,} bytes", f"{held:,} on rank {rank}",
        f"the full weights are {_FLOAT * P:,} bytes", cause,
    )  # fmt: skip
    causes = {"broadcast": "the parameters are equal on all ranks already", "all_gather": "until the first gather() nobody needs the full weights"}
    _check_sent(rank, value["made"]["sent"], [], "when a unit is made, nothing has to be sent", causes)


def _check_round(expect: Expect, outcome: Outcome, weights: list[Tensor], n: int, P: int) -> None:
    """gather() and free(), with nobody looking."""
    rank, value, S = outcome.rank, outcome.value, P // n
    gathered = value["gathered"]
    _check_weights(expect, rank, gathered, weights, n, "after gather()")
    _check_gather(expect, rank, gathered, P)
    held, want = gathered["held"], _FLOAT * (S + P)
    expect.that(
        held <= want + _SLACK, "a gathered unit holds its buffer and its shard", f"{want:,} bytes", f"{held:,} on rank {rank}",
        cause="the buffer is there twice: gather into the one of which the parameters are views" if held > want + _FLOAT * P - _SLACK else "",
    )  # fmt: skip
    peak, limit = gathered["peak"], want + _FLOAT * P // 2
    expect.that(
        peak <= limit, "while gather() runs, the full weights are there once", f"a peak of at most {limit:,} bytes", f"{peak:,} on rank {rank}",
        "each gather makes a step's peak higher, by a whole unit", "the shards arrive in another tensor and are copied from there: the buffer itself is what all_gather fills",
    )  # fmt: skip
    freed, want = value["freed"], _FLOAT * S
    cause = "the parameters still have their memory: resize the storage that they are views of to 0 bytes" if freed["there"] else _HELD
    expect.that(
        freed["held"] <= want + _SLACK, "free() gives the memory of the full weights back", f"{want:,} bytes", f"{freed['held']:,} on rank {rank}", cause=cause
    )  # fmt: skip
    _check_sent(rank, freed["sent"], [], "free() sends nothing", {"all_gather": "free() gives memory back: nobody needs to hear of it"})


def _check_weights(expect: Expect, rank: int, this: dict, weights: list[Tensor], n: int, when: str, old: Sequence[Tensor] | None = None) -> None:
    P = _up(sum(map(torch.numel, weights)), n)
    _check_own(expect, rank, this["sent"])
    expect.that(
        this["there"], "a gathered unit's parameters have memory", f"{_FLOAT * P} bytes behind them", f"{this['behind']} on rank {rank} {when}",
        cause="gather() makes another buffer, and the parameters do not look into it: gather into the buffer of which they are views"
        if this["sent"]
        else "the storage has to be resized before it can be gathered into",
    )  # fmt: skip
    own = torch.cat([_flat(weights, n).chunk(n)[r] if r == rank else torch.full((P // n,), math.nan) for r in range(n)])
    for i, want in enumerate(weights):
        start = sum(map(torch.numel, weights[:i]))
        mistakes = {
            "the memory is back, and nobody's shards: the all_gather is missing, or goes to another tensor": torch.full_like(want, math.nan),
            "the buffer has only this rank's shard: the all_gather is missing": own[start : start + want.numel()].view_as(want),
            "the memory is back, and only zeros in it: the all_gather is missing, or goes to another tensor": torch.zeros_like(want),
        }
        if old is not None:
            mistakes["these are the weights of before: gather() does not send shard_S as it is now"] = old[i]
        expect.equal(
            this["values"][i], want, of=f"parameter {i} on rank {rank} {when}", rule="gather() brings all ranks' shards",
            mistakes={text: wrong for text, wrong in mistakes.items() if differ(wrong, want, "", 0)},
        )  # fmt: skip


def _check_gather(expect: Expect, rank: int, this: dict, P: int) -> None:
    causes = {
        "all_reduce": "an all_reduce of shards padded with zeros gives the same sum, and sends twice as much",
        "broadcast": "a broadcast from each owner in turn sends P from one rank at a time: one all_gather does it at once",
        "all_gather": "one all_gather of the whole buffer is enough, whatever the number of parameters",
        "no all_gather": "nothing is gathered: from where should the weights come?",
        "numel": "the whole buffer is gathered at once, padding included",
    }
    _check_sent(rank, this["sent"], [("all_gather", P)], "gather() is one all_gather of P elements", causes)


_REBOUND = (
    "the parameters have let go, but autograd has saved views of the weights, and they keep the storage: whatever .data or the buffer's name is set to, "
    "its memory stays. Resize the storage"
)


def _check_between(expect: Expect, outcome: Outcome, weights: list[Tensor], n: int, P: int) -> None:
    """freed and gathered between forward and backward, while autograd has views."""
    rank, value = outcome.rank, outcome.value
    gave = value["in forward"]["held"] - value["between"]["held"]
    expect.that(
        gave >= _FLOAT * P - _SLACK, "free() gives the memory back whoever looks into it: here autograd, between forward and backward",
        f"free() gives {_FLOAT * P:,} bytes back", f"{max(gave, 0):,} on rank {rank}", "from forward to backward every unit's weights stay, as under ZeRO-2",
        _REBOUND if value["saved"]["between"] else "",
    )  # fmt: skip
    back = value["back"]
    expect.that(
        value["saved"]["back"], "gather() brings the memory back where it was", f"the storage that autograd has saved views of has {_FLOAT * P:,} bytes",
        f"it has 0 on rank {rank}", "backward would read memory that is gone, and end the process",
        "gather() makes a new buffer: the parameters look into it, autograd still into the old one. Resize the old one's storage",
    )  # fmt: skip
    _check_weights(expect, rank, back, weights, n, "when gathered for backward")
    _check_gather(expect, rank, back, P)
    for i, want in enumerate(_worked(weights)):
        of = f"the gradient of {f'parameter {i}' if i < len(weights) else 'the input'} on rank {rank}"
        expect.equal(value["grads"][i], want, of=of, rule="after gather() autograd sees the weights, and the gradients are right", tol=1e-5)


def _check_anew(expect: Expect, outcome: Outcome, weights: list[Tensor], n: int, P: int) -> None:
    """after an update of the shards, and after one more while the unit is gathered"""
    new, rank, value = _updated(weights, n), outcome.rank, outcome.value
    _check_weights(expect, rank, value["anew"], new, n, "after an update of shard_S", weights)
    _check_gather(expect, rank, value["anew"], P)
    updated = _flat(new, n).chunk(n)[rank]
    expect.equal(
        value["kept"], updated + 1, of=f"shard_S on rank {rank}, updated while gathered, after free()", rule="free() leaves shard_S alone", so="an update of shard_S is lost", tol=0,
        mistakes={"free() changes shard_S back to what was gathered: the shard is always there, and the buffer is only a copy": updated},
    )  # fmt: skip


def _updated(weights: list[Tensor], n: int) -> list[Tensor]:
    """The weights when rank r has multiplied its shard by r + 2."""
    flat = torch.cat([shard * (r + 2) for r, shard in enumerate(_flat(weights, n).chunk(n))])
    new, start = [], 0
    for weight in weights:
        new.append(flat[start : start + weight.numel()].view_as(weight))
        start += weight.numel()
    return new


def _work(params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Something that autograd saves the weights for: a view of the first, and the last itself. (input, output)"""
    if len(params) == 1:
        x = torch.full((2,), 3.0, requires_grad=True)
        return x, x * params[0]
    x = torch.ones(2, params[0].shape[1], requires_grad=True)
    return x, F.linear(x, params[0], params[1]) * params[2]


def _worked(weights: list[Tensor]) -> list[Tensor]:
    """The gradients of the weights, and of the input."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    x, out = _work(params)
    out.sum().backward()
    return [*(param.grad for param in params), x.grad]


def _gathered_program(rank, answer, shapes):
    params = _params(shapes)
    numels = [param.numel() for param in params]
    with _nan_filled(), mz.record_traffic() as traffic, mz.record_memory() as memory:
        before = _total(memory) - _FLOAT * sum(numels)  # what is noted here counts, too
        full = _FLOAT * _up(sum(numels), dist.get_world_size())
        freed = full // dist.get_world_size() + _SLACK

        def state(since: int, expected: float = math.inf) -> dict:
            nonlocal before
            held = _total(memory, before + expected) - before
            there = all(map(_there, params, numels))
            values = [param.detach().clone() for param in params] if there else []
            before += _FLOAT * sum(map(torch.numel, values))
            storages = {param.untyped_storage()._cdata: param.untyped_storage().nbytes() for param in params}
            return {"there": there, "behind": min(storages.values()), "storages": len(storages), "held": held, "values": values, "sent": _sent(traffic, since)}

        def do(what: Callable, expected: float = math.inf) -> dict:
            since = len(traffic.ops)
            with mz.record_memory() as meanwhile:
                what()
            peak = meanwhile.peak_total - before
            return state(since, expected) | {"peak": peak}

        unit = answer(list(params))
        shard = unit.shard_S
        storages = {param.untyped_storage()._cdata for param in params}
        sliced = isinstance(shard, Tensor) and shard.untyped_storage()._cdata in storages
        found = {"sliced": sliced, "made": state(0, freed), "shard": _of_shard(shard)}
        if sliced or not isinstance(shard, Tensor):
            return found
        before += shard.nbytes
        del shard  # it may be replaced
        found["gathered"] = do(unit.gather, full + freed)
        if not found["gathered"]["there"] or any(not complete for *_, complete in found["gathered"]["sent"]):
            return found  # what comes next could end the process
        found["freed"] = do(unit.free, freed)
        if isinstance(_of_shard(unit.shard_S), str):
            return found | {"sliced": True}
        unit.gather()
        if not state(0)["there"]:
            return found | {"gathered": state(0)}
        x, out = _work(params)
        seen = weakref.ref(params[0].untyped_storage())
        found["in forward"] = state(0)
        found["between"] = do(unit.free, found["in forward"]["held"] - full)
        saved = {"between": seen() is not None and seen().nbytes() > 0}
        found["back"] = do(unit.gather)
        saved["back"] = seen() is None or seen().nbytes() > 0
        found["saved"] = saved
        if saved["back"] and found["back"]["there"]:
            out.sum().backward()
            found["grads"] = [*(param.grad for param in params), x.grad]
            unit.free()
            with torch.no_grad():  # shard_S may require a gradient
                unit.shard_S.mul_(rank + 2)
                found["anew"] = do(unit.gather)
                unit.shard_S.add_(1)
            unit.free()
            found["kept"] = _of_shard(unit.shard_S)
    if "kept" in found:
        unit.gather()  # the meter has kept autograd from seeing what is sent
    return found


# --- 3. hooks ---------------------------------------------------------------------------------------------------

_Events = list[str]


class _Block(nn.Module):
    """Writes down when its forward runs. Takes its input by position or keyword, and wraps its output as it is told."""

    def __init__(self, name: str, events: _Events, wrap: Callable = lambda x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.name, self.events, self.wrap = name, events, wrap
        self.error: Exception | None = None

    def forward(self, x):
        self.events.append(f"forward {self.name}")
        if self.error is not None:
            raise self.error
        return self.wrap(x * self.weight)


class _Root(nn.Module):
    def __init__(self, events: _Events, order: Sequence[int]):
        super().__init__()
        self.blocks = nn.ModuleList(_Block(str(i), events) for i in range(max(order) + 1))
        self.order, self.events = order, events
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.events.append("forward root")
        for i in self.order:
            x = self.blocks[i](x)
        self.events.append("still in root")
        return x * self.weight


def _unit(name: str, *inside: str) -> list[str]:
    return [f"gather {name}", f"forward {name}", *inside, f"free {name}"]


def _root(*blocks: int) -> list[str]:
    return _unit("root", *(event for i in blocks for event in _unit(str(i))), "still in root")


_FAILED = [*_unit("root", *_unit("0"), *_unit("1"))]  # block 1 raises


@exercise(
    "zero3.hooks",
    call="place_hooks(module, gather, free)",
    hints=[
        "Which two moments does torch let you hook for each call of a module? And which of the two does not come, if forward raises?",
        "module.register_forward_pre_hook(fn) calls fn(module, args) before; module.register_forward_hook(fn, always_call=True) calls fn(module, args, output) after, also if forward raised. A hook that "
        "returns None changes nothing.",
        "Register a pre-hook that takes (module, args) and calls gather(), and a forward hook, with always_call=True, that takes (module, args, output) and calls free(). No hook returns anything.",
    ],
)
def hooks(answer, expect):
    """gather before and free after each forward, nested, in training and evaluation, after an exception, for twice used blocks; nothing in backward; inputs and outputs untouched"""
    causes = _as_called(answer) | {
        "missing 1 required positional argument: 'x'": "what a pre-hook returns takes the place of the inputs: return nothing",
        "positional argument": "torch hands a hook the module, its inputs and, after forward, its output; gather and free take none: call them in a function that takes these",
        "'NoneType' object is not callable": "gather() calls it at once, and registers what it returns: hand over a function",
        "unexpected keyword": "with_kwargs=True gives a hook one argument more, and a function in forward's place has to hand on whatever it gets",
        "'NoneType' and 'Parameter'": "what a pre-hook returns takes the place of the inputs: return nothing",
        "doesn't require gradient": "an evaluation's output needs no gradient: nothing here may depend on one",
    }
    wants = {
        "one unit": _unit("0"),
        "a root with two blocks": _root(0, 1),
        "a root with two blocks, forward and backward": _root(0, 1),
        "a root with two blocks, in evaluation, under no_grad": _root(0, 1),
        "block 1 of two raises": _FAILED,
        "one call more, after an exception": _root(0, 1),
        "block 0 is used twice": _root(0, 1, 0),
        "block 1 is called by itself": _unit("1"),
        "an input by keyword": _unit("0"),
        "an output in a dict": _unit("0"),
        "an output of None": _unit("0"),
    }
    found = expect.run(_hooks_program, 1, answer, wants, causes=causes)[0].value
    for case in found:
        want, got, now = wants[case], found[case]["events"], found[case]["at the start"]
        expect.case(case)
        expect.that(
            not now, "place_hooks runs nothing itself: gather and free belong to the calls of the module", "nothing before the first call", ", ".join(now),
            cause="a hook is handed over, not called: gather, or a function that calls it, and not gather()",
        )  # fmt: skip
        expect.that(
            got == want, "a unit's weights are there for its forward, and no longer", ", ".join(want), ", ".join(got) or "nothing", *_hooked_otherwise(case, got, want)
        )  # fmt: skip
        what = found[case]["what"]
        expect.that(what["right"], what["rule"], what["expected"], what["got"], cause=what["cause"])


def _hooked_otherwise(case: str, got: _Events, want: _Events) -> tuple[str, str]:
    """What follows from other events, and the mistake."""
    missing, extra = Counter(want) - Counter(got), Counter(got) - Counter(want)
    kinds_missing, kinds_extra = ({event.split()[0] for event in events} for events in (missing, extra))
    so = ""
    if kinds_missing == {"free"}:
        which = " and ".join(event.removeprefix("free ") for event in missing)
        so = f"the weights of {which} stay in full"
        if "raises" in case:
            return so, "a forward hook is skipped when forward raises, unless it is registered with always_call=True (as is what stands after a call, unless in a finally)"
        if "no_grad" in case:
            return so, "free() must depend neither on gradients nor on the mode: an evaluation gathers as well"
        if "None" in case or "dict" in case:
            return so, "free() must not depend on what the output is"
        return so, "nothing frees after forward: a forward hook is the place, and a backward hook is not (an evaluation has no backward)"
    if not missing and "backward" in case:
        return "each gather is paid for, and nobody needs these weights", "a backward hook calls it: both belong to forward alone; when backward needs the weights is exercise 4"
    if kinds_missing == {"gather", "free"} and not extra and "no_grad" in case:
        return "forward would compute with weights that are gone", "in an evaluation the weights are gone as well: gather and free whatever the mode, and whether or not gradients are wanted"
    if kinds_missing == {"gather", "free"} and not extra:
        return "forward would compute with weights that are gone", "nothing runs before and after this forward: both hooks belong on the module itself, and stay for every call"
    if kinds_missing == {"gather"} and not extra:
        if "no_grad" in case:
            return "forward would compute with weights that are gone", "gather() must depend neither on gradients nor on the mode: an evaluation needs the weights as well"
        return "forward would compute with weights that are gone", "something gathers only once: weights are freed after each forward, so each call needs them again"
    if not missing and not extra:
        before = [event for event in got if event.startswith(("gather", "forward", "free"))]
        if any(before.index(f"forward {name}") < before.index(f"gather {name}") for name in ("root", "0", "1") if f"gather {name}" in before):
            return "forward would compute with weights that are gone", "a forward hook runs after forward: gather() belongs in a forward pre-hook"
        return "", "free() comes too early: it belongs in a forward hook, after forward"
    if not missing and kinds_extra == {"free"}:
        return "", "free() is called more often than forward runs: one forward hook is enough"
    if not missing and kinds_extra <= {"gather", "free"}:
        return "", "one pre-hook and one forward hook on the module itself are enough: those inside it have their own"
    if "raises" in case and extra == Counter(["still in root"]):
        return "", "the exception is caught, and not raised again: who called the model has to see it"
    if kinds_missing >= {"forward"} or kinds_missing >= {"still"}:
        return "", "the module's own forward has to run, once for each call"
    return so, ""


def _hooks_program(rank, answer, wants):
    """Until the first case that goes wrong: the next ones may not even run."""
    events: _Events = []

    def place(module: nn.Module, name: str) -> None:
        answer(module, lambda: events.append(f"gather {name}"), lambda: events.append(f"free {name}"))

    def block(wrap: Callable = lambda x: x) -> _Block:
        module = _Block("0", events, wrap)
        place(module, "0")
        return module

    def model(*order: int) -> _Root:
        module = _Root(events, order)
        place(module, "root")
        for each in module.blocks:
            place(each, each.name)
        return module

    def evaluated(module: nn.Module) -> object:
        with torch.no_grad():
            return module.eval()(x)

    def trained(module: nn.Module) -> Tensor:
        out = module(x)
        out.sum().backward()
        return out

    def failed(module: nn.Module) -> BaseException | None:
        module.blocks[1].error = error
        try:
            module(x)
        except BaseException as raised:
            return raised
        return None

    def failed_before(module: nn.Module) -> object:
        failed(module)
        module.blocks[1].error = None
        events.clear()
        return module(x)

    x, error, given = torch.ones(2, requires_grad=True), ValueError("a bad batch"), {"out": torch.zeros(1)}
    plain = partial(_is_output, want=torch.ones(2))
    cases = {
        "one unit": (block, lambda module: module(x), plain),
        "a root with two blocks": (partial(model, 0, 1), lambda module: module(x), plain),
        "a root with two blocks, forward and backward": (partial(model, 0, 1), trained, plain),
        "a root with two blocks, in evaluation, under no_grad": (partial(model, 0, 1), evaluated, plain),
        "block 1 of two raises": (partial(model, 0, 1), failed, partial(_is_error, want=error)),
        "one call more, after an exception": (partial(model, 0, 1), failed_before, plain),
        "block 0 is used twice": (partial(model, 0, 1, 0), lambda module: module(x), plain),
        "block 1 is called by itself": (partial(model, 0, 1), lambda module: module.blocks[1](x), plain),
        "an input by keyword": (block, lambda module: module(x=x), plain),
        "an output in a dict": (lambda: block(lambda x: given), lambda module: module(x), partial(_is_the, want=given)),
        "an output of None": (lambda: block(lambda x: None), lambda module: module(x), partial(_is_the, want=None)),
    }
    found = {}
    try:
        for name, (make, call, judge) in cases.items():
            events.clear()
            module = make()
            at_start = list(events)
            events.clear()
            verdict = judge(call(module))
            found[name] = {"at the start": at_start, "events": list(events), "what": verdict}
            if at_start or events != wants[name] or not verdict["right"]:
                break
    finally:
        everywhere._global_forward_pre_hooks.clear()  # an answer may have hooked all modules there are
        everywhere._global_forward_hooks.clear()
        everywhere._global_backward_pre_hooks.clear()
        everywhere._global_backward_hooks.clear()
    return found


def _is_output(got: object, want: Tensor) -> dict:
    return _is_the(got, want, isinstance(got, Tensor) and torch.equal(got.detach(), want))


def _is_the(got: object, want: object, right: bool | None = None) -> dict:
    cause = "a hook that returns something replaces the output, or the inputs: return nothing"
    if got is None:
        cause = "what stands in forward's place does not return what forward returns"
    right = got is want if right is None else right
    return {"right": right, "rule": "the output is the module's own", "expected": show(want), "got": show(got), "cause": cause}


def _is_error(got: object, want: Exception) -> dict:
    cause = "the exception is caught, and not raised again" if got is None else "a hook raises, and its error takes the place of the forward's"
    told = f"{type(got).__name__}: {got}" if got is not None else "no exception"
    return {"right": got is want, "rule": "the exception reaches the caller", "expected": repr(want), "got": told, "cause": cause}


# --- models that look before they compute -------------------------------------------------------------------------


class WeightsGone(RuntimeError):
    """A unit works, and its weights have no memory."""


class _Log:
    """What happens on this rank, in order: "gather 1", "forward 1", "backward 1", "reduce 1"; and whose weights are there then."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.there: list[tuple[str, list[str]]] = []  # at each forward and backward
        self._open: list[calls.Call] = []
        self._units: dict[str, list[tuple[nn.Parameter, int]]] = {}
        self._named: dict[int, str] = {}  # by P

    def add(self, name: str, params: Sequence[nn.Parameter]) -> None:
        self._units[name] = [(param, param.numel()) for param in params]
        P = _up(sum(map(torch.numel, params)), dist.get_world_size())
        assert P not in self._named, "a collective is told from another by its size"
        self._named[P] = name

    def resident(self) -> list[str]:
        return [name for name, unit in self._units.items() if all(_there(param, numel) for param, numel in unit)]

    def phase(self, run: Callable) -> tuple[dict, object]:
        """What happens while it runs, whose weights are there at its end, and its result."""
        self.events.clear()
        self.there.clear()
        result = run()
        return {"events": list(self.events), "there": list(self.there), "after": self.resident()}, result

    def note(self, what: str, name: str) -> None:
        """The unit begins to work."""
        self.events.append(f"{what} {name}")
        self.there.append((self.events[-1], self.resident()))
        if not all(_there(param, numel) for param, numel in self._units[name]):
            raise WeightsGone(f"{_full(name)}'s weights have no memory when its {what} begins")
        if any(call.op == "all_gather" for call in self._open):
            raise WeightsGone(f"{_full(name)}'s weights are still under way when its {what} begins")

    def issued(self, call: calls.Call) -> None:  # this, failed and done are what calls.listeners are told
        self._open.append(call)
        op = {"all_gather": "gather", "reduce_scatter": "reduce", "all_to_all": "reduce"}.get(call.op, call.op)
        self.events.append(f"{op} {self._named.get(call.numel, f'of {call.numel} elements')}")

    def failed(self, call: calls.Call) -> None:
        self._open.remove(call)
        self.events.append(f"{call.op} refused")

    def done(self, call: calls.Call) -> None:
        self._open.remove(call)

    def __enter__(self) -> _Log:
        calls.listeners.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        calls.listeners.remove(self)


def _full(name: str) -> str:
    return f"block {name}" if name.isdigit() else name


def _names(units: Sequence[str]) -> str:
    return " and ".join(map(_full, units))


class _Passing(torch.autograd.Function):
    """Hands its input on. In backward it is the first of its unit's operations."""

    @staticmethod
    def forward(ctx, x: Tensor, log: _Log | None, name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.log is not None:
            ctx.log.note("backward", ctx.name)
        return grad, None, None


class _Looking(nn.Module):
    """Of one tensor makes one. Without a log it is a plain module."""

    log: _Log | None = None
    name = ""
    error: Exception | None = None  # what forward raises

    def forward(self, x: Tensor) -> Tensor:
        if self.log is not None:
            self.log.note("forward", self.name)
        if self.error is not None:
            raise self.error
        return _Passing.apply(self.compute(x), self.log, self.name)


class _Residual(_Looking):
    """A block; autograd saves views of `up` and `down`, and `scale` itself."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.rand(inner))

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.scale)


class _Net(_Looking):
    """The root: two layers of its own, around the blocks."""

    def __init__(self, width: int, inner: Sequence[int]):
        super().__init__()
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(_Residual(width, each) for each in inner)

    def compute(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def units(self) -> dict[str, tuple[_Looking, list[nn.Parameter]]]:
        blocks = {str(i): (block, list(block.parameters())) for i, block in enumerate(self.blocks)}
        return {"root": (self, [*self.embed.parameters(), *self.head.parameters()])} | blocks


class _Layer(_Looking):
    def __init__(self, inputs: int, outputs: int, frozen: bool):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.requires_grad_(not frozen)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Chain(nn.Sequential):
    """A trained layer, frozen blocks, a trained layer. The root itself has no weights, and is no unit."""

    def __init__(self, widths: Sequence[int]):
        frozen = [0 < i < len(widths) - 2 for i in range(len(widths) - 1)]
        super().__init__(*map(_Layer, widths, widths[1:], frozen))

    def units(self) -> dict[str, tuple[_Looking, list[nn.Parameter]]]:
        names = ["first", *map(str, range(len(self) - 2)), "last"]
        return {name: (layer, list(layer.parameters())) for name, layer in zip(names, self, strict=True)}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(11)
        return make()


_ROWS, _LR = 2, 0.25  # rows: of each rank


def _rows(n: int, steps: int, inputs: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(n)
    return [(torch.randn(n * _ROWS, inputs, generator=generator), torch.randn(n * _ROWS, 1, generator=generator)) for _ in range(steps)]


def _of_rank(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    return tuple(each[rank * _ROWS : (rank + 1) * _ROWS] for each in batch)


def _one_process(make: Callable, n: int, steps: int) -> list[dict]:
    """What one process on whole batches has in each step: for each unit the gradient of all rows, and each rank's own; flat and
    padded; the losses on each rank's rows; and the output after the step."""
    model = _seeded(make)
    history = []
    for batch in _rows(n, steps):
        own = []
        for rank in range(n):
            loss = F.mse_loss(model(_of_rank(batch, rank)[0]), _of_rank(batch, rank)[1])
            loss.backward()
            own.append((_grads(model, n), loss.item()))
            model.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        grads = _grads(model, n)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= _LR * param.grad
            model.zero_grad()
            out = model(batch[0])
        history.append({"grads": grads, "own": [each for each, _ in own], "losses": [loss for _, loss in own], "out": out})
    return history


def _grads(model: _Net | _Chain, n: int) -> dict[str, Tensor]:
    units = {name: [param for param in params if param.requires_grad] for name, (_, params) in model.units().items()}
    return {name: _flat([param.grad for param in params], n) for name, params in units.items() if params}


def _check_gradients(expect: Expect, outcomes: list[Outcome], step: int, history: list[dict]) -> None:
    n, this = len(outcomes), history[step]
    for outcome in outcomes:
        rank = outcome.rank
        for name, whole in this["grads"].items():
            got, want = outcome.value["steps"][step]["grads"][name], whole.chunk(n)[rank]
            own = [each[name] for each in this["own"]]
            mistakes = {
                "the ranks' gradients are summed, not averaged: divide the shard by the world size": (whole * n).chunk(n)[rank],
                "the gradient is divided twice by the world size": (whole / n).chunk(n)[rank],
                "the sum over the ranks is divided by 2, however many ranks there are: divide by the world size": (whole * n / 2).chunk(n)[rank],
                "that is this rank's own gradient: nothing has come from the others": own[rank].chunk(n)[rank],
                "this rank's own gradient is divided, and nothing has come from the others": (own[rank] / n).chunk(n)[rank],
                **_other_shards(whole, n, rank),
                "that is the whole gradient: a rank keeps its shard": whole,
                "grad_S was not set by this backward": None,
            }
            if step:
                before = history[step - 1]["grads"][name]
                mistakes["that is the gradient of the step before: is something counted, and never set back?"] = before.chunk(n)[rank]
                mistakes["the gradient of the step before is still in it: each backward begins anew, .grad and grad_S"] = (before + whole).chunk(n)[rank]
            if (factor := _factor(got, want)) is not None:
                mistakes[f"every element is {show(factor)} times the right one: the mean is the sum over the ranks, divided by their number"] = got
            elif _same_elements([outcome.value["steps"][step]["grads"][name] for outcome in outcomes], whole):
                mistakes["the elements are right, and stand in another order than the weights: that of params, not that of arrival"] = got
            expect.equal(
                got, want, of=f"grad_S of {_full(name)} on rank {rank}", tol=1e-5, so="this is another training run", mistakes=mistakes,
                rule="after backward grad_S is this rank's shard of the mean gradient",
            )  # fmt: skip


def _factor(got: object, want: Tensor) -> float | None:
    """By which one factor `got` is off."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype or not want.any():
        return None
    factor = (got.flatten() @ want.flatten() / (want.flatten() @ want.flatten())).item()
    return round(factor, 4) if factor and torch.allclose(got, factor * want, rtol=1e-4, atol=1e-6) else None


def _same_elements(shards: Sequence[object], whole: Tensor) -> bool:
    if not all(isinstance(each, Tensor) and each.dim() == 1 for each in shards) or sum(map(len, shards)) != len(whole):
        return False
    return torch.allclose(torch.cat(tuple(shards)).sort().values, whole.sort().values, atol=1e-5)


def _check_events(rank: int, got: list[str], want: list[str], rule: str, causes: Callable[[list[str], list[str]], str]) -> None:
    """The events of a phase are those."""
    if got == want:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    first = max(0, min(at, len(want) - 6) - 2)  # all of it, if it is short
    raise Finding(rule, _excerpt(want, first), f"{_excerpt(got, first)} on rank {rank}", cause=causes(got, want))


def _excerpt(events: list[str], first: int) -> str:
    if len(events) <= 12:
        return ", ".join(events) or "nothing"
    return "… " * (first > 0) + ", ".join(events[first : first + 8]) + " …" * (len(events) > first + 8)


def _check_there(rank: int, this: dict, around: Sequence[str], rule: str, causes: Callable[[str, list[str]], str]) -> None:
    """While a unit works, its weights are there, and those of the units around it."""
    for event, there in this["there"]:
        want = list(dict.fromkeys((*around, event.split()[1])))
        if there != want:
            told = f"those of {_names(there)}" if there else "none"
            raise Finding(
                rule, f"at {event} the weights of {_names(want)} are there", f"{told} on rank {rank}",
                cause=causes(event, [name for name in there if name not in want]),
            )  # fmt: skip


# --- 4. the whole unit --------------------------------------------------------------------------------------------

_BEFORE_FORWARD = "gather() has to come before each forward, in evaluation as well: a forward pre-hook"
_BEFORE_BACKWARD = "the weights are freed after forward, and backward needs them again: gather in a hook on the unit's output, which is called when its gradient is ready"
_SMALL, _LARGE = (3, (2, 4)), (24, (24,) * 12)  # (width, of each block)


@exercise(
    "zero3.backward",
    call="ShardedUnit(module, params)",
    points=4,
    hints=[
        "A module's full backward hook comes too early where the input needs no gradient, as in a first layer. When is a unit's backward about to begin, seen from the tensor that it returned? And when is it over, seen "
        "from its parameters?",
        "In a forward hook: output.register_hook(fn) calls fn(grad) when the output's gradient is ready; only if output.requires_grad. param.register_post_accumulate_grad_hook(fn) calls fn(param) when "
        "param.grad is complete: count them. Then reduce_scatter, divide, .grad = None, free. Set the counter back.",
        "__init__: Unit's own; place_hooks(module, gather, free); one more forward hook that registers a hook on the output which gathers; a hook on each parameter that counts. At the last one: "
        "concatenate the gradients, pad, reduce_scatter into an empty grad_S, divide by N, set each .grad to None, free(), count = 0.",
    ],
)
def backward(answer, expect):
    """two steps on 2 and 3 ranks against one process: gradients, order of events, which weights are there when, an evaluation, a forward that raises; bytes held and their peak"""
    for n in (2, 3):
        _trained(answer, expect, n)
    _metered(answer, expect, 2)


_USED = "a weight is used whose memory is gone: was it freed before its gradients were complete? Does a unit hold parameters of another (take `params`)? Or was it gathered into another storage than the one that autograd saw in forward?"
_UNIT_CAUSES = _CAUSES | {
    "died": _USED,
    "storage of size 0": _USED,
    "under way": "async_op=True returns a work: wait() for it before anything uses the weights",
    "forward begins": _BEFORE_FORWARD,
    "root's weights have no memory when its backward": f"{_BEFORE_BACKWARD}. The root is a unit like the others, and its turn comes first",
    "backward begins": _BEFORE_BACKWARD,
    "doesn't require gradient": "in an evaluation the output needs no gradient, and takes no hook: ask output.requires_grad",
    "'NoneType' object has no attribute 'requires_grad'": "a forward hook with always_call=True gets None as output when forward has raised",
    **dict.fromkeys(
        ("but got NoneType", *(f"'NoneType' object has no attribute '{name}'" for name in ("flatten", "reshape", "view", "numel", "data"))),
        "a gradient is still missing: reduce when the last one of the unit has arrived",
    ),
    "has no attribute 'shard_S'": "this rank's weights have to be kept as self.shard_S",
    "has no attribute 'grad_S'": "this rank's shard of the mean gradient has to be kept as self.grad_S",
    "deadlock": "every rank issues the same collectives in the same order",
    "size of tensor": "gradients and shards are as long as the unit, padding included",
    "positional argument": "torch hands a forward hook (module, args, output), a tensor's hook its gradient, and a parameter's hook the parameter",
}


def _trained(answer, expect: Expect, n: int) -> None:
    width, inner = _SMALL
    make = partial(_Net, width, inner)
    steps = 2
    expect.case(f"a root with {len(inner)} blocks", world_size=n)
    outcomes = expect.run(_train_program, n, answer, make, steps, causes=_as_called(answer) | _UNIT_CAUSES)
    history = _one_process(make, n, steps)
    names = list(_seeded(make).units())
    blocks = names[1:]
    forward = ["gather root", "forward root", *(f"{what} {name}" for name in blocks for what in ("gather", "forward"))]
    back = ["gather root", "backward root", *(f"{what} {name}" for name in blocks[::-1] for what in ("gather", "backward", "reduce")), "reduce root"]
    for outcome in outcomes:
        sent = outcome.value["at the start"]
        expect.that(
            not sent, "to make the units, nothing has to be sent", "nothing", f"{', '.join(sent)} on rank {outcome.rank}", cause="the parameters are equal on all ranks already",
        )  # fmt: skip
        for name, (_, params) in _seeded(make).units().items():
            flat_P = _flat(params, n)
            expect.equal(
                outcome.value["shards"][name], flat_P.chunk(n)[outcome.rank], of=f"shard_S of {_full(name)} on rank {outcome.rank}", rule="shard_S has this rank's elements of the unit", tol=0,
                mistakes=_other_shards(flat_P, n, outcome.rank) | {"it is a slice of the buffer, and has lost its memory with it: clone() it": _WITHOUT_MEMORY},
            )  # fmt: skip
    for step in range(steps):
        expect.case(f"a root with {len(inner)} blocks, step {step + 1}", world_size=n)
        for outcome in outcomes:
            rank, this = outcome.rank, outcome.value["steps"][step]
            _check_own(expect, rank, this["sent"])
            _check_events(rank, this["forward"]["events"], forward, "in forward each unit is gathered once, before it works", _forward_otherwise)
            after = this["forward"]["after"]
            expect.that(
                not after, "after forward every unit is freed", "no unit is there", f"{_names(after)} on rank {rank}",
                "between forward and backward the weights take as much memory as under ZeRO-2", _kept(after),
            )  # fmt: skip
            _check_there(rank, this["forward"], ["root"], "in forward only the root and the block that works are there", _still_there)
            _check_events(rank, this["backward"]["events"], back, "in backward each unit is gathered before its turn, and reduced when its last gradient has arrived", _backward_otherwise)
            _check_there(rank, this["backward"], ["root"], "in backward only the root and the block whose turn it is are there", _still_there_in_backward)
            after = this["backward"]["after"]
            expect.that(
                not after, "after backward every unit is freed", "no unit is there", f"{_names(after)} on rank {rank}",
                "until the next forward the weights are there in full", "free() is called before the reduction is over, or not at all: it is the last thing that is done for a unit",
            )  # fmt: skip
        _check_gradients(expect, outcomes, step, history)
        for outcome in outcomes:
            _check_evaluated(expect, outcome, step, history, forward)
            _check_failed(expect, outcome.rank, outcome.value["steps"][step])


def _check_failed(expect: Expect, rank: int, this: dict) -> None:
    """after a forward in which the last block has raised"""
    expect.that(
        this["heard of"], "the exception of a forward reaches the caller", "an exception", f"none on rank {rank}", cause="it is caught, and not raised again"
    )  # fmt: skip
    after = this["failed"]["after"]
    expect.that(
        not after, "after a forward that raises every unit is freed", "no unit is there", f"{_names(after)} on rank {rank}", "who catches the exception goes on with weights that stay in full",
        "a forward hook is skipped when forward raises, unless it is registered with always_call=True (as in exercise 3)",
    )  # fmt: skip


def _check_evaluated(expect: Expect, outcome: Outcome, step: int, history: list[dict], forward: list[str]) -> None:
    rank, this = outcome.rank, outcome.value["steps"][step]
    expect.that("evaluation" in this, "shard_S has this rank's weights", "a tensor as long as grad_S", f"another one on rank {rank}")
    expect.that(
        not this["moved"], "a backward leaves the weights as they are", "shard_S as before", f"another shard_S of {_names(this['moved'])} on rank {rank}",
        cause="the update is the caller's: it takes grad_S, and writes to shard_S",
    )  # fmt: skip
    expect.that(
        not this["left"], "after backward every .grad is None", "None", f"{this['left']} still there on rank {rank}",
        "they are whole, and the next backward adds to them", "their place is grad_S: set .grad to None when it was reduced",
    )  # fmt: skip
    mistakes = {"the weights are still those of before the step: gather() does not send shard_S as it is now": history[step - 1]["out"]} if step else {}
    expect.equal(
        this["out"], history[step]["out"], of=f"the output of an evaluation on rank {rank}", rule="the model computes with the weights that the shards have now",
        tol=1e-4, mistakes=mistakes,
    )  # fmt: skip
    _check_events(rank, this["evaluation"]["events"], forward, "an evaluation gathers each unit once", _forward_otherwise)
    after = this["evaluation"]["after"]
    expect.that(
        not after, "after an evaluation every unit is freed", "no unit is there", f"{_names(after)} on rank {rank}",
        cause="free() must depend neither on gradients nor on the mode: an evaluation gathers as well",
    )  # fmt: skip


def _sent_otherwise(got: list[str]) -> str:
    """What collectives that nobody has asked for give away."""
    ops = {event.split()[0] for event in got}
    if "all_reduce" in ops:
        return "an all_reduce brings every rank the mean of all shards, where it keeps one: twice the bytes of a reduce_scatter"
    if "broadcast" in ops:
        return "a broadcast from each owner in turn sends P from one rank at a time: one all_gather does it at once"
    if "barrier" in ops:
        return "a barrier is a collective too, and not needed: these wait for the others anyway"
    if any("of " in event for event in got):
        return "a unit's weights, and its gradients, travel at once: P elements, padding included"
    return ""


def _forward_otherwise(got: list[str], want: list[str]) -> str:
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    if cause := _sent_otherwise(got):
        return cause
    if extra and all(event.startswith("gather") for event in extra):
        return "some units are gathered more than once: one pre-hook on the unit's own module is enough"
    if missing and not extra and all(event.startswith("gather") for event in missing):
        return "weights that are still there are not gathered again: they should have been freed"
    if not extra and not missing:
        return "units are gathered before their turn: a pre-hook on each unit's own module gathers just that one"
    return ""


def _backward_otherwise(got: list[str], want: list[str]) -> str:
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    kinds_extra, kinds_missing = ({event.split()[0] for event in each} for each in (extra, missing))
    if cause := _sent_otherwise(got):
        return cause
    if "reduce" in kinds_extra:
        return "a unit is reduced more than once: wait for the last of its gradients, then reduce them all at once"
    if kinds_missing == {"gather"}:
        return "the weights are kept from forward to backward: the traffic is 2P in place of 3P, and all units are there at once. Free after forward, gather again"
    if kinds_missing == {"reduce"}:
        return "some gradients are not reduced: is a message sent for them at all; is the unit's last one noticed, in each backward, and is the counter set back?"
    if "gather" in kinds_extra:
        if any(got[i : i + 2] == [f"reduce {name}", f"gather {name}"] for name in {event.split()[1] for event in want} for i in range(len(got))):
            return "something is gathered right after its reduce, the gradients or the weights again: a rank keeps its shards, and needs no more"
        return "a unit is gathered more than once in backward: one hook, on its output, is enough"
    if not extra and not missing:
        reduced, gathered = ([event.split()[1] for event in got if event.startswith(what)] for what in ("reduce", "gather"))
        if reduced[0] == "root":
            return "the root is reduced first: a full backward hook runs too early where the input needs no gradient. Count the gradients"
        if gathered == sorted(gathered, key=lambda name: name != "root"):
            return "units are gathered before their turn, or reduced after it: the hooks are the output's own, and its parameters'"
    return ""


def _kept(after: list[str]) -> str:
    if after == ["root"]:
        return "the root is kept from forward to backward: it is a unit like the others"
    return "the weights are kept from forward to backward: free() belongs after each forward"


def _still_there(event: str, others: list[str]) -> str:
    if not others:
        return "the root's forward encloses those of its blocks: it is freed after its own, not after theirs"
    return "units that have worked are freed after their own forward; those to come are gathered before theirs"


def _still_there_in_backward(event: str, others: list[str]) -> str:
    if not others:
        return "the root's backward encloses those of its blocks: it is freed when its own last gradient has arrived"
    return "a unit is freed as soon as its gradients are reduced: then its weights are not needed any more"


def _train_program(rank, answer, make, steps):
    n = dist.get_world_size()
    model, log = _seeded(make), _Log()
    units = model.units()
    for name, (_, params) in units.items():
        log.add(name, params)
    with _nan_filled(), mz.record_traffic() as traffic, log:
        made = {name: answer(module, list(params)) for name, (module, params) in units.items()}
        found = {"at the start": list(log.events), "steps": [], "shards": {name: _of_shard(unit.shard_S) for name, unit in made.items()}}
        if any(isinstance(shard, str) for shard in found["shards"].values()):
            return found  # what comes next could end the process
        for name, (module, _) in units.items():
            module.log, module.name = log, name
        for batch in _rows(n, steps):
            this: dict = {}
            since = len(traffic.ops)
            x, y = _of_rank(batch, rank)
            before = {name: _as_is(unit.shard_S) for name, unit in made.items()}
            this["forward"], loss = log.phase(lambda x=x, y=y: F.mse_loss(model(x), y))
            this["backward"], _ = log.phase(loss.backward)
            this["moved"] = [name for name, unit in made.items() if differ(_as_is(unit.shard_S), before[name], "", 0)]
            found["steps"].append(this)
            this |= {
                "sent": _sent(traffic, since),
                "left": sum(param.grad is not None for _, params in units.values() for param in params),
                "grads": {name: _as_is(unit.grad_S) for name, unit in made.items()},
            }
            shards = {name: getattr(unit, "shard_S", None) for name, unit in made.items()}
            if any(not isinstance(each, Tensor) or each.shape != getattr(made[name].grad_S, "shape", None) for name, each in shards.items()):
                break  # the check finds out
            with torch.no_grad():
                for name, shard in shards.items():
                    shard -= _LR * made[name].grad_S
                this["evaluation"], this["out"] = log.phase(lambda x=batch[0]: model.eval()(x))
            this["failed"], this["heard of"] = log.phase(lambda x=x: _failing(model.train(), x))
    return found


def _failing(model: _Net, x: Tensor) -> bool:
    """A forward in which the last block raises. Does the caller hear of it?"""
    model.blocks[-1].error = bad_batch = ValueError("a bad batch")
    try:
        model(x)
    except ValueError as error:
        if error is not bad_batch:
            raise
        return True
    finally:
        model.blocks[-1].error = None
    return False


def _as_is(value: object) -> object:
    """To be compared later."""
    return value.detach().clone() if isinstance(value, Tensor) else value if value is None else show(value)


_WITHOUT_MEMORY = "without memory"


def _of_shard(shard: object) -> object:
    """The same of a shard. Told in words where it has lost its memory: to read it would end the process."""
    gone = isinstance(shard, Tensor) and shard.numel() > 0 and not shard.untyped_storage().nbytes()
    return _WITHOUT_MEMORY if gone else _as_is(shard)


def _metered(answer, expect: Expect, n: int) -> None:
    """Bytes, on a model with so many blocks that two of them are few."""
    width, inner = _LARGE
    make = partial(_Net, width, inner)
    units = _seeded(make).units()
    padded = {name: _up(sum(map(torch.numel, params)), n) for name, (_, params) in units.items()}
    P, root, total = padded["0"], padded["root"], sum(padded.values())
    expect.case(f"a root of {root:,} elements with {len(inner)} blocks of {P:,}", world_size=n)
    outcomes = expect.run(_meter_program, n, answer, make, _FLOAT * total // n, causes=_as_called(answer) | _UNIT_CAUSES)
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        first, plain = value["steps"][0], value["plain"]
        slack = _FLOAT * P // 2
        full = f"all weights are {_FLOAT * total:,} bytes"
        for this in value["steps"]:
            held, want = this["after forward"] - this["before"], plain
            expect.that(
                held <= want + slack, "between forward and backward no rank holds full weights", f"about {want:,} bytes more than before forward: activations",
                f"{held:,} on rank {rank}", full, _ACTIVATIONS if held - want < _FLOAT * P else _MEMORY_FORWARD,
            )  # fmt: skip
        held, want = first["after backward"] - first["before"], _FLOAT * total // n
        expect.that(
            held <= want + slack, "after backward a rank has its shards of the gradients, and nothing else has come", f"about {want:,} bytes more than before the step", f"{held:,} on rank {rank}",
            full, _ACTIVATIONS if held - want < _FLOAT * P else "full gradients or weights are still held: by a .grad, a view (a grad_S that is a slice is one), or a name",
        )  # fmt: skip
        for this in value["steps"]:
            peak, want = this["peak"] - this["before"], plain + _FLOAT * (total // n + 4 * (P + root)) + slack
            expect.that(
                peak <= want, "in between a rank holds at most weights and gradients of the root and two blocks, besides activations and shards", f"a peak of at most {want:,} bytes above before",
                f"{peak:,} on rank {rank}", full, "gradients of units that are through, or copies of weights, stay until the end of backward: reduce and let go as each unit is through",
            )  # fmt: skip


_MEMORY_FORWARD = (
    "the parameters have let go, but something still holds the weights: autograd, if the storage is not resized; or copies of them"
)


_ACTIVATIONS = "it is less than one block's weights: outputs or inputs of units are still held, by an attribute or by a hook's function"


def _meter_program(rank, answer, make, shards):
    plain, model = _plain_bytes(make, rank), _seeded(make)
    units = [answer(module, list(params)) for module, params in model.units().values()]
    found = []
    with _nan_filled():
        for batch in _rows(dist.get_world_size(), 2):
            x, y = _of_rank(batch, rank)
            with mz.record_memory() as memory:
                this = {"before": _total(memory)}
                loss = F.mse_loss(model(x), y)
                this["after forward"] = _total(memory, this["before"] + plain)
                loss.backward()
                del loss
                this["after backward"] = _total(memory, this["before"] + shards)
            found.append(this | {"peak": memory.peak_total})
    assert units  # they have lived until here
    return {"steps": found, "plain": plain}


def _plain_bytes(make: Callable, rank: int) -> int:
    """Bytes that a forward of the model leaves alive where nothing is sharded: activations."""
    model = _seeded(make)
    x, y = _of_rank(_rows(dist.get_world_size(), 1)[0], rank)
    with mz.record_memory() as memory:
        before = _total(memory)
        loss = F.mse_loss(model(x), y)
        held = _total(memory) - before
    del loss
    return held


# --- 5. a weight that two units use -------------------------------------------------------------------------------


class _Pair(nn.Module):
    """Two layers; `tied`: with one weight."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.b.weight = self.a.weight


class _Language(nn.Module):
    """embed, layers.0 …, head, and a scale of its own."""

    def __init__(self, layers: int, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(_Pair() for _ in range(layers))
        self.head = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embed.weight


def _plain() -> nn.Module:
    return _Language(2)


def _tied() -> nn.Module:
    return _Language(2, tied=True)


def _frozen() -> nn.Module:
    return _tied().requires_grad_(False)


def _inside() -> nn.Module:
    model = _Language(2)
    model.layers[1] = _Pair(tied=True)
    return model


def _across() -> nn.Module:
    model = _Language(3)
    model.layers[2].b.weight = model.layers[0].a.weight
    return model


def _eleven() -> nn.Module:
    model = _Language(11)
    model.layers[10].a.weight = model.layers[1].a.weight
    return model


def _nested() -> nn.Module:
    """Two stages of two layers each; in one of them the layers share a weight."""
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(_Pair() for _ in range(2)) for _ in range(2))
    model.stages[1][1].a.weight = model.stages[1][0].a.weight
    return model


def _twice() -> nn.Module:
    """One and the same module stands in two layers."""
    model = _Language(2)
    model.layers[1].b = model.layers[0].a
    return model


_TWICE = "the module layers.1.b is the module layers.0.a"
# (what it is, how it is made, its units)
_MODELS: list[tuple[str, Callable[[], nn.Module], list[str]]] = [
    ("no weight is shared", _plain, ["", "layers.0", "layers.1"]),
    ("head.weight is embed.weight", _tied, ["", "embed", "layers.0", "layers.1", "head"]),
    ("head.weight is embed.weight, and the units come in another order", _tied, ["head", "layers.1", "layers.0", "embed", ""]),
    ("all is frozen, head.weight is embed.weight", _frozen, ["", "embed", "layers.0", "layers.1", "head"]),
    ("layers.1.b.weight is layers.1.a.weight", _inside, ["", "layers.0", "layers.1"]),
    ("layers.2.b.weight is layers.0.a.weight", _across, ["", "layers.0", "layers.1", "layers.2"]),
    ("stages.1.1.a.weight is stages.1.0.a.weight", _nested, ["", "stages.0", "stages.0.0", "stages.0.1", "stages.1", "stages.1.0", "stages.1.1"]),
    (_TWICE, _twice, ["", "layers.0", "layers.1"]),
    ("layers.10.a.weight is layers.1.a.weight", _eleven, ["", *(f"layers.{i}" for i in range(11))]),
]


def _contains(unit: str, path: str) -> bool:
    return not unit or path.startswith(f"{unit}.")


def _lowest(units: Sequence[str], paths: Sequence[str], contains: Callable = _contains) -> str:
    return max((unit for unit in units if all(contains(unit, path) for path in paths)), key=len)


# What a mistake makes of a parameter, in every case: (units, its paths) -> unit
_OWNERS: dict[str, Callable[[list[str], list[str]], str]] = {
    "only a parameter's first path is seen: named_parameters() leaves the others out, unless it is told remove_duplicate=False": lambda units, paths: _lowest(units, paths[:1]),
    "of a parameter's paths the last one wins: the unit has to contain all of them": lambda units, paths: _lowest(units, paths[-1:]),
    "that is the highest unit that contains all uses: the root always does": lambda units, paths: "",
    "a name begins with another one's digits: layers.1 does not contain layers.10": lambda units, paths: _lowest(units, paths, lambda unit, path: path.startswith(unit)),
    "whatever is shared goes to the root: a lower unit may contain all its uses": lambda units, paths: _lowest(units, paths) if len(paths) == 1 else "",
    "what two units share goes to the root: a lower unit that encloses both contains all uses as well": lambda units, paths: (
        _lowest(units, paths) if len({_lowest(units, [path]) for path in paths}) == 1 else ""
    ),
    "the first unit of the list that contains all uses is taken: there may be a lower one": lambda units, paths: next(
        unit for unit in units if all(_contains(unit, path) for path in paths)
    ),
    "the last unit of the list that contains all uses is taken: a list may come in any order": lambda units, paths: next(
        unit for unit in reversed(units) if all(_contains(unit, path) for path in paths)
    ),
    "the first unit of the list that has the parameter is taken: ask for the lowest one that contains all its uses": lambda units, paths: next(
        unit for unit in units if any(_contains(unit, path) for path in paths)
    ),
    "the last unit of the list that has the parameter is taken: ask for the lowest one that contains all its uses": lambda units, paths: next(
        unit for unit in reversed(units) if any(_contains(unit, path) for path in paths)
    ),
    "the unit may contain any one of the uses: it has to contain all": lambda units, paths: max(
        (unit for unit in units if any(_contains(unit, path) for path in paths)), key=len
    ),
}  # fmt: skip


@exercise(
    "zero3.tied",
    call="owners(model, units)",
    hints=[
        "Where are all the places at which a parameter is used? And of the units that contain every one of them, how do you know the lowest?",
        "model.named_parameters(remove_duplicate=False) gives every path of every parameter. A unit contains a path that begins with the unit's own and a dot; the root contains all. Units that "
        "contain the same path lie inside each other, so the longest is the lowest.",
        "Collect for each parameter the list of its paths. Among the units that contain all of them (path.startswith(unit + '.'), or unit is ''), take the one with the longest path. Return a "
        "dict from parameter to unit.",
    ],
)
def tied(answer, expect):
    """9 models: plain, tied across and inside units, nested units, frozen, one module at two paths, layers.1 and layers.10; the lowest unit for each"""
    causes = {
        "StopIteration": 'no unit is found: the root "" contains every path',
        "max() arg is an empty": 'no unit is found: the root "" contains every path',
        "max() iterable argument is empty": 'no unit is found: the root "" contains every path',
    }
    answers = expect.call(_owned, answer, [(make, units) for _, make, units in _MODELS], causes=causes)
    paths = [_paths(make()) for _, make, _ in _MODELS]
    cause = _owned_otherwise(answers, paths)
    for (text, _, units), got, of_params in zip(_MODELS, answers, paths, strict=True):
        expect.case(f"{text}; units " + (", ".join(map(_quoted, units)) if len(units) < 8 else f'"", "layers.0", … "{units[-1]}"'))
        told = "nothing is returned: a return is missing" if got is None else ""
        expect.that(isinstance(got, dict), "the answer is a dict", "{parameter: path of its unit}", f"a {type(got).__name__}" if got is not None else "None", cause=told)
        for own in of_params:
            want, unit = _lowest(units, own), got.get(own[0], "nobody")
            name = own[0] + (f" (also {', '.join(own[1:])})" if own[1:] else "")
            so, why = "", cause
            if not isinstance(unit, str):
                why = cause or 'a unit is named by its path, a string; the root\'s is ""'
            elif unit not in units and unit != "nobody":
                why = cause or "that is no unit: they are those in the list"
            if unit == "nobody":
                so = "its weight is never gathered"
            elif want != unit and unit in units and not all(_contains(unit, path) for path in own):
                outside = next(path for path in own if not _contains(unit, path))
                so = f"{outside.rpartition('.')[0] or 'the root'} would compute with a weight that {unit} has freed"
                why = cause or f"{unit} does not contain {outside}: a unit has to contain all uses"
            elif want != unit and unit in units:
                so = f"the weight would be there for as long as {unit or 'the root'} works: longer than it is needed"
                why = cause or f"{want}, which lies inside {unit or 'the root'}, contains all uses as well"
            expect.that(
                want == unit, "a parameter belongs to the lowest unit that contains all its uses", f"{name} belongs to {_quoted(want)}", _quoted(unit), so, why,
            )  # fmt: skip
        expect.that(not got.get("?"), "the keys are the model's parameters", "Parameter objects", show(got.get("?")), cause="a key is the parameter itself, not its path")


def _quoted(unit: object) -> str:
    return unit if unit == "nobody" else f'"{unit}"' if isinstance(unit, str) else show(unit)


def _owned_otherwise(answers: list, paths: list[list[list[str]]]) -> str:
    if not all(isinstance(each, dict) for each in answers):
        return ""
    if all(own[0] not in each for each, of_params in zip(answers, paths, strict=True) for own in of_params) and any(each.get("?") for each in answers):
        return "a key is the parameter itself, not its path"
    for text, wrong in _OWNERS.items():
        if all(
            each.get(own[0]) == wrong(units, own)
            for each, (_, _, units), of_params in zip(answers, _MODELS, paths, strict=True)
            for own in of_params
        ):
            return text
    right = [all(each.get(own[0]) == _lowest(units, own) for own in of_params) for each, (_, _, units), of_params in zip(answers, _MODELS, paths, strict=True)]
    if [text for (text, _, _), good in zip(_MODELS, right, strict=True) if not good] == [_TWICE]:
        return "a module that stands at two paths is used at both: ask for paths (remove_duplicate=False), not for modules"
    if any(own[0] not in each for each, of_params in zip(answers, paths, strict=True) for own in of_params):
        return "some parameters are left out: all of the model's are asked for, frozen ones and the root's own too"
    return ""


def _paths(model: nn.Module) -> list[list[str]]:
    """For each parameter all its paths."""
    uses: dict[nn.Parameter, list[str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(param, []).append(path)
    return list(uses.values())


def _owned(answer, cases):
    """What it says of each model, by each parameter's first path; "?": a key that is no parameter."""
    found = []
    for make, units in cases:
        model = make()
        names = {param: name for name, param in model.named_parameters()}
        got = answer(model, list(units))
        if isinstance(got, Mapping):
            params = {names[key]: unit for key, unit in got.items() if isinstance(key, nn.Parameter) and key in names}
            odd = [key for key in got if not (isinstance(key, nn.Parameter) and key in names)]
            got = params | ({"?": show(odd[0])} if odd else {})
        found.append(got)
    return found


# --- 6. say the number ----------------------------------------------------------------------------------------------


@number(
    "zero3.number",
    hints=[
        "Which of the 16 bytes does a rank hold for parameters that it does not own? Which weights are there besides, and when? How often does a micro-batch need them?",
        "All 16 bytes are divided by N: 16Ψ/N. A unit that works is there in full besides, weights and gradients, 2 + 2 bytes. Each micro-batch gathers the weights twice and reduces the gradients "
        "once: 3 collectives of Ψ(N−1)/N elements.",
        "Held: 16Ψ/N, and at the peak 4 bytes for each parameter of the block that works. Sent: 3 × micro-batches × Ψ(N−1)/N × 2 bytes. Over ZeRO-2: 3G/(G + 1). Ranks: the next whole number from 16Ψ over the memory of one.",
    ],
)
def zero3_number(rng):
    """what ZeRO-3 holds, at rest and at its peak, sends with micro-batches, and how many ranks it needs"""
    kind = rng.choice(["peak", "sent", "ratio", "held", "ranks"])
    psi, n = rng.choice([7, 13, 30, 70]), rng.choice([8, 32, 64])
    return {"held": _held_question, "peak": _peak_question, "sent": _sent_question, "ratio": _ratio_question, "ranks": _ranks_question}[kind](psi, n, rng)


def _held_question(psi: int, n: int, rng) -> Question:
    return Question(
        text=f"{psi} B parameters, {n} ranks, ZeRO-3, mixed-precision Adam: how many GB of model states on one rank, while no unit is gathered?",
        answer=16 * psi / n,
        unit="GB",
        working=[
            f"weights           2 bytes × {psi} B / {n} = {2 * psi / n:g} GB",
            f"gradients         2 bytes × {psi} B / {n} = {2 * psi / n:g} GB",
            f"master, moments   (4 + 4 + 4) bytes × {psi} B / {n} = {12 * psi / n:g} GB",
        ],
        mistakes={
            "that is DDP, or all ranks together: ZeRO-3 divides all 16 bytes by N": 16 * psi,
            "that is ZeRO-1: weights and gradients are divided by N, too": 4 * psi + 12 * psi / n,
            "that is ZeRO-2: the weights are divided by N, too": 2 * psi + 14 * psi / n,
            "the fp32 master is missing: Adam's part is 12 bytes, not 8": 12 * psi / n,
            "that is the weights' part: gradients and the optimizer's are model states too": 2 * psi / n,
            "that is weights and gradients: the optimizer's 12 bytes are model states too": 4 * psi / n,
            "Adam's two moments are missing, 4 bytes each": 8 * psi / n,
            "weights or gradients are missing, 2 bytes each": 14 * psi / n,
            "gradients are in 16 bits: 2 bytes, not 4": 18 * psi / n,
            "weights and gradients are in 16 bits: 2 bytes each, not 4": 20 * psi / n,
            "weights and gradients are divided by N, but the optimizer's 12 bytes are not: all 16 are": 12 * psi + 4 * psi / n,
            "the whole weights are counted as well: while no unit is gathered, a rank has its shard of them": 2 * psi + 16 * psi / n,
            "(N−1)/N is what a rank does not hold: its own part is 1/N": 16 * psi * (n - 1) / n,
        },
    )


def _peak_question(psi: int, n: int, rng) -> Question:
    layers = rng.choice([20, 40, 80])
    states, block = 16 * psi / n, 4 * psi / layers
    return Question(
        text=f"{psi} B parameters, all in {layers} blocks of one size, each of them a unit; {n} ranks, ZeRO-3, mixed-precision Adam: how many GB does a rank hold when the backward of a block "
        "is about to end? Count model states and the block's full weights and gradients, all in 16 bits, and nothing else.",
        answer=states + block,
        unit="GB",
        working=[
            f"model states       16 bytes × {psi} B / {n} = {states:g} GB",
            f"the block          {psi} B / {layers} = {psi / layers:g} B parameters",
            f"gathered weights   2 bytes × {psi / layers:g} B = {block / 2:g} GB",
            f"full gradients     2 bytes × {psi / layers:g} B = {block / 2:g} GB",
        ],
        mistakes={
            "the block's full gradients, or its full weights, are missing": states + block / 2,
            "the block that works is missing: that is what a rank holds at rest": states,
            "what is there in full is one block, not the model": states + 4 * psi,
            "of the block only weights and gradients are there in full: its master and moments stay shards": states + 16 * psi / layers,
            "the model states are divided by N": 16 * psi + block,
            "that is the block alone: the model states are there as well": block,
            "one block is there in full, and in 16 bits: a weight has 2 bytes, and a gradient too": states + 2 * block,
            "of the model states the fp32 master is missing: Adam's part is 12 bytes, not 8": 12 * psi / n + block,
            "of the model states Adam's two moments are missing, 4 bytes each": 8 * psi / n + block,
            "that is ZeRO-2's model states: the weights are divided by N, too": 2 * psi + 14 * psi / n + block,
        },
        tol=0.005,
    )


def _sent_question(psi: int, n: int, rng) -> Question:
    g, n = rng.choice([5, 7, 8]), max(n, 16)  # on 8 ranks two mistakes lead to one number
    one = 2 * psi * (n - 1) / n
    return Question(
        text=f"{psi} B parameters, ZeRO-3 on {n} ranks, weights and gradients in 16 bits, {g} micro-batches a step: how many GB does one rank send in a step?",
        answer=3 * g * one,
        unit="GB",
        working=[
            f"all-gathers in a step       {2 * g}   (for each forward, and for each backward)",
            f"reduce-scatters in a step   {g}   (each backward: there is no no_sync())",
            f"each                        (N−1)/N × Ψ × 2 bytes = {n - 1}/{n} × {psi} B × 2 bytes = {one:g} GB",
            f"together                    {3 * g} × {one:g} GB = {3 * g * one:g} GB",
        ],
        mistakes={
            "that is ZeRO-2, which gathers once a step: here the weights are gone after each forward and backward": (g + 1) * one,
            "the weights are freed after forward, and gathered again for backward: two all-gathers a micro-batch": 2 * g * one,
            "that is the gradients: the weights are gathered as well, twice": g * one,
            "gradients go by reduce-scatter, which is half an all-reduce": 4 * g * one,
            "that is one micro-batch: each of them gathers twice and reduces": 3 * one,
            "each micro-batch reduces its gradients: there is no no_sync()": (2 * g + 1) * one,
            "each micro-batch gathers its weights, twice": (g + 2) * one,
            "(N−1)/N is missing: what a rank owns it does not send to itself": 3 * g * 2 * psi,
            "that is what all ranks send together": 3 * g * one * n,
            "16 bits are 2 bytes, not 4": 6 * g * one,
            "that is elements: each has 2 bytes": 3 * g * one / 2,
            "sharding does not divide the traffic by N: a rank receives all that it does not own": 3 * g * 2 * psi / n,
        },
        tol=0.01,
    )


def _ratio_question(psi: int, n: int, rng) -> Question:
    g = rng.choice([4, 5, 8, 16])
    answer = 3 * g / (g + 1)
    return Question(
        text=f"{g} micro-batches a step: how many times as much as ZeRO-2 does ZeRO-3 send, on any number of ranks?",
        answer=answer,
        unit="times as much",
        working=[
            f"ZeRO-2   {g} reduce-scatters and 1 all-gather a step: {g + 1}Ψ (N−1)/N",
            f"ZeRO-3   {g} reduce-scatters and {2 * g} all-gathers a step: {3 * g}Ψ (N−1)/N",
            f"ratio    {3 * g} / {g + 1} = {answer:g}",
        ],
        mistakes={
            "that is for one micro-batch a step: ZeRO-2 gathers once a step, however many there are": 1.5,
            "that is the limit for many micro-batches: ZeRO-2 gathers once a step": 3,
            "the all-gathers for backward are missing": 2 * g / (g + 1),
            "ZeRO-3 gathers for each micro-batch, not once a step": (g + 2) / (g + 1),
            "that is the other way round: ZeRO-3 sends more": 1 / answer,
            "no_sync() does not exist under ZeRO-2: each micro-batch is reduced": 3 * g / 2,
            "that is for two micro-batches a step: ZeRO-2 gathers once a step, however many there are": 2,
            "that compares the all-gathers alone: both reduce each micro-batch as well": 2 * g,
        },
    )


def _ranks_question(psi: int, n: int, rng) -> Question:
    psi, memory = rng.choice([(30, 40), (70, 40), (70, 80), (130, 80), (175, 80), (180, 40)])
    answer = -(-16 * psi // memory)
    return Question(
        text=f"{psi} B parameters, ZeRO-3, mixed-precision Adam, GPUs with {memory} GB each: how many of them does it take at least, if nothing but the model states had to fit?",
        answer=answer,
        unit="GPUs",
        working=[
            f"model states   16 bytes × {psi} B = {16 * psi:,} GB, over all ranks together",
            f"ranks          {16 * psi:,} / {memory} = {16 * psi / memory:g}, and so {answer} whole ones",
            f"each holds     {16 * psi:,} / {answer} = {16 * psi / answer:.4g} GB",
        ],
        mistakes={
            "the fp32 master is missing: Adam's part is 12 bytes, not 8": -(-12 * psi // memory),
            "that is the weights' part: gradients and the optimizer's states have to fit, too": -(-2 * psi // memory),
            "that is weights and gradients: the optimizer's 12 bytes have to fit, too": -(-4 * psi // memory),
            "that is the optimizer's part and the weights: the gradients have to fit, too": -(-14 * psi // memory),
            "Adam's two moments are missing, 4 bytes each": -(-8 * psi // memory),
            "rounded down, the last of them does not fit": 16 * psi // memory if 16 * psi % memory else answer * 100,
        },
        tol=0.004,
    )


# --- 7. find the bug --------------------------------------------------------------------------------------------------

_WIDTHS = (2, 4, 3, 5, 6, 1)  # of a small chain
_WIDE = (2, 32, 33, 32, 33, 32, 33, 32, 33, 1)


@bug(
    "zero3.find_the_bug",
    call="shard(module)",
    points=2,
    hints=[
        "Follow a frozen block through one step. Who calls gather, and when? And who calls free, after each of these?",
        "free() after backward comes from the hook of the last gradient. A frozen block has none, though backward goes through it. Which gradient does backward make there all the same, and which tensor's hook hears of it?",
        "After backward the frozen blocks are there in full. In await_backward, for a module without trained parameters: args[0].register_hook(free). It is called when the gradient of the input is ready, "
        "and then the weights are not needed any more.",
    ],
    options={
        "a": "between forward and backward a rank holds the full weights of all units",
        "b": "a rank gathers each frozen block once a step, not twice",
        "c": "after backward a rank holds the full weights of all frozen blocks",
        "d": "in the second step the frozen blocks compute with old weights",
        "e": "a rank reduces gradients of frozen blocks, which nobody needs",
    },
    observed="c",
    why={
        "a": "a forward hook frees every unit after its forward, and resizing the storage works whoever looks into it",
        "b": "backward goes through the frozen blocks to the first unit: their outputs require a gradient, so they are gathered again",
        "d": "gather() asks the other ranks each time, whatever is there; and frozen weights do not change",
        "e": "on_gradient is registered for trained parameters only",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; gradients and losses on 2 and 3 ranks; what is sent; each unit there when it works, and none after backward; peak memory"""
    for n in (2, 3):
        _mended(mended, expect, n)
    _mended_metered(mended, expect, 2)


def _mended(answer, expect: Expect, n: int) -> None:
    make, steps = partial(_Chain, _WIDTHS), 2
    names = list(_seeded(make).units())
    middle = names[1:-1]
    history = _one_process(make, n, steps)
    expect.case(f"{len(middle)} frozen blocks between two trained units", world_size=n)
    causes = _CAUSES | {
        "has no attribute 'grad_S'": "what shard returns has weights_S and grad_S, as before",
        "has no attribute 'weights_S'": "what shard returns has weights_S and grad_S, as before",
        "forward begins": "gather() comes before each forward, and the parameters have to be views of what it fills: free() takes the storage's memory, and leaves .data alone",
        "backward begins": "backward goes through the frozen blocks as well, and needs their weights: they have to be gathered again, and freed when it is through, not before",
        "doesn't require gradient": "where a tensor needs no gradient it takes no hook: ask requires_grad",
        "hook returned": "a tensor's hook gets the gradient, and what it returns takes the gradient's place: return None",
        "deadlock": "every rank issues the same collectives in the same order",
    }
    outcomes = expect.run(_mended_program, n, answer, make, steps, causes=causes)
    forward = [f"{what} {name}" for name in names for what in ("gather", "forward")]
    back = [f"{what} {name}" for name in reversed(names) for what in ("gather", "backward", "reduce") if what != "reduce" or name not in middle]
    for step in range(steps):
        expect.case(f"{len(middle)} frozen blocks between two trained units, step {step + 1}", world_size=n)
        for outcome in outcomes:
            rank, this = outcome.rank, outcome.value["steps"][step]
            _check_own(expect, rank, this["sent"])
            _check_events(rank, this["forward"]["events"], forward, "forward gathers each unit once, as before", _forward_otherwise)
            after = this["forward"]["after"]
            expect.that(
                not after, "after forward every unit is freed", "none is there", f"{_names(after)} on rank {rank}",
                cause="frozen blocks are freed after forward as well, as before: until their backward it may be long",
            )  # fmt: skip
            _check_there(rank, this["forward"], [], "in forward only the unit that works is there", _still_there)
            _check_events(rank, this["backward"]["events"], back, "backward gathers each unit once, and reduces the trained ones, as before", _mended_otherwise)
            after = this["backward"]["after"]
            expect.that(
                not after, "after backward every unit is freed", "none is there", f"{_names(after)} on rank {rank}",  # no cause: it is asked for
            )  # fmt: skip
            _check_there(rank, this["backward"], [], "in backward only the unit whose turn it is is there", _mended_there)
            expect.equal(
                this["loss"], history[step]["losses"][rank], of=f"the loss of rank {rank}", tol=1e-5, rule="the model trains as before: its losses are those of one process",
            )  # fmt: skip
        _check_gradients(expect, outcomes, step, history)
        for outcome in outcomes:
            after = outcome.value["steps"][step]["evaluation"]["after"]
            expect.that(not after, "after an evaluation every unit is freed", "none is there", f"{_names(after)} on rank {outcome.rank}")


def _mended_otherwise(got: list[str], want: list[str]) -> str:
    extra, missing = Counter(got) - Counter(want), Counter(want) - Counter(got)
    if any(event.startswith("gather") for event in missing):
        return "backward needs the weights of frozen blocks for the gradients of their inputs: they are gathered again, as before"
    if any(event.startswith("reduce") for event in extra):
        return "a frozen block has no gradient to reduce: its weights only have to be freed"
    return _backward_otherwise(got, want)


def _mended_there(event: str, others: list[str]) -> str:
    if others and all(name.isdigit() for name in others):
        return "frozen blocks that backward has passed are still there: each is freed as soon as the gradient of its input is ready, not later"
    return "a unit is freed as soon as backward has passed it"


def _mended_program(rank, answer, make, steps):
    model, log = _seeded(make), _Log()
    units = model.units()
    for name, (_, params) in units.items():
        log.add(name, params)
    with _nan_filled(), mz.record_traffic() as traffic, log:
        made = {name: answer(module) for name, (module, _) in units.items()}
        for name, (module, _) in units.items():
            module.log, module.name = log, name
        found = []
        for batch in _rows(dist.get_world_size(), steps):
            this: dict = {}
            since = len(traffic.ops)
            x, y = _of_rank(batch, rank)
            this["forward"], loss = log.phase(lambda x=x, y=y: F.mse_loss(model(x), y))
            this["backward"], _ = log.phase(loss.backward)
            this |= {"sent": _sent(traffic, since), "loss": loss.item(), "grads": {name: _as_is(each.grad_S) for name, each in made.items()}}
            found.append(this)
            with torch.no_grad():
                for each in made.values():
                    if isinstance(each.grad_S, Tensor) and each.grad_S.shape == each.weights_S.shape:
                        each.weights_S -= _LR * each.grad_S
                this["evaluation"], _ = log.phase(lambda x=batch[0]: model.eval()(x))
            model.train()
    return {"steps": found}


def _mended_metered(answer, expect: Expect, n: int) -> None:
    make = partial(_Chain, _WIDE)
    units = _seeded(make).units()
    numels = [sum(map(torch.numel, params)) for _, params in units.values()]
    expect.case(f"{len(numels) - 2} frozen blocks of about {max(numels):,} elements", world_size=n)
    outcomes = expect.run(_mended_meter_program, n, answer, make, _FLOAT * sum(numels[:: len(numels) - 1]))
    for outcome in outcomes:
        this, rank = outcome.value, outcome.rank
        held, limit = this["after backward"] - this["before"], _FLOAT * sum(numels[::len(numels) - 1]) + _FLOAT * max(numels) // 2
        full = f"the frozen blocks' weights are {_FLOAT * sum(numels[1:-1]):,} bytes"
        expect.that(
            held <= limit, "after backward a rank has its shards of the gradients, and nothing else has come", f"at most {limit:,} bytes more than before the step", f"{held:,} on rank {rank}",
            full, "something else still holds the weights: to free them, resize the storage",
        )  # fmt: skip
        peak, limit = this["peak"] - this["before"], this["plain"] + _FLOAT * 3 * max(numels)
        expect.that(
            peak <= limit, "in between a rank holds two units in full at most, besides activations", f"a peak of at most {limit:,} bytes above before", f"{peak:,} on rank {rank}",
            full, "frozen blocks stay until the end of backward: each is freed as soon as backward has passed it",
        )  # fmt: skip


def _mended_meter_program(rank, answer, make, shards):
    plain, model = _plain_bytes(make, rank), _seeded(make)
    made = [answer(layer) for layer, _ in model.units().values()]
    x, y = _of_rank(_rows(dist.get_world_size(), 1)[0], rank)
    with _nan_filled(), mz.record_memory() as memory:
        this = {"before": _total(memory), "plain": plain}
        loss = F.mse_loss(model(x), y)
        loss.backward()
        del loss
        this["after backward"] = _total(memory, this["before"] + shards)
    assert made  # they have lived until here
    return this | {"peak": memory.peak_total}
