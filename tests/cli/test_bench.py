from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.conftest import said

from pageforge.bench.results import read_folder, read_results


@pytest.mark.parametrize("command", ["kernels", "decode", "throughput"])
def test_help_has_examples(invoke, command: str) -> None:
    done = invoke("bench", command, "--help")
    assert done.exit_code == 0
    assert f"pageforge bench {command}" in said(done.stdout)
    assert "--out" in done.stdout


def test_bench_alone_lists_its_commands(invoke) -> None:
    done = invoke("bench")
    assert "kernels" in done.output
    assert "decode" in done.output
    assert "throughput" in done.output


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
