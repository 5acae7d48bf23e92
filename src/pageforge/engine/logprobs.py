"""Log-probabilities of tokens, generated ones and the prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLICE_ELEMENTS = 1 << 24
"""Logits worked on at a time, so that float32 and int64 temporaries stay near 0.5 GB."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of T tokens: each one's own, and the k highest at its place.

    chosen: `[T]` float32. ranks: `[T]` int64, their places among all tokens, from 1. top_ids:
    `[T, k]` int64, the highest first. top: `[T, k]` float32. Of equal ones the lowest id is first.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def to_host(self) -> Logprobs:
        """The same on the host, complete once what was launched before on this stream is done.

        (torch gives pinned memory to what it copies there without waiting.)
        """
        parts = self.chosen, self.ranks, self.top_ids, self.top
        return Logprobs(*(part.to("cpu", non_blocking=True) for part in parts))

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """All tokens of `parts`, which have the same k."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.ranks for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top for part in parts]),
        )


@torch.no_grad()
def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities under `logits` `[T, V]` of `tokens` `[T]` int64 and of the top `k`.

    They are transformers' `log_softmax` in float32, taken a slice of T at a time. k is cut to V.
    """
    k = min(k, logits.shape[1])
    found = []
    for part in row_slices(*logits.shape):
        logprobs = logits[part].log_softmax(-1, dtype=torch.float32)
        top_ids = _top_ids(logprobs, k)
        chosen = logprobs.gather(-1, tokens[part, None])
        ranks = _ranks(logprobs, tokens[part, None], chosen)
        found.append(Logprobs(chosen[:, 0], ranks, top_ids, logprobs.gather(-1, top_ids)))
    return Logprobs.joined(found)


def row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    """Slices of rows, one at least, of SLICE_ELEMENTS logits at most (or of one row)."""
    step = max(1, SLICE_ELEMENTS // vocab_size)
    return [slice(low, min(low + step, num_rows)) for low in range(0, max(num_rows, 1), step)]


def _ranks(values: Tensor, ids: Tensor, of_ids: Tensor) -> Tensor:
    """Places of `ids` `[T, 1]`, whose values are `of_ids`, in the order of `_top_ids`: `[T]`."""
    is_lower = torch.arange(values.shape[1], device=values.device) < ids
    is_before = (values > of_ids) | ((values == of_ids) & is_lower)
    return is_before.sum(-1) + 1


def _top_ids(values: Tensor, k: int) -> Tensor:
    """Ids of the `k` highest of `values` `[T, V]` float32: `[T, k]`, of equal ones the lowest ids.

    `topk` alone leaves open which of equal ones it takes, and half precision has many. So each
    value's bits, made to order as integers do, become the high half of an int64, and its id turned
    round the low half: no two are equal.
    """
    if k == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    bits = (values + 0.0).view(torch.int32)  # of -0.0 it makes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats order backwards
    last = values.shape[1] - 1
    keys = (ordered.long() << 32) | torch.arange(last, -1, -1, device=values.device)
    return last - (keys.topk(k, -1).values & 0xFFFFFFFF)
