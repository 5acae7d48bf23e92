"""Which store a device gets."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pageforge.errors import UnsupportedModel
from pageforge.store import cpu, cuda
from pageforge.store.base import DeviceMemoryError, Store
from pageforge.store.plain import PlainStore


def backend_of(device: torch.device) -> str:
    """The name of the store that `open_store` would open on `device`, for `pageforge info`."""
    return _store_type(device).name


def is_elastic(device: torch.device) -> bool:
    """Whether the store of `device` gives memory back before it is closed."""
    return _store_type(device).elastic


def open_store(num_bytes: int, device: torch.device) -> Store:
    """A store of `num_bytes` on `device`.

    Raises DeviceMemoryError where so much cannot even be reserved, and UnsupportedModel for a
    device that cannot hold pages.
    """
    store_type = _store_type(device)
    if store_type is cpu.MmapStore:
        # Where such a mapping is refused, an ordinary allocation may not be.
        with contextlib.suppress(DeviceMemoryError):
            return cpu.MmapStore(num_bytes)
        store_type = PlainStore
    return store_type(num_bytes, device)


def _store_type(device: torch.device) -> Any:
    if device.type == "cpu":
        return cpu.MmapStore if cpu.supported() else PlainStore
    if device.type == "cuda":
        return cuda.VirtualMemoryStore if cuda.supported(device) else PlainStore
    raise UnsupportedModel(
        f"device: expected cpu or cuda, got {device}; on {device.type} PageForge has no kernels "
        f"and no elastic memory, so that a paged cache would only be slower: use DynamicCache there"
    )
