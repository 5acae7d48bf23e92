"""The sampler against a slow reference of one row at a time, alone and in mixed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from pageforge.engine import logprobs, sampler
from pageforge.engine.draw import uniforms
from pageforge.engine.params import SamplingParams
from pageforge.engine.sampler import Sampled, Sampler
from pageforge.errors import ParamsError, ShapeError

CPU = torch.device("cpu")
VOCAB = 50
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Request:
    """A sequence as the engine would have it."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    eos_ids: tuple[int, ...] = (0,)
    seed: int = 0


def float32(value: float) -> np.float32:
    """`value`, or the nearest number that float32 holds."""
    limits = np.finfo(np.float32)
    return np.float32(np.clip(value, float(limits.min), float(limits.max)))


def reference_token(logits: np.ndarray, request: Request) -> int:
    """One row's token from float32 `logits`, step by step as SamplingParams describes them."""
    params, logits = request.params, logits.astype(np.float32)
    for token in {*request.prompt, *request.output}:
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    for token in set(request.output):
        logits[token] -= np.float32(params.presence_penalty)
        logits[token] -= np.float32(params.frequency_penalty) * request.output.count(token)
    for token, bias in params.logit_bias_pairs:
        logits[token] += bias if bias == -math.inf else float32(bias)
    if len(request.output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else request.eos_ids)):
            logits[token] = -np.inf
    for processor in params.logits_processors:
        logits = processor(list(request.output), torch.from_numpy(logits)).numpy()
    if params.is_greedy:
        return int(logits.argmax())
    scores = (logits - logits.max()) / float32(params.temperature)
    order = np.argsort(-scores, kind="stable")
    order = order[: params.top_k or len(order)]
    shares = np.exp(scores[order])
    if params.top_p < 1:
        before = np.cumsum(shares, dtype=np.float64) - shares
        order = order[: max(1, int((before < params.top_p * shares.sum(dtype=np.float64)).sum()))]
    weights = np.zeros(len(scores))
    weights[order] = np.exp(scores[order])
    weights[weights < np.float32(params.min_p)] = 0
    running = np.cumsum(weights)
    draw = uniforms(np.array([request.seed], np.uint64), np.array([len(request.output)]))[0]
    return int(np.searchsorted(running, running[-1] * float(draw), side="right"))


def sampler_of(requests: Sequence[Request], vocab_size: int = VOCAB, max_rows: int = 64) -> Sampler:
    """One whose row `i` has `requests[i]`."""
    sampler = Sampler(max_rows, vocab_size, CPU)
    for row, request in enumerate(requests):
        place(sampler, row, request)
    return sampler


def place(sampler: Sampler, row: int, request: Request) -> None:
    sampler.set_row(
        row,
        request.params,
        prompt_tokens=request.prompt,
        output_tokens=request.output,
        eos_ids=request.eos_ids,
    )


def sample(sampler: Sampler, logits: torch.Tensor, placed: dict[int, Request]) -> Sampled:
    """A step of the rows `placed`, row -> request, in its order; outputs are left as they are."""
    requests = list(placed.values())
    counts = np.array([len(request.output) for request in requests], np.int64)
    seeds = np.array([request.seed for request in requests], np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, counts))
    rows = np.array(list(placed), np.int64)
    return sampler.sample(logits, rows, uniform, counts, lambda row: list(placed[row].output))


def sample_all(logits: torch.Tensor, requests: Sequence[Request], vocab_size=VOCAB) -> Sampled:
    return sample(sampler_of(requests, vocab_size), logits, dict(enumerate(requests)))


def random_requests(params: SamplingParams, count: int = 24) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            params,
            prompt=rng.integers(0, VOCAB, 9).tolist(),
            output=rng.integers(0, VOCAB, rng.integers(0, 6)).tolist(),
            seed=int(rng.integers(2**63)),
        )
        for _ in range(count)
    ]


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.manual_seed(seed))


