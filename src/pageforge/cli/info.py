"""`pageforge info`: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Annotated, Any

import torch
import typer
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from rich.text import Text

from pageforge._version import __version__
from pageforge.cli import options
from pageforge.cli.options import Json, examples
from pageforge.cli.output import facts, print_json, size, stdout
from pageforge.cli.settings import SettingError, config_path, resolve
from pageforge.errors import ModelNotFound, PageForgeError
from pageforge.hf.pretrained import SMOLLM2_HUB_NAME, cache_folder
from pageforge.store import backend_of, free_bytes, is_elastic

LIBRARIES = ("torch", "transformers", "triton", "numpy", "typer", "rich")
EXTRAS = {"models": ("accelerate", "gguf", "platformdirs")}
HUB_SECONDS = 5


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        epilog=examples(
            "pageforge info", "pageforge info --hub", "pageforge info --json | jq .devices"
        )
    )(info)


def info(
    hub: Annotated[
        bool,
        options.flag("--hub", help="Also ask the hub whether it answers.", panel=options.OUTPUT),
    ] = False,
    as_json: Json = False,
) -> None:
    """Versions, devices, how each device's pool gets its memory, and what is missing."""
    found = collect(hub)
    if as_json:
        print_json(found)
        return
    console = stdout()
    versions = found["versions"]
    console.print(
        facts(
            [
                ("pageforge", versions["pageforge"]),
                ("python", f"{versions['python']} on {found['platform']}"),
                *((name, versions[name] or "not installed") for name in LIBRARIES),
                *((f"device {d['device']}", _device_line(d)) for d in found["devices"]),
                ("smollm2", found["smollm2"]),
                ("hub", found["hub"]),
                ("config", found["config"]),
            ]
        )
    )
    if found["missing"]:
        console.print("\nMissing", style="bold")
        for item in found["missing"]:
            line = Text.assemble("  ", (item["what"], "yellow"), f": {item['how']}")
            console.print(line, soft_wrap=True)


def collect(ask_hub: bool) -> dict[str, Any]:
    """Everything that the command shows."""
    return {
        "versions": {
            "pageforge": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
        },
        "platform": platform.platform(terse=True),
        "devices": [_device(device) for device in _devices()],
        "smollm2": _smollm2(),
        "hub": _hub(ask_hub),
        "config": _config(),
        "missing": _missing(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    cuda = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    mps = [torch.device("mps")] if torch.backends.mps.is_available() else []
    return [torch.device("cpu"), *cuda, *mps]


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(device), "name": _device_name(device)}
    try:
        return found | {
            "pool": backend_of(device),
            "elastic": is_elastic(device),
            "bytes_free": free_bytes(device),
        }
    except PageForgeError as error:
        return found | {"pool": None, "elastic": False, "bytes_free": None, "why": str(error)}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} cores, torch threads: {torch.get_num_threads()}"


def _device_line(device: dict[str, Any]) -> str:
    if device["pool"] is None:
        return f"not used: {device['why']}"
    return f"{device['name']}; {size(device['bytes_free'])} free; pool: {device['pool']}"


def _smollm2() -> str:
    try:
        folder = cache_folder() / "smollm2"
    except (ModelNotFound, ImportError) as error:
        return f"not here: {error}"
    if folder.is_dir():
        return f"ready, in {folder}"
    if isinstance(try_to_load_from_cache(SMOLLM2_HUB_NAME, "config.json"), str):
        return "ready, in the Hugging Face cache"
    return f"not here yet: the first `pageforge run` or `demo` fetches it (93 MB) into {folder}"


def _hub(ask: bool) -> str:
    if constants.HF_HUB_OFFLINE:
        return "not used: HF_HUB_OFFLINE is set"
    if not ask:
        return "not asked (`pageforge info --hub` asks)"
    try:
        get_hf_file_metadata(hf_hub_url(SMOLLM2_HUB_NAME, "config.json"), timeout=HUB_SECONDS)
    except Exception as error:  # from httpx or httpx2, whichever this huggingface_hub uses
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be reached ({first[0]})"
    return f"can be reached, at {constants.ENDPOINT}"


def _config() -> str:
    path = config_path()
    try:
        resolve()
    except SettingError as error:
        return f"broken: {error}"
    return str(path) if path.exists() else f"{path} (not there: all defaults)"


def _missing() -> list[dict[str, str]]:
    missing = []
    for packages in EXTRAS.values():
        absent = [name for name in packages if not importlib.util.find_spec(name)]
        if absent:
            missing.append(
                {
                    "what": f"{', '.join(absent)} (to get smollm2 without a hub)",
                    "how": f"pip install {' '.join(absent)}",
                }
            )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        how = (
            f"torch is built for {built}, but finds none: check the driver with nvidia-smi"
            if built
            else "on a machine with one, install torch as https://pytorch.org/get-started says"
        )
        missing.append({"what": "CUDA device", "how": how})
    else:
        if not is_elastic(torch.device("cuda")):
            missing.append(
                {
                    "what": "virtual memory on CUDA (pools take all their memory at once)",
                    "how": "pip install cuda-bindings, and a driver that supports it",
                }
            )
        if not importlib.util.find_spec("triton"):
            missing.append({"what": "triton (the GPU kernels)", "how": "pip install triton"})
    return missing
