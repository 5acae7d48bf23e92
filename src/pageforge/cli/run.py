"""`pageforge run`: generate text, and see what the cache took."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from pageforge.cli import options
from pageforge.cli.answers import InOrder, cache_summary, engine_summary
from pageforge.cli.jobs import Job, JobError, Result, ResultsFile, make_job, missing, read_jobs
from pageforge.cli.models import load, use_threads
from pageforge.cli.output import (
    RunningText,
    bar,
    beside,
    error_line,
    fail,
    print_json,
    stderr,
    stdout,
)
from pageforge.cli.padded import PaddedBatch, generate_paged, padded_batch
from pageforge.cli.padded import compare as compare_caches
from pageforge.cli.prompts import encode
from pageforge.cli.requests import Requests, interrupts_between_steps
from pageforge.cli.settings import Settings, resolve
from pageforge.engine.engine import MAX_RUNNING, Engine
from pageforge.engine.params import SamplingParams
from pageforge.errors import ParamsError, UnsupportedModel
from pageforge.pool import PagePool, PoolStats

AHEAD = 2
"""Jobs that the engine has, for each that it may run: the next ones are there when it has room."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=options.examples(
            'pageforge run "Why is the sky blue?"',
            'pageforge run "Name a colour." "Name a very large animal." --compare',
            "pageforge run --file prompts.txt --out results.jsonl",
            "pageforge run --file prompts.jsonl --out results.jsonl --resume",
            "pageforge run --temperature 0.8 --top-p 0.95 --seed 7 -n 200 < prompt.txt",
            'pageforge run "2 + 2 =" --raw --json | jq .texts',
        )
    )(run)


