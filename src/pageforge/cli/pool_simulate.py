"""`pageforge pool simulate`: the real allocator under a workload of sequences that come and go."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.table import Table

from pageforge.cli import options
from pageforge.cli.demo_screen import Cell, Grid, Screen
from pageforge.cli.output import print_json, progress, stdout
from pageforge.cli.settings import resolve
from pageforge.errors import OutOfPages
from pageforge.geometry import pages_for
from pageforge.memory import PageAllocator, PageTable

SPREAD = 1.0
"""Of the logarithms of the lengths, as in published chat workloads (about 0.9 to 1.4)."""

BARS = " ▁▂▃▄▅▆▇█"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            "pageforge pool simulate",
            "pageforge pool simulate --pages 4096 --sequences 1000 --reserve 4096",
            "pageforge pool simulate --rate 0.02 --json | jq .paged.utilisation",
        )
    )(simulate)


@dataclass
class Request:
    """A sequence to come."""

    arrives: int
    prompt: int
    reply: int


@dataclass
class Live:
    """A sequence that holds pages."""

    request: Request
    table: PageTable
    length: int  # tokens that exist; with a reservation the table is longer


@dataclass
class Tally:
    """What was seen, step by step."""

    steps: int = 0
    token_steps: int = 0  # tokens that existed, summed over the steps
    slot_steps: int = 0  # slots of the pages held, likewise
    live_steps: int = 0
    live_most: int = 0
    pages_most: int = 0
    waited_steps: int = 0
    preempted: int = 0
    leaks: int = 0
    history: list[int] = field(default_factory=list)  # pages used at each step
    peak: list[tuple[int, int, list[int]]] = field(default_factory=list)  # number, length, pages


def simulate(
    sequences: Annotated[
        int,
        options.option("--sequences", "-s", help="How many come.", min=1, panel=options.SEQUENCES),
    ] = 200,
    pages: Annotated[
        int, options.option("--pages", help="Pages in the pool.", min=1, panel=options.POOL)
    ] = 512,
    page_size: options.PageSize = None,
    prompt: Annotated[
        int,
        options.option(
            "--prompt", help="Tokens of a prompt, the median.", min=1, panel=options.SEQUENCES
        ),
    ] = 100,
    reply: Annotated[
        int,
        options.option(
            "--reply", help="Tokens of a reply, the median.", min=1, panel=options.SEQUENCES
        ),
    ] = 150,
    reserve: Annotated[
        int,
        options.option(
            "--reserve",
            help="The longest a sequence can be: what a static cache reserves for each.",
            min=2,
            panel=options.SEQUENCES,
        ),
    ] = 1024,
    rate: Annotated[
        float,
        options.option(
            "--rate", help="Arrivals a step.", min=0.0001, metavar="R", panel=options.SEQUENCES
        ),
    ] = 0.1,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Run a workload twice over the same pool: paged, and with each sequence's room reserved.

    A step is one token of every live sequence. Who does not fit waits; when a live sequence finds
    no page, the youngest one gives its pages up and starts again later.
    """
    settings = resolve(page_size=page_size)
    size = settings.page_size
    needed = pages_for(reserve, size)
    if needed > pages:
        raise typer.BadParameter(
            f"a sequence of {reserve} tokens needs {needed} pages of {size}, the pool "
            f"has {pages}: raise --pages or lower --reserve"
        )
    requests = workload(sequences, prompt, reply, reserve, rate, seed)
    paged = play(requests, pages, size, reserve=0, label="paged")
    static = play(requests, pages, size, reserve=reserve, label="static")
    found = {
        "sequences": sequences,
        "tokens": sum(request.prompt + request.reply for request in requests),
        "pages": pages,
        "page_size": size,
        "reserve": reserve,
        "paged": summary(paged, pages, size),
        "static": summary(static, pages, size),
    }
    if as_json:
        print_json(found)
    else:
        _show(found, paged, static)
    if paged.leaks or static.leaks:
        raise typer.Exit(1)


def workload(
    count: int, prompt: int, reply: int, longest: int, rate: float, seed: int
) -> list[Request]:
    """Sequences with lognormal lengths that arrive at random, in the order of arrival."""
    draw = random.Random(seed)
    requests, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        first = min(longest - 1, max(1, round(draw.lognormvariate(math.log(prompt), SPREAD))))
        more = min(longest - first, max(1, round(draw.lognormvariate(math.log(reply), SPREAD))))
        requests.append(Request(int(now), first, more))
    return requests


def play(
    requests: list[Request], num_pages: int, page_size: int, *, reserve: int, label: str
) -> Tally:
    """Drive the allocator through the workload; with `reserve` as a static cache would."""
    allocator = PageAllocator(num_pages)
    coming, waiting = deque(requests), deque[Request]()
    live: list[Live] = []
    tally = Tally()
    ended = progress(range(len(requests)), len(requests), label)
    next(ended)
    while coming or waiting or live:
        if not waiting and not live:  # nothing happens until the next one comes
            tally.steps = max(tally.steps, coming[0].arrives)
        while coming and coming[0].arrives <= tally.steps:
            waiting.append(coming.popleft())
        _admit(waiting, live, allocator, page_size, reserve)
        _grow(waiting, live, tally, reserve)
        _note(tally, waiting, live, allocator, page_size)
        for one in [one for one in live if one.length == one.request.prompt + one.request.reply]:
            one.table.release()
            live.remove(one)
            next(ended, None)
    tally.leaks = allocator.num_used
    return tally


