"""Whole workloads: tokens a second of each way to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.charts import arrivals
from pageforge.report.figures import (
    REPEATS,
    Figure,
    Record,
    by_workload,
    failures,
    first_run,
    ran,
    whiskers,
)
from pageforge.report.panels.bars import Bar, Bars


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Tokens a second, a panel a workload; then what waiting is like."""
    records = ran(results, "throughput", "tokens_per_s")
    yield Figure(
        "tokens",
        "Whole workloads",
        f"New tokens a second from token ids to text, all requests there at once"
        f"{whiskers(records, 'tokens_per_s', REPEATS)}.",
        first_run(records),
        [
            Bars(case, Axis("tokens a second"), [_bar(record) for record in group])
            for case, group in by_workload(records).items()
        ],
        failures(results, "throughput", "way", "workload"),
    )
    yield from arrivals.figures(results)


def _bar(record: Record) -> Bar:
    low, high = record.get("tokens_per_s_low"), record.get("tokens_per_s_high")
    return Bar(record["way"], record["tokens_per_s"], low, high)
