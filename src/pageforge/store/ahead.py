"""MappedAhead: memory that a thread of its own puts behind chunks before they are opened.

The driver takes the host some tenths of a millisecond to map memory, about as long as a whole
decode step may last. Its calls need neither Python's lock nor an idle device, so another thread can
make them while the step runs.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pageforge.store.base import DeviceMemoryError, Store

Chunk = tuple[int, int]
"""Layer group, and number of a chunk in it."""


class MappedAhead:
    """Chunks that are being mapped, or are mapped already, without being in use.

    A store is changed by one thread at a time: `wait` before it is mapped or unmapped otherwise.
    """

    def __init__(self) -> None:
        self._chunks: dict[Chunk, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "pageforge-map")  # which it starts when first used

    def begin(self, chunk: Chunk, store: Store, span: tuple[int, int]) -> None:
        """Have memory put behind the bytes `span` of `store`, unless that was asked for already."""
        if chunk not in self._chunks:
            self._chunks[chunk] = self._thread.submit(store.map, *span)

    def take(self, chunk: Chunk) -> bool:
        """Whether `chunk` is mapped; it is in use from now on. Raises DeviceMemoryError."""
        if chunk not in self._chunks:
            return False
        try:
            self._chunks[chunk].result()  # an interrupt meanwhile loses nothing
        except DeviceMemoryError:
            del self._chunks[chunk]
            raise
        del self._chunks[chunk]
        return True

    def wait(self) -> None:
        """Until nothing is being mapped."""
        wait(self._chunks.values())

    def drop(self) -> list[Chunk]:
        """The chunks that are mapped and were not taken, for the caller to unmap."""
        mapped = []
        for chunk, mapping in self._chunks.items():
            with contextlib.suppress(DeviceMemoryError):
                mapping.result()
                mapped.append(chunk)
        self._chunks.clear()
        return mapped

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
