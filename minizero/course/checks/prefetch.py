"""The checks of exercises/05_prefetch.ipynb.

An answer decides when a unit's weights are asked for, waited for and freed. It gets units (`_Unit`) that do all this for real, and
write down what they are asked for and what is on its way while one of them computes (`_Log`). So no clock is needed: what is on its way then is
hidden, and what isn't is not. A unit that is used in a wrong order says so, and nothing is read whose memory is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minizero as mz
from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.checks.zero3 import _check_own, _check_sent, _excerpt, _flat, _nan_filled, _sent, _total, _up
from minizero.course.expect import Expect, Outcome, differ, show

_FLOAT = 4  # bytes
_LR = 0.5

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# --- units that write down what they are asked for ------------------------------------------------------------------

# Of weights, and of gradients.
_AWAY, _COMING, _THERE = "away", "on their way", "there"
_NONE, _FULL, _LEAVING, _LANDED = "none", "there in full", "under way", "landed"

_State = dict[int, tuple[str, str]]


class _Misused(Exception):
    """A unit is asked for something that it cannot do now."""

    def __init__(self, got: str, so: str = "", cause: str = ""):
        super().__init__(got)
        self.told = got, so, cause


class _BadBatch(ValueError):
    """Raised by a unit that is told to."""


class _Log:
    """What happened, and how all units were when one of them computed."""

    def __init__(self) -> None:
        self.units: list[_Unit] = []
        self.clear()

    def clear(self) -> None:
        self.events: list[str] = []
        self.moments: list[tuple[str, int, _State]] = []
        self.crowd: list[int] = []  # the largest number of units whose weights had memory at one time
        self.ahead = 0  # the most parameters ahead
        self.computed = 0

    def state(self) -> _State:
        return {unit.number: (unit.weights, unit.gradients) for unit in self.units}

    def note(self, what: str, unit: _Unit) -> None:
        self.events.append(f"{what} {unit.number}")
        crowd = [each.number for each in self.units if each.weights != _AWAY]
        self.crowd = crowd if len(crowd) > len(self.crowd) else self.crowd
        if what in ("forward", "backward"):
            self.moments.append((what, unit.number, self.state()))
            self.computed += 1
        self.ahead = max(self.ahead, sum(each.P for each in self.units[self.computed :] if each.weights == _COMING and each.number != self.computed))

    def found(self) -> dict:
        return {"events": list(self.events), "moments": list(self.moments), "crowd": list(self.crowd), "ahead": self.ahead, "end": self.state()}


class _Unit:
    """The exercises' Unit; `number` is its place in the model."""

    def __init__(self, number: int, layer: nn.Module, log: _Log):
        self.number, self.layer, self._log = number, layer, log
        self._params = list(layer.parameters())
        self._flat_P, start = _flat(self._params, dist.get_world_size()), 0
        for param in self._params:
            param.data = self._flat_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        self.P, self.grad_S = len(self._flat_P), None
        self.shard_S = self._flat_P.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self._flat_P.untyped_storage().resize_(0)
        self.weights, self.gradients = _AWAY, _NONE
        self.error: Exception | None = None
        self._work = self._reduction = self._grad_P = self._x = self._y = None
        log.units.append(self)

    def __repr__(self) -> str:
        return f"unit {self.number}"

    def gather(self) -> None:
        if self.weights != _AWAY:
            raise _Misused(f"{self} is gathered, and its weights are {self.weights}", "its bytes would be sent once more", "ask for a unit only if it is not on its way already")
        self._flat_P.untyped_storage().resize_(self._flat_P.nbytes)
        self._work = all_gather(self._flat_P, self.shard_S, async_op=True)
        self.weights = _COMING
        self._log.note("gather", self)

    def wait(self) -> None:
        if self.weights == _AWAY:
            cause = "it was freed already: it is waited for too late, or it is another one's turn" if f"gather {self.number}" in self._log.events else "gather() is missing"
            raise _Misused(f"{self} is waited for, and nobody has asked for its weights", cause=cause)
        self._work.wait()
        self.weights = _THERE
        self._log.note("wait", self)

    def free(self) -> None:
        if self.weights == _COMING:
            raise _Misused(
                f"{self} is freed while its weights are on their way", "they arrive in memory that is gone", "what was asked for cannot be called back: wait() for it, and then free it",
            )  # fmt: skip
        self._flat_P.untyped_storage().resize_(0)
        if self.weights == _THERE:
            self.weights = _AWAY
            self._log.note("free", self)

    def __call__(self, x: Tensor) -> Tensor:
        self._compute("forward")
        if self.error is not None:
            raise self.error
        self._x = x.detach().requires_grad_()
        self._y = self.layer(self._x)
        return self._y.detach()

    def backward(self, dy: Tensor) -> Tensor:
        if self._y is None:
            raise _Misused(f"{self} goes backward a second time", cause="each unit goes backward once")
        self._compute("backward")
        self._y.backward(dy)
        dx, self._x, self._y = self._x.grad, None, None
        self.gradients = _FULL
        return dx

    def _compute(self, what: str) -> None:
        if self.weights == _COMING:
            raise _Misused(
                f"{self} computes its {what} while its weights are on their way", "it may compute with weights that have not arrived",
                "wait() for the unit that is about to compute, and not for another one",
            )  # fmt: skip
        if self.weights == _AWAY:
            cause = "it has to be gathered again for backward" if what == "backward" else "gather() is missing, or free() comes too early"
            raise _Misused(f"{self} computes its {what} and its weights are not there", cause=cause)
        self._log.note(what, self)

    def reduce(self) -> None:
        if self.gradients != _FULL:
            raise _Misused(f"{self} is reduced, and its gradients are {self.gradients}", cause="each unit's gradients are reduced once, after its own backward")
        grad = torch.cat([param.grad.flatten() for param in self._params]) / dist.get_world_size()
        self._grad_P, self.grad_S = _flat([grad], dist.get_world_size()), torch.empty_like(self.shard_S)
        for param in self._params:
            param.grad = None
        self._reduction = reduce_scatter(self.grad_S, self._grad_P, async_op=True)
        self.gradients = _LEAVING
        self._log.note("reduce", self)

    def land(self) -> None:
        if self.gradients in (_NONE, _FULL):
            raise _Misused(f"{self} is to land, and its gradients are {self.gradients}", cause="reduce() comes before land()")
        if self.gradients == _LEAVING:
            self._reduction.wait()
            self._grad_P = self._reduction = None
            self.gradients = _LANDED
            self._log.note("land", self)

    def settle(self) -> None:
        """By the check: nothing is under way any more."""
        if self.weights == _COMING:
            self._work.wait()
        if self.gradients == _LEAVING:
            self._reduction.wait()
        self._flat_P.untyped_storage().resize_(0)
        self.weights, self.gradients, self._reduction, self._grad_P = _AWAY, _NONE, None, None


# --- the model ------------------------------------------------------------------------------------------------------

