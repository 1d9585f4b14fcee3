# %% [markdown]
# # 01 DDP: every rank keeps everything
#
# Each rank holds the whole model and reads its own rows of the batch. One thing has to be agreed before anybody takes a step: the gradient.
#
# ```
#           its own rows                                          the same on every rank
# rank 0    0 … 7     →  forward  →  backward  ─┐
#                                               ├─ all-reduce ─→  mean gradient  →  step
# rank 1    8 … 15    →  forward  →  backward  ─┘
# ```
#
# That is *distributed data parallel*, DDP, and the two arrows into the all-reduce are the whole subject. When do they leave, in how many pieces, how
# many bytes are they, and what do they cost in memory? Each of the nine sections asks for a number. Write yours down before you run the cell.

# %% tags=["nbval-ignore-output"]
import functools
import inspect
import itertools
import textwrap
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import minizero as mz
from minizero import data
from minizero.lens import plots
from minizero.model import GPT
from minizero.parts.bucket import partition

torch.set_num_threads(1)  # as in every rank: this process is our reference, and adds in the same order
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. Two ranks that do not talk: how far apart do they end?
#
# The simplest parallel training is no communication at all. Two ranks start from the same weights and train for 32 steps on Shakespeare. Of every batch of
# 16 rows rank 0 reads 0 to 7 and rank 1 reads 8 to 15.
#
# `data.batches("train", 16, 64, steps, rank=r, world_size=N)` yields pairs (x, y): rank r's N-th part of the same 16 rows, each 64 characters long. The
# model is a GPT of the package, `"nano"`: two blocks, 113,152 parameters.
#
# **Predict.** How far is rank 0 from rank 1 after 32 steps, as a share of the way that it has come from the start? Most people say a few per cent:
# it is the same author, after all.

# %%
def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def train(rank, world_size, steps, average=None, optimizer=sgd, seed=0):
    """What one rank does. Returns its losses, and its weights as one long vector."""
    torch.manual_seed(seed)
    model = GPT.preset("nano")
    optimizer = optimizer(model.parameters())
    losses = []
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        loss = model(x, y)
        loss.backward()
        if average is not None:
            average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def distance(a, b):
    return (a - b).norm().item()


def equal(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-6)


start = train(0, 1, steps=0)[1]
after = [0, 1, 2, 4, 8, 16, 32]
silent = {steps: [weights for _, weights in on(2).run(train, 2, steps)] for steps in after}
way = {steps: distance(silent[steps][0], start) for steps in after}
apart = {steps: distance(*silent[steps]) for steps in after}
print("rank 0 to rank 1, as a share of rank 0's way from the start")
print(f"after  1 step  {apart[1] / way[1]:.0%}")
print("after 32 steps")
print(f"{apart[32] / way[32]:.0%}")

# %% tags=["nbval-ignore-output"]
plots.curve(
    after,
    {"rank 0 to its start": list(way.values()), "rank 0 to rank 1": list(apart.values())},
    xlabel="steps",
    ylabel="distance (norm of the difference)",
    title="Two ranks without communication",
)

# %% [markdown]
# More than a quarter. The share falls, because both ranks learn to write the same English; the distance itself only grows. No error appears: each rank trains a sound
# model on half of the data, and nobody has trained the one we asked for.
#
# So we fix what "right" means, for this lesson and the five that follow. **The reference is one process that sees all 16 rows.** What N ranks do
# together must end with *its* weights. What do they have to tell each other?

# %% [markdown]
# ## 2. Two lines that make it right: how many collectives is that?
#
# The reference's gradient is a mean over 16 rows. A mean over 16 is the mean of two means over 8:
#
# $$\frac{1}{16}\sum_{i=0}^{15} g_i \;=\; \frac12\Big(\frac18\sum_{i=0}^{7} g_i \;+\; \frac18\sum_{i=8}^{15} g_i\Big)$$
#
# where $g_i$ is the gradient of row $i$'s loss. So it is enough to average the gradients, after `backward` and before `step`.
#
# **Predict.** One step of the two-block GPT with the function below: how many collectives does it issue?

# %%
def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def naive_ops(rank):
    with mz.record_traffic() as traffic:
        train(rank, 2, steps=1, average=average_gradients)
    return traffic.ops


reference = train(0, 1, steps=32)[1]
naive = on(2).run(train, 2, 32, average_gradients)
print("same parameters as one process:", all(equal(weights, reference) for _, weights in naive))
print("collectives in one step")
print(len(on(2).run(naive_ops)[0]))

# %% [markdown]
# Right after 32 steps, on both ranks. And 29 collectives, one for each parameter tensor. We call this version *naive* DDP. It is correct, and you could ship it today.
#
# One condition hides in the formula: both halves have the same number of rows. If rank 0 has 1 valid token and rank 1 has 5, the mean of the two means is not
# the mean over 6. Then each rank divides the *sum* of its losses by the global count, 6, and the all-reduce adds without dividing.
#
# Are 29 messages many? They carry the same bytes as one large message would.

