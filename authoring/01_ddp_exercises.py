# %% [markdown]
# # 01 DDP: exercises
#
# You build DDP from plain `torch` and `torch.distributed`: the start, the naive average, buckets, the
# overlap, accumulation. Each answer is a small function or class that every rank calls at the same
# time. `mz.DDP` may be read, but not used.
#
# Most checks give rank r gradients of 10^r · (1, 2, 3, …): on two ranks a sum reads 11, 22, 33, … and
# a mean 5.5, 11, 16.5, … To try something before you check it:
#
# ```python
# def attempt(rank):
#     model = torch.nn.Linear(2, 1)
#     model.weight.grad = torch.tensor([[1.0, 2.0]]) * 10**rank
#     model.bias.grad = torch.tensor([3.0]) * 10**rank
#     average_gradients(model)
#     return model.weight.grad
#
# mz.launch(attempt, 2)
# ```

# %%
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

import minizero as mz
from minizero.course import ask, check, hint

# %% [markdown]
# ## 1. Everyone starts as rank 0
#
# Each rank has built the model with a seed of its own. `broadcast(model)` overwrites whatever a rank
# has to have in common with rank 0 before the first step. What it returns is not looked at.
#
# Example: `weight` is [1, 2] on rank 0 and [10, 20] on rank 1, `running_mean` (a buffer) is [6] and
# [60]. Afterwards both ranks have [1, 2] and [6].
#
# The model keeps its tensors and their memory, because an optimizer may hold them already. A buffer
# may hold large whole numbers. No object is pickled and sent: that is slow.
#
# Checked on 2 and 3 ranks: all values; the same tensors in the same memory; `dist.broadcast` only, at
# most one for each tensor, in the same order on all ranks.

# %%
def broadcast(model):
    """Make this rank's model equal to rank 0's. model: a torch.nn.Module, equal in shape on all ranks."""
    ### BEGIN SOLUTION
    # Why so: parameters() has the frozen ones in it and a tied one once; buffers() has those as well that are not saved. What
    # is broadcast is .data, because autograd would have a say about a write to the parameter itself. There is no `if rank == 0`:
    # a broadcast is a call of all ranks, and dist tells them apart.
    # The usual mistake: broadcasting what has requires_grad, since it looks as if only that were trained. A frozen weight that differs
    # has no gradient which could ever bring the ranks together, and neither has a buffer.
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    ### END SOLUTION

# %%
check("ddp.broadcast", broadcast)

# %% [markdown]
# ## 2. The naive average
#
# `average_gradients(model)` is called after `loss.backward()` and before `optimizer.step()`.
# Afterwards every trainable parameter's `.grad` is the mean of the ranks' gradients.
#
# Two kinds of parameters come without a gradient. A *frozen* one (`requires_grad` is False) has none
# on any rank, and must not get one. A trainable one that *this* rank did not use in this step has
# `.grad` None here, and counts as zeros: another rank may have used it. It gets the mean like all
# others.
#
# Example, two ranks: rank 0 has [4, 6], rank 1 has None. Both end with [2, 3].
#
# Checked on 2 and 3 ranks: the means; weights untouched; one `all_reduce` for each trainable
# parameter, in one order and in its gradient's dtype (16 bits too, also where one is missing); three
# steps of SGD against one process that sees all rows.

# %%
def average_gradients(model):
    """Replace each trainable parameter's .grad by its mean over the ranks."""
    ### BEGIN SOLUTION
    # Why so: whether a parameter takes part is decided by requires_grad, which is the same on all ranks. Whether it has a gradient
    # is not, so a rank that has none sends zeros, and all ranks issue the same collectives in the same order.
    # The usual mistake: `if param.grad is not None`. It is right in every test in which all ranks use all parameters, and a
    # deadlock in the first step in which they do not.
    for param in model.parameters():
        if not param.requires_grad:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    ### END SOLUTION

# %%
check("ddp.average", average_gradients)

# %% [markdown]
# ## 3. Which parameters share a bucket?
#
# `partition(params, bucket_bytes)` takes a list of a model's parameters in order of registration. It
# returns a list of buckets, each a list of the same objects. Buckets are filled in *reverse*: the
# first begins with the last parameter. A bucket closes for good before the parameter that would take
# it over `bucket_bytes` (filled to the last byte is not over). A parameter larger than that has a
# bucket to itself.
#
# Frozen parameters are left out. A *tied* one stands in the list twice and goes into one bucket, at the
# place of its *first* entry in the list: its gradient is complete only when backward has come there.
# The caller's list stays as it is.
#
# Example, fp32, 32 bytes a bucket, parameters a, b, c, d of 6, 2, 3, 5 elements, list [a, b, c, d,
# a]: [[d, c], [b, a]], with 20 + 12 and 8 + 24 bytes.
#
# Checked without ranks: order; bytes, also in 16 bits; exact fits; large, frozen, tied ones; no
# bucket empty.

