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
# That is *distributed data parallel*, DDP, and those two arrows into the all-reduce are the whole subject. When do they leave, in how many
# pieces, how many bytes are they, and what do they cost in memory? We build the answer in nine questions. Each asks you for a number
# before the cell that measures it. Write your guess down: being wrong by a factor of two is where the learning is.

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

torch.set_num_threads(1)  # as in every rank: this notebook is our one process, and it should add in the same order
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. Two ranks that do not talk: how far apart do they end?
#
# The simplest parallel training is no communication at all. Two ranks start from the same weights. Rank 0 trains on rows 0 to 7 of every
# batch of 16, rank 1 on rows 8 to 15. Both read Shakespeare, with the same learning rate, for 32 steps.
#
# **Predict.** Measure the distance between the two models as a share of the way that a model has come from its start. Two per cent? Twenty? Two hundred?
# Most people say "a few per cent": it is the same author, after all.

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
print("apart, as a share of the way from the start, after 32 steps")
print(f"{distance(*silent[32]) / distance(silent[32][0], start):.0%}")

# %% tags=["nbval-ignore-output"]
plots.curve(
    after,
    {
        "rank 0 to its start": [distance(silent[n][0], start) for n in after],
        "rank 0 to rank 1": [distance(*silent[n]) for n in after],
    },
    xlabel="steps", ylabel="distance (norm of the difference)", title="Two ranks without communication",
)  # fmt: skip

# %% [markdown]
# More than a quarter. Nearly half of it is there after the very first step, because eight rows are a noisy sample of sixteen; after that it only
# grows. At no moment does an error appear: each rank trains a sound model on half of the data, and nobody has trained the one we asked for.
#
# So we fix what "right" means, for this lesson and for the five that follow. **The reference is one process that sees all 16 rows.** What N ranks do
# together must end with *its* weights. What do they have to tell each other?

# %% [markdown]
# ## 2. Three lines that make it right: how many collectives is that?
#
# The reference's gradient is a mean over 16 rows. A mean over 16 is the mean of two means over 8:
#
# $$\frac{1}{16}\sum_{i=0}^{15} g_i \;=\; \frac12\Big(\frac18\sum_{i=0}^{7} g_i \;+\; \frac18\sum_{i=8}^{15} g_i\Big)$$
#
# where $g_i$ is the gradient of row $i$'s loss. So it is enough to average the gradients, after `backward` and before `step`.
#
# **Predict.** The model is a GPT with two blocks. One step of the function below: how many collectives does it issue?

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
# Right after 32 steps, on both ranks. And 29 collectives: one for each parameter tensor, from an MLP weight of 16,384 elements to a LayerNorm bias of
# 64. We call this version *naive* DDP. It is correct, and you could ship it today.
#
# One condition hides in the formula: both halves have the same number of rows. If rank 0 has 1 valid token and rank 1 has 5, the mean of the two means is not
# the mean over 6. Then each rank divides its *sum* by the global count instead.
#
# Are 29 messages many? They carry the same bytes as one large message would.

# %% [markdown]
# ## 3. Fifty-three messages or one: how much time do the same bytes take?
#
# From here on we take the larger preset: four blocks, 53 parameter tensors, 827,648 parameters, 3.3 MB of fp32 gradients.
#
# **Predict.** Send these 3.3 MB as 53 all-reduces, then as a single one. By what factor is the second faster?

