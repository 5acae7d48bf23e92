"""The latency benchmark on a tiny model on the CPU: what it counts, not how fast that is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only
from tests.hf.tiny_models import tiny as tiny_model

from pageforge import ops
from pageforge.bench import caches, ceilings, latency, steps
from pageforge.bench.caches import WAYS, Sequences, Setting, Start
from pageforge.bench.harness import Budget
from pageforge.bench.latency_context import LatencyBench
from pageforge.bench.models import make_model, twin
from pageforge.bench.report import Report
from pageforge.bench.run import Run


@pytest.fixture(scope="module")
def model():
    return make_model("tiny", CPU)


@pytest.fixture
def tiny(
    model, report: Report, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> LatencyBench:
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 1 << 20)
    return LatencyBench(
        model,
        "tiny",
        report,
        Console(file=screen, width=200),
        Budget(None),
        batches=(1, 2),
        prompts=(3, 10),
        steps=30,
        padded_batch=2,
        generated=4,
        memory_steps=20,
        ways={name: WAYS[name] for name in ("dynamic", "static", "paged", "pageforge")},
    )


def test_a_run(tiny: LatencyBench, screen: io.StringIO) -> None:
    latency.run(tiny)
    records = tiny.report.records
    found = only(records, section="steps")
    assert len(found) == 2 * 2 * 4
    (left_padded,) = only(records, section="padded", way="pageforge")
    assert [(r["padded"], r["batch"], r["prompt"]) for r in only(records, section="padded")] == [
        (True, 2, 10)
    ] * 4
    assert all("failure" not in record for record in records), records
    for record in [*found, left_padded]:
        assert record["model"] == "tiny"
        assert record["timed_steps"] == 28  # of 30, less the first of each block
        assert 0 < record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"] <= record["max_ms"]
        assert record["p50_ms_low"] <= record["p50_ms_high"] <= record["max_ms"]
        assert 0 < record["mean_ms"] < record["max_ms"]
        assert record["over_dynamic_low"] <= record["over_dynamic"] <= record["over_dynamic_high"]
        assert record["logits_error"] < 1e-5
        assert record["cudnn"] == "off"
    assert all(r["over_dynamic"] == 1 for r in only(found, way="dynamic"))
    assert not only(records, section="cudnn")
    # 2 layers, K and V, 2 heads of 16 dims, 4 bytes; half of the steps are done on average.
    (one,) = only(found, batch=2, prompt=3, way="paged")
    assert one["kv_bytes"] == 2 * (3 + steps.WARMUP + 15) * 2 * 2 * 2 * 16 * 4
    generated = only(records, section="generate")
    assert [r["way"] for r in generated] == ["dynamic", "paged", "pageforge"]
    for record in generated:
        assert (record["batch"], record["new_tokens"], record["same_tokens"]) == (2, 4, 1)
        assert 0 < record["tokens_per_s_low"] <= record["tokens_per_s"]
    assert generated[0]["over_dynamic"] == 1
    (paged,) = only(records, section="memory", way="paged")
    # Two rows of 23 tokens take two pages each, of 2 layers.
    assert paged["pages_bytes"] == 2 * 2 * 16 * 2 * 2 * 2 * 16 * 4
    assert paged["mapped_bytes"] >= paged["pages_bytes"]
    assert paged["gathers"] == 2 * 20  # stock attention: every layer of every step
    (in_place,) = only(records, section="memory", way="pageforge")
    assert in_place["gathers"] == 0
    assert (
        "tiny, batch 2, prompt 10, left-padded, 30 steps, cuDNN attention off" in screen.getvalue()
    )


def plan(bench: LatencyBench, batch: int) -> steps.Plan:
    return steps.Plan("steps", list(bench.ways), batch, bench.prompts, bench.steps)


def test_a_way_that_explodes_is_noted_and_the_others_go_on(tiny: LatencyBench) -> None:
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
    steps.follow(tiny, plan(tiny, 1))
    found = {r["way"]: r for r in only(tiny.report.records, prompt=3)}
    assert found["absent"]["failure"] == "absent: not installed"
    assert found["stops"]["failure"] == "StopIteration: no message"
    assert found["dynamic"]["p50_ms"] > 0


def test_a_way_that_computes_something_else_is_seen(
    tiny: LatencyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = ops.write_and_gather

    def forgetful(*step):
        def gather(*layer):
            key, value = prepare(*step)(*layer)
            value[:, :, 0] = 0
            return key, value

        return gather

    monkeypatch.setattr(ops, "write_and_gather", forgetful)
    steps.follow(tiny, plan(tiny, 2))
    errors = {r["way"]: r["logits_error"] for r in only(tiny.report.records, prompt=3)}
    assert errors["static"] < 1e-5
    assert errors["paged"] > 1e-3


def test_ways_see_the_same_tokens_in_turns(tiny: LatencyBench) -> None:
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


def test_steps_end_where_the_positions_do(tiny: LatencyBench) -> None:
    tiny.prompts = (100,)
    tiny.steps = 500
    steps.follow(tiny, plan(tiny, 1))
    assert {r["steps"] for r in tiny.report.records} == {128 - 100 - steps.WARMUP}


def test_a_model_is_asked_only_what_it_has_positions_for(report: Report) -> None:
    run = Run(CPU, report, Console(file=io.StringIO()), Budget(None), model="tiny")
    bench = latency.bench_of(run)
    assert bench.prompts == [10]
    assert set(bench.ways) == {"dynamic", "static", "paged", "pageforge"}


def test_what_there_is_no_time_for_is_named(tiny: LatencyBench) -> None:
    tiny.budget = Budget(0)
    latency.run(tiny)
    assert [record["section"] for record in tiny.report.records] == ["ceilings"]
    assert tiny.budget.left_out == ["steps", "padded", "generate", "memory"]
    steps.steps(tiny)
    assert tiny.budget.left_out[4:] == ["steps, batch 1", "steps, batch 2"]


def test_left_padding_reaches_every_way(tiny: LatencyBench) -> None:
    """A way that forgot the mask would say something else than the others."""
    setting = Setting(tiny.model, 2, pads=(0, 3))
    prompt, token = tiny.tokens(2, 5), tiny.tokens(2, 1)
    other_pads = prompt.clone()
    other_pads[1, :3] = (other_pads[1, :3] + 1) % 256
    for name in tiny.ways:
        with tiny.ways[name](setting) as start, torch.no_grad():
            said = []
            for tokens in (prompt, other_pads):
                sequences = start(6)
                sequences(tokens)
                said.append(sequences(token))
        torch.testing.assert_close(said[0], said[1], atol=1e-5, rtol=0)
    with WAYS["dynamic"](Setting(tiny.model, 1)) as start, torch.no_grad():
        alone = start(3)  # at positions that count from its own first token
        alone(prompt[1:, 3:])
        torch.testing.assert_close(alone(token[1:])[0], said[0][1], atol=1e-4, rtol=0)
    with WAYS["dynamic"](Setting(tiny.model, 2)) as start, torch.no_grad():
        sequences = start(6)
        sequences(prompt)
        assert (sequences(token) - said[0])[1].abs().max() > 0.1


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


def test_a_compiled_stub_keeps_what_makes_k_and_v(model) -> None:
    """A compiler drops what nobody reads; a step with attention makes K and V."""
    products = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graph.graph.eliminate_dead_code()
        products.extend(
            node for node in graph.graph.nodes if node.target is torch.nn.functional.linear
        )
        return graph

    stub = caches.without_attention(model)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(stub, backend=count)(torch.tensor([[5]]), use_cache=False)
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert len(products) == len(linears)


def test_the_stub_of_a_model_whose_v_is_narrower_than_its_q() -> None:
    stub = caches.without_attention(tiny_model("deepseek_v3"))
    tokens = torch.tensor([[5, 6]])
    with torch.no_grad():
        assert stub(tokens, use_cache=False).logits.shape[:2] == (1, 2)
        torch.compiler.reset()
        compiled = torch.compile(stub, backend="eager")
        assert compiled(tokens, use_cache=False).logits.shape[:2] == (1, 2)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-0.6b", "llama-8b", "gpt2"])
def test_shapes_can_be_built(name: str) -> None:
    config = make_model(name, torch.device("meta")).config
    assert config.max_position_embeddings >= 1024
