"""What holds for DDP alone: it works without an optimizer, and each parameter's .grad is the whole mean."""

import math

import pytest
import torch
from models import build, distance, loss_of, mlp, refusal, rows, share, weights
from torch import nn

import minizero as mz

BUCKET_MB = 2e-4  # some 26 numbers in float64: several buckets for most models here

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def alone(steps=10):
    """The weights that a single process has after some steps."""
    model = build("awkward", torch.float64)
    optimizer = sgd(model)
    for step in range(steps):
        loss_of(model, rows(model, step, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def by_hand(rank, world_size, how):
    model = build("awkward", torch.float64)
    engine = mz.DDP(model, bucket_mb=BUCKET_MB)
    optimizer = sgd(model)
    for step in range(10):
        loss = loss_of(engine, share(rows(model, step, 12), rank, world_size))
        loss.backward() if how == "loss.backward" else engine.backward(loss)
        engine.sync_gradients()
        engine.sync_gradients()  # once more does nothing
        optimizer.step()
        optimizer.zero_grad()
    return distance(weights(model), alone())


@world_sizes
@pytest.mark.parametrize("how", ["loss.backward", "engine.backward"])
def test_without_an_optimizer_it_averages_and_the_rest_is_yours(ranks, how, world_size):
    assert max(ranks(world_size).run(by_hand, world_size, how)) <= 1e-9


def steps_by_hand(rank, world_size):
    """Gradients set by hand, on some ranks in some steps; the engine has no optimizer."""
    param = nn.Parameter(torch.zeros(3))
    engine = mz.DDP(nn.ParameterList([param]))
    means = []
    for step in range(4):
        if step != 2 or rank == 0:
            param.grad = torch.full((3,), float(rank + step))
        engine.sync_gradients()
        engine.sync_gradients()  # nothing has changed: nothing happens
        means.append(param.grad[0].item())
        engine.zero_grad()
    return means


@world_sizes
def test_gradients_set_by_hand_are_averaged_in_every_step(ranks, world_size):
    middle = (world_size - 1) / 2
    expected = [middle, middle + 1, 2 / world_size, middle + 3]
    assert ranks(world_size).run(steps_by_hand, world_size) == [pytest.approx(expected)] * world_size


def edited_before_the_step(rank, world_size, how):
    param = nn.Parameter(torch.zeros(3))
    engine = mz.DDP(nn.ParameterList([param]), torch.optim.SGD([param], lr=1.0))
    engine.backward((engine.module[0] * (1.0 + rank)).sum())
    if how == "in place":
        param.grad += 10 * rank
    elif how == "replaced":
        param.grad = param.grad + 10 * rank
    engine.step()
    return -param[0].item()


@world_sizes
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_gradient_edited_between_backward_and_step_is_averaged_once_more(ranks, how, world_size):
    middle = (world_size - 1) / 2
    expected = pytest.approx(1 + middle + 10 * middle)
    assert ranks(world_size).run(edited_before_the_step, world_size, how) == [expected] * world_size


def edited_gradients(rank, world_size, how, when):
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = mz.DDP(model, sgd(model), bucket_mb=BUCKET_MB, clip_norm=math.inf)
    engine.backward(loss_of(engine, share(rows(model, 0, 12), rank, world_size)))
    loss_of(reference, rows(reference, 0, 12)).backward()
    if when == "after sync_gradients":
        engine.sync_gradients()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        if q.grad is None:
            continue
        if how == "in place":
            p.grad.mul_(0.1)
        else:
            p.grad = p.grad * 0.1
        q.grad *= 0.1
    engine.step()
    sgd(reference).step()
    norm = torch.nn.utils.get_total_norm([q.grad for q in reference.parameters() if q.grad is not None]).item()
    return distance(weights(model), weights(reference)), abs(engine.grad_norm - norm)


@world_sizes
@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("when", ["after backward", "after sync_gradients"])
def test_edits_of_a_parameters_gradient_count_for_the_step_and_for_the_norm(ranks, how, when, world_size):
    for difference, norm in ranks(world_size).run(edited_gradients, world_size, how, when):
        assert difference <= 1e-12 and norm <= 1e-12


def nothing_to_train(rank):
    engine = mz.DDP(nn.Sequential(nn.ReLU()))
    engine(torch.ones(2, 3))
    engine.sync_gradients()
    return list(engine.buckets)


def test_a_module_without_parameters_has_nothing_to_average(ranks):
    assert ranks(2).run(nothing_to_train) == [[], []]


def without_an_optimizer(rank):
    engine = mz.DDP(mlp(3, 2))
    engine.backward(loss_of(engine, rows(engine.module, 0, 4)))
    with_one = mz.DDP(mlp(3, 2), None)
    return refusal(engine.step), refusal(engine.optimizer_state_dict), refusal(with_one.step, lambda: 1.0)


def test_a_step_needs_an_optimizer(ranks):
    for step, state, closure in ranks(2).run(without_an_optimizer):
        assert step.startswith("RuntimeError: DDP was built without an optimizer: give it one")
        assert "sync_gradients()" in step
        assert state == step
        assert closure.startswith("TypeError: step() takes no closure")
