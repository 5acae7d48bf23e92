"""What goes wrong fails alone: the request, or the step; the rest go on, and nothing leaks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.served import (
    Tokenizer,
    begin_all,
    check,
    engine_on,
    launch_ahead,
    prompts,
    run_all,
)
from tests.hf.tiny_models import CONFIGS, VOCABULARY, make

from pageforge import OutOfPages, PageForgeError
from pageforge.engine import Engine, RequestOutput, SamplingParams
from pageforge.engine import engine as engine_module
from pageforge.engine.runner import Runner
from pageforge.errors import ParamsError, RequestError

GREEDY = SamplingParams(max_tokens=8, temperature=0)


class Planted(Exception):
    pass


@pytest.fixture(params=[False, True], ids=["at once", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        launch_ahead(monkeypatch)


def fail_once(engine: Engine, error: BaseException) -> Callable[[], None]:
    """The model raises in its next forward, in the middle; returns what takes the hook away."""
    left = [error]

    def hook(*arguments: Any) -> None:
        if left:
            raise left.pop()

    return engine._model.get_decoder().layers[1].register_forward_pre_hook(hook).remove


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("steps", [0, 1], ids=["prompts", "decoding"])
def test_a_model_that_raises_fails_the_step_alone(steps: int) -> None:
    asked = [(number, *range(10, 30)) for number in range(3, 9)]
    with engine_on("llama", max_running=4) as engine:
        for number, prompt in enumerate(asked):
            engine.add_request(prompt, GREEDY, request_id=str(number))
        for _ in range(steps):
            engine.step()
        remove = fail_once(engine, Planted("by the test"))
        outputs = run_all(engine)
        remove()
        failed = [name for name, each in outputs.items() if each.finish_reason == "error"]
        assert failed and all(isinstance(outputs[name].error, Planted) for name in failed)
        assert len(failed) < len(asked)
        for number, prompt in enumerate(asked):
            if str(number) not in failed:
                check("llama", prompt, 8, outputs[str(number)].token_ids)
        for prompt in asked:  # nothing that was not computed is found
            check("llama", prompt, 8, engine.generate([prompt], GREEDY)[0].token_ids)


@pytest.mark.usefixtures("ahead")
def test_an_interrupted_step_leaves_nothing_to_find_that_was_not_computed() -> None:
    asked = [(number, *range(10, 30)) for number in range(3, 7)]
    with engine_on("llama") as engine:
        for number in range(2):
            engine.add_request(asked[number], GREEDY, request_id=str(number))
        remove = fail_once(engine, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(asked[2:], GREEDY)
        remove()
        for prompt in asked[2:]:
            check("llama", prompt, 8, engine.generate([prompt], GREEDY)[0].token_ids)
        outputs = run_all(engine)
        for number in range(2):
            check("llama", asked[number], 8, outputs[str(number)].token_ids)


def test_an_interrupt_while_a_step_is_waited_for_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_ahead(monkeypatch)
    asked = prompts(4, seed=8)
    with engine_on("llama") as engine:
        begin_all(engine, asked, GREEDY)
        flight = engine._core._flights[0]
        done = flight.done

        class Interrupted:
            def synchronize(self) -> None:
                flight.done = done
                raise KeyboardInterrupt

        flight.done = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        outputs = run_all(engine)
        for number, prompt in enumerate(asked):
            check("llama", prompt, 8, outputs[str(number)].token_ids)


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("behind", ["launch", "_sample", "map_ahead", "share"])
def test_an_interrupt_behind_a_launch_loses_no_token(
    behind: str, penalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step is lost, the device has its tokens already, and must not go on from them."""
    launch_ahead(monkeypatch)
    asked = prompts(4, seed=8)
    # One counts its tokens, and would count those of a lost step twice.
    params = [*[GREEDY] * 3, replace(GREEDY, frequency_penalty=1.5)]
    params = params if penalised else [GREEDY] * 4
    with engine_on("llama") as engine:
        alone = engine.generate([asked[3]], params[3])[0].token_ids
        begin_all(engine, asked, params)
        core, left = engine._core, [1]
        owners = {"launch": core.runner, "map_ahead": core.pool, "share": core._forks}
        owner = owners.get(behind, core)
        method = getattr(owner, behind)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            found = method(*arguments, **options)
            if left:
                left.pop()
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, behind, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        outputs = run_all(engine)
        for number, prompt in enumerate(asked[:3]):
            check("llama", prompt, 8, outputs[str(number)].token_ids)
        assert outputs["3"].token_ids == alone


