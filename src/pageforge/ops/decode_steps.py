"""Decode steps of one batch, one after the other, at little cost to the host."""

from __future__ import annotations

from torch import Tensor

from pageforge.ops.decode import DecodeLaunch
from pageforge.ops.launch import dense_last
from pageforge.ops.plan import DecodePlan, Planner


class DecodeSteps:
    """`plan_decode` and `write_and_attend` in step after step of rows that are of one length.

    What steps share is worked out once, and so is what the layers of a group share. CUDA only, and
    one stream's: a step is planned where the plan of the last one was, which its launches read.
    Nothing is checked.
    """

    plan: DecodePlan  # of the step that began last

    def __init__(
        self,
        page_table: Tensor,  # [S, any] int32; its entries may change from step to step
        key_pages: Tensor,  # [N, Hkv, P, Dk] of any layer of the group
        max_seq_len: int,
        window: int | None,
        starts: Tensor | None,  # [S] int32
    ):
        """For rows of one token or more, and up to `max_seq_len`."""
        _, num_kv_heads, _, key_dim = key_pages.shape
        self._page_table = page_table
        self._planner = Planner(
            page_table.shape[0],
            key_pages.device,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            dtype=key_pages.dtype,
            max_seq_len=max_seq_len,
            window=window,
            starts=starts,
        )
        self._launches: dict[tuple[float, float | None], DecodeLaunch] = {}

    def serves(self, page_table: Tensor, max_seq_len: int) -> bool:
        """Whether the next step can be one of these."""
        return page_table is self._page_table and self._planner.has_room(max_seq_len)

    def begin(self, length: int, max_seq_len: int) -> None:
        """The next step: rows have `length` tokens after it."""
        self.plan = self._planner.plan(max_seq_len, length)

    def attend(
        self,
        query: Tensor,  # [S, Hq, 1, Dk]
        key_pages: Tensor,  # [N, Hkv, P, Dk], written
        value_pages: Tensor,  # [N, Hkv, P, Dv], written
        new_key: Tensor,  # [S, Hkv, 1, Dk]
        new_value: Tensor,  # [S, Hkv, 1, Dv]
        sinks: Tensor | None,  # [Hq]
        out: Tensor,  # [S, 1, Hq, Dv], written
        scale: float,
        softcap: float | None,
    ) -> None:
        """Write the one token of each row of a layer, and attend, in one launch."""
        launch = self._launches.get((scale, softcap))
        if launch is not None and launch(
            query, key_pages, value_pages, new_key, new_value, sinks, out
        ):
            return
        # The first layer, or one laid out otherwise. Kernels read no states with gaps between dims.
        query, new_key, new_value = map(dense_last, (query, new_key, new_value))
        layer = query, key_pages, value_pages, new_key, new_value, sinks, out
        if launch is None or not launch(*layer):
            tables = self._page_table, self.plan.table, self.plan.max_pieces
            launch = DecodeLaunch(*layer, *tables, scale=scale, softcap=softcap, eager=True)
            self._launches[scale, softcap] = launch
            launch(*layer)
