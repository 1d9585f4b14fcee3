"""Wrong answers to ddp.partition."""

from wrong_answers import wrong


def cut(params, limit, bytes_of):
    buckets, size = [], 0
    for param in params:
        if not buckets or size + bytes_of(param) > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += bytes_of(param)
    return buckets


def trainable(params):
    return [param for param in dict.fromkeys(params) if param.requires_grad]


@wrong("in the order of registration: backward ends with the first")
def registration_order(params, bucket_bytes):
    """Begins with the first parameter, whose gradient comes last."""
    return cut(trainable(params), bucket_bytes, lambda param: param.nbytes)


@wrong("cut in the order of registration and then reversed")
def reversed_afterwards(params, bucket_bytes):
    """Cuts forwards and reverses the result: the full buckets are the ones that leave last."""
    return [bucket[::-1] for bucket in cut(trainable(params), bucket_bytes, lambda param: param.nbytes)][::-1]


@wrong("elements are counted, not bytes")
def counts_elements(params, bucket_bytes):
    """Counts numel."""
    return cut(trainable(params)[::-1], bucket_bytes, lambda param: param.numel())


@wrong("4 bytes an element are taken for granted")
def always_fp32(params, bucket_bytes):
    """Takes 4 bytes an element, also in bf16."""
    return cut(trainable(params)[::-1], bucket_bytes, lambda param: 4 * param.numel())


@wrong("a frozen parameter is in a bucket")
def frozen_too(params, bucket_bytes):
    """Waits for gradients that never come. (It knows nothing of tied parameters either: one thing after the other.)"""
    return cut(params[::-1], bucket_bytes, lambda param: param.nbytes)


@wrong("frozen parameters take up room in a bucket")
def frozen_counted(params, bucket_bytes):
    """Leaves frozen parameters out and counts their bytes."""
    buckets = [
        [param for param in bucket if param.requires_grad]
        for bucket in cut(list(dict.fromkeys(params))[::-1], bucket_bytes, lambda param: param.nbytes)
    ]
    return [bucket for bucket in buckets if bucket]


@wrong("a tied parameter is put where it stands last")
def tied_too_early(params, bucket_bytes):
    """Drops the second of the two that it meets, and it meets the last place first."""
    backwards = dict.fromkeys(param for param in reversed(params) if param.requires_grad)
    return cut(list(backwards), bucket_bytes, lambda param: param.nbytes)


@wrong("a tied parameter is in the buckets twice")
def tied_twice(params, bucket_bytes):
    """Sends a tied gradient twice, and divides it twice."""
    backwards = [param for param in reversed(params) if param.requires_grad]
    return cut(backwards, bucket_bytes, lambda param: param.nbytes)


@wrong("is the size set back to 0")
def never_reset(params, bucket_bytes):
    """Begins a new bucket and keeps the old one's size."""
    buckets, size = [[]], 0
    for param in trainable(params)[::-1]:
        if buckets[-1] and size + param.nbytes > bucket_bytes:
            buckets.append([])
        buckets[-1].append(param)
        size += param.nbytes
    return [bucket for bucket in buckets if bucket]


@wrong("does the size grow with each parameter")
def never_grows(params, bucket_bytes):
    """Forgets to add up."""
    buckets, size = [], 0
    for param in trainable(params)[::-1]:
        if not buckets or size + param.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
    return buckets


@wrong("a parameter goes back into an earlier bucket")
def first_fit(params, bucket_bytes):
    """Fills gaps: fewer buckets, which wait for one another."""
    buckets = []
    for param in trainable(params)[::-1]:
        for bucket in buckets:
            if sum(each.nbytes for each in [*bucket, param]) <= bucket_bytes:
                bucket.append(param)
                break
        else:
            buckets.append([param])
    return buckets


@wrong("takes in the next one as well")
def large_one_joined(params, bucket_bytes):
    """Does not count a parameter that is too large."""
    buckets, size = [], 0
    for param in trainable(params)[::-1]:
        if param.nbytes > bucket_bytes:
            buckets.append([param])
            size = 0
            continue
        if not buckets or size + param.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.nbytes
    return buckets


@wrong("only their list is reversed")
def list_reversed(params, bucket_bytes):
    """Cuts forwards, and reverses the list of buckets."""
    return cut(trainable(params), bucket_bytes, lambda param: param.nbytes)[::-1]


@wrong("where nothing is trainable there is an empty bucket")
def empty_for_nothing(params, bucket_bytes):
    """Begins with an empty bucket, and returns it if nothing comes."""
    return cut(trainable(params)[::-1], bucket_bytes, lambda param: param.nbytes) or [[]]


@wrong("a call of minizero's own partition()")
def from_the_package(params, bucket_bytes):
    """Calls what it is to build."""
    from minizero.parts.bucket import partition

    return partition(trainable(params), bucket_bytes / 2**20)


@wrong("not over the limit yet")
def exact_fit_closes(params, bucket_bytes):
    """Takes >= for >."""
    return cut(trainable(params)[::-1], bucket_bytes - 1, lambda param: param.nbytes)


@wrong("closes before the parameter that would overflow it")
def closes_late(params, bucket_bytes):
    """Closes a bucket when it is already too large."""
    buckets, size = [[]], 0
    for param in trainable(params)[::-1]:
        buckets[-1].append(param)
        size += param.nbytes
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
    return [bucket for bucket in buckets if bucket]


@wrong("the last bucket is lost")
def last_one_lost(params, bucket_bytes):
    """Appends a bucket only when the next one begins."""
    buckets, bucket, size = [], [], 0
    for param in trainable(params)[::-1]:
        if bucket and size + param.nbytes > bucket_bytes:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(param)
        size += param.nbytes
    return buckets


@wrong("empty bucket")
def empty_in_front(params, bucket_bytes):
    """Closes an empty bucket in front of a parameter that is too large."""
    buckets, bucket, size = [], [], 0
    for param in trainable(params)[::-1]:
        if size + param.nbytes > bucket_bytes:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(param)
        size += param.nbytes
    return [*buckets, bucket] if bucket else buckets


@wrong("change the caller's list")
def reverses_the_callers(params, bucket_bytes):
    """Turns the caller's list round and leaves it so."""
    params.reverse()
    return cut(trainable(params[::-1])[::-1], bucket_bytes, lambda param: param.nbytes)


@wrong("compares tensors by their values")
def compares_values(params, bucket_bytes):
    """`in` a list asks ==, and == of two tensors is a tensor."""
    seen = []
    for param in params:
        if param.requires_grad and param not in seen:
            seen.append(param)
    return cut(seen[::-1], bucket_bytes, lambda param: param.nbytes)
