"""Mixed precision: 16 bits to compute with, fp32 masters to add up in, and a loss scale that all ranks change together."""

import copy
import math
from collections import namedtuple

import pytest
import torch
from models import ConvNet, Lone, build, distance, gathered, loss_of, mlp, refusal, rows, same, share, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import minizero as mz
from minizero.model import GPT, GPTConfig
from minizero.parts.precision import cast, lower

ENGINES = [mz.DDP, mz.Zero1, mz.Zero2, mz.Zero3, mz.Zero3Prefetch, mz.Zero3Offload]  # each step of the course joins here
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_MB = 2e-4

every_engine = pytest.mark.parametrize("engine_type", ENGINES, ids=lambda engine: engine.__name__)
sharded_engines = pytest.mark.parametrize("engine_type", ENGINES[1:], ids=lambda engine: engine.__name__)
both_precisions = pytest.mark.parametrize("precision", DTYPES)


def sgd(model, lr=0.1, **keywords):
    return torch.optim.SGD(model.parameters(), lr=lr, **keywords)


def train(engine, steps, rank=0, world_size=1, first=0):
    for step in range(first, first + steps):
        engine.backward(loss_of(engine, share(rows(engine.module, step, 12), rank, world_size)))
        engine.step()


# --- the loss scale, without any rank -----------------------------------------------------------------

