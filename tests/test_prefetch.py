"""Prefetch: the same numbers and the same traffic as ZeRO-3, asked for earlier."""

import copy

import pytest
import torch
from models import build, distance, loss_of, refusal, rows, same, share
from test_order import with_an_adversary
from test_parts_units import Block, Net
from test_zero3 import batch, full, resident, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import minizero as mz
from minizero.parts import calls, spans

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])
SETTINGS = [{"depth": 0}, {"depth": 1}, {"depth": 2}, {"depth": 8}, {"depth": 8, "max_live": 400}, {"depth": 2, "max_live": 0}]


def trained(rank, world_size, name, optimizer_class, steps=6):
    """Whether each setting ends with ZeRO-3's parameters to the bit, after evaluations and accumulated steps between."""
    results = []
    for settings in [None, *SETTINGS]:
        model = build(name, seed=rank)
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.01)
        engine = mz.Zero3(model, optimizer) if settings is None else mz.Zero3Prefetch(model, optimizer, **settings)
        for step in range(steps):
            for micro_step in range(1 + step % 2):
                engine.backward(loss_of(engine, share(rows(model, 10 * step + micro_step, 12), rank, world_size)))
            engine.step()
            assert not resident(engine)
            with torch.no_grad():
                loss_of(engine, share(rows(model, step, 12), rank, world_size))
            assert not resident(engine)
        results.append([*full(engine), *model.buffers()])
    return [same(result, results[0]) for result in results]


@world_sizes
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["awkward", "few", "gpt", "batchnorm", "containers", "checkpointed", "checkpointed reentrant"])
def test_every_depth_gives_the_parameters_of_zero3_to_the_bit(ranks, name, optimizer, world_size):
    for equal in ranks(world_size).run(trained, world_size, name, optimizer):
        assert equal == [True] * (1 + len(SETTINGS))


# --- the order of events ------------------------------------------------------------------------------


class Events(list):
    """Gathers as they are issued, and forwards and backwards as they begin."""

    def issued(self, call):
        if call.op == "all_gather":
            self.append(f"gather {call.unit.removeprefix('blocks.')}")

    def begun(self, span):
        if span.what in ("forward", "backward"):
            event = f"{span.what} {span.unit.removeprefix('blocks.')}"
            if self[-1] != event:  # checkpointing's second forward of a unit is a part of its backward
                self.append(event)

    def __enter__(self):
        calls.listeners.append(self)
        spans.listeners.append(self)
        return self

    def __exit__(self, *_):
        calls.listeners.remove(self)
        spans.listeners.remove(self)


