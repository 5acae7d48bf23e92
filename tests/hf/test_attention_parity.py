"""Under pageforge attention tokens and logits equal those of stock attention with DynamicCache.

Every family and way to generate; where pages are read in place, K/V are never gathered.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tests.hf.parity import (
    TIE,
    Generated,
    Scenario,
    check_all_back,
    compare_all,
    dynamic_cache,
    nan_pool,
    prompt,
    wrap,
)
from tests.hf.test_token_parity import (
    PADDED,
    assisted,
    beams_of_three_rows,
    beams_past_the_margin,
    chunked_prefill,
    copies_of_a_prompt,
    embedded_prompt,
    greedy,
    pages,
    past_the_margin,
    prompt_lookup,
    rows_that_end_early,
    several_samples,
    three_turns,
)
from tests.hf.tiny_models import (
    CONFIGS,
    ENCODER_DECODER,
    GATHERING,
    OFF_THE_INTERFACE,
    PECULIAR,
    RECURRENT,
    SLIDING,
    attending,
    make,
    tiny,
)

from pageforge import PagedKVCache
from pageforge.bench.footprint import counted_gathers
from pageforge.probe import cache_argument

FAMILIES = tuple(name for name in CONFIGS if name not in OFF_THE_INTERFACE)
DECODERS = tuple(name for name in FAMILIES if name not in ENCODER_DECODER)
IN_PLACE = tuple(name for name in FAMILIES if name not in GATHERING)

TOLERANCE = dict.fromkeys(FAMILIES, TIE) | {"qwen3_next": 10 * TIE}
"""Of fp32 logits, whose sums are made in another order. Qwen3-Next's recurrence amplifies that."""


@functools.cache
def stock(name: str, scenario: Scenario) -> list[Generated]:
    model = tiny(name)
    return scenario(model, dynamic_cache(model))


def check(name: str, scenario: Scenario, *, page_size: int = 8) -> None:
    expected = stock(name, scenario)
    model = attending(name)
    with nan_pool(model, page_size) as pool, counted_gathers() as gathers:
        cache = PagedKVCache(pool)
        got = scenario(model, wrap(model, cache))
        assert pool.stats().pages_used > 0
        compare_all(expected, got, TOLERANCE[name])
        assert (len(gathers) == 0) == (name in IN_PLACE)
        assert cache.num_gathers <= len(gathers)
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "scenario", [greedy, rows_that_end_early, several_samples, beams_of_three_rows]
)
def test_generate(name: str, scenario: Scenario) -> None:
    check(name, scenario)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("scenario", [chunked_prefill, three_turns, copies_of_a_prompt])
def test_several_forwards_of_many_tokens(name: str, scenario: Scenario) -> None:
    check(name, scenario)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT])
@pytest.mark.parametrize("scenario", [assisted, prompt_lookup])
def test_drafts(name: str, scenario: Scenario) -> None:
    check(name, scenario)


@pytest.mark.parametrize("name", SLIDING)
def test_windows_that_have_moved_on(name: str) -> None:
    check(name, past_the_margin)


def test_beams_with_windows_that_have_moved_on() -> None:
    check("gemma3", beams_past_the_margin)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_embeddings_instead_of_tokens(name: str) -> None:
    check(name, embedded_prompt)


@pytest.mark.parametrize("name", PECULIAR)
@pytest.mark.parametrize("scenario", [greedy, beams_of_three_rows, chunked_prefill])
def test_peculiar_families(name: str, scenario: Scenario) -> None:
    one, other = (make(PECULIAR[name](), attention) for attention in ("sdpa", "pageforge"))
    expected = scenario(one, dynamic_cache(one))
    with nan_pool(other) as pool, PagedKVCache(pool) as cache:
        compare_all(expected, scenario(other, cache), TIE)
        if name == "llama4":
            assert cache.num_gathers > 0  # in its chunked layers
        elif scenario is not chunked_prefill:  # where Gemma 4 changes the mask
            assert cache.num_gathers == 0


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("scenario", [greedy, chunked_prefill])
def test_other_page_sizes(scenario: Scenario, page_size: int) -> None:
    check("gemma3", scenario, page_size=page_size)


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name not in ENCODER_DECODER])
def test_pads_cost_no_pages(name: str) -> None:
    """The cache learns of them from the mask that attention gets."""
    model = attending(name)
    starts = tuple(20 - length for length in PADDED)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        greedy(model, cache)
        for group, stats in zip(pool.geometry.groups, pool.stats().groups, strict=True):
            if group.shape.window is None:
                assert stats.pages_used == pages(cache.get_seq_length(), starts)
            else:
                assert stats.pages_used <= pages(cache.get_seq_length(), starts)


@pytest.mark.parametrize("name", RECURRENT)
def test_drafts_are_refused_where_transformers_refuses_them(name: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as stock_error:
        stock(name, prompt_lookup)
    model = attending(name)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        with pytest.raises(type(stock_error.value)) as ours:
            prompt_lookup(model, cache)
        assert str(ours.value) == str(stock_error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """As near to the fp32 model as stock attention is."""
    ids, mask = prompt(tiny(name), PADDED).values()
    exact = tiny(name)(ids, attention_mask=mask).logits[:, -1]
    rough, ours = (copy.deepcopy(source(name)).to(dtype) for source in (tiny, attending))
    want = rough(ids, attention_mask=mask).logits[:, -1].float()
    with nan_pool(ours) as pool, PagedKVCache(pool) as cache:
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            arguments = {"attention_mask": mask[:, :stop], cache_argument(ours): cache}
            logits = ours(ids[:, start:stop], **arguments).logits
        assert cache.num_gathers == 0
    assert logits.dtype == dtype
    assert (logits[:, -1].float() - exact).norm() <= 1.5 * (want - exact).norm()
