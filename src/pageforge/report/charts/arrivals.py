"""Requests that come one after the other: how long they wait, at one rate and another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, by_way, failures, grouped, ran, same
from pageforge.report.panels.curves import Curves

RATE = Axis("requests that arrive in a second")

WAITS = {
    "ttft_p50_ms": "first token, P50",
    "ttft_p99_ms": "first token, P99",
    "tpot_p50_ms": "each token after it, P50",
    "tpot_p99_ms": "each token after it, P99",
    "itl_p99_ms": "pause between two tokens, P99",
}

NOT_SHOWN = "Requests over a network; other patterns of arrival than this one."


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Waiting times against the rate; requests that were served well enough."""
    records = ran(results, "arrivals", "rate_per_s")
    yield Figure(
        "arrivals",
        "Requests that arrive one by one",
        f"Milliseconds of the host's clock from a request's arrival to its first token (TTFT), and "
        f"from each token to the next (TPOT), at shares of the rate at which a way answers all "
        f"requests at once. {same(records, 'requests', 'burstiness')}",
        NOT_SHOWN,
        [
            Curves(
                f"{case}: {label}",
                RATE,
                Axis("ms", log=True),
                by_way(group, "rate_per_s", field),
            )
            for case, group in grouped(records, "workload").items()
            for field, label in WAITS.items()
            if ran(group, "arrivals", field)
        ],
        failures(results, "arrivals", "way", "workload"),
    )
    good = ran(records, "arrivals", "goodput_per_s")
    limits = same(good, "ttft_limit_ms", "tpot_limit_ms")
    limits = f" Good: {limits[0].lower()}{limits[1:]}" if limits else ""
    yield Figure(
        "goodput",
        "Requests served in time",
        f"Requests a second that were answered well: each of their tokens in time.{limits}",
        NOT_SHOWN,
        [
            Curves(
                case, RATE, Axis("in time, a second"), by_way(group, "rate_per_s", "goodput_per_s")
            )
            for case, group in grouped(good, "workload").items()
        ],
    )
