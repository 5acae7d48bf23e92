"""Timing on the device: what is compared takes turns, over data that no cache holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SPIN_CYCLES = 2_000_000
"""About 1 ms on the device before a timed replay: the host has queued it when it begins."""


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    `run()` makes `calls` calls, each over data that the calls before have pushed out of the caches,
    and returns the last one's output. `error(output)` is its relative error.
    """

    run: Callable[[], Any]
    calls: int
    error: Callable[[Any], float] | None = None
    tolerance: float = math.inf


Builders = Mapping[str, Callable[[], Candidate]]
"""By name. A builder may raise, and then its candidate has failed."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over all repeats; or why there are none."""

    us: float = math.nan
    us_low: float = math.nan  # the quartiles
    us_high: float = math.nan
    error: float | None = None  # of the output against the reference
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and was right."""
        return self.failure is None


Told = Callable[[str, float], None]
"""Called with what begins, and the share of the time that is gone."""


class Budget:
    """Seconds that a run may take. What does not fit is left out, by name."""

    def __init__(self, seconds: float | None, told: Told | None = None):
        self._begin = time.monotonic()
        self._seconds = math.inf if seconds is None else seconds
        self._told = told
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        """Whether there is time for `what`; if not, it is noted."""
        gone = time.monotonic() - self._begin
        if gone >= self._seconds:
            self.left_out.append(what)
            return False
        if self._told is not None:
            self._told(what, gone / self._seconds)
        return True


def measure(
    builders: Builders,
    device: torch.device,
    *,
    repeats: int,
    graph: bool = True,
) -> dict[str, Timing]:
    """Build, check and time candidates; one that fails is noted and the others go on.

    On CUDA `graph` makes one graph of each candidate's run, so that the host's launches cost
    nothing; without it they count as far as the device waits for them. Repeats are interleaved and
    begin with another candidate each time.
    """
    timings: dict[str, Timing] = {}
    ready: dict[str, tuple[Candidate, Callable[[], Any], float | None]] = {}
    for name, build in builders.items():
        try:
            candidate = build()
            run, output = _prepare(candidate.run, device, graph)
            error = None if candidate.error is None else candidate.error(output)
            if error is not None and not error <= candidate.tolerance:
                raise ArithmeticError(f"wrong output: relative error {error:.1e}")
            ready[name] = candidate, run, error
        except Exception as exception:  # a peer may fail in any way
            timings[name] = Timing(failure=failure(exception))
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for repeat in range(repeats):
        for name in rotated(list(seconds), repeat):
            try:
                seconds[name].append(elapsed(ready[name][1], device))
            except Exception as exception:
                timings[name] = Timing(failure=failure(exception))
                del seconds[name]
    for name, values in seconds.items():
        candidate, _, error = ready[name]
        low, middle, high = (1e6 * value / candidate.calls for value in quartiles(values))
        timings[name] = Timing(middle, low, high, error)
    return {name: timings[name] for name in builders}


def _prepare(
    run: Callable[[], Any], device: torch.device, graph: bool
) -> tuple[Callable[[], Any], Any]:
    """(what to time, its output), kernels compiled."""
    output = run()
    synchronize(device)
    if device.type != "cuda" or not graph:
        return run, output
    captured, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(captured):
            output = run()
    finally:
        torch.cuda.set_stream(before)  # a capture that fails leaves its own stream current
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        output.fill_(math.nan)  # what is checked is what a replay wrote
    captured.replay()
    synchronize(device)
    return captured.replay, output


def elapsed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run: on CUDA the device's, elsewhere the host's."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def failure(exception: Exception) -> str:
    """One line about what went wrong; "absent" where a library is not there."""
    lines = str(exception).strip().splitlines() or ["no message"]
    kind = "absent" if isinstance(exception, ImportError) else type(exception).__name__
    return f"{kind}: {lines[0][:300]}"


def rotated(items: Sequence[T], by: int) -> list[T]:
    """`items`, beginning with another one for each `by`."""
    shift = by % len(items) if items else 0
    return [*items[shift:], *items[:shift]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles; of a single value that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` percent of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of no values."""
    values = list(values)
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
