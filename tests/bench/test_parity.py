"""The parity benchmark on tiny models on the CPU, and that what it is for shows."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only

from pageforge import ops
from pageforge.bench import families, parity
from pageforge.bench.families import FAMILIES, make_attentive
from pageforge.bench.harness import Budget
from pageforge.bench.models import cast
from pageforge.bench.parity import BASE, WAYS, ParityBench
from pageforge.bench.report import Report
from pageforge.bench.run import Run
from pageforge.errors import ModelNotFound, UnsupportedModel

OURS = ("paged", "pageforge", "engine")
ON_CPU = {name: way for name, way in WAYS.items() if name not in parity.CUDA_WAYS}


@pytest.fixture
def tiny(report: Report, screen: io.StringIO) -> ParityBench:
    return ParityBench(
        CPU,
        report,
        Console(file=screen, width=200),
        Budget(None),
        models=("tiny-llama",),
        dtypes=(torch.float32,),
        ways=ON_CPU,
        rows=2,
        prompt=30,
        steps=6,
    )


def test_all_ways_agree_and_a_lost_token_does_not(tiny: ParityBench, screen: io.StringIO) -> None:
    tiny.models = ("tiny-llama", "tiny-gemma2", "tiny-gpt2")
    tiny.dtypes = (torch.float32, torch.bfloat16)
    parity.run(tiny)
    records = only(tiny.report.records, section="parity")
    assert len(records) == 3 * 2 * len(ON_CPU)
    for record in records:
        assert record["weights"] == "random"
        assert record["compared"] == 2 * (1 + 6)
        assert len(record["differences"]) == 1 + 6
        assert record["max_difference"] == max(record["differences"])
        assert record["max_difference"] == record["differences"][record["worst_step"]]
        assert record["same_argmax"] == 1 - record["parted"] / record["compared"]
        assert (record["largest_gap"] is None) == (record["parted"] == 0)
    for record in only(records, dtype="float32"):
        limit = 0 if record["way"] in (BASE, "paged") else 1e-5
        if record["way"] == "one token lost":
            assert record["differences"][0] == 0  # the loss comes after it
            assert record["relative_error"] > 1e-2
        else:
            assert record["relative_error"] <= limit, record
            assert record["parted"] == 0
        assert record["error_to_fp32"] is None
    for record in only(records, dtype="bfloat16"):
        lost = record["way"] == "one token lost"
        assert (record["error_to_fp32"] > 0.06) == lost, record
    for way in ON_CPU:
        assert f"bfloat16 {way}" in screen.getvalue()


@pytest.mark.parametrize("name", FAMILIES)
def test_one_lost_token_matters_to_every_family(tiny: ParityBench, name: str) -> None:
    tiny.models, tiny.steps = (name,), 3
    tiny.ways = {way: WAYS[way] for way in ("paged", "pageforge", "one token lost")}
    parity.run(tiny)
    errors = {r["way"]: r["relative_error"] for r in tiny.report.records}
    assert errors["paged"] == 0
    assert errors["pageforge"] < 1e-5
    assert errors["one token lost"] > 2e-2


def test_a_token_that_our_writes_lose_shows_in_each_of_our_ways(
    tiny: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ops.write_kv

    def forgetful(key, value, key_pages, value_pages, slot_mapping, **options):
        if len(slot_mapping) > 2:  # of prompts only
            slot_mapping = slot_mapping.clone()
            slot_mapping[-1] = -1
        write(key, value, key_pages, value_pages, slot_mapping, **options)

    monkeypatch.setattr(ops, "write_kv", forgetful)
    parity.run(tiny)
    for way in OURS:
        (record,) = only(tiny.report.records, way=way)
        assert record.get("failure") or record["relative_error"] > 1e-2, record
    (base,) = only(tiny.report.records, way=BASE)
    assert base["max_difference"] == 0


def test_a_way_that_explodes_or_gives_no_numbers_is_noted(
    tiny: ParityBench, screen: io.StringIO
) -> None:
    def explodes(model, prompts, tokens):
        raise RuntimeError("out of luck")

    def nan(model, prompts, tokens):
        return [torch.full((2, 256), torch.nan) for _ in range(1 + len(tokens))]

    tiny.ways = {"explodes": explodes, "nan": nan, "paged": WAYS["paged"]}
    parity.run(tiny)
    found = {r["way"]: r for r in tiny.report.records}
    assert found["explodes"]["failure"] == "RuntimeError: out of luck"
    assert found["nan"]["failure"] == "ArithmeticError: step 0: a logit is not finite"
    assert found["paged"]["max_difference"] == 0
    assert "float32 explodes: RuntimeError: out of luck" in screen.getvalue()


def test_where_tokens_part_the_gap_of_the_reference_is_told() -> None:
    want = [torch.tensor([[1.0, 0.75, 0.0], [0.0, 2.0, 1.0]])] * 2
    got = [want[0].clone(), torch.tensor([[0.5, 0.75, 0.0], [0.0, 2.0, 1.0]])]
    found = parity.agreement(got, want)
    assert found["differences"] == [0, 0.5]
    assert (found["worst_step"], found["parted"], found["compared"]) == (1, 1, 4)
    assert (found["same_argmax"], found["largest_gap"]) == (0.75, 0.25)
    squares = 2 * (1 + 0.75**2 + 4 + 1)
    assert found["relative_error"] == pytest.approx(0.5 / squares**0.5)


def test_a_model_that_cannot_be_had(tiny: ParityBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args):
        raise ModelNotFound("no model 'smollm2'")

    def too_large(name, device):
        if name == "smollm2":
            raise torch.OutOfMemoryError("too large")
        return make_attentive(name, device)

    monkeypatch.setattr(families, "trained_model", nowhere)
    monkeypatch.setattr(families, "make_attentive", too_large)
    tiny.models, tiny.ways = ("smollm2", "tiny-gpt2"), {"paged": WAYS["paged"]}
    parity.run(tiny)
    failed, fine = tiny.report.records
    assert (failed["model"], failed["failure"]) == ("smollm2", "OutOfMemoryError: too large")
    assert fine["max_difference"] == 0


def test_a_cast_model_shares_buffers_and_keeps_its_own_weights() -> None:
    model = make_attentive("tiny-llama", CPU)
    other = cast(model, torch.bfloat16)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert other.dtype == other.config.dtype == torch.bfloat16
    pairs = zip(model.buffers(), other.buffers(), strict=True)
    assert all(one is two for one, two in pairs)


def test_ways_that_are_left_out_are_really_refused(tiny: ParityBench) -> None:
    tiny.models = tuple(parity.REFUSED)
    parity.run(tiny)
    assert {r["way"] for r in tiny.report.records} == {*ON_CPU} - {"engine"}
    prompts, tokens = torch.ones(1, 4, dtype=torch.long), torch.ones(2, 1, 1, dtype=torch.long)
    for name, ways in parity.REFUSED.items():
        for way in ways:
            with pytest.raises(UnsupportedModel):
                WAYS[way](make_attentive(name, CPU), prompts, tokens)


def test_what_a_run_compares(report: Report) -> None:
    run_of = Run(CPU, report, Console(file=io.StringIO()), Budget(None))
    whole = parity.bench_of(run_of)
    assert set(FAMILIES) < set(whole.models)
    assert "fast" not in whole.ways
    assert tuple(parity.bench_of(Run(**vars(run_of) | {"quick": True})).models) == (*FAMILIES,)
    assert tuple(parity.bench_of(Run(**vars(run_of) | {"model": "gpt2"})).models) == ("gpt2",)


def test_what_there_is_no_time_for_is_named(tiny: ParityBench) -> None:
    tiny.budget = Budget(0)
    parity.run(tiny)
    assert tiny.budget.left_out == ["tiny-llama"]
    assert tiny.report.records == []
