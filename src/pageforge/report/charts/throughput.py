"""Whole workloads: tokens a second of each way to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.charts import arrivals
from pageforge.report.figures import (
    REPEATS,
    Figure,
    Record,
    described,
    failures,
    first_run,
    grouped,
    ran,
    whiskers,
)
from pageforge.report.panels.bars import Bar, Bars

REQUESTS, TOKENS = ("workload", "requests"), ("prompt_tokens", "new_tokens")


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
            Bars(_case(group[0]), Axis("tokens a second"), [_bar(record) for record in group])
            for group in grouped(records, *REQUESTS, *TOKENS).values()
        ],
        failures(results, "throughput", "way", "workload"),
    )
    yield from arrivals.figures(results)


def _case(record: Record) -> str:
    """`uniform, 4 requests, in all 23 prompt tokens, 16 new tokens`."""
    requests, tokens = (described(record, *names) for names in (REQUESTS, TOKENS))
    if tokens:
        tokens[0] = f"in all {tokens[0]}"
    return ", ".join([*requests, *tokens])


def _bar(record: Record) -> Bar:
    low, high = record.get("tokens_per_s_low"), record.get("tokens_per_s_high")
    return Bar(record["way"], record["tokens_per_s"], low, high)
