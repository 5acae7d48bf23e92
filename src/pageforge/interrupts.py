"""Ctrl-C, held back while something is done that must not be left half-done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C takes effect when the block is over; pressed once more, at once.

    Python raises KeyboardInterrupt between any two operations of the main thread, so that whatever
    takes several would have to be prepared for it everywhere. Other threads are never interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):  # nobody is, or it means something else
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            handler(number, frame)
        came.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
