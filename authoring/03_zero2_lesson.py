# %% [markdown]
# # 03 ZeRO-2: gradients are gone before backward is over
#
# In ZeRO-1 a rank reduces all gradients and reads 1/N of the result. In ZeRO-2 it keeps that 1/N and gives the rest of the memory back, bucket by bucket, while backward goes on.
#
# ```
#            a bucket fills    is reduced        until the step    until the next backward
# ZeRO-1     all of it         all of it         all of it         all of it
# ZeRO-2     all of it         all of it         1/N of it         nothing
# ```
#
# Not one message is added. So where is the catch? There are two, and both are about time: how long a bucket lives, and what happens when one backward is not enough for a step.
# Nine questions, each with a number in it. Write yours down before you run the cell.

# %% tags=["nbval-ignore-output"]
import functools
import inspect
import textwrap
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import minizero as mz
from minizero import data
from minizero.course import changes
from minizero.lens import plots
from minizero.model import GPT
from minizero.parts import comm, flat
from minizero.parts.bucket import TransientBucket

torch.set_num_threads(1)  # as in every rank
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. The step is over, no parameter has a gradient: how many bytes of gradients does a rank hold?
#
# Four ranks, ZeRO-1, mixed precision: a gradient is 2 bytes a parameter. `engine.step()` clears the gradients, and every `.grad` is `None` until the next backward.
#
# **Predict.** How many bytes a parameter of gradients does the meter find then? Most people say 0.


# %%
def adamw(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def gradient_bytes(rank, world_size, step):
    """Bytes a parameter: held after a backward, read by this rank's optimizer, and held when the step is over."""
    model = GPT.preset("tiny")
    psi = sum(param.numel() for param in model.parameters())
    engine = step(model, adamw(model), precision="bf16", bucket_mb=0.25)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=world_size))
    with mz.record_memory() as memory:
        engine.backward(engine(x, y))
        after_backward = memory.now["grads"]
        engine.step()
        after_step = memory.now["grads"]
    assert all(param.grad is None for param in model.parameters())
    read = sum(bucket.layout.S for bucket in engine.buckets) * 2  # its shards, 2 bytes an element
    return after_backward / psi, read / psi, after_step / psi


after_backward, read, after_step = on(4).run(gradient_bytes, 4, mz.Zero1)[0]
print(f"after backward: held {after_backward:.1f}, read by the rank's optimizer {read:.1f}")
print("after the step, held")
print(f"{after_step:.1f}")

# %% [markdown]
# Two. A `.grad` is a view of its bucket, and clearing it lets go of the view. The bucket itself is one flat tensor that DDP and ZeRO-1 make once and keep: through the step, through the whole next forward, until backward fills it again.
# It is whole at every moment, and at no moment does the rank need the whole of the *mean*. It needs its own gradients whole, and only until they are reduced; then 1/N, until the step; then nothing.
#
# For the paper's 7.5 billion parameters on 64 ranks that makes 15 GB held and 0.23 GB read. How soon can a rank let go?

# %% [markdown]
# ## 2. Four ranks, a whole backward: how much of the gradient exists at the worst moment?
#
# A hook runs when one gradient is complete (lesson 01). Everything ZeRO-2 does can be done in it: reduce-scatter this gradient, keep the shard, forget the rest. Here it is in plain PyTorch, and each parameter is a bucket of its own:


# %%
def zero2_by_hand(rank, world_size, steps):
    """The weights after some steps of AdamW, and the largest share of the gradient that existed at one moment."""
    model = GPT.preset("nano")
    params = list(model.parameters())

    def reduce_and_free(param):
        param.shard.grad = torch.empty_like(param.shard)
        dist.reduce_scatter(param.shard.grad, list(param.grad.view(-1).chunk(world_size)))
        param.shard.grad /= world_size
        param.grad = None  # nobody else knows this tensor: its memory is free

    for param in params:
        # A view of the weight. chunk() makes N equal pieces only if N divides the size, as it does here; where not, pad first (lesson 02).
        param.shard = param.detach().view(-1).chunk(world_size)[rank].requires_grad_()
        param.register_post_accumulate_grad_hook(reduce_and_free)
    optimizer = torch.optim.AdamW([param.shard for param in params], lr=3e-3)
    with mz.record_memory() as memory:
        for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
            model(x, y).backward()
            optimizer.step()
            for param in params:
                dist.all_gather(list(param.data.view(-1).chunk(world_size)), param.shard.detach())
            optimizer.zero_grad()
    weights = nn.utils.parameters_to_vector(params).detach()
    return weights, memory.curve()[1]["grads"].max() / weights.nbytes


# %% [markdown]
# When `backward()` returns there is nothing left to reduce, and `param.shard.grad` is where the optimizer reads it. It is memory of its own, in the end a quarter of the gradient's.
#
# **Predict.** Four ranks, and the largest tensor of this model has 14 % of its elements. At the worst moment of backward, how much of the whole gradient's memory is in use? Without the hook it is 100 %.

# %%
print("of the gradient's memory, at the worst moment")
print(f"{on(4).run(zero2_by_hand, 4, 1)[0][1]:.0%}")

# %% [markdown]
# A third: the shards so far, up to 25 %, and the one gradient that is being reduced. All of them have been computed, and never more than one layer's were whole at a time. The paper's word is to **partition** the gradients (section 5.2). Is it still the same training?


# %%
def train(rank, world_size, step, steps, optimizer=adamw, **settings):
    """What one rank does with an engine: its losses, and its weights as one long vector."""
    model = GPT.preset("nano")  # every run of a rank starts from seed 0, and rank 0 wins anyway
    engine = step(model, optimizer(model), **settings)
    losses = []
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, torch.cat([weight.flatten() for weight in engine.state_dict().values()])


