"""The mask function of pageforge attention: what it hides, and whether pages can be read in place.

transformers makes a mask once a forward, before the first layer. The cache learns here that K/V are
asked for by pageforge attention, and which tokens are left padding, which then need no pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from pageforge.errors import ShapeError, expected, listed
from pageforge.geometry import first_visible
from pageforge.hf.cache_state import CacheState
from pageforge.hf.lazy import LazyTensor
from pageforge.hf.padding import left_padding
from pageforge.hf.paged_layer import KVLength


class LazyMask(LazyTensor):
    """A mask `[S, 1, T, L]` that is made only where attention needs one.

    `state`: of the cache whose K/V it covers, if that is a paged one. `refusal`: why the pages
    cannot be read in place, or None where they can: then each query sees the tokens up to its own,
    no more than `window`, and none of the `padding` that each row begins with.

    Dense it is the additive mask that transformers' own code for any model can add to scores.
    """

    def __init__(
        self,
        shape: object,
        dtype: object,
        device: torch.device,
        strides: None,
        arguments: dict[str, Any],
    ):
        self._arguments = arguments
        self.state: CacheState | None = None
        self.refusal: str | None = "the mask is made without a paged cache"
        self.window: int | None = None
        self.padding: tuple[int, ...] | None = None
        # Positions of the first K/V, and after the last, that it was made for.
        self.span = (arguments["kv_offset"], arguments["kv_offset"] + arguments["kv_length"])

    def _make(self) -> Tensor:
        mask: Tensor = eager_mask(**self._arguments | {"allow_is_bidirectional_skip": False})
        return mask

    @cached_property
    def sdpa(self) -> Tensor | None:
        """What transformers' `sdpa` attention takes: a bool mask, or None where it needs none."""
        return sdpa_mask(**self._arguments)

    def on(self, device: torch.device) -> Tensor:
        """The same on another device: layers of one model may be spread over several."""
        if self.refusal is not None or self.is_dense:
            return super().on(device)
        shown = self._arguments["attention_mask"]
        arguments = self._arguments | {
            "device": device,
            "attention_mask": None if shown is None else shown.to(device),
        }
        moved = LazyMask(self.shape, self.dtype, device, None, arguments)
        moved.state, moved.refusal = self.state, None
        moved.window, moved.padding = self.window, self.padding
        return moved


def pageforge_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask of one forward; see transformers' `sdpa_mask` for the arguments.

    Raises ShapeError where the mask shows padding whose K/V were never stored.
    """
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": int(kv_length),
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "dtype": dtype,
        "device": device,
        **kwargs,
    }
    if torch.compiler.is_compiling():
        made: Tensor = eager_mask(**arguments)
        return made
    shape = (batch_size, 1, q_length, int(kv_length))
    mask = LazyMask(shape, dtype, torch.device(device), None, arguments)
    if isinstance(kv_length, KVLength):
        _judge(mask, kv_length.state, q_offset, q_length, mask_function)
    return mask


def _judge(
    mask: LazyMask,
    state: CacheState,
    first_query: int,
    num_queries: int,
    mask_function: Callable[..., Any],
) -> None:
    """Tell the mask and the cache whether the pages can be read in place."""
    rows, length = mask.shape[0], first_query + num_queries
    mask.state = state
    mask.refusal, mask.window = _pattern(mask_function, mask._arguments.get("local_size"))
    first, stop = mask.span
    oldest = first_visible(first_query, mask.window)
    if mask.refusal is None and (stop != length or first > oldest):
        mask.refusal = "the mask is made for other tokens than attention needs"
    shown = mask._arguments["attention_mask"]
    padding: tuple[int, ...] | None = (0,) * rows
    if shown is not None:
        fits = shown.shape[0] == rows and shown.shape[1] >= length
        padding = left_padding(shown[:, :length]) if fits else None
        if padding is None and mask.refusal is None:
            mask.refusal = "the 2-D attention mask hides other tokens than left padding"
    _check_stored(state.stored_from(rows), padding, shown)
    if padding is not None and any(padding):
        mask.padding = padding
    state.begin_attention(length, padding if mask.refusal is None else None)


def _pattern(mask_function: Callable[..., Any], size: object) -> tuple[str | None, int | None]:
    """(refusal, window): a window of `size` tokens, or None where all earlier tokens are seen."""
    if mask_function is causal_mask_function:
        return None, None
    if isinstance(size, int) and _same(mask_function, sliding_window_causal_mask_function(size)):
        return None, size
    return "the mask is neither causal nor that of a sliding window", None


def _same(one: object, other: object) -> bool:
    """Whether two mask functions have the same code over the same values, closures included."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = [
            [cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)
        ]
        return one.__code__ is other.__code__ and _same(*map(tuple, cells))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _check_stored(
    stored: tuple[int, ...] | None, padding: tuple[int, ...] | None, shown: Tensor | None
) -> None:
    """Raise ShapeError where tokens are to be seen that were left padding when they came.

    `stored`: where each row's K/V begin. `shown`: the 2-D mask, of which `padding` is left padding.
    """
    if stored is None or not any(stored):
        return
    if padding is None:
        assert shown is not None
        seen = len(stored) == len(shown) and any(
            bool(row[:start].any()) for row, start in zip(shown, stored, strict=True)
        )
    else:
        seen = len(stored) == len(padding) and any(
            tokens < start for tokens, start in zip(padding, stored, strict=True)
        )
    if seen:
        raise ShapeError(
            expected(
                "attention_mask",
                f"zeros for the left padding {listed(stored)} of the first forward, whose K/V were "
                f"not stored",
                "none" if shown is None else "ones there",
                "pass the whole mask [batch, tokens] in every forward, or reset() the cache",
            )
        )
