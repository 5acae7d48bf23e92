"""`pageforge run`: generate text, and see what the cache took."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    TextStreamer,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from pageforge.cli import options
from pageforge.cli.models import load, use_threads
from pageforge.cli.output import bar, facts, print_json, printable, size, stdout
from pageforge.cli.prompts import encode, pad_left
from pageforge.cli.settings import resolve
from pageforge.errors import ShapeError, expected
from pageforge.hf.cache import PagedKVCache
from pageforge.pool import PagePool
from pageforge.probe import cache_argument, learned_positions


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            'pageforge run "Why is the sky blue?"',
            'pageforge run "Name a colour." "Name a very large animal." --compare',
            "pageforge run --temperature 0.8 --seed 7 -n 200 < prompt.txt",
            'pageforge run "2 + 2 =" --raw --json | jq .texts',
        )
    )(run)


@dataclass
class Outcome:
    """One run with one kind of cache."""

    tokens: list[list[int]]  # new ones, for each prompt
    seconds: float


@dataclass(frozen=True)
class Job:
    """What is generated; the same for every kind of cache."""

    model: PreTrainedModel
    ids: Tensor  # [S, T], left-padded
    mask: Tensor
    config: Any  # transformers' GenerationConfig
    seed: int

    def generate(self, cache: Cache, streamer: BaseStreamer | None = None) -> Outcome:
        """Generate into `cache`."""
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        output = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            generation_config=self.config,
            streamer=streamer,
            **{cache_argument(self.model): cache},
        )
        seconds = time.perf_counter() - start
        return Outcome([self._cut(row) for row in output[:, self.ids.shape[1] :].tolist()], seconds)

    def _cut(self, row: list[int]) -> list[int]:
        """A row up to its end token; what follows that one is padding."""
        ends = self.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        for index, token in enumerate(row):
            if token in ends:
                return row[: index + 1]
        return row


def run(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="One or more prompts; - reads one from stdin.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = None,
    page_size: options.PageSize = None,
    max_pages: options.MaxPages = None,
    max_memory: options.MaxMemory = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    temperature: Annotated[
        float,
        options.option(
            "--temperature",
            "-t",
            help="0 takes the likeliest token; more draws.",
            panel=options.TEXT,
            metavar="T",
            min=0.0,
        ),
    ] = 0.0,
    seed: options.Seed = 0,
    raw: Annotated[
        bool,
        options.flag("--raw", help="Leave the prompt as it is: no chat form.", panel=options.TEXT),
    ] = False,
    compare: Annotated[
        bool,
        options.flag(
            "--compare",
            help="Run DynamicCache and StaticCache as well, and measure.",
            panel=options.OUTPUT,
        ),
    ] = False,
    no_stream: Annotated[
        bool,
        options.flag("--no-stream", help="Print the text when it is whole.", panel=options.OUTPUT),
    ] = False,
    quiet: Annotated[
        bool, options.flag("--quiet", "-q", help="Print the text only.", panel=options.OUTPUT)
    ] = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Generate text with a paged KV cache, then say what the cache took.

    Several prompts run as one left-padded batch. `pageforge config` sets other defaults.
    """
    texts = _read(prompts or [])
    settings = resolve(
        model=model,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        max_pages=max_pages,
        max_memory=max_memory,
        device=device,
        dtype=dtype,
    )
    loaded, tokenizer = load(settings)
    num_threads = use_threads(threads)
    rows = [encode(tokenizer, text, raw=raw) for text in texts]
    job = _job(loaded, tokenizer, rows, settings.max_new_tokens, temperature, seed)
    pool = PagePool.for_model(
        loaded,
        page_size=settings.page_size,
        max_pages=settings.max_pages,
        max_memory=settings.max_memory,
    )
    streaming = not no_stream and len(texts) == 1 and not as_json
    with pool:
        with PagedKVCache(pool, attention_mask=job.mask) as cache:
            paged = _generate(job, cache, tokenizer, streaming)
            full = pool.stats()
        pool.trim()
        empty = pool.stats()
    answers = [tokenizer.decode(new, skip_special_tokens=True) for new in paged.tokens]
    if not as_json and not streaming:
        _print_answers(texts, answers)
    others = _compare(job, paged, len(rows)) if compare else {}
    result = {
        "model": settings.model,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page_size": settings.page_size,
        "threads": num_threads,
        "prompts": texts,
        "texts": answers,
        "prompt_tokens": [len(row) for row in rows],
        "new_tokens": [len(new) for new in paged.tokens],
        "paged": {
            "seconds": paged.seconds,
            "pages_used": full.pages_used,
            "pages_total": full.pages_total,
            "bytes_in_use": full.bytes_in_use,
            "bytes_mapped": full.bytes_mapped,
            "pages_used_after": empty.pages_used,
            "bytes_mapped_after": empty.bytes_mapped,
        },
        **others,
    }
    if as_json:
        print_json(result)
    elif not quiet:
        stdout().print()
        stdout().print(_table(result))


