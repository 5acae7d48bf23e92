"""Outputs: shortcuts, means, JSON and reprs."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from pageforge.engine.outputs import (
    Completion,
    Logprob,
    RequestOutput,
    StreamChunk,
    Timings,
    TokenLogprobs,
)

LOGPROBS = TokenLogprobs(Logprob(7, -0.5, rank=2), (Logprob(3, -0.25, rank=1), Logprob(7, -0.5, 2)))
FIRST = Completion(0, [7, 8], "Hello", "stop", stop="\n", logprobs=[LOGPROBS, LOGPROBS])
SECOND = Completion(1, [9], "Bye", "length")
TIMINGS = Timings(total=3.0, queued=0.5, first_token=1.0, num_tokens=5)
OUTPUT = RequestOutput("a", "Say", [1, 2], [FIRST, SECOND], TIMINGS, num_cached_tokens=1)


def test_shortcuts_are_those_of_the_first_completion() -> None:
    assert OUTPUT.token_ids == [7, 8]
    assert OUTPUT.text == "Hello"
    assert OUTPUT.finish_reason == "stop"
    assert OUTPUT.logprobs == [LOGPROBS, LOGPROBS]
    assert OUTPUT.error is None


def test_the_error_is_the_first_of_any_completion() -> None:
    failed = [replace(SECOND, index=i, finish_reason="error", error=OSError(i)) for i in (1, 2)]
    assert replace(OUTPUT, outputs=[FIRST, *failed]).error is failed[0].error


@pytest.mark.parametrize(
    ("timings", "per_token"),
    [
        (TIMINGS, 0.5),  # four gaps in two seconds
        (replace(TIMINGS, num_tokens=2), 2.0),
        (replace(TIMINGS, num_tokens=1), None),
        (replace(TIMINGS, num_tokens=0), None),
        (Timings(total=3.0), None),
    ],
)
def test_the_time_of_a_token_is_the_mean_gap(timings: Timings, per_token: float | None) -> None:
    assert timings.per_token == per_token


def test_json_says_everything() -> None:
    logprobs = {
        "token_id": 7,
        "logprob": -0.5,
        "rank": 2,
        "top": [
            {"token_id": 3, "logprob": -0.25, "rank": 1},
            {"token_id": 7, "logprob": -0.5, "rank": 2},
        ],
    }
    output = replace(OUTPUT, prompt_logprobs=[None, LOGPROBS])
    line = json.dumps(output.to_dict(), allow_nan=False)
    assert json.loads(line) == {
        "id": "a",
        "prompt": "Say",
        "prompt_token_ids": [1, 2],
        "outputs": [
            {
                "index": 0,
                "text": "Hello",
                "token_ids": [7, 8],
                "finish_reason": "stop",
                "stop": "\n",
                "logprobs": [logprobs, logprobs],
                "error": None,
            },
            {
                "index": 1,
                "text": "Bye",
                "token_ids": [9],
                "finish_reason": "length",
                "stop": None,
                "logprobs": None,
                "error": None,
            },
        ],
        "prompt_logprobs": [None, logprobs],
        "timings": {"queued": 0.5, "first_token": 1.0, "per_token": 0.5, "total": 3.0},
        "num_cached_tokens": 1,
    }


def test_json_of_a_request_that_failed_before_it_began() -> None:
    error = ValueError("max_tokens: expected 1 or more")
    failed = Completion(0, [], None, "error", error=error)
    data = RequestOutput("a", None, [1], [failed], Timings(total=0.25)).to_dict()
    assert data["outputs"][0]["error"] == "ValueError: max_tokens: expected 1 or more"
    assert data["timings"] == {
        "queued": None,
        "first_token": None,
        "per_token": None,
        "total": 0.25,
    }
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_json_has_no_number_for_a_token_that_was_ruled_out(logprob: float) -> None:
    logprobs = TokenLogprobs(Logprob(1, logprob, 1), (Logprob(1, logprob, 1),))
    data = replace(FIRST, logprobs=[logprobs]).to_dict()
    assert data["logprobs"][0]["logprob"] is data["logprobs"][0]["top"][0]["logprob"] is None
    json.dumps(data, allow_nan=False)


def test_json_is_apart_from_the_output() -> None:
    FIRST.to_dict()["token_ids"].clear()
    OUTPUT.to_dict()["prompt_token_ids"].clear()
    assert FIRST.token_ids == [7, 8] and OUTPUT.prompt_token_ids == [1, 2]


CHUNK = StreamChunk("a", 1, "Hel", [7])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (FIRST, r"Completion(0, 2 tokens, 'Hello', stop at '\n')"),
        (SECOND, "Completion(1, 1 token, 'Bye', length)"),
        (Completion(0, [5] * 3, None, "stop", stop=5), "Completion(0, 3 tokens, stop at 5)"),
        (
            Completion(0, [], "", "error", error=OSError("gone")),
            "Completion(0, 0 tokens, '', error: OSError('gone'))",
        ),
        (
            replace(SECOND, text="x" * 41),
            f"Completion(1, 1 token, '{'x' * 37}...', length)",
        ),
        (replace(SECOND, text="x" * 40), f"Completion(1, 1 token, '{'x' * 40}', length)"),
        (OUTPUT, f"RequestOutput('a', 2 prompt tokens, [{FIRST!r}, {SECOND!r}])"),
        (CHUNK, "StreamChunk('a', 1, 1 token, 'Hel')"),
        (
            replace(CHUNK, text=None, finish_reason="length"),
            "StreamChunk('a', 1, 1 token, length)",
        ),
    ],
)
def test_reprs_are_short(value: object, shown: str) -> None:
    assert repr(value) == shown


@pytest.mark.parametrize("value", [LOGPROBS, TIMINGS, FIRST, OUTPUT, CHUNK])
def test_outputs_are_frozen(value) -> None:
    name = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, getattr(value, name))
