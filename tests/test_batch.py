"""SequenceBatch: its rows' page tables, and the copies that ops read, always say the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pageforge import ops
from pageforge.batch import SequenceBatch, _PageTableMirror
from pageforge.errors import CropError, OutOfPages, UseAfterFree
from pageforge.geometry import KVGeometry, LayerShape, pages_for
from pageforge.memory import PageTable
from pageforge.pool import ROLLBACK, PagePool

SIZE = 8
WINDOW = 10

FULL = LayerShape(2, 4, 4, "float32")
SLIDING = LayerShape(1, 4, 8, "float32", window=WINDOW)


def make_pool(max_pages: int = 100) -> PagePool:
    return PagePool(KVGeometry.of_layers({0: FULL, 1: SLIDING}, SIZE), max_pages=max_pages)


@pytest.fixture
def pool() -> Iterator[PagePool]:
    with make_pool() as made:
        yield made


def check(batch: SequenceBatch) -> None:
    """What ops are given equals what the page tables say, in every group."""
    for group in range(len(batch.pool.geometry.groups)):
        for start in {0, batch.length // 2, max(0, batch.length - 1)}:
            stop = batch.length
            page_table, first = batch.page_table(group, start, stop)
            low, high = start // SIZE, pages_for(stop, SIZE)
            assert first == low * SIZE
            assert page_table.dtype == torch.int32
            assert page_table.tolist() == [t.entries(low, high, group) for t in batch.tables]
            slots = batch.slot_mapping(group, start, stop)
            assert slots.dtype == torch.int64
            assert slots.tolist() == [
                slot for t in batch.tables for slot in t.slots(start, stop, group).tolist()
            ]


def check_pool(pool: PagePool, *batches: SequenceBatch) -> None:
    pool.check_invariants([t for batch in batches for t in (*batch.tables, batch._ahead)])


# --- one at a time --------------------------------------------------------------------------


def test_an_empty_batch(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [])
    assert (len(batch), batch.length) == (0, 0)
    batch.release()


def test_append_claims_pages_for_every_row(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0, 0])
    for tokens, pages in ((7, 1), (1, 1), (1, 2), (7, 2), (20, 5)):
        batch.append(tokens)
        assert pool.stats().pages_used == 3 * 2 * pages
        check(batch)
        check_pool(pool, batch)
    batch.release()
    assert pool.stats().pages_used == 0


def test_slots_are_where_the_pages_are(pool: PagePool) -> None:
    """By hand: page ids times the page size, plus the place in the page."""
    batch = SequenceBatch(pool, [0, 0])
    batch.append(10)
    first, second = (table.pages(0) for table in batch.tables)
    assert len({*first, *second}) == 4
    expected = [
        pages[position // SIZE] * SIZE + position % SIZE
        for pages in (first, second)
        for position in range(6, 10)
    ]
    assert batch.slot_mapping(0, 6, 10).tolist() == expected
    assert batch.page_table(0, 0, 10)[0].tolist() == [first, second]
    assert batch.page_table(0, 8, 10)[0].tolist() == [[first[1]], [second[1]]]
    assert batch.page_table(0, 8, 10)[1] == 8


def test_left_padding_has_no_pages_and_no_slots(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 9, 16])
    batch.append(20)
    check(batch)
    assert [len(table.pages(0)) for table in batch.tables] == [3, 2, 1]
    slots = batch.slot_mapping(0, 0, 20).view(3, 20)
    assert (slots[0] >= SIZE).all()  # page 0 is nobody's
    assert (slots[1, :8] == -1).all() and (slots[1, 8:] >= SIZE).all()
    assert (slots[2, :16] == -1).all() and (slots[2, 16:] >= SIZE).all()
    assert batch.page_table(0, 0, 20)[0][2].tolist()[:2] == [0, 0]


def test_pages_behind_the_window_are_released(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(WINDOW + ROLLBACK)
    batch.slide()
    before = [table.pages(1) for table in batch.tables]
    check(batch)
    batch.append(20)
    batch.slide()
    check(batch)
    for table, pages in zip(batch.tables, before, strict=True):
        gone = table.first_page(1)
        assert gone == (20 + 1) // SIZE
        assert table.pages(1)[: len(pages) - gone] == pages[gone:]
        assert table.first_page(0) == 0
    check_pool(pool, batch)


def test_what_does_not_fit_changes_no_row(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0, 0])
    batch.append(260)  # 33 pages a row, and there are 100
    tables = [[table.pages(group) for group in (0, 1)] for table in batch.tables]
    with pytest.raises(OutOfPages) as caught:
        batch.append(10)
    assert (caught.value.needed, caught.value.available) == (6, 2)
    assert batch.length == 260
    assert tables == [[table.pages(group) for group in (0, 1)] for table in batch.tables]
    check(batch)
    check_pool(pool, batch)
    batch.append(4)  # to the page's end: no pages needed
    check(batch)


def test_crop_past_the_margin_changes_no_row(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 90])  # row 1 has nothing that could be gone
    batch.append(100)
    batch.append(60)
    batch.slide()
    for check_only in (True, False):
        with pytest.raises(CropError):
            (batch.check_crop if check_only else batch.crop)(85)
        assert batch.length == 160
        assert {table.length for table in batch.tables} == {160}
    check(batch)
    batch.check_crop(160 - ROLLBACK)
    batch.crop(160 - ROLLBACK)
    check(batch)
    batch.append(70)
    check(batch)


def test_crop_into_the_padding_after_sliding(pool: PagePool) -> None:
    """The page that pads and tokens share had left the window; it is claimed anew."""
    batch = SequenceBatch(pool, [12])
    batch.append(200)
    batch.slide()
    assert batch.tables[0].first_page(1) > 2
    batch.crop(10)
    check(batch)
    batch.append(1)
    check(batch)
    batch.append(5)
    check(batch)
    assert (batch.slot_mapping(1, 8, 16) >= SIZE).all()
    check_pool(pool, batch)


def test_select_forks_some_rows_and_drops_others(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0, 3])
    batch.append(12)
    pages = [table.pages(0) for table in batch.tables]
    batch.select([2, 2, 0, 2])
    assert [table.pages(0) for table in batch.tables] == [pages[row] for row in (2, 2, 0, 2)]
    assert [table.start for table in batch.tables] == [3, 3, 0, 3]
    assert pool.stats().pages_used == 2 * 2 * 2
    check(batch)
    check_pool(pool, batch)
    batch.append(1)  # the partly filled page of row 2 becomes three
    check(batch)
    check_pool(pool, batch)
    assert pool.stats().pages_used == 2 * (2 * 2 + 2)
    assert len({table.pages(0)[-1] for table in batch.tables}) == 4
    assert len({table.pages(0)[0] for table in batch.tables}) == 2


def test_a_fork_has_page_tables_of_its_own(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(12)
    child = batch.fork()
    assert pool.stats().pages_used == 8
    child.append(30)
    batch.append(1)
    for one in (batch, child):
        check(one)
    check_pool(pool, batch, child)
    assert batch.length == 13
    batch.release()
    check(child)
    check_pool(pool, child)
    child.release()
    assert pool.stats().pages_used == 0


def test_copy_on_write_copies_what_the_page_held(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0])
    batch.append(12)
    for group in (0, 1):
        pool.pages(group)[batch.tables[0].pages(group)] = 5.0
    child = batch.fork()
    child.append(1)
    for group in (0, 1):
        mine, theirs = child.tables[0].pages(group), batch.tables[0].pages(group)
        assert mine[0] == theirs[0]
        assert mine[1] != theirs[1]
        assert (pool.pages(group)[mine[1]] == 5.0).all()
        pool.pages(group)[mine[1]] = 6.0
        assert (pool.pages(group)[theirs[1]] == 5.0).all()


def test_a_row_whose_copy_fails_keeps_its_pages(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(12)
    child = batch.fork()

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched, pytest.raises(OutOfPages, match="copy shared pages"):
        patched.setattr(ops, "copy_pages", fail)
        child.append(1)
    for group in (0, 1):
        assert [t.pages(group) for t in child.tables] == [t.pages(group) for t in batch.tables]
    for each in (batch, child):
        assert each.length == 12
        check(each)
    check_pool(pool, batch, child)
    child.append(1)
    check(child)
    check_pool(pool, batch, child)


def test_page_tables_that_are_made_in_inference_mode(pool: PagePool) -> None:
    """They can be brought up to date outside of it."""
    with torch.inference_mode():
        batch = SequenceBatch(pool, [0, 0])
        batch.append(12)
        batch.select([1, 0])
        page_table, _ = batch.page_table(0, 0, 12)
    assert not page_table.is_inference()


def test_release_is_for_good(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0])
    batch.append(12)
    table: PageTable = batch.tables[0]
    batch.release()
    batch.release()
    assert len(batch) == 0
    with pytest.raises(UseAfterFree):
        table.append(1)


def test_restored_pages(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 8])
    batch.append(12)
    pages = [[table.pages(group) for group in (0, 1)] for table in batch.tables]
    contents = []
    for group in (0, 1):
        for table in batch.tables:
            pool.pages(group)[table.pages(group)] = torch.randn(
                len(table.pages(group)), pool.pages(group).shape[1]
            )
        ids = torch.tensor([page for row in pages for page in row[group]])
        contents.append(pool.pages(group)[ids].clone())
    rows = [[[0, 1], [0, 1]], [[2], [2]]]
    restored = SequenceBatch(pool, [0, 8])
    restored.restore(contents, rows, 12)
    check(restored)
    check_pool(pool, batch, restored)
    for group in (0, 1):
        for mine, theirs in zip(restored.tables, batch.tables, strict=True):
            assert torch.equal(
                pool.pages(group)[mine.pages(group)], pool.pages(group)[theirs.pages(group)]
            )
    restored.append(5)
    check(restored)


# --- pages ahead ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, SIZE, 20])
def test_pages_are_claimed_a_little_at_each_token(rows: int, pool: PagePool) -> None:
    """When pages are full, the next ones are there; never more than one a row and group."""
    batch = SequenceBatch(pool, [0] * rows)
    batch.append(SIZE - 3)
    batch.claim_ahead()
    for _ in range(3 * SIZE):
        used, held = pool.stats().pages_used, sum(table.num_pages for table in batch.tables)
        batch.append(1)
        if batch.length % SIZE == 1:
            assert used == held + 2 * rows, "not all pages were claimed ahead"
            assert pool.stats().pages_used == used
        used = pool.stats().pages_used
        batch.claim_ahead()
        assert pool.stats().pages_used - used <= 2 * (rows // (SIZE - 1) + 1)
        check(batch)
        check_pool(pool, batch)
        if batch.length % SIZE == 0:
            assert batch._ahead.num_pages == 2 * rows
            assert batch._ahead.length == SIZE * rows, "no more than a page a row"
    batch.drop_ahead()
    assert pool.stats().pages_used == sum(table.num_pages for table in batch.tables)


def test_pages_ahead_are_no_rows_own(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(SIZE)
    batch.claim_ahead()
    child = batch.fork()
    assert pool.stats().pages_used == 2 * (2 + 2)
    child.append(1)  # pages of its own
    check_pool(pool, batch, child)
    batch.append(1)
    tables = [table.pages(0) for table in (*batch.tables, *child.tables)]
    assert len({pages[1] for pages in tables}) == 4
    batch.claim_ahead()
    batch.append(2 * SIZE)  # more than is ahead
    check(batch)
    check_pool(pool, batch, child)


@pytest.mark.parametrize("end", [SequenceBatch.release, SequenceBatch.abandon])
def test_pages_ahead_go_with_the_batch(end: Callable[[SequenceBatch], None]) -> None:
    with make_pool() as pool:
        batch = SequenceBatch(pool, [0, 0])
        batch.append(SIZE)
        batch.claim_ahead()
        assert pool.stats().pages_used == 2 * (2 + 2)
        end(batch)
        assert pool.stats().pages_used == 0


def test_pages_ahead_serve_their_rows_where_no_others_are_left() -> None:
    with make_pool(max_pages=4) as pool:
        batch = SequenceBatch(pool, [0, 0])
        batch.append(SIZE)
        batch.claim_ahead()
        assert pool.stats().pages_free == 0
        batch.append(SIZE)
        batch.claim_ahead()
        with pytest.raises(OutOfPages):
            batch.append(1)
        assert batch.length == 2 * SIZE
        check(batch)
        check_pool(pool, batch)


# --- all of it in any order -----------------------------------------------------------------


class Batches(RuleBasedStateMachine):
    """Two batches that fork from each other, against the page tables and a recount."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(max_pages=60)
        self.batches: list[SequenceBatch] = []

    @initialize(starts=st.lists(st.integers(0, 20), min_size=1, max_size=3))
    def begin(self, starts: list[int]) -> None:
        self.batches = [SequenceBatch(self.pool, starts)]

    def pick(self, index: int) -> SequenceBatch:
        return self.batches[index % len(self.batches)]

    @rule(index=st.integers(0, 3), tokens=st.integers(0, 40))
    def append(self, index: int, tokens: int) -> None:
        batch = self.pick(index)
        length = batch.length
        try:
            batch.append(tokens)
            length += tokens
        except OutOfPages as error:
            assert error.needed > error.available
        assert {table.length for table in batch.tables} == {length}

    @rule(index=st.integers(0, 3))
    def claim_ahead(self, index: int) -> None:
        self.pick(index).claim_ahead()

    @rule(index=st.integers(0, 3))
    def drop_ahead(self, index: int) -> None:
        self.pick(index).drop_ahead()

    @rule(index=st.integers(0, 3))
    def slide(self, index: int) -> None:
        self.pick(index).slide()

    @rule(index=st.integers(0, 3), removed=st.integers(0, 100))
    def crop(self, index: int, removed: int) -> None:
        batch = self.pick(index)
        length = max(0, batch.length - removed)
        try:
            batch.check_crop(length)
        except CropError:
            with pytest.raises(CropError):
                batch.crop(length)
        else:
            batch.crop(length)
            assert {table.length for table in batch.tables} == {length}

    @rule(index=st.integers(0, 3), rows=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def select(self, index: int, rows: list[int]) -> None:
        batch = self.pick(index)
        chosen = [row % len(batch) for row in rows]
        expected = [batch.tables[row].pages(0) for row in chosen]
        batch.select(chosen)
        assert [table.pages(0) for table in batch.tables] == expected

    @precondition(lambda self: len(self.batches) < 3)
    @rule(index=st.integers(0, 3))
    def fork(self, index: int) -> None:
        self.batches.append(self.pick(index).fork())

    @precondition(lambda self: len(self.batches) > 1)
    @rule(index=st.integers(0, 3))
    def release(self, index: int) -> None:
        self.batches.pop(index % len(self.batches)).release()

    @invariant()
    def copies_agree_with_tables(self) -> None:
        for batch in self.batches:
            check(batch)
        check_pool(self.pool, *self.batches)

    def teardown(self) -> None:
        for batch in self.batches:
            batch.release()
        assert self.pool.stats().pages_used == 0
        self.pool.close()


TestBatches = Batches.TestCase


def test_an_append_that_fails_half_way_is_mended_by_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = KVGeometry.uniform(1, 1, 4, dtype="float32", page_size=8)
    with PagePool(geometry, max_pages=16) as pool:
        batch = SequenceBatch(pool, [0, 0])
        batch.append(5)
        _, key_pages, value_pages = pool.layer(0)
        rows = torch.arange(10.0).view(10, 1, 1).expand(10, 1, 4)
        ops.write_kv(rows, rows, key_pages, value_pages, batch.slot_mapping(0, 0, 5))
        fork = batch.fork()

        def fail(*args: object) -> None:
            raise torch.cuda.OutOfMemoryError("planted")

        changes = fork.num_changes
        with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
            patched.setattr(SequenceBatch, "_update_mirrors", fail)
            fork.append(6)
        assert fork.length == 11
        assert fork.num_changes > changes  # a captured step takes over the pages
        changes = fork.num_changes
        table, first = fork.page_table(0, 0, 11)
        assert fork.num_changes == changes
        assert first == 0
        assert table.tolist() == [page_table.pages() for page_table in fork.tables]
        slots = fork.slot_mapping(0, 5, 11).view(2, 6).tolist()
        assert slots == [[t.slot(position) for position in range(5, 11)] for t in fork.tables]
        assert not {s for row in slots for s in row} & {t.slot(4) for t in batch.tables}
        key, _ = ops.gather_kv(key_pages, value_pages, table)
        assert key[:, 0, :5, 0].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    "change", [lambda b: b.append(6), lambda b: b.crop(3), lambda b: b.slide()]
)
def test_page_tables_that_a_device_has_not_taken(
    change: Callable[[SequenceBatch], None], pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(WINDOW + ROLLBACK + 20)
    changes = batch.num_changes

    def fail(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("planted")

    with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
        patched.setattr(_PageTableMirror, "write", fail)
        change(batch)
    assert batch.num_changes > changes
    check(batch)
    assert batch.num_changes > changes


@pytest.mark.parametrize("change", ["grow", "select", "fork"])
def test_a_device_that_has_no_memory_for_a_page_table(
    change: str, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(SIZE)
    batch.append(1)
    tables = batch.tables

    def fail(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("planted")

    with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
        patched.setattr("pageforge.batch.to_device", fail)
        if change == "grow":
            batch.append(2 * SIZE)
        elif change == "select":
            batch.select([1, 0])
        else:
            batch.fork()
    assert batch.tables is tables
    check(batch)
    check_pool(pool, batch)
    batch.append(1)
    check(batch)
    check_pool(pool, batch)


def test_a_fork_without_memory_for_its_page_table_shares_no_page(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(12)

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(_PageTableMirror, "copy", fail)
        batch.fork()
    check_pool(pool, batch)


def test_restored_rows_that_a_device_has_not_taken_give_their_pages_back(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [torch.zeros(2, pool.pages(group).shape[1]) for group in (0, 1)]
    batch = SequenceBatch(pool, [0])

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr("pageforge.batch.to_device", fail)
        batch.restore(contents, [[[0, 1], [0, 1]]], 12)
    assert len(batch) == 0
    assert pool.stats().pages_used == 0


def test_a_batch_that_was_released_holds_no_device_memory(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(SIZE)
    step = weakref.ref(batch.step(0, 0, SIZE))
    gc.disable()
    try:
        batch.release()
        assert step() is None
    finally:
        gc.enable()


def test_what_does_not_fit_changes_no_page_table(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 0])
    batch.append(SIZE)
    tables, changes = batch.page_table(0, 0, SIZE)[0].tolist(), batch.num_changes
    with pytest.raises(OutOfPages):
        batch.append(1000)
    assert batch.page_table(0, 0, SIZE)[0].tolist() == tables
    assert batch.num_changes == changes
    batch.append(1)
    assert batch.num_changes > changes


def test_what_ops_need_of_a_step(pool: PagePool) -> None:
    batch = SequenceBatch(pool, [0, 9])
    batch.append(12)
    batch.append(3)
    step = batch.step(0, 12, 15)
    assert step.page_table.tolist() == [table.entries(0, 2) for table in batch.tables]
    assert step.seq_lens.tolist() == [15, 15]
    assert step.cu_query_lens.tolist() == [0, 3, 6]
    assert step.slot_mapping.tolist() == [
        slot for table in batch.tables for slot in table.slots(12, 15)
    ]
    for tensor in (step.page_table, step.seq_lens, step.cu_query_lens):
        assert tensor.dtype == torch.int32
    assert step.starts(None) is None
    starts = step.starts((0, 9))
    assert starts is not None and starts.tolist() == [0, 9] and starts.dtype == torch.int32
    assert batch.step(0, 12, 15) is step
    assert batch.step(1, 12, 15) is not step
    batch.append(1)
    later = batch.step(0, 15, 16)
    assert later.seq_lens.tolist() == [16, 16]
    assert later.starts((0, 9)) is starts
    assert batch.step(0, 12, 15) is not step
    assert batch.starts == (0, 9)
    batch.select([1, 1, 0])
    assert batch.starts == (9, 9, 0)
    assert batch.step(0, 15, 16).seq_lens.tolist() == [16, 16, 16]
    later_starts = batch.step(0, 15, 16).starts((9, 9, 0))
    assert later_starts is not None and later_starts.tolist() == [9, 9, 0]


def test_the_layers_of_a_forward_share_their_slots() -> None:
    geometry = KVGeometry.uniform(1, 1, 4, dtype="float32", page_size=8)
    with PagePool(geometry, max_pages=16) as pool:
        batch = SequenceBatch(pool, [0])
        batch.append(3)
        once = batch.slot_mapping(0, 0, 3)
        assert batch.slot_mapping(0, 0, 3) is once
        batch.crop(0)
        pool.append([other := pool.new_table()], 1)  # takes the page that the row had
        batch.append(3)
        assert batch.slot_mapping(0, 0, 3).tolist() == [batch.tables[0].slot(i) for i in range(3)]
        assert batch.tables[0].pages() != other.pages()


@pytest.mark.parametrize(
    "event", ["fork of the batch", "fork of a table", "publish", "select", "crop"]
)
def test_growing_inside_a_page_copies_what_others_got_meanwhile(event: str) -> None:
    """Rows that have room grow without asking the pool; but not once their page is shared."""
    pool = make_pool()
    batch = SequenceBatch(pool, [0, 0])
    batch.append(3)
    batch.append(1)
    before = [table.pages() for table in batch.tables]
    assert (batch.length, [table.pages() for table in batch.tables]) == (4, before)
    others = []
    if event == "fork of the batch":
        others = batch.fork().tables
    elif event == "fork of a table":
        others = [pool.fork(table) for table in batch.tables]
    elif event == "publish":
        for index, group in enumerate(pool._groups):
            group.prefix.publish(range(SIZE), batch.tables[0].pages(index))
    elif event == "select":
        batch.select([0, 0])
    else:
        batch.crop(2)
    batch.append(0)
    batch.append(1)
    pages = [table.pages() for table in [*batch.tables, *others]]
    assert len({tuple(each) for each in pages}) == len(pages), "each writes to a page of its own"
    assert batch.page_table(0, 0, batch.length)[0].tolist() == pages[:2]
    pool.check_invariants()


def test_growing_inside_a_page_after_the_pool_was_closed() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, [0])
    batch.append(3)
    pool.close()
    with pytest.raises(UseAfterFree):
        batch.append(1)
    assert batch.length == 3
