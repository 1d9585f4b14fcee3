"""Wrong answers to ddp.accumulate: a right one, and what people change in it."""

from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from wrong_answers import wrong


class Right:
    def __init__(self, model, buckets):
        self.buckets, self.arrived, self.in_flight, self.sync = buckets, set(), [], True
        for bucket in buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_gradient)

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def on_gradient(self, param):
        if not self.sync:
            return
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
            for param, mean in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
                param.grad = mean.view_as(param) / dist.get_world_size()
        self.arrived, self.in_flight = set(), []


@wrong("the hook does not look at the switch")
class AlwaysReduces(Right):
    """no_sync() sets a switch that nobody reads, so every micro-batch is reduced."""

    def on_gradient(self, param):
        if not self.sync and len(self.in_flight) == len(self.buckets):
            self.finish()
        self.sync, before = True, self.sync
        super().on_gradient(param)
        self.sync = before


@wrong("also after an exception")
class OffAfterAnException(Right):
    """Without finally, an exception turns reduction off for good; what is launched then is left to nobody."""

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True

    def finish(self):
        if self.sync:
            super().finish()


@wrong("the hooks stay quiet after the exception")
class QuietAfterAnException(Right):
    """Without finally, the hooks stay silent: finish() still reduces, and nothing overlaps any more."""

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


@wrong("is the switch turned on again")
class NeverOnAgain(Right):
    """The switch is turned off once and stays off."""

    @contextmanager
    def no_sync(self):
        self.sync = False
        yield


@wrong("earlier micro-batches are added to the mean of the last one")
class AddedAfterwards(Right):
    """Keeps the earlier gradients aside and adds them when the last micro-batch has been reduced."""

    def __init__(self, model, buckets):
        super().__init__(model, buckets)
        self.aside = {}

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for param in [param for bucket in self.buckets for param in bucket if param.grad is not None]:
            self.aside[param] = self.aside.get(param, 0) + param.grad
            param.grad = None

    def finish(self):
        super().finish()
        for param, grad in self.aside.items():
            param.grad = param.grad + grad
        self.aside = {}


@wrong("only the last micro-batch is in it")
class Cleared(Right):
    """Clears the gradients at the end of each block."""

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for bucket in self.buckets:
            for param in bucket:
                param.grad = None


@wrong("only the last micro-batch is in it")
class ZerosForTheUnused(Right):
    """Sends zeros for a parameter whose hook was silent in the last backward, although it has a gradient."""

    def launch(self, bucket):
        flat = torch.cat([(p.grad if p in self.arrived else torch.zeros_like(p)).flatten() for p in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat, bucket))


@wrong("what arrives inside no_sync() does not fill a bucket")
class CountsInside(Right):
    """Counts the gradients of the quiet micro-batches: the last backward finds full buckets, and sends them too early."""

    def on_gradient(self, param):
        self.arrived.add(param)
        super().on_gradient(param)


@wrong("keep @contextmanager above it")
class NoContextManager(Right):
    """A generator is no context manager."""

    def no_sync(self):
        self.sync = False
        yield
        self.sync = True


@wrong("finally instead of except")
class Swallows(Right):
    """Keeps exceptions to itself."""

    @contextmanager
    def no_sync(self):
        self.sync = False
        with suppress(Exception):
            yield
        self.sync = True


@wrong("there is a wait() in the hook")
class WaitsInTheHook(Right):
    """Overlaps nothing."""

    def launch(self, bucket):
        super().launch(bucket)
        self.in_flight[-1][0].wait()


@wrong("no_sync() itself sends when the block ends")
class FinishesTheBlock(Right):
    """Reduces when a block ends."""

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.finish()


@wrong("the losses come divided already")
class DividesAgain(Right):
    """Divides by the number of micro-batches, which the loss has been divided by."""

    blocks = 0

    @contextmanager
    def no_sync(self):
        self.blocks += 1
        with super().no_sync():
            yield

    def finish(self):
        super().finish()
        for bucket in self.buckets:
            for param in bucket:
                param.grad /= self.blocks + 1
        self.blocks = 0


@wrong("keep @contextmanager above it")
class ContextManagerIsTheAnswer(Right):
    """no_sync() is called, and turns the switch; it is no context manager."""

    def no_sync(self):
        self.sync = False
        return self


@wrong("without an `if` around it")
class YieldsSometimes(Right):
    """Yields only if the switch is on."""

    @contextmanager
    def no_sync(self):
        if not self.sync:
            yield
        self.sync = True
