"""Bad input gets an error that says what to do, and loses nothing: the cache lives on."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import transformers
from packaging.version import Version
from tests.hf.dense_oracle import DenseOracle
from tests.hf.parity import (
    check_all_back,
    compare_all,
    dynamic_cache,
    nan_pool,
    prompt,
    run,
    wrap,
)
from tests.hf.tiny_models import CONFIGS, make, tiny
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from pageforge import (
    GeometryError,
    KVGeometry,
    LayerShape,
    OutOfPages,
    PagedKVCache,
    PageForgeError,
    PagePool,
    ShapeError,
    UnsupportedModel,
)
from pageforge.probe import cache_argument

OLD = Version(transformers.__version__) < Version("5.18")


def fill(cache: PagedKVCache, oracle: DenseOracle, tokens: int) -> None:
    for layer in oracle.shapes:
        key, value = oracle.new_tokens(layer, tokens)
        oracle.update(layer, key, value)
        cache.update(key, value, layer)


def check_untouched(cache: PagedKVCache, oracle: DenseOracle) -> None:
    """The cache holds what it held, takes new tokens, and is freed."""
    pool = cache.pool
    for tokens in (0, 9):
        if tokens:
            fill(cache, oracle, tokens)
        for layer in oracle.shapes:
            assert cache.get_seq_length(layer) == oracle.length
            if oracle.length:
                assert torch.equal(cache.layers[layer].keys, oracle.stored(layer)[0])
                assert torch.equal(cache.layers[layer].values, oracle.stored(layer)[1])
    cache.free()
    check_all_back(pool)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 1, 4, 7, 12, -8, 24, 512, None, "16"])
def test_page_sizes_that_are_no_power_of_two_or_out_of_range(page_size) -> None:
    model = tiny("llama")
    with pytest.raises(GeometryError, match=r"page_size.*got"):
        PagePool.for_model(model, page_size=page_size, max_pages=4)
    if page_size is not None:  # None is the default of a cache
        with pytest.raises(GeometryError, match=r"page_size.*got"):
            PagedKVCache(model.config, page_size=page_size)


@pytest.mark.parametrize("max_pages", [0, -1, 1.5, "4"])
def test_a_pool_of_no_pages(max_pages) -> None:
    model = tiny("llama")
    with pytest.raises(GeometryError, match=r"max_pages.*got"):
        PagePool.for_model(model, max_pages=max_pages)
    with pytest.raises(GeometryError, match=r"max_pages.*got"):
        PagedKVCache(model.config, max_pages=max_pages)


def test_sizes_beside_a_pool() -> None:
    with nan_pool(tiny("llama")) as pool:
        for size in ({"page_size": 8}, {"max_pages": 3}, {"max_memory": "1MiB"}):
            with pytest.raises(GeometryError, match="beside a pool"):
                PagedKVCache(pool, **size)


@pytest.mark.parametrize("what", [None, "smollm2", 16, DynamicCache()], ids=str)
def test_neither_a_pool_nor_a_config(what) -> None:
    with pytest.raises(ShapeError, match="a PagePool or a model's config"):
        PagedKVCache(what)


def test_a_model_instead_of_its_config() -> None:
    with pytest.raises(ShapeError, match="config"):
        PagedKVCache(tiny("llama"))


def test_a_pool_without_all_of_the_layers() -> None:
    shape = LayerShape(2, 8, 8, "float32")
    with (
        PagePool(KVGeometry.of_layers({1: shape, 2: shape}, 8), max_pages=4) as pool,
        pytest.raises(GeometryError, match="without gaps"),
    ):
        PagedKVCache(pool)


@pytest.mark.parametrize("mask", [torch.ones(5), torch.ones(1, 1, 5, 5)], ids=["1-D", "4-D"])
def test_masks_of_another_shape(mask: Tensor) -> None:
    with nan_pool(tiny("llama")) as pool, pytest.raises(ShapeError, match="attention_mask"):
        PagedKVCache(pool, attention_mask=mask)


def test_a_mask_of_another_batch() -> None:
    model = tiny("llama")
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool, attention_mask=torch.ones(2, 5))
        with pytest.raises(ShapeError, match="attention_mask"):
            run(model, prompt(model, (5, 5, 5)), cache)
        check_untouched(cache, DenseOracle(pool.geometry, 2))


# --- another model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "used_by", "error"),
    [
        ("llama", "gpt2", ShapeError),  # 2 heads instead of 4
        ("qwen3", "deepseek_v3", ShapeError),  # other dims
        ("llama", "gemma3", GeometryError),  # two layers instead of three
    ],
)
def test_a_pool_of_another_model(of: str, used_by: str, error: type[Exception]) -> None:
    model = tiny(used_by)
    with nan_pool(tiny(of)) as pool:
        for _ in range(2):
            cache = PagedKVCache(pool)
            with pytest.raises(error, match="for_model"):
                run(model, prompt(model, (5,)), cache)
            cache.reset()
            check_all_back(pool)
            compare_all(
                [run(tiny(of), prompt(model, (5,)), dynamic_cache(tiny(of)))],
                [run(tiny(of), prompt(model, (5,)), cache)],
            )
            cache.free()
            check_all_back(pool)


def test_a_config_of_another_model() -> None:
    cache = PagedKVCache(tiny("llama").config, page_size=8, max_pages=8)
    with pytest.raises(ShapeError, match="for_model"):
        run(tiny("gpt2"), prompt(tiny("gpt2"), (5,)), cache)
    cache.reset()
    run(tiny("llama"), prompt(tiny("llama"), (5,)), cache)
    pool = cache.pool
    cache.free()
    check_all_back(pool)


# --- what update is given -------------------------------------------------------------------


def wrong(key: Tensor, value: Tensor) -> dict[str, tuple[Tensor, Tensor, str]]:
    """Each a pair of K and V that must be refused, and what the message says."""
    meta = torch.device("meta")
    return {
        "key of another dtype": (key.half(), value, "key.*dtype torch.float32, got torch.float16"),
        "value of another dtype": (key, value.double(), "value.*dtype torch.float32"),
        "key on another device": (key.to(meta), value, "key.*device cpu, got meta"),
        "value on another device": (key, value.to(meta), "value.*device cpu, got meta"),
        "another number of heads": (key[:, :1], value[:, :1], r"key.*\[3, 2, 4, 8\]"),
        "another key dim": (key[..., :4], value, r"key.*\[3, 2, 4, 8\]"),
        "another value dim": (key, value[..., :4], r"value.*\[3, 2, 4, 8\]"),
        "three dims": (key[0], value[0], "four dims|batch size"),
        "fewer values than keys": (
            key,
            value[:, :, :-1],
            r"value.*\[3, 2, 4, 8\], got \[3, 2, 3, 8\]",
        ),
        "values of fewer rows": (key, value[:1], r"value.*\[3, 2, 4, 8\], got \[1, 2, 4, 8\]"),
        "another batch size": (key[:1], value[:1], "batch size.*3 rows, as in the cache, got 1"),
        "a key that requires grad": (key.clone().requires_grad_(), value, "requires grad.*no_grad"),
        "a value that requires grad": (key, value.clone().requires_grad_(), "requires grad"),
    }


WRONG = tuple(wrong(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)))


@pytest.mark.parametrize(
    ("what", "filled"),
    [
        (what, filled)
        for what in WRONG
        for filled in (False, True)
        if filled or what != "another batch size"  # which the first tokens set
    ],
)
def test_wrong_keys_and_values(what: str, filled: bool) -> None:
    with nan_pool(tiny("llama")) as pool:
        cache, oracle = PagedKVCache(pool), DenseOracle(pool.geometry, 3)
        if filled:
            fill(cache, oracle, 15)
        used = pool.stats().pages_used
        key, value, message = wrong(*oracle.new_tokens(0, 4))[what]
        with pytest.raises((ShapeError, UnsupportedModel), match=message):
            cache.update(key, value, 0)
        assert pool.stats().pages_used == used
        check_untouched(cache, oracle)


@pytest.mark.parametrize("layer", [2, 99, -3])
def test_a_layer_that_does_not_exist(layer: int) -> None:
    with nan_pool(tiny("llama")) as pool:
        cache, oracle = PagedKVCache(pool), DenseOracle(pool.geometry, 3)
        with pytest.raises(GeometryError, match="layer_idx"):
            cache.update(*oracle.new_tokens(0, 4), layer)
        check_untouched(cache, oracle)


def test_training_is_refused() -> None:
    """In a forward that records gradients."""
    model = tiny("llama")
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(UnsupportedModel, match="no_grad"):
            model(**prompt(model, (5,)), **{cache_argument(model): cache})
        check_untouched(cache, DenseOracle(pool.geometry, 2))


@pytest.mark.parametrize("pooled", [torch.bfloat16, torch.float16])
def test_an_explicit_dtype_casts(pooled: torch.dtype) -> None:
    """K/V come back in the model's dtype, rounded by the pool's; no more than that is lost."""
    model = tiny("llama")
    with nan_pool(model, dtype=pooled) as pool, PagedKVCache(pool) as cache:
        assert pool.pages(0).dtype == pooled
        oracle = DenseOracle(pool.geometry, 2)
        for tokens in (11, 1, 6):
            for layer in oracle.shapes:
                key, value = oracle.new_tokens(layer, tokens)
                expected = oracle.update(layer, key, value)
                for one, other in zip(cache.update(key, value, layer), expected, strict=True):
                    assert one.dtype == torch.float32
                    assert torch.equal(one.to(pooled), other.to(pooled))
        expected = run(model, prompt(model, (9, 5)), dynamic_cache(model))
        cache.reset()
        got = run(model, prompt(model, (9, 5)), cache)
        steps = zip(expected.logits[:3], got.logits[:3], strict=True)
        assert all((one - other).abs().max() < 0.2 for one, other in steps)


# --- encoder-decoders -----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("by_generate", [False, True])
def test_a_plain_cache_for_an_encoder_decoder(
    name: str, layers: int, from_config: bool, by_generate: bool
) -> None:
    config = CONFIGS[name]()
    setattr(config, "num_decoder_layers" if name == "t5" else "decoder_layers", layers)
    model = make(config)
    inputs = prompt(model, (5, 3))
    pool = nan_pool(model)
    cache = PagedKVCache(model.config, page_size=8) if from_config else PagedKVCache(pool)
    with pytest.raises(UnsupportedModel, match="EncoderDecoderCache"), torch.no_grad():
        if by_generate:
            run(model, inputs, cache)
        else:
            start = torch.zeros(2, 1, dtype=torch.long)
            model(**inputs, decoder_input_ids=start, **{cache_argument(model): cache})
    cache.reset()
    expected = run(model, inputs, dynamic_cache(model))
    compare_all([expected], [run(model, inputs, wrap(model, cache))])
    cache.free()
    check_all_back(pool)
    pool.close()


def test_a_decoder_that_wraps_a_plain_cache_itself() -> None:
    """GPT-2 with cross-attention, as in an EncoderDecoderModel: transformers sees to it."""
    config = CONFIGS["gpt2"]()
    config.add_cross_attention = True
    model = make(config)
    ids = prompt(model, (5, 5))["input_ids"]
    encoded = torch.randn(2, 7, 32)
    with nan_pool(model) as pool, torch.no_grad():
        for wrapped in (False, True):
            cache, stock = PagedKVCache(pool), DynamicCache(config=config)
            both = [
                EncoderDecoderCache(one, DynamicCache()) if wrapped else one
                for one in (cache, stock)
            ]
            for _ in range(3):
                got, expected = (
                    model(
                        input_ids=ids,
                        encoder_hidden_states=encoded,
                        **{cache_argument(model): one},
                    ).logits
                    for one in both
                )
                assert torch.equal(got, expected)
            cache.free()
            check_all_back(pool)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_decoder_with_fewer_layers_than_the_encoder(name: str) -> None:
    """As in distilled models. For T5, transformers counts the encoder's layers."""
    config = CONFIGS[name]()
    setattr(config, "num_decoder_layers" if name == "t5" else "decoder_layers", 1)
    model = make(config)
    inputs = prompt(model, (5, 3))
    expected = run(model, inputs, dynamic_cache(model))
    with nan_pool(model) as pool:
        assert [group.layers for group in pool.geometry.groups] == [(0,)]
        for cache in (PagedKVCache(pool), PagedKVCache(config, page_size=8, max_pages=64)):
            compare_all([expected], [run(model, inputs, wrap(model, cache))])
            cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_every_method_through_an_encoder_decoder_cache(name: str) -> None:
    model = tiny(name)
    inputs = prompt(model, (5, 3))
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        paged, stock = wrap(model, cache), dynamic_cache(model)
        for both in (paged, stock):
            run(model, inputs, both)
            assert both.get_seq_length() == 14
            both.crop(-3)
            both.batch_repeat_interleave(2)
            both.batch_select_indices(torch.tensor([0, 3, 2]))
            both.reorder_cache(torch.tensor([1, 1, 0]))
            assert both.get_seq_length() == 11
        for mine, theirs in zip(paged, stock, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)
        fork = copy.deepcopy(paged)  # of both parts
        before = [cache.layers[layer].keys for layer in (0, 1)]
        fork.crop(-2)
        fork.self_attention_cache.free()
        for layer in (0, 1):
            assert torch.equal(cache.layers[layer].keys, before[layer])
        if not OLD:  # where a reset DynamicCache keeps its shape
            paged.reset()
            compare_all([run(model, inputs, dynamic_cache(model))], [run(model, inputs, paged)])
        cache.free()
        check_all_back(pool)


