"""The models that engines are tested with: small, and awkward in every way that has broken a production engine.

Each knows the shape of its input. `rows(model, step, n)` makes data, `loss_of(model_or_engine, x)` a loss that is the mean
over the batch, so that the mean of N ranks' losses is the loss of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minizero as mz
from minizero.model import GPT


class Awkward(nn.Module):
    """The default: parameters of 15, 5, 205, 25, 1, 0 and 7 elements, a scalar, and tied, frozen, unused, twice used ones.

    `wide` is the one that a shard's border cuts, whatever the number of ranks.
    """

    shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.twice = nn.Linear(5, 5, bias=False)
        self.alias = nn.Linear(5, 5, bias=False)
        self.alias.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(5, 41) / 5)
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.unused = nn.Linear(2, 3)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 7))
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first(x).tanh() @ self.wide).tanh() @ self.wide.t()
        h = self.tied(h).tanh()
        h = self.twice(self.twice(h).tanh()).tanh()
        h = self.alias(h).tanh()
        h = (self.frozen(h) * self.scale + self.shift).tanh() + self.empty.sum()
        return self.last(h) * self.one


class Few(nn.Module):
    """Two elements in all, one of its three parameters with none: fewer than there are ranks."""

    shape = ()

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(3, 0))
        self.b = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * x).tanh() * self.b + self.none.sum()


class Containers(nn.Module):
    """Parameters in nested containers; the output is nested as well."""

    shape = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"in": nn.Linear(4, 3), "out": nn.Linear(3, 4)}) for _ in range(2))
        self.gains = nn.ParameterList([torch.rand(4), torch.rand(1)])
        self.named = nn.ParameterDict({"bias": torch.rand(4)})

    def forward(self, x: Tensor) -> dict:
        for block in self.blocks:
            x = x + block["out"](block["in"](x).tanh())
        return {"scaled": [x * self.gains[0] + self.named["bias"], None], "rest": (x.tanh() * self.gains[1], 3)}


class ConvNet(nn.Module):
    """Channels-last convolution, BatchNorm with its buffers, and a transposed parameter.

    No bias before the BatchNorm: its gradient would be zero but for rounding, which Adam makes steps of.
    """

    shape = (2, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.transposed = nn.Parameter(torch.rand(4, 27).t() / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().flatten(1) @ self.transposed


class Strided(nn.Module):
    """What is unusual in memory in ConvNet, without the BatchNorm, which looks at its local batch only."""

    shape = (2, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.rand(4, 27).t() / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh().flatten(1) @ self.transposed


class MixedDtypes(nn.Module):
    """bfloat16, float32 and float64 in one model."""

    shape = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 6, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 5)
        self.high = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(self.low(x.bfloat16()).float()))
        return self.high(x.tanh().double())


class Experts(nn.Module):
    """Each call says which of the experts it runs, and in which order."""

    shape = (4,)

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        return sum((self.experts[i](x).tanh() for i in order), x)


class Checkpointed(nn.Module):
    """Three blocks, the second and third recomputed in backward, and the third used twice (or `uses` times)."""

    shape = (4,)

    def __init__(self, use_reentrant: bool, uses: int = 2) -> None:
        super().__init__()
        self.use_reentrant, self.uses = use_reentrant, uses
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in [self.blocks[1]] + [self.blocks[2]] * self.uses:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Lone(nn.Module):
    """One parameter and nothing else: the output is a multiple of it."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, factor: float | Tensor = 1.0) -> Tensor:
        return self.weight * factor


class Recomputed(nn.Module):
    """A block that keeps its input alone, and computes itself again in backward."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class SmallGPT(nn.Module):
    """The course's language model. It makes its tokens of real numbers."""

    shape = (12,)

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.gpt = GPT.preset("nano", width=16, context=12, tied=True)
        if use_reentrant is not None:
            self.gpt.blocks = nn.ModuleList(Recomputed(block, use_reentrant) for block in self.gpt.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt((x * 20).long() % 70) / 10


ALL: dict[str, Callable[[], nn.Module]] = {
    "awkward": Awkward,
    "few": Few,
    "containers": Containers,
    "strided": Strided,
    "mixed": MixedDtypes,
    "experts": Experts,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed reentrant": lambda: Checkpointed(True),
    "checkpointed reentrant once": lambda: Checkpointed(True, uses=1),
}
LARGER: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": ConvNet,
    "gpt": SmallGPT,
    "gpt checkpointed": lambda: SmallGPT(False),
    "gpt checkpointed reentrant": lambda: SmallGPT(True),
}


def build(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = (ALL | LARGER)[name]()
    return model.to(dtype) if dtype is not None else model


def in_groups(model: nn.Module, optimizer_class: type, **settings: object) -> torch.optim.Optimizer:
    """Two groups with a learning rate and a decay of their own, the parameters not in the model's order."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return optimizer_class([{"params": rest[::-1], "weight_decay": 0.0}, {"params": matrices, "lr": 0.02, "weight_decay": 0.1}], lr=0.01, **settings)


LOCAL_ENGINES = [mz.DDP, mz.Zero1]  # they keep whole gradients between two backwards, and so have a no_sync()
WHOLE_ENGINES = [mz.DDP, mz.Zero1, mz.Zero2]  # they keep whole weights


def without_sync(engine):
    """Around a backward that only accumulates: no_sync() where the step has it; the others reduce every backward."""
    return engine.no_sync() if isinstance(engine, tuple(LOCAL_ENGINES)) else contextlib.nullcontext()


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them; two parameters each."""
    torch.manual_seed(0)
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    model.shape = (widths[0],)
    return model


def rows(model: nn.Module, step: int, n: int, seed: int = 0) -> Tensor:
    """n rows of input, the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    dtype = torch.float64 if all(p.dtype is torch.float64 for p in model.parameters()) else torch.float32
    return torch.randn(n, *model.shape, generator=generator, dtype=dtype)


def share(x: Tensor, rank: int, world_size: int) -> Tensor:
    """A rank's share of a batch, equal in size on all ranks."""
    return x.chunk(world_size)[rank]


def loss_of(model: Callable, x: Tensor, *args: object) -> Tensor:
    """A loss that every tensor of the output takes part in: the mean over the rows of x."""
    return sum(y.square().flatten(1).sum(1).double().mean() for y in _tensors(model(x, *args)))


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output if output.dim() > 1 else output.unsqueeze(-1)]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, (list, tuple)) else []


def gathered(model: nn.Module, *modules: nn.Module) -> contextlib.AbstractContextManager:
    """In it the weights of an engine can be read, whoever holds them; those of a plain module always can. A call of all ranks."""
    return model.gathered(*modules) if hasattr(model, "gathered") else contextlib.nullcontext()


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the whole weights, of an engine or of a plain module. Of an engine it's a call of all ranks."""
    with gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mean_grads(engine: nn.Module) -> dict[str, Tensor | None]:
    """The whole batch's gradients as the optimizer gets them, whoever holds them: what a first step of SGD keeps as its momentum."""
    for group in engine.optimizer.param_groups:
        group["momentum"] = 0.9
    engine.step()
    state = engine.optimizer_state_dict()["state"]
    return {name: state[name]["momentum_buffer"] if name in state else None for name, _ in engine.module.named_parameters()}


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of two elements."""
    return max(((x - y).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal bits."""
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def refusal(action: Callable, *args: object, **keywords: object) -> str | None:
    """The error that `action` raises, as "Type: message"; None if it goes through."""
    try:
        action(*args, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
