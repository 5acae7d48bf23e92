from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cli.conftest import said

from pageforge.bench.questions import Question
from pageforge.bench.results import read_folder, read_results
from pageforge.bench.run import Run
from pageforge.cli import bench_all


@pytest.mark.parametrize("command", ["all", "kernels", "latency", "throughput"])
def test_help_has_examples(invoke, command: str) -> None:
    done = invoke("bench", command, "--help")
    assert done.exit_code == 0
    assert f"pageforge bench {command}" in said(done.stdout)
    assert "--out" in done.stdout


def test_bench_alone_lists_its_commands(invoke) -> None:
    done = invoke("bench")
    assert "kernels" in done.output
    assert "latency" in done.output
    assert "throughput" in done.output


def test_latency_on_the_cpu(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    ways = ("--way", "dynamic", "--way", "paged")
    sizes = ("--model", "tiny", "--batch", "1", "--steps", "4", "--only", "steps")
    arguments = ("--device", "cpu", *ways, *sizes)
    done = invoke("bench", "latency", *arguments, "--prompt", "5", "--out", out, "--commit", "abc")
    assert done.exit_code == 0, done.output
    assert "tiny, batch 1, prompt 5, 4 steps" in done.stdout
    found = read_results(out / "latency.jsonl")
    assert found.complete
    assert found.machine["commit"] == "abc"
    steps = [r for r in found.results if r["section"] == "steps"]
    assert [r["way"] for r in steps] == ["dynamic", "paged"]
    assert "cuDNN attention on" not in done.stdout


def test_all_questions(invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(run: Run) -> None:
        run.report.add(section="s", model=run.model, quick=run.quick)

    asked = {
        "one": Question("one", "One?", measure, 5),
        "two": Question("two", "Two?", measure, 5, needs_cuda=True),
    }
    monkeypatch.setattr(bench_all, "QUESTIONS", asked)
    out = tmp_path / "results"
    done = invoke("bench", "all", "--quick", "--device", "cpu", "--model", "gpt2", "--out", out)
    assert done.exit_code == 0, done.output
    one, two = read_folder(out)
    assert one.results == [{"section": "s", "model": "gpt2", "quick": True}]
    assert "needs a CUDA device" in two.results[0]["failure"]
    assert "two: RuntimeError: needs a CUDA device" in done.stdout
    assert done.stdout.index("one: One?") < done.stdout.index("two: Two?")


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
        (("latency", "--model", "gpt5"), 2, "expected one of gpt2"),
        (("latency", "--way", "magic"), 2, "expected one of dynamic"),
        (("latency", "--device", "cpu", "--out", "/nowhere/out"), 2, "no such folder"),
        (("latency", "--model", "tiny", "--device", "cpu", "--prompt", "200"), 2, "at most 119"),
        (("latency", "--only", "nothing"), 2, "expected one of steps, padded"),
        (("all",), 2, "Missing option '--out'"),
        (("all", "--model", "gpt5", "--out", "/nowhere/out"), 2, "expected one of gpt2"),
        (("all", "--device", "cpu", "--out", "/nowhere/out"), 2, "no such folder"),
        (("throughput", "--only", "everything"), 2, "expected one of first-token, uniform"),
        (("throughput", "--way", "magic"), 2, "expected one of engine, engine compiled"),
        (("throughput", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("latency", "--device", "toaster"), 1, "expected cpu or cuda"),
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
