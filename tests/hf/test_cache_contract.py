"""PagedKVCache keeps the contract of transformers' caches, method by method."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from tests.hf.dense_oracle import DenseOracle
from tests.hf.parity import (
    check_all_back,
    compare,
    compare_all,
    dynamic_cache,
    fill_with_nan,
    nan_pool,
    prompt,
    run,
)
from tests.hf.tiny_models import WINDOW, tiny
from torch import Tensor
from transformers import DynamicCache, JetMoeConfig, JetMoeForCausalLM

from pageforge import (
    CropError,
    GeometryError,
    KVGeometry,
    LayerShape,
    OutOfPages,
    PagedKVCache,
    PageForgeError,
    PagePool,
    ShapeError,
    UnsupportedModel,
    UseAfterFree,
    ops,
)
from pageforge.geometry import ceil_div
from pageforge.hf.new_tokens import NewTokens
from pageforge.pool import ROLLBACK
from pageforge.probe import cache_argument

KINDS = ["gpt2", "llama", "mistral", "gemma3", "deepseek_v3"]
"""All heads alike, grouped heads, all sliding, sliding and full, K and V of different dims."""

SLIDING = ["mistral", "gemma3"]

POSITIVE_CROP = Version(transformers.__version__) < Version("5.18")


class Caches:
    """A PagedKVCache on a pool of NaN, transformers' DynamicCache, and the oracle, side by side."""

    def __init__(self, name: str, rows: int = 3, page_size: int = 8, **arguments):
        model = tiny(name)
        self.pool = nan_pool(model, page_size, max_pages=128)
        self.paged = PagedKVCache(self.pool, **arguments)
        self.stock = DynamicCache(config=model.config)
        self.oracle = DenseOracle(self.pool.geometry, rows)

    def update(self, tokens: int) -> None:
        """New tokens in every layer; all three must return the same K/V."""
        for layer in self.oracle.shapes:
            sizes = self.paged.get_mask_sizes(tokens, layer)
            assert sizes == self.stock.get_mask_sizes(tokens, layer)
            assert sizes == self.oracle.mask_sizes(layer, tokens)
            key, value = self.oracle.new_tokens(layer, tokens)
            stock = self.stock.update(key, value, layer)
            paged = self.paged.update(key, value, layer)
            for one, other, third in zip(
                paged, stock, self.oracle.update(layer, key, value), strict=True
            ):
                assert one.dtype == key.dtype
                assert torch.equal(one, other)
                assert torch.equal(one, third)
                assert one.shape[2] == sizes[0]
        self.check()

    def check(self) -> None:
        check_against(self.paged, self.oracle)
        for layer in self.oracle.shapes:
            assert self.paged.get_seq_length(layer) == self.stock.get_seq_length(layer)
            for tokens in (1, 3):
                assert self.paged.get_mask_sizes(tokens, layer) == self.stock.get_mask_sizes(
                    tokens, layer
                )
        self.pool.check_invariants()

    def close(self) -> None:
        self.paged.free()
        check_all_back(self.pool)
        self.pool.close()


def check_against(cache: PagedKVCache, oracle: DenseOracle) -> None:
    """The cache holds what the oracle holds."""
    for layer in oracle.shapes:
        assert cache.get_seq_length(layer) == oracle.length
        key, value = oracle.stored(layer)
        if oracle.length == 0:
            assert cache.layers[layer].keys is None
        else:
            assert torch.equal(cache.layers[layer].keys, key)
            assert torch.equal(cache.layers[layer].values, value)


Make = Callable[..., Caches]


