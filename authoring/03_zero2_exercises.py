# %% [markdown]
# # 03 ZeRO-2: exercises
#
# You build ZeRO-2's backward from plain `torch` and `torch.distributed`: a bucket that is reduced into
# a shard, memory that is given back in time, sums over micro-batches, and the hooks that make it happen
# while backward runs. `mz.Zero2` may be read, but not used. N is the world size. A name ends in `_P` if
# it has the P elements of a whole padded bucket, in `_S` if it has the S = P / N of a shard.
#
# Two collectives do the work; the next cell gives them short names, since torch 2.13 has renamed them:
#
# ```python
# reduce_scatter(grad_S, grad_P)      # grad_S becomes this rank's shard of the SUM over the ranks
# all_gather(weights_P, weights_S)    # weights_P becomes all ranks' shards, one after the other
# ```
#
# With `async_op=True` they return a *work* at once, and until `work.wait()` their tensors belong to
# them. To try something before you check it:
#
# ```python
# mz.launch(lambda rank: reduce_bucket([torch.ones(3) * 10**rank]), 2)      # what rank 0 returns, and rank 1
# ```

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

import minizero as mz
from minizero.course import ask, check, hint

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# %% [markdown]
# ## 1. A bucket becomes a shard
#
# `reduce_bucket(grads)` gets this rank's gradients of one bucket: a list of tensors of one dtype and any
# shapes. The bucket is all of them flat, one after the other, then zeros up to P, the smallest multiple
# of N that holds them. It returns `grad_S`: this rank's shard of the mean over the ranks, S elements of that dtype.
#
# The shard has memory of its own. A slice of the bucket is a view, and one view keeps the whole bucket
# alive. The tensors in `grads` stay as they are.
#
# Example, two ranks: rank 0 has [[1, 2]] and [3], rank 1 has [[10, 20]] and [30]. P is 4, the mean is
# [5.5, 11, 16.5, 0]. Rank 0 returns [5.5, 11], rank 1 returns [16.5, 0].
#
# Checked on 2 and 3 ranks: the shards, also in bf16 and where there are fewer elements than ranks; their
# memory; one reduce_scatter of P elements, and nothing else: half of what an all_reduce sends.

