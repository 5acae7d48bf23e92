"""NewTokens: the K/V of one `update`, and LazyKV, which stands for all that its layer holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pageforge import ops
from pageforge.batch import StepTensors
from pageforge.errors import UseAfterFree
from pageforge.geometry import pages_for
from pageforge.hf.cache_state import CacheState
from pageforge.hf.lazy import LazyTensor


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
    ):
        """`oldest`: the first position that attention needs."""
        assert state.pool is not None
        self.state = state
        self.layer = layer
        self.oldest = oldest
        self.step = step
        self.key = key
        self.value = value
        _, self.key_pages, self.value_pages = state.pool.layer(layer)
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
        )

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
        plan = step.plan(self.key_pages, window, padding) if count == 1 else None
        if plan is not None and is_pending and rows:
            out = self._decode(query, plan, padding, scale, softcap, sinks)
            state.pending = None
            return out
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "starts": step.starts(padding),
            "plan": plan,
        }
        if is_pending:  # on the CPU
            out = ops.write_and_attend(
                _dense_last(query.squeeze(2)),
                _dense_last(self.key.squeeze(2)),
                _dense_last(self.value.squeeze(2)),
                self.key_pages,
                self.value_pages,
                step.page_table,
                step.seq_lens,
                check=False,  # update() and the refusals of attention have seen to it all
                **options,
            )
            state.pending = None
            return out.unsqueeze(1)
        out = ops.attend(
            _dense_last(_by_token(query)),
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
        plan: ops.DecodePlan,
        padding: tuple[int, ...] | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # [S, 1, Hq, Dv]
        """Write the one token of each row, and attend, in one launch."""
        assert self.state.pool is not None
        self.state.pool.check_open()
        step, (rows, num_heads, _, _) = self.step, query.shape
        size = rows, 1, num_heads, self.value.shape[3]
        out = torch.empty(size, dtype=query.dtype, device=query.device)
        layer = (
            _dense_last(query),
            self.key_pages,
            self.value_pages,
            _dense_last(self.key),
            _dense_last(self.value),
            sinks,
            out,
        )
        kind = plan.purpose.window, padding, scale, softcap
        launch = step.launches.get(kind)
        if launch is None or not launch(*layer):
            tables = step.page_table, plan.table, plan.max_pieces
            launch = ops.DecodeLaunch(*layer, *tables, scale=scale, softcap=softcap)
            step.launches[kind] = launch
            launch(*layer)
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

    def __init__(
        self,
        shape: object,
        dtype: object,
        device: object,
        strides: object,
        tokens: NewTokens,
        is_value: bool,
    ):
        self.tokens = tokens
        self.is_value = is_value

    def _make(self) -> Tensor:
        return self.tokens.dense()[self.is_value]


def lazy_kv(tokens: NewTokens) -> tuple[LazyKV, LazyKV]:
    """K and V that `tokens.dense()` would give, lazily."""
    key, value = tokens.key, tokens.value
    shape, strides = value_shape, value_strides = _dense_layout(tokens, key)
    if value.shape[3] != key.shape[3]:
        value_shape, value_strides = _dense_layout(tokens, value)
    return (
        LazyKV(shape, key.dtype, key.device, strides, tokens, False),
        LazyKV(value_shape, value.dtype, value.device, value_strides, tokens, True),
    )


def _dense_layout(tokens: NewTokens, new: Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape and strides of what `tokens.dense()` would give, `new` being the newest of it."""
    rows, heads, _, dim = new.shape
    step, strides = tokens.step, None
    if step.start:  # whole pages are gathered
        size = tokens.key_pages.shape[2]
        room = (pages_for(step.stop, size) - tokens.oldest // size) * size
        strides = (heads * room * dim, room * dim, dim, 1)
    return (rows, heads, step.stop - tokens.oldest, dim), strides


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


def _dense_last(states: Tensor) -> Tensor:
    """The same, copied where the last dim is not dense, for kernels cannot read that."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _by_token(states: Tensor) -> Tensor:
    """`[S, H, T, D]` as `[S * T, H, D]`."""
    return states.transpose(1, 2).flatten(0, 1)
