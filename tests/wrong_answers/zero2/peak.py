"""Wrong answers to zero2.peak."""

from wrong_answers import wrong


def walk(buckets, n, gradient=max, before=True, shards=True, leaves=True, itemsize=4):
    most = so_far = last = 0
    for numels in buckets:
        S = -(-sum(numels) // n)
        P = S * n
        most = max(most, gradient(numels) + P + last * before + so_far * shards, (P + so_far * shards + S * shards) * leaves)
        so_far, last = so_far + S, P
    return itemsize * most


@wrong("the bucket under way is missing")
def one_bucket(buckets, world_size):
    """Forgets that one bucket travels while the next one fills."""
    return walk(buckets, world_size, before=False)


@wrong("the shards of the buckets ahead are missing")
def no_shards(buckets, world_size):
    """Counts buckets only."""
    return walk(buckets, world_size, shards=False)


@wrong("the gradient that arrives is missing")
def no_gradient(buckets, world_size):
    """Forgets that autograd makes a gradient outside of the buffer."""
    return walk(buckets, world_size, gradient=lambda numels: 0)


@wrong("a bucket's own shard is made when it leaves")
def only_arrivals(buckets, world_size):
    """Looks at the first kind of moment only."""
    return walk(buckets, world_size, leaves=False)


@wrong("those are elements")
def elements(buckets, world_size):
    """Returns elements."""
    return walk(buckets, world_size, itemsize=1)


@wrong("that is all gradients, which is what DDP")
def all_gradients(buckets, world_size):
    """Adds up everything."""
    return 4 * sum(map(sum, buckets))


@wrong("that is what is left when backward has ended")
def what_is_left(buckets, world_size):
    """Counts what is there afterwards."""
    return 4 * sum(-(-sum(numels) // world_size) for numels in buckets)


@wrong("every shard is counted from the start")
def all_shards_at_once(buckets, world_size):
    """Adds all shards to the two largest neighbours."""
    shards = sum(-(-sum(numels) // world_size) for numels in buckets)
    most = last = 0
    for numels in buckets:
        P = -(-sum(numels) // world_size) * world_size
        most = max(most, max(numels) + P + last, P)
        last = P
    return 4 * (most + shards)


@wrong("the padding is missing")
def not_padded(buckets, world_size):
    """Forgets that a bucket is padded."""
    most = so_far = last = 0
    for numels in buckets:
        P = sum(numels)
        S = P // world_size
        most = max(most, max(numels) + P + last + so_far, P + so_far + S)
        so_far, last = so_far + S, P
    return 4 * most


@wrong("nothing is returned")
def nothing(buckets, world_size):
    """Forgets to return it."""
    walk(buckets, world_size)


@wrong("the bucket that leaves is still counted with the one before")
def before_it_lands(buckets, world_size):
    """Keeps bucket b − 1 when b leaves."""
    most = so_far = last = 0
    for numels in buckets:
        S = -(-sum(numels) // world_size)
        P = S * world_size
        most = max(most, max(numels) + P + last + so_far, P + last + so_far + S)
        so_far, last = so_far + S, P
    return 4 * most


@wrong("only the first gradient of each bucket is looked at")
def first_gradient(buckets, world_size):
    """Takes the first gradient for the largest."""
    return walk(buckets, world_size, gradient=lambda numels: numels[0])


@wrong("only the last gradient of each bucket is looked at")
def last_gradient(buckets, world_size):
    """Takes the last gradient for the largest."""
    return walk(buckets, world_size, gradient=lambda numels: numels[-1])


@wrong("all gradients of a bucket are counted beside its buffer")
def all_at_once(buckets, world_size):
    """Lets all gradients of a bucket arrive together."""
    return walk(buckets, world_size, gradient=sum)


def rounded(buckets, n, up):
    most = so_far = last = 0
    for numels in buckets:
        P = up(sum(numels))
        S = P // n
        most = max(most, max(numels) + P + last + so_far, P + so_far + S)
        so_far, last = so_far + S, P
    return 4 * most


@wrong("what is one already gets no padding")
def always_padded(buckets, world_size):
    """Adds a whole N of zeros where nothing is missing."""
    return rounded(buckets, world_size, lambda numel: (numel // world_size + 1) * world_size)


@wrong("P is rounded down")
def rounded_down(buckets, world_size):
    """Drops what does not divide by N."""
    return rounded(buckets, world_size, lambda numel: numel // world_size * world_size)


@wrong("a division with / gives a float")
def a_float(buckets, world_size):
    """Divides with /."""
    return walk(buckets, world_size) / 1
