# %% [markdown]
# # 04 ZeRO-3: exercises
#
# You build ZeRO-3 from plain `torch` and `torch.distributed`: a unit's weights in one buffer, memory that
# comes and goes, hooks at the right moments, a backward that gathers again. `mz.Zero3` may be read, but
# not used. N is the world size. A name ends in `_P` if it has the P elements of a whole padded unit, in
# `_S` if it has the S = P / N of a shard.
#
# Two collectives do the work; the next cell gives them short names, since torch 2.13 has renamed them:
#
# ```python
# all_gather(weights_P, weights_S)    # weights_P becomes all ranks' shards, one after the other
# reduce_scatter(grad_S, grad_P)      # grad_S becomes this rank's shard of the SUM over the ranks
# ```
#
# The memory of a tensor, and of all its views, is its storage: `tensor.untyped_storage()`. The storage has
# `nbytes()` and `resize_(nbytes)`, and at 0 bytes its tensors keep their shape and **may not be used**: to
# add, print or clone one ends the process. To see what there is: `with mz.record_memory() as m: ...; m.total`.

# %%
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import minizero as mz
from minizero.course import ask, check, hint

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# %% [markdown]
# ## 1. Shard a unit
#
# `shard_unit(params)` gets the fp32 parameters of one unit, equal on all ranks, in a list. It returns
# `(flat_P, shard_S)`:
#
# - `flat_P` has all of them, flat, one after the other, then zeros up to P, the next multiple of N. Each
#   parameter's `.data` is from then on a view of its place in there. It stays the same object.
# - `shard_S` has this rank's S elements of it, in memory of its own: `flat_P` will soon lose its memory.
#
# Both are made from `param.data`, so that autograd has no part in them. As in the lesson `shard_S` may require
# a gradient, for an optimizer; then it is `shard_S.detach()` that is sent.
#
# Frozen parameters too. ZeRO-1 shards what the optimizer updates; ZeRO-3 shards every weight.
#
# Example, two ranks, parameters [[1, 2]] and [3]: `flat_P` is [1, 2, 3, 0] on both. `shard_S` is [1, 2] on
# rank 0 and [3, 0] on rank 1.
#
# Checked on 2 and 3 ranks: values; each element owned once, also where there are fewer elements than
# ranks; where each parameter and the shard lie; that the weights exist once; that nothing is sent.

# %%
def shard_unit(params):
    """(flat_P, shard_S): the parameters in one flat buffer, and a copy of this rank's shard of it."""
    ### BEGIN SOLUTION
    # Why so: where a weight lies is decided once. From here on the unit is one vector, which is cut, sent and freed as a whole, and
    # single parameters are only views of it. clone() makes the shard's memory its own, so that the buffer's can go.
    # The usual mistake: a shard that is a slice. A slice is a view, and one view keeps the whole buffer alive: every rank goes on holding
    # all the weights, and the sharding is only in the names.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flat = torch.cat([param.data.flatten() for param in params])
    flat_P = F.pad(flat, (0, -len(flat) % world_size))
    start = 0
    for param in params:
        param.data = flat_P[start : start + param.numel()].view_as(param)
        start += param.numel()
    S = len(flat_P) // world_size
    return flat_P, flat_P[rank * S : (rank + 1) * S].clone()
    ### END SOLUTION

# %%
check("zero3.shard_unit", shard_unit)