def only_even(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[1::2] = -torch.inf  # in place
    return logits


def shift_by_output(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(len(tokens))


OPTIONS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "cool": {"temperature": 0.4},
    "hot": {"temperature": 5.0},
    "barely not greedy": {"temperature": 1e-5},
    "hotter than float32 holds": {"temperature": 1e300},
    "top_p": {"top_p": 0.6},
    "top_p 0": {"top_p": 0.0, "temperature": 2.0},
    "top_p almost 1": {"top_p": 0.999999},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": VOCAB},
    "top_k beyond": {"top_k": 10**9},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0, "temperature": 0},
    "all penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.7,
        "top_p": 0.9,
    },
    "bias": {"logit_bias": {3: 2.5, 7: -4.0}},
    "bias beyond float32": {"logit_bias": {3: 1e300}},
    "banned": {"logit_bias": {i: -math.inf for i in range(25)}},
    "banned and forced": {"logit_bias": {1: -math.inf, 2: 100.0}, "temperature": 0},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [4, 5], "logit_bias": {0: 9.0, 4: 8.0}},
    "min_tokens, no eos": {"min_tokens": 3, "ignore_eos": True, "logit_bias": {0: 4.0}},
    "a processor": {"logits_processors": [only_even]},
    "processors": {"logits_processors": [only_even, shift_by_output], "temperature": 0},
    "logprobs": {"logprobs": 4},
    "greedy with logprobs": {"temperature": 0, "logprobs": 0},
}


@pytest.fixture(params=["whole", "slices"])
def slicing(request, monkeypatch) -> None:
    """With all rows at once, and five at a time."""
    if request.param == "slices":
        monkeypatch.setattr(logprobs, "SLICE_ELEMENTS", 5 * VOCAB)


@pytest.fixture(params=["topk", "sort"])
def ordering(request, monkeypatch) -> None:
    """With top_k's candidates found by topk, and by a sort."""
    if request.param == "sort":
        monkeypatch.setattr(sampler, "MAX_TOPK", 0)


def references(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    rows = logits.float().numpy()
    return [reference_token(row, request) for row, request in zip(rows, requests, strict=True)]


@pytest.mark.usefixtures("slicing", "ordering")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_alone(options: dict[str, object], dtype: torch.dtype) -> None:
    requests = random_requests(SamplingParams(**options))
    logits = random_logits(len(requests)).to(dtype)
    given = logits.clone()
    sampled = sample_all(logits, requests)
    assert sampled.tokens.tolist() == references(logits, requests)
    assert sampled.tokens.dtype == torch.int64 and not sampled.bad.any() and not sampled.errors
    assert torch.equal(logits, given)


def mixed_requests() -> list[Request]:
    requests = random_requests(SamplingParams(), 2 * len(OPTIONS))
    for index, request in enumerate(requests):
        request.params = SamplingParams(**list(OPTIONS.values())[index % len(OPTIONS)])
    return requests


@pytest.mark.usefixtures("slicing", "ordering")
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options_mixed_in_one_batch(dtype: torch.dtype) -> None:
    requests = mixed_requests()
    logits = random_logits(len(requests)).to(dtype)
    assert sample_all(logits, requests).tokens.tolist() == references(logits, requests)


def test_a_vocabulary_larger_than_topk_serves() -> None:
    vocab_size = sampler.MAX_TOPK + 500
    params = [
        *(SamplingParams(top_k=k) for k in (3, sampler.MAX_TOPK, sampler.MAX_TOPK + 1)),
        *(SamplingParams(top_p=p, temperature=3.0) for p in (0.5, 0.95)),
        *(SamplingParams(top_k=40, top_p=0.7), SamplingParams(), SamplingParams(temperature=0)),
    ]
    requests = random_requests(params[0], 8 * len(params))
    for request, own in zip(requests, params * 8, strict=True):
        request.params = own
    logits = random_logits(len(requests), vocab_size)
    assert sample_all(logits, requests, vocab_size).tokens.tolist() == references(logits, requests)


def test_a_row_draws_the_same_whatever_is_beside_it() -> None:
    requests = mixed_requests()
    logits = random_logits(len(requests))
    together = sample_all(logits, requests).tokens
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 30, len(requests)):
        order = rng.permutation(len(requests))[:count]
        placed = {int(index): requests[index] for index in order}  # rows in another order
        sampled = sample(sampler_of(requests), logits[order], placed)
        assert torch.equal(sampled.tokens, together[order])
        elsewhere = [requests[index] for index in order]  # and in other rows
        assert torch.equal(sample_all(logits[order], elsewhere).tokens, together[order])


