"""Warm ranks that all tests share, and a look at the end: have they left a process behind?"""

import gc
import os

import psutil
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import minizero as mz
from minizero.parts import comm


@pytest.fixture(scope="session", autouse=True)
def no_process_left():
    """When all pools are closed, at the end of the session, no process of ours may be alive."""
    yield
    for pool in [each for each in gc.get_objects() if type(each) is mz.Ranks]:
        pool.close()
    left = children()
    for process in left:
        process.kill()
    assert not left, f"left behind: {[process.cmdline() for process in left]}"


@pytest.fixture(scope="session")
def ranks(no_process_left):
    """ranks(world_size): one warm pool for each size, on the CPU. After a failure the next run starts it anew."""
    pools = {}

    def warm(world_size):
        if world_size not in pools:
            pools[world_size] = mz.Ranks(world_size, device="cpu")
            pools[world_size].run(import_all)
        return pools[world_size]

    yield warm
    for pool in pools.values():
        pool.close()


@pytest.fixture
def nothing_but_the_test():
    """For what is metered in this process: no garbage that could die meanwhile, and no objects to look through but the test's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rank_0_of_64():
    """A process group that pretends: this process is rank 0, and nobody answers."""
    comm.join("fake", 0, 64, FakeStore(), torch.device("cpu"))
    yield
    comm.leave()


def import_all(rank):
    """The first run, which leaves no tensor: what it has imported is not looked at by any collection later on."""


def children(pid=None):
    """The living processes that a process has started, and they in turn; without Python's own resource tracker."""
    try:
        started = psutil.Process(pid or os.getpid()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in started if alive(process) and "resource_tracker" not in _command(process)]


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process):
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
