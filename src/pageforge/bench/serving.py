"""The ways to serve a workload that are compared: each a context that yields a `Server`.

All decode greedily for just as many tokens as each request wants, and turn these into text. Each
has a twin of the model, so that none sees what another does to it. Requests are there all at once
(`answer`), or come one after the other (`serve`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.generation.streamers import BaseStreamer

from pageforge.bench.engine_probe import token_times
from pageforge.bench.models import twin
from pageforge.bench.online import Arrivals, Served
from pageforge.bench.workloads import Job, params_of
from pageforge.engine.engine import Engine
from pageforge.geometry import pages_for

PADDED = 64
"""Sequences of a batch that `generate` is given."""

CPU_BATCH_TOKENS = 512
"""Tokens a step of `generate_batch` on the CPU, where it would fill the memory by default."""

ANSWER_SECONDS = 1
STOP_SECONDS = 5

NO_EOS = -1

Answer = Callable[[list[Job]], list[list[int]]]
Serve = Callable[[list[Job], Sequence[float]], list[Served]]


@dataclass(frozen=True)
class Server:
    """`answer(jobs)`: the new tokens of every completion, in order. `engine`: if it is ours.

    `serve(jobs, times)`: what became of requests that come at `times`, in order.
    """

    answer: Answer
    serve: Serve
    engine: Engine | None = None

    def __call__(self, jobs: list[Job]) -> list[list[int]]:
        """Answer, and see that each completion has as many tokens as it should."""
        completions = self.answer(jobs)
        got = list(map(len, completions))
        wanted = list(itertools.chain.from_iterable([job.new_tokens] * job.n for job in jobs))
        if got != wanted:
            raise ArithmeticError(
                f"expected {sum(wanted)} new tokens, each its own; got {sum(got)}"
            )
        return completions

    def serve_all(self, jobs: list[Job], times: Sequence[float]) -> list[Served]:
        """Serve, and see that each request has as many tokens as it should, and in order."""
        served = self.serve(jobs, times)
        got = [len(each.tokens) for each in served]
        if got != [job.new_tokens for job in jobs]:
            wanted = sum(job.new_tokens for job in jobs)
            raise ArithmeticError(f"expected {wanted} new tokens, each its own; got {sum(got)}")
        for each in served:
            moments = [each.arrived, each.started, *each.tokens]
            if moments != sorted(moments):
                raise ArithmeticError("expected a request's tokens after its arrival and in order")
        return served


@dataclass(frozen=True)
class Setting:
    """What every way is given. `jobs`: such as it will have to serve."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    jobs: list[Job]


Open = Callable[[Setting], "contextlib.AbstractContextManager[Server]"]


@dataclass(frozen=True)
class Way:
    """`repeats`: timed runs at most, beside the first. `apart`: it fills the device's memory."""

    open: Open
    repeats: int
    apart: bool = False


@contextlib.contextmanager
def engine(setting: Setting, *, temperature: float = 0, **options: Any) -> Iterator[Server]:
    """pageforge.Engine with its own defaults, prefix cache off; `options` go over these."""
    model, tokenizer = twin(setting.model), setting.tokenizer
    with Engine(model, tokenizer, **{"prefix_cache": False, "seed": 0} | options) as opened:
        yield Server(
            partial(_engine_answer, opened, temperature), partial(_engine_serve, opened), opened
        )


def _engine_answer(opened: Engine, temperature: float, jobs: list[Job]) -> list[list[int]]:
    outputs = opened.generate(
        [job.prompt for job in jobs], [params_of(job, temperature) for job in jobs]
    )
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [completion.token_ids for output in outputs for completion in output.outputs]


def _engine_serve(opened: Engine, jobs: list[Job], times: Sequence[float]) -> list[Served]:
    """Requests are added between steps."""
    arrivals = Arrivals(jobs, times)
    submitted: dict[str, float] = {}
    started: dict[str, float] = {}
    with token_times(opened) as came:
        while arrivals or opened.has_unfinished:
            for index, job in arrivals.due():
                submitted[str(index)] = arrivals.now()
                opened.add_request(job.prompt, params_of(job), request_id=str(index))
            if not opened.has_unfinished:
                arrivals.wait()
                continue
            for output in opened.step():
                if output.error is not None:
                    raise output.error
                name = output.request_id
                started[name] = submitted[name] + (output.timings.queued or 0)
            came.note(arrivals.now())
    tokens = came.by_request()
    return [
        Served(times[at], started[str(at)], tokens[str(at)][: job.new_tokens])
        for at, job in enumerate(jobs)
    ]


@contextlib.contextmanager
def generate(setting: Setting, batch: int) -> Iterator[Server]:
    """`model.generate` with a DynamicCache and SDPA, left-padded batches as the requests come.

    A batch runs until its longest answer is done.
    """
    model, tokenizer = twin(setting.model), setting.tokenizer
    yield Server(
        partial(_generate_answer, model, tokenizer, batch),
        partial(_generate_serve, model, tokenizer, batch),
    )


def _generate_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, jobs: list[Job]
) -> list[list[int]]:
    completions: list[list[int]] = []
    for first in range(0, len(jobs), batch):
        completions += _generate_batch(model, tokenizer, jobs[first : first + batch])
    return completions


