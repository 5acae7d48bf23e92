"""Every record as a row of a table, so that no figure is in a chart alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pageforge.bench.fields import is_number
from pageforge.bench.report import cell
from pageforge.report.figures import Record

FAILURE = "failure"
SECTION = "section"

FEW_LINES, MANY_COLUMNS = 4, 9
"""A table of few lines and many columns is laid on its side: a field a line."""

PROSE = 40
"""Characters of a text from which on it takes several lines."""

LONG = 60
"""Characters of a list that a cell shows at once."""


@dataclass(frozen=True)
class Cell:
    """`exact`: the value as JSON, or nothing where a record lacks the field.

    `text`: the same for people, whole or rounded. `is_numeric`: its column is one of numbers.
    `is_long`: a list that would make its row as wide as the page; `text` then says how long.
    """

    exact: str
    text: str
    is_numeric: bool
    is_long: bool = False

    @property
    def is_prose(self) -> bool:
        """Text that is broken into lines, such as the reason of a failure."""
        return not self.is_numeric and not self.is_long and len(self.text) > PROSE

    @property
    def is_rounded(self) -> bool:
        """Whether `text` says less than `exact`."""
        return self.text.replace(",", "") != self.exact.strip('"').replace(",", "")


@dataclass(frozen=True)
class Column:
    """A field of records."""

    name: str
    is_numeric: bool


@dataclass(frozen=True)
class Line:
    """One record, a cell a column."""

    cells: Sequence[Cell]
    failed: bool


@dataclass(frozen=True)
class Table:
    """The records of a section: a column for each field that any of them has."""

    section: str
    columns: Sequence[Column]
    lines: Sequence[Line]

    @property
    def is_upright(self) -> bool:
        """Whether it is easier to read with a field a line and a record a column."""
        return len(self.lines) <= FEW_LINES and len(self.columns) >= MANY_COLUMNS

    @property
    def by_field(self) -> list[tuple[Column, tuple[Cell, ...]]]:
        """Each column with its cells, a record each."""
        cells = zip(*(line.cells for line in self.lines), strict=True)
        return list(zip(self.columns, cells, strict=True))


def tables(results: Sequence[Record]) -> list[Table]:
    """A table a section, in order of first appearance."""
    sections: dict[str, list[Record]] = {}
    for record in results:
        sections.setdefault(record[SECTION], []).append(record)
    return [_table(section, records) for section, records in sections.items()]


def _table(section: str, records: Sequence[Record]) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record if name != SECTION))
    names.sort(key=lambda name: name == FAILURE)  # reasons stand last
    columns = [Column(name, _is_numeric(name, records)) for name in names]
    lines = [
        Line([_cell(record, column) for column in columns], bool(record.get(FAILURE)))
        for record in records
    ]
    return Table(section, columns, lines)


def _is_numeric(name: str, records: Sequence[Record]) -> bool:
    values = [record.get(name) for record in records]
    return name != FAILURE and all(value is None or is_number(value) for value in values)


def _cell(record: Record, column: Column) -> Cell:
    if column.name not in record:
        return Cell("", "", column.is_numeric)
    value = record[column.name]
    exact = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | dict):
        is_long = len(exact) > LONG
        return Cell(exact, f"{len(value)} values" if is_long else exact, False, is_long)
    if isinstance(value, bool):
        text = exact
    elif isinstance(value, int):
        text = f"{value:,}"
    else:
        text = cell(value)
    return Cell(exact, text, column.is_numeric)
