"""The parity tests under pageforge attention see what they are there to see.

Each planted fault makes them fail. Pages hold old K/V instead of NaN, which would be too easy to
see; where a fault needs a moment to strike, it strikes once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.hf.parity import Difference, Scenario, compare_all, nan_pool, wrap
from tests.hf.test_attention_parity import IN_PLACE, TOLERANCE, stock
from tests.hf.test_planted_faults import once
from tests.hf.test_token_parity import (
    assisted,
    beams_of_three_rows,
    chunked_prefill,
    copies_of_a_prompt,
    greedy,
    past_the_margin,
)
from tests.hf.tiny_models import SLIDING, attending
from torch import Tensor

from pageforge import PagedKVCache, PagePool, ops
from pageforge import pool as pool_module
from pageforge.batch import StepTensors
from pageforge.hf import mask
from pageforge.hf.cache_state import CacheState
from pageforge.ops.launch import dense_last

Op = Callable[..., Any]


def check(name: str, scenario: Scenario) -> None:
    expected = stock(name, scenario)
    model = attending(name)
    with nan_pool(model) as pool:
        for group in range(len(pool.geometry.groups)):
            pool.pages(group)[1:].normal_()
        cache = PagedKVCache(pool)
        got = scenario(model, wrap(model, cache))
        cache.free()
    compare_all(expected, got, TOLERANCE[name])


@pytest.mark.parametrize("scenario", [greedy, chunked_prefill, past_the_margin])
def test_without_a_fault_the_check_passes(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "write_and_attend", lambda real: real)
    check("gemma3", scenario)


def by_the_op(
    step: StepTensors,
    key_pages: Tensor,
    value_pages: Tensor,
    window: int | None,
    padding: tuple[int, ...] | None,
) -> Op:
    """What `step.dense_decode` gives, by `ops.write_and_attend`, in which faults are planted."""

    def decode(*tensors: Tensor) -> Tensor:
        *tensors, scores = tensors
        return ops.write_and_attend(
            *map(dense_last, tensors[:3]),
            *tensors[3:],
            step.page_table,
            step.seq_lens,
            window=window,
            starts=step.starts(padding),
            **scores._asdict(),
        )

    return decode


def plant(patch: pytest.MonkeyPatch, name: str, fault: Callable[[Op], Op], call: int = 0) -> None:
    """`ops.<name>` with a fault: at that call, or (0) at every one."""
    if name == "write_and_attend":
        patch.setattr(StepTensors, "dense_decode", by_the_op)
    real = getattr(ops, name)
    patch.setattr(ops, name, once(call, fault(real), real) if call else fault(real))


def with_options(**changes: Callable[[Any], Any]) -> Callable[[Op], Op]:
    """An op whose keyword arguments are changed on the way."""

    def fault(real: Op) -> Op:
        return lambda *args, **kwargs: real(
            *args, **kwargs | {name: change(kwargs[name]) for name, change in changes.items()}
        )

    return fault


def with_tensors(**changes: Callable[[Any], Any]) -> Callable[[Op], Op]:
    """`write_and_attend` with some tensors changed on the way."""
    names = ["query", "key", "value", "key_pages", "value_pages", "page_table", "seq_lens"]

    def fault(real: Op) -> Op:
        return lambda *args, **kwargs: real(
            *[changes.get(name, lambda it: it)(it) for name, it in zip(names, args, strict=True)],
            **kwargs,
        )

    return fault


# --- tokens and pages -----------------------------------------------------------------------


def loses_what_it_wrote(real: Op) -> Op:
    """The last row's newest token is gone when the op is done."""

    def op(query, key, value, key_pages, value_pages, page_table, seq_lens, **options):
        out = real(query, key, value, key_pages, value_pages, page_table, seq_lens, **options)
        last = int(seq_lens[-1]) - 1
        page = page_table[-1, last // key_pages.shape[2]]
        key_pages[page, :, last % key_pages.shape[2]] = 0.5
        value_pages[page, :, last % key_pages.shape[2]] = 0.5
        return out

    return op


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_lost_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "write_and_attend", loses_what_it_wrote, call=4)
    with pytest.raises(Difference):
        check(name, greedy)