X, g = True, False  # an overflow, a good step
SCHEDULES = {  # settings, what happens, and the scale after each step
    "halved at each overflow": ({}, [X, X, g, X], [32, 16, 16, 8]),
    "doubled after the interval and not a step before": ({"growth_interval": 3}, [g] * 7, [64, 64, 128, 128, 128, 256, 256]),
    "an overflow starts the interval anew": ({"growth_interval": 2}, [g, X, g, g, g, g], [64, 32, 32, 64, 64, 128]),
    "the second overflow counts": ({"hysteresis": 2}, [X, X, X, g, X], [64, 32, 16, 16, 8]),
    "and after growth the next two": ({"growth_interval": 2, "hysteresis": 2},
                                      [X, X, g, g, X, X, X, g], [64, 32, 32, 64, 64, 32, 16, 16]),
    "good steps do not forgive an overflow": ({"hysteresis": 2}, [X, g, g, X], [64, 64, 64, 32]),
    "never below the least": ({"min_scale": 20.0}, [X, X], [32, 20]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_loss_scale_follows_its_table(name):
    settings, flags, expected = SCHEDULES[name]
    scaler = mz.LossScaler(64.0, **settings)
    scales = []
    for overflow in flags:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == expected


def test_an_overflow_at_the_least_scale_is_an_error_that_names_the_cure():
    scaler = mz.LossScaler(2.0)
    scaler.update(overflow=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"overflow at the smallest loss scale, 1.*train in bf16"):
            scaler.update(overflow=True)
    scaler.update(overflow=False)
    assert scaler.scale == 1


def test_a_loss_scaler_goes_on_where_another_was():
    first, second = (mz.LossScaler(64.0, growth_interval=3, hysteresis=2) for _ in range(2))
    for overflow in (X, g, g):
        first.update(overflow)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for overflow in (g, X, X, g, g):
        for scaler in (first, second):
            scaler.update(overflow)
        assert first.scale == second.scale
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("wrong", [
    {"init_scale": 0}, {"init_scale": math.inf}, {"init_scale": math.nan}, {"init_scale": True}, {"init_scale": "8"}, {"min_scale": -1},
    {"growth_interval": 0}, {"growth_interval": 2.5}, {"hysteresis": 0}, {"hysteresis": True}, {"init_scale": 1, "min_scale": 2},
])  # fmt: skip
def test_wrong_settings_of_a_loss_scaler_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mz.LossScaler(**wrong)


# --- what is cast, without any rank -----------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


def test_floating_point_inputs_are_cast_in_nested_containers_and_nothing_else_is():
    x, ids = torch.ones(2), torch.tensor([1, 2])
    inputs = {"list": [x, {"tuple": (x, 3.0)}], "pair": Pair(x.double(), None), "ids": ids, "text": "x", "flag": torch.tensor(True)}
    output = cast(inputs, torch.bfloat16)
    assert output["list"][0].dtype is output["list"][1]["tuple"][0].dtype is output["pair"].first.dtype is torch.bfloat16
    assert output["list"][1]["tuple"][1] == 3.0 and output["text"] == "x" and output["pair"].second is None
    assert output["ids"] is ids and output["flag"].dtype is torch.bool
    assert isinstance(output["pair"], Pair)
    assert cast(inputs, None) is inputs
    half = torch.ones(2, dtype=torch.bfloat16)
    assert cast([half], torch.bfloat16)[0] is half


def test_weights_are_lowered_but_not_those_of_batch_norm_nor_integers_nor_buffers():
    model = ConvNet()
    model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_buffer("mask", torch.ones(3))
    before = lower(model, torch.float16)
    assert {name for name, p in model.named_parameters() if p.dtype is torch.float16} == {"conv.weight", "transposed"}
    assert {p.dtype for p in (model.norm.weight, model.norm.bias, model.mask, model.norm.running_mean)} == {torch.float32}
    assert model.table.dtype is torch.int64
    assert before.keys() == {model.conv.weight, model.transposed}
    assert all(value.dtype is torch.float32 for value in before.values())
    assert lower(model, None) == {}


# --- engines ------------------------------------------------------------------------------------------------


def dtypes(rank, engine_type, precision):
    torch.manual_seed(0)
    model = build("awkward")
    optimizer = torch.optim.Adam(model.parameters())
    engine = engine_type(model, optimizer, precision=precision, bucket_mb=BUCKET_MB)
    output = engine(rows(model, 0, 4))
    engine.backward(output.float().square().mean())
    computing = {p.dtype for p in model.parameters()}
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    engine.sync_gradients()
    masters = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    engine.step()
    moments = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    saved = {value.dtype for value in engine.state_dict().values()}
    return output.dtype, computing, gradients, masters, moments, saved


@every_engine
@both_precisions
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_gradients_and_outputs_have_16_bits_and_what_the_optimizer_holds_has_32(ranks, engine_type, precision, world_size):
    low, full = DTYPES[precision], torch.float32
    for output, computing, gradients, *rest in ranks(world_size).run(dtypes, engine_type, precision):
        assert (output, computing, gradients) == (low, {low}, {low})
        assert all(kinds <= {full} for kinds in rest)


def small_updates(rank, engine_type, precision):
    """Weight 1.0, gradient 1, lr 1e-4, 40 steps: each update is below the 16-bit resolution of the weight."""
    model = Lone(torch.ones(3))
    plain = nn.Parameter(torch.ones(3, dtype=DTYPES[precision]))
    engine = engine_type(model, sgd(model, lr=1e-4), precision=precision, loss_scaler=mz.LossScaler(1024.0))
    optimizer = torch.optim.SGD([plain], lr=1e-4)
    for _ in range(40):
        engine.backward(engine().float().sum())
        engine.step()
        plain.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain.tolist(), weights(engine)[0], engine.state_dict()["weight"]


@every_engine
@both_precisions
@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_too_small_for_16_bits_add_up_in_the_master(ranks, engine_type, precision, world_size):
    for plain, weight, master in ranks(world_size).run(small_updates, engine_type, precision):
        assert plain == [1.0] * 3  # without a master nothing has happened
        assert master.tolist() == pytest.approx([0.996] * 3, abs=1e-5)
        assert torch.equal(weight, master.to(DTYPES[precision]))


def as_a_hand_made_loop(rank, world_size, engine_type, precision):
    """Against masters kept by hand in one process, which computes each rank's share by itself and averages in fp32."""
    model, copy_16 = build("awkward"), build("awkward")
    masters = build("awkward")
    scale = 8.0
    engine = engine_type(model, sgd(model, momentum=0.9, weight_decay=0.1), precision=precision, bucket_mb=BUCKET_MB, clip_norm=0.5,
                         loss_scaler=mz.LossScaler(scale))  # fmt: skip
    scale = scale if precision == "fp16" else 1.0
    dtype = DTYPES[precision]
    optimizer = sgd(masters, momentum=0.9, weight_decay=0.1)
    lower(copy_16, dtype)
    norms = []
    for step in range(5):
        train(engine, 1, rank, world_size, first=step)
        sums = {}
        for r in range(world_size):
            x = share(rows(masters, step, 12), r, world_size).to(dtype)
            (loss_of(copy_16, x).float() * scale).backward()
            for name, p in copy_16.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, 0) + p.grad.float()
            copy_16.zero_grad()
        for name, p in masters.named_parameters():
            p.grad = (sums[name] / world_size).to(dtype).float() / scale if name in sums else None
        norms.append(abs(engine.grad_norm - torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.5).item()))
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(copy_16.parameters(), masters.parameters(), strict=True):
                p.copy_(q)
    saved = engine.state_dict()
    difference = max((saved[name] - p).abs().max().item() for name, p in masters.named_parameters() if p.requires_grad and p.numel())
    return difference, max(norms), same(weights(engine), weights(copy_16))


