"""copy_pages: whole pages to other pages of the same pool (copy-on-write)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pageforge.errors import PageError, PageForgeError, ShapeError, expected, listed
from pageforge.geometry import ceil_div
from pageforge.ops import kernels, reference
from pageforge.ops.checks import check_page_ids, check_whole_pages, shape
from pageforge.ops.kernels import jit, tl
from pageforge.ops.library import register

TILE = 8192
"""Elements that a program copies: 16 KiB in two-byte dtypes, eight 16-byte loads a thread."""


def copy_pages(
    pages: Tensor,  # [N, page elements], written
    source: Tensor,  # [C] int64
    target: Tensor,  # [C] int64
) -> None:
    """`pages[target] = pages[source]`: copy-on-write, all pairs in one launch, for all layers.

    No page is both a source and a target, and none is a target twice: what is copied is held, what
    it is copied to was free.

    Ids on the host are checked, and reach a CUDA device without a wait; a graph cannot capture
    that. Ids on the device are taken as they are, and a graph can capture it.

    Raises ShapeError, or PageError for ids on the host; then nothing was copied. Otherwise
    everything is: where memory for the ids is lacking, page by page.
    """
    check_whole_pages("pages", pages)
    for name, ids in (("source", source), ("target", target)):
        check_ids_tensor(name, ids)
        if ids.device.type != "cpu" and ids.device != pages.device:
            want = f"the host or {pages.device}"
            raise ShapeError(expected(name, want, ids.device, "make the ids on the host"))
    if source.shape != target.shape or source.device != target.device:
        want, got = f"{shape(source)} on {source.device}", f"{shape(target)} on {target.device}"
        raise ShapeError(expected("target", want, got, "pass pairs, both on one device"))
    _copy_pages(pages, source, target)


def check_ids_tensor(name: str, ids: Tensor) -> None:
    """Raise ShapeError unless `ids` is `[C]` int64."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        got = f"{shape(ids)} {ids.dtype}"
        raise ShapeError(expected(name, "[C] torch.int64", got, "pass torch.tensor(list_of_ids)"))


def ids_on_device(ids: Tensor, device: torch.device) -> Tensor:
    """`ids` on `device`, without waiting for what the device is doing.

    Raises PageForgeError while a graph is captured: it would replay what pinned memory holds then.
    """
    if ids.device == device:
        return ids
    if torch.cuda.is_current_stream_capturing():
        raise PageForgeError(
            expected(
                "page ids", f"a tensor on {device}", ids.device, "graphs need ids on the device"
            )
        )
    return ids.pin_memory().to(device, non_blocking=True)


def launch_copy(
    source: Tensor,  # [N, elements]
    target: Tensor,  # [M, elements], written; may be the same tensor
    source_ids: Tensor | None,  # [C] int64 on the device; None = 0, 1, ...
    target_ids: Tensor | None,  # [C] int64 on the device; None = 0, 1, ...
    num_pairs: int,
) -> None:
    """`target[target_ids] = source[source_ids]`, by one kernel, on the current stream."""
    elements = source.shape[1]
    chunks = ceil_div(elements, TILE)
    align = math.gcd(elements, 16)
    if num_pairs * chunks == 0:
        return
    with torch.cuda.device_of(target if source.device.type == "cpu" else source):
        _copy_kernel[(num_pairs * chunks,)](
            source,
            target,
            source_ids,
            target_ids,
            elements // align,
            chunks,
            ALIGN=align,
            TILE=TILE,
        )


@jit(
    do_not_specialize=["units", "chunks"],
    do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"],
)
def _copy_kernel(
    source_ptr,  # [N, elements]
    target_ptr,  # [M, elements]
    source_ids_ptr,  # [C] int64, or None
    target_ids_ptr,  # [C] int64, or None
    units,  # of ALIGN elements, in a page: so the compiler knows how pages are aligned
    chunks,  # TILEs in a page, the last one perhaps partly filled
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = (tl.program_id(0) // chunks).to(tl.int64)
    source, target = pair, pair
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + pair)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + pair)
    elements = units * ALIGN
    element = tl.program_id(0) % chunks * TILE + tl.arange(0, TILE)
    exists = element < elements
    data = tl.load(source_ptr + source * elements + element, mask=exists)
    tl.store(target_ptr + target * elements + element, data, mask=exists)


def _check_pairs(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Raise PageError where ids on the host are none that can be copied; see `copy_pages`."""
    if source.device.type != "cpu":
        return
    sources, targets = set(source.tolist()), target.tolist()
    check_page_ids("source", list(sources), len(pages))
    check_page_ids("target", targets, len(pages))
    if both := sources.intersection(targets):
        raise PageError(
            expected("target", "pages that are no source", listed(sorted(both)), "use free pages")
        )


def _copy_pages_page_by_page(pages: Tensor, source: Tensor, target: Tensor) -> None:
    _check_pairs(pages, source, target)
    reference.copy_pages(pages, source, target)


def launch_copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """`copy_pages` by one kernel."""
    _check_pairs(pages, source, target)
    try:
        ids = ids_on_device(torch.stack((source, target)), pages.device)
    except torch.OutOfMemoryError:
        # It needs no memory to be made page by page, only more launches.
        reference.copy_pages(pages, source, target)
        return
    launch_copy(pages, pages, ids[0], ids[1], len(source))


def _fake_copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Nothing is returned."""


_copy_pages = register(
    "copy_pages(Tensor(a!) pages, Tensor source, Tensor target) -> ()",
    cpu=_copy_pages_page_by_page,
    cuda=launch_copy_pages if kernels.AVAILABLE else _copy_pages_page_by_page,
    fake=_fake_copy_pages,
)
