"""StepCache: a model's forward on it is a decode step, or says why it cannot be one."""

from __future__ import annotations

import pytest
import torch
from tests.hf.parity import fill_with_nan
from tests.hf.tiny_models import CONFIGS, PECULIAR, make
from torch import Tensor
from transformers import PreTrainedModel

from pageforge import PagedKVCache, PagePool, UnsupportedModel
from pageforge.graphs import StepInputs
from pageforge.hf.paged_layer import KVLength
from pageforge.hf.step_cache import STEP_ARGUMENT, StepCache
from pageforge.probe import cache_argument

ROWS, LENGTH = 3, 21


def prefilled(family: str) -> tuple[PreTrainedModel, PagedKVCache, StepInputs, Tensor]:
    """A model, a cache of LENGTH tokens a row, inputs for a step of one row more, and its tokens.

    Pages hold NaN where no token was written.
    """
    model = make((CONFIGS | PECULIAR)[family](), "pageforge")
    pool = PagePool.for_model(model, page_size=8, max_pages=64)
    fill_with_nan(pool)
    cache, name = PagedKVCache(pool), cache_argument(model)
    ids = torch.randint(2, 100, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model(ids[:, :-1], **{name: cache})
    inputs = StepInputs(pool, ROWS + 1, 64, None)
    return model, cache, inputs, ids[:, -1:]


def step(
    model: PreTrainedModel, cache: PagedKVCache, inputs: StepInputs, tokens: Tensor
) -> tuple[Tensor, StepCache]:
    """Logits of the step, and the StepCache that it ran with."""
    length = cache._state.begin_step()
    batch = cache._state.batch
    assert batch is not None
    inputs.load(batch, length, None)
    inputs.tokens[:ROWS] = tokens
    inputs.begin()
    seen = StepCache(inputs)
    arguments = {"input_ids": inputs.tokens, "position_ids": inputs.positions}
    logits = model(**arguments, attention_mask=None, **{cache_argument(model): seen}).logits
    cache._state.finish_step()
    return logits, seen


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_oss", "gemma3n", "gemma4"])
def test_a_step_is_what_the_model_does_eagerly(family: str) -> None:
    model, cache, inputs, tokens = prefilled(family)
    twin = cache.fork()[0]
    want = model(tokens, **{cache_argument(model): twin}).logits
    logits, seen = step(model, cache, inputs, tokens)
    assert (logits[:ROWS] - want).abs().max() < 1e-4
    assert not logits.isnan().any()  # the row beyond the batch, too
    assert seen.is_regular == (family not in ("gemma3n", "gemma4"))
    for layer, twin_layer in zip(cache.layers, twin.layers, strict=True):
        if layer.keys is not None:
            assert (layer.keys - twin_layer.keys).abs().max() < 1e-4
            assert (layer.values - twin_layer.values).abs().max() < 1e-4
    for group in range(len(inputs.geometry.groups)):
        assert not cache.pool.pages(group)[0].any()  # nobody wrote to the padding page


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3n", "gemma4"])
def test_each_layer_of_the_pool_has_to_write(family: str) -> None:
    model, cache, inputs, tokens = prefilled(family)
    _, seen = step(model, cache, inputs, tokens)
    seen.check_written()  # later layers that use others' K/V are none of the pool's
    assert seen.written == {layer for group in inputs.geometry.groups for layer in group.layers}
    seen.written.remove(1)
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] did not write"):
        seen.check_written()


@torch.no_grad()
def test_windows_are_known_after_a_step() -> None:
    model, cache, inputs, tokens = prefilled("gemma2")
    _, seen = step(model, cache, inputs, tokens)
    assert seen.windows == {0: 8, 1: None}
    known = StepCache(inputs, seen.windows)
    key = value = torch.zeros(ROWS + 1, 2, 1, 8)
    assert known.update(key, value, 0) == (key, value)  # plain, for torch.compile
    assert known.get_mask_sizes(1, 0) == (1, 0)
    length, offset = seen.get_mask_sizes(1, 0)
    assert isinstance(length, KVLength)
    assert length.state is seen
    assert (length, offset) == (1, 0)
    assert seen.get_seq_length() == 0


@torch.no_grad()
def test_a_compiled_step_reaches_attention_by_an_argument() -> None:
    model, cache, inputs, tokens = prefilled("gemma2")
    twin = cache.fork()[0]
    want, seen = step(model, cache, inputs, tokens)
    batch = twin._state.batch
    length = twin._state.begin_step()
    assert batch is not None
    inputs.load(batch, length, None)
    inputs.tokens[:ROWS] = tokens
    inputs.begin()
    known = StepCache(inputs, seen.windows)
    arguments = {"input_ids": inputs.tokens, "position_ids": inputs.positions}
    arguments |= {cache_argument(model): known, STEP_ARGUMENT: known}
    assert torch.equal(model(**arguments).logits, want)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "computes with K/V by itself"), ("llama4", "neither causal nor")],
)
def test_what_needs_dense_k_and_v_is_refused(family: str, reason: str) -> None:
    model, cache, inputs, tokens = prefilled(family)
    with pytest.raises(UnsupportedModel, match=reason):
        step(model, cache, inputs, tokens)
    assert [table.length for table in cache.page_tables] == [LENGTH] * ROWS


@torch.no_grad()
def test_k_and_v_are_never_dense() -> None:
    _, _, inputs, _ = prefilled("llama")
    key, value = StepCache(inputs).update(*torch.zeros(2, ROWS + 1, 2, 1, 8), 0)
    for states in (key, value):
        assert states.shape == (ROWS + 1, 2, 1, 8)
        with pytest.raises(UnsupportedModel, match="by itself"):
            states + 1
