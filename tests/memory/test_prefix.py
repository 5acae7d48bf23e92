"""PrefixIndex: what is found, what is never found, and what becomes of it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from pageforge.errors import OutOfPages, PageError, PageForgeError
from pageforge.memory.allocator import PageAllocator
from pageforge.memory.prefix import ABSENT, TOKEN, PrefixIndex, chained_hash, longest_hit

P = 4
A = [1, 2, 3, 4]
B = [5, 6, 7, 8]
C = [9, 10, 11, 12]


class Pool:
    """An allocator and its index; sequences are known by their pages."""

    def __init__(self, num_pages: int = 16, **options: Any):
        self.allocator = PageAllocator(num_pages, 4)
        self.index = PrefixIndex(self.allocator, P, **options)

    def compute(self, tokens: list[int], salt: str = "") -> list[int]:
        """Fresh pages for `tokens`, published."""
        pages = self.allocator.allocate(-(-len(tokens) // P))
        self.index.publish(tokens, pages, salt)
        return pages

    def keep(self, tokens: list[int], salt: str = "") -> list[int]:
        """Cached pages for `tokens`: their sequence has ended."""
        pages = self.compute(tokens, salt)
        self.allocator.release(pages[::-1])
        return pages

    def check(self, *holders: list[int]) -> None:
        self.allocator.check_invariants(holders)
        self.index.check_invariants()


def contents(index: PrefixIndex) -> dict[str, Any]:
    """All that an index knows."""
    return {
        "pages": {page: place.key for page, place in index._holders.items()},
        "places": set(index._places),
        "roots": set(index._roots),
    }


# Find


def test_the_longest_known_prefix_is_found() -> None:
    pool = Pool()
    one, two = pool.compute(A + B)
    assert pool.index.match(A + B) == [one, two]
    assert pool.index.match(A + B + C) == [one, two]
    assert pool.index.match(A + C) == [one]
    assert pool.index.match(A) == [one]
    assert pool.index.match(C) == pool.index.match([]) == []
    pool.check([one, two])


@pytest.mark.parametrize(
    ("length", "full"), [(0, 0), (1, 0), (P - 1, 0), (P, 1), (P + 1, 1), (2 * P - 1, 1), (2 * P, 2)]
)
def test_only_full_pages_are_published_and_found(length: int, full: int) -> None:
    pool = Pool()
    pages = pool.compute((A + B)[:length])
    assert len(pool.index) == full
    assert pool.index.match(A + B + C) == pages[:full]
    longer = Pool()
    known = longer.compute(A + B)
    assert longer.index.match((A + B)[:length]) == known[:full]


def test_the_same_tokens_after_others_are_something_else() -> None:
    pool = Pool()
    pool.compute(A + B)
    assert pool.index.match(B) == []
    assert pool.index.match(C + B) == []


def test_cached_pages_are_found_and_come_back_to_life() -> None:
    pool = Pool()
    pages = pool.keep(A + B)
    assert pool.allocator.num_cached == 2
    assert pool.index.match(A + B) == pages
    pool.allocator.share(pages)
    assert pool.allocator.num_cached == 0
    pool.check(pages)
    assert pool.index.match(A + B) == pages


def test_a_query_changes_nothing() -> None:
    pool = Pool()
    pool.keep(A + B)
    before = copy.deepcopy(vars(pool.allocator)), contents(pool.index)
    pool.index.match(A + B + C)
    pool.index.match(C, salt="never seen")
    pool.index.walk(A + B + C, salt="never seen")
    after = vars(pool.allocator), contents(pool.index)
    for old, new in zip(before, after, strict=True):
        old.pop("on_evict", None), new.pop("on_evict", None)
        assert old == new


@pytest.mark.parametrize("kind", [tuple, np.array, lambda tokens: np.array(tokens, np.int32)])
def test_tokens_of_any_kind_are_the_same_tokens(kind: Any) -> None:
    pool = Pool()
    pages = pool.compute(A + B)
    assert pool.index.match(kind(A + B)) == pages
    assert pool.index.publish(kind(A + B), pages) == 2
    assert len(pool.index) == 2


# Publish


def test_publishing_again_is_harmless() -> None:
    pool = Pool()
    pages = pool.compute(A + B)
    assert pool.index.publish(A + B, pages) == 2
    assert pool.index.publish(A + B + C[:2], [*pages, *pool.allocator.allocate(1)]) == 2
    assert len(pool.index) == 2


def test_a_prefix_is_published_piece_by_piece() -> None:
    pool = Pool()
    pages = pool.allocator.allocate(3)
    tokens = A + B + C
    for length in range(len(tokens) + 1):
        assert pool.index.publish(tokens[:length], pages) == length // P
    assert pool.index.match(tokens) == pages


def test_of_two_pages_with_the_same_tokens_the_first_stays() -> None:
    pool = Pool()
    first = pool.compute(A + B)
    second = pool.allocator.allocate(3)
    assert pool.index.publish(A + B + C, second) == 3
    assert pool.index.match(A + B + C) == [*first, second[2]]
    assert not pool.allocator.is_published(second[0])
    pool.check(first, second)


def test_too_few_pages_are_refused() -> None:
    pool = Pool()
    pages = pool.allocator.allocate(1)
    with pytest.raises(PageError, match="pages: expected at least 2, got 1"):
        pool.index.publish(A + B, pages)
    assert len(pool.index) == 0
    pool.check(pages)


@pytest.mark.parametrize("wrong", ["free", "cached", -1, 17, 10**9])
def test_pages_that_are_not_used_are_refused_before_anything_is_published(
    wrong: str | int,
) -> None:
    pool = Pool()
    (page,) = pool.allocator.allocate(1)
    (kept,) = pool.keep(C)
    bad = {"free": 16, "cached": kept}.get(wrong, wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(PageError):
        pool.index.publish(A + B, [page, bad])
    assert pool.index.match(A + B) == []
    assert pool.index.match(C) == [kept]
    pool.check([page])


def test_one_page_is_never_known_under_two_contents() -> None:
    pool = Pool()
    (page,) = pool.compute(A)
    (other,) = pool.allocator.allocate(1)
    assert pool.index.publish(B, [page]) == 0
    assert pool.index.match(B) == []
    assert pool.index.publish(B + A, [other, page]) == 1
    assert pool.index.publish(C + C, [pool.allocator.allocate(1)[0], other]) == 1
    assert pool.index.match(A) == [page]


def test_a_second_index_over_one_allocator_is_refused() -> None:
    pool = Pool()
    with pytest.raises(PageForgeError, match="part by salt"):
        PrefixIndex(pool.allocator, P)
    pool.keep(A)
    pool.allocator.evict(1)
    assert pool.index.match(A) == []


# Hash


def as_bytes(*tokens: int) -> bytes:
    return np.array(tokens, TOKEN).tobytes()


def test_the_hash_is_the_same_in_every_process() -> None:
    head = chained_hash(b"", as_bytes(1, 2, 3, 4))
    assert head.hex() == "087a24230771ee662be37e5493b333d7"
    tail = chained_hash(head, as_bytes(-1, 2**62, 0, 7))
    assert tail.hex() == "6395fbc44e112d36d7162a8c2057732a"


def test_the_hash_depends_on_all_that_comes_before() -> None:
    pages = [as_bytes(*tokens) for tokens in ((1, 2), (2, 1), (1, 3), (0, 1), (256, 1))]
    hashes = {
        chained_hash(chained_hash(salt, first), second)
        for salt in (b"", b"a", b"b")
        for first, second in itertools.product(pages, pages)
    }
    assert len(hashes) == 3 * 25


# Salts


def test_a_salt_parts_what_must_not_be_shared() -> None:
    pool = Pool()
    ours, theirs = pool.compute(A + B, "adapter 1"), pool.compute(A + B, "adapter 2")
    assert pool.index.match(A + B, "adapter 1") == ours
    assert pool.index.match(A + B, "adapter 2") == theirs
    assert pool.index.match(A + B) == pool.index.match(A + B, "adapter 3") == []
    pool.check(ours, theirs)


@pytest.mark.parametrize("hash_function", [chained_hash, lambda parent, tokens: b"x"])
def test_a_salt_that_looks_like_a_hash_opens_nothing(hash_function: Any) -> None:
    # Its bytes are those of the key of A: only the place before tells "after A" from this salt.
    pool = Pool(hash_function=lambda parent, tokens: hash_function(parent, tokens).hex().encode())
    pages = pool.compute(A + B)
    salt = hash_function(b"", as_bytes(*A)).hex()
    assert pool.index.match(B, salt) == []
    other = pool.allocator.allocate(1)
    pool.index.publish(B, other, salt)
    assert pages[1] not in pool.index.match(B, salt)
    assert pool.index.match(A + B)[:1] == pages[:1]


# Collisions


@pytest.mark.parametrize("salts", [("", ""), ("", "b"), ("a", "b")])
@pytest.mark.parametrize(
    "hash_function",
    [
        lambda parent, tokens: b"x",
        lambda parent, tokens: bytes([sum(tokens) % 2]),
        lambda parent, tokens: parent[-1:],
    ],
)
def test_a_collision_never_serves_another_sequence(
    hash_function: Any, salts: tuple[str, str]
) -> None:
    prompts = [list(itertools.chain(*pages)) for pages in itertools.product([A, B, C], repeat=3)]
    for ours, theirs in itertools.product(prompts[:9], prompts):
        pool = Pool(hash_function=hash_function)
        pages = pool.compute(ours, salts[0])
        more = pool.compute(theirs, salts[1])
        contents: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for tokens, salt, ids in ((ours, salts[0], pages), (theirs, salts[1], more)):
            for i, page in enumerate(ids):
                contents.setdefault((salt, tuple(tokens[: (i + 1) * P])), set()).add(page)
        for tokens in prompts:
            for salt in {*salts, "other"}:
                for i, page in enumerate(pool.index.match(tokens, salt)):
                    assert page in contents[salt, tuple(tokens[: (i + 1) * P])]
        pool.check(pages, more)


def test_of_two_sequences_that_collide_the_first_stays_and_the_second_is_not_kept() -> None:
    pool = Pool(hash_function=lambda parent, tokens: b"x")
    (first,) = pool.compute(A)
    (second,) = pool.compute(B)
    assert pool.index.match(A) == [first]
    assert pool.index.match(B) == []
    assert not pool.allocator.is_published(second)
    pool.allocator.release([first, second])
    pool.allocator.evict(1)
    assert pool.compute(B) == pool.index.match(B)


# Eviction


def test_an_evicted_page_is_not_found_any_more() -> None:
    pool = Pool(num_pages=2)
    pages = pool.keep(A + B)
    (taken,) = pool.allocator.allocate(1)
    assert taken == pages[1]  # the tail
    assert pool.index.match(A + B) == pages[:1]
    pool.allocator.allocate(1)
    assert pool.index.match(A + B) == []
    assert len(pool.index) == 0
    with pytest.raises(OutOfPages):
        pool.allocator.allocate(1)
    pool.check([1], [2])


def test_the_page_of_an_evicted_one_can_be_published_anew() -> None:
    pool = Pool(num_pages=1)
    pool.keep(A)
    (page,) = pool.compute(B)
    assert pool.index.match(A) == []
    assert pool.index.match(B) == [page]


def test_whoever_ends_a_page_the_index_hears_of_it() -> None:
    pool = Pool()
    pages = pool.keep(A + B)
    pool.allocator.unpublish(pages[1])
    assert pool.index.match(A + B) == pages[:1]
    pool.check()


def orphaned(pool: Pool) -> tuple[int, int]:
    """(head, tail) of A + B, where the head was evicted and the tail is cached."""
    head, tail = pool.compute(A + B)
    pool.allocator.release([head])
    pool.allocator.release([tail])
    pool.allocator.evict(1)
    return head, tail


def test_a_tail_without_its_head_is_not_found() -> None:
    pool = Pool()
    _, tail = orphaned(pool)
    assert pool.index.match(A + B) == []
    assert pool.allocator.is_cached(tail)
    pool.check()


def test_a_tail_is_found_again_behind_a_new_head() -> None:
    """It holds the same tokens after the same tokens, wherever these lie."""
    pool = Pool()
    _, tail = orphaned(pool)
    (head,) = pool.compute(A)
    assert pool.index.match(A + B) == [head, tail]
    assert pool.index.match(C + B) == pool.index.match(B) == []
    pool.check([head])


@pytest.mark.parametrize("is_used", [False, True])
def test_the_tail_that_was_known_first_stays_behind_a_new_head(is_used: bool) -> None:
    pool = Pool()
    _, tail = orphaned(pool)
    if is_used:
        pool.allocator.share([tail])
    pages = pool.compute(A + B)
    assert pool.index.match(A + B) == [pages[0], tail]
    assert not pool.allocator.is_published(pages[1])
    pool.check(pages, [tail] * is_used)


def test_an_orphan_is_evicted_in_its_turn() -> None:
    pool = Pool()
    orphaned(pool)
    pool.keep(C)
    pool.allocator.evict(1)
    assert len(pool.index) == len(pool.index.match(C)) == 1
    pool.check()


def test_an_index_remembers_no_more_than_what_leads_to_a_page() -> None:
    pool = Pool()
    pool.keep(A + B + C, "a salt")
    pool.index.match(A, "another salt")
    assert (len(pool.index._places), len(pool.index._roots)) == (3, 1)
    head, middle, tail = pool.index.match(A + B + C, "a salt")
    pool.allocator.unpublish(head)
    pool.allocator.unpublish(middle)
    assert (len(pool.index._places), len(pool.index._roots)) == (3, 1)  # the tail lies behind them
    pool.allocator.unpublish(tail)
    assert not pool.index._places and not pool.index._roots
    pool.check()


def test_a_long_prefix_is_forgotten_at_once() -> None:
    """However many places hang on each other: here one page lies behind 200,000 absent ones."""
    pool = Pool()
    (page,) = pool.allocator.allocate(1)
    count = 200_000
    assert pool.index.publish(range(count * P), [ABSENT] * (count - 1) + [page]) == count
    assert len(pool.index._places) == count
    pool.allocator.unpublish(page)
    assert not pool.index._places


# Absent pages: what left a window before it was published


def test_what_comes_after_absent_pages_is_known() -> None:
    pool = Pool()
    pages = pool.allocator.allocate(1)
    assert pool.index.publish(A + B + C, [ABSENT, ABSENT, *pages]) == 3
    assert pool.index.match(A + B + C) == []  # of no use where all is seen
    assert [place.page for place in pool.index.walk(A + B + C)[1:]] == [ABSENT, ABSENT, *pages]
    assert len(pool.index.walk(A + B + A)) == 3
    assert len(pool.index.walk(A + C)) == 2
    pool.check(pages)


def test_absent_pages_alone_are_not_remembered() -> None:
    pool = Pool()
    assert pool.index.publish(A + B, [ABSENT, ABSENT]) == 2
    assert not pool.index._places
    assert len(pool.index.walk(A + B)) == 1


def test_an_absent_page_is_published_later() -> None:
    pool = Pool()
    (tail,) = pool.allocator.allocate(1)
    pool.index.publish(A + B, [ABSENT, tail])
    (head,) = pool.compute(A)
    assert pool.index.match(A + B) == [head, tail]
    pool.index.publish(A + B, [ABSENT, ABSENT])  # and stays where somebody else lacks it
    assert pool.index.match(A + B) == [head, tail]
    pool.check([head], [tail])


def test_a_sequence_goes_on_though_what_it_published_was_evicted() -> None:
    """Its pages left the window, and then the pool: it is told from one whose K/V were dropped."""
    pool = Pool()
    (first,) = pool.allocator.allocate(1)
    cursor = pool.index.extend(pool.index.start(), A, [first])
    pool.allocator.release([first])
    pool.allocator.evict(1)
    (second,) = pool.allocator.allocate(1)
    cursor = pool.index.extend(cursor, B, [second])
    assert cursor.num_pages == 2
    assert [place.page for place in pool.index.walk(A + B)[1:]] == [ABSENT, second]
    pool.check([second])


@pytest.mark.parametrize("num_pages", [0, 1, 2])
def test_a_sequence_publishes_nothing_after_what_was_dropped(num_pages: int) -> None:
    pool = Pool()
    pages = pool.allocator.allocate(3)
    tokens = A + B + C
    cursor = pool.index.extend(pool.index.start(), tokens[: num_pages * P], pages)
    pool.index.drop()
    others = pool.compute(A + B)  # of the new weights, say
    assert pool.index.extend(cursor, tokens[num_pages * P :], pages[num_pages:]) is cursor
    assert pool.index.match(tokens) == others
    pool.check(pages, others)


# The longest hit

WINDOWS = [1, 2, P - 1, P, P + 1, 2 * P, 2 * P + 1]


@pytest.mark.parametrize("rollback", [0, 1, P])
@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("other", [None, P + 2])
def test_the_longest_hit_is_the_longest_that_every_group_can_serve(
    other: int | None, window: int | None, rollback: int
) -> None:
    """Against a plain search, for every choice of absent pages."""
    windows = [other, window]
    for absent in itertools.product([False, True], repeat=8):
        pages = [ABSENT if is_absent else page for page, is_absent in enumerate(absent, 1)]
        known = [pages[:4], pages[4:]]
        num_pages, shared = longest_hit(known, windows, P, rollback)
        can_be_served = [
            all(
                pages[token // P]
                for pages, width in zip(known, windows, strict=True)
                for token in range(count * P)
                if width is None or token > count * P - width
            )
            for count in range(5)
        ]
        assert num_pages == max(count for count in range(5) if can_be_served[count])
        for pages, found, width in zip(known, shared, windows, strict=True):
            assert all(found) and found == pages[num_pages - len(found) : num_pages]
            if len(found) < num_pages:  # the page before is absent, or nobody rolls back to it
                last = (num_pages - len(found)) * P - 1
                is_absent = not pages[num_pages - len(found) - 1]
                assert is_absent or last <= num_pages * P - rollback - width


def test_a_hit_is_as_long_as_what_each_group_knows() -> None:
    assert longest_hit([[1, 2, 3], [4, 5]], [None, None], P) == (2, [[1, 2], [4, 5]])
    assert longest_hit([[1, 2, 3], []], [None, 2], P) == (0, [[], []])
    assert longest_hit([[1, 2, 3], [0, 0, 6]], [None, 2], P) == (3, [[1, 2, 3], [6]])
    assert longest_hit([[1, 2, 3], [0, 0, 0]], [None, 1], P) == (3, [[1, 2, 3], []])


# Self-check


def _keep_unknown(pool: Pool) -> None:
    pool.allocator.publish(pool.allocator.allocate(1)[0])


def _forget_a_page(pool: Pool) -> None:
    pool.allocator._published.remove(1)


def _mix_up_pages(pool: Pool) -> None:
    pool.index._holders[1].page = 2


def _lose_a_place(pool: Pool) -> None:
    del pool.index._places[pool.index._holders[1].key]


@pytest.mark.parametrize("fault", [_keep_unknown, _forget_a_page, _mix_up_pages, _lose_a_place])
def test_planted_faults_are_seen(fault: Any) -> None:
    pool = Pool()
    pages = pool.compute(A + B)
    pool.check(pages)
    fault(pool)
    with pytest.raises(AssertionError, match="index"):
        pool.index.check_invariants()


# Drop


def test_drop_forgets_everything() -> None:
    pool = Pool()
    used = pool.compute(A + B)
    pool.keep(C, "a salt")
    pool.index.drop()
    assert pool.index.match(A + B) == pool.index.match(C, "a salt") == []
    assert (len(pool.index), pool.allocator.num_cached) == (0, 0)
    assert not pool.index._roots and not pool.index._places
    pool.check(used)
    pool.allocator.release(used)
    assert pool.allocator.num_free == 16


def test_after_drop_the_index_serves_again() -> None:
    pool = Pool()
    used = pool.compute(A + B)
    pool.index.drop()
    pool.index.drop()
    assert pool.index.publish(A + B, used) == 2
    assert pool.index.match(A + B) == used
    pool.check(used)
