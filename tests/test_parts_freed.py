"""Tensors whose memory has been given back: what is not about their elements can be asked; whoever uses them hears which they are."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minizero.parts import flat
from minizero.parts.freed import FreedGradient, free, is_freed, restore, stand_in

LABEL = "'layers.3.weight'"


def freed_parameter(shape=(3, 4), dtype=torch.float32):
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    free(param, LABEL, stand_in(param))
    return param


def freed_gradient(shape=(3, 4), dtype=torch.float32):
    return FreedGradient(nn.Parameter(torch.ones(shape, dtype=dtype)), LABEL)


both = pytest.mark.parametrize("freed", [freed_parameter, freed_gradient])

full = torch.ones(3, 4)

USES = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: torch.mean(t),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "copied from": lambda t: torch.zeros(3, 4).copy_(t),
    "copied to": lambda t: t.copy_(full),
    "numpy": lambda t: t.numpy(),
    "np.asarray": lambda t: np.asarray(t),
    "tolist": lambda t: t.tolist(),
    "linear": lambda t: F.linear(torch.ones(2, 4), t),
    "linear by keyword": lambda t: F.linear(torch.ones(2, 4), weight=t),
    "embedding": lambda t: F.embedding(torch.tensor([1]), t),
    "matmul": lambda t: torch.ones(2, 3) @ t,
    "plus": lambda t: t + 1,
    "from the right": lambda t: 1 + t,
    "in place": lambda t: t.mul_(2),
    "augmented": lambda t: full.clone().__iadd__(t),
    "compared": lambda t: t == 0,
    "torch.equal": lambda t: torch.equal(full, t),
    "allclose": lambda t: torch.allclose(t, full),
    "indexed": lambda t: t[0],
    "set by index": lambda t: t.__setitem__(0, 1.0),
    "iterated": lambda t: list(t),
    "in a list": lambda t: torch.cat([full, t]),
    "in nested lists": lambda t: torch.block_diag(*[full, t]),
    "as out": lambda t: torch.add(full, full, out=t),
    "converted": lambda t: t.double(),
    "moved": lambda t: t.to("cpu"),
    "reshaped": lambda t: t.view(-1),
    "transposed": lambda t: t.T,
    "einsum": lambda t: torch.einsum("ij->", t),
    "foreach": lambda t: torch._foreach_norm([full, t]),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "isnan": lambda t: t.isnan(),
    "filled": lambda t: t.fill_(1.0),
    "a vector": lambda t: nn.utils.parameters_to_vector([t]),
    "torch.save": lambda t: torch.save(t, io.BytesIO()),
    "pickled": lambda t: pickle.dumps(t),
    "copied": lambda t: copy.copy(t),
    "deepcopied": lambda t: copy.deepcopy(t),
    "differentiated": lambda t: torch.autograd.grad((t * 1).sum(), t),
    "truth": lambda t: bool(t),
    "address": lambda t: t.data_ptr(),
}


@both
@pytest.mark.parametrize("use", USES)
def test_to_use_one_is_an_error_that_names_the_parameter_and_the_cure(freed, use):
    with pytest.raises(RuntimeError) as error:
        USES[use](freed())
    assert LABEL in str(error.value)
    cure = "engine.gathered()" if freed is freed_parameter else "sync_gradients()"
    assert cure in str(error.value)


@both
@pytest.mark.parametrize("shape", [(), (1,), (0, 4)])
def test_scalars_single_elements_and_no_elements_are_no_exception(freed, shape):
    for use in (torch.Tensor.item, float, int, torch.Tensor.sum, torch.Tensor.clone, lambda t: t.add_(1), lambda t: torch.zeros(()) + t):
        with pytest.raises(RuntimeError, match=LABEL):
            use(freed(shape))


@both
def test_what_is_not_about_the_elements_can_be_asked(freed):
    t = freed((3, 4), torch.float64)
    assert t.shape == t.size() == (3, 4) and t.size(1) == 4 and len(t) == 3 and t.dim() == t.ndim == 2
    assert t.numel() == t.nelement() == 12 and t.element_size() == t.itemsize == 8 and t.nbytes == 96
    assert t.dtype is torch.float64 and t.device == torch.device("cpu") and t.layout is torch.strided
    assert t.is_floating_point() and torch.is_floating_point(t) and not t.is_complex() and not t.is_cuda and not t.is_sparse
    assert t.is_leaf and t.grad_fn is None and t._version >= 0
    assert t.requires_grad == (freed is freed_parameter)
    assert {t: "found"}[t] == "found" and t in {t}
    assert isinstance(t, torch.Tensor) and torch.is_tensor(t)
    assert LABEL in repr(t) and "[3, 4]" in str(t) and "freed" in repr(t) and f"{t}" in repr(t)
    assert "shape" in dir(t)


@both
def test_it_has_no_memory_and_a_way_around_the_refusal_finds_nan(freed):
    t = freed((300, 400))
    assert t.untyped_storage().nbytes() == 0
    with torch._C.DisableTorchFunctionSubclass():
        assert t.untyped_storage().nbytes() == 4  # one element for all of them
        assert t.isnan().all()


# --- gradients -----------------------------------------------------------------------------------------


def with_a_freed_gradient():
    layer = nn.Linear(4, 3)
    for name, p in layer.named_parameters():
        p.grad = FreedGradient(p, repr(name))
    return layer


def test_it_stands_in_a_parameters_grad_until_it_is_cleared_or_replaced():
    layer = with_a_freed_gradient()
    gradient = layer.weight.grad
    assert gradient is layer.weight.grad and gradient.shape == layer.weight.shape
    layer.weight.grad = torch.ones(3, 4)
    assert layer.weight.grad.sum() == 12
    layer.zero_grad()
    assert layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.parametrize("who", ["module", "optimizer"])
def test_set_to_zeros_it_remembers(who):
    layer = with_a_freed_gradient()
    gradient = layer.weight.grad
    assert not gradient.zeroed
    (layer if who == "module" else torch.optim.SGD(layer.parameters(), lr=0.1)).zero_grad(set_to_none=False)
    assert layer.weight.grad is gradient and gradient.zeroed


CONSUMERS = {
    "clip_grad_norm_": lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    "clip_grad_value_": lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 1.0),
    "get_total_norm": lambda layer: nn.utils.get_total_norm([p.grad for p in layer.parameters()]),
    "SGD": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False).step(),
    "Adam, foreach": lambda layer: torch.optim.Adam(layer.parameters(), foreach=True).step(),
    "SGD, fused": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1, fused=True).step(),
    "zero_grad, foreach": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True).zero_grad(set_to_none=False),
    "double": lambda layer: layer.double(),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_torch_functions_that_take_parameters_do_not_take_it_for_a_gradient(consumer):
    layer = with_a_freed_gradient()
    before = [p.detach().clone() for p in layer.parameters()]
    with pytest.raises(RuntimeError, match="the gradient of parameter '(weight|bias)' has been reduced and freed"):
        CONSUMERS[consumer](layer)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_a_parameter_can_be_copied_and_saved_without_it():
    layer = with_a_freed_gradient()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(other.weight, layer.weight) and other.weight.grad is None


# --- parameters ----------------------------------------------------------------------------------------


def test_a_freed_parameter_is_the_same_object_and_so_is_the_restored_one():
    layer = nn.Linear(4, 3)
    twin = nn.Linear(4, 3)
    twin.weight = layer.weight
    param, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1)
    calls = []
    param.register_hook(calls.append)
    param.register_post_accumulate_grad_hook(lambda p: calls.append(p.shape))
    place, values = hash(param), param.detach().clone()
    free(param, LABEL, stand_in(param))
    assert layer.weight is twin.weight is param is optimizer.param_groups[0]["params"][0]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert hash(param) == place and isinstance(param, nn.Parameter) and is_freed(param)
    assert not is_freed(layer.bias)
    restore(param, values)
    assert layer.weight is twin.weight is param and type(param) is nn.Parameter and not is_freed(param)
    assert torch.equal(param, values)
    layer(torch.ones(1, 4)).sum().backward()
    assert len(calls) == 2


def test_its_gradient_its_hooks_and_whether_it_trains_can_be_changed_while_it_is_freed():
    param = freed_parameter()
    param.grad = torch.ones(3, 4)
    assert param.grad.sum() == 12
    param.grad = None
    param.requires_grad_(False)
    assert not param.requires_grad
    param.requires_grad = True
    seen = []
    param.register_hook(seen.append)
    param.register_post_accumulate_grad_hook(seen.append)
    restore(param, torch.ones(3, 4))
    (param * 2).sum().backward()
    assert len(seen) == 2 and torch.equal(param.grad, torch.full((3, 4), 2.0))


def test_it_has_the_dtype_that_it_is_freed_in_and_the_one_that_it_is_restored_in():
    param = nn.Parameter(torch.ones(3, 4))
    free(param, LABEL, stand_in(param.bfloat16()))
    assert param.dtype is torch.bfloat16
    restore(param, torch.ones(3, 4, dtype=torch.float64))
    assert param.dtype is torch.float64


class Scaled(nn.Parameter):
    """A user's own kind of parameter."""

    unit = "metres"

    def doubled(self):
        return self * 2

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked = True
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_keeps_its_class_its_methods_and_its_attributes():
    param = Scaled(torch.ones(3, 4))
    param.origin = "a file"
    free(param, LABEL, stand_in(param))
    assert isinstance(param, Scaled) and isinstance(param, nn.Parameter) and param.unit == "metres" and param.origin == "a file"
    with pytest.raises(RuntimeError, match=LABEL):
        param.doubled()
    Scaled.asked = False
    restore(param, torch.full((3, 4), 3.0))
    assert type(param) is Scaled and param.origin == "a file"
    assert param.doubled().sum() == 72 and Scaled.asked


