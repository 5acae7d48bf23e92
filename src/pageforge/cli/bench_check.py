"""`pageforge bench check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageforge.bench.check import problems
from pageforge.bench.report import counted
from pageforge.bench.results import RECORDING, sets_in
from pageforge.cli.output import fail, stderr, stdout

EXAMPLES = ("pageforge bench check results", "pageforge bench check benchmarks/results/current")


def check(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder of results or of such folders, or a file.", exists=True
        ),
    ],
) -> None:
    """Can these results be true?

    Every file is read, in the folders below as well; nothing may have failed (but what needs CUDA,
    where there is none, peers that are not installed and models that are refused), pages that were
    claimed must have been returned, and measured bytes may not be below the pages' own. Recordings
    are left out. Exits with 1 if something is wrong.
    """
    sets = list(sets_in(folder).values())
    files = [file for held in sets for file in held]
    for file in files:
        if file.question == RECORDING:
            stderr().print(f"{file.path}: left out, a recording of a run", soft_wrap=True)
    found = [problem for held in sets for problem in problems(held)]
    for problem in found:
        fail(problem)
    if found:
        raise typer.Exit(1)
    checked = [file for file in files if file.question != RECORDING]
    results = sum(len(file.results) for file in checked)
    told = f"{counted(len(checked), 'file')}, {counted(results, 'result')}: nothing wrong"
    stdout().print(told)
