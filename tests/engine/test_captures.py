"""Captures, with a stand-in for graphs: what runs before them does no harm, nor does compiling."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.served import check, engine_on, launch_ahead, prompts
from tests.hf.tiny_models import WINDOW
from tests.ops.cache_cases import interpreted

from pageforge import ops
from pageforge.engine import Engine, SamplingParams
from pageforge.engine import captures as captures_module
from pageforge.engine import runner as runner_module
from pageforge.engine.captures import NO_MEMORY, PAUSE
from pageforge.engine.engine import LOOKED_AFTER
from pageforge.engine.forward import Forward
from pageforge.engine.step import StepShape
from pageforge.engine.step_buffer import LoadedStep


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


def test_changes_are_seen_while_requests_run(captures: None) -> None:
    """In a server there is always one: nobody comes to an engine at rest."""
    long = SamplingParams(max_tokens=200, temperature=0)
    with engine_on("llama") as engine:
        engine.add_request(prompts(1)[0], long, request_id="beside")
        for _ in range(4):
            engine.step()
        captured = engine.stats().num_graphs
        weight = engine._model.model.norm.weight
        weight.data = weight.data.clone()
        for _ in range(LOOKED_AFTER + 2):
            engine.step()
        assert engine.stats().num_graphs > captured
        hook = engine._model.model.norm.register_forward_hook(lambda *arguments: None)
        engine.add_request([5, 6, 7], long, request_id="comes")  # which is the time to look
        replays = engine.stats().num_replays
        engine.step()
        engine.step()
        stats = engine.stats()
        assert stats.num_replays == replays and sum(stats.eager_steps.values()) >= 1
        hook.remove()
        for _ in range(LOOKED_AFTER + 2):
            engine.step()
        assert engine.stats().num_replays > replays
        for name in ("beside", "comes"):
            engine.abort(name)
        assert len(engine.step()) == 2


def test_where_memory_lacked_a_capture_is_tried_again(
    captures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [1]

    class Lacking(StandIn):
        def __init__(self, *arguments: Any):
            if lacking:
                lacking.pop()
                raise torch.cuda.OutOfMemoryError("by the test")
            super().__init__(*arguments)

    with engine_on("llama") as engine:
        monkeypatch.setattr(captures_module, "CapturedStep", Lacking)
        engine._core.runner.forget_graphs()
        engine.generate(prompts(1), SamplingParams(max_tokens=PAUSE + 20, temperature=0))
        stats = engine.stats()
        assert not lacking and stats.num_replays >= 10
        assert PAUSE - 2 <= stats.eager_steps[NO_MEMORY] <= PAUSE


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


# --- compile=True ---------------------------------------------------------------------------------


class Compiled:
    """What torch.compile was asked for, and the shapes of the steps that went through it."""

    backend = "aot_eager"  # takes a tenth of the time, and knows as well what ops write to

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.graphs: list[torch.fx.GraphModule] = []
        self.shapes: set[StepShape] = set()
        torch._dynamo.reset()  # what another test has compiled would be at hand
        compile = torch.compile

        def compile_here(forward: Any, *, options: Any, **more: Any) -> Any:
            del options  # inductor's alone
            return compile(forward, backend=self._make, **more)

        monkeypatch.setattr(torch, "compile", compile_here)
        run_compiled = Forward.run_compiled

        def noted(forward: Forward, shape: StepShape, loaded: LoadedStep) -> Any:
            self.shapes.add(shape)
            return run_compiled(forward, shape, loaded)

        monkeypatch.setattr(Forward, "run_compiled", noted)

    def _make(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

    def sizes(self, *, decodes: bool) -> set[int]:
        """Numbers of tokens of the compiled steps that only decode, or of the others."""
        return {shape.tokens for shape in self.shapes if shape.decodes == decodes}


@pytest.fixture
def compiled(captures: None, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return Compiled(monkeypatch)


def answer(engine: Engine, name: str, *, count: int = 30) -> None:
    """Prompts that come while others decode."""
    asked = prompts(count, seed=3)
    counts = [2 + 5 * number % 31 for number in range(count)]
    params = [SamplingParams(max_tokens=count, temperature=0) for count in counts]
    for prompt, of_one, output in zip(asked, counts, engine.generate(asked, params), strict=True):
        check(name, prompt, of_one, output.token_ids)
    assert not engine.stats().eager_steps


# gemma2: layers of two windows, and a softcap; gpt_oss: sinks.
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_steps_of_all_sizes_are_compiled_twice(name: str, compiled: Compiled) -> None:
    """Once those that decode, once those that have prompts too; and the tokens are the same."""
    with engine_on(name, max_running=10, max_batch_tokens=64, compile=True) as engine:
        answer(engine, name)
    assert len(compiled.graphs) == 2
    assert len(compiled.sizes(decodes=True)) > 3 and len(compiled.sizes(decodes=False)) > 3


def test_as_many_tokens_as_rows_are_nothing_special(compiled: Compiled) -> None:
    """What is compiled for a mixed step of 10 tokens in 10 rows serves others."""
    options = {"max_running": 10, "max_batch_tokens": 64, "prefix_cache": False}
    prompt = prompts(1, seed=3)[0] * 10
    with engine_on("llama", compile=True, **options) as engine:
        for _ in range(2):
            engine.generate([prompt[:10]], SamplingParams(max_tokens=1))
        assert compiled.sizes(decodes=False) == {10}
        answer(engine, "llama")
    assert len(compiled.graphs) == 2 and len(compiled.sizes(decodes=False)) > 3


@interpreted
def test_plans_are_made_before_what_is_compiled(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; the ops of the CPU are given them, and need none."""
    attend = sys.modules[ops.attend.__module__]  # the function has the module's name
    monkeypatch.setattr(attend, "plans", lambda key_pages: True)
    with engine_on("gemma2", max_running=4, max_batch_tokens=24, compile=True) as engine:
        answer(engine, "gemma2", count=10)
    tables = [
        node.kwargs.get("plan_table", node.args[8 if "write" in node.name else 9])
        for graph in compiled.graphs
        for node in graph.graph.nodes
        if node.op == "call_function" and "attend" in str(node.target)
    ]
    assert len(compiled.graphs) == 2 and len(tables) == 4 and None not in tables


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_compiled_code_makes_no_copy_of_the_pool(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.graph import GraphLowering

    compiled.backend, sources = "inductor", []
    monkeypatch.setattr(GraphLowering, "save_output_code", sources.append)
    with engine_on("gemma2", max_running=6, max_batch_tokens=40, compile=True) as engine:
        answer(engine, "gemma2", count=14)
        pages = engine._pool.pages(0)
    assert len(compiled.graphs) == len(sources) == 2
    for source in sources:
        assert "pageforge.attend" in source or "pageforge.write_and_attend" in source
        assert ".clone(" not in source
        made = re.findall(r"empty_strided_cpu\(\(([^)]+)\)", source)
        sizes = {int(size) for size in re.findall(r"\b\d+\b", " ".join(made))}
        assert made and not sizes & {pages.numel(), len(pages)}


@pytest.mark.parametrize("decodes", [True, False])
def test_a_window_off_by_one_in_compiled_steps_shows(
    decodes: bool, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, in those that decode or in the others: else the tokens would say nothing."""
    run_compiled = Forward.run_compiled

    def wrong(forward: Forward, shape: StepShape, loaded: LoadedStep) -> Any:
        right = forward._windows
        assert right is not None and WINDOW in right.values()
        if shape.decodes == decodes:
            forward._windows = {layer: window and window - 1 for layer, window in right.items()}
        try:
            return run_compiled(forward, shape, loaded)
        finally:
            forward._windows = right

    options = {"max_running": 10, "max_batch_tokens": 24, "compile": True}
    with engine_on("gemma2", **options) as engine:
        monkeypatch.setattr(Forward, "run_compiled", wrong)  # and not on trial, where it would show
        with pytest.raises(AssertionError, match="token"):
            answer(engine, "gemma2")


def test_steps_that_give_all_logits_of_a_prompt_are_not_compiled(compiled: Compiled) -> None:
    """Their sizes hardly ever come again."""
    prompt = prompts(1, seed=3)[0]
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
    with engine_on("llama", compile=True) as engine:
        for _ in range(3):
            (output,) = engine.generate([prompt], params)
            check("llama", prompt, 4, output.token_ids)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)
    assert compiled.sizes(decodes=True) and not compiled.sizes(decodes=False)
