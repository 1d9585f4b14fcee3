"""Claim 3: when things happen. Events and their order, never clocks."""

import contextlib

import pytest
import torch
from models import WHOLE_ENGINES, Experts, build, distance, gathered, loss_of, mlp, rows, same, share, weights
from torch import nn

import minizero as mz
from minizero.parts import calls, comm

ENGINES = WHOLE_ENGINES  # what ZeRO-3 does when is in test_zero3.py

pytestmark = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)


def a_parameter_a_bucket(engine_type, model, **keywords):
    return engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), bucket_mb=1e-9, **keywords)


class Events(list):
    """What happens, in order: collectives as they are issued and waited for, gradients as autograd computes them."""

    def issued(self, call):
        self.append((call.op, call.unit))

    def waiting(self, call):
        self.append(("wait", call.unit))

    def done(self, call):
        pass


@contextlib.contextmanager
def events_of(model):
    events = Events()
    handles = [p.register_hook(lambda _, name=name: events.append(("gradient", name)))
               for name, p in model.named_parameters() if p.requires_grad]  # fmt: skip
    calls.listeners.append(events)
    try:
        yield events
    finally:
        calls.listeners.remove(events)
        for handle in handles:
            handle.remove()


# --- overlap ----------------------------------------------------------------------------------------


def backward_of_three_layers(rank, engine_type, how, freeze_last):
    model = mlp(4, 5, 6, 3).double() if freeze_last else mlp(4, 5, 6, 3)
    if freeze_last:
        model[4].requires_grad_(False)
    engine = a_parameter_a_bucket(engine_type, model)
    loss = loss_of(engine, share(rows(model, 0, 4), rank, 2))
    with events_of(model) as events:
        engine.backward(loss) if how == "engine.backward" else loss.backward()
        events.append(("backward", "ended"))
        engine.step()
    return list(events)


@pytest.mark.parametrize("freeze_last", [False, True], ids=["", "last layer frozen"])
@pytest.mark.parametrize("how", ["engine.backward", "loss.backward"])
def test_the_first_bucket_leaves_while_backward_still_computes_gradients(ranks, engine_type, how, freeze_last):
    for events in ranks(2).run(backward_of_three_layers, engine_type, how, freeze_last):
        started = events.index(("reduce_scatter", "bucket 0"))
        assert started < events.index(("gradient", "0.weight"))
        assert started < events.index(("backward", "ended"))
        assert sum(op == "reduce_scatter" for op, _ in events[: events.index(("gradient", "0.weight"))]) >= 2


def when_buckets_leave(engine_type):
    """What is issued in a backward and in a step over six buckets."""
    scatters = [("reduce_scatter", f"bucket {i}") for i in range(6)]
    gathers = [("all_gather", f"bucket {i}") for i in range(6)]
    if engine_type is mz.DDP:  # a bucket is gathered when the next one leaves
        return [scatters[0], *(op for pair in zip(scatters[1:], gathers, strict=False) for op in pair), gathers[5]], [("all_reduce", "control")]
    return scatters, [("all_reduce", "control"), *gathers]


def test_collectives_are_issued_at_fixed_points_of_the_program(ranks, engine_type):
    """Asynchronous ones end in another order on every rank, so nothing may be issued when another ends."""
    for events in ranks(2).run(backward_of_three_layers, engine_type, "engine.backward", False):
        end = events.index(("backward", "ended"))
        for part, expected in zip((events[:end], events[end + 1 :]), when_buckets_leave(engine_type), strict=True):
            assert [(op, unit) for op, unit in part if op not in ("wait", "gradient")] == expected
            waited = {unit for op, unit in part if op == "wait"}
            assert waited == {unit for _, unit in expected} - {"control"}  # nothing is left under way


# --- one order on all ranks ------------------------------------------------------------------------

# For each of three ranks, the experts that it runs, in its order. Expert 3 is nobody's.
ORDERS = {
    "the same": [(0, 1, 2), (0, 1, 2), (0, 1, 2)],
    "another order": [(0, 1, 2), (2, 1, 0), (1, 2, 0)],
    "other experts": [(0, 1), (1, 2), (2,)],
    "other experts in another order": [(2, 0), (), (1, 2, 0)],
    "none on two ranks": [(), (1,), ()],
}


