"""SequencePages: who gets how many pages when, and that the device and others are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.engine.fake_model import FakePool, FakeRunner, geometry

from pageforge import pool as pool_module
from pageforge.engine.params import SamplingParams
from pageforge.engine.scheduler import Admission
from pageforge.engine.sequence import Rows, Sequence
from pageforge.engine.sequence_pages import GROWN_AHEAD, MANY, SequencePages
from pageforge.errors import OutOfPages
from pageforge.memory.prefix import Prefix

P = 4


class Held:
    """A pool, rows, and the pages of the sequences in them."""

    def __init__(self, max_pages: int, max_running: int = 4, windows: Any = (None,)):
        self.pool = FakePool(geometry(P, windows), max_pages=max_pages)
        self.runner = FakeRunner(self.pool, max_running, 64, 16 * P)
        self.rows = Rows(max_running)
        runner: Any = self.runner
        self.pages = SequencePages(self.pool, runner, self.rows)

    def new(self, count: int, max_tokens: int = 40) -> Sequence:
        prompt = np.arange(count, dtype=np.int32)
        return Sequence(prompt, SamplingParams(max_tokens=max_tokens), self.rows.num_running)

    def run(self, sequence: Sequence, row: int) -> None:
        prefix = self.pages.match(sequence)
        self.pages.begin(sequence, prefix)
        self.rows.put(sequence, row, sequence.pages.length)

    def counts(self, **of_rows: int) -> Any:
        counts = np.zeros(len(self.rows), np.int32)
        for name, count in of_rows.items():
            counts[int(name[1:])] = count
        return counts

    def on_device(self, row: int) -> list[int]:
        table: list[int] = self.runner.tables[0][row].tolist()
        return [page for page in table if page]


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held(max_pages=8)
    yield held
    held.pool.close()


def test_pages_are_claimed_to_their_end_and_the_device_knows_them(held: Held) -> None:
    one, other = held.new(9), held.new(2)
    held.run(one, 1)
    held.run(other, 3)
    held.pages.grow(held.counts(r1=6, r3=2))
    assert held.rows.room.tolist() == [0, 8, 0, 4]
    assert held.on_device(1) == one.pages.entries(0, 2, 0)
    assert held.on_device(3) == other.pages.entries(0, 1, 0)
    held.rows.computed[[1, 3]] = 6, 2
    held.pages.grow(held.counts(r1=2, r3=1))  # they have room
    assert held.pool.stats().pages_used == 3
    held.rows.computed[1] = 8
    held.pages.grow(held.counts(r1=1))
    assert held.rows.room.tolist() == [0, 12, 0, 4]
    assert held.on_device(1) == one.pages.entries(0, 3, 0)


def test_where_there_are_too_few_nothing_is_claimed(held: Held) -> None:
    one = held.new(40)
    held.run(one, 0)
    with pytest.raises(OutOfPages):
        held.pages.grow(held.counts(r0=33))
    assert held.rows.room[0] == 0 and held.pool.stats().pages_used == 0
    held.pages.grow(held.counts(r0=32))
    held.rows.computed[0] = 32
    error = held.pages.shortage(one)
    assert "others hold the pool's pages" in str(error)
    assert (error.needed, error.available) == (9, 0)


@pytest.mark.parametrize("spare", [0, 1])
def test_many_rows_grow_ahead_where_a_page_each_is_left(spare: int) -> None:
    """Rows that fill their page with this step get the next one already, if there are plenty."""
    held = Held(max_pages=3 * MANY - 1 + spare, max_running=MANY)
    for row in range(MANY):
        held.run(held.new(1), row)
    held.rows.room[:] = 0
    held.pages.grow(np.full(MANY, P, np.int32))
    assert GROWN_AHEAD <= P
    assert held.rows.room.tolist() == [2 * P if spare else P] * MANY
    held.pool.close()


def test_nobody_grows_past_its_last_token() -> None:
    held = Held(max_pages=4 * MANY, max_running=MANY)
    for row in range(MANY):
        held.run(held.new(1, max_tokens=P if row % 2 else P + 1), row)
    held.pages.grow(np.full(MANY, P, np.int32))
    assert held.rows.room.tolist() == [2 * P, P] * (MANY // 2)
    held.pool.close()


def test_pages_out_of_the_window_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ROLLBACK", 0)
    held = Held(max_pages=8, windows=(P,))
    held.run(held.new(4), 0)
    for count in range(4):
        held.pages.grow(held.counts(r0=P))
        held.rows.computed[0] += P
        assert held.pool.stats().pages_used == min(count + 1, 2)
    held.pool.close()


def test_filled_pages_of_prompts_are_found_by_others(held: Held) -> None:
    one = held.new(11)
    held.run(one, 0)
    counts = held.counts(r0=7)
    held.pages.grow(counts)
    assert held.pages.match(held.new(11)).num_tokens == 0
    held.pages.publish_prompts(counts)
    held.rows.computed[0] = 7
    assert held.pages.match(held.new(11)).num_tokens == 4
    held.pages.publish_prompts(held.counts())  # nothing more is computed
    assert held.pages.match(held.new(11)).num_tokens == 4
    held.pages.publish(one, 8)
    assert held.pages.match(held.new(11)).num_tokens == 8
    other = held.new(11)
    held.run(other, 2)
    assert other.num_computed == other.num_cached == 8
    assert other.pages.entries(0, 2, 0) == one.pages.entries(0, 2, 0)


def test_what_is_computed_again_was_not_saved(held: Held) -> None:
    one = held.new(9)
    held.run(one, 0)
    held.pages.grow(held.counts(r0=8))
    held.pages.publish(one, 8)
    other = held.new(9)
    other.num_preemptions = 1
    held.run(other, 1)
    assert (other.num_computed, other.num_cached) == (8, 0)


def test_one_that_shares_nothing_publishes_nothing(held: Held) -> None:
    one = held.new(9)
    held.pages.begin(one, None)
    held.rows.put(one, 0, 0)
    held.pages.grow(held.counts(r0=8))
    held.pages.publish(one, 8)
    assert held.pages.match(held.new(9)).num_tokens == 0


def test_what_it_lacks_for_all_that_it_knows(held: Held) -> None:
    def lacking(sequence: Sequence, prefix: Prefix | None) -> int:
        return held.pages.lacking(Admission(sequence, 0, 1, prefix))

    assert lacking(held.new(9), None) == 3
    assert lacking(held.new(9), Prefix(4, (), 1, [])) == 2
    one = held.new(9)
    held.pages.begin(one, None)
    held.pool.append([one.pages], 6)
    one.num_computed = 6
    assert lacking(one, None) == 2  # of the page that it has begun it gets its own
    assert held.pages.reclaimable(one.pages) == 2
    assert held.pages.available() == 6