def run(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="One or more prompts; - reads one from stdin.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        options.option(
            "--file",
            "-f",
            help="Prompts from a file: one a line, or JSON lines where its name ends in .jsonl.",
            panel=options.TEXT,
            metavar="FILE",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = 0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    raw: Annotated[
        bool,
        options.flag("--raw", help="Leave the prompt as it is: no chat form.", panel=options.TEXT),
    ] = False,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    completions: options.Completions = 1,
    model: options.Model = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    page_size: options.PageSize = None,
    max_pages: options.MaxPages = None,
    max_memory: options.MaxMemory = None,
    max_running: options.MaxRunning = MAX_RUNNING,
    max_batch_tokens: options.MaxBatchTokens = None,
    no_prefix_cache: options.NoPrefixCache = False,
    swap_memory: options.SwapMemory = None,
    compile: options.Compile = False,
    out: Annotated[
        Path | None,
        options.option(
            "--out",
            "-o",
            help="Write a JSON line for each prompt to this file as it ends, not to the screen.",
            panel=options.OUTPUT,
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        options.flag("--resume", help="Do only what --out lacks or failed.", panel=options.OUTPUT),
    ] = False,
    compare: Annotated[
        bool,
        options.flag(
            "--compare",
            help="Instead of the engine, compare caches in generate(), and measure.",
            panel=options.OUTPUT,
        ),
    ] = False,
    no_stream: Annotated[
        bool,
        options.flag("--no-stream", help="Print the text when it is whole.", panel=options.OUTPUT),
    ] = False,
    quiet: Annotated[
        bool,
        options.flag(
            "--quiet",
            "-q",
            help="Print texts only, an empty line between them: no titles, no numbers.",
            panel=options.OUTPUT,
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Generate text with the engine, then say what its cache took.

    Many prompts run at a time, each until it ends. `pageforge config` sets other defaults.
    """
    settings = resolve(
        model=model,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        max_pages=max_pages,
        max_memory=max_memory,
        device=device,
        dtype=dtype,
    )
    params = _params(
        max_tokens=settings.max_new_tokens,
        min_tokens=min_new_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        n=completions,
    )
    plain = _params(max_tokens=params.max_tokens, temperature=temperature, seed=seed)
    is_plain = file is None and out is None and params == plain
    if compare and not is_plain:
        raise typer.BadParameter(
            "compares PROMPTs with --max-new-tokens, --temperature and --seed alone",
            param_hint="--compare",
        )
    if file is not None and prompts:
        raise typer.BadParameter(
            "takes the place of PROMPTs: give one or the other", param_hint="--file"
        )
    if resume and out is None:
        raise typer.BadParameter(
            "goes on with a file of results: give --out", param_hint="--resume"
        )
    others = {"model": settings.model, "raw": raw}
    if file is None:
        jobs = _typed(prompts or [], params, others)
    else:
        jobs = read_jobs(file, params, others)
    todo = jobs if out is None else _missing(jobs, out, resume=resume)
    if not todo:
        stderr().print(f"nothing is missing: {out} has all {len(jobs)} results", soft_wrap=True)
        return
    loaded, tokenizer = load(settings)
    about = {
        "model": settings.model,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page_size": settings.page_size,
        "threads": use_threads(threads),
    }
    streaming = len(jobs) == 1 and completions == 1 and not (no_stream or as_json or out or file)
    engine = None
    if not compare:
        try:
            engine = Engine(
                loaded,
                tokenizer,
                page_size=settings.page_size,
                max_pages=settings.max_pages,
                max_memory=settings.max_memory,
                max_running=max_running,
                max_batch_tokens=max_batch_tokens,
                prefix_cache=not no_prefix_cache,
                swap_memory=swap_memory or 0,
                compile=compile,
                seed=seed,
            )
        except UnsupportedModel as error:
            if not is_plain:
                raise
            stderr().print(f"without the engine: {error}", soft_wrap=True)

    def token_ids(prompt: str | tuple[int, ...]) -> list[int]:
        return encode(tokenizer, prompt, raw=raw) if isinstance(prompt, str) else list(prompt)

    if engine is None:
        rows = [token_ids(job.prompt) for job in jobs]
        batch = padded_batch(loaded, tokenizer, rows, params.max_tokens, temperature, seed)
        found = about | _through_generate(
            batch,
            tokenizer,
            settings,
            jobs,
            streaming=streaming,
            as_json=as_json,
            quiet=quiet,
            compare=compare,
        )
        _tell(found, cache_summary(found), as_json=as_json, quiet=quiet)
        return
    with engine, interrupts_between_steps() as check:
        requests = Requests(engine, token_ids, check, most=AHEAD * max_running)
        before = len(jobs) - len(todo)
        start = time.perf_counter()
        try:
            kept = _through_engine(
                requests, jobs, todo, streaming=streaming, as_json=as_json, quiet=quiet, out=out
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*_how_far(before + requests.num_done, jobs, out)) from None
        seconds = time.perf_counter() - start
        found = about | _lists(kept) | _engine_numbers(engine, requests, seconds, before)
    failure = requests.failure
    if requests.num_done or as_json:
        _tell(found, engine_summary(found), as_json=as_json, quiet=quiet)
    if failure is not None and failure.error is not None:
        if len(jobs) == 1 and file is None:
            raise failure.error
        where = "" if file is None else f" ({file}, line {failure.job.number})"
        count = f"{requests.num_failed} of {len(todo)} requests failed"
        fail(f"{count}, first {failure.job.id!r}{where}: {error_line(failure.error)}")
        raise typer.Exit(1)


def _params(**asked: Any) -> SamplingParams:
    try:
        return SamplingParams(**asked)
    except ParamsError as error:
        raise typer.BadParameter(str(error)) from None


def _typed(prompts: list[str], params: SamplingParams, others: dict[str, Any]) -> list[Job]:
    """Jobs from the command line, or from stdin."""
    if prompts.count("-") > 1:
        raise typer.BadParameter("- can stand once: stdin is read once", param_hint="PROMPT")
    from_stdin = "-" in prompts or (not prompts and not sys.stdin.isatty())
    typed = sys.stdin.read() if from_stdin else ""
    texts = [typed if prompt == "-" else prompt for prompt in prompts]
    if not prompts and typed.strip():
        texts = [typed]
    if not texts:
        raise typer.BadParameter("expected a prompt, got none", param_hint="PROMPT")
    try:
        return [
            make_job(number, text, params, others=others) for number, text in enumerate(texts, 1)
        ]
    except JobError as error:
        raise typer.BadParameter(str(error), param_hint="PROMPT") from None


def _missing(jobs: list[Job], out: Path, *, resume: bool) -> list[Job]:
    """The jobs that are left to do for `out`."""
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    if not out.exists():
        options.check_writable(out.parent)
        return jobs
    if out.stat().st_size == 0:
        return jobs
    if not resume:
        raise typer.BadParameter(
            f"{out} is there already: --resume goes on with it, or give another name",
            param_hint="--out",
        )
    return missing(out, jobs)


def _through_engine(
    requests: Requests,
    jobs: list[Job],
    todo: list[Job],
    *,
    streaming: bool,
    as_json: bool,
    quiet: bool,
    out: Path | None,
) -> list[Result]:
    """Do what is left to do. The results, in order, if they are wanted as JSON on stdout."""
    kept: list[Result] = []
    if streaming:
        with RunningText() as text:
            for piece in requests.stream(todo[0]):
                text.write(piece)
        return kept
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(bar())
        take: Callable[[Result], None]
        if out is not None:
            take = stack.enter_context(ResultsFile(out)).write
        else:
            in_order = InOrder(jobs, beside(shown), quiet=quiet)
            take = kept.append if as_json else in_order.take
        task = shown.add_task("generating", total=len(jobs), completed=len(jobs) - len(todo))
        for result in requests.answer(todo):
            take(result)
            speed = requests.new_tokens / (time.perf_counter() - start)
            shown.update(task, advance=1, description=f"{speed:,.0f} tokens/s")
    return sorted(kept, key=lambda result: result.job.number)


def _how_far(num_done: int, jobs: list[Job], out: Path | None) -> list[str]:
    """What Ctrl-C is answered with."""
    if len(jobs) == 1:
        return []
    kept = (
        "--out FILE would have kept their results"
        if out is None
        else f"the same command with --resume does the rest and adds it to {out}"
    )
    return [f"{num_done} of {len(jobs)} requests were done; {kept}"]


def _lists(results: list[Result]) -> dict[str, Any]:
    """Results for JSON: of each prompt the first completion in short, and everything there is."""
    if not results:
        return {}
    outputs = [result.output for result in results]
    return {
        "prompts": [result.job.prompt for result in results],
        "texts": [None if output is None else output.text for output in outputs],
        "prompt_tokens": [0 if each is None else len(each.prompt_token_ids) for each in outputs],
        "new_tokens": [0 if output is None else len(output.token_ids) for output in outputs],
        "results": [result.to_dict() for result in results],
    }


def _engine_numbers(
    engine: Engine, requests: Requests, seconds: float, before: int
) -> dict[str, Any]:
    """What a run of the engine took."""
    stats = engine.stats()
    engine.drop_prefix_cache()
    engine.trim()
    return {
        "paged": {
            "prompt_tokens": requests.prompt_tokens,
            "new_tokens": requests.new_tokens,
            **_cache_numbers(seconds, requests.fullest, engine.stats().pool),
        },
        "engine": {
            "requests_done": requests.num_done,
            "requests_failed": requests.num_failed,
            "requests_before": before,
            "cut_short": requests.num_cut,
            "asked_tokens": requests.asked_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "preemptions": stats.num_preemptions,
            "swaps": stats.num_swaps,
            "steps": stats.num_steps,
        },
    }


def _through_generate(
    batch: PaddedBatch,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    jobs: list[Job],
    *,
    streaming: bool,
    as_json: bool,
    quiet: bool,
    compare: bool,
) -> dict[str, Any]:
    """One left-padded batch through `generate`, and what it took."""
    pool = PagePool.for_model(
        batch.model,
        page_size=settings.page_size,
        max_pages=settings.max_pages,
        max_memory=settings.max_memory,
    )
    with pool:
        paged, full = generate_paged(batch, tokenizer, pool, streaming=streaming)
        pool.trim()
        empty = pool.stats()
    texts = [tokenizer.decode(new, skip_special_tokens=True) for new in paged.tokens]
    if not (streaming or as_json):
        answers = InOrder(jobs, stdout(), quiet=quiet)
        for job, text in zip(jobs, texts, strict=True):
            answers.print_answer(job.id, job.title, text)
    prompt_tokens = batch.mask.sum(1).tolist()
    new_tokens = [len(new) for new in paged.tokens]
    return {
        "prompts": [job.prompt for job in jobs],
        "texts": texts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "paged": {
            "prompt_tokens": sum(prompt_tokens),
            "new_tokens": sum(new_tokens),
            **_cache_numbers(paged.seconds, full, empty),
        },
        **(compare_caches(batch, paged) if compare else {}),
    }


def _cache_numbers(seconds: float, full: PoolStats, empty: PoolStats) -> dict[str, Any]:
    """Of the pool at its fullest, and once all was done."""
    return {
        "seconds": seconds,
        "pages_used": full.pages_used,
        "pages_total": full.pages_total,
        "bytes_in_use": full.bytes_in_use,
        "bytes_mapped": full.bytes_mapped,
        "pages_used_after": empty.pages_used,
        "bytes_mapped_after": empty.bytes_mapped,
    }


def _tell(found: dict[str, Any], summary: Table, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(found)
    elif not quiet:
        stdout().print()
        stdout().print(summary)
