"""Two kinds of exercise that start with a question: say the number, and find the bug.

`ask(name)` prints the question, `check(name, …)` judges the answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minizero.course.expect import Expect, show
from minizero.course.finding import Finding, Untouched
from minizero.course.registry import CourseError, Exercise, find, register, summary

_asked: dict[str, int] = {}  # exercise -> the seed of the figures that were asked last
_worked_out: set[str] = set()  # questions that have had a wrong answer, and were answered in turn


@dataclass
class Question:
    """A question with a number for an answer.

    text      what is asked, figures included
    answer    the number, in `unit`
    working   how one gets there, line by line; printed after a wrong answer
    mistakes  the mistake, in words -> the number that it leads to; those differ, so that a number has one cause
    tol       relative
    """

    text: str
    answer: float
    unit: str
    working: Sequence[str]
    mistakes: Mapping[str, float] = field(default_factory=dict)
    tol: float = 0.01

    def is_close(self, number: float, to: float) -> bool:
        return math.isclose(number, to, rel_tol=self.tol)


def ask(name: str, seed: int = 0) -> None:
    """Print the question of an exercise. A seed stands for its figures, and `check` judges by those asked last.

    A wrong answer is worked out line by line; after it, in this session, only an answer to fresh figures counts.
    """
    exercise = find(name)
    if exercise.question is None:
        raise CourseError(f"{name} has no question to ask: its statement is in the notebook")
    _asked[name] = seed
    print(exercise.question(seed))


def number(name: str, *, hints: list[str], points: int = 1) -> Callable[[Callable], Callable]:
    """Register a "say the number": `make(rng) -> Question`, rng a random.Random; its docstring says what is asked."""

    def registered(make: Callable[[random.Random], Question]) -> Callable:
        def check(answer: Any, expect: Expect) -> None:
            seed = _asked.get(name, 0)
            expect.case(seed=seed)
            _judge(_as_number(answer), name, seed, make)

        def text(seed: int) -> str:
            return make(random.Random(seed)).text

        register(Exercise(name, tuple(hints), points, summary(make), check, question=text, figures=make))
        return make

    return registered


def _as_number(answer: Any) -> float:
    try:
        if isinstance(answer, (bool, str)):
            raise TypeError
        value = float(answer)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise Finding("the answer is a number", "a number such as 16 or 2.5", show(answer)) from None
    if not math.isfinite(value):
        raise Finding("the answer is a number", "a finite number", show(answer))
    return value


def _judge(got: float, name: str, seed: int, make: Callable[[random.Random], Question]) -> None:
    question = make(random.Random(seed))
    right, known = question.is_close(got, question.answer), question.text in _worked_out
    if right and not known:
        return
    _worked_out.add(question.text)
    fresh = (other for other in range(seed + 1, seed + 100) if make(random.Random(other)).text not in _worked_out)
    so = f'the answer to these figures is out: ask("{name}", seed={next(fresh, seed + 1)}) gives fresh ones'
    if right:
        raise Finding("the figures are fresh, not worked out already", got=f"{show(got)} {question.unit}", so=so)
    raise Finding(
        rule="worked out line by line",
        expected="\n".join([*question.working, f"= {show(question.answer)} {question.unit}"]),
        got=f"{show(got)} {question.unit}",
        so=so,
        cause=next((text for text, wrong in question.mistakes.items() if question.is_close(got, wrong)), ""),
    )


def bug(
    name: str,
    *,
    hints: list[str],
    options: Mapping[str, str],
    observed: str,
    why: Mapping[str, str],
    call: str = "",
    points: int = 1,
) -> Callable[[Callable], Callable]:
    """Register a "find the bug": `fn(mended, expect)` checks the mended function, as any other check does.

    options   label -> what an observer might measure; `ask(name)` prints them
    observed  the label that is right
    why       each wrong label -> why one would not measure that
    """
    if observed not in options or set(why) != set(options) - {observed}:
        raise ValueError(f"{name}: `observed` is one of the options, and `why` answers each of the others")

    def question(seed: int) -> str:
        return "\n".join(["What would you measure?", *(f"  {label}  {text}" for label, text in options.items())])

    def registered(fn: Callable) -> Callable:
        def check(claim: Any, mended: Any, expect: Expect) -> None:
            label = claim.strip().lower() if isinstance(claim, str) else claim
            known = {option.lower(): option for option in options}
            if not isinstance(label, str) or label not in known:
                raise Finding(
                    "the first answer says what one would measure", f"one of {', '.join(options)}", show(claim)
                )
            if known[label] != observed:
                raise Finding(
                    rule="the first answer says what one would measure", got=f"{known[label]}: {options[known[label]]}",
                    cause=why[known[label]],
                )  # fmt: skip
            if mended is None:
                raise Untouched()
            expect.callable(mended, call)
            fn(mended, expect)

        register(Exercise(name, tuple(hints), points, summary(fn), check, question, answers=2))
        return fn

    return registered
