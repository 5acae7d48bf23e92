"""Strips: a row for each case, and on it a mark for each way, the ways one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pageforge.report.axis import Axis
from pageforge.report.palette import LIGHT, Looks

MARK = 8
GAP = 12
AROUND = 64
"""CSS pixels of a mark's line, between rows, and around them all."""

NOTHING = 0.2
"""Where a logarithmic axis, which has no zero, shows one: at this part of the least other value."""


@dataclass(frozen=True)
class Strip:
    """The figures of one case, by way."""

    label: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Strips:
    """The first strip stands on top. On a logarithmic axis zeros have a tick of their own."""

    title: str
    value: Axis
    strips: Sequence[Strip]
    key = ""
    marked = True

    @property
    def shown(self) -> Axis:
        """See `Panel`."""
        return self.value.fitted(self._values)

    @property
    def names(self) -> Sequence[str]:
        """The ways, in order of first appearance."""
        return list(dict.fromkeys(name for strip in self.strips for name in strip.values))

    @property
    def height(self) -> int:
        """Grows with the strips, and with their marks."""
        return AROUND + len(self.strips) * (GAP + MARK * len(self.names))

    def traces(self, look: Looks) -> list[dict[str, Any]]:
        """See `Panel`."""
        return [
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [self._place(value) for _, _, value in marks],
                "y": [height for height, _, _ in marks],
                "text": [f"{label}, {name}: {self.value.text(value)}" for _, label, value in marks],
                "marker": {"color": look[name].css, "symbol": look[name].marker, "size": 8},
                "hovertemplate": "%{text}<extra></extra>",
            }
            for name, marks in self._marks().items()
        ]

    def layout(self) -> dict[str, Any]:
        """See `Panel`."""
        value = self.shown.plotly(self._places)
        if self._has_nothing:
            ticks = self._ticks(value["tickvals"], value["ticktext"])
            value |= {"tickvals": list(ticks), "ticktext": list(ticks.values())}
        return {
            "xaxis": value,
            "yaxis": {
                "range": [len(self.strips) - 0.5, -0.5],
                "tickvals": list(range(len(self.strips))),
                "ticktext": [strip.label for strip in self.strips],
                "tickfont": {"color": "var(--ink)"},
                "ticklabelstandoff": 6,
                "gridcolor": "var(--rule)",
                "zeroline": False,
                "automargin": True,
                "fixedrange": True,
            },
            "hovermode": "closest",
        }

    def draw(self, axes: Any, look: Looks) -> None:
        """See `Panel`."""
        for name, marks in self._marks().items():
            axes.plot(
                [self._place(value) for _, _, value in marks],
                [height for height, _, _ in marks],
                look[name].mark.matplotlib,
                color=LIGHT[look[name].colour],
                markersize=5,
                label=name,
            )
        self.shown.draw(axes.xaxis, self._places)
        if self._has_nothing:
            texts = [text.get_text() for text in axes.get_xticklabels()]
            ticks = self._ticks(axes.get_xticks(), texts)
            axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_yticks(range(len(self.strips)), [strip.label for strip in self.strips])
        axes.set_ylim(len(self.strips) - 0.5, -0.5)
        axes.yaxis.set_tick_params(length=0)

    def _marks(self) -> dict[str, list[tuple[float, str, float]]]:
        """By way: the height, the case and the value of each mark; a row is 1 high."""
        names = self.names
        line = MARK / (GAP + MARK * len(names))
        return {
            name: [
                (row + (index - (len(names) - 1) / 2) * line, strip.label, strip.values[name])
                for row, strip in enumerate(self.strips)
                if name in strip.values
            ]
            for index, name in enumerate(names)
        }

    @property
    def _values(self) -> list[float]:
        return [value for strip in self.strips for value in strip.values.values()]

    @property
    def _places(self) -> list[float]:
        return [self._place(value) for value in self._values]

    @property
    def _has_nothing(self) -> bool:
        return self.shown.log and 0 in self._values

    @property
    def _zero(self) -> float:
        return NOTHING * min((value for value in self._values if value > 0), default=1)

    def _place(self, value: float) -> float:
        return self._zero if self._has_nothing and not value else value

    def _ticks(self, places: Sequence[float], texts: Sequence[str]) -> dict[float, str]:
        """Those of a logarithmic axis, and one for zero left of them."""
        others = zip(places, texts, strict=True)
        return {self._zero: "0", **{at: text for at, text in others if at > 2 * self._zero}}
