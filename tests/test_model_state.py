"""ModelState: every change that a captured graph would not see is seen, and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pageforge.model_state import ModelState, hooks_on


@dataclass
class Plan:
    depth: int = 1


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
        self.config = SimpleNamespace(kind="plain", sizes=[1, 2], text_config=SimpleNamespace())
        self.caches = [torch.zeros(2), {"keys": (torch.zeros(2), 1)}]
        self.parts = [Plan(), [1, 2]]
        self.kinds = {torch.relu, "one"}
        self.plan = Plan()

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
    "tensor in a list": lambda model: _block(model).caches.__setitem__(0, torch.zeros(2)),
    "tensor in a tuple in a dictionary": lambda model: (
        _block(model).caches[1].update(keys=(torch.zeros(2), 1))
    ),
    "nested tensor's data": lambda model: setattr(
        _block(model).caches[1]["keys"][0], "data", torch.zeros(2)
    ),
    "tensor added to a list": lambda model: _block(model).caches.append(torch.zeros(2)),
    "tensor under another name": lambda model: (
        _block(model).caches[1].update(values=_block(model).caches[1].pop("keys"))
    ),
    "list of tensors": lambda model: setattr(
        _block(model), "caches", [torch.zeros(2), _block(model).caches[1]]
    ),
    "object": _set(_block, "plan", Plan()),  # equal, but another
    "object in a list": lambda model: _block(model).parts.__setitem__(0, Plan()),
    "list beside an object": lambda model: _block(model).parts[1].append(3),
    "function in a set": lambda model: _block(model).kinds.symmetric_difference_update(
        {torch.relu, torch.tanh}
    ),
    "another config": lambda model: setattr(
        _block(model), "config", SimpleNamespace(**vars(_block(model).config))
    ),
    "config in a config": lambda model: setattr(
        _block(model).config, "text_config", SimpleNamespace()
    ),
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
        model.blocks[0].caches[0].add_(1)
    model.blocks[0].plan.depth = 2  # no telling what an object's insides are
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


def _steered(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    return states + 1


def _wrapped(forward: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(forward)
    def wrapper(*args: object) -> object:
        return forward(*args)

    return wrapper


def _closure(module: nn.Module) -> Callable[..., object]:
    def forward(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
        return states + 1

    return MethodType(forward, module)


@pytest.mark.parametrize(
    "patch",
    [
        lambda linear: lambda states: states,
        lambda linear: _wrapped(linear.forward),
        lambda linear: functools.partial(_steered, linear),
        lambda linear: MethodType(_steered, linear),
        lambda linear: MethodType(_wrapped(nn.Linear.forward), linear),
        lambda linear: Doubled().forward,
        _closure,
    ],
)
def test_a_forward_put_on_a_module_is_a_hook(patch: Callable[[nn.Module], object]) -> None:
    model = Model()
    linear = model.blocks[1].linear
    linear.forward = patch(linear)
    assert hooks_on(model) == "blocks.1.linear has a forward of its own"
    state = ModelState(model)
    assert state.change() is None
    del linear.forward
    assert state.change()
    assert hooks_on(model) is None


def test_a_forward_of_a_class_is_no_hook() -> None:
    """So kernels from a hub come in; and what is put on the model itself runs at every step."""
    model = Model()
    model.blocks[0].forward = MethodType(Doubled.forward, model.blocks[0])
    model.blocks[1].forward = MethodType(Block.forward, model.blocks[1])
    model.forward = _wrapped(model.forward)
    assert hooks_on(model) is None
    state = ModelState(model)
    model.blocks[0].forward = MethodType(Block.forward, model.blocks[0])
    assert state.change()


def test_hooks_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
    assert hooks_on(model) is None
    accelerate.hooks.add_hook_to_module(model.blocks[0], accelerate.hooks.AlignDevicesHook())
    assert hooks_on(model) == "blocks.0 has a forward of its own"


def test_the_reason_names_the_setting() -> None:
    model = Model().eval()
    state = ModelState(model)
    model.blocks[0].alpha = 3.0
    assert "alpha" in (state.change() or "")
    model.blocks[0].alpha = 0.5
    model.blocks[0].caches[1]["keys"] = ()
    assert state.change() == "settings changed: caches"


def test_lists_that_contain_themselves() -> None:
    model = Model().eval()
    model.blocks[0].caches.append(model.blocks[0].caches)
    state = ModelState(model)
    assert state.change() is None
    model.blocks[0].caches[2] = []
    assert state.change() == "settings changed: caches"


def test_a_config_without_attributes() -> None:
    model = Model().eval()
    model.config = {"scale": 1.0}
    state = ModelState(model)
    assert state.change() is None
    model.config["scale"] = 2.0
    assert state.change()


@pytest.fixture
def matmul() -> Iterator[object]:
    settings = torch.backends.cuda.matmul
    names = ("allow_fp16_accumulation", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(settings, name) for name in names}
    yield settings
    settings.fp32_precision = "none"
    for name, value in before.items():
        setattr(settings, name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda matmul: torch.set_float32_matmul_precision("high"),
        lambda matmul: setattr(matmul, "allow_tf32", True),
        lambda matmul: setattr(matmul, "fp32_precision", "tf32"),
        lambda matmul: setattr(matmul, "allow_fp16_accumulation", True),
        lambda matmul: setattr(matmul, "allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_another_precision_of_products_is_seen(
    matmul: object, change: Callable[[object], object]
) -> None:
    state = ModelState(Model().eval())
    assert state.change() is None
    change(matmul)
    assert "precision" in (state.change() or "")


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