# %% [markdown]
# ## 2. Gather and free
#
# `Unit(params)` is made once, and has what exercise 1 returns: `self.shard_S`, and a flat buffer, of which
# the parameters are views for good. Until `gather()` is called, the buffer has no memory.
#
# - `gather()` gives the buffer memory again, and all ranks' shards.
# - `free()` takes the memory away, *whoever looks into it*. Between forward and backward autograd does: it
#   has saved views of the weights. A new `.data` for the parameters would free nothing. `shard_S` stays as it
#   is: the caller may update it at any time, while the unit is gathered too.
#
# When the unit is gathered again for backward, autograd's views show the weights, and the gradients are
# right. This is why the memory has to come back in the same place: in the same storage.
#
# Example, two ranks, 5 elements, P = 6, S = 3: a rank holds 12 bytes when the unit is made, 36 when it is
# gathered, and 12 when it is freed, also while autograd has saved its views.
#
# Checked on 2 and 3 ranks: these bytes, also while gather() runs; weights, also when `shard_S` was updated in
# place, and that the update stays; one all_gather of P elements; a gradient, where the unit was freed and
# gathered between forward and backward.

# %%
class Unit:
    """Weights that are there from gather() to free(). In between, this rank has its shard of them."""

    def __init__(self, params):
        """params: fp32 parameters, equal on all ranks."""
        ### BEGIN SOLUTION
        # Why so: the buffer is made once and never replaced. Who has a view of it (the parameters, and what autograd saved) keeps it, and
        # what comes and goes is the memory behind it.
        # The usual mistake: param.data = torch.empty(0), or dropping the buffer. Outside of training, memory goes down and all seems well. After
        # a forward autograd still has the old views, so the memory stays until backward, and there a second copy is gathered.
        self.flat_P, self.shard_S = shard_unit(params)
        self.free()
        ### END SOLUTION

    def gather(self):
        """All weights, from all ranks. A call of all ranks."""
        ### BEGIN SOLUTION
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        all_gather(self.flat_P, self.shard_S)
        ### END SOLUTION

    def free(self):
        """Give the memory of the full weights back."""
        ### BEGIN SOLUTION
        self.flat_P.untyped_storage().resize_(0)
        ### END SOLUTION

# %%
check("zero3.gather_and_free", Unit)

# %% [markdown]
# ## 3. Hooks
#
# `place_hooks(module, gather, free)` is called once for each unit: for the model, the *root*, and for each of
# its blocks. `gather` and `free` take no arguments and return nothing. From then on, each time the module is
# called,
#
# - `gather()` runs before its forward, and
# - `free()` after it, also if the forward raises: a later call may go well, and who catches the exception
#   should not be left with a model that is there in full. The exception itself reaches the caller.
#
# The same holds for evaluation, under `torch.no_grad()`. Inputs and outputs stay as they are. In backward
# nothing is called yet: that is exercise 4.
#
# Example, a root with two blocks: gather root, gather 0, forward 0, free 0, gather 1, forward 1, free 1, free
# root. If forward 1 raises, it is the same list.
#
# Checked in one process: the order of events, in training (backward too) and evaluation, after an exception,
# for a block that is used twice or called by itself, for inputs by keyword and outputs of any type.

# %%
def place_hooks(module, gather, free):
    """From now on gather() runs before each forward of the module, and free() after it."""
    ### BEGIN SOLUTION
    # Why so: two hooks are all, because a module's hooks run for each call, whatever calls it and in which mode. Nested units need no more: the
    # root's forward encloses those of its blocks, and so do its two moments.
    # The usual mistake: forgetting always_call. torch skips forward hooks when forward raises, and after the one bad batch that a
    # training loop catches, the units on the way to the exception stay gathered.
    module.register_forward_pre_hook(lambda module, args: gather())
    module.register_forward_hook(lambda module, args, output: free(), always_call=True)
    ### END SOLUTION

# %%
check("zero3.hooks", place_hooks)

