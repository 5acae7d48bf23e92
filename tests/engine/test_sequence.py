"""Rows: what a sequence has beside its numbers is in its row, wherever that is."""

from __future__ import annotations

import numpy as np

from pageforge.engine.params import SamplingParams
from pageforge.engine.sequence import NO_TOKEN, Rows, Sequence


def sequence(prompt: list[int], stop_ids: tuple[int, ...], seed: int, watched: bool) -> Sequence:
    params = SamplingParams(max_tokens=4)
    tokens = np.array(prompt, np.int32)
    return Sequence(tokens, params, 0, stop_ids=stop_ids, seed=seed, is_watched=watched)


def test_stop_tokens_seed_and_watch_are_those_of_the_rows_sequence() -> None:
    rows = Rows(3)
    few, many = sequence([5], (7,), 2**64 - 1, True), sequence([5], (1, 2, 2**63 - 1), 3, False)
    rows.put(few, 0, 8)
    rows.put(many, 2, 8)  # all rows get room for as many
    assert rows.stop_ids.tolist() == [[7, -1, -1], [-1, -1, -1], [1, 2, 2**63 - 1]]
    assert rows.seed.tolist() == [2**64 - 1, 0, 3]
    assert rows.is_watched.tolist() == [True, False, False]
    rows.take(few)
    rows.move(2, 0)
    assert rows.stop_ids[0].tolist() == [1, 2, 2**63 - 1]
    assert (rows.seed[0], rows.is_watched[0]) == (3, False)
    rows.put(few, 2, 8)
    assert rows.stop_ids[2].tolist() == [7, NO_TOKEN, NO_TOKEN]
    assert (rows.seed[2], rows.is_watched[2]) == (2**64 - 1, True)


def test_known_tokens_are_found_whether_it_runs_or_not() -> None:
    rows, one = Rows(2), sequence([5, 6], (), 0, False)
    assert rows.tokens_of(one).tolist() == [5, 6]
    rows.put(one, 1, 8)
    rows.tokens[1, 2:4] = 7, 8
    rows.length[1] = 3  # the last one is not known yet
    assert rows.tokens_of(one).tolist() == [5, 6, 7]
    assert rows.generated(1) == [7]
    rows.take(one)
    assert rows.tokens_of(one).tolist() == [5, 6, 7]
