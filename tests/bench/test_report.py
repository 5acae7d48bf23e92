from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pageforge.bench.report import SCHEMA, Report, cell, machine, table, wide


def test_records_go_to_the_file_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("something older\n")
    report = Report("vram", "why?", path, {"device": "cpu"})
    (head,) = lines(path)
    assert head["command"].startswith("pageforge")
    assert {key: head[key] for key in ("kind", "schema", "question", "title", "machine")} == {
        "kind": "run",
        "schema": SCHEMA,
        "question": "vram",
        "title": "why?",
        "machine": {"device": "cpu"},
    }
    added = report.add(section="s", a_ms=1.5, b=None, c="x", d=[1, 2])
    assert (
        report.records
        == [added]
        == [{"section": "s", "a_ms": 1.5, "b": None, "c": "x", "d": [1, 2]}]
    )
    assert lines(path)[1:] == [{"kind": "result", **added}]
    report.end(["a case"])
    *_, end = lines(path)
    assert (end["kind"], end["left_out"]) == ("end", ["a case"])
    assert end["seconds"] >= 0
    assert list(tmp_path.iterdir()) == [path]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Report("vram", "why?", path, {}).add(
        section="s",
        nan=math.nan,
        inf=math.inf,
        dtype=torch.float16,
        nested={1: (2,)},
        text="\n\u2028",
    )
    _, record = (json.loads(line, parse_constant=lambda _: 1 / 0) for line in path.open())
    del record["kind"], record["section"]
    assert record == {
        "nan": None,
        "inf": None,
        "dtype": "torch.float16",
        "nested": {"1": [2]},
        "text": "\n\u2028",
    }


def test_the_machine_is_known() -> None:
    found = machine(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert {"python", "transformers", "pageforge", "commit", "cpus"} <= found.keys()
    assert machine(torch.device("cpu"), "abc")["commit"] == "abc"


def test_cells() -> None:
    values = [None, math.nan, 0.0, 0.00123, 1.2345, 123.4, 12345.6, 7, "x"]
    assert [cell(v) for v in values] == [
        "-",
        "-",
        "0",
        "1.2e-03",
        "1.23",
        "123",
        "12,346",
        "7",
        "x",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_table_is_not_cut(is_terminal: bool) -> None:
    screen = io.StringIO()
    console = wide(Console(file=screen, width=40, force_terminal=is_terminal, color_system=None))
    columns = [f"column{n}" for n in range(12)]
    rows = [["name", *range(11)], ["broken", "RuntimeError: why"]]
    console.print(table("a title", columns, rows))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert lines[0] == "a title"
    assert lines[1] == "  ".join(columns)
    assert lines[2].split() == ["name", *map(str, range(11))]
    assert lines[3] == "broken: RuntimeError: why"


def test_names_of_columns_break_where_their_values_are_narrower() -> None:
    screen = io.StringIO()
    rows = [["engine", 12345.6, None], ["squeezed", 1.0, 7], ["a"]]
    Console(file=screen).print(table("a title", ["way", "first run s", "pool MB"], rows))
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == [
        "a title",
        "           first  pool",
        "way        run s    MB",
        "engine    12,346     -",
        "squeezed       1     7",
        "a",
    ]
