"""What Matplotlib draws is what Plotly draws."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure as Canvas

from pageforge.report.axis import Axis
from pageforge.report.palette import looks
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.curves import Curve, Curves
from pageforge.report.panels.dots import Dots, Row
from pageforge.report.panels.strips import Strip, Strips

MS = Axis("one step", "ms")
LOG = Axis("one step", "ms", log=True)


def axes_of(panel):
    axes = Canvas().subplots()
    panel.draw(axes, looks(panel.names))
    return axes


def points(xs, ys) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and not math.isnan(y)]


@pytest.mark.parametrize("style", ["line", "step", "points"])
def test_curves(style) -> None:
    curves = [
        Curve("paged", [0, 1, 2], [5.0, None, 7.0]),
        Curve("mine", [0, 2], [3.0, 4.0], low=[2.5, None], high=[3.5, 4.5]),
    ]
    panel = Curves("", Axis("step"), MS, curves, style, {"floor": 1.0})
    traces, axes = panel.traces(looks(panel.names)), axes_of(panel)
    assert [trace["name"] for trace in traces] == ["paged", "mine"]
    assert [points(t["x"], t["y"]) for t in traces] == [
        points(*line.get_data()) for line in axes.lines if line.get_label() in panel.names
    ]
    assert traces[1]["error_y"]["array"] == [0.5, 0.5]
    assert traces[1]["error_y"]["arrayminus"] == [0.5, 0]
    assert "error_y" not in traces[0]
    bottom, top = panel.layout()["yaxis"]["range"]
    assert (bottom, top) == pytest.approx(axes.get_ylim())
    assert bottom == 0
    assert top > 7
    assert panel.layout()["shapes"][0]["y0"] == 1.0


@pytest.mark.parametrize(("y", "anchor"), [([1.1, 3.0], "top"), ([0.9, 0.2], "bottom")])
def test_the_name_of_a_limit_stands_where_the_curves_are_not(y, anchor) -> None:
    panel = Curves("", Axis("step"), MS, [Curve("a", [0, 1], y)], limits={"no waste": 1.0})
    assert panel.layout()["annotations"][0]["yanchor"] == anchor
    (text,) = axes_of(panel).texts
    assert text.get_va() == anchor


def test_a_curve_upon_another_leaves_its_marks_to_be_seen() -> None:
    names = {"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [1.0, 3.0], "d": [7.0, 8.0]}
    panel = Curves("", Axis("x"), MS, [Curve(name, [0, 1], y) for name, y in names.items()])
    look = looks(panel.names)
    first, second, third, apart = (t["marker"]["size"] for t in panel.traces(look))
    assert first > second > third == apart
    sizes = [line.get_markersize() for line in axes_of(panel).lines]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3]
    assert len({item.marker for item in look.values()}) == 4


def test_a_logarithmic_axis_says_so_where_it_is_one() -> None:
    wide, narrow = (
        Curves("", Axis("size", log=True), LOG, [Curve("a", [1, end], [1.0, end])])
        for end in (100, 2)
    )
    assert wide.shown.title == "one step, ms (log scale)"
    assert wide.layout()["xaxis"]["title"]["text"] == "size (log scale)"
    assert axes_of(wide).get_xlabel() == "size (log scale)"
    assert narrow.shown.title == "one step, ms"
    assert axes_of(narrow).get_xlabel() == "size"


def test_a_logarithmic_axis_ends_where_the_data_do() -> None:
    panel = Dots("", LOG, [Row("a", {"P50": 4.1, "P99": 55.0})])
    low, high = axes_of(panel).get_xlim()
    assert 3 < low < 4.1
    assert 55 < high < 80


def test_long_names_of_rows_take_several_lines() -> None:
    panel = Bars("", MS, [Bar("a", 1.0, label="1024 pages of 589,824 bytes")])
    assert panel.layout()["yaxis"]["ticktext"] == ["1024 pages of<br>589,824 bytes"]
    (label,) = axes_of(panel).get_yticklabels()
    assert label.get_text() == "1024 pages of\n589,824 bytes"


def test_bars() -> None:
    bars = [Bar("engine", 101.0, 90.0, 104.0), Bar("generate", 8.814, note="1 GB/s")]
    panel = Bars("uniform", Axis("tokens a second"), bars)
    axes = axes_of(panel)
    assert [patch.get_width() for patch in axes.patches] == [101.0, 8.814]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["engine", "generate"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    traces = panel.traces(looks(panel.names))
    shown = [trace for trace in traces if trace["type"] == "bar"]
    assert [trace["x"] for trace in shown] == [[101.0], [8.814]]
    assert shown[0]["error_x"]["array"] == [3.0]
    assert shown[0]["error_x"]["arrayminus"] == [11.0]
    assert [t["text"] for t in traces if t["type"] == "scatter"] == [[" 101"], [" 8.81 (1 GB/s)"]]
    assert panel.layout()["yaxis"]["categoryarray"] == ["generate", "engine"]


def test_dots() -> None:
    rows = [Row("fast", {"P50": 0.7, "P99": 1.4}), Row("paged", {"P50": 8.0, "P99": 16.0})]
    panel = Dots("batch 1", LOG, rows)
    traces, axes = panel.traces(looks(panel.names)), axes_of(panel)
    assert [trace["x"] for trace in traces] == [[0.7, 1.4], [8.0, 16.0]]
    spans = [line.get_xdata() for line in axes.lines if line.get_label() in panel.names]
    assert [list(span) for span in spans] == [[0.7, 1.4], [8.0, 16.0]]
    assert axes.get_xscale() == "log"
    assert panel.layout()["xaxis"]["type"] == "log"


def test_strips() -> None:
    strips = [Strip("gpt2", {"paged": 0.0, "mine": 2e-3}), Strip("llama", {"mine": 1.0})]
    panel = Strips("float32", LOG, strips)
    traces, axes = panel.traces(looks(panel.names)), axes_of(panel)
    assert [points(t["x"], t["y"]) for t in traces] == [
        points(*line.get_data()) for line in axes.lines
    ]
    assert axes.get_xticklabels()[0].get_text() == "0"
    assert panel.layout()["xaxis"]["ticktext"][0] == "0"


def test_strips_of_nothing_but_zeros() -> None:
    panel = Strips("float32", LOG, [Strip("gpt2", {"paged": 0.0})])
    (trace,) = panel.traces(looks(panel.names))
    assert trace["x"] == [0.0]
    assert panel.layout()["xaxis"]["type"] == "linear"
    assert axes_of(panel).get_xscale() == "linear"


@pytest.mark.parametrize(
    "panel",
    [
        Curves("", Axis("step"), MS, [Curve("a", [0], [0.0])]),
        Curves("", Axis("step"), LOG, [Curve("a", [0], [None])]),
        Bars("", MS, [Bar("a", 0)]),
        Dots("", LOG, [Row("a", {"P50": 1.0})]),
    ],
    ids=["a curve at zero", "a curve of gaps", "a bar of nothing", "a single dot"],
)
def test_little_can_be_drawn(panel) -> None:
    axes_of(panel)
    panel.traces(looks(panel.names))
    panel.layout()
