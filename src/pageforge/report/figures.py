"""A figure: panels of one kind under one legend, and what must be said beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pageforge.bench.fields import is_number
from pageforge.report.axis import rounded
from pageforge.report.palette import Look, looks
from pageforge.report.panels.base import Panel
from pageforge.report.panels.curves import Curve

UNITS = frozenset({"bytes", "us", "ms", "s"})
"""With which fields' names end."""

REPEATS = "; whiskers from the slowest to the fastest repeat"

SAID = {
    "page_size": "pages of {} tokens",
    "page_tokens": "pages of {} tokens",
    "ttft_limit_ms": "first token within {} ms",
    "tpot_limit_ms": "then {} ms a token",
}
"""What people say of fields whose names alone read badly."""

Record = Mapping[str, Any]
"""One result: `section`, and the question's own fields."""

Draw = Callable[[Sequence[Record]], "Iterator[Figure]"]
"""What a question's module offers: its figures, of those records that it can draw."""


@dataclass(frozen=True)
class Figure:
    """`name`: short, for files and links. `failures`: what could not be measured, and why.

    `measured`, `not_shown`: sentences for the reader. On what it was measured the page knows.
    """

    name: str
    title: str
    measured: str
    not_shown: str
    panels: Sequence[Panel]
    failures: Sequence[str] = ()

    @property
    def key(self) -> str:
        """What the panels' symbols mean."""
        return self.panels[0].key if self.panels else ""

    @property
    def marked(self) -> bool:
        """Whether names have symbols of their own in the panels."""
        return any(panel.marked for panel in self.panels)

    @property
    def legend(self) -> dict[str, Look]:
        """How each name looks, in all panels; the order is that of first appearance."""
        return looks(name for panel in self.panels for name in panel.names)


def ran(results: Sequence[Record], section: str, *fields: str) -> list[Record]:
    """The records of a section with a number in each of `fields`."""
    return [
        record
        for record in results
        if record["section"] == section and all(is_number(record.get(name)) for name in fields)
    ]


def failures(results: Sequence[Record], section: str, *who: str) -> list[str]:
    """`way, batch 32: the reason` for each record of a section that failed; `who`: its fields."""
    return list(
        dict.fromkeys(
            ": ".join(filter(None, [", ".join(described(record, *who)), record["failure"]]))
            for record in results
            if record["section"] == section and record.get("failure")
        )
    )


def described(record: Record, *fields: str) -> list[str]:
    """The fields that are there: `uniform`, `batch 32`, `256 requests`, `limit 500 ms`."""
    return [_described(name, record[name]) for name in fields if record.get(name) is not None]


def _described(name: str, value: Any) -> str:
    if not is_number(value):
        return str(value)
    if name in SAID:
        return SAID[name].format(rounded(value))
    label, _, unit = name.rpartition("_")
    if unit in UNITS:
        return f"{label.replace('_', ' ')} {rounded(value)} {unit}"
    label = name.replace("_", " ")
    is_plural = label.endswith("s") and not label.endswith("ss")
    return f"{rounded(value)} {label}" if is_plural else f"{label} {rounded(value)}"


def same(records: Sequence[Record], *fields: str) -> str:
    """What all records agree on, as a sentence, such as `8 sequences, batch 2.`, or nothing."""
    agreed = {
        name: records[0].get(name)
        for name in fields
        if records and len({str(record.get(name)) for record in records}) == 1
    }
    text = ", ".join(described(agreed, *fields))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def whiskers(records: Sequence[Record], value: str, text: str) -> str:
    """`text`, which is of the whiskers, if any of them has a length."""
    ends = [(record.get(f"{value}_low"), record.get(f"{value}_high")) for record in records]
    return text if any(is_number(low) and low != high for low, high in ends) else ""


def first_run(records: Sequence[Record]) -> str:
    """What is not shown of runs, whose first is left out where there are `repeats` of it."""
    alone = [record.get("repeats") == 0 for record in records]
    if not any(alone):
        return "The first run of each, which warms up; a GPU compiles and captures in it."
    each = "each" if all(alone) else "some"
    return f"How far runs differ: {each} ran once, and that first run is what is shown."


def grouped(records: Sequence[Record], *fields: str) -> dict[str, list[Record]]:
    """Records by what `described` says of them, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(", ".join(described(record, *fields)), []).append(record)
    return groups


def by_workload(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by `uniform, 4 requests, in all 23 prompt tokens, 16 new tokens`."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        case = described(record, "workload", "requests")
        if tokens := described(record, "prompt_tokens", "new_tokens"):
            case.append(f"in all {', '.join(tokens)}")
        groups.setdefault(", ".join(case), []).append(record)
    return groups


def by_way(
    records: Sequence[Record], over: str, value: str, *, way: str = "way", spread: bool = False
) -> list[Curve]:
    """A curve for each of what `way` says, in order of `over`.

    `spread`: with whiskers, from the fields `<value>_low` and `<value>_high`, to where these are.
    """
    found = []
    for name, unordered in grouped(records, way).items():
        group = sorted(unordered, key=lambda record: record[over])
        x, y = [record[over] for record in group], [record[value] for record in group]
        low, high = ([record.get(f"{value}_{end}") for record in group] for end in ("low", "high"))
        found.append(Curve(name, x, y, low, high) if spread else Curve(name, x, y))
    return found
