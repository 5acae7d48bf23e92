"""`pageforge pool`: the pool and its allocator, looked at and put to work."""

from __future__ import annotations

import typer

from pageforge.cli import pool_simulate, pool_status, pool_stress


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    pool = typer.Typer(
        no_args_is_help=True, help="Size a pool, simulate one, stress the allocator."
    )
    for part in (pool_status, pool_simulate, pool_stress):
        part.register(pool)
    app.add_typer(pool, name="pool")
