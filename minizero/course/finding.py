"""What a check says when an answer is wrong: one finding, the smallest case that shows it.

✗ zero1.partition   world_size=3, numel=10
  rule      every element belongs to exactly one rank
  expected  rank 2 owns [8, 10)      got  [6, 9)
  so        element 9 belongs to nobody, and rank 2 updates 6 and 7, which are rank 1's
  cause?    shard = numel // world_size drops the remainder: pad first
  hint      minizero hint zero1.partition        (level 1 of 3)
"""

from __future__ import annotations

from collections.abc import Iterable

_ONE_LINE = 100  # characters up to which expected and got share a line


class Finding(Exception):
    """One thing that is wrong with an answer; a check raises it, and `check()` turns it into a CheckFailed.

    rule      what must hold, as a statement
    expected  what the rule asks for in this case
    got       what the answer did
    so        what follows from the difference
    cause     the mistake that usually leads here
    """

    def __init__(self, rule: str, expected: object = "", got: object = "", so: str = "", cause: str = ""):
        super().__init__(rule)
        self.rule, self.expected, self.got, self.so, self.cause = rule, str(expected), str(got), so, cause
        self.at = ""  # the learner's own line, where one is to blame

    def rows(self) -> list[tuple[str, str]]:
        rows = [("rule", self.rule)]
        if (
            self.expected
            and self.got
            and len(self.expected + self.got) <= _ONE_LINE
            and "\n" not in self.expected + self.got
        ):
            rows.append(("expected", f"{self.expected}      got  {self.got}"))
        else:
            rows += [("expected", self.expected), ("got", self.got)]
        return [*rows, ("at", self.at), ("so", self.so), ("cause?", self.cause)]


class Untouched(Exception):
    """The answer is still the stub, or calls another one. The text is that of the stub: the exercise's name."""


class CheckFailed(AssertionError):
    """An answer was refused. Its text is all there is to read: a notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks an exception for its own rendering
        return str(self).splitlines()


class NotDone(CheckFailed):
    """An answer was not given yet."""


def block(mark: str, headline: str, rows: Iterable[tuple[str, str]]) -> str:
    """The text of a verdict: a headline, then one labelled row for each thing to say; empty rows are left out."""
    lines = [f"{mark} {headline}"]
    for label, text in rows:
        first, *more = text.splitlines() or [""]
        if text:
            lines.append(f"  {label:<8}  {first}")
            lines += [f"{'':12}{line}" for line in more]
    return "\n".join(lines)
