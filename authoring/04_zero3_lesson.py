# %% [markdown]
# # 04 ZeRO-3: weights exist while a layer works
#
# In ZeRO-2 every rank holds all weights all the time. In ZeRO-3 it keeps 1/N of them. The weights of a block are put together when the block is about to work, and given back when it has worked.
#
# ```
#            between        while a block runs forward     while it runs backward
# ZeRO-2     all weights    all weights                    all weights
# ZeRO-3     1/N of them    gather · forward · free        gather · backward · reduce-scatter · free
# ```
#
# That is all of it. The lesson is about three things in the second row: *free*, which is harder than it looks; *gather*, which has to be paid for; and the dots between them, the order of events.
# Nine questions, nearly all with a number for an answer. Write yours down before you run the cell.

# %% tags=["nbval-ignore-output"]
import functools
import gc
import inspect
import itertools
import textwrap
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore  # ranks that do not exist
from torch.utils.flop_counter import FlopCounterMode

import minizero as mz
from minizero import data
from minizero.course import changes
from minizero.lens import plots
from minizero.model import GPT, GPTConfig
from minizero.parts import comm, units

torch.set_num_threads(1)  # as in every rank
on = functools.cache(mz.Ranks)  # on(2).run(fn): two ranks, started at first use and warm from then on
print(on(2).run(lambda rank: f"rank {rank} answers from a process of its own"))

# %% [markdown]
# ## 1. Twelve blocks: how long does each of them need its weights?
#
# First the pain. ZeRO-2 in mixed precision: what does a rank hold at the end of a backward, in bytes a parameter?


# %%
def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def held(rank, world_size, step):
    """Bytes by kind at the end of the second backward, and how many pieces the optimizer has."""
    model = GPT.preset("tiny")
    optimizer = adamw(model)
    engine = step(model, optimizer, precision="bf16")
    (x0, y0), (x1, y1) = data.batches("train", world_size, 16, 2, rank=rank, world_size=world_size)
    with mz.record_memory() as memory:
        engine.backward(engine(x0, y0))
        engine.step()
        engine.backward(engine(x1, y1))
        now = memory.now
    by_kind = {kind: now[kind] for kind in ("params", "grads", "optimizer")}
    return by_kind, sum(len(group["params"]) for group in optimizer.param_groups)


psi = sum(param.numel() for param in GPT.preset("tiny").parameters())
for n in (2, 4):
    by_kind, _ = on(n).run(held, n, mz.Zero2)[0]
    print(f"N = {n}   ", "   ".join(f"{plots.NAMES.get(kind, kind)} {count / psi:.1f}" for kind, count in by_kind.items()))

# %% [markdown]
# Twice the ranks, half of everything, except in the first column. On 64 ranks its 2.0 stand beside 0.03 and 0.19.
#
# Now take a GPT of 12 blocks. ZeRO-2 keeps the weights of all 12 in memory for the whole step. Block 7 works for 1/12 of the forward pass and 1/12 of the backward.
#
# **Predict.** Four ranks. A rank keeps a quarter of the weights, and a block's weights are whole only while that block works. How many bytes of weights does the rank hold *at most*, as a share of ZeRO-2's? Most people say 25 %, because that is its part,
# or 100 %, because at some time everything has been gathered.


# %%
def weights_over_a_step(rank, world_size, step):
    """The bytes of weights during one step: what they are at first, and what they become with each change."""
    model = GPT.preset("nano", layers=12)
    engine = step(model, sgd(model), precision="bf16")
    x, y = next(data.batches("train", world_size, 64, 1, rank=rank, world_size=world_size))
    with mz.record_memory() as memory:
        engine.backward(engine(x, y))
        engine.step()
    return [int(count) for count, _ in itertools.groupby(memory.curve()[1]["params"])]


(zero2,) = on(4).run(weights_over_a_step, 4, mz.Zero2)[0]  # one number: it never changes
zero3 = on(4).run(weights_over_a_step, 4, mz.Zero3)[0]
print(f"at rest {zero3[0] / zero2:.0%}")
print("at most, of ZeRO-2's weights")
print(f"{max(zero3) / zero2:.0%}")

# %% tags=["nbval-ignore-output"]
changes_at = [i for i in range(len(zero3) + 1) for _ in range(2)][1:-1]  # from one change to the next it stays: steps
share = [100 * count / zero2 for count in zero3 for _ in range(2)]
plots.curve(
    changes_at,
    {"ZeRO-3": share, "ZeRO-2": [100] * len(share)},
    "changes, one after the other: 12 blocks forward, then 12 backward",
    "% of ZeRO-2's weights",
    "The weights that one of 4 ranks holds during a step",
)

# %% [markdown]
# Thirty-five per cent. The curve is a comb: one tooth a block, 12 in forward and 12 in backward, and the height of a tooth is *one* block, not twelve. It stands on 25 %, the rank's own slices, and on two per cent that belong to no block, embeddings and head; the tooth is a twelfth, 8 %.
#
# What is gathered and freed together we call a **unit**: here each block is one, and what is left over makes the *root* unit, which encloses them. (`mz.Zero3` finds them by itself: the children of the outermost ModuleLists and Sequentials.) The paper's word for the whole thing is to **partition** the parameters (section 5.3), and it is stage 3. The model's work has not been split, only the place where its weights
# sleep. What we paid for it you see in the number of teeth: every block is gathered twice.
#
# How does one make a tooth? Going up is an all-gather. Going down looks easier, and isn't.

# %% [markdown]
# ## 2. All twelve parameters of a block let go: how many bytes come back?
#
# The weights of a unit lie in one flat buffer, and each parameter is a view of its place in it. In lesson 03 one forgotten reference kept a whole bucket alive. So this time we forget none: we run a block, rebind the `.data` of each of its parameters, and no variable of ours points to the buffer any more.
#
# **Predict.** Forward has run, backward is still to come. How many of the block's 199,936 bytes are back? Most people say all of them.


# %%
def flat_block():
    """A block of the small GPT with its twelve parameters in one buffer, to which nothing else points."""
    block = GPT.preset("nano").blocks[0]
    full_P = nn.utils.parameters_to_vector(block.parameters()).detach()
    nn.utils.vector_to_parameters(full_P, block.parameters())  # from here on each parameter is a view of it
    return block


def rebind(block):
    for param in block.parameters():
        param.data = torch.empty(0)


def shrink(block):
    next(block.parameters()).untyped_storage().resize_(0)


