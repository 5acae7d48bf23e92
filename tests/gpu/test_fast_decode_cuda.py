"""fast_decode on CUDA: the same tokens as without it, and no graph that is stale."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from tests.hf.tiny_models import CONFIGS as FAMILIES
from tests.hf.tiny_models import PECULIAR, PER_LAYER, TWO_KINDS, make
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

import pageforge
from pageforge import PagedKVCache, PagePool
from pageforge.ops import products
from pageforge.probe import cache_argument

pytestmark = pytest.mark.gpu

TOKENS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GRANULE = 2 << 20
GREEDY = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}


CONFIGS = {
    "gpt2": lambda: GPT2Config(**TOKENS, n_embd=64, n_head=4, n_layer=3, n_positions=512),
    "llama": lambda: LlamaConfig(**TOKENS, **SIZES),
    "qwen3": lambda: Qwen3Config(**TOKENS, **SIZES),
    "gemma2": lambda: Gemma2Config(**TOKENS, **SIZES, sliding_window=8),
}


def _make(name: str) -> PreTrainedModel:
    return make(CONFIGS[name](), "eager").cuda()


@pytest.fixture(params=["gpt2", "llama", "qwen3", "gemma2"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    yield _make(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return _make("llama")


def prompt(rows: int, tokens: int, *, padded: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + tokens)
    ids = torch.randint(2, 100, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : row * tokens // (2 * rows)] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def reference(model: PreTrainedModel, inputs: dict, **settings) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model.generate(**inputs, **settings)
    model.set_attn_implementation(before)
    return out


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy(model: PreTrainedModel, rows: int, padded: bool) -> None:
    inputs = prompt(rows, 13, padded=padded)
    want = reference(model, inputs, **GREEDY)
    with pageforge.fast_decode(model) as decode:
        got = model.generate(**inputs, **GREEDY)
    assert torch.equal(got, want)
    assert decode.num_replays == 38  # 39 steps, the first of them to see whether both agree
    assert not decode.eager_steps


def test_beams_and_samples(model: PreTrainedModel) -> None:
    inputs = prompt(2, 9, padded=True)
    want = reference(model, inputs, **GREEDY, num_beams=3)
    with pageforge.fast_decode(model) as decode:
        assert torch.equal(model.generate(**inputs, **GREEDY, num_beams=3), want)
        assert decode.num_replays == 38
        torch.manual_seed(3)
        first = model.generate(
            **inputs, do_sample=True, max_new_tokens=10, num_return_sequences=4, top_k=0
        )
        torch.manual_seed(3)
        second = model.generate(
            **inputs, do_sample=True, max_new_tokens=10, num_return_sequences=4, top_k=0
        )
    assert torch.equal(first, second)
    assert first.shape == (8, 19)


def test_logits_of_each_step(model: PreTrainedModel) -> None:
    name = cache_argument(model)
    ids = prompt(3, 20)["input_ids"]
    steps = torch.randint(2, 100, (40, 3, 1), generator=torch.Generator().manual_seed(5)).cuda()
    dense, pool = DynamicCache(config=model.config), PagePool.for_model(model, max_pages=64)
    paged = PagedKVCache(pool)
    with torch.no_grad():
        want = [model(ids, **{name: dense}).logits[:, -1:]]
        want += [model(token, **{name: dense}).logits for token in steps]
        with pageforge.fast_decode(model) as decode:
            got = [model(ids, **{name: paged}).logits[:, -1:]]
            got += [model(token, **{name: paged}).logits for token in steps]
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    assert decode.num_replays == 39
    assert paged.get_seq_length() == 60
    assert (
        pool.stats().pages_used == len(pool.geometry.groups) * 3 * 4
        or model.config.model_type == "gemma2"
    )
    paged.free()
    assert pool.stats().pages_used == 0


@torch.no_grad()
def test_memory_comes_a_little_at_each_token() -> None:
    """Rows whose pages fill at the same token: pieces of 2 MiB, never all of them at once."""
    model, name = _make("llama"), cache_argument(_make("llama"))
    pool = PagePool.for_model(model, page_size=256, max_pages=4096)
    rows = 32 * GRANULE // pool.stats().groups[0].bytes_per_page  # a page each: 32 granules
    cache, token = PagedKVCache(pool), prompt(rows, 1)["input_ids"]
    with pageforge.fast_decode(model) as decode:
        model(prompt(rows, 200)["input_ids"], **{name: cache})
        mapped = [pool.stats().bytes_mapped]
        for _ in range(120):
            model(token, **{name: cache})
            stats = pool.stats()
            # A 32nd, what the next step claims, and what is begun of a granule of each.
            assert stats.bytes_mapped <= stats.bytes_in_use * 33 / 32 + 3 * GRANULE
            mapped.append(stats.bytes_mapped)
        assert decode.num_replays == 119
        # What comes in a step, but for the first, which claims the share of all tokens before.
        steps = [now - before for before, now in pairwise(mapped[1:])]
        assert max(steps) <= 2 * GRANULE
        assert sum(steps) > 4 * GRANULE
    torch.cuda.synchronize()
    assert pool.stats().pages_used == 2 * rows
    cache.free()
    assert pool.stats().pages_used == 0


def test_two_caches_in_turns_and_crops(llama: PreTrainedModel) -> None:
    name = cache_argument(llama)
    pool = PagePool.for_model(llama, max_pages=64)
    inputs = [prompt(2, 17)["input_ids"], prompt(2, 30)["input_ids"]]
    token = prompt(2, 1)["input_ids"]
    with torch.no_grad(), pageforge.fast_decode(llama) as decode:
        caches = [PagedKVCache(pool), PagedKVCache(pool)]
        dense = [DynamicCache(config=llama.config) for _ in caches]
        for ids, cache, other in zip(inputs, caches, dense, strict=True):
            llama(ids, **{name: cache})
            llama(ids, **{name: other})
        for turn in range(20):
            cache, other = caches[turn % 2], dense[turn % 2]
            if turn in (7, 8, 12):
                cache.crop(-3)
                other.crop(-3)
            if turn == 15:
                caches[turn % 2] = cache = cache.fork()[0]
            got = llama(token, **{name: cache}).logits
            llama.set_attn_implementation("eager")
            want = llama(token, **{name: other}).logits
            llama.set_attn_implementation("pageforge")
            assert (got - want).norm() <= 1e-4 * want.norm(), turn
    assert decode.num_replays >= 1


def test_stale_graphs(llama: PreTrainedModel) -> None:
    inputs = prompt(2, 9)
    settings = GREEDY | {"max_new_tokens": 12, "min_new_tokens": 12}
    layer = llama.model.layers[1].mlp.down_proj
    with pageforge.fast_decode(llama) as decode:
        plain = llama.generate(**inputs, **settings)
        assert torch.equal(plain, reference(llama, inputs, **settings))
        # A steering hook added between calls.
        handle = layer.register_forward_hook(lambda module, args, out: out + 3.0)
        steered = llama.generate(**inputs, **settings)
        replays = decode.num_replays
        assert torch.equal(steered, reference(llama, inputs, **settings))
        assert not torch.equal(steered, plain)
        handle.remove()
        assert torch.equal(llama.generate(**inputs, **settings), plain)
        assert decode.num_replays > replays  # captured anew
        # Weights at another address, and other values there.
        layer.weight.data = layer.weight.data.flip(0).clone()
        moved = llama.generate(**inputs, **settings)
        assert torch.equal(moved, reference(llama, inputs, **settings))
        assert not torch.equal(moved, plain)
        # The same address, other values: what a graph reads anyway.
        layer.weight.data.copy_(layer.weight.data.flip(0))
        assert torch.equal(llama.generate(**inputs, **settings), plain)
    assert any("hooks" in reason for reason in decode.eager_steps)
    assert any("memory" in reason for reason in decode.eager_steps)


def test_a_switched_adapter(llama: PreTrainedModel) -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Module):
            super().__init__()
            self.base = base
            self.deltas = torch.nn.ParameterDict(
                {name: torch.randn_like(base.weight) for name in ("one", "two")}
            )
            self.active = ["one"]

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            out = self.base(states)
            for name in self.active:
                out = out + states @ self.deltas[name].T
            return out

    inputs = prompt(2, 9)
    settings = GREEDY | {"max_new_tokens": 12, "min_new_tokens": 12}
    llama.model.layers[0].mlp.up_proj = Adapter(llama.model.layers[0].mlp.up_proj).cuda()
    adapter = llama.model.layers[0].mlp.up_proj
    with pageforge.fast_decode(llama) as decode:
        seen = []
        for active in (["one"], ["two"], [], ["one"]):
            adapter.active[:] = active
            got = llama.generate(**inputs, **settings)
            assert torch.equal(got, reference(llama, inputs, **settings)), active
            seen.append(got)
    assert not torch.equal(seen[0], seen[1])
    assert decode.num_replays > 20


def test_what_cannot_be_captured_says_why(llama: PreTrainedModel) -> None:
    inputs = prompt(2, 9)
    settings = GREEDY | {"max_new_tokens": 6, "min_new_tokens": 6}
    config = LlamaConfig(
        **TOKENS,
        **SIZES,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    dynamic = make(config, "eager").cuda()
    with pageforge.fast_decode(dynamic) as decode:
        got = dynamic.generate(**inputs, **settings)
    assert torch.equal(got, reference(dynamic, inputs, **settings))
    assert decode.num_replays == 0
    assert any("rotary" in reason for reason in decode.eager_steps)
    with pageforge.fast_decode(llama) as decode:
        name = cache_argument(llama)
        llama.generate(**inputs, **settings, **{name: DynamicCache(config=llama.config)})
    assert any("DynamicCache" in reason for reason in decode.eager_steps)
    holes = prompt(2, 9)
    holes["attention_mask"][0, 4] = 0
    with pageforge.fast_decode(llama) as decode:
        got = llama.generate(**holes, **settings)
    assert torch.equal(got, reference(llama, holes, **settings))
    assert decode.num_replays == 0


def test_the_model_is_left_as_found(llama: PreTrainedModel) -> None:
    before = dict(vars(llama))
    implementation = llama.config._attn_implementation
    with pytest.raises(RuntimeError, match="mine"), pageforge.fast_decode(llama):
        llama.generate(**prompt(1, 5), max_new_tokens=4, do_sample=False)
        raise RuntimeError("mine")
    assert vars(llama) == before
    assert llama.config._attn_implementation == implementation
    with (
        pageforge.fast_decode(llama),
        pytest.raises(pageforge.PageForgeError, match="inside"),
        pageforge.fast_decode(llama),
    ):
        pass


def test_pages_run_out(llama: PreTrainedModel) -> None:
    pool = PagePool.for_model(llama, max_pages=4)
    cache = PagedKVCache(pool)
    with pageforge.fast_decode(llama), pytest.raises(pageforge.OutOfPages):
        llama.generate(**prompt(2, 10), **GREEDY, **{cache_argument(llama): cache})
    assert cache.get_seq_length() == 32
    cache.free()
    assert pool.stats().pages_used == 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_compiled(name: str) -> None:
    model = _make(name)
    inputs = prompt(3, 13, padded=True)
    want = reference(model, inputs, **GREEDY)
    with pageforge.fast_decode(model, compile=True) as decode:
        got = model.generate(**inputs, **GREEDY)
    assert torch.equal(got, want)
    assert decode.num_replays == 38
    assert not decode.eager_steps


def test_compiled_products_of_one_input_are_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, K and V of each layer, and the MLP's two: each time streams for branches are asked for."""
    asked, streams = [], products._side_streams
    monkeypatch.setattr(products, "_side_streams", lambda on: (asked.append(on), streams(on))[1])
    model = _make("llama")
    inputs = prompt(3, 13)
    want = reference(model, inputs, **GREEDY)
    with pageforge.fast_decode(model, compile=True) as decode:
        got = model.generate(**inputs, **GREEDY)
    assert torch.equal(got, want)
    assert decode.num_replays == 38
    assert len(asked) == 2 * model.config.num_hidden_layers