# %% [markdown]
# ## 3. Fifty-three messages or one: how much time do the same bytes take?
#
# From here on we take the preset `"tiny"`: four blocks, 53 parameter tensors, 827,648 parameters (papers call their number **Ψ**), 3.3 MB of fp32 gradients.
#
# **Predict.** Send these 3.3 MB as 53 all-reduces, then as a single one. By what factor is the second faster?

# %% tags=["nbval-ignore-output"]
def fifty_three_or_one(rank, rounds=12):
    grads = [torch.randn_like(param) for param in GPT.preset("tiny").parameters()]
    together = [torch.cat([grad.flatten() for grad in grads])]
    seconds = {53: [], 1: []}
    for tensors in [grads, together] * rounds:
        dist.barrier()
        begin = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        seconds[len(tensors)].append(time.perf_counter() - begin)
    return {count: min(times) for count, times in seconds.items()}


took = on(2).run(fifty_three_or_one)[0]
for count, seconds in took.items():
    print(f"{count:2} all-reduces: {seconds * 1e3:.1f} ms")
print("53 small ones take as long as one large one, times")
print(f"{took[53] / took[1]:.0f}")

# %% [markdown]
# An order of magnitude, on one machine. (The numbers are this computer's, at that minute, the fastest of twelve rounds; yours differ.) Every message pays a fixed price before its first byte moves, the
# *latency*. Most of our 53 pay little else:

# %%
sizes = [param.numel() for param in GPT.preset("tiny").parameters()]
print(f"gradients of at most 512 elements, of {len(sizes)}")
print(sum(size <= 512 for size in sizes))

# %% [markdown]
# So send one message? It can leave only when the *last* gradient is there, and backward is over. The way between the two is what
# the DDP paper calls **buckets**: gradients that travel together, a few MB at a time. Two rules decide which ones. They are taken in *reverse* order of registration, because backward
# reaches the last layer first, and the first bucket should be full early. And a bucket closes *before* the parameter that would overflow it.
#
# **Predict.** With buckets of 1 MiB, how many collectives remain of the 53? (PyTorch's own buckets hold 25 MiB, the first one 1 MiB, so that it leaves early.)

# %%
model = GPT.preset("tiny")
names = {param: name for name, param in model.named_parameters()}
buckets = partition(list(model.parameters()), bucket_mb=1)
for i, params in enumerate(buckets):
    megabytes = sum(param.nbytes for param in params) / 1e6
    ends = f"{names[params[0]]} … {names[params[-1]]}"
    print(f"bucket {i}   {len(params)} tensors   {megabytes:.1f} MB   {ends}")
print("collectives in one step, instead of", len(names))
print(len(buckets))

# %% [markdown]
# Four. Bucket 0 holds what backward reaches first: the head, the last LayerNorm, block 3, and one bias of block 2 that still fitted.
#
# `mz.DDP` is the package's own DDP, which this lesson takes apart. `engine = mz.DDP(model, optimizer)` wraps a model; we call the result the *engine*, and so do the lessons that follow. `engine(x, y)` is the model's
# forward, `engine.backward(loss)` its backward, after which every gradient is the mean over the ranks, and `engine.step()` the optimizer's step. In the engine a bucket is one flat tensor. When a gradient arrives it is copied to its place in the bucket, and from then on the parameter's `.grad` *is* that place. How many pieces of memory
# do the 53 gradients live in after a backward?

# %%
def pieces_of_memory(rank):
    model = GPT.preset("tiny")
    engine = mz.DDP(model, bucket_mb=1)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=2))
    engine.backward(engine(x, y))
    return len({param.grad.untyped_storage().data_ptr() for param in model.parameters()})


print("pieces of memory for 53 gradients")
print(on(2).run(pieces_of_memory)[0])

# %% [markdown]
# So no gradient exists twice, and when the mean comes back it is already where the optimizer reads it.
#
# Buckets have a second use: one of them can leave while backward is still busy with the others. How early?

# %% [markdown]
# ## 4. The first bucket leaves: how many gradients are still missing?
#
# `param.register_post_accumulate_grad_hook(fn)` calls `fn(param)` in the middle of backward, at the moment when `param.grad` is complete. The engine has such a hook on each
# parameter, and it ends with these three lines. `arrived` are the parameters whose gradients a bucket has got in this backward, `full` means all of them, and `_next` is the first bucket that has not left:

# %%
hook = inspect.getsource(mz.DDP._gradient_ready).splitlines()
print(textwrap.dedent("\n".join(hook[-3:])))

# %% [markdown]
# So a bucket leaves *in the hook of its last gradient*, but never before the bucket in front of it. Of the 53 gradients, how many does backward still have to compute when the first one leaves?
# (Under naive DDP the answer is 0.)

