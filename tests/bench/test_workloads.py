from __future__ import annotations

import statistics

import pytest

from pageforge.bench import workloads
from pageforge.bench.workloads import QUANTILES, TRACES, WORKLOADS, Size

VOCAB = 50257


def made(name: str, size: Size, repeat: int = 0) -> list[workloads.Job]:
    return workloads.jobs(name, size, vocab_size=VOCAB, repeat=repeat)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("size", [Size(8192), Size(1024), Size(128, shrink=8), Size(40, shrink=16)])
def test_jobs_fit_the_model_and_are_the_same_every_time(name: str, size: Size) -> None:
    jobs = made(name, size)
    assert jobs == made(name, size)
    assert jobs
    for job in jobs:
        assert len(job.prompt) >= 1
        assert job.new_tokens >= 1
        assert job.num_tokens <= size.positions
        assert 0 <= min(job.prompt) <= max(job.prompt) < VOCAB


@pytest.mark.parametrize("name", WORKLOADS)
def test_repeats_have_the_same_lengths_and_other_prompts(name: str) -> None:
    first, second = made(name, Size(8192)), made(name, Size(8192), repeat=1)
    assert [(len(j.prompt), j.new_tokens, j.n) for j in first] == [
        (len(j.prompt), j.new_tokens, j.n) for j in second
    ]
    longer = [at for at, job in enumerate(first) if len(job.prompt) > 8]
    assert longer
    assert all(first[at].prompt[:8] != second[at].prompt[:8] for at in longer)


def test_uniform_is_what_it_says() -> None:
    jobs = made("uniform", Size(1024))
    lengths = [len(job.prompt) for job in jobs]
    assert len(jobs) == 256
    assert 16 <= min(lengths) < 20
    assert 252 < max(lengths) <= 256
    assert {(job.new_tokens, job.n) for job in jobs} == {(128, 1)}
    assert len(made("uniform", Size(1024, requests=32))) == 32


def test_sharegpt_has_the_published_means() -> None:
    jobs = made("sharegpt", Size(8192))
    lengths, new = [len(job.prompt) for job in jobs], [job.new_tokens for job in jobs]
    assert len(jobs) == 512
    assert statistics.fmean(lengths) == pytest.approx(229.7, rel=0.1)
    assert statistics.fmean(new) == pytest.approx(203.1, rel=0.1)
    assert min(lengths) >= 4
    assert max(lengths) <= 1024
    assert min(new) >= 4
    assert max(new) <= 1500
    assert max(job.num_tokens for job in jobs) <= 2048


@pytest.mark.parametrize(("positions", "shared"), [(8192, 2048), (1024, 896)])
def test_all_prompts_of_a_shared_prefix_begin_alike_and_end_apart(
    positions: int, shared: int
) -> None:
    jobs = made("shared-prefix", Size(positions))
    assert len(jobs) == 1024
    assert len({tuple(job.prompt[:shared]) for job in jobs}) == 1
    own = [job.prompt[shared:] for job in jobs]
    assert len({tuple(tokens[:4]) for tokens in own}) == 1024
    assert (min(map(len, own)), max(map(len, own))) == (16, 64)
    assert {job.new_tokens for job in jobs} == {16}


def test_a_rollout_has_eight_samples() -> None:
    jobs = made("rollout", Size(1024))
    assert len(jobs) == 64
    assert {job.n for job in jobs} == {8}
    assert workloads.new_tokens(jobs) == 64 * 8 * 128


def test_steady_requests_run_as_long_as_asked() -> None:
    jobs = workloads.steady(50, 80, Size(128), vocab_size=VOCAB)
    assert len(jobs) == 50
    assert {job.new_tokens for job in jobs} == {80}
    assert max(job.num_tokens for job in jobs) <= 128


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "tolerance"),
    [
        ("sharegpt-4", 228.4, 438.7, 0.1),
        ("azure-chat", 1154.7, 211.1, 0.02),
        ("azure-code", 2047.8, 27.9, 0.2),  # one answer in a hundred has 251 to 1,899 tokens
        ("arxiv", 2588.1, 232.9, 0.05),  # 291.4 where prompts and answers go together
    ],
)
def test_traces_have_the_published_means(
    name: str, prompt: float, answer: float, tolerance: float
) -> None:
    jobs = made(name, Size(1 << 20))
    assert len(jobs) == 1024
    assert statistics.fmean(len(job.prompt) for job in jobs) == pytest.approx(prompt, rel=tolerance)
    assert statistics.fmean(job.new_tokens for job in jobs) == pytest.approx(answer, rel=tolerance)
    assert workloads.lengths(name, Size(1 << 20)).divisor == 1


@pytest.mark.parametrize("name", TRACES)
def test_traces_have_the_published_quantiles(name: str) -> None:
    trace, jobs = TRACES[name], made(name, Size(1 << 20))
    ordered = sorted(len(job.prompt) for job in jobs)
    for share, published in zip(QUANTILES, trace.prompt, strict=True):
        assert ordered[round(share * 1023)] == pytest.approx(published, rel=0.06, abs=1)
    assert max(job.num_tokens for job in jobs) <= trace.most


def test_a_trace_that_is_too_long_is_divided() -> None:
    """An arXiv paper and its summary have up to 4,096 tokens."""
    whole, divided = (workloads.lengths("arxiv", Size(positions)) for positions in (8192, 1024))
    assert (whole.divisor, divided.divisor) == (1, 4)
    assert (divided.own == whole.own // 4)[whole.own >= 4].all()
    total = divided.own + divided.new
    assert total.max() <= 1024
    trial = workloads.lengths("arxiv", Size(8192, shrink=16, requests=5))
    assert trial.divisor == 16
    assert (trial.own == whole.own[:5] // 16).all()


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (Size(64), 256),
        (Size(64, shrink=8), 32),
        (Size(64, shrink=8, most=10), 10),
        (Size(64, shrink=1000, most=10), 2),
        (Size(64, shrink=8, most=10, requests=50), 50),
    ],
)
def test_how_many_requests_there_are(size: Size, count: int) -> None:
    assert size.count(256) == count
