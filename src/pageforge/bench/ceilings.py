"""What the device can do, its memory above all: the rates that every figure is a share of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pageforge.bench.harness import Candidate, measure
from pageforge.geometry import ceil_div
from pageforge.ops.kernels import jit, tl

READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
COPY_BYTES = 2 << 30
"""Many times the last cache, and long enough for starts and ends not to count."""

MATRIX = {"cuda": 8192, "cpu": 1024}
"""Rows of square matrices: a product is long enough there for starts and ends not to count."""

BLOCKS = (2048, 4096, 8192)
PROGRAMS = (2, 4, 8)
"""Elements that a program reads at a time; programs for each multiprocessor."""

REPEATS = 5


def read_ceiling(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes a second of a kernel that only reads: the best of several shapes of it."""
    num_bytes = num_bytes or READ_BYTES[device.type]
    if device.type != "cuda":
        source = torch.empty(num_bytes // 4).normal_()
        runs: dict[str, Callable[[], Any]] = {"sum": source.sum}
    else:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        sweep = max(BLOCKS) * max(PROGRAMS) * processors  # every shape's sweeps divide it
        source = torch.empty(num_bytes // 4 // sweep * sweep, device=device).normal_()
        runs = {
            f"{block} {programs} {interleaved}": partial(
                stream, source, block, programs * processors, interleaved
            )
            for block, programs, interleaved in itertools.product(BLOCKS, PROGRAMS, (True, False))
        }
    return _best(runs, device, source.numel() * source.element_size())


def copy_ceiling(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes a second of a copy on the device, bytes read and bytes written together."""
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return _best({"copy": partial(target.copy_, source)}, device, moved)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a matrix product, a multiplication and a sum being two.

    Of random numbers: products of zeros take less power, and so run faster.
    """
    size = MATRIX[device.type]
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return _best({"product": partial(torch.mm, left, right)}, device, 2 * size**3)


def host_copy_ceilings(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Bytes a second of one copy of `num_bytes`: (device to pinned host, host to device)."""
    inside = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    outside = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = partial(outside.copy_, inside, non_blocking=True)
    back = partial(inside.copy_, outside, non_blocking=True)
    return _best({"out": out}, device, num_bytes), _best({"in": back}, device, num_bytes)


def _best(runs: dict[str, Callable[[], Any]], device: torch.device, amount: int) -> float:
    """`amount`, of bytes or whatever a run does, a second of the fastest."""
    builders = {name: partial(Candidate, run, 1) for name, run in runs.items()}
    timings = measure(builders, device, repeats=REPEATS, graph=False)
    fitting = [timing.us for timing in timings.values() if timing.ok]
    if not fitting:
        raise RuntimeError("; ".join(str(timing.failure) for timing in timings.values()))
    return amount / min(fitting) * 1e6


def stream(source: torch.Tensor, block: int, num_programs: int, interleaved: bool) -> torch.Tensor:
    """The sums `[num_programs]` of what each program read of `source`.

    `interleaved`: neighbouring programs read neighbouring blocks; else each its own stretch.
    """
    sweeps = ceil_div(source.numel(), block * num_programs)
    out = torch.empty(num_programs, device=source.device)
    _stream_kernel[(num_programs,)](
        source,
        out,
        sweeps,
        num_programs if interleaved else 1,
        1 if interleaved else sweeps,
        source.numel(),
        IS_WHOLE=source.numel() == sweeps * block * num_programs,
        BLOCK=block,
        num_warps=8,
    )
    return out


@jit()
def _stream_kernel(
    source_ptr,  # [elements] float32
    out_ptr,  # [programs] float32
    sweeps,
    sweep_step,  # blocks from one sweep to the next
    program_step,  # blocks from one program to the next
    num_elements,
    IS_WHOLE: tl.constexpr,  # all sweeps are full
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for sweep in range(0, sweeps):
        block = (sweep * sweep_step + program * program_step).to(tl.int64)
        element = block * BLOCK + tl.arange(0, BLOCK)
        if IS_WHOLE:
            total += tl.load(source_ptr + element)
        else:
            total += tl.load(source_ptr + element, mask=element < num_elements, other=0)
    tl.store(out_ptr + program, tl.sum(total, 0))
