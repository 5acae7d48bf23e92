"""What the files with Triton kernels share: Triton, where there is one, and how tiles are cut."""

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
