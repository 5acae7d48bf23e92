"""`pageforge bench`: one command a question."""

from __future__ import annotations

import typer

from pageforge.cli import (
    bench_all,
    bench_allocator,
    bench_check,
    bench_compare,
    bench_kernels,
    bench_latency,
    bench_lifecycle,
    bench_parity,
    bench_sharing,
    bench_sweep,
    bench_throughput,
    bench_vram,
    options,
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(no_args_is_help=True, help="Measure: one command a question.")
    for command, examples in (
        (bench_kernels.kernels, bench_kernels.EXAMPLES),
        (bench_vram.vram, bench_vram.EXAMPLES),
        (bench_latency.latency, bench_latency.EXAMPLES),
        (bench_lifecycle.lifecycle, bench_lifecycle.EXAMPLES),
        (bench_allocator.allocator, bench_allocator.EXAMPLES),
        (bench_throughput.throughput, bench_throughput.EXAMPLES),
        (bench_sweep.sweep, bench_sweep.EXAMPLES),
        (bench_sharing.sharing, bench_sharing.EXAMPLES),
        (bench_parity.parity, bench_parity.EXAMPLES),
    ):
        bench.command(epilog=options.examples(*examples))(command)
    bench.command(epilog=options.examples(*bench_compare.EXAMPLES))(bench_compare.compare)
    bench.command(epilog=options.examples(*bench_check.EXAMPLES))(bench_check.check)
    bench.command("all", epilog=options.examples(*bench_all.EXAMPLES))(bench_all.everything)
    app.add_typer(bench, name="bench")
