"""Captured decode steps: one CUDA graph for each number of rows, replayed for every token.

At batch 1 a decode step is hundreds of kernels that each run for microseconds, and launching them
from Python takes several times as long. A graph launches them all at once. What differs from step
to step lies in tensors that stay where they are: tokens, positions, page tables and lengths.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pageforge import ops
from pageforge.batch import SequenceBatch
from pageforge.geometry import ceil_div, pages_for
from pageforge.ops import DecodePlan
from pageforge.pool import PagePool

WARM_UPS = 2
"""Runs before a capture: libraries choose their kernels, Triton compiles its own."""

ALIGNMENT = 4
"""Counters of one kind begin at multiples of so many int32: 16 bytes, the most that is loaded at a
time."""


def bucket(num_rows: int) -> int:
    """How many rows to capture for `num_rows`: at most a quarter more, so that few graphs do."""
    step = 1 << max(0, num_rows.bit_length() - 3)
    return ceil_div(num_rows, step) * step


class StepInputs:
    """The tensors that a captured decode step reads; they stay where they are.

    There are `rows` rows; those beyond the batch have no tokens, write nothing and give 0.
    """

    def __init__(self, pool: PagePool, rows: int, max_tokens: int, positions: Sequence[int] | None):
        """`positions`: what `position_ids` has before its dims of rows and tokens, () or (3,), say.

        With None a row's position is the number of tokens before, and the step counts it itself.
        """
        self.geometry = pool.geometry  # and not the pool, which lives as long as its user wants
        self.device = torch.device(pool.geometry.groups[0].shape.device)
        self.rows = rows
        self.counts_positions = positions is None
        self.max_tokens = max_tokens
        width = pages_for(max_tokens, pool.geometry.page_size)
        with torch.inference_mode(False):  # else they could only be written to in that mode
            self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
            # What a step counts lies side by side, so that one kernel does it: lengths, and
            # positions as two int32 each, the lower of which never overflows.
            first = ceil_div(rows, ALIGNMENT) * ALIGNMENT
            self._counters = torch.zeros(first + 2 * rows, dtype=torch.int32, device=self.device)
            self._more = torch.zeros_like(self._counters)  # what a step adds to each
            self.seq_lens = self._counters[:rows]
            counted = self._counters[first:].view(torch.int64)[:, None]
            self.positions = (
                counted if positions is None else self.tokens.new_zeros(*positions, rows, 1)
            )
            self.starts = torch.zeros(rows, dtype=torch.int32, device=self.device)
            self.cu_query_lens = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
            self.page_tables = [
                torch.zeros(rows, width, dtype=torch.int32, device=self.device)
                for _ in pool.geometry.groups
            ]
        self._tensors = [self.tokens, self.positions, self._counters, self.starts, self._more]
        self._tensors += [self.cu_query_lens, *self.page_tables]
        self._pages = [pool.pages(group) for group in range(len(pool.geometry.groups))]
        self._views: dict[int, tuple[int, _Place, _Place]] = {}
        for layer in sorted(layer for group in pool.geometry.groups for layer in group.layers):
            group, key_pages, value_pages = pool.layer(layer)
            self._views[layer] = group, _place(key_pages), _place(value_pages)
        self._plans: dict[tuple[int, int | None], DecodePlan | None] = {}

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a layer, made here from the group's one tensor.

        So torch.compile sees that layers write to different places of the same memory; given them
        as separate tensors it would copy the pool to be safe.
        """
        group, key_place, value_place = self._views[layer]
        pages = self._pages[group]
        return pages.as_strided(*key_place), pages.as_strided(*value_place)

    def load(self, batch: SequenceBatch, length: int, starts: Sequence[int] | None) -> None:
        """Take rows that hold `length` tokens (one or more) before the next step.

        `starts`: how many of them are padding.
        """
        rows = len(batch)
        for tensor in (self._counters, self._more, self.starts, self.tokens, self.positions):
            tensor.zero_()
        self.seq_lens[:rows] = length
        self._more[:rows] = 1
        if starts is not None:
            self.starts[:rows] = torch.tensor(starts, dtype=torch.int32, device="cpu")
        if self.counts_positions:
            self.positions[:rows] = length - 1
            self._more[-2 * self.rows :].view(torch.int64)[:rows] = 1
        for table in self.page_tables:
            table.zero_()
        self.follow(batch)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Steps run on `stream` from now on: what they read is nobody's before it is done."""
        for tensor in self._tensors:
            tensor.record_stream(stream)

    def follow(self, batch: SequenceBatch) -> None:
        """Take over the pages of `batch`."""
        for group, table in enumerate(self.page_tables):
            pages, _ = batch.page_table(group, 0, batch.length)
            table[: len(batch), : pages.shape[1]].copy_(pages)

    def begin(self) -> None:
        """The captured step begins: every row has one token more."""
        self._plans.clear()
        self._counters += self._more

    def plan(self, group: int, window: int | None) -> DecodePlan | None:
        """How the step is cut into pieces: once for all layers of a group with this window."""
        key = group, window
        if key not in self._plans:
            key_pages, _ = self.layer(self.geometry.groups[group].layers[0])
            self._plans[key] = ops.plan_decode(
                self.seq_lens,
                self.page_tables[group],
                key_pages,
                window=window,
                starts=self.starts,
            )
        return self._plans[key]


_Place = tuple[torch.Size, tuple[int, ...], int]
"""Size, strides and offset of a view, as `as_strided` takes them."""


def _place(view: Tensor) -> _Place:
    return view.shape, view.stride(), int(view.storage_offset())


class GraphMemory(NamedTuple):
    """What graphs share that are not replayed at the same time."""

    pool: Any  # the handle that torch.cuda.graph_pool_handle() gives
    stream: torch.cuda.Stream  # on which they are captured; the allocator keeps memory by stream


class CapturedStep:
    """One decode step of a model as a CUDA graph."""

    def __init__(
        self, run: Callable[[], Any], memory: GraphMemory, undo: Callable[[], None] | None = None
    ):
        """Capture `run`, which reads tensors that stay where they are.

        `undo` sets back what a run counts up, after each run that comes before the capture, also
        one that fails: whatever runs next has to find what the first one found. Raises what `run`
        raises, and RuntimeError where it does what a graph cannot repeat.
        """
        stream = memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    try:
                        run()
                    finally:
                        if undo is not None:
                            undo()
            self.outputs = self._capture(run, memory)
        finally:  # also if it failed: what was launched uses tensors that are freed then
            torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, run: Callable[[], Any], memory: GraphMemory) -> Any:
        try:
            with _capturing(self._graph, memory.pool, memory.stream):
                return run()
        except BaseException:
            # torch leaves its random generator waiting for the end of the capture that failed;
            # one that succeeds sets it right.
            with _capturing(torch.cuda.CUDAGraph(), None, memory.stream):
                torch.zeros(1, device="cuda")
            raise

    def replay(self) -> None:
        """Run the step; `outputs` holds what it gave until any graph of the same memory runs."""
        self._graph.replay()


_one_at_a_time = threading.Lock()
"""All captures share streams for branches (`ops/products.py`), and cuBLAS' workspaces."""


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with _one_at_a_time, _undisturbed(), capture:
        yield


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    # What other threads ask of CUDA meanwhile does no harm; but what this one's garbage collector
    # would, for caches and pools that it finds, spoils a capture.
    collects = gc.isenabled()
    gc.disable()
    # cuBLAS keeps a workspace for each stream, which anyone may have freed (torch.compile does for
    # graphs of its own): what a graph uses must lie in its own memory, and nobody else use it.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects:
            gc.enable()
