"""`pageforge bench`: how fast the ops are, whole decode steps, and whole workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from pageforge.bench import decode as decode_bench
from pageforge.bench import kernels as kernel_sections
from pageforge.bench import throughput as throughput_sections
from pageforge.bench.caches import WAYS
from pageforge.bench.context import QUICK_REPEATS, QUICK_SHAPES, Bench
from pageforge.bench.decode_context import DecodeBench
from pageforge.bench.harness import Budget
from pageforge.bench.models import SHAPES, make_model, make_tokenizer
from pageforge.bench.peers import wheels
from pageforge.bench.report import Report, machine, wide
from pageforge.bench.serving import WAYS as SERVING_WAYS
from pageforge.bench.steps import WARMUP
from pageforge.bench.throughput_context import MOST_REPEATS, ThroughputBench
from pageforge.bench.workloads import Size
from pageforge.cli import options
from pageforge.cli.models import DeviceError, check_device
from pageforge.cli.output import stderr, stdout

SECONDS = 290.0
"""A budget that fits a short lease."""

CPU_MODEL, CPU_STEPS = "tiny", 8
QUICK_STEPS = 60

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TRIAL = 8
"""By which a trial's counts and lengths are divided."""

TRIAL_RUNNING, TRIAL_STEPS = (8,), 16

WHAT = "What is measured"

