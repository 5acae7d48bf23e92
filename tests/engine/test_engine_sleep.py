"""Asleep, calls that wait for an answer wait on, and those that are begun are refused."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.engine.served import check, engine_on, prompts, run_all
from tests.hf.tiny_models import attending

from pageforge import PageForgeError
from pageforge.engine import Engine, SamplingParams
from pageforge.engine.request import Request

LONG = SamplingParams(max_tokens=150, temperature=0)
PROMPT = prompts(1, longest=20)[0]


def generated(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], LONG)[0].token_ids


def streamed(engine: Engine) -> list[int]:
    return [token for chunk in engine.stream(PROMPT, LONG) for token in chunk.token_ids]


def generated_async(engine: Engine) -> list[int]:
    return asyncio.run(engine.generate_async(PROMPT, LONG)).token_ids


def streamed_async(engine: Engine) -> list[int]:
    async def read() -> list[int]:
        chunks = engine.stream_async(PROMPT, LONG)
        return [token async for chunk in chunks for token in chunk.token_ids]

    return asyncio.run(read())


ways = pytest.mark.parametrize("way", [generated, streamed, generated_async, streamed_async])


class Paused:
    """Holds the call of another thread between two of its steps until `sleep` is over."""

    def __init__(self, engine: Engine):
        self._engine, self._advance, self._num_calls = engine, engine._advance, 0
        self._reached, self._slept, self._waits = (threading.Event() for _ in range(3))
        vars(engine)["_advance"] = self.advance

    def advance(self, request: Request) -> Future[None] | None:
        self._num_calls += 1
        if self._num_calls == 5:
            self._reached.set()
            assert self._slept.wait(timeout=60)
        news = self._advance(request)
        if news is not None:
            self._waits.set()
        return news

    def sleep(self) -> None:
        """When this is over the call waits, or is about to."""
        assert self._reached.wait(timeout=60)
        self._engine.sleep()
        self._slept.set()
        assert self._waits.wait(timeout=60)


@contextlib.contextmanager
def asleep(way: Callable[[Engine], Any]) -> Iterator[tuple[Engine, Future[Any]]]:
    """Another thread is in the middle of a call, and waits for `wake`."""
    model = attending("llama")
    with ThreadPoolExecutor(1) as executor, Engine(model, page_size=8, max_pages=400) as engine:
        paused = Paused(engine)
        found = executor.submit(way, engine)
        paused.sleep()
        yield engine, found


@ways
def test_calls_of_others_wait_for_wake(way: Callable[[Engine], list[int]]) -> None:
    with asleep(way) as (engine, found):
        steps = engine.stats().num_steps
        assert engine.stats().pool.pages_used == 0
        for call in (engine.step, lambda: engine.generate([PROMPT], LONG)):
            with pytest.raises(PageForgeError, match="asleep"):
                call()
        engine.add_request(PROMPT, LONG, request_id="queued")
        assert not found.done() and engine.stats().num_steps == steps
        engine.wake()
        check("llama", PROMPT, 150, found.result(timeout=60))
        check("llama", PROMPT, 150, run_all(engine)["queued"].token_ids)


@ways
def test_closing_ends_them(way: Callable[[Engine], list[int]]) -> None:
    with asleep(way) as (engine, found):
        engine.close()
        with pytest.raises(PageForgeError, match="closed"):
            found.result(timeout=60)


@ways
def test_aborting_their_request_ends_them(way: Callable[[Engine], list[int]]) -> None:
    with asleep(way) as (engine, found):
        (name,) = engine._live.by_id
        assert engine.abort(name)
        tokens = found.result(timeout=60)
        assert 0 < len(tokens) < 150


@pytest.mark.parametrize("way", [generated, streamed])
def test_ctrl_c_ends_one_that_waits(way: Callable[[Engine], list[int]]) -> None:
    with engine_on("llama") as engine:
        main, paused = threading.main_thread().ident, Paused(engine)
        assert main is not None

        def fall_asleep() -> None:
            paused.sleep()
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)

        with ThreadPoolExecutor(1) as executor:
            sleeper = executor.submit(fall_asleep)
            with pytest.raises(KeyboardInterrupt):
                way(engine)
            sleeper.result(timeout=60)
        assert not engine.has_unfinished
        engine.wake()


def test_tasks_that_wait_take_no_threads() -> None:
    """`wake` may need one of the event loop's; and cancelling one leaves the others."""

    async def all_of_it(engine: Engine) -> list[list[int]]:
        advance, is_asleep = engine._advance, False
        # None of them may end before all have begun.
        vars(engine)["_advance"] = lambda request: advance(request) if is_asleep else None
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        tasks = [asyncio.create_task(engine.generate_async(PROMPT, LONG)) for _ in range(8)]
        while engine.stats().num_waiting < 8:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.sleep)
        is_asleep = True
        await asyncio.sleep(0.05)
        for task in tasks[:2]:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(asyncio.to_thread(engine.wake), timeout=60)
        return [(await task).token_ids for task in tasks[2:]]

    with engine_on("llama") as engine:
        for tokens in asyncio.run(all_of_it(engine)):
            check("llama", PROMPT, 150, tokens)


def test_who_sleeps_does_not_wait_for_itself() -> None:
    with engine_on("llama") as engine:
        chunks = engine.stream(PROMPT, LONG)
        next(chunks)
        engine.sleep()
        with pytest.raises(PageForgeError, match="got it asleep; call wake"):
            list(chunks)
        engine.wake()
        assert generated(engine)
