"""MmapStore: memory that the system hands out and takes back."""

from __future__ import annotations

import errno
import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from pageforge.store import DeviceMemoryError, MmapStore, cpu
from pageforge.store.base import GRANULE

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not cpu.supported(), reason="Linux alone has what it needs")


class Owner:
    pass


def small_pages(store: MmapStore) -> MmapStore:
    """Without huge pages, so that the system's figures are exact to a page of its own."""
    store._mmap.madvise(mmap.MADV_NOHUGEPAGE)
    return store


def test_memory_comes_with_the_first_write() -> None:
    store = small_pages(MmapStore(64 << 20))
    data = store.tensor(torch.uint8)
    assert data.numel() == 64 << 20
    assert store.bytes_mapped(64 << 20) == 0
    store.map(0, 64 << 20)
    assert store.bytes_mapped(64 << 20) == 0
    data[5 * PAGE + 7] = 1
    data[9 * PAGE : 11 * PAGE] = 1
    data[2 * GRANULE :][: 4 * PAGE] = 1
    assert store.bytes_mapped(64 << 20) == 7 * PAGE
    # The high-water mark bounds the search, in whole huge pages.
    assert store.bytes_mapped(2 * GRANULE + 1) == 7 * PAGE
    assert store.bytes_mapped(2 * GRANULE) == store.bytes_mapped(1) == 3 * PAGE
    assert store.bytes_mapped(0) == 0


def test_a_huge_page_counts_with_all_that_it_took() -> None:
    """Also with what of it lies past the high-water mark."""
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("no huge pages on this machine")
    store = MmapStore(64 << 20)
    store.tensor(torch.uint8)[:100] = 1
    assert store.bytes_mapped(100) in (PAGE, GRANULE)  # one or the other, as the system pleases
    assert store.bytes_mapped(100) == store.bytes_mapped(64 << 20)


def test_more_than_the_machine_has_can_be_reserved() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this machine commits no more than it has")
    store = MmapStore(4 * total)
    store.tensor(torch.float32)[-1] = 1
    assert store.tensor(torch.float32)[-1] == 1


def test_dtypes_and_alignment() -> None:
    store = MmapStore(3 * PAGE + 16)
    assert store._array.ctypes.data % GRANULE == 0
    for dtype, size in ((torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)):
        data = store.tensor(dtype)
        assert data.dtype == dtype and data.numel() == (3 * PAGE + 16) // size
        assert data.data_ptr() == store._array.ctypes.data


def test_it_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("a kernel without huge pages")
    store = MmapStore(8 << 20)
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(bound, 16) for bound in head.split("-"))
            inside = low <= store._array.ctypes.data < high
        elif inside and head == "VmFlags:":
            flags = line
    assert " hg" in flags and " nr" in flags  # huge pages, no reservation


def test_a_kernel_without_huge_pages_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MmapStore, advice: int, start: int, length: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(MmapStore, "_advise", refuse)
    store = MmapStore(8 << 20)
    data = store.tensor(torch.uint8)
    data[:] = 1
    store.unmap([(0, 8 << 20)])  # refused too where memory is locked (mlockall): it stays
    assert store.bytes_mapped(8 << 20) == 8 << 20


@pytest.mark.parametrize("huge", [False, True])
def test_unmap_never_touches_the_neighbours(huge: bool) -> None:
    """Chunks end in the middle of the system's pages: the system would round outward."""
    store = MmapStore(8 << 20) if huge else small_pages(MmapStore(8 << 20))
    data = store.tensor(torch.uint8)
    data[:] = 1
    start, stop = 3 * PAGE + 100, 9 * PAGE + 200
    store.unmap([(start, stop)])
    assert bool((data[:start] == 1).all()) and bool((data[stop:] == 1).all())
    inside = data[start:stop].clone()
    assert int(inside.count_nonzero()) == PAGE - 100 + 200  # the parts of two shared pages
    assert bool((data[4 * PAGE : 9 * PAGE] == 0).all())


def test_chunks_that_go_together_take_the_page_that_they_share() -> None:
    store = small_pages(MmapStore(1 << 20))
    data = store.tensor(torch.uint8)
    data[:] = 1
    first, second, third = (0, PAGE + 5), (PAGE + 5, 2 * PAGE + 9), (2 * PAGE + 9, 5 * PAGE)
    rest = (1 << 20) - 5 * PAGE
    store.unmap([third, first, second])
    assert store.bytes_mapped(1 << 20) == rest
    data[: 5 * PAGE] = 1
    for chunk in (first, second, third):
        store.unmap([chunk])
    assert store.bytes_mapped(1 << 20) == rest + 2 * PAGE
    store.unmap([(7 * PAGE + 1, 8 * PAGE - 1)])  # less than a page: nothing happens
    assert bool((data[7 * PAGE : 8 * PAGE] == 1).all())


def test_memory_that_came_back_holds_nothing_stale() -> None:
    store = MmapStore(4 << 20)
    data = store.tensor(torch.float32)
    data[:] = 5
    store.unmap([(0, 4 << 20)])
    assert store.bytes_mapped(4 << 20) == 0
    assert bool((data == 0).all())


def test_an_export_keeps_its_owner_until_the_last_view() -> None:
    store = MmapStore(1 << 20)
    store.tensor(torch.uint8)[: 4 * PAGE] = 3
    owner = Owner()
    alive = weakref.ref(owner)
    tensor = store.export(PAGE, 2 * PAGE, owner)
    del owner
    array = np.from_dlpack(tensor)
    row = array[5:10]
    other = tensor.view(torch.float16)[3:].numpy()
    del tensor, array
    gc.collect()
    assert alive() is not None
    del row
    assert alive() is not None
    del other
    assert alive() is None


def test_close_gives_the_memory_back_and_live_tensors_stay_valid() -> None:
    store = MmapStore(4 << 20)
    data = store.tensor(torch.uint8)
    data[:] = 1
    base = store._array
    store.close()
    assert int(data.count_nonzero()) == 0  # the addresses are there, the memory is not
    assert store.bytes_mapped(4 << 20) == 0
    store.close()
    with pytest.raises(BufferError):
        store._mmap.close()  # never under a live tensor
    assert base.size == 4 << 20


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 63, 1 << 70])
def test_too_many_addresses(size: int) -> None:
    with pytest.raises(DeviceMemoryError, match=f"mmap of {size} bytes"):
        MmapStore(size)
