# %% [markdown]
# # 00 Collectives: exercises
#
# The ring of the lesson turns to the right. Here you build one that turns to the **left**: every rank sends to rank
# (r−1) mod N and receives from rank (r+1) mod N. Wires carry both directions at once, so a second ring that turns the
# other way costs the first one nothing.
#
# A check runs your function on ranks of its own, on the CPU. It gives rank r digits times 10ʳ, other digits each time,
# so that a sum says whose values are in it: 725 has 5 from rank 0, 20 from rank 1, 700 from rank 2; 705 lacks rank 1's.
# What nobody has written is NaN. To try a function yourself before you check it:
#
# ```python
# mz.launch(lambda rank: ring_reduce_scatter(torch.tensor([1.0, 2.0, 3.0]) * 10**rank), 3)
# ```

# %%
import torch
import torch.distributed as dist

import minizero as mz
from minizero.course import ask, check, hint

# %% [markdown]
# ## 1. Warm-up: which chunk, in which step?
#
# A ring reduce-scatter on N ranks takes N−1 steps, numbered 0 … N−2. In each of them rank r sends one chunk to its left
# neighbour and receives one from its right neighbour. It adds what arrives to its own copy of that chunk, and sends that
# chunk in the next step. The last chunk that rank r receives is number r: its sum is then complete.
#
# `ring_step(rank, step, world_size)` returns `(send, receive)`, the numbers of the two chunks, both from 0 to N−1.
#
# Example, three ranks: rank 0 sends chunk 1 and receives chunk 2 in step 0, sends chunk 2 and receives chunk 0 in
# step 1.
#
# Checked: every rank and step on 2 to 5 ranks.


# %%
def ring_step(rank, step, world_size):
    """The numbers (send, receive) of the chunks that `rank` sends and receives in `step`."""
    ### BEGIN SOLUTION
    # Why so: work backwards from the end. What arrives in the last step, N - 2, is chunk `rank`, that is rank + N;
    # one step earlier it is one less, because a chunk moves one rank to the left in each step. So rank + step + 2
    # arrives, and the chunk sent is the one that arrived a step before.
    # The usual mistake: starting with the rank's own chunk, as an all-gather does. All sums come out right, and each
    # of them ends one rank away from where it is looked for.
    return (rank + step + 1) % world_size, (rank + step + 2) % world_size
    ### END SOLUTION


# %%
check("collectives.ring_step", ring_step)

# %% [markdown]
# ## 2. Reduce-scatter
#
# `ring_reduce_scatter(x)` runs on every rank at the same time. `x` is a flat tensor of P elements, P divisible by N, and
# you may overwrite it. Rank r returns chunk r of the sum over the ranks, a tensor of P/N elements.
#
# Example, three ranks with [1, 2, 3], [10, 20, 30] and [100, 200, 300]: they return [111], [222] and [333].
#
# Use `isend` and `irecv` (or `batch_isend_irecv`), no collective; those are what you are building. Rank and world size
# come from `dist.get_rank()` and `dist.get_world_size()`.
#
# Checked on 2 and 3 ranks: the values; N−1 sends of P/N elements, to the left neighbour only; every receive waited for
# before the next step, every send before the function returns; no tensor touched between its start and its wait.


# %%
def ring_reduce_scatter(x):
    """x [P], P divisible by world_size. Returns chunk number `rank` of the sum over the ranks, [P / world_size]."""
    ### BEGIN SOLUTION
    # Why so: one buffer is enough, since a step is over before the next begins. Both calls are started before either
    # is waited for, so that no rank stands in a receive while its neighbour does the same; as one batch, because NCCL
    # would otherwise run them one after the other.
    # The usual mistake: keeping the sums apart from x and going on sending chunks of x. On two ranks that is right,
    # since a chunk makes a single hop; on three, each sum lacks a rank.
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        send, receive = ring_step(rank, step, n)
        to_left = dist.P2POp(dist.isend, chunks[send], (rank - 1) % n)
        from_right = dist.P2POp(dist.irecv, arriving, (rank + 1) % n)
        for work in dist.batch_isend_irecv([to_left, from_right]):
            work.wait()
        chunks[receive].add_(arriving)
    return chunks[rank]
    ### END SOLUTION


# %%
check("collectives.ring_reduce_scatter", ring_reduce_scatter)

# %% [markdown]
# ## 3. All-gather
#
# `ring_all_gather(shard)` gets a flat tensor of S elements, as many on every rank: rank r's *shard* is chunk r of the
# whole. Each rank returns the whole, N·S elements; its shard stays as it is.
#
# Example, three ranks with [1], [20] and [300]: each of them returns [1, 20, 300].
#
# Again no collectives, and the ring turns to the left. `ring_step` is of no direct use: here the trip begins at the owner.
#
# Checked on 2 and 3 ranks: the values and their order; N−1 sends of S elements, to the left neighbour only; every
# receive waited for before the next step, every send before the function returns; no tensor touched before its wait.


