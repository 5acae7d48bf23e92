"""How the rows of a decode step are cut into pieces that run side by side.

FlashDecoding (Dao et al., 2023, "Flash-Decoding for long-context inference"): one long row would
leave most of the GPU idle, so its K/V are cut, and what the pieces found is merged. The cut is made
on the device from the lengths that lie there, once a step for all layers of a group: lengths change
under a captured graph without a recapture or a host sync, and a long row among short ones is cut
finer than they are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pageforge.geometry import ceil_div
from pageforge.ops.kernels import jit, tl, triton
from pageforge.ops.launch import Launcher

HEADER = 2
"""A plan's table begins with the number of runs, and the next number of their queue."""

CLASSES = 8
"""Runs that have to wait for their turn are told apart by so many classes of length."""

RUN = 7
"""Numbers that describe a run: row, first token, token after its last, `2 * pieces + last` (pieces
of the row, and whether this is its last run), where what its first piece finds is left, runs of the
row, and tokens of a piece. A run is one piece, but with `batch_invariant` several may follow each
other in one."""

INVARIANT_PROGRAMS = 256
"""With `batch_invariant`, how many programs a long row that is alone should give work to."""

INVARIANT_PIECES = 32, 128
"""With `batch_invariant`, the bounds of how many pieces a long row is cut into."""

INVARIANT_TILES = 2
"""With `batch_invariant`, the fewest tiles of a piece."""


class Tiling(NamedTuple):
    """How the decode kernel reads K/V."""

    tokens: int  # in a tile
    num_warps: int
    num_stages: int
    per_processor: int  # programs that fit on a multiprocessor at a time


class Purpose(NamedTuple):
    """What a plan is made for, beside its rows' lengths and padding."""

    num_rows: int
    num_kv_heads: int
    key_dim: int
    dtype: torch.dtype
    max_seq_len: int
    window: int | None
    batch_invariant: bool


class DecodePlan(NamedTuple):
    """The pieces of a decode step, and the runs of pieces that programs take.

    `table` int32: HEADER; for each row, and for the end, where its pieces leave what they find
    (those of a row that is one run leave nothing); a counter for each row and KV head of runs that
    are done, 0 between launches; RUN numbers for each run, in the order in which they begin. It
    serves the layers of one step: the queue's int32
    is not set back between them.
    """

    table: Tensor
    max_pieces: int  # what the number of pieces cannot exceed
    purpose: Purpose
    starts: Tensor | None  # [S] int32, the padding that it was made with
    cu_query_lens: Tensor | None  # [S + 1] int32: only rows of one query are planned; None: all are


