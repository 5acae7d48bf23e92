"""Paged attention of several queries a row (prefill) on Hopper, in Gluon: Triton's lower level.

The same cut and the same arithmetic as in `prefill.py`; what differs is who does what, as in
FlashAttention-3 (Shah et al., 2024, "Fast and accurate attention with asynchrony and
low-precision"). The warps of a program have different jobs:

- One warp copies K, and one V, from the pages to a ring of tiles in shared memory, by TMA: a copy
  for each page and SPAN of the head dim, which a single thread asks for. Neither waits for the
  other, nor for anything but an empty tile.
- Two groups of four warps, the consumers, multiply (wgmma), each for half of the program's pairs.
  While a consumer works out the weights of a tile, its product of Q and the next tile's K runs; and
  while it waits for the product with V, the other consumer works out weights.

Tiles go from the last to the first. The last is the one that ends inside a page, and so what needs
mending in it is mended before the loops; those that all queries see follow, without a mask; with a
window or left padding the first ones have a mask again.

What no token owns must not matter, though a copy takes a page whole:

- A page of a tile that nobody sees is copied from lines before the pool's first. TMA fills with
  zeros what is out of bounds, and touches no memory; and every tile is as many bytes.
- In the pages of the first and the last token that somebody sees the other lines may be NaN. A mask
  selects scores, so K does not matter; in V those lines are set to zero in shared memory, since
  0 * NaN is NaN.

Importing this raises ImportError where Triton is missing or its Gluon, which is experimental, may
be another than this was written for.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pageforge.ops.kernels import LOG2E, first_block, row_of_block

if not (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9):
    raise ImportError(f"written for the Gluon of Triton 3.6 to 3.9, not {triton.__version__}")

# These versions name three things differently.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_sync_warps = getattr(gl, "barrier", None) or gl.thread_barrier
_Shared = gl.shared_memory_descriptor
_view = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret

CONSUMERS = gl.constexpr(2)
"""Groups of four warps that multiply."""

PAIRS = gl.constexpr(64)
"""(query, head) pairs of a consumer: what one wgmma takes."""

TILE = gl.constexpr(128)
"""Tokens of a tile: with their scores and outputs a consumer's registers are full."""

SPAN = gl.constexpr(64)
"""Two-byte elements of the 128 bytes that shared memory swizzles: the width of a TMA box."""

START_REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
COPIER_REGISTERS = gl.constexpr(24)
"""Registers a thread: of all 384 when the program starts, as 65,536 allow; then of each job."""

MAX_LINES = 1 << 31
"""TMA counts lines (of D elements: one head of one token) in int32."""


