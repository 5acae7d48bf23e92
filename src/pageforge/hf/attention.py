"""`attn_implementation="pageforge"`: attention that reads a PagedKVCache's pages where they lie.

It serves causal masks with left padding, sliding windows, softcap and sinks. Whatever else comes
(other masks, K/V that were transformed after `update`, no paged cache, training) is computed on
dense K/V with transformers' full mask: slower, and with the same answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging

from pageforge.errors import UnsupportedModel
from pageforge.hf.dense_attention import dense_attention
from pageforge.hf.mask import LazyMask, pageforge_mask
from pageforge.hf.new_tokens import NewTokens, tokens_of
from pageforge.hf.step_cache import STEP_ARGUMENT, StepCache
from pageforge.ops import HEAD_DIMS

logger = logging.get_logger(__name__)  # transformers': with `warning_once`

NAME = "pageforge"
"""What transformers calls it. No "flash", "sdpa" or "paged|" in it: those have meanings there."""

NOT_SERVED = frozenset({"indices", "block_indices", "sinks"})
"""How models pass what sparse attention has chosen, and sinks of each query. transformers' `sdpa`
need not know them, for then models put them into the mask; under another name they do not."""


def register() -> None:
    """Make `attn_implementation="pageforge"` known to transformers."""
    AttentionInterface.register(NAME, pageforge_attention)
    AttentionMaskInterface.register(NAME, pageforge_mask)


def pageforge_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query `[S, Hq, T, Dk]` to `[S, T, Hq, Dv]`.

    `key`, `value`: what the cache's `update` returned; `softcap` bounds scores, `s_aux [Hq]` are
    sinks. Raises UnsupportedModel for arguments that it would have to ignore.
    """
    if STEP_ARGUMENT in kwargs:  # a compiled step: torch.compile traces no lazy K/V
        return _in_step(module, query, key, value, scaling, softcap, s_aux, kwargs), None
    if not kwargs.keys().isdisjoint(NOT_SERVED):
        _check_served(kwargs)
    if kwargs.get("output_attentions"):
        logger.warning_once(
            'pageforge attention returns no attention weights; attn_implementation="eager" does'
        )
    tokens = tokens_of(key, value)
    if tokens is not None:
        refusal = _refusal(module, query, tokens, attention_mask, dropout, s_aux, kwargs)
        if refusal is None:
            assert isinstance(attention_mask, LazyMask)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return _in_place(module, query, tokens, attention_mask, scale, softcap, s_aux), None
        tokens.state.warn(refusal)
    out = dense_attention(
        module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, **kwargs
    )
    return out, None


def _in_place(
    module: torch.nn.Module,
    query: Tensor,
    tokens: NewTokens,
    mask: LazyMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # [S, T, Hq, Dv]
    if tokens.is_whole and query.shape[2] > 1:
        whole = mask.window is None or query.shape[2] <= mask.window
        if whole and mask.padding is None and softcap is None and sinks is None:
            # All K/V that are seen have just come, and torch has faster kernels for that.
            return sdpa_attention_forward(
                module, query, tokens.key, tokens.value, None, scaling=scale, is_causal=True
            )[0]
    return tokens.attend(
        query,
        scale=scale,
        window=mask.window,
        padding=mask.padding,
        softcap=softcap,
        sinks=sinks,
    )


def _in_step(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:  # [S, T, Hq, Dv]
    """Attention in a compiled step, whose cache comes as STEP_ARGUMENT; see StepCache."""
    cache: StepCache = kwargs[STEP_ARGUMENT]
    layer: Any = module.layer_idx
    return cache.attend(
        layer,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=cache.windows[layer],
        softcap=softcap,
        sinks=sinks,
    )


def _refusal(
    module: torch.nn.Module,
    query: Tensor,
    tokens: NewTokens,
    mask: Tensor | None,
    dropout: float,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Why these pages cannot be read in place; None where they can."""
    if type(mask) is not LazyMask:
        return "the mask is not one that pageforge attention made"
    if mask.refusal is not None:
        return mask.refusal
    step, pages, count = tokens.step, tokens.key_pages, query.shape[2]
    if mask.is_dense or tokens.is_dense:
        return "something else has computed with the mask or the K/V before"
    if (
        mask.state is not tokens.state
        or mask.span != (tokens.oldest, step.stop)
        or count != step.stop - step.start
    ):
        return "the mask is made for another layer's tokens"
    if query.device != pages.device or (sinks is not None and sinks.device != pages.device):
        return f"queries or sinks are not on {pages.device}, where the pages are"
    if not query.dtype == tokens.key.dtype == pages.dtype:
        return f"queries are {query.dtype} and keys {tokens.key.dtype}, pages {pages.dtype}"
    if dropout:
        return "attention has dropout"
    if torch.is_grad_enabled() and (
        query.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        return "attention needs a gradient"
    if kwargs.get("position_bias") is not None:
        return "scores have a bias"
    if count > 1:
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            return "attention is not causal"
    if query.is_cuda:
        key_dim, value_dim = tokens.dims
        if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
            dims = f"{key_dim} and {value_dim}"
            return f"head dims are {dims}; kernels serve {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    return None


def _check_served(kwargs: dict[str, Any]) -> None:
    for name in NOT_SERVED & kwargs.keys():
        if kwargs[name] is not None:
            raise UnsupportedModel(
                f"{name}: expected attention over all earlier tokens, got a model that chooses "
                f'them for each query; use attn_implementation="sdpa" or "eager", with any cache'
            )
