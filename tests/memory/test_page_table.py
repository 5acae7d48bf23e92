"""PageTable: positions and pages, forks and copies, windows and padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pageforge.errors import CropError, GeometryError, OutOfPages, PageError, UseAfterFree
from pageforge.memory.allocator import PageAllocator
from pageforge.memory.page_table import PageCopy, PageTable, append_all, pages_needed

P = 8


def table_over(*num_pages: int, **options: Any) -> PageTable:
    """A table over one allocator for each number of pages, in small chunks."""
    return PageTable([PageAllocator(n, 4) for n in num_pages or (64,)], P, **options)


def allocator_of(table: PageTable, group: int = 0) -> PageAllocator:
    return table._allocators[group]


def snapshot(table: PageTable) -> Any:
    """All that there is to know about a table and its allocators."""
    state = {name: getattr(table, name) for name in PageTable.__slots__ if name != "_allocators"}
    return copy.deepcopy((state, [vars(allocator) for allocator in table._allocators]))


def unchanged_by(table: PageTable, error: type[Exception], call: Callable[[], Any]) -> Any:
    """`call` raises `error`, and neither the table nor an allocator has changed."""
    before = snapshot(table)
    with pytest.raises(error) as caught:
        call()
    assert snapshot(table) == before
    return caught.value


def check(*tables: PageTable) -> None:
    """The allocators agree with all live tables over them."""
    for group, allocator in enumerate(tables[0]._allocators):
        allocator.check_invariants([table.pages(group) for table in tables])


def present(table: PageTable, group: int = 0) -> list[int]:
    """The positions that have a page."""
    return [i for i in range(table.length) if table.slot(i, group) >= 0]


# Lengths

BOUNDARIES = [k * P + d for k in (1, 2, 5) for d in (-1, 0, 1)]


def prefill(table: PageTable, length: int) -> None:
    table.append(length)


def decode(table: PageTable, length: int) -> None:
    for _ in range(length):
        table.append(1)


def chunks(table: PageTable, length: int) -> None:
    for start in range(0, length, 5):
        table.append(min(5, length - start))


def crop_back(table: PageTable, length: int) -> None:
    table.append(length + 19)
    table.crop(length)


@pytest.mark.parametrize("reach", [prefill, decode, chunks, crop_back])
@pytest.mark.parametrize("length", [0, 1, *BOUNDARIES])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 128])
def test_pages_follow_the_length(
    reach: Callable[[PageTable, int], None], length: int, size: int
) -> None:
    table = PageTable([PageAllocator(64, 4)], size)
    reach(table, length)
    assert table.length == length
    assert table.num_pages == -(-length // size)
    assert len(set(table.slots(0, length))) == length
    check(table)


def test_a_page_is_claimed_only_when_a_token_crosses_a_boundary() -> None:
    table = table_over()
    claims = []
    for _ in range(3 * P + 1):
        needed = table.needed(1)
        before = table.num_pages
        assert table.append(1) == []
        assert needed == [table.num_pages - before]
        claims.append(needed[0])
    assert [index for index, claim in enumerate(claims) if claim] == [0, P, 2 * P, 3 * P]


def test_a_page_cropped_away_falls_free_at_once() -> None:
    table = table_over()
    table.append(3 * P)
    first, second, _ = table.pages()
    table.crop(2 * P)
    assert table.pages() == [first, second]
    table.crop(P + 1)
    assert table.pages() == [first, second]
    table.crop(P)
    assert table.pages() == [first]
    table.crop(0)
    assert allocator_of(table).num_used == 0
    table.append(1)
    check(table)


@pytest.mark.parametrize("length", [-1, P + 1])
def test_crop_only_shortens(length: int) -> None:
    table = table_over()
    table.append(P)
    for call in (table.crop, table.check_crop):
        error = unchanged_by(table, CropError, lambda c=call: c(length))
        assert f"length: expected from 0 to {P}, got {length}" in str(error)


def test_a_negative_append_is_refused() -> None:
    table = table_over()
    table.append(P)
    error = unchanged_by(table, PageError, lambda: table.append(-1))
    assert "use crop to shorten" in str(error)


def test_queries_change_nothing() -> None:
    table = table_over(8, 8, windows=[None, 5])
    table.append(P + 3)
    before = snapshot(table)
    assert table.needed(0) == [0, 0]
    assert table.needed(P) == [1, 1]
    assert table.needed(1000) == [125, 125]
    table.slots(0, table.length)
    table.check_crop(P)
    table.pages().clear()
    assert snapshot(table) == before


@pytest.mark.parametrize("short", [0, 1])
def test_pages_of_all_groups_or_of_none(short: int) -> None:
    sizes = [10, 10]
    sizes[short] = 2
    table = table_over(*sizes)
    table.append(P)
    error = unchanged_by(table, OutOfPages, lambda: table.append(2 * P))
    assert (error.needed, error.available) == (2, 1)
    table.append(P)
    check(table)


def test_an_index_that_raises_loses_no_pages() -> None:
    table = table_over(4, 4)
    for group in (0, 1):
        (page,) = allocator_of(table, group).allocate(1)
        allocator_of(table, group).publish(page)
        allocator_of(table, group).release([page])

    def fail(page: int) -> None:
        raise RuntimeError(page)

    allocator_of(table, 1).on_evict = fail
    with pytest.raises(RuntimeError):
        table.append(4 * P)
    assert (table.length, table.num_pages) == (0, 0)
    check(table)


@pytest.mark.parametrize(
    "options",
    [
        {"windows": [4]},
        {"windows": [4, 0]},
        {"windows": [-1, None]},
        {"rollback": -1},
        {"start": -1},
        {"page_size": 0},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        PageTable([PageAllocator(8), PageAllocator(8)], **{"page_size": P, **options})


# Slots


@pytest.mark.parametrize(
    "options", [{}, {"start": 3}, {"start": 21}, {"windows": [9]}, {"windows": [9], "start": 19}]
)
def test_slots_are_page_times_size_plus_offset(options: dict[str, Any]) -> None:
    table = table_over(**options)
    for _ in range(5):
        table.append(9)
        table.slide()
    pages, first = table.pages(), table.first_page()
    expected = [
        pages[i // P - first] * P + i % P if i // P >= first else -1 for i in range(table.length)
    ]
    assert table.length == 45
    assert min(pages) > 0
    for start in range(46):
        assert [table.slot(i) for i in range(start, 45)] == expected[start:]
        for stop in range(start, 46):
            slots = table.slots(start, stop)
            assert slots.dtype == np.int64
            assert slots.tolist() == expected[start:stop]
    entries = [0] * first + pages
    for low in range(len(entries) + 1):
        for high in range(low, len(entries) + 1):
            assert table.entries(low, high) == entries[low:high]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 10), (5, 4), (9, 10), (10**9, 10**9)])
def test_slots_beyond_the_sequence_are_refused(start: int, stop: int) -> None:
    table = table_over()
    table.append(9)
    with pytest.raises(PageError, match="positions: expected within 0 to 9"):
        table.slots(start, stop)


# Fork and copy-on-write


def test_a_fork_shares_every_page() -> None:
    table = table_over(8, 8, windows=[None, 9])
    table.append(2 * P + 1)
    table.slide()
    child = table.fork()
    assert child.length == table.length
    for group in (0, 1):
        assert child.pages(group) == table.pages(group)
        assert child.first_page(group) == table.first_page(group)
    assert allocator_of(table).num_used == 3
    check(table, child)
    table.release()
    check(child)
    child.release()
    assert allocator_of(table).num_used == 0


@pytest.mark.parametrize("writer", [0, 1])
def test_the_first_to_write_to_a_shared_page_copies_it(writer: int) -> None:
    table = table_over()
    table.append(P + 3)
    both = [table, table.fork()]
    shared = table.pages()
    first, second = both[writer], both[1 - writer]
    assert first.needed(1) == [1]
    (copied,) = first.append(1)
    assert copied == PageCopy(0, shared[1], first.pages()[1])
    assert first.pages()[0] == shared[0]
    assert second.pages() == shared
    # Now each has a last page of its own.
    assert second.needed(1) == [0]
    assert second.append(1) == first.append(1) == []
    assert second.pages() == shared
    check(*both)


def test_a_long_append_copies_and_grows() -> None:
    table = table_over()
    table.append(3)
    child = table.fork()
    assert child.needed(2 * P) == [3]
    (copied,) = child.append(2 * P)
    assert (copied.source, copied.target) == (table.pages()[0], child.pages()[0])
    assert len(set(child.pages())) == 3
    check(table, child)


def test_a_full_last_page_needs_no_copy() -> None:
    table = table_over()
    table.append(P)
    child = table.fork()
    assert table.append(1) == child.append(1) == []
    assert table.pages()[0] == child.pages()[0]
    assert table.pages()[1] != child.pages()[1]
    check(table, child)


def test_nothing_written_needs_no_copy() -> None:
    table = table_over()
    table.append(3)
    child = table.fork()
    assert child.needed(0) == pages_needed([table, child], 0) == [0]
    assert child.append(0) == []
    assert child.pages() == table.pages()


def test_a_page_shared_by_a_crop_back_is_copied() -> None:
    table = table_over()
    table.append(2 * P)
    child = table.fork()
    child.crop(3)
    shared = table.pages()
    (copied,) = child.append(1)
    assert copied.source == shared[0]
    assert table.pages() == shared
    check(table, child)


def test_of_all_holders_in_a_batch_the_last_one_writes_in_place() -> None:
    table = table_over()
    table.append(P + 3)
    batch = [table, table.fork(), table.fork()]
    shared = table.pages()
    assert pages_needed(batch, 1) == [2]
    free = allocator_of(table).num_free
    copies = [table.append(1) for table in batch]
    assert free - allocator_of(table).num_free == 2
    assert [len(made) for made in copies] == [1, 1, 0]
    assert batch[2].pages() == shared
    assert {made[0].source for made in copies[:2]} == {shared[1]}
    assert len({table.pages()[1] for table in batch}) == 3
    check(*batch)


def test_of_some_holders_in_a_batch_each_copies() -> None:
    table = table_over()
    table.append(3)
    one, two = table.fork(), table.fork()
    assert pages_needed([one, two], 1) == [2]
    assert len(one.append(1)) == len(two.append(1)) == 1
    assert table.append(1) == []
    check(table, one, two)


def test_a_batch_counts_growth_and_copies_in_every_group() -> None:
    table = table_over(16, 16, windows=[None, 2])
    table.append(P - 1)
    child = table.fork()
    other = PageTable(table._allocators, P, windows=[None, 2])
    assert pages_needed([], 1) == []
    assert pages_needed([table, child, other], 2) == [1 + 2 + 1, 1 + 2 + 1]
    check(table, child)


def test_a_published_page_is_never_written() -> None:
    table = table_over()
    table.append(2 * P)
    first, second = table.pages()
    for page in (first, second):
        allocator_of(table).publish(page)
    table.crop(P + 3)
    assert pages_needed([table], 1) == table.needed(1) == [1]
    (copied,) = table.append(1)
    assert copied.source == second
    assert table.pages() == [first, copied.target]
    assert allocator_of(table).is_cached(second)
    check(table)


def test_no_holder_of_a_published_page_writes_in_place() -> None:
    table = table_over()
    table.append(P)
    (page,) = table.pages()
    allocator_of(table).publish(page)
    table.crop(3)
    batch = [table, table.fork()]
    assert pages_needed(batch, 1) == [2]
    assert [len(table.append(1)) for table in batch] == [1, 1]
    assert allocator_of(table).is_cached(page)
    check(*batch)


def test_a_copy_without_a_free_page_changes_nothing() -> None:
    table = table_over(1)
    table.append(3)
    child = table.fork()
    error = unchanged_by(child, OutOfPages, lambda: child.append(1))
    assert (error.needed, error.available) == (1, 0)
    table.release()
    assert child.append(1) == []


def test_copies_are_made_before_any_table_names_them() -> None:
    table = table_over(16, 16)
    table.append(P + 3)
    batch = [table, table.fork(), table.fork()]
    needed = pages_needed(batch, P)
    states = [[(each.length, each.pages(g)) for each in batch] for g in (0, 1)]
    seen: list[PageCopy] = []

    def fail(copies: list[PageCopy]) -> None:
        assert states == [[(each.length, each.pages(g)) for each in batch] for g in (0, 1)]
        assert all(allocator_of(table, copy.group).count(copy.target) == 1 for copy in copies)
        seen.extend(copies)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        append_all(batch, P, needed, fail)
    assert [(copy.group, copy.source) for copy in seen] == [
        (group, table.pages(group)[1]) for group in (0, 0, 1, 1)
    ]
    assert states == [[(each.length, each.pages(g)) for each in batch] for g in (0, 1)]
    check(*batch)
    assert len(append_all(batch, P, needed)) == 4
    assert [each.length for each in batch] == [2 * P + 3] * 3
    check(*batch)


# Windows


@pytest.mark.parametrize("rollback", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 2, P - 1, P, P + 1, 2 * P, 2 * P + 1])
@pytest.mark.parametrize("step", [1, 3, P])
def test_slide_keeps_what_the_next_token_sees_and_no_page_more(
    window: int, rollback: int, step: int
) -> None:
    table = table_over(windows=[window], rollback=rollback)
    for _ in range(5 * P // step):
        table.append(step)
        table.slide()
        oldest = max(0, table.length - rollback - window + 1)
        assert table.first_page() == oldest // P
        assert present(table) == list(range(oldest // P * P, table.length))
        check(table)


def test_slide_names_the_logical_pages_that_left() -> None:
    table = table_over(64, 64, 64, windows=[4, None, P + 4])
    assert table.slide() is None
    table.append(P)
    assert table.slide() is None
    table.append(3 * P)
    assert table.slide() == range(3)  # group 0 lets 0-2 go, group 2 pages 0-1
    assert table.slide() is None
    table.append(P)
    assert table.slide() == range(2, 4)
    assert [table.first_page(group) for group in range(3)] == [4, 0, 3]
    check(table)


def test_a_long_prompt_slides_once() -> None:
    table = table_over(windows=[4])
    table.append(5 * P)
    assert table.num_pages == 5
    table.slide()
    assert table.num_pages == 1
    assert allocator_of(table).num_used == 1


@pytest.mark.parametrize("rollback", [0, 3, P, 2 * P + 1])
def test_roll_back_within_the_margin_and_not_beyond_what_is_there(rollback: int) -> None:
    window, length = 5, 6 * P + 2
    table = table_over(64, 64, windows=[None, window], rollback=rollback)
    table.append(length)
    table.slide()
    gone = table.first_page(1) * P
    for shorter in range(length - rollback, length + 1):
        table.fork().crop(shorter)
    for shorter in range(1, length):
        lacking = max(0, shorter - window + 1) < gone
        child = table.fork()
        if lacking:
            for call in (child.crop, child.check_crop):
                error = unchanged_by(child, CropError, lambda c=call, s=shorter: c(s))
                assert f"those before {gone} are gone" in str(error)
        else:
            child.check_crop(shorter)
            child.crop(shorter)
            assert set(range(max(0, shorter - window + 1), shorter)) <= set(present(child, 1))
        child.release()


def test_back_to_the_start_is_always_possible() -> None:
    table = table_over(windows=[4])
    table.append(5 * P)
    table.slide()
    table.crop(0)
    assert (table.first_page(), table.num_pages) == (0, 0)
    table.append(3)
    assert present(table) == [0, 1, 2]
    check(table)


def test_a_fork_slides_on_its_own() -> None:
    table = table_over(windows=[4])
    table.append(3 * P)
    child = table.fork()
    held = table.pages()
    child.append(1)
    child.slide()
    assert table.pages() == held
    table.crop(P)
    assert child.first_page() == 2
    table.append(P)
    check(table, child)
    assert present(table) == list(range(2 * P))


# Left padding


@pytest.mark.parametrize("start", [0, 1, P - 1, P, P + 1, 3 * P])
def test_pages_of_nothing_but_padding_are_never_claimed(start: int) -> None:
    table = table_over(start=start)
    table.append(start + 2)
    assert table.first_page() == start // P
    assert table.num_pages == -(-(start + 2) // P) - start // P
    assert present(table) == list(range(start // P * P, start + 2))
    check(table)


def test_padding_in_pieces_claims_nothing_either() -> None:
    table = table_over(start=2 * P)
    for _ in range(4):
        assert table.append(P // 2) == []
    assert (table.length, table.num_pages) == (2 * P, 0)
    assert table.slots(0, 2 * P).tolist() == [-1] * 2 * P
    table.append(1)
    assert present(table) == [2 * P]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("length", [0, 3, P, P + 2, 2 * P, 2 * P + 3, 2 * P + 4])
def test_crop_into_the_padding_and_on_again(length: int, window: int | None) -> None:
    start = 2 * P + 3
    table = table_over(start=start, windows=[window])
    table.append(6 * P)
    table.slide()
    if window is not None and length > start:
        unchanged_by(table, CropError, lambda: table.crop(length))
        return
    table.crop(length)
    check(table)
    assert len(table.entries(0, 4)) == 4
    assert table.slots(0, length).tolist() == [table.slot(i) for i in range(length)]
    table.append(3 * P - length)
    assert present(table) == list(range(2 * P, 3 * P))
    check(table)


def test_a_window_never_reaches_into_the_padding() -> None:
    table = table_over(start=3 * P, windows=[2 * P])
    table.append(3 * P + 1)
    assert table.slide() is None
    table.crop(3 * P + 1)
    table.append(P)
    assert table.slide() is None
    table.crop(3 * P + 1)
    assert present(table) == [3 * P]


# Adopt


def shared_prefix(table: PageTable, num_pages: int) -> list[list[int]]:
    """Cached pages for a prefix in every group."""
    pages = [allocator.allocate(num_pages) for allocator in table._allocators]
    for allocator, ids in zip(table._allocators, pages, strict=True):
        for page in ids:
            allocator.publish(page)
        allocator.release(ids[::-1])
    return pages


def test_adopted_pages_are_the_head_of_the_table() -> None:
    table = table_over(8, 8)
    prefix = shared_prefix(table, 2)
    table.adopt(prefix, 2 * P)
    assert table.length == 2 * P
    assert [table.pages(0), table.pages(1)] == prefix
    assert table.append(1) == []
    assert table.pages()[:2] == prefix[0]
    check(table)


def test_a_partly_filled_last_page_is_copied_before_it_is_written() -> None:
    table = table_over()
    owner = PageTable(table._allocators, P)
    owner.append(P + 3)
    table.adopt([owner.pages()], P + 3)
    (copied,) = table.append(1)
    assert copied.source == owner.pages()[1]
    check(table, owner)


@pytest.mark.parametrize("window", [1, 2, P, P + 1, P + 2])
def test_a_window_needs_only_the_last_pages(window: int) -> None:
    num_tokens = 4 * P
    oldest = num_tokens - window + 1
    least = 4 - oldest // P
    for held in range(5):
        table = table_over(8, 8, windows=[None, window])
        prefix = shared_prefix(table, 4)
        pages = [prefix[0], prefix[1][4 - held :]]
        if held < least:
            error = unchanged_by(table, PageError, lambda t=table, p=pages: t.adopt(p, num_tokens))
            assert f"expected {least} to 4 pages" in str(error)
        else:
            table.adopt(pages, num_tokens)
            assert table.first_page(1) == 4 - held
            assert set(range(oldest, num_tokens)) <= set(present(table, 1))
            table.append(1)
            check(table)


def test_padding_needs_no_pages_when_adopted() -> None:
    table = table_over(start=P + 1)
    prefix = shared_prefix(table, 2)
    table.adopt(prefix, 3 * P)
    assert present(table) == list(range(P, 3 * P))
    check(table)
    short = PageTable(table._allocators, P, start=P - 1)
    unchanged_by(short, PageError, lambda: short.adopt(prefix, 3 * P))


@pytest.mark.parametrize("window", [None, 4])
def test_pages_of_padding_alone_are_not_adopted(window: int | None) -> None:
    """Cropped into the padding, the table would take them for those that follow it."""
    owner = table_over(windows=[window])
    owner.append(3 * P)
    table = PageTable(owner._allocators, P, start=P + 3, windows=[window])
    table.adopt([owner.pages()], 3 * P)
    assert (table.first_page(), table.pages()) == (1, owner.pages()[1:])
    check(owner, table)
    table.crop(P - 1)
    assert table.num_pages == 0
    table.append(P)
    assert set(table.pages()).isdisjoint(owner.pages())  # the shared page is not written to
    check(owner, table)


@pytest.mark.parametrize("num_tokens", [0, P - 1, P + 1, 2 * P])
@pytest.mark.parametrize("window", [None, 4])
def test_a_table_of_padding_is_adopted_with_the_pages_that_it_has(
    num_tokens: int, window: int | None
) -> None:
    options = {"start": 2 * P + 3, "windows": [window]}
    owner = table_over(**options)
    owner.append(num_tokens)
    table = PageTable(owner._allocators, P, **options)
    table.adopt([owner.pages()], num_tokens)
    table.append(3 * P - num_tokens)
    assert present(table) == list(range(2 * P, 3 * P))
    check(owner, table)


def test_a_wrong_adoption_changes_nothing() -> None:
    table = table_over(8, 8, windows=[None, 4])
    one, two = shared_prefix(table, 2)
    wrong: list[tuple[list[list[int]], int]] = [
        ([one, two], P),  # more pages than tokens
        ([one, two], 3 * P),  # fewer
        ([one[1:], two], 2 * P),  # a group without a window lacks its head
        ([one], 2 * P),
        ([one, two, two], 2 * P),
        ([one, [two[0], 8]], 2 * P),  # a free page, in the second group
        ([one, [two[0], 99]], 2 * P),
        ([[], []], -P),
    ]
    for pages, num_tokens in wrong:
        unchanged_by(table, PageError, lambda p=pages, n=num_tokens: table.adopt(p, n))
    table.adopt([one, two], 2 * P)
    error = unchanged_by(table, PageError, lambda: table.adopt([one, two], 2 * P))
    assert "an empty table" in str(error)


# Release


def test_after_release_the_table_cannot_be_used() -> None:
    table = table_over(8, 8)
    table.append(P + 1)
    table.release()
    assert allocator_of(table).num_used == allocator_of(table, 1).num_used == 0
    for call in (
        lambda: table.append(1),
        lambda: table.needed(1),
        lambda: pages_needed([table], 1),
        lambda: table.slot(0),
        lambda: table.slots(0, 1),
        lambda: table.adopt([[], []], 0),
        lambda: table.crop(0),
        lambda: table.check_crop(0),
        table.slide,
        table.fork,
    ):
        unchanged_by(table, UseAfterFree, call)


def test_a_second_release_does_nothing() -> None:
    table = table_over()
    table.append(P + 1)
    table.release()
    other = PageTable(table._allocators, P)
    other.append(P + 1)
    table.release()
    check(other)


@pytest.mark.parametrize("end", ["release", "crop"])
def test_the_tail_is_let_go_first(end: str) -> None:
    table = table_over()
    table.append(4 * P)
    pages = table.pages()
    allocator = allocator_of(table)
    for page in pages:
        allocator.publish(page)
    table.release() if end == "release" else table.crop(0)
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.evict(4)
    assert evicted == pages[::-1]