def serves(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Whether `attend_prefill` takes these tensors, on a device of compute capability 9.0."""
    num_heads, dim = query.shape[1:]
    _, num_kv_heads, page_size, _ = key_pages.shape
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and key_pages.dtype == value_pages.dtype == query.dtype
        and dim in (64, 128)
        and page_size in (8, 16, 32, 64, 128)  # a box is 8 lines at least, and in one tile
        and num_heads // num_kv_heads <= CONSUMERS.value * PAIRS.value
        and key_pages.shape == value_pages.shape
        and key_pages.stride() == value_pages.stride()
        and key_pages.stride(0) % dim == 0
        and _num_lines(key_pages) < MAX_LINES
        and (key_pages.data_ptr() | value_pages.data_ptr()) % 16 == 0
    )


def attend_prefill(
    query: Tensor,  # [T, Hq, D]
    key_pages: Tensor,  # [N, Hkv, P, D]
    value_pages: Tensor,  # [N, Hkv, P, D]
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, new tokens included
    cu_query_lens: Tensor,  # [S + 1] int32
    out: Tensor,  # [T, Hq, D], written
    *,
    scale: float,
    window: int | None = None,
    starts: Tensor | None = None,  # [S] int32, tokens of left padding
    lse: Tensor | None = None,  # [T, Hq] float32, written
    min_query_len: int = 1,
) -> None:
    """As `prefill.attend_prefill`, of what `serves` says."""
    num_tokens, num_heads, dim = query.shape
    _, num_kv_heads, page_size, _ = key_pages.shape
    num_rows = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    queries = CONSUMERS.value * PAIRS.value // group
    with torch.cuda.device_of(query):
        _prefill_hopper_kernel[(num_tokens // queries + num_rows, num_kv_heads)](
            query,
            _describe(key_pages),
            _describe(value_pages),
            page_table,
            seq_lens,
            cu_query_lens,
            starts,
            out,
            lse,
            num_rows,
            page_table.shape[1] * page_size,
            min_query_len,
            scale * LOG2E.value,
            window,
            query.stride(0),
            query.stride(1),
            key_pages.stride(0) // dim,
            page_table.stride(0),
            out.stride(0),
            out.stride(1),
            HEADS=num_heads,
            GROUP=group,
            QUERIES=queries,
            PAGE=page_size,
            DIM=dim,
            # As measured on an H200. A third stage fills shared memory.
            STAGES=3 if page_size == TILE.value else 2,
            num_warps=4,
            maxnreg=START_REGISTERS,
        )


def _num_lines(pages: Tensor) -> int:
    """Lines from the first one of `pages` to the last, other layers' between them included."""
    num_pages, num_kv_heads, page_size, dim = pages.shape
    return (num_pages - 1) * (pages.stride(0) // dim) + num_kv_heads * page_size


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _describe(pages: Tensor) -> TensorDescriptor:
    """The pool from the first of `pages` on, as lines, for TMA; made in 3 us on the host."""
    dim = pages.shape[3]
    box = [pages.shape[2], SPAN.value]
    return TensorDescriptor(pages, [_num_lines(pages), dim], [dim, 1], box, _LAYOUT)


@gluon.jit(
    do_not_specialize=["num_rows", "max_seq_len", "min_query_len", "window", "page_table_row"]
)
def _prefill_hopper_kernel(
    q_ptr,  # [T, Hq, D]
    k_pool,  # see `_describe`
    v_pool,
    page_table_ptr,  # [S, M] int32
    lens_ptr,  # [S] int32
    cu_ptr,  # [S + 1] int32
    starts_ptr,  # [S] int32 or None
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] float32 or None
    num_rows,
    max_seq_len,
    min_query_len,
    factor,  # from a raw score to base 2
    window,  # or None
    q_row,
    q_head,
    page_lines,  # from a page to the next
    page_table_row,
    out_row,
    out_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads that share a KV head
    QUERIES: gl.constexpr,  # of one program
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,  # tiles of K, and of V, in shared memory
):
    """QUERIES queries of one row, for the query heads of one KV head; see `_prefill_kernel`."""
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    row = row_of_block(cu_ptr, num_rows, block, QUERIES)
    first_token = gl.load(cu_ptr + row)
    num_queries = gl.load(cu_ptr + row + 1) - first_token
    at = (block - first_block(first_token, row, QUERIES)) * QUERIES
    if (at < 0) | (at >= num_queries) | (num_queries < min_query_len):
        return
    length = gl.load(lens_ptr + row)
    too_long = length > max_seq_len
    length = gl.where(too_long, 0, length)  # none of its pages is read

    # Tokens `low` to `last` are seen by some query, `all_low` to `first` by all.
    first = length - num_queries + at
    last = gl.minimum(first + QUERIES, length) - 1
    start = 0
    if starts_ptr is not None:
        start = gl.load(starts_ptr + row)
    low = start
    all_low = start
    reach = length
    if window is not None:
        all_low = gl.maximum(start, last - window + 1)
        low = gl.maximum(start, first - window + 1)
        reach = window
    last = gl.where(low <= last, last, -1)  # all of them may be padding
    # Tiles `begin` to `end`, at least one; those from `all_begin` to `all_end` without a mask.
    begin = low // TILE
    end = gl.maximum(gl.cdiv(last + 1, TILE), begin + 1)
    all_begin = gl.minimum(gl.cdiv(all_low, TILE), end)
    all_end = gl.minimum(gl.maximum((first + 1) // TILE, all_begin), end)

    dtype: gl.constexpr = k_pool.dtype
    layout: gl.constexpr = k_pool.layout
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, PAIRS, DIM], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], layout)
    # Each in a buffer of its own: Triton orders what touches the same one.
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    q_base = q_ptr + first_token.to(gl.int64) * q_row
    out_base = out_ptr + first_token.to(gl.int64) * out_row
    BOUNDED: gl.constexpr = starts_ptr is not None or window is not None
    HAS_LSE: gl.constexpr = lse_ptr is not None
    lse_base = out_ptr  # a job's arguments cannot be None
    if HAS_LSE:
        lse_base = lse_ptr + first_token.to(gl.int64) * HEADS
    row_pages = page_table_ptr + row.to(gl.int64) * page_table_row
    # A query that sees nothing gives 0, but NaN in a row that is longer than its pages.
    total_of_none = gl.where(too_long, float("nan"), 1.0)
    source = (row_pages, page_lines, kv_head * PAGE, low, last, begin, end)
    keys = (k_tiles, k_full, k_empty)
    values = (v_tiles, v_full, v_empty)
    work = (
        (q_base, q_row, q_head, q_tiles),
        (out_base, out_row, out_head, lse_base),
        (at, num_queries, length, start, reach, kv_head, factor, total_of_none),
        (low, last, begin, end, all_begin, all_end),
        keys,
        values,
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (0, work, HEADS, GROUP, QUERIES, PAGE, DIM, STAGES, BOUNDED, HAS_LSE),
            ),
            (
                _consume,
                (1, work, HEADS, GROUP, QUERIES, PAGE, DIM, STAGES, BOUNDED, HAS_LSE),
            ),
            (_copy_tiles, (k_pool, source, keys, PAGE, DIM, STAGES)),
            (_copy_tiles, (v_pool, source, values, PAGE, DIM, STAGES)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, COPIER_REGISTERS, COPIER_REGISTERS],
    )