def test_many_steps_with_rows_that_come_move_and_go() -> None:
    # What was worked out for one batch must not be used for another; counts follow their rows.
    rng = np.random.default_rng(1)
    waiting = mixed_requests()
    for request in waiting:
        request.output = []
    batch = Sampler(16, VOCAB, CPU)
    placed: dict[int, Request] = {}
    preempted: list[Request] = []
    num_checked = 0
    for step in range(150):
        free = [row for row in range(16) if row not in placed]
        if free and (waiting or preempted) and rng.random() < 0.6:
            source = preempted if preempted and rng.random() < 0.5 else waiting or preempted
            row = free.pop(0)
            placed[row] = source.pop()
            place(batch, row, placed[row])
        if placed and free and rng.random() < 0.2:
            row = int(rng.choice(list(placed)))
            placed[free[-1]] = placed.pop(row)
            batch.move_row(row, free[-1])
        if len(placed) > 8 and rng.random() < 0.3:
            row = int(rng.choice(list(placed)))
            preempted.append(placed.pop(row))
            batch.clear_row(row)
        if not placed:
            continue
        rows = [row for row in placed if rng.random() < 0.9]  # some have no token this step
        chosen = {row: placed[row] for row in rows}
        logits = random_logits(len(chosen), seed=step)
        expected = references(logits, list(chosen.values()))
        assert sample(batch, logits, chosen).tokens.tolist() == expected
        num_checked += len(expected)
        for request, token in zip(chosen.values(), expected, strict=True):
            request.output.append(token)
    assert num_checked > 1000


@pytest.mark.parametrize("change", ["set", "clear and set", "move"])
def test_the_same_rows_with_other_sequences(change: str) -> None:
    first, second = random_requests(SamplingParams(temperature=0), 2)
    second.params = SamplingParams(temperature=0, logit_bias={9: 1000.0})
    batch = sampler_of([first, second])
    logits = random_logits(1)
    assert sample(batch, logits, {0: first}).tokens.tolist() == references(logits, [first])
    if change != "set":
        batch.clear_row(0)
    if change == "move":
        batch.move_row(1, 0)
    else:
        place(batch, 0, second)
    assert sample(batch, logits, {0: second}).tokens.tolist() == [9]


def test_all_rows_can_be_left_at_once() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    before, requests = random_requests(params, 4), random_requests(params, 8)[4:]
    batch = sampler_of(before)
    num_slots = len(batch._counts.in_output)
    batch.clear()
    assert batch.takes_best(np.arange(4))
    for row, request in enumerate(requests):
        place(batch, row, request)
    assert len(batch._counts.in_output) == num_slots
    logits = random_logits(4)
    tokens = sample(batch, logits, dict(enumerate(requests))).tokens.tolist()
    assert tokens == references(logits, requests)


def test_the_engine_may_write_its_rows_in_place() -> None:
    requests = random_requests(SamplingParams(temperature=0), 2)
    requests[1].params = SamplingParams(temperature=0, logit_bias={9: 1000.0})
    batch = sampler_of(requests)
    rows, counts = np.array([0]), np.array([0])
    batch.sample(random_logits(1), rows, torch.zeros(1), counts, lambda row: [])
    rows[0] = 1
    sampled = batch.sample(random_logits(1), rows, torch.zeros(1), counts, lambda row: [])
    assert sampled.tokens.tolist() == [9]


