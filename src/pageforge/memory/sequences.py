"""SequenceAllocator: the block-manager interface of the PagedAttention paper, on our allocator."""

from __future__ import annotations

from collections.abc import Hashable

from pageforge.errors import PageError
from pageforge.memory.allocator import PageAllocator


class SequenceAllocator:
    """Pages by sequence id: the smallest way to use a PageAllocator.

    >>> sequences = SequenceAllocator(PageAllocator(num_pages=512))
    >>> sequences.alloc_for_seq("a", 3)
    [1, 2, 3]
    >>> sequences.free_seq("a")
    3
    >>> sequences.free_pages()
    512
    """

    def __init__(self, allocator: PageAllocator):
        self._allocator = allocator
        self._pages: dict[Hashable, list[int]] = {}

    def alloc_for_seq(self, seq_id: Hashable, num_pages: int) -> list[int]:
        """Append `num_pages` pages to the block table of `seq_id`; returns the new pages' ids.

        Raises OutOfPages, and then nothing has changed.
        """
        held = self._pages.get(seq_id)
        pages = self._allocator.allocate(num_pages)
        if held is None:
            held = self._pages[seq_id] = []
        held.extend(pages)
        return pages

    def block_table(self, seq_id: Hashable) -> list[int]:
        """The pages of `seq_id`, in order."""
        return list(self._known(seq_id))

    def free_seq(self, seq_id: Hashable) -> int:
        """Give back all pages of `seq_id`; returns how many. Raises PageError if it has none."""
        pages = self._known(seq_id)
        self._allocator.release(pages[::-1])
        del self._pages[seq_id]
        return len(pages)

    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._allocator.num_available

    def _known(self, seq_id: Hashable) -> list[int]:
        if seq_id not in self._pages:
            raise PageError(
                f"sequence {seq_id!r}: expected one that holds pages, got an unknown id; "
                f"free each sequence once"
            )
        return self._pages[seq_id]
