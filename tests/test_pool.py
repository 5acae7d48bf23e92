"""PagePool: transactions, the budget, memory that comes and goes, lifetimes, threads."""

from __future__ import annotations

import concurrent.futures.thread
import copy
import gc
import pickle
import random
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.fake_driver import CUresult, FakeDriver, HostStore, install
from tests.store.pool_model import (
    SHARING_STEPS,
    STEPS,
    Export,
    PoolModel,
    Sequence_,
    Step,
    random_steps,
    two_groups,
)

import pageforge.pool
from pageforge import KVGeometry, LayerShape, PagePool, PageTable, ops
from pageforge.batch import SequenceBatch
from pageforge.errors import (
    CropError,
    GeometryError,
    OutOfPages,
    PageError,
    PageForgeError,
    UnsupportedModel,
    UseAfterFree,
)
from pageforge.memory.allocator import PageAllocator
from pageforge.pool import PoolStats
from pageforge.store import DeviceMemoryError, MmapStore, PlainStore, cpu
from pageforge.store.base import GRANULE

G = 4096  # the granule of pools with small chunks
WATERMARK = 2 * G
SMALL, LARGE = 640, 1280  # bytes of a page in the two groups of `two_groups`
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few small pages, so that little data makes many of them."""
    monkeypatch.setattr(pageforge.pool, "GRANULE", G)
    monkeypatch.setattr(PagePool._shrink, "__defaults__", (WATERMARK, None))
    monkeypatch.setattr(pageforge.pool, "ROLLBACK", 8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Pools lie in "device memory", behind a strict driver."""
    return install(monkeypatch, G)


def one_group(dtype: str = "float32", device: str = "cpu") -> KVGeometry:
    """Pages of 1,024 bytes: 4 to a granule."""
    return KVGeometry.uniform(1, 2, 8, dtype=dtype, page_size=8, device=device)


def grow(pool: PagePool, tokens: int, tables: int = 1) -> list[PageTable]:
    made = [pool.new_table() for _ in range(tables)]
    pool.append(made, tokens)
    return made


def publish(pool: PagePool, table: PageTable, seed: int = 0) -> None:
    tokens = [seed * 100_000 + i for i in range(table.length)]
    for index, group in enumerate(pool._groups):
        group.prefix.publish(tokens, table.pages(index))


def numbers(stats: PoolStats) -> tuple[int, ...]:
    return stats.pages_used, stats.pages_cached, stats.pages_free


