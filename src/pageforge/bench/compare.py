"""Two sets of results side by side: what is new over what was, and whether that is noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from pageforge.bench.fields import case_of, measured_of, spread_of
from pageforge.bench.harness import geometric_mean
from pageforge.bench.report import cell, counted, table
from pageforge.bench.results import HERE, ResultFile, Sets
from pageforge.errors import ResultsError, expected, listed

FEW = 40
"""Rows of a section that are all shown; of more only what becomes of each field."""

ABOUT = ("gpu", "device", "cpus", "threads", "commit", "pageforge", "torch", "transformers")
"""What is said of a machine."""

LISTED = 8
"""Cases without a match that are named."""

Case = dict[str, Any]
Record = dict[str, Any]
Key = tuple[str, str, frozenset[tuple[str, Any]]]
"""Question, section, and what names the case in any order."""


@dataclass(frozen=True)
class Pair:
    """One field of one case in both sets. Spreads: between what it lies, if that was recorded."""

    case: Case
    name: str
    first: float
    second: float
    first_spread: tuple[float, float] | None
    second_spread: tuple[float, float] | None

    @property
    def ratio(self) -> float | None:
        """Second over first; None over nothing."""
        return self.second / self.first if self.first else None

    @property
    def is_noise(self) -> bool | None:
        """Whether the spreads overlap; None where one was not recorded."""
        if self.first_spread is None or self.second_spread is None:
            return None
        (low, high), (other_low, other_high) = self.first_spread, self.second_spread
        return low <= other_high and other_low <= high


@dataclass
class Section:
    """One section of one question: what differs, how many fields are alike, what has no match."""

    question: str
    name: str
    pairs: list[Pair] = field(default_factory=list)
    alike: int = 0
    unmatched: list[str] = field(default_factory=list)

    @property
    def common(self) -> dict[str, Any]:
        """The fields that all cases share."""
        cases = [pair.case for pair in self.pairs]
        first = cases[0] if cases else {}
        return {
            name: value
            for name, value in first.items()
            if all(name in case and case[name] == value for case in cases)
        }


Sides = tuple[list[ResultFile], list[ResultFile]]
"""A set of A, and the one of B that is held against it."""


def matched(first: Sets, second: Sets) -> tuple[dict[str, Sides], list[str]]:
    """Sets of one name, or the only ones of both sides; and what only one side has, in words.

    Raises ResultsError where no two belong together.
    """
    if len(first) == len(second) == 1:
        (one,), (other,) = first.values(), second.values()
        return {HERE: (one, other)}, []
    both = {name: (first[name], second[name]) for name in first if name in second}
    if not both:
        want = "sets of the same name, or one in each"
        got = f"{listed([*first])} in A and {listed([*second])} in B"
        fix = "name the two folders that are to be compared"
        raise ResultsError(expected("A and B", want, got, fix))
    named = [("A", name) for name in first] + [("B", name) for name in second]
    return both, [f"only in {where}: the set {name}" for where, name in named if name not in both]


def compare(first: Sequence[ResultFile], second: Sequence[ResultFile]) -> list[Section]:
    """Every section that either set has, cases matched by what names them."""
    sides = [_by_case(first), _by_case(second)]
    sections: dict[tuple[str, str], Section] = {}
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        section = sections.setdefault(key[:2], Section(*key[:2]))
        records, others = (side.get(key, []) for side in sides)
        if len(records) != len(others):
            where, more = ("A", records) if len(records) > len(others) else ("B", others)
            section.unmatched.append(f"only in {where}: {_text(case_of(more[0]))}")
            continue
        for record, other in zip(records, others, strict=True):
            _add(section, record, other)
    return list(sections.values())


def _by_case(files: Iterable[ResultFile]) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = defaultdict(list)
    for file in files:
        for record in file.results:
            key = (file.question, record["section"], frozenset(case_of(record).items()))
            found[key].append(record)
    return found


def _add(section: Section, record: Record, other: Record) -> None:
    case = case_of(record)
    failures = [side.get("failure") for side in (record, other)]
    if any(failures):
        reasons = [f"{name}: {why}" for name, why in zip("AB", failures, strict=True) if why]
        section.unmatched.append(f"failed: {_text(case)}; {'; '.join(reasons)}")
        return
    values, others = measured_of(record), measured_of(other)
    for name in values:
        if name not in others:
            continue
        if values[name] == others[name]:
            section.alike += 1
            continue
        spreads = spread_of(record, name), spread_of(other, name)
        section.pairs.append(Pair(case, name, values[name], others[name], *spreads))
    for where, missing in (("A", values.keys() - others.keys()), ("B", others.keys() - values)):
        if missing:
            text = f"only in {where}: {', '.join(sorted(missing))} of {_text(case)}"
            section.unmatched.append(text)


def _text(case: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items()) or "its one case"


# --- on the screen ----------------------------------------------------------------------------


def heading(first: Sequence[ResultFile], second: Sequence[ResultFile], name: str = HERE) -> Group:
    """What was measured where: the machines and commits of two sets of that name."""
    sides = (first, second)
    rows: list[tuple[object, ...]] = [
        ("folder", *(_distinct(file.path.parent for file in side) for side in sides)),
        ("began", *(min(file.began for file in side) for side in sides)),
    ]
    rows += [
        (name, *(_distinct(file.machine.get(name) for file in side) for side in sides))
        for name in ABOUT
    ]
    cut = [[file.question for file in side if not file.complete] for side in sides]
    if any(cut):
        rows.append(("cut short", *(_distinct(names) for names in cut)))
    legend = (
        "noise: within where the spreads overlap that both sides recorded (quartiles, or the "
        "extremes of a few repeats); - where none was recorded"
    )
    title = "what is compared" if name == HERE else f"{name}: what is compared"
    return Group(table(title, ("", "A", "B"), rows), Text(legend))


def _distinct(values: Iterable[object]) -> str | None:
    """The different ones; None where there are none."""
    return ", ".join(dict.fromkeys(str(v) for v in values if v is not None)) or None


def shown(sections: Sequence[Section], *, full: bool = False) -> Iterator[Group]:
    """A table for each section that differs, and a line for all others.

    `full`: also of many rows each.
    """
    differing = [section for section in sections if section.pairs or section.unmatched]
    for section in differing:
        parts: list[Group | Text] = []
        if section.pairs:
            many = len(section.pairs) > FEW and not full
            parts.append(_summary(section) if many else _listing(section))
        else:
            parts.append(Text(f"{section.question}, {section.name}", "bold"))
        if section.alike:
            parts.append(Text(f"the same in both: {counted(section.alike, 'field')}"))
        cases = section.unmatched if full else section.unmatched[:LISTED]
        parts += map(Text, cases)
        if len(cases) < len(section.unmatched):
            parts.append(Text(f"and {len(section.unmatched) - len(cases):,} more (--full)"))
        yield Group(*parts)
    same = [section for section in sections if section not in differing]
    if same:
        fields = counted(sum(section.alike for section in same), "field")
        where = counted(len(same), "section")
        yield Group(Text(f"the same in both: {fields}, all of {where}"))


def _title(section: Section) -> str:
    common = _text(section.common) if section.common else ""
    return ": ".join(filter(None, (f"{section.question}, {section.name}", common)))


def _own(section: Section, pair: Pair) -> str:
    """What tells a pair's case from the section's others."""
    return _text({n: v for n, v in pair.case.items() if n not in section.common})


def _listing(section: Section) -> Group:
    rows = [
        (_own(section, p), p.name, p.first, p.second, _ratio(p.ratio), NOISE[p.is_noise])
        for p in section.pairs
    ]
    return table(_title(section), ("case", "field", "A", "B", "B/A", "noise"), rows)


NOISE = {True: "within", False: "beyond", None: None}
"""What a table says of a difference."""


def _summary(section: Section) -> Group:
    """For each field how much it changed over all cases."""
    fields: dict[str, list[Pair]] = defaultdict(list)
    for pair in section.pairs:
        fields[pair.name].append(pair)
    rows = []
    for name, pairs in fields.items():
        ratios = [pair.ratio for pair in pairs if pair.ratio is not None and pair.ratio > 0]
        rows.append(
            (
                name,
                len(pairs),
                _ratio(geometric_mean(ratios) if ratios else None),
                _ratio(min(ratios, default=None)),
                _ratio(max(ratios, default=None)),
                sum(pair.is_noise is True for pair in pairs),
                sum(pair.is_noise is False for pair in pairs),
            )
        )
    columns = ("field", "cases", "B/A, geometric mean", "least", "most", "within noise", "beyond")
    return table(f"{_title(section)} (--full lists every case)", columns, rows)


def _ratio(value: float | None) -> str | None:
    """Three decimals: a ratio near 1 is what this is about."""
    if value is None:
        return None
    return f"{value:.3f}" if value < 100 else cell(value)
