"""Flight: a step that was launched and not looked at yet, its tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.batch import to_device
from pageforge.engine.draw import uniforms
from pageforge.engine.logprobs import Logprobs, token_logprobs
from pageforge.engine.sampler import Sampled, Sampler
from pageforge.engine.sequence import Rows, Sequence
from pageforge.engine.step import Step

NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass
class Flight:
    """A step that was launched and not looked at yet: what it samples, and for whom.

    `rows [R]`: the sampled ones, with their `epochs` when it was launched. `tokens [R or more]`:
    int64 on the host, NO_TOKEN where logits made no sense, complete once `done` has come.
    """

    sequences: list[Sequence | None]  # of all rows then
    rows: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    tokens: Tensor = NO_TOKENS
    done: torch.cuda.Event | None = None
    errors: dict[int, Exception] = field(default_factory=dict)  # of logits processors, by place
    logprobs: Logprobs | None = None  # of the rows that ask, as `tokens` on the host
    logprob_places: npt.NDArray[np.int64] | None = None  # which of `rows` those are
    prompts: list[tuple[Sequence, int, Logprobs]] = field(default_factory=list)  # from a position
    scored: list[Sequence] = field(default_factory=list)  # of which no token is wanted: they end
    kept: list[Any] = field(default_factory=list)  # what must live until it is done
    caught_up: set[int] = field(default_factory=set)  # places of rows that moved, noted one by one

    def at(self, place: int) -> tuple[Sequence, int]:
        """A sampled sequence, and its token."""
        sequence = self.sequences[self.rows[place]]
        assert sequence is not None
        return sequence, int(self.tokens[place])


class HostTokens:
    """Where the tokens of flights come to: pinned memory and an event each, used again."""

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []

    def fetch(self, tokens: Tensor, flight: Flight) -> None:
        """Have `tokens`, `[R]` int64 on the model's device, come to `flight`.

        On the CPU they are there; on a GPU nobody waits for them.
        """
        if not tokens.is_cuda:
            flight.tokens = tokens
            return
        flight.tokens, flight.done = self._free.pop() if self._free else self._new()
        flight.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        flight.done.record()

    def take_back(self, flight: Flight) -> None:
        """Its tokens were looked at: another flight may have their place."""
        if flight.done is not None:
            self._free.append((flight.tokens, flight.done))

    def _new(self) -> tuple[Tensor, torch.cuda.Event]:
        tokens = torch.empty(self._max_rows, dtype=torch.int64, device="cpu", pin_memory=True)
        return tokens, torch.cuda.Event()


def sample(step: Step, rows: Rows, sampler: Sampler, flight: Flight) -> Sampled:
    """Choose a token for each of the rows of a step that gave logits.

    What else is asked for goes to `flight`, which is of this step: log-probabilities of these
    tokens and of prompts, and what logits processors raised.
    """
    chosen, logits = step.rows, step.logits
    assert logits is not None
    num_generated = (rows.length + rows.pending - rows.prompt)[chosen].astype(np.int64)
    uniform = torch.empty(0)
    if sampler.draws(chosen):
        uniform = to_device(uniforms(rows.seed[chosen], num_generated), logits.device)
    lines = lines_at(logits, step.places)
    sampled = sampler.sample(lines, chosen, uniform, num_generated, rows.generated)
    flight.errors = sampled.errors
    if sampled.logprobs is not None:
        flight.logprobs = sampled.logprobs.to_host()
    flight.logprob_places = sampled.logprob_indices
    flight.prompts = [
        (rows.at(row), first, _prompt_logprobs(logits[start:stop], rows, row, first).to_host())
        for row, first, start, stop in step.spans
    ]
    return sampled


def lines_at(values: Tensor, places: npt.NDArray[np.int64]) -> Tensor:
    """`values[places]`, which mostly are the first ones, one after the other.

    values: `[R or more]` or `[R or more, V]`. places: `[R]`, ascending.
    """
    count = len(places)
    if not count or places[-1] == count - 1:
        return values[:count]
    return values[to_device(places, values.device)]


def _prompt_logprobs(logits: Tensor, rows: Rows, row: int, first: int) -> Logprobs:
    """Of a prompt's tokens from position `first` on, given `logits` `[T, V]` before each."""
    wanted = rows.tokens[row, first : first + len(logits)].astype(np.int64)
    k = rows.at(row).params.prompt_logprobs
    assert k is not None
    return token_logprobs(logits, to_device(wanted, logits.device), k)
