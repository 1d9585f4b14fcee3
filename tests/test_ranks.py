"""Ranks, as a learner meets them: what travels, what is printed, what stays clean, and how each failure is told."""

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import alive, children
from jupyter_client.manager import start_new_kernel

import minizero as mz

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks need not import pytest


def all_reduce(rank):
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    return x.tolist()


def pids(ranks):
    return ranks.run(lambda rank: os.getpid())


@contextlib.contextmanager
def timeout_of(ranks, seconds):
    before, ranks.timeout = ranks.timeout, seconds
    try:
        yield
    finally:
        ranks.timeout = before


def failure(ranks, fn, *args, timeout=30):
    """The error of a run that has to fail, long before its deadline; and the next run is right again."""
    ranks.run(all_reduce)  # warm
    begin = time.monotonic()
    with timeout_of(ranks, timeout), pytest.raises(mz.RankError) as caught:
        ranks.run(fn, *args)
    assert time.monotonic() - begin < timeout - 10
    assert ranks.run(all_reduce)[0] == [sum(range(1, ranks.world_size + 1))] * 3
    return caught.value


def await_(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.05)


# --- what travels -----------------------------------------------------------------------------------


@dataclass
class Pair:
    rank: int
    x: torch.Tensor

    def twice(self, rank):
        return 2 * (rank + self.rank)

    def __call__(self, rank):
        return self.rank + rank


def test_results_come_in_rank_order(ranks):
    assert ranks(3).run(lambda rank, a, b: (rank, a + b), 1, 2) == [(0, 3), (1, 3), (2, 3)]


def test_the_default_process_group_is_there(ranks):
    assert ranks(2).run(all_reduce) == [[3, 3, 3]] * 2
    assert ranks(2).run(lambda rank: (dist.get_rank(), dist.get_world_size(), mz.device().type, mz.init())) == [
        (0, 2, "cpu", None),
        (1, 2, "cpu", None),
    ]


def test_closures_partials_methods_and_callable_objects(ranks):
    factor, pair = 10, Pair(5, torch.ones(1))
    assert ranks(2).run(lambda rank: factor * rank) == [0, 10]
    assert ranks(2).run(functools.partial(lambda a, rank: (a, rank), 5)) == [(5, 0), (5, 1)]
    assert ranks(2).run(pair.twice) == [10, 12]
    assert ranks(2).run(pair) == [5, 6]


def test_a_class_comes_back_as_the_same_class(ranks):
    pairs = ranks(2).run(lambda rank, pair: Pair(rank, pair.x * rank), Pair(0, torch.ones(2)))
    assert [type(pair) is Pair for pair in pairs] == [True, True] and pairs[1].x.tolist() == [1, 1]


def test_two_hundred_megabytes_there_and_back(ranks):
    big = torch.arange(50_000_000, dtype=torch.float32)
    back = ranks(2).run(lambda rank, x: x + 1 if rank else x[-1].item(), big)
    assert back[0] == big[-1].item() and torch.equal(back[1], big + 1)