@gluon.jit
def _copy_tiles(
    pool,
    source,
    ring,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copies K, or V, of all tiles in the order in which they are read, each to an empty stage."""
    row_pages, page_lines, head_line, low, last, begin, end = source
    tiles, full, empty = ring
    PAGES: gl.constexpr = TILE // PAGE
    boxes = _boxes(tiles, PAGE, DIM, STAGES)
    for turn in range(0, end - begin):
        stage = turn % STAGES
        # All page ids are asked for before the wait, so that it hides their latency.
        lines = ()
        for index in gl.static_range(PAGES):
            number = (end - 1 - turn) * PAGES + index
            live = (number * PAGE + PAGE > low) & (number * PAGE <= last)
            page = gl.load(row_pages + number, mask=live, other=0)
            line = gl.where(live, page * page_lines + head_line, -PAGE)
            lines = lines + (line,)  # type: ignore[assignment]  # noqa: RUF005  # no *lines here
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), TILE * DIM * 2)
        for index in gl.static_range(PAGES):
            for part in gl.static_range(DIM // SPAN):
                box = boxes.index((stage * (DIM // SPAN) + part) * PAGES + index)
                _load_box(pool, [lines[index], part * SPAN], full.index(stage), box)


@gluon.jit
def _boxes(tiles, PAGE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """The memory of `tiles` as boxes, of which TMA fills one at a time.

    In shared memory a tile is one run of lines for each SPAN of the head dim, hence their order: by
    stage, SPAN, page.
    """
    shape: gl.constexpr = [STAGES * (DIM // SPAN) * (TILE // PAGE), PAGE, SPAN]
    return _view(tiles, tiles.dtype, shape, tiles.layout)


@gluon.jit
def _consume(
    WHO: gl.constexpr,  # of the consumers
    work,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    BOUNDED: gl.constexpr,  # whether tokens at the beginning are hidden from some query
    HAS_LSE: gl.constexpr,
):
    """Attention of PAIRS pairs, from their queries to their outputs."""
    source, target, queries, bounds, keys, values = work
    q_base, q_row, q_head, q_tiles = source
    out_base, out_row, out_head, lse_base = target
    at, num_queries, length, start, reach, kv_head, factor, total_of_none = queries
    low, last, begin, end, all_begin, all_end = bounds
    k_tiles, k_full, k_empty = keys
    v_tiles, v_full, _ = values
    score: gl.constexpr = _accumulator(TILE)
    value: gl.constexpr = _accumulator(DIM)
    lanes: gl.constexpr = gl.SliceLayout(1, score)
    wide: gl.constexpr = _wide(DIM)
    wide_lanes: gl.constexpr = gl.SliceLayout(1, wide)

    # Queries, and later outputs, pass through shared memory: 16 bytes a thread to global memory.
    query, member, real = _pairs(WHO, at, num_queries, GROUP, QUERIES, wide_lanes)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, wide))[None, :]
    head = kv_head * GROUP + member
    q_at = (query.to(gl.int64) * q_row + head * q_head)[:, None]
    q = q_tiles.index(WHO)
    q.store(gl.load(q_base + q_at + dim, mask=real[:, None], other=0.0))
    fence_async_shared()
    _sync_warps()

    query, member, real = _pairs(WHO, at, num_queries, GROUP, QUERIES, lanes)
    position = gl.minimum(length - num_queries + query, last)
    pair_low = gl.maximum(position - reach + 1, start)
    sight = (pair_low, position, factor)

    # The online softmax: the largest score so far, the sum of weights, the weighted sum of V.
    top = gl.full([PAIRS], -float("inf"), gl.float32, lanes)
    total = gl.full([PAIRS], 0.0, gl.float32, lanes)
    acc = gl.full([PAIRS, DIM], 0.0, gl.float32, value)
    no_score = gl.full([PAIRS, TILE], 0.0, gl.float32, score)

    mbarrier.wait(k_full.index(0), 0)
    raw = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), no_score, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    mbarrier.arrive(k_empty.index(0), count=1)
    if (last % PAGE != PAGE - 1) & (last >= low) & (last >= (end - 1) * TILE):
        mbarrier.wait(v_full.index(0), 0)
        _clear(v_tiles, 0, last, low, last, PAGE, DIM, STAGES)

    turn = 0
    state = (raw, top, total, acc)
    for tile in range(end - 1, gl.maximum(all_end - 1, begin), -1):
        state = _step(state, tile, turn, q, keys, values, sight, True, BOUNDED, STAGES)
        turn += 1
    for tile in range(all_end - 1, gl.maximum(all_begin - 1, begin), -1):
        state = _step(state, tile, turn, q, keys, values, sight, False, BOUNDED, STAGES)
        turn += 1
    if BOUNDED:
        for tile in range(all_begin - 1, begin, -1):
            state = _step(state, tile, turn, q, keys, values, sight, True, BOUNDED, STAGES)
            turn += 1
    raw, top, total, acc = state

    weight, top, total, fade = _soften(raw, top, total, begin, sight, True, BOUNDED)
    stage = turn % STAGES
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    if BOUNDED and ((low % PAGE != 0) & (last >= low)):
        _clear(v_tiles, stage, low, low, last, PAGE, DIM, STAGES)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, value))[:, None]
    acc = warpgroup_mma(_operand(weight, q.dtype, value), v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    total = gl.where(total > 0, total, total_of_none)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, value))[:, None]
    _sync_warps()
    q.store(acc.to(q.dtype))
    _sync_warps()
    if HAS_LSE:
        lse_at = query.to(gl.int64) * HEADS + kv_head * GROUP + member
        gl.store(lse_base + lse_at, (top * factor + gl.log2(total)) / LOG2E, mask=real)
    query, member, real = _pairs(WHO, at, num_queries, GROUP, QUERIES, wide_lanes)
    head = kv_head * GROUP + member
    out_at = (query.to(gl.int64) * out_row + head * out_head)[:, None]
    gl.store(out_base + out_at + dim, q.load(wide), mask=real[:, None])


@gluon.jit
def _step(
    state,
    tile,
    turn,
    q,
    keys,
    values,
    sight,
    MASKED: gl.constexpr,
    BOUNDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Adds up a tile whose scores are there, and makes the scores of the next meanwhile.

    Weights are used in the turn that makes them, and what is carried to the next is float32: pairs
    of halves would be torn apart and packed again at the end of each turn. The product with V is
    waited for in the same turn too: one that runs over its end makes ptxas run all of them one
    after the other.
    """
    raw, top, total, acc = state
    k_tiles, k_full, k_empty = keys
    v_tiles, v_full, v_empty = values
    score: gl.constexpr = raw.type.layout
    value: gl.constexpr = acc.type.layout
    stage = turn % STAGES
    next_stage = (turn + 1) % STAGES
    mbarrier.wait(k_full.index(next_stage), (turn + 1) // STAGES & 1)
    next_raw = warpgroup_mma(
        q,
        k_tiles.index(next_stage).permute((1, 0)),
        gl.full(raw.shape, 0.0, gl.float32, score),
        use_acc=False,
        is_async=True,
    )
    weight, top, total, fade = _soften(raw, top, total, tile, sight, MASKED, BOUNDED)
    weight = _operand(weight, q.dtype, value)
    mbarrier.wait(v_full.index(stage), turn // STAGES & 1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, value))[:, None]
    acc = warpgroup_mma(weight, v_tiles.index(stage), acc, is_async=True)
    next_raw = warpgroup_mma_wait(1, deps=(next_raw,))
    mbarrier.arrive(k_empty.index(next_stage), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return next_raw, top, total, acc


@gluon.jit
def _soften(raw, top, total, tile, sight, MASKED: gl.constexpr, BOUNDED: gl.constexpr):
    """The weights of a tile, the new `top` and `total`, and what the old sums are worth now."""
    pair_low, position, factor = sight
    if MASKED:
        token = (tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, raw.type.layout)))[None, :]
        seen = token <= position[:, None]
        if BOUNDED:
            seen = seen & (token >= pair_low[:, None])
        raw = gl.where(seen, raw, -float("inf"))
    new_top = gl.maximum(top, gl.max(raw, 1))
    base = new_top
    if MASKED:
        # A pair may have seen nothing so far: then -inf - -inf must not come up.
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
    base = base * factor
    fade = gl.exp2(top * factor - base)
    weight = gl.exp2(gl.fma(raw, factor, -base[:, None]))
    total = total * fade + gl.sum(weight, 1)
    return weight, new_top, total, fade


@gluon.jit
def _operand(weight, dtype: gl.constexpr, accumulator: gl.constexpr):
    """Weights as the left factor of a product, in the registers in which they are."""
    return gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, accumulator, 2))


