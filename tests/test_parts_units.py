"""Which modules form a unit, and when it is entered and left."""

import copy
import io
import pickle
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from models import Awkward, Containers, Experts, mlp, refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minizero.model import GPT
from minizero.parts.units import Watch, units_of


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names(module, choice=None):
    """For each unit the names of its parameters."""
    known = {param: name for name, param in module.named_parameters()}
    return {unit.name: [known[param] for param in unit.params] for unit in units_of(module, choice)}


# --- which ------------------------------------------------------------------------------------------


def test_by_default_the_children_of_the_outermost_lists_are_units_and_the_rest_is_the_root():
    assert names(Net(2)) == {
        "root": ["embed.weight", "embed.bias", "head.weight", "head.bias"],
        "blocks.0": ["blocks.0.linear.weight", "blocks.0.linear.bias"],
        "blocks.1": ["blocks.1.linear.weight", "blocks.1.linear.bias"],
    }
    assert list(names(GPT.preset("nano"))) == ["root", "blocks.0", "blocks.1"]


def test_of_a_sequential_every_layer_with_parameters_is_a_unit_and_there_is_no_root():
    assert names(mlp(2, 3, 1)) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


def test_lists_inside_a_unit_are_part_of_it():
    nested = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))])
    assert list(names(nested)) == ["0"]


def test_a_container_that_cannot_be_called_is_no_unit_but_its_children_are():
    assert list(names(Containers())) == [
        "root", "blocks.0.in", "blocks.0.out", "blocks.1.in", "blocks.1.out"
    ]  # fmt: skip
    assert names(Containers())["root"] == ["gains.0", "gains.1", "named.bias"]


def test_a_model_without_lists_is_one_unit():
    assert list(names(Awkward())) == ["root"]
    assert len(names(Awkward())["root"]) == len(list(Awkward().parameters()))


def test_units_can_be_chosen_as_classes_and_as_modules_and_nested():
    model = Net(2)
    assert list(names(model, [Block])) == ["root", "blocks.0", "blocks.1"]
    assert list(names(model, [Block, nn.Linear])) == ["embed", "blocks.0.linear", "blocks.1.linear", "head"]
    assert list(names(model, [model.blocks[1], model.head])) == ["root", "blocks.1", "head"]
    assert list(names(model, [])) == ["root"]
    assert list(names(model, iter([model]))) == ["root"]


def test_a_choice_that_cannot_be_a_unit_is_refused():
    model = Net()
    assert refusal(units_of, model, [nn.Conv2d]) == "ValueError: units: the model has no module of class Conv2d"
    assert refusal(units_of, model, [nn.Linear(1, 1)]) == "ValueError: units: a Linear that is given is no part of the model"
    assert refusal(units_of, model, [model.blocks]).startswith("ValueError: units: 'blocks' is a ModuleList, which is never called")
    assert refusal(units_of, model, Block).startswith("TypeError: units must be a list of modules or of module classes")
    assert refusal(units_of, model, ["blocks.0"]).startswith("TypeError: units must be a list of modules or of module classes")


def tied(*owners):
    """A model in which these linears share their weight."""
    model = nn.ModuleDict({"embed": nn.Linear(4, 4), "a": Net(2), "head": nn.Linear(4, 4)})
    parts = dict(model.named_modules())
    for owner in owners[1:]:
        parts[owner].weight = parts[owners[0]].weight
    return model


@pytest.mark.parametrize(("owners", "unit"), [
    (("embed", "head"), "root"),
    (("a.blocks.0.linear", "a.blocks.1.linear"), "a"),
    (("a.blocks.0.linear", "a.embed"), "a"),
    (("a.blocks.0.linear", "head"), "root"),
])  # fmt: skip
def test_a_shared_parameter_belongs_to_the_lowest_unit_that_contains_all_its_uses(owners, unit):
    model = tied(*owners)
    shared = model.get_submodule(owners[0]).weight
    units = units_of(model, [Net, Block, model["embed"], model["head"]])
    assert [each.name for each in units if any(param is shared for param in each.params)] == [unit]
    assert sum(len(each.params) for each in units) == len(list(model.parameters()))


def test_a_module_that_stands_in_two_units_belongs_to_the_one_around_both_or_is_a_unit_itself():
    model = Net(2)
    model.blocks[1].linear = model.blocks[0].linear
    assert list(names(model)) == ["root"]
    assert list(names(model, [Block, model.blocks[0].linear])) == ["root", "blocks.0.linear"]