def test_a_module_that_ranks_cannot_import_travels_with_its_code(ranks, tmp_path):
    file = tmp_path / "elsewhere.py"
    file.write_text(
        "class Box:\n    def __init__(self, x): self.x = x\n"
        "def box(rank): return Box(rank)\n"
        "def bad(rank): raise ValueError('from elsewhere')\n"
    )
    spec = importlib.util.spec_from_file_location("elsewhere", file)
    module = sys.modules["elsewhere"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        assert [type(box) is module.Box for box in ranks(2).run(module.box)] == [True, True]
        assert ranks(2).run(functools.partial(lambda make, rank: make(rank).x, module.box)) == [0, 1]
        assert "def bad(rank): raise ValueError('from elsewhere')" in str(failure(ranks(2), module.bad))
    finally:
        del sys.modules["elsewhere"]


def test_a_module_without_a_file_travels_with_its_code(ranks, monkeypatch):
    module = types.ModuleType("from_nowhere")
    exec("def f(rank): return rank + 10", module.__dict__)
    monkeypatch.setitem(sys.modules, "from_nowhere", module)
    assert ranks(2).run(module.f) == [10, 11]


def test_ranks_never_run_the_old_code_of_an_edited_file(ranks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_it.py").write_text("def g(): return 'old'\n")
    (tmp_path / "module_of_it.py").write_text("import helper_of_it\ndef f(rank): return helper_of_it.g()\n")
    module = importlib.import_module("module_of_it")
    assert ranks(2).run(module.f) == ["old", "old"]
    before = pids(ranks(2))
    assert pids(ranks(2)) == before
    (tmp_path / "helper_of_it.py").write_text("def g(): return 'new, and longer'\n")
    assert ranks(2).run(module.f) == ["new, and longer"] * 2
    after = pids(ranks(2))
    assert after != before and pids(ranks(2)) == after


@pytest.mark.parametrize("fn", [3, None, "all_reduce"])
def test_only_functions_can_be_run(ranks, fn):
    with pytest.raises(TypeError, match="needs a function of the rank"):
        ranks(2).run(fn)


def test_what_cannot_be_pickled_is_refused_before_anything_runs(ranks):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to the ranks: cannot pickle '_thread\.lock' object"):
        ranks(2).run(lambda rank, lock: 0, lock)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        ranks(2).run(lambda rank: lock)
    assert ranks(2).run(all_reduce) == [[3, 3, 3]] * 2


# --- what is printed --------------------------------------------------------------------------------


def test_prints_come_in_rank_order_each_line_marked(ranks, capsys):
    def fn(rank):
        time.sleep(0.1 * (1 - rank))
        print("first\nsecond", rank)
        print("grüße", file=sys.stderr)
        os.write(1, b"from C\n")
        print("10 %\r100 %")
        warnings.warn("a warning", stacklevel=1)
        print("no end of line", end="")

    ranks(2).run(fn)
    out, err = capsys.readouterr()
    lines = ["first", "second {}", "from C", "100 %", "no end of line"]
    assert out == "".join(f"[rank {rank}] {line}\n".format(rank) for rank in range(2) for line in lines)
    told = err.splitlines()
    assert [line.startswith("[rank 0]") for line in told] == [True] * 3 + [False] * 3
    assert all(line.startswith("[rank 1]") for line in told[3:])
    assert told[0] == "[rank 0] grüße" and "UserWarning: a warning" in told[1]


def test_prints_come_out_also_when_the_run_fails(ranks, capsys):
    def fn(rank):
        print("so far", rank)
        raise ValueError

    failure(ranks(2), fn)
    assert capsys.readouterr().out == "[rank 0] so far 0\n[rank 1] so far 1\n"


def test_rank_0_is_shown_while_it_runs(ranks, tmp_path):
    def fn(rank, seen):
        print("begun", rank)
        while not seen.exists():
            time.sleep(0.01)

    class Screen(io.StringIO):
        def write(self, text):
            if "begun 0" in text:
                (tmp_path / "seen").touch()
            return super().write(text)

    with contextlib.redirect_stdout(Screen()) as screen:
        ranks(2).run(fn, tmp_path / "seen")
    assert screen.getvalue() == "[rank 0] begun 0\n[rank 1] begun 1\n"


def test_a_flood_of_five_megabytes_comes_through(ranks):
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        ranks(2).run(lambda rank: [print("x" * 100) for _ in range(25_000)] and None)
    assert screen.getvalue() == ("[rank 0] " + "x" * 100 + "\n") * 25_000 + ("[rank 1] " + "x" * 100 + "\n") * 25_000


def test_a_replaced_stdout_is_put_back(ranks, capsys):
    def fn(rank):
        sys.stdout.close()
        sys.stdout = io.StringIO()

    ranks(2).run(fn)
    ranks(2).run(lambda rank: print("again"))
    assert capsys.readouterr().out == "[rank 0] again\n[rank 1] again\n"


# --- a clean state for each run ---------------------------------------------------------------------


def test_every_run_starts_from_the_same_state(ranks, monkeypatch, tmp_path):
    def state(rank):
        x = torch.rand(2)
        return (
            (x.tolist(), x.dtype, x.device.type, x.add(0).requires_grad, torch.is_grad_enabled()),
            (random.random(), np.random.rand(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
            (os.getcwd(), list(sys.path), dict(os.environ), list(warnings.filters)),
        )

    def spoil(rank):
        torch.manual_seed(7 + rank)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        random.seed(9)
        np.random.seed(9)
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        os.environ["SPOILT"] = os.environ.pop("HOME", "")
        warnings.simplefilter("error")

    first = ranks(2).run(state)
    assert first[0] == first[1]
    ranks(2).run(spoil)
    assert ranks(2).run(state) == first
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_PARENT", "1")
    cwd, _, environ, _ = ranks(2).run(state)[0][2]
    assert cwd == str(tmp_path) and environ["OF_THE_PARENT"] == "1"


def left_group(rank):
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    dist.new_group([0])


def destroyed(rank):
    dist.destroy_process_group()


def destroyed_by_one(rank):
    if rank == 0:
        dist.destroy_process_group()


def not_waited_for(rank):
    dist.all_reduce(torch.ones(10_000), async_op=True)
    dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), async_op=True)


def not_received(rank):
    if rank == 0:
        dist.isend(torch.full((3,), 7.0), 1)


def own_group(rank, folder):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    dist.barrier()


@pytest.mark.parametrize("fn", [left_group, destroyed, destroyed_by_one, not_waited_for, not_received, own_group])
def test_nothing_that_a_run_leaves_behind_meets_the_next(ranks, fn, tmp_path):
    before = pids(ranks(2))
    ranks(2).run(fn, *([tmp_path] if fn is own_group else []))

    def message(rank):
        x = torch.full((3,), float(rank))
        dist.recv(x, 0) if rank else dist.send(x + 1, 1)
        return x.tolist()

    assert ranks(2).run(message)[1] == [1, 1, 1]
    assert ranks(2).run(left_group) == [None, None]  # subgroups can be made in a warm group too
    assert pids(ranks(2)) == before


def test_fifty_runs_leave_nothing_behind(ranks):
    def footprint(rank):
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    def everything():
        files = list(ranks(2)._pool._folder.iterdir())
        return psutil.Process().num_fds(), len(children()), len(files), ranks(2).run(footprint)

    def leaves_a_model_behind(rank):
        model = torch.nn.Linear(1000, 1000)
        model.itself = [model]  # a cycle of 4 MB
        return psutil.Process().memory_info().rss

    begin = ranks(2).run(leaves_a_model_behind)
    before = everything()
    times = []
    for _ in range(50):
        at = time.perf_counter()
        ranks(2).run(all_reduce)
        times.append(time.perf_counter() - at)
        end = ranks(2).run(leaves_a_model_behind)
    assert everything() == before
    assert max(end) - max(begin) < 50e6
    assert statistics.median(times) < 0.03


# --- failures ---------------------------------------------------------------------------------------


def test_a_rank_that_raises_is_told_with_its_own_lines_and_the_others(ranks):
    before = pids(ranks(2))

    def fn(rank):
        if rank == 1:
            raise ValueError("bad learning rate")  # this line
        dist.all_reduce(torch.ones(3))  # that line

    error = failure(ranks(2), fn)
    assert (error.rank, error.exception_type, error.message) == (1, "ValueError", "bad learning rate")
    text = str(error)
    assert text.startswith("rank 1 raised ValueError: bad learning rate")
    assert 'raise ValueError("bad learning rate")  # this line' in text and "minizero/" not in text
    assert "rank 0  lost its connection, waiting in all_reduce #1 (float32 [3], SUM) at " in text
    assert "dist.all_reduce(torch.ones(3))  # that line" in text
    assert pids(ranks(2)) == before  # nobody had to be killed


def test_the_first_to_raise_is_named_whatever_its_rank(ranks, tmp_path):
    def fn(rank, raised):
        if rank < 2:
            while not raised.exists():
                time.sleep(0.01)
            time.sleep(0.15)
        else:
            raised.touch()
        raise KeyError(rank)

    error = failure(ranks(3), fn, tmp_path / "raised")
    assert (error.rank, error.exception_type, error.message) == (2, "KeyError", "2")


def test_what_follows_from_a_failure_never_hides_it(ranks):
    def fn(rank):
        if rank == 2:
            dist.destroy_process_group()
            time.sleep(0.5)  # the others notice, and fail before this rank does
            raise ArithmeticError("the cause")
        try:
            dist.barrier()
        except RuntimeError as error:
            raise ValueError("a consequence") from error

    assert failure(ranks(3), fn).message == "the cause"


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError


def noted(rank):
    try:
        raise OSError("the reason")
    except OSError as reason:
        error = ValueError("the error")
        error.__notes__ = ["and a note"]
        raise error from reason


def raise_(error):
    raise error


@pytest.mark.parametrize(
    "fn, kind, text",
    [
        (lambda rank: raise_(Unpicklable()), "Unpicklable", "holds a lock"),
        (lambda rank: raise_(Speechless()), "Speechless", "raise error"),
        (noted, "ValueError", "the error"),
        (noted, "ValueError", "OSError: the reason"),
        pytest.param(noted, "ValueError", "and a note", marks=pytest.mark.skipif("sys.version_info < (3, 11)")),
        (lambda rank: sys.exit(0), "SystemExit", "sys.exit(0) was called in a rank"),
        (lambda rank: sys.exit("bye"), "SystemExit", "sys.exit('bye') was called in a rank"),
        (lambda rank: raise_(KeyboardInterrupt()), "KeyboardInterrupt", "rank"),
        (lambda rank: (x for x in "ab"), "TypeError", "returned a generator that cannot be sent to the parent process"),
        (lambda rank: torch.ones(2) @ torch.ones(3), "RuntimeError", "inconsistent tensor size"),
        (lambda: 0, "TypeError", "takes 0 positional arguments but 1 was given"),
    ],
)
def test_any_exception_is_told(ranks, fn, kind, text):
    before = pids(ranks(2))
    error = failure(ranks(2), fn)
    assert error.exception_type == kind and text in str(error)
    assert pids(ranks(2)) == before


def test_out_of_memory_is_told(ranks):
    def fn(rank, of_python):
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
        try:
            bytearray(2**30) if of_python else torch.empty(2**30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    assert failure(ranks(2), fn, True).exception_type == "MemoryError"
    assert "can't allocate memory" in failure(ranks(2), fn, False).message


class Unreadable:
    """Can be pickled, but not be read again in the parent."""

    def __reduce__(self):
        return _only_in_ranks, (os.getpid(),)


def _only_in_ranks(pid):
    if pid != os.getpid():
        raise ImportError("not here")


def test_a_result_that_cannot_be_read_is_told(ranks):
    error = failure(ranks(2), lambda rank: Unreadable() if rank else 0)
    assert error.rank == 1 and "the result of rank 1 cannot be read here: not here" in str(error)


def leave_at_once(rank):
    if rank == 1:
        os._exit(0)
    dist.barrier()


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash(rank):
    if rank == 1:
        ctypes.string_at(0)  # this line
    dist.barrier()


@pytest.mark.parametrize(
    "fn, texts",
    [
        (leave_at_once, ["rank 1 died: exit code 0 (os._exit"]),
        (killed, ["rank 1 died: SIGKILL (killed from outside; when memory ran out, by the system)"]),
        (
            crash,
            ["rank 1 died: SIGSEGV", "it was computing, after 0 calls, at ", "ctypes.string_at(0)  # this line"],
        ),
    ],
)
def test_a_death_is_told_and_survived(ranks, fn, texts):
    error = failure(ranks(2), fn)
    assert (error.rank, error.exception_type) == (1, "ProcessDied")
    for text in [*texts, "rank 0  lost its connection, waiting in barrier #1 at "]:
        assert text in str(error)


def test_under_torchrun_nobody_starts_ranks_of_their_own(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RuntimeError, match=r"call mz.init\(\) in place of mz.launch\(\)"):
        mz.launch(all_reduce, 2)


def test_a_rank_that_dies_between_runs_is_replaced(ranks):
    (second,) = [process for pid in pids(ranks(2))[1:] for process in multiprocessing.active_children() if process.pid == pid]
    second.kill()
    second.join(10)
    assert ranks(2).run(all_reduce) == [[3, 3, 3]] * 2


# --- deadlocks: what the journals prove, see also test_diagnosis.py --------------------------------------


def skip(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True).wait()  # this line


def different(rank):
    dist.barrier() if rank else dist.monitored_barrier()


def from_each_other(rank):
    dist.recv(torch.ones(3), 1 - rank)


def two_groups_in_other_order(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def group_of_one_side(rank):
    if rank == 0:
        dist.new_group([0, 1])


@pytest.mark.parametrize(
    "fn, texts",
    [
        (skip, ["but rank 1 has finished without it", "async_op=True).wait()  # this line", "rank 1  finished, after 0 calls"]),
        (different, ["different collectives (not the same arguments): rank 0 barrier #1 (monitored), rank 1 barrier #1"]),
        (from_each_other, ["rank 0 waits in recv from rank 1 #1 (float32 [3]) while rank 1 waits in recv from rank 0"]),
        (two_groups_in_other_order, ["SUM, group 2 of ranks [0, 1]) while rank 1 waits in all_reduce #1 (float32 [1], SUM, group 1"]),
        (group_of_one_side, ["rank 0 waits in new_group #1 (ranks=[0, 1]), but rank 1 has finished without it"]),
    ],
)  # fmt: skip
def test_a_deadlock_is_told_long_before_the_deadline(ranks, fn, texts):
    before = pids(ranks(2))
    error = failure(ranks(2), fn)
    assert isinstance(error, mz.RanksTimeout) and isinstance(error, TimeoutError)
    assert str(error).startswith("deadlock: ") and "Where each rank stands:" in str(error)
    for text in [*texts, "rank 0  waiting in "]:
        assert text in str(error)
    if fn is not group_of_one_side:  # that one waits for a file, and not on a connection
        assert pids(ranks(2)) == before  # the ranks let go of each other, and nobody had to be killed


def lets_go_and_goes_on(rank):
    try:
        dist.recv(torch.ones(3), src=1 - rank)
    except RuntimeError:
        time.sleep(60)


def test_a_rank_that_does_not_let_go_is_replaced(ranks):
    before = pids(ranks(2))
    assert str(failure(ranks(2), lets_go_and_goes_on)).startswith("deadlock: ")
    assert not set(before) & set(pids(ranks(2)))


def test_unequal_sizes_are_told_on_both_sides_though_gloo_ends_the_process(ranks):
    error = failure(ranks(2), lambda rank: dist.all_reduce(torch.ones(3000 + 1000 * rank)))
    sides = "rank 0 all_reduce #1 (float32 [3000], SUM), rank 1 all_reduce #1 (float32 [4000], SUM)"
    assert f"the ranks issue different collectives (not the same size): {sides}" in str(error)
    assert str(error).count("dist.all_reduce(torch.ones(3000 + 1000 * rank))") == 2


def other_dtype(rank):
    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank]))


def other_reduction(rank):
    dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])


