"""Wrong answers to ddp.overlap: a right one, and what people change in it."""

import torch
import torch.distributed as dist
from wrong_answers import wrong


class Right:
    def __init__(self, model, buckets):
        self.buckets, self.arrived, self.in_flight = buckets, set(), []
        for bucket in buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, param):
        self.arrived.add(param)
        while len(self.in_flight) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.in_flight)]):
            self.launch(self.buckets[len(self.in_flight)])

    def launch(self, bucket):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        for work, flat, bucket in self.in_flight:
            work.wait()
            self.hand_out(bucket, flat / dist.get_world_size())
        self.arrived, self.in_flight = set(), []

    def hand_out(self, bucket, flat):
        for param, mean in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad = mean.view_as(param)


@wrong("there is a wait() in the hook")
class WaitsInTheHook(Right):
    """Launches asynchronously and waits at once, in the hook."""

    def launch(self, bucket):
        super().launch(bucket)
        self.in_flight[-1][0].wait()


@wrong("all_reduce returns when it is complete, unless it is given async_op=True")
class Synchronous(Right):
    """Forgets async_op=True."""

    def launch(self, bucket):
        class Done:
            def wait(self):
                pass

        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        dist.all_reduce(flat)
        self.in_flight.append((Done(), flat, bucket))


@wrong("no hook launches anything")
class AllAtTheEnd(Right):
    """Hooks that do nothing."""

    def on_gradient(self, param):
        pass


@wrong("the buckets wait for the last gradient of all")
class AfterTheLastGradient(Right):
    """Launches all buckets when the last gradient has arrived: in backward, and too late."""

    def on_gradient(self, param):
        self.arrived.add(param)
        if len(self.arrived) == sum(map(len, self.buckets)):
            for bucket in self.buckets:
                self.launch(bucket)


@wrong("the bucket that is full first is sent first")
class ArrivalOrder(Right):
    """Launches whichever bucket is full, in the order in which the gradients arrive."""

    def on_gradient(self, param):
        self.arrived.add(param)
        bucket = next(bucket for bucket in self.buckets if any(param is member for member in bucket))
        if self.arrived.issuperset(bucket):
            self.launch(bucket)

    def finish(self):
        for bucket in self.buckets:
            if not self.arrived.issuperset(bucket):
                self.launch(bucket)
        self.buckets = [bucket for _, _, bucket in self.in_flight]
        super().finish()


@wrong("its bucket never fills")
class OnlyWhatIsFull(Right):
    """Never launches a bucket with a parameter that was not used."""

    def finish(self):
        for work, flat, bucket in self.in_flight:
            work.wait()
            self.hand_out(bucket, flat / dist.get_world_size())
        self.arrived, self.in_flight = set(), []


@wrong("from the second backward on: clear in finish() what has arrived and what was launched")
class NeverForgets(Right):
    """Does not clear its state, so the second step launches nothing."""

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        for work, flat, bucket in self.in_flight:
            work.wait()
            self.hand_out(bucket, flat / dist.get_world_size())


@wrong("clear in finish() what has arrived")
class StillArrived(Right):
    """Clears what was launched, but not what has arrived: in the second step old gradients leave at once."""

    def finish(self):
        arrived = set(self.arrived)
        super().finish()
        self.arrived = arrived


@wrong("the sum over the ranks is not divided")
class Summed(Right):
    """Forgets the division."""

    def hand_out(self, bucket, flat):
        super().hand_out(bucket, flat * dist.get_world_size())


@wrong("each gradient is sent by itself")
class OneByOne(Right):
    """One message for each gradient."""

    def __init__(self, model, buckets):
        super().__init__(model, [[param] for bucket in buckets for param in bucket])


@wrong("wait() is missing")
class DoesNotWait(Right):
    """Reads what is still under way."""

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        for _, flat, bucket in self.in_flight:
            self.hand_out(bucket, flat / dist.get_world_size())
        self.arrived, self.in_flight = set(), []


