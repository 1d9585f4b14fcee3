"""What the ranks' journals prove, without ranks: the calls are issued on a fake group, one rank after the other."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import minizero as mz
from minizero.parts import calls
from minizero.ranks.diagnosis import State, standing, verdict
from minizero.ranks.journal import Journal, Story

one = torch.ones


class Waits(BaseException):
    """Raised after a rank's last call: it never comes back from it."""


class LateJournal(Journal):
    """Writes that a call is done when the next one is issued, so that a rank can be left waiting in its last call."""

    def __init__(self, path):
        super().__init__(path)
        self.over = []

    def issued(self, call):
        self.flush()
        super().issued(call)

    def done(self, call):
        self.over.append(call)

    def flush(self):
        while self.over:
            super().done(self.over.pop(0))


@pytest.fixture
def judge(tmp_path):
    """judge(fn, world_size): the verdict on fn(0), fn(1), … (a rank of `computing` is neither waiting nor finished)."""
    calls.watch()

    def judge(fn, world_size=2, computing=()):
        stories, states = [], []
        for rank in range(world_size):
            path = tmp_path / f"journal-{rank}"
            path.unlink(missing_ok=True)
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            journal = LateJournal(path)
            calls.listeners.append(journal)
            try:
                fn(rank)
                journal.flush()
                states.append(State.RUNNING if rank in computing else State.FINISHED)
            except Waits:
                states.append(State.BLOCKED)
            finally:
                calls.listeners.remove(journal)
                journal.close()
                dist.destroy_process_group()
            stories.append(Story(rank, path))
            stories[-1].read()
        judge.rows = [standing(story, state) for story, state in zip(stories, states, strict=True)]
        return verdict(stories, states)

    return judge


# --- different calls ---------------------------------------------------------------------------------


def sized(rank):
    dist.all_reduce(one(3 + rank))


def of_other_dtype(rank):
    dist.all_reduce(one(4, dtype=[torch.float32, torch.int32][rank]))


def from_other_source(rank):
    dist.broadcast(one(4), src=rank)


def other_reduction(rank):
    dist.all_reduce(one(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])


def other_operation(rank):
    dist.all_reduce(one(3)) if rank else dist.broadcast(one(3), src=0)


def other_group(rank):
    dist.new_group([0, 1] if rank else [0])


@pytest.mark.parametrize(
    "fn, difference, sides",
    [
        (sized, "size", "rank 0 all_reduce #1 (float32 [3], SUM), rank 1 all_reduce #1 (float32 [4], SUM)"),
        (of_other_dtype, "dtype", "rank 0 all_reduce #1 (float32 [4], SUM), rank 1 all_reduce #1 (int32 [4], SUM)"),
        (from_other_source, "arguments", "broadcast #1 (float32 [4], src=0), rank 1 broadcast #1 (float32 [4], src=1)"),
        (other_reduction, "arguments", "all_reduce #1 (float32 [4], SUM), rank 1 all_reduce #1 (float32 [4], MAX)"),
        (other_operation, "operation", "broadcast #1 (float32 [3], src=0), rank 1 all_reduce #1 (float32 [3], SUM)"),
        (other_group, "arguments", "rank 0 new_group #1 (ranks=[0]), rank 1 new_group #1 (ranks=[0, 1])"),
    ],
)
def test_different_collectives_are_named_on_both_sides(judge, fn, difference, sides):
    found = judge(fn)
    assert f"different collectives (not the same {difference})" in found.reason and sides in found.reason
    assert found.rank == 1 and "line" in found.rows()


def test_the_odd_one_of_four_is_to_blame(judge):
    found = judge(lambda rank: dist.all_reduce(one(5 if rank == 1 else 4)), world_size=4)
    assert found.rank == 1 and "ranks 0, 2 and 3 all_reduce #1 (float32 [4], SUM), rank 1" in found.reason


def test_ranks_that_have_come_far_enough_are_compared_before_the_last_has(judge):
    found = judge(lambda rank: rank < 2 and dist.all_reduce(one(3 + rank)), world_size=3, computing=[0, 1, 2])
    assert "not the same size" in found.reason


