# %% [markdown]
# # 06 Offload: the optimizer sleeps on the host
#
# Beside every GPU there is a *host*: a processor with memory of its own, larger and slower than the GPU's. A rank of ZeRO-3 puts there what it needs least often, and lets the processor update it.
#
# ```
#                      on the device                                  ┊  on the host
#
#   gather · forward · backward · reduce-scatter · gradients (1/N)  ──┊──>  update  <──>  master, m, v (1/N)
#     ^                                                               ┊       │
#     └──────────────────────  weights (1/N)  <───────────────────────┊───────┘
#                                                                     ┊
# ```
#
# The dotted line is the *host link*, PCIe in most machines. The lesson is about what crosses it: how many bytes, in which order, and beside what. Eight questions, each with a number in it. Write yours down before you run the cell.
#
# One thing first, plainly. These ranks are processes on a CPU, where device and host are the same memory. What the meter calls `host` is what would be there; what it calls weights and gradients would be on the device; and a copy between the two is a copy within one memory. So bytes, orders and results below are real, and *where* they are is a label. Only question 7,
# which goes one step down to the disk, saves memory of this computer. Where a GPU would change something we say so; nothing here has run on one.

# %% tags=["nbval-ignore-output"]
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import tempfile
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minizero as mz
from minizero import data
from minizero.course import changes
from minizero.lens import plots
from minizero.lens.memory import resident_set
from minizero.model import GPT, GPTConfig
from minizero.parts import host

torch.set_num_threads(1)  # as in every rank
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. Sixteen bytes a parameter: how many of them does only the update touch?
#
# ZeRO-3 has divided all 16 bytes by N, and prefetch hides how the weights travel. What is left to save? We look at the shard of one rank, and write down what each part of a step *touches*: a dispatch mode sees every operation with its tensors, and notes their memory.


# %%
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


class Touched(TorchDispatchMode):
    """Notes the memory of every tensor that an operation reads or writes, and keeps it, so that no other gets its address."""

    def __init__(self):
        super().__init__()
        self.memory = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return function(*args, **(kwargs or {}))


def touched(rank, world_size):
    """What forward, backward and step touch of each state, in bytes for each parameter of this rank's shard."""
    model = GPT.preset("tiny")
    optimizer = adamw(model)
    engine = mz.Zero3(model, optimizer, precision="bf16")
    (x0, y0), (x1, y1) = data.batches("train", world_size, 16, 2, rank=rank, world_size=world_size)
    engine.backward(engine(x0, y0))
    engine.step()
    modes = [Touched() for _ in range(3)]
    with modes[0]:
        loss = engine(x1, y1)
    with modes[1]:
        engine.backward(loss)
    states = {
        "weights": [shard.slice_S for shard in engine.weights],
        "gradients": [bucket.grad_S for bucket in engine.buckets],
        "masters": [shard.shard_S for shard in engine.weights],
        "m": [state["exp_avg"] for state in optimizer.state.values()],
        "v": [state["exp_avg_sq"] for state in optimizer.state.values()],
    }
    with modes[2]:
        engine.step()
    numel = sum(shard.layout.S for shard in engine.weights)
    def seen(tensors, mode):
        return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().data_ptr() in mode.memory) / numel

    return [{name: seen(tensors, mode) for name, tensors in states.items()} for mode in modes]


# %% [markdown]
# **Predict.** Of the 16 bytes, how many are touched in `step()` and at no other time? Most people say 8, "Adam's two moments".

# %%
phases = dict(zip(("forward", "backward", "step"), on(2).run(touched, 2)[0], strict=True))
print("          ", "  ".join(f"{name:>9}" for name in phases["step"]))
for phase, found in phases.items():
    print(f"{phase:<10} ", "  ".join(f"{count:>9.1f}" for count in found.values()))
print("bytes a parameter that only the step touches")
only = [name for name in phases["step"] if phases["forward"][name] == phases["backward"][name] == 0]
print(f"{sum(phases['step'][name] for name in only):.1f}")

# %% [markdown]
# Twelve: the masters too. For the whole of forward and backward three quarters of a rank's memory lie still. And the update, for which they wait, is little work: some dozen operations a parameter, however large the batch, where forward and backward take six *for each token*. So it can be done by a slower processor, near a slower memory. This is the idea of
# **ZeRO-Offload** (Ren et al. 2021): what grows with the batch stays on the device, what doesn't may go. The paper's words: computation of O(MB), model times batch, stays; what is O(M) moves.
#
# What does the device hold then?

# %% [markdown]
# ## 2. The optimizer moves out: what is left of 16 bytes on a device?
#
# `mz.Zero3Offload(model, optimizer)` is ZeRO-3 with prefetch, whose optimizer's shard is on the host and is updated there. With `what=("optimizer", "params")` the weights' shard goes, too; each gather fetches it from there.
#
# **Predict.** On N ranks ZeRO-3 holds 16Ψ/N at the end of a backward. What stays on the device, in each of the two cases? Most people say 2Ψ/N and 0.


# %%
SETTINGS = {
    "ZeRO-3": None,
    "offload, optimizer": {"what": ("optimizer",)},
    "offload, optimizer and params": {"what": ("optimizer", "params")},
}


def engine_of(settings, model, optimizer, precision):
    if settings is None:
        return mz.Zero3(model, optimizer, precision=precision)
    return mz.Zero3Offload(model, optimizer, precision=precision, **settings)


def held(rank, world_size, settings):
    """Bytes by kind at the end of the second backward, and this rank's parameters."""
    model = GPT.preset("tiny")
    engine = engine_of(settings, model, adamw(model), precision="bf16")
    (x0, y0), (x1, y1) = data.batches("train", world_size, 16, 2, rank=rank, world_size=world_size)
    with mz.record_memory() as memory:
        engine.backward(engine(x0, y0))
        engine.step()
        engine.backward(engine(x1, y1))
        now = memory.now
    by_kind = {kind: now.get(kind, 0) for kind in ("params", "grads", "optimizer", "host")}
    return by_kind, sum(shard.layout.S for shard in engine.weights)


