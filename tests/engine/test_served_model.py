"""A model is served by one engine at a time, and is as it was afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.served import engine_on
from tests.hf.tiny_models import CONFIGS, make

from pageforge.engine import Engine, SamplingParams
from pageforge.engine.served_model import EvaluationMode, served
from pageforge.errors import RequestError


@pytest.mark.parametrize("raises", [False, True])
def test_a_model_is_as_it_was(raises: bool) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    attributes = set(vars(model))
    try:
        with served(model):
            assert model.config._attn_implementation == "pageforge"
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert model.config._attn_implementation == "sdpa"
    assert set(vars(model)) == attributes


def test_modules_that_trained_go_on() -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    model.train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    mode = EvaluationMode(model)
    for _ in range(2):
        mode.begin()
        mode.begin()
        assert not any(module.training for module in model.modules())
        model.model.norm.train()  # in the middle
        mode.begin()
        assert not any(module.training for module in model.modules())
        mode.end()
        assert [module.training for module in model.modules()] == training
        mode.end()


def test_a_model_that_trains_between_rollouts_answers_without_dropout() -> None:
    """And trains on afterwards, whether the engine slept meanwhile or not."""
    model = make(CONFIGS["gpt2"](), "sdpa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    params = SamplingParams(max_tokens=12, temperature=0)
    with Engine(model, page_size=8, max_pages=100) as engine:
        want = engine.generate([[5, 6, 7, 8]], params)[0].token_ids
        for sleeps in (False, True):
            model.train()
            if sleeps:
                engine.sleep()
            engine.weights_changed()
            if sleeps:
                engine.wake()
            assert engine.generate([[5, 6, 7, 8]], params)[0].token_ids == want
            assert all(module.training for module in model.modules())
        name = engine.add_request([5, 6, 7, 8], params)
        engine.step()
        assert not model.training
        engine.sleep()  # with a request that waits
        assert model.training
        engine.weights_changed()
        engine.wake()
        outputs = engine.generate([[5, 6, 7, 8]], params)
        outputs += [output for _ in range(30) for output in engine.step()]
        assert [output.token_ids for output in outputs] == [want, want]
        name = engine.add_request([5, 6, 7, 8], params)
        engine.step()
        model.train()
        engine.weights_changed()
        engine.step()
        assert not model.training
        engine.abort(name)
        assert model.training
    assert model.training


def test_the_mode_is_the_users_own_between_calls() -> None:
    """However the last request ended, also where an engine is dropped, and while one sleeps."""
    model = make(CONFIGS["llama"](), "sdpa").train()
    params = SamplingParams(max_tokens=20, temperature=0)
    engine = Engine(model, page_size=8, max_pages=100)
    chunks = engine.stream([5, 6, 7], params)
    next(chunks)
    assert not model.training
    chunks.close()
    assert model.training
    engine.sleep()
    engine.add_request([5, 6, 7], params)
    assert model.training
    engine.wake()
    engine.step()
    assert not model.training
    model.train()  # between two steps
    engine.step()
    assert not model.training
    del engine, chunks
    gc.collect()
    assert all(module.training for module in model.modules())
    Engine(model, page_size=8, max_pages=100).close()


def test_an_interrupt_where_the_mode_ends_leaves_an_engine_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(CONFIGS["llama"](), "sdpa").train()
    params = SamplingParams(max_tokens=2, temperature=0)
    with Engine(model, page_size=8, max_pages=100) as engine:

        def interrupted(mode: EvaluationMode) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(EvaluationMode, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.stats()
        assert len(engine.generate([[5, 6]], params)[0].token_ids) == 2
        assert model.training


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_a_served_model_is_not_served(copied: Callable[[Any], Any]) -> None:
    with engine_on("llama") as engine:
        model = copied(engine._model)
        with Engine(model, page_size=8, max_pages=40) as other:
            assert other.generate([[5, 6]], SamplingParams(max_tokens=1))


def test_one_at_a_time() -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    with served(model):
        with pytest.raises(RequestError, match="one that no engine serves"), served(model):
            pass
        assert model.config._attn_implementation == "pageforge"  # refused, it changed nothing
    with served(model):
        pass