@pytest.fixture
def caches() -> Iterator[Make]:
    """`caches(name, rows, page_size)` makes Caches, and frees them in the end."""
    made: list[Caches] = []

    def make(*args: Any, **kwargs: Any) -> Caches:
        made.append(Caches(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- update, lengths, masks -----------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_update_returns_what_transformers_returns(name: str, caches: Make) -> None:
    both = caches(name)
    for tokens in (5, 1, 1, 1, 9, 1, 20, 1, 2):
        both.update(tokens)
    assert both.paged.get_seq_length() == both.stock.get_seq_length() == 41
    assert both.paged.get_query_offset() == 41


@pytest.mark.parametrize("name", KINDS)
def test_what_transformers_asks_of_a_cache(name: str, caches: Make) -> None:
    both = caches(name)
    for _ in range(2):
        paged, stock = both.paged, both.stock
        assert len(paged) == len(stock)
        assert paged.is_sliding == stock.is_sliding
        assert paged.is_linear == stock.is_linear
        assert paged.is_compileable is stock.is_compileable is False
        assert paged.is_croppable is stock.is_croppable is True
        assert paged.is_initialized == stock.is_initialized
        assert paged.get_max_length() == stock.get_max_length()
        for layer in range(len(paged)):
            assert paged.get_max_length(layer) == stock.get_max_length(layer)
        assert type(paged.get_seq_length()) is int
        both.update(3)
    assert isinstance(paged, DynamicCache)  # EncoderDecoderCache demands it
    assert repr(paged).startswith("PagedKVCache")


def test_what_update_returned_stays_as_it_was(caches: Make) -> None:
    """Fresh tensors every time: a model may keep them."""
    both = caches("llama")
    both.update(7)
    key, value = both.oracle.new_tokens(0, 1)
    got = both.paged.update(key, value, 0)
    kept = [tensor.clone() for tensor in got]
    both.paged.update(*both.oracle.new_tokens(1, 1), 1)
    for layer in (0, 1):
        both.paged.update(*both.oracle.new_tokens(layer, 12), layer)
    both.paged.reset()
    fill_with_nan(both.pool)
    for tensor, was in zip(got, kept, strict=True):
        assert torch.equal(tensor, was)


def test_the_new_keys_are_taken_as_they_are_at_the_time(caches: Make) -> None:
    """A model may change its own K/V after `update`, in the first forward too."""
    both = caches("llama", rows=1)
    key, value = both.oracle.new_tokens(0, 4)
    both.oracle.update(0, key.clone(), value.clone())
    both.paged.update(key, value, 0)
    key.zero_()
    value.zero_()
    assert torch.equal(both.paged.layers[0].keys, both.oracle.stored(0)[0])


@pytest.mark.parametrize("name", KINDS)
def test_what_layers_of_a_step_share_is_made_once(
    name: str, caches: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for each group of them; the ops that would make all of it again are not called."""
    both = caches(name)
    both.update(5)
    made: list[int] = []
    prepare = ops.write_and_gather
    monkeypatch.setattr(ops, "write_and_gather", lambda *args: made.append(1) or prepare(*args))
    for op in ("write_kv", "gather_kv"):
        monkeypatch.setattr(ops, op, None)
    for layer in both.oracle.shapes:
        both.paged.update(*both.oracle.new_tokens(layer, 1), layer)
    assert len(made) == len(both.pool.geometry.groups)
    assert both.paged.num_gathers == len(both.oracle.shapes)


@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_no_tokens(name: str, caches: Make) -> None:
    both = caches(name)
    for tokens in (0, 9, 0, 1):
        both.update(tokens)


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)],
)
def test_inference_mode_and_no_grad_in_turns(first, second, from_config: bool) -> None:
    """Also for a pool that is made at the first update, inside inference mode."""
    model = tiny("gemma3")
    ids = prompt(model, (30, 30))["input_ids"]

    def logits(cache) -> list[Tensor]:
        found = []
        for mode, start, stop in ((first, 0, 13), (second, 13, 14), (first, 14, 30)):
            with mode():
                argument = {cache_argument(model): cache}
                found.append(model(input_ids=ids[:, start:stop], **argument).logits.clone())
        return found

    with nan_pool(model) as pool:
        cache = (
            PagedKVCache(model.config, page_size=8, max_pages=64)
            if from_config
            else PagedKVCache(pool)
        )
        for one, other in zip(logits(cache), logits(dynamic_cache(model)), strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            forked = copy.deepcopy(cache)
            forked.crop(-3)
            forked.free()
        cache.free()


def test_autocast_needs_a_pool_of_its_dtype() -> None:
    """K/V then come in another dtype than the model's."""
    model = tiny("gpt2")
    ids = prompt(model, (20, 20))["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with nan_pool(model) as pool:
            with pytest.raises(ShapeError, match="dtype="):
                model(input_ids=ids, **{cache_argument(model): PagedKVCache(pool)})
            gc.collect()
            check_all_back(pool)
        with nan_pool(model, dtype=torch.bfloat16) as pool, PagedKVCache(pool) as cache:
            stock = dynamic_cache(model)
            for start, stop in ((0, 13), (13, 14), (14, 20)):
                one, other = (
                    model(input_ids=ids[:, start:stop], **{cache_argument(model): each}).logits
                    for each in (cache, stock)
                )
                assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_old_name_of_the_argument() -> None:
    """`past_key_values`, as all of the documentation before 5.24 has it."""
    model = tiny("llama")
    inputs = prompt(model, (9, 4))
    arguments = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(**inputs, **arguments)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        got = model.generate(**inputs, past_key_values=cache, **arguments)
        assert cache.get_seq_length() == 17
    assert torch.equal(expected, got)


# --- page boundaries ------------------------------------------------------------------------


def by_prefill(both: Caches, length: int) -> None:
    both.update(length)


def by_decode(both: Caches, length: int) -> None:
    both.update(1)
    for _ in range(length - 1):
        both.update(1)


def by_chunks(both: Caches, length: int) -> None:
    for start in range(0, length, 11):
        both.update(min(11, length - start))


def by_crop(both: Caches, length: int) -> None:
    both.update(length + 5)
    both.paged.crop(-5)
    both.oracle.crop(5)
    both.stock.crop(-5)
    both.check()


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("page_size", [8, 16, 32, 128])
@pytest.mark.parametrize("way", [by_prefill, by_decode, by_chunks, by_crop])
def test_lengths_around_page_boundaries(way, page_size: int, around: int, caches: Make) -> None:
    for count in (1, 2):
        both = caches("llama", rows=2, page_size=page_size)
        length = count * page_size + around
        way(both, length)
        assert both.pool.stats().pages_used == 2 * ceil_div(length, page_size)
        both.update(1)
        assert both.pool.stats().pages_used == 2 * ceil_div(length + 1, page_size)


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("start", [7, 8, 9])
def test_left_padding_around_page_boundaries(start: int, around: int) -> None:
    """Real tokens are all there; of the pads only those that share a page with them take room."""
    model = tiny("llama")
    length = 24 + around
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :start] = 0
    with nan_pool(model) as pool, PagedKVCache(pool, attention_mask=mask) as cache:
        oracle = DenseOracle(pool.geometry, 2)
        for tokens in (start - 1, 2, length - start - 1, 1):
            for layer in oracle.shapes:
                key, value = oracle.new_tokens(layer, tokens)
                expected = oracle.update(layer, key, value)
                got = cache.update(key, value, layer)
                for one, other in zip(got, expected, strict=True):
                    assert torch.equal(one[0, :, start:], other[0, :, start:])
                    assert torch.equal(one[1], other[1])
                    assert not one.isnan().any()
        pages = ceil_div(length + 1, 8)
        assert pool.stats().pages_used == 2 * pages - start // 8


# --- crop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("removed", [0, 1, 4, 6, 7, 8, 50])
@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek_v3"])
def test_crop(name: str, removed: int, as_tensor: bool, caches: Make) -> None:
    """Assisted decoding of 5.17 passes a 0-d tensor, later versions an int."""
    both = caches(name)
    both.update(7)
    both.paged.crop(torch.tensor(-removed) if as_tensor else -removed)
    both.oracle.crop(removed)
    assert both.pool.stats().pages_used == (3 if removed < 7 else 0)
    check_against(both.paged, both.oracle)
    if removed < 7:  # an emptied DynamicCache is odd: its shape stays
        both.stock.crop(-removed)
        both.check()
    for tokens in (1, 9):
        update_paged(both.paged, both.oracle, tokens)


def update_paged(cache: PagedKVCache, oracle: DenseOracle, tokens: int) -> None:
    """New tokens in every layer of a cache and of its oracle."""
    for layer in oracle.shapes:
        assert cache.get_mask_sizes(tokens, layer) == oracle.mask_sizes(layer, tokens)
        key, value = oracle.new_tokens(layer, tokens)
        expected = oracle.update(layer, key, value)
        for one, other in zip(cache.update(key, value, layer), expected, strict=True):
            assert torch.equal(one, other)
    check_against(cache, oracle)


@pytest.mark.parametrize("length", [1, 3, 7, 8, 30])
def test_crop_to_a_length(length: int, caches: Make) -> None:
    """A positive number: "keep so many" in 5.17, an error later."""
    both = caches("llama")
    both.update(7)
    if POSITIVE_CROP:
        both.paged.crop(length)
        both.stock.crop(length)
        both.oracle.crop(max(0, 7 - length))
    else:
        with pytest.raises(ValueError, match="0 or less"):
            both.paged.crop(length)
        with pytest.raises(ValueError, match="positive"):
            both.stock.crop(length)
    both.check()
    both.update(2)


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("length", [5, 7, 8, 9, 25, 60])
@pytest.mark.parametrize("removed", [0, 1, 4])
def test_crop_of_sliding_layers_as_in_assisted_decoding(
    name: str, length: int, removed: int, caches: Make
) -> None:
    both = caches(name)
    both.update(length)
    for cache in (both.paged, both.stock):
        cache.activate_past_recording()
    for _ in range(3):
        both.update(4)
        both.oracle.crop(removed)
        for cache in (both.paged, both.stock):
            cache.crop(-removed)
        both.check()


@pytest.mark.parametrize("name", SLIDING)
def test_crop_of_sliding_layers_within_the_margin(name: str, caches: Make) -> None:
    """Where transformers refuses: ROLLBACK tokens behind the window are still there."""
    both = caches(name)
    both.update(100)
    both.update(1)
    with pytest.raises(RuntimeError, match="past"):
        both.stock.crop(-1)
    both.paged.crop(-ROLLBACK)
    both.oracle.crop(ROLLBACK)
    check_against(both.paged, both.oracle)
    update_paged(both.paged, both.oracle, 3)


@pytest.mark.parametrize("name", SLIDING)
def test_crop_of_sliding_layers_past_the_margin(name: str, caches: Make) -> None:
    both = caches(name)
    for _ in range(4):
        both.update(50)
    used = both.pool.stats().pages_used
    with pytest.raises(CropError, match="gone"):
        both.paged.crop(-190)
    assert both.pool.stats().pages_used == used
    both.check()  # nothing has changed
    both.update(1)
    both.paged.crop(-1000)  # nothing is left that a window could miss
    assert both.paged.get_seq_length() == 0
    assert both.pool.stats().pages_used == 0


@pytest.mark.parametrize("name", SLIDING)
def test_pages_behind_window_and_margin_are_given_back(name: str, caches: Make) -> None:
    both = caches(name, rows=2)
    for _ in range(30):
        both.update(10)
        for group, stats in zip(both.pool.geometry.groups, both.pool.stats().groups, strict=True):
            held = stats.pages_used // 2
            if group.shape.window is None:
                assert held == ceil_div(both.oracle.length, 8)
            else:
                # The window, the margin, the last ten tokens, and a page begun at either end.
                assert held <= ceil_div(WINDOW + ROLLBACK + 10, 8) + 1
                assert held * 8 >= min(both.oracle.length, WINDOW + ROLLBACK)


def test_recording_the_past_keeps_all_until_crop(caches: Make) -> None:
    both = caches("mistral", rows=1)
    both.update(90)
    both.paged.activate_past_recording()
    assert both.paged.layers[0].record_past
    for _ in range(10):
        update_paged(both.paged, both.oracle, 10)
    kept = both.pool.stats().pages_used
    assert kept * 8 >= 100 + WINDOW + ROLLBACK
    both.paged.crop(-100)
    both.oracle.crop(100)
    check_against(both.paged, both.oracle)
    update_paged(both.paged, both.oracle, 100)
    both.paged.crop(0)
    assert both.pool.stats().pages_used <= ceil_div(WINDOW + ROLLBACK, 8) + 1
    check_against(both.paged, both.oracle)


def test_crop_into_left_padding_after_pages_slid_away() -> None:
    """Everything real goes; what comes next is real again, in the page of the last pads too."""
    model = tiny("mistral")
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :12] = 0
    with nan_pool(model) as pool, PagedKVCache(pool, attention_mask=mask) as cache:
        oracle = DenseOracle(pool.geometry, 2)
        for tokens in (16, 90, 1):
            for layer in oracle.shapes:
                key, value = oracle.new_tokens(layer, tokens)
                oracle.update(layer, key, value)
                cache.update(key, value, layer)
        assert cache.page_tables[0].first_page() > 2
        with pytest.raises(CropError):
            cache.crop(-97)  # row 1 has no padding: it would need what is gone
        cache.batch_select_indices(torch.tensor([0]))
        oracle.select([0])
        cache.crop(-97)
        oracle.crop(97)
        assert cache.get_seq_length() == 10
        for tokens in (4, 4):
            for layer in oracle.shapes:
                key, value = oracle.new_tokens(layer, tokens)
                expected = oracle.update(layer, key, value)
                got = cache.update(key, value, layer)
                real = 12 - max(0, oracle.length - tokens - WINDOW + 1)
                for one, other in zip(got, expected, strict=True):
                    assert torch.equal(one[:, :, real:], other[:, :, real:])


# --- rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_reorder_cache(name: str, caches: Make) -> None:
    both = caches(name, rows=4)
    both.update(10)
    for rows in ([3, 2, 1, 0], [0, 0, 0, 0], [1, 0, 3, 2]):
        index = torch.tensor(rows)
        both.paged.reorder_cache(index)
        both.stock.reorder_cache(index)
        both.oracle.select(rows)
        both.check()
        for tokens in (1, 7, 1):
            both.update(tokens)


@pytest.mark.parametrize("name", KINDS)
def test_batch_repeat_interleave(name: str, caches: Make) -> None:
    both = caches(name, rows=2)
    both.update(13)
    used = both.pool.stats().pages_used
    both.paged.batch_repeat_interleave(3)
    both.stock.batch_repeat_interleave(3)
    both.oracle.select([0, 0, 0, 1, 1, 1])
    assert both.pool.stats().pages_used == used
    both.check()
    both.update(1)
    both.update(9)


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([2, 0]),
        torch.tensor([-1, 1, 1]),
        torch.tensor([1]),
        torch.tensor([True, False, True]),
        torch.tensor([False, True, False]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_batch_select_indices(name: str, indices: Tensor, caches: Make) -> None:
    both = caches(name)
    both.update(13)
    both.paged.batch_select_indices(indices)
    both.stock.batch_select_indices(indices)
    both.oracle.select(torch.arange(3)[indices].tolist())
    both.check()
    both.update(1)
    both.update(9)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0, 3, 1])),
        lambda cache: cache.batch_select_indices(torch.tensor([3])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
    ],
    ids=["reorder", "select", "select by a mask of another length"],
)
def test_rows_that_do_not_exist(change, caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    with pytest.raises((ShapeError, IndexError)):
        change(both.paged)
    both.check()
    both.update(1)


def test_rows_of_an_empty_cache(caches: Make) -> None:
    """As in transformers, nothing happens before the first tokens."""
    both = caches("llama")
    both.paged.reorder_cache(torch.tensor([1, 0, 2]))
    both.paged.batch_repeat_interleave(2)
    both.paged.crop(-3)
    both.paged.reset()
    both.update(4)


# --- reset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_reset_and_another_batch_size(name: str, caches: Make) -> None:
    both = caches(name)
    both.update(100)
    both.update(3)
    both.paged.reset()
    assert both.pool.stats().pages_used == 0
    both.stock = DynamicCache(config=tiny(name).config)
    both.oracle = DenseOracle(both.pool.geometry, 5)
    both.check()
    for tokens in (9, 1):
        both.update(tokens)


def test_reset_forgets_the_mask_and_the_recording() -> None:
    model = tiny("mistral")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[:, :16] = 0
    with nan_pool(model) as pool, PagedKVCache(pool, attention_mask=mask) as cache:
        update_paged_loosely(cache, pool, rows=2, tokens=20)
        assert pool.stats().pages_used == 2
        cache.activate_past_recording()
        cache.reset()
        assert not cache.layers[0].record_past
        update_paged(cache, DenseOracle(pool.geometry, 3), 20)
        assert pool.stats().pages_used == 9


def update_paged_loosely(cache: PagedKVCache, pool: PagePool, rows: int, tokens: int) -> None:
    oracle = DenseOracle(pool.geometry, rows)
    for layer in oracle.shapes:
        cache.update(*oracle.new_tokens(layer, tokens), layer)


# --- iteration, hooks, early initialization -------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_iteration(name: str, caches: Make) -> None:
    both = caches(name)
    for _ in range(3):
        for one, other in zip(both.paged, both.stock, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)
        both.update(6)
    again = DynamicCache(both.paged, config=tiny(name).config)  # what torch's DDP does with it
    for mine, theirs in zip(again.layers, both.stock.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)


@pytest.mark.parametrize("name", KINDS)
def test_offload_hooks_do_no_harm(name: str, caches: Make) -> None:
    both = caches(name)
    for tokens in (0, 9, 1):
        if tokens:
            both.update(tokens)
        for layer in range(len(both.paged)):
            both.paged.offload(layer)
            both.paged.offload(layer, only_non_sliding=False)
            both.paged.layers[layer].prefetch()
        if tokens:
            both.check()


@pytest.mark.parametrize("name", KINDS)
def test_early_initialization(name: str, caches: Make) -> None:
    both = caches(name)
    for cache in (both.paged, both.stock):
        cache.early_initialization(
            batch_size=3,
            num_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
    assert both.pool.stats().pages_used == 0
    if name != "deepseek_v3":  # whose K and V dims differ, which transformers cannot say here
        both.update(5)
    else:
        update_paged(both.paged, both.oracle, 5)


def test_early_initialization_does_not_fix_the_batch_size(caches: Make) -> None:
    """The rows count from the first tokens on, as in transformers."""
    both = caches("llama", rows=3)
    for cache in (both.paged, both.stock):
        cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    both.update(5)


# --- conversion -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", [(5,), (7, 1), (30, 1), (100, 3)], ids=str)
def test_to_dynamic(name: str, lengths: tuple[int, ...], caches: Make) -> None:
    both = caches(name)
    for tokens in lengths:
        both.update(tokens)
    dense = both.paged.to_dynamic()
    assert type(dense) is DynamicCache
    for mine, theirs in zip(dense.layers, both.stock.layers, strict=True):
        assert type(mine) is type(theirs)
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert mine.get_seq_length() == theirs.get_seq_length()
    both.paged.reset()  # a copy: it does not care
    fill_with_nan(both.pool)
    for layer in both.oracle.shapes:
        key, value = both.oracle.new_tokens(layer, 2)
        expected = both.stock.update(key, value, layer)
        for one, other in zip(dense.update(key, value, layer), expected, strict=True):
            assert torch.equal(one, other)


def test_to_dynamic_of_a_pool_without_a_model() -> None:
    """A bare geometry has windows too."""
    shapes = {
        0: LayerShape(2, 8, 8, "float32", window=WINDOW),
        1: LayerShape(2, 8, 8, "float32"),
    }
    with PagePool(KVGeometry.of_layers(shapes, 8), max_pages=64) as pool:
        fill_with_nan(pool)
        with PagedKVCache(pool) as cache:
            oracle = DenseOracle(pool.geometry, 2)
            assert cache.is_sliding == [True, False]
            empty = cache.to_dynamic()
            assert empty.get_seq_length() == 0
            for tokens in (30, 1):
                update_paged(cache, oracle, tokens)
            dense = cache.to_dynamic()
            assert dense.is_sliding == [True, False]
            for layer in (0, 1):
                assert dense.get_seq_length(layer) == 31
                assert dense.get_mask_sizes(1, layer) == oracle.mask_sizes(layer, 1)
                key, value = oracle.new_tokens(layer, 1)
                expected = oracle.update(layer, key, value)
                for one, other in zip(dense.update(key, value, layer), expected, strict=True):
                    assert torch.equal(one, other)


@pytest.mark.parametrize("name", KINDS)
def test_from_dynamic_and_back(name: str, caches: Make) -> None:
    both = caches(name)
    both.update(7)
    taken = PagedKVCache.from_dynamic(both.stock, both.pool)
    try:
        check_against(taken, both.oracle)
        for mine, theirs in zip(taken.to_dynamic().layers, both.stock.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
        child = both.oracle.copy()
        update_paged(taken, child, 12)
        both.check()
    finally:
        taken.free()


@pytest.mark.parametrize("name", SLIDING)
def test_from_dynamic_after_its_window_has_moved(name: str, caches: Make) -> None:
    both = caches(name)
    both.update(30)
    used = both.pool.stats().pages_used
    with pytest.raises(ShapeError, match=f"window of {WINDOW}"):
        PagedKVCache.from_dynamic(both.stock, both.pool)
    assert both.pool.stats().pages_used == used
    both.check()


def test_from_dynamic_of_another_model(caches: Make) -> None:
    both = caches("llama")
    for other in ("gpt2", "gemma3"):
        strange = dynamic_cache(tiny(other))
        with torch.no_grad():
            tiny(other)(
                torch.ones(1, 5, dtype=torch.long), **{cache_argument(tiny(other)): strange}
            )
        with pytest.raises(ShapeError):
            PagedKVCache.from_dynamic(strange, both.pool)
        check_all_back(both.pool)


@pytest.mark.parametrize("name", KINDS)
def test_generation_goes_on_after_a_conversion(name: str) -> None:
    model = tiny(name)
    inputs = prompt(model, (5, 3))
    reference = dynamic_cache(model)
    first = run(model, inputs, reference, max_new_tokens=2)
    said = {
        "input_ids": first.sequences,
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1),
    }
    expected = run(model, said, copy.deepcopy(reference))
    with nan_pool(model) as pool:
        with PagedKVCache.from_dynamic(reference, pool) as paged:
            compare_all([expected], [run(model, said, paged.fork()[0])])
            compare_all([expected], [run(model, said, paged.to_dynamic())])
        check_all_back(pool)


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", [(7,), (30, 1), (100, 3)], ids=str)
def test_save_and_load(name: str, lengths: tuple[int, ...], caches: Make, tmp_path: Path) -> None:
    both = caches(name)
    for tokens in lengths:
        both.update(tokens)
    both.paged.save(tmp_path / "cache.safetensors")
    with nan_pool(tiny(name)) as pool:
        loaded = PagedKVCache.load(tmp_path / "cache.safetensors", pool)
        assert pool.stats().pages_used == both.pool.stats().pages_used
        pool.check_invariants(loaded.page_tables)
        child = both.oracle.copy()
        check_against(loaded, child)
        for tokens in (1, 9):
            update_paged(loaded, child, tokens)
        loaded.reorder_cache(torch.tensor([2, 2, 0]))
        child.select([2, 2, 0])
        update_paged(loaded, child, 1)
        loaded.free()
        check_all_back(pool)
    both.check()


def test_shared_pages_stay_shared_in_a_file(caches: Make, tmp_path: Path) -> None:
    both = caches("gemma3", rows=1)
    both.update(40)
    both.paged.batch_repeat_interleave(4)
    both.stock.batch_repeat_interleave(4)
    both.oracle.select([0] * 4)
    both.update(1)
    used = both.pool.stats().pages_used
    assert used == 2 * (5 + 4)  # five full pages of the prompt, and a page for each row
    file = tmp_path / "cache.safetensors"
    both.paged.save(file)
    assert file.stat().st_size < 1.5 * both.pool.stats().bytes_in_use
    with nan_pool(tiny("gemma3")) as pool, PagedKVCache.load(file, pool) as loaded:
        assert pool.stats().pages_used == used
        child = both.oracle.copy()
        for tokens in (1, 20):
            update_paged(loaded, child, tokens)


def test_padding_stays_free_in_a_file(tmp_path: Path) -> None:
    model = tiny("llama")
    inputs = prompt(model, (20, 3))
    file = tmp_path / "cache.safetensors"
    with nan_pool(model) as pool:
        with PagedKVCache(pool, attention_mask=inputs["attention_mask"]) as cache:
            first = run(model, inputs, cache, max_new_tokens=3)
            cache.save(file)
            used = pool.stats().pages_used
            said = {
                "input_ids": first.sequences,
                "attention_mask": torch.nn.functional.pad(
                    inputs["attention_mask"], (0, 3), value=1
                ),
            }
            expected = run(model, said, cache)
        with PagedKVCache.load(file, pool) as loaded:
            assert pool.stats().pages_used == used
            compare_all([expected], [run(model, said, loaded)])
        check_all_back(pool)


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    text, foreign = tmp_path / "notes.txt", tmp_path / "weights.safetensors"
    text.write_text("no safetensors at all, though long enough to have a header")
    save_file({"pages.0": torch.zeros(3)}, foreign)
    with nan_pool(tiny("llama")) as pool:
        for file in (text, foreign):
            with pytest.raises(GeometryError, match=file.name):
                PagedKVCache.load(file, pool)
        with pytest.raises(FileNotFoundError):
            PagedKVCache.load(tmp_path / "absent", pool)
        check_all_back(pool)


def test_files_of_another_geometry(caches: Make, tmp_path: Path) -> None:
    both = caches("llama")
    both.update(20)
    file = tmp_path / "cache.safetensors"
    both.paged.save(file)
    for pool in (nan_pool(tiny("gpt2")), nan_pool(tiny("llama"), page_size=16)):
        with pool:
            with pytest.raises(GeometryError, match=file.name):
                PagedKVCache.load(file, pool)
            check_all_back(pool)


def test_damaged_files(caches: Make, tmp_path: Path) -> None:
    """Cut off, or with page tables that do not fit the pages: refused, and nothing is kept."""
    both = caches("llama")
    both.update(20)
    good, cut, bad = (tmp_path / name for name in ("good", "cut", "bad"))
    both.paged.save(good)
    cut.write_bytes(good.read_bytes()[:-100])
    data = good.read_bytes()
    rows = b"[[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]"
    assert data.count(rows) == 1
    damaged = [
        (rows, b"[[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 9]]]"),  # no such page
        (rows, b"[[[0, 1, 2]], [[3, 4, 5]], [[6, 7   ]]]"),  # too few for the length
        (rows, b"[[[0, 1, 2]], [[3, 4, 5]], [ 6, 7, 8 ]]"),
        (rows, b"[[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]  "),
    ]
    with nan_pool(tiny("llama")) as pool:
        for old, new in damaged:
            bad.write_bytes(data.replace(old, new))
            with pytest.raises(GeometryError, match="bad"):
                PagedKVCache.load(bad, pool)
            check_all_back(pool)
        with pytest.raises(GeometryError, match="cut"):
            PagedKVCache.load(cut, pool)
        check_all_back(pool)
        with PagedKVCache.load(good, pool) as loaded:
            check_against(loaded, both.oracle)


def test_a_file_for_which_the_pool_has_no_room(caches: Make, tmp_path: Path) -> None:
    both = caches("llama")
    both.update(20)
    both.paged.save(tmp_path / "cache.safetensors")
    with nan_pool(tiny("llama"), max_pages=8) as pool:
        with pytest.raises(OutOfPages) as caught:
            PagedKVCache.load(tmp_path / "cache.safetensors", pool)
        assert (caught.value.needed, caught.value.available) == (9, 8)
        check_all_back(pool)


def test_an_empty_cache_is_not_saved(caches: Make, tmp_path: Path) -> None:
    both = caches("llama")
    with pytest.raises(GeometryError, match="empty"):
        both.paged.save(tmp_path / "cache.safetensors")
    assert not (tmp_path / "cache.safetensors").exists()


# --- copies ---------------------------------------------------------------------------------

WAYS_TO_FORK = {
    "fork": lambda cache: cache.fork()[0],
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", WAYS_TO_FORK)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [15, 16, 17, 110])
def test_a_fork_and_its_original_do_not_disturb_each_other(
    name: str, way: str, length: int, caches: Make
) -> None:
    both = caches(name, rows=2)
    both.update(length)
    used = both.pool.stats().pages_used
    fork = WAYS_TO_FORK[way](both.paged)
    try:
        assert both.pool.stats().pages_used == used
        child = both.oracle.copy()
        for tokens in (1, 9):
            update_paged(fork, child, tokens)
            both.check()
            both.update(tokens)
            check_against(fork, child)
        fork.crop(-12)
        child.crop(12)
        both.check()
        update_paged(fork, child, 3)
        both.check()
        fork.reorder_cache(torch.tensor([1, 1]))
        child.select([1, 1])
        update_paged(fork, child, 1)
        both.check()
    finally:
        fork.free()
    both.check()
    both.update(1)


def test_a_fork_outlives_its_original(caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    forks = both.paged.fork(2)
    both.paged.free()
    update_paged(forks[0], both.oracle.copy(), 4)
    forks[0].free()
    update_paged(forks[1], both.oracle.copy(), 4)
    forks[1].free()
    check_all_back(both.pool)


def test_a_fork_that_nobody_writes_to_costs_nothing(caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    forks = both.paged.fork(20)
    assert both.pool.stats().pages_used == 6
    both.update(1)  # the original copies its three last pages, for others read them
    assert both.pool.stats().pages_used == 9
    del forks
    assert both.pool.stats().pages_used == 6
    both.check()


def test_a_deepcopy_inside_other_objects(caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    twice = copy.deepcopy({"a": both.paged, "b": [both.paged]})
    assert twice["a"] is twice["b"][0]
    assert twice["a"] is not both.paged
    check_against(twice["a"], both.oracle)
    twice["a"].free()


@pytest.mark.parametrize("n", [0, -1])
def test_fork_zero_times(n: int, caches: Make) -> None:
    both = caches("llama")
    both.update(3)
    with pytest.raises(ShapeError, match="at least 1"):
        both.paged.fork(n)


def test_a_fork_of_an_empty_cache(caches: Make) -> None:
    both = caches("llama")
    fork = copy.deepcopy(both.paged)
    both.update(3)
    assert fork.get_seq_length() == 0
    update_paged(fork, DenseOracle(both.pool.geometry, 2), 5)
    both.check()
    fork.free()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_random_families_of_caches(name: str, seed: int) -> None:
    """Whatever a family of forks goes through, each cache holds its own tokens; no page leaks."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    with nan_pool(tiny(name), max_pages=400) as pool:
        family: list[tuple[PagedKVCache, DenseOracle]] = []
        for _ in range(60):
            if not family:
                family.append((PagedKVCache(pool), DenseOracle(pool.geometry, number(1, 3))))
                update_paged(*family[0], number(1, 30))
            at = number(0, len(family) - 1)
            cache, oracle = family[at]
            action = number(0, 9)
            if action <= 3:
                update_paged(cache, oracle, number(1, 12))
            elif action == 4:
                removed = number(0, min(20, oracle.length - 1))
                cache.crop(-removed)
                oracle.crop(removed)
            elif action == 5 and oracle.rows <= 6:
                rows = [number(0, oracle.rows - 1) for _ in range(number(1, 4))]
                cache.batch_select_indices(torch.tensor(rows))
                oracle.select(rows)
            elif action == 6:
                rows = [number(0, oracle.rows - 1) for _ in range(oracle.rows)]
                cache.reorder_cache(torch.tensor(rows))
                oracle.select(rows)
            elif action == 7 and len(family) < 6:
                family.append((copy.deepcopy(cache), oracle.copy()))
            elif action == 8 and oracle.rows == 1:
                cache.batch_repeat_interleave(2)
                oracle.select([0, 0])
            elif action == 9:
                cache.free()
                family.pop(at)
            for one, other in family:
                check_against(one, other)
            pool.check_invariants([t for one, _ in family for t in one.page_tables])
        for cache, _ in family:
            cache.free()
        check_all_back(pool)


# --- lifetime -------------------------------------------------------------------------------


def test_freeing_twice(caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    fork = both.paged.fork()[0]
    both.paged.free()
    both.paged.free()
    check_against(fork, both.oracle)  # its pages were not released in its name
    assert both.pool.stats().pages_used == 6
    fork.free()


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, path: cache.update(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8), 0),
        lambda cache, path: cache.crop(-1),
        lambda cache, path: cache.reset(),
        lambda cache, path: cache.reorder_cache(torch.tensor([0, 1, 2])),
        lambda cache, path: cache.batch_repeat_interleave(2),
        lambda cache, path: cache.batch_select_indices(torch.tensor([0])),
        lambda cache, path: cache.fork(),
        lambda cache, path: copy.deepcopy(cache),
        lambda cache, path: cache.to_dynamic(),
        lambda cache, path: cache.save(path / "file"),
    ],
    ids=[
        "update",
        "crop",
        "reset",
        "reorder_cache",
        "batch_repeat_interleave",
        "batch_select_indices",
        "fork",
        "deepcopy",
        "to_dynamic",
        "save",
    ],
)
def test_use_after_free(use, caches: Make, tmp_path: Path) -> None:
    both = caches("llama")
    both.update(13)
    both.paged.free()
    with pytest.raises(UseAfterFree, match="freed"):
        use(both.paged, tmp_path)
    assert both.paged.get_seq_length() == 0
    assert both.paged.layers[0].keys is None
    check_all_back(both.pool)


def test_a_freed_cache_in_generate() -> None:
    model = tiny("llama")
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        run(model, prompt(model, (5,)), cache, max_new_tokens=2)
        cache.free()
        with pytest.raises(UseAfterFree):
            run(model, prompt(model, (5,)), cache, max_new_tokens=2)
        check_all_back(pool)


def test_the_end_of_a_with_block(caches: Make) -> None:
    both = caches("llama")
    with pytest.raises(KeyError), both.paged as cache:
        assert cache is both.paged
        both.update(13)
        raise KeyError
    check_all_back(both.pool)


def test_a_forgotten_cache(caches: Make) -> None:
    both = caches("llama")
    cache = PagedKVCache(both.pool)
    update_paged(cache, DenseOracle(both.pool.geometry, 2), 13)
    assert both.pool.stats().pages_used == 4
    del cache
    check_all_back(both.pool)


def test_a_forgotten_cache_in_a_circle(caches: Make) -> None:
    both = caches("llama")
    cache = PagedKVCache(both.pool)
    update_paged(cache, DenseOracle(both.pool.geometry, 2), 13)
    cache.myself = {"held by": [cache]}
    gone = weakref.ref(cache)
    gc.collect()
    del cache
    assert both.pool.stats().pages_used == 4
    gc.collect()
    assert gone() is None
    check_all_back(both.pool)


def test_what_a_forgotten_cache_shared_stays(caches: Make) -> None:
    both = caches("llama")
    both.update(13)
    fork = both.paged.fork()[0]
    update_paged(fork, both.oracle.copy(), 9)
    del fork
    assert both.pool.stats().pages_used == 6
    both.check()


def test_an_exception_inside_generate() -> None:
    """The traceback holds the cache for a while; its pages come back with it."""
    model = tiny("llama")

    def stop(tokens: Tensor, scores: Tensor, **_) -> bool:
        if tokens.shape[1] == 12:
            raise KeyboardInterrupt
        return False

    with nan_pool(model) as pool:
        with pytest.raises(KeyboardInterrupt):
            run(model, prompt(model, (5,)), PagedKVCache(pool), stopping_criteria=[stop])
        gc.collect()
        check_all_back(pool)
        cache = PagedKVCache(pool)
        with pytest.raises(KeyboardInterrupt):
            run(model, prompt(model, (5,)), cache, stopping_criteria=[stop])
        assert pool.stats().pages_used > 0
        cache.free()
        check_all_back(pool)


def test_a_cache_on_its_own_pool_takes_it_along() -> None:
    model = tiny("llama")
    cache = PagedKVCache(model.config, page_size=8, max_pages=16)
    with pytest.raises(PageForgeError, match="first update"):
        _ = cache.pool
    run(model, prompt(model, (5,)), cache)
    pool = weakref.ref(cache.pool)
    del cache
    gc.collect()
    assert pool() is None


def test_pickling_is_refused(caches: Make) -> None:
    both = caches("llama")
    with pytest.raises(TypeError, match=r"cache\.save"):
        pickle.dumps(both.paged)


def test_a_closed_pool() -> None:
    pool = nan_pool(tiny("llama"))
    cache = PagedKVCache(pool)
    oracle = DenseOracle(pool.geometry, 2)
    update_paged(cache, oracle, 13)
    pool.close()
    with pytest.raises(UseAfterFree):
        cache.update(*oracle.new_tokens(0, 9), 0)
    cache.free()
    with pytest.raises(UseAfterFree):
        pool.stats()


# --- a forward that did not finish ----------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_forward_that_broke_off(first: bool, caches: Make) -> None:
    """Layers hold different numbers of tokens: said at once, and mended by crop or reset."""
    both = caches("gemma3")
    if not first:
        both.update(10)
    before = both.oracle.length
    for layer in (0, 1):  # of three
        both.paged.update(*both.oracle.new_tokens(layer, 4), layer)
    with pytest.raises(ShapeError, match="interrupted"):
        for layer in (0, 1, 2):
            both.paged.update(*both.oracle.new_tokens(layer, 1), layer)
    for mend in ("crop", "reset"):
        fork = both.paged.fork()[0]
        if mend == "reset":
            fork.reset()
            update_paged(fork, DenseOracle(both.pool.geometry, 5), 3)
        else:
            fork.crop(-(fork.get_seq_length() - before))
            update_paged(fork, both.oracle.copy(), 5)
        fork.free()


@pytest.mark.parametrize("before", [0, 10])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_forward_that_broke_off_in_its_first_layer(
    before: int, count: int, caches: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dense K and V found no memory, say: no layer has a token of it; any other may come."""
    both = caches("gemma3")
    if before:
        both.update(before)

    def fail(tokens: NewTokens) -> None:
        raise torch.OutOfMemoryError("by the test")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(NewTokens, "write_and_gather", fail)
        both.paged.update(*both.oracle.copy().new_tokens(0, 4), 0)
    assert both.paged.get_seq_length() == before
    both.update(count)
    both.check()


def test_crop_that_leaves_a_broken_forward_standing(caches: Make) -> None:
    both = caches("gemma3")
    both.update(10)
    both.paged.update(*both.oracle.new_tokens(0, 4), 0)
    with pytest.raises(CropError, match="interrupted"):
        both.paged.crop(-2)
    both.paged.crop(-4)
    both.check()


# --- hybrid models --------------------------------------------------------------------------


def test_hybrid_models_keep_their_own_layers() -> None:
    model = tiny("qwen3_next")
    stock = dynamic_cache(model)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        for one, other in zip(cache.layers, stock.layers, strict=True):
            paged = type(one).__name__ == "PagedLayer"
            assert paged or type(one) is type(other)
        assert cache.is_linear == stock.is_linear == [True, False, True, False]
        assert not cache.has_previous_state()
        inputs = prompt(model, (5, 5))
        with torch.no_grad():
            for one in (cache, stock):
                model(**inputs, **{cache_argument(model): one})
        assert cache.has_previous_state()
        assert cache.get_seq_length() == stock.get_seq_length() == 5
        assert cache.get_mask_sizes(1, 0) == stock.get_mask_sizes(1, 0)
        assert cache.is_croppable is stock.is_croppable is False
        for one, other in zip(cache.layers, stock.layers, strict=True):
            if type(one) is type(other):
                for mine, theirs in zip(
                    one.recurrent_states.values(), other.recurrent_states.values(), strict=True
                ):
                    assert torch.equal(mine, theirs)
        dense = cache.to_dynamic()
        assert [type(layer) for layer in dense.layers] == [type(layer) for layer in stock.layers]
        with PagedKVCache.from_dynamic(stock, pool) as taken:
            expected = run(model, prompt(model, (9, 9)), copy.deepcopy(stock))
            for one in (dense, taken, copy.deepcopy(cache)):
                compare_all([expected], [run(model, prompt(model, (9, 9)), one)])


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-1),
        lambda cache: cache.crop(0),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
    ],
    ids=["crop", "crop by nothing", "repeat", "select"],
)
def test_what_hybrid_layers_refuse_changes_nothing(change) -> None:
    """Neither can transformers roll a recurrent state back; the pages must not go without it."""
    model = tiny("qwen3_next")
    inputs = prompt(model, (5, 5))
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        with torch.no_grad():
            model(**inputs, **{cache_argument(model): cache})
        before = [layer.keys for layer in cache.layers if hasattr(layer, "window")]
        stock = cache.to_dynamic()
        with pytest.raises((RuntimeError, AttributeError, UnsupportedModel)):
            change(stock)
        with pytest.raises((RuntimeError, AttributeError, UnsupportedModel)):
            change(cache)
        after = [layer.keys for layer in cache.layers if hasattr(layer, "window")]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


def test_a_recurrent_state_is_never_rolled_back_in_part() -> None:
    """After `activate_past_recording` transformers' layers would crop all but this state."""
    model = tiny("qwen3_next")
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        with torch.no_grad():
            model(**prompt(model, (5, 5)), **{cache_argument(model): cache})
        cache.activate_past_recording()
        with pytest.raises(UnsupportedModel, match="recurrent"):
            cache.crop(-1)
        assert cache.get_seq_length() == 5


def test_hybrid_caches_are_not_saved(tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        run(model, prompt(model, (5,)), cache, max_new_tokens=2)
        with pytest.raises(UnsupportedModel, match="linear"):
            cache.save(tmp_path / "file")


def test_reset_of_a_hybrid_cache() -> None:
    model = tiny("qwen3_next")
    inputs = prompt(model, (9, 4))
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        expected = run(model, inputs, dynamic_cache(model))
        for _ in range(2):
            compare_all([expected], [run(model, inputs, cache)])
            cache.reset()
            check_all_back(pool)


def test_a_model_that_cannot_be_probed_is_served_by_what_its_first_update_brings() -> None:
    config = JetMoeConfig(  # its routing looks at values, which the meta device has none of
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=32,
        initializer_range=0.3,
        num_local_experts=2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = JetMoeForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match=r"PagedKVCache\(model.config\)"):
        PagePool.for_model(model)
    inputs = prompt(model, (9, 4))
    expected = run(model, inputs, dynamic_cache(model))
    cache = PagedKVCache(config, page_size=8)
    assert compare(expected, run(model, inputs, cache)) == 0
    assert cache.pool.stats().pages_used > 0


def test_a_pool_made_in_inference_mode_can_be_written_to_outside() -> None:
    with torch.inference_mode():
        pool = PagePool.for_model(tiny("gpt2"), page_size=8, max_pages=8)
    with torch.no_grad(), PagedKVCache(pool) as cache:
        states = torch.ones(1, 4, 3, 8)
        for _ in range(2):
            key, value = cache.update(states, states, 0)
        assert (key == 1).all() and value.shape == (1, 4, 6, 8)


@pytest.mark.parametrize("arguments", [{"max_pages": 0}, {"page_size": 16.0}, {"page_size": 12}])
def test_wrong_sizes_are_refused_when_the_cache_is_made(arguments: dict) -> None:
    with pytest.raises(GeometryError):
        PagedKVCache(tiny("gpt2").config, **arguments)


def test_what_a_repr_says() -> None:
    caches = Caches("llama", rows=2)
    assert repr(caches.paged) == "PagedKVCache(empty)"
    caches.update(17)
    assert repr(caches.paged) == "PagedKVCache(2 rows of 17 tokens, 6 pages of 8)"
    fork = copy.deepcopy(caches.paged)
    fork.batch_repeat_interleave(2)
    assert repr(fork) == "PagedKVCache(4 rows of 17 tokens, 6 pages of 8)"  # which all hold
    stats = caches.pool.stats()
    assert (
        repr(stats)
        == str(stats)
        == (
            f"PoolStats(pages=6 used + 0 cached of 128, bytes={stats.bytes_in_use:,} in use, "
            f"{stats.bytes_mapped:,} mapped of {stats.bytes_total:,})"
        )
    )
    caches.paged.free()
    assert repr(caches.paged) == "PagedKVCache(freed)"
