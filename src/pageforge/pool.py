"""PagePool: pages of every layer group under one budget, with memory that follows their use."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pageforge import ops
from pageforge.errors import (
    GeometryError,
    OutOfPages,
    PageError,
    PageForgeError,
    UseAfterFree,
    expected,
)
from pageforge.geometry import (
    KVGeometry,
    LayerGroup,
    bytes_per_page,
    pages_for,
    total_bytes_per_page,
)
from pageforge.memory import PageAllocator, PageTable, PrefixIndex
from pageforge.memory.allocator import Supply
from pageforge.memory.page_table import PageCopy, append_all, pages_needed
from pageforge.memory.prefix import Prefix, PrefixCursor, longest_hit
from pageforge.ops.launch import stream_handle
from pageforge.probe import geometry_of
from pageforge.store import (
    DeviceMemoryError,
    Store,
    free_bytes,
    is_elastic,
    open_store,
    parse_memory,
)
from pageforge.store.ahead import MappedAhead
from pageforge.store.base import GRANULE

WATERMARK = 32 << 20
"""Bytes of wholly free chunks that stay mapped, so that a pool in use does not thrash."""

MAPPED_PART = 32
"""Of so many pages in use that a batch adds to, memory for one is mapped before it is needed: the
thread that maps runs while others wait for the device, and may need a few steps for a piece."""

RESERVE_FRACTION = 0.1
"""Of the free memory, what a pool without an explicit cap leaves to others (activations, say)."""

PLAIN_FRACTION = 0.25
"""Of the free memory, what a pool without an explicit cap takes where it is not elastic."""

MAX_PAGE_ID = 2**31 - 2
"""Page ids are int32 on the device."""

ROLLBACK = 64
"""Tokens that a sliding layer can be rolled back by: several drafts of assisted decoding."""


@dataclass(frozen=True)
class GroupStats:
    """One layer group of a pool; counts are pages, sizes are bytes.

    `pages_per_chunk`: of the smallest chunk that is mapped at once.
    """

    layers: tuple[int, ...]
    device: str
    pages_total: int
    pages_used: int
    pages_cached: int
    pages_free: int
    pages_per_chunk: int
    bytes_per_page: int
    bytes_in_use: int
    bytes_mapped: int


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment: sums over its layer groups, and the groups.

    `bytes_in_use`: the used pages' own bytes. `bytes_mapped`: what the driver (CUDA) or the system
    (CPU) has given, as it says itself. `bytes_total`: the budget that all groups share, and
    `bytes_free` what used and cached pages have left of it. Under `max_memory` each of several
    groups has page ids for the whole budget, so there the bytes bound what can be had, not the ids.
    """

    pages_total: int
    pages_used: int
    pages_cached: int
    pages_free: int
    bytes_total: int
    bytes_free: int
    bytes_in_use: int
    bytes_mapped: int
    groups: tuple[GroupStats, ...]

    def __repr__(self) -> str:
        return (
            f"PoolStats(pages={self.pages_used} used + {self.pages_cached} cached of "
            f"{self.pages_total}, bytes={self.bytes_in_use:,} in use, {self.bytes_mapped:,} mapped "
            f"of {self.bytes_total:,})"
        )


