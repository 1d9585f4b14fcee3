"""The checks of exercises/03_zero2.ipynb.

Gradients that a check makes up are 10^rank times (1, 2, 3, …), so that the digits of a mean say whose values are in it. Where
the moment counts, they come out of a backward that makes them in an order of the check's choosing (`_loss`); before each of them
it notes what has been sent and how many bytes are there (`_Moments`).
"""

from __future__ import annotations

import math
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, permutations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import _disable_current_modes

import minizero as mz
from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome, differ, ranks, shorten, show
from minizero.parts import calls, kinds

_SLACK = 64  # bytes: a loss, a count
_MARKS = "host"  # the meter's kind that these checks mark moments with: nothing else here lies on a host


# --- what an answer sends, and what becomes of the tensors meanwhile ------------------------------------------


class _Watch:
    """The collectives that an answer issues. Until one has been waited for, its tensors belong to it: `spoilt` says what else
    was done to them, and to those of which call.

    A meter does not see what happens inside of a collective: gloo reduces a copy of its own, and lets go of it some time later.
    A storage that grows is filled with NaN, as torch.empty is on these ranks: what nobody has written is seen, always.
    """

    def __init__(self) -> None:
        self.calls: list[calls.Call] = []
        self.spoilt: list[tuple[calls.Call, str]] = []
        self.before_wait: Callable[[], None] = lambda: None
        self._given: dict[int, list[tuple]] = {}
        self._gone: dict[int, float] = {}  # id of a call -> when what it was given no longer had memory
        self._before: list[str] = []  # of each call: what was left of the one before when it was issued
        self._patience = _Patience()
        self.unseen = ExitStack()

    def __enter__(self) -> _Watch:
        self._describe, calls.describe = calls.describe, self.describe
        self._wait = calls.WatchedWork.wait
        calls.WatchedWork.wait = lambda work, *args, **kwargs: self.wait(work, *args, **kwargs)
        self._resize, UntypedStorage.resize_ = UntypedStorage.resize_, lambda storage, nbytes: self.resize(storage, nbytes)
        calls.listeners.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        calls.listeners.remove(self)
        calls.describe, calls.WatchedWork.wait, UntypedStorage.resize_ = self._describe, self._wait, self._resize

    def describe(self, op: str, tensors: Any, group: Any = None, **more: Any) -> calls.Call:
        call = self._describe(op, tensors, group, **more)
        chunks = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        gone = partial(self._gone.setdefault, id(call))
        self._given[id(call)] = [
            (weakref.ref(each), each._version, weakref.ref(each.untyped_storage(), lambda _: gone(time.perf_counter())), each.untyped_storage().nbytes())
            for each in chunks
        ]
        return call

    def wait(self, work: calls.WatchedWork, *args: Any, **kwargs: Any) -> Any:
        self.before_wait()
        with _disable_current_modes():
            return self._wait(work, *args, **kwargs)

    def resize(self, storage: UntypedStorage, nbytes: int) -> Any:
        before, result = storage.nbytes(), self._resize(storage, nbytes)
        for call, given in self._given.items():
            if nbytes == 0 and any(each() is storage for _, _, each, _ in given):
                self._gone.setdefault(call, time.perf_counter())
        if nbytes > before:
            with _disable_current_modes():
                torch.empty(0, dtype=torch.uint8).set_(storage)[before:] = 255
        return result

    # What calls.listeners are told.

    def issued(self, call: calls.Call) -> None:
        self._before.append(self._left_before(call))
        self.calls.append(call)
        if call.sync:
            self.unseen.enter_context(_disable_current_modes())

    def done(self, call: calls.Call) -> None:
        self.unseen.close()
        self._look_at(call, changed=False)

    def failed(self, call: calls.Call) -> None:
        self.unseen.close()
        del self._before[self.calls.index(call)]
        self.calls.remove(call)

    @property
    def open(self) -> list[calls.Call]:
        return [call for call in self.calls if call.end is None]

    def landed_at(self, when: float) -> bool:
        """Whether something was over at this time, and its bucket there all the same."""
        return any(
            call.end is not None and call.end < when < self._gone.get(id(call), math.inf) for call in self.calls if call.op == "reduce_scatter"
        )

    def look(self) -> None:
        for call in self.open:
            self._look_at(call, changed=True)

    def _look_at(self, call: calls.Call, changed: bool) -> None:
        for tensor, version, storage, nbytes in self._given.get(id(call), ()):
            if storage() is not None and storage().nbytes() < nbytes:
                self.spoilt.append((call, "freed"))
            elif changed and tensor() is not None and tensor()._version != version:
                self.spoilt.append((call, "changed"))

    def _left_before(self, call: calls.Call) -> str:
        """What is left of the reduce_scatter before this one: "under way", "in memory", or nothing."""
        if self.open:
            return "under way"
        if not self.calls or not self.calls[-1].op == call.op == "reduce_scatter":
            return ""
        mine = {id(storage()) for _, _, storage, _ in self._given.get(id(call), ())}
        last = [storage for _, _, storage, _ in self._given.get(id(self.calls[-1]), ())]

        def gone() -> bool:
            return not any(there is not None and there.nbytes() and id(there) not in mine for there in (storage() for storage in last))

        self._patience.wait_until(gone)
        return "" if gone() else "in memory"

    def report(self, first: int = 0, last: int | None = None) -> dict:
        """Of these calls."""
        told = self.calls[first:last]
        sent = [(call.op, call.numel, call.dtype, bool(call.unit), call.end is not None) for call in told]
        spoilt = sorted({what for call, what in self.spoilt if call in told})
        return {"sent": sent, "spoilt": spoilt, "before": self._before[first:last], "synchronous": any(call.sync for call in told)}


