"""Log-probabilities against log_softmax, in slices and with equal logits."""

from __future__ import annotations

import pytest
import torch

from pageforge.engine import logprobs
from pageforge.engine.logprobs import row_slices, token_logprobs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(11, 300, generator=torch.manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 7, 300, 400])
@pytest.mark.parametrize("rows_a_slice", [1, 4, 11, 100])
def test_they_are_log_softmax_in_float32(logits, dtype, k, rows_a_slice, monkeypatch) -> None:
    monkeypatch.setattr(logprobs, "SLICE_ELEMENTS", rows_a_slice * 300)
    logits = logits.to(dtype)
    tokens = torch.arange(11) * 20
    found = token_logprobs(logits, tokens, k)
    reference = logits.float().log_softmax(-1)
    assert torch.equal(found.chosen, reference[torch.arange(11), tokens])
    # A stable sort keeps equal ones in the order of their ids; half precision has many.
    ids = reference.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(found.top_ids, ids)
    assert torch.equal(found.top, reference.gather(-1, ids))
    order = reference.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.ranks, (order == tokens[:, None]).nonzero()[:, 1] + 1)
    assert found.chosen.dtype == found.top.dtype == torch.float32


def test_equal_and_banned_tokens_are_in_order_of_their_ids() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, 2.0]])
    found = token_logprobs(logits, torch.tensor([0]), 5)
    assert found.top_ids.tolist() == [[4, 1, 3, 0, 2]]
    assert found.chosen.item() == -torch.inf and found.ranks.item() == 4
    assert torch.equal(
        token_logprobs(logits.expand(5, 5), found.top_ids[0], 0).ranks, torch.arange(1, 6)
    )
    certain = token_logprobs(torch.tensor([[-torch.inf, 3.0]]), torch.tensor([1]), 1)
    assert certain.top.tolist() == [[0.0]] and certain.top_ids.tolist() == [[1]]


def test_no_tokens() -> None:
    found = token_logprobs(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 2)
    assert found.chosen.shape == found.ranks.shape == (0,)
    assert found.top.shape == found.top_ids.shape == (0, 2)


def test_slices_are_bounded_and_cover_all_rows(monkeypatch) -> None:
    monkeypatch.setattr(logprobs, "SLICE_ELEMENTS", 1000)
    for num_rows in (0, 1, 9, 10, 11, 57):
        for vocab_size in (1, 99, 100, 1000, 5000):
            slices = row_slices(num_rows, vocab_size)
            assert [row for part in slices for row in range(num_rows)[part]] == [*range(num_rows)]
            assert slices
            for part in slices:
                assert (part.stop - part.start) * vocab_size <= max(1000, vocab_size)
