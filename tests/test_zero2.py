"""ZeRO-2's own: gradients that are gone when backward has ended, in all that people do with gradients."""

import copy
import io
import math
import pickle

import pytest
import torch
from models import Lone, build, distance, loss_of, mean_grads, mlp, refusal, rows, same, share, weights
from test_order import ORDERS, events_of
from torch import nn

import minizero as mz

BUCKET_MB = 2e-4

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


def wrap(model, **keywords):
    return mz.Zero2(model, sgd(model), bucket_mb=BUCKET_MB, **keywords)


def backward(engine, step, rank=0, world_size=1):
    engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))


def resident(engine):
    """Bytes of whole gradients, read from the storages."""
    return sum(bucket.grad_P.untyped_storage().nbytes() for bucket in engine.buckets)


# --- when buckets leave -------------------------------------------------------------------------------


def reductions(rank):
    model = mlp(4, 5, 6, 3)
    engine = mz.Zero2(model, sgd(model), bucket_mb=1e-9)
    with events_of(model) as events:
        backward(engine, 0, rank, 2)
    return [(what, unit) for what, unit in events if what in ("reduce_scatter", "wait")]


def test_a_bucket_has_arrived_and_is_freed_before_the_next_one_leaves(ranks):
    one_by_one = [(what, f"bucket {i}") for i in range(6) for what in ("reduce_scatter", "wait")]
    assert ranks(2).run(reductions) == [one_by_one] * 2


def in_another_order_on_each_rank(rank, world_size, orders):
    """Experts that each rank runs in its own order, or not at all: what is full too early waits, and none is left."""
    trained = []
    for engine_type in (mz.DDP, mz.Zero2):
        model = build("experts")
        engine = engine_type(model, sgd(model, momentum=0.9), bucket_mb=1e-9)
        for step in range(6):
            turn = orders[step % 3 :] + orders[: step % 3]
            engine.backward(loss_of(engine, share(rows(model, step, 6), rank, world_size), turn[rank]))
            left = engine_type is mz.Zero2 and resident(engine)
            engine.step()
        trained.append(weights(engine))
    return same(*trained), left


