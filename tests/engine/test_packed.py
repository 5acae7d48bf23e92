"""PackedInputs: how steps are planned, with the kernels that CUDA runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tests.engine.served import check, engine_on, prompts
from tests.ops.cache_cases import interpreted

from pageforge import ops
from pageforge.engine import SamplingParams


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
