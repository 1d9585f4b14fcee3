# %% [markdown]
# # 05 Prefetch: ask before you need it
#
# ZeRO-3 gathers a block's weights when the block is about to run, and waits for them. Prefetch asks for them one block earlier, so that they travel while the block before computes.
#
# ```
# ZeRO-3     wire      gather 0 ·         · gather 1 ·         · gather 2
#            compute            forward 0            forward 1            forward 2
#
# prefetch   wire      gather 0 · gather 1 · gather 2
#            compute            forward 0 · forward 1 · forward 2
# ```
#
# Not one byte more is sent, and not one number changes. Three things need thought: how the engine knows *which* block comes next, what it costs in memory, and when there is nothing to hide behind. Nine questions, each with a number in it. Write yours down before you run the cell.

# %% tags=["nbval-ignore-output"]
import dataclasses
import functools
import inspect
import statistics
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import minizero as mz
from minizero import data
from minizero.course import changes
from minizero.lens import plots, theory
from minizero.model import GPT

torch.set_num_threads(1)  # as in every rank
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. A gather takes as long as its block's forward: how much of the communication does ZeRO-3 wait for?
#
# First the pain. Lesson 04 ended with a forward in which nothing travels while a block computes. How much that hurts depends on the wire, and the ranks of this notebook are processes on one computer, with a wire that is very fast. So we take a slower one. Inside `with mz.link(bandwidth)` every collective takes as long as on a link of so many bytes a second: the bytes
# travel as ever, and whoever waits for them sleeps for the rest of the time. **It is simulated**, and it costs no processor time, so two ranks on a laptop behave as two machines with a cable between them.
#
# `mz.record_timeline()` notes what a rank did when. An event has a kind (`what`), a unit, a start and an end. We run a GPT of 12 blocks, find out how long a block's forward takes on this computer, and choose the link on which the block's weights take equally long.


# %%
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def timelines(rank, world_size, step, links=(None,), rows=40, micro_steps=1, count=2, layers=12, **settings):
    """The last `count` steps on each link, as this rank saw them. Two steps before them show the engine what comes."""
    model = GPT.preset("nano", layers=layers)
    engine = step(model, sgd(model), **settings)
    found = []
    for bandwidth in (None, *links):
        kept = 2 if not found else count
        batches = data.batches("train", rows * world_size, 64, kept * micro_steps, rank=rank, world_size=world_size)
        with nullcontext() if bandwidth is None else mz.link(bandwidth):
            steps = []
            for _ in range(kept):
                with mz.record_timeline() as timeline:
                    for _ in range(micro_steps):
                        x, y = next(batches)
                        engine.backward(engine(x, y) / micro_steps)
                    engine.step()
                steps.append(timeline)
        found.append(steps)
    return found[1:]


def fastest(runs, what):
    """(unit, seconds of computing) in order, each as fast as it was in any of these steps: the least disturbed."""
    segments = [timeline.segments(what) for timeline in runs]
    return [(unit, min(each[i][1] for each in segments)) for i, (unit, _) in enumerate(segments[0])]


def two_ranks(step, links=(None,), **settings):
    """On each link the calmest step, as both ranks saw it: this computer has other things to do as well."""
    by_rank = on(2).run(functools.partial(timelines, **settings), 2, step, links)
    return [min(zip(*steps, strict=True), key=lambda pair: max(map(seconds_of, pair))) for steps in zip(*by_rank, strict=True)]


def seconds_of(timeline):
    return max(event.end for event in timeline.events) - min(event.start for event in timeline.events)


plain = [timeline for steps, in on(2).run(functools.partial(timelines, count=6), 2, mz.Zero3) for timeline in steps]  # no link
forward, backward = fastest(plain, "forward"), fastest(plain, "backward")
nbytes = {event.unit: event.nbytes for event in plain[0].of("gather")}
block_forward = statistics.median(seconds for unit, seconds in forward if unit != "root")
equal_link = nbytes["blocks.0"] / 2 / block_forward  # of two ranks each sends half of the block
print(f"bytes of a block's weights, and those that a rank sends in a gather: {nbytes['blocks.0']:,} {nbytes['blocks.0'] // 2:,}")

# %% tags=["nbval-ignore-output"]
print(f"a block's forward takes {1e3 * block_forward:.1f} ms here, and so does its gather on a simulated link of {equal_link / 1e6:.0f} MB/s")

# %% [markdown]
# The same block takes about twice as long in backward, where two products are made for each of forward. So per block: computing 1 + 2, and on the wire a gather, another gather, and a reduce-scatter of the same size: 1 + 1 + 1. Wire and processor have equal work.
#
# **Predict.** What share of the communication does ZeRO-3 stand and wait for? Most people say all of it. And the least, with these 12 blocks, for an engine that begins each pass with no block's weights there?
#
# (For an answer that is the same on every computer we ask the cost model, with seconds that are easy to count: 1 for a forward, 2 for a backward, 1 for each message. What `theory.schedule` does inside is question 5.)


# %%
def played(message, depth, layers=12, forward=1.0, backward=2.0):
    """A step of equal blocks, in which a message takes so long. (A ring of 2 sends half the bytes at 1 byte/s.)"""
    names = [f"blocks.{i}" for i in range(layers)]
    there, back = [(name, forward) for name in names], [(name, backward) for name in reversed(names)]
    return theory.schedule(there, back, dict.fromkeys(names, 2 * message), world_size=2, bandwidth=1, depth=depth)


zero3, ahead = played(1, depth=0), played(1, depth=1)
print(f"seconds of communication {zero3.communication:g}, of waiting {zero3.exposed:g}, of the whole step {zero3.seconds:g}")
print("share of the communication that ZeRO-3 waits for, and the least")
print(f"{zero3.exposed / zero3.communication:.0%} {ahead.exposed / ahead.communication:.0%}")

# %%
(on_link,) = two_ranks(mz.Zero3, [equal_link], count=8)


def of_phase(what, pair):
    """The events of a step's forward, or of its backward, on both ranks; the blocks' and what travels."""
    kept = []
    for timeline in pair:
        turn = min(event.start for event in timeline.of("backward"))  # the gather of the root just before belongs to backward
        turn = max(event.start for event in timeline.of("gather") if event.unit == "root" and event.start < turn)
        wire_free = 0.0
        for event in timeline.of("gather", "reduce", "wait", what):
            if (event.start < turn) != (what == "forward") or event.unit == "control" or (event.what, event.unit) == (what, "root"):
                continue
            if event.what in ("gather", "reduce"):  # drawn from when the wire is free for it
                event = dataclasses.replace(event, start=min(max(event.start, wire_free), event.end))
                wire_free = event.end
            kept.append(event)
    return kept


# %% tags=["nbval-ignore-output"]
plots.lanes(of_phase("forward", on_link), f"ZeRO-3, forward of 12 blocks (simulated link, {equal_link / 1e6:.0f} MB/s)")

