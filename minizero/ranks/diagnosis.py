"""What the journals of all ranks prove together: that their calls differ, or that some will never be met.

The journals are read one after the other while the ranks go on writing. That is safe: a call that is written stays
written, and a rank that waits for a call cannot get past it before the other side has written its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from minizero.ranks.journal import Entry, Story


class State(Enum):
    RUNNING = "computing"
    BLOCKED = "waiting"
    FINISHED = "finished"
    FAILED = "failed"
    DEAD = "died"


@dataclass(frozen=True)
class Verdict:
    """Why a run cannot end well."""

    reason: str
    rank: int  # the one to blame, as far as one can tell
    calls: dict[int, Entry]  # the evidence, by rank

    def rows(self) -> str:
        return "\n".join(f"  rank {rank}  {entry} at {entry.line}" for rank, entry in self.calls.items())


def verdict(stories: Sequence[Story], states: Sequence[State]) -> Verdict | None:
    """None: nothing is proven, the ranks may come to a good end."""
    return mismatch(stories) or _skipped(stories, states) or _deadlock(stories, states)


def mismatch(stories: Sequence[Story]) -> Verdict | None:
    """What was issued on one rank does not fit what was issued on another."""
    return _different_collectives(stories) or _different_ends(stories)


def _different_collectives(stories: Sequence[Story]) -> Verdict | None:
    """Ranks have issued different collectives as their k-th in a group."""
    for group, members in _groups(stories).items():
        for step in zip_longest(*(stories[rank].collectives[group] for rank in members)):
            issued = {rank: entry for rank, entry in zip(members, step, strict=True) if entry is not None}
            first = next(iter(issued.values()))
            difference = next(filter(None, map(first.difference, issued.values())), None)
            if difference is not None:
                sides: dict[str, list[int]] = defaultdict(list)
                for rank, entry in issued.items():
                    sides[str(entry)].append(rank)
                told = ", ".join(f"{_names(ranks)} {entry}" for entry, ranks in sides.items())
                odd_one = min(reversed(sides.values()), key=len)[0]  # of two equal sides, the later
                reason = f"the ranks issue different collectives (not the same {difference}): {told}"
                return Verdict(reason, odd_one, issued)
    return None


def _different_ends(stories: Sequence[Story]) -> Verdict | None:
    """What a rank has sent is not what the other side takes."""
    for story in stories:
        for (op, group, peer, detail), sends in tuple(story.messages.items()):
            if not sends or peer is None:
                continue
            if peer not in range(len(stories)):
                reason = f"rank {story.rank} issues {sends[0]}, and ranks count from 0 to {len(stories) - 1}"
                return Verdict(reason, story.rank, {story.rank: sends[0]})
            if op == "recv" or stories[peer].messages["recv", group, None, detail]:  # recv(src=None) takes what comes
                continue
            for sent, taken in zip(sends, stories[peer].messages["recv", group, story.rank, detail], strict=False):
                if difference := sent.difference(taken):
                    told = f"rank {story.rank} {sent}, rank {peer} {taken}"
                    reason = f"the two ends of a message do not fit (not the same {difference}): {told}"
                    return Verdict(reason, peer, {story.rank: sent, peer: taken})
    return None


def _groups(stories: Sequence[Story]) -> dict[str, tuple[int, ...]]:
    return {group: entries[0].ranks for story in stories for group, entries in story.collectives.items() if entries}


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _skipped(stories: Sequence[Story], states: Sequence[State]) -> Verdict | None:
    """A rank has finished without a collective that another one has issued."""
    for group, members in _groups(stories).items():
        longest = max((stories[rank] for rank in members), key=lambda story: len(story.collectives[group]))
        for rank in members:
            issued = len(stories[rank].collectives[group])
            if states[rank] is State.FINISHED and issued < len(longest.collectives[group]):
                entry = longest.collectives[group][issued]
                does = "waits in" if entry is longest.blocked_in else "has issued"
                reason = f"rank {longest.rank} {does} {entry}, but rank {rank} has finished without it"
                return Verdict(reason, rank, {longest.rank: entry})
    return None


def _deadlock(stories: Sequence[Story], states: Sequence[State]) -> Verdict | None:
    """Ranks wait for each other, or for one that has ended."""
    stuck = stuck_ranks(stories, states)
    if not stuck:
        return None
    rank = min(stuck, key=lambda r: stories[r].blocked_in.place)
    entry = stories[rank].blocked_in
    missing = _missing(entry, rank, stories) or set(entry.ranks) - {rank}
    culprit = min(r for r in missing if r in stuck or states[r] in _OVER)
    there = stories[culprit].blocked_in
    if culprit in stuck:
        reason = f"rank {rank} waits in {entry} while rank {culprit} waits in {there}: neither can go on first"
        return Verdict(reason, rank, {rank: entry, culprit: there})
    reason = f"rank {rank} waits in {entry}, but rank {culprit} has {_OVER[states[culprit]]} without its side of it"
    return Verdict(reason, culprit, {rank: entry})


_OVER = {State.FINISHED: "finished", State.FAILED: "failed", State.DEAD: "died"}


def stuck_ranks(stories: Sequence[Story], states: Sequence[State]) -> set[int]:
    """The ranks that can never go on: each waits for a rank that has ended, or for one that is itself in this set."""
    live = {rank for rank, state in enumerate(states) if state is State.RUNNING}
    waiting = {
        rank: _missing(stories[rank].blocked_in, rank, stories)
        for rank, state in enumerate(states)
        if state is State.BLOCKED
    }
    while freed := {rank for rank, missing in waiting.items() if (live if missing is None else missing <= live)}:
        live |= freed
        for rank in freed:
            del waiting[rank]
    return set(waiting)


def _missing(entry: Entry, rank: int, stories: Sequence[Story]) -> set[int] | None:
    """The ranks whose call is missing for `entry` to complete; None if any one of the others would do."""
    if entry.op == "recv":
        senders = [entry.peer] if entry.peer is not None else [r for r in entry.ranks if r != rank]
        sent = sum(len(stories[r].messages["send", entry.group, rank, entry.detail]) for r in senders)
        if sent >= entry.place:
            return set()
        return {entry.peer} if entry.peer is not None else None
    if entry.op == "send":
        taker = stories[entry.peer]
        taken = sum(len(taker.messages["recv", entry.group, source, entry.detail]) for source in (rank, None))
        return set() if taken >= entry.place else {entry.peer}
    return {r for r in entry.ranks if len(stories[r].collectives[entry.group]) < entry.place}


def standing(story: Story, state: State, line: str = "") -> str:
    """Where a rank stands, in one line. `line`: where it computes, if that is known."""
    if story.blocked_in is not None and state is not State.FINISHED:
        return f"waiting in {story.blocked_in} at {story.blocked_in.line}"
    does = "computing" if state is State.DEAD else state.value
    return f"{does}, after {story.count} call{'s' * (story.count != 1)}" + (f", at {line}" if line else "")
