"""The sharing benchmark on a tiny model on the CPU: bytes, pages and copies, counted by hand."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge.bench import sharing
from pageforge.bench.branches import Paged, Step
from pageforge.bench.families import make_attentive
from pageforge.bench.harness import Budget
from pageforge.bench.memory_use import MemoryUse
from pageforge.bench.models import twin
from pageforge.bench.report import Report
from pageforge.bench.run import Run
from pageforge.bench.sharing import BASE, CASES, SYSTEM_PROMPT, SharingBench, Way
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

PAGE = 8
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""2 layers, K and V, 2 heads of 16 dims in fp32."""


@pytest.fixture(scope="module")
def model():
    return make_attentive("tiny", CPU)


@pytest.fixture
def tiny(model, report: Report, screen: io.StringIO) -> SharingBench:
    return SharingBench(
        model,
        "tiny",
        "random",
        report,
        Console(file=screen, width=200),
        Budget(None),
        branches=3,
        prompt=21,
        own=3,
        new_tokens=6,
        page_size=PAGE,
    )


def test_a_run(tiny: SharingBench, screen: io.StringIO) -> None:
    sharing.run(tiny)
    found = only(tiny.report.records, section="sharing")
    assert [(r["case"], r["way"]) for r in found] == [
        (case, way) for case, ways in CASES.items() for way in ways
    ]
    for record in found:
        steps = only(tiny.report.records, section="steps", case=record["case"], way=record["way"])
        assert [step["step"] for step in steps] == list(range(record["steps"]))
        assert "failure" not in record
        assert record["cache_peak_bytes"] == max(step["cache_bytes"] for step in steps)
        assert record["dynamic_over"] > 0
        assert record.get("same_tokens", 1) == 1  # fp32: no ties
        if record["way"] == BASE:
            assert record["pages_left"] is record["pages_used"] is None
            assert all(step["pages_used"] is None for step in steps)
            continue
        assert record["pages_left"] == 0  # claimed = returned
        for step in steps:
            assert step["cache_bytes"] >= step["pages_bytes"] > 0
            assert step["pages_bytes"] == step["pages_used"] * PAGE * TOKEN_BYTES
            assert step["pages_used"] <= step["pages_named"]
            assert step["pages_used"] * PAGE >= step["tokens"] / tiny.branches
        copied = [step["pages_copied"] for step in steps]
        assert copied == sorted(copied)
        assert record["pages_copied"] == copied[-1]
    assert "tiny, system prompt: 3 sequences, 21 tokens in common" in screen.getvalue()


def of(tiny: SharingBench, case: str, way: str) -> list[dict]:
    tiny.cases = {case: {name: CASES[case][name] for name in (BASE, way)}}
    sharing.run(tiny)
    assert not [r for r in tiny.report.records if "failure" in r]
    return only(tiny.report.records, section="steps", case=case, way=way)


def test_dense_caches_hold_each_token_of_each_sequence(tiny: SharingBench) -> None:
    of(tiny, SYSTEM_PROMPT, "engine")
    steps = only(tiny.report.records, section="steps", way=BASE)
    # The system prompt, and then for each question itself and all tokens but the last.
    assert len(steps) == 1 + 3 * 6
    assert steps[0]["tokens"] == 21
    assert steps[-1]["tokens"] == 21 + 3 * (21 + 3 + 5)
    assert all(step["cache_bytes"] == step["tokens"] * TOKEN_BYTES for step in steps)


def test_a_prompt_computed_once_lies_in_pages_once(tiny: SharingBench) -> None:
    steps = of(tiny, "samples", "pageforge, prompt once")
    # 20 tokens before generate begins; the prompt's last one goes to the third page.
    assert [step["pages_used"] for step in steps] == [3, *[2 + 3] * 4, *[2 + 3 + 3] * 2]
    assert [step["pages_named"] for step in steps] == [3, *[3 * 3] * 4, *[3 * 4] * 2]
    assert [step["pages_shared"] for step in steps] == [0, *[2] * 6]
    assert [step["pages_copied"] for step in steps] == [0, *[2] * 6]  # the last holder writes on it


def test_forks_share_whole_pages_and_copy_one_each(tiny: SharingBench) -> None:
    steps = of(tiny, SYSTEM_PROMPT, "pageforge, forks")
    last = steps[-1]
    # 21 tokens: two whole pages, and a third of which each of the three has a copy of its own.
    assert (last["pages_shared"], last["pages_copied"]) == (2, 3)
    # The prompt's own three, and of each fork those of tokens 16 to 28.
    assert last["pages_used"] == 3 + 3 * 2
    assert last["pages_named"] == 3 + 3 * 4


