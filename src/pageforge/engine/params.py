"""SamplingParams: what one request asks of the sampler, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pageforge.errors import ParamsError, expected, listed

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0: tokens 0.001 apart in logits would be e^100 in share."""

INT64_MAX = 2**63 - 1
"""The sampler's and scheduler's rows are int64."""

UINT64_MAX = 2**64 - 1

LogitsProcessor = Callable[[list[int], Any], Any]
"""`(tokens generated so far, logits [V] float32) -> logits [V]`; it may change them in place."""

_INTS: Mapping[str, tuple[int, int, str]] = {
    "max_tokens": (0, INT64_MAX, "0 scores the prompt only"),
    "min_tokens": (0, INT64_MAX, "0 turns it off"),
    "top_k": (0, INT64_MAX, "0 turns it off"),
    "n": (1, INT64_MAX, "ask for one completion or more"),
}
_OPTIONAL_INTS: Mapping[str, tuple[int, int, str]] = {
    "seed": (0, UINT64_MAX, "None lets the engine choose"),
    "logprobs": (0, INT64_MAX, "None turns them off, 0 gives the chosen token's alone"),
    "prompt_logprobs": (0, INT64_MAX, "None turns them off, 0 gives the prompt's tokens' alone"),
}
_FLOATS: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "0 is greedy"),
    "top_p": (0.0, 1.0, "1 turns it off, 0 keeps the top token alone"),
    "min_p": (0.0, 1.0, "0 turns it off"),
    "repetition_penalty": (0.0, math.inf, "1 turns it off"),
    "presence_penalty": (-2.0, 2.0, "0 turns it off"),
    "frequency_penalty": (-2.0, 2.0, "0 turns it off"),
}
"""Name -> least, most, advice. Floats are finite besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is continued. Raises ParamsError for a value that cannot be meant.

    Numbers may be numpy's; a bool is not a number. Lists become tuples, and `logit_bias` a tuple of
    pairs, so that params can be hashed, pickled and shared.

    Attributes:
        max_tokens: The most tokens generated. 0 scores the prompt (`prompt_logprobs`) only.
        min_tokens: Tokens generated before an end-of-sequence or stop token may come.
        temperature: Divides the logits. 0, and anything below 1e-5, is greedy: the top token.
        top_p: Keep the fewest top tokens whose shares sum to this, of those that `top_k` keeps.
            0 keeps the top token alone.
        top_k: Keep the `top_k` top tokens; of equal ones those with the lowest ids. 0 keeps all, as
            does anything beyond the vocabulary.
        min_p: Keep tokens whose share is at least `min_p` times the top one's.
        repetition_penalty: For tokens of the prompt or the output: positive logits are divided by
            it, negative ones multiplied (transformers' rule).
        presence_penalty: Taken from the logits of tokens of the output, -2 to 2.
        frequency_penalty: The same for each time that the token came.
        seed: Draws depend on it and on the tokens generated so far, not on other requests. None:
            the engine chooses.
        n: Completions of the prompt.
        stop: Strings that end the text, which is cut before them.
        stop_token_ids: Tokens that end it like the end-of-sequence tokens.
        ignore_eos: End-of-sequence tokens are tokens like any other.
        logprobs: For each generated token the log-probability that the model gave it (before
            penalties and temperature), and those of so many top tokens. None: none.
        prompt_logprobs: The same for the prompt's tokens from the second one on.
        logit_bias: Token id -> what is added to its logit; -inf bans the token.
        logits_processors: Called in order, each `(tokens generated so far, logits [V] float32) ->
            logits [V]`, before temperature. They make each step wait for the last one's tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        checked: dict[str, object] = {}
        for name, (low, high, advice) in _INTS.items():
            checked[name] = _int(name, getattr(self, name), low, high, advice)
        for name, (low, high, advice) in _OPTIONAL_INTS.items():
            if getattr(self, name) is not None:
                checked[name] = _int(name, getattr(self, name), low, high, advice)
        for name, (least, most, advice) in _FLOATS.items():
            checked[name] = _float(name, getattr(self, name), least, most, advice)
        if checked["repetition_penalty"] == 0:
            raise ParamsError(expected("repetition_penalty", "above 0", 0, "1 turns it off"))
        if not isinstance(self.ignore_eos, bool):
            raise ParamsError(
                expected("ignore_eos", "a bool", repr(self.ignore_eos), "pass True or False")
            )
        checked["stop"] = _stop_strings(self.stop)
        checked["stop_token_ids"] = tuple(
            _int("stop_token_ids", token, 0, INT64_MAX, "pass token ids")
            for token in _tuple("stop_token_ids", self.stop_token_ids, "token ids")
        )
        checked["logit_bias"] = _logit_bias(self.logit_bias)
        checked["logits_processors"] = _processors(self.logits_processors)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise ParamsError(
                expected(
                    "min_tokens",
                    f"at most max_tokens ({self.max_tokens})",
                    self.min_tokens,
                    "lower it or raise max_tokens",
                )
            )

    @property
    def is_greedy(self) -> bool:
        """The top token is taken; nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Logits depend on how often each token came."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def needs_host(self) -> bool:
        """Python code helps to choose, and must see each token before the next step."""
        return bool(self.logits_processors)

    @property
    def logit_bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is stored; () for None."""
        return tuple(dict(self.logit_bias or ()).items())


def _int(name: str, value: object, low: int, high: int, advice: str) -> int:
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or not low <= number <= high:
        most = {INT64_MAX: "2**63 - 1", UINT64_MAX: "2**64 - 1"}[high]
        raise ParamsError(expected(name, f"an int from {low} to {most}", repr(value), advice))
    return number


def _float(name: str, value: object, low: float, high: float, advice: str) -> float:
    number = _number(value)
    if not (math.isfinite(number) and low <= number <= high):
        want = f"a number from {low:g} to {high:g}" if high < math.inf else "a finite number from 0"
        raise ParamsError(expected(name, want, repr(value), advice))
    return number


def _number(value: object) -> float:
    """`value` as a float; nan if it is no number, or an int that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _tuple(name: str, value: object, of: str) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise ParamsError(expected(name, f"a list or tuple of {of}", repr(value), "wrap it in []"))
    return tuple(value)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _tuple("stop", stop, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParamsError(
                expected("stop", "strings that are not empty", repr(string), "leave it out")
            )
    return strings


def _logit_bias(bias: object) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    # dataclasses.replace hands over the pairs that an earlier SamplingParams made of a mapping.
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ParamsError(expected("logit_bias", "a mapping", repr(bias), "pass {token id: bias}"))
    checked: dict[int, float] = {}
    for token, value in pairs:
        number = _number(value)
        if not number < math.inf:
            raise ParamsError(
                expected(f"logit_bias[{token}]", "finite or -inf", repr(value), "-inf bans a token")
            )
        checked[_int("logit_bias", token, 0, INT64_MAX, "its keys are token ids")] = number
    if len(checked) != len(pairs):
        tokens = listed([token for token, _ in pairs])
        raise ParamsError(expected("logit_bias", "each token once", tokens, "add up its biases"))
    return tuple(checked.items())


def _processors(processors: object) -> tuple[LogitsProcessor, ...]:
    processors = _tuple("logits_processors", processors, "callables")
    for processor in processors:
        if not callable(processor):
            raise ParamsError(
                expected(
                    "logits_processors",
                    "callables (tokens generated so far, logits) -> logits",
                    repr(processor),
                    "leave it out",
                )
            )
    return processors