def test_a_use_goes_on_if_the_one_that_is_asked_restores_the_parameter_and_is_refused_if_not():
    param = nn.Parameter(torch.ones(3, 4))
    moments = iter([False, True])
    free(param, LABEL, stand_in(param), lambda: next(moments) and restore(param, torch.ones(3, 4)) is None)
    with pytest.raises(RuntimeError, match=LABEL):
        param.sum()
    assert param.sum() == 12 and type(param) is nn.Parameter and not vars(param)


def test_to_free_or_restore_twice_is_to_do_it_once():
    param = freed_parameter()
    free(param, "'another.name'", stand_in(param))
    with pytest.raises(RuntimeError, match=r"'another\.name'"):
        param.sum()
    restore(param, torch.ones(3, 4))
    restore(param, torch.full((3, 4), 2.0))
    assert type(param) is nn.Parameter and param.sum() == 24


def test_a_module_with_a_freed_parameter_refuses_to_run_to_be_saved_and_to_be_loaded():
    layer = nn.Linear(4, 3)
    saved = layer.state_dict()
    layer.weight.grad = torch.ones(3, 4)
    free(layer.weight, LABEL, stand_in(layer.weight))
    for use in (
        lambda: layer(torch.ones(1, 4)),
        layer.state_dict,
        lambda: layer.load_state_dict(saved),
        lambda: copy.deepcopy(layer),
        lambda: pickle.dumps(layer),
        layer.double,
        lambda: nn.init.zeros_(layer.weight),
        torch.optim.SGD([layer.weight], lr=0.1).step,
        lambda: nn.utils.vector_to_parameters(torch.ones(12), [layer.weight]),
    ):
        with pytest.raises(RuntimeError, match=LABEL):
            use()


def test_gathered_into_the_same_storage_it_gives_the_right_gradients_to_a_graph_from_before():
    """What ZeRO-3 does between forward and backward; autograd must not take it for another value, nor keep the memory."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    buffer = torch.cat([p.detach().flatten() for p in layer.parameters()])
    values = buffer.clone()
    views = buffer[:12].view(3, 4), buffer[12:]
    for p, view in zip(layer.parameters(), views, strict=True):
        p.data = view
    loss = layer(x).square().sum()
    for name, p in layer.named_parameters():
        free(p, repr(name), stand_in(p))
    flat.free(buffer)
    assert buffer.untyped_storage().nbytes() == 0
    flat.allocate(buffer)
    buffer.copy_(values)
    for p, view in zip(layer.parameters(), views, strict=True):
        restore(p, view)
        assert p.data_ptr() == view.data_ptr()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(expected, [x.grad, layer.weight.grad, layer.bias.grad], strict=True))
