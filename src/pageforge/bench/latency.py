"""How long does a decode step take, beside the caches that people use?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pageforge.bench.caches import WAYS
from pageforge.bench.ceilings import read_ceiling
from pageforge.bench.context import dtype_name
from pageforge.bench.footprint import footprint
from pageforge.bench.generate import generate
from pageforge.bench.latency_context import LatencyBench
from pageforge.bench.models import make_model
from pageforge.bench.run import Run, run_sections
from pageforge.bench.settings import cudnn_attention
from pageforge.bench.steps import BLOCK, WARMUP, cudnn, padded, steps

CPU_WAYS = ("dynamic", "static", "paged", "pageforge")
"""Without a GPU there are no graphs, and to compile takes minutes."""

CPU_BATCHES, CPU_STEPS, CPU_GENERATED = (1, 8), 63, 16
"""As much as two cores do in minutes; a step takes 50 ms and more."""

QUICK_STEPS = 63

QUICK_CPU_STEPS, QUICK_CPU_TOKENS = 21, 4
"""One block."""

SECTIONS: dict[str, Callable[[LatencyBench], None]] = {
    "steps": steps,
    "padded": padded,
    "generate": generate,
    "memory": footprint,
    "cudnn": cudnn,
}


def run_all(given: Run) -> None:
    """Everything, at sizes for the device and the time."""
    run(bench_of(given))


def bench_of(given: Run, dtype: torch.dtype | None = None) -> LatencyBench:
    """What every section is given in a run."""
    name = given.model or ("smollm2" if given.on_cpu else "gpt2")
    model = make_model(name, given.device, dtype)
    if dtype is not None:
        name += f"-{dtype_name(dtype)}"
    bench = LatencyBench(model, name, given.report, given.console, given.budget)
    bench.prompts = [n for n in bench.prompts if n + WARMUP + BLOCK <= bench.positions]
    if given.on_cpu:
        bench.ways = {name: WAYS[name] for name in CPU_WAYS}
        bench.batches, bench.generated = CPU_BATCHES, CPU_GENERATED
        bench.steps = bench.memory_steps = CPU_STEPS
    if given.quick:
        bench.prompts = bench.prompts[:1]
        bench.steps = bench.cudnn_steps = QUICK_STEPS
    if given.quick and given.on_cpu:
        bench.batches = bench.batches[:1]
        bench.steps, bench.padded_batch = QUICK_CPU_STEPS, 2
        bench.generated = bench.memory_steps = QUICK_CPU_TOKENS
    return bench


def run(bench: LatencyBench, only: Sequence[str] = ()) -> None:
    """The sections named, or all, in order; cuDNN attention is off, but where it is the question.

    On the CPU it does not exist, and `cudnn` is left out.
    """
    bench.read = read_ceiling(bench.device)
    bench.report.add(section="ceilings", read_bytes_per_s=bench.read)
    bench.console.print(f"read ceiling {bench.read / 1e9:,.0f} GB/s\n")
    sections = {
        name: section
        for name, section in SECTIONS.items()
        if name != "cudnn" or bench.device.type == "cuda"
    }
    with cudnn_attention(False):
        run_sections(bench, sections, only)
