"""swap_out and swap_in: the staged way in Triton's interpreter, and the ops on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cache_cases import EDGES, bits, interpreted, needs_sparse_memory, sparse_pages
from torch import Tensor

from pageforge import ops
from pageforge.errors import PageError, ShapeError
from pageforge.ops import reference, swap
from pageforge.ops.swap import launch_swap_in, launch_swap_out

both_ways = pytest.mark.parametrize(
    ("swap_out", "swap_in"),
    [
        pytest.param(launch_swap_out, launch_swap_in, marks=interpreted, id="kernel"),
        (ops.swap_out, ops.swap_in),
    ],
)

ID_LISTS = [
    [],
    [3],
    [1, 2, 3, 4],
    [9, 8, 7],
    [4, 5, 6, 1, 2, 9, 7],
    [11, 2, 3, 4, 5, 6, 7, 8, 10, 1],
]


def check_round_trip(
    swap_out, swap_in, elements: int, dtype: torch.dtype, ids: list[int], device: str = "cpu"
) -> None:
    """Out, and in again to other pages; every byte is what the reference leaves there."""
    pages = torch.randn(2 * max([*ids, 1]) + 2, elements, device=device).to(dtype)
    pages[::3] = torch.nan
    before, want = pages.clone(), pages.clone()
    host, want_host = (
        torch.zeros(len(ids), elements, dtype=dtype, pin_memory=device != "cpu") for _ in range(2)
    )
    page_ids = torch.tensor(ids, dtype=torch.int64)
    reference.swap_out(want, page_ids, want_host)
    swap_out(pages, page_ids, host)
    if device != "cpu":
        torch.cuda.current_stream().synchronize()
    assert torch.equal(bits(host), bits(want_host))
    assert torch.equal(bits(pages), bits(before))
    others = page_ids.flip(0) + max([*ids, 1])
    reference.swap_in(want_host, want, others)
    swap_in(host, pages, others)
    assert torch.equal(bits(pages), bits(want))


@both_ways
@pytest.mark.parametrize("ids", ID_LISTS, ids=str)
def test_round_trips(swap_out, swap_in, ids: list[int]) -> None:
    for elements, dtype in ((1, torch.float32), (40, torch.float16), (9000, torch.bfloat16)):
        check_round_trip(swap_out, swap_in, elements, dtype, ids)


@interpreted
@pytest.mark.parametrize("staging", [1, 200, 256, 10_000])
def test_any_size_of_the_staging_buffer(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one page at a time, and with a rest."""
    monkeypatch.setattr(swap, "STAGING_BYTES", staging)
    monkeypatch.setattr(swap, "DIRECT_BYTES", 0)  # else so little would need no buffer
    for ids in ID_LISTS:
        check_round_trip(launch_swap_out, launch_swap_in, 16, torch.float32, ids)


@interpreted
@pytest.mark.parametrize("long_run", [1, 128, 200])
def test_long_runs_need_no_kernel(long_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean runs of 64 bytes and more."""
    launched = []
    real = swap.launch_copy
    monkeypatch.setattr(swap, "launch_copy", lambda *args: launched.append(real(*args)))
    monkeypatch.setattr(swap, "LONG_RUN_BYTES", long_run)
    check_round_trip(launch_swap_out, launch_swap_in, 16, torch.float32, [1, 2, 3, 7, 8, 9])
    # 192 bytes a run out; in the other order, in, 64.
    assert len(launched) == (long_run > 192) + (long_run > 64)


@interpreted
def test_without_memory_for_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap is there to make room."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(swap, "ids_on_device", fail)
    for ids in ID_LISTS:
        check_round_trip(launch_swap_out, launch_swap_in, 16, torch.float32, ids)


@needs_sparse_memory
@both_ways
def test_pages_past_every_limit_of_32_bits(swap_out, swap_in) -> None:
    with sparse_pages() as pages:
        for page in EDGES:
            pages.all[page] = page % 1000
        host = torch.empty(len(EDGES), pages.all.shape[1], dtype=torch.float16)
        swap_out(pages.all, torch.tensor(EDGES), host)
        for row, page in enumerate(EDGES):
            assert (host[row] == page % 1000).all()
        swap_in(host + 1, pages.all, torch.tensor([page - 10 for page in EDGES]))
        for page in EDGES:
            assert (pages.all[page - 10] == page % 1000 + 1).all()


# --- the ops --------------------------------------------------------------------------------------


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 16), torch.tensor([1, 4]), torch.randn(2, 16)


def test_what_torch_knows_of_them() -> None:
    pages, ids, host = arguments()
    torch.library.opcheck(torch.ops.pageforge.swap_out.default, (pages, ids, host))
    torch.library.opcheck(torch.ops.pageforge.swap_in.default, (host, pages, ids))


def test_compiled_code_writes_to_the_callers_memory() -> None:
    pages, ids, host = arguments()

    def step(pages, ids, host):
        ops.swap_out(pages, ids, host)
        ops.swap_in(host, pages, ids + 1)
        return pages[2] + 1

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(pages, ids, host)
    assert torch.equal(host, pages[[1, 4]]) and torch.equal(host, pages[[2, 5]])
    assert torch.equal(got, pages[1] + 1)


@pytest.mark.parametrize(
    ("position", "change", "error", "message"),
    [
        (0, lambda pages: pages.T, ShapeError, "pages: expected .N, elements., contiguous"),
        (1, lambda ids: ids.int(), ShapeError, r"page_ids: expected \[C\] torch.int64"),
        (1, lambda ids: ids.to("meta"), ShapeError, "page_ids: expected on the host, got meta"),
        (1, lambda ids: ids[:1], ShapeError, r"host: expected \[1, 16\] torch.float32, got \[2"),
        (1, lambda ids: ids * 0, PageError, r"page_ids: expected page ids from 1 to 5, got \[0"),
        (1, lambda ids: ids + 2, PageError, r"page_ids: expected page ids from 1 to 5, got \[6\]"),
        (1, lambda ids: ids * 0 + 3, PageError, "page_ids: expected each page once"),
        (2, lambda host: host.half(), ShapeError, "host: expected .* got .2, 16. torch.float16"),
        (2, lambda host: host[:, :8], ShapeError, "host: expected .N, elements., contiguous"),
        (2, lambda host: host.to("meta"), ShapeError, "host: expected a tensor on the host"),
    ],
)
def test_wrong_arguments_are_refused(position: int, change, error, message: str) -> None:
    args = arguments()
    before = [tensor.clone() for tensor in args]
    changed = [*args]
    changed[position] = change(args[position])
    pages, ids, host = changed
    with pytest.raises(error, match=message):
        ops.swap_out(pages, ids, host)
    with pytest.raises(error, match=message):
        ops.swap_in(host, pages, ids)
    assert all(map(torch.equal, args, before))
