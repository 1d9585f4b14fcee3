"""What every engine does around its step: it refuses what would go wrong, follows rank 0, and saves and loads its state."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from models import Awkward, ConvNet, build, gathered, loss_of, mlp, refusal, rows, same, share, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import minizero as mz

ENGINES = [mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]  # each step of the course joins here

pytestmark = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap(engine_type, model, **keywords):
    return engine_type(model, sgd(model), **keywords)


def train(engine, steps, rank=0, world_size=1, first=0):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))
        engine.step()


# --- arguments --------------------------------------------------------------------------------------


def wrong_arguments(rank, engine_type):
    model, other = mlp(3, 2), mlp(3, 2)
    alive = wrap(engine_type, mlp(3, 2))
    lazy = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    sparse = mlp(3, 2)
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    return {
        "no module": refusal(engine_type, lambda x: x, sgd(model)),
        "an engine": refusal(engine_type, alive, sgd(model)),
        "an engine inside": refusal(engine_type, nn.Sequential(nn.Linear(2, 3), alive), sgd(model)),
        "wrapped already": refusal(wrap, engine_type, alive.module),
        "a part of it": refusal(wrap, engine_type, nn.Sequential(nn.Linear(2, 3), alive.module[0])),
        "a lazy module": refusal(engine_type, lazy, sgd(model)),
        "a sparse buffer": refusal(wrap, engine_type, sparse),
        "no optimizer": refusal(engine_type, model, torch.optim.SGD),
        "parameters": refusal(engine_type, model, list(model.parameters())),
        "another model's optimizer": refusal(engine_type, model, sgd(other)),
        "a foreign group": refusal(engine_type, model, torch.optim.SGD([{"params": [p]} for p in (*model.parameters(), other[0].bias)])),
        **{f"clip_norm={c}": refusal(wrap, engine_type, model, clip_norm=c) for c in (0, -1.0, math.nan, "1", True)},
        **{f"bucket_mb={b}": refusal(wrap, engine_type, model, bucket_mb=b) for b in (0, -1, math.nan, "25")},
        "precision": refusal(wrap, engine_type, model, precision="int4"),
    }, refusal(engine_type, model, sgd(model), clip_norm=1, bucket_mb=1)


def test_wrong_arguments_are_refused_with_a_cure_and_leave_nothing_behind(ranks, engine_type):
    name = engine_type.__name__
    for errors, afterwards in ranks(2).run(wrong_arguments, engine_type):
        assert afterwards is None  # the model that was refused can still be wrapped
        expected = {
            "no module": "TypeError: the model must be a torch.nn.Module; got function",
            "an engine": f"TypeError: the model is already wrapped by {name}: wrap its .module once",
            "an engine inside": f"TypeError: '1' inside the model is already wrapped by {name}: wrap the whole model, once",
            "wrapped already": f"ValueError: parameter '0.weight' is already wrapped by a {name} that is still alive",
            "a part of it": f"ValueError: parameter '1.weight' is already wrapped by a {name} that is still alive",
            "a lazy module": "ValueError: parameter '1.weight' has no shape yet",
            "a sparse buffer": "ValueError: 'mask' is sparse, quantised",
            "no optimizer": "TypeError: the optimizer must be a torch.optim.Optimizer",
            "parameters": "TypeError: the optimizer must be a torch.optim.Optimizer",
            "another model's optimizer": "ValueError: the optimizer's group 0 holds 2 tensor(s) that are no parameters of this model",
            "a foreign group": "ValueError: the optimizer's group 2 holds 1 tensor(s) that are no parameters of this model",
        }
        for case, error in errors.items():
            if case.startswith("clip_norm"):
                assert error.startswith("ValueError: clip_norm must be a positive number")
            elif case.startswith("bucket_mb"):
                assert error.startswith("ValueError: bucket_mb must be a positive number of MiB")
            elif case == "precision":
                assert error is not None
            else:
                assert error.startswith(expected[case]), case


def test_without_a_process_group_it_says_how_to_get_one(engine_type):
    with pytest.raises(RuntimeError, match=r"no process group.*mz\.launch"):
        wrap(engine_type, mlp(3, 2))


def sharing_a_frozen_part(rank, engine_type):
    backbone = nn.Linear(3, 2).requires_grad_(False)
    first, second = (nn.Sequential(backbone, nn.Linear(2, 1)) for _ in range(2))
    engine = wrap(engine_type, first)
    return refusal(wrap, engine_type, second), engine.rank


def test_two_models_may_share_what_is_frozen_unless_it_is_sharded(ranks, engine_type):
    for error, _ in ranks(2).run(sharing_a_frozen_part, engine_type):
        if issubclass(engine_type, mz.Zero3):  # the first has freed it
            assert error.startswith("ValueError: parameter '0.weight' is sharded by another engine")
        else:
            assert error is None


def sharing_memory(rank, engine_type):
    def after(change):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        change(model)
        return refusal(wrap, engine_type, model)

    return {
        "data": after(lambda m: setattr(m[1].weight, "data", m[0].weight.data)),
        "a part": after(lambda m: setattr(m[1].bias, "data", m[0].weight.data[1])),
        "a buffer": after(lambda m: m.register_buffer("seen", m[0].weight.detach().t())),
        "neighbours": after(lambda m: [setattr(m[i].bias, "data", both) for i, both in enumerate(torch.zeros(2, 3))]),
        "one object": after(lambda m: setattr(m[1], "weight", m[0].weight)),
    }


def test_what_shares_memory_without_being_one_parameter_is_refused_where_weights_are_moved(ranks, engine_type):
    for errors in ranks(2).run(sharing_memory, engine_type):
        assert errors["neighbours"] is None and errors["one object"] is None
        for case in ("data", "a part", "a buffer"):
            if engine_type is mz.DDP:
                assert errors[case] is None
            else:
                assert errors[case].startswith("ValueError: ") and "share memory" in errors[case] and "'0.weight'" in errors[case]


def with_a_closure(rank, engine_type):
    engine = wrap(engine_type, mlp(3, 2))
    return refusal(engine.step, lambda: 1.0)


def test_a_step_takes_no_closure(ranks, engine_type):
    for error in ranks(2).run(with_a_closure, engine_type):
        assert error.startswith("TypeError: step() takes no closure")


# --- the ranks hold one model -----------------------------------------------------------------------


def different_models(rank, engine_type):
    def odd_one(model, change):
        if rank == 2:
            change(model)
        return refusal(wrap, engine_type, model)

    def swap(model):
        first, second = model._modules.pop("0"), model._modules.pop("1")
        model._modules.update({"1": second, "0": first})

    plain = [
        lambda m: m.__setitem__(0, nn.Linear(3, 7)),
        lambda m: m[2].double(),
        lambda m: m.append(nn.Linear(2, 2)),
        lambda m: m.__delitem__(2),
        lambda m: m[2].bias.requires_grad_(False),
        lambda m: setattr(m[0], "bias", m[2].bias),
        lambda m: m.register_buffer("extra", torch.zeros(3)),
        lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(5, 5).t())),
    ]
    errors = [odd_one(mlp(3, 5, 5), change) for change in plain]
    return [*errors, odd_one(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), swap)]


def test_different_models_give_the_same_error_on_every_rank_naming_the_difference(ranks, engine_type):
    results = ranks(3).run(different_models, engine_type)
    assert results[0] == results[1] == results[2]
    differences = [
        "parameter '0.weight' is float32 [5, 3] on rank 0, float32 [7, 3] on rank 2",
        "parameter '2.weight' is float32 [5, 5] on rank 0, float64 [5, 5] on rank 2",
        "parameter '3.weight' is missing on rank 0, float32 [2, 2] on rank 2",
        "parameter '2.weight' is float32 [5, 5] on rank 0, missing on rank 2",
        "parameter '2.bias' is float32 [5] on rank 0, float32 [5] (frozen) on rank 2",
        "parameter '2.bias' is float32 [5] on rank 0, missing on rank 2",
        "buffer 'extra' is missing on rank 0, float32 [3] on rank 2",
        "parameter '2.weight' is float32 [5, 5] on rank 0, float32 [5, 5] strided [1, 5] on rank 2",
        "rank 2 registers its parameters in another order",
    ]
    assert results[0] == [f"ValueError: the ranks hold different models: {text}" for text in differences]


def from_other_seeds(rank, engine_type):
    torch.manual_seed(rank)
    model = ConvNet()
    model.norm.running_mean.fill_(rank)
    model.norm.num_batches_tracked.fill_(rank)
    model.register_buffer("mask", torch.tensor([rank == 0, True]), persistent=False)
    engine = wrap(engine_type, model)
    return weights(engine), list(model.buffers())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_and_buffers_are_rank_0s_at_the_start(ranks, engine_type, world_size):
    results = ranks(world_size).run(from_other_seeds, engine_type)
    for parameters, buffers in results:
        assert same(parameters, results[0][0]) and same(buffers, results[0][1])
        assert buffers[0].tolist() == [True, True]
        assert buffers[1].tolist() == [0, 0, 0]


def large(rank, engine_type):
    model = nn.Linear(1 << 12, 1 << 11)  # 32 MiB: more than one portion
    nn.init.constant_(model.weight, rank)
    optimizer = sgd(model)
    with mz.record_traffic() as traffic:
        engine = engine_type(model, optimizer)
    return weights(engine)[0].sum().item(), len([op for op in traffic.ops if op.unit == "start"])


def test_a_large_model_follows_rank_0_in_portions(ranks, engine_type):
    assert ranks(2).run(large, engine_type) == [(0, 2), (0, 2)]


# --- changes after wrapping -------------------------------------------------------------------------


def changed_after_wrapping(rank, engine_type):
    def after(change):
        model = build("awkward")
        engine = engine_type(model, sgd(model))
        train(engine, 1)
        return refusal(change, model) or refusal(engine, rows(build("awkward"), 0, 4))

    return {
        "replaced": after(lambda m: setattr(m.first, "weight", nn.Parameter(torch.zeros(5, 3)))),
        "added": after(lambda m: setattr(m, "extra", nn.Linear(2, 2))),
        "untied": after(lambda m: setattr(m.alias, "weight", nn.Parameter(torch.zeros(5, 5)))),
        "unfrozen": after(lambda m: m.frozen.requires_grad_(True)),
        "double": after(lambda m: m.double()),
        "reshaped": after(lambda m: setattr(m.last.weight, "data", torch.zeros(2, 7))),
        "frozen": after(lambda m: m.first.requires_grad_(False)),
        "tied": after(lambda m: setattr(m.twice, "weight", m.tied.weight)),
        "removed": after(lambda m: delattr(m, "unused")),
        "new values": after(lambda m: setattr(m.first.weight, "data", torch.zeros(5, 3))),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_change_after_wrapping_works_or_is_refused_at_the_next_forward_naming_the_parameter(ranks, engine_type, world_size):
    for errors in ranks(world_size).run(changed_after_wrapping, engine_type):
        assert errors["replaced"].startswith("RuntimeError: parameter 'first.weight' was replaced after the model was wrapped")
        assert errors["added"].startswith("RuntimeError: parameter 'extra.weight' was added after the model was wrapped")
        assert errors["untied"].startswith("RuntimeError: parameter 'alias.weight' was added after the model was wrapped")
        assert errors["unfrozen"].startswith("RuntimeError: parameter 'frozen.weight' was frozen when the model was wrapped")
        assert [errors[case] for case in ("frozen", "tied", "removed")] == [None] * 3
        if issubclass(engine_type, mz.Zero3):  # there is nothing to change
            assert all("is freed" in errors[case] for case in ("double", "reshaped", "new values"))
            continue
        assert errors["double"].startswith(
            "RuntimeError: parameter 'scale' was float32 [] on cpu when the model was wrapped and is float64 [] on cpu now")  # fmt: skip
        assert errors["reshaped"].startswith("RuntimeError: parameter 'last.weight' was float32 [1, 7] on cpu")
        assert all("wrap the model in" in errors[case] for case in ("replaced", "added", "untied", "unfrozen", "double", "reshaped"))
        assert errors["new values"] is None


def changed_on_one_rank(rank, engine_type):
    model = build("awkward")
    engine = engine_type(model, sgd(model))
    if rank == 1:
        model.first.weight = nn.Parameter(torch.zeros(5, 3))
    train(engine, 1)


def test_a_change_on_one_rank_is_an_error_of_the_run(ranks, engine_type):
    with pytest.raises(mz.RankError, match="parameter 'first.weight' was replaced") as failure:
        ranks(2).run(changed_on_one_rank, engine_type)
    assert failure.value.rank == 1


def frozen_later(rank, world_size, engine_type):
    """In the middle of training, on all ranks, or on one of them: then the gradient is what the others have."""
    models = {}
    for where in ("nowhere", "everywhere", "on rank 0"):
        model = models[where] = build("awkward", torch.float64)
        engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(engine, 2, rank, world_size)
        if where == "everywhere" or (where == "on rank 0" and rank == 0):
            model.first.weight.requires_grad_(False)
        before = weights(engine)
        train(engine, 2, rank, world_size, first=2)
        which = [name for name, _ in model.named_parameters()].index("first.weight")
        models[where] = torch.equal(before[which], weights(engine)[which]), weights(engine)
    return models


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_frozen_later_stays_as_it_is_and_never_differs_between_ranks(ranks, engine_type, world_size):
    results = ranks(world_size).run(frozen_later, world_size, engine_type)
    for models in results:
        assert models["nowhere"][0] is False
        assert models["everywhere"][0] is True
        assert models["on rank 0"][0] is (world_size == 1)
        assert all(same(models[where][1], results[0][where][1]) for where in models)


# --- a module like any other -------------------------------------------------------------------------


def as_a_module(rank, engine_type):
    model = mlp(3, 2).append(nn.Dropout(0.5))
    engine = engine_type(model, sgd(model))
    modes = [engine.eval().module.training, model[1].training, engine.train().module.training]
    deep = refusal(copy.deepcopy, engine), refusal(copy.copy, engine), refusal(pickle.dumps, engine), refusal(torch.save, engine, io.BytesIO())
    train(engine, 1)
    with gathered(engine):
        average = copy.deepcopy(engine.module)
        torch.save(engine.module, file := io.BytesIO())
    before = weights(average)
    train(engine, 1)
    loss_of(average, rows(average, 0, 4)).backward()  # no hook came along
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    apart = same(before, weights(average)) and same(before, weights(loaded)) and not same(before, weights(engine))
    return engine.module is model, modes, deep, apart, len(list(engine.parameters()))


def test_an_engine_is_a_module_that_cannot_be_copied_though_its_module_can(ranks, engine_type):
    name = engine_type.__name__
    for is_model, modes, deep, apart, count in ranks(2).run(as_a_module, engine_type):
        assert is_model and apart and count == 2
        assert modes == [False, False, True]
        assert deep[0].startswith(f"TypeError: {name} cannot be copied")
        assert "copy.deepcopy(engine.state_dict())" in deep[0]
        assert all(error.startswith(f"TypeError: {name} cannot be pickled") and "engine.state_dict()" in error for error in deep[1:])


def what_it_says_of_itself(rank, engine_type):
    engine = wrap(engine_type, mlp(3, 2), clip_norm=None)
    with engine.gathered():
        total = sum(p.sum() for p in engine.module.parameters())
    with engine.gathered(engine.module[0]):
        pass
    return engine.grad_norm, engine.skipped, engine.loss_scale, torch.isfinite(total).item()


def test_what_an_engine_tells_before_its_first_step(ranks, engine_type):
    assert ranks(1).run(what_it_says_of_itself, engine_type) == [(None, 0, 1.0, True)]


# --- subgroups --------------------------------------------------------------------------------------


def in_groups(rank, engine_type):
    """Two groups of two, each with a model of its own; rank 2 is in neither."""
    groups = [dist.new_group([0, 3]), dist.new_group([1])]
    mine = {0: groups[0], 3: groups[0], 1: groups[1]}.get(rank)
    outside = refusal(wrap, engine_type, mlp(3, 2), group=groups[0]) if rank in (1, 2) else None
    if mine is None:
        return outside, None, None
    torch.manual_seed(rank)
    model = Awkward()
    engine = engine_type(model, sgd(model), group=mine, bucket_mb=1e-4)
    train(engine, 3, engine.rank, engine.world_size)
    return outside, (engine.rank, engine.world_size), weights(engine)


def test_an_engine_of_a_subgroup_trains_within_it_and_ranks_outside_are_refused(ranks, engine_type):
    results = ranks(4).run(in_groups, engine_type)
    assert [place for _, place, _ in results] == [(0, 2), (0, 1), None, (1, 2)]
    assert [error for error, _, _ in results] == [
        None,
        "ValueError: rank 1 is no member of the given group: only its members wrap the model",
        "ValueError: rank 2 is no member of the given group: only its members wrap the model",
        None,
    ]
    assert same(results[0][2], results[3][2])
    assert not same(results[0][2], results[1][2])


# --- the model's state -------------------------------------------------------------------------------


def states_of_the_model(rank, engine_type):
    model = build("awkward")
    model.register_buffer("counter", torch.tensor(rank))
    engine = engine_type(model, sgd(model))
    train(engine, 1)
    saved = copy.deepcopy(engine.state_dict())
    train(engine, 1)
    changed = {name: value + rank for name, value in saved.items()}
    result = engine.load_state_dict(changed)
    fresh = build("awkward", seed=1)
    fresh.register_buffer("counter", torch.tensor(7))
    fresh.load_state_dict(saved)
    partial = engine.load_state_dict({"one": saved["one"]}, strict=False)
    return {
        "names": list(saved) == list(fresh.state_dict()),
        "tied": torch.equal(saved["tied.weight"], saved["alias.weight"]),
        "nothing missing": (result.missing_keys, result.unexpected_keys) == ([], []),
        "rank 0's": all(torch.equal(a, b) for a, b in zip(saved.values(), engine.state_dict().values(), strict=True)),
        "into a plain model": same(weights(fresh), weights(engine)) and fresh.alias.weight is fresh.tied.weight,
        "partly": len(partial.missing_keys) == len(saved) - 1,
        "still trains": refusal(train, engine, 1) is None,
    }, [refusal(engine.load_state_dict, saved, assign=True), refusal(engine.load_state_dict, {"one": saved["one"]})]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_dict_is_the_plain_models_and_loads_rank_0s_values(ranks, engine_type, world_size):
    for facts, errors in ranks(world_size).run(states_of_the_model, engine_type):
        assert facts == dict.fromkeys(facts, True)
        assert errors[0].startswith("ValueError: load_state_dict(assign=True) would replace the wrapped parameters")
        assert errors[1].startswith("RuntimeError: Error(s) in loading state_dict for Awkward")


def loaded_in_between(rank, engine_type, precision):
    model = build("awkward")
    engine = engine_type(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), precision=precision)
    loss = loss_of(engine, rows(model, 0, 4))
    engine.load_state_dict(engine.state_dict())
    return refusal(engine.backward, loss)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_graph_from_before_a_state_was_loaded_is_refused(ranks, engine_type, precision):
    for error in ranks(2).run(loaded_in_between, engine_type, precision):
        assert "has changed since the forward" in error or "modified by an inplace operation" in error


def loading_on_one_rank(rank, engine_type):
    model = build("awkward")
    engine = engine_type(model, sgd(model))
    if rank == 0:
        engine.load_state_dict(engine.state_dict())
    train(engine, 1)


def test_loading_on_one_rank_only_is_an_error_and_no_hang(ranks, engine_type):
    with pytest.raises(mz.RankError, match=r"the ranks issue different collectives.*unit (start|state)"):
        ranks(2).run(loading_on_one_rank, engine_type)


# --- the optimizer's state -----------------------------------------------------------------------------


def groups_of(model):
    """Two groups with settings of their own, and the parameters not in the model's order."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": rest[::-1], "weight_decay": 0.0}, {"params": decay, "lr": 0.02}], lr=0.01)


