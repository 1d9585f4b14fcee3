"""`check`: one line in a notebook that judges an answer. It prints what was checked, or raises CheckFailed."""

from __future__ import annotations

import os
import traceback
from typing import Any

from minizero.course.expect import Expect, excerpt
from minizero.course.finding import CheckFailed, Finding, NotDone, Untouched, block
from minizero.course.hints import next_hint
from minizero.course.progress import record_pass
from minizero.course.registry import CourseError, Exercise, find


def check(name: str, *answers: Any) -> None:
    """Judge the answers to an exercise. Raises CheckFailed if they are wrong, NotDone if they are not given yet."""
    __tracebackhide__ = True
    exercise = find(name)
    if len(answers) != exercise.answers:
        many = "s" * (exercise.answers != 1)
        raise CourseError(
            f'check("{name}", …) takes {exercise.answers} answer{many} after the name, not {len(answers)}'
        )
    expect = Expect()
    failure = _judge(exercise, answers, expect)
    if failure is not None:
        raise failure
    record_pass(name)
    points = f"{exercise.points} point{'s' * (exercise.points != 1)}"
    print(block("✓", f"{name}   {points}", [("checked", exercise.checked), ("cost", expect.cost())]))


def _judge(exercise: Exercise, answers: tuple, expect: Expect) -> CheckFailed | None:
    try:
        if any(answer is None or answer is ... for answer in answers):
            raise Untouched()
        exercise.check(*answers, expect)
        return None
    except Untouched as stub:
        return _not_done(exercise, str(stub))
    except Finding as finding:
        rows = finding.rows()
    except Exception as error:  # the check could not make sense of the answer
        if os.environ.get("MINIZERO_DEBUG"):
            traceback.print_exc()
        rows = [
            ("rule", "the answer has the form that the statement asks for"),
            ("got", f"{type(error).__name__}: {error}"),
        ]
    rows += [("printed", excerpt(expect.printed)), ("hint", next_hint(exercise))]
    return CheckFailed(block("✗", f"{exercise.name}   {expect.what}".rstrip(), rows))


def _not_done(exercise: Exercise, stub: str) -> NotDone:
    headline = f"{exercise.name} is not done yet"
    try:
        missing = find(stub)
    except CourseError:  # a NotImplementedError with a text of the learner's
        missing = exercise
    if missing is not exercise:
        headline += f": it calls {missing.name}"
    return NotDone(block("✗", headline, [("hint", next_hint(missing))]))
