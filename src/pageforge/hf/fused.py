"""Parts of a model that take several kernels, as one kernel each while a step is captured.

In a captured step of few rows most kernels take a few microseconds whatever they do, so their
number counts. An RMSNorm of transformers takes eight, GPT-2's GELU eight; torch has each as one
(Zhang and Sennrich, 2019, "Root mean square layer normalization"; Hendrycks and Gimpel, 2016,
"Gaussian error linear units"), which also rounds once where the others round after every kernel.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import FastGELUActivation, NewGELUActivation

from pageforge.interrupts import held_back

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""What models call the number that keeps an RMSNorm from dividing by zero."""

TANH_GELUS = (NewGELUActivation, FastGELUActivation)

NEAR = 8 * torch.finfo(torch.float32).eps
"""How far two results of one function may be apart on a trial, which is in float32."""

ON_TRIAL: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Whatever torch's defaults are."""

LARGE = 1e3
"""What most numbers of a trial of a norm are a fraction of: who clamps would do so there."""

_one_at_a_time = threading.RLock()
"""Two threads that put forwards in place on one model would take away each other's."""

Forward = Callable[..., Tensor]


@contextlib.contextmanager
def fused(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Within this context norms and activations inside `model` run as one kernel each.

    Nothing is done where steps are `compiled`: torch.compile fuses more, and would have to compile
    each forward put in place.

    These are the tanh GELUs of transformers and RMSNorms, whatever their classes are called, if on
    a trial they give what torch's give. Hooks on them run as ever; a `forward` that was put on one
    stays, and so does whatever somebody else puts there meanwhile.
    """
    if compiled:
        yield
        return
    forwards: dict[nn.Module, Forward] = {}
    with _one_at_a_time:
        try:
            with held_back():
                for module in model.modules():
                    forward = None if "forward" in vars(module) else _fused_forward(module)
                    if forward is not None:
                        forwards[module] = module.forward = forward
            yield
        finally:
            with held_back():
                for module, forward in forwards.items():
                    if vars(module).get("forward") is forward:
                        del module.forward


def _fused_forward(module: nn.Module) -> Forward | None:
    """The same function in one kernel; None where there is none, or it is not known to be."""
    if next(module.children(), None) is not None:
        return None
    try:  # whatever a module does that is neither: it is left alone
        if type(module) in TANH_GELUS:
            return _tanh_gelu if _is_tanh_gelu(module) else None
        epsilon = _epsilon_of(module)
        if epsilon is not None and _is_rms_norm(module, epsilon):
            return _rms_norm(module, epsilon)
    except Exception:
        return None
    return None


def _tanh_gelu(input: Tensor) -> Tensor:
    return functional.gelu(input, approximate="tanh")


def _is_tanh_gelu(module: nn.Module) -> bool:
    """Whether it still is one: its class's forward may have been replaced."""
    rows = torch.linspace(-6, 6, 241, **ON_TRIAL)
    return torch.allclose(module.forward(rows), _tanh_gelu(rows), rtol=NEAR, atol=NEAR)


def _epsilon_of(module: nn.Module) -> float | None:
    """Its epsilon, if it looks like an RMSNorm: one tensor, a parameter `weight` [D]."""
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.dim() != 1 or len([*module.parameters(), *module.buffers()]) > 1:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:  # `self` is one
        return None
    found = [vars(module)[name] for name in EPSILONS if name in vars(module)]
    return found[0] if len(found) == 1 and isinstance(found[0], float) else None


@torch.no_grad()
def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    """Whether it is one: tried in float32, so that no rounding hides what is another function.

    Its weights are others then, none of which could be taken for 1 plus itself; the rows are small
    ones, of which epsilon is half of what the root is taken of, usual ones, and large ones; and no
    mean is zero, along whatever dim.
    """
    trial = copy.deepcopy(module).to(**ON_TRIAL)
    weight = trial.get_parameter("weight")
    weight.copy_(torch.linspace(0.5, 1.5, len(weight), **ON_TRIAL))
    row = torch.linspace(-1, 2, len(weight), **ON_TRIAL)
    scales = torch.tensor([math.sqrt(epsilon), 1, LARGE], **ON_TRIAL)[:, None]
    rows = torch.stack([scales * row, scales.flip(0) * row.flip(0)])  # [2, 3, D]
    want = functional.rms_norm(rows, weight.shape, weight, epsilon)
    given = rows.clone()
    got = trial.forward(given)
    return torch.equal(given, rows) and torch.allclose(got, want, rtol=NEAR, atol=0)


def _rms_norm(module: nn.Module, epsilon: float) -> Forward:
    """For what one kernel does; all else its own `forward` may know what to do with."""
    weight, forward = module.get_parameter("weight"), module.forward

    def rms_norm(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and not kwargs:
            (states,) = args
            if states.dtype == weight.dtype and states.shape[-1:] == weight.shape:
                return functional.rms_norm(states, weight.shape, weight, epsilon)
        result: Tensor = forward(*args, **kwargs)
        return result

    return rms_norm