def states_of_the_optimizer(rank, engine_type):
    model = build("awkward")
    engine = engine_type(model, groups_of(model))
    empty = engine.optimizer_state_dict()["state"]
    train(engine, 2)
    saved = copy.deepcopy(engine.optimizer_state_dict())

    plain = build("awkward")
    plain.load_state_dict(engine.state_dict())
    optimizer = groups_of(plain)
    set_optimizer_state_dict(plain, optimizer, copy.deepcopy(saved), options=StateDictOptions(strict=False))
    theirs = copy.deepcopy(get_optimizer_state_dict(plain, optimizer))

    other = build("awkward")
    again = engine_type(other, groups_of(other))
    again.load_state_dict(plain.state_dict())
    again.load_optimizer_state_dict(theirs)
    train(engine, 2, first=2)
    train(again, 2, first=2)
    return saved, theirs, same(weights(engine), weights(again)), empty


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_optimizers_state_has_the_parameters_names_and_the_form_of_distributed_checkpoint(ranks, engine_type, world_size):
    for saved, theirs, and_back, empty in ranks(world_size).run(states_of_the_optimizer, engine_type):
        assert empty == {}
        assert saved.keys() == {"state", "param_groups"}
        assert [group["params"] for group in saved["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
        assert [group["lr"] for group in saved["param_groups"]] == [0.01, 0.02]
        trained = set(saved["state"])
        expected = {name for name, p in build("awkward").named_parameters() if p.requires_grad and "unused" not in name}
        assert trained - {"empty"} == expected - {"empty"}  # a parameter of no elements needs no state
        for name in trained:
            assert saved["state"][name].keys() == theirs["state"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(saved["state"][name][key], theirs["state"][name][key]) for key in theirs["state"][name])
        assert and_back


def wrong_states(rank, engine_type):
    model = mlp(3, 4, 2)
    engine = engine_type(model, torch.optim.Adam(model.parameters()))
    train(engine, 1)
    state = engine.optimizer_state_dict()
    small = mlp(3, 4)
    other = engine_type(small, torch.optim.Adam(small.parameters()))
    groups = engine_type(twin := mlp(3, 4, 2), torch.optim.Adam([{"params": list(m.parameters())} for m in (twin[0], twin[2])]))
    return refusal(other.load_optimizer_state_dict, state), refusal(groups.load_optimizer_state_dict, state)


def test_a_state_for_other_parameters_or_other_groups_is_refused(ranks, engine_type):
    for others, groups in ranks(1).run(wrong_states, engine_type):
        assert others.startswith("ValueError: the optimizer state is for other parameters than this optimizer's: ['2.bias', '2.weight']")
        assert groups.endswith("the division into groups")


def first_half(rank, world_size, engine_type, steps):
    model = build("awkward", torch.float64)
    engine = engine_type(model, groups_of(model), bucket_mb=3e-4)
    train(engine, steps, rank, world_size)
    return engine.state_dict(), engine.optimizer_state_dict()


def second_half(rank, world_size, engine_type, steps, state, optimizer_state):
    model = build("awkward", torch.float64, seed=1 + rank)
    engine = engine_type(model, groups_of(model), bucket_mb=3e-4)
    engine.load_state_dict(state)
    engine.load_optimizer_state_dict(optimizer_state)
    train(engine, steps, rank, world_size, first=steps)
    return weights(engine)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_saved_at_two_ranks_it_goes_on_at_any_number_as_if_nothing_had_been(ranks, engine_type, world_size):
    without_a_break = ranks(2).run(first_half, 2, engine_type, 6)[0][0]
    state, optimizer_state = ranks(2).run(first_half, 2, engine_type, 3)[0]
    plain = build("awkward", torch.float64)
    plain.load_state_dict(without_a_break)
    for resumed in ranks(world_size).run(second_half, world_size, engine_type, 3, state, optimizer_state):
        difference = max((a - b).abs().max().item() for a, b in zip(weights(plain), resumed, strict=True) if a.numel())
        assert difference <= (0 if world_size == 2 else 1e-9)


def strange_optimizers(rank, engine_type):
    model = torch.nn.Linear(3, 1)
    lbfgs = refusal(engine_type, model, torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_type(model, optimizer)
    no_loss = refusal(engine.backward, None)
    counted = refusal(engine.load_optimizer_state_dict, optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return lbfgs, no_loss, counted, refusal(engine, torch.ones(1, 3)), refusal(engine.step)


def test_what_would_train_on_one_rank_alone_or_not_at_all_is_refused(ranks, engine_type):
    for lbfgs, no_loss, counted, at_forward, at_step in ranks(2).run(strange_optimizers, engine_type):
        assert lbfgs.startswith("ValueError: LBFGS needs a closure")
        assert no_loss.startswith("TypeError: backward() needs the loss")
        assert counted.startswith("ValueError: the optimizer state counts its parameters")
        assert at_forward == at_step and "group 1 holds 1 tensor(s) that are no parameters of this model" in at_step
