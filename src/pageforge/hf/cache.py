"""PagedKVCache: transformers' cache interface over pages."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from pageforge.errors import (
    GeometryError,
    PageForgeError,
    ShapeError,
    UnsupportedModel,
    expected,
)
from pageforge.geometry import check_page_size
from pageforge.hf.cache_state import CacheState
from pageforge.hf.paged_layer import PagedLayer
from pageforge.hf.pages_file import load_pages, save_pages
from pageforge.memory import PageTable
from pageforge.pool import PagePool, check_max_pages
from pageforge.probe import layer_windows

CROP_TO_LENGTH = Version(transformers.__version__) < Version("5.18")
"""Up to 5.17 `crop(n)` with n > 0 means "keep n tokens"; later versions refuse it."""


DEFAULT_PAGE_SIZE = 16
"""Tokens a page, where nothing else is asked for."""


class PagedKVCache(DynamicCache):
    """A cache that holds only the pages its tokens fill. Pass it as `past_key_values`.

    Each attention layer's K/V lie in pages of a `PagePool`; layers without a growing K/V cache
    (linear attention, Mamba) keep transformers' own. Pages go back by `free()`, by `reset()`, at
    the end of a `with` block, or when the cache is garbage-collected.
    """

    def __init__(
        self,
        pool: PagePool | PreTrainedConfig,
        *,
        page_size: int | None = None,
        max_pages: int | None = None,
        max_memory: int | float | str | None = None,
        attention_mask: Tensor | None = None,
    ):
        """Pages come from `pool`, or from a pool that the cache makes at the first update.

        `pool`: a PagePool, or a model's config; only then `page_size` (16), `max_pages` and
        `max_memory` count, with the meaning that they have for PagePool.

        `attention_mask [B, T]`: the prompt's mask. Whole pages of left padding then cost nothing.
        """
        if isinstance(pool, PagePool) and (page_size, max_pages, max_memory) != (None, None, None):
            raise GeometryError(
                "page_size, max_pages, max_memory: expected none beside a pool, which has its own; "
                "pass them to PagePool"
            )
        if not isinstance(pool, PagePool | PreTrainedConfig):
            raise ShapeError(
                expected(
                    "pool",
                    "a PagePool or a model's config",
                    type(pool).__name__,
                    "pass PagePool.for_model(model) or model.config",
                )
            )
        page_size = DEFAULT_PAGE_SIZE if page_size is None else page_size
        check_page_size(page_size)
        check_max_pages(max_pages)
        self._state = CacheState(pool, page_size, max_pages, max_memory, attention_mask)
        config = self._state.config
        super().__init__(config=config)
        windows = _pool_windows(pool) if config is None else layer_windows(config)
        paged = {index: PagedLayer(self._state, index, windows[index]) for index in windows}
        layers = dict(enumerate(self.layers)) | paged
        self.layers: list[Any] = [layers[index] for index in sorted(layers)]
        self.layer_class_to_replicate = None  # all layers are here
        self._finalizer = weakref.finalize(self, CacheState.abandon, self._state)

    # --- beyond transformers' interface -----------------------------------------------------

    @property
    def pool(self) -> PagePool:
        """The pool that the pages lie in. Raises PageForgeError before a cache made its own."""
        if self._state.pool is None:
            raise PageForgeError(
                "cache.pool: expected a first update before; a cache given a config makes its pool "
                "then: run the model, or pass a PagePool"
            )
        return self._state.pool

    @property
    def page_tables(self) -> list[PageTable]:
        """The live page tables, one a row: which pages hold what. Empty before the first update."""
        self._state.write_pending()
        self._state.settle()
        batch = self._state.batch
        return [] if batch is None else list(batch.tables)

    @property
    def num_gathers(self) -> int:
        """How often a layer's stored K/V were made dense: never while decoding in place."""
        return self._state.num_gathers

    def free(self) -> None:
        """Give every page back. The cache cannot be used any more; freeing twice does nothing."""
        self._state.free()

    def fork(self, n: int = 1) -> list[PagedKVCache]:
        """`n` caches that share every page with this one; who writes to a shared page copies it."""
        if n < 1:
            raise ShapeError(expected("n", "at least 1", n, "fork once or more"))
        return [self.__deepcopy__({}) for _ in range(n)]

    def to_dynamic(self) -> DynamicCache:
        """A DynamicCache with the same contents (a copy)."""
        self._state.check_live()
        dense = DynamicCache(config=self._state.config)
        if self._state.config is None:
            dense.layers = [_dynamic_layer(layer.window) for layer in self.layers]
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, PagedLayer):
                dense.layers[index] = copy.deepcopy(layer)
            elif layer.get_seq_length():
                _fill_dynamic_layer(dense, index, layer)
        return dense

    @classmethod
    def from_dynamic(cls, dense: DynamicCache, pool: PagePool) -> PagedKVCache:
        """A paged cache with the contents of a DynamicCache (a copy).

        Raises ShapeError where the pool does not fit, or where a sliding layer has lost its first
        tokens already.
        """
        cache = cls(pool)
        try:
            cache._take_dense(dense)
        except Exception:
            cache.free()
            raise
        return cache

    def save(self, path: str | PathLike[str]) -> None:
        """Write the pages and the page tables to a safetensors file."""
        self._state.check_live()
        self._state.write_pending()
        self._state.settle()
        if self._other_layers():
            raise UnsupportedModel(
                "save: expected paged layers only, got layers with another state (linear "
                "attention); keep the cache in memory, or fork it"
            )
        save_pages(path, self._state.batch, self._state.lengths)

    @classmethod
    def load(cls, path: str | PathLike[str], pool: PagePool) -> PagedKVCache:
        """The cache that `save` wrote, in pages of `pool`, which must have the same geometry."""
        cache = cls(pool)
        cache._state.batch, cache._state.lengths = load_pages(path, pool)
        return cache

    def __repr__(self) -> str:
        state, batch = self._state, self._state.batch
        if state.is_freed or batch is None:
            return f"PagedKVCache({'freed' if state.is_freed else 'empty'})"
        geometry = batch.pool.geometry
        num_pages = sum(
            len({page for table in batch.tables for page in table.pages(group)})
            for group in range(len(geometry.groups))
        )
        num_tokens = max(state.lengths.values(), default=0)
        return (
            f"PagedKVCache({len(batch)} rows of {num_tokens} tokens, "
            f"{num_pages} pages of {geometry.page_size})"
        )

    def __enter__(self) -> PagedKVCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A fork: transformers' recipe for reusing a prompt's cache then costs no memory."""
        self._state.check_live()
        child = type(self).__new__(type(self))
        child.__dict__.update(
            {
                name: value
                for name, value in vars(self).items()
                if name not in ("layers", "_finalizer")
            }
        )
        child._state = self._state.fork()
        child._finalizer = weakref.finalize(child, CacheState.abandon, child._state)
        child.layers = [
            PagedLayer(child._state, layer.index, layer.window)
            if isinstance(layer, PagedLayer)
            else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return child

    def __copy__(self) -> PagedKVCache:
        """A shallow copy would free its pages under the original: it is a fork as well."""
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise TypeError("a PagedKVCache cannot be pickled; write its pages with cache.save(path)")

    # --- transformers' interface, on all rows at once ---------------------------------------

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if not 0 <= layer_idx < len(self.layers):
            raise GeometryError(
                expected(
                    "layer_idx",
                    f"from 0 to {len(self.layers) - 1}",
                    layer_idx,
                    "the cache was made for another model, see PagePool.for_model",
                )
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            window = getattr(layer, "_sliding_window_tensor", None)
            yield layer.keys, layer.values, window

    def reset(self) -> None:
        """Release all pages and start anew; the next update may bring another batch size."""
        self._state.reset()
        for layer in self._other_layers():
            layer.reset()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last `-tokens_to_remove` tokens of each row; their pages are released.

        Raises CropError where a sliding layer's window reaches tokens that are gone.
        """
        count = int(tokens_to_remove)
        if count > 0:
            if not CROP_TO_LENGTH:
                raise ValueError(
                    expected("tokens_to_remove", "0 or less", count, "pass -n to remove n tokens")
                )
            count = min(0, count - self.get_seq_length())
        self._state.length_after_crop(-count)  # all layers are cropped, or none where one refuses
        others = self._other_layers()
        for layer in others:
            if count and not layer.is_croppable:
                raise UnsupportedModel(
                    f"crop: expected layers that can be rolled back, got {type(layer).__name__} "
                    f"with a recurrent state; keep a fork() of the cache instead"
                )
        for layer in others:
            layer.crop(count)
        self._state.crop(-count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was, as beam search asks for every step."""
        self._select(beam_idx, "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times; the copies share its pages."""
        rows = torch.arange(self._state.batch_size, device="cpu").repeat_interleave(repeats)
        self._select(rows, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        rows = torch.arange(self._state.batch_size, device="cpu")
        rows = rows[indices.cpu()] if len(rows) else rows  # an empty cache: nothing happens
        self._select(rows, "batch_select_indices", indices)

    # --- inside -----------------------------------------------------------------------------

    def _other_layers(self) -> list[Any]:
        """Layers that transformers' own classes serve."""
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]

    def _select(self, rows: Tensor, method: str, argument: Any) -> None:
        """Row `i` becomes row `rows[i]` in all layers, or in none where one refuses.

        `method`, called with `argument`, does this for transformers' own layers.
        """
        others = self._other_layers()
        for layer in others:
            if not hasattr(layer, method):
                raise UnsupportedModel(
                    f"{method}: expected layers that have it, got {type(layer).__name__} of "
                    f"transformers; use reorder_cache or fork() instead"
                )
        self._state.select(rows)
        for layer in others:
            getattr(layer, method)(argument)

    def _take_dense(self, dense: DynamicCache) -> None:
        if isinstance(dense, EncoderDecoderCache) or len(dense.layers) != len(self.layers):
            raise ShapeError(
                expected(
                    "dense",
                    f"a cache of {len(self.layers)} layers",
                    f"{dense!r}",
                    "match the model",
                )
            )
        for index, layer in enumerate(self.layers):
            source = dense.layers[index]
            if not isinstance(layer, PagedLayer):
                self.layers[index] = copy.deepcopy(source)
            elif source.get_seq_length():
                if source.keys.shape[-2] != source.get_seq_length():
                    raise ShapeError(
                        f"from_dynamic: layer {index} slid past its window of {layer.window} and "
                        f"holds {source.keys.shape[-2]} of {source.get_seq_length()} tokens; "
                        f"convert earlier"
                    )
                layer.update(source.keys, source.values)


def _pool_windows(pool: PagePool) -> dict[int, int | None]:
    """The layers of a pool made from a bare geometry, which must be those of a whole model."""
    windows = {
        layer: group.shape.window for group in pool.geometry.groups for layer in group.layers
    }
    if sorted(windows) != list(range(len(windows))):
        raise GeometryError(
            expected(
                "layers", "0, 1, 2, ... without gaps", sorted(windows), "use PagePool.for_model"
            )
        )
    return windows


def _dynamic_layer(window: int | None) -> DynamicLayer:
    return DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)


def _fill_dynamic_layer(dense: DynamicCache, index: int, layer: PagedLayer) -> None:
    keys, values = layer.keys, layer.values
    dense.update(keys, values, index)
    if layer.is_sliding:
        dense.layers[index].cumulative_length = layer.get_seq_length()
