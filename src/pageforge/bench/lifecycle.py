"""What becomes of a pool's pages while two batches of sequences come and go?

Each sequence has a cache of its own and is freed as soon as it ends, others still growing. The
second batch is just like the first, in a pool that has pages for several: nothing forces it to take
the pages that the first gave back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from pageforge.bench.harness import Budget, failure, synchronize
from pageforge.bench.kv import ModelKV
from pageforge.bench.report import Report, mb, table
from pageforge.bench.run import Run
from pageforge.geometry import ceil_div, pages_for, total_bytes_per_page
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import WATERMARK, PagePool, PoolStats

BATCHES = 2

SEQUENCES, STEPS, PROMPT = 8, 500, 13

QUICK_STEPS = 60

ROOM = 4
"""Pages of the pool, over what a batch can need at most."""

SHOWN = 10
"""Moments of each batch in the table; the records have every step."""

PageIds = set[tuple[int, int]]
"""(layer group, page id)"""


@dataclass
class LifecycleBench:
    """What is measured, and where the results go."""

    kv: ModelKV
    report: Report
    console: Console
    budget: Budget
    sequences: int = SEQUENCES
    steps: int = STEPS
    prompt: int = PROMPT

    def last_step(self, index: int) -> int:
        """The step after which a sequence ends: one after the other, the last one at the end."""
        return ceil_div(self.steps * (index + 1), self.sequences)


def run_all(given: Run) -> None:
    """Everything, at sizes for the time."""
    run(bench_of(given))


def bench_of(given: Run) -> LifecycleBench:
    """What is measured in a run."""
    kv = ModelKV.of(given.model or "gpt2", given.device)
    bench = LifecycleBench(kv, given.report, given.console, given.budget)
    if given.quick:
        bench.steps = QUICK_STEPS
    return bench


@torch.inference_mode()
def run(bench: LifecycleBench) -> None:
    """Both batches, what the second took of the first's, and what is left in the end."""
    kv = bench.kv
    most = bench.sequences * pages_for(bench.prompt + bench.steps, kv.geometry.page_size)
    bench.report.add(
        section="setting",
        model=kv.name,
        sequences=bench.sequences,
        prompt_tokens=bench.prompt,
        steps=bench.steps,
        pages_total=ROOM * most,
        page_tokens=kv.geometry.page_size,
        page_bytes=total_bytes_per_page(kv.geometry.groups),
        watermark_bytes=WATERMARK,
    )
    if not bench.budget.allows("lifecycle"):
        return
    with PagePool(kv.geometry, max_pages=ROOM * most) as pool:
        try:
            batches = [live(bench, pool, number) for number in range(1, BATCHES + 1)]
            reuse(bench, *batches)
            afterwards(bench, pool)
        except Exception as error:
            bench.report.add(section="lifecycle", failure=failure(error))
            bench.console.print(f"lifecycle: {failure(error)}")


def live(bench: LifecycleBench, pool: PagePool, batch: int) -> PageIds:
    """One batch from its prompts to its end; a record for every step. Returns all pages it had."""
    caches = {index: PagedKVCache(pool) for index in range(bench.sequences)}
    ever: PageIds = set()
    moments = []
    claimed = returned = 0
    for step in range(bench.steps + 1):
        for cache in caches.values():
            bench.kv.feed(cache, 1, 1 if step else bench.prompt)
            ever |= page_ids(cache)
        moments.append(_note(bench, pool, batch, step, list(caches.values())))
        for index in [index for index in caches if bench.last_step(index) == step]:
            cache, used = caches.pop(index), pool.stats().pages_used
            claimed += len(page_ids(cache))
            cache.free()
            returned += used - pool.stats().pages_used
    moments.append(_note(bench, pool, batch, bench.steps + 1, []))
    bench.report.add(
        section="batch",
        batch=batch,
        mapped_peak_bytes=max(moment["mapped_bytes"] for moment in moments),
        pages_ever=len(ever),
        pages_most=max(moment["pages_used"] for moment in moments),
        pages_claimed=claimed,
        pages_returned=returned,
    )
    _show(bench, batch, moments)
    return ever


def page_ids(cache: PagedKVCache) -> PageIds:
    """The pages that a cache holds."""
    groups = range(len(cache.pool.geometry.groups))
    return {
        (group, page)
        for table in cache.page_tables
        for group in groups
        for page in table.pages(group)
    }


def _note(
    bench: LifecycleBench, pool: PagePool, batch: int, step: int, caches: Sequence[PagedKVCache]
) -> dict[str, Any]:
    """How full the pool is, and how full its pages are."""
    synchronize(bench.kv.device)
    stats = pool.stats()
    tokens = sum(cache.get_seq_length() for cache in caches)
    used = stats.bytes_in_use
    return bench.report.add(
        section="timeline",
        batch=batch,
        step=step,
        sequences=len(caches),
        tokens=tokens,
        pages_bytes=used,
        mapped_bytes=stats.bytes_mapped,
        pages_used=stats.pages_used,
        utilisation=tokens * bench.kv.token_bytes / used if used else None,
    )


def _show(bench: LifecycleBench, batch: int, moments: Sequence[Mapping[str, Any]]) -> None:
    every = ceil_div(len(moments) - 1, SHOWN)
    rows = [
        (
            m["step"],
            m["sequences"],
            m["tokens"],
            m["pages_used"],
            m["utilisation"],
            mb(m["pages_bytes"]),
            mb(m["mapped_bytes"]),
        )
        for m in [*moments[:-1:every], moments[-1]]
    ]
    columns = ("step", "sequences", "tokens", "pages", "utilisation", "pages' MB", "mapped MB")
    bench.console.print(table(f"{bench.kv.name}: batch {batch}", columns, rows))
    bench.console.print()


def reuse(bench: LifecycleBench, first: PageIds, second: PageIds) -> None:
    """How many of the second batch's physical pages were the first's; all of them, or it failed."""
    both = len(first & second)
    failed = {}
    if first != second:
        failed["failure"] = f"expected the first batch's {len(first)} pages, got {both} of them"
    bench.report.add(
        section="reuse",
        reused_share=both / max(1, len(second)),
        pages_first=len(first),
        pages_second=len(second),
        pages_reused=both,
        **failed,
    )
    bench.console.print(
        f"{both} of the second batch's {len(second)} pages were among the first's {len(first)}\n"
    )


def afterwards(bench: LifecycleBench, pool: PagePool) -> None:
    """What is used and mapped with no sequence left, and after `trim`."""
    rows = []
    for when, act in (("freed", None), ("trimmed", pool.trim)):
        if act is not None:
            act()
        stats = pool.stats()
        failed = _left(stats, trimmed=when == "trimmed")
        bench.report.add(
            section="afterwards",
            when=when,
            mapped_bytes=stats.bytes_mapped,
            pages_used=stats.pages_used,
            **({} if failed is None else {"failure": failed}),
        )
        rows.append((when, failed) if failed else (when, stats.pages_used, mb(stats.bytes_mapped)))
    bench.console.print(table("afterwards", ("", "pages", "mapped MB"), rows))
    bench.console.print()


def _left(stats: PoolStats, *, trimmed: bool) -> str | None:
    """What should not be there any more; None if all is well."""
    if stats.pages_used:
        return f"expected no used page, got {stats.pages_used}"
    if trimmed and stats.bytes_mapped > WATERMARK:
        return f"expected {WATERMARK:,} bytes mapped at most, got {stats.bytes_mapped:,}"
    return None
