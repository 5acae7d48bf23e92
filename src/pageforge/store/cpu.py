"""MmapStore: host memory that the system hands out page by page, and takes back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np
import numpy.typing as npt
import torch

from pageforge.geometry import ceil_div
from pageforge.store.base import GRANULE, DeviceMemoryError

# Python's mmap module names this flag only on some versions; it is the same number on every Linux
# port that PyTorch has wheels for.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def supported() -> bool:
    """Whether this system has what MmapStore needs."""
    return sys.platform == "linux" and hasattr(mmap.mmap, "madvise")


class MmapStore:
    """One anonymous mapping without reservation: memory comes with the first write to it.

    Aligned to huge pages, and asking for them: giving 256 MiB back then takes 0.8 ms, not 17.
    """

    name = "mmap (MAP_NORESERVE)"
    elastic = True
    maps = False

    def __init__(self, num_bytes: int):
        """Reserves addresses only. Raises DeviceMemoryError where the system refuses even those."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._mmap = mmap.mmap(-1, num_bytes + GRANULE, flags=flags)
        except (OSError, OverflowError) as error:
            raise DeviceMemoryError(f"mmap of {num_bytes} bytes: {error}") from error
        # torch.frombuffer would let the mapping be closed under a live tensor; through numpy that
        # raises instead.
        whole = np.frombuffer(self._mmap, np.uint8)
        self._offset = -whole.ctypes.data % GRANULE
        self._array = whole[self._offset : self._offset + num_bytes]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._advise(mmap.MADV_HUGEPAGE, 0, num_bytes)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self._array).view(dtype)

    def map(self, start: int, stop: int) -> None:
        """Nothing to do: the first write maps."""

    def unmap(self, ranges: list[tuple[int, int]]) -> None:
        for start, stop in _merged(ranges):
            # Inward: the system rounds outward, and would wipe a neighbour's bytes.
            first = ceil_div(start, mmap.PAGESIZE) * mmap.PAGESIZE
            last = stop // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                with contextlib.suppress(OSError):  # locked memory (mlockall) stays
                    self._advise(mmap.MADV_DONTNEED, first, last - first)

    def bytes_mapped(self, high_water: int) -> int:
        # A huge page at the edge reaches further than what was used of it.
        high_water = min(ceil_div(high_water, GRANULE) * GRANULE, len(self._array))
        resident = np.zeros(ceil_div(high_water, mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(self._array.ctypes.data),
            ctypes.c_size_t(high_water),
            ctypes.c_void_p(resident.ctypes.data),
        )
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return int(np.count_nonzero(resident & 1)) * mmap.PAGESIZE

    def export(self, start: int, stop: int, owner: object) -> torch.Tensor:
        return owned_tensor(self._array[start:stop], owner)

    def close(self) -> None:
        # The mapping itself ends with the last array over it: an exported page may outlive us.
        self.unmap([(0, len(self._array))])
        self._array = self._array[:0]

    def _advise(self, advice: int, start: int, length: int) -> None:
        self._mmap.madvise(advice, self._offset + start, length)


class _Owned(np.ndarray):
    """An array that can carry a reference: torch keeps the array, and so its owner, alive."""

    owner: object = None


def owned_tensor(array: npt.NDArray[np.uint8], owner: object) -> torch.Tensor:
    """`array` as a tensor; `owner` lives as long as any view of it does."""
    view = array.view(_Owned)
    view.owner = owner
    return torch.from_numpy(view)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent ranges joined, so that a page of the system that two share is given back as well."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
