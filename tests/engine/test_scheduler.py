"""`plan`: who computes how many tokens, who begins, who gives up pages. On rows made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pageforge.engine import scheduler
from pageforge.engine.params import SamplingParams
from pageforge.engine.scheduler import Limits, Plan, least_pages
from pageforge.engine.sequence import Rows, Sequence
from pageforge.geometry import pages_for
from pageforge.memory import PageTable
from pageforge.memory.prefix import Prefix, PrefixCursor

P = 4


@dataclass
class Pages:
    """A pool of so many free pages; tables are named by who holds them."""

    free: int = 100
    found: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: (tokens that are found, pages of these that others use)."""
    reclaims: dict[int, int] = field(default_factory=dict)
    """By table: pages that its end would bring; otherwise all that it holds."""

    def available(self) -> int:
        return self.free

    def match(self, sequence: Sequence) -> Prefix:
        num_tokens, num_used = self.found.get(sequence.rank, (0, 0))
        return Prefix(num_tokens, (), num_used, [])

    def reclaimable(self, table: PageTable) -> int:
        return self.reclaims.get(id(table), pages_for(table.length, P))


class Table:
    """Stands for a page table with room for `length` tokens."""

    def __init__(self, length: int):
        self.length = length


def sequence(
    rank: int, length: int, *, prompt: int | None = None, first: int = 0, **options: Any
) -> Sequence:
    """One of `length` known tokens, `first` the first of them, that waits."""
    tokens = np.arange(length, dtype=np.int32) + first
    made = Sequence(
        tokens[: length if prompt is None else prompt],
        SamplingParams(max_tokens=50, temperature=0, prompt_logprobs=options.pop("logprobs", None)),
        rank,
        **options,
    )
    made.tokens = tokens
    return made


def running(*places: tuple[int, int, int, int], max_running: int = 8) -> Rows:
    """Rows of sequences of (rank, known tokens, computed ones, tokens that their pages hold)."""
    rows = Rows(max_running)
    for row, (rank, length, computed, room) in enumerate(places):
        made = sequence(rank, length, first=100 * rank)
        made.num_computed = computed
        made.table = Table(room)  # type: ignore[assignment]
        made.cursors = [PrefixCursor(None, b"", b"")]  # it publishes its pages
        rows.put(made, row, room)
    return rows


def plan(
    rows: Rows,
    waiting: list[Sequence] | None = None,
    pages: Pages | None = None,
    *,
    budget: int = 64,
    step: int = 0,
) -> Plan:
    waiting, pages = waiting or [], pages or Pages()
    return scheduler.plan(rows, waiting, Limits(len(rows), budget, P), pages, step)


def counts(found: Plan) -> list[int]:
    return found.counts[: np.flatnonzero(found.counts).max(initial=-1) + 1].tolist()


def begins(found: Plan) -> list[tuple[int, int, int]]:
    return [(each.sequence.rank, each.row, each.num_tokens) for each in found.admitted]


# Tokens of a step


def test_who_lacks_a_token_computes_it() -> None:
    assert counts(plan(running((0, 6, 5, 8), (1, 9, 2, 12), (2, 3, 3, 4)))) == [1, 7]


def test_who_decodes_comes_first_and_then_the_oldest() -> None:
    rows = running((3, 20, 0, 20), (1, 20, 10, 20), (2, 11, 10, 12), (0, 5, 4, 8))
    assert counts(plan(rows, budget=30)) == [18, 10, 1, 1]
    assert counts(plan(rows, budget=12)) == [0, 10, 1, 1]
    assert counts(plan(rows, budget=5)) == [0, 3, 1, 1]
    assert counts(plan(rows, budget=1)) == [0, 0, 0, 1]


def test_tokens_on_their_way_count_as_known() -> None:
    rows = running((0, 6, 6, 8))
    rows.pending[0] = 1
    assert counts(plan(rows)) == [1]


def test_the_last_token_is_not_computed() -> None:
    rows = running((0, 6, 5, 8))
    rows.most_computed[0] = 5
    assert counts(plan(rows)) == []


def test_prompts_whose_logits_are_wanted_come_in_small_chunks() -> None:
    rows = Rows(2)
    made = sequence(0, 600, logprobs=1)
    made.table = Table(600)  # type: ignore[assignment]
    rows.put(made, 0, 600)
    assert counts(plan(rows, budget=512)) == [256]
    assert begins(plan(Rows(2), [sequence(0, 600, logprobs=1)], Pages(200), budget=512)) == [
        (0, 0, 256)
    ]


# Who begins


