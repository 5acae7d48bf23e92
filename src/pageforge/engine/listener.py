"""Listener: whoever the core tells what becomes of its sequences."""

from __future__ import annotations

from typing import Any, Protocol

from pageforge.engine.flight import Flight
from pageforge.engine.logprobs import Logprobs
from pageforge.engine.outputs import FinishReason
from pageforge.engine.sequence import Sequence

End = tuple[FinishReason, Any]
"""Why a sequence ends, and its cause: the stop id or string, or the exception."""


class Listener(Protocol):
    """Whose sequences these are: told of what becomes of them.

    What it does with tokens and ends may take long. If it is interrupted there (by Ctrl-C, say), or
    the core before it is done with an end, the next call tells it the same once more.
    """

    def on_scheduled(self, sequence: Sequence) -> None:
        """It begins to run, or to run again."""

    def on_first_token(self, sequence: Sequence) -> None:
        """Its first token has come."""

    def on_token(self, sequence: Sequence, token: int, flight: Flight, place: int) -> End | None:
        """A new token of a sequence that is watched. Whether the sequence ends with it."""

    def on_prompt_logprobs(self, sequence: Sequence, first: int, logprobs: Logprobs) -> None:
        """Log-probabilities of prompt tokens from position `first` on."""

    def on_finish(self, sequence: Sequence, reason: FinishReason, cause: Any) -> None:
        """It ends; its tokens are in `sequence.tokens`."""
