"""All of the policy at once, against a model of what every page holds.

`Memory` stands for the pool's tensors: it stores at each slot what was written there. What K/V hold
depends on all tokens so far, so a token is written as its whole history; a page shared wrongly,
handed out too early, or not copied in time then shows as a wrong history somewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pageforge.errors import CropError, OutOfPages
from pageforge.memory import PageAllocator, PageTable, PrefixIndex
from pageforge.memory import allocator as allocator_module
from pageforge.memory.allocator import Supply
from pageforge.memory.page_table import PageCopy, pages_needed
from pageforge.memory.prefix import ABSENT, chained_hash, longest_hit

P = 4
WINDOWS = (None, P + 1)
GROUPS = range(len(WINDOWS))
ROLLBACK = 3
NUM_PAGES = (17, 15)
CHUNK_PAGES = (3, 1)
MOST_SEQUENCES = 6

Token = tuple[str, tuple[int, ...]]
"""What is stored for a token: salt, and all tokens up to it."""


class Memory:
    """`slot -> what is stored there`, for one layer group."""

    def __init__(self) -> None:
        self.slots: dict[int, Token] = {}

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Reads all sources before it writes any target, as ops.copy_pages does."""
        copied = {
            target * P + offset: self.slots.get(source * P + offset)
            for source, target in pairs
            for offset in range(P)
        }
        self.slots.update({slot: token for slot, token in copied.items() if token})


@dataclass
class Live:
    """A sequence: its table, and what it should hold."""

    table: PageTable
    tokens: list[int]
    salt: str
    floor: int = 0  # roll-back to this length must be possible

    def history(self, position: int) -> Token:
        return self.salt, tuple(self.tokens[: position + 1])


