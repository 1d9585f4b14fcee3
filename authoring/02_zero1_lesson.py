# %% [markdown]
# # 02 ZeRO-1: one shard of Adam each
#
# In DDP every rank makes the whole optimizer step, all of them the same one, out of the same mean gradient. In ZeRO-1 each rank makes 1/N of it and hands the result round.
#
# ```
#            backward                     the step                 and after it
# DDP        reduce-scatter, all-gather   every rank: all of it
# ZeRO-1     reduce-scatter               every rank: 1/N of it    all-gather of the weights
# ```
#
# The same two collectives, with the step moved in between. What does a rank save by it, what does it pay, and what becomes of everything that a real training loop does with the
# *whole* gradient: clip it, scale it, find an overflow in it? Nine questions, each with a number in it. Write yours down before you run the cell.

# %% tags=["nbval-ignore-output"]
import functools
import inspect
import math
import textwrap
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import minizero as mz
from minizero import data
from minizero.course import changes
from minizero.lens import plots
from minizero.model import GPT
from minizero.parts import flat
from minizero.zero1 import ShardedUpdate

torch.set_num_threads(1)  # as in every rank
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. Weights and gradients shrink to two bytes: how many bytes a parameter are left?
#
# In lesson 01 a rank held 16 bytes for each parameter: 4 for the weight, 4 for its gradient, 8 for Adam, all in fp32. Large models are trained in *mixed precision*: forward and
# backward work on 16-bit weights and leave 16-bit gradients. `mz.DDP(…, precision="bf16")` does that; what bf16 is, and what goes wrong with 16 bits, are questions 7 and 8. Here only the size matters.
#
# We run a step of AdamW on the preset `"tiny"` (Ψ = 827,648 parameters), go on to the end of the next backward, when everything is alive, and read the meter.
#
# **Predict.** Two bytes instead of four for weights and gradients. How many bytes a parameter does a rank hold now? Most people say 12: the 16 of before, minus 4.


# %%
def adamw(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def held(rank, world_size, step, precision):
    """Bytes by kind at the end of the second backward, what the optimizer's bytes are, and its pieces."""
    model = GPT.preset("tiny")
    optimizer = adamw(model)
    engine = step(model, optimizer, precision=precision, bucket_mb=1)
    (x0, y0), (x1, y1) = data.batches("train", 16, 128, 2, rank=rank, world_size=world_size)
    with mz.record_memory() as memory:
        engine.backward(engine(x0, y0))
        engine.step()
        engine.backward(engine(x1, y1))
        by_kind = {kind: memory.now[kind] for kind in ("params", "grads", "optimizer")}
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    what = {"fp32 weights": sum(piece.nbytes for piece in pieces)}
    for moment in ("exp_avg", "exp_avg_sq"):
        what[moment] = sum(optimizer.state[piece][moment].nbytes for piece in pieces)
    return by_kind, what, len(pieces)


psi = sum(param.numel() for param in GPT.preset("tiny").parameters())
ddp = {n: on(n).run(held, n, mz.DDP, "bf16")[0] for n in (1, 2, 4)}
print("bytes a parameter, on one rank of N")
for n, (by_kind, *_) in ddp.items():
    kinds = (f"{plots.NAMES.get(kind, kind)} {count / psi:.1f}" for kind, count in by_kind.items())
    print(f"N = {n}   ", "   ".join(kinds))
print("together, for every N")
print(*{f"{sum(by_kind.values()) / psi:.1f}" for by_kind, *_ in ddp.values()})

# %% [markdown]
# Sixteen again. Four bytes have gone from weights and gradients, and four have come to the optimizer. What are its 12?

# %%
print("of the optimizer's bytes a parameter")
for name, count in ddp[1][1].items():
    print(f"{name:<13} {count / psi:.1f}")

# %% [markdown]
# `exp_avg` and `exp_avg_sq` are Adam's running means of the gradient and of its square. The third is a copy of the weights in fp32, the **master weights**: the optimizer updates those, and the 16-bit
# weights are their rounding. Question 7 shows what happens without them.
#
# So the 16 of every interview are **2 + 2 + 12**: weights 2Ψ, gradients 2Ψ, optimizer 12Ψ bytes, Ψ being the number of parameters. Interview notes say that *Adam's state is 12Ψ and the gradient Ψ, together 16Ψ*.
# **The claim, settled: false.** 12 + 1 makes 13. The gradient takes 2 bytes a parameter, not 1, and the weights' 2 are missing.
#
# And the three rows are the same for every N: whatever one rank holds, the others hold too. The 12 are three quarters of it. They came out of the same mean gradient on every rank, so N − 1 of the N copies
# tell nobody anything. We cut them into N shards. Where exactly?

# %% [markdown]
# ## 2. 145 weights, four ranks: how many does each one own?
#
# A border may run through the middle of a matrix: Adam treats each element by itself, so it does not mind. What must hold is that **every element belongs to exactly one rank**, and that all shards have the same size,
# because a collective cuts its tensor into N equal parts.
#
# The parameters of a bucket lie one behind the other in one flat buffer of P elements, and rank r owns the r-th part, S = P / N elements. Two layers make four parameters: 80 + 10 + 50 + 5 = 145 weights.
#
# **Predict.** Four ranks. How many of the 145 does the last one own? Most people say 36 or 37.


# %%
def two_layers():
    return nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 5))


