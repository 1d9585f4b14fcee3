# %% [markdown]
# # 05 Prefetch: exercises
#
# The units of ZeRO-3 are here already. What is left to decide is *when*: you write the order in which weights are
# asked for, waited for and freed, and gradients sent off. `mz.Zero3Prefetch` may be read, but not used.
#
# The next cell has a `Unit`: one layer, of whose weights a rank keeps a shard.
#
# ```python
# unit.gather()           # asks all ranks for its weights, and returns at once: they are on their way
# unit.wait()             # now they are there
# y = unit(x)             # its forward
# dx = unit.backward(dy)  # its backward: the gradient of its input; its own gradients are then on this rank, in full
# unit.free()             # the weights' memory is given back
# unit.reduce()           # asks all ranks for the mean of its gradients, and returns at once
# unit.land()             # now unit.grad_S has this rank's shard of it, and the full gradients are gone
# ```
#
# `unit.P` is how many parameters it has, padding included. A unit knows no order: to use weights that were not waited
# for, or to free them while they arrive, is your mistake, and in the checks it is reported.
#
# The link carries one thing after the other, in the order in which they were asked for. All ranks call the same. To
# try something before you check it:
#
# ```python
# def attempt(rank):
#     torch.manual_seed(0)
#     units = [Unit(torch.nn.Linear(2, 2)) for _ in range(3)]
#     return forward(units, torch.ones(1, 2))
#
# mz.launch(attempt, 2)      # what rank 0 returns, and rank 1
# ```

# %%
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F

import minizero as mz
from minizero.course import ask, check, hint

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Unit:
    """A layer whose weights come and go: exercise 2 of lesson 04, and asynchronous."""

    def __init__(self, layer):
        """layer: a module that is equal on all ranks."""
        self.layer, self.params = layer, list(layer.parameters())
        flat = torch.cat([param.data.flatten() for param in self.params])
        self.flat_P, start = F.pad(flat, (0, -len(flat) % dist.get_world_size())), 0
        for param in self.params:
            param.data = self.flat_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        self.P, self.grad_S = len(self.flat_P), None
        self.shard_S = self.flat_P.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.free()

    def gather(self):
        self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
        self.work = all_gather(self.flat_P, self.shard_S, async_op=True)

    def wait(self):
        self.work.wait()

    def free(self):
        self.flat_P.untyped_storage().resize_(0)

    def __call__(self, x):
        self.x = x.detach().requires_grad_()
        self.y = self.layer(self.x)
        return self.y.detach()

    def backward(self, dy):
        self.y.backward(dy)
        return self.x.grad

    def reduce(self):
        grad = torch.cat([param.grad.flatten() for param in self.params]) / dist.get_world_size()
        self.grad_P, self.grad_S = F.pad(grad, (0, self.P - len(grad))), torch.empty_like(self.shard_S)
        for param in self.params:
            param.grad = None
        self.reduction = reduce_scatter(self.grad_S, self.grad_P, async_op=True)

    def land(self):
        self.reduction.wait()
        self.grad_P = self.reduction = None

# %% [markdown]
# ## 1. What comes next
#
# A model does what it did the last time, mostly. `Plan()` writes down the order in which units are executed.
#
# - `at(unit, depth)` is called when `unit` is executed, and returns a list: the units that come next, at most
#   `depth` of them, **if this time has been like the last one so far**; else an empty list. Once it was not, nothing
#   more is said until this time is over: a guess would be gathered in vain.
# - `end()` says that this time is over. Its order, whatever it was, is what the next time is held against.
#
# A unit may be executed several times. The first time nothing is known. Nothing comes after the last one.
#
# Example: the last time was a, b, a, c. This time `at("a", 2)` is ["b", "a"], `at("b", 2)` is ["a", "c"],
# `at("a", 2)` is ["c"], `at("c", 2)` is []. After `end()`, `at("b", 2)` is [], and so is `at("a", 2)` after it.
#
# Checked without ranks: depths 1 to 3, units used twice, orders that change, break off, go on for longer.

