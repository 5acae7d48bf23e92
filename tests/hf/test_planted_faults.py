"""The parity tests see what they are there to see: each planted fault makes them fail.

Pages hold old K/V here instead of NaN, as in a pool that was used before: NaN would be too easy to
see. Where a fault needs a moment to strike, it strikes once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hf.parity import (
    Difference,
    Generated,
    Scenario,
    compare,
    compare_all,
    dynamic_cache,
    nan_pool,
    prompt,
    wrap,
)
from tests.hf.test_token_parity import (
    assisted,
    beams_of_three_rows,
    beams_past_the_margin,
    chunked_prefill,
    copies_of_a_prompt,
    greedy,
    past_the_margin,
    three_turns,
)
from tests.hf.tiny_models import CONFIGS, SLIDING, tiny
from torch import Tensor

from pageforge import PagedKVCache, PagePool, ops
from pageforge import pool as pool_module
from pageforge.hf import cache_state
from pageforge.hf.paged_layer import PagedLayer


def check(name: str, scenario: Scenario, *, mask: Tensor | None = None) -> None:
    """As `check_parity`, on a pool full of old K/V."""
    model = tiny(name)
    expected = scenario(model, dynamic_cache(model))
    with nan_pool(model) as pool:
        for group in range(len(pool.geometry.groups)):
            pool.pages(group)[1:].normal_()
        cache = PagedKVCache(pool, attention_mask=mask)
        got = scenario(model, wrap(model, cache))
        cache.free()
    compare_all(expected, got)


def once(calls: int, fault: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but `fault` at the call with that number."""
    seen = 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        return (fault if seen == calls else real)(*args, **kwargs)

    return function


