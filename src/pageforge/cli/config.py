"""`pageforge config`: what the commands take as defaults."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from pageforge.cli.options import Json, examples
from pageforge.cli.output import print_json, stdout
from pageforge.cli.settings import (
    KEYS,
    SettingError,
    config_path,
    key,
    read_environment,
    resolve,
    variable_of,
    write,
)

KeyName = Annotated[str, typer.Argument(metavar="KEY", help=f"One of {', '.join(KEYS)}.")]

config = typer.Typer(no_args_is_help=True, help="Show and set defaults, kept in a small TOML file.")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(config, name="config")


@config.command(epilog=examples("pageforge config show", "pageforge config show --json"))
def show(as_json: Json = False) -> None:
    """Every setting, its value, and where that comes from."""
    settings = resolve()
    rows = {
        name: {"value": getattr(settings, name), "source": settings.sources[name]} for name in KEYS
    }
    if as_json:
        print_json({"path": str(config_path()), "settings": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("key", "value", "from", "meaning"):
        table.add_column(column, overflow="fold")
    for name, row in rows.items():
        source = settings.sources[name]
        table.add_row(
            name,
            "-" if row["value"] is None else str(row["value"]),
            variable_of(name) if source == "environment" else source.split(" /")[0],
            KEYS[name].meaning,
        )
    stdout().print(table)
    stdout().print(f"\nfile: {config_path()}", soft_wrap=True)


@config.command(
    "set",
    epilog=examples(
        "pageforge config set model ./my-model",
        "pageforge config set page_size 32",
        "pageforge config set max_memory 50%",
    ),
)
def set_value(
    name: KeyName,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.")],
) -> None:
    """Set a default in the config file."""
    name = _known(name)
    try:
        parsed = key(name).parse(value)
    except SettingError as error:
        raise typer.BadParameter(str(error), param_hint="VALUE") from None
    write(name, parsed)
    stdout().print(f"{name} = {parsed}, in {config_path()}", soft_wrap=True)
    if name in read_environment():
        stdout().print(f"but {variable_of(name)} is set and goes before it", soft_wrap=True)


@config.command(epilog=examples("pageforge config unset model"))
def unset(name: KeyName) -> None:
    """Take a setting out of the config file: the built-in default holds again."""
    name = _known(name)
    write(name, None)
    stdout().print(f"{name} is not set any more, in {config_path()}", soft_wrap=True)


@config.command(epilog=examples("pageforge config path", "cat $(pageforge config path)"))
def path() -> None:
    """Where the config file is, or would be."""
    typer.echo(config_path())


def _known(name: str) -> str:
    try:
        key(name)
    except SettingError as error:
        raise typer.BadParameter(str(error), param_hint="KEY") from None
    return name
