"""Engine: many requests on one model and one pool, batched continuously."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import operator
import reprlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from pageforge.engine.core import Core, Flight
from pageforge.engine.draw import completion_seed
from pageforge.engine.logprobs import Logprobs
from pageforge.engine.outputs import FinishReason, RequestOutput, StreamChunk
from pageforge.engine.params import SamplingParams
from pageforge.engine.request import Request, token_logprobs_of
from pageforge.engine.runner import Runner, check_model, longest_sequence
from pageforge.engine.sampler import Sampler
from pageforge.engine.scheduler import Limits, least_pages
from pageforge.engine.sequence import Sequence
from pageforge.engine.text import Detokenizer
from pageforge.errors import OutOfPages, PageForgeError, RequestError, expected
from pageforge.hf.switch import pageforge_attention_on
from pageforge.pool import PagePool, PoolStats
from pageforge.store import free_bytes, parse_memory

logger = logging.get_logger(__name__)

MAX_RUNNING = 256

BATCH_TOKENS = {"cuda": 8192, "cpu": 512}
"""Tokens a step by default: enough that weights are read for many, few enough to decode beside."""

HOST = torch.device("cpu")

SERVED = "_is_served_by_pageforge"
"""An attribute of a model while an engine has it."""

PRIORITY = 1 << 40
"""Ranks that one priority has: as many requests as ever come."""

MOST_PRIORITY = (1 << 22) - 1
"""The largest, either way: ranks are int64."""

Prompt = str | SequenceOf[int]


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Counts are from its making on; times are in `RequestOutput`."""

    num_running: int
    num_waiting: int
    num_finished: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    """Prompt tokens that prefix hits and forks saved."""
    num_preemptions: int
    num_swaps: int
    """Of the preemptions, those whose pages went to the host."""
    swapped_bytes: int
    num_graphs: int
    num_replays: int
    capture_seconds: float
    """Spent on capturing graphs, and on compiling steps."""
    eager_steps: dict[str, int]
    """Steps that could not be replayed, by reason."""
    pool: PoolStats


