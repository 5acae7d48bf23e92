"""What the probe reads off models: heads, dims, windows and groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.hf.tiny_models import CONFIGS, WINDOW, make, tiny
from transformers import DynamicCache, MambaConfig, MixtralConfig

from pageforge.errors import GeometryError, UnsupportedModel
from pageforge.geometry import KVGeometry, LayerShape
from pageforge.probe import (
    cache_argument,
    geometry_of,
    geometry_of_config,
    layer_windows,
    learned_positions,
)

CPU = torch.device("cpu")

Group = tuple[tuple[int, ...], int, int, int, int | None]
"""(layers, KV heads, key dim, value dim, window)."""

GROUPS: dict[str, list[Group]] = {
    "gpt2": [((0, 1), 4, 8, 8, None)],
    "opt": [((0, 1), 4, 8, 8, None)],
    "bloom": [((0, 1), 4, 8, 8, None)],
    "gpt_neox": [((0, 1), 4, 8, 8, None)],
    "falcon": [((0, 1), 4, 8, 8, None)],  # it repeats its two heads before the cache
    "llama": [((0, 1), 2, 8, 8, None)],
    "qwen2": [((0, 1), 2, 8, 8, None)],
    "qwen3": [((0, 1), 2, 8, 8, None)],
    "qwen3_next": [((1, 3), 2, 8, 8, None)],  # the other layers are linear attention
    "mistral": [((0, 1), 2, 8, 8, WINDOW)],
    "mixtral": [((0, 1), 2, 8, 8, None)],
    "phi3": [((0, 1), 2, 8, 8, None)],
    "gemma2": [((0,), 2, 8, 8, WINDOW), ((1,), 2, 8, 8, None)],
    "gemma3": [((0, 2), 2, 8, 8, WINDOW), ((1,), 2, 8, 8, None)],
    "gpt_oss": [((0, 2), 2, 8, 8, WINDOW), ((1,), 2, 8, 8, None)],
    "deepseek_v3": [((0, 1), 1, 16, 4, None)],  # the latent, and the key's rotary part
    "t5": [((0, 1), 4, 8, 8, None)],
    "bart": [((0, 1), 4, 8, 8, None)],
}


def groups_of(geometry: KVGeometry) -> list[Group]:
    return [
        (
            group.layers,
            group.shape.num_kv_heads,
            group.shape.key_dim,
            group.shape.value_dim,
            group.shape.window,
        )
        for group in geometry.groups
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_geometry_of_every_family(name: str) -> None:
    model = tiny(name)
    config, random = model.config.to_dict(), torch.get_rng_state()
    geometry = geometry_of(model, 16)
    assert groups_of(geometry) == GROUPS[name]
    assert geometry.page_size == 16
    assert {(g.shape.dtype, g.shape.device) for g in geometry.groups} == {("float32", "cpu")}
    assert geometry == geometry_of_config(model.config, 16, torch.float32, CPU)
    # Nothing of the caller's was touched: a cache may make its pool in the midst of sampling.
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_are_those_of_transformers(name: str) -> None:
    windows = layer_windows(tiny(name).config)
    expected = {layer: window for layers, _, _, _, window in GROUPS[name] for layer in layers}
    assert windows == expected


def test_the_dtype_and_the_pad_token_of_a_real_model() -> None:
    """With a pad token, transformers would look for it among tokens that have no values."""
    config = CONFIGS["gpt2"]()
    for config.pad_token_id in (None, 0, 5):
        model = make(config).to(torch.bfloat16)
        shape = geometry_of(model, 8).groups[0].shape
        assert shape == LayerShape(4, 8, 8, "bfloat16")
        assert geometry_of_config(config, 8, torch.bfloat16, CPU) == geometry_of(model, 8)
        assert model.config.pad_token_id == config.pad_token_id


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn", "linear"])
def test_rotary_factors_that_depend_on_positions(kind: str) -> None:
    config = CONFIGS["llama"]()
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    assert groups_of(geometry_of(make(config), 8)) == GROUPS["llama"]
    assert groups_of(geometry_of_config(config, 8, torch.float32, CPU)) == GROUPS["llama"]


@pytest.mark.parametrize("experts", [None, "eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_experts_on_the_meta_device(name: str, experts: str | None) -> None:
    """Whatever computes the experts of the model itself."""
    config = CONFIGS[name]()
    config._experts_implementation = experts
    assert groups_of(geometry_of_config(config, 8, torch.float32, CPU)) == GROUPS[name]
    assert config._experts_implementation == experts


def test_experts_that_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers behind them are taken to be as those before."""

    def look(experts, hidden_states, *args, **kwargs):
        return hidden_states * hidden_states.sum().item()

    experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts
    monkeypatch.setattr(experts, "forward", look)
    assert groups_of(geometry_of(tiny("mixtral"), 8)) == GROUPS["mixtral"]


def test_layers_that_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self, *args, **kwargs):
        raise RuntimeError("no such thing on meta")

    attention = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", fail)
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1\].*no such thing on meta") as caught:
        geometry_of(tiny("llama"), 8)
    assert "KVGeometry" in str(caught.value)


def test_a_large_model_costs_no_memory() -> None:
    """Eight experts of Mixtral's width in 32 layers: 187 GB in fp32, none of which is made."""
    config = MixtralConfig()
    geometry = geometry_of_config(config, 16, torch.bfloat16, CPU)
    assert groups_of(geometry) == [(tuple(range(32)), 8, 128, 128, None)]


