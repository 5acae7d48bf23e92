"""The engine: many requests at once, batched continuously on one pool."""

from pageforge.engine.engine import Engine, EngineStats
from pageforge.engine.outputs import Completion, RequestOutput, StreamChunk
from pageforge.engine.params import SamplingParams

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
]
