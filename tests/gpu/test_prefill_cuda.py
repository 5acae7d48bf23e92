"""The prefill kernel on a GPU, against the reference in float64 and beside torch's attention."""

from __future__ import annotations

import random

import pytest
import torch
from tests.ops.attention_cases import RATIOS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

prefill = pytest.importorskip("pageforge.ops.prefill", reason="needs triton")
from tests.ops.test_prefill import Batch, make_batch, random_options  # noqa: E402

from pageforge.store import VirtualMemoryStore, is_elastic  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [(300, 300), (129, 1500), (1, 700), (0, 40), (7, 64), (0, 0), (64, 2111)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("plain", [True, False])
def test_any_batch(dtype: torch.dtype, dim: int, plain: bool) -> None:
    rng = random.Random(f"{dtype}{dim}{plain}")
    torch.manual_seed(rng.randrange(2**31))
    heads = rng.choice(RATIOS)
    rows = rng.sample(ROWS, rng.choice([1, 3, len(ROWS)]))
    batch = make_batch(
        rows,
        heads=heads,
        dims=(dim, dim),
        page_size=rng.choice([8, 16, 64, 256]),
        dtype=dtype,
        device="cuda",
        **({} if plain else random_options(rng, rows, heads[0], "cuda")),
    )
    batch.check(batch.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(192, 128), (64, 256), (24, 40)])
def test_keys_and_values_of_different_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    batch = make_batch([(200, 900), (33, 33)], heads=(8, 4), dims=dims, dtype=dtype, device="cuda")
    batch.check(batch.run())


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(dtype, heads) for dtype in DTYPES[:2] for heads in RATIOS] + [(torch.float32, (32, 8))],
)
def test_no_further_off_than_torchs_attention(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """At most twice the error of `scaled_dot_product_attention` on the same numbers."""
    torch.manual_seed(heads[0])
    rows = [(512, 512), (256, 2000), (100, 900)]
    batch = make_batch(rows, heads=heads, dims=(64, 64), page_size=16, dtype=dtype, device="cuda")
    got, lse = batch.run()
    batch.check((got, lse))
    want, _ = batch.want()
    dense = torch.cat([_torchs_attention(batch, row) for row in range(len(rows))])
    want, got = want[: len(dense)], got[: len(dense)].double()
    ours, torchs = (got - want).norm() / want.norm(), (dense.double() - want).norm() / want.norm()
    few_ulps = 4 * torch.finfo(torch.float32).eps
    assert ours <= max(2 * torchs, few_ulps), (ours, torchs)


def _torchs_attention(batch: Batch, row: int) -> torch.Tensor:
    first, stop = batch.cu_query_lens[row : row + 2].tolist()
    length = int(batch.seq_lens[row])
    page_size = batch.key_pages.shape[2]
    token = torch.arange(length, device="cuda")
    page = batch.page_table[row].long()[token // page_size]
    group = batch.query.shape[1] // batch.key_pages.shape[1]
    key, value = (
        pages[page, :, token % page_size].repeat_interleave(group, 1).transpose(0, 1)
        for pages in (batch.key_pages, batch.value_pages)
    )
    position = torch.arange(length - (stop - first), length, device="cuda")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(
            batch.query[first:stop].transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=token <= position[:, None],
        )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("spike", [0, 15, 16, 63, 64, 127, 128, 255, 256, 383, 447, 448, 511, 512])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)])
def test_a_key_that_owns_the_softmax_is_neither_lost_nor_repeated(
    spike: int, dims: tuple[int, int]
) -> None:
    torch.manual_seed(spike)
    batch = make_batch(
        [(70, 518), (spike + 1, spike + 1), (100, 1000)],
        heads=(32, 8),
        dims=dims,
        page_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        spike=spike,
    )
    batch.check(batch.run())


@pytest.mark.parametrize("window", [1, 63, 64, 65, 127, 128, 129, 256, 511, 1024])
@pytest.mark.parametrize("heads", [(8, 8), (8, 1)])
def test_windows(window: int, heads: tuple[int, int]) -> None:
    for spike in (1000 - window, 999 - window):  # the query at position 999 sees the first of these
        torch.manual_seed(window)
        batch = make_batch(
            [(200, 1100), (40, 300)],
            heads=heads,
            dims=(128, 128),
            page_size=16,
            dtype=torch.float16,
            device="cuda",
            window=window,
            spike=spike,
        )
        batch.check(batch.run())


def test_tiles_without_a_mask_are_those_that_all_queries_see() -> None:
    """However the queries and the window lie to the tiles."""
    for window in (None, 300):
        batch = make_batch(
            [(3, length) for length in range(380, 515)],
            heads=(8, 2),
            dims=(128, 128),
            page_size=16,
            dtype=torch.float16,
            device="cuda",
            window=window,
        )
        batch.check(batch.run())


def test_many_rows_of_which_few_are_served() -> None:
    torch.manual_seed(0)
    rows = [(1, 50 + row) for row in range(300)]
    rows[7], rows[150], rows[299] = (500, 800), (2, 30), (90, 90)
    batch = make_batch(rows, heads=(8, 2), dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    batch.check(batch.run(min_query_len=2), min_query_len=2)


def test_lengths_change_under_a_captured_graph() -> None:
    """No recapture, and not one synchronisation with the host."""
    torch.manual_seed(0)
    batch = make_batch(
        [(300, 2000), (200, 3000), (1, 1), (11, 500)],
        heads=(32, 8),
        dims=(128, 128),
        page_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        spare=0,
    )
    batch.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = batch.run()
    for queries, lengths in (
        ([300, 200, 1, 11], [2000, 3000, 1, 500]),
        ([1, 2, 0, 500], [1, 17, 0, 500]),
        ([0, 512, 0, 0], [2000, 1023, 0, 64]),
        ([128, 128, 1, 0], [128, 3000, 1, 499]),
    ):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.cu_query_lens[1:] = torch.tensor(queries, device="cuda").cumsum(0)
        graph.replay()
        batch.check((out, lse))


def test_pages_past_every_power_of_two_that_a_number_could_overflow_at() -> None:
    """And all other pages without memory behind them: to read one of those is a fault.

    The last test here: after a fault nothing more runs on the device in this process.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_elastic(device):
        pytest.skip("no virtual memory management here")
    torch.manual_seed(0)
    batch = make_batch(
        [(100, 150), (16, 16)],
        heads=(8, 2),
        dims=(128, 128),
        page_size=16,
        dtype=torch.float16,
        device="cuda",
    )
    want = batch.want()
    num_kv_heads, page_size, dim = 2, 16, 128
    elements = num_kv_heads * page_size * dim  # of K in a page; as many of V
    page_bytes = 2 * 2 * elements
    edges = [2**31 // page_bytes, 2**32 // page_bytes, 2**32 // (2 * elements)]
    ids = [edge + step for edge in edges for step in (-2, -1, 0, 1)][: len(batch.key_pages) - 1]
    memory = VirtualMemoryStore((ids[-1] + 2) * page_bytes, device)
    for page in (0, *ids):
        memory.map(page * page_bytes, (page + 1) * page_bytes)
    far = memory.tensor(torch.float16).view(-1, 2, num_kv_heads, page_size, dim)
    new = torch.tensor([0, *ids], device="cuda")
    for old, page in enumerate(new.tolist()):
        far[page, 0], far[page, 1] = batch.key_pages[old], batch.value_pages[old]
    batch.page_table = new[batch.page_table.long()].int()
    batch.key_pages, batch.value_pages = far[:, 0], far[:, 1]
    batch.want = lambda: want
    batch.check(batch.run())
    torch.cuda.synchronize()
    memory.close()