def given_back(free, training):
    block, h = flat_block(), torch.randn(8, 64, 64, requires_grad=True)
    with mz.record_memory() as memory, torch.set_grad_enabled(training):
        before = memory.now["params"]
        out = block(h)  # alive to the end, as in a forward
        free(block)
        return before - memory.now["params"]


print(f"without autograd, rebound   {given_back(rebind, training=False):>7,}")
print(f"in training, shrunk         {given_back(shrink, training=True):>7,}")
print("in training, rebound")
print(given_back(rebind, training=True))

# %% [markdown]
# Not one. Without autograd the same rebinding gives all of them back, so it is autograd that points there. `saved_tensors_hooks(pack, unpack)` lets us watch: inside it autograd calls `pack` with each tensor that it saves for backward, keeps what comes back, and calls `unpack` with that when backward asks for the tensor.

# %%
def saved_views():
    """The shapes of what autograd saves of a block's buffer, other than the parameters themselves."""
    block, h = flat_block(), torch.randn(8, 64, 64, requires_grad=True)
    buffer = next(block.parameters()).untyped_storage().data_ptr()
    shapes = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() == buffer and not isinstance(tensor, nn.Parameter):
            shapes.append(tuple(tensor.shape))
        return tensor.detach()  # a tensor that holds its own graph would never die

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(h)
    return shapes


print(*saved_views())
print("views of the buffer that autograd holds")
print(len(saved_views()))

# %% [markdown]
# Four, one for each matrix: a product saves the *transposed* weight, and that is a view, which knows nothing of a parameter's new `.data`. (The norms' weights are saved as the parameters themselves. They follow `.data`, and are not in this list.) One of them is enough to keep all 199,936 bytes.
#
# What does give them back is to shrink the storage, the memory under all views, to 0 bytes. Two things to remember about it. First, the views stay, over nothing: who computes with one gets an error in the better case, and else the process ends with a segmentation fault (lesson 03, question 3). Second, **test it
# in training, after a forward and before the backward.** Where no graph holds a view, without gradients or when backward is over, rebinding frees as well, and the bug does not show.
#
# Backward, then. It will ask for those four views. Who fills them?

# %% [markdown]
# ## 3. A free that frees nothing: in how many weights does the model differ?
#
# The views still point to the storage. So give the *same* storage its size again, gather into it, and every view sees the weights, without having been told. With that ZeRO-3 can be written down in plain PyTorch: a unit has a buffer, a slice, and four hooks.


# %%
class UnitByHand:
    """A block's weights: whole while it works, 1/N of them between."""

    def __init__(self, block, rank, world_size):
        self.params, self.world_size = list(block.parameters()), world_size
        self.full_P = nn.utils.parameters_to_vector(self.params).detach()
        nn.utils.vector_to_parameters(self.full_P, self.params)
        self.slice_S = self.full_P.chunk(world_size)[rank].clone().requires_grad_()  # memory of its own
        self.free()
        block.register_forward_pre_hook(self.gather)
        block.register_forward_hook(self.free)
        block.register_full_backward_pre_hook(self.gather)
        block.register_full_backward_hook(self.reduce)

    def gather(self, *_):
        self.full_P.untyped_storage().resize_(self.full_P.nbytes)
        dist.all_gather(list(self.full_P.chunk(self.world_size)), self.slice_S.detach())

    def free(self, *_):
        self.full_P.untyped_storage().resize_(0)

    def reduce(self, *_):
        grad_P = torch.cat([param.grad.flatten() for param in self.params])
        self.slice_S.grad = torch.empty_like(self.slice_S)
        dist.reduce_scatter(self.slice_S.grad, list(grad_P.chunk(self.world_size)))
        self.slice_S.grad /= self.world_size
        for param in self.params:
            param.grad = None
        self.free()


# %% [markdown]
# The root stays whole here, and its gradients are averaged as in DDP. The optimizer gets the root's weights and the slices. In the end we read the meter after one more forward, when its backward would come.


# %%
def zero3_by_hand(rank, world_size, steps, unit_class):
    """The weights after some steps of AdamW, and the bytes of weights in memory after a forward."""
    model = GPT.preset("nano")
    blocks = [unit_class(block, rank, world_size) for block in model.blocks]
    root = [param for name, param in model.named_parameters() if not name.startswith("blocks")]
    optimizer = torch.optim.AdamW([*root, *(unit.slice_S for unit in blocks)], lr=3e-3)
    for x, y in data.batches("train", 16, 64, steps, rank=rank, world_size=world_size):
        model(x, y).backward()
        for param in root:
            dist.all_reduce(param.grad)
            param.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    with mz.record_memory() as memory:
        loss = model(x, y)  # with its graph, as before a backward
        after_forward = memory.now["params"]
    for unit in blocks:
        unit.gather()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), after_forward


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


ddp_weights = on(2).run(train, 2, mz.DDP, 20)[0][1]
by_hand = on(2).run(zero3_by_hand, 2, 20, UnitByHand)
print(f"weights that differ from DDP's after 20 steps, of {ddp_weights.numel():,}:", sum((w != ddp_weights).sum().item() for w, _ in by_hand))
print("weights in memory after a forward, of all")
print(f"{by_hand[0][1] / ddp_weights.nbytes:.0%}")

# %% [markdown]
# Right to the last bit, and of the full weights only the root is in memory between forward and backward. (The slices, half of the blocks on two ranks, are the optimizer's tensors here, and the meter counts them there.) Now the bug. Somebody writes `gather` and `free` as one would at first, with a new tensor for each gather:


# %%
class Rebinding(UnitByHand):
    def gather(self, *_):
        self.full_P = torch.empty(self.full_P.numel())
        dist.all_gather(list(self.full_P.chunk(self.world_size)), self.slice_S.detach())
        nn.utils.vector_to_parameters(self.full_P, self.params)

    def free(self, *_):
        self.full_P = torch.empty(1).expand(self.full_P.numel())
        nn.utils.vector_to_parameters(self.full_P, self.params)


# %% [markdown]
# **Predict.** Twenty steps of this one. In how many weights does it differ from DDP's?

# %%
buggy = on(2).run(zero3_by_hand, 2, 20, Rebinding)
print(f"in memory after a forward: {buggy[0][1] / ddp_weights.nbytes:.0%}")
print("weights that differ from DDP's")
print(sum((weights != ddp_weights).sum().item() for weights, _ in buggy))

