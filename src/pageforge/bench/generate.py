"""Tokens a second of `model.generate` itself."""

from __future__ import annotations

import contextlib
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pageforge.bench.caches import fast_decode
from pageforge.bench.decode_context import BASE, DecodeBench
from pageforge.bench.harness import failure, percentile, rotated, synchronize
from pageforge.bench.models import twin
from pageforge.bench.report import table

REPEATS = 3
"""Beside the first call, which captures."""


@torch.no_grad()
def generate(bench: DecodeBench) -> None:
    """DynamicCache and fast_decode by turns, greedy."""
    batch, prompt = max(bench.batches), min(bench.prompts)
    count = min(bench.generated, bench.positions - prompt)
    if not bench.budget.allows(f"generate, batch {batch}"):
        return
    torch.compiler.reset()
    tokens = bench.tokens(batch, prompt)
    seconds: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    texts: dict[str, Tensor] = {}
    failures: dict[str, str] = {}
    plain, fast = twin(bench.model), twin(bench.model)
    with contextlib.ExitStack() as stack:
        models = {BASE: plain} if BASE in bench.ways else {}
        if "fast" in bench.ways:
            try:
                stack.enter_context(fast_decode(fast, compile=False))
                models["fast"] = fast
            except Exception as error:
                failures["fast"] = failure(error)
        for repeat in range(1 + REPEATS):
            for name in rotated(list(models), repeat):
                try:
                    texts[name], taken = _generate(models[name], tokens, count)
                except Exception as error:
                    failures[name] = failure(error)
                    del models[name]
                    continue
                if name not in first:
                    first[name] = taken
                else:
                    seconds.setdefault(name, []).append(taken)
    rows: list[tuple[object, ...]] = []
    for name in [*failures, *models]:
        case = {"batch": batch, "prompt": prompt, "new_tokens": count, "way": name}
        if name in failures:
            bench.report.add(section="generate", **case, failure=failures[name])
            rows.append((name, failures[name]))
            continue
        rate = batch * count / percentile(seconds[name], 50)
        base = batch * count / percentile(seconds[BASE], 50) if BASE in models else None
        same = float((texts[name] == texts[BASE]).float().mean()) if BASE in models else None
        found = {
            "tokens_per_s": rate,
            "over_dynamic": None if base is None else rate / base,
            "first_call_s": first[name],
            "same_tokens": same,
        }
        bench.report.add(section="generate", **case, **found)
        rows.append((name, *found.values()))
    columns = ("generate", "tokens/s", "/dynamic", "first call s", "same tokens")
    title = f"{bench.name}: generate, batch {batch}, prompt {prompt}, {count} new tokens, greedy"
    bench.console.print(table(title, columns, rows))
    bench.console.print()


def _generate(model: PreTrainedModel, tokens: Tensor, count: int) -> tuple[Tensor, float]:
    """(the new tokens, seconds)."""
    synchronize(tokens.device)
    begin = time.perf_counter()
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
    )
    synchronize(tokens.device)
    taken = time.perf_counter() - begin
    return out[:, tokens.shape[1] :], taken