ddp_weights = on(2).run(train, 2, mz.DDP, 10)[0][1]
by_hand = on(2).run(zero2_by_hand, 2, 10)
print(f"weights that differ from DDP's after 10 steps, of {ddp_weights.numel():,}")
print(sum((weights != ddp_weights).sum().item() for weights, _ in by_hand))

# %% [markdown]
# The same sums, the same update of each element, the same weights. Two things are missing. There are 29 messages where lesson 01 sent a model seven times as large in 4. And backward stands still in each of them: nothing overlaps. So we want buckets back. That is where it gets delicate.

# %% [markdown]
# ## 3. One bias is kept for a log: how many bytes of a bucket stay?
#
# In lessons 01 and 02 each `.grad` is a view of the bucket, so that autograd writes to the right place by itself. We build such a bucket for the small GPT, 29 gradients in 452,608 bytes, run a backward, and let go of it in three ways.
#
# **Predict.** Someone wants to log one gradient, a bias of 64 elements, and keeps its `.grad`. The other 28 are set to `None`, and `del bucket` is done. How many bytes stay? Most people say 256.


# %%
def let_go(how):
    """The bytes of gradients that stay alive after one way to let go of a bucket."""
    model = GPT.preset("nano")
    sizes = [param.numel() for param in model.parameters()]
    bucket = torch.zeros(sum(sizes))
    for param, view in zip(model.parameters(), bucket.split(sizes), strict=True):
        param.grad = view.view_as(param)
    del view
    x, y = next(data.batches("train", 4, 16, 1))
    model(x, y).backward()  # adds to each .grad, and so writes into the bucket
    if how == "shrink its storage":
        bucket.untyped_storage().resize_(0)
    if how == "del, and all but one .grad = None":
        for param in model.parameters():
            if param is not model.blocks[0].norm1.bias:
                param.grad = None
    del bucket
    with mz.record_memory() as memory:
        return memory.now["grads"]


for how in ("del bucket", "shrink its storage"):
    print(f"{how:<20} {let_go(how):>7,} bytes stay")
print("del, and all but one .grad = None: bytes that stay")
print(f"{let_go('del, and all but one .grad = None'):,}")

# %% [markdown]
# All of them. Memory belongs to the **storage**, and a storage lives as long as any view of it does. One forgotten reference, in a log, in a list of chunks that a collective got, in a `.grad`, and ZeRO-2 costs what ZeRO-1 costs. Nothing is wrong
# with the numbers, and the only place where it shows is the meter.
#
# The third way gives back everything at once, whoever still points there: `untyped_storage().resize_(0)`. The views stay, with their shapes, over no memory. What does our log print then?


# %%
def log_its_norm(rank):
    bucket = torch.zeros(1000)
    bias_grad = bucket[:64]
    bucket.untyped_storage().resize_(0)
    return bias_grad.norm().item()


try:
    on(1).run(log_its_norm)
except mz.RankError as error:
    print(f"{error.exception_type}: {error.message}")

# %% [markdown]
# Nothing: the process is dead, and no `except` ever saw it. So there are two ways to do it wrong. If a `.grad` points into the bucket, the memory never goes away; and if it is taken away all the same, the first curious reader crashes.
#
# The package's answer: **no `.grad` ever points into a bucket.** Autograd leaves each gradient as a tensor of its own. The hook moves it into the bucket, and puts something in its place that has a shape and owns nothing.

# %%
for part in (TransientBucket.take, mz.Zero2._launch, mz.Zero2._land, TransientBucket.land, flat.free):
    print(textwrap.dedent(inspect.getsource(part)))

# %% [markdown]
# From top to bottom. `take` is called by the hook. `held[param]` is what stands in `.grad` from now on; `make_room()` gives the bucket memory if it has none; the last lines copy the gradient to its place, or add it, if it comes a second time in one backward (a weight that two checkpointed blocks share). When a bucket is full,
# `_launch` waits until the one before has landed, and sends this one on its way. `close()` returns the bucket's buffer, P elements, and makes a new tensor for the shard, `grad_S`, S = P / N elements. `_land` waits for the result and calls the bucket's `land`: it frees the buffer first, and puts aside what came
# while the bucket was under way (`late`; mostly nothing), to be taken anew. So **one bucket is under way while the next one fills**, and no third is in memory.
#
# How does autograd get along with what stands in `.grad` there? It never sees it: a second hook, before the gradient is added, sets `.grad` to `None`, and autograd puts the next gradient there as if it were the first.
#
# And what does someone find who looks at `.grad`?


# %%
def look(rank):
    model = GPT.preset("nano")
    engine = mz.Zero2(model, adamw(model))
    x, y = next(data.batches("train", 4, 16, 1, rank=rank, world_size=1))
    engine.backward(engine(x, y))
    print(model.head.weight.grad)
    return model.head.weight.grad.norm()


try:
    on(1).run(look)
except mz.RankError as error:
    print(f"{error.exception_type}: {error.message}")

# %% [markdown]
# A sentence instead of a crash. Buckets, overlap, freed in time, then. Now against DDP and ZeRO-1, with SGD, which hides nothing, and with AdamW, on 2 and 4 ranks, and with bf16. Several buckets, so that they do come and go:


# %%
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def same_parameters(world_size, *how, **settings):
    runs = [
        on(world_size).run(functools.partial(train, bucket_mb=0.1, **settings), world_size, step, 10, *how)
        for step in (mz.DDP, mz.Zero1, mz.Zero2)
    ]
    expected = runs[0][0][1]
    return all(torch.equal(weights, expected) for results in runs for _, weights in results)


for n in (2, 4):
    for name, optimizer in {"SGD": sgd, "AdamW": adamw}.items():
        print(f"{name}, {n} ranks, same parameters as before:", same_parameters(n, optimizer))
