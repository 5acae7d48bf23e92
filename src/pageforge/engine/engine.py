"""Engine: many requests on one model and one pool, batched continuously."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.engine.core import Core
from pageforge.engine.draw import completion_seed
from pageforge.engine.input_processor import InputProcessor, Prompt, as_prompts
from pageforge.engine.live import LiveRequests
from pageforge.engine.model_check import TRIED, check_model, longest_sequence, try_model
from pageforge.engine.outputs import RequestOutput, StreamChunk
from pageforge.engine.params import SamplingParams
from pageforge.engine.request import PRIORITY, Request
from pageforge.engine.runner import Runner
from pageforge.engine.sampler import Sampler
from pageforge.engine.scheduler import Limits
from pageforge.engine.sequence import Sequence
from pageforge.engine.served_model import evaluation_mode, served
from pageforge.engine.stats import EngineStats
from pageforge.errors import PageForgeError, RequestError, expected
from pageforge.interrupts import held_back
from pageforge.pool import PagePool
from pageforge.store import free_bytes, parse_memory

MAX_RUNNING = 256

BATCH_TOKENS = {"cuda": 8192, "cpu": 512}
"""Tokens a step by default: enough that weights are read for many, few enough to decode beside."""

LOOKED_AFTER = 16
"""Steps after which the model is looked at again while requests run: with GPT-2 that takes the host
0.1 ms, a quarter of what it has to do for a step."""

LONG_AGO = -LOOKED_AFTER

TURN_SECONDS = 1e-4
"""What a thread that wants to make the next step leaves others to take their turns: they have to
wake up first, and Python's locks serve whoever comes."""

HOST = torch.device("cpu")


