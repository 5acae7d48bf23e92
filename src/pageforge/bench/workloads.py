"""Workloads: requests whose lengths people benchmark with, made from seeds.

Lengths are those of the workload's name, the same in every repeat, so that repeats can be compared;
token ids are fresh in each, so that nothing of one repeat is of use to the next.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from pageforge.engine.params import SamplingParams
from pageforge.geometry import ceil_div

WHOLE_PAGES = 64
"""A shared prefix is a multiple of this: pages of up to as many tokens share all of it."""

LEAST = 4
"""Tokens of the shortest ShareGPT prompt and answer, as vLLM filters them."""


@dataclass(frozen=True)
class Job:
    """A prompt, and `n` completions of just `new_tokens` tokens."""

    prompt: list[int]
    new_tokens: int
    n: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of a whole completion, its prompt's included."""
        return len(self.prompt) + self.new_tokens


@dataclass(frozen=True)
class Lengths:
    """What a workload is made of. `shared`: tokens that all prompts have before their own."""

    own: npt.NDArray[np.int64]  # [requests]
    new: npt.NDArray[np.int64]  # [requests]
    shared: int = 0
    n: int = 1
    divisor: int = 1
    """By which lengths were divided, for a trial or so that the model's positions hold them."""


@dataclass(frozen=True)
class Size:
    """How large a workload is, and what fits. `shrink` divides counts and lengths, for a trial.

    `most`: requests at most. `requests`: just as many, whatever the workload has.
    """

    positions: int  # that the model has
    shrink: int = 1
    most: int = sys.maxsize
    requests: int | None = None

    def count(self, requests: int) -> int:
        """How many of a workload's `requests` there are."""
        return self.requests or max(2, min(self.most, requests // self.shrink))

    def tokens(self, length: int) -> int:
        """A length in tokens."""
        return max(1, length // self.shrink)


Rng = np.random.Generator


def uniform(rng: Rng, size: Size) -> Lengths:
    """256 prompts of 16 to 256 tokens, 128 new ones each."""
    return _uniform(rng, size, 256)


def sharegpt(rng: Rng, size: Size) -> Lengths:
    """512 conversations like ShareGPT's, of 2,048 tokens at most and half of them the prompt.

    The lognormals have the means of vLLM's 1,000 prompts; see `workloads.md` in the research notes.
    """
    count = size.count(512)
    most = min(size.tokens(2048), size.positions)
    own = _lognormal(rng, count, 5.15, 1.4, 1024) // size.shrink
    new = _lognormal(rng, count, 4.8, 1.1, 1500) // size.shrink
    own = np.clip(own, 1, most // 2)
    return Lengths(own, np.clip(new, 1, most - own), divisor=size.shrink)


def shared_prefix(rng: Rng, size: Size) -> Lengths:
    """1,024 prompts with the same 2,048 tokens before 16 to 64 of their own, 16 new ones each.

    The prefix is shorter where the model's positions do not suffice.
    """
    most, new = size.tokens(64), size.tokens(16)
    own = rng.integers(size.tokens(16), most, size.count(1024), endpoint=True)
    longest = min(size.tokens(2048), size.positions - most - new)
    shared = longest // WHOLE_PAGES * WHOLE_PAGES
    return Lengths(own, np.full_like(own, new), shared, divisor=size.shrink)


def rollout(rng: Rng, size: Size) -> Lengths:
    """64 prompts like those of `uniform`, 8 completions of each: reinforcement learning."""
    lengths = _uniform(rng, size, 64)
    return replace(lengths, n=8)


@dataclass(frozen=True)
class Trace:
    """Lengths in tokens of requests that somebody served: their quantiles at `QUANTILES`."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    most: float = math.inf
    """Tokens that no request has more of, prompt and answer together."""


QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

FITTING = 0.99
"""Of a trace's requests, those that must fit the model's positions without being cut."""

TRACED = 1024
"""Requests that are drawn of a trace; where fewer are asked for, the first of them."""

TRACES = {
    # First prompts (5,678) and replies (30,731) of conversations with GPT-4, in Llama 2's tokens:
    # openchat_sharegpt4, as microsoft/sarathi-serve@72339db has it.
    "sharegpt-4": Trace(
        (1, 7, 11, 16, 23, 32, 45, 64, 95, 150, 262, 600, 1089, 2383, 7398),
        (2, 6, 44, 84, 181, 271, 346, 415, 493, 581, 683, 834, 920, 998, 1024),
        most=8192,
    ),
    # Azure/AzurePublicDataset, LLM inference 2023: 19,366 requests of a conversation service, and
    # 8,819 of one that completes code.
    "azure-chat": Trace(
        (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    ),
    "azure-code": Trace(
        (3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437),
        (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 1899),
    ),
    # arXiv papers and their summaries, 28,257 of 4,096 tokens at most, from microsoft/vidur.
    "arxiv": Trace(
        (1, 73, 749, 1242, 1802, 2150, 2453, 2730, 2996, 3249, 3490, 3702, 3813, 3933, 4054),
        (5, 36, 60, 78, 104, 125, 145, 167, 192, 222, 268, 372, 736, 3271, 4056),
        most=4096,
    ),
}
"""Quantiles were computed from the published files."""


def traced(rng: Rng, size: Size, trace: Trace) -> Lengths:
    """1,024 requests of a trace's lengths, prompts and answers drawn apart.

    Lengths are divided by the smallest whole number with which `FITTING` of the requests fit the
    model; of the others prompt and answer are cut.
    """
    own, new = _quantiles(rng, trace.prompt), _quantiles(rng, trace.answer)
    new = np.clip(new, 1, trace.most - own).astype(np.int64)
    longest = int(np.quantile(own + new, FITTING))
    divisor = max(size.shrink, ceil_div(longest, size.positions))
    own = np.clip(own // divisor, 1, size.positions - 1)
    new = np.clip(new // divisor, 1, size.positions - own)
    count = size.count(TRACED)
    return Lengths(np.resize(own, count), np.resize(new, count), divisor=divisor)


WORKLOADS: Mapping[str, Callable[[Rng, Size], Lengths]] = {
    "uniform": uniform,
    "sharegpt": sharegpt,
    "shared-prefix": shared_prefix,
    "rollout": rollout,
    **{name: partial(traced, trace=trace) for name, trace in TRACES.items()},
}


def lengths(name: str, size: Size) -> Lengths:
    """What the requests of a workload are like; the same for the same arguments."""
    return WORKLOADS[name](np.random.default_rng([*name.encode()]), size)


def jobs(name: str, size: Size, *, vocab_size: int, repeat: int) -> list[Job]:
    """The requests of a workload; the same for the same arguments."""
    found = lengths(name, size)
    rng = np.random.default_rng([*name.encode(), repeat])
    shared = rng.integers(vocab_size, size=found.shared).tolist()
    tokens = rng.integers(vocab_size, size=int(found.own.sum())).tolist()
    stops = list(accumulate(found.own.tolist()))
    return [
        Job(shared + tokens[stop - own : stop], new, found.n)
        for own, stop, new in zip(found.own.tolist(), stops, found.new.tolist(), strict=True)
    ]


def steady(count: int, new_tokens: int, size: Size, *, vocab_size: int) -> list[Job]:
    """`count` prompts of uniform length, all of which run for `new_tokens` steps."""
    rng = np.random.default_rng(count)
    longest = min(size.tokens(256), size.positions - new_tokens)
    own = rng.integers(size.tokens(16), longest, count, endpoint=True).tolist()
    return [Job(rng.integers(vocab_size, size=length).tolist(), new_tokens) for length in own]


def params_of(job: Job, temperature: float = 0) -> SamplingParams:
    """Just as many tokens as it wants, whatever they are."""
    return SamplingParams(
        max_tokens=job.new_tokens, n=job.n, temperature=temperature, ignore_eos=True
    )


def new_tokens(requests: list[Job]) -> int:
    """Of all completions together."""
    return sum(job.n * job.new_tokens for job in requests)


def _uniform(rng: Rng, size: Size, requests: int) -> Lengths:
    new = min(size.tokens(128), size.positions // 2)
    longest = min(size.tokens(256), size.positions - new)
    own = rng.integers(size.tokens(16), longest, size.count(requests), endpoint=True)
    return Lengths(own, np.full_like(own, new), divisor=size.shrink)


def _lognormal(rng: Rng, count: int, mean: float, sigma: float, most: int) -> npt.NDArray[np.int64]:
    """Of logarithms with this mean and deviation, what lies outside drawn again."""
    drawn = np.exp(rng.normal(mean, sigma, 16 * count))
    return drawn[(drawn >= LEAST) & (drawn <= most)][:count].astype(np.int64)


def _quantiles(rng: Rng, quantiles: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """All of a distribution with these `QUANTILES`, shuffled; logarithms are interpolated."""
    shares = (rng.permutation(TRACED) + 0.5) / TRACED
    drawn = np.interp(shares, QUANTILES, np.log(quantiles))
    return np.exp(drawn).round().astype(np.int64)
