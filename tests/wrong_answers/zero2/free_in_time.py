"""Wrong answers to zero2.free_in_time: a right one, and what people change in it."""

import torch
import torch.distributed as dist
from wrong_answers import wrong

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Right:
    def __init__(self, params):
        self.params, self.n = params, dist.get_world_size()
        self.place, numel = {}, 0
        for param in params:
            self.place[param] = slice(numel, numel + param.numel())
            numel += param.numel()
        self.S = -(-numel // self.n)
        self.flat_P = self.work = self.grad_S = None

    def buffer(self):
        if self.flat_P is None:
            self.flat_P = torch.zeros(self.S * self.n)
        return self.flat_P

    def fill(self, param):
        self.buffer()[self.place[param]] = param.grad.flatten()
        param.grad = None

    def launch(self):
        self.buffer()
        self.grad_S = torch.empty(self.S)
        self.work = reduce_scatter(self.grad_S, self.flat_P, async_op=True)

    def land(self):
        self.work.wait()
        self.grad_S /= self.n
        self.forget()

    def forget(self):
        self.flat_P = self.work = None


@wrong("something still refers to the buffer")
class KeepsTheBuffer(Right):
    """Clears the buffer for the next backward, and keeps it."""

    def forget(self):
        self.flat_P.zero_()
        self.work = None


@wrong("that .grad is a view of the buffer")
class GradsAreViews(Right):
    """Points .grad into the buffer, and leaves it there."""

    def fill(self, param):
        super_grad = param.grad.flatten()
        view = self.buffer()[self.place[param]]
        view.copy_(super_grad)
        param.grad = view.view_as(param)


@wrong("something still refers to the buffer")
class KeepsViews(Right):
    """Keeps the views of the buffer, in which it finds the places."""

    def fill(self, param):
        self.views = getattr(self, "views", {})
        self.views[param] = self.buffer()[self.place[param]]
        self.views[param].copy_(param.grad.flatten())
        param.grad = None


@wrong("make it in fill(), when the first gradient comes")
class BufferFromTheStart(Right):
    """Makes the buffer once, in __init__."""

    def __init__(self, params):
        super().__init__(params)
        self.buffer()

    def forget(self):
        self.flat_P.zero_()


@wrong("grad_S is a slice of the buffer")
class ShardIsASlice(Right):
    """Reduces in place, so the shard is a view of the buffer."""

    def launch(self):
        self.grad_S = self.buffer().chunk(self.n)[dist.get_rank()]
        self.work = reduce_scatter(self.grad_S, self.flat_P, async_op=True)


@wrong("the buffer is freed before the wait()")
class FreedTooEarly(Right):
    """Shrinks the storage as soon as the reduction is launched."""

    def launch(self):
        super().launch()
        self.flat_P.untyped_storage().resize_(0)


@wrong("the buffer is written to before the wait()")
class ClearedTooEarly(Right):
    """Sets the buffer to zeros while it travels."""

    def launch(self):
        super().launch()
        self.flat_P.zero_()


@wrong("unless it is given async_op=True")
class Synchronous(Right):
    """Waits in launch()."""

    def launch(self):
        self.buffer()
        self.grad_S = torch.empty(self.S)
        reduce_scatter(self.grad_S, self.flat_P)

    def land(self):
        self.grad_S /= self.n
        self.forget()


@wrong("a wait() in launch()")
class WaitsInLaunch(Right):
    """Waits as soon as it has launched."""

    def launch(self):
        super().launch()
        self.work.wait()


@wrong("its wait() is missing")
class NeverWaits(Right):
    """Lands without waiting."""

    def land(self):
        self.forget()


@wrong("the gradient is copied, and .grad still has it")
class KeepsTheGradients(Right):
    """Copies, and leaves .grad as it is."""

    def fill(self, param):
        self.buffer()[self.place[param]] = param.grad.flatten()


@wrong("a bucket may leave without a single gradient")
class NothingToLaunch(Right):
    """Takes for granted that something was filled."""

    def launch(self):
        self.grad_S = torch.empty(self.S)
        self.work = reduce_scatter(self.grad_S, self.flat_P, async_op=True)


@wrong("issues one reduce_scatter of P elements on every rank")
class OnlyIfFilled(Right):
    """Skips the reduction where nothing was filled."""

    def launch(self):
        if self.flat_P is None:
            self.grad_S = torch.zeros(self.S)
        else:
            super().launch()

    def land(self):
        if self.flat_P is not None:
            super().land()


@wrong("what was not filled has the values of the backward before")
class StaleValues(Right):
    """Keeps the buffer, with what is in it."""

    def forget(self):
        self.work = None


@wrong("the sum over the ranks is not divided")
class Summed(Right):
    """Forgets the division."""

    def land(self):
        self.work.wait()
        self.forget()


@wrong("the gradients are kept beside the buffer")
class Collects(Right):
    """Keeps the gradients in a list until land(), beside the buffer."""

    def fill(self, param):
        self.kept = [*getattr(self, "kept", []), param.grad]
        super().fill(param)

    def forget(self):
        super().forget()
        self.kept = []


@wrong("the gradients are put together in launch()")
class FillsInLaunch(Right):
    """Leaves the gradients where they are until the bucket is launched."""

    def fill(self, param):
        pass

    def launch(self):
        for param in self.params:
            if param.grad is not None:
                super().fill(param)
        super().launch()


@wrong("the gradients are put together in launch()")
class ConcatenatesInLaunch(Right):
    """Keeps the gradients in a dict, and concatenates them when the bucket is launched."""

    def fill(self, param):
        self.kept = getattr(self, "kept", {})
        self.kept[param], param.grad = param.grad.flatten(), None

    def launch(self):
        kept = getattr(self, "kept", {})
        flat = torch.cat([kept.get(param, torch.zeros(param.numel())) for param in self.params])
        self.kept = {}
        self.flat_P = torch.nn.functional.pad(flat, (0, -len(flat) % self.n))
        super().launch()


@wrong("resize_() and torch.empty give memory with anything in it")
class NotZeroed(Right):
    """Gives the buffer memory again, with anything in it."""

    def __init__(self, params):
        super().__init__(params)
        self.whole_P = torch.zeros(self.S * self.n)
        self.whole_P.untyped_storage().resize_(0)

    def buffer(self):
        storage = self.whole_P.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole_P.nbytes)
        self.flat_P = self.whole_P
        return self.flat_P

    def forget(self):
        self.whole_P.untyped_storage().resize_(0)


@wrong("resize_() and torch.empty give memory with anything in it")
class Empty(Right):
    """Makes the buffer with torch.empty."""

    def buffer(self):
        if self.flat_P is None:
            self.flat_P = torch.empty(self.S * self.n)
        return self.flat_P


@wrong("the shards are made in __init__")
class ShardFromTheStart(Right):
    """Makes the shard once, in __init__."""

    def __init__(self, params):
        super().__init__(params)
        self.grad_S = torch.zeros(self.S)

    def launch(self):
        self.buffer()
        self.work = reduce_scatter(self.grad_S, self.flat_P, async_op=True)


@wrong("what is a multiple already gets no padding")
class AlwaysPadded(Right):
    """Adds a whole N of zeros where nothing is missing."""

    def __init__(self, params):
        super().__init__(params)
        self.S = sum(param.numel() for param in params) // self.n + 1
