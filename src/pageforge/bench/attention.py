"""Decode attention over pages: every shape beside its peers, ragged batches, batch invariance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Group
from torch import Tensor

from pageforge import ops
from pageforge.bench.ceilings import stream
from pageforge.bench.context import Bench, best, dtype_name
from pageforge.bench.harness import Builders, Candidate, geometric_mean, measure
from pageforge.bench.peers import decode_peers
from pageforge.bench.problems import HEADS, TOLERANCE, PagedKV, Problem, zipf_lengths
from pageforge.bench.report import table

PAGE_SIZE, LARGE_PAGE = 16, 128

LARGE_BYTES = 64_000_000
"""From here on a decode step must reach its share of the read ceiling, whatever the page size."""

READS = ((4096, 4), (4096, 8), (8192, 4))
"""Of a plain read beside a decode step: elements that a program reads at a time, programs for each
multiprocessor. (The read ceiling is that of gigabytes; starts and ends count for less.)"""

RAGGED = {
    "1x128k + 63x2k": (131072, *[2048] * 63),
    "zipf, 64 rows": tuple(zipf_lengths(64, 131072 + 63 * 2048)),
}
RAGGED_HEADS = (HEADS[1], HEADS[0])


# --- decode -------------------------------------------------------------------------------------


def decode(bench: Bench) -> None:
    """Every shape, beside every peer."""
    cases = []
    for dtype in bench.dtypes:
        for heads in bench.heads:
            for shape, (rows, context) in bench.shapes.items():
                if bench.budget.allows(f"decode {heads} {dtype_name(dtype)} {shape}"):
                    problem = bench.problem(heads, [context] * rows, dtype)
                    cases.append(_decode_case(bench, problem, shape))
    bench.console.print(_decode_table(cases))
    _decode_summary(bench, cases)
    bench.console.print()


def ours(problem: Problem, kv: PagedKV, batch_invariant: bool = False) -> Candidate:
    """What a decode step calls: `plan_decode` once, then `write_and_attend` in every layer."""
    rotation = problem.rotation

    def step() -> Tensor:
        for index, buffers in rotation.steps():
            out = _step(problem, kv, index, buffers, slice(None), batch_invariant)
        return out

    def error(output: Tensor) -> float:
        return problem.error(output, *kv.layer(rotation.last_buffer), kv.page_tables[-1])

    return Candidate(step, rotation.calls, error, TOLERANCE[problem.dtype])


def _step(
    problem: Problem,
    kv: PagedKV,
    index: int,
    buffers: Sequence[int],
    rows: slice,
    batch_invariant: bool,
) -> Tensor:
    """One decode step of some rows of a set, through these buffers; the last one's output."""
    page_table, seq_lens = kv.page_tables[index][rows], problem.seq_lens[rows]
    query, key, value = problem.query[rows], problem.new_key[rows], problem.new_value[rows]
    plan = ops.plan_decode(
        seq_lens, page_table, kv.layer(buffers[0])[0], batch_invariant=batch_invariant
    )
    for buffer in buffers:
        out = ops.write_and_attend(
            query,
            key,
            value,
            *kv.layer(buffer),
            page_table,
            seq_lens,
            scale=problem.scale,
            batch_invariant=batch_invariant,
            plan=plan,
        )
    return out


def _decode_case(bench: Bench, problem: Problem, shape: str) -> dict[str, Any]:
    kv = PagedKV(problem, PAGE_SIZE)
    builders: dict[str, Callable[[], Candidate]] = {"pageforge p16": partial(ours, problem, kv)}
    if problem.bytes >= LARGE_BYTES:
        builders["pageforge p128"] = lambda: ours(problem, PagedKV(problem, LARGE_PAGE))
        for block, programs in READS:
            builders[f"read {block}x{programs}"] = partial(plain_read, problem, kv, block, programs)
    return _timed(bench, "decode", problem, shape, builders | dict(decode_peers(problem, kv)))


