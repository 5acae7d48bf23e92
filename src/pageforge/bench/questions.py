"""The questions that are measured, in the order in which `bench all` asks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pageforge.bench import (
    allocator,
    kernels,
    latency,
    lifecycle,
    parity,
    sharing,
    sweep,
    throughput,
    vram,
)
from pageforge.bench.run import Run


@dataclass(frozen=True)
class Question:
    """One question. `run_all(run)` measures everything that belongs to it; it may raise."""

    name: str
    title: str
    run_all: Callable[[Run], None]
    quick_seconds: float
    """Its share of the three minutes that all may take on two CPU cores with `quick`."""
    needs_cuda: bool = False


QUESTIONS = {
    question.name: question
    for question in (
        Question(
            "kernels",
            "How fast are the ops, against the device's limits?",
            kernels.run_all,
            0,
            needs_cuda=True,
        ),
        Question("vram", "How much memory does a KV cache take?", vram.run_all, 10),
        Question("latency", "How long does a decode step take?", latency.run_all, 25),
        Question("lifecycle", "What becomes of a pool's pages?", lifecycle.run_all, 5),
        Question("allocator", "How fast are pages handed out?", allocator.run_all, 10),
        Question("throughput", "How many tokens a second?", throughput.run_all, 30),
        Question("sweep", "Which page size, and how large a pool?", sweep.run_all, 25),
        Question("sharing", "What does a common beginning cost?", sharing.run_all, 15),
        Question("parity", "Do the outputs stay the same?", parity.run_all, 25),
    )
}
