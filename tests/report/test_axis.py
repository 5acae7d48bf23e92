from __future__ import annotations

import pytest

from pageforge.report.axis import Axis, rounded

BYTES = Axis("bytes", "B", prefixed=True)
MS = Axis("one step", "ms")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (101562.73, "101,563"),
        (101563, "101,563"),
        (5.45449, "5.454"),
        (0.69, "0.69"),
        (0.0026, "0.0026"),
        (3.2e-6, "3.200e-6"),
        (1e-7, "1e-7"),
        (-12.5, "-12.5"),
    ],
)
def test_numbers_keep_four_digits_or_all_of_a_whole_one(value: float, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (603_979_776, "604 MB"),
        (20_971_520, "20.97 MB"),
        (4.66e12, "4.66 TB"),
        (7e15, "7,000 TB"),
    ],
)
def test_bytes_have_a_prefix(value: float, text: str) -> None:
    assert BYTES.text(value) == text


def test_a_unit_stands_in_the_title_or_at_the_ticks() -> None:
    assert MS.title == "one step, ms"
    assert MS.plotly([])["ticksuffix"] == ""
    assert Axis("one step", "ms", log=True).title == "one step, ms (log scale)"
    assert BYTES.title == "bytes"
    assert BYTES.plotly([])["ticksuffix"] == "B"
    flops = Axis("operations a second", "FLOP/s", prefixed=True)
    assert flops.title == "operations a second, FLOP/s"
    assert flops.plotly([])["ticksuffix"] == ""


@pytest.mark.parametrize(
    ("reached", "ticks"),
    [
        ([0.4, 9], [0.5, 1, 2, 5]),
        ([0.4, 12], [1, 10]),
        ([1, 900], [1, 10, 100]),
        ([4.1, 55], [5, 10, 20, 50]),
        ([1e-6, 3], [1e-6, 1e-4, 1e-2, 1]),
        ([0, 2, 30], [2, 5, 10, 20]),
        ([0], None),
        ([], None),
    ],
)
def test_a_logarithmic_axis_has_few_round_ticks(reached: list[float], ticks: object) -> None:
    found = Axis("x", log=True).plotly(reached).get("tickvals")
    assert found == (ticks if ticks is None else pytest.approx(ticks))


def test_an_axis_of_a_few_values_has_these_ticks() -> None:
    axis = Axis("tokens a page", log=True, values=[8, 16, 1024]).plotly([8, 1024])
    assert axis["tickvals"] == [8, 16, 1024]
    assert axis["ticktext"] == ["8", "16", "1,024"]


@pytest.mark.parametrize(
    ("axis", "reached", "is_log"),
    [
        (Axis("x", log=True), [0.4, 12], True),
        (Axis("x", log=True), [13.9, 15.4], False),
        (Axis("x", log=True), [0, 5], False),
        (Axis("x", log=True), [], False),
        (Axis("x", log=True, values=[8, 16]), [8, 16], True),
        (Axis("x"), [1, 1000], False),
    ],
)
def test_an_axis_is_logarithmic_where_that_shows_more(
    axis: Axis, reached: list[float], is_log: bool
) -> None:
    assert axis.fitted(reached).log is is_log
