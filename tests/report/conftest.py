"""A report of the samples, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report import samples

from pageforge.report import write_report


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result files of two machines."""
    folder = tmp_path_factory.mktemp("results")
    samples.write(folder / "cpu")
    samples.write(folder / "h200", samples.H200)
    return folder


@pytest.fixture(scope="session")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What a report of them consists of, the page first."""
    return write_report(results, tmp_path_factory.mktemp("report"))
