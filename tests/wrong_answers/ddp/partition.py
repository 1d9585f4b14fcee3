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
    return [param for param in params if param.requires_grad]


@wrong("in the order of registration: backward ends with the first")
def registration_order(params, bucket_bytes):
    """Begins with the first parameter, whose gradient comes last."""
    return cut(trainable(params), bucket_bytes, lambda param: param.nbytes)


@wrong("cut in the order of registration and then reversed")
def reversed_afterwards(params, bucket_bytes):
    """Cuts forwards and reverses the result: the full buckets are the ones that leave last."""
    return [bucket[::-1] for bucket in cut(trainable(params), bucket_bytes, lambda param: param.nbytes)][::-1]


@wrong("compared with bytes, or with elements")
def counts_elements(params, bucket_bytes):
    """Counts numel."""
    return cut(trainable(params)[::-1], bucket_bytes, lambda param: param.numel())


@wrong("4 bytes an element are taken for granted")
def always_fp32(params, bucket_bytes):
    """Takes 4 bytes an element, also in bf16."""
    return cut(trainable(params)[::-1], bucket_bytes, lambda param: 4 * param.numel())


@wrong("a frozen parameter is in a bucket")
def frozen_too(params, bucket_bytes):
    """Waits for gradients that never come."""
    return cut(params[::-1], bucket_bytes, lambda param: param.nbytes)


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
