"""PageAllocator: which pages are free, used, or kept for reuse. O(1) a page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from operator import length_hint

from pageforge.errors import GeometryError, OutOfPages, PageError, expected

GROWTH = 32
"""A chunk has 1/32 of the pages before it, or `chunk_pages` where that is more: few mappings in a
large pool, little slack in a small one."""

READY = 64
"""Pages are taken from and put back on the chunks' free lists this many at a time, or more."""


@dataclass(frozen=True)
class Supply:
    """Where pages beyond the free ones of open chunks would come from: the plan, not the deed."""

    chunks: tuple[int, ...]  # to open, in this order
    evictions: int  # cached pages to give up, the least recently used first


class PageAllocator:
    """Hands out page ids 1 to `num_pages` of one layer group.

    A page is *free*, *used* (reference count of one or more) or *cached* (count zero, its K/V kept
    for prefix reuse, in eviction order): `num_free + num_cached + num_used == num_pages`.

    Page 0 is never handed out: padding in page tables points to it, so that a padded entry is
    always a valid address that no sequence owns.

    Pages lie in *chunks*, the unit in which a pool maps memory. A chunk is *open* while it has
    memory behind it. Free pages of open chunks come first: the few that are *ready* (given back
    last), then those of partly used chunks, so that whole chunks fall free, then those of wholly
    free ones. When open chunks have none left, a chunk is opened, and when all are open, the least
    recently used cached pages are given up. Where there is a choice, the lowest chunk serves.

    Every call either does all that it says or raises and changes nothing.
    """

    def __init__(self, num_pages: int, chunk_pages: int = 64):
        """`chunk_pages`: pages in the smallest chunk."""
        if num_pages < 1:
            raise GeometryError(expected("num_pages", "at least 1", num_pages, "ask for more"))
        if chunk_pages < 1:
            raise GeometryError(expected("chunk_pages", "at least 1", chunk_pages, "ask for more"))
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        """Called with each page that is no longer kept, before it can be handed out again. It must
        neither raise nor call the allocator."""
        self._chunk_starts = _chunk_starts(num_pages + 1, chunk_pages)
        self._sizes = [stop - start for start, stop in pairwise(self._chunk_starts)]
        # What follows grows with the pages opened so far, so that a large pool costs nothing until
        # it is used.
        self._counts: list[int] = []  # page -> reference count
        self.num_shares = 0
        """Counts `share` and `publish`: as long as it stands, who holds a page alone still does."""
        self._published: set[int] = set()  # pages to keep as cached when their last holder goes
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next one to evict first
        self._ready: list[int] = []  # free pages of open chunks, the next one last; a few
        self._free: list[list[int]] = []  # chunk -> its other free pages, the next one last
        self._num_listed = 0  # pages on the lists of `_free`
        # Sets of chunks as the bits of an int: the lowest is found at once.
        self._partial = 0  # chunks that list some of their pages
        self._empty = 0  # chunks that list all of their pages
        self._closed: set[int] = set()  # chunks opened once and closed since
        self._num_unopened = num_pages  # pages in chunks that are not open
        self._open_chunk(0)  # page 0 lies here, so this chunk is never wholly free, nor closed

    # --- queries: they never change anything -------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and nobody can reuse."""
        return self.num_open_free + self._num_unopened

    @property
    def num_open_free(self) -> int:
        """Free pages with memory behind them."""
        return len(self._ready) + self._num_listed

    @property
    def num_cached(self) -> int:
        """Pages kept for prefix reuse; they are given up when free pages run out."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with a reference count of one or more."""
        return self.num_pages - self.num_free - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now: free and cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_chunks(self) -> int:
        """Chunks in the pool, open or not."""
        return len(self._chunk_starts) - 1

    @property
    def num_opened(self) -> int:
        """Chunks opened so far, those closed since included: no chunk beyond them was ever used."""
        return len(self._free)

    def count(self, page: int) -> int:
        """The reference count of `page`; 0 for a free or cached one. Raises PageError."""
        self._check_id(page)
        return self._counts[page] if page < len(self._counts) else 0

    def is_cached(self, page: int) -> bool:
        """Whether `page` is kept for reuse."""
        return page in self._cached

    def is_published(self, page: int) -> bool:
        """Whether `page` is kept for reuse, or would be when its last holder lets it go."""
        return page in self._published

    def is_shared(self, page: int) -> bool:
        """Whether others hold or will reuse a used `page`, so that it must not be written to."""
        return self._counts[page] > 1 or page in self._published

    def chunk_pages(self, chunk: int) -> range:
        """The page ids that lie in `chunk` (page 0 included). Raises PageError."""
        if not 0 <= chunk < self.num_chunks:
            raise PageError(
                expected("chunk", f"a number from 0 to {self.num_chunks - 1}", chunk, "fix it")
            )
        return range(self._chunk_starts[chunk], self._chunk_starts[chunk + 1])

    def open_chunks(self) -> list[int]:
        """Chunks with memory behind them, in order."""
        return [chunk for chunk in range(len(self._free)) if chunk not in self._closed]

    def empty_chunks(self) -> list[int]:
        """Open chunks, in order, that no used or cached page touches: they can be closed."""
        empty = set(_bits(self._empty))
        for chunk, pages in self._by_chunk(self._ready):
            if len(self._free[chunk]) + len(pages) == self._sizes[chunk]:
                empty.add(chunk)
        return sorted(empty)

    def plan(self, num_pages: int) -> Supply:
        """Where `num_pages` pages would come from.

        Raises OutOfPages, or PageError for a negative number.
        """
        _check_number(num_pages)
        missing = num_pages - self.num_open_free
        chunks = []
        if missing > 0:
            for chunk in self._unopened():
                chunks.append(chunk)
                missing -= len(self.chunk_pages(chunk))
                if missing <= 0:
                    break
        evictions = max(0, missing)
        if evictions > len(self._cached):
            raise OutOfPages(num_pages, self.num_available)
        return Supply(tuple(chunks), evictions)

    # --- changes ----------------------------------------------------------------------------

    def prepare(self, supply: Supply) -> None:
        """Carry out a plan: open its chunks (their memory must be there), evict cached pages.

        Raises PageError where other calls have overtaken the plan.
        """
        following = islice(self._unopened(), len(supply.chunks))
        if supply.chunks != tuple(following) or supply.evictions > len(self._cached):
            raise PageError(
                f"supply: expected a plan that still holds, got {supply}; "
                f"plan again after anything else has changed"
            )
        for chunk in supply.chunks:
            self._open_chunk(chunk)
        self.evict(supply.evictions)

    def allocate(self, num_pages: int) -> list[int]:
        """`num_pages` pages with a count of one each. Raises OutOfPages."""
        ready = self._ready
        if num_pages > len(ready):
            self._make_ready(num_pages)
        if num_pages < 1:  # also keeps the slices below from meaning the whole list
            _check_number(num_pages)
            return []
        pages = ready[-num_pages:]
        del ready[-num_pages:]
        pages.reverse()
        counts = self._counts
        for page in pages:
            counts[page] = 1
        return pages

    def check_share(self, pages: Sequence[int]) -> None:
        """Raise PageError where `share(pages)` would; otherwise do nothing."""
        counts = self._counts
        for page in pages:
            if not (0 < page < len(counts) and (counts[page] or page in self._cached)):
                raise PageError(
                    f"page {page}: expected a used or cached page to share, got a free or unknown "
                    f"one; share pages only while their owner holds them"
                )

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages`, used or cached ones. Raises PageError."""
        self.check_share(pages)
        self.num_shares += 1
        counts = self._counts
        for page in pages:
            if not counts[page]:
                del self._cached[page]
            counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of `pages`. Those at zero fall free, or cached if published.

        Pass a sequence's pages tail first: cached pages are evicted in the order they come here,
        and a prefix is of no use without its head. Raises PageError.
        """
        # The common case first: each page has this one holder. A page that does not, is unknown, or
        # is named twice ends the loop, and what was done is undone.
        counts = self._counts
        rest = iter(pages)
        try:
            for page in rest:
                if page < 1 or counts[page] != 1:
                    break
                counts[page] = 0
            else:
                self._retire(pages)
                return
        except (IndexError, TypeError):
            pass
        for page in islice(pages, len(pages) - length_hint(rest) - 1):
            counts[page] = 1
        mentions = Counter(pages)
        for page, times in mentions.items():
            held = counts[page] if 0 < page < len(counts) else 0
            if held < times:
                raise PageError(
                    f"page {page}: expected at least {times} holders to release, got {held}; "
                    f"each holder releases once, and only ids that allocate() gave out"
                )
        for page, times in mentions.items():
            counts[page] -= times
        self._retire([page for page in mentions if not counts[page]])

    def publish(self, page: int) -> None:
        """Keep `page` as cached when its count falls to zero. It must be used. Raises PageError."""
        if self.count(page) == 0:
            raise PageError(
                expected(f"page {page}", "a used page", "a free or cached one", "publish first")
            )
        self.num_shares += 1
        self._published.add(page)

    def unpublish(self, page: int) -> None:
        """Do not keep `page` any longer: a cached one falls free at once. Raises PageError."""
        self._check_id(page)
        if page in self._published:
            self._give_up([page])

    def evict(self, num_pages: int) -> None:
        """Turn the `num_pages` least recently used cached pages into free ones.

        Raises OutOfPages when fewer are cached, or PageError for a negative number.
        """
        _check_number(num_pages)
        if num_pages > len(self._cached):
            raise OutOfPages(num_pages, len(self._cached), "fewer pages are cached than that")
        self._give_up(list(islice(self._cached, num_pages)))

    def close_chunk(self, chunk: int) -> None:
        """Take a wholly free chunk out of supply: the memory behind it goes. Raises PageError."""
        pages = self.chunk_pages(chunk)
        num_ready = sum(page in pages for page in self._ready)
        if chunk >= len(self._free) or len(self._free[chunk]) + num_ready < len(pages):
            raise PageError(
                expected(
                    f"chunk {chunk}",
                    "an open, wholly free chunk",
                    "one that is closed or in use",
                    "close only what empty_chunks() names",
                )
            )
        self._ready[:] = [page for page in self._ready if page not in pages]
        self._num_listed -= len(self._free[chunk])
        self._num_unopened += len(pages)
        self._free[chunk] = []
        self._note_listed(chunk)
        self._closed.add(chunk)

    # --- self-check -------------------------------------------------------------------------

    def check_invariants(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Recount everything; raise AssertionError at the first contradiction.

        `holders`: the page lists of all live holders; reference counts must equal their mentions.
        """
        cached, closed = self._cached.keys(), self._closed
        used = {page for page, count in enumerate(self._counts) if count}
        listed = [page for pages in self._free for page in pages]
        states = [*listed, *self._ready, *used, *cached]
        unopened = {page for chunk in self._unopened() for page in self.chunk_pages(chunk)}
        _hold(0 not in states, "page 0 was handed out")
        _hold(len(states) == len(set(states)), "a page is free, used or cached twice")
        _hold(unopened.isdisjoint(states), "a page is in use that has no memory behind it")
        _hold(
            {0}.union(states, unopened) == set(range(self.num_pages + 1)),
            "free + cached + used is not the pool",
        )
        _hold(len(listed) == self._num_listed, "the count of listed pages is off")
        _hold(len(unopened) == self._num_unopened, "the count of pages without memory is off")
        _hold(min(self._counts) >= 0, "a reference count is negative")
        _hold(cached <= self._published, "a cached page is not published")
        _hold(self._published <= cached | used, "a free page is kept")
        for chunk, pages in enumerate(self._free):
            ids = self.chunk_pages(chunk)
            _hold(all(page in ids for page in pages), "a page is on a wrong chunk's list")
            _hold(not (pages and chunk in closed), f"chunk {chunk} is closed but lists pages")
            found = (self._partial >> chunk & 1, self._empty >> chunk & 1)
            want = (0 < len(pages) < len(ids), len(pages) == len(ids))
            _hold(found == want, f"chunk {chunk} has free pages that nobody finds")
        if holders is not None:
            mentions = Counter(page for pages in holders for page in pages)
            counts = {page: self._counts[page] for page in used}
            _hold(dict(mentions) == counts, "reference counts differ from the live holders")

    # --- inside -----------------------------------------------------------------------------

    def _check_id(self, page: int) -> None:
        if not 0 < page <= self.num_pages:
            raise PageError(
                expected("page", f"an id from 1 to {self.num_pages}", page, "fix the caller")
            )

    def _unopened(self) -> Iterator[int]:
        """Chunks that are not open, lowest first."""
        yield from sorted(self._closed)
        yield from range(len(self._free), self.num_chunks)

    def _by_chunk(self, pages: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Each chunk that some of `pages` lie in, with those pages in ascending order."""
        ordered = sorted(pages)
        start = 0
        while start < len(ordered):
            chunk = bisect_right(self._chunk_starts, ordered[start]) - 1
            stop = bisect_left(ordered, self._chunk_starts[chunk + 1], start)
            yield chunk, ordered[start:stop]
            start = stop

    def _open_chunk(self, chunk: int) -> None:
        pages = self.chunk_pages(chunk)
        # Descending, so that pages are handed out in ascending order.
        free = list(range(pages.stop - 1, max(pages.start, 1) - 1, -1))
        if chunk < len(self._free):
            self._closed.remove(chunk)
            self._free[chunk] = free
        else:
            self._free.append(free)
            self._counts.extend([0] * len(pages))
        self._num_listed += len(free)
        self._num_unopened -= len(free)
        self._note_listed(chunk)

    def _make_ready(self, num_pages: int) -> None:
        """See to it that at least `num_pages` pages are ready. Raises OutOfPages."""
        if num_pages > self.num_open_free:
            self.prepare(self.plan(num_pages))
        missing = num_pages - len(self._ready)
        taken: list[list[int]] = []
        while missing > 0:
            chunks = self._partial or self._empty
            chunk = (chunks & -chunks).bit_length() - 1
            free = self._free[chunk]
            # Some more than needed, of a chunk that is used anyway.
            pages = free[-missing - READY :]
            del free[-missing - READY :]
            taken.append(pages)
            missing -= len(pages)
            self._num_listed -= len(pages)
            self._note_listed(chunk)
        self._ready[:0] = chain.from_iterable(reversed(taken))

    def _retire(self, pages: Sequence[int]) -> None:
        """Pages that lost their last holder become cached or free."""
        published = self._published
        if published and not published.isdisjoint(pages):
            self._cached.update((page, None) for page in pages if page in published)
            pages = [page for page in pages if page not in published]
        self._ready.extend(pages)
        if len(self._ready) > 2 * READY:
            self._list_ready()

    def _give_up(self, pages: Sequence[int]) -> None:
        """Do not keep published `pages` any longer; cached ones fall free."""
        if self.on_evict is not None:
            # First, so that a page which the callback chokes on is not handed out as free.
            for page in pages:
                self.on_evict(page)
        self._published.difference_update(pages)
        free = [page for page in pages if page in self._cached]
        for page in free:
            del self._cached[page]
        self._retire(free)

    def _list_ready(self) -> None:
        """Put all ready pages on their chunks' lists."""
        for chunk, pages in self._by_chunk(self._ready):
            self._free[chunk].extend(reversed(pages))
            self._note_listed(chunk)
        self._num_listed += len(self._ready)
        self._ready.clear()

    def _note_listed(self, chunk: int) -> None:
        """File `chunk`, whose list has changed, under what it is now."""
        bit = 1 << chunk
        listed = len(self._free[chunk])
        self._partial &= ~bit
        self._empty &= ~bit
        if listed == self._sizes[chunk]:
            self._empty |= bit
        elif listed:
            self._partial |= bit


def _chunk_starts(num_ids: int, chunk_pages: int) -> list[int]:
    """First page id of each chunk, and the end: sizes grow with the pages before, see GROWTH."""
    starts = [0]
    while starts[-1] < num_ids:
        grown = starts[-1] // GROWTH // chunk_pages * chunk_pages
        starts.append(min(num_ids, starts[-1] + max(chunk_pages, grown)))
    return starts


def _check_number(num_pages: int) -> None:
    if num_pages < 0:
        raise PageError(expected("num_pages", "at least 0", num_pages, "fix the caller"))


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _bits(number: int) -> Iterator[int]:
    """The places of the bits of `number` that are set, the lowest first."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
