"""The sweep on a tiny model on the CPU: what it counts, not how fast that is."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge.bench import caches, sweep, workloads
from pageforge.bench.engine_probe import StepLog
from pageforge.bench.harness import Budget
from pageforge.bench.models import make_model, make_tokenizer
from pageforge.bench.report import Report
from pageforge.bench.run import Run
from pageforge.bench.sweep import SweepBench
from pageforge.bench.workloads import Size
from pageforge.geometry import PAGE_SIZES, pages_for

SIZES = (8, 64)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""2 layers, K and V, 2 heads of 16 dims in fp32."""


@pytest.fixture(scope="module")
def model():
    return make_model("tiny", CPU)


@pytest.fixture
def tiny(model, report: Report, screen: io.StringIO) -> SweepBench:
    return make_bench(model, report, screen)


def make_bench(model, report: Report, screen: io.StringIO) -> SweepBench:
    return SweepBench(
        model,
        "tiny",
        make_tokenizer(256),
        report,
        Console(file=screen, width=200),
        Budget(None),
        Size(128, shrink=32, requests=5),
        page_sizes=SIZES,
        batch=2,
        context=10,
        steps=5,
        repeats=1,
    )


@pytest.fixture(scope="module")
def whole(model) -> tuple[list[dict], str]:
    """The records and the screen of a run of everything."""
    screen = io.StringIO()
    bench = make_bench(model, Report("sweep", "A question?", None, {}), screen)
    sweep.run(bench)
    return bench.report.records, screen.getvalue()


def jobs_of(bench: SweepBench) -> list[workloads.Job]:
    return workloads.jobs(sweep.WORKLOAD, bench.size, vocab_size=256, repeat=0)


def test_steps(whole: tuple[list[dict], str]) -> None:
    steps = only(whole[0], section="step")
    assert [(r["way"], r["page_size"], r["batch"]) for r in steps] == [
        ("pageforge", size, 2) for size in SIZES
    ]
    for record in steps:
        assert 0 < record["p25_ms"] <= record["p75_ms"] <= record["max_ms"]
        assert 0 < record["p50_ms_low"] <= record["p50_ms_high"]
    assert min(record["over_fastest"] for record in steps) == 1


def test_kernels_need_a_gpu(whole: tuple[list[dict], str], tiny: SweepBench) -> None:
    assert only(whole[0], section="kernel") == []
    sweep.run(tiny, only=["kernel"])  # who asks for them is told
    (kernel,) = tiny.report.records
    assert kernel["failure"] == "RuntimeError: kernels are timed on CUDA, and there is none here"


def test_a_workload_in_every_pool(whole: tuple[list[dict], str]) -> None:
    runs = only(whole[0], section="workload")
    assert [(r["pool"], r["page_size"]) for r in runs] == [
        (pool, size) for pool in sweep.POOLS for size in SIZES
    ]
    for record in runs:
        assert record["page_bytes"] == record["page_size"] * TOKEN_BYTES
        assert record["tokens_per_s"] > 0
        assert record["pages_over_live"] >= 1
        assert record["mapped_over_live"] >= 1
        assert record["live_peak_bytes"] <= record["pages_peak_bytes"]
        assert record["pages_peak"] * record["page_bytes"] == record["pages_peak_bytes"]
        assert record["pages_peak_bytes"] <= record["mapped_peak_bytes"]
    small, large = only(runs, pool="ample")
    assert small["live_peak_bytes"] == large["live_peak_bytes"]
    assert small["pages_over_live"] < large["pages_over_live"]
    assert "tiny, sharegpt: 5 requests" in whole[1]


