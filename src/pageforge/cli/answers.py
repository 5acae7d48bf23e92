"""What `pageforge run` prints: answers, and a table of what they took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from pageforge.cli.jobs import Job, Result
from pageforge.cli.output import error_line, facts, fail, printable, size


class InOrder:
    """Prints results in the order of their jobs: each as soon as those before it are there.

    `quiet`: texts alone, without titles; why a job failed is then said on stderr.
    """

    def __init__(self, jobs: Iterable[Job], console: Console, *, quiet: bool):
        self._console = console
        self._left = deque(jobs)
        self._is_one_job = len(self._left) == 1
        self._is_quiet = quiet
        self._has_titles = not quiet and sum(job.params.n for job in self._left) > 1
        self._there: dict[str, Result] = {}
        self._is_first = True

    def take(self, result: Result) -> None:
        """Print it, now or later."""
        self._there[result.job.id] = result
        while self._left and self._left[0].id in self._there:
            self._print(self._there.pop(self._left.popleft().id))

    def _print(self, result: Result) -> None:
        job, output, error = result
        if error is not None:
            if self._is_one_job:  # it is said at the end
                return
            if self._is_quiet:
                fail(f"{job.id!r}: {error_line(error)}")
            else:
                self.print_answer(job.id, job.title, f"error: {error_line(error)}")
            return
        assert output is not None
        for each in output.outputs:
            name = job.id if job.params.n == 1 else f"{job.id}.{each.index + 1}"
            self.print_answer(name, job.title, each.text or "")

    def print_answer(self, name: str, prompt: str, text: str) -> None:
        """An answer, with its prompt above it unless it is the only one or all is quiet."""
        console = self._console
        if not self._is_first:
            console.print()
        self._is_first = False
        if self._has_titles:
            title = " ".join(printable(prompt).split())
            console.print(f"[{name}] {title}", style="bold", overflow="ellipsis", no_wrap=True)
        console.print(printable(text).strip(), soft_wrap=True)


def engine_summary(result: dict[str, Any]) -> Table:
    """A run of the engine in numbers."""
    paged, engine = result["paged"], result["engine"]
    rows = [
        ("requests", f"{engine['requests_done']:,}"),
        ("failed", f"{engine['requests_failed']:,}"),
        ("done before", f"{engine['requests_before']:,}"),
        ("cut short", f"{engine['cut_short']:,} by the model's positions"),
        *_cache_rows(result, pages="pages at the peak"),
        ("prefix hits", _hits(engine)),
        ("preemptions", f"{engine['preemptions']:,}"),
        ("at the end", f"{paged['pages_used_after']} pages used"),
    ]
    rare = {
        "failed": engine["requests_failed"],
        "done before": engine["requests_before"],
        "cut short": engine["cut_short"],
    }
    return facts((name, value) for name, value in rows if rare.get(name, True))


def cache_summary(result: dict[str, Any]) -> Table:
    """A run of `generate` in numbers; beside it those of other caches, where it was compared."""
    paged = result["paged"]
    others = [name for name in ("DynamicCache", "StaticCache") if name in result]
    rows = [
        *_cache_rows(result, pages="pages"),
        ("after free()", f"{paged['pages_used_after']} pages used"),
    ]
    if not others:
        return facts(rows)
    new = paged["new_tokens"]
    beside = {
        "bytes mapped": [size(result[name]["bytes"]) for name in others],
        "tokens/s": [f"{new / result[name]['seconds']:,.1f}" for name in others],
        "same tokens": ["yes" if result[name]["same_tokens"] else "NO" for name in others],
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="bold")
    for name in ("paged", *others):
        table.add_column(name, justify="right")
    for name, value in (*rows, ("same tokens", "")):
        label = "bytes taken" if name == "bytes mapped" else name
        table.add_row(label, value, *beside.get(name, []))
    return table


def _hits(engine: dict[str, Any]) -> str:
    return f"{engine['cached_tokens']:,} of {engine['asked_tokens']:,} prompt tokens"


def _cache_rows(result: dict[str, Any], pages: str) -> list[tuple[str, str]]:
    paged = result["paged"]
    return [
        ("tokens", f"{paged['prompt_tokens']:,} + {paged['new_tokens']:,} new"),
        (pages, f"{paged['pages_used']:,} of {result['page_size']} tokens"),
        ("bytes in use", size(paged["bytes_in_use"])),
        ("bytes mapped", size(paged["bytes_mapped"])),
        ("tokens/s", f"{paged['new_tokens'] / paged['seconds']:,.1f}"),
    ]
