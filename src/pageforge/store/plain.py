"""PlainStore: one ordinary allocation, where nothing better is to be had."""

from __future__ import annotations

import torch

from pageforge.store.base import DeviceMemoryError
from pageforge.store.cpu import owned_tensor


class PlainStore:
    """All memory at once, until `close`. For systems without virtual-memory calls."""

    name = "one ordinary allocation (not elastic)"
    elastic = False
    maps = False

    def __init__(self, num_bytes: int, device: torch.device):
        """Raises DeviceMemoryError."""
        try:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise DeviceMemoryError(f"allocation of {num_bytes} bytes: {error}") from error

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.view(dtype)

    def map(self, start: int, stop: int) -> None:
        """Nothing to do: everything is mapped."""

    def unmap(self, ranges: list[tuple[int, int]]) -> None:
        """Nothing to give back before `close`."""

    def bytes_mapped(self, high_water: int) -> int:
        return self._bytes.numel()

    def export(self, start: int, stop: int, owner: object) -> torch.Tensor:
        if self._bytes.device.type != "cpu":
            raise NotImplementedError(
                "exporting pages without a copy needs an elastic store on this device; copy them "
                "from pool.pages(group) instead"
            )
        return owned_tensor(self._bytes[start:stop].numpy(), owner)

    def close(self) -> None:
        self._bytes = self._bytes[:0].clone()