@every_engine
@both_precisions
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_does_what_masters_kept_by_hand_would_do(ranks, engine_type, precision, world_size):
    for masters, norm, rounded in ranks(world_size).run(as_a_hand_made_loop, world_size, engine_type, precision):
        assert masters <= 1e-6 and norm <= 1e-6 and rounded


def beside_ddp(rank, world_size, precision, name):
    def run(engine_type):
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        engine = engine_type(model, optimizer, precision=precision, bucket_mb=BUCKET_MB)
        train(engine, 10, rank, world_size)
        return list(engine.state_dict().values())

    expected, *others = (run(engine_type) for engine_type in ENGINES)
    return [same(expected, other) for other in others]


@both_precisions
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["awkward", "few", "containers"])
def test_all_engines_have_the_same_masters_to_the_bit(ranks, name, precision, world_size):
    assert ranks(world_size).run(beside_ddp, world_size, precision, name) == [[True] * (len(ENGINES) - 1)] * world_size


def accumulated(rank, engine_type, precision):
    """A large gradient and then 20 that 16 bits would lose when added to it, one by one."""
    model = Lone(torch.zeros(70))
    engine = engine_type(model, sgd(model, lr=1.0), precision=precision, loss_scaler=mz.LossScaler(2.0))
    for i in range(21):
        engine.backward(engine(1.0 if i == 0 else 2.0**-12).float().sum())
    engine.step()
    return -engine.state_dict()["weight"]


@sharded_engines
@both_precisions
@pytest.mark.parametrize("world_size", [1, 2])
def test_means_of_several_backwards_are_added_in_32_bits(ranks, engine_type, precision, world_size):
    for total in ranks(world_size).run(accumulated, engine_type, precision):
        assert total.tolist() == [1 + 20 * 2.0**-12] * 70


# --- overflow --------------------------------------------------------------------------------------------------


class Spiky(nn.Module):
    """Its output's gradient with respect to the very last element can be made infinite."""

    shape = (4,)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(3))  # its bucket is the last
        self.layer = nn.Linear(4, 33)

    def forward(self, x, spike=1.0):
        y = self.layer(x)
        return torch.cat([y[:, :-1], y[:, -1:] * spike], 1) + self.first.sum()


