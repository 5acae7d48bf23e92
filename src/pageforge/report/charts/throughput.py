"""Whole workloads: tokens a second of each way to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.charts import arrivals
from pageforge.report.figures import Figure, Record, failures, grouped, ran
from pageforge.report.panels.bars import Bar, Bars

WORKLOAD = ("workload", "requests", "prompt_tokens", "new_tokens")


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Tokens a second, a panel a workload; then what waiting is like."""
    records = ran(results, "throughput", "tokens_per_s")
    yield Figure(
        "tokens",
        "Whole workloads",
        "New tokens a second from token ids to text, all requests there at once; whiskers from "
        "the slowest to the fastest repeat.",
        "The first run of each way, which compiles and captures.",
        [
            Bars(case, Axis("tokens a second"), [_bar(record) for record in group])
            for case, group in grouped(records, *WORKLOAD).items()
        ],
        failures(results, "throughput", "way", "workload"),
    )
    yield from arrivals.figures(results)


def _bar(record: Record) -> Bar:
    low, high = record.get("tokens_per_s_low"), record.get("tokens_per_s_high")
    return Bar(record["way"], record["tokens_per_s"], low, high)
