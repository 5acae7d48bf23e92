"""How much memory is taken, as the driver (CUDA) or the operating system (CPU, Linux) says."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pageforge.bench.harness import synchronize
from pageforge.bench.report import cell
from pageforge.bench.settings import give_back
from pageforge.store import free_bytes

PROCESS = Path("/proc/self")

NEW_PEAK = "5"
"""Written to `clear_refs`: the process's peak begins anew with what is resident now."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes over what was taken when the meter was made; None where the system does not say.

    `mapped_bytes`: given now. `peak_bytes`: the most since the peak began. `torch_peak_bytes`: what
    torch's CUDA allocator alone calls its peak, in which a pool's pages are not.
    """

    mapped_bytes: int | None
    peak_bytes: int | None
    torch_peak_bytes: int | None = None


class Meter:
    """Measures what has been taken since it was made: alone, so nothing else may come or go.

    On CUDA that is the whole device's memory, on the CPU this process's own (no files). What torch
    and the C library keep for later is given back before each reading, so that it does not count.
    """

    def __init__(self, device: torch.device):
        self._device = device
        give_back(device)
        self._give_back_spare()
        self._before = self._given()
        self._resident = _status("VmRSS")
        self._allocated = torch.cuda.memory_allocated(device) if self._on_cuda else 0

    def begin_peak(self) -> None:
        """The peak begins anew with what is taken now."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or no right to
                (PROCESS / "clear_refs").write_text(NEW_PEAK)

    def read(self) -> MemoryUse:
        """What is taken now, and what was at the peak."""
        if not self._on_cuda:
            peak = _difference(_status("VmHWM"), self._resident)
            self._give_back_spare()
            mapped = _difference(self._given(), self._before)
            if mapped is not None and peak is not None:
                peak = max(peak, mapped)  # the kernel keeps it by rough counts
            return MemoryUse(mapped, peak)
        synchronize(self._device)
        most = torch.cuda.max_memory_allocated(self._device)
        gone = most - torch.cuda.memory_allocated(self._device)
        self._give_back_spare()
        mapped = _difference(self._given(), self._before)
        peak = None if mapped is None else mapped + gone
        return MemoryUse(mapped, peak, most - self._allocated)

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _given(self) -> int | None:
        if self._on_cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        return _status("RssAnon")

    def _give_back_spare(self) -> None:
        if self._on_cuda:
            synchronize(self._device)
            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)


def check_room(device: torch.device, least: int) -> None:
    """Raise MemoryError where `least` bytes are not free: the kernel would end the process."""
    free = free_bytes(device)
    if least > free:
        raise MemoryError(f"needs {cell(least / 1e9)} GB, {cell(free / 1e9)} GB are free")


def storage_bytes(cache: Cache) -> int:
    """Bytes behind all tensors that a cache holds, each storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors([vars(layer) for layer in cache.layers])
    }
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _status(name: str) -> int | None:
    """A line of /proc/self/status, in bytes."""
    try:
        text = (PROCESS / "status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
