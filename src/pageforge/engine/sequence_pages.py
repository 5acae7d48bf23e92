"""SequencePages: how sequences come by pages, and who is told of them: the device, and others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pageforge.engine.runner import Runner
from pageforge.engine.scheduler import Admission, pages_lacking
from pageforge.engine.sequence import Rows, Sequence
from pageforge.errors import OutOfPages
from pageforge.geometry import pages_for
from pageforge.memory import PageTable
from pageforge.memory.prefix import Prefix
from pageforge.pool import PagePool

GROWN_AHEAD = 4
"""Tokens for which rows have pages beforehand where there are plenty. It takes the host as long to
claim those of several steps as those of one."""

MANY = 32
"""Running sequences from which on some need a page in every step or two."""

MAPPED_AHEAD = 2 * GROWN_AHEAD
"""Tokens for whose pages there is memory before they are claimed."""


class SequencePages:
    """Pages of one pool for the sequences of `rows`, and for those that wait.

    It answers what the scheduler asks: it is one of its `Pages`.
    """

    def __init__(self, pool: PagePool, runner: Runner, rows: Rows):
        self._pool = pool
        self._runner = runner
        self._rows = rows
        self._size = pool.geometry.page_size
        self._has_windows = any(group.shape.window for group in pool.geometry.groups)

    # --- what the scheduler asks ------------------------------------------------------------

    def available(self) -> int:
        """Pages that every group could hand out now."""
        return self._pool.num_available

    def match(self, sequence: Sequence) -> Prefix:
        """The pages that hold its first tokens already."""
        return self._pool.match_prefix(sequence.findable)

    def reclaimable(self, table: PageTable) -> int:
        """Pages that would be available if `table` was released."""
        return self._pool.num_reclaimable(table)

    # --- claims -----------------------------------------------------------------------------

    def lacking(self, admission: Admission) -> int:
        """Pages that a sequence has yet to get for all tokens that it knows."""
        sequence, prefix = admission.sequence, admission.prefix
        held = 0 if sequence.table is None else sequence.num_computed
        if prefix is not None:
            held = prefix.num_tokens
        return pages_for(sequence.goal, self._size) - held // self._size

    def begin(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """Give it a page table, over the known pages of others if it shares them."""
        if prefix is None:
            sequence.table = self._pool.new_table()
            return
        sequence.table, sequence.cursors = self._pool.adopt_prefix(prefix), prefix.cursors
        sequence.num_computed = prefix.num_tokens
        if not sequence.num_preemptions:
            sequence.num_cached = prefix.num_tokens

    def grow(self, counts: npt.NDArray[np.int32]) -> None:
        """Claim the pages that a step of `counts` `[max_running]` tokens writes to.

        Raises OutOfPages.
        """
        rows, size = self._rows, self._size
        lengths = rows.computed + counts
        if not (lengths > rows.room).any():
            return
        if rows.num_running >= MANY:
            more = np.minimum(lengths + GROWN_AHEAD, np.maximum(lengths, rows.most_computed))
            lacking = int(pages_lacking(rows, more, size).sum())
            if lacking + rows.num_running <= self._pool.num_available:  # a page each is left
                lengths = more
        short = np.flatnonzero(lengths > rows.room)
        if self._has_windows:
            tables = [rows.at(row).pages for row in short.tolist()]
            self._pool.slide(tables, rows.computed[short].tolist())
        missing = -(-lengths[short] // size) * size - rows.room[short]
        growing: dict[int, list[int]] = {}
        for row, num_tokens in zip(short.tolist(), missing.tolist(), strict=True):
            growing.setdefault(num_tokens, []).append(row)
        for num_tokens, of_rows in growing.items():
            sequences = [rows.at(row) for row in of_rows]
            self._pool.append([sequence.pages for sequence in sequences], num_tokens)
            rows.room[of_rows] += num_tokens
            for sequence in sequences:
                self.show(sequence, (sequence.pages.length - num_tokens) // size)

    def shortage(self, sequence: Sequence) -> OutOfPages:
        """Why a running sequence cannot go on."""
        needed = pages_for(int(self._rows.computed[sequence.row]) + 1, self._size)
        return OutOfPages(needed, self._pool.num_available, "others hold the pool's pages")

    # --- who is told ------------------------------------------------------------------------

    def show(self, sequence: Sequence, first: int) -> None:
        """Let the device know a running sequence's pages from logical page `first` on."""
        stop = pages_for(sequence.pages.length, self._size)
        for group in range(len(self._pool.geometry.groups)):
            entries = sequence.pages.entries(first, stop, group)
            self._runner.set_pages(group, sequence.row, first, entries)

    def publish_prompts(self, counts: npt.NDArray[np.int32]) -> None:
        """Let others find the pages that prompts fill in this step, for theirs come after it.

        `counts`: `[max_running]`, tokens that it computes.
        """
        rows, size = self._rows, self._size
        in_prompt = rows.computed < rows.prompt
        if not in_prompt.any():
            return
        reached = rows.computed + counts
        fills = in_prompt & (reached // size > rows.computed // size)
        for row in np.flatnonzero(fills).tolist():
            self.publish(rows.at(row), int(reached[row]))

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the pages of its first `num_tokens` tokens, which are known."""
        if sequence.shares and sequence.cursors:
            tokens = self._rows.tokens_of(sequence)[:num_tokens]
            self._pool.publish_prefix(sequence.pages, tokens.tolist(), sequence.cursors)
