"""The decode kernels in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.attention_cases import Step, bits, make_step, random_case
from torch import Tensor

decode = pytest.importorskip("pageforge.ops.decode", reason="needs triton")
from pageforge.ops import plan  # noqa: E402

FP16, FP32 = torch.float16, torch.float32  # bf16 is wrong in the interpreter
TILE = 16

KINDS: list[dict[str, Any]] = [  # every ratio of heads, head dim and page size
    {"heads": (12, 12), "dims": (16, 16), "page_size": 8, "dtype": FP32},
    {"heads": (32, 8), "dims": (64, 64), "page_size": 16, "dtype": FP16},
    {"heads": (28, 4), "dims": (40, 80), "page_size": 32, "dtype": FP32},
    {"heads": (9, 3), "dims": (80, 80), "page_size": 8, "dtype": FP32},
    {"heads": (8, 1), "dims": (256, 256), "page_size": 64, "dtype": FP16},
    {"heads": (12, 2), "dims": (112, 96), "page_size": 128, "dtype": FP16},
    {"heads": (24, 1), "dims": (128, 64), "page_size": 256, "dtype": FP32},
    {"heads": (2, 2), "dims": (24, 16), "page_size": 16, "dtype": FP16},
    {"heads": (40, 1), "dims": (16, 40), "page_size": 8, "dtype": FP16},
]


def name_of(kind: dict[str, Any]) -> str:
    (queries, keys), (key_dim, value_dim) = kind["heads"], kind["dims"]
    return f"{queries}/{keys}-{key_dim}/{value_dim}-{kind['page_size']}"


kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)


@pytest.fixture
def cut_into(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """About how many pieces a KV head's rows are cut into, and with how many two kernels merge."""

    def set_up(slots: int, merged_runs: int = decode.MERGED_RUNS, programs: int = 2) -> None:
        monkeypatch.setattr(plan, "num_processors", lambda _: slots)
        monkeypatch.setattr(decode, "num_processors", lambda _: programs)
        tiling = plan.Tiling(TILE, 1, 1, per_processor=8)
        monkeypatch.setattr(plan, "tiling_for", lambda *_: tiling)
        monkeypatch.setattr(decode, "MERGED_RUNS", merged_runs)
        monkeypatch.setattr(decode, "MERGED_BYTES", 1 << 40)

    return set_up


# --- right for any batch --------------------------------------------------------------------------


@kinds
def test_plain(kind: dict[str, Any]) -> None:
    """Keys at every edge of a tile or page share the softmax."""
    edges = [0, 7, 8, 15, 16, 31, 32, 39, 40, 47, 63, 64]
    step = make_step([65, 17, 1, 0], spikes=edges, spare=2, **kind)
    step.check(*step.run())


@kinds
def test_everything_at_once(kind: dict[str, Any], cut_into: Any) -> None:
    """Softcap, sinks, slopes, a window, left padding, and a new token that is written and seen."""
    cut_into(3)
    num_heads = kind["heads"][0]
    step = make_step(
        [50, 1, 0, 40],
        window=37,
        starts=[0, 0, 0, 20],
        softcap=20.0,
        sinks=torch.randn(num_heads).to(kind["dtype"]),
        alibi_slopes=torch.rand(num_heads) * 0.1,
        **kind,
    )
    check_write(step)


def check_write(step: Step, batch_invariant: bool = False) -> None:
    """The newest tokens are written to their slots, and nothing else anywhere; and are seen."""
    want = step.store.clone()
    new = step.take_newest()
    step.check(*step.run(new=new, batch_invariant=batch_invariant))
    assert torch.equal(bits(step.store), bits(want))


@given(st.integers(0, 10**6))
@settings(max_examples=15)
def test_any_options(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size = rng.choice([8, 16, 32])
    edges = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2, 70]
    case = random_case(
        rng,
        lengths=[rng.choice(edges) for _ in range(rng.choice([1, 2, 4]))],
        heads=rng.choice([(4, 2), (3, 1), (2, 2), (5, 1)]),
        dim=rng.choice([16, 24, 40]),
        page_size=page_size,
        dtype=rng.choice([FP16, FP32]),
    )
    options = dict(case.options)
    if case.window is not None:
        options["window"] = case.window
    if case.starts is not None:
        options["starts"] = case.starts
    step = Step(
        *(case.query, case.key_pages, case.key_pages, case.value_pages),
        *(case.page_table, case.seq_lens, options),
    )
    step.check(*step.run(batch_invariant=rng.random() < 0.3))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65])
