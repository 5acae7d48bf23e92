"""How each way of holding a cache looks, the same in every chart, in light and in dark.

Colours that meet in a chart stay apart for the colour-blind as well, in hue or in lightness, and a
marker says each way a second time. A page knows a colour by its CSS variable, so that it follows
the reader's theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Ink = Mapping[str, str]
"""A theme's colours by name."""

LIGHT: Ink = {
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "ink": "#14181d",
    "muted": "#566069",
    "rule": "#d9dfe5",
    "accent": "#0b5cad",
    "alarm": "#a8341f",
    "blue": "#374bd2",
    "sky": "#3591da",
    "green": "#50a288",
    "forest": "#264e3a",
    "vermilion": "#a55b34",
    "amber": "#b28a13",
    "purple": "#5e3182",
    "pink": "#a64a8d",
    "grey": "#5e7082",
    "slate": "#2e353e",
}
DARK: Ink = {
    "paper": "#0e1216",
    "panel": "#171c22",
    "ink": "#e7ebef",
    "muted": "#9ba6b1",
    "rule": "#2c343d",
    "accent": "#6cb0f5",
    "alarm": "#ff8f75",
    "blue": "#476dfa",
    "sky": "#93d3fe",
    "green": "#77cd95",
    "forest": "#8cfdcf",
    "vermilion": "#d26f22",
    "amber": "#f1a723",
    "purple": "#7d549d",
    "pink": "#d784c5",
    "grey": "#87909b",
    "slate": "#c3cbd6",
}


@dataclass(frozen=True)
class Mark:
    """A symbol: its name in Matplotlib, and its outline for the page's legends."""

    matplotlib: str
    outline: str


MARKS: Mapping[str, Mark] = {
    "circle": Mark("o", "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0-5 0Z"),
    "square": Mark("s", "M-5-5H5V5H-5Z"),
    "diamond": Mark("D", "M0-6.5L6.5 0L0 6.5L-6.5 0Z"),
    "diamond-tall": Mark("d", "M0-7.5L4.5 0L0 7.5L-4.5 0Z"),
    "triangle-up": Mark("^", "M0-6L6 5H-6Z"),
    "star": Mark("*", "M0-7L1.8-2.2L7-2.2L2.8 1L4.3 6L0 3L-4.3 6L-2.8 1L-7-2.2L-1.8-2.2Z"),
    "cross": Mark("P", "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z"),
    "x": Mark("X", "M0-2.5L4-6L6-4L2.5 0L6 4L4 6L0 2.5L-4 6L-6 4L-2.5 0L-6-4L-4-6Z"),
}
"""By Plotly's names."""

SPARE = ("blue", "vermilion", "green", "purple", "amber", "sky", "pink", "slate", "forest", "grey")
"""For names that no way has, in this order."""


@dataclass(frozen=True)
class Look:
    """`colour`: a name in `LIGHT` and `DARK`; `marker`: one in `MARKS`."""

    colour: str
    marker: str = "circle"

    @property
    def css(self) -> str:
        """The colour as style sheets and our script know it."""
        return f"var(--{self.colour})"

    @property
    def mark(self) -> Mark:
        """The marker."""
        return MARKS[self.marker]


Looks = Mapping[str, Look]
"""By name."""

WAYS: Looks = {
    "dynamic": Look("vermilion", "square"),
    "static": Look("purple", "diamond"),
    "static 512": Look("purple", "diamond"),
    "static 1024": Look("pink", "diamond-tall"),
    "static compiled": Look("pink", "diamond-tall"),
    "paged": Look("sky", "circle"),
    "pageforge": Look("blue", "circle"),
    "fast": Look("green", "triangle-up"),
    "fast compiled": Look("forest", "star"),
    "pageforge, prompt once": Look("green", "triangle-up"),
    "pageforge, forks": Look("purple", "diamond"),
    "dynamic, rows alone": Look("amber", "diamond"),
    "one token lost": Look("grey", "x"),
    "stub": Look("grey", "cross"),
    "stub compiled": Look("slate", "x"),
    "engine": Look("forest", "star"),
    "engine, n": Look("slate", "cross"),
    "engine compiled": Look("slate", "x"),
    "generate": Look("vermilion", "square"),
    "generate_batch": Look("amber", "diamond"),
    "one by one": Look("pink", "diamond-tall"),
    "pageforge p16": Look("blue", "circle"),
    "pageforge p128": Look("sky", "circle"),
    "FlashAttention-3": Look("vermilion", "square"),
    "FlashInfer": Look("amber", "diamond"),
    "SDPA flash": Look("purple", "triangle-up"),
    "SDPA cuDNN": Look("pink", "star"),
    "SDPA efficient": Look("grey", "x"),
}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each name: its own, or the next spare colour that none of the others has."""
    names = list(dict.fromkeys(names))
    taken = {WAYS[name].colour for name in names if name in WAYS}
    spare = [colour for colour in SPARE if colour not in taken] or list(SPARE)
    others = [name for name in names if name not in WAYS]
    marks = list(MARKS)
    found = {
        name: Look(spare[index % len(spare)], marks[index % len(marks)])
        for index, name in enumerate(others)
    }
    return {name: WAYS.get(name) or found[name] for name in names}