names, params = zip(*reversed(list(two_layers().named_parameters())), strict=True)  # a bucket begins with the last
layout = flat.layout(params, world_size=4)
owned = [sum(cut.of_tensor.stop - cut.of_tensor.start for cut in flat.cuts(layout, rank)) for rank in range(4)]
print("owned by the four ranks:", " + ".join(map(str, owned)), "=", sum(owned))
print("owned by the last one")
print(owned[3])

# %% tags=["nbval-ignore-output"]
plots.shards(layout, names, f"145 weights in a flat buffer of {layout.P}: who owns what")

# %% [markdown]
# Sixteen, and rank 2 owns 64. Read the picture like a page: rank 0's row goes on in rank 1's. Both matrices are cut, and together the ranks own each of the 145 once. Hatched is **padding**, zeros that
# belong to no parameter. There are two kinds. The end is padded so that N divides P. And every parameter begins at a multiple of 32 elements, because a matrix product whose weights start elsewhere
# may take another kernel and give other last bits; we want the same bits as DDP.
#
# Is so much padding the price? Only for toys: at most 31 elements a parameter, and fewer than 32N at the end of a bucket.

# %%
P = flat.layout(list(GPT.preset("tiny").parameters()), world_size=64).P
print("padding of the GPT on 64 ranks, as a share of its parameters")
print(f"{P / psi - 1:.1%}")

# %% [markdown]
# The optimizer has to learn of this. You build it as ever, over `model.parameters()`, and `mz.Zero1` puts *pieces* in their place: for each parameter that meets this rank's shard, the view of the shard that belongs to it.


# %%
def pieces(rank):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mz.Zero1(model, optimizer)
    return [piece.numel() for piece in optimizer.param_groups[0]["params"]]


for rank, sizes in enumerate(on(4).run(pieces)):
    print(f"rank {rank}'s optimizer updates pieces of", sizes)

# %% [markdown]
# Rank 3's optimizer has one piece of 16 elements, and will never have state for more. The groups keep their number and order, so a learning rate for each group and a scheduler go on working. The paper's word for all this is
# to **partition** the optimizer states (section 5.1). PyTorch's own `ZeroRedundancyOptimizer` gives away whole parameters instead, and its shares are as uneven as the parameters are.
#
# Each rank now updates its own elements. How do the others hear of it?

# %% [markdown]
# ## 3. The step moves between the halves: in how many weights do the results differ?
#
# Lesson 01 sent a bucket's gradients through an all-reduce, which is a reduce-scatter and an all-gather. After the first half a rank has the mean gradient of its shard, and that is all
# its piece of the optimizer asks for. So it steps there and then, and the second half carries updated weights instead of gradients.
#
# Here it is in plain PyTorch, with one bucket and no overlap. `_P` marks a tensor of P elements, `_S` one of S = P / N.


# %%
def zero1_by_hand(rank, world_size, steps):
    model = GPT.preset("nano")
    weights_P = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(weights_P, model.parameters())  # from here on each parameter is a view of it
    shard_S = weights_P.chunk(world_size)[rank].requires_grad_()
    shard_S.grad = torch.empty_like(shard_S)
    optimizer = torch.optim.AdamW([shard_S], lr=3e-3)
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        model(x, y).backward()
        grad_P = torch.cat([param.grad.flatten() for param in model.parameters()])
        dist.reduce_scatter(shard_S.grad, list(grad_P.chunk(world_size)))
        shard_S.grad /= world_size
        optimizer.step()
        dist.all_gather(list(weights_P.chunk(world_size)), shard_S.detach())
        model.zero_grad()
    return weights_P


# %% [markdown]
# **Predict.** Twenty steps of AdamW on two ranks, once like this and once with `mz.DDP`. In how many of the 113,152 weights do the results differ, in whichever digit? Most people allow for rounding:
# "in nearly all, in the last digits."


# %%
def train(rank, world_size, step, steps, optimizer=adamw, schedule=None, **settings):
    """What one rank does with an engine: its losses, and its weights as one long vector."""
    model = GPT.preset("nano")  # every run of a rank starts from seed 0, and rank 0 wins anyway
    optimizer = optimizer(model)
    engine = step(model, optimizer, **settings)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, torch.cat([weight.flatten() for weight in engine.state_dict().values()])


by_hand = on(2).run(zero1_by_hand, 2, 20)
ddp_weights = on(2).run(train, 2, mz.DDP, 20)[0][1]
print(f"weights that differ, of {ddp_weights.numel():,}")
print(sum((weights != ddp_weights).sum().item() for weights in by_hand))

