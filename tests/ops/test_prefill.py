"""The prefill kernel in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.attention_cases import RATIOS, TOLERANCE
from torch import Tensor

from pageforge.geometry import ceil_div
from pageforge.ops import reference

prefill = pytest.importorskip("pageforge.ops.prefill", reason="needs triton")

UNTOUCHED = 77.0


@dataclass
class Batch:
    """Queries of a ragged batch over a pool in which every byte that no live token owns is NaN."""

    query: Tensor  # [T, Hq, Dk], a few tokens more than the rows have
    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        """What the kernel makes of it: output and LSE."""
        num_tokens, num_heads, _ = self.query.shape
        out = self.query.new_full((num_tokens, num_heads, self.value_pages.shape[3]), UNTOUCHED)
        lse = out.new_full((num_tokens, num_heads), UNTOUCHED, dtype=torch.float32)
        prefill.attend_prefill(
            *(self.query, self.key_pages, self.value_pages, self.page_table),
            *(self.seq_lens, self.cu_query_lens, out),
            **{"scale": self.scale, "lse": lse, **self.options, **more},
        )
        return out, lse

    def want(self) -> tuple[Tensor, Tensor]:
        """The same in float64. (A weight of 0 times NaN is NaN there: the NaN are taken out.)"""
        return reference.attend(
            self.query.double(),
            self.key_pages.nan_to_num(0),
            self.value_pages.nan_to_num(0),
            *(self.page_table, self.seq_lens, self.cu_query_lens),
            scale=self.scale,
            **self.options,
        )

    def check(self, got: tuple[Tensor, Tensor], min_query_len: int = 1) -> None:
        """Every query is as near to the answer as its dtype allows; other tokens are untouched."""
        (out, lse), (want, want_lse) = got, self.want()
        served = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        bounds = self.cu_query_lens.tolist()
        for first, stop in itertools.pairwise(bounds):
            served[first:stop] = stop - first >= min_query_len
        assert bool((out[~served] == UNTOUCHED).all() and (lse[~served] == UNTOUCHED).all())
        out, want, lse, want_lse = out[served], want[served], lse[served], want_lse[served]
        assert not out.isnan().any()
        error = (out.double() - want).flatten(1).norm(dim=1)
        size = want.flatten(1).norm(dim=1)
        allowed = TOLERANCE[out.dtype] * size.clamp(min=1e-3)
        assert (error <= allowed).all(), (error / allowed).max()
        blind = want_lse.isneginf()
        assert torch.equal(lse.isneginf(), blind)
        difference = (lse - want_lse).masked_fill(blind, 0).abs()
        assert (difference <= 10 * TOLERANCE[out.dtype]).all(), difference.max()


def make_batch(
    rows: list[tuple[int, int]],  # queries and length of each row
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),  # of K and of V
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    window: int | None = None,
    starts: list[int] | None = None,
    spike: int | None = None,  # a position whose key owns the softmax of every query that sees it
    spare: int = 2,  # tokens past the last row's
    **options: Any,
) -> Batch:
    num_heads, num_kv_heads = heads
    columns = max(1, *(ceil_div(length, page_size) for _, length in rows))
    table = torch.zeros(len(rows), columns, dtype=torch.int32)
    # What is before a row's start, or out of the window of its first query, is nobody's.
    low = [0] * len(rows) if starts is None else list(starts)
    if window is not None:
        low = [max(s, n - q - window + 1) for s, (q, n) in zip(low, rows, strict=True)]
    owned = [
        (row, column)
        for row, (_, length) in enumerate(rows)
        for column in range(low[row] // page_size, ceil_div(length, page_size))
    ]
    for (row, column), page in zip(owned, torch.randperm(len(owned)).tolist(), strict=True):
        table[row, column] = page + 1
    page_elements = num_kv_heads * page_size * sum(dims)
    store = torch.full((1 + len(owned), 2, page_elements), torch.nan, dtype=dtype, device=device)
    split = num_kv_heads * page_size * dims[0]
    keys = store[:, 1, :split].unflatten(1, (num_kv_heads, page_size, dims[0]))
    values = store[:, 1, split:].unflatten(1, (num_kv_heads, page_size, dims[1]))
    cu_query_lens = [0]
    for queries, _ in rows:
        cu_query_lens.append(cu_query_lens[-1] + queries)
    query = torch.randn(cu_query_lens[-1] + spare, num_heads, dims[0], device=device).to(dtype)
    for row, (queries, length) in enumerate(rows):
        token = torch.arange(low[row], length)
        page = table[row].long()[token // page_size].to(device)
        offset = (token % page_size).to(device)
        for pages in (keys, values):
            new = torch.randn(len(token), num_kv_heads, pages.shape[3], device=device)
            pages[page, :, offset] = new.to(dtype)
        if spike is not None and low[row] <= spike < length and queries:
            # All queries of the row point the same way, more or less, and so does one key.
            axis = torch.nn.functional.normalize(torch.randn(dims[0], device=device), dim=0)
            mine = query[cu_query_lens[row] : cu_query_lens[row] + queries]
            mine += (axis * 3).to(dtype)
            at = spike - low[row]
            keys[page[at], :, offset[at]] = (axis * 8 * dims[0] ** 0.5).to(dtype)
    integers = {"dtype": torch.int32, "device": device}
    if window is not None:
        options["window"] = window
    if starts is not None:
        options["starts"] = torch.tensor(starts, **integers)
    return Batch(
        *(query, keys, values, table.to(device)),
        torch.tensor([length for _, length in rows], **integers),
        torch.tensor(cu_query_lens, **integers),
        options,
    )


def random_options(
    rng: random.Random, rows: list[tuple[int, int]], num_heads: int, device: str = "cpu"
) -> dict[str, Any]:
    """Softcap, sinks, slopes, left padding and a window, each now and then."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["softcap"] = 5.0
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(num_heads, device=device)
    if rng.random() < 0.3:
        options["alibi_slopes"] = torch.rand(num_heads, device=device) * 0.1
    if rng.random() < 0.3:
        options["starts"] = [rng.choice([0, n // 3, n]) for _, n in rows]
    if rng.random() < 0.4:
        options["window"] = rng.choice([1, 8, 9, 16, 40, 129, 1000])
    return options


@pytest.mark.parametrize("heads", RATIOS, ids=str)
def test_mixed_rows(heads: tuple[int, int]) -> None:
    """A first chunk, one that continues, one token, no tokens at all, no queries, one of each."""
    rows = [(5, 5), (7, 30), (1, 17), (0, 0), (0, 9), (1, 1)]
    batch = make_batch(rows, heads=heads)
    batch.check(batch.run())


@pytest.mark.parametrize("dims", [(40, 40), (80, 80), (96, 96), (112, 112), (24, 16), (16, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bf16 is wrong in here
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    batch = make_batch([(9, 21)], dims=dims, dtype=dtype, page_size=16)
    batch.check(batch.run())


@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_page_sizes(page_size: int) -> None:
    """Smaller than a tile, as large, and larger."""
    batch = make_batch([(20, 70), (3, page_size)], page_size=page_size)
    batch.check(batch.run())


@pytest.mark.parametrize("spike", [0, 7, 8, 15, 16, 17, 31, 32, 39, 40, 47, 48])
def test_a_key_that_owns_the_softmax_is_neither_lost_nor_repeated(spike: int) -> None:
    """At the edges of pages (8), of tiles (16) and of the diagonal; V of that key is the answer."""
    batch = make_batch([(9, 49), (spike + 1, spike + 1)], spike=spike, dims=(32, 16))
    out, lse = batch.run()
    batch.check((out, lse))
    at = batch.page_table[0, spike // 8].long()
    value = batch.value_pages[at, 0, spike % 8]
    assert bool((out[8] - value).norm() < 0.1 * value.norm())


@pytest.mark.parametrize("window", [7, 8, 9, 15, 16, 17, 32])
def test_windows_about_the_sizes_of_pages_and_tiles(window: int) -> None:
    """With the key that owns the softmax just inside, and just outside, of the window."""
    for spike in (40 - window, 39 - window):  # the query at position 39 sees the first of these
        batch = make_batch([(12, 45), (3, 5)], window=window, spike=spike, dims=(32, 16))
        batch.check(batch.run())


@pytest.mark.parametrize("window", [None, 33, 36])
def test_tiles_without_a_mask_are_those_that_all_queries_see(window: int | None) -> None:
    """However the queries and the window lie to the tiles (16)."""
    batch = make_batch([(2, length) for length in range(50, 67)], window=window)
    batch.check(batch.run())


@pytest.mark.parametrize("starts", [[1, 0], [7, 8], [8, 3], [16, 9], [30, 10], [33, 10], [35, 10]])
def test_left_padding_inside_and_after_pages(starts: list[int]) -> None:
    """Up to all of the keys, when queries are left that see nothing."""
    batch = make_batch([(12, 35), (10, 10)], starts=starts)
    batch.check(batch.run())
    batch = make_batch([(12, 35), (10, 10)], starts=starts, sinks=torch.tensor([0.5, -math.inf]))
    batch.check(batch.run())


def test_rows_of_few_queries_are_left_as_they_are() -> None:
    batch = make_batch([(1, 9), (2, 9), (1, 1), (5, 30), (1, 20)])
    batch.check(batch.run(min_query_len=2), min_query_len=2)
    batch.check(batch.run(min_query_len=3), min_query_len=3)


def test_a_slice_of_the_rows() -> None:
    """Its `cu_query_lens` begin past 0: the other rows' tokens are somebody else's."""
    batch = make_batch([(20, 25), (3, 11), (9, 9), (18, 18)])
    whole = batch.want()
    batch.seq_lens, batch.page_table = batch.seq_lens[1:3], batch.page_table[1:3]
    batch.cu_query_lens = batch.cu_query_lens[1:4]
    out, lse = batch.run()
    batch.check((out, lse))
    assert torch.allclose(out[20:32].double(), whole[0][20:32], atol=1e-5)


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives() -> None:
    batch = make_batch([(50, 50)], spare=0)
    whole, whole_lse = batch.run()
    batch.check((whole, whole_lse))
    query, done = batch.query, 0
    for chunk in (1, 16, 15, 18):
        batch.query = query[done : done + chunk]
        batch.seq_lens = torch.tensor([done + chunk], dtype=torch.int32)
        batch.cu_query_lens = torch.tensor([0, chunk], dtype=torch.int32)
        out, lse = batch.run()
        assert torch.allclose(out, whole[done : done + chunk], atol=1e-6)
        assert torch.allclose(lse, whole_lse[done : done + chunk], atol=1e-5)
        done += chunk


def test_queries_and_outputs_that_lie_in_wider_tensors() -> None:
    """A slice of a fused projection has other distances between tokens and heads."""
    batch = make_batch([(9, 20)], heads=(4, 2))
    batch.query = torch.randn(11, 3, 4, 20)[:, 1, :, :16]
    wide = torch.full((11, 4, 24), UNTOUCHED)
    got, lse = batch.run()
    prefill.attend_prefill(
        *(batch.query, batch.key_pages, batch.value_pages, batch.page_table),
        *(batch.seq_lens, batch.cu_query_lens, wide[:, :, :16]),
        scale=batch.scale,
    )
    batch.check((got, lse))
    assert torch.equal(wide[:, :, :16], got)
    assert bool((wide[:, :, 16:] == UNTOUCHED).all())


def test_keys_and_values_with_pages_of_their_own_and_of_another_dtype() -> None:
    batch = make_batch([(9, 20)], dims=(16, 24), dtype=torch.float16)
    batch.query = batch.query.float()
    batch.key_pages = batch.key_pages.contiguous()
    batch.value_pages = batch.value_pages.contiguous()
    batch.check(batch.run())


def test_a_group_of_heads_wider_than_a_program() -> None:
    batch = make_batch([(3, 12)], heads=(38, 2))
    batch.check(batch.run())
    batch = make_batch([(2, 5)], heads=(33, 1))
    batch.check(batch.run())


@pytest.mark.parametrize("more", [{}, {"window": 9}, {"starts": [0, 3, 0]}], ids=str)
@pytest.mark.parametrize("length", [25, 40, 300, 2**31 - 1])
def test_a_row_longer_than_its_pages_gives_nan(length: int, more: dict[str, Any]) -> None:
    """And reads none: behind its own in the table are another row's, and in the end nobody's."""
    batch = make_batch([(3, 12), (4, 24), (2, 18)], spare=0, **more)
    want, want_lse = batch.run()
    batch.seq_lens[1] = length
    out, lse = batch.run()
    assert bool(out[3:7].isnan().all() and lse[3:7].isnan().all())
    others = [0, 1, 2, 7, 8]
    assert torch.equal(out[others], want[others]) and torch.equal(lse[others], want_lse[others])


def test_nothing_to_do() -> None:
    batch = make_batch([(0, 4), (0, 0)])
    batch.check(batch.run())
    batch = make_batch([(0, 4)], spare=0)
    batch.check(batch.run())


@settings(max_examples=15)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 25)).map(lambda r: (r[0], r[0] + r[1])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from(RATIOS),
    dims=st.sampled_from([(16, 16), (40, 24), (32, 64)]),
    page_size=st.sampled_from([8, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**20),
)
def test_any_batch(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    options = random_options(random.Random(seed), rows, heads[0])
    batch = make_batch(rows, heads=heads, dims=dims, page_size=page_size, dtype=dtype, **options)
    batch.check(batch.run())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("width", [2, 4])
def test_a_program_holds_whole_queries_on_every_device(dim: int, width: int) -> None:
    for capability in ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        tiling = prefill._tiling(dim, width, capability)
        assert tiling.pairs >= max(q // kv for q, kv in RATIOS)
