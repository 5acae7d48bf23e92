"""PageAllocator: every rule and every error, on pools small enough to follow by eye."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pageforge.errors import GeometryError, OutOfPages, PageError
from pageforge.memory import allocator as module
from pageforge.memory.allocator import PageAllocator, Supply

UNKNOWN = [0, -1, -5, 9, 65, 10**9]  # of a pool of 8 pages


def unchanged_by(allocator: PageAllocator, error: type[Exception], call: Callable[[], Any]) -> Any:
    """`call` raises `error` and leaves the allocator as it was, to the last detail."""
    before = copy.deepcopy(vars(allocator))
    with pytest.raises(error) as caught:
        call()
    assert vars(allocator) == before
    return caught.value


@pytest.fixture
def file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages given back go to their chunks' lists at once, so that the order of chunks shows."""
    monkeypatch.setattr(module, "READY", 0)


def cached(allocator: PageAllocator, num_pages: int) -> list[int]:
    """`num_pages` pages that are cached; the first to be evicted comes first."""
    pages = allocator.allocate(num_pages)
    for page in pages:
        allocator.publish(page)
    allocator.release(pages)
    return pages


# Allocate


@pytest.mark.parametrize("chunk_pages", [1, 3, 4, 64])
@pytest.mark.parametrize("num_pages", [1, 2, 7, 63, 64, 65, 513])
def test_each_page_is_handed_out_once_and_page_0_never(num_pages: int, chunk_pages: int) -> None:
    allocator = PageAllocator(num_pages, chunk_pages)
    pages = [page for _ in range(num_pages) for page in allocator.allocate(1)]
    assert pages == list(range(1, num_pages + 1))
    allocator.check_invariants([pages])
    with pytest.raises(OutOfPages):
        allocator.allocate(1)


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1, 0, 6, 1]])
def test_pages_come_in_ascending_order(sizes: list[int]) -> None:
    allocator = PageAllocator(8, 3)
    assert [page for size in sizes for page in allocator.allocate(size)] == list(range(1, 9))


def test_pages_given_back_tail_first_are_handed_out_in_the_same_order_again() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(5)
    allocator.release(pages[::-1])
    assert allocator.allocate(5) == pages


def test_too_large_a_request_takes_nothing() -> None:
    allocator = PageAllocator(8, 3)
    allocator.allocate(2)
    cached(allocator, 1)
    error = unchanged_by(allocator, OutOfPages, lambda: allocator.allocate(7))
    assert (error.needed, error.available) == (7, 6)
    assert len(allocator.allocate(6)) == 6


@pytest.mark.parametrize("call", ["allocate", "plan", "evict"])
def test_a_negative_number_is_refused(call: str) -> None:
    allocator = PageAllocator(8)
    allocator.release(allocator.allocate(3))
    error = unchanged_by(allocator, PageError, lambda: getattr(allocator, call)(-1))
    assert "num_pages: expected at least 0, got -1" in str(error)


def test_zero_pages_are_no_pages() -> None:
    allocator = PageAllocator(1)
    page = allocator.allocate(1)
    assert allocator.allocate(0) == []
    allocator.release([])
    allocator.share([])
    allocator.evict(0)
    allocator.check_invariants([page])


@pytest.mark.parametrize(("num_pages", "chunk_pages"), [(0, 4), (-1, 4), (8, 0), (8, -1)])
def test_impossible_sizes_are_refused(num_pages: int, chunk_pages: int) -> None:
    with pytest.raises(GeometryError, match="at least 1"):
        PageAllocator(num_pages, chunk_pages)


# Share and release


def test_a_page_falls_free_with_its_last_holder() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    allocator.share(pages[:2])
    allocator.share(pages[:1])
    assert [allocator.count(page) for page in pages] == [3, 2, 1]
    allocator.release(pages)
    assert [allocator.count(page) for page in pages] == [2, 1, 0]
    assert allocator.num_used == 2
    allocator.release([pages[0], pages[1], pages[0]])
    assert allocator.num_used == 0
    allocator.check_invariants([])


