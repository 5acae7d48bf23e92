"""CacheState: what all layers of a PagedKVCache share."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedConfig

from pageforge import ops
from pageforge.batch import SequenceBatch
from pageforge.errors import CropError, ShapeError, UnsupportedModel, UseAfterFree, expected
from pageforge.geometry import KVGeometry, LayerShape
from pageforge.pool import PagePool
from pageforge.probe import geometry_of_config, layer_windows


class CacheState:
    """The rows' pages, and how many tokens each layer has stored.

    Layers of one forward are updated one after the other: the first one to bring new tokens claims
    pages for all of them.
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
        self._starts = None if attention_mask is None else _left_padding(attention_mask)
        self._freed = False
        # An encoder-decoder's cross-attention must not come here; see `_check_not_cross_attention`.
        self._has_cross_attention = bool(
            getattr(self.config, "is_encoder_decoder", False)
            or getattr(self.config, "add_cross_attention", False)
        )
        self._latest: int | None = None  # the layer updated last in this forward

    # --- reading and writing ----------------------------------------------------------------

    def update(
        self, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Store K `[S, Hkv, T, Dk]` and V of new tokens; returns those that attention needs.

        That is all tokens, or with a window the last `window - 1` before the new ones.
        """
        self.check_live()
        self._check_not_cross_attention(layer)
        self.prepare(key, value)
        assert self.pool is not None and self.batch is not None  # prepare() made them
        group, key_pages, value_pages = self.pool.layer(layer)
        self._check_fit(layer, key, value, key_pages, value_pages)
        start = self.length_of(layer)
        stop = start + key.shape[2]
        self._grow(layer, stop)
        self.pool.use_stream(key.device)
        slots = self.batch.slot_mapping(group, start, stop)
        ops.write_kv(_tokens(key), _tokens(value), key_pages, value_pages, slots)
        self.lengths[layer] = stop
        self._latest = layer
        if start == 0:
            return key.contiguous(), value.contiguous()
        oldest = 0 if window is None else max(0, start - window + 1)
        stored_key, stored_value = self.gather(layer, oldest, stop)
        return stored_key.to(key.dtype), stored_value.to(value.dtype)

    def gather(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Dense K and V `[S, Hkv, stop - start, D]` of positions `start` to `stop - 1`."""
        assert self.pool is not None and self.batch is not None
        group, key_pages, value_pages = self.pool.layer(layer)
        self.pool.use_stream(key_pages.device)
        page_table, first = self.batch.page_table(group, start, stop)
        key, value = ops.gather_kv(key_pages, value_pages, page_table)
        return key[:, :, start - first : stop - first], value[:, :, start - first : stop - first]

    def begin_forward(self) -> None:
        """Masks are being made: what is updated next belongs to a new forward."""
        self._latest = None

    def length_of(self, layer: int) -> int:
        """Tokens that `layer` has stored, left padding included."""
        return self.lengths.get(layer, 0)

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
        if self.batch is None or (self.batch.length == 0 and len(self.batch) != rows):
            self.batch = SequenceBatch(self.pool, self._row_starts(rows))
        elif len(self.batch) != rows:
            raise ShapeError(
                expected(
                    "batch size",
                    f"{len(self.batch)} rows, as in the cache",
                    rows,
                    "reset() the cache, or use batch_select_indices / batch_repeat_interleave",
                )
            )

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
        if not self._freed:
            self._release()
            self._freed = True

    def abandon(self) -> None:
        """`free` for a finalizer: never blocks."""
        if self.pool is not None and self.batch is not None:
            self.pool.abandon(self.batch.tables)

    def fork(self) -> CacheState:
        """A second state over the same pages."""
        self.check_live()
        child = CacheState.__new__(CacheState)
        child.__dict__.update(self.__dict__)
        child.batch = None if self.batch is None else self.batch.fork()
        child.lengths = dict(self.lengths)
        child._latest = None
        return child

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        assert self.pool is not None
        return any(group.shape.window is not None for group in self.pool.geometry.groups)

    def check_live(self) -> None:
        """Raise UseAfterFree if `free` was called."""
        if self._freed:
            raise UseAfterFree("cache: it was freed and holds nothing; make a new PagedKVCache")

    # --- inside -----------------------------------------------------------------------------

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
        if self.batch is not None:
            self.batch.release()
        self.batch = None
        self.lengths = {}

    def _row_starts(self, rows: int) -> list[int]:
        """Left padding of each row; a mask of fewer rows is repeated, as beams and samples are."""
        if self._starts is None:
            return [0] * rows
        if rows % len(self._starts):
            raise ShapeError(
                expected(
                    "attention_mask",
                    f"rows that divide {rows}",
                    len(self._starts),
                    "pass the prompt's mask",
                )
            )
        return [start for start in self._starts for _ in range(rows // len(self._starts))]

    def _grow(self, layer: int, length: int) -> None:
        """Claim pages if `length`, of `layer` after its update, is more than the rows have."""
        assert self.batch is not None
        if length == self.batch.length:
            return
        behind = {
            layer: stored for layer, stored in self.lengths.items() if stored < self.batch.length
        }
        if length < self.batch.length:  # others went on, perhaps long since
            behind[layer] = self.length_of(layer)
        if behind:
            raise ShapeError(
                f"cache: expected every layer to hold {self.batch.length} tokens before new ones, "
                f"but a forward was interrupted (layer -> tokens: {behind}); call "
                f"cache.crop(-{self.batch.length - min(behind.values())}) or cache.reset()"
            )
        if self.has_windows and not self.keeps_past:
            self.batch.slide()
        self.batch.append(length - self.batch.length)

    def _check_fit(
        self, layer: int, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor
    ) -> None:
        rows, _, tokens, _ = key.shape if key.dim() == 4 else (0, 0, 0, 0)
        for name, tensor, pages in (("key", key, key_pages), ("value", value, value_pages)):
            heads, dim = pages.shape[1], pages.shape[3]
            if tensor.shape != (rows, heads, tokens, dim):
                raise ShapeError(
                    expected(
                        f"layer {layer} {name}",
                        f"[{rows}, {heads}, {tokens}, {dim}]" if rows else "four dims",
                        list(tensor.shape),
                        "make the pool with PagePool.for_model(model)",
                    )
                )
            if tensor.device != pages.device:
                raise ShapeError(
                    expected(
                        f"layer {layer} {name}",
                        f"device {pages.device}",
                        tensor.device,
                        "make the pool after moving the model, with PagePool.for_model(model)",
                    )
                )
            if tensor.dtype != pages.dtype and not (self.pool is not None and self.pool.casts):
                raise ShapeError(
                    expected(
                        f"layer {layer} {name}",
                        f"dtype {pages.dtype}",
                        tensor.dtype,
                        "pass dtype= to PagePool.for_model to have K/V cast",
                    )
                )
            if tensor.requires_grad:
                raise UnsupportedModel(
                    f"layer {layer} {name}: expected a tensor without gradient, got one that "
                    f"requires grad; pages are not differentiable: run under torch.no_grad()"
                )

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


def _tokens(states: Tensor) -> Tensor:
    """`[S, H, T, D]` as `[S * T, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1)


def _left_padding(mask: Tensor) -> list[int]:
    """Zeros before the first one in each row of a mask `[S, T]`."""
    if mask.dim() != 2:
        raise ShapeError(
            expected("attention_mask", "[batch, tokens]", list(mask.shape), "pass a 2-D mask")
        )
    leading = (mask != 0).long().cumsum(-1) == 0
    return [int(count) for count in leading.sum(-1).tolist()]
