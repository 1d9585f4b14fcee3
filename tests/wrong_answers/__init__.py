"""Wrong answers that a check must refuse, and the words in which it must name the mistake.

One file for each exercise, wrong_answers/<topic>/<name>.py, with two kinds of entry:

    @wrong("not divided")                       # the refusal must contain this: a piece of its `cause?` line
    def sums(tensor):
        \"\"\"The mistake, in a sentence.\"\"\"
        ...

    wrong("fp32 master", 84.0, mistake="…")     # answers that are not one function, in the order that check() takes them
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass
class Wrong:
    """One wrong answer. `telling`: what the refusal must say; `mistake`: what it does wrong."""

    exercise: str
    mistake: str
    telling: str
    answers: tuple


_collected: list[tuple[str, str, tuple]] = []


def wrong(telling: str, *answers: Any, mistake: str = "") -> Callable:
    """Note a wrong answer. Without `answers` it decorates the function that is one."""

    def note(function: Callable) -> Callable:
        _collected.append((function.__doc__ or "", telling, (function,)))
        return function

    if answers:
        _collected.append((mistake, telling, answers))
    return note


def load(file: Path) -> list[Wrong]:
    """The wrong answers in a file. It is executed outside any module, so that its functions travel to the ranks by value."""
    _collected.clear()
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": "answers", "__file__": str(file)})
    exercise = f"{file.parent.name}.{file.stem}"
    for mistake, _, _ in _collected:
        assert mistake, f"{file}: say what each wrong answer does wrong, in its docstring or with mistake=…"
    return [
        Wrong(exercise, mistake.strip().partition("\n")[0], telling, answers)
        for mistake, telling, answers in _collected
    ]


def files() -> list[Path]:
    return sorted(FOLDER.glob("[!_]*/[!_]*.py"))