def test_no_key_is_lost_or_counted_twice(length: int) -> None:
    """Of keys that all weigh the same, wherever pages, tiles and pieces end."""
    for batch_invariant in (False, True):
        step = make_step([length, 50], heads=(2, 1), uniform=True)
        step.check(*step.run(batch_invariant=batch_invariant))
        check_write(step, batch_invariant)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 16, 17])
def test_windows(window: int) -> None:
    """The first key in the window has the softmax, then the last one that is out of it."""
    lengths = [50, window, window + 1, 2 * window]
    for spike in (50 - window, 49 - window):
        step = make_step(lengths, heads=(2, 1), window=window, spikes=[spike])
        step.check(*step.run())
    check_write(step)


@pytest.mark.parametrize("start", [1, 8, 9, 39, 40, 41])
def test_left_padding(start: int) -> None:
    """Whose bytes are NaN; of one row no token is left."""
    step = make_step([40, 50, 5], heads=(2, 1), starts=[start] * 3, uniform=True)
    step.check(*step.run())


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("merged_runs", [0, 1 << 40], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("slots", [1, 4, 40])
def test_pieces_are_merged(
    slots: int, merged_runs: int, batch_invariant: bool, cut_into: Any
) -> None:
    """Into one, two or many, by the kernel itself or by a second one, and again from that plan."""
    cut_into(slots, merged_runs)
    for spikes in ([], [*range(0, 130, TILE), *range(TILE - 1, 130, TILE)]):
        step = make_step(
            [130, 18, 0],
            heads=(3, 1),
            dims=(16, 24),
            uniform=not spikes,
            spikes=spikes,
            sinks=torch.randn(3),
        )
        made = step.cut(batch_invariant=batch_invariant)
        pieces = int(made.table[0])
        assert pieces == 7 if batch_invariant else min(slots, 9) <= pieces <= 8 * slots + 3
        before = made.table.clone()
        first = step.run(plan=made, batch_invariant=batch_invariant)
        step.check(*first)
        taken = int(made.table[1])  # of the queue
        assert taken in (0, pieces)
        before[1] = taken
        assert torch.equal(made.table, before), "the counters are 0 again"
        second = step.run(plan=made, batch_invariant=batch_invariant)
        assert int(made.table[1]) == 2 * taken
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


def test_more_pieces_than_are_merged_at_once(cut_into: Any, monkeypatch: Any) -> None:
    decode._constants_for.cache_clear()
    monkeypatch.setattr(decode, "MERGED_AT_ONCE", 64)  # one piece of 4 heads and 16 dims
    cut_into(40, 1 << 40)
    step = make_step([90], heads=(3, 1), uniform=True, alibi_slopes=torch.rand(3) * 0.02)
    step.check(*step.run())
    decode._constants_for.cache_clear()
    cut_into(40, 0)
    step = make_step([550], heads=(3, 1), uniform=True)  # the second kernel takes 32 at once
    step.check(*step.run())


@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("merged_runs", [0, decode.MERGED_RUNS, 1 << 40])
def test_batch_invariant(merged_runs: int, has_new: bool, cut_into: Any, monkeypatch: Any) -> None:
    """A row's bits are the same alone, among any neighbours, and in a wider page table.

    The two ways to merge differ here in how many pieces they take at once. Rows end inside a tile,
    with a piece, and one token after: that one is the newest, and a piece of its own.
    """
    monkeypatch.setattr(decode, "MERGED_AT_ONCE", 32)
    decode._constants_for.cache_clear()
    cut_into(2, merged_runs)
    lengths, piece = [200, 33, 4 * TILE, 4 * TILE + 1], 2 * TILE
    assert all(length % piece in (0, 1, 8) for length in lengths)
    step = make_step(lengths, heads=(4, 1), dims=(16, 48), spare=40, sinks=torch.randn(4))
    new = step.take_newest() if has_new else None
    want = step.run(new=new, batch_invariant=True)
    step.check(*want)
    # Alone each piece is a run, among six a few are, and among twenty a row is one run.
    neighbours = ([0] * 6, 25), ([0] * 20, 25), ([0, 1] * 9, 25), ([1] * 20, 5)
    ends = ([2], 8), ([3], 9), ([3, 2], 9), ([2, 3, 0] * 6, 25)
    for rows, columns in (([0], 25), ([1], 5), ([1, 0], 30), ([1] * 5, 5), *neighbours, *ends):
        part = dataclasses.replace(
            step,
            query=step.query[rows],
            page_table=step.page_table[rows, :columns],
            seq_lens=step.seq_lens[rows],
        )
        its = None if new is None else (new[0][rows], new[1][rows])
        got = part.run(new=its, batch_invariant=True)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other[rows]), rows
    decode._constants_for.cache_clear()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_that_are_smaller_than_those_planned(
    batch_invariant: bool, cut_into: Any, monkeypatch: Any
) -> None:
    """As where heads of V are wider than those of K."""
    cut_into(4)
    tiling = plan.Tiling(2 * TILE, 1, 1, per_processor=8)
    monkeypatch.setattr(plan, "tiling_for", lambda *_: tiling)
    edges = [15, 16, 31, 32, 63, 64, 127, 128]
    for options in ({"spikes": edges}, {"uniform": True}):
        step = make_step([130, 129, 128, 65, 1], heads=(2, 1), **options)
        step.check(*step.run(batch_invariant=batch_invariant))
        check_write(step, batch_invariant)


