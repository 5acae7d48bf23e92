"""Somebody's own run, as `pageforge.record` saw it, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, ran, same
from pageforge.report.panels.curves import Curve, Curves

SERIES = (
    (
        Axis("bytes", "B", prefixed=True),
        {"bytes_mapped": "mapped", "bytes_in_use": "used pages"},
    ),
    (Axis("pages"), {"pages_used": "used pages", "pages_cached": "pages kept for reuse"}),
    (Axis("sequences"), {"running": "running", "waiting": "waiting"}),
    (Axis("tokens held"), {"tokens": "tokens"}),
)
"""What is counted, and the fields that say so, with their names."""


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Memory, pages, sequences and tokens over the steps."""
    rows = ran(results, "step", "step")
    panels = [
        Curves("", Axis("step"), value, curves, "step")
        for value, fields in SERIES
        if (curves := _curves(rows, fields))
    ]
    source = same(ran(results, "source"), "source", "page_size", "pages_total", "dtype")
    yield Figure(
        "steps",
        "Step by step",
        f"Counts that the host has after each step, and the bytes that the pool has mapped, as the "
        f"driver or the operating system says. {source}",
        "What the model and its activations take; steps between the samples of a long run.",
        panels,
    )


def _curves(rows: Sequence[Record], fields: dict[str, str]) -> list[Curve]:
    """Of those fields that the run has."""
    return [
        Curve(name, [row["step"] for row in found], [row[field] for row in found])
        for field, name in fields.items()
        if (found := ran(rows, "step", field))
    ]
