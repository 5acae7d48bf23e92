"""The core may be left anywhere: by Ctrl-C pressed twice, or by any exception.

Python lets an interrupt in where it calls something. So the same requests are served again and
again, each time interrupted at another such place; the next call has to go on from there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.engine.fake_model import (
    CoreInFlight,
    FakePool,
    FakeRunner,
    FakeSampler,
    completion,
    geometry,
)

from pageforge.engine import core as core_module
from pageforge.engine.core import Core
from pageforge.engine.flight import Flight
from pageforge.engine.params import SamplingParams
from pageforge.engine.scheduler import Limits
from pageforge.engine.sequence import Sequence

P = 4
ENGINE = str(Path(core_module.__file__).parent)
STRIDE = 41
"""Of the places every so many are tried: some sixty."""

AFTERWARDS = ["step", "abort", "give up"]


class Interrupts:
    """Raises `error` at the place number `at` where an interrupt could come."""

    def __init__(self, error: BaseException, at: int):
        self.error, self.at, self.num_places = error, at, 0

    def __enter__(self) -> Interrupts:
        sys.setprofile(self.look)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def look(self, frame: FrameType, event: str, what: Any) -> None:
        """When Python code begins, or C code that was called has returned."""
        caller = frame.f_back if event == "call" else frame
        if event not in ("call", "c_return") or caller is None:
            return
        if caller.f_code.co_filename.startswith(ENGINE):
            self.num_places += 1
            if self.num_places == self.at:
                sys.setprofile(None)
                raise self.error


class Sampler(FakeSampler):
    """Rows may be cleared again."""

    def clear_row(self, row: int) -> None:
        self.rows[row] = None


class Served:
    """Requests of all kinds on a pool that is too small for them; listens to the core."""

    def __init__(self, core_type: type[Core], swap_pages: int):
        self.pool = FakePool(geometry(P), max_pages=9)
        self.runner = FakeRunner(self.pool, 4, 20, 9 * P)
        self.sampler = Sampler(4)
        parts: Any = (self.runner, self.pool, self.sampler, Limits(4, 20, P), self)
        self.core = core_type(*parts, swap_bytes=swap_pages * 2 * P * 4)
        self.seen: dict[Sequence, list[int]] = {}
        self.ended: dict[Sequence, tuple[str, list[int]]] = {}
        self.prompts: dict[Sequence, list[int]] = {}
        self.add([1, 2, 3, 4, 0, 1], 9, n=3)
        self.add([4, 3, 2, 1, 0], 3)
        self.add([0, 1, 2, 3] * 3, 7)
        self.add([3, 3], 8, n=2)
        self.add([1, 2, 3, 4, 0, 2], 5)

    def add(self, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        first, *others = [
            Sequence(
                np.array(prompt, np.int32),
                params,
                len(self.prompts) + index,
                seed=index,
                is_watched=index == 0,
            )
            for index in range(n)
        ]
        first.children = others
        for other in others:
            other.parent = first
        for sequence in (first, *others):
            self.prompts[sequence], self.seen[sequence] = prompt, []
            self.core.add(sequence)

    def on_scheduled(self, sequence: Sequence) -> None: ...

    def on_first_token(self, sequence: Sequence) -> None: ...

    def on_token(self, sequence: Sequence, token: int, flight: Flight, place: int) -> None:
        self.seen[sequence].append(token)

    def on_finish(self, sequence: Sequence, reason: str, cause: Any) -> None:
        told = reason, sequence.tokens.tolist()
        assert self.ended.setdefault(sequence, told) == told

    def calls(self) -> list[Callable[[], None]]:
        """Steps, and what may come in between."""
        aborted = [list(self.prompts)[number] for number in (0, 5, 6)]
        step, core = self.core.step, self.core
        return [
            *[step] * 4,
            lambda: core.abort(aborted[0]),
            *[step] * 3,
            core.give_up_pages,
            step,
            lambda: core.abort(aborted[1]),
            *[step] * 4,
            lambda: core.give_up_pages(swap=False),
            lambda: core.abort(aborted[2]),
            core.settle,
        ]

    def run(self, error: BaseException, at: int = -1) -> int:
        """All of it, interrupted once, where another call may come before the next step."""
        after = AFTERWARDS[at % len(AFTERWARDS)]
        calls = self.calls()
        with Interrupts(error, at) as interrupts:
            while calls or self.core.waiting or self.core.rows.num_running:
                call = calls.pop(0) if calls else self.core.step
                try:
                    call()
                except type(error):
                    if after == "abort":
                        self.core.abort(next(reversed(self.prompts)))
                    elif after == "give up":
                        self.core.give_up_pages()
                    self.core.step()
        self.core.settle()
        return interrupts.num_places

    def check(self, *, may_fail: bool) -> None:
        assert not self.runner.faults, self.runner.faults[0]
        assert self.ended.keys() == self.prompts.keys()
        num_failed = 0
        for sequence, (reason, tokens) in self.ended.items():
            prompt = self.prompts[sequence]
            whole = completion(prompt, sequence.params.max_tokens, seed=sequence.seed)
            assert tokens == whole[: len(tokens)]
            assert reason in ("length", "abort", "error")
            assert reason != "length" or tokens == whole
            num_failed += reason == "error"
            if sequence.is_watched:
                assert self.seen[sequence] == tokens[len(prompt) :]
        assert not num_failed or may_fail
        core = self.core
        assert not core._unfinished and not core._kept and not core._forks._parents
        assert core.swap.num_bytes == 0 == self.pool.stats().pages_used
        assert self.sampler.rows == [None] * 4
        self.pool.check_invariants([])
        self.pool.close()


@pytest.mark.parametrize("swap_pages", [0, 12])
@pytest.mark.parametrize("core_type", [Core, CoreInFlight])
@pytest.mark.parametrize("error_type", [KeyboardInterrupt, MemoryError])
def test_wherever_it_is_interrupted_the_next_call_goes_on(
    error_type: type[BaseException], core_type: type[Core], swap_pages: int
) -> None:
    whole = Served(core_type, swap_pages)
    num_places = whole.run(error_type())
    whole.check(may_fail=False)
    assert whole.core.num_preemptions > 3 and num_places > 2000
    assert bool(whole.core.num_swaps) == bool(swap_pages)
    for at in range(1, num_places, STRIDE):
        served = Served(core_type, swap_pages)
        served.run(error_type(), at)
        served.check(may_fail=error_type is MemoryError)
