"""A model while an engine serves it: how it attends, its mode, and that no other engine may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel

from pageforge.errors import RequestError, expected
from pageforge.hf.switch import pageforge_attention_on

SERVED = "_is_served_by_pageforge"
"""An attribute of a model while an engine has it."""


@contextlib.contextmanager
def served(model: PreTrainedModel) -> Iterator[None]:
    """The model under pageforge attention and in evaluation mode; afterwards as it was.

    It is marked meanwhile: of two engines on it, the first to close would leave the other without.
    """
    if SERVED in vars(model):
        raise RequestError(
            expected("model", "one that no engine serves", "one in use", "close that engine first")
        )
    training = [module for module in model.modules() if module.training]
    with pageforge_attention_on(model):
        setattr(model, SERVED, True)
        try:
            model.eval()
            yield
        finally:
            delattr(model, SERVED)
            for module in training:
                module.training = True
