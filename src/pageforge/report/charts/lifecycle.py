"""Two batches come and go: the pool's bytes and pages over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, ran, same
from pageforge.report.figures import failures as failed
from pageforge.report.panels.curves import Curve, Curves

SERIES = (
    (
        Axis("bytes", "B", prefixed=True),
        {"mapped_bytes": "mapped", "pages_bytes": "used pages"},
    ),
    (Axis("how full the used pages are"), {"utilisation": "utilisation"}),
    (Axis("sequences"), {"sequences": "sequences"}),
)
"""What is counted, and the fields that say so, with their names."""


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Bytes, utilisation and sequences, one batch after the other."""
    moments = ran(results, "timeline", "batch", "step")
    reused = ran(results, "reuse", "pages_reused", "pages_second")
    told = "".join(
        f" {r['pages_reused']:,} of the second batch's {r['pages_second']:,} pages had been the "
        f"first's."
        for r in reused
    )
    case = same(ran(results, "setting"), "sequences", "prompt_tokens", "pages_total")
    yield Figure(
        "timeline",
        "Two batches, one after the other",
        f"What the pool has mapped, as the driver (CUDA) or the operating system (CPU) says, and "
        f"its used pages' own bytes, after every step.{told} {case}",
        "The model: K/V go through the caches' own update without it.",
        [
            Curves("", Axis("step of the run"), value, _curves(moments, fields), "step")
            for value, fields in SERIES
            if moments
        ],
        [
            reason
            for part in ("lifecycle", "reuse", "afterwards")
            for reason in failed(results, part, "when")
        ],
    )


def _curves(moments: Sequence[Record], fields: dict[str, str]) -> list[Curve]:
    """The batches behind each other, a step of the run each record."""
    labels = [f"batch {moment['batch']}, step {moment['step']}" for moment in moments]
    return [
        Curve(
            name,
            range(len(moments)),
            [moment.get(field) for moment in moments],
            labels=labels,
        )
        for field, name in fields.items()
    ]