def longer_than_sent(rank):
    dist.recv(torch.ones(4), 0) if rank else dist.send(torch.ones(3), 1)


@pytest.mark.parametrize(
    "fn, difference", [(other_dtype, "dtype"), (other_reduction, "arguments"), (longer_than_sent, "size")]
)
def test_a_mix_up_that_would_be_silently_wrong_is_told(ranks, fn, difference):
    error = failure(ranks(2), fn)
    assert error.exception_type == "RankError" and f"(not the same {difference})" in error.message
    assert "what they computed together is not to be trusted" in str(error)


def test_at_the_deadline_each_rank_is_placed(ranks):
    def fn(rank):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass  # an endless loop

    ranks(2).run(all_reduce)
    with timeout_of(ranks(2), 1.0), pytest.raises(mz.RanksTimeout) as caught:
        ranks(2).run(fn)
    text = str(caught.value)
    assert text.startswith("the run took longer than its 1 s (timeout=1 of mz.Ranks") and caught.value.rank == 0
    assert "rank 0  computing, after 1 call, at " in text
    assert "while True" in text or "# an endless loop" in text
    assert "rank 1  computing, after 1 call" in text


def helped_by_a_thread(rank):
    """The main thread waits for what a thread of the other rank sends later."""
    late = threading.Timer(1.0, dist.send, (torch.ones(1), 1 - rank))
    late.start()
    told = torch.zeros(1)
    dist.recv(told, 1 - rank)
    late.join()
    return told.item()