def test_parameters_of_several_kinds_are_divided():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    model[0].extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    (unit,) = units_of(model, None)
    assert [[tuple(p.shape) for p in params] for params in unit.kinds()] == [[(2, 2)], [(2,)], [(3,)]]


# --- when -------------------------------------------------------------------------------------------


class Events(list):
    """A listener that writes down what it is told. No weights come or go."""

    def __init__(self, module, choice=None):
        super().__init__()
        self.units = units_of(module, choice)
        self.watch = Watch(self.units, self)
        for name, part in module.named_modules():
            if isinstance(part, (Block, Leaf)):
                part.register_forward_pre_hook(lambda *_, name=name: self.append(f"run {name}"))

    __hash__ = object.__hash__

    def _enter_forward(self, unit):
        self.append(f"+{unit.name}")

    def _leave_forward(self, unit):
        self.append(f"-{unit.name}")

    def _enter_backward(self, unit):
        self.append(f"<{unit.name}")

    def _leave_backward(self, unit):
        self.append(f">{unit.name}")

    def _at_rest(self):
        pass

    def take(self):
        taken = " ".join(self).replace("blocks.", "")
        self.clear()
        return taken


class Leaf(nn.Module):
    """Returns what it is told to."""

    def __init__(self, wrap=lambda x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.wrap = wrap

    def forward(self, *args: Tensor, **kwargs: Tensor):
        return self.wrap(sum([*args, *kwargs.values()]) * self.weight)


def x():
    return torch.ones(2, 4)


def test_units_are_entered_before_they_run_and_left_after_it():
    model = Net()
    events = Events(model)
    loss = model(x()).sum()
    assert events.take() == "+root +0 run 0 -0 +1 run 1 -1 +2 run 2 -2 -root"
    loss.backward()
    assert events.take() == "<root <2 >2 <1 >1 <0 >0 >root"


def test_a_backward_is_left_when_the_next_one_begins_or_at_the_end():
    model = Net(2)
    events = Events(model)
    loss = model(x()).sum()
    events.clear()
    model.blocks[0].linear.weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient 0"))
    model.blocks[1].linear.weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient 1"))
    loss.backward()
    assert events.take() == "<root <1 gradient 1 >1 <0 gradient 0 >0 >root"


def test_without_gradients_there_is_a_forward_only():
    model = Net(1)
    events = Events(model)
    with torch.no_grad():
        model(x())
    assert events.take() == "+root +0 run 0 -0 -root"
    model.requires_grad_(False)(x())
    assert events.take() == "+root +0 run 0 -0 -root"


def test_an_exception_in_forward_leaves_what_was_entered():
    model = Net(2)
    events = Events(model)
    model.blocks[1].linear.register_forward_hook(lambda *_: 1 / 0)
    assert refusal(model, x()).startswith("ZeroDivisionError")
    assert events.take() == "+root +0 run 0 -0 +1 run 1 -1 -root"
    assert events.watch._running == []
    before = torch.ones(1, requires_grad=True)
    (before * 2).sum().backward()  # and no hook on what autograd saves is left behind
    assert events.take() == ""


class Pair(NamedTuple):
    first: Tensor
    second: object


@dataclass
class Record:
    x: Tensor
    n: int = 3


class Thing:
    def __init__(self, x):
        self.x, self.me = x, self


CONTAINERS = {
    "tuple": lambda x: (None, x),
    "dict": lambda x: {"a": 1, "b": x},
    "namedtuple": lambda x: Pair(x, None),
    "dataclass": Record,
    "nested list": lambda x: [[None, [x]], 3],
    "an object": Thing,
    "two": lambda x: (x * 2, x * 3),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_backward_is_noticed_in_whatever_the_output_hides(container):
    model = nn.Sequential(Leaf(CONTAINERS[container]))
    events = Events(model)
    out = model(x())
    assert type(out) is type(CONTAINERS[container](x()))
    found = [out]
    while not isinstance(found[0], Tensor):
        each = found.pop(0)
        values = each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else vars(each).values() if hasattr(each, "__dict__") else ()
        found += [v for v in values if v is not None and v is not each]
    found[0].sum().backward()
    assert events.take() == "+0 run 0 -0 <0 >0"


def test_a_unit_used_twice_is_left_when_autograd_has_passed_its_first_use():
    class Twice(Net):
        def forward(self, x):
            return self.blocks[0](self.blocks[1](self.blocks[0](x)))

    model = Twice(2)
    events = Events(model)
    loss = model(x()).sum()
    events.clear()
    loss.backward()
    assert events.take() == "<root <0 -0 <1 >1 <0 >0 >root"


def test_a_unit_inside_another_is_entered_and_left_inside_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Leaf(), Leaf()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.b(self.a(x) * self.weight)

    model = nn.Sequential(Outer(), Outer())
    events = Events(model, [Outer, Leaf])
    loss = model(x()).sum()
    assert events.take() == "+0 +0.a run 0.a -0.a +0.b run 0.b -0.b -0 +1 +1.a run 1.a -1.a +1.b run 1.b -1.b -1"
    loss.backward()
    assert events.take() == "<1 <1.b >1.b <1.a >1.a >1 <0 <0.b >0.b <0.a >0.a >0"


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_second_forward_of_activation_checkpointing_enters_a_unit_once(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    model = Checkpointed(2)
    events = Events(model)
    loss = model(x()).sum()
    assert events.take() == "+root +0 run 0 -0 +1 run 1 -1 -root"
    loss.backward()
    if reentrant:
        assert events.take() == "<root <1 run 1 >1 <0 run 0 >0 >root"
    else:  # two calls are entered, that of the forward and the recomputing one; the second gathers nothing
        assert events.take() == "<root <1 <1 run 1 >1 <0 <0 run 0 >0 >root"


def test_a_checkpoint_around_two_units_enters_the_first_a_second_time():
    class Checkpointed(Net):
        def forward(self, x):
            return self.head(checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), self.embed(x), use_reentrant=False))

    model = Checkpointed(2)
    events = Events(model)
    loss = model(x()).sum()
    events.clear()
    loss.backward()
    taken = events.take()
    assert taken.startswith("<root <1") and taken.endswith(">0 >root")
    assert taken.count(">0") == taken.count(">1") == 1


def test_two_forwards_before_their_backwards():
    model = Net(1)
    events = Events(model)
    losses = [model(x()).sum(), model(2 * x()).sum()]
    events.clear()
    sum(losses).backward()
    assert events.take() == "<root <0 -0 -root <root <0 >0 >root"


def test_a_forward_whose_output_is_gone_is_not_waited_for():
    model = Net(1)
    events = Events(model)
    model(x())
    loss = model(x()).sum()
    assert [len(unit.coming) for unit in events.units] == [1, 1]
    events.clear()
    loss.backward()
    assert events.take() == "<root <0 >0 >root"


def test_a_graph_may_be_gone_through_twice():
    model = Net(1)
    events = Events(model)
    loss = model(x()).sum()
    events.clear()
    loss.backward(retain_graph=True)
    first = events.take()
    loss.backward()
    assert first == events.take() == "<root <0 >0 >root"


def test_gradients_of_inputs_alone_enter_and_leave_too():
    model = Net(1)
    events = Events(model)
    inputs = x().requires_grad_()
    out = model(inputs).sum()
    events.clear()
    torch.autograd.grad(out, inputs)
    assert events.take() == "<root <0 >0 >root"


def test_an_inner_backward_inside_forward_disturbs_nothing():
    class Force(Net):
        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Force(1)
    events = Events(model)
    loss = model(x()).sum()
    events.clear()
    loss.backward()
    assert events.take().endswith(">root")
    assert events.watch._entered == []


def test_kwargs_and_direct_calls_of_a_unit():
    model = Net(1)
    events = Events(model)
    model.blocks[0](x=x()).sum().backward()
    assert events.take() == "+0 run 0 -0 <0 >0"


def test_a_copy_of_the_module_has_no_hooks_and_neither_has_the_model_when_its_listener_is_gone():
    model = nn.Sequential(nn.Linear(4, 4))
    events = Events(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copied, pickled, torch.load(file, weights_only=False)):
        other(x()).sum().backward()
    assert events.take() == ""
    gone = weakref.ref(events)
    del events
    assert gone() is None
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    model(x()).sum().backward()


def test_the_order_of_experts_is_the_order_of_their_calls():
    model = Experts(3)
    events = Events(model)
    loss = model(x(), (2, 0)).sum()
    assert events.take() == "+root +experts.2 -experts.2 +experts.0 -experts.0 -root"
    loss.backward()
    assert events.take() == "<root <experts.0 >experts.0 <experts.2 >experts.2 >root"
