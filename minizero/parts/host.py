"""Memory beside the device, and copies there and back.

    Memory()                     of this machine; beside a GPU it is pinned, so that copies can run beside its work
    Disk()                       of files that only this process can see, and that end with it however it ends
    copy(to, source, unit)       begins to copy, and returns something to wait for

On a GPU copies run on a stream of their own: after what the GPU was told to do before, beside what it is told next.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from minizero.parts import flat, kinds, spans
from minizero.parts.bucket import TransientBucket
from minizero.parts.flat import UnitShard


class Memory:
    """Ordinary memory."""

    def __init__(self, device: torch.device):
        self._pinned = device.type == "cuda"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many elements."""
        return kinds.tag(torch.empty(numel, dtype=dtype, pin_memory=self._pinned), "host")

    def drop(self) -> None:
        """Nothing of it is needed for a while."""


class Disk(Memory):
    """Files, mapped into memory: what is read or written comes and goes by pages, as ZeRO-Infinity does with NVMe.

    They have no name from the beginning, so nothing is left of them when the process ends. They lie where `tempfile` puts its
    files (TMPDIR), which should be a disk.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return kinds.tag(torch.empty(0, dtype=dtype), "host")
        with tempfile.TemporaryFile(prefix="minizero-") as file:
            try:
                _reserve(file.fileno(), nbytes)
            except OSError as error:
                raise OSError(error.errno, f"no room for {nbytes:,} bytes of optimizer state in {tempfile.gettempdir()}: set TMPDIR to a "
                              "folder on a disk that has it") from error  # fmt: skip
            pages = mmap.mmap(file.fileno(), nbytes)
        self._maps.add(pages)
        return kinds.tag(torch.frombuffer(pages, dtype=dtype), "host")

    def drop(self) -> None:
        """Give the pages back; what is in them is in the files."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)


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
    """Copy over the host link; between wait() and here neither tensor may be written to."""
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
    """A unit's shard of which only the slice that computes is on the device, or not even that.

    shard_S    on the host, in fp32: what the optimizer updates there
    slice_S    on the device; with `params` on the host, from where each gathering fetches it
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], rank: int, world_size: int, weights: Sequence[Tensor], master: bool,
                 labels: Sequence[str], memory: Memory, offload_params: bool):  # fmt: skip
        self.memory, self.offload_params = memory, offload_params
        self._copy: Copy | None = None  # of the slice
        self._rounded_S: Tensor | None = None
        super().__init__(name, params, rank, world_size, weights, master or not offload_params, labels)
