"""`pageforge report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageforge.bench.report import counted
from pageforge.cli import options
from pageforge.cli.output import stderr, stdout
from pageforge.report import write_report
from pageforge.report.write import PICTURES

EXAMPLES = (
    "pageforge bench all --quick --out results",
    "pageforge report results",
    "pageforge report benchmarks/results --out site",
)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Result files of `pageforge bench`, or folders of them.",
            exists=True,
            file_okay=False,
        ),
    ],
    out: Annotated[
        Path | None,
        options.option(
            "--out",
            "-o",
            help="Where report.html and plots/ go; by default DIR.",
            panel=options.OUTPUT,
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Make a page with charts and tables of what was measured, and pictures for a README.

    The page is one file that opens from a disk, without a network.
    """
    options.check_writable(out or folder)
    page, *pictures = write_report(folder, out or folder)
    stdout().print(str(page), soft_wrap=True)
    stderr().print(f"{counted(len(pictures), 'picture')} beside it, in {PICTURES}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(epilog=options.examples(*EXAMPLES))(report)