def overflowing(rank, world_size, engine_type):
    """Steps 1 and 3 overflow, on the last rank, in the last element of the first bucket."""
    model = Spiky()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    engine = engine_type(model, optimizer, precision="fp16", loss_scaler=mz.LossScaler(2.0**10))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    history = []
    for step in range(5):
        spike = 2.0**15 if step in (1, 3) and rank == world_size - 1 else 1.0
        before = copy.deepcopy((list(engine.state_dict().values()), weights(engine), optimizer.state_dict()["state"]))
        engine.backward(engine(torch.full((1, 4), 8.0), spike).float().sum())
        if engine.step():
            scheduler.step()
        after = list(engine.state_dict().values()), weights(engine), optimizer.state_dict()["state"]
        moved = not same(before[0], after[0]), not same(before[1], after[1])
        states_moved = repr(before[2]) != repr(after[2])
        history.append((moved, states_moved, engine.loss_scale, engine.skipped, optimizer.param_groups[0]["lr"], math.isfinite(engine.grad_norm)))
    return history, [p.isfinite().all().item() for p in weights(engine)], any(p.grad is not None for p in model.parameters())


@every_engine
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_overflow_in_one_element_on_one_rank_skips_the_step_on_all_halves_the_scale_and_moves_nothing(ranks, engine_type, world_size):
    results = ranks(world_size).run(overflowing, world_size, engine_type)
    for history, finite, left in results:
        assert [moved == (True, True) for moved, *_ in history] == [True, False, True, False, True]
        assert [moved == (False, False) for moved, *_ in history] == [False, True, False, True, False]
        assert [scale for _, _, scale, *_ in history] == [1024, 512, 512, 256, 256]
        assert [skipped for *_, skipped, _, _ in history] == [0, 1, 1, 2, 2]
        assert [lr for *_, lr, _ in history] == [0.05, 0.05, 0.025, 0.025, 0.0125]
        assert [sound for *_, sound in history] == [True, False, True, False, True]
        assert all(finite) and not left
    for step in (1, 3):
        assert not any(history[step][1] for history, _, _ in results)  # no state and no step count
    assert any(history[0][1] for history, _, _ in results)


def at_the_least_scale(rank, engine_type):
    model = Spiky()
    engine = engine_type(model, sgd(model), precision="fp16", loss_scaler=mz.LossScaler(1.0))
    before = weights(engine)
    engine.backward(engine(torch.full((1, 4), 8.0), 2.0**15 if rank == 1 else 1.0).float().sum() * 2)
    error = refusal(engine.step)
    unmoved = same(before, weights(engine))
    engine.backward(engine(torch.ones(1, 4)).float().sum())
    return error, unmoved, engine.step(), engine.skipped


@every_engine
def test_an_overflow_at_the_least_scale_raises_on_every_rank_and_moves_nothing(ranks, engine_type):
    for error, unmoved, updated, skipped in ranks(2).run(at_the_least_scale, engine_type):
        assert error.startswith("RuntimeError: gradients overflow at the smallest loss scale, 1")
        assert unmoved and updated and skipped == 1


def direct_backward(rank, world_size, engine_type, precision):
    model = build("awkward")
    engine = engine_type(model, sgd(model), precision=precision, bucket_mb=BUCKET_MB)
    before = weights(engine)
    loss_of(engine, share(rows(model, 0, 12), rank, world_size)).backward()
    error = refusal(engine.step)
    unmoved = same(before, weights(engine))
    engine.zero_grad()
    train(engine, 3, rank, world_size, first=1)
    other = build("awkward")
    train(engine_other := engine_type(other, sgd(other), precision=precision, bucket_mb=BUCKET_MB), 3, rank, world_size, first=1)
    return error, unmoved, same(*(list(e.state_dict().values()) for e in (engine, engine_other)))


@every_engine
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_direct_backward_in_fp16_is_refused_in_step_and_can_be_cleared(ranks, engine_type, world_size):
    for error, unmoved, as_if_never in ranks(world_size).run(direct_backward, world_size, engine_type, "fp16"):
        assert error.startswith('RuntimeError: precision="fp16" scales the loss, and loss.backward() was called directly')
        assert "engine.backward(loss)" in error and unmoved and as_if_never


@every_engine
def test_a_direct_backward_in_bf16_counts(ranks, engine_type):
    for error, unmoved, as_if_never in ranks(2).run(direct_backward, 2, engine_type, "bf16"):
        assert error is None and not unmoved and not as_if_never


