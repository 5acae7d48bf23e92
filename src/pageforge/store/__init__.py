"""Where pages lie: one flat range of addresses whose physical memory comes and goes."""

from pageforge.store.base import DeviceMemoryError, Store
from pageforge.store.cpu import MmapStore
from pageforge.store.cuda import VirtualMemoryStore
from pageforge.store.plain import PlainStore
from pageforge.store.select import backend_of, is_elastic, open_store
from pageforge.store.sizes import free_bytes, parse_memory

__all__ = [
    "DeviceMemoryError",
    "MmapStore",
    "PlainStore",
    "Store",
    "VirtualMemoryStore",
    "backend_of",
    "free_bytes",
    "is_elastic",
    "open_store",
    "parse_memory",
]
