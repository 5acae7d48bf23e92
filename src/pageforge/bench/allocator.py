"""How fast does the allocator hand out pages, in pools of any size, and does it lose one?

The allocator alone, which is plain Python: no device, no memory behind the pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from pageforge.bench.engine_probe import replaced
from pageforge.bench.harness import Budget, percentile, quartiles, rotated
from pageforge.bench.report import Report, table
from pageforge.bench.run import Run
from pageforge.memory import PageAllocator, PageTable

PAGES_PER_CALL = 8

CALLS, QUICK_CALLS = 20_000, 2_000

ROUNDS, QUICK_ROUNDS = 5, 3
"""Of which the median counts."""

SIZES = (512, 10_000, 100_000, 1_000_000, 10_000_000)

QUICK_SIZES = SIZES[:3]

MOST_CACHED = 1_000_000
"""Pages: a pool that is all cached takes a dictionary of them."""

BURST = 64
"""Calls of `allocate` in a row: many times the pages that an allocator keeps at hand."""

PAGE_SIZE = 16

CYCLES, SEQUENCES, PAGES_EACH = 500, 16, 8
"""Of the stress: how often all sequences come and go, how many, and how large they grow."""


@dataclass
class AllocatorBench:
    """What every part is given."""

    report: Report
    console: Console
    budget: Budget
    sizes: Sequence[int] = SIZES
    calls: int = CALLS
    rounds: int = ROUNDS
    cycles: int = CYCLES


def run_all(given: Run) -> None:
    """Everything, at sizes for the time."""
    run(bench_of(given))


def bench_of(given: Run) -> AllocatorBench:
    """What every part is given in a run."""
    bench = AllocatorBench(given.report, given.console, given.budget)
    if given.quick:
        bench.sizes, bench.calls, bench.rounds = QUICK_SIZES, QUICK_CALLS, QUICK_ROUNDS
    return bench


def run(bench: AllocatorBench) -> None:
    """Whether a page is lost, then the speeds."""
    if bench.budget.allows("stress"):
        found = stress(range(bench.cycles))
        wrong = {} if found.problem is None else {"failure": found.problem}
        bench.report.add(section="stress", **asdict(found), **wrong)
        bench.console.print(
            f"stress: {found.cycles:,} cycles, {found.pages_claimed:,} pages claimed, "
            f"{found.pages_returned:,} returned; {found.problem or 'no leaks, no errors'}\n"
        )
    speed(bench)


# --- does it lose a page? -------------------------------------------------------------------


@dataclass(frozen=True)
class Stress:
    """What all cycles came to.

    `leaks`: pages still used when all sequences had ended. `errors`: cycles in which a call failed
    or a recount was wrong; `first_error` says what and when.
    """

    cycles: int
    sequences: int
    pages_each: int
    cpu_s: float
    pages_claimed: int
    pages_returned: int
    leaks: int
    errors: int
    first_error: str | None

    @property
    def problem(self) -> str | None:
        """What went wrong, in a line."""
        if not (self.leaks or self.errors):
            return None
        return f"{self.leaks:,} leaks, {self.errors:,} errors: {self.first_error}"


def stress(
    cycles: Iterable[int], num_sequences: int = SEQUENCES, num_pages: int = PAGES_EACH
) -> Stress:
    """Sequences of `num_pages` pages grow side by side and end, in every one of `cycles`.

    They grow through page tables, as sequences do, and are recounted from the live tables.
    """
    # Room for half as many again: pages of ended sequences are handed out in another order.
    allocator = PageAllocator(num_sequences * num_pages * 3 // 2)
    count = claimed = returned = errors = 0
    first = None
    began = time.process_time()
    for number in cycles:
        count += 1
        before = allocator.num_used
        tables = [PageTable([allocator], PAGE_SIZE) for _ in range(num_sequences)]
        try:
            _grow(tables, num_pages, number)
            most = allocator.num_used
            claimed += most - before
            allocator.check_invariants([pages.pages() for pages in tables])
            if most != num_sequences * num_pages:
                raise AssertionError(f"{most} pages used")
            for pages in tables[number % 2 :] + tables[: number % 2]:
                pages.release()
            returned += most - allocator.num_used
        except Exception as error:  # whatever goes wrong is what we are looking for
            errors += 1
            first = first or f"cycle {number + 1}: {error}"
    return Stress(
        cycles=count,
        sequences=num_sequences,
        pages_each=num_pages,
        cpu_s=time.process_time() - began,
        pages_claimed=claimed,
        pages_returned=returned,
        leaks=allocator.num_used,
        errors=errors,
        first_error=first,
    )


def _grow(tables: Sequence[PageTable], num_pages: int, number: int) -> None:
    """A prompt each, of another length in every cycle, then tokens until all pages are full."""
    total = num_pages * PAGE_SIZE
    for index, pages in enumerate(tables):
        pages.append(min(total, 1 + (7 * number + 13 * index) % total))
    while any(pages.length < total for pages in tables):
        for pages in tables:
            pages.append(min(5, total - pages.length))


# --- how fast is it? ------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A way to use an allocator.

    `make(num_pages)`: an allocator to begin with. `run(allocator, calls)`: that many calls of
    `allocate`; returns the seconds of CPU time that count, and leaves as many pages used as before.
    """

    make: Callable[[int], PageAllocator]
    run: Callable[[PageAllocator, int], float]
    most_pages: int | None = None