# %% tags=["nbval-ignore-output"]
def fifty_three_or_one(rank, rounds=5):
    grads = [torch.randn_like(param) for param in GPT.preset("tiny").parameters()]
    together = [torch.cat([grad.flatten() for grad in grads])]
    seconds = {"53": [], "1": []}
    for name, tensors in [("53", grads), ("1", together)] * rounds:
        dist.barrier()
        begin = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        seconds[name].append(time.perf_counter() - begin)
    return {name: sorted(times)[rounds // 2] for name, times in seconds.items()}


took = on(2).run(fifty_three_or_one)[0]
print(*(f"{name} message(s): {seconds * 1e3:.1f} ms" for name, seconds in took.items()), sep="\n")
print(f"{took['53'] / took['1']:.0f} times as fast")

# %% [markdown]
# An order of magnitude, on one machine. (The number is of this minute and this computer; run it on yours.) Every message pays a fixed price before its first byte moves, the
# *latency*, and 34 of the 53 tensors have at most 512 elements: they pay little else. Between machines a message has further to go, and the price is higher.
#
# So send one message? Then it can leave only when the *last* gradient is there, and backward is over. The way between the two is what
# the DDP paper calls **buckets**: gradients that travel together, a few MB at a time. Which parameters share one? Here is the
# package's own code.

# %%
print(inspect.getsource(partition))

# %% [markdown]
# Two decisions are in it. It walks through the parameters *in reverse*, because backward reaches the last layer first: the first bucket should be full early. And a bucket
# closes *before* the parameter that would overflow it.
#
# **Predict.** With buckets of 1 MiB, how many collectives remain of the 53? (PyTorch's default is 25 MiB. Our whole model would fit into one.)

# %%
model = GPT.preset("tiny")
names = {param: name for name, param in model.named_parameters()}
buckets = partition(list(model.parameters()), bucket_mb=1)
for i, params in enumerate(buckets):
    megabytes = sum(param.nbytes for param in params) / 1e6
    print(f"bucket {i}   {len(params)} tensors   {megabytes:.1f} MB   {names[params[0]]} … {names[params[-1]]}")
print("collectives in one step, instead of", len(names))
print(len(buckets))

# %% [markdown]
# Four all-reduces, and bucket 0 holds the head, the last LayerNorm and block 3: what backward reaches first. In `minizero/parts/bucket.py` a bucket is one flat
# tensor, and from the moment when a gradient arrives, the parameter's `.grad` is a *view* into it. So a full bucket is already packed, and when the mean comes back it is already
# where the optimizer reads it.
#
# Bucket size trades latency against a second thing, which we have not used yet: a bucket can leave early. How early?

# %% [markdown]
# ## 4. The first bucket leaves: how many gradients are still missing?
#
# `param.register_post_accumulate_grad_hook(fn)` calls `fn(param)` in the middle of backward, at the moment when `param.grad` is complete. These few lines of `minizero/ddp.py` are
# the heart of DDP:

# %%
print(inspect.getsource(mz.DDP._gradient_ready))
print(inspect.getsource(mz.DDP._launch))

# %% [markdown]
# When the last gradient of a bucket arrives, its reduction is *issued*, not waited for: autograd goes on to the next layer while another thread moves the bytes.
#
# **Predict.** Of the 53 gradients, how many does backward still have to compute when the first reduction leaves? (Under naive DDP the answer is 0.)

# %%
def watch(rank, world_size, overlap):
    """One step: when it begins, when forward ends, each gradient as it gets ready, and the collectives."""
    model = GPT.preset("tiny")
    part = {p: ".".join(name.split(".")[: 1 + name.startswith("blocks")]) for name, p in model.named_parameters()}
    gradients = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: gradients.append((time.perf_counter(), part[param])))
    engine = mz.DDP(model, bucket_mb=1) if overlap else None
    for x, y in data.batches("train", 16, 128, 3, rank=rank, world_size=world_size):  # the third is warm, and kept
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
    return begin, forward_end, gradients, traffic.ops


runs = {"naive": on(2).run(watch, 2, False)[0], "overlapped": on(2).run(watch, 2, True)[0]}
_, _, gradients, ops = runs["overlapped"]
order = [(when, f"gradients of {part}") for when, part in gradients]
order += [(op.start, f"    {op.op}, {op.unit}") for op in ops]
for what, times in itertools.islice(itertools.groupby(sorted(order), key=lambda event: event[1]), 9):
    print(what + f": {len(list(times))}" * what.startswith("gradients"))
print("    …")

first, last = ops[0].start, gradients[-1][0]
print("the first reduction leaves before backward ends:", first < last)
print("gradients still missing at that moment, of", len(gradients))
print(sum(when > first for when, _ in gradients))

# %% [markdown]
# Thirty-seven of 53: more than two thirds of the gradients are still to come, and bucket 0 is on its way. Then the pattern repeats. Each further bucket leaves together with the second half of the one before it (why an all-reduce has halves is the next question).
# Here is the same step on a clock, under the naive version and overlapped.

# %% tags=["nbval-ignore-output"]
def picture(name, begin, forward_end, gradients, ops):
    def event(what, unit, start, end):
        return SimpleNamespace(rank=f"0, {name}", what=what, unit=unit, start=start - begin, end=end - begin)

    ends = [forward_end, *dict((part, when) for when, part in gradients).values()]
    parts = dict.fromkeys(part for _, part in gradients)
    reductions = [op for op in ops if op.op != "all_gather"]
    yield event("forward", "", begin, forward_end)
    yield from (event("backward", part, *times) for part, times in zip(parts, itertools.pairwise(ends), strict=True))
    yield from (event("reduce", op.unit.replace("bucket ", "b"), op.start, op.end) for op in reductions)
    if reductions != ops:
        yield event("gather", "", ops[-1].start, ops[-1].end)


plots.lanes([e for name, run in runs.items() for e in picture(name, *run)], "One step of rank 0: who waits for the wire?")

# %% [markdown]
# Upper lane: compute, backward from block 3 to block 0. Lower lane: a box runs from the moment when a reduction is issued to the moment when the rank needs
# its result, so it shows how long the network *may* take. (b0 to b3 are the buckets; of the all-gathers only the last is drawn, the others run beside the boxes.) Naive DDP gives
# the network no time at all: everything that it sends makes the step longer. With buckets and hooks, only the end of the last bucket sticks out.
#
# The paper's word is **overlap of communication with computation**. It is also the reason why buckets leave in one fixed order on every rank, and never in the order in
# which they happen to fill up: a collective pairs with whatever the other ranks issue at the same place in *their* sequence.

# %% [markdown]
# ## 5. From 2 ranks to 4: how much more does each one send?
#
# In lesson 00 we built an all-reduce from two halves: a *reduce-scatter*, after which each rank has the finished sum of 1/N of the elements, and an *all-gather*, after which
# everyone has all of it. DDP's buckets travel in these two halves, so we can count them apart.
#
# **Predict.** One step on 2 ranks, then the same model on 4. By what factor does the number of elements grow that *one rank* sends? And at 1,024 ranks? Most people double it, and then stop doubling with a bad feeling.

# %%
def sent(rank, world_size):
    """Elements that this rank sends in one step, by collective."""
    model = GPT.preset("tiny")
    engine = mz.DDP(model, torch.optim.AdamW(model.parameters()), bucket_mb=1)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=world_size))
    with mz.record_traffic() as traffic:
        engine.backward(engine(x, y))
        engine.step()
    elements = Counter()
    for op in traffic.ops:
        elements[op.op if op.unit.startswith("bucket") else op.unit] += op.bytes / 4  # fp32
    return elements, sum(bucket.layout.P for bucket in engine.buckets)