# %%
class Plan:
    """The order in which units were executed the last time, and how far this time has been like it."""

    def __init__(self):
        ### BEGIN SOLUTION
        # Why so: the place in the order says what comes next, not the unit, which may stand at several places. To compare all that was done so far with
        # the beginning of the last time is one line, and it stays false once it was.
        # The usual mistake: a dict from each unit to the one after it. A unit that runs twice has two successors, and keeps one; and after a
        # detour such a dict goes on guessing.
        self.last, self.this = [], []
        ### END SOLUTION

    def at(self, unit, depth=1):
        """The unit is executed now. The list of those that come next, at most `depth`; [] if nobody knows."""
        ### BEGIN SOLUTION
        self.this.append(unit)
        done = len(self.this)
        return self.last[done : done + depth] if self.this == self.last[:done] else []
        ### END SOLUTION

    def end(self):
        """This time is over."""
        ### BEGIN SOLUTION
        self.last, self.this = self.this, []
        ### END SOLUTION

# %%
check("prefetch.order", Plan)

# %% [markdown]
# ## 2. One ahead
#
# `forward(units, x)` runs the units one after the other, in the order of the list, and returns the output of the last.
#
# - While a unit computes, the weights of the next one are on their way: asked for, and not waited for yet.
# - A unit is freed as soon as it has computed, before anything more is asked for: at no moment do more than
#   two units' weights take memory.
#
# Each unit is gathered once: what a rank sends stays what ZeRO-3 sends.
#
# Example, units 0 and 1. ZeRO-3: gather 0, wait 0, forward 0, free 0, gather 1, wait 1, forward 1, free 1. With
# prefetch: gather 0, gather 1, wait 0, forward 0, free 0, wait 1, forward 1, free 1.
#
# Checked on 2 and 3 ranks: the output against one process; what is on its way while each unit computes; bytes
# sent; whose weights are there, and bytes at the peak.

# %%
def forward(units, x):
    """The output of all units, with the next one's weights on their way while one computes."""
    ### BEGIN SOLUTION
    # Why so: the only thing that moves is one gather, from behind the computing of the unit before to in front of it. It also goes in front of this unit's
    # own wait, so that the link has something to do when this unit's weights have arrived.
    # The usual mistake: gather() and wait() as a pair. The gather then comes early and so does the wait, and the rank stands still as long as before.
    units[0].gather()
    for place, unit in enumerate(units):
        for following in units[place + 1 : place + 2]:
            following.gather()
        unit.wait()
        x = unit(x)
        unit.free()
    return x
    ### END SOLUTION

# %%
check("prefetch.ahead", forward)

# %% [markdown]
# ## 3. In backward
#
# `backward(units, grad)` goes through the units from the last to the first. All have been through forward, and are
# freed. `grad` is the gradient of the last one's output; the gradient of the first one's input is returned.
#
# - While unit i goes backward, the weights of i − 1 are on their way, and so is the reduction of i + 1. All reductions
#   before that have landed: full gradients are large.
# - The link is a queue. Of these two the gather is asked for **first**: it is waited for next, the reduction is not.
# - As before, a unit is freed when it is through, and two units' weights are there at most. In the end all is landed.
#
# Example, units 0 and 1: gather 1, gather 0, wait 1, backward 1, free 1, reduce 1, wait 0, backward 0, free 0,
# land 1, reduce 0, land 0.
#
# Checked on 2 and 3 ranks: grad_S and what is returned, against one process; order; memory; bytes sent.

