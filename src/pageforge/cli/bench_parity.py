"""`pageforge bench parity`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import parity as question
from pageforge.bench.families import FAMILIES
from pageforge.bench.models import SHAPES
from pageforge.cli import options
from pageforge.cli.bench_options import (
    DTYPES,
    SECONDS,
    WHAT,
    Commit,
    Device,
    Out,
    Quick,
    Seconds,
    measuring,
    several,
)

EXAMPLES = (
    "pageforge bench parity --out results",
    "pageforge bench parity --model smollm2 --dtype float32 --steps 200",
)

MODELS = (*FAMILIES, *SHAPES)


def parity(
    model: Annotated[
        list[str] | None,
        several("--model", "-m", what="One of", allowed=MODELS),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        list[str] | None,
        several("--dtype", what="Only these of:", allowed=DTYPES),
    ] = None,
    steps: Annotated[
        int | None,
        options.option("--steps", help="Tokens after the prompt.", panel=WHAT, min=1),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Do the outputs stay the same? Logits of every step against DynamicCache's.

    Over tiny models of several families, and larger shapes: smollm2 with its trained weights, where
    they can be had. All ways are fed the tokens that DynamicCache's logits choose.
    """
    with measuring(
        "parity", device=device, quick=quick, seconds=seconds, out=out, commit=commit
    ) as run:
        bench = question.bench_of(run, models=model or ())
        bench.dtypes = [DTYPES[name] for name in dtype] if dtype else bench.dtypes
        bench.steps = steps or bench.steps
        question.run(bench)