print("AdamW, 2 ranks, bf16, same parameters as before:", same_parameters(2, precision="bf16"))
_, _, after_step = on(4).run(gradient_bytes, 4, mz.Zero2)[0]
print("bytes of gradients a parameter, between two steps")
print(f"{after_step:.1f}")

# %% [markdown]
# To the last bit, and the 2.0 of question 1 is 0.0. How much is that of everything a rank holds?

# %% [markdown]
# ## 4. ZeRO-1 saves 56 % on four ranks: and ZeRO-2?
#
# Weights 2Ψ stay on every rank. Gradients 2Ψ and the optimizer's 12Ψ are shared:
#
# $$\text{bytes held by a rank} \;=\; 2\Psi + \frac{14\Psi}{N}$$
#
# where $\Psi$ counts parameters, $N$ ranks, and 2 and 14 are bytes a parameter. As in lesson 02 we read the meter at the end of a backward.
#
# **Predict.** What share of DDP's 16Ψ has gone on 4 ranks? And on very many?


# %%
def held(rank, world_size, step):
    """Bytes by kind at the end of the second backward, and how many pieces the optimizer has."""
    model = GPT.preset("tiny")
    optimizer = adamw(model)
    engine = step(model, optimizer, precision="bf16", bucket_mb=0.25)
    (x0, y0), (x1, y1) = data.batches("train", 16, 128, 2, rank=rank, world_size=world_size)
    with mz.record_memory() as memory:
        engine.backward(engine(x0, y0))
        engine.step()
        engine.backward(engine(x1, y1))
        by_kind = {kind: memory.now[kind] for kind in ("params", "grads", "optimizer")}
    return by_kind, sum(len(group["params"]) for group in optimizer.param_groups)


psi = sum(param.numel() for param in GPT.preset("tiny").parameters())
zero1 = {n: on(n).run(held, n, mz.Zero1)[0][0] for n in (2, 4)}
zero2 = {n: on(n).run(held, n, mz.Zero2)[0] for n in (1, 2, 4)}


def saved_in_theory(n):
    return 1 - sum(mz.theory.memory(2, psi, n).values()) / (16 * psi)


for n, (by_kind, pieces) in zero2.items():
    beyond = sum(by_kind.values()) - sum(mz.theory.memory(2, psi, n).values())
    print(f"N = {n}: {sum(by_kind.values()) / psi:.1f} bytes a parameter; beyond 2Ψ + 14Ψ/N: {beyond}, for {pieces} pieces")
print("saved on 8, 64 and 1,024 ranks:", *(f"{saved_in_theory(n):.1%}" for n in (8, 64, 1024)))
print("saved on 4 ranks")
print(f"{1 - sum(zero2[4][0].values()) / (16 * psi):.1%}")

# %% tags=["nbval-ignore-output"]
rows = {}
for n in (2, 4):
    rows |= {f"ZeRO-1, N = {n}": zero1[n], f"ZeRO-2, N = {n}": zero2[n][0]}
plots.memory_bars(rows, "What one rank holds, 0.8 M parameters, AdamW in bf16")

# %% [markdown]
# 65.6 %. To the byte it is the formula and Adam's step count, 4 bytes for each piece. The saving is 7/8 · (1 − 1/N): of 16 bytes a parameter 14 are shared, and the limit is 87.5 %, where ZeRO-1's is 75 %. In pure fp32 the same cut leaves 4Ψ + 12Ψ/N.
#
# For the paper's 7.5 billion on 64 ranks: 120 GB in DDP, 31.4 in ZeRO-1, **16.6 in ZeRO-2**. On two ranks the step from 1 to 2 is worth one byte a parameter, on many it halves what is left.
#
# And what is sent for it?

# %% [markdown]
# ## 5. All-reduce and throw away: how many times as much is sent?
#
# Interview notes say that *ZeRO-2 all-reduces gradients and drops those of others*. It sounds right: in the end a rank has its part of the mean, and the others' parts are gone. Try both on real gradients, each rank with its own rows:


# %%
def two_ways(rank, world_size):
    """This rank's part of the mean gradient by two ways, and the bytes sent by each."""
    model = GPT.preset("nano")
    x, y = next(data.batches("train", 16, 64, 1, rank=rank, world_size=world_size))
    model(x, y).backward()
    grad_P = torch.cat([param.grad.flatten() for param in model.parameters()])
    with mz.record_traffic() as traffic:
        everything_P = grad_P.clone()
        dist.all_reduce(everything_P)
        kept_S = everything_P.chunk(world_size)[rank] / world_size
        shard_S = torch.empty_like(kept_S)
        dist.reduce_scatter(shard_S, list(grad_P.chunk(world_size)))
        shard_S /= world_size
    return torch.equal(kept_S, shard_S), [op.bytes for op in traffic.ops]


# %% [markdown]
# **Predict.** Is the result the same? And how many times as many bytes does the first way send?

# %%
results = on(2).run(two_ways, 2)
print("equal on both ranks:", all(equal for equal, _ in results))
all_reduce, reduce_scatter = results[0][1]
print(f"all-reduce {all_reduce:,.0f} bytes, reduce-scatter {reduce_scatter:,.0f} bytes")
print("times as much")
print(all_reduce / reduce_scatter)

# %% [markdown]
# Equal in value, and twice the bytes: an all-reduce is a reduce-scatter and an all-gather, and what the second half brings is what gets thrown away. With the weights' all-gather the step would cost 3Ψ instead of 2Ψ. **The claim, settled: false as a definition, equal in value.** ZeRO-2 *reduce-scatters*.
#
# Two footnotes, since practice is less tidy. DeepSpeed's ZeRO-2 with its defaults really does what the claim says: `allreduce_and_scatter` in its `stage_1_and_2.py` all-reduces a bucket, and each rank copies its part out. And so does `reduce_scatter` on gloo, the CPU's
# backend, inside; we counted what the algorithm needs. The engines of the course go round it: `parts/comm.py` sends each rank its chunk and adds locally.
#
# Then a whole step, ZeRO-1 beside ZeRO-2:


