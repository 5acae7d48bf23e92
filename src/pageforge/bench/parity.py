"""Do the outputs stay the same? Logits against DynamicCache's, over models and dtypes.

Every way is fed the tokens that DynamicCache's logits choose, whatever its own would have been, so
that one that parts does not spoil those after it. Beside them stand what DynamicCache itself
differs by when its rows are alone, what one lost token looks like, and in fp16 and bf16 the
distance of each to the same weights in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pageforge.bench import caches
from pageforge.bench.caches import Sequences, Setting, Start, Way, caller
from pageforge.bench.context import dtype_name
from pageforge.bench.families import FAMILIES, model_called
from pageforge.bench.harness import Budget, failure
from pageforge.bench.models import cast, twin, written_by
from pageforge.bench.report import Report, table
from pageforge.bench.run import Run
from pageforge.bench.settings import cudnn_attention
from pageforge.engine.engine import Engine
from pageforge.engine.params import LogitsProcessor, SamplingParams
from pageforge.geometry import pages_for

Logits = list[Tensor]
"""`[rows, vocabulary]` after the prompt, and after each token that follows."""

Answer = Callable[[PreTrainedModel, Tensor, Tensor], Logits]
"""`(model, prompts [rows, T], tokens [steps, rows, 1]) -> Logits`: a way that is fed both."""

BASE = "dynamic"
"""What everything is held against."""

DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}
LARGE = {"cpu": ("gpt2", "smollm2"), "cuda": ("gpt2", "smollm2", "qwen3-0.6b", "llama-8b")}
"""What is compared beside the tiny families."""

CPU_ROWS, CPU_STEPS = 2, 32
QUICK_STEPS = 16


@dataclass
class ParityBench:
    """What is compared: each of `models` in each of `dtypes`, by each of `ways`.

    Prompts have `prompt` tokens, at least 2; `steps` tokens follow.
    """

    device: torch.device
    report: Report
    console: Console
    budget: Budget
    models: Sequence[str]
    dtypes: Sequence[torch.dtype]
    ways: Mapping[str, Answer]
    rows: int = 4
    prompt: int = 40
    steps: int = 64


def run_all(run_of: Run) -> None:
    """Every model, dtype and way that makes sense on the device."""
    run(bench_of(run_of))


def bench_of(run_of: Run, models: Sequence[str] = ()) -> ParityBench:
    """What is compared in a run. `models`: of FAMILIES and SHAPES; by default what fits."""
    kind = run_of.device.type
    if not models:
        models = (*FAMILIES, *(() if run_of.quick else LARGE[kind]))
        models = models if run_of.model is None else (run_of.model,)
    ways = {name: way for name, way in WAYS.items() if kind == "cuda" or name not in CUDA_WAYS}
    bench = ParityBench(
        run_of.device, run_of.report, run_of.console, run_of.budget, models, DTYPES[kind], ways
    )
    if run_of.on_cpu:
        bench.rows, bench.steps = CPU_ROWS, CPU_STEPS
    if run_of.quick:
        bench.steps = QUICK_STEPS
    return bench


@torch.no_grad()
def run(bench: ParityBench) -> None:
    """Each model in each dtype; where something cannot be had a row says so."""
    with cudnn_attention(False):  # with it each new length costs a growing cache some 50 ms
        for name in bench.models:
            if bench.budget.allows(name):
                rows = _compare(bench, name)
                columns = ("way", "max abs diff", "at step", "rel. error", "to fp32", "same argmax")
                title = f"{name}: {bench.rows} rows, prompt {bench.prompt}, {bench.steps} steps"
                bench.console.print(table(title, (*columns, "parted", "largest gap"), rows))
                bench.console.print()


def _compare(bench: ParityBench, name: str) -> list[tuple[object, ...]]:
    """All ways over one model in all dtypes; returns rows for the table."""
    rows: list[tuple[object, ...]] = []
    try:
        exact, weights = model_called(name, bench.device)
        prompts = written_by(exact, bench.rows, bench.prompt)
    except Exception as error:  # it may not fit
        bench.report.add(section="parity", model=name, way=BASE, failure=failure(error))
        return [(name, failure(error))]
    for dtype in bench.dtypes:
        case = {
            "model": name,
            "weights": weights,
            "dtype": dtype_name(dtype),
            "attention": exact.config._attn_implementation,
            "rows": bench.rows,
            "prompt": bench.prompt,
            "steps": bench.steps,
        }
        if bench.budget.allows(f"{name} in {case['dtype']}"):
            rows += _compare_in(bench, case, exact, prompts, dtype)
    return rows


def _compare_in(
    bench: ParityBench,
    case: dict[str, Any],
    exact: PreTrainedModel,
    prompts: Tensor,
    dtype: torch.dtype,
) -> list[tuple[object, ...]]:
    """All ways over one model in one dtype; returns rows for the table."""
    is_exact = dtype == torch.float32
    try:
        model = exact if is_exact else cast(exact, dtype)
        tokens, wanted = reference(model, prompts, bench.steps)
        truth = None if is_exact else through_cache(caches.dynamic, exact, prompts, tokens)
    except Exception as error:
        bench.report.add(section="parity", **case, way=BASE, failure=failure(error))
        return [(f"{case['dtype']} {BASE}", failure(error))]
    rows: list[tuple[object, ...]] = []
    for way, answer in bench.ways.items():
        if way in REFUSED.get(case["model"], ()):
            continue
        try:
            found = agreement(answer(model, prompts, tokens), wanted, truth)
        except Exception as error:
            bench.report.add(section="parity", **case, way=way, failure=failure(error))
            rows.append((f"{case['dtype']} {way}", failure(error)))
            continue
        bench.report.add(section="parity", **case, way=way, **found)
        rows.append((f"{case['dtype']} {way}", *(found[key] for key in SHOWN)))
    return rows


def reference(model: PreTrainedModel, prompts: Tensor, steps: int) -> tuple[Tensor, Logits]:
    """What DynamicCache's logits choose, `[steps, rows, 1]`, and all its logits."""
    forward = caller(model, DynamicCache(config=model.config))
    logits = [forward(prompts)[:, -1]]
    tokens = []
    for _ in range(steps):
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        logits.append(forward(tokens[-1])[:, -1])
    return torch.stack(tokens), logits


