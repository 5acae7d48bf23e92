"""A cache's memory while its sequences grow by a token a step, and after they have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers.cache_utils import Cache

from pageforge.bench.harness import failure, synchronize
from pageforge.bench.memory_use import MemoryUse, Meter, check_room, storage_bytes
from pageforge.bench.report import mb, table
from pageforge.bench.vram_context import BASE, VramBench, Way, free
from pageforge.hf.cache import PagedKVCache
from pageforge.store.base import GRANULE

SHOWN = (0, 10, 25, 50, 100, 200, 300, 400, 499)
"""Steps in the tables; the records have all, and the last is shown as well."""

GB = 1e9


def growth(bench: VramBench) -> None:
    """Each way over all steps, and after it; the tables."""
    curves: dict[str, list[dict[str, Any]]] = {}
    afterwards: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for name, way in bench.ways.items():
        if not bench.budget.allows(f"growth, {name}"):
            continue
        try:
            curves[name], left = grow(bench, name, way)
            afterwards += left
        except Exception as error:  # whatever it is, the others go on
            failures[name] = failure(error)
            bench.report.add(section="growth", way=name, failure=failures[name])
    _show_growth(bench, curves, failures)
    _show_afterwards(bench, afterwards)


def grow(
    bench: VramBench, name: str, way: Way
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of one way: of every step, as far as its rows can hold the tokens, and afterwards."""
    kv, rows = bench.kv, bench.sequences
    meter = Meter(bench.device)
    most = bench.prompt + bench.steps
    check_room(bench.device, bench.least_bytes(way, most))
    cache = way.make(kv, bench.pages(most))
    points = []
    try:
        for step in range(bench.steps + 1):
            tokens = bench.prompt + step
            if not way.holds(tokens):
                break
            kv_bytes = rows * tokens * kv.token_bytes
            meter.begin_peak()
            way.feed(kv, cache, rows, 1 if step else bench.prompt)
            use, own = meter.read(), own_bytes(cache)
            check_bytes(use, own, kv_bytes)
            taken = own.storage_bytes if use.mapped_bytes is None else use.mapped_bytes
            points.append(
                bench.report.add(
                    section="growth",
                    way=name,
                    step=step,
                    tokens=tokens,
                    kv_bytes=kv_bytes,
                    **asdict(use),
                    **asdict(own),
                    # A tiny cache may lie in what the process had to spare.
                    sequences_per_gb=rows / (taken / GB) if taken > 0 else None,
                )
            )
        return points, _let_go(bench, name, cache, meter)
    finally:
        free(cache)


@dataclass(frozen=True)
class OwnBytes:
    """What a cache says of itself.

    `storage_bytes`: what the pool has mapped, by the driver's count or mincore, or the tensors'
    storages. `pages_bytes`: the used pages' own; None if it is not paged.
    """

    storage_bytes: int
    pages_bytes: int | None


def own_bytes(cache: Cache) -> OwnBytes:
    """What `cache` says of itself now."""
    if not isinstance(cache, PagedKVCache):
        return OwnBytes(storage_bytes(cache), None)
    stats = cache.pool.stats()
    return OwnBytes(stats.bytes_mapped, stats.bytes_in_use)


def check_bytes(use: MemoryUse, own: OwnBytes, kv_bytes: int) -> None:
    """Raise ArithmeticError where less is said to be taken than what lies in it."""
    held = kv_bytes if own.pages_bytes is None else own.pages_bytes
    # The process may have given back a little of its own meanwhile.
    mapped = None if use.mapped_bytes is None else use.mapped_bytes + GRANULE
    for name, size, least in (
        ("pages", own.pages_bytes, kv_bytes),
        ("storage", own.storage_bytes, held),
        ("mapped", mapped, held),
    ):
        if size is not None and size < least:
            raise ArithmeticError(f"{name}: expected at least {least:,} bytes, got {size:,}")


def _let_go(bench: VramBench, name: str, cache: Cache, meter: Meter) -> list[dict[str, Any]]:
    """Records of what is still taken: by a freed cache, by its pool once trimmed, and closed."""
    if not isinstance(cache, PagedKVCache):
        cache.layers.clear()
        mapped = meter.read().mapped_bytes
        return [bench.report.add(section="afterwards", way=name, when="freed", mapped_bytes=mapped)]
    pool, records = cache.pool, []
    claimed = pool.stats().pages_used
    for when, act in (("freed", cache.free), ("trimmed", pool.trim)):
        act()
        synchronize(bench.device)
        stats = pool.stats()  # which also unmaps what kernels have let go of by now
        records.append(
            bench.report.add(
                section="afterwards",
                way=name,
                when=when,
                mapped_bytes=meter.read().mapped_bytes,
                storage_bytes=stats.bytes_mapped,
                pages_claimed=claimed,
                pages_returned=claimed - stats.pages_used,
            )
        )
    return records


def _show_growth(
    bench: VramBench, curves: Mapping[str, list[dict[str, Any]]], failures: Mapping[str, str]
) -> None:
    case = f"{bench.kv.name}: {bench.sequences} sequences, prompts of {bench.prompt} tokens"
    tables: dict[str, Callable[[dict[str, Any]], float | None]] = {
        f"{case}; MB mapped (10^6 bytes)": lambda point: mb(point["mapped_bytes"]),
        "MB at the peak of the step": lambda point: mb(point["peak_bytes"]),
        f"mapped, over {BASE}'s": lambda point: _over_base(curves, point),
        "sequences per GB mapped": lambda point: point["sequences_per_gb"],
    }
    steps = sorted({step for step in SHOWN if step < bench.steps} | {bench.steps})
    for title, value in tables.items():
        rows: list[tuple[object, ...]] = [
            (
                step,
                bench.prompt + step,
                *(value(p[step]) if step < len(p) else None for p in curves.values()),
            )
            for step in steps
            if curves
        ]
        bench.console.print(table(title, ("step", "tokens", *curves), rows))
        bench.console.print()
    for name, why in failures.items():
        bench.console.print(f"{name}: {why}")


def _over_base(
    curves: Mapping[str, list[dict[str, Any]]], point: Mapping[str, Any]
) -> float | None:
    mapped = point["mapped_bytes"]
    base = curves[BASE][point["step"]]["mapped_bytes"] if BASE in curves else None
    return mapped / base if mapped is not None and base else None


def _show_afterwards(bench: VramBench, records: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            f"{r['way']}, {r['when']}",
            mb(r["mapped_bytes"]),
            r.get("pages_claimed"),
            r.get("pages_returned"),
        )
        for r in records
    ]
    columns = ("way", "MB mapped", "pages claimed", "pages returned")
    bench.console.print(table("after the last step", columns, rows))
    bench.console.print()
