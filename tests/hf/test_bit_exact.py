"""Logits equal DynamicCache's to the last bit, for the shapes of GPT-2 124M and SmolLM2-135M.

Weights are random and the vocabulary is cut; K/V depend on neither. A prompt and 50 decode steps
with given tokens, batch 1, 8 and a left-padded 8, on a pool full of NaN.
"""

from __future__ import annotations

import functools
import itertools
import os

import pytest
import torch
from tests.hf.parity import check_all_back, dynamic_cache, nan_pool
from tests.hf.tiny_models import make
from torch import Tensor
from transformers import Cache, GPT2Config, LlamaConfig, PreTrainedModel

from pageforge import PagedKVCache
from pageforge.probe import cache_argument

STEPS = 50
PROMPT = 21
PADDED = (21, 20, 17, 16, 5, 4, 1, 9)
"""Real tokens of each row; with pages of 16 the pads of three rows fill a page."""

DEEP = {"gpt2": 12, "smollm2": 30}
SHALLOW = {"gpt2": 2, "smollm2": 2}
"""Layers. Every combination runs with two; the real depth, much dearer, with some, or with all
where the variable PAGEFORGE_REAL_DEPTH is set."""

LAYERS = DEEP if os.environ.get("PAGEFORGE_REAL_DEPTH") else SHALLOW

STD = 0.05
"""Of the weights: at this width attention spreads over the context, and no value saturates."""


@functools.cache
def model_of(shape: str, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    if shape == "gpt2":
        config = GPT2Config(vocab_size=256, n_layer=layers, bos_token_id=1, eos_token_id=2)
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            rope_theta=100_000.0,
        )
    return make(config, std=STD).to(dtype)


def inputs_of(batch: str) -> tuple[Tensor, Tensor]:
    """(tokens `[S, PROMPT + STEPS]`, their mask)."""
    lengths = {"one": (PROMPT,), "eight": (PROMPT,) * 8}.get(batch, PADDED)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 256, (len(lengths), PROMPT + STEPS), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : PROMPT - length] = 0
    return ids, mask


@torch.no_grad()
def logits_of(model: PreTrainedModel, batch: str, cache: Cache) -> Tensor:
    """Logits of the prompt and of each decode step: `[S, PROMPT + STEPS, V]`."""
    ids, mask = inputs_of(batch)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    edges = [0, *range(PROMPT, PROMPT + STEPS + 1)]
    logits = [
        model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            **{cache_argument(model): cache},
        ).logits
        for start, stop in itertools.pairwise(edges)
    ]
    return torch.cat(logits, dim=1)


def check(
    shape: str, layers: int, attention: str, dtype: torch.dtype, batch: str, masked: bool = False
) -> None:
    model = model_of(shape, layers, dtype)
    model.set_attn_implementation(attention)
    _, mask = inputs_of(batch)
    expected = logits_of(model, batch, dynamic_cache(model))
    with nan_pool(model, page_size=16, max_pages=48) as pool:
        cache = PagedKVCache(pool, attention_mask=mask[:, :PROMPT] if masked else None)
        got = logits_of(model, batch, cache)
        cache.free()
        check_all_back(pool)
    real = mask.bool()
    assert not expected[real].isnan().any()
    assert not got[real].isnan().any()
    assert (expected[real].float() - got[real].float()).abs().max().item() == 0.0
    # The comparison means something: the context moves the logits.
    spread = expected[real].float().std(dim=0).mean().item()
    assert spread > 0.1


@pytest.mark.parametrize("batch", ["one", "eight", "left-padded eight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", ["gpt2", "smollm2"])
def test_every_combination(shape: str, attention: str, dtype: torch.dtype, batch: str) -> None:
    check(shape, LAYERS[shape], attention, dtype, batch)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", ["gpt2", "smollm2"])
def test_pads_that_cost_no_pages(shape: str, attention: str) -> None:
    check(shape, LAYERS[shape], attention, torch.float32, "left-padded eight", masked=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "attention", "dtype", "batch"),
    [
        ("gpt2", "sdpa", torch.float32, "left-padded eight"),
        ("gpt2", "eager", torch.bfloat16, "one"),
        ("smollm2", "sdpa", torch.bfloat16, "left-padded eight"),
        ("smollm2", "eager", torch.float32, "one"),
    ],
    ids=str,
)
def test_the_real_depth(shape: str, attention: str, dtype: torch.dtype, batch: str) -> None:
    check(shape, DEEP[shape], attention, dtype, batch)
