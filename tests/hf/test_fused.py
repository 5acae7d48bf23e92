"""Norms and activations as one kernel: the same function, put in place for a while, or let be."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN, FastGELUActivation, NewGELUActivation
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from pageforge.hf import fused as fused_module
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


class Norm(nn.Module):
    """An RMSNorm, written another way; those below are none."""

    def __init__(self, dim: int = 24, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x / (size**2 + self.eps).sqrt().to(x.dtype) * self.weight


class OutsideNorm(Norm):
    """Adds epsilon to the root and not under it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class ClampedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-2.5, 2.5)


class OtherDimNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-2, keepdim=True) + self.eps).rsqrt()


class InPlaceNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_((x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).mul_(self.weight)


class BufferNorm(Norm):
    """Has a weight that is no parameter, as FalconMamba's."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(24))


class HeadNorm(Norm):
    """Of each head of `[.., H * D]`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, len(self.weight)))).flatten(-2)


class Float8Weight(nn.Module):
    """With a weight that few ops take."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(24).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


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
        OutsideNorm(),
        OutsideNorm(eps=1e-12),
        ClampedNorm(),
        OtherDimNorm(),
        InPlaceNorm(),
        BufferNorm(),
        Float8Weight(),
        Norm().to("meta"),
        GatedNorm(24),
        nn.LayerNorm(24),
        nn.Linear(24, 24, bias=False),
        ACT2FN["silu"],
        ACT2FN["gelu"],
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_another_function_is_left_alone(module: nn.Module) -> None:
    with fused(nn.Sequential(module)):
        assert "forward" not in vars(module)


def test_large_weights_in_half_precision_are_no_disguise() -> None:
    """Whether they are w or 1 + w could not be told from their own results."""
    norm = Gemma2RMSNorm(64)
    nn.init.uniform_(norm.weight, 17, 60)
    with fused(nn.Sequential(norm.bfloat16())):
        assert "forward" not in vars(norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5])
def test_what_it_is_called_and_its_weights_do_not_matter(eps: float, dtype: torch.dtype) -> None:
    norm = Norm(64, eps).to(dtype)
    nn.init.zeros_(norm.weight)
    with fused(nn.Sequential(norm)):
        assert "forward" in vars(norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_torch_s_defaults_do_not_matter(dtype: torch.dtype) -> None:
    norm, gelu = Norm(), ACT2FN["gelu_new"]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"), fused(nn.Sequential(norm, gelu)):
            assert "forward" in vars(norm) and "forward" in vars(gelu)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nor_does_whether_gradients_are_kept(mode: Any) -> None:
    with torch.inference_mode():
        loaded = Norm()
    norm = Norm()
    with mode(), fused(nn.Sequential(norm, loaded)):
        assert "forward" in vars(norm) and "forward" in vars(loaded)


def test_what_is_compiled_is_left_alone() -> None:
    norm = Norm()
    with fused(nn.Sequential(norm), compiled=True):
        assert "forward" not in vars(norm)


def test_however_it_is_called() -> None:
    norm, heads = Norm(), HeadNorm()
    rows, wide = torch.randn(3, 24), torch.randn(3, 48)
    want, of_heads = norm(rows), heads(wide)
    with fused(nn.Sequential(norm, heads)):
        assert "forward" in vars(norm) and "forward" in vars(heads)
        torch.testing.assert_close(norm(x=rows), want)
        torch.testing.assert_close(norm(rows), want)
        torch.testing.assert_close(heads(wide), of_heads)


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


@pytest.mark.parametrize("kind", [NewGELUActivation, FastGELUActivation])
def test_so_is_that_of_a_gelu(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "forward", lambda self, rows: rows.relu())
    gelu, rows = kind(), torch.randn(3, 24)
    with fused(nn.Sequential(gelu)):
        assert torch.equal(gelu(rows), rows.relu())


def test_what_others_put_in_place_meanwhile_is_theirs() -> None:
    norms = [LlamaRMSNorm(24) for _ in range(3)]
    with fused(nn.Sequential(*norms)):
        del norms[0].forward
        norms[1].forward = own = lambda rows: rows
    assert norms[1].forward is own
    assert all("forward" not in vars(norm) for norm in (norms[0], norms[2]))


def test_threads_take_turns() -> None:
    model = nn.Sequential(*(LlamaRMSNorm(24) for _ in range(20)))
    rows = torch.randn(3, 24)
    want = model(rows)

    def enter(_: int) -> None:
        with fused(model):
            torch.testing.assert_close(model(rows), want)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(40)))
    assert all("forward" not in vars(norm) for norm in model)


def test_an_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(LlamaRMSNorm(24) for _ in range(5)))
    recognise, left = fused_module._fused_forward, [3]

    def pressing(module: nn.Module) -> Any:
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)
        return recognise(module)

    monkeypatch.setattr(fused_module, "_fused_forward", pressing)
    with pytest.raises(KeyboardInterrupt), fused(model):
        pytest.fail("the block is not begun")
    assert all("forward" not in vars(norm) for norm in model)


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    model = nn.Sequential(LlamaRMSNorm(24), ACT2FN["gelu_new"])
    with pytest.raises(KeyError, match="mine"), fused(model):
        raise KeyError("mine")
    assert all("forward" not in vars(module) for module in model)
