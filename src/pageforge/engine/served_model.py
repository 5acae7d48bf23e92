"""A model while an engine serves it: how it attends, that no other engine may, and its mode."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from pageforge.errors import RequestError, expected
from pageforge.hf.switch import pageforge_attention_on

SERVED = "_is_served_by_pageforge"
"""An attribute of a model while an engine has it: a reference to it, for a copy of the model has a
copy of the attribute."""


@contextlib.contextmanager
def served(model: PreTrainedModel) -> Iterator[None]:
    """The model under pageforge attention; afterwards as it was.

    It is marked meanwhile: of two engines on it, the first to close would leave the other without.
    """
    marked = vars(model).get(SERVED)
    if marked is not None and marked() is model:
        raise RequestError(
            expected("model", "one that no engine serves", "one in use", "close that engine first")
        )
    with pageforge_attention_on(model):
        setattr(model, SERVED, weakref.ref(model))
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
        self._training: list[torch.nn.Module] = []

    def begin(self) -> None:
        """Put the model in evaluation mode; also again, should it have been left meanwhile."""
        training = [module for module in self._model.modules() if module.training]
        if training:
            self._training += training
            self._model.eval()

    def end(self) -> None:
        """Those that trained go on."""
        while self._training:
            self._training.pop().training = True
