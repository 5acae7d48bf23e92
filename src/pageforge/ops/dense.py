"""Attention over pages on the CPU: K and V are gathered, and torch's own attention does the rest.

Query heads that share a KV head are rows of one matrix product, so K and V are never repeated. A
few rows at a time are gathered, into memory that is kept: what is copied is read again while the
processor's cache has it, and the system is not asked for fresh memory in every layer.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pageforge.geometry import ceil_div, pages_for
from pageforge.ops.reference import gather_kv

GATHERED_BYTES = 8 << 20
"""K and V that are gathered at a time, unless a single row has more (0.5 to 8 MiB were tried)."""


class Scores(NamedTuple):
    """How scores are made; see `reference.attend`."""

    scale: float
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
    scores = Scores(scale, softcap, sinks, alibi_slopes)
    lengths, bounds = seq_lens.tolist(), cu_query_lens.tolist()
    paddings = [0] * len(lengths) if starts is None else starts.tolist()
    table = page_table.cpu().numpy()
    layout = _Layout(key_pages, value_pages)
    pieces = _pieces(layout, table, lengths, bounds, paddings, window)
    return _attend(query, key_pages, value_pages, layout, pieces, scores)


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
    step = DenseDecode(key_pages, value_pages, page_table, seq_lens, window, starts)
    scores = Scores(scale, softcap, sinks, alibi_slopes)
    return step(query, key, value, key_pages, value_pages, scores)


class DenseDecode:
    """`write_and_attend_dense`, for layer after layer: what these share is worked out once.

    Layers whose pages lie alike share it, as those of a group in a pool do, if their windows are
    the same. It is for one thread: K and V are gathered into memory that this one keeps.
    """

    def __init__(
        self,
        key_pages: Tensor,  # [N, Hkv, P, Dk] of any layer
        value_pages: Tensor,  # [N, Hkv, P, Dv]
        page_table: Tensor,  # [S, M] int32
        seq_lens: Tensor,  # [S] int32, the new token included
        window: int | None,
        starts: Tensor | None,  # [S] int32
    ):
        lengths = seq_lens.tolist()
        paddings = [0] * len(lengths) if starts is None else starts.tolist()
        size, table = key_pages.shape[2], page_table.cpu().numpy()
        self._layout = _Layout(key_pages, value_pages)
        places = []  # (row, page, place in the page) of each new token
        for row, (length, padding) in enumerate(zip(lengths, paddings, strict=True)):
            page = table.item(row, (length - 1) // size) if length > padding else 0
            if page:
                places.append((row, page, (length - 1) % size))
        self._targets = self._written = None
        if places:
            rows, pages, offsets = np.array(places).T
            self._targets = self._layout.targets(pages, offsets)
            if len(places) < len(lengths):
                self._written = torch.from_numpy(rows).to(key_pages.device)
        bounds = range(len(lengths) + 1)
        self._pieces = _pieces(self._layout, table, lengths, bounds, paddings, window)

    def __call__(
        self,
        query: Tensor,  # [S, Hq, Dk]
        key: Tensor,  # [S, Hkv, Dk]
        value: Tensor,  # [S, Hkv, Dv]
        key_pages: Tensor,  # [N, Hkv, P, Dk], written
        value_pages: Tensor,  # [N, Hkv, P, Dv], written
        scores: Scores,
    ) -> Tensor:  # [S, Hq, Dv]
        """One layer's step."""
        if self._targets is not None:
            if self._written is not None:
                key, value = key[self._written], value[self._written]
            self._layout.write(key_pages, value_pages, self._targets, key, value)
        return _attend(query, key_pages, value_pages, self._layout, self._pieces, scores)


class _Piece(NamedTuple):
    """Neighbouring rows that are attended to at once: of one length, with equally many queries."""

    queries: slice  # of all queries
    length: int
    firsts: list[int]  # the first token that each row sees
    mask: Tensor | None  # [B, 1, Tq, tokens], see `_mask`
    pages: _Places  # of the tokens from the first that any row sees


