"""The page's text, before any browser sees it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report import samples

from pageforge.bench.questions import QUESTIONS
from pageforge.bench.report import Report
from pageforge.errors import ResultsError
from pageforge.report.page import page, sections
from pageforge.report.results import QUICK, machine_name, measured_on, read_sets, subject


class Page(HTMLParser):
    """Tags with their attributes, and what scripts hold, by their ids."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            name = self.tags[-1][1].get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_it_needs_nothing_else(parsed: Page) -> None:
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "data", "action", "poster"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:,")) or not value, (tag, value)


def test_text_from_a_file_stays_text(text: str) -> None:
    assert "<b>no</b>" not in text
    assert "no script </script>" not in text
    assert "&lt;b&gt;no&lt;/b&gt;" in text


def test_it_is_the_same_every_time(text: str, results: Path) -> None:
    sets = read_sets(results)
    assert page(sets, sections(sets)) == text


def test_every_chart_has_its_place(parsed: Page) -> None:
    charts = json.loads(parsed.scripts["charts"])
    places = [a["id"] for tag, a in parsed.tags if tag == "div" and a.get("class") == "chart"]
    assert [chart["id"] for chart in charts] == places
    assert len(set(places)) == len(places)
    ids = [attributes["id"] for _, attributes in parsed.tags if attributes.get("id")]
    assert len(set(ids)) == len(ids)


def test_colours_are_those_of_the_theme(parsed: Page) -> None:
    used = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)
        elif isinstance(value, str) and (value.startswith(("#", "rgb")) or "var(" in value):
            used.add(value)

    look(json.loads(parsed.scripts["charts"]))
    assert used
    assert all(colour.startswith("var(--") for colour in used)


def test_sections_come_in_the_questions_order_and_all_of_them(results: Path) -> None:
    found = sections(read_sets(results))
    assert [section.name for section in found[: len(QUESTIONS)]] == list(QUESTIONS)
    assert {section.name for section in found} == QUESTIONS.keys() | samples.SAMPLES.keys()
    by_name = {section.name: section for section in found}
    assert [entry.set for entry in by_name["vram"].entries] == ["cpu", "h200"]
    assert [entry.set for entry in by_name["parity"].entries] == ["cpu"]
    assert by_name["parity"].status("h200") == ""
    assert not by_name[samples.MISSING].entries


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([{"section": "kernels", "failure": "needs a CUDA device"}], "could not run"),
        ([], "left out"),
        ([{"section": "a", "failure": "why"}, {"section": "a", "us": 1.0}], "measured"),
    ],
)
def test_a_run_says_how_much_it_found(
    tmp_path: Path, results: list[dict[str, Any]], status: str
) -> None:
    report = Report("kernels", "What?", tmp_path / "kernels.jsonl", samples.CPU)
    for record in results:
        report.add(**record)
    report.end()
    found = {section.name: section for section in sections(read_sets(tmp_path))}
    assert found["kernels"].status(tmp_path.name) == status


def test_several_recordings_lie_in_one_folder(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        samples.write(tmp_path, samples.CPU, ["recording"])
        (tmp_path / "recording.jsonl").rename(tmp_path / f"{name}.jsonl")
    sets = read_sets(tmp_path)
    found = {section.name: section for section in sections(sets)}
    assert [e.file.path.stem for e in found["recording"].entries] == ["monday", "tuesday"]
    text = page(sets, list(found.values()))
    assert text.count(">Step by step</h4>") == 2
    assert 'id="recording-1-steps-0"' in text


def test_nothing_is_missing_where_nothing_was_asked(tmp_path: Path) -> None:
    samples.write(tmp_path / "mine", samples.CPU, ["recording"])
    found = sections(read_sets(tmp_path))
    assert [section.name for section in found] == ["recording"]
    assert 'class="note missing"' not in page(read_sets(tmp_path), found)
    samples.write(tmp_path / "asked", samples.CPU, ["vram"])
    assert {section.name for section in sections(read_sets(tmp_path))} > QUESTIONS.keys()


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_run_is_marked_where_its_figures_stand(tmp_path: Path, quick: bool) -> None:
    samples.write(tmp_path, samples.CPU, ["vram"])
    path = tmp_path / "vram.jsonl"
    head, rest = path.read_text().split("\n", 1)
    command = "pageforge bench vram --device cpu" + quick * " --quick"
    path.write_text(json.dumps({**json.loads(head), "command": command}) + "\n" + rest)
    sets = read_sets(tmp_path)
    (section,) = [found for found in sections(sets) if found.entries]
    (entry,) = section.entries
    assert section.status(tmp_path.name) == ("quick" if quick else "measured")
    assert entry.told == "gpt2 on CPU, 2 cores" + quick * f". {QUICK}"
    marked = len(entry.figures) + 1 if quick else 0
    assert page(sets, [section]).count(QUICK) == marked


def test_what_is_measured_of_several_models_names_none(results: Path) -> None:
    files = {file.question: file for file in read_sets(results)["cpu"]}
    assert subject(files["parity"]) == "CPU, 2 cores"
    assert subject(files["recording"]) == "llama on CPU, 2 cores"


def test_a_record_without_a_name_is_refused_by_its_files_name(tmp_path: Path) -> None:
    samples.write(tmp_path, samples.CPU, ["latency"])
    path = tmp_path / "latency.jsonl"
    path.write_text(path.read_text().replace('"way"', '"somehow"'))
    with pytest.raises(ResultsError, match=r"latency\.jsonl: .*way.*measure again"):
        sections(read_sets(tmp_path))


# --- folders --------------------------------------------------------------------------------


def test_a_folder_is_a_set_and_so_is_each_below_it(tmp_path: Path) -> None:
    samples.write(tmp_path / "runs", samples.CPU, ["vram"])
    samples.write(tmp_path / "runs" / "h200" / "gpt2", samples.H200, ["vram", "latency"])
    sets = read_sets(tmp_path / "runs")
    assert list(sets) == ["runs", "h200/gpt2"]
    assert [file.question for file in sets["h200/gpt2"]] == ["latency", "vram"]
    (file,) = sets["runs"]
    assert machine_name(file) == "CPU, 2 cores"
    assert machine_name(sets["h200/gpt2"][0]) == "NVIDIA H200"
    day = file.began[:10]
    assert measured_on(file) == (
        f"gpt2 on CPU, 2 cores, commit 0123456789ab, pageforge 0.1.0, torch 2.13.0, "
        f"transformers 5.24.0, {day}"
    )


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"expected \*\.jsonl files, found none"):
        read_sets(tmp_path)