# %% [markdown]
# Above, what a rank computes, hatched where it waits; below, its wire. They take turns: either the wire works or the processor does. (What is white between them is the root's own work, and the engine's: giving a block's weights back, asking for the next.)
#
# Not quite all of it, then: 69 %. All 24 gathers are waited for, and the last reduction. The other eleven reductions are not, since lesson 04 sends a block's gradients *behind* the request for the next block's weights, so that they travel while that block computes. What one waits for is called **exposed**, the rest **hidden**; of the communication ZeRO-3 hides 31 %.
#
# The least is 8 %, 3 of 36 seconds: the first gather of forward, the first of backward, and the last reduction. Before the first weights are there nobody can compute, and after the last gradients nobody has anything left to compute.
#
# From 69 to 8, and only by asking earlier. How much earlier?

# %% [markdown]
# ## 2. One block ahead: before which forward must block 1's gather be asked for?
#
# `mz.Zero3Prefetch(model, optimizer, depth=1)` is `mz.Zero3` with one argument more: how many units it keeps on their way while one computes.
#
# **Predict.** In ZeRO-3 a block's gather is asked for when the block before has computed. With `depth=1`, for how many of the 12 is it asked for before the block before *begins* to compute?


# %%
def order(timeline, *whats):
    """What happened, by its beginning, as words."""
    return [f"{event.what} {event.unit.removeprefix('blocks.')}" for event in timeline.of(*whats)]


(ahead_on_link,) = two_ranks(mz.Zero3Prefetch, [equal_link], count=8)
for name, timeline in {"ZeRO-3  ": on_link[0], "prefetch": ahead_on_link[0]}.items():
    words = order(timeline, "gather", "forward")
    print(name, " · ".join(words[:8]), "…")
    early = sum(words.index(f"gather {i}") < words.index(f"forward {i - 1}") for i in range(1, 12))
    print(f"{name} asked for before the block before began: {early}")
print("the same order on both ranks:", order(ahead_on_link[0], "gather", "reduce") == order(ahead_on_link[1], "gather", "reduce"))

# %% tags=["nbval-ignore-output"]
plots.lanes(of_phase("forward", ahead_on_link), f"Prefetch, the same forward (simulated link, {equal_link / 1e6:.0f} MB/s)")

# %% [markdown]
# Eleven: all but block 0, before which there is no block. (It has the root before it, and is asked for before the embeddings run: but an embedding takes no time behind which one could hide.) Both lanes are nearly full now. (The narrow bars are the root's.) While block 3 computes, block 4's weights travel, and the paper's word for it is to **overlap** communication with computation (ZeRO-Infinity, section 6.2).
#
# Is it still the same training, and the same traffic? Twenty steps with SGD on two ranks, no simulated link, against ZeRO-3 and DDP.


# %%
def train(rank, world_size, step, steps=20, **settings):
    """This rank's weights after some steps, and what it has sent in the last one."""
    model = GPT.preset("nano", layers=4)
    engine = step(model, sgd(model), **settings)
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        with mz.record_traffic() as traffic:
            engine.backward(engine(x, y))
            engine.step()
    weights = torch.cat([weight.flatten() for weight in engine.state_dict().values()])
    return weights, sum(op.bytes for op in traffic.ops if op.unit != "control"), len(traffic.ops)


reference = on(2).run(train, 2, mz.DDP)[0][0]
results = {"ZeRO-3": on(2).run(train, 2, mz.Zero3)}
for depth in (1, 2, 8):
    results[f"depth {depth}"] = on(2).run(functools.partial(train, depth=depth), 2, mz.Zero3Prefetch)
for name, ranks in results.items():
    _, sent, messages = ranks[0]
    print(f"{name}: {sent:,} bytes in {messages} messages")
print("same parameters as before:", all(torch.equal(weights, reference) for ranks in results.values() for weights, _, _ in ranks))

# %% [markdown]
# To the last bit, and to the last byte. (10 gathers, 5 reductions, and the one small message with which ranks agree on a step; its bytes are not counted.) This step of the course changes *when*, and nothing else. It could not be otherwise: weights do not change between the request and the use, unless an optimizer's step comes between (question 9).
#
# While block 3 runs, the engine asks for block 4. How does it know that block 4 comes next?

# %% [markdown]
# ## 3. Layer 2 suddenly runs before layer 1: how many gathers come too late?
#
# One could take the order in which modules stand in the model. But a model runs its modules in the order in which its `forward` calls them, which may be another, and may change. The engine does what is safest: it takes the order that it *saw* the last time. This is nearly all of it:

# %%
for name in ("_gather", "_following", "_at_rest", "_agree"):
    print(inspect.getsource(getattr(mz.Zero3Prefetch, name)))

# %% [markdown]
# `_gather(unit)` is what ZeRO-3 calls when a unit is entered. If its weights are on their way (`_ahead`), there is nothing to ask for; the caller waits for them. (`gathers` is empty where they are there already, as inside `gathered()`.) Then it asks for those that follow, and only *then* does the caller wait: so on the wire the next gather stands behind this one. `_gathered` is what this forward, or this backward, has gathered by now. As long
# as it agrees with the beginning of the plan, the plan says what comes next; where it differs, `_following` returns nothing, and all else is gathered on demand, as in ZeRO-3. Forward, backward and evaluation have a plan each.
#
# And **where does the plan come from?** From `step()`. A gather is a collective: all ranks must ask for the same units in the same order, or they compute with mixtures of each other's layers (lesson 04, question 5). If every rank followed its own memory, one that saw something else would ask for something else. So a plan is adopted only when the step's one small message, which
# carries a fingerprint of all orders, has come back and all ranks agree. It costs no message more.
#
# Four layers now, run in the order that they are told. In step 3 layer 2 comes before layer 1, and it stays so.
#
# **Predict.** A gather that is asked for before the layer before begins is in time. Of the four in step 3, how many are not in time? And in step 4? (In ZeRO-3 all four are late. Before the first layer there is nothing but the root, so it is late in any case.)


