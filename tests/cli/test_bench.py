from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.conftest import said

from pageforge.bench.questions import QUESTIONS
from pageforge.bench.results import read_folder, read_results


@pytest.mark.parametrize("command", [*QUESTIONS])
def test_help_has_examples(invoke, command: str) -> None:
    done = invoke("bench", command, "--help")
    assert done.exit_code == 0
    assert f"pageforge bench {command}" in said(done.stdout)
    assert "--out" in done.stdout


def test_bench_alone_lists_its_commands(invoke) -> None:
    done = invoke("bench")
    assert all(name in done.output for name in QUESTIONS)


def test_decode_on_the_cpu(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ("--device", "cpu", "--way", "dynamic", "--way", "paged", "--batch", "1")
    done = invoke("bench", "decode", *arguments, "--prompt", "5", "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    assert "batch 1, prompt 5, 8 steps" in done.stdout
    found = read_results(out / "decode.jsonl")
    assert found.complete
    assert found.machine["commit"] == "abc"
    steps = [r for r in found.results if r["section"] == "step"]
    assert [r["way"] for r in steps] == ["dynamic", "paged"]
    assert "cuDNN attention on" not in done.stdout


def test_throughput_on_the_cpu(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ("--device", "cpu", "--only", "uniform", "--way", "engine", "--requests", "5")
    done = invoke("bench", "throughput", *arguments, "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    assert "tiny, uniform: 5 requests" in done.stdout
    (found,) = read_folder(out)
    assert found.question == "throughput"
    assert found.machine["commit"] == "abc"
    (record,) = [r for r in found.results if r["section"] == "throughput"]
    assert (record["way"], record["requests"]) == ("engine", 5)
    assert record["tokens_per_s"] > 0


def test_parity_on_the_cpu(invoke, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--model", "tiny-gpt2", "--dtype", "float32", "--steps", "2")
    done = invoke("bench", "parity", *arguments, "--out", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "tiny-gpt2: 2 rows, prompt 40, 2 steps" in done.stdout
    found = read_results(tmp_path / "results" / "parity.jsonl")
    assert {r["dtype"] for r in found.results} == {"float32"}
    assert [r["max_difference"] for r in found.results if r["way"] == "paged"] == [0]


def test_sharing_on_the_cpu(invoke, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--quick", "--only", "samples", "--branches", "2")
    done = invoke("bench", "sharing", *arguments, "--out", tmp_path / "results")
    assert done.exit_code == 0, done.output
    assert "tiny, samples: 2 sequences" in done.stdout
    found = read_results(tmp_path / "results" / "sharing.jsonl")
    assert {r["case"] for r in found.results} == {"samples"}
    assert {r["pages_left"] for r in found.results if r["section"] == "sharing"} == {None, 0}


def test_sweep_on_the_cpu(invoke, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--quick", "--only", "step", "--page-size", "32")
    done = invoke("bench", "sweep", *arguments, "--out", tmp_path / "results")
    assert done.exit_code == 0, done.output
    found = read_results(tmp_path / "results" / "sweep.jsonl")
    assert [(r["section"], r["page_size"]) for r in found.results] == [("step", 32)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("kernels", "--only", "nothing"), 2, "expected one of decode, ragged"),
        (("kernels", "--peer-wheels", "/nowhere"), 2, "does not exist"),
        (("decode", "--model", "gpt5"), 2, "expected one of gpt2"),
        (("decode", "--way", "magic"), 2, "expected one of dynamic"),
        (("decode", "--device", "cpu", "--out", "/nowhere/out"), 2, "no such folder"),
        (("decode", "--device", "cpu", "--prompt", "200"), 2, "expected at most 119"),
        (("throughput", "--only", "everything"), 2, "expected one of first-token, uniform"),
        (("throughput", "--way", "magic"), 2, "expected one of engine, engine compiled"),
        (("throughput", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("parity", "--model", "gpt5"), 2, "expected one of tiny-gpt2"),
        (("parity", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("sharing", "--only", "nothing"), 2, "expected one of beams, samples"),
        (("sharing", "--branches", "1"), 2, "--branches"),
        (("sweep", "--only", "nothing"), 2, "expected one of step, kernel"),
        (("sweep", "--page-size", "17"), 2, "expected one of 8, 16, 32"),
        (("decode", "--device", "toaster"), 1, "expected cpu or cuda"),
    ],
)
def test_bad_input(invoke, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = invoke("bench", *arguments)
    assert done.exit_code == code
    assert message in said(done.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_kernels_need_a_gpu(invoke, tmp_path: Path) -> None:
    done = invoke("bench", "kernels", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "finds no CUDA device" in said(done.stderr)
    assert not (tmp_path / "out").exists()
