"""fast_decode without a GPU: a stand-in runs the step again where a graph would be replayed."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hf.tiny_models import CONFIGS, GROUPED, PECULIAR, make, tiny
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    DynamicCache,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import pageforge
from pageforge import (
    OutOfPages,
    PagedKVCache,
    PageForgeError,
    PagePool,
    ShapeError,
    UseAfterFree,
)
from pageforge.batch import SequenceBatch
from pageforge.graphs import GraphMemory
from pageforge.hf import decode_step, fast_decode
from pageforge.hf.decode_step import agree
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
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the CPU's number
    monkeypatch.setattr(sys.modules[FastDecode.__module__], "stream_handle", lambda _: 7)
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


def test_a_step_begins_before_all_is_looked_at(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs while the host sees to it that it was the right one."""
    begun = []
    begin = decode_step.DecodeStep.begin

    def spy(self: decode_step.DecodeStep, *args: Any) -> bool:
        begun.append(begin(self, *args))
        return begun[-1]

    monkeypatch.setattr(decode_step.DecodeStep, "begin", spy)
    inputs = prompt(3, 13, padded=True)
    want = model.generate(**inputs, **GREEDY)
    decode = fast(model)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        assert begun == [True] * 18
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert begun == [True] * 18 + [True] * 18, "the first step of another cache is prepared"


