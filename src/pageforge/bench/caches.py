"""The ways to run a decode step that are compared: each a context that starts sequences.

A way yields `start(length)`, which makes a new cache for a batch of sequences of `length` tokens
and returns `Sequences`: call them with tokens `[batch, n]` and get logits.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from pageforge.bench.models import twin
from pageforge.compiling import compile_forward
from pageforge.geometry import pages_for
from pageforge.graphs import CapturedStep, GraphMemory
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.fused import fused
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

FAST_DECODE = "pageforge.hf.fast_decode"

NO_ATTENTION = "pageforge_bench_no_attention"


@dataclass(frozen=True)
class Setting:
    """What every way is given."""

    model: PreTrainedModel
    batch: int
    pads: Sequence[int] | None = None
    """Tokens of left padding in each row's prompt; None for prompts without a mask."""
    page_size: int = 16

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.model.device


@dataclass(frozen=True)
class Sequences:
    """A batch in flight. `pool`: where its K/V lie, if they are paged."""

    forward: Callable[[Tensor], Tensor]
    pool: PagePool | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of the new tokens `[batch, n]`, which the cache then holds."""
        return self.forward(tokens)


Start = Callable[[int], Sequences]
Way = Callable[[Setting], "contextlib.AbstractContextManager[Start]"]


def caller(
    model: PreTrainedModel, cache: Cache, pads: Sequence[int] | None = None
) -> Callable[[Tensor], Tensor]:
    """The model call, as a user would write it.

    With `pads` its mask grows with each token, and positions count from the padding's end, as
    `generate` passes them.
    """
    argument = cache_argument(model)
    mask: Tensor | None = None

    def forward(tokens: Tensor) -> Tensor:
        nonlocal mask
        positions: Tensor | None = None
        if pads is not None:
            mask = _grown(mask, tokens, pads)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits: Tensor = model(
            tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{argument: cache}
        ).logits
        return logits

    return forward


def _grown(mask: Tensor | None, tokens: Tensor, pads: Sequence[int]) -> Tensor:
    """`mask` `[batch, seen]` with the new tokens; without one, that of a left-padded prompt."""
    if mask is not None:
        return torch.cat([mask, torch.ones_like(tokens)], 1)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return (positions >= torch.tensor(pads, device=tokens.device)[:, None]).long()


@contextlib.contextmanager
def dynamic(setting: Setting) -> Iterator[Start]:
    """DynamicCache, eager."""
    model = twin(setting.model)
    yield lambda length: Sequences(caller(model, DynamicCache(config=model.config), setting.pads))


@contextlib.contextmanager
def static(setting: Setting) -> Iterator[Start]:
    """StaticCache of just the length, eager."""
    model = twin(setting.model)
    yield lambda length: Sequences(
        caller(model, StaticCache(config=model.config, max_cache_len=length), setting.pads)
    )


@contextlib.contextmanager
def static_compiled(setting: Setting) -> Iterator[Start]:
    """StaticCache under torch.compile(mode="reduce-overhead"), as transformers' docs have it.

    The prompt is run eagerly, one-token steps are compiled.
    """
    model = twin(setting.model)
    argument = cache_argument(model)
    compiled = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)

    def start(length: int) -> Sequences:
        cache = StaticCache(config=model.config, max_cache_len=length)
        eager = caller(model, cache)

        def forward(tokens: Tensor) -> Tensor:
            if tokens.shape[1] > 1:
                return eager(tokens)
            torch.compiler.cudagraph_mark_step_begin()
            logits: Tensor = compiled(tokens, use_cache=True, **{argument: cache}).logits
            return logits

        return Sequences(forward)

    yield start


def paged_start(setting: Setting, model: PreTrainedModel) -> Start:
    """PagedKVCache, a pool of its own for each batch of sequences."""

    def start(length: int) -> Sequences:
        # A page more for each row, since decoding may look a page ahead.
        pages = setting.batch * (1 + pages_for(length, setting.page_size))
        pool = PagePool.for_model(model, page_size=setting.page_size, max_pages=pages)
        return Sequences(caller(model, PagedKVCache(pool), setting.pads), pool)

    return start


@contextlib.contextmanager
def paged(setting: Setting) -> Iterator[Start]:
    """PagedKVCache under the model's stock attention."""
    yield paged_start(setting, twin(setting.model))


