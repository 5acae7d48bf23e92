"""Ctrl-C waits for the end of a block, and not for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from pageforge.interrupts import held_back


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("depth", [1, 3])
def test_an_interrupt_comes_when_the_block_is_over(depth: int) -> None:
    done = []

    def inside(left: int) -> None:
        with held_back():
            if left:
                inside(left - 1)
            else:
                interrupt()
            done.append(left)

    with pytest.raises(KeyboardInterrupt):
        inside(depth - 1)
    assert done == list(range(depth))


def test_the_second_one_comes_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        interrupt()
        done.append(1)
        interrupt()
        done.append(2)
    assert done == [1]


def test_without_one_nothing_happens() -> None:
    with held_back():
        pass
    with pytest.raises(ValueError, match="planted"), held_back():
        raise ValueError("planted")


def test_a_handler_of_the_users_own_is_called_once() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with held_back():
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("meaning", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_it_means_something_else_that_stays(meaning: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, meaning)
    try:
        with held_back():
            assert signal.getsignal(signal.SIGINT) is meaning
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_other_threads_nothing_is_done() -> None:
    found = []

    def inside() -> None:
        with held_back():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