bars, on_device = {}, {}
for name, settings in SETTINGS.items():
    bars[name], numel = on(2).run(held, 2, settings)[0]
    on_device[name] = (sum(bars[name].values()) - bars[name]["host"]) / numel
print("bytes on the device for each parameter of the shard")
print(*(f"{count:.1f}" for count in on_device.values()))

# %% tags=["nbval-ignore-output"]
on_lines = {name.replace(", ", ",\n").replace(" and", "\nand"): by_kind for name, by_kind in bars.items()}
plots.memory_bars(on_lines, "One of 2 ranks, 0.8 M parameters, AdamW in bf16, at the end of a backward")

# %% [markdown]
# Four, and two. The gradients are still there: a reduce-scatter runs on the device, and leaves its mean in the device's memory. (That memory could be lent to the next unit. The paper does so, and arrives at 2Ψ/N and almost nothing; we keep it, as ZeRO-3 does, and keep one page of code.) The host has all the rest, and the gradients once more: 12 + 2 bytes, and 2 more with the
# weights. Adam's step counts, 4 bytes for each piece, do not show.
#
# $$\text{device: } \frac{4\Psi}{N} \text{ bytes, or } \frac{2\Psi}{N} \text{ with the weights} \qquad\qquad \text{host: } \frac{14\Psi}{N} \text{, or } \frac{16\Psi}{N}$$
#
# Above that, what is gathered has to fit into the device's memory, as ever: the root, a block, the blocks ahead. With the weights offloaded a device holds this, the gradients' shard and activations, and nothing else.
#
# Is it the same training? Five steps, in fp32 and in bf16, on 2 ranks and on 3.


# %%
def train(rank, world_size, settings, steps, precision=None):
    """A rank's losses, and its weights as one long vector."""
    model = GPT.preset("nano")  # every run of a rank starts from seed 0, and rank 0 wins anyway
    engine = engine_of(settings, model, adamw(model), precision=precision)
    losses = []
    for x, y in data.batches("train", 12, 64, steps, rank=rank, world_size=world_size):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, torch.cat([weight.flatten() for weight in engine.state_dict().values()])


for world_size, precision in itertools.product((2, 3), (None, "bf16")):
    runs = [on(world_size).run(train, world_size, settings, 5, precision) for settings in SETTINGS.values()]
    same = all(torch.equal(weights, runs[0][0][1]) for run in runs for _, weights in run)
    print(f"{world_size} ranks, {precision or 'fp32'}, same parameters as ZeRO-3: {same}")

# %% [markdown]
# To the last bit. Not one number has changed, only where it is, and who adds it up.
#
# What does it cost? That is a question about the dotted line.

# %% [markdown]
# ## 3. Twelve bytes live beyond the link: how many cross it in a step?
#
# Every step reads and writes all 12 of them, 24 bytes. **Predict** how many bytes cross the link for each parameter of the shard. Most people say 12 or 24: "the state must come to the device and go back".
#
# Draw the step as a graph: what is kept, what is computed, and on each arrow the bytes for one parameter that flow there in a step. Forward and backward are on the device. For everything else we choose: device or host. What crosses the link are the arrows between the two sides.

# %%
KEPT = {"weights": 2, "gradients": 2, "master": 4, "m": 4, "v": 4}  # bytes a parameter
ARROWS = {
    ("weights", "forward and backward"): 4,  # gathered twice
    ("forward and backward", "gradients"): 2,
    ("gradients", "update"): 2,
    **{arrow: 4 for state in ("master", "m", "v") for arrow in ((state, "update"), ("update", state))},
    ("master", "rounding"): 4,
    ("rounding", "weights"): 2,
}
MOVABLE = [*KEPT, "update", "rounding"]


def cut(on_host):
    """Bytes that cross the link, and bytes that are kept on the device."""
    crossing = sum(size for (a, b), size in ARROWS.items() if (a in on_host) != (b in on_host))
    return crossing, sum(size for state, size in KEPT.items() if state not in on_host)


placements = [list(itertools.compress(MOVABLE, choice)) for choice in itertools.product((0, 1), repeat=len(MOVABLE))]
cuts = sorted((*cut(on_host), on_host) for on_host in placements)
print(f"{len(cuts)} ways to divide; for each number of crossing bytes up to 8, the one that leaves least on the device:")
for crossing, found in itertools.groupby(cuts, key=lambda each: each[0]):
    _, left, on_host = next(found)
    if crossing <= 8:
        print(f"{crossing} cross, {left:>2} left   on the host: {', '.join(on_host) or 'nothing'}")
ours = ["master", "m", "v", "update", "rounding"]
print("{} cross, {:>2} left   on the host: {} (ours)".format(*cut(ours), ", ".join(ours)))
print("the fewest bytes that cross, if anything is on the host at all")
print(min(crossing for crossing, _, on_host in cuts if on_host))

# %% [markdown]
# Four. The reason is in the drawing: everything that is kept lies on a *circle*: weights, gradients, update, master, and weights again; or m, update, and m again. A cut through a circle cuts it twice, and no arrow carries fewer than 2 bytes. Two times two are four.
#
# And for four bytes it gets rid of nearly everything. It is not the state that comes to the device for its update, **the update goes to the state**, and what crosses is the smallest thing on either side of it: gradients, 2 bytes down; rounded weights, 2 bytes up. Of all cuts with 4 bytes, one leaves least on the device; the paper calls it the **unique optimal
# strategy** (ZeRO-Offload, section 3). (Ours is the same cut one arrow later: the gradients' memory stays on the device.) To take the weights off the device as well costs 2 more, since they come up for forward and for backward.
#
# Now count. `traffic.bytes_copied` is what an engine has copied over the host link.
#
# **Predict.** Four micro-steps before each step (G = 4), the optimizer on the host. How many bytes for each parameter of the shard? Most people say 16.


