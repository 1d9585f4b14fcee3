"""ZeRO-1's own: of a mean gradient a rank keeps its slice and NaN around it; and its update can be had by itself."""

import copy

import pytest
import torch
from models import build, loss_of, mlp, refusal, rows, same, share, weights
from torch import nn

import minizero as mz
from minizero.parts import flat

BUCKET_MB = 5e-4  # 131 floats: several buckets for most models, and several parameters in most buckets

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


# --- what a rank has of a gradient ------------------------------------------------------------------------


def after_backward(rank, world_size):
    """Of a parameter's .grad only this rank's slice is the mean; the rest is NaN, so that whoever takes it for one finds out."""
    model = mlp(9, 7, 5)
    optimizer = sgd(model)
    engine = mz.Zero1(model, optimizer)
    reference = mlp(9, 7, 5)
    engine.backward(loss_of(engine, share(rows(model, 0, 12), rank, world_size)))
    loss_of(reference, rows(model, 0, 12)).backward()
    differences, means = [], 0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        mean = ~p.grad.isnan()
        means += mean.sum().item()
        differences.append(torch.where(mean, p.grad - q.grad, 0).abs().max().item())
    engine.sync_gradients()
    same_bytes = {p.grad.untyped_storage().data_ptr() for p in optimizer.param_groups[0]["params"]}
    in_buckets = same_bytes <= {bucket.grad_P.untyped_storage().data_ptr() for bucket in engine.buckets}
    return max(differences), means, in_buckets, sum(p.numel() for p in model.parameters())


@world_sizes
def test_after_backward_a_rank_has_the_mean_of_its_shard_and_nan_elsewhere(ranks, world_size):
    results = ranks(world_size).run(after_backward, world_size)
    assert sum(means for _, means, _, _ in results) == results[0][3]
    for difference, _, in_buckets, _ in results:
        assert difference <= 1e-6 and in_buckets


# --- the update alone ----------------------------------------------------------------------------------------------


def sharded_beside_plain(rank, world_size, name, optimizer_class, settings):
    """Schedulers, edits by hand and None gradients included."""
    plain, model = build(name), build(name)
    groups = [[{"params": [p for p in m.parameters() if p.dim() > 1], "lr": 0.02}, {"params": [p for p in m.parameters() if p.dim() <= 1]}]
              for m in (plain, model)]  # fmt: skip
    groups = [[group for group in both if group["params"]] for both in groups]
    optimizer = optimizer_class(groups[0], lr=0.01, **settings)
    sharded = mz.ShardedOptimizer(groups[1], optimizer_class, lr=0.01, **settings)
    engines = [mz.DDP(m, bucket_mb=BUCKET_MB) for m in (plain, model)]  # leave the whole mean in each .grad
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, sharded)]
    equal = []
    for step in range(20):
        for engine, o, scheduler in zip(engines, (optimizer, sharded), schedulers, strict=True):
            engine.backward(loss_of(engine, share(rows(plain, step, 12), rank, world_size)))
            engine.sync_gradients()
            if step == 10:
                o.param_groups[0]["weight_decay"] = 0.3
            o.step()
            o.zero_grad()
            scheduler.step()
        equal.append(same(weights(plain), weights(model)))
        if step == 5:  # each goes on with the other's state
            states = [copy.deepcopy(o.state_dict()) for o in (optimizer, sharded)]
            optimizer.load_state_dict(copy.deepcopy(states[1]))
            sharded.load_state_dict(copy.deepcopy(states[0]))
    numels = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    held = sum(value.numel() for state in sharded.optim.state.values() for value in state.values() if torch.is_tensor(value) and value.dim())
    return equal, states, held, sum(numels)


SHARDED = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
}


@pytest.mark.parametrize(("name", "optimizer", "world_size"), [
    *[("awkward", optimizer, n) for optimizer in ("sgd", "adamw") for n in (1, 2, 3, 4)], ("awkward", "rmsprop", 3), *[(name, "adamw", 3) for name in ("few", "strided", "mixed")], ("strided", "sgd", 2),
])  # fmt: skip
def test_a_sharded_optimizer_is_the_unsharded_one_to_the_bit(ranks, name, optimizer, world_size):
    for equal, states, _, _ in ranks(world_size).run(sharded_beside_plain, world_size, name, *SHARDED[optimizer]):
        assert equal == [True] * 20
        ours, theirs = states[1], states[0]
        assert ours["param_groups"] == theirs["param_groups"]
        for index in ours["state"].keys() | theirs["state"].keys():
            if index not in ours["state"]:
                assert all(v.numel() <= 1 for v in theirs["state"][index].values())  # of no elements: a step count at most
                continue
            assert ours["state"][index].keys() == theirs["state"][index].keys()
            assert all(torch.equal(value, theirs["state"][index][key]) for key, value in ours["state"][index].items())


def test_a_sharded_optimizer_holds_its_share_of_the_state(ranks):
    results = ranks(3).run(sharded_beside_plain, 3, "strided", *SHARDED["adamw"])
    held = [held for _, _, held, _ in results]
    assert sum(held) == 2 * results[0][3]
    assert max(held) <= 2 * (results[0][3] / 3 + 2 * 3 * 32)


