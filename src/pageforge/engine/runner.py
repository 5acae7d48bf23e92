"""The runner: a step of the model over packed rows, eagerly or as a captured graph.

What the steps read stays where it is on the device: each row's last token, its page tables, and one
buffer that takes all numbers of a step in one copy. So a step can be launched before the host knows
what the last one gave.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pageforge.engine.captures import Captures, captures_on
from pageforge.engine.device_rows import DeviceRows
from pageforge.engine.forward import Forward
from pageforge.engine.sequence import Rows
from pageforge.engine.step import (
    Padding,
    PromptSpan,
    Step,
    StepShape,
    decode_arrays,
    mixed_arrays,
    padded_mixed,
)
from pageforge.engine.step_buffer import LoadedStep, StepBuffer
from pageforge.geometry import pages_for
from pageforge.pool import PagePool


class _Again(NamedTuple):
    """What the next step has to be to go on from what the device has counted up itself.

    `counts`, `computed`: `[max_running]`, tokens that the rows compute in it and before it.
    """

    counts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    shape: StepShape
    loaded: LoadedStep
    rows: npt.NDArray[np.int64]  # of Step, as last time


class Runner:
    """Runs steps of one model on one pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: PagePool,
        *,
        max_running: int,
        max_batch_tokens: int,
        max_tokens: int,
        compile: bool,
        allow_hooks: bool,
    ):
        """`max_tokens`: that a row may come to have."""
        self.num_replays = 0
        self._pool = pool
        self._device = torch.device(pool.geometry.groups[0].shape.device)
        self._padding = Padding(
            is_used=captures_on(self._device),
            # What is compiled for any number of rows is not for one: that is compiled otherwise.
            min_rows=2 if compile else 1,
            max_rows=max_running,
            max_tokens=max(max_batch_tokens, max_running),
        )
        max_pages = pages_for(max_tokens, pool.geometry.page_size)
        num_groups = len(pool.geometry.groups)
        self._device_rows = DeviceRows(self._device, num_groups, max_running, max_pages)
        self._buffer = StepBuffer(pool, self._device_rows, self._padding)
        self._forward = Forward(model, self._device_rows)
        self._captures = Captures(
            model,
            self._forward,
            self._buffer,
            self._device_rows,
            self._padding,
            compile=compile,
            allow_hooks=allow_hooks,
        )
        self._again: _Again | None = None

    # --- steps ------------------------------------------------------------------------------

    def launch(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        asking: npt.NDArray[np.bool_] | None,
        *,
        greedy: bool = False,
    ) -> Step:
        """Run the next `counts[row]` tokens of each row.

        `asking`: rows for whose prompts all logits are wanted, where there are such. `greedy`: the
        best tokens are all that is, and a step that only decodes may give them itself.
        """
        again, self._again = self._again, None
        if asking is None and again is not None and self._goes_on(again, rows, counts, greedy):
            step = self._run(again.shape, again.loaded, again.rows)
            np.add(again.computed, counts, out=again.computed)
            self._again = again
            return step
        end = int(counts.nonzero()[0][-1]) + 1
        all_counts, counts = counts, counts[:end]
        computed, length = rows.computed[:end], rows.length[:end]
        chosen = np.flatnonzero((counts > 0) & (computed + counts == length + rows.pending[:end]))
        if asking is not None or int(counts.max()) > 1:
            return self._launch_mixed(rows, counts, chosen, asking)
        known = np.flatnonzero((counts > 0) & (computed < length))
        shape, loaded = self._load_decode(rows, counts, known, greedy)
        step = self._run(shape, loaded, chosen)
        self._device_rows.forget_changes()
        if not len(known) and len(chosen) == np.count_nonzero(counts):
            self._again = _Again(all_counts, rows.computed + all_counts, shape, loaded, chosen)
        return step

    def _goes_on(
        self, again: _Again, rows: Rows, counts: npt.NDArray[np.int32], greedy: bool
    ) -> bool:
        """Whether the same rows decode once more, in pages that they have."""
        return (
            greedy == again.shape.is_greedy
            and not self._device_rows.num_changes
            and np.array_equal(counts, again.counts)
            and np.array_equal(rows.computed, again.computed)
        )

    def _load_decode(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        known: npt.NDArray[np.int64],
        greedy: bool,
    ) -> tuple[StepShape, LoadedStep]:
        """A step of decoding, which brings the changes of page tables if they fit.

        `known`: rows whose token the host knows.
        """
        shape = self._padding.decode(len(counts), greedy)
        if self._device_rows.num_changes > shape.rows:
            self._device_rows.send_changes()
        changes = self._device_rows.changes(shape.rows)
        arrays = decode_arrays(rows, counts, known, shape, changes)
        return shape, self._buffer.load(shape, arrays)

    def _launch_mixed(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        chosen: npt.NDArray[np.int64],
        asking: npt.NDArray[np.bool_] | None,
    ) -> Step:
        """A step in which rows have any number of tokens; `chosen`: rows to sample a token for."""
        self._device_rows.send_changes()
        tables, page_size = self._device_rows.host_tables, self._pool.geometry.page_size
        shape, arrays, places, spans = mixed_arrays(rows, counts, chosen, asking, tables, page_size)
        if self._padding.is_used and asking is None:
            padded = self._padding.mixed(shape.tokens)
            shape, arrays = padded, padded_mixed(arrays, shape, padded)
        loaded = self._buffer.load(shape, arrays)
        return self._run(shape, loaded, chosen, places, spans)

    def _run(
        self,
        shape: StepShape,
        loaded: LoadedStep,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64] | None = None,
        spans: list[PromptSpan] | None = None,
    ) -> Step:
        """Run a step; `rows`, `places` (as `rows` by default) and `spans` of Step."""
        self._pool.use_stream(self._device)
        graph = self._captures.get(shape, loaded)
        if graph is None:
            output = self._forward.run(shape, loaded)
        else:
            graph.replay()
            self.num_replays += 1
            output = graph.outputs
        logits, tokens = (None, output) if shape.is_greedy else (output, None)
        return Step(rows, rows if places is None else places, logits, tokens, spans or [])

    # --- rows -------------------------------------------------------------------------------

    @property
    def last_tokens(self) -> Tensor:
        """`[R]` int64 on the device: the last token of each row."""
        return self._device_rows.last_tokens

    def set_pages(self, group: int, row: int, first: int, page_ids: list[int]) -> None:
        """`page_ids`: a row's pages from logical page `first` on. The next step knows them."""
        self._device_rows.set_pages(group, row, first, page_ids)

    def keep_tokens(self, rows: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """`tokens [R]` are the last ones of `rows`, for the next step to read on the device."""
        self._device_rows.keep_tokens(rows, tokens)

    def move_row(self, source: int, target: int) -> None:
        """Row `target` takes over what row `source` has."""
        self._again = None
        self._device_rows.move_row(source, target)

    # --- captured steps ---------------------------------------------------------------------

    @property
    def eager_steps(self) -> Counter[str]:
        """Steps that ran eagerly, by reason."""
        return self._captures.eager_steps

    @property
    def num_captures(self) -> int:
        """Steps that were captured."""
        return self._captures.num_captures

    @property
    def capture_seconds(self) -> float:
        """Spent on captures, compiling included."""
        return self._captures.seconds

    def change(self) -> str | None:
        """What is different of the model since steps were captured, in words; None: nothing."""
        return self._captures.change()

    def look_for_hooks(self) -> None:
        """Where hooks are gone, steps that ran eagerly for them are captured."""
        self._captures.look_for_hooks()

    def refresh(self) -> None:
        """Drop captured steps if the model is not what it was when they were captured."""
        self._captures.refresh()

    def forget_graphs(self) -> None:
        """Drop captured steps, and what they hold of the model."""
        self._captures.forget()
