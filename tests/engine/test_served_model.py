"""A model is served by one engine at a time, and is as it was afterwards."""

from __future__ import annotations

import pytest
from tests.hf.tiny_models import CONFIGS, make

from pageforge.engine.served_model import served
from pageforge.errors import RequestError


@pytest.mark.parametrize("raises", [False, True])
def test_a_model_is_as_it_was(raises: bool) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    model.train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    attributes = set(vars(model))
    try:
        with served(model):
            assert model.config._attn_implementation == "pageforge"
            assert not any(module.training for module in model.modules())
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == training
    assert set(vars(model)) == attributes


def test_one_at_a_time() -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    with served(model):
        with pytest.raises(RequestError, match="one that no engine serves"), served(model):
            pass
        assert model.config._attn_implementation == "pageforge"  # refused, it changed nothing
    with served(model):
        pass