def test_drop_in_samples_share_nothing(tiny: SharingBench) -> None:
    steps = of(tiny, "samples", "paged")
    assert {step["pages_shared"] for step in steps} == {0}
    assert {step["pages_used"] - step["pages_named"] for step in steps} == {0}


def test_drop_in_beams_share_after_the_first_step(tiny: SharingBench) -> None:
    first, second, *_ = of(tiny, "beams", "paged")
    assert first["pages_used"] == 3 * 3
    assert first["pages_shared"] == 0
    assert second["pages_used"] == 2 + 3
    assert second["pages_copied"] == 2


def test_a_way_that_explodes_is_noted_and_the_others_go_on(tiny: SharingBench) -> None:
    freed = []

    class Noted(Paged):
        def free(self) -> int:
            freed.append(self)
            return super().free()

    def explodes(bench, caches):
        caches.new()
        raise RuntimeError("out of luck")

    tiny.cases = {"samples": {"bad": Way(Noted, explodes), "paged": CASES["samples"]["paged"]}}
    sharing.run(tiny)
    bad, good = only(tiny.report.records, section="sharing")
    assert bad["failure"] == "RuntimeError: out of luck"
    assert len(freed) == 1
    assert good["pages_left"] == 0
    assert "dynamic_over" not in good  # there was nothing to hold it against


def test_a_pool_that_loses_pages_shows(tiny: SharingBench) -> None:
    class Losing(Paged):
        def free(self) -> int:
            self.forgotten = self._live.pop()
            return super().free()

    tiny.cases = {"samples": {"losing": Way(Losing, sharing.samples)}}
    sharing.run(tiny)
    (record,) = only(tiny.report.records, section="sharing")
    assert record["pages_left"] > 0


def test_pages_that_are_not_shared_show(
    tiny: SharingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks that copied everything at once would use a page for each name."""
    fork = PagePool.fork

    def copied(pool, table):
        child = fork(pool, table)
        own = pool.new_table()
        pool.append([own], child.length)
        pool.release([child])
        return own

    monkeypatch.setattr(PagePool, "fork", copied)
    tiny.cases = {"samples": {"paged": CASES["samples"]["pageforge, prompt once"]}}
    sharing.run(tiny)
    steps = only(tiny.report.records, section="steps")
    assert steps[-1]["pages_shared"] == 0
    assert steps[-1]["pages_used"] == steps[-1]["pages_named"] == 3 * 4


def test_looking_changes_nothing(model) -> None:
    with torch.no_grad():
        held = Paged(twin(model), PAGE)
        plain, steps = [], []
        tokens, argument = torch.arange(10)[None], cache_argument(model)
        for watched in (False, True):
            cache = held.new()
            if watched:
                with held.watched(steps):
                    plain.append(held.model(tokens, **{argument: cache}).logits)
            else:
                plain.append(held.model(tokens, **{argument: cache}).logits)
        assert torch.equal(*plain)
        assert len(steps) == 1
        assert not held.model._forward_hooks
        assert "append" not in vars(held._pool)
        assert held.free() == 0


def test_the_steps_that_are_recorded_are_even() -> None:
    assert sharing._evenly(1) == [0]
    assert sharing._evenly(5) == [0, 1, 2, 3, 4]
    many = sharing._evenly(1000)
    assert (len(many), many[0], many[-1]) == (sharing.MOST_STEPS, 0, 999)
    assert set(Counter(b - a for a, b in pairwise(many))) == {7, 8}


def test_what_there_is_no_time_for_is_named(tiny: SharingBench) -> None:
    tiny.budget = Budget(0)
    sharing.run(tiny)
    assert "beams, dynamic" in tiny.budget.left_out
    assert tiny.report.records == []


def test_a_quick_run_is_of_a_tiny_model(report: Report) -> None:
    run_of = Run(CPU, report, Console(file=io.StringIO()), Budget(None), quick=True)
    bench = sharing.bench_of(run_of)
    assert (bench.name, bench.weights, bench.branches) == ("tiny", "random", 8)
    assert bench.prompt + bench.own + bench.new_tokens < 128


def test_peaks_need_every_step() -> None:
    steps = [Step(3, 10, 8, 1, 1, 0, 0), Step(4, 30, 8, 2, 3, 1, 2)]
    most = sharing._most(steps, MemoryUse(mapped_bytes=5, peak_bytes=40))
    assert (most["cache_peak_bytes"], most["cache_end_bytes"], most["peak_bytes"]) == (30, 30, 40)
    on_cuda = sharing._most(steps, MemoryUse(5, 40, torch_peak_bytes=100))
    assert on_cuda["peak_bytes"] == 130  # a pool is not in torch's allocator
    dense = sharing._most([Step(3, 10)], MemoryUse(5, 40, torch_peak_bytes=100))
    assert dense["peak_bytes"] == 100
    assert dense["pages_used"] is None
