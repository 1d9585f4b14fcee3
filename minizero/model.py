"""A tiny GPT, the model that every lesson trains.

Decoder only, pre-norm, learned positions. Nothing in it knows that it will be trained on several ranks: what the course
adds is wrapped around it. The blocks stand in an `nn.ModuleList`, so ZeRO-3 finds its units without being told.
"""

# B = batch rows, T = tokens in a row, V = vocabulary, C = width, H = heads

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. `context` is the longest row it reads; `tied` makes embedding and head share one weight."""

    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self):
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"width={self.width} does not split into heads={self.heads}: width must be a multiple of heads"
            )


# The vocabulary is the 70 characters of minizero.data.
PRESETS = {
    "nano": GPTConfig(vocab_size=70, context=64, layers=2, heads=4, width=64),  # 0.1 M parameters: seconds on a CPU
    "tiny": GPTConfig(vocab_size=70, context=128, layers=4, heads=4, width=128),  # 0.8 M: learns to spell
    "small": GPTConfig(vocab_size=70, context=256, layers=6, heads=8, width=256),  # 4.8 M: for benchmarks
}


class Attention(nn.Module):
    """Causal self-attention: a token looks at itself and at those before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, C // H]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, T, C]


class Block(nn.Module):
    """Attention and a two-layer MLP, each added to the stream that runs past them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """`model(x)` is the logits [B, T, V] of tokens x [B, T]; `model(x, y)` the mean cross-entropy against y [B, T].

    Weights are drawn from torch's global generator: the same seed gives the same model.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        # PyTorch draws embeddings with a standard deviation of 1: too loud for a head that shares them.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=config.width**-0.5)

    @classmethod
    def preset(cls, name: str, **changes) -> "GPT":
        """One of the sizes in `PRESETS`, with fields of its config changed: `GPT.preset("nano", tied=True)`."""
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls(replace(PRESETS[name], **changes))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[1] > self.config.context:
            raise ValueError(f"a row of {x.shape[1]} tokens is longer than the context of {self.config.context}")
        position = torch.arange(x.shape[1], device=x.device)
        h = self.dropout(self.tokens(x) + self.positions(position))  # [B, T, C]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))  # [B, T, V]
        if y is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())  # fp32: 16 bits are too few for the sum