def test_a_step_that_was_begun_in_vain(llama: PreTrainedModel) -> None:
    """The call is another than it seemed: what ran already leaves no trace."""
    tokens = torch.randint(2, 100, (12, 2, 1), generator=torch.Generator().manual_seed(9))
    ids = prompt(2, 9)["input_ids"]
    name = cache_argument(llama)

    def run(decode: FastDecode | None) -> list[Tensor]:
        cache, logits = PagedKVCache(llama.config), []
        llama(ids, **{name: cache})
        for number, token in enumerate(tokens):
            more: dict[str, Any] = {}
            length = cache.get_seq_length() + 1
            if number == 3:
                more["attention_mask"] = ids.new_ones(2, length)
                more["attention_mask"][1, 4] = 0  # a hole
            if number == 5:
                more["logits_to_keep"] = 1  # another variant
            if number == 7:
                more["position_ids"] = torch.full((2, 1), length + 3)
            if number == 9:
                cache.crop(-3)
            if number == 10:
                llama.train()
            logits.append(llama(token, **{name: cache}, **more).logits)
            llama.eval()
        return logits

    with torch.no_grad():
        want = run(None)
        decode = fast(llama)
        with decode._installed():
            got = run(decode)
    assert decode.num_replays >= 7
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_an_interrupt_that_comes_with_a_launch(
    at: int, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sees Ctrl-C when the call returns; the graph has counted the token by then."""
    replay, launches = StandIn.replay, []

    def interrupted(self: StandIn) -> None:
        replay(self)
        launches.append(True)
        if len(launches) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "replay", interrupted)
    with PagePool.for_model(llama, page_size=8, max_pages=40) as pool:
        pair = Pair(llama, pool)
        decode = fast(llama)
        with decode._installed(), torch.no_grad():
            pair.feed(prompt(2, 5)["input_ids"])
            for column in prompt(2, 14)["input_ids"].split(1, dim=1):
                try:
                    pair.feed(column)
                except KeyboardInterrupt:
                    pair.feed(column)
        assert len(launches) > at


def test_compiled(llama: PreTrainedModel) -> None:
    inputs = prompt(3, 13, padded=True)
    want = llama.generate(**inputs, **GREEDY)
    decode = fast(llama, compile=True)
    with decode._installed():
        assert torch.equal(llama.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 18
    assert not decode.eager_steps


class Pair:
    """A paged cache in a llama (or another) under fast_decode, a DynamicCache in its twin."""

    def __init__(self, model: PreTrainedModel, pool: PagePool, family: str = "llama"):
        self.model = model
        self.twin = tiny(family)
        self.name = cache_argument(model)
        self.paged = PagedKVCache(pool)
        self.dense = DynamicCache(config=model.config)

    def feed(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Both take `tokens`; their logits agree."""
        got = self.model(tokens, **inputs, **{self.name: self.paged}).logits
        want = self.twin(tokens, **inputs, **{self.name: self.dense}).logits
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= 1e-3, (got - want).abs().max()
        return got

    def feed_steps(self, tokens: Tensor, **inputs: Any) -> None:
        for column in tokens.split(1, dim=1):
            self.feed(column, **inputs)

    def crop(self, count: int) -> None:
        self.paged.crop(-count)
        self.dense.crop(-count)

    def select(self, rows: list[int]) -> None:
        self.paged.batch_select_indices(torch.tensor(rows))
        self.dense.batch_select_indices(torch.tensor(rows))


@torch.no_grad()
def test_two_caches_in_turns_with_crops_forks_and_chunks(llama: PreTrainedModel) -> None:
    pool = PagePool.for_model(llama, max_pages=200)
    tokens = prompt(2, 60)["input_ids"]
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
    decode = fast(llama)
    with decode._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        mask = inputs["attention_mask"]
        llama(**inputs, **{name: cache})
        logits = []

        def feed(mask: Tensor) -> Tensor:
            positions = mask.sum(-1, keepdim=True) - 1
            arguments = {"attention_mask": mask, "position_ids": positions, name: cache}
            return llama(step[:1].repeat(2, 1), **arguments).logits

        for _ in range(3):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            logits.append(feed(mask))
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = feed(mask[[1, 0]])
    assert (swapped - logits[-1][[1, 0]]).abs().max() < 1e-4
    assert decode.num_replays == 3


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


def test_a_forward_on_a_module_means_eager(llama: PreTrainedModel) -> None:
    inputs, mlp = prompt(2, 9), llama.model.layers[1].mlp
    plain = llama.generate(**inputs, **GREEDY)
    forward, strength = mlp.forward, {"now": 3.0}
    mlp.forward = lambda states: forward(states) + strength["now"]
    want = llama.generate(**inputs, **GREEDY)
    decode = fast(llama)
    with decode._installed():
        assert torch.equal(llama.generate(**inputs, **GREEDY), want)
        strength["now"] = 0.0
        assert torch.equal(llama.generate(**inputs, **GREEDY), plain)
        assert decode.eager_steps == {"model.layers.1.mlp has a forward of its own": 38}
        del mlp.forward
        assert torch.equal(llama.generate(**inputs, **GREEDY), plain)
    assert decode.num_replays == 18
    assert not torch.equal(want, plain)


def test_a_forward_on_the_model_itself_does_not_matter(llama: PreTrainedModel) -> None:
    forward, calls = llama.forward, []

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    llama.forward = counted
    decode = fast(llama)
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


def test_captures_of_different_weights_are_not_mixed(llama: PreTrainedModel) -> None:
    """The change shows when another number of rows is to be captured: older captures go first."""
    weight, decode = llama.model.layers[0].mlp.up_proj.weight, fast(llama)
    with decode._installed():
        llama.generate(**prompt(2, 9), **GREEDY)
        weight.data = weight.data.flip(0).clone()
        three = llama.generate(**prompt(3, 9), **GREEDY)
        assert decode.num_captures == 2  # none was made to be dropped at once
        [steps] = decode._steps.values()
        assert len(steps) == 1
        two = llama.generate(**prompt(2, 9), **GREEDY)
    assert torch.equal(llama.generate(**prompt(3, 9), **GREEDY), three)
    assert torch.equal(llama.generate(**prompt(2, 9), **GREEDY), two)
    assert list(decode.eager_steps.values()) == [1]


def test_another_precision_is_captured_anew(llama: PreTrainedModel) -> None:
    decode = fast(llama)
    with decode._installed():
        llama.generate(**prompt(2, 9), **GREEDY)
        torch.set_float32_matmul_precision("high")
        try:
            llama.generate(**prompt(2, 9), **GREEDY)
        finally:
            torch.backends.cuda.matmul.fp32_precision = "none"
    assert decode.num_captures == 2
    assert "precision" in " ".join(decode.eager_steps)


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


@torch.no_grad()
def test_positions_for_all_rows_are_replayed(llama: PreTrainedModel) -> None:
    ids, decode = prompt(3, 9)["input_ids"], fast(llama)
    with decode._installed():
        pair = Pair(llama, PagePool.for_model(llama, max_pages=64))
        pair.feed(ids)
        for turn in range(4):
            pair.feed(ids[:, :1], position_ids=torch.tensor([[9 + turn]]))
    assert decode.num_replays == 3
    assert not decode.eager_steps


@torch.no_grad()
def test_odd_positions_are_served_eagerly() -> None:
    model, ids = make(CONFIGS["gpt2"](), "eager"), prompt(1, 9)["input_ids"]
    decode = fast(model)
    with decode._installed():
        pair = Pair(model, PagePool.for_model(model, max_pages=64), "gpt2")
        pair.feed(ids)
        for positions in (torch.tensor([9]), torch.tensor([[10]], dtype=torch.int32)):
            pair.feed(ids[:, :1], position_ids=positions)
        for wrong in (torch.tensor([[11.0]]), [[11]]):
            with pytest.raises((RuntimeError, TypeError)):  # as ever
                model(ids[:, :1], position_ids=wrong, **{pair.name: pair.paged})
        assert decode.num_captures == 0
    [(reason, count)] = decode.eager_steps.items()
    assert reason.startswith("position_ids are not")
    assert count == 4


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


# --- families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["opt", "gpt_neox", "mistral", "mixtral", "gemma3", "gpt_oss", "gemma3n", "gemma4"]
)
def test_other_families(family: str) -> None:
    model, inputs = make((CONFIGS | PECULIAR)[family](), "eager"), prompt(3, 13, padded=True)
    want = model.generate(**inputs, **GREEDY)
    decode = fast(model)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert decode.num_replays == 18
    assert not decode.eager_steps


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "computes with K/V by itself"),
        ("llama4", "neither causal nor"),
        ("qwen3_next", "another state"),
        ("bloom", "pageforge attention"),
        ("falcon", "pageforge attention"),
    ],
)
def test_families_that_are_not_captured(family: str, reason: str) -> None:
    model, inputs = make((CONFIGS | PECULIAR)[family](), "eager"), prompt(2, 13)
    settings = GREEDY | {"max_new_tokens": 6, "min_new_tokens": 6}
    want = model.generate(**inputs, **settings)
    decode = fast(model)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **settings), want)
    assert decode.num_replays == 0
    [only] = decode.eager_steps
    assert reason in only
    assert decode.eager_steps[only] == 5


