"""`pageforge bench vram`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import vram as question
from pageforge.bench.vram_context import POOL_PAGES, PROMPT, SEQUENCES, STEPS, WAYS
from pageforge.cli import options
from pageforge.cli.bench_options import (
    SECONDS,
    WHAT,
    Commit,
    Device,
    Model,
    Out,
    Quick,
    Seconds,
    measuring,
    several,
)

EXAMPLES = (
    "pageforge bench vram --out results",
    "pageforge bench vram --model llama-8b --sequences 8 --steps 200",
)


def vram(
    model: Model = None,
    device: Device = None,
    way: Annotated[
        list[str] | None,
        several("--way", what="Only these of:", allowed=WAYS),
    ] = None,
    sequences: Annotated[
        int | None,
        options.option(
            "--sequences", "-s", help=f"How many grow ({SEQUENCES}).", panel=WHAT, min=1
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        options.option(
            "--prompt", help=f"Tokens that each begins with ({PROMPT}).", panel=WHAT, min=1
        ),
    ] = None,
    steps: Annotated[
        int | None,
        options.option("--steps", help=f"Tokens that each grows by ({STEPS}).", panel=WHAT, min=1),
    ] = None,
    pool_pages: Annotated[
        int | None,
        options.option(
            "--pool-pages",
            help=f"Pages of the pool that is filled with sequences ({POOL_PAGES}).",
            panel=WHAT,
            min=1,
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How much memory does a KV cache take while its sequences grow, and how many fit?

    PagedKVCache, DynamicCache and StaticCache of 512 and 1,024 tokens, each alone: bytes as the
    driver or the operating system reports them, at every step and at its peak, then after the
    sequences have ended. K/V of the model's shape go through each cache's own update, without the
    model. Takes seconds on a GPU, some minutes on the CPU.
    """
    with measuring(
        "vram",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run)
        if way:
            bench.ways = {name: WAYS[name] for name in WAYS if name in way}
        bench.sequences = sequences or bench.sequences
        bench.prompt, bench.steps = prompt or bench.prompt, steps or bench.steps
        bench.pool_pages = pool_pages or bench.pool_pages
        question.run(bench)
