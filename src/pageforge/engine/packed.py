"""One step's tensors, and the cache that a model is given to run it: ragged rows, packed.

A forward sees one row of `[1, T]` tokens: those of all sequences, one after the other. Linear
layers do not care whose tokens they are; attention does, and reads it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pageforge import ops
from pageforge.geometry import KVGeometry
from pageforge.hf.step_cache import Span, StepCache
from pageforge.ops import DecodePlan


class PackedInputs:
    """The tensors of one step, on the device. Graphs read them where they lie.

    `tokens`, `positions`: `[T]` int64. `seq_lens [S]`, `cu_query_lens [S + 1]`: int32; a row that
    is not part of the step has length 0 and no query. `slots`: `[T]` int64 for each layer group,
    or None where each row has one query, which then is token `t` of row `t`.
    """

    starts: Tensor | None = None

    def __init__(
        self,
        geometry: KVGeometry,
        layers: dict[int, tuple[int, Tensor, Tensor]],
        tokens: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        cu_query_lens: Tensor,
        page_tables: list[Tensor],  # [S, M] int32 each
        slots: Sequence[Tensor] | None,
    ):
        self.geometry = geometry
        self.tokens = tokens
        self.positions = positions
        self.seq_lens = seq_lens
        self.cu_query_lens = cu_query_lens
        self.page_tables = page_tables
        self.slots = slots
        self._layers = layers
        self._plans: dict[tuple[int, int | None], DecodePlan | None] = {}

    @property
    def max_query_len(self) -> int:
        """The most that a row may have: a captured step serves whatever bounds come."""
        return 1 if self.slots is None else len(self.tokens)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a layer."""
        return self._layers[layer][1:]

    def begin(self) -> None:
        """The step begins: what was planned was planned for other lengths."""
        self._plans.clear()

    def plan(self, group: int, window: int | None) -> DecodePlan | None:
        """How rows of one query are cut: once for all layers of a group with this window.

        None where attention needs no plan.
        """
        key = group, window
        if key not in self._plans:
            self._plans[key] = self._make_plan(group, window)
        return self._plans[key]

    def _make_plan(self, group: int, window: int | None) -> DecodePlan | None:
        sizes = len(self.tokens), len(self.seq_lens), self.max_query_len
        if not ops.may_have_single_queries(*sizes):
            return None
        pages, _ = self.layer(self.geometry.groups[group].layers[0])
        return ops.plan_decode(
            self.seq_lens,
            self.page_tables[group],
            pages,
            window=window,
            cu_query_lens=None if self.slots is None else self.cu_query_lens,
        )


class PackedCache(StepCache):
    """A StepCache for tokens of ragged rows, `[1, T]`."""

    inputs: PackedInputs

    def __init__(self, inputs: PackedInputs, windows: dict[int, int | None] | None = None):
        super().__init__(inputs, windows)
        self.span = Span(start=0, stop=len(inputs.tokens))

    def attend(
        self,
        layer: int,
        query: Tensor,  # [1, Hq, T, Dk]
        key: Tensor,  # [1, Hkv, T, Dk]
        value: Tensor,  # [1, Hkv, T, Dv]
        *,
        window: int | None,
        **options: Any,
    ) -> Tensor:  # [1, T, Hq, Dv]
        """Write the step's tokens of a layer and attend to all of it; `options`: of the op."""
        query, key, value = map(_by_token, (query, key, value))
        key_pages, value_pages, page_table, shared = self._inputs_of(layer, window)
        inputs = self.inputs
        if inputs.slots is None:
            out = ops.write_and_attend(
                query,
                key,
                value,
                key_pages,
                value_pages,
                page_table,
                inputs.seq_lens,
                **shared,
                **options,
            )
        else:
            ops.write_kv(key, value, key_pages, value_pages, inputs.slots[self.group_of[layer]])
            out = self._attend(query, key_pages, value_pages, page_table, shared, options)
        return out.unsqueeze(0)

    def attend_again(
        self,
        layer: int,
        query: Tensor,  # [1, Hq, T, Dk]
        *,
        window: int | None,
        **options: Any,
    ) -> Tensor:  # [1, T, Hq, Dv]
        """Attend to a layer whose tokens were written before: some models share K/V of layers."""
        inputs = self._inputs_of(layer, window)
        return self._attend(_by_token(query), *inputs, options).unsqueeze(0)

    def _attend(
        self,
        query: Tensor,  # [T, Hq, Dk]
        key_pages: Tensor,
        value_pages: Tensor,
        page_table: Tensor,
        shared: dict[str, Any],
        options: dict[str, Any],
    ) -> Tensor:  # [T, Hq, Dv]
        return ops.attend(
            query,
            key_pages,
            value_pages,
            page_table,
            self.inputs.seq_lens,
            self.inputs.cu_query_lens,
            max_query_len=self.inputs.max_query_len,
            **shared,
            **options,
        )


def _by_token(states: Tensor) -> Tensor:
    """`[1, H, T, D]` as `[T, H, D]`, dense in the last dim."""
    states = states.squeeze(0).transpose(0, 1)
    return states if states.stride(-1) == 1 else states.contiguous()