# %%
class Stack(nn.Module):
    """Four equal layers, run in the order that it is told."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, order):
        x = self.embed(x)
        for i in order:
            x = x + self.blocks[i](x).tanh()
        return x.square().mean()


def run_in_orders(rank, orders, step):
    model = Stack()
    engine = step(model, sgd(model))
    x, found = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)), []
    for layers in orders:
        with mz.record_timeline() as timeline:
            loss = engine(x, layers)
            engine.backward(loss)
        engine.step()
        found.append((order(timeline, "gather", "forward"), sum(event.nbytes for event in timeline.of("gather")), loss.item()))
    return found


orders = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3)]
losses, late = {}, []
for step in (mz.Zero3, mz.Zero3Prefetch):
    in_orders = on(2).run(run_in_orders, orders, step)[0]
    losses[step] = [loss for _, _, loss in in_orders]
for number, (layers, (words, gathered, _)) in enumerate(zip(orders, in_orders, strict=True), start=1):
    words = [word for word in words[: words.index(f"forward {layers[-1]}") + 1] if "root" not in word]
    in_time = [words.index(f"gather {i}") < words.index(f"forward {before}") for before, i in zip(layers, layers[1:], strict=False)]
    late.append(len(layers) - sum(in_time))
    print(f"step {number}: {' · '.join(words)}   ({gathered:,} bytes gathered in the step)")
print("the losses are those of ZeRO-3:", losses[mz.Zero3] == losses[mz.Zero3Prefetch])
print("late in steps 1, 2, 3 and 4")
print(*late)

# %% [markdown]
# Three: layer 0 as always; layer 2, which nobody expected; and layer 3, because a forward that has left its plan asks for nothing more in advance. Layer 1 had been asked for by the plan. It was on its way when layer 2 ran, and found there when its turn came, so even this step has sent nothing in vain. In step 4 the new order is the plan. (The bytes are those of two gathers for each unit, in forward and in backward.)
#
# A layer that is left out altogether would have been sent for nothing: `_at_rest` waits for it and frees it when the forward is over. An exception in a forward ends the same way. Nothing stays in flight.
#
# So much for forward. Backward has the gradients on the same wire.

# %% [markdown]
# ## 4. Block 11's gradients are ready: how many gathers go before them?
#
# Backward's plan is its own: it is not forward's read from the end. (The root is gathered first in both.) But now two kinds of message want to leave when backward goes from block 11 to block 10: block 11's gradients, which are complete, and the weights of block 9, which nobody needs yet.
#
# **Predict.** How many gathers of backward are asked for before the first reduction? Gradients that are ready could leave at once; then it would be 3: the root, block 11, and block 10 ahead.

# %%
words = [word for word in order(ahead_on_link[0], "gather", "reduce") if word != "reduce control"]
words = words[[i for i, word in enumerate(words) if word == "gather root"][1] :]  # the second gather of the root begins the backward
print(" · ".join(words[:9]), "…", " · ".join(words[-4:]))
print("gathers before the first reduction")
print(next(i for i, word in enumerate(words) if word.startswith("reduce")))

# %% [markdown]
# Four: block 9's weights go first, and the gradients queue behind them. Why, if they are not needed yet? Because both are needed at some time, and the weights are needed *sooner*. A rank stands still without weights; nobody waits for a mean of gradients until the next one leaves, or until the step. ZeRO-3 shows it better, because there nothing travels ahead. It enters block 10: weights first, or gradients first?

# %%
compute, gather, reduce = 2, 1, 1  # seconds of a block's backward, of its gather, of its reduction
print("seconds for each block of ZeRO-3's backward, gradients first and weights first")
print(reduce + gather + compute, gather + max(compute, reduce))

# %% [markdown]
# A second less for each block. Gradients first, and the rank waits for both; weights first, and it waits for one while the other hides. What stands in front of a message on the wire is waited for as well. (FSDP has both as *backward prefetch*: with `BACKWARD_POST` the next gather is issued when a block's gradients are there, in front of their reduction, as in these two lines; with `BACKWARD_PRE` before they are computed, one block ahead, as in the output above.)

# %% tags=["nbval-ignore-output"]
plots.lanes(of_phase("backward", ahead_on_link), f"Prefetch, backward of 12 blocks (simulated link, {equal_link / 1e6:.0f} MB/s)")

# %% [markdown]
# Weights dark, gradients pale, one after the other on the wire; and above it one block after the other, with little between. (A message is drawn from when the wire is free for it. It was asked for before.) Where a rank waits in between, it is for the reduction before: one is under way at a time. On the right stand the two reductions that nobody can hide, of block 0 and of the root (which the model of question 1 does not have).
#
# That was one link, chosen so that it fits. What about yours?

# %% [markdown]
# ## 5. A link of half the speed: what share is hidden now?
#
# To answer for links that we do not have, we need a model of the cost. It has two parts.
#
# **One message.** A message of $n$ bytes takes $\alpha + n/\beta$ seconds: $\alpha$ is the latency in seconds, which every message pays however short it is, and $\beta$ the bandwidth in bytes a second, in one direction (Hockney's model). An all-gather in a ring is $N-1$ messages, one after the other; in each of them a rank passes on one shard, $P/N$ bytes of the unit's $P$. A reduce-scatter is the same, backwards. So
#
# $$t \;=\; (N-1)\left(\alpha + \frac{P}{N\beta}\right)$$
#
# seconds for each of them. Many ranks do not make it much longer, as the share sent, $(N-1)/N$, tends to 1; but $\alpha$ is paid $N-1$ times.
#
# **One step.** Let a block compute for $f$ seconds forward and $b$ backward, and let each of its three messages take $t$. What does one block more cost?
#
# | | forward | backward |
# |---|---|---|
# | ZeRO-3 | $t + f$: gather, then compute | $t + \max(b, t)$: gather; then compute while the reduction before travels |
# | prefetch | $\max(f, t)$: compute while the next gather travels | $\max(b, 2t)$: compute while the next gather and the reduction before travel |
#
# `theory.schedule` plays the step event by event, with one clock for the processor and one for the wire, and the engine's own rules for who asks when. Does it agree? We let it play 12 blocks and 13, and take the difference.


# %%
def per_block(t, depth, f=1.0, b=2.0):
    """Seconds that one block more costs."""
    return max(f, t) + max(b, 2 * t) if depth else (t + f) + (t + max(b, t))


messages = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 10.0)
more = {(t, depth): played(t, depth, layers=13).seconds - played(t, depth).seconds for t in messages for depth in (0, 1)}
print("the table is the schedule's:", all(abs(seconds - per_block(*case)) < 1e-9 for case, seconds in more.items()))
half, equal_share = played(2, depth=1), played(1, depth=1)
print("hidden share of the communication with prefetch: link as in question 1, and one of half the speed")
print(f"{equal_share.hidden:.0%} {half.hidden:.0%}")

# %% [markdown]
# 92 % and 49 %. As long as a message fits behind the computing it is free; beyond that every second more is waited for. Now measured. We take the seconds of computing from question 1's step without a link, give them to `theory.schedule`, and it predicts steps on links that it has not seen. Then we run them.


# %%
ratios = (0.5, 0.75, 1.0, 2.0, 4.0)  # of a block's gather to its forward
links = [equal_link / ratio for ratio in ratios]
rest = min(sum(event.seconds for event in timeline.of("step")) for timeline in plain)


def predict(bandwidth, depth):
    return theory.schedule(forward, backward, nbytes, 2, bandwidth, depth=depth, rest=rest)


def measure(step, **settings):
    """For each link the seconds of rank 0's step, and those in which it waited."""
    calm = [timeline for timeline, _ in two_ranks(step, links, **settings)]
    return [(seconds_of(timeline), sum(event.seconds for event in timeline.of("wait"))) for timeline in calm]


steps = {"ZeRO-3": mz.Zero3, "prefetch": mz.Zero3Prefetch}
measured = {name: measure(step) for name, step in steps.items()}