# %%
def copied(rank, world_size, settings, micro_steps, precision):
    """Bytes over the host link in one step, for each parameter of this rank's shard."""
    model = GPT.preset("tiny")
    engine = engine_of(settings, model, adamw(model), precision=precision)
    for _ in range(2):
        with mz.record_traffic() as traffic:
            for x, y in data.batches("train", world_size, 16, micro_steps, rank=rank, world_size=world_size):
                engine.backward(engine(x, y) / micro_steps)
            engine.step()
    return traffic.bytes_copied / sum(shard.layout.S for shard in engine.weights)


FORMULAS = {
    ("bf16", "offload, optimizer"): ("2G + 2", lambda G: 2 * G + 2),
    ("bf16", "offload, optimizer and params"): ("2G + 4G", lambda G: 2 * G + 4 * G),
    (None, "offload, optimizer"): ("4G + 4", lambda G: 4 * G + 4),
    (None, "offload, optimizer and params"): ("4G + 8G", lambda G: 4 * G + 8 * G),
}
as_predicted, table = True, {}
print("                                      G = 1   G = 2   G = 4   down + up")
for (precision, name), (words, formula) in FORMULAS.items():
    table[precision, name] = [on(2).run(copied, 2, SETTINGS[name], G, precision)[0] for G in (1, 2, 4)]
    as_predicted &= table[precision, name] == [formula(G) for G in (1, 2, 4)]
    print(f"{precision or 'fp32'}   {name:<29}", "  ".join(f"{count:>6g}" for count in table[precision, name]), f"  {words:>9}")
print("every one as the formula says:", as_predicted)
print("bytes in mixed precision, for G = 1 and G = 4")
print(*(f"{table['bf16', 'offload, optimizer'][i]:g}" for i in (0, 2)))

# %% [markdown]
# **The claim, settled: "offloading the optimizer costs 4 bytes of host link a parameter and step" is true**, in mixed precision with G = 1. With four micro-steps it is 10 and not 16: gradients go down after each backward, where the host adds them up in fp32; the weights come up once, after the step. It is the offloaded *weights* that G makes expensive, since they come up twice in every micro-step.
#
# "A parameter" means one of the rank's own: 4Ψ/N bytes on each link, and every rank has its own link. For 7 billion parameters on 16 ranks that is 1.75 GB a step. What ZeRO-3 sends over the network meanwhile, 3Ψ elements of 2 bytes, is 39 GB. The host link is not the bottleneck of this design. The update may be: 28 bytes a parameter are read and written in the host's memory (24 of master and moments, 2 of the gradient, 2 of the rounded weight), by all ranks of
# a machine at once.

# %% [markdown]
# ## 4. Down, update, up: how many lines does that take?
#
# ZeRO-3 has left a mean gradient of S elements on the device. What is new begins there. We write it down for one unit, in plain PyTorch, and take the whole model as that unit.
#
# **Predict** how many lines `step` and `update` have together, and how many weights will differ from the package's after twenty steps. Most people expect the rounding to show somewhere.


# %%
class UnitByHand:
    """The weights' slice and its gradient in 16 bits, on the device; what the optimizer needs in 32, on the host."""

    def __init__(self, model, rank, world_size):
        full_P = nn.utils.parameters_to_vector(model.parameters()).detach()
        self.master_S = full_P.chunk(world_size)[rank].clone()  # host
        self.slice_S = self.master_S.bfloat16()  # device
        self.arrived_S = torch.zeros_like(self.slice_S)  # host: where gradients arrive
        self.leaving_S = torch.zeros_like(self.slice_S)  # host: where rounded weights leave
        self.optimizer = torch.optim.AdamW([self.master_S], lr=3e-3)

    def step(self, grad_S):
        self.arrived_S.copy_(grad_S)  # 2 bytes down
        self.update()
        self.slice_S.copy_(self.leaving_S)  # 2 bytes up

    def update(self):
        self.master_S.grad = self.arrived_S.float()
        self.optimizer.step()
        self.leaving_S.copy_(self.master_S)  # rounds


# %% [markdown]
# And around it one step of ZeRO-3, with one unit and no hooks: gather, forward, backward, reduce-scatter.


# %%
def by_hand(rank, world_size, steps, unit_class):
    """Losses, and the masters of all ranks as one long vector."""
    model = GPT.preset("nano")
    unit, params, losses = unit_class(model, rank, world_size), list(model.bfloat16().parameters()), []
    sizes = [param.numel() for param in params]
    for x, y in data.batches("train", 12, 64, steps, rank=rank, world_size=world_size):
        full_P = torch.empty(sum(sizes), dtype=torch.bfloat16)
        dist.all_gather(list(full_P.chunk(world_size)), unit.slice_S)
        for param, view in zip(params, full_P.split(sizes), strict=True):
            param.data = view.view_as(param).clone()
        loss = model(x, y)
        grad_P = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, params)])
        grad_S = torch.empty_like(unit.slice_S)
        dist.reduce_scatter(grad_S, list(grad_P.chunk(world_size)))
        unit.step(grad_S / world_size)
        losses.append(loss.item())
    master_P = torch.empty(sum(sizes))
    dist.all_gather(list(master_P.chunk(world_size)), unit.master_S)
    return losses, master_P


expected_losses, expected = on(2).run(train, 2, {"what": ("optimizer",)}, 20, "bf16")[0]
hand_losses, hand = on(2).run(by_hand, 2, 20, UnitByHand)[0]
print(f"loss {hand_losses[0]:.2f} at first, {hand_losses[-1]:.2f} after 20 steps")
print("weights that differ from the package's, of", f"{expected.numel():,}")
print((hand != expected).sum().item())

