"""`pageforge bench latency`."""

from __future__ import annotations

from typing import Annotated

import typer

from pageforge.bench import latency as question
from pageforge.bench.caches import WAYS
from pageforge.bench.latency_context import STEPS, LatencyBench
from pageforge.bench.steps import BLOCK, WARMUP
from pageforge.cli import options
from pageforge.cli.bench_options import (
    SECONDS,
    WHAT,
    Commit,
    Device,
    Dtype,
    Model,
    Out,
    Quick,
    Seconds,
    dtype_of,
    measuring,
    several,
)

EXAMPLES = (
    "pageforge bench latency --out results",
    "pageforge bench latency --model qwen3-0.6b --batch 1 --prompt 448",
    "pageforge bench latency --device cpu --dtype bfloat16",
)


def latency(
    model: Model = None,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        several("--only", what="A part:", allowed=question.SECTIONS),
    ] = None,
    way: Annotated[
        list[str] | None,
        several("--way", what="Only these of:", allowed=WAYS),
    ] = None,
    batch: Annotated[
        list[int] | None,
        options.option(
            "--batch",
            help="Sequences; may be given several times (1, 8 and 32; 1 and 8 on the CPU).",
            panel=WHAT,
            min=1,
        ),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        options.option(
            "--prompt", help="Prompt tokens; several times (10 and 448).", panel=WHAT, min=1
        ),
    ] = None,
    steps: Annotated[
        int | None,
        options.option(
            "--steps",
            help=f"Steps of each way at most ({STEPS}; {question.CPU_STEPS} on the CPU), of which "
            f"one of {BLOCK} does not count.",
            panel=WHAT,
            min=2,
        ),
    ] = None,
    dtype: Dtype = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How long does a decode step take, and how much memory?

    DynamicCache, StaticCache, PagedKVCache and fast_decode by turns on one model of random weights,
    the model call alone, on the host's clock: mean, P50, P95 and P99. On the CPU the eager ways of
    SmolLM2's shape, with fewer steps.
    """
    with measuring(
        "latency",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run, dtype_of(dtype))
        if way:
            bench.ways = {name: WAYS[name] for name in WAYS if name in way}
        if batch:
            bench.batches, bench.padded_batch = batch, max(batch)
        if steps:
            bench.steps = bench.cudnn_steps = steps
        bench.prompts = prompt or bench.prompts
        _check_prompts(bench)
        question.run(bench, only or ())


def _check_prompts(bench: LatencyBench) -> None:
    most = bench.positions - WARMUP - 1
    for prompt in bench.prompts:
        if prompt > most:
            raise typer.BadParameter(
                f"expected at most {most}, for {bench.name}'s {bench.positions} positions, "
                f"got {prompt}",
                param_hint="--prompt",
            )
