"""What is no request is refused by name, before anything changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.served import engine_on
from tests.hf.tiny_models import CONFIGS, make

from pageforge.engine import Engine, SamplingParams
from pageforge.engine.core import Core
from pageforge.errors import PageForgeError, RequestError

GREEDY = SamplingParams(max_tokens=2, temperature=0)


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        3.5,
        [1.5, 2],
        ["a", "b"],
        [[5, 6]],
        {"input_ids": [5, 6], "attention_mask": [1, 1]},
        {"role": "user", "content": "a"},
        torch.tensor([[5, 6]]),
    ],
    ids=str,
)
def test_a_prompt_that_is_neither_text_nor_token_ids(prompt: Any) -> None:
    with engine_on("llama") as engine:
        with pytest.raises(RequestError, match="text or a list of token ids"):
            engine.add_request(prompt, GREEDY)
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    "prompts", [5, None, {"input_ids": [5, 6]}, [{"role": "user"}], torch.tensor([0.5, 6])], ids=str
)
def test_prompts_that_are_none(prompts: Any) -> None:
    with engine_on("llama") as engine:
        with pytest.raises(RequestError, match="text or a list of token ids"):
            engine.generate(prompts, GREEDY)
        assert not engine.has_unfinished


def test_token_ids_may_be_of_numpy_or_torch() -> None:
    with engine_on("llama") as engine:
        outputs = engine.generate([torch.tensor([5, 6]), torch.tensor([5, 6]).numpy()], GREEDY)
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].prompt_token_ids == [5, 6]
        for one in (torch.tensor([5, 6]), [np.int64(5), np.int64(6)], iter([[5, 6]])):
            (output,) = engine.generate(one, GREEDY)
            assert output.token_ids == outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"params": {"max_tokens": 2}}, "params"),
        ({"params": "greedy"}, "params"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": ["a"]}, "request_id"),
        ({"priority": "high"}, "priority"),
        ({"priority": None}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"priority": -(1 << 22)}, "priority"),
    ],
    ids=str,
)
def test_arguments_beside_the_prompt(options: dict[str, Any], name: str) -> None:
    with engine_on("llama") as engine:
        with pytest.raises(RequestError, match=f"^{name}: expected"):
            engine.add_request([5, 6], **options)
        assert not engine.has_unfinished
        assert engine.generate([5, 6], GREEDY)[0].finish_reason == "length"


def test_the_most_extreme_priorities_are_served() -> None:
    most = (1 << 22) - 1
    with engine_on("llama", max_running=1) as engine:
        for priority in (most, 0, -most):
            engine.add_request([5, 6], GREEDY, priority=priority, request_id=str(priority))
        ended: list[str] = []
        while engine.has_unfinished:
            ended += [output.request_id for output in engine.step()]
        assert ended == [str(-most), "0", str(most)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"seed": True}, "seed"),
        ({"swap_memory": "much"}, "swap_memory"),
        ({"swap_memory": -1}, "swap_memory"),
        ({"max_memory": "much"}, "max_memory"),
        ({"max_running": 0}, "max_running"),
        ({"page_size": 7}, "page_size"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_leaves_the_model_as_it_was(
    options: dict[str, Any], name: str
) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    with pytest.raises(PageForgeError, match=f"^{name}: expected"):
        Engine(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_as_before_even_if_closing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    engine = Engine(model, page_size=8, max_pages=20)
    assert model.config._attn_implementation == "pageforge"

    def fail(self: Core) -> None:
        raise RuntimeError("a broken device")

    monkeypatch.setattr(Core, "settle", fail)
    with pytest.raises(RuntimeError, match="a broken device"):
        engine.close()
    assert model.config._attn_implementation == "sdpa"
    engine.close()


def test_one_engine_a_model() -> None:
    """The first one that closed would take pageforge attention from the other."""
    model = make(CONFIGS["llama"](), "sdpa")
    with Engine(model, page_size=8, max_pages=20):
        with pytest.raises(RequestError, match="one that no engine serves"):
            Engine(model, page_size=8, max_pages=20)
        assert model.config._attn_implementation == "pageforge"
    assert model.config._attn_implementation == "sdpa"
    Engine(model, page_size=8, max_pages=20).close()
