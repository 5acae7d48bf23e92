"""Options that several commands share, checked as the config file's values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from pageforge.cli.settings import SettingError, key

MODEL, POOL, SEQUENCES, TEXT, OUTPUT = "Model", "Pool", "Sequences", "Text", "Output"
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
    def check(value: Any) -> Any:
        try:
            return None if value is None else key(name).parse(value)
        except SettingError as error:
            raise typer.BadParameter(str(error)) from None

    return check


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
