"""record on CUDA: every replay leaves a row, and nobody waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.hf.tiny_models import make
from transformers import LlamaConfig, PreTrainedModel

import pageforge
from pageforge import Engine, PagedKVCache, PagePool, SamplingParams
from pageforge.probe import cache_argument

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    yield make(config, "eager").cuda()


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a sample is taken, whatever waits for the device raises."""
    sample = pageforge.Recording._sample

    def strict(recording: pageforge.Recording, when: str) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample(recording, when)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(pageforge.Recording, "_sample", strict)


@pytest.mark.usefixtures("without_waiting")
def test_every_replay_leaves_a_row(model: PreTrainedModel) -> None:
    ids = torch.randint(3, 101, (2, 13), device="cuda")
    with (
        PagePool.for_model(model, max_pages=100) as pool,
        PagedKVCache(pool) as cache,
        pageforge.fast_decode(model) as decode,
        pageforge.record(cache) as recorded,
    ):
        options = {cache_argument(model): cache, "max_new_tokens": 40, "do_sample": False}
        model.generate(ids, **options)
        assert decode.num_replays > 30
        in_use = pool.stats().bytes_mapped
        assert recorded.rows[-1]["bytes_mapped"] == in_use
    rows = recorded.rows
    assert [row["tokens"] for row in rows[1:-1]] == [2 * length for length in range(13, 53)]
    assert rows[-2]["total_tokens"] == 2 * 52
    assert all(row["bytes_mapped"] >= row["bytes_in_use"] for row in rows)


@pytest.mark.usefixtures("without_waiting")
def test_an_engine_and_its_pool(model: PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with Engine(model, max_pages=100) as engine:
        with pageforge.record(engine) as recorded, pageforge.record(engine._pool) as pages:
            engine.generate([[3, 4, 5], [6] * 20, [7]], params)
            stats = engine.stats()
        # The last step may only wait for tokens.
        assert recorded.num_steps - stats.num_steps in (0, 1)
        assert recorded.rows[-1]["total_tokens"] == stats.num_computed_tokens
        assert stats.num_replays > 0
    assert recorded.rows[-1]["pages_used"] == pages.rows[-1]["pages_used"] == 0
    assert max(row["pages_used"] for row in pages.rows) == 2 + 4 + 2  # of 32, 49 and 30 tokens
