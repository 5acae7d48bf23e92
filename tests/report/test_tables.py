from __future__ import annotations

from pageforge.report.tables import LONG, tables

RECORDS = [
    {"section": "steps", "way": "paged", "us": 12.3456, "pages": 1234567, "peak_bytes": None},
    {"section": "other", "names": ["a"], "differences": [0.5] * LONG},
    {"section": "steps", "way": "fast", "failure": "absent: why", "us": 0.0, "same": True},
]


def test_a_table_has_the_records_of_a_section_and_all_their_fields() -> None:
    steps, other = tables(RECORDS)
    assert (steps.section, other.section) == ("steps", "other")
    assert [c.name for c in steps.columns] == [
        "way",
        "us",
        "pages",
        "peak_bytes",
        "same",
        "failure",
    ]
    assert [c.is_numeric for c in steps.columns] == [False, True, True, True, False, False]
    first, second = steps.lines
    assert [cell.exact for cell in first.cells] == ['"paged"', "12.3456", "1234567", "null", "", ""]
    assert [cell.text for cell in first.cells] == ["paged", "12.3", "1,234,567", "-", "", ""]
    assert [cell.text for cell in second.cells] == ["fast", "0", "", "", "true", "absent: why"]
    assert (first.failed, second.failed) == (False, True)


def test_a_rounded_cell_knows_it() -> None:
    (steps, _) = tables(RECORDS)
    assert [cell.is_rounded for cell in steps.lines[0].cells[:3]] == [False, True, False]


def test_a_long_list_says_how_long_it_is() -> None:
    (_, other) = tables(RECORDS)
    short, long = other.lines[0].cells
    assert (short.text, short.is_long) == ('["a"]', False)
    assert (long.text, long.is_long) == (f"{LONG} values", True)


def test_few_records_of_many_fields_stand_upright() -> None:
    wide = {"section": "a"} | {f"field{number}": number for number in range(12)}
    (few,) = tables([wide] * 2)
    (many,) = tables([wide] * 20)
    assert few.is_upright
    assert not many.is_upright
    assert [column.name for column, _ in few.by_field] == [c.name for c in few.columns]
    assert [[cell.exact for cell in cells] for _, cells in few.by_field][3] == ["3", "3"]
