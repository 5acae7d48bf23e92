"""LiveRequests: those that have not ended yet, and what the core tells of their sequences."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from pageforge.engine.flight import Flight
from pageforge.engine.listener import End
from pageforge.engine.logprobs import Logprobs
from pageforge.engine.outputs import FinishReason, Logprob, RequestOutput, TokenLogprobs
from pageforge.engine.request import Request
from pageforge.engine.sequence import Sequence


class LiveRequests:
    """Requests by id. The methods are those of Listener."""

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.finished: deque[RequestOutput] = deque()
        """Of requests that nobody waits for: `Engine.step` returns them."""
        self.num_finished = 0
        self.num_cached = 0
        """Prompt tokens that were not computed, of requests that have ended."""

    def on_scheduled(self, sequence: Sequence) -> None:
        """The core begins with it."""
        sequence.owner.on_scheduled()

    def on_first_token(self, sequence: Sequence) -> None:
        """The first token of one of its completions has come."""
        sequence.owner.on_first_token()

    def on_token(self, sequence: Sequence, token: int, flight: Flight, place: int) -> End | None:
        """A token of a request that is watched; whether its completion ends with it."""
        request: Request = sequence.owner
        logprobs = None
        if request.params.logprobs is not None:
            assert flight.logprob_places is not None
            index = int(np.searchsorted(flight.logprob_places, place))
            assert flight.logprobs is not None
            logprobs = _logprobs_of(flight.logprobs, index, token, request.params.logprobs)
        try:
            stop = request.take(sequence, token, logprobs)
        except Exception as error:  # a tokenizer that cannot decode fails its request alone
            return "error", error
        return None if stop is None else ("stop", stop)

    def on_prompt_logprobs(self, sequence: Sequence, first: int, logprobs: Logprobs) -> None:
        """Of a part of the prompt."""
        request: Request = sequence.owner
        if sequence is not request.sequences[0]:
            return  # all completions have the same prompt
        tokens, k = request.prompt_ids[first : first + len(logprobs.chosen)], request.prompt_k
        request.take_prompt_logprobs(
            first,
            [_logprobs_of(logprobs, place, token, k) for place, token in enumerate(tokens)],
        )

    def on_finish(self, sequence: Sequence, reason: FinishReason, cause: Any) -> None:
        """A completion ends, and perhaps its request with it. Told again, nothing happens."""
        request: Request = sequence.owner
        request.end(sequence, reason, cause)
        # (A later request may have its id.)
        if request.output is not None and self.by_id.get(request.id) is request:
            finished = [] if request.is_awaited else [request.output]
            num_cached = sum(each.num_cached for each in request.sequences)
            # Nothing is called from here on, so that Python lets no interrupt in between.
            del self.by_id[request.id]
            self.finished += finished
            self.num_cached += num_cached
            self.num_finished += 1


def _logprobs_of(logprobs: Logprobs, place: int, token: int, k: int) -> TokenLogprobs:
    """Those of the token at `place`, with the `k` likeliest there."""
    ids, values = logprobs.top_ids[place, :k].tolist(), logprobs.top[place, :k].tolist()
    top = tuple(map(Logprob, ids, values, range(1, k + 1)))
    chosen, rank = float(logprobs.chosen[place]), int(logprobs.ranks[place])
    return TokenLogprobs(Logprob(token, chosen, rank), top)
