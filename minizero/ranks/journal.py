"""A rank's journal of collectives: written by the rank into a file, read by the parent if the rank does not come back.

A rank writes one line *before* each call and one when it is complete. The lines outlive the process, so a rank that
was aborted or hangs can still be placed. What the journals of all ranks prove together: see diagnosis.py.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from minizero.parts.calls import Call


class Journal:
    """Listens to a rank's calls and writes them down."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number: dict[int, int] = {}  # id of an unfinished call -> its number
        self._next = 0
        self._threads = set(threading.enumerate())  # that were there before

    def issued(self, call: Call) -> None:
        if call.sync:
            self._note_threads()
        number, self._next = self._next, self._next + 1
        self._number[id(call)] = number
        fields = (call.op, call.numel, call.dtype, call.shape, call.group, call.ranks, call.detail, call.peer,
                  call.uneven, call.unit, call.sync and call.patient, call.where)  # fmt: skip
        os.write(self._file, b'["issued", %d, %b\n' % (number, _in_json(fields)))

    def waiting(self, call: Call) -> None:
        self._note_threads()
        if call.patient:
            self._mark("waiting", self._number.get(id(call)))

    def done(self, call: Call) -> None:
        self._mark("done", self._number.pop(id(call), None))

    def gave_up(self, call: Call) -> None:
        self._mark("gave_up", self._number.get(id(call)))

    def failed(self, call: Call) -> None:
        self._mark("failed", self._number.pop(id(call), None))

    def _note_threads(self) -> None:
        if started_threads(self._threads):
            self._mark("threads", -1)  # the rank may go on while this one waits

    def _mark(self, event: str, number: int | None) -> None:
        if number is not None:
            os.write(self._file, b'["%b", %d]\n' % (event.encode(), number))  # as json.dumps does, in a tenth of the time

    def close(self) -> None:
        os.close(self._file)


@functools.lru_cache(1024)
def _in_json(fields: tuple) -> bytes:
    """The rest of a row. What a step calls is what the last one called."""
    return json.dumps(fields).encode()[1:]


def started_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads that may call a collective: not autograd's, nor those that libraries start for purposes of their own."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if type(thread).__name__ not in ("_DummyThread", "TMonitor")
            and not thread.name.startswith("QueueFeederThread")]  # fmt: skip


@dataclass(slots=True)
class Entry:
    """A call as the journal tells it."""

    op: str
    numel: int
    dtype: str
    shape: tuple[int, ...]
    group: str
    ranks: tuple[int, ...]
    detail: str
    peer: int | None
    uneven: bool
    unit: str
    sync: bool
    where: tuple[str, int]
    place: int = 0  # its number among the collectives of its group, from 1; or among the sends to (recvs from) its peer

    @property
    def point_to_point(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def line(self) -> str:
        return source_line(*self.where)

    def difference(self, other: Entry) -> str | None:
        """What must be equal on all ranks of the group, or at both ends of a message, and is not."""
        if self.op != other.op and not self.point_to_point:
            return "operation"
        if self.unit != other.unit:
            return "unit"
        if self.numel != other.numel and not (self.uneven or other.uneven):
            return "size"
        if self.dtype != other.dtype:
            return "dtype"
        if self.detail != other.detail:
            return "arguments"
        return None

    def __str__(self) -> str:
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        direction = {"send": f" to {peer}", "recv": f" from {peer}"}.get(self.op, "")
        what = f"{self.dtype} {list(self.shape)}" if self.dtype else ""
        group = self.group and f"group {self.group} of ranks {list(self.ranks)}"
        extra = ", ".join(part for part in (what, self.detail, self.unit and f"unit {self.unit}", group) if part)
        return f"{self.op}{direction} #{self.place}" + (f" ({extra})" if extra else "")


class Story:
    """One rank's journal, read as far as it is written."""

    def __init__(self, rank: int, path: Path):
        self.rank = rank
        self.count = 0  # calls issued
        self.collectives: dict[str, list[Entry]] = defaultdict(list)  # by group
        self.messages: dict[tuple, list[Entry]] = defaultdict(list)  # by (op, group, peer, detail)
        self.blocked_in: Entry | None = None
        self.threaded = False  # other threads are at work: that one of them waits proves nothing
        self.unfinished: dict[int, Entry] = {}
        self.failures = 0  # calls that raised: who knows what they left of the connections
        self._path = path
        self._read = 0

    def size(self) -> int:
        """Bytes written so far: as long as they grow, the rank is getting on."""
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def read(self) -> None:
        """Read on."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        new = new[: new.rfind(b"\n") + 1]  # a killed process may leave half a line
        self._read += len(new)
        for row in new.splitlines():
            self._add(*json.loads(row))

    def _add(self, event: str, number: int, *fields: object) -> None:
        self.failures += event in ("gave_up", "failed")
        if event == "issued":
            entry = Entry(*fields)
            entry.shape, entry.ranks, entry.where = tuple(entry.shape), tuple(entry.ranks), tuple(entry.where)
            calls = self._calls_like(entry)
            calls.append(entry)
            entry.place = len(calls)
            self.count += 1
            self.unfinished[number] = entry
            if entry.sync:
                self.blocked_in = entry
        elif event == "waiting":
            self.blocked_in = self.unfinished[number]
        elif event == "gave_up":
            self.blocked_in = None
        elif event == "threads":
            self.threaded = True
        else:
            entry = self.unfinished.pop(number)
            if self.blocked_in is entry:
                self.blocked_in = None
            if event == "failed":
                self._calls_like(entry).remove(entry)
                self.count -= 1

    def _calls_like(self, entry: Entry) -> list[Entry]:
        if entry.point_to_point:
            return self.messages[entry.op, entry.group, entry.peer, entry.detail]
        return self.collectives[entry.group]

    def total(self, op: str) -> int:
        """How many messages it has sent, or taken."""
        return sum(len(calls) for (kind, *_), calls in self.messages.items() if kind == op)


def source_line(filename: str, number: int) -> str:
    """`file, line 12: source`, with a notebook's cell named as Jupyter names it."""
    linecache.checkcache(filename)
    source = linecache.getline(filename, number).strip()
    return f"{cell_name(filename)}, line {number}" + (f": {source}" if source else "")


def cell_name(filename: str) -> str:
    """`Cell In[3]` for the file name that IPython gives a cell; other names as they are."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return filename if number is None else f"Cell In[{number}]"