@pytest.mark.parametrize("orders", ["another order", "other experts in another order"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_that_arrive_in_another_order_on_each_rank_give_ddps_bits_and_leave_no_bucket(ranks, orders, world_size):
    assert ranks(world_size).run(in_another_order_on_each_rank, world_size, ORDERS[orders]) == [(True, 0)] * world_size


# --- the gradient that is gone --------------------------------------------------------------------------


def uses_of_a_freed_gradient(rank, precision, synced):
    model = mlp(3, 2)
    engine = wrap(model, precision=precision)
    backward(engine, 0)
    if synced:
        engine.sync_gradients()
    grad = model[0].weight.grad
    errors = {
        "sum": refusal(grad.sum),
        "mul_": refusal(grad.mul_, 2),
        "clone": refusal(grad.clone),
        "numpy": refusal(grad.numpy),
        "norm": refusal(torch.linalg.vector_norm, grad),
        "clip_grad_norm_": refusal(nn.utils.clip_grad_norm_, [model[0].weight], 1.0),
        "all_reduce": refusal(torch.distributed.all_reduce, grad),
        "another optimizer": refusal(torch.optim.SGD([model[0].weight], lr=0.1).step),
    }
    seen = (grad.shape, grad.dtype is model[0].weight.dtype, repr(grad))
    before = weights(engine)
    stepped = engine.step()
    return errors, seen, stepped and not same(before, weights(engine)), model[0].weight.grad is None


@pytest.mark.parametrize("synced", [False, True], ids=["", "after sync_gradients"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_to_read_or_change_a_gradient_after_backward_is_refused_by_name_and_the_step_is_none_the_worse(ranks, precision, synced, world_size):
    for errors, (shape, same_dtype, text), stepped, cleared in ranks(world_size).run(uses_of_a_freed_gradient, precision, synced):
        for use, error in errors.items():
            assert error is not None and error.startswith("RuntimeError: the gradient of parameter '0.weight' has been reduced and freed"), use
            assert "sync_gradients()" in error and "clip_norm" in error
        assert shape == (2, 3) and same_dtype and "'0.weight'" in text
        assert stepped and cleared


def copies(rank):
    """Between backward and step: copies and files have the weights, and no gradient."""
    model = mlp(3, 2)
    engine = wrap(model)
    backward(engine, 0)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    equal = all(same(weights(other), weights(engine)) for other in others)
    for other in others:
        loss_of(other, rows(other, 0, 4)).backward()
    return equal, all(torch.isfinite(p.grad).all().item() for other in others for p in other.parameters())


def test_the_module_can_be_copied_and_saved_between_backward_and_step(ranks):
    assert ranks(2).run(copies) == [(True, True)] * 2


def replaced_by_hand(rank, world_size, precision):
    """After one backward, and after two; the loss scale is of the engine's own losses and not of what is set by hand."""
    moves = []
    for backwards in (1, 2):
        model = Lone(torch.zeros(70))
        engine = mz.Zero2(model, sgd(model, lr=1.0), precision=precision)
        for _ in range(backwards):
            engine.backward(engine().float().sum())
        model.weight.grad = torch.full((70,), 5.0 + rank, dtype=model.weight.dtype)
        engine.step()
        moves.append((-engine.state_dict()["weight"]).unique().tolist())
        engine.backward(engine().float().sum())  # and then as ever
        engine.step()
        moves.append((-engine.state_dict()["weight"]).unique().tolist())
    return moves


@pytest.mark.parametrize("precision", [None, "bf16"])
@world_sizes
def test_a_gradient_set_by_hand_is_this_ranks_whole_gradient_and_is_averaged(ranks, precision, world_size):
    mean = 5 + (world_size - 1) / 2
    for moves in ranks(world_size).run(replaced_by_hand, world_size, precision):
        assert moves == [[mean], [mean + 1]] * 2


def left_from_before(rank):
    """A .grad that was there when the model was wrapped is added to, as in plain PyTorch."""
    model = Lone(torch.zeros(70))
    model.weight.grad = torch.full((70,), 2.0 + rank)
    engine = mz.Zero2(model, sgd(model, lr=1.0))
    engine.backward(engine().sum())
    engine.step()
    return (-weights(engine)[0]).unique().tolist()


def test_a_gradient_from_before_the_wrapping_counts(ranks):
    assert ranks(2).run(left_from_before) == [[3.5], [3.5]]


def engine_gone(rank, numel):
    """Deleted between backward and step. What the model does then without it."""
    model = Lone(torch.zeros(numel))
    engine = mz.Zero2(model, sgd(model))
    engine.backward(engine().sum())
    del engine
    error = refusal((model() * 3).sum().backward) or refusal(lambda: model.weight.grad.sum())
    return error or model.weight.grad.unique().tolist()


@pytest.mark.parametrize("numel", [1, 70])
def test_when_the_engine_is_gone_the_model_trains_alone_or_says_why_not(ranks, numel):
    for outcome in ranks(2).run(engine_gone, numel):
        assert outcome == [3.0] or "parameter 'weight'" in outcome


def wrapped_again(rank, engine_type):
    """The first engine goes between backward and step, and with it the gradient."""
    model = Lone(torch.zeros(70))
    engine = mz.Zero2(model, sgd(model))
    engine.backward(engine().sum())
    del engine
    engine = engine_type(model, sgd(model, lr=1.0))
    engine.backward(engine().sum())
    engine.step()
    return (-weights(engine)[0]).unique().tolist()


@pytest.mark.parametrize("engine_type", [mz.DDP, mz.Zero1, mz.Zero2], ids=lambda engine: engine.__name__)
def test_when_the_engine_is_gone_the_model_can_be_wrapped_again(ranks, engine_type):
    assert ranks(2).run(wrapped_again, engine_type) == [[1.0]] * 2


# --- autograd in all its forms ----------------------------------------------------------------------------


def looked_at(rank, world_size):
    """torch.autograd.grad() with respect to parameters, before and after the backward that counts."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(model)
    x = share(rows(model, 0, 12), rank, world_size)

    def look(module):
        return torch.autograd.grad(loss_of(module, x), [module.get_parameter(name) for name in ("wide", "last.bias")])

    expected = look(reference)
    looks = [look(model)]
    untouched = [model.wide.grad is None]
    backward(engine, 0, rank, world_size)
    gradient = model.wide.grad
    looks.append(look(model))
    untouched.append(model.wide.grad is gradient)
    engine.sync_gradients()
    looks.append(look(model))
    untouched.append(model.wide.grad is gradient)
    engine.step()
    loss_of(reference, rows(model, 0, 12)).backward()
    sgd(reference).step()
    return all(map(same, looks, [expected] * 3)), untouched, distance(weights(engine), weights(reference))


@world_sizes
def test_autograd_grad_gives_this_ranks_gradients_and_changes_nothing(ranks, world_size):
    for right, untouched, difference in ranks(world_size).run(looked_at, world_size):
        assert right and untouched == [True, True, True] and difference <= 1e-12


def hooked(rank, world_size):
    """Hooks of a user's, made before and after the wrapping: on the gradient, and on the parameter when it has one."""
    models = []
    for wrapped in (False, True):
        model = mlp(3, 4, 2).double()
        seen = []

        def note(p, seen=seen):
            seen.append(type(p.grad).__name__)

        def clamp(p):
            p.grad.clamp_(-0.2, 0.2)

        model[0].weight.register_hook(lambda grad: grad * 2)
        model[0].weight.register_post_accumulate_grad_hook(note)
        model[0].weight.register_post_accumulate_grad_hook(clamp)
        engine = wrap(model) if wrapped else model
        model[0].weight.register_hook(lambda grad: grad + 0.1)
        model[0].weight.register_post_accumulate_grad_hook(note)
        if wrapped:
            for step in range(3):
                backward(engine, step, rank, world_size)
                engine.step()
        else:
            for step in range(3):
                for r in range(world_size):  # each rank's gradient goes through the hooks by itself
                    grads = model[0].weight.grad
                    model[0].weight.grad = None
                    (loss_of(model, share(rows(model, step, 12), r, world_size))).backward()
                    model[0].weight.grad = model[0].weight.grad if grads is None else model[0].weight.grad + grads
                for p in model.parameters():
                    p.grad /= world_size
                sgd(model).step()
                model.zero_grad()
        models.append(weights(engine))
    return distance(*models), seen


@world_sizes
def test_a_users_hooks_see_this_ranks_gradient_if_they_were_there_first_and_a_freed_one_if_not(ranks, world_size):
    for difference, seen in ranks(world_size).run(hooked, world_size):
        assert difference <= 1e-12
        assert seen == ["Tensor", "FreedGradient"] * 3


def hook_too_late(rank):
    """Made after the wrapping, a hook would change what is no longer there."""
    model = mlp(3, 2)
    engine = wrap(model)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5) and None)
    return refusal(backward, engine, 0)


def test_a_hook_that_would_change_what_is_gone_is_an_error_that_names_the_parameter(ranks):
    for error in ranks(2).run(hook_too_late):
        assert error.startswith("RuntimeError: the gradient of parameter '0.bias' has been reduced and freed")


def cleared_after_an_accident(rank, spot, direct, who):
    """The second of two micro-steps fails in its backward, at the first gradient or at a later one; all is cleared, and done anew."""
    model, reference = build("awkward", torch.float64), build("awkward", torch.float64)
    engine = wrap(model)

    def raises(gradient):
        raise ZeroDivisionError

    for step in range(3):
        backward(engine, 100 + step, rank, 2)
        loss = loss_of(engine, share(rows(model, 200 + step, 12), rank, 2))
        handle = model.get_parameter(spot).register_hook(raises)
        error = refusal(loss.backward) if direct else refusal(engine.backward, loss)
        handle.remove()
        {"engine": engine, "module": model, "optimizer": engine.optimizer}[who].zero_grad()
        backward(engine, step, rank, 2)
        engine.step()
        loss_of(reference, rows(model, step, 12)).backward()
        sgd(reference).step()
        reference.zero_grad()
    return error, distance(weights(engine), weights(reference))


@pytest.mark.parametrize("who", ["engine", "module", "optimizer"])
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("spot", ["one", "wide"])
def test_after_an_accident_in_a_later_micro_step_everything_can_be_cleared(ranks, spot, direct, who):
    for error, difference in ranks(2).run(cleared_after_an_accident, spot, direct, who):
        assert error == "ZeroDivisionError: "
        assert difference <= 1e-9


# --- accumulation -------------------------------------------------------------------------------------------


def in_micro_steps(rank, world_size, backwards):
    """The mean gradients of three micro-steps, of which the second is of two backwards through one graph or of two losses."""
    model, reference = build("experts", torch.float64), build("experts", torch.float64)
    engine = mz.Zero2(model, sgd(model), bucket_mb=BUCKET_MB)
    for i in range(3):
        x = rows(model, i, 12)
        for m, part, call in ((model, share(x, rank, world_size), engine), (reference, x, reference)):
            back = engine.backward if m is model else torch.Tensor.backward
            if backwards == "one graph twice" and i == 1:
                loss = loss_of(call, part, (0, 1))
                loss.backward(retain_graph=True)
                back(loss)
            elif backwards == "two losses" and i == 1:
                losses = [loss_of(call, part, order) for order in ((0, 1), (1, 2))]
                back(losses[1])
                back(losses[0])
            else:
                back(loss_of(call, part, (i,)))
    left = resident(engine)
    means = mean_grads(engine)
    names = [name for name, p in reference.named_parameters() if p.grad is not None]
    missing = [name for name, p in reference.named_parameters() if p.grad is None and means[name] is not None]
    return distance([means[name] for name in names], [reference.get_parameter(name).grad for name in names]), missing, left


@pytest.mark.parametrize("backwards", ["one graph twice", "two losses"])
@world_sizes
def test_means_of_several_backwards_add_up_and_no_bucket_is_left(ranks, backwards, world_size):
    for difference, missing, left in ranks(world_size).run(in_micro_steps, world_size, backwards):
        assert difference <= 1e-12 and missing == [] and left == 0


def overflow_in_one_micro_step(rank):
    """In fp16, on rank 1 and in the first of two micro-steps; the step is skipped on both, and the next two are good."""
    model = mlp(4, 3)
    engine = mz.Zero2(model, sgd(model), precision="fp16", loss_scaler=mz.LossScaler(2.0**10))
    before = weights(engine)
    history = []
    for step in range(3):
        for micro_step in range(2):
            spike = 2.0**15 if (step, micro_step, rank) == (0, 0, 1) else 1.0
            engine.backward((engine(torch.full((1, 4), 8.0)).float() * spike).sum())
        history.append((engine.step(), engine.loss_scale, math.isfinite(engine.grad_norm), same(before, weights(engine)), resident(engine)))
    return history, engine.grad_norm


def test_an_overflow_in_an_earlier_micro_step_skips_the_step_on_all_ranks_and_leaves_nothing_behind(ranks):
    for history, norm in ranks(2).run(overflow_in_one_micro_step):
        assert history == [(False, 512, False, True, 0), (True, 512, True, False, 0), (True, 512, True, False, 0)]
        assert norm == pytest.approx(16 * math.sqrt(12 + 3 / 64), rel=1e-6)


def clipped_beside_zero1(rank, world_size):
    results = []
    for engine_type in (mz.Zero1, mz.Zero2):
        model = build("awkward")
        engine = engine_type(model, sgd(model), bucket_mb=BUCKET_MB, clip_norm=0.1)
        for step in range(5):
            backward(engine, step, rank, world_size)
            if step == 3:
                backward(engine, 10 + step, rank, world_size)
            engine.step()
        results.append(([engine.grad_norm], weights(engine)))
    return results[0][0] == results[1][0], same(results[0][1], results[1][1])


@world_sizes
def test_clipping_is_zero1s_to_the_bit(ranks, world_size):
    assert ranks(world_size).run(clipped_beside_zero1, world_size) == [(True, True)] * world_size