def test_a_model_that_shares_keys_and_values_between_layers() -> None:
    config = transformers.Gemma3nTextConfig(
        vocab_size=50,
        vocab_size_per_layer_input=50,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[32] * 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=WINDOW,
        altup_num_inputs=2,
        laurel_rank=4,
    )
    geometry = geometry_of_config(config, 8, torch.float32, CPU)
    assert groups_of(geometry) == [((0,), 2, 8, 8, WINDOW), ((1,), 2, 8, 8, None)]


def test_a_model_that_listens() -> None:
    """Whisper's decoder stores K/V of what it says; the probe needs no sound for that."""
    config = transformers.WhisperConfig(
        vocab_size=50,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    expected = [((0, 1), 2, 16, 16, None)]
    assert groups_of(geometry_of_config(config, 8, torch.float32, CPU)) == expected
    model = transformers.WhisperForConditionalGeneration(config)
    assert groups_of(geometry_of(model, 8)) == expected


def test_a_decoder_with_fewer_layers_than_the_encoder() -> None:
    config = CONFIGS["t5"]()
    config.num_decoder_layers = 1
    assert groups_of(geometry_of_config(config, 8, torch.float32, CPU)) == [((0,), 4, 8, 8, None)]
    config = CONFIGS["bart"]()
    config.encoder_layers, config.decoder_layers = 1, 3
    assert groups_of(geometry_of_config(config, 8, torch.float32, CPU)) == [
        ((0, 1, 2), 4, 8, 8, None)
    ]


# --- models that are more than a plain model ------------------------------------------------


def test_the_models_own_hooks_are_not_run() -> None:
    model = make(CONFIGS["llama"]())
    model.model.layers[0].register_forward_pre_hook(lambda *args: pytest.fail("a hook was run"))
    assert groups_of(geometry_of(model, 8)) == GROUPS["llama"]
    assert not model.training


def test_an_adapter_is_looked_through() -> None:
    class Adapter(torch.nn.Module):  # as PEFT's
        def get_base_model(self) -> torch.nn.Module:
            return tiny("llama")

    assert geometry_of(Adapter(), 8) == geometry_of(tiny("llama"), 8)


def test_a_quantised_model() -> None:
    """Its config says how its weights are packed; the twin has none."""
    model = make(CONFIGS["llama"]())
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert groups_of(geometry_of(model, 8)) == GROUPS["llama"]
    assert model.config.quantization_config["load_in_4bit"]


def test_layers_on_other_devices() -> None:
    """`device_map`: a layer stores where it computes; offloaded weights lie on meta until then."""
    model = make(CONFIGS["llama"]())
    attention = model.model.layers[1].self_attn
    attention.to("meta")
    attention._hf_hook = SimpleNamespace(execution_device="cuda:1")
    geometry = geometry_of(model, 8)
    assert [(g.layers, g.shape.device) for g in geometry.groups] == [
        ((0,), "cpu"),
        ((1,), "cuda:1"),
    ]


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), torch.nn.Sequential()], ids=str)
def test_a_model_that_is_not_transformers_own(what: torch.nn.Module) -> None:
    with pytest.raises(UnsupportedModel, match=r"PreTrainedModel, got (Linear|Sequential)"):
        geometry_of(what, 8)


def test_a_model_without_attention() -> None:
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)
    with pytest.raises(UnsupportedModel, match=r"mamba.*nothing to page"):
        geometry_of_config(config, 8, torch.float32, CPU)


def test_a_model_that_keeps_no_cache() -> None:
    config = transformers.RwkvConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)
    with pytest.raises(UnsupportedModel, match=r"layers \[0\] did not"):
        geometry_of_config(config, 8, torch.float32, CPU)


def test_a_model_of_images() -> None:
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnsupportedModel, match=r"layers \[0\] did not"):
        geometry_of_config(config, 8, torch.float32, CPU)


def test_a_config_of_no_model_at_all() -> None:
    class Config(transformers.PreTrainedConfig):
        model_type = "made_up"
        num_hidden_layers = 2

    with pytest.raises(UnsupportedModel, match=r"made_up.*for_model"):
        geometry_of_config(Config(), 8, torch.float32, CPU)


def test_a_dtype_that_no_pool_has() -> None:
    with pytest.raises(GeometryError, match="dtype"):
        geometry_of(make(CONFIGS["llama"]()).to(torch.float64), 8)


def test_an_impossible_page_size() -> None:
    with pytest.raises(GeometryError, match="page_size"):
        geometry_of(tiny("llama"), 12)


# --- names ----------------------------------------------------------------------------------


def test_the_name_of_the_cache_argument() -> None:
    name = cache_argument(tiny("llama"))
    assert name in ("past_key_values", "cache")
    cache = DynamicCache(config=tiny("llama").config)
    with torch.no_grad():
        tiny("llama")(torch.ones(1, 4, dtype=torch.long), **{name: cache})
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart", "llama", "bloom"])
def test_learned_positions_are_those_that_the_model_can_look_up(name: str) -> None:
    model = tiny(name)
    learned = name in ("gpt2", "opt", "bart")
    assert learned_positions(model) == (model.config.max_position_embeddings if learned else None)