# %%
def partition(params, bucket_bytes):
    """Trainable parameters in reverse order, cut into buckets of at most `bucket_bytes` bytes: a list of lists."""
    ### BEGIN SOLUTION
    # Why so: in reverse, because backward finishes the last layer's gradient first, and the first bucket should be full while most of
    # backward is still to come. dict.fromkeys keeps each object at its first place, so it comes before reversed(). The question
    # "does it still fit?" is asked before a parameter is put in, so the limit holds.
    # The usual mistake: collecting into a separate list that is appended when it is full. The last one never gets full, and its parameters,
    # the first layer's, are trained by each rank for itself.
    buckets, size = [], 0
    for param in reversed(list(dict.fromkeys(params))):
        if not param.requires_grad:
            continue
        if not buckets or size + param.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.nbytes
    return buckets
    ### END SOLUTION

# %%
check("ddp.partition", partition)

# %% [markdown]
# ## 4. One collective for each bucket
#
# `average_in_buckets(buckets)` does what `average_gradients` did, with one `all_reduce` for each
# bucket. `buckets` is a list of lists of trainable parameters, all of one dtype, equal on all ranks;
# the lists stay as they are. Afterwards every `.grad` is the mean, in the parameter's own shape. A
# missing gradient counts as zeros.
#
# Example, two ranks, one bucket of a [2]- and a [1]-shaped parameter: gradients [1, 2] and [3] on
# rank 0, [10, 20] and [30] on rank 1. One all_reduce of 3 elements leaves 11, 22, 33; the gradients
# become [5.5, 11] and [16.5] on both ranks.
#
# Checked on 2 and 3 ranks: the means for shapes such as [2, 2], [3, 1] and [] (one number); a
# gradient that is not contiguous; one missing on one rank, in 16 bits too; the all_reduces, their
# sizes, dtype and order.

# %%
def average_in_buckets(buckets):
    """Replace each parameter's .grad by its mean over the ranks, with one all_reduce for each bucket."""
    ### BEGIN SOLUTION
    # Why so: cat copies the gradients into one message, and split with the same list of numels takes it apart again; one list, used twice,
    # cannot disagree with itself. A missing gradient becomes zeros first, so that the message has the same length on all ranks.
    # The usual mistake: leaving out parameters without a gradient. The message is shorter on that rank, everything behind the gap
    # would land in the wrong place, and gloo ends the process.
    for bucket in buckets:
        for param in bucket:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        flat = torch.cat([param.grad.flatten() for param in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, mean in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.grad.copy_(mean.view_as(param))
    ### END SOLUTION

# %%
check("ddp.buckets", average_in_buckets)

# %% [markdown]
# ## 5. The overlap
#
# `Overlapped(model, buckets)` registers hooks on the parameters in `buckets`, once, when it is made.
# Then, for each step: `loss.backward()`, `engine.finish()`, `optimizer.step()`,
# `optimizer.zero_grad()`.
#
# A bucket leaves as **one asynchronous `all_reduce`, from inside the hook** that completes it, in
# whatever order its gradients arrive, yet only when all buckets ahead of it in the list have left.
# Backward waits for nothing. `finish()` launches what has not left, with zeros for a gradient that is
# None, and waits for all; then every `.grad` is the mean.
#
# Example, buckets [[c], [b], [a]] and gradients arriving in the order c, a, b: c leaves when c
# arrives, nothing when a arrives, b and then a when b arrives.
#
# Checked on 2 and 3 ranks: what has left at each gradient; rank 0's backward ends though no other
# rank has begun, its finish() does not; means, also in a second step, with a layer that one rank does
# not use (16 bits too) or uses in another order; three steps of SGD against one process.

# %%
class Overlapped:
    """Averages gradients over the ranks in buckets, while backward runs."""

    def __init__(self, model, buckets):
        """buckets: lists of trainable parameters, equal on all ranks, in the order in which they leave."""
        ### BEGIN SOLUTION
        # Why so: one counter, how many buckets have left, says which one is next, and only the next may leave. So the order is that of the
        # list on every rank, whatever the order of the gradients. launch() reads .grad and not a note of who has arrived, so finish() can
        # launch an incomplete bucket with the same lines.
        # The usual mistake: launching whichever bucket is full. As long as all ranks run the same graph nothing shows it. When they do not, a
        # collective meets one of another bucket, and if the sizes agree you get numbers and no error.
        self.buckets = buckets
        self.arrived, self.in_flight = set(), []
        for bucket in buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_gradient)
        ### END SOLUTION

    ### BEGIN SOLUTION
    def on_gradient(self, param):
        self.arrived.add(param)
        while len(self.in_flight) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.in_flight)]):
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.in_flight)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))
    ### STUB
    # # Your own methods.
    ### END SOLUTION

    def finish(self):
        """After it, every parameter's .grad is the mean over the ranks, and the next backward may begin."""
        ### BEGIN SOLUTION
        while len(self.in_flight) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.in_flight, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for param, mean in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
                param.grad = mean.view_as(param)
        self.arrived, self.in_flight = set(), []
        ### END SOLUTION

