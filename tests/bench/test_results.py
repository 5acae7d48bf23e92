"""Result files: what was written is read, and what is wrong is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageforge.bench.report import SCHEMA, Report
from pageforge.bench.results import read_folder, read_results, sets_in
from pageforge.errors import ResultsError

HEAD = {
    "kind": "run",
    "schema": SCHEMA,
    "question": "vram",
    "title": "why?",
    "command": "pageforge bench vram",
    "began": "2026-12-01T00:00:00Z",
    "machine": {},
}
RESULT = {"kind": "result", "section": "curve", "step": 1}
END = {"kind": "end", "seconds": 1.5, "left_out": []}


def write(path: Path, *lines: object, end: str = "\n") -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + end, encoding="utf-8")
    return path


def test_what_a_report_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vram.jsonl"
    report = Report("vram", "why?", path, {"cpus": 2})
    report.add(section="curve", step=1, mapped_bytes=5)
    cut_short = read_results(path)
    assert not cut_short.complete
    assert cut_short.seconds is None
    report.add(section="curve", step=2, failure="RuntimeError: why")
    report.end(["a case"])
    found = read_results(path)
    assert (found.path, found.question, found.title) == (path, "vram", "why?")
    assert found.machine == {"cpus": 2}
    assert found.results == report.records
    assert found.results[:1] == cut_short.results
    assert found.complete
    assert found.seconds >= 0
    assert found.left_out == ["a case"]


def test_a_torn_last_line_is_of_a_run_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", HEAD, RESULT, json.dumps(RESULT)[:20], end="")
    found = read_results(path)
    assert found.results == [{"section": "curve", "step": 1}]
    assert not found.complete


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "line 1: not JSON"),
        (["# a comment"], "line 1: not JSON"),
        (["[1]"], "line 1: expected a JSON object"),
        ([{"question": "decode", "records": []}], "line 1: expected the head of a PageForge"),
        ([RESULT], "line 1: expected the head of a PageForge"),
        ([HEAD | {"schema": SCHEMA + 1}, RESULT, END], "of a newer PageForge"),
        ([HEAD | {"schema": "1"}], "line 1: expected the head"),
        ([HEAD, "{torn", RESULT, END], "line 2: not JSON"),
        ([HEAD, RESULT, '{"kind": "result", "section": "a", "x": NaN}'], "line 3: not JSON"),
        ([HEAD, {"section": "curve"}], "line 2: expected a result with a section"),
        ([HEAD, {"kind": "result"}], "line 2: expected a result with a section"),
        ([HEAD, END, RESULT], "line 2: expected a result with a section"),
        ([HEAD, RESULT, HEAD], "line 3: expected a result with a section"),
        ([HEAD, END | {"seconds": "long"}], "seconds: expected"),
        ([HEAD, END | {"left_out": None}], "left_out: expected"),
        ([HEAD | {"machine": None}], "machine: expected"),
        ([{key: HEAD[key] for key in HEAD if key != "title"}], "title: expected"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, lines: list, message: str) -> None:
    path = write(tmp_path / "wrong.jsonl", *lines)
    with pytest.raises(ResultsError, match=message) as caught:
        read_results(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ResultsError, match=message):
        read_folder(tmp_path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(b"\xff\x00\n")
    with pytest.raises(ResultsError, match=r"wrong\.jsonl: expected JSON lines, got bytes"):
        read_results(path)
    path.write_bytes(b"")
    with pytest.raises(ResultsError, match=r"wrong\.jsonl: expected JSON lines, got 0 characters"):
        read_results(path)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"expected \*.jsonl files, found none"):
        read_folder(tmp_path)
    with pytest.raises(ResultsError, match="expected a folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(ResultsError, match="there is no such file"):
        read_results(tmp_path / "absent.jsonl")
    write(tmp_path / "b.jsonl", HEAD | {"question": "latency"}, END)
    write(tmp_path / "a.jsonl", HEAD, RESULT, END)
    (tmp_path / "notes.txt").write_text("not a result")
    assert [found.question for found in read_folder(tmp_path)] == ["vram", "latency"]


def test_folders_below_are_sets_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"expected \*.jsonl files, found none"):
        sets_in(tmp_path)
    (tmp_path / "h200" / "gpt2").mkdir(parents=True)
    alone = write(tmp_path / "h200" / "gpt2" / "b.jsonl", HEAD, RESULT, END)
    assert [*sets_in(tmp_path)] == ["h200/gpt2"]
    write(tmp_path / "a.jsonl", HEAD | {"question": "latency"}, END)
    found = sets_in(tmp_path)
    assert {name: [file.question for file in files] for name, files in found.items()} == {
        ".": ["latency"],
        "h200/gpt2": ["vram"],
    }
    assert sets_in(alone) == {".": found["h200/gpt2"]}
    alone.write_text("{}\n")
    with pytest.raises(ResultsError, match=r"b\.jsonl, line 1: expected the head"):
        sets_in(tmp_path)
