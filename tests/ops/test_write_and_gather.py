"""write_and_gather: the kernel in Triton's interpreter, and by index, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.cache_cases import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    Pages,
    bits,
    interpreted,
    random_pages,
    random_states,
)
from torch import Tensor

from pageforge import ops
from pageforge.ops import reference
from pageforge.ops.write_and_gather import ByIndex, ByKernel

both_ways = pytest.mark.parametrize(
    "way", [pytest.param(ByKernel, marks=interpreted, id="kernel"), ByIndex]
)

TABLE = [[1, 5, 3], [0, 0, 4], [1, 6, 2], [0, 0, 0]]
"""Rows share page 1, where nothing is new; some begin with pages of padding, one has no others."""


def random_step(
    shape: tuple[int, int, int, int],
    num_tokens: int,
    dtype: torch.dtype,
    layout: str = "dense",
    device: str = "cpu",
    states_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """New K and V `[S, Hkv, T, D]` of the rows of TABLE."""
    _, heads, key_dim, value_dim = shape
    like = torch.empty(0, dtype=states_dtype or dtype, device=device)
    key, value = (
        random_states(len(TABLE) * num_tokens, heads, dim, layout, like)
        .unflatten(0, (len(TABLE), num_tokens))
        .transpose(1, 2)
        for dim in (key_dim, value_dim)
    )
    return key, value


def table_of(first: int, device: str = "cpu") -> Tensor:
    """The columns of TABLE from `first` on, in a wider one as a batch's is."""
    wide = torch.tensor(TABLE, dtype=torch.int32, device=device).repeat(1, 2)
    return wide[:, first : len(TABLE[0])]


def by_ops(
    key: Tensor, value: Tensor, pages: Pages, table: Tensor, oldest: int, new: range
) -> tuple[Tensor, Tensor]:
    """The same by the two ops whose work it does."""
    size = pages.key.shape[2]
    positions = torch.tensor(list(new), device=table.device)
    page_ids = table.long()[:, positions // size]
    slots = torch.where(page_ids > 0, page_ids * size + positions % size, -1).flatten()
    by_token = [states.transpose(1, 2).flatten(0, 1) for states in (key, value)]
    reference.write_kv(*by_token, pages.key, pages.value, slots)
    dense = reference.gather_kv(pages.key, pages.value, table)
    return dense[0][:, :, oldest : new.stop], dense[1][:, :, oldest : new.stop]


def check(
    way: Callable[..., Any],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    new: range,
    oldest: int = 0,
    first: int = 0,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Two layers, one after the other: pages and dense K and V to the last bit, and nothing else.

    `new`, `oldest`: positions in the table from its column `first` on.
    """
    pages = random_pages(7, shape, dtype=dtype, device=device)
    table = table_of(first, device)
    both = way(pages.key, pages.value, table, oldest, new)
    for layout in ("dense", options.pop("layout", "dense")):
        key, value = random_step(shape, len(new), dtype, layout, device, **options)
        want_pages = pages.clone()
        want = by_ops(key, value, want_pages, table, oldest, new)
        got = both(key, value, pages.key, pages.value)
        assert torch.equal(bits(pages.all), bits(want_pages.all))
        for mine, theirs in zip(got, want, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == dtype
            assert mine.stride() == theirs.stride()
            assert torch.equal(bits(mine), bits(theirs))


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(way, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    size = shape[0]
    check(way, shape, dtype, range(2 * size, 2 * size + 1))  # the first of a page
    check(way, shape, dtype, range(3 * size - 1, 3 * size))  # the last one
    check(way, shape, dtype, range(2 * size + 3, 2 * size + 4), oldest=5)


@both_ways
def test_several_new_tokens(way) -> None:
    """In a page and in two, some of them padding."""
    for new in (range(16, 24), range(17, 19), range(13, 20), range(8, 17)):
        check(way, (8, 3, 40, 24), torch.float16, new)


@both_ways
def test_a_window(way) -> None:
    """The table begins at the page of the oldest token that the window shows."""
    check(way, (8, 2, 16, 16), torch.float32, range(13, 14), oldest=6, first=1)
    check(way, (8, 2, 16, 16), torch.float32, range(2, 7), oldest=1, first=2)


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_laid_out_otherwise(way, layout: str) -> None:
    for num_tokens in (1, 4):
        new = range(18, 18 + num_tokens)
        check(way, (8, 3, 40, 24), torch.float16, new, layout=layout)


@both_ways
def test_other_dtypes_are_cast(way) -> None:
    new = range(18, 19)
    check(way, (8, 2, 40, 16), torch.float16, new, states_dtype=torch.float32)
    check(way, (8, 2, 40, 16), torch.float32, new, states_dtype=torch.float16)


def test_what_the_cpu_takes() -> None:
    pages = random_pages(7, (8, 2, 16, 16))
    way = ops.write_and_gather(pages.key, pages.value, table_of(0), 0, range(16, 17))
    assert isinstance(way, ByIndex)
