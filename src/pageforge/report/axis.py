"""An axis: what it counts, in which unit, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pageforge.geometry import ceil_div

PREFIXES = {12: "T", 9: "G", 6: "M", 3: "k", 0: "", -3: "m", -6: "\N{MICRO SIGN}"}
"""Of the SI, by the power of ten."""

DIGITS = 4
"""Significant ones, in what a pointer reads."""

STEPS = (1, 2, 5)
FEW_DECADES, MANY_DECADES = 2, 5
"""A logarithmic axis over few decades has ticks inside them as well; over many, not at each."""

DECADE = 10

ROUNDING = 1e-9
"""By which part a power of ten may miss the value that it is."""

SMALL = 1e-4
"""Below this, numbers are written with a power of ten."""

LONG_UNIT = 2
"""A unit of more letters stands in the title, not at every tick."""


@dataclass(frozen=True)
class Axis:
    """`label`: what is counted. `prefixed`: 604 MB instead of 603,979,776 with the unit apart.

    `log`: logarithmic, where what is drawn spans enough for that. `values`: where the ticks stand,
    on an axis of a few numbers (page sizes, batch sizes).
    """

    label: str
    unit: str = ""
    prefixed: bool = False
    log: bool = False
    values: Sequence[float] = ()

    def fitted(self, reached: Sequence[float]) -> Axis:
        """This axis for these values: from zero on if they span less than a decade."""
        positive = [value for value in reached if value > 0]
        spans = positive and max(positive) > DECADE * min(positive)
        return self if spans or self.values else replace(self, log=False)

    @property
    def title(self) -> str:
        """`label`, with the unit where the ticks do not carry it; a logarithmic axis says so."""
        label = f"{self.label}, {self.unit}" if self.unit and not self._tick_unit else self.label
        return f"{label} (log scale)" if self.log else label

    @property
    def _tick_unit(self) -> str:
        return self.unit if self.prefixed and len(self.unit) <= LONG_UNIT else ""

    def text(self, value: float, digits: int = DIGITS) -> str:
        """A number of this axis for people, with its unit."""
        if not self.prefixed:
            return f"{rounded(value, digits)} {self.unit}".strip()
        power = 3 * math.floor(math.log10(abs(value)) / 3) if value else 0
        power = min(max(power, min(PREFIXES)), max(PREFIXES))
        return f"{rounded(value / 10**power, digits)} {PREFIXES[power]}{self.unit}".strip()

    def hover(self, letter: str) -> str:
        """The same for Plotly to write, of the coordinate `letter`."""
        form = f".{DIGITS}~s" if self.prefixed else f",.{DIGITS}~r"
        space = "" if self.prefixed else " "
        return f"%{{{letter}:{form}}}{space}{self.unit}".strip()

    def plotly(self, reached: Sequence[float]) -> dict[str, Any]:
        """This axis in a Plotly layout. `reached`: all that is drawn along it."""
        axis: dict[str, Any] = {
            "type": "log" if self.log else "linear",
            "tickformat": "~s" if self.prefixed else ",~r",
            "ticksuffix": self._tick_unit,
            "hoverformat": f",.{DIGITS}~r",
            "automargin": True,
            "gridcolor": "var(--rule)",
            "linecolor": "var(--rule)",
            "zerolinecolor": "var(--rule)",
            "tickfont": {"color": "var(--muted)"},
        }
        if ticks := self._ticks(reached):
            axis |= {"tickvals": ticks, "ticktext": [self._tick(value) for value in ticks]}
        return axis

    def draw(self, axis: Any, reached: Sequence[float]) -> None:
        """This axis on Matplotlib's."""
        if self.log:
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        if ticks := self._ticks(reached):
            axis.set_ticks(ticks, [self._tick(value) for value in ticks], minor=False)
            axis.set_ticks([], minor=True)
        else:
            axis.set_major_formatter(lambda value, _: self._tick(value))

    def _ticks(self, reached: Sequence[float]) -> list[float]:
        """Where ticks stand if it is not left to the library: few round numbers in what is drawn.

        Matplotlib widens an axis for a tick beyond.
        """
        positive = [value for value in reached if value > 0]
        if self.values or not self.log or not positive:
            return list(self.values)
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        within = STEPS if high - low <= FEW_DECADES else STEPS[:1]
        every = ceil_div(high - low, MANY_DECADES) or 1
        ticks = [step * 10.0**power for power in range(low, high + 1, every) for step in within]
        least, most = min(positive) * (1 - ROUNDING), max(positive) * (1 + ROUNDING)
        return [tick for tick in ticks if least <= tick <= most]

    def _tick(self, value: float) -> str:
        if not self.prefixed:
            return rounded(value)
        text = self.text(value)
        return text.removesuffix(self.unit) + self._tick_unit


def rounded(value: float, digits: int = DIGITS) -> str:
    """`value` with so many significant digits, or all those of a whole number."""
    if not value or float(value).is_integer():
        return f"{value:,.0f}"
    if abs(value) < SMALL:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace(".000", "")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
