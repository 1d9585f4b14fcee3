"""Offload: ZeRO-3's numbers, with the optimizer on the host, or on the disk; and the delayed update, which is what it says."""

import copy
import gc
import os
import signal
import sys
import time

import pytest
import torch
from models import build, distance, loss_of, refusal, rows, same, share
from test_parts_units import Block, Net
from test_zero3 import batch, full, resident, sgd
from torch import nn

import minizero as mz
from minizero.lens.memory import resident_set
from minizero.model import GPT, GPTConfig
from minizero.parts import host, kinds

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3])
BOTH = ("optimizer", "params")
SETTINGS = [{}, {"what": BOTH}, {"to": "disk"}, {"to": "disk", "what": BOTH}, {"depth": 0}, {"depth": 2, "max_live": 400, "what": BOTH}]


def trained(rank, world_size, name, optimizer_class, precision, steps=5):
    """Whether each setting ends with ZeRO-3's masters to the bit, after evaluations and accumulated steps between."""
    results = []
    for settings in [None, *SETTINGS]:
        model = build(name, seed=rank)
        optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.01)
        engine = mz.Zero3(model, optimizer, precision=precision) if settings is None else mz.Zero3Offload(model, optimizer, precision=precision, **settings)
        for step in range(steps):
            for micro_step in range(1 + step % 2):
                engine.backward(loss_of(engine, share(rows(model, 10 * step + micro_step, 12), rank, world_size)).float())
            engine.step()
            with torch.no_grad():
                loss_of(engine, share(rows(model, step, 12), rank, world_size))
            assert not resident(engine)
        state = engine.optimizer_state_dict()["state"]
        moments = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
        results.append([*engine.state_dict().values(), *moments])
    return [same(result, results[0]) for result in results]


@world_sizes
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["awkward", "few", "gpt", "checkpointed"])
def test_wherever_it_rests_the_state_is_that_of_zero3_to_the_bit(ranks, name, optimizer, precision, world_size):
    for equal in ranks(world_size).run(trained, world_size, name, optimizer, precision):
        assert equal == [True] * (1 + len(SETTINGS))


# --- who holds what -------------------------------------------------------------------------------------


def held(rank, settings, precision, micro_steps):
    gc.collect()
    with mz.record_memory() as memory:
        before = memory.now  # of other tests
    torch.manual_seed(0)
    model = GPT.preset("nano")
    engine = mz.Zero3Offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision=precision, **settings)
    x = torch.randint(70, (2, 16))
    shard = sum(shard.layout.S for unit in engine.units for shard in unit.shards)
    found = []
    for _ in range(2):
        gc.collect()
        with mz.record_memory() as memory, mz.record_traffic() as traffic:
            for _ in range(micro_steps):
                engine.backward(engine(x, x))
            found.append({kind: (value - before[kind]) / shard for kind, value in memory.now.items()})
            engine.step()
    pieces = [piece.numel() for held in engine.weights for piece in held.pieces.values()]
    return found[-1], traffic.bytes_copied / shard, len(pieces) / shard, sum(pieces) / shard


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("what", "precision", "device", "on_host"), [
    (("optimizer",), "bf16", {"params": 2, "grads": 2}, 12 + 2),  # and the gradients that have come down
    (BOTH, "bf16", {"params": 0, "grads": 2}, 14 + 2),
    (("optimizer",), None, {"params": 4, "grads": 4}, 12 + 4),
    (BOTH, None, {"params": 0, "grads": 4}, 12 + 4),
])  # fmt: skip
def test_the_device_holds_what_computes_and_the_host_the_rest_to_the_byte(ranks, what, precision, device, on_host, world_size, to):
    for found, _, pieces, owned in ranks(world_size).run(held, {"what": what, "to": to}, precision, 1):
        assert {kind: found[kind] for kind in ("params", "grads", "optimizer", "comm")} == {**device, "optimizer": 0, "comm": 0}
        padding = 1 - owned if to == "cpu" else 0  # has no moments there
        assert found["host"] == pytest.approx(on_host + 4 * pieces - 8 * padding)  # and Adam's step counts


