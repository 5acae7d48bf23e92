"""PagedLayer: one attention layer's part of a PagedKVCache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from pageforge.geometry import first_visible
from pageforge.hf.cache_state import CacheState
from pageforge.hf.new_tokens import NewTokens, lazy_kv


class KVLength(int):
    """A number of K/V that knows whose they are: transformers hands it to the mask function."""

    state: CacheState


class PagedLayer(CacheLayerMixin):
    """Transformers' layer interface over the pages that all layers of a cache share.

    What concerns whole rows (reordering, cropping) is the cache's business: rows belong to all
    layers at once.
    """

    is_compileable = False  # otherwise generate() would build 4D masks and compile by itself
    is_croppable = True

    def __init__(self, state: CacheState, index: int, window: int | None):
        self._state = state
        self.index = index
        self.window = window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
            self._sliding_window_tensor = torch.tensor(window, dtype=torch.long, device="cpu")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new K/V `[S, Hkv, T, D]`; returns the K/V that attention needs.

        That is all tokens, or with a window the last `window - 1` before the new ones: lazily in a
        forward under pageforge attention, else dense.
        """
        state = self._state
        step, pages = state.claim(self.index, key_states, value_states)
        oldest = first_visible(step.start, self.window)
        tokens = NewTokens(state, self.index, oldest, step, key_states, value_states, pages)
        lazily = state.attended_length == step.stop
        if not lazily:
            tokens.write_and_gather()
        elif step.stop - step.start == 1:
            state.pending = tokens
        else:
            tokens.write()
        state.store(self.index, step.stop)
        return lazy_kv(tokens) if lazily else tokens.dense()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make what the first update would make, without tokens."""
        self._state.prepare(key_states, value_states)

    @property
    def is_initialized(self) -> bool:
        """Whether rows exist."""
        return self._state.batch is not None

    @property
    def keys(self) -> Tensor | None:
        """The stored K, dense (a copy): all tokens, or the last `window - 1`."""
        return self._dense()[0]

    @property
    def values(self) -> Tensor | None:
        """The stored V, dense (a copy): all tokens, or the last `window - 1`."""
        return self._dense()[1]

    def get_seq_length(self) -> int:
        """Tokens stored, those that left the window included."""
        return self._state.length_of(self.index)

    def get_max_length(self) -> int:
        """-1: no bound; or the window, as transformers' own sliding layers say."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of K/V that the next update returns, position of the first)."""
        self._state.begin_forward()
        length = self.get_seq_length()
        offset = first_visible(length, self.window)
        if torch.compiler.is_compiling():  # torch.compile knows plain numbers only
            return length - offset + query_length, offset
        kv_length = KVLength(length - offset + query_length)
        kv_length.state = self._state
        return kv_length, offset

    def activate_past_recording(self) -> None:
        """Keep what leaves the window, until `record_past` is set to False: drafts roll back."""
        self.record_past = True

    @property
    def record_past(self) -> bool:
        """Whether tokens that left the window are kept."""
        return self._state.keeps_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._state.keeps_past = value

    def offload(self) -> None:
        """Nothing: pages stay on their device, and return to it when they are released."""

    def prefetch(self) -> None:
        """Nothing: see `offload`."""

    def reset(self) -> NoReturn:
        """Rows are shared by all layers: call it on the cache."""
        raise NotImplementedError("reset: call it on the PagedKVCache, not on a layer")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Rows are shared by all layers: call it on the cache."""
        raise NotImplementedError("reorder_cache: call it on the PagedKVCache, not on a layer")

    def _dense(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        length = self.get_seq_length()
        if not length:
            return None, None
        oldest = first_visible(length, self.window)
        return self._state.gather(self.index, oldest, length)
