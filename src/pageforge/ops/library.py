"""How ops are made known to torch: the `pageforge` namespace of `torch.library`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("pageforge", "DEF")
"""`Library` and not `torch.library.custom_op`, whose Python wrapper costs more than a kernel does
at batch 1."""


def register(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Make `pageforge::<name>` known by its schema, with what it does on each device.

    `fake` makes outputs of the right shape without data: torch.compile and fake tensors use it.
    Arguments that are written to are marked `Tensor(a!)` in the schema. There is no derivative.
    Returns the op.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"pageforge::{name}", fake, lib=LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.pageforge, name).default
    return op