_ROWS = 2  # of each rank


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _layers(widths: Sequence[int]) -> list[_Layer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        return [_Layer(*each) for each in zip(widths, widths[1:], strict=False)]


def _input(widths: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """This rank's rows, and the gradient of their output."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(_ROWS, widths[0], generator=generator), torch.randn(_ROWS, widths[-1], generator=generator)


def _numels(widths: Sequence[int]) -> list[int]:
    return [(inputs + 1) * outputs for inputs, outputs in zip(widths, widths[1:], strict=False)]


def _padded(widths: Sequence[int], n: int) -> list[int]:
    return [_up(numel, n) for numel in _numels(widths)]


def _through(layers: Sequence[_Layer], path: Sequence[int], x: Tensor) -> Tensor:
    for place in path:
        x = layers[place](x)
    return x.detach()


def _model(widths: Sequence[int], log: _Log) -> list[_Unit]:
    return [_Unit(i, layer, log) for i, layer in enumerate(_layers(widths))]


def _recorded(log: _Log, run: Callable[[], object]) -> dict:
    """What happens while it runs."""
    found: dict = {"misused": None, "out": None}
    log.clear()
    try:
        found["out"] = run()
    except _Misused as error:
        found["misused"] = error.told
    return found | log.found()


_USE = "weights are asked for, waited for, used and freed, in this order"


def _check_use(rank: int, this: dict) -> None:
    if this["misused"] is not None:
        got, so, cause = this["misused"]
        raise Finding(_USE, "gather, wait, forward or backward, free", f"{got} on rank {rank}", so, cause)


def _units(numbers: Sequence[int]) -> str:
    return " and ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])] if len(numbers) > 1 else map(str, numbers))


def _told(state: _State) -> str:
    """Who is not away."""
    groups = [(what, [i for i, (weights, _) in state.items() if weights == what]) for what in (_THERE, _COMING)]
    return "; ".join(f"{_units(numbers)} {what}" for what, numbers in groups if numbers) or "no weights"


def _wanted(there: int, coming: Sequence[int]) -> str:
    return f"{there} {_THERE}" + (f"; {_units(coming)} {_COMING}" if coming else "")


def _check_ahead(rank: int, moment: tuple[str, int, _State], coming: Sequence[int], rule: str, causes: Callable[[str], str] = lambda kind: "") -> None:
    """While this unit computes, those are on their way, and no other is anything but away. causes: of "none", "waited", "late", "early"."""
    what, i, state = moment
    away = [j for j in coming if state[j][0] == _AWAY]
    waited = [j for j in coming if state[j][0] == _THERE]
    extra = [j for j in state if j != i and j not in coming and state[j][0] != _AWAY]
    if not (away or waited or extra):
        return
    done, kind = (lambda j: j < i) if what == "forward" else (lambda j: j > i), ""
    so, cause = "", ""
    if waited:
        so = f"the rank has stood still until unit {waited[0]}'s weights had come: nothing is hidden behind the computing of unit {i}"
        kind, cause = "waited", "it is asked for early and waited for at once: wait() belongs right before the unit's own computing"
    elif away and not extra:
        so = f"the link has nothing to do while unit {i} computes, and unit {away[0]}'s gather is waited for in full"
        kind, cause = "none", "gather() of the next unit comes after this one has computed: ask for it before"
    elif any(done(j) for j in extra):
        kind, cause = "late", "a unit that is through is freed at once, before anything more is asked for"
    elif extra:
        kind, cause = "early", "more is asked for than may be ahead: each unit in advance is a unit's weights of memory"
    raise Finding(
        rule, f"at {what} {i}: weights of {_wanted(i, coming)}", f"{_told(state)} on rank {rank}", so, causes(kind) or cause,
    )  # fmt: skip


def _check_order(rank: int, this: dict, what: str, order: Sequence[int]) -> None:
    got = [i for name, i, _ in this["moments"] if name == what]
    if got != list(order):
        raise Finding(
            f"each unit's {what} runs once, in {'the order of the list' if what == 'forward' else 'reverse order'}", f"units {', '.join(map(str, order))}",
            f"{', '.join(map(str, got)) or 'none'} on rank {rank}",
        )  # fmt: skip


_QUEUE = "the link is a queue: what is needed first is asked for first"


def _check_gathers(rank: int, this: dict, want: Sequence[int]) -> None:
    """The same units, each as often, are asked for already."""
    got = [int(event.split()[1]) for event in this["events"] if event.startswith("gather")]
    if got != list(want):
        raise Finding(
            _QUEUE, f"gathers of {', '.join(map(str, want))}", f"of {', '.join(map(str, got))} on rank {rank}", "a unit waits for weights that it does not need",
            "the unit whose turn it is comes first, if it is not on its way; then those after it, in order",
        )  # fmt: skip


def _check_end(expect: Expect, rank: int, this: dict, when: str) -> None:
    coming = [i for i, (weights, _) in this["end"].items() if weights == _COMING]
    there = [i for i, (weights, _) in this["end"].items() if weights == _THERE]
    expect.that(
        not coming, f"{when} nothing is in flight", "no weights on their way", f"those of unit {_units(coming)} on rank {rank}",
        "the next step changes the shards, and these are the weights of before", "who asks for weights ahead of their turn has to wait for them, whether they are needed or not",
    )  # fmt: skip
    expect.that(
        not there, f"{when} every unit is freed", "no weights there", f"those of unit {_units(there)} on rank {rank}",
        "they take memory, and after the next step they are old", "free() is missing for who was not freed on the way",
    )  # fmt: skip


def _check_crowd(expect: Expect, rank: int, this: dict, limit: int) -> None:
    most = this["crowd"]
    expect.that(
        len(most) <= limit, f"at no moment do the weights of more than {'two' if limit == 2 else limit} units take memory", f"at most {limit}",
        f"{len(most)}, those of {_units(most)}, on rank {rank}",
        cause="the next gather comes before the free() of the unit that has just computed" if len(most) == limit + 1 else "everything is asked for at the start: that is the whole model",
    )  # fmt: skip


_EXTRA = {
    "all_gather": "each unit is gathered once",
    "all_reduce": "units gather and reduce by themselves",
    "reduce_scatter": "each unit is reduced once",
    "barrier": "a barrier is a collective too, and not needed: wait() waits for the others",
    "no all_gather": "some unit is never gathered",
    "no reduce_scatter": "some unit's gradients are never reduced",
}


def _check_traffic(expect: Expect, rank: int, sent: list[tuple], want: list[tuple[str, int]], rule: str) -> None:
    _check_own(expect, rank, sent)
    _check_sent(rank, sorted(sent, key=lambda op: op[:2]), sorted(want), rule, _EXTRA)


# --- 1. what comes next ----------------------------------------------------------------------------------------------


class _Plan:
    """The right one, and what others make of it: each changes a line."""

    def __init__(self) -> None:
        self.last: list[str] = []
        self.this: list[str] = []

    def at(self, unit: str, depth: int) -> list[str]:
        self.this.append(unit)
        return self.after(unit, depth) if self.fits() else []

    def fits(self) -> bool:
        return self.this == self.last[: len(self.this)]

    def after(self, unit: str, depth: int) -> list[str]:
        return self.last[len(self.this) : len(self.this) + depth]

    def end(self) -> None:
        self.last, self.this = self.this, []


class _NoComparison(_Plan):
    def fits(self) -> bool:
        return True


class _OnlyThisUnit(_Plan):
    def fits(self) -> bool:
        return self.this[-1:] == self.last[len(self.this) - 1 : len(self.this)]


class _ByName(_Plan):
    """The first place of the unit."""

    def fits(self) -> bool:
        return self.this[-1] in self.last

    def after(self, unit: str, depth: int) -> list[str]:
        place = self.last.index(unit) + 1
        return self.last[place : place + depth]


class _ByNameAndPrefix(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return _ByName.after(self, unit, depth)


class _Successors(_Plan):
    """A dict: the last place of the unit."""

    def fits(self) -> bool:
        return self.this[-1] in self.last

    def after(self, unit: str, depth: int) -> list[str]:
        following = dict(zip(self.last, self.last[1:], strict=False))
        found: list[str] = []
        while len(found) < depth and unit in following:
            found.append(unit := following[unit])
        return found


class _SuccessorsAndPrefix(_Successors):
    fits = _Plan.fits


class _FirstForEver(_Plan):
    def end(self) -> None:
        self.last, self.this = self.last or self.this, []


class _LikeTheLastOnly(_Plan):
    """A time that was another one leaves the plan as it is."""

    def end(self) -> None:
        self.last, self.this = self.this if not self.last or self.fits() else self.last, []


class _NeverEnds(_Plan):
    def end(self) -> None:
        self.last = list(self.this)


class _Longest(_Plan):
    def end(self) -> None:
        self.last, self.this = max(self.last, self.this, key=len), []


class _Appends(_Plan):
    def end(self) -> None:
        self.last, self.this = self.last + self.this, []


class _Around(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return (self.last * 4)[len(self.this) : len(self.this) + depth]


class _Itself(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return self.last[len(self.this) - 1 : len(self.this) - 1 + depth]


class _Skips(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return self.last[len(self.this) + 1 : len(self.this) + 1 + depth]


class _One(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return super().after(unit, 1)


class _All(_Plan):
    def after(self, unit: str, depth: int) -> list[str]:
        return self.last[len(self.this) :]


_PLANS: dict[str, type[_Plan]] = {
    "nobody looks whether this time is like the last: after a detour the guesses are gathered in vain": _NoComparison,
    "only this unit is compared, not all that were executed so far: after a detour nothing more is said": _OnlyThisUnit,
    "the unit is looked up by its name: one that is executed twice stands at two places, and nothing is compared": _ByName,
    "the unit is looked up by its name, which finds its first place: one that is executed twice stands at two": _ByNameAndPrefix,
    "a dict has one successor for each unit: one that is executed twice has two, and nothing is compared": _Successors,
    "a dict has one successor for each unit: one that is executed twice has two": _SuccessorsAndPrefix,
    "the order of the first time is kept for ever: it is that of the last time that counts": _FirstForEver,
    "an order that was another one is not taken over: at end(), this time becomes the last, whatever it was": _LikeTheLastOnly,
    "end() does not begin a new time: what was executed is still in the list": _NeverEnds,
    "a shorter time is not taken over: at end(), this time becomes the last, whatever it was": _Longest,
    "the orders of all times are one list: at end(), this time takes the place of the last": _Appends,
    "after the last unit nothing comes: what comes in the next time comes after a step, and would be old by then": _Around,
    "the unit itself is in it: it is executed now, and those after it come next": _Itself,
    "it begins one too late: the unit that comes right after this one is the first": _Skips,
    "depth is not looked at: up to so many units are asked for": _One,
    "all that come are returned: at most `depth` are asked for": _All,
}

# (what it is, depth, the order of each time)
_TIMES: list[tuple[str, int, list[str]]] = [
    ("the same order twice", 1, ["abc", "abc"]),
    ("the same order three times", 2, ["abcd", "abcd", "abcd"]),
    ("b comes twice", 1, ["abcbd", "abcbd"]),
    ("a, b, a, c", 2, ["abac", "abac"]),
    ("the second time leaves b out", 1, ["abcd", "acd", "acd"]),
    ("the second time goes another way and comes back", 2, ["abcde", "axcde", "abcde"]),
    ("the second time breaks off", 2, ["abcd", "ab", "abcd", "abcd"]),
    ("the second time goes on for longer", 3, ["ab", "abcd", "abcd"]),
    ("the second time begins with another unit", 2, ["abc", "bac", "bac"]),
    ("the second time is empty", 1, ["abc", "", "abc"]),
]


@exercise(
    "prefetch.order",
    call="Plan(), then .at(unit, depth) and .end()",
    hints=[
        "If a unit is executed twice, what tells you which of its two successors comes? And what do you have to compare, to know that this time has been like the last one so far?",
        "Two lists: the last time's order, and this time's up to now. If this time's list is the beginning of the last one's, what stands behind it there comes next: a slice. end() makes the one the other.",
        "at: append the unit to `this`; done = len(this); if this == last[:done], return last[done : done + depth], else []. end: last = this, this = a new list.",
    ],
)
def order(answer, expect):
    """10 histories, depths 1 to 3: the same again, units that run twice, detours, times that break off, go on or begin otherwise"""
    causes = {
        "index out of range": "after the last unit, and in the first time, there is nothing: a slice is then empty",
        "keyerror": "in the first time nothing is known, and after the last unit nothing comes",
        "valueerror": "in the first time nothing is known: the unit is not in the list",
        "has no attribute 'at'": "the class needs a method at(unit, depth)",
        "has no attribute 'end'": "the class needs a method end()",
    }
    answers = expect.call(_planned, answer, [(depth, times) for _, depth, times in _TIMES], causes=causes)
    cause = next((text for text, wrong in _PLANS.items() if answers == _planned(wrong, [(depth, times) for _, depth, times in _TIMES])), "")
    wants = _planned(_Plan, [(depth, times) for _, depth, times in _TIMES])
    for (text, depth, times), got, want in zip(_TIMES, answers, wants, strict=True):
        for i, (this, told, right) in enumerate(zip(times, got, want, strict=True)):
            expect.case(f"{text}; " + "; ".join(f"time {k + 1}: {', '.join(each) or 'nothing'}" for k, each in enumerate(times[: i + 1])), depth=depth)
            for place, unit in enumerate(this):
                why = cause
                if not isinstance(told[place], list):
                    never = all(each is None for times in answers for time in times for each in time)
                    why = "nothing is returned: a return is missing" if never else "it returns a list, also of one unit or of none"
                expect.that(
                    told[place] == right[place], "what comes next is what came next the last time, if this time has been like it so far",
                    f'at("{unit}", {depth}) at place {place} of time {i + 1} is {show(right[place])}', show(told[place]), cause=why,
                )  # fmt: skip


def _planned(make: Callable[[], object], cases: Sequence[tuple[int, list[str]]]) -> list:
    """For each history and each of its times, what at() has returned."""
    found = []
    for depth, times in cases:
        plan, told = make(), []
        for this in times:
            answers = [plan.at(unit, depth) for unit in this]
            plan.end()
            told.append([list(each) if isinstance(each, (list, tuple)) else each for each in answers])
        found.append(told)
    return found


# --- 2. one ahead ------------------------------------------------------------------------------------------------------

_SMALL, _WIDE = (2, 3, 4, 2, 5), (32,) * 9
_AHEAD_RULE = "while a unit computes, the next one's weights are on their way"
_RUN_CAUSES = {
    "index out of range": "nothing comes after the last unit: it has nobody to ask for",
    "deadlock": "every rank asks for the same units in the same order",
    "Mismatch in shape": "a unit goes backward with what the backward of the unit behind it has returned, and the last one, whose turn is first, with `grad`",
    "has no attribute": "a unit has gather(), wait(), free(), backward(), reduce(), land(), P, and is called with its input",
}


def _forward_program(rank, answer, widths, args, metered):
    """One forward, and one more after a step; metered: one, and without activations."""
    log, traffic_since = _Log(), 0
    x, _ = _input(widths, rank)
    with _nan_filled(), mz.record_traffic() as traffic:
        units = _model(widths, log)
        runs = []
        for _ in range(2):
            with torch.set_grad_enabled(not metered), mz.record_memory() if metered else nullcontext() as memory:
                before = _total(memory) if metered else 0
                this = _recorded(log, lambda: answer(list(units), x.clone(), *args))
            this |= {"sent": _sent(traffic, traffic_since), "peak": memory.peak_total - before if metered else 0}
            traffic_since = len(traffic.ops)
            runs.append(this)
            for unit in units:
                unit.settle()
            if this["misused"] or metered:
                break
            for unit in units:
                unit.shard_S *= _LR
    return runs


def _forwards(expect: Expect, text: str, answer: Callable, widths: Sequence[int], n: int, args: tuple = (), metered: bool = False) -> list[Outcome]:
    """Run, with what is checked of every forward: outputs before and after a step. The rest is the caller's."""
    expect.case(text, world_size=n)
    return expect.run(_forward_program, n, answer, widths, args, metered, causes=_RUN_CAUSES)


def _check_outputs(expect: Expect, outcome: Outcome, step: int, widths: Sequence[int]) -> None:
    layers, x = _layers(widths), _input(widths, outcome.rank)[0]
    old = _through(layers, range(len(layers)), x)
    with torch.no_grad():
        for layer in layers if step else ():
            for param in layer.parameters():
                param *= _LR
    want = _through(layers, range(len(layers)), x)
    mistakes = {"that is the input: each unit's output is the input of the next": x}
    mistakes |= {"that is the output with the weights of before the step": old} if step else {}
    expect.equal(
        outcome.value[step]["out"], want, of=f"the output on rank {outcome.rank}", rule="the output is that of one process that has all weights", tol=1e-5,
        mistakes={text: wrong for text, wrong in mistakes.items() if differ(wrong, want, "", 1e-5)},
    )  # fmt: skip


def _check_forwards(expect: Expect, outcomes: list[Outcome], widths: Sequence[int], ahead: Callable[[int], list[int]], limit: int, rule: str, causes: Callable = lambda kind: "") -> None:
    n, count = len(outcomes), len(widths) - 1
    for outcome in outcomes:
        rank = outcome.rank
        for step, this in enumerate(outcome.value):
            _check_use(rank, this)
            _check_order(rank, this, "forward", range(count))
            for moment in this["moments"]:
                _check_ahead(rank, moment, ahead(moment[1]), rule, causes)
            _check_crowd(expect, rank, this, limit)
            _check_end(expect, rank, this, "after forward")
            _check_traffic(expect, rank, this["sent"], [("all_gather", P) for P in _padded(widths, n)], "each unit is gathered once, as in ZeRO-3")
            _check_gathers(rank, this, range(count))
            _check_outputs(expect, outcome, step, widths)


def _check_peak(expect: Expect, run: Callable[[], list[Outcome]], limit: int, full: int, what: str) -> None:
    """What a thread of gloo's holds a moment longer may be in a peak: it is looked at again, up to twice."""
    for _ in range(3):
        outcomes = run()
        highest = max(outcomes, key=lambda outcome: outcome.value[0]["peak"])
        if (peak := highest.value[0]["peak"]) <= limit:
            return
    expect.that(
        False, f"at the peak a rank holds {what}", f"at most {limit:,} bytes more than before", f"{peak:,} on rank {highest.rank}", f"all weights are {full:,} bytes",
        "copies of weights, or more units than allowed, are there",
    )  # fmt: skip


@exercise(
    "prefetch.ahead",
    call="forward(units, x)",
    points=2,
    hints=[
        "While unit 0 computes, the link could carry something. What, and when must it have been asked for? And where does its wait() belong, if it should not cost the time that you have just won?",
        "gather() returns at once; wait() stands still. Before unit i computes: gather() of i + 1, if there is one, and wait() of i. After it: free() of i. The first gather has nobody who asks for it ahead.",
        "units[0].gather(). For each i: units[i + 1].gather() unless i is the last; units[i].wait(); x = units[i](x); units[i].free(). Return x.",
    ],
)
def ahead(answer, expect):
    """outputs on 2 and 3 ranks, before and after a step; what is on its way while each unit computes; at most two units there; one gather each; bytes at the peak"""
    for text, widths, n in (("two units", (2, 3, 2), 2), ("one unit", (2, 3), 2), ("four units", _SMALL, 2), ("four units", _SMALL, 3)):
        count = len(widths) - 1
        outcomes = _forwards(expect, text, answer, widths, n)
        _check_forwards(expect, outcomes, widths, lambda i, count=count: [i + 1] if i + 1 < count else [], 2, _AHEAD_RULE)
    P = _padded(_WIDE, 2)
    run = partial(_forwards, expect, f"eight units of {P[0]:,} elements", answer, _WIDE, 2, metered=True)
    _check_peak(expect, run, _FLOAT * 3 * P[0], _FLOAT * sum(P), "two units' weights and what one computes")


# --- 3. in backward -----------------------------------------------------------------------------------------------------


def _backward_program(rank, answer, widths, metered):
    log = _Log()
    x, dy = _input(widths, rank)
    with _nan_filled(), mz.record_traffic() as traffic:
        units = _model(widths, log)
        for unit in units:
            unit.gather()
            unit.wait()
            x = unit(x)
            unit.free()
        since = len(traffic.ops)
        with mz.record_memory() if metered else nullcontext() as memory:
            before = _total(memory) if metered else 0
            this = _recorded(log, lambda: answer(list(units), dy.clone()))
        this |= {"sent": _sent(traffic, since), "peak": memory.peak_total - before if metered else 0}
        for unit in units:
            unit.settle()
    return [this | {"grads": [None if unit.grad_S is None else unit.grad_S.clone() for unit in units]}]


def _worked(widths: Sequence[int], n: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Of each rank: each unit's own gradient, flat and padded; and the gradient of the input."""
    own, inputs = [], []
    for rank in range(n):
        layers, (x, dy) = _layers(widths), _input(widths, rank)
        y = x.requires_grad_()
        for layer in layers:
            y = layer(y)
        y.backward(dy)
        own.append([_flat([param.grad for param in layer.parameters()], n) for layer in layers])
        inputs.append(x.grad)
    return own, inputs


def _backwards(answer, expect: Expect, text: str, widths: Sequence[int], n: int) -> None:
    count = len(widths) - 1
    expect.case(text, world_size=n)
    outcomes = expect.run(_backward_program, n, answer, widths, False, causes=_RUN_CAUSES)
    own, inputs = _worked(widths, n)
    for outcome in outcomes:
        rank, this = outcome.rank, outcome.value[0]
        _check_use(rank, this)
        _check_order(rank, this, "backward", range(count)[::-1])
        for moment in this["moments"]:
            i = moment[1]
            _check_ahead(rank, moment, [i - 1] if i else [], "while a unit goes backward, the weights of the one before it are on their way")
            _check_reductions(rank, moment, count)
        _check_queue(rank, this, count)
        _check_crowd(expect, rank, this, 2)
        _check_end(expect, rank, this, "after backward")
        left = {i: gradients for i, (_, gradients) in this["end"].items() if gradients != _LANDED}
        expect.that(
            not left, "after backward every reduction has landed", "all landed", f"unit {_units(list(left))}'s gradients are {', '.join(dict.fromkeys(left.values()))} on rank {rank}",
            "the optimizer would read what has not arrived", "the last units have nobody after them in whose time they could be reduced and landed: do it at the end",
        )  # fmt: skip
        want = [(op, P) for P in _padded(widths, n) for op in ("all_gather", "reduce_scatter")]
        _check_traffic(expect, rank, this["sent"], want, "each unit is gathered once and reduced once, as in ZeRO-3")
        _check_gathers(rank, this, range(count)[::-1])
        for i in range(count):
            mean = sum(each[i] for each in own) / n
            expect.equal(
                this["grads"][i], mean.chunk(n)[rank], of=f"grad_S of unit {i} on rank {rank}", tol=1e-5, rule="grad_S is this rank's shard of the mean gradient",
                so="each unit's backward takes what the backward of the unit after it has returned",
            )  # fmt: skip
        expect.equal(
            this["out"], inputs[rank], of=f"the result on rank {rank}", tol=1e-5, rule="the gradient of the first unit's input is returned",
            mistakes={"that is what came in: the gradient of the output": _input(widths, rank)[1]},
        )  # fmt: skip


def _check_reductions(rank: int, moment: tuple[str, int, _State], count: int) -> None:
    """While unit i goes backward, the reduction of i + 1 is under way, and those before have landed."""
    _, i, state = moment
    rule = "while a unit goes backward, the reduction of the one behind it is under way, and all before that have landed"
    for j in range(i + 1, count):
        got, want = state[j][1], _LEAVING if j == i + 1 else _LANDED
        if got == want:
            continue
        if j == i + 1:
            so = f"nothing of it is hidden behind the backward of unit {i}"
            cause = "it is waited for as soon as it was asked for: land() belongs in front of the next reduce()" if got == _LANDED else "the reduction is left for later: ask for it before the next unit goes backward"
        else:
            so = f"its full gradients still take memory: with {count} units, {count - i - 1} times as much as one"
            cause = "land() is left for the end: before a unit's reduce() the one before it has to land" if got == _LEAVING else "reductions are left for the end"
        raise Finding(rule, f"at backward {i}: unit {j}'s gradients {want}", f"{got} on rank {rank}", so, cause)


def _check_queue(rank: int, this: dict, count: int) -> None:
    events = this["events"]
    for i in range(1, count - 1):  # the reduction of i + 1, the gather of i − 1
        if events.index(f"reduce {i + 1}") < events.index(f"gather {i - 1}"):
            raise Finding(
                "the link is a queue: the next unit's gather is asked for before the last one's reduction", f"gather {i - 1} before reduce {i + 1}",
                f"{_excerpt(events, max(0, events.index(f'reduce {i + 1}') - 3))} on rank {rank}", f"unit {i - 1} waits for its weights and for that reduction",
                "reduce() comes right after the unit's own backward: keep it until the next gather has been asked for",
            )  # fmt: skip


@exercise(
    "prefetch.backward",
    call="backward(units, grad)",
    points=3,
    hints=[
        "At unit i the link is to carry two things, the weights of i − 1 and the gradients of i + 1. Which of the two will you wait for first, and so which has to be asked for first?",
        "Go through the reversed list. At unit i, in this order: gather() of i − 1; land() of i + 2; reduce() of i + 1; wait() of i; grad = backward(grad); free(). Each of them only where there is such a unit.",
        "order = units[::-1]; order[0].gather(). For each k: order[k + 1].gather() if there is one; if k > 1: order[k − 2].land(); if k > 0: order[k − 1].reduce(); then wait, grad = backward(grad), free. At the end: land the last but one, reduce the last, "
        "land it; return grad.",
    ],
)
def backward(answer, expect):
    """grad_S and the input's gradient on 2 and 3 ranks; what is on its way at each backward, gather before reduction; two units there, one reduction under way; bytes"""
    for text, widths, n in (("two units", (2, 3, 2), 2), ("one unit", (2, 3), 2), ("four units", _SMALL, 2), ("four units", _SMALL, 3)):
        _backwards(answer, expect, text, widths, n)
    P = _padded(_WIDE, 2)
    expect.case(f"eight units of {P[0]:,} elements", world_size=2)
    run = partial(expect.run, _backward_program, 2, answer, _WIDE, True, causes=_RUN_CAUSES)
    # Two units' weights, and gradients: one unit's under way and one's in the making, each for a moment twice (.grad, and flat).
    limit = _FLOAT * sum(P) // 2 + _FLOAT * (2 + 4) * P[0]
    _check_peak(expect, run, limit, _FLOAT * sum(P), "weights and gradients of two units, besides its shards")


# --- 4. the limit ---------------------------------------------------------------------------------------------------------

_LIMIT_WIDTHS = (3, 2, 3, 5, 3, 4, 2)  # P = 8, 10 (9 and padding), 20, 18, 16, 10 on two ranks


def _limited(
    P: Sequence[int], depth: int, most: int, *, fits: Callable[[int, int], bool] | None = None, stop: bool = True, own: bool = False, forget: bool = True, anew: bool = False
) -> list[list[int]]:
    """What is ahead while each unit computes. Right as it is; each keyword is a mistake.

    fits: (sum of those ahead, P of the next); stop: a unit that does not fit ends it; own: the unit that computes counts; forget: those used
    do not; anew: in each turn the sum begins at 0
    """
    fits = fits or (lambda live, P: live + P <= most)
    found, asked, live = [], set(), 0
    for i in range(len(P)):
        if i in asked and forget and not own:
            live -= P[i]
        live = 0 if anew else live + P[i] if own and i not in asked else live
        asked.add(i)
        for j in range(i + 1, min(i + 1 + depth, len(P))):
            if j in asked:
                continue
            if not fits(live, P[j]):
                if stop:
                    break
                continue
            asked.add(j)
            live += P[j]
        live -= P[i] if own else 0
        found.append(sorted(j for j in asked if j > i))
    return found


_LIMITS: dict[str, Callable[[Sequence[int], int, int], list[list[int]]]] = {
    "nothing is ever ahead": lambda P, depth, most: [[] for _ in P],
    "max_live is not looked at: depth alone decides": lambda P, depth, most: _limited(P, depth, most, fits=lambda live, P: True),
    "it stops when the limit has been passed: ask before the gather whether the unit fits, not after it": lambda P, depth, most: _limited(P, depth, most, fits=lambda live, P: live < most),
    "it stops when the limit has been reached: ask before the gather whether the unit fits, not after it": lambda P, depth, most: _limited(P, depth, most, fits=lambda live, P: live <= most),
    "each unit by itself is held against max_live: it is the sum of those ahead": lambda P, depth, most: _limited(P, depth, most, fits=lambda live, P: P <= most),
    "what is ahead already, from earlier turns, counts as well": lambda P, depth, most: _limited(P, depth, most, anew=True),
    "`at most` max_live: a sum that is equal to it fits": lambda P, depth, most: _limited(P, depth, most, fits=lambda live, P: live + P < most),
    "the unit whose turn it is does not count: it is not ahead any more": lambda P, depth, most: _limited(P, depth, most, own=True),
    "a unit that does not fit is left out, and a smaller one behind it goes before it: the first that does not fit ends it": lambda P, depth, most: _limited(P, depth, most, stop=False),
    "a unit whose turn has come does not count any more: take it off what is ahead": lambda P, depth, most: _limited(P, depth, most, forget=False),
    "more than `depth` units are ahead": lambda P, depth, most: _limited(P, depth + 1, most),
    "parameters are counted without the padding, which travels as well: unit.P counts it": lambda P, depth, most: _limited(_numels(_LIMIT_WIDTHS), depth, most),
    "depth is not looked at: max_live alone decides": lambda P, depth, most: _limited(P, len(P), most),
}  # fmt: skip


@exercise(
    "prefetch.limit",
    call="forward(units, x, depth, max_live)",
    points=2,
    hints=[
        "Which units are ahead at the moment when one more is to be asked for? Is the one whose turn it is among them? And who may be asked for, if the next one does not fit?",
        "Keep what is ahead in a list. When a unit's turn comes it is taken off the list, or gathered if it is not on it. Then sum(each.P for each in ahead) plus the next one's P is held against max_live, and the first that is over it breaks the loop.",
        "For each i: if units[i] is in ahead, remove it, else gather it. For j from i + 1 + len(ahead) up to i + depth: stop if the sum of P of those ahead and units[j].P is over max_live; gather units[j], append it. Then wait, compute, free.",
    ],
)
def limit(answer, expect):
    """what is ahead while each of six units computes, depths 0 to 3, limits from nothing to all; outputs; one gather each; the limit holds at each moment"""
    P = _padded(_LIMIT_WIDTHS, 2)
    text = f"P = {', '.join(map(str, P))}"
    cases = [(1, sum(P)), (2, sum(P)), (1, P[3]), (2, P[1] + P[2]), (2, P[3] - 1), (3, P[4] + P[5]), (2, P[1]), (0, sum(P)), (3, 0), (2, P[1] - 1), (3, P[2] + P[3])]
    runs = []
    for depth, most in cases:
        runs.append(_forwards(expect, f"{text}, depth={depth}, max_live={most}", answer, _LIMIT_WIDTHS, 2, (depth, most)))
        if runs[-1][0].value[0]["misused"]:
            break
    got = [_coming(outcomes[0].value[0]["moments"]) for outcomes in runs]
    cause = next((text for text, wrong in _LIMITS.items() if got == [wrong(P, *case) for case in cases]), "")
    for (depth, most), outcomes in zip(cases, runs, strict=False):
        expect.case(text, depth=depth, max_live=most)
        for outcome in outcomes:
            for this in outcome.value:
                _check_use(outcome.rank, this)
                expect.that(
                    this["ahead"] <= most, "never more than max_live parameters are ahead", f"at most {most}", f"{this['ahead']} on rank {outcome.rank}", cause=cause
                )  # fmt: skip
        wanted = _limited(P, depth, most)
        _check_forwards(
            expect, outcomes, _LIMIT_WIDTHS, lambda i, wanted=wanted: wanted[i], depth + 1, "as many units are ahead as depth and max_live allow, in order",
            lambda kind: cause or _LESS * (kind == "none"),
        )  # fmt: skip


_LESS = "less is ahead than may be: a unit whose turn has come does not count any more, and each turn fills up what there is room for"


def _coming(moments: list[tuple[str, int, _State]]) -> list[list[int]]:
    return [[j for j in state if state[j][0] == _COMING] for _, _, state in moments]


# --- 5. nothing stale, nothing in flight ----------------------------------------------------------------------------------

_SQUARE = (3,) * 6  # so that any order is possible
# (what it is, the passes; a unit with "!" raises, "e" in front: an evaluation)
_PASSES: list[tuple[str, list[str]]] = [
    ("the same pass twice", ["012", "012"]),
    ("four passes with steps between them", ["01234", "01234", "01234", "01234"]),
    ("pass 2 leaves unit 1 out", ["0123", "023", "023"]),
    ("pass 2 begins with another unit", ["012", "201", "201"]),
    ("unit 0 runs twice", ["0102", "0102"]),
    ("unit 1 raises in pass 2", ["0123", "01!", "0123", "0123"]),
    ("unit 0, the first, raises in pass 2", ["012", "0!", "012"]),
    ("unit 0, the first, raises in pass 1", ["0!", "012", "012"]),
    ("unit 2, the last, raises in pass 2", ["012", "012!", "012"]),
    ("pass 2 is an evaluation that stops early", ["0123", "e01", "0123"]),
    ("pass 2 goes on for longer", ["01", "0123", "0123"]),
]


def _expected_passes(passes: Sequence[str]) -> list[dict]:
    """Of each pass: its order, whether it raises, for each place what is ahead."""
    found, plan = [], _Plan()
    for each in passes:
        path = [int(c) for c in each if c.isdigit()]
        coming = [plan.at(i, 1) for i in path]
        plan.end()
        found.append({"path": path, "raises": "!" in each, "evaluation": each.startswith("e"), "coming": coming})
    return found


def _passes_program(rank, answer, passes):
    log = _Log()
    x = _input(_SQUARE, rank)[0]
    found = []
    with _nan_filled(), mz.record_traffic() as traffic:
        units = _model(_SQUARE, log)
        made = answer()
        for this in passes:
            since = len(traffic.ops)
            units[this["path"][-1]].error = _BadBatch("a bad batch") if this["raises"] else None
            with torch.set_grad_enabled(not this["evaluation"]):
                run = _recorded(log, lambda path=this["path"]: _pass(made, units, path, x))
            units[this["path"][-1]].error = None
            found.append(run | {"sent": _sent(traffic, since)})
            if run["misused"] or any(weights != _AWAY for weights, _ in run["end"].values()):
                break  # what comes next has no meaning
            for unit in units:
                unit.shard_S *= -_LR
        for unit in units:
            unit.settle()
    return found


def _pass(made, units: Sequence[_Unit], path: Sequence[int], x: Tensor) -> Tensor | str:
    try:
        for i in path:
            made.enter(units[i])
            x = units[i](x)
            made.leave(units[i])
    except _BadBatch:
        x = "raised"
    finally:
        made.end()
    return x


@exercise(
    "prefetch.stale",
    call="Prefetcher(), then .enter(unit), .leave(unit) and .end()",
    points=3,
    hints=[
        "When a pass is over, in which states may a unit be that is not at rest? Think of an order that has changed, of an early stop, of an exception. What has to happen to each, and can you free what is still on its way?",
        "Two names are enough: the unit that was asked for ahead, and the one that works. Whoever is ahead and is not the one that enters: wait(), then free(). end() does the same, frees the one that works if leave() was not called, and ends the plan.",
        "enter: if unit is not self.ahead: drop what is ahead, and gather. ahead = None, working = unit. For the unit in plan.at(unit, 1): gather it, ahead = it. unit.wait(). leave: free, working = None. end: drop; free working if there is one; plan.end(). "
        "drop: if there is one ahead: wait, free, None.",
    ],
)
def stale(answer, expect):
    """11 histories on 2 ranks with steps between passes: outputs with the weights of now, what is ahead, nothing in flight and nothing there after a pass, an evaluation, an exception"""
    causes = _RUN_CAUSES | {
        "a bad batch": "the exception of a unit must not be raised by the prefetcher",
        "has no attribute 'enter'": "the class needs a method enter(unit)",
        "has no attribute 'leave'": "the class needs a method leave(unit)",
        "has no attribute 'end'": "the class needs a method end()",
    }
    for text, passes in _PASSES:
        expect.case(text, world_size=2)
        expected = _expected_passes(passes)
        outcomes = expect.run(_passes_program, 2, answer, expected, causes=causes)
        for k, this in enumerate(expected):
            expect.case(f"{text}; pass {k + 1}: units {', '.join(map(str, this['path']))}" + (", and the last one raises" if this["raises"] else ""), world_size=2)
            for outcome in outcomes:
                _check_pass(expect, outcome, k, this)


def _check_pass(expect: Expect, outcome: Outcome, k: int, this: dict) -> None:
    rank, run = outcome.rank, outcome.value[k]
    _check_use(rank, run)
    in_vain: list[int] = []
    for place, (_, i, state) in enumerate(run["moments"]):
        coming = this["coming"][place]
        kept = [j for j in in_vain if j not in coming and state[j][0] != _AWAY]  # may wait until end()
        state = {j: (_AWAY, gradients) if j in kept and j != i else (weights, gradients) for j, (weights, gradients) in state.items()}
        rule = "the unit that came next the last time is on its way, and no other" if coming else "where nobody knows what comes next, nothing is asked for"
        _check_ahead(rank, ("forward", i, state), coming, rule, lambda kind, coming=coming: _passed_otherwise(kind, coming))
        if coming and coming != this["path"][place + 1 : place + 2]:
            in_vain += coming
    _check_at_rest(expect, rank, run, this)
    want, coming = [], []
    for i, following in zip(this["path"], this["coming"], strict=True):
        want += [*([i] if coming != [i] else []), *following]
        coming = following
    got = [int(event.split()[1]) for event in run["events"] if event.startswith("gather")]
    expect.that(
        sorted(got) == sorted(want), "each unit is gathered once for each time it runs; besides, only what was asked for in vain",
        f"gathers of {', '.join(map(str, sorted(want)))}", f"of {', '.join(map(str, sorted(got)))} on rank {rank}",
        cause="a unit that was on its way already is gathered again" if len(got) > len(want) else "a unit was not gathered for this pass: it was there from before",
    )  # fmt: skip
    _check_gathers(rank, run, want)
    _check_own(expect, rank, run["sent"])
    if this["raises"]:
        return
    layers, x = _layers(_SQUARE), _input(_SQUARE, rank)[0]
    old = None
    with torch.no_grad():
        for done in range(k + 1):
            if done:
                old = _through(layers, this["path"], x)
                for layer in layers:
                    for param in layer.parameters():
                        param *= -_LR
    expect.equal(
        run["out"], _through(layers, this["path"], x), of=f"the output on rank {rank}", rule="the model computes with the weights that the shards have now", tol=1e-5,
        mistakes={"these are the weights of before the step": old} if old is not None else {},
    )  # fmt: skip


def _check_at_rest(expect: Expect, rank: int, run: dict, this: dict) -> None:
    """After end()."""
    coming = [i for i, (weights, _) in run["end"].items() if weights == _COMING]
    there = [i for i, (weights, _) in run["end"].items() if weights == _THERE]
    when = "an exception" if this["raises"] else "an evaluation" if this["evaluation"] else "a pass"
    early = any(event.startswith("gather") for event in run["events"][_last_work(run["events"]) :])
    expect.that(
        not coming, f"after {when} nothing is in flight", "no weights on their way", f"those of unit {_units(coming)} on rank {rank}",
        "a step comes next: what was gathered before it is old after it",
        "the next pass's first unit is asked for already: a step may come in between" if early else "what was asked for, and nobody came for, stays under way: end() has to wait for it and free it",
    )  # fmt: skip
    last = this["path"][-1]
    expect.that(
        not there, f"after {when} every unit is freed", "no weights there", f"those of unit {_units(there)} on rank {rank}", "a step comes next: these weights are old after it",
        "leave() is not called for a unit that raises: end() has to free it" if this["raises"] and last in there else "what was asked for in vain has arrived, and is not freed: wait(), and then free()",
    )  # fmt: skip


def _last_work(events: list[str]) -> int:
    return max((i for i, event in enumerate(events) if event.startswith("forward")), default=0)


def _passed_otherwise(kind: str, coming: list[int]) -> str:
    if kind == "none":
        return "the plan says what comes next, and it is not asked for: does it hear of every unit, and of every end()?"
    if kind == "late":
        return "a unit that has left is to be freed at once"
    if kind == "early" and not coming:
        return "this pass is another one than the last, or there was none yet: a guess is gathered in vain"
    return ""


# --- 6. say the number ------------------------------------------------------------------------------------------------------


@number(
    "prefetch.number",
    hints=[
        "Draw two rows, the computing above and the link below. What does the first unit wait for? What happens beside each computing, and which of the two is longer? What is left at the end?",
        "A gather of P bytes takes (N−1)(α + P/(Nβ)). On demand each unit costs gather + computing. With the next one on its way, each costs the longer of the two, but for the first gather and the last computing, which have nothing beside them.",
        "On demand: L(g + c). One ahead: g + (L−1)·max(c, g) + c. Exposed is that minus L·c. Hidden is 1 − exposed/(L·g). A gather as long as the computing: β = P(N−1)/(N·c). Depth d: the weights of d + 1 units.",
    ],
)
def prefetch_number(rng):
    """milliseconds of a gather, of a pass on demand and one ahead, what is exposed and hidden, the bandwidth that suffices, what depth costs"""
    kind = rng.choice(["gather", "hidden", "bandwidth", "ahead", "exposed", "depth"])
    return {"gather": _gather_question, "ahead": _pass_question, "exposed": _exposed_question, "hidden": _hidden_question, "bandwidth": _bandwidth_question, "depth": _depth_question}[kind](rng)


def _pass_times(rng) -> tuple[int, int, int]:
    """Units, ms of computing, ms of a gather."""
    compute, gather = rng.choice([(6, 4), (5, 8), (4, 7), (8, 5), (3, 7), (9, 4)])
    return rng.choice([12, 16, 20]), compute, gather


_CHAIN = "{units} units, one after the other. In forward each computes for {compute} ms, and its gather takes {gather} ms on the link, which carries one at a time"


def _pass_question(rng) -> Question:
    L, c, g = _pass_times(rng)
    longer, answer = max(c, g), g + (L - 1) * max(c, g) + c
    return Question(
        text=_CHAIN.format(units=L, compute=c, gather=g) + ". One unit is gathered ahead. How many ms does the forward take?",
        answer=answer,
        unit="ms",
        working=[
            f"the first gather           {g} ms   (nothing to hide behind)",
            f"computing beside a gather  {L - 1} times max({c}, {g}) ms = {(L - 1) * longer} ms",
            f"the last computing         {c} ms   (nothing left to gather)",
        ],
        mistakes={
            "that is without prefetch: a gather and the computing of the unit before run side by side": L * (c + g),
            "that is the computing alone: the first gather has nothing to hide behind": L * c,
            "that is the link alone: a unit that is gathered still has to compute": L * g,
            "the first gather and the last computing are missing: only L − 1 gathers have a computing beside them": (L - 1) * longer,
            "only L − 1 gathers have a computing beside them: the longer of the two counts L − 1 times": L * longer + c + g,
            "it counts the shorter of the two: side by side takes as long as the longer": g + (L - 1) * min(c, g) + c,
        },
        tol=0.005,
    )


def _exposed(L: int, c: int, g: int) -> int:
    return g + (L - 1) * max(0, g - c)


def _exposed_question(rng) -> Question:
    L, c, g = _pass_times(rng)
    answer = _exposed(L, c, g)
    only_where_it_is_longer = {
        "the first unit waits for its whole gather: nothing computes before it": L * (g - c),
        "that is the first gather alone: one that takes longer than the computing is not hidden in full": g,
    } if g > c else {}  # fmt: skip
    return Question(
        text=_CHAIN.format(units=L, compute=c, gather=g) + ". One unit is gathered ahead. For how many ms of the forward does the rank stand still and wait?",
        answer=answer,
        unit="ms",
        working=[
            f"the first gather   {g} ms",
            f"each of {L - 1} others   max(0, {g} − {c}) = {max(0, g - c)} ms are left when the unit before has computed",
            f"together           {g} + {L - 1} × {max(0, g - c)} = {answer} ms",
        ],
        mistakes={
            "that is without prefetch: each gather but the first runs while a unit computes": L * g,
            "the first gather has nothing to hide behind": (L - 1) * max(0, g - c),
            "that is how long the forward takes: while it computes it does not wait": answer + L * c,
            "that is what is hidden": L * g - answer,
        }
        | only_where_it_is_longer,
        tol=0.005,
    )


def _hidden_question(rng) -> Question:
    L, c, g = _pass_times(rng)
    exposed = _exposed(L, c, g)
    answer = 100 * (1 - exposed / (L * g))
    return Question(
        text=_CHAIN.format(units=L, compute=c, gather=g) + ". One unit is gathered ahead. How many percent of the communication of the forward are hidden behind computing?",
        answer=answer,
        unit="%",
        working=[
            f"communication   {L} × {g} = {L * g} ms",
            f"exposed         {g} + {L - 1} × max(0, {g} − {c}) = {exposed} ms   (the first gather, and what computing does not cover)",
            f"hidden          1 − {exposed}/{L * g} = {answer:.4g} %",
        ],
        mistakes={
            "the first gather has nothing to hide behind": 100 * min(1, c / g),
            "that is the exposed share": 100 - answer,
            "a share of 1 is 100 %": answer / 100,
            "what is asked for is a share of the communication, not of the forward's time": 100 * (L * g - exposed) / (L * c + exposed),
        },
        tol=0.005,
    )


def _gather_question(rng) -> Question:
    m, n, beta, alpha = rng.choice([50, 80, 120]), rng.choice([4, 8]), rng.choice([10, 12.5, 25]), rng.choice([100, 200])
    message = 2 * m / n / beta  # ms: MB / (GB/s)
    answer = (n - 1) * (alpha / 1000 + message)
    return Question(
        text=f"A unit of {m} million parameters, weights in 16 bits, {n} ranks, a link of {beta:g} GB/s in each direction and {alpha} µs latency: how many ms does its all-gather take, on a ring?",
        answer=answer,
        unit="ms",
        working=[
            f"the full weights   2 bytes × {m} million = {2 * m} MB",
            f"one message        a shard: {2 * m} / {n} = {2 * m / n:g} MB, in {alpha / 1000:g} + {message:.4g} = {alpha / 1000 + message:.4g} ms",
            f"messages           N − 1 = {n - 1}, one after the other",
        ],
        mistakes={
            "the latency is missing: each message takes it": (n - 1) * message,
            "the latency is counted once: each of the N − 1 messages takes it": alpha / 1000 + (n - 1) * message,
            "that is N messages: a rank has its own shard already": n * (alpha / 1000 + message),
            "that is one message: the ring needs N − 1": alpha / 1000 + message,
            "16 bits are 2 bytes, not 4": (n - 1) * (alpha / 1000 + 2 * message),
            "each message has a shard, 1/N of the weights": (n - 1) * (alpha / 1000 + n * message),
            "that is an all-reduce: a gather is half of it": 2 * answer,
            "bytes, not elements: each has 2": (n - 1) * (alpha / 1000 + message / 2),
        },
        tol=0.005,
    )


def _bandwidth_question(rng) -> Question:
    m, n, c = rng.choice([60, 100, 200]), rng.choice([8, 16, 64]), rng.choice([5, 8, 20])
    answer = 2 * m * (n - 1) / n / c
    return Question(
        text=f"A unit of {m} million parameters, weights in 16 bits, {n} ranks. In forward it computes for {c} ms. From which bandwidth on, in GB/s in each direction, is the gather of the next one hidden behind that? Latency counts for nothing.",
        answer=answer,
        unit="GB/s",
        working=[
            f"what a rank sends   (N−1)/N × 2 bytes × {m} million = {2 * m * (n - 1) / n:g} MB",
            f"in the time         {c} ms",
            f"bandwidth           {2 * m * (n - 1) / n:g} MB / {c} ms",
        ],
        mistakes={
            "(N−1)/N is missing: what a rank owns it does not send to itself": 2 * m / c,
            "16 bits are 2 bytes, not 4": 2 * answer,
            "that is elements: each has 2 bytes": answer / 2,
            "sharding does not divide what travels by N: a rank receives all that it does not own": 2 * m / n / c,
            "that is 8 times as much, gigabits: a byte has 8 bits": 8 * answer,
            "gather and reduction are counted: forward has the gather alone": 3 * answer,
        },
        tol=0.005,
    )


def _depth_question(rng) -> Question:
    m, d, L = rng.choice([150, 200, 400, 500]), rng.choice([2, 3, 4]), rng.choice([24, 40, 80])
    answer = 2 * m * (d + 1) / 1000
    return Question(
        text=f"{L} units of {m} million parameters each, weights in 16 bits, {d} units ahead: how many GB of full weights does a rank hold at most, in forward?",
        answer=answer,
        unit="GB",
        working=[
            f"one unit    2 bytes × {m} million = {2 * m / 1000:g} GB",
            f"there       the one that computes, and {d} ahead of it: {d + 1}",
        ],
        mistakes={
            "the unit that computes is there as well": 2 * m * d / 1000,
            "that is one unit: those ahead are there as well": 2 * m / 1000,
            "16 bits are 2 bytes, not 4, and gradients come in backward": 2 * answer,
            "that is parameters: each has 2 bytes": answer / 2,
            "that is the whole model": 2 * m * L / 1000,
            "a unit that has computed is freed before the next is asked for": 2 * m * (d + 2) / 1000,
        },
        tol=0.005,
    )


# --- 7. find the bug ----------------------------------------------------------------------------------------------------------


@bug(
    "prefetch.find_the_bug",
    call="forward_ahead(units, x, depth)",
    points=2,
    hints=[
        "Write down the list `asked` for three units and depth 1, line by line. Whom does each turn wait for, and who computes then?",
        "pop() takes the last element of a list, what was asked for last: the next unit. On a link that keeps the order, everything asked for before has then arrived as well. Which of the gathers has had a computing to hide behind?",
        "Each unit waits until the weights of the units after it are there, too. asked.pop(0) takes what was asked for first; or leave the list alone, and wait for the unit itself: unit.wait().",
    ],
    options={
        "a": "a rank sends more bytes than without prefetch",
        "b": "the weights of more than depth + 1 units take memory at one moment",
        "c": "a unit begins to compute only when the weights of the units asked for after it have arrived as well",
        "d": "in the second step a unit computes with the weights of the first",
        "e": "the gathers of two ranks do not pair up: one rank asks for unit 1 while the other asks for unit 0",
    },
    observed="c",
    why={
        "a": "each unit is taken from `coming` once, and so it is gathered once",
        "b": "one unit is asked for in each turn, and one is freed in each: depth + 1 at most",
        "d": "each call asks for all units anew, and keeps nothing from the last one",
        "e": "what is asked for depends on the list alone, which is equal on all ranks",
    },
)
def find_the_bug(mended, expect):
    """what one would measure; outputs on 2 and 3 ranks; which weights are there and which on their way while each unit computes, depths 1 and 2; bytes sent, memory"""
    for depth, widths, n in ((1, (2, 3, 4, 2), 2), (2, _SMALL, 2), (1, _SMALL, 3), (2, (2, 3), 2)):
        count = len(widths) - 1
        text = f"{count} unit{'s' * (count > 1)}, depth={depth}"
        outcomes = _forwards(expect, text, mended, widths, n, (depth,))
        _check_forwards(
            expect, outcomes, widths, lambda i, count=count, depth=depth: list(range(i + 1, min(i + 1 + depth, count))), depth + 1,
            "while a unit computes, the units ahead are on their way and not waited for", _mended_otherwise,
        )  # fmt: skip


def _mended_otherwise(kind: str) -> str:
    if kind == "waited":
        return "the units ahead are still waited for before this one computes: wait for this one alone"
    if kind == "none":
        return "less is asked for ahead than before: which gathers are issued, and when, was right"
    return ""