def not_for_ever(rank):
    """Calls with a time limit of their own end by themselves."""
    short = dist.new_group(timeout=timedelta(seconds=0.8))
    if rank == 0:
        for wait in (
            functools.partial(dist.recv, torch.zeros(1), 1, group=short),
            functools.partial(dist.monitored_barrier, timeout=timedelta(seconds=0.8)),
        ):
            with pytest.raises(RuntimeError, match="(?i)timed out"):
                wait()
    else:
        time.sleep(2.5)
    return "went on"


@pytest.mark.parametrize("fn, result", [(helped_by_a_thread, 1.0), (not_for_ever, "went on")])
def test_who_may_still_go_on_is_not_accused(ranks, fn, result):
    assert ranks(2).run(fn) == [result] * 2
    assert ranks(2).run(all_reduce) == [[3, 3, 3]] * 2


def open_files(rank):
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_deadlocks_leave_no_open_file(ranks):
    counts = []
    for _ in range(4):
        failure(ranks(2), from_each_other)
        counts.append(ranks(2).run(open_files))
    assert counts[1:] == counts[:-1]


def leaves_a_thread(rank):
    threading.Timer(1.0, dist.all_reduce, (torch.full((3,), 1000.0),)).start()
    raise KeyError("and the thread goes on")


def test_a_thread_of_a_failed_run_never_meets_the_next(ranks):
    for _ in range(2):
        assert failure(ranks(2), leaves_a_thread).exception_type == "KeyError"
        assert ranks(2).run(lambda rank: [time.sleep(1.2), all_reduce(rank)][1]) == [[3, 3, 3]] * 2


