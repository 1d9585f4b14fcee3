"""Claim 2: what one step sends, counted to the element; and the recorder that counts it."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from models import WHOLE_ENGINES, Awkward, Checkpointed, build, loss_of, mlp, rows, share
from torch import nn

import minizero as mz
from minizero.parts import flat

ENGINES = {mz.DDP: 0, mz.Zero1: 1, mz.Zero2: 2, mz.Zero3: 3, mz.Zero3Prefetch: 3, mz.Zero3Offload: 3}  # each step of the course joins here, with its stage
BUCKET_MB = 1e-4  # some 26 floats

with_buckets = pytest.mark.parametrize("engine_type", WHOLE_ENGINES, ids=lambda engine: engine.__name__)
every_engine = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)


def padded(engine):
    """P: the padded elements of all buckets."""
    return sum(bucket.grad_P.numel() for bucket in engine.buckets)


def of_gradients(traffic):
    return [op for op in traffic.ops if op.op in ("reduce_scatter", "all_gather")]


def steps(rank, world_size, engine_type, name="awkward", micro_steps=1, clip_norm=None):
    """Two steps, the second recorded: (P, bucket names, ops, bytes of the gradients' collectives)."""
    model = build(name)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=BUCKET_MB, clip_norm=clip_norm)
    for step in range(2):
        with mz.record_traffic() as traffic:
            for i in range(micro_steps):
                engine.backward(loss_of(engine, share(rows(model, step, 12, seed=i), rank, world_size)))
            engine.step()
    sent = sum(Fraction(op.bytes) for op in of_gradients(traffic))
    return padded(engine), [bucket.name for bucket in engine.buckets], [(op.op, op.unit, op.numel) for op in traffic.ops], sent


@with_buckets
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["awkward", "few", "experts", "strided", "checkpointed", "checkpointed reentrant once"])
def test_one_step_sends_exactly_2P_less_a_share(ranks, engine_type, name, world_size):
    for P, _, _, sent in ranks(world_size).run(steps, world_size, engine_type, name):
        assert P % world_size == 0
        assert sent == 4 * 2 * P * (world_size - 1) // world_size
        assert sent == 4 * mz.theory.traffic(ENGINES[engine_type], P, world_size)


@every_engine
def test_a_parameter_in_two_reentrant_checkpoints_has_two_gradients_and_costs_its_bucket_a_second_time(ranks, engine_type):
    for _, _, ops, _ in ranks(2).run(steps, 2, engine_type, "checkpointed reentrant"):
        count = Counter(unit for op, unit, _ in ops if op == "reduce_scatter")
        assert set(count.values()) == {1, 2}


def late_and_then_not(rank, engine_type):
    model = Checkpointed(True, uses=2)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-9)
    with mz.record_traffic() as traffic:
        for step, model.uses in enumerate((2, 1)):
            engine.backward(loss_of(engine, rows(model, step, 4)))
        engine.sync_gradients()
    return sum(op.op == "reduce_scatter" for op in traffic.ops)


@with_buckets
def test_a_gradient_that_came_late_travels_with_the_next_backward_at_no_cost(ranks, engine_type):
    assert ranks(2).run(late_and_then_not, engine_type) == [2 * 12] * 2


@with_buckets
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_is_one_reduce_scatter_and_one_all_gather_a_bucket(ranks, engine_type, world_size):
    for _, buckets, ops, _ in ranks(world_size).run(steps, world_size, engine_type, "awkward"):
        assert len(buckets) > 2
        count = Counter((op, unit) for op, unit, _ in ops)
        assert count == {
            **{("reduce_scatter", bucket): 1 for bucket in buckets},
            **{("all_gather", bucket): 1 for bucket in buckets},
            ("all_reduce", "control"): 1,
        }


@every_engine
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_ranks_agree_in_one_small_all_reduce_a_step_and_buffers_come_in_one_broadcast_a_forward(ranks, engine_type, clip_norm):
    for _, _, ops, _ in ranks(2).run(steps, 2, engine_type, "batchnorm", 3, clip_norm):
        count = Counter((op, unit) for op, unit, _ in ops if op not in ("reduce_scatter", "all_gather"))
        assert count == {("broadcast", "buffers"): 3, ("all_reduce", "control"): 1}
        assert max(numel for _, unit, numel in ops if unit == "control") <= 16


@with_buckets
@pytest.mark.parametrize("world_size", [2, 3])
def test_G_micro_steps_send_2GP_under_ddp_and_G_plus_1_times_P_where_the_step_alone_gathers(ranks, engine_type, world_size):
    collectives = {mz.DDP: 2 * 3, mz.Zero1: 3 + 1, mz.Zero2: 3 + 1}[engine_type]
    for P, _, _, sent in ranks(world_size).run(steps, world_size, engine_type, "awkward", 3):
        assert sent == collectives * 4 * P * (world_size - 1) // world_size
        assert sent == 4 * mz.theory.traffic(ENGINES[engine_type], P, world_size, micro_steps=3)


@every_engine
def test_a_single_rank_sends_nothing(ranks, engine_type):
    for name in ("awkward", "batchnorm"):
        assert ranks(1).run(steps, 1, engine_type, name, 2, 1.0)[0][2] == []