def with_experts(rank, world_size, engine_type, orders, direct):
    model, alone = Experts(), Experts()
    engine = a_parameter_a_bucket(engine_type, model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    alone.load_state_dict(engine.state_dict())  # rank 0's
    unused = alone.experts[3].weight.detach().clone()
    for step in range(6):
        turn = orders[step % 3 :] + orders[: step % 3]
        with mz.record_traffic() as traffic:
            loss = loss_of(engine, share(rows(model, step, 6), rank, world_size), turn[rank])
            loss.backward() if direct else engine.backward(loss)
            engine.sync_gradients()
            used = {i for experts in turn[:world_size] for i in experts}
            assert all((model.experts[i].weight.grad is None) == (i not in used) for i in range(4))
            engine.step()
        for r in range(world_size):
            (loss_of(alone, share(rows(alone, step, 6), r, world_size), turn[r]) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    with gathered(engine):
        unused_is_untouched = torch.equal(unused, model.experts[3].weight)
    return [(op.op, op.unit) for op in traffic.ops], distance(weights(alone), weights(engine)), unused_is_untouched


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
def test_gradients_may_arrive_in_any_order_and_be_missing_anywhere(ranks, engine_type, orders, direct):
    results = ranks(3).run(with_experts, 3, engine_type, ORDERS[orders], direct)
    for sequence, difference, unused_is_untouched in results:
        assert sequence == results[0][0]
        assert len(sequence) == 21
        assert difference <= 1e-6
        assert unused_is_untouched


def without_a_backward_on_some(rank, engine_type):
    """Rank 1 has no loss in this step."""
    model, alone = build("experts"), build("experts")
    engine = a_parameter_a_bucket(engine_type, model)
    if rank != 1:
        engine.backward(loss_of(engine, rows(model, rank, 4)))
    engine.step()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for r in (0, 2):
        (loss_of(alone, rows(model, r, 4)) / 3).backward()
    optimizer.step()
    return distance(weights(alone), weights(engine))


def test_a_rank_without_a_backward_gives_zeros(ranks, engine_type):
    assert max(ranks(3).run(without_a_backward_on_some, engine_type)) <= 1e-6


# --- nothing is read before it is there ---------------------------------------------------------------


@contextlib.contextmanager
def adversary():
    """Collectives that take the buffer away when they are issued and bring it, with the data, only in wait().

    In between the buffer holds NaN: who reads it gets NaN, and who writes to it is found out.
    """

    class Withheld(comm.Pending):
        def __init__(self, buffer, collective):
            super().__init__()
            self.buffer, self.contents, self.collective = buffer, buffer.clone(), collective
            buffer.fill_(torch.nan)

        def wait(self):
            if self.collective is not None:
                assert self.buffer.isnan().all(), "written to while in flight"
                self.buffer.copy_(self.contents)
                self.collective().wait()
                self.collective = None

    originals = comm.reduce_scatter_mean, comm.all_gather
    comm.reduce_scatter_mean = lambda shard, full, *rest: Withheld(full, lambda: originals[0](shard, full, *rest))
    comm.all_gather = lambda full, shard, *rest: Withheld(full, lambda: originals[1](full, shard, *rest))
    try:
        yield
    finally:
        comm.reduce_scatter_mean, comm.all_gather = originals


def with_an_adversary(rank, world_size, engine_type, name, how):
    results = []
    for opponent in (contextlib.nullcontext, adversary):
        model = build(name)
        engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), bucket_mb=1e-4)
        with opponent():
            for step in range(3):
                x = share(rows(model, step, 12), rank, world_size)
                engine.backward(loss_of(engine, x) / 2)
                loss = loss_of(engine, x.flip(0)) / 2
                loss.backward() if how == "loss.backward" else engine.backward(loss)
                engine.sync_gradients()
                seen = [p.grad for group in engine.optimizer.param_groups for p in group["params"] if p.grad is not None]
                assert all(grad.isfinite().all() for grad in seen)
                engine.step()
        results.append(weights(engine))
    return same(*results)


@pytest.mark.parametrize("how", ["engine.backward", "loss.backward"])
@pytest.mark.parametrize("name", ["awkward", "checkpointed reentrant"])
def test_no_bucket_is_touched_between_its_leaving_and_its_wait(ranks, engine_type, name, how):
    assert all(ranks(3).run(with_an_adversary, 3, engine_type, name, how))


# --- buckets -----------------------------------------------------------------------------------------


def where_parameters_lie(rank, engine_type):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=4 * 30 / 2**20)
    names = {p: name for name, p in model.named_parameters()}
    return [[names[p] for p in bucket.params] for bucket in engine.buckets]


def test_buckets_are_filled_from_the_last_parameter_to_the_first(ranks, engine_type):
    assert ranks(1).run(where_parameters_lie, engine_type) == [[["2.bias", "2.weight", "1.bias"], ["1.weight"], ["0.bias", "0.weight"]]]
