# %% [markdown]
# # 06 Offload: exercises
#
# You build offload from plain `torch`: Adam on the host, copies there and back, and an update that runs
# while something else does. `mz.Zero3Offload` may be read, but not used. A name ends in `_S` if it has the S
# elements of this rank's shard of a unit. To be sharded adds nothing here, so each rank works alone.
#
# This machine may have no GPU, so the two sides are an agreement. `weights_S` and `grad_S` are on the
# *device*, `master_S` is on the *host*, and so is what `torch.empty(n, dtype=…)` and its like make; what is
# made out of a tensor (`clone`, `+`, `empty_like`, also `cpu()`) is on its side. **Only the link goes across**:
# `link.copy(to, source)` begins to copy and returns an object with `wait()`; both tensors have one shape and
# one dtype. The checks watch each operation: one that mixes the sides is refused, as on a GPU. So is one
# that reads what has not arrived, or writes to what is still on its way.
#
# A real link moves the bytes some time between the two calls. The one below keeps that promise as meanly as
# it can, in `wait()`, and so does `Host`, for work that runs beside the device (exercise 5).

# %%
import torch

from minizero.course import ask, check, hint


class Later:
    """Something under way. It happens in wait(), once."""

    def __init__(self, function, *args):
        self.todo = [(function, args)]

    def wait(self):
        while self.todo:
            function, args = self.todo.pop()
            function(*args)


class Link:
    """Between device and host."""

    def copy(self, to, source):
        """Begin to copy. Until it is waited for, `to` has NaN in it."""
        assert to.shape == source.shape and to.dtype == source.dtype, "the link moves bytes: same shape, same dtype"
        to.fill_(torch.nan)
        return Later(to.copy_, source)


class Host:
    """The host's processor."""

    def start(self, function, *args):
        """Begin to run function(*args) beside the device."""
        return Later(function, *args)

# %% [markdown]
# ## 1. Adam on the host
#
# `CpuAdam(lr, betas, eps, weight_decay)` is made once for all units of a rank. `step(unit, master_S,
# grad_S)` is one AdamW step (`torch.optim.AdamW`, to 1e-6) on one unit, named by a string: it updates the
# fp32 `master_S` in place. `grad_S` may be in 16 bits, and stays as it is. The name is what counts: the
# tensors may lie elsewhere the next time. Write the formulas; no `torch.optim`.
#
# Moments are fp32, 8 bytes for each element of a unit that has been updated. A unit that had no gradient
# misses a step, so each has **its own count**. Decay comes first and is decoupled: master × (1 − lr ·
# weight_decay).
#
# Example: master 1, gradient 0.5, lr 0.1, no decay. m = 0.05 and v = 0.00025 become 0.5 and 0.25 by the bias
# correction, and the first step is lr · 0.5 / √0.25: the master is 0.9, whatever the gradient's size.
#
# Checked in one process: each of these against torch's, over several steps; bytes held; two at a time.

# %%
class CpuAdam:
    """AdamW on fp32 shards, unit by unit."""

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        ### BEGIN SOLUTION
        # Why so: units come one at a time, each with its moments and its count, so the state is a table with a row for each unit. The count belongs
        # in the row: the bias correction says how many gradients are in these moments, not how often the optimizer was called.
        # The usual mistake: zeros_like(grad_S). What comes over the link has 16 bits, and so the moments get 16: in bf16 v stops changing after
        # some steps, since 0.001 of it is less than half of its last digit.
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.state = {}
        ### END SOLUTION

    def step(self, unit, master_S, grad_S):
        """Update one unit's master_S, fp32, in place. grad_S: fp32 or 16 bits."""
        ### BEGIN SOLUTION
        grad_S = grad_S.float()
        m_S, v_S, t = self.state.get(unit) or (torch.zeros_like(master_S), torch.zeros_like(master_S), 0)
        t += 1
        self.state[unit] = m_S, v_S, t
        beta1, beta2 = self.betas
        m_S.mul_(beta1).add_(grad_S, alpha=1 - beta1)
        v_S.mul_(beta2).addcmul_(grad_S, grad_S, value=1 - beta2)
        master_S.mul_(1 - self.lr * self.weight_decay)
        root_S = (v_S / (1 - beta2**t)).sqrt_().add_(self.eps)
        master_S.addcdiv_(m_S, root_S, value=-self.lr / (1 - beta1**t))
        ### END SOLUTION

