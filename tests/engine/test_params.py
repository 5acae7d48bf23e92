"""SamplingParams: what is accepted, how it is stored, and each kind of fault refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from pageforge.engine.params import GREEDY_BELOW, SamplingParams
from pageforge.errors import PageForgeError, ParamsError

NO_INTS = [True, False, 1.0, 2.5, "3", math.nan, math.inf, None, [1], np.bool_(True), np.float32(2)]
NO_FLOATS = [True, False, "0.5", math.nan, math.inf, -math.inf, None, [0.5], 1j, 10**400]

FAULTS = {
    "max_tokens": [*NO_INTS, -1, 2**63],
    "min_tokens": [*NO_INTS, -1, 2**63, 17],  # 17: above max_tokens
    "temperature": [*NO_FLOATS, -0.1, -1e-9],
    "top_p": [*NO_FLOATS, -0.01, 1.01, 90],
    "top_k": [*NO_INTS, -1, 2**63],
    "min_p": [*NO_FLOATS, -0.01, 1.01],
    "repetition_penalty": [*NO_FLOATS, 0, 0.0, -1.0],
    "presence_penalty": [*NO_FLOATS, -2.01, 2.01],
    "frequency_penalty": [*NO_FLOATS, -2.01, 2.01],
    "seed": [*(v for v in NO_INTS if v is not None), -1, 2**64],
    "n": [*NO_INTS, 0, -1],
    "stop": ["", ("a", ""), ["a", 1], b"a", 5, None, {"a"}, [None]],
    "stop_token_ids": [5, "5", None, [True], [1.0], [-1], ["a"], {1}, (None,)],
    "ignore_eos": [0, 1, None, "yes", np.bool_(True)],
    "logprobs": [*(v for v in NO_INTS if v is not None), -1],
    "prompt_logprobs": [*(v for v in NO_INTS if v is not None), -1],
    "logit_bias": [
        *([1, 2.0], 5, "a", [(1, 2.0)], (1, 2.0), ((1, 2.0, 3.0),), ((1, 1.0), (1, 2.0))),
        *({1: math.nan}, {1: math.inf}, {1: "2"}, {1: True}, {1: None}, {1: 10**400}),
        *({-1: 1.0}, {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, {2**63: 1.0}),
    ],
    "logits_processors": [len, None, "a", [1], (len, None), {len}],
}


def test_every_field_has_its_faults() -> None:
    assert set(FAULTS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in FAULTS.items() for value in values],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ParamsError) as refused:
        SamplingParams(**{name: value})
    message = str(refused.value)
    assert message.startswith(name)
    assert ": expected " in message and ", got " in message and "; " in message
    assert isinstance(refused.value, PageForgeError) and isinstance(refused.value, ValueError)


ACCEPTED = {
    "max_tokens": [0, 1, np.int64(5), 2**63 - 1],
    "min_tokens": [0, 16, np.int32(3)],
    "temperature": [0, 0.0, 1e-30, 1, 2.5, 1e300, np.float32(0.5), Fraction(1, 2)],
    "top_p": [0, 1, 0.9, np.float64(0.5)],
    "top_k": [0, 1, 10**9, 2**63 - 1],
    "min_p": [0, 1, 0.1],
    "repetition_penalty": [1e-300, 1.3, 1e300],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2, 2, 0.5],
    "seed": [None, 0, 2**64 - 1, np.uint64(2**64 - 1)],
    "n": [1, 8],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 5, 10**9],
    "prompt_logprobs": [None, 0, 5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values]
)
def test_a_value_is_stored_as_a_plain_number(name: str, value: object) -> None:
    stored = getattr(SamplingParams(**{name: value}), name)
    assert stored == value
    assert type(stored) in (int, float, bool, type(None))


@pytest.mark.parametrize(
    ("given", "stored"), [("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ((), ())]
)
def test_stop_strings_become_a_tuple(given: object, stored: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == stored


def test_lists_and_mappings_are_copied() -> None:
    bias, ids, processors = {3: 1, np.int64(4): -math.inf}, [1, np.int64(2)], [max]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids, logits_processors=processors)
    bias[5], processors[:] = 1.0, []
    ids.append(3)
    assert params.logit_bias == params.logit_bias_pairs == ((3, 1.0), (4, -math.inf))
    assert params.stop_token_ids == (1, 2)
    assert params.logits_processors == (max,)
    assert SamplingParams().logit_bias_pairs == ()


def test_params_are_values() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop="x", seed=3)
    assert params == SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop="x", seed=3)
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert twin == params and hash(twin) == hash(params)
    changed = dataclasses.replace(params, max_tokens=5)
    assert (changed.max_tokens, changed.logit_bias, changed.stop) == (5, ((1, 2.0),), ("x",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4


def test_unknown_names_and_positions_are_refused() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=5)
    with pytest.raises(TypeError):
        SamplingParams(5)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"),
    [(0, True), (GREEDY_BELOW * 0.99, True), (GREEDY_BELOW, False), (1.0, False)],
)
def test_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_what_the_sampler_asks() -> None:
    assert not SamplingParams().has_penalties and not SamplingParams().needs_host
    assert SamplingParams(logits_processors=[max]).needs_host
    for name, off in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
        assert SamplingParams(**{name: 0.5}).has_penalties
        assert not SamplingParams(**{name: off}).has_penalties
