"""The checks of exercises/00_collectives.ipynb.

Inputs are integers in floats: rank r brings 10^r times one digit an element, so that the digits of a sum say whose values
are in it. The digits are drawn anew for each check. Exercises 1 to 4 turn to the left: rank r sends to r - 1 and receives
from r + 1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import SystemRandom

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minizero.course import Finding, Question, bug, exercise, number
from minizero.course.expect import Expect, Outcome
from minizero.parts import calls

# --- 1. which chunk, in which step -----------------------------------------------------------------


@exercise(
    "collectives.ring_step",
    call="ring_step(rank, step, world_size)",
    hints=[
        "Begin at the end: which chunk arrives at rank r in the last step, N − 2? Which one arrived a step before that, if rank r "
        "passes on what it receives, and its right neighbour does the same?",
        "Two invariants fix everything: what rank r receives in step s, rank r + 1 sends in step s; and what a rank receives in step s "
        "it sends in step s + 1. So the numbers go up by 1 with the step, and all of it is modulo world_size.",
        "The chunk received in step s is rank + step + 2, modulo world_size: in step N − 2 that is rank + N, which is rank. The chunk "
        "sent is the one before it.",
    ],
)
def ring_step(answer, expect):
    """chunk numbers of all ranks and steps on 2 to 5 ranks: neighbours agree, and chunk r ends on rank r"""
    cases = [(n, r, s) for n in (2, 3, 4, 5) for r in range(n) for s in range(n - 1)]
    answers = dict(zip(cases, expect.call(_ring_steps, answer, cases), strict=True))
    usual = _RING_MISTAKES | {f"{n} ranks are taken for granted: it has to be modulo world_size": _always(n) for n in (2, 3, 4, 5)}
    cause = next((text for text, wrong in usual.items() if answers == {c: wrong(*c) for c in cases}), "")

    def finding(n, r, s, rule, expected="", got="", so=""):
        expect.case(world_size=n, rank=r, step=s)
        raise Finding(rule, expected, got, so, cause)

    for n, r, s in cases:
        pair = answers[n, r, s]
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(type(chunk) is int for chunk in pair):
            finding(n, r, s, "the answer is a pair of chunk numbers", "(send, receive), two ints", repr(pair))
        if not all(0 <= chunk < n for chunk in pair):
            cause = cause or "the modulo is missing: after the last chunk comes chunk 0"
            finding(n, r, s, f"with {n} ranks the chunks are 0 to {n - 1}", got=f"(send, receive) = {pair}")
        send, receive = pair
        right = (r + 1) % n
        theirs = answers[n, right, s][0]
        if s == n - 2 and receive != r:
            finding(
                n, r, s, "the last chunk to arrive at a rank is its own", f"rank {r} receives chunk {r}", f"chunk {receive}",
                f"chunk {receive} is complete on rank {r}, and nobody looks for it there",
            )  # fmt: skip
        if s > 0 and send != answers[n, r, s - 1][1]:
            before = answers[n, r, s - 1][1]
            finding(
                n, r, s, "a rank passes on the chunk that it received in the step before",
                f"rank {r} sends chunk {before}", f"chunk {send}", "the sum that was begun goes no further",
            )  # fmt: skip
        if receive != theirs:
            finding(
                n, r, s, "a rank receives what its right neighbour sends",
                f"rank {r} receives chunk {theirs} (rank {right} sends it)", f"chunk {receive}",
                f"rank {r} adds rank {right}'s chunk {theirs} to its own chunk {receive}",
            )  # fmt: skip


def _ring_steps(answer, cases):
    return [_as_pair(answer(r, s, n)) for n, r, s in cases]


def _always(world_size: int) -> Callable[[int, int, int], tuple[int, int]]:
    return lambda n, r, s: ((r + s + 1) % world_size, (r + s + 2) % world_size)


def _as_pair(pair):
    return tuple(pair) if isinstance(pair, list) else pair


# What is usually given instead of (r + s + 1, r + s + 2). An answer is one of these if it is so for all ranks and steps.
_RING_MISTAKES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "these are the chunks of a ring that turns to the right, as the lesson's does": lambda n, r, s: ((r - s - 1) % n, (r - s - 2) % n),
    "send and receive are swapped": lambda n, r, s: ((r + s + 2) % n, (r + s + 1) % n),
    "the trip begins one chunk too early, as an all-gather does: there a rank sends its own chunk first": (
        lambda n, r, s: ((r + s) % n, (r + s + 1) % n)
    ),
    "the trip begins one chunk too late": lambda n, r, s: ((r + s + 2) % n, (r + s + 3) % n),
    "the step is not in it: a rank would send one and the same chunk every time": (
        lambda n, r, s: ((r + 1) % n, (r + 2) % n)
    ),
    "the steps run backwards: what arrives in a step is sent in the next": (
        lambda n, r, s: ((r - s - 1) % n, (r - s) % n)
    ),
}


# --- what a program brings back, and what the wire must look like -----------------------------------


@dataclass
class _Message:
    """A send or a recv, as a rank issued it. Places are positions in the rank's list of events; None: it never came to that."""

    op: str
    numel: int
    peer: int | None
    issued: int
    done: int | None = None
    touched: str = ""  # what the rank did to the tensor meanwhile