# %% tags=["nbval-ignore-output"]
fine = [equal_link * 2 ** (i / 8) for i in range(-18, 19)]
communication = {bandwidth: predict(bandwidth, 0).communication for bandwidth in (*fine, *links)}
plots.predicted(
    [bandwidth / 1e6 for bandwidth in fine],
    {name: [100 * predict(bandwidth, depth).hidden for bandwidth in fine] for depth, name in enumerate(steps)},
    [bandwidth / 1e6 for bandwidth in links],
    {
        name: [max(0, 100 * (1 - waited / communication[bandwidth])) for bandwidth, (_, waited) in zip(links, runs, strict=True)]
        for name, runs in measured.items()
    },
    "bandwidth of the simulated link, MB/s",
    "% of the communication that is hidden",
    "Hidden share: predicted (lines) and measured (dots), 2 ranks",
    log_x=True,
)

# %% [markdown]
# Read it from right to left. On a fast link nearly everything hides. Where a block's gather takes as long as its forward (the middle dot, or a little left of it, as the root computes too) the curve has its knee; left of it the wire is the slower of the two, and the hidden share is what there is to hide behind, computing over communication. It goes on to halve with each halving of the bandwidth. ZeRO-3's knee is further to the left, where a reduction no longer fits behind a backward, which is twice as long.
# (ZeRO-3's dots lie above its line: between asking and waiting the engine has something to do, half a millisecond here, and the wire works already. The rest is scatter, as this computer has other things to do as well. `benchmarks/link.py` does the same with larger blocks. The model knows computing only from a step without a link.)
#
# **The claim "prefetch hides 30 to 50 % of communication", settled: it depends**, and now you can say on what: on the ratio of a unit's communication to its computing. With our 12 blocks:

# %%
grid = [i / 100 for i in range(1, 1001)]  # seconds of a message, where a forward takes 1
for share in (0.92, 0.50, 0.30):
    t = max(t for t in grid if played(t, 1).hidden >= share - 0.005)
    saved = 1 - played(t, 1).seconds / played(t, 0).seconds
    print(f"hidden {share:.0%}: a gather takes {t:.2f} times its forward, and the step {saved:.0%} less time than ZeRO-3's")
print("most time that prefetch can save, of the step")
print(f"{max(1 - played(t, 1).seconds / played(t, 0).seconds for t in grid):.0%}")

# %% [markdown]
# *30 to 50 %* is a wire of a half to a third of the speed that would suffice. On one that does suffice it is 92 %, and the rest is the beginning and the end of each pass; on a slow enough wire it is nothing. And it is not the share of the *time* that is saved. That is largest at the knee, where ZeRO-3 works and waits by turns.
# (Papers tend to report time. PyTorch's DDP: overlap in backward saves 38 % of a step of ResNet50 and 35 % of BERT's on NCCL, 27 and 21 % on gloo. FSDP: prefetch in backward is worth 18 % on a GPT of 175 B.)
#
# The other number that people quote is for a real cluster: *13 B in fp16 on 8 A100: 78 GB a step, 130 ms on NVLink at 600 GB/s, 25 s on 25 GbE*. Let us check it line by line.
#
# **Predict.** All three figures are off. Which one by the most?

# %%
psi, n = 13e9, 8
sent = 2 * theory.traffic(3, psi, n)
nvlink, ethernet = 300e9, 25e9 / 8
computing = 6 * psi * 8192 / 150e12  # operations over operations a second: 8,192 tokens a GPU, at half of an A100's peak
print(f"three times 26 GB: {3 * 2 * psi / 1e9:.0f} GB; a rank sends, by 3Ψ(N−1)/N: {sent / 1e9:.2f} GB")
print(f"seconds that a GPU computes for 8,192 tokens: {computing:.1f}")
print("ms on NVLink, 600 GB/s in both directions together, and seconds on 25 GbE")
print(f"{1e3 * 3 * theory.seconds('all_gather', 2 * psi, n, nvlink):.0f} {3 * theory.seconds('all_gather', 2 * psi, n, ethernet):.1f}")

# %% [markdown]
# NVLink's 600 GB/s counts both directions together. A ring sends in one while it receives in the other, so β is 300 GB/s, and 130 ms (78 GB over 600 GB/s) become 228 at the least. The 78 GB forget that a rank holds an eighth itself. And 25 s are those 78 GB at 3.1 GB/s; it should be 22.
#
# **The claim, settled: it depends.** Bytes and Ethernet are 14 % too high, NVLink is too low by 43 %; and all of them are seconds *of communication*, which is what a step takes longer only if nothing overlaps. With 8,192 tokens a GPU computes for some 4 s: NVLink's quarter of a second disappears behind it, of Ethernet's 22 s some 18 remain. The law behind it, seconds = 3Ψ(N−1)/N · bytes / β, we can try on a link that we throttle: an
# eighth of the bandwidth, with hardly anything to compute.


# %%
def communication_alone(rank, links):
    """Seconds that this rank waited in one step on each link, with so little to compute that nothing hides."""
    model = GPT.preset("nano")
    engine, found = mz.Zero3(model, sgd(model)), []
    x, y = next(data.batches("train", 2, 4, 1, rank=rank, world_size=2))
    for bandwidth in links:
        with mz.link(bandwidth), mz.record_timeline() as timeline:
            engine.backward(engine(x, y))
            engine.step()
        sent = sum(event.nbytes for event in timeline.of("gather", "reduce") if event.unit != "control") / 2
        found.append((sum(event.seconds for event in timeline.of("wait")), sent / bandwidth))
    return found


throttled = on(2).run(communication_alone, [8e6, 1e6])[0]
print("3Ψ(N−1)/N, 4 bytes each, over 8 MB/s and over 1 MB/s, in ms")
print(*(f"{1e3 * seconds:.0f}" for _, seconds in throttled))

# %% tags=["nbval-ignore-output"]
print("waited on the simulated links, ms:", *(f"{1e3 * waited:.0f}" for waited, _ in throttled))
print(f"times as long on the slower one: {throttled[1][0] / throttled[0][0]:.1f}")

# %% [markdown]
# ## 6. Weights on their way need a place: how many blocks more does `depth=3` hold?
#
# Weights can only travel into memory that is there. So whoever asks early allocates early.
#
# **Predict.** Four ranks, six blocks of 793,088 bytes each. How many blocks does a rank hold at its peak with `depth=3` that it does not hold in ZeRO-3, which is depth 0? Most people divide by four: each rank only keeps its quarter.


# %%
def weights_at_the_peak(rank, world_size, depth, max_live=None):
    """The most bytes of gathered weights in a step, and a block's."""
    model = GPT.preset("tiny", layers=6)
    engine = mz.Zero3Prefetch(model, sgd(model), depth=depth, max_live=max_live)
    batches = data.batches("train", world_size, 16, 3, rank=rank, world_size=world_size)
    for _ in range(2):
        engine.backward(engine(*next(batches)))
        engine.step()
    with mz.record_memory() as memory:
        engine.backward(engine(*next(batches)))
    params = memory.curve()[1]["params"]
    return int(params.max() - params[0]), 4 * sum(param.numel() for param in model.blocks[0].parameters())


