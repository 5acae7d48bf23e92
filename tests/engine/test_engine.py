"""The engine gives the tokens that `model.generate` gives one prompt at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.served import (
    Prompt,
    check,
    check_all_back,
    engine_on,
    launch_ahead,
    prompts,
    run_all,
)
from tests.hf.tiny_models import WINDOW

from pageforge import pool as pool_module
from pageforge.engine import Engine, RequestOutput, SamplingParams
from pageforge.engine import runner as runner_module
from pageforge.engine.forward import Forward
from pageforge.engine.runner import Runner

AMPLE = {"max_batch_tokens": 512}
SQUEEZED = {"max_pages": 22, "max_batch_tokens": 64}
SWAP = {"swap_memory": 1 << 20}


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def lengths(count: int, most: int = 18) -> list[int]:
    found = np.random.default_rng(count).integers(0, most + 1, count).tolist()
    return [int(length) for length in found]


def serve(engine: Engine, asked: list[Prompt], wanted: list[int], seed: int = 0) -> None:
    """Requests arrive at random steps, some for three completions, some urgent; compare all."""
    rng = np.random.default_rng(seed)
    outputs: dict[str, RequestOutput] = {}
    waiting = list(zip(map(str, range(len(asked))), asked, wanted, strict=True))
    while waiting or engine.has_unfinished:
        for name, prompt, count in waiting[: rng.integers(0, 4)]:
            n, priority = int(rng.choice([1, 1, 1, 3])), int(rng.choice([0, 0, -1]))
            engine.add_request(prompt, greedy(count, n=n), request_id=name, priority=priority)
            waiting.pop(0)
        for output in engine.step():
            outputs[output.request_id] = output
    for name, prompt, count in zip(map(str, range(len(asked))), asked, wanted, strict=True):
        for completion in outputs[name].outputs:
            assert completion.finish_reason == "length", completion.error
            check(family(engine), prompt, count, completion.token_ids)


def answer(engine: Engine, prompt: Prompt, count: int) -> RequestOutput:
    engine.add_request(prompt, greedy(count), request_id="only")
    return run_all(engine)["only"]


def family(engine: Engine) -> str:
    name: str = engine._model.family
    return name


@pytest.mark.slow
def test_two_hundred_requests() -> None:
    asked = prompts(200)
    with engine_on("llama", **AMPLE) as engine:
        serve(engine, asked, lengths(200))
        stats = engine.stats()
        assert stats.num_cached_tokens > 1000
        assert stats.num_finished == 200
        assert stats.num_preemptions == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({**AMPLE, "prefix_cache": False}, 40),
        ({"max_batch_tokens": 1}, 12),
        ({"max_batch_tokens": 7}, 40),
        ({"max_batch_tokens": 16, "max_running": 3}, 40),
        (SQUEEZED, 40),
        ({**SQUEEZED, **SWAP}, 40),
    ],
    ids=["no prefix cache", "1 token", "7 tokens", "16 tokens", "recompute", "swap"],
)
def test_tokens_are_those_of_generate(
    name: str, options: dict, count: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:
        launch_ahead(monkeypatch)
    with engine_on(name, **options) as engine:
        serve(engine, prompts(count), lengths(count, 40 if "max_pages" in options else 18))
        stats = engine.stats()
        if "prefix_cache" in options:
            assert stats.pool.pages_cached == 0
        else:
            assert stats.num_cached_tokens > 0
        if "max_pages" in options:
            assert stats.num_preemptions > 0
            assert (stats.num_swaps > 0) == ("swap_memory" in options)


@pytest.mark.parametrize("rollback", [0, 64])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_sliding_windows_softcaps_and_sinks(
    name: str, rollback: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "ROLLBACK", rollback)
    launch_ahead(monkeypatch)
    asked = prompts(16, seed=3)
    with engine_on(name, max_pages=20, max_batch_tokens=24, **SWAP) as engine:
        serve(engine, asked, lengths(16, 40))
        # Where all layers slide, at once, a sequence holds so few pages that they do not run out.
        assert engine.stats().num_preemptions > 0 or (name, rollback) == ("mistral", 0)
        assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("rollback", [0, 64])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_next_turn_shares_all_that_was_said_in_layers_with_windows_too(
    name: str, rollback: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers at the edges of the window, and so long that most of what was said has left it."""
    monkeypatch.setattr(pool_module, "ROLLBACK", rollback)
    answers = [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + rollback + 9]
    (stem,) = prompts(1, longest=12, seed=9)
    with engine_on(name, max_batch_tokens=16) as engine:
        for number, count in enumerate(answers):
            prompt = (*stem, 10 + number)  # so that the answers part
            said = (*prompt, *answer(engine, prompt, count).token_ids)
            check(name, prompt, count, said[len(prompt) :])
            computed = len(said) - 1  # of the last token nobody needs the K/V
            for question in ((), tuple(range(5, 20))):
                output = answer(engine, said + question, 3)
                check(name, said + question, 3, output.token_ids)
                assert output.num_cached_tokens >= computed // 8 * 8


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("swap", [{}, SWAP], ids=["recompute", "swap"])
def test_aborts_sleep_and_new_weights_in_between(
    swap: dict, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:
        launch_ahead(monkeypatch)
    asked, wanted = prompts(40), [max(2, length) for length in lengths(40)]
    rng = np.random.default_rng(5)
    outputs: dict[str, RequestOutput] = {}
    with engine_on("llama", max_pages=40, max_batch_tokens=32, **swap) as engine:
        for number, (prompt, count) in enumerate(zip(asked, wanted, strict=True)):
            engine.add_request(prompt, greedy(count, n=1 + number % 2), request_id=str(number))
        number, aborted = 0, set()
        while engine.has_unfinished:
            number += 1
            if number % 5 == 1:
                name = str(rng.integers(40))
                if engine.abort(name):
                    aborted.add(name)
            if number % 7 == 3:
                engine.sleep()
                assert engine.stats().pool.pages_used == 0
                assert engine.stats().pool.bytes_mapped < 8 << 20
                with pytest.raises(Exception, match="wake"):
                    engine.step()
                engine.wake()
            if number % 11 == 5:
                engine.weights_changed()
                stats = engine.stats()
                assert stats.pool.pages_used + stats.pool.pages_cached + stats.swapped_bytes == 0
            outputs |= {output.request_id: output for output in engine.step()}
        assert len(aborted) >= 5
        assert len(outputs) == 40
        for name, output in outputs.items():
            for completion in output.outputs:
                prompt, count = asked[int(name)], wanted[int(name)]
                if name in aborted:
                    assert completion.finish_reason in ("abort", "length")
                    whole = list(completion.token_ids)
                    check("llama", prompt, len(whole), whole)
                else:
                    check("llama", prompt, count, completion.token_ids)


def test_new_weights_are_used_at_once() -> None:
    """What was computed with the old ones, pages and running requests, is not."""
    prompt = prompts(1, seed=9)[0] * 3
    with engine_on("llama") as engine:
        before = engine.generate([prompt], greedy(12))[0].token_ids
        engine.add_request(prompt[::-1], greedy(12))
        for _ in range(4):
            engine.step()
        weight = engine._model.model.layers[0].self_attn.v_proj.weight
        kept = weight.detach().clone()
        try:
            with torch.no_grad():
                weight.neg_()
            engine.weights_changed()
            new = engine.generate([prompt], greedy(12))[0]
            ids = torch.tensor([[*prompt, *new.token_ids[:-1]]])
            with torch.no_grad():
                logits = engine._model(input_ids=ids, use_cache=False).logits[0]
            assert new.num_cached_tokens == 0
            assert new.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist() != before
        finally:
            with torch.no_grad():
                weight.copy_(kept)
        run_all(engine)


def test_seeded_sampling_does_not_depend_on_what_runs_beside() -> None:
    asked = prompts(12, seed=4)
    params = [
        SamplingParams(max_tokens=10, temperature=1.3, top_p=0.9, seed=number, n=1 + number % 3)
        for number in range(12)
    ]

    def tokens(output: RequestOutput) -> list[list[int]]:
        return [list(completion.token_ids) for completion in output.outputs]

    with engine_on("llama", max_running=2) as engine:
        single = [
            tokens(engine.generate([prompt], of_one)[0])
            for prompt, of_one in zip(asked, params, strict=True)
        ]
    assert single[2][0] != single[2][1] != single[2][2]
    with engine_on("llama", **SQUEEZED, **SWAP) as engine:
        others = prompts(12, seed=5)
        for prompt in others:
            engine.add_request(prompt, SamplingParams(max_tokens=14))
        together = engine.generate(asked, params)
        assert engine.stats().num_preemptions > 0
        run_all(engine)
    assert [tokens(output) for output in together] == single


# Planted faults: the comparison above must see each.


def _stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that another sequence had before keeps one of that one's pages."""
    set_pages, calls = Runner.set_pages, iter(range(1_000_000))

    def skipping(runner: Runner, group: int, row: int, first: int, page_ids: list[int]) -> None:
        if next(calls) == 60:
            page_ids = page_ids[:-1]
        set_pages(runner, group, row, first, page_ids)

    monkeypatch.setattr(Runner, "set_pages", skipping)


def _swapped_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of two rows change places on the device."""
    finish, calls = Forward._finish, iter(range(1_000_000))

    def swapping(forward: Forward, *arguments: Any) -> torch.Tensor:
        output = finish(forward, *arguments)
        if next(calls) == 20:
            last_tokens = forward._device_rows.last_tokens
            last_tokens[:4] = last_tokens[:4].roll(1)
        return output

    monkeypatch.setattr(Forward, "_finish", swapping)


def _not_counted_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that goes on from the last one finds a row's length as it was."""
    finish, calls = Forward._finish, iter(range(1_000_000))

    def forgetting(forward: Forward, shape: Any, loaded: Any, logits: torch.Tensor) -> torch.Tensor:
        output = finish(forward, shape, loaded, logits)
        if next(calls) % 5 == 0:
            loaded.inputs.seq_lens[0] -= 1
        return output

    monkeypatch.setattr(Forward, "_finish", forgetting)


def _lost_swap_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module.ops, "swap_in", lambda *arguments: None)


