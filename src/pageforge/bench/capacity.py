"""How many sequences fit: a pool that is filled, and other caches in as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from transformers.cache_utils import Cache

from pageforge.bench.growth import OwnBytes, check_bytes
from pageforge.bench.harness import failure
from pageforge.bench.memory_use import MemoryUse, Meter, check_room, storage_bytes
from pageforge.bench.report import mb, table
from pageforge.bench.vram_context import BASE, VramBench, Way, paged
from pageforge.errors import OutOfPages
from pageforge.geometry import total_bytes_per_page
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import PagePool


@dataclass(frozen=True)
class Filled:
    """How many sequences there were and what they took; pages, if they lay in a pool."""

    storage_bytes: int
    mapped_bytes: int | None
    sequences: int
    pages_claimed: int | None = None
    pages_returned: int | None = None


def most_sequences(bench: VramBench) -> None:
    """A pool filled with sequences until it has no page left, and other caches in as many bytes."""
    for step in bench.filled_at:
        if bench.budget.allows(f"most sequences, step {step}"):
            _most_sequences(bench, step, bench.prompt + step)


def _most_sequences(bench: VramBench, step: int, tokens: int) -> None:
    case = {"step": step, "tokens": tokens}
    records = [_attempt(bench, BASE, case, partial(fill_pool, bench, tokens))]
    limit = records[0].get("storage_bytes")
    for name, way in bench.ways.items():
        if limit is not None and way.make is not paged and way.holds(tokens):
            fill = partial(fill_bytes, bench, way, tokens, limit)
            records.append(_attempt(bench, name, case, fill))
    rows = [
        (r["way"], r["failure"])
        if "failure" in r
        else (r["way"], r["sequences"], mb(r["storage_bytes"]), r["pages_claimed"])
        for r in records
    ]
    title = f"sequences of {tokens} tokens that fit in {bench.pool_pages} pages, or as many bytes"
    bench.console.print(table(title, ("way", "sequences", "MB", "pages"), rows))
    bench.console.print()


def _attempt(
    bench: VramBench, way: str, case: dict[str, int], fill: Callable[[], Filled]
) -> dict[str, Any]:
    """The record of what `fill` found, or of why it failed."""
    try:
        found = asdict(fill())
    except Exception as error:  # whatever it is, the others go on
        found = {"failure": failure(error)}
    return bench.report.add(section="most-sequences", way=way, **case, **found)


def fill_pool(bench: VramBench, tokens: int) -> Filled:
    """Sequences, each with a cache of its own, into one pool until it raises OutOfPages."""
    meter = Meter(bench.device)
    check_room(bench.device, bench.pool_pages * total_bytes_per_page(bench.kv.geometry.groups))
    with PagePool(bench.kv.geometry, max_pages=bench.pool_pages) as pool:
        caches: list[PagedKVCache] = []
        try:
            while len(caches) <= bench.pool_pages:
                caches.append(PagedKVCache(pool))
                bench.kv.feed(caches[-1], 1, tokens)
        except OutOfPages:
            caches.pop().free()
        else:
            raise ArithmeticError(f"no OutOfPages from {bench.pool_pages} pages")
        mapped, stats = meter.read().mapped_bytes, pool.stats()
        for cache in caches:
            cache.free()
        returned = stats.pages_used - pool.stats().pages_used
        return Filled(stats.bytes_mapped, mapped, len(caches), stats.pages_used, returned)


def fill_bytes(bench: VramBench, way: Way, tokens: int, limit: int) -> Filled:
    """Sequences, each with a cache of its own, as long as their storages take `limit` at most."""
    meter = Meter(bench.device)
    check_room(bench.device, limit)
    caches: list[Cache] = []
    taken = 0
    while True:
        cache = way.make(bench.kv, 0)
        way.feed(bench.kv, cache, 1, tokens)
        size = storage_bytes(cache)
        check_bytes(MemoryUse(None, None), OwnBytes(size, None), tokens * bench.kv.token_bytes)
        if taken + size > limit:
            break
        caches.append(cache)
        taken += size
    del cache
    return Filled(taken, meter.read().mapped_bytes, len(caches))
