"""ModelState: what a captured step has baked in of a model, and whether it still holds.

A CUDA graph repeats launches, not Python. It reads parameters at the addresses that they had, and
knows nothing of hooks registered, adapters switched or settings changed since.
"""

from __future__ import annotations

import copy
from itertools import chain
from operator import attrgetter, getitem, is_, itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Settings that are compared by value."""

CONTAINERS = (list, tuple, set, frozenset, dict)
"""And these, of such values: adapters keep in one which of them is active."""

WALKED = (list, tuple, dict)
"""Containers whose contents are looked at one by one where they cannot be compared by value."""

INTERNAL = vars(nn.Module()).keys() - {"training"}
"""What torch itself keeps in a module; of this, tensors, children and hooks are looked at."""

RECORDERS = "transformers.utils.output_capturing"
"""Hooks from here stay once hidden states were asked for, and do nothing in other forwards."""

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")

FORWARD: Any = attrgetter("forward")

MATMUL: Any = torch.backends.cuda.matmul

PRECISION: Any = attrgetter(
    "fp32_precision",  # what set_float32_matmul_precision and allow_tf32 set as well
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
"""Of torch's matrix products: a capture has chosen its kernels by it. Settings of torch's attention
do not matter, for a captured step attends with PageForge's own kernels."""


class ModelState:
    """A snapshot of a model: its modules, their tensors' addresses, their code and their settings.

    Settings are what modules and their configs have as attributes, and what lies in lists, tuples
    and dictionaries there. That other objects are replaced is seen (a config inside another, say),
    but not what becomes of their insides.

    It keeps the tensors' memory alive, so that a replay that began before a change was seen reads
    what it read before. Comparing is done at every step, in loops that run inside C functions.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._model = model
        self._modules = modules
        self._types: list[Any] = list(map(type, modules))
        self._classes = list(set(self._types))
        self._forwards = list(map(FORWARD, self._classes))
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
        self._slots = _slots(self._settings)
        self._slot_holders = [slot.holder for slot in self._slots]
        self._slot_keys = [slot.key for slot in self._slots]
        self._objects = list(map(getitem, self._slot_holders, self._slot_keys))
        self._sized = self._settings + [each for each in self._objects if isinstance(each, WALKED)]
        self._counts = list(map(len, self._sized))
        loose = [each for each in self._objects if isinstance(each, Tensor)]
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
        sets = [each for each in self._objects if isinstance(each, set | frozenset)]
        self._containers += sets
        self._contents += map(copy.copy, sets)
        self._precision = PRECISION(MATMUL)
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
        if not all(map(is_, map(FORWARD, self._classes), self._forwards)):
            return "the forward of a class was replaced"
        if not _same(_values(self._holders), self._tensors):
            return "parameters or buffers were replaced"
        if list(map(Tensor.data_ptr, self._present)) != self._addresses:
            return "the memory of parameters or buffers moved"
        if PRECISION(MATMUL) != self._precision:
            return "torch's precision of matrix products was changed"
        if list(map(len, self._sized)) != self._counts:
            return "settings were added or removed"
        try:
            values = [getter(settings) for getter, settings in self._getters]
            same = (
                values == self._values
                and self._containers == self._contents
                and all(map(is_, map(getitem, self._slot_holders, self._slot_keys), self._objects))
            )
        except (LookupError, RuntimeError, ValueError):  # gone, or an array by now
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
        names |= {
            name
            for (holder, key, name), value in zip(self._slots, self._objects, strict=True)
            if (holder.get(key) if isinstance(holder, dict) else holder[key]) is not value
        }
        return ", ".join(sorted(names)) or "inside a list or a dictionary"


def hooks_on(model: nn.Module) -> str | None:
    """A sentence about Python hooks on modules inside `model`; None where there are none.

    A `forward` that was put on a module is one as well: so patches and accelerate hook. Hooks on
    `model` itself run around its forward, and matter to nobody.
    """
    hooks = _hooks(model)
    return hooks[0][0] if hooks else None


def _hooks(model: nn.Module) -> list[tuple[str, Any]]:
    """The hooks that matter, each after a sentence about it."""
    found: list[tuple[str, Any]] = [
        ("global forward hooks are registered", hook)
        for kind in GLOBAL_HOOKS
        for hook in getattr(torch_module, kind).values()
    ]
    for name, child in model.named_modules():
        if child is model:
            continue
        if child._forward_hooks or child._forward_pre_hooks:
            hooks = [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]
            reason = f"there are forward hooks on {name}"
            found += [(reason, hook) for hook in hooks if not _only_records(hook)]
        forward = vars(child).get("forward")
        if forward is not None and not _is_of_a_class(forward, child):
            found.append((f"{name} has a forward of its own", forward))
    return found


def _is_of_a_class(forward: object, module: nn.Module) -> bool:
    """Whether it is a class's `forward`, bound to the module: code like that of its own class.

    So `kernels` puts other kernels in place. What wraps a forward is none, whatever its name.
    """
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    function: Any = forward.__func__
    if function is type(module).forward:
        return True
    owner, _, name = getattr(function, "__qualname__", "").rpartition(".")
    of_class = name == "forward" and owner and not owner.endswith("<locals>")
    return bool(of_class) and not hasattr(function, "__wrapped__")


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
    return [vars(config) for config in configs.values() if hasattr(config, "__dict__")]


class _Slot(NamedTuple):
    """A place for an object: `holder[key]`, which is setting `name` or lies inside of it."""

    holder: Any
    key: Any
    name: str


def _slots(all_settings: list[dict[str, Any]]) -> list[_Slot]:
    """The places of what is not compared by value, those inside containers included."""
    slots = [
        _Slot(settings, name, name)
        for settings in all_settings
        for name, value in settings.items()
        if name not in INTERNAL and not _is_plain(value)
    ]
    walked = set()
    for holder, key, name in slots:  # which grows meanwhile
        value = holder[key]
        if isinstance(value, WALKED) and id(value) not in walked:
            walked.add(id(value))
            keys = value if isinstance(value, dict) else range(len(value))
            slots += [_Slot(value, inner, name) for inner in keys]
    return slots


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
