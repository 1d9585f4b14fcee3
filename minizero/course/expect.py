"""What a check works with: it runs an answer on warm ranks, compares, and turns what goes wrong into a Finding.

A learner's function never runs in the notebook's own process. It may loop for ever, print without end or leave with
os._exit; on ranks each of these is an answer like any other, and a wrong one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import minizero as mz
from minizero.course.finding import Finding, Untouched
from minizero.lens.traffic import Op
from minizero.parts import calls

DEADLINE = 20.0  # seconds for one run of an answer
PRINTED = 12  # lines of what an answer printed that a failure shows


@functools.cache
def ranks(world_size: int) -> mz.Ranks:
    """The warm CPU ranks that all checks share. `Ranks` closes them at exit."""
    print(f"starting {world_size} rank{'s' * (world_size != 1)} …", flush=True)  # on a busy machine it takes a while
    return mz.Ranks(world_size, timeout=DEADLINE, device="cpu")


@dataclass
class Outcome:
    """What one rank brought back from a run.

    value       what the program returned, tensors detached and on the CPU
    ops         its collectives, as mz.record_traffic gives them
    bytes_sent  by this rank, counted as mz.record_traffic does
    peak        bytes by kind at the largest moment, and peak_total; empty unless memory=True was given
    """

    rank: int
    value: Any
    ops: list[Op]
    bytes_sent: float
    peak: dict[str, int]
    peak_total: int

    @property
    def count(self) -> dict[str, int]:
        """How many collectives of each op."""
        return dict(Counter(op.op for op in self.ops))


class Expect:
    """The second argument of every check."""

    def __init__(self) -> None:
        self.printed = ""  # by the ranks, in the last run
        self.what = ""  # the case that is tried
        self._call = ""
        self._cost = ""

    def case(self, text: str = "", **figures: object) -> None:
        """Name the case that is tried next; it heads every finding from here on."""
        self.what = ", ".join([text] * bool(text) + [f"{name}={show(value)}" for name, value in figures.items()])

    def callable(self, answer: object, call: str = "") -> None:
        """The answer must be a function (or a class) that is called as `call` says."""
        self._call = call
        if not callable(answer):
            raise Finding(
                rule="the answer is a function",
                expected=call or "a function",
                got=show(answer),
                cause="hand over the function itself, without calling it",
            )

    def call(self, fn: Callable, *args: Any, causes: Mapping[str, str] | None = None) -> Any:
        """What `fn(*args)` returns, in a process of its own. For functions that need no other rank."""
        return self._run(_call, 1, (fn, *args), causes, memory=False)[0].value

    def run(
        self,
        program: Callable,
        world_size: int,
        *args: Any,
        causes: Mapping[str, str] | None = None,
        memory: bool = False,
    ) -> list[Outcome]:
        """Run `program(rank, *args)` on `world_size` ranks, with traffic counted (and memory, if asked).

        causes: a piece of a failure's text -> the mistake that it gives away. Rely on "deadlock" (a run did not come to its end,
        and a rank waits in a collective), "died" (a rank's process ended), the exception's class and its message.
        Raises Finding if a rank failed, Untouched if it met a stub.
        """
        outcomes = self._run(program, world_size, args, causes, memory)
        sent = cost(outcomes)
        self._cost = f"{sent}      {self.what}".rstrip() if sent else ""
        return outcomes

    def equal(
        self,
        got: Any,
        want: Any,
        of: str = "the result",
        *,
        rule: str,
        so: str = "",
        mistakes: Mapping[str, Any] | None = None,
        tol: float = 1e-6,
    ) -> None:
        """Raise a Finding unless `got` is `want`: type, shape, dtype and values, in nested lists and dicts too.

        of        what is compared, "rank 2's shard"
        mistakes  the mistake, in words -> the value that it leads to; named as the cause if that is what was got
        tol       absolute and relative, for floats; 0 asks for the same bits
        """
        difference = differ(got, want, of, tol)
        if difference is None:
            return
        place, expected, found = difference
        cause = next((text for text, value in (mistakes or {}).items() if differ(got, value, of, tol) is None), "")
        if got is None and not cause:
            cause = "nothing is returned: a return is missing"
        if not cause and _NAN.search(found) and not _NAN.search(expected):
            cause = "something was read that nobody had written: before its wait, or from torch.empty"
        raise Finding(rule, f"{place} is {expected}", found, so, cause)

    def that(
        self, condition: object, rule: str, expected: object = "", got: object = "", so: str = "", cause: str = ""
    ) -> None:
        """Raise a Finding unless `condition` holds."""
        if not condition:
            raise Finding(rule, expected, got, so, cause)

    def cost(self) -> str:
        """What the last run sent, in words, and in which case; empty if nothing was sent."""
        return self._cost

    def _run(
        self, program: Callable, world_size: int, args: tuple, causes: Mapping[str, str] | None, memory: bool
    ) -> list[Outcome]:
        output, pool = io.StringIO(), ranks(world_size)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                return pool.run(_measured, program, args, memory)
        except mz.RankError as error:
            raise self._failure(error, world_size, causes or {}) from error
        except Exception as error:
            reason = error.__cause__ or error
            raise Finding(
                rule="the answer can be sent to the ranks",
                got=f"{type(reason).__name__}: {reason}",
                so="a rank is another process: it cannot use open files, locks or pools of this one",
            ) from error
        finally:
            self.printed = output.getvalue()

    def _failure(self, error: mz.RankError, world_size: int, causes: Mapping[str, str]) -> Exception:
        text = str(error)
        frames = _frames(text)
        if error.exception_type == "NotImplementedError" and frames and frames[-1].learners:
            return Untouched(error.message)
        rule, got = "the answer runs without an error", f"{error.exception_type}: {error.message}"
        if isinstance(error, mz.RanksTimeout):
            waits = " (deadlock)" if "waiting in" in text else ""  # at the deadline it may not be proven
            rule, got, text = "every rank comes to its end", text, text + waits
        elif error.exception_type == "ProcessDied":
            rule, got = "every rank stays alive", f"died: {error.message}"
            got = f"rank {error.rank} {got}" if world_size > 1 else got
            if text.startswith(_UNLIKE):  # gloo ends a process that receives more than it expects
                rule, got = _FITS, text.partition("\n")[0] + "\n" + got
        elif error.exception_type == "RankError":
            rule, got = _FITS, error.message
        elif world_size > 1:
            got = f"rank {error.rank} raised {got}"
        named = (*causes.items(), *_CAUSES.items())
        cause = next((cause for piece, cause in named if piece.lower() in text.lower()), "")
        finding = Finding(rule, got=got, cause=cause)
        own = [frame for frame in frames if frame.learners]
        if own:
            finding.at = f"{own[-1].function}, line {own[-1].line}: {own[-1].source}"
        elif self._call and error.exception_type == "TypeError" and _of_arguments(error.message):
            finding.so = f"it is called as {self._call}"
        return finding


_UNLIKE = "the ranks issue different collectives"  # as mz.launch says it
_FITS = "what one rank issues fits what the others do"
_CAUSES = {  # whatever is asked for
    "Boolean value of Tensor": "`in` a list and == compare a tensor's values: whether it is the same object, ask `is`, a set or a dict",
}


def _of_arguments(message: str) -> bool:
    """Does a TypeError say that the answer itself takes other arguments? "Answer.method() takes …" is another matter."""
    function = message.partition("(")[0].rpartition("<locals>.")[2]
    return "argument" in message and function != "<lambda>" and ("." not in function or function.endswith(".__init__"))


def _call(rank: int, fn: Callable, *args: Any) -> Any:
    return fn(*args)


def _measured(rank: int, program: Callable, args: tuple, memory: bool) -> Outcome:
    # Fills torch.empty with NaN, so that who reads what nobody has written always sees it. Each run starts without.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with mz.record_traffic() as traffic, mz.record_memory() if memory else contextlib.nullcontext() as meter:
        value = program(rank, *args)
    peak, peak_total = (dict(meter.peak), meter.peak_total) if meter else ({}, 0)
    return Outcome(rank, _plain(value), traffic.ops, traffic.bytes_sent, peak, peak_total)


def _plain(value: Any) -> Any:
    """Tensors detached, on the CPU and with a storage of their own size: a view would drag its whole buffer along."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value


# --- what a traceback tells ------------------------------------------------------------------------

_FRAME = re.compile(
    r'^ *(?:File "(?P<file>.+?)"|Cell In\[\d+\]), line (?P<line>\d+), in (?P<function>.+)\n(?: +(?P<source>\S.*))?',
    re.MULTILINE,
)
_LIBRARIES = (*calls.LIBRARIES, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib")))


@dataclass
class _Frame:
    function: str
    line: int
    source: str
    learners: bool


def _frames(text: str) -> list[_Frame]:
    """The frames of the last traceback in `text`, outermost first. A notebook's cell has no file: it is the learner's."""
    last = text.rpartition("Traceback (most recent call last)")[2]
    return [
        _Frame(
            match["function"],
            int(match["line"]),
            match["source"] or "",
            learners=not (match["file"] or "").startswith(_LIBRARIES),
        )
        for match in _FRAME.finditer(last)
    ]


# --- comparing and showing -------------------------------------------------------------------------

_SHORT = 8  # elements up to which a tensor or list is shown whole
_NAN = re.compile(r"\bnan\b")


def differ(got: Any, want: Any, of: str, tol: float) -> tuple[str, str, str] | None:
    """The first difference, as (what is compared, what it should be, what it is); None if they are the same."""
    if isinstance(want, Tensor):
        return _tensors_differ(got, want, of, tol)
    if isinstance(want, Mapping):
        return _items_differ(got, want, of, tol, Mapping, lambda each: dict(each))
    if isinstance(want, Sequence) and not isinstance(want, str):
        return _items_differ(got, want, of, tol, Sequence, lambda each: dict(enumerate(each)))
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    return None if _same(got, want, tol) else (of, *_apart(want, got))


def _apart(want: Any, got: Any) -> tuple[str, str]:
    """Both as a finding prints them. Floats that look alike in six digits are given all they have."""
    told = show(want), show(got)
    if told[0] == told[1] and isinstance(want, float) and isinstance(got, float):
        return f"{want:.17g}", f"{got:.17g}"
    return told


def _items_differ(
    got: Any, want: Any, of: str, tol: float, kind: type, items: Callable[[Any], dict]
) -> tuple[str, str, str] | None:
    """Short lists of plain values are shown whole; of others, the first item that differs."""
    if not isinstance(got, kind) or isinstance(got, str):
        return of, show(want), show(got)
    found, wanted = items(got), items(want)
    if found.keys() != wanted.keys():
        return of, show(want), show(got)
    first = next((d for key in wanted if (d := differ(found[key], wanted[key], f"{of}[{show(key)}]", tol))), None)
    plain = all(isinstance(value, (int, float, str, type(None))) for value in (*found.values(), *wanted.values()))
    return (of, show(want), show(got)) if first and plain and len(wanted) <= _SHORT else first


def _same(got: Any, want: Any, tol: float) -> bool:
    if isinstance(want, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        return math.isclose(got, want, rel_tol=tol, abs_tol=tol) or (math.isnan(got) and math.isnan(want))
    try:
        return isinstance(got, bool) == isinstance(want, bool) and bool(got == want)
    except Exception:  # an odd object's own ==
        return False


def _tensors_differ(got: Any, want: Tensor, of: str, tol: float) -> tuple[str, str, str] | None:
    if not isinstance(got, Tensor):
        return of, _kind(want), show(got)
    if got.shape != want.shape or got.dtype != want.dtype:
        return of, _kind(want), _kind(got)
    exact = tol == 0 or not want.dtype.is_floating_point
    equal = torch.isclose(got, want, *((0, 0) if exact else (tol, tol)), equal_nan=True)
    if bool(equal.all()):
        return None
    if want.numel() <= _SHORT and not exact:
        return of, show(want), show(got)
    index = tuple((~equal).nonzero()[0].tolist())
    count = int((~equal).sum())
    place = f"element {', '.join(map(str, index))} of {of}" if index else of
    more = f" ({count:,} of {want.numel():,} elements differ)" if want.numel() > 1 else ""
    expected, found = _apart(want[index].item(), got[index].item())
    return place, expected, found + more


def _kind(tensor: Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"


def show(value: Any) -> str:
    """A value as a finding prints it: short, on one line, never an error."""
    if isinstance(value, (bool, str, torch.dtype)) or value is None:
        return shorten(repr(value)).removeprefix("torch.")
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and 1e6 <= abs(value) < 2**53 else f"{value:.6g}"
    if isinstance(value, Tensor):
        return shorten(show(value.tolist())) if value.numel() <= _SHORT else _kind(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(show, value[:_SHORT])) + (f", … ({len(value):,} in all)" if len(value) > _SHORT else "")
        comma = "," * (len(value) == 1)
        return shorten(f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})")
    if isinstance(value, Mapping):
        return shorten(", ".join(f"{key}: {show(each)}" for key, each in value.items()) or "nothing")
    if callable(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    try:
        return shorten(repr(value))
    except Exception:  # an odd object's own repr
        return f"a {type(value).__name__}"


def shorten(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def excerpt(text: str) -> str:
    """The first and last lines of what an answer printed."""
    lines = [shorten(line) for line in text.strip().splitlines()]
    if len(lines) > PRINTED:
        half = PRINTED // 2
        lines = [*lines[:half], f"… {len(lines) - PRINTED:,} lines more …", *lines[-half:]]
    return "\n".join(lines)


def cost(outcomes: list[Outcome]) -> str:
    """What a rank sent: "96 bytes a rank: 1 reduce_scatter, 1 all_gather"; empty if it sent nothing."""
    most = max(outcomes, key=lambda outcome: outcome.bytes_sent)
    if not most.ops:
        return ""
    up_to = "" if all(outcome.bytes_sent == most.bytes_sent for outcome in outcomes) else "up to "
    about = "" if most.bytes_sent == int(most.bytes_sent) else "about "  # 2P(N − 1)/N of something odd
    return f"{up_to}{about}{show(round(most.bytes_sent))} bytes a rank: " + ", ".join(f"{n} {op}" for op, n in most.count.items())
