"""Result files that a test writes by hand."""

from __future__ import annotations

from pathlib import Path

from pageforge.bench.report import Report


def write(
    folder: Path, question: str, *records: dict, machine: dict | None = None, ended: bool = True
) -> Path:
    """A file of `records`, each with its `section`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{question}.jsonl"
    report = Report(question, f"What of {question}?", path, machine or {"device": "cpu"})
    for record in records:
        report.add(**record)
    if ended:
        report.end()
    return path