class _Wire(TorchDispatchMode):
    """Listens to a rank's messages, and to what it does with their tensors while they are under way.

    The last rank hesitates before each send, so that reading too early shows.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.messages: list[_Message] = []
        self._rank, self._world_size = rank, world_size
        self._events, self._of_call = 0, {}
        self._tensors: list[tuple[_Message, Tensor]] = []

    def issued(self, call: calls.Call) -> None:
        if call.peer is not None and call.peer not in range(self._world_size):
            raise ValueError(f"there is no rank {call.peer}: {self._world_size} ranks are numbered from 0")
        if call.op == "send" and self._rank == self._world_size - 1:
            time.sleep(0.02)
        self._events += 1
        message = _Message(call.op, call.numel, call.peer, self._events)
        self.messages.append(message)
        self._of_call[id(call)] = message, call  # holds the call, so that its id stays its own

    def waiting(self, call: calls.Call) -> None:
        pass

    def done(self, call: calls.Call) -> None:
        self._events += 1
        self._of_call[id(call)][0].done = self._events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            if func._opname in ("send", "recv_", "recv_any_source_"):
                self._tensors += [(self.messages[-1], tensor) for tensor in args[0]]
        elif not func._opname.startswith(_SHAPE_ONLY):
            self._look(func._schema, args, kwargs or {})
        return func(*args, **kwargs or {})

    def _look(self, schema, args, kwargs) -> None:
        """A view reads nothing and writes nothing. What is being sent may be read, but not written."""
        under_way = [(message, tensor) for message, tensor in self._tensors if message.done is None and not message.touched]
        if not under_way:
            return
        for argument, value in zip(schema.arguments, (*args, *[None] * len(schema.arguments)), strict=False):
            value = kwargs.get(argument.name, value)
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            if alias is not None and not writes:
                continue
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                for message, travelling in under_way if isinstance(tensor, Tensor) else ():
                    if (writes or message.op == "recv") and _overlap(tensor, travelling):
                        message.touched = "writes" if writes else "reads"


_SHAPE_ONLY = ("empty", "new_", "zeros_like", "ones_like", "full_like")  # these ask a tensor for its shape and dtype


def _overlap(a: Tensor, b: Tensor) -> bool:
    def last(x: Tensor) -> int:
        return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) * x.element_size()

    return bool(a.numel() and b.numel()) and a.data_ptr() <= b.data_ptr() + last(b) and b.data_ptr() <= a.data_ptr() + last(a)


class _Kept(calls.WatchedWork):
    """A work that outlives the run. gloo withdraws a message whose work was dropped, and its receiver waits for ever:
    so the run comes to its end, and the finding names the work."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _alive.append(self)


_alive: list[_Kept] = []


@contextlib.contextmanager
def _listening() -> Iterator[list[_Message]]:
    calls.watch()
    wire = _Wire(dist.get_rank(), dist.get_world_size())
    calls.listeners.insert(0, wire)  # before the journal: a message to a rank that does not exist goes no further
    watched, calls.WatchedWork = calls.WatchedWork, _Kept
    _alive.clear()
    try:
        with wire:
            yield wire.messages
    finally:
        calls.WatchedWork = watched
        calls.listeners.remove(wire)


def _call_on_wire(rank: int, answer: Callable, make: Callable[[int], Tensor]) -> dict:
    """The program of every check here: answer(make(rank)), listened to."""
    x = make(rank)
    memory = x.detach()  # sees what is written into x; not what x is bound to, or x.data
    with _listening() as messages:
        returned = answer(x)
    return {"returned": returned, "x": x, "memory": memory, "messages": messages}