# %% [markdown]
# In none. The sums are the same sums, and what Adam does to an element does not depend on who owns it. (Two numbers can be added in one order only. With more of them the order
# of a plain `reduce_scatter` is the library's affair; minizero always adds in rank order.) **Only the place of the computation has changed.**
#
# The package's step is the same three moves, out of `minizero/zero1.py`. A `FlatShard` holds one bucket's weights: `full_P` is all of them, `slice_S` this rank's slice of it, and `publish()` has something to do when there are master weights.

# %%
print(textwrap.dedent(inspect.getsource(ShardedUpdate.step)))

# %% [markdown]
# Now with what real loops have: SGD, which hides nothing, and AdamW in two groups with different decay and learning rate, under a cosine schedule, on 2 ranks and on 4.


# %%
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw_in_groups(model):
    """Matrices decay, vectors (biases and norms) do not, as is usual."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}], lr=3e-3
    )


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def same_as_ddp(world_size, *how):
    (_, expected), *_ = on(world_size).run(train, world_size, mz.DDP, 20, *how)
    return all(torch.equal(got, expected) for _, got in on(world_size).run(train, world_size, mz.Zero1, 20, *how))


print("SGD, 2 ranks:", same_as_ddp(2, sgd))
for n in (2, 4):
    print(f"AdamW in two groups with a schedule, {n} ranks:", same_as_ddp(n, adamw_in_groups, cosine))

# %% [markdown]
# Interview notes say that *ZeRO is mathematically the same as data parallelism*. **The claim, settled: true**, and here to the last bit. What has to hold for it: the optimizer is *element-wise*. Ask for one that looks at a whole
# matrix, as Adafactor does, and the engine refuses before anything has moved, instead of training another model:


# %%
def adafactor(rank):
    model = two_layers()
    return mz.Zero1(model, torch.optim.Adafactor(model.parameters()))


try:
    on(2).run(adafactor)
except mz.RankError as error:
    print(f"{error.exception_type}: {error.message.partition(':')[0]}")

# %% [markdown]
# Same weights, then. What has it saved?

# %% [markdown]
# ## 4. From DDP to ZeRO-1 on two ranks: how much of the memory is saved?
#
# Weights 2Ψ and gradients 2Ψ stay as they were on every rank, and the optimizer's 12Ψ are shared:
#
# $$\text{bytes held by a rank} \;=\; 4\Psi + \frac{12\Psi}{N}$$
#
# where $\Psi$ counts parameters, $N$ ranks, and 4 and 12 are bytes a parameter.
#
# **Predict.** On 2 ranks, what share of DDP's 16Ψ has gone? And on very many ranks? Interview notes say that *ZeRO-1 saves 33 %*.

# %%
zero1 = {n: on(n).run(held, n, mz.Zero1, "bf16")[0] for n in (1, 2, 4)}


def saved(n):
    return 1 - sum(zero1[n][0].values()) / sum(ddp[n][0].values())


def saved_in_theory(n):
    return 1 - sum(mz.theory.memory(1, psi, n).values()) / sum(mz.theory.memory(0, psi, n).values())


beyond = sum(zero1[2][0].values()) - sum(mz.theory.memory(1, psi, 2).values())
print("measured, on 1, 2 and 4 ranks:", *(f"{saved(n):.2%}" for n in (1, 2, 4)))
print("theory:                       ", *(f"{saved_in_theory(n):.2%}" for n in (1, 2, 4)))
print("on 8, 64 and 1,024 ranks:     ", *(f"{saved_in_theory(n):.2%}" for n in (8, 64, 1024)))
print(f"bytes held on 2 ranks beyond 4Ψ + 12Ψ/N: {beyond}, for {zero1[2][2]} pieces")
print("saved on 2 ranks")
print(f"{saved(2):.1%}")

# %% tags=["nbval-ignore-output"]
rows = {"DDP, any N": ddp[4][0]} | {f"ZeRO-1, N = {n}": zero1[n][0] for n in (1, 2, 4)}
plots.memory_bars(rows, "What one rank holds, 0.8 M parameters, AdamW in bf16")

# %% [markdown]
# 37.5 %, and 56 % on 4 ranks, 66 % on 8. **The claim, settled: false.** The saving is 0.75 · (1 − 1/N): three quarters of the bytes are the optimizer's, and of these all but 1/N go. It has no fixed value; its
# limit is 75 %, and for no N is it 33 %. (Beyond the formula Adam counts the steps of each piece, in 4 bytes.)
#
# For the paper's example, 7.5 billion parameters on 64 ranks, it makes 31.4 GB out of 120. In pure fp32 the same cut leaves 8Ψ + 8Ψ/N, because there is no master to share.
#
# Two things the meter does not show here, for it was read after a backward. During the step the shard's gradient exists in fp32 too, 4Ψ/N bytes. And activations are no model states: ZeRO-1 does not touch them.
#
# So three of four bytes can go. What do the others pay for it on the wire?

# %% [markdown]
# ## 5. Now the weights travel too: how many times as much does a rank send?
#
# DDP sends gradients. ZeRO-1 sends gradients, and after the step it sends weights.
#
# **Predict.** The elements that one rank sends in a step, ZeRO-1 over DDP. Most people say 1.5 or 2. (The other rumour goes the opposite way: *ZeRO needs no gradient synchronisation*.)


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


for n in (2, 4):
    _, before, P = on(n).run(ops_of_a_step, n, mz.DDP)[0]
    _, after, _ = on(n).run(ops_of_a_step, n, mz.Zero1)[0]
    print(f"N = {n}: DDP {before:,.0f}, ZeRO-1 {after:,.0f} elements, 2P(N−1)/N = {2 * P * (n - 1) / n:,.0f}")
print("times as much")
print(f"{after / before:.2f}")

# %% [markdown]
# Once as much. The all-gather of the weights is not added to DDP's traffic; it *replaces* the all-gather of the gradients, which nobody needs any more. Each half sends P(N−1)/N elements (P is the padded Ψ), and the sum is the
# **2Ψ** of the paper (section 7.2.1). What has changed is the order:

# %%
for step in (mz.DDP, mz.Zero1):
    order, _, _ = on(2).run(ops_of_a_step, 2, step)[0]
    print(f"{step.__name__:<6}", " · ".join(order))

# %% [markdown]
# Four buckets, four reduce-scatters, four all-gathers for both. **"No gradient synchronisation": false.** Every gradient is reduce-scattered, as in DDP. (`agree` is the one small message in which the ranks
# agree on the step: see question 6.)
#
# One price is real, and it is one of time. DDP's gathers run beside the backward of the next bucket. ZeRO-1's come after `agree`, when backward is over, and nothing computes beside them.
#
# And with accumulation? A step of G micro-batches: gradients reduced in each backward, weights gathered once, in the step.
#
# **Predict.** G = 4, and the plain loop, without `no_sync()`. In DDP it sent 4 times what was necessary. How many times here?


# %%
def accumulate(rank, step, quiet):
    """Elements sent in one step over 4 micro-batches. Quiet: only the last backward reduces."""
    model = GPT.preset("nano")
    engine = step(model, sgd(model))
    with mz.record_traffic() as traffic:
        for i, (x, y) in enumerate(data.batches("train", 16, 64, 4, rank=rank, world_size=2)):
            with engine.no_sync() if quiet and i < 3 else nullcontext():
                engine.backward(engine(x, y) / 4)
        engine.step()
    return sum(op.bytes / 4 for op in traffic.ops if op.unit.startswith("bucket"))


necessary = on(2).run(accumulate, mz.Zero1, True)[0]
print(f"DDP,    every backward reduces: {on(2).run(accumulate, mz.DDP, False)[0] / necessary:.1f} times")
print("ZeRO-1, every backward reduces, times")
print(f"{on(2).run(accumulate, mz.Zero1, False)[0] / necessary:.1f}")

# %% [markdown]
# Two and a half: (G + 1)Ψ, five halves of an all-reduce, where the necessary is 2Ψ, two halves. DDP's plain loop sends 2GΨ, eight. `no_sync()` is worth its line in both.
#
# Memory is saved and traffic is not lost. Now look at what the rank has given up: after backward, nobody holds the whole mean gradient any more.

# %% [markdown]
# ## 6. One rank's gradient is 2.4 long, the other's 1.9: how long is the gradient?
#
# *Clipping* shortens the gradient to a given length where its norm, the root of the sum of its squares, is larger. The norm of all of it, that is. Each rank has a half:


# %%
def norms(rank, step):
    """The norm of what this rank's optimizer sees after backward, and the one that the engine clips by."""
    model = GPT.preset("nano")
    optimizer = sgd(model)
    engine = step(model, optimizer, clip_norm=math.inf)  # measure, do not clip
    x, y = next(data.batches("train", 16, 64, 1, rank=rank, world_size=2))
    engine.backward(engine(x, y))
    engine.sync_gradients()
    grads = [piece.grad.flatten() for piece in optimizer.param_groups[0]["params"]]
    engine.step()
    return torch.cat(grads).norm().item(), engine.grad_norm