# %%
def ops_of_a_step(rank, world_size, step):
    """The bucket collectives of one step in the order of issue, and the elements that they send."""
    model = GPT.preset("tiny")
    engine = step(model, sgd(model), bucket_mb=1)
    x, y = next(data.batches("train", 16, 128, 1, rank=rank, world_size=world_size))
    with mz.record_traffic() as traffic:
        engine.backward(engine(x, y))
        engine.step()
    short = {"reduce_scatter": "reduce", "all_gather": "gather"}
    order = [f"{short[op.op]} {op.unit[-1]}" if op.unit.startswith("bucket") else "agree" for op in traffic.ops]
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit.startswith("bucket"))  # fp32: 4 bytes an element
    return order, elements, sum(bucket.layout.P for bucket in engine.buckets)


for step in (mz.Zero1, mz.Zero2):
    order, elements, P = on(4).run(ops_of_a_step, 4, step)[0]
    print(f"{step.__name__}  {' · '.join(order)}")
    print(f"       {elements:,.0f} elements, 2P(N−1)/N = {2 * P * 3 / 4:,.0f}")

# %% [markdown]
# Not an element and not a message of difference. Every gradient is synchronised, once (so *ZeRO needs no gradient synchronisation* is **false** here as well), and the sum is the paper's **2Ψ** (section 7.2.1): ZeRO-2 costs nothing on the wire that DDP did not cost.
#
# Memory for nothing, then? Look again at question 4: we read the meter when backward was *over*.

# %% [markdown]
# ## 6. After backward 1.2 MB less: how much lower is the peak?
#
# A rank runs out of memory at its peak, not at the end of backward. Four ranks, one row of 128 characters each, bf16, buckets of 0.25 MiB. At the end of backward ZeRO-2 holds 2Ψ(1 − 1/N) = 1.2 MB less than ZeRO-1.
#
# **Predict.** And at the peak of the step? Most people say the same 1.2 MB, or less, since gradients must be whole before they can be reduced.


# %%
def one_step(rank, world_size, step, bucket_mb, tries=5):
    """The memory curve of a step (the fastest of some), the ends of its phases, when it peaks, and its messages."""
    model = GPT.preset("tiny")
    arrived, runs = [], []
    for param in model.parameters():
        param.register_hook(lambda _: arrived.append(time.perf_counter()))
    engine = step(model, adamw(model), precision="bf16", bucket_mb=bucket_mb)
    for x, y in data.batches("train", 4, 128, 1 + tries, rank=rank, world_size=world_size):
        arrived.clear()
        with mz.record_memory() as memory:
            loss = engine(x, y)
            forward_end = time.perf_counter()
            engine.backward(loss)
            backward_end = time.perf_counter()
            engine.step()
            ends = [when - memory.entry for when in (forward_end, backward_end, time.perf_counter())]
        times, by_kind = memory.curve()
        peak = times[sum(by_kind.values()).argmax()]
        runs.append((ends[-1], (times, by_kind, ends), sum(when - memory.entry < peak for when in arrived)))
    _, run, gradients = min(runs[1:], key=lambda each: each[0])  # in the first step Adam makes its state
    return run, "start" if gradients < 10 else "end" if gradients > 43 else "middle", len(engine.buckets)


def total(run):
    return sum(run[1].values())


runs = {step: on(4).run(one_step, 4, step, 0.25)[0] for step in (mz.Zero1, mz.Zero2)}
for step, (run, moment, _) in runs.items():
    print(f"{step.__name__}: peak {total(run).max() / 1e6:.1f} MB, at the {moment} of backward")
before, after = (total(run).max() for run, _, _ in runs.values())
print("lower by, MB")
print(f"{(before - after) / 1e6:.1f}")

# %% tags=["nbval-ignore-output"]
by_name = {"ZeRO-1": runs[mz.Zero1][0], "ZeRO-2": runs[mz.Zero2][0]}
title = "One step of a rank (of 4), buckets of 0.25 MiB: ZeRO-2 by kind, ZeRO-1 as a line"
plots.memory_phases(("forward", "backward", "step"), by_name, title)

# %% [markdown]
# By *more*: 1.5 MB. Read the picture from the left. Where forward begins and where it ends the line is 1.7 MB above the area: ZeRO-1's buckets, 2Ψ, all there and all empty. (In between, the two runs are not at the same operation at the same place: each has a clock of its own, stretched to the width of the phase.) Both peak at the **start of backward**, when forward's activations are all alive and hardly a gradient exists. ZeRO-1 has the memory for all of them
# at that moment, ZeRO-2 for one bucket. From there on activations go and shards come, in orange, with a tooth for each bucket that fills. Red is what a reduction needs besides: the buffer in which it receives, and the shard's sum in fp32. (In the step the shard's gradient is there in fp32, 4Ψ/N bytes, in both.)
#
# So the peak has not moved, it has lost its gradients. But that was a bucket size of our choice.
#
# **Predict.** PyTorch's DDP takes buckets of 25 MiB. All of this model fits into one. How high is ZeRO-2's peak then, beside ZeRO-1's 8.2 MB?

# %%
print("bucket        messages     ZeRO-1    ZeRO-2    ZeRO-2 peaks at")
for bucket_mb in (0.125, 0.25, 0.5, 25):
    (run1, _, _), (run2, moment, count) = (on(4).run(one_step, 4, step, bucket_mb, 1)[0] for step in (mz.Zero1, mz.Zero2))
    peaks = [f"{total(run).max() / 1e6:.1f} MB" for run in (run1, run2)]
    print(f"{bucket_mb:>6} MiB  {count:>9}     {peaks[0]}    {peaks[1]}    the {moment} of backward")
