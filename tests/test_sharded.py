"""What the steps that shard the optimizer have in common: who updates what, what is done to gradients meanwhile, clipping, resuming."""

import copy
import functools
import math

import pytest
import torch
from models import Lone, build, distance, gathered, in_groups, loss_of, mlp, refusal, rows, same, share, weights

import minizero as mz

ENGINES = [mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]  # each further step of the course joins here
BUCKET_MB = 5e-4  # 131 floats: several buckets for most models, and several parameters in most buckets

every_engine = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


def train(engine, steps, rank, world_size, first=0):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))
        engine.step()


# --- who holds what --------------------------------------------------------------------------------------


def shards(rank, world_size, engine_type):
    """A model of one bucket; the elements of its parameters are 1, 2, 3, …"""
    model = mlp(9, 7, 5)
    optimizer = torch.optim.Adam(model.parameters())
    total = 0
    for p in model.parameters():
        p.data = torch.arange(total + 1.0, total + 1 + p.numel()).view_as(p)
        total += p.numel()
    engine = engine_type(model, optimizer)
    held = torch.cat([p.detach().flatten() for p in optimizer.param_groups[0]["params"]] or [torch.empty(0)])
    return held.tolist(), total, sum(bucket.grad_P.numel() for bucket in engine.buckets) // world_size


@every_engine
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_element_is_updated_by_exactly_one_rank_and_no_rank_has_more_than_its_share(ranks, engine_type, world_size):
    results = ranks(world_size).run(shards, world_size, engine_type)
    assert sorted(element for held, _, _ in results for element in held) == list(range(1, results[0][1] + 1))
    assert all(len(held) <= share for held, _, share in results)


def without_an_optimizer(rank, engine_type):
    model = mlp(3, 2)
    return refusal(engine_type, model), refusal(engine_type, model, None), refusal(engine_type, model, sgd(model))


@every_engine
def test_it_needs_an_optimizer(ranks, engine_type):
    name = engine_type.__name__
    for missing, none, afterwards in ranks(1).run(without_an_optimizer, engine_type):
        assert missing.startswith("TypeError") and "optimizer" in missing
        assert none == f"TypeError: {name} shards the optimizer's state: give it one, {name}(model, optimizer)"
        assert afterwards is None


# --- accumulation, edits, clearing --------------------------------------------------------------------------


def touch(what, model, optimizer, engine):
    """What somebody does to the gradients of a model, wrapped or plain."""
    one = model.get_parameter("first.weight" if hasattr(model, "first") else "blocks.2.0.weight")
    match what.split(", "):
        case "one gradient", "None":
            one.grad = None
        case "one gradient", "zeros":
            one.grad.zero_()
        case "one gradient", "replaced":
            one.grad = torch.full(one.shape, 0.5, dtype=one.dtype)
        case ("engine" | "module" | "optimizer") as who, how:
            {"engine": engine, "module": model, "optimizer": optimizer}[who].zero_grad(set_to_none=how == "None")


def touch_what_the_optimizer_sees(what, optimizer):
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        p.grad = {"edited": lambda p: p.grad.mul_(0.5), "replaced": lambda p: p.grad * 0.5, "removed": lambda p: None}[what](p)


def between_backwards(rank, world_size, engine_type, what, name="awkward", aside=False):
    """Three backwards before a step, and something in between, which plain PyTorch does too.

    aside: before it, torch.autograd.grad() has computed gradients that nobody keeps
    """
    model, reference = build(name, torch.float64), build(name, torch.float64)
    optimizer, plain = (sgd(m, lr=0.05, momentum=0.9, weight_decay=0.1) for m in (model, reference))
    engine = engine_type(model, optimizer, bucket_mb=BUCKET_MB if name == "awkward" else 1e-9)
    for step in range(2):
        for i in range(3):
            x = rows(model, 10 * step + i, 12)
            engine.backward(loss_of(engine, share(x, rank, world_size)))
            loss_of(reference, x).backward()
            if aside:
                torch.autograd.grad(loss_of(engine, x), [p for p in model.parameters() if p.requires_grad], allow_unused=True)
            if i == 2 or what == "nothing":
                continue
            if what.endswith("after sync_gradients"):
                engine.sync_gradients()
                for each in (optimizer, plain):
                    touch_what_the_optimizer_sees(what.split()[0], each)
                engine(x)  # a look at the loss, without a backward
            elif what == "synchronised":
                engine.sync_gradients()
            else:
                touch(what, model, optimizer, engine)
                touch(what, reference, plain, reference)
        engine.step()
        plain.step()
        plain.zero_grad()
    return distance(weights(engine), weights(reference))


