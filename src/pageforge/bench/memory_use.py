"""How much memory is taken, as the driver (CUDA) or the operating system (CPU, Linux) says."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pageforge.bench.harness import synchronize

PROCESS = Path("/proc/self")

NEW_PEAK = "5"
"""What `clear_refs` takes for: the peak begins anew with what is resident now."""


class Meter:
    """Bytes that have been taken since the meter was made.

    On CUDA the whole device is measured, on the CPU this process's own memory, so nothing else may
    come or go meanwhile. What torch or the C library keeps for later is given back before each
    reading. Where the system says nothing (macOS, Windows) the bytes are None.
    """

    def __init__(self, device: torch.device):
        self._device = device
        give_back(device)
        self._before = _taken(device)
        self._resident = _status("VmRSS")
        self._allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def begin(self) -> None:
        """The peak begins anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                (PROCESS / "clear_refs").write_text(NEW_PEAK)

    def read(self) -> dict[str, int | None]:
        """`mapped_bytes` now, and `peak_bytes`, the most since `begin`.

        On CUDA the peak is what is mapped now, and what torch's allocator had given at its own
        peak beyond what it still has given; `torch_peak_bytes` is that peak alone, over what it was
        before, in which a pool's pages are not.
        """
        if self._device.type == "cuda":
            return self._read_cuda()
        peak = _difference(_status("VmHWM"), self._resident)
        give_back(self._device)
        mapped = _difference(_taken(self._device), self._before)
        if mapped is not None and peak is not None:
            peak = max(peak, mapped)  # the kernel keeps the peak by rough counts
        return {"mapped_bytes": mapped, "peak_bytes": peak, "torch_peak_bytes": None}

    def _read_cuda(self) -> dict[str, int | None]:
        synchronize(self._device)
        most = torch.cuda.max_memory_allocated(self._device)
        gone = most - torch.cuda.memory_allocated(self._device)
        give_back(self._device)
        mapped = _difference(_taken(self._device), self._before)
        return {
            "mapped_bytes": mapped,
            "peak_bytes": None if mapped is None else mapped + gone,
            "torch_peak_bytes": most - self._allocated,
        }


def give_back(device: torch.device) -> None:
    """Have torch and the C library give back the memory that they keep for later."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


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


def _taken(device: torch.device) -> int | None:
    """Of the device, or by this process without files."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _kilobytes("smaps_rollup", "Anonymous")


def _status(name: str) -> int | None:
    return _kilobytes("status", name)


def _kilobytes(file: str, name: str) -> int | None:
    """A line of a file in /proc/self, as bytes."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", (PROCESS / file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
