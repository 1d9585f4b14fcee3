"""Hints: three levels, one at a time, then the solution."""

from __future__ import annotations

import re
import sys

from minizero.course.folders import lessons, need_course_root
from minizero.course.progress import hints_taken, read, record_hint
from minizero.course.registry import LEVELS, CourseError, Exercise, find


def hint(name: str, level: int | str | None = None) -> None:
    """Print the next hint for an exercise, that of a level from 1 to 3, or, for the level "solution", the solution."""
    print(solution(name) if level == "solution" else take_hint(name, level))


def take_hint(name: str, level: int | None = None) -> str:
    """The next hint for an exercise (the last one again, once all are taken), noted in the learner's progress."""
    exercise = find(name)
    if level is None:
        level = min(_taken(name) + 1, LEVELS)
    if not isinstance(level, int) or not 1 <= level <= LEVELS:
        raise CourseError(f'hints have levels 1, 2 and 3, not {level!r}. For the solution: {_how_to_ask(name, LEVELS)}')
    record_hint(name, level)
    after = "then the solution: " if level == LEVELS else "the next one: "
    return f"{name}, hint {level} of {LEVELS}\n\n{exercise.hints[level - 1].strip()}\n\n{after}{_how_to_ask(name, level)}"


def next_hint(exercise: Exercise) -> str:
    """How to ask for the next hint, as a failed check says it."""
    taken = _taken(exercise.name)
    which = "" if taken >= LEVELS else f"        (level {taken + 1} of {LEVELS})"
    return _how_to_ask(exercise.name, taken) + which


def _how_to_ask(name: str, taken: int) -> str:
    """The words for what comes after `taken` hints, where the reader sits: in a notebook or at a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # `minizero check` runs a notebook for a reader at a terminal: then the kernel has nobody who could type.
    in_notebook = shell is not None and getattr(getattr(shell, "kernel", None), "_allow_stdin", True)
    if in_notebook:
        return f'hint("{name}", "solution")' if taken >= LEVELS else f'hint("{name}")'
    return f"minizero hint {name}" + " --solution" * (taken >= LEVELS)


def solution(name: str) -> str:
    """The code that solves an exercise, from solutions/NN_topic.ipynb."""
    import nbformat

    exercise = find(name)
    root = need_course_root()
    lesson = next((lesson for lesson in lessons(root) if lesson.topic == exercise.topic), None)
    if lesson is None or not lesson.path("solutions").exists():
        raise CourseError(f"there is no solution of {name} here: solutions/ has no notebook for {exercise.topic}")
    cells = nbformat.read(lesson.path("solutions"), as_version=4).cells
    code = [cell.source for cell in cells if owner(cell) == grade_id(name)]
    if not code:
        raise CourseError(f"solutions/{lesson.name}.ipynb holds no solution of {name}")
    return re.sub(r"^ *### (BEGIN|END) SOLUTION\n?", "", "\n\n\n".join(code), flags=re.MULTILINE).rstrip()


def grade_id(name: str) -> str:
    """The id of an exercise in nbgrader, which takes letters, digits, _ and - only."""
    return name.replace(".", "-")


def owner(cell: dict) -> str | None:
    """The grade id of the exercise that a cell solves: "ddp-broadcast" for its first cell, its second is "ddp-broadcast-2"."""
    meta = cell["metadata"].get("nbgrader", {})
    return re.sub(r"-\d+$", "", meta["grade_id"]) if meta.get("solution") else None


def _taken(name: str) -> int:
    return hints_taken(read().get(name, {}))
