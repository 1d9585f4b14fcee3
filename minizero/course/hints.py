"""Hints: three levels, one at a time, then the solution."""

from __future__ import annotations

import re

from minizero.course import folders, progress
from minizero.course.registry import LEVELS, CourseError, Exercise, find


def hint(name: str, level: int | None = None) -> None:
    """Print the next hint for an exercise, or that of a level from 1 to 3."""
    print(take_hint(name, level))


def take_hint(name: str, level: int | None = None) -> str:
    """The next hint for an exercise (the last one again, once all are taken), noted in the learner's progress."""
    exercise = find(name)
    if level is None:
        level = min(_taken(name) + 1, LEVELS)
    if not isinstance(level, int) or not 1 <= level <= LEVELS:
        raise CourseError(f"hints have levels 1, 2 and 3, not {level!r}")
    progress.record_hint(name, level)
    after = "the next one: " if level < LEVELS else "then the solution: "
    command = f"minizero hint {name}" + " --solution" * (level == LEVELS)
    return f"{name}, hint {level} of {LEVELS}\n\n{exercise.hints[level - 1].strip()}\n\n{after}{command}"


def next_hint(exercise: Exercise) -> str:
    """Which hint to ask for, as a failed check names it."""
    taken = _taken(exercise.name)
    if taken >= LEVELS:
        return f"minizero hint {exercise.name} --solution"
    return f"minizero hint {exercise.name}        (level {taken + 1} of {LEVELS})"


def solution(name: str) -> str:
    """The code that solves an exercise, from solutions/NN_topic.ipynb."""
    import nbformat

    exercise = find(name)
    root = folders.need_course_root()
    lesson = next((lesson for lesson in folders.lessons(root) if lesson.topic == exercise.topic), None)
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
    return progress.hints_taken(progress.read().get(name, {}))