# %%
def reduce_bucket(grads):
    """This rank's shard of the mean of all ranks' `grads`: a flat tensor of S elements."""
    ### BEGIN SOLUTION
    # Why so: a rank updates with its shard and needs nothing else, so the reduce-scatter is all that is sent. The flat bucket exists inside
    # this function only: when it returns, nothing refers to it any more, and its memory is free.
    # The usual mistake: all_reduce, then a slice. The numbers are right. It sends twice as much, and the slice is a view, so every rank
    # goes on holding all the gradients: that is ZeRO-1 with more traffic.
    world_size = dist.get_world_size()
    flat = torch.cat([grad.flatten() for grad in grads])
    flat_P = F.pad(flat, (0, -len(flat) % world_size))
    grad_S = flat_P.new_empty(len(flat_P) // world_size)
    reduce_scatter(grad_S, flat_P)
    return grad_S / world_size
    ### END SOLUTION

# %%
check("zero2.reduce_bucket", reduce_bucket)

# %% [markdown]
# ## 2. Free in time
#
# `Bucket(params)` is made once, for fp32 parameters. In each backward it needs a flat buffer of P
# elements, from its first gradient until its reduction has *landed*, and not a moment longer:
#
# - `fill(param)` is called from the parameter's hook: move what is in `param.grad` into the buffer.
# - `launch()` starts the reduce_scatter of that buffer, with zeros for what was not filled, and returns at once.
# - `land()` waits. Then `self.grad_S` is this rank's shard of the mean, and the buffer is gone.
#
# Backward goes on between these calls. From `launch()` on every `.grad` is None: one that is a view
# would keep the whole buffer alive.
#
# Example, two ranks, parameters of 3 and 2 elements. P is 6, and the bucket holds 0 bytes when it is
# made, 24 once `fill` was called, 36 after `launch()` (buffer and shard), 12 after `land()`.
#
# Checked on 2 and 3 ranks: these bytes, while backward goes on, and that launch() makes no second buffer;
# two backwards; one asynchronous call.

# %%
class Bucket:
    """Some parameters' gradients: whole while they arrive and travel, a shard from then on."""

    def __init__(self, params):
        """params: fp32 parameters, equal in shape on all ranks."""
        ### BEGIN SOLUTION
        # Why so: three names refer to the buffer's memory (self.flat_P, a .grad that is a view of it, the work), and it is free when the
        # last of them is gone. So the gradient is copied, .grad is None, and land() drops both. The buffer is made by the first gradient,
        # of zeros: what never comes is zero.
        # The usual mistake: setting a name to None and believing that memory has been freed, while some .grad still looks into it.
        # (untyped_storage().resize_(0) frees it whoever looks; then nobody may look. And what it is given again has anything in it: zero_().)
        self.world_size = dist.get_world_size()
        self.place, numel = {}, 0
        for param in params:
            self.place[param] = slice(numel, numel + param.numel())
            numel += param.numel()
        self.S = -(-numel // self.world_size)
        self.flat_P = self.work = self.grad_S = None
        ### END SOLUTION

    def fill(self, param):
        """Autograd has put a gradient into param.grad."""
        ### BEGIN SOLUTION
        if self.flat_P is None:
            self.flat_P = torch.zeros(self.S * self.world_size)
        self.flat_P[self.place[param]] = param.grad.flatten()
        param.grad = None
        ### END SOLUTION

    def launch(self):
        """Send it off. Some parameters, or all, may have had no gradient."""
        ### BEGIN SOLUTION
        if self.flat_P is None:
            self.flat_P = torch.zeros(self.S * self.world_size)
        self.grad_S = torch.empty(self.S)
        self.work = reduce_scatter(self.grad_S, self.flat_P, async_op=True)
        ### END SOLUTION

    def land(self):
        """Wait for it: self.grad_S is this rank's shard of the mean, and the rest is gone."""
        ### BEGIN SOLUTION
        self.work.wait()
        self.grad_S /= self.world_size
        self.flat_P = self.work = None
        ### END SOLUTION

# %%
check("zero2.free_in_time", Bucket)

# %% [markdown]
# ## 3. Accumulate shards
#
# A step of G micro-batches has G backwards. ZeRO-2 cannot keep their gradients until the last one, so
# each is reduced at once, and the shards add up. `Accumulating(weights_P, lr)` is made once; `weights_P`
# is flat, fp32, equal on all ranks, P divisible by N.
#
# - `backward(grad_P)` gets this rank's own gradient of one micro-batch: bf16, divided by G already. When
#   it returns, nothing of P elements is kept, and `weights_P` is as it was: the next micro-batch runs on it.
# - `step()` takes lr times the sum of the means off this rank's shard of `weights_P`, gathers all shards
#   into `weights_P`, and begins a new sum.
#
# What travels of gradients is bf16. The sum is fp32, because in bf16 256 + 1 is 256.
#
# Example: weights of 1000, lr = 1, three micro-batches with means 256, 1 and 1: 1000 − 258 = 742.
#
# Checked on 2 and 3 ranks: weights after two steps, and not changed before; bytes kept between
# micro-batches: shards only; G reduce_scatters and one all_gather, (G + 1)·P elements a step.

# %%
class Accumulating:
    """ZeRO-2's gradient between two steps: the sum of the micro-batches' means, of which a rank has its shard."""

    def __init__(self, weights_P, lr):
        ### BEGIN SOLUTION
        # Why so: reducing is linear, so the sum of the means is the mean of the sums, and the shard of it is all that has to wait for the
        # next micro-batch. The price is a reduce-scatter for each: (G + 1)Ψ in place of the 2Ψ that ZeRO-1 sends with no_sync().
        # The usual mistake: adding this rank's own slice of grad_P, of one micro-batch or all. It has the right shape, and every rank's
        # weights stay equal, since each shard has one owner. Only a comparison with one process shows that they train on a part of the
        # data.
        self.weights_P, self.lr = weights_P, lr
        self.weights_S = weights_P.chunk(dist.get_world_size())[dist.get_rank()]
        self.sum_S = None
        ### END SOLUTION

    def backward(self, grad_P):
        """grad_P: this rank's own gradient of one micro-batch, bf16."""
        ### BEGIN SOLUTION
        mean_S = grad_P.new_empty(len(self.weights_S))
        reduce_scatter(mean_S, grad_P)
        mean_S /= dist.get_world_size()
        self.sum_S = mean_S.float() if self.sum_S is None else self.sum_S + mean_S
        ### END SOLUTION

    def step(self):
        """Update the weights with all gradients since the last step."""
        ### BEGIN SOLUTION
        self.weights_S -= self.lr * self.sum_S
        all_gather(self.weights_P, self.weights_S)
        self.sum_S = None
        ### END SOLUTION

# %%
check("zero2.accumulate_shards", Accumulating)

# %% [markdown]
# ## 4. The whole backward
#
# `ShardedBackward(buckets)` registers hooks, once. `buckets` is a list of lists of fp32 parameters, equal
# on all ranks. Each step is `loss.backward()`, then `shards = engine.finish()`. Your `Bucket` may help.
#
# - A bucket leaves from the hook of its last gradient, yet only when all ahead of it in the list have left.
# - *One* reduction is under way while the next bucket fills. It lands when the next bucket leaves: not
#   before, and its buffer is gone when the next one's reduce_scatter is issued.
# - `finish()` sends what has not left (no gradient counts as zeros), waits, and returns this rank's shards
#   of the mean, padded as in exercise 1, in the order of the list. Every `.grad` is None then.
#
# Example, buckets [[c], [b], [a]], gradients arriving in the order c, a, b. c leaves when c arrives. When b
# arrives c lands and b leaves, then b lands and a leaves. a lands in `finish()`.
#
# Checked on 2 and 3 ranks: shards, also of a real model; what has left and landed at each gradient, also
# where the ranks' orders differ; bytes: never more than the shards, two buckets and one gradient.

# %%
class ShardedBackward:
    """Reduces gradients to this rank's shards while backward runs."""

    def __init__(self, buckets):
        """buckets: lists of parameters, equal on all ranks, in the order in which they leave."""
        ### BEGIN SOLUTION
        # Why so: one counter says which bucket is next, as in DDP, so the order is that of the list on every rank. launch() lands the
        # bucket before this one first: one buffer is gone before anything new is allocated, and two buckets are all that there ever is.
        # The usual mistake: DDP's list of all works, waited for at the end. Each work, and each entry of the list, keeps its bucket: when
        # backward ends all gradients are there at once, and freed a moment later. What decides is the peak.
        self.buckets = [(Bucket(params), set(params)) for params in buckets]
        self.arrived, self.launched = set(), 0
        for bucket, params in self.buckets:
            for param in params:
                param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: self.on_gradient(bucket, param))
        ### END SOLUTION

    ### BEGIN SOLUTION
    def on_gradient(self, bucket, param):
        bucket.fill(param)
        self.arrived.add(param)
        while self.launched < len(self.buckets) and self.buckets[self.launched][1] <= self.arrived:
            self.launch()

    def launch(self):
        if self.launched > 0:
            self.buckets[self.launched - 1][0].land()
        self.buckets[self.launched][0].launch()
        self.launched += 1
    ### STUB
    # # Your own methods.
    ### END SOLUTION

    def finish(self):
        """Returns this rank's shards of the mean gradient, one for each bucket. The next backward may begin."""
        ### BEGIN SOLUTION
        while self.launched < len(self.buckets):
            self.launch()
        self.buckets[-1][0].land()
        self.arrived, self.launched = set(), 0
        return [bucket.grad_S for bucket, _ in self.buckets]
        ### END SOLUTION

# %%
check("zero2.backward", ShardedBackward)

# %% [markdown]
# ## 5. Predict the peak
#
# How many bytes of gradients does exercise 4 hold at its worst moment, in a first backward?
# `peak(buckets, world_size)` says so. `buckets` has a list for each bucket: the numels of its fp32
# gradients, in the order in which they arrive. The buckets fill one after the other, so there are two
# kinds of moments:
#
# - A gradient of bucket b arrives. There are: the gradient, buffer b (all P of it, with the padding),
#   buffer b − 1, which is under way, and the shards of all buckets ahead of b.
# - Bucket b leaves. Buffer b − 1 is gone; there are buffer b, and the shards up to b's own.
#
# Example, `peak([[4, 2], [6]], 2)`, in elements. Bucket 0: 4 + 6 and 2 + 6, then 6 + 3. Bucket 1: 6 + 6 +
# 6 + 3 = 21, then 6 + 3 + 3. The peak is 4 · 21 = 84 bytes, where all gradients are 48: ZeRO-2 pays off
# with many buckets.
#
# Checked without your engine: by arithmetic, and against what a meter reads while `mz.Zero2` runs.

# %%
def peak(buckets, world_size):
    """The most bytes of gradients that are there at any moment of a backward. An int."""
    ### BEGIN SOLUTION
    # Why so: walk through the backward and write down what is there; the peak is the largest of these sums. The worst moment is mostly the
    # arrival of the largest gradient late in backward, when nearly all shards are there already; but with one huge bucket it's that one's.
    # The usual mistake: Ψ/N and one bucket. While a bucket fills, the one before is still under way, and that is what the overlap costs.
    most = shards = before = 0
    for numels in buckets:
        S = -(-sum(numels) // world_size)
        P = S * world_size
        most = max(most, max(numels) + P + before + shards, P + shards + S)
        shards, before = shards + S, P
    return 4 * most
    ### END SOLUTION

# %%
check("zero2.peak", peak)

# %% [markdown]
# ## 6. Say the number
#
# What does ZeRO-2 hold, save, send? 1 GB is 10⁹ bytes, B is 10⁹, and 1 % off is right. A wrong answer is
# worked out line by line. `ask("zero2.number", seed=1)` gives other figures, and other questions too;
# `check` judges by those asked last.

# %%
ask("zero2.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: each of the micro-batches is reduced, since the next backward finds no gradients to add to; the weights are gathered once, after
# the update; and each of these collectives makes a rank send (N−1)/N of 2 bytes for each parameter.
# The usual mistake: counting one reduction, as with DDP's or ZeRO-1's no_sync(). Keeping gradients for later is what ZeRO-2 gave up.
answer = (6 + 1) * 2 * 30 * 3 / 4
### END SOLUTION

# %%
check("zero2.number", answer)

# %% [markdown]
# ## 7. Find the bug
#
# Someone has taken DDP's overlap and put a reduce_scatter in place of the all_reduce: ZeRO-2's backward in
# twenty-odd lines. It runs without an error on any number of ranks. Every parameter gets a gradient, so
# nothing has to be launched at the end. Read it before you run it.
#
# What would one *measure* that shows the bug? Answer that, then mend it. What stays: the shards that it
# returns, and that a bucket's reduction is under way while the next one fills. When that one leaves, the
# bucket before has landed and is gone.
#
# Checked on 2 and 3 ranks: shards; what has left at each gradient, and what is under way; bytes held.

# %%
ask("zero2.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "d"
### END SOLUTION

# %%
def backward(loss, buckets):
    """loss.backward(). Returns this rank's shards of the mean gradient, one for each bucket, in their order."""
    world_size = dist.get_world_size()
    arrived, under_way, shards = set(), [], []

    ### BEGIN SOLUTION
    # Why so: what is in under_way stays alive: the bucket by its name, and by its work too, which has to read it. So the bucket before is
    # waited for and let go when the next one is about to leave, before that is put together.
    # The usual mistake is the bug itself. In DDP the buckets are the gradients, and have to be there when backward ends. Here they do not,
    # and no value, no count of bytes sent, and no look at the memory after backward gives it away: measure the peak.
    def launch(bucket):
        land()
        flat = torch.cat([param.grad.flatten() for param in bucket])
        for param in bucket:
            param.grad = None
        flat_P = F.pad(flat, (0, -len(flat) % world_size))
        grad_S = torch.empty(len(flat_P) // world_size)
        under_way.append((reduce_scatter(grad_S, flat_P, async_op=True), flat_P))
        shards.append(grad_S)

    def land():
        if under_way:
            work, _ = under_way.pop()
            work.wait()
            shards[-1] /= world_size

    def on_gradient(param):
        arrived.add(param)
        while len(shards) < len(buckets) and arrived.issuperset(buckets[len(shards)]):
            launch(buckets[len(shards)])

    hooks = [param.register_post_accumulate_grad_hook(on_gradient) for bucket in buckets for param in bucket]
    loss.backward()
    land()
    ### STUB
    # def launch(bucket):
    #     flat = torch.cat([param.grad.flatten() for param in bucket])
    #     for param in bucket:
    #         param.grad = None
    #     flat_P = F.pad(flat, (0, -len(flat) % world_size))
    #     grad_S = torch.empty(len(flat_P) // world_size)
    #     under_way.append((reduce_scatter(grad_S, flat_P, async_op=True), flat_P))
    #     shards.append(grad_S)
    #
    # def on_gradient(param):
    #     arrived.add(param)
    #     while len(shards) < len(buckets) and arrived.issuperset(buckets[len(shards)]):
    #         launch(buckets[len(shards)])
    #
    # hooks = [param.register_post_accumulate_grad_hook(on_gradient) for bucket in buckets for param in bucket]
    # loss.backward()
    # for (work, _), grad_S in zip(under_way, shards, strict=True):
    #     work.wait()
    #     grad_S /= world_size
    ### END SOLUTION
    for hook in hooks:
        hook.remove()
    return shards

# %%
check("zero2.find_the_bug", observed, backward)