# --- positions and pages that run out -------------------------------------------------------


def test_positions_past_a_learned_table() -> None:
    """GPT-2 has 128 positions here: transformers fails, and so does the same call with pages."""
    model = tiny("gpt2")
    inputs = prompt(model, (120,))
    with pytest.raises(IndexError) as stock:
        run(model, inputs, dynamic_cache(model), max_new_tokens=20)
    with nan_pool(model) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(IndexError) as ours:
            run(model, inputs, cache, max_new_tokens=20)
        assert str(ours.value) == str(stock.value)
        assert cache.get_seq_length() == 128
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "bart"])
def test_a_pool_exhausted_in_mid_generate(name: str) -> None:
    model = tiny(name)
    inputs = prompt(model, (20, 11))
    groups = len(PagePool.for_model(model, page_size=8, max_pages=1).geometry.groups)
    pages = 2 if model.config.is_encoder_decoder else 6
    with nan_pool(model, max_pages=pages) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(OutOfPages) as caught:
            run(model, inputs, wrap(model, cache), max_new_tokens=30)
        error = caught.value
        assert (error.needed, error.available) == (2 * groups, 0)
        assert f"needed {2 * groups}, available 0" in str(error)
        assert "max_pages" in str(error)
        held = cache.get_seq_length()
        assert held == (8 if model.config.is_encoder_decoder else 24)
        assert pool.stats().pages_used == pages * groups
        pool.check_invariants(cache.page_tables)
        cache.free()
        check_all_back(pool)
        cache = PagedKVCache(pool)
        expected = run(model, inputs, dynamic_cache(model), max_new_tokens=5)
        compare_all([expected], [run(model, inputs, wrap(model, cache), max_new_tokens=5)])
        cache.free()
        check_all_back(pool)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_goes_on_once_there_are_pages_again(name: str) -> None:
    """The step that found no page changed nothing."""
    model = tiny(name)
    inputs = prompt(model, (20, 11))
    expected = run(model, inputs, dynamic_cache(model), max_new_tokens=30)
    with nan_pool(model, max_pages=14) as pool:
        other, cache = PagedKVCache(pool), PagedKVCache(pool)
        run(model, prompt(model, (50,)), other, max_new_tokens=2)
        with pytest.raises(OutOfPages):
            run(model, inputs, cache, max_new_tokens=30)
        done = cache.get_seq_length()
        assert 20 < done < 49
        with pytest.raises(OutOfPages):  # there are still none
            run(model, said(expected.sequences, inputs, done + 1), cache, max_new_tokens=1)
        assert cache.get_seq_length() == done
        other.free()
        rest = run(
            model, said(expected.sequences, inputs, done + 1), cache, max_new_tokens=49 - done
        )
        assert torch.equal(rest.sequences, expected.sequences)
        for one, two in zip(rest.logits, expected.logits[done - 19 :], strict=True):
            assert torch.equal(one, two)
        cache.free()
        check_all_back(pool)


