"""Which optimizers may update pieces of parameters, and how their state is cut and put together again."""

import pytest
import torch
from models import build, distance, loss_of, refusal, rows, same, share, weights
from torch import nn

import minizero as mz
from minizero.parts import comm, optim
from minizero.parts.flat import FlatShard


class Lion(torch.optim.Optimizer):
    """Element-wise, and unknown to the package."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p -= group["lr"] * (momentum * beta1 + p.grad * (1 - beta1)).sign()
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Lamb(torch.optim.Optimizer):
    """The length of a step depends on the norm of its whole tensor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() / p.grad.norm().clamp_min(1e-6) * p.grad


class Normalised(torch.optim.Optimizer):
    """The length of a step depends on the norm over all tensors."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p -= self.param_groups[0]["lr"] * p.grad / norm


class NeedsMatrices(torch.optim.SGD):
    def step(self, closure=None):
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("matrices only")
        super().step(closure)


class HasToKnowSomething(torch.optim.SGD):
    def __init__(self, params, secret):
        super().__init__(params, lr=0.1)


KNOWN = sorted(optim.ELEMENTWISE, key=lambda c: c.__name__)


@pytest.mark.parametrize("optimizer_class", [*KNOWN, Lion, type("MyAdam", (torch.optim.AdamW,), {})], ids=lambda c: c.__name__)
def test_an_optimizer_that_treats_each_element_by_itself_is_taken(monkeypatch, optimizer_class):
    """The known ones too, if they are tried as if they were not known."""
    monkeypatch.setattr(optim, "ELEMENTWISE", set())
    optim.check_elementwise(optimizer_class, optimizer_class([nn.Parameter(torch.ones(1))]).defaults)


@pytest.mark.parametrize("settings", [
    (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}), (torch.optim.SGD, {"maximize": True, "foreach": True}),
])  # fmt: skip
def test_so_are_their_variants(monkeypatch, settings):
    monkeypatch.setattr(optim, "ELEMENTWISE", set())
    optimizer_class, settings = settings
    optim.check_elementwise(optimizer_class, optimizer_class([nn.Parameter(torch.ones(1))], **settings).defaults)


@pytest.mark.parametrize("lr", [1e-2, 1e-6, 0.0])
@pytest.mark.parametrize("optimizer_class", [Lamb, Normalised, torch.optim.Adafactor], ids=lambda c: c.__name__)
def test_an_optimizer_that_looks_at_other_elements_is_refused_whatever_its_lr(optimizer_class, lr):
    optimizer = optimizer_class([nn.Parameter(torch.ones(1))], lr=lr)
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__} cannot be sharded: what it does to an element depends on others"):
        optim.check_elementwise(optimizer_class, optimizer.defaults)


@pytest.mark.parametrize("optimizer_class", [NeedsMatrices, HasToKnowSomething, torch.optim.SparseAdam, torch.optim.LBFGS])
def test_an_optimizer_that_cannot_be_tried_is_refused_with_its_own_error(optimizer_class):
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__} cannot be sharded.*it raised \\w+"):
        optim.check_elementwise(optimizer_class, {"lr": 0.1})


def probing_is_silent(rank):
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    optim.check_elementwise(Lion, {"lr": 0.1, "betas": (0.9, 0.99)})
    return torch.equal(before, torch.get_rng_state())


def test_trying_an_optimizer_draws_no_random_numbers(ranks):
    assert ranks(1).run(probing_is_silent) == [True]


# --- engines with them -----------------------------------------------------------------------------------


def refused_on_all_ranks(rank, optimizer_class):
    model = build("awkward")
    error = refusal(mz.Zero1, model, optimizer_class(model.parameters(), lr=0.1))
    sharded = refusal(mz.ShardedOptimizer, model.parameters(), optimizer_class, lr=0.1)
    accepted = mz.DDP(model, optimizer_class(model.parameters(), lr=0.1))  # and the model can still be wrapped
    return error, sharded, accepted is not None


@pytest.mark.parametrize("optimizer_class", [Lamb, torch.optim.Adafactor], ids=lambda c: c.__name__)
def test_zero1_refuses_it_on_every_rank_and_ddp_takes_it(ranks, optimizer_class):
    for error, sharded, accepted in ranks(2).run(refused_on_all_ranks, optimizer_class):
        assert error == sharded and error.startswith(f"ValueError: {optimizer_class.__name__} cannot be sharded")
        assert "or DDP" in error and accepted


OPTIMIZERS = {
    **{c.__name__: lambda params, c=c: c(params, lr=0.01) for c in [*KNOWN, Lion]},
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "SGD, nesterov": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "Adam, lr in a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
}


def beside_ddp(rank, world_size, make):
    """Both engines with this optimizer; halfway, each goes on with the other's state."""
    results = []
    models = [build("awkward"), build("awkward")]
    engines = [engine(m, make(m.parameters()), bucket_mb=5e-4) for engine, m in zip((mz.DDP, mz.Zero1), models, strict=True)]
    for step in range(8):
        for engine in engines:
            engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))
            engine.step()
        results.append(same(*map(weights, models)))
        if step == 3:
            states = [engine.optimizer_state_dict() for engine in engines]
            for engine, other in zip(engines, reversed(states), strict=True):
                engine.load_optimizer_state_dict(other)
            for name, theirs in states[1]["state"].items():
                ours = states[0]["state"][name]
                assert ours.keys() == theirs.keys()
                for key, value in theirs.items():
                    assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), (name, key)
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_does_the_same_to_shards_and_its_state_goes_from_engine_to_engine(ranks, name):
    for equal in ranks(3).run(beside_ddp, 3, OPTIMIZERS[name]):
        assert equal == [True] * 8


