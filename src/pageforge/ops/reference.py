"""What each op means, in plain torch: the CPU's path and the oracle of every kernel's test.

`key_pages [N, Hkv, P, Dk]` and `value_pages [N, Hkv, P, Dv]` are one layer's views into a pool
whose pages are contiguous: dense in the last three dims, a page apart in the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write_kv(
    key: Tensor,  # [T, Hkv, Dk]
    value: Tensor,  # [T, Hkv, Dv]
    key_pages: Tensor,  # [N, Hkv, P, Dk], written
    value_pages: Tensor,  # [N, Hkv, P, Dv], written
    slot_mapping: Tensor,  # [T] int64; -1 = skip
) -> None:
    """`key_pages[slot // P, :, slot % P] = key`, the same for V; rows with slot -1 are skipped.

    K and V of another dtype are cast.
    """
    if bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    page_size = key_pages.shape[2]
    page = slot_mapping // page_size
    offset = slot_mapping % page_size
    key_pages[page, :, offset] = key.to(key_pages.dtype)
    value_pages[page, :, offset] = value.to(value_pages.dtype)


def gather_kv(
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int
) -> tuple[Tensor, Tensor]:
    """K `[S, Hkv, M * P, Dk]` and V `[S, Hkv, M * P, Dv]`: the pages of each row, side by side."""
    return _gather(key_pages, page_table), _gather(value_pages, page_table)


def copy_pages(
    pages: Tensor,  # [N, page elements], written
    source: Tensor,  # [C] int64, on the host
    target: Tensor,  # [C] int64, on the host
) -> None:
    """`pages[target] = pages[source]`: copy-on-write, for all layers at once.

    No page is both a source and a target: what is copied is held, what it is copied to was free.
    Page by page: a temporary tensor might find no memory, and the tables have changed already.
    """
    for old, new in zip(source.tolist(), target.tolist(), strict=True):
        pages[new].copy_(pages[old])


def _gather(pages: Tensor, page_table: Tensor) -> Tensor:
    """One `index_select`, the only copy: its result is contiguous, as a dense cache's tensors are.

    The pool is seen as rows of one width that divides both a (page, head) block and the distance
    between pages; a block is then `block // width` rows in sequence.
    """
    num_pages, num_heads, page_size, dim = pages.shape
    block = page_size * dim
    width = math.gcd(pages.stride(0), block)
    per_block, per_page = block // width, pages.stride(0) // width
    num_rows = (num_pages - 1) * per_page + num_heads * per_block
    rows = pages.as_strided((num_rows, width), (width, 1))
    within_page = torch.arange(num_heads * per_block, device=pages.device)
    index = page_table.long().mul(per_page)[:, None, :, None] + within_page.view(
        num_heads, 1, per_block
    )
    dense = rows.index_select(0, index.flatten())
    return dense.view(page_table.shape[0], num_heads, page_table.shape[1] * page_size, dim)