# %%
check("offload.cpu_adam", CpuAdam)

# %% [markdown]
# ## 2. Copy and wait
#
# One step of one shard. On the device are `weights_S` and `grad_S`, of one dtype, bf16 or fp32; on the host
# is the fp32 `master_S`. `update(master_S, grad)` changes `master_S` in place, with a gradient on the host,
# of either dtype: it stands for exercise 1.
#
# `offload_step(link, weights_S, grad_S, master_S, update)` brings the gradient down, updates, and sends the
# weights up, rounded to their dtype. When it returns, the new weights are there, `grad_S` is zero for the
# next backward, and nothing is under way.
#
# Example: weights 1, gradient 2, and an update that subtracts it. Down goes 2, up goes −1; afterwards
# `weights_S` and `master_S` are −1 and `grad_S` is 0.
#
# Checked in one process: values of two steps, each copy (bytes, dtype, order, waited for), what is read and
# written while a copy is under way, on which side the update runs.

# %%
def offload_step(link, weights_S, grad_S, master_S, update):
    """Gradient down, update on the host, weights up."""
    ### BEGIN SOLUTION
    # Why so: each line needs what the one before has made, so each copy is waited for at once. Nothing overlaps yet; it is the order that
    # exercise 3 stretches over many units. grad_S may be cleared as soon as it has arrived, and not before.
    # The usual mistake: clearing the gradient after copy() has returned. That call only begins to copy; a slow link then brings
    # zeros down, and a fast one gradients, so that training depends on the weather.
    host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
    link.copy(host_S, grad_S).wait()
    grad_S.zero_()
    update(master_S, host_S)
    link.copy(weights_S, master_S.to(weights_S.dtype)).wait()
    ### END SOLUTION

# %%
check("offload.copy_and_wait", offload_step)

# %% [markdown]
# ## 3. Overlap
#
# Many units now: `unit.weights_S`, `unit.grad_S` (device) and `unit.master_S` (host, fp32). In backward
# `on_gradient(unit)` is called when the unit's gradient is ready, and its copy leaves, while backward goes
# on. Then `step(update)` goes through these units in the same order, and no others. (From here on it is the
# caller who clears gradients.)
#
# - it waits for a gradient right before `update(unit, grad)`, which changes `unit.master_S`, and not before;
# - a unit's new weights leave right after its update, and travel while the next is updated;
# - at most two of these copies up are under way at a time: before a third the older is waited for. When it
#   returns there is none.
#
# Example, units 1 and 0: `on_gradient` begins down 1, then down 0. `step`: wait down 1, update 1, begin up
# 1, wait down 0, update 0 (up 1 is under way), begin up 0, wait for both.
#
# Checked in one process: values; copies; what is under way at each update; a unit without a gradient.

# %%
class Overlap:
    """Gradients go down beside backward, weights go up beside the update."""

    def __init__(self, link):
        ### BEGIN SOLUTION
        # Why so: what was begun first is waited for first, so a list of copies is all the bookkeeping there is. Each wait stands at the last line
        # before something needs what has arrived, and whatever is above that line is hidden.
        # The usual mistake: link.copy(…).wait() in the loop. Every value is right and the profile shows copies on a stream of their own; the host
        # stands still while each of them travels, and the device waits for the sum of both.
        self.link, self.downs = link, []
        ### END SOLUTION

    def on_gradient(self, unit):
        """unit.grad_S is complete. Returns at once."""
        ### BEGIN SOLUTION
        grad_S = torch.empty(unit.grad_S.shape, dtype=unit.grad_S.dtype)
        self.downs.append((unit, grad_S, self.link.copy(grad_S, unit.grad_S)))
        ### END SOLUTION

    def step(self, update):
        """update(unit, grad) for each unit that had a gradient; the new weights are on the device when it returns."""
        ### BEGIN SOLUTION
        ups = []
        for unit, grad_S, down in self.downs:
            down.wait()
            update(unit, grad_S)
            if len(ups) == 2:
                ups.pop(0).wait()
            ups.append(self.link.copy(unit.weights_S, unit.master_S.to(unit.weights_S.dtype)))
        for up in ups:
            up.wait()
        self.downs.clear()
        ### END SOLUTION

