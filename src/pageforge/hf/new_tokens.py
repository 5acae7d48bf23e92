"""NewTokens: the K/V of one `update`, and LazyKV, which stands for all that its layer holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pageforge import ops
from pageforge.batch import StepTensors
from pageforge.errors import UseAfterFree
from pageforge.geometry import pages_for
from pageforge.hf.cache_state import CacheState
from pageforge.hf.lazy import LazyTensor
from pageforge.ops.launch import dense_last


class NewTokens:
    """What one `update` of a layer brought: K `[S, Hkv, T, Dk]` and V `[S, Hkv, T, Dv]`.

    With the stored ones they are read as dense tensors (`dense`), or where they lie (`attend`),
    until the layer's next update, or until the cache is cropped, reordered or freed.
    """

    __slots__ = (
        "_dense",
        "_version",
        "key",
        "key_pages",
        "layer",
        "oldest",
        "state",
        "step",
        "value",
        "value_pages",
    )

    def __init__(
        self,
        state: CacheState,
        layer: int,
        oldest: int,
        step: StepTensors,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
    ):
        """`oldest`: the first position that attention needs. `pages`: the layer's K and V pages."""
        self.state = state
        self.layer = layer
        self.oldest = oldest
        self.step = step
        self.key = key
        self.value = value
        self.key_pages, self.value_pages = pages
        self._version = state.version
        self._dense: tuple[Tensor, Tensor] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether anyone has the dense tensors, and so may have changed them."""
        return self._dense is not None

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens that the layer holds."""
        return self.step.start == 0

    @property
    def dims(self) -> tuple[int, int]:
        """Of K's and V's heads."""
        shape = self.step.shape
        return shape.key_dim, shape.value_dim

    def write(self) -> None:
        """Write the new tokens to their pages."""
        assert self.state.pool is not None
        self.state.pool.use_stream(self.key_pages.device)
        ops.write_kv(
            _by_token(self.key),
            _by_token(self.value),
            self.key_pages,
            self.value_pages,
            self.step.slot_mapping,
            check=False,  # update() has seen to it all
        )

    def write_and_gather(self) -> None:
        """`write`, and what `dense` then returns made with it, where that is less work."""
        step, key, value = self.step, self.key, self.value
        is_plain = type(key) is type(value) is Tensor and not torch.compiler.is_compiling()
        if self.is_whole or not is_plain or not key.numel():
            self.write()
            return
        both = step.write_and_gather(self.oldest, self.key_pages, self.value_pages)
        all_keys, all_values = both(key, value, self.key_pages, self.value_pages)
        self._dense = all_keys.to(key.dtype), all_values.to(value.dtype)
        self.state.num_gathers += 1

    def dense(self) -> tuple[Tensor, Tensor]:
        """K and V `[S, Hkv, L, D]` of positions `oldest` to the newest. Raises UseAfterFree."""
        if self._dense is None:
            self._check_current()
            if self.step.start == 0:
                self._dense = self.key.contiguous(), self.value.contiguous()
            else:
                if self.state.attended_length == self.step.stop:
                    self.state.warn("the model computes with them by itself")
                key, value = self.state.gather(self.layer, self.oldest, self.step.stop)
                self._dense = key.to(self.key.dtype), value.to(self.value.dtype)
                self.state.num_gathers += 1
        return self._dense

    def attend(
        self,
        query: Tensor,  # [S, Hq, T, Dk]
        *,
        scale: float,
        window: int | None,
        padding: tuple[int, ...] | None,
        softcap: float | None,
        sinks: Tensor | None,  # [Hq]
    ) -> Tensor:  # [S, T, Hq, Dv]
        """Causal attention of the new tokens' queries, reading pages. Raises UseAfterFree."""
        step, state = self.step, self.state
        rows, _, count, _ = query.shape
        is_pending = state.pending is self
        if not is_pending:  # else they are current
            self._check_current()
        steps = step.decode(self.key_pages, window, padding) if count == 1 and rows else None
        if steps is not None and is_pending:
            out = self._decode(query, steps, scale, softcap, sinks)
            state.pending = None
            return out
        if is_pending:  # on the CPU
            decode = step.dense_decode(self.key_pages, self.value_pages, window, padding)
            new = query.squeeze(2), self.key.squeeze(2), self.value.squeeze(2)
            scores = ops.Scores(scale, softcap, sinks)
            out = decode(*new, self.key_pages, self.value_pages, scores)
            state.pending = None
            return out.unsqueeze(1)
        plan = None if steps is None else steps.plan
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "starts": step.starts(padding) if plan is None else plan.starts,
            "plan": plan,
        }
        out = ops.attend(
            dense_last(_by_token(query)),
            self.key_pages,
            self.value_pages,
            step.page_table,
            step.seq_lens,
            step.cu_query_lens,
            max_query_len=count,
            **options,
        )
        return out.unflatten(0, (rows, count))

    def _decode(
        self,
        query: Tensor,  # [S, Hq, 1, Dk]
        steps: ops.DecodeSteps,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # [S, 1, Hq, Dv]
        """Write the one token of each row, and attend, in one launch."""
        assert self.state.pool is not None
        self.state.pool.check_open()
        rows, num_heads, _, _ = query.shape
        out = query.new_empty((rows, 1, num_heads, self.step.shape.value_dim))
        pages = self.key_pages, self.value_pages
        steps.attend(query, *pages, self.key, self.value, sinks, out, scale, softcap)
        return out

    def _check_current(self) -> None:
        state = self.state
        state.check_live()
        if self._version != state.version or state.lengths.get(self.layer) != self.step.stop:
            raise UseAfterFree(
                f"layer {self.layer}: the K/V that update() returned are read after the cache was "
                f"cropped, reordered or updated again; read them before"
            )


class LazyKV(LazyTensor):
    """What `update` returns under pageforge attention: all K or all V of a layer, not gathered."""

    tokens: NewTokens
    is_value: bool

    @staticmethod
    def of(
        tokens: NewTokens,
        new: Tensor,
        is_value: bool,
        shape: Sequence[int],
        strides: Sequence[int] | None,
    ) -> LazyKV:
        """The K or V of which `new` is the newest; without `__init__`, for two a layer are made."""
        made: LazyKV = Tensor._make_wrapper_subclass(
            LazyKV, shape, strides, dtype=new.dtype, device=new.device
        )
        made.tokens = tokens
        made.is_value = is_value
        return made

    def _make(self) -> Tensor:
        return self.tokens.dense()[self.is_value]


def lazy_kv(tokens: NewTokens) -> tuple[LazyKV, LazyKV]:
    """K and V that `tokens.dense()` would give, lazily."""
    key_dim, value_dim = tokens.dims
    layout = value_layout = _dense_layout(tokens, key_dim)
    if value_dim != key_dim:
        value_layout = _dense_layout(tokens, value_dim)
    return (
        LazyKV.of(tokens, tokens.key, False, *layout),
        LazyKV.of(tokens, tokens.value, True, *value_layout),
    )


def _dense_layout(tokens: NewTokens, dim: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides of what `tokens.dense()` would give, of heads of `dim` elements."""
    step, oldest = tokens.step, tokens.oldest
    rows, heads, strides = tokens.key.shape[0], step.shape.num_kv_heads, None
    if step.start:  # whole pages are gathered
        size = step.page_size
        room = (pages_for(step.stop, size) - oldest // size) * size
        strides = (heads * room * dim, room * dim, dim, 1)
    return (rows, heads, step.stop - oldest, dim), strides


def tokens_of(key: Tensor, value: Tensor) -> NewTokens | None:
    """The update that returned these as K and V, or None where they are anything else."""
    if (
        type(key) is LazyKV
        and type(value) is LazyKV
        and key.tokens is value.tokens
        and value.is_value
        and not key.is_value
    ):
        return key.tokens
    return None


def _by_token(states: Tensor) -> Tensor:
    """`[S, H, T, D]` as `[S * T, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1)
