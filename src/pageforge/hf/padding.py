"""Left padding, as 2-D attention masks show it."""

from __future__ import annotations

import torch
from torch import Tensor

from pageforge.errors import ShapeError, expected


def leading_zeros(mask: Tensor) -> tuple[int, ...]:
    """Zeros before the first one in each row of a mask `[S, T]`. Raises ShapeError."""
    if mask.dim() != 2:
        raise ShapeError(
            expected("attention_mask", "[batch, tokens]", list(mask.shape), "pass a 2-D mask")
        )
    leading = (mask != 0).long().cumsum(-1) == 0
    return tuple(leading.sum(-1).tolist())


def left_padding(mask: Tensor) -> tuple[int, ...] | None:
    """Zeros before the ones in each row of a bool mask `[S, T]`; None where zeros come later too.

    Waits for the device once.
    """
    ones = mask.sum(-1)
    rises = (mask[:, :-1] <= mask[:, 1:]).all(-1)
    counts, plain = torch.stack([ones, rises]).tolist()
    return tuple(mask.shape[1] - count for count in counts) if all(plain) else None
