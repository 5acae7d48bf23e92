"""The cache's ops on a GPU: against the reference, without a wait, in graphs, past 32 bits."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.gpu.capture import captured
from tests.ops.cache_cases import (
    LAYOUTS,
    SHAPES,
    SPARSE_SHAPE,
    bits,
    nan_pages,
    random_pages,
    random_slots,
    random_states,
)
from tests.ops.test_copy import SIZES, check_copy
from tests.ops.test_gather import check_gather
from tests.ops.test_swap import ID_LISTS, check_round_trip
from tests.ops.test_write import check_write
from tests.ops.test_write_and_gather import check as check_write_and_gather

from pageforge import ops
from pageforge.errors import PageForgeError, ShapeError
from pageforge.ops import copy, products, reference, swap

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KIB = 1024
LONG = 500_000_000  # clock cycles: a quarter of a second


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Fails where the host waits for the device, which is busy for long."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "the host waited, or the device was too fast"
    torch.cuda.synchronize()


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_write(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 3, 64, 1000):
        check_write(ops.write_kv, shape, dtype, num_tokens, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_from_any_strides(layout: str, dtype: torch.dtype) -> None:
    for shape in ((8, 3, 40, 24), (16, 8, 128, 128), (16, 1, 576, 512)):
        for num_tokens in (1, 9, 300):
            check_write(ops.write_kv, shape, dtype, num_tokens, layout, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states_dtype", DTYPES)
def test_write_casts(dtype: torch.dtype, states_dtype: torch.dtype) -> None:
    shape = (16, 2, 80, 64)
    check_write(ops.write_kv, shape, dtype, 50, device="cuda", states_dtype=states_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for size in ((1, 1), (2, 0), (0, 2), (3, 2), (9, 33)):
        check_gather(ops.gather_kv, shape, dtype, size, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_write_and_gather(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Launches that are prepared once, for layers of any layout."""
    size = shape[0]
    for new in (range(2 * size, 2 * size + 1), range(3 * size - 1, 3 * size)):
        for layout in LAYOUTS:
            check_write_and_gather(
                ops.write_and_gather, shape, dtype, new, oldest=5, device="cuda", layout=layout
            )
    several = range(2 * size - 3, 2 * size + 4)
    for states_dtype in DTYPES:
        check_write_and_gather(
            ops.write_and_gather, shape, dtype, several, device="cuda", states_dtype=states_dtype
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [*SIZES, 786_432])
@pytest.mark.parametrize("ids_device", ["cpu", "cuda"])
def test_copy(elements: int, dtype: torch.dtype, ids_device: str) -> None:
    for num_pairs in (0, 1, 5, 64):
        check_copy(ops.copy_pages, elements, dtype, num_pairs, "cuda", ids_device)


@pytest.mark.parametrize("ids", ID_LISTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swap(ids: list[int], dtype: torch.dtype) -> None:
    for elements in (1, 40, 9000, 1 << 20, 3_000_000):  # from 3,000,000 on page by page
        check_round_trip(ops.swap_out, ops.swap_in, elements, dtype, ids, "cuda")


@pytest.mark.parametrize("page_bytes", [4 * KIB, 36 * KIB, 384 * KIB, 1024 * KIB])
@pytest.mark.parametrize("order", ["in a row", "shuffled"])
def test_swap_of_hundreds_of_pages(page_bytes: int, order: str) -> None:
    ids = torch.arange(1, 301)
    if order == "shuffled":
        ids = ids[torch.randperm(300)]
    check_round_trip(
        ops.swap_out, ops.swap_in, page_bytes // 2, torch.bfloat16, ids.tolist(), "cuda"
    )


def test_swap_on_a_stream_of_its_own() -> None:
    pages = torch.randn(301, 4096, device="cuda")
    want = pages.clone()
    host = torch.empty(300, 4096, pin_memory=True)
    ids = torch.randperm(300) + 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 10)
        ops.swap_out(pages, ids, host)
        out = side.record_event()
        pages.zero_()
        ops.swap_in(host, pages, ids)
    out.synchronize()
    assert torch.equal(host, want[ids].cpu())
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(pages[1:], want[1:])


