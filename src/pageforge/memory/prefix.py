"""PrefixIndex: finds pages whose K/V another sequence has computed already."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from weakref import WeakValueDictionary

import numpy as np

from pageforge.errors import PageError, PageForgeError, expected
from pageforge.geometry import first_visible
from pageforge.memory.allocator import PageAllocator

HashFunction = Callable[[bytes, bytes], bytes]

TOKEN = np.dtype("<i8")
"""How a token is hashed and kept: the same bytes on every machine, and few."""

ABSENT = 0
"""Stands for a page that there is none: evicted, or out of a window before it was published."""


class PrefixCursor:
    """A place in an index: the tokens of one full page after all those before it.

    It says what they are, not where their K/V lie: `page` comes and goes, and is ABSENT where no
    page holds them. A place lasts as long as anybody needs it: a page, a place behind it, or a
    sequence that has come to it and goes on from here.
    """

    __slots__ = ("__weakref__", "key", "num_pages", "page", "parent", "tokens")

    def __init__(self, parent: PrefixCursor | None, key: bytes, tokens: bytes):
        """`key`: the hash of all tokens up to here. `parent`: None before the first page.

        `tokens`: the page's, as TOKEN.
        """
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.num_pages: int = 0 if parent is None else parent.num_pages + 1
        self.page = ABSENT

    def holds(self, pages: Sequence[int]) -> bool:
        """Whether the last tokens up to here lie in `pages` still."""
        return all(
            place.page == page
            for place, page in zip(self._backwards(), reversed(pages), strict=False)
        )

    def _backwards(self) -> Iterator[PrefixCursor]:
        place: PrefixCursor | None = self
        while place is not None:
            yield place
            place = place.parent


@dataclass(frozen=True)
class Prefix:
    """Known pages that hold the first `num_tokens` tokens of a sequence, in every layer group.

    `pages`: of each group those that the next token sees, and before a window some more to roll
    back to. `num_used`: how many pages of the prefix every group has for nothing: others hold them
    now, or they left the window; cached ones count as available until they are shared.
    """

    num_tokens: int
    pages: tuple[list[int], ...]
    num_used: int
    cursors: list[PrefixCursor]


def chained_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a page's tokens (as TOKEN) and, with the hash of all before it, of these.

    The same in every process and on every machine, which Python's own salted `hash` is not.
    """
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class PrefixIndex:
    """The full pages of one layer group by what they hold: `hash(tokens so far) -> page`.

    Only full pages are published; a page stays until its allocator evicts it. The hash only finds
    candidates: tokens and the place before are compared on each hit, so that even a collision never
    serves another sequence's K/V.

    `salt` parts what must not be shared (another model, adapter, or tenant).
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, hash_function: HashFunction = chained_hash
    ):
        if allocator.on_evict is not None:
            raise PageForgeError(
                "allocator: expected one without a prefix index, got one that has one; the first "
                "index would not hear of evictions any more, so part by salt instead"
            )
        self.page_size = page_size
        self._allocator = allocator
        self._hash = hash_function
        self._holders: dict[int, PrefixCursor] = {}  # page -> what it holds
        # Weakly: what is behind an absent page keeps its place, and nothing else must.
        self._roots: WeakValueDictionary[bytes, PrefixCursor] = WeakValueDictionary()
        self._places: WeakValueDictionary[bytes, PrefixCursor] = WeakValueDictionary()
        allocator.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Pages that hold the longest known prefix of `tokens`, full pages only.

        A query: share the pages before anything else is allocated.
        """
        pages = (place.page for place in self.walk(tokens, salt)[1:])
        return list(takewhile(lambda page: page != ABSENT, pages))

    def walk(self, tokens: Sequence[int], salt: str = "") -> list[PrefixCursor]:
        """The places along `tokens`, from the one before the first page on, as far as known.

        What is known may be absent; see `longest_hit`. `extend` goes on from any of them.
        """
        path = [self.start(salt)]
        for chunk in self._full_pages(tokens):
            place = self._places.get(self._hash(path[-1].key, chunk))
            if place is None or place.parent is not path[-1] or place.tokens != chunk:
                break
            path.append(place)
        return path

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> int:
        """Make the full pages of a sequence findable; `pages[i]` holds `tokens[i*P:(i+1)*P]`.

        Returns how many pages of `tokens` are known afterwards. Publishing again is harmless; where
        another page holds the same tokens already that one stays. Raises PageError, and then
        nothing has changed, when `pages` are fewer than the full pages of `tokens`, or one of them
        is neither used nor ABSENT.
        """
        return self.extend(self.start(salt), tokens, pages).num_pages

    def start(self, salt: str = "") -> PrefixCursor:
        """The place before a sequence's first page."""
        key = salt.encode()
        return self._roots.setdefault(key, PrefixCursor(None, key, b""))

    def extend(
        self, cursor: PrefixCursor, tokens: Sequence[int], pages: Sequence[int]
    ) -> PrefixCursor:
        """`publish` what comes after `cursor`: `tokens`, which begin with a page, and `pages`.

        Behind an ABSENT page others are found by whoever does not need it. Returns the place after
        the last page that is known. Where all was dropped since `cursor` was known nothing more is
        published: what is computed from dropped K/V goes with them.
        """
        chunks = self._full_pages(tokens)
        if len(pages) < len(chunks):
            raise PageError(
                expected("pages", f"at least {len(chunks)}", len(pages), "pass all pages")
            )
        for page in pages[: len(chunks)]:
            if page != ABSENT and self._allocator.count(page) == 0:
                raise PageError(
                    expected(f"page {page}", "a used page", "a free or cached one", "publish first")
                )
        if not self._is_known(cursor):
            return cursor
        for chunk, page in zip(chunks, pages, strict=False):
            key = self._hash(cursor.key, chunk)
            known = self._places.get(key)
            place = known or PrefixCursor(cursor, key, chunk)
            if place.parent is not cursor or place.tokens != chunk:
                break  # a collision: what came first stays
            if page != ABSENT and place.page == ABSENT:
                if page in self._holders:
                    break  # known as something else: never one page under two contents
                self._allocator.publish(page)
                self._holders[page] = place
                place.page = page
            if known is None:
                self._places[key] = place
            cursor = place
        return cursor

    def drop(self) -> None:
        """Forget everything: cached pages fall free, used ones are not kept at their end."""
        for page in list(self._holders):
            self._allocator.unpublish(page)
        self._roots.clear()
        self._places.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError unless the pages that are kept are known, and no others."""
        pages = range(1, self._allocator.num_pages + 1)
        if self._holders.keys() != {page for page in pages if self._allocator.is_published(page)}:
            raise AssertionError("the index knows other pages than its allocator keeps")
        for page, place in self._holders.items():
            if place.page != page or not self._is_known(place):
                raise AssertionError(f"page {page} is not found where the index has put it")

    def _full_pages(self, tokens: Sequence[int]) -> list[bytes]:
        data, size = np.asarray(tokens, TOKEN).tobytes(), self.page_size * TOKEN.itemsize
        return [data[i : i + size] for i in range(0, len(data) - size + 1, size)]

    def _is_known(self, place: PrefixCursor) -> bool:
        known = self._roots if place.parent is None else self._places
        return known.get(place.key) is place

    def _forget(self, page: int) -> None:
        place = self._holders.pop(page, None)
        if place is not None:
            place.page = ABSENT


def longest_hit(
    known: Sequence[Sequence[int]],
    windows: Sequence[int | None],
    page_size: int,
    rollback: int = 0,
) -> tuple[int, list[list[int]]]:
    """(pages of the longest prefix that can be shared, those of them that are there in each group).

    `known[group]`: the pages of a prefix, ABSENT where there is none. What the next token sees must
    be there, in a group with a window no more than that; of the `rollback` tokens before the window
    comes what is there.
    """
    # At each place, how many pages before it are there without a gap.
    runs = [
        list(accumulate(pages, lambda run, page: run + 1 if page != ABSENT else 0, initial=0))
        for pages in known
    ]
    num_pages = min(map(len, known))
    while not all(
        run[num_pages] >= num_pages - first_visible(num_pages * page_size, window) // page_size
        for run, window in zip(runs, windows, strict=True)
    ):
        num_pages -= 1
    shared = []
    for pages, run, window in zip(known, runs, windows, strict=True):
        oldest = first_visible(num_pages * page_size - rollback, window) // page_size
        shared.append(list(pages[max(oldest, num_pages - run[num_pages]) : num_pages]))
    return num_pages, shared
