"""StepBuffer: what a step reads on the device is what was loaded, and lies where it lay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.served import engine_on, prompts

from pageforge import KVGeometry, PagePool
from pageforge.engine import SamplingParams
from pageforge.engine import runner as runner_module
from pageforge.engine.captures import Captures
from pageforge.engine.device_rows import DeviceRows
from pageforge.engine.step import Padding, StepArrays, StepShape, part_lengths
from pageforge.engine.step_buffer import HOST_BUFFERS, StepBuffer

DECODE = StepShape(3, 3, 3, True, True)
MIXED = StepShape(12, 4, 4, False, False)


def make() -> tuple[StepBuffer, DeviceRows]:
    pool = PagePool(KVGeometry.uniform(2, 2, 16, dtype="float32", page_size=8), max_pages=8)
    device_rows = DeviceRows(torch.device("cpu"), num_groups=1, max_rows=4, max_pages=5)
    padding = Padding(is_used=True, min_rows=1, max_rows=4, max_tokens=12)
    return StepBuffer(pool, device_rows, padding), device_rows


def numbers(shape: StepShape, seed: int) -> StepArrays:
    """As many as a step of this shape has, all different."""
    rng = np.random.default_rng(seed)
    longs, ints = part_lengths(shape, 1)
    return [
        rng.integers(1 << 30, size=length).astype(dtype)
        for lengths, dtype in ((longs, np.int64), (ints, np.int32))
        for length in lengths
    ]


def test_a_step_of_decoding_is_read_as_it_was_loaded() -> None:
    buffer, device_rows = make()
    tokens, positions, places, lengths, page_ids = arrays = numbers(DECODE, 0)
    inputs, logit_places, changes = buffer.load(DECODE, arrays)
    assert inputs.tokens.tolist() == tokens.tolist()
    assert inputs.positions.tolist() == positions.tolist()
    assert inputs.seq_lens.tolist() == lengths.tolist()
    assert inputs.cu_query_lens.tolist() == [0, 1, 2, 3]
    assert [part.tolist() for part in changes[0]] == [places.tolist(), page_ids.tolist()]
    assert inputs.slots is None and logit_places is None and inputs.max_query_len == 1
    assert inputs.page_tables[0].data_ptr() == device_rows.page_tables[0].data_ptr()
    assert inputs.page_tables[0].shape == (3, 5)


def test_a_mixed_step_is_read_as_it_was_loaded() -> None:
    buffer, _ = make()
    tokens, positions, slots, wanted, lengths, bounds = arrays = numbers(MIXED, 0)
    inputs, logit_places, changes = buffer.load(MIXED, arrays)
    assert inputs.tokens.tolist() == tokens.tolist()
    assert inputs.positions.tolist() == positions.tolist()
    assert inputs.slots is not None and inputs.slots[0].tolist() == slots.tolist()
    assert logit_places is not None and logit_places.tolist() == wanted.tolist()
    assert inputs.seq_lens.tolist() == lengths.tolist()
    assert inputs.cu_query_lens.tolist() == bounds.tolist()
    assert changes == [] and inputs.max_query_len == MIXED.tokens


def test_steps_of_one_shape_lie_in_the_same_place() -> None:
    buffer, _ = make()
    first = buffer.load(DECODE, numbers(DECODE, 0))
    buffer.load(MIXED, numbers(MIXED, 1))
    arrays = numbers(DECODE, 2)
    assert buffer.load(DECODE, arrays) is first
    assert first.inputs.tokens.tolist() == arrays[0].tolist()


def test_what_a_run_counted_up_is_set_back() -> None:
    buffer, _ = make()
    arrays = numbers(DECODE, 0)
    inputs = buffer.load(DECODE, arrays).inputs
    inputs.seq_lens += 1
    buffer.send()
    assert inputs.seq_lens.tolist() == arrays[3].tolist()


def test_the_step_in_flight_keeps_its_host_buffer() -> None:
    buffer, _ = make()
    hosts = []
    for seed in range(2 * HOST_BUFFERS):
        buffer.load(DECODE, numbers(DECODE, seed))
        assert buffer._sent is not None
        hosts.append(buffer._sent[1].data_ptr())
    assert len(set(hosts)) == HOST_BUFFERS and hosts[0] != hosts[1]


def test_it_can_be_loaded_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        buffer, _ = make()
    inputs = buffer.load(DECODE, numbers(DECODE, 0)).inputs
    inputs.seq_lens += 1


def test_steps_that_are_never_captured_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where prompts' logits are asked for, each step has a size of its own."""
    monkeypatch.setattr(runner_module, "captures_on", lambda device: True)
    monkeypatch.setattr(Captures, "get", lambda *arguments: None)
    with engine_on("llama") as engine:
        engine.generate(prompts(4), SamplingParams(max_tokens=3, temperature=0))
        before = set(engine._core.runner._buffer._loaded)
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
        for prompt in prompts(6, seed=3):
            engine.generate([prompt], params)
        assert before == set(engine._core.runner._buffer._loaded)
