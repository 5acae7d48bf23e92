"""The time of one decode step: the model call alone, on the host's clock.

Synchronised before and after. All ways take turns, a block of steps each, so that whatever else the
machine does hits all of them; each keeps its own sequences, and all are fed the same tokens, so
that their logits can be compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pageforge.bench.caches import STUBS, Sequences, Setting, Start
from pageforge.bench.decode_context import BASE, DecodeBench
from pageforge.bench.harness import failure, percentile, rotated, synchronize
from pageforge.bench.report import table
from pageforge.geometry import total_bytes_per_page
from pageforge.probe import geometry_of

WARMUP = 8
"""Steps of each way before its steps count: compiling, capturing, first calls."""

BLOCK = 21
"""Steps of one way at a time. The first of them does not count: the processor's caches still hold
what another way did, which nobody's model has between its steps."""


@dataclass
class Lane:
    """One way's sequences on their course: seconds of each step, and what it said last."""

    forward: Sequences
    seconds: list[float]
    logits: Tensor | None = None


@torch.no_grad()
def steps(bench: DecodeBench, batch: int, count: int, rate: float | None, cudnn: str) -> None:
    """Each way's step time at one batch size, for every prompt length."""
    if not bench.budget.allows(f"steps, batch {batch}, cuDNN {cudnn}"):
        return
    torch.compiler.reset()
    setting = Setting(bench.model, batch)
    with contextlib.ExitStack() as stack:
        starts: dict[str, Start] = {}
        failures: dict[str, str] = {}
        for name, way in bench.ways.items():
            try:
                starts[name] = stack.enter_context(way(setting))
            except Exception as error:
                failures[name] = failure(error)
        for prompt in bench.prompts:
            if bench.budget.allows(f"steps, batch {batch}, prompt {prompt}, cuDNN {cudnn}"):
                fitting = min(count, bench.positions - prompt - WARMUP)
                lanes, failed = race(bench, starts, batch, prompt, fitting)
                case = {"batch": batch, "prompt": prompt, "steps": fitting, "cudnn": cudnn}
                _report(bench, case, lanes, failures | failed, rate)


def race(
    bench: DecodeBench, starts: Mapping[str, Start], batch: int, prompt: int, count: int
) -> tuple[dict[str, Lane], dict[str, str]]:
    """All ways over `count` steps by turns: (lanes of those that arrived, why others did not)."""
    prompt_tokens = bench.tokens(batch, prompt)
    tokens = bench.tokens(WARMUP + count, batch, 1)
    lanes: dict[str, Lane] = {}
    failures: dict[str, str] = {}
    for name, start in starts.items():
        try:
            lane = Lane(start(prompt + WARMUP + count), [])
            lane.forward(prompt_tokens)
            _advance(lane, tokens[:WARMUP], bench.device)
            lane.seconds.clear()
            lanes[name] = lane
        except Exception as error:  # whatever it is, the others go on
            failures[name] = failure(error)
    for number, first in enumerate(range(WARMUP, WARMUP + count, BLOCK)):
        for name in rotated(list(lanes), number):
            try:
                _advance(lanes[name], tokens[first : first + BLOCK], bench.device)
            except Exception as error:
                failures[name] = failure(error)
                del lanes[name]
    return lanes, failures


def _advance(lane: Lane, tokens: Tensor, device: torch.device) -> None:
    """A block of steps, each but the first on the clock."""
    logits = None
    for number, token in enumerate(tokens):
        synchronize(device)
        begin = time.perf_counter()
        logits = lane.forward(token)
        synchronize(device)
        if number:
            lane.seconds.append(time.perf_counter() - begin)
    if logits is not None:
        lane.logits = logits.to(torch.float32, copy=True)  # a graph's output is overwritten


def logits_error(lane: Lane, base: Lane | None) -> float | None:
    """`||logits - base|| / ||base||` after the last step; None without a base."""
    if base is None or lane.logits is None or base.logits is None:
        return None
    return float((lane.logits - base.logits).norm() / base.logits.norm())


def _report(
    bench: DecodeBench,
    case: dict[str, Any],
    lanes: Mapping[str, Lane],
    failures: Mapping[str, str],
    rate: float | None,
) -> None:
    base = lanes.get(BASE)
    medians = {name: percentile(lane.seconds, 50) for name, lane in lanes.items()}
    kv_bytes = _kv_bytes(bench, case)
    rows: list[tuple[object, ...]] = []
    for name in bench.ways:
        if name in failures:
            bench.report.add(section="step", **case, way=name, failure=failures[name])
            rows.append((name, failures[name]))
            continue
        if name not in lanes:
            continue
        seconds = lanes[name].seconds
        p50, p90, p99 = (1e3 * percentile(seconds, percent) for percent in (50, 90, 99))
        found = {
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "max_ms": 1e3 * max(seconds),
            "p99_over_p50": p99 / p50,
            "over_dynamic": medians[name] / medians[BASE] if BASE in medians else None,
            # Without K/V there is nothing to compare.
            "logits_error": None if name.startswith("stub") else logits_error(lanes[name], base),
        }
        stub = medians.get(STUBS.get(name, ""))
        if stub is not None and rate is not None:
            # A formula, for the promise: the stub, 1.2 times the K/V bytes, and 4 us a layer.
            layers = bench.model.config.num_hidden_layers
            found["promised_ms"] = 1e3 * stub + 1.2e3 * kv_bytes / rate + 4e-3 * layers
        bench.report.add(section="step", **case, way=name, kv_bytes=kv_bytes, **found)
        rows.append((name, *found.values()))
    title = (
        f"{bench.name}, batch {case['batch']}, prompt {case['prompt']}, {case['steps']} steps, "
        f"cuDNN attention {case['cudnn']}"
    )
    columns = ("way", "P50 ms", "P90", "P99", "max", "P99/P50", "/dynamic", "logits", "promise")
    bench.console.print(table(title, columns, rows))
    bench.console.print()


def _kv_bytes(bench: DecodeBench, case: Mapping[str, Any]) -> int:
    """Of all layers in the middle of the steps (a formula, from what the model stores)."""
    geometry = geometry_of(bench.model, 16)
    tokens = case["prompt"] + WARMUP + case["steps"] // 2
    return case["batch"] * tokens * total_bytes_per_page(geometry.groups) // 16
