"""Every collective that minizero issues: the only file that calls torch.distributed.

P = elements of the full (padded) tensor, N = ranks, S = P // N = elements of one rank's shard.

                    each rank gives    each rank gets           a rank sends
    reduce_scatter  P                  its S of the sum         P (N-1)/N
    all_gather      S                  all P                    P (N-1)/N
    all_reduce      P                  all P of the sum         2P (N-1)/N  = the two above, one after the other
    broadcast       P at the source    P                        P at the source

The sum of a reduce-scatter is formed in rank order, in fp32 for 16-bit tensors, so that every step of the course adds
the same numbers in the same order. On gloo it is an all-to-all, after which each rank adds up what it has received: gloo's
own is an all-reduce in disguise and sends twice as much. An all-gather is a broadcast from every rank there, or a swap of two:
gloo's own copies through a second full buffer. On NCCL both are the native collectives.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minizero.parts import calls, flat, kinds

Group = dist.ProcessGroup

# torch 2.13 renamed two collectives and warns at the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_device = torch.device("cpu")
_joined: weakref.ref | None = None  # weak, for the connections end with the group


# --- the process group -----------------------------------------------------------------------------


def join(backend: str, rank: int, world_size: int, store: dist.Store | None, device: torch.device) -> None:
    """Initialise the default process group; `store=None` takes the rendezvous from the environment (torchrun)."""
    global _device, _joined
    _device = device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "gloo" and store is not None:
        # All ranks are on this machine. Gloo would look up the host's name, which on many a laptop leads nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    calls.watch()
    # A rank that hangs is ended by whoever started it, who also says why. NCCL aborts the process at its own timeout.
    patience = timedelta(days=1) if backend == "gloo" else timedelta(minutes=30)
    if store is None:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        if backend == "gloo":
            dist.barrier()  # or a rank that fails at once breaks the connections that another is still making
    _joined = weakref.ref(dist.group.WORLD)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def file_store(path: str, world_size: int) -> dist.Store:
    return dist.FileStore(path, world_size)


def intact() -> bool:
    """The process group that join() made is still the default one, and there is no other."""
    joined = _joined() if _joined else None
    return joined is not None and dist.group.WORLD is joined and len(dist.distributed_c10d._world.pg_map) == 1


def device() -> torch.device:
    """This rank's device. Outside a rank: the CPU."""
    return _device


def default_group() -> Group:
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: run this inside mz.launch(fn, world_size) or Ranks.run(fn), "
            "or call mz.init() first in a script started by torchrun"
        )
    return dist.group.WORLD


def rank_in(group: Group) -> int:
    return dist.get_rank(group)


def global_rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """All ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def size_of(group: Group) -> int:
    return dist.get_world_size(group)


def on_nccl(group: Group) -> bool:
    return dist.get_backend(group) != "gloo"


def _alone(group: Group) -> bool:
    """Nobody answers: this is the only rank, or its process group is a fake one that pretends there were others."""
    return size_of(group) == 1 or dist.get_backend(group) == "fake"


# --- the collectives --------------------------------------------------------------------------------


class Pending:
    """A collective under way. `wait()` completes it; until then its tensors belong to it."""

    def __init__(self, works: Sequence = (), call: calls.Call | None = None, finish: Callable[[], None] | None = None):
        self._works, self._call, self._finish = works, call, finish

    def wait(self) -> None:
        if self._call is None:  # nothing under way, or waited for already
            return
        call = self._call
        call.tell("waiting")
        for work in self._works:
            work.wait()
        call.arrive()
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self._call = (), None, None  # only now: who is interrupted before waits again
        call.tell("done")


def reduce_scatter_mean(shard_S: Tensor, full_P: Tensor, group: Group, unit: str) -> Pending:
    """shard_S becomes this rank's slice of the mean of all ranks' full_P. shard_S may be that slice of full_P itself.

    The sum is formed in rank order, in fp32 for 16-bit tensors. Traffic: P (N-1)/N elements.
    """
    size = group.size()
    if size == 1 or full_P.numel() == 0:
        _copy(shard_S, full_P)
        return Pending()
    with calls.logical("reduce_scatter", full_P, group, unit=unit, sync=False) as call:
        if on_nccl(group):
            work = _reduce_scatter(shard_S, full_P, op=dist.ReduceOp.AVG, group=group, async_op=True)
            return Pending(calls.timed([work], call, group), call)
        rows_NS, rank = full_P.view(size, -1), group.rank()
        if size == 2:
            received = kinds.tag(torch.empty_like(rows_NS[0]), "comm")
            works, lent = _swap(rows_NS[1 - rank], received, rank, group)
            addends = [rows_NS[0], received] if rank == 0 else [received, rows_NS[1]]
        else:
            received = kinds.tag(torch.empty_like(full_P), "comm")
            lent = _lend(full_P, received)
            works = [group.alltoall_base(lent[1], lent[0], [], [])]
            addends = received.view(size, -1).unbind()

        def finish() -> None:
            _mean(shard_S, addends)
            _take_back(lent)
            flat.free(received)  # now: gloo's thread lets go of a tensor some moment after the wait, another one in every run

        return Pending(calls.timed(works, call, group), call, finish)


def _mean(out_S: Tensor, addends: Sequence[Tensor]) -> None:
    """out_S becomes their mean, added up in their order; where there are more than two, the first is overwritten."""
    first_S, *others, last_S = addends
    total_S = first_S
    if out_S.dtype in (torch.float16, torch.bfloat16):
        total_S = kinds.tag(first_S.float(), "comm")
    for other_S in others:
        total_S += other_S
    if total_S.dtype is out_S.dtype:
        torch.add(total_S, last_S, out=out_S).div_(len(addends))
    else:
        out_S.copy_(total_S.add_(last_S).div_(len(addends)))


def all_gather(full_P: Tensor, shard_S: Tensor, group: Group, unit: str) -> Pending:
    """full_P becomes all ranks' shard_S, one after the other. shard_S may be this rank's slice of full_P itself.

    Traffic: P (N-1)/N elements.
    """
    size, rank = group.size(), group.rank()
    if size == 1 or full_P.numel() == 0:
        _copy(full_P, shard_S)
        return Pending()
    with calls.logical("all_gather", full_P, group, unit=unit, sync=False) as call:
        if on_nccl(group) or full_P.is_cuda:  # gloo sends what is on a GPU in its own collectives only
            works = [_all_gather(full_P, shard_S, group=group, async_op=True)]
            return Pending(calls.timed(works, call, group), call)
        rows_NS = full_P.view(size, -1)
        if size == 2:
            works, lent = _swap(shard_S, rows_NS[1 - rank], rank, group)
        else:
            works, lent = _broadcasts(shard_S, rows_NS, rank, group)
        _copy(rows_NS[rank], shard_S)
        return Pending(calls.timed(works, call, group), call, lambda: _take_back(lent))


# Below, the group's own methods: torch.distributed's functions around them take as long as a small message.


def _swap(given_S: Tensor, taken_S: Tensor, rank: int, group: Group) -> tuple[list, list[Tensor]]:
    """Between two ranks: an all-to-all in which nobody has anything for itself."""
    given, taken = lent = _lend(given_S, taken_S)
    splits = [0, len(given)] if rank == 0 else [len(given), 0]
    return [group.alltoall_base(taken, given, splits, splits)], lent


def _broadcasts(shard_S: Tensor, rows_NS: Tensor, rank: int, group: Group) -> tuple[list, list[Tensor]]:
    """Among more ranks, where an all-to-all would need a copy of the shard for each of them: a broadcast from every rank.

    Gloo's own threads do all the work. Were it messages, this thread would write to the connections itself, under locks, and
    when the processor is taken from it meanwhile, gloo's thread spins for them.
    """
    rows = list(rows_NS)
    rows[rank] = shard_S
    lent = _lend(*rows)
    return [group.broadcast(tensor, root) for root, tensor in enumerate(lent)], lent


def _lend(*tensors: Tensor) -> list[Tensor]:
    """The same bytes, for gloo."""
    return [tensor.view(torch.uint8).data for tensor in tensors]


def _take_back(lent: Sequence[Tensor]) -> None:
    """Gloo's thread lets go of them some moment after the wait: then of nothing."""
    for tensor in lent:
        tensor.set_()


