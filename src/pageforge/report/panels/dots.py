"""Dots: several figures of one way on one row, such as the median and the slowest hundredth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pageforge.report.axis import Axis
from pageforge.report.palette import LIGHT, Look, Looks
from pageforge.report.panels.bars import draw_rows, rows

ROW = 30
AROUND = 64
"""CSS pixels of a row, and of what stands around the rows."""

SHAPES = (
    ("circle", "o", "\N{BLACK CIRCLE}"),
    ("diamond-open", "D", "\N{WHITE DIAMOND}"),
    ("line-ns-open", "|", "|"),
)
"""Of the first figure on a row, the second and the third: Plotly's symbol, Matplotlib's, text."""


@dataclass(frozen=True)
class Row:
    """Figures of one way, by what they are: `{"P50": 1.4, "P99": 1.9}`."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Dots:
    """The first row stands on top; each has the same figures, in the same order."""

    title: str
    value: Axis
    rows: Sequence[Row]
    marked = False

    @property
    def key(self) -> str:
        """Which symbol is which figure."""
        names = self.rows[0].values if self.rows else ()
        return "  ".join(
            f"{text} {name}" for name, (_, _, text) in zip(names, SHAPES, strict=False)
        )

    @property
    def shown(self) -> Axis:
        """See `Panel`."""
        return self.value.fitted(self._values)

    @property
    def names(self) -> Sequence[str]:
        """The ways."""
        return [row.name for row in self.rows]

    @property
    def height(self) -> int:
        """Grows with the rows."""
        return AROUND + ROW * len(self.rows)

    @property
    def _values(self) -> list[float]:
        return [value for row in self.rows for value in row.values.values()]

    def traces(self, look: Looks) -> list[dict[str, Any]]:
        """See `Panel`: a line from the first to the last figure of a row, and a symbol at each."""
        return [self._trace(row, look[row.name]) for row in self.rows]

    def layout(self) -> dict[str, Any]:
        """See `Panel`."""
        fitted = self.shown
        value = fitted.plotly(self._values)
        if not fitted.log:
            value |= {"rangemode": "tozero"}
        return {"xaxis": value, "yaxis": rows(self.names), "hovermode": "closest"}

    def draw(self, axes: Any, look: Looks) -> None:
        """See `Panel`."""
        for at, row in enumerate(self.rows):
            colour, values = LIGHT[look[row.name].colour], list(row.values.values())
            axes.plot(
                [min(values), max(values)], [at, at], color=colour, linewidth=1.5, label=row.name
            )
            for value, (_, shape, _) in zip(values, SHAPES, strict=False):
                filled = {} if shape in "o|" else {"markerfacecolor": LIGHT["paper"]}
                axes.plot(value, at, shape, color=colour, markersize=6, **filled)
        fitted = self.shown
        fitted.draw(axes.xaxis, self._values)
        if not fitted.log:
            axes.set_xlim(left=0)
        draw_rows(axes, self.names)

    def _trace(self, row: Row, look: Look) -> dict[str, Any]:
        shapes = [shape for shape, _, _ in SHAPES[: len(row.values)]]
        return {
            "type": "scatter",
            "name": row.name,
            "x": list(row.values.values()),
            "y": [row.name] * len(row.values),
            "text": [
                f"{row.name}, {what}: {self.value.text(value)}"
                for what, value in row.values.items()
            ],
            "mode": "lines+markers",
            "line": {"color": look.css, "width": 2},
            "marker": {
                "color": look.css,
                "symbol": shapes,
                "size": 9,
                "line": {"color": look.css, "width": 2},
            },
            "hovertemplate": "%{text}<extra></extra>",
        }
