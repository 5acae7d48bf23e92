"""One run of the kernel benchmarks: where, how long, what for comparison, where results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from pageforge.bench.harness import Budget, Timing
from pageforge.bench.problems import COLD_BYTES, HEADS, SHAPES, Heads, Problem
from pageforge.bench.report import Report

DTYPES = (torch.float16, torch.bfloat16)

REPEATS, QUICK_REPEATS = 9, 3

QUICK_SHAPES = ("1x8k", "8x4k", "32x4k")


@dataclass
class Bench:
    """What every section is given. `read` and `copy`: measured ceilings, bytes a second."""

    device: torch.device
    report: Report
    console: Console
    budget: Budget
    repeats: int = REPEATS
    cold_bytes: int = COLD_BYTES
    dtypes: Sequence[torch.dtype] = DTYPES
    shapes: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(SHAPES))
    heads: Sequence[Heads] = HEADS
    read: float = 0.0
    copy: float = 0.0

    def problem(self, heads: Heads, lengths: Sequence[int], dtype: torch.dtype) -> Problem:
        """A decode step of this run."""
        return Problem(heads, tuple(lengths), dtype, self.device, self.cold_bytes)

    def note(self, section: str, case: dict[str, Any], name: str, timing: Timing) -> None:
        """Record one candidate's timing; say at once where one of ours failed."""
        self.report.add(section=section, **case, candidate=name, **vars(timing))
        if not timing.ok and name.startswith("pageforge"):
            what = " ".join(str(value) for value in case.values() if isinstance(value, str))
            self.console.print(f"{section} {what} {name}: {timing.failure}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float16`."""
    return str(dtype).removeprefix("torch.")


def best(timings: dict[str, Timing], start: str) -> tuple[str, Timing] | tuple[None, None]:
    """The fastest candidate whose name begins with `start`."""
    found = {name: t for name, t in timings.items() if t.ok and name.startswith(start)}
    if not found:
        return None, None
    name = min(found, key=lambda name: found[name].us)
    return name, found[name]
