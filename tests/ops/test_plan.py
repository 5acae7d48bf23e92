"""How a decode step is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from pageforge.geometry import ceil_div
from pageforge.ops import plan

GARBAGE = 0x7FC07FC0
"""What an int32 of uninitialised memory may be: NaN, if it was floats."""


class Run(NamedTuple):
    """One of the runs of a plan, as the kernel reads it."""

    row: int
    begin: int
    end: int
    pieces_and_last: int
    place: int
    runs: int
    size: int

    def pieces(self) -> list[tuple[int, int]]:
        """(first token, token after the last) of each of its pieces, with `batch_invariant`."""
        starts = range(self.begin, max(self.end, self.begin + 1), self.size)
        return [(start, min(start + self.size, self.end)) for start in starts]


def make_plan(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    tile: int = 16,
    processors: int = 2,
    max_seq_len: int = 5000,
    starts: Sequence[int] | None = None,
    cu_query_lens: Sequence[int] | None = None,
    **options: Any,
) -> plan.DecodePlan:
    """A plan whose memory held garbage before."""

    def ints(values: Sequence[int] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    def dirty(size: int, **like: Any) -> torch.Tensor:
        return torch.full((size,), GARBAGE, **like)

    tiling = plan.Tiling(tile, 1, 1, per_processor=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "tiling_for", lambda *_: tiling)
        patch.setattr(plan, "num_processors", lambda _: processors)
        patch.setattr(plan.torch, "empty", dirty)
        return plan.plan_decode(
            torch.tensor(lengths, dtype=torch.int32),
            num_kv_heads=heads,
            key_dim=16,
            dtype=torch.float32,
            max_seq_len=max_seq_len,
            starts=ints(starts),
            cu_query_lens=ints(cu_query_lens),
            **options,
        )


def runs_of(made: plan.DecodePlan, num_rows: int, heads: int = 2) -> list[Run]:
    """In the order in which they begin."""
    number = int(made.table[0])
    assert number <= made.max_pieces
    first = plan.HEADER + num_rows + 1 + num_rows * heads
    assert first + plan.RUN * made.max_pieces == len(made.table)
    fields = made.table[first : first + plan.RUN * number].view(number, plan.RUN)
    return [Run(*run) for run in fields.tolist()]


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    most = draw(st.sampled_from([0, 40, 300, 5000]))
    length = st.one_of(
        st.integers(0, most), st.sampled_from([0, min(1, most), min(16, most), most])
    )
    lengths = draw(st.lists(length, min_size=1, max_size=70))
    step: dict[str, Any] = {
        "lengths": lengths,
        "heads": draw(st.integers(1, 5)),
        "tile": draw(st.sampled_from([16, 64, 128])),
        "processors": draw(st.sampled_from([1, 2, 5, 33])),
        "max_seq_len": most + draw(st.sampled_from([0, 0, 1, 700])),
        "window": draw(st.sampled_from([None, None, 1, 15, 16, 17, 100, 6000])),
        "batch_invariant": draw(st.booleans()),
    }
    per_row = {"min_size": len(lengths), "max_size": len(lengths)}
    if draw(st.booleans()):  # padding, of rows without tokens too
        step["starts"] = draw(st.lists(st.integers(0, most + 9), **per_row))
    if draw(st.booleans()):
        queries = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 90]), **per_row))
        step["cu_query_lens"] = [sum(queries[:row]) for row in range(len(lengths) + 1)]
    return step


@given(steps())
@settings(max_examples=150)
def test_every_token_is_in_one_piece(step: dict[str, Any]) -> None:
    lengths, heads, tile = step["lengths"], step["heads"], step["tile"]
    rows = len(lengths)
    made = make_plan(**step)
    runs = runs_of(made, rows, heads)
    start = plan.HEADER
    firsts = made.table[start : start + rows + 1].tolist()
    start += rows + 1
    assert not made.table[start : start + rows * heads].any(), "the counters"
    assert made.table[1] == 0, "the queue"
    num_pieces = 0

    for row, length in enumerate(lengths):
        mine = sorted((run for run in runs if run.row == row), key=lambda run: run.place)
        assert firsts[row] == num_pieces
        bounds = step.get("cu_query_lens")
        if bounds is not None and bounds[row + 1] - bounds[row] != 1:
            assert mine == []
            continue
        pieces = [run.pieces() if step["batch_invariant"] else [run[1:3]] for run in mine]
        places = [
            run.place + number
            for run, of in zip(mine, pieces, strict=True)
            for number in range(len(of))
        ]
        count = len(places)
        assert places == list(range(num_pieces, num_pieces + count))
        if len(mine) > 1:  # else it leaves nothing for others to merge
            num_pieces += count
        assert {run.runs for run in mine} == {len(mine)}
        assert [run.pieces_and_last for run in mine] == [2 * count] * (len(mine) - 1) + [
            2 * count + 1
        ]
        low = min(step["starts"][row], length) if "starts" in step else 0
        if step["window"] is not None:
            low = max(low, length - step["window"])
        flat = [piece for of in pieces for piece in of]
        assert (flat[0][0], flat[-1][1]) == (low, length)
        for one, other in itertools.pairwise(flat):
            assert one[1] == other[0]
        sizes = [ceil_div(end - begin, tile) for begin, end in flat]
        assert all((end - begin) % tile == 0 for begin, end in flat[:-1])
        assert sum(sizes) == ceil_div(length - low, tile)
        if step["batch_invariant"]:
            assert len(set(sizes[:-1])) <= 1
        else:
            assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0 or (count == 1 and low == length)

    assert firsts[-1] == num_pieces <= made.max_pieces
    slots = max(1, 4 * step["processors"] // heads)
    tiles = [ceil_div(run.end - run.begin, tile) for run in runs]
    if len(runs) > slots:
        longer = itertools.accumulate(tiles, min)
        allowed = 2 + max(tiles) / plan.CLASSES
        if step["batch_invariant"]:
            allowed += max(run.size for run in runs) / tile
        assert all(now - before <= allowed for now, before in zip(tiles, longer, strict=True)), (
            "the longest come first"
        )
    if not step["batch_invariant"]:
        fair = max(1, ceil_div(sum(tiles), slots))
        assert max(tiles, default=0) < 2 * fair + ceil_div(fair, 16), "no program runs alone"


@given(steps())
@settings(max_examples=40)
def test_batch_invariant(step: dict[str, Any]) -> None:
    """A row has the pieces that it would have alone, under another bound, on another device."""
    step["batch_invariant"] = True
    step.pop("cu_query_lens", None)
    lengths, heads = step["lengths"], step["heads"]

    def pieces(runs: list[Run], row: int) -> list[tuple[int, int]]:
        mine = sorted((run for run in runs if run.row == row), key=lambda run: run.place)
        return [piece for run in mine for piece in run.pieces()]

    runs = runs_of(make_plan(**step), len(lengths), heads)
    for row in {0, len(lengths) // 2, len(lengths) - 1}:
        alone: dict[str, Any] = {**step, "lengths": [lengths[row]], "max_seq_len": lengths[row]}
        if "starts" in step:
            alone["starts"] = [step["starts"][row]]
        assert pieces(runs, row) == pieces(
            runs_of(make_plan(**{**alone, "processors": 50}), 1, heads), 0
        )


def test_a_row_longer_than_its_pages() -> None:
    """Is one piece that names no token."""
    for batch_invariant in (False, True):
        runs = runs_of(
            make_plan([65, 64, 2**31 - 1], max_seq_len=64, batch_invariant=batch_invariant), 3
        )
        assert [run[1:4] for run in runs if run.row != 1] == [(-1, -1, 3)] * 2
        assert [(run.begin, run.end) for run in runs if run.row == 1][-1][1] == 64


def test_no_rows() -> None:
    assert runs_of(make_plan([]), 0) == []


def test_a_long_row_among_short_ones_is_cut_finer() -> None:
    runs = runs_of(make_plan([4000, 16, 16, 16], processors=8, heads=1), 4, 1)
    assert sum(run.row == 0 for run in runs) > 20
    assert [run.row for run in runs[-3:]] == [1, 2, 3]


def test_the_bound_of_the_number_of_pieces_does_not_depend_on_the_lengths() -> None:
    """Which only the device knows; a graph captured with others must serve these too."""
    bounds = {make_plan(lengths).max_pieces for lengths in ([0, 0], [1, 5000], [5000, 5000])}
    assert len(bounds) == 1
