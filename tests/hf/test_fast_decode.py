"""fast_decode without a GPU: a stand-in runs the step again where a graph would be replayed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hf.tiny_models import CONFIGS, make
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import pageforge
from pageforge import OutOfPages, PagedKVCache, PageForgeError, PagePool, ShapeError
from pageforge.hf import decode_step, fast_decode
from pageforge.hf.fast_decode import FastDecode
from pageforge.hf.step_cache import StepCache
from pageforge.probe import cache_argument

GREEDY = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
FAMILIES = ["gpt2", "llama", "qwen3", "gemma2"]


class StandIn:
    """What CapturedStep is, without a graph."""

    def __init__(self, run: Callable[[], Any], memory: object):
        run()
        self._run = run
        self.outputs = run()

    def replay(self) -> None:
        self.outputs = self._run()


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(decode_step, "CapturedStep", StandIn)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    yield make(CONFIGS[request.param](), "eager")


@pytest.fixture
def llama() -> PreTrainedModel:
    return make(CONFIGS["llama"](), "eager")


def fast(model: PreTrainedModel, **settings: bool) -> FastDecode:
    return FastDecode(model, **{"compile": False, "allow_hooks": False} | settings)


def prompt(rows: int, length: int, *, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : (row * length) // (2 * rows)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy(model: PreTrainedModel, rows: int, padded: bool) -> None:
    inputs = prompt(rows, 13, padded=padded)
    want = model.generate(**inputs, **GREEDY)
    decode = fast(model)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 18 + 19  # the first step was compared with an eager one
    assert decode.num_captures == 1
    assert not decode.eager_steps


def test_beams_samples_and_other_batch_sizes(model: PreTrainedModel) -> None:
    inputs = prompt(2, 9, padded=True)
    settings = [
        GREEDY | {"num_beams": 3},
        {"do_sample": True, "top_k": 0, "max_new_tokens": 10, "num_return_sequences": 3},
        GREEDY,
    ]
    want = []
    for setting in settings:
        torch.manual_seed(1)
        want.append(model.generate(**inputs, **setting))
    decode = fast(model)
    with decode._installed():
        for setting, one in zip(settings, want, strict=True):
            torch.manual_seed(1)
            assert torch.equal(model.generate(**inputs, **setting), one)
    assert decode.num_captures == 2  # 6 rows, 2 rows
    assert not decode.eager_steps


def test_compiled(llama: PreTrainedModel) -> None:
    inputs = prompt(3, 13, padded=True)
    want = llama.generate(**inputs, **GREEDY)
    decode = fast(llama, compile=True)
    with decode._installed():
        assert torch.equal(llama.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 18
    assert not decode.eager_steps


class Pair:
    """A paged cache under fast_decode and a DynamicCache, fed alike."""

    def __init__(self, model: PreTrainedModel, pool: PagePool):
        self.model = model
        self.name = cache_argument(model)
        self.paged = PagedKVCache(pool)
        self.dense = DynamicCache(config=model.config)

    def feed(self, tokens: Tensor, **inputs: Any) -> None:
        got = self.model(tokens, **inputs, **{self.name: self.paged}).logits
        self.model.set_attn_implementation("eager")
        want = self.model._plain(tokens, **inputs, **{self.name: self.dense}).logits
        self.model.set_attn_implementation("pageforge")
        assert (got - want).abs().max() <= 1e-3, (got - want).abs().max()

    def crop(self, count: int) -> None:
        self.paged.crop(-count)
        self.dense.crop(-count)


@torch.no_grad()
def test_two_caches_in_turns_with_crops_forks_and_chunks(llama: PreTrainedModel) -> None:
    pool = PagePool.for_model(llama, max_pages=200)
    tokens = prompt(2, 60)["input_ids"]
    object.__setattr__(llama, "_plain", llama.forward)
    decode = fast(llama)
    with decode._installed():
        pairs = [Pair(llama, pool), Pair(llama, pool)]
        for start, pair in zip((0, 20), pairs, strict=True):
            pair.feed(tokens[:, start : start + 17 + start])
        for turn in range(40):
            pair = pairs[turn % 2]
            pair.feed(tokens[:, turn : turn + 1])
            match turn:
                case 6 | 7:
                    pair.crop(3)
                case 10:
                    pair.crop(1)
                case 15:
                    pair.paged = pair.paged.fork()[0]
                case 20:
                    pair.feed(tokens[:, :5])
                case 25:
                    pair.paged.reorder_cache(torch.tensor([1, 0]))
                    pair.dense.reorder_cache(torch.tensor([1, 0]))
        used = pool.stats().pages_used
        lengths = [pair.paged.get_seq_length() for pair in pairs]
    sizes = [2 * -(-length // 16) for length in lengths]
    assert used >= pool.stats().pages_used == sum(sizes)
    for pair in pairs:
        pair.paged.free()
    assert pool.stats().pages_used == 0
    assert decode.num_replays > 20


@torch.no_grad()
def test_rows_change_places_with_their_padding(llama: PreTrainedModel) -> None:
    inputs = prompt(2, 20, padded=True)
    name, step = cache_argument(llama), prompt(2, 1)["input_ids"]
    with fast(llama)._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        mask = inputs["attention_mask"]
        llama(**inputs, **{name: cache})
        logits = []
        for _ in range(3):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            logits.append(llama(step[:1].repeat(2, 1), attention_mask=mask, **{name: cache}).logits)
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = llama(step[:1].repeat(2, 1), attention_mask=mask[[1, 0]], **{name: cache}).logits
    assert (swapped - logits[-1][[1, 0]]).abs().max() < 1e-4


@torch.no_grad()
def test_a_mask_with_holes_later_on_is_served_eagerly(llama: PreTrainedModel) -> None:
    inputs, name = prompt(2, 12), cache_argument(llama)
    token = prompt(2, 1)["input_ids"]
    decode = fast(llama)
    plain = make(CONFIGS["llama"](), "eager")
    dense = DynamicCache(config=plain.config)
    with decode._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        mask = inputs["attention_mask"]
        llama(**inputs, **{name: cache})
        plain(**inputs, **{name: dense})
        for turn in range(6):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            if turn == 3:
                mask[0, 5] = 0
            got = llama(token, attention_mask=mask, **{name: cache}).logits
            want = plain(token, attention_mask=mask, **{name: dense}).logits
            assert (got - want).abs().max() < 1e-3, turn
    assert sum(decode.eager_steps.values()) == 3
    assert "padding" in next(iter(decode.eager_steps))


@torch.no_grad()
def test_padding_needs_its_mask(llama: PreTrainedModel) -> None:
    inputs, name = prompt(2, 40, padded=True), cache_argument(llama)
    inputs["attention_mask"][0, :20] = 0
    with fast(llama)._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        llama(**inputs, **{name: cache})
        with pytest.raises(ShapeError, match="attention_mask"):
            llama(prompt(2, 1)["input_ids"], **{name: cache})


def test_hooks_mean_eager_until_they_are_gone(llama: PreTrainedModel) -> None:
    inputs = prompt(2, 9)
    plain = llama.generate(**inputs, **GREEDY)
    decode = fast(llama)
    with decode._installed():
        assert torch.equal(llama.generate(**inputs, **GREEDY), plain)
        layer = llama.model.layers[1].mlp.down_proj
        handle = layer.register_forward_hook(lambda module, args, out: out + 3.0)
        replays = decode.num_replays
        steered = llama.generate(**inputs, **GREEDY)
        assert decode.num_replays == replays
        handle.remove()
        assert torch.equal(llama.generate(**inputs, **GREEDY), plain)
        assert decode.num_replays == replays + 18
    assert not torch.equal(steered, plain)
    assert any("hooks" in reason for reason in decode.eager_steps)


def test_allow_hooks(llama: PreTrainedModel) -> None:
    llama.model.layers[0].register_forward_hook(lambda module, args, out: None)
    decode = fast(llama, allow_hooks=True)
    with decode._installed():
        llama.generate(**prompt(1, 5), **GREEDY)
    assert decode.num_replays == 18


def test_moved_weights_and_changed_settings(llama: PreTrainedModel) -> None:
    inputs, decode = prompt(2, 9), fast(llama)
    weight = llama.model.layers[0].mlp.up_proj.weight
    with decode._installed():
        first = llama.generate(**inputs, **GREEDY)
        weight.data = weight.data.flip(0).clone()
        second = llama.generate(**inputs, **GREEDY)
        assert decode.num_captures == 2
    assert not torch.equal(first, second)
    assert torch.equal(llama.generate(**inputs, **GREEDY), second)
    assert any("memory" in reason for reason in decode.eager_steps)


def test_a_model_that_changes_in_each_forward(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = llama.model.layers[0].mlp
    mlp.calls = 0
    forward = type(mlp).forward

    def counted(module: Any, states: Tensor) -> Tensor:
        module.calls = getattr(module, "calls", 0) + 1
        return forward(module, states)

    monkeypatch.setattr(type(mlp), "forward", counted)
    decode = fast(llama)
    with decode._installed():
        llama.generate(**prompt(1, 5), **GREEDY)
    assert decode.num_replays == 0
    assert any("each forward" in reason for reason in decode.eager_steps)


def test_a_replay_that_disagrees_is_not_used(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prompt(2, 9)
    want = llama.generate(**inputs, **GREEDY)
    real = StepCache.attend
    monkeypatch.setattr(
        StepCache, "attend", lambda cache, *args, **options: 0 * real(cache, *args, **options)
    )
    decode = fast(llama)
    with decode._installed():
        assert torch.equal(llama.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 0
    assert any("another result" in reason for reason in decode.eager_steps)


def test_what_a_graph_cannot_serve(llama: PreTrainedModel) -> None:
    inputs, name = prompt(2, 9), cache_argument(llama)
    token = prompt(2, 1)["input_ids"]
    decode = fast(llama)
    with decode._installed():
        llama.generate(**inputs, **GREEDY, **{name: DynamicCache(config=llama.config)})
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        with torch.no_grad():
            llama(**inputs, **{name: cache})
            embeds = llama.get_input_embeddings()(token)
            llama(inputs_embeds=embeds, **{name: cache})
            llama(token, **{name: cache}, cache_position=torch.tensor([10]))
            hidden = llama(token, **{name: cache}, output_hidden_states=True).hidden_states
            assert len(hidden) > 2
            values = llama(token, **{name: cache}, return_dict=False)
            assert isinstance(values, tuple)
            assert cache.get_seq_length() == 13
            for _ in range(3):  # the hooks that recorded hidden states do no harm
                llama(token, **{name: cache})
    assert decode.num_replays == 2
    reasons = " ".join(decode.eager_steps)
    for part in ("DynamicCache", "cache_position", "hidden_states", "tuple"):
        assert part in reasons


def test_pages_run_out_and_the_cache_lives_on(llama: PreTrainedModel) -> None:
    pool, name = PagePool.for_model(llama, max_pages=4), cache_argument(llama)
    cache = PagedKVCache(pool)
    with fast(llama)._installed():
        with pytest.raises(OutOfPages):
            llama.generate(**prompt(2, 10), **GREEDY | {"max_new_tokens": 60}, **{name: cache})
        assert cache.get_seq_length() == 32
        cache.crop(-2)
        with torch.no_grad():
            llama(prompt(2, 1)["input_ids"], **{name: cache})
            llama(prompt(2, 1)["input_ids"], **{name: cache})
        assert cache.get_seq_length() == 32
    assert pool.stats().pages_used == 4
    cache.free()
    assert pool.stats().pages_used == 0


def test_the_model_is_left_as_found(llama: PreTrainedModel) -> None:
    @functools.wraps(llama.forward)
    def own(*args: Any, **kwargs: Any) -> Any:
        return type(llama).forward(llama, *args, **kwargs)

    llama.forward = own  # as accelerate does
    before = dict(vars(llama))
    with pytest.raises(RuntimeError, match="mine"), fast(llama)._installed():
        llama.generate(**prompt(1, 5), **GREEDY)
        raise RuntimeError("mine")
    assert vars(llama) == before
    assert llama.config._attn_implementation == "eager"
    with (
        fast(llama)._installed(),
        pytest.raises(PageForgeError, match="inside"),
        fast(llama)._installed(),
    ):
        pass
    assert vars(llama) == before


def test_on_the_cpu_nothing_is_done(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(vars(llama))
    with pageforge.fast_decode(llama) as decode:
        assert vars(llama) == before
        llama.generate(**prompt(1, 5), **GREEDY)
    assert decode.num_replays == 0


def test_a_page_ahead_is_given_back_by_whatever_comes(llama: PreTrainedModel) -> None:
    pool, name = PagePool.for_model(llama, max_pages=64), cache_argument(llama)
    token = prompt(2, 1)["input_ids"]
    with fast(llama)._installed(), torch.no_grad():
        cache = PagedKVCache(pool)
        llama(prompt(2, 14)["input_ids"], **{name: cache})
        llama(token, **{name: cache})
        llama(token, **{name: cache})
        assert cache.get_seq_length() == 16
        assert pool.stats().pages_used == 4  # one a row ahead
        assert [len(table.pages()) for table in cache.page_tables] == [1, 1]
        assert pool.stats().pages_used == 2
        llama(token, **{name: cache})
        assert pool.stats().pages_used == 4


def test_threads_do_not_mix_their_rows(llama: PreTrainedModel) -> None:
    prompts = [prompt(2, 7), prompt(2, 11)]
    want = [llama.generate(**inputs, **GREEDY) for inputs in prompts]
    got: dict[int, Tensor] = {}
    with fast(llama)._installed():
        threads = [
            threading.Thread(
                target=lambda i=i: got.update({i: llama.generate(**prompts[i], **GREEDY)})
            )
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(got[i], want[i]) for i in range(2))


def test_positions_are_the_callers(llama: PreTrainedModel) -> None:
    name = cache_argument(llama)
    inputs, token = prompt(3, 9)["input_ids"], prompt(3, 1)["input_ids"]
    with fast(llama)._installed(), torch.no_grad():
        logits = []
        for positions in (None, torch.full((3, 1), 9), torch.tensor([[9]])):
            cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
            llama(inputs, **{name: cache})
            for step in range(3):
                given = None if positions is None else positions + step
                out = llama(token, position_ids=given, **{name: cache})
            logits.append(out.logits)
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        llama(inputs, **{name: cache})
        for _ in range(3):
            other = llama(token, position_ids=torch.full((3, 1), 30), **{name: cache}).logits
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert not torch.allclose(logits[0], other)


def test_logits_are_the_callers_to_keep(llama: PreTrainedModel) -> None:
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    with fast(llama)._installed(), torch.no_grad():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        llama(prompt(2, 9)["input_ids"], **{name: cache})
        kept = [llama(token, **{name: cache}) for _ in range(4)]
        copies = [out.logits.clone() for out in kept]
        for _ in range(3):
            llama(token, **{name: cache})
    assert all(torch.equal(out.logits, copy) for out, copy in zip(kept, copies, strict=True))
    assert fast_decode.MAX_WASTED > 0
