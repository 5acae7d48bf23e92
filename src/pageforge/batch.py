"""SequenceBatch: rows that advance together, as a model's forward sees them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge import ops
from pageforge.geometry import pages_for
from pageforge.ops.launch import stream_handle
from pageforge.pool import PagePool

UP_TO_DATE = sys.maxsize


class SequenceBatch:
    """The page tables of a batch's rows, all of one length, and their copies on the device.

    `starts`: tokens of left padding of each row. A device copy is brought up to date by the columns
    that changed, not rebuilt.
    """

    def __init__(self, pool: PagePool, starts: Sequence[int]):
        self.pool = pool
        self.tables = [pool.new_table(start) for start in starts]
        self._ahead = pool.new_table()  # holds pages, no tokens: those that rows will claim next
        self._mirrors = [
            _PageTableMirror(len(self.tables), torch.device(group.shape.device))
            for group in pool.geometry.groups
        ]
        self._num_updates = 0  # of the device's page tables
        # Up to what length rows can grow in pages that they alone hold, and `pool.num_shares` then.
        self._room = (0, 0)
        self._behind_from = UP_TO_DATE  # the first logical page that the mirrors may have wrong
        self._steps: dict[tuple[int, int, int, int], StepTensors] = {}
        # group -> stream and DecodeSteps of the latest step, with which the next one goes on
        self._decodes: dict[int, tuple[int, _Decodes]] = {}
        self._paddings: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}  # the latest

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def length(self) -> int:
        """Tokens of each row, left padding included."""
        return self.tables[0].length if self.tables else 0

    @property
    def starts(self) -> tuple[int, ...]:
        """Tokens of left padding of each row, which are not stored where they fill pages."""
        return tuple([table.start for table in self.tables])

    @property
    def num_changes(self) -> int:
        """Counts the changes of the device's page tables, with one that is yet to be made."""
        return self._num_updates + (self._behind_from != UP_TO_DATE)

    # --- changes: each on all rows, or on none where it raises ------------------------------

    def append(self, num_tokens: int) -> None:
        """Room for `num_tokens` more tokens in each row. Raises OutOfPages."""
        self.pool.check_open()
        if self._has_room(num_tokens):  # most tokens of a decode: nothing is claimed or copied
            self._steps.clear()
            for table in self.tables:
                table.length += num_tokens
            return
        size = self.pool.geometry.page_size
        length, behind_from = self.length, self._behind_from
        # Should anything fail from here on, the mirrors are brought up to date when next read.
        self._behind_from = min(behind_from, length // size)
        copies = self.pool.append(self.tables, num_tokens, ahead=self._ahead)
        # The last page is another one only after copy-on-write, or after a crop into the padding.
        in_padding = any(length <= table.start for table in self.tables)
        low = length // size if copies or in_padding else pages_for(length, size)
        high = pages_for(self.length, size)
        self._update_mirrors(min(low, behind_from), high)
        if num_tokens and not in_padding:
            self._room = high * size, self.pool.num_shares

    def claim_ahead(self) -> None:
        """Claim some of the pages that rows need next: called at each token, all of them in time.

        Memory comes a little at each of a page's tokens (but the first, when rows take what was
        claimed), and not for all rows at once when their pages are full. What the next token claims
        and somewhat more is mapped meanwhile. Does nothing where pages are short.
        """
        size, num_rows = self.pool.geometry.page_size, len(self.tables)
        num_pages = num_rows * ((self.length - 1) % size) // (size - 1)
        if num_pages * size > self._ahead.length:
            self.pool.claim_ahead(self._ahead, num_pages)
        next_claim = max(0, num_rows * (self.length % size) // (size - 1) - num_pages)
        self.pool.map_ahead(next_claim + 1, and_a_part=True)
        for mirror in self._mirrors:  # streams are ordered now, and not when the step begins
            self.pool.use_stream(mirror.device)

    def drop_ahead(self) -> None:
        """Give back what `claim_ahead` claimed."""
        if self._ahead.length:
            self.pool.crop([self._ahead], 0)

    def _has_room(self, num_tokens: int) -> bool:
        until, num_shares = self._room
        return (
            0 <= num_tokens <= until - self.length
            and num_shares == self.pool.num_shares
            and self._behind_from == UP_TO_DATE
        )

    def check_crop(self, length: int) -> None:
        """Raise CropError where `crop(length)` would; otherwise do nothing."""
        for table in self.tables:
            table.check_crop(length)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row. Raises CropError."""
        size, before = self.pool.geometry.page_size, self.length
        self._room = (0, 0)
        self.pool.crop(self.tables, length)
        self._update_mirrors(length // size, pages_for(before, size))

    def slide(self) -> None:
        """Release pages that left every window."""
        low, high = self.pool.slide(self.tables)
        self._update_mirrors(low, high)

    def select(self, rows: Sequence[int]) -> None:
        """Row `i` becomes a fork of the former row `rows[i]`; rows not named are released."""
        for mirror in self._mirrors:
            self.pool.use_stream(mirror.device)
        mirrors = [mirror.copy(rows) for mirror in self._mirrors]  # should it fail, nothing has
        tables = [self.pool.fork(self.tables[row]) for row in rows]
        self.pool.release(self.tables)
        self.tables, self._mirrors = tables, mirrors
        self._room = (0, 0)
        self._steps.clear()
        self._num_updates += 1

    def fork(self) -> SequenceBatch:
        """A second batch over the same pages (copy-on-write)."""
        child = SequenceBatch(self.pool, [])
        # First what may find no memory: nobody would give back the pages of half a fork.
        child._mirrors = [mirror.copy() for mirror in self._mirrors]
        child.tables = [self.pool.fork(table) for table in self.tables]
        child._behind_from = self._behind_from
        return child

    def restore(
        self, contents: Sequence[Tensor], rows: Sequence[Sequence[Sequence[int]]], length: int
    ) -> None:
        """Take saved pages as the contents of empty rows; see `PagePool.restore`.

        Where that raises, the rows are gone.
        """
        starts = [table.start for table in self.tables]
        self._room = (0, 0)
        try:
            self.tables = self.pool.restore(contents, rows, starts, length)
            self._update_mirrors(0, pages_for(length, self.pool.geometry.page_size))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give all pages back; the rows are gone."""
        self.pool.release([*self.tables, self._ahead])
        self.tables, self._ahead = [], self.pool.new_table()
        self._room = (0, 0)
        self._steps.clear()
        self._decodes.clear()

    def abandon(self) -> None:
        """`release` for a finalizer: never blocks."""
        self.pool.abandon([*self.tables, self._ahead])
        self._steps.clear()  # they hold device memory, and this batch

    # --- what ops need ----------------------------------------------------------------------

    def page_table(self, group: int, start: int, stop: int) -> tuple[Tensor, int]:
        """The pages of positions `start` to `stop - 1`: (`[S, M]` int32, position of the first).

        Absent pages (left padding, out of the window) are page 0.
        """
        size = self.pool.geometry.page_size
        self._catch_up()
        low, high = start // size, pages_for(stop, size)
        return self._mirrors[group].device_table[:, low:high], low * size

    def step(self, group: int, start: int, stop: int) -> StepTensors:
        """What ops need to write and attend to positions `start` to `stop - 1` of each row.

        The layers of one forward ask for the same: it is worked out once, and the thread's stream
        is ordered then.
        """
        mirror = self._mirrors[group]
        device = mirror.device
        stream = stream_handle(device) if mirror.is_on_cuda else 0
        key = (group, start, stop, stream)
        step = self._steps.get(key)
        if step is None or self._behind_from != UP_TO_DATE:
            self._catch_up()
            self.pool.use_stream(device)
            former_stream, former = self._decodes.get(group, (stream, {}))
            step = StepTensors(self, group, start, stop, former if former_stream == stream else {})
            self._steps[key] = step
            self._decodes[group] = stream, step.decodes
        return step

    def slot_mapping(self, group: int, start: int, stop: int) -> Tensor:
        """Slots of positions `start` to `stop - 1` of each row: `[S * (stop - start)]` int64."""
        return self.step(group, start, stop).slot_mapping

    def padding(self, tokens: tuple[int, ...], device: torch.device) -> Tensor:
        """`tokens` of left padding of each row, `[S]` int32 on `device`; kept for the next step."""
        if (tokens, device) not in self._paddings:
            if any(known != tokens for known, _ in self._paddings):
                self._paddings.clear()
            self._paddings[tokens, device] = to_device(np.array(tokens, np.int32), device)
        return self._paddings[tokens, device]

    def _update_mirrors(self, low: int, high: int) -> None:
        """Bring the device's entries of logical pages `low` to `high - 1` up to date."""
        self._steps.clear()
        self._behind_from = min(self._behind_from, low)  # should anything fail from here on
        self._num_updates += low < high
        for group, mirror in enumerate(self._mirrors):
            self.pool.use_stream(mirror.device)
            mirror.write([table.entries(low, high, group) for table in self.tables], low, high)
        self._behind_from = UP_TO_DATE

    def _catch_up(self) -> None:
        """Mend the mirrors after a change that failed half-way."""
        if self._behind_from != UP_TO_DATE:
            size = self.pool.geometry.page_size
            self._update_mirrors(self._behind_from, pages_for(self.length, size))


class StepTensors:
    """What ops need of one step in one layer group; each is made when first asked for."""

    def __init__(self, batch: SequenceBatch, group: int, start: int, stop: int, former: _Decodes):
        """`former`: `decodes` of the step before, out of which this one takes what it uses."""
        self._batch = batch
        self._mirror = batch._mirrors[group]
        self.shape = batch.pool.geometry.groups[group].shape
        self.page_size = batch.pool.geometry.page_size
        self.start = start
        self.stop = stop
        self._former = former
        self.decodes: _Decodes = {}
        self._dense_decodes: dict[_Kind, ops.DenseDecode] = {}
        self._gathers: dict[int, ops.WriteAndGather] = {}  # by the oldest token that is wanted

    @cached_property
    def page_table(self) -> Tensor:
        """`[S, M]` int32: the pages of positions 0 to `stop - 1`."""
        return self._mirror.device_table[:, : pages_for(self.stop, self.page_size)]

    @cached_property
    def slot_mapping(self) -> Tensor:
        """`[S * (stop - start)]` int64: where the K/V of the step's tokens lie, row by row."""
        size = self.page_size
        positions = np.arange(self.start, self.stop)
        page_ids = self._mirror.host[:, positions // size].astype(np.int64)
        slots = np.where(page_ids > 0, page_ids * size + positions % size, -1)
        return to_device(slots.ravel(), self._mirror.device)

    @cached_property
    def seq_lens(self) -> Tensor:
        """`[S]` int32: tokens of each row after the step."""
        return torch.full(
            (len(self._batch),), self.stop, dtype=torch.int32, device=self._mirror.device
        )

    @cached_property
    def cu_query_lens(self) -> Tensor:
        """`[S + 1]` int32: row `s` asks with the step's tokens `cu[s]` to `cu[s + 1] - 1`."""
        rows = torch.arange(len(self._batch) + 1, dtype=torch.int32, device=self._mirror.device)
        return rows * (self.stop - self.start)

    def starts(self, padding: tuple[int, ...] | None) -> Tensor | None:
        """`[S]` int32: tokens of left padding of each row, on the device."""
        return None if padding is None else self._batch.padding(padding, self._mirror.device)

    def decode(
        self, key_pages: Tensor, window: int | None, padding: tuple[int, ...] | None
    ) -> ops.DecodeSteps | None:
        """The steps of which this is one, of one query a row; None on the CPU.

        `key_pages`: of any layer.
        """
        kind = window, padding
        steps = self.decodes.get(kind)
        if steps is None and ops.plans(key_pages):
            room = pages_for(self.stop, self.page_size) * self.page_size
            table = self._mirror.device_table
            steps = self._former.pop(kind, None)  # no other step may use its plan from now on
            if steps is None or not steps.serves(table, room):
                steps = ops.DecodeSteps(table, key_pages, room, window, self.starts(padding))
            steps.begin(self.stop, room)
            self.decodes[kind] = steps
        return steps

    def dense_decode(
        self,
        key_pages: Tensor,
        value_pages: Tensor,
        window: int | None,
        padding: tuple[int, ...] | None,
    ) -> ops.DenseDecode:
        """The step, of one query a row, as the CPU takes it. The pages are those of any layer."""
        kind = window, padding
        if kind not in self._dense_decodes:
            self._dense_decodes[kind] = ops.DenseDecode(
                key_pages,
                value_pages,
                self.page_table,
                self.seq_lens,
                window,
                self.starts(padding),
            )
        return self._dense_decodes[kind]

    def write_and_gather(
        self, oldest: int, key_pages: Tensor, value_pages: Tensor
    ) -> ops.WriteAndGather:
        """Writes the step's tokens of a layer, and gathers them and all others from `oldest` on.

        `key_pages`, `value_pages`: of any layer.
        """
        made = self._gathers.get(oldest)
        if made is None:
            low = oldest // self.page_size
            first = low * self.page_size
            new = range(self.start - first, self.stop - first)
            table = self.page_table[:, low:]
            made = ops.write_and_gather(key_pages, value_pages, table, oldest - first, new)
            self._gathers[oldest] = made
        return made


_Kind = tuple[int | None, tuple[int, ...] | None]
"""Window and left padding: what attention of a step's layers may differ in."""

_Decodes = dict[_Kind, ops.DecodeSteps]


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` as a tensor; on the CPU it shares the memory.

    The host does not wait: the copy is made from pinned memory, which torch keeps until it is done.
    From pageable memory, where torch would put what has gaps on its way, CUDA may first wait for
    all that was launched before.
    """
    if device.type != "cuda":
        return torch.from_numpy(array).to(device)
    dense = torch.from_numpy(np.ascontiguousarray(array))
    return dense.pin_memory().to(device, non_blocking=True)


class _PageTableMirror:
    """`[S, capacity]` int32 page ids on the host, and the same on the device."""

    def __init__(self, num_rows: int, device: torch.device):
        self.device = device
        self.is_on_cuda = device.type == "cuda"
        self._set_host(np.zeros((num_rows, 0), np.int32))

    def write(self, entries: Sequence[Sequence[int]], low: int, high: int) -> None:
        """Set logical pages `low` to `high - 1` of all rows."""
        if low >= high:
            return
        if high > self.host.shape[1]:
            # Doubled, so that growing costs O(1) a page.
            grown = np.zeros((self.host.shape[0], max(high, 2 * self.host.shape[1])), np.int32)
            grown[:, : self.host.shape[1]] = self.host
            self._set_host(grown)
        self.host[:, low:high] = entries
        if self.device.type == "cpu":
            return  # the device's is the same memory
        changed = self.host[:, low:high]
        if changed.size == 1:  # the next page of a batch of one: it travels with the launch
            self.device_table[:, low:high].fill_(changed.item())
        else:
            self.device_table[:, low:high] = to_device(changed, self.device)

    def copy(self, rows: Sequence[int] | None = None) -> _PageTableMirror:
        """A second one, of these rows; None: of all."""
        child = _PageTableMirror(0, self.device)
        child._set_host(self.host.copy() if rows is None else self.host[list(rows)])
        return child

    def _set_host(self, host: npt.NDArray[np.int32]) -> None:
        with torch.inference_mode(False):  # else it could only be written to in that mode
            # On the CPU this shares the host's memory, and needs no further copies.
            device_table = to_device(host, self.device)
        self.host, self.device_table = host, device_table  # both, or none if memory was lacking