def _generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[Job],
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    tokens, mask = padded([job.prompt for job in jobs], model.device)
    out: Any = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=max(job.new_tokens for job in jobs),
        do_sample=False,
        streamer=streamer,
    )
    rows = out[:, tokens.shape[1] :].tolist()
    new = [row[: job.new_tokens] for row, job in zip(rows, jobs, strict=True)]
    tokenizer.batch_decode(new, skip_special_tokens=True)
    return new


def _generate_serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: int,
    jobs: list[Job],
    times: Sequence[float],
) -> list[Served]:
    """Whoever waits when a batch is done makes up the next one. Tokens count as they come."""
    arrivals = Arrivals(jobs, times)
    waiting: deque[tuple[int, Job]] = deque()
    served: dict[int, Served] = {}
    while arrivals or waiting:
        waiting += arrivals.due()
        if not waiting:
            arrivals.wait()
            continue
        some = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
        streamer, started = _Streamer(arrivals), arrivals.now()
        _generate_batch(model, tokenizer, [job for _, job in some], streamer)
        for at, job in some:
            served[at] = Served(times[at], started, streamer.times[: job.new_tokens])
    return [served[at] for at in range(len(jobs))]


class _Streamer(BaseStreamer):
    """What `generate` tells of each token of its rows: notes when."""

    def __init__(self, arrivals: Arrivals):
        self.times: list[float] = []
        self._arrivals = arrivals
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """The prompts first, then a token of each row."""
        if self._has_prompt:
            self.times.append(self._arrivals.now())
        self._has_prompt = True

    def end(self) -> None:
        """All have come."""


def padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, attention mask) `[B, longest]` int64, prompts to the right."""
    longest = max(map(len, prompts))
    tokens = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def generate_batch(setting: Setting) -> Iterator[Server]:
    """Transformers' continuous batching, block sharing off; its manager lives over all runs."""
    model, jobs = twin(setting.model), setting.jobs
    config = ContinuousBatchingConfig(allow_block_sharing=False)
    if model.device.type == "cpu":
        config.max_batch_tokens = CPU_BATCH_TOKENS
        size = getattr(config, "page_size", None) or config.block_size  # as 5.17 calls it
        config.num_blocks = sum(pages_for(job.num_tokens, size) for job in jobs)
    longest = max(job.new_tokens for job in jobs)
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=NO_EOS, pad_token_id=0
        ),
        continuous_batching_config=config,
        timeout=STOP_SECONDS,
        workload_hints=WorkloadHints(
            max_prompt_length=max(len(job.prompt) for job in jobs),
            max_generated_length=longest,
            num_requests=len(jobs),
        ),
    ) as manager:
        yield Server(
            partial(_batch_answer, manager, setting.tokenizer),
            partial(_batch_serve, manager, setting.tokenizer),
        )


def _batch_answer(
    manager: Any, tokenizer: PreTrainedTokenizerBase, jobs: list[Job]
) -> list[list[int]]:
    names = [manager.add_request(job.prompt, max_new_tokens=job.new_tokens) for job in jobs]
    found: dict[str, list[int]] = {}
    while len(found) < len(jobs):
        result = _batch_result(manager, tokenizer, ANSWER_SECONDS)
        if result is not None:
            found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


def _batch_serve(
    manager: Any, tokenizer: PreTrainedTokenizerBase, jobs: list[Job], times: Sequence[float]
) -> list[Served]:
    """Its own thread generates, and notes when each token was there."""
    arrivals = Arrivals(jobs, times)
    numbers: dict[str, int] = {}
    served: dict[int, Served] = {}
    while len(served) < len(jobs):
        for at, job in arrivals.due():
            name = manager.add_request(
                job.prompt, max_new_tokens=job.new_tokens, record_timestamps=True
            )
            numbers[name] = at
        result = _batch_result(manager, tokenizer, min(ANSWER_SECONDS, arrivals.seconds_left))
        if result is not None:
            at = numbers[result.request_id]
            begun, *moments = (
                moment - arrivals.began for moment in (result.lifespan[0], *result.timestamps)
            )
            served[at] = Served(times[at], begun, moments)
    return [served[at] for at in range(len(jobs))]


def _batch_result(manager: Any, tokenizer: PreTrainedTokenizerBase, seconds: float) -> Any:
    """The next finished answer; None if there is none for so long."""
    result = manager.get_result(timeout=seconds)
    if result is None:
        if not manager.is_running():
            raise RuntimeError("its thread has ended early")
        return None
    if result.error is not None:
        raise RuntimeError(result.error)
    if not result.is_finished():
        return None
    tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
    return result


WAYS: Mapping[str, Way] = {
    "engine": Way(engine, repeats=5),
    "engine compiled": Way(partial(engine, compile=True), repeats=5),
    "generate": Way(partial(generate, batch=PADDED), repeats=2),
    "generate_batch": Way(generate_batch, repeats=1, apart=True),
    "one by one": Way(partial(generate, batch=1), repeats=1),
}
"""What each is called in tables, in their order."""

ENGINES = ("engine", "engine compiled")

BASE = "generate"
"""What everything is held against."""
