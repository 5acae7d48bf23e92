"""K/V without a model look to a cache as a model's do."""

from __future__ import annotations

import pytest
import torch
from tests.bench.conftest import CPU
from transformers import DynamicCache, StaticCache

from pageforge import PagedKVCache, PagePool
from pageforge.bench.kv import ModelKV
from pageforge.bench.memory_use import storage_bytes
from pageforge.bench.models import SHAPES, make_model
from pageforge.probe import cache_argument


def test_a_cache_holds_what_the_model_would_have_put_there() -> None:
    kv, model = ModelKV.of("tiny", CPU), make_model("tiny", CPU)
    ours, models = DynamicCache(config=kv.config), DynamicCache(config=model.config)
    for tokens in (3, 1):
        kv.feed(ours, 2, tokens)
        model(torch.ones(2, tokens, dtype=torch.long), **{cache_argument(model): models})
    for layer, other in zip(ours.layers, models.layers, strict=True):
        for mine, its in ((layer.keys, other.keys), (layer.values, other.values)):
            assert (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
    assert storage_bytes(ours) == storage_bytes(models)


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_token_are_what_a_cache_grows_by(name: str) -> None:
    kv = ModelKV.of(name, CPU)
    cache = DynamicCache(config=kv.config)
    kv.feed(cache, 2, 3)
    kv.feed(cache, 2, 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [4] * len(kv.layers)
    assert storage_bytes(cache) == 2 * 4 * kv.token_bytes


def test_a_static_cache_takes_them() -> None:
    kv = ModelKV.of("tiny", CPU)
    cache = StaticCache(config=kv.config, max_cache_len=8)
    kv.feed(cache, 2, 5)
    kv.feed(cache, 2, 1)
    assert cache.get_seq_length() == 6
    assert cache.layers[1].keys[:, :, :6].eq(1).all()
    assert cache.layers[1].keys[:, :, 6:].eq(0).all()


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_in_place_nothing_is_gathered_and_all_is_written(name: str) -> None:
    kv = ModelKV.of(name, CPU)
    with PagedKVCache(PagePool(kv.geometry, max_pages=4)) as cache, torch.inference_mode():
        for tokens in (13, 1, 1, 5):
            kv.feed_in_place(cache, 2, tokens)
        assert cache.num_gathers == 0
        assert cache.get_seq_length() == 20
        for layer in cache.layers:
            assert layer.keys.shape[2] == 20
            assert layer.keys.eq(1).all()
            assert layer.values.eq(1).all()
        cache.pool.check_invariants(cache.page_tables)
    cache.pool.close()


def test_under_stock_attention_each_layer_is_gathered() -> None:
    kv = ModelKV.of("tiny", CPU)
    with PagedKVCache(PagePool(kv.geometry, max_pages=4)) as cache:
        kv.feed(cache, 2, 13)
        kv.feed(cache, 2, 1)
        assert cache.num_gathers == len(kv.layers)
    cache.pool.close()
