from __future__ import annotations

import pytest
import torch
from tests.bench.conftest import CPU, TINY

from pageforge.bench.problems import (
    HEADS,
    SHAPES,
    Heads,
    PagedKV,
    Problem,
    Rotation,
    kv_bytes,
    zipf_lengths,
)
from pageforge.ops import reference


def problem(lengths: tuple[int, ...], cold_bytes: int = 20_000) -> Problem:
    return Problem(TINY, lengths, torch.float32, CPU, cold_bytes)


def test_bytes() -> None:
    rows, context = SHAPES["32x4k"]
    assert kv_bytes([context] * rows, HEADS[1], torch.bfloat16) == 32 * 4096 * 8 * 128 * 2 * 2
    assert problem((5, 7)).bytes == 12 * 2 * 16 * 2 * 4


def test_every_shape_is_read_cold() -> None:
    for heads in HEADS:
        for rows, context in SHAPES.values():
            one = Problem(heads, (context,) * rows, torch.float16, CPU)
            rotation = one.rotation
            assert rotation.sets * rotation.buffers * one.bytes >= 600e6
            assert rotation.sets * rotation.buffers >= 2
            assert rotation.calls == rotation.sets * heads.layers
            # No call reads what one of the calls just before has read.
            called = [(s, b) for s, buffers in rotation.steps() for b in buffers]
            apart = rotation.sets * rotation.buffers if rotation.sets > 1 else rotation.buffers
            assert all(len(set(called[i : i + apart])) == apart for i in range(len(called) - apart))


def test_few_layers_take_turns_where_they_are_large() -> None:
    rotation = Rotation.of(layer_bytes=400, layers=5, cold_bytes=600)
    assert list(rotation.steps()) == [(0, [0, 1, 0, 1, 0])]
    assert rotation.last_buffer == 0
    small = Rotation.of(layer_bytes=10, layers=4, cold_bytes=100)
    assert list(small.steps()) == [(n, [0, 1, 2, 3]) for n in range(3)]


def test_zipf_lengths() -> None:
    lengths = zipf_lengths(64, 260_000)
    assert lengths == zipf_lengths(64, 260_000)
    assert sum(lengths) == pytest.approx(260_000, rel=1e-3)
    longest = sorted(lengths, reverse=True)
    assert longest[0] / longest[9] == pytest.approx(10, rel=1e-2)
    assert lengths != longest


@pytest.mark.parametrize("page_size", [8, 16])
def test_pages_are_shuffled_and_each_held_once(page_size: int) -> None:
    one = problem((40, 1, 33))
    kv = PagedKV(one, page_size)
    held = [
        table[row, : -(-length // page_size)]
        for table in kv.page_tables
        for row, length in enumerate(one.lengths)
    ]
    ids = torch.cat(held)
    assert sorted(ids.tolist()) == list(range(1, kv.pool.shape[0]))
    assert all((table[1, 1:] == 0).all() for table in kv.page_tables)
    assert kv.pool[0].isnan().all()
    assert not kv.pool[1:].isnan().any()


def test_the_error_is_that_of_the_worst_checked_row() -> None:
    one = problem((40, 1, 33, 50, 2))
    kv = PagedKV(one, 8)
    assert one.checked == [0, 3, 4]
    arguments = (*kv.layer(0), kv.page_tables[0])
    bounds = torch.arange(6)
    out, _ = reference.attend(one.query, *arguments, one.seq_lens, bounds, scale=one.scale)
    assert one.error(out, *arguments) < 1e-5
    for row in one.checked:
        wrong = out.clone()
        wrong[row] *= 1.1
        assert one.error(wrong, *arguments) == pytest.approx(0.1, rel=1e-3)
        wrong[row] = torch.nan
        assert not one.error(wrong, *arguments) < 1


def test_heads_have_a_name() -> None:
    assert str(Heads(32, 8, 128, layers=32)) == "32/8 D128"
