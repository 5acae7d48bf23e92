"""Steps padded to the sizes that graphs are captured for, run without graphs; plans of steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.served import check, engine_on, launch_ahead, prompts, run_all
from tests.ops.cache_cases import interpreted

from pageforge import ops
from pageforge.engine import SamplingParams
from pageforge.engine import runner as runner_module
from pageforge.engine.runner import Runner, StepShape


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
    monkeypatch.setattr(Runner, "_uses_graphs", True)
    monkeypatch.setattr(runner_module, "CapturedStep", StandIn)
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
    finish, left = Runner._finish, [1]

    def failing(runner: Runner, shape: StepShape, *arguments: Any) -> Any:
        output = finish(runner, shape, *arguments)
        if shape.decodes and shape.is_greedy and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("by the test")
        return output

    asked = prompts(5, seed=3)
    params = [SamplingParams(max_tokens=9 + 4 * number, temperature=0) for number in range(5)]
    with engine_on("llama") as engine:
        monkeypatch.setattr(Runner, "_finish", failing)
        outputs = engine.generate(asked, params)
        assert left == [0] and engine.stats().eager_steps
        for prompt, of_one, output in zip(asked, params, outputs, strict=True):
            check("llama", prompt, of_one.max_tokens, output.token_ids)


def test_steps_do_not_go_on_from_a_row_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_ahead(monkeypatch)
    asked = prompts(3, seed=3)
    with engine_on("llama") as engine:
        for number, prompt in enumerate(asked):
            engine.add_request(
                prompt, SamplingParams(max_tokens=12, temperature=0), request_id=str(number)
            )
        runner, loaded = engine._core.runner, []
        load = runner._load
        monkeypatch.setattr(runner, "_load", lambda *args: loaded.append(1) or load(*args))
        while not loaded or len(loaded) == engine.stats().num_steps:
            engine.step()
        before = len(loaded)
        runner.move_row(0, 5)  # and with it what else lay there
        engine.step()
        assert len(loaded) == before + 1
        outputs = run_all(engine)
        for number, prompt in enumerate(asked):
            check("llama", prompt, 12, outputs[str(number)].token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_tokens": 512},
        {"max_batch_tokens": 7},  # fewer than the model is tried with
        {"max_batch_tokens": 40, "max_running": 3},
        {"max_running": 1},
        {"max_pages": 22, "max_batch_tokens": 64, "swap_memory": 1 << 20},
    ],
)
def test_padded_steps_give_the_same_tokens(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_ahead(monkeypatch)
    monkeypatch.setattr(Runner, "_uses_graphs", True)
    monkeypatch.setattr(Runner, "_graph", lambda *arguments: None)
    asked = prompts(14, seed=11)
    with engine_on("llama", **options) as engine:
        params = [
            SamplingParams(max_tokens=3 + 2 * number, temperature=0, n=1 + number % 2)
            for number in range(len(asked))
        ]
        for prompt, of_one, output in zip(
            asked, params, engine.generate(asked, params), strict=True
        ):
            for completion in output.outputs:
                check("llama", prompt, of_one.max_tokens, completion.token_ids)


def test_steps_that_are_never_captured_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where prompts' logits are asked for, each step has a size of its own."""
    monkeypatch.setattr(Runner, "_uses_graphs", True)
    monkeypatch.setattr(Runner, "_graph", lambda *arguments: None)
    with engine_on("llama") as engine:
        engine.generate(prompts(4), SamplingParams(max_tokens=3, temperature=0))
        before = set(engine._core.runner._loaded)
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
        for prompt in prompts(6, seed=3):
            engine.generate([prompt], params)
        assert before == set(engine._core.runner._loaded)


@interpreted
@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma2", 2)])
def test_a_step_is_planned_once_for_all_layers_of_a_kind(
    name: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels that CUDA runs: steps in which some decode and others have a prompt."""
    attend = sys.modules[ops.attend.__module__]  # the function has the module's name
    monkeypatch.setattr(attend, "plans", lambda key_pages: True)
    monkeypatch.setattr(attend, "_attend", attend._attend_cuda)
    monkeypatch.setattr(attend, "_write_and_attend_cpu", attend._write_and_attend_cuda)
    made: list[Any] = []
    plan_decode = attend.plan.plan_decode

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(options["cu_query_lens"])
        return plan_decode(*arguments, **options)

    monkeypatch.setattr(attend.plan, "plan_decode", counted)
    asked = [prompt[:20] for prompt in prompts(3, seed=12)]
    with engine_on(name, max_batch_tokens=12) as engine:
        params = SamplingParams(max_tokens=4, temperature=0)
        for number, prompt in enumerate(asked):
            engine.add_request(prompt, params, request_id=str(number))
        outputs, num_mixed = {}, 0
        while engine.has_unfinished:
            made.clear()
            outputs |= {output.request_id: output for output in engine.step()}
            assert len(made) in (0, kinds)
            num_mixed += bool(made) and made[0] is not None
        assert num_mixed >= 2
        for number, prompt in enumerate(asked):
            check(name, prompt, 4, outputs[str(number)].token_ids)
