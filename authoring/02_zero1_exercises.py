# %% [markdown]
# # 02 ZeRO-1: exercises
#
# You build ZeRO-1 from plain `torch` and `torch.distributed`: who owns what, the sharded step, weights
# in one buffer, masters, the norm, the skip. Each answer is a small function or class that every rank
# calls at the same time. `mz.Zero1` may be read, but not used. N is the world size. A name ends in
# `_P` if it has the P elements of a whole padded vector, in `_S` if it has the S = P / N of a shard.
#
# Two collectives do the work; the next cell gives them short names, since torch 2.13 has renamed them:
#
# ```python
# reduce_scatter(grad_S, grad_P)      # grad_S becomes this rank's shard of the SUM over the ranks
# all_gather(weights_P, weights_S)    # weights_P becomes all ranks' shards, one after the other
# ```
#
# To try something before you check it:
#
# ```python
# mz.launch(lambda rank: clip(torch.tensor([3.0 + rank]), max_norm=1.0), 2)
# ```

# %%
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

import minizero as mz
from minizero.course import ask, check, hint

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# %% [markdown]
# ## 1. Who owns which elements?
#
# A flat vector of `numel` elements is padded at its end to P, the next multiple of N (P = `numel` if
# that is one). Then it is cut into N *shards* of S = P / N, because the collectives want them equally
# long. Rank r has the r-th.
#
# `partition(numel, world_size, rank)` returns `(P, start, stop)`. This rank owns the elements
# start ≤ i < stop, that is, its shard without the padding. A rank whose shard is nothing but padding
# owns none: start = stop. Neither is ever larger than `numel`.
#
# Example: 10 elements on 3 ranks give P = 12 and S = 4. Rank 0 owns [0, 4), rank 1 [4, 8), rank 2
# [8, 10) and two elements of padding, so `partition(10, 3, 2)` is `(12, 8, 10)`.
#
# Checked without ranks: 0 to 13 elements on 1 to 8 ranks; every element has one owner; P.