def _pieces(
    layout: _Layout,
    table: npt.NDArray[np.int32],
    lengths: Sequence[int],
    bounds: Sequence[int],
    paddings: Sequence[int],
    window: int | None,
) -> list[_Piece]:
    """How rows are attended to; those that see nothing are left out."""
    counts = [stop - start for start, stop in pairwise(bounds)]
    pieces = []
    for rows in _alike(lengths, counts, layout.token_bytes):
        length, count = lengths[rows.start], counts[rows.start]
        oldest = 0 if window is None else max(0, length - count - window + 1)
        firsts = [min(length, max(padding, oldest)) for padding in paddings[rows]]
        if count and min(firsts) < length:
            queries = slice(bounds[rows.start], bounds[rows.stop])
            mask = _mask(length, count, firsts, window)
            if mask is not None:
                mask = mask.to(layout.device)
            gathered = layout.place(table[rows], min(firsts), length)
            pieces.append(_Piece(queries, length, firsts, mask, gathered))
    return pieces


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    layout: _Layout,
    pieces: Sequence[_Piece],
    scores: Scores,
) -> Tensor:
    """`[T, Hq, Dv]`: 0 for queries that are in no piece."""
    out: Tensor | None = None
    for piece in pieces:
        key, value = layout.gather(key_pages, value_pages, piece.pages)
        start, stop = piece.queries.start, piece.queries.stop
        asked = query if stop - start == len(query) else query[start:stop]
        answer = _attend_alike(asked, key, value, piece, scores)
        low = min(piece.firsts)
        if low < max(piece.firsts) and bool(answer.isnan().any()):
            # What lies before a row's first token weighs nothing, but zero times NaN is NaN.
            for row, first in enumerate(piece.firsts):
                key[row, :, : first - low] = 0
                value[row, :, : first - low] = 0
            answer = _attend_alike(asked, key, value, piece, scores)
        if asked is query:
            return answer
        if out is None:
            out = query.new_zeros(query.shape[0], query.shape[1], value.shape[3])
        out[piece.queries] = answer
    if out is None:
        return query.new_zeros(query.shape[0], query.shape[1], value_pages.shape[3])
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


