"""Colours can be told apart, from the paper and from each other, also by the colour-blind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pageforge.report.palette import DARK, LIGHT, SPARE, WAYS, looks

THEMES = pytest.mark.parametrize("ink", [LIGHT, DARK], ids=["light", "dark"])

TOGETHER = (
    ("dynamic", "static", "static compiled", "paged", "pageforge", "fast", "fast compiled"),
    ("dynamic", "static 512", "static 1024", "paged", "pageforge"),
    ("engine", "generate", "generate_batch", "one by one"),
    ("dynamic", "paged", "pageforge", "fast", "engine", "dynamic, rows alone", "one token lost"),
    ("pageforge p16", "FlashAttention-3", "FlashInfer", "SDPA flash", "SDPA cuDNN"),
)
"""Ways that stand in one chart."""

SIMULATED = {
    "all colours": np.eye(3),
    # Machado, Oliveira and Fernandes, 2009: complete absence of one kind of cones, linear RGB.
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}

APART = 0.1
"""Distance in OKLab of two colours that are told apart side by side, at least."""


def linear(colour: str) -> np.ndarray:
    """`#rrggbb` as linear RGB, 0 to 1."""
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""
    light = [linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05 for colour in (one, other)]
    return float(max(light) / min(light))


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson, 2020: a space where distances are as they are seen."""
    cones = np.cbrt(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
        @ np.clip(rgb, 0, 1)
    )
    return (
        np.array(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ]
        )
        @ cones
    )


@THEMES
def test_everything_is_seen_on_its_paper(ink: dict[str, str]) -> None:
    assert contrast(ink["ink"], ink["paper"]) > 12
    for name in ("muted", "accent", "alarm"):
        assert contrast(ink[name], ink["paper"]) >= 4.5, name
    for name in SPARE:
        assert contrast(ink[name], ink["paper"]) >= 3, name


@THEMES
@pytest.mark.parametrize("eyes", SIMULATED)
@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_ways_in_one_chart_are_told_apart(
    ink: dict[str, str], eyes: str, names: tuple[str, ...]
) -> None:
    seen = {
        name: oklab(np.asarray(SIMULATED[eyes]) @ linear(ink[WAYS[name].colour])) for name in names
    }
    for one, other in itertools.combinations(names, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= APART, (one, other)


def test_ways_in_one_chart_differ_by_their_marks_or_colours() -> None:
    for names in TOGETHER:
        assert len({(WAYS[name].colour, WAYS[name].marker) for name in names}) == len(names)


def test_both_themes_have_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert {look.colour for look in WAYS.values()} | set(SPARE) <= LIGHT.keys()


def test_a_name_without_a_look_gets_one_that_nobody_has() -> None:
    found = looks(["paged", "mine", "dynamic", "yours", "mine"])
    assert list(found) == ["paged", "mine", "dynamic", "yours"]
    assert found["paged"] == WAYS["paged"]
    assert len({look.colour for look in found.values()}) == 4
    assert len(looks(map(str, range(30)))) == 30
