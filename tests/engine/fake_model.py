"""A stand-in for a model and its sampler: the next token is a hash of all tokens before it.

Each token is written to the pages through the page tables that the core sets, as K its id and as V
the hash of all tokens up to it, and every step reads a row's pages back from the first one on. So a
stale page table, a page shared wrongly or handed out too early, a copy that was not made and a swap
that lost something all show, in `FakeRunner.faults` and in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.engine.core import Core
from pageforge.engine.flight import Flight
from pageforge.engine.params import SamplingParams
from pageforge.engine.sampler import Sampled
from pageforge.engine.sequence import Rows
from pageforge.engine.sequence import Sequence as OneSequence
from pageforge.engine.step import Step
from pageforge.errors import OutOfPages
from pageforge.geometry import KVGeometry, LayerGroup, LayerShape, pages_for
from pageforge.pool import PagePool

VOCABULARY = 5
"""So few that prompts begin alike."""

MODULUS = 1_048_573
"""A prime; float32 holds all numbers below it."""


class PlantedFault(Exception):
    """What a test makes the model raise."""


def hashes(tokens: Sequence[int]) -> list[int]:
    """Of the first one token, the first two, and so on."""
    found, value = [], 1
    for token in tokens:
        value = (value * 48_271 + token + 1) % MODULUS
        found.append(value)
    return found


def next_token(value: int, seed: int) -> int:
    return (value // 7 + seed) % VOCABULARY


def completion(
    prompt: Sequence[int], max_tokens: int, *, seed: int = 0, stop_ids: Sequence[int] = ()
) -> list[int]:
    """Prompt and completion, as they must come out."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(hashes(tokens)[-1], seed))
        if tokens[-1] in stop_ids:
            break
    return tokens


def geometry(page_size: int, windows: Sequence[int | None] = (None,)) -> KVGeometry:
    """One layer for each of `windows`, which stores two numbers for each token.

    Pages may be smaller than a real pool's: the policy does not care, and boundaries come sooner.
    """
    groups = [
        LayerGroup((layer,), LayerShape(1, 1, 1, "float32", window), page_size)
        for layer, window in enumerate(windows)
    ]
    return KVGeometry(tuple(groups), page_size)


class FakePool(PagePool):
    """A pool whose device may be full.

    It refuses the next `refusals` requests for pages, and has memory for `memory` pages in use.
    """

    refusals = 0
    memory = 1 << 30
    num_refused = 0

    def _reserve(self, needed: Sequence[int]) -> None:
        used = sum(group.allocator.num_used for group in self._groups)
        if any(needed) and (self.refusals or used + sum(needed) > self.memory):
            self.refusals = max(0, self.refusals - 1)
            self.num_refused += 1
            raise OutOfPages(sum(needed), 0, "the device is full")
        super()._reserve(needed)


