"""SequenceBatch: rows that advance together, as a model's forward sees them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.geometry import pages_for
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
        self._mirrors = [
            _PageTableMirror(len(self.tables), torch.device(group.shape.device))
            for group in pool.geometry.groups
        ]
        self._behind_from = UP_TO_DATE  # the first logical page that the mirrors may have wrong
        self._slots: dict[tuple[int, int, int], Tensor] = {}  # one step's, for all layers

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def length(self) -> int:
        """Tokens of each row, left padding included."""
        return self.tables[0].length if self.tables else 0

    # --- changes: each on all rows, or on none where it raises ------------------------------

    def append(self, num_tokens: int) -> None:
        """Room for `num_tokens` more tokens in each row. Raises OutOfPages."""
        size = self.pool.geometry.page_size
        length, behind_from = self.length, self._behind_from
        # Should anything fail from here on, the mirrors are brought up to date when next read.
        self._behind_from = min(behind_from, length // size)
        copies = self.pool.append(self.tables, num_tokens)
        # The last page is another one only after copy-on-write, or after a crop into the padding.
        in_padding = any(length <= table.start for table in self.tables)
        low = length // size if copies or in_padding else pages_for(length, size)
        self._update_mirrors(min(low, behind_from), pages_for(self.length, size))

    def check_crop(self, length: int) -> None:
        """Raise CropError where `crop(length)` would; otherwise do nothing."""
        for table in self.tables:
            table.check_crop(length)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row. Raises CropError."""
        size, before = self.pool.geometry.page_size, self.length
        self.pool.crop(self.tables, length)
        self._update_mirrors(length // size, pages_for(before, size))

    def slide(self) -> None:
        """Release pages that left every window."""
        low, high = self.pool.slide(self.tables)
        self._update_mirrors(low, high)

    def select(self, rows: Sequence[int]) -> None:
        """Row `i` becomes a fork of the former row `rows[i]`; rows not named are released."""
        former = self.tables
        self.tables = [self.pool.fork(former[row]) for row in rows]
        self.pool.release(former)
        self._slots.clear()
        for mirror in self._mirrors:
            self.pool.use_stream(mirror.device)
            mirror.select(rows)

    def fork(self) -> SequenceBatch:
        """A second batch over the same pages (copy-on-write)."""
        child = SequenceBatch(self.pool, [])
        child.tables = [self.pool.fork(table) for table in self.tables]
        child._mirrors = [mirror.copy() for mirror in self._mirrors]
        child._behind_from = self._behind_from
        return child

    def restore(
        self, contents: Sequence[Tensor], rows: Sequence[Sequence[Sequence[int]]], length: int
    ) -> None:
        """Take saved pages as the contents of empty rows; see `PagePool.restore`."""
        starts = [table.start for table in self.tables]
        self.tables = self.pool.restore(contents, rows, starts, length)
        self._update_mirrors(0, pages_for(length, self.pool.geometry.page_size))

    def release(self) -> None:
        """Give all pages back; the rows are gone."""
        self.pool.release(self.tables)
        self.tables = []

    # --- what ops need ----------------------------------------------------------------------

    def page_table(self, group: int, start: int, stop: int) -> tuple[Tensor, int]:
        """The pages of positions `start` to `stop - 1`: (`[S, M]` int32, position of the first).

        Absent pages (left padding, out of the window) are page 0.
        """
        size = self.pool.geometry.page_size
        self._catch_up()
        low, high = start // size, pages_for(stop, size)
        return self._mirrors[group].device_table[:, low:high], low * size

    def slot_mapping(self, group: int, start: int, stop: int) -> Tensor:
        """Slots of positions `start` to `stop - 1` of each row: `[S * (stop - start)]` int64.

        The layers of one forward ask for the same slots: they are worked out once.
        """
        self._catch_up()
        key = (group, start, stop)
        if key not in self._slots:
            size = self.pool.geometry.page_size
            positions = np.arange(start, stop)
            page_ids = self._mirrors[group].host[:, positions // size].astype(np.int64)
            slots = np.where(page_ids > 0, page_ids * size + positions % size, -1)
            self._slots[key] = torch.from_numpy(slots.ravel()).to(self._mirrors[group].device)
        return self._slots[key]

    def _update_mirrors(self, low: int, high: int) -> None:
        """Bring the device's entries of logical pages `low` to `high - 1` up to date."""
        self._slots.clear()
        for group, mirror in enumerate(self._mirrors):
            self.pool.use_stream(mirror.device)
            mirror.write([table.entries(low, high, group) for table in self.tables], low, high)
        self._behind_from = UP_TO_DATE

    def _catch_up(self) -> None:
        """Mend the mirrors after an append that failed half-way."""
        if self._behind_from != UP_TO_DATE:
            size = self.pool.geometry.page_size
            self._update_mirrors(self._behind_from, pages_for(self.length, size))


class _PageTableMirror:
    """`[S, capacity]` int32 page ids on the host, and the same on the device."""

    def __init__(self, num_rows: int, device: torch.device):
        self.device = device
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
        if self.device.type != "cpu":
            self.device_table[:, low:high] = torch.from_numpy(self.host[:, low:high]).to(
                self.device
            )

    def select(self, rows: Sequence[int]) -> None:
        self._set_host(self.host[list(rows)])

    def copy(self) -> _PageTableMirror:
        child = _PageTableMirror(0, self.device)
        child._set_host(self.host.copy())
        return child

    def _set_host(self, host: npt.NDArray[np.int32]) -> None:
        self.host = host
        with torch.inference_mode(False):  # else it could only be written to in that mode
            # On the CPU this shares the host's memory, and needs no further copies.
            self.device_table = torch.from_numpy(host).to(self.device)