# %% [markdown]
# Six lines, and none differs. The package's are the same six, spread over a step so that copies can run beside something else. A unit's bucket sends its gradient down when the mean has landed, and asks for it when the optimizer does; a unit's shard sends its weights up when they are updated, and waits for them when the next gather wants them (`settle`):


# %%
def without_docstring(function):
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith('"""') or not line.strip().endswith('"""'))


for function in (host.HostBucket._keep_mean, host.HostBucket._mean, host.HostShard.publish, host.HostShard.settle):
    print(without_docstring(function), end="\n\n")

# %% [markdown]
# (`drop` belongs to question 7, `updated_beside` to question 8.) `staging` is memory for what is on its way; beside a GPU it is *pinned*: its pages cannot move, so the GPU's copy engine can read them while both processors do something else. And the step, unit by unit:

# %%
for function in (mz.Zero3Offload._update, mz.Zero3Offload._update_here):
    print(without_docstring(function), end="\n\n")

# %% [markdown]
# The middle branch is the usual one: `step_by` makes a step of the optimizer, with its hooks, in which `_update_here` does the work. `part_of` is the optimizer, for one unit's pieces alone: any of torch's element-wise optimizers will do, and it is the host that runs it because its tensors are there. (The first branch is question 8, and the last is for an optimizer of your own, which is called once. DeepSpeed brings an Adam for the host, vectorised and with several threads: ZeRO-Offload, section 5.1.)
#
# Every copy here has a beginning and a wait. What if one forgets the second?

# %% [markdown]
# ## 5. A wait that comes a line too late: how many errors does it give?
#
# By hand `copy_` was over when the next line began. A copy beside a GPU is not: `copy_(…, non_blocking=True)` returns at once, and the bytes come some time later. On a CPU we build the worst such link by hand, a **lazy** one: it moves the bytes when somebody waits, and not a moment before.


# %%
class LazyCopy:
    """A copy that is begun here, and made when somebody waits for it."""

    def __init__(self, to, source):
        self.to, self.source = to, source

    def wait(self):
        self.to.copy_(self.source)


class InOrder(UnitByHand):
    def step(self, grad_S):
        down = LazyCopy(self.arrived_S, grad_S)
        down.wait()
        self.update()
        LazyCopy(self.slice_S, self.leaving_S).wait()


class TooLate(UnitByHand):
    def step(self, grad_S):
        down = LazyCopy(self.arrived_S, grad_S)
        self.update()
        down.wait()
        LazyCopy(self.slice_S, self.leaving_S).wait()


# %% [markdown]
# **Predict.** Twenty steps of each. How many errors and NaNs do you get from `TooLate`? Most people say it cannot get through the first.

# %%
for unit_class in (InOrder, TooLate):
    losses, weights = on(2).run(by_hand, 2, 20, unit_class)[0]
    differing = (weights != expected).sum().item()
    print(f"{unit_class.__name__:<8} loss {losses[0]:.2f}, after 20 steps {losses[-1]:.2f}; {differing:>7,} weights differ")
print("errors, NaNs and infinities in TooLate")
print((~torch.isfinite(torch.tensor(losses))).sum().item() + (~weights.isfinite()).sum().item())

# %% [markdown]
# None. All weights differ, but for those of four characters that never occurred, and the loss falls, a little slower. **The copy that was read before it had come** is the classic bug of this lesson. The memory where gradients arrive is there from the beginning, with the last step's gradient in it: old data, well-formed. Adam cannot tell. On a real link it is worse to find, since the copy is nearly always in time: some elements are new, some
# old, other ones in each run, and under a debugger all is well. PyTorch's FSDP2 has a comment at this very place (`_fsdp_collectives.py`): a hook that reads such a gradient too early would make "silently wrong optimizer updates".
#
# So how do you test for it? With the lazy link. Whoever waits before reading gets the right numbers on any link, lazy ones included; whoever does not is found out at once, every time. We take the package's `copy` away and give it ours, which also fills with NaN what may not be read yet:


# %%
class Lazy(LazyCopy):
    begun = 0

    def __init__(self, to, source, unit):
        super().__init__(to.fill_(torch.nan), source)
        Lazy.begun += 1

    def wait(self):
        if self.to is not None:
            super().wait()
            self.to = None


def on_a_lazy_link(rank, settings):
    """The weights after five steps, and the number of copies."""
    real, host.copy, Lazy.begun = host.copy, Lazy, 0
    try:
        _, weights = train(rank, 2, settings, 5, "bf16")
    finally:
        host.copy = real
    return weights, Lazy.begun


differing = []
for name in ("offload, optimizer", "offload, optimizer and params"):
    _, ordinary = on(2).run(train, 2, SETTINGS[name], 5, "bf16")[0]
    weights, begun = on(2).run(on_a_lazy_link, SETTINGS[name])[0]
    differing.append((weights != ordinary).sum().item())
    print(f"{name}: {begun} copies")
print("weights that differ on a lazy link")
print(*differing)

# %% [markdown]
# What a GPU needs is in `parts/host.py`, too: the lower half of `copy`.

# %%
print(inspect.getsource(host.copy))

# %% [markdown]
# A *stream* is a queue of work of the GPU's. Copies have one of their own, which first waits for what was asked for before (the gradient must have been computed), and then runs beside what is asked for next. The *event* marks the copy's end. To wait for a copy to the host, the processor stops (`synchronize`); to wait for one to the device, the GPU's queue does, and the processor goes on.
# `record_stream` says that the memory is still being read, or it might be given to somebody else. (On a CPU the copy is over when the call is. This branch has not run here.)
#
# Copies beside computing, then. What runs beside what?