def test_a_model_without_pages_generates_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = make(MambaConfig(vocab_size=101, eos_token_id=None, pad_token_id=0, **sizes), "eager")
    inputs = prompt(2, 9)
    settings = GREEDY | {"max_new_tokens": 4, "min_new_tokens": 4}
    want = model.generate(**inputs, **settings)
    with fast(model)._installed():
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **settings), want)


@torch.no_grad()
@pytest.mark.parametrize("config", [RobertaConfig, XLMRobertaConfig])
def test_positions_that_count_from_the_padding_tokens_on(config: type) -> None:
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": None}
    settings = sizes | tokens | {"num_attention_heads": 4, "max_position_embeddings": 64}
    model, twin = (make(config(**settings, is_decoder=True), "eager") for _ in range(2))
    ids, name, decode = prompt(2, 9)["input_ids"], cache_argument(model), fast(model)
    want = twin.generate(**prompt(2, 9, padded=True), **GREEDY)
    with decode._installed():
        paged = PagedKVCache(PagePool.for_model(model, max_pages=64))
        dense = DynamicCache(config=twin.config)
        for token in (ids, *ids.split(1, dim=1)):
            got = model(token, **{name: paged}).logits
            assert (got - twin(token, **{name: dense}).logits).abs().max() < 1e-4
        assert decode.num_captures == 0
        assert "works out of the tokens" in " ".join(decode.eager_steps)
        assert torch.equal(model.generate(**prompt(2, 9, padded=True), **GREEDY), want)
    assert decode.num_replays == 18  # generate says where tokens stand


def test_rotary_embeddings_that_move() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make(LlamaConfig(**GROUPED, rope_parameters=rope), "eager")
    decode = fast(model)
    with decode._installed():
        model.generate(**prompt(1, 5), **GREEDY)
    assert "dynamic" in " ".join(decode.eager_steps)


def test_a_model_without_a_head() -> None:
    model = make(CONFIGS["llama"](), "eager").model
    twin, name = tiny("llama").model, cache_argument(model)
    ids = prompt(3, 9)["input_ids"]
    decode = fast(model)
    with decode._installed(), torch.no_grad():
        paged, dense = PagedKVCache(PagePool.for_model(model, max_pages=64)), DynamicCache()
        for tokens in (ids, *ids.split(1, dim=1)):
            got, want = model(tokens, **{name: paged}), twin(tokens, **{name: dense})
            assert (got.last_hidden_state - want.last_hidden_state).abs().max() < 1e-4
        assert got.past_key_values is paged
    assert decode.num_replays == 8


@torch.no_grad()
def test_a_classifier_of_sequences() -> None:
    config = LlamaConfig(**GROUPED, num_labels=3)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    ids, name = prompt(3, 9)["input_ids"], cache_argument(model)
    dense = DynamicCache(config=config)
    want = [model(tokens, **{name: dense}).logits for tokens in (ids, *ids.split(1, dim=1))]
    decode = fast(model)
    with decode._installed():
        paged = PagedKVCache(PagePool.for_model(model, max_pages=64))
        got = [model(tokens, **{name: paged}).logits for tokens in (ids, *ids.split(1, dim=1))]
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(got, want, strict=True))
    assert decode.num_replays == 8


def test_a_config_inside_a_config_is_left_as_found() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=GROUPED | {"head_dim": 8, "sliding_window": 8},
        vision_config=vision,
        mm_tokens_per_image=4,
    )
    implementations = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=implementations)
    model, inputs = model.eval(), prompt(2, 9)
    want = model.generate(**inputs, **GREEDY)
    decode = fast(model)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
        assert not decode.eager_steps
        cache = PagedKVCache(PagePool.for_model(model, max_pages=64))
        with torch.no_grad():
            for tokens in (inputs["input_ids"], inputs["input_ids"][:, :1]):
                model(tokens, **{cache_argument(model): cache})
    assert "no position_ids" in " ".join(decode.eager_steps)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


# --- rows, lengths and padding --------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 31])
def test_batches_that_do_not_fill_their_bucket(llama: PreTrainedModel, rows: int) -> None:
    inputs = prompt(rows, 7, padded=True)
    settings = GREEDY | {"max_new_tokens": 6, "min_new_tokens": 6}
    want = llama.generate(**inputs, **settings)
    with fast(llama)._installed():
        assert torch.equal(llama.generate(**inputs, **settings), want)


@torch.no_grad()
def test_a_row_that_is_gone_writes_nothing(llama: PreTrainedModel) -> None:
    pool = PagePool.for_model(llama, page_size=64, max_pages=10)
    ids = prompt(10, 9)["input_ids"]
    decode = fast(llama)
    with decode._installed():
        pair = Pair(llama, pool)
        pair.feed(ids)
        pair.feed_steps(ids[:, :3])
        pair.select(list(range(9)))  # 9 and 10 rows are served by the same capture
        other = Pair(llama, pool)  # takes the page that the last row had
        other.feed(ids[:1, :5].repeat(1, 8))
        pair.feed_steps(ids[:9])
        other.feed_steps(ids[:1])
        assert decode.num_captures == 2
        pair.select([*range(9), 8][1:])
        pair.feed_steps(ids[:9, :2])