def _read(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise typer.BadParameter("- can stand once: stdin is read once", param_hint="PROMPT")
    from_stdin = "-" in prompts or (not prompts and not sys.stdin.isatty())
    typed = sys.stdin.read() if from_stdin else ""
    texts = [typed if prompt == "-" else prompt for prompt in prompts]
    if not prompts and typed.strip():
        texts = [typed]
    if not texts:
        raise typer.BadParameter("expected a prompt, got none", param_hint="PROMPT")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise typer.BadParameter(f"prompt {number} is empty", param_hint="PROMPT")
    return texts


def _job(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Job:
    limit, longest = learned_positions(model), max(map(len, rows))
    # The last token is never fed back, so it needs no position.
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise ShapeError(
            expected(
                "prompt and new tokens",
                f"at most {limit + 1}, for the model's {limit} learned positions",
                f"{longest} + {max_new_tokens}",
                "shorten the prompt, or pass a smaller --max-new-tokens",
            )
        )
    config: Any = copy.deepcopy(model.generation_config)
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        ends = config.eos_token_id
        config.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
    config.max_length = None
    config.max_new_tokens = max_new_tokens
    config.cache_implementation = None  # the cache is ours to choose
    config.do_sample = temperature > 0
    config.temperature = temperature or None
    if not config.do_sample:
        config.top_k = config.top_p = None
    ids, mask = pad_left(rows, config.pad_token_id)
    return Job(model, ids.to(model.device), mask.to(model.device), config, seed)


def _generate(
    job: Job, cache: Cache, tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> Outcome:
    if not streaming:
        return _counted(job, cache, "generating")
    printer = _Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        return job.generate(cache, printer)
    finally:
        printer.end_line()


def _counted(job: Job, cache: Cache, label: str) -> Outcome:
    with bar() as shown:
        return job.generate(cache, _Counter(shown, label, job.config.max_new_tokens))


class _Printer(TextStreamer):
    """Prints text as it comes."""

    in_line = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        if text:
            self.in_line = not text.endswith("\n")

    def end_line(self) -> None:
        if self.in_line:
            sys.stdout.write("\n")


class _Counter(BaseStreamer):
    """Moves a progress bar."""

    def __init__(self, shown: Any, label: str, total: int):
        self._shown = shown
        self._task = shown.add_task(label, total=total)
        self._seen_prompt = False

    def put(self, value: Tensor) -> None:
        if self._seen_prompt:
            self._shown.advance(self._task)
        self._seen_prompt = True

    def end(self) -> None:
        pass


def _compare(job: Job, paged: Outcome, rows: int) -> dict[str, Any]:
    """The same run with transformers' own caches: what their tensors really take."""
    length = job.ids.shape[1] + job.config.max_new_tokens
    found = {}
    for name, cache in (
        ("DynamicCache", DynamicCache(config=job.model.config)),
        ("StaticCache", StaticCache(config=job.model.config, max_cache_len=length)),
    ):
        outcome = _counted(job, cache, name)
        found[name] = {
            "seconds": outcome.seconds,
            "bytes": storage_bytes(cache),
            "same_tokens": outcome.tokens == paged.tokens,
        }
    return found


def storage_bytes(cache: Cache) -> int:
    """Bytes behind all tensors that a cache holds, each storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors([vars(layer) for layer in cache.layers])
    }
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _print_answers(texts: list[str], answers: list[str]) -> None:
    console = stdout()
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True), 1):
        if len(texts) > 1:
            title = " ".join(printable(text).split())
            console.print(f"[{number}] {title}", style="bold", overflow="ellipsis", no_wrap=True)
        console.print(printable(answer).strip(), soft_wrap=True)
        if number < len(texts):
            console.print()


def _table(result: dict[str, Any]) -> Table:
    paged = result["paged"]
    others = [name for name in ("DynamicCache", "StaticCache") if name in result]
    prompt, new = sum(result["prompt_tokens"]), sum(result["new_tokens"])
    rows = [
        ("tokens", f"{prompt} + {new} new"),
        ("pages", f"{paged['pages_used']} of {result['page_size']} tokens"),
        ("bytes in use", size(paged["bytes_in_use"])),
        ("bytes mapped" if not others else "bytes taken", size(paged["bytes_mapped"])),
        ("tokens/s", f"{new / paged['seconds']:.1f}"),
        ("after free()", f"{paged['pages_used_after']} pages used"),
    ]
    if not others:
        return facts(rows)
    beside = {
        "bytes taken": [size(result[name]["bytes"]) for name in others],
        "tokens/s": [f"{new / result[name]['seconds']:.1f}" for name in others],
        "same tokens": ["yes" if result[name]["same_tokens"] else "NO" for name in others],
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="bold")
    for name in ("paged", *others):
        table.add_column(name, justify="right")
    for name, value in (*rows, ("same tokens", "")):
        table.add_row(name, value, *beside.get(name, []))
    return table