def with_a_scaler_that_is_not_used(rank, engine_type):
    model = build("awkward")
    engine = engine_type(model, sgd(model), precision="bf16", loss_scaler=mz.LossScaler(2.0**16))
    train(engine, 3)
    other = build("awkward")
    plain = engine_type(other, sgd(other), precision="bf16")
    train(plain, 3)
    return engine.loss_scale, engine.loss_scaler, same(weights(engine), weights(plain))


@every_engine
def test_in_bf16_nothing_is_scaled_whatever_scaler_is_given(ranks, engine_type):
    assert ranks(1).run(with_a_scaler_that_is_not_used, engine_type) == [(1.0, None, True)]


def wrong_precision(rank, engine_type):
    model = mlp(3, 2)
    return [refusal(engine_type, model, sgd(model), precision="int4"),
            refusal(engine_type, model, sgd(model), precision="fp16", loss_scaler=1024),
            refusal(mz.DDP, model, precision="fp16"),
            refusal(engine_type, model, sgd(model), precision="fp16")]  # fmt: skip


@every_engine
def test_wrong_precisions_are_refused_and_leave_the_model_as_it_was(ranks, engine_type):
    for which, scaler, alone, afterwards in ranks(1).run(wrong_precision, engine_type):
        assert which.startswith("ValueError: precision='int4': choose one of None, 'bf16', 'fp16'")
        assert scaler.startswith("TypeError: loss_scaler must be a minizero.LossScaler")
        assert alone.startswith('ValueError: precision="fp16" needs the optimizer')
        assert afterwards is None


def gradients_that_vanish(rank, engine_type, init_scale):
    """A gradient of 1e-8 is zero in fp16, unless the loss is scaled."""
    model = Lone(torch.ones(3))
    engine = engine_type(model, sgd(model, lr=1e6), precision="fp16", loss_scaler=mz.LossScaler(init_scale))
    engine.backward(engine(1e-4).float().sum() * 1e-4)
    engine.step()
    return 1 - engine.state_dict()["weight"][0].item(), engine.grad_norm


@every_engine
def test_a_small_gradient_survives_in_fp16_because_the_loss_is_scaled(ranks, engine_type):
    for moved, norm in ranks(2).run(gradients_that_vanish, engine_type, 1.0):
        assert moved == norm == 0
    for moved, norm in ranks(2).run(gradients_that_vanish, engine_type, 2.0**16):
        assert moved == pytest.approx(0.01, rel=2e-3)
        assert norm == pytest.approx(math.sqrt(3) * 1e-8, rel=2e-3)


def edited(rank, world_size, engine_type, precision):
    """What the optimizer sees is unscaled, and what is written there counts, for the norm too."""
    model = build("awkward")
    engine = engine_type(model, sgd(model), precision=precision, clip_norm=math.inf, bucket_mb=BUCKET_MB)
    engine.backward(loss_of(engine, share(rows(model, 0, 12), rank, world_size)))
    engine.sync_gradients()
    seen = [p.grad for group in engine.optimizer.param_groups for p in group["params"] if p.grad is not None]
    largest = max((grad.abs().max().item() for grad in seen), default=0.0)
    count = sum(grad.numel() for grad in seen)
    for grad in seen:
        grad.fill_(0.5)
    before = list(engine.state_dict().values())
    engine.step()
    moved = sorted({round((a - b).max().item(), 4) for a, b in zip(before, engine.state_dict().values(), strict=True) if a.numel()})
    return largest, count, engine.grad_norm, moved


@every_engine
@both_precisions
@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_after_sync_gradients_are_of_unscaled_gradients_and_count(ranks, engine_type, precision, world_size):
    results = ranks(world_size).run(edited, world_size, engine_type, precision)
    count = results[0][1] if engine_type is mz.DDP else sum(count for _, count, _, _ in results)
    for largest, _, norm, moved in results:
        assert largest < 10
        assert norm == pytest.approx(math.sqrt(0.25 * count), rel=1e-12)
        assert moved == [0.0, 0.05]  # nothing, or lr times the edit


