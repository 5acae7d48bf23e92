"""Attention over pages on the CPU: K and V are gathered, and torch's own attention does the rest.

Query heads that share a KV head are rows of one matrix product, so K and V are never repeated. A
few rows at a time are gathered, into memory that is kept: what is copied is read again while the
processor's cache has it, and the system is not asked for fresh memory in every layer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pageforge.geometry import ceil_div, pages_for
from pageforge.ops.reference import gather_kv

GATHERED_BYTES = 4 << 20
"""K and V that are gathered at a time, unless a single row has more (1 to 8 MiB were tried)."""


class Scores(NamedTuple):
    """How scores are made; see `reference.attend`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq]
    alibi_slopes: Tensor | None = None  # [Hq]


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
    scores = Scores(scale, window, softcap, sinks, alibi_slopes)
    lengths, bounds = seq_lens.tolist(), cu_query_lens.tolist()
    paddings = [0] * len(lengths) if starts is None else starts.tolist()
    return _attend(query, key_pages, value_pages, page_table, lengths, bounds, paddings, scores)


def write_and_attend_dense(
    query: Tensor,  # [S, Hq, Dk]
    key: Tensor,  # [S, Hkv, Dk]
    value: Tensor,  # [S, Hkv, Dv]
    key_pages: Tensor,  # [N, Hkv, P, Dk], written
    value_pages: Tensor,  # [N, Hkv, P, Dv], written
    page_table: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, the new token included
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    alibi_slopes: Tensor | None = None,  # [Hq]
    starts: Tensor | None = None,  # [S] int32
) -> Tensor:  # [S, Hq, Dv]
    """`key` and `value` become token `seq_lens - 1` of each row, then `attend_dense`.

    Rows that have no token, or none but padding, or no page for it, write nothing.
    """
    scores = Scores(scale, window, softcap, sinks, alibi_slopes)
    lengths = seq_lens.tolist()
    paddings = [0] * len(lengths) if starts is None else starts.tolist()
    size = key_pages.shape[2]
    last = np.array(lengths) - 1
    row = np.nonzero(last >= paddings)[0]
    page = page_table.cpu().numpy()[row, last[row] // size].astype(np.int64)
    row, page = row[page > 0], page[page > 0]
    where = torch.from_numpy(page), slice(None), torch.from_numpy(last[row] % size)
    written = slice(None) if len(row) == len(lengths) else torch.from_numpy(row)
    key_pages[where] = key[written].to(key_pages.dtype)
    value_pages[where] = value[written].to(value_pages.dtype)
    bounds = range(len(lengths) + 1)
    return _attend(query, key_pages, value_pages, page_table, lengths, bounds, paddings, scores)


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Sequence[int],
    bounds: Sequence[int],
    paddings: Sequence[int],
    scores: Scores,
) -> Tensor:
    counts = [stop - start for start, stop in pairwise(bounds)]
    token_bytes = key_pages.shape[1] * (key_pages.shape[3] + value_pages.shape[3])
    token_bytes *= key_pages.element_size()
    gather = _gatherer(key_pages, value_pages)
    out = query.new_zeros(query.shape[0], query.shape[1], value_pages.shape[3])
    for rows in _alike(lengths, counts, token_bytes):
        length, count = lengths[rows.start], counts[rows.start]
        oldest = 0 if scores.window is None else max(0, length - count - scores.window + 1)
        # The first token that each row sees.
        firsts = [min(length, max(padding, oldest)) for padding in paddings[rows]]
        if not count or min(firsts) == length:
            continue
        page, size = min(firsts) // key_pages.shape[2], key_pages.shape[2]
        key, value = gather(page_table[rows, page : pages_for(length, size)])
        seen = slice(min(firsts) - page * size, length - page * size)
        key, value = key[:, :, seen], value[:, :, seen]
        for index, first in enumerate(firsts):
            unseen = first - min(firsts)
            if unseen:  # what lies there, NaN perhaps, must not reach a product
                key[index, :, :unseen] = 0
                value[index, :, :unseen] = 0
        queries = slice(bounds[rows.start], bounds[rows.stop])
        out[queries] = _attend_alike(query[queries], key, value, length, firsts, scores)
    return out


def _alike(lengths: Sequence[int], counts: Sequence[int], token_bytes: int) -> Iterator[slice]:
    """Neighbouring rows of one length with equally many queries, as many as are to be gathered."""
    kinds = list(zip(lengths, counts, strict=True))
    start = 0
    while start < len(kinds):
        stop = start + 1
        while stop < len(kinds) and kinds[stop] == kinds[start]:
            stop += 1
        most = max(1, GATHERED_BYTES // max(1, lengths[start] * token_bytes))
        each = ceil_div(stop - start, ceil_div(stop - start, most))  # evenly
        for first in range(start, stop, each):
            yield slice(first, min(first + each, stop))
        start = stop


def _gatherer(key_pages: Tensor, value_pages: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from a page table to K and V, valid until the next call: see `gather_kv`."""
    num_pages, num_heads, page_size, dim = key_pages.shape
    width = page_size * dim
    apart = value_pages.storage_offset() - key_pages.storage_offset()
    if (
        key_pages.untyped_storage().data_ptr() != value_pages.untyped_storage().data_ptr()
        or key_pages.shape != value_pages.shape
        or key_pages.stride() != value_pages.stride()
        or apart < 0
        or apart % width
        or key_pages.stride(0) % width
    ):
        return lambda page_table: gather_kv(key_pages, value_pages, page_table)
    # As they lie in a pool: rows of one matrix, each a page's K of one head, or its V.
    apart, per_page = apart // width, key_pages.stride(0) // width
    rows = key_pages.as_strided(((num_pages - 1) * per_page + apart + num_heads, width), (width, 1))
    head = torch.arange(num_heads)[:, None]
    inside = torch.stack([head, head + apart])  # [K or V, Hkv, 1]

    def gather(page_table: Tensor) -> tuple[Tensor, Tensor]:
        index = (page_table.long().mul_(per_page)[:, None, None] + inside).flatten()
        both = _scratch(len(index), width, rows.dtype)
        torch.index_select(rows, 0, index, out=both)
        both = both.view(page_table.shape[0], 2, num_heads, -1, dim)
        return both[:, 0], both[:, 1]

    return gather


_kept = threading.local()


def _scratch(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[num_rows, width]` of this thread's memory, GATHERED_BYTES at most, or of fresh memory."""
    num_bytes = num_rows * width * dtype.itemsize
    if num_bytes > GATHERED_BYTES:
        return torch.empty(num_rows, width, dtype=dtype)
    if not hasattr(_kept, "memory"):
        with torch.inference_mode(False):  # else it could only be written to in that mode
            _kept.memory = torch.empty(GATHERED_BYTES, dtype=torch.uint8)
    memory: Tensor = _kept.memory
    return memory[:num_bytes].view(dtype).view(num_rows, width)


def _attend_alike(
    query: Tensor,  # [B * Tq, Hq, Dk]
    key: Tensor,  # [B, Hkv, tokens, Dk]
    value: Tensor,  # [B, Hkv, tokens, Dv]
    length: int,
    firsts: Sequence[int],
    scores: Scores,
) -> Tensor:  # [B * Tq, Hq, Dv]
    """Attention of the last `Tq` of `length` tokens in each row; it sees those from `firsts` on."""
    scale, window, softcap, sinks, alibi_slopes = scores
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
