"""The sections on the CPU, where ops and peers are their references: the logic, not the speed."""

from __future__ import annotations

import io
import itertools
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.bench.conftest import CPU, TINY, only

from pageforge import ops
from pageforge.bench import attention, cache_ops, ceilings, kernels, peers, prefill
from pageforge.bench.context import Bench
from pageforge.bench.harness import Budget, measure
from pageforge.bench.problems import PagedKV, Problem
from pageforge.ops import reference


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "RAGGED", {"one long": (50, 3, 17)})
    monkeypatch.setattr(attention, "RAGGED_HEADS", (TINY,))
    for name, value in {
        "HEADS": (TINY,),
        "DTYPE": torch.float32,
        "COPIED_PAGES": (2, 5),
        "GATHERED": {"2x20": (2, 20)},
        "WRITTEN_TOKENS": (3, 20),
        "SWAPPED": {"4 pages": (4, 100)},
    }.items():
        monkeypatch.setattr(cache_ops, name, value)
    for name, value in {
        "HEADS": TINY,
        "DTYPE": torch.float32,
        "CHUNK": 8,
        "CONTEXTS": (0, 20),
        "MIXED": ([20] * 3, 8, 16),
    }.items():
        monkeypatch.setattr(prefill, name, value)
    small = 1 << 16
    monkeypatch.setattr(kernels, "read_ceiling", lambda d: ceilings.read_ceiling(d, small))
    monkeypatch.setattr(kernels, "copy_ceiling", lambda d: ceilings.copy_ceiling(d, small))


def test_all_sections(bench: Bench, screen: io.StringIO) -> None:
    kernels.run(bench)
    records = bench.report.records
    assert bench.read > 1
    assert {r["section"] for r in records} >= {"decode", "ragged", "invariant", "cache", "prefill"}
    ours = [r for r in records if str(r.get("candidate")).startswith("pageforge")]
    assert all(r["failure"] is None and r["us"] > 0 for r in ours), ours
    assert len(only(ours, section="decode")) == 2
    (row,) = only(ours, section="decode", shape="3x33")
    assert row["bytes"] == 3 * 33 * 2 * 16 * 2 * 4
    assert row["floor_us"] == pytest.approx(row["bytes"] / bench.read * 1e6)
    assert row["error"] < 1e-5
    absent = only(records, section="decode", candidate="fa3 p16")
    assert all(r["failure"].startswith("absent") for r in absent)
    (mixed,) = only(records, section="mixed summary")
    assert mixed["mixed_over_parts"] > 0
    (cost,) = only(records, section="invariant summary")
    assert cost["shapes"] == 2
    assert {r["op"] for r in only(records, section="cache")} == {
        "copy_pages",
        "gather_kv",
        "write_kv",
        "swap_out",
        "swap_in",
    }
    assert "batch_invariant costs" in screen.getvalue()