print("MB at the peak, in one bucket")
for name, run in (("ZeRO-1", run1), ("ZeRO-2", run2)):
    peak = total(run).argmax()
    print(f"{name}: " + ", ".join(f"{kind} {curve[peak] / 1e6:.2f}" for kind, curve in run[1].items() if curve[peak] > 10_000))
print("ZeRO-2 in one bucket, MB")
print(peaks[1].split()[0])

# %% [markdown]
# *Higher* than ZeRO-1, and nothing is left of the 1.5 MB. A bucket of all gradients has all its memory from the first gradient on: at the start of backward the rank holds the 8.2 MB of ZeRO-1. And at the **end of backward** both hold more. Follow it by kind. `grads` 2.07 MB is the bucket, 2Ψ = 1.66, and the shard,
# 2Ψ/N = 0.41: memory of its own, where ZeRO-1's is a slice of the bucket. That is the difference. `comm` 2.48 MB is the buffer in which a rank receives, as large as the bucket; and 4Ψ/N = 0.83 for the **sum of a shard in fp32**, since four numbers of 16 bits are not added in 16 bits. The package adds by itself where gloo is the backend;
# NCCL adds inside its kernel. Without these 0.83 MB the end would be at 7.9, and the peak where it was, at the start with 8.2: no gain either way. What question 4 counted is what remains a moment later.
#
# The other end of the table: below 0.25 MiB the messages double and the peak stays, because the largest tensor, 128 × 512 weights, is a bucket by itself however small the others are. In between, the rule is *small enough not to count beside the rest, large enough not to pay for latency* (lesson 01, question 3).
# What a rank needs for gradients at any moment: the shards so far, one bucket under way with its receive buffer (and while a shard is added up, its sum in fp32), and one that fills.
#
# At a real size: DeepSpeed's `reduce_bucket_size` is 5e8 elements, 1 GB in 16 bits, beside 14 GB of gradients for 7 B parameters. Fine there; for a model of 0.5 B it is one bucket.
#
# That was the first catch. The second one needs more than one backward.

# %% [markdown]
# ## 7. Four backwards, one step: how many times as much does ZeRO-2 send as ZeRO-1?
#
# Gradient accumulation over G micro-batches. In lessons 01 and 02 the cure for needless traffic was `no_sync()`: gradients pile up on their own rank, and the last backward reduces what has come together. Ask ZeRO-2 for it:

# %% tags=["raises-exception"]
def accumulate(rank, step, micro_steps, quiet=False, rows=4):
    """Elements sent in one step over some micro-batches, in units of Ψ(N−1)/N. Quiet: only the last backward reduces. Rows:
    of each micro-batch, on all ranks together."""
    model = GPT.preset("nano")
    engine = step(model, sgd(model))
    with mz.record_traffic() as traffic:
        for i, (x, y) in enumerate(data.batches("train", rows, 64, micro_steps, rank=rank, world_size=2)):
            with engine.no_sync() if quiet and i < micro_steps - 1 else nullcontext():
                engine.backward(engine(x, y) / micro_steps)
        engine.step()
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit.startswith("bucket"))
    return elements / (sum(param.numel() for param in model.parameters()) / 2)


try:
    on(2).run(accumulate, mz.Zero2, 4, True)
except mz.RankError as error:
    raise RuntimeError(error.message) from None

# %% [markdown]
# It refuses, and it has to. What waits for the next backward would be this rank's *whole* gradient, 2Ψ bytes, and that is the memory ZeRO-2 exists to give back. A sum of means is the mean of the sums, so it can do the next best thing: reduce each micro-batch, and add to the shard.
#
# **Predict.** G = 4. How many times as much does ZeRO-2 send as ZeRO-1 with `no_sync()`?

# %%
print("sent in a step, times Ψ(N−1)/N")
print("         ZeRO-1, no_sync   ZeRO-2   ZeRO-3 (theory)")
for micro_steps in (1, 2, 4):
    quiet = on(2).run(accumulate, mz.Zero1, micro_steps, True)[0]
    zero2_sends = on(2).run(accumulate, mz.Zero2, micro_steps)[0]
    zero3_sends = mz.theory.traffic(3, 1000, 2, micro_steps=micro_steps) / 500
    print(f"G = {micro_steps}    {quiet:<15.1f}   {zero2_sends:<6.1f}   {zero3_sends:.0f}")
print("times as much")
print(zero2_sends / quiet)

# %% [markdown]
# Two and a half: **(G + 1)Ψ**, G reduce-scatters and the weights' all-gather, against 2Ψ. "ZeRO-2 is free" holds for G = 1. In the last column stands what lesson 04 will build and measure: ZeRO-3 gathers weights twice in every micro-step and sends 3GΨ. (So *ZeRO-3 sends twice what
# ZeRO-2 sends* is **false**: it is 3G/(G + 1) times, 1.5, 2.0 and 2.4 in the three rows, and twice at G = 2 only.)
#
# With this table we can settle half of another rumour: *small batches make ZeRO-3 communication-bound; accumulation fixes it*. A rank's computing grows with the rows it reads. So what matters is how much it sends for each row.
#
# **Predict.** A step reads 4 rows. Now make it 16: either as four micro-batches of 4, or as one of 16. With ZeRO-2, what share of the bytes *a row* remains in the first case? A quarter?

# %%
def sent_for_a_row(stage, rows, micro_steps):
    """In units of Ψ(N−1)/N, for each row that a step of micro-batches of so many rows reads (ZeRO-3: by theory)."""
    of_stage = {
        1: lambda: on(2).run(accumulate, mz.Zero1, micro_steps, True, rows)[0],
        2: lambda: on(2).run(accumulate, mz.Zero2, micro_steps, False, rows)[0],
        3: lambda: mz.theory.traffic(3, 1000, 2, micro_steps=micro_steps) / 500,
    }
    return of_stage[stage]() / (rows * micro_steps)


