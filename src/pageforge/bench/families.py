"""Models of several families, with weights that make the context matter.

With transformers' own initialisation small models hardly look at their context, and a cache that
loses tokens would give nearly the same logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from pageforge.bench.models import SHAPES, model_of, trained_model
from pageforge.errors import ModelNotFound

log = logging.getLogger(__name__)

WIDTH = 64
WIDTH_STD = 0.2
"""The weights' standard deviation in a model of that width."""

WINDOW = 24
"""Of the sliding layers: no multiple of a page."""

TOKENS: dict[str, Any] = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
DENSE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED: dict[str, Any] = {**DENSE, "num_key_value_heads": 2, "head_dim": 16}
MIXED = {
    **GROUPED,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny-gpt2": lambda: GPT2Config(**TOKENS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=256),
    "tiny-llama": partial(LlamaConfig, **GROUPED),
    "tiny-qwen3": partial(Qwen3Config, **GROUPED),
    "tiny-mistral": partial(MistralConfig, **GROUPED, sliding_window=WINDOW),
    "tiny-gemma2": partial(Gemma2Config, **MIXED, query_pre_attn_scalar=16),
    # Its rotary embeddings are scaled for just so many positions.
    "tiny-gpt-oss": partial(
        GptOssConfig,
        **{**MIXED, "max_position_embeddings": 131072},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "tiny-deepseek-v3": partial(
        DeepseekV3Config,
        **DENSE,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
"""Plain, grouped and latent K/V; a window in all layers and in some; softcap, sinks, experts."""

TRAINED = ("smollm2",)
"""Shapes whose trained weights are taken where they can be had."""


def model_called(name: str, device: torch.device) -> tuple[PreTrainedModel, str]:
    """A model of FAMILIES or SHAPES in fp32, and whether its weights are "trained" or "random"."""
    if name in TRAINED:
        try:
            return trained_model(name, device, torch.float32), "trained"
        except ModelNotFound as error:
            log.warning("random weights instead: %s", error)
    return make_attentive(name, device), "random"


def make_attentive(name: str, device: torch.device) -> PreTrainedModel:
    """A model of FAMILIES or SHAPES in fp32, whose context matters as in a trained one.

    Its weights are random, the same every time; their deviation falls with the root of the width.
    Embeddings are not tied, for then the output would mostly repeat the input.
    """
    if name in FAMILIES:
        config = FAMILIES[name]()
    else:
        kind, arguments, _ = SHAPES[name]
        config = kind(**arguments)
    config.tie_word_embeddings = False
    config.initializer_range = WIDTH_STD * math.sqrt(WIDTH / config.hidden_size)
    return model_of(config, device, torch.float32)