def _draw(world_size: int, numel: int, among: Sequence[int] = range(1, 10)) -> list[list[int]]:
    """Different digits for a rank's elements, and others in each check: no answer can know them."""
    return [SystemRandom().sample(among, numel) for _ in range(world_size)]


def _values(rank: int, digits: list[list[int]], shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.tensor(digits[rank]) * 10**rank).to(dtype).reshape(shape)


_PARTNERS = "the two ends do not name each other: send to (rank − 1) % world_size, receive from (rank + 1) % world_size"
_CHUNKS = "a chunk number runs past the last chunk: is it taken modulo world_size, and are there world_size chunks?"


def _causes(world_size: int) -> dict[str, str]:
    """What an error or a deadlock means, when everybody runs the same ring. On two ranks both neighbours are the same rank."""
    circle = "all ranks receive (or all send) before anyone does the other: start both with isend and irecv, then wait for both"
    return {
        "has finished without": "one rank makes fewer steps than another: each makes N − 1, in each of them one send and one receive",
        "deadlock": circle if world_size == 2 else _PARTNERS,
        "there is no rank": _PARTNERS,
        "index out of range": _CHUNKS,
        "do not fit": "the tensor that receives is as large as what is sent: one chunk",
        "has no attribute 'wait'": "dist.send and dist.recv have waited already and return no work; isend and irecv do",
        "does not support item assignment": "chunk() returns a tuple, and `chunks[i] += …` assigns to it: write chunks[i].add_(…)",
    }


def _on_2_and_3_ranks(
    expect: Expect,
    answer: Callable,
    numels: tuple[int, int],
    judge: Callable[[list[Outcome], list[Tensor]], None],
    causes: Callable[[int], dict[str, str]],
    among: Sequence[int] = range(1, 10),
) -> None:
    """Run it on 2 ranks and then on 3, and judge 3 before 2.

    On two ranks a deadlock has one cause, for both neighbours are the same rank. On three a wrong value has one.
    """
    tried = []
    for world_size, numel in zip((2, 3), numels, strict=True):
        figures = {"world_size": world_size, "numel": numel}
        expect.case(**figures)
        make = partial(_values, digits=_draw(world_size, numel, among), shape=(numel,))
        outcomes = expect.run(_call_on_wire, world_size, answer, make, causes=causes(world_size))
        tried.append((figures, outcomes, [make(rank) for rank in range(world_size)]))
    for figures, outcomes, inputs in reversed(tried):
        expect.case(**figures)
        judge(outcomes, inputs)


def _judge(
    expect: Expect,
    outcomes: list[Outcome],
    sizes: Sequence[int],
    whole: int,
    values: Callable[[Outcome], None],
    to_left: bool = True,
) -> None:
    """All that is asked of a ring. The way comes before the values where it explains them, and after them where it does not.

    sizes: numel of each send that the ring makes; whole: numel of the tensor that it is about.
    """
    for outcome in outcomes:
        _check_messages(expect, outcome)
        sends = [m.numel for m in _split(outcome)[0]]
        if len(sends) < len(sizes):
            _check_sizes(expect, outcome, sizes, whole)
        if sends == list(sizes):
            if to_left:
                _check_neighbour(expect, outcome, len(outcomes))
            _check_order(expect, outcome)
    for outcome in outcomes:
        values(outcome)
    for outcome in outcomes:
        _check_sizes(expect, outcome, sizes, whole)


def _check_messages(expect: Expect, outcome: Outcome) -> None:
    """No collectives; and every message is waited for. Where it is not, values are right or wrong by chance."""
    rank, messages = outcome.rank, outcome.value["messages"]
    foreign = [op for op in outcome.count if op not in ("send", "recv")]
    expect.that(
        not foreign,
        rule="it is built from send and receive alone",
        expected="isend and irecv",
        got=f"rank {rank} issued {', '.join(foreign)}",
        cause=f"{foreign[0]} does for you what you are to build" if foreign else "",
    )
    still_open = [message for message in messages if message.done is None]
    ops = sorted({f"i{message.op}" for message in still_open})
    so = "until its wait returns, a tensor belongs to the network: what is in it is chance"
    if ops == ["isend"]:
        so = "gloo withdraws a message whose work is dropped, and the other end waits for ever"
    expect.that(
        not still_open,
        rule="every message is waited for before the function returns",
        got=f"rank {rank} left open: {', '.join(f'{m.op} of {_elements(m.numel)}' for m in still_open)}",
        so=so,
        cause=f"keep the work that {' and '.join(ops)} return{'s' * (len(ops) == 1)}, and call its wait()",
    )
    for k, message in enumerate(messages):
        _check_untouched(expect, rank, message, sum(each.op == message.op for each in messages[:k]))


