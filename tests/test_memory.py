"""Claim 4: which bytes a rank holds, by kind, to the byte; what it needs above that; and that nothing is left behind."""

import gc
import weakref

import pytest
import torch
from models import WHOLE_ENGINES, Awkward, build, loss_of, mlp, refusal, rows, share, without_sync
from torch import Tensor

import minizero as mz

ENGINES = {mz.DDP: 0, mz.Zero1: 1, mz.Zero2: 2, mz.Zero3: 3, mz.Zero3Prefetch: 3}  # each step of the course joins here, with its stage
SHARDS_GRADIENTS = [mz.Zero2, mz.Zero3, mz.Zero3Prefetch]  # and here from ZeRO-2 on
FLOAT = 4  # bytes

every_engine = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)
engines_with_whole_weights = pytest.mark.parametrize("engine_type", WHOLE_ENGINES, ids=lambda engine: engine.__name__)
engines_that_shard_gradients = pytest.mark.parametrize("engine_type", SHARDS_GRADIENTS, ids=lambda engine: engine.__name__)


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
        for step in range(2):
            engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
            after_backward = {kind: gained(m, kind) for kind in m.now}
            engine.step()
    flat_weights = [(shard.layout.P, shard.has_master * shard.shard_S.numel()) for shard in engine.weights]
    owned = [state["exp_avg"].numel() for state in engine.optimizer.state.values()]
    return after_backward, (numel(model), numel(model, trainable=True)), sum(sizes(engine)), flat_weights, owned


@every_engine
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("bucket_mb", [25, 1e-3])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_states_cost_what_the_paper_says_to_the_byte_and_a_step_count_for_each_piece(ranks, engine_type, precision, bucket_mb, world_size):
    """Everything is a multiple of 32 ranks here, so nothing is padding. Bytes a parameter: DDP 16, ZeRO-1 4 + 12/N, ZeRO-2 2 + 14/N,
    ZeRO-3 16/N."""
    make = lambda: mlp(128, 128, 128)  # noqa: E731
    for held, (psi, _), P, _, owned in ranks(world_size).run(states, world_size, engine_type, make, bucket_mb, precision):
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
            (mz.Zero2, None): 4 * psi + 12 * psi // world_size,
            (mz.Zero2, "bf16"): 2 * psi + 14 * psi // world_size,
            (mz.Zero3, None): 16 * psi // world_size,
            (mz.Zero3, "bf16"): 16 * psi // world_size,
        }[mz.Zero3 if issubclass(engine_type, mz.Zero3) else engine_type, precision]


@every_engine
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_frozen_parameters_cost_no_gradient_and_no_adam_and_padding_no_moment(ranks, engine_type, world_size, precision):
    results = ranks(world_size).run(states, world_size, engine_type, Awkward, 1e-4, precision)
    for held, (every, trainable), P, flat_weights, owned in results:
        size = 2 if precision else 4
        frozen = every - trainable
        if issubclass(engine_type, mz.Zero3):
            frozen = -(-(64 + 32) // (32 * world_size)) * 32 * world_size  # 35 and 7 elements, padded as the others are
        padded = sum(P for P, _ in flat_weights) or trainable  # DDP in fp32 leaves the weights where they are
        assert held["params"] == size * (padded + frozen) // (world_size if issubclass(engine_type, mz.Zero3) else 1)
        assert held["grads"] == size * (P // world_size if engine_type in SHARDS_GRADIENTS else P)
        assert held["optimizer"] == 8 * sum(owned) + 4 * len(owned) + 4 * sum(master for _, master in flat_weights)
        if engine_type is not mz.DDP:
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
    assert gained(m, "comm") == 0
    return extra_peak(m, "comm"), extra_peak(m, "grads"), gained(m, "grads"), sizes(engine), max(map(numel, model))


def two(buckets):
    """The largest sum of two neighbours: one is under way while the next one fills, or lands while the next one leaves."""
    return max(a + b for a, b in zip(buckets, [*buckets[1:], 0], strict=True))


@every_engine
@pytest.mark.parametrize("world_size", [2, 3])
def test_above_the_states_it_needs_one_layers_gradients_and_the_buffers_of_one_bucket_or_two(ranks, engine_type, world_size):
    for bucket_mb in (1e-9, 0.04, 25):
        for comm, grads, left, buckets, largest_layer in ranks(world_size).run(peaks, world_size, engine_type, bucket_mb):
            if engine_type in SHARDS_GRADIENTS:
                assert 0 < comm <= FLOAT * max(buckets)
                assert left == FLOAT * sum(buckets) // world_size
                assert grads <= left + FLOAT * (two(buckets) + largest_layer)
            else:
                assert 0 < comm <= FLOAT * two(buckets)
                assert left == 0  # the buckets were there before
                assert grads <= FLOAT * largest_layer


@every_engine
def test_a_single_rank_needs_no_buffer_to_communicate(ranks, engine_type):
    assert ranks(1).run(peaks, 1, engine_type, 0.04)[0][0] == 0


# --- gradients that are sharded ------------------------------------------------------------------------


def bytes_of(engine) -> int:
    """Of all buckets' whole gradients, read from the storages."""
    return sum(bucket.grad_P.untyped_storage().nbytes() for bucket in engine.buckets)


def where_gradients_are(rank, world_size, engine_type, precision):
    """After each of three backwards: the buckets' bytes, and what is alive beyond what is alive without gradients."""
    model = mlp(64, 64, 96, 64)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.02, precision=precision)

    def backward(seed):
        engine.backward(loss_of(engine, share(rows(model, 0, 12, seed=seed), rank, world_size)))

    backward(0)
    engine.step()
    alone, buckets, alive = live_bytes(), [bytes_of(engine)], []
    for i in range(3):
        backward(i)
        buckets.append(bytes_of(engine))
        alive.append(live_bytes() - alone)
    engine.sync_gradients()
    buckets.append(bytes_of(engine))
    engine.step()
    engine.eval()
    with torch.no_grad():
        engine(rows(model, 0, 4))
    return [*buckets, bytes_of(engine)], alive, live_bytes() - alone, sum(sizes(engine))


@engines_that_shard_gradients
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_after_a_backward_a_rank_has_its_shard_and_after_the_second_in_fp32_and_no_whole_bucket(ranks, engine_type, precision, world_size):
    for buckets, alive, after_the_step, P in ranks(world_size).run(where_gradients_are, world_size, engine_type, precision):
        assert set(buckets) == {0}
        shard = P // world_size
        assert alive == [(2 if precision else 4) * shard, 4 * shard, 4 * shard]
        assert after_the_step == 0


def peaks_of_micro_steps(rank, world_size, engine_type):
    model = mlp(64, 96, 96, 96, 32)
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.04)
    x = share(rows(model, 0, 12), rank, world_size)
    with mz.record_memory() as m:
        for _ in range(3):
            engine.backward(loss_of(engine, x))
    return extra_peak(m, "comm"), extra_peak(m, "grads"), gained(m, "grads"), sizes(engine), max(map(numel, model))


