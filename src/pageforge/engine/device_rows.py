"""DeviceRows: what the device has of each row, its last token and its page tables.

It stays where it is, so that captured steps can read it, and so that a step can be launched before
the host knows what the last one gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pageforge.batch import to_device


class DeviceRows:
    """The rows of a runner on the device.

    `last_tokens [R]` int64. `page_tables`: `[R, M]` int32 for each layer group; `host_tables` are
    what they are to be, as numpy arrays. The pages that rows gain travel with a step that decodes,
    or, where they are more than it has rows, in a copy of their own.
    """

    def __init__(self, device: torch.device, num_groups: int, max_rows: int, max_pages: int):
        """`max_pages`: that a row may come to have."""
        self._device = device
        with torch.inference_mode(False):  # else they could only be written to in that mode
            self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
            # A place more, to which changes go that are none.
            self._flat_tables = [
                torch.zeros(max_rows * max_pages + 1, dtype=torch.int32, device=device)
                for _ in range(num_groups)
            ]
            self.page_tables = [flat[:-1].view(max_rows, max_pages) for flat in self._flat_tables]
        self.host_tables = [np.zeros((max_rows, max_pages), np.int32) for _ in range(num_groups)]
        self._changed: list[list[int]] = [[] for _ in range(num_groups)]  # in the flat tables

    def __len__(self) -> int:
        return len(self.last_tokens)

    def keep_tokens(self, rows: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """`tokens [R]` are the last ones of `rows`, for the next step to read on the device."""
        if len(rows) and rows[-1] == len(rows) - 1:
            self.last_tokens[: len(rows)].copy_(tokens)
        else:
            self.last_tokens.index_copy_(0, to_device(rows, self._device), tokens)

    def move_row(self, source: int, target: int) -> None:
        """Row `target` takes over what row `source` has."""
        self.send_changes()
        self.last_tokens[target] = self.last_tokens[source]
        for host, table in zip(self.host_tables, self.page_tables, strict=True):
            host[target] = host[source]
            table[target] = table[source]

    # --- page tables ------------------------------------------------------------------------

    def set_pages(self, group: int, row: int, first: int, page_ids: list[int]) -> None:
        """`page_ids`: a row's pages from logical page `first` on. The device lacks them yet."""
        table = self.host_tables[group]
        table[row, first : first + len(page_ids)] = page_ids
        start = row * table.shape[1] + first
        self._changed[group].extend(range(start, start + len(page_ids)))

    @property
    def num_changes(self) -> int:
        """Pages that the device lacks, of the layer group in which it lacks most."""
        return max(map(len, self._changed))

    def send_changes(self) -> None:
        """Bring the device's page tables up to date: one copy a group, however many rows grew."""
        for group, changed in enumerate(self._changed):
            if changed:
                places = np.array(changed)
                page_ids = self.host_tables[group].reshape(-1)[places]
                both = to_device(np.stack([places, page_ids]), self._device)
                self._flat_tables[group].index_copy_(0, both[0], both[1].int())
                changed.clear()

    def changes(self, count: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]]:
        """Those pages, for a step to bring: `[count]` places and page ids for each layer group.

        There are at most `count`. They are remembered until `forget_changes`, for a step may fail.
        """
        changes = []
        for table, flat, changed in zip(
            self.host_tables, self._flat_tables, self._changed, strict=True
        ):
            places, page_ids = np.full(count, len(flat) - 1), np.zeros(count, np.int32)
            if changed:
                places[: len(changed)] = changed
                page_ids[: len(changed)] = table.reshape(-1)[changed]
            changes.append((places, page_ids))
        return changes

    def apply(self, changes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take over what a step brings: places `[C]` int64 and page ids `[C]` int32 a group.

        A mixed step brings none.
        """
        for flat, (places, page_ids) in zip(self._flat_tables, changes, strict=False):
            flat.index_copy_(0, places, page_ids)

    def forget_changes(self) -> None:
        """They are part of a step that was launched."""
        for changed in self._changed:
            changed.clear()
