"""Every collective that minizero issues: the only file that calls torch.distributed.

P = elements of the full (padded) tensor, N = ranks, S = P // N = elements of one rank's shard.

                    each rank gives    each rank gets           a rank sends
    reduce_scatter  P                  its S of the sum         P (N-1)/N
    all_gather      S                  all P                    P (N-1)/N
    all_reduce      P                  all P of the sum         2P (N-1)/N  = the two above, one after the other
    broadcast       P at the source    P                        P at the source

The sum of a reduce-scatter is formed in rank order, in fp32 for 16-bit tensors, so that every step of the course adds
the same numbers in the same order. On gloo it is an all-to-all of the N chunks and a local sum: gloo's own
reduce-scatter is an all-reduce in disguise and sends twice as much. On NCCL it is the native collective.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from minizero.parts import calls

Group = dist.ProcessGroup

# torch 2.13 renamed two collectives and warns at the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_device = torch.device("cpu")


# --- the process group -----------------------------------------------------------------------------


def join(backend: str, rank: int, world_size: int, store: dist.Store | None, device: torch.device) -> None:
    """Initialise the default process group; `store=None` takes the rendezvous from the environment (torchrun)."""
    global _device
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


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def file_store(path: str, world_size: int) -> dist.Store:
    return dist.FileStore(path, world_size)


def groups() -> int:
    """How many process groups exist in this process."""
    return len(dist.distributed_c10d._world.pg_map)


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


def size_of(group: Group) -> int:
    return dist.get_world_size(group)


def on_nccl(group: Group) -> bool:
    return dist.get_backend(group) != "gloo"
