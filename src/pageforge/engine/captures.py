"""Captures: steps as CUDA graphs, by shape; when one is made, when all are stale, why one lacks."""

from __future__ import annotations

import time
from collections import Counter

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from pageforge.engine.device_rows import DeviceRows
from pageforge.engine.forward import Forward
from pageforge.engine.step import Padding, StepShape
from pageforge.engine.step_buffer import LoadedStep, StepBuffer
from pageforge.graphs import CapturedStep, GraphMemory
from pageforge.hf.fused import fused
from pageforge.model_state import ModelState, hooks_on

logger = logging.get_logger(__name__)

WORTHWHILE = 2
"""Steps of one padded size after which a mixed step is captured: a capture costs three of them."""

NO_MEMORY = "there is not enough memory to capture a step"

PAUSE = 32
"""Eager steps for want of memory until a capture is tried again, which costs three of them."""


def captures_on(device: torch.device) -> bool:
    """Whether steps on `device` can be captured."""
    return device.type == "cuda"


class Captures:
    """The captured steps of one model. They share memory, for they are replayed one at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        buffer: StepBuffer,
        device_rows: DeviceRows,
        padding: Padding,
        *,
        compile: bool,
        allow_hooks: bool,
    ):
        """`compile`: what is captured goes through torch.compile."""
        self.eager_steps: Counter[str] = Counter()
        """Steps that ran eagerly, by reason."""
        self.num_captures = 0
        self.seconds = 0.0
        """Spent on captures, compiling included."""
        self._model = model
        self._forward = forward
        self._buffer = buffer
        self._device_rows = device_rows
        self._padding = padding
        self._compile = compile
        self._allow_hooks = allow_hooks
        self._graphs: dict[StepShape, CapturedStep | str] = {}
        self._hooks: set[str] = set()  # reasons why there are none
        self._times: Counter[StepShape] = Counter()
        self._memory: GraphMemory | None = None
        self._state: ModelState | None = None

    def change(self) -> str | None:
        """What is different of the model since steps were captured, in words; None: nothing."""
        return None if self._state is None else self._state.change()

    def refresh(self) -> None:
        """Drop captured steps if the model is not what it was when they were captured.

        And forget why there are none: hooks may be gone, and memory be there.
        """
        self._graphs = {
            shape: graph for shape, graph in self._graphs.items() if not isinstance(graph, str)
        }
        if (change := self.change()) is not None:
            logger.info("engine: %s; steps are captured anew", change)
            self.forget()

    def look_for_hooks(self) -> None:
        """Where hooks are gone, steps that ran eagerly for them are captured."""
        if self._hooks and hooks_on(self._model) is None:
            self._graphs = {
                shape: graph for shape, graph in self._graphs.items() if graph not in self._hooks
            }
            self._hooks.clear()

    def forget(self) -> None:
        """Drop captured steps, and what they hold of the model."""
        self._graphs.clear()
        self._times.clear()
        self._state = self._memory = None
        self._forward.forget_compiled()

    def get(self, shape: StepShape, loaded: LoadedStep) -> CapturedStep | None:
        """The captured step of this shape, captured now if it is worth while."""
        if not self._padding.is_padded(shape):
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
            if graph == NO_MEMORY:
                self._times[shape] += 1
                if self._times[shape] % PAUSE == 0:
                    del self._graphs[shape]
            return None
        return graph

    def _capture(self, shape: StepShape, loaded: LoadedStep) -> CapturedStep | str:
        """A captured step, or why there can be none.

        What it runs meanwhile does no harm: the same tokens are written to the same places, since
        what a run counts up is set back.
        """
        if not self._allow_hooks and (reason := hooks_on(self._model)) is not None:
            self._hooks.add(reason)
            return reason
        last_tokens = self._device_rows.last_tokens
        if not any(isinstance(graph, CapturedStep) for graph in self._graphs.values()):
            # Memory that graphs share goes with the last of them.
            stream = torch.cuda.Stream(last_tokens.device)
            self._memory = GraphMemory(torch.cuda.graph_pool_handle(), stream)
        assert self._memory is not None
        state, tokens_before = ModelState(self._model), last_tokens.clone()

        def undo() -> None:
            self._buffer.send()
            last_tokens.copy_(tokens_before)

        began = time.perf_counter()
        try:
            if self._compile:
                self._forward.compile(loaded)
            run = self._forward.run_compiled if self._compile else self._forward.run
            with fused(self._model, compiled=self._compile):
                step = CapturedStep(lambda: run(shape, loaded), self._memory, undo)
        except torch.cuda.OutOfMemoryError:
            return NO_MEMORY
        except Exception as error:  # whatever a model does that a graph cannot repeat
            logger.debug("engine: capture failed", exc_info=True)
            return f"a step cannot be captured: {error}"
        if (change := state.change()) is not None:
            return f"{change} in each forward"
        self._state = self._state or state
        self.num_captures += 1
        self.seconds += time.perf_counter() - began
        return step
