"""The allocator's benchmark: what it counts, not how fast that is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge.bench import allocator
from pageforge.bench.allocator import LOADS, AllocatorBench, Load, call_times, stress
from pageforge.bench.harness import Budget
from pageforge.bench.report import Report
from pageforge.bench.run import Run
from pageforge.memory import PageAllocator, PageTable


@pytest.fixture
def small(report: Report, screen: io.StringIO) -> AllocatorBench:
    console = Console(file=screen, width=200)
    return AllocatorBench(
        report, console, Budget(None), sizes=(64, 5000), calls=100, rounds=3, cycles=4
    )


def test_a_run(small: AllocatorBench, screen: io.StringIO) -> None:
    allocator.run(small)
    found, *speeds = small.report.records
    assert (found["section"], found["cycles"]) == ("stress", 4)
    assert found["pages_claimed"] == found["pages_returned"] == 4 * 16 * 8
    assert (found["leaks"], found["errors"], found["first_error"]) == (0, 0, None)
    assert "failure" not in found
    assert [(r["pages_total"], r["load"]) for r in speeds] == [
        (size, load) for size in (64, 5000) for load in LOADS
    ]
    for r in speeds:
        assert 0 < r["pages_per_s_low"] <= r["pages_per_s"] <= r["pages_per_s_high"]
        assert 0 < r["allocate_p50_us"] <= r["allocate_p99_us"]
        assert 0 < r["release_p50_us"] <= r["release_p99_us"]
        assert r["leaks"] == 0
    assert "8 pages a call" in screen.getvalue()
    assert "no leaks, no errors" in screen.getvalue()


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("num_pages", [16, 100, 3000])
def test_a_load_makes_its_calls_and_leaves_the_pool_as_it_was(name: str, num_pages: int) -> None:
    pool = LOADS[name].make(num_pages)
    before = pool.num_used, pool.num_cached, pool.num_free
    calls = []
    allocate = pool.allocate
    pool.allocate = lambda count: calls.append(count) or allocate(count)  # type: ignore[method-assign]
    assert LOADS[name].run(pool, 150) > 0
    assert calls == [8] * 150
    assert (pool.num_used, pool.num_cached, pool.num_free) == before
    pool.check_invariants()


def test_what_each_load_begins_with() -> None:
    fresh, scattered, cached = (LOADS[name].make(1000) for name in LOADS)
    assert (fresh.num_used, fresh.num_free) == (0, 1000)
    assert (scattered.num_used, scattered.num_free) == (500, 500)
    runs = sum(scattered.count(page) != scattered.count(page + 1) for page in range(1, 1000))
    assert runs > 400  # as good as each page by chance
    assert (cached.num_cached, cached.num_used) == (1000, 0)


def test_cached_pages_are_really_evicted() -> None:
    pool, evicted = allocator.all_cached(64), []
    pool.on_evict = evicted.append
    allocator.evicting(pool, 16)
    assert len(evicted) == 16 * 8
    assert set(evicted) == set(range(1, 65))


def test_times_are_of_each_call_alone() -> None:
    pool = PageAllocator(100)
    slept = []

    def run(pool: PageAllocator, calls: int) -> float:
        for _ in range(calls):
            pool.release(pool.allocate(8))
            slept.append(sum(range(20_000)))  # between the calls
        return 1.0

    begin = PageAllocator.allocate
    found = call_times(Load(PageAllocator, run), pool, 20)
    assert list(found) == ["allocate_p50_us", "allocate_p99_us", "release_p50_us", "release_p99_us"]
    assert len(slept) == 20
    assert "allocate" not in vars(pool)
    assert pool.allocate.__func__ is begin  # type: ignore[attr-defined]


def test_a_pool_too_large_to_be_all_cached_is_left_out(
    small: AllocatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADS, "evicting", Load(allocator.all_cached, allocator.evicting, 1000))
    allocator.speed(small)
    assert [r["pages_total"] for r in only(small.report.records, load="evicting")] == [64]


def test_a_page_that_a_load_loses_is_seen(
    small: AllocatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = PageAllocator.release

    def forgetful(self, pages):
        release(self, pages[1:] if len(pages) == 8 else pages)

    small.sizes, small.calls = (5000,), 20
    monkeypatch.setattr(PageAllocator, "release", forgetful)
    allocator.speed(small)
    (at_once,) = only(small.report.records, load="at once")
    assert at_once["leaks"] == (3 + 1) * 20  # rounds, and the calls on the clock


def test_stress_sees_a_leak(small: AllocatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    release = PageTable.release

    def leak(self) -> None:
        self._pages[0].pop()
        release(self)

    monkeypatch.setattr(PageTable, "release", leak)
    found = stress(range(1), 16, 8)
    assert (found.leaks, found.pages_claimed - found.pages_returned) == (16, 16)
    assert found.problem == "16 leaks, 0 errors: None"
    allocator.run(small)
    assert "leaks" in small.report.records[0]["failure"]


def test_stress_sees_a_page_handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = PageAllocator.allocate

    def twice(self, num_pages: int) -> list[int]:
        pages = allocate(self, num_pages)
        return [pages[0]] * len(pages)

    monkeypatch.setattr(PageAllocator, "allocate", twice)
    found = stress(range(3), 2, 8)
    assert found.errors
    assert "reference counts differ" in (found.first_error or "")


def test_what_there_is_no_time_for_is_named(small: AllocatorBench) -> None:
    small.budget = Budget(0)
    allocator.run(small)
    assert small.report.records == []
    assert small.budget.left_out[0] == "stress"
    assert len(small.budget.left_out) == 1 + 2 * len(LOADS)


def test_sizes_of_a_run(report: Report) -> None:
    bench = allocator.bench_of(Run(CPU, report, Console(), Budget(None)))
    assert (bench.sizes[0], bench.sizes[-1], bench.cycles) == (512, 10_000_000, 500)
    quick = allocator.bench_of(Run(CPU, report, Console(), Budget(None), quick=True))
    assert max(quick.sizes) < max(bench.sizes)
    assert quick.cycles == 500
