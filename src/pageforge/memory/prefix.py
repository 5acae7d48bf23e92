"""PrefixIndex: finds pages whose K/V another sequence has computed already."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pageforge.errors import PageError, PageForgeError, expected
from pageforge.memory.allocator import PageAllocator

Tokens = tuple[int, ...]
HashFunction = Callable[[bytes, Tokens], bytes]


@dataclass(frozen=True)
class _Entry:
    serial: int  # names this entry for ever: unlike a key it cannot collide
    parent: int  # serial of the page before, or of the salt
    tokens: Tokens
    page: int


class PrefixCursor(NamedTuple):
    """The place in an index that a sequence has come to: its next page is looked up from here."""

    num_pages: int
    key: bytes  # the hash of all before
    parent: int  # serial of the page before, or of the salt


@dataclass(frozen=True)
class Prefix:
    """Known pages that hold the first `num_tokens` tokens of a sequence, in every layer group.

    `num_used`: how many of its pages others hold now; the rest are cached ones, which count as
    available until they are shared.
    """

    num_tokens: int
    pages: tuple[list[int], ...]
    num_used: int
    cursors: list[PrefixCursor]


def chained_hash(parent: bytes, tokens: Tokens) -> bytes:
    """Hash of a page's tokens and of all before it.

    The same in every process and on every machine, which Python's own salted `hash` is not.
    """
    return hashlib.blake2b(parent + np.asarray(tokens, "<i8").tobytes(), digest_size=16).digest()


class PrefixIndex:
    """The full pages of one layer group by what they hold: `hash(tokens so far) -> page`.

    Only full pages are published; a page stays until its allocator evicts it. The hash only finds
    candidates: tokens and the identity of the page before are compared on each hit, so that even a
    collision never serves another sequence's K/V.

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
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}  # page -> the key of its entry
        self._roots: dict[str, int] = {}  # salt -> serial
        self._serials: set[int] = set()  # of live entries and of salts
        self._next_serial = 0
        allocator.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Pages that hold the longest known prefix of `tokens`, full pages only.

        A query: share the pages before anything else is allocated.
        """
        return self.walk(tokens, salt)[0]

    def walk(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], PrefixCursor]:
        """`match`, and the place from which `extend` publishes the pages that come after."""
        pages = []
        parent, key = self._roots.get(salt, -1), salt.encode()
        for chunk in self._full_pages(tokens):
            next_key = self._hash(key, chunk)
            entry = self._entries.get(next_key)
            if entry is None or entry.parent != parent or entry.tokens != chunk:
                break
            pages.append(entry.page)
            parent, key = entry.serial, next_key
        return pages, PrefixCursor(len(pages), key, parent)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> int:
        """Make the full pages of a sequence findable; `pages[i]` holds `tokens[i*P:(i+1)*P]`.

        Returns how many pages are findable under `tokens` afterwards. Publishing again is harmless;
        where another page holds the same tokens already that one stays. Raises PageError, and then
        nothing has changed, when `pages` are fewer than the full pages of `tokens`, or one of them
        is not used.
        """
        return self.extend(self.start(salt), tokens, pages).num_pages

    def start(self, salt: str = "") -> PrefixCursor:
        """The place before a sequence's first page."""
        return PrefixCursor(0, salt.encode(), self._root(salt))

    def extend(
        self, cursor: PrefixCursor, tokens: Sequence[int], pages: Sequence[int]
    ) -> PrefixCursor:
        """`publish` what comes after `cursor`: `tokens`, which begin with a page, and `pages`.

        Returns the place after the last page that is findable. Once a page before `cursor` was
        evicted, nothing more is published: nothing could reach it.
        """
        chunks = self._full_pages(tokens)
        if len(pages) < len(chunks):
            raise PageError(
                expected("pages", f"at least {len(chunks)}", len(pages), "pass all pages")
            )
        for page in pages[: len(chunks)]:
            if self._allocator.count(page) == 0:
                raise PageError(
                    expected(f"page {page}", "a used page", "a free or cached one", "publish first")
                )
        done, key, parent = cursor
        if parent not in self._serials:
            return cursor
        for chunk, page in zip(chunks, pages, strict=False):
            next_key = self._hash(key, chunk)
            entry = self._entries.get(next_key)
            if entry is not None and entry.parent not in self._serials:
                # The page before it was evicted: nothing can reach it any more.
                self._allocator.unpublish(entry.page)
                entry = None
            if entry is None:
                if page in self._keys:
                    break  # known as something else: never one page under two contents
                self._allocator.publish(page)
                entry = _Entry(self._serial(), parent, chunk, page)
                self._entries[next_key] = entry
                self._keys[page] = next_key
            elif entry.parent != parent or entry.tokens != chunk:
                break  # a collision: the page that came first stays
            done, key, parent = done + 1, next_key, entry.serial
        return PrefixCursor(done, key, parent)

    def drop(self) -> None:
        """Forget everything: cached pages fall free, used ones are not kept at their end."""
        for page in list(self._keys):
            self._allocator.unpublish(page)
        self._roots.clear()
        self._serials.clear()

    def _full_pages(self, tokens: Sequence[int]) -> list[Tokens]:
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            self._roots[salt] = self._serial()
        return self._roots[salt]

    def _serial(self) -> int:
        self._next_serial += 1
        self._serials.add(self._next_serial)
        return self._next_serial

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            self._serials.discard(self._entries.pop(key).serial)
