"""The engine: many requests at once, batched continuously on one pool."""

from pageforge.engine.engine import Engine
from pageforge.engine.outputs import Completion, RequestOutput, StreamChunk
from pageforge.engine.params import SamplingParams
from pageforge.engine.stats import EngineStats

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
]
