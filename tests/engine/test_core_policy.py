"""The engine's policy as a whole, over a real pool and a model that is a hash.

Sequences come, fork, are preempted, swapped and aborted, the model fails, the device is full; after
each step pages are recounted, and what the pages hold is compared with what they should hold.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.engine.fake_model import (
    VOCABULARY,
    CoreInFlight,
    FakePool,
    FakeRunner,
    FakeSampler,
    PlantedFault,
    completion,
    geometry,
)

from pageforge import ops
from pageforge import pool as pool_module
from pageforge.engine.core import Core
from pageforge.engine.flight import Flight
from pageforge.engine.params import SamplingParams
from pageforge.engine.scheduler import Limits, least_pages
from pageforge.engine.sequence import Sequence
from pageforge.errors import OutOfPages, PageForgeError
from pageforge.geometry import pages_for

P = 4
NUM_PAGES = 9
MAX_TOKENS = NUM_PAGES * P
MOST_SEQUENCES = 8
BYTES_PER_PAGE = 2 * P * 4


@dataclass
class Fate:
    """What became of a sequence."""

    sequence: Sequence
    prompt: list[int]
    seen: list[int] = field(default_factory=list)
    """Tokens that came one by one, if it is watched."""
    reason: str | None = None
    cause: Any = None
    first_tokens: int = 0
    may_fail: bool = False
    """Whether the model was told to fail while it was there."""


def is_idle(core: Core) -> bool:
    return not (core.waiting or core.rows.num_running or core._flights)


class Policy(RuleBasedStateMachine):
    """Sequences on a small pool; `self` listens to the core."""

    core_type: type[Core] = Core
    windows: tuple[int | None, ...] = (None,)
    budget = 7
    max_running = 4
    swap_pages = 12
    happened: ClassVar[Counter[str]] = Counter()

    @initialize()
    def start(self) -> None:
        self.pool = FakePool(geometry(P, self.windows), max_pages=NUM_PAGES)
        self.runner = FakeRunner(self.pool, self.max_running, self.budget, MAX_TOKENS)
        self.sampler = FakeSampler(self.max_running)
        limits = Limits(self.max_running, self.budget, P)
        swap_bytes = self.swap_pages * BYTES_PER_PAGE
        parts: Any = (self.runner, self.pool, self.sampler, limits, self)
        self.core = self.core_type(*parts, swap_bytes=swap_bytes)
        self.fates: dict[Sequence, Fate] = {}
        self.num_added = 0
        self.until_interrupt = 0

    # The core's listener

    def on_scheduled(self, sequence: Sequence) -> None:
        assert sequence.row >= 0

    def on_first_token(self, sequence: Sequence) -> None:
        self.fates[sequence].first_tokens += 1

    def on_token(self, sequence: Sequence, token: int, flight: Flight, place: int) -> None:
        assert flight.at(place) == (sequence, token)
        fate = self.fates[sequence]
        if self.is_interrupted():
            fate.first_tokens -= not fate.seen  # it is told again
            raise KeyboardInterrupt
        fate.seen.append(token)

    def on_prompt_logprobs(self, *args: Any) -> None:
        raise AssertionError("nobody asked")

    def on_finish(self, sequence: Sequence, reason: str, cause: Any) -> None:
        fate = self.fates[sequence]
        assert fate.reason is None
        if self.is_interrupted():
            raise KeyboardInterrupt
        fate.reason, fate.cause = reason, cause
        prompt, params = fate.prompt, sequence.params
        whole = completion(
            prompt, params.max_tokens, seed=sequence.seed, stop_ids=sequence.stop_ids
        )
        tokens = sequence.tokens.tolist()
        assert tokens == whole[: len(tokens)]
        assert len(tokens) >= len(prompt)
        assert fate.first_tokens == (len(tokens) > len(prompt))
        if sequence.is_watched:
            assert fate.seen == tokens[len(prompt) :]
        if reason in ("stop", "length"):
            assert tokens == whole
            ends = bool(tokens[len(prompt) :]) and tokens[-1] in sequence.stop_ids
            assert reason == ("stop" if ends else "length")
        elif reason == "error":
            assert fate.may_fail, cause
            assert isinstance(cause, (PlantedFault, PageForgeError))

    def is_interrupted(self) -> bool:
        self.until_interrupt -= 1
        return self.until_interrupt == 0

    # What may happen

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence, fate in self.fates.items() if fate.reason is None]

    @precondition(lambda self: len(self.live) < MOST_SEQUENCES)
    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 3 * P + 1),
        tail=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
        max_tokens=st.integers(0, 4 * P),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1]),
        stop_ids=st.sampled_from([(), (), (0,), (1, 3)]),
        is_watched=st.booleans(),
        shares=st.sampled_from([True, True, True, False]),
    )
    def add(
        self,
        stem: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        stop_ids: tuple[int, ...],
        is_watched: bool,
        shares: bool,
    ) -> None:
        prompt = [(stem + place * place) % VOCABULARY for place in range(length)] + tail
        if least_pages(len(prompt), max_tokens, P) > NUM_PAGES:
            return
        sequences = []
        for index in range(n):
            sequence = Sequence(
                np.array(prompt, np.int32),
                SamplingParams(max_tokens=max_tokens, temperature=0.0),
                priority * 1_000_000 + self.num_added,
                stop_ids=stop_ids,
                seed=index,
                shares=shares,
                is_watched=is_watched,
            )
            self.num_added += 1
            self.fates[sequence] = Fate(sequence, prompt)
            sequences.append(sequence)
        first, *others = sequences
        first.children = others
        for other in others:
            other.parent = first
        for sequence in sequences:
            self.core.add(sequence)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.core.step()
            self.everything_adds_up()

    @rule()
    def step_once(self) -> None:
        self.step(1)

    @precondition(lambda self: self.live)
    @rule(after=st.integers(1, 3))
    def interrupt_the_listener(self, after: int) -> None:
        self.until_interrupt = after
        try:
            self.core.step()
        except KeyboardInterrupt:
            self.happened["interrupts"] += 1
        self.until_interrupt = 0

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, MOST_SEQUENCES), is_aborted=st.booleans())
    def end_one(self, number: int, is_aborted: bool) -> None:
        """Abort it, or let its next logits make no sense."""
        sequence = self.live[number % len(self.live)]
        if is_aborted:
            self.core.abort(sequence)
            assert self.fates[sequence].reason is not None
        else:
            self.fates[sequence].may_fail = True
            self.runner.spoilt.add(sequence)

    @precondition(lambda self: self.live)
    @rule(refusals=st.integers(0, 3))
    def let_the_device_fail(self, refusals: int) -> None:
        """It is full when so many requests for pages come; with 0 the step itself fails."""
        before = self.live
        spoilt = [each for each in before if self.fates[each].may_fail]
        for sequence in before:
            self.fates[sequence].may_fail = True
        self.pool.refusals, self.runner.failures = refusals, int(not refusals)
        self.core.step()
        self.pool.refusals = self.runner.failures = 0
        for sequence in before:
            self.fates[sequence].may_fail = sequence in spoilt
        failed = [each for each in before if isinstance(self.fates[each].cause, OutOfPages)]
        assert len(failed) <= refusals

    @rule(kind=st.sampled_from(["swap", "no swap", "drop"]))
    def give_up_pages(self, kind: str) -> None:
        if kind == "drop":
            self.pool.drop_prefix_cache()
            return
        self.core.give_up_pages(swap=kind == "swap")
        assert self.pool.stats().pages_used == 0
        if kind == "no swap":
            assert self.core.swap.num_bytes == 0

    # What always holds

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "core"):
            return
        core, rows = self.core, self.core.rows
        assert not self.runner.faults, self.runner.faults[0]
        running = [sequence for sequence in rows.sequences if sequence is not None]
        assert sorted(map(id, running + core.waiting)) == sorted(map(id, self.live))
        assert len(running) == rows.num_running
        assert [each.rank for each in core.waiting] == sorted(each.rank for each in core.waiting)
        for sequence in running:
            self.a_row_is_right(sequence)
        for sequence in core.waiting:
            assert sequence.row < 0
            assert sequence.swapped is None or sequence.table is None
            held = 0 if sequence.table is None else sequence.table.length
            held += 0 if sequence.swapped is None else sequence.swapped.num_tokens
            assert held == sequence.num_computed <= sequence.num_known
        tables = [each.table for each in self.live if each.table is not None]
        self.pool.check_invariants(tables)
        swapped = sum(each.swapped.num_bytes for each in core.waiting if each.swapped is not None)
        assert core.swap.num_bytes == swapped <= core.swap.max_bytes
        for row, params in enumerate(self.sampler.rows):
            sequence = rows.sequences[row]
            assert params is (None if sequence is None else sequence.params)

    def a_row_is_right(self, sequence: Sequence) -> None:
        rows, row, table = self.core.rows, sequence.row, sequence.table
        assert rows.sequences[row] is sequence
        assert rows.rank[row] == sequence.rank
        known = rows.length[row] + rows.pending[row]
        assert rows.pending[row] in (0, 1)
        assert rows.computed[row] <= min(known, sequence.most_computed)
        assert rows.computed[row] <= rows.room[row] == table.length
        for group, window in enumerate(self.windows):
            last = pages_for(int(rows.computed[row]), P)
            entries = table.entries(0, last, group)
            on_device = self.runner.tables[group][row, :last].tolist()
            if window is None:
                assert entries == on_device[: len(entries)]
            else:  # pages that have left the window stay in the row
                assert all(a in (0, b) for a, b in zip(entries, on_device, strict=False))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        most = 100 + 6 * sum(each.limit for each in self.live)
        for _ in range(most):
            if is_idle(self.core):
                break
            self.step(1)
        assert is_idle(self.core), f"livelock: {self.core.waiting}, {self.core.rows.sequences}"
        assert not self.live
        self.happened["preemptions"] += self.core.num_preemptions
        self.happened["swaps"] += self.core.num_swaps
        self.happened["steps"] += self.core.num_steps
        for sequence, fate in self.fates.items():
            self.happened[fate.reason] += 1
            self.happened["found tokens"] += sequence.num_cached
        assert self.pool.stats().pages_used == 0
        assert self.core.swap.num_bytes == 0
        self.pool.drop_prefix_cache()
        assert self.pool.stats().pages_cached == 0
        self.pool.check_invariants([])
        self.pool.close()


class PolicyInFlight(Policy):
    """Each step is launched before the last one's tokens are known."""

    core_type = CoreInFlight


