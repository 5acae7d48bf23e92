from __future__ import annotations

import io
import os
import pty
import re
import signal
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.cli.conftest import read, said, spawn

from pageforge.cli.demo_screen import Cell, Frame, Grid, Screen, take_frame
from pageforge.cli.demo_show import Show, State, batches, most_pages
from pageforge.cli.output import is_terminal
from pageforge.geometry import KVGeometry
from pageforge.hf.pretrained import load_model
from pageforge.pool import PagePool


@pytest.fixture
def show(tiny: str):
    """A show with the tiny model, and its batches."""
    model, tokenizer = load_model(tiny)
    both = batches(tokenizer, 6, 12, seed=0)
    with PagePool.for_model(model, page_size=8, max_pages=most_pages(both[0], 8)) as pool:
        yield Show(model, tokenizer, pool), both


# What is played


def test_the_grid_is_the_pool(show) -> None:
    show, both = show
    shared = 0
    for batch in both:
        for _ in show.play(batch):
            frame = take_frame(show.pool, batch, "", "")
            live = [m for m in batch if m.state is State.RUNNING]
            tables = [table for m in live for table in m.cache.page_tables]
            show.pool.check_invariants(tables)
            cells = frame.grids[0].cells
            assert len(cells) == frame.stats.pages_used
            held = [page for table in tables for page in table.pages()]
            assert {page: cell.holders for page, cell in cells.items()} == {
                page: held.count(page) for page in set(held)
            }
            for member in live:
                assert all(
                    cells[page].label == member.label or cells[page].holders > 1
                    for page in member.table.pages()
                )
            shared += any(cell.holders > 1 for cell in cells.values())
        assert show.pool.stats().pages_used == 0
    assert shared > 10  # forks share pages for a while


def test_sequences_differ_and_end_at_different_times(show) -> None:
    show, (batch, _) = show
    ends = [event for event in show.play(batch) if " ends after " in event]
    assert len(ends) == 6
    assert len({len(member.new) for member in batch}) > 2
    parent, *forks = [m for m in batch if m.forks or m.is_fork]
    assert len(forks) == 2
    assert all(fork.prompt == parent.prompt and fork.text != parent.text for fork in forks)


def test_the_same_seed_plays_the_same(tiny: str) -> None:
    model, tokenizer = load_model(tiny)

    def texts(seed: int) -> list[str]:
        (batch, _) = batches(tokenizer, 4, 8, seed)
        with PagePool.for_model(model, page_size=8, max_pages=200) as pool:
            for _ in Show(model, tokenizer, pool).play(batch):
                pass
        return [member.text for member in batch]

    assert texts(1) == texts(1) != texts(2)


