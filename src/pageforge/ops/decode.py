"""Paged attention of one query a row (decode): K and V are read where they lie.

A program takes one run of pieces of a row after the other (see `plan.py`), each for one KV head.
The query heads that share the KV head fill the rows of the matrix units, so K/V are read once for
all of them. What the pieces of a row found is merged by the run that ends last, or by a second
kernel where a row has many runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pageforge.geometry import ceil_div
from pageforge.ops import kernels
from pageforge.ops.kernels import LOG2E, jit, tl, triton
from pageforge.ops.launch import Launcher, addresses, misaligned
from pageforge.ops.plan import HEADER, RUN, num_processors, tiling_for

if kernels.AVAILABLE:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


MERGED_BYTES = 16 << 10
"""Where the runs of a row leave more for a KV head, on average at most, a second kernel merges."""

MERGED_RUNS = 4
"""Where a row has as many runs, likewise, the second kernel is 1 to 3 us sooner (H200). In an eager
step launching it takes the host longer than that."""

REGISTERS, MAX_REGISTERS = 65536, 255
"""Of a multiprocessor, and the most that a thread can have, of any architecture."""

UNITS = 1 << 32
"""What a row's offset in units fits below for an unsigned int32. With one unit a row of 64 bytes
that is 256 GiB of pages."""

MATRIX_ROWS = 16
"""Of the smallest product that the matrix units take."""

SUMS = 64
"""Of weights, by place in the tile, that a decoding program keeps for a query."""

MERGED_AT_ONCE = 2048
"""Elements of pieces that a decoding program merges at once: 16 registers a thread of four warps. A
quarter of them where registers are scarce: with more, or with SUMS of 32 or 128, D64's kernel keeps
some values in memory (and took 0.7 us longer when it did, 32 rows of 512, an H200)."""

MERGED_PIECES = 32
"""Pieces that one program of the merging kernel holds."""

MERGED_DIMS = 32
"""Dims of the output that one program of the merging kernel merges: few, since a long row has
hundreds of pieces."""


def attend_decode(
    query: Tensor,  # [T, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    plan_table: Tensor,  # and the next: of a DecodePlan
    max_pieces: int,
    out: Tensor,  # [T, Hq, Dv], written
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq] float32
    seq_lens: Tensor | None = None,  # [S] int32; only with alibi_slopes
    cu_query_lens: Tensor | None = None,  # [S + 1] int32; None: one query a row
    lse: Tensor | None = None,  # [T, Hq] float32, written
    new_key: Tensor | None = None,  # [S, Hkv, Dk]
    new_value: Tensor | None = None,  # [S, Hkv, Dv]
    batch_invariant: bool = False,  # as the plan is
) -> None:
    """Attention of each planned row's last token over its pages; `reference.attend` is the meaning.

    With `new_key` and `new_value` the last token's K/V are taken from there and written to its slot
    in the same launch; a row without tokens writes nothing.
    """
    if page_table.shape[0] == 0:
        return
    layer = query, key_pages, value_pages, new_key, new_value, sinks, out
    launch = DecodeLaunch(
        *layer,
        page_table,
        plan_table,
        max_pieces,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        seq_lens=seq_lens,
        cu_query_lens=cu_query_lens,
        lse=lse,
        batch_invariant=batch_invariant,
    )
    launch(*layer)


class DecodeLaunch:
    """`attend_decode` in one step, for layer after layer whose tensors are laid out alike.

    What layers share is worked out once: the host may have no longer for a layer than the device
    takes. Arguments as `attend_decode` has them; there is a row at least. `eager`: no graph
    captures this, so the host should have little to launch (`attend_decode` cannot know).
    """

    def __init__(
        self,
        query: Tensor,  # [T, Hq, Dk], or [S, Hq, 1, Dk]
        key_pages: Tensor,
        value_pages: Tensor,
        new_key: Tensor | None,  # [S, Hkv, Dk], or [S, Hkv, 1, Dk]
        new_value: Tensor | None,  # [S, Hkv, Dv], or [S, Hkv, 1, Dv]
        sinks: Tensor | None,
        out: Tensor,  # [T, Hq, Dv], or any shape of as many elements
        page_table: Tensor,
        plan_table: Tensor,
        max_pieces: int,
        *,
        scale: float,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cu_query_lens: Tensor | None = None,
        lse: Tensor | None = None,
        batch_invariant: bool = False,
        eager: bool = False,
    ):
        layer = query, key_pages, value_pages, new_key, new_value, sinks, out
        self._layout = _layout(query, new_key, new_value, sinks)
        self._misaligned = misaligned(addresses(layer))
        num_rows, num_heads, device = page_table.shape[0], query.shape[1], query.device
        _, num_kv_heads, _, value_dim = value_pages.shape
        key_dim = key_pages.shape[3]
        merges = max_pieces > num_rows
        num_programs = _num_programs(max(key_dim, value_dim), key_pages)
        # With `batch_invariant` it does not matter to the bits who merges.
        max_runs = min(max_pieces, num_rows + num_programs // num_kv_heads)
        row_bytes = max_runs * (num_heads // num_kv_heads) * value_dim * 4 // num_rows
        merges_inside = row_bytes <= MERGED_BYTES and (eager or max_runs < MERGED_RUNS * num_rows)
        new = None
        if new_key is not None and new_value is not None:
            new = *new_key.stride()[:2], *new_value.stride()[:2], new_key.dtype, new_value.dtype
        variant = (
            (num_heads, query.shape[-1]),
            (query.stride(0), query.stride(1)),
            query.dtype,
            key_pages.dtype,
            key_pages.shape[1:],
            key_pages.stride(0),
            value_pages.stride(0),
            value_dim,
            softcap is None,
            new,
            None if sinks is None else sinks.dtype,
            None if alibi_slopes is None else alibi_slopes.dtype,
            cu_query_lens is None,
            lse is None,
            self._misaligned,
            _is_narrow(key_pages) and _is_narrow(value_pages),
            batch_invariant,
            merges_inside,
        )
        constants, options = _constants_for(variant, device)
        self._is_compiled = device.type == "cuda"
        size = max_pieces * num_heads * (value_dim + 1) if merges else 0
        found = torch.empty(size, dtype=torch.float32, device=device)
        sizes = (num_rows, max_pieces * num_heads * value_dim)
        self._launch = _decode_launcher.prepare(
            variant,
            device,
            (min(max_pieces * num_kv_heads, num_programs), 1, 1),
            layer,
            (
                page_table,
                seq_lens if alibi_slopes is not None else None,
                cu_query_lens,
                plan_table,
                alibi_slopes,
                lse,
                found,
                *sizes,
                page_table.stride(0),
                float(scale),  # Triton compiles the integer 1 in
                float(softcap or 0),
            ),
            constants,
            options,
        )
        self._merge: Callable[..., None] | None = None
        if merges and not merges_inside:
            self._merge = _merge_launcher.prepare(
                variant,
                device,
                (num_rows, num_heads, ceil_div(value_dim, MERGED_DIMS)),
                (sinks, out),
                (found, plan_table, cu_query_lens, lse, *sizes),
                {"HEADS": num_heads, "VALUE_DIM": value_dim, "PIECES": MERGED_PIECES}
                | {"DIMS": MERGED_DIMS, "HEAD": HEADER, "IN_ORDER": batch_invariant}
                | {"CHAINED": constants["CHAINED"]},
                _chain(device) | {"num_warps": 1},
            )

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        new_key: Tensor | None,
        new_value: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> bool:
        """Launch for a layer of the same group, if its tensors are laid out alike.

        Returns whether they are: if not, nothing happened.
        """
        if _layout(query, new_key, new_value, sinks) != self._layout:
            return False
        layer: tuple[Any, ...] = query, key_pages, value_pages, new_key, new_value, sinks, out
        pointers = addresses(layer)
        if misaligned(pointers) != self._misaligned:
            return False
        if self._is_compiled:
            layer = pointers
        self._launch(*layer)
        if self._merge is not None:
            self._merge(*layer[-2:])
        return True


def _layout(
    query: Tensor, new_key: Tensor | None, new_value: Tensor | None, sinks: Tensor | None
) -> tuple[Any, ...]:
    """By what layers of one group may differ."""
    new = None
    if new_key is not None and new_value is not None:
        new = new_key.stride(), new_value.stride(), new_key.dtype, new_value.dtype
    return query.shape, query.stride(), query.dtype, new, None if sinks is None else sinks.dtype


def _is_narrow(pages: Tensor) -> bool:
    """Whether an unsigned int32 counts `pages` in the units that all offsets of rows divide by."""
    return len(pages) * pages.stride(0) // math.gcd(pages.stride(0), pages.shape[3]) <= UNITS


def _num_programs(dim: int, pages: Tensor) -> int:
    """How many programs the device holds at a time."""
    tiling = tiling_for(dim, pages.dtype, pages.device)
    return tiling.per_processor * num_processors(pages.device)


@functools.cache
def _constants_for(
    variant: tuple[Any, ...], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decode kernel's constants and options, which follow from the variant."""
    (num_heads, key_dim), (query_row, query_head), _, dtype = variant[:4]
    (num_kv_heads, page_size, _), key_page, value_page, value_dim, no_cap, new = variant[4:10]
    is_narrow, batch_invariant, merges_inside = variant[-3:]
    new_key_row, new_key_head, new_value_row, new_value_head = new[:4] if new else (0, 0, 0, 0)
    group = num_heads // num_kv_heads
    tiling = tiling_for(max(key_dim, value_dim), dtype, device)
    key_pad, value_pad = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    lanes = triton.next_power_of_2(group)
    has_room = lanes <= MATRIX_ROWS  # in registers, for more than the least
    registers = REGISTERS // (32 * tiling.num_warps * tiling.per_processor) // 8 * 8
    merged_dims = min(value_pad, 64)
    merged_at_once = MERGED_AT_ONCE if registers > MAX_REGISTERS else MERGED_AT_ONCE // 4
    chain = _chain(device)
    constants = {
        "QUERY_ROW": query_row,
        "QUERY_HEAD": query_head,
        "KEY_PAGE": key_page,
        "VALUE_PAGE": value_page,
        "KEY_UNIT": math.gcd(key_page, key_dim),
        "VALUE_UNIT": math.gcd(value_page, value_dim),
        "NARROW": is_narrow,
        "NEW_KEY_ROW": new_key_row,
        "NEW_KEY_HEAD": new_key_head,
        "NEW_VALUE_ROW": new_value_row,
        "NEW_VALUE_HEAD": new_value_head,
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(MATRIX_ROWS, lanes),
        "KEY_DIM": key_dim,
        "KEY_PAD": key_pad,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": value_pad,
        "PAGE": page_size,
        "PAGE_BITS": page_size.bit_length() - 1,
        "TILE": tiling.tokens,
        "SUMS": min(tiling.tokens, SUMS) if has_room else 1,
        "HAS_CAP": not no_cap,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "HEAD": HEADER,
        "FIELDS": RUN,
        "INVARIANT": batch_invariant,
        "MERGES_INSIDE": merges_inside,
        "MERGED_LANES": lanes,
        "MERGED_PIECES": max(1, merged_at_once // (lanes * merged_dims)),
        "MERGED_DIMS": merged_dims,
        "CHAINED": bool(chain),
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages} | chain
    if (batch_invariant or has_room) and registers < MAX_REGISTERS:
        options["maxnreg"] = registers  # a few more, and fewer programs fit than are launched
    return constants, options


@functools.cache
def _chain(device: torch.device) -> dict[str, Any]:
    """Options that let a kernel start while the one before it ends (programmatic dependent launch).

    Then `gdc_wait` comes before anything that the kernel before may have written is read.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"launch_pdl": True}
    return {}


@jit(
    do_not_specialize=["num_rows", "lse_from", "page_table_row"],
    do_not_specialize_on_alignment=[
        "page_table_ptr",
        "lens_ptr",
        "queries_ptr",
        "plan_ptr",
        "sinks_ptr",
        "slopes_ptr",
        "lse_ptr",
    ],
)
def _decode_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [N, Hkv, P, Dk]
    value_ptr,  # [N, Hkv, P, Dv]
    new_key_ptr,  # [S, Hkv, Dk], or None
    new_value_ptr,  # [S, Hkv, Dv]
    sinks_ptr,  # [Hq], or None
    out_ptr,  # [T, Hq, Dv]
    page_table_ptr,  # [S, M] int32; from here on the same in all layers
    lens_ptr,  # [S] int32, or None
    queries_ptr,  # [S + 1] int32, or None
    plan_ptr,  # see DecodePlan
    slopes_ptr,  # [Hq], or None
    lse_ptr,  # [T, Hq] float32, or None
    found_ptr,  # [pieces, Hq, Dv] float32, then [pieces, Hq] log-sum-exp in base 2
    num_rows,
    lse_from: tl.int64,  # where in `found` the log-sum-exps begin
    page_table_row,
    scale,
    softcap,  # 0 = none
    QUERY_ROW: tl.constexpr,  # strides in elements
    QUERY_HEAD: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    VALUE_PAGE: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    NARROW: tl.constexpr,
    NEW_KEY_ROW: tl.constexpr,
    NEW_KEY_HEAD: tl.constexpr,
    NEW_VALUE_ROW: tl.constexpr,
    NEW_VALUE_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,  # of weights, in each lane
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD: tl.constexpr,
    FIELDS: tl.constexpr,
    INVARIANT: tl.constexpr,
    MERGES_INSIDE: tl.constexpr,
    MERGED_LANES: tl.constexpr,
    MERGED_PIECES: tl.constexpr,
    MERGED_DIMS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One run of a row after the other, each for one KV head.

    There are as many programs as the device holds at a time. Where there are more runs than that,
    a program that is done takes the next one from a queue: the speeds of programs differ.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if CHAINED:
        gdc_wait()
    items = tl.load(plan_ptr) * KV_HEADS
    item = program
    while item < items:
        index = item // KV_HEADS  # of the run in the plan
        kv_head = item % KV_HEADS
        counters = plan_ptr + HEAD + num_rows + 1
        fields = counters + num_rows * KV_HEADS + FIELDS * index
        row = tl.load(fields)  # in 32 bits, as all that waits for the end: registers are scarce
        begin = tl.load(fields + 1)
        end = tl.load(fields + 2)
        of_row = tl.load(fields + 3)
        place = tl.load(fields + 4)
        pieces = of_row >> 1
        runs = pieces
        if INVARIANT:
            runs = tl.load(fields + 5)
            size = tl.load(fields + 6)
        is_last = (of_row & 1) == 1
        stored = end
        if new_key_ptr is not None:
            has_new = is_last & (end > begin)
            stored = tl.where(has_new, end - 1, end)
        row_pages = page_table_ptr + row.to(tl.int64) * page_table_row
        token_of_row = row
        if queries_ptr is not None:
            token_of_row = tl.load(queries_ptr + row)

        lane = tl.arange(0, GROUP_PAD)
        key_dim = tl.arange(0, KEY_PAD)
        value_dim = tl.arange(0, VALUE_PAD)
        in_tile = tl.arange(0, TILE)
        head = kv_head * GROUP + lane
        real_head = lane < GROUP
        key_real = key_dim < KEY_DIM
        value_real = value_dim < VALUE_DIM
        query = tl.load(
            query_ptr
            + token_of_row.to(tl.int64) * QUERY_ROW
            + (head.to(tl.int64) * QUERY_HEAD)[:, None]
            + key_dim[None, :],
            mask=real_head[:, None] & key_real[None, :],
            other=0.0,
        )
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + head, mask=real_head, other=0.0).to(tl.float32) * LOG2E
            length = tl.load(lens_ptr + row)
        # The online softmax: the largest score so far, the sums of weights, the weighted sum of V.
        # (Sums by place in the tile are added up once: threads wait for each other then.)
        top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
        sums = tl.zeros([GROUP_PAD, SUMS], tl.float32)
        acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
        if INVARIANT:
            # The same of the pieces so far, where one run is all that the row has.
            row_top, row_total, row_acc = top, tl.zeros([GROUP_PAD], tl.float32), acc
            border = begin + size  # between two pieces
        key_base = key_ptr + kv_head * (PAGE * KEY_DIM)
        value_base = value_ptr + kv_head * (PAGE * VALUE_DIM)
        # Beyond what is stored its last token is read again, and has no weight: that costs no bytes
        # and no mask for each copy. What lies there (NaN, another's K/V, no memory) cannot matter.
        # (Where that token's V is infinite the sum may become NaN.)
        last = stored - 1
        # The page ids of a tile are loaded one tile ahead. Loaded in the same turn as K and V they
        # would have to be there before the loads begin, and Triton would not overlap tiles at all.
        read = tl.minimum(begin + in_tile, last)
        page = tl.load(row_pages + (read >> PAGE_BITS), mask=read >= begin, other=0)
        if new_key_ptr is not None:
            # The newest token, in no page yet, comes last. Asked for here, it is there by then.
            new_key = _newest(
                new_key_ptr, row, kv_head, key_dim, key_real, NEW_KEY_ROW, NEW_KEY_HEAD
            ).to(key_ptr.dtype.element_ty)
            new_value = _newest(
                new_value_ptr, row, kv_head, value_dim, value_real, NEW_VALUE_ROW, NEW_VALUE_HEAD
            ).to(value_ptr.dtype.element_ty)
            new_page = tl.load(row_pages + ((end - 1) >> PAGE_BITS), mask=end > begin, other=0)
        if MERGES_INSIDE:
            left_from = tl.load(plan_ptr + HEAD + row)
        for first in range(begin, stored, TILE):
            token = first + in_tile
            in_page = tl.minimum(token, last) & (PAGE - 1)
            key = tl.load(
                (key_base + key_dim)[None, :]
                + _row(page, in_page, KEY_PAGE, KEY_DIM, KEY_UNIT, NARROW)[:, None],
                mask=None if KEY_DIM == KEY_PAD else key_real[None, :],
                other=None if KEY_DIM == KEY_PAD else 0.0,
            )
            value = tl.load(
                (value_base + value_dim)[None, :]
                + _row(page, in_page, VALUE_PAGE, VALUE_DIM, VALUE_UNIT, NARROW)[:, None],
                mask=None if VALUE_DIM == VALUE_PAD else value_real[None, :],
                other=None if VALUE_DIM == VALUE_PAD else 0.0,
            )
            read = tl.minimum(token + TILE, last)
            page = tl.load(row_pages + (read >> PAGE_BITS))
            score = _score(
                tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap, HAS_CAP
            )
            if slopes_ptr is not None:
                score += slope[:, None] * (token - length + 1)[None, :]
            score = tl.where((token < stored)[None, :], score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            decay = tl.exp2(top - new_top)
            weight = tl.exp2(score - new_top[:, None])
            parts = tl.reshape(weight, [GROUP_PAD, TILE // SUMS, SUMS])
            sums = sums * decay[:, None] + tl.sum(parts, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
            top = new_top
            if INVARIANT:  # noqa: SIM102  # decided when compiled, unlike the next
                if (first + TILE == border) & (border < end):
                    found, lse = _found(top, tl.sum(sums, 1), acc)
                    if runs == 1:
                        row_top, row_total, row_acc = _add(row_top, row_total, row_acc, found, lse)
                    else:
                        _leave(
                            found_ptr,
                            found_ptr + lse_from,
                            place.to(tl.int64) * (KV_HEADS * GROUP) + head,
                            value_dim,
                            real_head,
                            value_real,
                            found,
                            lse,
                            VALUE_DIM,
                        )
                    place += 1
                    border += size
                    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
                    sums = tl.zeros([GROUP_PAD, SUMS], tl.float32)
                    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)

        total = tl.sum(sums, 1)

        if new_key_ptr is not None:  # noqa: SIM102  # decided when compiled, unlike the next
            if has_new:
                raw = tl.sum(query.to(tl.float32) * new_key[None, :].to(tl.float32), 1)
                score = _score(raw, scale, softcap, HAS_CAP)
                new_top = tl.maximum(top, score)
                decay = tl.exp2(top - new_top)
                weight = tl.exp2(score - new_top)
                total = total * decay + weight
                acc = acc * decay[:, None] + weight[:, None] * new_value[None, :].to(tl.float32)
                top = new_top
                if new_page > 0:
                    offset = (end - 1) & (PAGE - 1)
                    to_key = key_base + new_page.to(tl.int64) * KEY_PAGE + offset * KEY_DIM
                    to_value = value_base + new_page.to(tl.int64) * VALUE_PAGE + offset * VALUE_DIM
                    tl.store(to_key + key_dim, new_key, mask=key_real)
                    tl.store(to_value + value_dim, new_value, mask=value_real)
        if CHAINED:
            gdc_launch_dependents()

        if runs == 1:
            if INVARIANT:
                found, lse = _found(top, total, acc)
                top, total, acc = _add(row_top, row_total, row_acc, found, lse)
            if begin < 0:  # a row that is longer than its pages
                acc += float("nan")
            if sinks_ptr is not None:
                top, total, acc = _sink(top, total, acc, sinks_ptr, head, real_head)
            to = token_of_row.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(
                out_ptr + to[:, None] * VALUE_DIM + value_dim[None, :],
                # A row that sees nothing gives 0.
                (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
                mask=real_head[:, None] & value_real[None, :],
            )
            if lse_ptr is not None:
                tl.store(lse_ptr + to, (top + tl.log2(total)) / LOG2E, mask=real_head)
        else:
            found, lse = _found(top, total, acc)
            _leave(
                found_ptr,
                found_ptr + lse_from,
                place.to(tl.int64) * (KV_HEADS * GROUP) + head,
                value_dim,
                real_head,
                value_real,
                found,
                lse,
                VALUE_DIM,
            )
            if MERGES_INSIDE:
                tl.debug_barrier()  # all of the above before the count, by all threads
                counter = counters + row * KV_HEADS + kv_head
                done = tl.atomic_add(counter, 1, sem="acq_rel")
                if done == runs - 1:
                    tl.debug_barrier()
                    tl.store(counter, 0)
                    merged_lane = tl.arange(0, MERGED_LANES)
                    merged_head = kv_head * GROUP + merged_lane
                    for dims in tl.static_range(0, VALUE_PAD, MERGED_DIMS):
                        _merge(
                            found_ptr,
                            found_ptr + lse_from,
                            sinks_ptr,
                            out_ptr,
                            lse_ptr,
                            left_from.to(tl.int64),
                            pieces,
                            token_of_row.to(tl.int64),
                            merged_head,
                            merged_lane < GROUP,
                            dims + tl.arange(0, MERGED_DIMS),
                            KV_HEADS * GROUP,
                            VALUE_DIM,
                            MERGED_PIECES,
                            INVARIANT,
                        )
        if items > programs:
            # All programs together take one number for each item, the last ones in vain: so the
            # queue need not be set back for the next layer's launch.
            item = programs + tl.atomic_add(plan_ptr + 1, 1, sem="relaxed") % items
        else:
            item = items


@jit()
def _row(
    page,
    in_page,
    PAGE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Where a token's row begins in a layer's pages, in elements.

    It is counted in UNITs, in 32 bits where that is enough: an address takes half as many
    instructions then, and addresses were a third of all that the kernel does.
    """
    page = page.to(tl.uint32 if NARROW else tl.int64)
    units = page * (PAGE_STRIDE // UNIT) + in_page * (DIM // UNIT)
    return units.to(tl.int64) * UNIT


@jit()
def _newest(ptr, row, kv_head, dim, real, ROW: tl.constexpr, HEAD: tl.constexpr):
    """K or V of a row's newest token."""
    return tl.load(
        ptr + row.to(tl.int64) * ROW + kv_head.to(tl.int64) * HEAD + dim, mask=real, other=0.0
    )


@jit()
def _found(top, total, acc):
    """What a piece found: the weighted mean of V, and the log-sum-exp of its scores in base 2."""
    return acc / tl.where(total > 0, total, 1.0)[:, None], top + tl.log2(total)


@jit()
def _leave(
    found_ptr,
    lse_of_found_ptr,
    to,  # [lanes]: where
    value_dim,
    real_head,
    value_real,
    found,
    lse,
    VALUE_DIM: tl.constexpr,
):
    """Write down what a piece found, for whoever merges the pieces of its row."""
    tl.store(
        found_ptr + to[:, None] * VALUE_DIM + value_dim[None, :],
        found,
        mask=real_head[:, None] & value_real[None, :],
    )
    tl.store(lse_of_found_ptr + to, lse, mask=real_head)


@jit()
def _add(top, total, acc, found, lse):
    """What a row's pieces up to here found, and one more.

    The same bits wherever it is compiled: what may be fused is fused here.
    """
    new_top = tl.maximum(top, lse)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    decay = tl.exp2(top - base)
    weight = tl.exp2(lse - base)
    acc = tl.fma(acc, decay[:, None], found * weight[:, None])
    return new_top, tl.fma(total, decay, weight), acc


@jit()
def _score(raw, scale, softcap, HAS_CAP: tl.constexpr):
    """Scores in base 2 of the products `raw` of query and key."""
    if HAS_CAP:
        capped = 2.0 * tl.sigmoid(2.0 * scale / softcap * raw) - 1.0  # tanh
        score = capped * (softcap * LOG2E)
    else:
        score = raw * (scale * LOG2E)
    return score


@jit()
def _sink(top, total, acc, sinks_ptr, head, real_head):
    """A score that takes part in the softmax and has no value."""
    sink = tl.load(sinks_ptr + head, mask=real_head, other=0.0).to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink)
    decay = tl.exp2(top - new_top)
    return new_top, tl.fma(total, decay, tl.exp2(sink - new_top)), acc * decay[:, None]


@jit()
def _merge(
    found_ptr,  # [pieces, Hq, Dv] float32
    lse_of_found_ptr,  # [pieces, Hq] float32, base 2
    sinks_ptr,
    out_ptr,
    lse_ptr,
    start,  # the row's first piece
    pieces,
    token,  # whose output it is
    head,  # [lanes]
    real_head,
    dim,  # [dims]
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """`out = sum_i 2^lse_i found_i / sum_i 2^lse_i` over the pieces of a row, some dims of it.

    PIECES of them at once, or one after the other with as many on their way.
    """
    top = tl.full(head.shape, -float("inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros([head.shape[0], dim.shape[0]], tl.float32)
    real = real_head[:, None] & (dim < VALUE_DIM)[None, :]
    # Other programs wrote this: past the first cache, which may have something older.
    if IN_ORDER:
        for piece in tl.range(0, pieces, loop_unroll_factor=PIECES):
            place = (start + piece) * HEADS + head
            lse = tl.load(
                lse_of_found_ptr + place, mask=real_head, other=-float("inf"), cache_modifier=".cg"
            )
            found = tl.load(
                found_ptr + place[:, None] * VALUE_DIM + dim[None, :],
                mask=real,
                other=0.0,
                cache_modifier=".cg",
            )
            top, total, acc = _add(top, total, acc, found, lse)
    else:
        for first in range(0, pieces, PIECES):
            piece = first + tl.arange(0, PIECES)
            exists = (piece < pieces)[:, None] & real_head[None, :]
            place = (start + piece)[:, None] * HEADS + head[None, :]
            lse = tl.load(
                lse_of_found_ptr + place, mask=exists, other=-float("inf"), cache_modifier=".cg"
            )
            found = tl.load(
                found_ptr + place[:, :, None] * VALUE_DIM + dim[None, None, :],
                mask=exists[:, :, None] & (dim < VALUE_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            # A piece of tokens that nobody sees cannot be, but a lane beyond the group has nothing.
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            decay = tl.exp2(top - base)
            weight = tl.exp2(lse - base[None, :])
            acc = acc * decay[:, None] + tl.sum(found * weight[:, :, None], 0)
            total = total * decay + tl.sum(weight, 0)
            top = new_top
    if sinks_ptr is not None:
        top, total, acc = _sink(top, total, acc, sinks_ptr, head, real_head)
    to = token * HEADS + head
    tl.store(
        out_ptr + to[:, None] * VALUE_DIM + dim[None, :],
        (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
        mask=real,
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + to, (top + tl.log2(total)) / LOG2E, mask=real_head)


@jit(
    do_not_specialize=["num_rows", "lse_from"],
    do_not_specialize_on_alignment=["plan_ptr", "queries_ptr", "sinks_ptr", "lse_ptr"],
)
def _merge_kernel(
    sinks_ptr,
    out_ptr,
    found_ptr,  # see _decode_kernel
    plan_ptr,
    queries_ptr,
    lse_ptr,
    num_rows,
    lse_from: tl.int64,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    DIMS: tl.constexpr,
    HEAD: tl.constexpr,
    IN_ORDER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Merges the pieces of one row, one head, DIMS dims; rows of one run are done already."""
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(plan_ptr + HEAD + row)
    pieces = tl.load(plan_ptr + HEAD + row + 1) - start
    if pieces > 0:
        token = row.to(tl.int64)
        if queries_ptr is not None:
            token = tl.load(queries_ptr + row).to(tl.int64)
        _merge(
            found_ptr,
            found_ptr + lse_from,
            sinks_ptr,
            out_ptr,
            lse_ptr,
            start.to(tl.int64),
            pieces,
            token,
            tl.program_id(1) + tl.arange(0, 1),
            tl.full([1], True, tl.int1),
            tl.program_id(2) * DIMS + tl.arange(0, DIMS),
            HEADS,
            VALUE_DIM,
            PIECES,
            IN_ORDER,
        )


_decode_launcher = Launcher(_decode_kernel)
_merge_launcher = Launcher(_merge_kernel)
