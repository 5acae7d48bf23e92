"""Attention over pages on the CPU: K and V are gathered, and torch's own attention does the rest.

Query heads that share a KV head are rows of one matrix product, so K and V are never repeated. A
few rows at a time are gathered: what is copied is then read again while the processor's cache has
it, and the memory allocator need not ask the system for it anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pageforge.geometry import ceil_div, pages_for
from pageforge.ops.reference import gather_kv

GATHERED_BYTES = 4 << 20
"""K and V that are gathered at a time, unless a single row has more (1 to 8 MiB were tried)."""


def attend_dense(
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
) -> Tensor:  # [T, Hq, Dv]
    """What `reference.attend` means, without the log-sum-exp. K and V are of the query's dtype."""
    lengths, bounds = seq_lens.tolist(), cu_query_lens.tolist()
    paddings = [0] * len(lengths) if starts is None else starts.tolist()
    counts = [stop - start for start, stop in pairwise(bounds)]
    token_bytes = key_pages.shape[1] * (key_pages.shape[3] + value_pages.shape[3])
    token_bytes *= key_pages.element_size()
    out = query.new_zeros(query.shape[0], query.shape[1], value_pages.shape[3])
    for rows in _alike(lengths, counts, token_bytes):
        length, count, some = lengths[rows.start], counts[rows.start], paddings[rows]
        oldest = 0 if window is None else max(0, length - count - window + 1)
        firsts = [min(length, max(padding, oldest)) for padding in some]  # the first token seen
        if count and min(firsts) < length:
            queries = slice(bounds[rows.start], bounds[rows.stop])
            out[queries] = _attend_alike(
                query[queries],
                *_gather(key_pages, value_pages, page_table[rows], firsts, length),
                length,
                firsts,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            )
    return out


def _alike(lengths: Sequence[int], counts: Sequence[int], token_bytes: int) -> Iterator[slice]:
    """Neighbouring rows of one length with equally many queries, as many as are to be gathered."""
    start = 0
    while start < len(lengths):
        stop = start + 1
        while stop < len(lengths) and (lengths[stop], counts[stop]) == (
            lengths[start],
            counts[start],
        ):
            stop += 1
        most = max(1, GATHERED_BYTES // max(1, lengths[start] * token_bytes))
        each = ceil_div(stop - start, ceil_div(stop - start, most))  # evenly
        for first in range(start, stop, each):
            yield slice(first, min(first + each, stop))
        start = stop


def _gather(
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,  # [B, M]
    firsts: Sequence[int],
    length: int,
) -> tuple[Tensor, Tensor]:
    """K and V `[B, Hkv, tokens, D]` of positions `min(firsts)` to `length - 1`.

    They are zero before a row's first: what lies there, NaN perhaps, must not reach a product.
    """
    _, num_heads, page_size, dim = key_pages.shape
    low = min(firsts)
    page = low // page_size
    table = page_table[:, page : pages_for(length, page_size)]
    width = page_size * dim
    apart = value_pages.storage_offset() - key_pages.storage_offset()
    if (
        key_pages.untyped_storage().data_ptr() == value_pages.untyped_storage().data_ptr()
        and key_pages.shape == value_pages.shape
        and key_pages.stride() == value_pages.stride()
        and apart > 0
        and apart % width == key_pages.stride(0) % width == 0
    ):
        # As they lie in a pool, both are rows of one matrix: a page's K of one head, or its V.
        apart, per_page = apart // width, key_pages.stride(0) // width
        num_rows = (key_pages.shape[0] - 1) * per_page + apart + num_heads
        head = torch.arange(num_heads)[:, None]
        inside = torch.stack([head, head + apart])  # [K or V, Hkv, 1]
        index = table.long().mul_(per_page)[:, None, None] + inside
        rows = key_pages.as_strided((num_rows, width), (width, 1))
        both = rows.index_select(0, index.flatten()).view(len(firsts), 2, num_heads, -1, dim)
        key, value = both.unbind(1)
    else:
        key, value = gather_kv(key_pages, value_pages, table)
    seen = slice(low - page * page_size, length - page * page_size)
    key, value = key[:, :, seen], value[:, :, seen]
    for row, first in enumerate(firsts):
        if first > low:
            key[row, :, : first - low] = 0
            value[row, :, : first - low] = 0
    return key, value


def _attend_alike(
    query: Tensor,  # [B * Tq, Hq, Dk]
    key: Tensor,  # [B, Hkv, tokens, Dk]
    value: Tensor,  # [B, Hkv, tokens, Dv]
    length: int,
    firsts: Sequence[int],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:  # [B * Tq, Hq, Dv]
    """Attention of the last `Tq` of `length` tokens in each row; it sees those from `firsts` on."""
    rows, num_kv_heads = key.shape[:2]
    count, group, low = len(query) // rows, query.shape[1] // num_kv_heads, min(firsts)
    grouped = query.view(rows, count, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, num_kv_heads, group * count, -1)
    token = torch.arange(low, length)
    position = torch.arange(length - count, length)[:, None]
    mask = None  # [B or 1, 1, Tq, tokens]
    if count > 1 or low < max(firsts):
        mask = (token <= position) & (token >= torch.tensor(firsts)[:, None, None, None])
        if window is not None:
            mask = mask & (token > position - window)
    if softcap is None and sinks is None and alibi_slopes is None:
        spread = mask if mask is None or count == 1 else mask.repeat(1, 1, group, 1)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=spread, scale=scale)
        if max(firsts) > length - count:  # some queries see nothing
            assert spread is not None
            out = out.masked_fill(~spread.any(-1, keepdim=True), 0)
        out = out.view(rows, num_kv_heads, group, count, -1)
    else:
        score = torch.matmul(grouped.float(), key.float().transpose(-1, -2)) * scale
        score = score.view(rows, num_kv_heads, group, count, -1)
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            slopes = alibi_slopes.float().view(num_kv_heads, group, 1, 1)
            score = score + slopes * (token - position)
        if mask is not None:
            score = score.masked_fill(~mask[:, None], -math.inf)
        total = score.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float().view(num_kv_heads, group, 1, 1))
        weight = (score - total.nan_to_num(neginf=0)).exp().to(value.dtype).flatten(2, 3)
        out = torch.matmul(weight, value).view(rows, num_kv_heads, group, count, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(rows * count, num_kv_heads * group, -1)
