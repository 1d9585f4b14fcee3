"""The build: one source, three notebooks, always the same bytes."""

import json
import shutil

import nbformat
import pytest
import toy_course
from nbgrader.nbgraderformat import MetadataValidator

from minizero.course import CourseError, build


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = toy_course.write(tmp_path_factory.mktemp("built"))
    build.build(root)
    return root


@pytest.fixture
def course(built, tmp_path):
    """A copy of the built course, to be changed."""
    return shutil.copytree(built, tmp_path / "course")


def cells(root, folder, kind="code"):
    notebook = nbformat.read(root / folder / "00_toy.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def only_cell(root, text):
    """Write an exercises source of imports and `text`; the lesson stays as it is."""
    toy_course.write(root, exercises=f"# %%\nimport toy_course\nfrom minizero.course import check\n\n{text}")


def test_a_lesson_is_executed_and_keeps_its_outputs(built):
    printed, _, raised, value = cells(built, "notebooks")
    assert [cell.execution_count for cell in (printed, raised, value)] == [1, 3, 4]
    assert printed.outputs[0].text == "4\n" and value.outputs[0].data["text/plain"] == "42"
    assert raised.outputs[0].traceback == ["ValueError: on purpose"]


def test_the_learner_finds_a_named_hole_and_the_solution_is_filled(built):
    assert cells(built, "exercises")[1].source.endswith('    raise NotImplementedError("toy.mean")')
    assert "all_reduce" not in cells(built, "exercises")[1].source
    assert "return tensor / dist.get_world_size()" in cells(built, "solutions")[1].source
    assert cells(built, "exercises")[4].source == "answer = None"


def test_the_authors_stub_takes_the_place_of_the_region(built):
    broken, mended = (cells(built, folder)[8].source for folder in ("exercises", "solutions"))
    assert "    for _ in range(1):\n        tensor /= 1\n    return tensor" in broken
    assert "STUB" not in mended and "range" not in mended


def test_exercises_and_solutions_have_no_outputs(built):
    for folder in ("exercises", "solutions"):
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells(built, folder))


def test_cells_carry_nbgraders_metadata_version_3(built):
    for folder in ("exercises", "solutions"):
        notebook = nbformat.read(built / folder / "00_toy.ipynb", as_version=4)
        MetadataValidator().validate_nb(notebook)
        marked = {c.metadata.nbgrader.grade_id: c.metadata.nbgrader for c in notebook.cells if "nbgrader" in c.metadata}
        assert set(marked) == {
            "toy-mean", "toy-mean-check", "toy-number", "toy-number-check",
            "toy-find_the_bug", "toy-find_the_bug-2", "toy-find_the_bug-check",
        }  # fmt: skip
        check = marked["toy-mean-check"]
        assert (check.grade, check.locked, check.solution, check.points, check.schema_version) == (
            True,
            True,
            False,
            2,
            3,
        )
    assert "checksum" in check or folder == "solutions"


def test_check_cells_of_the_exercises_are_locked(built):
    check = cells(built, "exercises")[2]
    assert check.source == 'check("toy.mean", mean)'
    assert not check.metadata.editable and not check.metadata.deletable


def test_a_second_build_writes_nothing(course):
    assert build.build(course) == []
    assert build.stale(course) == []


def test_exercises_built_elsewhere_are_equal_to_the_byte(built, tmp_path):
    build.build(toy_course.write(tmp_path))
    for folder in ("exercises", "solutions"):
        assert (tmp_path / folder / "00_toy.ipynb").read_bytes() == (built / folder / "00_toy.ipynb").read_bytes()


def test_lessons_built_elsewhere_differ_only_where_output_is_ignored(built, tmp_path):
    build.build(toy_course.write(tmp_path))
    here, there = (json.loads((root / "notebooks" / "00_toy.ipynb").read_text()) for root in (built, tmp_path))
    assert here != there  # the clock
    here["cells"][2]["outputs"] = there["cells"][2]["outputs"] = []
    assert here == there


def test_force_executes_again_and_keeps_outputs_that_are_ignored(course):
    before = (course / "notebooks" / "00_toy.ipynb").read_bytes()
    assert build.build(course, force=True) == []
    assert (course / "notebooks" / "00_toy.ipynb").read_bytes() == before
    notebook = course / "notebooks" / "00_toy.ipynb"
    notebook.write_text(notebook.read_text().replace('"4\\n"', '"5\\n"'))
    assert build.build(course, force=True) == [notebook]


