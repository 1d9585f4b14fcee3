"""The memory meter counts to the byte, by kind, and disturbs nothing."""

import contextlib
import copy
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from minizero.lens.memory import record_memory
from minizero.parts import kinds

FLOAT = 4  # bytes


pytestmark = pytest.mark.usefixtures("nothing_but_the_test")


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 3))


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def gained(m, kind: str) -> int:
    """Bytes of a kind now, less those at entry."""
    curve = m.curve()[1][kind]
    return int(curve[-1] - curve[0])


def highest(m, kind: str) -> int:
    """The most bytes of a kind at any time, less those at entry."""
    curve = m.curve()[1][kind]
    return int(curve.max() - curve[0])


def test_fp32_adam_costs_4_4_and_8_bytes_a_parameter_and_a_step_count_each():
    with record_memory() as m:
        model = mlp()
        psi = numel(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(5, 16)).sum().backward()
        after_backward = m.now
        optimizer.step()
        after_step = m.now
        optimizer.zero_grad()
    other = after_backward["other"]
    assert after_backward == {**dict.fromkeys(kinds.KINDS, 0), "params": 4 * psi, "grads": 4 * psi, "other": other}
    assert after_step == {**after_backward, "optimizer": 8 * psi + 4 * 4}  # four tensors, four step counts
    assert m.now == {**after_step, "grads": 0}


def test_what_is_alive_at_entry_is_counted_too():
    with record_memory() as m:
        before = m.total
    kept = torch.zeros(1000)
    model = mlp()
    with record_memory() as m:
        assert m.total == before + 1000 * FLOAT + numel(model) * FLOAT
        assert m.now["params"] >= numel(model) * FLOAT
    del kept


def test_views_share_one_storage_which_dies_with_the_last_of_them():
    with record_memory() as m:
        whole = torch.zeros(100)
        views = [whole[10:20], whole.view(10, 10).t(), whole.detach(), whole.data, nn.Parameter(whole[:5])]
        assert gained(m, "other") + gained(m, "params") == 100 * FLOAT
        del whole, views[1:]
        assert gained(m, "params") == 100 * FLOAT
        del views
        assert gained(m, "other") == gained(m, "params") == 0


def test_the_peak_is_the_breakdown_at_the_moment_of_the_largest_total():
    weight = nn.Parameter(torch.randn(10, 10))
    with record_memory() as m:
        x = torch.randn(7, 10)
        with torch.no_grad():
            big = torch.cat([x @ weight] * 3)  # x, the product and three copies of it are alive together
            small = big.sum()
            del big
    block = 7 * 10 * FLOAT
    entry = {kind: int(curve[0]) for kind, curve in m.curve()[1].items()}
    assert m.peak == {**entry, "other": entry["other"] + block, "activations": 4 * block}
    assert m.peak_total == sum(m.peak.values())
    assert m.now["activations"] == small.numel() * FLOAT


def test_forward_keeps_what_backward_needs_and_backward_frees_it():
    x = torch.randn(6, 8)
    with record_memory() as m:
        weight = nn.Parameter(torch.randn(8, 8))
        y = (x @ weight).exp().sum()  # exp keeps its result
        assert gained(m, "activations") == (6 * 8 + 1) * FLOAT
        y.backward()
        del y
        assert gained(m, "activations") == 0
        assert gained(m, "grads") == 8 * 8 * FLOAT


def test_the_curve_begins_at_entry_ends_now_and_adds_up_to_the_peak():
    with record_memory() as m:
        mlp()(torch.randn(5, 16)).sum().backward()
    times, by_kind = m.curve()
    assert times[0] == 0 and (np.diff(times) > 0).all()
    assert tuple(by_kind) == kinds.KINDS and all(len(curve) == len(times) for curve in by_kind.values())
    assert sum(by_kind.values()).max() == m.peak_total
    assert {kind: curve[-1] for kind, curve in by_kind.items()} == m.now


def test_moments_noted_by_others_stand_on_the_axis_of_the_curve():
    with record_memory() as m:
        time.sleep(0.01)  # so that entry and this line are apart
        before = time.perf_counter()
        kept = torch.zeros(100)
        after = time.perf_counter()
    times, by_kind = m.curve()
    (moment,) = (times[i] for i in range(1, len(times)) if by_kind["other"][i] - by_kind["other"][i - 1] == 100 * FLOAT)
    assert before - m.entry <= moment <= after - m.entry
    del kept


# --- sizes that change without an operation, storages that no operation made -----------------------