(first, _), (second, _) = halves = on(2).run(norms, mz.Zero1)
print(f"rank 0's shard {first:.2f}, rank 1's shard {second:.2f}")

# %% [markdown]
# **Predict.** How long is the whole? 4.3, the sum? 2.1, the mean?

# %%
print(f"DDP's gradient, on every rank: {on(2).run(norms, mz.DDP)[0][1]:.2f}")
print(f"root of the sum of the two squares: {math.hypot(first, second):.2f}")
print("ZeRO-1's engine.grad_norm, on every rank")
print(*{f"{norm:.2f}" for _, norm in halves})

# %% [markdown]
# Neither: norms do not add, their squares do. Each rank sums the squares of its shard, the N sums travel in `agree`, and all ranks clip by the same root. One number a rank instead of Ψ.
#
# Now the line that stands in every training loop, `nn.utils.clip_grad_norm_`. Called on what the optimizer holds here, it computes the norm of *this rank's shard* and shortens by that. We break the engine twice, and clip to 0.5:
#
# - **own norm**: each rank clips by its own shard's norm;
# - **no gather**: somebody has forgotten the all-gather after the step.
#
# **Predict.** You are careful, and compare the ranks' weights with each other after 20 steps. How many of the two bugs do you find?


# %%
def clipped(rank, step, bug=None):
    """Twenty steps with the gradient clipped to 0.5. The last loss, and this rank's weights."""
    model = GPT.preset("nano")
    engine = step(model, sgd(model), clip_norm=None if bug == "own norm" else 0.5)
    if bug == "no gather":
        engine.sharded.step = engine.optimizer.step
    for x, y in data.batches("train", 16, 64, 20, rank=rank, world_size=2):
        loss = engine(x, y)
        engine.backward(loss)
        if bug == "own norm":
            engine.sync_gradients()
            nn.utils.clip_grad_norm_(engine.optimizer.param_groups[0]["params"], 0.5)
        engine.step()
    return loss.item(), nn.utils.parameters_to_vector(model.parameters()).detach()


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-6)