class _Group:
    """One layer group of a pool: its policy, its store, and the views that ops work on."""

    def __init__(self, group: LayerGroup, num_pages: int, store: Store):
        self.layout = group
        self.bytes_per_page = bytes_per_page(group)
        self.dtype: torch.dtype = getattr(torch, group.shape.dtype)
        # Chunks of no more than a granule: pages straddle granules, and a larger chunk would map up
        # to two granules more than its pages need.
        self.allocator = PageAllocator(num_pages, max(1, GRANULE // self.bytes_per_page))
        self.prefix = PrefixIndex(self.allocator, group.page_size)
        self.store = store
        try:
            store.map(*self.chunk_bytes(0))
        except DeviceMemoryError:
            _empty_torch_cache()
            store.map(*self.chunk_bytes(0))
        flat = store.tensor(self.dtype)
        self.device = flat.device  # "cuda" has an index now
        self.pages = flat.view(num_pages + 1, group.page_elements)  # [N, page elements]
        # Padding in page tables leads here; attention masks it, and so it must be finite. (A fresh
        # mapping on the CPU is zero, and writing to it would cost memory.)
        if self.device.type != "cpu" or not store.elastic:
            self.pages[0].zero_()
        self.layers = [self._layer_views(flat, index) for index in range(len(group.layers))]

    def chunk_bytes(self, chunk: int) -> tuple[int, int]:
        """The bytes of `chunk` in the store, as (start, stop)."""
        pages = self.allocator.chunk_pages(chunk)
        return pages.start * self.bytes_per_page, pages.stop * self.bytes_per_page

    def bytes_mapped(self) -> int:
        """What the system has given for this group."""
        return self.store.bytes_mapped(self.chunk_bytes(self.allocator.num_opened - 1)[1])

    def _layer_views(self, flat: Tensor, index: int) -> tuple[Tensor, Tensor]:
        group, shape = self.layout, self.layout.shape
        num_ids = self.pages.shape[0]

        def view(offset: int, dim: int) -> Tensor:
            size = (num_ids, shape.num_kv_heads, group.page_size, dim)
            stride = (group.page_elements, group.page_size * dim, dim, 1)
            return flat.as_strided(size, stride, index * group.layer_elements + offset)

        return view(0, shape.key_dim), view(group.value_offset, shape.value_dim)

    def drop_views(self) -> None:
        """Let go of the store's memory: nobody may touch it any more."""
        self.pages = self.pages.new_empty(0)
        self.layers = []


class PagePool:
    """Pages for the K/V of many sequences, of all of a model's layers.

    Addresses are reserved once; memory comes in chunks as pages are first used and goes back to the
    system when no page touches a chunk any more. Calls are safe from several threads.

    `geometry`: what a page holds. `model_config`: the config of the model it was made for, if any.
    `casts`: whether K/V of another dtype are cast to the pool's (only if that was asked for).
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        max_pages: int | None = None,
        max_memory: int | float | str | None = None,
    ):
        """Reserves addresses; memory comes later.

        `max_pages`: usable pages in each layer group. `max_memory`: bytes that the pages of all
        groups may take together, as an int, a fraction of what is free, "4GiB" or "50%". With
        neither: 90% of what is free now. (Chunks that are used in part map somewhat more.)

        Raises GeometryError for sizes that make no pool, OutOfPages where the system refuses.
        """
        self.geometry = geometry
        self.model_config: Any = None
        self.casts = False
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock
        self._abandoned: deque[PageTable | _ExportEnd] = deque()
        self._exports = 0
        # Closed chunks whose memory is not yet given back: (group, chunk) -> events to wait for.
        self._retired: dict[tuple[int, int], list[torch.cuda.Event]] = {}
        self._ahead = MappedAhead()  # chunks by (group, chunk)
        # Streams that have touched pages (any of them may still be doing so), and whose turn it is.
        self._streams: dict[torch.device, dict[int, torch.cuda.Stream]] = {}  # by handle
        self._turns: dict[torch.device, tuple[int, int]] = {}
        self._num_calls = 0
        self._closed = False
        with torch.inference_mode(False):  # else pages could only be written to in that mode
            self._budget, self._groups = _open(geometry, max_pages, max_memory)
        # A pool that is dropped without close() must not keep the device's memory.
        stores = [(group.store, group.device) for group in self._groups]
        self._finalizer = weakref.finalize(self, _end, stores, self._ahead)
        self._finalizer.atexit = False
        for group in self._groups:
            self.use_stream(group.device)  # which may be zeroing page 0
        self._bytes_per_page = total_bytes_per_page(geometry.groups)  # of a page in each group
        self._mapping = [i for i, group in enumerate(self._groups) if group.store.maps]
        self._layers = {
            layer: (index, *views)
            for index, group in enumerate(self._groups)
            for layer, views in zip(group.layout.layers, group.layers, strict=True)
        }

    @classmethod
    def for_model(
        cls,
        model: torch.nn.Module,
        page_size: int = 16,
        max_pages: int | None = None,
        max_memory: int | float | str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> PagePool:
        """A pool that fits a transformers model, as `geometry_of` reads it off the model itself.

        `dtype`: store K/V in this dtype; by default in the dtype in which the model makes them.
        """
        geometry = geometry_of(model, page_size)
        if dtype is not None:
            geometry = geometry.with_dtype(str(dtype).removeprefix("torch."))
        pool = cls(geometry, max_pages=max_pages, max_memory=max_memory)
        pool.model_config = model.config
        pool.casts = dtype is not None
        return pool

    # --- what a sequence does ---------------------------------------------------------------

    def new_table(self, start: int = 0) -> PageTable:
        """An empty page table; its first `start` tokens (left padding) are never stored."""
        return PageTable(
            [group.allocator for group in self._groups],
            self.geometry.page_size,
            windows=[group.shape.window for group in self.geometry.groups],
            rollback=ROLLBACK,
            start=start,
        )

    def append(
        self, tables: Sequence[PageTable], num_tokens: int, *, ahead: PageTable | None = None
    ) -> list[PageCopy]:
        """Room for `num_tokens` more tokens in each table: plan, reserve, commit, all or nothing.

        Pages to be written that other sequences share are copied before the commit; returns these
        copies. Where pages are needed, those that `ahead` holds are given back first, for these to
        take. Raises OutOfPages.
        """
        with self._exclusive():
            needed = pages_needed(tables, num_tokens)
            if ahead is not None and any(needed):
                ahead.crop(0)
            self._reserve(needed)
            return append_all(tables, num_tokens, needed, self._copy)

    def claim_ahead(self, ahead: PageTable, num_pages: int) -> None:
        """Have `ahead` hold `num_pages` pages in each group, if they are to be had at once.

        Nothing is evicted or waited for to that end, and nobody else's memory taken: where pages
        are short, nothing is done, and whoever needs them in earnest finds out.
        """
        with self._exclusive():
            num_tokens = num_pages * self.geometry.page_size - ahead.length
            needed = pages_needed([ahead], num_tokens)
            scarce = any(
                count > group.allocator.num_free
                for count, group in zip(needed, self._groups, strict=True)
            )
            if scarce or self._bytes_open(needed) > self._budget:
                return
            try:
                supplies = self._supply(needed, [0] * len(needed))
            except DeviceMemoryError:
                return
            self._prepare(supplies)
            append_all([ahead], num_tokens, needed)

    def map_ahead(self, num_pages: int, *, and_a_part: bool = False) -> None:
        """Have memory mapped for the next `num_pages` pages of each group, by another thread.

        `and_a_part`: and for a MAPPED_PART-th of those in use, in groups that grow. Returns at
        once. Does nothing where there is memory for as many, or where the budget or the pool ends;
        whoever needs pages in earnest finds out, and gives way or takes from others.
        """
        wanted = [self._num_wanted(index, num_pages, and_a_part) for index in self._mapping]
        if all(self._num_ready(i) >= n for i, n in zip(self._mapping, wanted, strict=True)):
            return
        with self._exclusive():
            spare = [group.allocator.num_open_free for group in self._groups]
            for index, count in zip(self._mapping, wanted, strict=True):
                group = self._groups[index]
                allocator = group.allocator
                for chunk in allocator.plan(min(count, allocator.num_free)).chunks:
                    spare[index] += len(allocator.chunk_pages(chunk))
                    if self._bytes_open(spare) > self._budget:
                        return
                    if (index, chunk) not in self._retired:
                        self._ahead.begin((index, chunk), group.store, group.chunk_bytes(chunk))

    def _num_wanted(self, group: int, num_pages: int, and_a_part: bool) -> int:
        """Pages of `map_ahead`, of those that there are."""
        allocator = self._groups[group].allocator
        # What a window leaves comes back for what it reaches.
        if and_a_part and self.geometry.groups[group].shape.window is None:
            num_pages += allocator.num_used // MAPPED_PART
        return min(num_pages, allocator.num_free)

    def _num_ready(self, group: int) -> int:
        """Free pages with memory behind them, or with some on its way."""
        allocator = self._groups[group].allocator
        coming = sum([len(allocator.chunk_pages(chunk)) for chunk in self._ahead.chunks(group)])
        return allocator.num_open_free + coming

    @property
    def num_shares(self) -> int:
        """Counts how often pages got another holder, or became known as a prefix."""
        return sum([group.allocator.num_shares for group in self._groups])

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages."""
        with self._exclusive():
            return table.fork()

    def crop(self, tables: Sequence[PageTable], length: int) -> None:
        """Keep the first `length` tokens of each table: all of them, or none where one cannot."""
        with self._exclusive():
            for table in tables:
                table.check_crop(length)
            for table in tables:
                table.crop(length)
            self._shrink()

    def slide(
        self, tables: Sequence[PageTable], lengths: Sequence[int | None] | None = None
    ) -> tuple[int, int]:
        """Release pages that left a window (less the roll-back margin).

        `lengths`: tokens that each table has by now, where room was made for more of them ahead.
        Returns the range of logical pages in which they were: `(low, high)`, empty if none.
        """
        lengths = [None] * len(tables) if lengths is None else lengths
        with self._exclusive():
            pairs = zip(tables, lengths, strict=True)
            gone = [pages for table, length in pairs if (pages := table.slide(length))]
            if not gone:
                return 0, 0
            self._shrink()
            return min(pages.start for pages in gone), max(pages.stop for pages in gone)

    def restore(
        self,
        contents: Sequence[Tensor],
        rows: Sequence[Sequence[Sequence[int]]],
        starts: Sequence[int],
        length: int,
    ) -> list[PageTable]:
        """Page tables over saved pages, one a row, all of `length` tokens.

        `contents[group]`: `[n, page elements]`; pinned ones are copied while the host goes on, and
        must live until that is done. `rows[row][group]`: indices into it, for the row's last
        tokens; rows may share pages. Raises OutOfPages.
        """
        with self._exclusive():
            tables = [self.new_table(start) for start in starts]
            self._reserve([len(data) for data in contents])
            ids = [
                group.allocator.allocate(len(data))
                for group, data in zip(self._groups, contents, strict=True)
            ]
            try:
                for group, pages, data in zip(self._groups, ids, contents, strict=True):
                    self.use_stream(group.device)
                    index = torch.tensor(pages, dtype=torch.long, device="cpu")
                    if data.dtype == group.dtype and (data.is_pinned() or not group.pages.is_cuda):
                        ops.swap_in(data, group.pages, index)
                        continue
                    group.pages.index_copy_(
                        0, index.to(group.device), data.to(group.device, group.dtype)
                    )
                for table, row in zip(tables, rows, strict=True):
                    table.adopt([[ids[g][i] for i in row[g]] for g in range(len(ids))], length)
            except BaseException:
                for table in tables:
                    table.release()
                raise
            finally:
                for group, pages in zip(self._groups, ids, strict=True):
                    group.allocator.release(pages[::-1])
            return tables

    # --- prefixes that sequences share ------------------------------------------------------

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> Prefix:
        """The longest known prefix of `tokens`, in full pages; a query.

        A layer group with a window needs to have the pages of its window alone. `salt` parts what
        must not be shared (another adapter, say).
        """
        with self._exclusive():
            size = self.geometry.page_size
            paths = [group.prefix.walk(tokens, salt) for group in self._groups]
            known = [[place.page for place in path[1:]] for path in paths]
            windows = [group.shape.window for group in self.geometry.groups]
            num_pages, pages = longest_hit(known, windows, size, ROLLBACK)
            num_cached = max(
                sum(group.allocator.is_cached(page) for page in found)
                for group, found in zip(self._groups, pages, strict=True)
            )
            cursors = [path[num_pages] for path in paths]
            return Prefix(num_pages * size, tuple(pages), num_pages - num_cached, cursors)

    def adopt_prefix(self, prefix: Prefix) -> PageTable:
        """A page table over `prefix`, which must be just what `match_prefix` gave.

        Raises PageError, and then nothing has changed, where some of its pages were evicted since.
        """
        with self._exclusive():
            for cursor, pages in zip(prefix.cursors, prefix.pages, strict=True):
                if not cursor.holds(pages):
                    raise PageError(
                        f"prefix: expected its {prefix.num_tokens} tokens where match_prefix found "
                        f"them, got pages that were evicted since; match again"
                    )
            table = self.new_table()
            table.adopt(prefix.pages, prefix.num_tokens)
            return table

    def publish_prefix(
        self, table: PageTable, tokens: Sequence[int], cursors: list[PrefixCursor]
    ) -> None:
        """Make the full pages of `tokens`, the first ones of `table`, findable.

        Those that left a window before are not, but what comes after them is. `cursors`: how far
        each group has come, as `match_prefix` said first; moved on. Raises PageError, and then
        nothing has changed, where the table has fewer tokens, or some of left padding.
        """
        with self._exclusive():
            table.check_live()
            if table.start or len(tokens) > table.length:
                raise PageError(
                    expected(
                        "tokens",
                        f"at most {table.length}, without left padding",
                        f"{len(tokens)}, after {table.start} of padding",
                        "publish what the table holds",
                    )
                )
            size = self.geometry.page_size
            for index, (group, cursor) in enumerate(zip(self._groups, cursors, strict=True)):
                first = cursor.num_pages
                pages = table.entries(first, len(tokens) // size, index)
                cursors[index] = group.prefix.extend(cursor, tokens[first * size :], pages)

    @property
    def num_available(self) -> int:
        """Pages that all groups could hand out together now, free and cached ones."""
        with self._exclusive():
            return self._available_beside([0] * len(self._groups))

    def num_reclaimable(self, table: PageTable) -> int:
        """By how much `num_available` would grow if `table` was released."""
        with self._exclusive():
            given_back = [
                sum(group.allocator.count(page) == 1 for page in table.pages(index))
                for index, group in enumerate(self._groups)
            ]
            now = self._available_beside([0] * len(self._groups))
            return self._available_beside(given_back) - now

    def _available_beside(self, given_back: Sequence[int]) -> int:
        """Pages that all groups could hand out together, had each got `given_back` used ones."""
        rest = [g.allocator.num_used - n for g, n in zip(self._groups, given_back, strict=True)]
        used = sum(n * g.bytes_per_page for n, g in zip(rest, self._groups, strict=True))
        room = (self._budget - used) // self._bytes_per_page
        ids = [g.allocator.num_pages - n for g, n in zip(self._groups, rest, strict=True)]
        return min(room, *ids)

    def save(self, table: PageTable, num_tokens: int) -> list[Tensor]:
        """The pages of a table's first `num_tokens` tokens, for `restore`: those that it holds.

        `[n, page elements]` on the host for each group; on CUDA pinned, and complete once what was
        launched on the current stream is done. Raises CropError where a window of the next token
        has lost pages, or the table has fewer tokens.
        """
        with self._exclusive():
            held = [self._held(table, index, num_tokens) for index in range(len(self._groups))]
            contents = [  # of all groups first: should memory be lacking, nothing is copied
                torch.empty(
                    (len(pages), group.pages.shape[1]),
                    dtype=group.dtype,
                    device="cpu",
                    pin_memory=group.device.type == "cuda",
                )
                for group, pages in zip(self._groups, held, strict=True)
            ]
            for group, pages, content in zip(self._groups, held, contents, strict=True):
                self.use_stream(group.device)
                index = torch.tensor(pages, dtype=torch.long, device="cpu")
                ops.swap_out(group.pages, index, content)
            return contents

    def num_bytes(self, table: PageTable, num_tokens: int) -> int:
        """Bytes of the pages that `save` copies. Raises CropError where that would."""
        with self._exclusive():
            return sum(
                len(self._held(table, index, num_tokens)) * group.bytes_per_page
                for index, group in enumerate(self._groups)
            )

    def _held(self, table: PageTable, group: int, num_tokens: int) -> list[int]:
        """The pages of a table's first `num_tokens` tokens that are present in `group`."""
        table.check_crop(num_tokens)
        stop = pages_for(num_tokens, self.geometry.page_size)
        return table.pages(group)[: max(0, stop - table.first_page(group))]

    def release(self, tables: Sequence[PageTable]) -> None:
        """Give all pages of `tables` back. Releasing twice does nothing."""
        if self.is_inside:  # from a __del__ that garbage collection ran: when that call is over
            self._abandoned.extend(tables)
            return
        with self._exclusive(even_closed=True):
            for table in tables:
                table.release()
            self._shrink()

    def abandon(self, tables: Sequence[PageTable | _ExportEnd]) -> None:
        """`release` for finalizers: never blocks, as garbage collection may run inside a call."""
        self._abandoned.extend(tables)
        # Who holds the lock looks again after giving it back, so that nothing is left lying.
        while self._abandoned and not self.is_inside and self._lock.acquire(blocking=False):
            try:
                self._owner = threading.get_ident()
                self._num_calls += 1
                self._collect()
            finally:
                self._owner = 0
                self._lock.release()

    # --- what ops need ----------------------------------------------------------------------

    def layer(self, layer: int) -> tuple[int, Tensor, Tensor]:
        """(group, key_pages `[N, Hkv, P, Dk]`, value_pages `[N, Hkv, P, Dv]`) of a model's layer.

        Touch only pages that a live page table holds: the rest may have no memory behind it.
        """
        self.check_open()
        try:
            return self._layers[layer]
        except KeyError:
            raise GeometryError(
                expected(
                    "layer", f"one of {sorted(self._layers)}", layer, "the pool fits another model"
                )
            ) from None

    def pages(self, group: int) -> Tensor:
        """`[N, page elements]`: each row is one page, for all layers of `group`. See `layer`."""
        self.check_open()
        return self._group(group).pages

    def use_stream(self, device: torch.device) -> None:
        """Order this thread's CUDA stream after what others have launched on the pool's pages.

        Call it before touching pages; it costs something only when another stream had its turn, or
        when pages may have changed hands.
        """
        if device.type != "cuda":
            return
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        handle = stream_handle(device)
        turn = handle, self._num_calls
        if self._turns.get(device) == turn:
            return
        known = self._streams.setdefault(device, {})
        if handle not in known:
            known[handle] = torch.cuda.current_stream(device)
        for other in list(known):
            if other != handle:
                known[handle].wait_stream(known[other])
        self._turns[device] = turn

    # --- what people ask --------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Pages and bytes now."""
        with self._exclusive():
            groups = tuple(
                GroupStats(
                    layers=group.layout.layers,
                    device=str(group.device),
                    pages_total=group.allocator.num_pages,
                    pages_used=group.allocator.num_used,
                    pages_cached=group.allocator.num_cached,
                    pages_free=group.allocator.num_free,
                    pages_per_chunk=len(group.allocator.chunk_pages(0)),
                    bytes_per_page=group.bytes_per_page,
                    bytes_in_use=group.allocator.num_used * group.bytes_per_page,
                    bytes_mapped=group.bytes_mapped(),
                )
                for group in self._groups
            )
        return PoolStats(
            pages_total=sum(group.pages_total for group in groups),
            pages_used=sum(group.pages_used for group in groups),
            pages_cached=sum(group.pages_cached for group in groups),
            pages_free=sum(group.pages_free for group in groups),
            bytes_total=self._budget,
            bytes_free=self._budget
            - sum(
                (group.pages_used + group.pages_cached) * group.bytes_per_page for group in groups
            ),
            bytes_in_use=sum(group.bytes_in_use for group in groups),
            bytes_mapped=sum(group.bytes_mapped for group in groups),
            groups=groups,
        )

    def trim(self) -> None:
        """Give back the memory of every chunk that no page touches, the watermark's too."""
        with self._exclusive():
            self._shrink(keep=0)
            self._unmap_retired(wait=True)

    def drop_prefix_cache(self) -> None:
        """Forget all cached pages: they fall free."""
        with self._exclusive():
            for group in self._groups:
                group.prefix.drop()
            self._shrink()

    def export_pages(self, first: int, count: int = 1, *, group: int = 0) -> Tensor:
        """Pages `first` to `first + count - 1` without a copy, for DLPack, NumPy, CuPy and torch.

        `[count, L, 2, Hkv, P, D]` (K then V), or `[count, L, Hkv * P * (Dk + Dv)]` where K and V
        dims differ. All must be used or cached; they are held until the last view of the result is
        gone. Raises PageError.
        """
        with self._exclusive():
            owner = self._group(group)
            pages = range(first, first + count)
            if count < 1:
                raise PageError(expected("count", "at least 1", count, "export one page or more"))
            self.use_stream(owner.device)  # DLPack orders the consumer after this thread's stream
            owner.allocator.share(pages)
            self._exports += 1
            hold = _Export()
            end = weakref.finalize(hold, self.abandon, [_ExportEnd(self, group, pages)])
            end.atexit = False
            size = owner.bytes_per_page
            data = owner.store.export(first * size, (first + count) * size, hold)
            layout, shape = owner.layout, owner.layout.shape
            split: tuple[int, ...] = (layout.layer_elements,)
            if shape.key_dim == shape.value_dim:
                split = (2, shape.num_kv_heads, layout.page_size, shape.key_dim)
            return data.view(owner.dtype).view(count, len(layout.layers), *split)

    def close(self) -> None:
        """Give everything back. Caches on this pool cannot be used any more.

        Exported pages stay readable: the memory goes when the last of them does.
        """
        with self._exclusive(even_closed=True):
            if self._closed:
                return
            self._closed = True
            self._retired.clear()
            self._layers.clear()
            for group in self._groups:
                group.drop_views()
            if not self._exports:
                self._finalizer()

    def __enter__(self) -> PagePool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a PagePool cannot be pickled or saved: most of its addresses have no memory behind "
            "them; save a cache's pages with cache.save(path), or copy some with "
            "pool.export_pages(...)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        """A pool is shared by whatever is copied: a copied cache forks inside it."""
        return self

    def __repr__(self) -> str:
        if self._closed:
            return "PagePool(closed)"
        stats = self.stats()
        return (
            f"PagePool(page_size={self.geometry.page_size}, pages={stats.pages_used} used + "
            f"{stats.pages_cached} cached of {stats.pages_total}, "
            f"mapped={stats.bytes_mapped:,} bytes)"
        )

    def check_invariants(self, tables: Sequence[PageTable] | None = None) -> None:
        """Recount all pages, against the live `tables` if given. Raises AssertionError."""
        with self._exclusive():
            for index, group in enumerate(self._groups):
                holders = None if tables is None else [table.pages(index) for table in tables]
                group.allocator.check_invariants(holders)
                group.prefix.check_invariants()

    # --- inside: all with the lock held -----------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self, *, even_closed: bool = False) -> Iterator[None]:
        if self.is_inside:
            raise PageForgeError(
                "pool: called by a finalizer in the middle of another call; there, only free or "
                "release what uses it"
            )
        with self._lock:
            try:
                self._owner = threading.get_ident()
                self._num_calls += 1
                self._collect()
                if not even_closed:
                    self.check_open()
                self._unmap_retired(wait=False)
                yield
            finally:
                self._owner = 0
        self.abandon(())  # what finalizers have brought meanwhile

    def _group(self, index: int) -> _Group:
        if not 0 <= index < len(self._groups):
            raise GeometryError(
                expected("group", f"from 0 to {len(self._groups) - 1}", index, "see stats().groups")
            )
        return self._groups[index]

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the middle of a call, or the one that maps memory for them.

        A finalizer that garbage collection runs there can only release what uses the pool.
        """
        return self._owner == threading.get_ident() or self._ahead.is_this_thread

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise UseAfterFree if the pool was closed."""
        if self._closed:
            raise UseAfterFree("pool: it was closed; make a new PagePool")

    def _collect(self) -> None:
        """Release the pages of caches that were garbage-collected."""
        while self._abandoned:
            self._abandoned.popleft().release()
            if not self._abandoned:
                self._shrink()

    def _reserve(self, needed: Sequence[int]) -> None:
        """See to it that each group can hand out `needed` pages. All or nothing: OutOfPages."""
        if not any(needed) or self._has_open(needed):
            return
        used = sum(g.allocator.num_used * g.bytes_per_page for g in self._groups)
        wanted = sum(n * g.bytes_per_page for n, g in zip(needed, self._groups, strict=True))
        short = any(
            n > g.allocator.num_available for n, g in zip(needed, self._groups, strict=True)
        )
        if short or used + wanted > self._budget:
            raise OutOfPages(sum(needed), self._available(needed, self._budget - used))
        cached = sum(g.allocator.num_cached * g.bytes_per_page for g in self._groups)
        evictions = self._plan_evictions(used + cached + wanted - self._budget)
        # Free pages of open chunks serve their own group; what is opened beyond them may have to
        # take the place of another group's. (One group alone has no more ids than budget.)
        if self._bytes_open(needed) > self._budget:
            self._shrink(keep=0, spare=needed)
        try:
            supplies = self._supply(needed, evictions)
        except DeviceMemoryError:
            self._release_idle_memory(needed)
            supplies = self._supply(needed, evictions, last=True)
        self._prepare(supplies)
        if any(evictions):
            self._shrink(spare=needed)  # what one group gave up for another

    def _has_open(self, needed: Sequence[int]) -> bool:
        """Whether each group has `needed` free pages with memory, and nobody has to give way."""
        for count, group in zip(needed, self._groups, strict=True):
            if count > group.allocator.num_open_free:
                return False
        return self._bytes_open(needed) <= self._budget

    def _bytes_open(self, needed: Sequence[int]) -> int:
        """Bytes of all pages with memory behind them, once each group has `needed` free ones."""
        pages = [
            group.allocator.num_used
            + group.allocator.num_cached
            + max(count, group.allocator.num_open_free)
            for count, group in zip(needed, self._groups, strict=True)
        ]
        return sum(n * group.bytes_per_page for n, group in zip(pages, self._groups, strict=True))

    def _prepare(self, supplies: Sequence[Supply]) -> None:
        """Open what `_supply` has mapped, and evict what it counted on."""
        for index, (group, supply) in enumerate(zip(self._groups, supplies, strict=True)):
            for chunk in supply.chunks:
                self._retired.pop((index, chunk), None)
            group.allocator.prepare(supply)

    def _available(self, needed: Sequence[int], room: int) -> int:
        """How many of `needed` pages could be had with `room` bytes."""
        available = 0
        for num_pages, group in zip(needed, self._groups, strict=True):
            count = min(num_pages, group.allocator.num_available, room // group.bytes_per_page)
            room -= count * group.bytes_per_page
            available += count
        return available

    def _plan_evictions(self, num_bytes: int) -> list[int]:
        """Cached pages of each group worth `num_bytes`, from the groups that hold most of them."""
        left = [g.allocator.num_cached * g.bytes_per_page for g in self._groups]
        evictions = [0] * len(left)
        while num_bytes > 0:
            index = max(range(len(left)), key=left.__getitem__)
            evictions[index] += 1
            left[index] -= self._groups[index].bytes_per_page
            num_bytes -= self._groups[index].bytes_per_page
        return evictions

    def _supply(
        self, needed: Sequence[int], evictions: Sequence[int], *, last: bool = False
    ) -> list[Supply]:
        """Where each group's `needed` pages come from, with memory mapped, but nothing opened yet.

        `evictions`: cached pages that go in any case. `last`: where there is no memory, the cached
        pages give way. Raises DeviceMemoryError, or if `last` OutOfPages; then nothing is mapped.
        """
        supplies: list[Supply] = []
        mapped: list[tuple[int, int]] = []
        try:
            for index, group in enumerate(self._groups):
                # Pages evicted in any case are free ones of open chunks.
                missing = max(0, needed[index] - evictions[index])
                supply = group.allocator.plan(missing)
                try:
                    self._map(index, supply.chunks, mapped)
                except DeviceMemoryError as error:
                    if not last:
                        raise
                    opened = tuple(chunk for owner, chunk in mapped if owner == index)
                    rest = missing - group.allocator.num_open_free
                    rest -= sum(len(group.allocator.chunk_pages(chunk)) for chunk in opened)
                    lacking = rest - (group.allocator.num_cached - evictions[index])
                    if lacking > 0:
                        raise OutOfPages(
                            sum(needed),
                            sum(needed) - lacking,
                            f"the device has no memory left to map ({error})",
                        ) from error
                    supply = Supply(opened, rest)
                supplies.append(Supply(supply.chunks, supply.evictions + evictions[index]))
        except BaseException:
            for place in mapped:
                self._retired.setdefault(place, [])  # no kernel has come to know of it
            raise
        return supplies

    def _map(self, index: int, chunks: Sequence[int], mapped: list[tuple[int, int]]) -> None:
        """Put memory behind `chunks`, and note them in `mapped`. Raises DeviceMemoryError."""
        group = self._groups[index]
        for chunk in chunks:
            # What is retired has its memory still; so has what another thread has seen to.
            if (index, chunk) not in self._retired and not self._ahead.take((index, chunk)):
                self._ahead.wait()
                group.store.map(*group.chunk_bytes(chunk))
            mapped.append((index, chunk))

    def _release_idle_memory(self, needed: Sequence[int]) -> None:
        """Give back all memory but what holds pages or will hold `needed` free ones."""
        self._shrink(keep=0, spare=needed)
        self._unmap_retired(wait=True)
        _empty_torch_cache()

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        """Make `copies`. Raises OutOfPages where the device has no memory even for that."""
        try:
            for index, group in enumerate(self._groups):
                pairs = [(copy.source, copy.target) for copy in copies if copy.group == index]
                if pairs:
                    self.use_stream(group.device)
                    source, target = torch.tensor(pairs, device="cpu").T
                    ops.copy_pages(group.pages, source, target)
        except torch.OutOfMemoryError as error:
            hint = f"the device has no memory left to copy shared pages ({error})"
            raise OutOfPages(len(copies), 0, hint) from error

    def _shrink(self, keep: int = WATERMARK, spare: Sequence[int] | None = None) -> None:
        """Close wholly free chunks beyond `keep` bytes, the highest first to go.

        `spare`: free pages of each group that shall keep their memory. With other memory, or
        without `keep`, what was mapped ahead goes as well.
        """
        if self._closed:
            return
        events: dict[torch.device, list[torch.cuda.Event]] = {}
        is_all = not keep
        for index, group in enumerate(self._groups):
            if not group.store.elastic:
                continue
            allocator = group.allocator
            empty = {chunk: len(allocator.chunk_pages(chunk)) for chunk in allocator.empty_chunks()}
            wanted = 0
            if spare is not None:
                wanted = spare[index] - (allocator.num_open_free - sum(empty.values()))
            keep -= group.chunk_bytes(0)[1]  # which is never given back
            for chunk, num_pages in empty.items():
                keep -= num_pages * group.bytes_per_page
                if wanted > 0:
                    wanted -= num_pages
                elif keep < 0:
                    if group.device not in events:
                        events[group.device] = self._record_events(group.device)
                    allocator.close_chunk(chunk)
                    self._retired[index, chunk] = events[group.device]
        if is_all or events:
            self._retired.update((chunk, []) for chunk in self._ahead.drop())
        self._unmap_retired(wait=False)

    def _record_events(self, device: torch.device) -> list[torch.cuda.Event]:
        """Events after the last kernel that could touch pages on `device`."""
        return [stream.record_event() for stream in list(self._streams.get(device, {}).values())]

    def _unmap_retired(self, *, wait: bool) -> None:
        """Unmap closed chunks whose last readers are done; with `wait`, wait for these."""
        ready: dict[int, list[int]] = {}
        for (index, chunk), events in self._retired.items():
            if wait:
                for event in events:
                    event.synchronize()
            if all(event.query() for event in events):
                ready.setdefault(index, []).append(chunk)
        if ready:
            self._ahead.wait()
        for index, chunks in ready.items():
            group = self._groups[index]
            group.store.unmap([group.chunk_bytes(chunk) for chunk in chunks])
            for chunk in chunks:  # only now: what failed, or was interrupted, is tried again
                del self._retired[index, chunk]

    def _end_export(self, group: int, pages: Sequence[int]) -> None:
        self._exports -= 1
        if not self._closed:
            self._groups[group].allocator.release(pages[::-1])
        elif not self._exports:
            self._finalizer()


def _empty_torch_cache() -> None:
    """Have torch give the memory back that it keeps for later tensors."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _end(stores: Sequence[tuple[Store, torch.device]], ahead: MappedAhead) -> None:
    ahead.close(functools.partial(_close_stores, stores))


def _close_stores(stores: Sequence[tuple[Store, torch.device]]) -> None:
    for store, device in stores:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        store.close()


class _Export:
    """Alive as long as any view of some exported pages is."""


@dataclass(frozen=True)
class _ExportEnd:
    """What is left to do when the last view of some exported pages is gone."""

    pool: PagePool
    group: int
    pages: Sequence[int]

    def release(self) -> None:
        self.pool._end_export(self.group, self.pages)


def _open(
    geometry: KVGeometry, max_pages: int | None, max_memory: int | float | str | None
) -> tuple[int, list[_Group]]:
    """(budget, layer groups with their stores open)."""
    budget, num_pages = _budget(geometry, max_pages, max_memory)
    least = total_bytes_per_page(geometry.groups)
    while True:
        try:
            with contextlib.ExitStack() as undo:
                groups = []
                for group, pages in zip(geometry.groups, num_pages, strict=True):
                    num_bytes = (pages + 1) * bytes_per_page(group)
                    device = torch.device(group.shape.device)
                    store = open_store(num_bytes, device)
                    undo.callback(_close_stores, [(store, device)])
                    groups.append(_Group(group, pages, store))
                undo.pop_all()
            return budget, groups
        except DeviceMemoryError as error:
            if max_pages is not None or max_memory is not None or budget // 2 < least:
                raise OutOfPages(
                    sum(num_pages),
                    0,
                    f"the system refuses to reserve that much ({error}); pass max_memory=",
                ) from error
        # The default cap is more than the system allows (strict overcommit, ulimit): a smaller one.
        budget, num_pages = _budget(geometry, None, budget // 2)


def check_max_pages(max_pages: int | None) -> None:
    """Raise GeometryError for a number of pages that makes no pool."""
    if max_pages is not None and not (isinstance(max_pages, int) and 1 <= max_pages <= MAX_PAGE_ID):
        raise GeometryError(
            expected(
                "max_pages", f"an int from 1 to {MAX_PAGE_ID}", max_pages, "pass None for no limit"
            )
        )


def _budget(
    geometry: KVGeometry, max_pages: int | None, max_memory: int | float | str | None
) -> tuple[int, list[int]]:
    """(bytes that used and cached pages may take together, usable page ids of each group)."""
    groups = geometry.groups
    check_max_pages(max_pages)
    if max_pages is not None and max_memory is None:
        return max_pages * total_bytes_per_page(groups), [max_pages] * len(groups)
    devices = {torch.device(group.shape.device) for group in groups}
    free = {device: free_bytes(device) for device in devices}
    budget = sum(free.values())
    elastic = all(map(is_elastic, devices))
    if max_memory is None:
        fraction = 1 - RESERVE_FRACTION if elastic else PLAIN_FRACTION
        budget = int(budget * fraction)
    else:
        budget = parse_memory(max_memory, budget)
    least = total_bytes_per_page(groups)
    if budget < least:
        raise GeometryError(
            expected("max_memory", f"at least {least} bytes (a page a group)", budget, "raise it")
        )
    # Groups compete for the budget, so each has ids for all of it; memory that is taken at once is
    # shared out once and for all.
    most = [
        min(budget // (bytes_per_page(group) if elastic else least), MAX_PAGE_ID)
        for group in groups
    ]
    if max_pages is not None:
        most = [min(pages, max_pages) for pages in most]
    return budget, most