def test_half_precision_matches_eager_pageforge() -> None:
    model = _make("llama").half()
    inputs = prompt(4, 30)
    model.set_attn_implementation("pageforge")
    pool = PagePool.for_model(model, max_pages=64)
    name = cache_argument(model)
    want = model.generate(**inputs, **GREEDY, **{name: PagedKVCache(pool)})
    with pageforge.fast_decode(model) as decode:
        got = model.generate(**inputs, **GREEDY, **{name: PagedKVCache(pool)})
    assert (got == want).float().mean() > 0.9
    assert decode.num_replays == 38


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma3n", "gemma4", "mixtral"])
def test_other_families(family: str) -> None:
    """Windows, sinks, K/V that layers share, experts: captured, or eager with a reason."""
    config = (FAMILIES | PECULIAR)[family]()
    if family == "gemma4":  # kernels serve head dims from 16 to 256
        sizes = {"head_dim": 16, "global_head_dim": 16, "num_kv_shared_layers": 2}
        config = Gemma4TextConfig(**TWO_KINDS | PER_LAYER | sizes)
    else:
        config.head_dim = 16
    model = make(config, "eager").cuda()
    inputs = prompt(3, 13, padded=True)
    want = reference(model, inputs, **GREEDY)
    with pageforge.fast_decode(model) as decode:
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    print(family, decode.num_replays, dict(decode.eager_steps))
    if family == "gemma3n":  # it makes tensors on the CPU in each forward
        (reason,) = decode.eager_steps
        assert "a step cannot be captured" in reason
    elif family != "mixtral":  # how experts are computed may wait for the host
        assert decode.num_replays == 38


