"""gather_kv: the pages of each row side by side, as dense K and V."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected
from pageforge.geometry import ceil_div
from pageforge.ops import kernels, reference
from pageforge.ops.checks import check_layer, check_same_device, shape
from pageforge.ops.kernels import jit, tile_columns, tl
from pageforge.ops.library import register

PAGE_ID_DTYPES = (torch.int32, torch.int64)


def gather_kv(
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32 (or int64)
) -> tuple[Tensor, Tensor]:
    """K `[S, Hkv, M * P, Dk]` and V `[S, Hkv, M * P, Dv]`: the pages of each row, side by side.

    Bit for bit what the pages hold, in fresh contiguous tensors; where the table says page 0, what
    page 0 holds. The rows of `page_table` may be strided (`table[:, low:high]`). Page ids must be
    inside the pool: on CUDA they are not looked at by the host, which waits for nothing, so a graph
    can capture this.

    Raises ShapeError.
    """
    check_layer(key_pages, value_pages)
    if page_table.dtype not in PAGE_ID_DTYPES or page_table.dim() != 2:
        got = f"{shape(page_table)} {page_table.dtype}"
        raise ShapeError(expected("page_table", "[S, M] torch.int32", got, "use .int()"))
    if page_table.stride()[1] != 1 and page_table.shape[1] > 1:
        fix = "call .contiguous()"
        raise ShapeError(expected("page_table", "dense rows", page_table.stride(), fix))
    check_same_device("page_table", page_table, key_pages)
    key, value = _gather_kv(key_pages, value_pages, page_table)
    return key, value


def launch_gather_kv(
    key_pages: Tensor, value_pages: Tensor, page_table: Tensor
) -> tuple[Tensor, Tensor]:
    """`gather_kv` by one kernel, K and V side by side in its grid."""
    key, value = _empty_like_gathered(key_pages, value_pages, page_table)
    num_rows, num_columns = page_table.shape
    _, num_heads, page_size, key_dim = key_pages.shape
    num_blocks = num_rows * num_heads * num_columns
    if num_blocks == 0:
        return key, value
    key_block, value_block = page_size * key_dim, page_size * value_pages.shape[3]
    key_columns, value_columns = tile_columns(key_block), tile_columns(value_block)
    num_programs = sum(
        ceil_div(num_blocks, kernels.TILE // columns) * ceil_div(block, columns)
        for columns, block in ((key_columns, key_block), (value_columns, value_block))
    )
    with torch.cuda.device_of(key_pages):
        _gather_kernel[(num_programs,)](
            key_pages,
            value_pages,
            page_table,
            key,
            value,
            num_blocks,
            num_columns,
            page_table.stride(0),
            key_pages.stride(0),
            value_pages.stride(0),
            HEADS=num_heads,
            KEY_BLOCK=key_block,
            VALUE_BLOCK=value_block,
            KEY_COLUMNS=key_columns,
            VALUE_COLUMNS=value_columns,
            ALIGN=math.gcd(key_pages.stride(0), value_pages.stride(0), 16),
            TILE=kernels.TILE,
        )
    return key, value


@jit(
    do_not_specialize=["num_blocks", "num_columns", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def _gather_kernel(
    key_pages_ptr,  # [N, Hkv, P, Dk]
    value_pages_ptr,  # [N, Hkv, P, Dv]
    table_ptr,  # [S, M] int32
    key_ptr,  # [S, Hkv, M, P * Dk]
    value_ptr,  # [S, Hkv, M, P * Dv]
    num_blocks,  # S * Hkv * M
    num_columns,  # M
    table_stride,
    key_page,  # elements from page to page
    value_page,
    HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    chunks: tl.constexpr = (KEY_BLOCK + KEY_COLUMNS - 1) // KEY_COLUMNS
    of_key = tl.cdiv(num_blocks, TILE // KEY_COLUMNS) * chunks
    if program < of_key:
        _gather_tile(
            program,
            key_pages_ptr,
            table_ptr,
            key_ptr,
            num_blocks,
            num_columns,
            table_stride,
            key_page,
            HEADS,
            KEY_BLOCK,
            KEY_COLUMNS,
            ALIGN,
            TILE,
        )
    else:
        _gather_tile(
            program - of_key,
            value_pages_ptr,
            table_ptr,
            value_ptr,
            num_blocks,
            num_columns,
            table_stride,
            value_page,
            HEADS,
            VALUE_BLOCK,
            VALUE_COLUMNS,
            ALIGN,
            TILE,
        )


@jit()
def _gather_tile(
    tile,
    pages_ptr,  # [N, Hkv, BLOCK]
    table_ptr,  # [S, M] int32
    out_ptr,  # [S, Hkv, M, BLOCK]
    num_blocks,
    num_columns,
    table_stride,
    page_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of one head in a page
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,  # divides page_stride
    TILE: tl.constexpr,
):
    """Some (page, head) blocks, and COLUMNS of their BLOCK elements."""
    chunks: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = TILE // COLUMNS
    block = tile // chunks * blocks + tl.arange(0, blocks)
    element = tile % chunks * COLUMNS + tl.arange(0, COLUMNS)
    head = block // num_columns % HEADS
    row = (block // (num_columns * HEADS)).to(tl.int64)
    page = tl.load(
        table_ptr + row * table_stride + block % num_columns, mask=block < num_blocks, other=0
    )
    source = tl.multiple_of(page.to(tl.int64) * page_stride, ALIGN) + head * BLOCK
    target = block.to(tl.int64) * BLOCK
    exists = (block < num_blocks)[:, None] & (element < BLOCK)[None, :]
    data = tl.load(pages_ptr + source[:, None] + element[None, :], mask=exists)
    tl.store(out_ptr + target[:, None] + element[None, :], data, mask=exists)


def _empty_like_gathered(
    key_pages: Tensor, value_pages: Tensor, page_table: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = page_table.shape
    _, num_heads, page_size, key_dim = key_pages.shape
    size = (num_rows, num_heads, num_columns * page_size)
    return key_pages.new_empty(*size, key_dim), key_pages.new_empty(*size, value_pages.shape[3])


_gather_kv = register(
    "gather_kv(Tensor key_pages, Tensor value_pages, Tensor page_table) -> (Tensor, Tensor)",
    cpu=reference.gather_kv,
    cuda=launch_gather_kv if kernels.AVAILABLE else reference.gather_kv,
    fake=_empty_like_gathered,
)
