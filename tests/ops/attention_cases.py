"""Random problems for the attention ops, and what their answers must be like."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pageforge.geometry import pages_for
from pageforge.ops import reference

RATIOS = [(12, 12), (32, 8), (28, 4), (9, 3), (8, 1), (12, 2), (24, 1)]
"""Query heads, KV heads."""

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Norm-wise relative error against float64."""


@dataclass
class Case:
    """One decode step over a pool in which every byte that no token owns is NaN."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    seq_lens: Tensor
    options: dict = field(default_factory=dict)
    starts: Tensor | None = None
    window: int | None = None

    def want(self) -> Tensor:
        """The answer in float64."""
        rows = len(self.seq_lens)
        out, _ = reference.attend(
            self.query.double(),
            self.key_pages,
            self.value_pages,
            self.page_table,
            self.seq_lens,
            torch.arange(rows + 1, device=self.query.device),
            scale=self.query.shape[-1] ** -0.5,
            window=self.window,
            starts=self.starts,
            **self.options,
        )
        return out

    def check(self, got: Tensor) -> None:
        """`got` is as near to the answer as its dtype allows, row by row."""
        want = self.want()
        assert not got.isnan().any()
        error = (got.double() - want).flatten(1).norm(dim=1)
        size = want.flatten(1).norm(dim=1)
        allowed = TOLERANCE[got.dtype] * size.clamp(min=1e-3)
        assert (error <= allowed).all(), (error / size).tolist()


def random_case(
    rng: random.Random,
    *,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    spike: int | None = None,
    plain: bool = False,
) -> Case:
    """A case with random options, or with `plain` none.

    `spike`: a position whose key owns the softmax of every row.
    """
    num_heads, num_kv_heads = heads
    starts = None
    if not plain and rng.random() < 0.4:
        starts = torch.tensor([rng.randrange(n + 1) if rng.random() < 0.5 else 0 for n in lengths])
    num_pages = sum(pages_for(n, page_size) for n in lengths)
    ids = torch.randperm(num_pages) + 1
    table = torch.zeros(len(lengths), max(1, pages_for(max(lengths), page_size)) + 1).int()
    taken = 0
    for row, length in enumerate(lengths):
        count = pages_for(length, page_size)
        table[row, :count] = ids[taken : taken + count]
        taken += count
    layers = 2
    store = torch.full(
        (num_pages + 1, layers, 2, num_kv_heads, page_size, dim), torch.nan, dtype=dtype
    )
    keys, values = store[:, 1, 0], store[:, 1, 1]
    query = torch.randn(len(lengths), num_heads, dim).to(dtype)
    for row, length in enumerate(lengths):
        low = 0 if starts is None else int(starts[row])
        token = torch.arange(low, length)
        page = table[row].long()[token // page_size]
        for pages in (keys, values):
            rows = torch.randn(len(token), num_kv_heads, dim).to(dtype)
            pages[page, :, token % page_size] = rows
        if spike is not None and low <= spike < length:
            page_of_spike = int(table[row, spike // page_size])
            group = num_heads // num_kv_heads
            keys[page_of_spike, :, spike % page_size] = query[row, ::group] * 4
    options: dict = {}
    if rng.random() < 0.3:
        options["softcap"] = 30.0
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(num_heads).to(dtype).to(device)
    if rng.random() < 0.3:
        options["alibi_slopes"] = (torch.rand(num_heads) * 0.1).to(device)
    window = rng.choice([None, None, 1, page_size - 1, page_size + 1, 64])
    if plain:
        options, window = {}, None
    store = store.to(device)
    return Case(
        query.to(device),
        store[:, 1, 0],
        store[:, 1, 1],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        options,
        None if starts is None else starts.int().to(device),
        window,
    )