# %%
check("offload.overlap", Overlap)

# %% [markdown]
# ## 4. The 4-byte budget
#
# `Budget(link, weights_S)` is made once; it takes its fp32 master from the bf16 `weights_S`. Then come
# micro-batches. `on_gradient(grad_S)`: a micro-batch's bf16 gradient is on the device, and the next one is
# written into the same `grad_S` as soon as this returns. On the host they are summed in fp32. `step(update)`
# calls `update(master_S, sum_S)`, both fp32, sends the weights up, and the next sum begins at zero.
#
# The budget for each parameter of the shard: 2 bytes down for each micro-batch, 2 bytes up for each step,
# and no new memory on the device. So with one micro-batch 4 bytes cross. (The first master may cost 2 more,
# once.)
#
# Example: gradients 256 and 1, an update that subtracts the sum, weight 1. In bf16 256 + 1 is 256; on the
# host the sum is 257, the master −256, and this is sent up. 6 bytes have crossed.
#
# Checked in one process: sums, masters, weights over several steps; each copy; new memory on the device.

# %%
class Budget:
    """Gradients go down in 16 bits and are summed on the host; weights come up in 16 bits."""

    def __init__(self, link, weights_S):
        ### BEGIN SOLUTION
        # Why so: whatever is wider than 16 bits stays on the host: the sum, the master, and the rounding. What crosses has the dtype that the
        # device computes with anyway, so nothing is lost that would not be lost there.
        # The usual mistake: to widen or to round on the far side of the link, as in grad_S.float() before the copy or a master that
        # is sent up and cast there. The values are the same, to the bit, and the link carries twice the bytes.
        self.link, self.weights_S, self.sum_S = link, weights_S, None
        self.master_S = self.down(weights_S)
        ### END SOLUTION

    ### BEGIN SOLUTION
    def down(self, tensor_S):
        host_S = torch.empty(tensor_S.shape, dtype=tensor_S.dtype)
        self.link.copy(host_S, tensor_S).wait()
        return host_S.float()
    ### STUB
    # # Your own methods.
    ### END SOLUTION

    def on_gradient(self, grad_S):
        """A micro-batch's gradient is ready. When this returns, grad_S may be written to."""
        ### BEGIN SOLUTION
        grad_S = self.down(grad_S)
        self.sum_S = grad_S if self.sum_S is None else self.sum_S + grad_S
        ### END SOLUTION

    def step(self, update):
        """update(master_S, sum_S), and the weights go up."""
        ### BEGIN SOLUTION
        update(self.master_S, self.sum_S)
        self.sum_S = None
        self.link.copy(self.weights_S, self.master_S.to(self.weights_S.dtype)).wait()
        ### END SOLUTION

# %%
check("offload.budget", Budget)

# %% [markdown]
# ## 5. The delayed update
#
# The host is slower than the device, so let it work beside the next forward and backward.
# `host.start(function, *args)` begins `function(*args)` and returns an object with `wait()`; until then
# nobody else may touch what it uses. `Delayed(link, host, weights_S, master_S, update)` is made once;
# `weights_S` is bf16, `master_S` fp32.
#
# - `step(grad_S, sound)`: the update begun one step ago ends, and its weights go up. Then this one's begins,
#   `update(master_S, grad)`, and is still under way when step returns. `grad_S` may be overwritten then.
# - If `sound` is False, the gradient has overflowed on some rank: nothing begins on any, also where `grad_S` is
#   finite. What began before it ends all the same.
# - `finish()`: no update is lost. It may be called twice, and training may go on after it.
#
# Example: weight 0, gradients 1, 2, an update that subtracts. After the first step the weight is 0, after
# the second −1 (the 2 is under way), after `finish()` −3.
#
# Checked in one process: weights after each step against a loop with this delay; copies; what is under way.

