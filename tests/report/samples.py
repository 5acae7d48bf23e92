"""Small result files, as `pageforge bench` leaves them, with a failed row in each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
    for sizes in ("1024 pages of 589,824 bytes", "64 pages of 2 MiB"):
        yield {
            "section": "cache",
            "op": "swap_in",
            "sizes": sizes,
            "bytes": 603_979_776,
            "ceiling_bytes_per_s": 55e9,
            "candidate": "pageforge swap_in",
            "us": 11_745.0,
        }


def throughput() -> Iterator[Record]:
    """Two ways all at once, and at two rates of arrival."""
    case = {"workload": "uniform", "requests": 256}
    for way, rate in (("engine", 101_563.0), ("generate", 8_814.0)):
        low, high = 0.9 * rate, 1.1 * rate
        rates = {"tokens_per_s": rate, "tokens_per_s_low": low, "tokens_per_s_high": high}
        yield {"section": "throughput", **case, "way": way, **rates}
        for share in (0.25, 0.75):
            yield {
                "section": "arrivals",
                **case,
                "way": way,
                "load_percent": round(100 * share),
                "rate_per_s": share * rate / 128,
                "ttft_p50_ms": 20 / (1 - share),
                "ttft_p99_ms": 90 / (1 - share),
                "tpot_p50_ms": 2.5,
                "tpot_p99_ms": 4.0,
                "itl_p99_ms": 9.0,
                "goodput_per_s": share * rate / 150,
                "ttft_limit_ms": 500.0,
                "tpot_limit_ms": 40.0,
            }
    yield {"section": "throughput", **case, "way": "generate_batch", "failure": FAILURE}


def lifecycle() -> Iterator[Record]:
    """Two batches of five steps; at the end of each nothing is used, and nothing is full."""
    for batch in (1, 2):
        for step in range(5):
            used = 4 - step
            yield {
                "section": "timeline",
                "batch": batch,
                "step": step,
                "sequences": used,
                "utilisation": 0.8 if used else None,
                "pages_bytes": used * 589_824,
                "mapped_bytes": 6_291_456,
            }
    yield {"section": "reuse", "pages_second": 18, "pages_reused": 18}
    yield {"section": "afterwards", "when": "trimmed", "failure": FAILURE}


def parity() -> Iterator[Record]:
    """Two models; one way has the same bits."""
    for model in ("gpt2", "llama"):
        for way, difference in (("paged", 0.0), ("pageforge", 3e-6), ("one token lost", 2.4)):
            yield {
                "section": "parity",
                "model": model,
                "dtype": "float32",
                "way": way,
                "max_difference": difference,
                "same_argmax": 1.0 if difference < 1 else 0.9,
                "differences": [difference / (1 + step) for step in range(40)],
            }
    yield {"section": "parity", "model": "llama", "way": "engine", "failure": FAILURE}


def sharing() -> Iterator[Record]:
    """Beams of two ways."""
    for way, size in (("dynamic", 170_000_000), ("paged", 153_000_000)):
        pages = {"pages_shared": 4, "pages_used": 20, "pages_named": 60, "pages_copied": 9}
        held = {"cache_peak_bytes": size} | (pages if way == "paged" else {})
        yield {"section": "sharing", "case": "beams", "way": way, **held}
        for step in range(9):
            grown = size * (step + 1) // 9
            yield {"section": "steps", "case": "beams", "way": way, "step": step} | {
                "cache_bytes": grown
            }
    yield {"section": "sharing", "case": "beams", "way": "pageforge", "failure": FAILURE}


def sweep() -> Iterator[Record]:
    """Three page sizes; a pool that was too small for one of them."""
    for size in (8, 16, 256):
        for pool in ("ample", "1/10"):
            yield {
                "section": "workload",
                "pool": pool,
                "page_size": size,
                "tokens_per_s": 900.0 - size,
                "tokens_per_s_low": 800.0 - size,
                "tokens_per_s_high": 1000.0 - size,
                "pages_over_live": 1 + size / 200,
                "mapped_over_live": 1.1 + size / 200,
            }
        times = {"p25_ms": 5.0, "p50_ms": 6.0, "p75_ms": 7.0}
        yield {"section": "step", "way": "pageforge", "page_size": size, **times}
        yield {"section": "kernel", "shape": "1x8k", "page_size": size, "read_share": 0.9}
    yield {"section": "workload", "pool": "1/10", "page_size": 64, "failure": FAILURE}


def recording() -> Iterator[Record]:
    """A cache, which waits for nobody."""
    yield {"section": "source", "source": "cache", "model": "llama", "page_size": 16}
    for step in range(30):
        yield {
            "section": "step",
            "when": "step",
            "step": step,
            "pages_used": step // 2,
            "pages_cached": 0,
            "bytes_in_use": step // 2 * 8192,
            "bytes_mapped": 2_097_152,
            "running": 1,
            "tokens": 8 * step,
        }


def allocator() -> Iterator[Record]:
    """Two loads in three pools, and a stress that lost nothing."""
    counts = {"pages_claimed": 64_000, "pages_returned": 64_000, "leaks": 0}
    yield {"section": "stress", "cycles": 500, **counts}
    for load in ("at once", "evicting"):
        for size in (512, 100_000, 10_000_000):
            rates = {"pages_per_s": 9e6, "pages_per_s_low": 8e6, "pages_per_s_high": 9.5e6}
            calls = {"allocate_p99_us": 2.5, "release_p99_us": 1.5}
            yield {"section": "speed", "load": load, "pages_total": size, **rates, **calls}


SAMPLES = {
    "allocator": allocator,
    "kernels": kernels,
    "latency": latency,
    "lifecycle": lifecycle,
    "parity": parity,
    "recording": recording,
    "sharing": sharing,
    "sweep": sweep,
    "throughput": throughput,
    "vram": vram,
}

CUT_SHORT = "kernels"
"""A question whose run has no end in `write`."""

LEFT_OUT = "a case for which there was no time"


def write(folder: Path, machine: dict[str, Any] = CPU, questions: Collection[str] = ()) -> None:
    """A result file of each of `questions`, by default of each sample but one."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {name: question.title for name, question in QUESTIONS.items()}
    for question in questions or SAMPLES.keys() - {MISSING}:
        path = folder / f"{question}.jsonl"
        report = Report(question, titles.get(question, f"{question}?"), path, machine)
        for record in SAMPLES[question]():
            report.add(**record)
        if question != CUT_SHORT:
            report.end([LEFT_OUT])
