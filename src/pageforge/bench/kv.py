"""K/V as a model of some shape makes them, without the model: a cache cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from pageforge.bench.models import SHAPES
from pageforge.geometry import KVGeometry, LayerShape, total_bytes_per_page
from pageforge.hf.attention import pageforge_attention
from pageforge.hf.cache import DEFAULT_PAGE_SIZE
from pageforge.hf.mask import pageforge_mask
from pageforge.probe import geometry_of_config


class _Layer(torch.nn.Module):
    """What attention asks of the layer that calls it."""

    def __init__(self, num_key_value_groups: int):
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


@dataclass(frozen=True)
class ModelKV:
    """What a model of one shape stores in a cache, and on which device."""

    name: str
    config: PreTrainedConfig
    geometry: KVGeometry
    device: torch.device

    @classmethod
    def of(cls, name: str, device: torch.device, page_size: int = DEFAULT_PAGE_SIZE) -> ModelKV:
        """`name`: one of `models.SHAPES`, in whose own dtype K/V are."""
        kind, arguments, dtype = SHAPES[name]
        config: PreTrainedConfig = kind(**arguments)
        return cls(name, config, geometry_of_config(config, page_size, dtype, device), device)

    @property
    def layers(self) -> dict[int, LayerShape]:
        """What each layer stores, in the order in which a forward comes to them."""
        shapes = {layer: group.shape for group in self.geometry.groups for layer in group.layers}
        return dict(sorted(shapes.items()))

    @property
    def token_bytes(self) -> int:
        """K/V of one token in all layers (arithmetic)."""
        return total_bytes_per_page(self.geometry.groups) // self.geometry.page_size

    def feed(self, cache: Cache, rows: int, tokens: int) -> None:
        """`tokens` more tokens in each of `rows` rows, under stock attention.

        What `update` returns is dropped layer by layer, as attention drops it.
        """
        for layer, key, value in self._new(rows, tokens):
            cache.update(key, value, layer)

    def feed_in_place(self, cache: Cache, rows: int, tokens: int) -> None:
        """The same under pageforge attention, which reads (and writes) a paged cache's pages."""
        layers = self.layers
        length, first = cache.get_seq_length(), next(iter(layers))
        kv_length, offset = cache.get_mask_sizes(tokens, first)
        dtype = getattr(torch, layers[first].dtype)
        mask = pageforge_mask(
            rows, tokens, kv_length, length, offset, dtype=dtype, device=self.device
        )
        for layer, key, value in self._new(rows, tokens):
            groups = self.config.num_attention_heads // key.shape[1]
            query = key.repeat_interleave(groups, 1)
            keys, values = cache.update(key, value, layer)
            pageforge_attention(_Layer(groups), query, keys, values, mask)

    def _new(self, rows: int, tokens: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, K `[rows, Hkv, tokens, Dk]`, V) of each layer; memory does not ask for values."""
        for layer, shape in self.layers.items():
            key, value = (
                torch.ones(
                    (rows, shape.num_kv_heads, tokens, dim),
                    dtype=getattr(torch, shape.dtype),
                    device=self.device,
                )
                for dim in (shape.key_dim, shape.value_dim)
            )
            yield layer, key, value
