"""Wrong answers to zero2.backward: a right one, and what people change in it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Right:
    def __init__(self, buckets):
        self.n = dist.get_world_size()
        self.buckets = [self.make(params) for params in buckets]
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket["params"]}
        self.arrived, self.launched, self.shards = set(), 0, []
        self.under_way = []
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def make(self, params):
        P = -(-sum(param.numel() for param in params) // self.n) * self.n
        return {"params": params, "P": P, "flat_P": None}

    def fill(self, param):
        bucket = self.bucket_of[param]
        if bucket["flat_P"] is None:
            bucket["flat_P"] = torch.zeros(bucket["P"])
        start = 0
        for each in bucket["params"]:
            if each is param:
                bucket["flat_P"][start : start + param.numel()] = param.grad.flatten()
            start += each.numel()
        param.grad = None

    def on_gradient(self, param):
        self.fill(param)
        self.arrived.add(param)
        while self.launched < len(self.buckets) and self.arrived.issuperset(self.buckets[self.launched]["params"]):
            self.launch()

    def launch(self):
        self.land()
        self.send(self.buckets[self.launched])
        self.launched += 1

    def send(self, bucket):
        flat_P = torch.zeros(bucket["P"]) if bucket["flat_P"] is None else bucket["flat_P"]
        bucket["flat_P"] = None
        grad_S = torch.empty(len(flat_P) // self.n)
        self.under_way.append((reduce_scatter(grad_S, flat_P, async_op=True), grad_S, flat_P))

    def land(self):
        while self.under_way:
            work, grad_S, _ = self.under_way.pop(0)
            work.wait()
            self.shards.append(grad_S / self.n)

    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.land()
        shards, self.shards = self.shards, []
        self.arrived, self.launched = set(), 0
        return shards


@wrong("a bucket lands when the next one leaves")
class LandsAtTheEnd(Right):
    """DDP's way: a list of works, waited for in finish()."""

    def launch(self):
        self.send(self.buckets[self.launched])
        self.launched += 1


@wrong("the next bucket is put together before the one under way has landed")
class LandsTooLate(Right):
    """Concatenates the next bucket first, and waits then."""

    def fill(self, param):
        pass

    def launch(self):
        params = self.buckets[self.launched]["params"]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
        self.land()
        for param in params:
            param.grad = None
        self.buckets[self.launched]["flat_P"] = F.pad(flat, (0, -len(flat) % self.n))
        super().launch()


@wrong("a bucket is there three times")
class PadsBeforeItFrees(Right):
    """Lands in time, but keeps the gradients until they are concatenated and padded."""

    def fill(self, param):
        pass

    def launch(self):
        self.land()
        params = self.buckets[self.launched]["params"]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
        self.buckets[self.launched]["flat_P"] = F.pad(flat, (0, -len(flat) % self.n))
        for param in params:
            param.grad = None
        super().launch()


@wrong("all buffers are made in __init__")
class BuffersFromTheStart(Right):
    """Makes the buffers once."""

    def make(self, params):
        bucket = super().make(params)
        return bucket | {"flat_P": torch.zeros(bucket["P"])}


@wrong("it is waited for as soon as it has left")
class WaitsInTheHook(Right):
    """Waits at once."""

    def send(self, bucket):
        super().send(bucket)
        self.under_way[0][0].wait()