# %%
def watch(rank, world_size, overlap, steps=12):
    """The fastest of some steps: begin, end of forward, each gradient's time and layer, collectives."""
    model = GPT.preset("tiny")
    gradients, runs = [], []
    for name, param in model.named_parameters():
        layer = ".".join(name.split(".")[: 1 + name.startswith("blocks")])
        param.register_post_accumulate_grad_hook(
            lambda _, layer=layer: gradients.append((time.perf_counter(), layer))
        )
    engine = mz.DDP(model, bucket_mb=1) if overlap else None
    for x, y in data.batches("train", 16, 128, steps, rank=rank, world_size=world_size):
        model.zero_grad()
        gradients.clear()
        dist.barrier()
        with mz.record_traffic() as traffic:
            begin = time.perf_counter()
            loss = (engine or model)(x, y)
            forward_end = time.perf_counter()
            if overlap:
                engine.backward(loss)
            else:
                loss.backward()
                average_gradients(model)
        runs.append((traffic.ops[-1].end - begin, (begin, forward_end, list(gradients), traffic.ops)))
    return min(runs, key=lambda run: run[0])[1]


runs = {"naive": on(2).run(watch, 2, False)[0], "overlapped": on(2).run(watch, 2, True)[0]}
_, _, gradients, ops = runs["overlapped"]
events = [(when, f"gradients of {layer}") for when, layer in gradients]
events += [(op.start, f"    {op.unit}: {op.op} issued") for op in ops]
events += [(op.end, f"    {op.unit}: {op.op} waited for") for op in ops if op.op == "reduce_scatter"]
for event, times in itertools.islice(itertools.groupby(sorted(events), key=lambda each: each[1]), 10):
    print(event + f": {len(list(times))}" * event.startswith("gradients"))
print("    …")

first = ops[0].start
print("gradients still missing when bucket 0 leaves, of", len(gradients))
print(sum(when > first for when, _ in gradients))

# %% [markdown]
# Thirty-seven of 53: more than two thirds are still to come, and bucket 0 is on its way.
#
# Look at the three lines in a row. A bucket's all-reduce travels as the two halves of lesson 00, and the second half, its all-gather, is a collective of its own. It can be issued only
# when the first half is complete, and in the same place of the sequence on all ranks. When the first half completes differs from rank to rank. So the engine ties it to something that does not
# differ, the launch of the next bucket:

# %%
print(inspect.getsource(mz.DDP._launch))
print(inspect.getsource(mz.DDP._gather_launched))

# %% [markdown]
# `bucket.close()` gives the flat tensor; `_shard(bucket)` is this rank's 1/N of it, where the mean will be; `_under_way` are the buckets that have left, in order. What matters is `reduction.wait()`: **a launch
# waits for the reduce-scatter of the bucket before.** While backward computes, one reduction is under way, never two.
#
# **Predict.** Rank 1 sleeps for a second when its first gradient is there. How many of its 53 gradients does rank 0 compute meanwhile: none, all, or those of one or two buckets?

# %%
def one_is_late(rank):
    """When each gradient arrives on this rank, and when it launches each bucket."""
    model = GPT.preset("tiny")
    arrived = []

    def ready(_):
        arrived.append(time.perf_counter())
        if rank == 1 and len(arrived) == 1:
            time.sleep(1)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(ready)
    engine = mz.DDP(model, bucket_mb=1)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=2))
    with mz.record_traffic() as traffic:
        engine.backward(engine(x, y))
    return arrived, [op.start for op in traffic.ops if op.op == "reduce_scatter"]


(arrived, launched), (_, (rank_1_begins, *_)) = on(2).run(one_is_late)
print("buckets that rank 0 launches while rank 1 sleeps:", sum(when < rank_1_begins for when in launched))
print("gradients that rank 0 computes while rank 1 sleeps, of", len(arrived))
print(sum(when < rank_1_begins for when in arrived))

# %% [markdown]
# Twenty-eight: the 16 of bucket 0 and the 12 of bucket 1, while rank 1 has one. Rank 0 launches bucket 0 and computes on. It launches bucket 1 as well, and inside that launch its backward stands still until rank 1 has
# joined in bucket 0. So a rank can be two launches ahead of the slowest one, and the second does not return before the other has made its first.
# (In exercise 5 you send each bucket as one asynchronous `all_reduce`. Both halves are issued at once, nothing has to be issued later, and your hooks need not wait.)
#
# When no rank is late there is little to wait for. Here is the step on a clock, naive and overlapped, the fastest of twelve each. Hatched is the time in which rank 0 stands still. (The naive step sends the 53 messages of
# section 3, and they take longer here: the first waits until the other rank has come to the end of its backward, and 53 divisions lie between them.)