def test_smaller_pools_have_the_same_bytes_but_hold_the_longest_request(
    whole: tuple[list[dict], str], tiny: SweepBench
) -> None:
    runs = only(whole[0], section="workload")
    assert all(r["max_pages"] is None for r in only(runs, pool="ample"))
    need = min(r["pages_peak_bytes"] for r in only(runs, pool="ample"))
    longest = max(job.num_tokens for job in jobs_of(tiny))
    for pool, squeeze in (("1/2", 2), ("1/10", 10)):
        for record in only(runs, pool=pool):
            least = pages_for(longest, record["page_size"])
            assert record["max_pages"] == max(least, need // squeeze // record["page_bytes"])
            assert record["pool_bytes"] == record["max_pages"] * record["page_bytes"]
            assert record["pages_peak"] <= record["max_pages"]
            if record["page_size"] == SIZES[0]:
                assert record["pool_bytes"] < need  # it was really squeezed


def test_memory_is_summed_over_all_steps() -> None:
    log = StepLog(held=[10, 30], pages=[1, 2], in_use=[64, 128], mapped=[100, 300])
    assert sweep.memory_of(log, token_bytes=2) == {
        "live_peak_bytes": 60,
        "pages_peak_bytes": 128,
        "pages_over_live": 192 / 80,
        "mapped_over_live": 400 / 80,
    }
    assert (log.pages_peak, log.mapped_peak) == (2, 300)


def test_a_page_size_that_explodes_is_noted_and_the_others_go_on(
    tiny: SweepBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sweep.engine

    @contextlib.contextmanager
    def picky(setting, *, page_size=16, **options):
        if page_size == 64:
            raise RuntimeError("too large for me")
        with engine(setting, page_size=page_size, **options) as server:
            yield server

    @contextlib.contextmanager
    def picky_step(setting):
        if setting.page_size == 8:
            raise RuntimeError("too small for me")
        with caches.pageforge(setting) as start:
            yield start

    monkeypatch.setattr(sweep, "engine", picky)
    monkeypatch.setitem(sweep.STEP_WAYS, "cpu", {"pageforge": picky_step})
    sweep.run(tiny)
    small, large = only(tiny.report.records, section="step")
    assert small["failure"] == "RuntimeError: too small for me"
    assert large["over_fastest"] == 1
    for pool in sweep.POOLS:
        small, large = only(tiny.report.records, section="workload", pool=pool)
        assert small["tokens_per_s"] > 0
        assert large["failure"] == "RuntimeError: too large for me"


def test_an_engine_that_loses_tokens_shows(
    tiny: SweepBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = sweep.engine

    @contextlib.contextmanager
    def short(setting, **options):
        with answer(setting, **options) as server:
            own = server.answer
            object.__setattr__(server, "answer", lambda jobs: [row[:-1] for row in own(jobs)])
            yield server

    monkeypatch.setattr(sweep, "engine", short)
    sweep.workload(tiny)
    assert all("new tokens" in record["failure"] for record in tiny.report.records)


def test_without_the_ample_pool_nobody_knows_what_half_of_it_is(tiny: SweepBench) -> None:
    class Refusing(Budget):
        def allows(self, what: str) -> bool:
            return "ample" not in what

    tiny.budget = Refusing(None)
    sweep.workload(tiny)
    assert tiny.report.records == []


def test_heads_are_the_models(model) -> None:
    heads = sweep.heads_of(model)
    assert (heads.query, heads.kv, heads.dim, heads.layers) == (4, 2, 16, 2)
    assert sweep.bytes_of_token(model) == TOKEN_BYTES


def test_what_a_run_sweeps(report: Report) -> None:
    run_of = Run(CPU, report, Console(file=io.StringIO()), Budget(None), model="tiny")
    whole = sweep.bench_of(run_of)
    assert tuple(whole.page_sizes) == PAGE_SIZES
    quick = sweep.bench_of(Run(**vars(run_of) | {"quick": True}))
    assert set(quick.page_sizes) < set(PAGE_SIZES)
    assert quick.context + quick.steps < 128
    assert max(job.num_tokens for job in jobs_of(quick)) <= 128


def test_what_there_is_no_time_for_is_named(tiny: SweepBench) -> None:
    tiny.budget = Budget(0)
    sweep.run(tiny)
    assert tiny.budget.left_out == list(sweep.ON_CPU)
    assert tiny.report.records == []
