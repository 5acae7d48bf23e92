"""The decode kernels in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import random

import pytest
import torch
from tests.ops.attention_cases import RATIOS, Case, random_case

decode = pytest.importorskip("pageforge.ops.decode", reason="needs triton")

DIMS = [16, 40, 64, 80]


def run(case: Case, **more) -> torch.Tensor:
    plan = decode.plan_decode(
        case.seq_lens,
        num_kv_heads=case.key_pages.shape[1],
        key_dim=case.key_pages.shape[3],
        dtype=case.query.dtype,
        window=case.window,
        starts=case.starts,
    )
    return decode.attend_decode(
        case.query,
        case.key_pages,
        case.value_pages,
        case.page_table,
        case.seq_lens,
        plan,
        scale=case.query.shape[-1] ** -0.5,
        starts=case.starts,
        **case.options,
        **more,
    )


@pytest.mark.parametrize("seed", range(10))
def test_any_batch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size = rng.choice([8, 16, 32])
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2, 90]
    case = random_case(
        rng,
        lengths=[rng.choice(edges) for _ in range(rng.choice([1, 2, 4]))],
        heads=RATIOS[seed % len(RATIOS)],
        dim=rng.choice(DIMS),
        page_size=page_size,
        dtype=rng.choice([torch.float32, torch.float16]),  # bf16 is wrong in the interpreter,
    )
    case.check(run(case))


@pytest.mark.parametrize("spike", [0, 7, 8, 15, 16, 31, 32, 47, 63, 64])
def test_a_key_that_owns_the_softmax_is_neither_lost_nor_repeated(spike: int) -> None:
    torch.manual_seed(spike)
    case = random_case(
        random.Random(0),
        lengths=[65, spike + 1, 40],
        heads=(4, 2),
        dim=16,
        page_size=8,
        dtype=torch.float32,
        spike=spike,
        plain=True,
    )
    case.check(run(case))


def test_the_new_token_is_written_and_seen() -> None:
    torch.manual_seed(0)
    case = random_case(
        random.Random(0),
        lengths=[1, 8, 9, 70],
        heads=(9, 3),
        dim=24,
        page_size=8,
        dtype=torch.float32,
        plain=True,
    )
    last = case.seq_lens.long() - 1
    page = case.page_table[torch.arange(4), last // 8].long()
    key, value = (p[page, :, last % 8].clone() for p in (case.key_pages, case.value_pages))
    want = case.want()
    for pages in (case.key_pages, case.value_pages):
        pages[page, :, last % 8] = torch.nan
    slots = page * 8 + last % 8
    before = case.key_pages.clone()
    got = run(case, new_key=key, new_value=value, slot_mapping=slots)
    assert (got.double() - want).norm() <= 3e-6 * want.norm()
    assert torch.equal(case.key_pages[page, :, last % 8], key)
    assert torch.equal(case.value_pages[page, :, last % 8], value)
    before[page, :, last % 8] = key
    assert torch.equal(case.key_pages.nan_to_num(7), before.nan_to_num(7))


def test_one_long_row_is_cut_finer_than_short_ones() -> None:
    lens = torch.tensor([4, 400, 4, 0], dtype=torch.int32)
    plan = decode.plan_decode(lens, num_kv_heads=1, key_dim=16, dtype=torch.float32)
    size, count = plan.table[:2].tolist()
    first = plan.table[2:6].tolist()
    items = plan.table[6 : 6 + count].tolist()
    pieces = [[i & 0xFFFF for i in items if i >> 16 == row] for row in range(4)]
    assert [len(p) for p in pieces] == [1, -(-25 // size), 1, 1]
    assert all(p == list(range(len(p))) for p in pieces)
    assert first == [0, 1, 1 + len(pieces[1]), 2 + len(pieces[1])]
    assert count <= plan.max_pieces
