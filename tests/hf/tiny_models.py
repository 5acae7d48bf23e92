"""Tiny random models of every family that the cache must serve, made once per process.

All matrices have a standard deviation of 0.25: with transformers' own 0.02 such small models hardly
look at their context, and a cache that loses tokens would pass.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import transformers as t
from transformers import PreTrainedConfig, PreTrainedModel

INIT_STD = 0.25
VOCABULARY = 101
WINDOW = 8
"""Of the sliding layers: shorter than the prompts, and no multiple of a page."""

TOKENS: dict = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # embeddings used for the output as well repeat the last token
}
DENSE: dict = {
    **TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
GROUPED: dict = {**DENSE, "num_key_value_heads": 2}
"""Grouped queries: an address that mixes up heads would show."""

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _gpt2() -> PreTrainedConfig:
    return t.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=128)


def _opt() -> PreTrainedConfig:
    sizes = {key: value for key, value in DENSE.items() if key != "intermediate_size"}
    return t.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)


def _bloom() -> PreTrainedConfig:
    return t.BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4)


def _falcon() -> PreTrainedConfig:
    return t.FalconConfig(
        **TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    )


def _qwen3_next() -> PreTrainedConfig:
    return t.Qwen3NextConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def _gpt_oss() -> PreTrainedConfig:
    return t.GptOssConfig(
        **{**GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=MIXED,
    )


def _deepseek_v3() -> PreTrainedConfig:
    return t.DeepseekV3Config(
        **{**DENSE, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )


def _t5() -> PreTrainedConfig:
    return t.T5Config(
        **TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


def _bart() -> PreTrainedConfig:
    return t.BartConfig(
        **TOKENS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "gpt_neox": lambda: t.GPTNeoXConfig(**DENSE),
    "falcon": _falcon,
    "llama": lambda: t.LlamaConfig(**GROUPED),
    "qwen2": lambda: t.Qwen2Config(**GROUPED),
    "qwen3": lambda: t.Qwen3Config(**GROUPED, head_dim=8),
    "qwen3_next": _qwen3_next,
    "mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "mixtral": lambda: t.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
    "phi3": lambda: t.Phi3Config(**GROUPED),
    "gemma2": lambda: t.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=MIXED,
        query_pre_attn_scalar=8,
    ),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "t5": _t5,
    "bart": _bart,
}

TWO_KINDS: dict = {
    **GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
PER_LAYER: dict = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}

PECULIAR: dict[str, Callable[[], PreTrainedConfig]] = {
    # Later layers attend to the K/V that earlier ones got from the cache.
    "gemma3n": lambda: t.Gemma3nTextConfig(
        **TWO_KINDS,
        **PER_LAYER,
        num_kv_shared_layers=2,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4": lambda: t.Gemma4TextConfig(**TWO_KINDS, **PER_LAYER, num_kv_shared_layers=2),
    # Half of the layers see only their chunk of tokens.
    "llama4": lambda: t.Llama4TextConfig(
        **TWO_KINDS
        | {"layer_types": ["chunked_attention", "full_attention"] * 2, "sliding_window": None},
        attention_chunk_size=8,
        no_rope_layers=[1, 0, 1, 0],
        intermediate_size_mlp=48,
        num_local_experts=2,
    ),
}
"""Families for attention that reads pages to be tried on: their K/V or masks are peculiar."""

ENCODER_DECODER = ("t5", "bart")
DECODERS = tuple(name for name in CONFIGS if name not in ENCODER_DECODER)
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")
RECURRENT = ("qwen3_next",)

EAGER = ("bloom", "gemma2", "gpt_oss")
"""In 5.17 `sdpa` ignores Gemma 2's softcap; the others have no `sdpa`."""

OFF_THE_INTERFACE = ("falcon",)
"""Cannot be made with an attention implementation of ours: transformers raises KeyError."""

GATHERING = ("bloom", "deepseek_v3", "t5")
"""Add a bias to the scores, or change K/V after `update`: never attended to in place."""


@functools.cache
def tiny(name: str) -> PreTrainedModel:
    """The tiny model of that family, fp32, in eval mode. Leave it as it is: tests share it."""
    model = make(CONFIGS[name](), "eager" if name in EAGER else "sdpa")
    model.family = name
    return model


@functools.cache
def attending(name: str) -> PreTrainedModel:
    """`tiny(name)` once more, under pageforge attention."""
    model = make(CONFIGS[name](), "pageforge")
    model.family = name
    return model


@functools.cache
def draft_of(name: str) -> PreTrainedModel:
    """A model whose drafts that family takes now and then: it differs a little.

    Its window is so long that no draft leaves it, for that crashes in transformers 5.17.
    """
    model = tiny(name)
    config = copy.deepcopy(model.config)
    if name in SLIDING:
        config.sliding_window = 64
    draft = make(config, model.config._attn_implementation)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    return draft


def make(
    config: PreTrainedConfig, attention: str = "sdpa", *, std: float = INIT_STD, seed: int = 0
) -> PreTrainedModel:
    """A model of `config` with seeded weights."""
    auto = t.AutoModelForSeq2SeqLM if config.is_encoder_decoder else t.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
    return model
