"""What a record's fields are: those that name its case, and those that were measured.

A number with a unit in its name is measured, and so is a fraction; whole numbers are measured from
the first of these on, and before it name the case, as texts and switches do wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

UNIT = re.compile(r"(?:^|_)(?:bytes|flops|ns|us|ms|s|per_\w+)$")
"""At the end of a name."""

LOW, HIGH = "_low", "_high"
"""Ends of the names of a field's spread: quartiles, or the extremes of a few repeats."""

MEDIAN, QUARTILES = "p50_", ("p25_", "p75_")
"""Beginnings of the names of a median and its spread."""

NEITHER = frozenset({"section", "failure"})


def is_number(value: object) -> bool:
    """Whether `value` is one, and not a switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def case_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that name the case."""
    case: dict[str, Any] = {}
    begun = False
    for name, value in record.items():
        if name in NEITHER:
            continue
        if isinstance(value, str | bool):
            case[name] = value
        elif _is_measured(name, value):
            begun = True
        elif isinstance(value, int) and not begun:
            case[name] = value
    return case


def measured_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The fields that were measured, their spread apart."""
    case = case_of(record)
    return {
        name: value
        for name, value in record.items()
        if is_number(value) and name not in case and not _is_spread(name, record)
    }


def spread_of(record: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Between what a measured field lies; None where that was not recorded, or of a single run."""
    low, high = record.get(name + LOW), record.get(name + HIGH)
    if low is None and name.startswith(MEDIAN):
        low, high = (record.get(each + name.removeprefix(MEDIAN)) for each in QUARTILES)
    if low is None or high is None or low == high:
        return None
    return float(low), float(high)


def _is_measured(name: str, value: object) -> bool:
    return is_number(value) and (isinstance(value, float) or UNIT.search(name) is not None)


def _is_spread(name: str, record: Mapping[str, Any]) -> bool:
    return any(
        name.endswith(end) and name.removesuffix(end) in record for end in (LOW, HIGH)
    ) or any(
        name.startswith(each) and MEDIAN + name.removeprefix(each) in record for each in QUARTILES
    )
