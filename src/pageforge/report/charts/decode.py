"""Whole decode steps: how long, and how many tokens a second in `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, failures, grouped, ran
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.dots import Dots, Row

PERCENTILES = {"P50": "p50_ms", "P90": "p90_ms", "P99": "p99_ms"}


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Percentiles of a step; tokens a second."""
    steps = ran(results, "step", *PERCENTILES.values())
    yield Figure(
        "percentiles",
        "A decode step",
        "The model call alone, on the host's clock, synchronised before and after; all ways by "
        "turns in one run.",
        "Sampling, tokenising and the prompt. Weights are random, shapes real.",
        [
            Dots(
                case, Axis("one decode step", "ms", log=True), [_row(record) for record in records]
            )
            for case, records in grouped(steps, "batch", "prompt", "cudnn").items()
        ],
        failures(results, "step", "way", "batch", "prompt"),
    )
    generated = ran(results, "generate", "tokens_per_s")
    yield Figure(
        "generate",
        "model.generate",
        "New tokens a second of a whole greedy call; the first call is not counted.",
        "Answers that end early: each row makes all its tokens.",
        [
            Bars(case, Axis("tokens a second"), [Bar(r["way"], r["tokens_per_s"]) for r in records])
            for case, records in grouped(generated, "batch", "prompt", "new_tokens").items()
        ],
        failures(results, "generate", "way"),
    )


def _row(record: Record) -> Row:
    return Row(record["way"], {name: record[field] for name, field in PERCENTILES.items()})