class _Patience:
    """gloo's thread lets go of what it has sent and received some moment after the wait. So one waits, but not for ever."""

    def __init__(self, seconds: float = 0.5) -> None:
        self.left = seconds

    def wait_until(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition() and time.monotonic() < begin + self.left:
            time.sleep(0.002)
        self.left -= time.monotonic() - begin


def _check_calls(
    expect: Expect, rank: int, this: dict, want: Sequence[tuple[str, int]], dtype: str, rule: str, causes: Mapping[str, str]
) -> None:
    """The collectives (op, elements) that `want` names, in this order, of this dtype; all waited for.

    causes: an op that is not wanted or issued too often, "no …" for one that is missing, "numel", "numel + 2" where it's always
    2 too many, "dtype", "order" -> the mistake
    """
    sent = this["sent"]
    engine = any(by_engine for *_, by_engine, _ in sent)
    expect.that(not engine, "you build it from torch.distributed", got="minizero's own step at work", cause="it may be read, but not used")
    # An all-to-all of the chunks and a sum is a reduce-scatter made by hand: it sends as much.
    got = [("reduce_scatter" if op == "all_to_all" else op, numel) for op, numel, *_ in sent]
    dtypes = {each for _, _, each, *_ in sent}
    if got != list(want) or (got and dtype and dtypes != {dtype}):
        cause = _sent_otherwise(got, list(want), causes)
        raise Finding(rule, _told(want, dtype), f"{_told(got, *dtypes)} on rank {rank}", cause=cause)
    still_open = sum(not complete for *_, complete in sent)
    expect.that(
        not still_open, "every collective is waited for", "all waited for", f"{still_open} of {len(sent)} still open on rank {rank}",
        "what is read meanwhile may be half old, half new", "async_op=True returns a work, and its wait() is missing",
    )  # fmt: skip


def _sent_otherwise(got: list[tuple], want: list[tuple], causes: Mapping[str, str]) -> str:
    extra = Counter(op for op, _ in got) - Counter(op for op, _ in want)
    missing = Counter(op for op, _ in want) - Counter(op for op, _ in got)
    if got == want:
        return causes.get("dtype", "")
    for op, text in causes.items():
        if op in extra:
            return text
    if "barrier" in extra:
        return "a barrier is a collective too, and not needed: these wait for the others anyway"
    if "send" in extra:
        return "single sends may add up to it, but here the collectives are to be called"
    if missing and not extra:
        return causes.get(f"no {next(iter(missing))}", "")
    if extra:
        return ""
    if sorted(got) == sorted(want):
        return causes.get("order", "")
    over = {numel - P for (_, numel), (_, P) in zip(got, want, strict=True) if numel != P}
    return causes.get(f"numel + {min(over)}" if len(over) == 1 else "", causes.get("numel", ""))


def _sizes(text: str, n: int) -> dict[str, str]:
    """Causes of another number of elements. text: what is to be said of any other."""
    return {"numel": text, f"numel + {n}": "P is the smallest multiple of N that holds all elements: what is a multiple already gets no padding"}


def _told(ops: Sequence[tuple[str, int]], *dtypes: str) -> str:
    if not ops:
        return "nothing"
    rows: list[list] = []  # op, elements, how many in a row
    for op, numel in ops:
        if rows and rows[-1][:2] == [op, numel]:
            rows[-1][2] += 1
        else:
            rows.append([op, numel, 1])
    told = [f"{count} × {op} of {show(numel)}" if count > 1 else f"{op} of {show(numel)}" for op, numel, count in rows]
    return shorten(", ".join(told)) + (f" in {' and '.join(sorted(dtypes))}" if any(dtypes) else "")


# --- gradients at moments of the check's choosing ----------------------------------------------------------------


class _Arrive(torch.autograd.Function):
    """Hands its input on. In backward it lets the gradient of one parameter arrive."""

    @staticmethod
    def forward(ctx, x: Tensor, param: nn.Parameter, grad: Tensor, moment: Callable[[], None]) -> Tensor:
        ctx.grad, ctx.moment = grad, moment
        return x.view_as(x)

    @staticmethod
    def backward(ctx, x_grad: Tensor):
        ctx.moment()
        return x_grad, ctx.grad.clone(), None, None


def _loss(arrivals: Sequence[tuple[nn.Parameter, Tensor]], moment: Callable[[], None]) -> Tensor:
    """Its backward makes these gradients in this order, and calls `moment` before each of them."""
    loss = torch.zeros(())
    for param, grad in reversed(arrivals):
        loss = _Arrive.apply(loss, param, grad, moment)
    return loss


class _Moments:
    """What has been sent, and how many bytes there are, at moments that are noted. Bytes count from the first moment on."""

    def __init__(self, watch: _Watch, memory=None) -> None:
        self.watch, self.memory = watch, memory
        self.noted: list[dict] = []
        self._marks: list[Tensor] = []
        self._before_waits: list[int] = []  # which marks are no moments, but stand before a wait()
        self._old: list[Any] = []  # the meter's storages at the first moment
        self._patience = _Patience()
        if memory:
            watch.before_wait = self._mark_wait

    def note(self, what: str = "", limit: int | None = None, each: int | None = None, **more: object) -> None:
        """limit, each: the bytes that there may be, and those of a single storage. If there are more, wait a little: gloo may
        let go of some."""
        self.watch.look()
        if self.memory:
            if not self.noted:
                self._old = list(self.memory._live.values())
            elif limit is not None:
                self._patience.wait_until(lambda: self._new() <= limit + _SLACK and (each is None or self._largest() <= each + _SLACK))
            more |= {"limit": limit, "largest": self._largest()}
            self._mark()
        self.noted.append({"what": what, "issued": len(self.watch.calls), "open": len(self.watch.open)} | more)

    # What the meter has seen up to now. To ask it would make it look at all objects, and that takes long.

    def _new(self) -> int:
        return sum(life.nbytes for life in list(self.memory._live.values())) - sum(life.nbytes for life in self._old) - len(self._marks)

    def _largest(self) -> int:
        old = set(map(id, self._old))
        return max((life.nbytes for life in list(self.memory._live.values()) if id(life) not in old), default=0)

    def _mark(self) -> None:
        self._marks.append(kinds.tag(torch.empty(1, dtype=torch.uint8), _MARKS))

    def _mark_wait(self) -> None:
        self._before_waits.append(len(self._marks))
        self._mark()

    def report(self) -> list[dict]:
        """What was noted; with a meter also the bytes then ("held"), and the most since the moment before ("peak"); of that,
        what there was before the last wait() in between ("waiting"), and whether a bucket that had landed was there ("landed")."""
        if not self.memory:
            return self.noted
        times, curves = self.memory.curve()
        times, curves = times + self.memory.entry, dict(curves)
        marks = curves.pop(_MARKS)
        total = sum(curves.values())
        at = [int(np.argmax(marks > count)) for count in range(len(self._marks))]
        total = total - total[at[0]]
        waits = [at[count] for count in self._before_waits]
        moments = [place for count, place in enumerate(at) if count not in self._before_waits]
        for before, now, moment in zip([0, *moments], moments, self.noted, strict=False):
            last = max((place for place in waits if before < place < now), default=before)
            most, waiting = (int(total[before : until + 1].max()) for until in (now, last))
            highest = times[before + int(total[before : now + 1].argmax())]
            moment |= {"held": int(total[now]), "peak": most, "waiting": waiting, "landed": self.watch.landed_at(highest)}
        return self.noted


@contextmanager
def _watched(metered: bool) -> Iterator[tuple[_Watch, _Moments]]:
    with _Watch() as watch, mz.record_memory() if metered else nullcontext() as memory, watch.unseen:
        yield watch, _Moments(watch, memory)


def _up(numel: int, n: int) -> int:
    """The smallest multiple of n that holds them."""
    return -(-numel // n) * n


def _numbers(shapes: Sequence[tuple], rank: int, factor: int = 1, start: int = 1) -> list[Tensor]:
    """One gradient for each shape: 10^rank · (1, 2, 3, …), on from one to the next; long ones begin again after 9."""
    numels = [math.prod(shape) for shape in shapes]
    values = torch.arange(start, start + sum(numels))
    if sum(numels) > 100:
        values = values % 9 + 1
    return [each.view(shape) for each, shape in zip((values * factor * 10.0**rank).split(numels), shapes, strict=True)]


def _flat(grads: Sequence[Tensor | None], shapes: Sequence[tuple], n: int) -> Tensor:
    """The bucket of these gradients; None counts as zeros."""
    rows = [torch.zeros(math.prod(shape)) if grad is None else grad.flatten().float() for grad, shape in zip(grads, shapes, strict=True)]
    flat = torch.cat(rows)
    return F.pad(flat, (0, _up(len(flat), n) - len(flat)))


def _other_shards(flats: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What the ranks' shards of the mean of their buckets become by a mistake."""
    n, total = len(flats), sum(flats)
    own = [flat.chunk(n)[rank] for rank, flat in enumerate(flats)]
    return {
        "the sum over the ranks is not divided: divide the shard by the world size, after the wait": [*total.chunk(n)],
        "it is divided twice by the world size": [*(total / n**2).chunk(n)],
        "that is this rank's own gradient: nothing has come from the others": own,
        "this rank's own gradient is divided, and nothing has come from the others": [each / n for each in own],
        "every rank has rank 0's shard: rank r's is the r-th": [(total / n).chunk(n)[0]] * n,
        "that is the whole bucket: a rank keeps its shard": [total / n] * n,
    }


def _cause(got: Sequence[object], mistakes: Mapping[str, Sequence[object]]) -> str:
    """The mistake that explains what all ranks have, right or wrong."""
    return next((text for text, wrong in mistakes.items() if all(differ(a, b, "", 1e-6) is None for a, b in zip(got, wrong, strict=True))), "")


_MEAN = "a rank gets its shard of the mean of all ranks' buckets"
_PIECES = {  # what torch says -> what is wrong with a reduce_scatter
    "dtype() ==": "a reduce_scatter takes and gives one dtype: the shard has that of the gradients, new_empty() takes it over",
    "check failed": "a reduce_scatter takes P elements and gives S = P / N: out first, in second, and the bucket has to be padded",
    "must be the same size": "a reduce_scatter takes P elements and gives S = P / N: out first, in second, and the bucket has to be padded",
    "ReduceOp.AVG": "gloo has no mean: sum, and divide by the world size",
    "SIGSEGV": "a tensor is used whose memory is gone: who has freed it?",
}
_TOO_SOON = {
    "freed": "the buffer is freed before the wait(): until then the collective reads it",
    "changed": "the buffer is written to before the wait(): until then it belongs to the collective",
}


def _check_unspoilt(rank: int, this: dict) -> None:
    for what in this["spoilt"]:
        raise Finding(
            "until wait() the tensors belong to the collective", "the buffer as it was launched", f"it was {what} meanwhile on rank {rank}",
            "gloo has made a copy and forgives it; NCCL reads what is there", _TOO_SOON[what],
        )  # fmt: skip


# --- 1. a bucket becomes a shard ------------------------------------------------------------------------------------


@exercise(
    "zero2.reduce_bucket",
    call="reduce_bucket(grads)",
    hints=[
        "A rank will update S elements. Which collective leaves exactly their sum, and what does it want its input to look like?",
        "torch.cat of the flattened gradients, then F.pad(flat, (0, missing)) up to a multiple of N. reduce_scatter(out_S, in_P) sums; out_S is a tensor of its own, made with the "
        "bucket's dtype.",
        "Flatten each and concatenate; pad with -len(flat) % N zeros; make an empty tensor of len / N elements; reduce_scatter the bucket into it; divide by N; return it.",
    ],
)
def reduce_bucket(answer, expect):
    """each rank's shard of the mean on 2 and 3 ranks, padded, in bf16 too; memory of its own; one reduce_scatter, half of an all_reduce's bytes"""
    _reduced(answer, expect, "two gradients", 2, [(1, 2), (1,)])
    _reduced(answer, expect, "nothing to pad", 2, [(3,), (1,)])
    _reduced(answer, expect, "one gradient, nothing to pad", 2, [(4,)])
    _reduced(answer, expect, "3 gradients, the second not contiguous", 3, [(2,), (2, 2), ()])
    _reduced(answer, expect, "fewer elements than ranks", 3, [(1,)])
    _reduced(answer, expect, "bf16", 2, [(2,), (3,)], torch.bfloat16)


def _reduced(answer, expect: Expect, text: str, n: int, shapes: list[tuple], dtype: torch.dtype = torch.float32) -> None:
    numel = sum(math.prod(shape) for shape in shapes)
    P = _up(numel, n)
    expect.case(text, world_size=n, P=P)
    causes = _PIECES | {
        "same number of dimensions": "gradients have shapes of their own: flatten() each before they are concatenated",
        "zero-dimensional tensor": "a gradient of shape [] is a number: flatten() makes it one element long",
        "view size is not compatible": "a gradient may lie otherwise in memory: flatten() or reshape(-1), not view(-1)",
        "a view of a leaf": "nothing here needs autograd",
        "deadlock": "the reduce_scatter is a call of all ranks",
    }
    outcomes = expect.run(_reduced_program, n, answer, shapes, dtype, causes=causes)
    flats = [_flat(_numbers(shapes, rank), shapes, n) for rank in range(n)]
    mean = sum(flats) / n
    name = str(dtype).removeprefix("torch.")
    front = sum(torch.cat([each.new_zeros(P - numel), each[:numel]]) for each in flats) / n
    backwards = sum(_flat(_numbers(shapes, rank)[::-1], shapes[::-1], n) for rank in range(n)) / n
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        causes = {
            "all_reduce": "an all_reduce brings every rank the mean of all shards, where it keeps one: right numbers, twice the bytes. A reduce_scatter would do",
            "reduce": "a reduce to each owner in turn is a reduce_scatter in N calls: one call does it at once",
            "all_gather": "nobody needs all gradients: a shard is enough",
            "reduce_scatter": "one reduce_scatter for the whole bucket: that is what it is there for",
            "dtype": "what travels has the gradients' dtype: in fp32 a 16-bit gradient takes twice the bytes",
            "no reduce_scatter": "nothing is sent: what comes out is this rank's own gradient",
        } | _sizes("the whole bucket leaves at once, P elements, and P is the smallest multiple of N that holds them", n)
        _check_calls(expect, rank, value, [("reduce_scatter", P)], name, "a bucket is one reduce_scatter of P elements", causes)
    want = [each.to(dtype) for each in mean.chunk(n)]
    whole = {
        "the padding stands in front: it comes at the end": front,
        "the gradients stand in reverse: the first of the list comes first": backwards,
    }
    mistakes = _other_shards(flats) | {text: [*each.chunk(n)] for text, each in whole.items()}
    got = [outcome.value["shard"] for outcome in outcomes]
    cause = _cause(got, {text: [each.to(dtype) for each in shards] for text, shards in mistakes.items()})
    for outcome in outcomes:
        rank, value = outcome.rank, outcome.value
        forms = _in_another_form(want[rank], value["shard"])
        expect.equal(value["shard"], want[rank], of=f"rank {rank}'s shard", rule=_MEAN, mistakes={cause: value["shard"]} if cause else forms)
        expect.that(
            value["same"], "the tensors in grads stay as they are", got=f"other values on rank {rank}",
            cause="something writes into a gradient, or into a view of one: divide what is your own, the bucket or the shard",
        )  # fmt: skip
        S = P // n
        owned = value["storage"] // dtype.itemsize
        expect.that(
            owned == S, "the shard has memory of its own", f"{S} elements", f"the memory behind it has {owned} on rank {rank}",
            "every rank goes on holding all the gradients",
            "it is a slice of the bucket, and the whole bucket stays alive with it: reduce into a tensor of its own, or clone() the slice" if owned == P else "",
        )  # fmt: skip


def _in_another_form(want: Tensor, got: object) -> dict[str, object]:
    """The right values, and what else may be wrong with them."""
    forms: dict[str, object] = {"a shard is flat: one dimension": want.view(1, -1), "the answer is the shard itself, not in a list": [want]}
    if want.dtype != torch.float32:
        forms["the shard has the dtype of the gradients: new_empty() takes it over"] = want.float()
    if isinstance(got, Tensor) and got.dim() == 1 and torch.equal(got, want[: len(got)]):
        forms["the padding is cut off: every rank's shard has S elements"] = got
    return forms


def _reduced_program(rank, answer, shapes, dtype):
    grads = [grad.to(dtype) for grad in _numbers(shapes, rank)]
    grads = [grad.t().contiguous().t() if grad.dim() == 2 else grad for grad in grads]
    before = [grad.clone() for grad in grads]
    with _Watch() as watch:
        shard = answer(grads)
    same = len(grads) == len(before) and all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    storage = shard.untyped_storage().nbytes() if isinstance(shard, Tensor) else 0
    return {"shard": shard, "storage": storage, "same": same} | watch.report()


# --- 2. free in time --------------------------------------------------------------------------------------------------

_ALWAYS = "launch() issues one reduce_scatter of P elements on every rank, whatever has been filled"
_BUCKET_CAUSES = _PIECES | {
    "has no attribute 'grad_S'": "land() leaves the shard in self.grad_S",
    "has no attribute 'fill'": "the class needs a method fill(param)",
    "has no attribute 'launch'": "the class needs a method launch()",
    "has no attribute 'land'": "the class needs a method land()",
    "a view of a leaf": "it is param.grad that is to be moved, not the parameter",
    "number of dimensions in the tensor": "a gradient has the shape of its parameter, its place in the buffer is flat: flatten() it",
    "expanded size": "a gradient has the shape of its parameter, its place in the buffer is flat: flatten() it",
    "deadlock": _ALWAYS,
    "different collectives": _ALWAYS,
    "what one rank issues": _ALWAYS,
}
_NO_GRADIENT = {"NoneType": "a bucket may leave without a single gradient: it is zeros then"}


@exercise(
    "zero2.free_in_time",
    call="Bucket(params), then .fill(param), .launch(), .land()",
    points=2,
    hints=[
        "Memory is free when nothing refers to it any more. After land(), which names could still lead to the buffer, and which of them are not attributes of the bucket?",
        "self.buffer = None drops a name; a slice or a .grad that is a view of the buffer, and the work, are others. buffer.untyped_storage().resize_(0) frees it however many there are. "
        "async_op=True returns the work, and until its wait() the buffer may be neither freed nor written to.",
        "fill: make zeros of P elements if there is no buffer, copy param.grad to its place, param.grad = None. launch: the buffer (zeros, if nothing came), an empty grad_S, "
        "self.work = reduce_scatter(…, async_op=True). land: wait; divide grad_S by N; set the buffer and the work to None.",
    ],
)
def free_in_time(answer, expect):
    """on 2 and 3 ranks the bytes after each call, while the next bucket fills; means; missing gradients; one asynchronous reduce_scatter; two backwards"""
    small, large = [[(3,), (2,)]], [[(40, 20), (3, 7), (203,)], [(1000,), ()]]
    _freed(answer, expect, "one bucket", 2, small, ["01"])
    _freed(answer, expect, "then rank 1 has no gradient for parameter 0", 2, small, ["01", "01"], missing=[(1, 0, 0)])
    _freed(answer, expect, "then rank 1 has no gradient at all", 2, small, ["01", "01"], missing=[(1, 0, 0), (1, 0, 1)])
    _freed(answer, expect, "two buckets", 2, large, ["012 01", "012 01"], metered=True)
    _freed(answer, expect, "two buckets", 3, large, ["201 10", "012 01"], metered=True)


def _freed(
    answer, expect: Expect, text: str, n: int, shapes: list[list[tuple]], orders: list[str], missing: Sequence = (), metered: bool = False
) -> None:
    """orders: for each backward, the order in which the parameters of each bucket arrive. missing: the gradients (rank,
    bucket, parameter) that there are not in the last backward."""
    padded = _padded(shapes, n)
    figures = {"world_size": n, "P": padded if len(padded) > 1 else padded[0]}
    expect.case(text, **figures)
    causes = (_NO_GRADIENT if missing else {}) | _BUCKET_CAUSES
    outcomes = expect.run(_freed_program, n, answer, shapes, orders, missing, metered, causes=causes)
    for check in (_check_launches, _check_landed, _check_freed):
        for i in range(len(orders)):
            expect.case(text + f", backward {i + 1}" * (len(orders) > 1), **figures)
            check(expect, outcomes, i, shapes, missing if i == len(orders) - 1 else ())


def _padded(shapes: list[list[tuple]], n: int) -> list[int]:
    return [_up(sum(map(math.prod, each)), n) for each in shapes]


def _check_launches(expect: Expect, outcomes: list[Outcome], i: int, shapes: list[list[tuple]], _: Sequence) -> None:
    causes = {
        "all_reduce": "an all_reduce brings every rank the mean of all shards, where it keeps one: twice the bytes",
        "all_gather": "nobody needs all gradients: a shard is enough",
        "reduce_scatter": "launch() issues one reduce_scatter for the whole bucket, and nothing else issues any",
        "no reduce_scatter": _ALWAYS,
    } | _sizes("the whole bucket leaves at once, P elements, padding included", len(outcomes))
    want = [("reduce_scatter", P) for P in _padded(shapes, len(outcomes))]
    for rank, this in _rounds(outcomes, i):
        _check_calls(expect, rank, this, want, "float32", "a launch is one reduce_scatter of P elements", causes)
        for moment in this["moments"]:
            if moment["what"] == "launch":
                cause = "a wait() in launch(): it belongs in land()"
                if this["synchronous"]:
                    cause = "reduce_scatter returns when it is complete, unless it is given async_op=True"
                expect.that(
                    moment["open"], "launch() does not wait", "the reduce_scatter is under way when it returns", f"it is complete on rank {rank}",
                    "backward stands still while the bytes travel", cause,
                )  # fmt: skip
            elif moment["what"] == "land":
                expect.that(
                    not moment["open"], "land() waits", "the reduce_scatter is complete when it returns", f"it is still under way on rank {rank}",
                    cause="the work's wait() is missing in land()",
                )  # fmt: skip


def _rounds(outcomes: list[Outcome], i: int) -> list[tuple[int, dict]]:
    """Each rank, and what it says of backward i."""
    return [(outcome.rank, outcome.value[i]) for outcome in outcomes]


def _check_landed(expect: Expect, outcomes: list[Outcome], i: int, shapes: list[list[tuple]], missing: Sequence) -> None:
    _check_shards(expect, outcomes, i, shapes, missing)
    for rank, this in _rounds(outcomes, i):
        _check_unspoilt(rank, this)
        for moment in this["moments"]:
            if moment["what"] != "fill" and moment["grads"]:
                cause = "the gradient is copied, and .grad still has it: set it to None"
                if moment["views"]:
                    cause = "that .grad is a view of the buffer, and keeps all of it alive: set it to None"
                raise Finding(
                    "from launch() on, no .grad points at the bucket", "every .grad of the bucket is None",
                    f"parameter {moment['grads'][0]} has one after {moment['what']}(), on rank {rank}", "its memory stays alive while backward goes on", cause,
                )  # fmt: skip


def _check_shards(
    expect: Expect, outcomes: list[Outcome], i: int, shapes: list[list[tuple]], missing: Sequence, extra: Callable | None = None
) -> None:
    """Of backward i. extra: bucket -> more mistakes, and the means that they lead to, or the ranks' shards."""
    n = len(outcomes)
    for b in range(len(shapes)):
        whose = f" of bucket {b}" * (len(shapes) > 1)
        want = (sum(_flats(shapes, b, i, n, missing)) / n).chunk(n)
        got = [this["shards"][b] for _, this in _rounds(outcomes, i)]
        got = [torch.tensor(each) if isinstance(each, list) else each for each in got]
        wrong = next((rank for rank in range(n) if differ(got[rank], want[rank], "", 1e-6)), None)
        if wrong is not None:
            means = (extra(b) if extra else {}) | _other_means(shapes, b, i, n, missing)
            shards = {text: mean if isinstance(mean, list) else [*mean.chunk(n)] for text, mean in means.items()}
            cause = _cause(got, _other_shards(_flats(shapes, b, i, n, missing)) | shards) or _unwritten(got, want, shapes[b], [m for m in missing if m[1] == b])
            expect.equal(got[wrong], want[wrong], of=f"rank {wrong}'s shard{whose}", rule=_MEAN, mistakes={cause: got[wrong]} if cause else {})


def _unwritten(got: Sequence[object], want: Sequence[Tensor], shapes: list[tuple], missing: Sequence[tuple[int, int, int]]) -> str:
    """The cause, if the shards are wrong only where some rank had nothing to write: in missing gradients, and in the padding."""
    gaps = [None if any(p == each for _, _, each in missing) else torch.ones(shape) for p, shape in enumerate(shapes)]
    written = _flat(gaps, shapes, len(want)).bool()
    if any(not isinstance(each, Tensor) or each.shape != wanted.shape for each, wanted in zip(got, want, strict=True)):
        return ""
    right = torch.isclose(torch.cat([*got]), torch.cat([*want]))
    return "what was not filled, or is padding, counts as zeros: resize_() and torch.empty give memory with anything in it. zero_() it" if right[written].all() else ""


def _other_means(shapes: list[list[tuple]], b: int, i: int, n: int, missing: Sequence) -> dict[str, Tensor]:
    """Mistakes in a bucket, and the means that they lead to."""
    whole = partial(_flats, shapes, b, n=n, missing=missing)
    totals = {"a missing gradient takes no place: it counts as zeros, and what follows it stays where it is": sum(whole(i, packed=True))}
    for order in permutations(range(len(shapes[b]))):
        where = f"the gradients lie in the order {', '.join(map(str, order))}: each has its place, that of the list, whenever it comes"
        totals[where] = sum(whole(i, order=order))
    if i:
        before = _flats(shapes, b, i - 1, n)
        stale = [torch.where(now == 0, old, now) for now, old in zip(whole(i), before, strict=True)]
        totals |= {
            "the backward before is still in it: in the buffer, in .grad or in the shard": sum(whole(i)) + sum(before),
            "that is the shard of the backward before": sum(before),
            "what was not filled has the values of the backward before: it counts as zeros": sum(stale),
        }
    return {text: total / n for text, total in totals.items()}


def _flats(
    shapes: list[list[tuple]], b: int, i: int, n: int, missing: Sequence = (), order: Sequence[int] = (), packed: bool = False
) -> list[Tensor]:
    """Each rank's own bucket b in backward i. order: of its gradients, if not that of the list. packed: missing ones leave no gap."""
    flats = []
    for rank in range(n):
        grads = [None if (rank, b, p) in missing else grad for p, grad in enumerate(_gradients(shapes, rank, i)[b])]
        places = list(order or range(len(grads)))
        places.sort(key=lambda p, grads=grads: packed and grads[p] is None)
        flats.append(_flat([grads[p] for p in places], [shapes[b][p] for p in places], n))
    return flats


def _gradients(shapes: list[list[tuple]], rank: int, i: int) -> list[list[Tensor]]:
    """In backward i, for each bucket its gradients: other numbers in each bucket, and in each backward."""
    grads, start = [], 1
    for each in shapes:
        grads.append(_numbers(each, rank, (1, -3)[i % 2], start))
        start += sum(map(math.prod, each))
    return grads


def _as_list(shard: object) -> object:
    """A tensor that is kept for later would be metered."""
    is_shard = isinstance(shard, Tensor) and shard.dtype == torch.float32 and shard.dim() == 1
    return shard.tolist() if is_shard else show(shard)


def _check_freed(expect: Expect, outcomes: list[Outcome], i: int, shapes: list[list[tuple]], _: Sequence) -> None:
    """The bytes that there are, and those that there may be."""
    n, padded = len(outcomes), _padded(shapes, len(outcomes))
    S = [P // n for P in padded]
    for rank, this in _rounds(outcomes, i):
        if "made" not in this:  # no meter
            continue
        expect.that(
            this["made"] <= _SLACK, "before its first gradient a bucket has no memory", "0 bytes when the Buckets are made", f"{this['made']:,} on rank {rank}",
            "all Buckets are there at once, before anything has come", _why_made(this["made"], padded, n, "the buffer is made in __init__: make it in fill(), when the first gradient comes"),
        )  # fmt: skip
        for moment in this["moments"]:
            what, b, limit = moment["what"], moment["bucket"], moment["limit"]
            more = moment["held"] - limit
            if more > _SLACK:
                rule = {
                    "fill": "while it fills, a bucket is one buffer of P elements",
                    "launch": "a bucket under way is its buffer and its shard",
                    "land": "when a bucket has landed, its shard is all that is left",
                }[what]
                raise Finding(
                    rule, f"at most {limit:,} bytes", f"{moment['held']:,} after {what}() of bucket {b} on rank {rank}",
                    "backward goes on, and in the end all gradients are there at once" if what == "land" and more > 4 * S[b] + _SLACK else "",
                    _why_held(moment, more, padded[b], S[b], this),
                )  # fmt: skip
            if what == "launch":
                expect.that(
                    moment["peak"] <= limit + _SLACK, "launch() sends the buffer that fill() has filled", f"at most {limit:,} bytes while it runs",
                    f"{moment['peak']:,} in launch() of bucket {b} on rank {rank}", "for a moment the bucket is there twice",
                    "the gradients are put together in launch(), or the buffer is made anew: copy each to its place in fill(), and change the buffer in place",
                )  # fmt: skip


def _why_made(made: int, padded: list[int], n: int, buffers: str) -> str:
    """What the bytes may be that are there before any gradient."""
    if abs(made - 4 * sum(padded) // n) <= _SLACK:
        return "the shards are made in __init__, and are memory as well: make one when its bucket is launched"
    return buffers if made > 4 * sum(padded) // n else ""


def _why_held(moment: dict, more: int, P: int, S: int, this: dict) -> str:
    """What the bytes may be that are too many after a call."""
    if any(op == "all_to_all" for op, *_ in this["sent"]):
        return "an all_to_all receives into a second buffer of P elements: a reduce_scatter needs none"
    if moment["what"] == "fill":
        return "the gradients are there twice, in the buffer and in .grad: set it to None" if moment["grads"] else "the gradients are kept beside the buffer, or there is a second one"
    if moment["sliced"]:
        return "grad_S is a slice of the buffer: a view, and all of the buffer stays alive with it. Reduce into a tensor of its own"
    if abs(more - 4 * S) <= _SLACK:
        return "the shard is there twice: before and after the division, say"
    if abs(more - 4 * P) > _SLACK:
        return ""
    if moment["what"] == "launch":
        return "the bucket is there twice: a copy of it travels, and the original is kept"
    return "something still refers to the buffer: an attribute, a view in a list, the work. Drop them all, or shrink it: untyped_storage().resize_(0)"


def _freed_program(rank, answer, shapes, orders, missing, metered):
    params = [[nn.Parameter(torch.zeros(shape)) for shape in each] for each in shapes]
    grads = [_gradients(shapes, rank, i) for i in range(len(orders))]
    P = _padded(shapes, dist.get_world_size())
    S = [each // dist.get_world_size() for each in P]
    rounds, shards = [], []
    with _watched(metered) as (watch, moments):
        moments.note()
        buckets = [answer(each) for each in params]
        moments.note()
        for i, order in enumerate(orders):
            whole, sharded = set(), set(range(len(P))) if i else set()  # the buckets; those of the backward before have shards
            for what, b, p in _script(rank, order, missing if i == len(orders) - 1 else ()):
                if what == "fill":
                    params[b][p].grad = grads[i][b][p].clone()
                    buckets[b].fill(params[b][p])
                else:
                    getattr(buckets[b], what)()
                whole = whole - {b} if what == "land" else whole | {b}
                sharded = sharded if what == "fill" else sharded | {b}
                limit = 4 * (sum(P[each] for each in whole) + sum(S[each] for each in sharded) + S[b] * (what == "launch" and i > 0))
                moments.note(what, limit, round=i, bucket=b, **_left(params[b], getattr(buckets[b], "grad_S", None)))
            shards.append([_as_list(bucket.grad_S) for bucket in buckets])
            rounds.append(len(watch.calls))
    _, made, *noted = moments.report()
    return [
        watch.report(before, after)
        | {"moments": [moment for moment in noted if moment["round"] == i], "shards": shards[i]}
        | ({"made": made["held"]} if metered else {})
        for i, (before, after) in enumerate(zip([0, *rounds], rounds, strict=False))
    ]


def _left(params: list[nn.Parameter], shard: object) -> dict:
    """Which parameters have a .grad, which of these is a view of something larger, and whether the shard is."""
    larger = [isinstance(each, Tensor) and each.untyped_storage().nbytes() > each.nbytes for each in [*(param.grad for param in params), shard]]
    grads = [p for p, param in enumerate(params) if param.grad is not None]
    return {"grads": grads, "views": [p for p in grads if larger[p]], "sliced": larger[-1]}


def _script(rank: int, order: str, missing: Sequence[tuple[int, int, int]]) -> list[tuple[str, int, int]]:
    """The calls in a backward, ("fill", bucket, parameter) and so on. A bucket lands when the next one is about to leave."""
    script: list[tuple[str, int, int]] = []
    for b, each in enumerate(order.split()):
        script += [("fill", b, int(p)) for p in each if (rank, b, int(p)) not in missing]
        script += [("land", b - 1, 0)] * (b > 0) + [("launch", b, 0)]
    return [*script, ("land", len(order.split()) - 1, 0)]


# --- 3. accumulate shards -----------------------------------------------------------------------------------------------

# The means of three micro-batches: of every other element, and of those between. 256 + 1 + 1 is 256 in bf16. What each rank
# has beyond the mean adds up to 0. A rank's own gradient can be divided by the world size in bf16 as well: nothing is rounded.
_MEANS = ((256.0, -4.0), (1.0, 3.0), (1.0, 2.0))
_APART = {
    2: (((-56.0, -56.0), (56.0, 56.0)), ((2.0, 2.0), (-2.0, -2.0)), ((-3.0, -3.0), (3.0, 3.0))),
    3: (((-64.0, -62.0), (32.0, 31.0), (32.0, 31.0)), ((5.0, 9.0), (-7.0, -12.0), (2.0, 3.0)), ((-7.0, -8.0), (2.0, 1.0), (5.0, 7.0))),
}


@exercise(
    "zero2.accumulate_shards",
    call="Accumulating(weights_P, lr), then .backward(grad_P), .step()",
    points=2,
    hints=[
        "The mean over the ranks of a sum over micro-batches: may the two change places? Which of the two orders lets a rank forget P − S elements after each backward?",
        "A reduce_scatter writes over its output, so a sum needs a tensor of its own. bf16 + fp32 gives fp32. weights_P.chunk(N)[rank] is a view: what is subtracted from it in place is "
        "subtracted from weights_P.",
        "backward: reduce_scatter grad_P into an empty bf16 tensor of S elements, divide by N; the sum is that, cast up, or it is added to the sum. step: take lr · sum off this rank's chunk "
        "of weights_P in place, all_gather the chunk into weights_P, set the sum to None.",
    ],
)
def accumulate_shards(answer, expect):
    """two steps of 1, 2 and 3 micro-batches on 2 and 3 ranks against one process; an fp32 sum of S elements, no P kept; (G + 1)·P elements a step"""
    _accumulated(answer, expect, 2, 2, 3, lr=1.0)
    _accumulated(answer, expect, 2, 2, 1, lr=1.0)
    _accumulated(answer, expect, 3, 6, 3, lr=0.5)
    _accumulated(answer, expect, 3, 3000, 2, lr=0.5)


def _accumulated(answer, expect: Expect, n: int, P: int, micro_steps: int, lr: float, steps: int = 2) -> None:
    text = f"{micro_steps} micro-batch{'es' * (micro_steps > 1)} a step, lr={lr:g}"
    expect.case(text, world_size=n, P=P)
    grads = [[_micro_gradients(n, P, g, step) for g in range(micro_steps)] for step in range(steps)]
    start = 1007.0 + torch.arange(P)
    causes = {
        "has no attribute 'backward'": "the class needs a method backward(grad_P)",
        "has no attribute 'step'": "the class needs a method step()",
        "deadlock": "backward() and step() are calls of all ranks",
        "different collectives": "backward() and step() are calls of all ranks",
        "what one rank issues": "backward() and step() are calls of all ranks",
        "dtype": "a collective takes and gives one dtype: a bf16 gradient is reduced into a bf16 shard, and cast up afterwards",
        "NoneType": "a step begins a new sum: its first micro-batch finds none",
    } | _PIECES
    outcomes = expect.run(_accumulated_program, n, answer, start, grads, lr, causes=causes)
    want, mistakes = _summed_up(start, grads, _mean, lr), _summed_wrongly(start, grads, lr)
    for step in range(steps):
        expect.case(f"{text}, step {step + 1}", world_size=n, P=P)
        for outcome in outcomes:
            rank = outcome.rank
            expect.equal(
                outcome.value["steps"][step]["weights"], want[step][rank], of=f"weights_P on rank {rank} after step {step + 1}",
                rule="the weights are those of one process with all micro-batches of all ranks",
                so="all ranks agree, and train another model" if _alike(outcomes, step) else "",
                mistakes={text: wrong[step][rank] for text, wrong in mistakes.items() if differ(wrong[step][rank], want[step][rank], "", 1e-6)},
            )  # fmt: skip
    for step in range(steps):
        expect.case(f"{text}, step {step + 1}", world_size=n, P=P)
        for outcome in outcomes:
            _check_micro_steps(expect, outcome.rank, outcome.value["steps"][step], n, P, micro_steps)
    for outcome in outcomes:
        _check_unspoilt(outcome.rank, outcome.value)


def _micro_gradients(n: int, P: int, g: int, step: int) -> list[Tensor]:
    """Of each rank, in bf16; in the second step half of what it was in the first."""
    means = torch.tensor(_MEANS[g])
    return [((means + torch.tensor(apart)) / (1, 2)[step]).repeat(P)[:P].bfloat16() for apart in _APART[n][g]]


def _alike(outcomes: list[Outcome], step: int) -> bool:
    weights = [outcome.value["steps"][step]["weights"] for outcome in outcomes]
    return all(differ(each, weights[0], "", 0) is None for each in weights)


def _mean(rank: int, g: int, last: int, grads: Sequence[Tensor]) -> Tensor:
    return sum(grads) / len(grads)


def _summed_up(
    start: Tensor, grads: list, use: Callable, lr: float, dtype: torch.dtype = torch.float32, forgets: bool = True, gathers: bool = True,
    travels: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Every rank's weights after each step: [step][rank]. use: (rank, micro-batch, the last, the ranks' gradients) -> what it adds."""
    n = len(grads[0][0])
    weights, sums, history = [start.clone() for _ in range(n)], [torch.zeros_like(start, dtype=dtype) for _ in range(n)], []
    for micro_steps in grads:
        for rank in range(n):
            sums[rank] = torch.zeros_like(sums[rank]) if forgets else sums[rank]
            for g, of_ranks in enumerate(micro_steps):
                sums[rank] = (sums[rank] + use(rank, g, len(micro_steps) - 1, [each.float() for each in of_ranks])).to(dtype)
        shards = [(weights[rank] - lr * sums[rank].float()).chunk(n)[rank] for rank in range(n)]
        for rank in range(n):
            rows = [shards[r] if gathers or r == rank else weights[rank].chunk(n)[r] for r in range(n)]
            weights[rank] = torch.cat(rows).to(travels).float()
        history.append([each.clone() for each in weights])
    return history


def _summed_wrongly(start: Tensor, grads: list, lr: float) -> dict[str, list[list[Tensor]]]:
    """Mistakes, and where they lead: [step][rank]. With one micro-batch some lead to the same weights; then the first is named."""
    n, micro_steps = len(grads[0][0]), len(grads[0])
    nothing = torch.zeros_like(start)
    ways: dict[str, Callable] = {
        "the sum over the ranks is not divided: divide each shard by the world size": lambda r, g, last, of: sum(of),
        "it is divided twice by the world size": lambda r, g, last, of: sum(of) / n**2,
        "it is divided by the number of micro-batches: the gradients come divided already": lambda r, g, last, of: sum(of) / n / micro_steps,
        "nothing is reduced: every rank adds its own slice of its own gradients": lambda r, g, last, of: of[r],
    }
    if micro_steps > 1:
        ways |= {
            "the last micro-batch is added as this rank has it, after the reduction of the others: it has to be reduced as well": (
                lambda r, g, last, of: of[r] if g == last else sum(of) / n
            ),
            "only the first micro-batch is reduced, and this rank's own gradients are added to its mean": (
                lambda r, g, last, of: sum(of) / n if g == 0 else of[r]
            ),
            "only the last micro-batch is in it: the reduce_scatter writes over what was there": (
                lambda r, g, last, of: sum(of) / n if g == last else nothing
            ),
            "only the first micro-batch is in it": lambda r, g, last, of: nothing if g else sum(of) / n,
            "the last micro-batch counts twice": lambda r, g, last, of: sum(of) / n * (2 if g == last else 1),
            "the first micro-batch counts twice": lambda r, g, last, of: sum(of) / n * (1 if g else 2),
        }
    summed_up = partial(_summed_up, start, grads)
    first = _summed_up(torch.cat([start.chunk(n)[0]] * n), grads[:1], _mean, lr)
    wrong = {text: summed_up(use, lr) for text, use in ways.items()}
    return wrong | {
        "the sum is bf16, where 256 + 1 is 256: cast the shard up before you add": summed_up(_mean, lr, dtype=torch.bfloat16),
        "the weights are gathered in bf16, which rounds them: they travel in fp32": summed_up(_mean, lr, travels=torch.bfloat16),
        "the sum of the step before is still in it": summed_up(_mean, lr, forgets=False),
        "each rank updates its shard and keeps it to itself: the all_gather is missing, comes before the update, or gathers into another tensor": summed_up(
            _mean, lr, gathers=False
        ),
        "every rank updates the first shard of weights_P: rank r's is the r-th": first * len(grads),
        "lr is not used": summed_up(_mean, 1.0),
        "the gradient is added to the weights: step() takes it off": summed_up(_mean, -lr),
        "weights_P stays as it was: the update goes to a copy of it": summed_up(_mean, 0.0),
    }


def _check_micro_steps(expect: Expect, rank: int, this: dict, n: int, P: int, micro_steps: int) -> None:
    S = P // n
    sent = [op for op, *_ in this["sent"]]
    waiting = "gradients wait on this rank and are reduced once: the right weights, and all P elements are kept meanwhile. That is ZeRO-1 with no_sync()"
    causes = {
        "all_reduce": "an all_reduce brings every rank the mean of all shards, where it keeps one: twice the bytes",
        "reduce_scatter": "one reduce_scatter for each micro-batch is enough",
        "all_gather": "the weights are gathered once, in step(); gradients never",
        "no reduce_scatter": waiting if sent.count("reduce_scatter") == 1 else "each micro-batch is reduced as it comes",
        "numel": "all P elements are reduced, and gathered, at once",
        "order": "backward() reduces, step() gathers: after the update",
    }
    rule = f"a step sends {micro_steps} reduce_scatter{'s' * (micro_steps > 1)} of gradients in bf16 and one all_gather of weights"
    want = [("reduce_scatter", P)] * micro_steps + [("all_gather", P)]
    _check_calls(expect, rank, this, want, "", rule, causes)
    kinds_sent = sorted({dtype for op, _, dtype, *_ in this["sent"] if op != "all_gather"})
    expect.that(
        kinds_sent == ["bfloat16"], rule, "reduce_scatters in bfloat16", f"in {', '.join(kinds_sent)} on rank {rank}", "twice the bytes",
        "gradients travel in bf16: cast up what has been reduced, not what is to be",
    )  # fmt: skip
    gathered = [dtype for op, _, dtype, *_ in this["sent"] if op == "all_gather"]
    expect.that(
        gathered == ["float32"], "weights are gathered in fp32", "an all_gather in float32", f"in {', '.join(gathered)} on rank {rank}", cause="what is rounded on the way is no longer the weight"
    )
    for g, (alive, same, kept) in enumerate(zip(this["alive"], this["same"], this["kept"], strict=True)):
        after = f"after micro-batch {g + 1} of {micro_steps}, on rank {rank}"
        expect.that(
            same, "backward() leaves weights_P as it is", "the same values", f"other values {after}",
            "the next micro-batch runs on weights that are half updated, and differ from rank to rank", "the update is made in backward(): it belongs into step(), when all micro-batches are in the sum",
        )  # fmt: skip
        expect.that(
            not alive, "when backward() has returned, nothing of P elements is kept", "grad_P is free", f"it is still there {after}", "every rank goes on holding a whole gradient",
            "grad_P is kept, or a slice of it: a view. Reduce into a tensor of its own",
        )  # fmt: skip
        _check_kept(expect, "backward()", kept, after, P, S, "a whole gradient is kept, or a whole sum")
    _check_kept(expect, "step()", this["after"], f"on rank {rank}", P, S, "a whole gradient is kept, or a copy of all weights")


def _check_kept(expect: Expect, what: str, moment: dict, after: str, P: int, S: int, whole: str) -> None:
    """Shards only, and not many of them."""
    expect.that(
        moment["largest"] <= 4 * S + _SLACK, f"when {what} has returned, nothing of P elements is kept", f"nothing larger than a shard in fp32, {4 * S:,} bytes",
        f"{moment['largest']:,} bytes in one piece {after}", f"all {P:,} elements are {2 * P:,} bytes in bf16, {4 * P:,} in fp32", whole,
    )  # fmt: skip
    limit = moment["limit"]
    expect.that(
        moment["held"] <= limit + _SLACK, "what is kept are shards: the sum and perhaps the weights in fp32, one gradient in bf16", f"at most {limit:,} bytes",
        f"{moment['held']:,} {after}", cause="more shards are kept than that: let go of each micro-batch's when it has been added",
    )  # fmt: skip


def _accumulated_program(rank, answer, start, grads, lr):
    weights_P = start.clone()
    S = len(start) // dist.get_world_size()
    kept = {"limit": 10 * S, "each": 4 * S}
    steps = []
    with _watched(metered=True) as (watch, moments):
        moments.note()
        engine = answer(weights_P, lr)
        for micro_steps in grads:
            first, alive, same = len(watch.calls), [], []
            for of_ranks in micro_steps:
                before = weights_P.tolist()
                alive.append(_outlives(engine.backward, of_ranks[rank]))
                moments.note(**kept)
                same.append(weights_P.tolist() == before)
            engine.step()
            moments.note(**kept)
            steps.append({"weights": weights_P.tolist(), "alive": alive, "same": same, "calls": slice(first, len(watch.calls))})
    told, noted = watch.report(), iter(moments.report()[1:])
    for step in steps:
        step["weights"], step["sent"] = torch.tensor(step["weights"]), told["sent"][step.pop("calls")]
        step["kept"], step["after"] = [next(noted) for _ in step["alive"]], next(noted)
    return told | {"steps": steps}


def _outlives(backward: Callable, grad: Tensor) -> bool:
    """Whether a gradient is still there when backward() has returned and the caller has let go of it."""
    grad_P = grad.clone()
    storage = weakref.ref(grad_P.untyped_storage())
    backward(grad_P)
    del grad_P
    _Patience(0.2).wait_until(lambda: storage() is None)  # gloo may have it still
    return storage() is not None


# --- 4. the whole backward -------------------------------------------------------------------------------------------------

_LEAVES = "a bucket leaves in the hook of its last gradient, if all ahead of it have left"
_SMALL = [[(2,), (1, 2)], [(3,)], [(2,), ()]]  # buckets of 4, 3 and 3
_LARGE = [[(250,), (15, 15), (25, 29)]] * 8  # of 1200: a multiple of 2 and of 3
_IN_ORDER = "in order"
_STILL_THERE = "a bucket that has landed is still there: an attribute, a list, a view, or a name in what launches the next (work, flat_P = …) refers to it. Drop it, del the name"


@exercise(
    "zero2.backward",
    call="ShardedBackward(buckets), then loss.backward() and .finish()",
    points=3,
    hints=[
        "In the hook of a bucket's last gradient two things happen, one to this bucket and one to the bucket before. In which order, if no more than two buckets may be there?",
        "param.register_post_accumulate_grad_hook(fn) calls fn(param). Invariant: all ranks issue bucket 0, 1, 2, … in this order, each once a step; after each hook all buckets "
        "that have left have landed, but for the last one.",
        "Hook: fill the parameter's bucket, note that it has arrived; while the next bucket exists and all its parameters have arrived, launch it. Launch: land the bucket before, if there is "
        "one; launch this one; count. finish: launch what is left; land the last; clear what has arrived and the count; return the grad_S of all.",
    ],
)
def backward(answer, expect):
    """shards of 2 backwards and of a real model on 2 and 3 ranks; each bucket leaves in time, in order, one under way; unused and reordered parameters; the peak"""
    order = "the ranks send their buckets in different orders: that of the list has to hold, whichever is full first"
    unused = "on a rank without a gradient for it a bucket never fills: finish() has to launch it, with zeros, and all behind it"
    start = partial(_engine, answer)
    _backwards(expect, "two backwards", 2, start, _SMALL, [_IN_ORDER, _IN_ORDER], "a bucket is sent before its gradients are there, or not by every rank")
    text = "rank 1's gradients arrive in another order"
    _backwards(expect, text, 2, start, [[(3,)], [(2,), (1,)], [(3,)]], [_IN_ORDER, [(2, 0), (1, 1), (0, 0), (1, 0)]], order)
    text = "rank 1 has no gradient in bucket 1"
    _backwards(expect, text, 2, start, _SMALL, [_IN_ORDER, [(0, 0), (0, 1), (2, 1), (2, 0)]], unused)
    text = "rank 2 has one gradient only"
    _backwards(expect, text, 3, start, _SMALL, [_IN_ORDER, _IN_ORDER, [(2, 0)]], unused)
    for n in (2, 3):
        _backwards(expect, f"{len(_LARGE)} buckets", n, start, _LARGE, [_IN_ORDER] * n, order, metered=True)
    for n in (2, 3):
        _real_model(expect, n, start)


def _engine(answer, buckets):
    """ShardedBackward as what `_backwards_program` runs: (loss, called between backward and finish) -> shards."""
    engine = answer(buckets)

    def run(loss, backward_has_ended):
        loss.backward()
        backward_has_ended()
        return engine.finish()

    return run


_ENGINE_CAUSES = _PIECES | {
    "has no attribute 'finish'": "the class needs a method finish()",
    "KeyError": "does each hook know whose gradient has arrived? (All lambdas of a loop see its last value)",
}
_NONE_YET = "a register_hook runs before autograd has set .grad: register_post_accumulate_grad_hook runs after it"
_NONE_HERE = "a parameter without a gradient counts as zeros, and a bucket may have none at all"


def _backwards(
    expect: Expect, text: str, n: int, start: Callable, shapes: list[list[tuple]], orders: Sequence, unequal: str, metered: bool = False
) -> None:
    """Two backwards. orders: for each rank, the order in which gradients (bucket, parameter) arrive."""
    padded = _padded(shapes, n)
    figures = {"world_size": n, "P": padded} if len({*padded}) > 1 else {"world_size": n, "P": padded[0]}
    expect.case(text, **figures)
    everything = [(b, p) for b, each in enumerate(shapes) for p in range(len(each))]
    orders = [everything if order == _IN_ORDER else order for order in orders]
    causes = _ENGINE_CAUSES | {"deadlock": unequal, "different collectives": unequal, "what one rank issues": unequal}
    causes["NoneType"] = _NONE_YET if all(len(order) == len(everything) for order in orders) else _NONE_HERE
    outcomes = expect.run(_backwards_program, n, start, shapes, orders, metered, causes=causes)
    for i in range(2):
        expect.case(f"{text}, backward {i + 1}", **figures)
        _check_sent_in_order(expect, outcomes, i, padded, sum(map(len, shapes)))
        for rank, this in _rounds(outcomes, i):
            _check_form(expect, rank, this, len(shapes))
        checks = [lambda i=i: _check_engine_shards(expect, outcomes, i, shapes, orders)]
        checks.insert(1 - i, lambda i=i: [_check_moments(expect, rank, this, i, shapes, orders[rank]) for rank, this in _rounds(outcomes, i)])
        for check in checks:  # what left in time in the first backward, and too early in the second, has wrong values too
            check()
        for rank, this in _rounds(outcomes, i):
            _check_unspoilt(rank, this)
            cause = "a copy stays in .grad, or zeros: they take as much memory. Set it to None"
            if this["views"]:
                cause = "that .grad is a view of the bucket, and keeps all of it alive: set it to None"
            expect.that(
                not this["left"], "when a backward is over, every .grad is None", "None", f"{this['left']} has one on rank {rank}",
                "autograd adds the next gradient to it, and it keeps its memory", cause,
            )  # fmt: skip
            expect.that(
                not this["other hooks"], "a backward leaves the hooks as they are", "the same hooks after it", f"others on rank {rank}",
                "where old ones stay, each backward calls one more for every gradient", "hooks stay on a parameter until they are removed: register them once",
            )  # fmt: skip
    if metered:
        for i in range(2):
            expect.case(f"{text}, backward {i + 1}", **figures)
            for rank, this in _rounds(outcomes, i):
                _check_bytes(expect, rank, this, i, shapes, n)


def _check_sent_in_order(expect: Expect, outcomes: list[Outcome], i: int, padded: list[int], gradients: int) -> None:
    clear = "" if i == 0 else " from the second backward on: each has to begin the count anew"
    for rank, this in _rounds(outcomes, i):
        got = [(op, numel) for op, numel, *_ in this["sent"]]
        causes = {
            "all_reduce": "an all_reduce brings every rank the mean of all shards, where it keeps one: twice the bytes",
            "all_gather": "nobody needs all gradients: a rank keeps its shards",
            "reduce_scatter": "a bucket is sent twice: launch at the end only what has not left",
            "no reduce_scatter": f"nothing is sent{clear}" if not got else "a bucket is never sent: what has not left is launched at the end",
            "order": "the buckets leave in another order than that of the list",
        } | _sizes("a bucket leaves as one message of P elements, padding included", len(outcomes))
        if len(got) == gradients > len(padded):
            causes["reduce_scatter"] = "each gradient is sent by itself: a bucket leaves as one message"
        if len(got) == 1 < len(padded) and got[0][1] > max(padded):
            causes["no reduce_scatter"] = "all buckets are sent as one message, and nothing can leave before the last gradient"
        _check_calls(expect, rank, this, [("reduce_scatter", P) for P in padded], "float32", "one reduce_scatter for each bucket, in the order of the list", causes)


def _check_form(expect: Expect, rank: int, this: dict, count: int) -> None:
    shards = this["shards"]
    cause = "nothing is returned: a return is missing" if shards == "None" else ""
    if this["type"] == "Tensor":
        cause = "the shards are concatenated: each bucket has one of its own"
    elif isinstance(shards, list) and len(shards) > count:
        cause = "those of the backward before are still in the list"
    expect.that(
        isinstance(shards, list) and len(shards) == count, "a shard for each bucket is returned, in a list", f"a list of {count} tensors",
        f"{shorten(str(shards)) if not isinstance(shards, list) else f'{len(shards)} of them'} on rank {rank}", cause=cause,
    )  # fmt: skip


def _check_engine_shards(expect: Expect, outcomes: list[Outcome], i: int, shapes: list[list[tuple]], orders: Sequence) -> None:
    n, padded = len(outcomes), _padded(shapes, len(outcomes))
    everything = [(rank, b, p) for rank in range(n) for b, each in enumerate(shapes) for p in range(len(each))]
    missing = [(rank, b, p) for rank, b, p in everything if (b, p) not in orders[rank]]

    def by_mistake(b: int) -> dict[str, Any]:
        whole = partial(_flats, shapes, i=i, n=n)
        totals = {}
        for other in (other for other in range(len(shapes)) if other != b and padded[other] == padded[b]):
            crossed = "is added to another rank's bucket {}: both send what is full first. Keep the order of the list"
            these, those = whole(b=b, missing=missing), whole(b=other, missing=missing)
            totals[f"rank 0's bucket {b} {crossed.format(other)}"] = these[0] + sum(those[1:])
            totals[f"rank 0's bucket {other} {crossed.format(b)}"] = those[0] + sum(these[1:])
            totals[f"that is the shard of bucket {other}: their order is that of the list"] = sum(those)
        if _together(sequences := [_sequence(shapes, order) for order in orders], padded):
            totals |= _sent_as_full(sequences, b, whole, missing)
        early = "not in it: the bucket leaves before it is in .grad" + (": when a backward is over, clear what has arrived" if i else " (a register_hook runs before that)")
        places = range(len(shapes[b]))
        for p in places:
            totals[f"gradient {p} is {early}"] = sum(whole(b=b, missing=[*missing, *((rank, b, p) for rank in range(n))]))
        for rank in range(n):
            late = "in it: the bucket leaves before its own gradients are there"
            totals[f"nothing of rank {rank} is {late}"] = sum(whole(b=b, missing=[*missing, *((rank, b, p) for p in places)]))
            for p in places:
                totals[f"rank {rank}'s gradient {p} is not {late}"] = sum(whole(b=b, missing=[*missing, (rank, b, p)]))
        return {text: [each / n for each in total] if isinstance(total, list) else total / n for text, total in totals.items()}

    _check_shards(expect, outcomes, i, shapes, missing, by_mistake)


def _sequence(shapes: list[list[tuple]], order: Sequence[tuple[int, int]]) -> list[int]:
    """The buckets in the order in which one rank's are full; what never is comes last."""
    last = {b: max((order.index((b, p)) if (b, p) in order else math.inf) for p in range(len(each))) for b, each in enumerate(shapes)}
    return sorted(last, key=last.__getitem__)


def _together(sequences: list[list[int]], padded: list[int]) -> bool:
    """Buckets that leave in these orders are not those of the list, and fit each other."""
    return any(each != sorted(each) for each in sequences) and all(len({padded[b] for b in at_once}) == 1 for at_once in zip(*sequences, strict=True))


def _sent_as_full(sequences: list[list[int]], b: int, whole: Callable, missing: Sequence) -> dict[str, list[Tensor]]:
    """The ranks' shards of bucket b, times N, if each sends what is full first and takes what comes for its own bucket's."""
    sums = [sum(whole(b=each, missing=missing)[rank] for rank, each in enumerate(at_once)) for at_once in zip(*sequences, strict=True)]
    rank, sequence = next((rank, each) for rank, each in enumerate(sequences) if each != sorted(each))
    place, first = next((place, each) for place, each in enumerate(sequence) if each != place)
    text = f"rank {rank} sends bucket {first} ahead of bucket {place}, since it is full first. Keep the order of the list"
    return {text: [sums[each.index(b)].chunk(len(sequences))[r] for r, each in enumerate(sequences)]}



def _check_moments(expect: Expect, rank: int, this: dict, i: int, shapes: list[list[tuple]], order: Sequence[tuple[int, int]]) -> None:
    """At each gradient those buckets have left that are full and have only such ahead of them, and the last of these is under way:
    the one before it was gone when it left."""
    arrived: set[tuple[int, int]] = set()
    moments = this["moments"]
    for count, moment in enumerate(moments):
        full = 0
        while full < len(shapes) and {(full, p) for p in range(len(shapes[full]))} <= arrived:
            full += 1
        when = f"when gradient {count + 1} of {len(order)} arrives" if count < len(order) else "when backward ends"
        issued, under_way = moment["issued"], moment["open"]
        if issued != full:
            cause = "a bucket leaves before it is full, or before those ahead of it have left"
            if issued < full:
                cause = "a bucket is full, and stays: after each gradient launch all that may leave, not one"
                if not any(each["issued"] for each in moments):
                    cause = "no hook launches anything: everything leaves when backward has ended. Does each hook learn whose gradient has arrived? (All lambdas of a loop see its last value)"
                elif not any(each["issued"] for each in moments[: len(order)]):
                    cause = "the buckets wait for the last gradient of all: launch one as soon as its own are there"
            if i:
                cause = "in backward 1 they left in time: what has arrived is never cleared. When a backward is over, begin anew"
            so = "bytes that could travel during backward travel after it" if issued < full else ""
            raise Finding(_LEAVES, f"{when}, {full} of {len(shapes)} buckets have left", f"{issued} on rank {rank}", so, cause)
        if under_way != (full > 0):
            cause = "a bucket lands when the next one leaves: wait for the one before in launch"
            so = "each holds its bucket until it is waited for: in the end all gradients are there at once"
            if not under_way:
                so = "backward stands still while the bytes travel: nothing overlaps"
                cause = "it is waited for as soon as it has left, or soon after: the wait belongs to the moment when the next bucket leaves"
                if this["synchronous"]:
                    cause = "reduce_scatter returns when it is complete, unless it is given async_op=True"
            raise Finding(
                "one reduction is under way while the next bucket fills", f"{when}, {int(full > 0)} under way", f"{under_way} on rank {rank}", so, cause
            )
        arrived |= {order[count]} if count < len(order) else set()
    for b, left in enumerate(this["before"][1:], 1):
        so, cause = "its memory is taken, and the next one's besides", _STILL_THERE
        if left == "under way":
            so = "two whole buckets are there, and none of them fills: that is ZeRO-1's order"
            cause = "the next bucket leaves first, and the one before is waited for afterwards: land, let go, and launch then"
        expect.that(
            not left, "when a bucket leaves, the one before has landed and its buffer is gone", f"when bucket {b} leaves, {b - 1} is gone",
            f"{b - 1} is {left} on rank {rank}", so, cause,
        )  # fmt: skip


def _check_bytes(expect: Expect, rank: int, this: dict, i: int, shapes: list[list[tuple]], n: int) -> None:
    """All buckets are of one size here, and gradients arrive in order."""
    P = _padded(shapes, n)[0]
    S, largest = P // n, max(math.prod(shape) for each in shapes for shape in each)
    old = len(shapes) * S if i else 0  # the shards of the backward before may live until there are new ones
    expect.that(
        this["made"] <= _SLACK, "before the first gradient there is no memory for any", "0 bytes when it is made", f"{this['made']:,} on rank {rank}",
        cause=_why_made(this["made"], [P] * len(shapes), n, "all buffers are made in __init__: make one when its first gradient comes"),
    )  # fmt: skip
    two_buffers = any(op == "all_to_all" for op, *_ in this["sent"])
    before = old  # the shards at the moment before
    for count, moment in enumerate(this["moments"]):
        issued, limit = moment["issued"], moment["limit"]
        shards = issued * S + old
        when = f"when gradient {count + 1} arrives" if count < sum(map(len, shapes)) else "when backward ends"
        if moment["held"] > limit + _SLACK:
            cause = ""
            if this["sliced"]:
                cause = "the shards are slices of their buckets: views, and each keeps its whole bucket alive. Reduce into a tensor of its own"
            elif moment["grads"] and moment["held"] - limit <= 4 * P * len(moment["grads"]) + _SLACK:
                cause = f".grad of parameters in bucket {moment['grads'][0]} is not None, though it has left: it keeps gradients alive"
            elif two_buffers:
                cause = "an all_to_all receives into a second buffer of P elements: a reduce_scatter needs none"
            elif issued > 1 and moment["held"] - limit >= 4 * P - _SLACK:
                cause = _STILL_THERE
            elif issued:
                cause = "the gradients are there beside their buffer, or the shards twice"
            raise Finding(
                "there are: the shards, the bucket under way, the one that fills", f"{when}, at most {limit:,} bytes", f"{moment['held']:,} on rank {rank}",
                f"the gradients of all {len(shapes)} buckets are {4 * P * len(shapes):,}", cause,
            )  # fmt: skip
        most = 4 * (2 * P + max(before + largest, shards))
        before = shards
        expect.that(
            moment["peak"] <= most + _SLACK, "there are never more than the shards, two buckets and one gradient", f"until {when[5:]}, at most {most:,} bytes",
            f"{moment['peak']:,} on rank {rank}", f"a bucket is {4 * P:,}, the gradients of all are {4 * P * len(shapes):,}",
            "the next bucket is put together before the one under way has landed: for a moment there are three. Wait, and let go, first" if moment["waiting"] > most
            else _STILL_THERE if moment["landed"]
            else "a bucket is there three times: the gradients, what they are concatenated to, a padded copy. Let go of each before you make the next",
        )  # fmt: skip
    held, limit = this["after"]["held"], this["after"]["limit"]
    expect.that(
        held <= limit + _SLACK, "when a backward is over, the shards are all that is left", f"at most {limit:,} bytes", f"{held:,} on rank {rank}",
        cause="the shards are there twice: as they are returned, and as the object keeps them, or those of the backward before"
        if abs(held - 2 * limit) <= _SLACK else "something still refers to a bucket",
    )  # fmt: skip


def _backwards_program(rank, start, shapes, orders, metered):
    params = [[nn.Parameter(torch.zeros(shape)) for shape in each] for each in shapes]
    grads = [_gradients(shapes, rank, i) for i in range(2)]
    P = _padded(shapes, dist.get_world_size())
    S = [each // dist.get_world_size() for each in P]
    rounds, results = [], []
    with _watched(metered) as (watch, moments):
        moments.note()
        run = start([list(each) for each in params])
        hooks = _hooks(params)
        moments.note()
        for i in range(2):

            def note(what: str = "arrives", i: int = i) -> None:
                issued = len(watch.calls) - (rounds[-1] if rounds else 0)
                gone = [b for b, each in enumerate(params[:issued]) if any(param.grad is not None for param in each)]
                arrived = sum(moment.get("round") == i for moment in moments.noted)  # gradients; all are, when backward ends
                filling = arrived % len(shapes[0]) > 0 and what == "arrives"
                under_way = issued > 0 and what == "arrives"
                limit = 4 * (min(issued, len(S)) * S[0] + (sum(S) if i and what == "arrives" else 0) + P[0] * (under_way + filling))
                moments.note(what, limit if metered else None, round=i, grads=gone)

            arrivals = [(params[b][p], grads[i][b][p]) for b, p in orders[rank]]
            shards = run(_loss(arrivals, note), note)
            note("after")
            left = [_left(each, None) for each in params]
            told = next((f"parameter {each['grads'][0]} of bucket {b}" for b, each in enumerate(left) if each["grads"]), "")
            views = any(each["views"] for each in left)
            results.append(_shards_of(shards) | {"left": told, "views": views, "other hooks": _hooks(params) != hooks})
            rounds.append(len(watch.calls))
            for param in (param for each in params for param in each):
                param.grad = None
            del shards
    _, made, *noted = moments.report()
    for i, (before, after) in enumerate(zip([0, *rounds], rounds, strict=False)):
        mine = [moment | {"issued": moment["issued"] - before} for moment in noted if moment["round"] == i]
        results[i] |= watch.report(before, after) | {"moments": [each for each in mine if each["what"] != "after"]}
        results[i] |= {"made": made["held"], "after": mine[-1]} if metered else {}
    return results


def _shards_of(shards: object) -> dict:
    """What an engine has returned, in a form that no meter sees."""
    told = {"type": type(shards).__name__, "shards": show(shards), "sliced": False}
    if isinstance(shards, (list, tuple)):
        told["sliced"] = any(isinstance(each, Tensor) and each.untyped_storage().nbytes() > each.nbytes for each in shards)
        told["shards"] = [_as_list(each) for each in shards]
    return told


def _hooks(params: list[list[nn.Parameter]]) -> list[int]:
    """The numbers of the hooks on the parameters; each that is registered gets a new one."""
    kinds_of = [hooks for each in params for param in each for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)]
    return sorted(number for hooks in kinds_of for number in hooks or ())


_ROWS = 2  # of each rank


def _awkward_model() -> nn.Module:
    """39 parameters in pieces of 15, 5, 15, 3 and 1."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))


def _rows(n: int) -> tuple[Tensor, Tensor]:
    """(x, y): the rows of all ranks."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n * _ROWS, 3, generator=generator), torch.randn(n * _ROWS, 1, generator=generator)


def _own_rows(n: int, rank: int) -> tuple[Tensor, Tensor]:
    return tuple(each[rank * _ROWS :][:_ROWS] for each in _rows(n))


def _buckets_of(model: nn.Module) -> list[list[nn.Parameter]]:
    backwards = [*model.parameters()][::-1]
    return [backwards[:2], backwards[2:3], backwards[3:]]


def _real_model(expect: Expect, n: int, start: Callable) -> None:
    """One backward of a real model on each rank's rows, against one process that has all rows."""
    expect.case("a model of 39 parameters in 3 buckets", world_size=n)
    outcomes = expect.run(_real_model_program, n, start, causes=_ENGINE_CAUSES)
    model, (x, y) = _awkward_model(), _rows(n)
    F.mse_loss(model(x), y).backward()
    of_all = [_flat([param.grad for param in bucket], [param.shape for param in bucket], n) for bucket in _buckets_of(model)]
    for b, whole in enumerate(of_all):
        got = [outcome.value["shards"][b] for outcome in outcomes]
        got = [torch.tensor(each) if isinstance(each, list) else each for each in got]
        for rank, want in enumerate(whole.chunk(n)):
            expect.equal(
                got[rank], want, of=f"rank {rank}'s shard of bucket {b}", tol=1e-5, rule="the shards are those of one process's gradient of the whole batch",
            )  # fmt: skip
    for outcome in outcomes:
        want = [("reduce_scatter", len(each)) for each in of_all]
        _check_calls(expect, outcome.rank, outcome.value, want, "float32", "one reduce_scatter for each bucket, in the order of the list", {})


def _real_model_program(rank, start):
    model = _awkward_model()
    with _Watch() as watch:
        run = start(_buckets_of(model))
        x, y = _own_rows(dist.get_world_size(), rank)
        shards = run(F.mse_loss(model(x), y), lambda: None)
    return watch.report() | _shards_of(shards)


# --- 5. predict the peak --------------------------------------------------------------------------------------------------


def _moments_of(
    buckets: Sequence[Sequence[int]], n: int, up: Callable[[int, int], int] = _up, gradient: Callable[[Sequence[int]], int] = max
) -> list[tuple[dict, dict]]:
    """For each bucket the elements that there are when its largest gradient arrives, and when it leaves."""
    moments, shards, before = [], 0, 0
    for numels in buckets:
        P = up(sum(numels), n)
        arrives = {"gradient": gradient(numels), "buffer": P, "under way": before, "shards": shards}
        leaves = {"buffer": P, "shards": shards + P // n}
        moments.append((arrives, leaves))
        shards, before = shards + P // n, P
    return moments


def _most(moments: Iterable[Mapping[str, int]], without: str = "") -> int:
    """The bytes of the worst of them. without: what is forgotten."""
    return 4 * max(sum(count for what, count in moment.items() if what != without) for moment in moments)


def _peak(buckets: Sequence[Sequence[int]], n: int, without: str = "", **otherwise: Callable) -> int:
    return _most(chain(*_moments_of(buckets, n, **otherwise)), without)


def _shards(buckets: Sequence[Sequence[int]], n: int) -> int:
    """All of them, in bytes."""
    return 4 * sum(_up(sum(numels), n) // n for numels in buckets)


def _two_buckets(buckets: Sequence[Sequence[int]], n: int) -> int:
    return 2 * 4 * max(_up(sum(numels), n) for numels in buckets)


_WRONG_PEAKS: dict[str, Callable[[Sequence, int], int]] = {
    "those are elements: an fp32 gradient has 4 bytes each": lambda buckets, n: _peak(buckets, n) // 4,
    "2 bytes an element are those of 16 bits: these gradients are fp32": lambda buckets, n: _peak(buckets, n) // 2,
    "that is all gradients, which is what DDP and ZeRO-1 hold": lambda buckets, n: 4 * sum(map(sum, buckets)),
    "that is what is left when backward has ended: the shards": _shards,
    "the bucket under way is missing: while one fills, the one before travels": partial(_peak, without="under way"),
    "the shards of the buckets ahead are missing": partial(_peak, without="shards"),
    "the gradient that arrives is missing: autograd makes it outside of the buffer": partial(_peak, without="gradient"),
    "the padding is missing: P is a multiple of the world size": partial(_peak, up=lambda numel, n: numel),
    "P is rounded down, and does not hold all elements: it is the smallest multiple of the world size that does": partial(_peak, up=lambda numel, n: numel // n * n),
    "P is the smallest multiple of the world size that holds all elements: what is one already gets no padding": partial(_peak, up=lambda numel, n: (numel // n + 1) * n),
    "only the first gradient of each bucket is looked at: it is the largest that counts, wherever it stands": partial(_peak, gradient=lambda numels: numels[0]),
    "only the last gradient of each bucket is looked at: it is the largest that counts, wherever it stands": partial(_peak, gradient=lambda numels: numels[-1]),
    "the smallest gradient of each bucket is taken: the worst moment is when the largest arrives": partial(_peak, gradient=min),
    "all gradients of a bucket are counted beside its buffer: they arrive one after the other, and each is moved into it": partial(_peak, gradient=sum),
    "only the moments at which a gradient arrives are looked at: a bucket's own shard is made when it leaves": (
        lambda buckets, n: _most(arrives for arrives, _ in _moments_of(buckets, n))
    ),
    "only the moments at which a bucket leaves are looked at": lambda buckets, n: _most(leaves for _, leaves in _moments_of(buckets, n)),
    "only the last bucket is looked at: the worst moment may come before": lambda buckets, n: _most(_moments_of(buckets, n)[-1]),
    "the bucket that leaves is still counted with the one before, which has landed by then": (
        lambda buckets, n: _most(chain(*((arrives, leaves | {"before": arrives["under way"]}) for arrives, leaves in _moments_of(buckets, n))))
    ),
    "a bucket's own shard is counted while it fills: it is made when the bucket leaves": (
        lambda buckets, n: _most(arrives | {"shards": leaves["shards"]} for arrives, leaves in _moments_of(buckets, n))
    ),
    "every shard is counted from the start: a shard is made when its bucket leaves": (
        lambda buckets, n: _peak(buckets, n, without="shards") + _shards(buckets, n)
    ),
    "that is a bound, and a safe one: when the worst moment comes, not all shards are there, or the two buckets are smaller": (
        lambda buckets, n: _shards(buckets, n) + _two_buckets(buckets, n) + 4 * max(map(max, buckets))
    ),
    "that is all shards and two buckets: when the worst moment comes, not all shards are there, and a gradient is": (
        lambda buckets, n: _shards(buckets, n) + _two_buckets(buckets, n)
    ),
}


# The telling ones first: the finding shows the first that goes wrong.
_PEAKS = [([[4, 2], [6]], 2), ([[6]], 2), ([[1, 1, 1, 1, 1, 1]], 2), ([[5], [5]], 2), ([[4], [1], [2]], 3)]
_PEAKS += [([[2, 2], [9], [2], [2]], 2), ([[3], [12], [1, 1, 1]], 3), ([[1] * 12, [1], [1]], 2), ([[7, 1], [2, 2], [1, 6, 1], [8]], 4)]
_PEAKS += [([[8, 8]] * 10, 4), ([[100]] * 3, 1), ([[2] * 8, [1, 1], [30, 2], [16], [3, 3]], 8)]
_PEAKS += [([[1] * 8] * 2, 2), ([[1, 5], [2, 6]], 2), ([[5, 1], [6, 2]], 2), ([[3, 4, 3], [1, 9, 1]], 2)]
_METERED = [([[192, 192], [384], [192, 192], [384]], 2), ([[384], [1152], [192]], 3)]  # multiples of what mz.Zero2 aligns by


@exercise(
    "zero2.peak",
    call="peak(buckets, world_size)",
    hints=[
        "Go through a backward bucket by bucket. What do you have to remember of the buckets ahead, in order to say what is there now?",
        "Two running numbers: the shards so far, and P of the bucket before. P is the smallest multiple of N that holds a bucket's numels; S = P // N.",
        "For each bucket take the larger of (largest gradient + P + P of the bucket before + shards so far) and (P + shards so far + S). Then add S to the shards and remember P. "
        "Return 4 times the largest of all.",
    ],
)
def peak(answer, expect):
    """the peak for 16 sets of buckets on 1 to 8 ranks, by arithmetic; for two more against what the meter reads while mz.Zero2 runs"""
    measured = [max(ranks(n).run(_metered_program, buckets)) for buckets, n in _METERED]
    causes = {
        "ZeroDivisionError": "it is called as peak(buckets, world_size), in this order",
        "TypeError": "buckets is a list of lists of whole numbers, world_size is one number",
    }
    cases = [*_PEAKS, *_METERED]
    answers = expect.call(_each, answer, cases, causes=causes)
    cause = next((text for text, wrong in _WRONG_PEAKS.items() if answers == [wrong(*case) for case in cases]), "")
    by_arithmetic, by_meter = "the peak is the largest sum of what is there at one moment", "the peak is what the meter reads while mz.Zero2 runs"
    wanted = [(_peak(*case), by_arithmetic) for case in _PEAKS] + [(peak, by_meter) for peak in measured]
    for got, (want, rule), (buckets, n) in zip(answers, wanted, cases, strict=True):
        expect.case(world_size=n, buckets=buckets)
        expect.equal(got, want, of="the peak", rule=rule, so=_worst(buckets, n), mistakes={cause: got} if cause else {})
        expect.that(
            _is_whole(got), "bytes are whole numbers", "an int", f"{show(got)}, of type {type(got).__name__}",
            cause="a division with / gives a float: // is the one for whole numbers" if isinstance(got, float) else "",
        )  # fmt: skip


def _is_whole(value: object) -> bool:
    """An int, or what counts as one: numpy's, say."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _worst(buckets: list[list[int]], n: int) -> str:
    """The worst moment, in words."""
    moments = [(each, b, what) for b, both in enumerate(_moments_of(buckets, n)) for what, each in zip(("arrives", "leaves"), both, strict=True)]
    each, b, what = max(moments, key=lambda moment: sum(moment[0].values()))
    told = " + ".join(f"{count} ({name})" for name, count in each.items() if count)
    when = f"the largest gradient of bucket {b} arrives" if what == "arrives" else f"bucket {b} leaves"
    return f"the worst moment: {when}. {told} = {sum(each.values())} elements"


def _each(answer, cases):
    return [answer([list(numels) for numels in buckets], n) for buckets, n in cases]


class _Row(nn.Module):
    """Parameters whose gradients arrive in reverse order."""

    def __init__(self, numels: Sequence[int]):
        super().__init__()
        self.row = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in numels)
        self.grads = [torch.ones(numel) for numel in numels]

    def forward(self, nothing: Callable[[], None]) -> Tensor:
        return _loss(list(zip(self.row, self.grads, strict=True))[::-1], nothing)


def _metered_program(rank, buckets):
    """The most bytes of gradients while mz.Zero2 runs one backward with these buckets."""
    model = _Row([numel for numels in buckets for numel in numels][::-1])
    engine = mz.Zero2(model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_mb=4 * sum(buckets[0]) / 2**20)
    assert [[param.numel() for param in bucket.params] for bucket in engine.buckets] == buckets
    with mz.record_memory() as memory:
        engine.backward(engine(_nothing))
    return int(memory.curve()[1]["grads"].max())


def _nothing() -> None:
    pass


# --- 6. say the number ---------------------------------------------------------------------------------------------------------


@number(
    "zero2.number",
    hints=[
        "Which bytes does every rank hold for each parameter, and which only for those that it updates? How often does a step reduce gradients, how often does it gather weights?",
        "2 bytes of weight on every rank; 2 of gradient and 12 of master and moments on the owner. A reduce-scatter or an all-gather makes a rank send (N−1)/N of Ψ elements; without "
        "no_sync() every micro-batch is reduced, and the weights are gathered once a step.",
        "Held: 2Ψ + 14Ψ/N. Saved against ZeRO-1: 2Ψ(1 − 1/N). Sent: (G + 1) × Ψ(N−1)/N × 2 bytes. ZeRO-1 with no_sync() sends 2 × Ψ(N−1)/N.",
    ],
)
def zero2_number(rng):
    """what ZeRO-2 holds, saves or sends: 14 of 16 bytes divided by N; a reduce-scatter for each micro-batch and one gather a step"""
    kind = rng.choice(["held", "saved", "times", "sent"])
    psi, n = rng.choice([3, 7, 13, 30]), rng.choice([4, 8, 16, 64])
    return {"held": _held_question, "saved": _saved_question, "times": _times_question, "sent": _sent_question}[kind](psi, n, rng)


def _held_question(psi: int, n: int, rng) -> Question:
    return Question(
        text=f"{psi} B parameters, {n} ranks, ZeRO-2, mixed-precision Adam: how many GB of model states on one rank?",
        answer=2 * psi + 14 * psi / n,
        unit="GB",
        working=[
            f"weights           2 bytes × {psi} B = {2 * psi} GB       (every rank, all of them)",
            f"gradients         2 bytes × {psi} B / {n} = {2 * psi / n:g} GB",
            f"master, moments   (4 + 4 + 4) bytes × {psi} B / {n} = {12 * psi / n:g} GB",
        ],
        mistakes={
            "that is DDP: ZeRO-2 divides gradients and optimizer by N": 16 * psi,
            "that is ZeRO-1: ZeRO-2 divides the gradients by N too": 4 * psi + 12 * psi / n,
            "that is ZeRO-3: here every rank has all weights": 16 * psi / n,
            "the fp32 master is missing: Adam's part is 12 bytes, not 8": 2 * psi + 10 * psi / n,
            "that is the part that is divided: the weights are model states too": 14 * psi / n,
            "that is what it saves": 14 * psi * (1 - 1 / n),
        },
    )


def _saved_question(psi: int, n: int, rng) -> Question:
    n = max(n, 16)  # on fewer ranks two mistakes lead to one number
    return Question(
        text=f"{psi} B parameters, {n} ranks, mixed-precision Adam: how many GB of model states does ZeRO-2 save on each rank, against ZeRO-1?",
        answer=2 * psi * (1 - 1 / n),
        unit="GB",
        working=[
            f"ZeRO-1   4 bytes × {psi} B + 12 bytes × {psi} B / {n} = {4 * psi + 12 * psi / n:g} GB",
            f"ZeRO-2   2 bytes × {psi} B + 14 bytes × {psi} B / {n} = {2 * psi + 14 * psi / n:g} GB",
            f"saved    2 bytes × {psi} B × (1 − 1/{n}) = {2 * psi * (1 - 1 / n):g} GB, of the gradients",
        ],
        mistakes={
            "that is what is left": 2 * psi + 14 * psi / n,
            "a rank keeps 1/N of the gradients: not all 2 bytes are saved": 2 * psi,
            "that is against DDP": 14 * psi * (1 - 1 / n),
            "16-bit gradients have 2 bytes, not 4": 4 * psi * (1 - 1 / n),
            "that is what a rank keeps of the gradients": 2 * psi / n,
            "that is what all ranks save together": 2 * psi * (n - 1),
        },
    )


def _times_question(psi: int, n: int, rng) -> Question:
    g = rng.choice([4, 6, 7, 8])
    return Question(
        text=f"{g} micro-batches a step on {n} ranks: ZeRO-2 sends how many times as much as ZeRO-1 with no_sync()?",
        answer=(g + 1) / 2,
        unit="times",
        working=[
            f"ZeRO-2   {g} reduce-scatters and 1 all-gather = {g + 1} × Ψ(N−1)/N",
            "ZeRO-1   1 reduce-scatter and 1 all-gather = 2 × Ψ(N−1)/N      (it keeps all gradients until the last backward)",
        ],
        mistakes={
            "the weights are gathered once a step, with ZeRO-2 too": g,
            "ZeRO-2 has no no_sync(): every backward is reduced, and its gradients are gone": 1,
            "ZeRO-1 sends two: a reduce-scatter and an all-gather": g + 1,
            "the all-gather of the weights is missing": g / 2,
            "that is ZeRO-3": 3 * g / 2,
        },
    )


def _sent_question(psi: int, n: int, rng) -> Question:
    g = rng.choice([5, 6])
    one = 2 * psi * (n - 1) / n
    answer = (g + 1) * one
    return Question(
        text=f"{psi} B parameters, ZeRO-2 on {n} ranks, weights and gradients in 16 bits, {g} micro-batches a step: how many GB does one rank send in a step?",
        answer=answer,
        unit="GB",
        working=[
            f"reduce-scatters in a step   {g}   (each micro-batch: there is no no_sync())",
            "all-gathers in a step       1   (the weights, after the update)",
            f"each                        (N−1)/N × Ψ × 2 bytes = {n - 1}/{n} × {psi} B × 2 bytes = {one:g} GB",
            f"together                    {g + 1} × {one:g} GB = {answer:g} GB",
        ],
        mistakes={
            "(N−1)/N is missing: what a rank owns it does not send to itself": answer * n / (n - 1),
            "that is one micro-batch a step, or ZeRO-1 with no_sync(): ZeRO-2 reduces every micro-batch": 2 * one,
            "the weights are gathered once a step, not once a micro-batch: that would be DDP's all-reduces": 2 * g * one,
            "the all-gather of the weights is missing": g * one,
            "that is ZeRO-3, which gathers the weights twice in each micro-batch": 3 * g * one,
            "that is what all ranks send together": answer * n,
            "16 bits are 2 bytes, not 4": answer * 2,
        },
    )


# --- 7. find the bug -------------------------------------------------------------------------------------------------------------


@bug(
    "zero2.find_the_bug",
    call="backward(loss, buckets)",
    points=2,
    hints=[
        "When backward has come to the last bucket, which tensors does under_way refer to? How many bytes are they, measured in buckets?",
        "A name, a list and a work keep a tensor alive. Of the buckets that have left, one may be there at a time: the one that is under way while the next one fills.",
        "In the course of backward a rank holds all gradients, as DDP does; afterwards only its shards. At the beginning of launch: if a bucket is under way, take it out of the list, wait for it, divide "
        "its shard. Do it in a function of its own: a name in launch would hold the bucket that has landed until launch returns. After loss.backward() do the same for the last one.",
    ],
    options={
        "a": "a rank sends twice as much as it has to",
        "b": "when backward() has returned, a rank still holds all gradients",
        "c": "the shards are those of this rank's own gradients, not of the mean",
        "d": "while backward runs, a rank comes to hold all gradients; when it has returned, its shards only",
        "e": "no reduction is under way while gradients are computed",
    },
    observed="d",
    why={
        "a": "a bucket is one reduce_scatter of P elements, and nothing else is sent: (N−1)/N of the gradients, as it should be",
        "b": "under_way is a local list: when backward() returns, nothing refers to the buckets any more. And before it returns?",
        "c": "every work is waited for before its shard is divided and returned",
        "e": "launch() is called in a hook, with async_op=True, and waits for nothing: the bytes travel while backward goes on",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; the mended backward's shards on 2 and 3 ranks; each bucket leaves in time, one is under way; never more than two buckets"""
    order = "the ranks send their buckets in different orders: that of the list has to hold, whichever is full first"
    start = partial(_mended, mended)
    _backwards(expect, "two backwards", 2, start, _SMALL, [_IN_ORDER, _IN_ORDER], order)
    text = "rank 1's gradients arrive in another order"
    _backwards(expect, text, 2, start, [[(3,)], [(2,), (1,)], [(3,)]], [_IN_ORDER, [(2, 0), (1, 1), (0, 0), (1, 0)]], order)
    for n in (2, 3):
        _backwards(expect, f"{len(_LARGE)} buckets", n, start, _LARGE, [_IN_ORDER] * n, order, metered=True)
    _real_model(expect, 3, start)


def _mended(mended, buckets):
    return lambda loss, _: mended(loss, buckets)
