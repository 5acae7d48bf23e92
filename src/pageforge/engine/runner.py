"""The runner: a step of the model over packed rows, eagerly or as a captured graph.

What the steps read stays where it is on the device: each row's last token, its page tables, and one
buffer that takes all numbers of a step in one copy. So a step can be launched before the host knows
what the last one gave.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from pageforge.batch import to_device
from pageforge.engine.packed import PackedCache, PackedInputs
from pageforge.engine.sequence import Rows
from pageforge.errors import UnsupportedModel
from pageforge.geometry import pages_for
from pageforge.graphs import CapturedStep, GraphMemory, bucket
from pageforge.hf.decode_step import RECOMPILES
from pageforge.hf.fused import fused
from pageforge.hf.step_cache import STEP_ARGUMENT
from pageforge.model_state import ModelState, hooks_on
from pageforge.pool import PagePool
from pageforge.probe import cache_argument

logger = logging.get_logger(__name__)

BUFFERS = 2
"""Host buffers of a step's numbers: one is read by the step in flight while the next is filled."""

WORTHWHILE = 2
"""Steps of one padded size after which a mixed step is captured: a capture costs three of them."""

NO_TOKEN = -1
"""What the host sees instead of a token where logits made no sense."""


class StepShape(NamedTuple):
    """What a captured step has baked in: padded numbers of tokens, rows and logits."""

    tokens: int
    rows: int
    logits: int
    decodes: bool  # token `t` is the one of row `t`
    is_greedy: bool  # it gives the best tokens, and not the logits


class Step(NamedTuple):
    """A step that was launched.

    `rows [R]`: those that know no more tokens after it, so that one is to be sampled for each, from
    `logits[places]`, or is `tokens[places]`. `spans`: of prompts whose logits are all asked for,
    each (row, position of the first token that they are about, first of the logits, behind the
    last).
    """

    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    logits: Tensor | None  # [R or more, V]
    tokens: Tensor | None  # [R or more] int64, the best; NO_TOKEN where logits made no sense
    spans: list[tuple[int, int, int, int]]


class _Loaded(NamedTuple):
    """What a step reads on the device. Graphs read it where it lies.

    `logit_places`: of the tokens whose logits are wanted; None for those of all. `changes`: for
    each layer group places in its flat page table, and the page ids that belong there now.
    """

    inputs: PackedInputs
    logit_places: Tensor | None
    changes: list[tuple[Tensor, Tensor]]


