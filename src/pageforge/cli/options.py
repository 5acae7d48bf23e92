"""Options that several commands share, checked as the config file's values are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pageforge.cli.settings import SettingError, key, parse_memory_text

MODEL, POOL, SEQUENCES, TEXT, OUTPUT = "Model", "Pool", "Sequences", "Text", "Output"
SAMPLING, ENGINE = "Sampling", "Engine"
"""The panels of a command's help."""


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(["Examples:", "", *(f"- `{line}`" for line in lines)])


def option(*flags: str, help: str, panel: str, metavar: str = "N", **rest: Any) -> Any:
    """An option of one command."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, metavar=metavar, **rest)


def flag(*flags: str, help: str, panel: str) -> Any:
    """A switch."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, metavar="")


def _setting(name: str, *flags: str, help: str, panel: str, metavar: str = "N") -> Any:
    """An option that overrides the setting `name`."""
    return option(*flags, help=help, panel=panel, metavar=metavar, callback=_checked(name))


def _checked(name: str) -> Callable[[Any], Any]:
    return _parsed_by(lambda value: key(name).parse(value))


def _parsed_by(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A callback that parses an option's value, if it was given."""

    def check(value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except SettingError as error:
            raise typer.BadParameter(str(error)) from None

    return check


def check_writable(folder: Path) -> None:
    """Refuse, before any work, a folder for --out that cannot be written to, or not be made."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise typer.BadParameter(
            f"expected a folder that can be written to, got {folder} ({error.strerror}); give "
            f"another",
            param_hint="--out",
        ) from None


Model = Annotated[
    str | None,
    _setting(
        "model",
        "--model",
        "-m",
        help="A local folder, a name on the hub, or smollm2 (the default).",
        panel=MODEL,
        metavar="NAME",
    ),
]
Device = Annotated[
    str | None,
    _setting(
        "device",
        "--device",
        help="cpu, cuda, cuda:N; by default CUDA where there is one.",
        panel=MODEL,
        metavar="NAME",
    ),
]
Dtype = Annotated[
    str | None,
    _setting(
        "dtype",
        "--dtype",
        help="float32, float16, bfloat16; by default bfloat16 on CUDA, float32 elsewhere.",
        panel=MODEL,
        metavar="NAME",
    ),
]
Threads = Annotated[
    int | None,
    option(
        "--threads",
        help="CPU threads; by default as many as there are cores without other work.",
        panel=MODEL,
        min=1,
    ),
]
PageSize = Annotated[
    int | None,
    _setting(
        "page_size", "--page-size", help="Tokens a page: 8, 16, 32, 64, 128 or 256.", panel=POOL
    ),
]
MaxPages = Annotated[
    int | None, _setting("max_pages", "--max-pages", help="Pages in the pool.", panel=POOL)
]
MaxMemory = Annotated[
    str | None,
    _setting(
        "max_memory",
        "--max-memory",
        help='The pool\'s cap: bytes, "4GiB", or "50%" of what is free.',
        panel=POOL,
        metavar="SIZE",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    _setting(
        "max_new_tokens",
        "--max-new-tokens",
        "-n",
        help="Tokens to generate at most, for each prompt.",
        panel=TEXT,
    ),
]
Seed = Annotated[int, option("--seed", help="For everything that is drawn.", panel=TEXT, min=0)]
Json = Annotated[bool, flag("--json", help="Print JSON, for scripts.", panel=OUTPUT)]

Temperature = Annotated[
    float,
    option(
        "--temperature",
        "-t",
        help="0 takes the likeliest token; more draws.",
        panel=SAMPLING,
        metavar="T",
        min=0.0,
    ),
]
TopP = Annotated[
    float,
    option(
        "--top-p",
        help="Draw from the fewest likeliest tokens that have this share together.",
        panel=SAMPLING,
        metavar="P",
        min=0.0,
        max=1.0,
    ),
]
TopK = Annotated[
    int, option("--top-k", help="Draw from so many of the likeliest.", panel=SAMPLING, min=0)
]
MinP = Annotated[
    float,
    option(
        "--min-p",
        help="Draw from tokens with at least this part of the likeliest one's share.",
        panel=SAMPLING,
        metavar="P",
        min=0.0,
        max=1.0,
    ),
]
RepetitionPenalty = Annotated[
    float,
    option(
        "--repetition-penalty",
        help="Above 1 makes tokens of prompt and answer less likely.",
        panel=SAMPLING,
        metavar="X",
    ),
]
PresencePenalty = Annotated[
    float,
    option(
        "--presence-penalty",
        help="Taken from the logits of tokens of the answer.",
        panel=SAMPLING,
        metavar="X",
    ),
]
FrequencyPenalty = Annotated[
    float,
    option(
        "--frequency-penalty",
        help="The same for each time that the token came.",
        panel=SAMPLING,
        metavar="X",
    ),
]
Completions = Annotated[
    int, option("--completions", help="Answers to each prompt.", panel=SAMPLING, min=1)
]
MinNewTokens = Annotated[
    int,
    option(
        "--min-new-tokens",
        help="Tokens before the end of the text may come.",
        panel=TEXT,
        min=0,
    ),
]
Stop = Annotated[
    list[str] | None,
    option(
        "--stop",
        help="End the text before this; may be given several times.",
        panel=TEXT,
        metavar="TEXT",
        show_default=False,
    ),
]
IgnoreEos = Annotated[
    bool, flag("--ignore-eos", help="Go on past the model's end of text.", panel=TEXT)
]

MaxRunning = Annotated[
    int, option("--max-running", help="Sequences at a time.", panel=ENGINE, min=1)
]
MaxBatchTokens = Annotated[
    int | None,
    option(
        "--max-batch-tokens",
        help="Tokens a step; by default 8192 on CUDA, 512 on the CPU.",
        panel=ENGINE,
        min=1,
    ),
]
NoPrefixCache = Annotated[
    bool,
    flag("--no-prefix-cache", help="Share no pages of prompts that begin alike.", panel=ENGINE),
]
SwapMemory = Annotated[
    str | None,
    option(
        "--swap-memory",
        help='Host memory for pages of sequences that have to wait: bytes, "4GiB" or "50%".',
        panel=ENGINE,
        metavar="SIZE",
        callback=_parsed_by(lambda value: parse_memory_text(value, "swap_memory")),
    ),
]
Compile = Annotated[
    bool, flag("--compile", help="Run the model through torch.compile.", panel=ENGINE)
]
