"""What every kind of chart can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pageforge.report.axis import Axis
from pageforge.report.palette import Looks

MARGIN = {"l": 4, "r": 14, "t": 10, "b": 8}
"""CSS pixels around a chart; axes take what they need besides."""


class Panel(Protocol):
    """One chart of a figure: a few of one kind stand side by side under one legend.

    Colours given to Plotly are CSS variables, so that they follow the reader's theme; Matplotlib's
    pictures are light.
    """

    @property
    def title(self) -> str:
        """What parts it from its neighbours: `batch 32, context 448`."""

    @property
    def value(self) -> Axis:
        """The measured quantity."""

    @property
    def shown(self) -> Axis:
        """`value` as it is drawn: logarithmic only where that shows more."""

    @property
    def names(self) -> Sequence[str]:
        """What the legend tells apart, in order."""

    @property
    def key(self) -> str:
        """What the symbols mean that the legend does not name, if there are any."""

    @property
    def marked(self) -> bool:
        """Whether each name has a symbol of its own in it, not a colour alone."""

    @property
    def height(self) -> int:
        """In CSS pixels."""

    def traces(self, look: Looks) -> list[dict[str, Any]]:
        """Plotly's `data`. `look`: that of each name, which is the whole figure's."""

    def layout(self) -> dict[str, Any]:
        """Plotly's `layout`."""

    def draw(self, axes: Any, look: Looks) -> None:
        """The same on Matplotlib's axes."""
