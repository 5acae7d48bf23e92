"""A step's numbers by hand, and steps padded to the sizes that graphs are captured for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.served import check, engine_on, launch_ahead, prompts

from pageforge.engine import SamplingParams
from pageforge.engine import runner as runner_module
from pageforge.engine.captures import Captures
from pageforge.engine.sequence import Rows, Sequence
from pageforge.engine.step import (
    Padding,
    StepArrays,
    StepShape,
    decode_arrays,
    mixed_arrays,
    padded_mixed,
    part_lengths,
)

PAGE_SIZE = 4
TABLES = [np.array([[5, 6], [7, 8], [0, 9]], np.int32)]
"""The pages of three rows in one layer group; the last row has given one back."""


def rows_of(*lengths: int, computed: tuple[int, ...], pending: tuple[int, ...]) -> Rows:
    """Row `r` has the tokens `10 r`, `10 r + 1` and so on."""
    rows = Rows(len(lengths))
    for row, length in enumerate(lengths):
        tokens = np.arange(10 * row, 10 * row + length, dtype=np.int32)
        rows.put(Sequence(tokens, SamplingParams(max_tokens=9), row), row, 2 * PAGE_SIZE)
    rows.computed[:], rows.pending[:] = computed, pending
    return rows


def listed(arrays: StepArrays) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def test_a_step_of_decoding() -> None:
    """Row 0's token is known to the host, row 1 is not part of it, row 2's is on the device."""
    rows = rows_of(3, 4, 5, computed=(2, 4, 5), pending=(0, 0, 1))
    counts, known = np.array([1, 0, 1], np.int32), np.array([0])
    changes = [(np.array([7, 8, 8, 8]), np.array([3, 0, 0, 0], np.int32))]
    shape = StepShape(4, 4, 4, True, False)
    arrays = decode_arrays(rows, counts, known, shape, changes)
    assert listed(arrays) == [
        [2, 0, -3, 0],  # tokens
        [2, 0, 5, 0],  # positions
        [7, 8, 8, 8],
        [3, 0, 6, 0],  # lengths
        [3, 0, 0, 0],
    ]
    assert_parts(arrays, shape)


def test_a_mixed_step() -> None:
    rows = rows_of(3, 4, 5, computed=(0, 4, 5), pending=(0, 0, 1))
    counts = np.array([3, 0, 1], np.int32)
    shape, arrays, places, spans = mixed_arrays(
        rows, counts, np.array([0, 2]), None, TABLES, PAGE_SIZE
    )
    assert listed(arrays) == [
        [0, 1, 2, -3],  # tokens
        [0, 1, 2, 5],  # positions
        [20, 21, 22, 37],  # slots
        [2, 3],  # tokens whose logits are wanted
        [3, 0, 6],  # lengths
        [0, 3, 3, 4],  # bounds
    ]
    assert shape == StepShape(4, 3, 2, False, False)
    assert places.tolist() == [0, 1] and spans == []
    assert_parts(arrays, shape)
    padded = StepShape(6, 5, 5, False, False)
    arrays = padded_mixed(arrays, shape, padded)
    assert listed(arrays) == [
        [0, 1, 2, -3, 0, 0],
        [0, 1, 2, 5, 0, 0],
        [20, 21, 22, 37, -1, -1],
        [2, 3, 0, 0, 0],
        [3, 0, 6, 0, 0],
        [0, 3, 3, 4, 4, 4],
    ]
    assert_parts(arrays, padded)


def test_tokens_in_pages_that_were_given_back_have_no_slot() -> None:
    rows = rows_of(3, 4, 5, computed=(3, 4, 3), pending=(0, 0, 0))
    counts = np.array([0, 0, 2], np.int32)
    _, arrays, _, _ = mixed_arrays(rows, counts, np.array([2]), None, TABLES, PAGE_SIZE)
    assert arrays[2].tolist() == [-1, 36]


def test_all_logits_of_a_prompt() -> None:
    """Row 0 computes the rest of its prompt, of which the first token is done; row 1 the last."""
    rows = rows_of(4, 4, 5, computed=(1, 3, 5), pending=(0, 0, 0))
    counts = np.array([3, 1, 0], np.int32)
    asking = np.array([True, False, False])
    shape, arrays, places, spans = mixed_arrays(
        rows, counts, np.array([0, 1]), asking, TABLES, PAGE_SIZE
    )
    wanted = arrays[3].tolist()
    assert wanted == [0, 1, 2, 3] and shape.logits == 4
    assert places.tolist() == [2, 3]  # of row 0's last token, and row 1's
    assert spans == [(0, 2, 0, 2)]  # two logits, about the prompt's tokens from the third on
    assert_parts(arrays, shape)


def assert_parts(arrays: StepArrays, shape: StepShape) -> None:
    """They travel as the buffer on the device is cut."""
    longs, ints = part_lengths(shape, len(TABLES))
    assert [len(array) for array in arrays] == longs + ints
    dtypes = [np.int64] * len(longs) + [np.int32] * len(ints)
    assert [array.dtype for array in arrays] == dtypes


def test_sizes_are_those_of_captures() -> None:
    padding = Padding(is_used=True, min_rows=2, max_rows=16, max_tokens=100)
    assert [padding.decode(rows, True).rows for rows in (1, 2, 9, 15)] == [2, 2, 10, 16]
    assert padding._replace(max_rows=1).decode(1, False) == StepShape(1, 1, 1, True, False)
    assert padding.mixed(9) == StepShape(10, 16, 16, False, False)
    assert padding.mixed(99).tokens == 100
    assert all(padding.is_padded(padding.mixed(tokens)) for tokens in range(1, 101))
    assert padding.is_padded(padding.decode(3, True))
    # Logits of a whole prompt, be there as many as rows.
    for logits in (7, 4, 16):
        assert not padding.is_padded(StepShape(9, 4, logits, False, False))


def test_what_is_never_captured_keeps_its_size() -> None:
    padding = Padding(is_used=False, min_rows=2, max_rows=16, max_tokens=100)
    assert padding.decode(9, True) == StepShape(9, 9, 9, True, True)
    assert not padding.is_padded(padding.decode(9, True))


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_tokens": 512},
        {"max_batch_tokens": 7},  # fewer than the model is tried with
        {"max_batch_tokens": 40, "max_running": 3},
        {"max_running": 1},
        {"max_pages": 22, "max_batch_tokens": 64, "swap_memory": 1 << 20},
    ],
)
def test_padded_steps_give_the_same_tokens(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_ahead(monkeypatch)
    monkeypatch.setattr(runner_module, "captures_on", lambda device: True)
    monkeypatch.setattr(Captures, "get", lambda *arguments: None)
    asked = prompts(14, seed=11)
    with engine_on("llama", **options) as engine:
        params = [
            SamplingParams(max_tokens=3 + 2 * number, temperature=0, n=1 + number % 2)
            for number in range(len(asked))
        ]
        for prompt, of_one, output in zip(
            asked, params, engine.generate(asked, params), strict=True
        ):
            for completion in output.outputs:
                check("llama", prompt, of_one.max_tokens, completion.token_ids)
