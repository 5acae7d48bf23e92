"""A pool held against what every sequence should read: random steps, everything checked after each.

Every token has a number of its own; its K and V in every layer are that number plus the layer's.
After each step every sequence must read exactly its own tokens through `ops.gather_kv`. Whatever
no live token owns is NaN: fresh pages, pages given back, the rest of a partly filled page.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pageforge import KVGeometry, LayerShape, PagePool, PageTable, ops
from pageforge.errors import CropError, OutOfPages
from pageforge.memory.prefix import PrefixCursor

P = 8
WINDOW = 20
STEPS = (
    *("new", "append", "append", "append", "append_all", "fork", "crop", "slide", "release"),
    *("lose", "publish", "reuse", "drop", "trim", "restore", "export", "unexport", "map_ahead"),
)
SHARING_STEPS = (
    *("new", "append", "append", "append", "publish", "publish", "slide", "slide", "fork"),
    *("reuse", "reuse", "reuse", "release", "release"),
)
"""Steps in which prefixes are found again, in a window too."""

Step = tuple[str, int, int]  # name, which sequence, how much


def two_groups(
    device: str = "cpu", second: str | None = None, scale: int = 1, window: int = WINDOW
) -> KVGeometry:
    """Two layer groups, the second with a window; pages of 1,280 and 640 bytes at scale 1.

    `second`: the second group's device, if it is another one.
    """
    other = second or device
    full = LayerShape(2, 5 * scale, 5 * scale, "float32", device=device)
    sliding = LayerShape(1, 12 * scale, 8 * scale, "float32", window=window, device=other)
    return KVGeometry.of_layers({0: full, 1: sliding, 2: full}, P)


def random_steps(rng: random.Random, count: int, steps: Sequence[str] = STEPS) -> list[Step]:
    return [(rng.choice(steps), rng.randrange(8), rng.randint(1, 40)) for _ in range(count)]


@dataclass(eq=False)
class Sequence_:
    table: PageTable
    tokens: list[int]
    cursors: list[PrefixCursor] | None = None  # how far it is published


class Lost:
    """Stands for a cache that nobody frees."""


@dataclass(eq=False)
class Export:
    """Exported pages, as `check_invariants` sees a holder."""

    group: int
    ids: list[int]
    view: Any
    contents: Tensor

    def pages(self, group: int) -> list[int]:
        return self.ids if group == self.group else []


class PoolModel:
    """A pool, its sequences and what they hold. `most`: live sequences at a time.

    `alone`: nobody else uses the pool at the same time.
    """

    def __init__(self, pool: PagePool, most: int = 6, *, alone: bool = True, first: int = 1):
        self.pool = pool
        self.most = most
        self.alone = alone
        self.sequences: list[Sequence_] = []
        self.exports: list[Export] = []
        self.published: list[list[int]] = []
        self.numbers = itertools.count(first)
        self.outs = 0  # times that OutOfPages was raised
        self.hits = 0  # prefixes found, and of these without the pages before the window
        self.hits_in_a_window = 0
        self.known: set[tuple[int, int]] = set()  # (group, page) whose rest is NaN already

    # --- steps ------------------------------------------------------------------------------

    def run(self, steps: Sequence[Step], after: Callable[[], None] | None = None) -> None:
        for name, which, amount in steps:
            self.step(name, which, amount)
            self.check()
            if after is not None:
                after()

    def step(self, name: str, which: int, amount: int) -> None:
        if name in ("drop", "trim", "new", "reuse", "unexport", "map_ahead"):
            getattr(self, name)(amount)
        elif self.sequences:
            getattr(self, name)(self.sequences[which % len(self.sequences)], amount)

    def new(self, amount: int) -> None:
        if len(self.sequences) < self.most:
            start = amount % 13 if amount % 2 else 0
            sequence = Sequence_(self.pool.new_table(start), [0] * start)
            with self._nothing_changes_without_pages():
                self.pool.append([sequence.table], start)
            self._fill_fresh_pages([sequence])
            if sequence.table.length == start:
                self.sequences.append(sequence)

    def append(self, sequence: Sequence_, amount: int) -> None:
        self._append([sequence], amount)

    def append_all(self, sequence: Sequence_, amount: int) -> None:
        self._append(self.sequences, amount % 10)

    def _append(self, sequences: list[Sequence_], amount: int) -> None:
        before = [sequence.table.length for sequence in sequences]
        with self._nothing_changes_without_pages():
            copies = self.pool.append([sequence.table for sequence in sequences], amount)
            for copy in copies:
                self.known.add((copy.group, copy.target))  # NaN and all
        self._fill_fresh_pages(self.sequences)
        for sequence, length in zip(sequences, before, strict=True):
            if sequence.table.length > length:
                tokens = list(itertools.islice(self.numbers, amount))
                sequence.tokens += tokens
                self._write(sequence.table, length, tokens)

    def fork(self, sequence: Sequence_, amount: int) -> None:
        if len(self.sequences) < self.most:
            self.take(self.pool.fork(sequence.table), sequence.tokens)
            if sequence.cursors is not None:
                self.sequences[-1].cursors = list(sequence.cursors)

    def crop(self, sequence: Sequence_, amount: int) -> None:
        length = max(0, len(sequence.tokens) - amount)
        try:
            self.pool.crop([sequence.table], length)
        except CropError:
            assert sequence.table.length == len(sequence.tokens)
        else:
            del sequence.tokens[length:]
            sequence.cursors = None

    def slide(self, sequence: Sequence_, amount: int) -> None:
        self.pool.slide([sequence.table])

    def release(self, sequence: Sequence_, amount: int) -> None:
        self.sequences.remove(sequence)
        self.pool.release([sequence.table])
        self.pool.release([sequence.table])

    def lose(self, sequence: Sequence_, amount: int) -> None:
        """Garbage collection returns the pages, of a cycle too."""
        self.sequences.remove(sequence)
        lost = Lost()
        lost.self = lost  # type: ignore[attr-defined]
        weakref.finalize(lost, self.pool.abandon, [sequence.table])
        del lost
        gc.collect(0)

    def publish(self, sequence: Sequence_, amount: int) -> None:
        """Full pages stay as cached when their sequence ends."""
        if sequence.table.start == 0:
            self.published.append(list(sequence.tokens))
            if sequence.cursors is None:
                sequence.cursors = self.pool.match_prefix([]).cursors
            self.pool.publish_prefix(sequence.table, sequence.tokens, sequence.cursors)

    def reuse(self, amount: int) -> None:
        """A new sequence that begins with a published prefix, if there is one."""
        if len(self.sequences) == self.most or not self.published:
            return
        tokens = self.published[-1 - amount % min(3, len(self.published))]
        found = self.pool.match_prefix(tokens)
        if found.num_tokens:
            self.take(self.pool.adopt_prefix(found), tokens[: found.num_tokens])
            self.sequences[-1].cursors = found.cursors
            self.hits += 1
            self.hits_in_a_window += found.num_tokens > len(found.pages[1]) * P

    def drop(self, amount: int) -> None:
        self.pool.drop_prefix_cache()
        assert self.pool.stats().pages_cached == 0

    def trim(self, amount: int) -> None:
        self.pool.trim()

    def map_ahead(self, amount: int) -> None:
        self.pool.map_ahead(amount % 12)
        self.pool._ahead.wait()  # or it would go on while all is looked at

    def restore(self, sequence: Sequence_, amount: int) -> None:
        """Save a sequence's pages and load them as two rows of a batch."""
        if len(self.sequences) + 2 > self.most:
            return
        table = sequence.table
        pages = [table.pages(group) for group in range(2)]
        contents = [self._read(group, ids) for group, ids in enumerate(pages)]
        row = [list(range(len(ids))) for ids in pages]
        with self._nothing_changes_without_pages():
            tables = self.pool.restore(contents, [row, row], [table.start] * 2, table.length)
            for restored in tables:
                self.take(restored, sequence.tokens)

    def export(self, sequence: Sequence_, amount: int) -> None:
        group = amount % 2
        ids = sequence.table.pages(group)
        if ids and len(self.exports) < 3:
            page = ids[amount % len(ids)]
            view = self.pool.export_pages(page, group=group)
            self.exports.append(Export(group, [page], view, view.clone()))

    def unexport(self, amount: int) -> None:
        if self.exports:
            self.exports.pop(amount % len(self.exports))

    def take(self, table: PageTable, tokens: list[int]) -> None:
        """One more sequence, whose tokens are in its pages already."""
        self.known |= {(group, page) for group in range(2) for page in table.pages(group)}
        self.sequences.append(Sequence_(table, list(tokens)))

    def end(self) -> None:
        """Every sequence ends."""
        self.exports.clear()
        self.pool.release([sequence.table for sequence in self.sequences])
        self.sequences.clear()

    # --- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        for sequence in self.sequences:
            self.check_contents(sequence)
        if self.alone:
            self._check_pool()
            self._fill_given_back_pages()

    def _check_pool(self) -> None:
        pool, tables = self.pool, [sequence.table for sequence in self.sequences]
        stats = pool.stats()  # which also collects what was lost
        pool.check_invariants([*tables, *self.exports])  # type: ignore[list-item]
        for index, group in enumerate(stats.groups):
            held = {page for holder in [*tables, *self.exports] for page in holder.pages(index)}
            assert group.pages_used == len(held)
            assert group.pages_used + group.pages_cached + group.pages_free == group.pages_total
            assert group.bytes_in_use == group.pages_used * group.bytes_per_page
        cached = sum(group.pages_cached * group.bytes_per_page for group in stats.groups)
        assert stats.bytes_in_use + cached <= stats.bytes_total
        for export in self.exports:
            torch.testing.assert_close(export.view, export.contents, rtol=0, atol=0, equal_nan=True)

    def check_contents(self, sequence: Sequence_) -> None:
        table, length = sequence.table, sequence.table.length
        assert length == len(sequence.tokens)
        for layer in range(3):
            group, key_pages, value_pages = self.pool.layer(layer)
            self.pool.use_stream(key_pages.device)
            first = table.first_page(group)
            window = table.windows[group]
            oldest = table.start if window is None else max(table.start, length - window + 1)
            assert first * P <= oldest or first * P >= length
            low = max(first * P, table.start)
            if low >= length:
                continue
            ids = torch.tensor([table.pages(group)], dtype=torch.int32, device=key_pages.device)
            key, value = ops.gather_kv(key_pages, value_pages, ids)
            want = torch.tensor(sequence.tokens[low:], dtype=torch.float32, device=key.device)
            want += layer / 4
            for states, sign in ((key, 1), (value, -1)):
                got = states[0, :, low - first * P : length - first * P]
                assert torch.equal(got, (sign * want)[None, :, None].expand_as(got))

    # --- inside -----------------------------------------------------------------------------

    def _write(self, table: PageTable, position: int, tokens: list[int]) -> None:
        """The tokens' K and V, left padding too, as a batch of padded rows writes it."""
        for layer in range(3):
            group, key_pages, value_pages = self.pool.layer(layer)
            device = key_pages.device
            slots = torch.from_numpy(table.slots(position, position + len(tokens), group))
            numbers = torch.tensor(tokens, dtype=torch.float32, device=device)[:, None, None]
            key, value = (
                numbers.add(layer / 4).expand(-1, pages.shape[1], pages.shape[3])
                for pages in (key_pages, value_pages)
            )
            self.pool.use_stream(device)
            ops.write_kv(key, -value, key_pages, value_pages, slots.to(device))

    def _fill_fresh_pages(self, sequences: list[Sequence_]) -> None:
        """Pages that nobody held before the last step hold NaN, not the zeros of fresh memory."""
        held = {
            (group, page)
            for sequence in sequences
            for group in range(2)
            for page in sequence.table.pages(group)
        }
        for group, page in held - self.known:
            self._fill(group, page)
        self.known |= held

    def _fill_given_back_pages(self) -> None:
        """Free pages that still have memory behind them hold NaN, not the tokens they held."""
        for group, owner in enumerate(self.pool._groups):
            allocator = owner.allocator
            opened = {
                page for chunk in allocator.open_chunks() for page in allocator.chunk_pages(chunk)
            }
            kept = {
                page for page in opened if allocator.count(page or 1) or allocator.is_cached(page)
            }
            for page in {page for g, page in self.known if g == group} & opened - kept:
                self._fill(group, page)
            self.known -= {(g, page) for g, page in self.known if g == group and page not in kept}

    def _read(self, group: int, ids: list[int]) -> Tensor:
        pages = self.pool.pages(group)
        self.pool.use_stream(pages.device)
        return pages[torch.tensor(ids, dtype=torch.long, device=pages.device)].cpu()

    def _fill(self, group: int, page: int) -> None:
        pages = self.pool.pages(group)
        self.pool.use_stream(pages.device)
        pages[page] = float("nan")

    def _nothing_changes_without_pages(self) -> Unchanged:
        return Unchanged(self)


class Unchanged:
    """OutOfPages is an answer, but only if it leaves everything as it was."""

    def __init__(self, model: PoolModel):
        self.model = model

    def _snapshot(self) -> Any:
        pool = self.model.pool
        tables = [
            (s.table.length, [(s.table.first_page(g), s.table.pages(g)) for g in range(2)])
            for s in self.model.sequences
        ]
        return tables, [list(g.allocator._cached) for g in pool._groups], pool.stats().pages_used

    def __enter__(self) -> None:
        self.before = self._snapshot()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if not isinstance(error, OutOfPages):
            return False
        assert error.needed > error.available >= 0
        assert not self.model.alone or self._snapshot() == self.before
        self.model.outs += 1
        return True
