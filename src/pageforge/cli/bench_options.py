"""Options that the `bench` commands share, and what surrounds each measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TimeElapsedColumn

from pageforge.bench.asking import SECONDS, Where, asking
from pageforge.bench.models import SHAPES
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.report import machine, wide
from pageforge.bench.results import SUFFIX
from pageforge.bench.run import Run
from pageforge.cli import options
from pageforge.cli.models import check_device
from pageforge.cli.output import bar, beside, stderr

WHAT = "What is measured"

Out = Annotated[
    Path | None,
    options.option(
        "--out",
        "-o",
        help=f"Write every record to a file in this folder, called as the question (vram{SUFFIX}), "
        f"also when stopped half-way; one that is there is replaced.",
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
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Dtype = Annotated[
    str | None,
    options.option(
        "--dtype",
        help=f"{', '.join(DTYPES)}; by default the shape's own, on the CPU float32.",
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


def several(*flags: str, what: str, allowed: Collection[str], metavar: str = "NAME") -> Any:
    """An option that may be given several times, each time with one of the `allowed` names."""

    def check(names: list[str] | None) -> list[str] | None:
        known(flags[0], names or [], allowed)
        return names

    text = f"{what} {', '.join(allowed)}; may be given several times."
    return options.option(*flags, help=text, panel=WHAT, metavar=metavar, callback=check)


@contextlib.contextmanager
def measuring(
    name: str,
    *,
    device: str | None = None,
    model: str | None = None,
    quick: bool = False,
    seconds: float = SECONDS,
    out: Path | None = None,
    commit: str | None = None,
    about: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """One question, with a progress bar.

    `about`: what else the machine's description should say.
    """
    question = QUESTIONS[name]
    known("--model", [model] if model else [], SHAPES)
    torch_device = device_of(device)
    make_folder(out)
    with bench_bar() as shown:
        task = shown.add_task(name, total=1)

        def told(what: str, share: float) -> None:
            shown.update(task, description=f"{name}: {what}", completed=share)
            shown.refresh()

        described = machine(torch_device, commit) | dict(about or {})
        where = Where(torch_device, described, wide(beside(shown)), out)
        with asking(question, where, seconds=seconds, model=model, quick=quick, told=told) as run:
            yield run
    if out is not None:
        stderr().print(f"records: {where.path(question)}", soft_wrap=True)


def bench_bar() -> Progress:
    """A progress bar that is drawn when it is told to: no thread takes time from a benchmark."""
    return bar(TimeElapsedColumn(), auto_refresh=False)


def device_of(name: str | None) -> torch.device:
    """The device called so. Refuses what is no device's name; DeviceError: it is not here."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(
            f"expected cpu, cuda or cuda:N, got {name}", param_hint="--device"
        ) from None
    check_device(device)
    return device


def dtype_of(name: str | None) -> torch.dtype | None:
    """What `--dtype` names. Raises typer.BadParameter."""
    known("--dtype", [name] if name else [], DTYPES)
    return DTYPES[name] if name else None


def known(option: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Refuse a name that is not `allowed`."""
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(
                f"expected one of {', '.join(allowed)}, got {name}", param_hint=option
            )


def make_folder(out: Path | None) -> None:
    """Make the folder for results, before minutes of measuring."""
    if out is not None:
        if not out.parent.is_dir():
            raise typer.BadParameter(f"no such folder: {out.parent}", param_hint="--out")
        options.check_writable(out)
        out.mkdir(exist_ok=True)
