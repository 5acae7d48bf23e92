"""`pageforge bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageforge.bench import compare as comparison
from pageforge.bench.report import wide
from pageforge.bench.results import read
from pageforge.cli import options
from pageforge.cli.output import stdout

EXAMPLES = (
    "pageforge bench compare results/before results/after",
    "pageforge bench compare before/latency.jsonl after/latency.jsonl --full",
)


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="A folder of results, or a file.", exists=True)
    ],
    second: Annotated[
        Path, typer.Argument(metavar="B", help="What is held against A.", exists=True)
    ],
    full: Annotated[
        bool,
        options.flag("--full", help="Every case, also where there are many.", panel=options.OUTPUT),
    ] = False,
) -> None:
    """Two sets of results side by side: B over A, and whether the difference is noise.

    Cases are matched by what names them (model, way, batch ...). A difference is within the noise
    where the spreads that both recorded (quartiles, or the extremes of a few repeats) overlap;
    where none was recorded nothing is said.
    """
    console = wide(stdout())
    one, other = read(first), read(second)
    console.print(comparison.heading(one, other))
    console.print()
    for section in comparison.shown(comparison.compare(one, other), full=full):
        console.print(section)
        console.print()
