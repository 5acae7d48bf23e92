"""Do the outputs stay the same? Logits against DynamicCache's, over models and dtypes.

Every way is fed the tokens that DynamicCache's logits choose, whatever its own would have been, so
that one that parts does not spoil those after it. Beside them stand what DynamicCache itself
differs by when its rows are alone, and what one lost token looks like.
"""

from __future__ import annotations

import contextlib
import statistics
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
from pageforge.bench.harness import Budget, failure
from pageforge.bench.models import twin
from pageforge.bench.report import Report, table
from pageforge.engine.engine import Engine
from pageforge.engine.params import LogitsProcessor, SamplingParams
from pageforge.geometry import pages_for

Build = Callable[[torch.device, torch.dtype], PreTrainedModel]

Logits = list[Tensor]
"""`[rows, vocabulary]` after the prompt, and after each token that follows."""

Answer = Callable[[PreTrainedModel, Tensor, Tensor], Logits]
"""`(model, prompts [rows, T], tokens [steps, rows, 1]) -> Logits`: a way that is fed both."""

BASE = "dynamic"


@dataclass
class ParityBench:
    """What is compared: each of `models` in each of `dtypes`, by each of `ways`.

    Prompts have `prompt` tokens, at least 2; `steps` tokens follow.
    """

    device: torch.device
    report: Report
    console: Console
    budget: Budget
    models: Mapping[str, Build]
    dtypes: Sequence[torch.dtype]
    ways: Mapping[str, Answer]
    rows: int = 4
    prompt: int = 40
    steps: int = 64


@torch.no_grad()
def run(bench: ParityBench) -> None:
    """Each model in each dtype; where one cannot be had a row says so."""
    for name, build in bench.models.items():
        rows: list[tuple[object, ...]] = []
        for dtype in bench.dtypes:
            if bench.budget.allows(f"{name} in {dtype_name(dtype)}"):
                rows += _case(bench, name, build, dtype)
        if rows:
            columns = ("way", "max |diff|", "at step", "rel. error", "same argmax", "parted")
            title = f"{name}: {bench.rows} rows, prompt {bench.prompt}, {bench.steps} steps"
            bench.console.print(table(title, (*columns, "largest gap"), rows))
            bench.console.print()


def _case(
    bench: ParityBench, name: str, build: Build, dtype: torch.dtype
) -> list[tuple[object, ...]]:
    """Compare all ways over one model in one dtype; returns rows for the table."""
    case: dict[str, Any] = {"model": name, "dtype": dtype_name(dtype)}
    try:
        model = build(bench.device, dtype)
        prompts = written_by(model, bench.rows, bench.prompt)
        tokens, wanted = reference(model, prompts, bench.steps)
    except Exception as error:  # it may not be there, or not fit
        bench.report.add(section="parity", **case, way=BASE, failure=failure(error))
        return [(f"{case['dtype']} {BASE}", failure(error))]
    case |= {
        "attention": model.config._attn_implementation,
        "rows": bench.rows,
        "prompt": bench.prompt,
        "steps": bench.steps,
    }
    rows: list[tuple[object, ...]] = []
    for way, answer in bench.ways.items():
        try:
            found = agreement(answer(model, prompts, tokens), wanted)
        except Exception as error:
            bench.report.add(section="parity", **case, way=way, failure=failure(error))
            rows.append((f"{case['dtype']} {way}", failure(error)))
            continue
        bench.report.add(section="parity", **case, way=way, **found)
        keys = ("max_difference", "worst_step", "relative_error", "same_argmax", "parted")
        rows.append(
            (f"{case['dtype']} {way}", *(found[key] for key in keys), found["largest_gap"])
        )
    return rows


def written_by(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """`[rows, length]` tokens that the model itself draws, each row from a token of its own."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(model.config.vocab_size, (rows, 1), generator=generator)
    first = first.to(model.device)
    torch.manual_seed(0)
    out: Tensor = model.generate(
        first,
        attention_mask=torch.ones_like(first),
        do_sample=True,
        max_new_tokens=length - 1,
    )
    return out


def reference(model: PreTrainedModel, prompts: Tensor, steps: int) -> tuple[Tensor, Logits]:
    """What DynamicCache's logits choose, `[steps, rows, 1]`, and all its logits."""
    forward = caller(model, DynamicCache(config=model.config))
    logits = [forward(prompts)[:, -1]]
    tokens = []
    for _ in range(steps):
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        logits.append(forward(tokens[-1])[:, -1])
    return torch.stack(tokens), logits


def agreement(got: Logits, want: Logits) -> dict[str, Any]:
    """How near `got` is to `want`. Raises ArithmeticError for a NaN, or another number of steps.

    `largest_gap`: between the two best of `want` where the best of `got` is another one. Near
    nothing: either token was as right as the other.
    """
    differences, squares, norms, gaps = [], 0.0, 0.0, []
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        mine, theirs = one.float(), other.float()
        difference = float((mine - theirs).abs().max())
        if not difference < torch.inf:
            raise ArithmeticError(f"step {step}: a logit is not finite")
        differences.append(difference)
        squares += float((mine - theirs).square().sum())
        norms += float(theirs.square().sum())
        best = theirs.topk(2).values
        parted = mine.argmax(-1) != theirs.argmax(-1)
        gaps += (best[:, 0] - best[:, 1])[parted].tolist()
    most = max(differences)
    count = len(want) * len(want[0])
    return {
        "max_difference": most,
        "worst_step": differences.index(most),
        "mean_difference": statistics.fmean(differences),  # of the steps' largest
        "relative_error": (squares / norms) ** 0.5,
        "same_argmax": 1 - len(gaps) / count,
        "parted": len(gaps),
        "compared": count,
        "largest_gap": max(gaps, default=None),
        "differences": differences,
    }


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
    forced = [*tokens[:, :, 0].T.tolist()]
    params = [
        SamplingParams(
            max_tokens=len(tokens) + 1,
            temperature=0,
            ignore_eos=True,
            logits_processors=(_forcing(row, logits),),
        )
        for row, logits in zip(forced, kept, strict=True)
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
    "paged": partial(through_cache, caches.paged),
    "pageforge": partial(through_cache, caches.pageforge),
    "fast": partial(through_cache, caches.fast),
    "engine": through_engine,
    "dynamic, rows alone": rows_alone,
    "one token lost": partial(through_cache, forgetful),
}
"""What each is called in tables, in their order; the last two are what the others are held by."""