class FakeRunner:
    """What Core asks of a Runner."""

    def __init__(self, pool: PagePool, max_running: int, max_batch_tokens: int, max_tokens: int):
        self.faults: list[str] = []
        self.spoilt: set[OneSequence] = set()
        """Sequences whose next logits make no sense."""
        self.failures = 0
        """Steps that are going to fail."""
        self.max_batch_tokens = max_batch_tokens
        width = pages_for(max_tokens, pool.geometry.page_size)
        self.windows = [group.shape.window for group in pool.geometry.groups]
        self.tables = [np.zeros((max_running, width), np.int32) for _ in self.windows]
        self.last_tokens = np.full(max_running, -1)
        self.page_size = pool.geometry.page_size
        self.memory = []
        for group in pool.geometry.groups:
            _, keys, values = pool.layer(group.layers[0])
            keys[1:], values[1:] = torch.nan, torch.nan
            self.memory.append((keys[:, 0, :, 0].numpy(), values[:, 0, :, 0].numpy()))

    def set_pages(self, group: int, row: int, first: int, page_ids: list[int]) -> None:
        self.tables[group][row, first : first + len(page_ids)] = page_ids

    def move_row(self, source: int, target: int) -> None:
        self.last_tokens[target] = self.last_tokens[source]
        for table in self.tables:
            table[target] = table[source]

    def keep_tokens(self, rows: npt.NDArray[np.int64], tokens: Tensor) -> None:
        self.last_tokens[rows] = tokens.numpy()

    def launch(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        asking: npt.NDArray[np.bool_] | None,
        *,
        greedy: bool,
    ) -> Step:
        assert asking is None
        active = np.flatnonzero(counts).tolist()
        self.check(counts.sum() <= self.max_batch_tokens, "more tokens than a step may have")
        if self.failures:
            self.failures -= 1
            raise PlantedFault
        known = {row: self.tokens_of(rows, row) for row in active}
        for row in active:  # as a model does, layer by layer: all is written before it is read
            first, stop = int(rows.computed[row]), int(rows.computed[row] + counts[row])
            self.check(0 <= first < stop <= len(known[row]), f"row {row} computes {first}:{stop}")
            self.write(row, known[row], first, stop)
        chosen, logits = [], []
        for row in active:
            stop = int(rows.computed[row] + counts[row])
            value = self.read(row, known[row], int(rows.computed[row]), stop)
            if stop == len(known[row]):
                sequence = rows.sequences[row]
                is_spoilt = sequence in self.spoilt
                self.spoilt.discard(sequence)
                chosen.append(row)
                logits.append(-1 if is_spoilt else next_token(value, sequence.seed))
        tokens = torch.tensor(logits, dtype=torch.int64)
        rows_chosen, places = np.array(chosen, np.int64), np.arange(len(chosen))
        if not greedy:
            return Step(rows_chosen, places, tokens[:, None], None, [])
        self.keep_tokens(rows_chosen, tokens.clamp(min=0))
        return Step(rows_chosen, places, None, tokens, [])

    def tokens_of(self, rows: Rows, row: int) -> list[int]:
        tokens = rows.tokens[row, : rows.length[row]].tolist()
        return tokens + [int(self.last_tokens[row])] * int(rows.pending[row])

    def write(self, row: int, tokens: list[int], first: int, stop: int) -> None:
        places = np.arange(first, stop)
        for table, (keys, values) in zip(self.tables, self.memory, strict=True):
            pages = table[row, places // self.page_size]
            self.check((pages > 0).all(), f"row {row} has no page for {first}:{stop}")
            keys[pages, places % self.page_size] = tokens[first:stop]
            values[pages, places % self.page_size] = hashes(tokens[:stop])[first:]

    def read(self, row: int, tokens: list[int], computed: int, stop: int) -> int:
        """The hash of a row's tokens before `stop`, from its pages.

        All that tokens `computed` to `stop - 1` see is checked.
        """
        found = 0
        for table, window, (keys, values) in zip(
            self.tables, self.windows, self.memory, strict=True
        ):
            first = 0 if window is None else max(0, computed - window + 1)
            places = np.arange(first, stop)
            pages = table[row, places // self.page_size]
            read = [memory[pages, places % self.page_size].tolist() for memory in (keys, values)]
            wanted = [tokens[first:stop], hashes(tokens[:stop])[first:]]
            self.check(read == wanted, f"row {row}: read {read}, expected {wanted}")
            last = read[1][-1]
            found = int(last) if last == last else 0
        return found

    def check(self, holds: bool, fault: str) -> None:
        """Core catches what a model raises, so faults are gathered."""
        if not holds:
            self.faults.append(fault)


class FakeSampler:
    """What Core asks of a Sampler. The logits are the token itself; -1: they make no sense."""

    def __init__(self, max_rows: int):
        self.rows: list[SamplingParams | None] = [None] * max_rows

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        eos_ids: Sequence[int],
    ) -> None:
        assert self.rows[row] is None
        self.rows[row] = params

    def clear_row(self, row: int) -> None:
        assert self.rows[row] is not None
        self.rows[row] = None

    def clear(self) -> None:
        self.rows = [None] * len(self.rows)

    def move_row(self, source: int, target: int) -> None:
        assert self.rows[target] is None
        self.rows[target], self.rows[source] = self.rows[source], None

    def takes_best(self, rows: npt.NDArray[np.int64]) -> bool:
        """By turns, so that tokens come both ways."""
        return int(rows.sum()) % 2 == 0

    def draws(self, rows: npt.NDArray[np.int64]) -> bool:
        return False

    def sample(
        self,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        uniform: Tensor,
        num_generated: npt.NDArray[np.int64],
        generated: Callable[[int], list[int]],
    ) -> Sampled:
        assert all(self.rows[row] is not None for row in rows)
        tokens = logits[:, 0]
        return Sampled(tokens.clamp(min=0), tokens < 0, {}, None, np.zeros(0, np.int64))


class _Done:
    """Stands for the event after a step: its tokens come to the host when it is waited for."""

    def __init__(self, flight: Flight):
        self._flight = flight
        self._tokens = flight.tokens.clone()
        flight.tokens.fill_(VOCABULARY)  # no token, and no sign of a bad one

    def synchronize(self) -> None:
        self._flight.tokens.copy_(self._tokens)


class CoreInFlight(Core):
    """A core as it is on a GPU: each step is launched before the last one's tokens are known."""

    def _sample(self, step: Step) -> Flight:
        flight = super()._sample(step)
        done: Any = _Done(flight)
        flight.done = done
        return flight
