"""Steps padded to the sizes that graphs are captured for, run without graphs; plans of steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.engine.served import check, engine_on, launch_ahead, prompts
from tests.ops.cache_cases import interpreted

from pageforge import ops
from pageforge.engine import SamplingParams
from pageforge.engine.runner import Runner


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