@torch.no_grad()
def test_rows_that_come_and_go(llama: PreTrainedModel) -> None:
    """9 and 10 rows are served by one graph: the tenth is there or writes nothing."""
    name, ids = cache_argument(llama), prompt(10, 9)["input_ids"]
    pool = PagePool.for_model(llama, page_size=64, max_pages=10)
    paged, dense = PagedKVCache(pool), DynamicCache(config=llama.config)

    def feed(tokens: torch.Tensor) -> None:
        got = llama(tokens, **{name: paged}).logits
        llama.set_attn_implementation("eager")
        want = forward(tokens, **{name: dense}).logits
        llama.set_attn_implementation("pageforge")
        assert (got - want).norm() <= 1e-4 * want.norm()

    forward = llama.forward
    with pageforge.fast_decode(llama) as decode:
        feed(ids)
        for turn in range(3):
            feed(ids[:, turn : turn + 1])
        for cache in (paged, dense):
            cache.batch_select_indices(torch.arange(9, device="cuda"))
        other = PagedKVCache(pool)  # takes the page of the row that is gone
        llama(ids[:1].repeat(1, 5), **{name: other})
        keys = [layer.keys.clone() for layer in other.layers]
        for turn in range(9):
            feed(ids[:9, turn : turn + 1])
        assert all(
            torch.equal(one, layer.keys) for one, layer in zip(keys, other.layers, strict=True)
        )
        other.free()
        rows = [*range(9), 8]
        for cache in (paged, dense):
            cache.batch_select_indices(torch.tensor(rows, device="cuda"))
        for turn in range(9):
            feed(ids[rows, turn : turn + 1])
    assert decode.num_captures == 1
    assert decode.num_replays == 20


