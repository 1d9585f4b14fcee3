"""Wrong answers to offload.overlap: a right one, and what people change in it."""

import torch
from wrong_answers import wrong


class Right:
    def __init__(self, link):
        self.link, self.downs, self.ups = link, [], []

    def on_gradient(self, unit):
        grad_S = torch.empty(unit.grad_S.shape, dtype=unit.grad_S.dtype)
        self.downs.append((unit, grad_S, self.link.copy(grad_S, unit.grad_S)))

    def send(self, unit):
        self.ups.append(self.link.copy(unit.weights_S, unit.master_S.to(unit.weights_S.dtype)))
        if len(self.ups) > 1:
            self.ups.pop(0).wait()

    def end(self):
        for up in self.ups:
            up.wait()
        self.ups.clear()
        self.downs.clear()

    def step(self, update):
        for unit, grad_S, down in self.downs:
            down.wait()
            update(unit, grad_S)
            self.send(unit)
        self.end()


@wrong("on_gradient waits for its copy")
class WaitsInBackward(Right):
    """Waits for each gradient in backward."""

    def on_gradient(self, unit):
        super().on_gradient(unit)
        self.downs[-1][-1].wait()


@wrong("here it has not begun")
class SendsInStep(Right):
    """Notes the unit in backward, and copies in step()."""

    def __init__(self, link):
        super().__init__(link)
        self.waiting = []

    def on_gradient(self, unit):
        self.waiting.append(unit)

    def step(self, update):
        for unit in self.waiting:
            super().on_gradient(unit)
        self.waiting.clear()
        super().step(update)


@wrong("as soon as it has begun")
class WaitsForEachCopy(Right):
    """link.copy(…).wait() in the loop."""

    def send(self, unit):
        super().send(unit)
        self.ups.pop().wait()


@wrong("sent only when all units are updated")
class SendsAtTheEnd(Right):
    """Two loops, one after the other."""

    def send(self, unit):
        pass

    def end(self):
        for unit, *_ in self.downs:
            super().send(unit)
        super().end()


@wrong("waited for before the first update")
class WaitsForAll(Right):
    """Waits for all gradients first."""

    def step(self, update):
        for *_, down in self.downs:
            down.wait()
        super().step(update)


@wrong("all are waited for at the end")
class NoLimit(Right):
    """Lets all weights travel at once."""

    def send(self, unit):
        self.ups.append(self.link.copy(unit.weights_S, unit.master_S.to(unit.weights_S.dtype)))


@wrong("its wait() is missing")
class ForgetsTheLast(Right):
    """Waits for a copy when the next has begun, and never for the last."""

    def end(self):
        self.ups.clear()
        self.downs.clear()


@wrong("units of the step before are updated again")
class NeverClears(Right):
    """Keeps the list."""

    def end(self):
        downs = [*self.downs]
        super().end()
        self.downs = downs


@wrong("in the order in which on_gradient was called")
class ForwardOrder(Right):
    """Updates the first unit first."""

    def step(self, update):
        self.downs.reverse()
        super().step(update)


@wrong("its wait() comes right before")
class NeverWaits(Right):
    """Reads the gradients without waiting."""

    def step(self, update):
        for unit, grad_S, _ in self.downs:
            update(unit, grad_S)
            self.send(unit)
        for *_, down in self.downs:
            down.wait()
        self.end()


@wrong("one piece of memory for all gradients")
class OneBuffer(Right):
    """Brings all gradients down into one buffer."""

    def on_gradient(self, unit):
        if not hasattr(self, "buffer_S"):
            self.buffer_S = torch.empty(10, dtype=unit.grad_S.dtype)
        grad_S = self.buffer_S[: len(unit.grad_S)]
        self.downs.append((unit, grad_S, self.link.copy(grad_S, unit.grad_S)))


@wrong("its gradient has to come down first")
class OnTheDevice(Right):
    """Brings gradients down, and takes those of the device."""

    def step(self, update):
        for unit, _, down in self.downs:
            down.wait()
            update(unit, unit.grad_S)
            self.send(unit)
        self.end()


@wrong("one piece of memory for all gradients")
class OneBufferForEachSize(Right):
    """Has one piece of host memory for each size."""

    def __init__(self, link):
        super().__init__(link)
        self.memory = {}

    def on_gradient(self, unit):
        n = len(unit.grad_S)
        grad_S = self.memory.setdefault(n, torch.empty(n, dtype=unit.grad_S.dtype))
        self.downs.append((unit, grad_S, self.link.copy(grad_S, unit.grad_S)))


@wrong("a unit's update is missing")
class FourUnits(Right):
    """Takes it for granted that there are four units."""

    def step(self, update):
        self.downs = self.downs[:4]
        super().step(update)


@wrong("the list belongs to the class")
class OfTheClass(Right):
    """Has one list for all objects."""

    downs = Right(None).downs

    def __init__(self, link):
        self.link, self.ups = link, []


@wrong("")
class FirstAndLast(Right):
    """Waits for the first copy and the last, also where there is none."""

    def step(self, update):
        ups = []
        for unit, grad_S, down in self.downs:
            down.wait()
            update(unit, grad_S)
            if len(ups) >= 2:
                ups[-2].wait()
            ups.append(self.link.copy(unit.weights_S, unit.master_S.to(unit.weights_S.dtype)))
        ups[0].wait()
        ups[-2 if len(ups) > 1 else -1].wait()
        ups[-1].wait()
        self.downs.clear()
