"""The ways to serve a workload that are compared: each a context that yields a `Server`.

All decode greedily for just as many tokens as each request wants, and turn these into text. Each
has a twin of the model, so that none sees what another does to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
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

from pageforge.bench.models import twin
from pageforge.bench.workloads import Job
from pageforge.engine.engine import Engine
from pageforge.engine.params import SamplingParams
from pageforge.geometry import pages_for

PADDED = 64
"""Sequences of a batch that `generate` is given."""

CPU_BATCH_TOKENS = 512
"""Tokens a step of `generate_batch` on the CPU, where it would fill the memory by default."""

ANSWER_SECONDS = 1
STOP_SECONDS = 5

NO_EOS = -1

Answer = Callable[[list[Job]], list[list[int]]]


@dataclass(frozen=True)
class Server:
    """`answer(jobs)`: the new tokens of every completion, in order. `engine`: if it is ours."""

    answer: Answer
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
        yield Server(partial(_engine_answer, opened, temperature), opened)


def _engine_answer(opened: Engine, temperature: float, jobs: list[Job]) -> list[list[int]]:
    outputs = opened.generate(
        [job.prompt for job in jobs], [params_of(job, temperature) for job in jobs]
    )
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [completion.token_ids for output in outputs for completion in output.outputs]


def params_of(job: Job, temperature: float = 0) -> SamplingParams:
    """Just as many tokens as it wants, whatever they are."""
    return SamplingParams(
        max_tokens=job.new_tokens, n=job.n, temperature=temperature, ignore_eos=True
    )


@contextlib.contextmanager
def generate(setting: Setting, batch: int) -> Iterator[Server]:
    """`model.generate` with a DynamicCache and SDPA, left-padded batches as the requests come.

    A batch runs until its longest answer is done.
    """
    yield Server(partial(_generate_answer, twin(setting.model), setting.tokenizer, batch))


def _generate_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, jobs: list[Job]
) -> list[list[int]]:
    completions: list[list[int]] = []
    for first in range(0, len(jobs), batch):
        some = jobs[first : first + batch]
        tokens, mask = padded([job.prompt for job in some], model.device)
        out: Any = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=max(job.new_tokens for job in some),
            do_sample=False,
        )
        rows = out[:, tokens.shape[1] :].tolist()
        new = [row[: job.new_tokens] for row, job in zip(rows, some, strict=True)]
        tokenizer.batch_decode(new, skip_special_tokens=True)
        completions += new
    return completions


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
        yield Server(partial(_batch_answer, manager, setting.tokenizer))


def _batch_answer(
    manager: Any, tokenizer: PreTrainedTokenizerBase, jobs: list[Job]
) -> list[list[int]]:
    names = [manager.add_request(job.prompt, max_new_tokens=job.new_tokens) for job in jobs]
    found: dict[str, list[int]] = {}
    while len(found) < len(jobs):
        result = manager.get_result(timeout=ANSWER_SECONDS)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread has ended early")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            found[result.request_id] = result.generated_tokens
            tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
    return [found[name] for name in names]


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
