"""Pictures: everything in its place, whatever the names' lengths, and said of what it is."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from tests.report import samples

from pageforge.report.axis import Axis
from pageforge.report.charts import CHARTS
from pageforge.report.figures import Figure
from pageforge.report.panels.bars import Bar, Bars
from pageforge.report.panels.curves import Curve, Curves
from pageforge.report.pictures import canvas

TOLD = "gpt2 on NVIDIA H200. Quick: few cases, not a measurement"

LONG = "sharegpt, 512 requests, in all 110,759 prompt tokens, 113,364 new tokens"
PANELS = {
    "bars": [
        Bars(LONG, Axis("tokens a second"), [Bar("engine compiled", 7908.0), Bar("engine", 1.0)]),
        Bars(LONG, Axis("tokens a second"), [Bar("engine", 7234.0)]),
    ],
    "long names": [
        Bars("swap_out", Axis("share of a plain copy's rate"), [Bar(name, 0.9, note="51.9 GB/s")])
        for name in ("1024 pages of 589,824 bytes", "a name of many letters, and of more words")
    ],
    "bytes": [
        Bars("", Axis("bytes", "B", prefixed=True), [Bar("pageforge, prompt once", 182e6)])
        for _ in range(2)
    ],
    "a long legend": [
        Curves(
            LONG,
            Axis("tokens a page"),
            Axis("times the live tokens' bytes"),
            [Curve(f"1/{part} of the pages that are needed", [8], [1]) for part in range(2, 9)],
        )
    ],
}


def figure(panels: Any) -> Figure:
    return Figure("a", "Memory over that of the tokens that live", "It.", "Else.", panels)


def drawn(figure: Figure) -> Any:
    found = canvas(figure, TOLD, "gpt2 on NVIDIA H200, commit 0123456789ab")
    found.draw_without_rendering()
    return found


FIGURES = [
    *(pytest.param(figure(panels), id=name) for name, panels in PANELS.items()),
    *(
        pytest.param(figure, id=f"{question}-{figure.name}")
        for question, draw in CHARTS.items()
        for figure in draw(list(samples.SAMPLES[question]()))
        if figure.panels
    ),
]


@pytest.mark.parametrize("figure", FIGURES)
def test_no_words_are_cut_off_or_run_into_others(figure: Figure) -> None:
    picture = drawn(figure)
    panels = [axes for axes in picture.axes if axes.axison]
    headings = [axes.title if axes.title.get_text() else axes._left_title for axes in panels]
    words = [*headings, *picture.texts, *picture.legends]
    boxes = [item.get_window_extent() for item in words]
    whole = picture.bbox
    for item, box in zip(words, boxes, strict=True):
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, item
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, item
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)
    for axes in panels:
        low, high = sorted(axes.get_xlim())
        labels = [
            tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high
        ]
        for left, right in pairwise([label.get_window_extent() for label in labels]):
            assert left.x1 < right.x0


def test_it_says_of_what_it_is_and_what_its_symbols_mean() -> None:
    (steps,) = (f for f in CHARTS["latency"](list(samples.latency())) if f.name == "steps")
    title, told, on = (text.get_text() for text in drawn(steps).texts)
    assert title == steps.title
    assert told.startswith(TOLD)
    assert told.endswith(steps.key)
    assert on.startswith("gpt2 on NVIDIA H200, commit")