def said(sequences: Tensor, inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    mask = torch.ones_like(sequences[:, :length])
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": sequences[:, :length], "attention_mask": mask}


def test_a_prompt_for_which_there_is_no_room() -> None:
    model = tiny("llama")
    with nan_pool(model, max_pages=3) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(OutOfPages) as caught:
            run(model, prompt(model, (20, 11)), cache)
        assert (caught.value.needed, caught.value.available) == (6, 3)
        assert cache.get_seq_length() == 0
        check_all_back(pool)
        run(model, prompt(model, (7, 6)), cache, max_new_tokens=2)  # another batch size would do
        cache.free()


def test_copies_for_which_there_is_no_room() -> None:
    """Beams need pages of their own when they part, in the middle of a page."""
    model = tiny("llama")
    with nan_pool(model, max_pages=4) as pool:
        cache = PagedKVCache(pool)
        with pytest.raises(OutOfPages):
            run(model, prompt(model, (5,)), cache, num_beams=4, max_new_tokens=9)
        cache.free()
        check_all_back(pool)


def test_out_of_pages_of_a_cache_with_its_own_pool() -> None:
    model = tiny("llama")
    cache = PagedKVCache(model.config, page_size=8, max_pages=3)
    with pytest.raises(OutOfPages):
        run(model, prompt(model, (5,)), cache, max_new_tokens=40)
    assert cache.get_seq_length() == 24
    pool = cache.pool
    cache.free()
    check_all_back(pool)


def test_the_pages_of_a_failed_generate_come_back_by_themselves() -> None:
    model = tiny("llama")
    with nan_pool(model, max_pages=3) as pool:
        for _ in range(3):
            with pytest.raises(OutOfPages):
                run(model, prompt(model, (5,)), PagedKVCache(pool), max_new_tokens=40)
            gc.collect()
            check_all_back(pool)


# --- several at once ------------------------------------------------------------------------


def test_threads_that_generate_on_one_pool() -> None:
    model = tiny("gemma3")
    prompts = [prompt(model, (length, 5), seed=length) for length in (20, 11, 7, 16)]
    expected = [run(model, inputs, dynamic_cache(model)) for inputs in prompts]
    got: dict[int, object] = {}
    with nan_pool(model, max_pages=100) as pool:

        def generate(index: int) -> None:
            try:
                with PagedKVCache(pool) as cache:
                    got[index] = run(model, prompts[index], cache)
            except BaseException as error:
                got[index] = error

        threads = [threading.Thread(target=generate, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_all_back(pool)
    for index, one in enumerate(expected):
        result = got[index]
        if isinstance(result, BaseException):
            raise result
        compare_all([one], [result])


def test_every_error_is_one_of_ours() -> None:
    """So that `except PageForgeError` catches them, and `except ValueError` still does."""
    assert issubclass(ShapeError, PageForgeError) and issubclass(ShapeError, ValueError)
    assert issubclass(OutOfPages, PageForgeError) and issubclass(OutOfPages, MemoryError)
