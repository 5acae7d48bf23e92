"""`pageforge bench lifecycle`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import lifecycle as question
from pageforge.bench.lifecycle import PROMPT, SEQUENCES, STEPS
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
)

EXAMPLES = (
    "pageforge bench lifecycle --out results",
    "pageforge bench lifecycle --model smollm2 --sequences 32",
)


def lifecycle(
    model: Model = None,
    device: Device = None,
    sequences: Annotated[
        int | None,
        options.option(
            "--sequences",
            "-s",
            help=f"In each of the two batches ({SEQUENCES}).",
            panel=WHAT,
            min=1,
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
        options.option(
            "--steps", help=f"Until the last sequence of a batch ends ({STEPS}).", panel=WHAT, min=1
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """What becomes of a pool's pages while two batches of sequences come and go?

    At every step pages used, how full they are, and bytes mapped as the driver or the operating
    system says; whether the second batch takes just the pages that the first gave back; and what is
    left in the end.
    """
    with measuring(
        "lifecycle",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run)
        bench.sequences = sequences or bench.sequences
        bench.prompt, bench.steps = prompt or bench.prompt, steps or bench.steps
        question.run(bench)