@pytest.mark.parametrize(("what", "precision", "micro_steps", "copied"), [
    (("optimizer",), "bf16", 1, 4), (("optimizer",), "bf16", 3, 2 * 3 + 2), (BOTH, "bf16", 1, 2 + 4), (BOTH, "bf16", 3, 6 * 3),
    (("optimizer",), None, 1, 8), (BOTH, None, 2, 2 * 12),
])  # fmt: skip
def test_gradients_go_down_and_weights_come_up_and_nothing_else(ranks, what, precision, micro_steps, copied):
    for _, bytes_copied, *_ in ranks(2).run(held, {"what": what}, precision, micro_steps):
        assert bytes_copied == copied


def in_memory(rank, to):
    """After two steps of a model of 50 million parameters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=70, context=32, layers=16, heads=8, width=512))
    engine = mz.Zero3Offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), to=to, precision="bf16")
    x = torch.randint(70, (1, 16), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        engine.backward(engine(x, x))
        engine.step()
    optimizer = 12 * sum(shard.layout.S for shard in engine.weights)
    return resident_set(), optimizer, sum(p.numel() for p in model.parameters())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is resident is read from /proc")
def test_on_the_disk_the_optimizer_takes_no_memory():
    sizes = {}
    for to in ("cpu", "disk"):
        with mz.Ranks(2, device="cpu", timeout=120) as fresh:
            sizes[to] = fresh.run(in_memory, to)
    for (in_ram, optimizer, numel), (on_disk, _, _) in zip(sizes["cpu"], sizes["disk"], strict=True):
        assert numel > 50e6
        assert 0.95 < (in_ram - on_disk) / optimizer < 1.05


# --- copies ---------------------------------------------------------------------------------------------


class Lazy:
    """A host link that moves data at the last moment, and shows what nobody may read: NaN where something is to arrive."""

    under_way = 0

    def __init__(self, to, source, unit):
        self.to, self.source = to, source
        to.fill_(torch.nan)
        Lazy.under_way += 1

    def wait(self):
        if self.to is not None:
            self.to.copy_(self.source)
            self.to = self.source = None
            Lazy.under_way -= 1


def with_a_lazy_link(rank, world_size, name, settings):
    results = []
    for lazy in (False, True):
        real, host.copy = host.copy, Lazy if lazy else host.copy
        try:
            model = build(name, torch.float64)
            engine = mz.Zero3Offload(model, sgd(model), **settings)
            for step in range(6):
                for micro_step in range(1 + step % 2):
                    engine.backward(loss_of(engine, share(rows(model, 10 * step + micro_step, 12), rank, world_size)))
                engine.step()
            results.append(full(engine))
        finally:
            host.copy = real
    return same(*results), all(weight.isfinite().all() for weight in results[1])


@world_sizes
@pytest.mark.parametrize("settings", [{}, {"what": BOTH}, {"delayed": True}, {"depth": 0}], ids=str)
@pytest.mark.parametrize("name", ["awkward", "checkpointed reentrant"])
def test_no_copy_is_read_before_its_wait(ranks, name, settings, world_size):
    assert ranks(world_size).run(with_a_lazy_link, world_size, name, settings) == [(True, True)] * world_size


# --- the delayed update -----------------------------------------------------------------------------------


def step_with(optimizer, model, grads):
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def delayed(rank, world_size, optimizer_class, skip, what, to):
    """An engine beside a loop that applies each gradient one step late."""
    model = build("awkward", torch.float64)
    alone = copy.deepcopy(model)
    engine = mz.Zero3Offload(model, optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.05), delayed=True, clip_norm=1e9, what=what, to=to)
    optimizer = optimizer_class([p for p in alone.parameters() if p.requires_grad], lr=0.05)
    late, differences = None, []
    for step in range(8):
        x = rows(model, step, 12)
        factor = torch.inf if step == skip else 1.0
        engine.backward(loss_of(engine, share(x, rank, world_size)) * factor)
        assert engine.step() == (step != skip)
        for r in range(world_size):
            (loss_of(alone, share(x, r, world_size)) / world_size).backward()
        grads = None if step == skip else [None if p.grad is None else p.grad.clone() for p in alone.parameters()]
        optimizer.zero_grad()
        if late is not None:
            step_with(optimizer, alone, late)
        late = grads
        differences.append(distance(full(engine), [p.detach() for p in alone.parameters()]))
    saved = engine.state_dict()
    if late is not None:
        step_with(optimizer, alone, late)
    return differences, distance([saved[name] for name, _ in alone.named_parameters()], [p.detach() for p in alone.parameters()])


@world_sizes
@pytest.mark.parametrize(("what", "to"), [(("optimizer",), "cpu"), (BOTH, "cpu"), (BOTH, "disk")])
@pytest.mark.parametrize("skip", [None, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_delayed_update_is_a_loop_that_applies_each_gradient_a_step_late(ranks, optimizer, skip, what, to, world_size):
    for differences, saved in ranks(world_size).run(delayed, world_size, optimizer, skip, what, to):
        assert max(differences) <= 1e-9
        assert saved <= 1e-9  # and what is saved misses nothing


def saved_between(rank, world_size):
    """Saving in the middle changes nothing; and a second engine goes on from what was saved."""
    ends = []
    for saves in (False, True):
        model = build("awkward", torch.float64)
        engine = mz.Zero3Offload(model, sgd(model), delayed=True)
        for step in range(5):
            engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
            engine.step()
            if saves:
                saved = engine.state_dict(), engine.optimizer_state_dict()
        ends.append(full(engine))
    other = build("awkward", torch.float64, seed=5)
    second = mz.Zero3Offload(other, sgd(other), delayed=True)
    second.load_state_dict(saved[0])
    second.load_optimizer_state_dict(saved[1])
    return same(*ends), distance([*second.state_dict().values()], [*saved[0].values()])


@world_sizes
def test_saving_does_not_disturb_a_delayed_update(ranks, world_size):
    assert ranks(world_size).run(saved_between, world_size) == [(True, 0.0)] * world_size


# --- an end in the middle -----------------------------------------------------------------------------------


def killed_in_step(rank, fatal):
    model = Net(2)
    engine = mz.Zero3Offload(model, torch.optim.Adam(model.parameters(), lr=0.1), to="disk", what=BOTH)
    for step in range(3):
        engine.backward(engine(batch(step).float()).sum())
        if fatal and rank == 1 and step == 2:
            real = engine.optimizer.__class__.step

            def end(*_):
                os.kill(os.getpid(), signal.SIGKILL)

            engine.optimizer.__class__.step = end
            assert real is not None
        engine.step()
    return [weight.sum().item() for weight in full(engine)]


def test_a_rank_that_is_killed_in_a_step_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with mz.Ranks(2, device="cpu") as fresh:
        expected = fresh.run(killed_in_step, False)
        with pytest.raises(mz.RankError):
            fresh.run(killed_in_step, True)
        assert fresh.run(killed_in_step, False) == expected
    deadline = time.monotonic() + 5
    while list(tmp_path.glob("minizero*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("minizero*")) == []


# --- refused ----------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["steps"] * p.grad.sign())


def wrongly(rank):
    def wrap(optimizer=None, **keywords):
        model = Net(1)
        return refusal(lambda: mz.Zero3Offload(model, (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1), **keywords))

    return wrap(to="nvme"), wrap(what="params"), wrap(what=("optimizer", "grads")), wrap(Lion, delayed=True), wrap(Lion), wrap(depth=-1)


def test_what_it_cannot_do_it_says(ranks):
    to, params, grads, lion, fine, depth = ranks(1).run(wrongly)[0]
    assert to == "ValueError: to='nvme': choose one of 'cpu', 'disk'"
    assert params == grads.replace("('optimizer', 'grads')", "('params',)") and "choose ('optimizer',) or ('optimizer', 'params')" in params
    assert lion.startswith("ValueError: delayed=True needs one of torch's element-wise optimizers; Lion is not")
    assert fine is None and depth.startswith("ValueError: depth")


def of_ones_own(rank, world_size):
    results = []
    for engine_type in (mz.Zero3, mz.Zero3Offload):
        model = build("awkward")
        engine = engine_type(model, Lion([p for p in model.parameters() if p.requires_grad]))
        for step in range(4):
            engine.backward(loss_of(engine, share(rows(model, step, 12), rank, world_size)))
            engine.step()
        results.append((full(engine), engine.optimizer.param_groups[0]["steps"]))
    return same(results[0][0], results[1][0]), results[1][1]


def test_an_optimizer_of_ones_own_makes_one_step_a_step(ranks):
    assert ranks(2).run(of_ones_own, 2) == [(True, 4)] * 2


def no_room(rank):
    model = nn.Sequential(nn.Linear(64, 64))
    fallocate = os.posix_fallocate

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    os.posix_fallocate = full_disk
    try:
        return refusal(lambda: mz.Zero3Offload(model, torch.optim.Adam(model.parameters()), to="disk"))
    finally:
        os.posix_fallocate = fallocate


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is no posix_fallocate here")
def test_a_full_disk_is_an_error_that_says_where_and_how_much(ranks):
    for error in ranks(1).run(no_room):
        assert "no room for 16,640 bytes of optimizer state in" in error and "TMPDIR" in error


# --- on a GPU ------------------------------------------------------------------------------------------------


def beside_the_gpus_own_count(rank):
    torch.manual_seed(0)
    model = GPT.preset("small").to(mz.device())
    engine = mz.Zero3Offload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="bf16", what=BOTH)
    x = torch.randint(70, (4, 128), device=mz.device())
    for _ in range(2):
        engine.backward(engine(x, x))
        engine.step()
    gc.collect()
    torch.cuda.synchronize()
    with mz.record_timeline() as timeline:
        engine.backward(engine(x, x))
        engine.step()
        torch.cuda.synchronize()
    storages = {t.untyped_storage() for t in gc.get_objects() if isinstance(t, torch.Tensor) and type(t) is torch.Tensor and t.is_cuda}
    ours = sum(s.nbytes() for s in storages if kinds.label(s).kind in ("params", "grads"))
    computing = timeline.of("forward", "backward")
    overlap = [c for c in timeline.of("copy") for e in computing if c.start < e.end and e.start < c.end]
    return torch.cuda.memory_allocated(), ours, len(overlap)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_overlap_computing_and_memory_agrees_with_the_gpus():
    for allocated, ours, overlapping in mz.launch(beside_the_gpus_own_count, 1, timeout=120, device="cuda:0"):
        assert overlapping > 0
        assert ours <= allocated


def with_blocks(rank):
    model = Net(0)
    model.blocks = nn.ModuleList(Block(4) for _ in range(2))
    engine = mz.Zero3Offload(model, sgd(model))
    return [type(shard).__name__ for unit in engine.units for shard in unit.shards]


def test_every_shard_rests_on_the_host(ranks):
    assert ranks(2).run(with_blocks) == [["HostShard"] * 3] * 2


# --- what others do to the optimizer, the weights and the gradients ----------------------------------------------


def with_hooks(rank, settings):
    """A hook that halves the gradients, and one that counts; a scheduler, which wants to see a step of the optimizer."""
    results = []
    for engine_type, keywords in ((mz.Zero3, {}), (mz.Zero3Offload, settings)):
        torch.manual_seed(0)
        model = Net(2)
        engine = engine_type(model, sgd(model), **keywords)
        steps = []
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)

        def halve(optimizer, *_):
            for group in optimizer.param_groups:
                for piece in group["params"]:
                    piece.grad.mul_(0.5)

        engine.optimizer.register_step_pre_hook(halve)
        engine.optimizer.register_step_post_hook(lambda optimizer, *_, steps=steps, own=engine.optimizer: steps.append(optimizer is own))
        for step in range(3):
            engine.backward(engine(batch(step).float()).sum())
            engine.step()
            scheduler.step()
        results.append((full(engine), steps))
    (expected, own), (found, steps) = results
    return same(expected, found), own, steps


@pytest.mark.parametrize("settings", [{}, {"what": BOTH}, {"to": "disk"}], ids=str)
def test_the_optimizers_hooks_see_one_step_of_it(ranks, settings):
    assert ranks(2).run(with_hooks, settings) == [(True, [True] * 3, [True] * 3)] * 2


def skipped_while_somebody_reads(rank, what):
    model = Net(1)
    engine = mz.Zero3Offload(model, sgd(model), delayed=True, clip_norm=torch.inf, what=what)
    engine.backward(engine(batch(0).float()).sum())
    engine.step()
    before = full(engine)
    with engine.gathered():
        engine.backward(engine(batch(1).float()).sum() * torch.nan)
        updated = engine.step()
        read = [p.detach().clone() for p in engine.module.parameters()]
    after = full(engine)
    return updated, same(before, after), same(read, after)


@pytest.mark.parametrize("what", [("optimizer",), BOTH])
def test_a_delayed_update_comes_also_while_somebody_reads_and_the_step_is_skipped(ranks, what):
    assert ranks(2).run(skipped_while_somebody_reads, what) == [(False, False, True)] * 2


def clamped(rank, what):
    """Weights that are kept small after each step, beside a loop that applies each gradient a step late."""
    model = Net(1).double()
    alone = copy.deepcopy(model)
    engine, optimizer, late = mz.Zero3Offload(model, sgd(model), delayed=True, what=what), sgd(alone), None
    for step in range(8):
        engine.backward(engine(batch(step)).sum())
        engine.step()
        with engine.gathered(), torch.no_grad():
            for param in engine.module.parameters():
                param.clamp_(-0.2, 0.2)
        alone(batch(step)).sum().backward()
        grads = [p.grad.clone() for p in alone.parameters()]
        optimizer.zero_grad()
        if late is not None:
            step_with(optimizer, alone, late)
        late = grads
        with torch.no_grad():
            for param in alone.parameters():
                param.clamp_(-0.2, 0.2)
    return distance(full(engine), [p.detach() for p in alone.parameters()])


@pytest.mark.parametrize("what", [("optimizer",), BOTH])
def test_what_is_written_while_an_update_is_late_does_not_cost_the_update(ranks, what):
    assert max(ranks(2).run(clamped, what)) <= 1e-9


def edited(rank, engine_type):
    """A model of 16 bits by nature; its gradients are doubled after the first of two backwards."""
    torch.manual_seed(0)
    model = Net(1).bfloat16()
    engine = engine_type(model, sgd(model))
    engine.backward(engine(batch(0).bfloat16()).sum())
    engine.sync_gradients()
    for group in engine.optimizer.param_groups:
        for piece in group["params"]:
            piece.grad.zero_()
    engine.backward(engine(batch(1).bfloat16()).sum())
    engine.sync_gradients()
    return [piece.grad.clone() for group in engine.optimizer.param_groups for piece in group["params"]]


def test_edits_count_where_the_sum_has_more_digits_than_the_model(ranks):
    for expected, found in zip(ranks(2).run(edited, mz.Zero3), ranks(2).run(edited, mz.Zero3Offload), strict=True):
        assert same(expected, found)


def late_readers(rank):
    """A gradient buffer that its owner fills again, and a learning rate that is a tensor, while the update is late."""
    ends = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = Net(1)
        engine = mz.Zero3Offload(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), delayed=True)
        (group,) = engine.optimizer.param_groups
        for step in range(3):
            engine.backward(engine(batch(step).float()).sum())
            engine.sync_gradients()
            buffers = [torch.full_like(piece, 0.5) for piece in group["params"]]
            for piece, piece.grad in zip(group["params"], buffers, strict=True):
                assert piece.grad is not None
            slow = engine._thread and engine._thread.submit(time.sleep, 0.05)  # the update comes behind it
            engine.step()
            if disturbed:
                group["lr"].fill_(100.0)
                for buffer in buffers:
                    buffer.fill_(torch.nan)
            engine._join()
            group["lr"].fill_(0.1)
            assert slow is None or slow.done()
        ends.append(full(engine))
    return same(*ends)


def test_a_late_update_reads_nothing_that_others_may_have_changed(ranks):
    assert all(ranks(2).run(late_readers))


def descriptors(rank):
    before = len(os.listdir("/proc/self/fd"))
    model = Net(4)
    engine = mz.Zero3Offload(model, torch.optim.Adam(model.parameters()), to="disk", what=BOTH)
    engine.backward(engine(batch(0).float()).sum())
    engine.step()
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are counted in /proc")
def test_on_the_disk_no_file_stays_open(ranks):
    assert ranks(1).run(descriptors) == [0]
