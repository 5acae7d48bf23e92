"""Pageforge attention in transformers' models on CUDA, against stock attention there."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from tests.hf import parity
from tests.hf import test_token_parity as scenarios
from tests.hf.tiny_models import CONFIGS, make
from transformers import PreTrainedModel

from pageforge import PagedKVCache
from pageforge.probe import cache_argument

pytestmark = pytest.mark.gpu

KINDS = ("gpt2", "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "bart")

EAGER = ("gemma2", "gpt_oss")

TOLERANCE = 1e-3
"""Of fp32 logits between 1 and 10, summed in another order, and in MoE layers by atomics."""


def wide(name: str, attention: str) -> PreTrainedModel:
    """The tiny model of that family with head dims of 16, the least that the kernels serve."""
    config = CONFIGS[name]()
    if name == "gpt2":
        config.n_head = 2
    elif name == "bart":
        config.encoder_attention_heads = config.decoder_attention_heads = 2
    else:
        config.head_dim = 16
    return make(config, attention).cuda()


@functools.cache
def stock(name: str) -> PreTrainedModel:
    return wide(name, "eager" if name in EAGER else "sdpa")


@functools.cache
def attending(name: str) -> PreTrainedModel:
    return wide(name, "pageforge")


@pytest.fixture(autouse=True)
def _inputs_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on_cpu = scenarios.prompt

    def on_cuda(*args, **kwargs):
        return {name: tensor.cuda() for name, tensor in on_cpu(*args, **kwargs).items()}

    monkeypatch.setattr(scenarios, "prompt", on_cuda)
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.greedy,
        scenarios.beams_of_three_rows,
        scenarios.chunked_prefill,
        scenarios.three_turns,
        scenarios.prompt_lookup,
        scenarios.past_the_margin,
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_generate(name: str, scenario: parity.Scenario) -> None:
    if name == "bart" and scenario in (scenarios.chunked_prefill, scenarios.three_turns):
        pytest.skip("for decoders")
    expected = scenario(stock(name), parity.dynamic_cache(stock(name)))
    model = attending(name)
    with parity.nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        got = scenario(model, parity.wrap(model, cache))
        parity.compare_all(expected, got, TOLERANCE)
        assert cache.num_gathers == 0
        cache.free()
        parity.check_all_back(pool)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """As near to the fp32 model as stock attention is."""
    ids, mask = scenarios.prompt(stock(name), scenarios.PADDED).values()
    exact = stock(name)(ids, attention_mask=mask).logits[:, -1]
    rough = wide(name, "eager" if name in EAGER else "sdpa").to(dtype)
    want = rough(ids, attention_mask=mask).logits[:, -1].float()
    ours = wide(name, "pageforge").to(dtype)
    with parity.nan_pool(ours) as pool, PagedKVCache(pool) as cache:
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            arguments = {"attention_mask": mask[:, :stop], cache_argument(ours): cache}
            logits = ours(ids[:, start:stop], **arguments).logits
        assert cache.num_gathers == 0
    assert (logits[:, -1].float() - exact).norm() <= 1.5 * (want - exact).norm()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_the_host_waits_for_nothing(name: str) -> None:
    """In decode steps without a mask, across page boundaries."""
    model = attending(name)
    model.config.pad_token_id = None  # else transformers' GPT-2 looks for it where no mask is given
    ids = scenarios.prompt(model, (13, 13))["input_ids"]
    with parity.nan_pool(model) as pool, PagedKVCache(pool) as cache:
        model(ids, **{cache_argument(model): cache})
        model(ids[:, :1], **{cache_argument(model): cache})  # kernels are compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            for token in range(1, 10):
                model(ids[:, token : token + 1], **{cache_argument(model): cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cache.num_gathers == 0


def test_head_dims_that_kernels_do_not_serve() -> None:
    """8 is too small: dense, and right."""
    plain, ours = (make(CONFIGS["llama"](), kind).cuda() for kind in ("sdpa", "pageforge"))
    expected = scenarios.greedy(plain, parity.dynamic_cache(plain))
    with parity.nan_pool(ours) as pool, PagedKVCache(pool) as cache:
        parity.compare_all(expected, scenarios.greedy(ours, cache), TOLERANCE)
        assert cache.num_gathers > 0
