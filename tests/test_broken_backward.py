"""A backward that raises, called on the loss itself: the engine is not there to catch it, and the next step is right."""

import copy

import pytest
import torch
from models import WHOLE_ENGINES, distance, weights
from torch import nn

import minizero as mz

ENGINES = [*WHOLE_ENGINES, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]
every_engine = pytest.mark.parametrize("engine_type", ENGINES)


def chain(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks))), nn.Linear(4, 4)).double()


def batch(step, rank):
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def fails(gradient):
    raise ZeroDivisionError


def loss_that_raises(model, layer, x):
    """Its backward comes to the layer's output, and no further."""
    hook = layer.register_forward_hook(lambda module, args, output: output.register_hook(fails) and None)
    loss = model(x).square().mean()
    hook.remove()
    return loss


def reference(world_size, steps):
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        for rank in range(world_size):
            (model(batch(step, rank)).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def wrapped(engine_type):
    model = chain()
    return engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), **({} if issubclass(engine_type, mz.Zero3) else {"bucket_mb": 1e-4}))


def goes_on(rank, world_size, engine_type, clear):
    engine = wrapped(engine_type)
    for step in (0, 1, 2):
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                loss_that_raises(engine, engine.module[1][1], 100 * batch(9, rank)).backward()
            (engine if clear == "engine" else engine.optimizer).zero_grad()
        engine(batch(step, rank)).square().mean().backward()
        engine.step()
    return distance(weights(engine), reference(world_size, (0, 1, 2)))


def goes_on_after_one_rank_has_failed(rank, world_size, engine_type):
    engine = wrapped(engine_type)
    for step in (0, 1, 2):
        if step == 1:
            if rank == 0:
                loss = loss_that_raises(engine, engine.module[1][1], 100 * batch(9, rank))
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            else:
                engine(batch(9, rank)).square().mean().backward()
            engine.zero_grad()
        engine(batch(step, rank)).square().mean().backward()
        engine.step()
    return distance(weights(engine), reference(world_size, (0, 1, 2)))


@every_engine
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_backward_that_raises_on_one_rank_leaves_no_other_one_waiting(ranks, engine_type, world_size):
    assert max(ranks(world_size).run(goes_on_after_one_rank_has_failed, world_size, engine_type)) <= 1e-12


@every_engine
@pytest.mark.parametrize("clear", ["engine", "optimizer"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_it_has_left_can_be_cleared(ranks, engine_type, clear, world_size):
    assert max(ranks(world_size).run(goes_on, world_size, engine_type, clear)) <= 1e-12


def gradient_asked_for(rank, engine_type):
    engine = wrapped(engine_type)
    engine.backward(engine(batch(0, rank)).square().mean())
    x = batch(1, rank).requires_grad_()
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss_that_raises(engine.eval(), engine.module[1][1], x), x)
    engine.train().step()
    with torch.no_grad():
        engine(x)
    engine.state_dict()
    return distance(weights(engine), reference(2, [0])), [unit.name for unit in engine.units if unit.resident]


@every_engine
def test_a_gradient_that_is_asked_for_and_raises_loses_no_update_and_leaves_nothing_behind(ranks, engine_type):
    for far, resident in ranks(2).run(gradient_asked_for, engine_type):
        assert far <= 1e-12 and resident == []


class Skips(nn.Module):
    """Its parameters have no gradient where it is told so."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.skip = inner, False

    def forward(self, x):
        return x * 1.0 if self.skip else x + self.inner(x)


def skipping(blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Skips(nn.Linear(4, 4)) for _ in range(blocks))).double()


def last_one_skips(rank, engine_type, direct):
    model = skipping()
    alone = copy.deepcopy(model)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[-1].skip = rank == 1
    for step in (0, 1):
        loss = engine(batch(step, rank)).square().mean()
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        for r in (0, 1):
            alone[-1].skip = r == 1
            (alone(batch(step, r)).square().mean() / 2).backward()
        with torch.no_grad():
            for param in alone.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    return distance(weights(engine), [param.detach() for param in alone.parameters()])


@every_engine
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
def test_the_part_to_which_backward_comes_first_may_have_no_gradient_on_one_rank(ranks, engine_type, direct):
    assert max(ranks(2).run(last_one_skips, engine_type, direct)) <= 1e-12
