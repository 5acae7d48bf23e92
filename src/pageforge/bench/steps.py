"""The time of one decode step: the model call alone, on the host's clock.

Synchronised before and after. All ways take turns, a block of steps each, so that whatever else the
machine does hits all of them; each keeps its own sequences, and all are fed the same tokens, so
that their logits can be compared.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pageforge.bench.caches import PADDED, STOCK, STUBS, Sequences, Setting, Start
from pageforge.bench.harness import failure, percentile, quartiles, rotated, synchronize
from pageforge.bench.latency_context import BASE, LatencyBench
from pageforge.bench.report import table
from pageforge.bench.settings import cudnn_attention
from pageforge.geometry import total_bytes_per_page
from pageforge.probe import geometry_of

WARMUP = 8
"""Steps of each way before its steps count: compiling, capturing, first calls."""

BLOCK = 21
"""Steps of one way at a time. The first of them does not count: the processor's caches still hold
what another way did, which nobody's model has between its steps."""


@dataclass
class Lane:
    """One way's sequences on their course: seconds of each step by blocks, and its last logits."""

    forward: Sequences
    blocks: list[list[float]]
    logits: Tensor | None = None

    @property
    def seconds(self) -> list[float]:
        """Of all steps that count."""
        return [seconds for block in self.blocks for seconds in block]


@dataclass(frozen=True)
class Plan:
    """What is measured: its record's section, which ways, for how many sequences and steps."""

    section: str
    ways: Sequence[str]
    batch: int
    prompts: Sequence[int]
    steps: int
    pads: Sequence[int] | None = None
    """Tokens of left padding in each row."""


def steps(bench: LatencyBench) -> None:
    """All ways, for every batch size and prompt length."""
    for batch in bench.batches:
        follow(bench, Plan("steps", list(bench.ways), batch, bench.prompts, bench.steps))


