"""What the ops mean, against plain loops; nothing that no token owns is ever read or written."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pageforge import KVGeometry, LayerShape, PagePool, ops

NAN = float("nan")
DTYPES = ("float32", "float16", "bfloat16")
INTEGER = {4: torch.int32, 2: torch.int16}  # to compare NaN bit for bit


def nan_pool(
    page_size: int = 8,
    heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    dtype: str = "float32",
    layers: int = 2,
    pages: int = 12,
) -> PagePool:
    """A pool whose pages, page 0 too, hold NaN alone."""
    shape = LayerShape(heads, key_dim, value_dim, dtype)
    geometry = KVGeometry.of_layers(dict.fromkeys(range(layers), shape), page_size)
    pool = PagePool(geometry, max_pages=pages)
    pool.pages(0).fill_(NAN)
    return pool


def bits(pages: Tensor) -> Tensor:
    """A copy that compares NaN as equal."""
    return pages.view(INTEGER[pages.element_size()]).clone()


def random_states(slots: int, pages: Tensor) -> Tensor:
    return torch.randn(slots, pages.shape[1], pages.shape[3]).to(pages.dtype)


shapes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([8, 16, 32, 64, 128, 256]),
        "heads": st.sampled_from([1, 2, 3, 8]),
        "key_dim": st.sampled_from([1, 5, 16, 40, 64, 80, 96, 112, 192]),
        "value_dim": st.sampled_from([1, 5, 16, 40, 64, 128]),
        "dtype": st.sampled_from(DTYPES),
        "layers": st.integers(1, 3),
    }
)


@settings(max_examples=60)
@given(shapes, st.integers(0, 2**32 - 1), st.integers(0, 4), st.integers(0, 4))
def test_gather_lays_the_pages_of_each_row_side_by_side(
    shape: dict[str, Any], seed: int, rows: int, columns: int
) -> None:
    pool = nan_pool(**shape)
    random = torch.Generator().manual_seed(seed)
    pool.pages(0).copy_(torch.randn(pool.pages(0).shape, generator=random))
    page_table = torch.randint(0, 13, (rows, columns), generator=random, dtype=torch.int32)
    for layer in range(shape["layers"]):
        _, key_pages, value_pages = pool.layer(layer)
        for dense, pages in zip(
            ops.gather_kv(key_pages, value_pages, page_table), (key_pages, value_pages), strict=True
        ):
            _, heads, page_size, dim = pages.shape
            assert dense.shape == (rows, heads, columns * page_size, dim)
            assert dense.is_contiguous() and dense.dtype == pages.dtype
            for row in range(rows):
                for column in range(columns):
                    part = dense[row, :, column * page_size : (column + 1) * page_size]
                    assert torch.equal(part, pages[page_table[row, column]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 64), (5, 7)])
def test_written_tokens_come_back_bit_for_bit_and_nothing_else_does(
    dtype: str, page_size: int, key_dim: int, value_dim: int
) -> None:
    """Three rows of ragged lengths over shuffled pages, in every layer; all else stays NaN."""
    pool = nan_pool(page_size, 3, key_dim, value_dim, dtype)
    lengths = [page_size + 1, 2 * page_size, page_size - 1]
    table = [[7, 2, 11], [4, 9, 0], [1, 0, 0]]
    written = {}
    for layer in range(2):
        _, key_pages, value_pages = pool.layer(layer)
        slots = torch.tensor(
            [
                table[row][position // page_size] * page_size + position % page_size
                for row in range(3)
                for position in range(lengths[row])
            ]
        )
        order = torch.randperm(len(slots))  # rows come in any order
        key, value = random_states(len(slots), key_pages), random_states(len(slots), value_pages)
        ops.write_kv(key[order], value[order], key_pages, value_pages, slots[order])
        written[layer] = (key, value)
    owned = sum(lengths) * 3 * (key_dim + value_dim) * 2
    assert int((~pool.pages(0).isnan()).sum()) == owned
    for layer, states in written.items():
        _, key_pages, value_pages = pool.layer(layer)
        dense = ops.gather_kv(key_pages, value_pages, torch.tensor(table, dtype=torch.int32))
        for got, want in zip(dense, states, strict=True):
            rows = [got[row, :, : lengths[row]].transpose(0, 1) for row in range(3)]
            assert torch.equal(torch.cat(rows), want)
            for row in range(3):
                assert bool(got[row, :, lengths[row] :].isnan().all())


@settings(max_examples=60)
@given(shapes, st.data())
def test_write_touches_its_slots_alone(shape: dict[str, Any], data: st.DataObject) -> None:
    """Whatever the number of heads: a slot is one row in each of them, not `heads` rows in one."""
    pool = nan_pool(**shape)
    size = shape["page_size"]
    layer = data.draw(st.integers(0, shape["layers"] - 1))
    some = st.lists(st.integers(0, 13 * size - 1), unique=True, max_size=20)
    slots = data.draw(some)
    skipped = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    mapping = torch.tensor(slots, dtype=torch.long)
    mapping[torch.tensor(skipped, dtype=torch.bool)] = -1
    _, key_pages, value_pages = pool.layer(layer)
    key, value = random_states(len(slots), key_pages), random_states(len(slots), value_pages)
    want = pool.pages(0).clone()
    for states, start, dim in (
        (key, 0, shape["key_dim"]),
        (value, pool.geometry.groups[0].value_offset, shape["value_dim"]),
    ):
        first = layer * pool.geometry.groups[0].layer_elements + start
        part = want[:, first : first + shape["heads"] * size * dim]
        block = part.view(13, shape["heads"], size, dim)
        for row, slot in enumerate(mapping.tolist()):
            if slot >= 0:
                block[slot // size, :, slot % size] = states[row]
    ops.write_kv(key, value, key_pages, value_pages, mapping)
    assert torch.equal(bits(pool.pages(0)), bits(want))


def test_skipped_rows_write_nothing_at_all() -> None:
    """Slot -1 is no index: `pages[-1]` would be the last page."""
    pool = nan_pool()
    _, key_pages, value_pages = pool.layer(1)
    states = torch.ones(3, 2, 8)
    ops.write_kv(states, states, key_pages, value_pages, torch.full((3,), -1))
    assert bool(pool.pages(0).isnan().all())
    ops.write_kv(states[:0], states[:0], key_pages, value_pages, torch.zeros(0, dtype=torch.long))
    assert bool(pool.pages(0).isnan().all())


def test_k_and_v_of_another_dtype_are_cast() -> None:
    pool = nan_pool(dtype="float16")
    _, key_pages, value_pages = pool.layer(0)
    key, value = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    ops.write_kv(key, value, key_pages, value_pages, torch.tensor([11]))
    assert torch.equal(key_pages[1, :, 3], key[0].half())
    assert torch.equal(value_pages[1, :, 3], value[0].half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_takes_all_layers_and_nothing_else(dtype: str) -> None:
    pool = nan_pool(dtype=dtype, layers=3, key_dim=5, value_dim=3)
    pages = pool.pages(0)
    pages[2:7] = torch.randn(5, pages.shape[1]).to(pages.dtype)
    want = pages.clone()
    want[9], want[1] = pages[3], pages[6]
    ops.copy_pages(pages, torch.tensor([3, 6]), torch.tensor([9, 1]))
    assert torch.equal(bits(pages), bits(want))


def test_what_gather_returns_is_fresh() -> None:
    pool = nan_pool()
    _, key_pages, value_pages = pool.layer(0)
    key, _ = ops.gather_kv(key_pages, value_pages, torch.tensor([[1, 2]]))
    key.fill_(3)
    assert bool(pool.pages(0).isnan().all())


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="needs a sparse pool")
def test_pages_past_every_limit_of_32_bits() -> None:
    """Page ids whose offsets straddle 2^31 and 2^32, in bytes and in elements."""
    shape = LayerShape(8, 128, 128, "float16")
    geometry = KVGeometry.of_layers({0: shape, 1: shape}, 256)
    pool = PagePool(geometry, max_pages=9000)  # 2 MiB each; only what is touched has memory
    elements = pool.pages(0).shape[1]
    limits = (2**31, 2**32, 2**33)
    edges = [limit // 2 // elements for limit in limits]  # in bytes: fp16
    assert [edge * elements * 2 for edge in edges] == list(limits)
    assert edges[1] * elements == 2**31 and edges[2] * elements == 2**32
    ids = sorted({1, 65535 % 9000} | {edge + d for edge in edges for d in (-1, 0, 1)} | {9000})
    for layer in range(2):
        _, key_pages, value_pages = pool.layer(layer)
        key, value = (torch.randn(len(ids), 8, 128).half() for _ in range(2))
        slots = torch.tensor([page * 256 + page % 256 for page in ids])
        ops.write_kv(key, value, key_pages, value_pages, slots)
        table = torch.tensor(ids, dtype=torch.int32)[:, None]
        for got, want in zip(
            ops.gather_kv(key_pages, value_pages, table), (key, value), strict=True
        ):
            for row, page in enumerate(ids):
                assert torch.equal(got[row, :, page % 256], want[row])
                assert int(got[row].count_nonzero()) == int(want[row].count_nonzero())
    # Where a truncated offset would have landed nothing was written.
    wrapped = {(page * elements * 2) % limit // (elements * 2) for page in ids for limit in limits}
    strays = sorted(wrapped - set(ids))
    assert strays and int(pool.pages(0)[strays].count_nonzero()) == 0

    source, target = torch.tensor(ids[:-1]), torch.tensor([8999 - i for i in range(len(ids) - 1)])
    before = pool.pages(0)[source]
    ops.copy_pages(pool.pages(0), source, target)
    assert torch.equal(pool.pages(0)[target], before)
    pool.close()


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="needs a sparse pool")
def test_gather_counts_past_32_bits() -> None:
    """Small pages whose K and V share a small divisor: the pool has more than 2^31 rows."""
    pool = PagePool(
        KVGeometry.of_layers({0: LayerShape(1, 5, 7, "float16")}, 8), max_pages=180_000_000
    )
    _, key_pages, value_pages = pool.layer(0)
    ids = [2**31 // 12 - 1, 2**31 // 12 + 1, 180_000_000]  # 12 rows of 8 elements to a page
    for page in ids:
        key_pages[page], value_pages[page] = page % 1000, page % 999
    key, value = ops.gather_kv(key_pages, value_pages, torch.tensor([ids], dtype=torch.int32))
    for column, page in enumerate(ids):
        assert bool((key[0, :, column * 8 : column * 8 + 8] == page % 1000).all())
        assert bool((value[0, :, column * 8 : column * 8 + 8] == page % 999).all())
