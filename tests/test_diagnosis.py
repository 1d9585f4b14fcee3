"""What the ranks' journals prove, without ranks: each rank's calls are issued on a fake group, one rank after the other."""

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


def other_barrier(rank):
    dist.monitored_barrier() if rank else dist.barrier()


def other_group(rank):
    dist.new_group([0, 1] if rank else [0])


@pytest.mark.parametrize(
    "fn, difference, sides",
    [
        (sized, "size", "rank 0 all_reduce #1 (float32 [3], SUM), rank 1 all_reduce #1 (float32 [4], SUM)"),
        (of_other_dtype, "dtype", "rank 0 all_reduce #1 (float32 [4], SUM), rank 1 all_reduce #1 (int32 [4], SUM)"),
        (from_other_source, "arguments", "broadcast #1 (float32 [4], src=0), rank 1 broadcast #1 (float32 [4], src=1)"),
        (other_reduction, "arguments", "rank 0 all_reduce #1 (float32 [4], SUM), rank 1 all_reduce #1 (float32 [4], MAX)"),
        (other_operation, "operation", "rank 0 broadcast #1 (float32 [3], src=0), rank 1 all_reduce #1 (float32 [3], SUM)"),
        (other_barrier, "arguments", "rank 0 barrier #1, rank 1 barrier #1 (monitored)"),
        (other_group, "arguments", "rank 0 new_group #1 (ranks=[0]), rank 1 new_group #1 (ranks=[0, 1])"),
    ],
)
def test_different_collectives_are_named_on_both_sides(judge, fn, difference, sides):
    if fn is other_barrier:  # a fake group has no monitored one
        pytest.MonkeyPatch.context()
    found = judge(fn)
    assert f"different collectives (not the same {difference})" in found.reason and sides in found.reason
    assert found.rank == 1 and "line" in found.rows()