# %% [markdown]
# In none. Autograd has kept the old buffers, and the matrices' gradients come from those; of what the second gather brings, only the norms' weights are read, which are saved as parameters. This engine sends what ZeRO-3 sends, and the weights that it holds are all of them, with its slices on top. **The storage that never went away** is the classic bug of this lesson. Parity does not find it, the traffic does not find it, the loss
# does not find it. The meter does, between forward and backward.
#
# Two dozen lines, then, for a model whose units are all used once and in order. What does the package add?

# %% [markdown]
# ## 4. `head.weight.sum()` between two steps: what does it return?
#
# `engine = mz.Zero3(model, optimizer)` shards every unit, the root too. Between two steps no full weight has memory on any rank, and `engine.module.head.weight` is still a parameter of 70 × 64 elements.
#
# **Predict.** What is its sum? 0? NaN? Or does the process die, as by hand?

# %% tags=["raises-exception"]
def sum_of_the_head(rank):
    model = GPT.preset("nano")
    engine = mz.Zero3(model, sgd(model))
    return engine.module.head.weight.sum().item()


try:
    on(2).run(sum_of_the_head)
except mz.RankError as error:
    raise RuntimeError(error.message) from None

# %% [markdown]
# None of them. A freed weight answers questions about its shape and refuses to be used; it names itself, and the way to read it:


# %%
def inside_and_outside(rank):
    model = GPT.preset("nano")
    engine = mz.Zero3(model, sgd(model))
    weight = model.head.weight
    outside = tuple(weight.shape), weight.untyped_storage().nbytes()
    with engine.gathered(model.head):
        inside = weight.sum().item(), weight.untyped_storage().nbytes()
    return outside, inside, weight.untyped_storage().nbytes()


(shape, before), (total, inside), after = on(2).run(inside_and_outside)[0]
print(f"shape {shape}, inside gathered(): sum {total:.4f}, its unit's buffer has {inside:,} bytes")
print("bytes before and after it")
print(before, after)

# %% [markdown]
# `gathered(*modules)` is a call of all ranks, since it is an all-gather. It is what you need for a look at a weight; `engine.state_dict()` is for files.
#
# You will meet the refusal in training too, since a unit is gathered when its module is *called*. Two lines that work in every engine so far, and the cure for the first:


# %%
def outside_its_unit(rank, how):
    model = GPT.preset("nano")
    engine = mz.Zero3(model, sgd(model))
    x, y = next(data.batches("train", 4, 16, 1, rank=rank, world_size=2))
    if how == "a penalty on a weight":
        return engine(x, y) + 0.01 * model.blocks[0].mlp[0].weight.square().sum()
    if how == "a part of a unit called by itself":
        return model.blocks[0].attention(torch.randn(4, 16, 64))  # past the block's own forward
    with engine.gathered(model.blocks[0]):
        return engine(x, y) + 0.01 * model.blocks[0].mlp[0].weight.square().sum()


for how in ("a penalty on a weight", "a part of a unit called by itself", "the penalty inside gathered()"):
    try:
        print(f"{how}: a loss of {on(2).run(outside_its_unit, how)[0]:.2f}")
    except mz.RankError as error:
        print(f"{how}: {error.message.partition(':')[0]}")

# %% [markdown]
# DeepSpeed and FSDP have the same rule. (Outside its unit a weight is an empty tensor in DeepSpeed, and this rank's shard in FSDP2.) And the cure is the same everywhere: read the weight in its unit's forward, or gather it. (Its backward may come after the `with`: then the weight is gathered again.) The second line wants `attention` to be a unit of its own, `units=…`.
#
# And autograd's own views? By hand we shrank the storage under them. The package goes one step further: **autograd never gets a view.** While a unit runs forward, the engine's `pack` hands over a note instead (which shard, which place in it), and `unpack` looks there when backward asks:
#
# (Three words for reading it. A `UnitShard` is one flat buffer together with this rank's slice of it: `slice_S` is always there, `full_P` only while the unit is gathered; it is *resident* then. A `Call` is one run of a unit's module. `_task()` is −1 outside of a backward.)

