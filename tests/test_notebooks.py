"""The course as it is: every lesson, exercise, solution and wrong answer that exists.

Lessons run under nbval (`make test`); here is that nbval would notice a changed number.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import wrong_answers

from minizero.course import CheckFailed, NotDone, build, check, notebooks, registry
from minizero.course.notebooks import State
from minizero.course.registry import LEVELS

ROOT = Path(__file__).parents[1]
SOURCES = build.sources(ROOT)
LESSONS = [source.name for source in SOURCES if source.is_lesson]
TOPICS = [source.name for source in SOURCES if not source.is_lesson]
EXERCISES = [exercise for name in TOPICS for exercise in registry.of_topic(name.partition("_")[2])]
WRONG = [wrong for file in wrong_answers.files() for wrong in wrong_answers.load(file)]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """No test is anyone's progress."""
    monkeypatch.setenv("MINIZERO_HOME", str(tmp_path))


def executed(folder, name):
    notebook = notebooks.read(ROOT / folder / f"{name}.ipynb")
    return notebooks.execute(notebook, ROOT / folder, allow_errors=True)


def names(notebook):
    return [name for cell in notebook.cells if (name := notebooks.checked_in(cell))]


# --- exercises -------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOPICS)
def test_untouched_exercises_are_not_done_and_nothing_else_fails(name):
    notebook = executed("exercises", name)
    verdicts = notebooks.verdicts(notebook, names(notebook))
    assert verdicts and [verdict for verdict in verdicts if verdict.state is not State.NOT_DONE] == []
    assert all(f"{verdict.name} is not done yet" in verdict.text for verdict in verdicts)
    assert notebooks.broken_cells(notebook) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOPICS)
def test_solutions_pass_every_check(name):
    notebook = executed("solutions", name)
    verdicts = notebooks.verdicts(notebook, names(notebook))
    assert verdicts and [verdict.text for verdict in verdicts if verdict.state is not State.PASSED] == []
    assert notebooks.broken_cells(notebook) == []


@pytest.mark.parametrize("name", TOPICS)
def test_every_registered_exercise_is_in_its_notebook(name):
    notebook = notebooks.read(ROOT / "exercises" / f"{name}.ipynb")
    assert names(notebook) == [exercise.name for exercise in registry.of_topic(name.partition("_")[2])]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_every_exercise_has_three_hints_and_at_least_three_wrong_answers(exercise):
    assert len({hint.strip() for hint in exercise.hints}) == LEVELS and all(exercise.hints)
    assert Counter(wrong.exercise for wrong in WRONG)[exercise.name] >= 3


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.exercise}: {wrong.mistake}"[:80])
def test_a_wrong_answer_is_refused_and_its_mistake_named(wrong):
    with pytest.raises(CheckFailed) as failure:
        check(wrong.exercise, *wrong.answers)
    assert not isinstance(failure.value, NotDone), failure.value
    assert wrong.telling in str(failure.value), f"{wrong.mistake}\n{failure.value}"


@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.figures], ids=lambda exercise: exercise.name)
def test_known_wrong_numbers_are_never_near_the_right_one(exercise):
    for seed in range(50):
        question = exercise.figures(random.Random(seed))
        for mistake, number in question.mistakes.items():
            assert not question.is_close(number, question.answer), f"seed {seed}: {mistake}"


# --- lessons ---------------------------------------------------------------------------------------


def nbval(notebook):
    """Runs nbval as `make test` does. The exit status and the report."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider", str(notebook)],
        cwd=notebook.parent, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return run.returncode, run.stdout


def counted(cell):
    """The first number that a cell prints and nbval compares: (output, the printed text)."""
    if cell.cell_type == "code" and build.IGNORED not in cell.metadata.get("tags", ()):
        for output in cell.outputs:
            if output.output_type == "stream" and any(character.isdigit() for character in output.text):
                return output
    return None


def change_a_number(notebook):
    """Change the last digit printed by the first cell that prints one and is compared."""
    output = next(output for cell in notebook.cells if (output := counted(cell)))
    place = max(place for place, character in enumerate(output.text) if character.isdigit())
    output.text = output.text[:place] + str((int(output.text[place]) + 1) % 10) + output.text[place + 1 :]


def tiny_lesson(folder):
    cell = nbformat.v4.new_code_cell("print('bytes sent:', 6 * 7)", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", text="bytes sent: 42\n")]
    return nbformat.v4.new_notebook(cells=[cell]), folder / "tiny.ipynb"


def test_a_changed_number_makes_nbval_fail(tmp_path):
    notebook, path = tiny_lesson(tmp_path)
    nbformat.write(notebook, path)
    assert nbval(path)[0] == 0
    change_a_number(notebook)
    nbformat.write(notebook, path)
    status, report = nbval(path)
    assert status == 1 and "bytes sent: 43" in report


@pytest.mark.parametrize("name", LESSONS)
def test_every_code_cell_of_a_lesson_was_executed_and_prints_a_number_that_counts(name):
    notebook = notebooks.read(ROOT / "notebooks" / f"{name}.ipynb")
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert any(counted(cell) for cell in notebook.cells)


@pytest.mark.skipif(
    "MINIZERO_MUTATE" not in os.environ, reason="runs the lessons: MINIZERO_MUTATE=1 pytest -k number_of_a_lesson"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LESSONS)
def test_a_changed_number_of_a_lesson_makes_nbval_fail(name, tmp_path):
    notebook = notebooks.read(ROOT / "notebooks" / f"{name}.ipynb")
    change_a_number(notebook)
    nbformat.write(notebook, tmp_path / "lesson.ipynb")
    assert nbval(tmp_path / "lesson.ipynb")[0] == 1
