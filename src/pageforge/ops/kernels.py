"""What the files with Triton kernels share: Triton, where there is one, and how work is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, say: the files must load all the same, for what they do on the CPU
    triton = tl = None

AVAILABLE = triton is not None

LOG2E: Any = tl.constexpr(math.log2(math.e)) if AVAILABLE else None
"""Kernels take powers of two, which the hardware has, instead of powers of e."""

TILE = 4096
"""Elements that a program moves: 64 bytes a thread in two-byte dtypes, in 16-byte loads."""

MAX_COLUMNS = 1024
"""Elements of a row that a program moves at most: 16 bytes a thread in two-byte dtypes."""

MIN_COLUMNS = 64
"""Narrower than this a tile's rows are no longer whole 128-byte lines."""

WAYS: Any = tl.constexpr(16) if AVAILABLE else None
"""Parts into which a round of a search cuts what is left: 256 rows take two rounds."""


def jit(**options: Any) -> Callable[[Any], Any]:
    """`triton.jit(**options)`; without Triton the function stays as it is, and is never called."""
    if triton is None:
        return lambda kernel: kernel
    decorator: Callable[[Any], Any] = triton.jit(**options)
    return decorator


def tile_columns(width: int) -> int:
    """How many of a row's `width` elements a program moves: a power of two, as tiles must be.

    One that divides `width`, so that no thread idles, unless that would be too narrow.
    """
    divisor = width & -width
    if divisor < MIN_COLUMNS:
        divisor = max(MIN_COLUMNS, 1 << (width - 1).bit_length())
    return min(divisor, MAX_COLUMNS)


@jit()
def first_block(first_token, row, QUERIES: tl.constexpr):
    """Where the blocks of `row` begin.

    All queries before it, packed tight, fill `first_token // QUERIES` blocks; each row before it
    may need one more, since a block serves one row.
    """
    return first_token // QUERIES + row


@jit()
def row_of_block(cu_ptr, num_rows, block, QUERIES: tl.constexpr):
    """The last row whose blocks begin at `block` or before.

    Each round looks at WAYS places at once, for a load takes as long as many: most programs of a
    batch that mostly decodes find out here that there is nothing for them, and do nothing else.
    """
    left = 0
    width = num_rows
    while width > 1:
        step = tl.cdiv(width, WAYS)
        passed = 0
        for way in tl.static_range(1, WAYS):
            row = left + way * step
            exists = row < num_rows
            first_token = tl.load(cu_ptr + row, mask=exists, other=0)
            passed += (exists & (first_block(first_token, row, QUERIES) <= block)).to(tl.int32)
        left += passed * step
        width = tl.minimum(step, num_rows - left)
    return left