# %%
def excerpt(function, first, last=None):
    """A function's source from one line to another."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    start, stop = (next((i for i, line in enumerate(lines) if mark and mark in line), None) for mark in (first, last))
    return textwrap.dedent("\n".join(lines[start:stop]))


print(excerpt(units.Watch.saving, "def pack", "def unpack"))
print(excerpt(units._Note.read, "if not self.shard.arrived"))

# %% [markdown]
# `_gathered` knows the buffers that are gathered at this moment. What lies in one of them becomes a `_Note`, everything else (activations) is saved as ever, with its version number, so that autograd's check against changes in place is not lost. `read` is the other end: `watch._enter` gathers the unit if it is not there yet, and `as_strided`
# is the transposed view, made anew. So to free is to drop the buffer, and no more. A view that somebody has kept all the same keeps the old buffer alive; then the next gather reuses that buffer, so nobody ever points to memory that is gone. You have seen it work: in the middle of the comb of question 1, when forward is over and autograd waits for its backward, the curve is down at 25 %.
#
# Every unit comes and goes, then. In which order?

# %% [markdown]
# ## 5. Three blocks and a root: how many messages does one step take?
#
# There are four moments, and what the engine does at each fits on a page:

# %%
moments = ("_enter_forward", "_leave_forward", "_enter_backward", "_leave_backward")
for name in (*moments, "_gather", "_arrive", "_reduce_ready", "_reduce"):
    print(inspect.getsource(getattr(mz.Zero3, name)))

# %% [markdown]
# `Watch`, in `parts/units.py`, calls the first four. `_launch` is ZeRO-2's: a unit's gradients are one bucket, and one reduction is under way while the next fills. We let an engine write down what it does, and add a note where a unit's modules run and where its gradients appear.


# %%
class Score(mz.Zero3):
    """Writes down what happens, in its order."""

    def _gather(self, unit):
        if not unit.resident:
            self.notes.append(("gather", unit.name))
        return super()._gather(unit)

    def _leave_forward(self, unit):
        super()._leave_forward(unit)
        self.notes.append(("free", unit.name))

    def _leave_backward(self, unit):
        super()._leave_backward(unit)
        self.notes.append(("free", unit.name))

    def _launch(self, bucket):
        self.notes.append(("reduce", bucket.name))
        super()._launch(bucket)


def play(rank, world_size):
    model = GPT.preset("nano", layers=3)
    engine = Score(model, sgd(model))
    notes = engine.notes = []
    for unit in engine.units:
        for part in unit.module.modules():
            if set(unit.params).intersection(part.parameters(recurse=False)):
                part.register_forward_pre_hook(lambda *_, name=unit.name: notes.append(("forward", name)))
        for param in unit.params:
            param.register_hook(lambda _, name=unit.name: notes.append(("backward", name)))
    x, y = next(data.batches("train", 16, 64, 1, rank=rank, world_size=world_size))
    engine.backward(engine(x, y))
    engine.step()
    return [note for note, _ in itertools.groupby(notes)]


# %% [markdown]
# **Predict.** Four units: three blocks and the root that encloses them. How many gathers and reductions are there in one step? Most people say 8, one of each for every unit. (The small message in which the ranks agree on the step is not counted.)

# %%
scores = on(2).run(play, 2)
words = [f"{what} {unit.removeprefix('blocks.')}" for what, unit in scores[0]]
half = words.index("free root") + 1
print("forward:  ", " · ".join(words[:half]))
print("backward: ", " · ".join(words[half:]))
print("the same order on every rank:", all(score == scores[0] for score in scores))
print("gathers and reductions")
print(sum(what in ("gather", "reduce") for what, _ in scores[0]))

# %% tags=["nbval-ignore-output"]
plots.score(scores[0], "One step of ZeRO-3 as sheet music: three blocks and the root, the same on every rank")

# %% [markdown]
# Twelve: every unit is gathered twice and reduced once. Read it like music. A note is a thing that happens, the blue bar below it is the time for which the weights are there. The root sounds through, because embeddings begin the forward and the head ends it; in backward the head comes first and the embeddings last, so its gradients are complete only when all others are, too. Between forward and backward it is freed and gathered again at once; FSDP2 keeps its root there, and saves that message.
# The blocks take turns: never two of them at once.
# In backward the reduction of a block stands *behind* the next block's gather, although its gradients were complete before. Both use the same wire, and this rank has to wait for the weights; nobody waits for the mean until the next reduction leaves. So the weights go first. (Block 0 is found out a note late. The engine hears of backward only where it has a hook: at a unit's output, or when a saved weight is asked for. The embeddings' backward has neither, so it is the end that tells.)
#
# No block *knows* when its backward begins and ends, by the way. It begins when a gradient of one of its outputs is ready, or when `unpack` asks for one of its weights. And it is over when autograd has come to operations that were recorded *before* the block's forward began: they are numbered, and backward goes through them from the
# highest number to the lowest. (By hand we took module hooks. For a first layer, whose input wants no gradient, they fire too early, and they do not see tensors inside a list.)
#
# **The same order on every rank** is no observation, it is a condition. An all-gather carries no name. Three equal layers, and rank 1 runs the second before the first:


# %%
class Stack(nn.Module):
    """Three equal layers, run in the order that it is told."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, order):
        for i in order:
            x = x + self.blocks[i](x).tanh()
        return x.square().mean()


def each_its_own_order(rank, step, orders):
    model = Stack()
    engine = step(model, sgd(model))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    loss = engine(x, orders[rank])
    if rank == 0:
        print(f"{step.__name__}, orders {orders[0]} and {orders[1]}: loss {loss:.4f}")
    engine.backward(loss)
    engine.step()


# %% [markdown]
# **Predict.** With these two orders, what does rank 0 see in forward: an error, a hang, or a loss? And if rank 1 leaves one layer out?

# %%
two_orders, one_left_out = [(0, 1, 2), (1, 0, 2)], [(0, 1, 2), (0, 2)]
on(2).run(each_its_own_order, mz.Zero2, two_orders)
for orders in (two_orders, one_left_out):
    try:
        on(2).run(each_its_own_order, mz.Zero3, orders)
    except mz.RankError as error:
        print(f"{type(error).__name__}: {error.message.partition('. ')[0]}")

# %% [markdown]
# A *loss*, of usual size, and a wrong one: 1.6456 where ZeRO-2 has 1.6415. Rank 0 has computed layer 0 with a mixture of two layers' halves. Sizes match, so no collective complains. That is why the engine keeps a list of what it gathered and reduced, and a fingerprint of it travels in the step's one small message: **`step()` refuses on every rank, before a weight has moved.**
#
# With a layer left out forward ends with a loss too, 1.8628: rank 0's second gather was rank 1's third layer, so its layer 1 is half of the one and half of the other. But now the counts differ: sooner or later one rank gathers where the other reduces, and both wait for ever. Our ranks then lay their journals side by side, and name the first place
# where they part. (`#5` is the fifth collective of this run. The first three are sent when the model is wrapped, `#4` gathers block 0.) Elsewhere it is a hang.
#
# Layers that depend on the data (layer drop, early exit, experts) are how people get there. Every rank has to call every unit, and each unit has to return something that it has computed, so that backward comes to it on every rank. What depends on the data happens inside the unit, between its call and its return. Where that cannot be, ZeRO-2 is the better choice.

# %% [markdown]
# ## 6. They say 16Ψ/N: how much more is it at the worst moment?
#
# At rest ZeRO-3 shards all 16 bytes. As before, we read the meter at the end of a backward, on four ranks.

# %%
for stage, step in enumerate((mz.Zero1, mz.Zero2, mz.Zero3), start=1):
    by_kind, pieces = on(4).run(held, 4, step)[0]
    beyond = sum(by_kind.values()) - sum(mz.theory.memory(stage, psi, 4).values())
    print(f"ZeRO-{stage}: {sum(by_kind.values()) / psi:.1f} bytes a parameter; beyond theory {beyond} bytes, for {pieces} pieces")

# %% [markdown]
# 16Ψ/N is four bytes on four ranks, and it holds to the byte, but for Adam's step count, 4 bytes for each piece (no unit of this model needs padding on 4 ranks). For the paper's 7.5 billion on 64 ranks: 31.4 GB, 16.6 GB, **1.9 GB**.
#
# But nobody computes at rest. Interview notes say: *per-GPU memory of ZeRO-3 = (weights + gradients + optimizer)/N + temporary buffers*. How large are those? We look at the moment of the peak, beside ZeRO-2's with buckets of 0.25 MiB (lesson 03), on 2 ranks and on 4, and with more blocks. One row of 16 characters a rank, so that activations do not cover everything else.
#
# **Predict.** How many bytes of weights beyond the rank's own slices, on 2 ranks and on 4? Most people say one block's.


