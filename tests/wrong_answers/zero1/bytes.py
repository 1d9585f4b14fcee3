"""Wrong answers to zero1.bytes."""

from wrong_answers import wrong


def up(numel, n):
    return -(-numel // n)


def states(w, g, m, v, u):
    return {"weights": w, "gradients": g, "master": m, "momentum": v, "variance": u}


@wrong("every rank would hold the whole master: that is DDP")
def ddp(numel, world_size):
    """Shards nothing."""
    P = up(numel, world_size) * world_size
    return states(2 * P, 2 * P, 4 * P, 4 * P, 4 * P)


@wrong("each rank holds all gradients")
def zero2(numel, world_size):
    """Shards the gradients too."""
    S = up(numel, world_size)
    P = S * world_size
    return states(2 * P, 2 * S, 4 * S, 4 * S, 4 * S)


@wrong("each rank holds all weights")
def zero3(numel, world_size):
    """Shards everything."""
    S = up(numel, world_size)
    return states(2 * S, 2 * S, 4 * S, 4 * S, 4 * S)


@wrong("padding has bytes too")
def no_padding(numel, world_size):
    """Counts the weights without padding."""
    S = up(numel, world_size)
    return states(2 * numel, 2 * numel, 4 * S, 4 * S, 4 * S)


@wrong("there are no halves of an element")
def fractions(numel, world_size):
    """Divides with /, and pads the full buffers only."""
    P = up(numel, world_size) * world_size
    each = 4 * numel / world_size
    return states(2 * P, 2 * P, each, each, each)


@wrong("the shards are padded to one length")
def rounds_down(numel, world_size):
    """Rounds the shard down."""
    P = up(numel, world_size) * world_size
    each = 4 * (numel // world_size)
    return states(2 * P, 2 * P, each, each, each)


@wrong("weights have 16 bits, which are 2 bytes")
def fp32(numel, world_size):
    """Counts fp32 weights."""
    S = up(numel, world_size)
    P = S * world_size
    return states(4 * P, 4 * P, 4 * S, 4 * S, 4 * S)


@wrong("momentum is fp32, 4 bytes an element")
def moments_in_16_bits(numel, world_size):
    """Takes the moments for 16-bit tensors, as they are when Adam is given bf16 weights."""
    S = up(numel, world_size)
    P = S * world_size
    return states(2 * P, 2 * P, 4 * S, 2 * S, 2 * S)


@wrong("that is the number of elements: each has 2 bytes")
def elements(numel, world_size):
    """Counts elements."""
    S = up(numel, world_size)
    P = S * world_size
    return states(P, P, S, S, S)


@wrong("the answer is a dict with these five keys")
def three_kinds(numel, world_size):
    """Puts Adam's part under one key."""
    S = up(numel, world_size)
    return {"weights": 2 * S * world_size, "gradients": 2 * S * world_size, "optimizer": 12 * S}
