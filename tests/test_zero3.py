"""What is ZeRO-3's own: weights that are there only while their unit works, and errors where somebody else wants them."""

import contextlib
import copy
import functools
import gc
import io
import re
from collections import Counter

import pytest
import torch
from models import Awkward, Experts, build, distance, loss_of, mlp, refusal, rows, same, share
from test_order import with_an_adversary
from test_parts_units import CONTAINERS, Block, Leaf, Net
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import minizero as mz
from minizero.model import GPT, GPTConfig
from minizero.parts import calls, kinds

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model, lr=0.1):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def pair(make, dtype=torch.float64, **keywords):
    """The same model in an engine, and alone."""
    torch.manual_seed(0)
    model = make().to(dtype)
    alone = copy.deepcopy(model)
    return mz.Zero3(model, sgd(model), **keywords), alone, sgd(alone)


def full(engine) -> list[Tensor]:
    with engine.gathered():
        return [p.detach().clone() for p in engine.module.parameters()]


def farthest(engine, alone) -> float:
    return distance(full(engine), [p.detach() for p in alone.parameters()])


def batch(step, n=6, width=4):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def in_step(rank, world_size, make, steps=4, loss=lambda model, x: model(x).pow(2).mean(), **keywords) -> float:
    """How far an engine is from one process after some steps."""
    engine, alone, optimizer = pair(make, **keywords)
    for step in range(steps):
        x = batch(step, 6)
        engine.backward(loss(engine, share(x, rank, world_size)))
        assert engine.step()
        for r in range(world_size):
            (loss(alone, share(x, r, world_size)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert resident(engine) == []
    return farthest(engine, alone)


def resident(engine) -> list[str]:
    """Units whose weights are there in full."""
    return [unit.name for unit in engine.units if unit.resident]


def bytes_of(kind: str) -> int:
    """Of all storages of a kind, as they are."""
    gc.collect()
    storages = {x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)}
    return sum(storage.nbytes() for storage in storages if kinds.label(storage).kind == kind)


# --- weights that are not there -----------------------------------------------------------------------

USES = {
    "sum": lambda w: w.sum(),
    "clone": lambda w: w.clone(),
    "copy_": lambda w: w.copy_(torch.zeros(4, 4)),
    "numpy": lambda w: w.detach().numpy(),
    "item": lambda w: w[0, 0].item(),
    "linear": lambda w: nn.functional.linear(torch.zeros(2, 4), w),
    "as the second argument": lambda w: torch.zeros(4, 4) + w,
    "in a list": lambda w: torch.cat([torch.zeros(4, 4), w]),
    "data": lambda w: w.data,
    "data =": lambda w: setattr(w, "data", torch.zeros(4, 4)),
    "an initialiser": nn.init.zeros_,
    "norm": lambda w: torch.nn.utils.get_total_norm([w]),
    "tolist": lambda w: w.tolist(),
    "data_ptr": lambda w: w.data_ptr(),
    "deepcopy": copy.deepcopy,
    "save": lambda w: torch.save(w, io.BytesIO()),
    "equal": lambda w: torch.equal(w, w),
    "module.state_dict": None,
}


def using_freed_weights(rank):
    engine, _, _ = pair(lambda: Net(1), torch.float32)
    weight = engine.module.blocks[0].linear.weight
    errors = {name: refusal(use, weight) if use else refusal(engine.module.state_dict) for name, use in USES.items()}
    errors["float()"] = refusal(engine.module.double)
    facts = weight.shape, weight.numel(), weight.dtype, weight.requires_grad, weight.is_leaf, isinstance(weight, nn.Parameter), repr(weight)
    return errors, facts, weight.untyped_storage().nbytes(), sum(p.numel() for p in engine.parameters()), len(engine.module.blocks[0].linear.weight)


def test_to_use_a_freed_weight_is_an_error_that_names_it_and_gathered(ranks):
    for errors, facts, nbytes, numel, length in ranks(2).run(using_freed_weights):
        for use, error in errors.items():
            assert error is not None, use
            assert error.startswith("RuntimeError"), use
            assert re.search(r"parameter '(blocks.0.linear|embed).\w+' is freed", error), use
            assert "engine.gathered()" in error, use
        assert facts == ((4, 4), 16, torch.float32, True, True, True, "Parameter containing:\n<parameter 'blocks.0.linear.weight', [4, 4]: freed>")
        assert (nbytes, numel, length) == (0, 60, 4)


def reading(rank):
    engine, alone, _ = pair(lambda: Net(2))
    block, other = engine.module.blocks
    with engine.gathered(block):
        inside = block.linear.weight.sum().item(), refusal(other.linear.weight.sum)
        with engine.gathered():
            everything = [p.clone() for p in engine.module.parameters()]
        still = block.linear.weight.sum().item()
        kept = block.linear.weight.detach()
        copied = copy.deepcopy(block)
    after = refusal(block.linear.weight.sum)
    error = refusal(lambda: engine.gathered(block).__enter__() or 1 / 0)
    return (
        inside[0] == still == alone.blocks[0].linear.weight.sum().item(),
        inside[1], after, error, same(everything, [p.detach() for p in alone.parameters()]),
        kept.sum().item() == still and copied.linear.weight.sum().item() == still,
    )  # fmt: skip


@world_sizes
def test_gathered_shows_the_full_weights_of_what_is_asked_for_and_a_view_of_them_may_be_kept(ranks, world_size):
    for right, outside, after, _, everything, kept in ranks(world_size).run(reading):
        assert right and everything and kept
        assert "'blocks.1.linear.weight' is freed" in outside
        assert "'blocks.0.linear.weight' is freed" in after


def writing(rank, precision):
    model = Net(1)
    engine = mz.Zero3(model, torch.optim.SGD(model.parameters(), lr=1.0), precision=precision)
    with torch.no_grad(), engine.gathered(model.head):
        model.head.weight.fill_(3.0)
        model.head.bias.data.fill_(5.0)
    saved = engine.state_dict()
    with engine.gathered():
        seen = model.head.weight.mean().item(), model.head.bias.mean().item()
        engine.backward(engine(torch.ones(2, 4)).sum())
        with torch.no_grad():
            model.embed.bias.fill_(1.0)
        engine.step()
        stepped = model.head.bias.mean().item()
    with engine.gathered():
        return seen, saved["head.weight"].mean().item(), stepped, model.head.bias.mean().item(), engine.state_dict()["head.bias"].mean().item()


def each_writes_its_own(rank, how):
    engine, alone, _ = pair(lambda: Net(1), torch.float32)

    def write():
        with torch.no_grad(), engine.gathered():
            weight = engine.module.blocks[0].linear.weight
            if how == "in place":
                weight[3, 3] = rank
            elif how == "as .data":
                weight.data = torch.full((4, 4), float(rank))

    error = refusal(write)
    engine.backward(engine(batch(rank).float()).sum())
    return error, same(full(engine), [p.detach() for p in alone.parameters()]), resident(engine), engine.step()


@pytest.mark.parametrize("how", ["in place", "as .data", "not at all"])
def test_what_is_written_inside_gathered_and_differs_between_ranks_is_refused_on_all_and_nothing_of_it_stays(ranks, how):
    for error, unchanged, left, stepped in ranks(3).run(each_writes_its_own, how):
        if how == "not at all":
            assert error is None
        else:
            assert error.startswith("RuntimeError: the ranks have written different weights inside gathered(), in unit 'blocks.0'")
        assert unchanged and left == [] and stepped


@pytest.mark.parametrize("precision", [None, "bf16"])
@world_sizes
def test_what_is_written_inside_gathered_counts_and_a_step_shows_there(ranks, world_size, precision):
    for seen, saved, *stepped in ranks(world_size).run(writing, precision):
        assert seen == (3.0, 5.0) and saved == 3.0
        assert stepped == [3.0] * 3  # 5 less a gradient of 2


# --- when they are there --------------------------------------------------------------------------------


def whereabouts(rank, checkpointed):
    class Model(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=checkpointed == "reentrant") if checkpointed else block(x)
                seen.append((resident(engine), bytes_of("params")))
            if stop:
                raise ValueError("enough")
            return self.head(x)

    seen, stop = [], False
    model = Model(3).double()
    engine = mz.Zero3(model, sgd(model))
    torch.ones(1, requires_grad=True).sum().backward()  # autograd holds on to a backward that raised until the next one
    at_rest = bytes_of("params")
    found = {}

    def note(when):
        found[when] = resident(engine), bytes_of("params") - at_rest

    x = torch.ones(2, 4, dtype=torch.float64)
    loss = engine(x).sum()
    note("after forward")
    in_forward = list(seen)
    engine.backward(loss)
    note("after backward")
    engine.step()
    note("after step")
    with torch.no_grad():
        engine(x)
    note("after no_grad")
    stop = True
    assert refusal(engine, x) == "ValueError: enough"
    note("after an exception")
    stop = False
    loss = engine(x).sum()
    engine.module.head.weight.register_hook(lambda _: 1 / 0)
    assert refusal(engine.backward, loss).startswith("ZeroDivisionError")
    note("after an exception in backward")
    engine.zero_grad()
    engine.state_dict()
    note("after state_dict")
    full(engine)
    note("after gathered")
    return in_forward, at_rest, found


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
def test_no_full_unit_is_resident_outside_its_work_whatever_happens(ranks, checkpointed):
    for in_forward, at_rest, found in ranks(2).run(whereabouts, checkpointed):
        assert [units for units, _ in in_forward] == [["root"]] * 3
        assert {held - at_rest for _, held in in_forward} == {4 * 32 * 8}  # the root's four parameters, each padded to 32
        assert found == dict.fromkeys(found, ([], 0))


def held_by_autograd(rank):
    """Bytes of weights after a forward, before its backward; and what a hand-written hold of them would be."""
    engine, _, _ = pair(lambda: Net(3))
    at_rest = bytes_of("params")
    loss = engine(torch.ones(2, 4, dtype=torch.float64)).sum()
    before = bytes_of("params") - at_rest
    loss.backward()
    return before


def test_autograd_holds_no_weight_between_forward_and_backward(ranks):
    assert ranks(2).run(held_by_autograd) == [0, 0]


def peaks(rank, checkpointed, precision):
    """Above what is there at rest, in elements, the most of each kind during a step."""

    class Model(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=checkpointed == "reentrant") if checkpointed else block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Model(4)
    model.embed, model.head = nn.Linear(4, 64), nn.Linear(64, 32)
    model.blocks = nn.ModuleList(Block(64) for _ in range(4))
    engine = mz.Zero3(model, sgd(model), precision=precision)
    size = 2 if precision else 4
    sizes = {unit.name: sum(shard.layout.P for shard in unit.shards) for unit in engine.units}
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    with mz.record_memory() as m:
        engine.backward(engine(torch.ones(2, 4)).sum())
    most = {kind: int(values.max() - values[0]) / size for kind, values in m.curve()[1].items()}
    at_end = {kind: int(values[-1] - values[0]) / size for kind, values in m.curve()[1].items()}
    return most, at_end, sizes["root"], sizes["blocks.0"], engine.world_size


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_above_the_states_it_needs_root_and_one_block_and_one_reduction_in_flight(ranks, world_size, checkpointed, precision):
    for most, at_end, root, block, n in ranks(world_size).run(peaks, checkpointed, precision):
        assert most["params"] == root + block  # gathered
        largest = 64 * 64  # one gradient that autograd has computed and the bucket not yet taken over
        assert most["grads"] <= root + 2 * block + largest + (root + 4 * block) / n
        assert most["comm"] <= block + (2 * block / n if precision else 0)  # received, and summed in 32 bits
        assert at_end["params"] == at_end["comm"] == 0
        assert at_end["grads"] == (root + 4 * block) / n


class Events(list):
    """Collectives as they are issued, and blocks as they compute."""

    def issued(self, call):
        self.append((call.op, call.unit))


def in_order(rank, checkpointed, direct):
    class Computing(Block):
        def forward(self, x):
            events.append(("compute", self.name))
            return super().forward(x)

    class Model(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=checkpointed == "reentrant") if checkpointed else block(x)
            return self.head(x)

    events = Events()
    model = Model(0)
    model.blocks = nn.ModuleList(Computing() for _ in range(3))
    for name, block in model.blocks.named_children():
        block.name = name
        block.linear.weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("gradient", name)))
    engine = mz.Zero3(model, sgd(model))
    calls.listeners.append(events)
    try:
        loss = engine(torch.ones(2, 4)).sum()
        events.append("backward")
        loss.backward() if direct else engine.backward(loss)
        events.append("step")
        engine.step()
    finally:
        calls.listeners.remove(events)
    return list(events)