def test_a_pool_too_small_for_all_makes_sequences_wait(tiny: str) -> None:
    model, tokenizer = load_model(tiny)
    (batch, _) = batches(tokenizer, 6, 24, seed=0)
    most = max(-(-(len(m.prompt) + 24) // 8) for m in batch) + 4
    waited = False
    with PagePool.for_model(model, page_size=8, max_pages=most) as pool:
        for _ in Show(model, tokenizer, pool).play(batch):
            waited = waited or any(m.state is State.WAITING for m in batch)
        assert pool.stats().pages_used == 0
    assert waited
    assert all(member.state is State.ENDED for member in batch)


def test_where_nobody_can_go_on_one_ends_early(tiny: str) -> None:
    model, tokenizer = load_model(tiny)
    (batch, _) = batches(tokenizer, 2, 40, seed=0)
    prompts = sum(-(-len(m.prompt) // 8) for m in batch)
    with PagePool.for_model(model, page_size=8, max_pages=prompts + 2) as pool:
        events = [event for event in Show(model, tokenizer, pool).play(batch) if event]
        assert pool.stats().pages_used == 0
    assert any(event.startswith("no page left: B ends after") for event in events)


# How it looks


def frame_of(num_members: int, pages_total: int = 90) -> Frame:
    cells = {
        page: Cell(page % num_members, "ABCDEFGH"[page % 8], 1 + (page % 7 == 0), page % 9 / 8 or 1)
        for page in range(1, 60, 2)
    }
    geometry = KVGeometry.uniform(1, 1, 8, dtype="float32", page_size=8)
    with PagePool(geometry, max_pages=4) as pool:
        stats = pool.stats()
    states = list(State)
    members = tuple(
        ("ABCDEFGH"[n % 8], states[n % 4], 12 * n, n, "words and 文字 \x1b[31m " * n)
        for n in range(num_members)
    )
    return Frame("title", "note", "status", (Grid("", pages_total, cells),), stats, 8, members)


def draw(frame: Frame, width: int, height: int, encoding: str = "utf-8", **options) -> list[str]:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, errors="replace")
    console = Console(file=file, width=width, height=height, **options)
    console.print(Screen(console).full(frame))
    file.flush()
    return buffer.getvalue().decode(encoding).splitlines()


SIZES = [(80, 24), (120, 40), (50, 24), (30, 10), (200, 60), (80, 12)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("num_members", [1, 8, 26])
def test_a_frame_fits_the_screen(width: int, height: int, num_members: int) -> None:
    lines = draw(frame_of(num_members), width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    assert lines[0].startswith(" title")
    assert lines[-1].startswith(" note")
    assert any("mapped" in line for line in lines)


@pytest.mark.parametrize(
    ("filled", "text"),
    [(1 / 256, "a▁"), (1 / 8, "a▁"), (0.5, "a▄"), (255 / 256, "a█"), (1.0, "A ")],
)
def test_how_far_a_page_is_filled(filled: float, text: str) -> None:
    frame = frame_of(26)
    grid = Grid("", 90, {1: Cell(0, "A", 1, filled)})
    lines = draw(replace(frame, grids=(grid,)), 80, 16)
    assert lines[2].startswith(f"│  {text} ·")


def test_a_large_pool_is_cut(tiny: str) -> None:
    lines = draw(frame_of(8, pages_total=1_000_000), 80, 24)
    assert len(lines) <= 24
    assert "of 1,000,000 pages in use (99" in lines[1]


@pytest.mark.parametrize("options", [{"no_color": True}, {"color_system": None}])
def test_without_colour_the_letters_remain(options) -> None:
    lines = draw(frame_of(8), 80, 24, force_terminal=True, **options)
    text = "\n".join(lines)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])[;m]", text)
    assert "B" in text


def test_a_terminal_without_unicode() -> None:
    text = "\n".join(draw(frame_of(1), 80, 24, encoding="ascii"))
    assert "+- 30 of 90 pages in use -" in text
    assert "?" not in text


def test_a_model_cannot_write_escape_codes_to_the_screen() -> None:
    assert "\x1b" not in "\n".join(draw(frame_of(8), 80, 24))


# The command


def test_the_log(invoke, tiny: str) -> None:
    done = invoke("demo", "--model", tiny, "-n", "8", "--seed", "3")
    assert done.exit_code == 0, done.stderr
    log = done.stdout
    assert "\x1b" not in log
    assert log.count("all have ended: every page is back") == 2
    assert log.count("used 0 of") == 3
    assert len(re.findall(r"^[A-H] ends after", log, re.MULTILINE)) == 16
    assert "which its forks G and H share" in log
    same, of = map(int, re.search(r"(\d+) of the (\d+) pages of batch 2", log).groups())
    assert 0.8 * of < same <= of
    assert "0 pages used" in log.splitlines()[-1]


def test_a_pool_that_no_prompt_fits_into(invoke, tiny: str) -> None:
    done = invoke("demo", "--model", tiny, "--max-pages", "2")
    assert done.exit_code == 1
    assert said(done.stderr).startswith("error: out of pages: needed")
    assert "0 pages used" in done.stdout


def test_ctrl_c_leaves_the_screen_as_it_was(tiny: str) -> None:
    screen, terminal = pty.openpty()
    process = spawn(
        "demo",
        "--model",
        tiny,
        "-n",
        "2000",
        env={"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        drawn = read(screen, until=b"B arrives")
        process.send_signal(signal.SIGINT)
        drawn += read(screen, until=None)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert drawn.count(b"\x1b[?1049h") == drawn.count(b"\x1b[?1049l") == 1  # the second screen
    after = drawn.partition(b"\x1b[?1049l")[2].decode()
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")  # the cursor is back
    assert re.search(
        r"0 pages used, .* mapped\s+stopped", re.sub(r"\x1b\[[0-9;?]*[a-z]", "", after)
    )
    assert "Traceback" not in after


@pytest.mark.parametrize(
    ("is_tty", "term", "drawn"),
    [(True, "xterm", True), (True, "", True), (True, "dumb", False), (False, "xterm", False)],
)
def test_where_a_screen_is_drawn(
    monkeypatch: pytest.MonkeyPatch, is_tty: bool, term: str, drawn: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_tty)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours in a pipe are one thing, a screen another
    assert is_terminal() == drawn