print("sent for each row         ZeRO-1, no_sync   ZeRO-2   ZeRO-3 (theory)")
for rows, micro_steps in ((4, 1), (4, 4), (16, 1)):
    shares = [sent_for_a_row(stage, rows, micro_steps) / sent_for_a_row(stage, 4, 1) for stage in (1, 2, 3)]
    name = f"{micro_steps} micro-batch{'es' * (micro_steps > 1)} of {rows}"
    print(f"{name:<25} {shares[0]:<17.1%} {shares[1]:<8.1%} {shares[2]:.1%}")
print("ZeRO-2, four micro-batches of 4")
print(f"{sent_for_a_row(2, 4, 4) / sent_for_a_row(2, 4, 1):.1%}")

# %% [markdown]
# 62.5 %, and with more micro-steps never less than half: only the all-gather of the weights is shared by the rows, every reduction is paid anew. For ZeRO-3 accumulation saves nothing at all, a row costs the same as before. What helps every stage is the last line, a larger *micro-batch*: more rows in one backward, a quarter of the bytes for each. **The claim, settled
# as far as bytes go: half true.** Small batches do make communication weigh more, and larger ones are the cure. Accumulation alone is one for DDP and ZeRO-1 with `no_sync()`, half a one for ZeRO-2, none for ZeRO-3. (Lesson 05 puts a clock to it.)
#
# That each micro-step is reduced by itself has one good side.

# %% [markdown]
# ## 8. A thousand gradients of 1, added in bf16: how large is the sum?
#
# The shard accumulates over micro-steps. Its gradients have 16 bits. What if the sum had, too?
#
# **Predict.** A bf16 number starts at 0, and 1 is added a thousand times.

# %%
total_16, total_32 = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
for _ in range(1000):
    total_16 += 1
    total_32 += 1
print(f"fp32: {total_32.item():.0f}")
print("bf16")
print(f"{total_16.item():.0f}")

# %% [markdown]
# 256, and it would be 256 after a million. bf16 has 8 significant binary digits, between 256 and 258 there is no number, and 257 is rounded back. It is question 7 of lesson 02 once more: where many small things add up, 16 bits lose them.
#
# So from the second backward on, the engine keeps the shard in fp32. That costs 4Ψ/N bytes instead of 2Ψ/N, while a step has several micro-batches. We let it accumulate 128 micro-batches, and take as the truth each micro-batch reduced by itself and all of them added in fp64. Beside it ZeRO-1 with
# `no_sync()`, where autograd adds in the bucket, in bf16.


# %%
def accumulated(rank, step, micro_steps, apart=False):
    """What this rank's optimizer sees of a gradient over some micro-batches, and the meter after the first two. apart: each
    micro-batch by itself, added here in fp64."""
    model = GPT.preset("nano")
    optimizer = sgd(model)
    engine = step(model, optimizer, precision="bf16")
    truth, metered = 0, []

    def seen():
        engine.sync_gradients()
        return torch.cat([piece.grad for group in optimizer.param_groups for piece in group["params"]]).double()

    for i, (x, y) in enumerate(data.batches("train", 2, 8, micro_steps, rank=rank, world_size=2)):
        with engine.no_sync() if step is mz.Zero1 and i < micro_steps - 1 else nullcontext():
            engine.backward(engine(x, y) / micro_steps)
        if apart:
            truth += seen()
            engine.zero_grad()
        elif i < 2:
            with mz.record_memory() as memory:
                metered.append(memory.now["grads"] / sum(param.numel() for param in model.parameters()))
    return truth if apart else seen(), metered


truth, _ = on(2).run(accumulated, mz.Zero2, 128, True)[0]
zero2_sum, (first, second) = on(2).run(accumulated, mz.Zero2, 128)[0]
zero1_sum, _ = on(2).run(accumulated, mz.Zero1, 128)[0]


def off(gradient):
    return ((gradient - truth).norm() / truth.norm()).item()


print(f"ZeRO-2 holds for gradients, bytes a parameter: {first:.1f} after one backward, {second:.1f} after two")
print(f"ZeRO-1, no_sync, is off by {off(zero1_sum):.0%}")
print("ZeRO-2 is off by")
print(f"{off(zero2_sum):.0%}")

# %% [markdown]
# (Two ranks: 2Ψ/N is 1.0 byte a parameter, 4Ψ/N is 2.0.) ZeRO-2's sum is the truth, and the quiet one in bf16 has lost a hundredth of it on the way. So the loud way buys something for its traffic, and if you accumulate long in 16 bits with `no_sync()`, know what you do.
#
# One more thing can go wrong with accumulation, and it goes wrong without a sound.

# %% [markdown]
# ## 9. Four checks, one bug: how many of them notice it?
#
# Accumulated gradients and reductions have to come in the right order. In DeepSpeed's bf16 optimizer they did not, for some versions (pull request 7985, under ZeRO-1): the *last* micro-batch was added after the reduction. So to a mean over all ranks each rank added its own gradient, which nobody had averaged.
#
# We build it into our engine by overriding `_launch`, which you have read in question 3. In the last micro-batch it takes the rank's own gradients where the mean belongs:


# %%
class TooLate(mz.Zero2):
    last = False

    def _launch(self, bucket):
        if not self.last:
            return super()._launch(bucket)
        self._land()
        own_P = bucket.close()
        bucket.grad_S.copy_(flat.shard(own_P, self.rank, self.world_size))  # and nothing is sent
        self._under_way[bucket] = comm.Pending()


# %% [markdown]
# **Predict.** Twelve steps of four micro-batches, and four checks: do the ranks' weights agree? is the loss as good as DDP's? does a rank send what it should? are the weights DDP's? How many of the four notice the bug?