peaks = {depth: on(4).run(weights_at_the_peak, 4, depth)[0] for depth in (0, 1, 2, 3)}
(least, block) = peaks[0]
for depth, (count, _) in peaks.items():
    print(f"depth {depth}: {count:>9,} bytes beyond the rank's own slices: the root, and {depth + 1} × {block:,}")
print("blocks more than ZeRO-3, with depth 1, 2 and 3")
print(*((count - least) / block for count, _ in list(peaks.values())[1:]))

# %% [markdown]
# Whole blocks, one for each unit of depth, to the byte. Nothing is divided: what is gathered is whole on every rank, and that is what it is gathered for. So the peak of lesson 04 (the root and the largest unit) becomes root + (1 + depth) units, on any number of ranks.
#
# What does it buy? With even blocks, the first unit of depth buys all that there is. But not every model's units compute equally long.


# %%
def uneven(depth, layers=12):
    """A step in which every second block computes long and those between hardly at all. On average it is question 1's."""
    there = [(f"blocks.{i}", 1.75 if i % 2 else 0.25) for i in range(layers)]
    back = [(unit, 2 * seconds) for unit, seconds in reversed(there)]
    return theory.schedule(there, back, {unit: 2.0 for unit, _ in there}, world_size=2, bandwidth=1, depth=depth)


print("seconds exposed of 36, even blocks:  ", *(f"{played(1, depth).exposed:g}" for depth in (0, 1, 2, 3)))
print("seconds exposed of 36, uneven blocks:", *(f"{uneven(depth).exposed:g}" for depth in (0, 1, 2, 3)))
for blocks in (2, 1, 0.9):
    limit = int(blocks * block) // 4  # parameters of 4 bytes
    count, _ = on(4).run(functools.partial(weights_at_the_peak, max_live=limit), 4, 3)[0]
    print(f"depth 3, max_live of {limit:,} parameters: {(count - least) / block:g} × a block ahead")

# %% [markdown]
# Even blocks: depth 1 leaves the 3 seconds that nobody can hide, depth 2 as well, and depth 3 is *worse* by one. Its gathers crowd the beginning of backward, the first reductions queue behind all of them, and since one reduction is under way at a time, the rank waits for it before the next. Uneven blocks: a short one cannot hide a whole gather, but a long one before it could have hidden two, so depth 2 helps, and 3 a little more. **Depth is for
# unevenness**, not for bandwidth: a wire that is too slow is too slow at any depth.
#
# `max_live` is a limit in parameters for what is ahead, padding included. A unit that does not fit is gathered on demand; a rank waits then, and does not run out of memory. (DeepSpeed has `stage3_prefetch_bucket_size` and `stage3_max_live_parameters`, both in elements too. FSDP's first version does not let the processor ask for a third gather while two are in flight, `limit_all_gathers`.)

# %% [markdown]
# ## 7. A link ten times too slow: how much faster does prefetch make the step?
#
# **Predict.** A gather takes ten times as long as its block's forward. At the knee prefetch makes a step 1.67 times as fast as ZeRO-3 (5 seconds a block become 3). Here?

# %%
for t in (0.1, 1.0, 10.0):
    print(f"a gather of {t:>4} forwards: a block takes {per_block(t, 0):.1f} s, with prefetch {per_block(t, 1):.1f}, of which it computes 3")
print("times as fast with a link ten times too slow")
print(f"{per_block(10, 0) / per_block(10, 1):.2f}")

# %% [markdown]
# Three per cent. Prefetch can only hide communication behind computing, and at ten times too slow there are 3 seconds to hide behind for 30 on the wire. A link ten times too *fast* gives little more, 3.2 against 3.0: there is hardly anything to hide. The gain is large only where the two are alike: 40 % of a block's time, and with the beginnings and ends of the passes 36 % of a step's (question 5).
#
# So what helps on a slow link? Interview notes say: *small batches make ZeRO-3 communication-bound; accumulation fixes it*. Accumulate gradients over G micro-batches, step once: fewer steps for the same rows.
#
# **Predict.** Rows in a micro-batch, and micro-batches in a step: from (4, 1) we go to (4, 4), the same small batch four times and one step; and to (16, 1), four times the rows at once. How much does ZeRO-3 send for each row, in Ψ(N−1)/N elements? (4, 1) is easy: 3 for 4 rows.

# %%
def sent_in_a_step(rank, world_size, step, rows, micro_steps, no_sync=False):
    """Elements that this rank sends in one step, as a multiple of P(N−1)/N."""
    model = GPT.preset("nano")
    engine = step(model, sgd(model))
    with mz.record_traffic() as traffic:
        for i, (x, y) in enumerate(data.batches("train", rows * 2, 64, micro_steps, rank=rank, world_size=2)):
            with engine.no_sync() if no_sync and i < micro_steps - 1 else nullcontext():
                engine.backward(engine(x, y) / micro_steps)
        engine.step()
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit not in ("control", "buffers"))
    return elements * 2 / sum(bucket.layout.P for bucket in engine.buckets)


batches = [(4, 1), (4, 4), (16, 1)]
print("rows, micro-steps     ZeRO-3   a row   ZeRO-2   a row   DDP, no_sync   a row")
by_row = {}
for rows, micro_steps in batches:
    counts = [
        on(2).run(sent_in_a_step, 2, mz.Zero3, rows, micro_steps)[0],
        on(2).run(sent_in_a_step, 2, mz.Zero2, rows, micro_steps)[0],
        on(2).run(functools.partial(sent_in_a_step, no_sync=True), 2, mz.DDP, rows, micro_steps)[0],
    ]
    by_row[rows, micro_steps] = [count / (rows * micro_steps) for count in counts]
    print(f"{rows:>4}, {micro_steps}               ", "   ".join(f"{count:>4.0f}Ψ   {each:.3f}Ψ" for count, each in zip(counts, by_row[rows, micro_steps], strict=True)))
print("ZeRO-3 sends for each row, in Ψ(N−1)/N: small batch, accumulated, large batch")
print(*(f"{by_row[case][0]:.4f}" for case in batches))

# %% [markdown]
# 0.75, 0.75, 0.19. Accumulation has not changed ZeRO-3's bill by one byte a row: every micro-batch gathers every unit twice and reduces it once, 3GΨ for G of them. ZeRO-2 saves some, (G + 1)Ψ, since its weights stay; and DDP with `no_sync` most, 2Ψ however many there are. It has the memory to wait with whole gradients. ZeRO-3 gave that memory away.
#
# A larger micro-batch is another matter: the same bytes for four times the rows. And time? On the simulated link of question 1, which fits 40 rows:


# %%
def seconds_a_row(rows, micro_steps):
    """Of a step of rank 0."""
    ((timeline, _),) = two_ranks(mz.Zero3Prefetch, [equal_link], rows=rows, micro_steps=micro_steps, layers=4, count=3)
    return seconds_of(timeline) / (rows * micro_steps)


