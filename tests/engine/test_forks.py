"""Forks: who waits for whose prompt, and what is left to the others when one of them ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.engine.fake_model import FakePool, geometry

from pageforge.engine.forks import Forks
from pageforge.engine.params import SamplingParams
from pageforge.engine.sequence import Rows, Sequence

P = 4


@pytest.fixture
def pool() -> Iterator[FakePool]:
    with FakePool(geometry(P), max_pages=8) as pool:
        yield pool


def family(count: int, length: int = 6) -> list[Sequence]:
    prompt, params = np.arange(length, dtype=np.int32), SamplingParams(max_tokens=4)
    first, *others = (Sequence(prompt, params, rank) for rank in range(count))
    first.children = others
    for other in others:
        other.parent = first
    return [first, *others]


def computing(pool: FakePool, rows: Rows, sequence: Sequence, num_computed: int) -> None:
    """It runs in row 0, and so many of its tokens are computed."""
    sequence.table = pool.new_table()
    pool.append([sequence.pages], len(sequence.tokens))
    sequence.num_computed = num_computed
    rows.put(sequence, 0, sequence.pages.length)


def test_all_but_the_last_token_of_a_prompt_is_shared(pool: FakePool) -> None:
    rows, forks = Rows(2), Forks(pool)
    parent, one, other = family(3)
    forks.add(parent)
    forks.share(rows)  # it does not run yet
    computing(pool, rows, parent, 4)
    forks.share(rows)  # nor is its prompt computed
    assert one.parent is other.parent is parent and one.table is None
    rows.computed[0] = 5
    forks.share(rows)
    assert one.parent is other.parent is None and not parent.children
    for child in (one, other):
        assert child.num_computed == child.num_cached == child.pages.length == 5
        assert child.pages.entries(0, 2, 0) == parent.pages.entries(0, 2, 0)
    assert pool.stats().pages_used == 2
    forks.share(rows)
    assert pool.stats().pages_used == 2


def test_a_prompt_of_one_token_has_nothing_to_share(pool: FakePool) -> None:
    rows, forks = Rows(2), Forks(pool)
    parent, one = family(2, length=1)
    forks.add(parent)
    computing(pool, rows, parent, 0)
    forks.share(rows)
    assert one.parent is None and one.table is None and one.num_computed == 0


def test_the_first_child_takes_the_place_of_a_parent_that_ends(pool: FakePool) -> None:
    rows, forks = Rows(2), Forks(pool)
    parent, one, two, three = family(4)
    forks.add(parent)
    forks.leave(parent)
    assert not parent.children
    assert one.parent is None and one.children == [two, three]
    assert two.parent is three.parent is one
    forks.leave(two)
    assert two.parent is None
    computing(pool, rows, one, 5)
    forks.share(rows)
    assert two.table is None
    assert three.parent is None and three.num_computed == 5


def test_a_last_child_waits_for_nobody(pool: FakePool) -> None:
    forks = Forks(pool)
    parent, one = family(2)
    forks.add(parent)
    forks.leave(parent)
    assert one.parent is None and not one.children
    forks.leave(one)
