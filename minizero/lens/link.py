"""A link that is slower than this machine: collectives and host copies take as long as they would on it. Simulated.

    with link(bandwidth=1e9, latency=10e-6):     # bytes/s, s
        engine.backward(engine(x, y))            # computes at full speed, and waits as long as a 1 GB/s wire takes

The bytes travel as they always do; then whoever waits for them sleeps for the rest of the time, so that the processor is
free for the ranks that compute. A collective is complete at

    max(really complete, latest start over its ranks + seconds by the ring algorithm, see theory.seconds)

and a rank's link does one thing after the other: a start is not before the end of what was asked for earlier. Host copies
have a link of their own. Each rank writes down when it has started what, in memory that all of them see; so a rank that is
late delays the others, as it does on a wire.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from minizero.lens import theory
from minizero.parts import calls, comm, spans

SLOTS = 1 << 12  # starts that a rank remembers


@contextmanager
def link(bandwidth: float, latency: float = 0.0) -> Iterator[None]:
    """Simulate a link. A call of all ranks, with the same values on each; all of them are on one machine.

    bandwidth: bytes/s in each direction
    latency: seconds that every message takes besides, however short it is

    ValueError for values that no link has or that differ between ranks, RuntimeError inside another link.
    """
    if any(isinstance(listener, _Link) for listener in calls.listeners):
        raise RuntimeError("a link is simulated already: end it first, since bytes cannot travel over both")
    slow = _Link(_number("bandwidth", bandwidth, lambda value: value > 0), _number("latency", latency, lambda value: value >= 0))
    calls.watch()
    for listener in calls.listeners:
        if hasattr(listener, "simulated"):
            listener.simulated = str(slow)
    calls.listeners.insert(0, slow)  # whoever notes when something is complete hears of it after its delay
    spans.listeners.insert(0, slow)
    try:
        yield
    finally:
        slow.close()
        calls.listeners.remove(slow)
        spans.listeners.remove(slow)


def simulated() -> str:
    """The simulated link in words; empty where there is none."""
    return next((str(listener) for listener in calls.listeners if isinstance(listener, _Link)), "")


def _number(name: str, value: float, possible: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not possible(value) or value == float("inf"):
        raise ValueError(f"{name}={value!r}: give a link's {name} as a positive number of {'bytes/s' if name == 'bandwidth' else 'seconds'}")
    return float(value)


class _Link:
    """One rank's end of it, told of calls and of copies."""

    def __init__(self, bandwidth: float, latency: float):
        self.bandwidth, self.latency = bandwidth, latency
        self._count: Counter[int] = Counter()  # of the calls of each kind
        self._queue: list[tuple[calls.Call, int, int]] = []  # issued, and not known to be complete
        self._free = self._host_free = 0.0  # when the link will have done what was asked for
        self._copies: list[spans.Span] = []  # begun
        self._starts = self._shared()

    def __str__(self) -> str:
        latency = f", {1e6 * self.latency:g} µs" if self.latency else ""
        return f"simulated link, {self.bandwidth / 1e9:g} GB/s{latency}"

    def _shared(self) -> np.ndarray:
        """Memory that all ranks see: for each of them SLOTS starts, as kind, number and time."""
        shape = (comm.world_size(), SLOTS, 3)
        if shape[0] == 1:
            return np.zeros(shape)
        path = ""
        if comm.global_rank() == 0:
            descriptor, path = tempfile.mkstemp(prefix="minizero-link-")
            os.ftruncate(descriptor, 8 * np.prod(shape))
            os.close(descriptor)
        try:
            told = comm.gather_objects((path, self.bandwidth, self.latency), comm.default_group())
            if len({tuple(values) for _, *values in told}) > 1:
                raise ValueError(f"the ranks simulate different links: {', '.join(f'{b:g} bytes/s, {s:g} s' for _, b, s in told)}")
            starts = np.memmap(told[0][0], dtype=np.float64, mode="r+", shape=shape)
            comm.gather_objects(None, comm.default_group())  # all have it open
            return starts
        finally:
            if path:
                os.unlink(path)

    # What calls.listeners are told.

    def issued(self, call: calls.Call) -> None:
        if call.op == "new_group":  # nothing travels
            return
        pair = (comm.global_rank(), call.peer)
        between = f"{pair if call.op == 'send' else pair[::-1]} {call.detail}" if call.op in ("send", "recv") else ""
        kind = zlib.crc32(f"{call.group} {between}".encode())
        number = self._count[kind] = self._count[kind] + 1
        self._starts[comm.global_rank(), (kind + number) % SLOTS] = kind, number, call.start
        self._queue.append((call, kind, number))

    def failed(self, call: calls.Call) -> None:
        for waiting, kind, _ in self._queue:
            if waiting is call:
                self._count[kind] -= 1
        self._queue = [waiting for waiting in self._queue if waiting[0] is not call]

    def arrived(self, call: calls.Call) -> None:
        """It is complete, and so is all that was issued before it: every other rank has started those, too."""
        while any(waiting[0] is call for waiting in self._queue):
            self._schedule(*self._queue.pop(0))
        if comm.device().type == "cuda":
            torch.cuda.current_stream().synchronize()  # really complete
        _sleep_until(call.arrived)

    def _schedule(self, call: calls.Call, kind: int, number: int) -> None:
        started = self._starts[list(call.ranks), (kind + number) % SLOTS]
        latest = max((start for k, n, start in started if (k, n) == (kind, number)), default=call.start)
        begin = max(latest, self._free)
        self._free = begin + theory.seconds(call.op, call.numel * call.itemsize, len(call.ranks), self.bandwidth, self.latency)
        call.arrived = max(call.arrived or 0.0, float(self._free))

    # What spans.listeners are told.

    def begun(self, span: spans.Span) -> None:
        if span.what == "copy":
            self._copies.append(span)
            self._host_free = span.due = max(span.start, self._host_free) + self.latency + span.nbytes / self.bandwidth

    def ending(self, span: spans.Span) -> None:
        if span.what == "copy":
            _sleep_until(span.due)
            self._copies = [other for other in self._copies if other is not span]

    def close(self) -> None:
        """What is under way arrives now."""
        for span in self._copies:
            span.due = min(span.due, time.perf_counter())


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
