from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from pageforge._version import __version__
from pageforge.cli import info
from pageforge.cli.settings import config_path
from pageforge.store import backend_of


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(info, "get_hf_file_metadata", fail)


def test_json(invoke) -> None:
    found = json.loads(invoke("info", "--json").stdout)
    assert found["versions"]["pageforge"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["pool"] == backend_of(torch.device("cpu"))
    assert cpu["bytes_free"] > 0
    assert "not asked" in found["hub"]


def test_text(invoke) -> None:
    shown = invoke("info").stdout
    for word in ("python", "torch", "transformers", "triton", "device cpu", "smollm2", "config"):
        assert word in shown


def test_the_hub_is_asked_only_when_told(invoke) -> None:
    assert "no network in this test" in invoke("info", "--hub").stdout


def test_missing_extras_are_named_with_the_remedy(invoke, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        info.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    missing = json.loads(invoke("info", "--json").stdout)["missing"]
    assert any("gguf" in m["what"] and "pip install gguf" in m["how"] for m in missing)


def test_a_broken_config_file_is_shown_not_fatal(invoke) -> None:
    config_path().parent.mkdir(parents=True)
    config_path().write_text("page_size = 12")
    done = invoke("info", "--json")
    assert done.exit_code == 0
    assert "broken: " in json.loads(done.stdout)["config"]
