"""check(): every odd answer is refused with a word on what is wrong with it, and right ones say what they cost."""

import math
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
import toy_course

import minizero as mz
from minizero.course import CheckFailed, CourseError, Finding, NotDone, check, exercise, expect, progress, registry
from minizero.course.expect import Expect, differ, show


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Progress goes to a folder of its own."""
    monkeypatch.setenv("MINIZERO_HOME", str(tmp_path))


@pytest.fixture
def example():
    """Registers exercises "example.<name>" for one test: the decorator `exercise`, with the rest filled in."""
    before = dict(registry._exercises)

    def register(check, name="example.thing"):
        check.__doc__ = check.__doc__ or "what is checked"
        return exercise(name, hints=["1", "2", "3"], call="thing(x)")(check)

    yield register
    registry._exercises.clear()
    registry._exercises.update(before)


def refused(answer, name="toy.mean"):
    with pytest.raises(CheckFailed) as failure:
        check(name, answer)
    return failure.value


@pytest.fixture
def warm(capsys):
    expect.ranks(2)
    capsys.readouterr()


def test_a_right_answer_prints_what_was_checked_and_what_it_cost(warm, capsys):
    check("toy.mean", toy_course.mean)
    assert capsys.readouterr().out == (
        "✓ toy.mean   2 points\n"
        "  checked   the mean on 2 ranks, and the collectives issued\n"
        "  cost      12 bytes a rank: 1 all_reduce      world_size=2\n"
    )
    assert "passed" in progress.read()["toy.mean"]


def sums(tensor):
    dist.all_reduce(tensor)
    return tensor


def test_a_wrong_answer_is_one_finding_with_its_cause_and_hint(warm, capsys):
    failure = refused(sums)
    assert str(failure) == (
        "✗ toy.mean   world_size=2\n"
        "  rule      every rank holds the mean over the ranks\n"
        "  expected  rank 0's mean is [3, 6, 9]      got  [6, 12, 18]\n"
        "  cause?    the sum is not divided by world_size\n"
        "  hint      minizero hint toy.mean        (level 1 of 3)"
    )
    assert capsys.readouterr() == ("", "")
    assert progress.read() == {}


@pytest.mark.parametrize("world_size, line", [(1, "starting 1 rank …\n"), (2, "starting 2 ranks …\n")])
def test_that_processes_start_is_said_before_the_wait(monkeypatch, capsys, world_size, line):
    monkeypatch.setattr(mz, "Ranks", lambda *_, **__: print("starts", end=""))
    expect.ranks.__wrapped__(world_size)
    assert capsys.readouterr().out == line + "starts"


class Notebook:
    """What IPython answers in a notebook. `someone`: a reader sits there, and could type."""

    def __init__(self, someone):
        self.kernel = type("Kernel", (), {"_allow_stdin": someone})


@pytest.mark.parametrize(
    "someone, hint, solution",
    [
        (True, 'hint("toy.mean")        (level 1 of 3)', 'hint("toy.mean", "solution")'),
        (False, "minizero hint toy.mean        (level 1 of 3)", "minizero hint toy.mean --solution"),
    ],
)
def test_the_hint_is_named_as_the_reader_can_ask_for_it(monkeypatch, someone, hint, solution):
    ipython = type("IPython", (), {"get_ipython": lambda: Notebook(someone)})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert str(refused(sums)).splitlines()[-1] == f"  hint      {hint}"
    progress.record_hint("toy.mean", 3)
    assert str(refused(sums)).splitlines()[-1] == f"  hint      {solution}"


def test_a_notebook_shows_the_finding_without_a_traceback():
    failure = refused(sums)
    assert failure._render_traceback_() == str(failure).splitlines()
    assert "\x1b" not in str(failure)


def stub(tensor):
    raise NotImplementedError("toy.mean")


def calls_a_stub(tensor):
    def other(tensor):
        raise NotImplementedError("toy.number")

    return other(tensor)


@pytest.mark.parametrize("answer", [None, ..., stub])
def test_an_answer_that_is_not_there_is_not_done_yet(answer):
    failure = refused(answer)
    assert type(failure) is NotDone
    assert str(failure).splitlines()[0] == "✗ toy.mean is not done yet"


def test_an_answer_that_calls_another_stub_says_which():
    assert "toy.mean is not done yet: it calls toy.number" in str(refused(calls_a_stub))


def test_torchs_own_not_implemented_is_no_stub():
    def answer(tensor):
        return torch.nn.Module()(tensor)

    failure = refused(answer)
    assert type(failure) is CheckFailed and "NotImplementedError" in str(failure)


def prints_then_raises(tensor):
    print("so far so good")
    return tensor.nope


def test_an_exception_shows_the_learners_line_and_what_was_printed():
    text = str(refused(prints_then_raises))
    assert "raised AttributeError: 'Tensor' object has no attribute 'nope'" in text
    assert "at        prints_then_raises, line" in text and ": return tensor.nope" in text
    assert "printed   [rank 0] so far so good\n            [rank 1] so far so good" in text


def prints(tensor):
    print("noise")
    return toy_course.mean(tensor)


def test_what_a_right_answer_prints_is_not_shown(capsys):
    check("toy.mean", prints)
    assert "noise" not in capsys.readouterr().out


def floods(tensor):
    for line in range(1000):
        print(line)
    return tensor


def test_a_flood_is_cut_in_the_middle():
    lines = str(refused(floods)).splitlines()
    assert "            … 1,988 lines more …" in lines
    assert len(lines) < 25


def leaves_early(tensor):
    if dist.get_rank() == 0:
        return tensor
    return sums(tensor)


def test_a_deadlock_says_where_each_rank_stands():
    text = str(refused(leaves_early))
    assert "deadlock: rank 1 waits in all_reduce" in text and "rank 0  finished" in text
    assert "cause?    one rank leaves before the others" in text


def dies(tensor):
    os._exit(3)


def test_a_rank_that_dies_is_a_finding_and_the_next_check_works():
    text = str(refused(dies))
    assert "rule      every rank stays alive" in text and "exit code 3" in text
    check("toy.mean", toy_course.mean)


def loops(tensor):
    while True:
        time.sleep(0.1)


def test_an_endless_loop_ends_at_the_deadline(monkeypatch):
    expect.ranks(2)  # warm
    monkeypatch.setattr(expect.ranks(2), "timeout", 1.0)
    text = str(refused(loops))
    assert "longer than its 1 s" in text and "time.sleep(0.1)" in text
    assert "cause?" not in text  # it is no deadlock


def counts_differently(tensor):
    dist.broadcast(tensor, 0) if dist.get_rank() == 0 else dist.all_reduce(tensor)
    return tensor


def test_ranks_that_issue_different_collectives_are_found_out():
    assert "the ranks issue different collectives" in str(refused(counts_differently))


def takes_nothing():
    return 1


def holds(lock):
    def answer(tensor):
        with lock:
            return tensor

    return answer


def reads_what_nobody_wrote(tensor):
    return torch.empty_like(tensor)


def reads_before_wait(tensor):
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)  # rank 0 has looked
        dist.send(tensor, 0)
        return tensor
    arriving = tensor.new_empty(3)
    work = dist.irecv(arriving, 1)
    early = arriving / 2
    dist.send(torch.zeros(1), 1)
    work.wait()
    return early


@pytest.mark.parametrize("answer", [reads_what_nobody_wrote, reads_before_wait])
def test_what_nobody_has_written_is_nan_and_named(answer):
    text = str(refused(answer))
    assert "got  [nan, nan, nan]" in text
    assert "cause?    something was read that nobody had written: before its wait, or from torch.empty" in text


def test_nan_that_is_right_is_no_cause():
    with pytest.raises(Finding) as finding:
        Expect().equal(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 2.0]), rule="r")
    assert finding.value.cause == ""


class Odd:
    """An object whose every method fails."""

    def __repr__(self):
        raise ValueError("no repr")

    def __eq__(self, other):
        raise ValueError("no ==")

    __hash__ = None


@pytest.mark.parametrize(
    "answer, complaint",
    [
        (5, "expected  mean(tensor)      got  5"),
        (torch.ones(3), "expected  mean(tensor)      got  [1, 1, 1]"),
        ("mean", "got  'mean'"),
        (Odd(), "got  a Odd"),
        (takes_nothing, "TypeError: takes_nothing() takes 0 positional arguments"),
        (lambda tensor: None, "a return is missing"),
        (lambda tensor: [1.0, 2.0, 3.0], "is a float32 tensor of shape (3,)      got  [1, 2, 3]"),
        (lambda tensor: toy_course.mean(tensor).double(), "got  a float64 tensor of shape (3,)"),
        (lambda tensor: toy_course.mean(tensor)[:2], "got  a float32 tensor of shape (2,)"),
        (lambda tensor: Odd(), "got  a Odd"),
        (lambda tensor: [toy_course.mean(tensor), sums(tensor)][0], "expected  its traffic is all_reduce: 1      got  all_reduce: 2"),
        (lambda tensor: threading.Lock(), "cannot be sent"),
        (holds(threading.Lock()), "cannot pickle '_thread.lock' object"),
    ],
)  # fmt: skip
def test_an_odd_answer_is_refused_in_words(answer, complaint):
    assert complaint in str(refused(answer))


def test_a_wrong_call_says_how_the_answer_is_called(example):
    @example
    def check_thing(answer, expect):
        expect.call(answer, 1, 2)

    text = str(refused(takes_nothing, "example.thing"))
    assert "TypeError" in text


def test_a_check_that_stumbles_over_an_answer_is_a_failed_check(example):
    @example
    def check_thing(answer, expect):
        return expect.call(answer).shape

    text = str(refused(takes_nothing, "example.thing"))
    assert "rule      the answer has the form that the statement asks for" in text
    assert "AttributeError: 'int' object has no attribute 'shape'" in text


def test_a_pure_function_runs_in_a_process_of_its_own(example, capsys):
    @example
    def check_thing(answer, expect):
        """the process"""
        expect.that(expect.call(answer) != os.getpid(), rule="elsewhere")

    check("example.thing", os.getpid)
    assert capsys.readouterr().out == "✓ example.thing   1 point\n  checked   the process\n"


def test_part_of_a_byte_is_rounded_and_said_to_be(example, capsys):
    @example
    def check_thing(answer, expect):
        expect.case(world_size=3)
        expect.run(answer, 3)
        expect.case("the cost is that of the case that was run")

    check("example.thing", lambda rank: dist.all_reduce(torch.ones(38)))  # 2 · 152 · 2/3 bytes
    assert "cost      about 203 bytes a rank: 1 all_reduce      world_size=3\n" in capsys.readouterr().out


def test_the_learners_objects_are_never_changed():
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()

    def answer(tensor):
        model.weight.data.zero_()
        return toy_course.mean(tensor)

    check("toy.mean", answer)
    assert torch.equal(model.weight, before)


def test_an_interrupt_reaches_the_learner(example):
    @example
    def check_thing(answer, expect):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("example.thing", takes_nothing)


def peak_program(rank):
    return torch.ones(1000).sum()


def test_memory_is_measured_when_asked():
    with_memory = Expect().run(peak_program, 2, memory=True)
    assert all(outcome.peak_total >= 4000 for outcome in with_memory)
    assert Expect().run(peak_program, 2)[0].peak == {}


# --- names and registration ------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(CourseError, match=r"no exercise 'toy.maen': did you mean toy.mean"):
        check("toy.maen", 1)
    with pytest.raises(CourseError, match=r"'find_the_bug': did you mean .*toy.find_the_bug"):
        check("find_the_bug", 1)
    with pytest.raises(CourseError, match="not function"):
        check(toy_course.mean, "toy.mean")


def test_too_many_answers_are_no_verdict():
    with pytest.raises(CourseError, match="takes 1 answer after the name, not 2"):
        check("toy.mean", 1, 2)


@pytest.mark.parametrize(
    "name, hints, doc", [("mean", 3, "x"), ("toy.a b", 3, "x"), ("toy.x", 2, "x"), ("toy.x", 3, "")]
)
def test_a_check_that_is_registered_wrongly_says_so(name, hints, doc):
    def check_thing(answer, expect): ...

    check_thing.__doc__ = doc
    with pytest.raises(ValueError, match="topic.name|three|docstring"):
        exercise(name, hints=["x"] * hints)(check_thing)


# --- comparing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "got, want",
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-7])),
        (torch.tensor(float("nan")), torch.tensor(float("nan"))),
        (1.0 + 1e-8, 1.0), (1, 1.0), (torch.tensor(2), 2), ([1, 2], (1, 2)), ({"a": [1.0]}, {"a": [1.0]}), (None, None),
    ],
)  # fmt: skip
def test_what_is_the_same(got, want):
    assert differ(got, want, "it", tol=1e-6) is None


@pytest.mark.parametrize(
    "got, want, difference",
    [
        (True, 1, ("it", "1", "True")),
        (1.1, 1.0, ("it", "1", "1.1")),
        ([1, 2, 3], [1, 2], ("it", "[1, 2]", "[1, 2, 3]")),
        ("ab", ["a", "b"], ("it", "['a', 'b']", "'ab'")),
        ({"a": 1}, {"a": 2}, ("it", "a: 2", "a: 1")),
        ({"a": 1}, {"b": 1}, ("it", "b: 1", "a: 1")),
        ([torch.zeros(1), torch.ones(1)], [torch.zeros(1), torch.zeros(1)], ("it[1]", "[0]", "[1]")),
        (torch.arange(12.0), torch.arange(12.0) * 2, ("element 1 of it", "2", "1 (11 of 12 elements differ)")),
        (torch.ones(2, 2, dtype=torch.int64), torch.eye(2, dtype=torch.int64), ("element 0, 1 of it", "0", "1 (2 of 4 elements differ)")),
        (25_000, 24_000, ("it", "24,000", "25,000")),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(got, want, difference):
    assert differ(got, want, "it", tol=1e-6) == difference


def test_without_tolerance_the_last_bit_counts():
    one = torch.tensor([1.0, 1.0])
    next_one = torch.nextafter(one, one * 2)
    assert differ(next_one, one, "it", tol=1e-6) is None
    assert differ(next_one, one, "it", tol=0) == ("element 0 of it", "1", "1.0000001192092896 (2 of 2 elements differ)")


def test_values_are_shown_short():
    assert show(list(range(100))) == "[0, 1, 2, 3, 4, 5, 6, 7, … (100 in all)]"
    assert len(show("x" * 1000)) == 160
    assert show((1,)) == "(1,)" and show(torch.float16) == "float16" and show({}) == "nothing"
    assert show(torch.zeros(3, 4)) == "a float32 tensor of shape (3, 4)"


def test_a_finding_puts_long_values_on_lines_of_their_own():
    assert Finding("r", "short", "also").rows()[1] == ("expected", "short      got  also")
    assert Finding("r", "long " * 30, "x").rows()[2] == ("got", "x")


def test_ranks_are_shared_and_on_the_cpu():
    assert expect.ranks(2) is expect.ranks(2)
    assert isinstance(expect.ranks(2), mz.Ranks) and expect.ranks(2).timeout == expect.DEADLINE
