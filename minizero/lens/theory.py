"""What each ZeRO stage must cost by arithmetic: bytes held, elements sent. Measurements are held against these numbers.

    stage        bytes per rank, mixed-precision Adam     elements sent per rank and step
    0  DDP       16Ψ                                      2Ψ (N−1)/N
    1  ZeRO-1    4Ψ + 12Ψ/N                               2Ψ (N−1)/N
    2  ZeRO-2    2Ψ + 14Ψ/N                               2Ψ (N−1)/N
    3  ZeRO-3    16Ψ/N                                    3Ψ (N−1)/N

Ψ = parameters (`numel`), N = ranks (`world_size`). Rajbhandari et al. 2020, sections 5 (memory) and 7 (communication).

Bytes and elements are exact: an int where the division comes out even, else the float nearest to the fraction.

Times come from the α–β model: a message of n bytes takes α + n/β seconds on a link of latency α and bandwidth β, see
seconds(); and schedule() plays a whole step of ZeRO-3, what computes and what travels, by the engine's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}

# Bytes per parameter: weights, gradients, Adam. In 16 bits Adam keeps an fp32 master beside its two moments.
_FP32 = {"params": 4, "grads": 4, "optimizer": 4 + 4}
_MIXED = {"params": 2, "grads": 2, "optimizer": 4 + 4 + 4}
_BYTES = {None: _FP32, "fp32": _FP32, "bf16": _MIXED, "fp16": _MIXED}

# A kind is sharded from this stage on.
_SHARDED_FROM = {"optimizer": 1, "grads": 2, "params": 3}


def memory(stage: int, numel: int, world_size: int, precision: str | None = "bf16") -> dict[str, float]:
    """Bytes of model states that one rank holds after backward, by kind: params, grads, optimizer (Adam).

    `precision` is None or "fp32" (4 + 4 + 8 bytes a parameter), "bf16" or "fp16" (2 + 2 + 12). Padding, Adam's step
    counts, activations and buffers are not in it. The sum of the values is the figure of table 1 of the ZeRO paper.
    """
    numel = _check(stage, numel, world_size)
    if precision not in _BYTES:
        raise ValueError(f"precision={precision!r}: choose one of {', '.join(map(repr, _BYTES))}")
    return {
        kind: _divide(bytes_each * numel, world_size if stage >= _SHARDED_FROM[kind] else 1)
        for kind, bytes_each in _BYTES[precision].items()
    }


def traffic(stage: int, numel: int, world_size: int, micro_steps: int = 1, no_sync: bool = False) -> float:
    """Elements that one rank sends for one optimizer step after `micro_steps` backwards.

    A reduce-scatter or an all-gather of Ψ elements sends Ψ(N−1)/N. With G micro-steps DDP needs 2G of them, ZeRO-1
    and ZeRO-2 G + 1 (the weights are gathered once, in the step), ZeRO-3 3G (the weights twice and the gradients once
    in each micro-step). With `no_sync`, DDP and ZeRO-1 accumulate locally and need 2; ZeRO-2 and ZeRO-3 refuse it.
    """
    numel = _check(stage, numel, world_size)
    if micro_steps < 1 or micro_steps != int(micro_steps):
        raise ValueError(f"micro_steps={micro_steps}: a step has a whole number of backwards, at least 1")
    if no_sync and stage >= 2:
        raise ValueError(
            f"no_sync=True at stage {stage}: a rank would have to keep the full gradients between two backwards, "
            f"and {STAGES[stage]} keeps only its shard of them. no_sync exists at stages 0 and 1"
        )
    collectives = {
        0: 2 if no_sync else 2 * micro_steps,
        1: 2 if no_sync else micro_steps + 1,
        2: micro_steps + 1,
        3: 3 * micro_steps,
    }
    return _divide(collectives[stage] * numel * (world_size - 1), world_size)


# op -> what a sender sends, in shares of P(N−1)/N and in whole tensors P.
_SENT = {
    "all_reduce": (2, 0),
    "reduce_scatter": (1, 0),
    "all_gather": (1, 0),
    "all_to_all": (1, 0),
    "scatter": (1, 0),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "gather": (0, 1),
    "send": (0, 1),
    "recv": (0, 0),
    "barrier": (0, 0),
}


def sent(op: str, numel: int, world_size: int, is_source: bool = True) -> float:
    """Elements that one rank sends for one logical collective, by the ring or the direct algorithm.

        all_reduce                                 2P(N−1)/N
        reduce_scatter, all_gather, all_to_all     P(N−1)/N
        scatter                                    P(N−1)/N at the source
        broadcast                                  P at the source
        reduce, gather                             P at every rank but the destination
        send                                       P
        recv, barrier                              0

    P = `numel` is the full tensor; for gather it is the piece that this rank gives. `is_source` says whether this rank
    gives anything where not all do: False at a broadcast's or a scatter's other ranks and at the destination of a
    reduce or a gather. A single rank sends nothing. Patarasuk and Yuan 2009 (ring all-reduce).
    """
    if op not in _SENT:
        raise ValueError(f"op={op!r}: choose one of {', '.join(_SENT)}")
    numel = _check(0, numel, world_size)
    if world_size == 1 or not is_source:
        return 0
    shares, wholes = _SENT[op]
    return _divide((shares * (world_size - 1) + wholes * world_size) * numel, world_size)


# op -> rounds of a ring: N−1 messages of P/N each, one after the other.
_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "scatter": 1}


def seconds(op: str, nbytes: float, world_size: int, bandwidth: float, latency: float = 0.0) -> float:
    """How long one logical collective of `nbytes` takes on links of `bandwidth` bytes/s in each direction and `latency` seconds.

        reduce_scatter, all_gather, all_to_all, scatter     (N−1)(α + P/(Nβ))
        all_reduce                                          2(N−1)(α + P/(Nβ))
        broadcast, reduce                                   (N−1)α + P/β         a pipelined chain
        gather                                              (N−1)(α + P/β)       P is what one rank gives
        send, recv                                          α + P/β
        barrier                                             2(N−1)α              an all-reduce of nothing

    α = latency, β = bandwidth, P = bytes of the full tensor. The Hockney model; Thakur et al. 2005 for the rings.
    """
    if op not in _SENT:
        raise ValueError(f"op={op!r}: choose one of {', '.join(_SENT)}")
    others = world_size - 1
    if not others:
        return 0.0
    if op in _ROUNDS:
        return _ROUNDS[op] * others * (latency + nbytes / world_size / bandwidth)
    if op == "barrier":
        return 2 * others * latency
    if op == "gather":
        return others * (latency + nbytes / bandwidth)
    return (others if op in ("broadcast", "reduce") else 1) * latency + nbytes / bandwidth


@dataclass
class Schedule:
    """A step as it was played. Times are seconds since its beginning."""

    events: list[tuple[str, str, float, float]] = field(default_factory=list)  # what, unit, start, end
    seconds: float = 0.0  # of the whole step
    exposed: float = 0.0  # in which the rank stood still and waited
    communication: float = 0.0  # in which its link was busy

    @property
    def hidden(self) -> float:
        """The share of the communication during which the rank computed."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def schedule(
    forward: Sequence[tuple[str, float]], backward: Sequence[tuple[str, float]], nbytes: Mapping[str, float], world_size: int,
    bandwidth: float, latency: float = 0.0, depth: int = 0, rest: float = 0.0, control: float = 0.0,
) -> Schedule:  # fmt: skip
    """One step of ZeRO-3 on ranks that are equally fast: the order of Zero3, and with `depth` that of Zero3Prefetch.

    forward, backward: (unit, seconds of computing) in the order in which a rank computes. A unit that encloses others
        appears again and again, and is held from the first time to the last
    nbytes: of each unit's full weights, and of its full gradients
    rest: seconds after backward, for the optimizer
    control: bytes of the all-reduce with which ranks agree on the step

    A link carries one collective after the other, in the order in which they were asked for.
    """
    play = _Play(nbytes, world_size, bandwidth, latency)
    play.phase("forward", forward, depth)
    play.phase("backward", backward, depth)
    play.land()
    play.wait(play.ask("reduce", "control", seconds("all_reduce", control, world_size, bandwidth, latency)), "control")
    play.compute("step", "model", rest)
    return play.result()


