"""How many tokens a second does the engine make, beside transformers' own ways?

Whole workloads, on the host's clock, text included. What comes first (capturing, compiling) is
shown apart; repeats have prompts that nobody has seen, and the prefix cache is off where it is not
the question.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from pageforge.bench import workloads
from pageforge.bench.arrivals import arrivals
from pageforge.bench.ceilings import matmul_ceiling, read_ceiling
from pageforge.bench.context import dtype_name
from pageforge.bench.engine_probe import (
    costs_of,
    floor_seconds,
    host_work,
    steady_tokens,
)
from pageforge.bench.harness import percentile, synchronize
from pageforge.bench.lanes import Lane, Race, describe
from pageforge.bench.models import make_model, make_tokenizer, twin
from pageforge.bench.report import mb, table
from pageforge.bench.run import Run, run_sections
from pageforge.bench.serving import (
    BASE,
    WAYS,
    Way,
    engine,
    padded,
    params_of,
)
from pageforge.bench.settings import cudnn_attention
from pageforge.bench.throughput_context import (
    ARRIVALS,
    HOST_STEPS,
    LOADS,
    MOST_REPEATS,
    RUNNING,
    ThroughputBench,
)
from pageforge.bench.workloads import Job, Size
from pageforge.engine.engine import Engine
from pageforge.geometry import pages_for

PAGE_SIZE = 16
"""The engine's default."""

PEERS = {
    "cuda": ("engine", "generate", "generate_batch"),
    "cpu": ("engine", "generate", "one by one"),
}
"""What is compared unless other ways are asked for."""

SQUEEZE = 10
"""What is needed, over what a squeezed pool has."""

LOOKED_AT = 16
"""Outputs that differ whose cause is looked for."""


@dataclass(frozen=True)
class Scale:
    """How much is measured. `shrink` and `most`: see `Size`; the rest as in ThroughputBench."""

    shrink: int = 1
    most: int = sys.maxsize
    repeats: int = MOST_REPEATS
    running: Sequence[int] = RUNNING
    host_steps: int = HOST_STEPS
    arrivals: Sequence[str] = ARRIVALS
    loads: Sequence[int] = LOADS


QUICK = Scale(8, 64, 1, (8,), 16, ("sharegpt-4", "uniform"), (50, 90))
CPU = Scale(8, 16, 1, (8,), 16, ("sharegpt-4", "azure-chat", "uniform"), (50, 90, 110))
CPU_QUICK = Scale(32, 4, 0, (4,), 8, ("azure-chat",), (50, 90))
"""A real model makes some 100 tokens a second on two cores, and nothing is captured there."""


def run_all(given: Run) -> None:
    """Every section, at sizes for the device and the time."""
    run(bench_of(given))


def bench_of(
    given: Run, *, dtype: torch.dtype | None = None, requests: int | None = None
) -> ThroughputBench:
    """What the sections are given in a run, as large as its device allows."""
    name = given.model or ("tiny" if given.on_cpu else "gpt2")
    model = make_model(name, given.device, dtype)
    if given.on_cpu:
        scale = CPU_QUICK if given.quick else CPU
    else:
        scale = QUICK if given.quick or name == "tiny" else Scale()
    return ThroughputBench(
        model,
        name,
        make_tokenizer(int(model.config.vocab_size)),
        given.report,
        given.console,
        given.budget,
        Size(int(model.config.max_position_embeddings), scale.shrink, scale.most, requests),
        repeats=scale.repeats,
        running=scale.running,
        host_steps=scale.host_steps,
        arrivals=scale.arrivals,
        loads=scale.loads,
    )