def test_a_shrunk_storage_is_free_and_a_regrown_one_is_not():
    with record_memory() as m:
        flat = torch.zeros(100)
        flat.untyped_storage().resize_(0)
        assert gained(m, "other") == 0
        flat.untyped_storage().resize_(100 * FLOAT)
        assert gained(m, "other") == 100 * FLOAT
        flat.untyped_storage().resize_(0)
        torch.zeros(60)  # the peak is not 160: flat's bytes were gone before these came
    assert highest(m, "other") == 100 * FLOAT


def test_growth_in_place_is_noticed():
    with record_memory() as m:
        x = torch.zeros(10)
        x.resize_(50)
        torch.mul(torch.ones(80), 2, out=x.resize_(0))
        assert gained(m, "other") == 80 * FLOAT


def test_storages_that_no_operation_made_count_once_they_are_used():
    array = np.zeros(100, dtype=np.float32)
    with record_memory() as m:
        x = torch.frombuffer(array, dtype=torch.float32)
        x.add_(1)
        raw = torch.UntypedStorage(40)
        y = torch.tensor([], dtype=torch.float32).set_(raw)
    assert gained(m, "other") == 100 * FLOAT + 40
    del x, y


def test_a_graph_from_before_is_counted_although_only_autograd_holds_it():
    def forward(x):  # of exp's result, the ones and the product, nobody but the graph holds any
        return (x.exp() @ torch.ones(8, 8)).sin().sum()

    x = torch.randn(6, 8, requires_grad=True)
    with record_memory() as m:
        before = m.total
    y = forward(x)
    with record_memory() as m:
        assert m.total == before + (6 * 8 + 6 * 8 + 8 * 8 + 1) * FLOAT
        y.backward()
        del y
        assert m.total == before + 6 * 8 * FLOAT  # x.grad


def test_looking_at_a_checkpointed_graph_does_not_run_it():
    runs = []
    x = torch.randn(6, 8, requires_grad=True)
    y = checkpoint(lambda x: runs.append(1) or x.exp().sin(), x, use_reentrant=False)
    with record_memory() as m:
        assert m.total and runs == [1]
    del y


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_lowers_the_peak_and_leaves_nothing(reentrant):
    layers = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(4)]
    x = torch.randn(50, 8, requires_grad=True)

    def peak(run) -> int:
        with record_memory() as m:
            y = x
            for layer in layers:
                y = run(layer, y)
            y.sum().backward()
            del y
        assert gained(m, "activations") == 0
        return m.peak["activations"]

    plain = peak(lambda layer, y: layer(y))
    saved = peak(lambda layer, y: checkpoint(layer, y, use_reentrant=reentrant))
    assert plain - saved >= 2 * 50 * 64 * FLOAT  # the hidden results of the layers that are not at work


def test_backward_in_autograds_own_threads_is_seen():
    threads, kept = set(), []

    class Deeper(torch.autograd.Function):
        """Backward inside backward; from the 60th level on the engine goes on in another thread."""

        @staticmethod
        def forward(ctx, x, levels):
            ctx.levels = levels
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            if ctx.levels == 0:
                kept.append(grad * 2)
            else:
                with torch.enable_grad():
                    x = torch.ones(1, requires_grad=True)
                    Deeper.apply(x, ctx.levels - 1).sum().backward()
            return grad, None

    with record_memory() as m:
        x = torch.ones(100, requires_grad=True)
        Deeper.apply(x, 70).sum().backward()
    assert len(threads) > 1
    assert gained(m, "activations") == FLOAT  # what the last level kept


def test_what_another_thread_made_counts_when_an_answer_is_asked_for():
    made = []
    with record_memory() as m:
        thread = threading.Thread(target=lambda: made.append(torch.zeros(100)))
        thread.start()
        thread.join()
        assert gained(m, "other") == 100 * FLOAT


# --- kinds -------------------------------------------------------------------------------------------


def test_a_gradient_counts_as_one_for_its_whole_life():
    model, x = mlp(), torch.randn(5, 16)
    with record_memory() as m:
        model(x).sum().backward()
        model.zero_grad()
        assert gained(m, "grads") == 0
    grads, activations = (m.curve()[1][kind] for kind in ("grads", "activations"))
    assert grads.max() == grads[0] + numel(model) * FLOAT
    # Nothing is first one thing and then another: each change of one kind is a birth or a death.
    assert ((np.diff(grads) == 0) | (np.diff(activations) == 0)).all()


