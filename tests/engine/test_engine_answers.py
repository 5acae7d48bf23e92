"""What the engine tells beside tokens: log-probabilities, text, streams, timings."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterable, Sequence

import pytest
import torch
from tests.engine.served import (
    Prompt,
    Tokenizer,
    alone,
    check,
    check_all_back,
    engine_on,
    launch_ahead,
    prompts,
    run_all,
)
from tests.hf.tiny_models import tiny

from pageforge import PageForgeError
from pageforge.engine import Engine, RequestOutput, SamplingParams, StreamChunk
from pageforge.errors import RequestError


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0, **options})


@pytest.fixture(params=[False, True], ids=["at once", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        launch_ahead(monkeypatch)


def plain_logprobs(tokens: Sequence[int]) -> torch.Tensor:
    """`[T - 1, V]`: of the token after each of `tokens`, by the plain model."""
    with torch.no_grad():
        logits = tiny("llama")(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits[:-1].log_softmax(-1)


def check_logprobs(got: Sequence, tokens: Sequence[int], wanted: torch.Tensor, k: int) -> None:
    """`got`: one for each of `tokens`, of which `wanted` says the log-probabilities."""
    assert len(got) == len(tokens) == len(wanted)
    for one, token, row in zip(got, tokens, wanted, strict=True):
        assert one.chosen.token_id == token
        assert one.chosen.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(k)
        assert [each.logprob for each in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [each.rank for each in one.top] == [*range(1, k + 1)]
        for each in one.top:
            assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-4)
            assert each == one.chosen or each.token_id != token
        # (Where tokens are nearly as likely, the plain model may have them the other way round.)
        least, most = ((row > row[token] + by).sum().item() + 1 for by in (1e-4, -1e-4))
        assert least <= one.chosen.rank <= most


@pytest.mark.usefixtures("ahead")
def test_logprobs_are_those_of_the_plain_model() -> None:
    asked = prompts(8, seed=1)
    with engine_on("llama") as engine:
        # Some ask for none, so that the rows that do are not the first ones.
        params = [greedy(logprobs=k, n=2) for k in (None, 3, 0, None, 5, None, 1, 101)]
        for prompt, of_one, output in zip(
            asked, params, engine.generate(asked, params), strict=True
        ):
            for completion in output.outputs:
                check("llama", prompt, 8, completion.token_ids)
                if of_one.logprobs is None:
                    assert completion.logprobs is None
                    continue
                wanted = plain_logprobs([*prompt, *completion.token_ids])[-8:]
                check_logprobs(completion.logprobs, completion.token_ids, wanted, of_one.logprobs)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("budget", [1, 7, 512])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_logprobs_are_those_of_the_plain_model(budget: int, max_tokens: int) -> None:
    asked: list[Prompt] = [prompts(1, seed=2)[0] * 8, *prompts(3, seed=3), (5,), (5, 6)]
    asked[0] = asked[0][:70]
    with engine_on("llama", max_batch_tokens=budget) as engine:
        # What a prefix hit would skip is computed all the same.
        engine.generate([asked[0]], greedy())
        params = [greedy(prompt_logprobs=k, max_tokens=max_tokens) for k in (2, 0, 1, 3, 2, 2)]
        params[1] = greedy(max_tokens=max_tokens)
        outputs = engine.generate(asked, params)
        for prompt, of_one, output in zip(asked, params, outputs, strict=True):
            check("llama", prompt, max_tokens, output.token_ids)
            check_prompt_logprobs(output, prompt, of_one)


def check_prompt_logprobs(output: RequestOutput, prompt: Prompt, params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    check_logprobs(others, prompt[1:], plain_logprobs(prompt), params.prompt_logprobs)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_come_once_though_the_prompt_is_computed_again(n: int) -> None:
    prompt = (prompts(1, seed=2)[0] * 8)[:60]
    with engine_on("llama", max_batch_tokens=16) as engine:
        params = greedy(prompt_logprobs=1, n=n)
        engine.add_request(prompt, params, request_id="asked")
        for _ in range(2):
            engine.step()
            engine.step()
            engine.weights_changed()  # all of it is computed again
        output = run_all(engine)["asked"]
        check_prompt_logprobs(output, prompt, params)


@pytest.mark.usefixtures("ahead")
def test_prompts_longer_than_a_step_of_logits() -> None:
    """Logits of 256 prompt tokens at most are made in one step."""
    prompt = tuple(prompts(1, seed=2)[0] * 40)[:250]
    with engine_on("llama", max_batch_tokens=100) as engine:
        params = greedy(prompt_logprobs=1, max_tokens=0)
        check_prompt_logprobs(engine.generate([prompt], params)[0], prompt, params)


# Text and streams


def text_of(prompt: Prompt, count: int) -> str:
    return Tokenizer().decode(alone("llama", prompt, count)[0])


@pytest.mark.usefixtures("ahead")
def test_text_and_stop_strings() -> None:
    prompt = prompts(1, seed=4)[0]
    whole = text_of(prompt, 12)
    stop = whole[5:7]
    cut = whole[: whole.index(stop)]
    with engine_on("llama", tokenizer=Tokenizer()) as engine:
        output = engine.generate(Tokenizer().decode(prompt), greedy(max_tokens=12))[0]
        assert output.text == whole and output.prompt == Tokenizer().decode(prompt)
        stopped = engine.generate([prompt], greedy(max_tokens=12, stop=stop))[0]
        assert (stopped.text, stopped.finish_reason) == (cut, "stop")
        assert stopped.outputs[0].stop == stop
        assert Tokenizer().decode(stopped.token_ids) == cut
        ended = engine.generate([prompt], greedy(max_tokens=12, stop_token_ids=[ord(cut[3]) - 65]))
        place = whole.index(cut[3])
        assert ended[0].text == whole[: place + 1] and ended[0].outputs[0].stop == ord(cut[3]) - 65


def joined(chunks: Sequence[StreamChunk], index: int = 0) -> tuple[str, list[int]]:
    of_one = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.finish_reason is not None for chunk in of_one] == [False] * (len(of_one) - 1) + [
        True
    ]
    text = "".join(chunk.text or "" for chunk in of_one)
    return text, [token for chunk in of_one for token in chunk.token_ids]


@pytest.mark.usefixtures("ahead")
def test_streams_join_to_the_whole_text() -> None:
    asked = prompts(3, seed=5)
    with engine_on("llama", tokenizer=Tokenizer()) as engine:
        engine.add_request(asked[0], greedy(max_tokens=20), request_id="beside")
        streams = [engine.stream(prompt, greedy(n=2)) for prompt in asked]
        found: list[list[StreamChunk]] = [[] for _ in streams]
        for turn in range(40):  # whoever asks makes steps for all
            for number, stream in enumerate(streams):
                chunk = next(stream, None)
                found[number] += [] if chunk is None else [chunk]
            assert turn < 39 or not engine.abort("nobody")
        for prompt, chunks in zip(asked, found, strict=True):
            for index in range(2):
                text, tokens = joined(chunks, index)
                check("llama", prompt, 8, tokens)
                assert text == Tokenizer().decode(tokens)
        assert run_all(engine)["beside"].finish_reason == "length"


class Letters(Tokenizer):
    """Each token is four characters."""

    def decode(self, token_ids: list[int], *arguments: object, **options: object) -> str:
        return "".join(f"{token:03d} " for token in token_ids)


@pytest.mark.usefixtures("ahead")
def test_a_stream_shows_all_that_comes_before_a_stop_string() -> None:
    """It may begin and end inside a token, or go over several."""
    prompt = prompts(1, seed=5)[0]
    with engine_on("llama", tokenizer=Letters()) as engine:
        whole = engine.generate([prompt], greedy(max_tokens=6))[0].text
        for first in range(len(whole)):
            for length in (1, 3, 6):
                params = greedy(max_tokens=6, logprobs=0, stop=whole[first : first + length])
                output = engine.generate([prompt], params)[0]
                chunks = list(engine.stream(prompt, params))
                text, tokens = joined(chunks)
                assert text == output.text
                assert tokens[: len(output.token_ids)] == output.token_ids
                assert [len(chunk.logprobs) for chunk in chunks] == [
                    len(chunk.token_ids) for chunk in chunks
                ]


@pytest.mark.usefixtures("ahead")
def test_the_loop_of_the_docs_gets_every_output() -> None:
    """However a request ended: beside another's call, aborted, or before any step."""
    found = {}
    with engine_on("llama") as engine:
        engine.add_request([5], greedy(max_tokens=0), request_id="nothing to do")
        engine.add_request([5, 6], greedy(max_tokens=2), request_id="beside")
        engine.add_request([5, 6], greedy(max_tokens=50), request_id="aborted")
        engine.generate([[9, 8, 7]], greedy(max_tokens=10))
        engine.abort("aborted")
        while engine.has_unfinished:
            found |= {output.request_id: output.finish_reason for output in engine.step()}
    assert found == {"nothing to do": "length", "beside": "length", "aborted": "abort"}


