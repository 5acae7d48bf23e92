"""How the demo looks: the pool's pages as a grid, the sequences below, in any width and height."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pageforge.cli.demo_show import Member, State
from pageforge.cli.output import printable, ranges, size
from pageforge.geometry import ceil_div
from pageforge.pool import PagePool, PoolStats

COLOURS = (
    "#5fafff",
    "#ffaf5f",
    "#87d787",
    "#ff87af",
    "#d7d75f",
    "#af87ff",
    "#5fd7d7",
    "#ff875f",
    "#afd7ff",
    "#d7af87",
    "#afff87",
    "#d787d7",
)
FILLS = "▁▂▃▄▅▆▇█"
CELLS = ((5, 3), (5, 2), (3, 2), (3, 1), (1, 1))
"""Columns and lines of a page on the screen, the largest first."""


@dataclass(frozen=True)
class Cell:
    """A page in use: whose it is, how many share it, and how much of it is filled."""

    owner: int  # the first holder's place in the batch
    label: str
    holders: int
    filled: float


@dataclass(frozen=True)
class Grid:
    """The pages of one layer group: page id -> cell."""

    name: str
    pages_total: int
    cells: dict[int, Cell]


@dataclass(frozen=True)
class Frame:
    """The pool and the sequences at one moment."""

    title: str
    note: str  # what happened last
    status: str  # what holds all the time
    grids: tuple[Grid, ...]
    stats: PoolStats
    page_size: int
    members: tuple[tuple[str, State, int, int, str], ...]  # label, state, tokens, pages, text


def take_frame(
    pool: PagePool, batch: Sequence[Member], title: str, note: str, status: str = ""
) -> Frame:
    """Look at the live page tables."""
    stats = pool.stats()
    grids = []
    for index, group in enumerate(stats.groups):
        name = "" if len(stats.groups) == 1 else f"layers {ranges(group.layers)}: "
        grids.append(Grid(name, group.pages_total, _cells(batch, index)))
    members = tuple(
        (
            member.label,
            member.state,
            member.num_tokens if member.state in (State.RUNNING, State.ENDED) else 0,
            member.table.num_pages if member.state is State.RUNNING and member.table else 0,
            member.text,
        )
        for member in batch
    )
    return Frame(title, note, status, tuple(grids), stats, pool.geometry.page_size, members)


def _cells(batch: Sequence[Member], group: int) -> dict[int, Cell]:
    cells: dict[int, Cell] = {}
    for owner, member in enumerate(batch):
        table = member.table if member.state is State.RUNNING else None
        if table is None:
            continue
        pages = table.pages(group)
        for page in pages:
            part = table.length % table.page_size if page == pages[-1] else 0
            filled = part / table.page_size if part else 1.0
            known = cells.get(page)
            if known is None:
                cells[page] = Cell(owner, member.label, 1, filled)
            else:
                cells[page] = Cell(
                    known.owner, known.label, known.holders + 1, max(known.filled, filled)
                )
    return cells


class Screen:
    """Draws frames for one console."""

    def __init__(self, console: Console):
        self.console = console
        self._ascii = console.options.ascii_only
        self._colour = not console.no_color and console.color_system is not None

    # --- whole frames -----------------------------------------------------------------------

    def full(self, frame: Frame) -> RenderableType:
        """All of it, cut to the console's size."""
        width, height = self.console.size
        parts = len(frame.grids)
        room = height - len(("title", "legend", "in use", "mapped", "note")) - 2 * parts
        # Where not everything fits, the grid gets half, and the sequences the rest.
        rows = max(1, max(room // 2, room - len(frame.members)) // parts)
        free = room - len(frame.members)
        cell = self._largest_cell(frame, width - 4, free, max(free, rows * parts))
        spare = free - self._num_lines(frame, width - 4, cell)
        panels = [self._panel(grid, width, rows, cell) for grid in frame.grids]
        if frame.status:
            panels[-1][0].subtitle = Text(frame.status)
        members = max(0, room - sum(lines for _, lines in panels))
        return Group(
            self._clipped(Text(f" {frame.title}", style="bold"), width),
            *(panel for panel, _ in panels),
            self._clipped(self._legend(frame.page_size, width), width),
            *[Text()] * (spare > 2),
            *self._meters(frame.stats, width),
            *[Text()] * (spare > 0),
            *self._members(frame, width, members),
            *[Text()] * (spare > 1),
            self._clipped(Text(f" {frame.note}", style="italic"), width),
        )

    def short(self, frame: Frame) -> RenderableType:
        """Grid and numbers only, for a log."""
        width = min(self.console.width, 80)
        lines: list[Text] = []
        for grid in frame.grids:
            if not grid.cells:
                continue
            if grid.name:
                lines.append(Text(f"  {grid.name}"))
            shown, _ = self._grid_lines(grid, width - 2, rows=16)
            lines += [Text("  ").append_text(line) for line in shown]
        stats = frame.stats
        lines.append(
            Text(
                f"  used {stats.pages_used} of {stats.pages_total} pages, "
                f"{size(stats.bytes_in_use)} in use, {size(stats.bytes_mapped)} mapped"
            )
        )
        return Group(*lines)

    def bare(self, grid: Grid, rows: int = 16) -> RenderableType:
        """A grid alone, one column a page."""
        width = min(self.console.width, 64)
        lines, hidden = self._grid_lines(grid, width, rows, (1, 1))
        return Group(*lines, *([Text(f"and {hidden:,} more", style="dim")] if hidden else []))

    # --- parts ------------------------------------------------------------------------------

    def _panel(self, grid: Grid, width: int, rows: int, cell: tuple[int, int]) -> tuple[Panel, int]:
        """(panel, lines inside)."""
        lines, hidden = self._grid_lines(grid, width - 4, rows, cell)
        title = f"{grid.name}{len(grid.cells)} of {grid.pages_total:,} pages in use"
        if hidden:
            title += f" ({hidden:,} not shown)"
        panel = Panel(
            Group(*lines),
            title=Text(title, style="bold"),
            title_align="left",
            subtitle_align="left",
            border_style="dim",
            width=width,
        )
        return panel, len(lines)

    def _largest_cell(self, frame: Frame, width: int, free: int, at_most: int) -> tuple[int, int]:
        """The largest cell that fits; one of several lines must not take the sequences' room."""
        for cell in CELLS:
            if self._num_lines(frame, width, cell) <= (free if cell[1] > 1 else at_most):
                return cell
        return CELLS[-1]

    def _num_lines(self, frame: Frame, width: int, cell: tuple[int, int]) -> int:
        columns = max(1, width // cell[0])
        return sum(ceil_div(grid.pages_total, columns) for grid in frame.grids) * cell[1]

    def _grid_lines(
        self, grid: Grid, width: int, rows: int, size: tuple[int, int] = (3, 1)
    ) -> tuple[list[Text], int]:
        """(lines, pages that found no room)."""
        columns = max(1, width // size[0])
        last = min(grid.pages_total, columns * (rows // size[1]))
        lines = []
        for first in range(1, last + 1, columns):
            cells = [grid.cells.get(page) for page in range(first, min(first + columns, last + 1))]
            for part in range(size[1]):
                line = Text(no_wrap=True, overflow="crop")
                for cell in cells:
                    line.append_text(self._cell(cell, part, size))
                lines.append(line)
        return lines, grid.pages_total - last

    def _cell(self, cell: Cell | None, part: int, size: tuple[int, int]) -> Text:
        """Line `part` of a cell: the letter, or how far the page is filled."""
        width, height = size
        named = part == (height - 1) // 2
        if cell is None:
            dot = "." if self._ascii else "·"
            return Text((dot if named else "").center(width), style="dim")
        colour = COLOURS[cell.owner % len(COLOURS)]
        shared = str(cell.holders) if 1 < cell.holders < 10 else "+" if cell.holders > 1 else " "
        if cell.filled >= 1:
            style = ""
            if self.console.is_terminal:
                style = f"black on {colour}" if self._colour else "reverse"
            label = cell.label if width == 1 else f" {cell.label}{shared}"
            return Text((label if named else "").center(width), style=style)
        fill = " " if self._ascii else FILLS[math.ceil(cell.filled * len(FILLS)) - 1]
        if width == 1:
            return Text(cell.label.lower(), style=colour)
        if named:
            mark = fill if height == 1 and shared == " " else shared
            return Text(f" {cell.label.lower()}{mark}".center(width), style=colour)
        return Text((fill if part == height - 1 else " ") * width, style=colour)

    def _legend(self, page_size: int, width: int) -> Text:
        dot = "." if self._ascii else "·"
        text = (
            f" cell: a page of {page_size} tokens   a: still filling   2: held by two   {dot} free"
        )
        if len(text) > width:
            text = f" cell: {page_size} tokens  a: filling  2: held by two  {dot} free"
        return Text(text, style="dim")

    def _meters(self, stats: PoolStats, width: int) -> list[Text]:
        page_bytes = sum(group.bytes_per_page * group.pages_total for group in stats.groups)
        rows = [
            ("in use", stats.bytes_in_use, "cyan"),
            ("mapped", stats.bytes_mapped, "green"),
        ]
        total = size(page_bytes)
        values = [f"{size(num_bytes)} of {total}" for _, num_bytes, _ in rows]
        room = max(4, width - 10 - max(map(len, values)))
        lines = []
        for (name, num_bytes, colour), value in zip(rows, values, strict=True):
            filled = min(room, round(room * num_bytes / page_bytes))
            full, rest = ("#", "-") if self._ascii else ("█", "░")
            line = Text(f" {name} ", no_wrap=True, overflow="crop")
            line.append(full * filled, style=colour).append(rest * (room - filled), style="dim")
            lines.append(line.append(f" {value}"))
        return lines

    def _members(self, frame: Frame, width: int, rows: int) -> list[Text]:
        """A line for each sequence; where there are too many, those that run come first."""
        members = list(enumerate(frame.members))
        if len(members) > rows:
            order = (State.RUNNING, State.WAITING, State.ENDED, State.LATER)
            members.sort(key=lambda item: order.index(item[1][1]))
            members = sorted(members[:rows])
        return [self._member(owner, member, width) for owner, member in members]

    def _member(self, owner: int, member: tuple[str, State, int, int, str], width: int) -> Text:
        label, state, tokens, pages, text = member
        colour = COLOURS[owner % len(COLOURS)]
        line = Text(" ", no_wrap=True, overflow="crop")
        line.append(f" {label} ", style=f"black on {colour}" if self._colour else "bold")
        if state in (State.LATER, State.WAITING):
            return line.append(f" {state.value}", style="dim")
        over = state is State.ENDED
        line.append(f" {tokens:>4} tokens ", style="dim" if over else "")
        line.append("   ended " if over else f"{pages:>2} pages ", style="dim" if over else "")
        text = " ".join(printable(text).split())
        line.append(
            _tail(text, width - line.cell_len - 1, self._ascii), style="dim" if over else ""
        )
        return line

    def _clipped(self, text: Text, width: int) -> Text:
        text.truncate(width, overflow="crop" if self._ascii else "ellipsis")
        text.no_wrap = True
        return text


def _tail(text: str, width: int, ascii_only: bool) -> str:
    """The end of `text` that fits into `width` columns."""
    if cell_len(text) <= width:
        return text
    dots = "..." if ascii_only else "…"
    start = max(0, len(text) - max(0, width - len(dots)))
    while start < len(text) and cell_len(text[start:]) > width - len(dots):
        start += 1
    return dots + text[start:]