class _Layout:
    """How the K and V pages of a layer lie, and of all that lie alike.

    In a pool both are rows of one matrix: each row is a page's K of one head, or its V, and one
    copy gathers both. NumPy makes the index: torch takes several times as long for sums so small.
    """

    def __init__(self, key_pages: Tensor, value_pages: Tensor):
        num_pages, self.num_heads, self.page_size, self.dim = key_pages.shape
        self.device = key_pages.device
        dims = self.dim + value_pages.shape[3]
        self.token_bytes = self.num_heads * dims * key_pages.element_size()
        width = self.page_size * self.dim
        apart = value_pages.storage_offset() - key_pages.storage_offset()
        self.is_matrix = (
            key_pages.untyped_storage().data_ptr() == value_pages.untyped_storage().data_ptr()
            and key_pages.shape == value_pages.shape
            and key_pages.stride() == value_pages.stride()
            and apart > 0
            and apart % width == key_pages.stride(0) % width == 0
        )
        if self.is_matrix:
            apart, self.per_page = apart // width, key_pages.stride(0) // width
            self.num_rows = (num_pages - 1) * self.per_page + apart + self.num_heads
            self.inside = _inside(apart, self.num_heads)

    def targets(
        self, pages: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
    ) -> tuple[Tensor, ...]:
        """Where `write` puts one token a row: place `offsets[i]` of page `pages[i]`."""
        if not self.is_matrix:
            return tuple(torch.from_numpy(ids).to(self.device) for ids in (pages, offsets))
        rows = self.inside.swapaxes(1, 2) + pages[:, None] * self.per_page
        places = rows * self.page_size + offsets[:, None]  # [K or V, B, Hkv]
        return (torch.from_numpy(places.ravel()).to(self.device),)

    def write(
        self,
        key_pages: Tensor,
        value_pages: Tensor,
        targets: tuple[Tensor, ...],
        key: Tensor,  # [B, Hkv, Dk]
        value: Tensor,  # [B, Hkv, Dv]
    ) -> None:
        """Write a token to each of the `targets`."""
        key, value = key.to(key_pages.dtype), value.to(value_pages.dtype)
        if self.is_matrix:
            tokens = self._matrix(key_pages, self.num_rows * self.page_size, self.dim)
            tokens.index_copy_(0, targets[0], torch.cat((key, value)).view(-1, self.dim))
        else:
            pages, offsets = targets
            key_pages[pages, :, offsets] = key
            value_pages[pages, :, offsets] = value

    def place(self, table: npt.NDArray[np.int32], low: int, length: int) -> _Places:
        """Where the tokens `low` to `length - 1` of rows with pages `[B, M]` lie."""
        size = self.page_size
        first = low // size
        ids = table[:, first : pages_for(length, size)].astype(np.int64)
        if self.is_matrix:
            ids = (self.inside + ids[:, None, None] * self.per_page).ravel()
        sources = torch.from_numpy(ids).to(self.device)
        return _Places(sources, len(table), low - first * size, length - low)

    def gather(
        self, key_pages: Tensor, value_pages: Tensor, places: _Places
    ) -> tuple[Tensor, Tensor]:
        """K and V `[B, Hkv, tokens, D]`; for a moment only."""
        sources, num_rows = places.sources, places.num_rows
        skipped, num_tokens = places.skipped, places.num_tokens
        if not self.is_matrix:
            wanted = slice(skipped, skipped + num_tokens)
            key, value = gather_kv(key_pages, value_pages, sources)
            return key[:, :, wanted], value[:, :, wanted]
        width, heads = self.page_size * self.dim, self.num_heads
        if places.gathered is None:
            both, is_kept = _scratch(len(sources), width, key_pages)
            head = len(sources) // (2 * num_rows * heads) * width
            shape = (num_rows, heads, num_tokens, self.dim)
            strides = (2 * heads * head, head, self.dim, 1)
            key = both.as_strided(shape, strides, skipped * self.dim)
            value = both.as_strided(shape, strides, skipped * self.dim + heads * head)
            if is_kept:
                places.gathered = both, key, value
        else:
            both, key, value = places.gathered
        rows = self._matrix(key_pages, self.num_rows, width)
        torch.index_select(rows, 0, sources, out=both)
        return key, value

    def _matrix(self, key_pages: Tensor, num_rows: int, width: int) -> Tensor:
        """A layer's K and V as rows: from its first K on, in which other layers' lie too."""
        return key_pages.as_strided((num_rows, width), (width, 1))


@dataclass(slots=True)
class _Places:
    """What `_Layout.gather` copies, of any layer whose pages lie alike."""

    sources: Tensor  # the pool's rows; or, where K and V are not rows of one matrix, pages [B, M]
    num_rows: int
    skipped: int  # tokens of the first page
    num_tokens: int  # after these
    gathered: tuple[Tensor, Tensor, Tensor] | None = None  # the thread's copy, its K and its V


@functools.lru_cache(64)
def _inside(apart: int, num_heads: int) -> npt.NDArray[np.int64]:
    """`[K or V, Hkv, 1]`: rows from a page's first to K and V of each head, `apart` rows apart."""
    return np.add.outer((0, apart), np.arange(num_heads))[:, :, None]


_kept = threading.local()


def _scratch(num_rows: int, width: int, like: Tensor) -> tuple[Tensor, bool]:
    """`[num_rows, width]` of memory that this thread keeps, or if that is much, of fresh memory.

    Whether it is kept is the second.
    """
    most = GATHERED_BYTES // like.element_size()
    if num_rows * width > most or like.device.type != "cpu":
        return torch.empty(num_rows, width, dtype=like.dtype, device=like.device), False
    memory: dict[Any, Tensor] = _kept.__dict__
    if like.dtype not in memory:
        with torch.inference_mode(False):  # else it could only be written to in that mode
            memory[like.dtype] = torch.empty(most, dtype=like.dtype, device="cpu")
    return memory[like.dtype].as_strided((num_rows, width), (width, 1)), True