class PolicyOneToken(PolicyInFlight):
    """One token a step."""

    budget = 1


class PolicyWindows(PolicyInFlight):
    """A layer with a window beside one without; nothing fits on the host."""

    windows = (P + 1, None)
    swap_pages = 0
    budget = 64


class PolicyWindowsSwapped(PolicyInFlight):
    """Half of the pages of a sequence have left the window when it is swapped."""

    windows = (P + 1, None)


FEW = settings(max_examples=80, stateful_step_count=40)
"""Of the profile "fixed"; any other runs as many examples as it says."""

MACHINES = [Policy, PolicyInFlight, PolicyOneToken, PolicyWindows, PolicyWindowsSwapped]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_policy_holds(
    machine: type[Policy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "ROLLBACK", 0)  # pages leave the window at once
    caplog.set_level(logging.CRITICAL, "pageforge")
    monkeypatch.setattr(machine, "happened", Counter())
    run_state_machine_as_test(machine, settings=FEW if FEW.derandomize else settings())
    kinds = ["length", "stop", "abort", "error", "preemptions", "found tokens", "steps"]
    kinds += ["interrupts"]
    kinds += ["swaps"] if machine.swap_pages else []
    assert all(machine.happened[kind] >= 10 for kind in kinds), machine.happened


class Alone:
    """A core to drive by hand; nothing goes wrong by itself."""

    def __init__(
        self, max_pages: int, *, swap_bytes: int = 0, max_running: int = 4, budget: int = 64
    ):
        self.pool = FakePool(geometry(P), max_pages=max_pages)
        self.runner = FakeRunner(self.pool, max_running, budget, max_pages * P)
        limits, sampler = Limits(max_running, budget, P), FakeSampler(max_running)
        parts: Any = (self.runner, self.pool, sampler, limits, self)
        self.core = CoreInFlight(*parts, swap_bytes=swap_bytes)
        self.ended: dict[int, tuple[str, list[int]]] = {}

    def add(self, prompt: list[int], max_tokens: int, rank: int, n: int = 1) -> list[Sequence]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sequences = [
            Sequence(np.array(prompt, np.int32), params, rank + index) for index in range(n)
        ]
        sequences[0].children = sequences[1:]
        for child in sequences[1:]:
            child.parent = sequences[0]
        for sequence in sequences:
            self.core.add(sequence)
        return sequences

    def run(self, most: int = 100) -> None:
        for _ in range(most):
            if is_idle(self.core):
                break
            self.core.step()
        assert is_idle(self.core)
        assert not self.runner.faults

    def on_scheduled(self, sequence: Sequence) -> None:
        assert self.pool.num_refused < 100, "livelock"

    def on_first_token(self, sequence: Sequence) -> None: ...

    def on_finish(self, sequence: Sequence, reason: str, cause: Any) -> None:
        self.ended[sequence.rank] = reason, sequence.tokens.tolist()


def test_forks_that_hold_what_they_lack_themselves_drop_it() -> None:
    """The prompt fills the pool, and its second half is shared: the fork has nowhere to copy it."""
    alone = Alone(max_pages=2)
    prompt = [1, 2, 3, 4, 0, 1]
    alone.add(prompt, 3, rank=0, n=2)
    alone.run()
    whole = completion(prompt, 3)
    assert alone.ended == {0: ("length", whole), 1: ("length", whole)}


def test_forks_on_a_device_without_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write to the page that they share: one of them copies it, or computes it again."""
    alone = Alone(max_pages=8)
    prompt, failures = [1, 2, 3, 4, 0, 1], [torch.OutOfMemoryError("planted")] * 2

    def copy_pages(*args: Any) -> None:
        if failures:
            raise failures.pop()
        ops.reference.copy_pages(*args)

    monkeypatch.setattr(ops, "copy_pages", copy_pages)
    alone.add(prompt, 3, rank=0, n=3)
    alone.run()
    assert not failures
    assert alone.ended == dict.fromkeys(range(3), ("length", completion(prompt, 3)))
    alone.pool.check_invariants([])


def test_forks_that_wait_behind_a_large_request_drop_their_pages() -> None:
    alone = Alone(max_pages=4)
    prompt = [1, 2, 3, 4, 0, 1]
    alone.add(prompt, 3, rank=10, n=2)
    alone.core.step()
    large = list(range(4)) * 3 + [1, 2]
    alone.add(large, 2, rank=0)  # comes first, and needs the whole pool
    alone.run()
    assert alone.ended[0] == ("length", completion(large, 2))
    assert alone.ended[11] == ("length", completion(prompt, 3))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 2, P, P + 1, 2 * P, 2 * P + 1])
def test_a_prompt_that_wants_no_tokens_ends_though_all_of_it_is_known(length: int, n: int) -> None:
    alone = Alone(max_pages=8)
    prompt = [place % VOCABULARY for place in range(length)]
    alone.add(prompt, 4, rank=0)
    alone.run()
    alone.add(prompt, 0, rank=1, n=n)
    alone.run()
    assert [alone.ended[1 + index] for index in range(n)] == [("length", prompt)] * n


def test_a_prompt_in_two_steps_that_wants_no_tokens_ends_with_the_second() -> None:
    """The second one is in flight when the first one is looked at."""
    alone = Alone(max_pages=32)
    alone.add([0] * 70, 0, rank=0)  # a step has 64 tokens
    alone.core.step()
    alone.core.step()
    assert not alone.ended
    alone.core.step()
    assert alone.ended == {0: ("length", [0] * 70)}


def test_a_prompt_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(max_pages=16)
    asked = [[number, 1, 2, 3, 4, 0] for number in range(3)]
    looked_for: list[Any] = []
    match_prefix = alone.pool.match_prefix
    monkeypatch.setattr(
        alone.pool, "match_prefix", lambda *args: looked_for.append(args) or match_prefix(*args)
    )
    for _ in range(2):
        looked_for.clear()
        for rank, prompt in enumerate(asked):
            alone.add(prompt, 3, rank=rank)
        alone.core.step()
        assert len(looked_for) == len(asked)
        alone.run()
        for rank, prompt in enumerate(asked):
            assert alone.ended.pop(rank) == ("length", completion(prompt, 3))


def test_swapping_in_takes_no_page_that_another_one_begins_with() -> None:
    """Both begin in one step; the pages that the second finds are the first ones to be evicted."""
    alone = Alone(max_pages=9, swap_bytes=8 * BYTES_PER_PAGE)
    stem = [0, 1, 2, 3] * 3
    alone.add(stem, 1, rank=0)
    alone.run()
    (swapped,) = alone.add([4, 4, 4, 4] * 3 + [2], 3, rank=1)
    alone.core.step()
    alone.core.settle()
    alone.core.preempt(swapped)
    assert swapped.swapped is not None
    (other,) = alone.add([*stem, 1], 3, rank=2)
    alone.core.step()
    assert swapped.row >= 0 and other.row >= 0
    assert other.num_cached == len(stem)
    alone.run()
    assert alone.ended[1] == ("length", completion([4, 4, 4, 4] * 3 + [2], 3))
    assert alone.ended[2] == ("length", completion([*stem, 1], 3))


def test_a_full_device_keeps_swapped_pages_waiting_while_others_run() -> None:
    alone = Alone(max_pages=8, swap_bytes=8 * BYTES_PER_PAGE)
    (first,), (second,) = alone.add([1, 2, 3], 5, rank=0), alone.add([3, 2, 1], 5, rank=1)
    alone.core.step()
    alone.core.settle()
    alone.core.preempt(second)
    assert second.swapped is not None
    alone.pool.refusals = 1
    alone.core.step()
    assert second.swapped is not None and first.row >= 0
    alone.run()
    assert alone.ended[0] == ("length", completion([1, 2, 3], 5))
    assert alone.ended[1] == ("length", completion([3, 2, 1], 5))


def test_a_full_device_fails_the_last_one_that_is_left() -> None:
    alone = Alone(max_pages=8, swap_bytes=8 * BYTES_PER_PAGE)
    (only,) = alone.add([1, 2, 3], 5, rank=0)
    alone.core.step()
    alone.core.settle()
    alone.core.preempt(only)
    alone.pool.refusals = 1
    alone.run()
    assert alone.ended[0][0] == "error"
    assert alone.core.swap.num_bytes == 0 == alone.pool.stats().pages_used


def test_a_full_device_takes_pages_from_forks_that_wait() -> None:
    alone = Alone(max_pages=8)
    alone.core._limits = Limits(1, 64, P)  # one runs at a time
    alone.add([1, 2, 3, 4, 0], 5, rank=0, n=2)
    alone.core.step()
    alone.core.step()
    assert alone.core.waiting[0].table is not None
    while alone.core.rows.room[0] > alone.core.rows.computed[0]:
        alone.core.step()
    alone.pool.refusals = 1
    alone.core.step()
    assert alone.core.waiting[0].table is None
    alone.run()
    assert [reason for reason, _ in alone.ended.values()] == ["length", "length"]


@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_what_forks_have_saved_was_not_computed(max_running: int) -> None:
    """Whoever gives up the shared prompt before it has run computes it after all."""
    for max_pages in range(3, 14):
        alone = Alone(max_pages=max_pages)
        alone.core._limits = Limits(max_running, 64, P)
        params = SamplingParams(max_tokens=7, temperature=0.0)
        prompt = np.array([1, 2, 3, 4, 0, 1], np.int32)
        first, *others = (Sequence(prompt, params, rank, shares=False) for rank in range(4))
        first.children = others
        for other in others:
            other.parent = first
        for sequence in (first, *others):
            alone.core.add(sequence)
        alone.run()
        assert len(alone.ended) == 4
        saved = sum(each.num_cached for each in (first, *others))
        if not alone.core.num_preemptions:
            assert alone.core.num_computed + saved == 4 * first.most_computed
        assert saved <= 3 * (len(prompt) - 1)


def test_memory_of_swapped_pages_that_nobody_needs_is_freed() -> None:
    """At once, or when the step is over that was launched before."""
    alone = Alone(max_pages=16, swap_bytes=8 * BYTES_PER_PAGE)
    sequences = [alone.add([rank, 1, 2], 9, rank=rank)[0] for rank in range(3)]
    alone.core.step()
    alone.core.give_up_pages()
    assert all(sequence.swapped is not None for sequence in sequences)
    alone.core.abort(sequences[2])
    alone.core.let_go()
    assert not alone.core._kept
    alone.core._limits = Limits(1, 64, P)
    alone.core.step()
    assert alone.core._flights and sequences[1].swapped is not None
    alone.core.abort(sequences[1])
    assert alone.core._kept
    alone.core.settle()
    assert not alone.core._kept and alone.core.swap.num_bytes == 0
    alone.run()


@pytest.mark.parametrize("swap_pages", [0, 20])
def test_a_device_that_stays_full_runs_as_many_as_it_can(swap_pages: int) -> None:
    """Who gave way to the oldest must not begin again at once: that would go on for ever."""
    alone = Alone(max_pages=40, swap_bytes=swap_pages * BYTES_PER_PAGE)
    alone.pool.memory = 5
    asked = [[(place + number) % VOCABULARY for place in range(5)] for number in range(6)]
    for rank, prompt in enumerate(asked):
        alone.add(prompt, 12, rank=rank)
    alone.run()
    assert 0 < alone.pool.num_refused <= 2 * len(asked)
    for rank, prompt in enumerate(asked):
        assert alone.ended[rank] == ("length", completion(prompt, 12))


def test_pages_ahead_are_claimed_where_nobody_needs_them() -> None:
    """Many decode, and a prompt in seven steps takes all the pages that are left."""
    alone = Alone(max_pages=33 * 3 + 600, max_running=40, budget=400)
    for rank in range(33):
        alone.add([rank % VOCABULARY, 1, 2], 100, rank=rank)
    alone.core.step()
    (prompt,) = alone.add([0] * 2400, 10, rank=100)
    for _ in range(7):
        alone.core.step()
    assert alone.core.rows.computed[prompt.row] == 2400
    assert alone.core.num_preemptions == 0
    assert alone.core.rows.num_running == 34
    assert alone.pool.num_available == 0


def test_memory_is_mapped_for_the_pages_that_a_prompt_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Alone(max_pages=64, swap_bytes=8 * BYTES_PER_PAGE)
    stem = [0, 1, 2, 3] * 10
    alone.add(stem, 1, rank=0)
    (swapped,) = alone.add([4, 4, 4, 4] * 2 + [2], 3, rank=1)
    alone.core.step()
    alone.core.settle()
    alone.core.preempt(swapped)
    assert swapped.swapped is not None
    asked: list[int] = []
    monkeypatch.setattr(alone.pool, "map_ahead", asked.append)
    alone.add([*stem, 1], 3, rank=2, n=2)
    alone.core.step()
    assert asked[0] == 3 + 1  # all of the swapped one's, and the last one of the prompt
    alone.run()
    for rank in (2, 3):
        assert alone.ended[rank] == ("length", completion([*stem, 1], 3))