def plant_in_steps(
    monkeypatch: pytest.MonkeyPatch, calls: int, fault: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """In the layer of a step after the prompt with that number.

    `fault`, called with the real thing, the layer's page table, new K and V and pages, stands in.
    """
    prepare = ops.write_and_gather
    seen = itertools.count(1)

    def planted(key_pages: Tensor, value_pages: Tensor, table: Tensor, *span: Any) -> Any:
        real = prepare(key_pages, value_pages, table, *span)

        def function(*layer: Tensor) -> tuple[Tensor, Tensor]:
            return fault(real, table, *layer) if next(seen) == calls else real(*layer)

        return function

    monkeypatch.setattr(ops, "write_and_gather", planted)


def test_without_a_fault_the_check_passes() -> None:
    check("llama", greedy)
    check("gemma3", past_the_margin)
    check("llama", greedy, mask=prompt(tiny("llama"), (20, 11, 3))["attention_mask"])


# --- tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_lost_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row's newest token, in one layer, at one step."""

    def lose_one(real, table, key, value, *pages):
        key, value = key.clone(), value.clone()
        key[-1].normal_()  # what its slot held before
        value[-1].normal_()
        return real(key, value, *pages)

    plant_in_steps(monkeypatch, 4, lose_one)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_two_tokens_in_each_others_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.write_kv

    def swap(key, value, key_pages, value_pages, slots, **options):
        slots = slots.clone()
        slots[[-1, -2]] = slots[[-2, -1]]
        real(key, value, key_pages, value_pages, slots, **options)

    monkeypatch.setattr(ops, "write_kv", once(1, swap, real))
    with pytest.raises(Difference):
        check(name, greedy)


def test_a_lost_token_of_a_later_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_first(real, table, key, value, *pages):
        key, value = key.clone(), value.clone()
        key[0, :, 0].normal_()
        value[0, :, 0].normal_()
        return real(key, value, *pages)

    plant_in_steps(monkeypatch, 1, lose_first)
    with pytest.raises(Difference):
        check("llama", chunked_prefill)


def test_padding_counted_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with a real token in it taken for padding."""
    real = cache_state.leading_zeros
    monkeypatch.setattr(
        cache_state, "leading_zeros", lambda mask: tuple(start + 8 for start in real(mask))
    )
    with pytest.raises(Difference):
        check("llama", greedy, mask=prompt(tiny("llama"), (20, 11, 3))["attention_mask"])


# --- pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek_v3", "gemma3", "bart"])
def test_a_zeroed_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def zero_one(real, table, key, value, key_pages, value_pages):
        page = table[0, 0]
        key_pages[page] = 0
        value_pages[page] = 0
        return real(key, value, key_pages, value_pages)

    plant_in_steps(monkeypatch, 3, zero_one)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek_v3", "gemma3", "bart"])
def test_two_swapped_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(real, table, *layer):
        key, value = real(*layer)
        return key[[1, 0, 2]], value[[1, 0, 2]]

    plant_in_steps(monkeypatch, 3, swap)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_keys_and_values_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(real, table, *layer):
        key, value = real(*layer)
        return value, key

    plant_in_steps(monkeypatch, 3, swap)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("scenario", [copies_of_a_prompt, beams_of_three_rows])
def test_a_forgotten_copy_on_write(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "copy_pages", lambda *args: None)
    with pytest.raises(Difference):
        check("llama", scenario)


# --- rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bart"])
def test_unreordered_beams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "reorder_cache", lambda cache, beam_idx: None)
    with pytest.raises(Difference):
        check(name, beams_of_three_rows)


def test_beams_reordered_in_half_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages but not the recurrent states."""

    def pages_only(cache: PagedKVCache, beam_idx: Tensor) -> None:
        cache._state.select(beam_idx)

    monkeypatch.setattr(PagedKVCache, "reorder_cache", pages_only)
    with pytest.raises(Difference):
        check("qwen3_next", beams_of_three_rows)


def test_one_wrong_row_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedKVCache.reorder_cache

    def wrong(cache: PagedKVCache, beam_idx: Tensor) -> None:
        beam_idx = beam_idx.clone()
        beam_idx[0] = 3 if beam_idx[0] != 3 else 2
        real(cache, beam_idx)

    monkeypatch.setattr(PagedKVCache, "reorder_cache", once(5, wrong, real))
    with pytest.raises(Difference):
        check("llama", beams_of_three_rows)


# --- windows and lengths --------------------------------------------------------------------


@pytest.mark.parametrize("name", SLIDING)
def test_a_window_too_short_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedLayer.__init__

    def shorter(layer: PagedLayer, state, index: int, window: int | None) -> None:
        real(layer, state, index, None if window is None else window - 1)

    monkeypatch.setattr(PagedLayer, "__init__", shorter)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("scenario", [past_the_margin, beams_past_the_margin])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_pages_given_back_too_early(
    name: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the margin all is well still; with windows a page shorter it is not."""
    monkeypatch.setattr(pool_module, "ROLLBACK", 0)
    check(name, scenario)
    real = PagePool.new_table

    def short_sighted(pool: PagePool, *args: Any, **kwargs: Any) -> Any:
        table = real(pool, *args, **kwargs)
        table.windows = tuple(window and max(1, window - 8) for window in table.windows)
        return table

    monkeypatch.setattr(PagePool, "new_table", short_sighted)
    with pytest.raises(Difference):
        check(name, scenario)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_crop_that_returns_pages_but_no_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected drafts stay visible: the next tokens come one place too late."""
    real = PagedKVCache.crop

    def one_too_few(cache: PagedKVCache, tokens_to_remove: int) -> None:
        real(cache, min(0, int(tokens_to_remove) + 1))

    monkeypatch.setattr(PagedKVCache, "crop", one_too_few)
    with pytest.raises((Difference, RuntimeError, IndexError)):
        check(name, assisted)


def test_a_turn_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions right, contents of one earlier page old."""

    def stale(real, table, key, value, key_pages, value_pages):
        page = table[0, 0]
        key_pages[page].normal_()
        value_pages[page].normal_()
        return real(key, value, key_pages, value_pages)

    plant_in_steps(monkeypatch, 30, stale)
    with pytest.raises(Difference):
        check("llama", three_turns)


# --- the comparison itself ------------------------------------------------------------------


def generated(logits: list[list[float]], tokens: list[int]) -> Generated:
    """One row; greedy tokens are not checked against the logits here."""
    return Generated(torch.tensor([[7, *tokens]]), [torch.tensor([step]) for step in logits])


CLEAR = [[1.0, 0.5, 0.0], [0.0, 2.0, 1.0]]
TIED = [[1.0, 1.0 - 5e-5, 0.0], [0.0, 2.0, 1.0]]


def test_equal_runs_agree() -> None:
    assert compare(generated(CLEAR, [0, 1]), generated(CLEAR, [0, 1])) == 0


@pytest.mark.parametrize(
    ("logits", "tokens"),
    [
        (CLEAR, [1, 1]),
        (CLEAR, [0, 0]),
        (CLEAR, [0]),
        ([[1.0, 0.5, 1e-6], [0.0, 2.0, 1.0]], [0, 1]),
        ([[1.0, 0.5, 0.0], [torch.nan, 2.0, 1.0]], [0, 1]),
        ([[1.0, 0.5, 0.0], [0.0, 2.0, torch.inf]], [0, 1]),
    ],
    ids=["another token", "another last token", "too short", "other logits", "NaN", "inf"],
)
def test_runs_that_differ(logits: list[list[float]], tokens: list[int]) -> None:
    with pytest.raises(Difference):
        compare(generated(CLEAR, [0, 1]), generated(logits, tokens))


def test_not_a_number_in_both_is_no_agreement() -> None:
    """`max(0, nan)` is 0 in Python."""
    nan = generated([[torch.nan, 1.0, 0.0], [0.0, 2.0, 1.0]], [0, 1])
    with pytest.raises(Difference, match="NaN"):
        compare(nan, nan)


def test_rows_may_part_at_a_tie_and_are_counted() -> None:
    other = [TIED[0], [5.0, 5.0, 5.0]]  # after the parting logits are another row's
    assert compare(generated(TIED, [0, 1]), generated(other, [1, 2])) == 1


def test_rows_may_not_part_before_the_tie() -> None:
    with pytest.raises(Difference, match="no tie"):
        compare(generated([CLEAR[0], TIED[0]], [0, 1]), generated([CLEAR[0], TIED[0]], [1, 1]))


def test_a_tie_is_one_of_the_reference() -> None:
    with pytest.raises(Difference):
        compare(generated(CLEAR, [0, 1]), generated(TIED, [1, 1]), tolerance=1.0)


def test_a_tolerance_is_a_bound_for_the_worst() -> None:
    close = [[1.0, 0.5, 1e-6], [0.0, 2.0, 1.0]]
    assert compare(generated(CLEAR, [0, 1]), generated(close, [0, 1]), tolerance=1e-5) == 0
    with pytest.raises(Difference, match="1e-06"):
        compare(generated(CLEAR, [0, 1]), generated(close, [0, 1]), tolerance=1e-7)