TOUCHES = [*(f"one gradient, {how}" for how in ("None", "zeros", "replaced")), *(f"{who}, {how}" for who in ("engine", "module", "optimizer") for how in ("None", "zeros"))]
EDITS = [f"{how} after sync_gradients" for how in ("edited", "replaced", "removed")]


@every_engine
@world_sizes
@pytest.mark.parametrize("what", ["nothing", "synchronised", *TOUCHES, *EDITS])
def test_what_is_done_to_gradients_between_two_backwards_counts_as_in_plain_pytorch(ranks, engine_type, what, world_size):
    assert max(ranks(world_size).run(between_backwards, world_size, engine_type, what)) <= 1e-9


@every_engine
@pytest.mark.parametrize("what", ["nothing", "synchronised", *TOUCHES, *EDITS])
def test_so_it_does_where_a_gradient_came_late(ranks, engine_type, what):
    """In reentrant checkpoints a parameter that is used twice has two gradients, the second when its bucket has left."""
    assert max(ranks(2).run(between_backwards, 2, engine_type, what, "checkpointed reentrant")) <= 1e-9


@every_engine
@pytest.mark.parametrize("what", ["nothing", "synchronised", *TOUCHES, *EDITS])
def test_so_it_does_where_autograd_grad_has_looked_at_the_parameters(ranks, engine_type, what):
    assert max(ranks(2).run(between_backwards, 2, engine_type, what, "awkward", True)) <= 1e-9


def late_replacement(rank, engine_type):
    """A parameter's own .grad is replaced when the optimizer has its mean already."""
    model = Lone(torch.zeros(70))
    engine = engine_type(model, sgd(model, lr=1.0))
    engine.backward(engine().sum())
    engine.sync_gradients()
    model.weight.grad = torch.full((70,), 5.0 + rank)
    error = refusal(engine.step)
    return error or (-weights(engine)[0]).unique().tolist()


@every_engine
def test_a_gradient_that_is_replaced_after_sync_gradients_counts_or_is_refused_by_name(ranks, engine_type):
    for outcome in ranks(2).run(late_replacement, engine_type):
        assert outcome == [5.5] or "parameter 'weight'" in outcome


def set_by_hand(rank, engine_type):
    """Without any backward: each rank sets a local gradient, rank 0 alone in some steps."""
    model = Lone(torch.zeros(70))
    engine = engine_type(model, sgd(model, lr=1.0))
    moves = []
    for step in range(3):
        before = weights(engine)[0]
        if step != 1 or rank == 0:
            model.weight.grad = torch.full((70,), float(rank + step))
        engine.step()
        moves.append((before - weights(engine)[0]).unique().tolist())
    return moves


@every_engine
@world_sizes
def test_gradients_set_by_hand_are_averaged(ranks, engine_type, world_size):
    middle = (world_size - 1) / 2
    for moves in ranks(world_size).run(set_by_hand, engine_type):
        assert moves == [pytest.approx([middle]), pytest.approx([1 / world_size]), pytest.approx([middle + 2])]


