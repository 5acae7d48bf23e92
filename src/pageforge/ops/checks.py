"""Checks that several ops share.

They read sizes and types alone, never what a tensor on a device holds. Each layer of each decode
step makes them, so they ask a tensor little (every question takes it some 0.1 us) and build
messages only to raise them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pageforge.errors import PageError, ShapeError, expected, listed


def check_layer(key_pages: Tensor, value_pages: Tensor) -> tuple[int, int, int]:
    """Raise ShapeError unless both are a pool's views of one layer. Returns (Hkv, Dk, Dv).

    They are `[N, Hkv, P, dim]`, dense in the last three dims, and alike but for `dim`.
    """
    if key_pages.dim() != 4 or value_pages.dim() != 4:
        got = f"{shape(key_pages)} and {shape(value_pages)}"
        raise ShapeError(expected("key_pages, value_pages", "[N, Hkv, P, dim]", got, _USE_LAYER))
    num_pages, heads, page_size, key_dim = key_pages.shape
    num_value_pages, value_heads, value_page_size, value_dim = value_pages.shape
    if key_pages.stride()[1:] != (page_size * key_dim, key_dim, 1):
        raise _not_dense("key_pages", key_pages)
    if value_pages.stride()[1:] != (value_page_size * value_dim, value_dim, 1):
        raise _not_dense("value_pages", value_pages)
    if (
        value_heads != heads
        or value_page_size != page_size
        or num_value_pages != num_pages
        or value_pages.dtype != key_pages.dtype
        or value_pages.get_device() != key_pages.get_device()
    ):
        want = f"[{num_pages}, {heads}, {page_size}, any] {key_pages.dtype} on {key_pages.device}"
        got = f"{shape(value_pages)} {value_pages.dtype} on {value_pages.device}"
        raise ShapeError(expected("value_pages", want, got, _USE_LAYER))
    return heads, key_dim, value_dim


def check_same_device(name: str, tensor: Tensor, pages: Tensor) -> None:
    """Raise ShapeError unless both are on one device."""
    if tensor.get_device() != pages.get_device():
        fix = "make the pool on the model's device, and the rest on the pool's"
        raise ShapeError(expected(name, pages.device, tensor.device, fix))


def check_whole_pages(name: str, pages: Tensor) -> None:
    """Raise ShapeError unless `pages` is `[N, elements]`, one page a row, without gaps."""
    if pages.dim() != 2 or not pages.is_contiguous():
        got = f"{shape(pages)} with strides {pages.stride()}"
        raise ShapeError(expected(name, "[N, elements], contiguous", got, "use pool.pages(group)"))


def check_page_ids(name: str, ids: Sequence[int], num_pages: int) -> None:
    """Raise PageError unless all are different pages that can hold data: 1 to `num_pages - 1`."""
    if not ids:
        return
    if min(ids) < 1 or max(ids) >= num_pages:
        bad = [page for page in ids if not 1 <= page < num_pages]
        raise PageError(
            expected(name, f"page ids from 1 to {num_pages - 1}", listed(bad), "page 0 is padding")
        )
    if len(set(ids)) != len(ids):
        raise PageError(expected(name, "each page once", listed(ids), "drop the repeated ids"))


def shape(tensor: Tensor) -> list[int]:
    """A tensor's shape for a message."""
    return list(tensor.shape)


_USE_LAYER = "pass what pool.layer(layer) returns"


def _not_dense(name: str, pages: Tensor) -> ShapeError:
    _, _, page_size, dim = pages.shape
    want = f"strides (any, {page_size * dim}, {dim}, 1)"
    return ShapeError(expected(name, want, pages.stride(), _USE_LAYER))
