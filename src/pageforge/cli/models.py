"""Loading a model for a command."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.status import Status
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pageforge.cli.settings import Settings
from pageforge.errors import PageForgeError
from pageforge.hf.pretrained import load_model
from pageforge.store import backend_of


class DeviceError(PageForgeError, ValueError):
    """The device asked for is not here."""


def load(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, on their device.

    Raises ModelNotFound, DeviceError, UnsupportedModel for a device that cannot hold pages.
    """
    device = settings.torch_device
    check_device(device)
    with _telling(f"loading {settings.model}"):
        return load_model(settings.model, dtype=settings.torch_dtype, device=device)


def check_device(device: torch.device) -> None:
    """Refuse, before anything is loaded, a device that is not here or cannot hold pages."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device: expected one of this machine, got {device}; torch {torch.__version__} finds "
            f"no CUDA device, use --device cpu (`pageforge info` says what is here)"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"device: expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {device}; "
            f"`pageforge info` lists the devices"
        )
    backend_of(device)


def use_threads(threads: int | None) -> int:
    """Set torch's CPU threads, by default to the cores without other work; returns how many.

    Threads that wait for a core in turn make a small model ten times slower, not a little.
    """
    most = torch.get_num_threads()
    if threads is None:
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        threads = min(most, max(1, round((os.cpu_count() or 1) - busy)))
    torch.set_num_threads(threads)
    return threads


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """A spinner where there is a terminal, which also says what libraries' progress bars say."""
    console = Console(file=sys.stderr, markup=False, highlight=False)
    handler = _Lines(console)
    log = logging.getLogger("pageforge")
    log.addHandler(handler)
    level, log.level = log.level, logging.INFO
    log.propagate = False
    screen = sys.stderr.isatty() and not console.is_dumb_terminal
    status = console.status(what) if screen else None
    try:
        with status or contextlib.nullcontext(), contextlib.redirect_stderr(_Bars(console, status)):
            yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = level, True


class _Lines(logging.Handler):
    """Log records as plain lines."""

    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), soft_wrap=True)


class _Bars(io.TextIOBase):
    """A stderr whose progress bars go into a status line, or nowhere."""

    def __init__(self, console: Console, status: Status | None):
        self._console = console
        self._status = status

    def write(self, text: str) -> int:
        bar = text.strip()
        if not text.startswith("\r"):
            if bar:
                self._console.print(text, end="", soft_wrap=True)
        elif self._status is not None and bar:
            self._status.update(Text(bar, no_wrap=True, overflow="ellipsis"))
        return len(text)
