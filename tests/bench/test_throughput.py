"""The throughput benchmark on a tiny model on the CPU: what it counts, not how fast that is."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only
from transformers import LlamaConfig, LlamaForCausalLM

from pageforge.bench import ceilings, engine_probe, serving, throughput
from pageforge.bench.engine_probe import Costs, StepLog, costs_of, floor_seconds
from pageforge.bench.harness import Budget
from pageforge.bench.models import make_model, make_tokenizer
from pageforge.bench.report import Report
from pageforge.bench.serving import Server, Setting, Way
from pageforge.bench.throughput_context import ThroughputBench
from pageforge.bench.workloads import Job, Size
from pageforge.engine.engine import Engine
from pageforge.probe import geometry_of

REQUESTS = 24


@pytest.fixture(scope="module")
def model():
    return make_model("tiny", CPU)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(256)


@pytest.fixture
def tiny(
    model, tokenizer, report: Report, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> ThroughputBench:
    """A run of a second; its ceilings are those of the processor's caches."""
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(ceilings.MATRIX, "cpu", 64)
    return ThroughputBench(
        model,
        "tiny",
        tokenizer,
        report,
        Console(file=screen, width=200),
        Budget(None),
        Size(128, shrink=8, requests=REQUESTS),
        repeats=2,
        running=(4,),
        host_steps=3,
    )


def test_a_run(tiny: ThroughputBench, screen: io.StringIO) -> None:
    tiny.repeats = 1
    throughput.run(tiny)
    records = tiny.report.records
    assert all("failure" not in record for record in records), records
    (rates,) = only(records, section="ceilings")
    assert rates["read_bytes_per_s"] > 0
    assert rates["matmul_flops_per_s"] > 0
    made = only(records, section="first-token")
    assert [r["when"] for r in made] == ["first in this process", "again"]
    assert all(0 < r["made_s"] < r["first_token_s"] for r in made)

    ways = {"uniform": ["engine", "generate", "one by one"], "sharegpt": ["engine"]}
    for workload, expected in ways.items():
        jobs = tiny.jobs(workload, 0)
        found = only(records, section="throughput", workload=workload)
        assert [r["way"] for r in found] == expected
        for record in found:
            assert record["requests"] == REQUESTS
            assert record["prompt_tokens"] == sum(len(job.prompt) for job in jobs)
            assert record["new_tokens"] == sum(job.new_tokens for job in jobs)
            low, high = record["tokens_per_s_low"], record["tokens_per_s_high"]
            assert 0 < low <= record["tokens_per_s"] <= high
            assert record["repeats"] == 1
        (ours,) = only(found, way="engine")
        assert ours["floor_s"] > 0
        assert 0 < ours["floor_share"] < 1
        page = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dims, bytes
        assert ours["mapped_peak_bytes"] >= ours["pages_peak"] * page
    (peer,) = only(records, section="throughput", way="generate")
    assert (peer["over_generate"], peer["floor_share"]) == (1, None)

    (shared,) = only(records, section="shared-prefix")
    assert shared["shared_tokens"] == 64
    assert shared["computed_tokens"] == shared["once_tokens"]  # 64 is whole pages
    (samples,) = only(records, section="rollout")
    assert samples["new_tokens"] == 8 * REQUESTS * 16
    assert 0.5 < samples["peak_over_once"] <= 1
    assert samples["once_pages"] < samples["apart_pages"]

    squeezed = {r["way"]: r for r in only(records, section="squeezed")}
    assert list(squeezed) == ["ample", "squeezed", "ample, as many"]
    assert all(r["same"] == REQUESTS for r in squeezed.values())
    assert squeezed["squeezed"]["pages_peak"] <= squeezed["squeezed"]["pages"]
    assert squeezed["ample"]["pages_peak"] > squeezed["squeezed"]["pages"]
    as_many = squeezed["ample, as many"]["mean_running"]
    assert as_many <= math.ceil(squeezed["squeezed"]["mean_running"])

    (host,) = only(records, section="host")
    assert (host["running"], host["steps"]) == (4, 3)
    assert 0 < host["plan_ms"] < host["next_plan_ms"] < host["host_ms"]
    assert host["idle"] is None
    assert "tiny, uniform: 24 requests" in screen.getvalue()