def padded(bench: LatencyBench) -> None:
    """Rows with left padding, from none to nearly half of the prompt, as mixed prompts have it."""
    ways = [name for name in bench.ways if name in PADDED]
    batch, prompt = bench.padded_batch, max(bench.prompts)
    pads = [row * prompt // (2 * batch) for row in range(batch)]
    follow(bench, Plan("padded", ways, batch, [prompt], bench.steps, pads))


def cudnn(bench: LatencyBench) -> None:
    """Stock attention where torch may choose cuDNN's: each new length is planned once."""
    ways = [name for name in bench.ways if name in STOCK]
    with cudnn_attention(True):
        for batch in bench.batches:
            follow(bench, Plan("cudnn", ways, batch, bench.prompts, bench.cudnn_steps))


@torch.no_grad()
def follow(bench: LatencyBench, plan: Plan) -> None:
    """Each way's step time at one batch size, for every prompt length of the plan."""
    if not bench.budget.allows(f"{plan.section}, batch {plan.batch}"):
        return
    torch.compiler.reset()
    setting = Setting(bench.model, plan.batch, pads=plan.pads)
    with contextlib.ExitStack() as stack:
        starts: dict[str, Start] = {}
        failures: dict[str, str] = {}
        for name in plan.ways:
            try:
                starts[name] = stack.enter_context(bench.ways[name](setting))
            except Exception as error:
                failures[name] = failure(error)
        for prompt in plan.prompts:
            if bench.budget.allows(f"{plan.section}, batch {plan.batch}, prompt {prompt}"):
                count = min(plan.steps, bench.positions - prompt - WARMUP)
                lanes, failed = race(bench, starts, plan.batch, prompt, count)
                _report(bench, plan, prompt, count, lanes, failures | failed)


def race(
    bench: LatencyBench, starts: Mapping[str, Start], batch: int, prompt: int, count: int
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
            lane.blocks.clear()
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
    logits, block = None, []
    for token in tokens:
        synchronize(device)
        begin = time.perf_counter()
        logits = lane.forward(token)
        synchronize(device)
        block.append(time.perf_counter() - begin)
    if block[1:]:
        lane.blocks.append(block[1:])
    if logits is not None:
        lane.logits = logits.to(torch.float32, copy=True)  # a graph's output is overwritten


def logits_error(lane: Lane, base: Lane | None) -> float | None:
    """`||logits - base|| / ||base||` after the last step; None without a base."""
    if base is None or lane.logits is None or base.logits is None:
        return None
    return float((lane.logits - base.logits).norm() / base.logits.norm())


def _report(
    bench: LatencyBench,
    plan: Plan,
    prompt: int,
    count: int,
    lanes: Mapping[str, Lane],
    failures: Mapping[str, str],
) -> None:
    case = {
        "model": bench.name,
        "batch": plan.batch,
        "prompt": prompt,
        "steps": count,
        "padded": plan.pads is not None,
        "cudnn": "on" if torch.backends.cuda.cudnn_sdp_enabled() else "off",
    }
    base, kv_bytes = lanes.get(BASE), _kv_bytes(bench, plan.batch, prompt + WARMUP + count // 2)
    rows: list[tuple[object, ...]] = []
    for name in plan.ways:
        if name in failures:
            bench.report.add(section=plan.section, **case, way=name, failure=failures[name])
            rows.append((name, failures[name]))
            continue
        found = {
            **times(lanes[name]),
            **_over(lanes[name], base),
            # Without K/V there is nothing to compare.
            "logits_error": None if name.startswith("stub") else logits_error(lanes[name], base),
            "promised_ms": _promised_ms(bench, lanes.get(STUBS.get(name, "")), kv_bytes),
        }
        bench.report.add(section=plan.section, **case, way=name, kv_bytes=kv_bytes, **found)
        rows.append((name, *(found[key] for key in COLUMNS)))
    bench.console.print(table(_title(case), ("way", *COLUMNS.values()), rows))
    bench.console.print()


COLUMNS = {
    "mean_ms": "mean ms",
    "p50_ms": "P50",
    "p95_ms": "P95",
    "p99_ms": "P99",
    "max_ms": "max",
    "over_dynamic": "/dynamic",
    "over_dynamic_low": "low",
    "over_dynamic_high": "high",
    "logits_error": "logits",
    "promised_ms": "promise",
}
"""The fields that are shown, and what they are called."""


def _title(case: Mapping[str, Any]) -> str:
    parts = [
        f"{case['model']}, batch {case['batch']}",
        f"prompt {case['prompt']}" + (", left-padded" if case["padded"] else ""),
        f"{case['steps']} steps",
        f"cuDNN attention {case['cudnn']}",
    ]
    return ", ".join(parts)


def times(lane: Lane) -> dict[str, Any]:
    """Milliseconds a step. P50's low and high: the quartiles of the blocks' own medians."""
    low, _, high = quartiles([percentile(block, 50) for block in lane.blocks])
    seconds = lane.seconds
    found = {
        "mean_ms": statistics.fmean(seconds),
        **{f"p{percent}_ms": percentile(seconds, percent) for percent in (50, 95, 99)},
        "p50_ms_low": low,
        "p50_ms_high": high,
        "max_ms": max(seconds),
    }
    return {"timed_steps": len(seconds), **{key: 1e3 * value for key, value in found.items()}}


def _over(lane: Lane, base: Lane | None) -> dict[str, float | None]:
    """The median, and the quartiles, of what a block's median is over that of the base's."""
    names = ("over_dynamic_low", "over_dynamic", "over_dynamic_high")
    if base is None:
        return dict.fromkeys(names)
    pairs = zip(lane.blocks, base.blocks, strict=True)
    ratios = [percentile(own, 50) / percentile(other, 50) for own, other in pairs]
    return dict(zip(names, quartiles(ratios), strict=True))


def _promised_ms(bench: LatencyBench, stub: Lane | None, kv_bytes: int) -> float | None:
    """A formula: the stub, 1.2 times the K/V bytes over the read ceiling, and 4 us a layer."""
    if stub is None:
        return None
    layers = bench.model.config.num_hidden_layers
    return 1e3 * percentile(stub.seconds, 50) + 1.2e3 * kv_bytes / bench.read + 4e-3 * layers


def _kv_bytes(bench: LatencyBench, batch: int, tokens: int) -> int:
    """Of all layers, for `batch` rows of `tokens` (a formula, from what the model stores)."""
    return batch * tokens * total_bytes_per_page(geometry_of(bench.model, 16).groups) // 16
