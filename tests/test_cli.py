"""The command line: a learner's way through the course, and one clear line for everything that goes wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import toy_course

from minizero import cli
from minizero.course import build, doctor, folders, progress
from minizero.course.doctor import Line


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = toy_course.write(tmp_path_factory.mktemp("built"))
    build.build(root)
    return root


@pytest.fixture
def course(built, tmp_path, monkeypatch):
    """A course of one's own, and we are in it. Kernels find toy_course."""
    root = shutil.copytree(built, tmp_path / "course")
    monkeypatch.chdir(root)
    monkeypatch.delenv("MINIZERO_HOME", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_course.__file__).parent))
    monkeypatch.setenv("COLUMNS", "200")
    return root


@pytest.fixture
def minizero(monkeypatch, capsys):
    """minizero("start", "1") -> (exit code, what it printed, what it complained of)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["minizero", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


def test_a_lesson_is_named_in_four_ways(course):
    for name in ("0", "00", "00_toy", "toy"):
        assert folders.find_lesson(course, name).name == "00_toy"


def test_an_unknown_lesson_is_one_clear_line(course, minizero):
    code, out, err = minizero("start", "7")
    assert (code, out, err) == (1, "", "minizero: there is no lesson '7'; there are 00_toy\n")


def test_start_makes_a_copy_and_refuses_to_overwrite_it(course, minizero):
    code, out, _ = minizero("start", "0")
    work = course / "work" / "00_toy.ipynb"
    assert code == 0 and "work/00_toy.ipynb is yours" in out
    assert work.read_bytes() == (course / "exercises" / "00_toy.ipynb").read_bytes()
    work.write_text("my answers")
    code, _, err = minizero("start", "0")
    assert code == 1 and "already there" in err and "minizero reset 00" in err and err.count("\n") == 1
    assert work.read_text() == "my answers"


def test_reset_keeps_every_old_copy(course, minizero):
    work = course / "work" / "00_toy.ipynb"
    minizero("start", "0")
    for text in ("first", "second"):
        work.write_text(text)
        code, out, _ = minizero("reset", "0")
        assert code == 0
    assert "the old one is now work/00_toy.backup-2.ipynb" in out
    assert [(course / "work" / f"00_toy.backup-{i}.ipynb").read_text() for i in (1, 2)] == ["first", "second"]
    assert work.read_bytes() == (course / "exercises" / "00_toy.ipynb").read_bytes()


def test_what_is_to_be_done_anew_has_not_passed(course, minizero):
    minizero("start", "0")
    progress.record_pass("toy.mean")
    progress.record_hint("toy.mean", 2)
    minizero("reset", "0")
    assert progress.read() == {"toy.mean": {"hints": 2}}


def test_reset_without_a_copy_starts_one(course, minizero):
    assert minizero("reset", "toy")[0] == 0
    assert (course / "work" / "00_toy.ipynb").exists()


def test_backups_are_no_lessons(course, minizero):
    minizero("start", "0"), minizero("reset", "0")
    assert [lesson.name for lesson in folders.lessons(course)] == ["00_toy"]


def test_check_of_untouched_exercises_says_not_done_whatever_they_were_before(course, minizero):
    minizero("start", "0")
    progress.record_pass("toy.mean")
    progress.record_hint("toy.mean", 2)
    code, out, _ = minizero("check", "0")
    assert code == 1 and out.count("not done") == 3 and "0 of 3 exercises of 00_toy passed" in out
    assert progress.read() == {"toy.mean": {"hints": 2}}


def test_check_reports_each_exercise_and_records_progress_and_without_its_check_cell_none_is_done(course, minizero):
    minizero("start", "0")
    work = course / "work" / "00_toy.ipynb"
    notebook = nbformat.read(work, as_version=4)
    answers = {
        "toy-mean": "def mean(tensor):\n    dist.all_reduce(tensor)\n    return tensor",
        "toy-number": "answer = 32",
    }
    for cell in notebook.cells:
        cell.source = answers.get(cell.id, cell.source)
    notebook.cells = [cell for cell in notebook.cells if cell.id != "toy-find_the_bug-check"]
    notebook.cells.insert(1, nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(notebook, work)
    before = work.read_bytes()
    code, out, _ = minizero("check", "0")
    assert code == 1
    assert "code cell 1 fails  ZeroDivisionError: division by zero" in out
    assert "✗ toy.mean   world_size=2\n  rule      every rank holds the mean" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["toy.mean", "2", "✗", "failed"] in rows and ["toy.number", "1", "✓", "passed"] in rows
    assert ["toy.find_the_bug", "1", "·", "not", "done"] in rows
    assert "1 of 3 exercises" in out
    assert list(progress.read()) == ["toy.number"]
    assert work.read_bytes() == before  # the learner's file is read, never written


def test_check_of_someone_elses_folder_leaves_progress_alone(course, minizero):
    code, out, _ = minizero("check", "0", "--exercises-from", "solutions")
    assert code == 0 and "3 of 3 exercises of 00_toy passed" in out
    assert progress.read() == {}


def test_a_notebook_that_cannot_be_run_is_one_clear_line(course, minizero):
    assert "`minizero start 00` makes it" in minizero("check", "0")[2]
    minizero("start", "0")
    work = course / "work" / "00_toy.ipynb"
    notebook = nbformat.read(work, as_version=4)
    notebook.cells.insert(1, nbformat.v4.new_code_cell("import os; os._exit(1)"))
    nbformat.write(notebook, work)
    code, _, err = minizero("check", "0")
    assert code == 1 and "00_toy.ipynb ends its own kernel" in err
    work.write_text("{")
    code, _, err = minizero("check", "0")
    assert code == 1 and "is not a notebook that can be read" in err
    assert "there is no" in minizero("check", "0", "--exercises-from", "nowhere")[2]


def test_hints_come_level_by_level_then_the_solution(course, minizero):
    assert "hint 1 of 3" in minizero("hint", "toy.mean")[1]
    assert "hint 2 of 3" in minizero("hint", "toy.mean")[1]
    assert "hint 1 of 3" in minizero("hint", "toy.mean", "--level", "1")[1]
    assert "dist.all_reduce(tensor)" in minizero("hint", "toy.mean", "--solution")[1]
    code, _, err = minizero("hint", "toy.maen")
    assert code == 1 and err == "minizero: there is no exercise 'toy.maen': did you mean toy.mean?\n"


def test_a_solution_in_a_narrow_terminal_is_still_python(course, minizero, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = minizero("hint", "toy.mean", "--solution")
    assert code == 0 and compile(out, "solution", "exec")


def test_a_lesson_in_the_place_of_an_exercise_and_the_reverse(course, minizero):
    assert minizero("hint", "toy")[2].startswith("minizero: 'toy' is a lesson; its exercises are toy.mean, ")
    assert minizero("check", "toy.mean")[2] == "minizero: 'toy.mean' is an exercise; this takes its lesson, 00\n"


def test_an_interrupt_ends_a_check_without_a_word(course, minizero, monkeypatch):
    def interrupted(*_, **__):
        raise AssertionError  # what nbclient says when its kernel was taken away

    minizero("start", "0")
    monkeypatch.setattr("minizero.course.notebooks.execute", interrupted)
    assert minizero("check", "0") == (130, "", "")


def test_status_shows_what_is_done_and_what_is_next(course, minizero):
    code, out, _ = minizero("status")
    assert code == 0 and "00_toy" in out and "A toy lesson" in out and "0 of 3" in out
    assert "next: toy.mean in work/00_toy.ipynb  (`minizero start 00` makes it)" in out
    progress.record_pass("toy.mean")
    progress.record_hint("toy.number", 2)
    minizero("start", "0")
    out = minizero("status")[1]
    assert "■□□ 1 of 3" in out and "next: toy.number in work/00_toy.ipynb\n" in out
    progress.record_pass("toy.number"), progress.record_pass("toy.find_the_bug")
    assert "all exercises have passed" in minizero("status")[1]


def test_without_the_course_every_command_says_how_to_get_it(minizero, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "__file__", str(tmp_path / "site-packages" / "minizero" / "course" / "folders.py"))
    for command in (["start", "0"], ["check", "0"], ["status"], ["reset", "0"], ["lab"]):
        code, _, err = minizero(*command)
        assert code == 1 and "Clone the repository" in err and err.count("\n") == 1


def test_the_course_is_found_from_below_and_beside_the_package(course, monkeypatch, tmp_path):
    (course / "work" / "deep").mkdir(parents=True)
    monkeypatch.chdir(course / "work" / "deep")
    assert folders.course_root() == course
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "__file__", str(course / "minizero" / "course" / "folders.py"))
    assert folders.course_root() == course


def test_a_folder_that_cannot_be_written_is_one_clear_line(course, minizero):
    (course / "work").write_text("a file in its place")
    code, _, err = minizero("start", "0")
    assert code == 1 and err.startswith("minizero: cannot write ") and err.count("\n") == 1


def test_doctor_finds_this_machine_well(minizero):
    code, out, _ = minizero("doctor")
    assert code == 0
    assert "two ranks all-reduced 1 + 2 = 3 with gloo" in out and f"Python {sys.version.split()[0]}" in out
    assert "✗" not in out


def test_doctor_fails_with_the_cure_for_what_is_missing(minizero, monkeypatch):
    lines = [
        Line(True, "Python"),
        Line(False, "1 core", "it works", essential=False),
        Line(False, "no JupyterLab", "pip install it"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(lines))
    code, out, _ = minizero("doctor")
    assert code == 1
    assert out == "✓ Python\n! 1 core\n    → it works\n✗ no JupyterLab\n    → pip install it\n"


def test_doctor_explains_ranks_that_cannot_talk(monkeypatch):
    import minizero as mz

    def broken(*args, **kwargs):
        raise mz.RankError("connection refused")

    monkeypatch.setattr(mz, "Ranks", broken)
    assert not (line := doctor._two_ranks()).ok and "connection refused" in line.text and "firewall" in line.cure


def test_lab_prepares_the_exercises_and_becomes_jupyterlab(course, minizero, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: iter([Line(True, "well")]))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    became = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append(arguments))
    mine = course / "work" / "00_toy.ipynb"
    minizero("lab", "--port", "9000")
    assert mine.exists()
    mine.write_text("mine")
    assert minizero("lab", "--no-browser")[0] == 0
    assert mine.read_text() == "mine"
    assert became[0][:3] == [sys.executable, "-m", "jupyterlab"] and became[0][-2:] == ["--port", "9000"]
    assert {"--allow-root", "--no-browser", f"--ServerApp.root_dir={course}"} <= set(became[0])
    assert "--LabApp.default_url=/lab/tree/notebooks/00_toy.ipynb" in became[0]


def test_lab_as_an_ordinary_user_asks_for_no_root(course, minizero, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: iter([Line(True, "well")]))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    became = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append(arguments))
    minizero("lab")
    assert "--allow-root" not in became[0]


def test_lab_does_not_open_on_a_machine_that_cannot_run_the_course(course, minizero, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: iter([Line(True, "well"), Line(False, "no ranks", "cure")]))
    code, out, err = minizero("lab")
    assert code == 1 and out == "✗ no ranks\n    → cure\n" and "minizero doctor" in err


def test_version_and_help(minizero):
    assert minizero("--version")[:2] == (0, "minizero 0.1.0\n")
    code, out, _ = minizero("--help")
    assert code == 0
    for command in ("doctor", "lab", "start", "check", "hint", "status", "reset"):
        assert command in out


def test_the_installed_command_prints_one_line_for_an_error(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", "from minizero.cli import main; main()", "hint", "nothing.here"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (
        run.returncode == 1
        and "Traceback" not in run.stderr
        and run.stderr.startswith("minizero: there is no exercise")
    )
