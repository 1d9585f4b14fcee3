"""One run of a function on all ranks: what comes back and, if it does not, the error that says why."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from minizero.parts import calls
from minizero.ranks.diagnosis import State, Verdict, mismatch, standing, verdict
from minizero.ranks.journal import Story, cell_name, source_line
from minizero.ranks.shipping import unpack
from minizero.ranks.worker import INLINE, Answer, Order

GRACE = 0.3  # s that the others get to answer after one rank has failed
LONG_GRACE = 1.5  # s, if one of them is about to tell more
LOOK = 0.25  # s between two looks at the journals


class RankError(RuntimeError):
    """A rank failed.

    `rank` is the first that did; `exception_type` and `message` are its exception's; the text holds its traceback and
    says where each other rank stood.
    """

    __module__ = "minizero"  # the name under which people know it, and which a traceback shows

    def __init__(self, text: str, rank: int | None = None, exception_type: str = "", message: str = ""):
        super().__init__(text)
        self.rank, self.exception_type, self.message = rank, exception_type, message

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the text, which has the rank's own traceback; not how the parent noticed."""
        return f"{type(self).__name__}: {self}".splitlines()


class RanksTimeout(RankError, TimeoutError):
    """The deadline of a run passed, or the ranks' journals prove that they wait for each other for ever."""

    __module__ = "minizero"

    def __init__(self, text: str, rank: int | None = None, exception_type: str = "RanksTimeout", message: str = ""):
        super().__init__(text, rank, exception_type, message)


class Member:
    """One rank during one run."""

    def __init__(
        self, rank: int, folder: Path, process: Any, pipe: connection.Connection, control: connection.Connection
    ):
        self.rank, self.folder, self.process, self.pipe, self.control = rank, folder, process, pipe, control
        self.story = Story(rank, folder / f"journal-{rank}")
        self.answer: Answer | None = None
        self.failed_at = math.inf  # on time.monotonic(), which is the same in all processes
        self._printed = {"out": 0, "err": 0}

    @property
    def state(self) -> State:
        if self.answer is not None:
            return State.FINISHED if self.answer.ok else State.FAILED
        if self.failed_at < math.inf:
            return State.DEAD
        blocked = self.story.blocked_in is not None and not self.story.threaded
        return State.BLOCKED if blocked else State.RUNNING

    @property
    def over(self) -> bool:
        return self.state in (State.FINISHED, State.FAILED, State.DEAD)

    @property
    def failed(self) -> bool:
        return self.state in (State.FAILED, State.DEAD)

    @property
    def is_consequence(self) -> bool:
        """It failed, and says no more than that another rank went away."""
        return self.answer is not None and self.answer.connection_lost

    def receive(self) -> None:
        """Take its answer, which has come, or note its death."""
        try:
            if self.pipe.poll():  # first of all: a rank may answer and then die
                self.answer = self.pipe.recv()
                if not self.answer.ok:
                    self.failed_at = self.answer.time
                return
        except (EOFError, OSError):
            pass
        self.process.join(1)
        self.failed_at = time.monotonic()

    def result(self) -> Any:
        packed = self.answer.payload
        return unpack((self.folder / f"result-{self.rank}").read_bytes() if packed is None else packed)

    def ending(self) -> str:
        return ending(self.process.exitcode)

    def standing(self) -> str:
        return standing(self.story, self.state, self.line() if self.state in (State.RUNNING, State.DEAD) else "")

    def line(self) -> str:
        """At which line of the reader's code it computes, as it says when asked; or did, as a crash wrote down."""
        file = self.folder / f"stack-{self.rank}"
        if self.state is State.DEAD:
            return _innermost(file)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            for _ in range(20):
                before = _innermost(file)
                time.sleep(0.01)
                if before and before == _innermost(file):  # it has written all
                    return before
        return ""

    def print_new(self, streams: tuple[str, ...] = ("out", "err"), unfinished: bool = True) -> None:
        """Print what it has printed since the last time, line by line with the rank in front."""
        for name in streams:
            try:
                with open(self.folder / f"{name}-{self.rank}", "rb") as file:
                    file.seek(self._printed[name])
                    new = file.read()
            except FileNotFoundError:  # it has not begun
                continue
            if not unfinished:
                new = new[: new.rfind(b"\n") + 1]
            if not new:
                continue
            self._printed[name] += len(new)
            stream = sys.stdout if name == "out" else sys.stderr
            if stream is None:
                continue
            encoding = getattr(stream, "encoding", None) or "utf-8"
            for text in new.decode(errors="replace").removesuffix("\n").split("\n"):
                shown = text.removesuffix("\r").rpartition("\r")[2]  # a progress bar overwrites its line
                known = shown.encode(encoding, "replace").decode(encoding)  # a terminal that has no Ψ shows a ?
                stream.write(f"[rank {self.rank}] {known}\n")
            stream.flush()


