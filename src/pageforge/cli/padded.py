"""Prompts as one left-padded batch through `generate`.

So caches are compared, and models are run that the engine refuses.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    TextStreamer,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from pageforge.bench.memory_use import storage_bytes
from pageforge.cli.output import RunningText, bar
from pageforge.cli.prompts import pad_left
from pageforge.errors import ShapeError, expected
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import PagePool, PoolStats
from pageforge.probe import cache_argument, learned_positions


@dataclass
class Outcome:
    """One run with one kind of cache."""

    tokens: list[list[int]]  # new ones, for each prompt
    seconds: float


@dataclass(frozen=True)
class PaddedBatch:
    """What is generated; the same for every kind of cache."""

    model: PreTrainedModel
    ids: Tensor  # [S, T], left-padded
    mask: Tensor
    config: Any  # transformers' GenerationConfig
    seed: int

    def generate(self, cache: Cache, streamer: BaseStreamer | None = None) -> Outcome:
        """Generate into `cache`."""
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        output = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            generation_config=self.config,
            streamer=streamer,
            **{cache_argument(self.model): cache},
        )
        seconds = time.perf_counter() - start
        return Outcome([self._cut(row) for row in output[:, self.ids.shape[1] :].tolist()], seconds)

    def _cut(self, row: list[int]) -> list[int]:
        """A row up to its end token; what follows that one is padding."""
        ends = self.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        for index, token in enumerate(row):
            if token in ends:
                return row[: index + 1]
        return row


def padded_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> PaddedBatch:
    """A batch of prompts given as token ids.

    Raises ShapeError where the model has no positions for them and for the new tokens.
    """
    limit, longest = learned_positions(model), max(map(len, rows))
    # The last token is never fed back, so it needs no position.
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise ShapeError(
            expected(
                "prompt and new tokens",
                f"at most {limit + 1}, for the model's {limit} learned positions",
                f"{longest} + {max_new_tokens}",
                "shorten the prompt, or pass a smaller --max-new-tokens",
            )
        )
    config: Any = copy.deepcopy(model.generation_config)
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        ends = config.eos_token_id
        config.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
    config.max_length = None
    config.max_new_tokens = max_new_tokens
    config.cache_implementation = None  # the cache is ours to choose
    config.do_sample = temperature > 0
    config.temperature = temperature or None
    if not config.do_sample:
        config.top_k = config.top_p = None
    ids, mask = pad_left(rows, config.pad_token_id)
    return PaddedBatch(model, ids.to(model.device), mask.to(model.device), config, seed)


def generate_paged(
    batch: PaddedBatch, tokenizer: PreTrainedTokenizerBase, pool: PagePool, *, streaming: bool
) -> tuple[Outcome, PoolStats]:
    """Generate into pages of `pool`: the outcome, and the pool when it was fullest.

    `streaming`: print the text, of a single prompt, as it comes.
    """
    with PagedKVCache(pool, attention_mask=batch.mask) as cache:
        return _generate(batch, cache, tokenizer, streaming), pool.stats()


def _generate(
    batch: PaddedBatch, cache: Cache, tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> Outcome:
    if not streaming:
        return _counted(batch, cache, "generating")
    with RunningText() as text:
        return batch.generate(cache, _Printer(tokenizer, text))


def _counted(batch: PaddedBatch, cache: Cache, label: str) -> Outcome:
    with bar() as shown:
        return batch.generate(cache, _Counter(shown, label, batch.config.max_new_tokens))


class _Printer(TextStreamer):
    """Hands the text of the new tokens on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: RunningText):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._shown = text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._shown.write(text)


class _Counter(BaseStreamer):
    """Moves a progress bar."""

    def __init__(self, shown: Any, label: str, total: int):
        self._shown = shown
        self._task = shown.add_task(label, total=total)
        self._seen_prompt = False

    def put(self, value: Tensor) -> None:
        if self._seen_prompt:
            self._shown.advance(self._task)
        self._seen_prompt = True

    def end(self) -> None:
        pass


def compare(batch: PaddedBatch, paged: Outcome) -> dict[str, Any]:
    """The same run with transformers' own caches: what their tensors really take."""
    length = batch.ids.shape[1] + batch.config.max_new_tokens
    found = {}
    for name, cache in (
        ("DynamicCache", DynamicCache(config=batch.model.config)),
        ("StaticCache", StaticCache(config=batch.model.config, max_cache_len=length)),
    ):
        outcome = _counted(batch, cache, name)
        found[name] = {
            "seconds": outcome.seconds,
            "bytes": storage_bytes(cache),
            "same_tokens": outcome.tokens == paged.tokens,
        }
    return found
