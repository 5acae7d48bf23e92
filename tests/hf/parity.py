"""Running one scenario on transformers' DynamicCache and on a PagedKVCache, and comparing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from pageforge import PagedKVCache, PagePool
from pageforge.probe import cache_argument

TIE = 1e-4
"""Tokens may part only where the reference's two best logits are closer than this."""


class Difference(AssertionError):
    """The two caches did not lead to the same output."""


@dataclass
class Generated:
    """What one `generate` gave: `sequences [S, L]`, and `logits[step] [S, V]` before processing."""

    sequences: Tensor
    logits: Sequence[Tensor]
    scores: Tensor | None = None  # beam search: of each returned sequence


Scenario = Callable[[PreTrainedModel, Cache], list[Generated]]


def check_parity(model: PreTrainedModel, scenario: Scenario, *, page_size: int = 8) -> None:
    """`scenario` gives the same tokens and logits with both caches, and leaves no page behind."""
    expected = scenario(model, dynamic_cache(model))
    with nan_pool(model, page_size) as pool:
        cache = PagedKVCache(pool)
        got = scenario(model, wrap(model, cache))
        assert pool.stats().pages_used > 0
        compare_all(expected, got)
        cache.free()
        check_all_back(pool)


def compare_all(
    expected: Sequence[Generated], got: Sequence[Generated], tolerance: float = 0.0
) -> None:
    assert len(expected) == len(got)
    for turn, (one, other) in enumerate(zip(expected, got, strict=True)):
        parted = compare(one, other, tolerance)
        if parted:
            warnings.warn(f"turn {turn}: {parted} rows part at a tie", stacklevel=2)


def compare(expected: Generated, got: Generated, tolerance: float = 0.0) -> int:
    """Raise Difference unless both agree; returns how many rows part at a tie of the reference.

    With `tolerance` 0 logits must be equal to the last bit.
    """
    new = len(expected.logits)
    rows = expected.sequences.shape[0]
    by_row = expected.scores is None and expected.logits[0].shape[0] == rows
    parted: set[int] = set()
    for step, (one, other) in enumerate(zip(expected.logits, got.logits, strict=False)):
        if one.isnan().any() or other.isnan().any():
            raise Difference(f"step {step}: NaN among the logits")
        if one.shape != other.shape:
            raise Difference(f"step {step}: shapes {one.shape} and {other.shape}")
        alive = [row for row in range(one.shape[0]) if row not in parted]
        worst = (one - other)[alive].abs().max().item() if alive else 0.0
        if worst > tolerance:
            raise Difference(f"step {step}: logits differ by {worst:.3g}, allowed {tolerance:.3g}")
        if by_row:
            parted |= _parting_rows(expected, got, step - new, one, parted)
    if by_row and parted:
        return len(parted)
    if expected.sequences.shape != got.sequences.shape:
        raise Difference(f"lengths {expected.sequences.shape} and {got.sequences.shape}")
    if not torch.equal(expected.sequences, got.sequences):
        raise Difference(f"tokens differ:\n{expected.sequences}\n{got.sequences}")
    if (expected.scores is None) != (got.scores is None):
        raise Difference("only one has scores")
    if expected.scores is not None and got.scores is not None:
        worst = (expected.scores - got.scores).abs().max().item()
        if not worst <= tolerance:
            raise Difference(f"scores differ by {worst:.3g}")
    return 0


def _parting_rows(
    expected: Generated, got: Generated, column: int, logits: Tensor, parted: set[int]
) -> set[int]:
    """The rows that part at this step, each at a tie; raises Difference where it is none."""
    if expected.sequences.shape != got.sequences.shape:
        return set()  # a row ended early: told below
    differ = expected.sequences[:, column] != got.sequences[:, column]
    rows = set(differ.nonzero().flatten().tolist()) - parted
    for row in rows:
        best, second = logits[row].topk(2).values.tolist()
        if best - second >= TIE:
            raise Difference(f"row {row} parts at {column}, where {best} and {second} are no tie")
    return rows


def run(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: Cache, **arguments: Any
) -> Generated:
    """`model.generate`, greedy unless told otherwise, with 14 new tokens."""
    arguments = {"max_new_tokens": 14, "do_sample": False, **arguments}
    torch.manual_seed(11)  # for sampling
    output = model.generate(
        **inputs,
        **{cache_argument(model): cache},
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    return Generated(output.sequences, output.logits, output.get("sequences_scores"))


def prompt(model: PreTrainedModel, lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded random prompts and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, model.config.vocab_size, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def dynamic_cache(model: PreTrainedModel) -> Cache:
    """Transformers' own cache for this model."""
    return wrap(model, DynamicCache(config=model.config.get_text_config(decoder=True)))


def wrap(model: PreTrainedModel, cache: DynamicCache) -> Cache:
    """The cache as this model wants it."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache())
    return cache


def nan_pool(
    model: PreTrainedModel, page_size: int = 8, max_pages: int = 64, **arguments: Any
) -> PagePool:
    """A pool whose pages all hold NaN: who reads a token that was never written shows it."""
    pool = PagePool.for_model(model, page_size=page_size, max_pages=max_pages, **arguments)
    fill_with_nan(pool)
    return pool


def fill_with_nan(pool: PagePool) -> None:
    """NaN in all pages but page 0, which padding reads."""
    for group in range(len(pool.geometry.groups)):
        pool.pages(group)[1:].fill_(torch.nan)


def check_all_back(pool: PagePool) -> None:
    """No page is used, a recount agrees, and page 0 was written by nobody."""
    assert pool.stats().pages_used == 0
    pool.check_invariants([])
    for group in range(len(pool.geometry.groups)):
        assert not pool.pages(group)[0].any()
