from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.bench.written import write
from tests.cli.conftest import said

from pageforge.bench.check import problems
from pageforge.bench.questions import QUESTIONS, Question
from pageforge.bench.results import read_folder, read_results
from pageforge.bench.run import Run
from pageforge.cli import bench_all

COMMANDS = ("all", "check", "compare", *QUESTIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(invoke, command: str) -> None:
    done = invoke("bench", command, "--help")
    assert done.exit_code == 0
    assert f"pageforge bench {command}" in said(done.stdout)
    assert ("--out" in done.stdout) is (command not in ("check", "compare"))
    if command in QUESTIONS:
        assert "a file in this folder, called as the question (vram.jsonl)" in said(done.stdout)


def test_bench_alone_lists_its_commands(invoke) -> None:
    done = invoke("bench")
    assert all(command in done.output for command in COMMANDS)


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


def test_latency_in_a_dtype(invoke, tmp_path: Path) -> None:
    sizes = ("--model", "tiny", "--batch", "1", "--steps", "4", "--only", "steps")
    arguments = ("--device", "cpu", "--way", "pageforge", *sizes, "--dtype", "bfloat16")
    done = invoke("bench", "latency", *arguments, "--prompt", "5", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = read_results(tmp_path / "latency.jsonl").results
    assert {r["model"] for r in found if "model" in r} == {"tiny-bfloat16"}
    assert not any(r.get("failure") for r in found)


def test_vram_on_the_cpu(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    ways = ("--way", "dynamic", "--way", "paged")
    sizes = ("--model", "tiny", "-s", "2", "--prompt", "5", "--steps", "3", "--pool-pages", "4")
    done = invoke("bench", "vram", "--device", "cpu", *ways, *sizes, "--out", out)
    assert done.exit_code == 0, done.output
    assert "tiny: 2 sequences, prompts of 5 tokens" in done.stdout
    found = read_results(out / "vram.jsonl")
    assert found.complete
    grown = [r for r in found.results if r["section"] == "growth"]
    assert [(r["way"], r["tokens"]) for r in grown] == [
        (way, tokens) for way in ("paged", "dynamic") for tokens in (5, 6, 7, 8)
    ]
    assert not problems([found])


def test_lifecycle_on_the_cpu(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    sizes = ("--model", "tiny", "-s", "2", "--prompt", "5", "--steps", "20")
    done = invoke("bench", "lifecycle", "--device", "cpu", *sizes, "--out", out)
    assert done.exit_code == 0, done.output
    assert "tiny: batch 2" in done.stdout
    found = read_results(out / "lifecycle.jsonl")
    assert found.complete
    (reuse,) = (r for r in found.results if r["section"] == "reuse")
    assert reuse["reused_share"] == 1
    assert not problems([found])


def test_allocator(invoke, tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = invoke("bench", "allocator", "--quick", "--pages", "100", "--out", out)
    assert done.exit_code == 0, done.output
    assert "64,000 pages claimed, 64,000 returned; no leaks, no errors" in done.stdout
    found = read_results(out / "allocator.jsonl")
    assert found.complete
    assert {r["pages_total"] for r in found.results if r["section"] == "speed"} == {100}
    assert not problems([found])


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


def test_compare(invoke, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 3.0)):
        write(tmp_path / name, "vram", {"section": "s", "value_ms": value})
    done = invoke("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "its one case  value_ms  1  3  3.000      -" in done.stdout
    for name in ("a", "b"):
        write(tmp_path / name / "gpt2", "vram", {"section": "s", "value_ms": 5.0})
    write(tmp_path / "a" / "old", "vram", {"section": "s", "value_ms": 7.0})
    done = invoke("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "its one case  value_ms  1  3  3.000      -" in done.stdout
    assert "gpt2: what is compared" in done.stdout
    assert "the same in both: 1 field, all of 1 section\n" in done.stdout
    assert "only in A: the set old\n" in done.stdout
    (tmp_path / "b" / "vram.jsonl").write_text("something else\n")
    done = invoke("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 1
    assert "vram.jsonl, line 1: not JSON" in said(done.stderr)


def test_check(invoke, tmp_path: Path) -> None:
    record = {"section": "memory", "pages_claimed": 5, "pages_returned": 5}
    write(tmp_path, "latency", record)
    done = invoke("bench", "check", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout == "1 file, 1 result: nothing wrong\n"
    write(tmp_path / "h200" / "gpt2", "latency", record, record)
    mine = write(tmp_path / "h200", "recording", record)
    done = invoke("bench", "check", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout == "2 files, 3 results: nothing wrong\n"
    assert said(done.stderr) == f"{mine}: left out, a recording of a run"
    write(tmp_path / "h200" / "gpt2", "latency", {**record, "pages_returned": 4})
    done = invoke("bench", "check", tmp_path)
    assert done.exit_code == 1
    assert "pages_claimed 5, but pages_returned 4" in said(done.stderr)


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


def test_requests_that_arrive_on_the_cpu(invoke, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--only", "arrivals", "--way", "engine", "--requests", "3")
    done = invoke("bench", "throughput", *arguments, "--burstiness", "0.5", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "tiny, azure-chat, arriving: 3 requests" in done.stdout
    found = [r for r in read_results(tmp_path / "throughput.jsonl").results if "ttft_p50_ms" in r]
    assert len(found) == 9
    assert {(r["burstiness"], r["way"], r["requests"]) for r in found} == {(0.5, "engine", 3)}


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
        (("vram", "--way", "magic"), 2, "expected one of paged, pageforge, dynamic"),
        (("vram", "--steps", "0"), 2, "greater than or equal to 1"),
        (("lifecycle", "--model", "gpt5"), 2, "expected one of gpt2"),
        (("allocator", "--pages", "8"), 2, "greater than or equal to 16"),
        (("kernels", "--only", "nothing"), 2, "expected one of decode, ragged"),
        (("kernels", "--peer-wheels", "/nowhere"), 2, "does not exist"),
        (("latency", "--model", "gpt5"), 2, "expected one of gpt2"),
        (("latency", "--way", "magic"), 2, "expected one of dynamic"),
        (("latency", "--device", "cpu", "--out", "/nowhere/out"), 2, "no such folder"),
        (("latency", "--model", "tiny", "--device", "cpu", "--prompt", "200"), 2, "at most 119"),
        (("latency", "--only", "nothing"), 2, "expected one of steps, padded"),
        (("latency", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("all",), 2, "Missing option '--out'"),
        (("all", "--model", "gpt5", "--out", "/nowhere/out"), 2, "expected one of gpt2"),
        (("all", "--device", "cpu", "--out", "/nowhere/out"), 2, "no such folder"),
        (("throughput", "--only", "everything"), 2, "expected one of first-token, uniform"),
        (("throughput", "--way", "magic"), 2, "expected one of engine, engine compiled"),
        (("throughput", "--burstiness", "0"), 2, "than or equal to 0.01"),
        (("throughput", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("parity", "--model", "gpt5"), 2, "expected one of tiny-gpt2"),
        (("parity", "--dtype", "int8"), 2, "expected one of float32, float16"),
        (("sharing", "--only", "nothing"), 2, "expected one of beams, samples"),
        (("sharing", "--branches", "1"), 2, "--branches"),
        (("sweep", "--only", "nothing"), 2, "expected one of step, kernel"),
        (("sweep", "--page-size", "17"), 2, "expected one of 8, 16, 32"),
        (("compare", "/nowhere", "/nowhere"), 2, "does not exist"),
        (("latency", "--device", "toaster"), 2, "expected cpu, cuda or cuda:N, got toaster"),
        (("latency", "--out", "/proc/x"), 2, "a folder that can be written to, got /proc/x ("),
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
