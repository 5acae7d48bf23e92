"""`pageforge bench throughput`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import throughput as question
from pageforge.bench.online import POISSON
from pageforge.bench.serving import WAYS
from pageforge.bench.throughput_context import MOST_REPEATS
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
    known,
    measuring,
    several,
)

EXAMPLES = (
    "pageforge bench throughput --out results",
    "pageforge bench throughput --model llama-8b --only sharegpt --way engine",
    "pageforge bench throughput --only arrivals --burstiness 0.25",
)


def throughput(
    model: Model = None,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        several("--only", what="A part:", allowed=question.SECTIONS),
    ] = None,
    way: Annotated[
        list[str] | None,
        options.option(
            "--way",
            help=f"Only these of: {', '.join(WAYS)}, where ways are compared; several times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        options.option(
            "--requests", help="Of each workload, instead of its own number.", panel=WHAT, min=1
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        options.option(
            "--repeats",
            help=f"Timed runs of each way ({MOST_REPEATS}); slow ways have fewer.",
            panel=WHAT,
            min=1,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        options.option(
            "--burstiness",
            help="Of requests that arrive: 1 is a Poisson process, less comes in bursts.",
            panel=WHAT,
            min=0.01,
        ),
    ] = POISSON,
    dtype: Dtype = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How many tokens a second does the engine make, beside transformers' own ways?

    Whole workloads on one model of random weights; the host's work and the device's idle time a
    step; what a shared prefix, samples of one prompt and a pool that is too small cost; how long
    requests wait that arrive one after the other. On the CPU by default a tiny model; there, and
    with --quick, counts and lengths are divided.
    """
    known("--way", way or [], WAYS)
    with measuring(
        "throughput",
        device=device,
        model=model,
        quick=quick,
        seconds=seconds,
        out=out,
        commit=commit,
    ) as run:
        bench = question.bench_of(run, dtype=dtype_of(dtype), requests=requests)
        bench.ways = way or ()
        bench.repeats = repeats or bench.repeats
        bench.burstiness = burstiness
        question.run(bench, only or ())
