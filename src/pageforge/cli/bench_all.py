"""`pageforge bench all`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pageforge.bench.asking import SECONDS, Where, ask_all, summary
from pageforge.bench.models import SHAPES
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.report import machine, wide
from pageforge.cli import options
from pageforge.cli.bench_options import (
    WHAT,
    Commit,
    Device,
    Model,
    Quick,
    bench_bar,
    device_of,
    known,
    make_folder,
)
from pageforge.cli.output import beside, stdout

EXAMPLES = (
    "pageforge bench all --out results",
    "pageforge bench all --out results --quick --device cpu",
)


def everything(
    out: Annotated[
        Path,
        options.option(
            "--out",
            "-o",
            help="The folder for result files, one a question; those there are replaced.",
            panel=options.OUTPUT,
            metavar="DIR",
            file_okay=False,
        ),
    ],
    model: Model = None,
    device: Device = None,
    quick: Quick = False,
    seconds: Annotated[
        float | None,
        options.option(
            "--seconds",
            help=f"Begin no case of a question after this time ({SECONDS:.0f}; less with --quick).",
            panel=WHAT,
            min=0,
        ),
    ] = None,
    commit: Commit = None,
) -> None:
    """Every question in turn; one that cannot be asked here says so, and the rest go on.

    With --quick all of them end within three minutes on two CPU cores.
    """
    known("--model", [model] if model else [], SHAPES)
    torch_device = device_of(device)
    make_folder(out)
    questions = list(QUESTIONS.values())
    with bench_bar() as shown:
        task = shown.add_task("", total=len(questions))

        def told(what: str, done: float) -> None:
            shown.update(task, description=what, completed=done)
            shown.refresh()

        where = Where(torch_device, machine(torch_device, commit), wide(beside(shown)), out)
        ask_all(questions, where, seconds=seconds, model=model, quick=quick, told=told)
    wide(stdout()).print(summary(questions, out))
