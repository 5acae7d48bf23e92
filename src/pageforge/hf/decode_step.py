"""DecodeStep: a model's forward of one token a row, captured for a number of rows and replayed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import ModelOutput

from pageforge.batch import SequenceBatch
from pageforge.compiling import compile_forward
from pageforge.errors import UnsupportedModel
from pageforge.graphs import CapturedStep, GraphMemory, StepInputs, bucket
from pageforge.hf.cache import PagedKVCache
from pageforge.hf.padding import left_padding
from pageforge.hf.step_cache import STEP_ARGUMENT, StepCache

LEAST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""What `allowed_error` is at least."""

ROUNDINGS = 3
"""What it is else, in units of the dtype's precision for a layer. (32 layers of random weights in
bf16, where it is 13%: rounding alone is 3 to 8%, seldom 12, and 4.7 to 5.3% between the kernels
that run Llama 3.1 8B's shape; a token lost of 25 is 15% and more. Trained models round to less.)"""

HOLES = "the attention mask hides other tokens than left padding"
UNPLACED = "rows are padded, and no position_ids are passed"
"""Some models then work positions out of the mask, which a captured step does not see."""

RECOMPILES = 64
"""Variants of one forward that torch.compile may keep: one for each number of rows."""


@dataclass(frozen=True)
class Call:
    """A forward of one token a row."""

    tokens: Tensor  # [S, 1]
    positions: Tensor | None  # [..., S, 1], or [..., 1, 1] for all rows
    mask: Tensor | None  # [S, L], the new token included
    cache: PagedKVCache
    options: tuple[tuple[str, Hashable], ...]

    @property
    def variant(self) -> Hashable:
        """What a capture serves, within one pool: calls of as many rows (rounded up), and alike."""
        dims = None if self.positions is None else self.positions.shape[:-2]
        return bucket(len(self.tokens)), dims, self.options


