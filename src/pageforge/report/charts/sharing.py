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
    case = same(records, "branches", "prompt", "new_tokens")
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
    paged = ran(records, "sharing", "pages_shared", "pages_used", "pages_named")
    yield Figure(
        "pages",
        "Pages that are shared",
        f"The most pages that several sequences shared at any step, the most pages in use, and the "
        f"most entries of all page tables, each of which would be a page if nothing were shared. "
        f"{case}",
        "Which pages they are.",
        [
            Dots(name, Axis("pages"), [_pages(record) for record in group])
            for name, group in grouped(paged, "case").items()
        ],
    )
    copied = ran(paged, "sharing", "pages_copied")
    yield Figure(
        "copied",
        "Pages that are copied",
        f"Pages that one of several holders wrote to, and so had copied, in the whole run. {case}",
        "What DynamicCache copies: all of it, whenever beams change places.",
        [
            Bars(name, Axis("pages copied"), [Bar(r["way"], r["pages_copied"]) for r in group])
            for name, group in grouped(copied, "case").items()
        ],
    )


def _pages(record: Record) -> Row:
    return Row(
        record["way"],
        {
            "shared": record["pages_shared"],
            "in use": record["pages_used"],
            "entries of page tables": record["pages_named"],
        },
    )
