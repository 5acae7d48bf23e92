"""`pageforge bench kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pageforge.bench import kernels as question
from pageforge.bench.peers import wheels
from pageforge.cli import options
from pageforge.cli.bench_options import (
    SECONDS,
    WHAT,
    Commit,
    Out,
    Quick,
    Seconds,
    measuring,
    several,
)

EXAMPLES = (
    "pageforge bench kernels --out results --peer-wheels ./wheels",
    "pageforge bench kernels --only decode --only ragged --quick",
)


def kernels(
    only: Annotated[
        list[str] | None,
        several("--only", what="A section:", allowed=question.SECTIONS),
    ] = None,
    peer_wheels: Annotated[
        Path | None,
        options.option(
            "--peer-wheels",
            help="A folder of wheels to unpack and compare with (tokenspeed-fa3, FlashInfer).",
            panel=WHAT,
            metavar="DIR",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How fast are the ops, against the device's limits and beside their peers?

    By graph replay over K/V that no cache holds, in shuffled pages; every output is checked against
    the reference in float64. Needs a CUDA device; about 4 minutes on an H200.
    """
    with (
        wheels(peer_wheels) as unpacked,
        measuring(
            "kernels",
            device="cuda",
            quick=quick,
            seconds=seconds,
            out=out,
            commit=commit,
            about={"peer_wheels": unpacked},
        ) as run,
    ):
        question.run(question.bench_of(run), only or ())
