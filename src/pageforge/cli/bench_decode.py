"""`pageforge bench decode`."""

from __future__ import annotations

from typing import Annotated

import typer

from pageforge.bench import decode as question
from pageforge.bench.caches import WAYS
from pageforge.bench.decode_context import DecodeBench
from pageforge.bench.steps import WARMUP
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
    known,
    measuring,
)

EXAMPLES = (
    "pageforge bench decode --out results",
    "pageforge bench decode --model qwen3-0.6b --batch 1 --prompt 448",
)


def decode(
    model: Model = None,
    device: Device = None,
    way: Annotated[
        list[str] | None,
        options.option(
            "--way",
            help=f"Only these of: {', '.join(WAYS)}; may be given several times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        options.option(
            "--batch", help="Sequences; may be given several times (1 and 32).", panel=WHAT, min=1
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
            "--steps", help="Steps of each way at most (500; 8 on the CPU).", panel=WHAT, min=1
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How long is a whole decode step, and how much memory does it take?

    DynamicCache, StaticCache, PagedKVCache and fast_decode by turns on one model of random weights,
    the model call alone, on the host's clock. About 5 minutes on an H200; on the CPU a few tiny
    steps that only show that it works.
    """
    known("--way", way or [], WAYS)
    with measuring(
        "decode",
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
        bench.batches, bench.prompts = batch or bench.batches, prompt or bench.prompts
        bench.steps = steps or bench.steps
        _check_prompts(bench)
        question.run(bench)


def _check_prompts(bench: DecodeBench) -> None:
    most = bench.positions - WARMUP - 1
    for prompt in bench.prompts:
        if prompt > most:
            raise typer.BadParameter(
                f"expected at most {most}, for {bench.name}'s {bench.positions} positions, "
                f"got {prompt}",
                param_hint="--prompt",
            )
