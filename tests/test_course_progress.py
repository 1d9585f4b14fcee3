"""Progress survives whatever happens to its file, and never stands in the way of a check. Hints come one at a time."""

import json
import os
import subprocess
import sys

import pytest
import toy_course

from minizero.course import CourseError, build, check, hint, hints, progress


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIZERO_HOME", str(tmp_path))
    return tmp_path


def test_the_first_pass_keeps_its_time(home, monkeypatch):
    progress.record_pass("toy.mean")
    path = home / "progress.json"
    path.write_text(path.read_text().replace("20", "19", 1))
    before = progress.read()
    progress.record_pass("toy.mean")
    assert progress.read() == before and "passed" in before["toy.mean"]


def test_hints_and_passes_live_side_by_side(home):
    progress.record_hint("toy.mean", 2)
    progress.record_hint("toy.mean", 1)
    progress.record_pass("toy.mean")
    assert progress.read()["toy.mean"]["hints"] == 2 and "passed" in progress.read()["toy.mean"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"exercises": 3}', '{"exercises": {"toy.mean": 1}}', b"\xff\xfe\x00", '{"version": 1}']
)
def test_a_damaged_file_is_put_aside_and_a_new_one_begun(home, damage):
    path = home / "progress.json"
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    assert progress.read() == {}
    progress.record_pass("toy.mean")
    assert list(progress.read()) == ["toy.mean"]
    progress.record_hint("toy.number", 1)
    assert (home / "progress.damaged-1.json").exists() and not (home / "progress.damaged-2.json").exists()


def test_an_odd_hint_count_counts_as_none(home):
    (home / "progress.json").write_text('{"exercises": {"toy.mean": {"hints": "many"}}}')
    assert hints.next_hint(hints.find("toy.mean")).endswith("(level 1 of 3)")


def test_two_notebooks_at_once_lose_nothing(home):
    code = "import sys\nfrom minizero.course import progress\nfor i in range(40): progress.record_pass(f'toy.{sys.argv[1]}_{i}')"
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("one", "two")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(progress.read()) == 80
    assert {path.name for path in home.iterdir()} == {"progress.json", "progress.lock"}


def test_where_nothing_can_be_written_a_check_still_passes(home, monkeypatch, capsys):
    (home / "file").write_text("")
    monkeypatch.setenv("MINIZERO_HOME", str(home / "file" / "below"))
    check("toy.number", 32)
    assert "✓ toy.number" in capsys.readouterr().out and progress.read() == {}


def test_without_a_course_and_a_home_a_check_still_passes(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("MINIZERO_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(progress, "course_root", lambda: None)
    monkeypatch.chdir(tmp_path)
    check("toy.number", 32)
    assert "✓ toy.number" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_a_write_that_fails_half_way_leaves_the_old_file(home, monkeypatch):
    progress.record_pass("toy.mean")
    before = (home / "progress.json").read_text()

    def full_disk(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    progress.record_pass("toy.number")
    assert (home / "progress.json").read_text() == before
    assert {path.name for path in home.iterdir()} == {"progress.json", "progress.lock"}


def test_progress_lies_in_the_courses_root(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIZERO_HOME", raising=False)
    root = toy_course.write(tmp_path)
    build.build(root, only=["00_toy_exercises"])
    (root / "work").mkdir()
    monkeypatch.chdir(root / "work")
    progress.record_pass("toy.mean")
    assert list(json.loads((root / ".minizero" / "progress.json").read_text())["exercises"]) == ["toy.mean"]


# --- hints -----------------------------------------------------------------------------------------


def test_each_call_gives_the_next_hint_and_the_last_stays(home, capsys):
    shown = []
    for _ in range(4):
        hint("toy.mean")
        shown.append(capsys.readouterr().out)
    assert [text.splitlines()[2] for text in shown] == [*toy_course.HINTS, toy_course.HINTS[2]]
    assert shown[0].splitlines()[0] == "toy.mean, hint 1 of 3"
    assert shown[0].endswith("the next one: minizero hint toy.mean\n")
    assert shown[2].endswith("then the solution: minizero hint toy.mean --solution\n")


def test_a_level_can_be_asked_for(home, capsys):
    hint("toy.mean", level=2)
    assert toy_course.HINTS[1] in capsys.readouterr().out
    hint("toy.mean")
    assert toy_course.HINTS[2] in capsys.readouterr().out
    for level in (0, 4, "2"):
        with pytest.raises(CourseError, match="levels 1, 2 and 3"):
            hint("toy.mean", level)


def test_a_failed_check_names_the_level_that_comes_next(home):
    exercise = hints.find("toy.mean")
    assert hints.next_hint(exercise).endswith("(level 1 of 3)")
    progress.record_hint("toy.mean", 2)
    assert hints.next_hint(exercise).endswith("(level 3 of 3)")
    progress.record_hint("toy.mean", 3)
    assert hints.next_hint(exercise) == "minizero hint toy.mean --solution"


def test_an_unknown_exercise_has_no_hint(home):
    with pytest.raises(CourseError, match=r"did you mean toy\.mean"):
        hint("toy.men")


def test_the_solution_is_the_code_without_its_markers(monkeypatch, tmp_path):
    root = toy_course.write(tmp_path)
    build.build(root, only=["00_toy_exercises"])
    monkeypatch.chdir(root)
    assert hints.solution("toy.mean") == (
        "def mean(tensor):\n"
        '    """The mean over the ranks."""\n'
        "    # Why so: sum first, then divide.\n"
        "    dist.all_reduce(tensor)\n"
        "    return tensor / dist.get_world_size()"
    )
    assert hints.solution("toy.find_the_bug").startswith('observed = "b"\n\n\ndef average(tensor):')
    (root / "solutions" / "00_toy.ipynb").unlink()
    with pytest.raises(CourseError, match=r"no solution of toy\.mean"):
        hints.solution("toy.mean")
