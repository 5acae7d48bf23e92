"""Is a decode step with PagedKVCache as fast as with DynamicCache?

SmolLM2-135M's shape with random weights; the model call alone, host clock. DynamicCache runs under
`sdpa` attention, PagedKVCache under that or pageforge's. The two take turns step by step, so that
whatever else the machine does hits both; the figure is the median of the steps' ratios.

    python benchmarks/decode.py [--attention pageforge] [--batch 8] [--context 512]
                                [--device cuda] [--dtype float16]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pageforge import PagedKVCache, PagePool
from pageforge.probe import cache_argument


def smollm2_shape() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def compare(
    models: dict[str, LlamaForCausalLM], batch: int, context: int, steps: int, padded: bool
) -> dict:
    """`models`: of one set of weights, for the cache of each kind."""
    model = models["dynamic"]
    device = model.device
    tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    mask = torch.ones(batch, context, dtype=torch.long, device=device)
    if padded:
        for row in range(batch):
            mask[row, : row * context // (2 * batch)] = 0
    name = cache_argument(model)
    pool = PagePool.for_model(model, max_pages=batch * (context + steps + 16) // 16 + batch)
    caches = {"dynamic": DynamicCache(config=model.config), "paged": PagedKVCache(pool)}
    times: dict[str, list[float]] = {kind: [] for kind in caches}
    for kind, cache in caches.items():
        models[kind](tokens, attention_mask=mask, use_cache=True, **{name: cache})
    difference = 0.0
    for step in range(steps):
        token = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
        mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
        logits = {}
        for kind in sorted(caches, reverse=bool(step % 2)):
            start = now(device)
            output = models[kind](
                token, attention_mask=mask, use_cache=True, **{name: caches[kind]}
            )
            times[kind].append(now(device) - start)
            logits[kind] = output.logits
        assert not any(output.isnan().any() for output in logits.values())
        difference = max(difference, (logits["paged"] - logits["dynamic"]).abs().max().item())
    ratios = [p / d for p, d in zip(times["paged"], times["dynamic"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "question": "decode step, paged / dynamic",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "attention": models["paged"].config._attn_implementation,
        "dtype": str(model.dtype),
        "batch": batch,
        "context": context,
        "padded": padded,
        "steps": steps,
        "dynamic_ms": 1e3 * statistics.median(times["dynamic"]),
        "paged_ms": 1e3 * statistics.median(times["paged"]),
        "median_ratio": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "max_logits_difference": difference,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "pageforge"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # With cuDNN attention each new length costs DynamicCache 40 ms the first time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = smollm2_shape().to(options.device, getattr(torch, options.dtype))
    paged = copy.deepcopy(model)
    paged.set_attn_implementation(options.attention)
    models = {"dynamic": model, "paged": paged}
    for padded in (False, True):
        print(json.dumps(compare(models, options.batch, options.context, options.steps, padded)))


if __name__ == "__main__":
    main()