def test_gradients_that_hooks_take_away_at_once_are_still_gradients():
    weight, shards = nn.Parameter(torch.randn(8, 8)), []

    def take(parameter):
        shards.append(parameter.grad[:2].clone())  # the engine of ZeRO-2, in short
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(take)
    with record_memory() as m:
        (torch.ones(4, 8) @ weight).sum().backward()
        assert gained(m, "activations") == 2 * 8 * FLOAT  # the shard: nobody said what it is
        assert gained(m, "grads") == 0
    assert highest(m, "grads") == 8 * 8 * FLOAT


@pytest.mark.parametrize("twice", ["in one backward", "in two backwards"])
def test_gradients_that_are_added_up_are_gradients(twice):
    weight = nn.Parameter(torch.randn(8, 8))
    with record_memory() as m:
        x = torch.ones(4, 8)
        if twice == "in one backward":
            (x @ weight + x @ weight).sum().backward()
        else:
            (x @ weight).sum().backward()
            (x @ weight).sum().backward()
        assert gained(m, "grads") == 8 * 8 * FLOAT
        assert gained(m, "activations") == 0


@pytest.mark.parametrize(
    "function",
    [
        torch.Tensor.exp,  # autograd takes the gradient as it is
        torch.Tensor.sum,  # it is one number, expanded: .grad needs memory of its own
    ],
)
def test_a_gradient_that_was_one_for_no_more_than_a_moment_is_one(function):
    weight = nn.Parameter(torch.randn(8))
    weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    with record_memory() as m:
        function(weight).sum().backward()
    assert highest(m, "grads") == 8 * FLOAT


def test_what_hooks_compute_from_a_gradient_is_none():
    weight, seen = nn.Parameter(torch.randn(8)), []
    weight.register_hook(lambda grad: seen.append(grad * 2))
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad * 3))
    with record_memory() as m:
        weight.exp().sum().backward()
        assert gained(m, "grads") == 8 * FLOAT
        assert gained(m, "activations") == 2 * 8 * FLOAT


def test_gradients_may_be_views_of_one_bucket():
    model = mlp()
    with record_memory() as m:
        bucket = torch.zeros(numel(model))
        for p, grad in zip(model.parameters(), bucket.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = grad.view_as(p)
        model(torch.ones(5, 16)).sum().backward()
        assert gained(m, "grads") == numel(model) * FLOAT


def test_sgd_by_hand_needs_no_optimizer_to_be_understood():
    weight = nn.Parameter(torch.randn(8, 8))
    with record_memory() as m:
        weight.grad = torch.ones(8, 8) * 2
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    assert highest(m, "grads") == 8 * 8 * FLOAT


def test_temporaries_of_an_optimizer_step_are_no_activations():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(5, 16)).sum().backward()
    with record_memory() as m:
        optimizer.step()
    assert highest(m, "activations") == 0
    assert m.peak["other"] > m.now["other"]


def test_what_a_closure_computes_inside_a_step_are_activations():
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)
    optimizer = torch.optim.LBFGS([weight], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (x @ weight).exp().sum()
        loss.backward()
        return loss

    with record_memory() as m:
        optimizer.step(closure)
    assert highest(m, "activations") >= 4 * 8 * FLOAT


def test_a_step_that_raised_does_not_colour_what_follows():
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure():
        raise RuntimeError("no loss today")

    with record_memory() as m:
        with contextlib.suppress(RuntimeError):
            optimizer.step(closure)
        other = m.now["other"]
        y = (x @ weight).exp().exp().sum()
        y.backward()
        assert gained(m, "activations") == FLOAT
        assert m.now["other"] == other
    assert m.curve()[1]["other"].max() <= other + FLOAT


def test_masters_and_their_moments_are_optimizer_state():
    model = mlp().bfloat16()
    psi = numel(model)
    with record_memory() as m:
        masters = [p.detach().float() for p in model.parameters()]
        optimizer = torch.optim.Adam(masters)
        model(torch.ones(5, 16, dtype=torch.bfloat16)).sum().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        assert gained(m, "optimizer") == 12 * psi + 4 * len(masters)


def test_buffers_are_other_wherever_they_come_from():
    with record_memory() as m:
        norm = nn.BatchNorm1d(16, affine=False).double()  # .double() is an operation on tensors
        assert gained(m, "other") == 2 * 16 * 8 + 8
        assert gained(m, "activations") == 0
    del norm


def test_a_tag_comes_before_everything_else():
    with record_memory() as m:
        kinds.tag(torch.zeros(100), "comm")
        shard = kinds.tag(nn.Parameter(torch.zeros(10)), "optimizer")
        view = torch.zeros(20)[5:]
        assert kinds.tag(view, "host") is view
        assert gained(m, "optimizer") == 10 * FLOAT and gained(m, "params") == 0
        assert gained(m, "host") == 20 * FLOAT
        kinds.tag(view, "comm")
        assert gained(m, "host") == 0 and gained(m, "comm") == 20 * FLOAT
    # The first one is dead since long, and was comm all the same.
    assert highest(m, "comm") == 100 * FLOAT
    del shard


def test_a_tag_belongs_to_the_storage_and_keeps_nothing_alive():
    whole = torch.zeros(10)
    assert kinds.kind_of(whole) is None
    kinds.tag(whole[3:], "comm")
    assert kinds.kind_of(whole) == kinds.kind_of(whole.view(2, 5)) == "comm"
    assert kinds.kind_of(copy.deepcopy(whole)) is None
    storage = weakref.ref(whole.untyped_storage())
    del whole
    assert storage() is None


def test_a_wrong_tag_is_refused():
    with pytest.raises(ValueError, match=r"'gradients'.*params, grads"):
        kinds.tag(torch.zeros(1), "gradients")
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor, got list"):
        kinds.tag([torch.zeros(1)], "comm")


# --- unusual tensors -----------------------------------------------------------------------------------


def one_step(mode=contextlib.nullcontext) -> tuple[int, int, int, int]:
    """Bytes of params, grads and optimizer after one step, and the most of activations."""
    with record_memory() as m, mode():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(5, 16)).sum().backward()
        optimizer.step()
    return gained(m, "params"), gained(m, "grads"), gained(m, "optimizer"), highest(m, "activations")


