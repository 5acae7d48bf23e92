"""`cuda.bindings.driver` over host memory, and stricter than the real one.

Every call is checked: aligned and reserved addresses, one handle for one range, a range unmapped as
it was mapped, each handle released once. Fresh memory is all NaN. Memory that is touched without
being mapped is found by `touched_unmapped`, where the real device would end the process.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pageforge.pool
from pageforge.store import cuda
from pageforge.store.cuda import VirtualMemoryStore

HUGE_PAGE = 2 << 20


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass
class Handle:
    """Physical memory."""

    size: int
    mapped_at: int = 0
    released: bool = False


@dataclass
class FakeDriver:
    """`granule`: what sizes and addresses must be multiples of. `capacity`: bytes on the device."""

    granule: int = mmap.PAGESIZE
    capacity: int = 1 << 40
    fail: dict[str, CUresult] = field(default_factory=dict)  # the next call's result
    busy: list[tuple[int, int]] = field(default_factory=list)  # ranges that a kernel reads
    calls: Counter[str] = field(default_factory=Counter)
    ranges: dict[int, int] = field(default_factory=dict)  # reserved: address -> size
    handles: list[Handle] = field(default_factory=list)
    mappings: dict[int, Handle] = field(default_factory=dict)  # address -> what lies there
    accessible: set[int] = field(default_factory=set)
    hosts: list[mmap.mmap] = field(default_factory=list)

    CUresult = CUresult
    CUmemLocation = SimpleNamespace
    CUmemAllocationProp = SimpleNamespace
    CUmemAccessDesc = SimpleNamespace
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    # --- the driver's calls -----------------------------------------------------------------

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        assert (attribute, device) == (102, 0)
        return CUresult.CUDA_SUCCESS, int(not self.fail)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        if error := self._called("cuMemAddressReserve"):
            return error, 0
        assert size > 0 and size % self.granule == 0
        assert (alignment, address, flags) == (self.granule, 0, 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        host = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
        host.madvise(mmap.MADV_NOHUGEPAGE)  # or a neighbour could become resident too
        self.hosts.append(host)
        start = ctypes.addressof(ctypes.c_char.from_buffer(host))
        base = start + -start % HUGE_PAGE
        self.ranges[base] = size
        return CUresult.CUDA_SUCCESS, base

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        self._called("cuMemAddressFree")
        assert self.ranges.pop(address) == size
        assert not any(address <= at < address + size for at in self.mappings), "still mapped"
        return (CUresult.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        if error := self._called("cuMemCreate"):
            return error, None
        assert size > 0 and size % self.granule == 0 and flags == 0
        assert (prop.type, prop.location.type, prop.location.id) == (1, 1, 0)
        if self.physical + size > self.capacity:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.handles.append(Handle(size))
        return CUresult.CUDA_SUCCESS, self.handles[-1]

    def cuMemMap(self, address: int, size: int, offset: int, handle: Handle, flags: int) -> Any:
        if error := self._called("cuMemMap"):
            return (error,)
        assert address % self.granule == 0 and (offset, flags) == (0, 0)
        assert size == handle.size and not handle.mapped_at and not handle.released
        reserved = self.ranges.items()
        assert any(base <= address <= base + length - size for base, length in reserved)
        for at, other in self.mappings.items():
            assert address + size <= at or at + other.size <= address, "mapped twice"
        assert not _resident(address, size), "touched before it was mapped"
        self.mappings[address] = handle
        handle.mapped_at = address
        ctypes.memset(address, 0xFF, size)  # NaN in every dtype
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        if error := self._called("cuMemSetAccess"):
            return (error,)
        assert self.mappings[address].size == size and count == len(access) == 1
        assert (access[0].flags, access[0].location.id) == (3, 0)
        self.accessible.add(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        self._called("cuMemUnmap")
        handle = self.mappings.pop(address)
        assert handle.size == size, "part of a handle's range"
        for start, stop in self.busy:
            assert address + size <= start or stop <= address, "unmapped under a running kernel"
        handle.mapped_at = 0
        self.accessible.discard(address)
        _drop(self.hosts, address, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: Handle) -> Any:
        self._called("cuMemRelease")
        assert not handle.released and not handle.mapped_at
        handle.released = True
        return (CUresult.CUDA_SUCCESS,)

    # --- what tests ask ---------------------------------------------------------------------

    @property
    def physical(self) -> int:
        """Bytes of memory that exist."""
        return sum(handle.size for handle in self.handles if not handle.released)

    @property
    def mapped(self) -> int:
        """Bytes of memory that are mapped and may be used."""
        assert self.accessible == set(self.mappings)
        return sum(handle.size for handle in self.mappings.values())

    def mapped_ranges(self) -> list[tuple[int, int]]:
        """Offsets of what is mapped in the only range that is reserved."""
        (base,) = self.ranges
        return sorted((at - base, at - base + h.size) for at, h in self.mappings.items())

    def touched_unmapped(self) -> list[int]:
        """Offsets of granules that somebody read or wrote though nothing was mapped there."""
        return [
            at - base
            for base, size in self.ranges.items()
            for at in range(base, base + size, self.granule)
            if not any(a <= at < a + h.size for a, h in self.mappings.items())
            and _resident(at, self.granule)
        ]

    def assert_nothing_left(self) -> None:
        assert not self.ranges and not self.mappings and not self.physical
        assert self.calls["cuMemAddressReserve"] - self.calls["cuMemAddressFree"] == 0

    def _called(self, name: str) -> CUresult | None:
        self.calls[name] += 1
        return self.fail.pop(name, None)


class HostStore(VirtualMemoryStore):
    """A VirtualMemoryStore whose tensors lie where the fake driver put the memory: in the host."""

    def __init__(self, num_bytes: int):
        super().__init__(num_bytes, torch.device("cuda", 0))
        self._installed = cuda.driver

    def close(self) -> None:
        if cuda.driver is self._installed:  # or the test is over, and failed
            super().close()

    def _view(self, start: int, stop: int, owner: object) -> torch.Tensor:
        buffer = (ctypes.c_uint8 * (stop - start)).from_address(self._base + start)
        buffer.owner = owner  # type: ignore[attr-defined]
        return torch.from_numpy(np.frombuffer(buffer, np.uint8))


def install(
    monkeypatch: pytest.MonkeyPatch, granule: int = mmap.PAGESIZE, capacity: int = 1 << 40
) -> FakeDriver:
    """Let pools on the CPU work as if they were on a CUDA device with `capacity` bytes."""
    driver = FakeDriver(granule, capacity)
    monkeypatch.setattr(cuda, "driver", driver)
    monkeypatch.setattr(cuda, "GRANULE", granule)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(pageforge.pool, "GRANULE", granule)
    monkeypatch.setattr(pageforge.pool, "open_store", lambda size, device: HostStore(size))
    return driver


def _resident(address: int, size: int) -> bool:
    pages = np.zeros(size // mmap.PAGESIZE, np.uint8)
    result = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
    )
    assert result == 0
    return bool((pages & 1).any())


def _drop(hosts: list[mmap.mmap], address: int, size: int) -> None:
    for host in hosts:
        start = ctypes.addressof(ctypes.c_char.from_buffer(host))
        if start <= address < start + len(host):
            host.madvise(mmap.MADV_DONTNEED, address - start, size)