def test_swap_needs_pinned_memory() -> None:
    pages, ids, host = torch.randn(4, 8, device="cuda"), torch.tensor([1, 2]), torch.zeros(2, 8)
    for call in (
        lambda: ops.swap_out(pages, ids, host),
        lambda: ops.swap_in(host, pages, ids),
    ):
        with pytest.raises(ShapeError, match="host: expected pinned memory, got pageable"):
            call()
    assert not host.any()


def test_without_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    for module in (copy, swap):
        monkeypatch.setattr(module, "ids_on_device", fail)
    check_copy(ops.copy_pages, 4096, torch.float16, 20, "cuda")
    check_round_trip(ops.swap_out, ops.swap_in, 4096, torch.float16, [4, 5, 6, 1, 2, 9, 7], "cuda")


def test_tensors_on_different_devices_are_refused() -> None:
    pages = nan_pages(3, (8, 2, 16, 16), torch.float16, "cuda")
    before = pages.clone()
    states = torch.zeros(1, 2, 16, dtype=torch.float16, device="cuda")
    slots = torch.tensor([9], device="cuda")
    for args in ((states.cpu(), states, slots), (states, states, slots.cpu())):
        with pytest.raises(ShapeError, match="expected cuda:0, got cpu"):
            ops.write_kv(*args[:2], pages.key, pages.value, args[2])
    with pytest.raises(ShapeError, match="page_table: expected cuda:0, got cpu"):
        ops.gather_kv(pages.key, pages.value, torch.ones(1, 1, dtype=torch.int32))
    assert torch.equal(bits(pages.all), bits(before.all))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    check_write(ops.write_kv, (16, 2, 64, 64), torch.float16, 50, device="cuda:1")
    check_gather(ops.gather_kv, (16, 2, 64, 64), torch.float16, (2, 3), "cuda:1")
    check_write_and_gather(
        ops.write_and_gather, (16, 2, 64, 64), torch.float16, range(40, 41), device="cuda:1"
    )
    check_copy(ops.copy_pages, 4096, torch.float16, 5, "cuda:1")
    pages = torch.randn(40, 4096, device="cuda:1")
    host, ids = torch.empty(30, 4096, pin_memory=True), torch.randperm(30) + 1
    ops.swap_out(pages, ids, host)
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(host, pages[ids.to("cuda:1")].cpu())


# --- no wait, and graphs --------------------------------------------------------------------------


