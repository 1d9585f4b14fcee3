"""A simulated link: the bytes are the same, and take as long as the model says. Order and the computed ends are tested, not clocks."""

import time

import pytest
import torch
import torch.distributed as dist
from models import build, loss_of, refusal, rows, same, share
from test_parts_units import Net
from test_zero3 import batch, full, sgd

import minizero as mz
from minizero.lens import link, theory
from minizero.parts import calls, comm, host, spans

SLOW = {"bandwidth": 1e6, "latency": 1e-3}  # 1 MB/s


class Ends(list):
    """When each call's data came, as the link has it."""

    def arrived(self, call):
        self.append((call.op, call.start, call.arrived))


def plain_calls(rank, n):
    x = torch.ones(6000)
    issue = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather([torch.empty(6000 // n) for _ in range(n)], x[: 6000 // n].clone()),
        "barrier": dist.barrier,
        "reduce_scatter": lambda: comm.reduce_scatter_mean(torch.empty(6000 // n), x, dist.group.WORLD, "x").wait(),
        "broadcast": lambda: dist.broadcast(x, src=0),  # for which rank 0 waits for nobody
    }
    ends = Ends()
    with mz.link(**SLOW):
        calls.listeners.append(ends)
        for call in issue.values():
            call()
        calls.listeners.remove(ends)
    return ends


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_collective_is_complete_when_the_model_says_after_the_latest_start(ranks, world_size):
    results = ranks(world_size).run(plain_calls, world_size)
    free = 0.0
    for calls_of_all in zip(*results, strict=True):
        op = calls_of_all[0][0]
        nbytes = 0 if op == "barrier" else 24000
        begin = max(free, *(start for _, start, _ in calls_of_all))
        free = begin + theory.seconds(op, nbytes, world_size, **SLOW)
        for other, _, end in calls_of_all:
            assert other == op
            assert free - 0.05 * (op == "broadcast") <= end < free + 0.25  # later only if this machine really took that long
        if op != "broadcast":
            assert min(end for *_, end in calls_of_all) == pytest.approx(free, abs=0.05)


def one_after_the_other(rank):
    """Two asynchronous calls, waited for in the wrong order."""
    ends = Ends()
    with mz.link(**SLOW):
        calls.listeners.append(ends)
        first = dist.all_reduce(torch.ones(10_000), async_op=True)
        second = dist.all_reduce(torch.ones(10_000), async_op=True)
        second.wait()
        first.wait()
        calls.listeners.remove(ends)
    return ends


def test_a_link_does_one_thing_after_the_other(ranks):
    takes = theory.seconds("all_reduce", 40_000, 2, **SLOW)
    for (_, start, end), (_, earlier, earlier_end) in ranks(2).run(one_after_the_other):
        assert earlier < start and earlier_end + takes <= end + 1e-9


def costs_no_processor_time(rank):
    before, began = time.process_time(), time.perf_counter()
    with mz.link(bandwidth=1e6):
        dist.all_reduce(torch.ones(100_000))  # 400 kB: 0.4 s on two ranks
    return time.process_time() - before, time.perf_counter() - began


def test_it_waits_without_using_the_processor(ranks):
    for used, took in ranks(2).run(costs_no_processor_time):
        assert took > 0.39 and used < 0.5 * took


def trained(rank, world_size, engine_type):
    results = []
    for slow in (False, True):
        model = build("awkward")
        engine = engine_type(model, sgd(model))
        for step in range(2):
            if slow:
                with mz.link(bandwidth=1e8):
                    engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
                    engine.step()
            else:
                engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
                engine.step()
        results.append(full(engine))
    return same(*results)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("engine_type", [mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload], ids=lambda e: e.__name__)
def test_a_slow_link_changes_no_number(ranks, engine_type, world_size):
    assert all(ranks(world_size).run(trained, world_size, engine_type))


def copies(rank):
    """Two copies to the host at once, and a collective beside."""
    done = []

    class Copies:
        def ended(self, span):
            done.append((span.start, span.due))

    with mz.link(bandwidth=1e6):
        spans.listeners.append(Copies())
        pending = [host.copy(torch.empty(10_000), torch.ones(10_000), "x") for _ in range(2)]
        began = time.perf_counter()
        dist.all_reduce(torch.ones(1))
        beside = time.perf_counter() - began
        for copy in pending:
            copy.wait()
        spans.listeners.pop()
    return done, beside


def test_host_copies_have_a_link_of_their_own(ranks):
    for ((first, first_due), (_, second_due)), beside in ranks(2).run(copies):
        assert first_due == pytest.approx(first + 0.04) and second_due == pytest.approx(first_due + 0.04)
        assert beside < 0.07


def in_words(rank):
    before = link.simulated()
    with mz.link(bandwidth=2.5e9, latency=20e-6), mz.record_timeline() as inside:
        pass
    with mz.record_timeline() as outside, mz.link(bandwidth=1e9):
        pass
    with mz.record_timeline() as without:
        pass
    return before, inside.simulated, outside.simulated, without.simulated, link.simulated()


def test_it_is_always_labelled_as_simulated(ranks):
    for labels in ranks(2).run(in_words):
        assert labels == ("", "simulated link, 2.5 GB/s, 20 µs", "simulated link, 1 GB/s", "", "")


def wrongly(rank):
    def nested():
        with mz.link(1e9), mz.link(1e9):
            pass

    def enter(*args, **keywords):
        with mz.link(*args, **keywords):
            pass

    errors = refusal(enter, 0), refusal(enter, -1e9), refusal(enter, float("nan")), refusal(enter, 1e9, -1), refusal(nested)
    return errors, refusal(enter, 1e9 + rank), calls.listeners == [each for each in calls.listeners if not isinstance(each, link._Link)]


def test_what_is_no_link_is_refused_on_every_rank(ranks):
    for (zero, negative, nan, latency, nested), differing, left_nothing in ranks(2).run(wrongly):
        assert all(error.startswith("ValueError: bandwidth=") for error in (zero, negative, nan))
        assert latency.startswith("ValueError: latency=-1") and nested.startswith("RuntimeError: a link is simulated already")
        assert "ValueError: the ranks simulate different links" in differing and left_nothing


def raising(rank):
    """One rank raises inside; the file in which they tell each other their starts is gone."""
    model = Net(1)
    engine = mz.Zero3(model, sgd(model))
    with mz.link(1e8):
        engine.backward(engine(batch(0).float()).sum())
        raise KeyError("x")


def test_an_exception_inside_leaves_no_link_and_no_file(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with mz.Ranks(2, device="cpu") as fresh:
        with pytest.raises(mz.RankError, match="KeyError"):
            fresh.run(raising)
        assert fresh.run(in_words)[0][0] == ""
        assert list(tmp_path.glob("minizero-link*")) == []


def among_three(rank):
    """After a message between two of three ranks, rank 2 is late to a collective of all; a group is made meanwhile."""
    ends = Ends()
    with mz.link(bandwidth=1e6):
        dist.new_group([0, 1])
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
        calls.listeners.append(ends)
        time.sleep(0.2 * (rank == 2))
        dist.all_reduce(torch.ones(30_000))
        calls.listeners.remove(ends)
    return ends[-1]


def test_messages_between_two_ranks_do_not_confuse_the_third(ranks):
    results = ranks(3).run(among_three)
    latest = max(start for _, start, _ in results)
    assert all(end >= latest + theory.seconds("all_reduce", 120_000, 3, 1e6) - 1e-9 for *_, end in results)