# %% [markdown]
# ## 4. The whole unit
#
# `ShardedUnit(module, params)` is made for the root, and for each block inside it; `params` are those that no
# other unit has. Each is trainable and gets a gradient in every backward. Modules take and return one tensor.
# After that, calling the model and `loss.backward()` do everything; your answers so far may help.
#
# - In forward a unit's weights are there from before it to after it, as in exercise 3, also if it raises.
# - In backward they come back when the gradient of the unit's output is ready: a hook on that tensor.
# - When the unit's last gradient has arrived, `self.grad_S` becomes this rank's shard of the mean over the
#   ranks, every `.grad` is None again, and the weights are freed. (`self.shard_S` is updated by the caller.)
#
# Example, a root with blocks 0 and 1. Forward gathers root, 0, 1. Backward gathers root, gathers 1, reduces 1,
# gathers 0, reduces 0, reduces root: 3P elements for each unit, (N − 1)/N of which a rank sends.
#
# Checked on 2 and 3 ranks: gradients of two steps; this order; what is there at each moment; an evaluation; a
# block that raises; bytes after forward and backward, and at most those of the root and two blocks in between.

# %%
class ShardedUnit(Unit):
    """A module whose weights exist while it works, and whose gradients become shards."""

    def __init__(self, module, params):
        """params: fp32 parameters, equal on all ranks."""
        ### BEGIN SOLUTION
        # Why so: a unit's gradients are complete when the last of them is, and then nothing in its backward is left that could need a weight: so
        # one hook on each parameter counts them. The way in is the output's own hook, which runs before autograd goes through the unit.
        # The usual mistake: keeping the weights from forward to backward. It saves a third of the traffic and every value is right, but
        # when forward ends, all units are there at once: that is ZeRO-2, with an all-gather in another place.
        super().__init__(params)
        self.params, self.arrived, self.grad_S = params, 0, None
        place_hooks(module, self.gather, self.free)
        module.register_forward_hook(self.await_backward)
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_gradient)
        ### END SOLUTION

    ### BEGIN SOLUTION
    def await_backward(self, module, args, output):
        if output.requires_grad:  # not in an evaluation
            output.register_hook(lambda grad: self.gather())

    def on_gradient(self, param):
        self.arrived += 1
        if self.arrived == len(self.params):
            self.arrived = 0
            self.reduce()
            self.free()

    def reduce(self):
        grad_P = torch.zeros(self.flat_P.shape)
        torch.cat([param.grad.flatten() for param in self.params], out=grad_P[: sum(map(torch.numel, self.params))])
        for param in self.params:
            param.grad = None
        self.grad_S = torch.empty(self.shard_S.shape)
        reduce_scatter(self.grad_S, grad_P)
        self.grad_S /= dist.get_world_size()
    ### STUB
    # # Your own methods.
    ### END SOLUTION

# %%
check("zero3.backward", ShardedUnit)

# %% [markdown]
# ## 5. A weight that two units use
#
# A language model's embedding and head often share one weight. If both are units, who gathers it, and who
# reduces its gradient, which is complete only when both have been through backward? The answer: it belongs
# to **the lowest unit that contains all its uses**.
#
# `owners(model, units)` says so for each parameter. `units` is a list of module paths as `named_modules()`
# gives them; "" is the root, and is always among them. Units may be nested. It returns a dict: each parameter
# → the path of its unit. A parameter is used by every module that has it, at every path of that module.
#
# Example: a model has an `embed`, `layers.0`, `layers.1`, and a `head` with `embed`'s weight. With units "",
# "embed", "layers.0", "layers.1" and "head" the shared weight belongs to "", the head's bias to "head".
#
# Checked without ranks: plain, tied, nested, frozen; a module that stands at two paths; eleven layers.

# %%
def owners(model, units):
    """{parameter: path of the unit that gathers and reduces it}, for all parameters of the model."""
    ### BEGIN SOLUTION
    # Why so: a unit that contains all uses is there during all of them, in forward and in backward, so it gathers the weight once, and when it
    # reduces, autograd has added all contributions. The lowest one keeps it for the shortest time.
    # The usual mistake: named_parameters(), which names a shared parameter once. Its first path makes the embedding the owner: its gradient
    # is reduced there, right by luck; but the head computes with a weight that has been freed.
    uses = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(param, []).append(path)

    def contains(unit, path):
        return unit == "" or path.startswith(unit + ".")

    deepest_first = sorted(units, key=len, reverse=True)
    return {
        param: next(unit for unit in deepest_first if all(contains(unit, path) for path in paths))
        for param, paths in uses.items()
    }
    ### END SOLUTION