class Engine:
    """Serves many requests on the model that you have, hooks and adapters included.

        with Engine(model, tokenizer) as engine:
            for output in engine.generate(["The state of", "Once"], SamplingParams(max_tokens=50)):
                print(output.text)

    While it is open the model attends by pageforge attention, in evaluation mode; `close` leaves it
    as it was and gives all memory back. Calls are safe from several threads; each waits for its
    turn. The model must not be used or changed meanwhile, but between calls it may; after a change
    of its weights call `weights_changed`.
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
        does not fit is computed again. `compile`: run steps through torch.compile. `allow_hooks`:
        capture graphs though modules have Python hooks, which then run only while capturing.
        `seed`: for requests without one.

        Raises UnsupportedModel, GeometryError, RequestError, OutOfPages; the model is as before
        then.
        """
        check_model(model)
        for name, value in (("max_running", max_running), ("max_batch_tokens", max_batch_tokens)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_count and not (name == "max_batch_tokens" and value is None):
                raise RequestError(expected(name, "an int of at least 1", value, "raise it"))
        if seed is not None and not (isinstance(seed, int) and seed >= 0):
            fix = "None lets the engine choose"
            raise RequestError(expected("seed", "an int from 0", repr(seed), fix))
        swap_bytes = 0
        if swap_memory:
            swap_bytes = parse_memory(swap_memory, free_bytes(HOST), name="swap_memory")
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = _eos_ids(model, tokenizer)
        self._seeds = np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._restore = contextlib.ExitStack()
        device = model.device.type
        tokens = max_batch_tokens or BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
        with contextlib.ExitStack() as undo:
            undo.enter_context(_served(model))
            self._pool = undo.enter_context(
                PagePool.for_model(model, page_size, max_pages, max_memory)
            )
            self._most_pages = self._pool.num_available
            self._max_tokens = longest_sequence(model)
            self._vocab_size = int(model.config.get_text_config().vocab_size)
            runner = Runner(
                model,
                self._pool,
                max_running=max_running,
                max_batch_tokens=tokens,
                max_tokens=min(self._max_tokens, self._most_pages * page_size),
                compile=compile,
                allow_hooks=allow_hooks,
            )
            undo.callback(runner.forget_graphs)
            with torch.no_grad():
                runner.try_model()
            self._sampler = Sampler(max_running, runner.vocab_size, model.device)
            self._core = Core(
                runner,
                self._pool,
                self._sampler,
                Limits(max_running, tokens, page_size),
                self,
                swap_bytes=swap_bytes,
            )
            self._restore = undo.pop_all()
        self._prefix_cache = prefix_cache
        self._counter = itertools.count()
        self._requests: dict[str, Request] = {}
        self._finished: list[RequestOutput] = []
        self._num_finished = 0
        self._num_cached = 0
        self._is_asleep = False
        self._is_stepping = False
        self._is_closed = False

    # --- whole answers ----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, texts or lists of token ids; results in their order.

        `params`: for all, or one each. A request that fails on the way has `error` set, and the
        others go on; one that cannot be right (see `add_request`) raises before any begins.
        `progress`: show a bar on stderr. A single prompt gives a list of one.
        """
        listed = _listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
            if len(each) != len(listed):
                raise RequestError(
                    expected("params", f"one, or {len(listed)} of them", len(each), "one a prompt")
                )
        with self._lock:
            self._check_awake()
            requests = [
                self._new_request(prompt, of_prompt, None, streams=False)
                for prompt, of_prompt in zip(listed, each, strict=True)
            ]
            for request in requests:
                self._submit(request, 0)
        try:
            console = Console(stderr=True)
            with Progress(console=console, disable=not progress, transient=True) as bar:
                task = bar.add_task("requests", total=len(requests))
                for request in requests:
                    while request.output is None:
                        self._advance(request)
                    bar.advance(task)
            return [request.output for request in requests if request.output is not None]
        finally:
            self._forget(*requests)

    # --- as they come -----------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[StreamChunk]:
        """Chunks of one answer as they come. Leaving the iterator aborts the request.

        Raises, after the last chunk, what made the request fail.
        Other requests advance as well, whoever's turn it is.
        """
        request = self._begin_stream(prompt, params, priority)
        return self._chunks(request)

    async def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for asyncio: steps run in threads, one at a time."""
        request = self._begin_stream(prompt, params, priority)
        try:
            while request.output is None or request.chunks:
                if not request.chunks:
                    await asyncio.to_thread(self._advance, request)
                while request.chunks:
                    yield request.chunks.popleft()
            if request.output.error is not None:
                raise request.output.error
        finally:
            self._forget(request)

    async def generate_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """One answer, for asyncio. Cancelling it aborts the request."""
        with self._lock:
            self._check_awake()
            request = self._new_request(prompt, params or SamplingParams(), None, streams=False)
            self._submit(request, priority)
        try:
            while request.output is None:
                await asyncio.to_thread(self._advance, request)
            return request.output
        finally:
            self._forget(request)

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
        with self._lock:
            self._check_open()
            request = self._new_request(
                prompt, params or SamplingParams(), request_id, streams=False
            )
            self._submit(request, priority)
            return request.id

    def step(self) -> list[RequestOutput]:
        """Run one step for all, and return the requests that have ended."""
        with self._lock:
            self._check_awake()
            self._step()
            finished, self._finished = self._finished, []
            return finished

    def abort(self, request_id: str) -> bool:
        """End a request; its pages are free at once. Whether there was one of this id."""
        with self._lock:
            if not self._is_closed:
                self._check_open()
            request = self._requests.get(request_id)
            if request is None:
                return False
            for sequence in request.sequences:
                self._core.finish(sequence, "abort")
            return True

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    # --- between calls ----------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts and pages now."""
        with self._lock:
            self._check_open()
            core, runner = self._core, self._core.runner
            return EngineStats(
                num_running=core.rows.num_running,
                num_waiting=len(core.waiting),
                num_finished=self._num_finished,
                num_steps=core.num_steps,
                num_computed_tokens=core.num_computed,
                num_cached_tokens=self._num_cached,
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
        with self._lock:
            self._check_open()
            self._pool.drop_prefix_cache()

    def trim(self) -> None:
        """Give back memory that no page needs."""
        with self._lock:
            self._check_open()
            self._pool.trim()

    def sleep(self) -> None:
        """Give all K/V memory back; requests that run wait, and are computed again after `wake`.

        Between rollouts, say, so that training has the memory. Swapped pages stay on the host.
        """
        with self._lock:
            self._check_open()
            self._core.give_up_pages()
            self._pool.drop_prefix_cache()
            self._pool.trim()
            self._is_asleep = True

    def wake(self) -> None:
        """Go on after `sleep`."""
        with self._lock:
            self._check_open()
            self._is_asleep = False

    def weights_changed(self) -> None:
        """The model's weights are others: what was computed with the old ones must not be used.

        Drops the prefix cache and captured graphs; running requests are computed anew from their
        tokens so far.
        """
        with self._lock:
            self._check_open()
            self._core.give_up_pages(swap=False)
            self._pool.drop_prefix_cache()
            self._core.runner.forget_graphs()

    def close(self) -> None:
        """Abort all requests, leave the model as it was and give all memory back."""
        with self._lock:
            if self._is_closed:
                return
            self._check_open()
            self._is_closed = True
            try:
                for request_id in list(self._requests):
                    self.abort(request_id)
                self._core.settle()
            finally:
                self._restore.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- the core's listener ----------------------------------------------------------------

    def on_scheduled(self, sequence: Sequence) -> None:
        """The core begins with it."""
        sequence.owner.on_scheduled()

    def on_first_token(self, sequence: Sequence) -> None:
        """The first token of one of its completions has come."""
        sequence.owner.on_first_token()

    def on_token(self, sequence: Sequence, token: int, flight: Flight, place: int) -> None:
        """A token of a request that is watched."""
        request: Request = sequence.owner
        logprobs = None
        if request.params.logprobs is not None:
            assert flight.logprobs is not None and flight.logprob_places is not None
            index = int(np.searchsorted(flight.logprob_places, place))
            logprobs = token_logprobs_of(flight.logprobs, index, token, request.params.logprobs)
        try:
            stop = request.take(sequence, token, logprobs)
        except Exception as error:  # a tokenizer that cannot decode fails its request alone
            self._core.finish(sequence, "error", error)
            return
        if stop is not None:
            self._core.finish(sequence, "stop", stop)

    def on_prompt_logprobs(self, sequence: Sequence, first: int, logprobs: Logprobs) -> None:
        """Of a part of the prompt."""
        request: Request = sequence.owner
        if sequence is not request.sequences[0]:
            return  # all completions have the same prompt
        tokens, k = request.prompt_ids[first : first + len(logprobs.chosen)], request.prompt_k
        request.take_prompt_logprobs(
            first,
            [token_logprobs_of(logprobs, place, token, k) for place, token in enumerate(tokens)],
        )

    def on_finish(self, sequence: Sequence, reason: FinishReason, cause: Any) -> None:
        """A completion has ended."""
        request: Request = sequence.owner
        self._num_cached += sequence.num_cached
        if request.end(sequence, reason, cause):
            del self._requests[request.id]
            assert request.output is not None
            self._finished.append(request.output)
            self._num_finished += 1

    # --- inside -----------------------------------------------------------------------------

    def _new_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, *, streams: bool
    ) -> Request:
        """A request that can be right, not submitted yet. Raises RequestError, OutOfPages."""
        self._check_open()
        if not isinstance(params, SamplingParams):
            fix = "pass SamplingParams(max_tokens=...)"
            raise RequestError(expected("params", "SamplingParams", reprlib.repr(params), fix))
        if not (request_id is None or isinstance(request_id, str)):
            raise RequestError(expected("request_id", "text", repr(request_id), "pass a str"))
        text, ids = self._tokenized(prompt)
        if params.stop and self._tokenizer is None:
            raise RequestError(
                expected("stop", "no strings without a tokenizer", params.stop, "pass a tokenizer")
            )
        self._sampler.check(params)
        if len(ids) > self._max_tokens:
            want = f"at most {self._max_tokens} tokens, as many as the model has positions"
            raise RequestError(expected("prompt", want, len(ids), "cut it"))
        # The last token's own K/V are not needed, so it may be one more than there are positions.
        most = self._max_tokens + 1 - len(ids)
        if params.max_tokens > most:
            params = dataclasses.replace(
                params, max_tokens=most, min_tokens=min(params.min_tokens, most)
            )
        size = self._pool.geometry.page_size
        needed = least_pages(len(ids), params.max_tokens, size)
        if needed > self._most_pages:
            raise OutOfPages(
                needed, self._most_pages, "lower max_tokens, or make the pool larger (max_memory)"
            )
        request_id = self._new_id() if request_id is None else request_id
        if request_id in self._requests:
            raise RequestError(
                expected("request_id", "one that is not in use", request_id, "choose another")
            )
        decode = None if self._tokenizer is None else self._decode
        make = None if self._tokenizer is None else (lambda: self._new_detokenizer(params))
        return Request(request_id, text, ids, params, make, decode, streams=streams)

    def _new_id(self) -> str:
        return next(name for i in self._counter if (name := str(i)) not in self._requests)

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    expected("prompt", "token ids without a tokenizer", "text", "pass a tokenizer")
                )
            text, ids = prompt, list(self._tokenizer(prompt)["input_ids"])
        else:
            text, ids = None, _token_ids(prompt)
        if not ids:
            raise RequestError(
                expected("prompt", "at least one token", "none", "begin with the BOS token, say")
            )
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise RequestError(
                expected(
                    "prompt",
                    f"token ids from 0 to {self._vocab_size - 1}",
                    f"{min(ids)} to {max(ids)}",
                    "use the model's own tokenizer",
                )
            )
        return text, ids

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        assert self._tokenizer is not None
        return Detokenizer(self._tokenizer, stop=tuple(params.stop))

    def _submit(self, request: Request, priority: int) -> None:
        is_int = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_int or abs(priority) > MOST_PRIORITY:
            want = f"an int from {-MOST_PRIORITY} to {MOST_PRIORITY}"
            raise RequestError(expected("priority", want, repr(priority), "0 is usual"))
        params = request.params
        if not self._requests:  # a step may be in flight still that computes what nobody wants
            self._core.settle()
            self._core.runner.refresh()
        stop_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys([*self._eos_ids, *stop_ids]))
        seed = params.seed
        if seed is None and not params.is_greedy:
            seed = int(self._seeds.integers(1 << 63))
        prompt = np.array(request.prompt_ids, np.int32)
        sequences = [
            Sequence(
                prompt,
                params,
                priority * PRIORITY + next(self._counter),
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
        for sequence in sequences:
            request.add(sequence)
        self._requests[request.id] = request
        for sequence in sequences:
            self._core.add(sequence)

    def _begin_stream(
        self, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> Request:
        with self._lock:
            self._check_awake()
            request = self._new_request(prompt, params or SamplingParams(), None, streams=True)
            self._submit(request, priority)
            return request

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        try:
            while request.output is None or request.chunks:
                if not request.chunks:
                    self._advance(request)
                while request.chunks:
                    yield request.chunks.popleft()
            if request.output.error is not None:
                raise request.output.error
        finally:
            self._forget(request)

    def _advance(self, request: Request) -> None:
        """Make a step, unless another thread's has brought something for `request` meanwhile."""
        with self._lock:
            if request.output is None and not request.chunks:
                self._check_awake()
                self._step()

    def _step(self) -> None:
        with torch.no_grad(), torch.cuda.device_of(self._core.runner.last_tokens):
            # Others' steps may run on another stream, and still read what this one writes.
            self._pool.use_stream(self._core.runner.last_tokens.device)
            self._is_stepping = True
            try:
                self._core.step()
            finally:
                self._is_stepping = False

    def _forget(self, *requests: Request) -> None:
        """Abort those that have not ended, and let no `step` return them."""
        with self._lock:
            for request in requests:
                if self._requests.get(request.id) is request:  # and not a later one of this id
                    self.abort(request.id)
            own = {id(request.output) for request in requests}
            self._finished = [each for each in self._finished if id(each) not in own]

    def _check_open(self) -> None:
        if self._is_stepping:  # the lock lets this thread in
            raise PageForgeError(
                "engine: expected a call from outside of a step, got one from a logits processor, "
                "a hook or the tokenizer; make it when the step is over"
            )
        if self._is_closed:
            raise PageForgeError(
                "engine: expected an open one, got one that was closed; make a new one"
            )

    def _check_awake(self) -> None:
        self._check_open()
        if self._is_asleep:
            raise PageForgeError("engine: expected it awake, got it asleep; call wake() first")


@contextlib.contextmanager
def _served(model: PreTrainedModel) -> Iterator[None]:
    """The model under pageforge attention and in evaluation mode; afterwards as it was.

    It is marked meanwhile: of two engines on it, the first to close would leave the other without.
    """
    if SERVED in vars(model):
        raise RequestError(
            expected("model", "one that no engine serves", "one in use", "close that engine first")
        )
    training = [module for module in model.modules() if module.training]
    with pageforge_attention_on(model):
        setattr(model, SERVED, True)
        try:
            model.eval()
            yield
        finally:
            delattr(model, SERVED)
            for module in training:
                module.training = True


def _listed(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # a mapping is no prompt either: `_token_ids` says so
    several = [each for each in prompts if not isinstance(each, int)]
    return several if len(several) == len(prompts) else [[*prompts]]


def _token_ids(prompt: SequenceOf[int]) -> list[int]:
    try:
        # A tokenizer's BatchEncoding and a chat's message are mappings: their names are no tokens.
        if not isinstance(prompt, Mapping):
            return [operator.index(token) for token in prompt]
    except TypeError:  # no sequence, or not of ints
        pass
    raise RequestError(
        expected(
            "prompt",
            "text or a list of token ids",
            reprlib.repr(prompt),
            "pass a tokenizer's input_ids; make text of messages by its chat template",
        )
    )


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The tokens that end a text, as `generate` has them, or else the tokenizer."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