@pytest.mark.parametrize("behind", ["append", "set_pages", "put"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_interrupt_while_pages_are_claimed_loses_none(
    behind: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has given them, and the device does not know of them yet."""
    launch_ahead(monkeypatch)
    asked = prompts(6, seed=8)
    params = SamplingParams(max_tokens=30, temperature=0)
    with engine_on("llama") as engine:
        begin_all(engine, asked[:3], params)
        core, left = engine._core, list(range(calls))
        for number in range(3, 6):
            engine.add_request(asked[number], params, request_id=str(number))
        owner = {"append": core.pool, "set_pages": core.runner, "put": core.rows}[behind]
        method = getattr(owner, behind)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            found = method(*arguments, **options)
            if left and left.pop() == 0:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, behind, interrupted)
        outputs: dict[str, RequestOutput] = {}
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= run_all(engine)
        for number, prompt in enumerate(asked):
            check("llama", prompt, 30, outputs[str(number)].token_ids)


@pytest.mark.parametrize("behind", ["runner", "sampler", "rows"])
def test_an_interrupt_while_a_row_moves_loses_nothing(
    behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what a row has has moved by then, and some has not."""
    launch_ahead(monkeypatch)
    asked = prompts(6, seed=8)
    # The last rows live longest: they move to the front. One counts its tokens.
    params = [
        SamplingParams(max_tokens=3 + 5 * number, temperature=0, frequency_penalty=number % 2)
        for number in range(6)
    ]
    with engine_on("llama") as engine:
        alone = [engine.generate([p], of)[0].token_ids for p, of in zip(asked, params, strict=True)]
        for number, prompt in enumerate(asked):
            engine.add_request(prompt, params[number], request_id=str(number))
        core, left = engine._core, [1]
        owner = {"runner": core.runner, "sampler": core._sampler, "rows": core.rows}[behind]
        name = "move" if behind == "rows" else "move_row"
        method = getattr(owner, name)

        def interrupted(*arguments: Any) -> Any:
            found = method(*arguments)
            if left:
                left.pop()
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, name, interrupted)
        outputs: dict[str, RequestOutput] = {}
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= run_all(engine)
        assert [outputs[str(number)].token_ids for number in range(6)] == alone


def test_who_cannot_be_described_after_an_interrupt_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch_ahead(monkeypatch)
    asked = prompts(3, seed=8)
    with engine_on("llama") as engine:
        begin_all(engine, asked, GREEDY)
        core, left = engine._core, [torch.OutOfMemoryError("by the test"), KeyboardInterrupt()]
        launch, set_row = core.runner.launch, core._sampler.set_row

        def interrupted(*arguments: Any, **options: Any) -> Any:
            step = launch(*arguments, **options)
            if len(left) == 2:
                raise left.pop()
            return step

        def failing(*arguments: Any, **options: Any) -> None:
            if len(left) == 1:
                raise left.pop()
            set_row(*arguments, **options)

        monkeypatch.setattr(core.runner, "launch", interrupted)
        monkeypatch.setattr(core._sampler, "set_row", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        outputs = run_all(engine)
        assert isinstance(outputs["0"].error, torch.OutOfMemoryError)
        for number in (1, 2):
            check("llama", asked[number], 8, outputs[str(number)].token_ids)
        assert engine._pool.stats().pages_used == 0


PLACES = {
    "core": ("_note", "_admit", "_leave_row", "_compact", "_release", "_catch_up"),
    "forks": ("share", "leave"),
    "rows": ("put", "take", "move"),
    "pool": ("append", "release", "publish_prefix", "fork"),
    "runner": ("set_pages", "move_row", "launch"),
}
"""What must not be left half-done: none of it is prepared for an interrupt."""


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in PLACES for name in PLACES[part]]
)
def test_ctrl_c_waits_for_the_end_of_a_step(
    part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_ahead(monkeypatch)
    asked = prompts(12, seed=8)
    params = [
        SamplingParams(max_tokens=25 + number, temperature=0, n=1 + number % 2)
        for number in range(len(asked))
    ]
    with engine_on("llama", max_pages=22, max_running=6) as engine:
        for number, (prompt, of_one) in enumerate(zip(asked, params, strict=True)):
            engine.add_request(prompt, of_one, request_id=str(number))
        core, called, is_pressed = engine._core, 0, False
        owner = {
            "core": core,
            "forks": core._forks,
            "rows": core.rows,
            "pool": core.pool,
            "runner": core.runner,
        }[part]
        method = getattr(owner, name)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            nonlocal called, is_pressed
            called += 1
            if called % 7 == 1 and not is_pressed:
                is_pressed = True
                signal.raise_signal(signal.SIGINT)
            found = method(*arguments, **options)
            if called % 7 == 3 and not is_pressed:
                is_pressed = True
                signal.raise_signal(signal.SIGINT)
            return found

        monkeypatch.setattr(owner, name, interrupted)
        outputs: dict[str, RequestOutput] = {}
        num_interrupts = 0
        while engine.has_unfinished:
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except KeyboardInterrupt:
                num_interrupts, is_pressed = num_interrupts + 1, False
                assert not core._is_torn
        outputs |= {output.request_id: output for output in engine.step()}
        assert num_interrupts
        assert engine.stats().num_preemptions
        for number, (prompt, of_one) in enumerate(zip(asked, params, strict=True)):
            for completion in outputs[str(number)].outputs:
                check("llama", prompt, of_one.max_tokens, completion.token_ids)


class Interrupting(Tokenizer):
    """Ctrl-C comes in call `at` of `decode`."""

    at = 0

    def decode(self, token_ids: Any, **options: Any) -> str:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return super().decode(token_ids, **options)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("at", [1, 3, 13, 23, 27])
def test_an_interrupt_in_the_tokenizer_loses_no_token(at: int) -> None:
    """Be it while tokens of a step are looked at, or when a completion's text is made."""
    asked = prompts(6, seed=8)
    params = [GREEDY, SamplingParams(max_tokens=8, temperature=0, logprobs=1, stop="never")] * 3
    tokenizer = Interrupting()
    with engine_on("llama", tokenizer=tokenizer) as engine:
        for number, (prompt, of_one) in enumerate(zip(asked, params, strict=True)):
            engine.add_request(prompt, of_one, request_id=str(number))
        tokenizer.at = at
        outputs: dict[str, RequestOutput] = {}
        with pytest.raises(KeyboardInterrupt):
            while engine.has_unfinished:
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= run_all(engine)
        for number, prompt in enumerate(asked):
            output = outputs[str(number)]
            check("llama", prompt, 8, output.token_ids)
            assert output.finish_reason == "length"
            assert output.text == Tokenizer().decode(output.token_ids)
            if output.logprobs is not None:
                chosen = [each.chosen.token_id for each in output.logprobs]
                assert chosen == output.token_ids
        assert engine.stats().num_finished == len(asked)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("at", [1, 3, 8])
def test_an_interrupted_stream_leaves_the_others_whole(at: int) -> None:
    asked = prompts(4, seed=9)
    tokenizer = Interrupting()
    with engine_on("llama", tokenizer=tokenizer) as engine:
        long = SamplingParams(max_tokens=40, temperature=0)
        streams = [engine.stream(asked[0], long), *(engine.stream(p, GREEDY) for p in asked[1:])]
        found = [[next(chunks)] for chunks in streams]
        tokenizer.at = at
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
        assert list(streams[0]) == []
        for prompt, rest, first in zip(asked[1:], streams[1:], found[1:], strict=True):
            chunks = [*first, *rest]
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            check("llama", prompt, 8, tokens)
            assert "".join(chunk.text or "" for chunk in chunks) == Tokenizer().decode(tokens)
        assert not engine.has_unfinished


@pytest.mark.usefixtures("ahead")
def test_no_memory_for_the_penalties_of_one_request_fails_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = prompts(4, seed=3)
    with engine_on("llama") as engine:

        def claim(*arguments: Any) -> int:
            raise torch.OutOfMemoryError("by the test")

        monkeypatch.setattr(engine._core._sampler._counts, "claim", claim)
        params = [GREEDY] * 4
        params[1] = SamplingParams(max_tokens=8, temperature=0, presence_penalty=0.5)
        outputs = engine.generate(asked, params)
        assert isinstance(outputs[1].error, torch.OutOfMemoryError)
        for number in (0, 2, 3):
            check("llama", asked[number], 8, outputs[number].token_ids)


def test_where_the_host_can_pin_no_more_pages_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = prompts(6, seed=5)
    with engine_on("llama", max_pages=22, swap_memory=1 << 20) as engine:

        def save(*arguments: Any) -> list[torch.Tensor]:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(engine._pool, "save", save)
        params = SamplingParams(max_tokens=30, temperature=0)
        outputs = engine.generate(asked, params)
        stats = engine.stats()
        assert stats.num_preemptions > stats.num_swaps == 0
        for prompt, output in zip(asked, outputs, strict=True):
            check("llama", prompt, 30, output.token_ids)


def test_a_step_is_ordered_after_others_streams_first_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    with engine_on("llama") as engine:
        engine.add_request(prompts(1)[0], GREEDY)
        core, use_stream = engine._core, engine._pool.use_stream

        def used(device: torch.device) -> None:
            happened.append("stream")
            use_stream(device)

        monkeypatch.setattr(engine._pool, "use_stream", used)
        for part in (core.runner, engine._core._sampler):
            for name in ("move_row", "set_row", "launch"):
                if (method := getattr(part, name, None)) is not None:

                    def called(*arguments: Any, method: Any = method, **named: Any) -> Any:
                        happened.append("work")
                        return method(*arguments, **named)

                    monkeypatch.setattr(part, name, called)
        engine.step()
        assert happened[0] == "stream" and "work" in happened
        run_all(engine)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("at", [0, 3])
def test_a_logits_processor_that_raises_fails_its_request_alone(at: int) -> None:
    def processor(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) == at:
            raise Planted
        return logits

    asked = prompts(5, seed=3)
    with engine_on("llama") as engine:
        params = [GREEDY] * 5
        params[2] = SamplingParams(max_tokens=8, temperature=0, logits_processors=(processor,))
        outputs = engine.generate(asked, params)
        assert isinstance(outputs[2].error, Planted)
        check("llama", asked[2], at, outputs[2].token_ids)
        for number in (0, 1, 3, 4):
            check("llama", asked[number], 8, outputs[number].token_ids)


@pytest.mark.usefixtures("ahead")
def test_logits_processors_see_the_tokens_so_far() -> None:
    seen: list[list[int]] = []

    def processor(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(generated))
        return logits

    asked = prompts(3, seed=3)
    with engine_on("llama") as engine:
        params = SamplingParams(max_tokens=5, temperature=0, logits_processors=(processor,))
        output = engine.generate(asked, [GREEDY, params, GREEDY])[1]
    assert seen == [list(output.token_ids[:count]) for count in range(5)]


@pytest.mark.usefixtures("ahead")
def test_nan_logits_fail_their_request_alone_and_leave_no_pages_to_find() -> None:
    asked = [(*prompt, *range(3, 30)) for prompt in prompts(4, seed=4)]
    asked[1] = (77, *asked[1])
    with engine_on("llama") as engine:
        embeddings = engine._model.get_input_embeddings()

        def hook(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            return output.masked_fill((arguments[0] == 77)[..., None], torch.nan)

        handle = embeddings.register_forward_hook(hook)
        outputs = engine.generate(asked, GREEDY)
        handle.remove()
        is_hit = [
            77 in (*prompt, *output.token_ids[:-1])
            for prompt, output in zip(asked, outputs, strict=True)
        ]
        assert is_hit[1] and not all(is_hit)
        for prompt, output, hit in zip(asked, outputs, is_hit, strict=True):
            if hit:
                assert "NaN" in str(output.error)
            else:
                check("llama", prompt, 8, output.token_ids)
        assert list(outputs[1].token_ids) == []
        check("llama", asked[1], 8, engine.generate([asked[1]], GREEDY)[0].token_ids)


def test_a_device_that_is_full_makes_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(6, seed=5)
    with engine_on("llama") as engine:
        reserve, left = engine._pool._reserve, [3]

        def refusing(needed: Any) -> None:
            if any(needed) and left[0] and engine._core.rows.num_running > 1:
                left[0] -= 1
                raise OutOfPages(sum(needed), 0)
            reserve(needed)

        monkeypatch.setattr(engine._pool, "_reserve", refusing)
        outputs = engine.generate(asked, GREEDY)
        assert left == [0] and engine.stats().num_preemptions > 0
        for prompt, output in zip(asked, outputs, strict=True):
            check("llama", prompt, 8, output.token_ids)


class Undecodable(Tokenizer):
    def decode(self, token_ids: Any, **options: Any) -> str:
        raise Planted


@pytest.mark.parametrize("stop", [(), ("A",)])
def test_a_tokenizer_that_cannot_decode_fails_its_requests(stop: tuple[str, ...]) -> None:
    with engine_on("llama", tokenizer=Undecodable()) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, stop=stop)
        output = engine.generate([prompts(1)[0]], params)[0]
        assert output.finish_reason == "error"
        assert isinstance(output.error, Planted)


# Requests that cannot be right.


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], RequestError, "at least one token"),
        ([VOCABULARY], RequestError, "token ids from 0"),
        ([-1], RequestError, "token ids from 0"),
        ("text", RequestError, "tokenizer"),
        ([5] * 257, RequestError, "at most 256 tokens"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, error: type[Exception], match: str) -> None:
    good = prompts(1)[0]
    with engine_on("llama") as engine:
        engine.add_request(good, GREEDY, request_id="good")
        with pytest.raises(error, match=match):
            engine.add_request(prompt, GREEDY)
        with pytest.raises(error, match=match):
            engine.generate([list(good), prompt], GREEDY)
        check("llama", good, 8, run_all(engine)["good"].token_ids)
        assert engine.stats().num_finished == 1


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ParamsError, match="empty"):
        SamplingParams(stop="")


