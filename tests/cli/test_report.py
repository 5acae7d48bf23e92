from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import said
from tests.report import samples


def test_a_report_is_written_beside_the_results(invoke, tmp_path: Path) -> None:
    samples.write(tmp_path, samples.CPU, ["latency"])
    done = invoke("report", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "report.html")
    assert "1 picture beside it, in plots" in done.stderr
    assert (tmp_path / "plots" / f"{tmp_path.name}-latency-steps.png").exists()


def test_a_report_goes_where_it_shall(invoke, tmp_path: Path) -> None:
    samples.write(tmp_path / "results", samples.CPU, ["latency"])
    before = sorted((tmp_path / "results").iterdir())
    done = invoke("report", tmp_path / "results", "--out", tmp_path / "site")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "site" / "report.html").exists()
    assert sorted((tmp_path / "results").iterdir()) == before


def test_a_wrong_file_is_refused_by_name(invoke, tmp_path: Path) -> None:
    (tmp_path / "vram.jsonl").write_text("{}\n")
    done = invoke("report", tmp_path)
    assert done.exit_code == 1
    assert "vram.jsonl, line 1: expected the head" in said(done.stderr)
    assert not (tmp_path / "report.html").exists()


def test_where_nothing_can_be_written(invoke, tmp_path: Path) -> None:
    samples.write(tmp_path, samples.CPU, ["latency"])
    done = invoke("report", tmp_path, "--out", "/proc/x")
    assert done.exit_code == 2
    told = said(done.stderr)
    assert "--out: expected a folder that can be written to, got /proc/x (" in told
    assert "Errno" not in told


def test_a_folder_that_is_not_there_is_refused(invoke, tmp_path: Path) -> None:
    done = invoke("report", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "does not exist" in said(done.stderr)