# %% tags=["nbval-ignore-output"]
def without(start, end, waits):
    """What is left of a stretch of time, in pieces, the longest first."""
    times = [start, *(t for wait in waits for t in wait if start < t < end), end]
    return sorted(zip(times[::2], times[1::2], strict=True), key=lambda piece: piece[0] - piece[1])


def picture(name, begin, forward_end, gradients, ops):
    def event(what, unit, start, end):
        times = {"start": start - begin, "end": end - begin}
        return SimpleNamespace(rank=f"0, {name}", what=what, unit=unit, **times)

    reductions = [op for op in ops if op.op == "reduce_scatter"] or ops
    layers = {layer: when for when, layer in gradients}  # of each, when its last gradient arrives
    waits = [(later.start, op.end) for op, later in itertools.pairwise(reductions) if later.start < op.end]
    yield event("forward", "", begin, forward_end)
    for layer, times in zip(layers, itertools.pairwise([forward_end, *layers.values()]), strict=True):
        for i, piece in enumerate(without(*times, waits)):
            yield event("backward", layer * (i == 0), *piece)
    for start, end in [*waits, (gradients[-1][0], ops[-1].end)]:
        yield event("wait", "", start, end)
    free = 0.0
    for op in reductions:
        yield event("reduce", op.unit.replace("bucket ", ""), max(op.start, free), op.end)
        free = op.end
    if reductions is not ops:
        yield event("gather", "", ops[-1].start, ops[-1].end)


events = [event for name, run in runs.items() for event in picture(name, *run)]
plots.lanes(events, "One step of rank 0: who waits for the wire?")

# %% [markdown]
# Upper lane: compute, backward from block 3 to block 0. Lower lane: the reductions of buckets 0 to 3, each drawn until the rank has waited for it; of the all-gathers only the last is drawn, the others run
# beside the next reduction. Naive DDP stands still for all that it sends. With buckets and hooks the rank stands still for the last bucket. (Where a stretch further left is hatched, the launch of a bucket waits, because the other
# rank was late with the bucket before.)
#
# The paper's word is **overlap of communication with computation**. Buckets leave in one fixed order on every rank, never in the order in
# which they happen to fill up: a collective pairs with whatever the other ranks issue at the same place in *their* sequence.

# %% [markdown]
# ## 5. From 2 ranks to 4: how much more does each one send?
#
# **Predict.** One step on 2 ranks, then the same model on 4. By what factor does the number of elements grow that *one rank* sends? And from 2 ranks to 1,024? Most people double it, and double it again.

# %%
def sent(rank, world_size):
    """Elements that this rank sends in one step by collective, those of the buckets, and all else."""
    model = GPT.preset("tiny")
    engine = mz.DDP(model, torch.optim.AdamW(model.parameters()), bucket_mb=1)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=world_size))
    with mz.record_traffic() as traffic:
        engine.backward(engine(x, y))
        engine.step()
    elements = Counter()
    for op in traffic.ops:
        elements[op.op] += op.bytes / 4 * op.unit.startswith("bucket")  # fp32: 4 bytes an element
    others = [op for op in traffic.ops if not op.unit.startswith("bucket")]
    return elements, sum(bucket.layout.P for bucket in engine.buckets), others


for n in (2, 4):
    elements, P, others = on(n).run(sent, n)[0]
    halves = [elements["reduce_scatter"], elements["all_gather"]]
    print(f"N = {n}: reduce_scatter {halves[0]:,.0f} + all_gather {halves[1]:,.0f} elements")
    print(f"counted {sum(halves):,.0f}, 2P(N−1)/N = {2 * P * (n - 1) / n:,.0f}")
for n in (4, 1024):
    print(f"from 2 ranks to {n:,}, times")
    print(f"{mz.theory.traffic(0, P, n) / mz.theory.traffic(0, P, 2):.3f}")

# %% [markdown]
# Half as much again for twice the ranks, and not quite twice as much for 512 times the ranks: a rank never sends two numbers for each parameter.
#
# $$\text{elements sent by a rank per step} \;=\; 2P\,\frac{N-1}{N} \;<\; 2P$$
#
# $P$ counts the elements of all buckets (the model's Ψ parameters plus some padding, so that N ranks can cut them evenly; here P = Ψ), $N$ the ranks. Each half costs
# $P(N-1)/N$. The ZeRO paper calls the sum **2Ψ** and measures everything against it (section 7 of the paper): this is the price that ZeRO-1 and ZeRO-2 will match, and ZeRO-3
# will exceed.
#
# What else was sent?

# %%
print(*(f"{op.op} of {op.numel} elements, {op.unit}" for op in others), sep="\n")

# %% [markdown]
# One collective for the whole step. With 53 elements the ranks agree which parameters had a gradient at all, and with 4, one for each bucket, whether a gradient came after its bucket had left. The last 4 are one for each rank: its part
# of the gradients' norm, for engines that clip gradients of which a rank holds only a shard. Here they are 0.
#
# So far every run began from the same seed on all ranks. What if it does not?