# %% [markdown]
# ## 6. Seven units: how many gradients are on their way down before backward is over?
#
# Six blocks and a root, mixed precision, on a **simulated** host link and network of 25 MB/s each: so slow because this model is small, and a block's copy shall take about as long as its backward. Two steps, on the timeline.
#
# **Predict.** Seven copies go down, one for each unit, each when the unit's mean gradient is there; and a reduction is waited for when the next one leaves (lesson 04). How many begin while backward still runs? Most people say none ("the update comes after backward") or seven.


# %%
def two_steps(rank, world_size):
    """What a rank did when, in the third and fourth step."""
    model = GPT.preset("tiny", layers=6)
    engine = mz.Zero3Offload(model, adamw(model), precision="bf16")

    def steps():
        for x, y in data.batches("train", 16, 128, 2, rank=rank, world_size=world_size):
            engine.backward(engine(x, y))
            engine.step()

    steps()
    with mz.link(25e6), mz.record_timeline() as timeline:
        steps()
    return timeline


timelines = on(2).run(two_steps, 2)
events = timelines[0].events
step = next(event for event in events if event.what == "step")
backward = [event for event in events if event.what == "backward" and event.start < step.start]
down = [event for event in events if event.what == "copy" and event.start < step.start]
up = [event for event in events if event.what == "copy" and step.start < event.start < step.end]


def in_order(**named):
    """The units of these events, in the order in which they began."""
    words = sorted((event.start, name, event.unit) for name, found in named.items() for event in found)
    return " · ".join(f"{name} {unit.removeprefix('blocks.')}" for _, name, unit in words)


print(in_order(backward=[event for event in backward if event.unit != "root"], down=down))
print(in_order(up=up))
print(f"copies down that begin before backward is over, of {len(down)} ({timelines[0].simulated})")
print(sum(copy.start < max(event.end for event in backward) for copy in down))

# %% tags=["nbval-ignore-output"]
shown = []
for timeline in timelines:
    begin = min(event.start for event in timeline.of("backward"))  # from the first backward to the second forward
    end = max(event.end for event in timeline.of("forward"))
    computing = [event for event in timeline.of("forward", "backward", "step") if event.unit != "root"]
    shown += [event for event in computing if begin <= event.start <= end]
    free = begin  # the link carries one copy after the other
    for event in timeline.of("copy"):
        if event.start < end:
            shown.append(dataclasses.replace(event, start=max(event.start, free)))
            free = event.end
plots.lanes(shown, f"Computing above, copies over the host link below ({timelines[0].simulated})")

# %% [markdown]
# Four. A block's gradients go down when the next block's backward is over and its reduction leaves, beside the block after that. The last three, blocks 1 and 0 and the root, have nothing left to hide behind. In a model of 96 blocks they are the last 3 of 97.
#
# (A copy is drawn from when the link is free for it.) After the green bar, `step`, it is the same in the other direction: a unit is updated, its weights leave, and the next is updated meanwhile. The copies do not end with the step. The next forward begins with the root and block 0, whose weights came first, and the rest are still on their way while it computes. That is why weights go up in the order of forward.
#
# A gather may not begin before this rank's part of the weights has come. Does it wait? And must there be gathers at all, now that the hosts have everything?
#
# **Predict.** ZeRO-3 makes 14 all-gathers a step, two for each unit. How many are left, with the weights on the host?


# %%
def collectives(rank, world_size, settings):
    """The collectives of the second step, elements that this rank sends, and the padded parameters P."""
    model = GPT.preset("tiny", layers=6)
    engine = engine_of(settings, model, adamw(model), precision="bf16")
    for x, y in data.batches("train", world_size, 16, 2, rank=rank, world_size=world_size):
        with mz.record_traffic() as traffic:
            engine.backward(engine(x, y))
            engine.step()
    ops = [op for op in traffic.ops if op.unit != "control"]
    return [op.op for op in ops], sum(op.bytes for op in ops) / 2, sum(bucket.layout.P for bucket in engine.buckets)


second = [event for event in events if event.start > step.end]
gathers = {event.unit: event for event in reversed(second) if event.what == "gather"}  # each unit's first
print("weights that had come up before their gather began:", all(copy.end <= gathers[copy.unit].start for copy in up))
ops = {name: on(3).run(collectives, 3, settings)[0] for name, settings in SETTINGS.items()}
for name, (found, elements, P) in ops.items():
    counts = f"{found.count('all_gather')} all-gathers, {found.count('reduce_scatter')} reduce-scatters"
    print(f"{name:<29}  {counts}, {3 * elements / 2 / P:g}P(N−1)/N elements")
print("all-gathers with the weights on the host")
print(found.count("all_gather"))

# %% [markdown]
# All fourteen. **The claim, settled: "with offload the parameters must still be all-gathered" is true.** Each rank's host has the shard of its rank and nothing else; the other (N−1)/N come from the other ranks, over the network, for every forward and every backward. The 3Ψ(N−1)/N of ZeRO-3 stay to the element, and the host link comes on top. Offload saves memory, and no traffic. (Ranks of one machine could look up each other's shards in the memory that they share, and ranks of other machines could not; here all are alike.)
#
# If the host is not large enough either, there is one place left.

# %% [markdown]
# ## 7. From memory to disk: by how many bytes does a process shrink?
#
# `to="disk"` keeps the optimizer's shard in files. They are *mapped into memory*: to the optimizer they look like tensors, and the operating system reads a page when it is touched and writes it back when it has changed. ZeRO-Infinity does so with NVMe disks (Rajbhandari et al. 2021; it reads ahead by itself, where we leave that to the operating system).

# %%
print(without_docstring(host.Disk.empty), end="\n\n")
print(without_docstring(host.Disk.drop), end="\n\n")
print(without_docstring(host._mapped))