# --- state, cut and put together --------------------------------------------------------------------------


def cut_and_gathered(rank, world_size):
    """A parameter cut by shards, one of one element, one of none, a scalar, and a transposed one."""
    torch.manual_seed(0)
    params = [nn.Parameter(t) for t in (torch.randn(5, 41), torch.randn(1), torch.randn(0, 4), torch.tensor(2.0), torch.randn(7, 9).t())]
    group = comm.default_group()
    shard = FlatShard("bucket 0", params, rank, world_size)
    states = {p: {"step": torch.tensor(3.0 + i), "exp_avg": torch.randn_like(p), "half": torch.randn(p.shape).half(), "note": {"i": i}}
              for i, p in enumerate(params)}  # fmt: skip
    optimizer = torch.optim.SGD(list(shard.pieces.values()) or [torch.zeros(1)], lr=0.1)
    for param, piece in shard.pieces.items():
        optimizer.state[piece] = optim.cut_state(shard, param, states[param])
        assert optimizer.state[piece]["exp_avg"].shape == piece.shape
        assert optimizer.state[piece]["step"].shape == ()
    gathered = optim.gather_state(optimizer, [shard], group)
    assert gathered.keys() == {p for p in params if p.numel()}
    for param, state in gathered.items():
        assert state.keys() == states[param].keys()
        assert state["note"] == states[param]["note"] and state["step"] == states[param]["step"]
        for key in ("exp_avg", "half"):
            assert state[key].dtype is states[param][key].dtype and torch.equal(state[key], states[param][key])
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_that_is_cut_and_gathered_is_the_same_state(ranks, world_size):
    assert all(ranks(world_size).run(cut_and_gathered, world_size))


def repointed(rank, world_size):
    """Groups keep their number, order and settings, also those of which this rank has nothing."""
    model = build("awkward", torch.float64)
    reference = build("awkward", torch.float64)
    params = list(model.parameters())
    make = lambda ps: torch.optim.Adam([{"params": [p], "lr": 0.001 * (i + 1)} for i, p in enumerate(ps)])  # noqa: E731
    optimizers = make(params), make(reference.parameters())
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        for step in range(2):
            loss_of(m, rows(m, step, 12)).backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = mz.Zero1(model, optimizers[0], bucket_mb=5e-4)
    lrs = [group["lr"] for group in optimizers[0].param_groups]
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizers[0].param_groups]
    old = [p for p in params if p in optimizers[0].state]
    for step in range(2, 6):
        engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
        engine.step()
        loss_of(reference, rows(reference, step, 12)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    steps = {state["step"].item() for state in optimizers[0].state.values()}
    return lrs, sizes, old, steps, distance(weights(model), weights(reference))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_that_has_a_state_and_a_group_for_each_parameter_goes_on(ranks, world_size):
    trainable = [p.numel() * p.requires_grad for p in build("awkward").parameters()]
    results = ranks(world_size).run(repointed, world_size)
    assert [sum(sizes) for sizes in zip(*(sizes for _, sizes, *_ in results), strict=True)] == trainable
    for lrs, _, old, steps, difference in results:
        assert lrs == [pytest.approx(0.001 * (i + 1)) for i in range(len(trainable))]
        assert old == [] and steps <= {6.0}
        assert difference <= 1e-9
