"""From a prompt to token ids, and a batch of them side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, raw: bool = False) -> list[int]:
    """The ids of a prompt, in the model's chat form if it has one and not `raw`."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer(text).input_ids)
    chat = [{"role": "user", "content": text}]
    filled = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(filled, add_special_tokens=False).input_ids)


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask), both `[S, T]`."""
    length = max(map(len, rows))
    ids = [[pad] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
