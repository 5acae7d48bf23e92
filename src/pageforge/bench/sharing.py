"""What does a common beginning cost? Beams, samples of one prompt, a forked system prompt.

Bytes after every forward, against DynamicCache doing the same; how many pages sequences share, and
how many are copied when one of them writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pageforge.bench.branches import Caches, Dense, Held, Paged, Served, Step
from pageforge.bench.context import dtype_name
from pageforge.bench.families import model_called
from pageforge.bench.harness import Budget, failure
from pageforge.bench.memory_use import MemoryUse, Meter
from pageforge.bench.models import cast, twin, written_by
from pageforge.bench.report import Report, mb, table
from pageforge.bench.run import Run
from pageforge.bench.settings import cudnn_attention
from pageforge.engine.params import SamplingParams
from pageforge.probe import cache_argument

BASE = "dynamic"
"""What everything is held against."""

MOST_STEPS = 128
"""Steps of a way that are recorded, evenly over its run. Peaks are of all steps."""

TINY = "tiny"
CPU_NEW_TOKENS = 40
QUICK_PROMPT, QUICK_OWN, QUICK_NEW_TOKENS = 40, 5, 16


@dataclass
class SharingBench:
    """What every way is given: `branches` sequences that have `prompt` tokens in common.

    Each goes on for `new_tokens`; after the system prompt `own` tokens of its own come first.
    """

    model: PreTrainedModel
    name: str
    weights: str
    report: Report
    console: Console
    budget: Budget
    branches: int = 8
    prompt: int = 250
    own: int = 20
    new_tokens: int = 100
    page_size: int = 16
    cases: Mapping[str, Mapping[str, Way]] = field(default_factory=lambda: CASES)

    common: Tensor = field(init=False)
    """`[1, prompt]`: what all begin with."""
    questions: list[Tensor] = field(init=False)
    """`[1, prompt + own]` for each sequence after the system prompt."""

    def write_prompts(self) -> None:
        """Make the tokens that all ways are given. The model draws the common ones itself."""
        self.common = written_by(self.model, 1, self.prompt)
        generator = torch.Generator().manual_seed(0)
        size = (self.branches, 1, self.own)
        own = torch.randint(self.model.config.vocab_size, size, generator=generator)
        self.questions = [torch.cat([self.common, each], 1) for each in own.to(self.model.device)]


@dataclass(frozen=True)
class Way:
    """`hold(model, page_size)` makes what K/V lie in, `run(bench, held)` returns the new tokens.

    `attention`: the model's, if not its own. `is_drawn`: whether the tokens are left to chance.
    """

    hold: Callable[[PreTrainedModel, int], Held]
    run: Callable[[SharingBench, Any], Tensor]
    attention: str | None = None
    is_drawn: bool = False


def run_all(run_of: Run) -> None:
    """Every case and way."""
    run(bench_of(run_of))


def bench_of(run_of: Run) -> SharingBench:
    """What is measured in a run; on CUDA in bf16."""
    name = run_of.model or (TINY if run_of.quick else "smollm2")
    model, weights = model_called(name, run_of.device)
    if not run_of.on_cpu:
        model = cast(model, torch.bfloat16)
    bench = SharingBench(model, name, weights, run_of.report, run_of.console, run_of.budget)
    if run_of.on_cpu:
        bench.new_tokens = CPU_NEW_TOKENS
    if run_of.quick or name == TINY:
        bench.prompt, bench.own, bench.new_tokens = QUICK_PROMPT, QUICK_OWN, QUICK_NEW_TOKENS
    return bench


@torch.no_grad()
def run(bench: SharingBench) -> None:
    """Each case, its ways one after the other."""
    with cudnn_attention(False):
        bench.write_prompts()  # which also has the first calls take what they take
        for name, ways in bench.cases.items():
            rows = _case(bench, name, ways)
            if rows:
                title = (
                    f"{bench.name}, {name}: {bench.branches} sequences, {bench.prompt} tokens in "
                    f"common; the most at any step"
                )
                bench.console.print(table(title, COLUMNS, rows))
                bench.console.print()


COLUMNS = (
    "way",
    "cache MB",
    "at the end",
    "pages' MB",
    "dynamic over it",
    "peak MB",
    "pages",
    "named",
    "shared",
    "copied",
    "same tokens",
)


def _case(bench: SharingBench, name: str, ways: Mapping[str, Way]) -> list[tuple[object, ...]]:
    """All ways of one case; returns rows for the table."""
    base: tuple[Tensor, int] | None = None
    rows: list[tuple[object, ...]] = []
    for way_name, way in ways.items():
        if not bench.budget.allows(f"{name}, {way_name}"):
            continue
        case = {
            "model": bench.name,
            "weights": bench.weights,
            "dtype": dtype_name(bench.model.dtype),
            "case": name,
            "way": way_name,
            "branches": bench.branches,
            "prompt": bench.prompt,
            "own": bench.own if name == SYSTEM_PROMPT else 0,
            "new_tokens": bench.new_tokens,
            "page_size": bench.page_size,
        }
        try:
            tokens, steps, found = _measure(bench, way)
        except Exception as error:  # whatever it is, the others go on
            bench.report.add(section="sharing", **case, failure=failure(error))
            rows.append((way_name, failure(error)))
            continue
        if way_name == BASE:
            base = tokens, found["cache_peak_bytes"]
        if base is not None:
            found["dynamic_over"] = base[1] / found["cache_peak_bytes"]
            if not way.is_drawn:
                found["same_tokens"] = float((tokens == base[0]).float().mean())
        bench.report.add(section="sharing", **case, **found)
        for at in _evenly(len(steps)):
            bench.report.add(section="steps", case=name, way=way_name, step=at, **asdict(steps[at]))
        rows.append((way_name, *_cells(found)))
    return rows


def _measure(bench: SharingBench, way: Way) -> tuple[Tensor, list[Step], dict[str, Any]]:
    """(new tokens, what was held after each forward, the most of it)."""
    model = twin(bench.model)
    if way.attention is not None:
        model.set_attn_implementation(way.attention)
    steps: list[Step] = []
    meter = Meter(model.device)
    held = way.hold(model, bench.page_size)
    try:
        torch.manual_seed(0)
        meter.begin_peak()
        with held.watched(steps):
            tokens = way.run(bench, held)
        taken = meter.read()
    finally:
        left = held.free()
    return tokens, steps, {**_most(steps, taken), "pages_left": left}


def _most(steps: Sequence[Step], taken: MemoryUse) -> dict[str, Any]:
    """The most of everything at any step.

    `peak_bytes`: of all that was taken, activations included. On the CPU as the system says. On
    CUDA of torch's allocator, and what a pool had mapped at its own peak, be it at another time.
    """
    cache_peak = _peak(steps, "cache_bytes")
    pages_peak = _peak(steps, "pages_bytes")
    peak = taken.peak_bytes
    if taken.torch_peak_bytes is not None:
        peak = taken.torch_peak_bytes + (0 if pages_peak is None else cache_peak or 0)
    return {
        "steps": len(steps),
        "tokens": steps[-1].tokens,
        "cache_peak_bytes": cache_peak,
        "cache_end_bytes": steps[-1].cache_bytes,
        "pages_peak_bytes": pages_peak,
        "peak_bytes": peak,
        "pages_used": _peak(steps, "pages_used"),
        "pages_named": _peak(steps, "pages_named"),
        "pages_shared": _peak(steps, "pages_shared"),
        "pages_copied": steps[-1].pages_copied,
    }


def _peak(steps: Sequence[Step], name: str) -> int | None:
    values = [getattr(step, name) for step in steps]
    return None if None in values else max(values)


def _cells(found: Mapping[str, Any]) -> Iterator[object]:
    """A way's cells in the table, in the order of COLUMNS."""
    for key in ("cache_peak_bytes", "cache_end_bytes", "pages_peak_bytes"):
        yield mb(found[key])
    yield found.get("dynamic_over")
    yield mb(found["peak_bytes"])
    for key in ("pages_used", "pages_named", "pages_shared", "pages_copied"):
        yield found[key]
    yield found.get("same_tokens")


