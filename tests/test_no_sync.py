"""no_sync(): gradients wait on their rank, and the next backward outside takes them along. Whoever gives whole gradients back refuses."""

import contextlib
from fractions import Fraction

import pytest
import torch
from models import (
    LOCAL_ENGINES,
    build,
    distance,
    grads,
    loss_of,
    mean_grads,
    mlp,
    refusal,
    rows,
    same,
    share,
    weights,
)
from test_order import adversary

import minizero as mz

BUCKET_MB = 2e-4
OTHERS = {mz.Zero2: "ZeRO-2", mz.Zero3: "ZeRO-3", mz.Zero3Prefetch: "ZeRO-3", mz.Zero3Offload: "ZeRO-3"}  # each step of the course that shards gradients joins here

local_engines = pytest.mark.parametrize("engine_type", LOCAL_ENGINES, ids=lambda engine: engine.__name__)
other_engines = pytest.mark.parametrize("engine_type", OTHERS, ids=lambda engine: engine.__name__)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


def wrap(engine_type, model, **keywords):
    return engine_type(model, sgd(model), bucket_mb=BUCKET_MB, **keywords)


# --- who has it ---------------------------------------------------------------------------------------

HOW = ["around forward and backward", "around the backward alone", "to the end"]


def accumulating(rank, world_size, engine_type, how):
    """Two micro-batches a step, beside one process with one batch of the same rows."""
    model, alone = build("awkward", torch.float64), build("awkward", torch.float64)
    optimizer = sgd(alone)
    engine = wrap(engine_type, model)
    for step in range(10):
        first, second = share(rows(model, step, 24), rank, world_size).chunk(2)
        if how == "around the backward alone":
            loss = loss_of(engine, first) / 2
            with engine.no_sync():
                engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss_of(engine, first) / 2)
        with engine.no_sync() if how == "to the end" else contextlib.nullcontext():
            engine.backward(loss_of(engine, second) / 2)
        engine.step()
        loss_of(alone, rows(alone, step, 24)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(weights(engine), weights(alone)), weights(engine)


@local_engines
@world_sizes
@pytest.mark.parametrize("how", HOW)
def test_micro_batches_in_no_sync_equal_the_whole_batch(ranks, engine_type, how, world_size):
    results = ranks(world_size).run(accumulating, world_size, engine_type, how)
    for difference, trained in results:
        assert difference <= 1e-9
        assert same(trained, results[0][1])


def in_one_micro_batch_only(rank, world_size, engine_type):
    """Expert 0 is used in the first micro-batch only, expert 1 in the second only, expert 2 on rank 0 in the first only."""
    model, reference = build("experts", torch.float64), build("experts", torch.float64)
    engine = wrap(engine_type, model)
    batches = [rows(model, i, 12) for i in range(2)]
    runs = [lambda r: (0, 2) if r == 0 else (0,), lambda r: (1,)]
    for i, x in enumerate(batches):
        with engine.no_sync() if i == 0 else contextlib.nullcontext():
            engine.backward(loss_of(engine, share(x, rank, world_size), runs[i](rank)))
        for r in range(world_size):
            (loss_of(reference, share(x, r, world_size), runs[i](r)) / world_size).backward()
    means, expected = ({name: g for name, g in each.items() if g is not None} for each in (mean_grads(engine), grads(reference)))
    return means.keys() == expected.keys(), distance(list(means.values()), list(expected.values()))


@local_engines
@world_sizes
def test_a_gradient_that_waits_while_the_next_micro_batch_does_not_use_its_parameter_is_averaged_all_the_same(ranks, engine_type, world_size):
    for same_parameters, difference in ranks(world_size).run(in_one_micro_batch_only, world_size, engine_type):
        assert same_parameters and difference <= 1e-12


def traffic_of_a_step(rank, world_size, engine_type):
    model = build("awkward")
    engine = wrap(engine_type, model)
    sent_in_each = []
    for i in range(3):
        with mz.record_traffic() as traffic, engine.no_sync() if i < 2 else contextlib.nullcontext():
            engine.backward(loss_of(engine, share(rows(model, i, 12), rank, world_size)))
        sent_in_each.append(traffic)
    with mz.record_traffic() as traffic:
        engine.step()
    sent = [sum(Fraction(op.bytes) for op in t.ops if op.unit.startswith("bucket")) for t in (*sent_in_each, traffic)]
    return sent, sum(bucket.grad_P.numel() for bucket in engine.buckets)


@local_engines
@pytest.mark.parametrize("world_size", [2, 3])
def test_three_micro_batches_of_which_two_are_in_no_sync_send_what_one_would(ranks, engine_type, world_size):
    stage = {mz.DDP: 0, mz.Zero1: 1}[engine_type]
    for sent, P in ranks(world_size).run(traffic_of_a_step, world_size, engine_type):
        assert sent[:2] == [0, 0]
        assert sum(sent) == 4 * 2 * P * (world_size - 1) // world_size
        assert sum(sent) == 4 * mz.theory.traffic(stage, P, world_size, micro_steps=3, no_sync=True)


def memory_of_it(rank, engine_type):
    model = mlp(64, 64, 64)
    engine = engine_type(model, sgd(model), bucket_mb=0.02)
    with mz.record_memory() as m:
        for _ in range(3):
            with engine.no_sync():
                engine.backward(loss_of(engine, rows(model, 0, 4)))
    grads_over_time = m.curve()[1]["grads"]
    return int(grads_over_time[-1] - grads_over_time[0])


@local_engines
def test_accumulation_in_no_sync_needs_no_second_copy_of_the_gradients(ranks, engine_type):
    assert ranks(2).run(memory_of_it, engine_type) == [0, 0]


def with_an_adversary(rank, world_size, engine_type, name):
    """Collectives that withhold their buffers until they are waited for: nothing may have read or written them."""
    results = []
    for opponent in (contextlib.nullcontext, adversary):
        model = build(name)
        engine = engine_type(model, sgd(model, momentum=0.9), bucket_mb=1e-4)
        with opponent():
            for step in range(3):
                x = share(rows(model, step, 12), rank, world_size)
                with engine.no_sync():
                    engine.backward(loss_of(engine, x) / 2)
                engine.backward(loss_of(engine, x.flip(0)) / 2)
                engine.step()
        results.append(weights(engine))
    return same(*results)


@local_engines
@pytest.mark.parametrize("name", ["awkward", "checkpointed reentrant"])
def test_no_bucket_is_touched_between_its_leaving_and_its_wait(ranks, engine_type, name):
    assert all(ranks(3).run(with_an_adversary, 3, engine_type, name))


CLEARINGS = {f"{who}, set_to_none={to_none}": (who, to_none) for who in ("engine", "module", "optimizer") for to_none in (True, False)}


def cleared(rank, world_size, engine_type, after_a_mean):
    """Before every batch that counts, gradients are left waiting, perhaps beside a mean that had arrived, and cleared away.
    By whom, when the weights were wrong after it?"""
    model, alone = build("awkward", torch.float64), build("awkward", torch.float64)
    engine, optimizer = wrap(engine_type, model), sgd(alone)
    for step, (name, (who, to_none)) in enumerate(CLEARINGS.items()):
        wrong = 5 * share(rows(model, 100 + step, 12), rank, world_size)
        if after_a_mean:
            engine.backward(loss_of(engine, wrong))
        with engine.no_sync():
            engine.backward(loss_of(engine, wrong))
        {"engine": engine, "module": model, "optimizer": engine.optimizer}[who].zero_grad(set_to_none=to_none)
        x = rows(model, step, 12)
        engine.backward(loss_of(engine, share(x, rank, world_size)))
        engine.step()
        loss_of(alone, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not distance(weights(engine), weights(alone)) <= 1e-9:
            return name
    return None


@local_engines
@pytest.mark.parametrize("after_a_mean", [False, True], ids=["", "beside a mean"])
def test_gradients_that_wait_can_be_cleared_by_anybody(ranks, engine_type, after_a_mean):
    assert ranks(2).run(cleared, 2, engine_type, after_a_mean) == [None] * 2


class Accident(Exception):
    pass


def accident(rank, world_size, engine_type):
    """On one rank only: inside no_sync nobody waits for it."""
    model, alone = build("awkward", torch.float64), build("awkward", torch.float64)
    engine, optimizer = wrap(engine_type, model), sgd(alone)

    def raises(gradient):
        raise Accident("in a hook")

    handle = model.first.weight.register_hook(raises) if rank == world_size - 1 else None
    with engine.no_sync():
        error = refusal(engine.backward, loss_of(engine, share(rows(model, 100, 12), rank, world_size)))
    if handle:
        handle.remove()
    engine.zero_grad()
    for step in range(5):
        x = rows(model, step, 12)
        engine.backward(loss_of(engine, share(x, rank, world_size)))
        engine.step()
        loss_of(alone, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return error, distance(weights(engine), weights(alone))


@local_engines
@world_sizes
def test_after_an_exception_on_one_rank_inside_no_sync_the_next_step_is_right(ranks, engine_type, world_size):
    results = ranks(world_size).run(accident, world_size, engine_type)
    assert [error for error, _ in results] == [None] * (world_size - 1) + ["Accident: in a hook"]
    assert max(difference for _, difference in results) <= 1e-9


# --- who has not ----------------------------------------------------------------------------------------


def refused(rank, engine_type):
    """The call itself raises, not the `with`; and afterwards all is as it was."""
    results = []
    for asked in (True, False):
        model = build("awkward")
        engine = wrap(engine_type, model)
        engine.backward(loss_of(engine, rows(model, rank, 4)))
        error = refusal(engine.no_sync) if asked else None
        engine.backward(loss_of(engine, rows(model, 2 + rank, 4)))
        engine.step()
        results.append((error, weights(engine)))
    return results[0][0], same(results[0][1], results[1][1])


@other_engines
def test_it_is_refused_where_only_a_shard_of_the_gradients_stays_with_the_reason_and_the_cure(ranks, engine_type):
    for error, as_if_never in ranks(2).run(refused, engine_type):
        assert error.startswith(f"RuntimeError: {OTHERS[engine_type]} has no no_sync()")
        assert "1/N" in error and "Leave it out" in error
        assert as_if_never
