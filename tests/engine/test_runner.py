"""Runner: which steps go on from what the device has counted up, and load nothing."""

from __future__ import annotations

import pytest
from tests.engine.served import check, engine_on, launch_ahead, prompts, run_all

from pageforge.engine import SamplingParams


def test_steps_do_not_go_on_from_a_row_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_ahead(monkeypatch)
    asked = prompts(3, seed=3)
    with engine_on("llama") as engine:
        for number, prompt in enumerate(asked):
            engine.add_request(
                prompt, SamplingParams(max_tokens=12, temperature=0), request_id=str(number)
            )
        runner, loaded = engine._core.runner, []
        buffer = runner._buffer
        load = buffer.load
        monkeypatch.setattr(buffer, "load", lambda *args: loaded.append(1) or load(*args))
        while not loaded or len(loaded) == engine.stats().num_steps:
            engine.step()
        before = len(loaded)
        runner.move_row(0, 5)  # and with it what else lay there
        engine.step()
        assert len(loaded) == before + 1
        outputs = run_all(engine)
        for number, prompt in enumerate(asked):
            check("llama", prompt, 12, outputs[str(number)].token_ids)