def test_fake_and_meta_tensors_count_as_real_ones_do():
    real = one_step()
    assert real[:3] == (numel(mlp()) * FLOAT,) * 3 and real[3] > 0
    with torch.device("meta"):
        assert one_step() == real
    with FakeTensorMode():
        assert one_step() == real
    assert one_step(FakeTensorMode) == real  # the fake mode begins inside the recording


def test_memory_of_a_gpu_that_is_not_there_can_be_counted():
    with FakeTensorMode(), record_memory() as m:
        x = torch.empty(10**9, device="cuda")
        assert gained(m, "other") == 4 * 10**9
        x.untyped_storage().resize_(0)
        assert gained(m, "other") == 0


def test_a_wrapper_counts_as_what_it_holds():
    with record_memory() as m:
        weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
        assert gained(m, "params") == 2 * 8 * 8 * FLOAT
        (weight * weight).sum().backward()
        assert gained(m, "grads") == 2 * 8 * 8 * FLOAT
        assert gained(m, "activations") == gained(m, "other") == 0


def test_what_a_wrapper_does_inside_is_seen():
    class Busy(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            torch.zeros(100)
            return super().__torch_dispatch__(func, types, args, kwargs)

    x = Busy(torch.zeros(8), torch.zeros(8))
    with record_memory() as m:
        x.exp()
    assert highest(m, "other") == 100 * FLOAT


def test_sparse_gradients_count_as_their_indices_and_values():
    with record_memory() as m:
        table = nn.Embedding(100, 8, sparse=True)
        table(torch.tensor([3, 5, 7])).sum().backward()
        assert gained(m, "grads") == 3 * 8 * FLOAT + 3 * 8
        assert gained(m, "params") == 100 * 8 * FLOAT


def test_a_parameter_that_refuses_to_be_used_can_be_counted():
    class Freed(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("freed")

    with record_memory() as m:
        weight = nn.Parameter(torch.zeros(8, 8))
        y = torch.ones(4, 8, requires_grad=True) @ weight
        weight.__class__ = Freed
        assert gained(m, "params") == 8 * 8 * FLOAT
        y.sum().backward()  # works with the saved weight


def test_objects_whose_construction_failed_do_no_harm():
    class Unfinished(nn.Module):
        def __init__(self):
            pass

    unfinished = [Unfinished(), torch.optim.Adam.__new__(torch.optim.Adam)]
    with record_memory() as m:
        assert m.total >= 0
    del unfinished


def test_tensors_without_a_storage_do_no_harm():
    with record_memory() as m:
        inside = []
        x = torch.ones(3, 8)
        y = torch.vmap(lambda row: inside.append(m.total) or row.exp())(x)
        assert gained(m, "activations") == 3 * 8 * FLOAT
    assert len(inside) == 1 and y.shape == x.shape


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_a_collective_returns_is_counted(one_rank):
    # torch 2.13 has a new name, and warns at the old one.
    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    with record_memory() as m:
        x = torch.ones(100)
        gathered = all_gather(x, 0, one_rank)
        dist.all_reduce(x)
        assert gained(m, "other") + gained(m, "activations") == 2 * 100 * FLOAT
        assert gathered.sum() == 100


def test_fsdp2_is_understood(one_rank):
    with record_memory() as m:
        model = mlp()
        psi = numel(model)
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(5, 16)).sum().backward()
        optimizer.step()
    assert (gained(m, "params"), gained(m, "grads"), gained(m, "optimizer")) == (4 * psi, 4 * psi, 8 * psi + 4 * 4)


# --- it disturbs nothing -----------------------------------------------------------------------------


def test_recording_keeps_no_tensor_alive():
    with record_memory() as m:
        x = torch.zeros(100)
        assert m.now["other"]
        y = x.exp()
        tensors = [weakref.ref(x), weakref.ref(y)]
        storages = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
        del x, y
        assert not any(reference() for reference in tensors + storages)
        z = torch.zeros(100)
    tensors, storages = [weakref.ref(z)], [weakref.ref(z.untyped_storage())]
    del z
    assert not any(reference() for reference in tensors + storages)


def test_what_no_operation_shows_is_found_at_the_exit():
    with record_memory() as m:
        weight = nn.Parameter(torch.zeros(100))
    assert gained(m, "params") == 100 * FLOAT
    del weight


def test_after_the_exit_the_answers_stay():
    with record_memory() as m:
        x = torch.zeros(100)
    now, peak = m.now, m.peak
    del x
    assert torch.zeros(200).sum() == 0
    assert (m.now, m.peak) == (now, peak)


def everything_installed() -> tuple:
    return (
        torch._C._len_torch_dispatch_stack(),
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        torch.UntypedStorage.resize_,
    )


def test_an_exception_leaves_nothing_behind_and_the_answers_in_order():
    before = everything_installed()
    with pytest.raises(ZeroDivisionError):
        with record_memory() as m:
            assert everything_installed() != before
            x = torch.zeros(100)
            raise ZeroDivisionError
    assert everything_installed() == before
    assert gained(m, "other") == 100 * FLOAT
    del x


def test_an_exception_at_entry_leaves_nothing_behind(monkeypatch):
    before = everything_installed()
    monkeypatch.setattr("minizero.lens.memory._Operations.__enter__", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError), record_memory():
        pass
    assert everything_installed() == before


def test_nested_recordings_are_both_right():
    with record_memory() as outer:
        weight = nn.Parameter(torch.randn(8, 8))
        activation = (torch.ones(4, 8) @ weight).exp()
        with record_memory() as inner:
            assert inner.total == outer.total
            activation.sum().backward()
            flat = torch.zeros(10)
            flat.untyped_storage().resize_(0)
        assert inner.now["grads"] == outer.now["grads"] and gained(outer, "grads") == 8 * 8 * FLOAT
        # To the inner one it was there at entry; the outer one saw how it was made.
        assert gained(outer, "activations") == 4 * 8 * FLOAT and inner.now["activations"] == 0
        more = torch.zeros(1000)
    assert outer.total - inner.total == 1000 * FLOAT
    del more


# --- witnesses --------------------------------------------------------------------------------------------


def test_the_cpu_allocator_counts_the_same_to_the_byte():
    model, x = mlp(64), torch.randn(32, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler, record_memory() as m:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocator = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    total = sum(m.curve()[1].values())
    assert total[-1] - total[0] == allocator[-1]
    # A Python number becomes a tensor of 8 bytes inside an operation: scratch that nobody sees.
    assert 0 <= allocator.max() - (total.max() - total[0]) < 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares with the CUDA allocator: needs a GPU")
def test_the_cuda_allocator_counts_the_same_in_blocks_of_512_bytes():
    def run():
        model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # keeps all of its state on the GPU
        model(torch.ones(128, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        return model, optimizer

    run()  # cuBLAS takes its workspace, once
    gc.collect()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with record_memory() as m:
        kept = run()
        held, peak = torch.cuda.memory_allocated() - start, torch.cuda.max_memory_allocated() - start
        total = sum(m.curve()[1].values())
    # Every tensor above fills whole blocks, but for the scalars: the loss, its gradient and what mean passes on.
    assert total[-1] - total[0] == held == 3 * 2 * 256 * 512 * FLOAT
    assert 0 <= peak - (total.max() - total[0]) <= 8 * 512
    del kept
