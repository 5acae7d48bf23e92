"""What a benchmark leaves: a file of JSON lines, and tables on the screen."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from pageforge._version import __version__

FAILED = 2
"""Columns of a row that has a name and the reason why there is nothing else."""

LIBRARIES = ("torch", "transformers", "triton", "numpy")


SCHEMA = 1
"""Of result files; it changes where a reader of the old ones would misunderstand the new."""


class Report:
    """Records of one run of a question, each in the file as soon as it is known.

    The file is JSON lines: what was run and on what (`kind` "run"), each record ("result"), and
    when all is done how long it took ("end"). A run cut short leaves all that it had.
    """

    def __init__(self, question: str, title: str, path: Path | None, machine: dict[str, Any]):
        self.records: list[dict[str, Any]] = []
        self._path = path
        self._clock = time.monotonic()
        if path is not None:
            path.write_text("", encoding="utf-8")
        self._write(
            "run",
            schema=SCHEMA,
            question=question,
            title=title,
            command=shlex.join(["pageforge", *sys.argv[1:]]),
            began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            machine=machine,
        )

    def add(self, *, section: str, **fields: Any) -> dict[str, Any]:
        """Note one result; returns it. Names of fields end in their units: `_ms`, `_bytes`."""
        record = {"section": section, **fields}
        self.records.append(record)
        self._write("result", **record)
        return record

    def end(self, left_out: Sequence[str] = ()) -> None:
        """Note that the run is over, and for what there was no time."""
        self._write("end", seconds=time.monotonic() - self._clock, left_out=left_out)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line(kind, **fields))


def line(kind: str, **fields: Any) -> str:
    """A line of a result file."""
    return json.dumps(jsonable({"kind": kind, **fields})) + "\n"


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """What the figures depend on. `commit`: where the code stands outside a git checkout."""
    found: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "pageforge": __version__,
        "commit": commit or _commit(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{name: _version(name) for name in LIBRARIES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        }
    return found


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Group:
    """Numbers to the right, three significant digits; None shows as a dash.

    A column is as wide as its values, or as the longest word of its name: names take several lines.
    A row may end early. One of a name and text alone is of something that failed: it goes below the
    table.
    """
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    failed = [Text(f"{row[0]}: {row[1]}") for row in rows if len(row) == FAILED]
    cells = [list(map(cell, row)) for row in rows if len(row) != FAILED]
    for index, column in enumerate(columns):
        values = [row[index] for row in cells if index < len(row)]
        width = max(map(len, [*column.split(), *values]))
        name = "\n".join(textwrap.wrap(column, width, break_on_hyphens=False))
        justify: JustifyMethod = "left" if index == 0 else "right"
        shown.add_column(name, justify=justify, no_wrap=True, vertical="bottom")
    for row in cells:
        shown.add_row(*row)
    return Group(Text(title, "bold"), shown, *failed)


def cell(value: object) -> str:
    """One value for a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-"
        if value and abs(value) < 0.01:
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """`1 file`, `1,234 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def mb(num_bytes: int | None) -> float | None:
    """Megabytes (10^6), for a table."""
    return None if num_bytes is None else num_bytes / 1e6


def wide(console: Console) -> Console:
    """`console`, wide enough for our tables: a narrow terminal breaks their lines, we cut none."""
    console.width = max(console.width, 150)
    return console


def jsonable(value: Any) -> Any:
    """`value` as strict JSON has it: no NaN, no infinity."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with a + where files differ from it."""
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _output(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
