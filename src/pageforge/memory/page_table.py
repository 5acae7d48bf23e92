"""PageTable: the pages of one sequence, in every layer group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pageforge.errors import CropError, GeometryError, PageError, UseAfterFree, expected
from pageforge.geometry import first_visible, pages_for
from pageforge.memory.allocator import PageAllocator


class PageCopy(NamedTuple):
    """Copy-on-write: the K/V of page `source` must be copied to `target`.

    A batch makes all its copies before it writes any token: the last holder writes to `source`.
    """

    group: int
    source: int
    target: int


class PageTable:
    """Maps a sequence's positions to pages. Token `i` lies in logical page `i // page_size`.

    Pages are claimed only when a token crosses a page boundary. A fork shares every page; the
    partly filled last page is copied by whoever writes to it first (copy-on-write).

    Two kinds of leading tokens need no page: the `start` first ones (left padding), and in a group
    with a sliding window those that no later token can see. A logical page that holds only such
    tokens is *absent*: its entry is page 0 and its slots are -1.

    The sequence may be rolled back by `rollback` tokens after pages left a window.
    """

    __slots__ = (
        "_allocators",
        "_first",
        "_pages",
        "_released",
        "length",
        "page_size",
        "rollback",
        "start",
        "windows",
    )

    def __init__(
        self,
        allocators: Sequence[PageAllocator],
        page_size: int,
        *,
        windows: Sequence[int | None] | None = None,
        rollback: int = 0,
        start: int = 0,
    ):
        """`allocators`, `windows`: one for each layer group.

        `start`: tokens of left padding, part of `length` like any other, but pages that they would
        fill wholly are never claimed. Raises GeometryError.
        """
        self._allocators = tuple(allocators)
        self.windows = (None,) * len(self._allocators) if windows is None else tuple(windows)
        if len(self.windows) != len(self._allocators):
            raise GeometryError(
                expected(
                    "windows", f"{len(self._allocators)} of them", len(self.windows), "one a group"
                )
            )
        for name, value, least in (
            ("page_size", page_size, 1),
            ("rollback", rollback, 0),
            ("start", start, 0),
            *(("window", window, 1) for window in self.windows if window is not None),
        ):
            if value < least:
                raise GeometryError(expected(name, f"at least {least}", value, "fix the caller"))
        self.page_size = page_size
        self.rollback = rollback
        self.start = start
        self.length = 0
        first = start // page_size
        self._first = [first for _ in self._allocators]  # the first logical page that is present
        self._pages: list[list[int]] = [[] for _ in self._allocators]  # from `_first` on
        self._released = False

    # --- queries ----------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages held, over all groups."""
        return sum(map(len, self._pages))

    def first_page(self, group: int = 0) -> int:
        """The first logical page that is present in `group`."""
        return self._first[group]

    def pages(self, group: int = 0) -> list[int]:
        """A copy of the present pages' ids in `group`, from logical page `first_page(group)` on."""
        return list(self._pages[group])

    def slot(self, position: int, group: int = 0) -> int:
        """`page_id * page_size + offset` of a token, or -1 where its page is absent."""
        return int(self.slots(position, position + 1, group)[0])

    def slots(self, start: int, stop: int, group: int = 0) -> npt.NDArray[np.int64]:
        """The slots of positions `start` to `stop - 1`, `[stop - start]`; -1 where absent."""
        self.check_live()
        if not 0 <= start <= stop <= self.length:
            raise PageError(
                expected(
                    "positions", f"within 0 to {self.length}", f"{start} to {stop}", "append first"
                )
            )
        low = start // self.page_size
        page_ids = np.array(
            self.entries(low, pages_for(stop, self.page_size), group), dtype=np.int64
        )
        positions = np.arange(start, stop)
        page_ids = page_ids[positions // self.page_size - low]
        return np.where(page_ids > 0, page_ids * self.page_size + positions % self.page_size, -1)

    def entries(self, low: int, high: int, group: int = 0) -> list[int]:
        """The page ids of logical pages `low` to `high - 1`; 0 where absent."""
        first, pages = self._first[group], self._pages[group]
        if first <= low and high - first <= len(pages):  # most rows of a batch
            return pages[low - first : high - first]
        absent = max(0, min(first, high) - low)
        present = pages[max(0, low - first) : max(0, high - first)]
        return [0] * absent + present + [0] * (high - low - absent - len(present))

    def needed(self, num_tokens: int) -> list[int]:
        """Fresh pages that `append(num_tokens)` would claim, for each group."""
        self.check_live()
        return pages_needed([self], num_tokens)

    # --- changes ----------------------------------------------------------------------------

    def append(self, num_tokens: int) -> list[PageCopy]:
        """Make room for `num_tokens` more tokens. Returns the page copies to make before writing.

        Raises OutOfPages for the first layer group that falls short, and then nothing has changed.
        """
        needed = self.needed(num_tokens)
        supplies = [a.plan(count) for a, count in zip(self._allocators, needed, strict=True)]
        for allocator, supply in zip(self._allocators, supplies, strict=True):
            allocator.prepare(supply)
        return append_all([self], num_tokens, needed)

    def adopt(self, pages: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Take shared pages (`pages[group]`) as the contents of an empty table.

        Each group brings the pages of its last tokens: all of them, or fewer where the table's
        `start` or the group's window makes the first ones needless. Raises PageError, and then
        nothing has changed.
        """
        self.check_live()
        total = pages_for(num_tokens, self.page_size)
        if self.length or num_tokens < 0 or len(pages) != len(self._pages):
            raise PageError(
                f"adopt: expected an empty table and one list of pages for each of "
                f"{len(self._pages)} groups, got length {self.length}, {num_tokens} tokens and "
                f"{len(pages)} lists; adopt first, append after"
            )
        for window, ids in zip(self.windows, pages, strict=True):
            oldest = max(self.start, first_visible(num_tokens, window))
            least = total - oldest // self.page_size if num_tokens > self.start else 0
            if not least <= len(ids) <= total:
                raise PageError(
                    f"adopt: expected {least} to {total} pages for {num_tokens} tokens, "
                    f"the next of which sees back to token {oldest}, got {len(ids)}; "
                    f"adopt only what every group still holds"
                )
        for allocator, ids in zip(self._allocators, pages, strict=True):
            allocator.check_share(ids)
        for group, (allocator, ids) in enumerate(zip(self._allocators, pages, strict=True)):
            kept = ids[max(0, len(ids) - total + self._first[group]) :]  # none of padding alone
            allocator.share(kept)
            self._pages[group] = list(kept)
            if kept or num_tokens > self.start:
                self._first[group] = total - len(kept)
        self.length = num_tokens

    def fork(self) -> PageTable:
        """A second table over the same tokens: every page is shared."""
        self.check_live()
        child = PageTable(
            self._allocators,
            self.page_size,
            windows=self.windows,
            rollback=self.rollback,
            start=self.start,
        )
        for allocator, pages in zip(self._allocators, self._pages, strict=True):
            allocator.share(pages)
        child._pages = [list(pages) for pages in self._pages]
        child._first = list(self._first)
        child.length = self.length
        return child

    def check_crop(self, length: int) -> None:
        """Raise CropError where `crop(length)` would; otherwise do nothing."""
        self.check_live()
        if not 0 <= length <= self.length:
            raise CropError(
                expected("length", f"from 0 to {self.length}", length, "crop only shortens")
            )
        if length <= self.start:
            return
        for group, window in enumerate(self.windows):
            gone, oldest = self._first[group] * self.page_size, first_visible(length, window)
            if gone > max(self.start, oldest):
                raise CropError(
                    f"crop to {length} tokens: the window of {window} needs tokens from "
                    f"{oldest} on, but those before {gone} are gone; raise "
                    f"the roll-back margin (now {self.rollback} tokens) or keep a fork"
                )

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; pages beyond them are released.

        Raises CropError where the window of the next token reaches pages that are gone.
        """
        self.check_crop(length)
        for group, allocator in enumerate(self._allocators):
            pages = self._pages[group]
            keep = max(0, pages_for(length, self.page_size) - self._first[group])
            allocator.release(pages[keep:][::-1])
            del pages[keep:]
            if length <= self.start:
                self._first[group] = self.start // self.page_size
        self.length = length

    def slide(self, length: int | None = None) -> range | None:
        """Release the pages that no later token's window reaches, less the roll-back margin.

        `length`: tokens that are there, where room was made for more of them ahead.
        Returns the logical pages among which they were, or None if there were none.
        """
        self.check_live()
        length = self.length if length is None else length
        gone: list[int] = []
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            first, pages = self._first[group], self._pages[group]
            oldest = first_visible(length - self.rollback, window)
            leave = min(oldest // self.page_size - first, len(pages))
            if leave > 0:
                self._allocators[group].release(pages[:leave][::-1])
                del pages[:leave]
                self._first[group] = first + leave
                gone += [first, first + leave]
        return range(min(gone), max(gone)) if gone else None

    def release(self) -> None:
        """Give every page back, the tail first. The table cannot be used any more."""
        if self._released:
            return
        for allocator, pages in zip(self._allocators, self._pages, strict=True):
            allocator.release(pages[::-1])
            pages.clear()
        self._released = True

    # --- inside -----------------------------------------------------------------------------

    def check_live(self) -> None:
        """Raise UseAfterFree if `release` was called."""
        if self._released:
            raise UseAfterFree(
                "page table: it was released; make a new one, or fork before releasing"
            )


def pages_needed(tables: Sequence[PageTable], num_tokens: int) -> list[int]:
    """Fresh pages for each group when every table in `tables` appends `num_tokens` tokens."""
    if not tables:
        return []
    for table in tables:
        table.check_live()
    if num_tokens < 0:
        raise PageError(expected("num_tokens", "at least 0", num_tokens, "use crop to shorten"))
    return [
        sum(_missing(tables, group, num_tokens)) + len(_copying(tables, group, num_tokens))
        for group in range(len(tables[0]._allocators))
    ]


def append_all(
    tables: Sequence[PageTable],
    num_tokens: int,
    needed: Sequence[int],
    copy: Callable[[list[PageCopy]], None] = lambda copies: None,
) -> list[PageCopy]:
    """`append(num_tokens)` on each table, `needed` pages of each group being prepared.

    `copy` makes the page copies, before any table names a copy; where it raises, no table has
    changed. Returns the copies, for callers without a `copy` to make before they write.
    """
    if not any(needed):  # most tokens
        for table in tables:
            table.length += num_tokens
        return []
    allocators = tables[0]._allocators
    grown = [_missing(tables, group, num_tokens) for group in range(len(allocators))]
    copying = [
        _copying(tables, group, num_tokens) if count > sum(grown[group]) else []
        for group, count in enumerate(needed)
    ]
    fresh: list[list[int]] = []
    try:
        for allocator, count in zip(allocators, needed, strict=True):
            fresh.append(allocator.allocate(count))
        copies = [
            PageCopy(group, table._pages[group][-1], target)
            for group, pages in enumerate(fresh)
            for table, target in zip(copying[group], pages, strict=False)
        ]
        if copies:
            copy(copies)
    except BaseException:
        for allocator, pages in zip(allocators, fresh, strict=False):
            allocator.release(pages[::-1])
        raise
    for group, pages in enumerate(fresh):
        rest = iter(pages)
        for table in copying[group]:
            table._pages[group][-1] = next(rest)
        for table, count in zip(tables, grown[group], strict=True):
            table._pages[group] += islice(rest, count)
    for table in tables:
        table.length += num_tokens
    for group, source, _ in copies:
        allocators[group].release([source])
    return copies


def _missing(tables: Sequence[PageTable], group: int, num_tokens: int) -> list[int]:
    """Pages that each table lacks in `group` for `num_tokens` more tokens."""
    size = tables[0].page_size
    lengths = {table.length for table in tables}  # of a batch's rows mostly one
    wanted = {length: pages_for(length + num_tokens, size) for length in lengths}
    return [
        max(0, wanted[table.length] - table._first[group] - len(table._pages[group]))
        for table in tables
    ]


def _copying(tables: Sequence[PageTable], group: int, num_tokens: int) -> list[PageTable]:
    """Those that must copy their partly filled last page in `group` before they write to it.

    Of the holders of a shared page each copies it but the last one left, who writes in place; a
    published page is never written again.
    """
    allocator = tables[0]._allocators[group]
    copying: list[PageTable] = []
    holders: dict[int, int] = {}  # shared page -> those who have not copied it
    for table in tables:
        if not (num_tokens and table.length % table.page_size and table._pages[group]):
            continue
        page = table._pages[group][-1]
        left = holders.setdefault(page, allocator.count(page))
        if left > 1 or allocator.is_published(page):
            holders[page] = left - 1
            copying.append(table)
    return copying