def _evenly(count: int) -> list[int]:
    """At most MOST_STEPS indices below `count`, the first and the last among them."""
    most = min(count, MOST_STEPS)
    return sorted({round(index * (count - 1) / max(1, most - 1)) for index in range(most)})


# --- what sequences do ----------------------------------------------------------------------


def beams(bench: SharingBench, caches: Caches) -> Tensor:
    """Beam search as users call it: transformers computes the prompt once for each beam."""
    return _search(bench, caches, caches.new())


def beams_of_one(bench: SharingBench, caches: Caches) -> Tensor:
    """Beam search on a cache that has the prompt computed once, for all beams."""
    return _search(bench, caches, _computed_once(bench, caches))


def samples(bench: SharingBench, caches: Caches) -> Tensor:
    """Samples as users call for them: a batch, with the prompt computed for each."""
    return _draw(bench, caches, caches.new(), bench.branches)


def samples_of_one(bench: SharingBench, caches: Caches) -> Tensor:
    """A batch of samples on a cache that has the prompt computed once."""
    return _draw(bench, caches, _computed_once(bench, caches), bench.branches)


def forks(bench: SharingBench, caches: Caches) -> Tensor:
    """Samples one after the other, each in a copy of the prompt's cache; all copies live on."""
    prompt = _prefill(caches, bench.common[:, :-1])
    return torch.cat(
        [_draw(bench, caches, _copied(caches, prompt), 1) for _ in range(bench.branches)]
    )


