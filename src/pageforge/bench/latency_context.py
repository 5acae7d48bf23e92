"""One run of the latency benchmark: the model, what for, how long, and where results go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from pageforge.bench.caches import WAYS, Way
from pageforge.bench.harness import Budget
from pageforge.bench.report import Report

STEPS = 525
"""25 blocks of 21 steps, of which 20 count: 500."""

CUDNN_STEPS = 42
"""With cuDNN attention each new length costs a growing cache some 50 ms the first time: fewer."""

PADDED_BATCH = 8

GENERATED = 128

MEMORY_STEPS = 68

BASE = "dynamic"
"""What everything is held against."""


@dataclass
class LatencyBench:
    """What every part is given. `read`: the measured ceiling, bytes a second."""

    model: PreTrainedModel
    name: str
    report: Report
    console: Console
    budget: Budget
    batches: Sequence[int] = (1, 8, 32)
    prompts: Sequence[int] = (10, 448)
    steps: int = STEPS
    cudnn_steps: int = CUDNN_STEPS
    padded_batch: int = PADDED_BATCH
    generated: int = GENERATED
    memory_steps: int = MEMORY_STEPS
    ways: Mapping[str, Way] = field(default_factory=lambda: WAYS)
    read: float = 0.0

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device

    @property
    def positions(self) -> int:
        """Tokens that the model's sequences can have."""
        return int(self.model.config.max_position_embeddings)

    def tokens(self, *shape: int) -> Tensor:
        """Random ones, the same for every way."""
        return torch.randint(self.model.config.vocab_size, shape, device=self.device)
