"""The shape of a model's K/V: which layers share pages, and how many bytes a page takes.

Pure arithmetic without torch, so that the policy can use it. Dtypes go by name ("float16") and
devices as strings ("cuda:0").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pageforge.errors import GeometryError, expected

ELEMENT_SIZE: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes a pool can hold."""

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
"""Tokens a page: powers of two, so that shift and mask split a position into page and offset."""


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient rounded up."""
    return -(-numerator // denominator)


def first_visible(position: int, window: int | None) -> int:
    """The first token that a query at `position` sees; `window`: see LayerShape."""
    return 0 if window is None else max(0, position - window + 1)


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores for each token.

    `window`: the sliding window in tokens (a query at position q sees keys q - window + 1 to q),
    or None where every earlier token is seen.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise GeometryError(expected(name, "an int of at least 1", value, "fix the layer"))
        if self.dtype not in ELEMENT_SIZE:
            raise GeometryError(
                expected("dtype", f"one of {sorted(ELEMENT_SIZE)}", self.dtype, "pass dtype=")
            )
        if self.window is not None and self.window < 1:
            raise GeometryError(expected("window", "None or at least 1", self.window, "fix it"))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one page table: a page holds K and V of `page_size` tokens for all of them.

    A page is one contiguous run of elements:
    `[layer, (K [head, token, key_dim], V [head, token, value_dim])]`.
    """

    layers: tuple[int, ...]
    shape: LayerShape
    page_size: int

    @property
    def layer_elements(self) -> int:
        """Elements that one layer takes of a page."""
        shape = self.shape
        return shape.num_kv_heads * self.page_size * (shape.key_dim + shape.value_dim)

    @property
    def page_elements(self) -> int:
        """Elements of a page."""
        return len(self.layers) * self.layer_elements

    @property
    def value_offset(self) -> int:
        """Elements from the start of a layer's part of a page to its V."""
        return self.shape.num_kv_heads * self.page_size * self.shape.key_dim


@dataclass(frozen=True)
class KVGeometry:
    """All layer groups of a model, for one page size."""

    groups: tuple[LayerGroup, ...]
    page_size: int

    @classmethod
    def of_layers(cls, layers: Mapping[int, LayerShape], page_size: int) -> KVGeometry:
        """Group layers (layer index -> shape) that share everything; order follows first layers.

        Raises GeometryError for an impossible page size or for no layers at all.
        """
        check_page_size(page_size)
        if not layers:
            raise GeometryError(
                "layers: expected at least one attention layer that stores K/V, got none; "
                "a model without such layers needs no paged cache"
            )
        by_shape: dict[LayerShape, list[int]] = {}
        for layer in sorted(layers):
            by_shape.setdefault(layers[layer], []).append(layer)
        groups = (LayerGroup(tuple(ids), shape, page_size) for shape, ids in by_shape.items())
        return cls(tuple(groups), page_size)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: str,
        page_size: int = 16,
        device: str = "cpu",
    ) -> KVGeometry:
        """The geometry of a model whose layers are all alike."""
        shape = LayerShape(num_kv_heads, head_dim, head_dim, dtype, device=device)
        return cls.of_layers(dict.fromkeys(range(num_layers), shape), page_size)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    def with_dtype(self, dtype: str) -> KVGeometry:
        """The same layers stored in another dtype."""
        shapes = {
            layer: replace(group.shape, dtype=dtype)
            for group in self.groups
            for layer in group.layers
        }
        return KVGeometry.of_layers(shapes, self.page_size)


def bytes_per_page(group: LayerGroup) -> int:
    """Bytes of one page: `L * Hkv * P * (Dk + Dv) * element size`."""
    return group.page_elements * ELEMENT_SIZE[group.shape.dtype]


def check_page_size(page_size: int) -> None:
    """Raise GeometryError for a page size that is not served."""
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise GeometryError(
            expected("page_size", f"a power of two in {PAGE_SIZES}", page_size, "try 16")
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens fill, the last one perhaps partly."""
    return ceil_div(tokens, page_size)


def total_bytes_per_page(groups: Iterable[LayerGroup]) -> int:
    """Bytes of one page in every group."""
    return sum(bytes_per_page(group) for group in groups)
