"""Which page size, and how large a pool? Memory, a step's time and throughput over both.

The same workload and the same decode step for every page size, all of them by turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.bench import caches
from pageforge.bench.attention import ours
from pageforge.bench.caches import Setting, Start
from pageforge.bench.ceilings import read_ceiling
from pageforge.bench.engine_probe import StepLog
from pageforge.bench.harness import Budget, Candidate, failure, measure, percentile, quartiles
from pageforge.bench.lanes import Race
from pageforge.bench.latency_context import LatencyBench
from pageforge.bench.models import make_model, make_tokenizer
from pageforge.bench.problems import SHAPES, Heads, PagedKV, Problem
from pageforge.bench.report import Report, mb, table
from pageforge.bench.run import Run, run_sections
from pageforge.bench.serving import Way as ServingWay
from pageforge.bench.serving import engine
from pageforge.bench.settings import cudnn_attention
from pageforge.bench.steps import WARMUP, race, times
from pageforge.bench.throughput import quiet
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Job, Size, new_tokens
from pageforge.geometry import PAGE_SIZES, pages_for, total_bytes_per_page
from pageforge.probe import geometry_of

WORKLOAD = "sharegpt"

POOLS = {"ample": None, "1/2": 2, "1/10": 10}
"""What the workload needs, over what pools have; None is no limit."""

STEP_WAYS = {
    "cpu": {"pageforge": caches.pageforge},
    "cuda": {"pageforge": caches.pageforge, "fast": caches.fast},
}

KERNEL_SHAPES = ("1x8k", "32x512", "32x4k")
KERNEL_REPEATS = 5

TINY = "tiny"
QUICK_PAGE_SIZES = (8, 16, 64, 256)


@dataclass
class SweepBench:
    """What is swept over `page_sizes`: a decode step, and a workload in pools of several sizes.

    `size`: of the workload, which the engine serves `repeats` times beside the first. A step has
    `batch` rows, after `context` tokens.
    """

    model: PreTrainedModel
    name: str
    tokenizer: PreTrainedTokenizerBase
    report: Report
    console: Console
    budget: Budget
    size: Size
    page_sizes: Sequence[int] = PAGE_SIZES
    batch: int = 32
    context: int = 448
    steps: int = 200
    repeats: int = 3

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device


def run_all(run_of: Run) -> None:
    """Everything, at sizes for the device and the time."""
    run(bench_of(run_of))


def bench_of(run_of: Run) -> SweepBench:
    """What is swept in a run; on the CPU few requests, an eighth as long."""
    on_cpu, quick = run_of.on_cpu, run_of.quick
    default = "gpt2" if not on_cpu else TINY if quick else "smollm2"
    name = run_of.model or default
    model = make_model(name, run_of.device)
    positions = int(model.config.max_position_embeddings)
    bench = SweepBench(
        model,
        name,
        make_tokenizer(int(model.config.vocab_size)),
        run_of.report,
        run_of.console,
        run_of.budget,
        Size(positions),
    )
    if on_cpu:
        bench.size = Size(positions, shrink=8, requests=6)
        bench.batch, bench.context, bench.steps, bench.repeats = 4, 192, 42, 1
    if quick:
        bench.page_sizes = QUICK_PAGE_SIZES
    if quick or name == TINY:
        bench.size = Size(positions, shrink=16, requests=12)
        bench.batch, bench.context, bench.steps, bench.repeats = 4, 64, 21, 1
    return bench


@torch.no_grad()
def run(bench: SweepBench, only: Collection[str] = ()) -> None:
    """The parts named, or all that the device can do, in order."""
    every = ON_CPU if bench.device.type == "cpu" else tuple(PARTS)
    with cudnn_attention(False), quiet():
        run_sections(bench, PARTS, only or every)


# --- a decode step --------------------------------------------------------------------------


def step(bench: SweepBench) -> None:
    """Milliseconds of a whole step: eager, and on CUDA as a graph."""
    latency = LatencyBench(bench.model, bench.name, bench.report, bench.console, bench.budget)
    count = min(bench.steps, latency.positions - bench.context - WARMUP)
    rows: list[tuple[object, ...]] = []
    for name, way in STEP_WAYS[bench.device.type].items():
        with contextlib.ExitStack() as stack:
            starts: dict[str, Start] = {}
            failures: dict[str, str] = {}
            for size in bench.page_sizes:
                try:
                    opened = way(Setting(bench.model, bench.batch, page_size=size))
                    starts[str(size)] = stack.enter_context(opened)
                except Exception as error:
                    failures[str(size)] = failure(error)
            lanes, failed = race(latency, starts, bench.batch, bench.context, count)
        failures |= failed
        medians = [percentile(lane.seconds, 50) for lane in lanes.values()]
        for size in bench.page_sizes:
            case = {
                "model": bench.name,
                "way": name,
                "page_size": size,
                "batch": bench.batch,
                "context": bench.context,
                "steps": count,
            }
            if (reason := failures.get(str(size))) is not None:
                bench.report.add(section="step", **case, failure=reason)
                rows.append((f"{name}, {size}", reason))
                continue
            seconds = lanes[str(size)].seconds
            low, _, high = (1e3 * value for value in quartiles(seconds))
            found = {
                **times(lanes[str(size)]),
                "p25_ms": low,
                "p75_ms": high,
                "over_fastest": percentile(seconds, 50) / min(medians),
            }
            bench.report.add(section="step", **case, **found)
            keys = ("p25_ms", "p50_ms", "p75_ms", "over_fastest")
            rows.append((f"{name}, {size}", *(found[key] for key in keys)))
    title = f"{bench.name}: a decode step, batch {bench.batch}, prompt {bench.context}"
    columns = ("way, page size", "P25 ms", "P50", "P75", "/fastest")
    bench.console.print(table(title, columns, rows))
    bench.console.print()


# --- the decode kernel ----------------------------------------------------------------------


def kernel(bench: SweepBench) -> None:
    """Microseconds of attention in a layer, over K/V that no cache holds. Needs CUDA."""
    if bench.device.type != "cuda":
        raise RuntimeError("kernels are timed on CUDA, and there is none here")
    rate = read_ceiling(bench.device)
    heads = heads_of(bench.model)
    rows = []
    for name in KERNEL_SHAPES:
        if not bench.budget.allows(f"kernel {name}"):
            continue
        num_rows, context = SHAPES[name]
        problem = Problem(heads, (context,) * num_rows, bench.model.dtype, bench.device)
        builders = {str(size): partial(_kernel, problem, size) for size in bench.page_sizes}
        timings = measure(builders, bench.device, repeats=KERNEL_REPEATS)
        for size in bench.page_sizes:
            timing = timings[str(size)]
            case = {
                "model": bench.name,
                "shape": name,
                "heads": str(heads),
                "page_size": size,
                "bytes": problem.bytes,
            }
            share = problem.bytes / rate / timing.us * 1e6
            bench.report.add(section="kernel", **case, **vars(timing), read_share=share)
            label = f"{name}, {size}"
            rows.append((label, timing.us, share) if timing.ok else (label, timing.failure))
    columns = ("shape, page size", "us", "share of read ceiling")
    bench.console.print(table(f"{bench.name}: decode attention of a layer, {heads}", columns, rows))
    bench.console.print()


def _kernel(problem: Problem, page_size: int) -> Candidate:
    return ours(problem, PagedKV(problem, page_size))


def heads_of(model: PreTrainedModel) -> Heads:
    """The heads of a model whose layers are alike."""
    (group,) = geometry_of(model, PAGE_SIZES[0]).groups
    query = int(model.config.num_attention_heads)
    return Heads(query, group.shape.num_kv_heads, group.shape.key_dim, len(group.layers))


# --- a workload -----------------------------------------------------------------------------


def workload(bench: SweepBench) -> None:
    """The engine's memory and throughput, in pools that are ample, and then too small.

    A smaller pool has the same bytes for every page size, as far as the longest request allows:
    a part of what the pages of the thriftiest one come to.
    """
    serving = ThroughputBench(
        bench.model,
        bench.name,
        bench.tokenizer,
        bench.report,
        bench.console,
        bench.budget,
        bench.size,
        repeats=bench.repeats,
    )
    jobs_of = partial(serving.jobs, WORKLOAD)
    jobs = jobs_of(0)
    rows: list[tuple[object, ...]] = []
    need: int | None = None
    for pool, squeeze in POOLS.items():
        if not bench.budget.allows(f"{WORKLOAD}, {pool}"):
            continue
        limits: dict[int, int | None] = dict.fromkeys(bench.page_sizes)
        if squeeze is not None:
            if need is None:
                continue  # nobody knows what half of it is
            limits = {size: _pages(bench, jobs, size, need // squeeze) for size in bench.page_sizes}
        ways = {
            str(size): ServingWay(partial(engine, page_size=size, max_pages=limit), bench.repeats)
            for size, limit in limits.items()
        }
        with contextlib.ExitStack() as stack:
            served = Race(serving, f"{WORKLOAD}, {pool} pool", jobs_of)
            served.run(ways, stack)
            if squeeze is None:
                need = min((max(lane.log.in_use) for lane in served.lanes.values()), default=None)
            for size, limit in limits.items():
                case = _case(bench, jobs, pool, size, limit)
                if (reason := served.failures.get(str(size))) is not None:
                    bench.report.add(section="workload", **case, failure=reason)
                    rows.append((f"{pool}, {size}", reason))
                    continue
                if str(size) not in served.lanes:
                    continue  # there was no time for it
                lane = served.lanes[str(size)]
                found = lane.rates(jobs) | memory_of(lane.log, bytes_of_token(bench.model))
                bench.report.add(section="workload", **case, **found)
                rows.append((f"{pool}, {size}", *_cells(found)))
    title = (
        f"{bench.name}, {WORKLOAD}: {len(jobs)} requests, {new_tokens(jobs):,} new tokens; bytes "
        f"over those of the tokens that live, of all steps"
    )
    columns = ("pool, page size", "tokens/s", "low", "high", "running", "preempted")
    shown = (*columns, "pages' bytes", "mapped bytes", "pages at peak", "mapped MB")
    bench.console.print(table(title, shown, rows))
    bench.console.print()


def _pages(bench: SweepBench, jobs: Sequence[Job], page_size: int, num_bytes: int) -> int:
    """Pages of so many bytes together, but enough for the longest request."""
    longest = max(pages_for(job.num_tokens, page_size) for job in jobs)
    return max(longest, num_bytes // bytes_of_page(bench.model, page_size))


def _case(
    bench: SweepBench, jobs: Sequence[Job], pool: str, page_size: int, max_pages: int | None
) -> dict[str, Any]:
    page_bytes = bytes_of_page(bench.model, page_size)
    return {
        "model": bench.name,
        "workload": WORKLOAD,
        "requests": len(jobs),
        "new_tokens": new_tokens(list(jobs)),
        "pool": pool,
        "page_size": page_size,
        "page_bytes": page_bytes,
        "max_pages": max_pages,
        "pool_bytes": None if max_pages is None else max_pages * page_bytes,
    }


def memory_of(log: StepLog, token_bytes: int) -> dict[str, Any]:
    """Bytes of used pages, and mapped ones, over those of the tokens that live, over all steps."""
    live = token_bytes * sum(log.held)
    return {
        "live_peak_bytes": token_bytes * max(log.held),
        "pages_peak_bytes": max(log.in_use),
        "pages_over_live": sum(log.in_use) / live,
        "mapped_over_live": sum(log.mapped) / live,
    }


def _cells(found: Mapping[str, Any]) -> Iterator[object]:
    """A run's cells in the table."""
    for key in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "mean_running"):
        yield found[key]
    for key in ("preemptions", "pages_over_live", "mapped_over_live", "pages_peak"):
        yield found[key]
    yield mb(found["mapped_peak_bytes"])


def bytes_of_page(model: PreTrainedModel, page_size: int) -> int:
    """Of a page in every layer group."""
    return total_bytes_per_page(geometry_of(model, page_size).groups)


def bytes_of_token(model: PreTrainedModel) -> int:
    """Of a token's K and V in all layers."""
    return bytes_of_page(model, PAGE_SIZES[0]) // PAGE_SIZES[0]


PARTS = {"step": step, "kernel": kernel, "workload": workload}
"""In their order."""

ON_CPU = ("step", "workload")
"""Those that make sense without CUDA."""
