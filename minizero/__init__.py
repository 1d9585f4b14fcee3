"""ZeRO from scratch: DDP, ZeRO-1, 2 and 3, prefetch and offload, on real ranks."""

from minizero.ddp import DDP
from minizero.lens import theory
from minizero.lens.memory import record_memory
from minizero.lens.traffic import record_traffic
from minizero.ranks import RankError, Ranks, RanksTimeout, device, init, launch

__all__ = [
    "DDP",
    "RankError",
    "Ranks",
    "RanksTimeout",
    "device",
    "init",
    "launch",
    "record_memory",
    "record_traffic",
    "theory",
]