def test_min_tokens_end_in_the_midst_of_a_steady_batch() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, logit_bias={0: 100.0})
    request = Request(params, prompt=[1])
    batch = sampler_of([request])
    for _ in range(5):
        token = sample(batch, random_logits(1), {0: request}).tokens.item()
        request.output.append(token)
    assert [token == 0 for token in request.output] == [False, False, False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_greedy_takes_the_lowest_id(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for vocab_size in (3, 50, 1023, 5000):
        logits = torch.from_numpy(rng.integers(-3, 4, (40, vocab_size))).to(dtype)
        requests = random_requests(SamplingParams(temperature=0), 40)
        greedy = sample_all(logits, requests, vocab_size).tokens
        assert greedy.tolist() == logits.float().numpy().argmax(1).tolist()


@pytest.mark.usefixtures("ordering")
@pytest.mark.parametrize("options", ["plain", "top_k", "top_p", "min_p", "all three"])
def test_many_equal_logits(options: str) -> None:
    requests = random_requests(SamplingParams(**OPTIONS[options]), 60)
    logits = random_logits(60).div(3).round()
    assert sample_all(logits, requests).tokens.tolist() == references(logits, requests)


KINDS = ["greedy", "plain", "barely not greedy", "top_p", "top_p 0", "top_k", "min_p", "all three"]


@pytest.mark.usefixtures("ordering")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "all penalties", "bias", "logprobs"])
def test_rows_without_a_distribution_are_reported_alone(kind: str, dtype: torch.dtype) -> None:
    requests = random_requests(SamplingParams(**OPTIONS[kind]), 6)
    logits = random_logits(6)
    expected = sample_all(logits.to(dtype), requests).tokens
    logits[1, 30] = torch.nan
    logits[3] = torch.nan
    logits[4] = -torch.inf
    sampled = sample_all(logits.to(dtype), requests)
    assert sampled.bad.tolist() == [False, True, False, True, True, False]
    assert torch.equal(sampled.tokens[~sampled.bad], expected[~sampled.bad])
    assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB)).all()


@pytest.mark.usefixtures("ordering")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "all penalties", "bias"])
def test_an_infinite_logit_wins(kind: str, dtype: torch.dtype) -> None:
    requests = random_requests(SamplingParams(**OPTIONS[kind]), 20)
    logits = random_logits(20)
    winners = torch.arange(20) + 10
    logits[torch.arange(20), winners] = torch.inf
    logits[:, 5] = -torch.inf
    sampled = sample_all(logits.to(dtype), requests)
    assert torch.equal(sampled.tokens, winners) and not sampled.bad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sole_token_left_is_taken(kind: str) -> None:
    bias = {i: -math.inf for i in range(VOCAB) if i != 17}
    requests = random_requests(replace(SamplingParams(**OPTIONS[kind]), logit_bias=bias))
    assert set(sample_all(random_logits(24), requests).tokens.tolist()) == {17}
    nothing = replace(requests[0].params, logit_bias={i: -math.inf for i in range(VOCAB)})
    requests[2].params = nothing
    assert sample_all(random_logits(24), requests).bad.nonzero().flatten().tolist() == [2]


