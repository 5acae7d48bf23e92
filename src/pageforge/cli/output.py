"""What the commands print with: consoles, JSON, sizes, progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from pageforge.errors import OutOfPages, PageForgeError

T = TypeVar("T")

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def stdout() -> Console:
    """For results. Text is printed as it is: no markup, no highlighting."""
    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """For errors and progress."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def fail(message: str) -> None:
    """An error, where it belongs."""
    console = stderr()
    console.print("error:", style="bold red", end=" ")
    console.print(message, soft_wrap=True)


def error_line(error: Exception) -> str:
    """What an error says, in the words of the command line."""
    if isinstance(error, OutOfPages):
        return (
            f"out of pages: needed {error.needed}, available {error.available}; raise --max-pages "
            f"or --max-memory, or ask for fewer tokens"
        )
    if isinstance(error, PageForgeError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    first = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first[0]} (`pageforge --debug ...` says where)"


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, default=_plain, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def size(num_bytes: float) -> str:
    """`num_bytes` for people: three digits and a unit."""
    unit = 0
    while abs(num_bytes) >= 1000 and unit < len(UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    digits = 0 if unit == 0 else max(0, 3 - len(str(int(abs(num_bytes)))))
    text = f"{num_bytes:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {UNITS[unit]}"


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5`: ascending numbers as runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values side by side."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def printable(text: str) -> str:
    """`text` without what a terminal would obey: a model may write anything."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class RunningText:
    """Text of a model on stdout as it comes; on leaving, the line is ended."""

    def __init__(self) -> None:
        self._in_line = False

    def write(self, text: str) -> None:
        """Print a piece of text at once."""
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        if text:
            self._in_line = not text.endswith("\n")

    def __enter__(self) -> RunningText:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._in_line and not isinstance(error, BrokenPipeError):
            sys.stdout.write("\n")


def is_terminal() -> bool:
    """Whether stdout is a screen that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def bar(last: ProgressColumn | None = None, *, auto_refresh: bool = True) -> Progress:
    """A progress bar on stderr; nothing where that is not a terminal.

    `last`: what stands behind the bar, by default how many are done.
    """
    console = stderr()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        last or MofNCompleteColumn(),
        console=console,
        auto_refresh=auto_refresh,
        transient=True,
        disable=not sys.stderr.isatty() or console.is_dumb_terminal,
    )


def beside(shown: Progress) -> Console:
    """What to print results with while a bar is shown: above it, if both are on the terminal."""
    return shown.console if sys.stdout.isatty() and not shown.disable else stdout()


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """`items`, counted on a progress bar."""
    with bar() as shown:
        yield from shown.track(items, total=total, description=label)