def _admit(
    waiting: deque[Request],
    live: list[Live],
    allocator: PageAllocator,
    page_size: int,
    reserve: int,
) -> None:
    """Let in who fits, in order, as long as every live sequence can still get a page."""
    while waiting:
        request = waiting[0]
        table = PageTable([allocator], page_size)
        wanted = sum(table.needed(request.prompt)) + len(live)
        if live and not reserve and wanted > allocator.num_available:
            return
        try:
            table.append(reserve or request.prompt)
        except OutOfPages:
            return
        live.append(Live(waiting.popleft(), table, request.prompt))


def _grow(waiting: deque[Request], live: list[Live], tally: Tally, reserve: int) -> None:
    """One token for each live sequence, the oldest first."""
    for one in list(live):
        while one in live:
            try:
                if not reserve:
                    one.table.append(1)
                one.length += 1
                break
            except OutOfPages:
                youngest = live.pop()
                youngest.table.release()
                waiting.appendleft(youngest.request)
                tally.preempted += 1


def _note(
    tally: Tally,
    waiting: deque[Request],
    live: list[Live],
    allocator: PageAllocator,
    page_size: int,
) -> None:
    tally.steps += 1
    tally.token_steps += sum(one.length for one in live)
    tally.slot_steps += allocator.num_used * page_size
    tally.live_steps += len(live)
    tally.live_most = max(tally.live_most, len(live))
    tally.waited_steps += len(waiting)
    tally.history.append(allocator.num_used)
    if allocator.num_used > tally.pages_most:
        tally.pages_most = allocator.num_used
        tally.peak = [(i, one.length, one.table.pages()) for i, one in enumerate(live)]
    if tally.steps % 64 == 0:
        allocator.check_invariants([one.table.pages() for one in live])


def summary(tally: Tally, num_pages: int, page_size: int) -> dict[str, Any]:
    """What the tally comes to."""
    busy = len(tally.history)
    return {
        "steps": tally.steps,
        "live_mean": tally.live_steps / busy,
        "live_most": tally.live_most,
        "pages_most": tally.pages_most,
        "pages_mean": sum(tally.history) / busy,
        "utilisation": tally.token_steps / tally.slot_steps,
        "waste": 1 - tally.token_steps / tally.slot_steps,
        "waiting_mean": tally.waited_steps / busy,
        "preempted": tally.preempted,
        "leaks": tally.leaks,
    }


def _show(found: dict[str, Any], paged: Tally, static: Tally) -> None:
    console = stdout()
    console.print(
        f"{found['sequences']:,} sequences, {found['tokens']:,} tokens; a pool of "
        f"{found['pages']:,} pages of {found['page_size']} tokens\n"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("paged", justify="right")
    table.add_column(f"{found['reserve']:,} reserved", justify="right")
    kinds = (found["paged"], found["static"])
    for name, text in (
        ("steps until all had ended", "{steps:,}"),
        ("sequences at once, mean", "{live_mean:.1f}"),
        ("sequences at once, most", "{live_most:,}"),
        ("waiting, mean", "{waiting_mean:.1f}"),
        ("pages used, most", "{pages_most:,}"),
        ("of their slots hold a token", "{utilisation:.1%}"),
        ("wasted", "{waste:.1%}"),
        ("preempted", "{preempted:,}"),
        ("leaks", "{leaks:,}"),
    ):
        table.add_row(name, *(text.format(**kind) for kind in kinds))
    console.print(table)
    ascii_only = console.options.ascii_only
    if not ascii_only:
        width = min(console.width, 80)
        steps = max(len(paged.history), len(static.history))
        console.print("\npages used, step by step")
        for name, tally in (("paged", paged), ("static", static)):
            line = _sparkline(tally.history, found["pages"], steps, width - 8)
            console.print(f"{name:<7} {line}", overflow="crop", no_wrap=True)
    console.print("\nthe pool at its fullest, paged")
    screen = Screen(console)
    console.print(screen.bare(_grid(paged, found["pages"], found["page_size"])))


def _sparkline(history: list[int], most: int, steps: int, width: int) -> str:
    """The mean of each stretch of `steps / width` steps."""
    line = ""
    for column in range(width):
        part = history[column * steps // width : max((column + 1) * steps // width, 1)]
        if not part:
            break
        level = sum(part) / len(part) / most
        line += BARS[math.ceil(level * (len(BARS) - 1))]
    return line


def _grid(tally: Tally, num_pages: int, page_size: int) -> Grid:
    cells = {}
    for owner, length, pages in tally.peak:
        label = chr(ord("A") + owner % 26)
        for index, page in enumerate(pages):
            filled = min(1.0, (length - index * page_size) / page_size)
            cells[page] = Cell(owner, label, 1, filled)
    return Grid("", num_pages, cells)
