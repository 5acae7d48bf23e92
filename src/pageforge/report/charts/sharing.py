"""Sequences with a common beginning: bytes, and the pages that they share or copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, by_way, failures, grouped, ran, same
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.curves import Curves
from pageforge.report.panels.dots import Dots, Row

BYTES = Axis("bytes behind the cache", "B", prefixed=True)

HELD = "After each forward: what the pool has mapped, or the storages of the cache's tensors."
NOT_SHOWN = "The model's own memory, and what a step takes beside the cache."


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """The most bytes, the course of the bytes, pages against entries of page tables."""
    records = ran(results, "sharing", "cache_peak_bytes")
    case = same(records, "model", "branches", "prompt", "new_tokens")
    yield Figure(
        "peak",
        "Memory at the peak",
        f"{HELD} The most of it. {case}",
        NOT_SHOWN,
        [
            Bars(name, BYTES, [Bar(r["way"], r["cache_peak_bytes"]) for r in group])
            for name, group in grouped(records, "case").items()
        ],
        failures(results, "sharing", "way", "case"),
    )
    steps = ran(results, "steps", "step", "cache_bytes")
    yield Figure(
        "course",
        "Memory as the sequences grow",
        f"{HELD} {case}",
        NOT_SHOWN,
        [
            Curves(name, Axis("forward"), BYTES, by_way(group, "step", "cache_bytes"), "step")
            for name, group in grouped(steps, "case").items()
        ],
    )
    paged = ran(records, "sharing", "pages_used", "pages_named", "pages_copied")
    yield Figure(
        "pages",
        "Pages that are shared and copied",
        f"The most pages in use at any step, the most entries of all page tables, and the pages "
        f"copied because one of several holders wrote. {case}",
        "Which pages they are.",
        [
            Dots(name, Axis("pages"), [_pages(record) for record in group])
            for name, group in grouped(paged, "case").items()
        ],
    )


def _pages(record: Record) -> Row:
    return Row(
        record["way"],
        {
            "pages": record["pages_used"],
            "entries of page tables": record["pages_named"],
            "copied": record["pages_copied"],
        },
    )
