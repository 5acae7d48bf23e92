"""A run of the real allocator, kept step by step, for the page's moving picture of a pool.

Sequences arrive, share a prompt, fork, copy a shared page that they write to, wait where pages run
out, and end. Which page is whose is decided by `PageTable`, `PrefixIndex` and `PageAllocator`, as
in every pool; each moment says what these say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pageforge.errors import OutOfPages
from pageforge.memory import PageAllocator, PageTable, PrefixIndex

PAGES = 64
PAGE_SIZE = 4
CHUNK_PAGES = 8
SPARE_CHUNKS = 1
"""Small numbers, so that a reader sees pages fill and memory come and go."""

SYSTEM = tuple(range(16))
"""What some prompts begin with."""


@dataclass(frozen=True)
class Held:
    """A sequence: the ids of its pages in order, and the tokens in them."""

    name: str
    pages: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Moment:
    """The pool after one step. `said`: what happened.

    `cached`: pages kept for a later prompt. `backed`: pages with memory behind them, used or not.
    `waiting`: sequences that have no pages yet.
    """

    said: str
    sequences: Sequence[Held]
    waiting: Sequence[str]
    cached: Sequence[int]
    backed: Sequence[int]

    @property
    def used(self) -> int:
        """Pages that somebody holds; one that several hold counts once."""
        return len({page for sequence in self.sequences for page in sequence.pages})


@dataclass
class Member:
    """A sequence's life: it comes at `step` with `prompt` and goes after `new` more tokens.

    `forks`: those that go on from its prompt, sharing its pages.
    """

    name: str
    step: int
    prompt: Sequence[int]
    new: int
    forks: Sequence[Member] = ()
    table: PageTable | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has all its tokens."""
        return self.table is not None and self.table.length == len(self.prompt) + self.new


def record() -> list[Moment]:
    """The whole run, the same every time, from an empty pool to an empty pool."""
    return list(_Replica().run(_members()))


def _members() -> list[Member]:
    def prompt(number: int, count: int) -> tuple[int, ...]:
        return tuple(range(1000 * number, 1000 * number + count))

    shared = prompt(4, 14)
    return [
        Member("A", 0, SYSTEM + prompt(1, 5), 22),
        Member("B", 2, prompt(2, 11), 34),
        Member("C", 5, SYSTEM + prompt(3, 9), 18),
        Member("D", 9, shared, 20, (Member("E", 9, shared, 12), Member("F", 9, shared, 26))),
        Member("G", 26, prompt(7, 78), 16),
        Member("H", 30, prompt(8, 70), 12),
        Member("I", 33, SYSTEM + prompt(9, 7), 14),
        Member("J", 52, prompt(10, 240), 9),
    ]


