"""What a transformers model stores in its KV cache, found by running it, not by reading its config.

Config fields lie (head_dim, MLA, per-layer windows); what the model passes to `cache.update` does
not. A weightless twin of the model runs two tokens on the meta device: no memory, no hooks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from pageforge.errors import UnsupportedModel
from pageforge.geometry import KVGeometry, LayerShape

MOVING_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that change with the length, on the host."""


def geometry_of(model: torch.nn.Module, page_size: int) -> KVGeometry:
    """The KV geometry of a model as it stands: its dtypes, and the devices of its layers.

    Raises UnsupportedModel for a model that stores no K/V by layers, or that cannot be run.
    """
    unwrap: Any = getattr(model, "get_base_model", None)  # PEFT
    base = model if unwrap is None else unwrap()
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModel(
            f"model: expected a transformers PreTrainedModel, got {type(base).__name__}; pass "
            f"PagePool a KVGeometry (see KVGeometry.of_layers) instead of using for_model"
        )
    with torch.device("meta"):
        twin = type(base)._from_config(_plain(base.config), dtype=base.dtype)
    shapes = _layer_shapes(twin)
    devices = _layer_devices(base)
    return KVGeometry.of_layers(
        {
            layer: replace(shape, device=str(devices.get(layer, base.device)))
            for layer, shape in shapes.items()
        },
        page_size,
    )