# %% [markdown]
# ## 6. Two seeds, one gradient: do the ranks come together?
#
# Now we break it. Each rank draws its weights with a seed of its own, as happens when someone writes `torch.manual_seed(rank)` so that dropout differs. Everything else is the
# naive version, which was right: both ranks apply the *same* averaged gradient, 32 times.
#
# **Predict.** The distance between the two models after 32 steps, divided by the distance at the start. Well below 1, since they are pulled in the same direction? Above 1?

# %%
def two_seeds(rank, steps):
    return train(rank, 2, steps, average_gradients, seed=rank)


(_, a0), (_, b0) = on(2).run(two_seeds, 0)
(losses, a32), (_, b32) = on(2).run(two_seeds, 32)
print("rank 0's loss falls by more than 1:", losses[0] - losses[-1] > 1)
print("distance between the ranks after 32 steps, over the distance at the start")
print(f"{distance(a32, b32) / distance(a0, b0):.3f}")

# %% [markdown]
# As far apart as before. Both ranks subtract the same vector, so what stands between them never changes. That vector is the mean of two
# models' gradients, taken at two different places, and fits neither. And the loss falls: no error, no NaN, a curve that looks fine.
# This is how the bug is met: as a model that is worse than it should be, or as a checkpoint that depends on which rank wrote it.
#
# The cure is one broadcast before the first step: **rank 0 wins**. It covers *frozen* parameters (`requires_grad` is False), which have no gradient that could ever bring them together. And
# *buffers*, such as BatchNorm's running mean, have none either, and they move: so DDP sends them again before every training forward.

# %%
def broadcasts(rank, forwards):
    torch.manual_seed(rank)  # a seed of its own again
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    with mz.record_traffic() as traffic:
        engine = mz.DDP(model)
        for _ in range(forwards):
            engine(torch.randn(8, 4))
    units = Counter(op.unit for op in traffic.ops if op.op == "broadcast")
    return model[0].weight.detach(), model[0].bias.detach(), units


(weight_0, frozen_0, units), (weight_1, frozen_1, _) = on(2).run(broadcasts, 3)
print("both ranks have rank 0's weights:", torch.equal(weight_0, weight_1))
print("and its frozen bias:", torch.equal(frozen_0, frozen_1))
print("broadcasts at the start:", units["start"])
print("broadcasts of buffers in 3 forwards:", units["buffers"])

# %% [markdown]
# ## 7. Four backwards, one step: how many times too much does the plain loop send?
#
# A batch that does not fit into memory is cut into G *micro-batches*: G times forward and backward, each loss divided by G, then one step. The gradients add up in `.grad`.
# This is *gradient accumulation*. Hooks know nothing of it: they fire in each of the G backwards.
#
# **Predict.** G = 4. How many times as much does the plain loop send as necessary?

# %%
def accumulate(rank, world_size, quiet):
    """One step over 4 micro-batches. Returns the elements sent in buckets, and the weights."""
    torch.manual_seed(0)
    model = GPT.preset("nano")
    engine = mz.DDP(model, sgd(model.parameters()))
    micro_batches = list(data.batches("train", 16, 64, 4, rank=rank, world_size=world_size))
    with mz.record_traffic() as traffic:
        for i, (x, y) in enumerate(micro_batches):
            with engine.no_sync() if quiet and i < 3 else nullcontext():  # the last one reduces
                engine.backward(engine(x, y) / 4)
        engine.step()
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit.startswith("bucket"))
    return elements, torch.cat([p.detach().flatten() for p in model.parameters()])


loud, weights = on(2).run(accumulate, 2, False)[0]
quiet, weights_quiet = on(2).run(accumulate, 2, True)[0]
psi = sum(p.numel() for p in GPT.preset("nano").parameters())
always = mz.theory.traffic(0, psi, 2, micro_steps=4)
once = mz.theory.traffic(0, psi, 2, micro_steps=4, no_sync=True)
print(f"every backward reduces: {loud:,.0f} elements, theory {always:,}")
print(f"only the last one reduces: {quiet:,.0f} elements, theory {once:,}")
print("same weights:", equal(weights, weights_quiet))
print("times too much")
print(f"{loud / quiet:.1f}")

# %% [markdown]
# Four times, for the same weights: **2GΨ** against **2Ψ**, each times (N−1)/N, which is 1/2 on two ranks: so the cell counts GΨ and Ψ elements. The mean is linear, so the mean of a sum is the sum of the means, and one reduction at the end is enough. `no_sync()` is a switch that
# the hook reads: inside it, gradients only pile up on their own rank.
#
# It costs DDP nothing, because each rank has room for the full gradient anyway. In lesson 03 the rank will not have that room, and `no_sync()` will be refused.

