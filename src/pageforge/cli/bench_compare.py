"""`pageforge bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageforge.bench import compare as comparison
from pageforge.bench.report import wide
from pageforge.bench.results import sets_in
from pageforge.cli import options
from pageforge.cli.output import stdout

EXAMPLES = (
    "pageforge bench compare results/before results/after",
    "pageforge bench compare before/latency.jsonl after/latency.jsonl --full",
)


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="A folder of results or of such folders, or a file.", exists=True
        ),
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

    Folders below A and B are matched by their names, cases by what names them (model, way, batch
    ...). A difference is within the noise where the spreads that both recorded (quartiles, or the
    extremes of a few repeats) overlap; where none was recorded nothing is said.
    """
    console = wide(stdout())
    both, alone = comparison.matched(sets_in(first), sets_in(second))
    for name, (one, other) in both.items():
        console.print(comparison.heading(one, other, name))
        console.print()
        for section in comparison.shown(comparison.compare(one, other), full=full):
            console.print(section)
            console.print()
    for line in alone:
        console.print(line)