class _Again(NamedTuple):
    """What the next step has to be to go on from what the device has counted up itself.

    `counts`, `computed`: `[max_running]`, tokens that the rows compute in it and before it.
    """

    counts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    shape: StepShape
    loaded: _Loaded
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
        self.eager_steps: Counter[str] = Counter()
        """Steps that ran eagerly, by reason."""
        self.num_replays = 0
        self.num_captures = 0
        self.capture_seconds = 0.0
        """Spent on captures, compiling included."""
        self._model = model
        self._pool = pool
        self._compile = compile
        self._allow_hooks = allow_hooks
        self._device = torch.device(pool.geometry.groups[0].shape.device)
        self._cache_name = cache_argument(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers = {
            layer: pool.layer(layer) for group in pool.geometry.groups for layer in group.layers
        }
        width = pages_for(max_tokens, pool.geometry.page_size)
        most_rows = max_running
        self._most = most = max(max_batch_tokens, most_rows)  # tokens of a step
        groups = pool.geometry.groups
        with torch.inference_mode(False):  # else they could only be written to in that mode
            self.last_tokens = torch.zeros(most_rows, dtype=torch.int64, device=self._device)
            # A place more, to which changes go that are none.
            self._flat_tables = [
                torch.zeros(most_rows * width + 1, dtype=torch.int32, device=self._device)
                for _ in groups
            ]
            self._page_tables = [flat[:-1].view(most_rows, width) for flat in self._flat_tables]
            self._bounds = torch.arange(most_rows + 1, dtype=torch.int32, device=self._device)
            shapes = (
                StepShape(most, most_rows, most, False, False),
                StepShape(most_rows, most_rows, most_rows, True, False),
            )
            size = max(sum(_sizes(shape, len(groups))) for shape in shapes)
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
            pinned = self._device.type == "cuda"
            self._host = [
                torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)
            ]
        self.host_tables = [np.zeros((most_rows, width), np.int32) for _ in groups]
        self._changed: list[list[int]] = [[] for _ in groups]  # places in the flat tables
        self._marks = -1 - np.arange(most_rows)  # of tokens that only the device may know yet
        self._turn = 0
        self._loaded: dict[StepShape, _Loaded] = {}
        self._sent: tuple[Tensor, Tensor] | None = None  # the latest copy of a step's numbers
        self._again: _Again | None = None
        self._graphs: dict[StepShape, CapturedStep | str] = {}
        self._times: Counter[StepShape] = Counter()
        self._memory: GraphMemory | None = None
        self._state: ModelState | None = None
        self._windows: dict[int, int | None] | None = None
        self._compiled: Callable[..., Any] | None = None

    # --- page tables ------------------------------------------------------------------------

    def set_pages(self, group: int, row: int, first: int, page_ids: list[int]) -> None:
        """`page_ids`: a row's pages from logical page `first` on. The next step knows them."""
        table = self.host_tables[group]
        table[row, first : first + len(page_ids)] = page_ids
        start = row * table.shape[1] + first
        self._changed[group].extend(range(start, start + len(page_ids)))

    def _send_pages(self) -> None:
        """Bring the device's page tables up to date: one copy a group, however many rows grew."""
        for group, changed in enumerate(self._changed):
            if changed:
                places = np.array(changed)
                page_ids = self.host_tables[group].reshape(-1)[places]
                both = to_device(np.stack([places, page_ids]), self._device)
                self._flat_tables[group].index_copy_(0, both[0], both[1].int())
                changed.clear()

    def move_row(self, source: int, target: int) -> None:
        """Row `target` takes over what row `source` has."""
        self._again = None
        self._send_pages()
        self.last_tokens[target] = self.last_tokens[source]
        for host, table in zip(self.host_tables, self._page_tables, strict=True):
            host[target] = host[source]
            table[target] = table[source]

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
            self._send_pages()
            shape, arrays, places, spans = self._mixed_arrays(rows, counts, chosen, asking)
            loaded = self._load(shape, arrays)
            loaded.inputs.max_query_len = int(counts.max())
            return self._run(shape, loaded, chosen, places, spans)
        known = np.flatnonzero((counts > 0) & (computed < length))
        shape, arrays = self._decode_arrays(rows, counts, known, greedy)
        loaded = self._load(shape, arrays)
        step = self._run(shape, loaded, chosen)
        for changed in self._changed:
            changed.clear()
        if not len(known) and len(chosen) == np.count_nonzero(counts):
            self._again = _Again(all_counts, rows.computed + all_counts, shape, loaded, chosen)
        return step

    def _goes_on(
        self, again: _Again, rows: Rows, counts: npt.NDArray[np.int32], greedy: bool
    ) -> bool:
        """Whether the same rows decode once more, in pages that they have."""
        return (
            greedy == again.shape.is_greedy
            and not any(self._changed)
            and np.array_equal(counts, again.counts)
            and np.array_equal(rows.computed, again.computed)
        )

    def keep_tokens(self, rows: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """`tokens [R]` are the last ones of `rows`, for the next step to read on the device."""
        if len(rows) and rows[-1] == len(rows) - 1:
            self.last_tokens[: len(rows)].copy_(tokens)
        else:
            self.last_tokens.index_copy_(0, to_device(rows, self._device), tokens)

    def _decode_arrays(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        known: npt.NDArray[np.int64],
        greedy: bool,
    ) -> tuple[StepShape, list[npt.NDArray[Any]]]:
        """(padded sizes, a step's numbers); changes of page tables are among them, if they fit.

        `known`: rows whose token the host knows.
        """
        end = len(counts)
        padded = min(self._rounded(end), len(rows)) if self._uses_graphs else end
        computed = rows.computed[:end]
        tokens, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        lengths = np.zeros(padded, np.int32)
        tokens[:end] = self._marks[:end]
        if len(known):
            tokens[known] = rows.tokens[known, computed[known]]
        positions[:end] = computed
        np.add(computed, 1, out=lengths[:end])
        idle = np.flatnonzero(counts == 0)
        if len(idle):
            tokens[idle], positions[idle], lengths[idle] = 0, 0, 0
        if max(map(len, self._changed)) > padded:
            self._send_pages()
        places, page_ids = [], []
        for table, flat, changed in zip(
            self.host_tables, self._flat_tables, self._changed, strict=True
        ):
            at = np.full(padded, len(flat) - 1)
            ids = np.zeros(padded, np.int32)
            if changed:
                at[: len(changed)] = changed
                ids[: len(changed)] = table.reshape(-1)[changed]
            places.append(at)
            page_ids.append(ids)
        shape = StepShape(padded, padded, padded, True, greedy)
        return shape, [tokens, positions, *places, lengths, *page_ids]

    def _mixed_arrays(
        self,
        rows: Rows,
        counts: npt.NDArray[np.int32],
        chosen: npt.NDArray[np.int64],
        asking: npt.NDArray[np.bool_] | None,
    ) -> tuple[
        StepShape,
        list[npt.NDArray[Any]],
        npt.NDArray[np.int64],
        list[tuple[int, int, int, int]],
    ]:
        """(padded sizes, a step's numbers, `places` and `spans` of Step)."""
        end, total = len(counts), int(counts.sum())
        computed, size = rows.computed[:end], self._pool.geometry.page_size
        bounds = np.zeros(end + 1, np.int32)
        np.cumsum(counts, out=bounds[1:])
        row_of = np.repeat(np.arange(end), counts)
        positions = np.arange(total) - bounds[row_of] + computed[row_of]
        is_known = positions < rows.length[row_of]
        columns = np.minimum(positions, rows.tokens.shape[1] - 1)
        tokens = np.where(is_known, rows.tokens[row_of, columns], -1 - row_of)
        slots = []
        for table in self.host_tables:
            page_ids = table[row_of, positions // size].astype(np.int64)
            slots.append(np.where(page_ids > 0, page_ids * size + positions % size, -1))
        lengths = np.where(counts > 0, computed + counts, 0).astype(np.int32)
        wanted = bounds[chosen + 1].astype(np.int64) - 1  # the last token of each of these
        places, spans = np.arange(len(chosen)), []
        if asking is not None:
            is_wanted = asking[row_of] & (positions + 1 < rows.prompt[row_of])
            is_wanted[wanted] = True
            last, wanted = wanted, np.flatnonzero(is_wanted)
            places = np.searchsorted(wanted, last)
            for row in np.flatnonzero(asking[:end] & (counts > 0)).tolist():
                first = int(computed[row]) + 1  # the logits of a token are about the next one
                start = int(np.searchsorted(wanted, bounds[row]))
                count = min(int(counts[row]), int(rows.prompt[row]) - first)
                spans.append((row, first, start, start + count))
        arrays = [tokens, positions, *slots, wanted, lengths, bounds]
        shape = StepShape(total, end, len(wanted), False, False)
        if self._uses_graphs and asking is None:
            # As many rows as there can be: those without queries cost hardly anything, and there
            # are fewer sizes to capture.
            sizes = min(bucket(total), self._most), len(rows), len(rows)
            padded = StepShape(*sizes, False, False)
            arrays, shape = _padded(arrays, shape, padded), padded
        return shape, arrays, places, spans

    def _rounded(self, num_rows: int) -> int:
        """Rows to capture a step of decoding for."""
        # What is compiled for any number of rows is not for one: that is compiled otherwise.
        return bucket(max(num_rows, 2) if self._compile else num_rows)

    @property
    def _uses_graphs(self) -> bool:
        return self._device.type == "cuda"

    def _may_capture(self, shape: StepShape) -> bool:
        """Whether it is a padded size; where all logits of a prompt are asked for it is none."""
        return self._uses_graphs and (shape.decodes or shape.logits == shape.rows)

    def _load(self, shape: StepShape, arrays: list[npt.NDArray[Any]]) -> _Loaded:
        """Copy a step's numbers to the device, in one go; what reads them there."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        flat, start = host.numpy(), 0
        for array, size in zip(arrays, _sizes(shape, len(self._page_tables)), strict=True):
            flat[start : start + size] = array.view(np.uint8)
            start += size
        self._sent = self._buffer[:start], host[:start]
        self._send()
        if not self._may_capture(shape):  # it hardly ever comes again
            return self._views(shape)
        if shape not in self._loaded:
            self._loaded[shape] = self._views(shape)
        return self._loaded[shape]

    def _views(self, shape: StepShape) -> _Loaded:
        views, start = [], 0
        num_groups = len(self._page_tables)
        sizes = _sizes(shape, num_groups)
        num_longs = len(sizes) - (1 + num_groups if shape.decodes else 2)
        for number, size in enumerate(sizes):
            dtype = torch.int64 if number < num_longs else torch.int32
            views.append(self._buffer[start : start + size].view(dtype))
            start += size
        tokens, positions, *rest = views
        if shape.decodes:
            places, (seq_lens, *page_ids) = rest[:num_groups], rest[num_groups:]
            logit_places, slots, bounds = None, None, self._bounds[: shape.rows + 1]
            changes = list(zip(places, page_ids, strict=True))
        else:
            *slots, logit_places, seq_lens, bounds = rest
            changes = []
        inputs = PackedInputs(
            self._pool.geometry,
            self._layers,
            tokens,
            positions,
            seq_lens,
            bounds,
            [table[: shape.rows] for table in self._page_tables],
            slots,
            1 if shape.decodes else shape.tokens,
        )
        return _Loaded(inputs, logit_places, changes)

    def _send(self) -> None:
        """Copy the latest step's numbers to the device (once more)."""
        assert self._sent is not None
        self._sent[0].copy_(self._sent[1], non_blocking=True)

    def _run(
        self,
        shape: StepShape,
        loaded: _Loaded,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64] | None = None,
        spans: list[tuple[int, int, int, int]] | None = None,
    ) -> Step:
        """Run a step; `rows`, `places` (as `rows` by default) and `spans` of Step."""
        self._pool.use_stream(self._device)
        graph = self._graph(shape, loaded)
        if graph is None:
            output = self._finish(shape, loaded, self._forward(loaded))
        else:
            graph.replay()
            self.num_replays += 1
            output = graph.outputs
        logits, tokens = (None, output) if shape.is_greedy else (output, None)
        return Step(rows, rows if places is None else places, logits, tokens, spans or [])

    def _finish(self, shape: StepShape, loaded: _Loaded, logits: Tensor) -> Tensor:
        """What a step gives, and has to leave for the next one of the same rows."""
        if not shape.decodes:
            return logits
        inputs = loaded.inputs
        active = inputs.seq_lens > 0
        inputs.positions += active
        inputs.seq_lens += active
        if not shape.is_greedy:
            return logits
        best, tokens = logits.max(-1)  # of equal ones the first; NaN beats all
        last_tokens = self.last_tokens[: len(tokens)]
        last_tokens.copy_(torch.where(active, tokens, last_tokens))
        return tokens.masked_fill(~(best > -torch.inf), NO_TOKEN)

    def _forward(self, loaded: _Loaded) -> Tensor:  # [R, V]
        arguments = self._arguments(loaded)
        cache = PackedCache(loaded.inputs)
        outputs = self._model(**arguments, **{self._cache_name: cache})
        cache.check_written()
        if cache.is_regular:
            self._windows = cache.windows
        return self._logits(outputs, loaded.logit_places)

    def _forward_compiled(self, loaded: _Loaded) -> Tensor:  # [S, V]
        """The same through torch.compile, which traces no lazy K/V: attention gets the cache."""
        assert self._compiled is not None and self._windows is not None
        arguments = self._arguments(loaded)
        inputs = loaded.inputs
        cache = PackedCache(inputs, self._windows)
        plans = [
            inputs.plan(cache.group_of[each], window) for each, window in self._windows.items()
        ]
        # Compiled once, for any number of rows.
        for tensor in (inputs.seq_lens, inputs.cu_query_lens, *inputs.page_tables):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for plan in filter(None, plans):
            torch._dynamo.maybe_mark_dynamic(plan.table, 0)
        for name in ("input_ids", "position_ids"):
            torch._dynamo.maybe_mark_dynamic(arguments[name], 1)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            outputs = self._compiled(**arguments, **{self._cache_name: cache, STEP_ARGUMENT: cache})
        return self._logits(outputs, None)

    def _arguments(self, loaded: _Loaded) -> dict[str, Any]:
        """What a forward is given, the cache apart. Page tables are as they should be then."""
        inputs = loaded.inputs
        inputs.begin()
        for flat, (places, page_ids) in zip(self._flat_tables, loaded.changes, strict=False):
            flat.index_copy_(0, places, page_ids)
        tokens = inputs.tokens
        # Negative: the last token of a row, which only the device may know yet.
        tokens = torch.where(tokens < 0, self.last_tokens[(-1 - tokens).clamp(min=0)], tokens)
        arguments: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": inputs.positions[None],
            "attention_mask": None,
            "use_cache": True,
        }
        if loaded.logit_places is not None and self._takes_rows:
            arguments["logits_to_keep"] = loaded.logit_places
        return arguments

    def _logits(self, outputs: Any, logit_places: Tensor | None) -> Tensor:  # [R, V]
        logits: Tensor = outputs.logits[0]
        return logits if logit_places is None or self._takes_rows else logits[logit_places]

    # --- graphs -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Drop captured steps if the model is not what it was when they were captured.

        And forget why there are none: hooks may be gone, and memory be there.
        """
        self._graphs = {
            shape: graph for shape, graph in self._graphs.items() if not isinstance(graph, str)
        }
        if self._state is not None and (change := self._state.change()) is not None:
            logger.info("engine: %s; steps are captured anew", change)
            self.forget_graphs()

    def forget_graphs(self) -> None:
        """Drop captured steps, and what they hold of the model."""
        self._graphs.clear()
        self._times.clear()
        self._state = self._memory = self._compiled = None

    def _graph(self, shape: StepShape, loaded: _Loaded) -> CapturedStep | None:
        """The captured step of this shape, captured now if it is worth while."""
        if not self._may_capture(shape):
            return None
        graph = self._graphs.get(shape)
        if graph is None:
            self._times[shape] += 1
            if not shape.decodes and self._times[shape] < WORTHWHILE:
                return None
            graph = self._graphs[shape] = self._capture(shape, loaded)
        if isinstance(graph, str):
            if not self.eager_steps[graph]:
                logger.warning("engine: steps run eagerly: %s", graph)
            self.eager_steps[graph] += 1
            return None
        return graph

    def _capture(self, shape: StepShape, loaded: _Loaded) -> CapturedStep | str:
        """A captured step, or why there can be none.

        What it runs meanwhile does no harm: the same tokens are written to the same places, since
        what a run counts up is set back.
        """
        if not self._allow_hooks and (reason := hooks_on(self._model)) is not None:
            return reason
        if self._memory is None:
            stream = torch.cuda.Stream(self._device)
            self._memory = GraphMemory(torch.cuda.graph_pool_handle(), stream)
        state, inputs = ModelState(self._model), loaded.inputs
        before, last_tokens = inputs.max_query_len, self.last_tokens.clone()
        inputs.max_query_len = 1 if shape.decodes else shape.tokens

        def undo() -> None:
            self._send()
            self.last_tokens.copy_(last_tokens)

        began = time.perf_counter()
        try:
            compiles = self._compile and shape.decodes
            forward = self._compiled_forward(loaded) if compiles else self._forward
            # (torch.compile fuses more, and would have to compile each forward put in place.)
            with contextlib.nullcontext() if compiles else fused(self._model):
                step = CapturedStep(
                    lambda: self._finish(shape, loaded, forward(loaded)), self._memory, undo
                )
        except torch.cuda.OutOfMemoryError:
            return "there is not enough memory to capture a step"
        except Exception as error:  # whatever a model does that a graph cannot repeat
            logger.debug("engine: capture failed", exc_info=True)
            return f"a step cannot be captured: {error}"
        finally:
            inputs.max_query_len = before
        if (change := state.change()) is not None:
            return f"{change} in each forward"
        self._state = self._state or state
        self.num_captures += 1
        self.capture_seconds += time.perf_counter() - began
        return step

    def _compiled_forward(self, loaded: _Loaded) -> Callable[[_Loaded], Tensor]:
        """`_forward` compiled, the windows of its layers being known from an eager run."""
        if self._windows is None:
            self._forward(loaded)
        if self._windows is None:
            raise UnsupportedModel("compile: expected each layer to attend to its own K/V")
        if self._compiled is None:
            self._compiled = torch.compile(self._model.forward)
        return self._forward_compiled


def _padded(
    arrays: list[npt.NDArray[Any]], shape: StepShape, padded: StepShape
) -> list[npt.NDArray[Any]]:
    """A mixed step's numbers with tokens, rows and logits of nobody behind them."""
    tokens, positions, *slots, wanted, lengths, bounds = arrays
    more_tokens, more_rows = padded.tokens - shape.tokens, padded.rows - shape.rows
    return [
        np.pad(tokens, (0, more_tokens)),
        np.pad(positions, (0, more_tokens)),
        *(np.pad(of_group, (0, more_tokens), constant_values=-1) for of_group in slots),
        np.pad(wanted, (0, padded.logits - shape.logits)),
        np.pad(lengths, (0, more_rows)),
        np.pad(bounds, (0, more_rows), mode="edge"),
    ]


def _sizes(shape: StepShape, num_groups: int) -> list[int]:
    """Bytes of each part of a step's numbers, in their order; those of 8 bytes each first."""
    if shape.decodes:
        changes = [shape.rows] * num_groups
        longs, ints = [shape.tokens, shape.tokens, *changes], [shape.rows, *changes]
    else:
        slots = [shape.tokens] * num_groups
        longs = [shape.tokens, shape.tokens, *slots, shape.logits]
        ints = [shape.rows, shape.rows + 1]
    return [8 * count for count in longs] + [4 * count for count in ints]