class Planner:
    """Makes the plans of one step after the other in one table, which launches can be bound to.

    What a step is cut into follows from the lengths of its rows, on the device; all else is worked
    out once. A plan holds until the next one is made.
    """

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        *,
        num_kv_heads: int,
        key_dim: int,
        dtype: torch.dtype,
        max_seq_len: int,
        window: int | None = None,
        seq_lens: Tensor | None = None,  # [S] int32; None: rows are of one length
        starts: Tensor | None = None,  # [S] int32, tokens of left padding
        cu_query_lens: Tensor | None = None,  # [S + 1] int32; only rows of one query are planned
        batch_invariant: bool = False,
    ):
        """`max_seq_len`: what no row of the first step exceeds."""
        tiling = tiling_for(key_dim, dtype, device)
        slots = max(1, tiling.per_processor * num_processors(device) // num_kv_heads)
        invariant_pieces = _invariant_pieces(num_kv_heads) if batch_invariant else None
        self._bounds = num_rows, slots, tiling.tokens, invariant_pieces
        self.max_pieces = _max_pieces(max_seq_len, *self._bounds)
        self.starts = starts
        self.cu_query_lens = cu_query_lens
        self._purpose = Purpose(
            num_rows, num_kv_heads, key_dim, dtype, max_seq_len, window, batch_invariant
        )
        size = HEADER + num_rows + 1 + num_rows * num_kv_heads + RUN * self.max_pieces
        self.table = torch.empty(size, dtype=torch.int32, device=device)
        rows = triton.next_power_of_2(max(1, num_rows))
        variant = tiling.tokens, rows, num_kv_heads, batch_invariant
        self._launch = _plan_launcher.prepare(
            (*variant, seq_lens is None, starts is None, cu_query_lens is None),
            device,
            (1, 1, 1),
            (0, max_seq_len),
            (
                seq_lens,
                starts,
                cu_query_lens,
                self.table,
                num_rows,
                slots,
                0 if window is None else window,
            ),
            {
                "TILE": tiling.tokens,
                "ROWS": rows,
                "KV_HEADS": num_kv_heads,
                "INVARIANT": batch_invariant,
                "MOST": invariant_pieces or 0,
                "FEWEST": INVARIANT_TILES,
                "CLASSES": CLASSES,
                "HEAD": HEADER,
                "FIELDS": RUN,
            },
            {"num_warps": 4},
        )

    def has_room(self, max_seq_len: int) -> bool:
        """Whether it can plan, as one made for them would, rows of up to `max_seq_len` tokens."""
        return _max_pieces(max_seq_len, *self._bounds) == self.max_pieces

    def plan(self, max_seq_len: int, length: int = 0) -> DecodePlan:
        """The plan of one decode step, good for every layer of one group. Launches a small kernel.

        No row is longer than `max_seq_len`; one that is gets a piece from -1 to -1, and gives NaN
        rather than attention to some of its tokens. `length`: of each row, without `seq_lens`.
        """
        self._launch(length, max_seq_len)
        purpose = self._purpose._replace(max_seq_len=max_seq_len)
        return DecodePlan(self.table, self.max_pieces, purpose, self.starts, self.cu_query_lens)


def max_pieces_of(table: Tensor, num_rows: int, num_kv_heads: int) -> int:
    """`DecodePlan.max_pieces` of the plan in `table`, by its size."""
    return (len(table) - HEADER - num_rows - 1 - num_rows * num_kv_heads) // RUN


def _max_pieces(
    max_seq_len: int, num_rows: int, slots: int, tile: int, invariant_pieces: int | None
) -> int:
    """What the number of pieces of all rows cannot exceed."""
    most = max(1, ceil_div(max_seq_len, tile))
    if invariant_pieces is not None:
        return num_rows * min(invariant_pieces, ceil_div(most, INVARIANT_TILES))
    return num_rows * most if num_rows * most <= slots else num_rows + slots


def plan_decode(
    seq_lens: Tensor,  # [S] int32
    *,
    num_kv_heads: int,
    key_dim: int,
    dtype: torch.dtype,
    max_seq_len: int,
    window: int | None = None,
    starts: Tensor | None = None,  # [S] int32, tokens of left padding
    cu_query_lens: Tensor | None = None,  # [S + 1] int32; only rows of one query are planned
    batch_invariant: bool = False,
) -> DecodePlan:
    """The plan of one decode step, good for every layer of one group; see `Planner.plan`.

    With `batch_invariant` a row's pieces depend on that row alone. S is at most 32,768.
    """
    return Planner(
        seq_lens.shape[0],
        seq_lens.device,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        dtype=dtype,
        max_seq_len=max_seq_len,
        window=window,
        seq_lens=seq_lens,
        starts=starts,
        cu_query_lens=cu_query_lens,
        batch_invariant=batch_invariant,
    ).plan(max_seq_len)


@functools.cache
def tiling_for(dim: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """Measured on an H200 for fp16 and bf16; elsewhere what every device can hold.

    A plan is cut by the head dim of K. Where V's is wider the kernel asks again, and may get tiles
    that are smaller, of which the plan's are multiples.
    """
    if device.type != "cuda":
        return Tiling(16, 1, 1, per_processor=4)  # the interpreter: small, so that rows are cut
    return tiling_of(dim, dtype.itemsize, torch.cuda.get_device_capability(device))


def tiling_of(dim: int, element_size: int, capability: tuple[int, int]) -> Tiling:
    """The tiling for a device of this compute capability."""
    if element_size > 2 and dim > 128 and capability < (8, 0):
        return Tiling(16, 4, 2, per_processor=1)
    if element_size > 2 or dim > 128:
        return Tiling(32, 4, 2, per_processor=2)
    if capability < (8, 0):  # no asynchronous copies, 64 KiB of shared memory
        return Tiling(32, 2, 2, per_processor=2)
    if capability in ((8, 0), (9, 0), (10, 0), (10, 3)):  # 163 KiB and more
        if dim <= 64:
            return Tiling(128, 4, 3, per_processor=3)
        if capability >= (9, 0):
            return Tiling(64, 4, 4, per_processor=2)
        return Tiling(64, 4, 3, per_processor=2)
    return Tiling(64, 4, 3, per_processor=2 if dim <= 64 else 1)


def _invariant_pieces(num_kv_heads: int) -> int:
    """Into how many pieces `batch_invariant` cuts a long row: the same on every device."""
    fewest, most = INVARIANT_PIECES
    return min(max(ceil_div(INVARIANT_PROGRAMS, num_kv_heads), fewest), most)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return 2  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@jit(
    do_not_specialize=["row_len", "max_seq_len", "num_rows", "slots", "window"],
    do_not_specialize_on_alignment=["lens_ptr", "starts_ptr", "queries_ptr"],
)
def _plan_kernel(
    row_len,  # of every row, where lens_ptr is None
    max_seq_len,
    lens_ptr,  # [S] int32, or None
    starts_ptr,  # [S] int32, or None
    queries_ptr,  # [S + 1] int32, or None
    table_ptr,
    num_rows,
    slots,  # pieces of a KV head that run at a time
    window,  # 0 = none
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INVARIANT: tl.constexpr,
    MOST: tl.constexpr,
    FEWEST: tl.constexpr,
    CLASSES: tl.constexpr,
    HEAD: tl.constexpr,
    FIELDS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < num_rows
    if lens_ptr is None:
        length = tl.where(real, row_len, 0)
    else:
        length = tl.load(lens_ptr + row, mask=real, other=0)
    too_long = length > max_seq_len
    length = tl.where(too_long, 0, length)
    low = tl.zeros([ROWS], tl.int32)
    if starts_ptr is not None:
        low = tl.load(starts_ptr + row, mask=real, other=0)
    if window > 0:
        low = tl.maximum(low, length - window)
    low = tl.minimum(low, length)
    planned = real
    if queries_ptr is not None:
        here = tl.load(queries_ptr + row, mask=real, other=0)
        planned = real & (tl.load(queries_ptr + row + 1, mask=real, other=0) == here + 1)
    tiles = tl.where(planned, tl.cdiv(length - low, TILE), 0)
    fair = tl.maximum(tl.cdiv(tl.sum(tiles, 0), slots), 1)
    size = tl.zeros([ROWS], tl.int32) + 1
    if INVARIANT:
        # Pieces by the row alone; runs of pieces by what there is to do.
        size = tl.maximum(tl.cdiv(tiles, MOST), FEWEST)
    parts = tl.cdiv(tiles, size)  # that are not cut any further
    # Somewhat longer runs, if all of them can run at a time then: a few left over for a second turn
    # would run alone.
    common = fair
    if num_rows <= slots:
        while (common < 2 * fair) & (tl.sum(_count(parts, size, common, planned), 0) > slots):
            common += tl.cdiv(fair, 16)  # few tries, however long the rows
    runs = _count(parts, size, common, planned)
    pieces = runs
    if INVARIANT:
        pieces = tl.where(planned, tl.maximum(parts, 1), 0)
    left = tl.where(runs > 1, pieces, 0)  # a run that is alone merges its pieces itself
    first = tl.cumsum(left, 0) - left
    total = tl.sum(runs, 0)
    tl.store(table_ptr, total)
    tl.store(table_ptr + 1, 0)
    tl.store(table_ptr + HEAD + row, first, mask=real)
    tl.store(table_ptr + HEAD + num_rows, tl.sum(left, 0))
    counters = table_ptr + HEAD + num_rows + 1
    for head in range(KV_HEADS):
        tl.store(counters + row * KV_HEADS + head, 0, mask=real)
    turn = tl.cumsum(runs, 0) - runs
    if total > slots:
        # Not all run at a time: the longest begin, so that none of them runs alone in the end.
        each = tl.cdiv(tiles, tl.maximum(runs, 1))
        grade = CLASSES - 1 - tl.minimum(each * CLASSES // (tl.max(each, 0) + 1), CLASSES - 1)
        before = 0
        for number in range(CLASSES):
            inside = tl.where(grade == number, runs, 0)
            turn = tl.where(grade == number, before + tl.cumsum(inside, 0) - inside, turn)
            before += tl.sum(inside, 0)
    for run in range(0, tl.max(runs, 0)):
        exists = run < runs
        # Runs of a row differ by one part at most.
        part = run * parts // tl.maximum(runs, 1)
        begin = low + part * size * TILE
        end = low + (run + 1) * parts // tl.maximum(runs, 1) * size * TILE
        place = part if INVARIANT else tl.zeros([ROWS], tl.int32) + run
        begin = tl.where(too_long, -1, begin)
        fields = counters + num_rows * KV_HEADS + FIELDS * (turn + run)
        tl.store(fields, row, mask=exists)
        tl.store(fields + 1, begin, mask=exists)
        tl.store(fields + 2, tl.where(too_long, -1, tl.minimum(end, length)), mask=exists)
        tl.store(fields + 3, 2 * pieces + (run == runs - 1), mask=exists)
        tl.store(fields + 4, first + place, mask=exists)
        tl.store(fields + 5, runs, mask=exists)
        tl.store(fields + 6, size * TILE, mask=exists)


@jit()
def _count(parts, size, common, planned):
    """Runs of about `common` tiles that each row is cut into.

    A row without tokens has one too, which writes its zeros.
    """
    return tl.where(planned, tl.maximum(tl.cdiv(parts, tl.cdiv(common, size)), 1), 0)


_plan_launcher = Launcher(_plan_kernel)
