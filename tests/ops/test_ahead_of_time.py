"""Every kernel compiles for every GPU that it may meet, and fits there; no GPU is needed.

The ops are called on the CPU as if a GPU of some architecture were there, and what they would
launch is compiled for it. This goes on in two processes of their own: here kernels are interpreted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import multiprocessing
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention_cases import make_step

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

SHARED_BYTES = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""Shared memory that a block can have, by compute capability."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Job(NamedTuple):
    """A call of an op on a GPU that is not there."""

    what: str  # the name of a function below
    arch: int
    dtype: str = "fp16"
    dims: tuple[int, int] = (128, 128)
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        more = ",".join(f"{name}={value}" for name, value in self.more)
        return f"{self.what}-sm{self.arch}-{self.dtype}-{self.dims[0]}/{self.dims[1]}-{more}"


class Compiled(NamedTuple):
    """A kernel that the op launched."""

    name: str
    shared: int
    stages: int
    ptx: str


# --- what is compiled -----------------------------------------------------------------------------


def decode(
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int] = (32, 8),
    lengths: tuple[int, ...] = (4000, 100),
    **more: Any,
) -> None:
    """A piece's kernel, the merging kernel, and the plan's."""
    from pageforge.ops.decode import attend_decode

    if more.pop("everything", False):
        slopes = torch.rand(heads[0])
        more |= {"softcap": 30.0, "alibi_slopes": slopes, "sinks": slopes.to(dtype)}
        more |= {"window": 512, "starts": [0, 7]}
        more["lse"] = torch.zeros(2, heads[0])
        more["cu_query_lens"] = torch.arange(3).int()
    lse, bounds = more.pop("lse", None), more.pop("cu_query_lens", None)
    stages = more.pop("stages", None)
    step = make_step((9, 9), heads=heads, dims=dims, page_size=16, dtype=dtype, **more)
    step.page_table = step.page_table.repeat(1, 4096)
    new_key, new_value = step.take_newest() if bounds is None else (None, None)
    if stages is not None:
        module = importlib.import_module("pageforge.ops.decode")
        usual = module.tiling_for
        module.tiling_for = lambda *args: usual(*args)._replace(num_stages=stages)
    del step.options["window"], step.options["starts"]
