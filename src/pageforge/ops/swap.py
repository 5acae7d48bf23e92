"""swap_out and swap_in: pages of a pool to pinned host memory and back.

A copy over the bus costs microseconds to start, however small it is: page by page, small pages
would leave the bus idle most of the time. So scattered pages go through a staging buffer on the
device: a kernel packs them at memory speed, and one copy moves all of them. Pages in long runs, and
large pages, are copied from where they lie.

A kernel can also read and write pinned memory itself. It needs no buffer, but it holds
multiprocessors for as long as the bus is busy, and a swap runs beside kernels that want them: so
only little is copied like that, for which packing first would take as long as the bus does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected
from pageforge.ops import kernels, reference
from pageforge.ops.checks import check_page_ids, check_whole_pages, shape
from pageforge.ops.copy import check_ids_tensor, ids_on_device, launch_copy
from pageforge.ops.library import register

STAGING_BYTES = 16 << 20
"""The staging buffer: some 300 us of a PCIe 5 bus, beside which a kernel launch is little."""

DIRECT_BYTES = 4 << 20
"""Up to this much a kernel copies over the bus: some 80 us."""

LONG_RUN_BYTES = 2 << 20
"""From this mean length on, runs of pages are copied straight: longer on the bus than to launch."""


def swap_out(
    pages: Tensor,  # [N, page elements]
    page_ids: Tensor,  # [C] int64, on the host
    host: Tensor,  # [C, page elements], on the host, written
) -> None:
    """`host[i] = pages[page_ids[i]]`, on the current stream.

    On CUDA `host` is pinned and this returns at once: read `host` after an event recorded behind
    it, and let nobody write to the pages before. To swap beside other work call it under a stream
    of your own, ordered after what wrote the pages. Up to 16 MiB of device memory are used for the
    time of the copy; where they are lacking it is slower. Not for graphs: the host reads the ids.

    Raises ShapeError or PageError, and then nothing was copied.
    """
    _check(pages, page_ids, host)
    _swap_out(pages, page_ids, host)


def swap_in(
    host: Tensor,  # [C, page elements], on the host
    pages: Tensor,  # [N, page elements], written
    page_ids: Tensor,  # [C] int64, on the host
) -> None:
    """`pages[page_ids[i]] = host[i]`, on the current stream; see `swap_out`.

    On CUDA leave `host` as it is until an event recorded behind this has come.
    """
    _check(pages, page_ids, host)
    _swap_in(host, pages, page_ids)


def _check(pages: Tensor, page_ids: Tensor, host: Tensor) -> None:
    check_whole_pages("pages", pages)
    check_whole_pages("host", host)
    check_ids_tensor("page_ids", page_ids)
    if page_ids.device.type != "cpu":
        raise ShapeError(expected("page_ids", "on the host", page_ids.device, "call .cpu() early"))
    if host.device.type != "cpu":
        raise ShapeError(expected("host", "a tensor on the host", host.device, "pin host memory"))
    if host.dtype != pages.dtype or host.shape != (len(page_ids), pages.shape[1]):
        want = f"[{len(page_ids)}, {pages.shape[1]}] {pages.dtype}"
        raise ShapeError(
            expected("host", want, f"{shape(host)} {host.dtype}", "one row for each page id")
        )


def launch_swap_out(pages: Tensor, page_ids: Tensor, host: Tensor) -> None:
    """`swap_out` to pinned memory."""
    runs = list(_runs(page_ids.tolist()))
    staging = _staging(pages, page_ids, len(runs))
    if staging is None:
        for row, page, count in runs:
            host[row : row + count].copy_(pages[page : page + count], non_blocking=True)
        return
    buffer, ids = staging
    if buffer is None:
        launch_copy(pages, host, ids, None, len(ids))
        return
    for row in range(0, len(ids), len(buffer)):
        part = ids[row : row + len(buffer)]
        launch_copy(pages, buffer, part, None, len(part))
        host[row : row + len(part)].copy_(buffer[: len(part)], non_blocking=True)


def launch_swap_in(host: Tensor, pages: Tensor, page_ids: Tensor) -> None:
    """`swap_in` from pinned memory."""
    runs = list(_runs(page_ids.tolist()))
    staging = _staging(pages, page_ids, len(runs))
    if staging is None:
        for row, page, count in runs:
            pages[page : page + count].copy_(host[row : row + count], non_blocking=True)
        return
    buffer, ids = staging
    if buffer is None:
        launch_copy(host, pages, None, ids, len(ids))
        return
    for row in range(0, len(ids), len(buffer)):
        part = ids[row : row + len(buffer)]
        buffer[: len(part)].copy_(host[row : row + len(part)], non_blocking=True)
        launch_copy(buffer, pages, None, part, len(part))


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pages that follow each other in the pool: (row of the first, its page, how many)."""
    first = 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[row - 1] + 1:
            yield first, ids[first], row - first
            first = row