def test_the_first_that_wait_begin_in_free_rows() -> None:
    rows = running((0, 6, 5, 8), (1, 6, 5, 8), (2, 6, 5, 8), max_running=4)
    rows.take(rows.sequences[1])
    waiting = [sequence(3, 5), sequence(4, 7, first=50), sequence(5, 2, first=70)]
    assert begins(plan(rows, waiting)) == [(3, 1, 5), (4, 3, 7)]


def full_but(free: int, *, waiting: int, **options: Any) -> tuple[Rows, list[Sequence]]:
    """64 rows, so many of them free, and so many prompts that wait."""
    rows = running(*((rank, 6, 5, 8) for rank in range(64 - free)), max_running=64)
    return rows, [sequence(100 + i, 5, first=50 * i, **options) for i in range(waiting)]


def begin(rows: Rows, waiting: list[Sequence], step: int = 1) -> list[int]:
    found = plan(rows, waiting, Pages(free=1000), budget=1000, step=step)
    return [each.sequence.rank for each in found.admitted]


@pytest.mark.parametrize(
    ("free", "waiting", "count"),
    [
        (1, 1, 1),  # nobody is kept waiting for others who do not exist
        (1, 2, 0),
        (1, 9, 0),
        (2, 2, 2),
        (2, 9, 2),
        (3, 2, 2),
        (3, 9, 3),
    ],
)
def test_where_more_wait_than_rows_are_free_several_begin_together(
    free: int, waiting: int, count: int
) -> None:
    rows, behind = full_but(free, waiting=waiting)
    assert begin(rows, behind) == [100 + i for i in range(count)]
    assert counts(plan(rows, behind, Pages(free=1000), budget=1000, step=1)) == [1] * (64 - free)


def test_but_not_for_long() -> None:
    rows, behind = full_but(1, waiting=9)
    begun = [step for step in range(64) if begin(rows, behind, step)]
    assert begun == [0, 16, 32, 48]


def test_children_of_a_prompt_that_waits_keep_nobody_waiting() -> None:
    rows, (parent,) = full_but(1, waiting=1)
    _, children = full_but(1, waiting=7)
    for child in children:
        child.parent = parent
    assert begin(rows, [parent, *children]) == [100]


def test_who_has_one_token_to_compute_is_not_kept_waiting() -> None:
    """It may have been swapped, or be the child of a prompt: its step has no prompt in it."""
    rows, behind = full_but(1, waiting=9)
    for each in behind[:3]:
        each.num_computed = each.goal - 1
        each.table = Table(8)  # type: ignore[assignment]
    assert begin(rows, behind) == [100]
    assert begin(rows, behind[1:] + behind[:1]) == [101]
    assert begin(rows, behind[3:] + behind[:3]) == []


def test_where_a_prompt_is_computed_anyway_nobody_is_kept_waiting() -> None:
    rows, behind = full_but(1, waiting=9)
    rows.length[5], rows.room[5] = 9, 12
    assert begin(rows, behind) == [100]


def test_with_few_rows_each_is_taken_at_once() -> None:
    rows = running(*((rank, 6, 5, 8) for rank in range(30)), max_running=31)
    _, behind = full_but(1, waiting=9)
    assert begin(rows, behind) == [100]


def test_nobody_waits_for_rows_that_only_an_end_would_free() -> None:
    """However few rows there is memory for."""
    for most in range(1, 200):
        behind = [sequence(i, 5, first=50 * i) for i in range(most + 1)]
        limits = Limits(most, 10**6, P)
        found = scheduler.plan(Rows(200), behind, limits, Pages(free=10**4), step=1)
        assert len(found.admitted) == most


def test_what_a_step_has_left_is_shared_out_in_order() -> None:
    waiting = [sequence(1, 6), sequence(2, 9, first=50), sequence(3, 3, first=70)]
    rows = running((0, 6, 5, 8))
    assert begins(plan(rows, waiting, budget=10)) == [(1, 1, 6), (2, 2, 3)]
    assert begins(plan(rows, waiting, budget=1)) == []


def test_found_tokens_are_not_computed_again() -> None:
    pages = Pages(found={1: (8, 0)})
    assert begins(plan(Rows(2), [sequence(1, 11)], pages)) == [(1, 0, 3)]
    assert begins(plan(Rows(2), [sequence(1, 11, shares=False)], pages)) == [(1, 0, 11)]


def test_what_was_found_is_handed_on() -> None:
    alone, swapped = sequence(2, 11, first=50, shares=False), sequence(3, 11, first=100)
    swapped.num_computed, swapped.swapped = 10, object()
    admitted = plan(Rows(4), [sequence(1, 11), alone, swapped], Pages(found={1: (8, 1)})).admitted
    assert [each.prefix for each in admitted] == [Prefix(8, (), 1, []), None, None]


