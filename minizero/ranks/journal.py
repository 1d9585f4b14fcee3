"""A rank's journal of collectives, kept in a file, and what the parent reads from it when a rank does not come back.

A rank writes one line *before* each call and one when it is complete. The lines outlive the process, so a rank that
was aborted or hangs can still be placed. `verdict` looks at the journals of all ranks and proves, where that can be
done, that they will never meet.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from minizero.parts.calls import Call


class Journal:
    """Listens to a rank's calls and writes them down."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number: dict[int, int] = {}  # id of an unfinished call -> its number
        self._next = 0

    def issued(self, call: Call) -> None:
        number, self._next = self._next, self._next + 1
        self._number[id(call)] = number
        fields = (call.op, call.numel, call.dtype, call.shape, call.group, call.ranks, call.detail, call.peer, call.source,
                  call.uneven, call.unit, call.sync, call.where)  # fmt: skip
        self._write("issued", number, *fields)

    def waiting(self, call: Call) -> None:
        if id(call) in self._number:
            self._write("waiting", self._number[id(call)])

    def done(self, call: Call) -> None:
        if id(call) in self._number:
            self._write("done", self._number.pop(id(call)))

    def _write(self, *row: object) -> None:
        os.write(self._file, json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass
class Entry:
    """A call as the journal tells it."""

    number: int
    op: str
    numel: int
    dtype: str
    shape: tuple[int, ...]
    group: str
    ranks: tuple[int, ...]
    detail: str
    peer: int | None
    source: int | None
    uneven: bool
    unit: str
    sync: bool
    where: tuple[str, int]
    done: bool = False
    place: int = 0  # its number among the collectives of its group, from 1; or among the sends to (recvs from) its peer

    @property
    def point_to_point(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def signature(self) -> tuple:
        """What must be equal on all ranks of the group."""
        size = None if self.uneven or self.op == "gather" else self.numel
        return self.op, size, self.dtype if self.op != "gather" else None, self.detail, self.unit

    def __str__(self) -> str:
        name = f"{self.op} #{self.place}" if not self.point_to_point else f"{self.op} {_direction(self)} #{self.place}"
        what = f"{self.dtype} {list(self.shape)}" if self.dtype else ""
        extra = ", ".join(part for part in (what, self.detail, self.unit and f"unit {self.unit}") if part and part != "tag=0")
        return name + (f" ({extra})" if extra else "")


def _direction(entry: Entry) -> str:
    peer = "any rank" if entry.peer is None else f"rank {entry.peer}"
    return f"to {peer}" if entry.op == "send" else f"from {peer}"


class State(Enum):
    RUNNING = "running"
    BLOCKED = "waiting"
    FINISHED = "finished"
    FAILED = "failed"
    DEAD = "dead"


@dataclass
class Story:
    """One rank's journal, read as far as it is written."""

    rank: int
    path: Path
    entries: list[Entry] = field(default_factory=list)
    blocked_in: Entry | None = None
    _read: int = 0
    _places: Counter = field(default_factory=Counter)

    def read(self) -> bool:
        """Read on. True if there was something new."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return False
        new = new[: new.rfind(b"\n") + 1]  # a killed process may leave half a line
        self._read += len(new)
        for line in new.splitlines():
            self._add(*json.loads(line))
        return bool(new)

    def _add(self, event: str, number: int, *fields: object) -> None:
        if event == "issued":
            entry = Entry(number, *fields)
            entry.shape, entry.ranks, entry.where = tuple(entry.shape), tuple(entry.ranks), tuple(entry.where)
            key = (entry.group, entry.op, entry.peer, entry.detail) if entry.point_to_point else entry.group
            self._places[key] += 1
            entry.place = self._places[key]
            self.entries.append(entry)
            if entry.sync:
                self.blocked_in = entry
        elif event == "waiting":
            self.blocked_in = self.entries[number]
        else:
            self.entries[number].done = True
            if self.blocked_in is self.entries[number]:
                self.blocked_in = None

    def collectives(self, group: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.group == group and not entry.point_to_point]

    def sends_to(self, rank: int, group: str, detail: str) -> int:
        return sum(e.op == "send" and e.peer == rank and e.group == group and e.detail == detail for e in self.entries)

    def recvs_from(self, rank: int, group: str, detail: str) -> int:
        """Receives that could take what `rank` sends: from it, or from anyone."""
        return sum(e.op == "recv" and e.peer in (rank, None) and e.group == group and e.detail == detail for e in self.entries)


def mismatch(stories: list[Story]) -> str | None:
    """Where ranks issued different collectives as their k-th of a group; None while they agree."""
    groups = {entry.group: entry.ranks for story in stories for entry in story.entries}
    for group, members in groups.items():
        rows = {rank: stories[rank].collectives(group) for rank in members}
        for step in zip(*rows.values()):  # noqa: B905 — only as far as all have come
            first = step[0]
            other = next((entry for entry in step if entry.signature != first.signature), None)
            if other is not None:
                a, b = members[0], members[step.index(other)]
                name = "" if len(members) == len(stories) else f" of the group {list(members)}"
                return (
                    f"the ranks issue different collectives: as collective number {first.place}{name}, "
                    f"rank {a} issues {first} at {line(first.where)}, but rank {b} issues {other} at {line(other.where)}"
                )
    return None


def _waits_for(entry: Entry, rank: int, stories: list[Story]) -> set[int] | None:
    """The ranks whose call is missing for `entry` to complete; None if any one of the others would do."""
    if entry.op == "recv":
        senders = [entry.peer] if entry.peer is not None else [r for r in entry.ranks if r != rank]
        sent = sum(stories[r].sends_to(rank, entry.group, entry.detail) for r in senders)
        if sent >= entry.place:
            return set()
        return {entry.peer} if entry.peer is not None else None
    if entry.op == "send":
        return set() if stories[entry.peer].recvs_from(rank, entry.group, entry.detail) >= entry.place else {entry.peer}
    return {r for r in entry.ranks if len(stories[r].collectives(entry.group)) < entry.place}


def deadlock(stories: list[Story], states: list[State]) -> set[int]:
    """The ranks that can never go on: each waits for a rank that has ended, or for one that is itself in this set."""
    live = {rank for rank, state in enumerate(states) if state is State.RUNNING}
    over = {rank for rank, state in enumerate(states) if state in (State.FINISHED, State.FAILED, State.DEAD)}
    waiting = {rank: _waits_for(stories[rank].blocked_in, rank, stories) for rank in range(len(states)) if rank not in live | over}
    changed = True
    while changed:
        changed = False
        for rank, missing in list(waiting.items()):
            others_live = bool(live - {rank}) if missing is None else missing <= live
            if others_live:
                live.add(rank)
                del waiting[rank]
                changed = True
    return set(waiting)


def explain(stuck: set[int], stories: list[Story], states: list[State]) -> str:
    """Why the ranks in `stuck` will never go on, in one sentence."""
    rank = min(stuck, key=lambda r: stories[r].blocked_in.place)
    entry = stories[rank].blocked_in
    missing = _waits_for(entry, rank, stories)
    culprit = min(missing or (r for r in entry.ranks if r != rank))
    there = stories[culprit].blocked_in
    if states[culprit] is State.BLOCKED and there is not None:
        return f"rank {rank} waits in {entry} while rank {culprit} waits in {there}: neither call can complete without the other"
    ended = {State.FINISHED: "has finished", State.FAILED: "has failed", State.DEAD: "has died"}.get(states[culprit], "is elsewhere")
    return f"rank {rank} waits in {entry}, but rank {culprit} {ended} without it"


def standing(story: Story, state: State, stack: str = "") -> str:
    """Where a rank stands, in one line."""
    if state is State.BLOCKED and story.blocked_in is not None:
        return f"waiting in {story.blocked_in} at {line(story.blocked_in.where)}"
    count = f"after {len(story.entries)} collective{'s' * (len(story.entries) != 1)}"
    if state is State.RUNNING:
        return f"computing, {count}{stack}"
    return f"{state.value}, {count}"


def line(where: tuple[str, int]) -> str:
    """`file:line  source`, with a notebook's cell named as Jupyter names it."""
    filename, number = where
    source = linecache.getline(filename, number).strip()
    return f"{cell_name(filename)}, line {number}" + (f": {source}" if source else "")


def cell_name(filename: str) -> str:
    """`Cell In[3]` for the file name that IPython gives a cell; other names as they are."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return filename if number is None else f"Cell In[{number}]"
