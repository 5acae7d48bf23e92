"""Requests that come one after the other: when they do, and how long each has to wait."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pageforge.bench.harness import percentile
from pageforge.bench.workloads import Job

POISSON = 1.0
"""The burstiness of a Poisson process."""

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as goodput: its seconds to the first token, and a token."""

    ttft_s: float
    tpot_s: float


LIMITS = {"cuda": Limits(0.5, 0.04), "cpu": Limits(2.0, 0.2)}
"""What people call immediate and seamless; on the CPU, what a patient reader can follow."""


@dataclass(frozen=True)
class Served:
    """One answered request, in seconds of the host's clock since the run began.

    `arrived`: when it came, though nobody may have looked yet. `started`: when the first step began
    that computed some of it. `tokens`: when each new token was there.
    """

    arrived: float
    started: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        """Seconds to the first token, those of waiting included."""
        return self.tokens[0] - self.arrived

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.tokens[-1] - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean seconds from one token to the next; None with one token alone."""
        count = len(self.tokens) - 1
        return (self.e2e - self.ttft) / count if count else None

    @property
    def itl(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.tokens)]

    def meets(self, limits: Limits) -> bool:
        """Whether it counts as goodput."""
        return self.ttft <= limits.ttft_s and (self.tpot or 0) <= limits.tpot_s


def arrival_times(
    count: int, rate: float, *, burstiness: float = POISSON, seed: int = 0
) -> list[float]:
    """Seconds after the beginning at which requests come: the same for the same arguments.

    Gaps have a Gamma distribution whose shape is `burstiness`: 1 is a Poisson process, less comes
    in bursts, more evenly. They are stretched so that `count` requests take `count / rate` seconds:
    at another rate the pattern is the same.
    """
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, size=count))
    stretched: list[float] = (times * (count / rate / times[-1])).tolist()
    return stretched


class Arrivals:
    """Requests that come at `times`, the clock running. True as long as some are still to come."""

    def __init__(self, jobs: Sequence[Job], times: Sequence[float]):
        self.times = times
        self.began = time.perf_counter()
        self._left = deque(enumerate(jobs))

    def __bool__(self) -> bool:
        return bool(self._left)

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began

    @property
    def seconds_left(self) -> float:
        """Until the next one comes; infinite if none does."""
        return max(0.0, self.times[self._left[0][0]] - self.now()) if self._left else math.inf

    def due(self) -> list[tuple[int, Job]]:
        """Take those that have come by now, with their numbers."""
        found = []
        while not self.seconds_left:
            found.append(self._left.popleft())
        return found

    def wait(self) -> None:
        """Sleep until the next one comes."""
        time.sleep(self.seconds_left)


def summary(served: Sequence[Served], limits: Limits) -> dict[str, Any]:
    """What a run was like: fields of its record. Rates are over all of it, to the last token."""
    seconds = max(each.tokens[-1] for each in served)
    good = sum(each.meets(limits) for each in served)
    waits = {
        "ttft": [each.ttft for each in served],
        "tpot": [each.tpot for each in served if each.tpot is not None],
        "itl": [gap for each in served for gap in each.itl],
        "e2e": [each.e2e for each in served],
        "queued": [each.started - each.arrived for each in served],
    }
    return {
        "run_s": seconds,
        "achieved_per_s": len(served) / seconds,
        "output_tokens_per_s": sum(len(each.tokens) for each in served) / seconds,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(served),
        "ttft_limit_ms": 1e3 * limits.ttft_s,
        "tpot_limit_ms": 1e3 * limits.tpot_s,
        "mean_concurrency": sum(each.e2e for each in served) / seconds,
        **{name: value for key, values in waits.items() for name, value in _spread(key, values)},
    }


def _spread(name: str, seconds: Sequence[float]) -> list[tuple[str, float | None]]:
    """Mean and percentiles in milliseconds; None without any value."""
    if not seconds:
        return [(f"{name}_{kind}_ms", None) for kind in ("mean", *(f"p{p}" for p in PERCENTS))]
    mean = 1e3 * sum(seconds) / len(seconds)
    percents = [(f"{name}_p{p}_ms", 1e3 * percentile(seconds, p)) for p in PERCENTS]
    return [(f"{name}_mean_ms", mean), *percents]
