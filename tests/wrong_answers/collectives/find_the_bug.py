"""Wrong answers to collectives.find_the_bug."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


def exchange(send, receive):
    """Sends to the right, receives from the left, waits for both."""
    rank, n = dist.get_rank(), dist.get_world_size()
    works = dist.isend(send, (rank + 1) % n), dist.irecv(receive, (rank - 1) % n)
    for work in works:
        work.wait()


def all_gather(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


def as_it_was(x):
    """Unchanged."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    chunks, sums = x.chunk(n), total.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank - step - 1) % n], arriving)
        sums[(rank - step - 2) % n].add_(arriving)
    all_gather(sums)
    x.copy_(total / n)


def adds_where_it_sends(x):
    """Adds into the chunks that are sent, and goes on copying out total."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    chunks, sums = x.chunk(n), total.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank - step - 1) % n], arriving)
        chunks[(rank - step - 2) % n].add_(arriving)
    all_gather(sums)
    x.copy_(total / n)


def rebinds_the_data(x):
    """Mends it, and gives x another memory."""
    total = x.clone()
    without_the_copy_or_the_mean(total)
    x.data = total / dist.get_world_size()


def everything_to_everyone(x):
    """Right numbers by passing whole tensors round."""
    n = dist.get_world_size()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        exchange(passing, arriving)
        total += arriving
        passing = arriving
    x.copy_(total / n)


def without_the_copy_or_the_mean(x):
    """Drops the copy, which is fine, and the division with it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        exchange(chunks[(rank - step - 1) % n], arriving)
        chunks[(rank - step - 2) % n].add_(arriving)
    all_gather(chunks)


def the_library_call(x):
    """Replaces the ring by the library's."""
    dist.all_reduce(x)
    x /= dist.get_world_size()


wrong("brings that chunk to all others unchanged", "c", as_it_was, mistake="expects the ranks to differ")
wrong("the chunk numbers of both ends agree", "a", as_it_was, mistake="expects a hang")
wrong("nothing depends on timing", "e", as_it_was, mistake="expects a race")
wrong("must carry the sum of two ranks", "d", as_it_was, mistake="says what one measures, and mends nothing")
wrong("it never sees the sums", "d", adds_where_it_sends, mistake="adds into chunks, and copies out total")
wrong("x.data = …", "d", rebinds_the_data, mistake="gives x another memory")
wrong(
    "whole tensors of 3 elements travel", "d", everything_to_everyone, mistake="mends it by passing whole tensors round"
)
wrong("no longer divided", "d", without_the_copy_or_the_mean, mistake="drops the division together with the copy")
wrong("all_reduce does for you", "d", the_library_call, mistake="calls dist.all_reduce")
