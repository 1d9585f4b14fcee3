"""What a rank did when: what it computed, what it sent, what it waited for.

    with record_timeline() as tl:
        engine.backward(engine(x, y))
    [(event.what, event.unit, event.end - event.start) for event in tl.events]
    tl.save_trace("rank0.json")          # opens in ui.perfetto.dev and in chrome://tracing

    gather, reduce              from the call to the moment at which the data had come, whoever waits for them then or later
    wait                        the rank stood still until they had
    forward, backward, step     computing; of ZeRO-3's units each its own, which contain those of the units inside them
    free                        a moment: the memory of gathered weights, or of a bucket, was given back
    copy                        to the host or back

Times are seconds of time.perf_counter(), which all ranks on one machine share. On a GPU they are taken on its streams, by
events, so that they tell when it did something and not when it was told to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from minizero.lens import link
from minizero.parts import calls, comm, spans

WHATS = ("gather", "forward", "backward", "reduce", "free", "step", "wait", "copy")

_ADDS_UP = ("all_reduce", "reduce", "reduce_scatter")  # the others only move data
_NO_DATA = ("barrier", "new_group")
_LANES = {"gather": "communication", "reduce": "communication", "copy": "host link"}


@dataclass
class Event:
    """Something that a rank did. `end` is None if it was still going on when the recording ended."""

    what: str
    unit: str  # the unit or bucket; "control", "buffers"; "model" for the whole; empty for plain calls
    start: float
    end: float | None
    nbytes: int = 0  # of the full tensor that travels, or copied
    rank: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.start if self.end is None else self.end) - self.start


@dataclass
class Timeline:
    """The events of one rank, in the order in which they began. It can be returned from a rank's function."""

    rank: int = 0
    events: list[Event] = field(default_factory=list)
    simulated: str = ""  # which link was simulated meanwhile

    def of(self, *whats: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event.what in whats]

    def segments(self, what: str) -> list[tuple[str, float]]:
        """(unit, seconds) in which this rank computed in its "forward" or "backward", in order: what theory.schedule() takes.
        Waiting is left out; all else between a unit's beginning and its end belongs to the innermost unit."""
        spans, waits = ([event for event in self.of(kind) if event.end is not None] for kind in (what, "wait"))
        marks = sorted({moment for span in spans for moment in (span.start, span.end)})
        found: list[tuple[str, float]] = []
        for start, end in zip(marks, marks[1:], strict=False):
            inside = [span for span in spans if span.start <= start and end <= span.end]
            if not inside:
                continue
            unit = max(inside, key=lambda span: span.start).unit
            seconds = end - start - sum(max(0.0, min(end, wait.end) - max(start, wait.start)) for wait in waits)
            if found and found[-1][0] == unit:
                seconds += found.pop()[1]
            found.append((unit, seconds))
        return found

    def save_trace(self, path: str | os.PathLike) -> None:
        """Write this rank's events in Chrome's trace format."""
        save_trace(path, [self])


def save_trace(path: str | os.PathLike, timelines: Sequence[Timeline]) -> None:
    """Write the events of several ranks into one file, each rank a process with its lanes."""
    zero = min((event.start for timeline in timelines for event in timeline.events), default=0.0)
    lanes = ["compute", *dict.fromkeys(_LANES.values())]
    trace: list[dict[str, Any]] = []
    for timeline in timelines:
        name = f"rank {timeline.rank}" + (f" ({timeline.simulated})" if timeline.simulated else "")
        trace.append({"ph": "M", "name": "process_name", "pid": timeline.rank, "args": {"name": name}})
        for number, lane in enumerate(lanes):
            trace.append({"ph": "M", "name": "thread_name", "pid": timeline.rank, "tid": number, "args": {"name": lane}})
        for number, event in enumerate(timeline.events):
            if event.end is None:
                continue
            lane = _LANES.get(event.what, "compute")
            row = {"name": f"{event.what} {event.unit}".strip(), "cat": event.what, "pid": timeline.rank, "tid": lanes.index(lane),
                   "ts": 1e6 * (event.start - zero), "args": {"unit": event.unit, "bytes": event.nbytes}}  # fmt: skip
            if lane == "compute":
                trace.append({**row, "ph": "X", "dur": 1e6 * event.seconds})
            else:  # they overlap each other, and then only a pair of begin and end is drawn right
                name = f"{timeline.rank}.{number}"
                trace += [{**row, "ph": "b", "id": name}, {**row, "ph": "e", "id": name, "ts": 1e6 * (event.end - zero)}]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": trace, "displayTimeUnit": "ms"}, file)


