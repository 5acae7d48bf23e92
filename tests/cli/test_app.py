from __future__ import annotations

import pytest
from tests.cli.conftest import said

from pageforge._version import __version__
from pageforge.cli import info
from pageforge.cli.output import ranges, size
from pageforge.errors import ModelNotFound

COMMANDS = (
    ["run"],
    ["demo"],
    ["info"],
    ["pool", "status"],
    ["pool", "simulate"],
    ["pool", "stress"],
    ["report"],
    ["config", "show"],
    ["config", "set"],
    ["config", "unset"],
    ["config", "path"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples(invoke, command: list[str]) -> None:
    done = invoke(*command, "--help")
    assert done.exit_code == 0
    assert f"pageforge {' '.join(command)}" in done.stdout.partition("Examples:")[2]
    assert invoke(*command, "-h").stdout == done.stdout


def test_without_a_command_there_is_help(invoke) -> None:
    for arguments in ([], ["pool"], ["config"]):
        assert "Commands" in invoke(*arguments).output


def test_version(invoke) -> None:
    assert invoke("--version").stdout.startswith(f"pageforge {__version__} (torch ")


@pytest.mark.parametrize("arguments", [["dmeo"], ["run", "--page-sise", "8"], ["pool", "x"]])
def test_usage_errors(invoke, arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "No such" in said(done.stderr)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelNotFound("no model 'x'; tried\n  - nothing"), 1, "error: no model 'x'; tried\n  -"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device"),
        (OSError(13, "Permission denied", "a.txt"), 1, "error: a.txt: Permission denied"),
        (KeyError("x\ny"), 1, "error: KeyError: 'x\\ny' (`pageforge --debug ...` says where)"),
        (RuntimeError("first\nsecond"), 1, "error: RuntimeError: first (`pageforge --debug"),
        (RuntimeError(), 1, "error: RuntimeError: no message"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_an_error_is_one_line(
    invoke, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(hub: bool) -> None:
        raise error

    monkeypatch.setattr(info, "collect", fail)
    done = invoke("info")
    assert done.exit_code == code
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("by_option", [True, False])
def test_debugging_shows_the_traceback(
    invoke, monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    def fail(hub: bool) -> None:
        raise RuntimeError("here")

    monkeypatch.setattr(info, "collect", fail)
    if not by_option:
        monkeypatch.setenv("PAGEFORGE_DEBUG", "1")
    done = invoke(*["--debug"] * by_option, "info")
    assert done.exit_code == 1
    assert "Traceback" in done.stderr
    assert "in fail" in done.stderr


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (737280, "720 KiB"),
        (3686400, "3.52 MiB"),
        (50 << 20, "50 MiB"),
        (1023 << 20, "1 GiB"),
        (20220807168, "18.8 GiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
