"""What the screens read of a pool and a cache that these do not offer to everybody."""

from __future__ import annotations

from pageforge.hf.cache import PagedKVCache
from pageforge.memory import PageTable
from pageforge.pool import PagePool


def page_tables(cache: PagedKVCache) -> list[PageTable]:
    """The live page tables of a cache, one a row."""
    batch = cache._state.batch
    return [] if batch is None else list(batch.tables)


def chunk_pages(pool: PagePool, group: int) -> int:
    """Pages in the smallest chunk of a layer group."""
    return len(pool._groups[group].allocator.chunk_pages(0))
