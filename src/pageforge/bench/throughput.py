"""How many tokens a second does the engine make, beside transformers' own ways?

Whole workloads, on the host's clock, text included. What comes first (capturing, compiling) is
shown apart; repeats have prompts that nobody has seen, and the prefix cache is off where it is not
the question.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from pageforge.bench import workloads
from pageforge.bench.ceilings import matmul_ceiling, read_ceiling
from pageforge.bench.context import dtype_name
from pageforge.bench.engine_probe import (
    StepLog,
    costs_of,
    floor_seconds,
    host_work,
    logged,
    steady_tokens,
)
from pageforge.bench.harness import failure, percentile, rotated, synchronize
from pageforge.bench.models import make_model, make_tokenizer, twin
from pageforge.bench.report import mb, table
from pageforge.bench.run import Run, run_sections
from pageforge.bench.serving import (
    BASE,
    WAYS,
    Server,
    Setting,
    Way,
    engine,
    padded,
    params_of,
)
from pageforge.bench.settings import cudnn_attention
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Job, Size
from pageforge.engine.engine import Engine, EngineStats
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

TRIAL = 8
"""By which a trial's counts and lengths are divided."""

TRIAL_RUNNING, TRIAL_STEPS = (8,), 16


def run_all(given: Run) -> None:
    """Every section, at sizes for the device and the time."""
    run(bench_of(given))


def bench_of(
    given: Run, *, dtype: torch.dtype | None = None, requests: int | None = None
) -> ThroughputBench:
    """What the sections are given in a run; a trial with `quick`, and on the CPU unless asked."""
    name = given.model or ("tiny" if given.on_cpu else "gpt2")
    model = make_model(name, given.device, dtype)
    is_trial = given.quick or name == "tiny"
    bench = ThroughputBench(
        model,
        name,
        make_tokenizer(int(model.config.vocab_size)),
        given.report,
        given.console,
        given.budget,
        Size(int(model.config.max_position_embeddings), TRIAL if is_trial else 1, requests),
    )
    if is_trial:
        bench.repeats, bench.running, bench.host_steps = 1, TRIAL_RUNNING, TRIAL_STEPS
    return bench


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


@dataclass
class Lane:
    """One way's runs: seconds of the first and of the others.

    Of the first run also its outputs, its steps and counts if it is an engine's, and torch's
    allocator's peak over what it was before (None on the CPU), in which the engine's pool is not.
    """

    server: Server
    first: float
    outputs: list[list[int]]
    log: StepLog
    stats: EngineStats | None
    peak_bytes: int | None
    seconds: list[float] = field(default_factory=list)


Runs = Mapping[str, Way]
JobsOf = Callable[[int], list[Job]]


@torch.no_grad()
def race(
    bench: ThroughputBench, ways: Runs, jobs_of: JobsOf, stack: contextlib.ExitStack
) -> tuple[dict[str, Lane], dict[str, str]]:
    """All ways by turns, open as long as `stack`: (lanes of those that arrived, others' reasons).

    Those that fill the device's memory come after the others, each by itself.
    """
    lanes: dict[str, Lane] = {}
    failures: dict[str, str] = {}
    together = {name: way for name, way in ways.items() if not way.apart}
    for name, way in together.items():
        _attempt(failures, name, partial(_start, bench, lanes, name, way, jobs_of, stack))
    for repeat in range(bench.repeats):
        for name in rotated(list(together), repeat):
            if name in lanes and name not in failures and repeat < together[name].repeats:
                _attempt(failures, name, partial(_again, bench, lanes[name], jobs_of(1 + repeat)))
    for name, way in ways.items():
        if way.apart:
            with contextlib.ExitStack() as alone:
                _attempt(failures, name, partial(_start, bench, lanes, name, way, jobs_of, alone))
                for repeat in range(min(bench.repeats, way.repeats)):
                    if name not in failures:
                        again = partial(_again, bench, lanes[name], jobs_of(1 + repeat))
                        _attempt(failures, name, again)
    return {name: lanes[name] for name in ways if name in lanes and name not in failures}, failures


def _attempt(failures: dict[str, str], name: str, do: Callable[[], None]) -> None:
    try:
        do()
    except Exception as error:  # whatever it is, the others go on
        failures[name] = failure(error)


def _start(
    bench: ThroughputBench,
    lanes: dict[str, Lane],
    name: str,
    way: Way,
    jobs_of: JobsOf,
    stack: contextlib.ExitStack,
) -> None:
    """Open a way and let it run for the first time."""
    on_cuda, before = bench.device.type == "cuda", 0
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    jobs = jobs_of(0)
    server = stack.enter_context(way.open(Setting(bench.model, bench.tokenizer, jobs)))
    opened = server.engine
    with contextlib.nullcontext(StepLog()) if opened is None else logged(opened) as log:
        outputs, seconds = _timed(bench, server, jobs)
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else None
    stats = None if opened is None else opened.stats()
    lanes[name] = Lane(server, seconds, outputs, log, stats, peak)


def _again(bench: ThroughputBench, lane: Lane, jobs: list[Job]) -> None:
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # what another way's allocator keeps, the pool could not map
    lane.seconds.append(_timed(bench, lane.server, jobs)[1])


def _timed(
    bench: ThroughputBench, server: Server, jobs: list[Job]
) -> tuple[list[list[int]], float]:
    synchronize(bench.device)
    began = time.perf_counter()
    outputs = server(jobs)
    synchronize(bench.device)
    return outputs, time.perf_counter() - began