# %% [markdown]
# Two things in it are easy to miss. A page that was touched counts as the process's memory until it is given back: that is `drop`, after each unit, with values intact in the file. And the files have **no name**: whoever kills the process leaves nothing behind.
#
# Now the label becomes real. The *resident set* is what the operating system counts as this process's memory, for whatever purpose. A model of 19 million parameters on two ranks, whose optimizer's shard is 114 MB.
#
# **Predict.** In units of the optimizer's shard, by how much is the resident set smaller with `to="disk"`? Most people say 0: what is mapped into memory is in memory. (This question needs Linux; elsewhere the cell prints zeros.)


# %%
def in_memory(rank, to):
    """By how many bytes two steps make this process grow; the optimizer's bytes; those of files without a name; and names."""
    if not sys.platform.startswith("linux"):
        return 0, 1, 0, []  # others have no /proc to look at
    before = resident_set()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        model = GPT(GPTConfig(vocab_size=70, context=32, layers=6, heads=8, width=512))
        engine = mz.Zero3Offload(model, adamw(model), to=to, precision="bf16")
        for x, y in data.batches("train", 2, 16, 2, rank=rank, world_size=2):
            engine.backward(engine(x, y))
            engine.step()
        tempfile.tempdir, names = None, os.listdir(folder)
        with open("/proc/self/maps") as maps:
            mapped = [line.split()[0].split("-") for line in maps if folder in line]
    nameless = sum(int(end, 16) - int(start, 16) for start, end in mapped)
    return resident_set() - before, 12 * sum(shard.layout.S for shard in engine.weights), nameless, names


on(2).run(in_memory, "cpu")  # what a first run leaves behind for good is not counted
grown = {to: on(2).run(in_memory, to)[0] for to in ("cpu", "disk")}
_, optimizer_bytes, nameless, names = grown["disk"]
print(f"the optimizer's shard: {optimizer_bytes:,} bytes")
print(f"mapped from files: {nameless / optimizer_bytes:.2f} of it; names of files in the folder: {len(names)}")
print("the resident set is smaller by so many times the optimizer's shard")
print(f"{(grown['cpu'][0] - grown['disk'][0]) / optimizer_bytes:.1f}")

# %% tags=["nbval-ignore-output"]
for to, (more, *_) in grown.items():
    print(f"to={to!r}: two steps made the process grow by {more / 1e6:.0f} MB")

# %% [markdown]
# By all of it. (What was written may stay in the operating system's cache for a while, as with any file. That memory is nobody's: it is given to whoever asks.)
#
# And the price? Adam reads 12 bytes a parameter and writes 12. Every step, the whole shard goes through the disk in both directions.

# %%
print("bytes a parameter and step through the disk, and over the host link")
print(2 * (4 + 4 + 4), FORMULAS["bf16", "offload, optimizer"][1](1))
print("GB/s that each of 16 ranks' disks needs: 7 B parameters, update within 1 s; 175 B, within 5 s")
print(*(f"{24 * numel / 16 / seconds / 1e9:.1f}" for numel, seconds in ((7e9, 1), (175e9, 5))))

# %% [markdown]
# One NVMe disk reads or writes some 3 to 7 GB/s. 10 GB/s for *each rank* means several disks for each GPU. That is why ZeRO-Infinity cuts the state over all disks of all machines, why one takes it for models that do not fit otherwise, and why one takes large batches with it: the 24 bytes are paid once a step.
#
# The update is off the device, then, and it is slow. Must everybody wait for it?

# %% [markdown]
# ## 8. The update runs beside the next forward: which weights does that forward see?
#
# With `delayed=True` a step begins the update of its gradients in a thread, and returns; the next forward and backward compute meanwhile. We take a model whose gradient is always 1 and SGD with a learning rate of 1, so a weight counts the updates that it has seen: 0, −1, −2 …
#
# **Predict.** What does the weight read in forward 0, 1, 2, 3, 4? Without delay it is 0 −1 −2 −3 −4. Most people say the same, "a thread's timing apart".


