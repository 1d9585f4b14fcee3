"""The exercises of the course by name, as the modules in minizero/course/checks register them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEVELS = 3


class CourseError(RuntimeError):
    """Something that the reader can put right; the text says how. Shown as one line, in a notebook too."""

    def _render_traceback_(self) -> list[str]:  # IPython asks an exception for its own rendering
        return [str(self)]


@dataclass(frozen=True)
class Exercise:
    """What `check`, `ask` and `hint` know of one exercise.

    check     called as check(*answers, expect); raises Finding or Untouched
    question  given a seed, the text that `ask` prints; None where the statement in the notebook is all
    figures   given a random.Random, the Question of a "say the number"
    answers   how many answers `check(name, …)` takes
    """

    name: str
    hints: tuple[str, ...]
    points: int
    checked: str
    check: Callable[..., Any]
    question: Callable[[int], str] | None = None
    figures: Callable[[Any], Any] | None = None
    answers: int = 1

    @property
    def topic(self) -> str:
        return self.name.partition(".")[0]


_exercises: dict[str, Exercise] = {}


def register(exercise: Exercise) -> None:
    """Make an exercise known. `ValueError` names what is wrong with it."""
    topic, dot, short = exercise.name.partition(".")
    if not dot or not all(part.isidentifier() and part.isascii() for part in (topic, short)):
        raise ValueError(f'an exercise is named "topic.name" (letters, digits, _), not {exercise.name!r}')
    if len(exercise.hints) != LEVELS:
        raise ValueError(
            f"{exercise.name} has {len(exercise.hints)} hints: give three, the idea, the functions, the code in words"
        )
    if not exercise.checked:
        raise ValueError(
            f"{exercise.name}: the first line of the docstring says what is checked, and is printed after ✓"
        )
    _exercises[exercise.name] = exercise


def exercise(name: str, *, hints: list[str], call: str = "", points: int = 1) -> Callable[[Callable], Callable]:
    """Register a check: `fn(answer, expect)`, whose docstring's first line says what it checks.

    name    "topic.name"; the topic is that of the notebook NN_topic
    hints   three: the idea as a question, the functions and the invariant, the code in words
    call    how the answer is called, "partition(numel, rank, world_size)": named when an answer cannot be called so
    points  for grading
    """

    def registered(fn: Callable) -> Callable:
        def check(answer: Any, expect: Any) -> None:
            expect.callable(answer, call)
            fn(answer, expect)

        register(Exercise(name, tuple(hints), points, summary(fn), check))
        return fn

    return registered


def summary(fn: Callable) -> str:
    """The first line of a docstring."""
    return (fn.__doc__ or "").strip().partition("\n")[0].strip()


def load(topic: str | None = None) -> None:
    """Import the checks of one topic, or of all."""
    import minizero.course.checks as checks

    topics = [topic] if topic else [module.name for module in pkgutil.iter_modules(checks.__path__)]
    for each in topics:
        name = f"{checks.__name__}.{each}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def find(name: str) -> Exercise:
    """The exercise of that name. `CourseError` with the nearest names if there is none."""
    if not isinstance(name, str):
        raise CourseError(
            f'the first argument is the exercise\'s name, as in "ddp.broadcast", not {type(name).__name__}'
        )
    if name not in _exercises and name.partition(".")[0].isidentifier():
        load(name.partition(".")[0])
    if name not in _exercises:
        load()
    if name not in _exercises:
        of_topic = [known for known in _exercises if known.partition(".")[0] == name.split("_")[-1]]
        if of_topic:
            raise CourseError(f"{name!r} is a lesson; its exercises are {', '.join(of_topic)}")
        near = difflib.get_close_matches(name, _exercises, n=3, cutoff=0.6)
        near = near or [known for known in _exercises if known.endswith(f".{name}")]
        cure = f": did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(_exercises)}"
        raise CourseError(f"there is no exercise {name!r}{cure}")
    return _exercises[name]


def of_topic(topic: str) -> list[Exercise]:
    """The exercises of a topic, in the order of their module."""
    load(topic)
    return [each for each in _exercises.values() if each.topic == topic]
