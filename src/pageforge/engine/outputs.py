"""What the engine hands back: whole outputs, and the chunks of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]
"""A stop token or string; max_tokens or the model's limit; `abort`; an exception."""

LONGEST_SHOWN = 40
"""Characters of a text that a repr shows."""


class Logprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token; of equally likely ones the lowest id comes first."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs at one position."""

    chosen: Logprob
    """Of the token that stands there."""
    top: tuple[Logprob, ...] = ()
    """Of the likeliest tokens, best first: as many as were asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**_logprob_dict(self.chosen), "top": [_logprob_dict(entry) for entry in self.top]}


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a request took: seconds of the monotonic clock since its arrival."""

    total: float
    """To its end."""
    queued: float | None = None
    """To the first step that computed some of it; None if none did."""
    first_token: float | None = None
    """To the first new token; None if there is none."""
    num_tokens: int = 0
    """New tokens of the longest completion: completions of one request grow side by side."""

    @property
    def per_token(self) -> float | None:
        """Mean seconds between one new token and the next; None with fewer than two."""
        if self.first_token is None or self.num_tokens < 2:
            return None
        return (self.total - self.first_token) / (self.num_tokens - 1)

    def to_dict(self) -> dict[str, float | None]:
        """Plain data for JSON."""
        return {
            "queued": self.queued,
            "first_token": self.first_token,
            "per_token": self.per_token,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's `n` completions."""

    index: int
    """0 to n - 1."""
    token_ids: list[int]
    """The new tokens, without those that a stop string cut off."""
    text: str | None
    """Their text, cut before the stop string; None without a tokenizer."""
    finish_reason: FinishReason
    stop: int | str | None = None
    """What stopped it: a token id or a stop string; None if something else ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None if not asked for."""
    error: Exception | None = None
    """Why it failed, where `finish_reason` is "error"; what was made before stands above."""

    def __repr__(self) -> str:
        parts = [str(self.index), _count(self.token_ids, "token")]
        if self.text is not None:
            parts.append(_short(self.text))
        parts.append(self.finish_reason)
        if self.stop is not None:
            parts[-1] += f" at {self.stop!r}"
        if self.error is not None:
            parts[-1] += f": {self.error!r}"
        return f"Completion({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: an error as "Type: message"."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "logprobs": _logprobs_list(self.logprobs),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and what came of it.

    `token_ids`, `text`, `finish_reason` and `logprobs` are those of the first completion.
    """

    request_id: str
    prompt: str | None
    """None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    """One for each of `n`, in order; never empty."""
    timings: Timings
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, the first None (nothing stands before it); None if not asked.

    A request that was aborted or failed has those that came until then."""
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V were found in the prefix cache, so that none were computed."""

    @property
    def token_ids(self) -> list[int]:
        """The first completion's new tokens."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        """The first completion's text; None without a tokenizer."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first completion's logprobs; None if not asked for."""
        return self.outputs[0].logprobs

    @property
    def error(self) -> Exception | None:
        """The first error among the completions; None if none failed."""
        return next((each.error for each in self.outputs if each.error is not None), None)

    def __repr__(self) -> str:
        prompt = _count(self.prompt_token_ids, "prompt token")
        return f"RequestOutput({self.request_id!r}, {prompt}, {self.outputs!r})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a line of JSON; logprobs that are no finite number become None."""
        return {
            "id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [each.to_dict() for each in self.outputs],
            "prompt_logprobs": _logprobs_list(self.prompt_logprobs),
            "timings": self.timings.to_dict(),
            "num_cached_tokens": self.num_cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What is new of one completion; `finish_reason` is set in its last chunk only.

    The chunks' texts join to the completion's text. Text may come later than its tokens, for it is
    held back while it may still change or be cut; and of a stop string, tokens may be sent before
    it is seen to be one, so that the chunks' ids can be more than `Completion.token_ids`.
    """

    request_id: str
    index: int
    """Which of the request's `n` completions."""
    text: str | None
    """None without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None if not asked for."""

    def __repr__(self) -> str:
        parts = [repr(self.request_id), str(self.index), _count(self.token_ids, "token")]
        if self.text is not None:
            parts.append(_short(self.text))
        if self.finish_reason is not None:
            parts.append(self.finish_reason)
        return f"StreamChunk({', '.join(parts)})"


def _logprob_dict(entry: Logprob) -> dict[str, Any]:
    # A token that was ruled out has -inf, for which JSON has no number.
    logprob = entry.logprob if math.isfinite(entry.logprob) else None
    return {"token_id": entry.token_id, "logprob": logprob, "rank": entry.rank}


def _logprobs_list(
    logprobs: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    if logprobs is None:
        return None
    return [None if each is None else each.to_dict() for each in logprobs]


def _count(values: Sequence[object], noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _short(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}...")