@engines_that_shard_gradients
@pytest.mark.parametrize("world_size", [2, 3])
def test_more_micro_steps_need_no_more_than_a_buckets_mean_beside_the_sum(ranks, engine_type, world_size):
    for comm, grads, left, buckets, largest_layer in ranks(world_size).run(peaks_of_micro_steps, world_size, engine_type):
        assert left == FLOAT * sum(buckets) // world_size
        assert comm <= FLOAT * max(buckets)
        assert grads <= left + FLOAT * (two(buckets) + largest_layer + max(buckets) // world_size)


def after_an_exception(rank, engine_type):
    model = build("checkpointed")
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-9)
    loss = loss_of(engine, rows(model, 0, 4))

    def raises(gradient):
        raise ZeroDivisionError

    model.blocks[1][0].weight.register_hook(raises)
    return refusal(engine.backward, loss), bytes_of(engine)


@engines_that_shard_gradients
def test_a_backward_that_raises_leaves_no_bucket(ranks, engine_type):
    assert ranks(2).run(after_an_exception, engine_type) == [("ZeroDivisionError: ", 0)] * 2


def with_late_gradients(rank, engine_type, reason):
    """A gradient that comes when its bucket has left, or is set by hand, needs the bucket again, until it is reduced. Then as ever."""
    model = build("checkpointed reentrant once")
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-9)
    last = {*model.blocks[2].parameters()}
    resident, expected = [], sum(bucket.grad_P.nbytes for bucket in engine.buckets if last & {*bucket.params})
    for step in range(2):
        if reason == "used twice":
            model.uses = 2
        engine.backward(loss_of(engine, rows(model, step, 4)))
        if reason == "set by hand":
            for p in last:
                p.grad = torch.ones(p.shape)
        else:
            resident.append(bytes_of(engine) - expected)
        engine.sync_gradients()
        resident.append(bytes_of(engine))
        engine.step()
        model.uses = 1
        engine.backward(loss_of(engine, rows(model, step, 4)))
        resident.append(bytes_of(engine))
        engine.step()
    return resident


@engines_that_shard_gradients
@pytest.mark.parametrize("reason", ["used twice", "set by hand"])
def test_a_bucket_with_a_late_gradient_stays_until_it_is_reduced_and_no_longer(ranks, engine_type, reason):
    for resident in ranks(2).run(with_late_gradients, engine_type, reason):
        assert set(resident) == {0}


# --- nothing is left behind ----------------------------------------------------------------------------


def live_bytes() -> int:
    gc.collect()
    storages = {x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor)}
    return sum(storage.nbytes() for storage in storages)


def train_long(rank, engine_type, name, precision):
    model = build(name)
    engine = engine_type(model, torch.optim.Adam(model.parameters()), bucket_mb=1e-4, clip_norm=1.0, precision=precision)
    live = []
    for step in range(6):
        with without_sync(engine):
            engine.backward(loss_of(engine, rows(model, step, 4)))
        engine.backward(loss_of(engine, rows(model, step, 4)))
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(rows(model, step, 4))
        engine.train()
        live.append(live_bytes())
    return live


@every_engine
@pytest.mark.parametrize(("name", "precision"), [
    ("awkward", None), ("awkward", "bf16"), ("awkward", "fp16"), ("batchnorm", None), ("checkpointed reentrant", None),
])  # fmt: skip
def test_live_tensors_do_not_grow_from_step_to_step(ranks, engine_type, name, precision):
    for live in ranks(2).run(train_long, engine_type, name, precision):
        assert min(live[4:]) <= min(live[2:4])  # the least: gloo's thread may let go of a vote a moment late


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
        if engine_type in WHOLE_ENGINES:
            loss_of(model, rows(model, 0, 4)).backward()  # an engine that is gone reduces no more
        del model
    gc.collect()
    return {what: ref() is not None for what, ref in alive.items()}, hooks_before, len(parameter._post_accumulate_grad_hooks)


@every_engine
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


@engines_with_whole_weights
def test_a_model_may_be_wrapped_again_when_its_engine_is_gone(ranks, engine_type):
    assert ranks(2).run(wrapped_twice_in_a_row, engine_type) == [["bucket 0"]] * 2