def lost_another_connection(rank):
    if rank == 0:
        raise RuntimeError("Connection reset: no database here")
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    raise ValueError("a consequence")


def test_a_connection_that_is_none_between_ranks_is_a_cause(ranks):
    assert failure(ranks(2), lost_another_connection).rank == 0


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index**2


def test_a_rank_may_have_workers_that_load_data(ranks):
    def fn(rank):
        class Cubes(Squares):  # as in a notebook: no file has it
            def __getitem__(self, index):
                return index**3

        loaders = [torch.utils.data.DataLoader(kind(), num_workers=2) for kind in (Squares, Cubes)]
        return [[int(batch) for batch in loader] for loader in loaders]

    assert ranks(2).run(fn) == [[[0, 1, 4, 9], [0, 1, 8, 27]]] * 2


def test_no_false_alarm(ranks):
    """Ranks wait for each other for longer than two looks at the journals, and all is well."""

    def fn(rank):
        late = functools.partial(time.sleep, 0.7)
        x, y = torch.ones(3), torch.zeros(3)
        if rank == 1:
            late()
        dist.monitored_barrier()
        left, right = (rank - 1) % 3, (rank + 1) % 3
        if rank == 0:  # a send that nobody takes yet
            dist.send(x, 1)
            dist.recv(y)
        else:
            late()
            dist.recv(y, rank - 1)
            dist.send(x, right)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
        for work in works:
            work.wait()
        works = [dist.all_reduce(torch.ones(10**i), async_op=True) for i in range(5)]
        for work in works if rank else reversed(works):
            work.wait()
        ins, outs = [[1, 2, 3], [3, 1, 2], [2, 3, 1]][rank], [[1, 3, 2], [2, 1, 3], [3, 2, 1]][rank]
        dist.all_to_all_single(torch.zeros(6), torch.ones(6), outs, ins)
        chunks = [torch.zeros(2)] * 3 if rank == 1 else None
        dist.gather(torch.ones(2), chunks, dst=1)
        dist.scatter(torch.ones(2), chunks, src=1)
        objects = [None] * 3
        dist.all_gather_object(objects, "x" * rank)
        dist.broadcast_object_list(objects, src=2)
        pair, rest = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank == 1:
            late()
        if rank < 2:
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x, group=pair)
        if rank > 0:
            dist.all_reduce(x, group=rest)
        with contextlib.suppress(ValueError):
            dist.send(x, rank)  # refused by torch
        if rank == 2:
            late()
        done = dist.all_reduce(x, async_op=True)
        while not done.is_completed():
            time.sleep(0.01)
        dist.barrier()
        return objects

    assert ranks(3).run(fn) == [["", "x", "xx"]] * 3


