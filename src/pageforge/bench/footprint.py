"""The memory that decoding takes beside the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pageforge import ops
from pageforge.bench.caches import Setting, Way, stub_eager, stub_graph
from pageforge.bench.harness import failure, synchronize
from pageforge.bench.latency_context import LatencyBench
from pageforge.bench.report import table
from pageforge.pool import PagePool

BATCH, PROMPT = 32, 10

WAYS = ("dynamic", "static", "paged", "pageforge", "fast", "fast compiled")


@torch.no_grad()
def footprint(bench: LatencyBench) -> None:
    """What each way takes beside the model, and how near the pool's memory is to its pages'.

    "Peak" is torch's allocator's, over what it was before, less the same of a run without cache and
    attention: eager, or as a graph for the ways that capture one. Pools are not in it: their memory
    is the driver's own count.
    """
    batch = max(bench.batches) if bench.device.type == "cpu" else BATCH
    prompt = min(PROMPT, *bench.prompts)
    count = min(bench.memory_steps, bench.positions - prompt)
    if not bench.budget.allows(f"memory, batch {batch}"):
        return
    setting = Setting(bench.model, batch)
    stubs = {}
    for name, way in (("eager", stub_eager), ("graph", stub_graph)):
        with contextlib.suppress(Exception):  # without it, the peak itself is shown
            stubs[name] = _measure(bench, way, setting, prompt, count)["peak_bytes"]
    rows: list[tuple[object, ...]] = []
    for name in WAYS:
        if name not in bench.ways:
            continue
        torch.compiler.reset()
        case = {"model": bench.name, "batch": batch, "prompt": prompt, "steps": count, "way": name}
        try:
            found = _measure(bench, bench.ways[name], setting, prompt, count)
        except Exception as error:
            bench.report.add(section="memory", **case, failure=failure(error))
            rows.append((name, failure(error)))
            continue
        stub = stubs.get("graph" if name.startswith("fast") else "eager")
        peak = found["peak_bytes"]
        over = None if stub is None or peak is None else peak - stub
        bench.report.add(section="memory", **case, **found, peak_over_stub_bytes=over)
        rows.append(
            (
                name,
                *(
                    None if value is None else value / 1e6
                    for value in (
                        found["pages_bytes"],
                        found["mapped_bytes"],
                        found["most_over_pages_bytes"],
                        over,
                    )
                ),
                found["gathers"],
            )
        )
    columns = ("memory, MB", "pages'", "mapped", "most over pages'", "peak over stub", "gathers")
    title = f"{bench.name}: batch {batch}, prompt {prompt}, {count} steps"
    bench.console.print(table(title, columns, rows))
    bench.console.print()


def _measure(
    bench: LatencyBench, way: Way, setting: Setting, prompt: int, count: int
) -> dict[str, int | None]:
    """Bytes that a run of `way` takes, and its gathers in one-token steps."""
    on_cuda = bench.device.type == "cuda"
    prompt_tokens, tokens = bench.tokens(setting.batch, prompt), bench.tokens(setting.batch, 1)
    before = free = 0
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    pages = mapped = over = None
    with way(setting) as start, counted_gathers() as gathers:
        sequences = start(prompt + count)
        sequences(prompt_tokens)
        gathers.clear()
        for _ in range(count):
            sequences(tokens)
            if sequences.pool is not None:
                pages, mapped = pool_bytes(sequences.pool)
                over = max(over or 0, mapped - pages)
        synchronize(bench.device)
        peak = torch.cuda.max_memory_allocated() - before if on_cuda else None
        driver = free - torch.cuda.mem_get_info()[0] if on_cuda else None
    return {
        "peak_bytes": peak,
        "driver_bytes": driver,  # pool and all that torch keeps, used or not
        "pages_bytes": pages,
        "mapped_bytes": mapped,
        "most_over_pages_bytes": over,
        "gathers": len(gathers) if sequences.pool is not None else None,
    }


def pool_bytes(pool: PagePool) -> tuple[int, int]:
    """(bytes of the used pages, bytes that the system has given)."""
    stats = pool.stats()
    return stats.bytes_in_use, stats.bytes_mapped


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[None]]:
    """A list that gets an entry whenever pages are made dense."""
    calls: list[None] = []
    gather, prepare = ops.gather_kv, ops.write_and_gather

    def counted(gather: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(None)
            return gather(*args)

        return call

    ops.gather_kv = counted(gather)
    ops.write_and_gather = lambda *args: counted(prepare(*args))
    try:
        yield calls
    finally:
        ops.gather_kv, ops.write_and_gather = gather, prepare