# --- buffers, frozen weights, checkpoints ------------------------------------------------------------------------


def batch_norm(rank, world_size, engine_type, precision):
    torch.manual_seed(0)
    model = ConvNet()
    reference = copy.deepcopy(model)
    buffers = [b.dtype for b in model.buffers()]
    engine = engine_type(model, sgd(model, lr=0.01), precision=precision, bucket_mb=BUCKET_MB)
    plain = engine_type(reference, sgd(reference, lr=0.01), bucket_mb=BUCKET_MB)
    train(engine, 2, rank, world_size)
    train(plain, 2, rank, world_size)
    near = distance([b.float() for b in model.norm.buffers()], [b.float() for b in reference.norm.buffers()])
    return [b.dtype for b in model.buffers()] == buffers, {p.dtype for p in model.norm.parameters()}, near


@every_engine
@both_precisions
def test_batch_norms_statistics_keep_their_dtypes_and_are_near_those_of_fp32(ranks, engine_type, precision):
    for kept, norm_weights, near in ranks(2).run(batch_norm, 2, engine_type, precision):
        assert kept and norm_weights == {torch.float32}
        assert near < 0.01


def frozen_in_16_bits(rank, engine_type):
    model = build("awkward")
    exact = model.frozen.weight.detach().clone()
    engine = engine_type(model, sgd(model), precision="bf16")
    train(engine, 2)
    saved = engine.state_dict()["frozen.weight"]
    new = {**engine.state_dict(), "frozen.weight": torch.full((7, 5), 1.25)}
    engine.load_state_dict(new)
    with gathered(engine):
        return model.frozen.weight.dtype, torch.equal(saved, exact.bfloat16().float()), model.frozen.weight.float().sum().item()


@every_engine
def test_frozen_weights_compute_in_16_bits_too_and_are_saved_in_their_own_dtype(ranks, engine_type):
    assert ranks(2).run(frozen_in_16_bits, engine_type) == [(torch.bfloat16, True, 1.25 * 35)] * 2


def checkpointed(rank, world_size, engine_type, use_reentrant):
    """A whole engine in a checkpoint: the second forward, inside backward, must cast the same."""
    result = []
    for checkpointing in (False, True):
        model = build("awkward")
        engine = engine_type(model, sgd(model), precision="bf16", bucket_mb=BUCKET_MB)
        for step in range(3):
            x = share(rows(model, step, 12), rank, world_size).requires_grad_()
            call = (lambda x: checkpoint(engine, x, use_reentrant=use_reentrant)) if checkpointing else engine  # noqa: B023
            engine.backward(loss_of(call, x))
            engine.step()
        result.append(list(engine.state_dict().values()))
    return same(*result)


@every_engine
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing_in_bf16(ranks, engine_type, use_reentrant):
    assert ranks(2).run(checkpointed, 2, engine_type, use_reentrant) == [True, True]


# --- loading and saving --------------------------------------------------------------------------------------------


def loaded_weights(rank, engine_type, precision, how):
    """New weights, and a step with lr=0: the masters must be the new ones."""
    model = build("awkward")
    engine = engine_type(model, sgd(model, lr=0.1), precision=precision, bucket_mb=BUCKET_MB)
    train(engine, 2)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    new = {name: value + 0.125 for name, value in build("awkward", seed=5).state_dict().items()}
    if how == "engine":
        engine.load_state_dict(new)
    with gathered(engine):
        if how == "module":
            model.load_state_dict(new)
        elif how == "data":
            for name, p in model.named_parameters():
                p.data = new[name].clone().to(p.dtype)
    train(engine, 1)
    saved = copy.deepcopy(engine.state_dict())
    dtype = DTYPES[precision] if precision else torch.float32
    kept = all(torch.equal(p, new[name].to(dtype)) for p, (name, _) in zip(weights(engine), model.named_parameters(), strict=True))
    exactly = all(torch.equal(saved[name], new[name] if how == "engine" else new[name].to(dtype).float())
                  for name, p in model.named_parameters() if p.requires_grad)  # fmt: skip
    engine.optimizer.param_groups[0]["lr"] = 0.1
    train(engine, 1)
    moved = not torch.equal(engine.state_dict()["first.weight"], saved["first.weight"])
    return kept, exactly, moved


