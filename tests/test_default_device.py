"""torch's default device is another than the host, as people set it who have a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.engine.served import engine_on, prompts
from tests.hf.tiny_models import attending, tiny

from pageforge import PagedKVCache, PagePool
from pageforge.engine import SamplingParams
from pageforge.probe import cache_argument

ELSEWHERE = torch.device("meta")
"""What is made without a word about its device has no memory at all here."""


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_engine_serves(name: str) -> None:
    """With pages that are swapped, shared and copied."""
    attending(name)
    params = SamplingParams(max_tokens=20, seed=1, top_p=0.9, logprobs=1, n=2, min_p=0.01)
    with ELSEWHERE, engine_on(name, max_pages=30, swap_memory="1MiB") as engine:
        outputs = engine.generate(prompts(8), params)
        assert all(output.error is None for output in outputs)
        assert engine.stats().num_swaps > 0


@pytest.mark.parametrize("attention", ["sdpa", "pageforge"])
def test_a_cache_serves(attention: str) -> None:
    model = attending("llama") if attention == "pageforge" else tiny("llama")
    name = cache_argument(model)
    tokens = torch.tensor([[5, 6, 7, 8, 9]] * 2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    grown = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    swapped, chosen = torch.tensor([1, 0]), torch.tensor([0, 3])
    with ELSEWHERE, PagePool.for_model(model, page_size=8, max_pages=40) as pool, torch.no_grad():
        cache = PagedKVCache(pool)
        model(tokens, attention_mask=mask, **{name: cache})
        (child,) = cache.fork()
        child.reorder_cache(swapped)
        child.batch_repeat_interleave(2)
        child.batch_select_indices(chosen)
        logits = model(tokens[:, :1], attention_mask=grown, **{name: child}).logits
        assert logits.isfinite().all()