@torch.no_grad()
def test_a_row_that_has_come(llama: PreTrainedModel) -> None:
    ids = prompt(9, 9)["input_ids"]
    rows = [*range(9), 8]
    decode = fast(llama)
    with decode._installed():
        pair = Pair(llama, PagePool.for_model(llama, max_pages=64))
        pair.feed(ids)
        pair.feed_steps(ids[:, :3])
        pair.select(rows)
        pair.feed_steps(ids[rows])
    assert decode.num_captures == 1


@torch.no_grad()
def test_another_token_in_the_place_of_one_that_was_cropped(llama: PreTrainedModel) -> None:
    ids = prompt(2, 30)["input_ids"]
    with fast(llama)._installed():
        pair = Pair(llama, PagePool.for_model(llama, page_size=8, max_pages=64))
        pair.feed(ids[:, :7])
        for start in range(0, 20, 2):
            pair.feed_steps(ids[:, start : start + 2])
            pair.crop(1)  # over page boundaries, too
            pair.feed(ids[:, start + 2 : start + 3])
        pair.crop(2)
        pair.feed(ids[:, :2])  # not a replay: the length is what the step knew before
        pair.feed_steps(ids[:, 3:6])
        pair.paged = copy.deepcopy(pair.paged)
        pair.feed_steps(ids[:, 3:9])
        pair.crop(pair.paged.get_seq_length())
        pair.feed(ids[:, :7])
        pair.feed_steps(ids[:, 7:12])
        pair.paged.reset()
        pair.dense.reset()
        pair.dense = DynamicCache(config=llama.config)
        pair.feed(ids[:, :9])
        pair.feed_steps(ids[:, 7:12])
    pair.feed_steps(ids[:, 3:6])  # after the context
    assert [table.length for table in pair.paged.page_tables] == [17, 17]


@torch.no_grad()
def test_pages_that_left_the_window() -> None:
    model, ids = make(CONFIGS["gemma2"](), "eager"), prompt(3, 90)["input_ids"]
    pool = PagePool.for_model(model, page_size=8, max_pages=64)
    decode = fast(model)
    with decode._installed():
        pair = Pair(model, pool, "gemma2")
        pair.feed(ids[:, :9])
        pair.feed_steps(ids)
    assert pair.paged.page_tables[0].first_page(0) != pair.paged.page_tables[0].first_page(1)
    assert decode.num_replays == 89


def test_to_the_last_position_and_beyond() -> None:
    model = make(LlamaConfig(**GROUPED | {"max_position_embeddings": 32}), "eager")
    inputs = prompt(2, 10)
    decode = fast(model)
    for count, captures in ((22, 1), (100, 3)):  # up to 32 tokens; then 64, then 128
        settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
        want = model.generate(**inputs, **settings)
        with decode._installed():
            assert torch.equal(model.generate(**inputs, **settings), want)
        assert decode.num_captures <= 1 + captures


@torch.no_grad()
def test_a_mask_at_some_steps_only(llama: PreTrainedModel) -> None:
    ids, name = prompt(2, 12)["input_ids"], cache_argument(llama)
    decode = fast(llama)
    with decode._installed():
        pair = Pair(llama, PagePool.for_model(llama, max_pages=64))
        pair.feed(ids)
        for turn in range(8):
            mask = torch.ones(2, 13 + turn, dtype=torch.long)
            pair.feed(ids[:, :1], **({"attention_mask": mask} if turn % 3 else {}))
        assert decode.num_replays == 7
        # Padding that is stored: hidden at some steps, seen at others.
        cache = PagedKVCache(pair.paged.pool)
        llama.set_attn_implementation("sdpa")
        llama(ids, **{name: cache})
        llama.set_attn_implementation("pageforge")
        pair.paged, pair.dense = cache, DynamicCache(config=llama.config)
        pair.twin(ids, **{name: pair.dense})
        for turn in range(8):
            mask = torch.ones(2, 13 + turn, dtype=torch.long)
            mask[0, :4] = 0
            positions = torch.full((2, 1), 12 + turn)
            shown = {"attention_mask": mask} if turn in (2, 3, 4, 6) else {}
            pair.feed(ids[:, :1], position_ids=positions, **shown)


@torch.no_grad()
def test_positions_that_a_model_takes_from_the_mask() -> None:
    model, token = make(CONFIGS["opt"](), "eager"), prompt(2, 1)["input_ids"]
    pool = PagePool.for_model(model, max_pages=64)
    decode = fast(model)
    with decode._installed():
        for padded in (False, True):
            pair, inputs = Pair(model, pool, "opt"), prompt(2, 12, padded=padded)
            mask = inputs["attention_mask"]
            pair.feed(inputs["input_ids"], attention_mask=mask)
            for _ in range(4):
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                pair.feed(token, attention_mask=mask)
    assert decode.num_replays == 3
    assert decode.eager_steps == {decode_step.UNPLACED: 4}


@torch.no_grad()
def test_after_a_refused_mask_the_cache_is_whole(llama: PreTrainedModel) -> None:
    inputs, name = prompt(2, 40, padded=True), cache_argument(llama)
    inputs["attention_mask"][0, :20] = 0
    pool, token = PagePool.for_model(llama, max_pages=64), prompt(2, 1)["input_ids"]
    with fast(llama)._installed():
        cache = PagedKVCache(pool)
        llama(**inputs, **{name: cache})
        used = pool.stats().pages_used
        with pytest.raises(ShapeError, match="attention_mask"):
            llama(token, **{name: cache})
        assert [table.length for table in cache.page_tables] == [40, 40]
        assert pool.stats().pages_used == used
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
        llama(token.repeat(1, 3), attention_mask=mask, **{name: cache})
        assert cache.get_seq_length() == 43


