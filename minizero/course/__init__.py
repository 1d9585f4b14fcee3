"""All that makes minizero a course: checks, hints, questions, progress, and the notebooks' build.

In a notebook:       from minizero.course import ask, check, hint
In a check module:   from minizero.course import Finding, Question, bug, exercise, number
"""

from minizero.course.changes import changes
from minizero.course.finding import CheckFailed, Finding, NotDone
from minizero.course.grading import check
from minizero.course.hints import hint
from minizero.course.quiz import Question, ask, bug, number
from minizero.course.registry import CourseError, exercise

__all__ = [
    "CheckFailed",
    "CourseError",
    "Finding",
    "NotDone",
    "Question",
    "ask",
    "bug",
    "changes",
    "check",
    "exercise",
    "hint",
    "number",
]
