"""Small result files, as `pageforge bench` leaves them, with a failed row in each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pageforge.bench.questions import QUESTIONS
from pageforge.bench.report import Report

Record = dict[str, Any]

CPU = {
    "device": "cpu",
    "pageforge": "0.1.0",
    "commit": "0123456789ab",
    "cpus": 2,
    "torch": "2.13.0",
    "transformers": "5.24.0",
}
H200 = {**CPU, "device": "cuda", "gpu": "NVIDIA H200", "commit": "ba9876543210"}

MISSING = "throughput"
"""A question that has no file in `write`."""

FAILURE = "OutOfMemoryError: <b>no</b> room & no script </script>"
"""Text from outside, that must stay text."""

STEPS = 300


def vram() -> Iterator[Record]:
    """Two ways over many steps, two numbers of tokens."""
    yield {"section": "setting", "model": "gpt2", "sequences": 32, "prompt_tokens": 13}
    for way, first, grown in (("paged", 15_000_000, 37_000), ("static 512", 603_000_000, 0)):
        for step in range(STEPS):
            yield {
                "section": "growth",
                "way": way,
                "step": step,
                "mapped_bytes": first + grown * step,
                "peak_bytes": None,
                "sequences_per_gb": 32e9 / (first + grown * step),
            }
    yield {"section": "growth", "way": "dynamic", "failure": FAILURE}
    for tokens in (13, 113):
        for way, count in (("paged", 512 * 13 // tokens), ("static 512", 16)):
            yield {"section": "most-sequences", "way": way, "tokens": tokens, "sequences": count}


def latency() -> Iterator[Record]:
    """Three ways, two sizes of batches."""
    for batch in (1, 32):
        case = {"model": "gpt2", "batch": batch, "prompt": 448, "timed_steps": 500}
        for way, p50 in (("dynamic", 5.45), ("fast", 0.69), ("paged", 8.9)):
            times = {"p50_ms": p50, "p95_ms": 1.3 * p50, "p99_ms": 1.9 * p50}
            yield {"section": "steps", **case, "way": way, **times}
        yield {"section": "steps", **case, "way": "static compiled", "failure": FAILURE}


def kernels() -> Iterator[Record]:
    """Two shapes; of one peer two variants."""
    case = {"heads": "32/8 D128", "dtype": "float16"}
    for shape, size in (("1x8k", 33_554_432), ("8x4k", 134_217_728)):
        for candidate, share in (("pageforge p16", 0.8), ("fa3 p64", 0.7), ("fa3 p16", 0.4)):
            floor = size / 4.6e6
            yield {
                "section": "decode",
                **case,
                "shape": shape,
                "bytes": size,
                "floor_us": floor,
                "candidate": candidate,
                "us": floor / share,
                "failure": None,
            }
    yield {"section": "decode", **case, "candidate": "flashinfer", "us": None, "failure": FAILURE}


SAMPLES = {"vram": vram, "latency": latency, "kernels": kernels}

CUT_SHORT = "kernels"
"""A question whose run has no end in `write`."""

LEFT_OUT = "a case for which there was no time"


def write(folder: Path, machine: dict[str, Any] = CPU) -> None:
    """A result file of each sample."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {name: question.title for name, question in QUESTIONS.items()}
    for question, records in SAMPLES.items():
        path = folder / f"{question}.jsonl"
        report = Report(question, titles.get(question, f"{question}?"), path, machine)
        for record in records():
            report.add(**record)
        if question != CUT_SHORT:
            report.end([LEFT_OUT])
