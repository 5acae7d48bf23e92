"""The result files that a report is made from, and what each was measured on."""

from __future__ import annotations

from pathlib import Path

from pageforge.bench.results import HERE, ResultFile, Sets, sets_in

QUICK = "Quick: few cases, not a measurement"
"""What stands by the figures of a quick run."""

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


def subject(file: ResultFile) -> str:
    """What was measured, and on what: `gpt2 on NVIDIA H200`; several models are in the charts."""
    models = dict.fromkeys(str(record["model"]) for record in file.results if record.get("model"))
    machine = machine_name(file)
    return f"{next(iter(models))} on {machine}" if len(models) == 1 else machine


def is_quick(file: ResultFile) -> bool:
    """Whether the run was one of few and small cases."""
    return "--quick" in file.command.split()


def measured_on(file: ResultFile) -> str:
    """Model, machine, commit, versions and day in one line."""
    machine = file.machine
    parts = [
        subject(file),
        f"commit {machine.get('commit') or 'unknown'}",
        f"pageforge {machine.get('pageforge', '?')}",
        *(f"{name} {machine[name]}" for name in LIBRARIES if machine.get(name)),
        file.began[:10],
    ]
    return ", ".join(parts)
