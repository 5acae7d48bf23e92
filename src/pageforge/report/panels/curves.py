"""Curves: a quantity over steps, sizes or rates, a line or a cloud of points for each way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pageforge.report.axis import Axis
from pageforge.report.palette import LIGHT, Look, Looks

MARKED = 24
"""A line of up to so many points shows each of them."""

MARK, AROUND = 7, 5
"""CSS pixels of a point's mark, and how much larger one is that another would hide."""

POINTS = 4 / 7
"""Of a picture, a CSS pixel."""

HEADROOM = 1.06
"""Where a linear axis ends, over the largest value: zero is always on it."""

Style = Literal["line", "step", "points"]


@dataclass(frozen=True)
class Curve:
    """`y[i]` at `x[i]`; None is a gap. `low`, `high`: its spread. `labels`: what a point is."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Curves:
    """`limits`: lines across the chart, by what they are."""

    title: str
    over: Axis
    value: Axis
    curves: Sequence[Curve]
    style: Style = "line"
    limits: Mapping[str, float] = field(default_factory=dict)
    height: int = 320
    key = ""
    marked = True

    @property
    def shown(self) -> Axis:
        """See `Panel`."""
        return self.value.fitted(self._values)

    @property
    def names(self) -> Sequence[str]:
        """The curves'."""
        return [curve.name for curve in self.curves]

    @property
    def _over(self) -> Axis:
        return self.over.fitted(self._where)

    @property
    def _where(self) -> list[float]:
        return [x for curve in self.curves for x in curve.x]

    @property
    def _values(self) -> list[float]:
        values = [v for curve in self.curves for v in (*curve.y, *curve.high) if v is not None]
        return [*values, *self.limits.values()]

    @property
    def _top(self) -> float:
        return HEADROOM * max(self._values, default=1) or 1

    def traces(self, look: Looks) -> list[dict[str, Any]]:
        """See `Panel`."""
        return [
            self._trace(curve, look[curve.name], size)
            for curve, size in zip(self.curves, self._sizes(), strict=True)
        ]

    def layout(self) -> dict[str, Any]:
        """See `Panel`. A pointer reads all curves at its place, or the one point that it is at."""
        over, fitted = self._over, self.shown
        value = fitted.plotly(self._values)
        if not fitted.log:
            value["range"] = [0, self._top]
        return {
            "xaxis": over.plotly(self._where)
            | {
                "title": {"text": over.title},
                "unifiedhovertitle": {"text": f"{self.over.label} {self.over.hover('x')}"},
                "showgrid": False,
            },
            "yaxis": value,
            "hovermode": "closest" if self.style == "points" else "x unified",
            "shapes": [_line(limit) for limit in self.limits.values()],
            "annotations": [
                _name(name, limit, self._is_floor(limit), fitted.log)
                for name, limit in self.limits.items()
            ],
        }

    def draw(self, axes: Any, look: Looks) -> None:
        """See `Panel`."""
        for curve, size in zip(self.curves, self._sizes(), strict=True):
            colour, marker = LIGHT[look[curve.name].colour], look[curve.name].mark.matplotlib
            marked = self.style == "points" or len(curve.x) <= MARKED
            values = [float("nan") if y is None else y for y in curve.y]
            axes.plot(
                curve.x,
                values,
                color=colour,
                marker=marker if marked else None,
                markersize=size * POINTS,
                linestyle="none" if self.style == "points" else "solid",
                drawstyle="steps-post" if self.style == "step" else "default",
                label=curve.name,
            )
            if curve.low and curve.high:
                low, high = (
                    _differences(*pair) for pair in ((curve.y, curve.low), (curve.high, curve.y))
                )
                axes.errorbar(curve.x, values, [low, high], fmt="none", ecolor=colour, capsize=2)
        for name, limit in self.limits.items():
            axes.axhline(limit, color=LIGHT["muted"], linewidth=1, linestyle="dashed")
            axes.annotate(
                name,
                (0, limit),
                xycoords=("axes fraction", "data"),
                xytext=(3, -2 if self._is_floor(limit) else 2),
                textcoords="offset points",
                va="top" if self._is_floor(limit) else "bottom",
                color=LIGHT["muted"],
                fontsize="small",
            )
        self._over.draw(axes.xaxis, self._where)
        fitted = self.shown
        fitted.draw(axes.yaxis, self._values)
        axes.set_xlabel(self._over.title)
        if not fitted.log:
            axes.set_ylim(0, self._top)

    def _is_floor(self, limit: float) -> bool:
        """Whether most values lie above a limit, whose name then stands below it."""
        values = [value for curve in self.curves for value in curve.y if value is not None]
        return 2 * sum(value >= limit for value in values) > len(values)

    def _sizes(self) -> list[int]:
        """Of each curve's marks: larger than the marks that are drawn upon them."""
        places = [set(zip(curve.x, curve.y, strict=True)) for curve in self.curves]
        return [
            MARK + AROUND * sum(not own.isdisjoint(later) for later in places[index + 1 :])
            for index, own in enumerate(places)
        ]

    def _trace(self, curve: Curve, look: Look, size: int) -> dict[str, Any]:
        is_points = self.style == "points"
        lines = "lines+markers" if len(curve.x) <= MARKED else "lines"
        shape = "hv" if self.style == "step" else "linear"
        trace: dict[str, Any] = {
            "type": "scatter",
            "name": curve.name,
            "x": list(curve.x),
            "y": list(curve.y),
            "mode": "markers" if is_points else lines,
            "line": {"color": look.css, "width": 2, "shape": shape},
            "marker": {"color": look.css, "symbol": look.marker, "size": size},
            "hovertemplate": self._hover(bool(curve.labels)),
        }
        if curve.labels:
            trace["text"] = list(curve.labels)
        if curve.low and curve.high:
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": _differences(curve.high, curve.y),
                "arrayminus": _differences(curve.y, curve.low),
                "color": look.css,
                "thickness": 1,
                "width": 3,
            }
        return trace

    def _hover(self, labelled: bool) -> str:
        value = self.value.hover("y")
        if self.style != "points":
            return f"{value}, %{{text}}" if labelled else value
        head = "%{text}<br>" if labelled else ""
        return f"{head}{self.over.label} {self.over.hover('x')}<br>{self.value.label} {value}"


def _line(limit: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": limit,
        "y1": limit,
        "line": {"color": "var(--muted)", "width": 1, "dash": "dash"},
    }


def _name(name: str, limit: float, below: bool, log: bool) -> dict[str, Any]:
    """Right above a limit's line, or below it."""
    return {
        "text": name,
        "xref": "paper",
        "x": 0,
        "y": math.log10(limit) if log else limit,
        "xanchor": "left",
        "yanchor": "top" if below else "bottom",
        "showarrow": False,
        "font": {"color": "var(--muted)", "size": 11},
    }


def _differences(high: Sequence[float | None], low: Sequence[float | None]) -> list[float]:
    """Lengths of whiskers; 0 where an end is unknown."""
    return [
        0 if above is None or below is None else max(0, above - below)
        for above, below in zip(high, low, strict=True)
    ]
