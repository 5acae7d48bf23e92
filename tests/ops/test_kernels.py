"""What kernels share, run by Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs triton")
from pageforge.ops.kernels import jit, row_of_block, tl  # noqa: E402


@jit()
def _rows_kernel(cu_ptr, out_ptr, num_rows, QUERIES: tl.constexpr):
    block = tl.program_id(0)
    tl.store(out_ptr + block, row_of_block(cu_ptr, num_rows, block, QUERIES))


def rows_of_blocks(cu_query_lens: Tensor, num_blocks: int, queries: int) -> list[int]:
    rows = torch.full((num_blocks,), -1, dtype=torch.int32, device=cu_query_lens.device)
    num_rows = len(cu_query_lens) - 1
    _rows_kernel[(num_blocks,)](cu_query_lens, rows, num_rows, QUERIES=queries)
    return rows.tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 255, 256, 257, 300])
def test_each_block_finds_its_row(num_rows: int) -> None:
    rng = random.Random(num_rows)
    queries = rng.choice([1, 4, 32])
    lens = [rng.choice([0, 1, 1, 1, queries, rng.randrange(100)]) for _ in range(num_rows)]
    ends = torch.tensor(lens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    firsts = [int(first) // queries + row for row, first in enumerate(cu[:-1])]
    num_blocks = int(cu[-1]) // queries + num_rows
    expected = [sum(first <= block for first in firsts) - 1 for block in range(num_blocks)]
    assert rows_of_blocks(cu, num_blocks, queries) == expected
