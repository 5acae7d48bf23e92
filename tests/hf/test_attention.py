"""Pageforge attention in every situation that a caller can bring about: right, and in place or not.

The reference is stock attention with DynamicCache; logits are compared where there are real tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.hf.parity import TIE, check_all_back, dynamic_cache, nan_pool, prompt, run, wrap
from tests.hf.tiny_models import CONFIGS, attending, make, tiny
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import pageforge
from pageforge import (
    OutOfPages,
    PagedKVCache,
    PagePool,
    ShapeError,
    UnsupportedModel,
    UseAfterFree,
    ops,
)
from pageforge.hf.attention import pageforge_attention
from pageforge.hf.mask import LazyMask, pageforge_mask
from pageforge.hf.new_tokens import LazyKV
from pageforge.probe import cache_argument


class Both:
    """Two models with the same weights, a DynamicCache and a PagedKVCache, fed the same."""

    def __init__(self, name: str, pool: PagePool, **arguments: Any):
        self.stock, self.ours = tiny(name), attending(name)
        self.dynamic = dynamic_cache(self.stock)
        self.paged = PagedKVCache(pool, **arguments)

    def forward(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        """One forward of both; logits must agree where the 2-D mask (if any) shows a token."""
        name = cache_argument(self.stock)
        want = self.stock(ids, attention_mask=mask, **{name: self.dynamic}, **more).logits
        got = self.ours(ids, attention_mask=mask, **{name: self.paged}, **more).logits
        shown = torch.ones(ids.shape, dtype=torch.bool)
        if mask is not None and mask.dim() == 2:
            end = self.paged.get_seq_length()
            shown = mask[:, end - ids.shape[1] : end].bool()
        assert shown.any()
        assert not got[shown].isnan().any()
        assert (got - want)[shown].abs().max() <= TIE
        return got

    def steps(self, ids: Tensor, mask: Tensor | None, *ends: int, **more: Any) -> None:
        """Forwards up to each of `ends`, every one with the mask up to there."""
        start = self.paged.get_seq_length()
        for end in ends:
            self.forward(ids[:, start:end], mask if mask is None else mask[:, :end], **more)
            start = end


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def both() -> Iterator[Callable[..., Both]]:
    """`both(family)` makes one on a pool of NaN, and looks after its pages in the end."""
    made: list[Both] = []

    def make_one(name: str = "llama", **arguments: Any) -> Both:
        made.append(Both(name, nan_pool(attending(name)), **arguments))
        return made[-1]

    yield make_one
    for one in made:
        pool = one.paged.pool
        one.paged.free()
        check_all_back(pool)
        pool.close()


KINDS = ["gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt_oss"]
ENDS = (13, 14, 15, 16, 17, 18, 25, 26, 27)
LENGTH = ENDS[-1]


def tokens(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    return prompt(tiny("llama"), (length,) * rows, seed)["input_ids"]


def left_padded(*paddings: int, length: int = LENGTH) -> Tensor:
    mask = torch.ones(len(paddings), length, dtype=torch.long)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    return mask


# --- forwards by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_prefill_chunks_and_single_tokens(name: str, rows: int, both: Callable[..., Both]) -> None:
    one = both(name)
    one.steps(tokens(rows), None, *ENDS)
    assert one.paged.num_gathers == 0


@pytest.mark.parametrize("name", KINDS)
def test_left_padding(name: str, both: Callable[..., Both]) -> None:
    one = both(name)
    one.steps(tokens(4), left_padded(0, 3, 8, 12), *ENDS)
    assert one.paged.num_gathers == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_first_forward_of_one_token(name: str, both: Callable[..., Both]) -> None:
    """And one shorter than a page."""
    one = both(name)
    one.steps(tokens(2), None, 1, 2, 3, 5, 6)
    other = both(name)
    other.steps(tokens(2), left_padded(0, 2), 3, 4, 5)
    assert one.paged.num_gathers == other.paged.num_gathers == 0


def test_padding_that_goes_on_after_the_first_chunk(both: Callable[..., Both]) -> None:
    """Its pages are claimed, since nobody could know; what attention sees is right."""
    one = both()
    mask = left_padded(0, 20)
    ids = tokens(2)
    one.forward(ids[:, :10], mask[:, :10])
    one.steps(ids, mask, 18, 22, 23, 24)
    assert one.paged.num_gathers == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(dtype: torch.dtype, both: Callable[..., Both]) -> None:
    one = both()
    one.steps(tokens(2), left_padded(0, 9).to(dtype), *ENDS)
    assert one.paged.num_gathers == 0


def test_masks_wider_than_the_tokens_so_far(both: Callable[..., Both]) -> None:
    one = both("gpt2")  # which has no rotary positions that might depend on the mask
    ids, mask = tokens(2), left_padded(0, 9)
    one.forward(ids[:, :13], mask)
    one.forward(ids[:, 13:14], mask)
    assert one.paged.num_gathers == 0


@pytest.mark.parametrize("masked", [(True, False, True), (False, True, False)])
def test_masks_at_some_steps_only(masked, both: Callable[..., Both]) -> None:
    one = both()
    ids, mask = tokens(2), left_padded(0, 0)
    for end, shown in zip((13, 14, 20), masked, strict=True):
        one.steps(ids, mask if shown else None, end)
    assert one.paged.num_gathers == 0


def test_embeddings_instead_of_tokens(both: Callable[..., Both]) -> None:
    one = both()
    ids, mask = tokens(2), left_padded(0, 9)
    embedded = one.ours.get_input_embeddings()(ids)
    name = cache_argument(one.ours)
    for start, end in ((0, 13), (13, 14), (14, 20)):
        want, got = (
            model(
                inputs_embeds=embedded[:, start:end],
                attention_mask=mask[:, :end],
                **{name: cache},
            ).logits
            for model, cache in ((one.stock, one.dynamic), (one.ours, one.paged))
        )
        assert (got - want)[mask[:, start:end].bool()].abs().max() <= TIE
    assert one.paged.num_gathers == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes(mode, both: Callable[..., Both]) -> None:
    """With gradients on, a model whose weights ask for none is served as well."""
    one = both()
    for model in (one.stock, one.ours):
        model.requires_grad_(False)
    try:
        with mode():
            one.steps(tokens(2), left_padded(0, 9), 13, 14, 20, 21)
        with torch.inference_mode():
            one.steps(tokens(2), left_padded(0, 9), 22, 23)
    finally:
        for model in (one.stock, one.ours):
            model.requires_grad_(True)
    assert one.paged.num_gathers == 0


# --- masks that are not served in place -----------------------------------------------------


def holes() -> Tensor:
    mask = left_padded(0, 9)
    mask[0, 5] = 0
    return mask


def right_padded() -> Tensor:
    return left_padded(0, 9).flip(1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("mask", [holes, right_padded])
def test_other_2d_masks(
    name: str, mask: Callable[[], Tensor], both: Callable[..., Both], caplog
) -> None:
    one = both(name)
    with caplog.at_level(logging.WARNING, "pageforge"):
        one.steps(tokens(2), mask(), 13, 14, 20, 21)
    assert one.paged.num_gathers > 0
    (record,) = (record for record in caplog.records if record.name.startswith("pageforge"))
    assert "2-D attention mask" in record.getMessage()  # once, though there are many layers


def test_holes_that_come_and_go(both: Callable[..., Both]) -> None:
    one = both()
    ids, mask = tokens(2), left_padded(0, 9)
    one.steps(ids, mask, 13, 14)
    assert one.paged.num_gathers == 0
    one.steps(ids, holes(), 15, 18)
    gathers = one.paged.num_gathers
    assert gathers > 0
    one.steps(ids, mask, 19, 22)
    assert one.paged.num_gathers == gathers


def test_more_padding_than_was_known(both: Callable[..., Both]) -> None:
    """A mask that hides more than the first one did is left padding still."""
    one = both()
    ids = tokens(2)
    one.steps(ids, None, 13, 14)
    one.steps(ids, left_padded(0, 9), 15, 18)
    assert one.paged.num_gathers == 0


def block_mask(length: int, past: int) -> Tensor:
    """Additive, 4-D: causal, but no token sees the third one."""
    position = torch.arange(past, past + length)[:, None]
    token = torch.arange(past + length)
    seen = (token <= position) & ((token != 2) | (position == 2))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)


def test_4d_masks(both: Callable[..., Both], caplog) -> None:
    one = both("gpt2")
    ids = tokens(2)
    with caplog.at_level(logging.WARNING, "pageforge"):
        for start, end in ((0, 13), (13, 14), (14, 18)):
            one.forward(ids[:, start:end], block_mask(end - start, start))
        assert one.paged.num_gathers > 0
        one.steps(ids, None, 19, 20)  # a mask of ours, over the same cache
        gathers = one.paged.num_gathers
        one.steps(ids, None, 21)
        assert one.paged.num_gathers == gathers


def test_a_4d_mask_after_a_forward_that_failed() -> None:
    """Nothing of the failed forward, such as its padding, is taken for this one's."""
    model = attending("gpt2")
    ids = tokens(2)
    with nan_pool(model, max_pages=3) as pool, PagedKVCache(pool) as cache:
        other = PagedKVCache(pool)
        other.update(*(torch.zeros(1, 4, 8, 8) for _ in range(2)), 0)
        with pytest.raises(OutOfPages):
            model(
                ids[:, :9],
                attention_mask=left_padded(0, 4)[:, :9],
                **{cache_argument(model): cache},
            )
        other.free()
        got = model(ids[:, :8], attention_mask=block_mask(8, 0), **{cache_argument(model): cache})
        want = tiny("gpt2")(ids[:, :8], attention_mask=block_mask(8, 0))
        assert (got.logits - want.logits).abs().max() <= TIE
        assert cache.page_tables[1].start == 0