def continuations(bench: SharingBench, caches: Caches) -> Tensor:
    """Questions one after the other, each in a copy of the system prompt's cache; all live on.

    It is transformers' own recipe for a prompt that is used again.
    """
    system = _prefill(caches, bench.common)
    return torch.cat(
        [_generate(bench, caches, _copied(caches, system), each) for each in bench.questions]
    )


def samples_served(bench: SharingBench, served: Served) -> Tensor:
    """The engine's `n` completions of one prompt."""
    return _answer(bench, served, [bench.common], n=bench.branches, temperature=1)


def continuations_served(bench: SharingBench, served: Served) -> Tensor:
    """All questions at once to an engine that knows shared prefixes."""
    return _answer(bench, served, bench.questions, temperature=0)


def _search(bench: SharingBench, caches: Caches, cache: Cache) -> Tensor:
    return _generate(bench, caches, cache, bench.common, num_beams=bench.branches)


def _draw(bench: SharingBench, caches: Caches, cache: Cache, count: int) -> Tensor:
    return _generate(bench, caches, cache, bench.common, do_sample=True, num_return_sequences=count)


def _generate(
    bench: SharingBench, caches: Caches, cache: Cache, prompt: Tensor, **options: Any
) -> Tensor:
    """The new tokens of `model.generate`, greedy unless told otherwise."""
    out: Tensor = caches.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=bench.new_tokens,
        **{"do_sample": False, cache_argument(caches.model): cache} | options,
    )
    return out[:, prompt.shape[1] :]


def _prefill(caches: Caches, tokens: Tensor) -> Cache:
    """A new cache that holds `tokens`."""
    cache = caches.new()
    argument = cache_argument(caches.model)
    caches.model(tokens, use_cache=True, logits_to_keep=1, **{argument: cache})
    return cache


def _computed_once(bench: SharingBench, caches: Caches) -> Cache:
    """A cache of all branches that holds the prompt, but its last token, which `generate` wants."""
    cache = _prefill(caches, bench.common[:, :-1])
    cache.batch_repeat_interleave(bench.branches)
    return cache


def _copied(caches: Caches, cache: Cache) -> Cache:
    """A copy; a PagedKVCache's is a fork."""
    return caches.keep(copy.deepcopy(cache))


def _answer(
    bench: SharingBench, served: Served, prompts: Sequence[Tensor], **options: Any
) -> Tensor:
    """The engine's new tokens, of each completion."""
    params = SamplingParams(max_tokens=bench.new_tokens, ignore_eos=True, **options)
    outputs = served.engine.generate([prompt[0].tolist() for prompt in prompts], params)
    for output in outputs:
        if output.error is not None:
            raise output.error
    answers = [completion.token_ids for output in outputs for completion in output.outputs]
    return torch.tensor(answers, device=bench.model.device)


# --- cases ----------------------------------------------------------------------------------

ALONE = partial(Served, prefix_cache=False)
KNOWING = partial(Served, prefix_cache=True)
IN_PLACE = "pageforge"

SYSTEM_PROMPT = "system prompt"

CASES: dict[str, dict[str, Way]] = {
    "beams": {
        BASE: Way(Dense, beams),
        "paged": Way(Paged, beams),
        "pageforge": Way(Paged, beams, IN_PLACE),
        "pageforge, prompt once": Way(Paged, beams_of_one, IN_PLACE),
    },
    "samples": {
        BASE: Way(Dense, samples),
        "paged": Way(Paged, samples),
        "pageforge, prompt once": Way(Paged, samples_of_one, IN_PLACE, is_drawn=True),
        "pageforge, forks": Way(Paged, forks, IN_PLACE, is_drawn=True),
        "engine, n": Way(ALONE, samples_served, is_drawn=True),
    },
    SYSTEM_PROMPT: {
        BASE: Way(Dense, continuations),
        "pageforge, forks": Way(Paged, continuations, IN_PLACE),
        "engine": Way(KNOWING, continuations_served),
    },
}
"""What each way is called in tables, in their order."""
