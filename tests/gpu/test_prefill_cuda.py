"""The prefill kernels on a GPU, against the reference in float64 and beside torch's attention."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.ops.attention_cases import RATIOS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

prefill = pytest.importorskip("pageforge.ops.prefill", reason="needs triton")
from tests.ops.test_prefill import Batch, make_batch, random_options  # noqa: E402

from pageforge.store import VirtualMemoryStore, is_elastic  # noqa: E402

pytestmark = pytest.mark.gpu

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

ROWS = [(300, 300), (129, 1500), (1, 700), (0, 40), (7, 64), (0, 0), (64, 2111), (130, 141)]
"""Queries and length of each."""

KINDS: list[dict[str, Any]] = [  # that both kernels serve: every ratio of heads, every page size
    {"heads": (12, 12), "dims": (64, 64), "page_size": 16, "dtype": FP16},
    {"heads": (32, 8), "dims": (128, 128), "page_size": 16, "dtype": BF16},
    {"heads": (28, 4), "dims": (128, 128), "page_size": 64, "dtype": FP16},
    {"heads": (9, 3), "dims": (64, 64), "page_size": 8, "dtype": BF16},
    {"heads": (8, 1), "dims": (128, 128), "page_size": 128, "dtype": BF16},
    {"heads": (12, 2), "dims": (64, 64), "page_size": 32, "dtype": FP16},
    {"heads": (24, 1), "dims": (128, 128), "page_size": 8, "dtype": FP16},
]


def name_of(kind: dict[str, Any]) -> str:
    queries, keys = kind["heads"]
    return f"{queries}/{keys}-{kind['dims'][0]}-{kind['page_size']}-{kind['dtype']}"


@pytest.fixture(params=["plain", "hopper"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plain kernel, and the one that is for Hopper alone."""
    hopper, launched = prefill.hopper, []
    if request.param == "plain":
        monkeypatch.setattr(prefill, "hopper", None)
    elif hopper is None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0, and a Triton the kernel is for")
    else:
        attend_prefill = hopper.attend_prefill

        def launch(*args: Any, **options: Any) -> None:
            launched.append(True)
            attend_prefill(*args, **options)

        monkeypatch.setattr(hopper, "attend_prefill", launch)
    yield
    assert bool(launched) == (request.param == "hopper")


both_kernels = pytest.mark.usefixtures("_kernel")


def make(rows: list[tuple[int, int]], kind: dict[str, Any], **more: Any) -> Batch:
    torch.manual_seed(len(rows))
    return make_batch(rows, device="cuda", **kind, **more)


# --- any head dims, dtypes and options ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("dim", [16, 40, 64, 80, 96, 112, 128, 256])
def test_any_batch(dtype: torch.dtype, dim: int) -> None:
    rng = random.Random(f"{dtype}{dim}")
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
        **random_options(rng, rows, heads[0], "cuda"),
    )
    batch.check(batch.run())


@pytest.mark.parametrize(
    ("dtype", "dims"), [(FP16, (192, 128)), (BF16, (64, 256)), (FP32, (24, 40))]
)
def test_keys_and_values_of_different_dims(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    batch = make_batch([(200, 900), (33, 33)], heads=(8, 4), dims=dims, dtype=dtype, device="cuda")
    batch.check(batch.run())


# --- what both kernels serve ----------------------------------------------------------------------


@both_kernels
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_no_further_off_than_torchs_attention(kind: dict[str, Any]) -> None:
    """At most twice the error of `scaled_dot_product_attention` on the same numbers.

    And the same bits each time: warps that do not wait for one another would differ now and then.
    """
    batch = make([row for row in ROWS if row[0]], kind)
    got = batch.run()
    batch.check(got)
    _check_beside_torchs(batch, got[0])
    for _ in range(10):
        for one, other in zip(batch.run(), got, strict=True):
            assert torch.equal(one, other)


def test_float32_is_no_further_off_than_torchs_attention() -> None:
    batch = make([row for row in ROWS if row[0]], {**KINDS[1], "dtype": FP32})
    _check_beside_torchs(batch, batch.run()[0])


def _check_beside_torchs(batch: Batch, got: torch.Tensor) -> None:
    want, _ = batch.want()
    dense = torch.cat([_torchs_attention(batch, row) for row in range(len(batch.seq_lens))])
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


@both_kernels
@pytest.mark.parametrize("kind", [KINDS[n] for n in (0, 1, 3, 4)], ids=name_of)
def test_a_key_that_owns_the_softmax_is_neither_lost_nor_repeated(kind: dict[str, Any]) -> None:
    """At the edges of pages, of tiles (64 or 128 tokens) and of the queries' own blocks."""
    edges = [8, 16, 64, 128, 256, 384, 448, 512]
    for spike in (0, *(edge + step for edge in edges for step in (-1, 0, 1))):
        batch = make(
            [(70, 518), (spike + 1, spike + 1), (100, 1000), (1, spike + 1), (2, spike + 2)],
            kind,
            spike=spike,
        )
        batch.check(batch.run())


@both_kernels
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=name_of)
def test_windows(kind: dict[str, Any]) -> None:
    """About the sizes of pages and tiles, with rows of about the window's length.

    The query at position 999 sees the first of the spikes, and just misses the second.
    """
    for window in (1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 511, 1024):
        lengths = [n for n in (window - 1, window, window + 1, 2 * window) if n]
        rows = [(min(40, n), n) for n in lengths]
        for spike in (1000 - window, 999 - window):
            batch = make([(200, 1100), *rows], kind, window=window, spike=spike)
            batch.check(batch.run())