def without_gradients(rank, engine_type):
    frozen = mlp(3, 2).requires_grad_(False)
    empty = nn.Module()
    empty.w = nn.Parameter(torch.empty(0, 4))
    with mz.record_traffic() as traffic:
        for model in (frozen, empty):
            engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1))
            engine.step()
    return [op for op in traffic.ops if op.unit.startswith("bucket")]


@every_engine
def test_what_has_no_elements_or_needs_no_gradient_sends_nothing(ranks, engine_type):
    assert ranks(2).run(without_gradients, engine_type) == [[], []]


def at_the_start(rank, engine_type):
    model = Awkward()
    model.register_buffer("counter", torch.arange(5) + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mz.record_traffic() as traffic:
        engine_type(model, optimizer)
    return [(op.op, op.numel, op.bytes) for op in traffic.ops if op.unit == "start"]


@every_engine
def test_at_the_start_rank_0_sends_its_weights_and_buffers_once(ranks, engine_type):
    size = 4 * sum(p.numel() for p in Awkward().parameters()) + 5 * 8
    assert ranks(3).run(at_the_start, engine_type) == [[("broadcast", size, size)], [("broadcast", size, 0)], [("broadcast", size, 0)]]


# --- the recorder -----------------------------------------------------------------------------------


def plain_calls(rank):
    """What a learner writes: one call of each kind, 12 elements of 4 bytes, on 3 ranks."""
    x, third = torch.ones(12), torch.ones(4)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with mz.record_traffic() as traffic:
        dist.all_reduce(x)
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=1)
        dist.gather(x, [torch.ones(12) for _ in range(3)] if rank == 1 else None, dst=1)
        dist.scatter(third, list(x.chunk(3)) if rank == 1 else None, src=1)
        dist.all_gather(list(x.chunk(3)), third)
        gather(x, third)
        scatter(third, x)
        dist.all_to_all_single(x, x.clone())
        work = dist.all_reduce(x, async_op=True)
        open_until_waited_for = traffic.ops[-1].end is None
        work.wait()
        if rank == 0:
            dist.send(x, dst=1)
        elif rank == 1:
            dist.recv(x, src=0)
        dist.barrier()
    dist.all_reduce(x)  # no longer recorded
    in_order = all(a.start <= a.end <= b.start for a, b in zip(traffic.ops, traffic.ops[1:], strict=False))
    return [(op.op, op.numel, op.bytes) for op in traffic.ops], traffic.bytes_sent, open_until_waited_for and in_order


def test_plain_torch_distributed_calls_count_by_the_rules_of_the_textbook(ranks):
    results = ranks(3).run(plain_calls)
    for rank, (ops, total, in_order) in enumerate(results):
        at_1, not_at_1 = (rank == 1) * 48, (rank != 1) * 48
        expected = [
            ("all_reduce", 12, 64),
            ("broadcast", 12, at_1),
            ("reduce", 12, not_at_1),
            ("gather", 12, not_at_1),
            ("scatter", 12, at_1 * 2 // 3),
            ("all_gather", 12, 32),
            ("all_gather", 12, 32),
            ("reduce_scatter", 12, 32),
            ("all_to_all", 12, 32),
            ("all_reduce", 12, 64),
            *[("send", 12, 48)] * (rank == 0),
            *[("recv", 12, 0)] * (rank == 1),
            ("barrier", 0, 0),
        ]
        assert ops == expected
        assert total == sum(sent for _, _, sent in expected)
        assert in_order


def uneven_shares(rank):
    with mz.record_traffic() as outer:
        dist.all_reduce(torch.ones(10))
        with mz.record_traffic() as inner:
            dist.all_reduce(torch.ones(10))
            dist.all_reduce(torch.ones(10, dtype=torch.float16))
            dist.all_reduce(torch.ones(10, dtype=torch.float64))
    return outer.bytes_sent, inner.bytes_sent, [op.dtype for op in outer.ops]


def test_recordings_nest_and_thirds_of_a_byte_add_up_exactly(ranks):
    for outer, inner, dtypes in ranks(3).run(uneven_shares):
        assert (outer, inner) == (pytest.approx(2 * 2 / 3 * 180, abs=1e-9), pytest.approx(2 * 2 / 3 * 140, abs=1e-9))
        assert outer == 240
        assert dtypes == ["float32", "float32", "float16", "float64"]


def in_a_subgroup(rank):
    pair = dist.new_group([1, 2])
    with mz.record_traffic() as traffic:
        if rank in (1, 2):
            dist.all_reduce(torch.ones(6), group=pair)
            dist.broadcast(torch.ones(6), group_src=1, group=pair)
    return [(op.op, op.bytes) for op in traffic.ops]


def test_in_a_subgroup_only_its_members_count(ranks):
    assert ranks(3).run(in_a_subgroup) == [[], [("all_reduce", 24), ("broadcast", 0)], [("all_reduce", 24), ("broadcast", 24)]]


def raising(rank):
    from minizero.parts import calls

    before = list(calls.listeners)
    try:
        with mz.record_traffic():
            raise ZeroDivisionError
    except ZeroDivisionError:
        return calls.listeners == before


def test_an_exception_ends_the_recording(ranks):
    assert ranks(1).run(raising) == [True]


def test_a_bucket_is_padded_to_a_multiple_of_the_ranks():
    assert flat.layout([torch.empty(1)], 3).P == 96