for n in (2, 4):
    elements, P = on(n).run(sent, n)[0]
    halves = [elements["reduce_scatter"], elements["all_gather"]]
    print(f"N = {n}: reduce_scatter {halves[0]:,.0f} + all_gather {halves[1]:,.0f} elements = {sum(halves) / P:g} P")
    print(f"counted {sum(halves):,.0f}, 2P(N−1)/N = {2 * P * (n - 1) / n:,.0f}")
print("from 2 ranks to 4, and to 1,024: times")
print(*(f"{mz.theory.traffic(0, P, n) / mz.theory.traffic(0, P, 2):.3f}" for n in (4, 1024)))

# %% [markdown]
# Half as much again for twice the ranks, and then hardly more: however many ranks there are, one rank sends less than two numbers for each parameter.
#
# $$\text{elements sent by a rank per step} \;=\; 2P\,\frac{N-1}{N} \;<\; 2P$$
#
# $P$ counts the elements of all buckets (the model's Ψ parameters plus some padding so that N ranks can cut them evenly; here P = Ψ), $N$ the ranks. Each half costs
# $P(N-1)/N$. The ZeRO paper calls the sum **2Ψ** and measures everything against it (section 7): this is the price that ZeRO-1 and ZeRO-2 will match, and ZeRO-3
# will exceed. There was one more tiny collective in the step: in it the ranks agree which parameters had a gradient at all, one number for each.
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
# Exactly as far apart as before. Both ranks subtract the same vector, so what stands between them never changes, in 32 steps or in a million. That vector is the mean of two
# models' gradients, taken at two different places, and fits neither. And look at the loss: it falls. No error, no NaN, a curve that looks fine.
# This is how the bug is met in the wild: as a model that is worse than it should be, or as a checkpoint that depends on which rank wrote it.
#
# The cure is one broadcast before the first step: **rank 0 wins**. It covers frozen parameters too, because they have no gradient that could ever bring them together. And
# *buffers*, such as BatchNorm's running mean, have none either, and they move: so DDP sends them again before every training forward.