@pytest.mark.parametrize(
    ("free", "found", "can"),
    [
        (3, (0, 0), True),  # 11 tokens take 3 pages
        (2, (0, 0), False),
        (1, (8, 2), True),  # two of them are there, in use
        (2, (8, 0), False),  # cached ones are counted as free
        (3, (8, 0), True),
    ],
)
def test_pages_for_all_that_it_knows(free: int, found: tuple[int, int], can: bool) -> None:
    pages = Pages(free, found={1: found})
    assert bool(begins(plan(Rows(2), [sequence(1, 11)], pages))) == can


def test_a_page_more_for_everyone_who_runs() -> None:
    rows = running((0, 6, 5, 8), (1, 6, 5, 8))
    assert begins(plan(rows, [sequence(2, 4)], Pages(3)))
    assert not begins(plan(rows, [sequence(2, 4)], Pages(2)))
    waiting = [sequence(2, 4), sequence(3, 4, first=50)]
    assert len(begins(plan(rows, waiting, Pages(5)))) == 2
    assert len(begins(plan(rows, waiting, Pages(4)))) == 1


def test_pages_of_a_prompt_that_is_computed_in_parts_are_promised() -> None:
    """16 tokens of which 6 fit this step: 2 pages now, and 2 that nobody else may have."""
    rows = running((0, 16, 0, 0))
    waiting = [sequence(1, 4, first=50)]
    assert not begins(plan(rows, waiting, Pages(6), budget=6))
    rows = running((0, 16, 0, 0), (1, 9, 8, 12))
    rows.step_tokens[0] = 5
    assert begins(plan(rows, [sequence(2, 4, first=50)], Pages(7)))
    assert not begins(plan(rows, [sequence(2, 4, first=50)], Pages(6)))


def test_nobody_overtakes() -> None:
    waiting = [sequence(1, 40), sequence(2, 4, first=50)]
    assert not begins(plan(running((0, 6, 5, 8)), waiting, Pages(9)))


def test_a_token_on_its_way_must_land_first() -> None:
    late = sequence(1, 4)
    late.num_pending = 1
    assert not begins(plan(Rows(2), [late, sequence(2, 4, first=50)]))


def test_swapped_sequences_and_forks_have_computed_already() -> None:
    swapped, fork = sequence(1, 11), sequence(2, 11, first=50)
    swapped.num_computed, swapped.swapped = 10, object()
    fork.num_computed, fork.table = 10, Table(10)  # type: ignore[assignment]
    assert begins(plan(Rows(4), [swapped, fork], Pages(5))) == [(1, 0, 1), (2, 1, 1)]
    # The one needs three pages; the other a copy of its last one, and there is one for each.
    assert begins(plan(Rows(4), [swapped, fork], Pages(4))) == [(1, 0, 1)]
    assert begins(plan(Rows(4), [swapped], Pages(2))) == []


def test_forks_wait_for_their_parent_and_hold_nobody_up() -> None:
    parent, child, other = sequence(1, 5), sequence(2, 5), sequence(3, 5, first=50)
    child.parent, parent.children = parent, [child]
    assert begins(plan(Rows(4), [parent, child, other])) == [(1, 0, 5), (3, 1, 5)]


# A page that another row computes


def test_a_page_that_another_one_computes_in_this_step_is_waited_for() -> None:
    first, second = sequence(1, 11), sequence(2, 11)
    assert begins(plan(Rows(4), [first, second])) == [(1, 0, 11)]
    rows = running((1, 11, 0, 0))
    assert begins(plan(rows, [sequence(2, 11, first=100)])) == []
    assert begins(plan(rows, [sequence(2, 11, first=100, shares=False)])) == [(2, 1, 11)]
    rows.at(0).cursors = []  # it was swapped, and publishes nothing any more
    assert begins(plan(rows, [sequence(2, 11, first=100)])) == [(2, 1, 11)]
    rows.at(0).cursors = [PrefixCursor(None, b"", b"")]
    rows.computed[0] = 10  # it only decodes by now
    assert begins(plan(rows, [sequence(2, 11, first=100)], Pages(found={2: (8, 2)})))


def test_a_page_that_is_no_whole_one_is_not_waited_for() -> None:
    assert len(begins(plan(Rows(4), [sequence(1, 4), sequence(2, 4)]))) == 2
    assert len(begins(plan(Rows(4), [sequence(1, 5), sequence(2, 5)]))) == 1