def test_the_host_waits_for_nothing() -> None:
    pages = random_pages(40, (16, 2, 64, 64), torch.float16, "cuda")
    key, value = (random_states(64, 2, 64, "heads first", pages.key) for _ in range(2))
    newest = [states[:3].unsqueeze(2) for states in (key, value)]
    slots = random_slots(64, 40, 16, "cuda")
    table = torch.randint(0, 40, (3, 5), dtype=torch.int32, device="cuda")
    host = torch.empty(20, pages.all.shape[1], dtype=torch.float16, pin_memory=True)
    ids, others = torch.arange(1, 40, 2)[:20], torch.arange(2, 40, 2)[:19]
    on_device = [side.cuda() for side in (ids[:19], others)]

    def everything() -> None:
        ops.write_kv(key, value, pages.key, pages.value, slots)
        ops.gather_kv(pages.key, pages.value, table)
        both = ops.write_and_gather(pages.key, pages.value, table, 0, range(70, 71))
        both(*newest, pages.key, pages.value)
        ops.copy_pages(pages.all, ids[:19], others)
        ops.copy_pages(pages.all, *on_device)
        ops.swap_out(pages.all, ids, host)
        ops.swap_in(host, pages.all, ids)

    for _ in range(3):  # compiles the kernels, and torch has the memory that all need at once
        torch.cuda._sleep(LONG // 10)
        everything()
        torch.cuda.synchronize()
    with no_wait():
        everything()


def test_a_graph() -> None:
    """Write, gather and copy in one graph, replayed with other inputs in the same tensors."""
    pages = random_pages(40, (16, 2, 64, 80), torch.bfloat16, "cuda")
    key = torch.empty(7, 2, 64, dtype=torch.bfloat16, device="cuda")
    value = torch.empty(7, 2, 80, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((7,), -1, device="cuda")
    table = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    source, target = (torch.tensor([n, n + 2], device="cuda") for n in (1, 2))

    def step(write, gather, copy, pages):
        write(key, value, pages.key, pages.value, slots)
        copy(pages.all, source, target)
        return gather(pages.key, pages.value, table)

    args = (ops.write_kv, ops.gather_kv, ops.copy_pages)
    graph, got = captured(lambda: step(*args, pages))
    for _ in range(5):
        key.normal_()
        value.normal_()
        slots.copy_(random_slots(7, 40, 16))
        table.random_(0, 40)
        ids = torch.randperm(39)[:4] + 1
        source.copy_(ids[:2])
        target.copy_(ids[2:])
        want_pages = pages.clone()
        graph.replay()
        want = step(reference.write_kv, reference.gather_kv, reference.copy_pages, want_pages)
        assert torch.equal(bits(pages.all), bits(want_pages.all))
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(bits(mine), bits(theirs))


def test_write_and_gather_in_a_graph() -> None:
    """Of two layers, replayed with other new tokens and another page table."""
    pages = random_pages(20, (16, 2, 64, 80), torch.bfloat16, "cuda")
    states = [torch.empty(2, 2, 1, dim, dtype=torch.bfloat16, device="cuda") for dim in (64, 80)]
    table = torch.ones(2, 3, dtype=torch.int32, device="cuda")

    def step() -> list[torch.Tensor]:
        both = ops.write_and_gather(pages.key, pages.value, table, 3, range(40, 41))
        layers = [both(*states, pages.key, pages.value) for _ in range(2)]
        return [dense for layer in layers for dense in layer]

    graph, got = captured(step)
    for _ in range(3):
        for part in states:
            part.normal_()
        table.copy_((torch.randperm(19)[:6] + 1).view(2, 3))
        graph.replay()
        want = [part[:, :, 3:41] for part in reference.gather_kv(pages.key, pages.value, table)]
        for mine, theirs in zip(got, want * 2, strict=True):
            assert torch.equal(bits(mine), bits(theirs))
        for dense, part in zip(got, states * 2, strict=True):
            assert torch.equal(dense[:, :, -1:], part)


def test_a_graph_cannot_capture_ids_on_the_host() -> None:
    """Its replays would read pinned memory that has been given to others since."""
    pages = torch.randn(4, 64, device="cuda")
    before = pages.clone()
    source, target = torch.tensor([1]), torch.tensor([2])
    ops.copy_pages(pages, source, torch.tensor([3]))
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(PageForgeError, match="page ids: expected a tensor on cuda"),
        torch.cuda.graph(graph),
    ):
        ops.copy_pages(pages, source, target)
    torch.cuda.synchronize()
    assert torch.equal(pages[:3], before[:3])


def test_compiled_code_writes_to_the_callers_pages() -> None:
    """And makes no copy of the pool, of which the views of K and V are parts."""
    pages = random_pages(4000, (16, 8, 64, 64), torch.float16, "cuda")
    key, value = (random_states(5, 8, 64, "dense", pages.key) for _ in range(2))
    slots = random_slots(5, 4000, 16, "cuda")
    table = torch.randint(0, 40, (3, 5), dtype=torch.int32, device="cuda")

    def step(key, value, key_pages, value_pages, slots, table):
        ops.write_kv(key * 2, value, key_pages, value_pages, slots)
        return ops.gather_kv(key_pages, value_pages, table)

    want_pages = pages.clone()
    want = step(key, value, want_pages.key, want_pages.value, slots, table)
    compiled = torch.compile(step, fullgraph=True)
    pool_bytes = pages.all.numel() * 2
    assert pool_bytes > 200 << 20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = compiled(key, value, pages.key, pages.value, slots, table)
    assert torch.cuda.max_memory_allocated() - before < pool_bytes // 2
    assert torch.equal(bits(pages.all), bits(want_pages.all))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, products.MOST_ROWS, products.MOST_ROWS + 1])