def test_the_run_leaves_everything_as_it_was(tiny: ThroughputBench, model) -> None:
    level = logging.getLogger("pageforge.engine").level
    attention = model.config._attn_implementation
    tiny.ways = ["engine", "generate_batch"]
    throughput.run(tiny, ["uniform", "host"])
    assert [r["way"] for r in only(tiny.report.records, section="throughput")] == tiny.ways
    assert logging.getLogger("pageforge.engine").level == level
    assert model.config._attn_implementation == attention
    assert {r["section"] for r in tiny.report.records} == {"ceilings", "throughput", "host"}


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
        yield Server(answer)

    return Way(opened, repeats=2)


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
    found = {r["way"]: r for r in tiny.report.records}
    assert found["absent"]["failure"] == "absent: not installed"
    assert found["at once"]["failure"] == "ValueError: no"
    assert found["later"]["failure"] == "RuntimeError: out of luck"
    assert found["too few"]["failure"].startswith("ArithmeticError: expected 384 new tokens")
    assert found["engine"]["tokens_per_s"] > 0
    assert "later: RuntimeError: out of luck" in screen.getvalue()


def test_a_part_that_fails_is_noted_and_the_others_go_on(
    tiny: ThroughputBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: ThroughputBench) -> None:
        raise ValueError("no")

    sections = {"rollout": broken, "host": throughput.host}
    monkeypatch.setattr(throughput, "SECTIONS", sections)
    throughput.run(tiny)
    assert only(tiny.report.records, section="rollout") == [
        {"section": "rollout", "failure": "ValueError: no"}
    ]
    assert only(tiny.report.records, section="host")


def test_what_there_is_no_time_for_is_named(tiny: ThroughputBench) -> None:
    tiny.budget = Budget(0)
    throughput.run(tiny)
    assert [record["section"] for record in tiny.report.records] == ["ceilings"]
    assert tiny.budget.left_out == list(throughput.SECTIONS)


def test_every_repeat_has_prompts_of_its_own_and_ways_take_turns(tiny: ThroughputBench) -> None:
    seen: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    order: list[str] = []

    def way(name: str) -> Way:
        @contextlib.contextmanager
        def opened(setting: Setting) -> Iterator[Server]:
            def answer(jobs: list[Job]) -> list[list[int]]:
                order.append(name)
                seen[name].extend(tuple(job.prompt) for job in jobs)
                return [[0] * job.new_tokens for job in jobs]

            yield Server(answer)

        return Way(opened, repeats=2)

    ways = {name: way(name) for name in seen}
    with contextlib.ExitStack() as stack:
        throughput.race(tiny, ways, lambda repeat: tiny.jobs("uniform", repeat), stack)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert seen["a"] == seen["b"]
    assert len(set(seen["a"])) == 3 * REQUESTS


