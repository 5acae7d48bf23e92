"""InputProcessor: what users ask for, checked and made a Request before anything changes."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.engine.params import SamplingParams
from pageforge.engine.request import MOST_PRIORITY, Request
from pageforge.engine.sampler import Sampler
from pageforge.engine.scheduler import least_pages
from pageforge.errors import OutOfPages, RequestError, expected

Prompt = str | SequenceOf[int]


class InputProcessor:
    """Makes requests that one model, sampler and pool can answer; refuses all others."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        sampler: Sampler,
        *,
        max_tokens: int,
        most_pages: int,
        page_size: int,
    ):
        """`max_tokens`: that a sequence may have K/V of. `most_pages`: that the pool can hold."""
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._eos_ids = _eos_ids(model, tokenizer)
        self._max_tokens = max_tokens
        self._most_pages = most_pages
        self._page_size = page_size

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int = 0,
        *,
        is_awaited: bool = True,
        streams: bool = False,
    ) -> Request:
        """A request that can be right, not submitted yet. Raises RequestError, OutOfPages."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            fix = "pass SamplingParams(max_tokens=...)"
            raise RequestError(expected("params", "SamplingParams", type(params).__name__, fix))
        is_int = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_int or abs(priority) > MOST_PRIORITY:
            want = f"an int from {-MOST_PRIORITY} to {MOST_PRIORITY}"
            raise RequestError(expected("priority", want, repr(priority), "0 is usual"))
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
        needed = least_pages(len(ids), params.max_tokens, self._page_size)
        if needed > self._most_pages:
            raise OutOfPages(
                needed, self._most_pages, "lower max_tokens, or make the pool larger (max_memory)"
            )
        return Request(
            text, ids, params, priority, self._tokenizer, is_awaited=is_awaited, streams=streams
        )

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that end a completion, those of the model among them unless ignored."""
        if params.ignore_eos:
            return params.stop_token_ids
        return tuple(dict.fromkeys([*self._eos_ids, *params.stop_token_ids]))

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it is one, and its token ids, which the model has."""
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
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            want = f"token ids from 0 to {self._vocab_size - 1}"
            raise RequestError(expected("prompt", want, wrong, "use the model's own tokenizer"))
        return text, ids


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list. What is no prompt is left for `request` to refuse."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # a mapping is no prompt either: `_token_ids` says so
    each = [*prompts]
    return [each] if any(map(_is_integer, each)) else each


def _is_integer(value: object) -> bool:
    """NumPy's count, and tensors of no dims; an array of one element is a prompt of one token."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


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
