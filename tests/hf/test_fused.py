"""Norms and activations as one kernel: the same function, put in place for a while, or let be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pageforge.hf.fused import fused

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Ops(TorchDispatchMode):
    """Counts what is run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class GatedNorm(nn.Module):
    """Takes another argument, though it could do without."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-6

    def forward(self, rows: Tensor, gate: Tensor | None = None) -> Tensor:
        rows = nn.functional.rms_norm(rows, self.weight.shape, self.weight, self.eps)
        return rows if gate is None else rows * gate


class OutsideNorm(nn.Module):
    """Adds epsilon to the root and not under it."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows / (rows.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


def with_weight(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    nn.init.normal_(norm.weight, 1, 0.3)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize("dim", [16, 576, 4096])
def test_norms(kind: type[nn.Module], dim: int, dtype: torch.dtype) -> None:
    """One op where there were several, and the same numbers but for roundings."""
    norm = with_weight(kind(dim, eps=1e-5), dtype)
    model = nn.Sequential(norm)
    rows = 3 * torch.randn(5, 7, dim).to(dtype)
    want = model(rows)
    before = dict(vars(norm))
    with fused(model):
        got = model(rows)
        assert "forward" in vars(norm)
    assert vars(norm) == before
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(ACT2FN[name])
    rows = torch.linspace(-6, 6, 999).to(dtype)
    want, exact = model(rows), model(rows.double())
    with fused(model):
        with Ops() as ops:
            got = model(rows)
        assert ops.count == 1
    # Where the function is near 0, transformers' one loses most of its digits.
    assert (got.double() - exact).abs().max() <= (want.double() - exact).abs().max() + 1e-6
    torch.testing.assert_close(got, want, rtol=1e-2, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "module",
    [
        Gemma2RMSNorm(24),  # multiplies by 1 + weight
        CohereLayerNorm(24),  # subtracts the mean
        OutsideNorm(24),
        GatedNorm(24),
        nn.LayerNorm(24),
        nn.Linear(24, 24, bias=False),
        ACT2FN["silu"],
        ACT2FN["gelu"],
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_another_function_is_left_alone(module: nn.Module) -> None:
    if hasattr(module, "weight") and module.weight.dim() == 1:
        module = with_weight(module, torch.float32)
    with fused(nn.Sequential(module)):
        assert "forward" not in vars(module)


def test_a_norm_in_another_dtype_does_as_ever() -> None:
    """transformers' own gives the weight's dtype then, whatever comes in."""
    norm = with_weight(LlamaRMSNorm(24), torch.float32)
    rows = torch.randn(3, 24).bfloat16()
    want = norm(rows)
    with fused(nn.Sequential(norm)):
        got = norm(rows)
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got, want)


def test_hooks_run_and_an_own_forward_stays() -> None:
    hooked, patched = LlamaRMSNorm(24), LlamaRMSNorm(24)
    seen: list[Tensor] = []
    hooked.register_forward_hook(lambda module, args, output: seen.append(output))
    patched.forward = own = lambda rows: rows + 1
    rows = torch.randn(3, 24)
    with fused(nn.Sequential(hooked, patched)):
        hooked(rows)
        assert torch.equal(patched(rows), rows + 1)
    assert len(seen) == 1
    assert patched.forward is own
    assert "forward" not in vars(hooked)


def test_a_class_whose_forward_was_replaced_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, rows: 2 * rows)
    norm, rows = LlamaRMSNorm(24), torch.randn(3, 24)
    with fused(nn.Sequential(norm)):
        assert torch.equal(norm(rows), 2 * rows)


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    model = nn.Sequential(LlamaRMSNorm(24), ACT2FN["gelu_new"])
    with pytest.raises(KeyError, match="mine"), fused(model):
        raise KeyError("mine")
    assert all("forward" not in vars(module) for module in model)
