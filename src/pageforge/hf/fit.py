"""Whether the K/V that a model passes to `update` fit the pool."""

from __future__ import annotations

from torch import Tensor

from pageforge.errors import ShapeError, UnsupportedModel, expected


def check_fit(
    layer: int,
    key: Tensor,  # [S, Hkv, T, Dk]
    value: Tensor,  # [S, Hkv, T, Dv]
    key_pages: Tensor,  # [N, Hkv, P, Dk]
    value_pages: Tensor,  # [N, Hkv, P, Dv]
    *,
    casts: bool,
) -> None:
    """Raise ShapeError for K/V that do not fit, UnsupportedModel for K/V with a gradient.

    `casts`: whether another dtype is welcome.
    """
    rows, _, tokens, _ = key.shape if key.dim() == 4 else (0, 0, 0, 0)
    for name, tensor, pages in (("key", key, key_pages), ("value", value, value_pages)):
        _, heads, _, dim = pages.shape
        if tensor.shape != (rows, heads, tokens, dim):
            raise ShapeError(
                expected(
                    f"layer {layer} {name}",
                    f"[{rows}, {heads}, {tokens}, {dim}]" if rows else "four dims",
                    list(tensor.shape),
                    "make the pool with PagePool.for_model(model)",
                )
            )
        if tensor.device != pages.device:
            raise ShapeError(
                expected(
                    f"layer {layer} {name}",
                    f"device {pages.device}",
                    tensor.device,
                    "make the pool after moving the model, with PagePool.for_model(model)",
                )
            )
        if tensor.dtype != pages.dtype and not casts:
            raise ShapeError(
                expected(
                    f"layer {layer} {name}",
                    f"dtype {pages.dtype}",
                    tensor.dtype,
                    "pass dtype= to PagePool.for_model to have K/V cast",
                )
            )
        if tensor.requires_grad:
            raise UnsupportedModel(
                f"layer {layer} {name}: expected a tensor without gradient, got one that "
                f"requires grad; pages are not differentiable: run under torch.no_grad()"
            )
