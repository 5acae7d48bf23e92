"""Models to measure on. Mostly random weights: time does not depend on what the weights say."""

from __future__ import annotations

import contextlib
import copy
import itertools
import string
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from pageforge.hf.pretrained import load_model

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], torch.dtype]] = {
    "gpt2": (GPT2Config, {}, torch.float16),
    "smollm2": (
        LlamaConfig,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
    ),
    "llama-8b": (
        LlamaConfig,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
        torch.bfloat16,
    ),
    "tiny": (
        LlamaConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
        },
        torch.float32,
    ),
}
"""Config class, its arguments, and the dtype on CUDA."""


def make_model(
    name: str, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A model of that shape on `device`; the same weights every time.

    `dtype`: by default the shape's own, in fp32 on the CPU.
    """
    kind, arguments, own_dtype = SHAPES[name]
    if dtype is None:
        dtype = own_dtype if device.type == "cuda" else torch.float32
    return model_of(kind(**arguments), device, dtype)


def model_of(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of that config with random weights; the same every time."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return _endless(model.eval())


def trained_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The trained model of that name, from where `load_model` finds it. Raises ModelNotFound."""
    with _without_bars():
        model, _ = load_model(name, dtype=dtype, device=device)
    return _endless(model)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Within this context libraries draw no progress bars, which would end up among results."""
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()


def _endless(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, which ends no sequence early and draws no token unless asked to."""
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def written_by(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """`[rows, length]` tokens that the model itself draws, each row from a token of its own."""
    torch.manual_seed(0)
    first = torch.randint(model.config.vocab_size, (rows, 1)).to(model.device)
    out: Tensor = model.generate(
        first,
        attention_mask=torch.ones_like(first),
        do_sample=True,
        max_new_tokens=length - 1,
    )
    return out


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of made-up tokens, a space and letters each, that can only detokenise.

    It does so byte by byte like GPT-2's, Qwen's and Llama's, and costs about what they do.
    """
    words = itertools.chain.from_iterable(
        itertools.product(string.ascii_lowercase, repeat=length) for length in itertools.count(1)
    )
    vocab = {
        "\u0120" + "".join(word): token
        for token, word in zip(range(vocab_size), words, strict=False)
    }
    backend = Tokenizer(models.WordLevel(vocab))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same weights: it can be compiled or changed without the first."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    other: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return other


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A second model with the same weights in `dtype`.

    Its buffers are the model's: rotary embeddings keep their fp32 frequencies, as they do where
    transformers loads a model in a smaller dtype.
    """
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for weight in model.parameters():
        memo[id(weight)] = torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    other: PreTrainedModel = copy.deepcopy(model, memo)
    other.config.dtype = dtype
    return other
