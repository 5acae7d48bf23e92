"""The result files that a report is made from, and what each was measured on."""

from __future__ import annotations

from pathlib import Path

from pageforge.bench.results import HERE, ResultFile, Sets, sets_in

LIBRARIES = ("torch", "transformers")
"""Whose versions stand beside every figure; all others are in the table of machines."""


def read_sets(folder: Path) -> Sets:
    """The sets in `folder`; what lies in none below goes by its own name. Raises ResultsError."""
    own = folder.resolve().name
    return {own if name == HERE else name: files for name, files in sets_in(folder).items()}


def machine_name(file: ResultFile) -> str:
    """`NVIDIA H200`, or `CPU, 2 cores`."""
    machine = file.machine
    return str(machine.get("gpu") or f"CPU, {machine.get('cpus', '?')} cores")


def measured_on(file: ResultFile) -> str:
    """Machine, commit, versions and day in one line."""
    machine = file.machine
    parts = [
        machine_name(file),
        f"commit {machine.get('commit') or 'unknown'}",
        f"pageforge {machine.get('pageforge', '?')}",
        *(f"{name} {machine[name]}" for name in LIBRARIES if machine.get(name)),
        file.began[:10],
    ]
    return ", ".join(parts)
