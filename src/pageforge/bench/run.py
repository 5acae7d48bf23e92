"""One run of a question: where it is measured, for how long, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console

from pageforge.bench.harness import Budget
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