# %%
def partition(numel, world_size, rank):
    """(P, start, stop): the padded size, and the elements [start, stop) that `rank` owns. Three ints."""
    ### BEGIN SOLUTION
    # Why so: rounding up gives shards that are long enough for all, and the padding collects at the end, where min() cuts it off. Both
    # ends are cut, since a shard may begin behind the last element.
    # The usual mistake: numel // world_size. It rounds down, and up to N - 1 elements at the end are never updated: the model
    # trains on, with a few weights that stay as they were.
    S = -(-numel // world_size)
    return S * world_size, min(rank * S, numel), min((rank + 1) * S, numel)
    ### END SOLUTION

# %%
check("zero1.partition", partition)

# %% [markdown]
# ## 2. Where do 16 bytes a parameter come from?
#
# Mixed-precision Adam: weights and gradients have 16 bits. The optimizer has fp32 only: a *master*
# copy of the weights and Adam's two moments. Under ZeRO-1 each rank has its shard of what belongs to
# the optimizer, and all of the rest. All vectors are flat, and padded as in exercise 1.
#
# `model_states(numel, world_size)` returns the bytes that one rank holds, a dict with the keys
# `weights`, `gradients`, `master`, `momentum` and `variance`. Padding counts, Adam's step count does
# not.
#
# Example: 8 elements on 1 rank take 16 × 8 = 128 bytes in all, of which 16 are weights. 10 elements on
# 3 ranks take 96 on each rank, where DDP would take 160.
#
# Checked without ranks: each kind, for several sizes on 1 to 64 ranks.

# %%
def model_states(numel, world_size):
    """Bytes of mixed-precision Adam's model states on one rank under ZeRO-1, by kind."""
    ### BEGIN SOLUTION
    # Why so: 2 + 2 bytes for each element that a rank has, 4 + 4 + 4 for each that it owns. The padding is part of the buffers, so it
    # has bytes, though nobody's weight is in it.
    # The usual mistake: sharding the gradients too. That is ZeRO-2; here each rank still holds all of them when backward ends.
    P = partition(numel, world_size, 0)[0]
    S = P // world_size
    return {"weights": 2 * P, "gradients": 2 * P, "master": 4 * S, "momentum": 4 * S, "variance": 4 * S}
    ### END SOLUTION

# %%
check("zero1.bytes", model_states)

# %% [markdown]
# ## 3. The sharded step
#
# `ShardedStep(weights_P, optimizer_class, lr)` is made once. `weights_P` is flat, fp32, equal on all
# ranks, P divisible by N. `step(grad_P)` gets this rank's own gradient and takes *one* step of the
# optimizer with the mean over the ranks. The new weights end in `weights_P`, that same tensor, on all
# ranks. `grad_P` may be overwritten.
#
# Each rank updates its shard and no more, with a torch optimizer that knows nothing else. It takes any
# list of tensors, and reads their `.grad`.
#
# Example, two ranks, SGD with lr=1, weights [100, 200], gradients [1, 2] and [10, 20]: rank 0 makes
# 100 − 5.5, rank 1 makes 200 − 11, and both end with [94.5, 189].
#
# Checked on 2 and 3 ranks: weights, SGD and Adam; one reduce_scatter and one all_gather of P elements
# a step, no more; what the optimizer holds; memory kept between steps (its state, and two shards).

# %%
class ShardedStep:
    """A step of a torch optimizer, of which each rank makes 1/N."""

    def __init__(self, weights_P, optimizer_class, lr):
        """weights_P: flat fp32 weights, equal on all ranks. optimizer_class: such as torch.optim.Adam."""
        ### BEGIN SOLUTION
        # Why so: a slice of a flat tensor is a view, so the optimizer writes straight into weights_P, and the all-gather finds the new
        # values where they belong. Its state has the shape of what it is given: S elements, and nothing has to be told that it is sharded.
        # The usual mistake: all_reduce, then a slice of the result. The numbers are right, and each rank has received N - 1 shards of mean
        # gradient that it throws away: the all-reduce's second half is the all-gather, and ZeRO-1 needs that one for the weights.
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.weights_P = weights_P
        self.weights_S = weights_P.chunk(self.world_size)[self.rank]
        self.weights_S.grad = torch.zeros_like(self.weights_S)
        self.optimizer = optimizer_class([self.weights_S], lr=lr)
        ### END SOLUTION

    def step(self, grad_P):
        """grad_P: this rank's own gradient, not averaged."""
        ### BEGIN SOLUTION
        reduce_scatter(self.weights_S.grad, grad_P)
        self.weights_S.grad /= self.world_size
        self.optimizer.step()
        all_gather(self.weights_P, self.weights_S)
        ### END SOLUTION

# %%
check("zero1.sharded_step", ShardedStep)

# %% [markdown]
# ## 4. The all-gather in place
#
# `FlatWeights(model)` moves a model's trainable parameters into one flat buffer, `self.flat_P`: one
# after the other in the order of `model.parameters()`, then zeros up to a multiple of N. From then on
# each parameter's `.data` is a view of its place in there. The parameters stay the same objects, for
# an optimizer may hold them, and their old memory is free. Frozen ones stay where they are.
#
# `gather()` is called when each rank has updated its own shard of `flat_P`. After it every rank's model
# computes with all the new weights, though no parameter has been touched.
#
# Example, two ranks, parameters [[1, 2]] and [3]: `flat_P` is [1, 2, 3, 0]. Rank 0 writes [10, 20] into
# its shard, rank 1 [30, 0]. After `gather()` the parameters are [[10, 20]] and [30] on both.
#
# Checked on 2 and 3 ranks: values; where each parameter lies, before and after; the one all_gather, of
# P elements; memory kept, and memory used by `gather()`: less than a second buffer.

# %%
class FlatWeights:
    """A model's trainable weights in one flat buffer, flat_P."""

    def __init__(self, model):
        """model: a torch.nn.Module with fp32 parameters, equal on all ranks."""
        ### BEGIN SOLUTION
        # Why so: the buffer is made first and each weight copied to its place. Where a weight lies is then decided once, and all that
        # comes later (the optimizer's shard, the all-gather) works on the buffer and never thinks of single parameters again.
        # The usual mistake: gathering into a new tensor and dealing it out, with copy_() or by setting .data after each step. It needs the weights
        # twice for a moment, and every view that somebody took earlier shows the weights of the step before.
        params = [param for param in model.parameters() if param.requires_grad]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        numel = sum(param.numel() for param in params)
        self.flat_P = torch.zeros(partition(numel, self.world_size, 0)[0])
        start = 0
        for param in params:
            view = self.flat_P[start : start + param.numel()].view_as(param)
            view.copy_(param.data)
            param.data = view
            start += param.numel()
        ### END SOLUTION

    def gather(self):
        """Each rank has updated its shard of flat_P: give it to all others."""
        ### BEGIN SOLUTION
        all_gather(self.flat_P, self.flat_P.chunk(self.world_size)[self.rank])
        ### END SOLUTION

# %%
check("zero1.all_gather_in_place", FlatWeights)

# %% [markdown]
# ## 5. Master weights
#
# `weights_P` is bf16 now. bf16 has 8 binary digits: 1 − 0.0001 rounds to 1, so a small update is lost,
# and a hundred of them too. `MasterStep(weights_P, optimizer_class, lr)` therefore keeps an fp32
# *master* of its shard, which the optimizer updates. The weights are the master's rounding.
#
# `step(grad_S)` gets this rank's shard of the mean gradient, in bf16: the reduce-scatter is done. After
# it `weights_P`, the same tensor, holds the rounding of all masters on all ranks.
#
# Example: weights of 1.0, gradients of 1, SGD with lr = 0.0001, 100 steps. The master is 0.99, the
# weights are 0.98828125, the bf16 number nearest to that. Without a master they are 1.0.
#
# Checked on 2 and 3 ranks: this example; SGD and Adam; one all_gather a step, in bf16; what the
# optimizer updates, its dtype and size; memory kept.

# %%
class MasterStep:
    """Sharded steps in fp32 of weights in 16 bits."""

    def __init__(self, weights_P, optimizer_class, lr):
        """weights_P: flat bf16 weights, equal on all ranks; P is divisible by N."""
        ### BEGIN SOLUTION
        # Why so: the master lives as long as the training, and the weights follow it, never the other way round. What the roundings lose is
        # lost for one forward pass only. It exists for the shard alone, 4 bytes of the 12 that ZeRO-1 divides by N.
        # The usual mistake: weights.float() in each step. Then the master starts from the rounding again, and the update is lost as before, with
        # more memory.
        self.weights_P = weights_P
        self.weights_S = weights_P.chunk(dist.get_world_size())[dist.get_rank()]
        self.master_S = self.weights_S.float()
        self.optimizer = optimizer_class([self.master_S], lr=lr)
        ### END SOLUTION

    def step(self, grad_S):
        """grad_S: this rank's shard of the mean gradient, bf16."""
        ### BEGIN SOLUTION
        self.master_S.grad = grad_S.float()
        self.optimizer.step()
        self.weights_S.copy_(self.master_S)
        all_gather(self.weights_P, self.weights_S)
        ### END SOLUTION

# %%
check("zero1.master_weights", MasterStep)

# %% [markdown]
# ## 6. The norm of a gradient that nobody has
#
# After the reduce-scatter rank r has `grad_S`, its part of the mean gradient g, and no rank has all of
# g. `clip(grad_S, max_norm)` returns |g|, the norm of *all* of it, as a float. If |g| is larger than
# `max_norm` it scales `grad_S` in place, so that g keeps its direction and has the norm `max_norm`.
#
# Parts may differ in length, and have 0 elements: such a rank contributes nothing, and still gets the
# norm. Gradients may be fp16, where 300² is already infinite. If g is zero, it stays zero.
#
# Example, two ranks with [3] and [4], `max_norm` 1: both return 5. The gradients become [0.6] and
# [0.8]. With `max_norm` 10 they stay.
#
# Checked on 2 and 3 ranks: norms, gradients; one all_reduce of one number.

# %%
def clip(grad_S, max_norm):
    """Scale grad_S so that the whole gradient's norm is at most max_norm. Returns the norm before, a float."""
    ### BEGIN SOLUTION
    # Why so: squares add up over ranks, norms do not. The norm is the same number on all ranks, so the coefficient is too, and the
    # direction of g stays. The empty shard needs no `if`: its sum is 0, and the collective is issued by all.
    # The usual mistake: torch.nn.utils.clip_grad_norm_ on what a rank has. It takes the shard for the gradient: each rank scales by a
    # number of its own, and the step goes in another direction.
    square = grad_S.double().square().sum()
    dist.all_reduce(square)
    norm = math.sqrt(square)
    if norm > max_norm:
        grad_S *= max_norm / norm
    return norm
    ### END SOLUTION

# %%
check("zero1.global_norm", clip)

# %% [markdown]
# ## 7. Skip together
#
# In fp16 the loss is multiplied by `scale` before backward, so that small gradients survive; large ones
# may then overflow. `step_or_skip(optimizer, scale)` is called on each rank, with this rank's optimizer.
# Its shard is the tensors in all its `param_groups`; their `.grad` is fp32 and still multiplied by
# `scale`, or None.
#
# If any element of any rank's gradients is infinite or NaN, all ranks skip the step: no weight, no
# state and no step count moves, and `(False, scale / 2)` is returned everywhere. Else the gradients are
# divided by `scale`, the optimizer steps, and `(True, scale)` is returned.
#
# Example, scale 1024, SGD with lr=1: a weight of 5 with .grad 2048 becomes 3, and (True, 1024.0) is
# returned. If another rank's .grad is inf it stays 5, and all return (False, 512.0).
#
# Checked on 2 and 3 ranks: inf, −inf, NaN, large finite ones; weights and Adam's state; one all_reduce.

# %%
def step_or_skip(optimizer, scale):
    """Step with the unscaled gradients, or skip on all ranks. Returns (updated, the scale for the next step)."""
    ### BEGIN SOLUTION
    # Why so: the question is asked of each element, because a sum of finite numbers may be infinite. The answer travels as a number that can
    # be added, and is a call of all ranks: also of those that see nothing wrong, or have no gradient.
    # The usual mistake: `if not isfinite: return` in front of the collective. One rank skips, the others wait for it for ever; or, without
    # a collective, they step, and from then on the shards are of different models.
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    overflows = torch.tensor(float(not all(grad.isfinite().all() for grad in grads)))
    dist.all_reduce(overflows)
    if overflows > 0:
        return False, scale / 2
    for grad in grads:
        grad /= scale
    optimizer.step()
    return True, scale
    ### END SOLUTION

# %%
check("zero1.skip_together", step_or_skip)

# %% [markdown]
# ## 8. Say the number
#
# What does ZeRO-1 hold, save, send? 1 GB is 10⁹ bytes, B is 10⁹, and 1 % off is right. A wrong answer is
# worked out line by line. `ask("zero1.number", seed=1)` gives other figures, and other questions too;
# `check` judges by those asked last.

# %%
ask("zero1.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: 2 + 2 bytes for each parameter, which every rank holds, and 12 for each that it owns.
# The usual mistake: dividing all 16 by N. ZeRO-1 shards the optimizer's 12 bytes and nothing else, so no number of ranks brings
# it below 4.
answer = 4 * 30 + 12 * 30 / 4
### END SOLUTION

# %%
check("zero1.number", answer)

# %% [markdown]
# ## 9. Find the bug
#
# Someone has written ZeRO-1 in thirty lines. It runs without an error on any number of ranks, ends with
# the weights that one process would have, and the optimizer's state is a shard. What is wrong can only be
# *measured*. Read it, say what an observer would see, and mend it.
#
# What stays: what `train` returns, the flat buffers, and the optimizer's shard.
#
# Checked on 2 and 3 ranks: weights and losses against one process; what is sent; what the optimizer holds.

# %%
ask("zero1.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "c"
### END SOLUTION

# %%
def train(model, batches, lr):
    """Train `model` on this rank's batches by SGD with momentum, as ZeRO-1. Returns this rank's losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numel = sum(param.numel() for param in model.parameters())
    S = -(-numel // world_size)
    weights_P, grad_P = torch.zeros(S * world_size), torch.zeros(S * world_size)
    start = 0
    for param in model.parameters():
        place = slice(start, start + param.numel())
        weights_P[place] = param.data.flatten()
        param.data = weights_P[place].view_as(param)
        param.grad = grad_P[place].view_as(param)
        start += param.numel()
    weights_S = weights_P[rank * S : (rank + 1) * S]
    optimizer = torch.optim.SGD([weights_S], lr=lr, momentum=0.9)

    losses = []
    for x, y in batches:
        grad_P.zero_()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        ### BEGIN SOLUTION
        # Why so: a rank needs the mean of its shard only, which is what a reduce-scatter leaves. The other half of the all-reduce would bring
        # it the rest, and nobody reads that.
        # The usual mistake is the bug itself: the loop grew out of DDP, where the all-reduce was right. No value ever gives it away, on any
        # number of ranks: count what is sent.
        weights_S.grad = torch.empty_like(weights_S)
        reduce_scatter(weights_S.grad, grad_P)
        weights_S.grad /= world_size
        ### STUB
        # dist.all_reduce(grad_P)
        # grad_P /= world_size
        # weights_S.grad = grad_P[rank * S : (rank + 1) * S]
        ### END SOLUTION
        optimizer.step()
        all_gather(weights_P, weights_S)
        losses.append(loss.item())
    return losses

# %%
check("zero1.find_the_bug", observed, train)