def test_another_page_at_the_same_place_is_not_waited_for() -> None:
    waiting = [sequence(1, 11), sequence(2, 11, first=1)]
    assert len(begins(plan(Rows(4), waiting))) == 2


# Who gives up pages


def ranks(sequences: list[Sequence]) -> list[int]:
    return [each.rank for each in sequences]


def test_the_youngest_gives_up_its_pages() -> None:
    rows = running((5, 9, 8, 8), (2, 9, 8, 8), (7, 9, 8, 8))
    found = plan(rows, pages=Pages(2))
    assert ranks(found.preempted) == [7]
    assert not found.counts.any() and not found.admitted and found.stuck is None
    assert ranks(plan(rows, pages=Pages(3)).preempted) == []


def test_as_many_as_are_needed_but_never_the_oldest() -> None:
    rows = running((5, 9, 8, 8), (2, 40, 8, 8), (7, 9, 8, 8))
    assert ranks(plan(rows, pages=Pages(7)).preempted) == [7]
    assert ranks(plan(rows, pages=Pages(2)).preempted) == [7, 5]
    assert ranks(plan(rows, pages=Pages(0)).preempted) == [7, 5]


def test_pages_that_others_hold_as_well_do_not_count() -> None:
    rows = running((5, 9, 8, 8), (2, 9, 8, 8), (7, 9, 9, 12))
    shared = Pages(1, reclaims={id(rows.sequences[2].table): 0})
    assert ranks(plan(rows, pages=shared).preempted) == [7, 5]


def test_those_that_wait_drop_their_pages_first() -> None:
    rows = running((0, 9, 8, 8), (1, 9, 8, 8))
    fork, other, swapped = sequence(2, 9), sequence(3, 9), sequence(4, 9)
    fork.table, fork.num_computed = Table(8), 8  # type: ignore[assignment]
    swapped.swapped, swapped.num_computed = object(), 8
    found = plan(rows, [fork, other, swapped], Pages(1))
    assert (ranks(found.dropped), ranks(found.preempted)) == ([2], [])
    assert not found.counts.any()


def test_one_that_is_left_alone_is_stuck() -> None:
    rows = running((3, 9, 8, 8))
    found = plan(rows, [sequence(4, 5)], Pages(0))
    assert found.stuck is rows.sequences[0]
    assert plan(rows, pages=Pages(1)).stuck is None


def test_where_nobody_runs_or_can_begin_those_that_wait_drop_their_pages() -> None:
    large, fork = sequence(1, 20), sequence(2, 6)
    fork.table, fork.num_computed = Table(5), 5  # type: ignore[assignment]
    assert ranks(plan(Rows(2), [large, fork], Pages(4)).dropped) == [2]
    assert ranks(plan(Rows(2), [fork], Pages(0)).dropped) == [2]
    assert ranks(plan(Rows(2), [large, fork], Pages(5)).dropped) == []
    assert ranks(plan(running((0, 6, 5, 8)), [large, fork], Pages(4)).dropped) == []


# What always holds


def test_a_plan_changes_nothing_and_is_the_same_again() -> None:
    rows = running((5, 9, 8, 8), (2, 40, 8, 8), (7, 9, 8, 8))
    fork = sequence(8, 9)
    fork.table, fork.num_computed = Table(8), 8  # type: ignore[assignment]
    waiting = [fork, sequence(9, 11), sequence(10, 11)]

    columns = ("rank", "length", "pending", "computed", "most_computed", "step_tokens", "room")
    before = {name: getattr(rows, name).copy() for name in (*columns, "prompt", "epoch", "tokens")}
    members = [[getattr(each, name) for name in SLOTS] for each in waiting]
    for free in (0, 2, 50):
        first, second = plan(rows, waiting, Pages(free)), plan(rows, waiting, Pages(free))
        assert np.array_equal(first.counts, second.counts)
        assert first.admitted == second.admitted
        assert (first.dropped, first.preempted) == (second.dropped, second.preempted)
        for name, column in before.items():
            assert np.array_equal(getattr(rows, name), column), name
        assert [[getattr(each, name) for name in SLOTS] for each in waiting] == members
        assert ranks(waiting) == [8, 9, 10]


SLOTS = [name for name in Sequence.__slots__ if name != "tokens"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"),
    [(1, 0, 1), (4, 0, 1), (4, 1, 1), (4, 2, 2), (5, 0, 2), (5, 4, 2), (5, 5, 3)],
)
def test_least_pages(prompt: int, max_tokens: int, pages: int) -> None:
    """The last token's K/V are not needed."""
    assert least_pages(prompt, max_tokens, P) == pages
