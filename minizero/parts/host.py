"""Memory beside the device, and copies there and back.

    Memory()                     of this machine; beside a GPU it is pinned, so that copies can run beside its work
    Disk()                       of files that only this process can see, and that end with it however it ends
    copy(to, source, unit)       begins to copy, and returns something to wait for

On a GPU copies run on a stream of their own: after what the GPU was told to do before, beside what it is told next.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import increment_version

from minizero.parts import kinds, spans
from minizero.parts.bucket import TransientBucket
from minizero.parts.flat import UnitShard
from minizero.parts.optim import one_for_each_element


class Memory:
    """Ordinary memory."""

    def __init__(self, device: torch.device):
        self._pinned = device.type == "cuda"

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many elements that are on their way."""
        return kinds.tag(torch.empty(numel, dtype=dtype, pin_memory=self._pinned), "host")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many elements that stay."""
        return self.staging(numel, dtype)

    def drop(self) -> None:
        """Nothing of it is needed for a while."""


class Disk(Memory):
    """Files, mapped into memory: what is read or written comes and goes by pages, as ZeRO-Infinity does with NVMe.

    They have no name from the beginning, so nothing is left of them when the process ends. They lie where `tempfile` puts its
    files (TMPDIR), which should be a disk.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._mapped: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return kinds.tag(torch.empty(0, dtype=dtype), "host")
        try:
            mapped = _mapped(numel, dtype)
        except OSError as error:
            raise OSError(error.errno, f"no room for {nbytes:,} bytes of optimizer state in {tempfile.gettempdir()} ({error.strerror}): "
                          "set TMPDIR to a folder on a disk that has it") from error  # fmt: skip
        self._mapped.add(mapped.untyped_storage())
        return kinds.tag(mapped, "host")

    def drop(self) -> None:
        """Give the pages back; what is in them is in the files."""
        for storage in self._mapped:
            _madvise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)  # if it is refused, they stay