_, expected = on(2).run(clipped, mz.DDP)[0]
found = 0
print("             ranks agree   as DDP   loss")
for bug in (None, "own norm", "no gather"):
    (loss, first), (_, second) = on(2).run(clipped, mz.Zero1, bug)
    found += not close(first, second)
    print(f"{bug or 'no bug':<12} {close(first, second)!s:<13} {close(first, expected)!s:<8} {loss:.2f}")
print("found by comparing the ranks")
print(found)

# %% [markdown]
# One. Without the gather each rank keeps on updating its half of a model whose other half never moves, and the two come apart at once. With the wrong norm the gather sees to it that all ranks agree
# on the wrong weights: the two halves of the gradient were shortened by two different factors, so even its direction is off. Each half is shorter than the whole and is shortened less, so the steps are longer than asked for, and here the loss is even
# the lowest of the three. No comparison *between* ranks will ever find that. Only a comparison with DDP, or with one process, does.
#
# So leave clipping to the engine, `mz.Zero1(…, clip_norm=0.5)`, or ask it for the norm. With `clip_norm` a non-finite norm also means that nobody steps: why that is needed, the next two questions tell.

# %% [markdown]
# ## 7. A hundred steps of 0.0001, starting at 1: where does a bf16 weight end?
#
# The optimizer's 12 bytes contain 4 for master weights. Is that luxury? **bf16** has the range of fp32, and 8 significant binary digits instead of 24.
#
# **Predict.** A weight is 1.0. Each of 100 steps subtracts 0.0001. Where does it end in bf16? In fp32 it is 0.99, and most people say: about there.


# %%
def hundred_steps(dtype):
    weight = torch.ones(1, dtype=dtype)
    optimizer = torch.optim.SGD([weight.requires_grad_()], lr=1e-4)
    weight.grad = torch.ones_like(weight)
    for _ in range(100):
        optimizer.step()
    return weight


print(f"fp32 master: {hundred_steps(torch.float32).item():.4f}")
print(f"its rounding to bf16: {hundred_steps(torch.float32).bfloat16().item():.4f}")
print("bf16 alone")
print(f"{hundred_steps(torch.bfloat16).item():.4f}")

# %% [markdown]
# It never moves. Between 0.9961 and 1 there is no bf16 number, and 0.9999 is rounded back to 1, a hundred times. An update must be about 1/256 of its weight to count at all. The master adds up what is too small to be seen, until the
# 16-bit weight takes its next step.
#
# Does it matter in a model? We train the small GPT at a learning rate of 1e-4, which is a high one for fine-tuning, first with model and optimizer in bf16, then with `mz.Zero1(…, precision="bf16")`.

# %%
def train_alone(dtype):
    """Sixty steps with model and optimizer in one dtype: the losses, and the share of weights that never moved."""
    torch.manual_seed(0)  # the ranks' seed
    model = GPT.preset("nano").to(dtype)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = adamw(model, lr=1e-4)
    losses = []
    for x, y in data.batches("train", 16, 64, 60):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (nn.utils.parameters_to_vector(model.parameters()) == start).float().mean().item()


alone, unmoved = train_alone(torch.bfloat16)


def mean_loss(results):
    return [sum(losses) / len(losses) for losses in zip(*(losses for losses, _ in results), strict=True)]


slowly = functools.partial(adamw, lr=1e-4)
with_master = mean_loss(on(2).run(functools.partial(train, precision="bf16"), 2, mz.Zero1, 60, slowly))
print(f"weights that 60 steps in fp32 have not moved: {train_alone(torch.float32)[1]:.0%}")
print("in bf16 alone")
print(f"{unmoved:.0%}")

# %% tags=["nbval-ignore-output"]
curves = {"bf16 alone": alone, "fp32 master": with_master}
title = "AdamW at a learning rate of 1e-4, weights in bf16"
plots.curve(list(range(1, 61)), curves, xlabel="steps", ylabel="loss", title=title)