def _check_untouched(expect: Expect, rank: int, message: _Message, k: int) -> None:
    """`k`: which of its kind the message is."""
    arriving = message.op == "recv"
    expect.that(
        not message.touched,
        rule="from its start until its wait returns, a tensor belongs to the network",
        expected="what arrives is read after the wait" if arriving else "what is sent is written after the wait",
        got=f"rank {rank} {message.touched} what {f'receive {k} brings' if arriving else f'send {k} takes along'}, before its wait",
        so="it is half old, half new, or not there yet" if arriving else "the other rank gets old values or new ones, by chance",
        cause="a buffer is used before its wait(): wait first, then add or copy"
        if arriving
        else "a tensor is overwritten while it is being sent, before its wait(): wait for the send first, or write elsewhere",
    )


def _check_order(expect: Expect, outcome: Outcome) -> None:
    """In a ring a rank sends what has just arrived."""
    sends, receives = _split(outcome)
    for k, (arrival, send) in enumerate(zip(receives, sends[1:], strict=False)):
        expect.that(
            arrival.done < send.issued,
            rule="a chunk is passed on when it has arrived",
            expected=f"rank {outcome.rank} waits for receive {k}, then starts send {k + 1}",
            got=f"send {k + 1} starts while receive {k} is open",
            so="it sends what happens to be in the buffer",
            cause="wait inside the loop: the next step needs what this one brings",
        )


def _check_sizes(expect: Expect, outcome: Outcome, sizes: Sequence[int], whole: int) -> None:
    """How many sends of how many elements."""
    sends, want = [m.numel for m in _split(outcome)[0]], list(sizes)
    cause = ""
    if not sends:
        cause = "nothing goes out through dist.isend or dist.send"
    elif max(sends) >= whole > max(want):
        cause = f"whole tensors of {whole} elements travel: cut the tensor into world_size chunks, and send one chunk a step"
    elif sends[: len(want)] == want:
        cause = "everything is where it belongs before the last step: one step more brings nothing new"
    elif len(sends) < len(want):
        cause = "steps are missing: one trip round N ranks takes N − 1 of them, and an all-reduce makes two trips"
    elif len(sends) == len(want):
        cause = "there is more padding than needed: up to the next multiple of world_size is enough"
    expect.that(
        sends == want,
        rule="a ring sends one chunk in each step",
        expected=f"rank {outcome.rank} sends {_count(want)}",
        got=_count(sends),
        so=f"it sends {_elements(sum(sends))}, and {sum(want)} would do" if sum(sends) > sum(want) else "",
        cause=cause,
    )


def _check_neighbour(expect: Expect, outcome: Outcome, world_size: int) -> None:
    """All sends go to the left."""
    left, right = (outcome.rank - 1) % world_size, (outcome.rank + 1) % world_size
    peers = sorted({m.peer for m in _split(outcome)[0]})
    expect.that(
        peers == [left],
        rule="a rank sends to its left neighbour only",
        expected=f"rank {outcome.rank} sends to rank {left}",
        got=f"to rank {' and rank '.join(map(str, peers))}",
        cause="this ring turns to the right, as the lesson's does"
        if peers == [right]
        else "every rank sends to every other: as many bytes, but it is no ring",
    )


def _split(outcome: Outcome) -> tuple[list[_Message], list[_Message]]:
    messages = outcome.value["messages"]
    return [m for m in messages if m.op == "send"], [m for m in messages if m.op == "recv"]


def _count(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} × {_elements(sizes[0])}"
    return f"{' + '.join(map(str, sizes))} elements" if sizes else "nothing"


def _elements(count: int) -> str:
    return f"{count} element{'s' * (count != 1)}"


# --- 2. reduce-scatter -----------------------------------------------------------------------------