def test_a_lost_token_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_one(real: Op) -> Op:
        def op(key, value, key_pages, value_pages, slots, **options):
            slots = slots.clone()
            slots[-1] = -1
            real(key, value, key_pages, value_pages, slots, **options)

        return op

    plant(monkeypatch, "write_kv", lose_one, call=2)
    with pytest.raises(Difference):
        check("llama", greedy)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bart"])
def test_a_zeroed_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def zero_one(real: Op) -> Op:
        def op(query, key, value, key_pages, value_pages, page_table, seq_lens, **options):
            page = page_table[0, (seq_lens[0] - 2) // key_pages.shape[2]]
            key_pages[page] = 0
            value_pages[page] = 0
            return real(query, key, value, key_pages, value_pages, page_table, seq_lens, **options)

        return op

    plant(monkeypatch, "write_and_attend", zero_one, call=9)
    with pytest.raises(Difference):
        check(name, greedy)


TENSOR_FAULTS = {
    "rows in each other's place": {"page_table": lambda table: table[[1, 0, 2]]},
    "K and V of other rows": {"key": lambda key: key[[1, 0, 2]]},
    "another token's place": {"seq_lens": lambda lens: lens - 1},
    "queries of other heads": {"query": lambda query: query.flip(1)},
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_mixed_up(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "write_and_attend", with_tensors(**TENSOR_FAULTS[fault]), call=5)
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("scenario", [copies_of_a_prompt, beams_of_three_rows])
def test_a_forgotten_copy_on_write(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "copy_pages", lambda *args: None)
    with pytest.raises(Difference):
        check("llama", scenario)


# --- what attention sees --------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("op", ["attend", "write_and_attend"])
@pytest.mark.parametrize("name", SLIDING)
def test_a_window_off_by_one(
    name: str, op: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, op, with_options(window=lambda window: window and window + change))
    with pytest.raises(Difference):
        check(name, greedy)


def test_a_window_that_the_mask_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "_pattern", lambda mask_function, size: (None, None))
    plant(monkeypatch, "attend", with_options(window=lambda window: None))
    with pytest.raises(Difference):
        check("mistral", greedy)


@pytest.mark.parametrize(
    ("name", "option"), [("gemma2", "softcap"), ("gpt_oss", "sinks"), ("llama", "starts")]
)
@pytest.mark.parametrize("op", ["attend", "write_and_attend"])
def test_an_option_forgotten(
    name: str, option: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, op, with_options(**{option: lambda value: None}))
    with pytest.raises(Difference):
        check(name, greedy)


@pytest.mark.parametrize("op", ["attend", "write_and_attend"])
def test_another_scale(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, op, with_options(scale=lambda scale: 1.001 * scale))
    with pytest.raises(Difference):
        check("llama", greedy)


@pytest.mark.parametrize("change", [-1, 1])
def test_padding_off_by_one(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mask.left_padding
    monkeypatch.setattr(
        mask, "left_padding", lambda shown: tuple(n and n + change for n in real(shown))
    )
    with pytest.raises(Difference):
        check("llama", greedy)


def test_pages_given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ROLLBACK", 0)
    check("gemma3", past_the_margin)
    real = PagePool.new_table

    def short_sighted(pool: PagePool, *args: Any, **kwargs: Any) -> Any:
        table = real(pool, *args, **kwargs)
        table.windows = tuple(window and max(1, window - 8) for window in table.windows)
        return table

    monkeypatch.setattr(PagePool, "new_table", short_sighted)
    with pytest.raises(Difference):
        check("gemma3", past_the_margin)


# --- rows and lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "bart"])
def test_unreordered_beams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "reorder_cache", lambda cache, beam_idx: None)
    with pytest.raises(Difference):
        check(name, beams_of_three_rows)


def test_a_crop_that_leaves_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedKVCache.crop

    def one_too_few(cache: PagedKVCache, tokens_to_remove: int) -> None:
        real(cache, min(0, int(tokens_to_remove) + 1))

    monkeypatch.setattr(PagedKVCache, "crop", one_too_few)
    with pytest.raises((Difference, RuntimeError, IndexError)):
        check("llama", assisted)


def test_tokens_kept_back_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: CacheState) -> None:
        state.pending = None

    monkeypatch.setattr(CacheState, "write_pending", forget)
    with pytest.raises(Difference):
        check("deepseek_v3", greedy)
