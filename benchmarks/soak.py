"""Does an engine lose anything over many requests? A toy model on the CPU.

Requests of random lengths come and go, some forked, some aborted, in a pool that is mostly full.
Prints, now and then, what the process and the pool hold; at the end no page may be used, and after
`drop_prefix_cache()` and `trim()` the pool may map its watermark at most.

    python benchmarks/soak.py --requests 20000
"""

from __future__ import annotations

import argparse
import logging
import time

import numpy as np
import torch

from pageforge import Engine, SamplingParams
from pageforge.bench.models import make_model
from pageforge.pool import WATERMARK

PAGES = 400
WAITING = 200
"""Requests that are queued at a time."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    total = parser.parse_args().requests
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("pageforge").setLevel(logging.ERROR)
    generator = np.random.default_rng(0)
    model = make_model("tiny", torch.device("cpu"))
    began, added, ended, failed, aborted = time.monotonic(), 0, 0, 0, 0
    with Engine(model, max_pages=PAGES, max_running=64) as engine:
        while added < total or engine.has_unfinished:
            while added < total and engine.stats().num_waiting < WAITING:
                name = engine.add_request(*_request(generator), request_id=str(added))
                added += 1
                if generator.random() < 0.02:
                    aborted += engine.abort(name)
            for output in engine.step():
                ended += 1
                failed += output.error is not None
                if ended % (total // 10) == 0:
                    _say(engine, ended, began)
        stats = engine.stats()
        print(f"added {added}, ended {ended}, aborted {aborted}, failed {failed}")
        print(
            f"preemptions {stats.num_preemptions}, prefix tokens found {stats.num_cached_tokens:,}"
        )
        assert ended == added == total and not failed and stats.pool.pages_used == 0
        engine.drop_prefix_cache()
        engine.trim()
        mapped = engine.stats().pool.bytes_mapped
        print(f"pages used 0, mapped after drop and trim {mapped:,} bytes")
        assert mapped <= WATERMARK


def _request(generator: np.random.Generator) -> tuple[list[int], SamplingParams]:
    start = [7] * int(generator.integers(0, 40))  # which many have in common
    prompt = start + generator.integers(0, 256, generator.integers(1, 40)).tolist()
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 24)),
        temperature=float(generator.choice([0.0, 0.8])),
        n=int(generator.choice([1, 1, 1, 3])),
    )
    return prompt, params


def _say(engine: Engine, ended: int, began: float) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * 4096
    pool, seconds = engine.stats().pool, time.monotonic() - began
    print(
        f"{ended:6} ended after {seconds:4.0f} s: process {resident / 1e6:6.1f} MB, pages "
        f"{pool.pages_used} used and {pool.pages_cached} cached"
    )


if __name__ == "__main__":
    main()