# --- pages ----------------------------------------------------------------------------------


def test_exactly_enough_pages(llama: PreTrainedModel) -> None:
    pool, name = PagePool.for_model(llama, page_size=8, max_pages=8), cache_argument(llama)
    settings = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    want = llama.generate(**prompt(2, 13), **settings)
    with fast(llama)._installed():
        for _ in range(3):
            cache = PagedKVCache(pool)
            got = llama.generate(**prompt(2, 13), **settings, **{name: cache})
            assert torch.equal(got, want)
            assert cache.get_seq_length() == 32  # the last token is not fed
            assert pool.stats().pages_used == 8
            cache.free()
            assert pool.stats().pages_used == 0
    pool.check_invariants([])


def test_no_page_stays_ahead(llama: PreTrainedModel, tmp_path: Path) -> None:
    pool, name = PagePool.for_model(llama, page_size=8, max_pages=64), cache_argument(llama)
    ids = prompt(2, 14)["input_ids"]

    def ahead() -> PagedKVCache:
        cache = PagedKVCache(pool)
        for tokens in (ids, ids[:, :1], ids[:, :1]):
            llama(tokens, **{name: cache})
        assert pool.stats().pages_used == 6
        return cache

    with fast(llama)._installed():
        generated = PagedKVCache(pool)
        llama.generate(ids, do_sample=False, max_new_tokens=3, **{name: generated})
        assert pool.stats().pages_used == 4  # after generate as well
        generated.free()
        with torch.no_grad():
            for look in (
                lambda cache: cache.page_tables,
                lambda cache: cache.save(tmp_path / "pages.safetensors"),
                lambda cache: cache.fork()[0].free(),
                lambda cache: cache.crop(0),
                lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
                lambda cache: cache.batch_select_indices(torch.tensor([0, 1])),
            ):
                cache = ahead()
                look(cache)
                assert pool.stats().pages_used == 4
                assert cache.to_dynamic().get_seq_length() == 16
                cache.free()
                assert pool.stats().pages_used == 0
            cache = ahead()
    assert pool.stats().pages_used == 4
    cache.free()
    pool.check_invariants([])


