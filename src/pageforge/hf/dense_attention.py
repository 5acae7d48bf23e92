"""Attention on dense K/V: what transformers would do, where pages cannot be read in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pageforge.hf.lazy import LazyTensor
from pageforge.hf.mask import LazyMask


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,  # [S, Hq, T, Dk]
    key: Tensor,  # [S, Hkv, L, Dk]
    value: Tensor,  # [S, Hkv, L, Dv]
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq]
    **kwargs: Any,
) -> Tensor:  # [S, T, Hq, Dv]
    """As transformers' `sdpa`; with softcap or sinks, which that does not serve, as its `eager`."""
    key, value = _dense(key), _dense(value)
    if softcap is not None or sinks is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask = None if mask is None else _dense(mask)
        bias = kwargs.get("position_bias")
        return _explicit(query, key, value, mask, scale, softcap, sinks, bias, dropout)
    if isinstance(mask, LazyMask) and not mask.is_dense:
        mask = mask.sdpa
    elif mask is not None:
        mask = _dense(mask)
    out: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )[0]
    return out


def _dense(tensor: Tensor) -> Tensor:
    """Made now: torch would make it below autograd, and keep the lazy one for the backward pass."""
    return tensor.dense() if isinstance(tensor, LazyTensor) else tensor


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # additive, or bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Step by step, as transformers' models have it; but K/V are not repeated over a group."""
    rows, num_heads, count, _ = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(rows, num_kv_heads, -1, query.shape[3])  # head by head of a group
    score = torch.matmul(grouped, key.transpose(2, 3)).view(rows, num_heads, count, -1) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    if mask is not None and mask.dtype == torch.bool:
        score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
    elif mask is not None:
        score = score + mask
    if sinks is not None:
        sink = sinks.to(score.dtype).view(1, -1, 1, 1).expand(rows, -1, count, 1)
        score = torch.cat([score, sink], -1)
    weight = score.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    weight = functional.dropout(weight, dropout)
    out = torch.matmul(weight.view(rows, num_kv_heads, -1, key.shape[2]), value)
    return out.view(rows, num_heads, count, -1).transpose(1, 2).contiguous()