def test_outputs_that_differ_are_counted_and_the_gap_is_said(model) -> None:
    prompt = [5, 6, 7]
    logits = model(torch.tensor([[*prompt, 1]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    jobs = [Job(prompt, 3), Job([1, 2], 3)]
    ours, others = [[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]
    found = throughput.sameness(model, jobs, ours, others)
    assert (found["same"], found["differing"]) == (1, 1)
    assert found["largest_gap"] == pytest.approx(best - second, rel=1e-3)
    assert throughput.sameness(model, jobs, ours, ours)["largest_gap"] is None


def test_generate_answers_what_one_by_one_does(model, tokenizer) -> None:
    jobs = [Job([1, 2, 3], 4), Job([9], 2), Job([4] * 20, 3)]
    setting = Setting(model, tokenizer, jobs)
    answers = []
    for way in ("one by one", "generate", "engine", "generate_batch"):
        with serving.WAYS[way].open(setting) as server, torch.no_grad():
            answers.append(server(jobs))
    assert all(answer == answers[0] for answer in answers)


# --- the floor ------------------------------------------------------------------------------


def test_a_step_takes_what_memory_or_arithmetic_takes() -> None:
    costs = Costs(weight_bytes=1000, kv_bytes=10, token_flops=7, logit_flops=3, pair_flops=2)
    # Two rows decode; then one row computes 3 tokens after 2 others: pairs 3 + 4 + 5.
    log = StepLog(
        counts=[np.array([1, 1], np.int32), np.array([3], np.int32)],
        lengths=[np.array([4, 6], np.int32), np.array([5], np.int32)],
        logits=[2, 1],
    )
    assert log.mean_running == 1.5
    moved = [1000 + 10 * 10, 1000 + 5 * 10]
    work = [2 * 7 + 2 * 3 + 10 * 2, 3 * 7 + 3 + 12 * 2]
    assert floor_seconds(log, costs, read=100, flops=1e9) == pytest.approx(sum(moved) / 100)
    assert floor_seconds(log, costs, read=1e9, flops=2) == pytest.approx(sum(work) / 2)
    between = floor_seconds(log, costs, read=100, flops=4)
    assert between == pytest.approx(max(11, work[0] / 4) + max(10.5, work[1] / 4))


@pytest.mark.parametrize("tied", [True, False])
def test_costs_are_those_of_the_weights_that_a_step_reads(tied: bool) -> None:
    hidden, vocab, middle = 16, 64, 32
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    costs = costs_of(model, geometry_of(model, 16))
    layer = hidden * 32 * 2 + hidden * 16 * 2 + 3 * hidden * middle + 2 * hidden
    body = 3 * layer + hidden
    assert costs.weight_bytes == 4 * (body + vocab * hidden)
    assert costs.token_flops == 2 * body
    assert costs.logit_flops == 2 * vocab * hidden
    assert costs.kv_bytes == 3 * 2 * 2 * 8 * 4
    assert costs.pair_flops == 3 * 4 * 4 * 8  # q k and p v, a multiplication and a sum each


# --- probes ---------------------------------------------------------------------------------


def test_a_log_has_every_token_once(model, tokenizer) -> None:
    jobs = [Job([1, 2, 3], 4), Job([9], 2), Job([4] * 20, 3)]
    with Engine(model, tokenizer, prefix_cache=False, max_batch_tokens=8) as engine:
        with engine_probe.logged(engine) as log:
            engine.generate([job.prompt for job in jobs], [serving.params_of(job) for job in jobs])
        assert "launch" not in vars(engine._core.runner)
        assert engine.stats().num_computed_tokens == sum(int(c.sum()) for c in log.counts)
    assert sum(int(c.sum()) for c in log.counts) == sum(job.num_tokens - 1 for job in jobs)
    assert sum(log.logits) == sum(job.new_tokens for job in jobs)
    assert max(int(lengths.max()) for lengths in log.lengths) == 22
    assert max(len(counts) for counts in log.counts) <= 3
    assert log.pages_peak >= 2
    assert log.mapped_peak > 0


class Thing:
    def method(self) -> str:
        return "own"


def test_a_replaced_method_is_put_back_also_after_an_exception() -> None:
    thing, other = Thing(), Thing()
    seconds: list[float] = []
    with pytest.raises(ValueError), engine_probe.clocked(thing, "method", seconds):
        assert thing.method() == "own"
        assert len(seconds) == 1
        raise ValueError
    assert vars(thing) == {}
    before = vars(Thing)["method"]
    with engine_probe.clocked(Thing, "method", seconds):
        assert other.method() == "own"
        assert len(seconds) == 2
    assert vars(Thing)["method"] is before


def test_sequences_that_end_too_early_are_no_steady_run(model, tokenizer) -> None:
    jobs = [Job([1, 2, 3], 12), Job([4, 5], 40)]
    with (
        Engine(model, tokenizer) as engine,
        pytest.raises(RuntimeError, match="expected 2 sequences all the time, got 1"),
    ):
        engine_probe.host_work(engine, jobs, steps=8)


def test_the_made_up_tokenizer_knows_every_token(tokenizer) -> None:
    words = [tokenizer.decode([token]) for token in range(256)]
    assert len(set(words)) == 256
    assert tokenizer.decode([0, 27]) == " a ab"