def test_to_the_last_position_and_beyond() -> None:
    model = make(LlamaConfig(**TOKENS, **SIZES | {"max_position_embeddings": 32}), "eager").cuda()
    for count in (22, 60):
        settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
        want = reference(model, prompt(2, 10), **settings)
        with pageforge.fast_decode(model) as decode:
            assert torch.equal(model.generate(**prompt(2, 10), **settings), want)
        assert decode.num_captures <= 3


def test_a_graph_has_its_own_cublas_workspace() -> None:
    """torch.compile's own graphs clear all others, and then their memory may be anyone's, or none.

    Products of few rows with a long inner dimension are cut, and their parts lie there.
    """
    sizes = SIZES | {"hidden_size": 1024, "intermediate_size": 8192}
    model = make(LlamaConfig(**TOKENS, **sizes), "eager").half().cuda()
    inputs = prompt(1, 9)
    with pageforge.fast_decode(model) as decode:
        want = model.generate(**inputs, **GREEDY)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        torch.cuda.synchronize()
    assert all(bool(other.isnan().all()) for other in others)
    assert decode.num_captures == 1


def test_modes_streams_and_threads(llama: PreTrainedModel) -> None:
    inputs = [prompt(2, 9, padded=True), prompt(2, 14, padded=True)]
    want = [reference(llama, each, **GREEDY) for each in inputs]
    with pageforge.fast_decode(llama) as decode:
        with torch.inference_mode():
            assert torch.equal(llama.generate(**inputs[0], **GREEDY), want[0])
        assert torch.equal(llama.generate(**inputs[0], **GREEDY), want[0])
        assert decode.num_captures == 1
        got: dict[int, torch.Tensor] = {}

        def work(number: int) -> None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    got[number] = llama.generate(**inputs[number], **GREEDY)
            stream.synchronize()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(got[number], want[number]) for number in range(2))


