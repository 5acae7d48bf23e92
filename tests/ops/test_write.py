"""write_kv: the kernel in Triton's interpreter and the op on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ops.cache_cases import (
    DTYPES,
    EDGES,
    LAYOUTS,
    SHAPES,
    bits,
    interpreted,
    nan_pages,
    needs_sparse_memory,
    random_slots,
    random_states,
    sparse_pages,
    wrapped,
)

from pageforge import ops
from pageforge.errors import ShapeError
from pageforge.ops import reference
from pageforge.ops.write import launch_write_kv

both_ways = pytest.mark.parametrize(
    "write", [pytest.param(launch_write_kv, marks=interpreted, id="kernel"), ops.write_kv]
)


def check_write(
    write: Callable[..., None],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    num_tokens: int,
    layout: str = "dense",
    device: str = "cpu",
    states_dtype: torch.dtype | None = None,
) -> None:
    """Every byte of the pool is what the reference leaves there: nothing else was written."""
    page_size, heads, key_dim, value_dim = shape
    num_pages = 3 + num_tokens // page_size
    pages = nan_pages(num_pages, shape, dtype, device)
    like = torch.empty(0, dtype=states_dtype or dtype, device=device)
    key = random_states(num_tokens, heads, key_dim, layout, like)
    value = random_states(num_tokens, heads, value_dim, layout, like)
    slots = random_slots(num_tokens, num_pages, page_size, device)
    want = pages.clone()
    reference.write_kv(key, value, want.key, want.value, slots)
    write(key, value, pages.key, pages.value, slots)
    assert torch.equal(bits(pages.all), bits(want.all))


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(write, shape, dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 70):
        check_write(write, shape, dtype, num_tokens)


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(write, layout: str) -> None:
    for shape in ((8, 3, 40, 24), (16, 2, 64, 64)):
        for num_tokens in (1, 9):
            check_write(write, shape, torch.float16, num_tokens, layout)


@both_ways
def test_skipped_rows_write_nothing(write) -> None:
    pages = nan_pages(4, (8, 2, 16, 16))
    before = pages.clone()
    states = torch.ones(3, 2, 16)
    write(states, states, pages.key, pages.value, torch.full((3,), -1))
    assert torch.equal(bits(pages.all), bits(before.all))


@both_ways
def test_what_skipped_rows_hold_goes_nowhere(write) -> None:
    pages = nan_pages(3, (8, 2, 16, 16))
    pages.all.zero_()
    states = torch.full((5, 2, 16), torch.nan)
    states[2] = 1
    write(states, states, pages.key, pages.value, torch.tensor([-1, -1, 11, -1, -1]))
    assert int((pages.all == 1).sum()) == 2 * 2 * 16
    assert int(pages.all.count_nonzero()) == 2 * 2 * 16


@both_ways
def test_other_dtypes_are_cast(write) -> None:
    for states_dtype in (torch.float32, torch.float64):
        check_write(write, (8, 2, 40, 16), torch.float16, 9, states_dtype=states_dtype)
    check_write(write, (8, 2, 40, 16), torch.float32, 9, states_dtype=torch.float16)


@needs_sparse_memory
@both_ways
def test_slots_past_every_limit_of_32_bits(write) -> None:
    with sparse_pages() as pages:
        key, value = (torch.randn(len(EDGES), 1, 64).half() for _ in range(2))
        slots = torch.tensor([page * 256 + page % 251 for page in EDGES])
        write(key, value, pages.key, pages.value, slots)
        for row, page in enumerate(EDGES):
            for part, states in ((pages.key, key), (pages.value, value)):
                assert torch.equal(part[page, :, page % 251], states[row])
        assert not pages.all[wrapped(EDGES)].any()


# --- the op ---------------------------------------------------------------------------------------


def arguments() -> list[torch.Tensor]:
    pages = nan_pages(3, (8, 2, 16, 4))
    pages.all.zero_()
    return [
        torch.randn(2, 2, 16),
        torch.randn(2, 2, 4),
        pages.key,
        pages.value,
        torch.tensor([9, 23]),
    ]


def test_what_torch_knows_of_it() -> None:
    torch.library.opcheck(torch.ops.pageforge.write_kv.default, arguments())


def test_compiled_code_writes_to_the_callers_pages() -> None:
    args = arguments()

    def step(key, value, key_pages, value_pages, slots):
        ops.write_kv(key * 2, value, key_pages, value_pages, slots)
        return key_pages[1, :, 1] + 1

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    key, value, key_pages, value_pages, _ = args
    assert torch.equal(key_pages[1, :, 1], key[0] * 2)
    assert torch.equal(value_pages[2, :, 7], value[1])
    assert torch.equal(got, key[0] * 2 + 1)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda key: key[:, :1], r"key: expected \[2, 2, 16\], got \[2, 1, 16\]"),
        (0, lambda key: key[..., :8], r"key: expected \[2, 2, 16\], got \[2, 2, 8\]"),
        (1, lambda value: value[:1], r"value: expected \[2, 2, 4\], got \[1, 2, 4\]"),
        (1, lambda value: value.long(), "value: expected a floating dtype, got torch.int64"),
        (2, lambda pages: pages[0], "key_pages, value_pages: expected .N, Hkv, P, dim."),
        (2, lambda pages: pages.half(), "value_pages: expected .*torch.float16"),
        (2, lambda pages: pages[:2], r"value_pages: expected \[2, 2, 8, any\]"),
        (3, lambda pages: pages[:, :1], r"value_pages: expected \[3, 2, 8, any\]"),
        (3, lambda pages: pages.mT.contiguous().mT, "value_pages: expected strides .any, 32, 4, 1"),
        (4, lambda slots: slots.int(), r"slot_mapping: expected \[T\] torch.int64, got .*int32"),
        (4, lambda slots: slots[:, None], r"slot_mapping: expected \[T\] torch.int64, got \[2, 1"),
        (4, lambda slots: slots[::2].expand(2), "slot_mapping: expected stride 1, got .0,."),
        (4, lambda slots: slots[:1], r"key: expected \[1, 2, 16\], got \[2, 2, 16\]"),
    ],
)
def test_wrong_arguments_are_refused(position: int, change, message: str) -> None:
    args = arguments()
    before = args[2].clone(), args[3].clone()
    changed = [*args]
    changed[position] = change(args[position])
    with pytest.raises(ShapeError, match=message):
        ops.write_kv(*changed)
    assert torch.equal(args[2], before[0]) and torch.equal(args[3], before[1])
