"""Wrong answers to zero1.partition."""

import math

from wrong_answers import wrong


@wrong("numel // world_size drops the remainder")
def rounds_down(numel, world_size, rank):
    """Rounds the shard down: the last elements belong to nobody."""
    S = numel // world_size
    return S * world_size, rank * S, (rank + 1) * S


@wrong("the last rank takes the remainder as well")
def last_takes_the_rest(numel, world_size, rank):
    """Gives the remainder to the last rank, so shards differ in length."""
    S = numel // world_size
    return numel, rank * S, numel if rank == world_size - 1 else (rank + 1) * S


@wrong("the remainder is spread over the first ranks")
def spread(numel, world_size, rank):
    """As numpy.array_split does."""
    S, rest = divmod(numel, world_size)
    start = rank * S + min(rank, rest)
    return numel, start, start + S + (rank < rest)


@wrong("the padding is counted as elements")
def not_clipped(numel, world_size, rank):
    """Returns the shard of the padded vector."""
    S = -(-numel // world_size)
    return S * world_size, rank * S, (rank + 1) * S


@wrong("stop is cut off at numel, and start is not")
def start_not_clipped(numel, world_size, rank):
    """An empty shard has a start behind its stop."""
    S = -(-numel // world_size)
    return S * world_size, rank * S, min((rank + 1) * S, numel)


@wrong("where numel is a multiple of world_size, nothing has to be padded")
def always_pads(numel, world_size, rank):
    """numel + N - numel % N: pads also where it divides evenly."""
    P = numel + world_size - numel % world_size
    S = P // world_size
    return P, min(rank * S, numel), min((rank + 1) * S, numel)


@wrong("P is the size with the padding")
def not_padded(numel, world_size, rank):
    """Has the right ranges, and says that nothing is padded."""
    S = -(-numel // world_size)
    return numel, min(rank * S, numel), min((rank + 1) * S, numel)


@wrong("that is S, the size of one shard")
def shard_for_whole(numel, world_size, rank):
    """Returns S for P."""
    S = -(-numel // world_size)
    return S, min(rank * S, numel), min((rank + 1) * S, numel)


@wrong("that is (start, length)")
def start_and_length(numel, world_size, rank):
    """As torch.narrow takes it."""
    S = -(-numel // world_size)
    start, stop = min(rank * S, numel), min((rank + 1) * S, numel)
    return S * world_size, start, stop - start


@wrong("stop is the element behind the last one")
def inclusive(numel, world_size, rank):
    """Names the last element."""
    S = -(-numel // world_size)
    return S * world_size, min(rank * S, numel), min((rank + 1) * S, numel) - 1


@wrong("// is the one for whole numbers")
def floats(numel, world_size, rank):
    """Divides with /."""
    S = numel / world_size
    return numel, rank * S, (rank + 1) * S


@wrong("element 4 belongs to nobody")
def rounds_to_nearest(numel, world_size, rank):
    """round() instead of ceil: sometimes too short."""
    S = round(numel / world_size)
    return S * world_size, min(rank * S, numel), min((rank + 1) * S, numel)


@wrong("a return is missing")
def prints(numel, world_size, rank):
    """Prints the answer."""
    S = math.ceil(numel / world_size)
    print(S * world_size, rank * S)