# %% [markdown]
# Two thirds of the model stand still. No error, no NaN, a loss that falls: more slowly than it should. That is what 4 of the 16 bytes are for, and with ZeRO-1 they cost 4/N.
#
# If bf16 has so few digits, why not take the other 16-bit format?
#
# ## 8. Four numbers in two formats: how many of them survive?
#
# **fp16** spends its bits the other way: 11 significant digits, and a range that ends at 65504 above and at 6e-8 below. Interview notes say that *bf16 needs no loss scaling and loses less than fp16*.
#
# **Predict.** Take a gradient of 1e-8, and the number 1 + 2⁻⁹, and write each in fp16 and in bf16. Of the four results, how many still differ from 0 and from 1?

# %%
gradient, digit = torch.tensor(1e-8), torch.tensor(1 + 2**-9)
survive = 0
print("        1e-8       1 + 2⁻⁹")
for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
    small, fine = gradient.to(dtype).item(), digit.to(dtype).item()
    survive += (small != 0) + (fine != 1)
    print(f"{name}    {small:<8.1e}   {fine:.6f}")
print("survive")
print(survive)

# %% [markdown]
# Two: the digit in fp16, the gradient in bf16. **The claim, settled: half true.** bf16 needs no scaling, because it reaches as far down as fp32; but it loses *more* digits than fp16, 8 against 11.
#
# What fp16 lacks is range, and range can be lent: multiply the loss by a large number, and by the chain rule every gradient is multiplied by it. Divide by it in fp32, before the optimizer sees it. That
# number is the **loss scale** (Micikevicius et al. 2018, section 3.2). How large? As large as it can be before something exceeds 65504 and becomes infinite. Nobody knows that beforehand, so the scale is *dynamic*: when a gradient overflows, the step is skipped and the
# scale halved; after 2,000 good steps it doubles.

# %%
print("the first loss scale of mz.LossScaler")
print(mz.LossScaler().scale, "= 2 **", math.log2(mz.LossScaler().scale))
print(f"1e-8 scaled by it, in fp16 and divided again: {(gradient * 2**16).half().item() / 2**16:.1e}")

# %% [markdown]
# The same as DeepSpeed's: *fp16's `initial_scale_power` is 16 by default* is **true since 2023** (`FP16_INITIAL_SCALE_POWER_DEFAULT` in its `runtime/constants.py`). Before that it was 32, and old configurations still say so.
#
# **Predict.** With a first scale of 2³², how many of the first 12 steps are skipped? Most people say two or three.


# %%
def start_at(rank, power):
    model = GPT.preset("nano")
    scaler = mz.LossScaler(init_scale=2.0**power)
    engine = mz.Zero1(model, sgd(model), precision="fp16", loss_scaler=scaler)
    for x, y in data.batches("train", 4, 16, 12, rank=rank, world_size=2):
        engine.backward(engine(x, y))
        engine.step()
    return engine.skipped


print("skipped from 2¹⁶:", on(2).run(start_at, 16)[0])
print("skipped from 2³²")
print(on(2).run(start_at, 32)[0])

# %% [markdown]
# All of them, twelve batches read for nothing; twelve halvings have brought the scale to 2²⁰. But how does a rank know? Infinite is one element, in the shard of one rank. If that rank skips and the others step, the weights are half old and half new, and no later step will mend them.
# We put an infinity into the very last gradient of rank 1 alone:


# %%
def with_infinity(grad):
    """The same gradient with its last element infinite."""
    grad = grad.clone()
    grad.view(-1)[-1] = math.inf
    return grad


def overflow_on_one_rank(rank):
    model = GPT.preset("nano")
    engine = mz.Zero1(model, adamw(model), precision="fp16")
    if rank == 1:
        list(model.parameters())[-1].register_hook(with_infinity)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    x, y = next(data.batches("train", 4, 16, 1, rank=rank, world_size=2))
    engine.backward(engine(x, y))
    updated = engine.step()
    moved = (nn.utils.parameters_to_vector(model.parameters()) != before).sum().item()
    return f"step() returned {updated}, weights moved: {moved}, loss scale {engine.loss_scale:,.0f}"


for rank, told in enumerate(on(2).run(overflow_on_one_rank)):
    print(f"rank {rank}: {told}")

# %% [markdown]
# Both skip, no weight moves, and both halve the scale. The message is again the one of question 6: if any element anywhere is infinite, so is the sum of squares, and every rank reads it. (The reverse holds because fp16 ends at 65504: a finite gradient's square is far from the end of fp64, in which the engine adds.) **Skipping is a decision of all ranks or of none.**
#
# ## 9. Three precisions, two engines: how far apart are the losses?
#
# All of it together: the small GPT, 50 steps of AdamW on two ranks, in fp32 and bf16 with DDP and ZeRO-1, and in fp16 with ZeRO-1.
#
# **Predict.** The losses go from 4.3 to about 2.6. How far apart are the five at the end, averaged over the last ten steps?

# %%
runs = {}
for precision in (None, "bf16", "fp16"):
    for step in (mz.DDP, mz.Zero1) if precision != "fp16" else (mz.Zero1,):
        runs[step.__name__, precision or "fp32"] = on(2).run(functools.partial(train, precision=precision), 2, step, 50)
