"""How long do requests wait that come one after the other, at one rate and another?

Rates are given by load: percent of what a way answers in a second when all requests are there at
once, measured in the same run. The clock is real: requests are handed over when their time has
come, whatever the way is at then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pageforge.bench import workloads
from pageforge.bench.harness import failure
from pageforge.bench.lanes import Race, describe
from pageforge.bench.online import LIMITS, Limits, Served, arrival_times, summary
from pageforge.bench.report import table
from pageforge.bench.serving import WAYS, Server
from pageforge.bench.throughput_context import ThroughputBench

PEERS = {"cuda": ("engine", "generate", "generate_batch"), "cpu": ("engine", "generate")}
"""Who serves `uniform` unless other ways are asked for. Other workloads the engine serves alone:
where lengths differ much, the padding of `generate` takes minutes.
"""

WARMING = 0.75
"""Of its rate, at which an engine on CUDA is warmed up: it meets steps of all sizes, and captures.
"""

SHOWN = (
    "load_percent",
    "rate_per_s",
    "achieved_per_s",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "e2e_p50_ms",
    "e2e_p99_ms",
    "queued_p50_ms",
    "goodput_per_s",
)
COLUMNS = (
    "way",
    "load %",
    "offered /s",
    "served /s",
    "tokens/s",
    "TTFT P50 ms",
    "P99",
    "TPOT P50 ms",
    "P99",
    "ITL P99 ms",
    "E2E P50 ms",
    "P99",
    "queued P50 ms",
    "goodput /s",
)


def arrivals(bench: ThroughputBench) -> None:
    """Every workload, by every way that serves it."""
    limits = LIMITS[bench.device.type]
    bench.console.print(
        f"load: of the rate at which requests are answered that are there all at once; "
        f"burstiness {bench.burstiness:g}; goodput: those with the first token within "
        f"{1e3 * limits.ttft_s:,.0f} ms and the others each {1e3 * limits.tpot_s:,.0f} ms later"
    )
    for workload in bench.arrivals:
        alone = PEERS[bench.device.type] if workload == "uniform" else ("engine",)
        case = describe(workload, bench.jobs(workload, 0)) | {
            "divisor": workloads.lengths(workload, bench.size).divisor
        }
        rows: list[tuple[object, ...]] = []
        for name in bench.ways or alone:
            try:
                for record in _at_every_rate(bench, workload, name, limits):
                    bench.report.add(section="arrivals", **case, way=name, **record)
                    rows.append((name, *(record[key] for key in SHOWN)))
            except Exception as error:  # the others go on
                bench.report.add(section="arrivals", **case, way=name, failure=failure(error))
                rows.append((name, failure(error)))
        title = (
            f"{bench.name}, {workload}, arriving: {case['requests']:,} requests, "
            f"{case['prompt_tokens']:,} prompt tokens, {case['new_tokens']:,} new ones"
        )
        if rows:
            bench.console.print(table(title, COLUMNS, rows))
            bench.console.print()


@torch.no_grad()
def _at_every_rate(
    bench: ThroughputBench, workload: str, name: str, limits: Limits
) -> Iterator[dict[str, Any]]:
    """What a way's run at each rate gave, the slowest first. Raises what the way fails with."""
    race = Race(bench, f"arrivals, {workload}", partial(bench.jobs, workload))
    with contextlib.ExitStack() as stack:
        race.start(name, WAYS[name], stack)
        if name not in race.lanes:  # there was no time
            return
        if bench.repeats:
            race.again(name, run=1)
        lane = race.lanes[name]
        server, offline = lane.server, len(lane.outputs) / lane.median
        if server.engine is not None and bench.device.type == "cuda":
            _serve(bench, server, workload, 2, offline * WARMING)
        for repeat, load in enumerate(bench.loads, 3):
            if bench.budget.allows(f"arrivals, {workload}: {name}, {load}% of its rate"):
                before, rate = _counts(server), offline * load / 100
                served = _serve(bench, server, workload, repeat, rate)
                after = _counts(server)
                yield {
                    "load_percent": load,
                    "burstiness": bench.burstiness,
                    "offline_per_s": offline,
                    "rate_per_s": rate,
                    **summary(served, limits),
                    **{key: after[key] - before[key] for key in after},
                }


def _serve(
    bench: ThroughputBench, server: Server, workload: str, repeat: int, rate: float
) -> list[Served]:
    jobs = bench.jobs(workload, repeat)
    return server.serve_all(jobs, arrival_times(len(jobs), rate, burstiness=bench.burstiness))


def _counts(server: Server) -> dict[str, int]:
    """An engine's counts so far; nothing of others."""
    if server.engine is None:
        return {}
    stats = server.engine.stats()
    return {"captures": stats.num_graphs, "preemptions": stats.num_preemptions}