def test_an_id_in_use_is_refused_and_one_that_was_is_not() -> None:
    good = prompts(1)[0]
    with engine_on("llama") as engine:
        assert engine.add_request(good, GREEDY, request_id="one") == "one"
        with pytest.raises(RequestError, match="in use"):
            engine.add_request(good, GREEDY, request_id="one")
        check("llama", good, 8, run_all(engine)["one"].token_ids)
        engine.add_request(good, GREEDY, request_id="one")
        run_all(engine)
        assert not engine.abort("one")


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64])
def test_exactly_as_many_tokens_as_asked_for(length: int, count: int) -> None:
    prompt = prompts(1, longest=64)[0] * 64
    with engine_on("llama", max_batch_tokens=16) as engine:
        for _ in range(2):  # computed, then found
            params = SamplingParams(max_tokens=count, temperature=0, n=2)
            for completion in engine.generate([prompt[:length]], params)[0].outputs:
                assert completion.finish_reason == "length"
                check("llama", prompt[:length], count, completion.token_ids)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("missing", [0, 1, 2, 9])
def test_prompts_at_the_position_limit(name: str, missing: int) -> None:
    """A prompt of all positions still has one token after it, whose own K/V are not needed."""
    positions = 256 if name == "llama" else 128
    prompt = (prompts(1, seed=6)[0] * 256)[: positions - missing]
    with engine_on(name) as engine:
        output = engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0))[0]
        assert output.finish_reason == "length"
        assert len(output.token_ids) == missing + 1
        ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        with torch.no_grad():
            logits = engine._model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == list(output.token_ids)


