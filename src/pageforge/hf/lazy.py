"""LazyTensor: a tensor that is made when something first computes with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

MOVES = (aten._to_copy.default, aten.to.dtype_layout)  # the second in inference mode
PLACES = frozenset({"dtype", "layout", "device", "non_blocking"})
"""Arguments of `to` that say where to, and no more."""


class LazyTensor(Tensor):
    """Shape, dtype and device of a tensor that `_make` makes when first needed, at most once.

    Any torch operation on it runs on the dense tensor and returns plain tensors. Who knows the
    class may use what stands behind it instead, and then the dense tensor never exists; but not
    once it `is_dense`, for who has the dense tensor may have changed it.
    """

    _dense: Tensor | None = None

    # Results are plain tensors, and nothing intercepts the reading of a shape.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None,
        *args: Any,
    ) -> LazyTensor:
        """`strides`: by default a contiguous tensor's. `args`: for a subclass's `__init__`."""
        return Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=device)

    @abstractmethod
    def _make(self) -> Tensor:
        """The dense tensor; it is copied where it has other strides, for `view` relies on them."""

    @property
    def is_dense(self) -> bool:
        """Whether the dense tensor was made."""
        return self._dense is not None

    def dense(self) -> Tensor:
        """The dense tensor; always the same."""
        if self._dense is None:
            made = self._make()
            if made.stride() != self.stride():
                made = torch.empty_strided(
                    self.shape, self.stride(), dtype=self.dtype, device=self.device
                ).copy_(made)
            self._dense = made
        return self._dense

    def on(self, device: torch.device) -> Tensor:
        """The same on another device."""
        return self.dense().to(device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MOVES and kwargs.keys() <= PLACES:
            tensor = args[0]
            device = kwargs.get("device") or tensor.device
            if kwargs.get("dtype", tensor.dtype) == tensor.dtype:
                if device != tensor.device:
                    return tensor.on(device)
                if func is aten.to.dtype_layout:
                    return tensor
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.dense, (args, kwargs))
        return func(*args, **kwargs)

    # What torch does not dispatch, and what would find no memory.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.dense().__dlpack__(**kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """As `Tensor.numpy`."""
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        """As `Tensor.tolist`."""
        return self.dense().tolist()

    def data_ptr(self) -> int:
        """As `Tensor.data_ptr`."""
        return self.dense().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As `Tensor.untyped_storage`."""
        return self.dense().untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"