# %%
def broadcasts(rank, forwards):
    torch.manual_seed(rank)  # a seed of its own again
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with mz.record_traffic() as traffic:
        engine = mz.DDP(model)
        for _ in range(forwards):
            engine(torch.randn(8, 4))
    return model[0].weight.detach(), dict(Counter(op.unit for op in traffic.ops if op.op == "broadcast"))


(w0, units), (w1, _) = on(2).run(broadcasts, 3)
print("both ranks have rank 0's weights:", torch.equal(w0, w1))
print(units)

# %% [markdown]
# ## 7. Four backwards, one step: how many reductions do they need?
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
print(f"every backward reduces: {loud:,.0f}, theory {mz.theory.traffic(0, psi, 2, micro_steps=4):,} elements")
once = mz.theory.traffic(0, psi, 2, micro_steps=4, no_sync=True)
print(f"only the last one reduces: {quiet:,.0f}, theory {once:,} elements")
print("same weights:", equal(weights, weights_quiet))
print(f"{loud / quiet:.1f}")

# %% [markdown]
# Four times, for the same weights: **2GΨ** against **2Ψ**. The mean is linear, so the mean of a sum is the sum of the means, and one reduction at the end is enough. `no_sync()` is a switch that
# the hook reads: inside it, gradients only pile up on their own rank.
#
# It costs DDP nothing, because each rank has room for the full gradient anyway. Remember that sentence. In lesson 03 the rank will not have that room, and `no_sync()` will be refused.

# %% [markdown]
# ## 8. Three curves: which one has the bug?
#
# Now the real thing. We train the small GPT for 100 steps with AdamW, three times: **one process** on whole batches; **DDP** on 2 ranks, the engine with all that we have seen; and 2 ranks that
# are **missing a line**: somebody has forgotten to divide by N, so each rank steps with the *sum* of the gradients, twice the mean.
#
# **Predict.** The picture calls them A, B and C. How will the broken curve look? Twice as steep? Unstable? Decide, then look for it.

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
apart = max(max(step) - min(step) for step in zip(*curves.values(), strict=True))
print("all three losses within 0.01 of one another in every step:", apart < 0.01)

# %% tags=["nbval-ignore-output"]
plots.curve(list(range(1, 101)), curves, xlabel="steps", ylabel="loss", title="One process, DDP, and DDP with a bug")

# %% [markdown]
# You cannot tell, and no one could. (It is A.) Adam divides the mean of the gradients by the root of the mean of their squares, so a factor of 2 that is in both cancels. The bug sits in the run for
# weeks, until someone clips gradients by norm, adds an optimizer that is not scale-free, or compares with one GPU.
#
# That is why every comparison in this course is made with SGD, which hides nothing. With a forgotten division, the step is N times as long. In other words it should equal
# one process with twice the learning rate.

