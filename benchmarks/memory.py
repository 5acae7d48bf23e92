"""How many bytes does a KV cache take while 32 sequences grow? Paged, DynamicCache, StaticCache.

GPT-2's geometry in fp16, 13-token prompts, one token a step; K/V are random, and go through each
cache's own `update` in all 12 layers, as a model's would. PageForge's figure is what the system
(mincore) or the driver has mapped; the others' is the storage that their tensors hold, and on CUDA
also what torch's allocator says.

    python benchmarks/memory.py [--device cuda] [--sequences 32] [--steps 0 10 25 50 100 200 499]
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import DynamicCache, GPT2Config, StaticCache
from transformers.cache_utils import Cache

from pageforge import KVGeometry, PagedKVCache, PagePool
from pageforge._version import __version__

PROMPT = 13
LAYERS, HEADS, DIM = 12, 12, 64


def storage_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache's tensors."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def grow(cache: Cache, sequences: int, device: torch.device, steps: list[int]) -> dict[int, int]:
    """Bytes at each step of `steps`."""
    sizes = {}
    for step in range(max(steps) + 1):
        tokens = 1 if step else PROMPT
        states = torch.randn(sequences, HEADS, tokens, DIM, device=device, dtype=torch.float16)
        for layer in range(LAYERS):
            cache.update(states, states.clone(), layer)
        if step in steps:
            paged = isinstance(cache, PagedKVCache)
            sizes[step] = cache.pool.stats().bytes_mapped if paged else storage_bytes(cache)
    return sizes


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 10, 25, 50, 100, 200, 499])
    options = parser.parse_args()
    device = torch.device(options.device)
    config = GPT2Config()
    geometry = KVGeometry.uniform(LAYERS, HEADS, DIM, dtype="float16", device=str(device))
    pool = PagePool(geometry)
    paged = PagedKVCache(pool)
    caches = {
        "paged": lambda: paged,
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache(512)": lambda: StaticCache(config=config, max_cache_len=512),
        "StaticCache(1024)": lambda: StaticCache(config=config, max_cache_len=1024),
    }
    sizes = {
        name: grow(make(), options.sequences, device, options.steps)
        for name, make in caches.items()
    }
    print("step  tokens  " + "  ".join(f"{name:>18}" for name in sizes) + "   MB (10^6 bytes)")
    for step in options.steps:
        row = "  ".join(f"{sizes[name][step] / 1e6:18.2f}" for name in sizes)
        print(f"{step:4}  {PROMPT + step:6}  {row}")
    paged.free()
    after_free = pool.stats().bytes_mapped
    pool.trim()
    print(
        json.dumps(
            {
                "question": "bytes of a KV cache while sequences grow",
                "sequences": options.sequences,
                "geometry": "GPT-2: 12 layers, 12 heads, D 64, fp16, page 16",
                "bytes": sizes,
                "after_free": after_free,
                "after_trim": pool.stats().bytes_mapped,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "pageforge": __version__,
            }
        )
    )


if __name__ == "__main__":
    main()
