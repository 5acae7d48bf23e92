from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence

import pytest
from tests.bench.conftest import REQUESTS, only

from pageforge.bench import serving, throughput
from pageforge.bench.harness import Budget
from pageforge.bench.lanes import Race
from pageforge.bench.online import Served
from pageforge.bench.serving import Server, Setting, Way
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Job


def nothing(jobs: list[Job], times: Sequence[float]) -> list[Served]:
    raise NotImplementedError


def failing(*, at_call: int, error: Exception | None = None, new_tokens: int = 0) -> Way:
    """A way that answers rightly, but from one call on fails or gives too few tokens."""

    @contextlib.contextmanager
    def opened(setting: Setting) -> Iterator[Server]:
        calls = 0

        def answer(jobs: list[Job]) -> list[list[int]]:
            nonlocal calls
            calls += 1
            if calls < at_call:
                return [[0] * job.new_tokens for job in jobs]
            if error is not None:
                raise error
            return [[0] * new_tokens for _ in jobs]

        if at_call == 0:
            raise ImportError("not installed")
        yield Server(answer, nothing)

    return Way(opened, repeats=2)


def noting(name: str, order: list[str], seen: list[tuple[int, ...]], **options: bool) -> Way:
    """A way that notes when it is asked, and for what."""

    @contextlib.contextmanager
    def opened(setting: Setting) -> Iterator[Server]:
        def answer(jobs: list[Job]) -> list[list[int]]:
            order.append(name)
            seen.extend(tuple(job.prompt) for job in jobs)
            return [[0] * job.new_tokens for job in jobs]

        yield Server(answer, nothing)

    return Way(opened, repeats=2, **options)


def race(bench: ThroughputBench) -> Race:
    return Race(bench, "uniform", lambda repeat: bench.jobs("uniform", repeat))


def test_a_way_that_fails_becomes_a_row_and_the_others_go_on(
    tiny: ThroughputBench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    ways = {
        "absent": failing(at_call=0),
        "at once": failing(at_call=1, error=ValueError("no")),
        "later": failing(at_call=2, error=RuntimeError("out of luck")),
        "too few": failing(at_call=1, new_tokens=1),
        "engine": serving.WAYS["engine"],
    }
    monkeypatch.setattr(throughput, "WAYS", ways)
    tiny.ways = list(ways)
    throughput.compare(tiny, "uniform")
    found = {r["way"]: r for r in only(tiny.report.records, section="throughput")}
    assert found["absent"]["failure"] == "absent: not installed"
    assert found["at once"]["failure"] == "ValueError: no"
    assert found["later"]["failure"] == "RuntimeError: out of luck"
    assert found["too few"]["failure"].startswith("ArithmeticError: expected 384 new tokens")
    assert found["engine"]["tokens_per_s"] > 0
    assert "later: RuntimeError: out of luck" in screen.getvalue()


def test_every_repeat_has_prompts_of_its_own_and_ways_take_turns(tiny: ThroughputBench) -> None:
    order: list[str] = []
    seen: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    ways = {name: noting(name, order, seen[name]) for name in seen}
    with contextlib.ExitStack() as stack:
        race(tiny).run(ways, stack)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert seen["a"] == seen["b"]
    assert len(set(seen["a"])) == 3 * REQUESTS


def test_each_run_is_recorded_when_it_is_over(tiny: ThroughputBench) -> None:
    known: list[list[tuple[str, int]]] = []

    class Order(list):
        def append(self, name: str) -> None:
            known.append([(r["way"], r["run"]) for r in only(tiny.report.records, section="run")])

    ways = {"a": noting("a", Order(), []), "b": noting("b", Order(), [], apart=True)}
    tiny.repeats = 1
    with contextlib.ExitStack() as stack:
        race(tiny).run(ways, stack)
    runs = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert known == [runs[:count] for count in range(4)]
    for record in only(tiny.report.records, section="run"):
        assert record["tokens_per_s"] == pytest.approx(REQUESTS * 16 / record["run_s"])
        assert record["workload"] == "uniform"


def test_without_repeats_the_first_run_counts(tiny: ThroughputBench) -> None:
    tiny.repeats = 0
    lanes = race(tiny)
    with contextlib.ExitStack() as stack:
        lanes.run({"a": noting("a", [], [])}, stack)
    found = lanes.lanes["a"].rates(tiny.jobs("uniform", 0))
    assert found["repeats"] == 0
    assert found["tokens_per_s"] == pytest.approx(REQUESTS * 16 / found["first_run_s"])


def test_what_there_is_no_time_for_is_left_out_by_name(tiny: ThroughputBench) -> None:
    """A way that has begun is timed once in any case."""

    class Patience(Budget):
        def allows(self, what: str) -> bool:
            self.asked = [*getattr(self, "asked", []), what]
            if len(self.asked) > 1:
                self.left_out.append(what)
            return len(self.asked) == 1

    tiny.budget = Patience(None)
    order: list[str] = []
    ways = {name: noting(name, order, []) for name in "ab"}
    lanes = race(tiny)
    with contextlib.ExitStack() as stack:
        lanes.run(ways, stack)
    assert order == ["a", "a"]
    assert list(lanes.lanes) == ["a"]
    assert lanes.failures == {}
    assert tiny.budget.left_out == ["uniform: b", "uniform: a, run 2"]
