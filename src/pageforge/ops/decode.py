"""Paged attention of one query a row (decode): K and V are read where they lie.

FlashDecoding (Dao et al., 2023, "Flash-Decoding for long-context inference") over pages: a row's
K/V are cut into pieces that run side by side; each leaves its output and log-sum-exp, and a second
kernel merges them. How finely each row is cut is planned on the device from `seq_lens`
(`plan_decode`), once for all layers: lengths change under a captured graph without a recapture or a
host sync, and one long row among many short ones does not leave the GPU idle.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pageforge.geometry import ceil_div

LOG2E = tl.constexpr(1.4426950408889634)
"""The kernels take powers of two, which the hardware has, instead of powers of e."""

WAVES = 4
"""Pieces for each multiprocessor, all rows and heads together: enough loads in flight to keep
memory busy on an H200 while pieces start and end (2 to 16 were tried)."""

HEADER = 2
"""A plan begins with two numbers: tiles in a piece, and pieces in all."""


class DecodePlan(NamedTuple):
    """How the rows of a batch are cut into pieces of whole tiles.

    `table` int32: [0] tiles a piece, [1] number of pieces, [2 : 2 + S] first piece of each row,
    then `row << 16 | piece of the row` for each piece.
    """

    table: Tensor
    max_pieces: int  # what the number of pieces cannot exceed
    tile: int  # tokens
    window: int | None


class _Options(NamedTuple):
    tile: int  # tokens that a program reads at a time
    num_warps: int
    num_stages: int


def plan_decode(
    seq_lens: Tensor,  # [S] int32
    *,
    num_kv_heads: int,
    key_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    starts: Tensor | None = None,  # [S] int32, tokens of left padding
) -> DecodePlan:
    """The plan of one decode step, good for every layer of one group. Launches one small kernel.

    S is at most 32,768.
    """
    num_rows = seq_lens.shape[0]
    options = _options(key_dim, dtype, seq_lens.device)
    target = max(1, ceil_div(WAVES * _num_processors(seq_lens.device), num_kv_heads))
    max_pieces = num_rows + target
    table = torch.empty(HEADER + num_rows + max_pieces, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(1,)](
        seq_lens,
        starts,
        table,
        num_rows,
        target,
        0 if window is None else window,
        TILE=options.tile,
        ROWS=triton.next_power_of_2(num_rows),
        HAS_STARTS=starts is not None,
        num_warps=4,
    )
    return DecodePlan(table, max_pieces, options.tile, window)


def attend_decode(
    query: Tensor,  # [S, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, the new token included
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq] float32
    starts: Tensor | None = None,  # [S] int32
    new_key: Tensor | None = None,  # [S, Hkv, Dk]
    new_value: Tensor | None = None,  # [S, Hkv, Dv]
    slot_mapping: Tensor | None = None,  # [S] int64; -1 = skip
) -> Tensor:  # [S, Hq, Dv]
    """Attention of each row's last token over its pages; see `reference.attend` for the meaning.

    With `new_key`, `new_value` and `slot_mapping` the last token's K/V are taken from there and
    written to their slots in the same launch.
    """
    num_rows, num_heads, key_dim = query.shape
    _, num_kv_heads, page_size, value_dim = value_pages.shape
    options = _options(key_dim, query.dtype, query.device)
    out = query.new_empty(num_rows, num_heads, value_dim)
    partial = torch.empty(
        plan.max_pieces * num_heads, value_dim, dtype=torch.float32, device=query.device
    )
    lse = torch.empty(plan.max_pieces * num_heads, dtype=torch.float32, device=query.device)
    chained = _launches_chain(query.device)
    common: dict[str, Any] = {
        "HAS_STARTS": starts is not None,
        "HAS_WINDOW": plan.window is not None,
        "HAS_SINKS": sinks is not None,
        "CHAINED": chained,
    }
    if chained:
        common["launch_pdl"] = True
    _decode_kernel[(plan.max_pieces * num_kv_heads,)](
        query,
        key_pages,
        value_pages,
        new_key,
        new_value,
        slot_mapping,
        page_table,
        seq_lens,
        starts,
        plan.table,
        sinks,
        alibi_slopes,
        out,
        partial,
        lse,
        num_rows,
        scale,
        softcap or 0.0,
        plan.window or 0,
        query.stride(0),
        query.stride(1),
        key_pages.stride(0),
        key_pages.stride(1),
        value_pages.stride(0),
        value_pages.stride(1),
        page_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        KEY_DIM=key_dim,
        KEY_PAD=max(16, triton.next_power_of_2(key_dim)),
        VALUE_DIM=value_dim,
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        PAGE=page_size,
        TILE=plan.tile,
        HAS_CAP=softcap is not None,
        HAS_SLOPES=alibi_slopes is not None,
        WRITES=new_key is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=options.num_warps,
        num_stages=options.num_stages,
        **common,
    )
    _merge_kernel[(num_rows, num_heads, ceil_div(value_dim, MERGED_DIMS))](
        partial,
        lse,
        plan.table,
        seq_lens,
        starts,
        sinks,
        out,
        plan.window or 0,
        HEADS=num_heads,
        VALUE_DIM=value_dim,
        TILE=plan.tile,
        PIECES=32,
        DIMS=MERGED_DIMS,
        num_warps=1,
        **common,
    )
    return out


MERGED_DIMS = 32
"""Dims of the output that one program merges: few, since a long row has hundreds of pieces."""


def _options(key_dim: int, dtype: torch.dtype, device: torch.device) -> _Options:
    """Tile, warps and pipeline depth. Measured on an H200; elsewhere what every device can hold."""
    if device.type != "cuda":
        return _Options(tile=16, num_warps=1, num_stages=1)  # the interpreter
    if dtype == torch.float32 or key_dim > 128:
        return _Options(tile=32, num_warps=4, num_stages=2)
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return _Options(tile=64, num_warps=2, num_stages=4 if key_dim <= 64 else 3)
    return _Options(tile=32, num_warps=2, num_stages=2)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: small, so that tests see rows cut in pieces
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _launches_chain(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _tiles_of_row(length, low, TILE: tl.constexpr):
    """Tiles that hold positions `low` to `length - 1`."""
    return tl.where(length > low, tl.cdiv(length, TILE) - low // TILE, 0)


@triton.jit
def _first_seen(
    starts_ptr, row, length, window, HAS_STARTS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The first position that the last token of `row` sees."""
    low = 0
    if HAS_STARTS:
        low = tl.load(starts_ptr + row)
    if HAS_WINDOW:
        low = tl.maximum(low, length - window)
    return low


