"""copy_pages: the kernel in Triton's interpreter and the op on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ops.cache_cases import (
    EDGES,
    bits,
    interpreted,
    needs_sparse_memory,
    sparse_pages,
    wrapped,
)
from torch import Tensor

from pageforge import ops
from pageforge.errors import PageError, ShapeError
from pageforge.ops import copy, reference
from pageforge.ops.copy import launch_copy_pages

both_ways = pytest.mark.parametrize(
    "copy_pages",
    [pytest.param(launch_copy_pages, marks=interpreted, id="kernel"), ops.copy_pages],
)

SIZES = [1, 7, 40, 1024, copy.TILE, copy.TILE + 8, 3 * copy.TILE - 5]  # elements


def check_copy(
    copy_pages: Callable[..., None],
    elements: int,
    dtype: torch.dtype,
    num_pairs: int,
    device: str = "cpu",
    ids_device: str = "cpu",
) -> None:
    """Every byte of the pool is what the reference leaves there."""
    pages = torch.randn(2 * num_pairs + 3, elements, device=device).to(dtype)
    pages[::3] = torch.nan
    ids = torch.randperm(2 * num_pairs + 2)[: 2 * num_pairs] + 1
    source, target = ids.to(ids_device).view(-1, 2).T  # strided, as a list of pairs makes it
    want = pages.clone()
    reference.copy_pages(want, source, target)
    copy_pages(pages, source, target)
    assert torch.equal(bits(pages), bits(want))


@both_ways
@pytest.mark.parametrize("elements", SIZES)
def test_any_size(copy_pages, elements: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for num_pairs in (0, 1, 5):
            check_copy(copy_pages, elements, dtype, num_pairs)


@needs_sparse_memory
@both_ways
def test_pages_past_every_limit_of_32_bits(copy_pages) -> None:
    with sparse_pages() as pages:
        for page in EDGES:
            pages.all[page] = page % 1000
        far, near = EDGES[3:], list(range(2, 2 + len(EDGES) - 3))
        copy_pages(pages.all, torch.tensor(far), torch.tensor(near))
        copy_pages(pages.all, torch.tensor(near), torch.tensor([page - 10 for page in far]))
        for page, copied in zip(far, near, strict=True):
            assert (pages.all[copied] == page % 1000).all()
            assert (pages.all[page - 10] == page % 1000).all()
        assert not pages.all[[page for page in wrapped(far) if page not in (*near, *EDGES)]].any()


@interpreted
def test_without_memory_for_the_ids_pages_are_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(copy, "ids_on_device", fail)
    check_copy(launch_copy_pages, 40, torch.float32, 4)


# --- the op ---------------------------------------------------------------------------------------


def arguments() -> list[Tensor]:
    return [torch.randn(6, 16), torch.tensor([1, 3]), torch.tensor([5, 2])]


def test_what_torch_knows_of_it() -> None:
    torch.library.opcheck(torch.ops.pageforge.copy_pages.default, arguments())


def test_compiled_code_writes_to_the_callers_pages() -> None:
    args = arguments()

    def step(pages, source, target):
        ops.copy_pages(pages, source, target)
        return pages[2] + 1

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    pages = args[0]
    assert torch.equal(pages[5], pages[1]) and torch.equal(pages[2], pages[3])
    assert torch.equal(got, pages[3] + 1)


@pytest.mark.parametrize(
    ("position", "change", "error", "message"),
    [
        (0, lambda pages: pages.view(6, 4, 4), ShapeError, "pages: expected .N, elements."),
        (0, lambda pages: pages[:, ::2], ShapeError, "pages: expected .N, elements., contiguous"),
        (1, lambda ids: ids.int(), ShapeError, r"source: expected \[C\] torch.int64, got .*int32"),
        (2, lambda ids: ids[None], ShapeError, r"target: expected \[C\] torch.int64, got \[1, 2\]"),
        (2, lambda ids: ids[:1], ShapeError, r"target: expected \[2\] on cpu, got \[1\]"),
        (1, lambda ids: ids.to("meta"), ShapeError, "source: expected the host or cpu, got meta"),
        (1, lambda ids: ids * 0, PageError, r"source: expected page ids from 1 to 5, got \[0\]"),
        (2, lambda ids: -ids, PageError, r"target: expected page ids from 1 to 5, got \[-5, -2\]"),
        (2, lambda ids: ids + 1, PageError, r"target: expected page ids .*, got \[6\]"),
        (2, lambda ids: ids * 0 + 4, PageError, r"target: expected each page once, got \[4, 4\]"),
        (2, lambda ids: ids.clip(max=3), PageError, r"target: .* that are no source, got \[3\]"),
    ],
)
def test_wrong_arguments_are_refused(position: int, change, error, message: str) -> None:
    args = arguments()
    before = args[0].clone()
    changed = [*args]
    changed[position] = change(args[position])
    with pytest.raises(error, match=message):
        ops.copy_pages(*changed)
    assert torch.equal(args[0], before)


def test_one_page_may_be_copied_twice() -> None:
    pages = torch.randn(4, 8)
    ops.copy_pages(pages, torch.tensor([1, 1]), torch.tensor([2, 3]))
    assert torch.equal(pages[2], pages[1]) and torch.equal(pages[3], pages[1])
