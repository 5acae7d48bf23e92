"""PageForge: a paged KV cache for Hugging Face transformers."""

from pageforge._version import __version__
from pageforge.engine import (
    Completion,
    Engine,
    EngineStats,
    RequestOutput,
    SamplingParams,
    StreamChunk,
)
from pageforge.errors import (
    CropError,
    GeometryError,
    ModelNotFound,
    OutOfPages,
    PageError,
    PageForgeError,
    ParamsError,
    RequestError,
    ShapeError,
    UnsupportedModel,
    UseAfterFree,
)
from pageforge.geometry import KVGeometry, LayerShape
from pageforge.hf.attention import register as _register_attention
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.fast_decode import fast_decode
from pageforge.memory import PageAllocator, PageTable, PrefixIndex, SequenceAllocator
from pageforge.pool import PagePool, PoolStats
from pageforge.recording import Recording, record

__all__ = [
    "Completion",
    "CropError",
    "Engine",
    "EngineStats",
    "GeometryError",
    "KVGeometry",
    "LayerShape",
    "ModelNotFound",
    "OutOfPages",
    "PageAllocator",
    "PageError",
    "PageForgeError",
    "PagePool",
    "PageTable",
    "PagedKVCache",
    "ParamsError",
    "PoolStats",
    "PrefixIndex",
    "Recording",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SequenceAllocator",
    "ShapeError",
    "StreamChunk",
    "UnsupportedModel",
    "UseAfterFree",
    "__version__",
    "fast_decode",
    "record",
]

_register_attention()