def raises(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits.fill_(torch.nan)
    raise RuntimeError("the grammar is over")


def returns(value: object) -> Callable[[list[int], torch.Tensor], object]:
    return lambda tokens, logits: value


@pytest.mark.usefixtures("slicing")
@pytest.mark.parametrize(
    ("processor", "error"),
    [
        (raises, RuntimeError),
        (returns(None), ShapeError),
        (returns([0.0] * VOCAB), ShapeError),
        (returns(torch.zeros(VOCAB + 1)), ShapeError),
        (returns(torch.zeros(1)), ShapeError),  # it would broadcast
        (lambda tokens: tokens, TypeError),
    ],
)
def test_a_processor_that_fails_fails_its_row_alone(processor, error: type[Exception]) -> None:
    requests = random_requests(SamplingParams(logits_processors=[only_even]), 12)
    logits = random_logits(12)
    expected = sample_all(logits, requests).tokens
    for index in (2, 9):
        requests[index].params = SamplingParams(logits_processors=[only_even, processor])
    sampled = sample_all(logits, requests)
    assert {index: type(raised) for index, raised in sampled.errors.items()} == {2: error, 9: error}
    assert sampled.bad.nonzero().flatten().tolist() == [2, 9]
    assert torch.equal(sampled.tokens[~sampled.bad], expected[~sampled.bad])


def test_a_processor_sees_its_own_tokens_and_float32_logits() -> None:
    seen = []

    def look(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((tokens, logits.dtype, tuple(logits.shape)))
        return logits

    requests = random_requests(SamplingParams(), 4)
    requests[3].params = requests[1].params = SamplingParams(logits_processors=[look])
    sample_all(random_logits(4).bfloat16(), requests)
    assert seen == [(requests[i].output, torch.float32, (VOCAB,)) for i in (1, 3)]


@pytest.mark.usefixtures("slicing")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_models_own(dtype: torch.dtype) -> None:
    requests = random_requests(SamplingParams(temperature=2.0, repetition_penalty=1.5, top_k=5))
    asked = {1: 0, 4: 3, 5: 2, 17: 10**6, 23: 0}
    for index, k in asked.items():
        requests[index].params = replace(requests[index].params, logprobs=k)
    logits = random_logits(len(requests)).to(dtype)
    sampled = sample_all(logits, requests)
    reference = logits.float().log_softmax(-1)[list(asked)]
    tokens = sampled.tokens[list(asked)]
    assert sampled.logprob_indices.tolist() == list(asked)
    assert torch.equal(sampled.logprobs.chosen, reference.gather(-1, tokens[:, None])[:, 0])
    assert torch.equal(sampled.logprobs.top, reference.sort(-1, descending=True).values)
    assert torch.equal(sampled.logprobs.top, reference.gather(-1, sampled.logprobs.top_ids))
    assert tokens.tolist() == [references(logits, requests)[index] for index in asked]


def test_no_logprobs_where_nobody_asks() -> None:
    sampled = sample_all(random_logits(3), random_requests(SamplingParams(), 3))
    assert sampled.logprobs is None and not len(sampled.logprob_indices)


def test_whether_anybody_draws() -> None:
    requests = random_requests(SamplingParams(temperature=0), 3)
    requests[1].params = SamplingParams()
    batch = sampler_of(requests)
    rows = np.arange(3)
    assert [batch.draws(rows[i : i + 1]) for i in range(3)] == [False, True, False]
    assert batch.draws(rows)
    batch.clear_row(1)
    batch.move_row(2, 1)
    assert not batch.draws(rows)


def test_biases_beyond_the_vocabulary_are_refused_before_anything_changes() -> None:
    request = Request(SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[1, 2])
    batch = sampler_of([request])
    wrong = SamplingParams(logit_bias={1: 1.0, VOCAB: 1.0}, presence_penalty=1.0)
    for refuse in (
        lambda: batch.check(wrong),
        lambda: batch.set_row(0, wrong, prompt_tokens=[3]),
    ):
        with pytest.raises(ParamsError, match=rf"^logit_bias: .* below {VOCAB}, got \[{VOCAB}\]"):
            refuse()
    logits = random_logits(1)
    assert sample(batch, logits, {0: request}).tokens.tolist() == references(logits, [request])


def test_ids_that_end_a_text_may_be_beyond_the_vocabulary() -> None:
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=[VOCAB + 3, 4])
    request = Request(params, prompt=[VOCAB + 9], eos_ids=(VOCAB,))
    logits = random_logits(1)
    logits[0, 4] = 99.0
    assert (
        sample_all(logits, [request]).tokens.item()
        == logits[0].index_fill(0, torch.tensor([4]), -torch.inf).argmax()
    )


@pytest.mark.parametrize("shape", [(2, VOCAB), (4, VOCAB), (3, VOCAB + 1), (3 * VOCAB,)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^logits: "):
        sample_all(torch.zeros(shape), random_requests(SamplingParams(), 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_may_be_strided(dtype: torch.dtype) -> None:
    requests = mixed_requests()
    logits = random_logits(len(requests)).to(dtype)
    expected = references(logits, requests)
    padded = torch.cat([logits, logits], 1)[:, :VOCAB]
    assert sample_all(padded, requests).tokens.tolist() == expected
    assert sample_all(logits.t().contiguous().t(), requests).tokens.tolist() == expected


def test_no_rows() -> None:
    sampled = sample(Sampler(4, VOCAB, CPU), torch.empty(0, VOCAB), {})
    assert sampled.tokens.shape == sampled.bad.shape == (0,)


def test_a_step_of_the_model_in_inference_mode_or_with_grad() -> None:
    requests = mixed_requests()
    logits = random_logits(len(requests))
    expected = sample_all(logits, requests).tokens
    with torch.inference_mode():
        assert torch.equal(sample_all(logits.clone(), requests).tokens, expected)
    assert torch.equal(sample_all(logits.requires_grad_(), requests).tokens, expected)
