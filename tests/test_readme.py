"""The README's tables are those that the committed results make, and say what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.written import write

from pageforge.errors import ResultsError

readme_table = pytest.importorskip("benchmarks.readme_table")

H200 = {"device": "cuda", "gpu": "NVIDIA H200", "torch": "2.13", "commit": "abc"}
CPU = {"device": "cpu", "cpus": 2, "torch": "2.13", "commit": "def"}


def test_the_readme_and_the_results_are_up_to_date() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    made = readme_table.made(readme_table.read_sets(readme_table.CURRENT), text)
    stale = [path for path, wanted in made.items() if path.read_text(encoding="utf-8") != wanted]
    assert not stale, "python benchmarks/readme_table.py"


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """The block of a small set of every question on a GPU, and of a CPU that lacks most."""
    gpu, cpu = tmp_path / "h200" / "gpt2", tmp_path / "cpu" / "gpt2"
    write(gpu, "vram", *VRAM, machine=H200)
    write(gpu, "latency", *LATENCY, machine=H200)
    write(gpu, "throughput", *THROUGHPUT, machine=H200)
    write(gpu, "kernels", *KERNELS, machine=H200)
    write(gpu, "sharing", *SHARING, machine=H200)
    write(gpu, "lifecycle", *LIFECYCLE, machine=H200)
    write(gpu, "allocator", *ALLOCATOR, machine=H200)
    write(gpu, "parity", *PARITY, machine=H200)
    write(tmp_path / "h200" / "smollm2", "latency", *LATENCY[:1], machine=H200)
    write(cpu, "latency", *LATENCY[:2], machine=CPU)
    no_gpu = {"section": "kernels", "failure": "RuntimeError: needs a CUDA device"}
    write(cpu, "kernels", no_gpu, machine=CPU)
    titles = [title for title, _, _ in readme_table.TABLES]
    return readme_table.block(readme_table.read_sets(tmp_path), titles).splitlines()


def point(way: str, step: int, taken: int, peak: int) -> dict:
    sizes = {"mapped_bytes": taken * 10**6, "peak_bytes": peak * 10**6}
    return {"section": "growth", "way": way, "step": step, "tokens": 13 + step, **sizes}


VRAM = [
    point("paged", 0, 20, 25),
    point("paged", 7, 40, 45),
    point("dynamic", 0, 15, 16),
    point("dynamic", 7, 27, 54),
    point("static 1024", 0, 1200, 1200),
    {"section": "growth", "way": "static 512", "failure": "RuntimeError: no memory"},
    {"section": "afterwards", "way": "paged", "when": "trimmed", "mapped_bytes": 2 * 10**6},
    {
        "section": "most-sequences",
        "way": "paged",
        "tokens": 13,
        "sequences": 512,
        "storage_bytes": 301_000_000,
    },
    {
        "section": "most-sequences",
        "way": "static 512",
        "tokens": 13,
        "failure": "RuntimeError: no memory",
    },
]


def step(way: str, p50: float, p99: float, section: str = "steps", prompt: int = 448) -> dict:
    case = {"section": section, "batch": 8, "prompt": prompt, "way": way}
    return {**case, "p50_ms": p50, "p99_ms": p99}


LATENCY = [
    step("dynamic", 5.0, 10.0),
    step("pageforge", 5.5, 11.0),
    step("fast", 9.0, 9.0, prompt=10),
    step("paged", 7.0, 8.0, section="padded"),
    {"section": "steps", "batch": 8, "prompt": 448, "way": "fast", "failure": "RuntimeError: why"},
    {
        "section": "generate",
        "way": "fast",
        "batch": 32,
        "new_tokens": 128,
        "tokens_per_s": 20_304.0,
        "over_dynamic": 4.628,
    },
    {"section": "generate", "way": "paged", "batch": 32, "failure": "RuntimeError: why"},
]
THROUGHPUT = [
    {
        "section": "throughput",
        "workload": "uniform",
        "requests": 256,
        "way": "engine",
        "tokens_per_s": 101_563.0,
        "tokens_per_s_low": 99_000.0,
        "tokens_per_s_high": 102_000.0,
        "over_generate": 11.5,
        "first_run_s": 1.17,
        "floor_share": 0.52,
    },
    {
        "section": "throughput",
        "workload": "uniform",
        "requests": 256,
        "way": "generate_batch",
        "failure": "RuntimeError: why",
    },
    {
        "section": "arrivals",
        "workload": "sharegpt",
        "way": "engine",
        "load_percent": 90,
        "rate_per_s": 12.5,
        "achieved_per_s": 11.25,
        "ttft_p50_ms": 20.0,
        "ttft_p99_ms": 90.0,
        "tpot_p50_ms": 5.0,
        "tpot_p99_ms": 6.0,
        "goodput_share": 0.99,
    },
    {"section": "throughput", "failure": "RuntimeError: as a whole"},
    {"section": "rollout", "failure": "RuntimeError: why"},
    {"section": "host", "running": 9, "failure": "RuntimeError: why"},
    {"section": "arrivals", "workload": "none", "way": "engine", "load_percent": 50},
    {"section": "first-token", "when": "again", "first_token_s": 0.16},
    {
        "section": "shared-prefix",
        "requests": 1024,
        "shared_tokens": 2048,
        "computed_over_once": 1.0004,
    },
    {"section": "rollout", "requests": 64, "peak_over_once": 1.0},
    {
        "section": "squeezed",
        "way": "squeezed",
        "requests": 256,
        "over_as_many": 1.66,
        "same": 221,
    },
    {"section": "squeezed", "way": "ample", "requests": 256, "over_as_many": 9.0, "same": 256},
    {"section": "host", "running": 1024, "host_ms": 0.87, "plan_ms": 0.038, "idle": 0.01},
    {"section": "host", "running": 8, "host_ms": 60.0, "plan_ms": 0.05, "idle": None},
]
LIFECYCLE = [
    {"section": "reuse", "pages_reused": 85, "pages_second": 85},
    {"section": "reuse", "failure": "RuntimeError: why"},
]
ALLOCATOR = [
    {"section": "speed", "load": "at once", "pages_total": size, "pages_per_s": rate}
    for size, rate in ((512, 4.5e6), (10**7, 4.25e6))
]
PARITY = [
    {
        "section": "parity",
        "model": model,
        "way": "paged",
        "dtype": dtype,
        "max_difference": difference,
        "parted": parted,
    }
    for model, dtype, difference, parted in (
        ("tiny-gpt2", "float32", 0.0, 0),
        ("tiny-llama", "float32", 1e-6, 1),
        ("tiny-llama", "float16", 1.0, 1),
    )
]
PARITY.append(
    {"section": "parity", "way": "paged", "dtype": "float32", "failure": "RuntimeError: why"}
)
KERNELS = [
    {
        "section": "decode summary",
        "peer": "fa3",
        "shapes": 80,
        "geometric_mean": 1.474,
        "worst": 0.87,
        "slower_than_peer": 3,
    },
    {"section": "decode summary", "heads": "32/8 D128", "large_shapes": 9, "worst_share": 0.91},
    {
        "section": "decode summary",
        "heads": "12/12 D64",
        "large_shapes": 9,
        "worst_share": 0.89,
        "worst_over_read": 1.12,
    },
    {"section": "cache", "op": "gather_kv", "bytes_per_s": 2e12, "share_of_ceiling": 0.5},
    {"section": "cache", "op": "gather_kv", "bytes_per_s": 4e12, "share_of_ceiling": 0.97},
    {"section": "prefill", "context": 0, "candidate": "pageforge", "us": 100.0},
    {"section": "prefill", "context": 0, "candidate": "fa3 p16", "us": 90.0},
    {"section": "prefill", "context": 0, "candidate": "fa3 p256", "us": 80.0},
    {"section": "prefill", "context": 0, "candidate": "fa3 p64", "us": None},
    {"section": "invariant summary", "geometric_mean": 1.02, "worst": 1.11},
]
SHARING = [
    {
        "section": "sharing",
        "case": "beams",
        "way": "paged",
        "cache_peak_bytes": 4_000_000,
        "dynamic_over": 3.5,
        "pages_shared": 7,
        "pages_copied": 2,
        "same_tokens": 1.0,
    },
]


@pytest.mark.parametrize(
    "row",
    [
        # what the sets are
        "| [cpu, gpt2](benchmarks/results/current/cpu/gpt2) | 2 CPU cores | 2.13 |  | def |",
        "| [h200, gpt2](benchmarks/results/current/h200/gpt2) | NVIDIA H200 | 2.13 |  | abc |",
        # memory: what is worse stands beside what is better; a way that failed has no figure
        "| h200 | 0 | 13 | 20 | 15 |  | 1,200 | 25 | 16 | 0.75 | 60 |",
        "| h200 | 7 | 20 | 40 | 27 |  |  | 45 | 54 | 0.675 |  |",
        "| h200 | after `free()` and `trim()` |  | 2 |",
        "| h200 | 13 | 301 | 512 |  | failed |  |",
        # a decode step
        "| h200, gpt2 | 8 | 5 (10) |  |  |  | 5.5 (11) | failed |  |",
        "| h200, gpt2 | 8, left-padded |  |  |  | 7 (8) |  |  |  |",
        "| h200, smollm2 | 8 | 5 (10) |  |  |  |  |  |  |",
        "| cpu, gpt2 | 8 | 5 (10) |  |  |  | 5.5 (11) |  |  |",
        "| h200, gpt2 | `generate`, 32 rows, 128 new tokens each, fast: tokens/s | "
        "20,304 (4.63 of DynamicCache's) |",
        # throughput
        "| h200, gpt2: 256 uniform | engine | 101,563 | 99,000 to 102,000 | 11.5 | 1.17 | 0.52 |",
        "| h200, gpt2: 256 uniform | generate_batch | RuntimeError: why |  |  |  |",
        "| h200, gpt2: sharegpt | engine | 12.5 | 11.2 | 20 (90) | 5 (6) | - (-) | 0.99 |",
        # the engine
        "| h200, gpt2 | construct to first token, s: again | 0.16 |",
        "| h200, gpt2 | 1,024 requests that share 2,048 tokens: computed / each once | 1.000 |",
        "| h200, gpt2 | 64 prompts, several samples each: pages / prompts stored once | 1.000 |",
        "| h200, gpt2 | a tenth of the pages: tokens/s / as many rows in ample ones "
        "(outputs that are the same) | 1.66 (221 of 256) |",
        "| h200, gpt2 | a step of 1,024 rows, ms: host's work (its planning) | 0.87 (0.038) |",
        "| h200, gpt2 | a step of 1,024 rows: device idle | 0.010 |",
        # pages
        "| h200, gpt2 | pages of a second batch that were the first's | 85 of 85 |",
        "| h200, gpt2 | allocator, at once, pools of 512 to 10,000,000 pages: M pages/s | "
        "4.25 to 4.5 |",
        "| h200, gpt2 | `paged` against DynamicCache in fp32: largest difference of logits "
        "(models with the same tokens) | 0 to 1.0e-06 (1 of 2) |",
        # kernels
        "| h200 | decode, times as fast as fa3, 80 shapes | 1.47 | 0.87 at worst; slower in 3 ",
        "| h200 | decode of 64 MB or more, share of the read ceiling |  | 0.89 at worst |",
        "| h200 | decode of 64 MB or more, times as long as a plain read of as many bytes |",
        "| h200 | `gather_kv`, share of the copy ceiling (GB/s) |  | 0.5 to 0.97 (2,000 to 4,000) ",
        "| h200 | prefill, times as fast as FlashAttention-3 |  | 0.8 |",
        "| h200 | `batch_invariant=True`, times as long | 1.02 | 1.11 at worst |",
        # sharing
        "| h200, gpt2: beams | paged | 4 | 3.5 | 7 | 2 | 1 |",
        # what there is not
        "Not measured: cpu, gpt2; h200, smollm2.",
        "Not measured: cpu, gpt2 (RuntimeError: needs a CUDA device).",
    ],
)
def test_what_the_files_say_is_in_the_block(lines: list[str], row: str) -> None:
    assert [line for line in lines if line.startswith(row)], "\n".join(lines)


def test_one_load_of_those_that_arrive_is_shown(lines: list[str]) -> None:
    assert not [line for line in lines if line.startswith("| h200, gpt2: none")]


def test_tables_are_whole(lines: list[str]) -> None:
    """Every row has as many cells as its head has."""
    columns = None
    for line in lines:
        cells = line.replace("\\|", "").count("|")
        if line.startswith("|---"):
            columns = cells
        elif line.startswith("|") and columns is not None:
            assert cells == columns, line
        elif not line.startswith("|"):
            columns = None


def test_results_of_another_model_than_the_folder_s_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "smollm2", "latency", {**LATENCY[0], "model": "tiny"})
    with pytest.raises(ResultsError, match=r"expected results of smollm2.* got tiny"):
        readme_table.read_sets(tmp_path)


def test_a_file_with_nothing_to_show(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "gpt2", "latency", {"section": "ceilings"})
    lines = readme_table.block(readme_table.read_sets(tmp_path)).splitlines()
    assert lines[lines.index("### A decode step") + 2] == "Not measured."


def test_without_results_there_is_nothing(tmp_path: Path) -> None:
    assert readme_table.block(readme_table.read_sets(tmp_path)) == ""
    assert readme_table.block(readme_table.read_sets(tmp_path / "absent")) == ""


def test_only_what_is_between_the_markers_changes() -> None:
    begin, end = readme_table.BEGIN, readme_table.END
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert readme_table.updated(text, "new\n") == f"before\n{begin}\nnew\n{end}\nafter\n"
    for broken in ("no markers", f"{end} {begin}", begin):
        with pytest.raises(ValueError, match="expected the lines"):
            readme_table.updated(broken, "new")
