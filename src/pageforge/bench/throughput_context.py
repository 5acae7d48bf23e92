"""One run of the throughput benchmark: the model, what for, how long, and where results go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.bench import workloads
from pageforge.bench.harness import Budget
from pageforge.bench.online import POISSON
from pageforge.bench.report import Report
from pageforge.bench.workloads import Job, Size

MOST_REPEATS = 5

RUNNING = (256, 1024)
"""Sequences at a time whose planning is timed: the engine's default, and many."""

HOST_STEPS = 64

ARRIVALS = ("sharegpt-4", "azure-chat", "uniform", "arxiv", "azure-code")
"""Workloads whose requests arrive one after the other."""

LOADS = (25, 50, 75, 90, 110)
"""At which rates: percent of what a way answers in a second when all are there at once."""


@dataclass
class ThroughputBench:
    """What every part is given. `read` and `flops`: measured ceilings, a second."""

    model: PreTrainedModel
    name: str
    tokenizer: PreTrainedTokenizerBase
    report: Report
    console: Console
    budget: Budget
    size: Size
    ways: Sequence[str] = ()
    """For the workloads in which ways are compared; by default as each has it."""
    repeats: int = MOST_REPEATS
    """At most, beside the first run: slow ways have fewer. With none the first one counts."""
    running: Sequence[int] = RUNNING
    host_steps: int = HOST_STEPS
    arrivals: Sequence[str] = ARRIVALS
    loads: Sequence[int] = LOADS
    burstiness: float = POISSON
    read: float = math.nan
    flops: float = math.nan

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return int(self.model.config.vocab_size)

    def jobs(self, workload: str, repeat: int) -> list[Job]:
        """The requests of a workload, with prompts of their own in every repeat."""
        return workloads.jobs(workload, self.size, vocab_size=self.vocab_size, repeat=repeat)