# %%
def sgd_doubled(params):
    return torch.optim.SGD(params, lr=0.2)


engine_sgd = on(2).run(train_ddp, 2, 32, sgd)[0][1]
forgotten_sgd = on(2).run(train, 2, 32, sum_gradients)[0][1]
doubled = train(0, 1, 32, optimizer=sgd_doubled)[1]
print("no division: same parameters as one process:", equal(forgotten_sgd, reference))
print("no division: same parameters as one process at twice the learning rate:", equal(forgotten_sgd, doubled))
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
# ## 9. Four ranks: how many bytes of Adam's state do they need, and how many do they hold?
#
# Interview notes say that "data parallelism needs O(N·Ψ) memory" (claim C09 of the course's list). The meter settles it. We run a step of AdamW in fp32 on 1, 2 and 4 ranks, go on to the end of the next backward, when everything is alive, and read what *one* rank holds.
#
# **Predict.** Bytes for each parameter on one rank, weights + gradients + Adam, for N = 1, 2, 4. Many people let something become smaller.

# %%
def held(rank, world_size):
    """Bytes by kind at the end of the second backward; Adam's state has been there since the first step."""
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
    print(f"N = {n}", *(f"   {plots.NAMES.get(kind, kind)} {count / psi:.1f}" for kind, count in by_kind.items()))
print("together, for every N")
print(*{f"{sum(by_kind.values()) / psi:.1f}" for by_kind in memory.values()})

# %% tags=["nbval-ignore-output"]
plots.memory_bars({f"1 rank of {n}": by_kind for n, by_kind in memory.items()}, "What one rank holds under DDP, fp32 AdamW")

# %% [markdown]
# Three equal bars: 4 + 4 + 8 = **16 bytes a parameter**, on every rank, whatever N is. (Adam keeps two numbers for each weight, the running means of the gradient and of its square; to the byte it is
# 8Ψ and a 4-byte step count for each of the 53 tensors.) In mixed precision the sum is 16 too, with other terms: 2 for the 16-bit weight, 2 for its gradient, 12 for the
# fp32 master weight and Adam's two.
#
# **Claim C09, settled: it depends on whose memory is meant.** All ranks together hold N·16Ψ, so O(N·Ψ). One rank holds 16Ψ: O(Ψ). Adding GPUs lets DDP read more
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
# Look back at question 5: after the *reduce-scatter* each rank already holds the finished mean for exactly 1/N of the elements, and DDP goes on to send it to all.
# What if the rank made its step right there? That is ZeRO-1, and lesson 02.
#
# ## The module on one page
#
# You have met every part of `minizero/ddp.py`. This is its outline, taken from the module itself. Later lessons end with the diff against
# the step before; there is no step before this one.

# %%
print(inspect.getdoc(inspect.getmodule(mz.DDP)))
print()
for name, member in vars(mz.DDP).items():
    if inspect.isfunction(member) or isinstance(member, property):
        sentence = " ".join((member.__doc__ or "").split()).partition(". ")[0]
        print(f"{name:<18} {textwrap.shorten(sentence, 90, placeholder=' …')}".rstrip())