def test_bidirectional_attention() -> None:
    """A decoder that is told not to be causal."""
    for name in ("llama", "mistral"):
        configs = [CONFIGS[name]() for _ in range(2)]
        for config in configs:
            config.is_causal = False
        stock, ours = (make(c, a) for c, a in zip(configs, ("sdpa", "pageforge"), strict=True))
        ids, mask = tokens(2), left_padded(0, 9)
        with nan_pool(ours) as pool, PagedKVCache(pool) as cache:
            dynamic = dynamic_cache(stock)
            for start, end in ((0, 13), (13, 18), (18, 19)):
                want, got = (
                    model(
                        ids[:, start:end],
                        attention_mask=mask[:, :end],
                        **{cache_argument(model): one},
                    ).logits
                    for model, one in ((stock, dynamic), (ours, cache))
                )
                assert (got - want)[mask[:, start:end].bool()].abs().max() <= TIE


def test_no_cache_at_all() -> None:
    """Training and scoring; packed positions, too."""
    ids, mask = tokens(2), left_padded(0, 9)
    positions = torch.cat([torch.arange(13), torch.arange(14)]).expand(2, -1)
    for name in (*KINDS, "qwen3_next", "deepseek_v3", "bloom", "t5", "bart"):
        stock, ours = tiny(name), attending(name)
        cases: list[dict[str, Any]] = [{}, {"attention_mask": mask}]
        if name in ("llama", "gemma3"):
            cases.append({"position_ids": positions})
        for case in cases:
            if stock.config.is_encoder_decoder:
                case["decoder_input_ids"] = ids[:, :5]
            want, got = (m(ids, use_cache=False, **case).logits for m in (stock, ours))
            shown = slice(None) if got.shape[1] == 5 or not case else mask.bool()
            if "position_ids" in case:
                shown = slice(None)
            assert (got - want)[shown].abs().max() <= TIE, name


