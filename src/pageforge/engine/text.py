"""Detokenizer: tokens of one completion come in, text that is safe to show comes out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from pageforge.errors import expected

UNKNOWN = "\ufffd"
"""What tokenizers decode bytes to that are no character, or not yet."""

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte-fallback token of sentencepiece-like vocabularies: one byte of UTF-8."""

WINDOW = 8
"""Ids that are decoded with each new one: half of them hold a character's four bytes."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer, fast or slow."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of these ids."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's entry for an id; None outside the vocabulary."""


class Detokenizer:
    """Turns the tokens of one completion into text as they come.

    The pieces that `push` returns, and the last one of `finish`, join to
    `tokenizer.decode(all ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`, cut
    before the first stop string. However the ids are split into pushes, the result is the same.
    Text is held back while it may still change or be cut:

    - a U+FFFD at the end, for it may be the first half of a character;
    - byte-fallback tokens (`<0xE4>`) up to the first token that is none: one byte that fits no
      character turns all bytes before it, back to the last such token, into U+FFFD;
    - the end of the text, if a stop string may begin there.

    The stop string that counts is the one whose end comes first in the text; of several that end
    there, the longest. With it the completion is over: ids pushed later are ignored. Skipped
    special tokens are no text, so no stop string is found in them.

    Only the last few ids are decoded with each token, so a token costs the same at any length.
    That takes a tokenizer whose text only grows at its end. Of another one (its `decode` changes
    text far before the last token), what was shown stays, and only the rest can still be right.

    What the tokenizer raises, or an interrupt in it, passes through, and the id that was being
    taken is not: push it again, or call `finish`. (Text of ids before it in the same push is lost.)

    Attributes:
        stopped: the stop string that was found, or None. It is found with the token that completes
            it, but by `finish` at the latest (one that ends in U+FFFD), so look again after that.
        num_tokens: how many of the ids pushed belong to the text: all of them, or after a stop the
            fewest whose text holds everything before the cut. So the token in which the stop
            string begins is kept if a part of its text lies before the cut, and no token is that
            lies behind it.
    """

    __slots__ = (
        "_ends",
        "_held",
        "_run",
        "_settled",
        "_shown",
        "_skip_special_tokens",
        "_start",
        "_stop",
        "_text",
        "_tokenizer",
        "_window",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
    ):
        if "" in stop:
            raise ValueError(expected("stop", "strings that are not empty", stop, "leave '' out"))
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self.stopped: str | None = None
        self.num_tokens = 0

        # Positions count characters of the whole text, unless they are the window's.
        self._window: list[int] = []  # the last ids, decoded together
        self._text = ""  # the window's text, without the run
        self._start = 0  # where in the whole text the window's begins
        self._settled = 0  # characters of the window's text that later ids cannot change
        self._run: dict[int, int] = {}  # byte-fallback tokens at the end: how many ids -> the byte
        self._ends = [0]  # [k]: where the text of the first k ids ends
        self._shown = 0  # where the text that was shown ends
        self._held = ""  # settled text behind it, in which a stop string may begin

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that can now be shown, often none."""
        shown = []
        for token_id in token_ids:
            if self.stopped is None:
                shown.append(self._show(self._take(token_id)))
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text, after the last id."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._window) if self._run else self._text
        rest = self._show(self._settle(text, len(text)))
        if self.stopped is None:
            rest, self._held = rest + self._held, ""
        return rest

    def _take(self, token_id: int) -> str:
        """Take one id and return the text that it settles."""
        # The tokenizer comes first: where it raises, nothing has changed.
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # models may have more ids than their tokenizer: those have no text
            self._count()
            return ""
        found = BYTE_PIECE.fullmatch(piece)
        byte = None if found is None else int(found[1], base=16)
        if byte is not None and not self._run_stops(byte):
            self._count(token_id, byte)
            return ""  # one more byte may turn all of them into U+FFFD
        window = [*self._window, token_id]
        text = self._decode(window)
        is_mute = byte is None and (bool(self._run) or len(text) == len(self._text))
        if is_mute and self._skips(token_id):
            self._count()
            return ""
        newer = window[len(window) // 2 :] if len(window) > WINDOW else []
        newer_text = self._decode(newer) if newer else ""
        self._count(token_id, byte)
        settled = self._settle(text, len(text) - text.endswith(UNKNOWN))
        self._ends[-1] = self._start + len(text)
        if newer:
            self._slide(newer, newer_text)
        return settled

    def _count(self, token_id: int | None = None, byte: int | None = None) -> None:
        """One id more: into the window if it may have text, into the run if it is a byte."""
        self.num_tokens += 1
        self._ends.append(self._ends[-1])
        if token_id is not None:
            self._window.append(token_id)
        if byte is not None:
            self._run[self.num_tokens] = byte

    def _settle(self, text: str, length: int) -> str:
        """The window's text is now `text`: returns what is new of its first `length` characters."""
        if not text.startswith(UNKNOWN, self._settled):
            self._end_by(self._start + self._settled)  # one held back was but half a character
        if self._run:
            whole = _whole_characters(bytes(self._run.values()))
            for num_tokens, characters in zip(self._run, whole, strict=True):
                self._ends[num_tokens] += characters
            self._run.clear()
        new = text[self._settled : length]
        self._text = text
        self._settled = max(self._settled, length)
        return new

    def _end_by(self, end: int) -> None:
        """The last ids' text ends here, and not behind a character that only later ones finish."""
        k = len(self._ends) - 1
        while self._ends[k] > end:
            self._ends[k] = end
            k -= 1

    def _slide(self, window: list[int], text: str) -> None:
        """Forget the older half of the window; `window` is the rest, and `text` its text.

        The rest may begin inside a character or a run, and its first piece may lose a space. That
        is harmless: more ids follow, of a byte or more each, than belong to one character, and
        what stands before the last one is settled and never looked at again.
        """
        gone = len(self._text) - len(text)
        self._window, self._text = window, text
        self._start += gone
        self._settled -= gone

    def _show(self, settled: str) -> str:
        """Of newly settled text and what was held: all that no stop string can cut any more."""
        text = self._held + settled
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, cut, self.stopped = min(found)
            end = self._shown + cut
            self.num_tokens = next(k for k, reached in enumerate(self._ends) if reached >= end)
            return text[:cut]
        cut = self._stop_may_begin(text)
        self._held = text[cut:]
        self._shown += cut
        return text[:cut]

    def _stop_may_begin(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        first = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, first)
            if start >= 0:
                first = start
        return first

    def _run_stops(self, byte: int) -> bool:
        """Whether the run with `byte` behind it completes a stop string: then the text ends here.

        A line's end is a byte-fallback token to some models, and a common stop string.
        """
        if not self._stop:
            return False
        try:
            run = bytes([*self._run.values(), byte]).decode()
        except UnicodeDecodeError:
            return False
        text = self._held + self._text[self._settled :] + run
        return any(stop in text for stop in self._stop)

    def _skips(self, token_id: int) -> bool:
        """Whether decoding skips this id, as a special token."""
        return (
            self._decode([token_id]) == ""
            and self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False) != ""
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def _whole_characters(run: bytes) -> Iterable[int]:
    """How many characters are whole after each byte of a run of byte-fallback tokens."""
    try:
        run.decode()
    except UnicodeDecodeError:
        return range(1, len(run) + 1)  # tokenizers then make each byte U+FFFD
    # A character is whole where the next one begins.
    return accumulate(byte & 0b1100_0000 != 0b1000_0000 for byte in run[1:] + b".")
