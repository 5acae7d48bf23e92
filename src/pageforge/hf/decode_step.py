"""DecodeStep: a model's forward of one token a row, captured for a number of rows and replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import ModelOutput

from pageforge.batch import SequenceBatch
from pageforge.errors import UnsupportedModel
from pageforge.graphs import CapturedStep, StepInputs, bucket
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.padding import left_padding
from pageforge.hf.step_cache import STEP_ARGUMENT, StepCache

AGREEMENT = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How far, relative to its norm, the first replay may be from the same step run eagerly. Other
kernels round otherwise; a step that missed its attention, or had a length baked in, is off by all
of it."""

RECOMPILES = 64
"""Variants of one forward that torch.compile may keep: one for each number of rows."""


@dataclass(frozen=True)
class Call:
    """A forward of one token a row."""

    tokens: Tensor  # [S, 1]
    positions: Tensor | None  # [..., S, 1]
    mask: Tensor | None  # [S, L], the new token included
    cache: PagedKVCache
    options: tuple[tuple[str, Hashable], ...]

    @property
    def variant(self) -> Hashable:
        """What a capture serves: calls of the same pool, rows (rounded up) and options."""
        dims = None if self.positions is None else self.positions.shape[:-2]
        return id(self.cache.pool), bucket(len(self.tokens)), dims, self.options


class DecodeStep:
    """A captured step, for calls of one variant. Raises whatever stands in the way of a capture."""

    def __init__(
        self,
        forward: Callable[..., Any],
        cache_name: str,
        call: Call,
        max_tokens: int,
        memory: object,
        *,
        compile: bool,
    ):
        dims = None if call.positions is None else tuple(call.positions.shape[:-2])
        self.is_trusted = False
        self._inputs = StepInputs(call.cache.pool, bucket(len(call.tokens)), max_tokens, dims)
        self._batch: Callable[[], SequenceBatch | None] = lambda: None
        self._changes = 0  # of the batch's tables, when they were taken over
        self._length = 0  # tokens of each row, on the device
        self._padding: tuple[int, ...] | None = None
        on_cuda = self._inputs.device.type == "cuda"
        self._differs = torch.empty(1, dtype=torch.bool, pin_memory=on_cuda)
        arguments = dict(call.options) | {
            "input_ids": self._inputs.tokens,
            "position_ids": self._inputs.positions,
            "attention_mask": None,
        }

        def run() -> Any:
            self._inputs.begin()
            return forward(**arguments, **{cache_name: StepCache(self._inputs)})

        run = self._compiled(run, forward, cache_name, arguments) if compile else run
        self._captured = CapturedStep(run, memory)
        _check_outputs(self._captured.outputs, self._inputs.rows)

    def _compiled(
        self,
        run: Callable[[], Any],
        forward: Callable[..., Any],
        cache_name: str,
        arguments: dict[str, Any],
    ) -> Callable[[], Any]:
        """`run` with the forward compiled, attention and its windows being known from one run."""
        self._inputs.begin()
        known = StepCache(self._inputs)
        forward(**arguments, **{cache_name: known})
        if not known.is_regular:
            raise UnsupportedModel("compile: expected each layer to attend to its own K/V")
        cache = StepCache(self._inputs, known.windows)
        compiled = torch.compile(forward, dynamic=False)

        def run_compiled() -> Any:
            self._inputs.begin()
            for layer, window in known.windows.items():
                self._inputs.plan(known.group_of[layer], window)
            with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
                return compiled(**arguments, **{cache_name: cache, STEP_ARGUMENT: cache})

        return run_compiled

    def fits(self, length: int) -> bool:
        """Whether rows of `length` tokens can take one more."""
        return length < self._inputs.max_tokens

    def replay(self, call: Call, length: int) -> tuple[ModelOutput, Callable[[], bool]] | None:
        """Run the step on rows that hold `length` tokens and have room for one more.

        Returns what the model returns, and a function that waits until it is known whether the
        mask was what the step assumes: if not, the output is wrong. None where the mask cannot be
        served.
        """
        batch = call.cache._state.batch
        assert batch is not None
        moved = self._changes != batch.num_changes
        if self._batch() is not batch or self._length != length or (moved and self._padding):
            if not self._load(call, batch, length):
                return None
        elif moved:
            self.follow(batch)
        count = len(call.tokens)
        self._inputs.tokens[:count].copy_(call.tokens)
        if call.positions is not None:
            self._inputs.positions[..., :count, :].copy_(call.positions)
        is_right = self._compare(call.mask, count, length + 1)
        self._captured.replay()
        self._length = length + 1
        return _outputs(self._captured.outputs, count, call.cache), is_right

    def follow(self, batch: SequenceBatch) -> None:
        """Take over the pages of the batch that was last replayed."""
        if self._changes != batch.num_changes:
            self._inputs.follow(batch)
            self._changes = batch.num_changes

    def _load(self, call: Call, batch: SequenceBatch, length: int) -> bool:
        """Take over the rows; False where the mask hides something else than left padding."""
        padding: tuple[int, ...] | None = (0,) * len(batch)
        if call.mask is not None:
            padding = left_padding(call.mask.bool())
        if padding is None or any(
            shown < stored for shown, stored in zip(padding, batch.starts, strict=True)
        ):
            return False
        self._padding = padding if any(padding) else None
        self._inputs.load(batch, length, self._padding)
        self._batch = weakref.ref(batch)
        self._changes = batch.num_changes
        return True

    def _compare(self, mask: Tensor | None, rows: int, length: int) -> Callable[[], bool]:
        """Whether the mask shows all but the padding, to be asked for later."""
        if mask is None:
            return lambda: self._padding is None
        inputs = self._inputs
        positions = torch.arange(length, device=inputs.device)
        shown = positions >= inputs.starts[:rows, None]
        self._differs.copy_((mask.bool() != shown).any()[None], non_blocking=True)
        known = torch.cuda.Event()
        known.record()

        def is_right() -> bool:
            known.synchronize()
            return not self._differs.item()

        return is_right


def agree(replayed: ModelOutput, eager: ModelOutput) -> bool:
    """Whether two outputs are as near as AGREEMENT says."""
    for name, one in replayed.items():
        if isinstance(one, Tensor):
            other = eager[name]
            error = (one.float() - other.float()).norm()
            if not bool(error <= AGREEMENT[one.dtype] * other.float().norm()):
                return False
    return True


def _check_outputs(outputs: Any, rows: int) -> None:
    if not isinstance(outputs, ModelOutput):
        raise UnsupportedModel(f"the model returns a {type(outputs).__name__}")
    for name, output in outputs.items():
        is_of_rows = isinstance(output, Tensor) and output.shape[0] == rows
        if not is_of_rows and not isinstance(output, Cache):
            raise UnsupportedModel(f"the model returns {name}, which is not a tensor [rows, ...]")


def _outputs(outputs: ModelOutput, rows: int, cache: PagedKVCache) -> ModelOutput:
    """Copies of what the graph gave: its own memory is used again."""
    return type(outputs)(
        **{
            name: cache if isinstance(output, Cache) else output[:rows].clone()
            for name, output in outputs.items()
        }
    )
