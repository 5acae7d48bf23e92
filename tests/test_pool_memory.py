"""The bytes that 32 growing sequences take, as the system says; GPT-2's geometry, real sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pageforge import KVGeometry, PagePool, ops
from pageforge.batch import SequenceBatch
from pageforge.store import cpu

LAYERS, HEADS, DIM, ROWS, PROMPT, PAGE = 12, 12, 64, 32, 13, 16
MIB = 1 << 20

MEGABYTES = {0: 18.87, 10: 37.75, 25: 56.62, 50: 75.50, 100: 150.99}
"""Step -> what the pages of 13 + step tokens in each of 32 sequences take."""


def gpt2_pool(device: str = "cpu") -> PagePool:
    return PagePool(
        KVGeometry.uniform(LAYERS, HEADS, DIM, dtype="float16", page_size=PAGE, device=device)
    )


def grow_and_release(pool: PagePool, mapped: Callable[[], int]) -> dict[int, int]:
    """Write K/V token by token as a cache does; the bytes mapped at each step of MEGABYTES.

    Checks what it wrote at the end, and the bytes after release and trim.
    """
    batch = SequenceBatch(pool, [0] * ROWS)
    device = pool.pages(0).device
    written: list[Tensor] = []
    sizes = {}
    for step in range(max(MEGABYTES) + 1):
        tokens = 1 if step else PROMPT
        start = batch.length
        batch.append(tokens)
        slots = batch.slot_mapping(0, start, start + tokens)
        states = torch.randn(ROWS * tokens, HEADS, DIM, device=device, dtype=torch.float16)
        pool.use_stream(device)
        for layer in range(LAYERS):
            _, key_pages, value_pages = pool.layer(layer)
            ops.write_kv(states + layer, -states, key_pages, value_pages, slots)
        written.append(states.view(ROWS, tokens, HEADS, DIM))
        if step in MEGABYTES:
            sizes[step] = mapped()

    want = torch.cat(written, 1).transpose(1, 2)
    for layer in range(LAYERS):
        _, key_pages, value_pages = pool.layer(layer)
        table, first = batch.page_table(0, 0, batch.length)
        key, value = ops.gather_kv(key_pages, value_pages, table)
        assert first == 0
        assert torch.equal(key[:, :, : batch.length], want + layer)
        assert torch.equal(value[:, :, : batch.length], -want)
    assert pool.stats().bytes_in_use == ROWS * 8 * pool.stats().groups[0].bytes_per_page

    batch.release()
    if device.type == "cuda":
        torch.cuda.synchronize()  # memory goes back behind the last kernel
    assert pool.stats().pages_used == 0
    assert mapped() <= 32 * MIB
    pool.trim()
    assert mapped() <= 32 * MIB
    assert mapped() <= 4 * MIB  # chunk 0, and the huge page at its edge
    return sizes


def assert_sizes(sizes: dict[int, int]) -> None:
    for step, megabytes in MEGABYTES.items():
        assert abs(sizes[step] - megabytes * 1e6) <= max(0.05 * megabytes * 1e6, 4 * MIB), sizes


@pytest.mark.skipif(not cpu.supported(), reason="an ordinary allocation stays as it is")
def test_memory_follows_32_growing_sequences() -> None:
    pool = gpt2_pool()
    assert pool.stats().bytes_mapped <= 2 * MIB
    assert_sizes(grow_and_release(pool, lambda: pool.stats().bytes_mapped))


@pytest.mark.skipif(not cpu.supported(), reason="an ordinary allocation stays as it is")
def test_a_second_batch_reuses_the_memory_of_the_first() -> None:
    pool = gpt2_pool()
    first = grow_and_release(pool, lambda: pool.stats().bytes_mapped)
    second = grow_and_release(pool, lambda: pool.stats().bytes_mapped)
    assert_sizes(second)
    assert abs(second[100] - first[100]) <= 4 * MIB
