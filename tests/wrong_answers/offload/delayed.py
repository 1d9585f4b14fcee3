"""Wrong answers to offload.delayed: a right one, and what people change in it."""

import torch
from wrong_answers import wrong


class Right:
    def __init__(self, link, host, weights_S, master_S, update):
        self.link, self.host, self.weights_S, self.master_S, self.update = link, host, weights_S, master_S, update
        self.beside = None

    def step(self, grad_S, sound=True):
        self.finish()
        if sound:
            self.begin(self.down(grad_S))

    def down(self, grad_S):
        host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
        self.link.copy(host_S, grad_S).wait()
        return host_S

    def begin(self, host_S):
        self.beside = self.host.start(self.update, self.master_S, host_S)

    def finish(self):
        if self.beside is not None:
            self.beside.wait()
            self.beside = None
            self.publish()

    def publish(self):
        self.link.copy(self.weights_S, self.master_S.bfloat16()).wait()


@wrong("there is no delay")
class NoDelay(Right):
    """Waits for the update that it has begun."""

    def step(self, grad_S, sound=True):
        super().step(grad_S, sound)
        super().finish()


@wrong("the update is waited for in the step that began it")
class HalfDelayed(Right):
    """Waits for the update at once, and sends its weights one step later."""

    done = False

    def begin(self, host_S):
        super().begin(host_S)
        self.beside.wait()


@wrong("the last gradient is lost")
class Loses(Right):
    """Has nothing to finish."""

    def step(self, grad_S, sound=True):
        super().finish()
        if sound:
            self.begin(self.down(grad_S))

    def finish(self):
        pass


@wrong("the weights miss two gradients")
class TwoSteps(Right):
    """Keeps two updates waiting."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waiting = []

    def step(self, grad_S, sound=True):
        if self.beside is not None and self.waiting:
            super().finish()
        if sound:
            self.waiting.append(self.down(grad_S))
        if self.beside is None and self.waiting:
            self.begin(self.waiting.pop(0))

    def finish(self):
        super().finish()
        while self.waiting:
            self.begin(self.waiting.pop(0))
            super().finish()


@wrong("two updates are at work on one master")
class SkipDrops(Right):
    """Forgets the update that is under way when a step is skipped."""

    def step(self, grad_S, sound=True):
        if sound:
            super().step(grad_S)
        else:
            self.beside = None


@wrong("does not end the update of the step before")
class SkipWaits(Right):
    """Returns at once when a step is skipped."""

    def step(self, grad_S, sound=True):
        if sound:
            super().step(grad_S)


@wrong("nothing begins with it")
class UsesOverflow(Right):
    """Does not look whether the gradient is sound."""

    def step(self, grad_S, sound=True):
        super().step(grad_S, True)


@wrong("wait for the update, then send the weights")
class PublishesEarly(Right):
    """Sends the master while it is updated."""

    def step(self, grad_S, sound=True):
        if self.beside is not None:
            self.publish()
            self.beside.wait()
        self.beside = None
        if sound:
            self.begin(self.down(grad_S))


@wrong("what is sent are the weights of before the update")
class PublishesStale(Right):
    """Sends the weights, then waits for their update."""

    def begin(self, host_S):
        self.beside = self.host.start(lambda: self.update(self.master_S, host_S))

    def finish(self):
        if self.beside is not None:
            self.publish()
            self.beside.wait()
            self.beside = None


@wrong("its wait() is missing")
class SendsLate(Right):
    """Does not wait for the gradient, which backward overwrites."""

    def step(self, grad_S, sound=True):
        if self.beside is not None:
            host_S, down = self.beside
            self.beside = None
            down.wait()
            job = self.host.start(self.update, self.master_S, host_S)
            job.wait()
            self.publish()
        if sound:
            host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
            self.beside = host_S, self.link.copy(host_S, grad_S)

    def finish(self):
        self.step(None, False)


@wrong("no update has begun")
class NotBeside(Right):
    """Keeps the gradient for one step, and updates in the open: the weights are right."""

    def begin(self, host_S):
        self.beside = host_S

    def finish(self):
        if self.beside is not None:
            self.update(self.master_S, self.beside)
            self.beside = None
            self.publish()


@wrong("weights go up where an update has ended, once")
class AlwaysPublishes(Right):
    """Sends the weights in each step."""

    def finish(self):
        if self.beside is not None:
            self.beside.wait()
            self.beside = None
        self.publish()


@wrong("wait() stands before whoever reads")
class ReadsEarly(Right):
    """Begins the update before the gradient has arrived, and waits for that too late."""

    def down(self, grad_S):
        host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
        self.copy = self.link.copy(host_S, grad_S)
        return host_S

    def begin(self, host_S):
        super().begin(host_S.clone())
        self.copy.wait()


@wrong("without calling it")
class Calls(Right):
    """Calls the update, and starts what it returned."""

    def begin(self, host_S):
        self.beside = self.host.start(self.update(self.master_S, host_S))


@wrong("what is updated is a copy of master_S")
class AMasterOfItsOwn(Right):
    """Updates a copy of the master."""

    def __init__(self, link, host, weights_S, master_S, update):
        super().__init__(link, host, weights_S, master_S.clone(), update)


@wrong("on all ranks alike")
class LooksForItself(Right):
    """Goes by its own gradient, and not by `sound`."""

    def step(self, grad_S, sound=True):
        super().step(grad_S, bool(grad_S.isfinite().all()))


@wrong("wait for the gradient before the update with it is started")
class DoesNotWaitForTheGradient(ReadsEarly):
    """Starts the update while its gradient is on the way, and waits for neither."""

    begin = Right.begin
