"""One run of the memory benchmark: what K/V, in which caches, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from pageforge.bench.harness import Budget
from pageforge.bench.kv import ModelKV
from pageforge.bench.report import Report
from pageforge.geometry import pages_for
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import PagePool

SEQUENCES, STEPS, PROMPT = 32, 500, 13

POOL_PAGES = 512
"""Pages of the pool that is filled with sequences."""

FILLED_AT = (0, 100, 499)
"""How many steps the sequences that fill it are old."""

BASE = "paged"
"""What everything is held against."""


@dataclass(frozen=True)
class Way:
    """A kind of cache. `make(kv, pages)`: a new one, a paged one with a pool of its own.

    `feed`: how tokens come to it. `most_tokens`: what a row can hold, None where that is open.
    """

    make: Callable[[ModelKV, int], Cache]
    feed: Callable[[ModelKV, Cache, int, int], None] = ModelKV.feed
    most_tokens: int | None = None

    def holds(self, tokens: int) -> bool:
        """Whether there is room for `tokens` tokens in a row."""
        return self.most_tokens is None or tokens <= self.most_tokens


def paged(kv: ModelKV, pages: int) -> PagedKVCache:
    """PagedKVCache, with a pool of `pages` pages."""
    return PagedKVCache(PagePool(kv.geometry, max_pages=pages))


def dynamic(kv: ModelKV, pages: int) -> DynamicCache:
    """DynamicCache."""
    return DynamicCache(config=kv.config)


def static(length: int) -> Way:
    """StaticCache of `length` tokens a row."""
    return Way(
        lambda kv, pages: StaticCache(config=kv.config, max_cache_len=length), most_tokens=length
    )


WAYS: dict[str, Way] = {
    "paged": Way(paged),
    "pageforge": Way(paged, ModelKV.feed_in_place),
    "dynamic": Way(dynamic),
    "static 512": static(512),
    "static 1024": static(1024),
}
"""PagedKVCache under stock attention and under pageforge attention; transformers' own."""


@dataclass
class VramBench:
    """What every part is given."""

    kv: ModelKV
    report: Report
    console: Console
    budget: Budget
    sequences: int = SEQUENCES
    steps: int = STEPS
    prompt: int = PROMPT
    pool_pages: int = POOL_PAGES
    filled_at: Sequence[int] = FILLED_AT
    ways: Mapping[str, Way] = field(default_factory=lambda: WAYS)

    @property
    def device(self) -> torch.device:
        """Where the caches lie."""
        return self.kv.device

    def least_bytes(self, way: Way, tokens: int) -> int:
        """K/V of rows that grow to `tokens` tokens (arithmetic); some caches take all at once."""
        return self.sequences * (way.most_tokens or tokens) * self.kv.token_bytes

    def pages(self, tokens: int) -> int:
        """Pages for `tokens` tokens in each row."""
        return self.sequences * pages_for(tokens, self.kv.geometry.page_size)


def free(cache: Cache) -> None:
    """Everything that a cache holds goes back, with the memory of its pool."""
    if isinstance(cache, PagedKVCache):
        cache.free()
        cache.pool.close()
    cache.layers.clear()