# %%
check("ddp.overlap", Overlapped)

# %% [markdown]
# ## 6. Accumulation
#
# `Accumulating` is your `Overlapped` with a context manager `no_sync()`. A step of G micro-batches
# runs G − 1 backwards inside `with engine.no_sync():`, one outside, and then `engine.finish()` once.
# Losses come already divided by G.
#
# Inside, nothing is sent; gradients add up in `.grad`. The backward outside reduces each bucket once,
# from its hooks, and waits for nothing. `finish()` leaves the mean over the ranks of what all G have
# added, also for a parameter that only an earlier one used. An exception leaves the block as it came,
# and the next backward outside reduces again. You may go back and change `Overlapped`.
#
# Example, two ranks, G = 2, one parameter: gradients 1 and 2 on rank 0, 10 and 20 on rank 1. `.grad`
# ends as (3 + 30) / 2 = 16.5, after one all_reduce.
#
# Checked on 2 and 3 ranks: collectives inside and outside; means; an exception inside; a second step.

# %%
class Accumulating(Overlapped):
    """Overlapped, and quiet inside no_sync()."""

    ### BEGIN SOLUTION
    # Why so: the mean over ranks and the sum over micro-batches may change places, so one reduction of what lies in .grad is enough. The hook reads a
    # switch; finish() needs no change, since launch() takes whatever is in .grad. `finally`, because otherwise one exception in forward turns
    # reduction off for good, and nothing would say so: every rank would train for itself.
    # The usual mistake: keeping the earlier gradients aside and adding them after the reduction of the last one. They belong to one rank,
    # so the ranks drift apart, a little in every step.
    sync = True

    def on_gradient(self, param):
        if self.sync:
            super().on_gradient(param)
    ### STUB
    # # Your own attributes and methods.
    ### END SOLUTION

    @contextmanager
    def no_sync(self):
        """Backwards inside the block only accumulate."""
        ### BEGIN SOLUTION
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
        ### END SOLUTION

# %%
check("ddp.accumulate", Accumulating)

# %% [markdown]
# ## 7. Say the number
#
# How much travels? 1 GB is 10⁹ bytes, B is 10⁹, and 1 % off is right. A wrong answer is worked out
# line by line. `ask("ddp.number", seed=1)` gives other figures; `check` judges by those asked last.

# %%
ask("ddp.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: without no_sync() each of the micro-batches reduces; each reduction is an all-reduce, two halves of (N−1)/N; and 16 bits are 2 bytes.
# The usual mistake: counting one half. An all-reduce of Ψ elements makes a rank send nearly 2Ψ.
answer = 3 * 2 * 2 * 7 * 7 / 8
### END SOLUTION

# %%
check("ddp.number", answer)

# %% [markdown]
# ## 8. Find the bug
#
# Someone has written DDP in twenty lines. It runs without an error on any number of ranks, and the
# loss falls. The ranks start with equal weights and read different rows. Read the loop before you run
# it.
#
# What would one *measure* that shows the bug? Answer that, then mend the hook. The rest of the loop
# stays: only gradients travel, inside backward(), and each rank returns its own losses.
#
# Checked on 2 and 3 ranks: what each step() is given, weights and losses against one process; the
# traffic, and that it leaves from the hook.

# %%
ask("ddp.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "b"
### END SOLUTION

# %%
def train(model, batches, lr):
    """Train `model` on this rank's batches with SGD. Gradients are averaged over the ranks as they arrive."""
    world_size = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    ### BEGIN SOLUTION
    # Why so: a post-accumulate-grad hook receives the parameter. What it finds in param.grad is complete, because autograd has accumulated into it before.
    # The usual mistake is the bug itself: the name `grad` for the hook's argument is taken from register_hook, whose hooks do receive a
    # gradient. Weights and gradients have the same shapes and sizes, so no error and no count of bytes gives it away; only comparing ranks does.
    def average(param):
        dist.all_reduce(param.grad)
        param.grad.div_(world_size)
    ### STUB
    # def average(grad):
    #     dist.all_reduce(grad)
    #     grad.div_(world_size)
    ### END SOLUTION

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(average)
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

# %%
check("ddp.find_the_bug", observed, train)
