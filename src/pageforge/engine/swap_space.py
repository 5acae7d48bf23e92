"""SwapSpace: pinned host memory for the pages of preempted sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pageforge.memory import PageTable
from pageforge.pool import PagePool


@dataclass(frozen=True)
class Swapped:
    """The pages of one sequence on the host: `[pages, page elements]` for each layer group."""

    contents: list[Tensor]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""
        return sum(content.nbytes for content in self.contents)


class SwapSpace:
    """Keeps at most `max_bytes` of pages on the host."""

    def __init__(self, pool: PagePool, max_bytes: int):
        self._pool = pool
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Taken now."""

    def put(self, table: PageTable, num_tokens: int) -> Swapped | None:
        """Copy the pages of the first `num_tokens` tokens out, on the current stream.

        None, and nothing happens, where there is no room, or no memory that the host can pin. The
        table keeps its pages; they may be released at once, for who writes to them next comes later
        on the stream.
        """
        if self.num_bytes + self._pool.num_bytes(table, num_tokens) > self.max_bytes:
            return None
        try:
            contents = self._pool.save(table, num_tokens)
        except RuntimeError:  # CUDA's, which says no more than that
            return None
        swapped = Swapped(contents, num_tokens)
        self.num_bytes += swapped.num_bytes
        return swapped

    def take(self, swapped: Swapped) -> PageTable:
        """A page table over the pages, back in the pool; `swapped` must live until that is done.

        Raises OutOfPages.
        """
        rows = [[range(len(content)) for content in swapped.contents]]
        (table,) = self._pool.restore(swapped.contents, rows, [0], swapped.num_tokens)
        return table

    def drop(self, swapped: Swapped) -> None:
        """Its room is free again."""
        self.num_bytes -= swapped.num_bytes

    def finish_copies(self) -> None:
        """Wait until all copies from and to the host are done."""
        for name in {group.shape.device for group in self._pool.geometry.groups}:
            device = torch.device(name)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
