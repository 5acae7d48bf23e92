from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from pageforge.cli.app import app
from pageforge.cli.settings import KEYS, variable_of

SOURCE = Path(__file__).parents[2] / "src"
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<answer>"


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No config file and no variables of the user's; what a command sets is set back."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("APPDATA", str(tmp_path / "config"))
    for name in KEYS:
        monkeypatch.delenv(variable_of(name), raising=False)
    for name in ("PAGEFORGE_DEBUG", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model that reads and writes bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat form."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    write_tiny(folder, chat_template=CHAT)
    return str(folder)


def write_tiny(folder: Path, chat_template: str | None = None) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(["<end>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=65536,
        initializer_range=0.2,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def invoke():
    """Run a command in this process."""

    def run(*arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)

    return run


def said(text: str) -> str:
    """An error message without the box around it."""
    return " ".join(text.replace("│", " ").split())


def spawn(*arguments: str, **options) -> subprocess.Popen:
    """Start a command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "pageforge.cli", *arguments],
        env=environment,
        stderr=options.pop("stderr", subprocess.PIPE),
        **options,
    )


def read(screen: int, until: bytes | None, seconds: float = 60) -> bytes:
    """What a pseudo-terminal shows until some text, or until the process is gone."""
    found = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if until is not None and until in found:
            return found
        if select.select([screen], [], [], 0.1)[0]:
            try:
                data = os.read(screen, 65536)
            except OSError:  # Linux says so that the other end is closed
                return found
            if not data:
                return found
            found += data
    raise AssertionError(f"{until!r} was not shown within {seconds} s: {found[-2000:]!r}")
