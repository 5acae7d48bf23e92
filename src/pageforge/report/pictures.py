"""Figures as PNG files, for a README: Matplotlib draws them."""

from __future__ import annotations

from pathlib import Path
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

TITLE, LEGEND_ROW, FOOT = 0.5, 0.2, 0.4
"""Inches for the title, for each row of the legend, and for what it was measured on."""

NAME = 1.3
"""Inches for a name in the legend."""


def picture(figure: Figure, on: str, path: Path) -> None:
    """Draw a figure with at least one panel. `on`: what it was measured on."""
    from matplotlib.figure import Figure as Canvas

    panels = figure.panels
    columns = min(MOST_COLUMNS, len(panels))
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) / PIXELS + 0.3 for row in rows]
    width = PANEL_WIDTH * max(columns, 1.6)
    a_row = int(width / NAME)
    head = TITLE + LEGEND_ROW * ceil_div(len(figure.legend), a_row)
    height = sum(heights) + head + FOOT
    canvas = Canvas(figsize=(width, height), dpi=DPI, facecolor=LIGHT["paper"])
    inside = (0, FOOT / height, 1, 1 - (head + FOOT) / height)
    canvas.set_layout_engine("constrained", rect=inside)
    grid = canvas.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, figure.legend)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    title = f"{figure.title}  ({figure.key})" if figure.key else figure.title
    canvas.text(0.01, 1 - 0.12 / height, title, va="top", weight="bold", size=12)
    _legend(canvas, figure, 1 - 0.38 / height, a_row)
    canvas.text(0.01, 0.1 / height, on, va="bottom", size=7, color=LIGHT["muted"])
    canvas.savefig(path)


def _draw(axes: Any, panel: Panel, look: Looks) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT["rule"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["rule"])
    axes.tick_params(colors=LIGHT["muted"], labelsize=8)
    panel.draw(axes, look)
    heading = f"{panel.title}: {panel.value.title}" if panel.title else panel.value.title
    axes.set_title(heading, loc="left", size=8.5, color=LIGHT["ink"])
    axes.xaxis.label.set(size=8, color=LIGHT["muted"])


def _legend(canvas: Any, figure: Figure, top: float, a_row: int) -> None:
    """Of what the panels drew, each name once."""
    handles = {
        label: handle
        for axes in canvas.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(
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
