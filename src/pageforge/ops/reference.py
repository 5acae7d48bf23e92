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


def attend(
    query: Tensor,  # [T, Hq, Dk]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int
    seq_lens: Tensor,  # [S] int, new tokens included
    cu_query_lens: Tensor,  # [S + 1] int: row s asks with queries cu[s] to cu[s + 1] - 1
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    starts: Tensor | None = None,  # [S] int: tokens of left padding, which nobody sees
) -> tuple[Tensor, Tensor]:  # [T, Hq, Dv], [T, Hq]
    """Causal attention of a ragged batch over pages: (output, log-sum-exp of the scores).

    A row's queries are its last tokens. Query at position p sees keys k with
    `max(start, p - window + 1) <= k <= p`:

        x_k = cap(scale * q . K_k) + slope * (k - p)      cap(y) = softcap * tanh(y / softcap)
        out = sum_k exp(x_k) V_k / (sum_k exp(x_k) + exp(sink))

    A query that sees nothing gives 0, and -inf without a sink. Query head h reads KV head
    `h // (Hq / Hkv)`. Computed in the query's dtype: pass float64 for an oracle.
    """
    num_heads, num_kv_heads, page_size = query.shape[1], key_pages.shape[1], key_pages.shape[2]
    out = query.new_zeros(query.shape[0], num_heads, value_pages.shape[3])
    lse = query.new_full((query.shape[0], num_heads), -math.inf)
    bounds = cu_query_lens.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        position = torch.arange(length - (last - first), length, device=query.device)[:, None]
        low = 0 if starts is None else min(int(starts[row]), length)
        token = torch.arange(low, length, device=query.device)
        page = page_table[row].long()[token // page_size]
        key, value = (
            pages[page, :, token % page_size]
            .to(query.dtype)
            .repeat_interleave(num_heads // num_kv_heads, 1)
            for pages in (key_pages, value_pages)
        )
        score = torch.einsum("qhd,khd->hqk", query[first:last], key) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score + alibi_slopes.to(query.dtype)[:, None, None] * (token - position)
        seen = token <= position
        if window is not None:
            seen = seen & (token > position - window)
        score = score.masked_fill(~seen, -math.inf)
        if sinks is not None:
            sink = sinks.to(query.dtype)[:, None, None].expand(-1, last - first, 1)
            score = torch.cat([score, sink], -1)
        total = score.logsumexp(-1)  # [Hq, queries]
        weight = (score - total[..., None].nan_to_num(neginf=0)).exp()[..., : len(token)]
        out[first:last] = torch.einsum("hqk,khd->qhd", weight, value)
        lse[first:last] = total.T
    return out, lse


def gather_kv(
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    page_table: Tensor,  # [S, M] int
) -> tuple[Tensor, Tensor]:
    """K `[S, Hkv, M * P, Dk]` and V `[S, Hkv, M * P, Dv]`: the pages of each row, side by side."""
    return _gather(key_pages, page_table), _gather(value_pages, page_table)


def copy_pages(
    pages: Tensor,  # [N, page elements], written
    source: Tensor,  # [C] int64
    target: Tensor,  # [C] int64
) -> None:
    """`pages[target] = pages[source]`: copy-on-write, for all layers at once.

    No page is both a source and a target: what is copied is held, what it is copied to was free.
    Page by page: a temporary tensor might find no memory.
    """
    for old, new in zip(source.tolist(), target.tolist(), strict=True):
        pages[new].copy_(pages[old])


def swap_out(
    pages: Tensor,  # [N, page elements]
    page_ids: Tensor,  # [C] int64, on the host
    host: Tensor,  # [C, page elements], on the host, written
) -> None:
    """`host[i] = pages[page_ids[i]]`."""
    for row, page in enumerate(page_ids.tolist()):
        host[row].copy_(pages[page])


def swap_in(
    host: Tensor,  # [C, page elements], on the host
    pages: Tensor,  # [N, page elements], written
    page_ids: Tensor,  # [C] int64, on the host
) -> None:
    """`pages[page_ids[i]] = host[i]`."""
    for row, page in enumerate(page_ids.tolist()):
        pages[page].copy_(host[row])


def _gather(pages: Tensor, page_table: Tensor) -> Tensor:
    return gather_blocks(pages, block_index(pages, page_table), page_table.shape)


def block_index(pages: Tensor, page_table: Tensor) -> Tensor:
    """Where the (page, head) blocks of each row's pages lie, as `gather_blocks` takes it.

    The pool is seen as rows of one width that divides both a block and the distance between pages;
    a block is then `block // width` rows in sequence.
    """
    _, num_heads, page_size, dim = pages.shape
    width = _width(pages)
    per_block, per_page = page_size * dim // width, pages.stride(0) // width
    within_page = torch.arange(num_heads * per_block, device=pages.device)
    index = page_table.long().mul(per_page)[:, None, :, None] + within_page.view(
        num_heads, 1, per_block
    )
    return index.flatten()


def gather_blocks(pages: Tensor, index: Tensor, size: torch.Size) -> Tensor:  # [S, Hkv, M * P, D]
    """The blocks of a page table of `size` `[S, M]`, by the `block_index` of pages that lie alike.

    One `index_select`, the only copy: its result is contiguous, as a dense cache's tensors are.
    """
    num_pages, num_heads, page_size, dim = pages.shape
    num_rows, num_columns = size
    width = _width(pages)
    height = ((num_pages - 1) * pages.stride(0) + num_heads * page_size * dim) // width
    rows = pages.as_strided((height, width), (width, 1))
    return rows.index_select(0, index).view(num_rows, num_heads, num_columns * page_size, dim)


def _width(pages: Tensor) -> int:
    return math.gcd(pages.stride(0), pages.shape[2] * pages.shape[3])
