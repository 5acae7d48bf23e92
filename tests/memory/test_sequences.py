"""SequenceAllocator: pages by sequence id."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from pageforge.errors import OutOfPages, PageError
from pageforge.memory import PageAllocator, SequenceAllocator, sequences


def test_the_example_in_the_docs_runs() -> None:
    failed, tried = doctest.testmod(sequences)
    assert (failed, tried) == (0, 4)


def test_a_sequence_grows_and_ends() -> None:
    allocator = PageAllocator(8)
    pool = SequenceAllocator(allocator)
    first = pool.alloc_for_seq("a", 2)
    pool.alloc_for_seq("b", 3)
    more = pool.alloc_for_seq("a", 1)
    assert pool.block_table("a") == [*first, *more]
    assert pool.free_pages() == 2
    allocator.check_invariants([pool.block_table("a"), pool.block_table("b")])
    assert pool.free_seq("a") == 3
    assert pool.free_pages() == 5
    assert pool.free_seq("b") == 3
    allocator.check_invariants([])


def test_the_block_table_is_a_copy() -> None:
    pool = SequenceAllocator(PageAllocator(8))
    pool.alloc_for_seq(1, 2).clear()
    pool.block_table(1).clear()
    assert len(pool.block_table(1)) == 2


@pytest.mark.parametrize("call", ["free_seq", "block_table"])
def test_an_unknown_sequence_is_refused(call: str) -> None:
    pool = SequenceAllocator(PageAllocator(8))
    pool.alloc_for_seq("a", 2)
    pool.free_seq("a")
    for seq_id in ("a", "b", 0):
        with pytest.raises(PageError, match=f"sequence {seq_id!r}: .*free each sequence once"):
            getattr(pool, call)(seq_id)
    assert pool.free_pages() == 8


@pytest.mark.parametrize("seq_id", ["a", "new"])
def test_too_large_a_request_changes_nothing(seq_id: str) -> None:
    pool = SequenceAllocator(PageAllocator(8))
    pages = pool.alloc_for_seq("a", 6)
    with pytest.raises(OutOfPages) as caught:
        pool.alloc_for_seq(seq_id, 3)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert pool.block_table("a") == pages
    with pytest.raises(PageError):
        pool.block_table("new")


@pytest.mark.parametrize(("seq_id", "num_pages"), [([], 1), ("b", -1), ("b", "2")])
def test_wrong_arguments_lose_no_pages(seq_id: Any, num_pages: Any) -> None:
    pool = SequenceAllocator(PageAllocator(8))
    with pytest.raises((TypeError, PageError)):
        pool.alloc_for_seq(seq_id, num_pages)
    assert pool.free_pages() == 8


def test_a_sequence_whose_pages_are_gone_is_not_forgotten() -> None:
    allocator = PageAllocator(8)
    pool = SequenceAllocator(allocator)
    allocator.release(pool.alloc_for_seq("a", 2))
    with pytest.raises(PageError):
        pool.free_seq("a")
    assert len(pool.block_table("a")) == 2