def test_dynamic_and_static_caches_of_transformers() -> None:
    ids, mask = prompt(tiny("llama"), (20, 11)).values()
    inputs = {"input_ids": ids, "attention_mask": mask}
    for name in ("gpt2", "gemma3", "gpt_oss"):
        want = tiny(name).generate(**inputs, max_new_tokens=8, do_sample=False)
        for more in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            got = attending(name).generate(**inputs, max_new_tokens=8, do_sample=False, **more)
            assert torch.equal(want, got), (name, more)


def test_training_gives_the_same_gradients() -> None:
    ids, mask = tokens(2), left_padded(0, 9)
    for name in ("llama", "gemma2", "gpt_oss"):
        losses = []
        with torch.enable_grad():
            for source in (tiny, attending):
                model = copy.deepcopy(source(name)).train()
                model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
                losses.append([p.grad for p in model.parameters()])
        for one, other in zip(*losses, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, atol=1e-4, rtol=1e-3)


def test_a_cache_in_training_is_refused() -> None:
    model = attending("llama")
    refusal = pytest.raises(UnsupportedModel, match="no_grad")
    with torch.enable_grad(), nan_pool(model) as pool, PagedKVCache(pool) as cache, refusal:
        model(tokens(2), **{cache_argument(model): cache})


def test_dropout_takes_the_dense_path() -> None:
    configs = [CONFIGS["llama"]() for _ in range(2)]
    for config in configs:
        config.attention_dropout = 0.5
    stock, ours = (make(c, a) for c, a in zip(configs, ("sdpa", "pageforge"), strict=True))
    ids = tokens(2)
    with nan_pool(ours) as pool, PagedKVCache(pool) as cache:
        dynamic = dynamic_cache(stock)
        for start, end in ((0, 13), (13, 18)):
            logits = []
            for model, one in ((stock, dynamic), (ours, cache)):
                torch.manual_seed(5)
                model.train()
                logits.append(model(ids[:, start:end], **{cache_argument(model): one}).logits)
            assert (logits[0] - logits[1]).abs().max() <= TIE
        assert cache.num_gathers > 0


