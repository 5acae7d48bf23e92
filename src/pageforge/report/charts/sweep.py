"""Page size and pool size: what each costs in memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import (
    REPEATS,
    Figure,
    Record,
    by_way,
    by_workload,
    failures,
    first_run,
    ran,
    same,
    whiskers,
)
from pageforge.report.panels.curves import Curves


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """Over page sizes: memory over that of live tokens, tokens a second, a step, the kernel."""
    yield from _workload(results)
    yield _step(results)
    yield _kernel(results)


def _workload(results: Sequence[Record]) -> Iterator[Figure]:
    records = [_named(r) for r in ran(results, "workload", "page_size", "tokens_per_s")]
    case = " ".join(f"Workload: {case}." for case in by_workload(records) if case)
    yield Figure(
        "memory",
        "Memory over that of the tokens that live",
        f"Bytes of used pages, and bytes mapped, over those of the tokens in them, over all steps "
        f"of a workload in the engine; pools of several sizes. {case}",
        "What a step takes beside K and V.",
        [
            Curves(
                label,
                _page_sizes(records),
                Axis("times the live tokens' bytes"),
                by_way(ran(records, "workload", field), "page_size", field, way="pool"),
                limits={"no waste": 1},
            )
            for field, label in (
                ("pages_over_live", "used pages"),
                ("mapped_over_live", "mapped"),
            )
            if ran(records, "workload", field)
        ],
        failures(results, "workload", "pool", "page_size"),
    )
    yield Figure(
        "throughput",
        "Tokens a second, by page size",
        f"New tokens a second of the same workload{whiskers(records, 'tokens_per_s', REPEATS)}. "
        f"A smaller pool has the same bytes for every page size. {case}",
        first_run(records),
        [
            Curves(
                "",
                _page_sizes(records),
                Axis("tokens a second"),
                by_way(records, "page_size", "tokens_per_s", way="pool", spread=True),
            )
        ]
        if records
        else [],
    )


def _named(record: Record) -> Record:
    """With a pool's size as a legend says it: `1/10 of the pages needed`."""
    pool = str(record.get("pool"))
    return {**record, "pool": f"{pool} of the pages needed"} if "/" in pool else record


def _step(results: Sequence[Record]) -> Figure:
    records = ran(results, "step", "page_size", "p25_ms", "p50_ms", "p75_ms")
    spread = [
        {**record, "p50_ms_low": record["p25_ms"], "p50_ms_high": record["p75_ms"]}
        for record in records
    ]
    return Figure(
        "step",
        "A decode step, by page size",
        f"The model call alone, all page sizes by turns: the median, whiskers to the quartiles. "
        f"{same(records, 'batch', 'context', 'steps')}",
        "Other batch sizes and contexts.",
        [
            Curves(
                "",
                _page_sizes(records),
                Axis("one decode step", "ms"),
                by_way(spread, "page_size", "p50_ms", spread=True),
            )
        ]
        if records
        else [],
        failures(results, "step", "way", "page_size"),
    )


def _kernel(results: Sequence[Record]) -> Figure:
    records = ran(results, "kernel", "page_size", "read_share")
    return Figure(
        "kernel",
        "The decode kernel",
        f"Attention of one layer over K/V that no cache holds, as a share of the rate of a kernel "
        f"that only reads. {same(records, 'heads')}",
        "Prefill.",
        [
            Curves(
                "",
                _page_sizes(records),
                Axis("share of the read ceiling"),
                by_way(records, "page_size", "read_share", way="shape"),
                limits={"read ceiling": 1},
            )
        ]
        if records
        else [],
        failures(results, "kernel", "shape", "page_size"),
    )


def _page_sizes(records: Sequence[Record]) -> Axis:
    sizes = sorted({record["page_size"] for record in records})
    return Axis("tokens a page", log=True, values=sizes)
