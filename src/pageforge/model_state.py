"""ModelState: what a captured step has baked in of a model, and whether it still holds.

A CUDA graph repeats launches, not Python. It reads parameters at the addresses that they had, and
knows nothing of hooks registered, adapters switched or settings changed since.
"""

from __future__ import annotations

import copy
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Settings that are compared by value."""

CONTAINERS = (list, tuple, set, frozenset, dict)
"""And these, of such values: adapters keep in one which of them is active."""

INTERNAL = vars(nn.Module()).keys() - {"training"}
"""What torch itself keeps in a module; of this, tensors, children and hooks are looked at."""

RECORDERS = "transformers.utils.output_capturing"
"""Hooks from here stay once hidden states were asked for, and do nothing in other forwards."""

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModelState:
    """A snapshot of a model: its modules, their tensors' addresses, their code and their settings.

    Of other objects (a config inside another, say) it is not seen what becomes of them.

    It keeps the tensors' memory alive, so that a replay that began before a change was seen reads
    what it read before. Comparing is done at every step, in loops that run inside C functions.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._model = model
        self._modules = modules
        self._types: list[Any] = list(map(type, modules))
        self._forwards = {cls: cls.forward for cls in self._types}
        holders: list[dict[str, Any]] = [
            held for module in modules for held in (module._parameters, module._buffers)
        ]
        parents: list[dict[str, Any]] = [module._modules for module in modules]
        self._empty = [dictionary for dictionary in holders + parents if not dictionary]
        self._parents = list(filter(None, parents))
        self._children = _values(self._parents)
        self._holders = list(filter(None, holders))
        self._tensors = _values(self._holders)
        self._settings = list(map(vars, modules)) + _configs(modules)
        self._counts = list(map(len, self._settings))
        self._objects = [
            (settings, name, value)
            for settings in self._settings
            for name, value in settings.items()
            if name not in INTERNAL and (isinstance(value, Tensor) or callable(value))
        ]
        loose = [value for _, _, value in self._objects if isinstance(value, Tensor)]
        self._present = [tensor for tensor in self._tensors + loose if tensor is not None]
        self._addresses = list(map(Tensor.data_ptr, self._present))
        self._kept = list(map(Tensor.detach, self._present))
        names = [_plain_names(settings) for settings in self._settings]
        self._before = [
            {name: settings[name] for name in found}
            for found, settings in zip(names, self._settings, strict=True)
        ]
        self._getters = [
            (itemgetter(*found), settings)
            for found, settings in zip(names, self._settings, strict=True)
            if found
        ]
        self._values = [getter(settings) for getter, settings in self._getters]
        # A container may change without being replaced: adapters keep in one which is active.
        self._containers = [
            value
            for before in self._before
            for value in before.values()
            if isinstance(value, CONTAINERS)
        ]
        self._contents = [copy.deepcopy(container) for container in self._containers]
        self._hooks = _hooks(model)
        self._last_hook = RemovableHandle.next_id

    def change(self) -> str | None:
        """What is different now, in words; None where nothing is."""
        if RemovableHandle.next_id != self._last_hook:
            if _hooks(self._model) != self._hooks:
                return hooks_on(self._model) or "forward hooks were removed"
            self._last_hook = RemovableHandle.next_id
        if any(self._empty):
            return "modules, parameters or buffers were added"
        if list(map(type, self._modules)) != self._types or not _same(
            _values(self._parents), self._children
        ):
            return "modules were replaced"
        if any(cls.forward is not forward for cls, forward in self._forwards.items()):
            return "the forward of a class was replaced"
        if not _same(_values(self._holders), self._tensors):
            return "parameters or buffers were replaced"
        if list(map(Tensor.data_ptr, self._present)) != self._addresses:
            return "the memory of parameters or buffers moved"
        if list(map(len, self._settings)) != self._counts:
            return "settings were added or removed"
        for settings, name, value in self._objects:
            if settings.get(name) is not value:
                return f"settings changed: {name}"
        try:
            values = [getter(settings) for getter, settings in self._getters]
            same = values == self._values and self._containers == self._contents
        except (KeyError, RuntimeError, ValueError):  # gone, or an array by now
            same = False
        if not same:
            return "settings changed: " + self._changed_settings()
        return None

    def _changed_settings(self) -> str:
        names = {
            name
            for before, settings in zip(self._before, self._settings, strict=True)
            for name, value in before.items()
            if settings.get(name) is not value
        }
        return ", ".join(sorted(names)) or "inside a list or a dictionary"


def hooks_on(model: nn.Module) -> str | None:
    """A sentence about Python hooks on modules inside `model`; None where there are none.

    Hooks on `model` itself run around its forward, and matter to nobody.
    """
    hooks = _hooks(model)
    if not hooks:
        return None
    name, _ = hooks[0]
    return f"there are forward hooks on {name}" if name else "global forward hooks are registered"


def _hooks(model: nn.Module) -> list[tuple[str, Any]]:
    """The hooks that matter, each with its module's name, or with none if it is global."""
    found = [("", hook) for kind in GLOBAL_HOOKS for hook in getattr(torch_module, kind).values()]
    for name, child in model.named_modules():
        if child is not model and (child._forward_hooks or child._forward_pre_hooks):
            hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]
            found += [(name, hook) for hook in hooks if not _only_records(hook)]
    return found


def _only_records(hook: object) -> bool:
    return getattr(hook, "__module__", "") == RECORDERS


def _values(dictionaries: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def _same(now: list[Any], before: list[Any]) -> bool:
    """Whether both hold the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _configs(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The settings of the configs that modules share, each once."""
    configs = {id(config): config for m in modules if (config := vars(m).get("config")) is not None}
    return [vars(config) for config in configs.values()]


def _plain_names(settings: dict[str, Any]) -> list[str]:
    """The settings that can be compared by value."""
    return sorted(
        name for name, value in settings.items() if name not in INTERNAL and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN) or (
        isinstance(value, CONTAINERS) and all(map(_is_plain, value))
    )
