"""`pageforge bench check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageforge.bench.check import problems
from pageforge.bench.results import read
from pageforge.cli.output import fail, stdout

EXAMPLES = ("pageforge bench check results",)


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of results, or a file.", exists=True)
    ],
) -> None:
    """Can these results be true?

    Every file is read; nothing may have failed (but what needs CUDA, where there is none, peers
    that are not installed and models that are refused), pages that were claimed must have been
    returned, and measured bytes may not be below the pages' own. Exits with 1 if something is
    wrong.
    """
    files = read(folder)
    found = problems(files)
    for problem in found:
        fail(problem)
    if found:
        raise typer.Exit(1)
    results = sum(len(file.results) for file in files)
    stdout().print(f"{len(files)} files, {results:,} results: nothing wrong")
