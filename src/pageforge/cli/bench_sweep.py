"""`pageforge bench sweep`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pageforge.bench import sweep as question
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
from pageforge.geometry import PAGE_SIZES

EXAMPLES = (
    "pageforge bench sweep --out results",
    "pageforge bench sweep --model llama-8b --only workload --page-size 16 --page-size 64",
)


def sweep(
    model: Model = None,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        several("--only", what="A part:", allowed=question.PARTS),
    ] = None,
    page_size: Annotated[
        list[str] | None,
        several(
            "--page-size",
            what="Only these of:",
            allowed=list(map(str, PAGE_SIZES)),
            metavar="TOKENS",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        options.option(
            "--requests", help="Of the workload (512; 6 on the CPU).", panel=WHAT, min=1
        ),
    ] = None,
    shrink: Annotated[
        int | None,
        options.option(
            "--shrink",
            help="By what their lengths are divided (1; on the CPU 8).",
            panel=WHAT,
            min=1,
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Which page size, and how large a pool? Memory, a step's time and throughput over both.

    A decode step, on CUDA also its attention kernel, and a workload of ShareGPT's lengths through
    the engine, in a pool that is ample, half and a tenth of what is needed.
    """
    with measuring(
        "sweep",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run)
        bench.page_sizes = [int(size) for size in page_size] if page_size else bench.page_sizes
        bench.size = replace(
            bench.size,
            requests=requests or bench.size.requests,
            shrink=shrink or bench.size.shrink,
        )
        question.run(bench, only or ())
