"""Say the number, and find the bug."""

import itertools
import math
import random

import pytest
import torch
import toy_course

from minizero.course import CheckFailed, CourseError, NotDone, Question, ask, bug, check, quiz, registry


def all_exercises():
    registry.load()
    return registry._exercises


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIZERO_HOME", str(tmp_path))
    monkeypatch.setattr(quiz, "_asked", {})
    monkeypatch.setattr(quiz, "_worked_out", set())


def refused(*answers):
    with pytest.raises(CheckFailed) as failure:
        check(*answers)
    return str(failure.value)


def test_the_question_has_the_figures_of_its_seed(capsys):
    texts = []
    for seed in (0, 0, 1, 2, 3):
        ask("toy.number", seed=seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == "2 B parameters, DDP, mixed-precision Adam: GB of model states?\n"
    assert len(set(texts)) > 1


def test_the_answer_is_judged_by_the_figures_asked_last():
    check("toy.number", 32)  # nothing was asked: those of seed 0
    ask("toy.number", seed=seed_of(3))
    check("toy.number", 48)
    assert "got       32 GB" in refused("toy.number", 32)


def seed_of(billions):
    return next(seed for seed in range(99) if random.Random(seed).choice([1, 2, 3]) == billions)


@pytest.mark.parametrize("answer", [32, 32.0, 32.1, torch.tensor(32), torch.tensor([31.9])])
def test_a_number_within_one_percent_passes(answer):
    check("toy.number", answer)


FRESH = next(seed for seed in range(1, 99) if random.Random(seed).choice([1, 2, 3]) != 2)  # other figures than seed 0


def test_a_wrong_number_is_worked_out_line_by_line():
    assert refused("toy.number", 24) == (
        "✗ toy.number   seed=0\n"
        "  rule      worked out line by line\n"
        "  expected  2 + 2 + 12 bytes × 2 B\n"
        "            = 32 GB\n"
        "  got       24 GB\n"
        f'  so        the answer to these figures is out: ask("toy.number", seed={FRESH}) gives fresh ones\n'
        "  cause?    the fp32 master weights are missing\n"
        "  hint      minizero hint toy.number        (level 1 of 3)"
    )


def test_after_a_wrong_number_only_fresh_figures_count():
    refused("toy.number", 0)
    assert "the figures are fresh, not worked out already" in refused("toy.number", 32)
    ask("toy.number", seed=0)  # asking once more makes them no fresher
    text = refused("toy.number", 32)
    seed = int(text.partition('ask("toy.number", seed=')[2].partition(")")[0])
    ask("toy.number", seed=seed)
    check("toy.number", 16 * random.Random(seed).choice([1, 2, 3]))


def test_an_answer_that_is_no_number_gives_nothing_away():
    refused("toy.number", "32 GB")
    check("toy.number", 32)


@pytest.mark.parametrize("answer", ["32 GB", [32], True, math.nan, math.inf, torch.ones(2), len])
def test_what_is_no_number_is_refused(answer):
    assert "the answer is a number" in refused("toy.number", answer)


def test_ask_prints_the_options_of_a_bug(capsys):
    ask("toy.find_the_bug")
    assert capsys.readouterr().out == "What would you measure?\n  a  the ranks differ\n  b  all ranks hold the sum\n"


def test_ask_says_so_where_there_is_no_question():
    with pytest.raises(CourseError, match=r"toy\.mean has no question"):
        ask("toy.mean")


@pytest.mark.parametrize("observed", ["b", "B", " b "])
def test_a_bug_named_and_mended_passes(observed):
    check("toy.find_the_bug", observed, toy_course.mean)


def test_a_wrong_observation_is_answered_with_its_reason():
    text = refused("toy.find_the_bug", "a", toy_course.mean)
    assert "got       a: the ranks differ" in text and "cause?    all ranks do the same with the same sum" in text


@pytest.mark.parametrize("observed", ["c", "", 3, toy_course.mean])
def test_an_observation_that_is_no_option_is_refused(observed):
    assert "one of a, b" in refused("toy.find_the_bug", observed, toy_course.mean)


def test_a_right_observation_without_the_mend_is_refused():
    assert "the sum is divided by world_size" in refused("toy.find_the_bug", "b", lambda tensor: tensor)
    assert "expected  average(tensor)" in refused("toy.find_the_bug", "b", "b")


@pytest.mark.parametrize("answers", [(None, toy_course.mean), ("b", None)])
def test_half_an_answer_is_not_done(answers):
    with pytest.raises(NotDone):
        check("toy.find_the_bug", *answers)


def test_every_wrong_option_needs_its_reason():
    with pytest.raises(ValueError, match="why"):
        bug("toy.other", hints=["1", "2", "3"], options={"a": "1", "b": "2", "c": "3"}, observed="a", why={"b": "no"})


def test_a_question_tells_close_numbers_from_others():
    question = Question("?", answer=1e9, unit="bytes", working=[])
    assert question.is_close(1.009e9, 1e9) and not question.is_close(1.02e9, 1e9) and not question.is_close(0, 1e9)


@pytest.mark.parametrize("exercise", sorted(name for name, each in all_exercises().items() if each.figures))
def test_a_wrong_number_has_one_cause(exercise):
    """Two known mistakes never lead to the same number."""
    make = all_exercises()[exercise].figures
    for seed in range(50):
        question = make(random.Random(seed))
        for (a, x), (b, y) in itertools.combinations(question.mistakes.items(), 2):
            assert not question.is_close(x, y), f"seed {seed}: {a} = {b} = {x}"