# %% [markdown]
# ## 8. Three curves, one with a bug: in how many of 100 steps does it show?
#
# We train the small GPT for 100 steps with AdamW, three times: **one process** on whole batches; **DDP** on 2 ranks, the engine with all that we have seen; and 2 ranks that
# are **missing a line**: somebody has forgotten to divide by N, so each rank steps with the *sum* of the gradients, twice the mean.
#
# **Predict.** In how many of the 100 steps does the broken run's loss differ from the right one's by more than 0.01? (The losses go from 4.4 to about 2.5.) Most people say: soon in all of them.

# %%
def adamw(params):
    return torch.optim.AdamW(params, lr=3e-3)


def train_ddp(rank, world_size, steps, optimizer=adamw):
    model = GPT.preset("nano")  # every run of a rank starts from seed 0, and rank 0 wins anyway
    engine = mz.DDP(model, optimizer(model.parameters()))
    losses = []
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def sum_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad)


def mean_loss(results):
    return [sum(losses) / len(losses) for losses in zip(*(losses for losses, _ in results), strict=True)]


whole = train(0, 1, 100, optimizer=adamw)
engine = on(2).run(train_ddp, 2, 100)
forgotten = on(2).run(train, 2, 100, sum_gradients, adamw)
curves = {"A": mean_loss(forgotten), "B": whole[0], "C": mean_loss(engine)}
spread = [max(losses) - min(losses) for losses in zip(*curves.values(), strict=True)]
print("steps in which the three losses are more than 0.01 apart")
print(sum(apart > 0.01 for apart in spread))

# %% tags=["nbval-ignore-output"]
title = "One process, DDP, and DDP with a bug"
plots.curve(list(range(1, 101)), curves, xlabel="steps", ylabel="loss", title=title)

# %% [markdown]
# In none. (The bug is A.) Adam divides the mean of the gradients by the root of the mean of their squares, so a factor of 2 that is in both cancels. Comparing with one process did not find the bug: curve B *is* one process. It stays in the
# run until someone clips gradients by norm, or takes an optimizer that is not scale-free.
#
# So a comparison that is to find a wrong factor needs an optimizer that hides nothing, plain SGD, and compares weights instead of curves. That is how we compared in sections 1 and 2. There, with a forgotten division, the step
# is N times as long: the run should equal one process with twice the learning rate.

# %%
def sgd_doubled(params):
    return torch.optim.SGD(params, lr=0.2)


engine_sgd = on(2).run(train_ddp, 2, 32, sgd)[0][1]
forgotten_sgd = on(2).run(train, 2, 32, sum_gradients)[0][1]
doubled = train(0, 1, 32, optimizer=sgd_doubled)[1]
print("no division: same parameters as one process:", equal(forgotten_sgd, reference))
print("no division: as one process at twice the learning rate:", equal(forgotten_sgd, doubled))
print("DDP: same parameters as one process:", equal(engine_sgd, reference))

# %% [markdown]
# And what did 100 steps on two ranks teach the model? Before and after:

# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = GPT.preset("nano")
for weights in (start, engine[0][1]):
    nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    print(data.sample(model, "ROMEO:", 120, temperature=0.8))
    print("-" * 60)

# %% [markdown]
# ## 9. One rank, two, four: how many bytes does each hold for a parameter?
#
# Interview notes say that **data parallelism needs O(N·Ψ) memory**. `mz.record_memory()`, the *meter* of this course, settles it: it counts the bytes that one rank holds, by kind. We run a step of AdamW in fp32 on 1, 2 and 4 ranks, go on to the end of the next backward,
# when everything is alive, and read what *one* rank holds.
#
# **Predict.** Weights, gradients and Adam's state together: how many bytes for each parameter on one rank, for N = 1, 2, 4? Many people let something become smaller.

# %%
def held(rank, world_size):
    """Bytes by kind at the end of the second backward; Adam's state is there since the first step."""
    model = GPT.preset("tiny")
    engine = mz.DDP(model, torch.optim.AdamW(model.parameters()), bucket_mb=1)
    (x0, y0), (x1, y1) = data.batches("train", 16, 128, 2, rank=rank, world_size=world_size)
    with mz.record_memory() as memory:
        engine.backward(engine(x0, y0))
        engine.step()
        engine.backward(engine(x1, y1))
        return {kind: memory.now[kind] for kind in ("params", "grads", "optimizer")}


psi = sum(p.numel() for p in GPT.preset("tiny").parameters())
memory = {n: on(n).run(held, n)[0] for n in (1, 2, 4)}
print("bytes a parameter, on one rank of N")
for n, by_kind in memory.items():
    kinds = (f"{plots.NAMES.get(kind, kind)} {count / psi:.1f}" for kind, count in by_kind.items())
    print(f"N = {n}   ", "   ".join(kinds))