ends = {run: sum(mean_loss(results)[-10:]) / 10 for run, results in runs.items()}
for (step, precision), loss in ends.items():
    print(f"{step:<6} {precision}   {loss:.2f}")
for precision in ("fp32", "bf16"):
    ddp_run, zero1_run = runs["DDP", precision][0][1], runs["Zero1", precision][0][1]
    print(f"same parameters as before, {precision}:", torch.equal(ddp_run, zero1_run))
print("largest difference between the losses")
print(f"{max(ends.values()) - min(ends.values()):.2f}")

# %% [markdown]
# They cannot be told apart. Between DDP and ZeRO-1 there is no difference at all, in bf16 either: the masters are the same to the bit.
#
# **What is still wasteful?** Look at a rank after its backward. It has reduced all its gradients, and 1/N of the buffer is now the mean that its pieces need. The rest holds nothing anyone will read; our engine even overwrites it
# with NaN, so that whoever takes it for a gradient finds out.


# %%
def rubbish(rank):
    model = GPT.preset("nano")
    engine = mz.Zero1(model, sgd(model))
    x, y = next(data.batches("train", 16, 64, 1, rank=rank, world_size=4))
    engine.backward(engine(x, y))
    return torch.cat([param.grad.flatten() for param in model.parameters()]).isnan().float().mean().item()


print("of rank 0's gradients after backward, on 4 ranks, are NaN")
print(f"{on(4).run(rubbish)[0]:.0%}")

# %% [markdown]
# Three quarters on 4 ranks, 63 of 64 on 64: 2Ψ bytes held for 2Ψ/N that are used. Could a rank let go of a bucket's gradients as soon as they are reduced? Then gradients would be sharded as well. That is ZeRO-2, and lesson 03.
#
# ## What has changed
#
# The module on one page first, then the difference between `minizero/ddp.py` and `minizero/zero1.py`, made from the two files.

# %%
print(inspect.getdoc(inspect.getmodule(mz.Zero1)))

# %% [markdown]
# How to read it. After `@@` stands a function, then its lines: `-` was DDP's, `+` is ZeRO-1's, the others both have. Functions that are not named have stayed as they were, and with them the hooks, the order of the buckets, the overlap.
#
# 1. **`_gather_launched` goes.** That was the second half of DDP's all-reduce. `_launch` and `_land` no longer call it.
# 2. **`_launch` reduces into `bucket.grad_S`**, this rank's slice of the buffer, and that is all that comes back. As in DDP, a launch waits for the reduction before it.
# 3. **`_update` becomes `ShardedUpdate.step`**, the three moves of question 3: step, publish, gather the weights.
# 4. **`__init__`** tells each bucket which weights it updates. Rank and world size stand where DDP's masters had rank 0 of 1, a shard that is everything. The optimizer is no longer optional, and `optimizer_sees_shards`: the rank's gradients are whole, but what its optimizer sees of them is a shard, so the norm has to be put together.

# %%
changes(mz.DDP, mz.Zero1)

# %% [markdown]
# `zero1.py` holds one class more, below the step: `mz.ShardedOptimizer(params, torch.optim.AdamW, lr=3e-3)` is `ShardedUpdate` as a torch optimizer of its own, with the signature of `ZeroRedundancyOptimizer`, for a loop whose gradients are averaged already.
#
# ## Interview corner
#
# ### "7 B parameters, 16 GPUs, ZeRO-1, mixed-precision Adam: what does a GPU hold and send?"

# %%
print("GB of model states on each GPU")
print(f"{sum(mz.theory.memory(1, 7e9, 16).values()) / 1e9:.2f}")
print("GB sent by each GPU in one step, in 16 bits")
print(f"{mz.theory.traffic(1, 7e9, 16) * 2 / 1e9:.2f}")

