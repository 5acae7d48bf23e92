"""The scheduler: who computes how many tokens in the next step, and who has to wait.

One rule: computed tokens catch up with known tokens. A prompt, a chunk of one, what a prefix hit
left over and a decoded token are all the same thing; so are a preempted sequence's tokens. `plan`
looks and decides; it changes nothing, and the engine carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pageforge.engine.sequence import EMPTY, Rows, Sequence
from pageforge.geometry import ceil_div, pages_for
from pageforge.memory import PageTable
from pageforge.memory.prefix import Prefix

TOGETHER = 32
"""Where more prompts wait than rows are free, they begin when one row in so many is free, several
in one step: each step with a prompt in it costs something beside the prompt's tokens. (Llama 3.1
8B's shape on an H200: 200 rows decode in 13.0 ms, and with a prompt of 200 tokens in 19.8, which in
a step full of prompts takes 4.8.)"""

PATIENCE = 16
"""Steps in which nobody begins for that reason, at most: rows must not stand idle for long."""


@dataclass(frozen=True)
class Limits:
    """`max_running` sequences at a time, `max_batch_tokens` tokens a step, pages of `page_size`."""

    max_running: int
    max_batch_tokens: int
    page_size: int


class Pages(Protocol):
    """What the scheduler asks of the pool. Numbers count pages of each layer group."""

    def available(self) -> int:
        """Pages that every group could hand out now."""

    def match(self, sequence: Sequence) -> Prefix:
        """The pages that hold its first tokens already."""

    def reclaimable(self, table: PageTable) -> int:
        """Pages that would be available if `table` was released."""


@dataclass(frozen=True)
class Admission:
    """`sequence` begins to run in `row`, and computes `num_tokens` tokens in this step at most.

    `prefix`: known pages that it begins with; None where it has pages, or shares none.
    """

    sequence: Sequence
    row: int
    num_tokens: int
    prefix: Prefix | None


@dataclass(frozen=True)
class Plan:
    """One step, or if somebody gives up pages what comes before another plan."""

    counts: npt.NDArray[np.int32]
    """`[max_running]`: tokens that each running row computes, those admitted now apart."""
    dropped: list[Sequence] = field(default_factory=list)
    """Waiting sequences that give up their pages."""
    preempted: list[Sequence] = field(default_factory=list)
    """Running sequences that give up row and pages, the youngest first."""
    admitted: list[Admission] = field(default_factory=list)
    stuck: Sequence | None = None
    """A sequence that cannot go on though nobody is left to give up pages for it."""


def plan(rows: Rows, waiting: list[Sequence], limits: Limits, pages: Pages, step: int) -> Plan:
    """The next step, which is number `step`.

    Tokens of a step are shared out to rows that lack one (they decode) first, then by rank. Where
    pages run out, waiting sequences drop theirs, then the youngest running ones are preempted: the
    oldest goes on in any case, so there is no livelock. Then waiting sequences are admitted in
    their order (which is by rank), prompts several at a time (see TOGETHER), as long as there are
    rows, tokens, and pages for all that they know and for a page more of everyone who runs.
    """
    counts = _share(rows, np.minimum(rows.wanted, rows.step_tokens), limits.max_batch_tokens)
    short = rows.computed + counts > rows.room
    # Most steps: all decode, in pages that they have.
    if not short.any() and not waiting:
        return Plan(counts)
    needed = pages_lacking(rows, rows.computed + counts, limits.page_size)
    room = pages.available() - int(needed.sum())
    if room < 0:
        return _make_room(rows, waiting, needed, -room, pages)
    admitted: list[Admission] = []
    if waiting:
        holds_back = step % PATIENCE != 0 and _holds_back(rows, waiting, counts, limits)
        admitted = list(_admit(rows, waiting, counts, room, limits, pages, holds_back))
    # Where nobody runs and nobody can begin, those that wait are in each other's way.
    is_blocked = waiting and not admitted and not rows.num_running
    holders = [each for each in waiting if each.table is not None] if is_blocked else []
    return Plan(counts, dropped=holders, admitted=admitted)


def _share(rows: Rows, wanted: npt.NDArray[np.int32], max_tokens: int) -> npt.NDArray[np.int32]:
    """Share `max_tokens` out among rows: those that want one token first, then by rank."""
    if int(wanted.sum()) <= max_tokens:
        return wanted
    order = np.lexsort((rows.rank, wanted > 1))
    before = np.cumsum(wanted[order]) - wanted[order]
    counts = np.zeros_like(wanted)
    counts[order] = np.clip(max_tokens - before, 0, wanted[order])
    return counts


def pages_lacking(
    rows: Rows, lengths: npt.NDArray[np.int32], page_size: int
) -> npt.NDArray[np.int32]:
    """Fresh pages that each row needs to hold `lengths` tokens.

    A row whose room ends inside a page shares that page, and copies it before it writes.
    """
    lacking = -(-lengths // page_size) - rows.room // page_size
    return np.where(lengths > rows.room, lacking, 0).astype(np.int32)


def _make_room(
    rows: Rows,
    waiting: list[Sequence],
    needed: npt.NDArray[np.int32],
    missing: int,
    pages: Pages,
) -> Plan:
    """Who gives up pages, so that the others can go on. Nobody computes: it is planned again then.

    A page that several hold is free only when all of them have let it go, so these may turn out
    to be too few.
    """
    dropped: list[Sequence] = []
    preempted: list[Sequence] = []
    nobody = np.zeros_like(needed)
    for sequence in reversed(waiting):
        if missing <= 0:
            break
        if sequence.table is not None:
            dropped.append(sequence)
            missing -= pages.reclaimable(sequence.table)
    oldest, *younger = np.argsort(rows.rank)[: rows.num_running].tolist()
    for row in reversed(younger):
        if missing <= 0:
            break
        sequence = rows.at(row)
        preempted.append(sequence)
        missing -= int(needed[row]) + pages.reclaimable(sequence.pages)
    stuck = None if dropped or preempted else rows.at(oldest)
    return Plan(nobody, dropped, preempted, stuck=stuck)


def _admit(
    rows: Rows,
    waiting: list[Sequence],
    counts: npt.NDArray[np.int32],
    room: int,
    limits: Limits,
    pages: Pages,
    holds_back: bool,
) -> Iterator[Admission]:
    """Who begins to run: the first of those that wait, as far as everything suffices.

    `holds_back`: no prompt. `room`: pages left over by those who run. What these know but have not
    computed yet, as only a part of it fits a step, has its pages promised.
    """
    size = limits.page_size
    running = rows.rank != EMPTY
    known = rows.computed + np.where(running, rows.wanted, 0)
    promised = int(pages_lacking(rows, known, size).sum())
    promised -= int(pages_lacking(rows, rows.computed + counts, size).sum())
    room -= promised
    num_running = rows.num_running
    free_rows = iter([row for row, taken in enumerate(rows.sequences) if taken is None])
    budget = limits.max_batch_tokens - int(counts.sum())
    computing = _first_uncomputed_pages(rows, counts, size)
    for sequence in waiting:
        if num_running == limits.max_running or budget <= 0 or sequence.num_pending:
            return
        if sequence.parent is not None:
            continue
        if holds_back and _has_prompt(sequence):
            return
        prefix, done, held = None, sequence.num_computed, 0
        if sequence.table is not None:
            held = done // size  # whole pages are shared; of the last one it gets its own
        elif sequence.swapped is None and sequence.shares:
            prefix = pages.match(sequence)
            done, held = prefix.num_tokens, prefix.num_used
            page = _page_after(sequence.tokens, done, size)
            if page in computing and len(sequence.tokens) > page[0] + size:
                return  # another row computes it in this step: in the next one it is a hit
            computing.add(page)
        fresh = pages_for(sequence.goal, size) - held
        if fresh + num_running > room:
            return
        num_tokens = min(sequence.goal - done, sequence.step_tokens, budget)
        yield Admission(sequence, next(free_rows), num_tokens, prefix)
        room -= fresh
        budget -= num_tokens
        num_running += 1


def _holds_back(
    rows: Rows, waiting: list[Sequence], counts: npt.NDArray[np.int32], limits: Limits
) -> bool:
    """Whether no prompt begins yet, though rows are free: with others it will, in one step.

    In a step that computes a part of a prompt anyway there is nothing to gain.
    """
    num_free = limits.max_running - rows.num_running
    together = limits.max_running // TOGETHER
    if num_free >= together or bool((counts > 1).any()):
        return False
    prompts = (sequence for sequence in waiting if _has_prompt(sequence))
    return sum(1 for _ in islice(prompts, together)) > num_free


def _has_prompt(sequence: Sequence) -> bool:
    """Whether it could begin, with more than one token to compute."""
    return sequence.parent is None and sequence.goal - sequence.num_computed > 1


def _first_uncomputed_pages(
    rows: Rows, counts: npt.NDArray[np.int32], page_size: int
) -> set[tuple[int, bytes]]:
    """Where each row that has more than one token to compute begins to: (position, its tokens)."""
    return {
        _page_after(rows.tokens[row, : rows.length[row]], int(rows.computed[row]), page_size)
        for row in np.flatnonzero(counts > 1).tolist()
        if rows.at(row).cursors  # else it publishes none
    }


def _page_after(
    tokens: npt.NDArray[np.int32], num_computed: int, page_size: int
) -> tuple[int, bytes]:
    """(position, tokens) of the page that the next token lies in."""
    first = num_computed // page_size * page_size
    return first, tokens[first : first + page_size].tobytes()


def least_pages(num_prompt: int, max_tokens: int, page_size: int) -> int:
    """Pages without which such a sequence could never end, though it was alone."""
    return ceil_div(max(num_prompt, num_prompt + max_tokens - 1), page_size)
