"""Captures, with a stand-in for graphs: what is run before a step is captured does no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.served import check, engine_on, launch_ahead, prompts

from pageforge.engine import SamplingParams
from pageforge.engine import captures as captures_module
from pageforge.engine import runner as runner_module
from pageforge.engine.forward import Forward
from pageforge.engine.step import StepShape


class StandIn:
    """What CapturedStep is, without a graph: it runs a step twice before it is captured."""

    def __init__(self, run: Callable[[], Any], memory: object, undo: Callable[[], None]):
        for _ in range(2):
            try:
                run()
            finally:
                undo()
        self._run = run

    def replay(self) -> None:
        self.outputs = self._run()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "captures_on", lambda device: True)
    monkeypatch.setattr(captures_module, "CapturedStep", StandIn)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)


@pytest.mark.parametrize("most", [7, 64])
def test_what_runs_before_a_capture_does_no_harm(
    most: int, captures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows' page tables have what longer rows before them left there: others' pages by now."""
    launch_ahead(monkeypatch)
    asked = prompts(60, seed=3)
    counts = [2 + 5 * number % 31 for number in range(60)]
    params = [SamplingParams(max_tokens=count, temperature=0) for count in counts]
    with engine_on("llama", max_running=10, max_batch_tokens=most, prefix_cache=False) as engine:
        for _ in range(2):
            engine._core.runner.forget_graphs()
            outputs = engine.generate(asked, params)
            for prompt, count, output in zip(asked, counts, outputs, strict=True):
                check("llama", prompt, count, output.token_ids)
        assert engine.stats().num_replays > 100


def test_a_run_that_fails_before_a_capture_does_no_harm(
    captures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has counted already, and the step itself is made without a graph."""
    launch_ahead(monkeypatch)
    finish, left = Forward._finish, [1]

    def failing(forward: Forward, shape: StepShape, *arguments: Any) -> Any:
        output = finish(forward, shape, *arguments)
        if shape.decodes and shape.is_greedy and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("by the test")
        return output

    asked = prompts(5, seed=3)
    params = [SamplingParams(max_tokens=9 + 4 * number, temperature=0) for number in range(5)]
    with engine_on("llama") as engine:
        monkeypatch.setattr(Forward, "_finish", failing)
        outputs = engine.generate(asked, params)
        assert left == [0] and engine.stats().eager_steps
        for prompt, of_one, output in zip(asked, params, outputs, strict=True):
            check("llama", prompt, of_one.max_tokens, output.token_ids)


def test_with_hooks_there_are_none_until_they_are_gone(captures: None) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    prompt = prompts(1)[0]
    with engine_on("llama") as engine:
        before = engine.stats().num_graphs  # of the trial
        hook = engine._model.model.norm.register_forward_hook(lambda *arguments: None)
        try:
            engine.generate([prompt], params)
        finally:
            hook.remove()
        stats = engine.stats()
        (reason,) = stats.eager_steps
        assert "hook" in reason and stats.num_graphs == before
        engine.generate([prompt], params)
        assert engine.stats().num_graphs > before
        assert engine.stats().eager_steps == stats.eager_steps


def test_a_changed_model_is_captured_anew(captures: None) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    prompt = prompts(1)[0]
    with engine_on("llama") as engine:
        for _ in range(2):
            engine.generate([prompt], params)
        before = engine.stats().num_graphs
        engine.generate([prompt], params)
        assert engine.stats().num_graphs == before
        weight = engine._model.model.norm.weight
        weight.data = weight.data.clone()
        engine.generate([prompt], params)
        assert engine.stats().num_graphs > before


def test_memory_is_shared_while_somebody_has_it(captures: None, monkeypatch: Any) -> None:
    """It goes with the last graph that has it: a capture after that needs another."""
    handles: list[object] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: handles.append(0) or len(handles))
    given: list[int] = []

    class Noting(StandIn):
        def __init__(self, run: Callable[[], Any], memory: Any, undo: Callable[[], None]):
            given.append(memory.pool)
            if len(given) == 1:
                raise RuntimeError("by the test")
            super().__init__(run, memory, undo)

    monkeypatch.setattr(captures_module, "CapturedStep", Noting)
    # Fewer and fewer rows: steps of several sizes.
    params = [SamplingParams(max_tokens=3 * count, temperature=0) for count in range(1, 6)]
    with engine_on("llama") as engine:
        engine.generate(prompts(5), params)
        first, second, *others = given
        assert others and first != second and set(others) == {second}
        engine.weights_changed()
        engine.generate(prompts(5), params)
        assert given[-1] not in (first, second)
