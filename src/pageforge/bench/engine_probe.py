"""What an engine does in its steps: methods are wrapped for the time of a probe only."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import DeviceType
from transformers import PreTrainedModel

from pageforge.bench.workloads import Job, params_of
from pageforge.engine import core
from pageforge.engine.core import Core
from pageforge.engine.engine import Engine
from pageforge.engine.flight import Flight
from pageforge.engine.sequence import Rows, Sequence
from pageforge.engine.step import Step
from pageforge.geometry import KVGeometry, total_bytes_per_page

SETTLE = 8
"""Steps of decoding before they count: the first captures a graph."""

ADMITTING = 40
"""Steps until all sequences have computed their prompts, at most."""

PROFILED = 16
"""Steps under the profiler: reading its records takes longer than making them."""

KERNELS_KEPT = 12
KERNEL_NAME = 80


@dataclass
class StepLog:
    """What the steps of a run were: for each the rows that computed something."""

    counts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """`[rows]`: tokens that each computed."""
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """`[rows]`: tokens that each had K/V of afterwards."""
    logits: list[int] = field(default_factory=list)
    """Rows of logits that were made."""
    held: list[int] = field(default_factory=list)
    """Tokens that all rows had K/V of afterwards."""
    pages: list[int] = field(default_factory=list)
    """Used pages."""
    in_use: list[int] = field(default_factory=list)
    """Their bytes."""
    mapped: list[int] = field(default_factory=list)
    """Bytes that the system had given."""

    @property
    def pages_peak(self) -> int:
        """The most used pages."""
        return max(self.pages, default=0)

    @property
    def mapped_peak(self) -> int:
        """The most mapped bytes."""
        return max(self.mapped, default=0)

    @property
    def mean_running(self) -> float:
        """Rows of a step."""
        return statistics.fmean(map(len, self.counts))


@contextlib.contextmanager
def logged(engine: Engine) -> Iterator[StepLog]:
    """Note every step that `engine` launches, and what its pool holds then."""
    log, runner, pool = StepLog(), engine._core.runner, engine._pool
    launch = runner.launch

    def noted(rows: Rows, counts: npt.NDArray[np.int32], *args: Any, **options: Any) -> Step:
        step = launch(rows, counts, *args, **options)
        some = np.flatnonzero(counts)
        log.counts.append(counts[some])
        log.lengths.append(rows.computed[some] + counts[some])
        log.logits.append(len(step.rows))
        log.held.append(int(rows.computed.sum() + counts.sum()))
        stats = pool.stats()
        log.pages.append(stats.pages_used)
        log.in_use.append(stats.bytes_in_use)
        log.mapped.append(stats.bytes_mapped)
        return step

    with replaced(runner, "launch", noted):
        yield log


class TokenTimes:
    """When each token of an engine's requests came to the host, as `note` is told."""

    def __init__(self, core: Core):
        self._core = core
        self._steps: list[tuple[list[Sequence | None], npt.NDArray[np.int64]]] = []
        self._times: list[float] = []  # of the steps that have landed, which are the first ones

    def begin(self, flight: Flight) -> Flight:
        """A step was launched."""
        self._steps.append((flight.sequences, flight.rows))
        return flight

    def note(self, now: float) -> None:
        """`Engine.step` has returned, so that all tokens came but those of steps in flight."""
        landed = len(self._steps) - len(self._core._flights)
        self._times += [now] * (landed - len(self._times))

    def by_request(self) -> dict[str, list[float]]:
        """The times of each request's tokens, and of a last one that was computed in vain."""
        found: dict[str, list[float]] = {}
        for (sequences, rows), moment in zip(self._steps, self._times, strict=False):
            for row in rows.tolist():
                sequence = sequences[row]
                assert sequence is not None
                found.setdefault(sequence.owner.id, []).append(moment)
        return found


@contextlib.contextmanager
def token_times(engine: Engine) -> Iterator[TokenTimes]:
    """Note which requests each step of `engine` gives a token."""
    core = engine._core
    times, sample = TokenTimes(core), core._sample
    with replaced(core, "_sample", lambda step: times.begin(sample(step))):
        yield times


# --- the floor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What a step of a model cannot do without."""

    weight_bytes: int  # read by every step
    kv_bytes: float  # of one token
    token_flops: int  # of one token, its attention and its logits apart
    logit_flops: int  # of one row of logits
    pair_flops: int  # of one token that attends to one


