"""What this rank sends: every collective counted, by the rules of the textbook, as it is issued.

    with record_traffic() as t:
        engine.backward(engine(x, y))
    t.bytes_sent, [(op.op, op.numel, op.unit) for op in t.ops]

Plain `torch.distributed` calls count as minizero's own do. `bytes` is what the ring (or the direct) algorithm sends,
see theory.sent; what a backend really puts on the wire may be more: gloo's own reduce-scatter sends twice that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from minizero.lens import theory
from minizero.parts import calls, comm, spans


@dataclass
class Op:
    """One collective. `bytes` are those that this rank sends; times are seconds of time.perf_counter()."""

    op: str
    numel: int  # elements of the full tensor, padding included
    dtype: str
    bytes: float
    unit: str  # the bucket or unit; "control", "buffers", "start"; empty for plain calls
    start: float
    end: float | None = None  # when this rank knew that it was complete

    def __repr__(self) -> str:
        unit = f", unit={self.unit!r}" if self.unit else ""
        return f"Op({self.op}, numel={self.numel}, {self.dtype}, bytes={self.bytes}{unit})"


@dataclass(eq=False)  # two recorders that have counted the same are still two
class Traffic:
    """What was issued on this rank, in order."""

    ops: list[Op] = field(default_factory=list)
    bytes_copied: int = 0  # over the host link, by an engine that offloads
    _of_call: dict[int, Op] = field(default_factory=dict, repr=False)

    @property
    def bytes_sent(self) -> float:
        total = sum(Fraction(op.bytes).limit_denominator(10**6) for op in self.ops)
        return int(total) if total == int(total) else float(total)

    def issued(self, call: calls.Call) -> None:
        if call.op == "new_group":  # an agreement between ranks, but no collective on tensors
            return
        gives = call.source is None or (call.source == comm.global_rank()) == (call.op in ("broadcast", "scatter"))
        sent = theory.sent(call.op, call.numel * call.itemsize, len(call.ranks), is_source=gives)
        if call.sent is not None:
            sent = call.sent * call.itemsize
        self.ops.append(Op(call.op, call.numel, call.dtype, sent, call.unit, call.start))
        self._of_call[id(call)] = self.ops[-1]

    def failed(self, call: calls.Call) -> None:
        """torch has refused it: nothing was sent."""
        self.ops = [op for op in self.ops if op is not self._of_call.get(id(call))]

    def begun(self, span: spans.Span) -> None:
        self.bytes_copied += span.nbytes if span.what == "copy" else 0

    def done(self, call: calls.Call) -> None:
        op = self._of_call.pop(id(call), None)
        if op is not None:
            op.end = call.end


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count what this rank sends inside the `with`. Recorders may be nested; each counts all that happens inside it."""
    calls.watch()
    traffic = Traffic()
    calls.listeners.append(traffic)
    spans.listeners.append(traffic)
    try:
        yield traffic
    finally:
        calls.listeners.remove(traffic)
        spans.listeners.remove(traffic)
