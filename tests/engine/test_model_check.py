"""Which models the engine refuses, and what it says; the trial of those that might be served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf.tiny_models import CONFIGS, make, tiny
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from pageforge import OutOfPages, UnsupportedModel
from pageforge.engine import Engine
from pageforge.engine import engine as engine_module
from pageforge.engine.model_check import check_model, longest_sequence, try_model
from pageforge.engine.runner import Runner
from pageforge.hf.fast_decode import MAX_TOKENS


def _headless() -> PreTrainedModel:
    return LlamaModel(CONFIGS["llama"]())


def _rope_that_moves() -> PreTrainedModel:
    config = CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return make(config)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "got Linear; of a PEFT model pass get_base_model"),
        (lambda: tiny("t5"), "expected a decoder, got an encoder-decoder"),
        (lambda: tiny("bloom"), "takes position_ids"),
        (_headless, "without a language model head"),
        (_rope_that_moves, "expected rotary embeddings that stay, got dynamic ones"),
    ],
    ids=["no transformers model", "encoder-decoder", "no positions", "no head", "moving rope"],
)
def test_what_shows_at_once(make_model: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(UnsupportedModel, match=message):
        check_model(model)
    with pytest.raises(UnsupportedModel, match=message):
        Engine(model)


@pytest.mark.parametrize("error", [OutOfPages(2, 1), torch.OutOfMemoryError("by the test")])
def test_want_of_memory_is_no_fault_of_the_model(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(Runner, "launch", launch)
    with pytest.raises(type(error)):
        Engine(tiny("llama"), page_size=8, max_pages=40)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_what_may_be_served(name: str) -> None:
    check_model(tiny(name))


def test_a_sequence_has_no_more_tokens_than_the_model_has_positions() -> None:
    model = tiny("gpt2")
    assert longest_sequence(model) == model.config.n_positions
    long = LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "max_position_embeddings": 1 << 20})
    assert longest_sequence(make(long)) == MAX_TOKENS


@pytest.mark.parametrize(
    "options", [{}, {"max_pages": 1}, {"max_pages": 2}, {"max_running": 1, "max_batch_tokens": 1}]
)
def test_a_trial_needs_no_more_than_there_is(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def noted(*arguments: Any) -> int:
        tried.append(try_model(*arguments))
        return tried[-1]

    monkeypatch.setattr(engine_module, "try_model", noted)
    model = make(CONFIGS["llama"]())
    with Engine(model, page_size=8, **options) as engine:
        assert tried == [model.config.vocab_size]
        assert engine.stats().pool.pages_used == 0


def test_tokens_that_meet_by_other_ways_than_attention() -> None:
    model = make(CONFIGS["llama"]())

    def mix(module: Any, arguments: Any, output: Tensor) -> Tensor:
        return output + output.mean(1, keepdim=True)

    model.model.norm.register_forward_hook(mix)
    message = "sequences cannot be packed: the logits of a sequence alone and beside another differ"
    with pytest.raises(UnsupportedModel, match=message):
        Engine(model, page_size=8, max_pages=20)
    assert model.config._attn_implementation == "sdpa"


def test_a_lack_of_memory_in_the_trial_says_nothing_of_the_model() -> None:
    model = make(CONFIGS["llama"]())

    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("by the test")

    model.model.norm.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="by the test"):
        Engine(model, page_size=8, max_pages=20)