# %%
def at_the_peak(rank, world_size, step, layers):
    """Bytes by kind at the end of a second backward, and at its peak."""
    model = GPT.preset("tiny", layers=layers)
    engine = step(model, adamw(model), precision="bf16", bucket_mb=0.25)
    (x0, y0), (x1, y1) = data.batches("train", world_size, 16, 2, rank=rank, world_size=world_size)
    engine.backward(engine(x0, y0))
    engine.step()
    with mz.record_memory() as memory:
        engine.backward(engine(x1, y1))
        rest = memory.now
    return [{kind: count for kind, count in by_kind.items() if kind != "other"} for by_kind in (rest, memory.peak)]


block = 2 * sum(param.numel() for param in GPT.preset("tiny").blocks[0].parameters())  # bytes in 16 bits
root = 2 * psi - 4 * block
found, beyond = {}, []
print("MB                 ZeRO-2: at rest   at its peak   ZeRO-3: at rest   at its peak")
for layers, n in ((4, 2), (4, 4), (12, 4)):
    (rest2, peak2), (rest3, peak3) = (on(n).run(at_the_peak, n, step, layers)[0] for step in (mz.Zero2, mz.Zero3))
    found[layers, n] = {
        "ZeRO-2, at rest": rest2,
        "ZeRO-2, at its peak": peak2,
        "ZeRO-3, at rest": rest3,
        "ZeRO-3, at its peak": peak3,
    }
    beyond.append(peak3["params"] - rest3["params"])
    totals = (f"{sum(by_kind.values()) / 1e6:4.1f}" for by_kind in found[layers, n].values())
    print(f"{layers:>2} blocks, N = {n}               ", "          ".join(totals))
peak = found[4, 4]["ZeRO-3, at its peak"]
print(f"the root has {root:,} bytes of weights, each block {block:,}, root and block {root + block:,}")
print(f"4 blocks, N = 4: gradients of the root and of {(peak['grads'] - root) / block:.2f} blocks, a receive buffer of {peak['comm'] / block:.2f}")
print("bytes of ZeRO-3's weights beyond its slices, at its peak, in each line")
print(*(f"{extra:,}" for extra in beyond))

# %% tags=["nbval-ignore-output"]
plots.memory_bars(found[4, 4], "One of 4 ranks, 4 blocks (0.8 M parameters), AdamW in bf16, one row of 16 characters")

# %% [markdown]
# The root *and* the largest unit, to the byte, on any number of ranks: while a block runs, the root that encloses it is there as well. The whole list, at the peak on 4 ranks: weights of root and one block; gradients of the root, and besides those 3.08 blocks' (the block in backward, the one whose reduction is under way, three shards of a quarter each, and one matrix, a third of a block, which autograd has made and the engine has not yet moved); a receive buffer as large as a block's gradients; and activations.
# Then backward ends, and 4.0 bytes are left.
#
# And ZeRO-2's peak is hardly higher, 5.3 MB against 5.1; on 2 ranks it is the lower one. Most of what ZeRO-3 saves at rest it spends at the peak: it handles whole blocks, each of them a quarter of this model, and ZeRO-2 smaller buckets. With 12 blocks it spends the same 1.8 MB, and at rest it saves 3.6: in a real model units and buckets are small beside the whole, and the saving stays.
#
# **The claim, settled: true**, and now you can say what a "temporary buffer" is. It does not shrink with N, as what is held at rest does. It shrinks with smaller units: a model in one unit would be gathered whole. (Each unit that is gathered ahead adds one more: lesson 05.)
#
# At the size for which all this was made? *175 B on 64 GPUs: 2.8 TB becomes 44 GB a GPU*, the notes say. We can run that. A **fake process group** has 64 ranks of which 63 do not exist: its collectives return at once. On the `meta` device a tensor has a shape and no memory, and
# the meter counts the bytes that it would have. The engine notices neither.
#
# **Predict.** GPT-3's 96 blocks on 64 ranks, with a batch of 8 tokens: how many GB above the 44 is the peak?


# %%
@contextmanager
def pretend(world_size):
    """This process is rank 0 of a group whose other ranks do not exist."""
    gc.collect()  # what an earlier run has left behind would be on the meter
    comm.join("fake", 0, world_size, FakeStore(), torch.device("cpu"))
    try:
        yield
    finally:
        comm.leave()


def gpt3_on(world_size):
    """Its parameters, what rank 0 holds at rest and at the peak, and the bytes of the root and of a block."""
    with pretend(world_size):
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=50304, context=2048, layers=96, heads=96, width=12288))
            x = torch.zeros(1, 8, dtype=torch.long)
        numel = sum(param.numel() for param in model.parameters())
        engine = mz.Zero3(model, adamw(model), precision="bf16")
        engine.backward(engine(x, x))
        engine.step()
        with mz.record_memory() as memory:
            engine.backward(engine(x, x))
            rest = memory.now
        sizes = [2 * sum(param.numel() for param in unit.params) for unit in engine.units[:2]]
    return numel, rest, memory.peak, sizes


numel, rest, peak, (root, block) = gpt3_on(64)
print(f"{numel / 1e9:.1f} billion parameters: {16 * numel / 1e12:.1f} TB of model states; root {root / 1e9:.1f} GB, a block {block / 1e9:.1f} GB")
for kind in ("params", "grads", "optimizer"):
    print(f"{plots.NAMES.get(kind, kind):<10} {rest[kind] / 1e9:4.1f} GB at rest, {peak[kind] / 1e9:4.1f} at the peak")
print("GB at rest, and at the peak")
print(f"{sum(rest.values()) / 1e9:.1f} {sum(peak.values()) / 1e9:.1f}")

# %% [markdown]
# 43.8 at rest, 17 more at the peak, and not one activation worth the name. **The claim, settled: true for model states only.** Root and one block, twice: weights and gradients; another block's gradients on the way; and the gradient of one matrix, which autograd has made and the engine has not yet moved. (Two things that this run hides: nobody sends, so there is no receive buffer, on CPU ranks one block more; and
# our engine wants the whole model once, when it wraps it. On `meta` that costs nothing. Production engines build large models shard by shard.)
#
# So much for what is held. What is sent?

# %% [markdown]
# ## 7. From 2 ranks to 64: by what factor does a rank send less?
#
# The memory of a rank falls as 1/N. About the traffic, interview notes offer a choice: *ZeRO-3 sends twice what ZeRO-2 sends*; *it sends less than ZeRO-2, or 92 % less than an all-reduce*; *its communication is O(Ψ/N)*.
#
# **Predict.** From 2 ranks to 64, by what factor does a rank send less?