def _staging(pages: Tensor, page_ids: Tensor, num_runs: int) -> tuple[Tensor | None, Tensor] | None:
    """(buffer `[rows, page elements]`, ids on the device), or None to do without.

    For little there is no buffer either. One is enough: on one stream, who fills it again waits for
    the copy before.
    """
    page_bytes = pages.shape[1] * pages.element_size()
    total = len(page_ids) * page_bytes
    if total >= num_runs * LONG_RUN_BYTES:
        return None
    rows = min(len(page_ids), max(1, STAGING_BYTES // page_bytes))
    try:
        buffer = None if total <= DIRECT_BYTES else pages.new_empty(rows, pages.shape[1])
        return buffer, ids_on_device(page_ids, pages.device)
    except torch.OutOfMemoryError:  # a swap is there to make room. Runs can do without any
        return None


def _swap_out_cpu(pages: Tensor, page_ids: Tensor, host: Tensor) -> None:
    check_page_ids("page_ids", page_ids.tolist(), len(pages))
    reference.swap_out(pages, page_ids, host)


def _swap_in_cpu(host: Tensor, pages: Tensor, page_ids: Tensor) -> None:
    check_page_ids("page_ids", page_ids.tolist(), len(pages))
    reference.swap_in(host, pages, page_ids)


def _swap_out_cuda(pages: Tensor, page_ids: Tensor, host: Tensor) -> None:
    check_page_ids("page_ids", page_ids.tolist(), len(pages))
    _check_pinned(host)
    (launch_swap_out if kernels.AVAILABLE else reference.swap_out)(pages, page_ids, host)


def _swap_in_cuda(host: Tensor, pages: Tensor, page_ids: Tensor) -> None:
    check_page_ids("page_ids", page_ids.tolist(), len(pages))
    _check_pinned(host)
    (launch_swap_in if kernels.AVAILABLE else reference.swap_in)(host, pages, page_ids)


def _check_pinned(host: Tensor) -> None:
    """Pageable memory would do as well, but several times slower, and it would block the host."""
    if host.numel() and not host.is_pinned():
        raise ShapeError(
            expected("host", "pinned memory", "pageable", "make it with pin_memory=True")
        )


def _fake_swap_out(pages: Tensor, page_ids: Tensor, host: Tensor) -> None:
    """Nothing is returned."""


def _fake_swap_in(host: Tensor, pages: Tensor, page_ids: Tensor) -> None:
    """Nothing is returned."""


_swap_out = register(
    "swap_out(Tensor pages, Tensor page_ids, Tensor(a!) host) -> ()",
    cpu=_swap_out_cpu,
    cuda=_swap_out_cuda,
    fake=_fake_swap_out,
)
_swap_in = register(
    "swap_in(Tensor host, Tensor(a!) pages, Tensor page_ids) -> ()",
    cpu=_swap_in_cpu,
    cuda=_swap_in_cuda,
    fake=_fake_swap_in,
)