# %%
def four_micro_batches(rank, step):
    """Twelve steps of SGD: the weights, the mean loss, and what was sent, in units of Ψ(N−1)/N a step."""
    model = GPT.preset("nano")
    engine = step(model, sgd(model))
    losses = []
    with mz.record_traffic() as traffic:
        for i, (x, y) in enumerate(data.batches("train", 16, 64, 48, rank=rank, world_size=2)):
            engine.last = i % 4 == 3
            loss = engine(x, y)
            engine.backward(loss / 4)
            if engine.last:
                engine.step()
            losses.append(loss.item())
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit.startswith("bucket"))
    return weights, sum(losses[-8:]) / 8, elements / 12 / (weights.numel() / 2)


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-6)


expected, expected_loss, _ = on(2).run(four_micro_batches, mz.DDP)[0]
print("           ranks agree   loss    sent   as DDP")
for step in (mz.Zero2, TooLate):
    (weights, loss, sent), (others, _, _) = on(2).run(four_micro_batches, step)
    checks = [close(weights, others), abs(loss - expected_loss) < 0.01, sent == 5, close(weights, expected)]
    print(f"{step.__name__:<10} {checks[0]!s:<13} {loss:.2f}    {sent:.0f}Ψ     {checks[3]}")
print("notice the bug, of four checks")
print(checks.count(False))

# %% [markdown]
# Two. The ranks agree, because the weights are gathered after the step, whatever the gradients were. The loss is the same to two digits: the wrong part is one micro-batch in four, and on average over many steps a rank's own gradient *is* the mean. It is only
# noisier: of the last micro-batch each weight sees one rank's rows, and the more ranks there are, the more rows it misses. What finds it is the parity with DDP, as in lesson 02, and this time a cheaper check: **the engine sends 4Ψ where it must send 5Ψ.** A bucket that was never reduced leaves a hole in the traffic. Count the reduce-scatters of a step, G for each bucket; it takes no second engine.
#
# **What is still wasteful?** Gradients and optimizer are down to 14Ψ/N. The weights are not.

# %%
parts = mz.theory.memory(2, 7.5e9, 64)
print("the weights' share of what a ZeRO-2 rank holds, on 64 ranks")
print(f"{parts['params'] / sum(parts.values()):.0%}")

# %% [markdown]
# Nine tenths of it are 2Ψ of weights, the same on every rank. And each layer's weights are read twice in a step, once in forward and once in backward; in between, and while any other layer works, they lie there. A gradient can be freed when it has been used. Can a weight? It is needed again. That is ZeRO-3, and lesson 04.
#
# ## What has changed
#
# The module on one page first, then the difference between `minizero/zero1.py` and `minizero/zero2.py`, made from the two files.

# %%
print(inspect.getdoc(inspect.getmodule(mz.Zero2)))

# %% [markdown]
# How to read it. `-` was ZeRO-1's, `+` is ZeRO-2's, the others both have. What has not changed is left out, such as `ShardedUpdate`, the sharded step, which `zero2.py` imports.
#
# 1. **`ShardBucket` becomes `TransientBucket`**, whose buffer has memory from the first gradient until its reduction has landed. It is told the parameters' names, for the sentence of question 3.
# 2. **`_launch` lands the bucket before**, so it is freed *before* the next leaves. In ZeRO-1 it only had to be waited for. That is all of "free in time".
# 3. **`_launched` counts**, since `_under_way` no longer remembers every bucket of this backward, only the last. When all are reduced, it goes back to 0, and each bucket forgets what had arrived.
# 4. **`no_sync` refuses.** Everything else has stayed as it was, the step included.

# %%
changes(mz.Zero1, mz.Zero2)

# %% [markdown]
# ## Interview corner
#
# ### "Why is ZeRO-2 free, and ZeRO-3 not?"

# %%
print("7 B parameters on 16 GPUs, GB of model states on each, ZeRO-1 and ZeRO-2")
print(*(f"{sum(mz.theory.memory(stage, 7e9, 16).values()) / 1e9:.2f}" for stage in (1, 2)))
print("GB sent by each in one step, in 16 bits, ZeRO-1, ZeRO-2 and ZeRO-3")
print(*(f"{mz.theory.traffic(stage, 7e9, 16) * 2 / 1e9:.2f}" for stage in (1, 2, 3)))

# %% [markdown]
# **What they want to find out.** Whether you see *when* each kind of memory is needed, or have learnt a table.
#
# **The full answer.** DDP already reduces every gradient in two halves. After the reduce-scatter a rank has the mean of its 1/N, and its sharded optimizer reads nothing else. So the rest is freed without anybody asking for it again: no message more, 2Ψ(N−1)/N as before. A weight is needed twice, in forward and in backward. If it is
# freed after use it has to be gathered each time: two all-gathers in a step instead of one, 3Ψ. For 7 B on 16 GPUs: 33.25 GB become 20.1 GB at the same 26.25 GB sent; ZeRO-3 sends 39.38. And "free" holds for one backward a step: over G micro-batches ZeRO-2 sends (G + 1)Ψ, where ZeRO-1 with `no_sync` sends 2Ψ.
#
# **In 30 seconds.** A gradient is used once, by the rank that owns it, so the others drop it. A weight is used again, so dropping it means fetching it. 2Ψ against 3Ψ; and with accumulation ZeRO-2 is not free either.
#
# **Follow-ups**
# - *7 B on how many GPUs until ZeRO-2 fits into 24 GB, model states alone?* 14 + 98/N = 24 at N = 9.8, so 10. ZeRO-1 never does: 28 GB do not depend on N.
# - *What is the limit of the saving?* 87.5 %: 14 of 16 bytes. ZeRO-1's is 75 %.
# - *Does it cost time?* No bytes, but copies into buckets, and a launch waits for the bucket before. With too small buckets, latency.
#
# **Wrong answers people give**
# - *"It all-reduces and drops the rest."* Then it would send 3Ψ. A reduce-scatter is half an all-reduce (question 5). Add that DeepSpeed's default bucket does all-reduce, and you have shown that you read code.
# - *"Each rank computes only its part of the gradient."* Each computes all of it, on its own rows. Only the result is shared.
# - *"The optimizer gathers the gradients before the step."* Nobody ever has the whole mean. That is why clipping needs a number from every rank.
#
# **Your own project.** "Fifteen lines with a hook for each parameter: 0 of 113,152 weights differed from DDP's, and at the worst moment a third of the gradient was in memory."
#
# ### "Gradient accumulation under each stage: what is sent, what is held, what would you choose?"