# %%
def ring_all_gather(shard):
    """shard [S] is chunk number `rank`. Returns all chunks in order, [world_size * S]."""
    ### BEGIN SOLUTION
    # Why so: what arrives is received straight into its place in the result, and sent on from there: no buffer, no
    # second copy.
    # The usual mistake: collecting what arrives in a list and concatenating it. Rank 1 receives chunk 2 first, so the
    # whole would begin at another chunk on every rank; only rank 0 has it right.
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = shard.new_empty(n * shard.numel())
    chunks = whole.chunk(n)
    chunks[rank].copy_(shard)
    for step in range(n - 1):
        to_left = dist.P2POp(dist.isend, chunks[(rank + step) % n], (rank - 1) % n)
        arriving = chunks[(rank + step + 1) % n]
        from_right = dist.P2POp(dist.irecv, arriving, (rank + 1) % n)
        for work in dist.batch_isend_irecv([to_left, from_right]):
            work.wait()
    return whole
    ### END SOLUTION


# %%
check("collectives.ring_all_gather", ring_all_gather)

# %% [markdown]
# ## 4. All-reduce of anything
#
# `all_reduce(x)` replaces `x` by the sum over the ranks, in place; what it returns is not looked at. `x` is contiguous and
# of any shape and floating dtype, the same on all ranks; its number of elements need not be divisible by N and may be
# smaller than N. Build it from your two functions, and find out what to do with the awkward sizes.
#
# Example, three ranks with [1, 2], [10, 20] and [100, 200]: afterwards each `x` is [111, 222].
#
# Checked: `x` itself, also through a view of it that was made before; 4 elements on 2 ranks; 7 elements, a 2 × 2 matrix
# in float64 and 2 elements in bfloat16 on 3 ranks; no collectives; 2(N−1) sends of ⌈P/N⌉ elements, in the dtype of `x`.


# %%
def all_reduce(x):
    """x, of any shape, becomes the sum over the ranks, in place."""
    ### BEGIN SOLUTION
    # Why so: zeros at the end change no sum, and all chunks get one size. They cost at most N - 1 elements, once.
    # Everything in this course that cuts a flat tensor into shards pads it in this way.
    # The usual mistake: numel // world_size, which drops the remainder: the last elements are summed by nobody, and
    # with fewer elements than ranks nothing is summed at all.
    n = dist.get_world_size()
    padded = x.new_zeros(-(-x.numel() // n) * n)
    padded[: x.numel()] = x.flatten()
    whole = ring_all_gather(ring_reduce_scatter(padded))
    x.copy_(whole[: x.numel()].view(x.shape))
    ### END SOLUTION


# %%
check("collectives.all_reduce", all_reduce)

# %% [markdown]
# ## 5. Say the number
#
# A lower bound, as in the interview corner of the lesson: full bandwidth all the time, no latency, nothing else on the
# wire. Bandwidth is what one rank can send while it receives as much. An answer within 1 % is right. A wrong one is
# worked out for you, and the next has to be to fresh figures: change the seed.

# %%
ask("collectives.number", seed=0)

# %%
### BEGIN SOLUTION
# Why so: parameters × bytes each × (N - 1)/N is one trip; an all-reduce makes two; then divide by the bandwidth.
# The usual mistake: one trip only. A gradient goes round twice, first to be summed and then to be handed out.
answer = 2 * 31 / 32 * 2 * 7 / 50 * 1000
### END SOLUTION

# %%
check("collectives.number", answer)

# %% [markdown]
# ## 6. Find the bug
#
# `average(x)` replaces a flat `x`, P divisible by N, by the mean over the ranks, in place. Its ring turns to the right,
# like the lesson's. It runs without an error, and on two ranks the mean is right. Its author had read that a tensor on
# its way out may not be written, and so adds in a copy.
#
# First say what you would measure on **three** ranks. Then mend it.

# %%
ask("collectives.find_the_bug")

# %%
### BEGIN SOLUTION
# Why so: on three ranks chunk 0 leaves rank 1, gets rank 2's values added in rank 2's copy, and then rank 2 sends its
# own original values. Rank 0 adds those to its own: rank 1 is missing. The second loop hands that out to everybody
# alike.
# The usual mistake: expecting the ranks to differ. They agree perfectly, which is why comparing ranks never finds this
# bug.
observed = "d"
### END SOLUTION


# %%
def average(x):
    """x [P], P divisible by world_size, becomes the mean over the ranks, in place."""
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    total = x.clone()
    chunks, sums = x.chunk(n), total.chunk(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(n - 1):
        send, receive = (rank - step - 1) % n, (rank - step - 2) % n
        ### BEGIN SOLUTION
        # Why so: what travels must be the sum so far, which grows in `sums`. No tensor is written while it is sent:
        # this step adds to chunk `receive`, and that is another one.
        # The usual mistake: sending all of x to everybody, and adding. The mean is right, and the traffic grows with N.
        sending = dist.isend(sums[send], right)
        ### STUB
        # sending = dist.isend(chunks[send], right)
        ### END SOLUTION
        dist.recv(arriving, left)
        sending.wait()
        sums[receive].add_(arriving)
    for step in range(n - 1):
        send, receive = (rank - step) % n, (rank - step - 1) % n
        sending = dist.isend(sums[send], right)
        dist.recv(sums[receive], left)
        sending.wait()
    x.copy_(total / n)


# %%
check("collectives.find_the_bug", observed, average)