def run(bench: ThroughputBench, only: Sequence[str] = ()) -> None:
    """The sections named, or all, in order. cuDNN attention is off, for `generate`'s sake."""
    bench.read = read_ceiling(bench.device)
    bench.flops = matmul_ceiling(bench.device, bench.model.dtype)
    bench.report.add(
        section="ceilings",
        model=bench.name,
        read_bytes_per_s=bench.read,
        matmul_flops_per_s=bench.flops,
    )
    bench.console.print(
        f"read ceiling {bench.read / 1e9:,.0f} GB/s, matrix products {bench.flops / 1e12:,.3g} "
        f"TFLOP/s in {dtype_name(bench.model.dtype)}; text by a made-up tokenizer\n"
    )
    with cudnn_attention(False), quiet():
        run_sections(bench, SECTIONS, only)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warning of each preemption: they are counted."""
    log = logging.getLogger("pageforge.engine")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


# --- construct to first token ---------------------------------------------------------------


def first_token(bench: ThroughputBench) -> None:
    """Seconds from making an engine to its first token: as this process begins, and again."""
    job = Job(bench.jobs("uniform", 0)[0].prompt, 1)
    rows: list[tuple[object, ...]] = []
    for when in ("first in this process", "again"):
        model, began = twin(bench.model), time.perf_counter()
        with Engine(model, bench.tokenizer) as opened:
            made = time.perf_counter() - began
            opened.generate([job.prompt], params_of(job))
            synchronize(bench.device)
            taken = time.perf_counter() - began
        bench.report.add(section="first-token", when=when, made_s=made, first_token_s=taken)
        rows.append((when, made, taken))
    columns = ("seconds", "engine made", "first token")
    bench.console.print(table(f"{bench.name}: construct to first token", columns, rows))
    bench.console.print()


# --- ways by turns --------------------------------------------------------------------------


def compare(bench: ThroughputBench, workload: str) -> None:
    """The chosen ways over one workload; the engines beside their floor.

    Without a choice peers run `uniform` only: with mixed lengths their padding takes minutes.
    """
    race = Race(bench, workload, partial(bench.jobs, workload))
    jobs = bench.jobs(workload, 0)
    case = describe(workload, jobs)
    chosen = bench.ways or (PEERS[bench.device.type] if workload == "uniform" else ("engine",))
    ways = {name: way for name, way in WAYS.items() if name in chosen}
    rows: list[tuple[object, ...]] = []
    with contextlib.ExitStack() as stack:
        race.run(ways, stack)
        found = {name: lane.rates(jobs) for name, lane in race.lanes.items()}
        base = found[BASE]["tokens_per_s"] if BASE in found else None
        for name, of_way in found.items():
            engine_of = race.lanes[name].server.engine
            of_way["over_generate"] = None if base is None else of_way["tokens_per_s"] / base
            of_way["floor_s"] = of_way["floor_share"] = None
            if engine_of is not None:
                costs = costs_of(bench.model, engine_of._pool.geometry)
                floor = floor_seconds(race.lanes[name].log, costs, bench.read, bench.flops)
                of_way["floor_s"] = floor
                of_way["floor_share"] = floor / race.lanes[name].median
            bench.report.add(section="throughput", **case, way=name, **of_way)
            rows.append(
                (
                    name,
                    of_way["tokens_per_s"],
                    of_way["tokens_per_s_low"],
                    of_way["tokens_per_s_high"],
                    of_way["over_generate"],
                    of_way["first_run_s"],
                    of_way["floor_share"],
                    mb(of_way.get("mapped_peak_bytes")),
                    mb(of_way["peak_bytes"]),
                )
            )
    for name, reason in race.failures.items():
        bench.report.add(section="throughput", **case, way=name, failure=reason)
        rows.append((name, reason))
    if rows:
        columns = ("way", "tokens/s", "low", "high", "/generate", "first run s", "floor share")
        bench.console.print(table(_title(bench, case), (*columns, "pool MB", "allocator MB"), rows))
        bench.console.print()


def _title(bench: ThroughputBench, case: Mapping[str, Any]) -> str:
    return (
        f"{bench.name}, {case['workload']}: {case['requests']:,} requests, "
        f"{case['prompt_tokens']:,} prompt tokens, {case['new_tokens']:,} new ones"
    )


# --- what the engine shares -----------------------------------------------------------------


def _alone(
    bench: ThroughputBench, workload: str, stack: contextlib.ExitStack, **options: Any
) -> Lane | None:
    """The engine's runs of a workload; None where there was no time. Raises what it fails with."""
    race = Race(bench, workload, partial(bench.jobs, workload))
    race.run({"engine": Way(partial(engine, **options), repeats=WAYS["engine"].repeats)}, stack)
    if race.failures:
        raise RuntimeError(race.failures["engine"])
    return race.lanes.get("engine")