@wrong("unless it is given async_op=True")
class Synchronous(Right):
    """Forgets async_op=True."""

    def send(self, bucket):
        flat_P = torch.zeros(bucket["P"]) if bucket["flat_P"] is None else bucket["flat_P"]
        bucket["flat_P"] = None
        grad_S = torch.empty(len(flat_P) // self.n)
        reduce_scatter(grad_S, flat_P)
        self.shards.append(grad_S / self.n)


@wrong("everything leaves when backward has ended")
class AllAtTheEnd(Right):
    """Fills in the hooks, and launches in finish()."""

    def on_gradient(self, param):
        self.fill(param)


@wrong("Keep the order of the list")
class ArrivalOrder(Right):
    """Launches whichever bucket is full."""

    def on_gradient(self, param):
        self.fill(param)
        self.arrived.add(param)
        place = next(b for b, bucket in enumerate(self.buckets) if bucket is self.bucket_of[param])
        if self.arrived.issuperset(self.bucket_of[param]["params"]):
            self.land()
            self.send(self.buckets[place])
            self.launched += 1


@wrong("never fills: finish() has to launch it")
class OnlyWhatIsFull(Right):
    """Does not launch what has not left."""

    def finish(self):
        self.land()
        shards = [*self.shards, *(torch.zeros(bucket["P"] // self.n) for bucket in self.buckets[self.launched :])]
        self.arrived, self.launched, self.shards = set(), 0, []
        return shards


@wrong("each has to begin the count anew")
class NeverForgets(Right):
    """Goes on counting."""

    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.land()
        shards, self.shards = self.shards, []
        return shards


@wrong("after each gradient launch all that may leave, not one")
class OneAtATime(Right):
    """`if` where it should be `while`."""

    def on_gradient(self, param):
        self.fill(param)
        self.arrived.add(param)
        if self.launched < len(self.buckets) and self.arrived.issuperset(self.buckets[self.launched]["params"]):
            self.launch()


@wrong("a bucket that has landed is still there")
class KeepsTheBuckets(Right):
    """Keeps what has landed, for whatever reason."""

    def land(self):
        self.landed = [*getattr(self, "landed", []), *(flat_P for _, _, flat_P in self.under_way)]
        super().land()

    def finish(self):
        shards = super().finish()
        self.landed = []
        return shards


@wrong("the sum over the ranks is not divided")
class Summed(Right):
    """Forgets the division."""

    def land(self):
        before = len(self.shards)
        super().land()
        for shard in self.shards[before:]:
            shard *= self.n


@wrong("where it keeps one: twice the bytes")
class AllReduces(Right):
    """All-reduces the bucket, and keeps a slice."""

    def send(self, bucket):
        flat_P = torch.zeros(bucket["P"]) if bucket["flat_P"] is None else bucket["flat_P"]
        bucket["flat_P"] = None
        work = dist.all_reduce(flat_P, async_op=True)
        self.under_way.append((work, flat_P.chunk(self.n)[dist.get_rank()], flat_P))


@wrong("each gradient is sent by itself")
class OneByOne(Right):
    """A message for each gradient."""

    def __init__(self, buckets):
        super().__init__([[param] for bucket in buckets for param in bucket])


@wrong("Set it to None")
class KeepsTheGradients(Right):
    """Leaves .grad as it is."""

    def fill(self, param):
        grad = param.grad
        super().fill(param)
        param.grad = grad


@wrong("the buffer is freed before the wait()")
class FreedTooEarly(Right):
    """Shrinks the buffer as soon as it has been launched."""

    def send(self, bucket):
        super().send(bucket)
        self.under_way[-1][2].untyped_storage().resize_(0)


@wrong("the next bucket leaves first, and the one before is waited for afterwards")
class LandsAfterwards(Right):
    """Launches the next bucket, and lands the one before then: ZeRO-1's order."""

    def launch(self):
        before, self.under_way = self.under_way, []
        self.send(self.buckets[self.launched])
        now, self.under_way = self.under_way, before
        before = None
        self.land()
        self.under_way = now
        self.launched += 1


@wrong("or a name in what launches the next")
class KeepsAName(Right):
    """Lands in launch(), where a name goes on referring to the bucket before."""

    def launch(self):
        if self.under_way:
            work, grad_S, _flat_P = self.under_way.pop()
            work.wait()
            self.shards.append(grad_S / self.n)
        self.send(self.buckets[self.launched])
        self.launched += 1


@wrong("rank 1 sends bucket 2 ahead of bucket 0")
class InTheOrderOfArrival(Right):
    """Launches whichever bucket is full, and returns each shard in its bucket's place."""

    def on_gradient(self, param):
        self.fill(param)
        self.arrived.add(param)
        if self.arrived.issuperset(self.bucket_of[param]["params"]):
            self.launch_it(self.bucket_of[param])

    def launch_it(self, bucket):
        self.land()
        self.send(bucket)
        self.launched += 1
        self.sent = [*getattr(self, "sent", []), bucket]

    def finish(self):
        for bucket in self.buckets:
            if not any(bucket is each for each in getattr(self, "sent", [])):
                self.launch_it(bucket)
        self.land()
        places = [next(place for place, each in enumerate(self.sent) if each is bucket) for bucket in self.buckets]
        shards = [self.shards[place] for place in places]
        self.arrived, self.launched, self.shards, self.sent = set(), 0, [], []
        return shards


@wrong("what has arrived is never cleared")
class NeverClears(Right):
    """Begins the count of buckets anew, and still believes that all gradients have arrived."""

    def finish(self):
        arrived = self.arrived
        shards = super().finish()
        self.arrived = arrived
        return shards


@wrong("the shards are made in __init__")
class ShardsFromTheStart(Right):
    """Makes the shards once, in __init__."""

    def make(self, params):
        bucket = super().make(params)
        return bucket | {"grad_S": torch.zeros(bucket["P"] // self.n)}

    def send(self, bucket):
        flat_P = torch.zeros(bucket["P"]) if bucket["flat_P"] is None else bucket["flat_P"]
        bucket["flat_P"] = None
        self.under_way.append((reduce_scatter(bucket["grad_S"], flat_P, async_op=True), bucket["grad_S"], flat_P))


@wrong("what is a multiple already gets no padding")
class AlwaysPadded(Right):
    """Adds a whole N of zeros where nothing is missing."""

    def make(self, params):
        bucket = super().make(params)
        return bucket | {"P": (sum(param.numel() for param in params) // self.n + 1) * self.n}
