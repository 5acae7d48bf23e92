"""VirtualMemoryStore: CUDA addresses reserved once, physical memory mapped as it is needed.

The driver's virtual memory management (CUDA C++ Programming Guide, "Virtual Memory Management"):
an address range costs nothing; physical pieces are created, mapped into it and released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pageforge.geometry import ceil_div
from pageforge.store.base import GRANULE, DeviceMemoryError

try:
    from cuda.bindings import driver
except ImportError:
    driver = None


def supported(device: torch.device) -> bool:
    """Whether the driver of `device` (and its Python bindings) can map memory piecewise."""
    if driver is None or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    torch.cuda.init()
    return bool(_call(driver.cuDeviceGetAttribute, attribute, _index(device)))


@dataclass(eq=False)
class _Piece:
    """Physical memory behind a run of granules; several `chunks` (start, stop) may touch it."""

    first: int
    last: int
    handle: Any
    chunks: set[tuple[int, int]] = field(default_factory=set)


class VirtualMemoryStore:
    """An address range on one CUDA device. A piece is unmapped when no mapped chunk touches it.

    The caller sees to it that no kernel that could touch a range is still running when it is
    unmapped, and that the tensor is not used after `close`.
    """

    name = "CUDA virtual memory"
    elastic = True
    maps = True

    def __init__(self, num_bytes: int, device: torch.device):
        """Reserves addresses only. Raises DeviceMemoryError where the driver refuses even those."""
        self._device = torch.device("cuda", _index(device))
        self._num_bytes = num_bytes
        self._reserved = ceil_div(num_bytes, GRANULE) * GRANULE
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = _index(device)
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        torch.cuda.init()
        try:
            self._base = int(_call(driver.cuMemAddressReserve, self._reserved, GRANULE, 0, 0))
        except RuntimeError as error:  # too large a size may be an invalid one to the driver
            raise DeviceMemoryError(str(error)) from error
        self._pieces: dict[int, _Piece] = {}  # granule -> the piece behind it
        self._touched: dict[tuple[int, int], list[_Piece]] = {}  # mapped chunk -> its pieces
        self._bytes_mapped = 0

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._view(0, self._num_bytes, None).view(dtype)

    def map(self, start: int, stop: int) -> None:
        first, last = start // GRANULE, ceil_div(stop, GRANULE)
        created: list[_Piece] = []
        try:
            for run in self._missing(first, last, {ceil_div(start, GRANULE), stop // GRANULE}):
                created.append(self._create(*run))
        except BaseException:
            for piece in created:
                self._destroy(piece)
            raise
        pieces = list(dict.fromkeys(self._pieces[granule] for granule in range(first, last)))
        for piece in pieces:
            piece.chunks.add((start, stop))
        self._touched[start, stop] = pieces

    def unmap(self, ranges: list[tuple[int, int]]) -> None:
        for chunk in ranges:
            for piece in self._touched.get(chunk, ()):
                piece.chunks.discard(chunk)
                if not piece.chunks:
                    self._destroy(piece)
            self._touched.pop(chunk, None)

    def bytes_mapped(self, high_water: int) -> int:
        return self._bytes_mapped

    def export(self, start: int, stop: int, owner: object) -> torch.Tensor:
        return self._view(start, stop, (self, owner))

    def close(self) -> None:
        self.unmap(list(self._touched))
        if self._base:
            _call(driver.cuMemAddressFree, self._base, self._reserved)
            self._base = 0

    def _missing(self, first: int, last: int, cuts: set[int]) -> Iterator[tuple[int, int]]:
        """Runs of granules without memory, cut before the granules `cuts`.

        The first and the last granule may hold parts of other chunks as well: in pieces of their
        own they do not keep the rest of this chunk's memory when only the others are left.
        """
        start = None
        for granule in range(first, last + 1):
            missing = granule < last and granule not in self._pieces
            if start is not None and (not missing or granule in cuts):
                yield start, granule
                start = None
            if missing and start is None:
                start = granule

    def _create(self, first: int, last: int) -> _Piece:
        size = (last - first) * GRANULE
        address = self._base + first * GRANULE
        with contextlib.ExitStack() as undo:
            handle = _call(driver.cuMemCreate, size, self._kind, 0)
            undo.callback(driver.cuMemRelease, handle)
            _call(driver.cuMemMap, address, size, 0, handle, 0)
            undo.callback(driver.cuMemUnmap, address, size)
            _call(driver.cuMemSetAccess, address, size, [self._access], 1)
            undo.pop_all()
        piece = _Piece(first, last, handle)
        self._pieces.update(dict.fromkeys(range(first, last), piece))
        self._bytes_mapped += size
        return piece

    def _destroy(self, piece: _Piece) -> None:
        size = (piece.last - piece.first) * GRANULE
        _call(driver.cuMemUnmap, self._base + piece.first * GRANULE, size)
        _call(driver.cuMemRelease, piece.handle)
        for granule in range(piece.first, piece.last):
            del self._pieces[granule]
        self._bytes_mapped -= size

    def _view(self, start: int, stop: int, owner: object) -> torch.Tensor:
        array = _CudaArray(self._base + start, stop - start, owner)
        return torch.as_tensor(array, device=self._device)


class _CudaArray:
    """Bytes on the device for torch, which keeps this object, and so `owner`, alive."""

    def __init__(self, address: int, num_bytes: int, owner: object):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _call(function: Any, *args: Any) -> Any:
    """The driver call's result. Raises DeviceMemoryError if memory (or addresses) ran out."""
    error, *result = function(*args)
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise DeviceMemoryError(f"{function.__name__}: {error.name}")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {error.name}")
    return result[0] if result else None
