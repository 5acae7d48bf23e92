"""ModelState: every change that a captured graph would not see is seen, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pageforge.model_state import ModelState, hooks_on


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.1)
        self.alpha = 0.5
        self.active = ["one"]
        self.scaling = {"one": 2.0, "two": [1, 2]}
        self.bias = None
        self.activation = torch.relu
        self.vector = torch.zeros(4)  # no parameter, no buffer
        self.config = SimpleNamespace(kind="plain", sizes=[1, 2])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(states)) * self.alpha


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[0].linear.weight  # tied
        self.scale = 1.0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            states = block(states)
        return self.head(states)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _set(target: Callable[[Model], object], name: str, value: object) -> Callable[[Model], object]:
    return lambda model: setattr(target(model), name, value)


def _block(model: Model) -> Block:
    return model.blocks[1]


CHANGES: dict[str, Callable[[Model], object]] = {
    "hook": lambda model: _block(model).linear.register_forward_hook(lambda *_: None),
    "pre-hook": lambda model: _block(model).register_forward_pre_hook(lambda *_: None),
    "parametrization": lambda model: parametrize.register_parametrization(
        _block(model).linear, "weight", Doubled()
    ),
    "parameter replaced": lambda model: setattr(
        _block(model).linear, "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "tied parameter replaced": lambda model: setattr(
        model.head, "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "data replaced": lambda model: setattr(_block(model).linear.weight, "data", torch.ones(4, 4)),
    "buffer replaced": lambda model: setattr(_block(model).norm, "running_mean", torch.ones(4)),
    "parameter added": lambda model: _block(model).register_parameter(
        "extra", nn.Parameter(torch.ones(1))
    ),
    "parameter of an empty module": lambda model: _block(model).drop.register_parameter(
        "extra", nn.Parameter(torch.ones(1))
    ),
    "module replaced": lambda model: setattr(_block(model), "linear", nn.Linear(4, 4)),
    "module added": lambda model: _block(model).add_module("more", nn.Linear(4, 4)),
    "child of a leaf": lambda model: _block(model).drop.add_module("more", nn.Linear(4, 4)),
    "module removed": lambda model: delattr(_block(model), "drop"),
    "class swapped": lambda model: setattr(_block(model).drop, "__class__", nn.Identity),
    "number": _set(_block, "alpha", 0.25),
    "setting added": _set(_block, "steer", 1),
    "setting removed": lambda model: delattr(_block(model), "alpha"),
    "plain becomes a tensor": _set(_block, "alpha", torch.ones(3)),
    "list content": lambda model: _block(model).active.append("two"),
    "dictionary content": lambda model: _block(model).scaling.update(one=3.0),
    "nested content": lambda model: _block(model).scaling["two"].append(3),
    "train": lambda model: _block(model).drop.train(),
    "config": lambda model: setattr(_block(model).config, "kind", "other"),
    "config content": lambda model: _block(model).config.sizes.append(3),
    "instance forward": _set(_block, "forward", lambda states: states),
    "function": _set(_block, "activation", torch.tanh),
    "tensor": _set(_block, "vector", torch.zeros(4)),
    "tensor's data": lambda model: setattr(_block(model).vector, "data", torch.zeros(4)),
    "tensor becomes plain": _set(_block, "vector", 1.0),
    "setting of the model itself": _set(lambda model: model, "scale", 2.0),
    "a new setting of the model itself": _set(lambda model: model, "steer", 2.0),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_seen(change: str) -> None:
    model = Model().eval()
    state = ModelState(model)
    assert state.change() is None
    CHANGES[change](model)
    assert state.change()
    assert state.change()  # and again


def test_what_does_not_matter_is_not_seen() -> None:
    model, other = Model().eval(), Model()
    state = ModelState(model)
    with torch.no_grad():
        model.blocks[0].linear.weight.mul_(2)  # the graph reads the new values
        model.blocks[0].vector.add_(1)
    other.blocks[0].register_forward_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None)  # runs around the forward, replayed or not
    model.blocks[0].active = list(model.blocks[0].active)  # equal
    model.blocks[0].alpha = float("0.5")
    assert state.change() is None


def test_a_global_hook_is_seen() -> None:
    model = Model().eval()
    state = ModelState(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "global" in (state.change() or "")
    finally:
        handle.remove()
    assert state.change() is None


def test_hooks_are_named() -> None:
    model = Model()
    assert hooks_on(model) is None
    handle = model.blocks[1].linear.register_forward_hook(lambda *_: None)
    assert "blocks.1.linear" in (hooks_on(model) or "")
    handle.remove()
    assert hooks_on(model) is None


def test_the_reason_names_the_setting() -> None:
    model = Model().eval()
    state = ModelState(model)
    model.blocks[0].alpha = 3.0
    assert "alpha" in (state.change() or "")


def test_the_memory_of_replaced_weights_stays_until_the_snapshot_goes() -> None:
    model = Model().eval()
    weight = model.blocks[0].linear.weight
    before = weight.data.clone()
    address = weight.data_ptr()
    state = ModelState(model)
    weight.data = torch.zeros(4, 4)
    assert any(torch.equal(kept, before) and kept.data_ptr() == address for kept in state._kept)


def test_a_method_replaced_in_its_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model().eval()
    state = ModelState(model)
    monkeypatch.setattr(Block, "forward", lambda block, states: states)
    assert "class" in (state.change() or "")


def test_hooks_that_were_there_do_not_matter() -> None:
    model, other = Model().eval(), Model()
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    state = ModelState(model)
    other.blocks[0].register_forward_hook(lambda *_: None)  # a reason to look at hooks again
    assert state.change() is None
    model.blocks[1].register_forward_pre_hook(lambda *_: None)
    assert "hooks" in (state.change() or "")
    handle.remove()
    assert "hooks" in (state.change() or "")


def test_tensors_without_memory() -> None:
    model = Model().eval()
    with torch.device("meta"):
        model.blocks[0].linear = nn.Linear(4, 4)
    state = ModelState(model)
    assert state.change() is None
    model.blocks[0].linear.to_empty(device="cpu")
    assert state.change()
