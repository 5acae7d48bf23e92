"""The `pageforge` command: its parts, and what happens to errors and Ctrl-C."""

from __future__ import annotations

import os
import platform
import signal
import sys
import traceback
import warnings
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging as transformers_logging
from typer.core import TyperGroup

from pageforge._version import __version__
from pageforge.cli import bench, config, demo, info, pool, report, run
from pageforge.cli.output import error_line, fail, stderr

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class _Commands(TyperGroup):
    """One line for an error; with --debug the traceback before it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            stderr().print(": ".join(["stopped", *map(str, stop.args)]), soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own: usage errors, Exit
                raise
            if _debugging(ctx):
                traceback.print_exc()
            fail(error_line(error))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (demo, run, pool, bench, report, info, config):
    part.register(app)


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGTERM, _terminate)  # so that screens and pages are tidied up as well
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model may write what the terminal cannot show
            stream.reconfigure(errors="replace")
    app(prog_name="pageforge")


def _terminate(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            f"pageforge {__version__} (torch {torch.__version__}, "
            f"python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def pageforge(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Say the version.", callback=_show_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", metavar="", help="Show tracebacks, warnings and logs of libraries."
        ),
    ] = False,
) -> None:
    """A paged KV cache for Hugging Face transformers: memory follows the tokens that exist.

    Start with `pageforge demo`. Every command has its own --help with examples.
    """
    if not debug and not os.environ.get("PAGEFORGE_DEBUG"):
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()


def _debugging(ctx: Any) -> bool:
    return bool(ctx.params.get("debug") or os.environ.get("PAGEFORGE_DEBUG"))