def _copy(to: Tensor, source: Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.copy_(source)


def broadcast(tensors: Sequence[Tensor], group: Group, unit: str) -> None:
    """Every tensor becomes rank 0's, whatever the dtypes, in one broadcast. Autograd does not see the writes."""
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if size_of(group) == 1 or not tensors:
        return
    packed = torch.cat([_bytes(tensor) for tensor in tensors])
    kinds.tag(packed, "comm")
    root = dist.get_global_rank(group, 0)
    with calls.logical("broadcast", packed, group, unit=unit, source=root) as call:
        dist.broadcast(packed, src=root, group=group)
        call.tell("done")
    start = 0
    for tensor in tensors if rank_in(group) > 0 else ():
        # .data: what autograd has saved of a buffer stays valid, as it does when a plain forward updates the buffer
        size = tensor.numel() * tensor.element_size()
        tensor.data.copy_(packed[start : start + size].clone().view(tensor.dtype).view(tensor.shape))
        start += size
    flat.free(packed)


def broadcast_in_portions(tensors: Sequence[Tensor], group: Group, unit: str) -> None:
    """The same for a whole model: at most 25 MiB a broadcast, or one tensor that is larger."""
    portion: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if size + tensor.nbytes > 25 * 2**20 and portion:
            broadcast(portion, group, unit)
            portion, size = [], 0
        portion.append(tensor)
        size += tensor.nbytes
    broadcast(portion, group, unit)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def agree(flags: Sequence[bool], numbers: Sequence[float], group: Group, device: torch.device) -> tuple[list[bool], list[list[float]]]:
    """For each flag, whether some rank has set it; and for each number every rank's, in rank order. The one small all_reduce
    with which ranks agree on a step."""
    size, rank = size_of(group), rank_in(group)
    if _alone(group):
        return list(flags), [[float(number)] for number in numbers]
    votes = torch.zeros(len(flags) + size * len(numbers), dtype=torch.float64)
    votes[: len(flags)] = torch.tensor(flags, dtype=torch.float64)
    votes[len(flags) :].view(-1, size)[:, rank] = torch.tensor(numbers, dtype=torch.float64)
    if on_nccl(group):
        votes = votes.to(device)
    with calls.logical("all_reduce", votes, group, unit="control", detail="SUM") as call:
        if on_nccl(group):
            dist.all_reduce(votes, group=group)
        else:  # each rank's to all, and the sum here: fewer rounds of messages than gloo's all-reduce makes
            of_ranks = kinds.tag(votes.new_empty(size * len(votes)), "comm")
            _all_gather(of_ranks, votes, group=group)
            torch.sum(of_ranks.view(size, -1), 0, out=votes)
            flat.free(of_ranks)
        call.tell("done")
    answers = votes.tolist()
    flat.free(votes)
    return [vote > 0 for vote in answers[: len(flags)]], [answers[i : i + size] for i in range(len(flags), len(answers), size)]


def gather_objects(value: object, group: Group) -> list:
    """Every rank's `value`, in rank order. For set-up only: it pickles."""
    if _alone(group):
        return [value] * size_of(group)
    values: list = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values
