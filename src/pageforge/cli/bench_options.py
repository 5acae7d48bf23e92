"""Options that the `bench` commands share, and what surrounds each measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pageforge.bench.harness import Budget
from pageforge.bench.models import SHAPES
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.report import Report, machine, wide
from pageforge.bench.results import SUFFIX
from pageforge.bench.run import Run
from pageforge.bench.settings import unchanged
from pageforge.cli import options
from pageforge.cli.models import DeviceError, check_device
from pageforge.cli.output import stderr, stdout

SECONDS = 290.0
"""A budget that fits a short lease."""

WHAT = "What is measured"

Out = Annotated[
    Path | None,
    options.option(
        "--out",
        "-o",
        help=f"Write every record to <QUESTION>{SUFFIX} in this folder, also when stopped "
        f"half-way; a file of that name is replaced.",
        panel=options.OUTPUT,
        metavar="DIR",
        file_okay=False,
    ),
]
Commit = Annotated[
    str | None,
    options.option(
        "--commit",
        help="The commit to record, outside a git checkout.",
        panel=options.OUTPUT,
        metavar="TEXT",
    ),
]
Device = Annotated[
    str | None,
    options.option(
        "--device",
        help="cpu or cuda; by default CUDA where there is one.",
        panel=WHAT,
        metavar="NAME",
    ),
]
Model = Annotated[
    str | None,
    options.option(
        "--model",
        "-m",
        help=f"A shape: {', '.join(SHAPES)}; by default each question's own.",
        panel=WHAT,
        metavar="NAME",
    ),
]
Quick = Annotated[bool, options.flag("--quick", help="Few cases, small ones.", panel=WHAT)]
Seconds = Annotated[
    float, options.option("--seconds", help="Begin no case after this time.", panel=WHAT, min=0)
]


@contextlib.contextmanager
def measuring(
    question: str,
    *,
    device: str | None = None,
    model: str | None = None,
    quick: bool = False,
    seconds: float = SECONDS,
    out: Path | None = None,
    commit: str | None = None,
    about: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """One question, from the report's first line to its last; torch is left as it was.

    `about`: what else the machine's description should say.
    """
    known("--model", [model] if model else [], SHAPES)
    torch_device = device_of(device)
    path = result_path(out, question)
    budget = Budget(seconds)
    report = Report(
        question,
        QUESTIONS[question].title,
        path,
        machine(torch_device, commit) | dict(about or {}),
    )
    console = wide(stdout())
    with unchanged(torch_device):
        yield Run(torch_device, report, console, budget, model, quick)
    report.end(budget.left_out)
    if budget.left_out:
        console.print(f"no time left for: {', '.join(budget.left_out)}")
    if path is not None:
        stderr().print(f"records: {path}", soft_wrap=True)


def device_of(name: str | None) -> torch.device:
    """The device called so. Raises DeviceError if it is not here."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device: expected cpu or cuda, got {name}; see --help") from None
    check_device(device)
    return device


def known(option: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Refuse a name that is not `allowed`."""
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(
                f"expected one of {', '.join(allowed)}, got {name}", param_hint=option
            )


def result_path(out: Path | None, question: str) -> Path | None:
    """Where a question's records go; its folder is made, before minutes of measuring."""
    if out is None:
        return None
    if not out.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {out.parent}", param_hint="--out")
    out.mkdir(exist_ok=True)
    return out / f"{question}{SUFFIX}"
