"""Decode steps: how long each is, and how many tokens a second `generate` makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, failures, grouped, ran, whiskers
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.dots import Dots, Row

PERCENTILES = {"P50": "p50_ms", "P95": "p95_ms", "P99": "p99_ms"}

STEP = Axis("one decode step", "ms", log=True)

SECTIONS = {
    "steps": ("A decode step, way by way", "cuDNN attention is off."),
    "padded": ("With left-padded rows", "Rows have from no left padding to nearly half a prompt."),
    "cudnn": (
        "Where torch may choose cuDNN's attention",
        "Each new length is planned once, and the way that comes first pays for the others.",
    ),
}


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Percentiles of a step; tokens a second."""
    for section, (title, said) in SECTIONS.items():
        yield _steps(results, section, title, said)
    yield _generate(results)


def _steps(results: Sequence[Record], section: str, title: str, said: str) -> Figure:
    records = ran(results, section, *PERCENTILES.values())
    return Figure(
        section,
        title,
        f"The model call alone, on the host's clock, synchronised before and after; all ways by "
        f"turns in one run. {said}",
        "Sampling, tokenising and the prompt; steps that compile or capture. Weights are random.",
        [
            Dots(case, STEP, [_row(record) for record in group])
            for case, group in grouped(records, "batch", "prompt", "timed_steps").items()
        ],
        failures(results, section, "way", "batch", "prompt"),
    )


def _row(record: Record) -> Row:
    return Row(record["way"], {name: record[field] for name, field in PERCENTILES.items()})


def _generate(results: Sequence[Record]) -> Figure:
    records = ran(results, "generate", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")
    return Figure(
        "generate",
        "model.generate",
        f"New tokens a second of whole greedy calls by turns"
        f"{whiskers(records, 'tokens_per_s', '; whiskers from the slowest to the fastest')}.",
        "The first call of each way, which compiles or captures; answers that end early.",
        [
            Bars(case, Axis("tokens a second"), [_bar(record) for record in group])
            for case, group in grouped(records, "batch", "prompt", "new_tokens").items()
        ],
        failures(results, "generate", "way"),
    )


def _bar(record: Record) -> Bar:
    low, high = record["tokens_per_s_low"], record["tokens_per_s_high"]
    return Bar(record["way"], record["tokens_per_s"], low, high)