@gluon.jit
def _clear(
    tiles,
    stage,
    token,
    low,
    last,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Sets the lines of the page of `token` that are not of tokens `low` to `last` to zero.

    Both consumers do so: what they write is the same, so neither need wait for the other. (That is
    why both ends count in every call: where they lie in one page, a consumer that mended only one
    would write back what the other has set to zero.)
    """
    PAGES: gl.constexpr = TILE // PAGE
    layout: gl.constexpr = _wide(SPAN)
    line = (token // PAGE * PAGE + gl.arange(0, PAGE, gl.SliceLayout(1, layout)))[:, None]
    live = (line >= low) & (line <= last)
    boxes = _boxes(tiles, PAGE, DIM, STAGES)
    for part in gl.static_range(DIM // SPAN):
        box = boxes.index((stage * (DIM // SPAN) + part) * PAGES + token % TILE // PAGE)
        box.store(gl.where(live, box.load(layout), 0.0))
    fence_async_shared()
    _sync_warps()


@gluon.jit
def _pairs(
    WHO: gl.constexpr,
    at,
    num_queries,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    layout: gl.constexpr,
):
    """The query in its row and the head in its group of each of a consumer's pairs; is it one?"""
    pair = WHO * PAIRS + gl.arange(0, PAIRS, layout)
    query = at + pair // GROUP
    return query, pair % GROUP, (query < num_queries) & (pair < QUERIES * GROUP)


@gluon.constexpr_function
def _accumulator(columns):
    """How the four warps of a consumer hold a product with that many columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _wide(columns):
    """How they move lines to and from memory: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