def rates(lane: Lane, jobs: list[Job]) -> dict[str, Any]:
    """Tokens a second of a lane, and the memory that its first run took."""
    tokens = workloads.new_tokens(jobs)
    found: dict[str, Any] = {
        "tokens_per_s": tokens / percentile(lane.seconds, 50),
        "tokens_per_s_low": tokens / max(lane.seconds),
        "tokens_per_s_high": tokens / min(lane.seconds),
        "repeats": len(lane.seconds),
        "first_run_s": lane.first,
        "peak_bytes": lane.peak_bytes,
    }
    if (stats := lane.stats) is not None:
        found |= {
            "mapped_peak_bytes": lane.log.mapped_peak,
            "pages_peak": lane.log.pages_peak,
            "steps": len(lane.log.counts),
            "mean_running": lane.log.mean_running,
            "preemptions": stats.num_preemptions,
            "graphs": stats.num_graphs,
            "capture_s": stats.capture_seconds,
            "eager_steps": stats.eager_steps,
        }
    return found


def _case(workload: str, jobs: list[Job]) -> dict[str, Any]:
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    return {
        "workload": workload,
        "requests": len(jobs),
        "prompt_tokens": prompt_tokens,
        "new_tokens": workloads.new_tokens(jobs),
    }


def compare(bench: ThroughputBench, workload: str) -> None:
    """The chosen ways over one workload; the engines beside their floor.

    Without a choice peers run `uniform` only: with mixed lengths their padding takes minutes.
    """
    jobs_of = partial(bench.jobs, workload)
    jobs = jobs_of(0)
    case = _case(workload, jobs)
    chosen = bench.ways or (PEERS[bench.device.type] if workload == "uniform" else ("engine",))
    ways = {name: way for name, way in WAYS.items() if name in chosen}
    rows: list[tuple[object, ...]] = []
    with contextlib.ExitStack() as stack:
        lanes, failures = race(bench, ways, jobs_of, stack)
        found = {name: rates(lane, jobs) for name, lane in lanes.items()}
        for name in ways:
            if name in failures:
                bench.report.add(section="throughput", **case, way=name, failure=failures[name])
                rows.append((name, failures[name]))
                continue
            of_way, lane = found[name], lanes[name]
            base = found[BASE]["tokens_per_s"] if BASE in found else None
            of_way["over_generate"] = None if base is None else of_way["tokens_per_s"] / base
            of_way["floor_s"] = of_way["floor_share"] = None
            if lane.server.engine is not None:
                costs = costs_of(bench.model, lane.server.engine._pool.geometry)
                floor = floor_seconds(lane.log, costs, bench.read, bench.flops)
                of_way["floor_s"] = floor
                of_way["floor_share"] = floor / percentile(lane.seconds, 50)
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
) -> Lane:
    """The engine's runs of a workload. Raises what it fails with."""
    way = Way(partial(engine, **options), repeats=WAYS["engine"].repeats)
    lanes, failures = race(bench, {"engine": way}, partial(bench.jobs, workload), stack)
    if failures:
        raise RuntimeError(failures["engine"])
    return lanes["engine"]


def shared_prefix(bench: ThroughputBench) -> None:
    """Tokens computed where all prompts begin alike, over those with the beginning once."""
    jobs = bench.jobs("shared-prefix", 0)
    shared = _common(jobs)
    with contextlib.ExitStack() as stack:
        lane = _alone(bench, "shared-prefix", stack, prefix_cache=True)
        found = rates(lane, jobs)
    computed = sum(int(counts.sum()) for counts in lane.log.counts)
    # The last new token's own K/V are not needed.
    once = shared + sum(len(job.prompt) - shared + job.new_tokens - 1 for job in jobs)
    case = _case("shared-prefix", jobs)
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
        found = rates(lane, jobs)
    # A completion computes its prompt's last token anew, and its own last token not at all.
    apart = sum(job.n * pages_for(job.num_tokens - 1, PAGE_SIZE) for job in jobs)
    saved = sum((job.n - 1) * ((len(job.prompt) - 1) // PAGE_SIZE) for job in jobs)
    groups = len(lane.server.engine._pool.geometry.groups) if lane.server.engine else 1
    found |= {
        "once_pages": groups * (apart - saved),
        "apart_pages": groups * apart,
        "peak_over_once": lane.log.pages_peak / (groups * (apart - saved)),
    }
    case = _case("rollout", jobs)
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
    jobs_of = partial(bench.jobs, "uniform")
    jobs = jobs_of(0)
    pages = [pages_for(job.num_tokens - 1, PAGE_SIZE) for job in jobs]
    few = max(sum(pages) // SQUEEZE, *pages)
    case = _case("squeezed", jobs) | {"pages": few, "needed_pages": sum(pages)}
    repeats = WAYS["engine"].repeats
    with contextlib.ExitStack() as stack:
        first = {
            "ample": Way(engine, repeats=1),
            "squeezed": Way(partial(engine, max_pages=few), repeats),
        }
        lanes, failures = race(bench, first, jobs_of, stack)
        if "squeezed" in lanes:
            running = max(1, round(lanes["squeezed"].log.mean_running))
            limited = {"ample, as many": Way(partial(engine, max_running=running), repeats)}
            more, more_failures = race(bench, limited, jobs_of, stack)
            lanes, failures = lanes | more, failures | more_failures
        found = {name: rates(lane, jobs) for name, lane in lanes.items()}
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
        for name, reason in failures.items():
            bench.report.add(section="squeezed", **case, way=name, failure=reason)
            rows.append((name, reason))
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
}