def _attend_alike(
    query: Tensor,  # [B * Tq, Hq, Dk]
    key: Tensor,  # [B, Hkv, tokens, Dk]
    value: Tensor,  # [B, Hkv, tokens, Dv]
    piece: _Piece,
    scores: Scores,
) -> Tensor:  # [B * Tq, Hq, Dv]
    """Attention of the last `Tq` tokens of each row of a piece."""
    rows, num_kv_heads = key.shape[:2]
    num_tokens, num_heads, dim = query.shape
    count, group = num_tokens // rows, num_heads // num_kv_heads
    if count == 1:
        grouped = query.reshape(rows, num_kv_heads, group, dim)
    else:
        grouped = query.view(rows, count, num_kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(rows, num_kv_heads, group * count, dim)
    mask, length, firsts = piece.mask, piece.length, piece.firsts
    if scores.softcap is None and scores.sinks is None and scores.alibi_slopes is None:
        spread = mask if mask is None or count == 1 else mask.repeat(1, 1, group, 1)
        is_alone = grouped.shape[2] == 1 and _two_are_faster(query.dtype, query.device.type)
        if is_alone:
            grouped = grouped.repeat(1, 1, 2, 1)
        out = scaled_dot_product_attention(
            grouped, key, value, attn_mask=spread, scale=scores.scale
        )
        if is_alone:
            out = out[:, :, :1]
        if spread is not None and max(firsts) > length - count:  # some queries see nothing
            out = out.masked_fill(~spread.any(-1, keepdim=True), 0)
    else:
        out = _explicit(grouped, key, value, mask, length, min(firsts), scores)
    if count > 1:
        out = out.view(rows, num_kv_heads, group, count, -1).permute(0, 3, 1, 2, 4)
    # Dense, as compiled code has been told.
    return out.reshape(num_tokens, num_heads, -1).contiguous()


@functools.cache
def _two_are_faster(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch's attention to two queries takes less time than to one.

    On x86 a matrix times a vector in bf16 is a plain loop, while two vectors are a product for
    oneDNN. 12 heads of 64, 448 tokens, two cores: 250 and 65 us; with AVX2 alone 260 and 77.
    """
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return dtype == torch.bfloat16 and device_type == "cpu" and is_x86


def _mask(
    length: int, count: int, firsts: Sequence[int], window: int | None
) -> Tensor | None:  # [B, 1, Tq, tokens]
    """Which tokens from `min(firsts)` on the last `count` queries see; None where all see all."""
    if count == 1 and min(firsts) == max(firsts):
        return None
    token = np.arange(min(firsts), length)
    position = np.arange(length - count, length)[:, None]
    mask = (token <= position) & (token >= np.array(firsts)[:, None, None])
    if window is not None:
        mask &= token > position - window
    return torch.from_numpy(mask[:, None])


def _explicit(
    query: Tensor,  # [B, Hkv, G * Tq, Dk]
    key: Tensor,  # [B, Hkv, tokens, Dk]
    value: Tensor,  # [B, Hkv, tokens, Dv]
    mask: Tensor | None,  # [B, 1, Tq, tokens]
    length: int,
    low: int,
    scores: Scores,
) -> Tensor:  # [B, Hkv, G * Tq, Dv]
    """Step by step, with what torch's own attention does not have."""
    rows, num_kv_heads, num_queries, _ = query.shape
    count = 1 if mask is None else mask.shape[2]
    by_head = (num_kv_heads, num_queries // count, 1, 1)
    score = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scores.scale
    score = score.view(rows, num_kv_heads, -1, count, key.shape[2])
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    if scores.alibi_slopes is not None:
        token = torch.arange(low, length, device=query.device)
        position = torch.arange(length - count, length, device=query.device)[:, None]
        score = score + scores.alibi_slopes.float().view(by_head) * (token - position)
    if mask is not None:
        score = score.masked_fill(~mask[:, None], -math.inf)
    total = score.logsumexp(-1, keepdim=True)
    if scores.sinks is not None:
        total = torch.logaddexp(total, scores.sinks.float().view(by_head))
    weight = (score - total.nan_to_num(neginf=0)).exp().to(value.dtype).flatten(2, 3)
    return torch.matmul(weight, value)