@contextmanager
def record_timeline() -> Iterator[Timeline]:
    """Record what this rank does inside the `with`. `events` is complete when it ends."""
    calls.watch()
    recorder = _Recorder()
    calls.listeners.append(recorder)
    spans.listeners.append(recorder)
    timeline = Timeline(comm.global_rank())
    try:
        yield timeline
    finally:
        timeline.simulated = recorder.simulated
        calls.listeners.remove(recorder)
        spans.listeners.remove(recorder)
        timeline.events = sorted(recorder.events(), key=lambda event: event.start)


class _Recorder:
    """Hears of everything, and notes when it began and ended."""

    exact = True

    def __init__(self) -> None:
        self.simulated = link.simulated()
        self._rank, self._clock = comm.global_rank(), _Clock()
        self._calls: list[calls.Call] = []
        self._spans: list[spans.Span] = []
        self._marks: dict[int, dict[str, Any]] = {}  # by id of a call or span: when it began, …

    def _mark(self, thing: Any, moment: str) -> None:
        """Of what began before the recording there is nothing to tell."""
        if moment == "start":
            self._marks[id(thing)] = {"thing": thing}  # which keeps its id from being another's
        if id(thing) in self._marks:
            self._marks[id(thing)][moment] = self._clock.mark()

    def _when(self, thing: Any, moment: str) -> float | None:
        return self._clock.seconds(self._marks[id(thing)].get(moment))

    # What calls.listeners are told.

    def issued(self, call: calls.Call) -> None:
        self._calls.append(call)
        self._mark(call, "start")
        if call.sync:
            self._mark(call, "wait")

    def waiting(self, call: calls.Call) -> None:
        self._mark(call, "wait")

    def arrived(self, call: calls.Call) -> None:
        self._mark(call, "waited")

    def failed(self, call: calls.Call) -> None:
        self._calls = [other for other in self._calls if other is not call]

    # What spans.listeners are told.

    def begun(self, span: spans.Span) -> None:
        self._spans.append(span)
        self._mark(span, "start")

    def ended(self, span: spans.Span) -> None:
        self._mark(span, "end")

    # ---------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """What was heard of."""
        for span in self._spans:
            end = self._when(span, "end") if span.what != "copy" else self._clock.seconds(span.event) or max(span.done, span.due)
            yield Event(span.what, span.unit, self._when(span, "start"), end, span.nbytes, self._rank)
        for call in self._calls:
            if call.op not in _NO_DATA:
                end = call.arrived if call.event is None else self._clock.seconds(call.event)
                what, nbytes = "reduce" if call.op in _ADDS_UP else "gather", call.numel * call.itemsize
                yield Event(what, call.unit, self._when(call, "start"), end, nbytes, self._rank)
            if (start := self._when(call, "wait")) is not None:
                yield Event("wait", call.unit, start, self._when(call, "waited"), rank=self._rank)


class _Clock:
    """Marks moments: of the processor, or of the GPU's current stream."""

    def __init__(self) -> None:
        self._on_gpu = comm.device().type == "cuda"
        if self._on_gpu:
            torch.cuda.synchronize()
            self._zero = time.perf_counter(), self.mark()

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float | None:
        if mark is None or isinstance(mark, float):
            return mark
        began, zero = self._zero
        mark.synchronize()
        return began + zero.elapsed_time(mark) / 1000
