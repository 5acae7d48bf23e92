"""StepCache: the cache that a model is given while one of its decode steps is captured.

It has no length of its own: where tokens lie, and how many there are, is read on the device from
StepInputs whenever the graph runs. What would need K/V to be dense is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from pageforge import ops
from pageforge.errors import UnsupportedModel
from pageforge.geometry import KVGeometry
from pageforge.hf.new_tokens import LazyKV
from pageforge.hf.paged_layer import KVLength
from pageforge.ops import DecodePlan

STEP_ARGUMENT = "pageforge_step"
"""The keyword argument of a model's forward by which a compiled step reaches attention."""


class Span(NamedTuple):
    """The positions of the step's tokens, as masks and attention of a capture see them."""

    start: int
    stop: int


class Inputs(Protocol):
    """What attention reads of a step: see graphs.StepInputs."""

    geometry: KVGeometry
    seq_lens: Tensor
    cu_query_lens: Tensor
    page_tables: list[Tensor]

    @property
    def starts(self) -> Tensor | None:
        """`[S]` int32: left padding."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a layer."""

    def plan(self, group: int, window: int | None) -> DecodePlan | None:
        """How rows of one query are cut; None where attention needs no plan."""


class StepCache(Cache):
    """A cache of all layers of a pool, for one decode step: one token a row, `[S, 1]`."""

    span = Span(start=0, stop=1)

    def __init__(self, inputs: Inputs, windows: dict[int, int | None] | None = None):
        """`windows` of the layers, once they are known: then `update` returns plain tensors.

        torch.compile cannot trace lazy ones; attention then gets this cache as STEP_ARGUMENT.
        """
        self.inputs = inputs
        self.windows: dict[int, int | None] = {} if windows is None else windows
        self.is_lazy = windows is None
        self.is_regular = True
        """Whether each attention reads the K/V of its own layer, just updated."""
        self.written: set[int] = set()
        self.group_of = {
            layer: number
            for number, group in enumerate(inputs.geometry.groups)
            for layer in group.layers
        }
        super().__init__(layers=[_StepLayer(self, layer) for layer in sorted(self.group_of)])

    def attend(
        self,
        layer: int,
        query: Tensor,  # [S, Hq, 1, Dk]
        key: Tensor,  # [S, Hkv, 1, Dk]
        value: Tensor,  # [S, Hkv, 1, Dv]
        *,
        window: int | None,
        **options: Any,
    ) -> Tensor:  # [S, 1, Hq, Dv]
        """Write the step's tokens of a layer and attend to all of it; `options`: of the op."""
        key_pages, value_pages, page_table, shared = self._inputs_of(layer, window)
        out = ops.write_and_attend(
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            key_pages,
            value_pages,
            page_table,
            self.inputs.seq_lens,
            **shared,
            **options,
        )
        return out.unsqueeze(1)

    def attend_again(
        self,
        layer: int,
        query: Tensor,  # [S, Hq, 1, Dk]
        *,
        window: int | None,
        **options: Any,
    ) -> Tensor:  # [S, 1, Hq, Dv]
        """Attend to a layer whose tokens were written before: some models share K/V of layers."""
        key_pages, value_pages, page_table, shared = self._inputs_of(layer, window)
        out = ops.attend(
            query.squeeze(2),
            key_pages,
            value_pages,
            page_table,
            self.inputs.seq_lens,
            self.inputs.cu_query_lens,
            max_query_len=1,
            **shared,
            **options,
        )
        return out.unsqueeze(1)

    def _inputs_of(
        self, layer: int, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """K and V pages of a layer, its page table, and what else both ops take from the step."""
        inputs, group = self.inputs, self.group_of[layer]
        plan = inputs.plan(group, window)
        shared = {"window": window, "starts": inputs.starts, "plan": plan}
        return *inputs.layer(layer), inputs.page_tables[group], shared

    def check_written(self) -> None:
        """Raise UnsupportedModel where a layer of the pool was left out: its pages would lack it.

        Layers that use others' K/V are none of the pool's.
        """
        missing = sorted(self.group_of.keys() - self.written)
        if missing:
            raise UnsupportedModel(
                f"decode step: layers {missing} did not write their K/V in the step"
            )

    # What the mask function asks of the state of a cache.

    def stored_from(self, rows: int) -> None:
        """Unknown to the host: padding lies in StepInputs."""

    def begin_attention(self, length: int, starts: tuple[int, ...] | None) -> None:
        """Nothing follows from it."""

    def warn(self, reason: str) -> NoReturn:
        """K/V would have to be dense."""
        raise UnsupportedModel(f"decode step: expected attention that reads pages, but {reason}")


class _StepLayer(CacheLayerMixin):
    """One layer; see PagedLayer for what the methods are."""

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, cache: StepCache, layer: int):
        self._cache = cache
        self._layer = layer
        window = cache.inputs.geometry.groups[cache.group_of[layer]].shape.window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
            self._sliding_window_tensor = torch.tensor(window, device="cpu")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """K and V `[S, Hkv, 1, D]`, which attention will write: lazily, or with `windows` as is."""
        if not self._cache.is_lazy:
            return key_states, value_states
        tokens: Any = StepTokens(self._cache, self._layer, key_states, value_states)
        key, value = (
            LazyKV.of(tokens, states, is_value, states.shape, None)
            for states, is_value in ((key_states, False), (value_states, True))
        )
        return key, value

    def get_seq_length(self) -> int:
        """0: it is asked where positions are not given, and they always are."""
        return 0

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the step's token alone: of the mask only its pattern is used."""
        if not self._cache.is_lazy:
            return query_length, 0
        length = KVLength(query_length)
        length.state = self._cache
        return length, 0


class StepTokens:
    """The K/V that one `update` in a step brought; what NewTokens is outside of captures."""

    is_dense = False
    is_whole = False
    oldest = 0

    def __init__(self, cache: StepCache, layer: int, key: Tensor, value: Tensor):
        self.state = cache
        self.step = cache.span
        self.layer = layer
        self.key = key
        self.value = value
        self.key_pages, self.value_pages = cache.inputs.layer(layer)

    @property
    def dims(self) -> tuple[int, int]:
        """Of K's and V's heads."""
        return self.key_pages.shape[3], self.value_pages.shape[3]

    def dense(self) -> NoReturn:
        """There is no telling how long they would be."""
        self.state.warn("the model computes with K/V by itself")

    def attend(
        self,
        query: Tensor,  # [S, Hq, 1, Dk]
        *,
        scale: float,
        window: int | None,
        padding: tuple[int, ...] | None,
        softcap: float | None,
        sinks: Tensor | None,  # [Hq]
    ) -> Tensor:  # [S, 1, Hq, Dv]
        """Write and attend, or attend once more; see StepCache."""
        cache = self.state
        options: dict[str, Any] = {"scale": scale, "window": window}
        options |= {"softcap": softcap, "sinks": sinks}
        if self.layer in cache.written:
            cache.is_regular = False
            return cache.attend_again(self.layer, query, **options)
        cache.written.add(self.layer)
        cache.windows[self.layer] = window
        return cache.attend(self.layer, query, self.key, self.value, **options)
