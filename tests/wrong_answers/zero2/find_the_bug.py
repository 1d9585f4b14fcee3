"""Wrong answers to zero2.find_the_bug: what one would measure, and the mended backward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def made(land="next", keep=True, divide=True, late=False, sync=False):
    """`land`: when a bucket is waited for: when the "next" one leaves or "after" that, at the "end", "at once", or in the "same"
    function that launches the next."""

    def backward(loss, buckets):
        world_size = dist.get_world_size()
        arrived, under_way, shards, kept = set(), [], [], []

        def launch(bucket):
            if land == "next" and not late:
                wait()
            if land == "same" and under_way:
                work, grad_S, flat_P = under_way.pop()
                work.wait()
                grad_S /= world_size
            flat = torch.cat([param.grad.flatten() for param in bucket])
            if late:
                wait()
            for param in bucket:
                param.grad = None
            flat_P = F.pad(flat, (0, -len(flat) % world_size))
            grad_S = torch.empty(len(flat_P) // world_size)
            work = reduce_scatter(grad_S, flat_P, async_op=not sync)
            under_way.append((work, grad_S, flat_P if keep else None))
            shards.append(grad_S)
            if land == "at once":
                wait()
            if land == "after":
                wait(but=1)

        def wait(but=0):
            while len(under_way) > but:
                work, grad_S, flat_P = under_way.pop(0)
                if work is not None:
                    work.wait()
                if divide:
                    grad_S /= world_size
                if keep == "for ever":
                    kept.append(flat_P)

        def on_gradient(param):
            arrived.add(param)
            while len(shards) < len(buckets) and arrived.issuperset(buckets[len(shards)]):
                launch(buckets[len(shards)])

        hooks = [param.register_post_accumulate_grad_hook(on_gradient) for bucket in buckets for param in bucket]
        loss.backward()
        wait()
        for hook in hooks:
            hook.remove()
        return shards

    return backward


right = made()

wrong("a bucket is one reduce_scatter of P elements", "a", right, mistake="says that too much is sent")
wrong("And before it returns?", "b", right, mistake="says that the gradients stay")
wrong("every work is waited for", "c", right, mistake="says that the values are wrong")
wrong("the bytes travel while backward goes on", "e", right, mistake="says that nothing overlaps")
wrong("a bucket lands when the next one leaves", "d", made(land="end"), mistake="mends nothing")
wrong("a bucket lands when the next one leaves", "d", made(land="end", keep=False), mistake="drops its own name for the buckets: the works hold them")
wrong("it is waited for as soon as it has left", "d", made(land="at once"), mistake="waits at once, and nothing overlaps")
wrong("unless it is given async_op=True", "d", made(land="at once", sync=True), mistake="drops async_op=True")
wrong("put together before the one under way has landed", "d", made(late=True), mistake="concatenates first, and waits then")
wrong("a bucket that has landed is still there", "d", made(keep="for ever"), mistake="waits in time, and keeps the buckets in a list")
wrong("the sum over the ranks is not divided", "d", made(divide=False), mistake="loses the division")
wrong("or a name in what launches the next", "d", made(land="same"), mistake="waits in launch(), where a name still refers to the bucket before")
wrong("the next bucket leaves first", "d", made(land="after"), mistake="waits for the bucket before when the next has left")
