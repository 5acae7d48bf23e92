"""The cache's own tests again, with model and pages on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.hf import parity
from tests.hf import test_token_parity as scenarios
from tests.hf.tiny_models import CONFIGS, tiny
from transformers import AutoModelForCausalLM

from pageforge import PagePool
from pageforge.batch import SequenceBatch

pytestmark = pytest.mark.gpu


@pytest.fixture(params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[torch.nn.Module]:
    yield tiny(request.param).cuda()
    tiny(request.param).cpu()


@pytest.fixture(autouse=True)
def _inputs_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = scenarios.prompt

    def on_cuda(*args, **kwargs):
        return {name: tensor.cuda() for name, tensor in on_cpu(*args, **kwargs).items()}

    monkeypatch.setattr(scenarios, "prompt", on_cuda)


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.greedy,
        scenarios.sampling,
        scenarios.beams_of_two_rows,
        scenarios.several_samples,
    ],
)
def test_generate_on_cuda(model: torch.nn.Module, scenario: parity.Scenario) -> None:
    expected = scenario(model, parity.dynamic_cache(model))
    with parity.nan_pool(model) as pool:
        cache = parity.PagedKVCache(pool)
        got = scenario(model, parity.wrap(model, cache))
        # Routing in MoE layers adds with atomics: not the same to the last bit from run to run.
        parity.compare_all(expected, got, tolerance=1e-4)
        cache.free()
        parity.check_all_back(pool)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_spread_over_two_devices(name: str, tmp_path: Path) -> None:
    tiny(name).cpu().save_pretrained(tmp_path)
    num_layers = tiny(name).config.num_hidden_layers
    devices = {f"model.layers.{layer}": int(layer > 0) for layer in range(num_layers)}
    devices |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices)
    expected = scenarios.greedy(model, parity.dynamic_cache(model))
    with parity.nan_pool(model) as pool:
        assert {group.device for group in pool.stats().groups} == {"cuda:0", "cuda:1"}
        cache = parity.PagedKVCache(pool)
        parity.compare_all(expected, scenarios.greedy(model, cache), tolerance=1e-5)
        cache.free()
        parity.check_all_back(pool)


@pytest.mark.parametrize("rows", [1, 3])
def test_page_tables_on_the_device_follow_those_on_the_host(rows: int) -> None:
    """Token by token, then many at once, then back; also in inference mode."""
    pool = PagePool.for_model(tiny("gemma3").cuda(), page_size=8, max_pages=200)
    batch = SequenceBatch(pool, [0] * rows)

    def check() -> None:
        for group in range(len(pool.geometry.groups)):
            table, _ = batch.page_table(group, 0, batch.length)
            pages = table.shape[1]
            assert table.tolist() == [list(each.entries(0, pages, group)) for each in batch.tables]

    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for tokens in [1] * 20 + [30] + [1] * 20:
                batch.append(tokens)
                check()
            batch.crop(11)
            check()
    batch.release()
    assert pool.stats().pages_used == 0