SHOWN = (
    "max_difference",
    "worst_step",
    "relative_error",
    "error_to_fp32",
    "same_argmax",
    "parted",
    "largest_gap",
)


def agreement(got: Logits, want: Logits, truth: Logits | None = None) -> dict[str, Any]:
    """How near `got` is to `want`, and to the `truth` of which `want` is a rounding.

    `largest_gap`: between the two best of `want` where the best of `got` is another one. Near
    nothing: either token was as right as the other. Raises ArithmeticError for a logit that is not
    finite.
    """
    differences, gaps = [], []
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        mine, theirs = one.float(), other.float()
        difference = float((mine - theirs).abs().max())
        if not difference < torch.inf:
            raise ArithmeticError(f"step {step}: a logit is not finite")
        differences.append(difference)
        best = theirs.topk(2).values
        parted = mine.argmax(-1) != theirs.argmax(-1)
        gaps += (best[:, 0] - best[:, 1])[parted].tolist()
    most = max(differences)
    compared = sum(map(len, want))
    return {
        "max_difference": most,
        "worst_step": differences.index(most),
        "relative_error": relative_error(got, want),
        "error_to_fp32": None if truth is None else relative_error(got, truth),
        "same_argmax": 1 - len(gaps) / compared,
        "parted": len(gaps),
        "compared": compared,
        "largest_gap": max(gaps, default=None),
        "differences": differences,  # the largest of each step
    }


def relative_error(got: Logits, want: Logits) -> float:
    """`||got - want|| / ||want||` over all steps."""
    pairs = [(one.float(), other.float()) for one, other in zip(got, want, strict=True)]
    difference = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(difference / sum(float(other.square().sum()) for _, other in pairs))


# --- ways -----------------------------------------------------------------------------------


def through_cache(way: Way, model: PreTrainedModel, prompts: Tensor, tokens: Tensor) -> Logits:
    """The model call, step by step."""
    length = prompts.shape[1] + len(tokens)
    with way(Setting(model, len(prompts))) as start:
        sequences = start(length)
        # A graph's output is overwritten by the next step.
        return [sequences(step)[:, -1].clone() for step in (prompts, *tokens)]


def rows_alone(model: PreTrainedModel, prompts: Tensor, tokens: Tensor) -> Logits:
    """DynamicCache, each row in a batch of its own: what rounding in other shapes comes to."""
    rows = [
        through_cache(caches.dynamic, model, prompts[row : row + 1], tokens[:, row : row + 1])
        for row in range(len(prompts))
    ]
    return [torch.cat(step) for step in zip(*rows, strict=True)]


@contextlib.contextmanager
def forgetful(setting: Setting) -> Iterator[Start]:
    """DynamicCache that has lost the prompt's last token: what a mistake would look like."""
    model = twin(setting.model)

    def start(length: int) -> Sequences:
        cache = DynamicCache(config=model.config)
        plain = caller(model, cache)

        def forward(tokens: Tensor) -> Tensor:
            logits = plain(tokens)
            if tokens.shape[1] > 1:
                for layer in cache.layers:
                    layer.keys[:, :, -1] = 0
                    layer.values[:, :, -1] = 0
            return logits

        return Sequences(forward)

    yield start


def through_engine(model: PreTrainedModel, prompts: Tensor, tokens: Tensor) -> Logits:
    """The engine, all rows at once; what it shall choose is put into its logits."""
    kept: list[Logits] = [[] for _ in prompts]
    params = [
        SamplingParams(
            max_tokens=len(tokens) + 1,
            temperature=0,
            ignore_eos=True,
            logits_processors=(_forcing(row, logits),),
        )
        for row, logits in zip(tokens[:, :, 0].T.tolist(), kept, strict=True)
    ]
    pages = len(prompts) * (1 + pages_for(prompts.shape[1] + len(tokens), 16))
    with Engine(twin(model), max_pages=pages, prefix_cache=False) as engine:
        for output in engine.generate(prompts.tolist(), params):
            if output.error is not None:
                raise output.error
    return [torch.stack(step) for step in zip(*kept, strict=True)]


def _forcing(tokens: list[int], kept: Logits) -> LogitsProcessor:
    """Keeps the logits of every step, and lets nothing but `tokens` be chosen."""

    def processor(generated: list[int], logits: Tensor) -> Tensor:
        kept.append(logits.clone())
        if len(generated) < len(tokens):
            logits[tokens[len(generated)]] = torch.inf
        return logits

    return processor


WAYS: dict[str, Answer] = {
    BASE: partial(through_cache, caches.dynamic),
    "paged": partial(through_cache, caches.paged),
    "pageforge": partial(through_cache, caches.pageforge),
    "fast": partial(through_cache, caches.fast),
    "engine": through_engine,
    "dynamic, rows alone": rows_alone,
    "one token lost": partial(through_cache, forgetful),
}
"""What each is called in tables, in their order. The first shows that nothing else differs from run
to run, the last two what rounding comes to and what a mistake would."""

CUDA_WAYS = ("fast",)

REFUSED = {"tiny-deepseek-v3": ("engine",)}
"""The ways that do not serve a model: its attention computes with K/V by itself."""