print("together, for every N")
print(*{f"{sum(by_kind.values()) / psi:.1f}" for by_kind in memory.values()})

# %% tags=["nbval-ignore-output"]
rows = {f"1 rank of {n}": by_kind for n, by_kind in memory.items()}
plots.memory_bars(rows, "What one rank holds under DDP, fp32 AdamW")

# %% [markdown]
# Three equal bars: 4 + 4 + 8 = **16 bytes a parameter** on every rank, whatever N is. (Adam keeps two numbers for each weight, the running means of the gradient and of its square; to the byte it is
# 8Ψ and a 4-byte step count for each of the 53 tensors.) *Mixed precision* computes with 16-bit weights, and keeps a 32-bit copy of them to update, the *fp32 master*, because a small update would
# vanish in 16 bits. It comes to 16 as well: 2 for the 16-bit weight, 2 for its gradient, 12 for the fp32 master and Adam's two.
#
# **The claim, settled: it depends on whose memory is meant.** All ranks together hold N·16Ψ, so O(N·Ψ). One rank holds 16Ψ: O(Ψ). Adding GPUs lets DDP read more
# rows. It never lets it train a larger model.
#
# And every step makes the same Adam state on every rank, out of the same averaged gradient. How much of it would be enough?

# %%
adam = memory[4]["optimizer"]
print(f"Adam's state on 4 ranks: {4 * adam / 1e6:.1f} MB held, {adam / 1e6:.1f} MB needed")
print("redundant")
print(f"{(4 * adam - adam) / (4 * adam):.0%}")

# %% [markdown]
# N − 1 of N copies are redundant. With 64 ranks, 63. Each rank could update 1/N of the weights with 1/N of Adam's state, and tell the others the result.
# Look back at section 4: after the *reduce-scatter* each rank already holds the finished mean for exactly 1/N of the elements, and DDP goes on to send it to all.
# What if the rank made its step right there? That is ZeRO-1, and lesson 02.
#
# ## The module on one page
#
# `minizero/ddp.py` is what this lesson is about: who holds which bytes, and when they move. What every engine of the course does besides, around its step, it inherits from `minizero/parts/engine.py`. Below are the head of the
# first file and the methods that a training loop calls. Two names are new. `sync_gradients()` is the first half of `step()`, for a loop that steps by itself. `gathered()` does
# nothing here; in lesson 04 weights are not always full, and the same loop will run there.

# %%
print(inspect.getdoc(inspect.getmodule(mz.DDP)), end="\n\n")
for name in ("backward", "no_sync", "sync_gradients", "step", "gathered"):
    sentence = " ".join(getattr(mz.DDP, name).__doc__.split())
    print(textwrap.fill(f"{name:<16}{sentence}", 100, subsequent_indent=" " * 16))

# %% [markdown]
# ## Interview corner
#
# ### "What happens in one DDP step, and what travels when?"
#
# **What they want to find out.** Whether you have a timeline in your head, or only know the name of the wrapper class.
#
# **The full answer.** At the start rank 0's weights and buffers are broadcast. Each rank then runs forward on its own rows. In backward a hook fires as each gradient is complete; gradients are
# collected in buckets of some MB, in reverse order of registration, because that is roughly the order in which backward produces them. A full bucket is all-reduced
# asynchronously while backward goes on with the next one; buckets leave in one fixed order on all ranks. After backward one waits for what is still under way, and each rank runs
# the same optimizer step on the same mean. A rank sends 2Ψ(N−1)/N elements.
#
# **In 30 seconds.** Copies of the model, different rows, gradients averaged. The average is cut into buckets that are reduced from hooks during backward, so most of the communication is hidden. Every rank
# then makes the same step.
#
# **Follow-ups**
# - *Why not one bucket?* It is full when backward is over, so nothing overlaps. *Why not one for each tensor?* Latency: 53 messages took many times as long as one with the same bytes (section 3).
# - *Does backward ever wait?* If a bucket is one asynchronous all-reduce, no. If its two halves are issued apart, as here, yes: the second half must come in the same place on all ranks, so the launch of a bucket waits for
#   the reduce-scatter of the one before. With one rank a second late the other stopped after 28 of 53 gradients (section 4).
# - *A rank skips a layer in this step. What then?* Its bucket would never fill. It has to contribute zeros, and all ranks must launch the same buckets in the same order; PyTorch wants `find_unused_parameters=True`
#   for it, our engine always handles it.
# - *You double the number of GPUs. How many bytes more does each send?* From 2Ψ(N−1)/N to 2Ψ(2N−1)/2N: from 8 to 16 ranks that is 1.750Ψ to 1.875Ψ, 7 % more (section 5).
#
# **Wrong answers people give**
# - *"The weights are averaged after each step."* The gradients are, before it.
# - *"Traffic grows with N."* It has the limit 2Ψ (section 5).
# - *"DDP sends the gradients to rank 0, which updates and sends weights back."* That is `nn.DataParallel`, or a parameter server.
#
# **Your own project.** "I wrote DDP from hooks on CPU processes, and checked three things: the same weights as one process, the elements sent against the formula, and that
# the first bucket leaves with 37 of 53 gradients still missing."
#
# ### "7 B parameters, 8 GPUs, DDP, mixed-precision Adam: what does a GPU hold and send?"

