"""What becomes of requests that arrive one after the other, by every way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tests.engine.served import launch_ahead

from pageforge.bench import serving
from pageforge.bench.engine_probe import token_times
from pageforge.bench.online import Served
from pageforge.bench.serving import Server, Setting
from pageforge.bench.workloads import Job, params_of
from pageforge.engine.engine import Engine

JOBS = [Job([1, 2, 3], 6), Job([9], 2), Job([4] * 20, 3), Job([7, 8], 1)]


@pytest.mark.parametrize("way", ["engine", "generate", "one by one", "generate_batch"])
@torch.no_grad()
def test_every_token_of_every_request_is_noted(model, tokenizer, way: str) -> None:
    """`serve_all` checks how many there are, and that none came before its request."""
    times = [0.01, 0.02, 0.02, 0.1]
    with serving.WAYS[way].open(Setting(model, tokenizer, JOBS)) as server:
        served = server.serve_all(JOBS, times)
        assert [each.arrived for each in served] == times
        assert server(JOBS)  # it can still do what it did


def test_a_second_run_has_its_own_times(model, tokenizer) -> None:
    with serving.WAYS["engine"].open(Setting(model, tokenizer, JOBS)) as server:
        server(JOBS)
        first = server.serve_all(JOBS, [0.0, 0.0, 0.0, 0.0])
        second = server.serve_all(JOBS, [0.0, 0.0, 0.0, 0.0])
    assert [len(each.tokens) for each in first] == [len(each.tokens) for each in second]
    assert "_sample" not in vars(server.engine._core)


GOOD = [Served(0.0, 0.1, [0.2, 0.3]), Served(0.0, 0.1, [0.2])]


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (0, {"tokens": [0.2]}, "expected 3 new tokens, each its own; got 2"),
        (1, {"tokens": [0.2, 0.3]}, "got 4"),
        (0, {"tokens": [0.3, 0.2]}, "in order"),
        (1, {"arrived": 0.15}, "after its arrival"),
        (1, {"started": 0.25}, "after its arrival"),
    ],
)
def test_a_server_that_reports_nonsense_fails(at: int, changes: dict, message: str) -> None:
    served = list(GOOD)
    served[at] = dataclasses.replace(served[at], **changes)

    def serve(jobs: list[Job], times: Sequence[float]) -> list[Served]:
        return served

    jobs = [Job([1], 2), Job([2], 1)]
    with pytest.raises(ArithmeticError, match=message):
        Server(lambda jobs: [], serve).serve_all(jobs, [0.0, 0.0])


def test_a_request_that_fails_fails_the_way(model, tokenizer, monkeypatch) -> None:
    with (
        pytest.raises(ValueError, match="planted"),
        serving.WAYS["engine"].open(Setting(model, tokenizer, JOBS)) as server,
    ):

        def fail(*arguments: object, **options: object) -> None:
            raise ValueError("planted")

        monkeypatch.setattr(server.engine._core.runner, "launch", fail)
        server.serve_all(JOBS, [0.0] * 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_count_from_when_they_are_on_the_host(
    model, tokenizer, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """On a GPU that is a step after they were launched."""
    if ahead:
        launch_ahead(monkeypatch)
    with Engine(model, tokenizer, prefix_cache=False) as engine, token_times(engine) as came:
        engine.add_request([1, 2, 3], params_of(Job([1, 2, 3], 3)), request_id="a")
        engine.step()
        came.note(1.0)
        engine.add_request([4], params_of(Job([4], 2)), request_id="b")
        for now in (2.0, 3.0, 4.0, 5.0):
            engine.step()
            came.note(now)
    found = {name: moments[:3] for name, moments in came.by_request().items()}
    first = 2.0 if ahead else 1.0
    assert found["a"] == [first, first + 1, first + 2]
    assert found["b"][:2] == [first + 1, first + 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_brings_no_token_twice(
    model, tokenizer, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    if ahead:
        launch_ahead(monkeypatch)
    jobs = [Job([token] * 20, 40) for token in range(1, 6)]
    with (
        Engine(model, tokenizer, prefix_cache=False, max_pages=10) as engine,
        token_times(engine) as came,
    ):
        for number, job in enumerate(jobs):
            engine.add_request(job.prompt, params_of(job), request_id=str(number))
        steps = 0
        while engine.has_unfinished:
            engine.step()
            steps += 1
            came.note(float(steps))
        assert engine.stats().num_preemptions > 0
    for moments in came.by_request().values():
        assert moments == sorted(set(moments))
        assert len(moments) in ((40, 41) if ahead else (40,))
