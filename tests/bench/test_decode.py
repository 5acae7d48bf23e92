"""The decode benchmark on a tiny model on the CPU: what it counts, not how fast that is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge import ops
from pageforge.bench import caches, decode, steps
from pageforge.bench.caches import WAYS, Sequences, Setting, Start
from pageforge.bench.decode_context import DecodeBench
from pageforge.bench.harness import Budget
from pageforge.bench.models import make_model, twin
from pageforge.bench.report import Report


@pytest.fixture(scope="module")
def model():
    return make_model("tiny", CPU)


@pytest.fixture
def tiny(model, report: Report, screen: io.StringIO) -> DecodeBench:
    return DecodeBench(
        model,
        "tiny",
        report,
        Console(file=screen, width=200),
        Budget(None),
        batches=(1, 2),
        prompts=(3, 10),
        steps=10,
        generated=4,
        memory_steps=20,
        ways={name: WAYS[name] for name in ("dynamic", "static", "paged", "pageforge")},
    )


def test_a_run(tiny: DecodeBench, screen: io.StringIO) -> None:
    decode.run(tiny)
    records = tiny.report.records
    found = only(records, section="step")
    assert len(found) == 2 * 2 * 4
    assert all("failure" not in record for record in found), found
    for record in found:
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"] <= record["max_ms"]
        assert record["logits_error"] < 1e-5
    assert all(r["over_dynamic"] == 1 for r in only(found, way="dynamic"))
    assert {r["cudnn"] for r in found} == {"off"}
    # 2 layers, K and V, 2 heads of 16 dims, 4 bytes; half of the steps are done on average.
    (one,) = only(found, batch=2, prompt=3, way="paged")
    assert one["kv_bytes"] == 2 * (3 + steps.WARMUP + 5) * 2 * 2 * 2 * 16 * 4
    (dynamic,) = only(records, section="generate")
    assert (dynamic["batch"], dynamic["new_tokens"], dynamic["over_dynamic"]) == (2, 4, 1)
    (paged,) = only(records, section="memory", way="paged")
    # Two rows of 23 tokens take two pages each, of 2 layers.
    assert paged["pages_bytes"] == 2 * 2 * 16 * 2 * 2 * 2 * 16 * 4
    assert paged["mapped_bytes"] >= paged["pages_bytes"]
    assert paged["gathers"] == 2 * 20  # stock attention: every layer of every step
    (in_place,) = only(records, section="memory", way="pageforge")
    assert in_place["gathers"] == 0
    assert "tiny, batch 2, prompt 10, 10 steps, cuDNN attention off" in screen.getvalue()


def test_a_way_that_explodes_is_noted_and_the_others_go_on(tiny: DecodeBench) -> None:
    @contextlib.contextmanager
    def at_once(setting: Setting) -> Iterator[Start]:
        raise ImportError("not installed")
        yield

    @contextlib.contextmanager
    def on_the_way(setting: Setting) -> Iterator[Start]:
        def start(length: int) -> Sequences:
            calls = iter(range(steps.WARMUP + 5))

            def forward(tokens: torch.Tensor) -> torch.Tensor:
                next(calls)
                return torch.zeros(1)

            return Sequences(forward)

        yield start

    tiny.ways = {"absent": at_once, "dynamic": WAYS["dynamic"], "stops": on_the_way}
    steps.steps(tiny, 1, 10, None, "off")
    found = {r["way"]: r for r in only(tiny.report.records, prompt=3)}
    assert found["absent"]["failure"] == "absent: not installed"
    assert found["stops"]["failure"] == "StopIteration: no message"
    assert found["dynamic"]["p50_ms"] > 0


def test_a_way_that_computes_something_else_is_seen(
    tiny: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = ops.gather_kv

    def forgetful(*args, **kwargs):
        key, value = gather(*args, **kwargs)
        value[:, :, 0] = 0
        return key, value

    monkeypatch.setattr(ops, "gather_kv", forgetful)
    steps.steps(tiny, 2, 10, None, "off")
    errors = {r["way"]: r["logits_error"] for r in only(tiny.report.records, prompt=3)}
    assert errors["static"] < 1e-5
    assert errors["paged"] > 1e-3


def test_ways_see_the_same_tokens_in_turns(tiny: DecodeBench) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    order: list[str] = []

    def start_of(name: str) -> Start:
        def forward(tokens: torch.Tensor) -> torch.Tensor:
            seen[name].extend(tokens.flatten().tolist())
            order.append(name)
            return torch.zeros(1)

        return lambda length: Sequences(forward)

    count = 3 * steps.BLOCK
    lanes, failures = steps.race(tiny, {n: start_of(n) for n in seen}, 1, 4, count)
    assert not failures
    assert seen["a"] == seen["b"]
    assert len(seen["a"]) == 4 + steps.WARMUP + count
    assert all(len(lane.seconds) == count - 3 for lane in lanes.values())  # less the first ones
    blocks = order[2 * (1 + steps.WARMUP) :: steps.BLOCK]
    assert blocks == ["a", "b", "b", "a", "a", "b"]


def test_steps_end_where_the_positions_do(tiny: DecodeBench) -> None:
    tiny.prompts = (100,)
    steps.steps(tiny, 1, 500, None, "off")
    assert {r["steps"] for r in tiny.report.records} == {128 - 100 - steps.WARMUP}


def test_what_there_is_no_time_for_is_named(tiny: DecodeBench) -> None:
    tiny.budget = Budget(0)
    decode.run(tiny)
    assert tiny.report.records == []
    assert "generate, batch 2" in tiny.budget.left_out
    assert "steps, batch 1, cuDNN off" in tiny.budget.left_out


def test_a_twin_shares_weights_and_nothing_else(model) -> None:
    other = twin(model)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    other.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"


def test_the_stub_has_no_attention(model) -> None:
    setting = Setting(model, 1)
    with caches.stub_eager(setting) as start, torch.no_grad():
        sequences = start(4)
        alone = sequences(torch.tensor([[5]]))
        after_others = sequences(torch.tensor([[1, 2, 5]]))[:, -1:]
    # RoPE turns queries by position, and they are what the stub returns; nothing else differs.
    assert alone.shape == after_others.shape
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="CUDA"), caches.stub_graph(setting):
        pass


@pytest.mark.parametrize("name", ["smollm2", "qwen3-0.6b", "llama-8b", "gpt2"])
def test_shapes_can_be_built(name: str) -> None:
    config = make_model(name, torch.device("meta")).config
    assert config.max_position_embeddings >= 1024
