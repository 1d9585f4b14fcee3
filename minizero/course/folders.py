"""Where the course lies: its root, its lessons, and the learner's copies in work/."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minizero.course.registry import CourseError

_NAME = re.compile(r"(\d\d)_(\w+)\.ipynb")


@dataclass(frozen=True)
class Lesson:
    """One step of the course, `NN_topic`, in the course at `root`."""

    root: Path
    number: str
    topic: str

    @property
    def name(self) -> str:
        return f"{self.number}_{self.topic}"

    def path(self, folder: str) -> Path:
        """Its notebook in notebooks/, exercises/, solutions/ or work/."""
        return self.root / folder / f"{self.name}.ipynb"


def course_root(start: Path | None = None) -> Path | None:
    """The folder with exercises/NN_topic.ipynb: from `start` (the current directory) upwards, else beside the package."""
    try:
        start = start or Path.cwd()
    except FileNotFoundError:  # the current directory was deleted
        start = Path("/")
    places = [start, *start.parents, Path(__file__).resolve().parents[2]]
    return next((place for place in places if _notebooks(place / "exercises")), None)


def need_course_root() -> Path:
    root = course_root()
    if root is None:
        raise CourseError(
            "the course's notebooks are not here: the installed package has the code only. "
            "Clone the repository, and run minizero inside it (`make lab` opens the course)"
        )
    return root


def lessons(root: Path) -> list[Lesson]:
    """All lessons of the course at `root`, in order."""
    names = {match.groups() for folder in ("notebooks", "exercises") for match in _notebooks(root / folder)}
    return [Lesson(root, number, topic) for number, topic in sorted(names)]


def find_lesson(root: Path, name: str) -> Lesson:
    """The lesson that is meant by "1", "01", "01_ddp" or "ddp". `CourseError` lists the lessons if there is none."""
    known = lessons(root)
    topic, _, exercise = name.partition(".")
    for lesson in known:
        if exercise and topic == lesson.topic:
            raise CourseError(f"{name!r} is an exercise; this takes its lesson, {lesson.number}")
        if name in (lesson.name, lesson.topic) or (name.isdecimal() and int(name) == int(lesson.number)):
            return lesson
    raise CourseError(f"there is no lesson {name!r}; there are {', '.join(lesson.name for lesson in known)}")


def start(lesson: Lesson) -> Path:
    """Copy the exercises to work/. `CourseError` if the learner has a copy: it is never overwritten."""
    target = lesson.path("work")
    if target.exists():
        raise CourseError(
            f"work/{target.name} is already there and stays as it is: go on in it, "
            f"or `minizero reset {lesson.number}` makes a fresh copy and keeps yours beside it"
        )
    source = lesson.path("exercises")
    if not source.exists():
        raise CourseError(f"{lesson.name} has no exercises")
    with _writing(target):
        target.parent.mkdir(exist_ok=True)
        with open(source, "rb") as original, open(target, "xb") as copy:  # x: whoever came first keeps the file
            shutil.copyfileobj(original, copy)
    return target


def reset(lesson: Lesson) -> tuple[Path | None, Path]:
    """Make a fresh copy in work/. Returns where the old one went (None if there was none) and the new one."""
    old, backup = lesson.path("work"), None
    if old.exists() and lesson.path("exercises").exists():
        number = 1
        while (backup := old.with_name(f"{lesson.name}.backup-{number}.ipynb")).exists():
            number += 1
        with _writing(old):
            os.rename(old, backup)
    return backup, start(lesson)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CourseError(f"cannot write {path}: {error.strerror}") from error


def _notebooks(folder: Path) -> list[re.Match]:
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [match for name in names if (match := _NAME.fullmatch(name))]