def costs_of(model: PreTrainedModel, geometry: KVGeometry) -> Costs:
    """By its weights' shapes; tables of embeddings, of which a step reads a few rows, apart."""
    head = model.get_output_embeddings()
    weights = {
        id(weight): weight
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    num_head = sum(weight.numel() for weight in head.parameters())
    num_all = sum(weight.numel() for weight in weights.values())
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Costs(
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights.values()),
        kv_bytes=total_bytes_per_page(geometry.groups) / geometry.page_size,
        token_flops=2 * (num_all - num_head),
        logit_flops=2 * num_head,
        pair_flops=4 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def floor_seconds(log: StepLog, costs: Costs, read: float, flops: float) -> float:
    """The sum over steps of what memory (`read` bytes a second) or arithmetic (`flops`) takes."""
    total = 0.0
    for counts, lengths, num_logits in zip(log.counts, log.lengths, log.logits, strict=True):
        count, length = counts.astype(np.int64), lengths.astype(np.int64)
        pairs = int((count * length - count * (count - 1) // 2).sum())
        work = (
            int(count.sum()) * costs.token_flops
            + num_logits * costs.logit_flops
            + pairs * costs.pair_flops
        )
        moved = costs.weight_bytes + int(length.sum()) * costs.kv_bytes
        total += max(moved / read, work / flops)
    return total


# --- steady steps ---------------------------------------------------------------------------


@dataclass(frozen=True)
class HostWork:
    """Milliseconds a step, of decoding with all sequences running.

    `plan`, `next_plan` (with the claim of pages) and `host` (all of Core.step less its waits for
    the device) are CPU time of the thread, `wall` is the clock's; `busy` is the device's own, None
    without one. `kernels`: what it did, the longest first: (name, ms a step, calls a step).
    """

    plan: list[float]
    next_plan: list[float]
    host: list[float]
    wall: float
    busy: float | None
    kernels: list[tuple[str, float, float]]


def steady_tokens(steps: int) -> int:
    """New tokens that requests need for `host_work` over `steps` steps."""
    return ADMITTING + SETTLE + steps + PROFILED


def host_work(engine: Engine, jobs: SequenceOf[Job], steps: int) -> HostWork:
    """Time `steps` steps of decoding for all `jobs`, then the device's work in a few more."""
    names = [engine.add_request(job.prompt, params_of(job)) for job in jobs]
    rows = engine._core.rows
    while engine._core.waiting or rows.wanted.max() > 1:
        engine.step()
    for _ in range(SETTLE):
        engine.step()
    plan: list[float] = []
    next_plan: list[float] = []
    whole: list[float] = []
    waits: list[float] = []
    with (
        clocked(core, "plan", plan),
        clocked(engine._core, "_next_plan", next_plan),
        clocked(engine._core, "step", whole),
        clocked(torch.cuda.Event, "synchronize", waits),
    ):
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall = time.perf_counter() - began
    busy, kernels = _profile(engine) if engine._core.runner.last_tokens.is_cuda else (None, [])
    if rows.num_running != len(jobs):
        raise RuntimeError(f"expected {len(jobs)} sequences all the time, got {rows.num_running}")
    for name in names:
        engine.abort(name)
    waited = waits or [0.0] * steps  # the CPU's steps are done at once
    return HostWork(
        [1e3 * each for each in plan],
        [1e3 * each for each in next_plan],
        [1e3 * (of_step - wait) for of_step, wait in zip(whole, waited, strict=True)],
        1e3 * wall / steps,
        busy,
        kernels,
    )


def _profile(engine: Engine) -> tuple[float, list[tuple[str, float, float]]]:
    """(the device's milliseconds a step, its kernels)."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    found = [each for each in profile.key_averages() if each.device_type == DeviceType.CUDA]
    found.sort(key=lambda each: each.self_device_time_total, reverse=True)
    kernels = [
        (
            each.key[:KERNEL_NAME],
            each.self_device_time_total / 1e3 / PROFILED,
            each.count / PROFILED,
        )
        for each in found
    ]
    return sum(milliseconds for _, milliseconds, _ in kernels), kernels[:KERNELS_KEPT]


@contextlib.contextmanager
def clocked(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Note the CPU seconds of the calling thread in each call of `owner.name`."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.thread_time() - began)

    with replaced(owner, name, timed):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is `function`; afterwards what it was."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)  # its class has it
        else:
            setattr(owner, name, own)