# %%
def backward(units, grad):
    """The gradient of the first unit's input. Each unit's grad_S is then this rank's shard of the mean gradient."""
    ### BEGIN SOLUTION
    # Why so: at each unit the rank asks for what it needs soonest, the next weights, then for what can wait, the reduction. Both travel while the
    # unit computes. The reduction before has had the time of a whole unit, so its land() costs nothing.
    # The usual mistake: reduce() as soon as a unit's gradients are there. It is in front of the next gather in the queue, and the unit after next waits
    # for both.
    order, reducing = units[::-1], []
    order[0].gather()
    for place, unit in enumerate(order):
        for following in order[place + 1 : place + 2]:
            following.gather()
        if place:
            send_off(order[place - 1], reducing)
        unit.wait()
        grad = unit.backward(grad)
        unit.free()
    send_off(order[-1], reducing)
    reducing.pop().land()
    return grad


def send_off(unit, reducing):
    """Its gradients leave, when those that are under way have landed."""
    while reducing:
        reducing.pop().land()
    unit.reduce()
    reducing.append(unit)
    ### END SOLUTION

# %%
check("prefetch.backward", backward)

# %% [markdown]
# ## 4. The limit
#
# `forward(units, x, depth, max_live)`: up to `depth` units are ahead, and together they have at most `max_live`
# parameters (`unit.P`). A unit is ahead when it was asked for and its turn has not come.
#
# - When the turn of a unit has come, ask for it if it is not on its way; then for those after it, in order, as many
#   as may be ahead. The first that does not fit ends it: no smaller one behind it goes before it.
# - The unit whose turn it is does not count. So one that is larger than `max_live` is never ahead, and still runs.
# - When it has computed it is freed, before anything more is asked for.
#
# Example, depth 2, max_live 8, P = 4, 4, 8, 4. When unit 0 computes, 1 is on its way (1 and 2 would be 12); when 1
# computes, 2; when 2 computes, 3. With max_live 4 they are 1; none; 3.
#
# Checked on 2 ranks: what is ahead while each unit computes, for depths 0 to 3; the limit at each moment; outputs;
# that each unit is gathered once.

# %%
def forward_within(units, x, depth, max_live):
    """The output of all units, with at most `depth` units and `max_live` parameters ahead."""
    ### BEGIN SOLUTION
    # Why so: what is ahead is a list, from which a unit is taken when its turn comes. Then the limit is a sum over that list, at the one place
    # where something is added to it.
    # The usual mistake: counting what was asked for, without taking off what has been used. The first units fill the limit, and the rest of the
    # model runs on demand.
    ahead = []
    for place, unit in enumerate(units):
        if unit in ahead:
            ahead.remove(unit)
        else:
            unit.gather()
        for following in units[place + 1 + len(ahead) : place + 1 + depth]:
            if sum(each.P for each in ahead) + following.P > max_live:
                break
            following.gather()
            ahead.append(following)
        unit.wait()
        x = unit(x)
        unit.free()
    return x
    ### END SOLUTION

# %%
check("prefetch.limit", forward_within)

# %% [markdown]
# ## 5. Nothing stale, nothing in flight
#
# Who runs the model calls `enter(unit)`, computes, calls `leave(unit)`, for one unit after another; and `end()` when
# the pass is over. The order is not known before. A pass may go another way than the last, be an evaluation that
# stops early, or raise: then `leave()` is not called for the unit that raised, but `end()` is.
#
# - After `enter(unit)` its weights are there. The unit that `Plan` (exercise 1, depth 1) says comes next is on its way.
# - After `leave(unit)` it is freed. After `end()` no unit is there or on its way: next, the optimizer may change the
#   shards, and what was gathered before is old. What is under way cannot be called back; it has to be waited for.
# - A unit that raised had entered, and belongs to the order. No unit runs twice in succession.
#
# Example: the last pass was 0, 1, 2, this one is 0, 2. enter(0): gather 0, gather 1, wait 0. enter(2): wait 1,
# free 1, gather 2, wait 2. (The wait and the free of 1 may come as late as `end()`.)
#
# Checked on 2 ranks, passes with steps between them: outputs with the weights of now; what is ahead; what is left.

