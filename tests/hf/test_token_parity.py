"""Tokens and logits equal DynamicCache's at every step, for every family and way to generate."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tests.hf.parity import (
    Generated,
    Scenario,
    check_all_back,
    check_parity,
    compare_all,
    dynamic_cache,
    fill_with_nan,
    nan_pool,
    prompt,
    run,
    wrap,
)
from tests.hf.tiny_models import (
    CONFIGS,
    DECODERS,
    ENCODER_DECODER,
    RECURRENT,
    SLIDING,
    draft_of,
    make,
    tiny,
)
from torch import Tensor
from transformers import Cache, PreTrainedModel

from pageforge import PagedKVCache, PagePool
from pageforge.geometry import ceil_div
from pageforge.pool import ROLLBACK
from pageforge.probe import cache_argument

PADDED = (20, 11, 3)
"""Prompt lengths: with pages of 8 tokens the rows have 0, 1 and 2 pages of padding alone."""

FULL = tuple(name for name in DECODERS if name not in SLIDING)


# --- ways to generate -----------------------------------------------------------------------


def greedy(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, PADDED), cache)]


@functools.cache
def token_in_the_middle(model: PreTrainedModel) -> int:
    """One that greedy decoding of the first row comes to after a few steps."""
    reference = run(model, prompt(model, PADDED), dynamic_cache(model), max_new_tokens=5)
    return int(reference.sequences[0, -1])


def rows_that_end_early(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    end = token_in_the_middle(model)
    return [run(model, prompt(model, PADDED), cache, eos_token_id=end, pad_token_id=0)]


def sampling(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, PADDED), cache, do_sample=True, top_k=40, temperature=0.9)]


def several_samples(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, (17, 4)), cache, do_sample=True, num_return_sequences=3)]


def beams_of_two_rows(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, (17, 6)), cache, num_beams=4)]


def beams_of_three_rows(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, PADDED), cache, num_beams=4, num_return_sequences=2)]


def chunked_prefill(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, PADDED), cache, prefill_chunk_size=7)]


def three_turns(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    """The same cache goes on: each turn's input is all that was said, and five new tokens."""
    turns: list[Generated] = []
    inputs = prompt(model, PADDED)
    for turn in range(3):
        turns.append(run(model, inputs, cache, max_new_tokens=7))
        said = turns[-1].sequences
        mask = inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(3, said.shape[1] - mask.shape[1])], dim=1)
        said = {"input_ids": said, "attention_mask": mask}
        inputs = longer(said, prompt(model, (5, 5, 5), seed=turn + 1))
    return turns