def test_leaving_a_stream_aborts_its_request() -> None:
    with engine_on("llama") as engine:
        for chunk in engine.stream(prompts(1)[0], greedy(max_tokens=100)):
            assert chunk.text is None
            break
        assert not engine.has_unfinished
        assert engine.step() == []


def tokens_of(chunks: Iterable[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("how", ["kept", "dropped", "closed"])
def test_a_stream_that_nobody_reads_does_not_begin(how: str) -> None:
    asked = prompts(2, seed=5)
    with engine_on("llama") as engine:
        chunks = engine.stream(asked[0], greedy())
        assert not engine.has_unfinished
        engine.add_request(asked[1], greedy(), request_id="0")  # an id that a stream might have had
        if how == "dropped":
            del chunks
        elif how == "closed":
            chunks.close()
            assert list(chunks) == []
        assert run_all(engine).keys() == {"0"}
        assert engine.stats().num_finished == 1
        if how == "kept":
            engine.add_request(asked[1], greedy(), request_id="3")
            check("llama", asked[0], 8, tokens_of(chunks))
            assert run_all(engine).keys() == {"3"}


def test_a_stream_refuses_at_the_call_what_cannot_be_right() -> None:
    with engine_on("llama") as engine:
        for wrong in ({"prompt": []}, {"params": 5}, {"priority": 0.5}):
            with pytest.raises(RequestError):
                engine.stream(**{"prompt": [5, 6], **wrong})
        chunks = engine.stream([5, 6], greedy())
        engine.sleep()
        with pytest.raises(PageForgeError, match="wake"):
            engine.stream([5, 6], greedy())
        with pytest.raises(PageForgeError, match="wake"):
            next(chunks)
        engine.wake()


@pytest.mark.usefixtures("ahead")
def test_steps_return_what_was_added_and_no_streams() -> None:
    asked = prompts(2, seed=5)
    with engine_on("llama") as engine:
        chunks = engine.stream(asked[0], greedy(max_tokens=5))
        first = next(chunks)
        engine.add_request(asked[1], greedy(), request_id="added")
        assert run_all(engine).keys() == {"added"}
        check("llama", asked[0], 5, tokens_of([first, *chunks]))


@pytest.mark.usefixtures("ahead")
def test_a_stream_that_is_garbage_collected_in_a_step_is_aborted_after_it() -> None:
    asked = prompts(2, seed=5)
    with engine_on("llama") as engine:
        circle = [engine.stream(asked[0], greedy(max_tokens=100))]
        next(circle[0])
        circle.append(circle)  # only the garbage collector finds it
        del circle

        def collect(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not tokens:
                gc.collect()
            return logits

        engine.add_request(asked[1], greedy(logits_processors=[collect]), request_id="added")
        outputs = engine.step()
        assert engine.stats().num_running == 1
        while engine.has_unfinished:
            outputs += engine.step()
        assert [output.request_id for output in outputs] == ["added"]
        check("llama", asked[1], 8, outputs[0].token_ids)


class Slow:
    """A model whose steps take until they are let go, within a `with`."""

    def __init__(self, engine: Engine):
        self.begun, self.go = threading.Event(), threading.Event()
        layer = engine._model.get_decoder().layers[0]
        self.remove = layer.register_forward_pre_hook(self.wait).remove

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def wait(self, *arguments: object) -> None:
        self.begun.set()
        assert self.go.wait(timeout=20), "the event loop waits for the step"

    async def until_it_has_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("streams", [False, True])
def test_cancelling_does_not_wait_for_the_step(streams: bool) -> None:
    asked = prompts(4, seed=6)
    with engine_on("llama") as engine, Slow(engine) as slow:

        async def answered(prompt: Prompt, count: int) -> list[int]:
            if streams:
                chunks = engine.stream_async(prompt, greedy(max_tokens=count))
                return tokens_of([chunk async for chunk in chunks])
            return (await engine.generate_async(prompt, greedy(max_tokens=count))).token_ids

        async def all_of_it() -> list[list[int]]:
            first = asyncio.create_task(answered(asked[0], 100))
            others = [asyncio.create_task(answered(asked[1], 8))]
            await slow.until_it_has_begun()
            # These two cannot be submitted before the step is over.
            others.append(asyncio.create_task(answered(asked[2], 8)))
            late = asyncio.create_task(answered(asked[3], 100))
            await asyncio.sleep(0.01)
            for task in (first, late):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            slow.go.set()
            return await asyncio.gather(*others)

        for prompt, tokens in zip(asked[1:3], asyncio.run(all_of_it()), strict=True):
            check("llama", prompt, 8, tokens)
        assert not engine.has_unfinished
        assert engine.step() == []


def test_a_stream_for_asyncio_that_is_dropped_is_aborted() -> None:
    with engine_on("llama") as engine:

        async def leave() -> None:
            async for _ in engine.stream_async(prompts(1)[0], greedy(max_tokens=100)):
                break
            await engine.generate_async([5, 6], greedy())
            assert not engine.has_unfinished
            with pytest.raises(RequestError):
                await engine.generate_async([], greedy())

        asyncio.run(leave())
        assert engine.step() == []


def test_streams_and_answers_for_asyncio() -> None:
    asked = prompts(6, seed=6)
    with engine_on("llama", tokenizer=Tokenizer()) as engine:

        async def streamed(prompt: Prompt) -> list[int]:
            chunks = [chunk async for chunk in engine.stream_async(prompt, greedy())]
            return joined(chunks)[1]

        async def answered(prompt: Prompt) -> list[int]:
            return list((await engine.generate_async(prompt, greedy())).token_ids)

        async def all_at_once() -> list[list[int]]:
            kinds = [streamed, answered] * 3
            return await asyncio.gather(
                *(kind(prompt) for kind, prompt in zip(kinds, asked, strict=True))
            )

        async def cancelled() -> None:
            task = asyncio.create_task(engine.generate_async(asked[0], greedy(max_tokens=180)))
            while not engine.stats().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        for prompt, tokens in zip(asked, asyncio.run(all_at_once()), strict=True):
            check("llama", prompt, 8, tokens)
        asyncio.run(cancelled())
        assert not engine.has_unfinished


def test_other_threads_get_their_turn_beside_one_that_makes_steps() -> None:
    """Who has just had the lock would get it again and again."""
    begun = threading.Event()
    with engine_on("llama") as engine:

        def read() -> None:
            for _ in engine.stream(prompts(1)[0], greedy(max_tokens=60)):
                begun.set()

        reading = threading.Thread(target=read)
        reading.start()
        begun.wait()
        assert engine.stats().num_steps < 30
        reading.join()


def test_a_stream_in_one_thread_and_answers_in_another() -> None:
    asked = prompts(9, seed=7)
    outputs: list[RequestOutput] = []
    with engine_on("llama", tokenizer=Tokenizer()) as engine:
        thread = threading.Thread(
            target=lambda: outputs.extend(engine.generate(asked[1:], greedy()))
        )
        thread.start()
        chunks = list(engine.stream(asked[0], greedy(max_tokens=30)))
        thread.join()
        check("llama", asked[0], 30, joined(chunks)[1])
        for prompt, output in zip(asked[1:], outputs, strict=True):
            check("llama", prompt, 8, output.token_ids)
        check_all_back(engine)
        assert engine.step() == []


def test_timings_and_counts() -> None:
    prompt = (prompts(1, seed=8)[0] * 8)[:33]
    with engine_on("llama") as engine:
        cold, warm = (engine.generate([prompt], greedy(n=2))[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
        times = warm.timings
        assert 0 <= times.queued <= times.first_token <= times.total
        stats = engine.stats()
        assert stats.num_finished == 2
        assert stats.num_running == stats.num_waiting == 0
        # Twice the completions but for the first token; the prompt once, and its last token again.
        assert stats.num_computed_tokens == 33 + 1 + 2 + 4 * 7
        assert stats.num_cached_tokens == 32 * 4 - 32