class FakeEvent:
    """An event after a kernel that ends when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waits = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += 1
        self.done = True


# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 1.5, "512", 2**31 - 1])
def test_max_pages_must_make_sense(bad: Any) -> None:
    with pytest.raises(GeometryError, match="max_pages: expected an int from 1 to"):
        PagePool(one_group(), max_pages=bad)


@pytest.mark.parametrize("bad", [0, "0%", "much", -5, 2.0, 100])
def test_max_memory_must_make_sense(bad: Any) -> None:
    with pytest.raises(GeometryError, match="max_memory: expected"):
        PagePool(one_group(), max_memory=bad)


def test_max_pages_counts_usable_pages_of_each_group() -> None:
    pool = PagePool(two_groups(), max_pages=512)
    stats = pool.stats()
    assert [group.pages_total for group in stats.groups] == [512, 512]
    assert stats.bytes_total == 512 * (LARGE + SMALL)
    tables = grow(pool, 8, tables=512)
    assert numbers(pool.stats()) == (1024, 0, 0)
    assert sorted(page for table in tables for page in table.pages(0)) == list(range(1, 513))
    with pytest.raises(OutOfPages):
        pool.append(tables[:1], 1)


def test_max_memory_is_the_sum_over_the_groups() -> None:
    """Groups compete for the bytes, so each has ids for all of them."""
    pool = PagePool(two_groups(), max_memory=100 * LARGE)
    assert [group.pages_total for group in pool.stats().groups] == [100, 200]
    pool = PagePool(two_groups(), max_memory=100 * LARGE, max_pages=120)
    assert [group.pages_total for group in pool.stats().groups] == [100, 120]
    assert pool.stats().bytes_total == 100 * LARGE


def test_the_default_cap_is_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pageforge.pool, "free_bytes", lambda device: 1_000_000)
    assert PagePool(one_group()).stats().bytes_total == 900_000
    assert PagePool(one_group(), max_memory=0.5).stats().bytes_total == 500_000
    assert PagePool(one_group(), max_memory="25%").stats().bytes_total == 250_000


def test_memory_that_is_taken_at_once_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an elastic store, ids for the whole budget in each group would take it twice."""
    monkeypatch.setattr(pageforge.pool, "free_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(cpu, "supported", lambda: False)
    pool = PagePool(two_groups())
    stats = pool.stats()
    assert stats.bytes_total == 250_000
    assert stats.bytes_mapped <= 250_000 + LARGE + SMALL  # and the two pages 0
    assert [group.pages_total for group in stats.groups] == [250_000 // (LARGE + SMALL)] * 2
    pool.append([pool.new_table()], 100)
    assert pool.stats().bytes_mapped == stats.bytes_mapped


def test_a_smaller_cap_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def limited(self: MmapStore, num_bytes: int) -> None:
        sizes.append(num_bytes)
        if num_bytes > 200_000:
            raise DeviceMemoryError("mmap: Cannot allocate memory")
        real(self, num_bytes)

    real = MmapStore.__init__
    monkeypatch.setattr(MmapStore, "__init__", limited)
    monkeypatch.setattr(pageforge.store.select, "PlainStore", _refusing_store)
    monkeypatch.setattr(pageforge.pool, "free_bytes", lambda device: 1_000_000)
    pool = PagePool(one_group())
    assert pool.stats().bytes_total == 112_500
    assert [size // 1024 for size in sizes] == [879, 440, 220, 110]
    for explicit in ({"max_memory": 0.9}, {"max_memory": 900_000}, {"max_pages": 800}):
        with pytest.raises(OutOfPages, match=r"refuses to reserve that much.*pass max_memory="):
            PagePool(one_group(), **explicit)  # type: ignore[arg-type]


def _refusing_store(num_bytes: int, device: torch.device) -> PlainStore:
    raise DeviceMemoryError(f"allocation of {num_bytes} bytes: refused")


def test_an_ordinary_allocation_where_no_mapping_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: MmapStore, num_bytes: int) -> None:
        raise DeviceMemoryError("mmap: Operation not permitted")

    monkeypatch.setattr(MmapStore, "__init__", refuse)
    pool = PagePool(one_group(), max_pages=100)
    assert isinstance(pool._groups[0].store, PlainStore)
    model_like = grow(pool, 50)
    assert pool.stats().bytes_mapped == 101 * 1024
    assert np.from_dlpack(pool.export_pages(1)).shape == (1, 1, 2, 2, 8, 8)
    pool.release(model_like)
    pool.trim()
    assert pool.stats().pages_used == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_limit_on_addresses() -> None:
    """`ulimit -v`, as batch systems set it: the default cap shrinks under it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        pool = PagePool(one_group())
        with pytest.raises(OutOfPages, match="refuses to reserve"):
            PagePool(one_group(), max_memory="2GiB")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    # What others gave up since `used` was read, a thread's stack say, is there as well.
    assert 64 << 20 < pool.stats().bytes_total < (1 << 30) + (64 << 20)
    grow(pool, 100)


def test_mps_is_refused_with_the_reason() -> None:
    for sizes in ({}, {"max_pages": 8}):
        with pytest.raises(UnsupportedModel, match=r"expected cpu or cuda, got mps.*no kernels"):
            PagePool(one_group(device="mps"), **sizes)


# --- transactions ---------------------------------------------------------------------------


def test_pages_are_claimed_at_page_boundaries_only() -> None:
    pool = PagePool(two_groups(), max_pages=64)
    (table,) = grow(pool, 7)
    for length in range(8, 40):
        pool.append([table], 1)
        assert table.num_pages == 2 * -(-length // 8)
    pool.check_invariants([table])


def test_a_batch_gets_all_its_pages_or_none(driver: FakeDriver) -> None:
    pool = PagePool(two_groups(), max_pages=10)
    tables = [*grow(pool, 8, tables=4), *grow(pool, 4, tables=4)]
    before = ([table.pages(g) for table in tables for g in range(2)], numbers(pool.stats()))
    with pytest.raises(OutOfPages) as error:
        pool.append(tables, 5)  # each needs one more page in each group: 16, and there are 4
    assert (error.value.needed, error.value.available) == (16, 4)
    after = ([table.pages(g) for table in tables for g in range(2)], numbers(pool.stats()))
    assert after == before
    assert [table.length for table in tables] == [8] * 4 + [4] * 4
    pool.check_invariants(tables)
    pool.append(tables[:2], 5)
    pool.check_invariants(tables)


def test_the_second_group_may_be_the_one_without_memory(driver: FakeDriver) -> None:
    """The first group's new chunk, mapped already, does not stay; cached pages stay cached."""
    pool = PagePool(two_groups(), max_pages=200)
    tables = grow(pool, 10 * 8)
    kept = grow(pool, 8)
    publish(pool, kept[0])
    pool.release(kept)
    before, mapped = numbers(pool.stats()), driver.mapped
    free = [group.allocator.num_open_free for group in pool._groups]
    driver.capacity = driver.physical + G  # enough for a chunk of the first group alone
    with pytest.raises(OutOfPages) as error:
        pool.append(tables, (max(free) + 2) * 8)
    assert "no memory left to map (cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY)" in str(error.value)
    assert error.value.needed > error.value.available >= 0
    assert numbers(pool.stats()) == before
    assert tables[0].length == 80
    assert driver.mapped == driver.physical <= mapped
    pool.check_invariants(tables)
    driver.capacity = 1 << 30
    pool.append(tables, (max(free) + 2) * 8)
    assert driver.touched_unmapped() == []
    assert pool.stats().bytes_mapped == driver.mapped


def test_out_of_pages_counts_what_could_be_had() -> None:
    pool = PagePool(two_groups(), max_memory=10 * LARGE)  # ids: 10 and 20
    (table,) = grow(pool, 8)
    with pytest.raises(OutOfPages) as error:
        pool.append([table], 6 * 8)  # room for 10 LARGE - 1 of each = 8.5 LARGE, needs 9
    assert (error.value.needed, error.value.available) == (12, 11)
    with pytest.raises(OutOfPages) as error:
        pool.append([table], 12 * 8)  # past the ids of the first group, too
    assert error.value.needed == 24 and error.value.available < 24
    pool.append([table], 5 * 8)


def test_groups_share_the_budget() -> None:
    """What the window's group gives back, the other can take."""
    pool = PagePool(two_groups(), max_memory=40 * LARGE)
    (long,) = grow(pool, 26 * 8)  # 26 LARGE + 26 SMALL of 40 LARGE
    with pytest.raises(OutOfPages):
        pool.append([long], 8 * 8)
    pool.slide([long])
    assert len(long.pages(1)) <= 4 and len(long.pages(0)) == 26
    pool.append([long], 8 * 8)
    stats = pool.stats()
    assert stats.bytes_in_use <= stats.bytes_total
    pool.check_invariants([long])


def test_order_of_supply(driver: FakeDriver) -> None:
    """A free page, then a new chunk, then the least recently used cached page, then OutOfPages."""
    pool = PagePool(one_group(), max_pages=15)  # 16 with page 0: 4 chunks of 4
    allocator = pool._groups[0].allocator
    first = grow(pool, 8)
    second = grow(pool, 8)
    assert driver.calls["cuMemCreate"] == 1
    publish(pool, first[0], seed=1)
    publish(pool, second[0], seed=2)
    pool.release(second)
    pool.release(first)
    (table,) = grow(pool, 8)
    assert driver.calls["cuMemCreate"] == 1 and allocator.num_cached == 2  # a free page
    pool.append([table], 12 * 8)
    assert driver.calls["cuMemCreate"] == 4 and allocator.num_cached == 2  # new chunks
    pool.append([table], 8)
    assert pool._groups[0].prefix.match(range(200_000, 200_008)) == []  # released first
    assert len(pool._groups[0].prefix.match(range(100_000, 100_008))) == 1
    pool.append([table], 8)
    assert allocator.num_cached == 0
    with pytest.raises(OutOfPages) as error:
        pool.append([table], 1)
    assert (error.value.needed, error.value.available) == (1, 0)


def test_cached_pages_of_one_group_give_way_to_another(driver: FakeDriver) -> None:
    """The budget counts used and cached pages; what goes over is evicted where most is cached."""
    pool = PagePool(two_groups(), max_memory=40 * LARGE)
    (table,) = grow(pool, 20 * 8)
    publish(pool, table)
    pool.release([table])
    assert numbers(pool.stats())[:2] == (0, 40)  # 20 LARGE + 20 SMALL = 30 LARGE
    mapped = driver.mapped
    (table,) = grow(pool, 8 * 8)
    stats = pool.stats()
    cached = [group.pages_cached for group in stats.groups]
    assert stats.bytes_in_use == 8 * (LARGE + SMALL) and cached[0] < 20
    assert stats.bytes_in_use + cached[0] * LARGE + cached[1] * SMALL <= stats.bytes_total
    assert stats.bytes_in_use + cached[0] * LARGE + cached[1] * SMALL > 40 * LARGE - LARGE
    assert driver.mapped <= mapped + 8 * SMALL + 2 * G
    pool.check_invariants([table])


def test_what_one_group_gave_up_for_another_is_unmapped(driver: FakeDriver) -> None:
    """Many small cached pages give way to a few large ones: the budget bounds what is mapped."""
    small = LayerShape(1, 8, 8, "float32")
    large = LayerShape(8, 8, 8, "float32", window=8)
    pool = PagePool(KVGeometry.of_layers({0: small, 1: large}, 8), max_memory=300 * 512)
    tables = grow(pool, 30 * 8)
    for _ in range(200):
        pool.append(tables, 8)
        pool.slide(tables)
    pool._groups[0].prefix.publish(range(tables[0].length), tables[0].pages(0))
    pool.release(tables)
    assert pool.stats().groups[0].pages_cached == 230
    grow(pool, 25 * 8)
    stats = pool.stats()
    assert stats.groups[0].pages_cached < 100 and stats.groups[1].pages_used == 25
    assert driver.mapped == stats.bytes_mapped <= stats.bytes_total + WATERMARK + 2 * G


def test_restore_that_fails_loses_nothing(driver: FakeDriver) -> None:
    pool = PagePool(two_groups(), max_pages=50)
    contents = [torch.zeros(2, LARGE // 4), torch.zeros(2, SMALL // 4)]
    row = [[0, 1], [0, 1]]
    for bad in (
        {"contents": [contents[0][:, 1:], contents[1]]},  # pages of another size
        {"rows": [[[0, 1], [0, 2]]]},  # a page that is not there
        {"rows": [row, [[0], [0]]]},  # too few pages for the second row
        {"rows": [row, row, row]},  # more rows than starts
        {"starts": [0, -1]},
        {"starts": [0, "8"]},
        {"length": 40},
    ):
        arguments = {"contents": contents, "rows": [row, row], "starts": [0, 0], "length": 16}
        with pytest.raises((PageError, RuntimeError, IndexError, ValueError, TypeError)):
            pool.restore(**(arguments | bad))
        assert numbers(pool.stats()) == (0, 0, 100)
        pool.check_invariants([])
    with pytest.raises(OutOfPages):
        pool.restore([torch.zeros(60, LARGE // 4), torch.zeros(2, SMALL // 4)], [row], [0], 16)
    tables = pool.restore(contents, [row, row], [0, 0], 16)
    assert numbers(pool.stats()) == (4, 0, 96)
    pool.check_invariants(tables)


def _shared_tail(model: PoolModel) -> list[Sequence_]:
    """A fork will write to a page that it shares."""
    model.fork(model.sequences[0], 0)
    return model.sequences[1:]


def _shared_middle(model: PoolModel) -> list[Sequence_]:
    """The other one goes on behind the shared page."""
    model.fork(model.sequences[0], 0)
    model.crop(model.sequences[1], 9)
    return model.sequences[1:]


def _published(model: PoolModel) -> list[Sequence_]:
    """A page that others can find has lost its last tokens to a crop."""
    model.publish(model.sequences[0], 0)
    model.crop(model.sequences[0], 9)
    return model.sequences


def _exported(model: PoolModel) -> list[Sequence_]:
    for group in range(2):
        (*_, last) = model.sequences[0].table.pages(group)
        view = model.pool.export_pages(last, group=group)
        model.exports.append(Export(group, [last], view, view.clone()))
    return model.sequences


def _whole_batch(model: PoolModel) -> list[Sequence_]:
    """Of three holders two copy, and a fourth row of another length only grows."""
    model.fork(model.sequences[0], 0)
    model.fork(model.sequences[0], 0)
    model.new(13)
    return model.sequences


class FullDevice:
    """`ops.copy_pages` on a device without memory: call number `fails` spoils what it writes to."""

    def __init__(self, fails: int, error: BaseException):
        self.calls, self.fails, self.error = 0, fails, error

    def __call__(self, pages: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == self.fails:
            pages[target] = -1.0
            raise self.error
        ops.reference.copy_pages(pages, source, target)


@pytest.mark.parametrize("group", [1, 2], ids=["first group", "second group"])
@pytest.mark.parametrize(
    "share", [_shared_tail, _shared_middle, _published, _exported, _whole_batch]
)
def test_a_copy_that_finds_no_memory_changes_nothing(
    share: Callable[[PoolModel], list[Sequence_]],
    group: int,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = PoolModel(PagePool(two_groups(), max_pages=40))
    model.new(0)
    model.append(model.sequences[0], 21)
    rows = share(model)
    model.check()
    for tokens in (1, 20):  # the copies alone, and more pages beside them
        device = FullDevice(group, torch.OutOfMemoryError("planted"))
        with monkeypatch.context() as patched:
            patched.setattr(ops, "copy_pages", device)
            model._append(rows, tokens)  # which sees to it that nothing changes
        assert device.calls == group
        model.check()
    assert model.outs == 2
    model._append(rows, 1)
    model.check()
    assert model.outs == 2
    assert driver.touched_unmapped() == []
    _ends_clean(model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_copy_may_fail_in_any_way(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(two_groups(), max_pages=40)
    (table,) = grow(pool, 21)
    tables = [table, pool.fork(table)]
    before = [(each.length, each.pages(0), each.pages(1)) for each in tables]
    count = numbers(pool.stats())
    with monkeypatch.context() as patched, pytest.raises(error, match="planted"):
        patched.setattr(ops, "copy_pages", FullDevice(2, error("planted")))
        pool.append(tables, 9)
    assert before == [(each.length, each.pages(0), each.pages(1)) for each in tables]
    assert count == numbers(pool.stats())
    pool.check_invariants(tables)


def test_crop_of_a_batch_is_all_or_nothing() -> None:
    pool = PagePool(two_groups(), max_pages=64)
    tables = [*grow(pool, 100), *grow(pool, 100)]
    pool.slide(tables[1:])
    with pytest.raises(PageForgeError, match="window"):
        pool.crop(tables, 40)
    assert [table.length for table in tables] == [100, 100]
    pool.check_invariants(tables)


def test_only_what_can_be_gone_on_from_is_saved() -> None:
    """A window of 20 has lost the pages that a shorter sequence would see, and padding is none."""
    pool = PagePool(two_groups(), max_pages=50)
    (table,) = grow(pool, 100)
    padded = pool.new_table(20)
    pool.append([padded], 100)
    pool.slide([table, padded])
    first = table.first_page(1)
    for each, tokens in ((table, 101), (padded, 101), (table, first * 8 + 18), (table, 24)):
        for call in (pool.save, pool.num_bytes):
            with pytest.raises(CropError):
                call(each, tokens)
    for each, tokens, counts in (
        (table, 100, [13, 13 - first]),
        (table, first * 8 + 19, [first + 3, 3]),
        (table, 0, [0, 0]),
        (padded, 100, [11, 13 - padded.first_page(1)]),
        (padded, 20, [1, 0]),
        (padded, 3, [0, 0]),
    ):
        contents = pool.save(each, tokens)
        assert [len(pages) for pages in contents] == counts
        assert pool.num_bytes(each, tokens) == sum(pages.nbytes for pages in contents)
        rows = [[range(count) for count in counts]]
        (restored,) = pool.restore(contents, rows, [each.start], tokens)
        pool.append([restored], 30)
        pool.check_invariants([table, padded, restored])
        pool.release([restored])


@pytest.mark.parametrize(
    "limit", [{"max_pages": 40}, {"max_memory": 50 * LARGE}, {"max_memory": 60 * LARGE}]
)
def test_what_a_table_would_give_back(limit: dict[str, int]) -> None:
    """As many pages as all groups can hand out more then: what the one without a window lacks."""
    pool = PagePool(two_groups(), **limit)
    tables = grow(pool, 64, tables=4)
    pool.slide(tables[:3])
    assert len(tables[0].pages(1)) == 4
    publish(pool, tables[3])
    tables.append(pool.fork(tables[0]))
    found = []
    while tables:
        before, found = pool.num_available, [*found, pool.num_reclaimable(tables[-1])]
        pool.release([tables.pop()])
        assert pool.num_available - before == found[-1]
    assert found[0] == 0  # all of the fork's pages are another one's too
    assert max(found) > 4


# --- prefixes that sequences share ------------------------------------------------------------


def begin(model: PoolModel, tokens: list[int]) -> Sequence_:
    """A sequence that takes what is known of `tokens`, and computes the rest of them."""
    found = model.pool.match_prefix(tokens)
    model.take(model.pool.adopt_prefix(found), tokens[: found.num_tokens])
    sequence = model.sequences[-1]
    sequence.cursors = found.cursors
    extend(model, sequence, tokens[found.num_tokens :])
    return sequence


def extend(model: PoolModel, sequence: Sequence_, tokens: list[int]) -> None:
    length = sequence.table.length
    model.pool.append([sequence.table], len(tokens))
    model._fill_fresh_pages(model.sequences)
    model._write(sequence.table, length, tokens)
    sequence.tokens += tokens


def serve(model: PoolModel, tokens: list[int], prompt: int) -> None:
    """As the engine does: prompts are published at once, what comes after them at the end."""
    sequence = begin(model, tokens[:prompt])
    model.publish(sequence, 0)
    for token in tokens[prompt:]:
        model.pool.slide([sequence.table])
        extend(model, sequence, [token])
    model.check_contents(sequence)
    model.publish(sequence, 0)
    model.release(sequence, 0)


WIDTHS = [1, 2, 7, 8, 9, 16, 17, 20]


@pytest.mark.parametrize("prompt", [1, 12])
@pytest.mark.parametrize("window", WIDTHS)
def test_a_next_turn_finds_all_of_the_last_one(window: int, prompt: int) -> None:
    """What the first one generated has left the window for the most part, and was never published.

    The whole of it is at and around the edges of the window, with the margin and without.
    """
    edges = {window * k + d for k in (1, 2) for d in (-1, 0, 1)}
    for length in sorted({prompt + edge + margin for edge in edges for margin in (0, 8)}):
        model = PoolModel(PagePool(two_groups(window=window), max_pages=60))
        tokens = list(range(1, length + 1))
        serve(model, tokens, prompt)
        found = model.pool.match_prefix(tokens)
        assert found.num_tokens == length // 8 * 8
        assert len(found.pages[0]) == length // 8
        oldest = max(0, found.num_tokens - window + 1)
        assert len(found.pages[1]) >= length // 8 - oldest // 8
        assert len(found.pages[1]) <= (window + 8 - 1 + 7) // 8 + 1
        begin(model, [*tokens, 1000])
        model.check()  # K/V that are not there would show as NaN
        _ends_clean(model)


@pytest.mark.parametrize("chunk", [8, 24, 50])
def test_a_prompt_in_chunks_is_found_though_its_head_was_evicted(chunk: int) -> None:
    """Its head left the window and was cached, and others took the pages while it ran."""
    model = PoolModel(PagePool(two_groups(), max_pages=60))
    tokens = list(range(1, 201))
    sequence = begin(model, [])
    for start in range(0, 200, chunk):
        model.pool.slide([sequence.table])
        extend(model, sequence, tokens[start : start + chunk])
        model.publish(sequence, 0)
        windowed = model.pool._groups[1].allocator
        windowed.evict(windowed.num_cached)
    model.release(sequence, 0)
    found = model.pool.match_prefix(tokens)
    assert found.num_tokens == 200
    assert 0 < len(found.pages[1]) < 25
    begin(model, [*tokens, 1000])
    model.check()


def test_a_hit_ends_where_the_windows_pages_are_there() -> None:
    """Whichever page of a window is gone: no hit lacks one, and none is shorter than it must be."""
    tokens = list(range(1, 201))
    for lost in range(25):
        model = PoolModel(PagePool(two_groups(), max_pages=60))
        serve(model, tokens, 200)
        index = model.pool._groups[1].prefix
        model.pool._groups[1].allocator.unpublish(index.match(tokens)[lost])
        found = model.pool.match_prefix(tokens)
        # The next token of n pages sees those from (8 * n - 19) // 8 on.
        possible = [n for n in range(26) if not max(0, 8 * n - 19) // 8 <= lost < n]
        assert found.num_tokens == 8 * max(possible)
        assert len(found.pages[1]) == (3 if lost == 21 else 4)
        begin(model, [*tokens[: found.num_tokens], 1000])
        model.check()


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("taken", [False, True], ids=["free", "another's"])
def test_a_prefix_that_was_evicted_since_is_not_adopted(group: int, taken: bool) -> None:
    """Another thread may come between match and adopt."""
    pool = PagePool(two_groups(), max_pages=20)
    model = PoolModel(pool)
    serve(model, list(range(1, 17)), 16)
    found = pool.match_prefix(range(1, 17))
    assert found.num_tokens == 16
    allocator = pool._groups[group].allocator
    allocator.evict(1)
    pages = allocator.allocate(1) if taken else []
    before = numbers(pool.stats())
    with pytest.raises(PageError, match=r"pages that were evicted since; match again"):
        pool.adopt_prefix(found)
    assert numbers(pool.stats()) == before
    allocator.release(pages)
    pool.check_invariants([])
    assert pool.adopt_prefix(pool.match_prefix(range(1, 17))).length == 8
    pool.drop_prefix_cache()
    with pytest.raises(PageError, match="evicted since"):
        pool.adopt_prefix(found)


def test_only_what_a_table_holds_is_published() -> None:
    pool = PagePool(two_groups(), max_pages=20)
    padded, short, released = pool.new_table(3), pool.new_table(), pool.new_table()
    pool.append([padded, short, released], 16)
    pool.release([released])
    for table, tokens, error, message in (
        (padded, 16, PageError, "tokens: expected at most 16, without left padding"),
        (short, 17, PageError, "tokens: expected at most 16, .* got 17"),
        (released, 16, UseAfterFree, "it was released"),
    ):
        cursors = pool.match_prefix([]).cursors
        before = list(cursors)
        with pytest.raises(error, match=message):
            pool.publish_prefix(table, range(tokens), cursors)
        assert cursors == before
    assert pool.match_prefix(range(17)).num_tokens == 0
    pool.publish_prefix(short, range(16), cursors)
    assert pool.match_prefix(range(17)).num_tokens == 16


def test_pages_of_a_prefix_that_cost_nothing() -> None:
    """In a window's group only a few pages hold a prefix: the others are not to be paid for."""
    model = PoolModel(PagePool(two_groups(), max_pages=60))
    tokens = list(range(1, 201))
    serve(model, tokens, 200)
    assert model.pool.match_prefix(tokens).num_used == 0  # all 25 pages of the first are cached
    first = begin(model, tokens)
    assert model.pool.match_prefix(tokens).num_used == 25  # and now shared, in both groups
    short = model.pool.match_prefix(tokens[:96])
    assert [len(pages) for pages in short.pages] == [12, 4]
    assert short.num_used == 12 - 4  # the second group's are cached still
    available = [group.allocator.num_available for group in model.pool._groups]
    second = begin(model, tokens[:96])
    after = [group.allocator.num_available for group in model.pool._groups]
    assert [a - b for a, b in zip(available, after, strict=True)] == [0, 4]
    model.release(first, 0)
    model.release(second, 0)
    _ends_clean(model)


# --- memory that comes and goes ---------------------------------------------------------------


def test_memory_follows_the_pages(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=10_000)
    assert pool.stats().bytes_mapped == driver.mapped == G
    (table,) = grow(pool, 3 * 8)
    assert driver.mapped == G
    for _ in range(40):
        pool.append([table], 4 * 8)
        stats = pool.stats()
        assert stats.bytes_in_use <= stats.bytes_mapped == driver.mapped
        assert driver.mapped <= stats.bytes_in_use * 33 / 32 + 2 * G
    while table.length > 8:
        pool.crop([table], table.length - 8)
        stats = pool.stats()
        assert stats.bytes_mapped == driver.mapped == driver.physical
        assert driver.mapped <= stats.bytes_in_use * 33 / 32 + 3 * G
    pool.release([table])
    assert driver.mapped <= WATERMARK  # chunk 0 included
    pool.trim()
    assert driver.mapped == G
    assert driver.touched_unmapped() == []
    pool.close()
    driver.assert_nothing_left()


def test_memory_is_mapped_a_little_at_each_token(driver: FakeDriver) -> None:
    """16 rows whose pages of 1,024 bytes fill at the same token: 4 granules a page's tokens."""
    pool = PagePool(one_group(), max_pages=1000)
    batch = SequenceBatch(pool, [0] * 16)
    batch.append(8)
    batch.claim_ahead()
    for _ in range(100):
        pool._ahead.wait()
        pieces = driver.calls["cuMemMap"]
        batch.append(1)
        assert driver.calls["cuMemMap"] == pieces, "a token waits for memory"
        batch.claim_ahead()
        pool._ahead.wait()
        assert driver.calls["cuMemMap"] <= pieces + 2
        # 2 or 3 pages a token are claimed; memory for one more at least is there a step earlier.
        assert pool._num_ready(0) >= 3
        stats = pool.stats()
        assert stats.bytes_mapped <= stats.bytes_in_use * 33 / 32 + 3 * G
    assert driver.calls["cuMemMap"] > 50


@pytest.mark.parametrize("short", ["ids", "budget", "device", "cached"])
def test_pages_ahead_are_claimed_where_that_is_easy_alone(short: str, driver: FakeDriver) -> None:
    """Nothing is evicted, given back or waited for, and what is there stays as it is."""
    most = {"ids": {"max_pages": 24}, "device": {"max_memory": 1 << 20}}
    pool = PagePool(two_groups(), **most.get(short, {"max_memory": 21 * (SMALL + LARGE)}))
    (table,) = grow(pool, 8 * 15)
    if short == "cached":
        publish(pool, table)
        pool.release([table])
        table = pool.new_table()
    if short == "device":
        driver.capacity = driver.physical
    ahead = pool.new_table()
    before, mapped = numbers(pool.stats()), dict(driver.mappings)
    pool.claim_ahead(ahead, 10)
    assert ahead.num_pages == 0
    assert numbers(pool.stats()) == before
    assert driver.mappings == mapped
    pool.check_invariants()
    driver.capacity = 1 << 40
    pool.claim_ahead(ahead, 3)
    assert ahead.num_pages == 2 * 3
    pool.append([table], 8 * 5, ahead=ahead)
    assert ahead.num_pages == 0
    pool.check_invariants([table])


def test_memory_ahead_follows_what_rows_really_fill(driver: FakeDriver) -> None:
    """Not what they share, nor what left a window: a group with one does not grow."""
    pool = PagePool(two_groups(), max_pages=4000)
    batch = SequenceBatch(pool, [0])
    batch.append(8 * 1000)
    batch.slide()
    batch.select([0] * 32)
    before = [group.bytes_mapped - group.bytes_in_use for group in pool.stats().groups]
    batch.claim_ahead()
    pool._ahead.wait()
    for group, spare, stats in zip(pool.geometry.groups, before, pool.stats().groups, strict=True):
        part = 0 if group.shape.window else stats.bytes_in_use // 32  # and as much of a chunk
        assert stats.bytes_mapped - stats.bytes_in_use <= max(spare, 2 * part) + 3 * G


def test_another_thread_maps_memory_ahead(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that needs it does not call the driver, and waits where it is not there yet."""
    threads: list[int] = []
    may_go_on = threading.Event()
    create = driver.cuMemCreate

    def slow(*args: Any) -> Any:
        threads.append(threading.get_ident())
        assert may_go_on.wait(10)
        return create(*args)

    pool = PagePool(one_group(), max_pages=1000)
    tables = grow(pool, 3 * 8)  # with page 0 the pages of a chunk
    monkeypatch.setattr(driver, "cuMemCreate", slow)
    assert pool.stats().bytes_mapped == G
    pool.map_ahead(5)
    pool.map_ahead(5)
    threading.Timer(0.05, may_go_on.set).start()
    pool.append(tables, 5 * 8)
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert pool.stats().bytes_mapped == driver.mapped == 3 * G
    pool.append(tables, 4 * 8)
    assert threads[2:] == [threading.get_ident()], "nobody had asked for more"
    pool.close()
    driver.assert_nothing_left()


def test_memory_mapped_ahead_goes_where_it_is_not_needed(driver: FakeDriver) -> None:
    pool = PagePool(two_groups(), max_memory="1MiB")
    table = grow(pool, 8)[0]
    pool.map_ahead(40)
    pool._ahead.wait()
    mapped = driver.mapped
    assert pool.stats().bytes_mapped == mapped > 40 * (SMALL + LARGE)
    pool.map_ahead(40)
    pool.map_ahead(0)
    pool.map_ahead(-3)
    pool._ahead.wait()
    assert driver.mapped == mapped
    pool.trim()
    assert pool.stats().bytes_mapped == driver.mapped < 3 * G + 2 * G
    pool.append([table], 40 * 8)
    pool.map_ahead(20)
    pool.check_invariants([table])
    pool.close()  # while it is being mapped, perhaps
    driver.assert_nothing_left()


@pytest.mark.parametrize("short", ["ids", "budget", "device"])
def test_memory_is_mapped_ahead_within_bounds(short: str, driver: FakeDriver) -> None:
    most = {"ids": {"max_pages": 10}, "device": {"max_memory": 1 << 20}}
    pool = PagePool(two_groups(), **most.get(short, {"max_memory": 12 * (SMALL + LARGE)}))
    (table,) = grow(pool, 8 * 8)
    if short == "device":
        driver.capacity = driver.physical + G
    pool.map_ahead(100)
    pool._ahead.wait()
    stats = pool.stats()
    assert stats.bytes_mapped <= driver.capacity
    # As all that is open, a chunk's memory may reach over the end of the budget.
    assert stats.bytes_mapped <= stats.bytes_total + 4 * G
    if short == "device":
        with pytest.raises(OutOfPages):
            pool.append([table], 100 * 8)
        pool.check_invariants([table])
        driver.capacity = 1 << 40
    pool.append([table], 2 * 8)
    pool.check_invariants([table])
    pool.trim()
    assert pool.stats().bytes_mapped == driver.mapped == driver.physical


def test_memory_mapped_ahead_goes_when_other_memory_does(driver: FakeDriver) -> None:
    """Those that it was for have ended: nobody need call `trim`."""
    pool = PagePool(one_group(), max_pages=10_000)
    tables = grow(pool, 8 * 2000)
    pool.map_ahead(pool._groups[0].allocator.num_open_free + 1)
    pool._ahead.wait()
    assert driver.mapped > pool.stats().bytes_in_use + 3 * WATERMARK
    pool.release(tables)
    assert pool.stats().bytes_mapped == driver.mapped <= WATERMARK


@pytest.mark.parametrize("result", list(CUresult)[1:])
def test_what_could_not_be_mapped_ahead_is_mapped_when_it_is_needed(
    result: CUresult, driver: FakeDriver
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    for call in (lambda: grow(pool, 8 * 20), pool.trim):
        driver.fail["cuMemCreate"] = result
        pool.map_ahead(20)
        pool._ahead.wait()
        assert not driver.fail
        call()
        pool.map_ahead(8)
        pool._ahead.wait()
        assert driver.mapped > pool.stats().bytes_in_use + 7 * 1024
    unmapped = driver.calls["cuMemUnmap"]
    grow(pool, 8 * 8)
    assert driver.calls["cuMemUnmap"] == unmapped


def test_where_no_thread_can_be_had_memory_is_mapped_when_it_is_needed(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread has ended, and another one goes on: then Python gives no more threads."""
    pool = PagePool(one_group(), max_pages=1000)
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    for _ in range(3):
        pool.map_ahead(20)
        grow(pool, 8 * 20)
    assert driver.mapped >= 60 * 1024
    pool.close()
    driver.assert_nothing_left()


def test_no_thread_is_begun_where_memory_comes_by_itself() -> None:
    """A child process would be without it, and wait for it for ever."""
    pool = PagePool(two_groups(), max_memory="1MiB")
    before = threading.active_count()
    pool.map_ahead(200)
    assert threading.active_count() == before
    grow(pool, 8 * 200)


@pytest.mark.parametrize("end", ["abandon", "release", "stats"])
def test_a_finalizer_in_the_thread_that_maps_waits_for_nothing(
    end: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is collected in whatever thread makes objects, and caches may be among it."""
    pool = PagePool(one_group(), max_pages=1000)
    (garbage,) = grow(pool, 8 * 100)
    store, found = pool._groups[0].store, []
    mapped = store.map

    def collecting(*span: int) -> None:
        monkeypatch.setattr(store, "map", mapped)
        try:
            getattr(pool, end)(*([[garbage]] if end != "stats" else []))
        except PageForgeError as error:
            found.append(error)
        mapped(*span)

    monkeypatch.setattr(store, "map", collecting)
    (table,) = grow(pool, 8 * (pool._groups[0].allocator.num_open_free))
    pool.map_ahead(1)
    asking = threading.Thread(target=pool.append, args=([table], 8), daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive(), "it waits for itself"
    assert len(found) == (end == "stats")
    pool.release([garbage])
    pool.check_invariants([table])
    assert pool.stats().bytes_mapped == driver.mapped <= table.num_pages * 1024 + WATERMARK + G


def test_a_pool_that_is_collected_by_the_thread_that_maps_gives_all_back(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    grow(pool, 8 * 3)
    create, end, thread = driver.cuMemCreate, pool._finalizer, pool._ahead._thread
    is_collected = threading.Event()

    def collecting(*args: Any) -> Any:
        monkeypatch.setattr(driver, "cuMemCreate", create)
        end()
        is_collected.set()
        return create(*args)

    monkeypatch.setattr(driver, "cuMemCreate", collecting)
    pool.map_ahead(5)
    assert is_collected.wait(10)
    thread.shutdown()  # it has done all that it had to
    driver.assert_nothing_left()


def test_the_watermark_avoids_thrashing(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    assert driver.mapped == G
    pool.release(grow(pool, 7 * 8))
    assert driver.mapped == 2 * G
    calls = driver.calls["cuMemMap"], driver.calls["cuMemUnmap"]
    for _ in range(10):
        pool.release(grow(pool, 7 * 8))
    assert (driver.calls["cuMemMap"], driver.calls["cuMemUnmap"]) == calls


def test_memory_is_unmapped_behind_the_last_kernel(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    event = FakeEvent()
    monkeypatch.setattr(pool, "_record_events", lambda device: [event])
    tables = grow(pool, 40 * 8)
    mapped = driver.mapped
    (base,) = driver.ranges
    driver.busy = [(base, base + mapped)]  # a kernel reads all of it
    pool.release(tables)
    assert driver.mapped == pool.stats().bytes_mapped == mapped  # nothing is unmapped under it
    event.done, driver.busy = True, []
    pool.new_table()
    assert pool.stats().bytes_mapped == driver.mapped == 2 * G
    assert event.waits == 0


def test_trim_waits_for_the_last_kernel(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    event = FakeEvent()
    monkeypatch.setattr(pool, "_record_events", lambda device: [event])
    tables = grow(pool, 40 * 8)
    (base,) = driver.ranges
    driver.busy = [(base, base + driver.mapped)]
    pool.release(tables)

    def end() -> None:
        event.done, driver.busy = True, []

    monkeypatch.setattr(event, "synchronize", end)
    pool.trim()
    assert driver.mapped == G


def test_a_chunk_may_be_reopened_before_it_is_unmapped(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    event = FakeEvent()
    monkeypatch.setattr(pool, "_record_events", lambda device: [event])
    tables = grow(pool, 40 * 8)
    mapped, calls = driver.mapped, driver.calls["cuMemMap"]
    pool.release(tables)
    tables = grow(pool, 40 * 8)
    assert driver.calls["cuMemMap"] == calls and driver.mapped == mapped
    event.done = True
    pool.trim()  # the reopened chunks are in use
    assert driver.mapped == pool.stats().bytes_mapped == mapped
    pool.pages(0)[torch.tensor(tables[0].pages())] = 1.0
    assert driver.touched_unmapped() == []
    pool.release(tables)
    pool.trim()
    assert driver.mapped == G


@pytest.mark.parametrize("call", ["_record_events", "before unmap", "after unmap"])
@pytest.mark.parametrize("end", ["release", "crop", "abandon", "trim"])
def test_memory_that_could_not_be_given_back_goes_later(
    end: str, call: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing driver, or an interrupt, loses no chunk: it is unmapped by a later call."""
    pool = PagePool(two_groups(), max_pages=200)
    kept, *tables = grow(pool, 80, tables=5)
    if end == "trim":
        monkeypatch.setattr(PagePool._shrink, "__defaults__", (1 << 30, None))
        pool.release(tables)
    unmap, failures = HostStore.unmap, [RuntimeError("planted")]

    def fail(*args: Any) -> None:
        if call == "after unmap":
            unmap(*args)
        if failures:
            raise failures.pop()
        if call == "before unmap":
            unmap(*args)

    ends: dict[str, Callable[[], None]] = {
        "release": lambda: pool.release(tables),
        "crop": lambda: pool.crop(tables, 0),
        "abandon": lambda: pool.abandon(tables),
        "trim": pool.trim,
    }
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
        if call == "_record_events":
            patched.setattr(pool, call, fail)
        else:
            patched.setattr(HostStore, "unmap", fail)
        ends[end]()
    assert pool.stats().pages_used == 20
    pool.trim()
    held = driver.mapped
    assert held <= pool.stats().bytes_in_use + 4 * G
    pool.release(grow(pool, 80, tables=4))
    pool.trim()
    assert driver.mapped == driver.physical == pool.stats().bytes_mapped == held
    pool.check_invariants([kept])
    assert driver.touched_unmapped() == []
    pool.close()
    driver.assert_nothing_left()


def test_memory_that_was_mapped_in_vain_goes_back(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group's fails for another reason than a full device, and so do events."""
    pool = PagePool(two_groups(), max_pages=200)
    (table,) = grow(pool, 8)
    before, store = driver.mapped, pool._groups[1].store

    def fail(*args: Any) -> None:
        raise RuntimeError("planted")

    for call in (
        lambda: pool.append([table], 400),
        lambda: pool.claim_ahead(pool.new_table(), 40),
    ):
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
            patched.setattr(store, "map", fail)
            patched.setattr(pool, "_record_events", fail)
            call()
        assert driver.mapped > before
        pool.trim()
        assert driver.mapped == before
    pool.append([table], 400)
    pool.check_invariants([table])


def test_no_stale_memory_after_a_chunk_went_and_came_back() -> None:
    pool = PagePool(one_group(), max_pages=1000)
    tables = grow(pool, 100 * 8)
    ids = torch.tensor(tables[0].pages())
    pool.pages(0)[ids] = 7.0
    pool.release(tables)
    pool.trim()
    tables = grow(pool, 100 * 8)
    fresh = pool.pages(0)[torch.tensor(sorted(tables[0].pages())[8:])]
    assert int(fresh.count_nonzero()) == 0  # the first ones lie in chunk 0 and at its edge


# --- the device runs out ----------------------------------------------------------------------


class TorchCache:
    """What torch keeps of the device's memory for later tensors, and gives up when asked."""

    def __init__(self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, num_bytes: int):
        self.driver, self.num_bytes, self.emptied = driver, num_bytes, 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)

    def empty(self) -> None:
        self.emptied += 1
        self.driver.capacity += self.num_bytes
        self.num_bytes = 0


def test_torchs_cached_memory_is_asked_for_once(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    (table,) = grow(pool, 3 * 8)
    cache = TorchCache(driver, monkeypatch, 10 * G)
    driver.capacity = driver.physical
    pool.append([table], 8 * 8)
    assert cache.emptied == 1 and len(table.pages()) == 11
    driver.capacity = driver.physical
    with pytest.raises(OutOfPages, match="no memory left to map"):
        pool.append([table], 100 * 8)
    assert cache.emptied == 2 and len(table.pages()) == 11
    driver.capacity = 1 << 30
    pool.append([table], 100 * 8)
    assert cache.emptied == 2
    assert driver.touched_unmapped() == []


def test_a_pool_can_be_made_when_torch_holds_the_memory(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TorchCache(driver, monkeypatch, 2 * G)
    driver.capacity = 0
    pool = PagePool(two_groups(), max_pages=10)
    assert cache.emptied == 1
    driver.capacity = driver.physical + G
    calls = driver.calls["cuMemAddressReserve"]
    with pytest.raises(OutOfPages, match="CUDA_ERROR_OUT_OF_MEMORY"):
        PagePool(two_groups(), max_pages=10)  # one group fits, the other does not
    assert driver.calls["cuMemAddressReserve"] == calls + 2
    assert driver.calls["cuMemAddressFree"] == 2  # and nothing of either stays
    assert driver.physical == driver.mapped == 2 * G
    pool.close()


def test_idle_memory_of_one_group_serves_another(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watermark's chunks go first when the device runs out."""
    monkeypatch.setattr(PagePool._shrink, "__defaults__", (20 * G, None))
    pool = PagePool(two_groups(), max_memory=1000 * LARGE)
    (long,) = grow(pool, 60 * 8)
    pool.slide([long])  # the window's group now has idle chunks
    idle = len(pool._groups[1].allocator.empty_chunks())
    assert idle
    driver.capacity = driver.physical
    free = pool._groups[0].allocator.num_open_free
    with pytest.raises(OutOfPages):
        pool.append([long], (free + 50) * 8)
    pool.append([long], (free + 1) * 8)
    assert driver.physical <= driver.capacity
    assert driver.touched_unmapped() == []
    pool.check_invariants([long])


def test_idle_memory_that_the_call_itself_needs_is_not_given_back(driver: FakeDriver) -> None:
    """Free pages of an idle chunk and cached ones together are enough: no new memory is needed."""
    pool = PagePool(one_group(), max_pages=1000)
    tables = grow(pool, 3 * 8)
    kept = grow(pool, 4 * 8)
    idle = grow(pool, 4 * 8)
    publish(pool, kept[0])
    pool.release(kept)
    pool.release(idle)
    assert driver.mapped == 3 * G and numbers(pool.stats())[:2] == (3, 4)
    driver.capacity = driver.physical
    calls = driver.calls["cuMemUnmap"]
    pool.append(tables, 7 * 8)
    assert numbers(pool.stats())[:2] == (10, 1)
    assert driver.mapped == 3 * G and driver.calls["cuMemUnmap"] == calls
    with pytest.raises(OutOfPages) as error:
        pool.append(tables, 2 * 8)
    assert (error.value.needed, error.value.available) == (2, 1)
    assert numbers(pool.stats())[:2] == (10, 1)
    pool.append(tables, 8)
    assert numbers(pool.stats())[:2] == (11, 0)
    pool.pages(0)[torch.tensor(tables[0].pages())] = 1.0
    assert driver.touched_unmapped() == []
    pool.check_invariants(tables)


def test_what_fits_is_mapped_before_cached_pages_give_way(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=1000)
    kept = grow(pool, 10 * 8)
    publish(pool, kept[0])
    pool.release(kept)
    driver.capacity = driver.physical + 2 * G  # 8 pages, and one is free
    (table,) = grow(pool, 15 * 8)
    assert numbers(pool.stats())[:2] == (15, 4)
    with pytest.raises(OutOfPages) as error:
        pool.append([table], 5 * 8)
    assert (error.value.needed, error.value.available) == (5, 4)
    pool.append([table], 4 * 8)
    assert numbers(pool.stats())[:2] == (19, 0)
    assert driver.touched_unmapped() == [] and driver.physical == driver.capacity
    pool.check_invariants([table])


def test_retired_memory_is_waited_for_before_giving_up(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group's chunks, still behind a kernel, are memory that will be there in a moment."""
    pool = PagePool(two_groups(), max_memory=1000 * LARGE)
    (long,) = grow(pool, 60 * 8)
    event = FakeEvent()
    monkeypatch.setattr(pool, "_record_events", lambda device: [event])
    pool.slide([long])
    driver.capacity = driver.physical
    free = pool._groups[0].allocator.num_open_free
    pool.append([long], (free + 1) * 8)
    assert event.waits > 0
    assert driver.touched_unmapped() == []


def test_another_pools_idle_memory_is_not_ours(driver: FakeDriver) -> None:
    one, other = (PagePool(one_group(), max_pages=1000) for _ in range(2))
    one.release(grow(one, 7 * 8))
    held = one.stats().bytes_mapped
    driver.capacity = driver.physical
    (table,) = grow(other, 3 * 8)
    with pytest.raises(OutOfPages):
        other.append([table], 8)
    assert one.stats().bytes_mapped == held
    one.trim()
    other.append([table], 8)


# --- streams ----------------------------------------------------------------------------------


class FakeStream:
    device = torch.device("cuda", 0)

    def __init__(self, name: str):
        self.name, self.waited = name, []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.name)

    def record_event(self) -> str:
        return f"after {self.name}"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeStream]:
    return {name: FakeStream(name) for name in "abc"}


def on(stream: FakeStream, pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use `pool` on `stream`; returns the streams that it waited for."""
    stream.waited.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr("pageforge.pool.stream_handle", lambda device: id(stream))
    pool.use_stream(torch.device("cuda"))
    return stream.waited


def test_one_stream_never_waits(
    streams: dict[str, FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=10)
    for _ in range(3):
        assert on(streams["a"], pool, monkeypatch) == []
        pool.release(grow(pool, 8))


def test_a_stream_waits_for_those_that_had_their_turn(
    streams: dict[str, FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=10)
    a, b, c = (streams[name] for name in "abc")
    on(a, pool, monkeypatch)
    assert on(b, pool, monkeypatch) == ["a"]
    assert on(b, pool, monkeypatch) == []
    assert sorted(on(c, pool, monkeypatch)) == ["a", "b"]
    assert sorted(on(a, pool, monkeypatch)) == ["b", "c"]


def test_pages_that_change_hands_are_waited_for(
    streams: dict[str, FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a` launches more after `b` had its turn, then gives pages back; `b` must not overtake it."""
    pool = PagePool(one_group(), max_pages=10)
    tables = grow(pool, 8)
    on(streams["a"], pool, monkeypatch)
    on(streams["b"], pool, monkeypatch)
    pool.release(tables)
    assert on(streams["b"], pool, monkeypatch) == ["a"]
    assert sorted(pool._record_events(torch.device("cuda", 0))) == ["after a", "after b"]  # type: ignore[type-var]
    assert pool._record_events(torch.device("cuda", 1)) == []
    pool.use_stream(CPU)


# --- lifetimes ----------------------------------------------------------------------------------


def test_exported_pages_are_held_until_the_last_view_is_gone(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=100)
    (table,) = grow(pool, 20 * 8)
    first, second = table.pages()[9:11]
    assert second == first + 1
    pool.pages(0)[first : second + 1] = torch.arange(512.0).view(2, 256)
    array = np.from_dlpack(pool.export_pages(first, 2))
    assert array.shape == (2, 1, 2, 2, 8, 8)
    assert array.ravel().tolist() == list(range(512))
    assert array.ctypes.data == pool.pages(0)[first].data_ptr()  # no copy
    corner = array[1, 0, 1, 1, 7:]
    del array
    pool.release([table])
    pool.trim()
    assert numbers(pool.stats())[0] == 2
    grow(pool, 12 * 8)  # whoever comes next gets other pages
    gc.collect()
    assert corner.ravel().tolist() == list(range(504, 512))
    assert driver.touched_unmapped() == []
    del corner
    assert numbers(pool.stats())[0] == 12


def test_an_exported_page_is_not_written_again() -> None:
    """The sequence that goes on writes to a copy, so what was exported stays as it is."""
    pool = PagePool(one_group(), max_pages=100)
    (table,) = grow(pool, 4)
    (page,) = table.pages()
    view = pool.export_pages(page)
    (move,) = pool.append([table], 1)
    assert (move.source, table.pages()) == (page, [move.target])
    del view
    pool.check_invariants([table])


def test_export_says_what_can_be_exported() -> None:
    pool = PagePool(two_groups(), max_pages=100)
    (table,) = grow(pool, 2 * 8)
    for first, count in ((0, 1), (-1, 1), (3, 1), (2, 2), (100, 1), (101, 1), (1, 0), (1, -1)):
        with pytest.raises(PageError):
            pool.export_pages(first, count)
    gc.collect()
    assert numbers(pool.stats())[0] == 4
    assert pool.export_pages(1, 2).shape == (2, 2, 2, 2, 8, 5)
    assert pool.export_pages(1, 2, group=1).shape == (2, 1, 8 * (12 + 8))  # K and V dims differ
    publish(pool, table)
    pool.release([table])
    assert np.from_dlpack(pool.export_pages(2)).shape == (1, 2, 2, 2, 8, 5)  # a cached one
    pool.check_invariants([])


@pytest.mark.parametrize("name", ["use_stream", "export"])
def test_an_export_that_fails_holds_nothing(
    name: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=100)
    tables = grow(pool, 8)

    def fail(*args: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
        patched.setattr(pool if name == "use_stream" else pool._groups[0].store, name, fail)
        pool.export_pages(1)
    gc.collect()
    pool.release(tables)
    assert numbers(pool.stats()) == (0, 0, 100)
    pool.close()
    driver.assert_nothing_left()


def test_exports_outlive_the_pools_end(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=100)
    (table,) = grow(pool, 8)
    pool.pages(0)[1] = 5.0
    arrays = [np.from_dlpack(pool.export_pages(1)) for _ in range(2)]
    pool.close()
    with pytest.raises(UseAfterFree):
        pool.export_pages(1)
    pool.release([table])
    del pool, table
    gc.collect()
    assert arrays[1].ravel().tolist() == [5.0] * 256
    del arrays[0]
    assert driver.mapped == G
    arrays.clear()
    driver.assert_nothing_left()


def test_exports_keep_a_pool_that_nobody_closes(driver: FakeDriver) -> None:
    pool = PagePool(one_group(), max_pages=100)
    tables = grow(pool, 8)
    view = pool.export_pages(1).view(-1)
    pool.release(tables)
    del pool, tables
    gc.collect()
    assert driver.mapped == G
    del view
    driver.assert_nothing_left()


def test_close_gives_everything_back(driver: FakeDriver) -> None:
    with PagePool(two_groups(), max_pages=100) as pool:
        tables = grow(pool, 30 * 8)
        lost = pool.fork(tables[0])
        pool.release(grow(pool, 30 * 8))
    driver.assert_nothing_left()
    pool.close()
    pool.release(tables)  # late, but no error
    pool.release(tables)
    pool.abandon([lost])
    for use in (
        pool.stats,
        pool.trim,
        pool.drop_prefix_cache,
        lambda: pool.append([pool.new_table()], 1),
        lambda: pool.layer(0),
        lambda: pool.pages(0),
        lambda: pool.export_pages(1),
        lambda: pool.restore([], [], [], 0),
    ):
        with pytest.raises(UseAfterFree, match=r"closed.*make a new PagePool"):
            use()
    assert repr(pool) == "PagePool(closed)"
    driver.assert_nothing_left()


def test_close_with_memory_on_its_way_back(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PagePool(one_group(), max_pages=100)
    event = FakeEvent()
    monkeypatch.setattr(pool, "_record_events", lambda device: [event])
    tables = grow(pool, 50 * 8)
    other = grow(pool, 8)
    pool.release(tables)
    pool.close()
    driver.assert_nothing_left()
    event.done = True
    pool.release(other)
    driver.assert_nothing_left()


def test_a_pool_that_is_dropped_gives_everything_back(driver: FakeDriver) -> None:
    pool = PagePool(two_groups(), max_pages=100)
    grow(pool, 30 * 8)
    del pool
    gc.collect()
    driver.assert_nothing_left()


def test_a_plain_pool_lets_go_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "supported", lambda: False)
    pool = PagePool(one_group(), max_pages=100)
    memory = weakref.ref(pool._groups[0].store._bytes.untyped_storage())  # type: ignore[attr-defined]
    store = pool._groups[0].store
    pool.close()
    gc.collect()
    assert store.bytes_mapped(0) == 0 and memory() is None


def test_a_pool_cannot_be_pickled_and_its_copy_is_itself() -> None:
    pool = PagePool(one_group(), max_pages=10)
    with pytest.raises(TypeError, match=r"cannot be pickled.*export_pages"):
        pickle.dumps(pool)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save({"pool": pool}, "/dev/null")
    assert copy.deepcopy({"pool": [pool]})["pool"][0] is pool
    assert "0 used + 0 cached of 10" in repr(pool)


# --- garbage collection and threads ---------------------------------------------------------------


def in_the_middle_of_a_call(pool: PagePool, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` where garbage collection could run a finalizer: with the lock held."""
    real = pool._reserve

    def reserve(needed: Any) -> None:
        real(needed)
        action()

    monkeypatch.setattr(pool, "_reserve", reserve)
    caller = threading.Thread(target=grow, args=(pool, 8), daemon=True)
    caller.start()
    caller.join(timeout=20)
    assert not caller.is_alive(), "a finalizer waits for the call that it interrupts"
    monkeypatch.setattr(pool, "_reserve", real)


@pytest.mark.parametrize("name", ["abandon", "release"])
def test_a_finalizer_in_the_middle_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`abandon` is for finalizers; a user's __del__ may well call `cache.free()`."""
    pool = PagePool(one_group(), max_pages=100)
    tables = grow(pool, 30 * 8)
    in_the_middle_of_a_call(pool, lambda: getattr(pool, name)(tables), monkeypatch)
    assert pool._groups[0].allocator.num_used == 1  # at the end of that call, not of the next
    pool.check_invariants()


def test_other_calls_from_a_finalizer_raise_instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = PagePool(one_group(), max_pages=100)
    raised: list[BaseException] = []

    def finalizer() -> None:
        try:
            pool.stats()
        except PageForgeError as error:
            raised.append(error)

    in_the_middle_of_a_call(pool, finalizer, monkeypatch)
    assert "finalizer" in str(raised[0])


def test_what_is_lost_while_another_thread_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(one_group(), max_pages=100)
    tables = grow(pool, 30 * 8)

    def lose() -> None:
        other = threading.Thread(target=pool.abandon, args=(tables,))
        other.start()
        other.join(timeout=20)
        assert not other.is_alive()

    in_the_middle_of_a_call(pool, lose, monkeypatch)
    assert pool._groups[0].allocator.num_used == 1


def test_lost_pages_come_back_under_heavy_garbage_collection() -> None:
    class Cache:
        def __init__(self, pool: PagePool):
            self.table = grow(pool, 20)[0]
            self.cycle = self
            weakref.finalize(self, pool.abandon, [self.table])

    pool = PagePool(one_group(), max_pages=400)
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(300):
            try:
                Cache(pool)
            except OutOfPages:
                gc.collect()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert numbers(pool.stats()) == (0, 0, 400)
    pool.check_invariants([])


@pytest.fixture
def quick_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("elastic", ["mmap", "driver"])
def test_many_threads(elastic: str, quick_switches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four with sequences of their own and forks of one prompt, and one that asks and trims."""
    driver = install(monkeypatch, G) if elastic == "driver" else None
    pool = PagePool(two_groups(), max_memory=120 * LARGE)
    prompt = PoolModel(pool, alone=False, first=10_000_000 // 8)
    prompt.new(0)
    prompt.append(prompt.sequences[0], 21)
    shared = prompt.sequences[0]
    errors: list[BaseException] = []
    outs: list[int] = []
    running = threading.Event()
    running.set()

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            model = PoolModel(pool, most=5, alone=False, first=seed * 100_000)
            mine = set(STEPS) - {"publish", "reuse", "drop", "trim", "restore"}
            steps = [step for step in random_steps(rng, 150) if step[0] in mine]
            for number, step in enumerate(steps):
                if number % 10 == 0 and len(model.sequences) < model.most:
                    model.take(pool.fork(shared.table), shared.tokens)
                model.run([step])
            model.end()
            outs.append(model.outs)
        except BaseException as error:
            errors.append(error)

    def ask() -> None:
        try:
            while running.is_set():
                stats = pool.stats()
                for group in stats.groups:
                    pages = group.pages_used + group.pages_cached + group.pages_free
                    assert pages == group.pages_total
                assert stats.bytes_in_use <= stats.bytes_total
                pool.check_invariants()
                pool.trim()
                pool.drop_prefix_cache()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    asker = threading.Thread(target=ask)
    for thread in (*workers, asker):
        thread.start()
    for thread in workers:
        thread.join()
    running.clear()
    asker.join()
    if errors:
        raise errors[0]
    assert len(outs) == 4
    prompt.check_contents(shared)
    prompt.end()
    gc.collect()
    assert numbers(pool.stats())[:2] == (0, 0)
    pool.check_invariants([])
    if driver is not None:
        assert driver.touched_unmapped() == []
        assert pool.stats().bytes_mapped == driver.mapped == driver.physical
    pool.close()


# --- against the model ------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(1, 40)), max_size=40
)


@settings(max_examples=40)
@given(steps)
def test_every_sequence_reads_its_own_tokens(steps: list[Step]) -> None:
    pool = PagePool(two_groups(), max_memory=60 * LARGE)
    model = PoolModel(pool)
    model.run(steps)
    _ends_clean(model)


@settings(max_examples=40)
@given(steps, st.lists(st.integers(0, 19), min_size=40, max_size=40))
def test_every_sequence_reads_its_own_tokens_on_a_device_that_runs_full(
    steps: list[Step], moods: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        driver = install(monkeypatch, G)
        pool = PagePool(two_groups(), max_memory=60 * LARGE)
        model = PoolModel(pool)
        mood = iter(moods)

        def after() -> None:
            assert driver.touched_unmapped() == []
            assert pool.stats().bytes_mapped == driver.mapped == driver.physical
            change = next(mood)
            if change < 3:  # full, nearly full, or roomy from now on
                driver.capacity = (driver.physical, driver.physical + G, 1 << 40)[change]

        model.run(steps, after)
        driver.capacity = 1 << 40
        _ends_clean(model)
        pool.close()
        driver.assert_nothing_left()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("elastic", ["mmap", "driver"])
def test_long_random_runs(seed: int, elastic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences, tighter: OutOfPages and evictions are part of it."""
    driver = install(monkeypatch, G) if elastic == "driver" else None
    pool = PagePool(two_groups(), max_memory=40 * LARGE)
    model = PoolModel(pool, most=8)
    rng = random.Random(seed)

    def after() -> None:
        if driver is None:
            return
        assert driver.touched_unmapped() == []
        assert pool.stats().bytes_mapped == driver.mapped == driver.physical
        if rng.random() < 0.2:
            driver.capacity = rng.choice([driver.physical, driver.physical + G, 1 << 40])

    model.run(random_steps(rng, 200), after)
    assert model.outs
    _ends_clean(model)


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_found_under_pressure(seed: int) -> None:
    """What is evicted from one group, or left its window, never serves; what is there does."""
    model = PoolModel(PagePool(two_groups(), max_memory=40 * LARGE), most=5)
    model.run(random_steps(random.Random(seed), 300, SHARING_STEPS))
    assert model.outs and model.hits > 5 and model.hits_in_a_window > 5
    _ends_clean(model)


def _ends_clean(model: PoolModel) -> None:
    pool = model.pool
    model.end()
    assert pool.stats().pages_used == 0
    pool.drop_prefix_cache()
    pool.trim()
    stats = pool.stats()
    assert numbers(stats) == (0, 0, stats.pages_total)
    assert stats.bytes_mapped <= 2 * (2 << 20)  # chunk 0 of each group, or a huge page


# --- planted faults: the model sees them ----------------------------------------------------------


def _faulty_run(driver: FakeDriver) -> None:
    """Long random runs, as above, until one fails."""
    for seed in range(6):
        pool = PagePool(two_groups(), max_memory=40 * LARGE)
        model = PoolModel(pool, most=8)

        def after(model: PoolModel = model) -> None:
            assert driver.touched_unmapped() == []

        model.run(random_steps(random.Random(seed), 120), after)


def _lose_copies(self: PagePool, copies: Any) -> None:
    pass


def _swap_heads(key: Any, value: Any, key_pages: Any, value_pages: Any, slots: Any) -> None:
    ops.reference.write_kv(key.flip(1) * 1.5, value, key_pages, value_pages, slots)


def _share_nothing(self: PageAllocator, pages: Any) -> None:
    pass


def _unmap_used_chunks(self: PagePool, *, wait: bool) -> None:
    for index, group in enumerate(self._groups):
        chunks = [c for c in group.allocator.open_chunks() if c]
        for chunk in chunks[-1:]:
            bounds = group.chunk_bytes(chunk)
            if bounds in group.store._touched:  # type: ignore[attr-defined]
                group.store.unmap([bounds])
        for owner, chunk in [retired for retired in self._retired if retired[0] == index]:
            del self._retired[owner, chunk]
            if chunk not in chunks[-1:]:
                group.store.unmap([group.chunk_bytes(chunk)])


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (PagePool, "_copy", _lose_copies),
        (ops, "write_kv", _swap_heads),
        (PageAllocator, "share", _share_nothing),
        (PagePool, "_unmap_retired", _unmap_used_chunks),
        (PagePool, "_map", lambda self, index, chunks, mapped: None),
    ],
)
def test_planted_faults_are_seen(
    owner: Any, name: str, fault: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, PageError, KeyError)):
        _faulty_run(driver)


def test_idle_chunks_of_one_group_make_room_for_another() -> None:
    layers = {0: LayerShape(1, 64, 64, "float32"), 1: LayerShape(2, 64, 64, "float32")}
    geometry = KVGeometry.of_layers(layers, 256)
    with PagePool(geometry, max_memory=64 << 20) as pool:
        first = pool._groups[0]
        first.allocator.release(first.allocator.allocate(200))  # 25 MiB, idle now
        table = pool.new_table()
        for _ in range(160):
            pool.append([table], 256)  # 60 MiB in both groups together
        open_bytes = sum(
            (g.allocator.num_open_free + g.allocator.num_used) * g.bytes_per_page
            for g in pool._groups
        )
        assert open_bytes <= pool.stats().bytes_total + 2 * GRANULE
        assert pool.stats().bytes_free == pool.stats().bytes_total - pool.stats().bytes_in_use


def test_groups_are_not_counted_from_the_end() -> None:
    with PagePool(KVGeometry.uniform(1, 1, 8, dtype="float32"), max_pages=4) as pool:
        for call in (pool.pages, lambda group: pool.export_pages(1, group=group)):
            for group in (-1, 1):
                with pytest.raises(GeometryError, match="group: expected from 0 to 0"):
                    call(group)


def test_a_pool_that_is_all_open_does_not_unmap_at_every_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = KVGeometry.uniform(1, 1, 64, dtype="float32", page_size=256)
    with PagePool(geometry, max_pages=64) as pool:
        monkeypatch.setattr(PagePool._shrink, "__defaults__", (32 << 20, None))
        table = pool.new_table()
        pool.append([table], 64 * 256)
        pool.release([table])  # the chunks stay, below the watermark
        unmapped: list[object] = []
        monkeypatch.setattr(pool._groups[0].store, "unmap", unmapped.append)
        other = pool.new_table()
        for _ in range(60):
            pool.append([other], 256)
        assert unmapped == []