def copies_of_a_prompt(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    """Transformers' recipe: run the shared prompt once, generate on deepcopies of its cache."""
    shared = prompt(model, (13,))
    prefill(model, shared, cache)
    return [
        run(model, longer(shared, prompt(model, (4,), seed)), copy.deepcopy(cache))
        for seed in (1, 2, 3)
    ]


def assisted(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    draft = draft_of(model.family)
    return [run(model, prompt(model, (13,)), cache, assistant_model=draft, max_new_tokens=24)]


def prompt_lookup(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    inputs = {name: ids.repeat(1, 3) for name, ids in prompt(model, (6,)).items()}
    return [run(model, inputs, cache, prompt_lookup_num_tokens=3, max_new_tokens=24)]


def past_the_margin(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    """So long that sliding layers have given pages back."""
    return [run(model, prompt(model, (20, 11)), cache, max_new_tokens=90)]


def beams_past_the_margin(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    return [run(model, prompt(model, (20, 11)), cache, max_new_tokens=80, num_beams=2)]


def embedded_prompt(model: PreTrainedModel, cache: Cache) -> list[Generated]:
    inputs = prompt(model, PADDED)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return [run(model, inputs, cache)]


def prefill(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Cache) -> None:
    with torch.no_grad():
        model(**inputs, **{cache_argument(model): cache})


def longer(inputs: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([inputs[name], more[name]], dim=1) for name in inputs}


# --- every family ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "scenario",
    [
        greedy,
        rows_that_end_early,
        sampling,
        several_samples,
        beams_of_two_rows,
        beams_of_three_rows,
    ],
)
def test_generate(name: str, scenario: Scenario) -> None:
    check_parity(tiny(name), scenario)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("scenario", [chunked_prefill, three_turns, copies_of_a_prompt])
def test_several_forwards_of_many_tokens(name: str, scenario: Scenario) -> None:
    check_parity(tiny(name), scenario)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in RECURRENT])
@pytest.mark.parametrize("scenario", [assisted, prompt_lookup])
def test_drafts(name: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []
    crop = PagedKVCache.crop

    def noted_crop(cache: PagedKVCache, tokens_to_remove: int) -> None:
        removed.append(-int(tokens_to_remove))
        crop(cache, tokens_to_remove)

    monkeypatch.setattr(PagedKVCache, "crop", noted_crop)
    check_parity(tiny(name), scenario)
    if scenario is assisted:
        assert len(removed) < 24  # drafts were taken
    if name not in ENCODER_DECODER:
        assert max(removed) > 0  # and refused


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("scenario", [assisted, prompt_lookup])
def test_drafts_are_refused_where_transformers_refuses_them(name: str, scenario: Scenario) -> None:
    model = tiny(name)
    with pytest.raises((ValueError, RuntimeError)) as stock:
        scenario(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(type(stock.value)) as ours:
            scenario(model, cache)
        assert str(ours.value) == str(stock.value)
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("scenario", [past_the_margin, beams_past_the_margin])
def test_windows_that_have_moved_on(name: str, scenario: Scenario) -> None:
    check_parity(tiny(name), scenario)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_embeddings_instead_of_tokens(name: str) -> None:
    check_parity(tiny(name), embedded_prompt)


def test_rotary_factors_that_change_on_the_way() -> None:
    """Phi-3's LongRoPE: past a length all keys are stale, and transformers starts anew."""
    config = CONFIGS["phi3"]()
    config.original_max_position_embeddings = 27
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 27,
        "partial_rotary_factor": 1.0,
    }
    model = make(config)
    unchanged = run(tiny("phi3"), prompt(model, PADDED), dynamic_cache(model))
    changed = run(model, prompt(model, PADDED), dynamic_cache(model))
    assert not torch.equal(changed.logits[-1], unchanged.logits[-1])
    check_parity(model, greedy)


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize("scenario", [greedy, beams_of_two_rows, chunked_prefill])
def test_other_page_sizes(name: str, scenario: Scenario, page_size: int) -> None:
    check_parity(tiny(name), scenario, page_size=page_size)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_attention_implementations(name: str, attention: str) -> None:
    model = tiny(name)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        for scenario in (greedy, beams_of_three_rows, chunked_prefill):
            check_parity(model, scenario)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_beams_equal_those_without_any_cache_of_ours(name: str) -> None:
    model = tiny(name)
    inputs = prompt(model, PADDED)
    arguments = {"max_new_tokens": 14, "num_beams": 4, "do_sample": False}
    expected = model.generate(**inputs, **arguments)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        got = model.generate(**inputs, **arguments, **{cache_argument(model): wrap(model, cache)})
    assert torch.equal(expected, got)


# --- a cache that makes its own pool --------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_from_a_config(name: str) -> None:
    """The same as on a pool of the model: the pool is made at the first update."""
    model = tiny(name)
    expected = greedy(model, dynamic_cache(model))
    cache = PagedKVCache(model.config, page_size=8, max_pages=64)
    made: list[PagePool] = []
    layer = next(layer for layer in cache.layers if hasattr(layer, "window"))
    update = layer.update

    def first_update(*args, **kwargs):  # NaN comes between the pool's making and the first write
        if not made:
            layer.lazy_initialization(*args[:2])
            made.append(cache.pool)
            fill_with_nan(cache.pool)
        return update(*args, **kwargs)

    layer.update = first_update
    compare_all(expected, greedy(model, wrap(model, cache)))
    assert made[0].geometry.page_size == 8
    assert made[0].geometry == PagePool.for_model(model, page_size=8, max_pages=1).geometry
    assert made[0].stats().pages_used > 0
    cache.free()
    check_all_back(made[0])


# --- left padding that costs no pages -------------------------------------------------------


def pages(stored: int, starts: tuple[int, ...], copies: int = 1, size: int = 8) -> int:
    """Pages of a full group when each row holds `stored` tokens from its first real one's page."""
    return copies * sum(ceil_div(stored, size) - start // size for start in starts)


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        *((greedy, name) for name in DECODERS),
        *((chunked_prefill, name) for name in DECODERS),
        *((sampling, name) for name in ("gpt2", "bloom", "llama", "gemma3")),
        *((three_turns, name) for name in ("gpt2", "bloom", "llama", "gemma3", "gpt_oss")),
    ],
)
def test_pads_cost_no_pages(name: str, scenario: Scenario) -> None:
    model = tiny(name)
    mask = prompt(model, PADDED)["attention_mask"]
    starts = tuple(20 - length for length in PADDED)
    expected = scenario(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool, attention_mask=mask)
        compare_all(expected, scenario(model, cache))
        for group, stats in zip(pool.geometry.groups, pool.stats().groups, strict=True):
            if group.shape.window is None:
                assert stats.pages_used == pages(cache.get_seq_length(), starts)
            else:  # nothing has left the margin yet
                assert stats.pages_used <= pages(cache.get_seq_length(), starts)
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", FULL)
def test_a_mask_is_repeated_for_several_samples(name: str) -> None:
    model = tiny(name)
    mask = prompt(model, (17, 4))["attention_mask"]
    expected = several_samples(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool, attention_mask=mask)
        compare_all(expected, several_samples(model, cache))
        used = [stats.pages_used for stats in pool.stats().groups]
        assert used == [pages(cache.get_seq_length(), (0, 13), copies=3)] * len(used)
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "mistral", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("scenario", [beams_of_three_rows, rows_that_end_early])
def test_beams_and_ended_rows_with_a_mask(name: str, scenario: Scenario) -> None:
    model = tiny(name)
    expected = scenario(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool, attention_mask=prompt(model, PADDED)["attention_mask"])
        compare_all(expected, scenario(model, cache))
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_padded_row_is_as_if_alone(name: str, masked: bool) -> None:
    model = tiny(name)
    inputs = prompt(model, PADDED)
    with nan_pool(model) as pool:
        mask = inputs["attention_mask"] if masked else None
        with PagedKVCache(pool, attention_mask=mask) as cache:
            together = run(model, inputs, cache)
        for row, length in enumerate(PADDED):
            ids = inputs["input_ids"][row : row + 1, -length:]
            with PagedKVCache(pool) as cache:
                alone = run(
                    model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache
                )
            compare_all(
                [alone],
                [
                    Generated(
                        together.sequences[row : row + 1, -alone.sequences.shape[1] :],
                        [logits[row : row + 1] for logits in together.logits],
                    )
                ],
                tolerance=1e-4,
            )
        check_all_back(pool)


# --- a prompt that several requests share ---------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_forks_of_a_prompt_share_its_pages(name: str) -> None:
    model = tiny(name)
    expected = copies_of_a_prompt(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        shared = prompt(model, (13,))
        prefill(model, shared, cache)
        groups = len(pool.geometry.groups)
        assert pool.stats().pages_used == 2 * groups
        forks = cache.fork(3)
        assert pool.stats().pages_used == 2 * groups
        got = [
            run(model, longer(shared, prompt(model, (4,), seed)), fork)
            for seed, fork in zip((1, 2, 3), forks, strict=True)
        ]
        compare_all(expected, got)
        # Each holds 30 tokens in four pages, of which the first is everybody's.
        assert pool.stats().pages_used == (2 + 3 * 3) * groups
        assert cache.get_seq_length() == 13
        for fork in forks:
            fork.free()
        assert pool.stats().pages_used == 2 * groups
        # The original still holds the prompt as it was.
        original = run(model, longer(shared, prompt(model, (4,), 1)), cache)
        compare_all(expected[:1], [original])
        cache.free()
        check_all_back(pool)


def test_sliding_layers_hold_a_window_and_the_margin() -> None:
    """What past_the_margin leaves: the pages of the last `window + ROLLBACK` tokens, no more."""
    model = tiny("gemma3")
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        past_the_margin(model, cache)
        length = cache.get_seq_length()
        sliding, full = pool.stats().groups
        assert full.pages_used == 2 * ceil_div(length, 8)
        window = pool.geometry.groups[0].shape.window
        assert window is not None
        # Before the last token was added, tokens up to here had left window and margin.
        gone = (length - 1 - ROLLBACK - window + 1) // 8
        assert sliding.pages_used == 2 * (ceil_div(length, 8) - gone)
        assert gone >= 3
        cache.free()
        check_all_back(pool)
