"""Request: one prompt on its way through the engine, and what is shown of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pageforge.engine.outputs import (
    Completion,
    FinishReason,
    RequestOutput,
    StreamChunk,
    Timings,
    TokenLogprobs,
)
from pageforge.engine.params import SamplingParams
from pageforge.engine.sequence import Sequence
from pageforge.engine.text import Detokenizer, Tokenizer

PRIORITY = 1 << 40
"""Ranks that one priority has: as many requests as ever come."""

MOST_PRIORITY = (1 << 22) - 1
"""The largest, either way: ranks are int64."""


class _Branch:
    """One of a request's n completions, while it is generated."""

    def __init__(self, index: int, detokenizer: Detokenizer | None):
        self.index = index
        self.detokenizer = detokenizer
        self.logprobs: list[TokenLogprobs] = []
        self.text: list[str] = []
        self.num_shown = 0  # tokens that a stream was given
        self.completion: Completion | None = None


class Request:
    """A prompt, its params, and the completions as they come.

    `is_awaited`: whether a call waits for it, so that no `step` need return it. `streams`: whether
    chunks are kept for somebody who reads them as they come.
    """

    id = ""  # until it is submitted

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int,
        tokenizer: Tokenizer | None,
        *,
        is_awaited: bool,
        streams: bool,
    ):
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.priority = priority
        self.is_awaited = is_awaited
        self.streams = streams
        self.chunks: deque[StreamChunk] = deque()
        self.output: RequestOutput | None = None
        self._tokenizer = tokenizer
        self._branches: dict[Sequence, _Branch] = {}
        self._num_open = 0  # branches that have not ended
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._submitted = time.monotonic()
        self._scheduled: float | None = None
        self._first_token: float | None = None

    @property
    def sequences(self) -> list[Sequence]:
        """Of all completions."""
        return list(self._branches)

    @property
    def is_watched(self) -> bool:
        """Whether each token has to be looked at when it comes."""
        params = self.params
        return self.streams or bool(params.stop) or params.logprobs is not None

    @property
    def prompt_k(self) -> int:
        """How many top tokens are wanted at each of the prompt."""
        return self.params.prompt_logprobs or 0

    def submit(self, request_id: str, sequences: list[Sequence]) -> None:
        """It gets an id, and its completions; the clock of `timings` begins."""
        self.id = request_id
        self._submitted = time.monotonic()
        self._branches = {
            sequence: _Branch(index, self._new_detokenizer())
            for index, sequence in enumerate(sequences)
        }
        self._num_open = len(sequences)

    def __repr__(self) -> str:
        return f"request {self.id}"

    # --- what happens to it -----------------------------------------------------------------

    def on_scheduled(self) -> None:
        """It takes part in a step for the first time."""
        if self._scheduled is None:
            self._scheduled = time.monotonic()

    def on_first_token(self) -> None:
        """The first token of any completion has come."""
        if self._first_token is None:
            self._first_token = time.monotonic()

    def take(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """A token of a watched completion. Returns the stop string that it completes, if any.

        Interrupted in the tokenizer, it has not taken the token.
        """
        branch = self._branches[sequence]
        text, stop, is_kept = "", None, True
        if branch.detokenizer is not None:
            text = branch.detokenizer.push([token])
            branch.text.append(text)
            stop = branch.detokenizer.stopped
            # Of the token that completes a stop string there is what lies before the cut.
            is_kept = stop is None or branch.num_shown < branch.detokenizer.num_tokens
        if logprobs is not None:
            branch.logprobs.append(logprobs)
        if self.streams and (text or is_kept):
            self._show(branch, text, [token] if is_kept else [])
        return stop

    def take_prompt_logprobs(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """Of prompt tokens from position `first` on; again, if the prompt is computed again."""
        self._prompt_logprobs[first : first + len(logprobs)] = logprobs

    def end(self, sequence: Sequence, reason: FinishReason, cause: Any) -> None:
        """A completion has ended; with the last one there is an `output`.

        Interrupted in the tokenizer, it has not ended.
        """
        branch = self._branches[sequence]
        if branch.completion is None:
            self._complete(sequence, branch, reason, cause)
        if self._num_open == 0 and self.output is None:
            self.output = self._make_output()

    # --- inside -----------------------------------------------------------------------------

    def _complete(
        self, sequence: Sequence, branch: _Branch, reason: FinishReason, cause: Any
    ) -> None:
        token_ids = sequence.tokens[sequence.num_prompt :].tolist()
        error = cause if reason == "error" else None
        stop = cause if reason == "stop" else None
        text, rest = None, ""
        try:
            if branch.detokenizer is not None:
                rest = branch.detokenizer.finish()
                text = "".join([*branch.text, rest])
                if branch.detokenizer.stopped is not None:
                    reason, stop = "stop", branch.detokenizer.stopped
                # Without those that a stop string cut off, and one that could not be decoded.
                token_ids = token_ids[: branch.detokenizer.num_tokens]
            elif self._tokenizer is not None:
                text = self._tokenizer.decode(
                    token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
        except Exception as failure:  # a tokenizer that cannot decode fails its request alone
            reason, error, stop, text = "error", failure, None, None
        wants = self.params.logprobs is not None
        completion = Completion(
            index=branch.index,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            stop=stop,
            logprobs=branch.logprobs[: len(token_ids)] if wants else None,
            error=error,
        )
        shown = [self._chunk(branch, rest, [], reason)] if self.streams else []
        # Nothing is called from here on, so that Python lets no interrupt in between.
        branch.completion = completion
        self._num_open -= 1
        self.chunks += shown

    def _new_detokenizer(self) -> Detokenizer | None:
        """None where the text is not needed before the end."""
        if self._tokenizer is None or not (self.streams or self.params.stop):
            return None
        return Detokenizer(self._tokenizer, stop=tuple(self.params.stop))

    def _show(self, branch: _Branch, text: str, tokens: list[int]) -> None:
        chunk = self._chunk(branch, text, tokens)
        branch.num_shown += len(tokens)
        self.chunks.append(chunk)

    def _chunk(
        self, branch: _Branch, text: str, tokens: list[int], reason: FinishReason | None = None
    ) -> StreamChunk:
        logprobs = branch.logprobs[branch.num_shown : branch.num_shown + len(tokens)]
        return StreamChunk(
            request_id=self.id,
            index=branch.index,
            text=text if branch.detokenizer is not None else None,
            token_ids=tokens,
            finish_reason=reason,
            logprobs=logprobs if self.params.logprobs is not None else None,
        )

    def _make_output(self) -> RequestOutput:
        now = time.monotonic()
        ended = (branch.completion for branch in self._branches.values())
        completions = [completion for completion in ended if completion is not None]
        wants = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=completions,
            prompt_logprobs=self._prompt_logprobs if wants else None,
            timings=Timings(
                queued=_since(self._submitted, self._scheduled),
                first_token=_since(self._submitted, self._first_token),
                total=now - self._submitted,
                num_tokens=max(len(each.token_ids) for each in completions),
            ),
            num_cached_tokens=next(iter(self._branches)).num_cached,
        )


def _since(begin: float, end: float | None) -> float | None:
    return None if end is None else end - begin