class Policy(RuleBasedStateMachine):
    """Sequences come, grow, fork, roll back and end over one small pool."""

    hash_function: Callable[[bytes, bytes], bytes] = staticmethod(chained_hash)

    @initialize()
    def start(self) -> None:
        self.allocators = [
            PageAllocator(*sizes) for sizes in zip(NUM_PAGES, CHUNK_PAGES, strict=True)
        ]
        self.indexes = [PrefixIndex(a, P, self.hash_function) for a in self.allocators]
        self.memory = [Memory() for _ in GROUPS]
        self.live: list[Live] = []
        self.known: set[Token] = set()  # all that was ever published

    # Help

    def pick(self, number: int) -> Live:
        return self.live[number % len(self.live)]

    def state(self) -> Any:
        """What a call that fails must not change."""
        return (
            [(s.table.length, [s.table.pages(g) for g in GROUPS]) for s in self.live],
            [
                (a.num_free, list(a._cached), a.open_chunks(), len(index))
                for a, index in zip(self.allocators, self.indexes, strict=True)
            ],
        )

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for group in GROUPS:
            self.memory[group].copy_pages(
                [(c.source, c.target) for c in copies if c.group == group]
            )

    def write(self, sequence: Live, tokens: Sequence[int]) -> None:
        """What the model's forward does with the new tokens."""
        start = len(sequence.tokens)
        sequence.tokens.extend(tokens)
        for group in GROUPS:
            slots = sequence.table.slots(start, len(sequence.tokens), group).tolist()
            for position, slot in enumerate(slots, start):
                if slot >= 0 and position >= sequence.table.start:
                    self.memory[group].slots[slot] = sequence.history(position)

    def append(self, sequence: Live, tokens: Sequence[int]) -> None:
        before = self.state()
        needed = sequence.table.needed(len(tokens))
        assert needed == pages_needed([sequence.table], len(tokens))
        enough = all(n <= a.num_available for n, a in zip(needed, self.allocators, strict=True))
        try:
            copies = sequence.table.append(len(tokens))
        except OutOfPages as error:
            assert error.needed > error.available
            assert not enough
            assert self.state() == before
            raise
        assert enough
        self.copy(copies)
        self.write(sequence, tokens)

    # Sequences

    @rule(
        pages=st.lists(st.sampled_from([(0,) * P, (0,) * P, (1,) * P]), min_size=1, max_size=4),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=P),
        salt=st.sampled_from(["", "", "b"]),
        start=st.sampled_from([0] * 8 + [3, P, P + 2]),
        only_the_window=st.booleans(),
        at_once=st.booleans(),
    )
    def arrive(
        self,
        pages: list[tuple[int, ...]],
        tail: list[int],
        salt: str,
        start: int,
        only_the_window: bool,
        at_once: bool,
    ) -> None:
        """A prompt: what the index knows is adopted, the rest appended; `at_once` it ends again."""
        if len(self.live) == MOST_SEQUENCES:
            return
        tokens = [token for page in pages for token in page] + tail
        table = PageTable(self.allocators, P, windows=WINDOWS, rollback=ROLLBACK, start=start)
        sequence = Live(table, [], salt)
        if not start:
            paths = [index.walk(tokens, salt) for index in self.indexes]
            known = [[place.page for place in path[1:]] for path in paths]
            margin = 0 if only_the_window else len(tokens)
            hit, found = longest_hit(known, WINDOWS, P, margin)
            table.adopt(found, hit * P)
            sequence.tokens += tokens[: hit * P]
            sequence.floor = hit * P if len(found[1]) < hit else 0
        self.live.append(sequence)
        try:
            self.append(sequence, tokens[len(sequence.tokens) :])
        except OutOfPages:
            self.live.remove(sequence)
            table.release()
        else:
            if at_once:
                self.end(-1, keep=True)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), tokens=st.lists(st.integers(0, 1), max_size=2 * P + 1))
    def grow(self, number: int, tokens: list[int]) -> None:
        with contextlib.suppress(OutOfPages):  # and then nothing has changed
            self.append(self.pick(number), tokens)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), tokens=st.integers(60, 200))
    def ask_for_too_much(self, number: int, tokens: int) -> None:
        sequence = self.pick(number)
        with pytest.raises(OutOfPages):
            self.append(sequence, [0] * (NUM_PAGES[0] * P + tokens))

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1), most=st.integers(1, MOST_SEQUENCES))
    def step(self, token: int, most: int) -> None:
        """A token each for many sequences: plan, reserve, commit, copy, write."""
        batch = self.live[:most]
        tables = [sequence.table for sequence in batch]
        before = self.state()
        needed = pages_needed(tables, 1)
        try:
            supplies = [a.plan(n) for a, n in zip(self.allocators, needed, strict=True)]
        except OutOfPages:
            assert self.state() == before
            return
        for allocator, supply in zip(self.allocators, supplies, strict=True):
            allocator.prepare(supply)
        supplied = [(a.open_chunks(), a.num_cached, a.num_free) for a in self.allocators]
        copies = [copy for table in tables for copy in table.append(1)]
        for allocator, count, (chunks, cached, free) in zip(
            self.allocators, needed, supplied, strict=True
        ):
            # All came from what was reserved: no page that a copy reads was handed out again.
            assert allocator.open_chunks() == chunks
            assert allocator.num_cached >= cached
            assert allocator.num_free == free - count
        self.copy(copies)
        for sequence in batch:
            self.write(sequence, [token])

    @precondition(lambda self: self.live and len(self.live) < MOST_SEQUENCES)
    @rule(number=st.integers(0))
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        child = Live(parent.table.fork(), list(parent.tokens), parent.salt, parent.floor)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), by=st.integers(0, 3 * P))
    def crop(self, number: int, by: int) -> None:
        sequence = self.pick(number)
        length = max(0, len(sequence.tokens) - by)
        oldest = max(sequence.table.start, length - WINDOWS[1] + 1)
        there = length <= sequence.table.start or oldest >= sequence.table.first_page(1) * P
        before = self.state()
        try:
            sequence.table.crop(length)
        except CropError:
            assert not there
            assert length < sequence.floor
            assert self.state() == before
        else:
            assert there
            del sequence.tokens[length:]
            if length <= sequence.table.start:
                sequence.floor = 0

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), by=st.integers(1, P), published=st.booleans())
    def think_again(self, number: int, by: int, published: bool) -> None:
        """Other tokens take the place of the last ones, whose pages may be published."""
        sequence = self.pick(number)
        if published:
            self.publish(number, len(sequence.tokens) // P)
        former = list(sequence.tokens)
        self.crop(number, by)
        others = [1 - token for token in former[len(sequence.tokens) :]]
        self.grow(number, others)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0))
    def slide(self, number: int) -> None:
        sequence = self.pick(number)
        table = sequence.table
        table.slide()
        sequence.floor = max(sequence.floor, table.length - ROLLBACK)
        if sequence.floor <= table.length:
            table.check_crop(sequence.floor)
        # No page stays that only lies behind the margin.
        kept = table.first_page(1) * P
        assert kept > table.length - ROLLBACK - WINDOWS[1] + 1 - P

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), keep=st.booleans())
    def end(self, number: int, keep: bool) -> None:
        sequence = self.pick(number)
        if keep:
            self.publish(number, len(sequence.tokens) // P)
        self.live.remove(sequence)
        sequence.table.release()

    # Prefix cache and memory

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0), full=st.integers(0, 5))
    def publish(self, number: int, full: int) -> None:
        sequence = self.pick(number)
        tokens = sequence.tokens[: full * P]
        if sequence.table.start:
            return
        for group, index in enumerate(self.indexes):
            index.publish(tokens, sequence.table.entries(0, full, group), sequence.salt)
        self.known.add((sequence.salt, tuple(tokens)))

    @rule(group=st.sampled_from(GROUPS), pages=st.integers(0, 4))
    def evict(self, group: int, pages: int) -> None:
        allocator = self.allocators[group]
        oldest = list(allocator._cached)[:pages]
        allocator.evict(min(pages, allocator.num_cached))
        assert not any(allocator.is_cached(page) for page in oldest)

    @rule(group=st.sampled_from(GROUPS))
    def drop(self, group: int) -> None:
        self.indexes[group].drop()
        assert self.allocators[group].num_cached == 0

    @rule(group=st.sampled_from(GROUPS), number=st.integers(0))
    def close_a_chunk(self, group: int, number: int) -> None:
        allocator = self.allocators[group]
        empty = allocator.empty_chunks()
        in_use = {page for s in self.live for page in s.table.pages(group)} | set(allocator._cached)
        assert empty == [
            chunk
            for chunk in allocator.open_chunks()
            if chunk and in_use.isdisjoint(allocator.chunk_pages(chunk))
        ]
        if empty:
            chunk = empty[number % len(empty)]
            allocator.close_chunk(chunk)
            for page in allocator.chunk_pages(chunk):  # its memory goes
                for slot in range(page * P, page * P + P):
                    self.memory[group].slots.pop(slot, None)

    @rule(group=st.sampled_from(GROUPS), pages=st.integers(0, 30))
    def reserve(self, group: int, pages: int) -> None:
        """Reserved pages that nobody takes do no harm."""
        allocator = self.allocators[group]
        before = self.state()
        try:
            supply = allocator.plan(pages)
        except OutOfPages:
            assert pages > allocator.num_available
            assert self.state() == before
            return
        assert self.state() == before
        allocator.prepare(supply)
        assert allocator.plan(pages) == Supply((), 0)

    # What always holds

    @invariant()
    def pages_are_counted_rightly(self) -> None:
        for group, allocator in enumerate(self.allocators):
            allocator.check_invariants([s.table.pages(group) for s in self.live])

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.live:
            table = sequence.table
            assert table.length == len(sequence.tokens)
            for group, window in enumerate(WINDOWS):
                seen = 0 if window is None else table.length - window + 1
                slots = table.slots(0, table.length, group).tolist()
                for position in range(table.start, table.length):
                    if slots[position] >= 0:
                        stored = self.memory[group].slots[slots[position]]
                        assert stored == sequence.history(position)
                    else:
                        assert position < seen, "the next token's window lacks a token"

    @invariant()
    def the_index_finds_nothing_wrong(self) -> None:
        for group, index in enumerate(self.indexes):
            allocator = self.allocators[group]
            index.check_invariants()
            for salt, tokens in self.known:
                for number, place in enumerate(index.walk(tokens, salt)[1:]):
                    page = place.page
                    if page == ABSENT:
                        continue
                    assert allocator.count(page) or allocator.is_cached(page)
                    for offset in range(P):
                        stored = self.memory[group].slots[page * P + offset]
                        assert stored == (salt, tokens[: number * P + offset + 1])

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for sequence in self.live:
            sequence.table.release()
        for allocator, index in zip(self.allocators, self.indexes, strict=True):
            index.drop()
            assert allocator.num_free == allocator.num_pages
            for chunk in allocator.empty_chunks():
                allocator.close_chunk(chunk)
            assert allocator.open_chunks() == [0]
            allocator.check_invariants([])


class CollidingPolicy(Policy):
    """Every hash is one of two."""

    hash_function = staticmethod(lambda parent, tokens: bytes([tokens[0]]))


FEW = settings(max_examples=120, stateful_step_count=60)
"""Of the profile "fixed"; any other runs as many examples as it says."""

VARIANTS = {
    "filed at once": (Policy, 0),
    "some ready": (Policy, 2),
    "all ready, hashes collide": (CollidingPolicy, 64),
}


@pytest.mark.parametrize(("machine", "ready"), VARIANTS.values(), ids=VARIANTS.keys())
def test_the_policy_holds(
    machine: type[Policy], ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator_module, "READY", ready)
    run_state_machine_as_test(machine, settings=FEW if FEW.derandomize else settings())