def handed_on(rank, engine_type):
    """What stands in .grad after a reduction has no elements, also as another parameter's gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = engine_type(model, sgd(model))
    engine.backward(engine(torch.ones(2, 8) + rank).sum())
    before = weights(engine)
    model[0].weight.grad = model[1].weight.grad
    error = refusal(engine.step)
    unmoved = same(before, weights(engine))
    engine.zero_grad()
    engine.backward(engine(torch.ones(2, 8) + rank).sum())
    return error, unmoved, engine.step() and all(weight.isfinite().all() for weight in weights(engine))


@pytest.mark.parametrize("engine_type", ENGINES[1:], ids=lambda engine: engine.__name__)  # Zero1 does not free it
def test_a_reduced_gradient_given_to_another_parameter_is_refused_and_the_next_step_is_sound(ranks, engine_type):
    for error, unmoved, sound in ranks(2).run(handed_on, engine_type):
        assert error.startswith("RuntimeError: the gradient of parameter '") and "sync_gradients()" in error
        assert unmoved and sound


def clipped_with_empty_ranks(rank, engine_type, sync):
    """One element in all, on three ranks: two have nothing to clip."""
    model = Lone(torch.tensor([2.0]))
    engine = engine_type(model, sgd(model, lr=1.0), clip_norm=0.5)
    with mz.record_traffic() as traffic:
        engine.backward(engine(rank + 1.0).sum())
        if sync:
            engine.sync_gradients()
            for p in engine.optimizer.param_groups[0]["params"]:
                p.grad *= 2
        engine.step()
    return weights(engine)[0].item(), engine.grad_norm, sum(op.unit == "control" for op in traffic.ops)


@every_engine
@pytest.mark.parametrize("sync", [False, True])
def test_ranks_with_nothing_take_part_in_clipping(ranks, engine_type, sync):
    for value, norm, controls in ranks(3).run(clipped_with_empty_ranks, engine_type, sync):
        assert value == pytest.approx(1.5, abs=1e-5)
        assert norm == pytest.approx(4 if sync else 2)
        assert controls == (2 if sync else 1)  # edits may have been made: only step() can know the norm


def magnitudes(rank, engine_type):
    """The gradient is 1 in rank 0's shard and 100 in rank 1's."""
    model = Lone(torch.zeros(64))
    engine = engine_type(model, sgd(model, lr=1.0), clip_norm=1.0)
    engine.backward(engine(torch.cat([torch.ones(32), torch.full((32,), 100.0)])).sum())
    engine.step()
    return -weights(engine)[0], engine.grad_norm


@every_engine
def test_the_whole_gradient_is_clipped_not_each_shard(ranks, engine_type):
    for moved, norm in ranks(2).run(magnitudes, engine_type):
        assert norm == pytest.approx(math.sqrt(32 + 32 * 1e4), rel=1e-12)
        assert moved.norm().item() == pytest.approx(1, rel=1e-5)
        assert (moved[32:] / moved[:32]).tolist() == pytest.approx([100.0] * 32)


# --- the updated weights ----------------------------------------------------------------------


def in_place(rank, world_size, engine_type):
    """Through two steps; and in strides that are not the usual ones."""
    model, strided = build("awkward"), build("strided")
    strides = [p.stride() for p in strided.parameters()]
    engine, other = engine_type(model, sgd(model), bucket_mb=BUCKET_MB), engine_type(strided, sgd(strided))
    places = []
    for step in range(3):
        with gathered(engine):
            places.append([p.data_ptr() for p in model.parameters()])
        train(engine, 1, rank, world_size, first=step)
    with gathered(other):
        return issubclass(engine_type, mz.Zero3) or places[0] == places[1] == places[2], [p.stride() for p in strided.parameters()] == strides


@every_engine
def test_weights_stay_where_they_are_and_lie_as_they_did(ranks, engine_type):
    assert ranks(2).run(in_place, 2, engine_type) == [(True, True)] * 2


def seen_by_autograd(rank, engine_type):
    """A backward over a forward from before the step must be refused, as in plain PyTorch, not computed with other weights."""
    model = mlp(3, 4, 2)
    engine = engine_type(model, sgd(model))
    x = rows(model, 0, 4)
    old = loss_of(engine, x)
    engine.backward(loss_of(engine, x))
    engine.step()
    return refusal(old.backward)


@every_engine
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_over_weights_that_a_step_has_changed_is_refused(ranks, engine_type, world_size):
    for error in ranks(world_size).run(seen_by_autograd, engine_type):
        assert "modified by an inplace operation" in error or "has changed since the forward" in error


def optimizer_alone(rank, engine_type):
    """optimizer.step() in place of engine.step(): with the engine there, and when it is gone."""
    model = mlp(9, 7, 5)
    optimizer = sgd(model)
    engine = engine_type(model, optimizer)
    engine.backward(loss_of(engine, rows(model, 0, 4)))
    engine.sync_gradients()
    before = weights(engine)
    errors = [refusal(optimizer.step)]
    unmoved = same(before, weights(engine))
    engine.step()
    moved = not same(before, weights(engine))
    del engine
    return [*errors, refusal(optimizer.step)], unmoved, moved


@every_engine
def test_the_optimizers_own_step_is_refused_since_it_would_update_this_ranks_shard_alone(ranks, engine_type):
    for errors, unmoved, moved in ranks(2).run(optimizer_alone, engine_type):
        assert unmoved and moved
        assert all(error.startswith("RuntimeError: this optimizer updates the shards of an engine: call engine.step()") for error in errors)


# --- resume -----------------------------------------------------------------------------------------------------


def adamw(model):
    return in_groups(model, torch.optim.AdamW)


def first_five(rank, world_size, engine_type, precision):
    model = build("awkward")
    engine = engine_type(model, adamw(model), precision=precision, bucket_mb=BUCKET_MB)
    train(engine, 5, rank, world_size)
    saved = copy.deepcopy((engine.state_dict(), engine.optimizer_state_dict()))
    train(engine, 5, rank, world_size, first=5)
    return saved, list(engine.state_dict().values())


def next_five(rank, world_size, engine_type, precision, state, optimizer_state):
    model = build("awkward", seed=1 + rank)
    engine = engine_type(model, adamw(model), precision=precision, bucket_mb=BUCKET_MB)
    engine.load_state_dict(state)
    engine.load_optimizer_state_dict(optimizer_state)
    again = engine.state_dict(), engine.optimizer_state_dict()
    round_trip = all(torch.equal(again[0][name], state[name]) for name in state) and all(
        torch.equal(again[1]["state"][name][key], value) for name, values in optimizer_state["state"].items() for key, value in values.items()
        if values["exp_avg"].numel()
    )  # fmt: skip
    same_groups = again[1]["param_groups"] == optimizer_state["param_groups"]
    train(engine, 5, rank, world_size, first=5)
    return round_trip and same_groups, list(engine.state_dict().values())


def equal(a, b):
    """Two state dicts, to the bit; a parameter of no elements may have a state or none."""
    a, b = ({name: value for name, value in each.items() if name != "empty"} for each in (a, b))
    return a.keys() == b.keys() and all(equal(a[name], b[name]) if isinstance(a[name], dict) else torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("precision", [None, "bf16"])
@world_sizes
def test_all_engines_save_the_same(ranks, precision, world_size):
    (state, optimizer_state), _ = ranks(world_size).run(first_five, world_size, mz.DDP, precision)[0]
    for engine_type in ENGINES:
        for (same_state, same_optimizer_state), _ in ranks(world_size).run(first_five, world_size, engine_type, precision):
            assert equal(state, same_state) and equal(optimizer_state["state"], same_optimizer_state["state"])
            assert optimizer_state["param_groups"] == same_optimizer_state["param_groups"]


@functools.cache
def saved_at_two(ranks, engine_type, precision):
    return ranks(2).run(first_five, 2, engine_type, precision)[0]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("engine_type", [mz.DDP, *ENGINES], ids=lambda engine: engine.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_saved_at_two_ranks_it_goes_on_at_any_number_and_under_any_engine(ranks, engine_type, precision, world_size):
    saved, expected = saved_at_two(ranks, ENGINES[world_size % len(ENGINES)], precision)
    for round_trip, trained in ranks(world_size).run(next_five, world_size, engine_type, precision, *saved):
        assert round_trip
        difference = max((a.float() - b.float()).abs().max().item() for a, b in zip(expected, trained, strict=True) if a.numel())
        # At two ranks to the bit. Elsewhere 16-bit gradients are rounded at other places, and Adam makes steps of them.
        assert difference <= (0 if world_size == 2 else 2e-5 if precision is None else 0.05)


def by_plain_pytorch(state, optimizer_state, steps):
    """The saved training goes on in one process without an engine, and is saved again in the same form."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = build("awkward", seed=9)
    model.load_state_dict(state)
    optimizer = adamw(model)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizer_state), options=StateDictOptions(strict=False))
    for step in range(5, 5 + steps):
        loss_of(model, rows(model, step, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), get_optimizer_state_dict(model, optimizer)


def there_and_back(rank, world_size, engine_type, precision, steps):
    saved, expected = first_five(rank, world_size, engine_type, precision)
    plain = by_plain_pytorch(*saved, steps)
    if steps:
        trained = list(plain[0].values())
    else:
        _, trained = next_five(rank, world_size, engine_type, precision, *plain)
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(expected, trained, strict=True) if a.numel())


@every_engine
@world_sizes
def test_plain_pytorch_goes_on_with_what_it_saved(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(there_and_back, world_size, engine_type, None, 5)) <= 2e-5


@every_engine
@pytest.mark.parametrize("precision", [None, "bf16"])
@world_sizes
def test_what_went_through_plain_pytorch_is_the_same_training_to_the_bit(ranks, engine_type, precision, world_size):
    assert max(ranks(world_size).run(there_and_back, world_size, engine_type, precision, 0)) == 0