def _lost_swap_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module.ops, "swap_out", lambda pages, index, out: out.zero_())


def _wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one step believes to be a token further on."""
    decode_arrays, calls = runner_module.decode_arrays, iter(range(1_000_000))

    def moved(*arguments: Any) -> Any:
        arrays = decode_arrays(*arguments)
        if next(calls) == 3:
            arrays[1][0] += 1
        return arrays

    monkeypatch.setattr(runner_module, "decode_arrays", moved)


def _lost_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork's copy of the page that it shares is not made."""
    monkeypatch.setattr(pool_module.PagePool, "_copy", lambda pool, copies: None)


FAULTS = [
    None,
    _stale_row,
    _swapped_tokens,
    _not_counted_up,
    _lost_swap_in,
    _lost_swap_out,
    _wrong_position,
    _lost_copy,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_ahead(monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    with engine_on("llama", **SQUEEZED, **SWAP) as engine:
        if plant is None:
            serve(engine, prompts(40), lengths(40, 40))
            return
        with pytest.raises(AssertionError, match=r"token \d+ of|finite"):
            serve(engine, prompts(40), lengths(40, 40))


def test_two_threads_at_once() -> None:
    asked, found = prompts(24), {}
    with engine_on("llama") as engine:

        def ask(start: int) -> None:
            params = [greedy(6 + number % 3) for number in range(12)]
            found[start] = engine.generate(asked[start : start + 12], params)

        threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for start, outputs in found.items():
            for number, output in enumerate(outputs):
                check("llama", asked[start + number], 6 + number % 3, output.token_ids)
        assert len(found) == 2
        check_all_back(engine)
        assert engine.step() == []


def test_pages_of_a_prompt_are_found_while_it_is_computed() -> None:
    """Token by token: a page is known as soon as it is full, not when its owner is done."""
    prompt = list(range(2, 60))
    with engine_on("llama", max_batch_tokens=3, max_running=4) as engine:
        first = engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
        for _ in range(12):
            engine.step()
        engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        found = {output.request_id: output for output in outputs}
        other = next(output for name, output in found.items() if name != first)
        assert other.num_cached_tokens >= 16
        assert list(other.token_ids) == list(found[first].token_ids)


def test_what_a_repr_says() -> None:
    with engine_on("llama") as engine:
        assert repr(engine) == "Engine(LlamaForCausalLM, 0 running, 0 waiting)"
        for prompt in prompts(2):
            engine.add_request(prompt, greedy(3))
        assert repr(engine) == "Engine(LlamaForCausalLM, 0 running, 2 waiting)"
        engine.step()
        assert repr(engine) == "Engine(LlamaForCausalLM, 2 running, 0 waiting)"
        run_all(engine)
        engine.sleep()
        assert repr(engine) == "Engine(LlamaForCausalLM, asleep, 0 running, 0 waiting)"
        engine.wake()
    assert repr(engine) == "Engine(LlamaForCausalLM, closed)"


def test_what_users_may_call() -> None:
    """And nothing that the core calls."""
    names = {name for name in vars(Engine) if not name.startswith("_")}
    assert names == {
        *("generate", "stream", "stream_async", "generate_async"),
        *("add_request", "step", "abort", "has_unfinished"),
        *("stats", "drop_prefix_cache", "trim", "sleep", "wake", "weights_changed", "close"),
    }