def at_once(allocator: PageAllocator, calls: int) -> float:
    """Pages that are given back before the next are asked for: one call of each."""
    allocate, release = allocator.allocate, allocator.release
    begin = time.process_time()
    for _ in range(calls):
        release(allocate(PAGES_PER_CALL))
    return time.process_time() - begin


def in_bursts(allocator: PageAllocator, calls: int) -> float:
    """Many calls of `allocate`, then as many of `release`, so that no small stock serves them."""
    allocate, release = allocator.allocate, allocator.release
    burst = _burst(allocator)
    begin = time.process_time()
    for first in range(0, calls, burst):
        for pages in [allocate(PAGES_PER_CALL) for _ in range(min(burst, calls - first))]:
            release(pages)
    return time.process_time() - begin


def evicting(allocator: PageAllocator, calls: int) -> float:
    """Calls of `allocate` that find cached pages only; making them cached again does not count."""
    allocate, burst, seconds = allocator.allocate, _burst(allocator), 0.0
    for first in range(0, calls, burst):
        begin = time.process_time()
        taken = [allocate(PAGES_PER_CALL) for _ in range(min(burst, calls - first))]
        seconds += time.process_time() - begin
        for pages in taken:
            _cache(allocator, pages)
    return seconds


def _burst(allocator: PageAllocator) -> int:
    return min(BURST, allocator.num_available // PAGES_PER_CALL)


def scattered(num_pages: int) -> PageAllocator:
    """Half of the pages used, the other half free, and which is which is chance."""
    allocator = PageAllocator(num_pages)
    pages = np.array(allocator.allocate(num_pages))
    free = np.random.default_rng(0).permutation(pages)[: num_pages // 2].tolist()
    for first in range(0, len(free), PAGES_PER_CALL):
        allocator.release(free[first : first + PAGES_PER_CALL])
    return allocator


def all_cached(num_pages: int) -> PageAllocator:
    """Every page cached."""
    allocator = PageAllocator(num_pages)
    _cache(allocator, allocator.allocate(num_pages))
    return allocator


def _cache(allocator: PageAllocator, pages: Sequence[int]) -> None:
    for page in pages:
        allocator.publish(page)
    allocator.release(pages)


LOADS = {
    "at once": Load(PageAllocator, at_once),
    "in bursts": Load(scattered, in_bursts),
    "evicting": Load(all_cached, evicting, MOST_CACHED),
}
"""From an empty pool; from one whose free pages are scattered; from one that is all cached."""


def speed(bench: AllocatorBench) -> None:
    """Pages a second of every load in pools of every size, by turns; then calls on the clock."""
    ready: dict[tuple[str, int], PageAllocator] = {}
    for size in bench.sizes:
        for name, load in LOADS.items():
            fits = load.most_pages is None or size <= load.most_pages
            if fits and bench.budget.allows(f"{name}, {size:,} pages"):
                ready[name, size] = load.make(size)
    used = {key: allocator.num_used for key, allocator in ready.items()}
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in ready}
    for number in range(bench.rounds):
        for key in rotated(list(ready), number):
            seconds = LOADS[key[0]].run(ready[key], bench.calls)
            rates[key].append(bench.calls * PAGES_PER_CALL / seconds)
    rows: list[tuple[object, ...]] = []
    for (name, size), allocator in ready.items():
        low, middle, high = quartiles(rates[name, size])
        times = call_times(LOADS[name], allocator, bench.calls)
        bench.report.add(
            section="speed",
            load=name,
            pages_total=size,
            pages_per_call=PAGES_PER_CALL,
            pages_per_s=middle,
            pages_per_s_low=low,
            pages_per_s_high=high,
            **times,
            leaks=allocator.num_used - used[name, size],
        )
        rows.append((name, f"{size:,}", middle / 1e6, *times.values()))
    columns = (
        "load",
        "pool of pages",
        "M pages/s",
        "allocate P50 us",
        "P99",
        "release P50 us",
        "P99",
    )
    bench.console.print(table(f"{PAGES_PER_CALL} pages a call", columns, rows))
    bench.console.print()


def call_times(load: Load, allocator: PageAllocator, calls: int) -> dict[str, float]:
    """Microseconds of one call, on the clock: whatever else the machine does is in them."""
    allocating: list[float] = []
    releasing: list[float] = []
    with (
        replaced(allocator, "allocate", _clocked(allocator.allocate, allocating)),
        replaced(allocator, "release", _clocked(allocator.release, releasing)),
    ):
        load.run(allocator, calls)
    return {
        f"{name}_p{percent}_us": 1e6 * percentile(seconds, percent)
        for name, seconds in (("allocate", allocating), ("release", releasing))
        for percent in (50, 99)
    }


def _clocked(call: Callable[[Any], Any], seconds: list[float]) -> Callable[[Any], Any]:
    clock = time.perf_counter

    def timed(argument: Any) -> Any:
        began = clock()
        result = call(argument)
        seconds.append(clock() - began)
        return result

    return timed