@pytest.mark.parametrize("sums", [1, 4])
def test_weights_are_added_up_by_place(sums: int, monkeypatch: Any) -> None:
    decode._constants_for.cache_clear()
    monkeypatch.setattr(decode, "SUMS", sums)
    step = make_step([65, 17, 1, 0], heads=(3, 1))
    step.check(*step.run())
    decode._constants_for.cache_clear()


@pytest.mark.parametrize(("tiles", "kernels"), [(3, 1), (4, 2)])
def test_many_runs_are_merged_by_a_second_kernel(
    tiles: int, kernels: int, monkeypatch: Any
) -> None:
    launched = []
    for launcher in (decode._decode_launcher, decode._merge_launcher):
        real = launcher.prepare
        monkeypatch.setattr(
            launcher, "prepare", lambda *args, real=real: launched.append(real) or real(*args)
        )
    monkeypatch.setattr(plan, "num_processors", lambda _: 40)
    step = make_step([tiles * TILE], heads=(2, 1), spare=0)
    step.check(*step.run())
    assert len(launched) == kernels


# --- rows that are none ---------------------------------------------------------------------------


def test_rows_without_tokens_give_0_and_write_nothing() -> None:
    step = make_step([0, 20, 0])
    want = step.store.clone()
    new = step.take_newest()
    for part in new:
        part[[0, 2]] = torch.nan
    out, lse = step.run(new=new)
    assert not out[[0, 2]].any() and bool(lse[[0, 2]].isneginf().all())
    assert torch.equal(bits(step.store), bits(want))


def test_a_token_whose_page_is_the_padding_page_is_written_nowhere() -> None:
    step = make_step([20, 9])
    new = step.take_newest()
    step.page_table[1, 1] = 0
    before = step.store.clone()
    out, _ = step.run(new=new)
    assert not out.isnan().any()
    changed = (bits(step.store) != bits(before)).any(1).nonzero().flatten().tolist()
    assert changed == [int(step.page_table[0, 2])]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_longer_than_their_pages_give_nan_and_write_nothing(batch_invariant: bool) -> None:
    step = make_step([40, 33, 64], spare=0)
    new = step.take_newest()
    step.seq_lens[2] = 65
    before = step.store.clone()
    out, _ = step.run(new=new, batch_invariant=batch_invariant)
    assert bool(out[2].isnan().all()) and not out[:2].isnan().any()
    mine = step.page_table[2].long()
    assert torch.equal(bits(step.store[mine]), bits(before[mine]))


def test_no_rows() -> None:
    step = make_step([], spare=3)
    out, lse = step.run()
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("merged_runs", [0, 1 << 40])
def test_only_rows_of_one_query(merged_runs: int, cut_into: Any) -> None:
    """In a batch of which the other kernel serves the rest."""
    cut_into(5, merged_runs)
    step = make_step([150, 20, 0, 70, 9])
    bounds = torch.tensor([0, 1, 4, 5, 5, 6], dtype=torch.int32)
    table, max_pieces, *_ = step.cut(cu_query_lens=bounds)
    query = torch.randn(7, *step.query.shape[1:])
    served = {0: 0, 2: 4, 4: 5}  # row: token
    for row, token in served.items():
        step.query[row] = query[token]
    out = torch.full((7, 4, 16), 77.0)
    lse = torch.full((7, 4), 77.0)
    decode.attend_decode(
        *(query, step.key_pages, step.value_pages, step.page_table, table, max_pieces, out),
        scale=step.scale,
        cu_query_lens=bounds,
        lse=lse,
    )
    want, want_lse = step.want()
    for row, token in served.items():
        torch.testing.assert_close(out[token].double(), want[row], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[token].double(), want_lse[row], rtol=1e-5, atol=1e-6)
    others = [1, 2, 3, 6]
    assert bool((out[others] == 77).all() and (lse[others] == 77).all())


