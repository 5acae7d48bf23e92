"""VirtualMemoryStore against a driver that forbids what the real one forbids."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.store.fake_driver import CUresult, FakeDriver, HostStore, install

from pageforge.store import DeviceMemoryError, VirtualMemoryStore, cuda

G = 4096


class Owner:
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch, G)


def granules_of(chunks: list[tuple[int, int]]) -> set[int]:
    return {g for start, stop in chunks for g in range(start // G, -(-stop // G))}


def mapped_granules(driver: FakeDriver) -> set[int]:
    return {g for start, stop in driver.mapped_ranges() for g in range(start // G, stop // G)}


def test_only_addresses_are_reserved_at_first(driver: FakeDriver) -> None:
    store = HostStore(10 * G + 1)
    assert list(driver.ranges.values()) == [11 * G]
    assert (store.bytes_mapped(0), driver.physical, driver.calls["cuMemCreate"]) == (0, 0, 0)
    store.close()
    driver.assert_nothing_left()
    store.close()
    assert driver.calls["cuMemAddressFree"] == 1


def test_a_chunk_maps_the_granules_that_it_touches(driver: FakeDriver) -> None:
    store = HostStore(100 * G)
    store.map(3 * G + 100, 7 * G + 100)
    assert mapped_granules(driver) == {3, 4, 5, 6, 7}
    assert store.bytes_mapped(0) == driver.mapped == 5 * G
    store.tensor(torch.uint8)[3 * G : 8 * G] = 1
    assert driver.touched_unmapped() == []
    store.tensor(torch.uint8)[8 * G] = 1  # what a stray write looks like
    assert driver.touched_unmapped() == [8 * G]


def test_a_granule_that_two_chunks_share_goes_with_the_last_of_them(driver: FakeDriver) -> None:
    store = HostStore(100 * G)
    data = store.tensor(torch.uint8)
    first, second = (0, 3 * G + 1000), (3 * G + 1000, 6 * G)
    for chunk in (first, second):
        store.map(*chunk)
    data[: 6 * G] = 7
    assert driver.mapped == 6 * G

    store.unmap([first])
    assert mapped_granules(driver) == {3, 4, 5}
    assert bool((data[3 * G + 1000 : 6 * G] == 7).all())
    store.map(*first)
    assert mapped_granules(driver) == set(range(6))
    assert bool((data[3 * G + 1000 : 6 * G] == 7).all())
    assert bool((data[: 3 * G] == 255).all())  # fresh memory, nothing stale

    store.unmap([second])
    assert mapped_granules(driver) == {0, 1, 2, 3}
    store.unmap([first])
    assert driver.mapped == driver.physical == store.bytes_mapped(0) == 0


def test_the_order_of_the_chunks_does_not_matter(driver: FakeDriver) -> None:
    """The upper of two chunks comes first: what only it touches goes with it all the same."""
    store = HostStore(100 * G)
    lower, upper = (0, G + 1000), (G + 1000, 9 * G + 7)
    store.map(*upper)
    store.map(*lower)
    store.unmap([upper])
    assert mapped_granules(driver) == {0, 1}


def test_what_is_mapped_stays_and_what_is_not_is_left_alone(driver: FakeDriver) -> None:
    """So that a call that was interrupted can be made again."""
    store = HostStore(100 * G)
    store.map(0, G + 1000)
    store.map(0, G + 1000)
    store.map(G + 1000, 3 * G)
    assert mapped_granules(driver) == {0, 1, 2}
    for _ in range(2):
        store.unmap([(0, G + 1000), (50 * G, 60 * G)])
        assert mapped_granules(driver) == {1, 2}
    store.close()
    driver.assert_nothing_left()


@st.composite
def chunks_and_orders(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    sizes = draw(st.lists(st.integers(1, 5 * G), min_size=1, max_size=5))
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    chunks = list(itertools.pairwise(bounds))
    return chunks, draw(st.lists(st.integers(0, len(chunks) - 1), max_size=30))


@given(chunks_and_orders())
def test_what_is_mapped_is_exactly_what_chunks_touch(
    case: tuple[list[tuple[int, int]], list[int]],
) -> None:
    """Whatever the sizes of the chunks, and in whatever order they come and go."""
    chunks, order = case
    with pytest.MonkeyPatch.context() as monkeypatch:
        driver = install(monkeypatch, G)
        store = HostStore(chunks[-1][1])
        data = store.tensor(torch.uint8)
        live: list[tuple[int, int]] = []
        for index in order:
            chunk = chunks[index]
            if chunk in live:
                live.remove(chunk)
                store.unmap([chunk])
            else:
                live.append(chunk)
                store.map(*chunk)
                data[chunk[0] : chunk[1]] = index
            assert mapped_granules(driver) == granules_of(live)
            assert store.bytes_mapped(0) == driver.mapped == driver.physical
            for start, stop in live:
                assert bool((data[start:stop] == chunks.index((start, stop))).all())
        assert driver.touched_unmapped() == []
        store.close()
        driver.assert_nothing_left()


@pytest.mark.parametrize("room", range(6))
def test_a_map_that_fails_halfway_leaves_nothing(driver: FakeDriver, room: int) -> None:
    store = HostStore(100 * G)
    store.map(0, 2 * G + 1)
    store.map(5 * G + 1, 6 * G)
    before = driver.mapped_ranges()
    driver.capacity = driver.physical + room * G
    chunk = (2 * G + 1, 9 * G + 1)  # lacks granules 3 and 4, 6 to 8, and 9 in a piece of its own
    with pytest.raises(DeviceMemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        store.map(*chunk)
    assert driver.mapped_ranges() == before
    assert store.bytes_mapped(0) == driver.mapped == driver.physical

    driver.capacity = 1 << 30
    store.map(*chunk)
    assert mapped_granules(driver) == set(range(10))
    store.unmap([chunk])
    assert driver.mapped_ranges() == before
    store.close()
    driver.assert_nothing_left()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize(
    ("result", "error"),
    [
        (CUresult.CUDA_ERROR_OUT_OF_MEMORY, DeviceMemoryError),
        (CUresult.CUDA_ERROR_INVALID_VALUE, RuntimeError),  # a bug, not a lack of memory
    ],
)
def test_each_call_may_fail(
    driver: FakeDriver, call: str, result: CUresult, error: type[Exception]
) -> None:
    store = HostStore(100 * G)
    driver.fail[call] = result
    with pytest.raises(error, match=f"{call}: {result.name}"):
        store.map(0, 3 * G)
    assert driver.mapped == driver.physical == store.bytes_mapped(0) == 0
    store.map(0, 3 * G)
    assert driver.mapped == 3 * G


@pytest.mark.parametrize("result", [r for r in CUresult if r is not CUresult.CUDA_SUCCESS])
def test_too_many_addresses(driver: FakeDriver, result: CUresult) -> None:
    driver.fail["cuMemAddressReserve"] = result
    with pytest.raises(DeviceMemoryError, match=f"cuMemAddressReserve: {result.name}"):
        HostStore(100 * G)


def test_an_export_keeps_its_owner_and_the_store(driver: FakeDriver) -> None:
    store = HostStore(100 * G)
    store.map(0, 4 * G)
    store.tensor(torch.uint8)[: 4 * G] = 3
    owner = Owner()
    alive = weakref.ref(owner)
    view = store.export(G, 2 * G, owner)[10:20].view(torch.float16)[2:]
    del owner
    assert alive() is not None and view.shape == (3,) and view.untyped_storage().nbytes() == G
    del view
    assert alive() is None


def test_where_it_is_supported(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda.supported(device)
    driver.fail["no such call"] = CUresult.CUDA_SUCCESS  # here: the attribute says no
    assert not cuda.supported(device)
    driver.fail.clear()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not cuda.supported(device)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda.supported(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "driver", None)
    assert not cuda.supported(device)


def test_the_real_view_is_an_array_interface_that_keeps_its_owner() -> None:
    """The one method that HostStore replaces, as far as it goes without a device."""
    owner = Owner()
    array = cuda._CudaArray(1 << 40, 12, owner)
    assert array.__cuda_array_interface__["data"] == (1 << 40, False)
    assert array.__cuda_array_interface__["shape"] == (12,)
    assert array.owner is owner
    assert HostStore._view is not VirtualMemoryStore._view
