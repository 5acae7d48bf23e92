"""What `write_report` leaves, and when it leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report import samples

from pageforge.errors import MissingExtra, ResultsError
from pageforge.report import extra, write_report

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples.write(tmp_path / "results" / "cpu", samples.CPU, ["vram", "parity"])
    return tmp_path / "results"


def test_a_page_and_a_picture_of_each_figure(folder: Path, tmp_path: Path) -> None:
    page, *pictures = write_report(folder, tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in pictures) == [
        "cpu-parity-max-difference.png",
        "cpu-parity-same-argmax.png",
        "cpu-vram-density.png",
        "cpu-vram-growth.png",
        "cpu-vram-most-sequences.png",
    ]
    for path in pictures:
        data = path.read_bytes()
        assert data.startswith(PNG)
        width = int.from_bytes(data[16:20], "big")
        assert 1000 < width < 2000
    written = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert written == sorted([*folder.rglob("*.jsonl"), page, *pictures])


def test_pictures_are_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    first, second = (write_report(folder, tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "run", "schema": 1}\n', "question"),
        ("not JSON\n", "not JSON"),
        ('{"some": "log"}\n', "expected the head of a PageForge result file"),
    ],
    ids=["corrupt", "not JSON", "foreign"],
)
def test_a_wrong_file_is_refused_by_name_and_nothing_is_written(
    folder: Path, tmp_path: Path, text: str, message: str
) -> None:
    (folder / "cpu" / "sweep.jsonl").write_text(text)
    with pytest.raises(ResultsError, match=rf"sweep\.jsonl.*{message}"):
        write_report(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named_with_what_brings_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "LIBRARIES", ("jinja2", "no_such_library"))
    with pytest.raises(
        MissingExtra, match=r"got no no_such_library; in a checkout .*pip install -e '\.\[report\]'"
    ):
        write_report(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