@exercise(
    "collectives.ring_reduce_scatter",
    call="ring_reduce_scatter(x)",
    points=2,
    hints=[
        "A chunk starts at one rank and makes N − 1 hops. What does each rank on its way do to it, before it passes it on?",
        "x.chunk(world_size) gives views into x; torch.empty_like(chunks[0]) a buffer for what arrives. ring_step says which chunk goes "
        "and which comes. Invariant: after step s a rank's copy of the chunk that it received holds s + 2 ranks' values, and that copy is what it sends next.",
        "For each step below world_size − 1: ask ring_step for the two numbers; isend that chunk to the left, irecv the buffer from the right, "
        "wait for both; add the buffer to the chunk that was received. In the end return chunk number rank.",
    ],
)
def ring_reduce_scatter(answer, expect):
    """chunk r of the sum on rank r, for 2 and 3 ranks; N − 1 sends of one chunk, to the left, each waited for"""

    def judge(outcomes: list[Outcome], inputs: list[Tensor]) -> None:
        n, numel = len(inputs), inputs[0].numel()
        _judge(expect, outcomes, [numel // n] * (n - 1), numel, partial(_check_chunk, expect, inputs=inputs))

    _on_2_and_3_ranks(expect, answer, (4, 9), judge, _causes)


def _check_chunk(expect: Expect, outcome: Outcome, inputs: list[Tensor]) -> None:
    n, rank, got = len(inputs), outcome.rank, outcome.value["returned"]
    copies = [x.chunk(n)[rank] for x in inputs]  # everyone's values of the chunk that this rank owns
    own, from_right, from_left = copies[rank], copies[(rank + 1) % n], copies[(rank - 1) % n]
    sums = sum(inputs).chunk(n)
    expect.that(
        not isinstance(got, Tensor) or got.numel() < inputs[0].numel(),
        rule="a rank returns its own chunk of the sum",
        expected=f"rank {rank} returns {_elements(sums[rank].numel())}",
        got=f"{_elements(got.numel())}" if isinstance(got, Tensor) else "",
        cause="all of x is returned: the other chunks in it are leftovers",
    )
    # What x has become tells more than what is returned, for those who add in place.
    mistakes = {cause: got for cause, xs in _wrong_rings(inputs) if torch.equal(outcome.value["x"], xs[rank])}
    mistakes |= {
        "this rank's own values alone: what arrived went to another chunk, or was read before its wait": own,
        "what arrived has replaced the rank's own values: add it to them": from_left,
        "only the right neighbour's own values were added: it must pass on its sum so far": own + from_right,
        "what arrived was added twice": 2 * sums[rank] - own,
        "divided by world_size: the sum is asked for, not the mean": sums[rank] / n,
    }
    for k in set(range(n)) - {rank}:
        mistakes[f"this is chunk {k}, complete: the last chunk to arrive must be number rank"] = sums[k]
        mistakes[f"this is chunk {k}, which this rank sent away: return number rank"] = inputs[rank].chunk(n)[k]
    expect.equal(
        got,
        sums[rank],
        of=f"chunk {rank} on rank {rank}",
        rule="rank r returns chunk r, summed over all ranks",
        mistakes=mistakes,
    )


def _wrong_rings(inputs: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """A mistake, and what it makes of each rank's x, if it adds in place."""
    n = len(inputs)
    other_chunk = "what arrives is added to the chunk that is sent: it belongs to the one that is received"
    for cause, pair in (_RING_MISTAKES | {other_chunk: lambda n, r, s: ((r + s + 1) % n,) * 2}).items():
        xs = [x.clone() for x in inputs]
        for step in range(n - 1):
            pairs = [pair(n, rank, step) for rank in range(n)]
            sent = [x.chunk(n)[send].clone() for x, (send, _) in zip(xs, pairs, strict=True)]
            for rank, (_, receive) in enumerate(pairs):
                xs[rank].chunk(n)[receive].add_(sent[(rank + 1) % n])
        yield cause, xs


# --- 3. all-gather ---------------------------------------------------------------------------------


@exercise(
    "collectives.ring_all_gather",
    call="ring_all_gather(shard)",
    points=2,
    hints=[
        "Rank r has chunk r and nothing else. Which chunk can it send in step 0, and which in step 1, when something has arrived?",
        "Make the result first, shard.new_empty(world_size * shard.numel()), and cut it with .chunk(world_size): views, so an irecv into one of them puts what "
        "arrives in its place. Invariant: after step s rank r has the chunks rank … rank + s + 1, modulo world_size.",
        "Copy the shard into chunk number rank. For each step below world_size − 1: isend chunk rank + step to the left, irecv chunk rank + step + 1 from the "
        "right (both modulo world_size), wait for both. Return the whole.",
    ],
)
def ring_all_gather(answer, expect):
    """all chunks in their places on every rank, for 2 and 3 ranks; N − 1 sends of one chunk, to the left, each waited for"""

    def judge(outcomes: list[Outcome], shards: list[Tensor]) -> None:
        n, size = len(shards), shards[0].numel()
        _judge(expect, outcomes, [size] * (n - 1), n * size, partial(_check_whole, expect, shards=shards))

    _on_2_and_3_ranks(expect, answer, (1, 2), judge, _causes)


def _check_whole(expect: Expect, outcome: Outcome, shards: list[Tensor]) -> None:
    n, rank, got = len(shards), outcome.rank, outcome.value["returned"]
    left, right = (rank - 1) % n, (rank + 1) % n
    unwritten = isinstance(got, Tensor) and bool(got.isnan().any())
    nothing = torch.full_like(shards[0], torch.nan if unwritten else 0)  # what torch.empty shows in a check

    def whole(chunk: Callable[[int], Tensor]) -> Tensor:
        return torch.cat([chunk(k) for k in range(n)])

    def besides(chunk: Callable[[int], Tensor]) -> Tensor:
        return whole(lambda k: shards[rank] if k == rank else chunk(k))

    expect.equal(
        got,
        whole(lambda k: shards[k]),
        of=f"the result on rank {rank}",
        rule="every rank returns all chunks, chunk r at place r",
        mistakes={
            "the chunks are in the order of their arrival, the own one first": whole(lambda k: shards[(rank + k) % n]),
            "the chunks are in the order of their arrival, the own one last": whole(lambda k: shards[(right + k) % n]),
            "what arrives in step s is chunk rank + s + 1, not rank − s − 1": (
                besides(lambda k: shards[(2 * rank - k) % n])
            ),
            "the neighbour sent its own chunk in every step: from step 1 on, pass on what has arrived": (
                besides(lambda k: shards[right])
            ),
            "one buffer stands at all places: what arrived last is in each of them": besides(lambda k: shards[left]),
            "nothing that arrived is in it: was it read before wait, or never stored?": besides(lambda k: nothing),
            "the rank's own chunk is missing: copy the shard to its place": (
                whole(lambda k: nothing if k == rank else shards[k])
            ),
            "ranks sent what they did not have: in step 0 a rank has its own chunk and no other": whole(
                lambda k: nothing
            ),
            "the own chunk alone is returned": shards[rank],
        },
    )
    expect.equal(
        outcome.value["memory"],
        shards[rank],
        of=f"the shard of rank {rank}",
        rule="the shard stays as it is: it is the caller's",
        so="whoever keeps it, as ZeRO-3 keeps weights, has lost it",
        mistakes={"what arrived was received into it: receive into the result, or into a buffer": outcome.value["memory"]},
    )


# --- 4. all-reduce ---------------------------------------------------------------------------------


@exercise(
    "collectives.all_reduce",
    call="all_reduce(x)",
    points=2,
    hints=[
        "Your two halves want a flat tensor that N divides. x is neither. What could stand at the end of it that changes no sum?",
        "x.new_zeros(padded) has x's dtype and device; x.flatten() is flat. Invariant: every rank pads to the same number, "
        "the next multiple of world_size. x.copy_(…) writes into the caller's tensor, `x = …` does not.",
        "padded = the smallest multiple of world_size that is at least x.numel(). Fill the first x.numel() of x.new_zeros(padded) with x.flatten(); reduce-scatter it, "
        "all-gather the chunk, cut to x.numel(), view as x.shape, and copy into x.",
    ],
)
def all_reduce(answer, expect):
    """x itself on 2 and 3 ranks: 4, 7 and 2 elements, float64 and bfloat16; 2(N − 1) sends of one padded chunk, to the left"""
    cases = (
        (2, (4,), torch.float32, range(1, 10)),
        (3, (7,), torch.float32, range(1, 10)),
        (3, (2, 2), torch.float64, range(1, 10)),
        (3, (2,), torch.bfloat16, (1, 2)),  # whole numbers up to 256 are exact
    )
    for world_size, shape, dtype, among in cases:
        name = str(dtype).removeprefix("torch.")
        expect.case(world_size=world_size, shape=shape, dtype=dtype)
        digits = _draw(world_size, torch.Size(shape).numel(), among)
        make = partial(_values, digits=digits, shape=shape, dtype=dtype)
        causes = _causes(world_size) | _PADDING
        outcomes = expect.run(_call_on_wire, world_size, answer, make, causes=causes)
        inputs = [make(rank) for rank in range(world_size)]
        numel = inputs[0].numel()
        sizes = [-(-numel // world_size)] * (2 * (world_size - 1))
        for outcome in outcomes:
            sent = sorted({op.dtype for op in outcome.ops})
            expect.that(
                sent in ([], [name]),
                rule="what travels has the dtype of x",
                expected=name,
                got=", ".join(sent),
                so="values lose digits on the way",
                cause="torch.zeros makes float32, and .float() too: x.new_zeros takes the dtype of x"
                if sent == ["float32"]
                else "",
            )
        _judge(expect, outcomes, sizes, numel, partial(_check_sum, expect, inputs=inputs))


_PAD_FIRST = "x.chunk(n) gives n chunks of one size only where n divides the number of elements: pad x first"
_CUT_AFTER = "the sum is flat and padded: cut it to x.numel(), then view it as x.shape"
_PADDING = {
    "index out of range": _PAD_FIRST,
    "output with shape": _PAD_FIRST,
    "do not fit": _PAD_FIRST,
    "died": _PAD_FIRST,
    "must match the size of tensor": _CUT_AFTER,
    "is invalid for input of size": _CUT_AFTER,
}


def _check_sum(expect: Expect, outcome: Outcome, inputs: list[Tensor]) -> None:
    n, own = len(inputs), inputs[outcome.rank]
    total, numel = sum(inputs), own.numel()
    in_chunks = numel // n * n
    cut = torch.cat([total.flatten()[:in_chunks], own.flatten()[in_chunks:]]).reshape(own.shape)
    returned = outcome.value["returned"]
    in_result = isinstance(returned, Tensor) and returned.shape == total.shape and torch.equal(returned, total)
    unchanged = "x still holds this rank's own values: write the sum into it with x.copy_(…); `x = …` only renames"
    if in_result:
        unchanged = "the sum is returned, and x is as it was: write it into x with x.copy_(…)"
    expect.equal(
        outcome.value["x"],
        total,
        of=f"x on rank {outcome.rank}",
        rule="x itself becomes the sum over all ranks",
        mistakes={
            unchanged: own,
            f"summed are only the first {in_chunks} elements: numel // world_size drops the remainder, so pad x first": cut,
            "the sum was added to x, which is in it already: copy it": own + total,
            "divided by world_size: the sum is asked for, not the mean": total / n,
        },
    )
    _check_memory(expect, outcome, total)


def _check_memory(expect: Expect, outcome: Outcome, want: Tensor) -> None:
    """x was written into, not given another memory."""
    expect.equal(
        outcome.value["memory"],
        want,
        of=f"what a view of x, made before, shows on rank {outcome.rank}",
        rule="x changes in place: a view of it that was made before sees the new values",
        so="an optimizer that holds the old memory never sees the sum",
        mistakes={"x.data = … gives x another memory: x.copy_(…) writes into its own": outcome.value["memory"]},
    )


# --- 5. say the number -----------------------------------------------------------------------------


@number(
    "collectives.number",
    hints=[
        "How many trips does a piece of gradient make through the ring, and what share of the tensor does a rank send on each?",
        "Bytes of the gradients = parameters × bytes each (2 in fp16 and bf16, 4 in fp32). A rank sends (N − 1)/N of them on each of two trips. Time = bytes / bandwidth.",
        "2 × (N − 1)/N × parameters × bytes each, divided by the bytes per second that a rank can send, times 1000 for milliseconds.",
    ],
)
def all_reduce_time(rng):
    """the least time of a ring all-reduce, in ms"""
    billions, n = rng.choice([0.5, 1, 3, 7, 13]), rng.choice([6, 12, 24, 32, 64])
    dtype, itemsize = rng.choice([("fp16", 2), ("bf16", 2), ("fp32", 4)])
    bandwidth = rng.choice([12.5, 25, 50, 100])
    gigabytes = billions * itemsize
    sent = 2 * gigabytes * (n - 1) / n
    ms = sent / bandwidth * 1000
    whole = gigabytes / bandwidth * 1000  # the time to send all gradients once
    trip = "one of the two trips (reduce-scatter, all-gather)"
    if itemsize == 2:  # who forgets them is off by as much as who forgets a trip
        missing = {
            f"half of it: {trip} is missing, or the 2 bytes of {dtype}": ms / 2,
            f"a quarter of it: {trip} and the 2 bytes of {dtype} are missing": ms / 4,
        }
    else:
        missing = {
            f"half of it: {trip} is missing, or {dtype} was given 2 bytes instead of 4": ms / 2,
            f"elements were counted instead of bytes: {dtype} has 4 bytes": ms / 4,
        }
    mistakes = missing | {
        "a rank does not send its own chunk: each trip sends (N − 1)/N of the tensor": 2 * whole,
        "one trip is missing, and a rank does not send its own chunk: each trip sends (N − 1)/N": whole,
        "the naive ways send N − 1 tensors; in a ring a rank sends N − 1 chunks on each trip": (n - 1) * whole,
        "in a ring a rank sends 2(N − 1) chunks, not 2(N − 1) tensors": 2 * (n - 1) * whole,
        f"twice too much: {dtype} has {itemsize} bytes, and there are two trips": ms * 2,
        "that is in seconds": ms / 1000,
        "GB/s are bytes, not bits": ms * 8,
    }
    return Question(
        text=f"{billions:g} B parameters, gradients in {dtype}, {n} ranks, each can send {bandwidth:g} GB/s: "
        "how many ms does a ring all-reduce of all gradients take at least?",
        answer=ms,
        unit="ms",
        working=[
            f"gradients    {itemsize} bytes × {billions:g} B = {gigabytes:g} GB",
            f"each trip    {n - 1}/{n} × {gigabytes:g} GB = {sent / 2:.4g} GB sent by a rank",
            f"two trips    {sent:.4g} GB",
            f"time         {sent:.4g} GB / {bandwidth:g} GB/s × 1000",
        ],
        mistakes=mistakes,
    )


# --- 6. find the bug -------------------------------------------------------------------------------


@bug(
    "collectives.find_the_bug",
    call="average(x)",
    points=2,
    options={
        "a": "the run never ends: a rank waits for a chunk that nobody sends",
        "b": "each rank sends more than 2P(N − 1)/N elements",
        "c": "the three ranks hold different numbers",
        "d": "the three ranks hold the same numbers, and in each element one rank's contribution is missing",
        "e": "the numbers are right in one run and wrong in another",
    },
    observed="d",
    why={
        "a": "in each step a rank sends one chunk to the right and receives one from the left, and the chunk numbers of both ends agree",
        "b": "count the sends: N − 1 in the first loop and N − 1 in the second, each of P/N elements",
        "c": "right or wrong, chunk r is made on rank r, and the second loop brings that chunk to all others unchanged",
        "e": "each receive is complete before its buffer is read, and each send before the next step: nothing depends on timing",
    },
    hints=[
        "Follow one chunk on three ranks. What did the rank that sends it add to it before, and is that in what it sends?",
        "Two tensors: x as it came, and total, where sums grow. A chunk's second hop must carry the sum of two ranks. On two ranks there is no second hop.",
        "The first loop sends chunks of x, which nobody adds to. Send the chunk of total instead: it is not written while it is on its way, since that step adds to another chunk.",
    ],
)
def find_the_bug(mended, expect):
    """what one would measure; then the mean on 2 and 3 ranks, and 2(N − 1) sends of one chunk"""

    def judge(outcomes: list[Outcome], inputs: list[Tensor]) -> None:
        n, numel = len(inputs), inputs[0].numel()
        check_mean = partial(_check_mean, expect, inputs=inputs)
        _judge(expect, outcomes, [numel // n] * (2 * (n - 1)), numel, check_mean, to_left=False)

    agree = "the two ends no longer agree: in each step a rank sends to the right and receives from the left, one chunk each"
    _on_2_and_3_ranks(expect, mended, (2, 3), judge, lambda world_size: {"deadlock": agree}, among=(3, 6, 9))


def _check_mean(expect: Expect, outcome: Outcome, inputs: list[Tensor]) -> None:
    n, total = len(inputs), sum(inputs)
    own_chunks = torch.cat([x.chunk(n)[k] for k, x in enumerate(inputs)])  # of each rank the chunk that it owns
    one_short = total.clone()  # on three ranks: chunk k lacks what rank k + 1 brings, where its trip begins
    for k, chunk in enumerate(one_short.chunk(n)):
        chunk -= inputs[(k + 1) % n].chunk(n)[k]
    expect.equal(
        outcome.value["x"],
        total / n,
        of=f"x on rank {outcome.rank}",
        rule="x becomes the mean over all ranks",
        mistakes={
            "a rank is still missing: a chunk's second hop must carry the sum of two ranks": one_short / n,
            "what arrives is added into chunks, and total is what is copied out: it never sees the sums": own_chunks / n,
            "the sum is no longer divided by world_size": total,
            "x is as it came": inputs[outcome.rank],
        },
    )
    _check_memory(expect, outcome, total / n)