# %%
class Prefetcher:
    """Asks for the unit that came next the last time."""

    def __init__(self):
        ### BEGIN SOLUTION
        # Why so: at most two units are anything but at rest, the one that works and the one that is ahead, so two names are all the state there is;
        # end() need not know why a pass is over. drop() is the one way out for weights that nobody has come for.
        # The usual mistake: keeping what was asked for in vain, since it may be of use in the next pass. Then there is a step in between, and that
        # unit trains on with the weights of before: no error, no wrong shape, only a loss that is a little off.
        self.plan, self.ahead, self.working = Plan(), None, None
        ### END SOLUTION

    def enter(self, unit):
        """The unit's turn has come."""
        ### BEGIN SOLUTION
        if unit is not self.ahead:
            self.drop()
            unit.gather()
        self.ahead, self.working = None, unit
        for following in self.plan.at(unit, 1):
            following.gather()
            self.ahead = following
        unit.wait()
        ### END SOLUTION

    def leave(self, unit):
        """It has computed."""
        ### BEGIN SOLUTION
        unit.free()
        self.working = None
        ### END SOLUTION

    def end(self):
        """The pass is over, to its end or by an exception."""
        ### BEGIN SOLUTION
        self.drop()
        if self.working is not None:
            self.leave(self.working)
        self.plan.end()

    def drop(self):
        if self.ahead is not None:
            self.ahead.wait()
            self.ahead.free()
            self.ahead = None
        ### END SOLUTION

# %%
check("prefetch.stale", Prefetcher)

# %% [markdown]
# ## 6. Say the number
#
# How long does a gather take, how long a pass, how much of the communication is hidden? By the α–β model: a message of
# n bytes takes α + n/β seconds, and a ring of N ranks needs N − 1 of them, one after the other. 1 GB is 10⁹ bytes,
# and half a percent off is right. A wrong answer is worked out line by line. `ask("prefetch.number", seed=1)` gives
# other figures, and other questions too; `check` judges by those asked last.

# %%
ask("prefetch.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: the first gather has nothing in front of it to hide behind. From then on a unit takes as long as the longer of the two, the computing of
# one or the gather of the next; and at the end there is one computing for which no gather is under way.
# The usual mistake: forgetting the first gather, or adding where the two run side by side.
answer = 5 + 12 * 8
### END SOLUTION

# %%
check("prefetch.number", answer)

# %% [markdown]
# ## 7. Find the bug
#
# Someone has written exercise 2 for any depth. It runs without an error, all losses are those of one process, and a
# trace shows that each gather is asked for `depth` units early. Yet a step is no shorter than before. (The link
# delivers first what was asked for first.) Read it before you run it.
#
# What would one *measure* that shows the bug? Answer that, then mend it. What stays: which units are ahead, when they
# are asked for, and what is sent.
#
# Checked on 2 and 3 ranks, depths 1 and 2: outputs; what is there and what is on its way while each unit computes;
# that everything is waited for; bytes sent; memory.

# %%
ask("prefetch.find_the_bug")

# %%
### BEGIN SOLUTION
observed = "c"
### END SOLUTION

# %%
def forward_ahead(units, x, depth=1):
    """The output of all units, with `depth` units on their way while one computes."""
    asked, coming = [], iter(units)

    def ask_for(count):
        for unit in islice(coming, count):
            unit.gather()
            asked.append(unit)

    ask_for(depth)
    for unit in units:
        ask_for(1)
        ### BEGIN SOLUTION
        # Why so: what was asked for first is needed first, so `asked` is a queue: in at the end, out at the front.
        # The usual mistake is the bug itself: pop() takes what was asked for last. The link being a queue, too, this unit's own weights are there by then, so no
        # number is wrong; but the rank has waited for the next unit's as well, and they had nothing to hide behind. On a link that keeps no order the numbers are
        # wrong now and then.
        asked.pop(0).wait()
        ### STUB
        # asked.pop().wait()
        ### END SOLUTION
        x = unit(x)
        unit.free()
    return x

# %%
check("prefetch.find_the_bug", observed, forward_ahead)
