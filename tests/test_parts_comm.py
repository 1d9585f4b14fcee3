"""The collectives: their values to the bit, also asynchronous, in place, in subgroups, alone, and where nobody answers."""

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from torch import nn
from torch._subclasses import FakeTensorMode

import minizero as mz
from minizero.parts import calls, comm, flat

HALF = (torch.float16, torch.bfloat16)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def of_rank(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def mean_in_rank_order(world_size, numel, dtype):
    total = of_rank(0, numel, dtype).to(torch.float32 if dtype in HALF else dtype)
    for rank in range(1, world_size):
        total += of_rank(rank, numel, dtype)
    return (total / world_size).to(dtype)


# --- reduce-scatter and all-gather --------------------------------------------------------------------


def reduce_scatter(rank, world_size, dtype, in_place):
    full_P = of_rank(rank, 60, dtype)
    shard_S = flat.shard(full_P, rank, world_size) if in_place else torch.empty(60 // world_size, dtype=dtype)
    comm.reduce_scatter_mean(shard_S, full_P, comm.default_group(), "test").wait()
    return shard_S


@world_sizes
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_reduce_scatter_gives_the_mean_summed_in_rank_order_and_16_bits_in_float32(ranks, dtype, in_place, world_size):
    shards = ranks(world_size).run(reduce_scatter, world_size, dtype, in_place)
    assert torch.equal(torch.cat(shards), mean_in_rank_order(world_size, 60, dtype))


class Interrupted:
    """The first who waits for it is interrupted when it is complete."""

    def __init__(self, work):
        self.work, self.first = work, True

    def wait(self):
        self.work.wait()
        first, self.first = self.first, False
        if first:
            raise KeyboardInterrupt


def interrupted(rank, world_size):
    shard_S, full_P = torch.full((30,), torch.nan), of_rank(rank, 60)
    pending = comm.reduce_scatter_mean(shard_S, full_P, comm.default_group(), "test")
    pending._works = [Interrupted(work) for work in pending._works]
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.wait()
    return shard_S


def test_who_is_interrupted_while_waiting_may_wait_again(ranks):
    assert torch.equal(torch.cat(ranks(2).run(interrupted, 2)), mean_in_rank_order(2, 60, torch.float32))


def largest_float16(rank):
    full_P = torch.tensor([65504.0, (-1) ** rank * 65504.0], dtype=torch.float16)
    comm.reduce_scatter_mean(flat.shard(full_P, rank, 2), full_P, comm.default_group(), "test").wait()
    return full_P[rank].item()


def test_a_sum_in_float16_does_not_overflow_before_it_is_divided(ranks):
    assert ranks(2).run(largest_float16) == [65504, 0]


def all_gather(rank, world_size, dtype, in_place):
    full_P = torch.full((60,), -1, dtype=dtype)
    shard_S = flat.shard(full_P, rank, world_size) if in_place else torch.empty(60 // world_size, dtype=dtype)
    shard_S.fill_(rank + 1)
    comm.all_gather(full_P, shard_S, comm.default_group(), "test").wait()
    return full_P


@world_sizes
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_gather_gives_each_rank_all_shards_in_rank_order(ranks, dtype, in_place, world_size):
    expected = torch.arange(1, world_size + 1).repeat_interleave(60 // world_size).to(dtype)
    for full_P in ranks(world_size).run(all_gather, world_size, dtype, in_place):
        assert torch.equal(full_P, expected)


def many_at_once(rank, world_size):
    """Eight collectives under way, waited for in another order on every rank, and some more than once."""
    group = comm.default_group()
    fulls = [of_rank(rank + 10 * i, 60 * (i + 1)) for i in range(4)]
    reductions = [comm.reduce_scatter_mean(flat.shard(f, rank, world_size), f, group, f"reduce {i}") for i, f in enumerate(fulls)]
    gathered = [torch.empty(60 * (i + 1)) for i in range(4)]
    sources = [torch.full((f.numel() // world_size,), float(rank)) for f in gathered]
    gathers = [comm.all_gather(f, s, group, f"gather {i}") for i, (f, s) in enumerate(zip(gathered, sources, strict=True))]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(rank)).tolist()
    for i in [*order, *order]:
        (reductions + gathers)[i].wait()
    return [flat.shard(f, rank, world_size).clone() for f in fulls], gathered


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_under_way_may_be_completed_in_any_order(ranks, world_size):
    results = ranks(world_size).run(many_at_once, world_size)
    for i in range(4):
        expected = sum(of_rank(rank + 10 * i, 60 * (i + 1)) for rank in range(world_size)) / world_size
        assert torch.equal(torch.cat([shards[i] for shards, _ in results]), expected)
        for _, gathered in results:
            assert torch.equal(gathered[i], torch.arange(world_size).repeat_interleave(60 * (i + 1) // world_size).float())


def nothing_at_all(rank):
    group, none = comm.default_group(), torch.empty(0)
    with mz.record_traffic() as traffic:
        comm.reduce_scatter_mean(none, none, group, "test").wait()
        comm.all_gather(none, none, group, "test").wait()
        comm.broadcast([none, torch.empty(0, 3)], group, "test")
        comm.broadcast([], group, "test")
    return traffic.ops


def test_tensors_without_elements_cost_no_collective(ranks):
    assert ranks(2).run(nothing_at_all) == [[], []]


# --- broadcast and agreement ---------------------------------------------------------------------------


def tensors_of(rank):
    return [
        torch.full((3,), rank + 0.5),
        torch.tensor(rank, dtype=torch.int64),
        torch.tensor([rank == 0, rank == 1, True]),
        torch.empty(0, 4),
        torch.full((5,), rank, dtype=torch.uint8),
        torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
        torch.arange(12.0, dtype=torch.float64).view(3, 4)[:, 1::2] + rank,
        torch.full((2,), complex(rank, 1)),
        torch.full((2, 3, 2, 2), rank, dtype=torch.float16).to(memory_format=torch.channels_last),
        nn.Parameter(torch.full((2,), float(rank))),
    ]


def broadcast(rank):
    tensors = tensors_of(rank)
    views = [t.detach().view_as(t) for t in tensors]
    versions = [t._version for t in tensors]
    with mz.record_traffic() as traffic:
        comm.broadcast(tensors, comm.default_group(), "test")
    assert [t._version for t in tensors] == versions
    assert all(torch.equal(t, view) for t, view in zip(tensors, views, strict=True))  # written in place
    return [t.detach() for t in tensors], [(op.op, op.dtype) for op in traffic.ops]


@world_sizes
def test_tensors_of_all_kinds_become_rank_0s_in_one_broadcast_that_autograd_does_not_see(ranks, world_size):
    for tensors, ops in ranks(world_size).run(broadcast):
        for tensor, expected in zip(tensors, tensors_of(0), strict=True):
            assert tensor.dtype == expected.dtype and tensor.stride() == expected.stride()
            assert torch.equal(tensor, expected)
        assert ops == [("broadcast", "uint8")] * (world_size > 1)


def agree(rank, world_size):
    flags = [rank == r for r in range(world_size)] + [False, True]
    return comm.agree(flags, [rank / 3], comm.default_group(), torch.device("cpu")), comm.gather_objects({"rank": rank}, comm.default_group())


@world_sizes
def test_ranks_agree_on_what_some_rank_has_said(ranks, world_size):
    for (flags, numbers), objects in ranks(world_size).run(agree, world_size):
        assert flags == [True] * world_size + [False, True]
        assert numbers == [[rank / 3 for rank in range(world_size)]]  # to the last bit
        assert objects == [{"rank": rank} for rank in range(world_size)]


def in_a_subgroup(rank):
    """Ranks 2 and 0 of three form a group: its rank 0 is the lowest, and rank 1 is outside."""
    pair = dist.new_group([2, 0])
    if rank == 1:
        return None
    me = comm.rank_in(pair)
    full_P = torch.arange(4.0) * (rank + 1)
    comm.reduce_scatter_mean(flat.shard(full_P, me, 2), full_P, pair, "test").wait()
    comm.all_gather(full_P, flat.shard(full_P, me, 2), pair, "test").wait()
    told = torch.tensor([float(rank + 5)])
    comm.broadcast([told], pair, "test")
    return me, full_P.tolist(), told.item(), comm.agree([rank == 2], [rank], pair, torch.device("cpu")), comm.gather_objects(rank, pair)


def test_in_a_subgroup_ranks_are_counted_within_it(ranks):
    first, outside, second = ranks(3).run(in_a_subgroup)
    assert outside is None
    assert first == (0, [0, 2, 4, 6], 5, ([True], [[0, 2]]), [0, 2])
    assert second == (1, [0, 2, 4, 6], 5, ([True], [[0, 2]]), [0, 2])


# --- who hears of it -------------------------------------------------------------------------------------


def with_a_listener(rank):
    heard = []

    class Listener:
        def issued(self, call):
            heard.append(("issued", call.unit, call.where[0]))

        def waiting(self, call):
            heard.append(("waiting", call.unit))

        def done(self, call):
            heard.append(("done", call.unit))

    calls.listeners.append(Listener())
    full_P = torch.ones(4)
    first = comm.reduce_scatter_mean(flat.shard(full_P, rank, 2), full_P, comm.default_group(), "first")
    second = comm.all_gather(torch.empty(4), torch.ones(2), comm.default_group(), "second")
    second.wait()
    first.wait()
    return heard


def test_listeners_hear_of_each_logical_collective_once_with_the_callers_own_line(ranks):
    for heard in ranks(2).run(with_a_listener):
        assert heard == [
            ("issued", "first", __file__),
            ("issued", "second", __file__),
            ("waiting", "second"),
            ("done", "second"),
            ("waiting", "first"),
            ("done", "first"),
        ]


def leave_an_uneven_count_behind(rank):
    """Both ranks fail, one of them an all-gather later."""
    for _ in range(rank + 1):
        comm.all_gather(torch.empty(4), torch.ones(2), comm.default_group(), "test")
    raise ZeroDivisionError


def test_after_a_failure_ranks_begin_to_count_their_all_gathers_anew(ranks):
    with pytest.raises(mz.RankError):
        ranks(2).run(leave_an_uneven_count_behind)
    assert len(ranks(2).run(all_gather, 2, torch.float32, False)) == 2


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"no process group: run this inside mz\.launch.*mz\.init\(\)"):
        comm.default_group()


# --- a process group that pretends ---------------------------------------------------------------------


def one_step(device="cpu", **keywords):
    with torch.device(device):
        model = mlp(4, 64, 64, 2)
        engine = mz.DDP(model, torch.optim.Adam(model.parameters(), foreach=False), bucket_mb=0.01, **keywords)
        with mz.record_traffic() as traffic:
            engine.backward(loss_of(engine, torch.ones(8, 4)))
            assert engine.step()
    return engine, traffic


def of_buckets(traffic):
    return [op for op in traffic.ops if op.unit.startswith("bucket")]


def test_rank_0_of_64_runs_a_step_in_one_process(rank_0_of_64):
    engine, traffic = one_step(clip_norm=1.0)
    P = sum(bucket.grad_P.numel() for bucket in engine.buckets)
    assert engine.world_size == 64 and P % (64 * 32) == 0
    assert sum(op.bytes for op in of_buckets(traffic)) == 4 * mz.theory.traffic(0, P, 64)
    assert len(of_buckets(traffic)) == 2 * len(engine.buckets)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_rank_0_of_64_runs_on_tensors_that_are_not_there(rank_0_of_64, nothing_but_the_test, device):
    """And its memory can be counted: the collective is the native one, without a buffer of ours."""
    with FakeTensorMode(), mz.record_memory() as m:
        engine, traffic = one_step(device)
        P = sum(bucket.grad_P.numel() for bucket in engine.buckets)
        assert m.now["grads"] == 4 * P
        assert m.now["params"] == 4 * sum(p.numel() for p in engine.module.parameters())
    assert sum(op.bytes for op in of_buckets(traffic)) == 4 * mz.theory.traffic(0, P, 64)
    assert m.curve()[1]["comm"].max() <= 4 * sum(p.numel() for p in engine.module.parameters())  # what the start packs


def test_where_nobody_answers_the_local_answer_counts(rank_0_of_64):
    with FakeTensorMode():
        assert comm.agree([True, False], [2.0], comm.default_group(), torch.device("cpu")) == ([True, False], [[2.0]])
    assert comm.gather_objects("me", comm.default_group()) == ["me"] * 64


# --- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs two ranks on one GPU")
def test_two_ranks_share_a_gpu_with_gloo():
    shards = mz.launch(on_the_gpu, 2, device="cuda:0")
    assert torch.equal(torch.cat(shards), mean_in_rank_order(2, 60, torch.float32))


def on_the_gpu(rank):
    full_P = of_rank(rank, 60).to(mz.device())
    shard_S = flat.shard(full_P, rank, 2)
    comm.reduce_scatter_mean(shard_S, full_P, comm.default_group(), "test").wait()
    comm.all_gather(full_P, shard_S, comm.default_group(), "test").wait()
    told = torch.full((3,), float(rank), device=mz.device())
    comm.broadcast([told], comm.default_group(), "test")
    assert told.tolist() == [0, 0, 0]
    assert comm.agree([rank == 1], [rank], comm.default_group(), mz.device()) == ([True], [[0.0, 1.0]])
    return flat.shard(full_P, rank, 2).cpu()