def test_a_double_free_is_refused() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    allocator.release(pages)
    error = unchanged_by(allocator, PageError, lambda: allocator.release(pages))
    assert f"page {pages[0]}: expected at least 1 holders to release, got 0" in str(error)


@pytest.mark.parametrize("positions", [[0, 0], [0, 1, 2, 0], [2, 1, 1], [1, 2, 2]])
def test_a_double_free_within_one_call_is_refused(positions: list[int]) -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    unchanged_by(
        allocator, PageError, lambda: allocator.release([pages[index] for index in positions])
    )
    allocator.release(pages)
    allocator.check_invariants([])


def test_more_releases_than_holders_in_one_call_are_refused() -> None:
    allocator = PageAllocator(8)
    alone, shared = allocator.allocate(2)
    allocator.share([shared])
    unchanged_by(allocator, PageError, lambda: allocator.release([alone, shared, shared, shared]))
    allocator.release([shared, alone, shared])
    allocator.check_invariants([])


@pytest.mark.parametrize("page", UNKNOWN)
def test_unknown_ids_are_refused(page: int) -> None:
    allocator = PageAllocator(8, 4)
    held = allocator.allocate(8)
    for pages in ([page], [held[0], page], [page, held[0]], [held[0], held[1], page, held[2]]):
        for call in (allocator.release, allocator.share):
            error = unchanged_by(allocator, PageError, lambda c=call, p=pages: c(p))
            assert f"page {page}: " in str(error)
    for ask in (allocator.count, allocator.publish, allocator.unpublish):
        unchanged_by(allocator, PageError, lambda c=ask: c(page))
    assert not allocator.is_cached(page)
    assert not allocator.is_published(page)


def test_ids_of_chunks_that_were_never_opened_are_free_ones() -> None:
    allocator = PageAllocator(64, 4)
    assert allocator.count(50) == 0
    for call in (allocator.release, allocator.share):
        unchanged_by(allocator, PageError, lambda c=call: c([50]))


@pytest.mark.parametrize("wrong", [1.5, "1", None])
def test_what_is_no_page_id_changes_nothing(wrong: Any) -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(2)
    unchanged_by(allocator, (TypeError, PageError), lambda: allocator.release([*pages, wrong]))


def test_a_free_page_cannot_be_shared() -> None:
    allocator = PageAllocator(8)
    held, gone = allocator.allocate(2)
    allocator.release([gone])
    error = unchanged_by(allocator, PageError, lambda: allocator.share([held, gone]))
    assert f"page {gone}: expected a used or cached page to share" in str(error)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_any_sequence_of_ids_will_do(kind: Callable[[list[int]], Sequence[int]]) -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    allocator.share(kind(pages))
    allocator.release(kind(pages))
    with pytest.raises(PageError):
        allocator.release(kind([pages[0], pages[0]]))
    allocator.release(range(1, 4))
    allocator.check_invariants([])


# Chunks