def test_autocast() -> None:
    """Queries of another dtype than the pool's are not mixed with it."""
    ids = tokens(2)
    model = attending("gpt2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pool = nan_pool(model, dtype=torch.float32)
        with pool, PagedKVCache(pool) as cache:
            dynamic = dynamic_cache(model)
            for start, end in ((0, 13), (13, 14), (14, 18)):
                want, got = (
                    m(ids[:, start:end], **{cache_argument(m): one}).logits
                    for m, one in ((tiny("gpt2"), dynamic), (model, cache))
                )
                assert (got - want).abs().max() <= 0.1
            assert cache.num_gathers > 0


# --- padding whose K/V were never stored ----------------------------------------------------


def test_padding_that_is_shown_later_is_refused() -> None:
    model = attending("llama")
    ids = tokens(2)
    for explicit in (False, True):
        with nan_pool(model) as pool:
            first = left_padded(0, 9)[:, :13]
            cache = PagedKVCache(pool, attention_mask=first if explicit else None)
            model(ids[:, :13], attention_mask=first, **{cache_argument(model): cache})
            for wrong in (None, left_padded(0, 0), left_padded(0, 4)):
                shown = wrong if wrong is None else wrong[:, :14]
                with pytest.raises(ShapeError, match=r"\[0, 9\].*pass the whole mask"):
                    model(ids[:, 13:14], attention_mask=shown, **{cache_argument(model): cache})
            with_hole = left_padded(0, 0)[:, :14]
            with_hole[1, 11] = 0
            with pytest.raises(ShapeError, match="left padding"):
                model(ids[:, 13:14], attention_mask=with_hole, **{cache_argument(model): cache})
            assert cache.get_seq_length() == 13
            right = left_padded(0, 9)[:, :14]
            want = tiny("llama")(ids[:, :14], attention_mask=right).logits[:, -1]
            got = model(
                ids[:, 13:14], attention_mask=right, **{cache_argument(model): cache}
            ).logits
            assert (got[:, -1] - want).abs().max() <= TIE
            cache.free()


def test_an_emptied_cache_takes_other_padding(both: Callable[..., Both]) -> None:
    one = both()
    one.steps(tokens(2), left_padded(0, 9), 13, 14)
    for empty in (lambda: one.paged.crop(-50), one.paged.reset):
        empty()
        one.dynamic = dynamic_cache(one.stock)
        one.steps(tokens(2), left_padded(5, 0), 13, 14)
        assert [table.start for table in one.paged.page_tables] == [5, 0]
    one.paged.reset()
    one.dynamic = dynamic_cache(one.stock)
    one.steps(tokens(3), None, 13, 14)
    assert one.paged.num_gathers == 0


# --- changing the implementation, several caches --------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("order", [("pageforge", "sdpa"), ("sdpa", "pageforge")])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_switching_in_the_middle(name: str, order, padded: bool) -> None:
    stock = tiny(name)
    model = make(CONFIGS[name](), "sdpa")
    ids = tokens(2)
    mask = left_padded(0, 9) if padded else left_padded(0, 0)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        dynamic = dynamic_cache(stock)
        ends = (13, 14, 15, 18, 19, 20, 24)
        for turn, end in enumerate(ends):
            start = ends[turn - 1] if turn else 0
            model.set_attn_implementation(order[turn // 2 % 2])
            gathers = cache.num_gathers
            want, got = (
                m(
                    ids[:, start:end], attention_mask=mask[:, :end], **{cache_argument(m): one}
                ).logits
                for m, one in ((stock, dynamic), (model, cache))
            )
            assert (got - want)[mask[:, start:end].bool()].abs().max() <= TIE
            assert (cache.num_gathers == gathers) == (
                not start or order[turn // 2 % 2] == "pageforge"
            )


def test_two_caches_on_one_pool_in_turns() -> None:
    model, stock = attending("gemma3"), tiny("gemma3")
    ids = [tokens(2, seed=seed) for seed in (1, 2)]
    with nan_pool(model) as pool:
        caches = [PagedKVCache(pool) for _ in ids]
        dynamic = [dynamic_cache(stock) for _ in ids]
        for start, end in ((0, 13), (13, 14), (14, 15), (15, 20), (20, 21)):
            for one, other, what in zip(caches, dynamic, ids, strict=True):
                got = model(what[:, start:end], **{cache_argument(model): one}).logits
                want = stock(what[:, start:end], **{cache_argument(stock): other}).logits
                assert (got - want).abs().max() <= TIE
        for cache in caches:
            assert cache.num_gathers == 0
            cache.free()
        check_all_back(pool)


def test_one_cache_over_two_generate_calls() -> None:
    stock, ours = tiny("llama"), attending("llama")
    first = prompt(stock, (20, 11))
    with nan_pool(ours) as pool, PagedKVCache(pool) as cache:
        for _ in range(2):
            want = run(stock, first, dynamic_cache(stock), max_new_tokens=6)
            got = run(ours, first, cache, max_new_tokens=6)
            assert torch.equal(want.sequences, got.sequences)
            cache.reset()
        assert cache.num_gathers == 0


def test_out_of_pages_leaves_the_cache_usable() -> None:
    model = attending("llama")
    ids = tokens(2)
    with nan_pool(model, max_pages=5) as pool, PagedKVCache(pool) as cache:
        model(ids[:, :13], **{cache_argument(model): cache})
        other = PagedKVCache(pool)
        other.update(*(torch.zeros(1, 2, 8, 8) for _ in range(2)), 0)
        for token in range(13, 16):
            model(ids[:, token : token + 1], **{cache_argument(model): cache})
        with pytest.raises(OutOfPages):
            model(ids[:, 16:17], **{cache_argument(model): cache})
        assert cache.get_seq_length() == 16
        cache.crop(-1)
        got = model(ids[:, 15:16], **{cache_argument(model): cache}).logits
        want = tiny("llama")(ids[:, :16]).logits[:, -1:]
        assert (got - want).abs().max() <= TIE
        assert cache.num_gathers == 0
        other.free()


def test_attention_weights_are_not_returned(both: Callable[..., Both]) -> None:
    one = both()
    name = cache_argument(one.ours)
    for ids in (tokens(2)[:, :13], tokens(2)[:, 13:14]):
        output = one.ours(ids, output_attentions=True, **{name: one.paged})
        assert not any(weights is not None for weights in output.attentions or ())


# --- what a model may do with the K/V it gets -----------------------------------------------


class OneLayer:
    """A cache of one layer driven by hand, and its K/V so far as plain tensors."""

    def __init__(self, pool: PagePool, rows: int = 2):
        self.cache = PagedKVCache(pool)
        self.rows = rows
        self.key = self.value = torch.zeros(rows, 2, 0, 16)
        self.module = torch.nn.Module()
        self.module.num_key_value_groups = 2

    def update(self, count: int, *, masked: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """New tokens: (mask, K, V) as the attention function of a model gets them."""
        past = self.cache.get_query_offset()
        kv_length, kv_offset = self.cache.get_mask_sizes(count, 0)
        mask = None
        if masked:
            mask = pageforge_mask(self.rows, count, kv_length, past, kv_offset)
        new = [torch.randn(self.rows, 2, count, 16) for _ in range(2)]
        self.key = torch.cat([self.key, new[0]], 2)
        self.value = torch.cat([self.value, new[1]], 2)
        return mask, *self.cache.update(*new, 0)

    def check_attention(
        self, mask: Tensor, key: Tensor, value: Tensor, count: int, query: Tensor | None = None
    ) -> None:
        """Attention gives what the plain tensors give."""
        query = torch.randn(self.rows, 4, count, 16) if query is None else query
        got, _ = pageforge_attention(self.module, query, key, value, mask, scaling=0.3)
        length = self.key.shape[2]
        seen = torch.ones(length, length).tril()[-count:].bool()
        want = torch.nn.functional.scaled_dot_product_attention(
            query,
            self.key.repeat_interleave(2, 1),
            self.value.repeat_interleave(2, 1),
            attn_mask=seen,
            scale=0.3,
        )
        assert (got - want.transpose(1, 2)).abs().max() < 1e-5


@pytest.fixture
def one_layer() -> Iterator[OneLayer]:
    geometry = pageforge.KVGeometry.uniform(1, 2, 16, dtype="float32", page_size=8)
    with PagePool(geometry, max_pages=64) as pool:
        pool.pages(0)[1:] = torch.nan
        one = OneLayer(pool)
        one.update(13)
        yield one
        one.cache.free()
        assert pool.stats().pages_used == 0


@pytest.mark.parametrize("count", [1, 3])
def test_k_and_v_are_lazy_only_in_a_forward_of_pageforge(one_layer: OneLayer, count: int) -> None:
    for masked in (True, False, True):
        _, key, value = one_layer.update(count, masked=masked)
        assert (type(key) is LazyKV) == (type(value) is LazyKV) == masked
        assert torch.equal(key + 0, one_layer.key)
        assert torch.equal(value + 0, one_layer.value)


@pytest.mark.parametrize("count", [1, 3])
def test_they_may_be_used_twice(one_layer: OneLayer, count: int) -> None:
    """Later layers of Gemma 3n and 4 reuse them; a model may also look at them first."""
    mask, key, value = one_layer.update(count)
    for _ in range(3):
        one_layer.check_attention(mask, key, value, count)
    assert one_layer.cache.num_gathers == 0
    key.sum()
    one_layer.check_attention(mask, key, value, count)
    assert one_layer.cache.num_gathers == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda key, value: (key * 2, value),
        lambda key, value: (key, value * 2),
        lambda key, value: (value, key),
        lambda key, value: (key, key),
        lambda key, value: (key.mul_(2), value),
        lambda key, value: (key, value.mul_(2)),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_changed_k_and_v_are_not_taken_from_the_pages(
    one_layer: OneLayer, change, count: int
) -> None:
    mask, key, value = one_layer.update(count)
    plain = change(one_layer.key.clone(), one_layer.value.clone())
    given = change(key, value)
    one_layer.key, one_layer.value = plain
    one_layer.check_attention(mask, *given, count)
    assert one_layer.cache.num_gathers == 1


def test_a_changed_mask_counts(one_layer: OneLayer) -> None:
    mask, key, value = one_layer.update(2)
    mask[..., 4] = torch.finfo(mask.dtype).min
    query = torch.randn(2, 4, 2, 16)
    got, _ = pageforge_attention(one_layer.module, query, key, value, mask, scaling=0.3)
    keep = [token for token in range(15) if token != 4]
    want, _ = pageforge_attention(
        one_layer.module,
        query,
        one_layer.key[:, :, keep],
        one_layer.value[:, :, keep],
        torch.ones(15, 15).tril()[-2:, keep].bool()[None, None],
        scaling=0.3,
    )
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize(
    "what",
    ["dense", "keys", "crop", "select", "fork", "deepcopy", "save", "to_dynamic", "update", "free"],
)
def test_a_token_that_is_kept_back_is_written_in_time(
    one_layer: OneLayer, what: str, tmp_path
) -> None:
    """Between `update` and attention; then attention is right still, or says why it cannot be."""
    cache = one_layer.cache
    mask, key, value = one_layer.update(1)
    assert cache._state.pending is not None
    stays = True
    if what == "dense":
        assert torch.equal(key + 0, one_layer.key)
    elif what == "keys":
        assert torch.equal(cache.layers[0].keys, one_layer.key)
    elif what == "crop":
        cache.crop(-0)
        stays = False
    elif what == "select":
        cache.reorder_cache(torch.tensor([1, 0]))
        stays = False
    elif what in ("fork", "deepcopy"):
        fork = cache.fork()[0] if what == "fork" else copy.deepcopy(cache)
        assert torch.equal(fork.layers[0].values, one_layer.value)
        fork.free()
    elif what == "save":
        cache.save(tmp_path / "pages")
        with PagedKVCache.load(tmp_path / "pages", cache.pool) as loaded:
            assert torch.equal(loaded.layers[0].keys, one_layer.key)
    elif what == "to_dynamic":
        assert torch.equal(cache.to_dynamic().layers[0].values, one_layer.value)
    elif what == "update":
        one_layer.update(1)
        stays = False
    elif what == "free":
        cache.free()
        stays = False
    assert cache._state.pending is None or what == "update"
    if stays:
        one_layer.check_attention(mask, key, value, 1)
    else:
        with pytest.raises(UseAfterFree):
            one_layer.check_attention(mask, key, value, 1)
        with pytest.raises(UseAfterFree):
            key.sum()
    if what not in ("free", "select"):
        assert torch.equal(cache.layers[0].keys, one_layer.key)
    if what == "select":
        assert torch.equal(cache.layers[0].keys, one_layer.key[[1, 0]])


def test_what_was_dense_in_time_stays_as_it_was(one_layer: OneLayer) -> None:
    _, key, _ = one_layer.update(1)
    want = (key + 0).clone()
    one_layer.update(1)
    one_layer.cache.crop(-9)
    assert torch.equal(key + 0, want)


def test_a_mask_of_another_cache_or_step_is_not_trusted(one_layer: OneLayer) -> None:
    other = OneLayer(one_layer.cache.pool)
    other.update(14)
    theirs, _, _ = other.update(1)
    old, _, _ = one_layer.update(1)
    for number, mask in enumerate((theirs, old), 1):
        _, key, value = one_layer.update(1)
        one_layer.check_attention(mask, key, value, 1)
        assert one_layer.cache.num_gathers == number
    other.cache.free()


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_arguments_that_would_be_lost_are_refused(one_layer: OneLayer, name: str) -> None:
    mask, key, value = one_layer.update(1)
    query = torch.randn(2, 4, 1, 16)
    with pytest.raises(UnsupportedModel, match=f"{name}.*sdpa"):
        pageforge_attention(one_layer.module, query, key, value, mask, **{name: torch.ones(1)})
    pageforge_attention(one_layer.module, query, key, value, mask, **{name: None})


@pytest.mark.parametrize("count", [1, 3])
def test_queries_with_odd_strides(one_layer: OneLayer, count: int) -> None:
    query = torch.randn(2, 4, 16, count).transpose(2, 3)
    one_layer.check_attention(*one_layer.update(count), count, query)


def test_new_tokens_in_odd_places(one_layer: OneLayer) -> None:
    """K/V that are slices of a fused projection, or of other strides."""
    for make_states in (
        lambda: torch.randn(2, 1, 2, 3, 16)[:, :, :, 1].transpose(1, 2),
        lambda: torch.randn(2, 2, 16, 1).transpose(2, 3),
        lambda: torch.randn(2, 2, 1, 32)[..., ::2],
    ):
        past = one_layer.cache.get_query_offset()
        kv_length, kv_offset = one_layer.cache.get_mask_sizes(1, 0)
        mask = pageforge_mask(2, 1, kv_length, past, kv_offset)
        new = make_states(), make_states()
        one_layer.key = torch.cat([one_layer.key, new[0]], 2)
        one_layer.value = torch.cat([one_layer.value, new[1]], 2)
        one_layer.check_attention(mask, *one_layer.cache.update(*new, 0), 1)
    assert one_layer.cache.num_gathers == 0


# --- the way it is built --------------------------------------------------------------------


def test_it_is_known_to_transformers() -> None:
    assert AttentionInterface()["pageforge"] is pageforge_attention
    assert AttentionMaskInterface()["pageforge"] is pageforge_mask


def test_one_op_a_layer_for_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes and attends; what layers share is worked out once."""
    model = attending("llama")
    made: list[Any] = []
    calls: list[Any] = []

    class Noted(ops.DenseDecode):
        def __init__(self, *arguments: Any):
            made.append(arguments[-1])
            super().__init__(*arguments)

        def __call__(self, *arguments: Any) -> Tensor:
            calls.append(self)
            return super().__call__(*arguments)

    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        mask = left_padded(0, 9)
        model(tokens(2)[:, :13], attention_mask=mask[:, :13], **{cache_argument(model): cache})
        monkeypatch.setattr(ops, "DenseDecode", Noted)
        for forbidden in ("write_kv", "attend", "write_and_attend", "gather_kv"):
            monkeypatch.setattr(ops, forbidden, None)
        model(tokens(2)[:, 13:14], attention_mask=mask[:, :14], **{cache_argument(model): cache})
        assert len(calls) == 2 and calls[0] is calls[1] and len(made) == 1
        model(tokens(2)[:, 14:15], attention_mask=mask[:, :15], **{cache_argument(model): cache})
        assert len(calls) == 4 and len(made) == 2
        assert made[0] is made[1]  # the padding is kept from step to step


def test_the_first_forward_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding torch's attention runs on the model's own K/V."""
    model = attending("llama")
    for forbidden in ("attend", "DenseDecode", "gather_kv"):
        monkeypatch.setattr(ops, forbidden, None)
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        got = model(tokens(2), **{cache_argument(model): cache}).logits
        assert torch.equal(got, tiny("llama")(tokens(2)).logits)


def test_the_dense_mask_is_made_once_and_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = LazyMask._make
    monkeypatch.setattr(LazyMask, "_make", lambda mask: made.append(1) or real(mask))
    for name, times in (("llama", 0), ("bloom", 1)):
        model = attending(name)
        made.clear()
        with nan_pool(model) as pool, PagedKVCache(pool) as cache:
            model(tokens(2)[:, :13], **{cache_argument(model): cache})
            model(tokens(2)[:, 13:14], **{cache_argument(model): cache})
        assert len(made) == 2 * times


def test_a_warning_comes_once_for_each_cache(caplog) -> None:
    model = attending("deepseek_v3")
    with nan_pool(model) as pool, caplog.at_level(logging.WARNING, "pageforge"):
        for count in (1, 2):
            with PagedKVCache(pool) as cache:
                for start, end in ((0, 13), (13, 14), (14, 15)):
                    model(tokens(2)[:, start:end], **{cache_argument(model): cache})
            messages = [record.getMessage() for record in caplog.records]
            assert len(messages) == count
            assert "gathered" in messages[0] and "by itself" in messages[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_goes_with_a_layer_to_its_device(mode, one_layer: OneLayer) -> None:
    """As accelerate sends it, where a model is spread over several."""
    with mode():
        mask, _, _ = one_layer.update(1)
        assert mask.to("cpu", non_blocking=True) is mask
        moved = mask.to("meta", non_blocking=True)
        assert isinstance(moved, LazyMask) and moved.device.type == "meta"
        assert not mask.is_dense
        for name in ("state", "refusal", "window", "padding", "span"):
            assert getattr(moved, name) == getattr(mask, name)


def test_encoder_decoders_attend_in_place_to_themselves() -> None:
    model = attending("bart")
    inputs = prompt(model, (13, 9))
    with nan_pool(model) as pool, PagedKVCache(pool) as cache:
        got = run(model, inputs, wrap(model, cache))
        want = run(tiny("bart"), inputs, dynamic_cache(tiny("bart")))
        assert torch.equal(got.sequences, want.sequences)
        assert cache.num_gathers == 0
