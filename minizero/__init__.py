"""ZeRO from scratch: DDP, ZeRO-1, 2 and 3, prefetch and offload, on real ranks."""

from minizero.ranks import RankError, Ranks, RanksTimeout, device, init, launch

__all__ = ["RankError", "Ranks", "RanksTimeout", "device", "init", "launch"]