class _Replica:
    """A pool without tensors: the policy alone."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(PAGES, CHUNK_PAGES)
        self.prefixes = PrefixIndex(self.allocator, PAGE_SIZE)
        self.waiting: list[Member] = []
        self.running: list[Member] = []

    def run(self, members: Sequence[Member]) -> Iterator[Moment]:
        """One token for everyone in each step; whoever comes or goes has a moment of its own."""
        yield self._moment(
            "An empty pool of 64 pages. None has memory behind it but the first few."
        )
        later = list(members)
        for step in itertools.count():
            while later and later[0].step <= step:
                self.waiting.append(later.pop(0))
            yield from self._admit()
            if self.running:
                yield self._moment(self._grow())
            for member in [member for member in self.running if member.is_over]:
                yield self._moment(self._end(member))
            if not (later or self.waiting or self.running):
                break
        kept = self.allocator.num_cached
        self.allocator.evict(kept)
        self._shrink(keep=0)
        yield self._moment(
            f"drop_prefix_cache() lets {_pages(kept)} go, trim() gives the memory back: "
            f"the pool is empty."
        )

    def _admit(self) -> Iterator[Moment]:
        """Those that wait, first come first served."""
        while self.waiting:
            member = self.waiting[0]
            try:
                said = self._begin(member)
            except OutOfPages as error:
                yield self._moment(
                    f"{member.name} waits: it needs {_pages(error.needed)}, "
                    f"{error.available} can be had. Nothing has changed."
                )
                return
            del self.waiting[0]
            yield self._moment(said)

    def _begin(self, member: Member) -> str:
        """Give a prompt its pages. Raises OutOfPages, and then it has none."""
        table = PageTable([self.allocator], PAGE_SIZE)
        hit = self.prefixes.match(member.prompt)
        cached = self.allocator.num_cached
        table.adopt([hit], PAGE_SIZE * len(hit))
        revived = cached - self.allocator.num_cached
        try:
            table.append(len(member.prompt) - table.length)
        except OutOfPages:
            table.release()
            raise
        evicted = cached - revived - self.allocator.num_cached
        if member.prompt[: len(SYSTEM)] == SYSTEM:
            self.prefixes.publish(SYSTEM, table.pages())
        for one in (member, *member.forks):
            one.table = table if one is member else table.fork()
            self.running.append(one)
        said = f"{member.name} arrives with {len(member.prompt)} tokens: "
        said += f"{_pages(table.num_pages - len(hit))} claimed"
        if hit:
            whose = "kept from before" if revived else "of a running sequence"
            said += f", {_pages(len(hit))} {whose} shared, for it begins alike"
        if evicted:
            said += f"; {_pages(evicted)} no longer kept"
        if member.forks:
            names = " and ".join(fork.name for fork in member.forks)
            said += f". Its forks {names} share them all"
        return f"{said}."

    def _grow(self) -> str:
        """A token for everyone who runs."""
        claimed, copies, lost = 0, 0, self.allocator.num_cached
        for member in self.running:
            assert member.table is not None
            before = member.table.num_pages
            copies += len(member.table.append(1))
            claimed += member.table.num_pages - before
        lost -= self.allocator.num_cached
        parts = [f"{_pages(claimed)} claimed"] if claimed else []
        if copies:
            parts.append(f"{_pages(copies)} copied, for more than one would write there")
        if lost:
            parts.append(f"{_pages(lost)} no longer kept")
        return f"One token each: {', '.join(parts) or 'all fit in the pages they have'}."

    def _end(self, member: Member) -> str:
        """Its pages go back, but those that others hold, or a later prompt may want."""
        assert member.table is not None
        held, before = member.table.num_pages, self.allocator.num_free
        cached = self.allocator.num_cached
        member.table.release()
        self.running.remove(member)
        back = self.allocator.num_free - before
        kept = self.allocator.num_cached - cached
        self._shrink(keep=SPARE_CHUNKS)
        said = f"{member.name} ends: {_pages(back)} returned"
        if kept:
            said += f", {_pages(kept)} kept for prompts that begin alike"
        if others := held - back - kept:
            said += f", {_pages(others)} left to those who share them"
        return f"{said}."

    def _shrink(self, keep: int) -> None:
        """Give the memory of wholly free chunks back, all but the lowest few."""
        for chunk in self.allocator.empty_chunks()[keep:]:
            self.allocator.close_chunk(chunk)

    def _moment(self, said: str) -> Moment:
        held = [
            Held(member.name, member.table.pages(), member.table.length)
            for member in self.running
            if member.table is not None
        ]
        self.allocator.check_invariants([sequence.pages for sequence in held])
        pages = range(1, PAGES + 1)
        open_pages = {
            page
            for chunk in self.allocator.open_chunks()
            for page in self.allocator.chunk_pages(chunk)
        }
        return Moment(
            said,
            held,
            [member.name for member in self.waiting],
            [page for page in pages if self.allocator.is_cached(page)],
            [page for page in pages if page in open_pages],
        )


def _pages(count: int) -> str:
    return f"{count} page{'' if count == 1 else 's'}"
