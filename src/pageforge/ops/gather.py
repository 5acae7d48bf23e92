"""gather_kv: the pages of each row side by side, as dense K and V."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected
from pageforge.geometry import ceil_div
from pageforge.ops import kernels, reference
from pageforge.ops.checks import check_layer, check_same_device, shape
from pageforge.ops.kernels import jit, tile_columns, tl
from pageforge.ops.launch import Launcher, addresses, misaligned
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
    if key.numel() + value.numel():
        launch = GatherLaunch(key_pages, value_pages, page_table)
        launch(None, None, key_pages, value_pages, key, value)
    return key, value


class GatherLaunch:
    """`gather_kv` by one kernel, for layer after layer of a group; new tokens are written by it.

    What layers share is worked out once. Nothing is checked; there is a page at least.
    """

    def __init__(
        self,
        key_pages: Tensor,  # [N, Hkv, P, Dk] of any layer
        value_pages: Tensor,  # [N, Hkv, P, Dv]
        page_table: Tensor,  # [S, M] int32 (or int64)
        new: range = range(0),
    ):
        """`new`: which of the `M * P` positions of a row the new tokens have."""
        num_rows, num_columns = page_table.shape
        _, num_heads, page_size, key_dim = key_pages.shape
        value_dim = value_pages.shape[3]
        num_blocks = num_rows * num_heads * num_columns
        blocks = page_size * key_dim, page_size * value_dim
        columns = [tile_columns(block) for block in blocks]
        num_programs = sum(
            ceil_div(num_blocks, kernels.TILE // width) * ceil_div(block, width)
            for width, block in zip(columns, blocks, strict=True)
        )
        self._grid = (num_programs, 1, 1)
        self._rest = page_table, num_blocks, num_columns, page_table.stride(0), new.start, new.stop
        self._constants = {
            "HEADS": num_heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "PAGE": page_size,
            "KEY_PAGE": key_pages.stride(0),
            "VALUE_PAGE": value_pages.stride(0),
            "KEY_COLUMNS": columns[0],
            "VALUE_COLUMNS": columns[1],
            "TILE": kernels.TILE,
        }
        self._variant = (*self._constants.values(), key_pages.dtype, page_table.dtype)
        self._device = key_pages.device
        self._launches: dict[Hashable, Callable[..., None]] = {}

    def __call__(
        self,
        key: Tensor | None,  # [S, Hkv, T, Dk]; None where no tokens are new
        value: Tensor | None,  # [S, Hkv, T, Dv]
        key_pages: Tensor,
        value_pages: Tensor,
        key_out: Tensor,  # [S, Hkv, M * P, Dk], written
        value_out: Tensor,  # [S, Hkv, M * P, Dv], written
    ) -> None:
        """Launch for one layer. The last dim of `key` and `value` is dense."""
        layer: tuple[Any, ...] = key, value, key_pages, value_pages, key_out, value_out
        pointers = addresses(layer)
        states = None
        if key is not None and value is not None:
            states = key.dtype, value.dtype, key.stride()[:3], value.stride()[:3]
        layout = states, misaligned(pointers)
        launch = self._launches.get(layout)
        if launch is None:
            launch = self._launches[layout] = self._prepare(layout, layer)
        launch(*(pointers if self._device.type == "cuda" else layer))

    def _prepare(
        self, layout: tuple[tuple[Any, ...] | None, tuple[bool, ...]], layer: tuple[Any, ...]
    ) -> Callable[..., None]:
        """The launch for layers whose tensors are laid out like these."""
        states, is_misaligned = layout
        dtypes, strides = ((), ((0, 0, 0),) * 2) if states is None else (states[:2], states[2:])
        aligns = {
            "KEY_ALIGN": math.gcd(*strides[0], 16),
            "VALUE_ALIGN": math.gcd(*strides[1], 16),
        }
        return _gather_launcher.prepare(
            (self._variant, dtypes, is_misaligned, *aligns.values()),
            self._device,
            self._grid,
            layer,
            (*self._rest, *strides[0], *strides[1]),
            self._constants | aligns,
            {},
        )


@jit(
    do_not_specialize=[
        "num_blocks",
        "num_columns",
        "table_stride",
        "new_start",
        "new_stop",
        "key_row",
        "key_head",
        "key_token",
        "value_row",
        "value_head",
        "value_token",
    ],
    do_not_specialize_on_alignment=["table_ptr"],
)
def _gather_kernel(
    key_ptr,  # [S, Hkv, T, Dk]: new tokens; or None
    value_ptr,  # [S, Hkv, T, Dv]
    key_pages_ptr,  # [N, Hkv, P, Dk]; new tokens are written to it
    value_pages_ptr,  # [N, Hkv, P, Dv]
    key_out_ptr,  # [S, Hkv, M, P * Dk]
    value_out_ptr,  # [S, Hkv, M, P * Dv]
    table_ptr,  # [S, M] int32; from here on the same in all layers
    num_blocks,  # S * Hkv * M
    num_columns,  # M
    table_stride,
    new_start,  # new tokens have these of a row's M * P positions
    new_stop,
    key_row: tl.int64,  # strides in elements, to the next row, head and token
    key_head: tl.int64,
    key_token: tl.int64,
    value_row: tl.int64,
    value_head: tl.int64,
    value_token: tl.int64,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_PAGE: tl.constexpr,  # elements from page to page
    VALUE_PAGE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
):
    program = tl.program_id(0)
    chunks: tl.constexpr = (PAGE * KEY_DIM + KEY_COLUMNS - 1) // KEY_COLUMNS
    of_key = tl.cdiv(num_blocks, TILE // KEY_COLUMNS) * chunks
    if program < of_key:
        _gather_tile(
            program,
            key_ptr,
            key_pages_ptr,
            key_out_ptr,
            table_ptr,
            num_blocks,
            num_columns,
            table_stride,
            new_start,
            new_stop,
            key_row,
            key_head,
            key_token,
            HEADS,
            KEY_DIM,
            PAGE,
            KEY_PAGE,
            KEY_COLUMNS,
            KEY_ALIGN,
            TILE,
        )
    else:
        _gather_tile(
            program - of_key,
            value_ptr,
            value_pages_ptr,
            value_out_ptr,
            table_ptr,
            num_blocks,
            num_columns,
            table_stride,
            new_start,
            new_stop,
            value_row,
            value_head,
            value_token,
            HEADS,
            VALUE_DIM,
            PAGE,
            VALUE_PAGE,
            VALUE_COLUMNS,
            VALUE_ALIGN,
            TILE,
        )


@jit()
def _gather_tile(
    tile,
    states_ptr,  # [S, Hkv, T, D], or None
    pages_ptr,  # [N, Hkv, P, D]
    out_ptr,  # [S, Hkv, M, P * D]
    table_ptr,  # [S, M] int32
    num_blocks,
    num_columns,
    table_stride,
    new_start,
    new_stop,
    row_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,  # divides the states' strides
    TILE: tl.constexpr,
):
    """Some (page, head) blocks, and COLUMNS of the `P * D` elements of each.

    New tokens come from `states_ptr`, and go to their pages too; tokens without a page do not.
    """
    BLOCK: tl.constexpr = PAGE * DIM
    chunks: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = TILE // COLUMNS
    first = tile // chunks * blocks
    block = first + tl.arange(0, blocks)
    element = tile % chunks * COLUMNS + tl.arange(0, COLUMNS)
    column = block % num_columns
    head = block // num_columns % HEADS
    row = (block // (num_columns * HEADS)).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + column, mask=block < num_blocks, other=0)
    in_pages = (page.to(tl.int64) * PAGE_STRIDE + head * BLOCK)[:, None] + element[None, :]
    in_out = (block.to(tl.int64) * BLOCK)[:, None] + element[None, :]
    exists = (block < num_blocks)[:, None] & (element < BLOCK)[None, :]
    if states_ptr is None:
        tl.store(out_ptr + in_out, tl.load(pages_ptr + in_pages, mask=exists), mask=exists)
    else:
        token = (column * PAGE - new_start)[:, None] + (element // DIM)[None, :]
        is_new = exists & (page > 0)[:, None] & (token >= 0) & (token < new_stop - new_start)
        is_old = exists & (is_new == 0)
        tl.store(out_ptr + in_out, tl.load(pages_ptr + in_pages, mask=is_old), mask=is_old)
        if first % num_columns + blocks > new_start // PAGE:  # else there are none in this tile
            of_page = row * row_stride + head * head_stride
            of_page += (column * PAGE - new_start) * token_stride  # as if its first token was new
            in_page = tl.multiple_of(element // DIM * token_stride, ALIGN) + element % DIM
            of_page = tl.multiple_of(of_page, ALIGN)
            in_states = of_page[:, None] + in_page[None, :]
            states = tl.load(states_ptr + in_states, mask=is_new).to(pages_ptr.dtype.element_ty)
            tl.store(out_ptr + in_out, states, mask=is_new)
            tl.store(pages_ptr + in_pages, states, mask=is_new)


_gather_launcher = Launcher(_gather_kernel)


def gathered_sizes(
    key_pages: Tensor, value_pages: Tensor, page_table: Tensor
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """`[S, Hkv, M * P, Dk]` and `[S, Hkv, M * P, Dv]`."""
    num_rows, num_columns = page_table.shape
    _, num_heads, page_size, key_dim = key_pages.shape
    tokens = num_columns * page_size
    return (num_rows, num_heads, tokens, key_dim), (
        num_rows,
        num_heads,
        tokens,
        value_pages.shape[3],
    )


def _empty_like_gathered(
    key_pages: Tensor, value_pages: Tensor, page_table: Tensor
) -> tuple[Tensor, Tensor]:
    key_size, value_size = gathered_sizes(key_pages, value_pages, page_table)
    return key_pages.new_empty(key_size), key_pages.new_empty(value_size)


_gather_kv = register(
    "gather_kv(Tensor key_pages, Tensor value_pages, Tensor page_table) -> (Tensor, Tensor)",
    cpu=reference.gather_kv,
    cuda=launch_gather_kv if kernels.AVAILABLE else reference.gather_kv,
    fake=_empty_like_gathered,
)
