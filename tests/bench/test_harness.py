from __future__ import annotations

import math

import pytest
import torch
from tests.bench.conftest import CPU

from pageforge.bench import ceilings, harness
from pageforge.bench.harness import Budget, Candidate, measure


def explode() -> None:
    raise RuntimeError("first line\nsecond line")


def test_one_that_fails_is_noted_and_the_others_go_on() -> None:
    def missing() -> Candidate:
        raise ImportError("no module x")

    count = []
    timings = measure(
        {
            "missing": missing,
            "explodes": lambda: Candidate(explode, 1),
            "wrong": lambda: Candidate(lambda: 1, 1, lambda _: 0.5, tolerance=0.1),
            "nan": lambda: Candidate(lambda: 1, 1, lambda _: math.nan, tolerance=0.1),
            "fine": lambda: Candidate(lambda: count.append(1), 4, lambda _: 0.01, tolerance=0.1),
        },
        CPU,
        repeats=3,
    )
    assert list(timings) == ["missing", "explodes", "wrong", "nan", "fine"]
    assert timings["missing"].failure == "absent: no module x"
    assert timings["explodes"].failure == "RuntimeError: first line"
    assert "wrong output" in timings["wrong"].failure
    assert "wrong output" in timings["nan"].failure
    fine = timings["fine"]
    assert fine.ok
    assert fine.error == 0.01
    assert 0 < fine.us_low <= fine.us <= fine.us_high
    assert len(count) == 1 + 3


def test_one_that_fails_while_timed_is_noted() -> None:
    calls = iter([1, 1])
    timings = measure(
        {"once": lambda: Candidate(lambda: next(calls), 1), "fine": lambda: Candidate(int, 1)},
        CPU,
        repeats=3,
    )
    assert timings["once"].failure == "StopIteration: no message"
    assert timings["fine"].ok


def test_time_is_divided_by_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "elapsed", lambda run, device: 6e-6)
    timings = measure({"a": lambda: Candidate(int, 3)}, CPU, repeats=5)
    assert timings["a"].us == pytest.approx(2)


def test_every_repeat_begins_with_another() -> None:
    assert [harness.rotated(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert harness.rotated([], 3) == []


def test_statistics() -> None:
    assert harness.geometric_mean([2, 8]) == pytest.approx(4)
    assert math.isnan(harness.geometric_mean([]))
    values = list(range(1, 101))
    assert [harness.percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert harness.percentile([7], 99) == 7
    assert harness.quartiles([3]) == (3, 3, 3)
    assert harness.quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_a_budget_names_what_it_leaves_out() -> None:
    assert Budget(None).allows("anything")
    budget = Budget(0)
    assert not budget.allows("one")
    assert not budget.allows("two")
    assert budget.left_out == ["one", "two"]


def test_ceilings_on_the_cpu() -> None:
    assert ceilings.read_ceiling(CPU, 1 << 16) > 0
    assert ceilings.copy_ceiling(CPU, 1 << 16) > 0
    assert min(ceilings.host_copy_ceilings(CPU, 1 << 16)) > 0


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reading_kernel_reads_everything_once(interleaved: bool) -> None:
    pytest.importorskip("triton")
    source = torch.arange(4 * 3 * 64, dtype=torch.float32)
    sums = ceilings.stream(source, 64, 4, interleaved)
    assert sums.sum() == source.sum()
    blocks = source.view(-1, 64).sum(1)
    first = blocks[0::4].sum() if interleaved else blocks[:3].sum()
    assert sums[0] == first


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 4 * 64 + 1, 5 * 64, 1000])
def test_it_ends_inside_a_block(size: int, interleaved: bool) -> None:
    pytest.importorskip("triton")
    memory = torch.full((4096,), torch.nan)
    memory[:size] = torch.arange(size)
    assert ceilings.stream(memory[:size], 64, 4, interleaved).sum() == memory[:size].sum()


# --- the CUDA path, on a stand-in for CUDA ----------------------------------------------------


class FakeCuda:
    """Streams and graphs as far as the harness uses them: a replay is the captured run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.stream = "main"
        self.graphs: list[Graph] = []
        fake = self

        class Graph:
            def __init__(self) -> None:
                self.replays = 0
                self.effect = lambda: None
                fake.graphs.append(self)

            def replay(self) -> None:
                self.replays += 1
                self.effect()

        class Capture:
            def __init__(self, graph: Graph) -> None:
                pass

            def __enter__(self) -> None:
                fake.stream = "capture"

            def __exit__(self, kind, *rest) -> None:
                if kind is not None:
                    raise RuntimeError("capture failed")  # as torch does, before it restores
                fake.stream = "main"

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, stop: Event) -> float:
                return 0.003

        for name, value in {
            "CUDAGraph": Graph,
            "graph": Capture,
            "Event": Event,
            "synchronize": lambda *_: None,
            "current_stream": lambda *_: fake.stream,
            "set_stream": lambda stream: setattr(fake, "stream", stream),
            "_sleep": lambda _: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_graph_is_replayed_and_its_own_output_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    output = torch.zeros(3)

    def run() -> torch.Tensor:
        if cuda.graphs:
            cuda.graphs[0].effect = lambda: output.fill_(1)
        return output

    timings = measure(
        {"a": lambda: Candidate(run, 3, lambda out: float((out != 1).any()), tolerance=0)},
        torch.device("cuda"),
        repeats=4,
    )
    assert timings["a"].ok
    assert timings["a"].us == pytest.approx(1)
    assert cuda.graphs[0].replays == 1 + 4


def test_a_replay_that_writes_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    right = torch.ones(3)
    timings = measure(
        {"a": lambda: Candidate(lambda: right, 1, lambda out: float(out.sum() - 3), tolerance=0)},
        torch.device("cuda"),
        repeats=1,
    )
    assert "wrong output" in timings["a"].failure


def test_a_failed_capture_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    calls = iter([torch.zeros(1)])  # the first, eager one; then it raises
    timings = measure(
        {"a": lambda: Candidate(lambda: next(calls), 1)}, torch.device("cuda"), repeats=1
    )
    assert timings["a"].failure == "RuntimeError: capture failed"
    assert cuda.stream == "main"
