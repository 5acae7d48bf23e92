"""What holds the K/V of sequences that begin alike, and how it is looked at after each forward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from pageforge.bench.engine_probe import replaced
from pageforge.bench.memory_use import storage_bytes
from pageforge.engine.engine import Engine
from pageforge.engine.sequence import Rows
from pageforge.engine.step import Step as EngineStep
from pageforge.hf.cache import PagedKVCache
from pageforge.memory import PageTable
from pageforge.memory.page_table import PageCopy
from pageforge.pool import PagePool


@dataclass(frozen=True)
class Step:
    """What is held right after a forward; pages are None where there are none.

    `tokens`: of all sequences, common ones counted in each. `cache_bytes`: what a pool has mapped,
    or the storages of the caches' tensors. `pages_bytes`: the used pages' own. `pages_named`:
    entries of all page tables; `pages_shared`: pages that more than one entry names;
    `pages_copied`: on write, so far.
    """

    tokens: int
    cache_bytes: int
    pages_bytes: int | None = None
    pages_used: int | None = None
    pages_named: int | None = None
    pages_shared: int | None = None
    pages_copied: int | None = None


class Held(Protocol):
    """The K/V of one way."""

    def watched(self, steps: list[Step]) -> contextlib.AbstractContextManager[None]:
        """Add a step after each forward."""

    def free(self) -> int | None:
        """Let go of everything; returns how many pages are used all the same."""


class Caches:
    """Caches of one model, with pages of `page_size` tokens if any; all kept ones are looked at."""

    def __init__(self, model: PreTrainedModel, page_size: int):
        self.model = model
        self._live: list[Any] = []

    def new(self) -> Cache:
        """An empty cache."""
        return self.keep(self._make())

    def keep(self, cache: Cache) -> Cache:
        """Look at this one as well: a copy of another, say."""
        self._live.append(cache)
        return cache

    @contextlib.contextmanager
    def watched(self, steps: list[Step]) -> Iterator[None]:
        """Add a step after each forward."""
        hook = self.model.register_forward_hook(lambda *_: steps.append(self._look()))
        try:
            yield
        finally:
            hook.remove()

    def _make(self) -> Cache:
        raise NotImplementedError

    def _look(self) -> Step:
        raise NotImplementedError


class Dense(Caches):
    """DynamicCaches."""

    def free(self) -> None:
        """Drop them."""
        self._live.clear()

    def _make(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def _look(self) -> Step:
        return Step(
            sum(len(cache.layers[0].keys) * cache.get_seq_length() for cache in self._live),
            sum(map(storage_bytes, self._live)),
        )


class Paged(Caches):
    """PagedKVCaches in a pool of their own."""

    def __init__(self, model: PreTrainedModel, page_size: int):
        super().__init__(model, page_size)
        self._pool = PagePool.for_model(model, page_size)
        self._copies = 0

    @contextlib.contextmanager
    def watched(self, steps: list[Step]) -> Iterator[None]:
        """Add a step after each forward."""
        with counted_copies(self._pool, self._count), super().watched(steps):
            yield

    def free(self) -> int:
        """Free them all, and close the pool; returns the pages that are used all the same."""
        for cache in self._live:
            cache.free()
        left = self._pool.stats().pages_used
        self._pool.close()
        return left

    def _make(self) -> Cache:
        return PagedKVCache(self._pool)

    def _count(self, copies: int) -> None:
        self._copies += copies

    def _look(self) -> Step:
        tables = [table for cache in self._live for table in cache.page_tables]
        return look_at(self._pool, tables, sum(table.length for table in tables), self._copies)


class Served:
    """An engine's sequences."""

    def __init__(self, model: PreTrainedModel, page_size: int, *, prefix_cache: bool):
        self.engine = Engine(model, page_size=page_size, prefix_cache=prefix_cache, seed=0)
        self._copies = 0

    @contextlib.contextmanager
    def watched(self, steps: list[Step]) -> Iterator[None]:
        """Add a step after each step that the engine launches."""
        runner, pool = self.engine._core.runner, self.engine._pool
        launch = runner.launch

        def noted(
            rows: Rows, counts: npt.NDArray[np.int32], *args: Any, **options: Any
        ) -> EngineStep:
            step = launch(rows, counts, *args, **options)
            tables = [each.pages for each in rows.sequences if each is not None]
            tokens = int(rows.computed.sum() + counts.sum())
            steps.append(look_at(pool, tables, tokens, self._copies))
            return step

        with counted_copies(pool, self._count), replaced(runner, "launch", noted):
            yield

    def free(self) -> int:
        """Close the engine; returns the pages that are used all the same."""
        left = self.engine.stats().pool.pages_used
        self.engine.close()
        return left

    def _count(self, copies: int) -> None:
        self._copies += copies


def look_at(pool: PagePool, tables: Sequence[PageTable], tokens: int, copies: int) -> Step:
    """A pool with these live tables, of so many tokens, after so many copies on write."""
    groups = range(len(pool.geometry.groups))
    names = [Counter(page for table in tables for page in table.pages(group)) for group in groups]
    stats = pool.stats()
    return Step(
        tokens,
        stats.bytes_mapped,
        stats.bytes_in_use,
        stats.pages_used,
        sum(map(Counter.total, names)),
        sum(count > 1 for of_group in names for count in of_group.values()),
        copies,
    )


@contextlib.contextmanager
def counted_copies(pool: PagePool, count: Callable[[int], None]) -> Iterator[None]:
    """Call `count` with the copies on write of each `pool.append`."""
    append = pool.append

    def counted(*args: Any, **kwargs: Any) -> list[PageCopy]:
        copies = append(*args, **kwargs)
        count(len(copies))
        return copies

    with replaced(pool, "append", counted):
        yield
