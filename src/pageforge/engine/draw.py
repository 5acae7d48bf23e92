"""Random draws: one token a row out of those that temperature, top_k, top_p and min_p keep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Splitmix64's step: 2**64 over the golden ratio, made odd."""


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Draws of [0, 1), `[R]` float32: a hash of each row's seed and count of generated tokens.

    Nothing is carried along, so a request draws the same whatever runs beside it.
    """
    hashed = _mixed(_mixed(seeds + GOLDEN) + positions.astype(np.uint64) * GOLDEN)
    return (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request; the first has the request's own."""
    if index == 0:
        return seed
    return int(_mixed(np.array([seed], np.uint64) ^ (np.array([index], np.uint64) * GOLDEN))[0])


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def scaled(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Scores `[R, V]` float32: (logits - top) / temperature.

    top: `[R]`, each row's highest logit. temperature: `[R, 1]` float32.
    The highest score is 0, so that no temperature, however small, makes them overflow.
    """
    return (logits - top.float()[:, None]).div_(temperature)


def top_scores(scores: Tensor, num_candidates: int, top_k: Tensor, top_p: Tensor | None) -> Tensor:
    """`scores` `[R, V]` with -inf for the tokens that top_k and top_p drop.

    num_candidates: at least the largest top_k; below V only these are put in order.
    top_k: `[R, 1]` int64, 1 to V. top_p: `[R, 1]` float64, or None if no row has any.

    What is kept is the first `count` tokens in falling order, equal ones by their ids: those above
    the score of the last, and of those equal to it the first few.
    """
    if num_candidates < scores.shape[1]:
        ordered = scores.topk(num_candidates, -1).values
    else:
        ordered = scores.sort(-1, descending=True).values
    count = top_k
    if top_p is not None:
        dropped = torch.arange(num_candidates, device=scores.device) >= top_k
        shares = ordered.exp().masked_fill(dropped, 0.0)
        running = shares.cumsum(-1, dtype=torch.float64)
        # A token belongs while those before it fall short of top_p; the first always does.
        enough = (running - shares < top_p * running[:, -1:]).sum(-1, keepdim=True).clamp(min=1)
        count = torch.where(top_p < 1, torch.minimum(enough, top_k), top_k)
    last = ordered.gather(-1, count - 1)
    above, equal = scores > last, scores == last
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    return scores.masked_fill(~kept, -torch.inf)


def drawn(scores: Tensor, best: Tensor, uniform: Tensor, min_p: Tensor | None) -> Tensor:
    """Tokens `[R]` int64 drawn from softmax(scores) by inverting the distribution's sum.

    best: `[R]` int64, the top tokens. uniform: `[R]` float32 in [0, 1).
    min_p: `[R, 1]` float32, or None if no row has any.
    A logit of +inf beats all else: it left NaN as its score and -inf as the others'.
    """
    weights = scores.exp()  # in units of the top token's
    if min_p is not None:
        weights = weights.masked_fill(weights < min_p, 0.0)
    # In float64 the order in which a device adds does not show, which on CUDA depends on R.
    running = weights.cumsum(-1, dtype=torch.float64)
    target = running[:, -1:] * uniform[:, None]
    token = torch.searchsorted(running, target, right=True).clamp(max=scores.shape[1] - 1)
    # Sums made in parallel may rise by an ulp at a token of weight 0: never take one of those.
    is_kept = weights.gather(-1, token) > 0
    return torch.where(is_kept, token, best[:, None])[:, 0]
