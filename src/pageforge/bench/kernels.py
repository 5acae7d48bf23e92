"""How fast are the ops, against the device's limits and beside their peers?

Timed by graph replay on K/V that no cache holds, in shuffled pages; each output is checked once
against the reference in float64. Bytes and floors are arithmetic, everything else is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pageforge.bench import attention, cache_ops, prefill
from pageforge.bench.ceilings import copy_ceiling, read_ceiling
from pageforge.bench.context import QUICK_REPEATS, QUICK_SHAPES, Bench
from pageforge.bench.run import Run, run_sections

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "decode": attention.decode,
    "ragged": attention.ragged,
    "invariant": attention.invariant,
    "cache": cache_ops.cache_ops,
    "prefill": prefill.prefill,
}


def run_all(given: Run) -> None:
    """Everything, or with `quick` a few shapes."""
    run(bench_of(given))


def bench_of(given: Run) -> Bench:
    """What the sections are given in a run."""
    bench = Bench(given.device, given.report, given.console, given.budget)
    if given.quick:
        bench.repeats = QUICK_REPEATS
        bench.dtypes = bench.dtypes[:1]
        bench.shapes = {name: bench.shapes[name] for name in QUICK_SHAPES}
    return bench


def run(bench: Bench, only: Sequence[str] = ()) -> None:
    """The sections named, or all, in order."""
    bench.read = read_ceiling(bench.device)
    bench.copy = copy_ceiling(bench.device)
    bench.report.add(section="ceilings", read_bytes_per_s=bench.read, copy_bytes_per_s=bench.copy)
    bench.console.print(
        f"read ceiling {bench.read / 1e9:,.0f} GB/s, copy ceiling {bench.copy / 1e9:,.0f} GB/s "
        f"(read + written)\n"
    )
    run_sections(bench, SECTIONS, only)