# %%
check("zero3.tied", owners)

# %% [markdown]
# ## 6. Say the number
#
# What does ZeRO-3 hold, save, send? 1 GB is 10⁹ bytes, B is 10⁹, and 1 % off is right. A wrong answer is
# worked out line by line. `ask("zero3.number", seed=1)` gives other figures, and other questions too;
# `check` judges by those asked last.

# %%
ask("zero3.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: all 16 bytes are divided by N, and a micro-batch moves the weights twice and the gradients once.
# The usual mistake: carrying over from ZeRO-2 that the weights are gathered once a step. They are gone after each forward and each
# backward, so every micro-batch pays for all three.
answer = 16 * 70 / 8
### END SOLUTION

# %%
check("zero3.number", answer)

# %% [markdown]
# ## 7. Find the bug
#
# Fine-tuning: a model's first and its last layer are trained, the blocks between them are frozen. Someone
# makes each of them a ZeRO-3 unit, with `shard(module)`; a unit is trained or frozen as a whole. It runs
# without an error on any number of ranks, and all losses are those of one process. Read it before you run it.
#
# What would one *measure* that shows the bug? Answer that, then mend it. What stays: what `shard` returns, and
# what is sent.
#
# Checked on 2 and 3 ranks: gradients, losses; what is sent; which units are there at each moment; bytes.

# %%
ask("zero3.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "c"
### END SOLUTION

# %%
def shard(module):
    """Make a module, of one tensor in and one out, a ZeRO-3 unit. Returns this rank's weights_S and grad_S in one object."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    params, arrived = list(module.parameters()), []
    flat = torch.cat([param.data.flatten() for param in params])
    flat_P = F.pad(flat, (0, -len(flat) % world_size))
    for param, place in zip(params, flat_P[: len(flat)].split([param.numel() for param in params])):
        param.data = place.view_as(param)
    shards = SimpleNamespace(weights_S=flat_P.chunk(world_size)[rank].clone(), grad_S=None)
    storage, nbytes = flat_P.untyped_storage(), flat_P.nbytes

    def gather(*_):
        storage.resize_(nbytes)
        all_gather(flat_P, shards.weights_S)

    def free(*_):
        storage.resize_(0)

    ### BEGIN SOLUTION
    # Why so: when the gradient of a unit's input is ready, autograd is through with the unit, whether or not that has gradients of its own. (The input
    # of a trained unit may need no gradient, so the two kinds have two ways out.)
    # The usual mistake is the bug itself: what is freed when gradients arrive is not freed where none arrive. No value gives it away, frozen weights
    # do not even go stale; the next forward frees them, and until then the model that did not fit is there in full.
    def await_backward(module, args, output):
        if output.requires_grad:
            output.register_hook(gather)
            if not params[0].requires_grad:
                args[0].register_hook(free)
    ### STUB
    # def await_backward(module, args, output):
    #     if output.requires_grad:
    #         output.register_hook(gather)
    ### END SOLUTION

    def on_gradient(param):
        arrived.append(param)
        if len(arrived) == len(params):
            flat = torch.cat([param.grad.flatten() for param in params])
            shards.grad_S = torch.empty_like(shards.weights_S)
            reduce_scatter(shards.grad_S, F.pad(flat, (0, -len(flat) % world_size)))
            shards.grad_S /= world_size
            for param in params:
                param.grad = None
            arrived.clear()
            free()

    free()
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free, always_call=True)
    module.register_forward_hook(await_backward)
    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(on_gradient)
    return shards

# %%
check("zero3.find_the_bug", observed, shard)
