"""One run of a question: where it is measured, for how long, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from rich.console import Console

from pageforge.bench.harness import Budget, failure
from pageforge.bench.report import Report


@dataclass(frozen=True)
class Run:
    """What every question is given.

    `model`: a name in `models.SHAPES`, or None for the question's own choice. `quick`: few and
    small cases, that end in seconds on two CPU cores.
    """

    device: torch.device
    report: Report
    console: Console
    budget: Budget
    model: str | None = None
    quick: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether there is no accelerator to measure."""
        return self.device.type == "cpu"


class HasRun(Protocol):
    """What a question's own sizes stand beside."""

    report: Report
    console: Console
    budget: Budget


Sized = TypeVar("Sized", bound=HasRun)


def run_sections(
    bench: Sized, sections: Mapping[str, Callable[[Sized], None]], only: Collection[str] = ()
) -> None:
    """Those named in `only`, or all, in order; one that fails is noted and the others go on."""
    for name, section in sections.items():
        if (not only or name in only) and bench.budget.allows(name):
            try:
                section(bench)
            except Exception as error:  # what the others find must not be lost
                bench.report.add(section=name, failure=failure(error))
                bench.console.print(f"{name}: {failure(error)}\n")
