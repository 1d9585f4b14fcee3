"""Claim 4: which bytes a rank holds, by kind, to the byte; what it needs above that; and that nothing is left behind."""

import gc
import weakref

import pytest
import torch
from models import Awkward, ConvNet, build, loss_of, mlp, rows, share
from torch import Tensor

import minizero as mz

ENGINES = {mz.DDP: 0, mz.Zero1: 1}  # each step of the course joins here, with its stage
FLOAT = 4  # bytes

pytestmark = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)


def sizes(engine) -> list[int]:
    """Padded elements of each bucket."""
    return [bucket.grad_P.numel() for bucket in engine.buckets]


def numel(model, trainable=False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def gained(m, kind: str) -> int:
    """Bytes of a kind now, less those at entry."""
    curve = m.curve()[1][kind]
    return int(curve[-1] - curve[0])


def extra_peak(m, kind: str) -> int:
    """The most bytes of a kind at any time, less those at entry."""
    curve = m.curve()[1][kind]
    return int(curve.max() - curve[0])


def states(rank, world_size, engine_type, make, bucket_mb, precision=None):
    with mz.record_memory() as m:
        model = make()
        engine = engine_type(model, torch.optim.Adam(model.parameters(), lr=1e-3), bucket_mb=bucket_mb, precision=precision)
        for step in range(3):
            engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
            after_backward = {kind: gained(m, kind) for kind in m.now}
            engine.step()
    flat_weights = [(shard.full_P.numel(), shard.has_master * shard.shard_S.numel()) for shard in engine.weights]
    owned = [state["exp_avg"].numel() for state in engine.optimizer.state.values()]
    return after_backward, model, sum(sizes(engine)), flat_weights, owned


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("bucket_mb", [25, 1e-3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_states_cost_what_the_paper_says_to_the_byte_and_a_step_count_for_each_piece(ranks, engine_type, precision, bucket_mb, world_size):
    """Everything is a multiple of 32 ranks here, so nothing is padding. DDP: 16 bytes a parameter, ZeRO-1: 4 + 12/N."""
    make = lambda: mlp(128, 128, 128)  # noqa: E731
    for held, model, P, _, owned in ranks(world_size).run(states, world_size, engine_type, make, bucket_mb, precision):
        psi = numel(model)
        expected = mz.theory.memory(ENGINES[engine_type], psi, world_size, precision)
        assert P == psi
        assert {kind: held[kind] for kind in ("params", "grads", "comm", "host")} == {
            "params": expected["params"], "grads": expected["grads"], "comm": 0, "host": 0
        }  # fmt: skip
        assert held["optimizer"] == expected["optimizer"] + 4 * len(owned)
        assert held["params"] + held["grads"] + held["optimizer"] - 4 * len(owned) == {
            (mz.DDP, None): 16 * psi,
            (mz.DDP, "bf16"): 16 * psi,
            (mz.Zero1, None): 8 * psi + 8 * psi // world_size,
            (mz.Zero1, "bf16"): 4 * psi + 12 * psi // world_size,
        }[engine_type, precision]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_frozen_parameters_cost_no_gradient_and_no_adam_and_padding_no_moment(ranks, engine_type, world_size, precision):
    results = ranks(world_size).run(states, world_size, engine_type, Awkward, 1e-4, precision)
    for held, model, P, flat_weights, owned in results:
        size = 2 if precision else 4
        frozen = numel(model) - numel(model, trainable=True)
        padded = sum(P for P, _ in flat_weights) or numel(model, trainable=True)  # DDP in fp32 leaves the weights where they are
        assert held["params"] == size * (padded + frozen)
        assert held["grads"] == size * P
        assert held["optimizer"] == 8 * sum(owned) + 4 * len(owned) + 4 * sum(master for _, master in flat_weights)
        if engine_type is mz.Zero1:
            assert padded == P and all(master == (P // world_size if precision else 0) for P, master in flat_weights)
        assert held["comm"] == 0
    used = numel(Awkward(), trainable=True) - 9  # Adam makes no state for what never had a gradient: a Linear(2, 3)
    whole = [sum(owned) for *_, owned in results]
    assert whole == [used] * world_size if engine_type is mz.DDP else sum(whole) == used


def peaks(rank, world_size, engine_type, bucket_mb):
    model = mlp(64, 96, 96, 96, 32)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=bucket_mb)
    x = share(rows(model, 0, 12), rank, world_size)
    with mz.record_memory() as m:
        engine.backward(loss_of(engine, x))
        engine.sync_gradients()
    assert gained(m, "grads") == gained(m, "comm") == 0
    return extra_peak(m, "comm"), extra_peak(m, "grads"), sizes(engine), max(map(numel, model))


@pytest.mark.parametrize("world_size", [2, 3])
def test_above_the_states_it_needs_one_layers_gradients_and_the_receive_buffers_of_two_buckets(ranks, engine_type, world_size):
    for bucket_mb in (1e-9, 0.04, 25):
        for comm, grads, buckets, largest_layer in ranks(world_size).run(peaks, world_size, engine_type, bucket_mb):
            two = max(a + b for a, b in zip(buckets, [*buckets[1:], 0], strict=True))  # one lands while the next leaves
            assert 0 < comm <= FLOAT * two
            assert grads <= FLOAT * largest_layer


def test_a_single_rank_needs_no_buffer_to_communicate(ranks, engine_type):
    assert ranks(1).run(peaks, 1, engine_type, 0.04)[0][0] == 0


def accumulating(rank, engine_type):
    model = mlp(64, 64, 64)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.02)
    with mz.record_memory() as m:
        for _ in range(3):
            with engine.no_sync():
                engine.backward(loss_of(engine, rows(model, 0, 4)))
        return gained(m, "grads")


def test_accumulation_in_no_sync_needs_no_second_copy_of_the_gradients(ranks, engine_type):
    assert ranks(2).run(accumulating, engine_type) == [0, 0]


# --- nothing is left behind ----------------------------------------------------------------------------


def live_bytes() -> int:
    gc.collect()
    storages = {x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)}
    return sum(storage.nbytes() for storage in storages)


def train_long(rank, engine_type, name, precision):
    model = ConvNet() if name == "batchnorm" else build(name)
    engine = engine_type(model, torch.optim.Adam(model.parameters()), bucket_mb=1e-4, clip_norm=1.0, precision=precision)
    live = []
    for step in range(10):
        with engine.no_sync():
            engine.backward(loss_of(engine, rows(model, step, 4)))
        engine.backward(loss_of(engine, rows(model, step, 4)))
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(rows(model, step, 4))
        engine.train()
        live.append(live_bytes())
    return live


@pytest.mark.parametrize(("name", "precision"), [
    ("awkward", None), ("awkward", "bf16"), ("awkward", "fp16"), ("batchnorm", None), ("checkpointed reentrant", None),
])  # fmt: skip
def test_live_tensors_do_not_grow_from_step_to_step(ranks, engine_type, name, precision):
    for live in ranks(2).run(train_long, engine_type, name, precision):
        assert min(live[6:]) <= min(live[2:6])  # the least: gloo's thread may let go of a vote a moment late


def let_go(rank, engine_type, model_first):
    model = Awkward()
    engine = engine_type(model, torch.optim.Adam(model.parameters()), bucket_mb=1e-4)
    for _ in range(2):
        engine.backward(loss_of(engine, rows(model, 0, 4)))
        engine.step()
    alive = {"engine": weakref.ref(engine), "model": weakref.ref(model), "bucket": weakref.ref(engine.buckets[0].grad_P)}
    parameter, hooks_before = model.first.weight, len(model.first.weight._post_accumulate_grad_hooks)
    if model_first:
        del model
    del engine
    if not model_first:
        loss_of(model, rows(model, 0, 4)).backward()  # an engine that is gone reduces no more
        del model
    gc.collect()
    return {what: ref() is not None for what, ref in alive.items()}, hooks_before, len(parameter._post_accumulate_grad_hooks)


@pytest.mark.parametrize("model_first", [False, True])
def test_an_engine_that_is_deleted_is_gone_with_its_buckets_and_hooks(ranks, engine_type, model_first):
    gone = {"engine": False, "model": False, "bucket": False}
    assert ranks(2).run(let_go, engine_type, model_first) == [(gone, 1, 0)] * 2


def wrapped_twice_in_a_row(rank, engine_type):
    model = build("awkward")
    for _ in range(2):
        engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with mz.record_traffic() as traffic:
            engine.backward(loss_of(engine, rows(model, 0, 4)))
        del engine
        sent = [op.unit for op in traffic.ops if op.op == "reduce_scatter"]
    return sent


def test_a_model_may_be_wrapped_again_when_its_engine_is_gone(ranks, engine_type):
    assert ranks(2).run(wrapped_twice_in_a_row, engine_type) == [["bucket 0"]] * 2