def shared_prefix(bench: ThroughputBench) -> None:
    """Tokens computed where all prompts begin alike, over those with the beginning once."""
    jobs = bench.jobs("shared-prefix", 0)
    shared = _common(jobs)
    with contextlib.ExitStack() as stack:
        lane = _alone(bench, "shared-prefix", stack, prefix_cache=True)
        if lane is None:
            return
        found = lane.rates(jobs)
    computed = sum(int(counts.sum()) for counts in lane.log.counts)
    # The last new token's own K/V are not needed.
    once = shared + sum(len(job.prompt) - shared + job.new_tokens - 1 for job in jobs)
    case = describe("shared-prefix", jobs)
    found |= {
        "shared_tokens": shared,
        "computed_tokens": computed,
        "once_tokens": once,
        "computed_over_once": computed / once,
    }
    bench.report.add(section="shared-prefix", **case, way="engine", **found)
    columns = ("way", "tokens/s", "shared", "computed", "if once", "computed/once", "pool MB")
    row = (
        "engine",
        found["tokens_per_s"],
        shared,
        computed,
        once,
        f"{computed / once:.4f}",
        mb(found["mapped_peak_bytes"]),
    )
    bench.console.print(table(_title(bench, case), columns, [row]))
    bench.console.print()


def _common(jobs: list[Job]) -> int:
    """Tokens that all prompts begin with."""
    shortest = min(len(job.prompt) for job in jobs)
    first = jobs[0].prompt
    return next(
        (at for at in range(shortest) if any(job.prompt[at] != first[at] for job in jobs)), shortest
    )