@torch.no_grad()
def test_autocast_is_not_replayed(llama: PreTrainedModel) -> None:
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    with pageforge.fast_decode(llama) as decode:
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64, dtype=torch.float32))
        for tokens in (prompt(2, 9)["input_ids"], token, token):
            llama(tokens, **{name: cache})
        with torch.autocast("cuda", torch.bfloat16):
            assert llama(token, **{name: cache}).logits.dtype == torch.bfloat16
    assert decode.eager_steps == {"autocast is enabled": 1}


@torch.no_grad()
def test_a_closed_pool(llama: PreTrainedModel) -> None:
    """A replay would touch addresses without memory behind them."""
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    with pageforge.fast_decode(llama):
        pool = PagePool.for_model(llama, max_pages=64)
        caches = [PagedKVCache(pool), PagedKVCache(pool)]
        for cache in caches:
            for tokens in (prompt(2, 9)["input_ids"], token, token):
                llama(tokens, **{name: cache})
        torch.cuda.synchronize()
        pool.close()
        with pytest.raises(pageforge.UseAfterFree, match="closed"):
            llama(token, **{name: caches[0]})
        caches[0].free()
    torch.cuda.synchronize()


@torch.no_grad()
def test_caches_and_pools_that_are_garbage_while_a_step_is_captured(
    llama: PreTrainedModel,
) -> None:
    """Each in a cycle that only the collector finds, which is due at every few allocations."""
    name, ids = cache_argument(llama), prompt(2, 40)["input_ids"]
    before = gc.get_threshold()
    with pageforge.fast_decode(llama) as decode:
        kept = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        llama(ids, **{name: kept})
        for _ in range(3):
            cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
            for tokens in (ids, ids[:, :1], ids[:, :1]):  # its steps are captured, too
                llama(tokens, **{name: cache})
            cycle = [cache]
            cycle.append(cycle)
            del cache, cycle
        gc.set_threshold(5)
        try:
            for _ in range(4):
                llama(ids[:, :1], **{name: kept})
        finally:
            gc.set_threshold(*before)
        assert decode.num_replays == 3 + 3
        assert not decode.eager_steps


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one() -> None:
    model = make(CONFIGS["llama"](), "eager").to("cuda:1")
    inputs = {key: value.to("cuda:1") for key, value in prompt(3, 13, padded=True).items()}
    want = reference(model, inputs, **GREEDY)
    assert torch.cuda.current_device() == 0
    with pageforge.fast_decode(model) as decode:
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 38
    assert not decode.eager_steps
