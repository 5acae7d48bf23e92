"""What every store offers."""

from __future__ import annotations

from typing import Protocol

import torch

GRANULE = 2 << 20
"""Bytes that are mapped at least: CUDA's granule for device memory and Linux' huge page."""


class DeviceMemoryError(Exception):
    """The device or the system has no memory left to map. Never leaves the pool."""


class Store(Protocol):
    """A range of addresses. Byte ranges in it are mapped before they are used, and unmapped after.

    Ranges are a pool's chunks: they follow each other without gaps, and need not be aligned.
    """

    name: str
    """What backs it, for people."""

    elastic: bool
    """Whether `unmap` gives memory back before `close`."""

    maps: bool
    """Whether `map` has something to do: it does not where memory comes with the first write."""

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, 1-D. Only mapped parts may be touched."""

    def map(self, start: int, stop: int) -> None:
        """Put memory behind bytes `start` to `stop - 1`, or raise DeviceMemoryError.

        What is mapped already stays.
        """

    def unmap(self, ranges: list[tuple[int, int]]) -> None:
        """Give the memory of mapped ranges back; what lay there is lost.

        Ranges that are not mapped are left alone, so that a call that failed can be made again.
        """

    def bytes_mapped(self, high_water: int) -> int:
        """Bytes that the system has given, as it says; none were mapped past `high_water`."""

    def export(self, start: int, stop: int, owner: object) -> torch.Tensor:
        """Mapped bytes as a uint8 tensor; `owner` lives as long as any view of it does."""

    def close(self) -> None:
        """Give everything back. Tensors handed out by `tensor` must not be used any more."""