times = {case: seconds_a_row(*case) for case in batches}
print("rows and micro-batches whose time was taken:", *times)

# %% tags=["nbval-ignore-output"]
for (rows, micro_steps), seconds in times.items():
    print(f"prefetch, {rows} rows in {micro_steps} micro-batches: {1e3 * seconds:.2f} ms a row (simulated link of {equal_link / 1e6:.0f} MB/s)")

# %% [markdown]
# The time of a row is the same with and without accumulation, and falls when a gather has more to hide behind. **The claim, settled: half true.** Small micro-batches do make ZeRO-3 wait for its wire. Accumulation alone does not help, as it repeats the communication with the computing. What helps is more tokens *in each micro-batch* (activation checkpointing makes room for them), or keeping the weights between forward and backward.

# %% [markdown]
# ## 8. ZeRO-2 and DDP send less: on which link does it show?
#
# ZeRO-2 sends 2Ψ, and it has to reduce in backward and gather the updated weights in its step, when nothing computes. DDP sends 2Ψ too, all of it in backward. In the letters of question 5 one block more costs
#
# | | sends | forward | backward | step |
# |---|---|---|---|---|
# | DDP | 2Ψ | $f$ | $\max(b, 2t)$ | |
# | ZeRO-2 | 2Ψ | $f$ | $\max(b, t)$ | $t$ |
# | ZeRO-3 | 3Ψ | $t + f$ | $t + \max(b, t)$ | |
# | prefetch | 3Ψ | $\max(f, t)$ | $\max(b, 2t)$ | |
#
# (With one backward a step, and buckets of about a block.)
#
# **Predict.** Interview notes say: *ZeRO-2 is 15 % faster than ZeRO-3 when memory is plentiful*. Is it, against prefetch, on the link of question 1?

# %%
COSTS = {
    "DDP": lambda t, f=1.0, b=2.0: f + max(b, 2 * t),
    "ZeRO-2": lambda t, f=1.0, b=2.0: f + max(b, t) + t,
    "ZeRO-3": lambda t, f=1.0, b=2.0: per_block(t, 0, f, b),
    "prefetch": lambda t, f=1.0, b=2.0: per_block(t, 1, f, b),
}
print("gather / forward   ", "   ".join(f"{name:>8}" for name in COSTS))
for t in (0.1, 0.5, 1.0, 1.5, 2.0, 4.0, 10.0):
    print(f"{t:>8}           ", "   ".join(f"{cost(t):>8.1f}" for cost in COSTS.values()))
print("ZeRO-2 takes less time than ZeRO-3, by:", *(f"{1 - COSTS['ZeRO-2'](t) / COSTS['ZeRO-3'](t):.0%}" for t in (0.1, 0.5, 1.0, 10.0)))
print("a gather takes so many forwards where ZeRO-2 catches up with prefetch, and where DDP leaves it behind")
print(
    min(t for t in grid if COSTS["ZeRO-2"](t) <= COSTS["prefetch"](t)),
    max(t for t in grid if COSTS["DDP"](t) >= COSTS["prefetch"](t)),
)

# %% [markdown]
# Prefetch needs 3 seconds on that link, ZeRO-2 needs 4: the one that sends more is the faster, because it hides what it sends. Up to gathers of 1.5 forwards it stays so, and on slower links the bytes win. With DDP it is level until a gather takes as long as a forward. From there DDP pulls away, up to 3Ψ over 2Ψ, half as much again.
#
# **The claim "ZeRO-2 is 15 % faster than ZeRO-3 when memory is plentiful", settled: the direction is true, the number unsupported.** Against a ZeRO-3 that waits, ZeRO-2 takes 3 % less time, or 12, 20, 32, and at most a third: 15 % is one bandwidth among many. Against one that prefetches it depends on the bandwidth even which is faster. (Our ZeRO-2 gathers in its step, where nothing computes. One that gathers into the next forward needs max(f, t) + max(b, t), and is slower than none of the four on any link: that is FSDP2 with
# `reshard_after_forward=False`, if memory is plentiful.)
#
# The table leaves out where passes begin and end. So we measure, all four on the five links of question 5.

# %%
others = {"DDP": mz.DDP, "ZeRO-2": mz.Zero2}
measured |= {name: measure(step, bucket_mb=0.2) for name, step in others.items()}
print("engines whose step was measured on", len(links), "links:", *measured)

# %% tags=["nbval-ignore-output"]
in_forward, in_backward = (sum(seconds for _, seconds in segments) for segments in (forward, backward))


def step_ms(name, bandwidth):
    """By the table, with the seconds that this computer computes for a block and its share of the root."""
    message = theory.seconds("all_gather", sum(nbytes.values()), 2, bandwidth)
    return 1e3 * (COSTS[name](message, in_forward, in_backward) + rest)


plots.predicted(
    [bandwidth / 1e6 for bandwidth in fine],
    {name: [step_ms(name, bandwidth) for bandwidth in fine] for name in COSTS},
    [bandwidth / 1e6 for bandwidth in links],
    {name: [1e3 * seconds for seconds, _ in measured[name]] for name in COSTS},
    "bandwidth of the simulated link, MB/s",
    "ms a step",
    "Step time: predicted (lines) and measured (dots), 2 ranks",
    log_x=True,
)

# %% [markdown]
# To the right the lines run together, and where they do one may choose by memory. On the left they fan out into 3Ψ and 2Ψ. In between, at one forward DDP leaves prefetch behind, and at one and a half ZeRO-2 overtakes it. (The dots lie above the lines by what the table leaves out: first gathers and last reductions, and what an engine does around each block. That is some milliseconds a step, most where each block is gathered twice, and with blocks as small as these it hides who is faster where two lines are close.)
#
# Last rumour: *ZeRO-3 is unfit below 1 B parameters or on Ethernet*. So where is the knee of a real model? A gather takes 2Ψ(N−1)/N bytes in 16 bits; a forward takes 2Ψ operations a token.
#
# **Predict.** On 25 GbE, 3.1 GB/s, 42,000 tokens in each GPU's micro-batch hide the gathers of a 7 B model, if a GPU makes 150 TFLOP/s. How many does a 0.5 B model need?

# %%
def tokens(psi, bandwidth, world_size=8, speed=150e12):
    """Tokens of a rank's micro-batch whose forward takes as long as the gather of all weights, in 16 bits."""
    return theory.seconds("all_gather", 2 * psi, world_size, bandwidth) / (2 * psi / speed)


for name, bandwidth in {"NVLink, 300 GB/s": 300e9, "InfiniBand, 25 GB/s a GPU": 25e9, "25 GbE, 3.1 GB/s": 25e9 / 8}.items():
    print(f"{name:<26} {tokens(7e9, bandwidth):>7,.0f} tokens a GPU")