# %%
class Delayed:
    """Each update runs beside the forward and backward that follow."""

    def __init__(self, link, host, weights_S, master_S, update):
        ### BEGIN SOLUTION
        # Why so: one update is under way at most, so one variable holds it; to end it and to publish its weights are one thing, which step(),
        # a skipped step and finish() all begin with. Only then may the master be touched again, by the next.
        # The usual mistake: to forget the end. After the last step one gradient is still on its way into the master, and who saves
        # the weights then has trained one step less than they think.
        self.link, self.host, self.weights_S, self.master_S, self.update = link, host, weights_S, master_S, update
        self.beside = None
        ### END SOLUTION

    def step(self, grad_S, sound=True):
        """End the update of the step before, and begin this one's if its gradient is sound."""
        ### BEGIN SOLUTION
        self.finish()
        if sound:
            host_S = torch.empty(grad_S.shape, dtype=grad_S.dtype)
            self.link.copy(host_S, grad_S).wait()
            self.beside = self.host.start(self.update, self.master_S, host_S)
        ### END SOLUTION

    def finish(self):
        """All updates are over, and their weights on the device."""
        ### BEGIN SOLUTION
        if self.beside is not None:
            self.beside.wait()
            self.beside = None
            self.link.copy(self.weights_S, self.master_S.to(self.weights_S.dtype)).wait()
        ### END SOLUTION

# %%
check("offload.delayed", Delayed)

# %% [markdown]
# ## 6. Say the number
#
# What is where, what crosses, how long does it take? 1 GB is 10⁹ bytes, B is 10⁹, and 1 % off is right. Gradients
# keep their place on the device, as in question 2 of the lesson. A
# wrong answer is worked out line by line. `ask("offload.number", seed=1)` gives other figures, and other
# questions too; `check` judges by those asked last.

# %%
ask("offload.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: 2 bytes of gradient go down for each of 4 micro-batches, and 2 bytes of weights come up once: 2G + 2 bytes for each parameter that
# this rank owns. The moments, however large, are updated where they lie.
# The usual mistake: 4 bytes whatever G is. The gradients' sum could cross once, but it would have to be made on the device, in fp32,
# and take the memory there that offload has just freed.
answer = (2 * 4 + 2) * 70 / 8
### END SOLUTION

# %%
check("offload.number", answer)

# %% [markdown]
# ## 7. Find the bug
#
# The rounded weights have to lie somewhere while they travel. Pinned memory is scarce, so someone keeps two
# staging buffers for all units, each as long as the longest shard: while one is on its way, the other is
# filled. On their machine every run is right, to the bit. Read it before you run it.
#
# What would one *measure* that shows the bug? Answer that, then mend it. What stays: the two buffers, what
# crosses, and that the weights of one unit travel while the next is updated.
#
# Checked in one process: values, with one to six units of different sizes; each copy, and through which
# buffer; what is read and written while a copy is under way; what is under way at each update.

# %%
ask("offload.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "b"
### END SOLUTION

# %%
def staged_step(link, units, staging, update):
    """A step of all units. staging: two tensors on the host, of the weights' dtype; update(unit, grad) changes unit.master_S."""
    downs, ups = [], []
    for unit in units:
        grad_S = torch.empty(unit.grad_S.shape, dtype=unit.grad_S.dtype)
        downs.append((grad_S, link.copy(grad_S, unit.grad_S)))
    for i, unit in enumerate(units):
        grad_S, down = downs[i]
        down.wait()
        update(unit, grad_S)
        rounded_S = staging[i % 2][: len(unit.master_S)]
        ### BEGIN SOLUTION
        # Why so: a buffer is free when the copy out of it has been waited for, and so the wait stands above the line that fills it.
        # The usual mistake is the bug itself: the right wait, for the right copy, two lines too late. Where copies are over before the
        # next line runs, as they are on a CPU or for small units, no test finds it.
        if i >= 2:
            ups[i - 2].wait()
        rounded_S.copy_(unit.master_S)
        ups.append(link.copy(unit.weights_S, rounded_S))
        ### STUB
        # rounded_S.copy_(unit.master_S)
        # ups.append(link.copy(unit.weights_S, rounded_S))
        # if i >= 2:
        #     ups[i - 2].wait()
        ### END SOLUTION
    for up in ups[-2:]:
        up.wait()

# %%
check("offload.find_the_bug", observed, staged_step)
