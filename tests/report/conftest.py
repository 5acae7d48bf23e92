"""Samples of result files, and the page that they make."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report import samples

from pageforge.report.page import page, sections
from pageforge.report.results import read_sets


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result files of two machines, of which one was asked two questions alone."""
    folder = tmp_path_factory.mktemp("results")
    samples.write(folder / "cpu")
    samples.write(folder / "h200", samples.H200, ["vram", "latency"])
    return folder


@pytest.fixture(scope="session")
def text(results: Path) -> str:
    """The page of them."""
    sets = read_sets(results)
    return page(sets, sections(sets))