# %%
print("GB of model states on each GPU")
print(f"{sum(mz.theory.memory(0, 7e9, 8, precision='bf16').values()) / 1e9:.1f}")
print("GB sent by each GPU in one step, 16-bit gradients")
print(f"{mz.theory.traffic(0, 7e9, 8) * 2 / 1e9:.1f}")

# %% [markdown]
# **What they want to find out.** Whether you can get from a parameter count to gigabytes without a calculator, and know what is *not* in the figure.
#
# **The full answer.** 2 bytes for the weight, 2 for its gradient, 12 for fp32 master, momentum and variance: 16 bytes times 7 B is 112 GB, on every GPU, because DDP shards nothing. It does not fit
# into 80 GB, and the activations are not even in it. Traffic is 2 · 7 B · 7/8 elements of 2 bytes: 24.5 GB. At 50 GB/s in each direction that is about half a second a step, and most of it can be hidden
# behind backward if backward is that long.
#
# **In 30 seconds.** 16 bytes a parameter, so 112 GB each; 8 GPUs change nothing about it. Each sends nearly 2Ψ, 24.5 GB a step.
#
# **Follow-ups**
# - *How many GPUs until it fits?* None. N does not occur in DDP's memory. ZeRO-1 on 8 GPUs: 4Ψ + 12Ψ/8 = 28 + 10.5 = 38.5 GB.
# - *And in pure fp32?* 4 + 4 + 8: 16 again, which is what the meter showed.
# - *Accumulation over G = 4 micro-batches?* Memory as before. Traffic 98 GB if every backward reduces, 24.5 GB with `no_sync` (section 7).
#
# **Wrong answers people give**
# - *"112 GB over 8 GPUs, so 14 each."* That is ZeRO-3; DDP replicates (section 9).
# - *"Adam's state is 12Ψ and the gradient Ψ, together 16Ψ."* 12 + 1 is 13. The gradient takes 2 bytes a parameter, and so does the weight.
# - *"Data parallelism needs O(N·Ψ)."* In total, not for one rank (section 9).
#
# **Your own project.** "I metered a GPT on 1, 2 and 4 CPU ranks: 16.0 bytes a parameter on each, every time. So I know that adding workers was never going to save me memory."
#
# ### "Two GPUs learn, but not the same as one. What do you check, in which order?"
#
# **What they want to find out.** Whether you debug by measuring, and whether you have been bitten before.
#
# **The full answer.** First make it comparable: SGD without momentum, no dropout, the same global batch, one step. Then bisect. (1) Are the weights equal on all ranks *before* the first step? If not: no broadcast, or a
# seed for each rank. (2) Does each rank read different rows, and together exactly the batch of the single process? Without a distributed sampler all ranks read the same ones. (3) Are the gradients equal on all
# ranks after backward? If not: something was not reduced, or added after the reduction. (4) Equal, but N times too large: the division is missing. (5) Equal, and still off by a little: the
# ranks had unequal numbers of valid tokens, or BatchNorm looked only at its local rows.
#
# **In 30 seconds.** Compare weights, rows, gradients, in that order, after one step of SGD. Never with Adam, which hides a constant factor.
#
# **Follow-ups**
# - *The loss curve is identical. Is all well?* With Adam, no evidence: section 8.
# - *The ranks' weights differ by exactly the same amount all the time. What happened?* They started apart and get the same gradient (section 6).
# - *Rank 0 has 1 valid token, rank 1 has 5. How wrong can the plain mean be?* The lone token has weight 1/2 instead of 1/6: three times too much.
#
# **Wrong answers people give**
# - *"Floating-point noise."* Noise was below 1e-6 after 32 steps here (section 2); a difference that grows from the first step on is a bug.
# - *"A lower learning rate fixes it."* With the division missing it does, at one N: the bug *is* a doubled learning rate (section 8).
# - *"DDP is only an approximation of large-batch training."* The sums are the same, only the place where they are computed changes (section 2).
#
# **Your own project.** "I keep a test that runs 2 CPU processes for some steps of SGD and compares with one process to 1e-6. It has found …": and here you name your own bug.
#
# ## Now you
#
# `minizero start 01`, in a terminal, puts the exercises into `work/01_ddp.ipynb`. You build this step from plain `torch.distributed` calls: the broadcast, the naive average, the buckets, the overlap, the accumulation. One number and one bug come on top.