# %%
def sent(rank, world_size, step, micro_steps=1):
    """Elements that this rank sends in one step, and the padded parameters P."""
    model = GPT.preset("tiny")
    engine = step(model, sgd(model))
    with mz.record_traffic() as traffic:
        for x, y in data.batches("train", world_size, 16, micro_steps, rank=rank, world_size=world_size):
            engine.backward(engine(x, y) / micro_steps)
        engine.step()
    elements = sum(op.bytes / 4 for op in traffic.ops if op.unit != "control")  # fp32: 4 bytes an element
    return elements, sum(bucket.layout.P for bucket in engine.buckets)


def measure(n, function, *args):
    """What rank 0 of n finds. Of 3 and of 64 the other ranks do not exist."""
    if n in (2, 4):
        return on(n).run(function, n, *args)[0]
    with pretend(n):
        return function(0, n, *args)


totals = {}
print("         ZeRO-2    ZeRO-3   2P and 3P(N−1)/N   ZeRO-3 holds")
for n in (2, 3, 4, 64):
    (zero2, P2), (zero3, P3) = (measure(n, sent, step) for step in (mz.Zero2, mz.Zero3))
    exact = zero2 * n == 2 * P2 * (n - 1) and zero3 * n == 3 * P3 * (n - 1)
    totals[n] = zero3 / psi
    bytes_held = sum(measure(n, held, mz.Zero3)[0].values()) / psi
    print(f"N = {n:<3}  {zero2 / psi:.2f}Ψ     {totals[n]:.2f}Ψ    {exact}               {bytes_held:.2f} bytes a parameter")
print(f"ZeRO-3 over ZeRO-2 on 64 ranks: {zero3 / zero2:.2f}")
print("ZeRO-3 on 64 ranks, over ZeRO-3 on 2")
print(f"{totals[64] / totals[2]:.2f}")

# %% [markdown]
# By none: it sends nearly *twice as much*. A gather brings each rank the (N−1)/N of the weights that it does not hold, and somebody has to send them. The more ranks there are, the less each holds itself. Two gathers and one reduce-scatter in each step, P(N−1)/N each (P is the padded Ψ), make the paper's **3Ψ** (section 7.2.2). (On 3 and on 64 ranks units need padding: 5.34 bytes and not 5.33, 2.96Ψ and not 2.95Ψ.)
#
# $$\text{elements sent by a rank} \;=\; 3\,\Psi\,\frac{N-1}{N}$$
#
# where $\Psi$ counts parameters and $N$ ranks. The limit is 3Ψ, and it is nearly reached at 64. **The claim, settled: false.** *Memory* is O(Ψ/N), traffic is O(Ψ). **The claims of less: false**, it sends 1.5 times what ZeRO-2 and an all-reduce send. And **twice: false**, 1.5 times.
#
# Why only one gather more? ZeRO-2 gathers too: the updated weights, after the step. ZeRO-3 has no such gather, the next forward does it.
#
# **Predict.** That was one backward a step. With accumulation over G = 4 micro-batches, how many times as much as ZeRO-2?

# %%
ratios = []
for micro_steps in (1, 2, 4):
    (zero2, P), (zero3, _) = (on(2).run(sent, 2, step, micro_steps)[0] for step in (mz.Zero2, mz.Zero3))
    ratios.append(zero3 / zero2)
    print(f"G = {micro_steps}: ZeRO-2 {2 * zero2 / P:.0f}Ψ(N−1)/N, ZeRO-3 {2 * zero3 / P:.0f}Ψ(N−1)/N")
print("times as much, for G = 1, 2 and 4")
print(*(f"{ratio:.1f}" for ratio in ratios))

# %% [markdown]
# 2.4 times, 3GΨ over (G + 1)Ψ. Every micro-step gathers everything twice; ZeRO-2's weights stay. With G it goes to 3. So the sentence "ZeRO-3 costs 50 % more" has a condition in it: one backward a step.
#
# Weights that travel to where they are needed, whole. Is that model parallelism?

# %% [markdown]
# ## 8. Half of every weight is rank 0's: how many layers does it compute?
#
# Interview notes say that *ZeRO-3 is a form of model parallelism*. In model parallelism ranks share the *work* on one batch: each computes some layers (pipeline), or a part of each layer (tensor parallelism). So we look at the work.
#
# **Predict.** Two ranks, four blocks; each rank owns half of each. Of how many blocks does rank 0 compute the whole output?


# %%
def computed(rank, world_size, step, precision=None):
    """A step's input rows, each block's output, the dtypes that were seen where, and the operations."""
    model = GPT.preset("nano", layers=4)
    optimizer = sgd(model)
    engine = step(model, optimizer, precision=precision)
    outputs, dtypes = [], {"weights and output in forward": set()}

    def look(block, args, output):
        outputs.append(output.detach())
        dtypes["weights and output in forward"] |= {output.dtype, *(param.dtype for param in block.parameters())}

    for block in model.blocks:
        block.register_forward_hook(look)
    x, y = next(data.batches("train", 16, 64, 1, rank=rank, world_size=world_size))
    with FlopCounterMode(display=False) as counter, mz.record_traffic() as traffic:
        engine.backward(engine(x, y))
    dtypes["gathered and reduced"] = {getattr(torch, op.dtype) for op in traffic.ops}
    dtypes["the optimizer's pieces"] = {piece.dtype for group in optimizer.param_groups for piece in group["params"]}
    return x, outputs, dtypes, counter.get_total_flops()


def alone(rows):
    """Each block's output in one process that holds the whole model."""
    torch.manual_seed(0)  # the ranks' seed
    model = GPT.preset("nano", layers=4)
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, output: outputs.append(output))
    model(rows)
    return outputs