def geometry_of_config(
    config: PreTrainedConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> KVGeometry:
    """The KV geometry of any model of this `config`, all on `device`. Raises UnsupportedModel."""
    with torch.device("meta"):
        twin = _twin_of_config(config, dtype)
    shapes = _layer_shapes(twin)
    return KVGeometry.of_layers(
        {layer: replace(shape, device=str(device)) for layer, shape in shapes.items()}, page_size
    )


def layer_windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """The layers that can be paged, each with its sliding window or None for full attention.

    Others (linear attention, Mamba, layers that reuse another's K/V) keep transformers' own cache.
    """
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            windows[index] = None
        elif type(layer) is DynamicSlidingWindowLayer:
            windows[index] = layer.sliding_window
    if not windows:
        raise UnsupportedModel(
            f"{config.model_type}: expected attention layers with a growing KV cache, got none; "
            f"there is nothing to page, use the model's own cache"
        )
    return windows


def cache_argument(model: torch.nn.Module) -> str:
    """What this model's forward calls its cache: `past_key_values`, or `cache` since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def learned_positions(model: torch.nn.Module) -> int | None:
    """Positions in the model's learned position table; None where positions are computed.

    Past the table's end the lookup fails, on CUDA for the whole process. transformers calls such
    tables `wpe` (GPT-2), `embed_positions` (OPT, BART) or `position_embeddings`.
    """
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("wpe", "embed_positions", "position_embeddings") and isinstance(
            module, torch.nn.Embedding
        ):
            return int(module.num_embeddings - getattr(module, "offset", 0))
    return None


def moving_rope(model: torch.nn.Module) -> str | None:
    """The kind of rotary embeddings of the model that change with the length; None without any."""
    for part in model.modules():
        rope = getattr(part, "rope_type", None)  # or one for each type of layer
        moving = MOVING_ROPE.intersection(rope.values() if isinstance(rope, dict) else [rope])
        if moving:
            return min(moving)
    return None


class _Recorder(DynamicCache):
    """A cache that notes what each layer hands to it."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _layer_shapes(twin: PreTrainedModel) -> dict[int, LayerShape]:
    windows = layer_windows(twin.config)
    seen, failure = _run(twin)
    shapes = {
        layer: LayerShape(
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            dtype=str(key.dtype).removeprefix("torch."),
            window=windows[layer],
        )
        for layer, (key, value) in seen.items()
        if layer in windows
    }
    if len(shapes) < len(windows):
        shapes.update(_fill(shapes, windows, twin, failure))
    return shapes


def _run(
    twin: PreTrainedModel,
) -> tuple[Mapping[int, tuple[torch.Tensor, torch.Tensor]], Exception | None]:
    """Run two tokens. Some models look at values (MoE routing): then the layers until there."""
    recorder = _Recorder(twin.config)
    _avoid_values(twin)
    try:
        with torch.no_grad():
            twin.eval()(**_arguments(twin, recorder), use_cache=True)
    except Exception as error:  # whatever a model does on the meta device: the caller decides
        return recorder.seen, error
    return recorder.seen, None


def _arguments(twin: PreTrainedModel, recorder: _Recorder) -> dict[str, Any]:
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    if not twin.config.is_encoder_decoder:
        return {"input_ids": tokens, cache_argument(twin): recorder}
    # The decoder stores K/V; whatever the encoder takes (text, sound), it is left out.
    width = getattr(twin.config, "encoder", twin.config).hidden_size
    encoded = torch.zeros(1, 2, width, dtype=twin.dtype, device="meta")
    return {
        "decoder_input_ids": tokens,
        "encoder_outputs": BaseModelOutput(last_hidden_state=encoded),
        cache_argument(twin): EncoderDecoderCache(recorder, DynamicCache()),
    }


def _avoid_values(twin: PreTrainedModel) -> None:
    """On the meta device tensors have no values: see to it that the twin does not ask for any."""
    for module in twin.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _nothing
            module.config._experts_implementation = "batched_mm"  # no sorting by expert
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):  # no rotary factors that depend on the positions
            module.rope_type = "default"
        elif isinstance(rope_type, dict):
            module.rope_type = dict.fromkeys(rope_type, "default")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _fill(
    shapes: Mapping[int, LayerShape],
    windows: Mapping[int, int | None],
    twin: PreTrainedModel,
    failure: Exception | None,
) -> dict[int, LayerShape]:
    """Shapes of the layers that the run did not reach: as those that it reached, if these agree.

    A wrong guess does no harm: the cache compares shapes at every `update` and raises. Where the
    run did not fail, these layers store nothing (a config may count the encoder's).
    """
    if failure is None and shapes:
        return {}
    known = {(s.num_kv_heads, s.key_dim, s.value_dim, s.dtype) for s in shapes.values()}
    if len(known) != 1:
        missing = sorted(windows.keys() - shapes.keys())
        raise UnsupportedModel(
            f"{type(twin).__name__}: expected every attention layer to pass its K/V to the cache, "
            f"but layers {missing} did not ({failure or 'they store nothing'}); pass PagePool a "
            f"KVGeometry that says what they store, or use PagedKVCache(model.config), which takes "
            f"it from the first update"
        ) from failure
    heads, key_dim, value_dim, dtype = known.pop()
    return {
        layer: LayerShape(heads, key_dim, value_dim, dtype, window)
        for layer, window in windows.items()
        if layer not in shapes
    }


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` that runs anywhere: eager attention, no quantised weights."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _twin_of_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    kinds = [AutoModelForSeq2SeqLM] if config.is_encoder_decoder else [AutoModelForCausalLM]
    errors = []
    for kind in [*kinds, AutoModel]:
        try:
            return kind.from_config(_plain(config), dtype=dtype)
        except ValueError as error:
            errors.append(str(error).splitlines()[0])
    raise UnsupportedModel(
        f"{config.model_type}: expected a config that transformers can build a language model "
        f"from, got {'; '.join(errors)}; use PagePool.for_model(model) instead"
    )


def _layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each attention layer computes (models spread by `device_map` differ by layer)."""
    devices: dict[int, torch.device] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        parameter = next(module.parameters(), None)
        if isinstance(layer, int) and parameter is not None and layer not in devices:
            device = parameter.device
            if device.type == "meta":  # offloaded: accelerate's hook brings it where it runs
                hook: Any = getattr(module, "_hf_hook", None)
                if hook is None:
                    raise UnsupportedModel(
                        "model: expected weights on a device, got some on meta; load it first"
                    )
                device = torch.device(hook.execution_device)
            devices[layer] = device
    return devices
