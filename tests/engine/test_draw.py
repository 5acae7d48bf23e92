"""Draws: the hash behind them, and the distribution that they follow."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from pageforge.engine.draw import completion_seed, drawn, scaled, top_scores, uniforms

STANDARD_DEVIATIONS = 5  # of a chi-square about its mean, allowed; a fixed seed set, so no chance


def assert_like(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square against `expected` counts, of which none is small."""
    assert expected.min() >= 5
    freedom = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < freedom + STANDARD_DEVIATIONS * np.sqrt(2 * freedom)


SEED_SETS = {
    "one seed, all positions": (np.zeros(64_000, np.uint64), np.arange(64_000)),
    "neighbouring seeds": (np.arange(64_000, dtype=np.uint64), np.zeros(64_000, np.int64)),
    "high bits alone": (np.arange(64_000, dtype=np.uint64) << np.uint64(48), np.full(64_000, 7)),
}


@pytest.mark.parametrize(("seeds", "positions"), SEED_SETS.values(), ids=SEED_SETS.keys())
def test_uniforms_are_uniform_and_their_neighbours_independent(seeds, positions) -> None:
    found = uniforms(seeds, positions)
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() < 1
    cells = (found * 16).astype(int)
    assert_like(np.bincount((found * 64).astype(int), minlength=64), np.full(64, 1000.0))
    pairs = np.bincount(cells[:-1] * 16 + cells[1:], minlength=256)
    assert_like(pairs, np.full(256, (len(found) - 1) / 256))


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0, 5], np.uint64)
    positions = np.array([0, 0, 10**6, 1, 3])
    together = uniforms(seeds, positions)
    assert len(set(together)) == 5
    order = np.array([3, 0, 4])
    assert (uniforms(seeds[order], positions[order]) == together[order]).all()
    # Written down: results that were saved with a seed can be had again after an upgrade.
    assert (together[:3] * 2**24).astype(int).tolist() == [4727170, 14476323, 135651]


def test_completions_have_their_own_seeds() -> None:
    seeds = {completion_seed(seed, index) for seed in (0, 1, 2, 2**64 - 1) for index in range(64)}
    assert len(seeds) == 4 * 64 and all(0 <= seed < 2**64 for seed in seeds)
    assert completion_seed(7, 0) == 7


VOCAB = 12
LOGITS = torch.linspace(-1.5, 1.5, VOCAB)[torch.randperm(VOCAB, generator=torch.manual_seed(0))]


def counts_of(
    num_draws: int, logits=LOGITS, *, temperature=1.0, top_k=None, top_p=None, min_p=None
):
    """How often each token comes in draws of one distribution."""
    rows = logits.expand(num_draws, -1)
    top, best = rows.max(-1)
    column = functools.partial(torch.full, (num_draws, 1))
    scores = scaled(rows, top, column(temperature, dtype=torch.float32))
    if top_k is not None or top_p is not None:
        k = top_k or len(logits)
        p = None if top_p is None else column(top_p, dtype=torch.float64)
        scores = top_scores(scores, k, column(k, dtype=torch.int64), p)
    uniform = uniforms(np.arange(num_draws, dtype=np.uint64), np.zeros(num_draws, np.int64))
    p = None if min_p is None else column(min_p, dtype=torch.float32)
    tokens = drawn(scores, best, torch.from_numpy(uniform), p)
    return torch.bincount(tokens, minlength=len(logits)).numpy()


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    counts = counts_of(20_000, temperature=temperature)
    shares = (LOGITS.double() / temperature).softmax(0).numpy()
    often = shares * 20_000 >= 5
    expected = np.append(shares[often], shares[~often].sum() + 1e-300) * 20_000
    counts = np.append(counts[often], counts[~often].sum())
    if expected[-1] < 5:
        assert counts[-1] <= 20
        counts, expected = counts[:-1], expected[:-1]
    assert_like(counts, expected)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 4}, 4),
        ({"top_p": 0.5}, 3),
        ({"top_p": 0.85}, 7),
        ({"min_p": 0.3}, 5),
        ({"top_k": 6, "top_p": 0.5}, 2),  # half of what top_k keeps; of all it were 3
        ({"top_k": 6, "top_p": 0.9, "min_p": 0.5}, 3),
    ],
)
def test_draws_follow_the_softmax_of_what_is_kept(options: dict[str, float], kept: int) -> None:
    counts = counts_of(20_000, **options)
    top = LOGITS.argsort(descending=True)[:kept]
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[top] = LOGITS.double()[top].softmax(0) * 20_000
    assert (counts > 0).tolist() == (expected > 0).tolist()
    assert_like(counts[top], expected.numpy()[top])


def test_equal_logits_come_equally_often() -> None:
    assert_like(counts_of(20_000, torch.zeros(VOCAB)), np.full(VOCAB, 20_000 / VOCAB))
    # At an edge through equal ones, exactly so many are kept: those with the lowest ids.
    assert (counts_of(1000, torch.zeros(VOCAB), top_k=5) > 0).tolist() == [True] * 5 + [False] * 7
    logits = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 1.0])
    assert np.flatnonzero(counts_of(1000, logits, top_k=4)).tolist() == [0, 1, 3, 5]
    assert np.flatnonzero(counts_of(1000, logits, top_k=2)).tolist() == [1, 3]


@pytest.mark.parametrize("winners", [[0], [6], [7], [2, 5]])
def test_an_infinite_logit_wins(winners: list[int]) -> None:
    logits = torch.zeros(1, 8)
    logits[0, winners] = torch.inf
    top, best = logits.max(-1)
    scores = scaled(logits, top, torch.tensor([[0.5]]))
    assert drawn(scores, best, torch.tensor([0.9]), None).tolist() == winners[:1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
@pytest.mark.parametrize("kept", [[0], [7], [0, 7], [3, 4]])
def test_the_ends_of_the_range_draw_kept_tokens(uniform: float, kept: list[int]) -> None:
    scores = torch.full((1, 8), -torch.inf)
    scores[0, kept] = 0.0
    token = drawn(scores, torch.tensor([kept[0]]), torch.tensor([uniform]), None)
    assert int(token) == kept[int(uniform * len(kept))]
