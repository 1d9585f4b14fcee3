"""Every engine in the situations that have broken production engines: it trains what one process would, or says clearly why not."""

import contextlib
import copy
import dataclasses
import itertools
import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from models import (
    LOCAL_ENGINES,
    Checkpointed,
    ConvNet,
    Lone,
    build,
    distance,
    gathered,
    grads,
    loss_of,
    mean_grads,
    mlp,
    refusal,
    rows,
    same,
    share,
    weights,
    without_sync,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import minizero as mz

BUCKET_MB = 2e-4  # some 26 numbers in float64: several buckets for most models here

ENGINES = [mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]  # each step of the course joins here

pytestmark = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)
world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


def wrap(engine_type, model, optimizer=None, **keywords):
    return engine_type(model, optimizer or sgd(model), bucket_mb=BUCKET_MB, **keywords)


def train(engine, steps, rank, world_size, first=0):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))
        engine.step()


def train_alone(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        loss_of(model, rows(model, step, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(steps=10, name="awkward", **keywords):
    """The weights that a single process has after some steps."""
    model = build(name, torch.float64)
    train_alone(model, sgd(model, **keywords), steps)
    return weights(model)


def farthest(a, b):
    """The largest difference of two dicts of gradients, which must be None in the same places."""
    a, b = ({name: g for name, g in grads.items() if g is not None and g.numel()} for grads in (a, b))
    assert a.keys() == b.keys()
    return distance(list(a.values()), list(b.values()))


# --- the gradients -------------------------------------------------------------------------------------


def after_sync(rank, engine_type, world_size):
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    engine.backward(loss_of(engine, share(rows(model, 0, 12), rank, world_size)))
    loss_of(reference, rows(model, 0, 12)).backward()
    return farthest(mean_grads(engine), grads(reference))


@world_sizes
def test_after_sync_gradients_every_rank_has_the_whole_batchs_gradients_and_none_where_there_is_none(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(after_sync, engine_type, world_size)) <= 1e-12


def steps_without_backward(rank, engine_type):
    model = build("awkward")
    engine = wrap(engine_type, model, sgd(model, momentum=0.9, weight_decay=0.1))
    train(engine, 2, 0, 1)
    before = weights(engine)
    return engine.step(), engine.step(), same(before, weights(engine)), all(p.grad is None for p in model.parameters())


@world_sizes
def test_a_step_without_a_backward_moves_nothing(ranks, engine_type, world_size):
    assert ranks(world_size).run(steps_without_backward, engine_type) == [(True, True, True, True)] * world_size


def around_call(rank, engine_type, world_size):
    """Through the model itself, without engine(…): hooks are the parameters' own, and the units'."""
    model = build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    forward = model if issubclass(engine_type, mz.Zero3) else model.forward  # whose weights are there when a unit is called
    for step in range(10):
        engine.backward(loss_of(forward, share(rows(model, step, 12), rank, world_size)))
        engine.step()
    return distance(weights(engine), alone())


@world_sizes
def test_the_forward_may_go_around_the_engine(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(around_call, engine_type, world_size)) <= 1e-9


# --- unused, frozen and shared parameters ---------------------------------------------------------------


def in_one_micro_batch_only(rank, engine_type, world_size):
    """Expert 0 is used in the first micro-batch only, expert 1 in the second only, expert 2 on rank 0 in the first only."""
    model, reference = build("experts", torch.float64), build("experts", torch.float64)
    engine = wrap(engine_type, model, **({"units": []} if issubclass(engine_type, mz.Zero3) else {}))  # all ranks run the same units
    batches = [rows(model, i, 12) for i in range(2)]
    runs = [lambda r: (0, 2) if r == 0 else (0,), lambda r: (1,)]
    for i, x in enumerate(batches):
        engine.backward(loss_of(engine, share(x, rank, world_size), runs[i](rank)))
    for i, x in enumerate(batches):
        for r in range(world_size):
            (loss_of(reference, share(x, r, world_size), runs[i](r)) / world_size).backward()
    return farthest(mean_grads(engine), grads(reference))


@world_sizes
def test_a_parameter_used_in_one_micro_batch_only_keeps_its_gradient(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(in_one_micro_batch_only, engine_type, world_size)) <= 1e-12


def partly_frozen(rank, engine_type, world_size):
    """Every weight frozen, every bias trained, as LoRA does."""
    result = []
    for distributed in (True, False):
        model = mlp(4, 5, 6, 3).double()
        for layer in (model[0], model[2], model[4]):
            layer.weight.requires_grad_(False)
        frozen = [layer.weight.clone() for layer in (model[0], model[2], model[4])]
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        trained = wrap(engine_type, model, optimizer) if distributed else model
        if distributed:
            train(trained, 10, rank, world_size)
        else:
            train_alone(model, optimizer, 10)
        assert all(model[i].weight.grad is None for i in (0, 2, 4))
        result.append(weights(trained))
        assert same(frozen, result[-1][::2])
    return distance(*result)


@world_sizes
def test_a_layer_may_be_frozen_in_part(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(partly_frozen, engine_type, world_size)) <= 1e-9


class Tied(nn.Module):
    shape = (4,)

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.head(self.body(self.embed(x)).tanh()))


def tied(rank, engine_type, world_size):
    torch.manual_seed(0)
    model = Tied().double()
    reference = copy.deepcopy(model)
    engine = engine_type(model, sgd(model), bucket_mb=1e-9)
    arrivals = []
    model.embed.weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(p))
    with mz.record_traffic() as traffic:
        train(engine, 1, rank, world_size)
    buckets = {op.unit for op in traffic.ops if op.unit.startswith("bucket")}
    train(engine, 9, rank, world_size, first=1)
    train_alone(reference, sgd(reference), 10)
    return len(arrivals), len(traffic.ops), len(buckets), model.out.weight is model.embed.weight, distance(weights(engine), weights(reference))


@world_sizes
def test_a_tied_weight_is_reduced_once_when_both_its_uses_are_summed(ranks, engine_type, world_size):
    for arrivals, ops, buckets, one, difference in ranks(world_size).run(tied, engine_type, world_size):
        assert arrivals == 10 and one
        expected = (3 + 1, 0) if issubclass(engine_type, mz.Zero3) else (2 * 4 + 1, 4)  # where the model is one unit
        assert (ops, buckets) == (expected if world_size > 1 else (0, 0))
        assert difference <= 1e-9


# --- buffers ------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers that are added to, assigned anew, boolean, and grown from None; each differs from rank to rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("added", torch.zeros(3))
        self.register_buffer("assigned", torch.tensor(0))
        self.register_buffer("flags", torch.tensor([False, False]), persistent=False)
        self.register_buffer("late", None)
        self.seen = []

    def forward(self, x, rank):
        self.seen.append([b.clone() for b in self.buffers()])
        self.added.add_(rank + 1)
        self.assigned = self.assigned + 10 * (rank + 1)
        self.flags = torch.tensor([rank == 0, rank == 1])
        self.late = torch.full((2,), rank, dtype=torch.float16)
        return self.weight * x


def counting(rank, engine_type):
    model = Counting()
    engine = wrap(engine_type, model)
    for _ in range(3):
        engine.backward(engine(torch.ones(2), rank).sum())
        engine.step()
    return [[b.tolist() for b in seen] for seen in model.seen]


@world_sizes
def test_buffers_are_rank_0s_when_a_training_forward_begins_also_those_assigned_anew(ranks, engine_type, world_size):
    for seen in ranks(world_size).run(counting, engine_type):
        assert seen == [
            [[0, 0, 0], 0, [False, False]],
            [[1, 1, 1], 10, [True, False], [0, 0]],
            [[2, 2, 2], 20, [True, False], [0, 0]],
        ]


def batch_norm(rank, engine_type, world_size):
    """Two forwards before one backward: the broadcast before the second must not touch what the first has saved."""
    torch.manual_seed(0)
    model = ConvNet()
    engine = wrap(engine_type, model)
    dtypes = [b.dtype for b in model.buffers()]
    for step in range(10):
        first, second = rows(model, step, 6 * world_size).chunk(2)
        engine.backward(loss_of(engine, share(first, rank, world_size)) + loss_of(engine, share(second, rank, world_size)))
        engine.step()
    statistics = list(model.norm.buffers())
    engine.eval()
    engine.backward(loss_of(engine, rows(model, 0, 4)))  # in eval mode nothing is sent but gradients
    return [b.dtype for b in model.buffers()] == dtypes, model.norm.num_batches_tracked.item(), weights(engine), statistics


@world_sizes
def test_batch_norm_may_see_two_forwards_before_a_backward(ranks, engine_type, world_size):
    results = ranks(world_size).run(batch_norm, engine_type, world_size)
    for dtypes_kept, batches, parameters, _ in results:
        assert dtypes_kept and batches == 20
        assert same(parameters, results[0][2])


# --- accumulation ---------------------------------------------------------------------------------------


def uneven_tokens(rank, engine_type, weighted):
    """Rank 0 has one token, rank 1 five: the whole batch's mean is not the mean of the ranks' means."""
    counts = (1, 5)
    model, reference = mlp(3, 2).double(), mlp(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = x[:1] if rank == 0 else x[1:]
    engine = wrap(engine_type, model)
    loss = engine(mine).square().sum() * 2 / sum(counts) if weighted else engine(mine).square().sum() / len(mine)
    engine.backward(loss)
    (reference(x).square().sum() / 6).backward()
    return farthest(mean_grads(engine), grads(reference))


def test_uneven_token_counts_need_a_sum_and_one_denominator(ranks, engine_type):
    assert max(ranks(2).run(uneven_tokens, engine_type, True)) <= 1e-12
    assert min(ranks(2).run(uneven_tokens, engine_type, False)) > 0.01


def incomplete_window(rank, engine_type):
    model = build("awkward")
    optimizer = sgd(model)
    engine = wrap(engine_type, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    lrs, traffic_of = [], []
    for i in range(7):
        boundary = i % 3 == 2 or i == 6
        with mz.record_traffic() as traffic, contextlib.nullcontext() if boundary else without_sync(engine):
            engine.backward(loss_of(engine, rows(model, i, 4)))
        traffic_of.append(bool(traffic.ops))
        if boundary:
            lrs.append(optimizer.param_groups[0]["lr"])
            assert engine.step()
            scheduler.step()
    return lrs, traffic_of


def test_seven_micro_batches_in_windows_of_three_are_three_updates(ranks, engine_type):
    sends = [False, False, True, False, False, True, True] if engine_type in LOCAL_ENGINES else [True] * 7
    assert ranks(2).run(incomplete_window, engine_type) == [([0.1, 0.05, 0.025], sends)] * 2


# --- clearing gradients -----------------------------------------------------------------------------------

CLEARINGS = {
    f"{who}, set_to_none={to_none}": (who, to_none) for who in ("engine", "module", "optimizer") for to_none in (True, False)
}


def clear(engine, who, to_none):
    {"engine": engine, "module": engine.module, "optimizer": engine.optimizer}[who].zero_grad(set_to_none=to_none)


def cleared_batches(rank, engine_type, world_size, synced):
    """Before every batch that counts, another is computed and cleared away again. By whom, when the weights were wrong after it?"""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine, optimizer = wrap(engine_type, model), sgd(reference)
    for step, (name, clearing) in enumerate(2 * [*CLEARINGS.items()]):
        engine.backward(loss_of(engine, 5 * share(rows(model, 100 + step, 12), rank, world_size)))
        if synced:
            engine.sync_gradients()
        clear(engine, *clearing)
        if step >= len(CLEARINGS):
            clear(engine, *clearing)
        train(engine, 1, rank, world_size, first=step)
        train_alone(reference, optimizer, 1, first=step)
        if not distance(weights(engine), weights(reference)) <= 1e-9:
            return name
    return None


@world_sizes
@pytest.mark.parametrize("synced", [False, True], ids=["", "after sync_gradients"])
def test_an_abandoned_batch_is_cleared_whoever_clears_it(ranks, engine_type, synced, world_size):
    assert ranks(world_size).run(cleared_batches, engine_type, world_size, synced) == [None] * world_size


def cleared_before_the_step(rank, engine_type, synced):
    """The clearings after which a step is not that of plain PyTorch."""
    failed = []
    for name, (who, to_none) in CLEARINGS.items():
        model = build("awkward")
        engine = wrap(engine_type, model, sgd(model, momentum=0.9, weight_decay=0.1))
        before = weights(engine)
        engine.backward(loss_of(engine, rows(model, rank, 4)))
        if synced:
            engine.sync_gradients()
        clear(engine, who, to_none)
        engine.step()
        plain = build("awkward")  # zeros are gradients: they decay
        optimizer = sgd(plain, momentum=0.9, weight_decay=0.1)
        loss_of(plain, rows(plain, 0, 4)).backward()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
        assert same(before, weights(plain)) == to_none
        if not same(weights(engine), weights(plain)):
            failed.append(name)
    return failed


@world_sizes
@pytest.mark.parametrize("synced", [False, True], ids=["", "after sync_gradients"])
def test_gradients_cleared_between_backward_and_step_are_gone(ranks, engine_type, synced, world_size):
    assert ranks(world_size).run(cleared_before_the_step, engine_type, synced) == [[]] * world_size


def clearings_that_fail(rank, engine_type, precision):
    """After one or two backwards, synchronised or not; then a step, with and without another backward before it."""
    failed = []
    for who, to_none, synced, backwards, again in itertools.product(("engine", "module", "optimizer"), (True, False), (False, True), (1, 2), (False, True)):
        model = Lone(torch.ones(70))
        engine = engine_type(model, sgd(model, lr=1.0, weight_decay=0.5), precision=precision, loss_scaler=mz.LossScaler(4.0))
        for _ in range(backwards):
            engine.backward(engine().float().sum() * 3)
        if synced:
            engine.sync_gradients()
        clear(engine, who, to_none)
        if again:
            engine.backward(engine().float().sum() / 4)
        engine.step()
        expected = 1 - 0.25 - 0.5 if again else 1.0 if to_none else 1 - 0.5  # zeros are gradients: they decay
        if engine.state_dict()["weight"].unique().tolist() != [expected]:
            failed.append((who, to_none, synced, backwards, again))
    return failed


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_clearing_is_the_same_by_whom_and_whenever_it_is_done(ranks, engine_type, precision, world_size):
    assert ranks(world_size).run(clearings_that_fail, engine_type, precision) == [[]] * world_size


def edited_gradients(rank, engine_type, world_size, how):
    """Between sync_gradients() and step(), where the optimizer holds them."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(engine_type, model, clip_norm=math.inf)
    engine.backward(loss_of(engine, share(rows(model, 0, 12), rank, world_size)))
    loss_of(reference, rows(reference, 0, 12)).backward()
    engine.sync_gradients()
    for group in engine.optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad.mul_(0.1) if how == "in place" else p.grad * 0.1
    for q in reference.parameters():
        if q.grad is not None:
            q.grad *= 0.1
    engine.step()
    sgd(reference).step()
    norm = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters() if q.grad is not None]).item()
    return distance(weights(engine), weights(reference)), abs(engine.grad_norm - norm)


@world_sizes
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_edits_of_what_the_optimizer_sees_count_for_the_step_and_for_the_norm(ranks, engine_type, how, world_size):
    for difference, norm in ranks(world_size).run(edited_gradients, engine_type, world_size, how):
        assert difference <= 1e-12 and norm <= 1e-12


# --- clipping and skipping --------------------------------------------------------------------------------


def clipped(rank, engine_type, world_size, clip_norm):
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(engine_type, model, clip_norm=clip_norm)
    optimizer = sgd(reference)
    norms = []
    for step in range(10):
        train(engine, 1, rank, world_size, first=step)
        loss_of(reference, rows(reference, step, 12)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        norms.append((engine.grad_norm, norm.item()))
    return distance(weights(engine), weights(reference)), max(abs(a - b) for a, b in norms), [norm for norm, _ in norms]


@world_sizes
@pytest.mark.parametrize("clip_norm", [0.01, 1, 1000.0, math.inf])
def test_clipping_is_by_the_norm_of_the_whole_batchs_gradient(ranks, engine_type, clip_norm, world_size):
    results = ranks(world_size).run(clipped, engine_type, world_size, clip_norm)
    for difference, norm, norms in results:
        assert difference <= 1e-9 and norm <= 1e-9
        assert norms == results[0][2]


def not_finite(rank, engine_type, world_size, clip_norm, value):
    model = build("awkward")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    engine = wrap(engine_type, model, optimizer, clip_norm=clip_norm)
    train(engine, 2, rank, world_size)
    before, state = weights(engine), copy.deepcopy(optimizer.state_dict()["state"])
    loss = loss_of(engine, share(rows(model, 2, 12), rank, world_size))
    engine.backward(loss * (value if rank == world_size - 1 else 1.0))
    updated = engine.step()
    unmoved = same(before, weights(engine)) and all(
        torch.equal(a, b)
        for old, new in zip(state.values(), optimizer.state_dict()["state"].values(), strict=True)
        for a, b in zip(old.values(), new.values(), strict=True)
    )
    norm, cleared = engine.grad_norm, all(p.grad is None for p in model.parameters())
    train(engine, 2, rank, world_size, first=2)
    return updated, unmoved, math.isfinite(norm), cleared, engine.skipped, math.isfinite(engine.grad_norm), weights(engine)


def as_if_never(rank, engine_type, world_size):
    model = build("awkward")
    engine = wrap(engine_type, model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    train(engine, 4, rank, world_size)
    return weights(engine)


@world_sizes
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all_and_moves_nothing(ranks, engine_type, value, world_size):
    expected = ranks(world_size).run(as_if_never, engine_type, world_size)[0]
    for *facts, parameters in ranks(world_size).run(not_finite, engine_type, world_size, math.inf, value):
        assert facts == [False, True, False, True, 1, True]
        assert same(parameters, expected)


def not_finite_without_clip_norm(rank, engine_type):
    model = mlp(3, 2)
    engine = wrap(engine_type, model)
    engine.backward(engine(torch.ones(1, 3)).sum() * (math.nan if rank == 0 else 1.0))
    return engine.step(), engine.skipped, engine.grad_norm, weights(engine)[0].isnan().all().item()


def test_without_clip_norm_it_does_as_plain_pytorch_does(ranks, engine_type):
    assert ranks(2).run(not_finite_without_clip_norm, engine_type) == [(True, 0, None, True)] * 2


def norm_of(rank, engine_type, world_size, name):
    model = build(name)
    engine = wrap(engine_type, model, clip_norm=1.0)
    train(engine, 1, rank, world_size)
    return engine.grad_norm


@pytest.mark.parametrize("name", ["few", "mixed"])
def test_the_norm_is_equal_on_ranks_that_have_hardly_a_gradient(ranks, engine_type, name):
    results = ranks(3).run(norm_of, engine_type, 3, name)
    assert len(set(results)) == 1 and results[0] > 0


# --- optimizers -------------------------------------------------------------------------------------------


def two_groups(model, optimizer_class):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return optimizer_class([{"params": matrices, "lr": 0.02, "weight_decay": 0.1}, {"params": rest}], lr=0.01)


def scheduled(rank, engine_type, world_size, optimizer_class):
    """A scheduler of each group's own, and edits by hand."""
    result = []
    for distributed in (True, False):
        model = build("awkward", torch.float64)
        optimizer = two_groups(model, optimizer_class)
        engine = wrap(engine_type, model, optimizer) if distributed else None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.9**s, lambda s: 1 / (s + 1)])
        for step in range(10):
            if step == 6:
                optimizer.param_groups[0]["weight_decay"] = 0.0
            if distributed:
                train(engine, 1, rank, world_size, first=step)
            else:
                train_alone(model, optimizer, 1, first=step)
            scheduler.step()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        before = weights(engine or model)
        if distributed:
            train(engine, 1, rank, world_size)
            assert same(before, weights(engine))
        result.append(before)
    return distance(*result)


@world_sizes
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_groups_schedulers_and_edits_work_as_they_do_without_an_engine(ranks, engine_type, optimizer_class, world_size):
    assert max(ranks(world_size).run(scheduled, engine_type, world_size, optimizer_class)) <= 1e-9


def late_optimizer(rank, engine_type, world_size):
    """Built, and even stepped, before wrapping; and over a part of the parameters."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    optimizers = [sgd(m, momentum=0.9) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        train_alone(m, optimizer, 2)
    engine = wrap(engine_type, model, optimizers[0])
    train(engine, 8, rank, world_size, first=2)
    train_alone(reference, optimizers[1], 8, first=2)

    part = build("awkward", torch.float64)
    before = part.last.weight.clone()
    partly = wrap(engine_type, part, torch.optim.SGD(part.first.parameters(), lr=0.1), clip_norm=1.0)
    train(partly, 2, rank, world_size)
    with gathered(partly):
        unmoved = torch.equal(before, part.last.weight)
    return distance(weights(engine), weights(reference)), unmoved, part.last.weight.grad is None


@world_sizes
def test_an_optimizer_with_a_past_goes_on_and_one_over_a_part_moves_that_part(ranks, engine_type, world_size):
    for difference, rest_unmoved, cleared in ranks(world_size).run(late_optimizer, engine_type, world_size):
        assert difference <= 1e-9 and rest_unmoved and cleared


def nothing_to_train(rank, engine_type):
    frozen = mlp(3, 2).requires_grad_(False)
    empty = nn.Module()
    empty.w = nn.Parameter(torch.empty(0, 4))
    empty.forward = lambda x: x.sum() + empty.w.sum()
    steps = []
    for model in (frozen, empty):
        engine = engine_type(model, sgd(model), clip_norm=1.0)
        output = engine(torch.ones(2, 3))
        if output.requires_grad:
            engine.backward(output)
        engine.sync_gradients()
        steps.append((engine.step(), engine.grad_norm))
    return steps


@world_sizes
def test_models_with_nothing_to_train_do_nothing(ranks, engine_type, world_size):
    assert ranks(world_size).run(nothing_to_train, engine_type) == [[(True, 0.0)] * 2] * world_size


# --- backward in all its forms ----------------------------------------------------------------------------


def twice(rank, engine_type, world_size, direct):
    """One graph, two backwards, the first without a reduction where the step can."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    x = share(rows(model, 0, 12), rank, world_size)
    loss = loss_of(engine, x)
    if direct:
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        with without_sync(engine):
            loss.backward(retain_graph=True)
        engine.backward(loss)
    for _ in range(2):
        loss_of(reference, rows(model, 0, 12)).backward()
    return farthest(mean_grads(engine), grads(reference))


@world_sizes
@pytest.mark.parametrize("direct", [True, False])
def test_two_backwards_of_one_graph_give_twice_the_gradient(ranks, engine_type, direct, world_size):
    assert max(ranks(world_size).run(twice, engine_type, world_size, direct)) <= 1e-12


def two_losses(rank, engine_type, world_size):
    """Two forwards, then two backwards of which the first does not reach everything."""
    model, reference = build("experts", torch.float64), build("experts", torch.float64)
    engine = wrap(engine_type, model)
    x = rows(model, 0, 12)
    losses = [loss_of(engine, share(x, rank, world_size), order) for order in ((0, 1), (1, 2))]
    losses[0].backward()
    losses[1].backward()
    for order in ((0, 1), (1, 2)):
        loss_of(reference, x, order).backward()
    return farthest(mean_grads(engine), grads(reference))


@world_sizes
def test_two_forwards_may_come_before_two_backwards(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(two_losses, engine_type, world_size)) <= 1e-12


def with_a_penalty(rank, engine_type, world_size):
    """The loss has a term of its own gradient with respect to the input."""
    def penalised(model, x):
        x = x.clone().requires_grad_()
        loss = loss_of(model, x)
        (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        return loss + slope.square().sum(1).mean()

    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine, optimizer = wrap(engine_type, model), sgd(reference)
    for step in range(10):
        x = rows(model, step, 12)
        engine.backward(penalised(engine, share(x, rank, world_size)))
        engine.step()
        penalised(reference, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(weights(engine), weights(reference))


@world_sizes
def test_a_gradient_penalty_by_autograd_grad_is_right(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(with_a_penalty, engine_type, world_size)) <= 1e-9


def with_create_graph(rank, engine_type, world_size):
    model = build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    error = refusal(loss_of(engine, rows(model, 0, 12)).backward, create_graph=True)
    engine.zero_grad()
    train(engine, 10, rank, world_size)
    return error, distance(weights(engine), alone())


@world_sizes
def test_create_graph_is_refused_with_the_cure_and_the_next_step_is_right(ranks, engine_type, world_size):
    for error, difference in ranks(world_size).run(with_create_graph, engine_type, world_size):
        assert error.startswith("RuntimeError: backward(create_graph=True) reached parameter '")
        assert "torch.autograd.grad(…, create_graph=True)" in error
        assert difference <= 1e-9


class Cut(torch.autograd.Function):
    """Hands on its input, and no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def with_undefined_gradients(rank, engine_type, world_size):
    torch.manual_seed(0)
    model = mlp(3, 4, 2).double()
    model.insert(1, nn.Identity())
    model[1].forward = Cut.apply  # the first layer is used, and gets nothing
    reference = copy.deepcopy(model)
    engine = wrap(engine_type, model, sgd(model, momentum=0.9, weight_decay=0.1))
    train(engine, 10, rank, world_size)
    train_alone(reference, sgd(reference, momentum=0.9, weight_decay=0.1), 10)
    return distance(weights(engine), weights(reference))


@world_sizes
def test_a_parameter_to_which_autograd_brings_no_gradient_stays_as_it_is(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(with_undefined_gradients, engine_type, world_size)) <= 1e-9


def with_sparse_gradients(rank, engine_type):
    model = nn.Embedding(10, 4, sparse=True)
    engine = wrap(engine_type, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return refusal(engine.backward, engine(torch.tensor([1, 2])).sum())


def test_a_sparse_gradient_is_refused_on_every_rank(ranks, engine_type):
    for error in ranks(2).run(with_sparse_gradients, engine_type):
        assert error.startswith("RuntimeError: parameter 'weight' has a sparse gradient") and "sparse=False" in error


def optimizing_in_backward(rank, engine_type):
    """A hook that updates with this rank's gradient and drops it would train on this rank alone."""
    model = mlp(3, 2)

    def update(p):
        p.data -= 0.1 * p.grad
        p.grad = None

    model[0].weight.register_post_accumulate_grad_hook(update)
    engine = wrap(engine_type, model)
    return refusal(engine.backward, loss_of(engine, rows(model, rank, 4)))


def test_a_hook_that_takes_a_gradient_away_is_refused(ranks, engine_type):
    for error in ranks(2).run(optimizing_in_backward, engine_type):
        assert error.startswith("RuntimeError: a hook has taken the gradient of parameter '0.weight' away")


def checkpointed_whole(rank, engine_type, world_size, use_reentrant, direct):
    """The whole model in one checkpoint, and in every second step in two."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    for step in range(6):
        calls = 1 + step % 2
        for i in range(2):  # accumulated
            x = share(rows(model, step + 100 * i, 12), rank, world_size).requires_grad_()
            loss = sum(loss_of(lambda x: checkpoint(engine, x, use_reentrant=use_reentrant), x) for _ in range(calls))
            loss.backward() if direct else engine.backward(loss)
            (calls * loss_of(reference, rows(model, step + 100 * i, 12))).backward()
        engine.step()
        sgd(reference).step()
        reference.zero_grad()
    return distance(weights(engine), weights(reference))


@world_sizes
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_whole_engine_may_be_checkpointed_also_twice_in_one_backward(ranks, engine_type, use_reentrant, direct, world_size):
    assert max(ranks(world_size).run(checkpointed_whole, engine_type, world_size, use_reentrant, direct)) <= 1e-9


def blocks_checkpointed(rank, engine_type, world_size, use_reentrant):
    """Called directly, without engine.backward: reentrant checkpoints end backwards of their own inside the backward."""
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant).double()
    reference = copy.deepcopy(model)
    engine = wrap(engine_type, model, sgd(model, lr=0.01))
    for step in range(5):
        for i in range(2):
            loss_of(engine, share(rows(model, step + 100 * i, 12), rank, world_size)).backward()
            loss_of(reference, rows(model, step + 100 * i, 12)).backward()
        engine.step()
        sgd(reference, lr=0.01).step()
        reference.zero_grad()
    return distance(weights(engine), weights(reference))


@world_sizes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_may_be_checkpointed_with_a_direct_backward(ranks, engine_type, use_reentrant, world_size):
    assert max(ranks(world_size).run(blocks_checkpointed, engine_type, world_size, use_reentrant)) <= 1e-9


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    rest: list


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, form, *, scale=1.0):
        y = self.layer(x) * scale
        return {"tuple": (y, 3), "dict": {"y": y, "none": None}, "namedtuple": Pair(y, None), "dataclass": Output(y, [y, 5])}[form]


def nested_outputs(rank, engine_type):
    def tensor_of(output):
        return output.loss if isinstance(output, Output) else next(iter(output.values())) if isinstance(output, dict) else output[0]

    torch.manual_seed(0)
    model = Nested()
    reference = copy.deepcopy(model)
    engine = wrap(engine_type, model)
    types = []
    for form in ("tuple", "dict", "namedtuple", "dataclass"):
        output = engine(torch.full((2, 3), rank + 1.0), form, scale=2.0)
        types.append(type(output))
        engine.backward(tensor_of(output).sum())
        for r in range(2):
            (tensor_of(reference(torch.full((2, 3), r + 1.0), form, scale=2.0)).sum() / 2).backward()
    return types == [tuple, dict, Pair, Output], farthest(mean_grads(engine), grads(reference))


def test_outputs_of_every_form_pass_through_and_keyword_arguments_pass_in(ranks, engine_type):
    for kept, difference in ranks(2).run(nested_outputs, engine_type):
        assert kept and difference <= 1e-6


# --- errors on the way --------------------------------------------------------------------------------------


class Accident(Exception):
    pass


@contextlib.contextmanager
def accident_at(tensor, here=True):
    """A user's hook raises when the gradient of `tensor` has been computed."""
    def raises(gradient):
        raise Accident("in a hook")

    handle = tensor.register_hook(raises) if here else None
    yield
    if handle:
        handle.remove()


def accidents(rank, engine_type, world_size, where, direct):
    """Every second batch ends in an exception, on all ranks but not at the same place, and is given up."""
    model = build("awkward", torch.float64)
    engine = wrap(engine_type, model)
    for step in range(10):
        x = share(rows(model, 100 + step, 12), rank, world_size)
        if where == "forward":
            def fails(*_):
                raise Accident("in forward")

            handle = model.twice.register_forward_hook(fails)
            error = refusal(engine, x)
            handle.remove()
            assert error == "Accident: in forward"
        elif where == "abandoned":
            loss_of(engine, x)
        else:
            loss = loss_of(engine, x)
            spots = {"late": [model.first.weight], "elsewhere": [model.first.weight, loss, model.shift]}[where]
            with accident_at(spots[rank % len(spots)]):
                error = refusal(loss.backward) if direct else refusal(engine.backward, loss)
            assert error == "Accident: in a hook"
            engine.zero_grad()  # as in plain PyTorch, what had arrived by then is there
            if where == "elsewhere" and step % 3 == 2:
                with torch.no_grad():
                    engine(x)
        train(engine, 1, rank, world_size, first=step)
    return distance(weights(engine), alone())


# Elsewhere means that rank 1 raises before any gradient arrives: only engine.backward() knows then that a backward had begun.
@world_sizes
@pytest.mark.parametrize(("where", "direct"), [("forward", False), ("abandoned", False), ("late", False), ("late", True), ("elsewhere", False)])
def test_after_an_exception_in_forward_or_backward_the_next_step_is_right(ranks, engine_type, where, direct, world_size):
    assert max(ranks(world_size).run(accidents, engine_type, world_size, where, direct)) <= 1e-9


def accident_between_micro_steps(rank, engine_type, world_size):
    """The second of three backwards raises before any gradient. As in plain PyTorch, the other two count."""
    model = nn.Linear(3, 1, bias=False).double()
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = weights(engine)
    for x in (1.0, 2.0, 4.0):
        loss = engine(torch.full((1, 3), x * (1 + rank), dtype=torch.float64)).sum()
        with accident_at(loss, here=x == 2):
            refusal(engine.backward, loss)
    engine.step()
    return (before[0] - weights(engine)[0]).flatten().tolist()


@world_sizes
def test_a_backward_that_raises_takes_nothing_from_those_before_and_after(ranks, engine_type, world_size):
    mean = 5.0 * sum(range(1, world_size + 1)) / world_size
    assert ranks(world_size).run(accident_between_micro_steps, engine_type, world_size) == [pytest.approx([mean] * 3)] * world_size


def one_rank_raises(rank, engine_type):
    model = build("awkward")
    engine = wrap(engine_type, model)
    train(engine, 1, rank, 2)
    if rank == 1:
        raise Accident("before backward")
    train(engine, 1, rank, 2)


def test_if_one_rank_raises_the_run_ends_with_its_error(ranks, engine_type):
    with pytest.raises(mz.RankError, match="Accident: before backward") as failure:
        ranks(2).run(one_rank_raises, engine_type)
    assert failure.value.rank == 1 and failure.value.exception_type == "Accident"


def uneven_batches(rank, engine_type):
    engine = wrap(engine_type, build("awkward"))
    train(engine, 3 if rank == 0 else 2, 0, 1)


def test_uneven_numbers_of_batches_are_an_error_and_no_hang(ranks, engine_type):
    with pytest.raises(mz.RanksTimeout, match=r"rank 0 waits in (reduce_scatter .*bucket 0|all_gather .*root).*rank 1 has finished"):
        ranks(2).run(uneven_batches, engine_type)


# --- evaluation, other engines, random numbers -----------------------------------------------------------------


def with_evaluations(rank, engine_type, world_size, mode):
    model = build("awkward", torch.float64)
    model.register_buffer("counter", torch.zeros(3))
    engine = wrap(engine_type, model)
    for step in range(10):
        loss = loss_of(engine, share(rows(model, step, 12), rank, world_size))
        if rank == 0:
            evaluate(engine, mode)
        engine.backward(loss)
        if rank == 0:
            evaluate(engine, mode)
        engine.sync_gradients()
        if rank == 0:
            evaluate(engine, mode)
        engine.step()
    return distance(weights(engine), alone())


def evaluate(engine, mode):
    """On rank 0 alone, and with other inputs."""
    x = rows(engine.module, 500, 3)
    if mode == "eval":
        engine.eval()
        engine(x)
        engine.train()
        return
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        engine(x)


@world_sizes
@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_one_rank_may_evaluate_at_any_time_where_it_has_the_weights(ranks, engine_type, mode, world_size):
    if issubclass(engine_type, mz.Zero3) and world_size > 1:
        with pytest.raises(mz.RankError, match=r"all_gather .*unit root"):
            ranks(world_size).run(with_evaluations, engine_type, world_size, mode)
        return
    assert max(ranks(world_size).run(with_evaluations, engine_type, world_size, mode)) <= 1e-9


def two_players(rank, engine_type, world_size):
    """A generator and a discriminator, each with its engine: the generator's backward passes through the other."""
    def play(wrapped):
        torch.manual_seed(0)
        generator, discriminator = mlp(3, 5, 4).double(), mlp(4, 5, 1).double()
        optimizers = [sgd(generator), sgd(discriminator)]
        g, d = (wrap(engine_type, m, o) for m, o in zip((generator, discriminator), optimizers, strict=True)) if wrapped else (generator, discriminator)
        for step in range(10):
            z, real = rows(generator, step, 12), rows(discriminator, step, 12)
            if wrapped:
                z, real = share(z, rank, world_size), share(real, rank, world_size)
            loss = F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()
            d.backward(loss) if wrapped else loss.backward()
            (d if wrapped else optimizers[1]).step()
            (d if wrapped else optimizers[1]).zero_grad()
            loss = F.softplus(-d(g(z))).mean()
            g.backward(loss) if wrapped else loss.backward()
            (g if wrapped else optimizers[0]).step()
            (g if wrapped else optimizers[0]).zero_grad()
            (d if wrapped else optimizers[1]).zero_grad()
        return [*weights(g), *weights(d)]

    return distance(play(True), play(False))


@world_sizes
def test_two_engines_may_meet_in_one_backward(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(two_players, engine_type, world_size)) <= 1e-9


def with_dropout(rank, engine_type):
    """Each rank draws its own numbers; the weights stay equal, and the gradient is the mean of what each rank has."""
    model = mlp(6, 8).append(nn.Dropout(0.5))
    engine = wrap(engine_type, model)
    torch.manual_seed(rank)
    masks = []
    model[1].register_forward_hook(lambda m, i, output: masks.append(output != 0))
    for step in range(5):
        engine.backward(engine(rows(model, step, 4)).sum())
        engine.step()
    return masks[0], weights(engine)


def test_ranks_may_draw_other_random_numbers(ranks, engine_type):
    (mask, parameters), (other_mask, other_parameters) = ranks(2).run(with_dropout, engine_type)
    assert not torch.equal(mask, other_mask)
    assert same(parameters, other_parameters)


def in_turns(rank, engine_type):
    """A second engine over another model, the first one still alive."""
    first, second = wrap(engine_type, build("awkward", torch.float64)), wrap(engine_type, build("awkward", torch.float64))
    train(first, 5, rank, 2)
    train(second, 10, rank, 2)
    train(first, 5, rank, 2, first=5)
    return distance(weights(first), alone()), same(weights(first), weights(second))


def test_engines_do_not_disturb_each_other(ranks, engine_type):
    for difference, equal in ranks(2).run(in_turns, engine_type):
        assert difference <= 1e-9 and equal


# --- on a GPU -----------------------------------------------------------------------------------------------


def on_a_gpu(rank, engine_type, world_size):
    model = build("awkward", torch.float64).to(mz.device())
    engine = wrap(engine_type, model)
    for step in range(5):
        x = share(rows(model, step, 12), rank, world_size).to(mz.device())
        engine.backward(loss_of(engine, x))
        engine.step()
    return distance([w.cpu() for w in weights(engine)], alone(5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("world_size", "device"), [(1, "cuda"), (2, "cuda:0")], ids=["one rank, NCCL", "two ranks, one GPU, gloo"])
def test_it_trains_on_a_gpu_as_on_the_cpu(engine_type, world_size, device):
    assert max(mz.launch(on_a_gpu, world_size, engine_type, world_size, device=device)) <= 1e-9
