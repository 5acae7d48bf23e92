"""What moves K/V without attention: copies, gathers, writes, swaps, over the copy ceilings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pageforge import ops
from pageforge.bench.ceilings import host_copy_ceilings
from pageforge.bench.context import Bench
from pageforge.bench.harness import Candidate, measure
from pageforge.bench.problems import (
    HEADS,
    Heads,
    PagedKV,
    Problem,
    element_size,
)
from pageforge.bench.report import table
from pageforge.geometry import ceil_div

DTYPE = torch.float16
PAGE_SIZE = 16

COPIED_PAGES = (32, 256, 1024)
GATHERED = {"32x512": (32, 512), "32x4k": (32, 4096)}
WRITTEN_TOKENS = (32, 2048, 16384)

SWAPPED = {"1024 pages of 589,824 bytes": (1024, 294_912), "64 pages of 2 MiB": (64, 1 << 20)}
"""Pages, and elements of each: GPT-2's, and those of a model of Llama 8B's shape."""

Case = tuple[str, str, Callable[[], Candidate], int, float, bool]
"""Op, sizes, builder, bytes moved a call, the ceiling in bytes a second, whether as a graph."""


def cache_ops(bench: Bench) -> None:
    """Every op at a few sizes; its share of the ceiling that it is bound by."""
    rows = []
    for name, cases in (
        ("copy_pages", _copies),
        ("gather_kv", _gathers),
        ("write_kv", _writes),
        ("swap", _swaps),
    ):
        if bench.budget.allows(name):
            rows += [_row(bench, *case) for case in cases(bench)]
    columns = ("op", "sizes", "MB moved", "us", "GB/s", "share of ceiling")
    bench.console.print(
        table("cache ops: bytes read and written a second, over the same of a copy", columns, rows)
    )
    bench.console.print()


def _row(
    bench: Bench,
    op: str,
    sizes: str,
    build: Callable[[], Candidate],
    num_bytes: int,
    ceiling: float,
    graph: bool,
) -> tuple[Any, ...]:
    timing = measure({op: build}, bench.device, repeats=bench.repeats, graph=graph)[op]
    rate = num_bytes / timing.us * 1e6  # NaN where it failed
    case = {
        "op": op,
        "sizes": sizes,
        "bytes": num_bytes,
        "ceiling_bytes_per_s": ceiling,
        "bytes_per_s": rate,
        "share_of_ceiling": rate / ceiling,
    }
    bench.note("cache", case, f"pageforge {op}", timing)
    return op, sizes, num_bytes / 1e6, timing.us, rate / 1e9, rate / ceiling


def _copies(bench: Bench) -> list[Case]:
    """Pages of GPT-2's and Llama 8B's size; pairs differ from call to call."""
    cases: list[Case] = []
    for heads in HEADS[:2]:
        elements = 2 * heads.layers * heads.kv * heads.dim * PAGE_SIZE
        page_bytes = elements * element_size(DTYPE)
        for pairs in COPIED_PAGES:
            moved = 2 * pairs * page_bytes
            build = partial(_copy, bench, elements, pairs, moved)
            sizes = f"{pairs} pages of {page_bytes:,} bytes"
            cases.append(("copy_pages", sizes, build, moved, bench.copy, True))
    return cases


def _copy(bench: Bench, elements: int, pairs: int, moved: int) -> Candidate:
    calls = max(2, ceil_div(bench.cold_bytes, moved))
    num_pages = 1 + 2 * pairs * calls
    pages = _random(bench, num_pages, elements)
    ids = 1 + torch.randperm(num_pages - 1, device=bench.device).view(calls, 2, pairs)

    def run() -> Tensor:
        for source, target in ids:
            ops.copy_pages(pages, source, target)
        return pages[0, :1]  # which nobody reads

    return Candidate(
        run, calls, lambda _: float(not torch.equal(pages[ids[:, 0]], pages[ids[:, 1]])), 0
    )


def _gathers(bench: Bench) -> list[Case]:
    cases: list[Case] = []
    for heads in HEADS[:2]:
        for shape, (rows, context) in GATHERED.items():
            problem = bench.problem(heads, [context] * rows, DTYPE)
            build = partial(_gather, problem)
            sizes = f"{heads} {shape}"
            cases.append(("gather_kv", sizes, build, 2 * problem.bytes, bench.copy, True))
    return cases


def _gather(problem: Problem) -> Candidate:
    kv, rotation = PagedKV(problem, PAGE_SIZE), problem.rotation

    def run() -> tuple[Tensor, Tensor]:
        for index, buffers in rotation.steps():
            for buffer in buffers:
                out = ops.gather_kv(*kv.layer(buffer), kv.page_tables[index])
        return out

    def error(output: tuple[Tensor, Tensor]) -> float:
        row = problem.checked[-1]
        table = kv.page_tables[-1][row].long()
        want = [
            pages[table].transpose(0, 1).flatten(1, 2) for pages in kv.layer(rotation.last_buffer)
        ]
        return float(
            not all(torch.equal(got[row], right) for got, right in zip(output, want, strict=True))
        )

    return Candidate(run, rotation.calls, error, 0)


def _writes(bench: Bench) -> list[Case]:
    cases: list[Case] = []
    for heads in HEADS[:2]:
        for tokens in WRITTEN_TOKENS:
            moved = 2 * 2 * tokens * heads.kv * heads.dim * element_size(DTYPE)
            build = partial(_write, bench, heads, tokens, moved)
            cases.append(("write_kv", f"{heads} {tokens} tokens", build, moved, bench.copy, True))
    return cases


def _write(bench: Bench, heads: Heads, tokens: int, moved: int) -> Candidate:
    """New K/V, and the slots that they go to, are others in each call."""
    calls = max(2, ceil_div(bench.cold_bytes, moved))
    new = _random(bench, calls, 2, tokens, heads.kv, heads.dim)
    slots = PAGE_SIZE + torch.randperm(calls * tokens, device=bench.device).view(calls, tokens)
    num_pages = 1 + ceil_div(calls * tokens, PAGE_SIZE)
    pool = torch.zeros(
        num_pages, 2, heads.kv, PAGE_SIZE, heads.dim, dtype=DTYPE, device=bench.device
    )
    keys, values = pool[:, 0], pool[:, 1]

    def run() -> Tensor:
        for (key, value), slot in zip(new, slots, strict=True):
            ops.write_kv(key, value, keys, values, slot)
        return pool[0, 0, 0, 0, :1]

    def error(_: Tensor) -> float:
        page, offset = slots[-1] // PAGE_SIZE, slots[-1] % PAGE_SIZE
        right = (keys[page, :, offset] == new[-1, 0]) & (values[page, :, offset] == new[-1, 1])
        return float(not right.all())

    return Candidate(run, calls, error, 0)


def _swaps(bench: Bench) -> list[Case]:
    """Scattered pages, against one copy of as many bytes."""
    cases: list[Case] = []
    for sizes, (count, elements) in SWAPPED.items():
        num_bytes = count * elements * element_size(DTYPE)
        out, back = host_copy_ceilings(bench.device, num_bytes)
        for op, ceiling in (("swap_out", out), ("swap_in", back)):
            build = partial(_swap, bench, op, count, elements)
            cases.append((op, sizes, build, num_bytes, ceiling, False))
    return cases


def _swap(bench: Bench, op: str, count: int, elements: int) -> Candidate:
    pages = _random(bench, 1 + 2 * count, elements)
    ids = 1 + torch.randperm(2 * count)[:count]
    host = torch.zeros(count, elements, dtype=DTYPE, pin_memory=bench.device.type == "cuda")
    host.copy_(pages[1 : 1 + count])

    def run() -> None:
        if op == "swap_out":
            ops.swap_out(pages, ids, host)
        else:
            ops.swap_in(host, pages, ids)

    def error(_: None) -> float:
        return float(not torch.equal(pages[ids.to(bench.device)].cpu(), host))

    return Candidate(run, 1, error, 0)


def _random(bench: Bench, *shape: int) -> Tensor:
    problem = Problem(HEADS[0], (1,), DTYPE, bench.device)
    return problem.random(*shape)