@pytest.mark.parametrize(
    "taken, difference", [(one(4), "size"), (one(2), "size"), (one(3, dtype=torch.int32), "dtype")], ids=str
)
def test_the_ends_of_a_message_must_fit(judge, taken, difference):
    found = judge(lambda rank: dist.recv(taken, 0) if rank else dist.send(one(3), 1))
    assert f"the two ends of a message do not fit (not the same {difference})" in found.reason
    assert "rank 0 send to rank 1 #1 (float32 [3]), rank 1 recv from rank 0 #1" in found.reason


def test_what_is_taken_from_anyone_is_not_compared(judge):
    def fn(rank):
        for size in (2, 3):
            if rank == 0:
                dist.send(one(size), 1)
            else:
                dist.irecv(one(size), src=None if size == 2 else 0).wait()

    assert judge(fn) is None


def same_in_other_words(rank):
    n = dist.get_world_size()
    dist.all_reduce(one(2)) if rank else dist.all_reduce(one(2), op=dist.ReduceOp.SUM)
    splits = [1] * n if rank else None
    dist.all_to_all_single(one(n), one(n), splits, splits)
    dist.new_group() if rank else dist.new_group([2, 1, 0])
    root = {"group_src": 1} if rank else {"src": 1}
    dist.broadcast(one(1), **root)
    dist.scatter(one(2), [one(2)] * n if rank == 0 else None, src=0)
    dist.gather(one(2), [one(2)] * n if rank == 1 else None, dst=1)


def uneven(rank):
    splits = [rank + other + 1 for other in range(dist.get_world_size())]  # as many there as back
    dist.all_to_all_single(one(sum(splits)), one(sum(splits)), splits, splits)


