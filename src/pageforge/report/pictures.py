"""Figures as PNG files, for a README: Matplotlib draws them."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from pageforge.geometry import ceil_div
from pageforge.report.figures import Figure
from pageforge.report.palette import LIGHT, Looks
from pageforge.report.panels.base import Panel

PANEL_WIDTH = 4.6
MOST_COLUMNS = 2
"""Panels side by side: GitHub shows a README 830 pixels wide."""

PIXELS = 100
"""Of CSS, an inch of the picture."""

DPI = 160

TITLE, LEGEND_ROW, FOOT = 0.7, 0.2, 0.4
"""Inches for the title, for each row of the legend, and for what it was measured on."""

HANDLE, LETTER = 0.5, 0.07
"""Inches of the legend for a name's symbol, and for each of its letters."""

HEADING = 44
HEADING_ROW = 0.15
"""Letters of a line of a panel's heading, and inches for each line."""


def picture(figure: Figure, told: str, on: str, path: Path) -> None:
    """Draw a figure with at least one panel.

    `told`: what of, as the second line; `on`: what it was measured on, in small letters.
    """
    canvas(figure, told, on).savefig(path)


def canvas(figure: Figure, told: str, on: str) -> Any:
    """The picture, not yet a file."""
    from matplotlib.figure import Figure as Canvas

    panels = figure.panels
    columns = min(MOST_COLUMNS, len(panels))
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    heights = [max(_height(panel) for panel in row) for row in rows]
    width = PANEL_WIDTH * max(columns, 1.6)
    name = HANDLE + LETTER * max(map(len, figure.legend))
    a_row = max(1, int(width / name))
    head = TITLE + LEGEND_ROW * ceil_div(len(figure.legend), a_row)
    height = sum(heights) + head + FOOT
    drawn = Canvas(figsize=(width, height), dpi=DPI, facecolor=LIGHT["paper"])
    inside = (0.01, FOOT / height, 0.98, 1 - (head + FOOT) / height)
    drawn.set_layout_engine("constrained", rect=inside)
    grid = drawn.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, figure.legend)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    muted = LIGHT["muted"]
    drawn.text(0.01, 1 - 0.12 / height, figure.title, va="top", weight="bold", size=12)
    line = "   ".join(filter(None, [told, figure.key]))
    drawn.text(0.01, 1 - 0.36 / height, line, va="top", size=9, color=muted)
    _legend(drawn, figure, 1 - 0.56 / height, a_row)
    drawn.text(0.01, 0.1 / height, on, va="bottom", size=7, color=muted)
    return drawn


def _height(panel: Panel) -> float:
    """Inches, with the heading."""
    return panel.height / PIXELS + 0.15 + HEADING_ROW * len(_heading(panel))


def _heading(panel: Panel) -> list[str]:
    """Its lines: one if it is short, else the quantity has its own."""
    parts = list(filter(None, [panel.title, panel.shown.title]))
    line = ": ".join(parts)
    return (
        [line] if len(line) <= HEADING else [row for part in parts for row in wrap(part, HEADING)]
    )


def _draw(axes: Any, panel: Panel, look: Looks) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT["rule"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["rule"])
    axes.tick_params(colors=LIGHT["muted"], labelsize=8)
    panel.draw(axes, look)
    axes.set_title("\n".join(_heading(panel)), loc="left", size=8.5, color=LIGHT["ink"])
    axes.xaxis.label.set(size=8, color=LIGHT["muted"])


def _legend(drawn: Any, figure: Figure, top: float, a_row: int) -> None:
    """Of what the panels drew, each name once."""
    handles = {
        label: handle
        for axes in drawn.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(
        [handles[name] for name in figure.legend],
        list(figure.legend),
        loc="upper left",
        bbox_to_anchor=(0.0, top),
        ncols=a_row,
        frameon=False,
        fontsize=8,
        columnspacing=1.2,
        handletextpad=0.5,
    )
