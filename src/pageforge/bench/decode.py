"""How long is a whole decode step, and how much memory does it take?"""

from __future__ import annotations

from pageforge.bench.caches import WAYS
from pageforge.bench.ceilings import read_ceiling
from pageforge.bench.decode_context import DecodeBench
from pageforge.bench.footprint import footprint
from pageforge.bench.generate import generate
from pageforge.bench.models import make_model
from pageforge.bench.run import Run
from pageforge.bench.settings import cudnn_attention
from pageforge.bench.steps import steps

CPU_STEPS = 8

QUICK_STEPS = 60


def run_all(given: Run) -> None:
    """Everything, at sizes for the device and the time."""
    run(bench_of(given))


def bench_of(given: Run) -> DecodeBench:
    """What every part is given in a run."""
    name = given.model or ("tiny" if given.on_cpu else "gpt2")
    model = make_model(name, given.device)
    bench = DecodeBench(model, name, given.report, given.console, given.budget)
    if given.on_cpu:
        bench.ways = {name: WAYS[name] for name in ("dynamic", "paged", "pageforge")}
        bench.batches, bench.prompts = (1, 2), (10,)
        bench.steps = bench.generated = bench.memory_steps = CPU_STEPS
    if given.quick:
        bench.steps = min(bench.steps, QUICK_STEPS)
        bench.cudnn_steps = bench.memory_steps = min(bench.memory_steps, QUICK_STEPS)
    return bench


def run(bench: DecodeBench) -> None:
    """Steps with cuDNN attention off; generate; memory; then steps with it on."""
    on_cuda = bench.device.type == "cuda"
    if on_cuda:
        rate = read_ceiling(bench.device)
        bench.report.add(section="ceilings", read_bytes_per_s=rate)
        bench.console.print(f"read ceiling {rate / 1e9:,.0f} GB/s\n")
    else:
        rate = None
    with cudnn_attention(False):
        for batch in bench.batches:
            steps(bench, batch, bench.steps, rate, "off")
        generate(bench)
        footprint(bench)
    if on_cuda:
        with cudnn_attention(True):
            for batch in bench.batches:
                steps(bench, batch, bench.cudnn_steps, rate, "on")