def in_groups_of_their_own(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(one(1), group=group)
    if rank == 2:
        dist.new_group([2], use_local_synchronization=True)  # only its members call this one


@pytest.mark.parametrize("fn", [same_in_other_words, uneven, in_groups_of_their_own])
def test_what_belongs_together_is_no_mismatch(judge, fn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert judge(fn, world_size=3) is None


# --- ranks that wait for each other -------------------------------------------------------------------


def waits(call, *args, **kwargs):
    call(*args, **kwargs)
    raise Waits


def skips(rank):
    dist.barrier()
    if rank == 1:
        waits(dist.all_reduce, one(3))


def async_wait(rank):
    if rank == 1:
        waits(dist.all_reduce(one(3), async_op=True).wait)


def recv_from_each_other(rank):
    waits(dist.recv, one(1), src=1 - rank)


def recv_without_send(rank):
    if rank == 0:
        waits(dist.recv, one(1), src=1)


def recv_from_nobody(rank):
    if rank == 0:
        waits(dist.irecv(one(1)).wait)  # the fake group knows no recv from anyone


def send_without_recv(rank):
    if rank == 0:
        waits(dist.send, one(1), dst=1)


def other_tag(rank):
    waits(dist.recv, one(1), src=0, tag=2) if rank else waits(dist.send, one(1), dst=1, tag=1)


def order_of_two_groups(rank):
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    waits(dist.all_reduce, one(1), group=groups[rank])


@pytest.mark.parametrize(
    "fn, reason, to_blame",
    [
        (skips, "rank 1 waits in all_reduce #2 (float32 [3], SUM), but rank 0 has finished without it", 0),
        (async_wait, "rank 1 waits in all_reduce #1 (float32 [3], SUM), but rank 0 has finished without it", 0),
        (
            recv_from_each_other,
            "rank 0 waits in recv from rank 1 #1 (float32 [1]) while rank 1 waits in recv from rank 0 #1 (float32 [1])",
            0,
        ),
        (recv_without_send, "rank 0 waits in recv from rank 1 #1 (float32 [1]), but rank 1 has finished", 1),
        (recv_from_nobody, "rank 0 waits in recv from any rank #1 (float32 [1]), but rank 1 has finished", 1),
        (send_without_recv, "rank 0 waits in send to rank 1 #1 (float32 [1]), but rank 1 has finished", 1),
        (other_tag, "send to rank 1 #1 (float32 [1], tag=1) while rank 1 waits in recv from rank 0 #1", 0),
        (
            order_of_two_groups,
            "all_reduce #1 (float32 [1], SUM, group 1 of ranks [0, 1]) while rank 1 waits in all_reduce #1 "
            "(float32 [1], SUM, group 2 of ranks [0, 1])",
            0,
        ),
    ],
)
def test_a_deadlock_is_proven(judge, fn, reason, to_blame):
    found = judge(fn)
    assert reason in found.reason and found.rank == to_blame
    assert any("waiting in" in row and "line" in row for row in judge.rows)


def test_a_ring_that_all_enter_by_recv_is_a_deadlock(judge):
    found = judge(lambda rank: waits(dist.recv, one(1), src=(rank + 1) % 3), world_size=3)
    assert "rank 0 waits in recv from rank 1" in found.reason and "rank 1 waits in recv from rank 2" in found.reason


def test_a_collective_that_one_side_does_not_wait_for_is_missed_too(judge):
    found = judge(lambda rank: dist.broadcast(one(2), src=0) if rank == 0 else None)
    assert "rank 0 has issued broadcast #1 (float32 [2], src=0), but rank 1 has finished without it" in found.reason


@pytest.mark.parametrize(
    "fn, computing",
    [
        (skips, [0]),
        (recv_without_send, [1]),
        (recv_from_nobody, [1]),
        (send_without_recv, [1]),
        (lambda rank: waits(dist.barrier) if rank < 2 else None, [2]),
        # rank 2 may yet send to rank 1, who would then send to rank 0
        (lambda rank: waits(dist.recv, one(1), src=rank + 1) if rank < 2 else None, [2]),
        # the other side has been there already
        (lambda rank: waits(dist.recv, one(1), src=1) if rank == 0 else rank == 1 and dist.isend(one(1), dst=0), []),
        (lambda rank: waits(dist.send, one(1), dst=1) if rank == 0 else rank == 1 and dist.irecv(one(1), src=0), []),
        (lambda rank: waits(dist.barrier), []),  # all are there: it is about to end
    ],
)
def test_nothing_is_proven_while_a_rank_can_still_come(judge, fn, computing):
    world_size = 3 if fn.__name__ == "<lambda>" else 2
    assert judge(fn, world_size, computing) is None


def test_a_call_that_torch_refuses_does_not_count(judge):
    def fn(rank):
        if rank == 0:
            with pytest.raises(ValueError, match="gather_list"):
                dist.gather(one(1), dst=0)
            with pytest.raises(ValueError, match="destination rank"):
                dist.send(one(1), dst=0)
        dist.barrier()

    assert judge(fn) is None
    assert judge.rows == ["finished, after 1 call"] * 2


# --- every function of torch.distributed is heard -----------------------------------------------------


def test_every_collective_is_heard_once_under_its_own_name(judge):
    chunks = [one(3), one(3)]
    programs = {
        "all_reduce": lambda: dist.all_reduce(one(6)),
        "broadcast": lambda: dist.broadcast(one(6), 0),
        "reduce": lambda: dist.reduce(one(6), 0),
        "gather": lambda: dist.gather(one(6), [one(6), one(6)], dst=dist.get_rank()),
        "scatter": lambda: dist.scatter(one(3), chunks, src=dist.get_rank()),
        "all_gather": lambda: dist.all_gather(chunks, one(3)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(one(6), one(3)),
        "reduce_scatter": lambda: dist.reduce_scatter(one(3), chunks),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one(3), one(6)),
        "all_to_all": lambda: dist.all_to_all(chunks, chunks),
        "all_to_all_single": lambda: dist.all_to_all_single(one(6), one(6)),
        "send": lambda: dist.send(one(6), 1 - dist.get_rank()),
        "isend": lambda: dist.isend(one(6), 1 - dist.get_rank()).wait(),
        "recv": lambda: dist.recv(one(6), 1 - dist.get_rank()),
        "irecv": lambda: dist.irecv(one(6), 1 - dist.get_rank()).wait(),
    }
    if hasattr(dist, "all_gather_single"):
        programs["all_gather_single"] = lambda: dist.all_gather_single(one(6), one(3))
        programs["reduce_scatter_single"] = lambda: dist.reduce_scatter_single(one(3), one(6))
    logical = {"isend": "send", "irecv": "recv"}
    heard = {}

    def fn(rank):
        for name, program in programs.items():
            with mz.record_traffic() as traffic, warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                program()
            heard[name] = [(op.op, op.numel) for op in traffic.ops]

    judge(fn)
    for name in programs:
        op = logical.get(name, name.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor"))
        assert heard[name] == [(op, 6)], name
    assert set(calls._COLLECTIVES) - set(programs) <= {
        "barrier", "monitored_barrier", "new_group", "all_gather_single", "reduce_scatter_single"
    }  # fmt: skip
