"""Bars: one figure for each way, side by side from zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from pageforge.report.axis import Axis
from pageforge.report.palette import LIGHT, Looks
from pageforge.report.panels.base import MARGIN

BAR = 34
AROUND = 64
"""CSS pixels of a bar with its gap, and of what stands around the bars."""

ROOM = 1.03
LETTER, SPACE = 7, 14
"""Where the axis ends, over the longest bar; CSS pixels beyond it, for that bar's figure."""

TICKS = 3
"""At most: a phone has room for few."""

NAME = 18
"""Letters of a line of a row's name: a phone has no room for more beside the bars."""

DIGITS = 3
"""Significant ones, of a bar's figure."""


@dataclass(frozen=True)
class Bar:
    """`value` of a way. `low`, `high`: its spread. `note`: what stands behind the figure.

    `label`: beside the bar, if not the name.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    note: str = ""

    @property
    def where(self) -> str:
        """What stands beside the bar."""
        return self.label or self.name

    @property
    def whiskers(self) -> tuple[float, float]:
        """Lengths below and above."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return max(0, self.value - low), max(0, high - self.value)


@dataclass(frozen=True)
class Bars:
    """The first bar stands on top."""

    title: str
    value: Axis
    bars: Sequence[Bar]
    key = ""
    marked = False

    @property
    def shown(self) -> Axis:
        """See `Panel`."""
        return self.value

    @property
    def names(self) -> Sequence[str]:
        """The ways."""
        return [bar.name for bar in self.bars]

    @property
    def height(self) -> int:
        """Grows with the bars."""
        return AROUND + BAR * len(self.bars)

    @property
    def _end(self) -> float:
        return ROOM * max((bar.value + bar.whiskers[1] for bar in self.bars), default=1) or 1

    @property
    def _figures(self) -> list[str]:
        return [self._text(bar) for bar in self.bars]

    def _text(self, bar: Bar) -> str:
        figure = self.value.text(bar.value, DIGITS)
        return f"{figure} ({bar.note})" if bar.note else figure

    def traces(self, look: Looks) -> list[dict[str, Any]]:
        """See `Panel`: a bar, and its figure at its end or that of its whisker."""
        return [
            trace
            for bar in self.bars
            for trace in (self._trace(bar, look[bar.name].css), self._figure(bar))
        ]

    def layout(self) -> dict[str, Any]:
        """See `Panel`."""
        return {
            "xaxis": self.value.plotly([])
            | {"range": [0, self._end], "nticks": TICKS, "tickangle": 0},
            "yaxis": rows([bar.where for bar in self.bars]),
            "barmode": "overlay",
            "bargap": 0.35,
            "margin": {**MARGIN, "r": SPACE + LETTER * max(map(len, self._figures), default=0)},
            "hovermode": "closest",
        }

    def draw(self, axes: Any, look: Looks) -> None:
        """See `Panel`."""
        for row, bar in enumerate(self.bars):
            axes.barh(row, bar.value, 0.6, color=LIGHT[look[bar.name].colour], label=bar.name)
            below, above = bar.whiskers
            if below or above:
                axes.errorbar(
                    bar.value, row, xerr=[[below], [above]], ecolor=LIGHT["ink"], capsize=2
                )
            axes.annotate(
                self._text(bar),
                (bar.value + above, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
            )
        self.value.draw(axes.xaxis, [])
        axes.set_xlim(0, self._end)
        axes.locator_params(axis="x", nbins=TICKS + 1)
        draw_rows(axes, [bar.where for bar in self.bars])

    def _trace(self, bar: Bar, colour: str) -> dict[str, Any]:
        below, above = bar.whiskers
        return {
            "type": "bar",
            "orientation": "h",
            "name": bar.name,
            "x": [bar.value],
            "y": [bar.where],
            "marker": {"color": colour},
            "hovertemplate": f"{bar.where}: {self.value.text(bar.value)}<extra></extra>",
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [above],
                "arrayminus": [below],
                "color": "var(--ink)",
                "thickness": 1,
                "width": 3,
                "visible": bool(below or above),
            },
        }

    def _figure(self, bar: Bar) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "text",
            "name": bar.name,
            "x": [bar.value + bar.whiskers[1]],
            "y": [bar.where],
            "text": [f" {self._text(bar)}"],
            "textposition": "middle right",
            "textfont": {"color": "var(--ink)"},
            "cliponaxis": False,
            "hoverinfo": "skip",
        }


def rows(names: Sequence[str]) -> dict[str, Any]:
    """A Plotly axis of names, the first on top; long ones take several lines."""
    return {
        "type": "category",
        "tickvals": list(names),
        "ticktext": ["<br>".join(wrap(name, NAME)) for name in names],
        "categoryorder": "array",
        "categoryarray": list(reversed(dict.fromkeys(names))),
        "automargin": True,
        "tickfont": {"color": "var(--ink)"},
        "ticklabelstandoff": 6,
        "showgrid": False,
        "fixedrange": True,
    }


def draw_rows(axes: Any, names: Sequence[str]) -> None:
    """The same for Matplotlib's axes, whose rows stand at 0, 1, ..."""
    axes.set_yticks(range(len(names)), ["\n".join(wrap(name, NAME)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.yaxis.set_tick_params(length=0)
    axes.grid(False, axis="y")
