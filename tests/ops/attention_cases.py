"""Random problems for the attention ops, and what their answers must be like."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pageforge.geometry import pages_for
from pageforge.ops import reference
from pageforge.ops.plan import DecodePlan, plan_decode

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


@dataclass
class Step:
    """A decode step over a pool in which every byte that no token in sight owns is NaN."""

    query: Tensor  # [S, Hq, Dk]
    store: Tensor  # [N, page elements], of which the views below are parts
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    seq_lens: Tensor
    options: dict[str, Any]  # as the ops take them

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def cu_query_lens(self) -> Tensor:
        return torch.arange(len(self.seq_lens) + 1).to(self.seq_lens)

    def cut(self, **more: Any) -> DecodePlan:
        """The step's plan."""
        return plan_decode(
            self.seq_lens,
            num_kv_heads=self.key_pages.shape[1],
            key_dim=self.key_pages.shape[3],
            dtype=self.key_pages.dtype,
            max_seq_len=self.page_table.shape[1] * self.key_pages.shape[2],
            window=self.options.get("window"),
            starts=self.options.get("starts"),
            **more,
        )

    def run(
        self,
        *,
        plan: DecodePlan | None = None,
        batch_invariant: bool = False,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the kernels make of it: output and LSE."""
        from pageforge.ops.decode import attend_decode

        rows, num_heads, _ = self.query.shape
        out = self.query.new_full((rows, num_heads, self.value_pages.shape[3]), torch.nan)
        lse = self.query.new_full((rows, num_heads), torch.nan, dtype=torch.float32)
        options = {n: v for n, v in self.options.items() if n not in ("window", "starts")}
        new_key, new_value = new or (None, None)
        table, max_pieces, *_ = plan or self.cut(batch_invariant=batch_invariant)
        attend_decode(
            *(self.query, self.key_pages, self.value_pages, self.page_table),
            *(table, max_pieces, out),
            scale=self.scale,
            seq_lens=self.seq_lens,
            lse=lse,
            new_key=new_key,
            new_value=new_value,
            batch_invariant=batch_invariant,
            **options,
        )
        return out, lse

    def want(self) -> tuple[Tensor, Tensor]:
        """The answer in float64. (A weight of 0 times NaN is NaN there: the NaN are taken out.)"""
        return reference.attend(
            self.query.double(),
            self.key_pages.nan_to_num(0),
            self.value_pages.nan_to_num(0),
            *(self.page_table, self.seq_lens, self.cu_query_lens),
            scale=self.scale,
            **self.options,
        )

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Every row is as near to the answer as its dtype allows."""
        want, want_lse = self.want()
        assert not out.isnan().any()
        error = (out.double() - want).flatten(1).norm(dim=1)
        allowed = TOLERANCE[out.dtype] * want.flatten(1).norm(dim=1).clamp(min=1e-3)
        assert bool((error <= allowed).all()), (error / allowed).tolist()
        if lse is not None:
            blind = want_lse.isneginf()
            assert torch.equal(lse.isneginf(), blind)
            difference = (lse - want_lse).masked_fill(blind, 0).abs()
            assert bool((difference <= 10 * TOLERANCE[out.dtype]).all()), difference.max()

    def take_newest(self) -> tuple[Tensor, Tensor]:
        """K and V of each row's newest token, which are NaN in the pages from now on."""
        page_size = self.key_pages.shape[2]
        last = (self.seq_lens.long() - 1).clamp(min=0)
        real = self.seq_lens > 0
        page = self.page_table.gather(1, (last // page_size)[:, None])[:, 0].long()
        taken = []
        for pages in (self.key_pages, self.value_pages):
            taken.append(pages[page, :, last % page_size])
            pages[page[real], :, (last % page_size)[real]] = torch.nan
        return taken[0], taken[1]


def make_step(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),  # of K and of V
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    window: int | None = None,
    starts: Sequence[int] | None = None,
    spikes: Sequence[int] = (),
    uniform: bool = False,
    spare: int = 1,  # columns of the page table that no row needs
    **options: Any,
) -> Step:
    """A decode step of rows of these lengths.

    `spikes`: positions whose keys are alike and share the softmax of some heads among them, so that
    one that is lost, or counted twice, shows. `uniform`: all keys share it.
    """
    num_heads, num_kv_heads = heads
    rows = len(lengths)
    low = (
        [0] * rows if starts is None else [min(s, n) for s, n in zip(starts, lengths, strict=True)]
    )
    if window is not None:
        low = [max(s, n - window) for s, n in zip(low, lengths, strict=True)]
    owned = [
        (row, column)
        for row in range(rows)
        for column in range(low[row] // page_size, pages_for(lengths[row], page_size))
        if low[row] < lengths[row]
    ]
    ids = (torch.randperm(len(owned) + 2) + 1)[: len(owned)].tolist()
    table = torch.zeros(rows, pages_for(max(lengths, default=0), page_size) + spare).int()
    for (row, column), page in zip(owned, ids, strict=True):
        table[row, column] = page
    split = num_kv_heads * page_size * dims[0]
    elements = num_kv_heads * page_size * sum(dims)
    store = torch.full((len(owned) + 3, 2 * elements), torch.nan, dtype=dtype, device=device)
    layer = store[:, elements:]  # of two
    keys = layer[:, :split].unflatten(1, (num_kv_heads, page_size, dims[0]))
    values = layer[:, split:].unflatten(1, (num_kv_heads, page_size, dims[1]))
    query = torch.randn(rows, num_heads, dims[0], device=device).to(dtype)
    if uniform:
        query.zero_()
    for row, length in enumerate(lengths):
        token = torch.arange(low[row], length)
        page = table[row].long()[token // page_size].to(device)
        offset = (token % page_size).to(device)
        for pages in (keys, values):
            new = torch.randn(len(token), num_kv_heads, pages.shape[3], device=device)
            pages[page, :, offset] = new.to(dtype)
        at = torch.tensor([s - low[row] for s in spikes if low[row] <= s < length], device=device)
        if len(at):
            one = query[row, :: num_heads // num_kv_heads]
            keys[page[at], :, offset[at]] = one * (4 * dims[0] ** 0.5 / one.norm(dim=1)[:, None])
    integers = {"dtype": torch.int32, "device": device}
    if window is not None:
        options["window"] = window
    if starts is not None:
        options["starts"] = torch.tensor(starts, **integers)
    return Step(
        *(query, store, keys, values, table.to(device)),
        torch.tensor(lengths, **integers),
        options,
    )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)
