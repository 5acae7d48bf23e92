from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from pageforge.bench.context import Bench
from pageforge.bench.harness import Budget
from pageforge.bench.problems import Heads
from pageforge.bench.report import Report

CPU = torch.device("cpu")
TINY = Heads(4, 2, 16, layers=3)


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def report() -> Report:
    return Report("question", "A question?", None, {})


@pytest.fixture
def bench(screen: io.StringIO, report: Report) -> Bench:
    """The kernel benchmarks at a size that the CPU does in milliseconds."""
    return Bench(
        CPU,
        report,
        Console(file=screen, width=200),
        Budget(None),
        repeats=2,
        cold_bytes=20_000,
        dtypes=(torch.float32,),
        shapes={"1x40": (1, 40), "3x33": (3, 33)},
        heads=(TINY,),
        read=1e9,
        copy=1e9,
    )


def only(records: list[dict], **wanted) -> list[dict]:
    return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]