# %% [markdown]
# ## The interview corner
#
# Three questions that candidates meet. Each has what the interviewer wants to find out, a full answer, one for thirty seconds, follow-ups, and the wrong answers that people give.
#
# ### "What happens in one DDP step, and what travels when?"
#
# **What they want to find out.** Whether you have a timeline in your head, or only know the name of the wrapper class.
#
# **The full answer.** At the start rank 0's weights and buffers are broadcast. Each rank then runs forward on its own rows. In backward a hook fires as each gradient is complete; gradients are
# collected in buckets of some MB, in reverse order of registration, because that is roughly the order in which backward produces them. A full bucket is all-reduced at once and
# asynchronously, while backward goes on; buckets leave in one fixed order on all ranks. After backward one waits for what is still under way, and each rank runs
# the same optimizer step on the same mean. A rank sends 2Ψ(N−1)/N elements.
#
# **In 30 seconds.** Copies of the model, different rows, gradients averaged. The average is cut into buckets that are reduced from hooks during backward, so most of the communication is hidden. Every rank
# then makes the same step.
#
# **Follow-ups.**
# - *Why not one bucket?* It is full when backward is over, so nothing overlaps. *Why not one for each tensor?* Latency: 53 messages took many times as long as one with the same bytes (question 3).
# - *A rank skips a layer in this step. What then?* Its bucket would never fill. It has to contribute zeros, and all ranks must launch the same buckets in the same order; PyTorch wants `find_unused_parameters=True`
#   for it, our engine always handles it.
# - *You double the number of GPUs. How many bytes more does each send?* From 2Ψ(N−1)/N to 2Ψ(2N−1)/2N: from 8 to 16 ranks that is 1.750Ψ to 1.875Ψ, 7 % more (question 5).
#
# **Wrong answers.** "The weights are averaged after each step": no, the gradients are, before it. "Traffic grows with N": it has the limit 2Ψ (question 5; claim C04 is about the same formula for ZeRO-3).
# "DDP sends the gradients to rank 0, which updates and sends weights back": that is `nn.DataParallel`, or a parameter server.
#
# **Your own project, with a single GPU or none.** "I wrote DDP from hooks on gloo processes, and checked three things: the same weights as one process, the elements sent against the formula, and that
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
# **Follow-ups.**
# - *How many GPUs until it fits?* None. N does not occur in DDP's memory. ZeRO-1 on 8 GPUs: 4Ψ + 12Ψ/8 = 28 + 10.5 = 38.5 GB.
# - *And in pure fp32?* 4 + 4 + 8: 16 again, which is what the meter showed.
# - *Accumulation over G = 4 micro-batches?* Memory as before. Traffic 98 GB if every backward reduces, 24.5 GB with `no_sync` (question 7).
#
# **Wrong answers.** "112 GB over 8 GPUs, so 14 each": that is ZeRO-3, DDP replicates (claim C09). "Adam's state is 12Ψ and the gradient Ψ, together 16Ψ": 12 + 1 is
# 13. The gradient takes 2 bytes a parameter, and so does the weight (claim C07). "O(N·Ψ)": in total, not for one rank (claim C09, question 9).
#
# **Your own project, with a single GPU or none.** "I metered a GPT on 1, 2 and 4 CPU ranks: 16.0 bytes a parameter on each, every time. So I know that adding workers was never going to save me memory."
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
# **Follow-ups.**
# - *The loss curve is identical. Is all well?* With Adam, no evidence: question 8.
# - *The ranks' weights differ by exactly the same amount all the time. What happened?* They started apart and get the same gradient (question 6).
# - *Rank 0 has 1 valid token, rank 1 has 5. How wrong can the plain mean be?* The lone token has weight 1/2 instead of 1/6: three times too much.
#
# **Wrong answers.** "Floating-point noise": noise was below 1e-6 after 32 steps here (question 2); a difference that grows from the first step on is a bug. "A lower learning rate fixes it": with the division
# missing it does, at one N (question 8: the bug *is* a doubled learning rate). "DDP is only an approximation of large-batch training": the sums are the same, only the place where they are computed changes (claim C31).
#
# **Your own project, with a single GPU or none.** "I keep a test that runs 2 CPU processes for some steps of SGD and compares with one process to 1e-6. It has found …": and here you name your own bug.
#
# ## Now you
#
# `exercises/01_ddp.ipynb` (in a terminal: `minizero start 01`) has you build this step from plain `torch.distributed` calls: the broadcast, the naive average, the buckets, the overlap, the accumulation. One number and one bug come on top.