def gather(unit):
    return "all_gather", f"blocks.{unit}" if unit != "root" else unit


def reduce(unit):
    return "reduce_scatter", f"blocks.{unit}" if unit != "root" else unit


@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_unit_is_gathered_computes_and_is_gathered_again_and_reduced_behind_the_next_gather(ranks, world_size, checkpointed, direct):
    forward = [event for i in "012" for event in (gather(i), ("compute", i))]
    compute = {i: [*([("compute", i)] if checkpointed else []), ("gradient", i)] for i in "012"}
    backward = [gather(2), *compute["2"], gather(1), reduce(2), *compute["1"], gather(0), reduce(1), *compute["0"], reduce(0)]
    expected = [gather("root"), *forward, "backward", gather("root"), *backward, reduce("root"), "step", ("all_reduce", "control")]
    for events in ranks(world_size).run(in_order, checkpointed, direct):
        assert events == expected


@world_sizes
@pytest.mark.parametrize("how", ["engine", "direct"])
@pytest.mark.parametrize("name", ["awkward", "containers", "checkpointed", "checkpointed reentrant"])
def test_nothing_is_touched_between_its_leaving_and_its_wait(ranks, name, how, world_size):
    assert all(ranks(world_size).run(with_an_adversary, world_size, mz.Zero3, name, how))


