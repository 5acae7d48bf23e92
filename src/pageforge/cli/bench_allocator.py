"""`pageforge bench allocator`."""

from __future__ import annotations

from typing import Annotated

from pageforge.bench import allocator as question
from pageforge.bench.allocator import PAGES_PER_CALL, SIZES
from pageforge.cli import options
from pageforge.cli.bench_options import (
    SECONDS,
    WHAT,
    Commit,
    Out,
    Quick,
    Seconds,
    measuring,
)

EXAMPLES = (
    "pageforge bench allocator --out results",
    "pageforge bench allocator --pages 512 --pages 1000000",
)


def allocator(
    pages: Annotated[
        list[int] | None,
        options.option(
            "--pages",
            help=f"Of a pool; several times ({', '.join(f'{size:,}' for size in SIZES)}).",
            panel=WHAT,
            min=2 * PAGES_PER_CALL,
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How fast does the allocator hand out pages, in pools of any size, and does it lose one?

    Plain Python on one core: pages a second of CPU time, and single calls on the clock; then what
    `pageforge pool stress` does. A pool of 10,000,000 pages takes some seconds to fill, and 1 GB.
    """
    with measuring(
        "allocator", device="cpu", quick=quick, seconds=seconds, out=out, commit=commit
    ) as run:
        bench = question.bench_of(run)
        bench.sizes = pages or bench.sizes
        question.run(bench)