def sharded_in_all_ways(rank, world_size):
    model = mlp(9, 7, 5)
    model[0].bias.requires_grad_(False)
    torch.manual_seed(rank)
    for p in model.parameters():
        p.data = torch.randn_like(p)
    optimizer = mz.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    start = weights(model)
    x = torch.ones(2, 9)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    returned = optimizer.step(closure).item()
    moved = not torch.equal(start[0], model[0].weight), torch.equal(start[1], model[0].bias)
    errors = {
        "overlap": refusal(mz.ShardedOptimizer, model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1),
        "lbfgs": refusal(mz.ShardedOptimizer, model.parameters(), torch.optim.LBFGS, lr=0.1),
        "group": refusal(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(2))]}),
        "other": refusal(optimizer.load_state_dict, sgd(mlp(3, 2)).state_dict()),
        "setting": refusal(mz.ShardedOptimizer, model.parameters(), torch.optim.SGD, momentun=0.9),
    }
    left = all(p.grad is None for p in optimizer.optim.param_groups[0]["params"])
    return returned, moved, errors, start, weights(model), isinstance(optimizer, torch.optim.Optimizer), left


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_optimizer_follows_rank_0_takes_a_closure_and_refuses_with_a_cure(ranks, world_size):
    results = ranks(world_size).run(sharded_in_all_ways, world_size)
    for returned, moved, errors, start, end, is_optimizer, left in results:
        assert returned > 0 and moved == (True, True) and is_optimizer and left
        assert same(start, results[0][3]) and same(end, results[0][4])
        assert errors["overlap"].startswith("ValueError: overlap_with_ddp=True is not supported")
        assert errors["lbfgs"].startswith("ValueError: LBFGS cannot be sharded")
        assert errors["group"].startswith("ValueError: a ShardedOptimizer takes no group after its start")
        assert errors["other"].startswith("ValueError: the optimizer state is for other groups of parameters")
        assert "momentun" in errors["setting"]


def with_torch_ddp(rank, world_size):
    """In any training loop, for instance torch's own DDP; and clipping by torch's function, since gradients are whole."""
    result = []
    for sharded in (False, True):
        model = build("strided")
        ddp = nn.parallel.DistributedDataParallel(model)
        params = list(model.parameters())
        optimizer = mz.ShardedOptimizer(params, torch.optim.AdamW, lr=0.01) if sharded else torch.optim.AdamW(params, lr=0.01)
        for step in range(5):
            loss_of(ddp, share(rows(model, step, 12), rank, world_size)).backward()
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        result.append(weights(model))
    return same(*result)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sharded_optimizer_works_under_torch_ddp(ranks, world_size):
    assert all(ranks(world_size).run(with_torch_ddp, world_size))


def sharded_traffic(rank, world_size):
    model = build("strided")
    optimizer = mz.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    P = flat.layout(list(reversed(list(model.parameters()))), world_size).P
    loss_of(model, rows(model, 0, 4)).backward()
    with mz.record_traffic() as traffic:
        optimizer.step()
    return [(op.op, op.numel) for op in traffic.ops] == [("all_gather", P)]


def test_a_sharded_optimizers_step_is_an_all_gather_and_nothing_else(ranks):
    assert all(ranks(3).run(sharded_traffic, 3))


def changed_by_hand(rank, precision, when, how):
    """How far the weights move, or the error, if parameters' .grad (not the pieces') is changed between backward and step."""
    model = nn.Linear(8, 8, bias=False)
    engine = mz.Zero1(model, torch.optim.SGD(model.parameters(), lr=1.0), precision=precision)
    engine.backward(engine(torch.ones(1, 8)).float().sum())
    if when == "after sync_gradients()":
        engine.sync_gradients()
    if how == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif how == "replaced":
        model.weight.grad = model.weight.grad / 2
    elif how == "zeroed":
        model.zero_grad(set_to_none=False)
    before = engine.state_dict()["weight"].clone()
    error = refusal(engine.step)
    return error or (engine.state_dict()["weight"] - before).abs().max().item()


@pytest.mark.parametrize("when", ["after backward", "after sync_gradients()"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_only_changes_the_parameters_gradients_is_refused(ranks, precision, when):
    for how in ("clipped", "replaced"):
        for error in ranks(2).run(changed_by_hand, precision, when, how):
            assert error.startswith("RuntimeError: the gradient of parameter 'weight' was changed after backward")
            assert "give Zero1 a clip_norm" in error
    assert ranks(2).run(changed_by_hand, precision, when, "zeroed") == [0.0, 0.0]
    assert ranks(2).run(changed_by_hand, precision, when, "left alone") == [pytest.approx(1.0, abs=0.01)] * 2


def test_a_single_rank_has_whole_gradients_and_they_may_be_changed(ranks):
    assert ranks(1).run(changed_by_hand, None, "after backward", "clipped") == [pytest.approx(1 / 8, rel=1e-4)]
    assert ranks(1).run(changed_by_hand, None, "after backward", "replaced") == [0.5]


def cleared_after_a_direct_backward(rank):
    model = nn.Linear(4, 2)
    engine = mz.Zero1(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp16")
    engine(torch.ones(1, 4)).float().sum().backward()
    refused = refusal(engine.step)
    model.zero_grad()
    return refused, refusal(engine.step)


def test_a_direct_backward_in_fp16_may_be_cleared_in_any_way(ranks):
    for refused, afterwards in ranks(2).run(cleared_after_a_direct_backward):
        assert refused.startswith('RuntimeError: precision="fp16" scales the loss') and afterwards is None
