"""Tiny models for the engine, what they generate one prompt at a time, and a tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.hf.parity import TIE
from tests.hf.tiny_models import VOCABULARY, attending, tiny

from pageforge.engine import Engine, SamplingParams
from pageforge.engine.core import Core
from pageforge.engine.flight import Flight
from pageforge.engine.outputs import RequestOutput
from pageforge.engine.step import Step

Prompt = tuple[int, ...]


@functools.cache
def alone(name: str, prompt: Prompt, max_tokens: int) -> tuple[list[int], list[bool]]:
    """What `model.generate` gives for one prompt, and where its two best tokens were a tie."""
    if not max_tokens:
        return [], []
    model = tiny(name)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    ties = (best[:, 0] - best[:, 1] < TIE).tolist()
    return output.sequences[0, len(prompt) :].tolist(), ties


def check(name: str, prompt: Sequence[int], max_tokens: int, got: Sequence[int]) -> None:
    """`got` are the tokens of `generate`, up to a tie of the model's at most."""
    tokens, ties = alone(name, tuple(prompt), max_tokens)
    assert len(got) == len(tokens)
    for place, (one, other) in enumerate(zip(tokens, got, strict=True)):
        if one != other:
            assert ties[place], f"token {place} of {len(tokens)} after {len(prompt)}"
            return


def prompts(count: int, *, longest: int = 60, seed: int = 0) -> list[Prompt]:
    """Random ones, many of which begin alike; lengths at and around page boundaries among them."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(3, VOCABULARY, (3, longest)).tolist()
    found = []
    for number in range(count):
        length = int(rng.integers(1, longest + 1))
        if number % 4 == 0:
            length = int(rng.choice([7, 8, 9, 15, 16, 17, 32, 33]))
        shared = int(rng.integers(0, length)) if number % 2 else 0
        stem = stems[int(rng.integers(len(stems)))][:shared]
        found.append((*stem, *rng.integers(3, VOCABULARY, length - shared).tolist()))
    return found


@contextmanager
def engine_on(name: str, **options: Any) -> Iterator[Engine]:
    """An engine whose pages are full of NaN; at the end nothing is left in use."""
    model = attending(name)
    options = {"page_size": 8, "max_pages": 400, "max_running": 16, **options}
    with Engine(model, **options) as engine:
        for group in range(len(engine._pool.geometry.groups)):
            engine._pool.pages(group)[1:].fill_(torch.nan)
        yield engine
        if not engine._live.by_id:
            check_all_back(engine)


def check_all_back(engine: Engine) -> None:
    engine._core.settle()
    pool = engine._pool
    pool.check_invariants([])
    assert pool.stats().pages_used == 0
    assert engine.stats().swapped_bytes == 0
    engine.drop_prefix_cache()
    engine.trim()
    stats = pool.stats()
    assert stats.pages_cached == 0
    assert stats.bytes_mapped <= sum(2 * max(2 << 20, g.bytes_per_page) for g in stats.groups)


def begin_all(
    engine: Engine, asked: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> None:
    """Add requests, called 0, 1 and so on, and let them decode: the first tokens are there."""
    each = params if isinstance(params, list) else [params] * len(asked)
    for number, (prompt, of_one) in enumerate(zip(asked, each, strict=True)):
        engine.add_request(prompt, of_one, request_id=str(number))
    for _ in range(3):
        engine.step()


def run_all(engine: Engine, most: int = 20_000) -> dict[str, RequestOutput]:
    """Step until nothing is left to do."""
    found: dict[str, RequestOutput] = {}
    for _ in range(most):
        if not engine.has_unfinished:
            break
        found |= {output.request_id: output for output in engine.step()}
    assert not engine.has_unfinished
    assert engine.step() == []
    return found


class _Done:
    """Stands for the event after a step: its tokens come to the host when it is waited for."""

    def __init__(self, flight: Flight):
        self._flight = flight
        self._tokens = flight.tokens.clone()
        flight.tokens.fill_(0)

    def synchronize(self) -> None:
        self._flight.tokens.copy_(self._tokens)


def launch_ahead(monkeypatch: Any) -> None:
    """Steps are launched before the last one's tokens reach the host, as on a GPU."""
    sample = Core._sample

    def sampled(core: Core, step: Step) -> Flight:
        flight = sample(core, step)
        flight.done = _Done(flight)
        return flight

    monkeypatch.setattr(Core, "_sample", sampled)


class Tokenizer:
    """Tokens are letters: id 3 is `chr(ord("A") + 3)`. What the engine asks of a tokenizer."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("A") for letter in text]}

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(ord("A") + token_id)
