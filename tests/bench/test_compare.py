"""Two sets of results: matched by case, not by place; ratios and noise as the records say."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench.written import write

from pageforge.bench.compare import FEW, Section, compare, heading, matched, shown
from pageforge.bench.fields import case_of, measured_of, spread_of
from pageforge.bench.results import read_folder, read_results, sets_in
from pageforge.errors import ResultsError

STEP = {"section": "steps", "model": "gpt2", "batch": 1, "padded": False}


def step(way: str, p50: float, spread: float = 0.1, **rest) -> dict:
    spreads = {"p50_ms_low": p50 - spread, "p50_ms_high": p50 + spread}
    return {**STEP, **rest, "way": way, "p50_ms": p50, **spreads, "gathers": 4}


def compared(tmp_path: Path, first: list[dict], second: list[dict]) -> list[Section]:
    for name, records in (("a", first), ("b", second)):
        write(tmp_path / name, "latency", *records)
    return compare(read_folder(tmp_path / "a"), read_folder(tmp_path / "b"))


def test_what_names_a_case_and_what_is_measured() -> None:
    record = {
        "section": "s",
        "model": "gpt2",
        "batch": 8,
        "bytes": 100,
        "padded": True,
        "pages": 5,
        "us": 3.0,
        "us_low": 2.0,
        "us_high": 4.0,
        "rate_per_s": 7,
        "share": 0.5,
        "nothing": None,
        "list": [1],
        "candidate": "ours",
        "single_ms": 1.0,
        "single_ms_low": 1.0,
        "single_ms_high": 1.0,
        "p25_ms": 1.0,
        "p50_ms": 2.0,
        "p75_ms": 4.0,
        "p99_ms": 9.0,
    }
    assert case_of(record) == {"model": "gpt2", "batch": 8, "padded": True, "candidate": "ours"}
    assert measured_of(record) == {
        "bytes": 100,
        "pages": 5,
        "us": 3.0,
        "rate_per_s": 7,
        "share": 0.5,
        "single_ms": 1.0,
        "p50_ms": 2.0,
        "p99_ms": 9.0,
    }
    assert spread_of(record, "p50_ms") == (1.0, 4.0)
    assert spread_of(record, "us") == (2.0, 4.0)
    assert spread_of(record, "share") is None
    assert spread_of(record, "single_ms") is None  # of one run: nobody knows


def test_cases_are_matched_in_any_order(tmp_path: Path) -> None:
    first = [step("paged", 2.0), step("dynamic", 1.0)]
    reordered = {"way": "dynamic", **step("dynamic", 1.05)}
    (section,) = compared(tmp_path, first, [reordered, step("paged", 1.0)])
    found = {pair.case["way"]: pair for pair in section.pairs}
    assert (found["paged"].ratio, found["paged"].is_noise) == (0.5, False)
    assert found["dynamic"].ratio == pytest.approx(1.05)
    assert found["dynamic"].is_noise is True
    assert section.alike == 2  # gathers
    assert section.common == {"model": "gpt2", "batch": 1, "padded": False}
    assert section.unmatched == []


def test_what_is_in_one_only_is_listed(tmp_path: Path) -> None:
    first = [step("paged", 2.0), step("old", 1.0), {"section": "memory", "taken_bytes": 1}]
    second = [step("paged", 2.0, extra_us=1.0), step("paged", 2.0, batch=8)]
    steps, memory = compared(tmp_path, first, second)
    assert steps.pairs == []
    assert steps.unmatched == [
        "only in B: extra_us of model gpt2, batch 1, padded False, way paged",
        "only in A: model gpt2, batch 1, padded False, way old",
        "only in B: model gpt2, batch 8, padded False, way paged",
    ]
    assert memory.unmatched == ["only in A: its one case"]


def test_what_failed_is_no_figure(tmp_path: Path) -> None:
    failed = {**STEP, "way": "paged", "failure": "RuntimeError: why"}
    (section,) = compared(tmp_path, [step("paged", 2.0)], [failed])
    assert section.pairs == []
    (line,) = section.unmatched
    assert line.startswith("failed: model gpt2")
    assert line.endswith("B: RuntimeError: why")


def test_cases_of_one_name_are_matched_in_order_or_not_at_all(tmp_path: Path) -> None:
    (section,) = compared(
        tmp_path, [step("a", 1.0), step("a", 2.0)], [step("a", 3.0), step("a", 8.0)]
    )
    assert [pair.ratio for pair in section.pairs] == [3.0, 4.0]
    (section,) = compared(tmp_path, [step("a", 1.0), step("a", 2.0)], [step("a", 3.0)])
    assert section.pairs == []
    assert section.unmatched == ["only in A: model gpt2, batch 1, padded False, way a"]


def test_a_ratio_over_nothing_is_none(tmp_path: Path) -> None:
    (section,) = compared(tmp_path, [step("a", 0.0)], [step("a", 3.0)])
    assert [pair.ratio for pair in section.pairs] == [None]


def test_the_screen(tmp_path: Path) -> None:
    first = [step("paged", 2.0), step("dynamic", 1.0), *many(1.0)]
    write(tmp_path / "a", "latency", *first, machine={"gpu": "H200", "commit": "abc"})
    second = [step("paged", 1.0), step("dynamic", 1.05), *many(1.1)]
    cut = {"ended": False, "machine": {"device": "cpu", "commit": "def+"}}
    write(tmp_path / "b", "latency", *second, **cut)
    one, other = read_folder(tmp_path / "a"), [read_results(tmp_path / "b" / "latency.jsonl")]

    lines = printed([heading(one, other), *shown(compare(one, other))])
    assert ["commit", "abc", "def+"] in lines
    assert ["gpu", "H200", "-"] in lines
    assert ["cut", "short", "-", "latency"] in lines
    assert ["way", "paged", "p50_ms", "2", "1", "0.500", "beyond"] in lines
    assert ["way", "dynamic", "p50_ms", "1", "1.05", "1.050", "within"] in lines
    assert ["the", "same", "in", "both:", "2", "fields"] in lines
    assert ["value_ms", str(FEW + 1), "1.100", "1.100", "1.100", "0", "0"] in lines

    full = printed(shown(compare(one, other), full=True))
    assert ["step", str(FEW), "value_ms", "1", "1.1", "1.100", "-"] in full


def test_what_is_the_same_everywhere_is_one_line(tmp_path: Path) -> None:
    sections = [{"section": name, "value_ms": 1.0} for name in "abcde"]
    lines = printed(shown(compared(tmp_path, sections, sections)))
    assert [" ".join(line) for line in lines] == ["the same in both: 5 fields, all of 5 sections"]
    one = {"section": "a", "value_ms": 2.0}
    lines = printed(shown(compared(tmp_path, sections, [one, *sections[1:]])))
    assert lines[0] == ["latency,", "a"]
    assert " ".join(lines[-1]) == "the same in both: 4 fields, all of 4 sections"


# --- folders of sets --------------------------------------------------------------------------


def sets(folder: Path, *names: str) -> Path:
    for name in names:
        write(folder / name, "latency", step("paged", 2.0))
    return folder


def test_sets_of_the_same_name_are_held_against_each_other(tmp_path: Path) -> None:
    a = sets(tmp_path / "a", "cpu/gpt2", "h200/gpt2", "old")
    b = sets(tmp_path / "b", "h200/gpt2", "cpu/gpt2", "new")
    both, alone = matched(sets_in(a), sets_in(b))
    assert {name: [file.path for side in pair for file in side] for name, pair in both.items()} == {
        name: [folder / name / "latency.jsonl" for folder in (a, b)]
        for name in ("cpu/gpt2", "h200/gpt2")
    }
    assert alone == ["only in A: the set old", "only in B: the set new"]
    title, *_ = printed([heading(*both["cpu/gpt2"], "cpu/gpt2")])
    assert title == ["cpu/gpt2:", "what", "is", "compared"]


def test_the_only_sets_may_be_called_as_they_like(tmp_path: Path) -> None:
    one, other = sets_in(sets(tmp_path / "a", "cpu")), sets_in(sets(tmp_path / "b", ""))
    assert matched(one, other) == ({".": (one["cpu"], other["."])}, [])


def test_sets_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    one = sets_in(sets(tmp_path / "a", "cpu/gpt2", "h200/gpt2"))
    other = sets_in(sets(tmp_path / "b", "new"))
    with pytest.raises(ResultsError) as caught:
        matched(one, other)
    assert str(caught.value) == (
        "A and B: expected sets of the same name, or one in each, got [cpu/gpt2, h200/gpt2] in A "
        "and [new] in B; name the two folders that are to be compared"
    )


def many(value: float) -> list[dict]:
    return [{"section": "curve", "step": at, "value_ms": value} for at in range(FEW + 1)]


def printed(parts) -> list[list[str]]:
    screen = io.StringIO()
    console = Console(file=screen, width=150)
    for part in parts:
        console.print(part)
    return [line.split() for line in screen.getvalue().splitlines()]
