"""Settings: an option goes before an environment variable, that before the config file.

The file is flat TOML, `config.toml` in the platform's config folder. Environment variables are
called PAGEFORGE_MODEL, PAGEFORGE_PAGE_SIZE and so on.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer

from pageforge.errors import GeometryError, PageForgeError, expected
from pageforge.geometry import ELEMENT_SIZE, PAGE_SIZES
from pageforge.store import parse_memory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = str | int


class SettingError(PageForgeError, ValueError):
    """A setting in the config file or the environment is unknown or wrong."""


@dataclass(frozen=True)
class Key:
    """One setting. `parse` takes text or a TOML value, and raises SettingError."""

    parse: Callable[[object], Value]
    meaning: str


@dataclass(frozen=True)
class Settings:
    """The settings of one command, and where each comes from."""

    model: str = "smollm2"
    page_size: int = 16
    max_pages: int | None = None
    max_memory: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_new_tokens: int = 64
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def torch_device(self) -> torch.device:
        """The device meant; "auto" is CUDA where there is one."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype meant; None leaves it to the loader."""
        return None if self.dtype == "auto" else getattr(torch, self.dtype)


def config_path() -> Path:
    """Where the config file is, or would be."""
    return Path(typer.get_app_dir("pageforge")) / "config.toml"


def resolve(
    defaults: Mapping[str, Value] | None = None, **options: Value | float | None
) -> Settings:
    """The settings of a command.

    `options`: what was given on the command line (None: not given). `defaults`: the command's own,
    for what nobody has set. Raises SettingError.
    """
    values: dict[str, object] = dict(defaults or {})
    sources = dict.fromkeys(KEYS, "default")
    layers = (
        (f"config file {config_path()}", read_file()),
        ("environment", read_environment()),
        ("option", {name: value for name, value in options.items() if value is not None}),
    )
    for source, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, source)
    return Settings(**values, sources=sources)  # type: ignore[arg-type]


def read_file() -> dict[str, Value]:
    """What the config file sets; nothing where there is none. Raises SettingError."""
    values = {}
    for name, value in _raw_file().items():
        try:
            values[name] = key(name).parse(value)
        except SettingError as error:
            raise SettingError(f"{config_path()}: {error}") from error
    return values


def _raw_file() -> dict[str, Any]:
    path = config_path()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: not valid TOML ({error}); mend it, or delete it") from error


def read_environment() -> dict[str, Value]:
    """What PAGEFORGE_* variables set; an empty one sets nothing. Raises SettingError."""
    values = {}
    for name, known in KEYS.items():
        variable = variable_of(name)
        text = os.environ.get(variable)
        if text:
            try:
                values[name] = known.parse(text)
            except SettingError as error:
                raise SettingError(f"environment variable {variable}: {error}") from error
    return values


def write(name: str, value: Value | None) -> None:
    """Set `name` in the config file, or with None take it out. Other lines stay as they are."""
    path = config_path()
    wanted = _raw_file()
    wanted.pop(name, None)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [line for line in lines if not re.match(rf"\s*[\"']?{name}[\"']?\s*=", line)]
    if value is not None:
        wanted[name] = value
        # First, for the file might go on with a table.
        lines.insert(0, f"{name} = {json.dumps(value, ensure_ascii=False)}")
    text = "".join(f"{line}\n" for line in lines)
    try:
        kept = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        kept = False
    if not kept:
        raise SettingError(f"{path}: {name} cannot be changed without harm to the rest; edit it")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def key(name: str) -> Key:
    """The setting called `name`. Raises SettingError with the nearest name."""
    try:
        return KEYS[name]
    except KeyError:
        near = difflib.get_close_matches(name.replace("-", "_"), KEYS, 1)
        advice = f"did you mean {near[0]}?" if near else "take it out"
        raise SettingError(
            f"unknown key {name!r}: expected one of {', '.join(KEYS)}; {advice}"
        ) from None


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"PAGEFORGE_{name.upper()}"


# Each parser takes text (an option, an environment variable) or a value from TOML.


def _integer(name: str, value: object, want: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"\d+", text, re.ASCII):
        raise SettingError(expected(name, want, repr(value), "use digits only"))
    return int(text)


def parse_page_size(value: object) -> int:
    """A page size that exists."""
    want = f"one of {', '.join(map(str, PAGE_SIZES))}"
    number = _integer("page_size", value, want)
    if number not in PAGE_SIZES:
        raise SettingError(expected("page_size", want, number, "try 16"))
    return number


def _positive(name: str) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = _integer(name, value, "a number of at least 1")
        if number < 1:
            raise SettingError(expected(name, "at least 1", number, "raise it"))
        return number

    return parse


def parse_memory_text(value: object, name: str = "max_memory") -> str:
    """An amount of memory, kept as text: what is free is known later."""
    text = str(value)
    if isinstance(value, bool | float):
        text = repr(value)
    try:
        parse_memory(text, 1 << 40)
    except GeometryError:
        raise SettingError(
            expected(name, 'bytes, "4GiB" or "50%"', repr(text), "try 50%")
        ) from None
    return text


def parse_device(value: object) -> str:
    """auto, or a device that torch has a name for."""
    text = str(value)
    try:
        if text != "auto":
            torch.device(text)
    except RuntimeError:
        raise SettingError(
            expected("device", "auto, cpu, cuda or cuda:N", repr(text), "try auto")
        ) from None
    return text


def parse_dtype(value: object) -> str:
    """auto, or a dtype that a pool can hold."""
    if value not in ("auto", *ELEMENT_SIZE):
        want = f"one of auto, {', '.join(ELEMENT_SIZE)}"
        raise SettingError(expected("dtype", want, repr(value), "try auto"))
    return str(value)


def parse_model(value: object) -> str:
    """A name or path in one line."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise SettingError(
            expected("model", "a folder, a hub name or smollm2", repr(value), "try smollm2")
        )
    return value


KEYS: Mapping[str, Key] = {
    "model": Key(parse_model, "a folder, a name on the hub, or smollm2"),
    "page_size": Key(parse_page_size, "tokens a page"),
    "max_pages": Key(_positive("max_pages"), "pages in the pool"),
    "max_memory": Key(parse_memory_text, 'the pool\'s cap: bytes, "4GiB" or "50%" of what is free'),
    "device": Key(parse_device, "auto, cpu, cuda or cuda:N"),
    "dtype": Key(parse_dtype, "auto, float32, float16 or bfloat16"),
    "max_new_tokens": Key(_positive("max_new_tokens"), "tokens to generate at most"),
}
