"""Forward: a model's forward over a step that lies on the device, and what the next one finds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pageforge.compiling import compile_forward
from pageforge.engine.device_rows import DeviceRows
from pageforge.engine.packed import PackedCache
from pageforge.engine.sequence import NO_TOKEN
from pageforge.engine.step import StepShape
from pageforge.engine.step_buffer import LoadedStep
from pageforge.errors import UnsupportedModel
from pageforge.hf.decode_step import RECOMPILES
from pageforge.hf.step_cache import STEP_ARGUMENT
from pageforge.probe import cache_argument


class Forward:
    """Runs a loaded step, eagerly or through torch.compile. Graphs capture either.

    Both give logits `[R, V]`, or of a greedy step the best tokens: `[R]` int64, NO_TOKEN where
    logits make no sense.
    """

    def __init__(self, model: PreTrainedModel, device_rows: DeviceRows):
        self._model = model
        self._device_rows = device_rows
        self._cache_name = cache_argument(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._windows: dict[int, int | None] | None = None
        self._compiled: Callable[..., Any] | None = None

    def run(self, shape: StepShape, loaded: LoadedStep) -> Tensor:
        """The step, eagerly."""
        return self._finish(shape, loaded, self._logits(loaded))

    def run_compiled(self, shape: StepShape, loaded: LoadedStep) -> Tensor:
        """The step, of a padded size, through torch.compile, after `compile`."""
        return self._finish(shape, loaded, self._logits_compiled(loaded))

    def compile(self, loaded: LoadedStep) -> None:
        """Prepare `run_compiled`. An eager forward shows the windows of the model's layers."""
        if self._windows is None:
            self._logits(loaded)
        if self._windows is None:
            raise UnsupportedModel("compile: expected each layer to attend to its own K/V")
        if self._compiled is None:
            self._compiled = compile_forward(self._model.forward)

    def forget_compiled(self) -> None:
        """Drop what was compiled, and what it holds of the model."""
        self._compiled = None

    def _finish(self, shape: StepShape, loaded: LoadedStep, logits: Tensor) -> Tensor:
        """What a step gives, and has to leave for the next one of the same rows."""
        inputs, places = loaded.inputs, loaded.logit_places
        if places is not None:
            return logits if self._takes_rows else logits[places]
        active = inputs.seq_lens > 0
        inputs.positions += active
        inputs.seq_lens += active
        if not shape.is_greedy:
            return logits
        best, tokens = logits.max(-1)  # of equal ones the first; NaN beats all
        last_tokens = self._device_rows.last_tokens[: len(tokens)]
        last_tokens.copy_(torch.where(active, tokens, last_tokens))
        return tokens.masked_fill(~(best > -torch.inf), NO_TOKEN)

    def _logits(self, loaded: LoadedStep) -> Tensor:  # [R, V], or [T, V] of all tokens
        arguments = self._arguments(loaded)
        cache = PackedCache(loaded.inputs)
        outputs = self._model(**arguments, **{self._cache_name: cache})
        cache.check_written()
        if cache.is_regular:
            self._windows = cache.windows
        logits: Tensor = outputs.logits[0]
        return logits

    def _logits_compiled(self, loaded: LoadedStep) -> Tensor:
        """The same through torch.compile, which traces no lazy K/V: attention gets the cache."""
        assert self._compiled is not None and self._windows is not None
        arguments = self._arguments(loaded)
        inputs = loaded.inputs
        cache = PackedCache(inputs, self._windows)
        # Compiled once for steps that decode any number of rows, and once for any mixed ones.
        of_tokens = [inputs.tokens, *(inputs.slots or ())]
        of_rows = [inputs.seq_lens, inputs.cu_query_lens, *inputs.page_tables]
        for layer, window in self._windows.items():
            plan = inputs.plan(cache.group_of[layer], window)
            of_rows += [] if plan is None else [plan.table]
        for tensor in of_tokens + of_rows:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for name in ("input_ids", "position_ids"):
            torch._dynamo.maybe_mark_dynamic(arguments[name], 1)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            outputs = self._compiled(**arguments, **{self._cache_name: cache, STEP_ARGUMENT: cache})
        logits: Tensor = outputs.logits[0]
        return logits

    def _arguments(self, loaded: LoadedStep) -> dict[str, Any]:
        """What the model is given, the cache apart. Page tables are as they should be then."""
        inputs = loaded.inputs
        inputs.begin()
        self._device_rows.apply(loaded.changes)
        tokens, last_tokens = inputs.tokens, self._device_rows.last_tokens
        # Negative: the last token of a row, which only the device may know yet.
        tokens = torch.where(tokens < 0, last_tokens[(-1 - tokens).clamp(min=0)], tokens)
        arguments: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": inputs.positions[None],
            "attention_mask": None,
            "use_cache": True,
        }
        if loaded.logit_places is not None and self._takes_rows:
            arguments["logits_to_keep"] = loaded.logit_places
        return arguments
