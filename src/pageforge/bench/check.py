"""Whether results can be true: nothing lost, nothing below its own parts, nothing failed unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pageforge.bench.fields import UNIT, is_number
from pageforge.bench.questions import QUESTIONS
from pageforge.bench.results import RECORDING, ResultFile

CLAIMED, RETURNED = "pages_claimed", "pages_returned"
LEFT = "pages_left"
"""Pages that are used when all sequences are gone."""

PAGES, GIVEN = "pages_bytes", ("storage_bytes", "cache_bytes", "mapped_bytes")
"""Bytes of the used pages; what is measured of their memory, the pool's own count first."""

TIME = re.compile(r"(?:^|_)(?:ns|us|ms|s|per_s)$")
"""Names of what is never below 0; bytes are where they are what one run takes over another."""

REFUSED = ("absent: ", "UnsupportedModel: ")
"""How failures begin that are none: of peers that are not installed, of models not served."""


def problems(files: Sequence[ResultFile]) -> list[str]:
    """What cannot be true in the `files` of a set, each with its file and record.

    Nothing is said of recordings, which answer no question.
    """
    found = [p for file in files if file.question != RECORDING for p in _of_file(file)]
    if QUESTIONS.keys() <= {file.question for file in files}:
        records = [record for file in files for record in file.results]
        for names in ((CLAIMED, RETURNED), (PAGES,)):
            if not any(all(record.get(n) is not None for n in names) for record in records):
                found.append(f"no result has {' and '.join(names)}: nothing shows that they hold")
    return found


def _of_file(file: ResultFile) -> Iterator[str]:
    if file.question not in QUESTIONS:
        yield f"{file.path}: unknown question {file.question!r}: one of {', '.join(QUESTIONS)}"
        return
    if not file.complete:
        yield f"{file.path}: the run was cut short"
    if not file.results and not file.left_out:
        yield f"{file.path}: no results"
    for number, record in enumerate(file.results, 1):
        for problem in _of_record(record):
            yield f"{file.path}, result {number} ({record['section']}): {problem}"
        failed = str(record.get("failure") or "")
        lacks_cuda = file.machine.get("device") == "cpu" and "CUDA" in failed
        if failed and not lacks_cuda and not failed.startswith(REFUSED):
            yield f"{file.path}, result {number} ({record['section']}) failed: {failed}"


def _of_record(record: dict[str, Any]) -> Iterator[str]:
    for name, value in record.items():
        if UNIT.search(name) and value is not None and not is_number(value):
            yield f"{name}: expected a number, got {value!r}"
        elif TIME.search(name) and value is not None and value < 0:
            yield f"{name}: expected at least 0, got {value!r}"
    claimed, returned = record.get(CLAIMED), record.get(RETURNED)
    if claimed != returned:
        yield f"{CLAIMED} {claimed}, but {RETURNED} {returned}"
    if record.get(LEFT):
        yield f"{LEFT}: expected 0, got {record[LEFT]!r}"
    pages = record.get(PAGES)
    given = next((record[name] for name in GIVEN if record.get(name) is not None), None)
    if pages is not None and given is not None and given < pages:
        yield f"{given:,} bytes measured, but the pages' own are {pages:,}"
