"""`pageforge demo`: watch a real model's sequences come, grow and go in one pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import typer
from rich.live import Live

from pageforge.cli import options
from pageforge.cli.demo_screen import Frame, Screen, take_frame
from pageforge.cli.demo_show import Member, Show, State, batches, most_pages
from pageforge.cli.models import load, use_threads
from pageforge.cli.output import facts, is_terminal, printable, size, stdout
from pageforge.cli.settings import resolve
from pageforge.pool import PagePool

DEFAULTS = {"page_size": 8, "max_new_tokens": 32}
"""Small pages and short answers: there is more to see, and it is over in half a minute."""

STEP_SECONDS = 0.03
"""A live step takes at least this long: a fast GPU would leave nothing to watch."""

HOLD_SECONDS = 1.5
"""How long the end of a batch stays on the screen."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            "pageforge demo",
            "pageforge demo --sequences 12 --page-size 16",
            "pageforge demo --max-pages 40",
            "pageforge demo --plain | less",
        )
    )(demo)


def demo(
    sequences: Annotated[
        int,
        options.option(
            "--sequences", "-s", help="In each batch.", panel=options.SEQUENCES, min=1, max=26
        ),
    ] = 8,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = None,
    page_size: options.PageSize = None,
    max_pages: options.MaxPages = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    plain: Annotated[
        bool,
        options.flag("--plain", help="Print a log, draw no screen.", panel=options.OUTPUT),
    ] = False,
) -> None:
    """Watch sequences of a real model arrive, grow and end in one pool of pages.

    Two batches run, each sequence with a paged cache of its own; the grid is read from the live
    page tables. The second batch gets the physical pages that the first one gave back.
    """
    settings = resolve(
        DEFAULTS,
        model=model,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        max_pages=max_pages,
        device=device,
        dtype=dtype,
    )
    loaded, tokenizer = load(settings)
    use_threads(threads)
    both = batches(tokenizer, sequences, settings.max_new_tokens, seed)
    most = max(most_pages(batch, settings.page_size) for batch in both)
    with PagePool.for_model(
        loaded, page_size=settings.page_size, max_pages=settings.max_pages or most
    ) as pool:
        show = Show(loaded, tokenizer, pool)
        name = f"{settings.model} on {loaded.device}, {str(loaded.dtype).removeprefix('torch.')}"
        view = _Live(name) if is_terminal() and not plain else _Log(name)
        results: list[Result] = []
        try:
            with view:
                results.extend(_perform(show, view, both))
        finally:
            for batch in both:
                show.end(batch)
            _conclude(pool, results)


@dataclass
class Result:
    """What a batch did."""

    tokens: int
    pages: set[tuple[int, int]]  # (group, page) that it ever held
    peak: Frame


def _perform(show: Show, view: _View, both: list[list[Member]]) -> Iterator[Result]:
    before: set[tuple[int, int]] = set()
    for number, batch in enumerate(both, 1):
        title = f"batch {number} of {len(both)}"
        note = f"{len(batch)} sequences arrive, one after the other"
        peak = take_frame(show.pool, batch, title, note)
        view.begin(peak)
        pages: set[tuple[int, int]] = set()
        status = ""
        for event in show.play(batch):
            note = event or note
            frame = take_frame(show.pool, batch, title, note)
            pages.update((g, page) for g, grid in enumerate(frame.grids) for page in grid.cells)
            status = f"{len(pages)} pages so far"
            if before:
                status += f", {len(pages & before)} of them were batch 1's"
            if frame.stats.pages_used > peak.stats.pages_used:
                peak = frame
            view.step(replace(frame, status=status), event)
        note = "all have ended: every page is back"
        view.end(take_frame(show.pool, batch, title, note, status))
        before = before or pages
        yield Result(sum(member.num_tokens for member in batch), pages, peak)
    show.pool.trim()
    view.end(take_frame(show.pool, [], title, "and trim() gave their memory back", status))


def _conclude(pool: PagePool, results: list[Result]) -> None:
    """What there is to say when the screen is gone."""
    console = stdout()
    rows = []
    for number, result in enumerate(results, 1):
        peak = result.peak.stats
        if is_terminal():
            console.print(f"batch {number} at its peak", style="bold")
            console.print(Screen(console).short(result.peak))
        rows.append(
            (
                f"batch {number}",
                f"{len(result.peak.members)} sequences, {result.tokens} tokens; "
                f"{peak.pages_used} pages and {size(peak.bytes_mapped)} mapped at the peak",
            )
        )
    if len(results) == 2:
        first, second = (result.pages for result in results)
        same = f"{len(first & second)} of the {len(second)} pages of batch 2 were batch 1's"
        rows.append(("reuse", same))
    pool.trim()
    now = pool.stats()
    rows.append(("now", f"{now.pages_used} pages used, {size(now.bytes_mapped)} mapped"))
    console.print()
    console.print(facts(rows))


class _View(Protocol):
    """How a performance is shown."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def begin(self, frame: Frame) -> None:
        """A batch begins."""

    def step(self, frame: Frame, event: str) -> None:
        """Something happened: a token (no event), or more."""

    def end(self, frame: Frame) -> None:
        """A batch is over; or, without sequences, everything is."""


class _Live:
    """Draws on the terminal's second screen, so that nothing half-drawn stays."""

    def __init__(self, name: str):
        self._name = name
        console = stdout()
        self._screen = Screen(console)
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._next = 0.0

    def __enter__(self) -> None:
        self._live.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._live.__exit__(*exc_info)

    def begin(self, frame: Frame) -> None:
        self._draw(frame)

    def step(self, frame: Frame, event: str) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + STEP_SECONDS
        self._draw(frame)

    def end(self, frame: Frame) -> None:
        self._draw(frame)
        time.sleep(HOLD_SECONDS)

    def _draw(self, frame: Frame) -> None:
        title = f"PageForge demo, {frame.title}: {self._name}"
        self._live.update(self._screen.full(replace(frame, title=title)), refresh=True)


class _Log:
    """Prints what happens, and the grid at a few moments."""

    def __init__(self, name: str):
        self._name = name
        self._console = stdout()
        self._screen = Screen(self._console)
        self._moments: list[Callable[[Frame], bool]] = []

    def __enter__(self) -> None:
        self._say(f"PageForge demo: {self._name}")

    def __exit__(self, *exc_info: object) -> None:
        """Nothing to tidy up."""

    def begin(self, frame: Frame) -> None:
        self._say(f"\n{frame.title}: {frame.note}")
        self._moments = [_all_are_here, _half_have_ended]

    def step(self, frame: Frame, event: str) -> None:
        if event:
            self._say(event)
        if self._moments and self._moments[0](frame):
            self._moments.pop(0)
            self._console.print(self._screen.short(frame))

    def end(self, frame: Frame) -> None:
        self._say(frame.note)
        self._console.print(self._screen.short(frame))
        for label, _, tokens, _, text in frame.members:
            self._say(f"  {label} ({tokens} tokens): {' '.join(printable(text).split())}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _all_are_here(frame: Frame) -> bool:
    return not any(state in (State.LATER, State.WAITING) for _, state, *_ in frame.members)


def _half_have_ended(frame: Frame) -> bool:
    return 2 * sum(state is State.ENDED for _, state, *_ in frame.members) >= len(frame.members)