@contextlib.contextmanager
def pageforge(setting: Setting) -> Iterator[Start]:
    """PagedKVCache under attn_implementation="pageforge", eager."""
    model = twin(setting.model)
    model.set_attn_implementation("pageforge")
    yield paged_start(setting, model)


def fast_decode(model: PreTrainedModel, *, compile: bool) -> Any:
    """`pageforge.fast_decode`."""
    return importlib.import_module(FAST_DECODE).fast_decode(model, compile=compile)


@contextlib.contextmanager
def fast(setting: Setting) -> Iterator[Start]:
    """fast_decode: captured graphs."""
    model = twin(setting.model)
    with fast_decode(model, compile=False):
        yield paged_start(setting, model)


@contextlib.contextmanager
def fast_compiled(setting: Setting) -> Iterator[Start]:
    """fast_decode(compile=True)."""
    model = twin(setting.model)
    with fast_decode(model, compile=True):
        yield paged_start(setting, model)


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A twin whose attention returns its queries (as wide as V), and which keeps no K/V."""
    AttentionInterface.register(NO_ATTENTION, _no_attention)
    AttentionMaskInterface.register(NO_ATTENTION, _no_mask)
    other = twin(model)
    other.set_attn_implementation(NO_ATTENTION)
    return other


def _no_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if torch.compiler.is_compiling():  # else what makes K and V would be left out as well
        return no_attention(query, key, value), None
    return query[..., : value.shape[-1]].transpose(1, 2), None


@torch.library.custom_op("pageforge_bench::no_attention", mutates_args=())
def no_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`[B, S, Hq, Dv]` of whatever the memory holds, for `[B, Hq, S, Dk]`: no kernel runs."""
    return _room_for(query, value)


@no_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _room_for(query, value)


def _room_for(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, count, _ = query.shape
    return query.new_empty(batch, count, heads, value.shape[-1])


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def stub_eager(setting: Setting) -> Iterator[Start]:
    """No cache and no attention, eager: what everything else of a step costs."""
    model = without_attention(setting.model)
    yield lambda length: Sequences(lambda tokens: model(tokens, use_cache=False).logits)


def _stub_graph(setting: Setting, compiled: bool) -> Start:
    model = without_attention(setting.model)
    if setting.device.type != "cuda":
        raise RuntimeError("a graph needs a CUDA device")
    step: Any = compile_forward(model.forward, dynamic=False) if compiled else model
    token = torch.zeros(setting.batch, 1, dtype=torch.long, device=setting.device)

    def replayed() -> Tensor:
        logits: Tensor = step(token, use_cache=False).logits
        return logits

    memory = GraphMemory(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    with fused(model, compiled=compiled):  # as fast_decode captures
        captured = CapturedStep(replayed, memory)

    def forward(tokens: Tensor) -> Tensor:
        if tokens.shape[1] > 1:
            logits: Tensor = model(tokens, use_cache=False).logits
            return logits
        token.copy_(tokens)
        captured.replay()
        out: Tensor = captured.outputs
        return out

    return lambda length: Sequences(forward)


@contextlib.contextmanager
def stub_graph(setting: Setting) -> Iterator[Start]:
    """The graph of a step without attention and cache: what a graph cannot go below."""
    yield _stub_graph(setting, compiled=False)


@contextlib.contextmanager
def stub_compiled(setting: Setting) -> Iterator[Start]:
    """The same, compiled."""
    yield _stub_graph(setting, compiled=True)


WAYS: dict[str, Way] = {
    "dynamic": dynamic,
    "static": static,
    "static compiled": static_compiled,
    "paged": paged,
    "pageforge": pageforge,
    "fast": fast,
    "fast compiled": fast_compiled,
    "stub": stub_graph,
    "stub compiled": stub_compiled,
}
"""What each is called in tables, in their order."""

STOCK = ("dynamic", "static", "static compiled", "paged")
"""Ways whose attention is the model's own, and so cuDNN's if torch may choose it."""

PADDED = ("dynamic", "static", "paged", "pageforge", "fast", "fast compiled")
"""Ways that take a mask which grows: a compiled StaticCache would be compiled for each length."""

STUBS = {"fast": "stub", "fast compiled": "stub compiled"}
"""Which stub a way is held against."""