# %%
print("7 B parameters, 16 GPUs, G = 8: GB sent by each in one step, in 16 bits")
print(f"ZeRO-1, no_sync {mz.theory.traffic(1, 7e9, 16, micro_steps=8, no_sync=True) * 2 / 1e9:.1f}")
print(*(f"ZeRO-{stage} {mz.theory.traffic(stage, 7e9, 16, micro_steps=8) * 2 / 1e9:.1f}" for stage in (2, 3)), sep="\n")

# %% [markdown]
# **What they want to find out.** Whether you know that accumulation trades memory for traffic from ZeRO-2 on, and can put a number to it.
#
# **The full answer.** DDP and ZeRO-1 have room for the whole gradient, so they add locally, in `no_sync`, and reduce once: 2Ψ whatever G is. ZeRO-2 has room for 1/N of it, so it reduces every micro-batch and adds to the shard: G reduce-scatters and one all-gather, (G + 1)Ψ. ZeRO-3 gathers weights twice in every micro-batch as well: 3GΨ. With G = 8
# that is 26, 118 and 315 GB. The shard is summed in fp32, 4Ψ/N bytes. So on a slow network with long accumulation I would ask whether ZeRO-1 fits, before I take ZeRO-2; and I would spend memory that is left on a larger micro-batch, because that divides the bytes for each row in every stage.
#
# **In 30 seconds.** 2Ψ, (G + 1)Ψ, 3GΨ. Local accumulation needs the memory that ZeRO-2 gives back. Larger micro-batches help all stages; more of them help DDP and ZeRO-1 fully, ZeRO-2 by half at most, ZeRO-3 not at all.
#
# **Follow-ups**
# - *Small batches make ZeRO-3 communication-bound. Does accumulation help?* Not a byte: each row costs as much as before. A larger micro-batch does (question 7).
# - *G = 4: how much does ZeRO-3 send over ZeRO-2?* 12Ψ over 5Ψ, 2.4 times. Not twice, and not 1.5 (question 7).
# - *Why not reduce only in the last micro-step, and keep whole gradients until then?* One can; DeepSpeed asserts against its `no_sync` at stage 2 for the same reason as we do. It is ZeRO-1's memory under ZeRO-2's name.
# - *In which dtype do you accumulate?* fp32. In bf16 a thousand ones make 256 (question 8).
#
# **Wrong answers people give**
# - *"Accumulation is free, it only changes when we step."* In DDP with `no_sync`. ZeRO-2 pays a reduce-scatter for each micro-batch (question 7).
# - *"ZeRO-2 sends 2Ψ, always."* At G = 1.
# - *"Accumulation makes the traffic a row smaller by G."* For ZeRO-2 by at most 2, for ZeRO-3 not at all.
#
# **Your own project.** "I counted 2, 3 and 5 times Ψ(N−1)/N for G = 1, 2, 4, and later found a bug by that count: it was 4 where it had to be 5."
#
# ### "You switch from ZeRO-1 to ZeRO-2, and the peak stays the same. What do you check?"
#
# **What they want to find out.** Whether you have ever looked at a memory curve, and can tell a state from a peak.
#
# **The full answer.** First, when is the peak? If it lies at the start of backward, the activations are what is large there, and ZeRO-2 can take only the gradients' 2Ψ out of it. Second, the bucket size: a bucket as large as the model is whole from the first gradient to the last, with a receive buffer, a shard and (where the package adds) the shard's sum in fp32 at the end; we measured a peak *above* ZeRO-1's.
# Third, who still points there: one view keeps a whole bucket alive, so look for gradients kept in logs, hooks and closures. Fourth, the allocator: what the framework has freed may still be reserved, so I compare allocated bytes, not what `nvidia-smi` shows. Last, N: on two ranks all of it is one byte a parameter of 16.
#
# **In 30 seconds.** Find the moment of the peak and its kinds. Then bucket size, forgotten references, and allocated against reserved.
#
# **Follow-ups**
# - *How much can the peak fall at best?* By 2Ψ less the bucket that fills, when it lies at the start of backward: there are no shards yet. 1.5 MB of 1.7 in question 6.
# - *7 B parameters, buckets of 5e8 elements: how much is that?* 1 GB each in 16 bits; one under way with its receive buffer and one that fills make nearly 3 GB, where the gradients are 14.
# - *Rebinding `.data` or `del`: does it free the bucket?* Only if nobody else points to the storage. Shrinking the storage does, and then no one may read the views (question 3).
#
# **Wrong answers people give**
# - *"Memory falls by 2Ψ(1 − 1/N), the formula says so."* After backward. The peak is another moment (question 6).
# - *"Smaller buckets are always better."* Below the largest tensor they only add messages (question 6).
# - *"zero_grad(set_to_none=True) frees the gradients."* It frees views. In DDP and ZeRO-1 the buckets stay (question 1).
#
# **Your own project.** "I drew the curve of one step for both and saw that the peak was before the first gradient. After that I stopped tuning gradients, and turned to activations."
#
# ## Now you
#
# `minizero start 03`, in a terminal, puts the exercises into `work/03_zero2.ipynb`. You build this step from plain `torch.distributed` calls: a reduce-scatter for each bucket, freed in time, shards that accumulate, under a limit on the peak. Some numbers and one bug come on top.
