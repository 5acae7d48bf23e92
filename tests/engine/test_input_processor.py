"""InputProcessor: what becomes of prompts and params, and what is refused, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.served import Tokenizer

from pageforge.engine.input_processor import InputProcessor, as_prompts
from pageforge.engine.params import SamplingParams
from pageforge.engine.sampler import Sampler
from pageforge.errors import OutOfPages, ParamsError, RequestError

VOCABULARY = 40
MAX_TOKENS = 30


def processor(
    tokenizer: Any = None, *, eos: Any = None, most_pages: int = 100, vocabulary: int = VOCABULARY
) -> InputProcessor:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocabulary))
    generation_config = SimpleNamespace(eos_token_id=eos)
    model: Any = SimpleNamespace(config=config, generation_config=generation_config)
    return InputProcessor(
        model,
        tokenizer,
        Sampler(1, vocabulary, torch.device("cpu")),
        max_tokens=MAX_TOKENS,
        most_pages=most_pages,
        page_size=8,
    )


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6])], ids=type)
def test_token_ids_of_any_kind(ids: Any) -> None:
    request = processor().request(ids, None)
    assert (request.prompt, request.prompt_ids) == (None, [5, 6])
    assert request.params == SamplingParams(max_tokens=request.params.max_tokens)
    assert (request.priority, request.is_awaited, request.streams) == (0, True, False)


def test_text_goes_through_the_tokenizer() -> None:
    request = processor(Tokenizer()).request("FG", None, 3, is_awaited=False, streams=True)
    assert (request.prompt, request.prompt_ids) == ("FG", [5, 6])
    assert (request.priority, request.is_awaited, request.streams) == (3, False, True)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "match"),
    [
        ("FG", {}, RequestError, "token ids without a tokenizer, got text"),
        ([], {}, RequestError, "at least one token"),
        ([VOCABULARY], {}, RequestError, f"token ids from 0 to {VOCABULARY - 1}"),
        ([3, -1, 5], {}, RequestError, "got -1; use"),
        ([5] * (MAX_TOKENS + 1), {}, RequestError, f"at most {MAX_TOKENS} tokens"),
        ({"input_ids": [5]}, {}, RequestError, "text or a list of token ids"),
        ([5.5], {}, RequestError, "text or a list of token ids"),
        (5, {}, RequestError, "text or a list of token ids"),
        ([5], {"stop": ["a"]}, RequestError, "no strings without a tokenizer"),
        ([5], {"logit_bias": {VOCABULARY: 1.0}}, ParamsError, "logit_bias"),
    ],
)
def test_what_cannot_be_answered(
    prompt: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        processor().request(prompt, SamplingParams(**options))


def test_params_and_priorities_that_are_none() -> None:
    params: Any = {"max_tokens": 2}
    with pytest.raises(RequestError, match=r"^params: expected SamplingParams, got dict; "):
        processor().request([5], params)
    for priority in (1 << 22, -(1 << 22), True, 1.5, "high"):
        with pytest.raises(RequestError, match=r"^priority: expected"):
            processor().request([5], None, priority)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, MAX_TOKENS])
def test_tokens_end_where_the_models_positions_do(length: int) -> None:
    """The last token's own K/V are not needed: it may be one more."""
    params = SamplingParams(max_tokens=1000, min_tokens=900)
    cut = processor().request([5] * length, params).params
    assert cut.max_tokens == cut.min_tokens == MAX_TOKENS + 1 - length
    few = SamplingParams(max_tokens=MAX_TOKENS + 1 - length)
    assert processor().request([5] * length, few).params is few


def test_what_the_pool_can_never_hold() -> None:
    inputs = processor(most_pages=2)
    assert inputs.request([5] * 9, SamplingParams(max_tokens=8)).params.max_tokens == 8
    with pytest.raises(OutOfPages, match="lower max_tokens"):
        inputs.request([5] * 9, SamplingParams(max_tokens=9))


@pytest.mark.parametrize(
    ("eos", "of_tokenizer", "ids"),
    [(None, None, ()), (4, 7, (4,)), ([4, 9], 7, (4, 9)), (None, 7, (7,)), (0, 7, (0,))],
)
def test_what_ends_a_text(eos: Any, of_tokenizer: int | None, ids: tuple[int, ...]) -> None:
    inputs = processor(SimpleNamespace(eos_token_id=of_tokenizer), eos=eos)
    assert inputs.stop_ids(SamplingParams()) == ids
    both = SamplingParams(stop_token_ids=(8, 4))
    assert inputs.stop_ids(both) == tuple(dict.fromkeys((*ids, 8, 4)))
    ignoring = SamplingParams(stop_token_ids=(8, 4), ignore_eos=True)
    assert inputs.stop_ids(ignoring) == (8, 4)


@pytest.mark.parametrize(
    ("prompts", "several"),
    [
        ("FG", ["FG"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5, 6]], [[5, 6]]),
        (["FG", [5, 6]], ["FG", [5, 6]]),
        ([], []),
        (5, [5]),
        ({"input_ids": [5]}, [{"input_ids": [5]}]),
        ([5, "FG"], [[5, "FG"]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
        (iter([[5], [6]]), [[5], [6]]),
    ],
)
def test_one_prompt_or_several(prompts: Any, several: list[Any]) -> None:
    assert as_prompts(prompts) == several


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_rows_are_prompts_though_they_are_of_one_token(make: Any) -> None:
    assert [one.tolist() for one in as_prompts(make([[5], [6]]))] == [[5], [6]]
