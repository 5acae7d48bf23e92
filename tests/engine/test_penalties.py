"""Penalties: transformers' rule for repetition, OpenAI's for presence and frequency; the counts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pageforge.engine.penalties import Penalties, TokenCounts

VOCAB = 40
CPU = torch.device("cpu")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def apply(logits, counts, slots, repetition=1.0, presence=0.0, frequency=0.0) -> torch.Tensor:
    column = functools.partial(torch.full, (len(slots), 1))
    changed = logits.clone()
    penalties = Penalties(
        *(slice(None), torch.tensor(slots)),
        *(column(repetition), column(presence), column(frequency)),
    )
    penalties.apply_to(changed, counts)
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_is_transformers_rule(penalty: float) -> None:
    generator = np.random.default_rng(0)
    logits = 3 * torch.randn(4, VOCAB, generator=torch.manual_seed(2))
    counts = TokenCounts(VOCAB, CPU)
    context = generator.integers(0, VOCAB, (4, 12))  # 7 of the prompt, 5 generated
    slots = [counts.claim(row[:7], row[7:10]) for row in context]
    for step in (10, 11):
        counts.add(torch.tensor(slots), torch.from_numpy(context[:, step]))
    rule = RepetitionPenaltyLogitsProcessor(penalty)
    expected = rule(torch.from_numpy(context), logits.clone())
    assert torch.equal(apply(logits, counts, slots, repetition=penalty), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    counts = TokenCounts(VOCAB, CPU)
    slot = counts.claim(tokens(1, 2, 2), tokens(2, 5, 5, 5))
    changed = apply(torch.zeros(1, VOCAB), counts, [slot], presence=0.5, frequency=0.25)
    expected = torch.zeros(1, VOCAB)
    expected[0, 2], expected[0, 5] = -0.75, -1.25
    assert torch.equal(changed, expected)


def test_slots_are_counted_apart_and_are_clean_when_claimed_again() -> None:
    counts = TokenCounts(VOCAB, CPU)
    slots = [counts.claim(tokens(i), tokens(i, i + 1)) for i in range(5)]  # grows on the way
    assert sorted(slots) == [0, 1, 2, 3, 4]
    for i, slot in enumerate(slots):
        assert counts.in_prompt[slot].nonzero().flatten().tolist() == [i]
        assert counts.in_output[slot].nonzero().flatten().tolist() == [i, i + 1]
    counts.release(slots[2])
    assert counts.claim(tokens(9), tokens()) == slots[2]
    assert counts.in_prompt[slots[2]].nonzero().flatten().tolist() == [9]
    assert not counts.in_output[slots[2]].any()


def test_prompt_ids_beyond_the_logits_are_left_out() -> None:
    counts = TokenCounts(VOCAB, CPU)
    slot = counts.claim(tokens(3, VOCAB, VOCAB + 7), tokens())
    assert counts.in_prompt[slot].nonzero().flatten().tolist() == [3]


def test_nothing_is_held_before_a_row_has_penalties() -> None:
    counts = TokenCounts(VOCAB, CPU)
    assert counts.in_prompt.numel() == counts.in_output.numel() == 0


def test_counts_made_in_inference_mode_can_be_added_to_outside() -> None:
    counts = TokenCounts(VOCAB, CPU)
    with torch.inference_mode():
        slot = counts.claim(tokens(), tokens(1))
    counts.add(torch.tensor([slot]), torch.tensor([1]))
    assert counts.in_output[slot, 1] == 2
