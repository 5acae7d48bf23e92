"""EngineStats: the engine in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pageforge.pool import PoolStats


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Counts are from its making on; times are in `RequestOutput`."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    """Prompt tokens that prefix hits and forks saved, of requests that have ended."""
    num_preemptions: int
    num_swaps: int
    """Of the preemptions, those whose pages went to the host."""
    swapped_bytes: int
    num_graphs: int
    num_replays: int
    capture_seconds: float
    """Spent on capturing graphs, and on compiling steps."""
    eager_steps: dict[str, int]
    """Steps that could not be replayed, by reason."""
    pool: PoolStats