class Run:
    """All ranks, from the order to the results."""

    def __init__(self, processes: list, pipes: list, controls: list, folder: Path, timeout: float):
        self.folder, self.timeout = folder, timeout
        each_ones = zip(processes, pipes, controls, strict=True)
        self.members = [Member(rank, folder, *its) for rank, its in enumerate(each_ones)]
        self.stories = [member.story for member in self.members]
        self._seen: tuple = ()
        self._judged: tuple = ()

    # --- to the ranks and back ----------------------------------------------------------------------

    def start(self, payload: bytes, rendezvous: Path | None) -> None:
        inline = len(payload) <= INLINE
        if not inline:
            (self.folder / "payload").write_bytes(payload)
        order = Order(
            self.folder, payload if inline else None, rendezvous, list(sys.path), os.getcwd(), dict(os.environ)
        )
        self.deadline = time.monotonic() + self.timeout
        for member in self.members:
            with contextlib.suppress(OSError):  # it has died: noticed in wait()
                member.pipe.send(order)

    def wait(self) -> None:
        """Until all ranks have answered. Raises as soon as one has failed, or it is proven that they never will."""
        next_look = time.monotonic() + LOOK
        while not self.failed() and not self.all_answered():
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timeout()
            self._receive(min(next_look, self.deadline) - now)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK
                self.members[0].print_new(("out",), unfinished=False)
                self._look()
        if self.failed():
            self._collect()
            raise self._failure()
        self._check()

    def all_answered(self) -> bool:
        return all(member.answer is not None for member in self.members)

    def failed(self) -> bool:
        return any(member.failed for member in self.members)

    def _receive(self, timeout: float) -> None:
        """Take what arrives within `timeout` seconds, answers or deaths."""
        sources = {}
        for member in self.members:
            if not member.over:
                sources |= {member.pipe: member, member.process.sentinel: member}
        for member in {sources[source] for source in connection.wait(list(sources), max(0, timeout))}:
            member.receive()

    def _collect(self) -> None:
        """After a failure: give the others a moment to answer too, a longer one while its cause is unknown or while a
        rank waits, for it is about to lose its connection."""
        begin = time.monotonic()
        while late := [member for member in self.members if not member.over]:
            self._read()
            cause_known = any(member.failed and not member.is_consequence for member in self.members)
            computing = all(member.state is State.RUNNING for member in late)
            left = begin + (GRACE if cause_known and computing else LONG_GRACE) - time.monotonic()
            if left <= 0:
                return
            self._receive(min(left, GRACE))

    def released(self) -> bool:
        """After an error: free the ranks that wait for one that will not come. True if all are ready for the next run."""
        late = [member for member in self.members if not member.over]
        if all(member.state is State.BLOCKED for member in late):
            for member in late:
                with contextlib.suppress(OSError):  # it has died
                    member.control.send(self.folder)
            end = time.monotonic() + GRACE
            while not all(member.over for member in late) and time.monotonic() < end:
                self._receive(end - time.monotonic())
        return self.all_answered() and not any(member.answer.threads for member in self.members)

    def results(self) -> list:
        results = []
        for member in self.members:
            try:
                results.append(member.result())
            except Exception as error:
                message = f"the result of rank {member.rank} cannot be read here: {error}"
                raise RankError(message, member.rank, type(error).__name__, message) from error
        return results

    def imported(self) -> dict[str, int]:
        return {file: when for member in self.members if member.answer for file, when in member.answer.imported.items()}

    def left_clean(self) -> bool:
        """Nothing of this run can be met by the next: no unfinished call, no group besides the default one."""
        sent = sum(story.total("send") for story in self.stories)
        received = sum(story.total("recv") for story in self.stories)
        unfinished = any(story.unfinished or story.failures for story in self.stories)
        return not unfinished and sent == received and all(member.answer.group_intact for member in self.members)

    def tell_where(self) -> None:
        """For someone who has lost patience: where each rank stands."""
        self.print_output()
        self._read()
        print(self._others(), file=sys.stderr)

    def print_output(self) -> None:
        for member in self.members:
            member.print_new()

    # --- what the journals say ----------------------------------------------------------------------

    def _states(self) -> list[State]:
        return [member.state for member in self.members]

    def _read(self) -> None:
        for story in self.stories:
            story.read()

    def _look(self) -> None:
        """If the ranks have done nothing since the last look: can they ever go on?"""
        seen = tuple((story.size(), member.over) for story, member in zip(self.stories, self.members, strict=True))
        quiet, self._seen = seen == self._seen, seen
        if not quiet or seen == self._judged:
            return
        self._judged = seen
        self._read()
        if found := verdict(self.stories, self._states()):
            text = f"deadlock: {self._told(found)}\n{self._others()}"
            raise RanksTimeout(text, found.rank, message=found.reason)

    def _check(self) -> None:
        """All ranks came back. Have they issued the same collectives? With equal sizes a mix-up stays silent."""
        self._read()
        if found := verdict(self.stories, self._states()):
            text = f"{self._told(found)}\nNo rank noticed; what they computed together is not to be trusted."
            raise RankError(text, found.rank, "RankError", found.reason)

    # --- the errors ---------------------------------------------------------------------------------

    def _failure(self) -> RankError:
        self._read()
        failed = [member for member in self.members if member.failed]
        first = min(failed, key=lambda member: (member.is_consequence, member.failed_at))
        answer, found = first.answer, mismatch(self.stories)
        if answer is None:
            kind, message = "ProcessDied", found.reason if found else first.ending()
            head = f"rank {first.rank} died: {first.ending()}"
            details = f"  it was {first.standing()}{tail(self.folder / f'err-{first.rank}')}"
        else:
            kind, message = answer.exception_type, answer.message
            head = f"rank {first.rank} raised {kind}" + (f": {message}" if message else "")
            details = "\n" + _indent(_with_cells(answer.traceback)) if answer.traceback else ""
        parts = [self._told(found) + "\n" if found else "", head, details, self._others(except_rank=first.rank)]
        return RankError("\n".join(filter(None, parts)), first.rank, kind, message)

    def _timeout(self) -> RanksTimeout:
        self._read()
        found = mismatch(self.stories)
        why = f"the run took longer than its {self.timeout:g} s (timeout={self.timeout:g} of mz.Ranks or mz.launch)"
        text = f"{why}{f'; {self._told(found)}' if found else '.'}\n{self._others()}"
        late = [member for member in self.members if not member.over]
        first = next((member for member in late if member.state is State.RUNNING), late[0])
        return RanksTimeout(text, first.rank, message=why)

    def _told(self, found: Verdict) -> str:
        """The verdict, with the lines of the calls that it speaks of, unless the ranks still stand there."""
        there = all(self.stories[rank].blocked_in is entry for rank, entry in found.calls.items())
        return f"{found.reason}." + ("" if there else f"\n{found.rows()}")

    def _others(self, except_rank: int | None = None) -> str:
        """One line for each rank: where it stands."""
        rows = ["Where each rank stands:" if except_rank is None else "The other ranks:"]
        for member in self.members:
            if member.rank == except_rank:
                continue
            row = member.standing()
            if member.is_consequence:
                row = f"lost its connection, {row}"
            elif member.state is State.FAILED:
                row = f"raised {member.answer.exception_type}: {member.answer.message.partition(chr(10))[0][:160]}"
            elif member.state is State.DEAD:
                row = f"died: {member.ending()}; was {row}"
            rows.append(f"  rank {member.rank}  {row}")
        return "\n".join(rows) if len(rows) > 1 else ""


