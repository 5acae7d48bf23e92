"""Memory of growing sequences: the whole curve, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, by_way, failures, grouped, ran, same
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.curves import Curves

STEP = Axis("decode step")
BYTES = {
    "mapped_bytes": "mapped after the step",
    "peak_bytes": "at the peak of the step",
}


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Bytes at each step; sequences in a gigabyte; sequences in a pool that is filled."""
    case = same(ran(results, "setting"), "sequences", "prompt_tokens", "page_tokens")
    yield Figure(
        "growth",
        "Memory behind the cache",
        f"Bytes over what was taken before the cache was made, as the driver (CUDA) or the "
        f"operating system (CPU) reports them; each cache alone. {case}",
        "The model and its activations: K/V go through each cache's own update without them.",
        [
            Curves(
                "",
                STEP,
                Axis(label, "B", prefixed=True),
                by_way(ran(results, "growth", "step", field), "step", field),
                "step",
            )
            for field, label in BYTES.items()
            if ran(results, "growth", "step", field)
        ],
        failures(results, "growth", "way"),
    )
    density = by_way(ran(results, "growth", "step", "sequences_per_gb"), "step", "sequences_per_gb")
    yield Figure(
        "density",
        "Sequences in a gigabyte",
        f"Sequences over the bytes measured above. {case}",
        "Rows of unlike lengths, where a padded cache pays for the longest: here all grow alike.",
        [Curves("", STEP, Axis("sequences per GB", log=True), density)] if density else [],
    )
    filled = ran(results, "most-sequences", "sequences", "tokens")
    yield Figure(
        "most-sequences",
        "How many sequences fit",
        "A pool filled with sequences until it has no page left, and the other caches grown until "
        "they take as many bytes.",
        "Sequences that share a prompt.",
        [
            Bars(case, Axis("sequences"), [Bar(r["way"], r["sequences"]) for r in records])
            for case, records in grouped(filled, "tokens").items()
        ],
        failures(results, "most-sequences", "way", "tokens"),
    )
