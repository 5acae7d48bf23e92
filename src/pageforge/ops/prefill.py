"""Paged attention of several queries a row (prefill): K and V are read where they lie.

FlashAttention (Dao, 2023, "FlashAttention-2") over pages. A program takes some queries of one row
and the query heads that share a KV head: these (query, head) pairs fill the rows of the matrix
units, and K/V are read once for all of them. It walks over the tiles of tokens that its queries
see: first the tiles that all of them see whole, without any mask, then those at an edge.

On Hopper `prefill_hopper.py` does the same in most cases, half as fast again.

The grid is an upper bound that the host knows; each program finds its row in `cu_query_lens` on
the device, so that lengths change under a captured graph without a recapture or a host sync.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pageforge.geometry import ceil_div
from pageforge.ops.kernels import LOG2E, first_block, jit, row_of_block, tl, triton

try:
    from pageforge.ops import prefill_hopper as hopper
except ImportError:  # which it raises where Triton is missing, or another than it was written for
    hopper = None  # type: ignore[assignment]


def attend_prefill(
    query: Tensor,  # [T, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, new tokens included
    cu_query_lens: Tensor,  # [S + 1] int32
    out: Tensor,  # [T, Hq, Dv], written
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq] float32
    starts: Tensor | None = None,  # [S] int32, tokens of left padding
    lse: Tensor | None = None,  # [T, Hq] float32, written
    min_query_len: int = 1,
) -> None:
    """Causal attention of a ragged batch over pages, into `out`; `reference.attend` is the meaning.

    A row longer than its pages gives NaN. Rows of fewer than `min_query_len` queries are left as
    they are, and so are the tokens before `cu_query_lens[0]` and from `cu_query_lens[-1]` on: a
    batch may be padded, or a slice of the rows be given. (A row that is left costs a program for
    each KV head: where the host knows which rows those are, a slice without them is cheaper.)

    `scale` is positive. `query`, `out` and `page_table` are dense in the last dim, the pages in the
    last three, `lse` in all. K and V of another dtype are cast to the query's as they are read.
    Launches one kernel and waits for nothing.
    """
    num_tokens, num_heads, key_dim = query.shape
    _, num_kv_heads, page_size, value_dim = value_pages.shape
    num_rows = seq_lens.shape[0]
    if num_tokens == 0 or num_rows == 0:
        return
    capability = _capability(query.device)
    if (
        hopper is not None
        and capability == (9, 0)
        and softcap is None
        and sinks is None
        and alibi_slopes is None
        and hopper.serves(query, key_pages, value_pages)
    ):
        hopper.attend_prefill(
            query,
            key_pages,
            value_pages,
            page_table,
            seq_lens,
            cu_query_lens,
            out,
            scale=scale,
            window=window,
            starts=starts,
            lse=lse,
            min_query_len=min_query_len,
        )
        return
    key_pad, value_pad = _padded(key_dim), _padded(value_dim)
    width = max(query.element_size(), key_pages.element_size())
    tiling = _tiling(max(key_pad, value_pad), width, capability)
    group = num_heads // num_kv_heads
    # A group wider than a program is shared out evenly among several.
    parts = ceil_div(group, tiling.pairs)
    pack = ceil_div(group, parts)
    queries = tiling.pairs // pack
    # Scores in base 2 are `factor * raw`, where raw is q . K or, capped, its tanh.
    factor = (scale if softcap is None else softcap) * LOG2E.value
    cap_factor = None if softcap is None else 2 * LOG2E.value * scale / softcap
    one_stride = key_pages.stride(0) == value_pages.stride(0)  # in a pool; it saves arithmetic
    with torch.cuda.device_of(query):
        _prefill_kernel[(num_tokens // queries + num_rows, num_kv_heads * parts)](
            query,
            key_pages,
            value_pages,
            page_table,
            seq_lens,
            cu_query_lens,
            starts,
            sinks,
            alibi_slopes,
            out,
            lse,
            num_rows,
            page_table.shape[1] * page_size,
            min_query_len,
            factor,
            cap_factor,
            window,
            query.stride(0),
            query.stride(1),
            key_pages.stride(0),
            None if one_stride else value_pages.stride(0),
            page_table.stride(0),
            out.stride(0),
            out.stride(1),
            HEADS=num_heads,
            GROUP=group,
            PACK=pack,
            QUERIES=queries,
            PAIRS=tiling.pairs,
            TILE=tiling.tokens,
            PAGE=page_size,
            KEY_DIM=key_dim,
            KEY_PAD=key_pad,
            VALUE_DIM=value_dim,
            VALUE_PAD=value_pad,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )


class _Tiling(NamedTuple):
    """How a program is cut."""

    pairs: int  # (query, head) pairs of a program
    tokens: int  # in a tile, which it reads at a time
    num_warps: int
    num_stages: int


def _tiling(dim: int, width: int, capability: tuple[int, int] | None) -> _Tiling:
    """How a program is cut, by padded head dim, bytes an element and device.

    Compute capability 9.0 is cut as measured; elsewhere this is what shared memory can hold.
    """
    if capability is None:
        return _Tiling(pairs=16, tokens=16, num_warps=1, num_stages=1)  # the interpreter
    wide = dim > 128
    if width == 4:  # no matrix units: exact products of float32
        if wide:
            return _Tiling(pairs=32, tokens=16, num_warps=4, num_stages=1)
        return _Tiling(pairs=32, tokens=32, num_warps=4, num_stages=2)
    if capability[0] == 9:
        # A wgmma takes 64 pairs from each group of 4 warps. The best of nine on an H200.
        if dim <= 64:
            return _Tiling(pairs=64, tokens=64, num_warps=4, num_stages=3)
        if wide:
            return _Tiling(pairs=128, tokens=64, num_warps=8, num_stages=2)
        return _Tiling(pairs=128, tokens=128, num_warps=8, num_stages=3)
    if capability >= (8, 0):
        if wide:
            return _Tiling(pairs=64, tokens=32, num_warps=4, num_stages=2)
        return _Tiling(pairs=64, tokens=64, num_warps=4, num_stages=3)
    if wide:
        return _Tiling(pairs=32, tokens=16, num_warps=4, num_stages=1)
    return _Tiling(pairs=64, tokens=32, num_warps=4, num_stages=1)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    """The device's compute capability, or None where the interpreter stands in for one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _padded(dim: int) -> int:
    """Tiles have powers of two as sides, and matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(dim))


@jit(do_not_specialize=["num_rows", "max_seq_len", "min_query_len", "window", "page_table_row"])
def _prefill_kernel(
    q_ptr,  # [T, Hq, Dk]
    k_ptr,  # [N, Hkv, P, Dk]
    v_ptr,  # [N, Hkv, P, Dv]
    page_table_ptr,  # [S, M] int32
    lens_ptr,  # [S] int32
    cu_ptr,  # [S + 1] int32
    starts_ptr,  # [S] int32 or None
    sinks_ptr,  # [Hq] or None
    slopes_ptr,  # [Hq] or None
    out_ptr,  # [T, Hq, Dv]
    lse_ptr,  # [T, Hq] float32 or None
    num_rows,
    max_seq_len,
    min_query_len,
    factor,  # from a raw score to base 2
    cap_factor,  # 2 log2(e) scale / softcap, or None
    window,  # or None
    q_row,
    q_head,
    k_page,
    v_page,  # or None: as k_page
    page_table_row,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    PACK: tl.constexpr,  # those of them that one program takes
    QUERIES: tl.constexpr,  # of one program
    PAIRS: tl.constexpr,  # at least QUERIES * PACK
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """QUERIES queries of one row, for PACK query heads of one KV head.

    Programs of one KV head run side by side, so that its K/V stay in the L2 cache, and the last
    queries of a row, which see most, come first: what is short fills the gaps at the end.
    """
    PARTS: tl.constexpr = (GROUP + PACK - 1) // PACK
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS

    row = row_of_block(cu_ptr, num_rows, block, QUERIES)
    first_token = tl.load(cu_ptr + row)
    num_queries = tl.load(cu_ptr + row + 1) - first_token
    at = (block - first_block(first_token, row, QUERIES)) * QUERIES
    if (at < 0) | (at >= num_queries) | (num_queries < min_query_len):
        return
    length = tl.load(lens_ptr + row)
    too_long = length > max_seq_len
    length = tl.where(too_long, 0, length)  # none of its pages is read

    pair = tl.arange(0, PAIRS)
    query = at + pair // PACK
    member = part * PACK + pair % PACK
    head = kv_head * GROUP + member
    real = (query < num_queries) & (member < GROUP) & (pair < QUERIES * PACK)
    position = length - num_queries + query

    # Tokens `low` to `last` are seen by some query, `all_low` to `first` by all.
    first = length - num_queries + at
    last = tl.minimum(first + QUERIES, length) - 1
    low = 0
    if starts_ptr is not None:
        low = tl.load(starts_ptr + row)
    all_low = low
    pair_low = tl.zeros([PAIRS], tl.int32) + low
    if window is not None:
        all_low = tl.maximum(low, last - window + 1)
        pair_low = tl.maximum(low, position - window + 1)
        low = tl.maximum(low, first - window + 1)
    # Tiles `begin` to `end`, those from `all_begin` to `all_end` without a mask.
    begin = low // TILE
    end = tl.maximum(tl.cdiv(last + 1, TILE), begin)
    all_begin = tl.minimum(tl.cdiv(all_low, TILE), end)
    all_end = tl.minimum(tl.maximum((first + 1) // TILE, all_begin), end)

    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    in_tile = tl.arange(0, TILE)
    token_of_pair = (first_token + query).to(tl.int64)
    q = tl.load(
        q_ptr + (token_of_pair * q_row + head * q_head)[:, None] + key_dim[None, :],
        mask=real[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0) * (LOG2E / factor)
    # The online softmax: the largest score so far, the sum of weights, the weighted sum of V. A
    # sink is a score that was there before any key.
    top = tl.full([PAIRS], -float("inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = tl.zeros([PAIRS, VALUE_PAD], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    k_base = k_ptr + kv_head * (PAGE * KEY_DIM)
    v_base = v_ptr + kv_head * (PAGE * VALUE_DIM)
    row_pages = page_table_ptr + row.to(tl.int64) * page_table_row
    for MASKED in tl.static_range(2):
        count = all_end - all_begin
        first_tile = all_begin
        if MASKED:
            count = end - begin - count
            first_tile = tl.where(begin < all_begin, begin, all_end)
        token = first_tile * TILE + in_tile
        page = tl.load(row_pages + token // PAGE, mask=(token >= low) & (token <= last), other=0)
        for index in range(0, count):
            # Page ids are loaded a tile early. Else K and V wait for them, and the compiler, which
            # pipelines no such chain, would keep a single tile in flight.
            next_tile = first_tile + index + 1
            if MASKED:
                next_tile = begin + index + 1
                next_tile += tl.where(next_tile >= all_begin, all_end - all_begin, 0)
            next_token = next_tile * TILE + in_tile
            next_page = tl.load(
                row_pages + next_token // PAGE,
                mask=(next_token >= low) & (next_token <= last),
                other=0,
            )
            k_page_at = page.to(tl.int64) * k_page
            v_page_at = k_page_at if v_page is None else page.to(tl.int64) * v_page
            k_at = (k_page_at + (token % PAGE) * KEY_DIM)[:, None]
            v_at = (v_page_at + (token % PAGE) * VALUE_DIM)[:, None]
            if MASKED:
                # Beyond what is seen nothing is loaded, so that what lies there (NaN, another's
                # K/V, no memory at all) cannot matter.
                live = ((token >= low) & (token <= last))[:, None]
                k_mask = live & (key_dim < KEY_DIM)[None, :]
                v_mask = live & (value_dim < VALUE_DIM)[None, :]
                k = tl.load(k_base + k_at + key_dim[None, :], mask=k_mask, other=0.0)
                v = tl.load(v_base + v_at + value_dim[None, :], mask=v_mask, other=0.0)
            else:
                k = _load_rows(k_base + k_at, key_dim[None, :], KEY_DIM, KEY_PAD)
                v = _load_rows(v_base + v_at, value_dim[None, :], VALUE_DIM, VALUE_PAD)
            raw = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if cap_factor is not None:
                raw = 1.0 - 2.0 / (tl.exp2(raw * cap_factor) + 1.0)  # tanh
            if slopes_ptr is not None:
                raw += slope[:, None] * (token[None, :] - position[:, None])
            if MASKED:
                seen = token[None, :] <= position[:, None]
                if (starts_ptr is not None) or (window is not None):
                    seen = seen & (token[None, :] >= pair_low[:, None])
                raw = tl.where(seen, raw, -float("inf"))
            new_top = tl.maximum(top, tl.max(raw, 1) * factor)
            base = new_top
            if MASKED:
                # A pair may have seen nothing so far: then -inf - -inf must not come up.
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weight = tl.exp2(tl.fma(raw, factor, -base[:, None]))
            decay = tl.exp2(top - base)
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
            top = new_top
            token = next_token
            page = next_page

    total = tl.where(total > 0, total, 1.0)  # a query that sees nothing gives 0
    total = tl.where(too_long, float("nan"), total)
    tl.store(
        out_ptr + (token_of_pair * out_row + head * out_head)[:, None] + value_dim[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + token_of_pair * HEADS + head, (top + tl.log2(total)) / LOG2E, mask=real)


@jit()
def _load_rows(rows, dim, DIM: tl.constexpr, PAD: tl.constexpr):
    """DIM elements of each row, and zeros up to PAD."""
    if DIM == PAD:
        return tl.load(rows + dim)
    else:
        return tl.load(rows + dim, mask=dim < DIM, other=0.0)