@triton.jit
def _plan_kernel(
    lens_ptr,  # [S] int32
    starts_ptr,  # [S] int32
    table_ptr,  # see DecodePlan
    num_rows,
    target,  # pieces that shall be, all rows together
    window,  # 0 = none
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < num_rows
    length = tl.load(lens_ptr + row, mask=real, other=0)
    low = tl.zeros([ROWS], tl.int32)
    if HAS_STARTS:
        low = tl.load(starts_ptr + row, mask=real, other=0)
    if window > 0:
        low = tl.maximum(low, length - window)
    tiles = _tiles_of_row(length, low, TILE)
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target), 1)
    # A row without tokens has one piece too, which writes its zeros.
    pieces = tl.where(real, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    first = tl.cumsum(pieces, 0) - pieces
    tl.store(table_ptr, size)
    tl.store(table_ptr + 1, tl.sum(pieces, 0))
    tl.store(table_ptr + 2 + row, first, mask=real)
    for piece in range(0, tl.max(pieces, 0)):
        where = table_ptr + 2 + num_rows + first + piece
        tl.store(where, (row << 16) | piece, mask=real & (piece < pieces))


@triton.jit
def _decode_kernel(
    q_ptr,  # [S, Hq, Dk]
    k_ptr,  # [N, Hkv, P, Dk]
    v_ptr,  # [N, Hkv, P, Dv]
    new_k_ptr,  # [S, Hkv, Dk]
    new_v_ptr,  # [S, Hkv, Dv]
    slot_ptr,  # [S] int64
    page_table_ptr,  # [S, M] int32
    lens_ptr,  # [S] int32
    starts_ptr,  # [S] int32
    plan_ptr,  # see DecodePlan
    sinks_ptr,  # [Hq]
    slopes_ptr,  # [Hq]
    out_ptr,  # [S, Hq, Dv]
    partial_ptr,  # [pieces, Hq, Dv] float32
    lse_ptr,  # [pieces, Hq] float32, base 2
    num_rows,
    scale,
    softcap,
    window,
    q_row,
    q_head,
    k_page,
    k_head,
    v_page,
    v_head,
    page_table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WRITES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One piece of one row, for one KV head and the GROUP query heads that share it."""
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if CHAINED:
        gdc_wait()
    size = tl.load(plan_ptr)
    if index >= tl.load(plan_ptr + 1):
        return
    item = tl.load(plan_ptr + 2 + num_rows + index)
    row = item >> 16
    piece = item & 0xFFFF
    length = tl.load(lens_ptr + row)
    low = _first_seen(starts_ptr, row, length, window, HAS_STARTS, HAS_WINDOW)
    tiles = _tiles_of_row(length, low, TILE)
    pieces = tl.maximum(tl.cdiv(tiles, size), 1)
    # Pieces of a row differ by one tile at most.
    first_tile = low // TILE + piece * tiles // pieces
    last_tile = low // TILE + (piece + 1) * tiles // pieces
    stored = length
    if WRITES:
        stored = length - 1  # the newest token comes from registers, below

    group = tl.arange(0, GROUP_PAD)
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    in_tile = tl.arange(0, TILE)
    head = kv_head * GROUP + group
    real_head = group < GROUP
    key_real = key_dim < KEY_DIM
    value_real = value_dim < VALUE_DIM
    wide_row = row.to(tl.int64)
    q = tl.load(
        q_ptr + wide_row * q_row + head[:, None] * q_head + key_dim[None, :],
        mask=real_head[:, None] & key_real[None, :],
        other=0.0,
    )
    slope = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head, mask=real_head, other=0.0)
    # The online softmax: the largest score so far, the sum of weights, the weighted sum of V.
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    k_base = k_ptr + kv_head * k_head
    v_base = v_ptr + kv_head * v_head
    row_pages = page_table_ptr + wide_row * page_table_row
    for tile in range(first_tile, last_tile):
        token = tile * TILE + in_tile
        seen = token < stored
        if HAS_STARTS or HAS_WINDOW:
            seen = seen & (token >= low)
        # Beyond what is seen nothing is loaded, so that what lies there (NaN, another's K/V, no
        # memory at all) cannot matter.
        page = tl.load(row_pages + token // PAGE, mask=seen, other=0).to(tl.int64)
        k = tl.load(
            k_base + (page * k_page + (token % PAGE) * KEY_DIM)[:, None] + key_dim[None, :],
            mask=seen[:, None] if KEY_DIM == KEY_PAD else seen[:, None] & key_real[None, :],
            other=0.0,
        )
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        if HAS_SLOPES:
            score += slope[:, None] * (token - length + 1)[None, :]
        score = tl.where(seen[None, :], score * LOG2E, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A tile may hold nothing that is seen: then -inf - -inf must not come up.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        decay = tl.exp2(top - base)
        weight = tl.exp2(score - base[:, None])
        v = tl.load(
            v_base + (page * v_page + (token % PAGE) * VALUE_DIM)[:, None] + value_dim[None, :],
            mask=seen[:, None] if VALUE_DIM == VALUE_PAD else seen[:, None] & value_real[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top

    if WRITES:
        slot = tl.load(slot_ptr + row)
        if (piece == pieces - 1) & (slot >= 0):
            new = wide_row * KV_HEADS + kv_head
            new_k = tl.load(new_k_ptr + new * KEY_DIM + key_dim, mask=key_real, other=0.0)
            new_v = tl.load(new_v_ptr + new * VALUE_DIM + value_dim, mask=value_real, other=0.0)
            new_k = new_k.to(k_ptr.dtype.element_ty)
            new_v = new_v.to(v_ptr.dtype.element_ty)
            k_slot = k_base + (slot // PAGE) * k_page + (slot % PAGE) * KEY_DIM
            v_slot = v_base + (slot // PAGE) * v_page + (slot % PAGE) * VALUE_DIM
            tl.store(k_slot + key_dim, new_k, mask=key_real)
            tl.store(v_slot + value_dim, new_v, mask=value_real)
            score_new = tl.sum(q.to(tl.float32) * new_k[None, :].to(tl.float32), 1) * scale
            if HAS_CAP:
                score_new = softcap * (2.0 * tl.sigmoid(2.0 * score_new / softcap) - 1.0)
            score_new = score_new * LOG2E
            new_top = tl.maximum(top, score_new)
            decay = tl.exp2(top - new_top)
            weight_new = tl.exp2(score_new - new_top)
            total = total * decay + weight_new
            acc = acc * decay[:, None] + weight_new[:, None] * new_v[None, :].to(tl.float32)
            top = new_top
    if CHAINED:
        gdc_launch_dependents()

    real_out = real_head[:, None] & value_real[None, :]
    if pieces == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=real_head, other=0.0).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            decay = tl.exp2(top - new_top)
            acc = acc * decay[:, None]
            total = total * decay + tl.exp2(sink - new_top)
        total = tl.where(total > 0, total, 1.0)  # a row that sees nothing gives 0
        tl.store(
            out_ptr
            + (wide_row * (KV_HEADS * GROUP) + head[:, None]) * VALUE_DIM
            + value_dim[None, :],
            (acc / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=real_out,
        )
    else:
        slot_of_piece = index.to(tl.int64) * (KV_HEADS * GROUP) + head
        safe = tl.where(total > 0, total, 1.0)
        tl.store(
            partial_ptr + slot_of_piece[:, None] * VALUE_DIM + value_dim[None, :],
            acc / safe[:, None],
            mask=real_out,
        )
        tl.store(lse_ptr + slot_of_piece, top + tl.log2(safe), mask=real_head)


@triton.jit
def _merge_kernel(
    partial_ptr,  # [pieces, Hq, Dv] float32
    lse_ptr,  # [pieces, Hq] float32, base 2
    plan_ptr,  # see DecodePlan
    lens_ptr,  # [S] int32
    starts_ptr,  # [S] int32
    sinks_ptr,  # [Hq]
    out_ptr,  # [S, Hq, Dv]
    window,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """`out = sum_i 2^(lse_i) partial_i / sum_i 2^(lse_i)` over the pieces of a row with several."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(lens_ptr + row)
    low = _first_seen(starts_ptr, row, length, window, HAS_STARTS, HAS_WINDOW)
    pieces = tl.cdiv(_tiles_of_row(length, low, TILE), tl.load(plan_ptr))
    if pieces > 1:
        first = tl.load(plan_ptr + 2 + row)
        top = -float("inf")
        total = 0.0
        if HAS_SINKS:
            top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            total = 1.0
        acc = tl.zeros([DIMS], tl.float32)
        for start in range(0, pieces, PIECES):
            piece = start + tl.arange(0, PIECES)
            real = piece < pieces
            slot = (first + piece).to(tl.int64) * HEADS + head
            lse = tl.load(lse_ptr + slot, mask=real, other=-float("inf"))
            part = tl.load(
                partial_ptr + slot[:, None] * VALUE_DIM + dim[None, :],
                mask=real[:, None] & (dim < VALUE_DIM)[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            decay = tl.exp2(top - base)
            weight = tl.exp2(lse - base)
            acc = acc * decay + tl.sum(part * weight[:, None], 0)
            total = total * decay + tl.sum(weight, 0)
            top = new_top
        total = tl.where(total > 0, total, 1.0)
        tl.store(
            out_ptr + (row.to(tl.int64) * HEADS + head) * VALUE_DIM + dim,
            (acc / total).to(out_ptr.dtype.element_ty),
            mask=dim < VALUE_DIM,
        )