ethernet, latency = 25e9 / 8, 50e-6
for millions in (100, 7):
    whole = theory.seconds("all_gather", 2e6 * millions, 8, ethernet, latency)
    print(f"a unit of {millions} million parameters, 8 ranks, 25 GbE with 50 µs: {1 - theory.seconds('all_gather', 2e6 * millions, 8, ethernet) / whole:.0%} of its gather is latency")
print("tokens a GPU on 25 GbE, for a model of 7 B and of 0.5 B parameters")
print(*(f"{tokens(psi, ethernet):,.0f}" for psi in (7e9, 0.5e9)))

# %% [markdown]
# The same 42,000, because Ψ is on both sides and drops out. What decides is the speed of the GPU over the bandwidth, and the tokens: 438 on NVLink, 42,000 on 25 GbE. Smaller models have smaller units, in which latency counts for more, 8 % where a large one has 1 %; that is all that size does to time.
#
# **The claim, settled: it depends.** On Ethernet ZeRO-3 trains as correctly as anywhere, and takes up to one and a half times DDP's time (30 or 31 against 21 in the table); with enough tokens none of it shows. It is often a bad *trade*, for another reason: below 1 B parameters the 16 bytes each are less than 16 GB, DDP fits, and there is nothing to buy with those seconds.

# %% [markdown]
# ## 9. The first gather could leave before the step: by how much does the loss fall?
#
# Three messages stay exposed, and one of them looks as if it needn't: forward's first gather. Backward is over, the optimizer works, the wire is idle. So somebody asks for the first unit's weights *then*, and the next forward finds them there. A unit of eight weights, by hand:


# %%
def one_unit(rank, world_size, early, steps=6):
    """The mean loss of each step, and the weights in the end. `early` gathers the next weights before the optimizer's step."""
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 8, generator=drawn), torch.randn(4, generator=drawn)  # 2 rows for each of 2 ranks, the same in every step
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    slice_S = nn.Parameter(torch.ones(8 // world_size))
    optimizer = torch.optim.SGD([slice_S], lr=0.1)
    full_P, losses = torch.empty(8, requires_grad=True), []

    def gather():
        dist.all_gather(list(full_P.detach().chunk(world_size)), slice_S.detach())

    gather()
    for _ in range(steps):
        loss = (x @ full_P - y).square().mean()
        full_P.grad = None
        loss.backward()
        slice_S.grad = torch.empty_like(slice_S)
        dist.reduce_scatter(slice_S.grad, list(full_P.grad.chunk(world_size)))
        slice_S.grad /= world_size
        if early:
            gather()
        optimizer.step()
        if not early:
            gather()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / world_size)
    return losses, slice_S.detach()


# %% [markdown]
# **Predict.** Both begin with the same loss. By how much does it fall in the first step, if the gather was early?

# %%
in_time, stale = on(2).run(one_unit, 2, False), on(2).run(one_unit, 2, True)
print("gathered after the step: ", *(f"{loss:.4f}" for loss in in_time[0][0]))
print("gathered before the step:", *(f"{loss:.4f}" for loss in stale[0][0]))
print("weights that differ after 6 steps, of 8:", sum((a != b).sum().item() for (_, a), (_, b) in zip(in_time, stale, strict=True)))
print("the loss falls in the first step by")
print(f"{stale[0][0][0] - stale[0][0][1]:.4f}")

# %% [markdown]
# By nothing. The second forward has run with the weights of the first; they were gathered before the step, and stayed. Every gradient from there on belongs to weights one step old. No error, and the loss falls: in the third step it is what it should have been in the second, and from the fourth on it is another training's, 2.9250 where it should be 3.0886 (lower, by chance: the next model's may be higher). **Stale weights** are the classic bug of this lesson. With a model of a hundred layers it
# would be the first unit only, and no curve would show it.
#
# (Here the gather is waited for before the step, so that the numbers are the same each time. In flight, it is worse: the step writes to the slice while the wire reads it.)
#
# The package refuses to play: what is in flight is bounded by a forward or by a backward, and `_at_rest` ends both. Even with a depth of 8, when the step begins, nothing travels and nothing is gathered:


# %%
def at_the_step(rank):
    """Gathers under way when each step begins, and units that have memory then."""
    model = GPT.preset("nano", layers=4)
    engine = mz.Zero3Prefetch(model, sgd(model), depth=8)
    found = []
    for x, y in data.batches("train", 16, 64, 3, rank=rank, world_size=2):
        with mz.record_timeline() as timeline:
            engine.backward(engine(x, y))
            gathered = sum(unit.resident for unit in engine.units)
            engine.step()
        (step,) = timeline.of("step")
        under_way = sum(event.start < step.end and event.end > step.start for event in timeline.of("gather"))
        found.append((under_way, gathered))
    return found


print("gathers under way, and units in memory, in each of three steps:", *on(2).run(at_the_step)[0])

# %% [markdown]
# So forward's first gather stays exposed; it is the price. (One could do better without being wrong: a unit's gather may leave as soon as *its own* slice has been updated, while the optimizer is busy with the others.)
#
# **What is still wasteful?** Look at what lies in a GPU's memory between two steps. In ZeRO-3, which part of it does neither forward nor backward ever touch?

# %%
states = mz.theory.memory(3, 7e9, 16)
print({kind: f"{count / 1e9:.2f} GB" for kind, count in states.items()})
print("share of the optimizer, which works once in a step")
print(f"{states['optimizer'] / sum(states.values()):.0%}")

# %% [markdown]
# Three quarters lie there for the few milliseconds of a step. They could lie elsewhere, in the memory of the host, if what has to travel there and back were small enough, and overlapped. That is *offload*, lesson 06.
#
# ## What has changed
#
# The module on one page first, then the difference between `minizero/zero3.py` and `minizero/prefetch.py`, made from the two files.

# %%
print(inspect.getdoc(inspect.getmodule(mz.Zero3Prefetch)))

# %% [markdown]
# How to read it. The class inherits from `Zero3`, and so nothing of it goes: what is shown is what comes. Where a function calls `super()`, that is ZeRO-3's own.
#
# 1. **`Phase`** and **`forward`**: training, evaluation and backward are told apart, since each has an order of its own, and each ends at rest.
# 2. **`_gather`** asks for what follows, **`_following`** says what that is, and **`_plan`** where it stands.
# 3. **`_agree`** makes an order the plan; **`_at_rest`** notes the order, and gives back what was asked for in vain.
# 4. Where a reduction leaves has not changed: ZeRO-3 put it behind *the* gather, and `_gather` has become several.

# %%
changes(mz.Zero3, mz.Zero3Prefetch)

# %% [markdown]
# ## Interview corner
#
# ### "How does prefetching work in ZeRO-3 or FSDP, and how much of the communication does it hide?"

# %%
print("gather over forward:                     ", *(f"{t:>5g}" for t in (0.25, 0.5, 1, 2, 4)))
print("hidden with prefetch, 12 blocks:         ", *(f"{played(t, 1).hidden:>5.0%}" for t in (0.25, 0.5, 1, 2, 4)))
print("step's time, as a share of ZeRO-3's:     ", *(f"{played(t, 1).seconds / played(t, 0).seconds:>5.0%}" for t in (0.25, 0.5, 1, 2, 4)))

# %% [markdown]
# **What they want to find out.** Whether you know who decides what to gather next, and that a percentage without a bandwidth means nothing.
#
# **The full answer.** A unit's weights are asked for while the unit before computes, so the all-gather travels behind computation. The order is the one that was executed the last time, in forward and in backward separately, and all ranks must follow the same one. In backward the next gather goes in front of the last unit's reduce-scatter, because weights are waited for sooner. It sends no byte more. It costs memory: one whole unit for each unit of depth, on
# every rank. Per block, ZeRO-3 takes t + f + t + max(b, t), and with one unit ahead max(f, t) + max(b, 2t). So as long as a gather is shorter than a forward everything hides but the first gather of each pass and the last reduction; beyond that computing over communication.
#
# **In 30 seconds.** Ask one unit ahead, in the order of the last step, the same on all ranks; in backward the gather before the reduction. No bytes more, one unit of memory more. Hidden is min(1, computing over communication), less the edges: 92 % with 12 blocks at the knee, 24 % on a link of a quarter of that speed.
#
# **Follow-ups**
# - *Why not depth 10?* Ten units of memory. With even units one is enough, and more puts gathers in front of reductions (question 6).
# - *When is it worth nothing?* When communication is much shorter than computing, or much longer: 6 % and 3 % of the time, at a tenth and at ten times.
# - *How does FSDP do it?* Its gathers are on a stream of their own, and the processor runs ahead of the GPU: so the next forward's gather is asked for early by itself. In backward it follows the reversed order of forward; explicit lists can be set.
# - *The model takes another branch. What happens?* Gathers on demand until the next step; what was fetched in vain is freed. All ranks must take that branch.
#
# **Wrong answers people give**
# - *"It hides 30 to 50 %."* Of what, on which link? It was 92 % and 49 % on two links that differ by a factor of two (question 5).
# - *"It reduces communication."* The same bytes in the same messages (question 2).
# - *"It costs no memory, the weights have to be gathered anyway."* One at a time, without it; depth blocks more, to the byte (question 6).
# - *"Then gather before the optimizer's step, the wire is idle there."* Stale weights (question 9).
#
# **Your own project.** "I simulated a link, predicted with a schedule of two clocks how much of the communication hides, and measured beside it over a factor of 8 in bandwidth."
#
# ### "Training on 8 nodes with Ethernet is communication-bound. A colleague wants to accumulate gradients. Do you agree?"

# %%
print("elements sent for the same rows, in Ψ(N−1)/N, with G = 1, 4, 16 micro-batches")
for stage, name in ((0, "DDP, no_sync"), (2, "ZeRO-2"), (3, "ZeRO-3")):
    print(f"{name:<13}", *(f"{mz.theory.traffic(stage, 64, 64, micro_steps=g, no_sync=stage == 0) / 63:>5g}" for g in (1, 4, 16)))

# %% [markdown]
# **What they want to find out.** Whether you ask which stage.
#
# **The full answer.** With DDP, yes: inside `no_sync` gradients stay on the rank, and G micro-batches cost 2Ψ like one. With ZeRO-2 half: (G + 1)Ψ, since each backward reduces, and weights are gathered once. With ZeRO-3 no: 3GΨ, for every micro-batch gathers all weights twice, and so the ratio of communication to computing is that of one micro-batch. What helps ZeRO-3 is more tokens in a micro-batch: a gather hides behind F/β·(N−1)/N of them, F the
# GPU's operations a second and β bytes a second. At 150 TFLOP/s and 3.1 GB/s that is 42,000 with 8 ranks. If they do not fit: checkpoint activations, keep the weights between forward and backward (2Ψ), shard within a node only and reduce between nodes (hybrid sharding), or go back to a lower stage.
#
# **In 30 seconds.** Accumulation divides the bill of DDP by G, and ZeRO-3's by 1. A larger micro-batch, or a stage that sends less.
#
# **Follow-ups**
# - *At which bandwidth is it level with DDP?* Where a unit's gather is no longer than its forward. Below, up to 1.5 times DDP's time with one backward a step; with G it goes on growing.
# - *13 B in fp16 on 8 GPUs, how many seconds of communication?* 68 GB a rank and step: 0.23 s over NVLink (300 GB/s in a direction), 22 s over 25 GbE.
# - *Does a smaller model wait less?* No: bytes and operations both go with Ψ. It pays more latency.
#
# **Wrong answers people give**
# - *"Accumulation fixes it."* 0.75Ψ a row before and after (question 7).
# - *"Prefetch fixes it."* On a link ten times too slow it saves 3 % (question 7).
# - *"ZeRO-3 cannot be used on Ethernet."* It can; the question is what its memory is worth to you (question 8).
# - *"600 GB/s of NVLink means 78 GB in 130 ms."* That counts both directions: 228 ms for the 68 GB (question 5).
#
# **Your own project.** "I counted bytes for each row with and without accumulation, on three engines, and ZeRO-3's did not move."
#
# ### "Memory is not your problem. ZeRO-2 or ZeRO-3?"
#
# **What they want to find out.** Whether you compare schedules, or only bytes.
#
# **The full answer.** By bytes ZeRO-2: 2Ψ against 3Ψ with one backward a step, (G + 1)Ψ against 3GΨ with accumulation. By time it depends on what is hidden. A ZeRO-3 that waits for each gather is never faster: ZeRO-2 takes between 0 and a third less. A ZeRO-3 that prefetches hides its gathers in forward and in backward; a ZeRO-2 that gathers its new weights in the step hides none of them, and so it is the slower one until a gather takes 1.5 forwards. The best of both
# keeps weights after forward and gathers them into the next: 2Ψ, all of it behind computing. If the memory is there, take that, or plain DDP.
#
# **In 30 seconds.** ZeRO-2 sends less, always. Whether it is faster depends on bandwidth and on what each engine overlaps. With memory to spare: keep the weights after forward.
#
# **Follow-ups**
# - *And with accumulation over 8?* 9Ψ against 24Ψ. ZeRO-2.
# - *Why is ZeRO-3 with prefetch level with DDP on a fast link, with half as many bytes again?* Its bytes are spread over forward and backward; DDP's are all in backward.
#
# **Wrong answers people give**
# - *"ZeRO-2 is 15 % faster."* On one link it is, against one ZeRO-3 (question 8).
# - *"ZeRO-3 sends 50 % more, so it is 50 % slower."* Only where the wire is all that counts.
#
# **Your own project.** "I measured four engines on five simulated links, beside four formulas that say where the order changes."
#
# ## Now you
#
# `minizero start 05`, in a terminal, puts the exercises into `work/05_prefetch.ipynb`. You build it from plain `torch` and `torch.distributed`: remember an order, ask one unit ahead, in backward too, keep a limit, and let nothing fly across a step. Some numbers and one bug come on top.
