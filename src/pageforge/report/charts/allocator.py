"""The allocator alone: how fast, in pools of any size, and how long its slowest calls take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, by_way, failures, ran, same
from pageforge.report.panels.curves import Curves

POOL = Axis("pages in the pool", log=True)

CALLS = {
    "allocate_p99_us": "P99 of a call of allocate",
    "release_p99_us": "P99 of a call of release",
}


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Pages a second, and the slowest hundredth of the calls, over the size of the pool."""
    records = ran(results, "speed", "pages_total", "pages_per_s")
    case = same(records, "pages_per_call")
    yield Figure(
        "speed",
        "Pages a second",
        f"Pages handed out and given back in a second of a processor: from an empty pool, in "
        f"bursts from one whose free pages are scattered, and from one that has to evict each "
        f"page; the median, whiskers to the quartiles.{_stress(results)} {case}",
        "Memory: there is none behind these pages. Mapping it is in the figures of vram.",
        [
            Curves(
                "",
                POOL,
                Axis("pages a second", prefixed=True),
                by_way(records, "pages_total", "pages_per_s", way="load", spread=True),
            )
        ]
        if records
        else [],
        failures(results, "stress"),
    )
    yield Figure(
        "calls",
        "The slowest calls",
        f"Microseconds on the clock that one call in a hundred exceeds. {case}",
        "What is the allocator's and what the machine's: whatever else it does is in them.",
        [
            Curves(
                label,
                POOL,
                Axis("one call", "µs"),
                by_way(ran(records, "speed", field), "pages_total", field, way="load"),
            )
            for field, label in CALLS.items()
            if ran(records, "speed", field)
        ],
    )


def _stress(results: Sequence[Record]) -> str:
    """What the stress came to."""
    return "".join(
        f" In {r['cycles']:,} cycles of a stress {r['pages_claimed']:,} pages were claimed, "
        f"{r['pages_returned']:,} returned, {r['leaks']:,} lost."
        for r in ran(results, "stress", "cycles", "pages_claimed", "pages_returned", "leaks")
    )
