"""Strips: a row for each case, and on it a mark for each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pageforge.report.axis import Axis
from pageforge.report.palette import LIGHT, looks
from pageforge.report.panels.bars import draw_rows, rows

ROW = 26
AROUND = 64
"""CSS pixels of a row, and of what stands around the rows."""

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
    def names(self) -> Sequence[str]:
        """The ways, in order of first appearance."""
        return list(dict.fromkeys(name for strip in self.strips for name in strip.values))

    @property
    def height(self) -> int:
        """Grows with the strips."""
        return AROUND + ROW * len(self.strips)

    def traces(self) -> list[dict[str, Any]]:
        """See `Panel`."""
        look = looks(self.names)
        return [
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [self._place(strip.values[name]) for strip in strips],
                "y": [strip.label for strip in strips],
                "text": [self.value.text(strip.values[name]) for strip in strips],
                "marker": {"color": look[name].css, "symbol": look[name].marker, "size": 9},
                "hovertemplate": f"%{{y}}, {name}: %{{text}}<extra></extra>",
            }
            for name, strips in self._by_way().items()
        ]

    def layout(self) -> dict[str, Any]:
        """See `Panel`."""
        places = [self._place(value) for value in self._values]
        value = self.value.plotly(places)
        if self.value.log and 0 in self._values:
            value |= {
                "tickvals": [self._zero, *value.get("tickvals", ())],
                "ticktext": ["0", *value.get("ticktext", ())],
            }
        return {
            "xaxis": value,
            "yaxis": rows([strip.label for strip in self.strips]) | {"showgrid": True},
            "hovermode": "closest",
        }

    def draw(self, axes: Any) -> None:
        """See `Panel`."""
        look = looks(self.names)
        labels = [strip.label for strip in self.strips]
        for name, strips in self._by_way().items():
            axes.plot(
                [self._place(strip.values[name]) for strip in strips],
                [labels.index(strip.label) for strip in strips],
                look[name].mark.matplotlib,
                color=LIGHT[look[name].colour],
                markersize=6,
                label=name,
            )
        self.value.draw(axes.xaxis, [self._place(value) for value in self._values])
        if self.value.log and 0 in self._values:
            ticks = [*axes.get_xticks(), self._zero]
            texts = [*(text.get_text() for text in axes.get_xticklabels()), "0"]
            axes.set_xticks(ticks, texts)
        draw_rows(axes, labels)
        axes.grid(True, axis="y", color=LIGHT["rule"], linewidth=0.6)

    @property
    def _values(self) -> list[float]:
        return [value for strip in self.strips for value in strip.values.values()]

    @property
    def _zero(self) -> float:
        return NOTHING * min((value for value in self._values if value > 0), default=1)

    def _place(self, value: float) -> float:
        return self._zero if self.value.log and not value else value

    def _by_way(self) -> dict[str, list[Strip]]:
        return {
            name: [strip for strip in self.strips if name in strip.values] for name in self.names
        }