@torch.no_grad()
@pytest.mark.parametrize("tokens", range(1, 8))
def test_no_page_stays_ahead_wherever_a_page_ends(
    tokens: int, llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Pages are claimed at all tokens of a page: as many as the rows will need, and no more."""
    pool, name = PagePool.for_model(llama, page_size=8, max_pages=64), cache_argument(llama)
    ids = prompt(5, 9)["input_ids"]

    def ahead() -> PagedKVCache:
        cache, others = PagedKVCache(pool), pool.stats().pages_used
        for columns in (ids, *ids[:, :tokens].split(1, dim=1)):
            llama(columns, **{name: cache})
        used = pool.stats().pages_used - others
        assert used == 5 * 2 + 5 * min(tokens + 1, 7) // 7
        return cache

    def eager(cache: PagedKVCache) -> None:
        llama(ids[:, :3], **{name: cache})
        cache.crop(-3)

    with fast(llama)._installed():
        for look in (
            lambda cache: cache.page_tables,
            lambda cache: cache.save(tmp_path / "pages.safetensors"),
            lambda cache: cache.fork()[0].free(),
            lambda cache: cache.crop(0),
            eager,
        ):
            cache = ahead()
            look(cache)
            assert pool.stats().pages_used == 5 * 2
            pool.check_invariants(cache.page_tables)
            cache.free()
            assert pool.stats().pages_used == 0
        cache = ahead()
        cache.reorder_cache(torch.tensor([4, 3, 2, 1, 0]))  # as beams do at each token
        llama(ids[:, :1], **{name: cache})
        left = ahead()
        llama(ids[:, :3], **{name: left})  # its last step is an eager one
    pool.check_invariants([*cache.page_tables, *left.page_tables])
    del cache, left
    gc.collect()
    assert pool.stats().pages_used == 0


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_step_begins_early_by_either_name_of_its_cache(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes `past_key_values` from all models, also where that is not its name."""
    begun = []
    begin = decode_step.DecodeStep.begin
    monkeypatch.setattr(
        decode_step.DecodeStep, "begin", lambda *args: begun.append(begin(*args)) or begun[-1]
    )
    token, decode = prompt(2, 1)["input_ids"], fast(llama)
    with decode._installed():
        for name in ("past_key_values", cache_argument(llama)):
            cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
            llama(prompt(2, 9)["input_ids"], **{name: cache})
            for _ in range(5):
                llama(token, **{name: cache})
            assert begun == [True] * 4
            begun.clear()


@torch.no_grad()
def test_page_tables_after_an_append_that_failed_half_way(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, decode = prompt(2, 20)["input_ids"], fast(llama)

    def fail(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("planted")

    with decode._installed():
        pair = Pair(llama, PagePool.for_model(llama, page_size=8, max_pages=64))
        pair.feed(ids[:, :5])
        pair.feed_steps(ids[:, :2])
        with monkeypatch.context() as patched, pytest.raises(torch.cuda.OutOfMemoryError):
            patched.setattr(SequenceBatch, "_update_mirrors", fail)
            pair.feed(ids[:, 2:3])  # fills the page, and claims the next one
        pair.twin(ids[:, 2:3], **{pair.name: pair.dense})
        pair.feed_steps(ids[:, 3:])
    assert decode.num_replays == 19


@torch.no_grad()
def test_a_closed_pool(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    with fast(llama)._installed():
        pool = PagePool.for_model(llama, max_pages=64)
        caches = [PagedKVCache(pool), PagedKVCache(pool)]
        for cache in caches:
            for tokens in (prompt(2, 9)["input_ids"], token, token):
                llama(tokens, **{name: cache})
        pool.close()
        monkeypatch.setattr(StandIn, "replay", lambda step: pytest.fail("touches closed memory"))
        with pytest.raises(UseAfterFree, match="closed"):
            llama(token, **{name: caches[0]})
        caches[0].free()  # the other is still there when the context ends


@torch.no_grad()
def test_steps_go_with_their_pool(llama: PreTrainedModel) -> None:
    name, pools = cache_argument(llama), []
    decode = fast(llama)
    with decode._installed():
        for _ in range(3):
            cache = PagedKVCache(llama.config)
            for tokens in (prompt(2, 9)["input_ids"], *prompt(2, 3)["input_ids"].split(1, 1)):
                llama(tokens, **{name: cache})
            pools.append(weakref.ref(cache.pool))
            del cache
        gc.collect()
        assert not any(pool() for pool in pools)
        assert not decode._steps
        llama.generate(**prompt(2, 9), **GREEDY)
        pools.append(weakref.ref(decode._pool))
    gc.collect()
    assert not pools[-1]()


# --- calls ----------------------------------------------------------------------------------


def test_modes_of_autograd(llama: PreTrainedModel) -> None:
    token, inputs = prompt(2, 1)["input_ids"], prompt(2, 9, padded=True)
    want = llama.generate(**inputs, **GREEDY)
    name, pool = cache_argument(llama), PagePool.for_model(llama, max_pages=64)
    decode = fast(llama)
    with decode._installed():
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(llama.generate(**inputs, **GREEDY), want)
                cache = PagedKVCache(pool)
                mask = torch.ones(2, 9, dtype=torch.long)
                llama(inputs["input_ids"], attention_mask=mask, **{name: cache})
                for _ in range(3):
                    mask = torch.cat([mask, mask[:, :1]], 1)
                    out = llama(token, attention_mask=mask, **{name: cache}).logits
                assert out.is_inference() == (mode is torch.inference_mode)
        assert decode.num_captures == 2  # with and without positions
        for parameter in llama.parameters():
            parameter.requires_grad_(False)
        llama(token, **{name: cache})
        assert decode.eager_steps == {"gradients are enabled": 1}
        with torch.no_grad():
            llama.train()
            llama(token, **{name: cache})
    assert decode.eager_steps["the model is in training mode"] == 1


@torch.no_grad()
def test_autocast_is_another_model(llama: PreTrainedModel) -> None:
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    pool = PagePool.for_model(llama, max_pages=64, dtype=torch.float32)
    decode = fast(llama)
    with decode._installed():
        cache = PagedKVCache(pool)
        for tokens in (prompt(2, 9)["input_ids"], token, token):
            llama(tokens, **{name: cache})
        with torch.autocast("cpu", torch.bfloat16):
            assert llama(token, **{name: cache}).logits.dtype == torch.bfloat16
    assert decode.num_replays == 1
    assert decode.eager_steps == {"autocast is enabled": 1}


@torch.no_grad()
def test_arguments_of_forwards(llama: PreTrainedModel) -> None:
    name, token = cache_argument(llama), prompt(2, 1)["input_ids"]
    assert list(inspect.signature(llama.forward).parameters)[3] == name
    decode = fast(llama)
    with decode._installed():
        pair = Pair(llama, PagePool.for_model(llama, max_pages=64))
        pair.feed(prompt(2, 9)["input_ids"])
        pair.feed_steps(token.repeat(1, 3))
        assert decode.num_replays == 2
        mask = torch.ones(2, 13, dtype=torch.long)
        out = llama(token, mask, None, pair.paged)
        assert out.past_key_values is pair.paged
        assert decode.num_replays == 3  # by position or by name
        assert llama(token, **{name: pair.paged}, logits_to_keep=1).logits.shape == (2, 1, 101)
        assert decode.num_captures == 2
        for extra in ((torch.ones(1),), ([1],), [1], torch.ones(1)):
            llama(token, **{name: pair.paged}, extra=extra)
        assert decode.num_captures == 2
        assert decode.eager_steps == {"extra is passed": 4}
        with pytest.raises(ShapeError, match="batch size"):
            llama(token[:1], **{name: pair.paged})


@torch.no_grad()
def test_a_forward_of_unknown_arguments(llama: PreTrainedModel) -> None:
    forward, name = llama.forward, cache_argument(llama)

    def own(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    llama.forward = own
    decode = fast(llama)
    with decode._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        llama(prompt(2, 9)["input_ids"], **{name: cache})
        llama(input_ids=prompt(2, 1)["input_ids"], **{name: cache})
    assert decode.eager_steps == {"the model takes no position_ids": 1}


def test_caches_that_generate_is_to_make(llama: PreTrainedModel) -> None:
    ids = prompt(2, 9)["input_ids"]
    config = copy.deepcopy(llama.generation_config)
    config.update(do_sample=False, max_new_tokens=4, use_cache=False)
    decode = fast(llama)
    with decode._installed():
        llama.generate(ids, config)
        llama.generate(ids, generation_config=config)
        llama.generate(ids, **GREEDY, use_cache=False)
        assert decode._pool is None
        llama.generate(ids, **GREEDY, cache_implementation="dynamic")
        assert decode._pool is None
        assert decode.num_replays == 0
        out = llama.generate(ids, **GREEDY, return_dict_in_generate=True)
        assert decode.num_replays == 18
    assert out.past_key_values.get_seq_length() == 28


# --- captures -------------------------------------------------------------------------------


def test_a_capture_that_fails_is_not_tried_again(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail(run: Callable[[], Any], memory: object) -> None:
        tries.append(run)
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(decode_step, "CapturedStep", fail)
    monkeypatch.setattr(fast_decode.logger, "propagate", True)
    decode = fast(llama)
    with decode._installed():
        llama.generate(**prompt(2, 9), **GREEDY)
    assert len(tries) == 1
    assert decode.eager_steps == {"a step cannot be captured: no graphs today": 19}
    assert sum("no graphs today" in record.getMessage() for record in caplog.records) == 1


class Full(StandIn):
    """Finds no memory, a number of times."""

    tries = 0
    failures = 1

    def __init__(self, run: Callable[[], Any], memory: object):
        type(self).tries += 1
        if self.tries <= self.failures:
            raise torch.cuda.OutOfMemoryError("planted")
        super().__init__(run, memory)


def test_a_capture_that_lacks_memory_is_tried_again_later(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("OnceFull", (Full,), {})
    monkeypatch.setattr(decode_step, "CapturedStep", full)
    count = fast_decode.WORTHWHILE + 10
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
    want = llama.generate(**prompt(2, 9), **settings)
    decode = fast(llama)
    with decode._installed():
        assert torch.equal(llama.generate(**prompt(2, 9), **settings), want)
    assert full.tries == 2
    assert decode.num_captures == 1
    assert decode.num_replays == 7
    assert decode.eager_steps == {fast_decode.NO_MEMORY: fast_decode.WORTHWHILE + 1}


def test_captures_that_always_lack_memory(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("AlwaysFull", (Full,), {"failures": 100})
    monkeypatch.setattr(decode_step, "CapturedStep", full)
    monkeypatch.setattr(fast_decode, "WORTHWHILE", 2)
    decode = fast(llama)
    with decode._installed():
        for _ in range(2):
            llama.generate(**prompt(1, 5), **GREEDY)
    assert full.tries == fast_decode.MAX_WASTED
    # Between two tries come two other steps.
    assert decode.eager_steps[fast_decode.NO_MEMORY] == 3 * fast_decode.MAX_WASTED - 2
    assert decode.eager_steps["too many captures were in vain"] == 40 - 3 * fast_decode.MAX_WASTED


def test_what_steps_read_belongs_to_every_stream_that_they_run_on(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[int, int]] = []
    recorded: list[int] = []

    def stream(number: int) -> SimpleNamespace:
        def wait(other: SimpleNamespace) -> None:
            waits.append((number, other.cuda_stream))

        return SimpleNamespace(cuda_stream=number, wait_stream=wait)

    streams = {number: stream(number) for number in (7, 8)}
    now = [7]
    module = sys.modules[FastDecode.__module__]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams[now[0]])
    monkeypatch.setattr(module, "stream_handle", lambda _: now[0])
    monkeypatch.setattr(
        decode_step.StepInputs,
        "record_stream",
        lambda _, stream: recorded.append(stream.cuda_stream),
    )
    cache, name = PagedKVCache(llama.config), cache_argument(llama)
    token = torch.ones(2, 1, dtype=torch.long)
    decode = fast(llama)
    with torch.no_grad(), decode._installed():
        llama(prompt(2, 9)["input_ids"], **{name: cache})
        for number in (7, 7, 7, 8, 8, 7):
            now[0] = number
            llama(token, **{name: cache})
    assert decode.num_replays == 5
    assert (waits, recorded) == ([(8, 7), (7, 8)], [8, 7])


def test_captures_share_a_stream_and_their_memory(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = []

    class Noted(StandIn):
        def __init__(self, run: Callable[[], Any], memory: GraphMemory):
            memories.append(memory)
            super().__init__(run, memory)

    monkeypatch.setattr(decode_step, "CapturedStep", Noted)
    decode = fast(llama)
    with decode._installed():
        for rows in (1, 2):
            llama.generate(**prompt(rows, 5), **GREEDY)
        llama.model.layers[0].mlp.turn = 1
        llama.generate(**prompt(1, 5), **GREEDY)
    assert [memory.pool is memories[0].pool for memory in memories] == [True, True, False]
    assert all(memory.stream is memories[0].stream for memory in memories)
    assert memories[0].stream.device == llama.device


@torch.no_grad()
@pytest.mark.parametrize("compile", [False, True])
def test_a_layer_that_is_left_out(
    llama: PreTrainedModel, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would lack the token, and no output shows that."""
    layer = type(llama.model.layers[1])
    forward = layer.forward

    def skipping(module: Any, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if states.shape[1] == 1 and module.self_attn.layer_idx == 1:
            return states
        return forward(module, states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", skipping)
    name, decode = cache_argument(llama), fast(llama, compile=compile)
    with decode._installed():
        cache = PagedKVCache(PagePool.for_model(llama, max_pages=64))
        for tokens in (prompt(2, 9)["input_ids"], prompt(2, 1)["input_ids"]):
            llama(tokens, **{name: cache})
    assert cache._state.lengths == {0: 10, 1: 9}
    [reason] = decode.eager_steps
    assert reason.endswith("layers [1] did not write their K/V in the step")


def test_a_model_that_changes_too_often(llama: PreTrainedModel) -> None:
    mlp, decode = llama.model.layers[0].mlp, fast(llama)
    settings = GREEDY | {"max_new_tokens": 4, "min_new_tokens": 4}
    with decode._installed():
        for turn in range(fast_decode.MAX_WASTED + 3):
            mlp.turn = turn % 2
            llama.generate(**prompt(1, 5), **settings)
    assert decode.num_captures == fast_decode.MAX_WASTED
    assert "too many captures were in vain" in decode.eager_steps


def test_changes_after_enough_replays_are_not_held_against_a_model(llama: PreTrainedModel) -> None:
    mlp, decode = llama.model.layers[0].mlp, fast(llama)
    count = fast_decode.WORTHWHILE + 3
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
    mlp.turn = 0
    with decode._installed():
        for turn in range(fast_decode.MAX_WASTED + 2):
            mlp.turn = turn
            llama.generate(**prompt(1, 5), **settings)
    assert decode.num_captures == fast_decode.MAX_WASTED + 2


def test_compiling_needs_layers_with_k_and_v_of_their_own() -> None:
    model, inputs = make(PECULIAR["gemma4"](), "eager"), prompt(2, 9)
    want = model.generate(**inputs, **GREEDY)
    decode = fast(model, compile=True)
    with decode._installed():
        assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert "its own K/V" in " ".join(decode.eager_steps)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_outputs_that_agree(lowest: float) -> None:
    def output(logits: Tensor) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=logits)

    logits = torch.randn(40, 1, 50)
    logits[:, :, :5] = lowest  # words that the model masks out
    assert agree(output(logits.clone()), output(logits), 2)
    near = logits.clone()
    near[:, :, 5:] *= 1 + 1e-5
    assert agree(output(near), output(logits), 2)
    for wrong in (0.0, torch.nan, torch.inf):
        other = logits.clone()
        other[17, :, 5:] = wrong  # one row of many
        assert not agree(output(other), output(logits), 2)
    seen = logits.clone()
    seen[17, :, 3] = 1.0
    assert not agree(output(seen), output(logits), 2)


def output_of(logits: Tensor) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits)


def test_roundings_of_many_layers_add_up() -> None:
    torch.manual_seed(0)
    logits, noise = torch.randn(2, 3, 1, 4000)

    def agrees(share: float, dtype: torch.dtype, num_layers: int) -> bool:
        other = (logits + share * noise).to(dtype)
        return agree(output_of(other), output_of(logits.to(dtype)), num_layers)

    assert agrees(0.08, torch.bfloat16, 32) and not agrees(0.15, torch.bfloat16, 32)
    assert agrees(0.045, torch.bfloat16, 2) and not agrees(0.06, torch.bfloat16, 2)
    assert agrees(0.045, torch.float16, 32) and not agrees(0.06, torch.float16, 32)
    assert not agrees(0.01, torch.float32, 80)


def test_what_all_logits_have_in_common_does_not_count() -> None:
    logits = torch.randn(3, 1, 400)
    logits[:, :, :9] = -torch.inf
    assert agree(output_of(logits + 7), output_of(logits), 2)
    assert agree(output_of(logits), output_of(logits + 7), 2)
    # Nor does it hide what differs: that is held against what is left.
    wrong = logits + 100
    wrong[1, :, 9:] += torch.randn(391)
    assert not agree(output_of(wrong), output_of(logits + 100), 2)


@pytest.mark.parametrize("fault", ["lost", "other", "zeroed", "moved"])
def test_faults_of_a_deep_model_in_half_precision_are_seen(fault: str) -> None:
    """Which is as far from itself in float32 as roundings explain."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.113,  # over as few dims what 0.02 is over Llama 3.1 8B's 4,096
    )
    model = LlamaForCausalLM(config).eval().bfloat16().float()
    tokens, positions = torch.randint(400, (3, 25)), torch.arange(25)[None]
    with torch.no_grad():
        exact = model(tokens).logits[:, -1:]
        half = model.bfloat16()
        right = half(tokens).logits[:, -1:]
        if fault == "lost":
            keep = [*range(23), 24]
            tokens, positions = tokens[:, keep], positions[:, keep]
        elif fault == "other":
            tokens[1, 22] = (tokens[1, 22] + 1) % 400
        elif fault == "moved":
            positions = positions * 2
        mask = torch.ones_like(tokens)
        if fault == "zeroed":
            mask[:, 8:16] = 0
        wrong = half(tokens, position_ids=positions, attention_mask=mask).logits[:, -1:]
    assert agree(output_of(exact.bfloat16()), output_of(right), 32)
    assert not agree(output_of(wrong), output_of(right), 32)
