"""A step's new tokens to their pages, and all that attention needs back as dense K and V."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pageforge.ops import kernels
from pageforge.ops.gather import GatherLaunch, gathered_sizes
from pageforge.ops.launch import dense_last
from pageforge.ops.reference import block_index, gather_blocks

WriteAndGather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's new K `[S, Hkv, T, Dk]` and V `[S, Hkv, T, Dv]`, and its pages, which it writes
to; returns K `[S, Hkv, L, Dk]` and V `[S, Hkv, L, Dv]`, the new tokens included."""


def write_and_gather(
    key_pages: Tensor,  # [N, Hkv, P, Dk] of any layer
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int32
    oldest: int,
    new: range,
) -> WriteAndGather:
    """`write_kv`, then `gather_kv`, for layer after layer of one group, at little cost to the host.

    Positions are counted from the first page of the table. Those of `new` are written, but where
    the table says page 0; those from `oldest` to the newest are gathered. What layers share is
    worked out once, for one step, and on CUDA for one stream. Nothing is checked: there are rows
    and new tokens, and the newest lie in the last page.
    """
    by_kernel = key_pages.is_cuda and kernels.AVAILABLE
    way = ByKernel if by_kernel else ByIndex
    return way(key_pages, value_pages, page_table, oldest, new)


class ByKernel:
    """Both in one launch."""

    def __init__(
        self, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, oldest: int, new: range
    ):
        self._launch = GatherLaunch(key_pages, value_pages, page_table, new)
        self._sizes = gathered_sizes(key_pages, value_pages, page_table)
        self._wanted = oldest, new.stop - oldest

    def __call__(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See WriteAndGather."""
        key, value = dense_last(key), dense_last(value)
        key_size, value_size = self._sizes
        all_keys, all_values = key_pages.new_empty(key_size), key_pages.new_empty(value_size)
        self._launch(key, value, key_pages, value_pages, all_keys, all_values)
        return all_keys.narrow(2, *self._wanted), all_values.narrow(2, *self._wanted)


class ByIndex:
    """By torch, with the index of the pages' tokens and blocks made once."""

    def __init__(
        self, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, oldest: int, new: range
    ):
        page_size = key_pages.shape[2]
        positions = torch.arange(new.start, new.stop, device=page_table.device)
        pages = page_table.long()[:, positions // page_size]  # [S, T]
        self._slots = pages, positions % page_size
        self._kept: tuple[Tensor, ...] | None = None  # (row, token) of those that have a page
        if not bool(pages.all()):
            self._kept = pages.nonzero(as_tuple=True)
            self._slots = pages[self._kept], self._slots[1][self._kept[1]]
        self._key_blocks = self._value_blocks = block_index(key_pages, page_table)
        if value_pages.shape != key_pages.shape:
            self._value_blocks = block_index(value_pages, page_table)
        self._size = page_table.shape
        self._wanted = oldest, new.stop - oldest

    def __call__(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See WriteAndGather."""
        self._write(key, key_pages)
        self._write(value, value_pages)
        all_keys = gather_blocks(key_pages, self._key_blocks, self._size)
        all_values = gather_blocks(value_pages, self._value_blocks, self._size)
        return all_keys.narrow(2, *self._wanted), all_values.narrow(2, *self._wanted)

    def _write(self, states: Tensor, pages: Tensor) -> None:
        by_token = states.transpose(1, 2)
        if self._kept is not None:
            by_token = by_token[self._kept]
        page, offset = self._slots
        pages[page, :, offset] = by_token.to(pages.dtype)
