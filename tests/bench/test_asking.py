"""Questions are asked one after another: each leaves a file, and torch as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU

from pageforge.bench.asking import Where, ask_all, asking, summary
from pageforge.bench.questions import QUESTIONS, Question
from pageforge.bench.results import read_results
from pageforge.bench.run import Run


@pytest.fixture
def where(tmp_path: Path, screen: io.StringIO) -> Where:
    return Where(CPU, {"cpus": 2}, Console(file=screen, width=150), tmp_path)


def question(name: str, run_all: Callable[[Run], None], **rest) -> Question:
    return Question(name, f"What of {name}?", run_all, quick_seconds=0, **rest)


def fine(run: Run) -> None:
    if run.budget.allows("a case"):
        run.report.add(section="s", value_ms=1.5)


def broken(run: Run) -> None:
    run.report.add(section="s", value_ms=2.5)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.manual_seed(7)
    raise MemoryError("no memory left")


def test_one_that_fails_says_so_and_the_rest_go_on(where: Where, screen: io.StringIO) -> None:
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    told: list[tuple[str, float]] = []
    questions = [
        question("broken", broken),
        question("absent", broken, needs_cuda=True),
        question("fine", fine),
    ]
    ask_all(questions, where, told=lambda what, done: told.append((what, done)))

    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    found = {q.name: read_results(where.folder / f"{q.name}.jsonl") for q in questions}
    assert all(file.complete and file.machine == {"cpus": 2} for file in found.values())
    assert found["broken"].title == "What of broken?"
    assert found["broken"].results == [
        {"section": "s", "value_ms": 2.5},
        {"section": "broken", "failure": "MemoryError: no memory left"},
    ]
    (absent,) = found["absent"].results
    assert absent["failure"] == "RuntimeError: needs a CUDA device, and there is none here"
    assert found["fine"].results == [{"section": "s", "value_ms": 1.5}]
    assert [what for what, _ in told] == [
        "broken: begins",
        "absent: begins",
        "fine: begins",
        "fine: a case",
    ]
    assert [int(done) for _, done in told] == [0, 1, 2, 2]
    assert sorted(path.name for path in where.folder.iterdir()) == [
        "absent.jsonl",
        "broken.jsonl",
        "fine.jsonl",
    ]

    where.console.print(summary(questions, where.folder))
    lines = screen.getvalue().splitlines()
    shown = [line.split()[:4] for line in lines if line.startswith(("broken ", "absent ", "fine "))]
    assert shown == [
        ["broken", "1", "1", "0"],
        ["absent", "0", "1", "0"],
        ["fine", "1", "0", "0"],
    ]
    assert "broken: MemoryError: no memory left" in [line.rstrip() for line in lines][-2:]


def test_quick_has_each_question_s_own_seconds(where: Where) -> None:
    asked = [question("fine", fine)]
    ask_all(asked, where, quick=True)
    assert read_results(where.folder / "fine.jsonl").left_out == ["a case"]
    ask_all(asked, where, quick=True, seconds=100)
    assert read_results(where.folder / "fine.jsonl").left_out == []


def test_what_is_asked_is_what_the_question_is_given(where: Where) -> None:
    seen: list[Run] = []
    ask_all([question("q", seen.append)], where, model="gpt2", quick=True)
    (run,) = seen
    assert (run.device, run.model, run.quick, run.console) == (CPU, "gpt2", True, where.console)


def test_a_run_that_is_stopped_leaves_what_it_had(where: Where) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        asking(question("stopped", fine), where, seconds=100) as run,
    ):
        fine(run)
        torch.set_default_dtype(torch.float64)
        raise KeyboardInterrupt
    found = read_results(where.folder / "stopped.jsonl")
    assert found.results == [{"section": "s", "value_ms": 1.5}]
    assert not found.complete
    assert torch.get_default_dtype() is torch.float32


def test_cases_left_out_are_told_apart(where: Where, screen: io.StringIO) -> None:
    with asking(question("q", fine), where, seconds=0) as run:
        for case in ("growth, paged", "growth, dynamic"):
            assert not run.budget.allows(case)
    assert "no time left for: growth, paged; growth, dynamic\n" in screen.getvalue()


def test_without_a_folder_nothing_is_written(where: Where, tmp_path: Path) -> None:
    with asking(question("fine", fine), Where(CPU, {}, where.console, None), seconds=100) as run:
        fine(run)
    assert list(tmp_path.iterdir()) == []


def test_quick_ends_within_three_minutes() -> None:
    """What the questions' budgets add up to, with what begins just before its end and imports."""
    assert sum(q.quick_seconds for q in QUESTIONS.values()) <= 150
    assert all(name == q.name for name, q in QUESTIONS.items())