def _mapped(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file of its own, which has lost its name; torch keeps it mapped, not open, as long as the tensor lives."""
    if sys.platform.startswith("linux"):
        with tempfile.TemporaryFile(prefix="minizero-") as file:
            _reserve(file.fileno(), numel * dtype.itemsize)
            return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=numel, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="minizero-") as file:
        _reserve(file.fileno(), numel * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function(address, nbytes, advice)


def _reserve(file: int, nbytes: int) -> None:
    """All of it now: a page for which there is no place later would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:  # macOS
        os.ftruncate(file, nbytes)


MEMORIES = {"cpu": Memory, "disk": Disk}


class Copy:
    """A copy under way."""

    def __init__(self, span: spans.Span | None, event: torch.cuda.Event | None, to_host: bool):
        self._span, self._event, self._to_host = span, event, to_host

    def wait(self) -> None:
        """After it, what this rank does with the copy finds it complete."""
        if self._event is not None:
            if self._to_host:
                self._event.synchronize()
            else:
                self._event.wait()  # the current stream does; the processor goes on
        spans.end(self._span)
        self._span = self._event = None


def copy(to: Tensor, source: Tensor, unit: str) -> Copy:
    """Copy over the host link; from here until wait() neither tensor may be written to."""
    device = to.device if to.is_cuda else source.device
    if device.type != "cuda":
        span = spans.begin("copy", unit, source.nbytes)
        to.copy_(source)
        if span is not None:
            span.done = time.perf_counter()
        return Copy(span, None, to_host=False)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        span = spans.begin("copy", unit, source.nbytes)
        to.copy_(source, non_blocking=True)
        event = torch.cuda.Event(enable_timing=span is not None)
        event.record()
    if span is not None:
        span.event = event
    (to if to.is_cuda else source).record_stream(stream)
    return Copy(span, event, to_host=not to.is_cuda)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class HostShard(UnitShard):
    """A unit's shard that is updated on the host. On the device is the slice that computes; or, with the parameters offloaded,
    nothing, and each gathering fetches it.

    shard_S            on the host: what the optimizer updates, in fp32 if it is a master
    updated_beside     by another thread, while this one computes
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], rank: int, world_size: int, weights: Sequence[Tensor], master: bool,
                 labels: Sequence[str], memory: Memory, offload_params: bool, updated_beside: bool):  # fmt: skip
        self.memory, self.offload_params, self.updated_beside = memory, offload_params, updated_beside
        self.join: Callable[[], None] = _nothing  # called before the shard is written to
        self._upload: Copy | None = None  # of the updated slice
        self._kept_S: Tensor | None = None
        self._state: dict[str, Tensor] = {}  # of the optimizer, by its name: memory for S elements
        self._exact = torch.float32 if master else params[0].dtype
        apart = params[0].requires_grad and (master or updated_beside or not offload_params)
        super().__init__(name, params, rank, world_size, weights, apart, labels)

    def _slice(self) -> Tensor:
        if not self.offload_params:
            return super()._slice()
        return self.memory.empty(self.layout.S, self.params[0].dtype).zero_()

    def _master(self) -> Tensor:
        return self.memory.empty(self.layout.S, self._exact).zero_()

    # --- to the device ----------------------------------------------------------------------------

    def give(self) -> Tensor:
        self.settle()
        if not self.offload_params:
            return self.slice_S
        copy(self.mine_S, self.slice_S, self.name).wait()
        self._kept_S = self.mine_S.clone() if self.full_P.is_cuda else None
        return self.mine_S

    def free(self) -> None:
        super().free()
        self._kept_S = None

    def publish(self) -> None:
        """The updated slice leaves for the device, rounded."""
        if self.offload_params:
            super().publish()
            self.memory.drop()
            return
        rounded_S = self.shard_S.detach()
        if rounded_S.dtype is not self.slice_S.dtype or self.updated_beside:  # then it may change before it has left
            rounded_S = self.memory.staging(self.layout.S, self.slice_S.dtype).copy_(rounded_S)
        self._upload = copy(self.slice_S, rounded_S, self.name)
        self.memory.drop()
        increment_version(self.params)

    def settle(self) -> None:
        """The updated slice is on the device."""
        if self._upload is not None:
            self._upload.wait()
            self._upload = None

    # --- written to -------------------------------------------------------------------------------

    def fill(self, weights: Sequence[Tensor]) -> None:
        self.settle()
        super().fill(weights)

    def adopt(self) -> None:
        self.settle()
        super().adopt()

    def _as_gathered(self) -> Tensor:
        return self.slice_S if self._kept_S is None else self._kept_S

    def _write(self, mine_S: Tensor, written_S: Tensor) -> None:
        if not self.updated_beside:
            super()._write(mine_S, written_S)
            return
        self.join()  # what it has updated stays: only the difference is written
        self.shard_S += (mine_S - self._as_gathered()).to(self.shard_S)
        self.slice_S.copy_(mine_S)

    # --- the optimizer's state ----------------------------------------------------------------------

    def keep_state(self, state_of: Mapping[Tensor, dict[str, Any]]) -> None:
        """What the optimizer remembers of the pieces is in the memory that is meant for it."""
        for param, piece in self.pieces.items():
            state = state_of.get(piece, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if isinstance(self.memory, Disk) and one_for_each_element(key, value, piece):
                    value = state[key] = self._on_disk(key, param, value)
                kinds.tag(value, "host")
        self.memory.drop()

    def _on_disk(self, key: str, param: nn.Parameter, value: Tensor) -> Tensor:
        if key not in self._state or self._state[key].dtype is not value.dtype:
            self._state[key] = self.memory.empty(self.layout.S, value.dtype)
        place = self.cut(self._state[key])[param]
        return value if value.data_ptr() == place.data_ptr() else place.copy_(value)


def _nothing() -> None:
    pass


class HostBucket(TransientBucket):
    """Gradients whose shard leaves for the host as soon as it is the mean. There it waits for the step, and there it is added up."""

    weights: HostShard

    def __init__(self, *args: Any):
        self._host_S: Tensor | None = None
        self._download: Copy | None = None
        super().__init__(*args)

    def _keep_mean(self) -> None:
        self._host_S = self.weights.memory.staging(self.layout.S, self.grad_S.dtype)
        self._download = copy(self._host_S, self.grad_S, self.name)

    def _mean(self) -> Tensor:
        if self._download is not None:
            self._download.wait()
            self._download = None
        return self._host_S

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return self.weights.memory.staging(self.layout.S, dtype).zero_()

    def prepare(self, scale: float) -> None:
        if self._in_buffer:
            self._set_aside()
        super().prepare(scale)

    def _zero(self, param: nn.Parameter) -> None:
        super()._zero(param)
        if self._host_S is not None and param in self.weights.pieces:
            self.weights.cut(self._mean())[param].zero_()

    def _spend(self) -> None:
        super()._spend()
        if self._host_S is not None:
            self._mean()
        self._host_S = None
