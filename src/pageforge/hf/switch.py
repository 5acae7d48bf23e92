"""Switching a whole model to pageforge attention, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from pageforge.hf.attention import NAME


@contextlib.contextmanager
def pageforge_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """The model attends by pageforge attention, where it can; afterwards as it did before."""
    attention = [(config, config._attn_implementation) for config in configs_of(model)]
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        for config, implementation in attention:
            config._attn_implementation = implementation


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of the model, of the models inside it and inside other configs; outer ones first.

    Setting an attention implementation sets it in all of them.
    """
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    for config in configs:  # which grows meanwhile
        inner = (getattr(config, name, None) for name in config.sub_configs)
        configs += [each for each in inner if each is not None]
    return list({id(config): config for config in configs}.values())
