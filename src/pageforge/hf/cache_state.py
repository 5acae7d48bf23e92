"""CacheState: what all layers of a PagedKVCache share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedConfig

from pageforge import ops
from pageforge.batch import SequenceBatch, StepTensors
from pageforge.errors import (
    CropError,
    OutOfPages,
    ShapeError,
    UnsupportedModel,
    UseAfterFree,
    expected,
)
from pageforge.geometry import KVGeometry, LayerShape
from pageforge.hf.fit import check_fit
from pageforge.hf.padding import leading_zeros
from pageforge.pool import PagePool
from pageforge.probe import geometry_of_config, layer_windows

log = logging.getLogger(__name__)


class Writes(Protocol):
    """New tokens whose K/V are not in their pages yet."""

    def write(self) -> None:
        """Write them."""


class CacheState:
    """The rows' pages, and how many tokens each layer has stored.

    Layers of one forward are updated one after the other: the first one to bring new tokens claims
    pages for all of them.

    Under pageforge attention the newest token of a layer may be `pending`: attention writes it to
    its page in the launch that reads the others. Whatever else reads or moves pages writes it
    first.
    """

    def __init__(
        self,
        pool: PagePool | PreTrainedConfig,
        page_size: int,
        max_pages: int | None,
        max_memory: int | float | str | None,
        attention_mask: Tensor | None,
    ):
        self.pool = pool if isinstance(pool, PagePool) else None
        self.config = pool.model_config if isinstance(pool, PagePool) else pool
        self.batch: SequenceBatch | None = None
        self.lengths: dict[int, int] = {}  # layer -> tokens stored
        self.keeps_past = False  # during assisted decoding nothing may leave a window
        self._pool_arguments = (page_size, max_pages, max_memory)
        self._starts = None if attention_mask is None else leading_zeros(attention_mask)
        self.is_freed = False
        self.pending: Writes | None = None
        self.version = 0  # counts what makes K/V of earlier forwards another's: crop, select, ...
        self.num_gathers = 0
        # Of a forward whose masks pageforge attention has made: how long the rows are after it, and
        # their left padding.
        self.attended_length: int | None = None
        self._attended_starts: tuple[int, ...] | None = None
        self._has_warned = False
        # An encoder-decoder's cross-attention must not come here; see `_check_not_cross_attention`.
        self._has_cross_attention = bool(
            getattr(self.config, "is_encoder_decoder", False)
            or getattr(self.config, "add_cross_attention", False)
        )
        # group -> what K/V that fit it and the rows looked like; layers of a group are alike
        self._fitting: dict[int, tuple[object, ...]] = {}
        self._latest: int | None = None  # the layer updated last in this forward
        self._is_ahead = False  # whether the rows have room for one token more than they hold
        # Told (layer, start, stop) of new tokens; of a captured step's those of the last layer.
        self.watchers: list[Callable[[int, int, int], None]] = []

    # --- reading and writing ----------------------------------------------------------------

    def claim(
        self, layer: int, key: Tensor, value: Tensor
    ) -> tuple[StepTensors, tuple[Tensor, Tensor]]:
        """Room for K `[S, Hkv, T, Dk]` and V of new tokens of `layer`, which `store` then takes.

        Returns what ops need to know of them, and the layer's pages of K and of V.
        """
        self.check_live()
        self.write_pending()
        if self._has_cross_attention:
            self._check_not_cross_attention(layer)
        start = self.length_of(layer)
        group, key_pages, value_pages = self._place_for(layer, start, key, value)
        assert self.batch is not None  # made at the latest by now
        stop = start + key.shape[2]
        if stop != self.batch.length:
            self._cancel_step()
            self._grow(layer, stop)
        self._is_ahead = False
        return self.batch.step(group, start, stop), (key_pages, value_pages)

    def store(self, layer: int, length: int) -> None:
        """`layer` now has `length` tokens: the new ones were written, or are `pending`."""
        start, self.lengths[layer] = self.length_of(layer), length
        self._latest = layer
        for told in self.watchers:
            told(layer, start, length)

    def write_pending(self) -> None:
        """See to it that every token is in its page."""
        if self.pending is not None:
            self.pending.write()
            self.pending = None

    def gather(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Dense K and V `[S, Hkv, stop - start, D]` of positions `start` to `stop - 1`."""
        assert self.pool is not None and self.batch is not None
        self.write_pending()
        group, key_pages, value_pages = self.pool.layer(layer)
        self.pool.use_stream(key_pages.device)
        page_table, first = self.batch.page_table(group, start, stop)
        key, value = ops.gather_kv(key_pages, value_pages, page_table)
        return key[:, :, start - first : stop - first], value[:, :, start - first : stop - first]

    def begin_forward(self) -> None:
        """Masks are being made: what is updated next belongs to a new forward."""
        self._latest = None
        self.attended_length = None

    def begin_attention(self, length: int, starts: tuple[int, ...] | None) -> None:
        """Pageforge attention made the mask of this forward, after which rows have `length` tokens.

        `starts`: their left padding, where it is all that the mask hides.
        """
        self.attended_length = length
        self._attended_starts = starts

    def length_of(self, layer: int) -> int:
        """Tokens that `layer` has stored, left padding included."""
        return self.lengths.get(layer, 0)

    # --- captured steps: tokens that a graph writes, without `update` -------------------------

    def begin_step(self) -> int:
        """Room for one token more in each row; returns how many they hold. Raises OutOfPages."""
        self.check_live()
        self.write_pending()
        assert self.pool is not None and self.batch is not None
        layer, length = next(iter(self.lengths)), max(self.lengths.values())
        _, key_pages, _ = self.pool.layer(layer)  # raises where the pool is closed
        self.pool.use_stream(key_pages.device)
        if self.batch.length != length + 1:
            self._grow(layer, length + 1)
        self._is_ahead = True
        return length

    @property
    def ready_batch(self) -> SequenceBatch | None:
        """The batch, if a step can run at once: there is room for it, and no token is kept back."""
        if not self._is_ahead or self.pending is not None or self.is_freed:
            return None
        return None if self.pool is None or self.pool.is_closed else self.batch

    def finish_step(self) -> None:
        """Every layer has one token more."""
        self.lengths = {layer: length + 1 for layer, length in self.lengths.items()}
        self._is_ahead = False
        self.begin_forward()
        for told in self.watchers:
            last = max(self.lengths)
            told(last, self.lengths[last] - 1, self.lengths[last])

    def reach_ahead(self) -> None:
        """Make room for the token after the next one, while the device is busy."""
        with contextlib.suppress(OutOfPages):  # then the next step finds out
            self.begin_step()
            assert self.batch is not None
            self.batch.claim_ahead()

    def settle(self) -> None:
        """Give back all room for tokens that have not come."""
        self._cancel_step()
        if self.batch is not None:
            self.batch.drop_ahead()

    # --- all rows at once -------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows, 0 before the first update."""
        return 0 if self.batch is None else len(self.batch)

    def prepare(self, key: Tensor, value: Tensor) -> None:
        """Make pool and batch if these are the first K/V, else check that the rows match."""
        rows = key.shape[0]
        if self.pool is None:
            page_size, max_pages, max_memory = self._pool_arguments
            geometry = self._geometry(page_size, key, value)
            self.pool = PagePool(geometry, max_pages=max_pages, max_memory=max_memory)
            self.pool.model_config = self.config
        if self.batch is None or self.batch.length == 0:
            starts = self._row_starts(rows, key.shape[2])
            if self.batch is None or self.batch.starts != starts:
                self.batch = SequenceBatch(self.pool, starts)
        elif len(self.batch) != rows:
            raise ShapeError(
                expected(
                    "batch size",
                    f"{len(self.batch)} rows, as in the cache",
                    rows,
                    "reset() the cache, or use batch_select_indices / batch_repeat_interleave",
                )
            )

    def stored_from(self, rows: int) -> tuple[int, ...] | None:
        """The left padding of `rows` rows that is not stored; None where that is still open."""
        if self.batch is not None and self.batch.length:
            return self.batch.starts
        return None if self._starts is None else self._row_starts(rows, 0)

    def select(self, rows: Tensor) -> None:
        """Row `i` becomes a fork of the former row `rows[i]`."""
        self.check_live()
        if self.batch is None:
            return
        size = len(self.batch)
        indices = rows.tolist()
        if any(not -size <= row < size for row in indices):
            raise ShapeError(
                expected(
                    "row indices", f"from {-size} to {size - 1}", indices, "pass rows of the cache"
                )
            )
        self._change()
        if indices:
            self.batch.select([row % size for row in indices])
        else:
            self._release()

    def length_after_crop(self, num_tokens: int) -> int:
        """The length after `crop(num_tokens)`. Raises CropError where that would raise."""
        self.check_live()
        length = max(0, max(self.lengths.values(), default=0) - num_tokens)
        if any(stored < length for stored in self.lengths.values()):
            raise CropError(
                f"crop to {length} tokens: expected every layer to hold them, but a forward was "
                f"interrupted and layers hold {sorted(set(self.lengths.values()))}; crop further"
            )
        if self.batch is not None:
            self.batch.check_crop(length)
        return length

    def crop(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens of each row (all of them, if there are fewer)."""
        length = self.length_after_crop(num_tokens)
        if self.batch is None:
            return
        self._change()
        self.batch.drop_ahead()
        self.batch.crop(length)
        if self.has_windows:
            self.batch.slide()
        self.lengths = dict.fromkeys(self.lengths, length)

    def reset(self) -> None:
        """Release all pages; the state is as new, without the last batch's mask."""
        self.check_live()
        self._starts = None
        self.keeps_past = False
        self._release()

    def free(self) -> None:
        """Release all pages for good."""
        if not self.is_freed:
            self._release()
            self.is_freed = True

    def abandon(self) -> None:
        """`free` for a finalizer: never blocks."""
        if self.batch is not None:
            self.batch.abandon()

    def fork(self) -> CacheState:
        """A second state over the same pages."""
        self.check_live()
        self.write_pending()
        self.settle()
        child = CacheState.__new__(CacheState)
        child.__dict__.update(self.__dict__)
        child.batch = None if self.batch is None else self.batch.fork()
        child.lengths = dict(self.lengths)
        child._fitting = {}
        child.watchers = []
        child.begin_forward()
        child.num_gathers = 0
        child._has_warned = False
        return child

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        assert self.pool is not None
        return any(group.shape.window is not None for group in self.pool.geometry.groups)

    def check_live(self) -> None:
        """Raise UseAfterFree if `free` was called."""
        if self.is_freed:
            raise UseAfterFree("cache: it was freed and holds nothing; make a new PagedKVCache")

    def warn(self, reason: str) -> None:
        """Say, once for each cache, why attention does not read the pages in place."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("pageforge attention: K/V are gathered, which is slower: %s", reason)

    # --- inside -----------------------------------------------------------------------------

    def _cancel_step(self) -> None:
        """Give back the room of a step that has not come, or that failed."""
        if self._is_ahead:
            self._is_ahead = False
            assert self.batch is not None
            self.batch.crop(self.batch.length - 1)

    def _place_for(
        self, layer: int, length: int, key: Tensor, value: Tensor
    ) -> tuple[int, Tensor, Tensor]:
        """Group and pages of a layer of `length` tokens, for new ones that are checked to fit."""
        form = key.shape, value.shape, key.dtype, value.dtype, key.device, value.device
        if length and not (key.requires_grad or value.requires_grad):
            assert self.pool is not None
            place = self.pool.layer(layer)
            if self._fitting.get(place[0]) == form:
                return place
        self.prepare(key, value)
        assert self.pool is not None
        group, key_pages, value_pages = self.pool.layer(layer)
        check_fit(layer, key, value, key_pages, value_pages, casts=self.pool.casts)
        self._fitting[group] = form
        return group, key_pages, value_pages

    def _change(self) -> None:
        """Tokens are about to be removed or moved: what was read of them so far is not theirs."""
        self.write_pending()
        self._cancel_step()
        self.begin_forward()
        self._fitting.clear()  # there may be other rows after it
        self.version += 1

    def _geometry(self, page_size: int, key: Tensor, value: Tensor) -> KVGeometry:
        """What the config's model stores; where it cannot be probed, in each layer what this is.

        A wrong guess does no harm: every update is compared with the geometry.
        """
        try:
            return geometry_of_config(self.config, page_size, key.dtype, key.device)
        except UnsupportedModel:
            first = LayerShape(
                key.shape[1],
                key.shape[3],
                value.shape[3],
                str(key.dtype).removeprefix("torch."),
                device=str(key.device),
            )
            windows = layer_windows(self.config)
            return KVGeometry.of_layers(
                {layer: replace(first, window=window) for layer, window in windows.items()},
                page_size,
            )

    def _release(self) -> None:
        self.pending = None
        self._is_ahead = False  # all goes back, and a closed pool takes nothing else
        self._change()
        if self.batch is not None:
            self.batch.release()
        self.batch = None
        self.lengths = {}

    def _row_starts(self, rows: int, num_tokens: int) -> tuple[int, ...]:
        """Left padding of each row before a first forward of `num_tokens` tokens.

        A mask of fewer rows is repeated, as beams and samples are.
        """
        if self._starts is not None:
            if rows % len(self._starts):
                raise ShapeError(
                    expected(
                        "attention_mask",
                        f"rows that divide {rows}",
                        len(self._starts),
                        "pass the prompt's mask",
                    )
                )
            times = rows // len(self._starts)
            return tuple(start for start in self._starts for _ in range(times))
        starts = self._attended_starts
        if starts is not None and self.attended_length == num_tokens and len(starts) == rows:
            return starts
        return (0,) * rows

    def _grow(self, layer: int, length: int) -> None:
        """Claim pages if `length`, of `layer` after its update, is more than the rows have."""
        assert self.batch is not None
        attended_length, self.attended_length = self.attended_length, None  # unless it fails
        known = max(self.lengths.values(), default=0)
        if known < self.batch.length:  # a forward whose first layer found no memory
            self.batch.crop(known)
        longest = self.batch.length
        behind = {layer: stored for layer, stored in self.lengths.items() if stored < longest}
        if length < longest:  # others went on, perhaps long since
            behind[layer] = self.length_of(layer)
        if behind:
            raise ShapeError(
                f"cache: expected every layer to hold {longest} tokens before new ones, but a "
                f"forward was interrupted (layer -> tokens: {behind}); call "
                f"cache.crop(-{longest - min(behind.values())}) or cache.reset()"
            )
        if self.has_windows and not self.keeps_past:
            self.batch.slide()
        self.batch.append(length - self.batch.length)
        self.attended_length = attended_length

    def _check_not_cross_attention(self, layer: int) -> None:
        """A plain cache given to an encoder-decoder would mix self- and cross-attention K/V.

        It shows by a second update of a layer right after the first, in the same forward.
        """
        if self._has_cross_attention and layer == self._latest:
            raise UnsupportedModel(
                f"{self.config.model_type}: expected a cache for self-attention alone, got one "
                f"used for cross-attention too; pass "
                f"EncoderDecoderCache(PagedKVCache(...), DynamicCache())"
            )
