"""`pageforge bench`: one command a question."""

from __future__ import annotations

import typer

from pageforge.cli import (
    bench_decode,
    bench_kernels,
    bench_parity,
    bench_sharing,
    bench_sweep,
    bench_throughput,
    options,
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(no_args_is_help=True, help="Measure: one command a question.")
    for command, examples in (
        (bench_kernels.kernels, bench_kernels.EXAMPLES),
        (bench_decode.decode, bench_decode.EXAMPLES),
        (bench_throughput.throughput, bench_throughput.EXAMPLES),
        (bench_sweep.sweep, bench_sweep.EXAMPLES),
        (bench_sharing.sharing, bench_sharing.EXAMPLES),
        (bench_parity.parity, bench_parity.EXAMPLES),
    ):
        bench.command(epilog=options.examples(*examples))(command)
    app.add_typer(bench, name="bench")
