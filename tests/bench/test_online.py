from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from pageforge.bench import online
from pageforge.bench.online import Arrivals, Limits, Served, arrival_times, summary
from pageforge.bench.workloads import Job


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def variation(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


def test_arrivals_are_the_same_every_time_and_only_stretched_by_the_rate() -> None:
    times = arrival_times(200, 4)
    assert times == arrival_times(200, 4)
    assert times != arrival_times(200, 4, seed=1)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(50)
    assert arrival_times(200, 8) == pytest.approx([moment / 2 for moment in times])


@pytest.mark.parametrize(("burstiness", "expected"), [(1, 1), (0.25, 2), (16, 0.25)])
def test_gaps_vary_as_much_as_asked(burstiness: float, expected: float) -> None:
    """A Gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    found = gaps(arrival_times(20_000, 10, burstiness=burstiness))
    assert statistics.fmean(found) == pytest.approx(0.1)
    assert variation(found) == pytest.approx(expected, rel=0.05)


def test_a_poisson_process_has_exponential_gaps() -> None:
    found = gaps(arrival_times(20_000, 10))
    for share in (0.5, 1, 2):
        longer = sum(gap > share * 0.1 for gap in found) / len(found)
        assert longer == pytest.approx(math.exp(-share), abs=0.01)


class Clock:
    """Stands for the module `time`: it goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(online, "time", clock)
    return clock


def test_requests_are_handed_over_when_their_time_has_come(clock: Clock) -> None:
    jobs = [Job([number], 1) for number in range(4)]
    arrivals = Arrivals(jobs, [0.5, 0.75, 0.75, 3.0])
    assert (arrivals.due(), arrivals.seconds_left, bool(arrivals)) == ([], 0.5, True)
    arrivals.wait()
    assert arrivals.due() == [(0, jobs[0])]
    assert arrivals.due() == []
    clock.now += 1  # a step that takes long
    assert arrivals.due() == [(1, jobs[1]), (2, jobs[2])]
    assert arrivals.now() == 1.5
    arrivals.wait()
    assert clock.slept == [0.5, 1.5]
    assert arrivals.due() == [(3, jobs[3])]
    assert (bool(arrivals), arrivals.seconds_left, arrivals.due()) == (False, math.inf, [])


def test_definitions() -> None:
    served = Served(arrived=1.0, started=1.5, tokens=[2.0, 2.5, 4.0])
    assert (served.ttft, served.e2e, served.tpot, served.itl) == (1.0, 3.0, 1.0, [0.5, 1.5])
    assert served.meets(Limits(1.0, 1.0))
    assert not served.meets(Limits(0.9, 1.0))
    assert not served.meets(Limits(1.0, 0.9))
    single = Served(0.0, 0.0, [1.0])
    assert (single.ttft, single.e2e, single.tpot, single.itl) == (1.0, 1.0, None, [])
    assert single.meets(Limits(1.0, 0.0))


def test_a_summary() -> None:
    served = [
        Served(1.0, 1.0, [2.0, 3.0, 4.0]),  # a token a second
        Served(2.0, 5.0, [6.0, 6.5]),  # late, then fast
        Served(3.0, 3.5, [4.0]),
        Served(4.0, 4.0, [4.5, 5.0, 10.0]),
    ]
    found = summary(served, Limits(ttft_s=1.0, tpot_s=1.0))
    assert found["run_s"] == 10.0
    assert found["achieved_per_s"] == 0.4
    assert found["output_tokens_per_s"] == 0.9
    assert found["goodput_per_s"] == 0.2  # the first and the third
    assert found["goodput_share"] == 0.5
    assert (found["ttft_limit_ms"], found["tpot_limit_ms"]) == (1000, 1000)
    assert found["mean_concurrency"] == pytest.approx((3 + 4.5 + 1 + 6) / 10)
    assert found["ttft_mean_ms"] == pytest.approx(1000 * (1 + 4 + 1 + 0.5) / 4)
    assert (found["ttft_p50_ms"], found["ttft_p90_ms"], found["ttft_p99_ms"]) == (1000, 4000, 4000)
    assert found["tpot_mean_ms"] == pytest.approx(1000 * (1 + 0.5 + 2.75) / 3)
    assert found["itl_mean_ms"] == pytest.approx(1000 * (1 + 1 + 0.5 + 0.5 + 5) / 5)
    assert found["itl_p99_ms"] == 5000
    assert found["e2e_p50_ms"] == 3000
    assert (found["queued_p50_ms"], found["queued_p99_ms"]) == (0, 3000)


def test_answers_of_one_token_have_no_time_a_token() -> None:
    found = summary([Served(0.0, 0.0, [1.0])], Limits(2.0, 1.0))
    assert found["tpot_mean_ms"] is found["itl_p99_ms"] is None
    assert found["ttft_p50_ms"] == 1000
