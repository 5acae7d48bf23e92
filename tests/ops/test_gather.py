"""gather_kv: the kernel in Triton's interpreter and the op on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ops.cache_cases import (
    DTYPES,
    EDGES,
    SHAPES,
    bits,
    interpreted,
    nan_pages,
    needs_sparse_memory,
    random_pages,
    sparse_pages,
)
from torch import Tensor

from pageforge import ops
from pageforge.errors import ShapeError
from pageforge.ops import reference
from pageforge.ops.gather import launch_gather_kv

both_ways = pytest.mark.parametrize(
    "gather", [pytest.param(launch_gather_kv, marks=interpreted, id="kernel"), ops.gather_kv]
)


def check_gather(
    gather: Callable[..., tuple[Tensor, Tensor]],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    size: tuple[int, int],
    device: str = "cpu",
) -> None:
    """Bit for bit the pages, NaN and page 0 too, in fresh dense tensors."""
    rows, columns = size
    pages = random_pages(7, shape, dtype=dtype, device=device)
    wide = torch.randint(0, 7, (rows, columns + 3), dtype=torch.int32, device=device)
    table = wide[:, 2 : 2 + columns]  # as a window's part of a page table is
    want = reference.gather_kv(pages.key, pages.value, table)
    got = gather(pages.key, pages.value, table)
    page_size, heads, key_dim, value_dim = shape
    for mine, theirs, dim in zip(got, want, (key_dim, value_dim), strict=True):
        assert mine.shape == (rows, heads, columns * page_size, dim)
        assert mine.is_contiguous() and mine.dtype == dtype
        assert torch.equal(bits(mine), bits(theirs))


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(gather, shape, dtype: torch.dtype) -> None:
    for size in ((1, 1), (2, 0), (0, 2), (2, 3)):
        check_gather(gather, shape, dtype, size)


@both_ways
def test_only_named_pages_are_read(gather) -> None:
    pages = nan_pages(5, (8, 2, 16, 40))
    pages.all[[0, 3]] = torch.randn_like(pages.all[:2])
    for dense in gather(pages.key, pages.value, torch.tensor([[3, 0], [0, 3]]).int()):
        assert not dense.isnan().any()


@needs_sparse_memory
@both_ways
def test_pages_past_every_limit_of_32_bits(gather) -> None:
    with sparse_pages() as pages:
        for page in EDGES:
            pages.all[page] = page % 1000
        table = torch.tensor([EDGES], dtype=torch.int32)
        for dense in gather(pages.key, pages.value, table):
            for column, page in enumerate(EDGES):
                assert (dense[0, :, column * 256 : column * 256 + 256] == page % 1000).all()


# --- the op ---------------------------------------------------------------------------------------


def arguments() -> list[Tensor]:
    pages = random_pages(4, (8, 2, 16, 4))
    pages.all.nan_to_num_(7)
    return [pages.key, pages.value, torch.tensor([[1, 3, 0], [2, 1, 1]], dtype=torch.int32)]


def test_what_torch_knows_of_it() -> None:
    torch.library.opcheck(torch.ops.pageforge.gather_kv.default, arguments())


def test_compiled_code() -> None:
    args = arguments()

    def step(key_pages, value_pages, table):
        key, value = ops.gather_kv(key_pages, value_pages, table)
        key_pages[3] = 0  # what was gathered is fresh
        return key.sum(2), value + 1

    want = step(args[0].clone(), *args[1:])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_a_table_of_int64_is_taken_as_well() -> None:
    key_pages, value_pages, table = arguments()
    for mine, theirs in zip(
        ops.gather_kv(key_pages, value_pages, table.long()),
        ops.gather_kv(key_pages, value_pages, table),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda pages: pages.half(), "value_pages: expected .*torch.float16"),
        (0, lambda pages: pages.transpose(1, 2), "key_pages: expected strides"),
        (1, lambda pages: pages[0], "key_pages, value_pages: expected .N, Hkv, P, dim."),
        (2, lambda table: table.float(), r"page_table: expected \[S, M\] torch.int32, got .*float"),
        (2, lambda table: table[0], r"page_table: expected \[S, M\] torch.int32, got \[3\]"),
        (2, lambda table: table.T, "page_table: expected dense rows, got .1, 3."),
    ],
)
def test_wrong_arguments_are_refused(position: int, change, message: str) -> None:
    args = arguments()
    args[position] = change(args[position])
    with pytest.raises(ShapeError, match=message):
        ops.gather_kv(*args)
