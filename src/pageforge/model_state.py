"""ModelState: what a captured step has baked in of a model, and whether it still holds.

A CUDA graph repeats launches, not Python. It reads parameters at the addresses that they had, and
knows nothing of hooks registered, adapters switched or settings changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Settings that are compared by value."""

CONTAINERS = (list, tuple, set, frozenset, dict)
"""And these, of such values: adapters keep in one which of them is active."""

INTERNAL = vars(nn.Module()).keys() - {"training"}
"""What torch itself keeps in a module; of this, tensors, children and hooks are looked at."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModelState:
    """A snapshot of a model: its modules, their tensors' addresses, and their plain settings.

    It keeps the tensors' memory alive, so that a replay that began before a change was seen reads
    what it read before.
    """

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._types = [type(module) for module in self._modules]
        self._children = [list(module._modules.values()) for module in self._modules]
        holders = [
            holder for module in self._modules for holder in (module._parameters, module._buffers)
        ]
        self._tensors = [
            (holder, name, tensor)
            for holder in holders
            for name, tensor in holder.items()
            if tensor is not None
        ]
        self._addresses = [tensor.data_ptr() for _, _, tensor in self._tensors]
        self._kept = [tensor.detach() for _, _, tensor in self._tensors]
        places = list(_attributes(self._modules))
        self._counted = holders + places
        self._counts = [len(counted) for counted in self._counted]
        settings = [
            (attributes, name) for attributes in places for name in attributes.keys() - INTERNAL
        ]
        self._scalars = [(of, name) for of, name in settings if isinstance(of[name], PLAIN)]
        self._values = [of[name] for of, name in self._scalars]
        self._containers = [
            (of, name, frozen)
            for of, name in settings
            if isinstance(of[name], CONTAINERS) and (frozen := _frozen(of[name])) is not _NOT_PLAIN
        ]
        self._forwards = [vars(module).get("forward") for module in self._modules[1:]]
        self._last_hook = RemovableHandle.next_id

    def change(self) -> str | None:
        """What is different now, in words; None where nothing is."""
        if RemovableHandle.next_id != self._last_hook:
            reason = hooks_on(self._modules[0])
            if reason is not None:
                return reason
            self._last_hook = RemovableHandle.next_id
        if [type(module) for module in self._modules] != self._types or [
            list(module._modules.values()) for module in self._modules
        ] != self._children:
            return "modules were replaced"
        if [vars(module).get("forward") for module in self._modules[1:]] != self._forwards:
            return "a module's forward was replaced"
        if [len(counted) for counted in self._counted] != self._counts:
            return "parameters, buffers or settings were added or removed"
        if any(holder.get(name) is not tensor for holder, name, tensor in self._tensors):
            return "parameters or buffers were replaced"
        if [tensor.data_ptr() for _, _, tensor in self._tensors] != self._addresses:
            return "the memory of parameters or buffers moved"
        values = [of.get(name, _NOT_PLAIN) for of, name in self._scalars]
        if values != self._values:
            pairs = zip(self._scalars, values, self._values, strict=True)
            name = next(name for (_, name), now, before in pairs if now != before)
            return f"the setting {name} changed"
        for of, name, frozen in self._containers:
            if _frozen(of.get(name)) != frozen:
                return f"the setting {name} changed"
        return None


def hooks_on(model: nn.Module) -> str | None:
    """A sentence about Python hooks on modules inside `model`; None where there are none.

    Hooks on `model` itself run around its forward, and matter to nobody.
    """
    if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        return "global forward hooks are registered"
    for name, child in model.named_modules():
        if child is not model and any(getattr(child, kind) for kind in HOOKS):
            return f"there are forward hooks on {name}"
    return None


def _attributes(modules: list[nn.Module]) -> Iterator[dict[str, Any]]:
    """Where the settings lie: in modules and in the configs that they share."""
    seen: set[int] = set()
    for module in modules:
        yield vars(module)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield vars(config)


_NOT_PLAIN = object()


def _frozen(value: object) -> object:
    """`value` as something that can be compared later; `_NOT_PLAIN` where it is not plain."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, CONTAINERS):
        return _NOT_PLAIN
    parts = [_frozen(part) for part in value]
    return _NOT_PLAIN if _NOT_PLAIN in parts else parts
