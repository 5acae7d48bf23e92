"""The decode kernels on a GPU, against the reference in float64."""

from __future__ import annotations

import random

import pytest
import torch
from tests.ops.attention_cases import RATIOS, random_case

decode = pytest.importorskip("pageforge.ops.decode", reason="needs triton")
from tests.ops.test_decode import run  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 40, 64, 80, 96, 112, 128, 256])
def test_any_batch(dtype: torch.dtype, dim: int) -> None:
    rng = random.Random(f"{dtype}{dim}")
    torch.manual_seed(rng.randrange(2**31))
    page_size = rng.choice([8, 16, 64, 256])
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 700, 3000]
    case = random_case(
        rng,
        lengths=[rng.choice(edges) for _ in range(rng.choice([1, 3, 17]))],
        heads=rng.choice(RATIOS),
        dim=dim,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
    )
    case.check(run(case))


@pytest.mark.parametrize("spike", [0, 15, 16, 63, 64, 127, 128, 2047, 2048, 4094, 4095])
def test_a_key_that_owns_the_softmax_is_neither_lost_nor_repeated(spike: int) -> None:
    torch.manual_seed(spike)
    case = random_case(
        random.Random(0),
        lengths=[4096, spike + 1, 1000],
        heads=(32, 8),
        dim=128,
        page_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        spike=spike,
        plain=True,
    )
    case.check(run(case))


def test_lengths_change_under_a_captured_graph() -> None:
    torch.manual_seed(0)
    case = random_case(
        random.Random(0),
        lengths=[2000, 3000, 1, 500],
        heads=(12, 12),
        dim=64,
        page_size=16,
        dtype=torch.float16,
        device="cuda",
        plain=True,
    )
    longest = case.seq_lens.clone()
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case)
    for lengths in ([1, 1, 1, 1], [2000, 17, 0, 64], [5, 3000, 1, 499]):
        case.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32).clamp(max=longest.cpu()))
        graph.replay()
        case.check(out)