@every_engine
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("how", ["engine", "module", "data"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_loaded_stay_loaded_and_train_on(ranks, engine_type, how, precision, world_size):
    assert ranks(world_size).run(loaded_weights, engine_type, precision, how) == [(True, True, True)] * world_size


# --- a language model -----------------------------------------------------------------------------------------------


def language_model(rank, world_size, engine_type, precision):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, context=16, layers=2, heads=2, width=16))
    engine = engine_type(model, torch.optim.AdamW(model.parameters(), lr=3e-3), precision=precision, clip_norm=1.0)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        start = torch.randint(11, (4, 1), generator=generator)
        text = (start + 3 * torch.arange(17)) % 11  # counts in threes
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses[0], sum(losses[-5:]) / 5, engine.skipped


@pytest.mark.parametrize("engine_type", [ENGINES[0], ENGINES[-1]], ids=lambda engine: engine.__name__)  # all have the same masters
def test_a_small_gpt_learns_in_16_bits_what_it_learns_in_32(ranks, engine_type):
    in_32 = ranks(2).run(language_model, 2, engine_type, None)
    assert all(first > 2 and last < 0.5 * first for first, last, _ in in_32)
    for precision in DTYPES:
        for (first, last, skipped), (first_32, last_32, _) in zip(ranks(2).run(language_model, 2, engine_type, precision), in_32, strict=True):
            assert first == pytest.approx(first_32, rel=0.01)
            assert last == pytest.approx(last_32, abs=0.05)
            assert skipped <= 3


def batchnorm_in_fp16(rank, world_size, engine_type):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 4))
    engine = engine_type(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16", clip_norm=math.inf)
    norms = []
    for step in range(4):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()
        norms.append(engine.grad_norm)
    return norms, engine.state_dict()


@sharded_engines
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_stays_fp32_is_divided_by_the_loss_scale_too(ranks, engine_type, world_size):
    """BatchNorm's weights have no master, and their gradients are scaled as all others are."""
    ddp, sharded = (ranks(world_size).run(batchnorm_in_fp16, world_size, engine) for engine in (mz.DDP, engine_type))
    for (norms, state), (norms_here, state_here) in zip(ddp, sharded, strict=True):
        assert max(norms) < 10 and norms_here == pytest.approx(norms, rel=1e-4)
        for name in state:
            assert torch.allclose(state[name].float(), state_here[name].float(), rtol=0, atol=1e-4), name


def saved_in_between(rank, world_size, engine_type, precision, what, saves):
    """Batches that are thrown away, and micro-batches: with and without a look at the weights after each step."""
    model = build("containers")
    engine = engine_type(model, sgd(model), precision=precision, bucket_mb=BUCKET_MB)
    for step in range(4):
        for micro in range(2):
            engine.backward(loss_of(engine, share(rows(model, 10 * step + micro, 12), rank, world_size)) / 2)
            if what == "thrown away" and micro == 0:
                engine.zero_grad()
        engine.step()
        if saves:
            engine.load_state_dict(engine.state_dict()) if what == "loaded" else engine.state_dict()
    return list(engine.state_dict().values())


@every_engine
@both_precisions
@pytest.mark.parametrize("what", ["accumulated", "thrown away", "loaded"])
def test_to_save_or_to_load_the_weights_between_steps_changes_nothing(ranks, engine_type, precision, what):
    expected, got = (ranks(2).run(saved_in_between, 2, engine_type, precision, what, saves) for saves in (False, True))
    assert all(same(a, b) for a, b in zip(expected, got, strict=True))
