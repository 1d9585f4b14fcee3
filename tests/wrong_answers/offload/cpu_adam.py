"""Wrong answers to offload.cpu_adam: a right one, and what people change in it."""

import torch
from wrong_answers import wrong


class Right:
    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.state = {}

    def moments(self, unit, like):
        if unit not in self.state:
            self.state[unit] = {"m": torch.zeros_like(like), "v": torch.zeros_like(like), "t": 0}
        return self.state[unit]

    def count(self, state):
        state["t"] += 1
        return state["t"]

    def decay(self, master_S, grad_S):
        master_S.mul_(1 - self.lr * self.weight_decay)
        return grad_S

    def root(self, v, t):
        return (v / (1 - self.betas[1] ** t)).sqrt() + self.eps

    def corrected(self, m, t):
        return m / (1 - self.betas[0] ** t)

    def step(self, unit, master_S, grad_S):
        state, grad_S = self.moments(unit, master_S), grad_S.float()
        t = self.count(state)
        grad_S = self.decay(master_S, grad_S)
        state["m"].mul_(self.betas[0]).add_(grad_S, alpha=1 - self.betas[0])
        state["v"].mul_(self.betas[1]).addcmul_(grad_S, grad_S, value=1 - self.betas[1])
        self.move(master_S, self.corrected(state["m"], t) / self.root(state["v"], t))

    def move(self, master_S, update_S):
        master_S.sub_(self.lr * update_S)


@wrong("the bias correction is missing")
class NoCorrection(Right):
    """Takes m and v as they are."""

    def root(self, v, t):
        return v.sqrt() + self.eps

    def corrected(self, m, t):
        return m


@wrong("the bias correction of v is missing")
class CorrectsM(Right):
    """Corrects m, and forgets v."""

    def root(self, v, t):
        return v.sqrt() + self.eps


@wrong("the count begins at 0")
class CountsFromZero(Right):
    """Raises the count after it was used."""

    def count(self, state):
        state["t"] += 1
        return torch.tensor(state["t"] - 1.0)


@wrong("one count for all units")
class OneCount(Right):
    """Counts calls of step()."""

    calls = 0

    def count(self, state):
        self.calls += 1
        return self.calls


@wrong("AdamW's is decoupled")
class L2(Right):
    """Adds the decay to the gradient, as Adam does."""

    def decay(self, master_S, grad_S):
        return grad_S + self.weight_decay * master_S


@wrong("the decay is not multiplied by lr")
class DecaysTooMuch(Right):
    """Decays by weight_decay alone."""

    def decay(self, master_S, grad_S):
        master_S.mul_(1 - self.weight_decay)
        return grad_S


@wrong("eps is added under the root")
class EpsInside(Right):
    """Takes the root of v + eps."""

    def root(self, v, t):
        return (v / (1 - self.betas[1] ** t) + self.eps).sqrt()


@wrong("eps is added before the bias correction")
class EpsUncorrected(Right):
    """Adds eps first, and corrects then."""

    def root(self, v, t):
        return (v.sqrt() + self.eps) / (1 - self.betas[1] ** t) ** 0.5


@wrong("the moments are in 16 bits")
class SixteenBits(Right):
    """Makes the moments like the gradient."""

    def step(self, unit, master_S, grad_S):
        state = self.moments(unit, grad_S)
        t = self.count(state)
        self.decay(master_S, grad_S)
        grad = grad_S.float()
        state["m"].copy_(state["m"].float() * self.betas[0] + grad * (1 - self.betas[0]))
        state["v"].copy_(state["v"].float() * self.betas[1] + grad * grad * (1 - self.betas[1]))
        self.move(master_S, self.corrected(state["m"].float(), t) / self.root(state["v"].float(), t))


@wrong("work on it with mul_, sub_, copy_")
class NotInPlace(Right):
    """Binds the name to a new tensor."""

    def decay(self, master_S, grad_S):
        return grad_S

    def move(self, master_S, update_S):
        master_S = master_S - self.lr * update_S


@wrong("moments and count begin anew")
class Forgets(Right):
    """Has no state."""

    def moments(self, unit, like):
        return {"m": torch.zeros_like(like), "v": torch.zeros_like(like), "t": 0}


@wrong("the state belongs to the class")
class Shared(Right):
    """One table for all objects."""

    table = {}  # noqa: RUF012  the mistake

    def moments(self, unit, like):
        if unit not in self.table:
            self.table[unit] = {"m": torch.zeros_like(like), "v": torch.zeros_like(like), "t": 0}
        return self.table[unit]


@wrong("use the formulas")
class Torchs(Right):
    """Calls torch's."""

    def step(self, unit, master_S, grad_S):
        if unit not in self.state:
            self.state[unit] = torch.optim.AdamW([master_S], self.lr, self.betas, self.eps, self.weight_decay)
        master_S.grad = grad_S.float()
        self.state[unit].step()
        master_S.grad = None


@wrong("has a gradient, a copy of the master")
class Keeps(Right):
    """Keeps the gradient in fp32 as well."""

    def step(self, unit, master_S, grad_S):
        super().step(unit, master_S, grad_S)
        self.state[unit]["grad"] = grad_S.float()


@wrong("works in place")
class ChangesGrad(Right):
    """Scales the gradient where it lies."""

    def step(self, unit, master_S, grad_S):
        super().step(unit, master_S, grad_S)
        grad_S.mul_(1 - self.betas[0])


wrong("the answer is a function", 3, mistake="no class")


@wrong("does each have moments of its own?")
class OneForEachSize(Right):
    """Finds moments by the size of the unit."""

    def moments(self, unit, like):
        return super().moments(len(like), like)


@wrong("begin anew in each step")
class OneForEachPlace(Right):
    """Finds moments by where the master lies."""

    def moments(self, unit, like):
        return super().moments(like.data_ptr(), like)


@wrong("")
class OtherDefaults(Right):
    """Has other defaults than AdamW."""

    def __init__(self, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(lr, betas, eps, weight_decay)


@wrong("one too high")
class CountsFromTwo(Right):
    """Counts one too many."""

    def count(self, state):
        return super().count(state) + 1


@wrong("the gradient's square")
class NotSquared(Right):
    """Takes the mean of the gradient for v."""

    def step(self, unit, master_S, grad_S):
        state, grad_S = self.moments(unit, master_S), grad_S.float()
        t = self.count(state)
        grad_S = self.decay(master_S, grad_S)
        state["m"].mul_(self.betas[0]).add_(grad_S, alpha=1 - self.betas[0])
        state["v"].mul_(self.betas[1]).add_(grad_S, alpha=1 - self.betas[1])
        self.move(master_S, self.corrected(state["m"], t) / self.root(state["v"], t))


@wrong("it is subtracted")
class Added(Right):
    """Adds the update."""

    def move(self, master_S, update_S):
        master_S.add_(self.lr * update_S)


@wrong("to the power of t")
class TimesT(Right):
    """Corrects with β times t."""

    def root(self, v, t):
        return (v / (1 - self.betas[1] * t)).sqrt() + self.eps

    def corrected(self, m, t):
        return m / (1 - self.betas[0] * t)
