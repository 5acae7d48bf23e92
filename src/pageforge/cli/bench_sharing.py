"""`pageforge bench sharing`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import sharing as question
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
    "pageforge bench sharing --out results",
    "pageforge bench sharing --model gpt2 --only beams --branches 4",
)


def sharing(
    model: Model = None,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        several("--only", what="A case:", allowed=question.CASES),
    ] = None,
    branches: Annotated[
        int | None,
        options.option("--branches", help="Beams, samples, continuations (8).", panel=WHAT, min=2),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """What does a common beginning cost? Beams, samples of one prompt, a forked system prompt.

    Bytes and pages after every forward, beside DynamicCache doing the same. SmolLM2 with its
    trained weights, where they can be had: where beams part depends on what a model says.
    """
    with measuring(
        "sharing",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run)
        bench.branches = branches or bench.branches
        bench.cases = {name: bench.cases[name] for name in only or bench.cases}
        question.run(bench)