def ending(code: int | None) -> str:
    """What an exit code means."""
    if code is None:
        return "it does not answer"
    if code >= 0:
        return f"exit code {code} (os._exit, or a library that ends the process)"
    name = signal.Signals(-code).name
    hints = {
        "SIGKILL": "killed from outside; when memory ran out, by the system",
        "SIGABRT": "given up from within, as gloo does over unequal sizes",
        "SIGSEGV": "it used memory that is not its own",
    }
    return f"{name} ({hints[name]})" if name in hints else name


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a file of messages, indented; empty if there are none."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return ""
    return "\n  its last words:\n" + _indent("\n".join(text.splitlines()[-lines:]), 4) if text else ""


def _innermost(stack: Path) -> str:
    """The innermost line outside the libraries of what faulthandler has written."""
    try:
        frames = re.findall(r'File "(.+)", line (\d+) in ', stack.read_text(errors="replace"))
    except FileNotFoundError:
        return ""
    theirs = [frame for frame in frames if not frame[0].startswith(calls.LIBRARIES)]
    return source_line(theirs[0][0], int(theirs[0][1])) if theirs else ""


def _indent(text: str, by: int = 2) -> str:
    return "".join(" " * by + row for row in text.splitlines(keepends=True))


def _with_cells(text: str) -> str:
    return re.sub(r'File "([^"]+)"', lambda m: m[0] if (name := cell_name(m[1])) == m[1] else name, text)