def rollout(bench: ThroughputBench) -> None:
    """Pages at the peak of several samples a prompt, over those that prompts stored once take."""
    jobs = bench.jobs("rollout", 0)
    everyone = sum(job.n for job in jobs)
    with contextlib.ExitStack() as stack:
        lane = _alone(bench, "rollout", stack, temperature=1, max_running=everyone)
        if lane is None:
            return
        found = lane.rates(jobs)
    # A completion computes its prompt's last token anew, and its own last token not at all.
    apart = sum(job.n * pages_for(job.num_tokens - 1, PAGE_SIZE) for job in jobs)
    saved = sum((job.n - 1) * ((len(job.prompt) - 1) // PAGE_SIZE) for job in jobs)
    groups = len(lane.server.engine._pool.geometry.groups) if lane.server.engine else 1
    found |= {
        "once_pages": groups * (apart - saved),
        "apart_pages": groups * apart,
        "peak_over_once": lane.log.pages_peak / (groups * (apart - saved)),
    }
    case = describe("rollout", jobs)
    bench.report.add(section="rollout", **case, way="engine", **found)
    columns = ("way", "tokens/s", "pages at peak", "prompts once", "each its own", "peak/once")
    row = (
        "engine",
        found["tokens_per_s"],
        found["pages_peak"],
        found["once_pages"],
        found["apart_pages"],
        f"{found['peak_over_once']:.4f}",
    )
    bench.console.print(table(_title(bench, case), columns, [row]))
    bench.console.print()


# --- too few pages --------------------------------------------------------------------------


def squeezed(bench: ThroughputBench) -> None:
    """The uniform workload in a tenth of the pages, beside as many sequences in ample ones."""
    race = Race(bench, "squeezed", partial(bench.jobs, "uniform"))
    jobs = race.jobs_of(0)
    pages = [pages_for(job.num_tokens - 1, PAGE_SIZE) for job in jobs]
    few = max(sum(pages) // SQUEEZE, *pages)
    case = describe("squeezed", jobs) | {"pages": few, "needed_pages": sum(pages)}
    repeats = WAYS["engine"].repeats
    with contextlib.ExitStack() as stack:
        first = {
            "ample": Way(engine, repeats=1),
            "squeezed": Way(partial(engine, max_pages=few), repeats),
        }
        race.run(first, stack)
        lanes = race.lanes
        if "squeezed" in lanes:
            running = max(1, round(lanes["squeezed"].log.mean_running))
            race.run({"ample, as many": Way(partial(engine, max_running=running), repeats)}, stack)
        found = {name: lane.rates(jobs) for name, lane in lanes.items()}
        base = found.get("ample, as many")
        rows: list[tuple[object, ...]] = []
        for name, lane in lanes.items():
            of_way = found[name]
            if "ample" in lanes:
                of_way |= sameness(bench.model, jobs, lane.outputs, lanes["ample"].outputs)
            of_way["over_as_many"] = (
                None if base is None else of_way["tokens_per_s"] / base["tokens_per_s"]
            )
            bench.report.add(section="squeezed", **case, way=name, **of_way)
            keys = ("tokens_per_s", "over_as_many", "mean_running", "preemptions", "pages_peak")
            rows.append((name, *(of_way.get(key) for key in (*keys, "same", "largest_gap"))))
        for name, reason in race.failures.items():
            bench.report.add(section="squeezed", **case, way=name, failure=reason)
            rows.append((name, reason))
    if not rows:  # there was no time
        return
    columns = ("way", "tokens/s", "/as many", "running", "preemptions", "pages", "same outputs")
    title = f"{_title(bench, case)}; {few:,} of {sum(pages):,} pages"
    bench.console.print(table(title, (*columns, "largest gap"), rows))
    bench.console.print()


@torch.no_grad()
def sameness(
    model: PreTrainedModel, jobs: list[Job], outputs: list[list[int]], others: list[list[int]]
) -> dict[str, Any]:
    """How many outputs are the `others`, and how far apart tokens were where they are not.

    `largest_gap`: between the two best logits of the model alone, after what both agree on; of the
    first outputs that differ. Near nothing: either token was as right as the other.
    """
    gaps = []
    differing = [at for at in range(len(jobs)) if outputs[at] != others[at]]
    for at in differing[:LOOKED_AT]:
        pairs = zip(outputs[at], others[at], strict=True)
        agreed = next(place for place, (one, other) in enumerate(pairs) if one != other)
        tokens, _ = padded([jobs[at].prompt + others[at][:agreed]], model.device)
        best, second = model(tokens, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
        gaps.append(best - second)
    return {
        "same": len(jobs) - len(differing),
        "differing": len(differing),
        "largest_gap": max(gaps, default=None),
    }


# --- host work ------------------------------------------------------------------------------


def host(bench: ThroughputBench) -> None:
    """CPU time of the host, and how idle the device is, in steps of decoding."""
    rows: list[tuple[object, ...]] = []
    for running in bench.running:
        if not bench.budget.allows(f"host, {running} running"):
            continue
        new = steady_tokens(bench.host_steps)
        jobs = workloads.steady(running, new, bench.size, vocab_size=bench.vocab_size)
        model = twin(bench.model)
        with Engine(model, bench.tokenizer, max_running=running, prefix_cache=False) as opened:
            work = host_work(opened, jobs, bench.host_steps)
        found: dict[str, Any] = {"text_us_per_request": _text_us(bench, jobs)}
        for name, values in (
            ("plan", work.plan),
            ("next_plan", work.next_plan),
            ("host", work.host),
        ):
            found[f"{name}_ms"] = statistics.fmean(values)
            found[f"{name}_p50_ms"] = percentile(values, 50)
        found |= {
            "wall_ms": work.wall,
            "busy_ms": work.busy,
            "idle": None if work.busy is None else 1 - work.busy / work.wall,
            "kernels": work.kernels,
        }
        bench.report.add(section="host", running=running, steps=bench.host_steps, **found)
        keys = ("plan_ms", "next_plan_ms", "host_ms", "wall_ms", "busy_ms", "idle")
        rows.append((running, *(found[key] for key in (*keys, "text_us_per_request"))))
    columns = ("running", "plan ms", "with pages", "all host", "wall", "device busy", "idle share")
    title = f"{bench.name}: a step of decoding, means of {bench.host_steps}; host: CPU time"
    bench.console.print(table(title, (*columns, "text us/request"), rows))
    bench.console.print()


def _text_us(bench: ThroughputBench, jobs: list[Job]) -> float:
    """Microseconds that one answer takes to become text."""
    began = time.thread_time()
    for job in jobs:
        bench.tokenizer.decode(
            job.prompt[: job.new_tokens],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
    return 1e6 * (time.thread_time() - began) / len(jobs)


SECTIONS: dict[str, Callable[[ThroughputBench], None]] = {
    "first-token": first_token,
    "uniform": partial(compare, workload="uniform"),
    "sharegpt": partial(compare, workload="sharegpt"),
    "shared-prefix": shared_prefix,
    "rollout": rollout,
    "squeezed": squeezed,
    "host": host,
    "arrivals": arrivals,
}
