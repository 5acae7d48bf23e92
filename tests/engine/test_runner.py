"""Steps padded to the sizes that graphs are captured for, run without graphs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.served import check, engine_on, launch_ahead, prompts

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