# %% [markdown]
# **What they want to find out.** Whether you know where 16 bytes a parameter come from, which of them ZeRO-1 shards, and that the saving depends on N.
#
# **The full answer.** Mixed precision keeps 2 bytes of weight and 2 of gradient, and for Adam 12: an fp32 master, momentum, variance. ZeRO-1 shards the 12 and nothing else: 4Ψ + 12Ψ/N = 28 GB + 84/16 GB = 33.25 GB, where DDP
# holds 112. That is 70 % less; the formula is 0.75 · (1 − 1/N). Each GPU sends what it sends in DDP, 2Ψ(N−1)/N elements: gradients in a reduce-scatter, updated weights in an all-gather, 26.25 GB in 16 bits. Activations come on top.
#
# **In 30 seconds.** 2 + 2 + 12. The 12 are shared: 28 GB plus 84/16, so 33 GB. Traffic as in DDP, nearly 2Ψ.
#
# **Follow-ups**
# - *From how many GPUs on does it fit into 40 GB, model states alone?* 28 + 84/N = 40 at N = 7, to the last byte. With 8 it is 38.5.
# - *And into 24 GB?* Never: the 28 GB of weights and gradients do not depend on N. That takes ZeRO-2 or 3.
# - *In pure fp32?* 8Ψ + 8Ψ/N: 56 + 3.5 = 59.5 GB. There is no master to share (question 4).
# - *SGD with momentum instead of Adam, mixed precision?* The optimizer has 8 bytes, not 12: 28 + 56/16 = 31.5 GB.
#
# **Wrong answers people give**
# - *"112/16, 7 GB."* That is ZeRO-3. ZeRO-1 shards the optimizer only (question 4).
# - *"Adam 12Ψ and gradient Ψ make 16Ψ."* They make 13. The gradient is 2Ψ, the weights another 2Ψ (question 1).
# - *"ZeRO-1 saves a third."* For no N. 37.5 % on two ranks, 75 % in the limit (question 4).
#
# **Your own project.** "I metered a GPT with 1, 2 and 4 CPU ranks and got 16, 10 and 7 bytes a parameter, as the formula has it. No GPU was needed for that."
#
# ### "Is ZeRO-1 an approximation, and what does it cost?"
#
# **What they want to find out.** Whether you can take an all-reduce apart, and whether you believe or know.
#
# **The full answer.** It is the same algorithm. An all-reduce is a reduce-scatter and an all-gather; ZeRO-1 puts the optimizer's step between the two, and gathers weights instead of gradients. Same sums, same update for each element, so the same parameters; if the order
# of summation is fixed, bit for bit. Traffic is 2Ψ(N−1)/N as before. The price is in time: the weights' all-gather comes after the step, where no backward hides it. And the optimizer must be element-wise.
#
# **In 30 seconds.** The step moves between the two halves of the all-reduce. Same numbers, same bytes, 1/N of the optimizer. What is gathered can no longer hide behind backward.
#
# **Follow-ups**
# - *Why can LAMB or Adafactor not be cut like this?* They look at a whole tensor, its norm or its rows' means. A rank sees a piece. They need a collective more, or whole parameters for each rank.
# - *G = 8 micro-batches: how much is sent without `no_sync`, how much with it?* (G + 1)Ψ = 9Ψ against 2Ψ, times (N−1)/N. DDP: 16Ψ against 2Ψ (question 5).
# - *How would you prove it is the same?* Twenty steps of SGD, `torch.equal` against DDP, not a look at the loss.
#
# **Wrong answers people give**
# - *"ZeRO needs no gradient synchronisation, each rank has its own part."* Of the optimizer. It reduce-scatters every gradient (question 5).
# - *"It sends weights on top, so 3Ψ."* The weights' gather replaces the gradients' gather (question 5). 3Ψ is ZeRO-3.
# - *"The optimizer's states are gathered before the step."* Never. No rank needs another's moments, except to save them.
#
# **Your own project.** "I wrote it by hand in fifteen lines, and 0 of 113,152 weights differed from DDP's after 20 steps."
#
# ### "fp16, bf16, master weights, clipping: what changes when no rank holds the whole gradient?"
#
# **What they want to find out.** Whether you have trained in half precision, or only switched it on; and whether you see where ranks must agree.
#
# **The full answer.** Both 16-bit formats need fp32 masters, because an update below about 1/256 (bf16) or 1/2048 (fp16) of the weight is rounded away. fp16 lacks range too: the loss is scaled up, gradients divided in fp32, and a
# step whose gradients overflow is skipped, with the scale halved. bf16 has fp32's range and needs none of that. With shards, two things become global: the norm is the root of the *sum of the shards' squares*, and an overflow on one rank must skip the step on all. Both travel in
# one small all-reduce.
#
# **In 30 seconds.** Masters against lost digits, the loss scale against lost range. Norm and overflow are decided by all ranks together, with one number from each.
#
# **Follow-ups**
# - *Each rank clips by its own shard's norm. What would you observe?* Ranks that agree, a loss that falls, and other weights than DDP's (question 6).
# - *A weight of 1.0, a hundred updates of 1e-4, in bf16: where does it end?* At 1.0. With a master at 0.99 (question 7).
# - *The first loss scale is 2³² instead of 2¹⁶. What happens?* Steps are skipped until it fits. Our first 12 all were (question 8).
# - *Does a learning-rate schedule move in a skipped step?* The engine's `step()` returns False, so that the loop can leave `scheduler.step()` out.
#
# **Wrong answers people give**
# - *"bf16 is more precise than fp16."* It has more range and fewer digits: 8 against 11 (question 8).
# - *"bf16 needs no master, it has fp32's range."* Two thirds of the weights did not move in 60 steps (question 7).
# - *"`initial_scale_power` is 32."* 16 since 2023 (question 8).
#
# **Your own project.** "I put one infinity into one rank's last gradient, and checked that on both ranks nothing moved."
#
# ## Now you
#
# `minizero start 02`, in a terminal, puts the exercises into `work/02_zero1.ipynb`. You build this step from plain `torch.distributed` calls: the shards and their padding, the sharded Adam step, the all-gather in place, masters, the global norm, and the skip that all ranks share. Some numbers and one bug come on top.
