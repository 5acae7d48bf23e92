"""The recorded run is a real one, shows all that may happen to a page, and ends as it began."""

from __future__ import annotations

import itertools

import pytest

from pageforge.report import trace
from pageforge.report.trace import PAGES, Moment, record


@pytest.fixture(scope="module")
def moments() -> list[Moment]:
    return record()


def test_it_is_the_same_every_time(moments: list[Moment]) -> None:
    assert record() == moments


def test_it_begins_and_ends_with_nothing(moments: list[Moment]) -> None:
    for moment in (moments[0], moments[-1]):
        assert (moment.used, moment.cached, moment.sequences, moment.waiting) == (0, [], [], [])
    assert moments[-1].backed == moments[0].backed
    assert len(moments[-1].backed) < trace.CHUNK_PAGES


def test_pages_hold_what_there_is(moments: list[Moment]) -> None:
    for moment in moments:
        held = {page for sequence in moment.sequences for page in sequence.pages}
        assert held.isdisjoint(moment.cached)
        assert held.union(moment.cached) <= set(moment.backed) <= set(range(1, PAGES + 1))
        for sequence in moment.sequences:
            assert len(sequence.pages) == -(-sequence.tokens // trace.PAGE_SIZE)


@pytest.mark.parametrize(
    "said",
    [
        "claimed",
        "of a running sequence shared",
        "kept from before shared",
        "share them all",
        "copied",
        "kept for prompts that begin alike",
        "no longer kept",
        "left to those who share them",
        "waits: it needs",
        "returned",
    ],
)
def test_whatever_may_happen_to_a_page_is_shown(moments: list[Moment], said: str) -> None:
    assert any(said in moment.said for moment in moments)


def test_what_is_said_is_what_happened(moments: list[Moment]) -> None:
    for before, moment in itertools.pairwise(moments):
        name, _, rest = moment.said.partition(" ends: ")
        if rest:
            assert name not in [sequence.name for sequence in moment.sequences]
            back = int(rest.split()[0])
            cached = len(moment.cached) - len(before.cached)
            assert back == before.used - moment.used - cached
        if " waits: " in moment.said:
            assert (moment.used, moment.cached) == (before.used, before.cached)
            assert moment.waiting


def test_two_write_to_a_shared_page_and_the_last_keeps_it(moments: list[Moment]) -> None:
    at = next(index for index, moment in enumerate(moments) if "copied" in moment.said)
    last_pages = [
        [sequence.pages[-1] for sequence in moments[index].sequences if sequence.name in "DEF"]
        for index in (at - 1, at)
    ]
    assert len(set(last_pages[0])) == 1
    assert len(set(last_pages[1])) == 3
    assert last_pages[0][0] in last_pages[1]
