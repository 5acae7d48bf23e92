"""The pool on a CUDA device: what the driver says, streams, graphs, a device that runs full.

Run by hand, in one process: `pytest -o addopts="" --import-mode=importlib -m gpu tests/gpu`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.gpu.capture import captured
from tests.store.pool_model import STEPS, PoolModel, random_steps, two_groups
from tests.test_pool_memory import MIB, assert_sizes, gpt2_pool, grow_and_release
from torch import Tensor

from pageforge import KVGeometry, LayerShape, PagePool, PageTable, ops
from pageforge.errors import OutOfPages
from pageforge.store import DeviceMemoryError, VirtualMemoryStore, backend_of

pytestmark = pytest.mark.gpu

PAGE = 589_824  # bytes of a page of GPT-2 in fp16, 16 tokens
GRANULE = 2 * MIB
WATERMARK = 32 * MIB
CUDA = torch.device("cuda", 0)
SECOND = 2_000_000_000  # clock cycles: about a second


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Kernels are loaded, and torch keeps no memory, before and after."""
    pool = gpt2_pool("cuda")
    (table,) = claim(pool, 4)
    pages = region(pool, table)
    pages.fill_(1)
    torch.aminmax(pages)
    pool.close()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def make_pool(max_memory: str | int = "8GiB") -> PagePool:
    geometry = KVGeometry.uniform(12, 12, 64, dtype="float16", page_size=16, device="cuda")
    pool = PagePool(geometry, max_memory=max_memory)
    assert isinstance(pool._groups[0].store, VirtualMemoryStore)
    return pool


def claim(pool: PagePool, pages: int, tables: int = 1) -> list[PageTable]:
    made = [pool.new_table() for _ in range(tables)]
    pool.append(made, pages * 16)
    return made


def region(pool: PagePool, table: PageTable) -> Tensor:
    """The pages of a table that has them in a row."""
    ids = table.pages()
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    return pool.pages(0)[ids[0] : ids[-1] + 1]


