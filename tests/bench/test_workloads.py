from __future__ import annotations

import statistics

import pytest

from pageforge.bench import workloads
from pageforge.bench.workloads import WORKLOADS, Size

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
