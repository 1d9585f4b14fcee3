"""The text that the course learns from: Shakespeare's characters as numbers, in batches that any number of ranks share.

The text comes with the package and is read at its first use. It is kept as a NumPy array, so the memory meter, which
counts tensors, shows the model and not the library it reads from.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import numpy as np
import torch

SPLITS = ("train", "validation")


@cache
def _corpus() -> tuple[str, np.ndarray]:
    """The vocabulary and the whole text as numbers, uint8 [characters]."""
    raw = np.frombuffer(files("minizero").joinpath("text/shakespeare.txt").read_bytes(), dtype=np.uint8)
    used = np.bincount(raw, minlength=128) > 0  # the text is ASCII: one byte is one character
    return "".join(map(chr, np.flatnonzero(used))), (np.cumsum(used) - 1).astype(np.uint8)[raw]


def vocabulary() -> str:
    """Every character of the text once, sorted. A character's number is its place in this string."""
    return _corpus()[0]


def encode(text: str) -> torch.Tensor:
    """Characters to numbers, int64 [len(text)]. ValueError for a character that the text never uses."""
    number = {character: i for i, character in enumerate(vocabulary())}
    unknown = sorted(set(text) - number.keys())
    if unknown:
        raise ValueError(f"not in the vocabulary: {unknown}; it has {vocabulary()!r}")
    return torch.tensor([number[character] for character in text], dtype=torch.int64)


def decode(numbers: torch.Tensor) -> str:
    """Numbers [T] back to characters: decode(encode(text)) == text."""
    characters = vocabulary()
    return "".join(characters[i] for i in numbers.tolist())


def tokens(split: str) -> np.ndarray:
    """One part of the text as numbers, uint8: "train" is the first 90 %, "validation" the last 10 %."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose one of {', '.join(map(repr, SPLITS))}")
    text = _corpus()[1]
    border = len(text) - len(text) // 10
    return text[:border] if split == "train" else text[border:]


def batches(
    split: str, batch_size: int, context: int, steps: int, seed: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `steps` pairs (x, y), each int64 [batch_size // world_size, context]; y is x one character further on.

    `batch_size` is the global batch. Which rows are in it depends on `seed` and on the step, never on `world_size`:
    rank r takes the r-th of world_size contiguous slices. So the ranks' rows, one below the other in rank order, are
    what a single process sees.
    """
    text = tokens(split)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: ranks count from 0 to world_size - 1")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size={batch_size} does not split into world_size={world_size} equal slices: take a multiple of it"
        )
    if not 1 <= context < len(text):
        raise ValueError(f"context={context}: the {split} text allows 1 to {len(text) - 1} characters")
    rows = batch_size // world_size

    def generate():  # a function of its own, so that the errors above come from the call and not from the first batch
        generator = np.random.default_rng(seed)
        for _ in range(steps):
            starts = generator.integers(len(text) - context, size=batch_size)[rank * rows : (rank + 1) * rows]
            window = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return generate()


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: str, length: int, seed: int = 0, temperature: float = 1.0) -> str:
    """The prompt and `length` characters that a GPT writes after it.

    Each is drawn from softmax(logits / temperature); temperature 0 takes the likeliest. The draw happens on the CPU,
    from a generator of its own, so it does not disturb the training's random numbers.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character to go on from")
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text = encode(prompt)
    training = model.training
    model.eval()
    for _ in range(length):
        logits = model(text[None, -model.config.context :].to(device))[0, -1].float().cpu()  # [V]
        if temperature == 0:
            following = logits.argmax()[None]
        else:
            following = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        text = torch.cat([text, following])
    model.train(training)
    return decode(text)