def not_torchs(device: int = 0) -> int:
    """Bytes of the device that somebody else than torch's allocator has, as the driver says."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def touched_granules(pool: PagePool, index: int = 0) -> int:
    """Bytes of the granules that the group's open chunks touch."""
    group = pool._groups[index]
    granules = set()
    for chunk in group.allocator.open_chunks():
        start, stop = group.chunk_bytes(chunk)
        granules |= set(range(start // GRANULE, -(-stop // GRANULE)))
    return len(granules) * GRANULE


class Reader:
    """A kernel on a stream of its own that is still to read some memory, after a long wait."""

    def __init__(self, pool: PagePool, memory: Tensor, cycles: int = SECOND):
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            pool.use_stream(CUDA)
            torch.aminmax(memory)  # so that the next one needs no new memory
            self.stream.synchronize()
            pool.use_stream(CUDA)
            torch.cuda._sleep(cycles)
            self.seen = torch.aminmax(memory)

    def running(self) -> bool:
        return not self.stream.query()

    def extremes(self) -> tuple[float, float]:
        self.stream.synchronize()
        return float(self.seen.min), float(self.seen.max)


# --- elastic memory ---------------------------------------------------------------------------


def test_the_backend() -> None:
    assert backend_of(torch.device("cuda")) == backend_of(CUDA) == VirtualMemoryStore.name


def test_the_driver_sees_memory_come_and_go() -> None:
    before = not_torchs()
    pool = make_pool("64GiB")
    assert pool.stats().bytes_mapped == touched_granules(pool) == GRANULE
    assert not_torchs() - before <= 8 * MIB  # 64 GiB of addresses, and one granule
    tables: list[PageTable] = []
    for _ in range(4):
        tables += claim(pool, (1 << 30) // PAGE)
        stats = pool.stats()
        assert stats.bytes_mapped == touched_granules(pool)
        assert stats.bytes_in_use <= stats.bytes_mapped <= stats.bytes_in_use * 33 / 32 + 4 * MIB
        assert abs(not_torchs() - before - stats.bytes_mapped) <= 32 * MIB
    region(pool, tables[0]).fill_(1)
    torch.cuda.synchronize()
    pool.release(tables[1:])
    torch.cuda.synchronize()
    stats = pool.stats()
    assert stats.bytes_mapped == touched_granules(pool)
    assert stats.bytes_mapped <= stats.bytes_in_use * 33 / 32 + WATERMARK + 4 * MIB
    assert abs(not_torchs() - before - stats.bytes_mapped) <= 32 * MIB
    assert float(region(pool, tables[0]).min()) == 1
    pool.release(tables)
    torch.cuda.synchronize()
    assert pool.stats().bytes_mapped <= WATERMARK
    pool.trim()
    assert pool.stats().bytes_mapped == GRANULE
    pool.close()
    assert abs(not_torchs() - before) <= 8 * MIB


def test_memory_follows_32_growing_sequences() -> None:
    pool = gpt2_pool("cuda")
    grow_and_release(pool, lambda: pool.stats().bytes_mapped)  # loads all kernels
    before = not_torchs() - pool.stats().bytes_mapped
    differences = []

    def mapped() -> int:
        bytes_mapped = pool.stats().bytes_mapped
        differences.append(not_torchs() - before - bytes_mapped)
        torch.cuda.synchronize()
        return pool.stats().bytes_mapped

    assert_sizes(grow_and_release(pool, mapped))
    assert max(map(abs, differences)) <= 16 * MIB, differences  # what the driver says beside it


def test_random_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool._shrink, "__defaults__", (4 * GRANULE, None))
    for seed in range(3):
        geometry = two_groups("cuda", scale=512)  # pages of 640 and 320 KiB
        pool = PagePool(geometry, max_memory=40 * 655_360)
        model = PoolModel(pool, most=8)

        def after(pool: PagePool = pool) -> None:
            stats = pool.stats()
            for index, group in enumerate(stats.groups):
                assert group.bytes_mapped >= touched_granules(pool, index)

        model.run(random_steps(random.Random(seed), 200), after)
        assert model.outs
        model.end()
        pool.drop_prefix_cache()
        pool.trim()
        assert pool.stats().pages_used == 0
        assert pool.stats().bytes_mapped == 2 * GRANULE
        pool.close()


def test_page_0_is_zero_whatever_lay_there() -> None:
    """Padding in page tables leads to it."""
    pool = make_pool()
    claim(pool, 100)
    pool.pages(0)[:100].fill_(float("nan"))
    pool.close()
    again = make_pool()
    assert int(again.pages(0)[0].count_nonzero()) == 0


def test_more_addresses_than_there_are() -> None:
    with pytest.raises(DeviceMemoryError, match="cuMemAddressReserve"):
        VirtualMemoryStore(1 << 60, CUDA)
    claim(make_pool(), 10)


def test_page_ids_past_every_limit_of_32_bits() -> None:
    """Ids whose offsets straddle 2^31 and 2^32, in bytes and in elements; all else stays NaN."""
    shape = LayerShape(8, 128, 128, "float16", device="cuda")
    pool = PagePool(KVGeometry.of_layers({0: shape, 1: shape}, 256), max_pages=4200)  # 2 MiB each
    elements = pool.pages(0).shape[1]
    assert elements * 2 == 2 * MIB
    table = pool.new_table()
    pool.append([table], 4200 * 256)
    assert sorted(table.pages()) == list(range(1, 4201))
    pool.use_stream(CUDA)
    pool.pages(0).fill_(float("nan"))
    edges = [limit // (2 * elements) for limit in (2**31, 2**32, 2**33)]
    ids = sorted({1, 4200} | {edge + d for edge in edges for d in (-1, 0, 1)})
    slots = torch.tensor([page * 256 + page % 256 for page in ids], device="cuda")
    for layer in range(2):
        _, key_pages, value_pages = pool.layer(layer)
        key, value = (torch.randn(len(ids), 8, 128, device="cuda").half() for _ in range(2))
        ops.write_kv(key, value, key_pages, value_pages, slots)
        rows = torch.tensor(ids, dtype=torch.int32, device="cuda")[:, None]
        dense = ops.gather_kv(key_pages, value_pages, rows)
        for got, want in zip(dense, (key, value), strict=True):
            for row, page in enumerate(ids):
                assert torch.equal(got[row, :, page % 256], want[row])
                assert int((~got[row].isnan()).sum()) == want[row].numel()
    written = sum(int((~pool.pages(0)[page].isnan()).sum()) for page in range(4201))
    assert written == len(ids) * 2 * 2 * 8 * 128
    targets = range(100, 100 + len(ids))
    source, target = (torch.tensor(side, device="cuda") for side in (ids, targets))
    ops.copy_pages(pool.pages(0), source, target)
    for page, copied in zip(ids, targets, strict=True):
        want = pool.pages(0)[page].view(torch.int16)
        assert torch.equal(pool.pages(0)[copied].view(torch.int16), want)
    pool.close()


# --- kernels that still read ------------------------------------------------------------------


def test_memory_is_not_unmapped_under_a_running_kernel() -> None:
    pool = make_pool()
    (table,) = claim(pool, 400)
    memory = region(pool, table)
    memory.fill_(1)
    mapped = pool.stats().bytes_mapped
    reader = Reader(pool, memory)
    pool.release([table])
    assert pool.stats().bytes_mapped == mapped
    assert reader.running(), "the kernel ended too early for this test to mean anything"
    assert reader.extremes() == (1, 1)
    assert pool.stats().bytes_mapped <= WATERMARK
    torch.cuda.synchronize()  # an access to unmapped memory would show here


def test_trim_waits_for_a_running_kernel() -> None:
    pool = make_pool()
    (table,) = claim(pool, 400)
    memory = region(pool, table)
    memory.fill_(1)
    reader = Reader(pool, memory)
    pool.release([table])
    assert reader.running()
    pool.trim()
    assert not reader.running()
    assert pool.stats().bytes_mapped == GRANULE
    assert reader.extremes() == (1, 1)


def test_a_reopened_chunk_is_not_unmapped_later() -> None:
    """Closed, still behind a kernel, and needed again: its next tokens are not lost."""
    pool = make_pool()
    (table,) = claim(pool, 400)
    memory = region(pool, table)
    memory.fill_(1)
    mapped = pool.stats().bytes_mapped
    reader = Reader(pool, memory)
    pool.release([table])
    (again,) = claim(pool, 400)
    assert reader.running()
    assert sorted(again.pages()) == sorted(range(1, 401))
    assert pool.stats().bytes_mapped == mapped
    pool.use_stream(CUDA)
    memory.fill_(2)  # ordered after the reader, though on another stream
    assert reader.extremes() == (1, 1)
    pool.trim()
    torch.cuda.synchronize()
    assert pool.stats().bytes_mapped == touched_granules(pool) == mapped
    assert [float(x) for x in torch.aminmax(memory)] == [2, 2]


def test_pages_that_change_hands_between_streams() -> None:
    """The other stream had its turn before the reader was launched, and must wait all the same."""
    pool = make_pool()
    (table,) = claim(pool, 40)  # less than the watermark: nothing is unmapped
    memory = region(pool, table)
    memory.fill_(1)
    reader = Reader(pool, memory, cycles=1)
    reader.stream.synchronize()
    writer = torch.cuda.Stream()
    with torch.cuda.stream(writer):
        pool.use_stream(CUDA)  # the writer's turn
    with torch.cuda.stream(reader.stream):
        torch.cuda._sleep(SECOND)  # launched without asking again, as the rest of a forward is
        reader.seen = torch.aminmax(memory)
    pool.release([table])
    (again,) = claim(pool, 40)
    assert set(again.pages()) == set(range(1, 41))
    with torch.cuda.stream(writer):
        pool.use_stream(CUDA)
        memory.fill_(2)
    assert reader.running()
    assert reader.extremes() == (1, 1)
    writer.synchronize()
    assert [float(x) for x in torch.aminmax(memory)] == [2, 2]


def test_close_waits_for_running_kernels() -> None:
    before = not_torchs()
    pool = make_pool()
    (table,) = claim(pool, 400)
    memory = region(pool, table)
    memory.fill_(1)
    reader = Reader(pool, memory)
    assert reader.running()
    del memory
    pool.close()
    assert reader.extremes() == (1, 1)
    pool.release([table])
    assert abs(not_torchs() - before) <= 8 * MIB


# --- a device that runs full --------------------------------------------------------------------


def fill_device(leave: int) -> Tensor:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - leave, dtype=torch.uint8, device="cuda")


def test_a_full_device_gives_out_of_pages_and_the_process_lives_on() -> None:
    pool = make_pool("16GiB")
    (table,) = claim(pool, 100)
    region(pool, table).fill_(3)
    hog = fill_device(leave=512 * MIB)
    mapped, used = pool.stats().bytes_mapped, pool.stats().pages_used
    with pytest.raises(OutOfPages, match=r"no memory left to map \(cuMem.*_OUT_OF_MEMORY"):
        pool.append([table], 4000 * 16)
    torch.cuda.synchronize()
    stats = pool.stats()
    assert stats.pages_used == used and stats.bytes_mapped <= mapped + GRANULE
    pool.check_invariants([table])
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
    assert [float(x) for x in torch.aminmax(region(pool, table))] == [3, 3]
    pool.append([table], 100 * 16)  # what still fits is still to be had

    del hog  # torch keeps this memory for later tensors, until it is asked for it
    assert torch.cuda.memory_reserved() > 8 << 30
    pool.append([table], 4000 * 16)
    assert torch.cuda.memory_reserved() < 1 << 30
    pages = pool.pages(0)[torch.tensor(table.pages()[:100], device="cuda")]
    assert [float(x) for x in torch.aminmax(pages)] == [3, 3]


def test_cached_pages_give_way_on_a_full_device() -> None:
    pool = make_pool("16GiB")
    (kept,) = claim(pool, 400)
    pool._groups[0].prefix.publish(range(kept.length), kept.pages())
    pool.release([kept])
    hog = fill_device(leave=64 * MIB)
    assert pool.stats().pages_cached == 400
    (table,) = claim(pool, 450)
    assert 0 < pool.stats().pages_cached < 150  # 64 MiB are about 110 pages
    pool.pages(0)[torch.tensor(table.pages(), device="cuda")] = 1
    torch.cuda.synchronize()
    pool.check_invariants([table])
    with pytest.raises(OutOfPages):
        pool.append([table], 1000 * 16)
    del hog


def test_two_pools_on_a_full_device() -> None:
    """Another pool's idle memory is not ours to take; it comes when that pool lets it go."""
    one, two = make_pool(), make_pool()
    hog = fill_device(leave=400 * MIB)
    first, second = claim(one, 300), claim(two, 16)  # 177 MB
    with pytest.raises(OutOfPages):
        two.append(second, 700 * 16)
    held = one.stats().bytes_mapped
    with pytest.raises(OutOfPages):
        two.append(second, 600 * 16)
    assert one.stats().bytes_mapped == held
    one.release(first)
    torch.cuda.synchronize()
    one.trim()
    two.append(second, 550 * 16)
    two.pages(0)[torch.tensor(second[0].pages(), device="cuda")] = 1
    torch.cuda.synchronize()
    one.close()
    two.close()
    del hog


def test_a_pool_can_be_made_when_torch_has_cached_everything() -> None:
    hogs = [fill_device(leave=64 * MIB)]
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            hogs.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    hogs.clear()
    assert torch.cuda.memory_reserved() > 8 << 30
    pool = make_pool()
    claim(pool, 100)
    assert torch.cuda.memory_reserved() < 1 << 30


def test_torch_may_run_out_beside_the_pool() -> None:
    pool = make_pool()
    (table,) = claim(pool, 100)
    region(pool, table).fill_(5)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    pool.append([table], 100 * 16)
    assert [float(x) for x in torch.aminmax(pool.pages(0)[1:101])] == [5, 5]


# --- graphs ------------------------------------------------------------------------------------


def test_a_graph_captured_before_growth_replays_after_it() -> None:
    """Write and gather in one graph; then the pool grows, and the same graph serves new pages."""
    pool = make_pool()
    (table,) = claim(pool, 2)
    _, key_pages, value_pages = pool.layer(5)
    page, offset = (torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2))
    rows = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    key, value = (torch.zeros(1, 12, 64, dtype=torch.float16, device="cuda") for _ in range(2))

    def step() -> tuple[Tensor, Tensor]:
        key_pages[page, :, offset] = key
        value_pages[page, :, offset] = value
        return ops.gather_kv(key_pages, value_pages, rows)

    def set_inputs(position: int, number: float) -> None:
        ids = table.pages()[position // 16 - 1 : position // 16 + 1]
        page.fill_(ids[-1])
        offset.fill_(position % 16)
        rows.copy_(torch.tensor([ids], dtype=torch.int32))
        key.fill_(number)
        value.fill_(-number)

    set_inputs(17, 1)
    graph, (dense_key, dense_value) = captured(step)

    for pages in (2, 2000):
        if pages > 2:
            mapped = pool.stats().bytes_mapped
            pool.append([table], (pages - 2) * 16)
            assert pool.stats().bytes_mapped > mapped + (1 << 30)
        for position in range(pages * 16 - 16, pages * 16):
            set_inputs(position, position % 1000)
            graph.replay()
            at = position % 16 + 16
            assert float(dense_key[0, 3, at, 7]) == position % 1000
            assert float(dense_value[0, 11, at, 63]) == -(position % 1000)
            want_key, want_value = ops.gather_kv(key_pages, value_pages, rows)
            for got, want in ((dense_key, want_key), (dense_value, want_value)):
                assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    del graph


# --- exports -------------------------------------------------------------------------------------


def test_exports_to_torch_and_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    pool = make_pool()
    (table,) = claim(pool, 10)
    memory = region(pool, table)
    memory.copy_(torch.randn_like(memory))
    ids = table.pages()
    view = pool.export_pages(ids[3], 2)
    assert view.shape == (2, 12, 2, 12, 16, 64)
    again = torch.from_dlpack(view)
    array = cupy.from_dlpack(view)
    assert view.data_ptr() == again.data_ptr() == array.data.ptr == memory[3].data_ptr()
    want = memory[3:5].cpu().numpy().reshape(array.shape)
    assert np.array_equal(cupy.asnumpy(array), want)
    corner = array[1, 11, 1]
    del view, again, array
    pool.release([table])
    pool.trim()
    gc.collect()
    assert pool.stats().pages_used == 2
    assert np.array_equal(cupy.asnumpy(corner), want[1, 11, 1])
    del corner
    gc.collect()
    assert pool.stats().pages_used == 0


def test_exports_outlive_close() -> None:
    before = not_torchs()
    pool = make_pool()
    (table,) = claim(pool, 10)
    region(pool, table).fill_(4)
    view = pool.export_pages(table.pages()[0])[0, 3:5]
    pool.close()
    pool.release([table])
    del pool, table
    gc.collect()
    assert [float(x) for x in torch.aminmax(view)] == [4, 4]
    del view
    gc.collect()
    assert abs(not_torchs() - before) <= 8 * MIB


def test_a_pool_that_is_dropped_gives_everything_back() -> None:
    before = not_torchs()
    pool = make_pool()
    claim(pool, 1000)
    assert not_torchs() - before > 500 * MIB
    del pool
    gc.collect()
    assert abs(not_torchs() - before) <= 8 * MIB


# --- threads, processes, devices ----------------------------------------------------------------


def test_a_new_thread_may_be_the_one_that_maps() -> None:
    """It has no CUDA context of its own yet."""
    pool = make_pool()
    tables: list[PageTable] = []
    thread = threading.Thread(target=lambda: tables.extend(claim(pool, 400)))
    thread.start()
    thread.join()
    region(pool, tables[0]).fill_(1)
    thread = threading.Thread(target=lambda: (pool.release(tables), pool.trim()))
    thread.start()
    thread.join()
    assert pool.stats().bytes_mapped == GRANULE


def test_a_pool_may_be_the_first_to_use_the_device() -> None:
    script = """
import torch
from pageforge import KVGeometry, PagePool
geometry = KVGeometry.uniform(12, 12, 64, dtype="float16", page_size=16, device="cuda")
pool = PagePool(geometry, max_pages=1000)
table = pool.new_table()
pool.append([table], 5000)
pool.pages(0)[table.pages()] = 1
assert pool.stats().bytes_mapped >= 313 * 589_824
pool.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_threads_with_streams_of_their_own() -> None:
    geometry = two_groups("cuda", scale=512)
    pool = PagePool(geometry, max_memory=120 * 655_360)
    prompt = PoolModel(pool, alone=False, first=1_000_000)
    prompt.new(0)
    prompt.append(prompt.sequences[0], 21)
    shared = prompt.sequences[0]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                rng = random.Random(seed)
                model = PoolModel(pool, most=5, alone=False, first=seed * 100_000)
                mine = set(STEPS) - {"publish", "reuse", "drop", "trim", "restore"}
                steps = [step for step in random_steps(rng, 150) if step[0] in mine]
                for number, step in enumerate(steps):
                    if number % 10 == 0 and len(model.sequences) < model.most:
                        model.take(pool.fork(shared.table), shared.tokens)
                    model.run([step])
                model.end()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            pool.trim()
            assert pool.stats().bytes_in_use <= pool.stats().bytes_total
            worker.join(0.01)  # a loop without a pause would keep the lock from the others
    if errors:
        raise errors[0]
    prompt.check_contents(shared)
    prompt.end()
    gc.collect()
    assert pool.stats().pages_used == 0
    pool.check_invariants([])


def test_layer_groups_on_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    before = [not_torchs(device) for device in range(2)]
    pool = PagePool(two_groups("cuda:0", "cuda:1", scale=512), max_memory=60 * 655_360)
    assert [str(group.device) for group in pool.stats().groups] == ["cuda:0", "cuda:1"]
    model = PoolModel(pool, most=8)
    model.run(random_steps(random.Random(0), 150))
    assert torch.cuda.current_device() == 0
    model.end()
    pool.drop_prefix_cache()
    pool.trim()
    assert pool.stats().bytes_mapped == 2 * GRANULE
    pool.close()
    torch.cuda.empty_cache()
    for device in range(2):
        assert abs(not_torchs(device) - before[device]) <= 64 * MIB