# --- the same model, whatever it does -------------------------------------------------------------------


class Hides(nn.Module):
    """Blocks that return their output in a container."""

    def __init__(self, container):
        super().__init__()
        self.blocks = nn.ModuleList(Leaf(container) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            out = [block(x)]
            while not isinstance(out[0], Tensor):
                each = out.pop(0)
                inner = each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else vars(each).values()
                out += [v for v in inner if isinstance(v, (Tensor, list, tuple, dict)) or (hasattr(v, "__dict__") and v is not each)]
            x = out[0].tanh()
        return x


@world_sizes
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_unit_may_return_its_output_in_any_container(ranks, container, world_size):
    assert max(ranks(world_size).run(in_step, world_size, lambda: Hides(CONTAINERS[container]))) <= 1e-9


class Escapes(Net):
    """Something of a unit gets out that is not in its output: an auxiliary loss."""

    def forward(self, x):
        x = super().forward(x)
        return x + sum(block.aside for block in self.blocks)


class Aside(Block):
    def forward(self, x):
        y = self.linear(x)
        self.aside = (y @ self.linear.weight).pow(2).mean()
        return x.detach() + 1


def escaping():
    model = Escapes(2)
    model.blocks = nn.ModuleList(Aside() for _ in range(2))
    return model


class Penalty(Net):
    """A gradient inside forward, and a second one through it."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)])

    def forward(self, x):
        x, _ = self.layers[0](x.unsqueeze(1).expand(-1, 3, -1))
        return self.layers[1](x, x, x, need_weights=False)[0].mean(1)


class Adapted(Block):
    """A frozen weight and a trained one in one unit, as LoRA has it; the frozen one is used last in backward."""

    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.low = nn.Parameter(torch.randn(4, 1))

    def forward(self, x):
        return self.linear(x) + (x.detach() @ self.low) @ self.low.t()


def adapted():
    model = Net(2)
    model.blocks = nn.ModuleList(Adapted() for _ in range(2))
    return model


class TwiceAround(Net):
    def forward(self, x):
        x = self.embed(x)
        return self.head(self.blocks[0](self.blocks[1](self.blocks[0](x))))


class OneCheckpoint(Net):
    """Two blocks in one checkpoint, and one that also hands something aside."""

    def __init__(self, reentrant):
        super().__init__(3)
        self.reentrant = reentrant

    def forward(self, x):
        run = lambda x: self.blocks[1](self.blocks[0](x))  # noqa: E731
        x = checkpoint(run, self.embed(x), use_reentrant=self.reentrant)
        return self.head(checkpoint(self.blocks[2], x, use_reentrant=self.reentrant))


def tied_across_units():
    model = Net(2)
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    model.head.weight = model.embed.weight
    return model


class Half(Net):
    """A block whose result is thrown away, one that is not called, and one that is frozen."""

    def __init__(self):
        super().__init__(4)
        self.blocks[3].requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        self.blocks[0](x)
        return self.head(self.blocks[3](self.blocks[1](x)))


class OnlyAside(nn.Module):
    """Blocks that run a method in a checkpoint, of which the loss takes only what it leaves in an attribute."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def body(self, x):
            h = self.inner(x).tanh()
            self.aside = h.pow(2).mean(1)
            return x + self.outer(h)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 4), nn.ModuleList(OnlyAside.Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return sum(block.__dict__.pop("aside") for block in self.blocks)


class KeepsAView(Net):
    """A block that keeps its weight, as it found it the first time."""

    class Block(Block):
        def forward(self, x):
            self.kept = getattr(self, "kept", None)
            if self.kept is None:
                self.kept = self.linear.weight.detach()
            return super().forward(x) + x @ self.kept

    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(KeepsAView.Block(4) for _ in range(2))


MODELS = {
    "an auxiliary loss": escaping,
    "a loss from aside only": OnlyAside,
    "a view that is kept": KeepsAView,
    "a gradient inside forward": Penalty,
    "LSTM and attention": Recurrent,
    "an adapter": adapted,
    "a unit used twice": TwiceAround,
    "one checkpoint": lambda: OneCheckpoint(False),
    "one reentrant checkpoint": lambda: OneCheckpoint(True),
    "tied weights": tied_across_units,
    "unused units": Half,
    "only leaves": lambda: nn.Sequential(Leaf(), Leaf()),
}


@world_sizes
@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_one_process_does(ranks, model, world_size):
    assert max(ranks(world_size).run(in_step, world_size, MODELS[model])) <= 1e-9


@world_sizes
@pytest.mark.parametrize("units", [[], [nn.Linear], [Block, nn.Linear]], ids=["none", "every layer", "nested"])
def test_it_does_not_matter_what_the_units_are(ranks, units, world_size):
    assert max(ranks(world_size).run(functools.partial(in_step, units=units), world_size, Net)) <= 1e-9


def embedding_of_bounded_norm(rank, world_size):
    """It shrinks its weights in forward, in place: what every rank does to the same rows must not be lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4))
    alone = copy.deepcopy(model)
    engine = mz.Zero3(model, sgd(model))
    optimizer = sgd(alone)
    for _ in range(3):
        x = torch.arange(6)
        for net, step in ((engine, engine.step), (alone, optimizer.step)):
            loss = net(x).pow(2).sum()
            engine.backward(loss) if net is engine else loss.backward()
            step()
        optimizer.zero_grad()
    return farthest(engine, alone)


@world_sizes
def test_what_a_forward_writes_to_its_own_weights_is_kept(ranks, world_size):
    assert max(ranks(world_size).run(embedding_of_bounded_norm, world_size)) <= 1e-6


class Momentum(nn.Module):
    """A frozen copy follows a trained layer, as in MoCo, by writes that autograd does not see."""

    def __init__(self, how):
        super().__init__()
        self.q, self.k, self.how = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), how

    def forward(self, x):
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            if self.how == "replaced":
                k.data = k.data * 0.5 + q.data * 0.5
            elif self.how == "in .data":
                k.data.mul_(0.5).add_(q.data, alpha=0.5)
            else:
                k.mul_(0.5).add_(q.detach(), alpha=0.5)
        return self.q(x) + self.k(x)


@world_sizes
@pytest.mark.parametrize("how", ["replaced", "in .data", "in place"])
def test_weights_that_a_forward_makes_from_others_are_kept(ranks, how, world_size):
    def steps(rank):
        results = []
        for engine_type in (mz.Zero2, mz.Zero3):
            torch.manual_seed(0)
            model = nn.Sequential(Momentum(how), nn.Linear(4, 4))
            engine = engine_type(model, sgd(model))
            for step in range(3):
                engine.backward(engine(share(batch(step, 6).float(), rank, world_size)).pow(2).mean())
                engine.step()
            results.append(full(engine))
        return same(*results)

    assert all(ranks(world_size).run(steps))


# --- graphs -------------------------------------------------------------------------------------------


def graphs(rank, world_size):
    found = {}
    engine, _, _ = pair(lambda: Net(2))
    x = share(batch(0), rank, world_size)
    loss = engine(x).sum()
    engine.backward(loss)
    engine.step()
    found["used up"] = refusal(engine.backward, loss)
    engine.zero_grad()
    loss = engine(x).sum()
    loss.backward(retain_graph=True)
    engine.step()
    found["older than a step"] = refusal(engine.backward, loss)
    engine.zero_grad()

    class InPlace(nn.Module):
        def forward(self, x):
            y = x.exp()
            y.add_(1)
            return y

    model = nn.Sequential(nn.Linear(4, 4), InPlace()).double()
    other = mz.Zero3(model, sgd(model))
    found["in place"] = refusal(other.backward, other(x).sum())
    other.zero_grad()
    with other.gathered(model[0]):
        outside = nn.functional.linear(x.requires_grad_(), model[0].weight).sum()
    outside.backward()
    found["outside"] = (x.grad - full(other)[0].sum(0)).abs().max().item()
    found["resident"] = resident(engine) + resident(other)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_that_would_give_a_wrong_gradient_is_refused(ranks, world_size):
    for found in ranks(world_size).run(graphs, world_size):
        assert "second time" in found["used up"]
        assert "has changed since the forward" in found["older than a step"]
        assert "modified by an inplace operation" in found["in place"]
        assert found["outside"] == 0
        assert found["resident"] == []


def with_a_graph_that_one_rank_keeps(rank, world_size, engine_type):
    """As by `if rank == 0: history.append(loss)`, of a forward to which no backward comes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    alone = copy.deepcopy(model)
    engine, optimizer, kept = engine_type(model, sgd(model)), sgd(alone), []
    for step in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = share(x, rank, world_size)
        loss = engine(mine).square().mean()
        if rank == 0:
            kept.append(loss)
        del loss
        engine.backward(engine(mine).square().mean())
        engine.step()
        alone(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return farthest(engine, alone)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("engine_type", [mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload])
def test_a_graph_that_only_one_rank_keeps_changes_nothing(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(with_a_graph_that_one_rank_keeps, world_size, engine_type)) <= 1e-12


# --- branches ---------------------------------------------------------------------------------------

# For each of three ranks, the experts that it runs. Expert 2 is nobody's.
BRANCHES = {"other experts": [(0,), (1,), (0, 1)], "another order": [(0, 1), (1, 0), (0, 1)], "none on two ranks": [(), (1,), ()]}


def with_branches(rank, world_size, branches, direct):
    """Inside one unit every rank may do what its data ask for."""
    torch.manual_seed(0)
    model = Experts(3).double()
    alone = copy.deepcopy(model)
    engine, optimizer = mz.Zero3(model, sgd(model), units=[]), sgd(alone)
    for step in range(4):
        x = rows(alone, step, 6)
        turn = branches[step % 3 :] + branches[: step % 3]
        loss = loss_of(engine, share(x, rank, world_size), turn[rank])
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        for r in range(world_size):
            (loss_of(alone, share(x, r, world_size), turn[r]) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return farthest(engine, alone)


@world_sizes
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
def test_within_a_unit_ranks_may_take_different_branches(ranks, branches, direct, world_size):
    assert max(ranks(world_size).run(with_branches, world_size, BRANCHES[branches], direct)) <= 1e-9


# --- ranks that part ----------------------------------------------------------------------------------


def in_another_order(rank, direct, folder):
    torch.manual_seed(0)
    model = Experts(3)
    engine = mz.Zero3(model, sgd(model))
    before = full(engine)
    order = (0, 1) if rank == 0 else (1, 0)
    loss = loss_of(engine, rows(model, 0, 4), order)
    loss.backward() if direct else engine.backward(loss)
    error = refusal(engine.step)
    again = refusal(engine.step)
    unmoved = same(before, full(engine)) and same(before, list(engine.state_dict().values()))
    engine.zero_grad()
    engine.backward(loss_of(engine, rows(model, 0, 4), (0, 1)))
    torch.save((error, again, unmoved, engine.step(), same(before, full(engine))), folder / str(rank))


@pytest.mark.parametrize("direct", [False, True])
def test_ranks_that_run_units_in_different_orders_are_found_out_before_a_parameter_moves(ranks, direct, tmp_path):
    with pytest.raises(mz.RankError, match=r"rank 0 all_gather .* unit experts.0\), rank 1 all_gather .* unit experts.1"):
        ranks(2).run(in_another_order, direct, tmp_path)
    for rank in range(2):
        error, again, unmoved, stepped, same_as_before = torch.load(tmp_path / str(rank))
        assert error.startswith("RuntimeError: the ranks have run their units in different orders since the last step: at place ")
        assert "rank 0 has gathered experts.0, rank 1 gathered experts.1" in error
        assert again.startswith("RuntimeError: the ranks have run their units in different orders")
        assert unmoved and stepped and not same_as_before


def of_another_size(rank):
    model = nn.ModuleDict({"units": nn.ModuleList([nn.Linear(4, 4), nn.Linear(64, 64)])})
    engine = mz.Zero3(model, sgd(model))
    engine.module["units"][rank](torch.ones(1, [4, 64][rank])).sum().backward()
    engine.step()


def in_another_order_unnoticed(rank, how, folder):
    """Where gradients are cleared between forward and backward, or where nothing needs to be gathered."""
    torch.manual_seed(0)
    model = Experts(3)
    if how == "cleared":
        model.experts.requires_grad_(False)
    engine = mz.Zero3(model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1))
    before = full(engine)
    with engine.gathered() if how == "gathered" else contextlib.nullcontext():
        loss = loss_of(engine, rows(model, 0, 4), (0, 1) if rank == 0 else (1, 0))
        if how == "cleared":
            engine.zero_grad()
        engine.backward(loss)
    torch.save((refusal(engine.step), same(before, full(engine))), folder / str(rank))


@pytest.mark.parametrize("how", ["cleared", "gathered"])
def test_another_order_is_found_out_also_where_no_gather_of_this_backward_shows_it(ranks, how, tmp_path):
    with pytest.raises(mz.RankError, match="the ranks issue different collectives"):
        ranks(2).run(in_another_order_unnoticed, how, tmp_path)
    for rank in range(2):
        error, unmoved = torch.load(tmp_path / str(rank))
        assert error.startswith("RuntimeError: the ranks have run their units in different orders") and unmoved


def each_its_own_module(rank, folder):
    model = Net(2)
    engine = mz.Zero3(model, sgd(model))

    def read():
        with engine.gathered(model.blocks[rank]):
            pass

    torch.save(refusal(read), folder / str(rank))


def test_gathered_for_another_module_on_each_rank_is_an_error(ranks, tmp_path):
    with pytest.raises(mz.RankError, match="the ranks issue different collectives"):
        ranks(2).run(each_its_own_module, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / str(rank)).startswith("RuntimeError: the ranks have called gathered() for different modules")


def test_units_of_different_sizes_at_the_same_time_are_an_error_that_says_where(ranks):
    with pytest.raises(mz.RankError, match=r"units\.0") as failure:
        ranks(2).run(of_another_size)
    assert "units.1" in str(failure.value)


def one_rank_evaluates(rank):
    engine, _, _ = pair(lambda: Net(1))
    if rank == 0:
        with torch.no_grad():
            engine(batch(0))


def test_to_evaluate_on_one_rank_only_is_an_error_and_no_hang(ranks):
    with pytest.raises(mz.RanksTimeout, match="root"):
        ranks(2).run(one_rank_evaluates)


# --- 64 ranks -----------------------------------------------------------------------------------------


def one_of_64(make):
    """Bytes of states that a rank holds after backward, elements that it sends in a step, and the model's; by the meters."""
    with mz.record_memory() as m:
        model = make()
        engine = mz.Zero3(model, torch.optim.Adam(model.parameters(), foreach=False), precision="bf16")
        for _ in range(2):
            with mz.record_traffic() as traffic:
                engine.backward(engine(torch.zeros(1, 8, dtype=torch.long)).sum())
                held = {kind: m.now[kind] for kind in ("params", "grads", "optimizer", "comm")}
                engine.step()
    P = sum(shard.layout.P for unit in engine.units for shard in unit.shards)
    pieces = sum(len(shard.pieces) for shard in engine.weights)
    sent = sum(op.bytes for op in traffic.ops if op.unit != "control") / 2
    return held, sent, P, pieces


@pytest.mark.parametrize("there", [True, False], ids=["real", "fake"])
def test_rank_0_of_64_holds_a_64th_and_sends_three_times_the_weights(rank_0_of_64, nothing_but_the_test, there):
    with contextlib.nullcontext() if there else FakeTensorMode():
        held, sent, P, pieces = one_of_64(lambda: GPT.preset("nano"))
    assert held == {"params": 2 * P // 64, "grads": 2 * P // 64, "optimizer": 12 * P // 64 + 4 * pieces, "comm": 0}
    assert sent == mz.theory.traffic(3, P, 64)


def test_175_billion_parameters_on_64_ranks_are_44_GB_each(rank_0_of_64, nothing_but_the_test):
    """As fake tensors, of the real sizes: GPT-3."""
    config = GPTConfig(vocab_size=50304, context=2048, width=12288, layers=96, heads=96)
    with FakeTensorMode():
        held, _, P, _ = one_of_64(lambda: GPT(config))
    assert 175e9 < P < 175.3e9
    assert 43.75e9 <= sum(held.values()) < 43.82e9


# --- around it ----------------------------------------------------------------------------------------


class Encoder(Net):
    def encode(self, x):
        return self.embed(x)


def past_forward(rank):
    engine, alone, _ = pair(Encoder)
    x = batch(0)
    error = refusal(engine.module.encode, x)
    with engine.gathered(engine.module.embed):
        right = torch.equal(engine.module.encode(x), alone.encode(x))
    other = mz.Zero3(alone, sgd(alone), units=[nn.Linear])
    with torch.no_grad():
        return error, right, other.module.encode(x).shape


def test_a_method_other_than_forward_is_an_error_that_names_the_weight_or_works_where_it_calls_units(ranks):
    for error, right, shape in ranks(2).run(past_forward):
        assert error.startswith("RuntimeError: parameter 'embed.weight' is freed") and right and shape == (6, 4)


def engine_is_gone(rank):
    engine, alone, _ = pair(lambda: Net(1))
    model = engine.module
    loss = engine(batch(0)).sum()
    saved = engine.state_dict()
    del engine
    gc.collect()
    errors = refusal(model, batch(0)), refusal(loss.backward), refusal(mz.Zero3, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return errors, same(list(saved.values()), [p.detach() for p in alone.parameters()])


def test_when_the_engine_is_gone_its_model_says_so(ranks):
    for (run, backward, wrap), saved in ranks(2).run(engine_is_gone):
        assert saved
        assert "is freed" in run and "its engine is gone" in backward
        assert "is sharded by another engine, or was by one that is gone" in wrap


def odd_parameters(rank, world_size):
    """A frozen integer, an expert that is never run, a Parameter of a class of one's own."""

    class Own(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].count = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)
    model[0].own = Own(torch.ones(3))
    engine = mz.Zero3(model, sgd(model))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with engine.gathered():
        return model[0].count.tolist(), type(model[0].own) is Own, engine.state_dict()["0.count"].tolist(), isinstance(model[0].own, Own)


@world_sizes
def test_odd_parameters_come_and_go_like_others(ranks, world_size):
    assert ranks(world_size).run(odd_parameters, world_size) == [([3, 1, 2], True, [3, 1, 2], True)] * world_size


def accumulating(rank, world_size, precision):
    model = mlp(4, 8, 4)
    engine = mz.Zero3(model, sgd(model), precision=precision)
    refused = refusal(engine.no_sync)
    with mz.record_traffic() as traffic:
        for i in range(3):
            engine.backward(loss_of(engine, rows(model, i, 4)))
        engine.step()
    P = sum(bucket.grad_P.numel() for bucket in engine.buckets)
    ops = [(op.op, op.numel) for op in traffic.ops if op.unit != "control"]
    size = 2 if precision else 4
    return refused, sum(op.bytes for op in traffic.ops if op.unit != "control") / size, mz.theory.traffic(3, P, world_size, 3), len(ops)


def one_step(rank, world_size, name):
    model = build(name)
    if name == "checkpointed":
        model.uses = 1
    engine = mz.Zero3(model, sgd(model), clip_norm=1.0)
    for step in range(2):
        with mz.record_traffic() as traffic:
            engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
            engine.step()
    everything = sum(shard.layout.P for unit in engine.units for shard in unit.shards)
    trained = sum(shard.layout.P for shard in engine.weights)
    shards = [(unit.name, len(unit.shards), len(unit.buckets)) for unit in engine.units]
    return [(op.op, op.unit) for op in traffic.ops], sum(op.bytes for op in traffic.ops if op.unit != "control"), everything, trained, shards


@pytest.mark.parametrize("name", ["awkward", "few", "experts", "strided", "checkpointed", "checkpointed reentrant once", "gpt", "gpt checkpointed"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_gathers_every_unit_twice_and_reduces_it_once(ranks, name, world_size):
    results = ranks(world_size).run(one_step, world_size, name)
    for ops, sent, everything, trained, shards in results:
        assert ops == results[0][0]
        assert Counter(ops) == {
            **{("all_gather", unit): 2 * gathered for unit, gathered, _ in shards},
            **{("reduce_scatter", unit): reduced for unit, _, reduced in shards},
            ("all_reduce", "control"): 1,
        }
        assert sent == 4 * (2 * everything + trained) * (world_size - 1) / world_size
        if everything == trained:  # nothing is frozen
            assert sent == 4 * mz.theory.traffic(3, trained, world_size)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_G_micro_steps_cost_3_G_times_the_weights(ranks, world_size, precision):
    for refused, sent, theory, ops in ranks(world_size).run(accumulating, world_size, precision):
        assert refused.startswith("RuntimeError: ZeRO-3 has no no_sync()")
        assert sent == theory and ops == 3 * 2 * 3


def states(rank, world_size, other, precision):
    """From one engine to another and back, and to plain PyTorch."""
    torch.manual_seed(0)
    first, second = build("awkward"), build("awkward", seed=1)
    a = mz.Zero3(first, torch.optim.AdamW(first.parameters(), lr=0.01), precision=precision)
    b = other(second, torch.optim.AdamW(second.parameters(), lr=0.01), precision=precision)
    for step in range(2):
        a.backward(loss_of(a, share(rows(first, step, 12), rank, world_size)))
        a.step()
    b.load_state_dict(a.state_dict())
    b.load_optimizer_state_dict(a.optimizer_state_dict())
    for step in range(2, 4):
        for engine in (a, b):
            engine.backward(loss_of(engine, share(rows(first, step, 12), rank, world_size)))
            engine.step()
    plain = build("awkward", seed=2)
    plain.load_state_dict(b.state_dict())
    kept = a.state_dict()
    a.load_state_dict(build("awkward", seed=3).state_dict())
    return same(list(kept.values()), list(b.state_dict().values())), same(list(kept.values()), list(plain.state_dict().values())), list(kept) == list(Awkward().state_dict())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("other", [mz.DDP, mz.Zero1, mz.Zero3])
@world_sizes
def test_state_dicts_go_between_engines(ranks, other, precision, world_size):
    assert ranks(world_size).run(states, world_size, other, precision) == [(True, True, True)] * world_size