# --- where things lie -----------------------------------------------------------------------------


def test_inputs_of_any_strides() -> None:
    step = make_step([60, 8, 1], heads=(4, 2), dims=(24, 16), page_size=8)
    want = step.store.clone()
    new = step.take_newest()
    holes = step.store.clone()
    table = step.page_table

    def check(query: Tensor, key: Tensor, value: Tensor) -> None:
        step.store.copy_(holes)
        moved = dataclasses.replace(step, query=query)
        moved.check(*moved.run(new=(key, value)))
        assert torch.equal(bits(step.store), bits(want))

    def sliced(part: Tensor) -> Tensor:
        wide = torch.full((part.shape[0], part.shape[1] + 3, part.shape[2] + 5), torch.nan)
        wide[:, 1:-2, 3:-2] = part
        return wide[:, 1:-2, 3:-2]

    def transposed(part: Tensor) -> Tensor:
        return part.transpose(0, 1).contiguous().transpose(0, 1)

    for move in (sliced, transposed):
        check(*(move(part) for part in (step.query, *new)))
    wide = torch.full((3, 40), 2**30, dtype=torch.int32)
    wide[:, 5 : 5 + table.shape[1]] = table
    step.page_table = wide[:, 5 : 5 + table.shape[1]]
    check(step.query, *new)


@pytest.mark.parametrize("of_pages", [FP16, FP32])
def test_a_new_token_of_another_dtype_is_cast(of_pages: torch.dtype) -> None:
    step = make_step([20, 9], dtype=of_pages)
    new = step.take_newest()
    other = FP32 if of_pages == FP16 else FP16
    got = step.run(new=(new[0].to(other), new[1]))
    step.check(*got)


@pytest.mark.parametrize("units", [1 << 32, 0], ids=["narrow", "wide"])
@pytest.mark.parametrize("page", [2**15, 2**15 + 1])
def test_offsets_need_64_bits(page: int, units: int, monkeypatch: Any) -> None:
    """Page ids, and heads of a query, times their strides. (Memory that is not touched is free.)

    With pages of an odd size an offset is as many units, which takes all bits of an unsigned int32.
    """
    monkeypatch.setattr(decode, "UNITS", units)
    step = make_step([9, 3], heads=(2, 1), dims=(16, 16), page_size=8, dtype=FP16)
    far = torch.empty(2**16 + 2, page, dtype=FP16)
    ids = {int(old): 2**16 - 1 + at for at, old in enumerate(step.page_table.unique()[1:])}
    elements = step.store.shape[1]
    for old, new in ids.items():
        far[new, :elements] = step.store[old]
    split = elements // 4
    layer = far[:, elements // 2 :]
    want = step.want()
    step.key_pages = layer[:, :split].unflatten(1, (1, 8, 16))
    step.value_pages = layer[:, split : 2 * split].unflatten(1, (1, 8, 16))
    for old, new in ids.items():
        step.page_table[step.page_table == old] = new
    step.want = lambda: want  # type: ignore[method-assign]
    step.check(*step.run())
    wide = torch.empty(2**31 + 64, dtype=FP16)
    query = wide.as_strided((2, 2, 16), (16, 2**31, 1))
    query.copy_(step.query)
    step.query = query
    step.check(*step.run())


@pytest.mark.parametrize("merged_runs", [0, 1 << 40], ids=["two kernels", "one kernel"])
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_programs_that_take_one_run_after_the_other(
    programs: int, merged_runs: int, cut_into: Any
) -> None:
    """Fewer programs than runs, and more; and the plan serves the next layer too."""
    cut_into(6, merged_runs, programs)
    step = make_step([130, 18, 0, 70, 1], heads=(4, 2), spikes=[0, 15, 16, 63, 64, 100, 129])
    new, made = step.take_newest(), step.cut()
    for _ in range(3):
        step.check(*step.run(plan=made, new=new))