class DecodeStep:
    """A captured step, for calls of one variant. Raises whatever stands in the way of a capture."""

    def __init__(
        self,
        forward: Callable[..., Any],
        cache_name: str,
        call: Call,
        max_tokens: int,
        memory: GraphMemory,
        *,
        compile: bool,
    ):
        dims = None if call.positions is None else tuple(call.positions.shape[:-2])
        self.is_trusted = False
        self._inputs = StepInputs(call.cache.pool, bucket(len(call.tokens)), max_tokens, dims)
        self._batch: Callable[[], SequenceBatch | None] = lambda: None
        self._rows = 0
        self._tokens = self._inputs.tokens  # those of the rows that there are
        self._positions = self._inputs.positions
        self._changes = 0  # of the batch's tables, when they were taken over
        self._length = 0  # tokens of each row, on the device
        self._padding: tuple[int, ...] | None = None
        on_cuda = self._inputs.device.type == "cuda"
        with torch.inference_mode(False):  # else it could only be written to in that mode
            self._differs = torch.empty(1, dtype=torch.bool, device="cpu", pin_memory=on_cuda)
        arguments = dict(call.options) | {
            "input_ids": self._inputs.tokens,
            "position_ids": self._inputs.positions,
            "attention_mask": None,
        }

        def run() -> Any:
            self._inputs.begin()
            cache = StepCache(self._inputs)
            outputs = forward(**arguments, **{cache_name: cache})
            cache.check_written()
            return outputs

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
        known.check_written()
        if not known.is_regular:
            raise UnsupportedModel("compile: expected each layer to attend to its own K/V")
        cache = StepCache(self._inputs, known.windows)
        compiled = compile_forward(forward, dynamic=False)

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

    def begin(self, batch: SequenceBatch, tokens: Tensor, positions: Tensor | None) -> bool:
        """Run the step if, at a glance, it is the next one of these rows; `replay` looks closely.

        Until then the device would have nothing to do. A step too much does no harm: it writes to
        where the next token comes anyway.
        """
        if (
            self._batch() is not batch
            or batch.length != self._length + 1
            or self._changes != batch.num_changes
            or not self.fits(self._length)
            or tokens.shape != self._tokens.shape
            or (positions is None) != self._inputs.counts_positions
            or (positions is not None and positions.shape != self._positions.shape)
        ):
            return False
        self._run(tokens, positions)
        return True

    def replay(
        self, call: Call, length: int, *, begun: bool = False
    ) -> tuple[ModelOutput, Callable[[], bool]] | str:
        """Run the step on rows that hold `length` tokens and have room for one more.

        Returns what the model returns, and a function that waits until it is known whether the
        mask was what the step assumes: if not, the output is wrong. Or says why the call cannot be
        served. With `begun` the step runs already.
        """
        batch, count = call.cache._state.batch, len(call.tokens)
        assert batch is not None
        moved = self._changes != batch.num_changes
        known = self._batch() is batch and (self._rows, self._length - begun) == (count, length)
        if not known or (moved and (begun or self._padding)):
            refusal = self._load(call, batch, length)
            if refusal is not None:
                return refusal
            begun = False
        elif moved:
            self.follow(batch)
        if not begun:
            self._run(call.tokens, call.positions)
        return (
            _outputs(self._captured.outputs, count, call.cache),
            self._compare(call.mask, count, length + 1),
        )

    def _run(self, tokens: Tensor, positions: Tensor | None) -> None:
        self._tokens.copy_(tokens)
        if positions is not None:
            self._positions.copy_(positions)
        # The graph counts lengths up itself. An interrupt that comes with it must not leave them
        # unknown: all is loaded anew then.
        batch, self._batch = self._batch, lambda: None
        self._captured.replay()
        self._length += 1
        self._batch = batch

    def follow(self, batch: SequenceBatch) -> None:
        """Take over the pages of the batch that was last replayed."""
        if self._changes != batch.num_changes:
            self._inputs.follow(batch)
            self._changes = batch.num_changes

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Replays come on `stream` from now on."""
        self._inputs.record_stream(stream)

    def forget(self) -> None:
        """Look at everything anew in the next replay: the mask is another one."""
        self._batch = lambda: None

    def _load(self, call: Call, batch: SequenceBatch, length: int) -> str | None:
        """Take over the rows, or say why they cannot be served."""
        padding: tuple[int, ...] | None = (0,) * len(batch)
        if call.mask is not None:
            padding = left_padding(call.mask.bool())
        if padding is None or any(
            shown < stored for shown, stored in zip(padding, batch.starts, strict=True)
        ):
            return HOLES
        if any(padding) and call.positions is None:
            return UNPLACED
        self._batch = lambda: None  # should this be interrupted, all is loaded anew
        self._padding = padding if any(padding) else None
        self._inputs.load(batch, length, self._padding)
        self._rows = len(batch)
        with torch.inference_mode(False):  # else they could only be written to in that mode
            self._tokens = self._inputs.tokens[: len(batch)]
            self._positions = self._inputs.positions[..., : len(batch), :]
        self._length = length
        self._changes = batch.num_changes
        self._batch = weakref.ref(batch)
        return None

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


def allowed_error(dtype: torch.dtype, num_layers: int) -> float:
    """How far, relative to its norm, a row may be from what the same tokens give by other kernels.

    These round otherwise in every layer, and what they are off by adds up like a random walk. A
    step that missed a token, or had a length baked in, is off by several times that.
    """
    return max(LEAST_ERROR[dtype], ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(num_layers))


def agree(replayed: ModelOutput, eager: ModelOutput, num_layers: int) -> bool:
    """Whether each row of two outputs is as near as `allowed_error` says."""
    for name, one in replayed.items():
        if isinstance(one, Tensor):
            errors = relative_errors(one, eager[name], centred=name == "logits")
            if not bool((errors <= allowed_error(one.dtype, num_layers)).all()):
                return False
    return True


def relative_errors(one: Tensor, other: Tensor, *, centred: bool) -> Tensor:
    """`||one - other|| / ||other||` of each row `[R, ...]`, `[R]` float32; NaN where one has NaN.

    `centred`: what all of a row have in common does not count, as softmax does not see it. (It is
    half of what roundings change in logits, and little of what a fault does.) Where a model masks
    words out, with the lowest number or -inf, nothing counts that is the same in both.
    """
    masked = (other <= torch.finfo(other.dtype).min) & (one == other)
    error, size = (
        values.float().masked_fill(masked, 0).flatten(1) for values in (one - other, other)
    )
    if centred:
        shown = ~masked.flatten(1)
        count = shown.sum(1, keepdim=True).clamp(min=1)
        error, size = (
            (values - values.sum(1, keepdim=True) / count) * shown for values in (error, size)
        )
    return error.norm(dim=1) / size.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)


def _check_outputs(outputs: Any, rows: int) -> None:
    if not isinstance(outputs, ModelOutput):
        raise UnsupportedModel(f"the model returns a {type(outputs).__name__}")
    for name, output in outputs.items():
        is_of_rows = (
            isinstance(output, Tensor) and output.dtype in LEAST_ERROR and len(output.shape) > 1
        ) and output.shape[0] == rows
        if not is_of_rows and not isinstance(output, Cache):
            raise UnsupportedModel(
                f"the model returns {name}, which is not a floating tensor [rows, ...]"
            )


def _outputs(outputs: ModelOutput, rows: int, cache: PagedKVCache) -> ModelOutput:
    """Copies of what the graph gave: its own memory is used again."""
    return type(outputs)(
        **{
            name: cache if isinstance(output, Cache) else output[:rows].clone()
            for name, output in outputs.items()
        }
    )