(x0, first, _, flops), (x1, second, _, _) = on(2).run(computed, 2, mz.Zero3)
_, _, _, ddp_flops = on(2).run(computed, 2, mz.DDP)[0]
print("a block's output on each rank, rows × tokens × width:", *first[0].shape)
print("blocks whose outputs agree on the two ranks:", sum(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
print(f"operations of a rank, over DDP's: {flops / ddp_flops:.2f}")
print("blocks whose output is one process's on the same rows, on rank 0 and on rank 1")
print(*(sum(torch.equal(a, b) for a, b in zip(got, alone(rows), strict=True)) for rows, got in ((x0, first), (x1, second))))

# %% [markdown]
# Four of four, each output in its full width, to the last bit what a process gets that holds everything. And the ranks agree in none, since each has rows of its own. A rank does as many operations as in DDP, all layers on half of the rows. (Half of the layers on all rows would be as many: counting operations proves nothing, the outputs do.) **The claim, settled: false.** ZeRO-3 is *data parallelism*: every rank computes
# every layer on its own rows. Only storage is sharded. What travels are weights and gradients; in model parallelism it is activations.
#
# One more rumour: *gathered fp16 weights are turned into fp32 for compute*. Where is which dtype?

# %%
_, _, dtypes, _ = on(2).run(computed, 2, mz.Zero3, "bf16")[0]
for where, seen in dtypes.items():
    print(f"{where}:", *seen)

# %% [markdown]
# **The claim, settled: false.** Compute runs in 16 bits, and so does the wire. fp32 is in one place, the optimizer's master shard, and after the step it is rounded to 16 bits into the slice from which the next forward gathers. The other way round would cost twice the traffic.
#
# Then it must be the same training.

# %% [markdown]
# ## 9. Four engines, four runs each: how many weights differ?
#
# Ten steps with SGD, which hides nothing, and with AdamW, also on 4 ranks, and in bf16.
#
# **Predict.** You know this one.


# %%
def differing(world_size, optimizer, **settings):
    """Weights that differ from DDP's after ten steps, over all engines and ranks."""
    runs = [
        on(world_size).run(functools.partial(train, **settings), world_size, step, 10, optimizer)
        for step in (mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3)
    ]
    expected = runs[0][0][1]
    return sum((weights != expected).sum().item() for results in runs for _, weights in results)


counts = {
    "SGD, 2 ranks": differing(2, sgd),
    "AdamW, 2 ranks": differing(2, adamw),
    "AdamW, 4 ranks": differing(4, adamw),
    "AdamW, 2 ranks, bf16": differing(2, adamw, precision="bf16"),
}
for run, count in counts.items():
    print(f"{run}, same parameters as before: {count == 0}")
print("weights that differ, of", f"{ddp_weights.numel():,}")
print(sum(counts.values()))

# %% [markdown]
# DDP, ZeRO-1, 2 and 3, bit for bit, on every rank. (The state dict is gathered from the masters, so this compares what was trained and not what was rounded.)
#
# **What is still wasteful?** Look at a forward once more: gather 0, forward 0, gather 1, forward 1. Nothing computes while a gather is under way, and nothing travels while a block computes. We lay the gathers of a forward beside its blocks.


# %%
def waiting(rank, steps=6):
    """How many pairs of a gather and a block's forward overlap in a step, and the share of forward spent in gathers."""
    model = GPT.preset("tiny")
    engine = mz.Zero3(model, sgd(model))
    forwards, shares, overlaps = [], [], 0
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: forwards.append([time.perf_counter()]))
        block.register_forward_hook(lambda *_: forwards[-1].append(time.perf_counter()))
    for x, y in data.batches("train", 16, 128, steps, rank=rank, world_size=2):
        forwards.clear()
        with mz.record_traffic() as traffic:
            begin = time.perf_counter()
            loss = engine(x, y)
            end = time.perf_counter()
        gathers = [op for op in traffic.ops if op.op == "all_gather"]
        overlaps += sum(op.start < stop and op.end > start for op in gathers for start, stop in forwards)
        shares.append(sum(op.end - op.start for op in gathers) / (end - begin))
        engine.backward(loss)
        engine.step()
    return overlaps, min(shares)


results = on(2).run(waiting)
print("gathers that were under way while a block ran forward, of", 6 * 5)
print(results[0][0])

# %% tags=["nbval-ignore-output"]
print(f"share of a forward in which rank 0 waits for weights, at least: {results[0][1]:.0%}")

# %% [markdown]
# Not one overlaps. Every unit waits for its gather, for the share of forward printed above (how large it is, is this computer's affair). But the order is known: it is the same in every step, and on every rank. While block 0 computes, block 1's weights could be on their way. That costs one more unit of memory and not one byte of traffic. It is called
# *prefetch*, and it is lesson 05.
#
# ## What has changed
#
# The module on one page first, then the difference between `minizero/zero2.py` and `minizero/zero3.py`, made from the two files.

# %%
print(inspect.getdoc(inspect.getmodule(mz.Zero3)))

# %% [markdown]
# How to read it. `-` was ZeRO-2's, `+` is ZeRO-3's, the others both have.
#
# 1. **`__init__`**: buckets become units. A unit has a `UnitShard` for its weights (slice always, whole from gather to free) and ZeRO-2's `TransientBucket` for its gradients. `Watch` is what calls the four moments, `Order` the list with the fingerprint.
# 2. **Four moments** come, `_enter_forward` to `_leave_backward`, and with them **`_gather`**. They are questions 4 and 5.
# 3. **`_gradient_ready` does nothing** any more, and `_next` and `_launched` go: a reduction leaves when its unit's backward is over, not when a bucket is full.
# 4. **`_update` gathers nothing.** Its last lines are for a step that is made inside `gathered()`.
# 5. **`gathered`**, which had nothing to do so far, gathers.

# %%
changes(mz.Zero2, mz.Zero3)

# %% [markdown]
# ## Interview corner
#
# ### "What kind of parallelism is ZeRO-3?"

# %%
print("7.5 B parameters on 64 GPUs, GB of model states on each: DDP, ZeRO-1, ZeRO-2, ZeRO-3")
print(*(f"{sum(mz.theory.memory(stage, 7.5e9, 64).values()) / 1e9:.1f}" for stage in range(4)))

# %% [markdown]
# **What they want to find out.** Whether you can tell where bytes are *kept* from where work is *done*.
#
# **The full answer.** Data parallelism. Each rank has its own rows, and computes every layer on them in full; the result is DDP's, bit for bit if sums are made in one order. What ZeRO-3 shards is storage: weights, gradients and optimizer, 16Ψ/N bytes. Before a layer works its weights are all-gathered, afterwards they are freed, and
# its gradients are reduce-scattered. In model parallelism the work is divided, and activations travel: between stages in pipeline parallelism, inside each layer in tensor parallelism. There a rank never sees the whole weight; here it does, for as long as the layer works. So the two solve different problems: ZeRO-3 makes states small, and does
# nothing about activations or about a layer that is too large by itself; and they combine.
#
# **In 30 seconds.** Data parallel with sharded storage. Own rows, every layer, whole weights while they are needed. Weights and gradients travel, activations do not.
#
# **Follow-ups**
# - *175 B on 64 GPUs: what does each hold?* 16 · 175/64 = 43.75 GB of model states. On top of it the root and a block, gathered, with their gradients, and activations: 61 GB with a batch of 8 tokens.
# - *Which buffer does not shrink with N?* The gathered units and their gradients: weights of the root and of the largest unit; gradients of the root and of two units.
# - *How do you prove that it is data parallelism?* Compare each layer's output on a rank with one process's on the same rows: equal, in full width, for every layer. (Counting operations does not do: half the layers on all rows are as many.)
#
# **Wrong answers people give**
# - *"Model parallelism: the model is split over the ranks."* Its storage is. Every rank computed 4 of 4 blocks (question 8).
# - *"It needs 16Ψ/N and nothing else."* At rest. While it works, the root and the largest unit are there in full (question 6).
# - *"44 GB, so a 48 GB card will do."* Those are model states only (question 6).
# - *"The weights are turned into fp32 for compute."* Compute and wire are bf16; fp32 is the optimizer's shard (question 8).
#
# **Your own project.** "I hooked every block on two CPU ranks: the outputs had full width, were equal to one process's on the same rows, and had nothing in common between the ranks."
#
# ### "Quantify ZeRO-3's communication: 7 B parameters, 16 GPUs, 25 GB/s."

# %%
bandwidth, speed = 25e9, 400e12  # bytes/s that a GPU sends, operations/s that it computes
gigabytes = {stage: mz.theory.traffic(stage, 7e9, 16) * 2 / 1e9 for stage in (2, 3)}
seconds = gigabytes[3] * 1e9 / bandwidth
print("GB sent by each GPU in one step, in 16 bits: ZeRO-2 and ZeRO-3")
print(*(f"{each:.2f}" for each in gigabytes.values()))
print("seconds of it at 25 GB/s, ZeRO-3")
print(f"{seconds:.2f}")
print("tokens of a micro-batch that take as long to compute, 6Ψ operations each, at 400 TFLOP/s")
print(f"{seconds * speed / (6 * 7e9):,.0f}")

# %% [markdown]
# **What they want to find out.** Whether you can derive 3Ψ, and know what it must be compared with.
#
# **The full answer.** Per micro-step two all-gathers of the weights (forward, backward) and one reduce-scatter of the gradients, each Ψ(N−1)/N elements: 3Ψ(N−1)/N, in 16 bits 39.4 GB, where ZeRO-2 and DDP send 26.3. At 25 GB/s that is 1.6 s. Compute has to be longer if it is to hide it: 6Ψ operations a token, so at 400 TFLOP/s a micro-batch of 15,000 tokens
# a GPU takes as long. Ψ drops out of this: 6Ψ bytes over the bandwidth against 6ΨT operations over the speed, so T is speed over bandwidth, times (N−1)/N. Below that, ZeRO-3 waits, however well it overlaps. More GPUs do not help: a rank sends 1.5Ψ on two, 2.95Ψ on 64 (2.96 with padding, question 7), and never more than 3Ψ.
#
# **In 30 seconds.** 3Ψ(N−1)/N elements, 1.5 times ZeRO-2's. 39 GB, 1.6 s at 25 GB/s. It hides behind compute if a GPU's micro-batch has more tokens than its speed divided by its bandwidth.
#
# **Follow-ups**
# - *With 4 micro-batches?* 12Ψ against ZeRO-2's 5Ψ, 2.4 times. 157.5 GB, 6.3 s.
# - *How could one send less?* Keep weights between forward and backward: 2Ψ, for 2Ψ bytes more. That is `reshard_after_forward=False` in FSDP2, which is its default for the root. Or gather within a node only, or in 8 bits (ZeRO++).
# - *What else is there besides bandwidth?* Latency: three messages for each unit and micro-step, two gathers, each waited for, and a reduction behind them. That speaks for larger units, and memory speaks against.
#
# **Wrong answers people give**
# - *"Twice ZeRO-2."* 1.5 times with one backward a step; 2.0 and 2.4 with two and four (question 7).
# - *"Less than ZeRO-2, since every GPU only handles its part."* It sends its part to all others, and gets theirs (question 7).
# - *"O(Ψ/N), so it gets better with more GPUs."* 1.97 times as much from 2 to 64. Memory is what falls (question 7).
#
# **Your own project.** "I counted elements on 2 and 4 ranks, and on fake groups of 3 and 64: exactly 3P(N−1)/N in all of them."
#
# ### "What can deadlock in ZeRO-3 that could not in DDP, and how do you find it?"
#
# **What they want to find out.** Whether you have debugged a hang, and know that the hang is the better case.
#
# **The full answer.** In DDP forward has no collectives; in ZeRO-3 each layer's forward has one. So whatever makes ranks run other layers, or the same ones in another order, breaks it: layer drop with each rank's own random numbers, early exit, experts, one rank with a batch more, an evaluation or a `state_dict()` on rank 0 only, an exception that one rank swallows. If counts differ, it
# hangs. If only the order differs and the sizes are equal, it does not: ranks compute with mixtures of each other's layers, and the loss looks like a loss. To find it, write down on each rank which unit was gathered, and compare; the first place where two lists differ is the line. PyTorch's flight recorder does that for collectives; our engine hashes the list into the message of the step.
#
# **In 30 seconds.** Forward has collectives now, so all ranks must run the same units in the same order. Unequal counts hang, unequal order is silent. Log the units, compare the lists.
#
# **Follow-ups**
# - *Three layers, rank 1 swaps the first two. What did you see?* A loss of 1.6456 in place of 1.6415 (question 5).
# - *Only rank 0 wants to save the model.* All ranks have to call: saving gathers.
# - *A model with experts?* Make all experts of a layer one unit, or gather them on all ranks, used or not; an expert without tokens gives zeros.
#
# **Wrong answers people give**
# - *"If one rank fails, the job ends."* Only if its process ends, and somebody ends the others, as torchrun does. An exception that one rank catches (out of memory, skip the batch) is a hang on all others.
# - *"The library checks that all ranks call the same."* Equal sizes are enough for it (question 5). `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares operations and shapes, and those *were* equal.
# - *"Set a longer timeout."* A longer wait for the same end. Which rank is in which call?
#
# **Your own project.** "I gave two ranks two orders. Backward went through, and the step refused, because a hash of the order travels with it."
#
# ## Now you
#
# `minizero start 04`, in a terminal, puts the exercises into `work/04_zero3.ipynb`. You build this step from plain `torch` and `torch.distributed`: a unit in shards, memory that comes and goes, hooks at the right moments, a backward that gathers again, a weight that two units share. Some numbers and one bug come on top.
