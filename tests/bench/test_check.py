"""Results that cannot be true are told by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.written import write

from pageforge.bench import check
from pageforge.bench.check import problems
from pageforge.bench.questions import Question
from pageforge.bench.results import RECORDING, read_folder, read_results

POOL = {
    "section": "memory",
    "way": "paged",
    "pages_claimed": 5,
    "pages_returned": 5,
    "pages_bytes": 100,
    "storage_bytes": 128,
    "mapped_bytes": 90,  # by a meter that saw other memory go
    "peak_bytes": None,
    "over_stub_bytes": -1,
    "p50_ms": 1.5,
}


def told(folder: Path, record: dict, question: str = "latency", **rest) -> list[str]:
    path = write(folder, question, record, **rest)
    return [problem.replace(str(path), "FILE") for problem in problems(read_folder(folder))]


def test_what_may_be(tmp_path: Path) -> None:
    assert told(tmp_path / "sound", POOL) == []
    assert told(tmp_path / "dense", {"section": "steps", "pages_left": None}) == []
    absent = {"section": "steps", "failure": "absent: no module named fa3"}
    assert told(tmp_path / "peer", absent) == []
    no_gpu = {"section": "kernels", "failure": "RuntimeError: needs a CUDA device"}
    assert told(tmp_path / "no gpu", no_gpu, "kernels") == []
    assert told(tmp_path / "gpu", no_gpu, "kernels", machine={"device": "cuda"}) != []
    refused = {"section": "steps", "failure": "UnsupportedModel: MLA cannot be packed"}
    assert told(tmp_path / "refused", refused) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"pages_returned": 4}, "pages_claimed 5, but pages_returned 4"),
        ({"pages_returned": None}, "pages_claimed 5, but pages_returned None"),
        ({"storage_bytes": 99}, "99 bytes measured, but the pages' own are 100"),
        ({"pages_left": 2}, "pages_left: expected 0, got 2"),
        (
            {"storage_bytes": None, "cache_bytes": 98},
            "98 bytes measured, but the pages' own are 100",
        ),
        ({"storage_bytes": None}, "90 bytes measured, but the pages' own are 100"),
        ({"p50_ms": -1.0}, "p50_ms: expected at least 0, got -1.0"),
        ({"p50_ms": "fast"}, "p50_ms: expected a number, got 'fast'"),
    ],
)
def test_what_cannot_be(tmp_path: Path, fault: dict, message: str) -> None:
    assert told(tmp_path, {**POOL, **fault}) == [f"FILE, result 1 (memory): {message}"]


def test_what_failed(tmp_path: Path) -> None:
    failed = {"section": "steps", "failure": "RuntimeError: why"}
    want = ["FILE, result 1 (steps) failed: RuntimeError: why"]
    assert told(tmp_path / "latency", failed) == want
    on_gpu = told(tmp_path / "kernels", failed, "kernels", machine={"device": "cuda"})
    assert on_gpu == want


def test_files_that_say_too_little(tmp_path: Path) -> None:
    assert told(tmp_path / "cut", POOL, ended=False) == ["FILE: the run was cut short"]
    path = write(tmp_path / "empty", "latency")
    assert problems([read_results(path)]) == [f"{path}: no results"]
    (unknown,) = told(tmp_path / "unknown", POOL, "speed")
    assert unknown.startswith("FILE: unknown question 'speed': one of kernels")


def test_a_recording_answers_no_question(tmp_path: Path) -> None:
    assert told(tmp_path, {**POOL, "pages_returned": 4}, RECORDING) == []


def test_a_whole_set_must_show_that_pages_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {name: Question(name, name, lambda run: None, 1) for name in ("latency", "vram")}
    monkeypatch.setattr(check, "QUESTIONS", asked)
    write(tmp_path, "latency", {"section": "steps", "p50_ms": 1.0})
    assert problems(read_folder(tmp_path)) == []
    write(tmp_path, "vram", {"section": "growth", "pages_bytes": 1, "mapped_bytes": 2})
    assert problems(read_folder(tmp_path)) == [
        "no result has pages_claimed and pages_returned: nothing shows that they hold"
    ]
    write(tmp_path, "vram", POOL)
    assert problems(read_folder(tmp_path)) == []
