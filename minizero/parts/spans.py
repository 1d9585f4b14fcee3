"""What a rank does between its collectives: a unit's forward or backward, an optimizer step, a copy to or from the host.

    listeners      objects that are told: begun(span), ending(span), ended(span). They have the methods that they need

Who listens: the timeline, and a simulated link, which makes a copy take longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

listeners: list[Any] = []


@dataclass(eq=False)
class Span:
    """Something with a beginning and an end, in seconds of time.perf_counter()."""

    what: str
    unit: str  # or the bucket
    nbytes: int = 0  # copied
    start: float = field(default_factory=time.perf_counter)
    end: float | None = None
    done: float = 0.0  # when a copy was complete, whoever waits for it then or later
    due: float = 0.0  # the same, on a simulated link
    event: Any = None  # the same, on a GPU


def begin(what: str, unit: str, nbytes: int = 0) -> Span | None:
    """It begins now. None if nobody listens."""
    if not listeners:
        return None
    span = Span(what, unit, nbytes)
    _tell("begun", span)
    return span


def end(span: Span | None) -> None:
    """It has ended; heard by those who listen now."""
    if span is not None and span.end is None:
        _tell("ending", span)
        span.end = time.perf_counter()
        _tell("ended", span)


def _tell(event: str, span: Span) -> None:
    for listener in tuple(listeners):
        if (hear := getattr(listener, event, None)) is not None:
            hear(span)


@contextlib.contextmanager
def span(what: str, unit: str, nbytes: int = 0) -> Iterator[None]:
    """What is inside the `with`."""
    running = begin(what, unit, nbytes)
    try:
        yield
    finally:
        end(running)


def moment(what: str, unit: str) -> None:
    """It takes no time."""
    end(begin(what, unit))
