"""Whatever a benchmark does to torch, it is undone."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from tests.bench.conftest import CPU

from pageforge.bench.settings import SETTINGS, cudnn_attention, unchanged

OTHERS = {
    "threads": 3,
    "default dtype": torch.float64,
    "grad mode": False,
    "matmul precision": "medium",
    "deterministic": True,
    "cuDNN attention": False,
    "flash attention": False,
    "efficient attention": False,
    "plain attention": False,
    "cuDNN TF32": not torch.backends.cudnn.allow_tf32,
}


def test_settings_are_put_back_also_after_an_error() -> None:
    numbers = {name for name in SETTINGS if "random numbers" in name}
    assert {*OTHERS, *numbers} == SETTINGS.keys()
    before = {name: read() for name, (read, _) in SETTINGS.items() if name not in numbers}
    drawn = draw()
    with pytest.raises(KeyError), unchanged(CPU):
        wanted = draw()
        for name, value in OTHERS.items():
            read, write = SETTINGS[name]
            write(value)
            assert read() == value != before[name]
        raise KeyError
    assert {name: SETTINGS[name][0]() for name in before} == before
    again = draw()
    assert again == wanted
    assert all(one != other for one, other in zip(again, drawn, strict=True))


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def test_circles_of_objects_are_let_go() -> None:
    gc.disable()
    try:
        with unchanged(CPU):
            model = torch.nn.Linear(2, 2)
            model.itself = [model]
            gone = weakref.ref(model)
            del model
        assert gone() is None
    finally:
        gc.enable()


def test_cudnn_attention_is_put_back() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with cudnn_attention(not before):
        assert torch.backends.cuda.cudnn_sdp_enabled() is not before
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