def test_a_changed_lesson_is_stale_and_executed_anew(course):
    toy_course.write(course, lesson=toy_course.LESSON.replace("2 + 2", "2 + 3"))
    assert build.stale(course) == ["notebooks/00_toy.ipynb"]
    assert build.build(course) == [course / "notebooks" / "00_toy.ipynb"]
    assert cells(course, "notebooks")[0].outputs[0].text == "5\n"


def test_a_hand_edited_or_unexecuted_notebook_is_stale(course):
    for folder in ("notebooks", "exercises", "solutions"):
        path = course / folder / "00_toy.ipynb"
        path.write_text(path.read_text().replace("oy", "oyy", 1))
    lesson = nbformat.read(course / "notebooks" / "00_toy.ipynb", as_version=4)
    assert build.stale(course) == ["exercises/00_toy.ipynb", "notebooks/00_toy.ipynb", "solutions/00_toy.ipynb"]
    build.build(course)
    lesson = nbformat.read(course / "notebooks" / "00_toy.ipynb", as_version=4)
    lesson.cells[1].execution_count = None
    nbformat.write(lesson, course / "notebooks" / "00_toy.ipynb")
    assert build.stale(course) == ["notebooks/00_toy.ipynb"]


def test_a_notebook_without_a_source_is_stale(course):
    (course / "notebooks" / "07_gone.ipynb").write_text("{}")
    assert build.stale(course) == ["notebooks/07_gone.ipynb"]


def test_the_command_names_what_is_stale_and_fails(course, capsys):
    assert build.main(["--check", "--root", str(course)]) == 0
    toy_course.write(course, exercises=toy_course.EXERCISES.replace("Toy exercises", "Toys"))
    assert build.main(["--check", "--root", str(course)]) == 1
    assert capsys.readouterr().err == (
        "exercises/00_toy.ipynb is stale: run `make notebooks`\nsolutions/00_toy.ipynb is stale: run `make notebooks`\n"
    )


def test_a_build_leaves_the_learners_copy_alone(course):
    work = course / "work" / "00_toy.ipynb"
    work.parent.mkdir()
    work.write_text("mine")
    toy_course.write(course, exercises=toy_course.EXERCISES.replace("Toy exercises", "Toys"))
    build.build(course)
    assert work.read_text() == "mine" and list(work.parent.iterdir()) == [work]


@pytest.mark.parametrize(
    "cell, complaint",
    [
        ("import sys; print('!', file=sys.stderr)", "writes to stderr"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; print(os.getcwd())", "a folder of this machine"),
    ],
)
def test_a_lesson_that_cannot_be_kept_is_refused(tmp_path, cell, complaint):
    toy_course.write(tmp_path, lesson=f"# %%\n{cell}\n")
    with pytest.raises(CourseError, match=complaint) as error:
        build.build(tmp_path)
    assert "authoring/00_toy_lesson.py" in str(error.value)
    assert not (tmp_path / "notebooks" / "00_toy.ipynb").exists()


def test_a_cell_that_should_raise_and_does_not_is_refused(tmp_path):
    toy_course.write(tmp_path, lesson='# %% tags=["raises-exception"]\n1 + 1\n')
    with pytest.raises(CourseError, match="raises nothing"):
        build.build(tmp_path)


REGION = "### BEGIN SOLUTION\nanswer = 1\n### END SOLUTION\n"


@pytest.mark.parametrize(
    "text, complaint",
    [
        (f"# %%\n{REGION}", "no check cell follows"),
        ("# %%\n### BEGIN SOLUTION\nanswer = 1\n", "do not pair up"),
        ('# %%\ncheck("toy.mean", 1)\n', "after the cells it judges"),
        (f'# %%\n{REGION}\n# %%\ncheck("toy.mean", answer)\nprint()\n', "is one line"),
        (f'# %%\n{REGION}\n# %%\ncheck("toy.maen", answer)\n', "did you mean toy.mean"),
        (f"# %%\n{REGION.replace('answer = 1', 'print()')}\n# %%\ncheck('toy.mean', 1)\n", "assignments only"),
        (f"# %%\n{REGION.replace('= 1', '= 1' + chr(10) + '### STUB' + chr(10) + 'x')}\n# %%\ncheck('toy.mean', 1)\n", "are comments"),
    ],
)  # fmt: skip
def test_exercises_that_make_no_sense_are_refused(tmp_path, text, complaint):
    only_cell(tmp_path, text)
    with pytest.raises(CourseError, match=complaint) as error:
        build.build(tmp_path)
    assert not (tmp_path / "exercises").exists(), error