class _Play:
    """One rank: its clock, and the moment at which its link will be free."""

    def __init__(self, nbytes: Mapping[str, float], world_size: int, bandwidth: float, latency: float):
        self._nbytes, self._ring = nbytes, lambda size: seconds("all_gather", size, world_size, bandwidth, latency)
        self._now = self._free = 0.0
        self._out = Schedule()
        self._reducing: tuple[str, float] | None = None  # a reduction under way, and its end

    def result(self) -> Schedule:
        self._out.seconds = self._now
        return self._out

    def compute(self, what: str, unit: str, duration: float) -> None:
        self._out.events.append((what, unit, self._now, self._now + duration))
        self._now += duration

    def ask(self, what: str, unit: str, duration: float) -> float:
        """Its end."""
        begin = max(self._now, self._free)
        self._free = begin + duration
        self._out.events.append((what, unit, self._now, self._free))
        self._out.communication += duration
        return self._free

    def wait(self, end: float, unit: str) -> None:
        if end > self._now:
            self._out.events.append(("wait", unit, self._now, end))
            self._out.exposed += end - self._now
            self._now = end

    def land(self) -> None:
        if self._reducing is not None:
            unit, end = self._reducing
            self._reducing = None
            self.wait(end, unit)

    def _reduce(self, unit: str) -> None:
        self.land()
        self._reducing = unit, self.ask("reduce", unit, self._ring(self._nbytes[unit]))

    def phase(self, what: str, segments: Sequence[tuple[str, float]], depth: int) -> None:
        order = list(dict.fromkeys(unit for unit, _ in segments))
        last = {unit: i for i, (unit, _) in enumerate(segments)}
        ends: dict[str, float] = {}  # of gathers
        ready: str | None = None  # its gradients have not left
        done: set[str] = set()
        for i, (unit, duration) in enumerate(segments):
            if unit not in done:
                done.add(unit)
                place = order.index(unit)
                for wanted in order[place : place + 1 + depth]:
                    if wanted not in ends:
                        ends[wanted] = self.ask("gather", wanted, self._ring(self._nbytes[wanted]))
                if ready is not None:
                    self._reduce(ready)
                    ready = None
                self.wait(ends[unit], unit)
            self.compute(what, unit, duration)
            if what == "backward" and last[unit] == i:
                if ready is not None:
                    self._reduce(ready)
                ready = unit
        if ready is not None:
            self._reduce(ready)


def _check(stage: int, numel: int, world_size: int) -> int:
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: choose one of {', '.join(f'{s} ({name})' for s, name in STAGES.items())}")
    if numel < 0 or numel != int(numel):
        raise ValueError(f"numel={numel!r}: the number of parameters is a whole number, 0 or more")
    if world_size < 1 or world_size != int(world_size):
        raise ValueError(f"world_size={world_size!r}: the number of ranks is a whole number, at least 1")
    return int(numel)  # 7.5e9 is welcome, and exact from here on


def _divide(numerator: int, denominator: int) -> float:
    quotient, rest = divmod(numerator, denominator)
    return numerator / denominator if rest else quotient
