"""Asking questions: each leaves a file, whatever happens to it, and torch as it found it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group

from pageforge.bench.harness import Budget, Told, failure
from pageforge.bench.questions import Question
from pageforge.bench.report import Report, table
from pageforge.bench.results import SUFFIX, read_results
from pageforge.bench.run import Run
from pageforge.bench.settings import unchanged


@dataclass(frozen=True)
class Where:
    """Where questions are asked. `machine`: what `report.machine` says of it.

    `folder`: where result files go; None for nowhere.
    """

    device: torch.device
    machine: dict[str, Any]
    console: Console
    folder: Path | None = None

    def path(self, question: Question) -> Path | None:
        """The question's result file."""
        return None if self.folder is None else self.folder / f"{question.name}{SUFFIX}"


@contextlib.contextmanager
def asking(
    question: Question,
    where: Where,
    *,
    seconds: float,
    model: str | None = None,
    quick: bool = False,
    told: Told | None = None,
) -> Iterator[Run]:
    """One question, from its file's first line to its last."""
    report = Report(question.name, question.title, where.path(question), where.machine)
    budget = Budget(seconds, told)
    with unchanged(where.device):
        yield Run(where.device, report, where.console, budget, model, quick)
    report.end(budget.left_out)
    if budget.left_out:
        where.console.print(f"no time left for: {'; '.join(budget.left_out)}\n")


def ask_all(
    questions: Sequence[Question],
    where: Where,
    *,
    seconds: float | None = None,
    model: str | None = None,
    quick: bool = False,
    told: Callable[[str, float], None] = lambda what, done: None,
) -> None:
    """Every question in turn; one that cannot be asked says so in its file, and the rest go on.

    `seconds`: of each question. `told(what, done)` is called as each case begins; `done` counts
    questions, and of the present one the share of its time.
    """
    for number, question in enumerate(questions):
        where.console.print(f"{question.name}: {question.title}\n", style="bold")

        def tell(what: str, share: float, done: int = number, name: str = question.name) -> None:
            told(f"{name}: {what}", done + share)

        tell("begins", 0)
        with asking(
            question,
            where,
            seconds=_seconds(question, where.device, quick) if seconds is None else seconds,
            model=model,
            quick=quick,
            told=tell,
        ) as run:
            _ask(question, run)


SECONDS = 290.0
"""Of one question: a budget that fits a short lease."""


def _seconds(question: Question, device: torch.device, quick: bool) -> float:
    return question.quick_seconds if quick and device.type == "cpu" else SECONDS


def _ask(question: Question, run: Run) -> None:
    try:
        if question.needs_cuda and run.on_cpu:
            raise RuntimeError("needs a CUDA device, and there is none here")
        question.run_all(run)
    except Exception as error:  # what the others find must not be lost
        run.report.add(section=question.name, failure=failure(error))
        run.console.print(f"{question.name}: {failure(error)}\n")


def summary(questions: Sequence[Question], folder: Path) -> Group:
    """What each question's file in `folder` holds; below, why something failed there first."""
    rows: list[tuple[object, ...]] = []
    reasons: list[tuple[object, ...]] = []
    for question in questions:
        found = read_results(folder / f"{question.name}{SUFFIX}")
        failures = [record["failure"] for record in found.results if record.get("failure")]
        results = len(found.results) - len(failures)
        rows.append((question.name, results, len(failures), len(found.left_out), found.seconds))
        reasons += [(question.name, failures[0])] if failures else []
    columns = ("question", "results", "failed", "left out", "seconds")
    return table("what was measured", columns, rows + reasons)