class Engine:
    """Serves many requests on the model that you have, hooks and adapters included.

        with Engine(model, tokenizer) as engine:
            for output in engine.generate(["The state of", "Once"], SamplingParams(max_tokens=50)):
                print(output.text)

    While it is open the model attends by pageforge attention, and while requests run it is in
    evaluation mode; `close` leaves it as it was and gives all memory back. Calls are safe from
    several threads; each waits for its turn. Ctrl-C ends a call when the step in progress is over;
    pressed once more, at once. The model must not be used or changed meanwhile, but between calls
    it may; after a change of its weights call `weights_changed`. (Hooks, settings and weights that
    moved are looked for when a request begins, and else every LOOKED_AFTER steps.)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        page_size: int = 16,
        max_pages: int | None = None,
        max_memory: int | float | str | None = None,
        max_running: int = MAX_RUNNING,
        max_batch_tokens: int | None = None,
        prefix_cache: bool = True,
        swap_memory: int | float | str = 0,
        compile: bool = False,
        allow_hooks: bool = False,
        seed: int | None = None,
    ):
        """Reserves addresses for pages, and looks whether the model can be served.

        `max_pages`, `max_memory`: as PagePool's. `max_running`: sequences at a time.
        `max_batch_tokens`: tokens a step (8192 on CUDA, 512 on the CPU). `prefix_cache`: keep the
        pages of what was computed, for prompts that begin alike. `swap_memory`: pinned host memory
        for the pages of preempted sequences, as bytes, "4GiB" or a fraction of what is free; what
        does not fit is computed again. `compile`: what is captured as a graph goes through
        torch.compile. `allow_hooks`: capture graphs though modules have Python hooks, which then
        run only while capturing.
        `seed`: for requests without one.

        Raises UnsupportedModel, GeometryError, RequestError, OutOfPages; the model is as before
        then.
        """
        check_model(model)
        _check_count("max_running", max_running)
        if max_batch_tokens is not None:
            _check_count("max_batch_tokens", max_batch_tokens)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            fix = "None lets the engine choose"
            raise RequestError(expected("seed", "an int from 0", repr(seed), fix))
        swap_bytes = 0
        if swap_memory:
            swap_bytes = parse_memory(swap_memory, free_bytes(HOST), name="swap_memory")
        self._model = model
        self._seeds = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock
        self._in_line: set[int] = set()  # those that wait for it
        self._abandoned: deque[Request] = deque()
        self._live = LiveRequests()
        device = model.device.type
        tokens = max_batch_tokens or BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
        with contextlib.ExitStack() as undo:
            undo.enter_context(served(model))
            self._pool = undo.enter_context(
                PagePool.for_model(model, page_size, max_pages, max_memory)
            )
            most_pages, max_tokens = self._pool.num_available, longest_sequence(model)
            row_tokens = min(max_tokens, most_pages * page_size)
            runner = Runner(
                model,
                self._pool,
                # Whatever is served later, the trial has to fit.
                max_running=max(max_running, len(TRIED)),
                max_batch_tokens=max(tokens, sum(TRIED)),
                max_tokens=row_tokens,
                compile=compile,
                allow_hooks=allow_hooks,
            )
            undo.callback(runner.forget_graphs)
            self._mode = undo.enter_context(evaluation_mode(model))
            self._mode.begin()
            with torch.no_grad():
                vocab_size = try_model(model, self._pool, runner, row_tokens)
            self._mode.end()
            sampler = Sampler(max_running, vocab_size, model.device)
            self._inputs = InputProcessor(
                model,
                tokenizer,
                sampler,
                max_tokens=max_tokens,
                most_pages=most_pages,
                page_size=page_size,
            )
            self._core = Core(
                runner,
                self._pool,
                sampler,
                Limits(max_running, tokens, page_size),
                self._live,
                swap_bytes=swap_bytes,
            )
            self._restore = undo.pop_all()
        self._prefix_cache = prefix_cache
        self._counter = itertools.count()
        self._looked_at = LONG_AGO  # the number of steps when the model was last looked at
        self._is_asleep = False
        self._sleeper = 0  # the thread that called `sleep`
        self._is_closed = False
        self._news: Future[None] = Future()  # for those whom `sleep` makes wait

    # --- whole answers ----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, texts or lists of token ids; results in their order.

        `params`: for all, or one each. A request that fails on the way has `error` set, and the
        others go on; one that cannot be right (see `add_request`) raises before any begins.
        `progress`: show a bar on stderr. A single prompt gives a list of one.
        """
        several = as_prompts(prompts)
        each = [*params] if isinstance(params, SequenceOf) else [params] * len(several)
        if len(each) != len(several):
            raise RequestError(
                expected("params", f"one, or {len(several)} of them", len(each), "one a prompt")
            )
        requests: list[Request] = []
        try:
            with self._turn(awake=True):
                for prompt, of_prompt in zip(several, each, strict=True):
                    requests.append(self._inputs.request(prompt, of_prompt))
                for request in requests:
                    self._submit(request)
            console = Console(stderr=True)
            with Progress(console=console, disable=not progress, transient=True) as bar:
                task = bar.add_task("requests", total=len(requests))
                for request in requests:
                    while request.output is None:
                        self._wait(request)
                    bar.advance(task)
            return [request.output for request in requests if request.output is not None]
        finally:
            self._abandon(*requests)

    # --- as they come -----------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[StreamChunk]:
        """Chunks of one answer as they come.

        The request begins when the first chunk is asked for, and leaving the iterator aborts it.
        Other requests advance as well, whoever's turn it is.

        Raises what `add_request` raises, at once; after the last chunk, what made it fail.
        """
        with self._turn(awake=True):
            request = self._inputs.request(prompt, params, priority, streams=True)
        return self._chunks(request)

    async def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio: all work is done in threads, one at a time."""
        request = await self._begin_in_thread(prompt, params, priority, streams=True)
        try:
            while request.output is None or request.chunks:
                if not request.chunks:
                    await self._wait_async(request)
                while request.chunks:
                    yield request.chunks.popleft()
            if request.output.error is not None:
                raise request.output.error
        finally:
            self._abandon(request)

    async def generate_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """One answer, for asyncio. Cancelling it aborts the request."""
        request = await self._begin_in_thread(prompt, params, priority, streams=False)
        try:
            while request.output is None:
                await self._wait_async(request)
            return request.output
        finally:
            self._abandon(request)

    # --- step by step -----------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id; `step` does the work. Lower priorities come first.

        `priority`: up to 2^22 - 1 either way.

        Raises RequestError for a prompt that is empty, too long or neither text nor token ids, for
        an id that is in use, for text or stop strings without a tokenizer; OutOfPages for one that
        the pool could never hold.
        """
        with self._turn():
            request = self._inputs.request(prompt, params, priority, is_awaited=False)
            self._submit(request, request_id)
            return request.id

    def step(self) -> list[RequestOutput]:
        """Run one step for all, and return the requests of `add_request` that have ended."""
        self._let_others_in()
        with self._turn(awake=True):
            self._step()
        finished: list[RequestOutput] = []
        with contextlib.suppress(IndexError):  # until there is none; another thread may take some
            while True:
                finished.append(self._live.finished.popleft())
        return finished

    def abort(self, request_id: str) -> bool:
        """End a request; its pages are free at once. Whether there was one of this id."""
        with self._turn(even_closed=True):
            request = self._live.by_id.get(request_id)
            is_aborted = request is not None and self._abort(request)
            self._core.let_go()
            self._tell()
            return is_aborted

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or has ended without `step` having returned it."""
        return bool(self._live.by_id or self._live.finished)

    # --- between calls ----------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts and pages now."""
        with self._turn():
            core, runner = self._core, self._core.runner
            return EngineStats(
                num_running=core.rows.num_running,
                num_waiting=len(core.waiting),
                num_finished=self._live.num_finished,
                num_steps=core.num_steps,
                num_computed_tokens=core.num_computed,
                num_cached_tokens=self._live.num_cached,
                num_preemptions=core.num_preemptions,
                num_swaps=core.num_swaps,
                swapped_bytes=core.swap.num_bytes,
                num_graphs=runner.num_captures,
                num_replays=runner.num_replays,
                capture_seconds=runner.capture_seconds,
                eager_steps=dict(runner.eager_steps),
                pool=self._pool.stats(),
            )

    def drop_prefix_cache(self) -> None:
        """Forget what prompts could share; pages in use stay."""
        with self._turn():
            self._pool.drop_prefix_cache()

    def trim(self) -> None:
        """Give back memory that no page needs."""
        with self._turn():
            self._pool.trim()

    def sleep(self) -> None:
        """Give all K/V memory back; requests that run wait, and are computed again after `wake`.

        Between rollouts, say, so that training has the memory. Swapped pages stay on the host.
        Until then other threads' calls that wait for an answer, or for a stream's next chunk, wait
        on; whatever would begin a request and wait for it raises PageForgeError, as `step` does.
        """
        with self._turn():
            self._core.give_up_pages()
            self._pool.drop_prefix_cache()
            self._pool.trim()
            self._mode.end()
            self._is_asleep = True
            self._sleeper = threading.get_ident()

    def wake(self) -> None:
        """Go on after `sleep`."""
        with self._turn():
            self._is_asleep = False
            self._looked_at = LONG_AGO
            self._tell()

    def weights_changed(self) -> None:
        """The model's weights are others: what was computed with the old ones must not be used.

        Drops the prefix cache and captured graphs; running requests are computed anew from their
        tokens so far.
        """
        with self._turn():
            self._core.give_up_pages(swap=False)
            self._pool.drop_prefix_cache()
            self._core.runner.forget_graphs()
            self._looked_at = LONG_AGO

    def close(self) -> None:
        """Abort all requests, leave the model as it was and give all memory back."""
        with self._turn(even_closed=True):
            if self._is_closed:
                return
            self._is_closed = True
            try:
                for request in list(self._live.by_id.values()):
                    self._abort(request)
                self._core.settle()
            finally:
                try:
                    self._restore.close()
                finally:
                    self._tell()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Without waiting for a turn: it may be asked for in the middle of a step."""
        core, name = self._core, type(self._model).__name__
        state = "asleep, " if self._is_asleep else ""
        numbers = f"{state}{core.rows.num_running} running, {len(core.waiting)} waiting"
        return f"Engine({name}, {'closed' if self._is_closed else numbers})"

    # --- inside -----------------------------------------------------------------------------

    def _submit(self, request: Request, request_id: str | None = None) -> None:
        """Hand a request to the core. Raises RequestError for an id that cannot be."""
        live, params = self._live.by_id, request.params
        if request_id is None:
            request_id = next(name for i in self._counter if (name := str(i)) not in live)
        elif not isinstance(request_id, str):
            raise RequestError(expected("request_id", "text", repr(request_id), "pass a str"))
        elif request_id in live:
            raise RequestError(
                expected("request_id", "one that is not in use", request_id, "choose another")
            )
        if not self._is_asleep and (not live or self._core.num_steps != self._looked_at):
            self._look_at_model()
        stop_ids = self._inputs.stop_ids(params)
        seed = params.seed
        if seed is None and not params.is_greedy:
            seed = int(self._seeds.integers(1 << 63))
        prompt = np.array(request.prompt_ids, np.int32)
        sequences = [
            Sequence(
                prompt,
                params,
                request.priority * PRIORITY + next(self._counter),
                stop_ids=stop_ids,
                seed=completion_seed(seed or 0, index),
                shares=self._prefix_cache,
                is_watched=request.is_watched,
                owner=request,
            )
            for index in range(params.n)
        ]
        first, *others = sequences
        if params.prompt_logprobs is None:
            first.children = others
            for other in others:
                other.parent = first
        request.submit(request_id, sequences)
        live[request_id] = request
        try:
            for sequence in sequences:
                self._core.add(sequence)
        except BaseException:  # an interrupt, mostly: nobody will know of it
            self._abandoned.append(request)
            raise

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        try:
            with self._turn(awake=True):
                self._submit(request)
            while request.output is None or request.chunks:
                if not request.chunks:
                    self._wait(request)
                while request.chunks:
                    yield request.chunks.popleft()
            if request.output.error is not None:
                raise request.output.error
        finally:
            self._abandon(request)

    async def _begin_in_thread(
        self, prompt: Prompt, params: SamplingParams | None, priority: int, *, streams: bool
    ) -> Request:
        """A request, submitted by a thread: the event loop does not wait for a step to end."""
        begun: list[Request] = []
        is_cancelled = threading.Event()

        def begin() -> None:
            with self._turn(awake=True):
                begun.append(self._inputs.request(prompt, params, priority, streams=streams))
                self._submit(begun[0])
            if is_cancelled.is_set():
                self._abandon(*begun)

        try:
            await asyncio.to_thread(begin)
        except BaseException:  # cancelled, mostly
            is_cancelled.set()
            self._abandon(*begun)  # the thread may just have looked
            raise
        return begun[0]

    def _wait(self, request: Request) -> None:
        """Advance until there may be something for `request`."""
        while (news := self._advance(request)) is not None:
            if threading.get_ident() == self._sleeper:
                self._check_awake()  # it would wait for itself
            news.result()

    async def _wait_async(self, request: Request) -> None:
        while (news := await asyncio.to_thread(self._advance, request)) is not None:
            # Not in a thread: those that wait could take all that there are from `wake`. Others
            # wait for the same news when this task is cancelled.
            await asyncio.shield(asyncio.wrap_future(news))

    def _advance(self, request: Request) -> Future[None] | None:
        """Make a step, unless another thread's has brought something for `request` meanwhile.

        Asleep, it makes none; when what it returns is done, it is worth trying again.
        """
        self._let_others_in()
        with self._turn():
            if request.output is None and not request.chunks:
                if self._is_asleep:
                    return self._news
                self._step()
        return None

    def _let_others_in(self) -> None:
        if self._in_line:
            time.sleep(TURN_SECONDS)

    def _tell(self) -> None:
        """Let those go on that wait, though it is asleep, and see whether they can."""
        news, self._news = self._news, Future()
        news.set_result(None)

    def _step(self) -> None:
        with torch.no_grad(), torch.cuda.device_of(self._core.runner.last_tokens):
            # Others' steps may run on another stream, and still read what this one writes.
            self._pool.use_stream(self._core.runner.last_tokens.device)
            due = self._core.num_steps >= self._looked_at + LOOKED_AFTER
            if due or self._model.training:
                self._look_at_model()
            self._core.step()

    def _look_at_model(self) -> None:
        """See to its mode, and drop captured steps if it is not what it was.

        A step in flight is waited for then: it may compute what nobody wants, or read what was
        captured.
        """
        self._mode.begin()
        runner = self._core.runner
        if not self._live.by_id or runner.change() is not None:
            self._core.settle()
            runner.refresh()
        runner.look_for_hooks()
        self._looked_at = self._core.num_steps

    def _abort(self, request: Request) -> bool:
        """End a request; False if it has ended, or not begun."""
        if self._live.by_id.get(request.id) is not request:  # a later one may have its id
            return False
        for sequence in reversed(request.sequences):  # the one last that others wait for
            self._core.abort(sequence)
        return True

    def _abandon(self, *requests: Request) -> None:
        """Abort those that have not ended: at once, or after the call that another thread is in.

        It never waits, so event loops and the garbage collector may call it.
        """
        self._abandoned.extend(requests)
        # Who has the lock looks again after giving it back, so that nobody is forgotten.
        while self._abandoned and not self._pool.is_inside:
            with held_back():
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    self._owner = threading.get_ident()
                    self._abort_abandoned()
                finally:
                    try:
                        self._end_turn()
                    finally:
                        self._lock.release()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self._abort(self._abandoned[0])
            self._abandoned.popleft()

    @contextlib.contextmanager
    def _turn(self, *, awake: bool = False, even_closed: bool = False) -> Iterator[None]:
        """A call's turn: others wait for its end, and so does Ctrl-C.

        Raises PageForgeError where it can have none.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise PageForgeError(
                "engine: expected a call from outside, got one from a logits processor, a hook or "
                "the tokenizer in the middle of another; make it when that is over"
            )
        try:
            self._in_line.add(me)
            with self._lock, held_back():
                self._in_line.discard(me)
                self._owner = me
                try:
                    self._abort_abandoned()
                    if not even_closed:
                        self._check_open()
                    if awake:
                        self._check_awake()
                    yield
                finally:
                    self._end_turn()
        finally:
            self._in_line.discard(me)  # interrupted there, perhaps
            self._abandon()  # those that were left meanwhile

    def _end_turn(self) -> None:
        try:
            if not self._live.by_id:
                self._mode.end()
        finally:
            self._owner = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise PageForgeError(
                "engine: expected an open one, got one that was closed; make a new one"
            )

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise PageForgeError("engine: expected it awake, got it asleep; call wake() first")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(expected(name, "an int of at least 1", repr(value), "pass 1 or more"))
