"""The timeline: what a rank did when, for every engine and for plain calls; and the file that a viewer opens."""

import contextlib
import json
import time

import pytest
import torch
import torch.distributed as dist
from test_parts_units import Net
from test_zero3 import batch, sgd

import minizero as mz
from minizero.lens.timeline import WHATS, Event, Timeline, save_trace
from minizero.parts import spans

ENGINES = [mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]


def one_step(rank, engine_type):
    model = Net(2)
    engine = engine_type(model, sgd(model))
    for step in range(2):
        with mz.record_timeline() as timeline:
            begin = time.perf_counter()
            engine.backward(engine(batch(step).float()).sum())
            engine.step()
            end = time.perf_counter()
    return timeline, begin, end


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)
def test_every_engine_tells_what_it_does(ranks, engine_type, world_size):
    for rank, (timeline, begin, end) in enumerate(ranks(world_size).run(one_step, engine_type)):
        assert timeline.rank == rank and {event.rank for event in timeline.events} == {rank}
        assert all(begin <= event.start <= event.end <= end for event in timeline.events)
        assert [event.start for event in timeline.events] == sorted(event.start for event in timeline.events)
        whats = {event.what for event in timeline.events}
        expected = {"forward", "backward", "step"}
        if engine_type in (mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload):
            expected |= {"free"}
        if world_size > 1:
            expected |= {"gather", "reduce", "wait"}
        if engine_type is mz.Zero3Offload:
            expected |= {"copy"}
        assert whats == expected and whats <= set(WHATS)


def test_of_zero3_each_unit_has_its_own_forward_and_backward_within_that_of_the_root(ranks):
    for timeline, *_ in ranks(2).run(one_step, mz.Zero3):
        for what, order in (("forward", ["root", "blocks.0", "blocks.1"]), ("backward", ["root", "blocks.1", "blocks.0"])):
            root, *blocks = events = timeline.of(what)
            assert [event.unit for event in events] == order
            assert all(root.start < block.start and block.end < root.end for block in blocks)
            assert [unit for unit, _ in timeline.segments(what)] == ["root", order[1], "root", order[2], "root"]
            assert sum(seconds for _, seconds in timeline.segments(what)) <= root.seconds


def late(rank):
    """Rank 1 starts 100 ms late; both wait 200 ms longer than they need."""
    dist.barrier()
    with mz.record_timeline() as timeline:
        time.sleep(0.1 * rank)
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.3)
        work.wait()
    return timeline


def test_the_end_of_an_asynchronous_collective_is_when_the_data_came_and_not_when_somebody_asked(ranks):
    first, second = ranks(2).run(late)
    assert [event.what for event in first.events] == ["reduce", "wait"]
    (reduced, waited), (reduced_late, _) = first.events, second.events
    assert second.events[0].start - reduced.start > 0.09
    for event in (reduced, reduced_late):
        assert second.events[0].start <= event.end < waited.start  # long before the wait


def exchanged(rank):
    """The same of minizero's own, which on gloo is a broadcast from every rank."""
    from minizero.parts import comm

    with mz.record_timeline() as timeline:
        time.sleep(0.1 * rank)
        full_P = torch.zeros(900)
        pending = comm.all_gather(full_P, torch.full((300,), float(rank)), dist.group.WORLD, "x")
        time.sleep(0.3)
        pending.wait()
    return timeline, full_P.tolist()


def test_so_it_is_where_one_collective_is_several(ranks):
    (first, values), _, (last, _) = ranks(3).run(exchanged)
    assert values == [0.0] * 300 + [1.0] * 300 + [2.0] * 300
    gather, wait = first.events
    assert (gather.what, gather.unit, gather.nbytes) == ("gather", "x", 3600)
    assert last.events[0].start <= gather.end < wait.start


def failing(rank):
    with mz.record_timeline() as timeline:
        with contextlib.suppress(Exception):
            dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn))
        torch.nn.Linear(5, 5)(torch.ones(2, 5)).sum().backward()
    return timeline.events, spans.listeners


def test_what_torch_refused_is_no_event_and_nobody_listens_afterwards(ranks):
    assert ranks(1).run(failing) == [([], [])]


def test_outside_of_ranks_it_records_what_there_is():
    with mz.record_timeline() as timeline, spans.span("copy", "x", 8):
        pass
    (event,) = timeline.events
    assert (event.what, event.unit, event.nbytes, event.rank) == ("copy", "x", 8, 0)


def test_a_trace_has_a_lane_for_what_computes_and_one_for_what_travels(tmp_path):
    events = [Event("forward", "a", 1.0, 2.0), Event("gather", "b", 1.5, 2.5, 80), Event("gather", "c", 1.6, 2.6), Event("reduce", "d", 3.0, None)]
    timelines = [Timeline(0, events, "simulated link, 1 GB/s"), Timeline(1, events[:1])]
    save_trace(tmp_path / "all.json", timelines)
    rows = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {"rank 0 (simulated link, 1 GB/s)", "rank 1", "compute", "communication", "host link"}
    (forward, _) = [row for row in rows if row["ph"] == "X"]
    assert (forward["name"], forward["ts"], forward["dur"], forward["pid"], forward["tid"]) == ("forward a", 0.0, 1e6, 0, 0)
    begins, ends = ([row for row in rows if row["ph"] == phase] for phase in "be")
    assert [row["id"] for row in begins] == [row["id"] for row in ends] and len({row["id"] for row in begins}) == 2
    assert {row["tid"] for row in begins} == {1}
    timelines[1].save_trace(tmp_path / "one.json")
    assert json.loads((tmp_path / "one.json").read_text())["displayTimeUnit"] == "ms"


def began_before(rank):
    """What began before the recording leaves nothing in it, though its end is heard."""
    before, running = dist.all_reduce(torch.ones(4), async_op=True), None
    with mz.record_timeline():
        running = spans.begin("forward", "x")
    with mz.record_timeline() as timeline:
        before.wait()
        spans.end(running)
        for _ in range(20):
            dist.all_reduce(torch.ones(4), async_op=True)
    return [event.what for event in timeline.events]


def test_what_began_before_is_not_told(ranks):
    for whats in ranks(2).run(began_before):
        assert whats == ["reduce"] * 20
