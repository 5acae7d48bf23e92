"""Memory of growing caches: what is recorded must be there, and what is not there must show."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from tests.bench.conftest import CPU, only
from transformers import DynamicCache
from transformers.cache_utils import Cache

from pageforge import PagedKVCache, PagePool
from pageforge.bench import memory_use, vram
from pageforge.bench.harness import Budget
from pageforge.bench.kv import ModelKV
from pageforge.bench.memory_use import Meter
from pageforge.bench.report import Report, cell
from pageforge.bench.run import Run
from pageforge.bench.vram_context import WAYS, VramBench, Way, static

ROWS, STEPS, PROMPT, PAGES, SHORT = 3, 20, 13, 12, 24
TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token of the tiny model: layers, K and V, heads, dims, fp32."""
NOISE = 4 << 20
"""What the process may take or give back beside a cache, in bytes."""


@pytest.fixture
def tiny(report: Report, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> VramBench:
    """Too small for the process's own comings and goings to be told apart, so nobody cleans up."""
    monkeypatch.setattr(memory_use, "give_back", lambda device: None)
    return VramBench(
        ModelKV.of("tiny", CPU),
        report,
        Console(file=screen, width=200),
        Budget(None),
        sequences=ROWS,
        steps=STEPS,
        prompt=PROMPT,
        pool_pages=PAGES,
        filled_at=(0, 10),
        ways={name: WAYS[name] for name in ("paged", "pageforge", "dynamic")}
        | {"static 24": static(SHORT)},
    )


def test_every_step_is_recorded(tiny: VramBench, screen: io.StringIO) -> None:
    vram.run(tiny)
    records = tiny.report.records
    assert not [r for r in records if "failure" in r]
    (setting,) = only(records, section="setting")
    assert (setting["token_bytes"], setting["page_bytes"]) == (TOKEN, 16 * TOKEN)
    for name in ("paged", "pageforge", "dynamic"):
        found = only(records, section="growth", way=name)
        assert [(r["step"], r["tokens"]) for r in found] == [
            (step, PROMPT + step) for step in range(STEPS + 1)
        ]
        for r in found:
            assert r["kv_bytes"] == ROWS * r["tokens"] * TOKEN
            taken = r["storage_bytes"] if r["mapped_bytes"] is None else r["mapped_bytes"]
            density = ROWS * 1e9 / taken if taken > 0 else None
            assert r["sequences_per_gb"] == pytest.approx(density)
            if name == "dynamic":
                assert (r["storage_bytes"], r["pages_bytes"]) == (r["kv_bytes"], None)
            else:
                pages = -(-r["tokens"] // 16)
                assert r["pages_bytes"] == ROWS * pages * 16 * TOKEN
                assert r["storage_bytes"] >= r["pages_bytes"]
    assert "3 sequences, prompts of 13 tokens" in screen.getvalue()


def test_a_static_cache_ends_where_it_is_full_and_never_grows(tiny: VramBench) -> None:
    vram.growth(tiny)
    found = only(tiny.report.records, section="growth", way="static 24")
    assert [r["tokens"] for r in found] == list(range(PROMPT, SHORT + 1))
    (size,) = {r["storage_bytes"] for r in found}
    lengths = 2 * 8  # each layer counts its tokens
    assert size == ROWS * SHORT * TOKEN + lengths


def test_all_pages_come_back(tiny: VramBench) -> None:
    vram.run(tiny)
    left = only(tiny.report.records, section="afterwards")
    assert [(r["way"], r["when"]) for r in left] == [
        ("paged", "freed"),
        ("paged", "trimmed"),
        ("pageforge", "freed"),
        ("pageforge", "trimmed"),
        ("dynamic", "freed"),
        ("static 24", "freed"),
    ]
    for r in left[:4]:
        assert r["pages_returned"] == r["pages_claimed"] == ROWS * 3  # 33 tokens


def test_a_pool_is_filled_until_it_has_no_page(tiny: VramBench) -> None:
    vram.most_sequences(tiny)
    found = {(r["way"], r["tokens"]): r for r in tiny.report.records}
    assert {key: r["sequences"] for key, r in found.items() if key[0] == "paged"} == {
        ("paged", 13): PAGES,
        ("paged", 23): PAGES // 2,
    }
    for tokens in (13, 23):
        ours = found["paged", tokens]
        assert ours["pages_claimed"] == ours["pages_returned"] == PAGES
        assert ours["storage_bytes"] >= PAGES * 16 * TOKEN
        for way, each in (("dynamic", tokens * TOKEN), ("static 24", SHORT * TOKEN + 16)):
            peer = found[way, tokens]
            assert peer["sequences"] == ours["storage_bytes"] // each
            assert peer["storage_bytes"] == peer["sequences"] * each


def test_what_holds_less_is_filled_no_further_than_it_can_hold(tiny: VramBench) -> None:
    tiny.filled_at = (SHORT - PROMPT + 1,)
    vram.most_sequences(tiny)
    assert {r["way"] for r in tiny.report.records} == {"paged", "dynamic"}


@pytest.mark.skipif(Meter(CPU).read().mapped_bytes is None, reason="this system does not tell")
def test_the_system_says_what_the_caches_say(report: Report) -> None:
    console = Console(file=io.StringIO())
    bench = VramBench(ModelKV.of("gpt2", CPU), report, console, Budget(None), sequences=4, steps=8)
    bench.ways = {name: WAYS[name] for name in ("paged", "dynamic", "static 512")}
    bench.filled_at = ()
    meter = Meter(CPU)
    vram.run(bench)
    for r in only(report.records, section="growth"):
        assert "failure" not in r
        assert abs(r["mapped_bytes"] - r["storage_bytes"]) < NOISE
        assert r["peak_bytes"] >= r["mapped_bytes"]
    assert all(r["mapped_bytes"] < NOISE for r in only(report.records, when="freed", way="dynamic"))
    assert meter.read().mapped_bytes < 2 * NOISE


# --- what is wrong must show ------------------------------------------------------------------


def test_a_way_that_fails_becomes_a_row_and_the_others_go_on(
    tiny: VramBench, screen: io.StringIO
) -> None:
    def absent(kv: ModelKV, pages: int) -> Cache:
        raise ImportError("not installed")

    class Breaks(DynamicCache):
        def update(self, key, value, layer, *args, **kwargs):
            if self.get_seq_length() > PROMPT + 4:
                raise MemoryError("no more")
            return super().update(key, value, layer)

    breaks = Way(lambda kv, pages: Breaks(config=kv.config))
    tiny.ways = {"absent": Way(absent), "breaks": breaks, "dynamic": WAYS["dynamic"]}
    vram.run(tiny)
    records = tiny.report.records
    assert only(records, section="growth", way="absent") == [
        {"section": "growth", "way": "absent", "failure": "absent: not installed"}
    ]
    *points, failed = only(records, section="growth", way="breaks")
    assert len(points) == 5
    assert failed["failure"] == "MemoryError: no more"
    assert len(only(records, section="growth", way="dynamic")) == STEPS + 1
    assert only(records, section="most-sequences", way="absent")[0]["failure"]
    assert "breaks: MemoryError: no more" in screen.getvalue()


def test_what_there_is_no_room_for_is_not_tried(
    tiny: VramBench, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row in its place: the static cache's, which is full from the first token on."""
    free = ROWS * (PROMPT + STEPS) * TOKEN  # in dynamic, to the byte
    monkeypatch.setattr(memory_use, "free_bytes", lambda device: free)
    tiny.ways = {"dynamic": WAYS["dynamic"], "static 40": static(40)}
    tiny.pool_pages, tiny.filled_at = ROWS * 3, (0,)  # 48 tokens a row
    vram.run(tiny)
    failed = [r for r in tiny.report.records if "failure" in r]
    needs = {
        ("growth", "static 40"): ROWS * 40 * TOKEN,
        ("most-sequences", "paged"): ROWS * 48 * TOKEN,
    }
    assert {(r["section"], r["way"]): r["failure"] for r in failed} == {
        where: f"MemoryError: needs {cell(size / 1e9)} GB, {cell(free / 1e9)} GB are free"
        for where, size in needs.items()
    }
    assert len(only(tiny.report.records, section="growth", way="dynamic")) == STEPS + 1
    assert "static 40: MemoryError: needs" in screen.getvalue()


def test_first_calls_are_not_tried_either(tiny: VramBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel would end the process before any case could fail."""
    monkeypatch.setattr(memory_use, "free_bytes", lambda device: 5_500_000_000)
    fed = []
    way = Way(WAYS["dynamic"].make, lambda kv, cache, rows, tokens: fed.append(rows))
    tiny.ways, tiny.sequences, tiny.filled_at = {"dynamic": way}, 10**6, ()
    vram.run(tiny)
    found = only(tiny.report.records, section="growth", way="dynamic")
    assert [r["failure"] for r in found] == ["MemoryError: needs 16.9 GB, 5.5 GB are free"]
    assert fed == []


def test_a_pool_that_says_too_little_is_not_believed(
    tiny: VramBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = PagePool.stats

    def lying(self):
        found = stats(self)
        object.__setattr__(found, "bytes_mapped", found.bytes_in_use - 1)
        return found

    monkeypatch.setattr(PagePool, "stats", lying)
    vram.growth(tiny)
    (failed,) = only(tiny.report.records, section="growth", way="paged")
    assert failed["failure"].startswith("ArithmeticError: storage: expected at least")


def test_a_cache_that_drops_tokens_is_not_believed(tiny: VramBench) -> None:
    class Forgetful(DynamicCache):
        def update(self, key, value, layer, *args, **kwargs):
            return super().update(key[:, :, :1], value[:, :, :1], layer)

    tiny.ways = {"forgetful": Way(lambda kv, pages: Forgetful(config=kv.config))}
    vram.run(tiny)
    found = only(tiny.report.records, way="forgetful")
    assert len(found) == 3
    assert all(r["failure"].startswith("ArithmeticError: storage") for r in found)


def test_pages_that_do_not_come_back_are_seen(
    tiny: VramBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def keep(self) -> None:
        kept.append(self)

    monkeypatch.setattr(PagedKVCache, "free", keep)
    vram.run(tiny)
    left = [r for r in tiny.report.records if r.get("pages_claimed")]
    assert len(left) == 4 + 2
    assert all(r["pages_returned"] == 0 for r in left)


def test_a_pool_that_never_ends_is_a_failure(
    tiny: VramBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.filled_at = (0,)
    monkeypatch.setattr(PagePool, "append", lambda self, tables, num_tokens, **kwargs: [])
    monkeypatch.setattr(ModelKV, "feed", lambda self, cache, rows, tokens: None)
    vram.most_sequences(tiny)
    (failed,) = tiny.report.records
    assert failed["failure"] == f"ArithmeticError: no OutOfPages from {PAGES} pages"


def test_what_there_is_no_time_for_is_named(tiny: VramBench) -> None:
    tiny.budget = Budget(0)
    vram.run(tiny)
    assert [r["section"] for r in tiny.report.records] == ["setting"]
    assert tiny.budget.left_out == [
        *(f"growth, {name}" for name in tiny.ways),
        *(f"most sequences, step {step}" for step in tiny.filled_at),
    ]


def test_sizes_of_a_run(report: Report) -> None:
    run = Run(CPU, report, Console(), Budget(None))
    bench = vram.bench_of(run)
    assert (bench.kv.name, bench.sequences, bench.steps, bench.prompt) == ("gpt2", 32, 500, 13)
    assert bench.pool_pages == 512
    assert list(bench.ways) == ["paged", "dynamic", "static 512", "static 1024"]
    quick = vram.bench_of(Run(CPU, report, Console(), Budget(None), "llama-8b", quick=True))
    assert (quick.kv.name, quick.pool_pages) == ("llama-8b", 512)
    assert quick.steps < bench.steps


def test_inference_mode_ends_with_the_run(tiny: VramBench) -> None:
    tiny.steps, tiny.filled_at = 1, ()
    vram.run(tiny)
    assert not torch.is_inference_mode_enabled()
