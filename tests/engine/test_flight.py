"""Flight: what a step's logits give to those who asked, and tokens on their way to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pageforge.engine.flight import Flight, HostTokens, lines_at, sample
from pageforge.engine.params import SamplingParams
from pageforge.engine.sampler import Sampler
from pageforge.engine.sequence import Rows, Sequence
from pageforge.engine.step import PromptSpan, Step

VOCABULARY = 7


def running(*placed: tuple[int, list[int], SamplingParams]) -> tuple[Rows, Sampler]:
    """Sequences in rows: (row, prompt, params); each one's seed is 10 more than its row."""
    rows, sampler = Rows(4), Sampler(4, VOCABULARY, torch.device("cpu"))
    for rank, (row, prompt, params) in enumerate(placed):
        sequence = Sequence(np.array(prompt, np.int32), params, rank, seed=row + 10)
        rows.put(sequence, row, 8)
        sampler.set_row(row, params, prompt_tokens=prompt, output_tokens=[], eos_ids=())
    return rows, sampler


def flight_of(
    rows: Rows,
    sampler: Sampler,
    chosen: list[int],
    places: list[int],
    logits: torch.Tensor,
    spans: list[PromptSpan],
) -> tuple[Flight, list[int]]:
    step = Step(np.array(chosen), np.array(places), logits, None, spans)
    flight = Flight(rows.sequences.copy(), step.rows, rows.epoch[step.rows])
    return flight, sample(step, rows, sampler, flight).tokens.tolist()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, temperature=0, **options)


def test_logprobs_are_those_of_the_rows_and_prompts_that_ask() -> None:
    rows, sampler = running(
        (0, [1, 2], greedy()), (2, [1, 2, 3], greedy(logprobs=2, prompt_logprobs=1))
    )
    torch.manual_seed(0)
    logits = torch.randn(4, VOCABULARY)
    # Row 0 has the first line; of row 2 two are about the prompt, from position 1 on.
    flight, tokens = flight_of(rows, sampler, [0, 2], [0, 3], logits, [(2, 1, 1, 3)])
    assert tokens == logits[[0, 3]].argmax(-1).tolist()
    logprobs = logits.log_softmax(-1)
    assert flight.logprob_places is not None and flight.logprobs is not None
    assert flight.logprob_places.tolist() == [1]
    assert flight.logprobs.chosen.tolist() == [logprobs[3].max()]
    ((sequence, first, of_prompt),) = flight.prompts
    assert (sequence, first) == (rows.at(2), 1)
    assert of_prompt.chosen.tolist() == [logprobs[1, 2], logprobs[2, 3]]
    assert of_prompt.top.shape == (2, 1)


def test_nobody_asks() -> None:
    rows, sampler = running((1, [1], greedy()))
    flight, tokens = flight_of(rows, sampler, [1], [0], torch.eye(VOCABULARY)[4:5], [])
    assert tokens == [4]
    assert (flight.errors, flight.logprobs, flight.prompts) == ({}, None, [])


def test_what_a_logits_processor_raises_is_kept_by_place() -> None:
    seen: list[list[int]] = []
    error = RuntimeError("by the test")

    def processor(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(tokens))
        raise error

    rows, sampler = running((0, [1], greedy()), (3, [1, 2], greedy(logits_processors=(processor,))))
    rows.tokens[3, 2] = 5
    rows.length[3] = 3
    flight, _ = flight_of(rows, sampler, [0, 3], [0, 1], torch.zeros(2, VOCABULARY), [])
    assert flight.errors == {1: error}
    assert seen == [[5]]  # what was generated, the prompt apart


def test_a_draw_follows_from_the_rows_seed_and_how_many_tokens_it_has() -> None:
    params = SamplingParams(max_tokens=30, temperature=1)
    rows, sampler = running((0, [1], params), (1, [1], params))
    logits = torch.zeros(2, VOCABULARY)

    def draws(chosen: list[int]) -> list[list[int]]:
        found = []
        for length in range(1, 20):
            rows.length[:2] = length
            _, tokens = flight_of(rows, sampler, chosen, [0, 1], logits, [])
            found.append(tokens)
        return found

    first = draws([0, 1])
    assert draws([0, 1]) == first
    assert len({tuple(tokens) for tokens in first}) > 5
    of_one = [one for one, _ in first]
    assert of_one != [other for _, other in first]
    rows.seed[1] = rows.seed[0]
    assert [other for _, other in draws([0, 1])] == of_one


@pytest.mark.parametrize("places", [[], [0], [0, 1, 2], [1], [0, 2], [1, 4]])
@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_lines(places: list[int], shape: tuple[int, ...]) -> None:
    values = torch.arange(5 * 3)[: 5 * 3 if len(shape) == 2 else 5].view(shape)
    found = lines_at(values, np.array(places, np.int64))
    assert torch.equal(found, values[places])


def test_tokens_of_the_cpu_are_there_at_once() -> None:
    rows, _ = running((0, [1], greedy()), (2, [1], greedy()))
    chosen = np.array([0, 2])
    flight, host = Flight(rows.sequences.copy(), chosen, rows.epoch[chosen]), HostTokens(4)
    assert len(flight.tokens) == 0
    host.fetch(torch.tensor([5, 6]), flight)
    assert flight.done is None
    assert [flight.at(place) for place in (0, 1)] == [(rows.at(0), 5), (rows.at(2), 6)]
    host.take_back(flight)
    other = Flight(rows.sequences.copy(), chosen, rows.epoch[chosen])
    host.fetch(torch.tensor([3, 4]), other)
    assert flight.tokens.tolist() == [5, 6]


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Event:
    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self) -> None:
        self.num_recorded += 1


def test_memory_for_tokens_of_a_gpu_is_used_again_once_they_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []

    def empty(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory and device == "cpu"
        pinned.append(size)
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    rows, host = Rows(4), HostTokens(4)

    def fetched(*tokens: int) -> tuple[Flight, Any]:
        flight = Flight(rows.sequences.copy(), np.arange(len(tokens)), rows.epoch[: len(tokens)])
        host.fetch(torch.tensor(tokens).as_subclass(OnDevice), flight)
        return flight, flight.done

    first, done = fetched(5, 6, 3)
    second, other = fetched(1, 2)
    assert first.tokens.tolist() == [5, 6, 3, 0]  # of all rows that there may be
    assert second.tokens.tolist() == [1, 2, 0, 0]
    assert done is not other and done.num_recorded == other.num_recorded == 1
    host.take_back(first)
    third, again = fetched(4)
    assert third.tokens is first.tokens and third.tokens[0] == 4
    assert again is done and done.num_recorded == 2
    assert second.tokens.tolist() == [1, 2, 0, 0]
    assert pinned == [4, 4]
