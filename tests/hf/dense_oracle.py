"""DenseOracle: what a cache must hold, kept as plain tensors of every token that it ever got."""

from __future__ import annotations

import torch
from torch import Tensor

from pageforge.geometry import KVGeometry


class DenseOracle:
    """All K/V of all layers; what a window hides is cut off when asked for, never forgotten."""

    def __init__(self, geometry: KVGeometry, rows: int):
        self.shapes = {layer: group.shape for group in geometry.groups for layer in group.layers}
        self.keys = {
            layer: torch.zeros(rows, shape.num_kv_heads, 0, shape.key_dim)
            for layer, shape in self.shapes.items()
        }
        self.values = {
            layer: torch.zeros(rows, shape.num_kv_heads, 0, shape.value_dim)
            for layer, shape in self.shapes.items()
        }

    @property
    def length(self) -> int:
        return next(iter(self.keys.values())).shape[2]

    @property
    def rows(self) -> int:
        return next(iter(self.keys.values())).shape[0]

    def new_tokens(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Random K/V for the next `tokens` tokens, laid out as a model's projections leave them."""
        shape = self.shapes[layer]
        key = torch.randn(self.rows, tokens, shape.num_kv_heads, shape.key_dim)
        value = torch.randn(self.rows, tokens, shape.num_kv_heads, shape.value_dim)
        return key.transpose(1, 2), value.transpose(1, 2)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache's update must return."""
        oldest = self._oldest(layer)
        self.keys[layer] = torch.cat([self.keys[layer], key], dim=2)
        self.values[layer] = torch.cat([self.values[layer], value], dim=2)
        return self.keys[layer][:, :, oldest:], self.values[layer][:, :, oldest:]

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the cache's `layers[layer].keys` and `.values` must be."""
        oldest = self._oldest(layer)
        return self.keys[layer][:, :, oldest:], self.values[layer][:, :, oldest:]

    def mask_sizes(self, layer: int, tokens: int) -> tuple[int, int]:
        oldest = self._oldest(layer)
        return self.keys[layer].shape[2] - oldest + tokens, oldest

    def crop(self, removed: int) -> None:
        keep = max(0, self.length - removed)
        self._apply(lambda states: states[:, :, :keep])

    def select(self, rows: list[int]) -> None:
        self._apply(lambda states: states[rows])

    def copy(self) -> DenseOracle:
        child = object.__new__(DenseOracle)
        child.shapes = self.shapes
        child.keys, child.values = dict(self.keys), dict(self.values)  # never written in place
        return child

    def _oldest(self, layer: int) -> int:
        window = self.shapes[layer].window
        length = self.keys[layer].shape[2]
        return 0 if window is None else max(0, length - window + 1)

    def _apply(self, change) -> None:
        for states in (self.keys, self.values):
            for layer in states:
                states[layer] = change(states[layer])
