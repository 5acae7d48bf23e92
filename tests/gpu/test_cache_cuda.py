"""The cache's own tests again, with model and pages on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.hf import parity
from tests.hf import test_token_parity as scenarios
from tests.hf.tiny_models import CONFIGS, tiny

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
