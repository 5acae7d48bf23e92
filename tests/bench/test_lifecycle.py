"""Pages of two batches: where they come from and where they go."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge import PagedKVCache
from pageforge.bench import lifecycle
from pageforge.bench.harness import Budget
from pageforge.bench.kv import ModelKV
from pageforge.bench.lifecycle import LifecycleBench
from pageforge.bench.report import Report
from pageforge.bench.run import Run
from pageforge.pool import WATERMARK, PagePool

TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token of the tiny model: layers, K and V, heads, dims, fp32."""


@pytest.fixture
def tiny(report: Report, screen: io.StringIO) -> LifecycleBench:
    """Three sequences that end after 14, 27 and 40 steps."""
    console = Console(file=screen, width=200)
    kv = ModelKV.of("tiny", CPU)
    return LifecycleBench(kv, report, console, Budget(None), sequences=3, steps=40)


def test_a_run(tiny: LifecycleBench, screen: io.StringIO) -> None:
    lifecycle.run(tiny)
    records = tiny.report.records
    assert not [r for r in records if "failure" in r]
    (setting,) = only(records, section="setting")
    assert setting["pages_total"] == 4 * 3 * 4  # room for four times 53 tokens in each
    for batch in (1, 2):
        moments = only(records, section="timeline", batch=batch)
        assert [r["step"] for r in moments] == list(range(42))
        lives = [(m["step"] <= 14) + (m["step"] <= 27) + (m["step"] <= 40) for m in moments]
        assert [m["sequences"] for m in moments] == lives
        for m in moments:
            length = 13 + m["step"]
            assert m["tokens"] == m["sequences"] * length
            assert m["pages_used"] == m["sequences"] * -(-length // 16)
            assert m["pages_bytes"] == m["pages_used"] * 16 * TOKEN
            assert m["mapped_bytes"] >= m["pages_bytes"]
            if m["sequences"]:
                assert m["utilisation"] == m["tokens"] / (16 * m["pages_used"])
        assert moments[-1]["utilisation"] is None
        (whole,) = only(records, section="batch", batch=batch)
        assert whole["pages_claimed"] == whole["pages_returned"] == 2 + 3 + 4
        assert whole["pages_most"] == 6
        assert whole["mapped_peak_bytes"] == max(m["mapped_bytes"] for m in moments)
    (reuse,) = only(records, section="reuse")
    assert reuse["reused_share"] == 1
    assert reuse["pages_first"] == reuse["pages_second"] == reuse["pages_reused"] > 0
    freed, trimmed = only(records, section="afterwards")
    assert (freed["when"], freed["pages_used"]) == ("freed", 0)
    assert (trimmed["when"], trimmed["pages_used"]) == ("trimmed", 0)
    assert trimmed["mapped_bytes"] <= min(WATERMARK, freed["mapped_bytes"])
    assert "tiny: batch 2" in screen.getvalue()


def test_memory_goes_back_while_others_live(report: Report) -> None:
    """Of 4 sequences of 13 pages of 2 MiB two that end are more than the watermark."""
    kv, console = ModelKV.of("llama-8b", CPU), Console(file=io.StringIO())
    bench = LifecycleBench(kv, report, console, Budget(None), sequences=4, steps=4, prompt=200)
    lifecycle.run(bench)
    assert not [r for r in report.records if "failure" in r]
    moments = only(report.records, section="timeline", batch=1)
    assert [m["sequences"] for m in moments] == [4, 4, 3, 2, 1, 0]
    assert moments[3]["mapped_bytes"] < moments[2]["mapped_bytes"]
    assert moments[-1]["mapped_bytes"] <= WATERMARK


def test_pages_that_are_not_given_back_are_a_failure(
    tiny: LifecycleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def keep(self) -> None:
        kept.append(self)

    monkeypatch.setattr(PagedKVCache, "free", keep)
    lifecycle.run(tiny)
    records = tiny.report.records
    (reuse,) = only(records, section="reuse")
    assert (reuse["reused_share"], reuse["pages_reused"]) == (0, 0)
    assert reuse["failure"] == "expected the first batch's 9 pages, got 0 of them"
    assert all(r["pages_returned"] == 0 for r in only(records, section="batch"))
    assert all(
        r["failure"] == "expected no used page, got 18" for r in only(records, section="afterwards")
    )


def test_one_page_of_somebody_else_is_a_failure(
    tiny: LifecycleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, others = lifecycle.live, []

    def between(bench: LifecycleBench, pool: PagePool, batch: int):
        found = live(bench, pool, batch)
        others.append(PagedKVCache(pool))
        bench.kv.feed(others[-1], 1, 1)
        return found

    monkeypatch.setattr(lifecycle, "live", between)
    lifecycle.run(tiny)
    (reuse,) = only(tiny.report.records, section="reuse")
    assert reuse["pages_second"] - reuse["pages_reused"] == 1
    assert reuse["failure"].startswith("expected the first batch's")
    freed, _ = only(tiny.report.records, section="afterwards")
    assert freed["failure"] == "expected no used page, got 2"


def test_a_pool_that_keeps_memory_is_a_failure(
    tiny: LifecycleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "WATERMARK", 1)
    lifecycle.run(tiny)
    freed, trimmed = only(tiny.report.records, section="afterwards")
    assert "failure" not in freed
    assert trimmed["failure"].startswith("expected 1 bytes mapped at most")


def test_a_run_that_breaks_says_so(tiny: LifecycleBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, *args, **kwargs):
        raise MemoryError("no more")

    monkeypatch.setattr(PagePool, "append", broken)
    lifecycle.run(tiny)
    assert only(tiny.report.records, section="lifecycle") == [
        {"section": "lifecycle", "failure": "MemoryError: no more"}
    ]


def test_what_there_is_no_time_for_is_named(tiny: LifecycleBench) -> None:
    tiny.budget = Budget(0)
    lifecycle.run(tiny)
    assert [r["section"] for r in tiny.report.records] == ["setting"]
    assert tiny.budget.left_out == ["lifecycle"]


def test_sizes_of_a_run(report: Report) -> None:
    bench = lifecycle.bench_of(Run(CPU, report, Console(), Budget(None), "smollm2"))
    assert (bench.kv.name, bench.sequences, bench.steps) == ("smollm2", 8, 500)
    quick = lifecycle.bench_of(Run(CPU, report, Console(), Budget(None), quick=True))
    assert (quick.kv.name, quick.sequences) == ("gpt2", 8)
    assert quick.steps < bench.steps