@both_kernels
@pytest.mark.parametrize(
    ("kind", "window"), [(KINDS[1], None), (KINDS[4], 100)], ids=["no window", "window"]
)
def test_left_padding(kind: dict[str, Any], window: int | None) -> None:
    """That ends inside a page, with one, inside the queries (which then see nothing), or never."""
    rows = [(12, 35), (200, 700), (200, 700), (150, 150), (1, 129), (300, 1000), (64, 64), (9, 900)]
    for starts in ([0, 3, 128, 7, 128, 800, 64, 0], [16, 499, 520, 149, 0, 1, 1, 895]):
        batch = make(rows, kind, starts=starts, window=window)
        batch.check(batch.run())


@both_kernels
@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=name_of)
def test_both_ends_in_one_page(kind: dict[str, Any]) -> None:
    """Lines on both sides are nobody's; each consumer clears both, whatever the other is doing."""
    rng = random.Random(0)
    rows, starts = [], []
    for _ in range(400):
        start = rng.randrange(1, kind["page_size"] - 2)
        length = rng.randrange(start + 1, kind["page_size"])
        rows.append((min(40, length), length))
        starts.append(start)
    batch = make(rows, kind, starts=starts)
    first, _ = batch.run()
    batch.check(batch.run())
    for _ in range(20):
        again, _ = batch.run()
        assert torch.equal(again, first)


@both_kernels
@pytest.mark.parametrize("window", [None, 300])
def test_tiles_without_a_mask_are_those_that_all_queries_see(window: int | None) -> None:
    """However the queries and the window lie to the tiles."""
    batch = make([(3, length) for length in range(380, 515)], KINDS[1], window=window)
    batch.check(batch.run())


@both_kernels
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("length", [497, 512, 513, 5000, 2**31 - 1])
def test_a_row_longer_than_its_pages_gives_nan(length: int, window: int | None) -> None:
    """And reads none: behind its own in the table are another row's, and in the end nobody's."""
    batch = make([(40, 300), (200, 450), (140, 490)], KINDS[1], window=window, spare=0)
    assert batch.page_table.shape[1] * 16 == 496
    want, want_lse = batch.run()
    batch.seq_lens[1] = length
    out, lse = batch.run()
    assert bool(out[40:240].isnan().all() and lse[40:240].isnan().all())
    for others in (slice(40), slice(240, None)):
        assert torch.equal(out[others], want[others])
        assert torch.equal(lse[others], want_lse[others])


@both_kernels
def test_queries_and_outputs_that_lie_in_wider_tensors() -> None:
    """Slices of a fused projection, at addresses that no vector load takes."""
    batch = make(ROWS, KINDS[0], spare=0)
    num_tokens, num_heads, dim = batch.query.shape
    wide = torch.zeros(num_tokens, 3 * num_heads, dim + 3, dtype=FP16, device="cuda")
    query, out = wide[:, 1:, 1:][:, :num_heads, :dim], wide[:, 20:, 2:][:, :num_heads, :dim]
    query.copy_(batch.query)
    want, _ = batch.run()
    prefill.attend_prefill(
        *(query, batch.key_pages, batch.value_pages, batch.page_table),
        *(batch.seq_lens, batch.cu_query_lens, out),
        scale=batch.scale,
    )
    assert torch.equal(out, want)
    out.zero_()
    query.zero_()
    assert not wide.any()


@both_kernels
def test_many_rows_of_which_few_are_served() -> None:
    rows = [(1, 50 + row) for row in range(300)]
    rows[7], rows[150], rows[299] = (500, 800), (2, 30), (90, 90)
    batch = make(rows, KINDS[0])
    batch.check(batch.run(min_query_len=2), min_query_len=2)


@both_kernels
def test_lengths_change_under_a_captured_graph() -> None:
    """No recapture, and not one synchronisation with the host."""
    batch = make([(300, 2000), (200, 3000), (1, 1), (11, 500)], KINDS[1], spare=0)
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


@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_elastic(torch.device("cuda", 0))),
    reason="no virtual memory management here",
)
@both_kernels
def test_pages_past_every_power_of_two_that_a_number_could_overflow_at() -> None:
    """And all other pages without memory behind them: to read one of those is a fault.

    The last test here: after a fault nothing more runs on the device in this process.
    """
    batch = make([(100, 150), (16, 16)], KINDS[1])
    want = batch.want()
    _, num_kv_heads, page_size, dim = batch.key_pages.shape
    elements = num_kv_heads * page_size * dim  # of K in a page; as many of V
    page_bytes = 2 * 2 * elements
    edges = [2**31 // page_bytes, 2**32 // page_bytes, 2**32 // (2 * elements)]
    ids = [edge + step for edge in edges for step in (-2, -1, 0, 1)][: len(batch.key_pages) - 1]
    memory = VirtualMemoryStore((ids[-1] + 2) * page_bytes, torch.device("cuda", 0))
    for page in (0, *ids):
        memory.map(page * page_bytes, (page + 1) * page_bytes)
    far = memory.tensor(BF16).view(-1, 2, num_kv_heads, page_size, dim)
    new = torch.tensor([0, *ids], device="cuda")
    for old, page in enumerate(new.tolist()):
        far[page, 0], far[page, 1] = batch.key_pages[old], batch.value_pages[old]
    batch.page_table = new[batch.page_table.long()].int()
    batch.page_table[1, 1:] = ids[0] // 2  # past the row's end, and without memory
    batch.key_pages, batch.value_pages = far[:, 0], far[:, 1]
    batch.want = lambda: want
    batch.check(batch.run())
    torch.cuda.synchronize()
    memory.close()