def test_products_that_are_captured_side_by_side(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay waits for the input before it, and is over before what comes next."""
    waits, wait = [], torch.cuda.Stream.wait_stream
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_stream", lambda *streams: (waits.append(streams), wait(*streams))
    )
    input = torch.empty(rows, 512, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(size, 512, device="cuda").bfloat16() for size in (1024, 256, 256, 8192)]

    def step() -> list[torch.Tensor]:
        waits.clear()
        made = products.products(input * 2, weights)
        assert len(waits) in (0, 2 * (products.BRANCHES - 1))  # branches go off and come back
        return [each + 1 for each in made]

    input.normal_()
    graph, got = captured(step)
    assert bool(waits) == (rows <= products.MOST_ROWS)
    for _ in range(3):
        input.normal_()
        graph.replay()
        for one, weight in zip(got, weights, strict=True):
            torch.testing.assert_close(one, input * 2 @ weight.t() + 1, rtol=2e-2, atol=0.5)


# --- addresses ------------------------------------------------------------------------------------


def test_pages_past_every_limit_of_32_bits() -> None:
    page_bytes = 128 * KIB
    edges = [limit // page_bytes + step for limit in (2**31, 2**32, 2**33) for step in (-1, 0, 1)]
    num_pages = max(edges) + 2
    if torch.cuda.mem_get_info()[0] < num_pages * page_bytes * 2:
        pytest.skip("needs 18 GB of device memory")
    flat = torch.zeros(num_pages * page_bytes // 2, dtype=torch.float16, device="cuda")
    pages = nan_pages(num_pages, SPARSE_SHAPE, torch.float16, flat=flat)
    assert pages.all.shape[1] * 2 == page_bytes
    key, value = (torch.randn(len(edges), 1, 64, device="cuda").half() for _ in range(2))
    slots = torch.tensor([page * 256 + page % 251 for page in edges], device="cuda")
    ops.write_kv(key, value, pages.key, pages.value, slots)
    table = torch.tensor(edges, dtype=torch.int32, device="cuda")[:, None]
    dense = ops.gather_kv(pages.key, pages.value, table)
    for part, gathered, states in zip((pages.key, pages.value), dense, (key, value), strict=True):
        for row, page in enumerate(edges):
            assert torch.equal(part[page, :, page % 251], states[row])
            assert torch.equal(gathered[row], part[page])
            assert int(part[page].count_nonzero()) == int(states[row].count_nonzero())

    near = list(range(2, 2 + len(edges)))
    ops.copy_pages(pages.all, torch.tensor(edges), torch.tensor(near))
    for page, copied in zip(edges, near, strict=True):
        assert torch.equal(pages.all[copied], pages.all[page])
    host = torch.empty(len(edges), pages.all.shape[1], dtype=torch.float16, pin_memory=True)
    ops.swap_out(pages.all, torch.tensor(edges), host)
    others = torch.tensor([page - 10 for page in edges])
    ops.swap_in(host, pages.all, others)
    for page in edges:
        assert torch.equal(pages.all[page - 10], pages.all[page])
    owned = {*edges, *near, *others.tolist()}
    touched = pages.all.count_nonzero(dim=1).nonzero().flatten().tolist()
    assert set(touched) == owned  # nothing landed anywhere else


def test_nothing_reads_or_writes_where_no_memory_is() -> None:
    """In a pool that maps only what is claimed a stray access ends the process."""
    script = """
import torch
from pageforge import KVGeometry, PagePool, ops
geometry = KVGeometry.uniform(2, 8, 128, dtype="bfloat16", page_size=256, device="cuda")
pool = PagePool(geometry, max_memory="8GiB")
table = pool.new_table()
pool.append([table], 700)
assert pool.stats().bytes_mapped < 64 << 20
_, key_pages, value_pages = pool.layer(1)
states = torch.randn(701, 8, 128, dtype=torch.bfloat16, device="cuda")
slots = [*table.slots(0, 700, 0), -1]
slots = torch.tensor(slots, device="cuda")
ops.write_kv(states, -states, key_pages, value_pages, slots)
rows = torch.tensor([table.pages() + [0, 0]], dtype=torch.int32, device="cuda")
key, value = ops.gather_kv(key_pages, value_pages, rows)
host = torch.empty(3, pool.pages(0).shape[1], dtype=torch.bfloat16, pin_memory=True)
ops.swap_out(pool.pages(0), torch.tensor(table.pages()), host)
ops.swap_in(host, pool.pages(0), torch.tensor(table.pages()))
torch.cuda.synchronize()
assert torch.equal(key[0, :, :700].transpose(0, 1), states[:700])
assert torch.equal(value[0, :, :700].transpose(0, 1), -states[:700])
assert not key[0, :, 768:].any()
print("all is well")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=300, capture_output=True, text=True, check=False
    )
    assert "all is well" in done.stdout, done.stderr
