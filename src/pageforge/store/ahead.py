"""MappedAhead: memory that a thread of its own puts behind chunks before they are opened.

The driver takes the host some tenths of a millisecond to map memory, about as long as a whole
decode step may last. Its calls need neither Python's lock nor an idle device, so another thread can
make them while the step runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pageforge.store.base import Store

Chunk = tuple[int, int]
"""Layer group, and number of a chunk in it."""


class MappedAhead:
    """Chunks that are being mapped, or are mapped already, without being in use.

    A store is changed by one thread at a time: `wait` before it is mapped or unmapped otherwise.
    """

    def __init__(self) -> None:
        self._chunks: dict[Chunk, Future[None]] = {}
        self._thread_id = 0
        # It starts its thread when it is first used.
        self._thread = ThreadPoolExecutor(1, "pageforge-map", self._begin_thread)

    def _begin_thread(self) -> None:
        self._thread_id = threading.get_ident()

    @property
    def is_this_thread(self) -> bool:
        """Whether the thread that maps is the caller's: garbage collection brought it here.

        It must wait for nothing, for others may wait for what it was doing.
        """
        return threading.get_ident() == self._thread_id

    def chunks(self, group: int) -> list[int]:
        """Those of a layer group, by number."""
        return [chunk for owner, chunk in list(self._chunks) if owner == group]

    def begin(self, chunk: Chunk, store: Store, span: tuple[int, int]) -> None:
        """Have memory put behind the bytes `span` of `store`, unless that was asked for already."""
        if chunk in self._chunks:
            return
        try:
            self._chunks[chunk] = self._thread.submit(store.map, *span)
        except RuntimeError:  # no thread is to be had, or Python ends: who needs it will map it
            self._thread.shutdown(wait=False)  # what was put in its queue is never begun

    def take(self, chunk: Chunk) -> bool:
        """Whether `chunk` is mapped, and in use from now on; what failed is the caller's to try."""
        if chunk not in self._chunks:
            return False
        wait([self._chunks[chunk]])  # an interrupt meanwhile loses nothing
        return self._chunks.pop(chunk).exception() is None

    def wait(self) -> None:
        """Until nothing is being mapped."""
        wait(self._chunks.values())

    def drop(self) -> list[Chunk]:
        """The chunks that are mapped and were not taken, for the caller to unmap."""
        self.wait()
        mapped = [chunk for chunk, mapping in self._chunks.items() if mapping.exception() is None]
        self._chunks.clear()
        return mapped

    def close(self, then: Callable[[], None]) -> None:
        """End the thread when it has done what it does, and call `then`."""
        if self.is_this_thread:
            self._thread.submit(then)
            self._thread.shutdown(wait=False)
        else:
            self._thread.shutdown()
            self._thread_id = 0  # another thread may get it now
            then()
