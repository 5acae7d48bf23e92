"""Ways to serve whole workloads, by turns: what each run took is recorded as soon as it is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pageforge.bench import workloads
from pageforge.bench.engine_probe import StepLog, logged
from pageforge.bench.harness import failure, percentile, rotated, synchronize
from pageforge.bench.serving import Server, Setting, Way
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Job
from pageforge.engine.stats import EngineStats


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

    @property
    def timed(self) -> list[float]:
        """Seconds of all runs but the first; of that one, where no others were asked for."""
        return self.seconds or [self.first]

    @property
    def median(self) -> float:
        """Of `timed`."""
        return percentile(self.timed, 50)

    def rates(self, jobs: list[Job]) -> dict[str, Any]:
        """Tokens a second, and the memory that the first run took."""
        tokens = workloads.new_tokens(jobs)
        found: dict[str, Any] = {
            "tokens_per_s": tokens / self.median,
            "tokens_per_s_low": tokens / max(self.timed),
            "tokens_per_s_high": tokens / min(self.timed),
            "repeats": len(self.seconds),
            "first_run_s": self.first,
            "peak_bytes": self.peak_bytes,
        }
        if (stats := self.stats) is not None:
            found |= {
                "mapped_peak_bytes": self.log.mapped_peak,
                "pages_peak": self.log.pages_peak,
                "steps": len(self.log.counts),
                "mean_running": self.log.mean_running,
                "preemptions": stats.num_preemptions,
                "graphs": stats.num_graphs,
                "capture_s": stats.capture_seconds,
                "eager_steps": stats.eager_steps,
            }
        return found


def describe(workload: str, jobs: list[Job]) -> dict[str, Any]:
    """A workload's fields in records."""
    return {
        "workload": workload,
        "requests": len(jobs),
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "new_tokens": workloads.new_tokens(jobs),
    }


@dataclass
class Race:
    """Ways that serve a workload by turns; `jobs_of(repeat)` are its requests.

    `lanes`: of the ways that arrived. `failures`: why others did not. Those for which there was no
    time are in neither.
    """

    bench: ThroughputBench
    workload: str
    jobs_of: Callable[[int], list[Job]]
    lanes: dict[str, Lane] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, ways: Mapping[str, Way], stack: contextlib.ExitStack) -> None:
        """All ways, which stay open as long as `stack`.

        Those that fill the device's memory come after the others, each by itself.
        """
        together = {name: way for name, way in ways.items() if not way.apart}
        for name, way in together.items():
            self.attempt(name, partial(self.start, name, way, stack))
        for repeat in range(self.bench.repeats):
            for name in rotated(list(together), repeat):
                self._repeat(name, together[name], repeat)
        for name, way in ways.items():
            if way.apart:
                with contextlib.ExitStack() as alone:
                    self.attempt(name, partial(self.start, name, way, alone))
                    for repeat in range(self.bench.repeats):
                        self._repeat(name, way, repeat)
        for name in self.failures:
            self.lanes.pop(name, None)

    def attempt(self, name: str, do: Callable[[], None]) -> None:
        """Whatever a way fails with, the others go on."""
        try:
            do()
        except Exception as error:
            self.failures[name] = failure(error)

    def start(self, name: str, way: Way, stack: contextlib.ExitStack) -> None:
        """Open a way and let it run for the first time, if there is time."""
        bench = self.bench
        if not bench.budget.allows(f"{self.workload}: {name}"):
            return
        on_cuda, before = bench.device.type == "cuda", 0
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        jobs = self.jobs_of(0)
        server = stack.enter_context(way.open(Setting(bench.model, bench.tokenizer, jobs)))
        opened = server.engine
        with contextlib.nullcontext(StepLog()) if opened is None else logged(opened) as log:
            outputs, seconds = self._timed(name, server, jobs, 0)
        peak = torch.cuda.max_memory_allocated() - before if on_cuda else None
        stats = None if opened is None else opened.stats()
        self.lanes[name] = Lane(server, seconds, outputs, log, stats, peak)

    def again(self, name: str, run: int) -> None:
        """Let a way run once more."""
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()  # what another way's allocator keeps, the pool could not map
        lane = self.lanes[name]
        lane.seconds.append(self._timed(name, lane.server, self.jobs_of(run), run)[1])

    def _repeat(self, name: str, way: Way, repeat: int) -> None:
        """A way's turn. Of one that has begun there is a timed run in any case."""
        if name not in self.lanes or name in self.failures or repeat >= way.repeats:
            return
        run = 1 + repeat
        if repeat == 0 or self.bench.budget.allows(f"{self.workload}: {name}, run {run}"):
            self.attempt(name, partial(self.again, name, run))

    def _timed(
        self, name: str, server: Server, jobs: list[Job], run: int
    ) -> tuple[list[list[int]], float]:
        synchronize(self.bench.device)
        began = time.perf_counter()
        outputs = server(jobs)
        synchronize(self.bench.device)
        seconds = time.perf_counter() - began
        self.bench.report.add(
            section="run",
            workload=self.workload,
            way=name,
            run=run,
            run_s=seconds,
            tokens_per_s=workloads.new_tokens(jobs) / seconds,
        )
        return outputs, seconds
