from __future__ import annotations

import io

import pytest
from tests.bench.conftest import only
from tests.bench.test_lanes import failing

from pageforge.bench import arrivals as section
from pageforge.bench import throughput
from pageforge.bench.harness import Budget
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Size

FAST = (2000, 5000)
"""Percent of a way's rate: so much that nobody waits for requests to come."""


@pytest.fixture
def arriving(tiny: ThroughputBench) -> ThroughputBench:
    tiny.size = Size(128, shrink=8, requests=6)
    tiny.arrivals, tiny.loads, tiny.repeats = ("azure-chat", "uniform"), FAST, 1
    return tiny


def test_a_record_for_every_rate(arriving: ThroughputBench, screen: io.StringIO) -> None:
    throughput.run(arriving, ["arrivals"])
    records = arriving.report.records
    assert not any("failure" in record for record in records), records
    found = only(records, section="arrivals")
    assert [(r["workload"], r["way"], r["load_percent"]) for r in found] == [
        (workload, way, load)
        for workload, way in (
            ("azure-chat", "engine"),
            ("uniform", "engine"),
            ("uniform", "generate"),
        )
        for load in FAST
    ]
    for record in found:
        jobs = arriving.jobs(record["workload"], 0)
        assert record["requests"] == 6
        assert record["new_tokens"] == sum(job.new_tokens for job in jobs)
        assert record["rate_per_s"] == pytest.approx(
            record["load_percent"] / 100 * record["offline_per_s"]
        )
        assert record["burstiness"] == 1
        assert record["achieved_per_s"] == pytest.approx(6 / record["run_s"])
        assert record["output_tokens_per_s"] == pytest.approx(
            record["new_tokens"] / record["run_s"]
        )
        assert record["goodput_per_s"] == pytest.approx(
            record["goodput_share"] * record["achieved_per_s"]
        )
        for name in ("ttft", "itl", "e2e", "queued"):
            low, middle, high = (record[f"{name}_p{percent}_ms"] for percent in (50, 90, 99))
            assert 0 <= low <= middle <= high
            assert record[f"{name}_mean_ms"] <= high
        assert record["queued_p99_ms"] <= record["ttft_p99_ms"] <= record["e2e_p99_ms"]
    assert [r["divisor"] for r in found] == [37, 37, 8, 8, 8, 8]
    assert {r.get("preemptions") for r in found} == {0, None}
    assert "tiny, azure-chat, arriving: 6 requests" in screen.getvalue()
    runs = only(records, section="run", workload="arrivals, uniform", way="engine")
    assert [r["run"] for r in runs] == [0, 1]


def test_a_way_that_fails_becomes_a_row_and_the_others_go_on(
    arriving: ThroughputBench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    ways = section.WAYS | {
        "absent": failing(at_call=0),
        "only at once": failing(at_call=9),
    }
    monkeypatch.setattr(section, "WAYS", ways)
    arriving.ways, arriving.arrivals = ["absent", "only at once", "engine"], ("uniform",)
    section.arrivals(arriving)
    found = only(arriving.report.records, section="arrivals")
    assert [r.get("failure") for r in found] == [
        "absent: not installed",
        "NotImplementedError: no message",
        None,
        None,
    ]
    assert found[0]["requests"] == 6
    assert "absent: absent: not installed" in screen.getvalue()


def test_rates_for_which_there_is_no_time_are_named(arriving: ThroughputBench) -> None:
    arriving.budget = Budget(0)
    section.arrivals(arriving)
    assert only(arriving.report.records, section="arrivals") == []
    assert arriving.budget.left_out == [
        "arrivals, azure-chat: engine",
        "arrivals, uniform: engine",
        "arrivals, uniform: generate",
    ]


def test_repeats_have_prompts_of_their_own(
    arriving: ThroughputBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    jobs = ThroughputBench.jobs

    def noted(bench: ThroughputBench, workload: str, repeat: int):
        seen.append(repeat)
        return jobs(bench, workload, repeat)

    monkeypatch.setattr(ThroughputBench, "jobs", noted)
    arriving.arrivals = ("azure-chat",)
    section.arrivals(arriving)
    assert [repeat for repeat in seen if repeat] == [1, 3, 4]
