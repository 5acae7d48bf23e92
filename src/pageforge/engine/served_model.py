"""A model while an engine serves it: how it attends, that no other engine may, and its mode."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from pageforge.errors import RequestError, expected
from pageforge.hf.switch import pageforge_attention_on

SERVED = "_is_served_by_pageforge"
"""An attribute of a model while an engine has it."""


class _Mark:
    """Says which model is served: a copy of the model, or one that was saved, has an empty mark."""

    def __init__(self, model: PreTrainedModel | None = None):
        self._model = None if model is None else weakref.ref(model)

    def is_on(self, model: PreTrainedModel) -> bool:
        """Whether it is this one."""
        return self._model is not None and self._model() is model

    def __reduce__(self) -> Any:
        return _Mark, ()


@contextlib.contextmanager
def served(model: PreTrainedModel) -> Iterator[None]:
    """The model under pageforge attention; afterwards as it was.

    It is marked meanwhile: of two engines on it, the first to close would leave the other without.
    """
    mark = vars(model).get(SERVED)
    if mark is not None and mark.is_on(model):
        raise RequestError(
            expected("model", "one that no engine serves", "one in use", "close that engine first")
        )
    with pageforge_attention_on(model):
        setattr(model, SERVED, _Mark(model))
        try:
            yield
        finally:
            delattr(model, SERVED)


class EvaluationMode:
    """The mode of a model while requests run; in between its modules are as they were.

    So a model that is trained between rollouts trains on, and never answers with dropout.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._training: dict[torch.nn.Module, None] = {}

    def begin(self) -> None:
        """Put the model in evaluation mode; also again, should it have been left meanwhile."""
        training = [module for module in self._model.modules() if module.training]
        if training:
            self._training |= dict.fromkeys(training)
            self._model.eval()

    def end(self) -> None:
        """Those that trained go on. Interrupted, it is begun again with the next call."""
        if not self._training:
            return
        if all(module in self._training for module in self._model.modules()):
            self._model.train()  # modules may do more with it than note it
        for module in self._training:
            module.training = True
        self._training.clear()


@contextlib.contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[EvaluationMode]:
    """A model's EvaluationMode, which ends with the context, or when nobody has that any more."""
    mode = EvaluationMode(model)
    try:
        yield mode
    finally:
        mode.end()