def test_chunks_tile_the_pool_and_grow() -> None:
    allocator = PageAllocator(10_000, 4)
    chunks = [allocator.chunk_pages(chunk) for chunk in range(allocator.num_chunks)]
    assert [page for chunk in chunks for page in chunk] == list(range(10_001))
    for chunk in chunks[:-1]:
        assert len(chunk) == max(4, chunk.start // 32 // 4 * 4)
    for chunk in (-1, allocator.num_chunks):
        with pytest.raises(PageError, match="chunk"):
            allocator.chunk_pages(chunk)


def test_chunks_do_not_depend_on_the_pool_s_size() -> None:
    small, large = PageAllocator(500, 4), PageAllocator(100_000, 4)
    for chunk in range(small.num_chunks - 1):
        assert small.chunk_pages(chunk) == large.chunk_pages(chunk)


def test_chunks_open_only_when_the_open_ones_are_full() -> None:
    allocator = PageAllocator(15, 4)  # 1-3, 4-7, 8-11, 12-15
    opened = []
    for _ in range(15):
        allocator.allocate(1)
        opened.append(allocator.num_opened)
    assert opened == [1] * 3 + [2] * 4 + [3] * 4 + [4] * 4


@pytest.mark.usefixtures("file_at_once")
def test_pages_come_from_partly_used_chunks_so_that_whole_chunks_fall_free() -> None:
    allocator = PageAllocator(19, 4)
    allocator.allocate(19)
    allocator.release([17, 16, 4, 5, 6, 7, 10])
    # 4-7 are wholly free, 8-11 and 16-19 partly.
    assert allocator.empty_chunks() == [1]
    assert sorted(allocator.allocate(3)) == [10, 16, 17]
    assert allocator.empty_chunks() == [1]
    assert allocator.allocate(2) == [4, 5]
    assert allocator.empty_chunks() == []


@pytest.mark.usefixtures("file_at_once")
def test_the_lowest_chunk_serves_first() -> None:
    allocator = PageAllocator(19, 4)
    pages = allocator.allocate(19)
    allocator.release([18, 9, 14, 5])
    assert [allocator.allocate(1)[0] for _ in range(4)] == [5, 9, 14, 18]
    allocator.release(pages)
    assert allocator.empty_chunks() == [1, 2, 3, 4]
    assert allocator.allocate(19) == pages


def test_many_pages_given_back_are_filed_by_chunk() -> None:
    allocator = PageAllocator(4000, 4)
    pages = allocator.allocate(4000)
    keep = pages[0::400]
    allocator.release([page for page in pages if page not in keep])
    assert len(allocator._ready) <= 2 * module.READY
    # 3990 free pages in some 160 chunks: the lowest partly used ones serve again.
    empty = allocator.empty_chunks()
    assert len(empty) == allocator.num_chunks - len(keep)
    allocator.allocate(sum(len(chunk) for chunk in _chunks_of(allocator, keep)) - len(keep) - 1)
    assert allocator.empty_chunks() == empty


def _chunks_of(allocator: PageAllocator, pages: list[int]) -> list[range]:
    chunks = [allocator.chunk_pages(chunk) for chunk in range(allocator.num_chunks)]
    return [chunk for chunk in chunks if any(page in chunk for page in pages)]


def test_a_wholly_free_chunk_shows_at_once() -> None:
    allocator = PageAllocator(11, 4)
    allocator.allocate(11)
    allocator.release([4, 5, 6])
    assert allocator.empty_chunks() == []
    allocator.release([7])
    assert allocator.empty_chunks() == [1]
    allocator.release([1, 2, 3])
    assert allocator.empty_chunks() == [1]  # page 0 lies in chunk 0: never wholly free


def test_a_cached_page_holds_its_chunk() -> None:
    allocator = PageAllocator(11, 4)
    allocator.allocate(11)
    allocator.publish(6)
    allocator.release([4, 5, 6, 7])
    assert allocator.empty_chunks() == []
    unchanged_by(allocator, PageError, lambda: allocator.close_chunk(1))
    allocator.evict(1)
    assert allocator.empty_chunks() == [1]


@pytest.mark.parametrize("ready", [0, 64])
def test_closed_chunks_are_opened_again_when_needed(
    ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READY", ready)
    allocator = PageAllocator(15, 4)
    pages = allocator.allocate(15)
    allocator.release(pages[3:])
    assert allocator.empty_chunks() == [1, 2, 3]
    allocator.close_chunk(1)
    allocator.close_chunk(3)
    allocator.check_invariants([pages[:3]])
    assert allocator.open_chunks() == [0, 2]
    assert allocator.num_opened == 4
    assert allocator.num_free == 12
    # An open chunk first, then closed ones, the lowest first.
    assert allocator.plan(4) == Supply((), 0)
    assert allocator.plan(5) == Supply((1,), 0)
    assert allocator.plan(9) == Supply((1, 3), 0)
    again = allocator.allocate(5)
    assert allocator.open_chunks() == [0, 1, 2]
    again += allocator.allocate(7)
    assert sorted(again) == pages[3:]
    allocator.check_invariants([pages])


@pytest.mark.parametrize(
    ("chunk", "why"), [(0, "page 0"), (1, "used"), (2, "closed"), (3, "never opened")]
)
def test_only_an_open_wholly_free_chunk_can_be_closed(chunk: int, why: str) -> None:
    allocator = PageAllocator(15, 4)
    pages = allocator.allocate(11)
    allocator.release([page for page in pages if page != 4])
    allocator.close_chunk(2)
    error = unchanged_by(allocator, PageError, lambda: allocator.close_chunk(chunk))
    assert f"chunk {chunk}: expected an open, wholly free chunk" in str(error)
    for unknown in (-1, 4, 10**9):
        unchanged_by(allocator, PageError, lambda c=unknown: allocator.close_chunk(c))


# Plan and prepare


def test_supply_comes_from_free_pages_then_new_chunks_then_cached_pages() -> None:
    allocator = PageAllocator(11, 4)
    kept = cached(allocator, 2)  # of 1-3
    assert allocator.plan(1) == Supply((), 0)
    assert allocator.plan(2) == Supply((1,), 0)
    assert allocator.plan(6) == Supply((1, 2), 0)
    assert allocator.plan(10) == Supply((1, 2), 1)
    with pytest.raises(OutOfPages) as caught:
        allocator.plan(12)
    assert (caught.value.needed, caught.value.available) == (12, 11)
    allocator.allocate(10)
    assert [allocator.is_cached(page) for page in kept] == [False, True]


def test_queries_change_nothing() -> None:
    allocator = PageAllocator(40, 4)
    cached(allocator, 5)
    allocator.release(allocator.allocate(20)[3:])
    allocator.close_chunk(allocator.empty_chunks()[0])
    before = copy.deepcopy(vars(allocator))
    for num_pages in range(38):
        allocator.plan(num_pages)
    allocator.check_share([1, 1, 2])
    allocator.check_invariants()
    allocator.open_chunks()
    allocator.empty_chunks()
    assert allocator.num_free + allocator.num_cached + allocator.num_used == 40
    for page in range(1, 41):
        allocator.count(page)
    assert vars(allocator) == before


def test_a_prepared_plan_is_what_allocate_then_uses() -> None:
    allocator = PageAllocator(11, 4)
    cached(allocator, 2)
    allocator.prepare(Supply((), 2))  # as a pool does whose device has no memory left
    assert allocator.open_chunks() == [0]
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert allocator.open_chunks() == [0]


@pytest.mark.parametrize(
    "supply",
    [
        Supply((2,), 0),  # chunk 1 comes first
        Supply((1, 1), 0),
        Supply((1, 2, 3), 0),  # there is no chunk 3
        Supply((0,), 0),  # open already
        Supply((-1,), 0),
        Supply((1,), 3),  # two pages are cached
        Supply((), -1),
    ],
)
def test_a_plan_that_does_not_hold_is_refused(supply: Supply) -> None:
    allocator = PageAllocator(11, 4)
    cached(allocator, 2)
    unchanged_by(allocator, PageError, lambda: allocator.prepare(supply))


def test_a_plan_overtaken_by_other_calls_is_refused() -> None:
    allocator = PageAllocator(11, 4)
    supply = allocator.plan(6)
    allocator.allocate(4)
    unchanged_by(allocator, PageError, lambda: allocator.prepare(supply))
    supply = allocator.plan(5)
    allocator.release([4])
    allocator.close_chunk(1)
    unchanged_by(allocator, PageError, lambda: allocator.prepare(supply))


# Cached pages


def test_a_published_page_is_kept_when_its_last_holder_goes() -> None:
    allocator = PageAllocator(8)
    page, other = allocator.allocate(2)
    allocator.share([page])
    allocator.publish(page)
    allocator.release([page, other])
    assert not allocator.is_cached(page)
    allocator.release([page])
    assert allocator.is_cached(page)
    assert (allocator.num_free, allocator.num_cached, allocator.num_used) == (7, 1, 0)
    allocator.check_invariants([])


def test_a_cached_page_comes_back_to_life_when_shared() -> None:
    allocator = PageAllocator(8)
    first, second = cached(allocator, 2)
    allocator.share([first, first])
    assert allocator.count(first) == 2
    assert not allocator.is_cached(first)
    allocator.check_invariants([[first], [first]])
    # It stays published, and is the most recently used one when it is let go again.
    allocator.release([first, first])
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.evict(2)
    assert evicted == [second, first]


def test_tails_are_evicted_before_heads_and_older_sequences_before_newer() -> None:
    allocator = PageAllocator(8)
    old, new = allocator.allocate(3), allocator.allocate(3)
    for page in [*new, *old]:
        allocator.publish(page)
    allocator.release(old[::-1])
    allocator.release(new[::-1])
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    for _ in range(6):
        allocator.evict(1)
    assert evicted == [*old[::-1], *new[::-1]]


def test_the_order_holds_for_shared_pages_too() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(4)
    for page in pages:
        allocator.publish(page)
    allocator.share(pages[:2])
    allocator.release(pages[:2])
    allocator.share(pages[:2])
    allocator.release(pages[::-1])
    allocator.release(pages[1::-1])
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.evict(4)
    assert evicted == pages[::-1]


def test_allocate_evicts_only_what_it_lacks() -> None:
    allocator = PageAllocator(8)
    kept = cached(allocator, 4)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    pages = allocator.allocate(6)
    assert evicted == kept[:2]
    assert set(pages).isdisjoint(kept[2:])
    allocator.check_invariants([pages])


def test_more_evictions_than_cached_pages_are_refused() -> None:
    allocator = PageAllocator(8)
    cached(allocator, 2)
    error = unchanged_by(allocator, OutOfPages, lambda: allocator.evict(3))
    assert (error.needed, error.available) == (3, 2)


def test_a_page_is_forgotten_before_it_can_be_handed_out() -> None:
    allocator = PageAllocator(2)
    cached(allocator, 2)
    heard = []
    allocator.on_evict = lambda page: heard.append((page, allocator.is_cached(page)))
    allocator.allocate(2)
    assert heard == [(1, True), (2, True)]


def test_a_page_that_could_not_be_forgotten_is_not_handed_out() -> None:
    allocator = PageAllocator(3)
    cached(allocator, 2)

    def fail(page: int) -> None:
        raise RuntimeError(page)

    allocator.on_evict = fail
    for call in (lambda: allocator.evict(1), lambda: allocator.allocate(2)):
        unchanged_by(allocator, RuntimeError, call)
    allocator.check_invariants([])


def test_a_page_no_longer_published_falls_free() -> None:
    allocator = PageAllocator(8)
    forgotten: list[int] = []
    allocator.on_evict = forgotten.append
    used, kept = allocator.allocate(2)
    allocator.publish(used)
    allocator.publish(kept)
    allocator.release([kept])
    for page in (used, kept, used, kept):
        allocator.unpublish(page)
    assert forgotten == [used, kept]  # whoever ends it, the index hears of it, once
    assert allocator.num_cached == 0
    allocator.release([used])
    assert allocator.num_free == 8


def test_only_a_used_page_can_be_published() -> None:
    allocator = PageAllocator(8)
    (kept,) = cached(allocator, 1)
    (gone,) = allocator.allocate(1)
    allocator.release([gone])
    for page in (gone, kept):
        error = unchanged_by(allocator, PageError, lambda p=page: allocator.publish(p))
        assert f"page {page}: expected a used page" in str(error)


# O(1) a page: counted in bytecode operations, not in seconds


def operations(call: Callable[[], Any]) -> int:
    """Python bytecode operations that `call` takes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def worn(num_pages: int, chunk_pages: int) -> PageAllocator:
    """A pool with half its pages in use, in disorder."""
    allocator = PageAllocator(num_pages, chunk_pages)
    pages = allocator.allocate(num_pages)
    allocator.release([page for page in pages if page * 7919 % 13 < 6])
    return allocator


def cycles(allocator: PageAllocator, num_pages: int) -> None:
    for _ in range(30):
        allocator.release(allocator.allocate(num_pages))


@pytest.mark.parametrize("chunk_pages", [1, 4, 64])
@pytest.mark.parametrize("num_pages", [1, 8])
def test_a_page_costs_the_same_in_any_pool(num_pages: int, chunk_pages: int) -> None:
    small, large = worn(512, chunk_pages), worn(20_000, chunk_pages)
    fresh = PageAllocator(10**6, chunk_pages)
    fresh.release(fresh.allocate(100))
    counts = [operations(lambda a=a: cycles(a, num_pages)) for a in (small, large, fresh)]
    assert max(counts) <= 1.2 * min(counts)


@pytest.mark.parametrize("chunk_pages", [1, 4, 64])
def test_filling_and_emptying_is_linear(chunk_pages: int) -> None:
    def ebb_and_flow(num_pages: int) -> None:
        allocator = PageAllocator(num_pages, chunk_pages)
        held = [allocator.allocate(4) for _ in range(num_pages // 4)]
        for pages in held:
            allocator.release(pages)

    small, large = (operations(lambda n=n: ebb_and_flow(n)) / n for n in (400, 4000))
    assert large <= 1.2 * small


def test_evicting_costs_the_same_from_many_cached_pages() -> None:
    def evictions(num_cached: int) -> int:
        allocator = PageAllocator(num_cached)
        cached(allocator, num_cached)
        return operations(lambda: [allocator.evict(4) for _ in range(100)])

    assert evictions(20_000) <= 1.2 * evictions(500)


# check_invariants

FAULTS: dict[str, Callable[[PageAllocator], Any]] = {
    "a count without a holder": lambda a: a._counts.__setitem__(2, 1),
    "a holder too many": lambda a: a._counts.__setitem__(1, 2),
    "a negative count": lambda a: a._counts.__setitem__(2, -1),
    "a free page twice": lambda a: a._ready.append(a._ready[0]),
    "a used page free": lambda a: a._ready.append(1),
    "page 0 free": lambda a: a._ready.append(0),
    "a page lost": lambda a: a._ready.pop(),
    "a listed page lost": lambda a: a._free[1].pop(),
    "a page on a wrong list": lambda a: a._free[1].append(a._free[2].pop()),
    "a cached page free": lambda a: a._ready.append(4),
    "a cached page that nobody published": lambda a: a._published.clear(),
    "a free page published": lambda a: a._published.add(2),
    "a used page cached": lambda a: (a._cached.update({1: None}), a._published.add(1)),
    "an unopened page free": lambda a: a._ready.append(300),
    "a chunk that nobody finds": lambda a: setattr(a, "_partial", 0),
    "an empty chunk that nobody finds": lambda a: setattr(a, "_empty", 0),
    "a closed chunk that lists pages": lambda a: a._closed.add(2),
    "a wrong number of listed pages": lambda a: setattr(a, "_num_listed", 3),
    "a wrong number of unopened pages": lambda a: setattr(a, "_num_unopened", 3),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_the_self_check_sees_every_contradiction(fault: Callable[[PageAllocator], Any]) -> None:
    allocator = PageAllocator(400, 100)  # 1-99, 100-199, ...
    pages = allocator.allocate(250)
    allocator.publish(4)
    allocator.release(pages[1:])
    allocator.release(allocator.allocate(20))
    assert allocator._ready
    allocator.check_invariants([[1]])
    fault(allocator)
    with pytest.raises(AssertionError):
        allocator.check_invariants([[1]])


def test_the_self_check_recounts_from_the_holders() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    allocator.check_invariants()
    allocator.check_invariants([pages, pages[:1]])
    for holders in ([], [pages], [pages, pages], [pages, pages[1:]], [pages, [pages[0], 5]]):
        with pytest.raises(AssertionError, match="live holders"):
            allocator.check_invariants(holders)
