"""The real SmolLM2-135M on real English: greedy tokens and logits equal DynamicCache's."""

from __future__ import annotations

import pytest
import torch
from tests.hf.parity import (
    Generated,
    check_all_back,
    compare_all,
    dynamic_cache,
    nan_pool,
    run,
)
from tests.hf.real_text import prompts

from pageforge import PagedKVCache
from pageforge.geometry import ceil_div
from pageforge.hf.pretrained import load_model


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_on_five_speeches() -> None:
    model, tokenizer = load_model("smollm2")
    assert model.dtype == torch.float32
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts(5, characters=240), return_tensors="pt", padding=True)
    mask = inputs["attention_mask"]
    assert (mask[:, 0] == 0).any()  # the passages differ in length
    arguments = {"max_new_tokens": 32, "pad_token_id": tokenizer.pad_token_id}
    expected = run(model, inputs, dynamic_cache(model), **arguments)
    words = tokenizer.batch_decode(expected.sequences[:, mask.shape[1] :])
    assert len(set(words)) == 5
    with nan_pool(model, page_size=16, max_pages=48) as pool:
        cache = PagedKVCache(pool)
        compare_all([expected], [run(model, inputs, cache, **arguments)])
        assert pool.stats().pages_used == 5 * ceil_div(mask.shape[1] + 31, 16)
        cache.free()
        check_all_back(pool)

        cache = PagedKVCache(pool, attention_mask=mask)
        got = run(model, inputs, cache, **{**arguments, "max_new_tokens": 4})
        first = Generated(expected.sequences[:, : mask.shape[1] + 4], expected.logits[:4])
        compare_all([first], [got])
        pads = (mask == 0).sum(-1).tolist()
        assert pool.stats().pages_used == sum(
            ceil_div(mask.shape[1] + 3, 16) - count // 16 for count in pads
        )
        cache.free()
        check_all_back(pool)