class Checkpointed(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def in_order(rank, model_class, settings, steps=3):
    model = model_class(3)
    engine = mz.Zero3Prefetch(model, sgd(model), **settings)
    found = []
    for step in range(steps):
        with Events() as events:
            engine.backward(engine(batch(step).float()).sum())
        engine.step()
        found.append(" ".join(events))
    with Events() as events, torch.no_grad():
        engine(batch(9).float())
    return [*found, " ".join(events)]


ON_DEMAND = (
    "gather root forward root gather 0 forward 0 gather 1 forward 1 gather 2 forward 2 "
    "gather root backward root gather 2 backward 2 gather 1 backward 1 gather 0 backward 0"
)
ONE_AHEAD = (
    "gather root gather 0 forward root gather 1 forward 0 gather 2 forward 1 forward 2 "
    "gather root gather 2 backward root gather 1 backward 2 gather 0 backward 1 backward 0"
)
TWO_AHEAD = (
    "gather root gather 0 gather 1 forward root gather 2 forward 0 forward 1 forward 2 "
    "gather root gather 2 gather 1 backward root gather 0 backward 2 backward 1 backward 0"
)


@pytest.mark.parametrize("model", [Net, Checkpointed])
@pytest.mark.parametrize(("depth", "expected"), [(0, ON_DEMAND), (1, ONE_AHEAD), (2, TWO_AHEAD)])
def test_a_unit_is_asked_for_before_the_one_before_begins(ranks, depth, expected, model):
    for first, second, third, evaluation in ranks(2).run(in_order, model, {"depth": depth}):
        assert first == ON_DEMAND  # it does not know yet
        assert second == third == expected
        assert evaluation == expected.partition(" gather root backward")[0].partition(" gather root gather 2")[0]


def limited(rank, depth, max_live):
    """The most bytes of weights that were ahead: above the states, the root and the block that computes."""
    model = Net(0)
    model.blocks = nn.ModuleList(Block(32) for _ in range(4))
    model.embed, model.head = nn.Linear(4, 32), nn.Linear(32, 4)
    engine = mz.Zero3Prefetch(model, sgd(model), depth=depth, max_live=max_live)
    sizes = {unit.name: 4 * sum(shard.layout.P for shard in unit.shards) for unit in engine.units}
    for step in range(2):
        engine.backward(engine(batch(step).float()).sum())
        engine.step()
    with mz.record_memory() as m:
        engine.backward(engine(batch(3).float()).sum())
    params = m.curve()[1]["params"]
    return int(params.max() - params[0]) - sizes["root"] - sizes["blocks.0"], sizes["blocks.0"]


@pytest.mark.parametrize(("depth", "blocks", "expected"), [(0, None, 0), (1, None, 1), (2, None, 2), (8, None, 3), (8, 2, 2), (8, 1, 1), (8, 0.9, 0), (8, 0, 0)])
def test_no_more_weights_are_ahead_than_allowed(ranks, depth, blocks, expected):
    block = 32 * 32 + 2 * 32
    for ahead, size in ranks(2).run(limited, depth, None if blocks is None else int(blocks * block)):
        assert size == 4 * block
        assert ahead == expected * size


@world_sizes
@pytest.mark.parametrize("engine_type", [mz.Zero3Prefetch, mz.Zero3Offload], ids=lambda engine: engine.__name__)
@pytest.mark.parametrize("how", ["engine", "direct"])
@pytest.mark.parametrize("name", ["awkward", "containers", "checkpointed", "checkpointed reentrant"])
def test_nothing_is_read_before_its_wait(ranks, name, how, engine_type, world_size):
    assert all(ranks(world_size).run(with_an_adversary, world_size, engine_type, name, how))


# --- when the order changes -----------------------------------------------------------------------------


class Choosing(Net):
    """Runs the blocks that it is told to run, in that order."""

    order = (0, 1, 2)

    def forward(self, x):
        x = self.embed(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


ORDERS = [(0, 1, 2), (0, 1, 2), (2, 1, 0), (2, 1, 0), (1,), (), (0, 0, 1), (0, 1, 2, 0), (0, 1, 2, 0), (0, 1, 2)]


def another_order(rank, world_size, depth):
    torch.manual_seed(0)
    model = Choosing(3).double()
    alone = copy.deepcopy(model)
    engine, optimizer = mz.Zero3Prefetch(model, sgd(model), depth=depth), sgd(alone)
    left = []
    for step, order in enumerate(ORDERS):
        model.order = alone.order = order
        x = batch(step, 6)
        with mz.record_traffic() as traffic:
            engine.backward(engine(share(x, rank, world_size)).pow(2).mean())
        left += resident(engine)
        engine.step()
        for r in range(world_size):
            (alone(share(x, r, world_size)).pow(2).mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = [op.unit for op in traffic.ops if op.op == "all_gather"]
    return distance(full(engine), [p.detach() for p in alone.parameters()]), left, gathers


@world_sizes
@pytest.mark.parametrize("depth", [1, 2])
def test_an_order_that_changes_is_followed_on_demand(ranks, depth, world_size):
    for difference, left, _ in ranks(world_size).run(another_order, world_size, depth):
        assert difference <= 1e-9 and left == []


class Accident(Exception):
    pass


def accident(rank, where):
    model = Net(3).double()
    alone = copy.deepcopy(model)
    engine, optimizer = mz.Zero3Prefetch(model, sgd(model), depth=2), sgd(alone)
    left = []
    for step in range(5):
        if step == 2:
            block = model.blocks[1]

            def fail(*_):
                raise Accident

            hook = block.linear.register_forward_hook(fail) if where == "forward" else block.linear.register_full_backward_hook(fail)
            error = refusal(lambda: engine.backward(engine(batch(7)).sum()))
            hook.remove()
            left += resident(engine)
            engine.zero_grad()
            left.append(error.partition(":")[0])
        engine.backward(engine(batch(step)).sum())
        engine.step()
        alone(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(full(engine), [p.detach() for p in alone.parameters()]), left


@world_sizes
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_in_flight(ranks, where, world_size):
    for difference, left in ranks(world_size).run(accident, where):
        assert difference <= 1e-9 and left == ["Accident"]


def on_one_rank(rank, when):
    """Rank 1 runs another order once; then all run the first one again. The journals, which would say so, do not hear of it."""
    if when == 0:
        calls.listeners.clear()
    model = Choosing(3)
    engine = mz.Zero3Prefetch(model, sgd(model), depth=1)
    errors = []
    for step in range(when + 3):
        model.order = (0, 2, 1) if rank and step == when else (0, 1, 2)
        engine.backward(engine(batch(step).float()).sum())
        errors.append(refusal(engine.step))
        engine.zero_grad()
    return errors, [weight.sum().item() for weight in full(engine)]


def test_an_order_that_ranks_do_not_share_is_refused_and_nobodys_plan(ranks):
    results = ranks(2).run(on_one_rank, 0)
    for errors, weights in results:
        assert "different orders" in errors[0] and errors[1:] == [None, None]
        assert weights == results[0][1]


def test_a_rank_that_leaves_the_plan_alone_is_found_out(ranks):
    with pytest.raises(mz.RankError, match="the ranks issue different collectives"):
        ranks(2).run(on_one_rank, 2)


def one_of_them_evaluates(rank):
    """Before the first step all gather in one order, but for rank 1 it is an evaluation's."""
    model = Net(3)
    engine = mz.Zero3Prefetch(model, sgd(model))
    found = []
    for step in range(3):
        with torch.set_grad_enabled(rank == 0 or step > 0):
            engine(batch(7).float())
        with Events() as events:
            engine.backward(engine(batch(step).float()).sum())
        engine.step()
        found.append(" ".join(events))
    return found, [weight.sum().item() for weight in full(engine)]


def test_an_order_that_was_another_phases_on_some_rank_is_nobodys_plan(ranks):
    (found, weights), other = ranks(2).run(one_of_them_evaluates)
    assert (found, weights) == other
    assert found == [ON_DEMAND, ON_DEMAND, ONE_AHEAD]


# --- never stale, and no traffic of its own -----------------------------------------------------------------


def traffic_of(rank, engine_type, keywords):
    model = build("awkward")
    engine = engine_type(model, sgd(model), **keywords)
    for step in range(3):
        with mz.record_traffic() as traffic:
            engine.backward(loss_of(engine, rows(model, step, 4)))
            engine.step()
    return sorted((op.op, op.numel, op.unit) for op in traffic.ops), [(op.op, op.unit) for op in traffic.ops]


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_sends_what_zero3_sends(ranks, world_size):
    expected, _ = ranks(world_size).run(traffic_of, mz.Zero3, {})[0]
    results = ranks(world_size).run(traffic_of, mz.Zero3Prefetch, {"depth": 2})
    for sent, order in results:
        assert sent == expected and order == results[0][1]


@pytest.mark.parametrize(("keyword", "value"), [("depth", -1), ("depth", 1.5), ("depth", True), ("max_live", -3), ("max_live", 2.0)])
def test_a_depth_and_a_limit_are_counts(ranks, keyword, value):
    def wrapping(rank):
        model = Net(1)
        return refusal(lambda: mz.Zero3Prefetch(model, sgd(model), **{keyword: value}))

    for error in ranks(1).run(wrapping):
        assert error.startswith(f"ValueError: {keyword} must be a whole number, 0 or more; got {value!r}")


def one_rank_alone(rank):
    """Inside gathered() a rank may evaluate without the others, who know nothing of it."""
    model = Net(2)
    engine = mz.Zero3Prefetch(model, sgd(model))
    for step in range(3):
        with engine.gathered():
            if rank == 0:
                with torch.no_grad():
                    engine(batch(9).float())
        engine.backward(engine(batch(step).float()).sum())
        engine.step()
    return [weight.sum().item() for weight in full(engine)]


def test_a_forward_that_gathers_nothing_is_no_order(ranks):
    first, second = ranks(2).run(one_rank_alone)
    assert first == second