Out = Annotated[
    Path | None,
    options.option(
        "--out",
        "-o",
        help="Write every record as JSON to this file, also when stopped half-way.",
        panel=options.OUTPUT,
        metavar="FILE",
    ),
]
Commit = Annotated[
    str | None,
    options.option(
        "--commit",
        help="The commit to record, outside a git checkout.",
        panel=options.OUTPUT,
        metavar="TEXT",
    ),
]
Device = Annotated[
    str | None,
    options.option(
        "--device",
        help="cpu or cuda; by default CUDA where there is one.",
        panel=WHAT,
        metavar="NAME",
    ),
]
Model = Annotated[
    str | None,
    options.option(
        "--model",
        "-m",
        help=f"A shape: {', '.join(SHAPES)}; by default gpt2, on the CPU {CPU_MODEL}.",
        panel=WHAT,
        metavar="NAME",
    ),
]
Quick = Annotated[bool, options.flag("--quick", help="A few shapes, few repeats.", panel=WHAT)]
Seconds = Annotated[
    float, options.option("--seconds", help="Begin no case after this time.", panel=WHAT, min=0)
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(no_args_is_help=True, help="Measure: kernels, decode steps, workloads.")
    bench.command(
        epilog=options.examples(
            "pageforge bench kernels --out kernels.json --peer-wheels ./wheels",
            "pageforge bench kernels --only decode --only ragged --quick",
        )
    )(kernels)
    bench.command(
        epilog=options.examples(
            "pageforge bench decode --out decode.json",
            "pageforge bench decode --model qwen3-0.6b --batch 1 --prompt 448",
        )
    )(decode)
    bench.command(
        epilog=options.examples(
            "pageforge bench throughput --out throughput.json",
            "pageforge bench throughput --model llama-8b --only sharegpt --way engine",
        )
    )(throughput)
    app.add_typer(bench, name="bench")


def kernels(
    only: Annotated[
        list[str] | None,
        options.option(
            "--only",
            help=f"A section: {', '.join(kernel_sections.SECTIONS)}; may be given several times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    peer_wheels: Annotated[
        Path | None,
        options.option(
            "--peer-wheels",
            help="A folder of wheels to unpack and compare with (tokenspeed-fa3, FlashInfer).",
            panel=WHAT,
            metavar="DIR",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How fast are the ops, against the device's limits and beside their peers?

    By graph replay over K/V that no cache holds, in shuffled pages; every output is checked against
    the reference in float64. Needs a CUDA device; about 4 minutes on an H200.
    """
    _known("--only", only or [], kernel_sections.SECTIONS)
    device = torch.device("cuda")
    check_device(device)
    budget = Budget(seconds)
    with wheels(peer_wheels) as unpacked:
        report = Report(
            "how fast are the ops, against the device's limits and peers?",
            _writable(out),
            machine(device, commit) | {"peer_wheels": unpacked},
        )
        bench = Bench(device, report, wide(stdout()), budget)
        if quick:
            bench.repeats = QUICK_REPEATS
            bench.dtypes = bench.dtypes[:1]
            bench.shapes = {name: bench.shapes[name] for name in QUICK_SHAPES}
        kernel_sections.run(bench, only or ())
    _say_where(out)


def decode(
    model: Model = None,
    device: Device = None,
    way: Annotated[
        list[str] | None,
        options.option(
            "--way",
            help=f"Only these of: {', '.join(WAYS)}; may be given several times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        options.option(
            "--batch", help="Sequences; may be given several times (1 and 32).", panel=WHAT, min=1
        ),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        options.option(
            "--prompt", help="Prompt tokens; several times (10 and 448).", panel=WHAT, min=1
        ),
    ] = None,
    steps: Annotated[
        int | None,
        options.option(
            "--steps", help="Steps of each way at most (500; 8 on the CPU).", panel=WHAT, min=1
        ),
    ] = None,
    quick: Quick = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How long is a whole decode step, and how much memory does it take?

    DynamicCache, StaticCache, PagedKVCache and fast_decode by turns on one model of random weights,
    the model call alone, on the host's clock. About 5 minutes on an H200; on the CPU a few tiny
    steps that only show that it works.
    """
    torch_device = _device(device)
    on_cpu = torch_device.type == "cpu"
    name = model or (CPU_MODEL if on_cpu else "gpt2")
    _known("--model", [name], SHAPES)
    _known("--way", way or [], WAYS)
    chosen = [w for w in WAYS if w in way] if way else list(WAYS)
    if on_cpu and not way:
        chosen = ["dynamic", "paged", "pageforge"]
    budget = Budget(seconds)
    report = Report(
        "how long is a whole decode step, and how much memory does it take?",
        _writable(out),
        machine(torch_device, commit),
    )
    bench = DecodeBench(
        make_model(name, torch_device),
        name,
        report,
        wide(stdout()),
        budget,
        ways={w: WAYS[w] for w in chosen},
    )
    if on_cpu:
        bench.batches, bench.prompts = (1, 2), (10,)
        bench.steps = bench.generated = bench.memory_steps = CPU_STEPS
    if quick:
        bench.steps = min(bench.steps, QUICK_STEPS)
        bench.cudnn_steps = bench.memory_steps = min(bench.memory_steps, QUICK_STEPS)
    bench.batches, bench.prompts = batch or bench.batches, prompt or bench.prompts
    bench.steps = steps or bench.steps
    _check_prompts(bench)
    decode_bench.run(bench)
    _say_where(out)


def throughput(
    model: Model = None,
    device: Device = None,
    only: Annotated[
        list[str] | None,
        options.option(
            "--only",
            help=f"A part: {', '.join(throughput_sections.SECTIONS)}; may be given several times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        options.option(
            "--way",
            help=f"Only these of: {', '.join(SERVING_WAYS)}, for uniform and sharegpt; several "
            f"times.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        options.option(
            "--requests", help="Of each workload, instead of its own number.", panel=WHAT, min=1
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        options.option(
            "--repeats",
            help=f"Timed runs of each way ({MOST_REPEATS}); slow ways have fewer.",
            panel=WHAT,
            min=1,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        options.option(
            "--dtype",
            help=f"{', '.join(DTYPES)}; by default the shape's own, on the CPU float32.",
            panel=WHAT,
            metavar="NAME",
        ),
    ] = None,
    quick: Annotated[
        bool, options.flag("--quick", help="Counts and lengths over 8, one repeat.", panel=WHAT)
    ] = False,
    seconds: Seconds = SECONDS,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """How many tokens a second does the engine make, beside transformers' own ways?

    Whole workloads on one model of random weights; the host's work and the device's idle time a
    step; what a shared prefix, samples of one prompt and a pool that is too small cost. On the CPU
    by default a tiny trial.
    """
    torch_device = _device(device)
    on_cpu = torch_device.type == "cpu"
    name = model or (CPU_MODEL if on_cpu else "gpt2")
    _known("--model", [name], SHAPES)
    _known("--only", only or [], throughput_sections.SECTIONS)
    _known("--way", way or [], SERVING_WAYS)
    _known("--dtype", [dtype] if dtype else [], DTYPES)
    budget = Budget(seconds)
    report = Report(
        "how many tokens a second does the engine make?",
        _writable(out),
        machine(torch_device, commit),
    )
    made = make_model(name, torch_device, DTYPES[dtype] if dtype else None)
    is_trial = quick or name == CPU_MODEL
    shrink = TRIAL if is_trial else 1
    bench = ThroughputBench(
        made,
        name,
        make_tokenizer(int(made.config.vocab_size)),
        report,
        wide(stdout()),
        budget,
        Size(int(made.config.max_position_embeddings), shrink, requests),
        way or (),
    )
    if is_trial:
        bench.repeats, bench.running, bench.host_steps = 1, TRIAL_RUNNING, TRIAL_STEPS
    bench.repeats = repeats or bench.repeats
    throughput_sections.run(bench, only or ())
    _say_where(out)


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device: expected cpu or cuda, got {name}; see --help") from None
    check_device(device)
    return device


def _known(option: str, names: Sequence[str], known: Mapping[str, object]) -> None:
    """Refuse a name that is not in `known`."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"expected one of {', '.join(known)}, got {name}", param_hint=option
            )


def _check_prompts(bench: DecodeBench) -> None:
    most = bench.positions - WARMUP - 1
    for prompt in bench.prompts:
        if prompt > most:
            raise typer.BadParameter(
                f"expected at most {most}, for {bench.name}'s {bench.positions} positions, "
                f"got {prompt}",
                param_hint="--prompt",
            )


def _writable(out: Path | None) -> Path | None:
    """Find out before minutes of measuring whether `out` can be written."""
    if out is not None:
        if not out.parent.is_dir():
            raise typer.BadParameter(f"no such folder: {out.parent}", param_hint="--out")
        out.touch()
    return out


def _say_where(out: Path | None) -> None:
    if out is not None:
        stderr().print(f"records: {out}", soft_wrap=True)
