"""write_kv: new K/V rows to their slots in the pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected
from pageforge.geometry import ceil_div
from pageforge.ops import kernels, reference
from pageforge.ops.checks import check_layer, check_same_device, shape
from pageforge.ops.kernels import jit, tile_columns, tl
from pageforge.ops.launch import Launcher, addresses, misaligned
from pageforge.ops.library import register


def write_kv(
    key: Tensor,  # [T, Hkv, Dk]
    value: Tensor,  # [T, Hkv, Dv]
    key_pages: Tensor,  # [N, Hkv, P, Dk], written
    value_pages: Tensor,  # [N, Hkv, P, Dv], written
    slot_mapping: Tensor,  # [T] int64; -1 = skip
    *,
    check: bool = True,
) -> None:
    """`key_pages[slot // P, :, slot % P] = key`, the same for V; rows with slot -1 write nothing.

    `key` and `value` may have any strides (a transposed view is read where it lies). K and V of
    another dtype are cast to the pages' dtype. Slots must be unique and inside the pool: on CUDA
    they are not looked at by the host, which waits for nothing, so a graph can capture this.

    Raises ShapeError, and then nothing was written; without `check`, which a caller may leave out
    who has made sure of it all and needs no gradient, it may write anywhere.
    """
    arguments = key, value, key_pages, value_pages, slot_mapping
    is_plain = type(key) is type(value) is Tensor
    if check or not is_plain or torch.compiler.is_compiling():
        _check(*arguments)
        _write_kv(*arguments)
    else:  # without torch's dispatcher, which takes the host longer than the launch
        on_cuda = key.is_cuda and kernels.AVAILABLE
        (launch_write_kv if on_cuda else reference.write_kv)(*arguments)


def _check(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    heads, key_dim, value_dim = check_layer(key_pages, value_pages)
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        got = f"{shape(slot_mapping)} {slot_mapping.dtype}"
        raise ShapeError(expected("slot_mapping", "[T] torch.int64", got, "use .flatten().long()"))
    if not slot_mapping.is_contiguous():
        fix = "call .contiguous()"
        raise ShapeError(expected("slot_mapping", "stride 1", slot_mapping.stride(), fix))
    check_same_device("slot_mapping", slot_mapping, key_pages)
    num_tokens = slot_mapping.numel()
    _check_states("key", key, (num_tokens, heads, key_dim), key_pages)
    _check_states("value", value, (num_tokens, heads, value_dim), key_pages)


def _check_states(name: str, states: Tensor, size: tuple[int, int, int], pages: Tensor) -> None:
    if states.shape != size:
        fix = "as many rows as slots, and the heads and dim of the pages"
        raise ShapeError(expected(name, list(size), shape(states), fix))
    check_same_device(name, states, pages)
    if not states.dtype.is_floating_point:
        raise ShapeError(expected(name, "a floating dtype", states.dtype, f"pass {pages.dtype}"))


def launch_write_kv(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    """`write_kv` by one kernel, K and V side by side in its grid."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens == 0:
        return
    key_columns = tile_columns(num_heads * key_dim)
    value_columns = tile_columns(num_heads * value_dim)
    num_programs = sum(
        ceil_div(num_tokens, kernels.TILE // columns) * ceil_div(num_heads * dim, columns)
        for columns, dim in ((key_columns, key_dim), (value_columns, value_dim))
    )
    layer = key, value, key_pages, value_pages, slot_mapping
    constants = {
        "KEY_STRIDE": key.stride(2),
        "VALUE_STRIDE": value.stride(2),
        "KEY_PAGE": key_pages.stride(0),
        "VALUE_PAGE": value_pages.stride(0),
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PAGE": key_pages.shape[2],
        "KEY_COLUMNS": key_columns,
        "VALUE_COLUMNS": value_columns,
        "KEY_ALIGN": math.gcd(*key.stride()[:2], 16),
        "VALUE_ALIGN": math.gcd(*value.stride()[:2], 16),
        "TILE": kernels.TILE,
    }
    dtypes = key.dtype, value.dtype, key_pages.dtype
    launch = _write_launcher.prepare(
        (dtypes, misaligned(addresses(layer[:4])), *constants.values()),
        key_pages.device,
        (num_programs, 1, 1),
        layer,
        (num_tokens, *key.stride()[:2], *value.stride()[:2]),
        constants,
        {},
    )
    launch(*(addresses(layer) if key_pages.is_cuda else layer))


@jit(
    do_not_specialize=["num_tokens", "key_token", "key_head", "value_token", "value_head"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _write_kernel(
    key_ptr,  # [T, Hkv, Dk]
    value_ptr,  # [T, Hkv, Dv]
    key_pages_ptr,  # [N, Hkv, P, Dk]
    value_pages_ptr,  # [N, Hkv, P, Dv]
    slots_ptr,  # [T] int64
    num_tokens,
    key_token: tl.int64,  # strides in elements, to the next token and head
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    KEY_STRIDE: tl.constexpr,  # and to the next dim
    VALUE_STRIDE: tl.constexpr,
    KEY_PAGE: tl.constexpr,  # from page to page
    VALUE_PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    chunks: tl.constexpr = (HEADS * KEY_DIM + KEY_COLUMNS - 1) // KEY_COLUMNS
    of_key = tl.cdiv(num_tokens, TILE // KEY_COLUMNS) * chunks
    if program < of_key:
        _write_tile(
            program,
            key_ptr,
            key_pages_ptr,
            slots_ptr,
            num_tokens,
            key_token,
            key_head,
            KEY_STRIDE,
            KEY_PAGE,
            HEADS,
            KEY_DIM,
            PAGE,
            KEY_COLUMNS,
            KEY_ALIGN,
            TILE,
        )
    else:
        _write_tile(
            program - of_key,
            value_ptr,
            value_pages_ptr,
            slots_ptr,
            num_tokens,
            value_token,
            value_head,
            VALUE_STRIDE,
            VALUE_PAGE,
            HEADS,
            VALUE_DIM,
            PAGE,
            VALUE_COLUMNS,
            VALUE_ALIGN,
            TILE,
        )


@jit()
def _write_tile(
    tile,
    states_ptr,  # [T, Hkv, D]
    pages_ptr,  # [N, Hkv, P, D]
    slots_ptr,  # [T] int64
    num_tokens,
    token_stride,
    head_stride,
    DIM_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,  # divides token_stride and head_stride
    TILE: tl.constexpr,
):
    """Some tokens, and COLUMNS of their HEADS * DIM elements."""
    chunks: tl.constexpr = (HEADS * DIM + COLUMNS - 1) // COLUMNS
    tokens: tl.constexpr = TILE // COLUMNS
    token = tile // chunks * tokens + tl.arange(0, tokens)
    column = tile % chunks * COLUMNS + tl.arange(0, COLUMNS)
    head = (column // DIM).to(tl.int64)
    dim = column % DIM
    exists = (token < num_tokens)[:, None] & (column < HEADS * DIM)[None, :]
    # The rows of skipped slots are read too (and not written): so both loads start at once.
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    from_token = tl.multiple_of(token.to(tl.int64) * token_stride, ALIGN)
    from_head = tl.multiple_of(head * head_stride, ALIGN)
    states = tl.load(
        states_ptr + from_token[:, None] + (from_head + dim * DIM_STRIDE)[None, :], mask=exists
    )
    to_slot = (slot // PAGE) * PAGE_STRIDE + (slot % PAGE) * DIM
    tl.store(
        pages_ptr + to_slot[:, None] + (head * (PAGE * DIM) + dim)[None, :],
        states.to(pages_ptr.dtype.element_ty),
        mask=exists & (slot >= 0)[:, None],
    )


_write_launcher = Launcher(_write_kernel)


def _fake_write_kv(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
) -> None:
    """Nothing is returned."""


_write_kv = register(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, "
    "Tensor slot_mapping) -> ()",
    cpu=reference.write_kv,
    cuda=launch_write_kv if kernels.AVAILABLE else reference.write_kv,
    fake=_fake_write_kv,
)