@wrong("the hook receives the parameter")
class AveragesWeights(Right):
    """Takes the hook's argument for the gradient."""

    def launch(self, bucket):
        flat = torch.cat([param.data.flatten() for param in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def hand_out(self, bucket, flat):
        for param, mean in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.data.copy_(mean.view_as(param) + 1)


@wrong("after each gradient launch all that may leave, not one")
class OneAtATime(Right):
    """Looks at one bucket for each hook that fills one, so those that were full already stay behind."""

    def on_gradient(self, param):
        self.arrived.add(param)
        if not self.in_flight and self.arrived.issuperset(self.buckets[0]):
            self.launch(self.buckets[0])


@wrong("a register_hook runs before that")
class TooEarly(Right):
    """A tensor hook sees the gradient before autograd has put it into .grad."""

    def __init__(self, model, buckets):
        super().__init__(model, [])
        self.buckets = buckets
        for bucket in buckets:
            for param in bucket:
                param.register_hook(lambda grad, param=param: self.on_gradient(param))


@wrong("the hook asks again and again whether a collective is complete")
class AsksInALoop(Right):
    """Waits in the hook without calling wait()."""

    def launch(self, bucket):
        super().launch(bucket)
        while not self.in_flight[-1][0].is_completed():
            pass


@wrong("(All lambdas of a loop see its last value)")
class LastLambda(Right):
    """All hooks report the last parameter of the loop."""

    def __init__(self, model, buckets):
        super().__init__(model, [])
        self.buckets = buckets
        for bucket in buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(lambda _: self.on_gradient(param))  # noqa: B023 — the mistake


@wrong("the flat tensor still holds what the step before left in it")
class FlatIsKept(Right):
    """Keeps its flat tensors, and does not overwrite what a missing gradient left there."""

    def launch(self, bucket):
        if not hasattr(self, "flats"):
            self.flats = {}
        flat = self.flats.setdefault(len(self.in_flight), torch.zeros(sum(param.numel() for param in bucket)))
        for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            if param.grad is not None:
                piece.copy_(param.grad.flatten())
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        for work, flat, bucket in self.in_flight:
            work.wait()
            flat /= dist.get_world_size()
            self.hand_out(bucket, flat)
        self.arrived, self.in_flight = set(), []


@wrong("a barrier is a collective too")
class Barrier(Right):
    """Meets the other ranks once more."""

    def finish(self):
        super().finish()
        dist.barrier()


@wrong("mz.DDP is at work")
class LetsTheEngine(Right):
    """Puts the package's engine beside itself."""

    def __init__(self, model, buckets):
        import minizero as mz

        super().__init__(model, buckets)
        self.engine = mz.DDP(model)


@wrong("before its wait(): until then it belongs to the collective")
class DividesTooEarly(Right):
    """Divides what is still under way."""

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        means = [(bucket, flat / dist.get_world_size(), work) for work, flat, bucket in self.in_flight]
        for bucket, mean, work in means:
            work.wait()
            self.hand_out(bucket, mean)
        self.arrived, self.in_flight = set(), []


@wrong("wait() is missing")
class WaitsForTheLast(Right):
    """Takes the last work for the end of all."""

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.launch(bucket)
        self.in_flight[-1][0].wait()
        for _, flat, bucket in self.in_flight:
            self.hand_out(bucket, flat / dist.get_world_size())
        self.arrived, self.in_flight = set(), []


@wrong("the last parameter of the list need not be the last to arrive")
class AfterTheLastListed(Right):
    """Launches a bucket when its last-listed parameter arrives, whatever else has arrived."""

    def on_gradient(self, param):
        self.arrived.add(param)
        while len(self.in_flight) < len(self.buckets) and self.buckets[len(self.in_flight)][-1] in self.arrived:
            self.launch(self.buckets[len(self.in_flight)])


@wrong("the last parameter of the list need not be the last to arrive")
class AfterTheLastListedWithoutZeros(AfterTheLastListed):
    """The same, and its hook meets a gradient that is None."""

    def launch(self, bucket):
        flat = torch.cat([param.grad.flatten() for param in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))


@wrong("hooks are registered once")
class RegistersAgain(Right):
    """Registers its hooks again in every finish(): a set forgives what is counted twice."""

    def finish(self):
        super().finish()
        for bucket in self.buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_gradient)


@wrong("count each bucket by itself")
class CountsThemAll(Right):
    """Counts gradients over all buckets: right while they arrive in the order of the list."""

    def on_gradient(self, param):
        self.arrived.add(param)
        due = 0
        for i, bucket in enumerate(self.buckets):
            due += len(bucket)
            if i == len(self.in_flight) and len(self.arrived) >= due:
                self.launch(bucket)


@wrong("(All lambdas of a loop see its last value)")
class LastBucket(Right):
    """All hooks count for the last bucket of the loop, which therefore leaves first, and empty."""

    def __init__(self, model, buckets):
        super().__init__(model, [])
        self.buckets, self.counts = buckets, [0] * len(buckets)
        for i, bucket in enumerate(buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(lambda _: self.count(i))  # noqa: B023 — the mistake

    def count(self, i):
        self.counts[i] += 1
        if self.counts[i] == len(self.buckets[i]):
            self.launch(self.buckets[i])

    def finish(self):
        launched = [bucket for _, _, bucket in self.in_flight]
        for bucket in self.buckets:
            if not any(bucket is each for each in launched):
                self.launch(bucket)
        for work, flat, bucket in self.in_flight:
            work.wait()
            self.hand_out(bucket, flat / dist.get_world_size())
        self.in_flight, self.counts = [], [0] * len(self.buckets)


@wrong("as torch.zeros_like(param) makes them")
class ZerosInFp32(Right):
    """Makes fp32 zeros for a missing gradient."""

    def launch(self, bucket):
        flat = torch.cat([(torch.zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))
