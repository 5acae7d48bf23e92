from __future__ import annotations

import json
import re

import pytest
from tests.cli.conftest import said

from pageforge.memory import PageAllocator, PageTable

SHAPE = ("--layers", "4", "--kv-heads", "2", "--head-dim", "64", "--dtype", "float16")


# status


def test_status_of_a_geometry(invoke) -> None:
    done = invoke("pool", "status", *SHAPE, "--page-size", "32", "--max-pages", "100", "--json")
    found = json.loads(done.stdout)
    (group,) = found["groups"]
    assert group["bytes_per_page"] == 4 * 2 * 32 * (64 + 64) * 2
    assert group["layers"] == "0-3"
    assert group["chunk_bytes"] == group["chunk_pages"] * group["bytes_per_page"]
    assert (found["pages_total"], found["tokens"]) == (100, 3200)
    assert found["budget_from"] == "max_pages from option"


def test_status_of_a_model(invoke, tiny: str) -> None:
    done = invoke("pool", "status", "--model", tiny, "--max-memory", "1MiB")
    assert done.exit_code == 0, done.stderr
    assert tiny.rpartition("/")[2] in done.stdout.replace("\n", "")
    assert "1 MiB (max_memory from option)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layers", "4"], 2, "go together"),
        ([*SHAPE, "--model", "smollm2"], 2, "not both"),
        ([*SHAPE, "--page-size", "7"], 2, "page_size: expected one of"),
        ([*SHAPE, "--max-memory", "10"], 1, "max_memory: expected at least"),
        ([*SHAPE, "--device", "mps"], 1, "use DynamicCache there"),
    ],
)
def test_status_refuses(invoke, arguments: list[str], code: int, message: str) -> None:
    done = invoke("pool", "status", *arguments)
    assert done.exit_code == code
    assert message in said(done.stderr)


# simulate


def test_simulate_counts_what_paging_saves(invoke) -> None:
    arguments = ("-s", "60", "--pages", "128", "--reserve", "512", "--rate", "0.2", "--json")
    found = json.loads(invoke("pool", "simulate", *arguments).stdout)
    paged, static = found["paged"], found["static"]
    assert (paged["leaks"], static["leaks"]) == (0, 0)
    assert static["live_most"] == 128 // (512 // 16)
    assert paged["live_most"] > static["live_most"]
    assert paged["waste"] < 0.1 < static["waste"]
    assert paged["steps"] < static["steps"]
    assert paged["pages_most"] <= 128
    again = json.loads(invoke("pool", "simulate", *arguments).stdout)
    assert again == found


def test_simulate_shows_the_pool(invoke) -> None:
    done = invoke("pool", "simulate", "-s", "10", "--pages", "64", "--reserve", "256")
    assert done.exit_code == 0, done.stderr
    assert "the pool at its fullest" in done.stdout
    grid = done.stdout.splitlines()[-1]
    assert len(grid) == 64
    assert "A" in grid


def test_simulate_a_pool_too_small_for_anyone(invoke) -> None:
    done = invoke("pool", "simulate", "--pages", "8")
    assert done.exit_code == 2
    assert "lower --reserve" in said(done.stderr)


# stress


def test_stress_finds_nothing(invoke) -> None:
    found = json.loads(invoke("pool", "stress", "--json").stdout)
    assert found["pages_claimed"] == found["pages_returned"] == 500 * 16 * 8
    assert (found["leaks"], found["errors"], found["first_error"]) == (0, 0, None)


def test_stress_sees_a_leak(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    release = PageTable.release

    def leak(self) -> None:
        self._pages[0].pop()
        release(self)

    monkeypatch.setattr(PageTable, "release", leak)
    done = invoke("pool", "stress", "--cycles", "1", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["leaks"] == 16


def test_stress_sees_a_page_handed_out_twice(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = PageAllocator.allocate

    def twice(self, num_pages: int) -> list[int]:
        pages = allocate(self, num_pages)
        return [pages[0]] * len(pages)

    monkeypatch.setattr(PageAllocator, "allocate", twice)
    done = invoke("pool", "stress", "--cycles", "3", "-s", "2")
    assert done.exit_code == 1
    assert re.search(r"errors +[1-3]", done.stdout)
    assert ": reference counts differ" in done.stdout
