"""Tokens a second of `model.generate` itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pageforge.bench.caches import fast_decode
from pageforge.bench.harness import failure, percentile, rotated, synchronize
from pageforge.bench.latency_context import BASE, LatencyBench
from pageforge.bench.models import twin
from pageforge.bench.report import table
from pageforge.geometry import pages_for
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

REPEATS = 3
"""Beside the first call, which captures."""

Answer = Callable[[Tensor, int], Tensor]
"""The new tokens `[batch, count]` to prompts `[batch, n]`."""


@dataclass
class Lane:
    """One way's calls: seconds of the first and of the others, and the last one's tokens."""

    answer: Answer
    first: float | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: Tensor | None = None


@contextlib.contextmanager
def dynamic(model: PreTrainedModel) -> Iterator[Answer]:
    """Transformers' own cache."""
    yield partial(_generate, twin(model))


@contextlib.contextmanager
def paged(model: PreTrainedModel, attention: str | None = None) -> Iterator[Answer]:
    """PagedKVCache, a new one for each call, under the model's own or another attention.

    All in one pool, which the first call makes.
    """
    own = twin(model)
    if attention is not None:
        own.set_attn_implementation(attention)
    with contextlib.ExitStack() as stack:
        pools: list[PagePool] = []

        def answer(tokens: Tensor, count: int) -> Tensor:
            if not pools:
                # A page more for each row, since decoding may look a page ahead.
                pages = tokens.shape[0] * (1 + pages_for(tokens.shape[1] + count, 16))
                pool = PagePool.for_model(own, page_size=16, max_pages=pages)
                pools.append(stack.enter_context(pool))
            with PagedKVCache(pools[0]) as cache:
                return _generate(own, tokens, count, cache)

        yield answer


@contextlib.contextmanager
def fast(model: PreTrainedModel) -> Iterator[Answer]:
    """fast_decode with the cache that it makes."""
    own = twin(model)
    with fast_decode(own, compile=False):
        yield partial(_generate, own)


WAYS: dict[str, Callable[[PreTrainedModel], contextlib.AbstractContextManager[Answer]]] = {
    BASE: dynamic,
    "paged": paged,
    "pageforge": partial(paged, attention="pageforge"),
    "fast": fast,
}


def _generate(
    model: PreTrainedModel, tokens: Tensor, count: int, cache: Cache | None = None
) -> Tensor:
    out: Tensor = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        **({} if cache is None else {cache_argument(model): cache}),
    )
    return out[:, tokens.shape[1] :]


@torch.no_grad()
def generate(bench: LatencyBench) -> None:
    """Greedy, all ways by turns."""
    batch, prompt = max(bench.batches), min(bench.prompts)
    count = min(bench.generated, bench.positions - prompt)
    torch.compiler.reset()
    tokens = bench.tokens(batch, prompt)
    ways = [name for name in WAYS if name in bench.ways]
    lanes: dict[str, Lane] = {}
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in ways:
            try:
                lanes[name] = Lane(stack.enter_context(WAYS[name](bench.model)))
            except Exception as error:
                failures[name] = failure(error)
        for repeat in range(1 + REPEATS):
            for name in rotated(list(lanes), repeat):
                try:
                    _call(lanes[name], tokens, count)
                except Exception as error:
                    failures[name] = failure(error)
                    del lanes[name]
    base = lanes.get(BASE)
    case = {"model": bench.name, "batch": batch, "prompt": prompt, "new_tokens": count}
    rows: list[tuple[object, ...]] = []
    for name in ways:
        if name in failures:
            bench.report.add(section="generate", **case, way=name, failure=failures[name])
            rows.append((name, failures[name]))
            continue
        found = _rates(lanes[name], base, batch * count)
        bench.report.add(section="generate", **case, way=name, **found)
        rows.append((name, *found.values()))
    columns = ("generate", "tokens/s", "low", "high", "/dynamic", "first call s", "same tokens")
    title = f"{bench.name}: generate, batch {batch}, prompt {prompt}, {count} new tokens, greedy"
    bench.console.print(table(title, columns, rows))
    bench.console.print()


def _call(lane: Lane, tokens: Tensor, count: int) -> None:
    synchronize(tokens.device)
    begin = time.perf_counter()
    lane.tokens = lane.answer(tokens, count)
    synchronize(tokens.device)
    taken = time.perf_counter() - begin
    if lane.first is None:
        lane.first = taken
    else:
        lane.seconds.append(taken)


def _rates(lane: Lane, base: Lane | None, num_tokens: int) -> dict[str, float | None]:
    """Tokens a second: the median, the slowest and the fastest; and over the base's."""
    median = percentile(lane.seconds, 50)
    found: dict[str, float | None] = {
        "tokens_per_s": num_tokens / median,
        "tokens_per_s_low": num_tokens / max(lane.seconds),
        "tokens_per_s_high": num_tokens / min(lane.seconds),
        "over_dynamic": None,
        "first_call_s": lane.first,
        "same_tokens": None,
    }
    if base is not None and lane.tokens is not None and base.tokens is not None:
        found["over_dynamic"] = percentile(base.seconds, 50) / median
        found["same_tokens"] = float((lane.tokens == base.tokens).float().mean())
    return found
