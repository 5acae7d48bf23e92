"""Sequence and Rows: what the engine knows of each sequence, as plain Python and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pageforge.engine.params import SamplingParams
from pageforge.memory import PageTable
from pageforge.memory.prefix import PrefixCursor

EMPTY = np.iinfo(np.int64).max
"""The rank of a row without a sequence: after all others."""

NO_TOKEN = -1
"""What the host sees instead of a token where logits made no sense; never one that ends a sequence,
so that rows with fewer stop tokens are filled up with it."""

NO_CHUNK = np.iinfo(np.int32).max

LOGPROBS_CHUNK = 256
"""Prompt tokens a step whose logits are all asked for: they take memory, a vocabulary each."""

FIRST_WIDTH = 256
"""Tokens of a row for which there is room at first; it doubles as longer sequences come."""


class Sequence:
    """One completion on its way: a prompt, and what has been generated after it.

    There are no phases. `num_computed` tokens have K/V in pages, or will have when the steps
    launched so far are done; it catches up with the tokens that are known. While the sequence has a
    row, its numbers and tokens lie there, and here again when it loses it.
    """

    __slots__ = (
        "children",
        "cursors",
        "is_finished",
        "is_watched",
        "limit",
        "most_computed",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "owner",
        "params",
        "parent",
        "rank",
        "row",
        "seed",
        "shares",
        "step_tokens",
        "stop_ids",
        "swapped",
        "table",
        "tokens",
    )

    def __init__(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        rank: int,
        *,
        stop_ids: tuple[int, ...] = (),
        seed: int = 0,
        shares: bool = True,
        is_watched: bool = False,
        owner: Any = None,
    ):
        """`rank`: who comes first, the lowest. `stop_ids`: tokens that end it, and are part of it.

        `shares`: whether it takes known pages for its prefix, and does not compute them itself.
        `is_watched`: whether its tokens are asked for one by one. `owner`: whose it is.
        """
        self.tokens = prompt
        self.params = params
        self.rank = rank
        self.stop_ids = stop_ids
        self.seed = seed
        self.shares = shares and params.prompt_logprobs is None
        self.is_watched = is_watched
        self.owner = owner
        self.num_prompt = len(prompt)
        self.limit = len(prompt) + params.max_tokens
        # The last token's own K/V are never needed: nothing comes after it.
        self.most_computed = self.limit - 1
        self.step_tokens = NO_CHUNK if params.prompt_logprobs is None else LOGPROBS_CHUNK
        self.num_computed = 0
        self.num_pending = 0  # tokens that lie on the device, the host not knowing them yet
        self.num_cached = 0  # prompt tokens that a prefix hit, or a fork, saved
        self.num_preemptions = 0
        self.parent: Sequence | None = None  # whose prompt this one waits for, to fork it
        self.children: list[Sequence] = []
        self.table: PageTable | None = None
        self.cursors: list[PrefixCursor] = []  # how far its pages are published
        self.swapped: Any = None  # where its pages lie on the host
        self.row = -1
        self.is_finished = False

    @property
    def num_known(self) -> int:
        """Tokens that there are, those on their way from the device included."""
        return len(self.tokens) + self.num_pending

    @property
    def goal(self) -> int:
        """Tokens whose K/V can and shall be computed now."""
        return min(self.num_known, self.most_computed)

    @property
    def findable(self) -> list[int]:
        """The tokens whose pages others may have: all but the last one that it computes."""
        tokens: list[int] = self.tokens[: self.goal - 1].tolist()
        return tokens

    @property
    def pages(self) -> PageTable:
        """Its page table; one that runs has one."""
        assert self.table is not None
        return self.table

    def __repr__(self) -> str:
        return f"Sequence(rank={self.rank}, row={self.row}, tokens={len(self.tokens)})"


class Rows:
    """The running sequences, a row each: arrays `[max_running]` that are written in place.

    A step of sequences that all decode is planned and accounted for in a few operations on whole
    arrays, however many there are.
    """

    def __init__(self, max_running: int):
        self.sequences: list[Sequence | None] = [None] * max_running
        self.rank = np.full(max_running, EMPTY, np.int64)
        self.length = np.zeros(max_running, np.int32)  # tokens known to the host
        self.pending = np.zeros(max_running, np.int32)  # and on the device
        self.computed = np.zeros(max_running, np.int32)
        self.most_computed = np.zeros(max_running, np.int32)
        self.step_tokens = np.zeros(max_running, np.int32)
        self.room = np.zeros(max_running, np.int32)  # tokens that its pages hold
        self.prompt = np.zeros(max_running, np.int32)  # tokens of the prompt
        self.seed = np.zeros(max_running, np.uint64)
        self.is_watched = np.zeros(max_running, np.bool_)
        self.stop_ids = np.full((max_running, 1), NO_TOKEN, np.int64)  # wider as they come
        self.epoch = np.zeros(max_running, np.int64)  # counts the row's sequences
        self.tokens = np.zeros((max_running, FIRST_WIDTH), np.int32)
        self.num_running = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def end(self) -> int:
        """One more than the last row that has a sequence."""
        if not self.num_running:
            return 0
        return int(np.flatnonzero(self.rank != EMPTY)[-1]) + 1

    @property
    def wanted(self) -> npt.NDArray[np.int32]:
        """`[max_running]`: tokens whose K/V each row lacks now."""
        known = self.length + self.pending
        wanted: npt.NDArray[np.int32] = np.minimum(known, self.most_computed) - self.computed
        return wanted

    def free_row(self) -> int | None:
        """The lowest row without a sequence; None where all have one."""
        if self.num_running == len(self.sequences):
            return None
        return self.sequences.index(None)

    def at(self, row: int) -> Sequence:
        """The sequence of a row that has one."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def put(self, sequence: Sequence, row: int, room: int) -> None:
        """Give `sequence` a row; its pages have room for `room` tokens."""
        assert self.sequences[row] is None and sequence.row < 0
        count, num_stop_ids = len(sequence.tokens), len(sequence.stop_ids)
        self._widen(sequence.limit, num_stop_ids)
        # Nothing is called from here on, so that Python lets no interrupt in between.
        self.sequences[row] = sequence
        self.rank[row] = sequence.rank
        self.length[row] = count
        self.pending[row] = sequence.num_pending
        self.computed[row] = sequence.num_computed
        self.most_computed[row] = sequence.most_computed
        self.step_tokens[row] = sequence.step_tokens
        self.room[row] = room
        self.prompt[row] = sequence.num_prompt
        self.seed[row] = sequence.seed
        self.is_watched[row] = sequence.is_watched
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, :num_stop_ids] = sequence.stop_ids
        self.tokens[row, :count] = sequence.tokens
        self.epoch[row] += 1
        self.num_running += 1
        sequence.row = row

    def take(self, sequence: Sequence) -> None:
        """Take its row from `sequence`, and let it have its numbers back."""
        row = sequence.row
        assert self.sequences[row] is sequence
        self.refresh(sequence)
        # Nothing is called from here on, so that Python lets no interrupt in between.
        self.sequences[row] = None
        self.rank[row] = EMPTY
        self.length[row] = self.pending[row] = self.room[row] = 0
        self.computed[row] = self.most_computed[row] = 0
        self.epoch[row] += 1
        self.num_running -= 1
        sequence.row = -1

    def move(self, source: int, target: int) -> None:
        """The sequence of row `source` takes row `target`, which is free."""
        sequence = self.at(source)
        room = int(self.room[source])
        self.take(sequence)
        self.put(sequence, target, room)

    def refresh(self, sequence: Sequence) -> None:
        """Let a running sequence have its numbers and tokens, as they are now."""
        row = sequence.row
        sequence.tokens = self.tokens[row, : self.length[row]].copy()
        sequence.num_pending = int(self.pending[row])
        sequence.num_computed = int(self.computed[row])

    def tokens_of(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """The tokens that the host knows of a sequence, whether it runs or not."""
        row = sequence.row
        return sequence.tokens if row < 0 else self.tokens[row, : self.length[row]]

    def generated(self, row: int) -> list[int]:
        """The tokens that the host knows of a row, those of the prompt apart."""
        tokens: list[int] = self.tokens[row, self.prompt[row] : self.length[row]].tolist()
        return tokens

    def _widen(self, limit: int, num_stop_ids: int) -> None:
        missing = num_stop_ids - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        width = self.tokens.shape[1]
        if limit > width:
            wider = np.zeros((len(self.sequences), max(limit, 2 * width)), np.int32)
            wider[:, :width] = self.tokens
            self.tokens = wider
