"""Workloads: requests whose lengths people benchmark with, made from seeds.

Lengths are those of the workload's name, the same in every repeat, so that repeats can be compared;
token ids are fresh in each, so that nothing of one repeat is of use to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class Size:
    """How large a workload is, and what fits. `shrink` divides counts and lengths, for a trial."""

    positions: int  # that the model has
    shrink: int = 1
    requests: int | None = None  # another number of them

    def count(self, requests: int) -> int:
        """`requests`, as far as it is not another number."""
        return self.requests or max(2, requests // self.shrink)

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
    return Lengths(own, np.clip(new, 1, most - own))


def shared_prefix(rng: Rng, size: Size) -> Lengths:
    """1,024 prompts with the same 2,048 tokens before 16 to 64 of their own, 16 new ones each.

    The prefix is shorter where the model's positions do not suffice.
    """
    most, new = size.tokens(64), size.tokens(16)
    own = rng.integers(size.tokens(16), most, size.count(1024), endpoint=True)
    longest = min(size.tokens(2048), size.positions - most - new)
    return Lengths(own, np.full_like(own, new), shared=longest // WHOLE_PAGES * WHOLE_PAGES)


def rollout(rng: Rng, size: Size) -> Lengths:
    """64 prompts like those of `uniform`, 8 completions of each: reinforcement learning."""
    lengths = _uniform(rng, size, 64)
    return Lengths(lengths.own, lengths.new, n=8)


WORKLOADS: Mapping[str, Callable[[Rng, Size], Lengths]] = {
    "uniform": uniform,
    "sharegpt": sharegpt,
    "shared-prefix": shared_prefix,
    "rollout": rollout,
}


def jobs(name: str, size: Size, *, vocab_size: int, repeat: int) -> list[Job]:
    """The requests of a workload; the same for the same arguments."""
    lengths = WORKLOADS[name](np.random.default_rng([*name.encode()]), size)
    rng = np.random.default_rng([*name.encode(), repeat])
    shared = rng.integers(vocab_size, size=lengths.shared).tolist()
    tokens = rng.integers(vocab_size, size=int(lengths.own.sum())).tolist()
    stops = list(accumulate(lengths.own.tolist()))
    return [
        Job(shared + tokens[stop - own : stop], new, lengths.n)
        for own, stop, new in zip(lengths.own.tolist(), stops, lengths.new.tolist(), strict=True)
    ]


def steady(count: int, new_tokens: int, size: Size, *, vocab_size: int) -> list[Job]:
    """`count` prompts of uniform length, all of which run for `new_tokens` steps."""
    rng = np.random.default_rng(count)
    longest = min(size.tokens(256), size.positions - new_tokens)
    own = rng.integers(size.tokens(16), longest, count, endpoint=True).tolist()
    return [Job(rng.integers(vocab_size, size=length).tolist(), new_tokens) for length in own]


def new_tokens(requests: list[Job]) -> int:
    """Of all completions together."""
    return sum(job.n * job.new_tokens for job in requests)


def _uniform(rng: Rng, size: Size, requests: int) -> Lengths:
    new = min(size.tokens(128), size.positions // 2)
    longest = min(size.tokens(256), size.positions - new)
    own = rng.integers(size.tokens(16), longest, size.count(requests), endpoint=True)
    return Lengths(own, np.full_like(own, new))


def _lognormal(rng: Rng, count: int, mean: float, sigma: float, most: int) -> npt.NDArray[np.int64]:
    """Of logarithms with this mean and deviation, what lies outside drawn again."""
    drawn = np.exp(rng.normal(mean, sigma, 16 * count))
    return drawn[(drawn >= LEAST) & (drawn <= most)][:count].astype(np.int64)