def plain_read(problem: Problem, kv: PagedKV, block: int, programs: int) -> Candidate:
    """Reads as many bytes as a call does, one after the other, and does nothing with them."""
    pages, rotation = kv.pool[1:].view(-1).view(torch.float32), problem.rotation
    parts = pages.split(problem.bytes // pages.element_size())[: rotation.sets * rotation.buffers]
    processors = torch.cuda.get_device_properties(pages.device).multi_processor_count

    def read() -> None:
        for index, buffers in rotation.steps():
            for buffer in buffers:
                part = parts[index * rotation.buffers + buffer]
                stream(part, block, programs * processors, True)

    return Candidate(read, rotation.calls)


def _timed(
    bench: Bench, section: str, problem: Problem, shape: str, builders: Builders
) -> dict[str, Any]:
    """Measure and record; returns the case with its timings under "timings"."""
    timings = measure(builders, bench.device, repeats=bench.repeats)
    case = {
        "heads": str(problem.heads),
        "dtype": dtype_name(problem.dtype),
        "shape": shape,
        "bytes": problem.bytes,
        "floor_us": problem.bytes / bench.read * 1e6,
        "calls_a_replay": problem.rotation.calls,
    }
    for name, timing in timings.items():
        bench.note(section, case, name, timing)
    return {**case, "timings": timings}


def ratio_to(case: dict[str, Any], peer: str) -> float | None:
    """How many times as long as ours (page 16) the peer takes; None where one is missing."""
    mine = case["timings"]["pageforge p16"]
    _, other = best(case["timings"], peer)
    return other.us / mine.us if other is not None and mine.ok else None


def _us(case: dict[str, Any], start: str) -> float | None:
    _, timing = best(case["timings"], start)
    return None if timing is None else timing.us


def _share(case: dict[str, Any], start: str = "pageforge p16") -> float | None:
    us = _us(case, start)
    return None if us is None else case["floor_us"] / us


def _decode_table(cases: Sequence[dict[str, Any]]) -> Group:
    columns = ("heads", "dtype", "shape", "MB", "floor", "read", "us", "GB/s", "share", "p128")
    peers = ("fa3", "sdpa flash", "sdpa cudnn", "sdpa efficient", "flashinfer")
    rows = []
    for case in cases:
        us = _us(case, "pageforge p16")
        fa3_name, _ = best(case["timings"], "fa3")
        rows.append(
            (
                case["heads"],
                case["dtype"].replace("float", "f"),
                case["shape"],
                case["bytes"] / 1e6,
                case["floor_us"],
                _us(case, "read"),
                us,
                None if us is None else case["bytes"] / us / 1e3,
                _share(case),
                _us(case, "pageforge p128"),
                *(_us(case, peer) for peer in peers),
                ratio_to(case, "fa3"),
                None if fa3_name is None else fa3_name.removeprefix("fa3 "),
                case["timings"]["pageforge p16"].error,
            )
        )
    names = (*columns, "fa3", "flash", "cudnn", "effic.", "finfer", "fa3/us", "fa3 best", "error")
    return table(
        "decode: us a layer; ours writes the new token, attends, and carries its share of the "
        "plan; peers only read",
        names,
        rows,
    )


def _decode_summary(bench: Bench, cases: Sequence[dict[str, Any]]) -> None:
    """Geometric means over the shapes, and the worst of each promise."""
    for peer in ("fa3", "sdpa flash", "sdpa cudnn", "flashinfer"):
        ratios = [ratio for case in cases if (ratio := ratio_to(case, peer)) is not None]
        if ratios:
            found = bench.report.add(
                section="decode summary",
                peer=peer,
                shapes=len(ratios),
                geometric_mean=geometric_mean(ratios),
                worst=min(ratios),
                slower_than_peer=sum(ratio < 1 for ratio in ratios),
            )
            bench.console.print(
                f"{peer}: {found['geometric_mean']:.2f} times our time (geometric mean of "
                f"{len(ratios)} shapes), worst {found['worst']:.2f}; it was faster in "
                f"{found['slower_than_peer']}"
            )
    for heads in bench.heads:
        large = [c for c in cases if c["heads"] == str(heads) and c["bytes"] >= LARGE_BYTES]
        shares = [share for case in large if (share := _share(case)) is not None]
        pages, reads = (
            [
                us / other
                for case in large
                if (us := _us(case, "pageforge p16")) and (other := _us(case, name))
            ]
            for name in ("pageforge p128", "read")
        )
        if shares:
            found = bench.report.add(
                section="decode summary",
                heads=str(heads),
                large_shapes=len(shares),
                worst_share=min(shares),
                worst_page_16_over_128=max(pages, default=None),
                worst_over_read=max(reads, default=None),
            )
            bench.console.print(
                f"{heads}, {len(shares)} shapes of 64 MB or more: worst share of the read ceiling "
                f"{min(shares):.3f}; over a plain read of as many bytes at most "
                f"{max(reads, default=0):.3f}; page 16 over page 128 at most "
                f"{max(pages, default=0):.3f}"
            )


# --- ragged -------------------------------------------------------------------------------------


def ragged(bench: Bench) -> None:
    """One long row among short ones, and Zipf lengths."""
    cases = []
    for heads in RAGGED_HEADS:
        for shape, lengths in RAGGED.items():
            if bench.budget.allows(f"ragged {heads} {shape}"):
                problem = bench.problem(heads, lengths, bench.dtypes[0])
                cases.append(_ragged_case(bench, problem, shape))
    rows = []
    for case in cases:
        us = _us(case, "pageforge p16")
        fa3_name, fa3 = best(case["timings"], "fa3")
        rows.append(
            (
                f"{case['heads']} {case['shape']}",
                case["bytes"] / 1e6,
                case["floor_us"],
                us,
                None if us is None else us / case["floor_us"],
                None if fa3 is None else fa3.us,
                fa3_name,
                case["timings"]["pageforge p16"].error,
            )
        )
    columns = ("ragged", "MB", "floor us", "us", "us/floor", "fa3 us", "fa3 best", "error")
    bench.console.print(table("ragged batches: us a layer over bytes / ceiling", columns, rows))
    bench.console.print()


def _ragged_case(bench: Bench, problem: Problem, shape: str) -> dict[str, Any]:
    kv = PagedKV(problem, PAGE_SIZE)
    mine = {"pageforge p16": partial(ours, problem, kv)}
    return _timed(bench, "ragged", problem, shape, mine | dict(decode_peers(problem, kv)))


# --- batch invariance ---------------------------------------------------------------------------


def invariant(bench: Bench) -> None:
    """What `batch_invariant=True` costs, and whether a row alone gives the bits it has in a batch.

    Each plan goes through the same K/V.
    """
    rows, costs = [], []
    for heads in bench.heads:
        for shape, (num_rows, context) in bench.shapes.items():
            if not bench.budget.allows(f"invariant {heads} {shape}"):
                continue
            problem = bench.problem(heads, [context] * num_rows, bench.dtypes[0])
            kv = PagedKV(problem, PAGE_SIZE)
            case = _timed(
                bench,
                "invariant",
                problem,
                shape,
                {
                    "pageforge p16": partial(ours, problem, kv),
                    "pageforge invariant": partial(_invariant, problem, kv),
                },
            )
            free, fixed = case["timings"].values()
            cost = fixed.us / free.us if fixed.ok and free.ok else None
            costs += [] if cost is None else [cost]
            rows.append((f"{heads} {shape}", free.us, fixed.us, cost, "yes" if fixed.ok else "NO"))
    columns = ("batch invariance", "us", "invariant us", "ratio", "same bits")
    bench.console.print(table("batch_invariant=True against False: us a layer", columns, rows))
    if costs:
        found = bench.report.add(
            section="invariant summary",
            shapes=len(costs),
            geometric_mean=geometric_mean(costs),
            worst=max(costs),
        )
        bench.console.print(
            f"batch_invariant costs {found['geometric_mean'] - 1:+.1%} (geometric mean of "
            f"{len(costs)} shapes), at most {found['worst'] - 1:+.1%}"
        )
    bench.console.print()


def _invariant(problem: Problem, kv: PagedKV) -> Candidate:
    candidate = ours(problem, kv, batch_invariant=True)

    def error(output: Tensor) -> float:
        for row in problem.checked:
            if not torch.equal(_alone(problem, kv, row), output[row]):
                raise ArithmeticError(f"row {row} alone has other bits than in its batch")
        assert candidate.error is not None
        return candidate.error(output)

    return Candidate(candidate.run, candidate.calls, error, candidate.tolerance)


def _alone(problem: Problem, kv: PagedKV, row: int) -> Tensor:
    """The output of one row of the last call, in a batch of its own."""
    rows, buffers = slice(row, row + 1), [problem.rotation.last_buffer]
    return _step(problem, kv, -1, buffers, rows, batch_invariant=True)[0]
