"""`pageforge pool stress`: does the allocator lose a page, and how fast is it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pageforge.cli import options
from pageforge.cli.output import facts, print_json, progress, stdout
from pageforge.memory import PageAllocator, PageTable

PAGES_PER_CALL = 8
CALLS = 20_000
ROUNDS = 5
"""Of which the median counts."""

SMALL_POOL, LARGE_POOL, CACHED = 512, 1_000_000, 100_000
PAGE_SIZE = 16


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            "pageforge pool stress", "pageforge pool stress --cycles 5000 --no-speed"
        )
    )(stress)


def stress(
    cycles: Annotated[
        int,
        options.option(
            "--cycles", help="Times that all sequences come and go.", min=1, panel=options.SEQUENCES
        ),
    ] = 500,
    sequences: Annotated[
        int,
        options.option(
            "--sequences", "-s", help="Sequences at once.", min=1, panel=options.SEQUENCES
        ),
    ] = 16,
    pages: Annotated[
        int,
        options.option("--pages", help="Pages of each sequence.", min=1, panel=options.SEQUENCES),
    ] = 8,
    no_speed: Annotated[
        bool,
        options.flag(
            "--no-speed", help="Do not measure the allocator alone.", panel=options.OUTPUT
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Put the real allocator through cycles of sequences that grow and end, and count.

    Every cycle is recounted from the live page tables. Exit code 1 if a page leaked or a count was
    wrong. The speeds are per second of CPU time, of one core.
    """
    found = cycle(cycles, sequences, pages)
    if not no_speed:
        found["speed"] = measure()
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["leaks"] or found["errors"]:
        raise typer.Exit(1)


def cycle(cycles: int, num_sequences: int, num_pages: int) -> dict[str, Any]:
    """Leaks and errors over all cycles: through page tables, as sequences do it."""
    # Room for half as many again: pages of ended sequences are handed out in another order.
    allocator = PageAllocator(num_sequences * num_pages * 3 // 2)
    leaks, errors, first = 0, 0, ""
    for number in progress(range(cycles), cycles, "cycles"):
        tables = [PageTable([allocator], PAGE_SIZE) for _ in range(num_sequences)]
        try:
            _grow(tables, num_pages, number)
            allocator.check_invariants([table.pages() for table in tables])
            if allocator.num_used != num_sequences * num_pages:
                raise AssertionError(f"{allocator.num_used} pages used")
            for table in tables[number % 2 :] + tables[: number % 2]:
                table.release()
        except Exception as error:  # whatever goes wrong is what we are looking for
            errors += 1
            first = first or f"cycle {number + 1}: {error}"
        leaks += allocator.num_used
    return {
        "cycles": cycles,
        "sequences": num_sequences,
        "pages_each": num_pages,
        "pages_allocated": cycles * num_sequences * num_pages,
        "leaks": leaks,
        "errors": errors,
        "first_error": first or None,
    }


def _grow(tables: list[PageTable], num_pages: int, number: int) -> None:
    """A prompt each, of another length in every cycle, then tokens until all pages are full."""
    total = num_pages * PAGE_SIZE
    for index, table in enumerate(tables):
        table.append(min(total, 1 + (7 * number + 13 * index) % total))
    while any(table.length < total for table in tables):
        for table in tables:
            table.append(min(5, total - table.length))


def measure() -> dict[str, Any]:
    """Pages a second of CPU time."""
    jobs: list[tuple[str, Callable[[], float]]] = [
        (f"pool of {SMALL_POOL:,}", lambda: _turnover(SMALL_POOL)),
        (f"pool of {LARGE_POOL:,}", lambda: _turnover(LARGE_POOL)),
        (f"evicting from {CACHED:,} cached", _eviction),
    ]
    rounds = [job for _ in range(ROUNDS) for job in jobs]
    speeds: dict[str, list[float]] = {name: [] for name, _ in jobs}
    for name, job in progress(rounds, len(rounds), "speed"):
        speeds[name].append(job())
    return {name: statistics.median(values) for name, values in speeds.items()}


def _turnover(num_pages: int) -> float:
    """One allocate and one release a call."""
    allocator = PageAllocator(num_pages)
    start = time.process_time()
    for _ in range(CALLS):
        allocator.release(allocator.allocate(PAGES_PER_CALL))
    return CALLS * PAGES_PER_CALL / (time.process_time() - start)


def _eviction() -> float:
    """Every page that is handed out has to be evicted first."""
    allocator = PageAllocator(CACHED)
    pages = allocator.allocate(CACHED)
    for page in pages:
        allocator.publish(page)
    allocator.release(pages)
    start = time.process_time()
    for _ in range(CACHED // PAGES_PER_CALL):
        allocator.allocate(PAGES_PER_CALL)
    return CACHED / (time.process_time() - start)


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            "cycles",
            f"{found['cycles']:,}, each {found['sequences']} sequences of {found['pages_each']} "
            f"pages: {found['pages_allocated']:,} pages",
        ),
        ("leaks", f"{found['leaks']:,}"),
        ("errors", f"{found['errors']:,}"),
    ]
    if found["first_error"]:
        rows.append(("the first", found["first_error"]))
    rows += [
        (name, f"{speed / 1e6:.1f} M pages/s") for name, speed in found.get("speed", {}).items()
    ]
    stdout().print(facts(rows))
