"""Parts of a model that take several kernels, as one kernel each while a step is captured.

In a captured step of few rows most kernels take a few microseconds whatever they do, so their
number counts. An RMSNorm of transformers takes eight, GPT-2's GELU eight; torch has each as one
(Zhang and Sennrich, 2019, "Root mean square layer normalization"; Hendrycks and Gimpel, 2016,
"Gaussian error linear units"), which also rounds once where the others round after every kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import FastGELUActivation, NewGELUActivation

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""What models call the number that keeps an RMSNorm from dividing by zero."""

TANH_GELUS = (NewGELUActivation, FastGELUActivation)

NEAR = 8
"""How far two results of one function may be apart, relatively and in units of the dtype's
precision: a few roundings on either side."""

TRIAL_SCALES = (1.0, 1e-3)
"""Of the rows that a norm is tried on: in the second the epsilon matters."""


@contextlib.contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Within this context norms and activations inside `model` run as one kernel each.

    These are the tanh GELUs of transformers, and every module that gives on a trial what RMSNorm
    with its weight does. Hooks on them run as ever; a `forward` that was put on one stays.
    """
    replaced = []
    try:
        for module in model.modules():
            if "forward" not in vars(module) and (forward := _fused_forward(module)) is not None:
                replaced.append(module)
                module.forward = forward
        yield
    finally:
        for module in replaced:
            del module.forward


def _fused_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if type(module) in TANH_GELUS:
        return _tanh_gelu
    epsilon = _epsilon_of(module)
    if epsilon is None:
        return None
    rms_norm = _rms_norm(module, epsilon)
    return rms_norm if _is_same(module, rms_norm) else None


def _tanh_gelu(input: Tensor) -> Tensor:
    return functional.gelu(input, approximate="tanh")


def _rms_norm(module: nn.Module, epsilon: float) -> Callable[[Tensor], Tensor]:
    weight, forward = module.weight, module.forward
    assert isinstance(weight, nn.Parameter)

    def rms_norm(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:  # what comes out is the module's own choice
            result: Tensor = forward(hidden_states)
            return result
        return functional.rms_norm(hidden_states, weight.shape, weight, epsilon)

    return rms_norm


def _epsilon_of(module: nn.Module) -> float | None:
    """Its epsilon, if it looks like an RMSNorm: one tensor, a weight [D], and one argument."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if list(tensors) != ["weight"] or tensors["weight"].dim() != 1:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:  # `self` is one
        return None
    found = [vars(module)[name] for name in EPSILONS if name in vars(module)]
    return found[0] if len(found) == 1 and isinstance(found[0], float) else None


@torch.no_grad()
def _is_same(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> bool:
    """Whether both functions give the same on rows whose mean is not zero."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    row = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)
    rows = torch.stack([scale * row for scale in TRIAL_SCALES])
    try:
        want, got = type(module).forward(module, rows), forward(rows)
    except Exception:  # whatever it is, it is no norm of such rows
        return False
    if not isinstance(want, Tensor) or (want.shape, want.dtype) != (got.shape, got.dtype):
        return False
    return torch.allclose(got, want, rtol=NEAR * torch.finfo(want.dtype).eps, atol=0)
