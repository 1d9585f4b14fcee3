"""ZeRO from scratch: DDP, ZeRO-1, 2 and 3, prefetch and offload, on real ranks."""

from minizero.ddp import DDP
from minizero.lens import theory
from minizero.lens.link import link
from minizero.lens.memory import record_memory
from minizero.lens.timeline import record_timeline
from minizero.lens.traffic import record_traffic
from minizero.offload import Zero3Offload
from minizero.parts.precision import LossScaler
from minizero.prefetch import Zero3Prefetch
from minizero.ranks import RankError, Ranks, RanksTimeout, device, init, launch
from minizero.zero1 import ShardedOptimizer, Zero1
from minizero.zero2 import Zero2
from minizero.zero3 import Zero3

__all__ = [
    "DDP",
    "LossScaler",
    "RankError",
    "Ranks",
    "RanksTimeout",
    "ShardedOptimizer",
    "Zero1",
    "Zero2",
    "Zero3",
    "Zero3Offload",
    "Zero3Prefetch",
    "device",
    "init",
    "launch",
    "link",
    "record_memory",
    "record_timeline",
    "record_traffic",
    "theory",
]
