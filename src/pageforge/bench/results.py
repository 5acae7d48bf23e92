"""Reads the files that benchmarks leave (`Report` writes them)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageforge.bench.report import SCHEMA
from pageforge.errors import ResultsError

SUFFIX = ".jsonl"

AGAIN = "measure again with `pageforge bench`"

RECORDING = "recording"
"""Stands for the question in files of `pageforge.record`: somebody's own run, not a measurement."""


@dataclass(frozen=True)
class ResultFile:
    """What one run of a question found.

    `results`: its records in order, each with `section` and the question's own fields. `complete`:
    whether the run came to its end; if not, `seconds` is None and nothing is known of `left_out`.
    """

    path: Path
    question: str
    title: str
    command: str
    began: str
    machine: dict[str, Any]
    results: list[dict[str, Any]]
    complete: bool
    seconds: float | None
    left_out: list[str]


Sets = dict[str, list[ResultFile]]
"""Result files by the folder that holds them: a machine, a model, a day."""

HERE = "."
"""The name of the set that lies in no folder below."""


def sets_in(path: Path) -> Sets:
    """A result file, or those in a folder and in all below it; what one folder holds is a set.

    Its name is the way there from `path`. Raises ResultsError, which names the file, if one is
    wrong, or if there is none.
    """
    if not path.is_dir():
        return {HERE: [read_results(path)]}
    holders = sorted({found.parent for found in path.rglob(f"*{SUFFIX}")}) or [path]
    return {holder.relative_to(path).as_posix(): read_folder(holder) for holder in holders}


def read_folder(folder: Path) -> list[ResultFile]:
    """All result files of a folder, by name. Raises ResultsError if one is wrong, or none there."""
    if not folder.is_dir():
        raise ResultsError(f"{folder}: expected a folder of result files, found none; {AGAIN}")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ResultsError(f"{folder}: expected *{SUFFIX} files, found none; {AGAIN}")
    return [read_results(path) for path in paths]


def read_results(path: Path) -> ResultFile:
    """One result file, also of a run that was cut short: a torn last line is left out.

    Raises ResultsError if the file is not there, corrupt, not ours, or of a newer PageForge.
    """
    head, *lines = _lines(path)
    if head.get("kind") != "run" or not isinstance(schema := head.get("schema"), int):
        raise ResultsError(
            f"{path}, line 1: expected the head of a PageForge result file, got something else; "
            f"take the file out"
        )
    if schema > SCHEMA:
        raise ResultsError(
            f"{path}: expected a schema of at most {SCHEMA}, got {schema}; it is of a newer "
            f"PageForge, update this one"
        )
    end = lines.pop() if lines and lines[-1].get("kind") == "end" else None
    for number, line in enumerate(lines, 2):
        if line.pop("kind", None) != "result" or not isinstance(line.get("section"), str):
            raise ResultsError(
                f"{path}, line {number}: expected a result with a section, got something else; "
                f"{AGAIN}"
            )
    try:
        return ResultFile(
            path,
            **{name: _text(head, name) for name in ("question", "title", "command", "began")},
            machine=_typed(head, "machine", dict),
            results=lines,
            complete=end is not None,
            seconds=None if end is None else float(_typed(end, "seconds", int | float)),
            left_out=[] if end is None else _typed(end, "left_out", list),
        )
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path}: {error}; {AGAIN}") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines as JSON objects, at least one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultsError(f"{path}: there is no such file; {AGAIN}") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: expected JSON lines, got bytes; take the file out") from None
    *whole, torn = text.split("\n")
    if not whole:
        raise ResultsError(f"{path}: expected JSON lines, got {len(torn)} characters; {AGAIN}")
    found = []
    for number, line in enumerate(whole, 1):
        try:
            value = json.loads(line, parse_constant=_not_strict)
        except ValueError as error:
            raise ResultsError(f"{path}, line {number}: not JSON ({error}); {AGAIN}") from None
        if not isinstance(value, dict):
            raise ResultsError(f"{path}, line {number}: expected a JSON object; {AGAIN}")
        found.append(value)
    return found


def _not_strict(constant: str) -> None:
    raise ValueError(f"{constant} is not strict JSON")


def _text(line: dict[str, Any], name: str) -> str:
    return _typed(line, name, str)


def _typed(line: dict[str, Any], name: str, kind: Any) -> Any:
    """A field of a line. Raises TypeError if it is not there or of another type."""
    value = line.get(name)
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {value!r}")
    return value