# --- the life of a pool -------------------------------------------------------------------------------


def test_ranks_that_cannot_start_are_told(monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(mz.ranks.pool.worker, "main", os.getpid)  # which takes no arguments
        pool = mz.Ranks(1, device="cpu")
    with pool:
        with pytest.raises(mz.RankError, match="rank 0 could not start: exit code 1"):
            pool.run(all_reduce)
        assert pool.run(all_reduce) == [[1, 1, 1]]


@pytest.mark.parametrize("world_size", [0, -1])
def test_at_least_one_rank(world_size):
    with pytest.raises(ValueError, match=f"world_size must be at least 1; got {world_size}"):
        mz.launch(all_reduce, world_size)


@pytest.mark.parametrize("world_size", [True, 2.0, "2", None])
def test_the_number_of_ranks_is_an_int(world_size):
    with pytest.raises(TypeError, match="world_size is the number of ranks, an int; got"):
        mz.Ranks(world_size)


def test_the_timeout_is_a_positive_number():
    for timeout in (0, -1, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="timeout must be positive"):
            mz.Ranks(2, timeout=timeout)
    for timeout in (None, "3", True):
        with pytest.raises(TypeError, match="timeout is a number of seconds"):
            mz.Ranks(2, timeout=timeout)


def test_the_device_is_one_of_four(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match='device must be "auto", "cpu", "cuda" or "cuda:<index>"; got "tpu"'):
        mz.Ranks(2, device="tpu")
    with pytest.raises(ValueError, match='device="cuda" needs a GPU for each of the 2 ranks, and there are 1'):
        mz.Ranks(2, device="cuda")
    with pytest.raises(ValueError, match='device="cuda:1": there is no such GPU, 1 found'):
        mz.Ranks(2, device="cuda:1")


def test_auto_says_once_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(mz.ranks, "_said", set())
    for gpus, said in ((0, "on the CPU, with gloo (no GPU found)"), (4, "on one GPU each, with NCCL (4 GPUs found)")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert mz.ranks._choose("auto", 2) == mz.ranks._choose("auto", 2)
        assert capsys.readouterr().out == f"minizero: ranks are processes {said}\n"


def test_two_pools_at_once_one_of_which_starts_ranks_itself():
    before, results = len(children()), {}

    def nested(rank):
        return mz.launch(lambda rank: rank + 1, 1, device="cpu")

    def run(key, fn):
        results[key] = mz.launch(fn, 1, device="cpu")

    threads = [threading.Thread(target=run, args=each) for each in enumerate([nested, lambda rank: rank])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [[1]], 1: [0]} and len(children()) == before
    assert sys.modules["__main__"].__name__ == "__main__"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_pool_is_closed_by_with_by_close_in_a_run_and_by_being_forgotten():
    before = len(children())
    with mz.Ranks(1, device="cpu") as pool:
        threading.Timer(2.0, pool.close).start()
        with pytest.raises(RuntimeError, match="these ranks were closed during a run"):
            pool.run(lambda rank: time.sleep(30))
        assert len(children()) == before
    pool.close()
    with pytest.raises(RuntimeError, match="these ranks are closed"):
        pool.run(all_reduce)
    forgotten = mz.Ranks(1, device="cpu")
    folder = forgotten._pool._folder
    if (pid := os.fork()) == 0:  # a fork of ours must not end them
        forgotten.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(children()) == before + 1 and folder.exists()
    del forgotten
    gc.collect()
    assert len(children()) == before and not folder.exists()


@pytest.fixture
def interruptible():
    """Whoever started pytest in the background of a shell has made it deaf to interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_tells_where_the_ranks_were_and_leaves_a_pool_to_go_on_with(ranks, capsys, monkeypatch):
    def impatient(pid, number, killpg=os.killpg):
        os.kill(os.getpid(), signal.SIGINT)  # once more, while we clean up
        killpg(pid, number)

    before = pids(ranks(2))
    monkeypatch.setattr(os, "killpg", impatient)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ranks(2).run(lambda rank: [print("begun"), time.sleep(30)])
    monkeypatch.undo()
    out, err = capsys.readouterr()
    assert out == "[rank 0] begun\n[rank 1] begun\n"
    assert "rank 1  computing, after 0 calls, at " in err and "time.sleep(30)" in err
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert ranks(2).run(all_reduce) == [[3, 3, 3]] * 2


# --- scripts, torchrun and notebooks --------------------------------------------------------------------


def test_a_script_without_a_guard_works_and_ends(tmp_path):
    text = """
import tempfile; kept = tempfile.TemporaryDirectory()
import minizero as mz, torch, torch.distributed as dist
from dataclasses import dataclass
@dataclass
class Sum:
    x: float
scale = 10
def fn(rank):
    x = torch.ones(1) * rank; dist.all_reduce(x); print("in", rank)
    return Sum(x.item() * scale)
print(mz.launch(fn, 2))
ranks = mz.Ranks(1)  # and nobody closes it
print(ranks.run(lambda rank: [dist.barrier(), fn][1](rank)), kept.name.strip() and "end")
"""
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, tmp_path / "script.py"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.stderr == "" and ended.returncode == 0
    assert ended.stdout.splitlines() == [
        "minizero: ranks are processes on the CPU, with gloo (no GPU found)",
        "[rank 0] in 0",
        "[rank 1] in 1",
        "[Sum(x=10.0), Sum(x=10.0)]",
        "[rank 0] in 0",
        "[Sum(x=0.0)] end",
    ]


def test_when_the_parent_is_killed_the_ranks_and_what_they_started_end(tmp_path):
    text = """
import minizero as mz, os, subprocess, sys, time
def fn(rank, folder):
    child = subprocess.Popen(["sleep", "60"])
    open(f"{folder}/pids-{rank}", "w").write(f"{os.getpid()} {child.pid} ")
    while rank == 0:
        pass
    time.sleep(60)
ranks, waiting = mz.Ranks(2, device="cpu"), mz.Ranks(1, device="cpu")
waiting.run(lambda rank: 0)
starting = mz.Ranks(1, device="cpu")
print(ranks._pool._folder, waiting._pool._folder, starting._pool._folder, flush=True)
ranks.run(fn, sys.argv[1])
"""
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, tmp_path / "script.py", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        folders = list(map(Path, parent.stdout.readline().split()))
        written = [tmp_path / "pids-0", tmp_path / "pids-1"]
        await_(lambda: all(file.exists() and file.read_text().count(" ") == 2 for file in written), 40)
        processes = [psutil.Process(int(pid)) for file in written for pid in file.read_text().split()]
        assert len(processes) == 4 and all(folder.exists() for folder in folders)
        parent.kill()
    await_(lambda: not any(alive(process) for process in processes), 5)
    await_(lambda: not any(folder.exists() for folder in folders), 20)  # a rank that still starts notices it last


def test_under_torchrun_init_joins_the_group(tmp_path):
    text = """
import minizero as mz, torch, torch.distributed as dist
mz.init()
mz.init()
x = torch.ones(2) * dist.get_rank()
with mz.record_traffic() as traffic:
    dist.all_reduce(x)
with open(f"out-{dist.get_rank()}", "w") as file:
    print(dist.get_world_size(), dist.get_backend(), mz.device(), x.tolist(), traffic.bytes_sent, file=file, end="")
"""
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(2)] == ["2 gloo cpu [1.0, 1.0] 8"] * 2


def test_without_torchrun_init_says_what_to_do(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="finds no RANK, WORLD_SIZE, .*: start this script with `torchrun"):
        mz.init()


def test_in_a_notebook():
    manager, client = start_new_kernel(kernel_name="python3")
    try:

        def cell(code, interrupt_at=None):
            """(what it printed and its value, what it printed on stderr, name and text of its error)"""
            out, err, error = "", "", None

            def hook(message):
                nonlocal out, err, error
                content = message["content"]
                if message["msg_type"] == "stream" and content["name"] == "stdout":
                    out += content["text"]
                    if interrupt_at is not None and interrupt_at in content["text"]:
                        manager.interrupt_kernel()
                elif message["msg_type"] == "stream":
                    err += content["text"]
                elif message["msg_type"] == "execute_result":
                    out += content["data"]["text/plain"]
                elif message["msg_type"] == "error":
                    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
                    error = content["ename"], content["evalue"], shown

            client.execute_interactive(code, output_hook=hook, timeout=60, stop_on_error=False)
            return out, err, error

        cell("import minizero as mz, psutil, time, torch, torch.distributed as dist\nranks = mz.Ranks(2, device='cpu')")
        out, _, error = cell(
            "class Sum:\n"
            "    def __init__(self, x): self.x = x\n"
            "def fn(rank):\n"
            "    x = torch.ones(1) * rank; dist.all_reduce(x); print('hello', rank)\n"
            "    return Sum(x.item())\n"
            "[(type(each) is Sum, each.x) for each in ranks.run(fn)]"
        )
        assert (out, error) == ("[rank 0] hello 0\n[rank 1] hello 1\n[(True, 1.0), (True, 1.0)]", None)

        _, _, (name, text, shown) = cell(
            "def bad(rank):\n    dist.barrier()\n    if rank:\n        raise ValueError('of a cell')\nranks.run(bad)"
        )
        assert name == "RankError" and "Cell In[3], line 4, in bad\n      raise ValueError('of a cell')" in text
        assert "pool.py" not in shown  # of minizero's own frames the learner sees one at most

        _, _, (name, text, _) = cell("def skip(rank):\n    if rank:\n        dist.barrier()\nranks.run(skip)")
        assert name == "RanksTimeout" and "waiting in barrier #1 at Cell In[4], line 3: dist.barrier()" in text

        out, err, error = cell(
            "def slow(rank):\n    print('begun', rank)\n    time.sleep(60)\nranks.run(slow)", interrupt_at="begun 0"
        )
        assert error[0] == "KeyboardInterrupt" and "[rank 1] begun 1" in out
        assert "rank 0  computing, after 0 calls, at Cell In[5], line 3: time.sleep(60)" in err
        out, _, _ = cell(
            "[p.pid for p in psutil.Process().children() if 'resource_tracker' not in ' '.join(p.cmdline())]"
        )
        assert out == "[]"
        assert cell("ranks.run(lambda rank: rank)")[0] == "[0, 1]"
        left = children(manager.provisioner.pid)
        assert len(left) == 2
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    await_(lambda: not any(alive(process) for process in left), 5)


# --- what only two runs, or a wrong number, show ---------------------------------------------------------


def keep_a_tensor(rank):
    torch.kept_by_a_test = torch.ones(250)


def count_kept_tensors(rank):
    with mz.record_memory() as m:
        other = m.now["other"]
    del torch.kept_by_a_test
    return other


def test_the_meter_sees_a_tensor_that_an_earlier_run_left(ranks):
    ranks(1).run(keep_a_tensor)
    assert ranks(1).run(count_kept_tensors)[0] >= 1000


def send_past_the_last_rank(rank):
    dist.send(torch.ones(1), rank + 1)


def test_a_rank_that_does_not_exist_is_named(ranks):
    with pytest.raises(mz.RankError, match=r"send to rank 2 #1 .*ranks count from 0 to 1"):
        ranks(2).run(send_past_the_last_rank)


def fail_at_once(rank):
    raise NotImplementedError


def fail_alone(rank):
    if rank == 1:
        raise ValueError
    dist.all_reduce(torch.ones(3))


def test_ranks_that_fail_at_once_can_go_on_at_once(ranks):
    """A rank that has joined its new group must not leave it again while another one is still joining."""
    for _ in range(20):
        for fn in (fail_at_once, fail_at_once, fail_alone):
            with pytest.raises(mz.RankError) as failure:
                ranks(2).run(fn)
            assert failure.type is mz.RankError and failure.value.exception_type in ("NotImplementedError", "ValueError")
        assert ranks(2).run(lambda rank: dist.all_reduce(torch.ones(3))) == [None, None]
