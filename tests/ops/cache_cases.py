"""Pages for the tests of the cache's ops, on any device, with NaN wherever nothing was put."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pageforge.geometry import KVGeometry, LayerShape
from pageforge.store import MmapStore

try:
    from triton import knobs

    INTERPRETED = knobs.runtime.interpret
except ImportError:
    INTERPRETED = False

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="runs kernels on the CPU, in Triton's interpreter"
)

SHAPES = [  # page size, KV heads, Dk, Dv
    (16, 2, 64, 64),
    (8, 3, 40, 40),
    (8, 1, 5, 7),
    (32, 1, 192, 128),
    (64, 2, 80, 96),
    (256, 1, 16, 112),
    (16, 12, 64, 64),
]
DTYPES = [torch.float32, torch.float16]  # the interpreter gets bfloat16 wrong

INTEGER = {4: torch.int32, 2: torch.int16}


class Pages(NamedTuple):
    """All pages of a group of two layers, and the views of the second layer."""

    all: Tensor  # [N, page elements]
    key: Tensor  # [N, Hkv, P, Dk]
    value: Tensor  # [N, Hkv, P, Dv]

    def clone(self) -> Pages:
        return views(self.all.clone(), self)


def views(pages: Tensor, like: Pages) -> Pages:
    """`pages` seen as `like` is."""

    def view(part: Tensor) -> Tensor:
        return pages.as_strided(part.shape, part.stride(), part.storage_offset())

    return Pages(pages, view(like.key), view(like.value))


def nan_pages(
    num_pages: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    flat: Tensor | None = None,
) -> Pages:
    """NaN alone, or `flat`, seen as pages of `shape` (page size, KV heads, Dk, Dv)."""
    page_size, heads, key_dim, value_dim = shape
    layer = LayerShape(heads, key_dim, value_dim, str(dtype).removeprefix("torch."))
    (group,) = KVGeometry.of_layers({0: layer, 1: layer}, page_size).groups
    if flat is None:
        flat = torch.full((num_pages * group.page_elements,), torch.nan, dtype=dtype, device=device)
    key, value = (
        flat.as_strided(
            (num_pages, heads, page_size, dim),
            (group.page_elements, page_size * dim, dim, 1),
            group.layer_elements + offset,
        )
        for offset, dim in ((0, key_dim), (group.value_offset, value_dim))
    )
    return Pages(flat.view(num_pages, group.page_elements), key, value)


def random_pages(num_pages: int, *args, **kwargs) -> Pages:
    """Random numbers in the odd pages, NaN in the even ones, zeros in page 0."""
    pages = nan_pages(num_pages, *args, **kwargs)
    pages.all[1::2] = torch.randn_like(pages.all[1::2])
    pages.all[0] = 0
    return pages


needs_sparse_memory = pytest.mark.skipif(
    not hasattr(mmap.mmap, "madvise"), reason="needs sparse memory"
)

SPARSE_SHAPE = (256, 1, 64, 64)  # 128 KiB a page in float16
SPARSE_PAGE = 128 << 10
LIMITS = (2**31, 2**32, 2**33)
EDGES = [limit // SPARSE_PAGE + step for limit in LIMITS for step in (-1, 0, 1)]
"""Pages whose offsets straddle 2^31 and 2^32, in bytes and in elements."""


@contextlib.contextmanager
def sparse_pages() -> Iterator[Pages]:
    """More than 8 GiB of pages, of which only those that are touched have memory behind them."""
    num_pages = max(EDGES) + 2
    store = MmapStore(num_pages * SPARSE_PAGE)
    pages = nan_pages(num_pages, SPARSE_SHAPE, torch.float16, flat=store.tensor(torch.float16))
    assert pages.all.shape[1] * 2 == SPARSE_PAGE
    yield pages
    store.close()


def wrapped(ids: list[int]) -> list[int]:
    """Where pages would land if their offsets were cut to 31 or 32 bits."""
    cut = {page * SPARSE_PAGE % limit // SPARSE_PAGE for page in ids for limit in LIMITS}
    return sorted(cut - set(ids))


def bits(tensor: Tensor) -> Tensor:
    """A tensor that compares NaN as equal."""
    return tensor.view(INTEGER[tensor.element_size()])


def random_states(num_tokens: int, heads: int, dim: int, layout: str, like: Tensor) -> Tensor:
    """`[T, H, D]` in the dtype and on the device of `like`, with the strides of `layout`."""
    options = {"dtype": like.dtype, "device": like.device}
    if layout == "heads first":  # as attention modules have them: [1, H, T, D]
        return torch.randn(1, heads, num_tokens, dim, **options).transpose(1, 2).flatten(0, 1)
    if layout == "part of a wider projection":
        return torch.randn(num_tokens, heads * dim + 3, **options)[:, 1:-2].view(
            num_tokens, heads, dim
        )
    if layout == "every other dim":
        return torch.randn(num_tokens, heads, 2 * dim, **options)[:, :, ::2]
    if layout == "one number for all dims":
        return torch.randn(num_tokens, heads, 1, **options).expand(-1, -1, dim)
    return torch.randn(num_tokens, heads, dim, **options)


LAYOUTS = [
    "dense",
    "heads first",
    "part of a wider projection",
    "every other dim",
    "one number for all dims",
]


def random_slots(num_tokens: int, num_pages: int, page_size: int, device: str = "cpu") -> Tensor:
    """Different slots outside page 0, a third of them replaced by -1."""
    slots = torch.randperm((num_pages - 1) * page_size)[:num_tokens] + page_size
    slots[torch.rand(num_tokens) < 1 / 3] = -1
    return slots.to(device)
