"""Wrong answers to offload.budget: a right one, and what people change in it."""

import torch
from wrong_answers import wrong


class Right:
    def __init__(self, link, weights_S):
        self.link, self.weights_S, self.sum_S = link, weights_S, None
        self.master_S = self.down(weights_S).float()

    def down(self, tensor_S):
        host_S = torch.empty(tensor_S.shape, dtype=tensor_S.dtype)
        self.link.copy(host_S, tensor_S).wait()
        return host_S

    def on_gradient(self, grad_S):
        self.add(self.down(grad_S).float())

    def add(self, grad_S):
        self.sum_S = grad_S if self.sum_S is None else self.sum_S + grad_S

    def step(self, update):
        update(self.master_S, self.sum_S)
        self.sum_S = None
        self.up()

    def up(self):
        self.link.copy(self.weights_S, self.master_S.bfloat16()).wait()


@wrong("32 bits cross the link")
class WidensOnTheDevice(Right):
    """Sends gradients in fp32."""

    def on_gradient(self, grad_S):
        self.add(self.down(grad_S.float()))


@wrong("32 bits cross the link")
class RoundsOnTheDevice(Right):
    """Sends the master up in fp32, and rounds it there."""

    def up(self):
        new_S = torch.empty_like(self.weights_S, dtype=torch.float32)
        self.link.copy(new_S, self.master_S).wait()
        self.weights_S.copy_(new_S)


@wrong("overwrites the one before")
class Overwrites(Right):
    """Keeps the last micro-batch's gradient."""

    def add(self, grad_S):
        self.sum_S = grad_S


@wrong("added up in 16 bits")
class SumsInSixteenBits(Right):
    """Adds what has come down as it came."""

    def on_gradient(self, grad_S):
        self.add(self.down(grad_S))

    def step(self, update):
        self.sum_S = self.sum_S.float()
        super().step(update)


@wrong("in 16 bits 256 + 1 is 256")
class NeverWidens(Right):
    """Hands a 16-bit sum to the update."""

    def on_gradient(self, grad_S):
        self.add(self.down(grad_S))


@wrong("is added up on the host")
class SumsOnTheDevice(Right):
    """Sends the sum once a step."""

    def on_gradient(self, grad_S):
        self.add(grad_S.clone())

    def step(self, update):
        self.sum_S = self.down(self.sum_S).float()
        super().step(update)


@wrong("the master stays on the host")
class FetchesTheMaster(Right):
    """Makes the master of the 16-bit weights in each step."""

    def step(self, update):
        self.master_S = self.down(self.weights_S).float()
        super().step(update)


@wrong("it stays on the host, in fp32")
class RoundsTheMaster(Right):
    """Goes on with the rounded master."""

    def up(self):
        super().up()
        self.master_S = self.master_S.bfloat16().float()


@wrong("the sum of the step before is still in it")
class NeverClears(Right):
    """Adds up all steps."""

    def step(self, update):
        update(self.master_S, self.sum_S)
        self.up()


@wrong("divided by the number of micro-batches")
class Averages(Right):
    """Divides by the number of micro-batches."""

    count = 0

    def add(self, grad_S):
        super().add(grad_S)
        self.count += 1

    def step(self, update):
        self.sum_S = self.sum_S / self.count
        self.count = 0
        super().step(update)


@wrong("wait there")
class WaitsLater(Right):
    """Waits in step() for all micro-batches."""

    def __init__(self, link, weights_S):
        super().__init__(link, weights_S)
        self.downs = []

    def on_gradient(self, grad_S):
        host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
        self.downs.append((host_S, self.link.copy(host_S, grad_S)))

    def step(self, update):
        for host_S, down in self.downs:
            down.wait()
            self.add(host_S.float())
        self.downs.clear()
        super().step(update)


@wrong("a copy on the device is not needed")
class CopiesOnTheDevice(Right):
    """Sends a copy, so that grad_S may be overwritten."""

    def on_gradient(self, grad_S):
        kept_S = torch.empty_like(grad_S)
        kept_S.copy_(grad_S)
        self.made = kept_S
        super().on_gradient(grad_S)


@wrong("widen on the host")
class WidensAtFirst(Right):
    """Fetches the first master in fp32."""

    def __init__(self, link, weights_S):
        self.link, self.weights_S, self.sum_S = link, weights_S, None
        self.master_S = self.down(weights_S.float())


@wrong("the master begins at zero")
class ZeroMaster(Right):
    """Does not fetch the weights."""

    def __init__(self, link, weights_S):
        self.link, self.weights_S, self.sum_S = link, weights_S, None
        self.master_S = torch.zeros(weights_S.shape)


@wrong("a copy on the device is not needed")
class KeepsACopy(Right):
    """Has a second set of weights on the device from the beginning."""

    def __init__(self, link, weights_S):
        super().__init__(link, weights_S)
        self.old = weights_S.clone()
