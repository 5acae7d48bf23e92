"""`pageforge pool stress`: does the allocator lose a page?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from pageforge.bench.allocator import CYCLES, PAGES_EACH, SEQUENCES, Stress
from pageforge.bench.allocator import stress as run_stress
from pageforge.cli import options
from pageforge.cli.output import facts, print_json, progress, stdout


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples("pageforge pool stress", "pageforge pool stress --cycles 5000")
    )(stress)


def stress(
    cycles: Annotated[
        int,
        options.option(
            "--cycles", help="Times that all sequences come and go.", min=1, panel=options.SEQUENCES
        ),
    ] = CYCLES,
    sequences: Annotated[
        int,
        options.option(
            "--sequences", "-s", help="Sequences at once.", min=1, panel=options.SEQUENCES
        ),
    ] = SEQUENCES,
    pages: Annotated[
        int,
        options.option("--pages", help="Pages of each sequence.", min=1, panel=options.SEQUENCES),
    ] = PAGES_EACH,
    as_json: options.Json = False,
) -> None:
    """Put the real allocator through cycles of sequences that grow and end, and count.

    Every cycle is recounted from the live page tables. Exit code 1 if a page leaked or a count was
    wrong. How fast it is: `pageforge bench allocator`.
    """
    found = run_stress(progress(range(cycles), cycles, "cycles"), sequences, pages)
    if as_json:
        print_json(asdict(found))
    else:
        _show(found)
    if found.problem:
        raise typer.Exit(1)


def _show(found: Stress) -> None:
    rows = [
        (
            "cycles",
            f"{found.cycles:,}, each {found.sequences} sequences of {found.pages_each} pages",
        ),
        ("pages", f"{found.pages_claimed:,} claimed, {found.pages_returned:,} returned"),
        ("leaks", f"{found.leaks:,}"),
        ("errors", f"{found.errors:,}"),
    ]
    if found.first_error:
        rows.append(("the first", found.first_error))
    stdout().print(facts(rows))