# %%
class Counting(nn.Module):
    """Its loss is its weight; so the gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(32)), []

    def forward(self):
        self.seen.append(f"{self.weight[0].item():g}")
        return self.weight.sum()


def seen(rank, delayed):
    model = Counting()
    engine = mz.Zero3Offload(model, sgd(model, lr=1.0), delayed=delayed)
    for _ in range(5):
        engine.backward(engine())
        engine.step()
    return model.seen, engine.state_dict()["weight"][0].item()


for delayed in (False, True):
    numbers, saved = on(2).run(seen, delayed)[0]
    print(f"delayed={delayed!s:<5}   saved after 5 steps: {saved:g}")
    print(*numbers)

# %% [markdown]
# From the second forward on one update is missing, and always *exactly* one: it is no race. A step first waits for the update of the step before, sends its weights up, and then begins its own. So forward t computes with weights that miss the gradient of step t−1. The paper's name is **delayed parameter update** (ZeRO-Offload, section 5.2). (`state_dict()` waits for the update that runs, so what is saved misses nothing.)
#
# The order of a step, without and with delay:
#
# ```
#              forward t      backward t      step t
# plain        weights t                      update with gradient t · weights up            everybody waits for the update
# delayed      weights t−1                    wait · weights up · begin update t              it runs beside forward t+1, backward t+1
# ```
#
# If it is that regular, it can be written down as a loop without any engine, thread or offload: apply each gradient one step late.


# %%
def one_step_late(rank, world_size, steps):
    """Plain data parallel training in which the optimizer always gets the last step's gradients."""
    model = GPT.preset("nano")
    optimizer, late, losses = adamw(model), None, []

    def update(gradients):
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()

    for x, y in data.batches("train", 12, 64, steps, rank=rank, world_size=world_size):
        loss = model(x, y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= world_size
        if late is not None:
            update(late)
        late = gradients
    update(late)  # as state_dict() does
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


steps = 60
plain, _ = on(2).run(train, 2, {}, steps)[0]
delayed, weights = on(2).run(train, 2, {"delayed": True}, steps)[0]
reference, reference_weights = on(2).run(one_step_late, 2, steps)[0]
print("the same losses as the loop's:", delayed == reference)
print(f"weights that differ from the loop's after {steps} steps, of {weights.numel():,}")
print((weights != reference_weights).sum().item())

# %% [markdown]
# **Predict.** After 60 steps, how far apart are the losses with and without delay? Most people say that one step in 60 cannot show.

# %%
print(f"loss over the last 10 of {steps} steps, plain and delayed")
print(*(f"{sum(losses[-10:]) / 10:.2f}" for losses in (plain, delayed)))

# %% tags=["nbval-ignore-output"]
title = "The same batches, AdamW, 2 ranks: each gradient applied at once, or one step late"
plots.curve(range(steps), {"plain": plain, "delayed": delayed}, "step", "loss", title)

# %% [markdown]
# It is *another* training, and here a worse one: the gradient belongs to weights that are no more, and where the loss falls fast the picture shows it. (`TooLate` of question 5 was nearly this, by accident.) This is the only engine of the course that does not end with DDP's parameters, and it says so in its arguments. What it costs: gradients that are one step old, from the beginning (the paper makes some dozens of plain steps first), and a host that
# keeps them a step longer. What it buys is the update's time, if forward and backward are long enough to cover it:


# %%
def in_step(rank, delayed):
    """Seconds of step() in each of some steps, without a simulated link."""
    model = GPT.preset("small", layers=4)
    engine = mz.Zero3Offload(model, adamw(model), precision="bf16", delayed=delayed)
    for x, y in data.batches("train", 2, 64, 2, rank=rank, world_size=2):
        engine.backward(engine(x, y))
        engine.step()
    with mz.record_timeline() as timeline:
        for x, y in data.batches("train", 2, 64, 4, rank=rank, world_size=2):
            engine.backward(engine(x, y))
            engine.step()
    return min(event.seconds for event in timeline.of("step"))


# %% tags=["nbval-ignore-output"]
print("ms in which a step updates and everybody waits, plain and delayed")
print(*(f"{1e3 * on(2).run(in_step, delayed)[0]:.1f}" for delayed in (False, True)))

# %% [markdown]
# (On these ranks the thread takes its time from the processors that compute forward and backward. Beside a GPU the host has little else to do.)
#
# **What is still wasteful?** Of the 16 bytes a device now holds 4/N or 2/N, and everything else on it is *working* memory: units that are gathered, and activations. Those grow with the batch and the length of the text, and neither ZeRO nor offload touches them. They are computed again instead of kept (activation checkpointing), or the layers themselves are divided (tensor and pipeline parallelism). The ladder of ZeRO ends
# here: the states are sharded, hidden and moved.
#
# ## What has changed
#
# The module on one page first, then the difference between `minizero/prefetch.py` and `minizero/offload.py`, made from the two files.

# %%
print(inspect.getdoc(inspect.getmodule(mz.Zero3Offload)))

# %% [markdown]
# How to read it. `Zero3Offload` *is* a `Zero3Prefetch`: what it does not mention it inherits, and only what comes is shown.
#
# 1. **`_shard` and `_bucket`**: the two places in which an engine makes what it keeps. Here they make a `HostShard` and a `HostBucket` (question 4). Nothing else decides where a byte rests.
# 2. **`_update`**: unit by unit, in three branches. The middle one is offload, the first one is the delayed update.
# 3. **`_join` and `_publish`**: the end of an update that runs beside, and its weights' way up. (**`step`** asks for them where it is skipped itself: the update before it stands.)
# 4. The rest, whatever reads or writes state from outside, waits with `_join` first.

# %%
changes(mz.Zero3Prefetch, mz.Zero3Offload)

# %% [markdown]
# ## Interview corner
#
# ### "What does offload put where, and what does it cost?"

# %%
numel, ranks = 7e9, 16
print("7 B parameters on 16 ranks, GB of model states on each device: ZeRO-3, optimizer on the host, weights too")
print(*(f"{each * numel / ranks / 1e9:.2f}" for each in (16, 4, 2)))
print("GB that each rank copies over its host link in a step, and GB that it sends over the network")
print(f"{4 * numel / ranks / 1e9:.2f} {2 * mz.theory.traffic(3, numel, ranks) / 1e9:.2f}")

# %% [markdown]
# **What they want to find out.** Whether you can derive the cut, or have only seen the switch in a config.
#
# **The full answer.** The optimizer's shard goes to the host, fp32 master and both moments, 12 of 16 bytes, and with it the *update*, which is cheap and does not grow with the batch. Forward and backward stay on the device, with weights and gradients in 16 bits. Then two things cross the link: gradients down, 2 bytes, weights up, 2 bytes; 4Ψ/N bytes on each rank's link.
# It cannot be less, since everything that is kept lies on a circle of the data flow, a cut crosses a circle twice, and no arrow carries fewer than 2 bytes. Moving the state to the device for its update would be 24. The weights may go to the host too: then they come up for forward and for backward, 6 bytes. The network's 3Ψ(N−1)/N stay as they are, because each host has its rank's
# shard only. Copies hide: gradients go down while backward goes on, weights go up while other units are updated and the next forward begins. What does not hide is the update itself, unless it is delayed; the host's memory reads and writes 28 bytes a parameter for it.
#
# **In 30 seconds.** State and update to the host; 2 bytes of gradient down, 2 bytes of weight up, the least there can be. Device 4Ψ/N, or 2Ψ/N with the weights offloaded. All-gathers stay. The price is the update's time on the host more than the link.
#
# **Follow-ups**
# - *And with 4 micro-steps?* 2G + 2 = 10 bytes; with offloaded weights 6G = 24.
# - *What does FSDP2's `CPUOffloadPolicy` copy?* It keeps the sharded weights in fp32 on the host, with gradients and optimizer: 4 bytes up for each gather and 4 down, 12 in place of 6. (Its cast to 16 bits comes on the device.)
# - *Why pinned memory?* The GPU's copy engine needs pages that stay where they are. Without, a copy goes through a staging buffer and the processor waits for it: no overlap.
#
# **Wrong answers people give**
# - *"12 bytes a parameter have to go to the GPU and back."* The update goes to the state. 4 were counted (question 3).
# - *"With the weights on the host, the all-gathers are gone."* 14 of 14 are still there (question 6).
# - *"PCIe is the bottleneck."* 1.75 GB over the link, where the network carries 39. Look at the host's update first (question 3).
#
# **Your own project.** "I let a program try all 128 ways to divide the step between device and host, and then counted the bytes: 4, as the theory says, and bit for bit the same parameters."
#
# ### "One GPU with 24 GB and a model of 7 B parameters. Can you train it?"

# %%
numel, speed = 7e9, 100e12  # parameters; operations/s of the GPU
link, memory = 25e9, 100e9  # bytes/s of the host link, and of the host's memory
print("GB of model states on the device: all of it there, optimizer on the host, weights too; and GB on the host then")
print(*(f"{each * numel / 1e9:.0f}" for each in (16, 4, 2, 16)))
seconds = 6 * numel / link, 28 * numel / memory
print("seconds of copies, and of the update")
print(*(f"{each:.1f}" for each in seconds))
print("tokens in a step whose computing takes as long as both")
print(f"{sum(seconds) * speed / (6 * numel):,.0f}")

# %% [markdown]
# **What they want to find out.** Whether you calculate before you say yes, and whether you know which number is missing.
#
# **The full answer.** Mixed-precision Adam needs 16 bytes a parameter, 112 GB. With the optimizer on the host 28 remain, too much. With the weights there as well, 14 GB of gradients remain, and less if their memory is given back as they leave, as the paper does. Then a block's weights, gathered, which with one GPU means fetched; and activations, which decide the batch. The host needs 112 GB. A
# step copies 6 bytes a parameter, 42 GB, 1.7 s at 25 GB/s, and updates for about 2 s. That has to be worth it: with 6Ψ operations a token and 100 TFLOP/s a GPU computes as long on 8,700 tokens. With fewer in a step it mostly waits. So: long rows, activation checkpointing for their memory, and accumulation with care, since offloaded weights come up in each micro-step (6G bytes).
#
# **In 30 seconds.** Yes, slowly. Optimizer and weights on the host, 112 GB there; on the device the gradients or less, a block, and activations. Nearly 4 s of a step go into copies and update, so give it 9,000 tokens a step at least.
#
# **Follow-ups**
# - *The host has 64 GB.* `to="disk"`: 24 bytes a parameter go through it in each step for the optimizer alone, 168 GB, 34 s at 5 GB/s. Take large batches, an optimizer with less state, or train fewer parameters (LoRA).
# - *Does ZeRO do anything on one GPU?* There is nothing to shard. What helps is the other half: gather a unit, free a unit, from the host.
# - *What in this calculation would you measure first?* The update, on that host: how many threads, whether vectorised, what bandwidth. The rest is arithmetic.
#
# **Wrong answers people give**
# - *"7 B in 16 bits are 14 GB, so it fits."* For inference. Gradients and Adam are 14 bytes more for each parameter.
# - *"Offload makes it impossibly slow, since everything crosses PCIe."* 6 bytes a parameter and step do, not each operation (question 3).
# - *"The optimizer on NVMe costs nothing, it is needed once a step."* All of it, in both directions (question 7).
#
# **Your own project.** "I measured the resident set of a rank with its optimizer in memory-mapped files: smaller by the optimizer's size."
#
# ### "What is the delayed parameter update, and would you switch it on?"
#
# **What they want to find out.** Whether you notice when an optimization changes the mathematics.
#
# **The full answer.** With offload a step ends with the host's update, and the device waits for it. Delayed by one step, the update of gradient t runs beside forward and backward t+1, which use weights without it. So the device never waits, if computing takes as long as the update. It is a stale gradient, of exactly one step, in a fixed order: reproducible, and equal to a loop that applies each gradient one step
# late. It is not the same training as ZeRO-3: where weights move fast, or with a high learning rate, it lags or diverges. The paper begins with plain steps, and reports no loss in quality after that. I would look at the timeline first: with a large batch the update is a small part of a step, and then there is nothing to win. With a small one I would compare two loss curves before I believe in it.
#
# **In 30 seconds.** The update overlaps the next forward and backward, at the price of weights that are one step old. Deterministic, not equivalent. Only where the host's update is a large part of the step, after a warm-up, and with a curve to show for it.
#
# **Follow-ups**
# - *What did you measure?* After 60 steps of a small GPT a loss of 2.87 in place of 2.64, delayed from the first step on (question 8).
# - *What must a checkpoint do?* Wait for the update that runs, or it misses one gradient.
# - *Is it asynchronous SGD?* No. There staleness differs from worker to worker and run to run. Here it is 1, on all ranks.
#
# **Wrong answers people give**
# - *"It is only a matter of overlap, the numbers stay."* The second forward sees the first weights (question 8).
# - *"All engines delay: gradients travel while backward runs."* Those copies end before the update (question 6).
# - *"A race decides which weights a forward sees."* A step waits for the last update before it begins its own. The loop was equal bit for bit.
#
# **Your own project.** "I wrote the loop that applies each gradient a step late, in plain PyTorch, and the engine's losses were equal to it in all 60 steps."
#
# ## Now you
#
# `minizero start 06`, in a terminal, puts the exercises into `work/06_offload.ipynb`. You build this step from plain `torch` and `torch.distributed`: an Adam on the host, copies that are waited for in the right place, a timeline with overlap, a budget of 4 bytes, an update that comes one step late. Some numbers and one bug come on top.
