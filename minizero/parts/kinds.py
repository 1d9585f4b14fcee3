"""What a tensor's memory is for: one word for each storage, said by the code that allocates it.

    staging = tag(torch.empty(P), "comm")       # the meter (lens/memory.py) will count these bytes as communication

The word belongs to the storage, so every view shares it, and it dies with the storage. Plain PyTorch code needs no
tags: the meter knows parameters, gradients and optimizer state by itself. A tag is for what only its author knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

KINDS = ("params", "grads", "optimizer", "activations", "comm", "host", "other")


@dataclass
class Label:
    """What is said about one storage. Whoever keeps the label can still read it when the storage is gone."""

    kind: str | None = None


# Python keeps one UntypedStorage object for each storage as long as the storage lives, even when only C++ holds it.
_labels: WeakKeyDictionary[UntypedStorage, Label] = WeakKeyDictionary()


def tag(tensor: Tensor, kind: str) -> Tensor:
    """Say what the tensor's whole storage is for, one of KINDS; the last word counts. Returns the tensor.

    Raises ValueError for a kind that is none, TypeError for what is no tensor.
    """
    if kind not in KINDS:
        raise ValueError(f"tag(tensor, {kind!r}): a kind is one of {', '.join(KINDS)}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tag(tensor, {kind!r}) needs a torch.Tensor, got {type(tensor).__name__}")
    for storage in storages(tensor):
        label(storage).kind = kind
    return tensor


def kind_of(tensor: Tensor) -> str | None:
    """What `tag` said about the tensor's storage; None where nothing was said."""
    return next((label(storage).kind for storage in storages(tensor)), None)


def label(storage: UntypedStorage) -> Label:
    """The storage's label, blank at first."""
    return _labels.setdefault(storage, Label())


def storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The storages that hold the tensor's elements: one, or those of the tensors that it is made of, or none.

    A DTensor and other wrappers claim a storage of their full size which isn't there; what they hold is.
    """
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from storages(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
    else:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # vmap's tensors, other sparse layouts and their like have none
            return
        yield storage
