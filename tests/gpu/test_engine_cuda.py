"""The engine on CUDA: the same tokens as `generate`, through graphs, preemption and swaps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.hf.tiny_models import make
from torch._dynamo.utils import counters
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from pageforge import Engine, SamplingParams

pytestmark = pytest.mark.gpu

TOKENS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SQUEEZED = {"max_pages": 20, "max_running": 16}


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    configs = {
        "llama": lambda: LlamaConfig(**TOKENS, **SIZES),
        "gpt2": lambda: GPT2Config(**TOKENS, n_embd=64, n_head=4, n_layer=3, n_positions=256),
    }
    yield make(configs[request.param](), "sdpa").cuda()


def _prompts(count: int, most: int = 60) -> list[list[int]]:
    generator = np.random.default_rng(count)
    return [generator.integers(2, 100, generator.integers(1, most)).tolist() for _ in range(count)]


def _params(count: int) -> list[SamplingParams]:
    lengths = np.random.default_rng(7).integers(1, 50, count)
    return [SamplingParams(max_tokens=int(length), temperature=0) for length in lengths]


@torch.no_grad()
def _alone(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_memory": "1GiB"},
        {"max_memory": "1GiB", "prefix_cache": False, "max_batch_tokens": 40},
        SQUEEZED,
        SQUEEZED | {"swap_memory": "256MiB"},
    ],
    ids=["ample", "chunks", "recomputed", "swapped"],
)
def test_tokens_are_those_of_generate(model: PreTrainedModel, settings: dict) -> None:
    prompts, params = _prompts(48), _params(48)
    want = [_alone(model, p, each.max_tokens) for p, each in zip(prompts, params, strict=True)]
    with Engine(model, **settings) as engine:
        for _ in range(2):  # the second time most steps are replays, and prompts prefix hits
            outputs = engine.generate(prompts, params)
            assert [list(output.token_ids) for output in outputs] == want
        stats = engine.stats()
        assert stats.num_replays > stats.num_steps // 2 and not stats.eager_steps
        assert stats.pool.pages_used == 0
        assert (stats.num_preemptions > 0) == ("max_pages" in settings)
        assert (stats.num_swaps > 0) == ("swap_memory" in settings)
        if "max_pages" not in settings:  # a squeezed pool has evicted what would come again
            assert (stats.num_cached_tokens > 0) == settings.get("prefix_cache", True)
    assert model.config._attn_implementation == "sdpa"


WINDOWS = {"sliding_window": 8}
MIXED = {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONFIGS: list[PreTrainedConfig] = [
    MistralConfig(**TOKENS, **SIZES, **WINDOWS),
    Gemma2Config(**TOKENS, **SIZES, **MIXED),
    Gemma3TextConfig(**TOKENS, **SIZES, **MIXED),
    Qwen3Config(**TOKENS, **SIZES),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_windows_and_softcaps(config: PreTrainedConfig) -> None:
    model = make(config, "eager").cuda()
    prompts = _prompts(6, 40)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    want = []
    for prompt in prompts:
        model.generation_config.eos_token_id = None
        want.append(_alone(model, prompt, 24))
    with Engine(model, max_memory="256MiB") as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            assert [list(output.token_ids) for output in outputs] == want


def test_forks_share_pages_until_they_write(model: PreTrainedModel) -> None:
    prompt = _prompts(1, 60)[0] * 3
    with Engine(model, prefix_cache=False, max_memory="256MiB") as engine:
        (output,) = engine.generate([prompt], SamplingParams(n=6, max_tokens=30, temperature=0))
        want = _alone(model, prompt, 30)
        assert [list(each.token_ids) for each in output.outputs] == [want] * 6
        assert engine.stats().num_computed_tokens <= len(prompt) + 6 * 30 + 6


def test_memory_is_back_at_the_driver(model: PreTrainedModel) -> None:
    """Alone on the device. What libraries keep for good they have since the first time."""
    free = []
    for _ in range(2):
        engine = Engine(model, max_memory="2GiB")
        engine.generate(_prompts(32), _params(32))
        engine.sleep()
        assert engine.stats().pool.bytes_mapped <= 4 << 20
        engine.wake()
        engine.generate(_prompts(4), _params(4))
        engine.close()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] <= 4 << 20


def test_seeded_draws_do_not_depend_on_neighbours(model: PreTrainedModel) -> None:
    asked = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=5)
    prompt = _prompts(1)[0]
    with Engine(model, max_memory="256MiB") as engine:
        alone = engine.generate([prompt], asked)[0].token_ids
        others = [SamplingParams(max_tokens=15, temperature=1.0, top_k=5, seed=i) for i in range(9)]
        beside = engine.generate([*_prompts(9), prompt], [*others, asked])[-1].token_ids
    assert list(alone) == list(beside)


def test_hooks_run_and_weights_may_change(model: PreTrainedModel) -> None:
    prompts = _prompts(4)
    params = SamplingParams(max_tokens=12, temperature=0)
    with Engine(model, max_memory="256MiB") as engine:
        engine.generate(prompts, params)
        calls = []
        hook = model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
        engine.generate(prompts, params)
        assert calls and engine.stats().eager_steps
        hook.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.0) if parameter.dim() == 2 else None
        engine.weights_changed()
        outputs = engine.generate(prompts, params)
    want = [_alone(model, prompt, 12) for prompt in prompts]
    assert [list(output.token_ids) for output in outputs] == want


def test_prompt_logprobs(model: PreTrainedModel) -> None:
    prompt = _prompts(1, 60)[0] + [5, 6, 7]
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=2)
    with Engine(model, max_memory="256MiB") as engine:
        engine.generate([prompt], SamplingParams(max_tokens=1))  # so that there could be a hit
        (output,) = engine.generate([prompt], params)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt], device="cuda")).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for place, found in enumerate(output.prompt_logprobs[1:]):
        assert found.chosen.logprob == pytest.approx(
            float(logprobs[place, prompt[place + 1]]), abs=1e-3
        )


def test_logprobs_come_with_the_tokens(model: PreTrainedModel) -> None:
    """On the host nobody waits for the step after theirs, and none is read before it is there."""
    prompts = _prompts(8)
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=2)
    with Engine(model, max_memory="256MiB") as engine:
        for prompt in prompts:
            engine.add_request(prompt, params)
        engine.step()
        (flight,) = engine._core._flights
        assert flight.logprobs is not None and flight.logprobs.chosen.is_pinned()
        outputs = {}
        while engine.has_unfinished:
            outputs |= {tuple(output.prompt_token_ids): output for output in engine.step()}
    for prompt in prompts:
        output = outputs[tuple(prompt)]
        ids = torch.tensor([prompt + list(output.token_ids)], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
        assert [each.chosen.logprob for each in output.logprobs] == pytest.approx(want, abs=1e-3)


def test_streams_side_by_side(model: PreTrainedModel) -> None:
    prompts = _prompts(6)
    params = SamplingParams(max_tokens=10, temperature=0)

    async def read(engine: Engine, prompt: list[int]) -> list[int]:
        chunks = engine.stream_async(prompt, params)
        return [token async for chunk in chunks for token in chunk.token_ids]

    async def read_all(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*(read(engine, prompt) for prompt in prompts))

    with Engine(model, max_memory="256MiB") as engine:
        got = asyncio.run(read_all(engine))
    assert got == [_alone(model, prompt, 10) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**TOKENS, **SIZES), Gemma2Config(**TOKENS, **SIZES, **MIXED)],
    ids=lambda config: config.model_type,
)
def test_compiled_steps(config: PreTrainedConfig) -> None:
    """Of all sizes they are compiled twice: those that decode, and those that have prompts too."""
    model = make(config, "eager").cuda()
    prompts, params = _prompts(48), _params(48)
    want = [_alone(model, p, each.max_tokens) for p, each in zip(prompts, params, strict=True)]
    torch._dynamo.reset()
    counters.clear()
    options = {"max_running": 16, "max_batch_tokens": 64, "prefix_cache": False}
    with Engine(model, compile=True, max_memory="256MiB", **options) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            assert [list(output.token_ids) for output in outputs] == want
        stats, shapes = engine.stats(), engine._core.runner._captures._graphs
        assert stats.num_replays > stats.num_steps // 2 and not stats.eager_steps
        for decodes in (True, False):
            assert len({shape.tokens for shape in shapes if shape.decodes == decodes}) > 3
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
