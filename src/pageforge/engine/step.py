"""What a step is: its numbers, in the order in which they travel to the device, and their sizes.

A step of decoding has one token for each row, token `t` that of row `t`, and brings the changes of
page tables with it. A mixed step has the tokens of its rows packed one after the other, as many as
each computes, and the slot of each. Where the device alone may know the last token of a row yet,
`-1 - row` stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pageforge.engine.sequence import Rows
from pageforge.graphs import bucket

StepArrays = list[npt.NDArray[Any]]
"""A step's numbers: int64 arrays, then int32 ones; `part_lengths` says how many, and how long."""

PromptSpan = tuple[int, int, int, int]
"""Of a prompt whose logits are all asked for: its row, the position of the first token that they
are about, the first of the logits, and behind the last."""


class StepShape(NamedTuple):
    """What a captured step has baked in: padded numbers of tokens, rows and logits."""

    tokens: int
    rows: int
    logits: int
    decodes: bool  # token `t` is the one of row `t`
    is_greedy: bool  # it gives the best tokens, and not the logits


class Step(NamedTuple):
    """A step that was launched.

    `rows [R]`: those that know no more tokens after it, so that one is to be sampled for each, from
    `logits[places]`, or is `tokens[places]`. `spans`: of prompts whose logits are all asked for.
    """

    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    logits: Tensor | None  # [R or more, V]
    tokens: Tensor | None  # [R or more] int64, the best; NO_TOKEN where logits made no sense
    spans: list[PromptSpan]


class Padding(NamedTuple):
    """The sizes that steps are padded to, so that a few captured ones serve all."""

    is_used: bool  # else steps keep their sizes: none is captured
    min_rows: int  # of a step that decodes
    max_rows: int  # of any step
    max_tokens: int

    def decode(self, num_rows: int, is_greedy: bool) -> StepShape:
        """The shape of a step that decodes the first `num_rows` rows."""
        if self.is_used:
            num_rows = min(bucket(max(num_rows, self.min_rows)), self.max_rows)
        return StepShape(num_rows, num_rows, num_rows, True, is_greedy)

    def mixed(self, num_tokens: int) -> StepShape:
        """The shape that a mixed step is padded to."""
        # As many rows as there can be: those without queries cost hardly anything, and there are
        # fewer sizes to capture.
        tokens = min(bucket(num_tokens), self.max_tokens)
        return StepShape(tokens, self.max_rows, self.max_rows, False, False)

    def is_padded(self, shape: StepShape) -> bool:
        """Whether it is a padded size; where all logits of a prompt are asked for it is none."""
        return self.is_used and (shape.decodes or shape == self.mixed(shape.tokens))


def part_lengths(shape: StepShape, num_groups: int) -> tuple[list[int], list[int]]:
    """How long each of a step's int64 arrays is, and each of its int32 ones."""
    each_group = [shape.rows if shape.decodes else shape.tokens] * num_groups
    if shape.decodes:
        return [shape.tokens, shape.tokens, *each_group], [shape.rows, *each_group]
    return [shape.tokens, shape.tokens, *each_group, shape.logits], [shape.rows, shape.rows + 1]


def decode_arrays(
    rows: Rows,
    counts: npt.NDArray[np.int32],
    known: npt.NDArray[np.int64],
    shape: StepShape,
    changes: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]],
) -> StepArrays:
    """A step of decoding: tokens, positions, places that change; lengths, page ids there.

    `counts [end]`: 1 for the rows that are part of it, else 0. `known`: rows whose token the host
    knows. `changes`: for each layer group places in its flat page table, and the page ids that
    belong there, `[shape.rows]` each.
    """
    end = len(counts)
    computed = rows.computed[:end]
    tokens, positions = np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.int64)
    lengths = np.zeros(shape.rows, np.int32)
    tokens[:end] = np.arange(-1, -1 - end, -1)
    if len(known):
        tokens[known] = rows.tokens[known, computed[known]]
    positions[:end] = computed
    np.add(computed, 1, out=lengths[:end])
    idle = np.flatnonzero(counts == 0)
    if len(idle):
        tokens[idle], positions[idle], lengths[idle] = 0, 0, 0
    places, page_ids = zip(*changes, strict=True)
    return [tokens, positions, *places, lengths, *page_ids]


def mixed_arrays(
    rows: Rows,
    counts: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.int64],
    asking: npt.NDArray[np.bool_] | None,
    page_tables: Sequence[npt.NDArray[np.int32]],
    page_size: int,
) -> tuple[StepShape, StepArrays, npt.NDArray[np.int64], list[PromptSpan]]:
    """A mixed step: tokens, positions, slots, tokens whose logits are wanted; lengths, bounds.

    `counts [end]`: tokens of each row. `chosen`: rows to sample a token for. `asking`:
    `[max_running]`, rows for whose prompts all logits are wanted. `page_tables [R, M]`: of each
    layer group. Returns its shape, its numbers, and `places` and `spans` of Step.
    """
    end, total = len(counts), int(counts.sum())
    computed = rows.computed[:end]
    bounds = np.zeros(end + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    row_of = np.repeat(np.arange(end), counts)
    positions = np.arange(total) - bounds[row_of] + computed[row_of]
    is_known = positions < rows.length[row_of]
    columns = np.minimum(positions, rows.tokens.shape[1] - 1)
    tokens = np.where(is_known, rows.tokens[row_of, columns], -1 - row_of)
    slots = []
    for table in page_tables:
        page_ids = table[row_of, positions // page_size].astype(np.int64)
        slots.append(np.where(page_ids > 0, page_ids * page_size + positions % page_size, -1))
    lengths = np.where(counts > 0, computed + counts, 0).astype(np.int32)
    wanted = bounds[chosen + 1].astype(np.int64) - 1  # the last token of each of these
    places, spans = np.arange(len(chosen)), []
    if asking is not None:
        is_wanted = asking[row_of] & (positions + 1 < rows.prompt[row_of])
        is_wanted[wanted] = True
        last, wanted = wanted, np.flatnonzero(is_wanted)
        places = np.searchsorted(wanted, last)
        for row in np.flatnonzero(asking[:end] & (counts > 0)).tolist():
            first = int(computed[row]) + 1  # the logits of a token are about the next one
            start = int(np.searchsorted(wanted, bounds[row]))
            count = min(int(counts[row]), int(rows.prompt[row]) - first)
            spans.append((row, first, start, start + count))
    shape = StepShape(total, end, len(wanted), False, False)
    return shape, [tokens, positions, *slots, wanted, lengths, bounds], places, spans


def padded_mixed(arrays: StepArrays, shape: StepShape, padded: StepShape) -> StepArrays:
    """A mixed step's numbers with tokens, rows and logits of nobody behind them."""
    tokens, positions, *slots, wanted, lengths, bounds = arrays
    more_tokens, more_rows = padded.tokens - shape.tokens, padded.rows - shape.rows
    return [
        np.pad(tokens, (0, more_tokens)),
        np.pad(positions, (0, more_tokens)),
        *(np.pad(of_group, (0, more_tokens), constant_values=-1) for of_group in slots),
        np.pad(wanted, (0, padded.logits - shape.logits)),
        np.pad(lengths, (0, more_rows)),
        np.pad(bounds, (0, more_rows), mode="edge"),
    ]
