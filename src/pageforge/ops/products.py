"""products: several matrix products of one input, side by side on the device.

The products of Q, K and V of a few rows are each too small to fill a large GPU, and one after the
other they are mostly starts and ends. A captured graph can run them at the same time: none waits
for another. (One product with all weights put together is faster still, but takes a copy of them,
which does not follow when they are trained.)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pageforge.ops.library import register

MOST_ROWS = 128
"""With more rows products fill the device one by one. (Llama 3.1 8B's three on an H200, in us, one
after the other and side by side: 1 row 29.0 and 18.2, 32 rows 30.2 and 19.1, 128 rows 31.5 and
26.5, 256 rows 38.1 and 35.7, 1,024 rows 73 and 76.)"""

BRANCHES = 3
"""At a time: for each there is a stream, and cuBLAS takes a workspace for each stream."""


def _one_by_one(input: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [input @ weight.t() for weight in weights]


def _side_by_side(input: Tensor, weights: list[Tensor]) -> list[Tensor]:
    with torch.cuda.device(input.device):
        if len(input) > MOST_ROWS or not torch.cuda.is_current_stream_capturing():
            return _one_by_one(input, weights)
        current = torch.cuda.current_stream()
        branches = [current, *_side_streams(input.device)][: len(weights)]
        outputs = [input.new_empty(len(input), len(weight)) for weight in weights]  # `current`'s
        for branch in branches[1:]:
            branch.wait_stream(current)
        for place, (weight, output) in enumerate(zip(weights, outputs, strict=True)):
            with torch.cuda.stream(branches[place % len(branches)]):
                torch.mm(input, weight.t(), out=output)
        for branch in branches[1:]:
            current.wait_stream(branch)
        return outputs


@functools.cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """For captures on `device`, of which `graphs.py` makes one at a time."""
    return [torch.cuda.Stream(device) for _ in range(BRANCHES - 1)]


def _fake(input: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [input.new_empty(input.shape[0], weight.shape[0]) for weight in weights]


products = register(
    "products(Tensor input, Tensor[] weights) -> Tensor[]",
    cpu=_one_by_one,
    cuda=_side_by_side,
    fake=_fake,
)
"""`input @ weight.T` for each weight, `[M, N]` of `[M, K]` and `[N, K]`: an op for `compiling.py`.

While a CUDA graph is captured those of up to MOST_ROWS rows become branches of it.
"""