def test_large_steps_stand_beside_a_plain_read(
    bench: Bench, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(attention, "LARGE_BYTES", 1)
    monkeypatch.setattr(attention, "READS", ((64, 2),))
    device = types.SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    read: list[torch.Tensor] = []
    monkeypatch.setattr(attention, "stream", lambda source, *_: read.append(source))
    attention.decode(bench)
    records = only(bench.report.records, section="decode", candidate="read 64x2")
    assert records and all(record["failure"] is None for record in records)
    # Each call reads what a call of ours has to, and they take turns as ours do.
    assert {part.numel() * part.element_size() for part in read} == {r["bytes"] for r in records}
    assert len({part.data_ptr() for part in read}) > len(records)
    (summary,) = [r for r in bench.report.records if r.get("worst_over_read")]
    assert summary["large_shapes"] == len(records)
    assert "over a plain read" in screen.getvalue()


def test_a_section_that_breaks_does_not_end_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(bench: Bench) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(
        kernels, "SECTIONS", {"broken": broken, "cache": cache_ops.cache_ops, "not asked": broken}
    )
    kernels.run(bench, ["broken", "cache"])
    assert only(bench.report.records, section="broken") == [
        {"section": "broken", "failure": "RuntimeError: no"}
    ]
    assert only(bench.report.records, section="cache")
    assert not only(bench.report.records, section="not asked")


def test_what_there_is_no_time_for_is_named(bench: Bench) -> None:
    bench.budget = Budget(0)
    kernels.run(bench)
    assert bench.budget.left_out == list(kernels.SECTIONS)
    for section in kernels.SECTIONS.values():
        section(bench)
    cases = {"decode 4/2 D16 float32 1x40", "gather_kv", "mixed batch"}
    assert cases <= set(bench.budget.left_out)


@pytest.mark.parametrize("fault", ["nan", "lost token"])
def test_a_wrong_output_is_no_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    right = ops.write_and_attend

    def wrong(*args, **kwargs) -> torch.Tensor:
        if fault == "nan":
            return right(*args, **kwargs) * torch.nan
        return right(*args[:6], args[6] - 1, *args[7:], **kwargs)

    monkeypatch.setattr(ops, "write_and_attend", wrong)
    attention.decode(bench)
    found = only(bench.report.records, section="decode", candidate="pageforge p16")
    assert all("wrong output" in r["failure"] for r in found)
    assert all(r["us"] != r["us"] for r in found)
    assert not only(bench.report.records, peer="fa3")


def test_a_row_that_depends_on_its_neighbours_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.write_and_attend
    monkeypatch.setattr(
        ops,
        "write_and_attend",
        lambda query, *args, **kwargs: right(query, *args, **kwargs) * (1 + 1e-6 * len(query)),
    )
    attention.invariant(bench)
    found = only(bench.report.records, candidate="pageforge invariant", shape="3x33")
    assert "other bits" in found[0]["failure"]


# --- peers --------------------------------------------------------------------------------------


def fake_fa3() -> types.ModuleType:
    """FlashAttention-3's interface over the reference."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, **more
    ):
        assert causal
        queries, heads, dim = q.shape[1:]
        bounds = torch.arange(len(q) + 1) * queries
        out, _ = reference.attend(
            q.reshape(-1, heads, dim),
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            page_table,
            cache_seqlens,
            bounds,
            scale=softmax_scale,
        )
        return out.view(q.shape)

    module = types.ModuleType(peers.FA3)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.get_scheduler_metadata = lambda *args, **kwargs: None
    return module


def fake_flashinfer() -> types.ModuleType:
    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            assert layout == "HND"

        def plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            dim,
            page_size,
            *,
            sm_scale,
            **more,
        ):
            rows = [indices[a:b] for a, b in itertools.pairwise(indptr.tolist())]
            self.table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            pages = indptr[1:] - indptr[:-1]
            self.lens = (pages - 1) * page_size + last_page_len
            self.scale = sm_scale

        def run(self, query, pages):
            bounds = torch.arange(len(query) + 1)
            return reference.attend(query, *pages, self.table, self.lens, bounds, scale=self.scale)[
                0
            ]

    module = types.ModuleType(peers.FLASHINFER)
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    return module


@pytest.mark.parametrize("lengths", [(33, 33), (40, 3, 17)])
@pytest.mark.parametrize(
    "fake", [fake_fa3, fake_flashinfer], ids=["FlashAttention-3", "FlashInfer"]
)
def test_peers_are_given_the_problem_they_are_checked_on(
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[[], types.ModuleType],
    lengths: tuple[int, ...],
) -> None:
    module = fake()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    problem = Problem(TINY, lengths, torch.float32, CPU, 20_000)
    builders = peers.decode_peers(problem, PagedKV(problem, 16))
    timings = measure(builders, CPU, repeats=1)
    kind = "fa3" if module.__name__ == peers.FA3 else "flashinfer"
    mine = {name: timing for name, timing in timings.items() if name.startswith(kind)}
    assert len(mine) == (6 if kind == "fa3" else 2)
    assert all(timing.ok and timing.error < 1e-5 for timing in mine.values()), mine
    assert timings["sdpa flash"].ok if len(set(lengths)) == 1 else "sdpa flash" not in timings


def test_prefill_beside_a_peer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, peers.FA3, fake_fa3())
    prefill.prefill(bench)
    found = only(bench.report.records, section="prefill")
    assert all(r["failure"] is None and r["error"] < 1e-5 for r in found)
    assert {r["candidate"] for r in found} == {"pageforge", "fa3 p16", "fa3 p128", "fa3 p256"}


def test_decode_is_compared_with_the_best_of_a_peer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    monkeypatch.setitem(sys.modules, peers.FA3, fake_fa3())
    attention.decode(bench)
    (summary,) = only(bench.report.records, section="decode summary", peer="fa3")
    assert summary["shapes"] == 2
    records = bench.report.records
    ratios = []
    for shape in bench.shapes:
        found = only(records, section="decode", shape=shape)
        mine = next(r["us"] for r in found if r["candidate"] == "pageforge p16")
        ratios.append(min(r["us"] for r in found if r["candidate"].startswith("fa3")) / mine)
    assert summary["worst"] == pytest.approx(min(ratios))
    assert summary["geometric_mean"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert "fa3:" in screen.getvalue()


def test_causal_flops() -> None:
    problem = Problem(TINY, (10,), torch.float32, CPU)
    seen = sum(range(8, 11))  # the last three tokens see 8, 9 and 10
    assert prefill.Ragged(problem, (3,)).flops == 2 * 2 * TINY.query * TINY.dim * seen


def test_the_checked_queries_of_a_mixed_batch() -> None:
    problem = Problem(TINY, (5, 6, 20), torch.float32, CPU)
    index, rows, seen = prefill.Ragged(problem, (1, 1, 8)).checked()
    assert index.tolist() == [0, 2, 6, 9]
    assert rows.tolist() == [0, 2, 2, 2]
    assert seen.tolist() == [5, 13, 17, 20]


def test_wheels_are_unpacked_and_gone_again(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer_for_tests.py", "answer = 42")
    before = list(sys.path)
    with peers.wheels(tmp_path) as names:
        assert names == ["peer-1.0-py3-none-any.whl"]
        assert __import__("a_peer_for_tests").answer == 42
    assert sys.path == before
    del sys.modules["a_peer_for_tests"]
    with peers.wheels(None) as names:
        assert names == []
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="got none"), peers.wheels(empty):
        pass
