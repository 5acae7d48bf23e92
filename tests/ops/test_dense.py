"""Attention over pages on the CPU, against the reference in float64."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from tests.ops.attention_cases import RATIOS, TOLERANCE, random_case
from torch.nn.functional import scaled_dot_product_attention

from pageforge.ops import dense, reference
from pageforge.ops.dense import attend_dense, write_and_attend_dense


def check(case, counts: list[int]) -> None:
    """Row `s` asks with its last `counts[s]` tokens."""
    bounds = torch.tensor([0, *counts]).cumsum(0)
    heads, dim = case.query.shape[1:]
    query = torch.randn(sum(counts), heads, dim).to(case.query.dtype)
    arguments = (case.key_pages, case.value_pages, case.page_table, case.seq_lens, bounds)
    more = {"scale": 0.3, "window": case.window, "starts": case.starts, **case.options}
    got = attend_dense(query, *arguments, **more)
    want, _ = reference.attend(query.double(), *arguments, **more)
    assert got.shape == want.shape
    assert got.dtype == query.dtype
    assert not got.isnan().any()
    if sum(counts):
        error = (got.double() - want).flatten(1).norm(dim=1)
        allowed = TOLERANCE[got.dtype] * want.flatten(1).norm(dim=1).clamp(min=1e-3)
        assert (error <= allowed).all(), (error / allowed).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_any_batch(seed: int, alike: bool, dtype: torch.dtype) -> None:
    """Every byte that no token owns is NaN: left padding, page tails, page 0."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size = rng.choice([8, 16, 32])
    edges = [1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2, 90]
    rows = rng.choice([1, 2, 4])
    if alike:
        lengths = [rng.choice(edges)] * rows
        counts = [rng.choice([1, 1, max(1, lengths[0] // 2), lengths[0]])] * rows
    else:
        lengths = [rng.choice([0, *edges]) for _ in range(rows)]
        counts = [rng.choice([0, min(1, length), length]) for length in lengths]
    case = random_case(
        rng,
        lengths=lengths,
        heads=RATIOS[seed % len(RATIOS)],
        dim=rng.choice([8, 16, 40, 64]),
        page_size=page_size,
        dtype=dtype,
    )
    check(case, counts)


@pytest.mark.parametrize("sinks", [False, True])
def test_queries_that_see_nothing_give_zero(sinks: bool) -> None:
    """Those in the left padding, of one row or of all."""
    for starts in ([0, 6, 12], [12, 12, 12]):
        case = random_case(
            random.Random(0),
            lengths=[12, 12, 12],
            heads=(4, 2),
            dim=16,
            page_size=8,
            dtype=torch.float32,
            plain=True,
        )
        case.starts = torch.tensor(starts)
        if sinks:
            case.options["sinks"] = torch.randn(4)
        check(case, [12, 12, 12])
        check(case, [1, 1, 1])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("is_faster", [True, False])
def test_a_query_alone_is_asked_twice_where_that_is_faster(
    heads: tuple[int, int], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then without the copy, also where it sees nothing."""
    asked = []

    def attention(query: torch.Tensor, *args: torch.Tensor, **more: object) -> torch.Tensor:
        asked.append(query.shape[2])
        return scaled_dot_product_attention(query, *args, **more)

    monkeypatch.setattr(dense, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(dense, "_two_are_faster", lambda *_: is_faster)
    case = random_case(
        random.Random(0),
        lengths=[20, 20, 20],
        heads=heads,
        dim=16,
        page_size=8,
        dtype=torch.bfloat16,
    )
    case.starts, case.window, case.options = torch.tensor([0, 20, 3]), None, {}
    check(case, [1, 1, 1])
    assert set(asked) == {2 if is_faster or heads == (4, 2) else 1}


def test_rows_that_ask_nothing() -> None:
    case = random_case(
        random.Random(0),
        lengths=[0, 12],
        heads=(4, 2),
        dim=16,
        page_size=8,
        dtype=torch.float32,
        plain=True,
    )
    check(case, [0, 0])
    check(case, [0, 3])


@pytest.mark.parametrize("most", [1, 3000, 1 << 20])
def test_few_rows_at_a_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is gathered at a time, and also where K and V do not lie side by side."""
    monkeypatch.setattr(dense, "GATHERED_BYTES", most)
    monkeypatch.setattr(dense, "_kept", threading.local())
    for lengths in ([20] * 5, [20, 20, 7, 20], [90]):
        case = random_case(
            random.Random(0),
            lengths=lengths,
            heads=(4, 2),
            dim=16,
            page_size=8,
            dtype=torch.float32,
            plain=True,
        )
        check(case, [1] * len(lengths))
        case.value_pages = case.value_pages.clone()
        check(case, [1] * len(lengths))


@pytest.mark.parametrize("apart", [False, True], ids=["one matrix", "apart"])
@pytest.mark.parametrize("starts", [None, [0, 5, 9, 3]])
def test_the_new_token_is_written_and_seen(starts: list[int] | None, apart: bool) -> None:
    case = random_case(
        random.Random(0),
        lengths=[17, 8, 9, 0],
        heads=(4, 2),
        dim=16,
        page_size=8,
        dtype=torch.float32,
        plain=True,
    )
    case.starts = None if starts is None else torch.tensor(starts).int()
    case.page_table[1] = 0  # whose page is absent
    if apart:
        case.value_pages = case.value_pages.clone()
    before = case.key_pages.clone(), case.value_pages.clone()
    new = torch.randn(4, 2, 16), torch.randn(4, 2, 16).bfloat16()
    got = write_and_attend_dense(
        case.query,
        *new,
        case.key_pages,
        case.value_pages,
        case.page_table,
        case.seq_lens,
        scale=0.25,
        starts=case.starts,
    )
    for pages, was, states in zip((case.key_pages, case.value_pages), before, new, strict=True):
        written = {0: (case.page_table[0, 2], 0)}
        if starts is None:
            written[2] = (case.page_table[2, 1], 0)
        for row, (page, offset) in written.items():
            assert torch.equal(pages[page, :, offset], states[row])
            was[page, :, offset] = states[row]
        assert torch.equal(pages.nan_to_num(7.0), was.nan_to_num(7.0))
    rows = [0] if starts else [0, 2]
    want, _ = reference.attend(
        case.query[rows].double(),
        case.key_pages,
        case.value_pages,
        case.page_table[rows],
        case.seq_lens[rows],
        torch.arange(len(rows) + 1),
        scale=0.25,
        starts=None if case.starts is None else case.starts[rows],
    )
    assert (got[rows] - want).abs().max() < 1e-5
    assert not got[3].any()


def test_in_and_out_of_inference_mode() -> None:
    case = random_case(
        random.Random(0),
        lengths=[20, 20],
        heads=(4, 2),
        dim=16,
        page_size=8,
        dtype=torch.float32,
        plain=True,
    )
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            check(case, [1, 1])
