"""What a benchmark may change while it runs, and must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def _allow_cudnn_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "cuDNN attention": (
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "plain attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cuDNN TF32": (lambda: torch.backends.cudnn.allow_tf32, _allow_cudnn_tf32),
    "random numbers": (torch.get_rng_state, torch.set_rng_state),
    "Python's random numbers": (random.getstate, random.setstate),
    "numpy's random numbers": (np.random.get_state, np.random.set_state),
}
"""Of the whole process: how each is read, and how it is set."""


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Afterwards settings and random numbers are as before, and memory is given back."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        for name, (_, write) in SETTINGS.items():
            write(before[name])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        give_back(device)


def give_back(device: torch.device) -> None:
    """Let go of what nobody holds: compiled code, circles of objects, torch's spare memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Let `scaled_dot_product_attention` choose cuDNN, or not."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
