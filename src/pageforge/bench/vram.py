"""How much memory does a KV cache take while its sequences grow, and how many fit?

K/V of a model's shape go through each cache's own `update`, without the model. Each cache is alone:
made, grown, freed and measured before the next.
"""

from __future__ import annotations

import contextlib

import torch

from pageforge.bench.capacity import most_sequences
from pageforge.bench.growth import growth
from pageforge.bench.kv import ModelKV
from pageforge.bench.memory_use import check_room
from pageforge.bench.run import Run
from pageforge.bench.vram_context import WAYS, VramBench, free
from pageforge.geometry import total_bytes_per_page

QUICK_SEQUENCES, QUICK_STEPS, QUICK_FILLED_AT = 8, 60, (100,)

CPU_WAYS = tuple(name for name in WAYS if name != "pageforge")
"""Attention over pages takes minutes there, and tells nothing of the cache's memory."""


def run_all(given: Run) -> None:
    """Everything, at sizes for the device and the time."""
    run(bench_of(given))


def bench_of(given: Run) -> VramBench:
    """What every part is given in a run."""
    kv = ModelKV.of(given.model or "gpt2", given.device)
    bench = VramBench(kv, given.report, given.console, given.budget)
    if given.on_cpu:
        bench.ways = {name: WAYS[name] for name in CPU_WAYS}
    if given.quick:
        bench.sequences, bench.steps = QUICK_SEQUENCES, QUICK_STEPS
        bench.filled_at = QUICK_FILLED_AT
    return bench


@torch.inference_mode()
def run(bench: VramBench) -> None:
    """The curves, what is left when the caches are freed, and how many sequences fit."""
    kv = bench.kv
    bench.report.add(
        section="setting",
        model=kv.name,
        sequences=bench.sequences,
        prompt_tokens=bench.prompt,
        steps=bench.steps,
        dtype=kv.geometry.groups[0].shape.dtype,
        layers=len(kv.layers),
        page_tokens=kv.geometry.page_size,
        page_bytes=total_bytes_per_page(kv.geometry.groups),
        token_bytes=kv.token_bytes,
    )
    _warm_up(bench)
    growth(bench)
    most_sequences(bench)


def _warm_up(bench: VramBench) -> None:
    """What libraries load and keep when they are first used is no cache's memory."""
    for way in bench.ways.values():
        with contextlib.suppress(Exception):  # the measurement will say so
            check_room(bench.device, bench.least_bytes(way, bench.prompt + 1))
            cache = way.make(bench.kv, bench.pages(bench.prompt + 1))
            for tokens in (bench.prompt, 1):
                way.feed(bench.kv, cache, bench.sequences, tokens)
            free(cache)
