"""Models to measure on: what loading them leaves behind."""

from __future__ import annotations

import pytest
import torch
from tests.bench.conftest import CPU
from transformers.utils import logging as transformers_logging

from pageforge.bench import models
from pageforge.bench.models import make_model, trained_model
from pageforge.errors import ModelNotFound


def test_loading_draws_no_bars(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **options):
        for _ in transformers_logging.tqdm(range(3), desc="Loading weights"):
            pass
        if name == "absent":
            raise ModelNotFound("nowhere")
        return make_model("tiny", CPU), None

    monkeypatch.setattr(models, "load_model", load)
    trained_model("tiny", CPU, torch.float32)
    with pytest.raises(ModelNotFound):
        trained_model("absent", CPU, torch.float32)
    assert capsys.readouterr().err == ""
    load("tiny")  # bars are drawn as before
    assert "Loading weights" in capsys.readouterr().err