def test_requests_that_just_fit_the_pool_end_and_larger_ones_are_refused() -> None:
    prompt = (prompts(1, seed=7)[0] * 64)[:32]
    with engine_on("llama", max_pages=4) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, n=3)
        for completion in engine.generate([prompt], params)[0].outputs:
            check("llama", prompt, 1, completion.token_ids)
        params = SamplingParams(max_tokens=9, temperature=0, n=3)
        for completion in engine.generate([prompt[:24]], params)[0].outputs:
            check("llama", prompt[:24], 9, completion.token_ids)
        with pytest.raises(PageForgeError, match="larger"):
            engine.generate([[*prompt, 5]], params)
        with pytest.raises(OutOfPages, match="needed 5, available 4"):
            engine.generate([prompt], SamplingParams(max_tokens=2, temperature=0))


# The model afterwards.


@pytest.mark.parametrize("how", ["close", "with", "raise", "refused", "twice"])
def test_the_model_is_as_it_was(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    model.train()
    model.model.layers[1].eval()
    model.model.layers[0].mlp.register_forward_hook(lambda *arguments: None)
    training = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    prompt = list(prompts(1)[0])
    if how == "close":
        engine = Engine(model, max_pages=16)
        engine.add_request(prompt, GREEDY)
        engine.step()
        assert model.config._attn_implementation == "pageforge" and not model.training
        engine.close()
        engine.close()
        assert engine._pool.is_closed
        for call in (engine.step, engine.stats, engine.sleep, lambda: engine.generate([prompt])):
            with pytest.raises(PageForgeError, match="closed"):
                call()
    elif how == "with":
        with Engine(model, max_pages=16) as engine:
            engine.generate([prompt], GREEDY)
    elif how == "raise":
        with pytest.raises(Planted), Engine(model, max_pages=16) as engine:
            engine.add_request(prompt, GREEDY)
            engine.step()
            raise Planted
        assert engine._pool.is_closed
    elif how == "refused":

        def refuse(*arguments: Any) -> None:
            raise Planted

        monkeypatch.setattr(engine_module, "try_model", refuse)
        with pytest.raises(Planted):
            Engine(model, max_pages=16)
    else:
        for _ in range(2):
            with Engine(model, max_pages=16) as engine:
                engine.generate([prompt], GREEDY)
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == training
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_params_that_are_none_are_called_so() -> None:
    wrong: Any = {"max_tokens": 3}
    with Engine(make(CONFIGS["llama"](), "sdpa"), max_pages=16) as engine:
        for params in (wrong, [wrong] * 2):
            with pytest.raises(RequestError, match=r"^params: expected SamplingParams, got dict; "):
                engine.generate([[5], [6]], params)
        with pytest.raises(RequestError, match=r"^params: expected one, or 2 of them, got 3; "):
            engine.generate([[5], [6]], [GREEDY] * 3)
        assert [out.error for out in engine.generate([[5], [6]], (GREEDY, GREEDY))] == [None] * 2


def test_a_wrong_seed_changes_nothing() -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    with pytest.raises(RequestError, match="seed: expected"):
        Engine(model, max_pages=16, seed=-1)
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_as_it_was_though_closing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(CONFIGS["llama"](), "sdpa")
    engine = Engine(model, max_pages=16)

    def fail() -> None:
        raise Planted

    monkeypatch.setattr(engine._core, "settle", fail)
    with pytest.raises(Planted):
        engine.close()
    assert model.config._attn_implementation == "sdpa"
    assert engine._pool.is_closed


def test_a_changed_model_is_seen_though_a_step_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last request ended by a token; the step behind it was launched already."""
    launch_ahead(monkeypatch)
    prompt = prompts(1)[0]
    refreshed: list[int] = []
    monkeypatch.setattr(Runner, "refresh", lambda runner: refreshed.append(1))
    with engine_on("llama") as engine:
        first = engine.generate([prompt], GREEDY)[0].token_ids
        stopping = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(first[0],))
        engine.generate([prompt], stopping)
        assert engine._core._flights
        engine.generate([prompt], GREEDY)
    assert len(refreshed) == 3


def test_a_stream_that_has_ended_lets_a_later_request_of_its_id_live() -> None:
    good = prompts(1)[0]
    with engine_on("llama") as engine:
        chunks = engine.stream(good, GREEDY)
        name = next(chunks).request_id
        while engine.has_unfinished:
            engine.step()
        engine.add_request(good, GREEDY, request_id=name)
        list(chunks)  # to the end, behind which it is closed
        check("llama", good, 8, run_all(engine)[name].token_ids)


def test_an_interrupted_call_leaves_no_results_to_others() -> None:
    with engine_on("llama") as engine:
        remove = fail_once(engine, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(3), GREEDY)
        remove()
        assert engine.step() == []


@pytest.mark.parametrize("priority", [1 << 22, -(1 << 22) - 1, 1.5, True])
def test_a_priority_without_a_rank_is_refused(priority: Any) -> None:
    good = prompts(1)[0]
    with engine_on("llama") as engine:
        for highest in (1 - (1 << 22), (1 << 22) - 1):
            engine.add_request(good, GREEDY, priority=highest)
        with pytest.raises(RequestError, match="priority"):
            engine.add_request(good, GREEDY, priority=priority)
        with pytest.raises(RequestError, match="priority"):
            engine.stream(good, GREEDY, priority=priority)
        for output in run_all(engine).values():
            check("llama", good, 8, output.token_ids)
        assert engine.stats().num_finished == 2


def test_calls_from_inside_a_step_are_refused() -> None:
    """A row freed there would be computed all the same, and the lock would never come."""
    with engine_on("llama") as engine:
        refused = []

        def meddle(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
            for call in (engine.step, engine.close, lambda: engine.abort("other")):
                with pytest.raises(PageForgeError, match="in the middle of another"):
                    call()
                refused.append(call)
            return logits

        engine.add_request([3, 4], SamplingParams(max_tokens=4), request_id="other")
        (output,) = engine.generate(
            [[5, 6]], SamplingParams(max_tokens=2, logits_processors=[meddle])
        )
        assert output.error is None and len(refused) == 6


@pytest.mark.usefixtures("ahead")
def test_an_end_that_is_interrupted_leaves_a_later_request_of_its_id_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request has ended, but its pages are not given back yet; then it is ended once more."""
    first, second = prompts(2, seed=8)
    with engine_on("llama", prefix_cache=False) as engine:
        forks, left = engine._core._forks, [1]
        leave = forks.leave

        def interrupted(sequence: Any) -> None:
            if left:
                left.pop()
                raise KeyboardInterrupt
            leave(sequence)

        monkeypatch.setattr(forks, "leave", interrupted)
        engine.add_request(first, GREEDY, request_id="same")
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.step()
        assert "same" not in engine._live.by_id
        engine.add_request(second, GREEDY, request_id="same")
        outputs = []
        while engine._live.by_id:
            outputs += engine.step()
        check("llama", first, 8, outputs[0].token_ids)
        check("llama", second, 8, outputs[1].token_ids)
        assert engine.stats().num_finished == len(outputs) == 2


def test_a_request_that_is_interrupted_on_its_way_in_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_on("llama") as engine:
        core, added = engine._core, []
        add = core.add

        def interrupted(sequence: Any) -> None:
            add(sequence)
            added.append(sequence)
            if len(added) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(core, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request(prompts(1)[0], replace(GREEDY, n=3, temperature=1.0))
        assert not engine._live.by_id and not core.waiting


@pytest.mark.parametrize("after", [0, 1, 4])
def test_many_completions_are_aborted_whatever_they_wait_for(after: int) -> None:
    prompt = prompts(1)[0]
    with engine_on("llama", tokenizer=Tokenizer()) as engine:
        engine.add_request(prompt, replace(GREEDY, n=3000, temperature=1.0), request_id="many")
        for _ in range(after):
            engine.step()
        assert engine.abort("many")
        (output,) = engine.step()
        assert [each.index for each in output.outputs] == [*range(3000)]
        assert {each.finish_reason for each in output.outputs} == {"abort"}
        assert not engine._core.waiting and not engine._core._unfinished
